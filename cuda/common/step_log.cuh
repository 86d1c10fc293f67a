// step_log.cuh - an entry in the log of training steps.
#pragma once
#include "internal.cuh"

// valid NULL: 0
DEVICE void write_entry(float *log, int64_t place, const float *loss, const int32_t *valid, float norm) {
    float *const entry = log + 3 * place;
    entry[0] = loss[0];
    entry[1] = valid ? static_cast<float>(valid[0]) : 0.0f;
    entry[2] = norm;
}
