// replay.cu - enqueue a recorded list of kernel calls on a stream; under stream capture they become a graph.
//
// csrc/replay_table.inc has the table of calls; csrc/replay.awk generates them from pyops.h.
#include "internal.cuh"

// The table refers to every kernel of pyops.h.  Weak references, so that a kernel without an implementation in cuda/ is an
// error of the call alone: its address is null, and the library links and loads without it.
#define KERNEL(number, name, call) extern "C" decltype(name) name __attribute__((weak));
#include "replay_calls.inc"
#undef KERNEL
#include "replay_table.inc"

static bool is_implemented(int64_t kernel) {
    static void *const ADDRESSES[] = {
#define KERNEL(number, name, call) reinterpret_cast<void *>(name),
#include "replay_calls.inc"
#undef KERNEL
    };
    return ADDRESSES[kernel];
}

// With `seconds`, wait for each action and time it with events on the device.
extern "C" pyops_status pyops_replay(const pyops_action *actions, const pyops_value *values, double *seconds, int64_t *at,
                                     int64_t from, int64_t to, void *stream) {
    cudaEvent_t before = nullptr, after = nullptr;
    if (seconds && (cudaEventCreate(&before) != cudaSuccess || cudaEventCreate(&after) != cudaSuccess))
        return pyops_fail(PYOPS_DEVICE_ERROR, "replay: cannot create events for timing");
    pyops_status status = PYOPS_OK;
    for (int64_t i = from; i < to && !status; i++) {
        at[0] = i;
        status = check_action(actions, i);
        if (!status && !is_implemented(actions[i].kernel))
            status = pyops_fail(PYOPS_DEVICE_ERROR, "%s: the CUDA library has no such kernel", kernels[actions[i].kernel].name);
        if (status) break;
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
