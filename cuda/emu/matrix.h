// matrix.h - the product of one warp within a wgmma, for async.cpp, which knows when it lands.
#pragma once
#include "engine.h"

namespace emu {
struct WgmmaOfLane { const Wgmma *product; float *accumulators; };
void multiply_warpgroup(void *const lanes[32], unsigned mask);          // the warp operation, on WgmmaOfLane
}
