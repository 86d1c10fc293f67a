// emu.h - compile CUDA C++ with g++ and run it on the CPU, for tests: see docs/emulator.md.  The files in include/ carry
// NVIDIA's names, so that a kernel says #include <cuda_runtime.h> in either build.
#pragma once
#include "types.h"
#include "runtime.h"
#include "engine.h"
#include "language.h"
