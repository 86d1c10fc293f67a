// replay.cu - tell a stream a recorded list of kernel calls; captured meanwhile, they are a graph.
//
// The calls are those of csrc/replay_table.inc, written by csrc/replay.awk from pyops.h.
#include "internal.cuh"
#include "replay_table.inc"

// With `seconds`, each action is waited for, and timed by events on the device.
extern "C" pyops_status pyops_replay(const pyops_action *actions, const pyops_value *values, double *seconds, int64_t *at,
                                     int64_t from, int64_t to, void *stream) {
    cudaEvent_t before = nullptr, after = nullptr;
    if (seconds && (cudaEventCreate(&before) != cudaSuccess || cudaEventCreate(&after) != cudaSuccess))
        return pyops_fail(PYOPS_DEVICE_ERROR, "replay: no events to measure with");
    pyops_status status = PYOPS_OK;
    for (int64_t i = from; i < to && !status; i++) {
        at[0] = i;
        status = check_action(actions, i);
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
