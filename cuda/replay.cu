// replay.cu - tell a stream a recorded list of kernel calls; captured meanwhile, they are a graph.
//
// The calls are those of csrc/replay.c, written by csrc/replay.awk from pyops.h.
#include <cstring>
#include "internal.cuh"

#define KERNEL(number, name, call) \
    static pyops_status call_##name(const pyops_value *v, void *stream) { return call; }
#include "replay_calls.inc"
#undef KERNEL

static const struct { const char *name; pyops_status (*call)(const pyops_value *, void *); } kernels[] = {
#define KERNEL(number, name, call) {#name, call_##name},
#include "replay_calls.inc"
#undef KERNEL
};
static constexpr int64_t KERNELS = sizeof kernels / sizeof *kernels;

extern "C" int64_t pyops_kernel_number(const char *name) {
    for (int64_t i = 0; i < KERNELS; i++)
        if (!strcmp(name, kernels[i].name)) return i;
    return -1;
}

// With `seconds`, each action is waited for, and timed by events on the device.
extern "C" pyops_status pyops_replay(const pyops_action *actions, const pyops_value *values, double *seconds, int64_t *at,
                                     int64_t from, int64_t to, void *stream) {
    cudaEvent_t before = nullptr, after = nullptr;
    if (seconds && (cudaEventCreate(&before) != cudaSuccess || cudaEventCreate(&after) != cudaSuccess))
        return pyops_fail(PYOPS_DEVICE_ERROR, "replay: no events to measure with");
    pyops_status status = PYOPS_OK;
    for (int64_t i = from; i < to && !status; i++) {
        at[0] = i;
        if (actions[i].kernel < 0 || actions[i].kernel >= KERNELS) {
            status = pyops_fail(PYOPS_BAD_ARGUMENT, "replay: action %lld has kernel %lld of %lld", LL(i), LL(actions[i].kernel), LL(KERNELS));
            break;
        }
        if (seconds) cudaEventRecord(before, stream_of(stream));
        status = kernels[actions[i].kernel].call(values + actions[i].first_value, stream);
        if (seconds) {
            float milliseconds = 0.0f;
            cudaEventRecord(after, stream_of(stream));
            cudaEventSynchronize(after);
            cudaEventElapsedTime(&milliseconds, before, after);
            seconds[i] = 1e-3 * static_cast<double>(milliseconds);
        }
    }
    if (before) cudaEventDestroy(before);
    if (after) cudaEventDestroy(after);
    return status;
}
