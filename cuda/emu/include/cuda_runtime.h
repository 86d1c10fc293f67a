#include "../emu.h"
