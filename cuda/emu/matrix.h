// matrix.h - the product of one warp within a wgmma; async.cpp decides when it completes.
#pragma once
#include "engine.h"

namespace emu {
struct WgmmaOfLane {
    const Wgmma *product;
    float *accumulators;
};
void multiply_warpgroup(void *const lanes[32], unsigned mask);          // the warp operation, on WgmmaOfLane
}
