/* replay.c - run a recorded list of kernel calls, also on other arrays; measure the peak throughput of the machine.
 *
 * A call through Python costs microseconds, as much as a small kernel.  A recorded step is an array of actions, with only this
 * loop between them.  replay.awk generates the calls from pyops.h.
 */
#include <time.h>
#include "internal.h"
#include "replay_table.inc"

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

pyops_status pyops_replay(const pyops_action *actions, const pyops_value *values, double *seconds, int64_t *at, int64_t from,
                          int64_t to, void *stream) {
    for (int64_t i = from; i < to; i++) {
        at[0] = i;
        pyops_status status = check_action(actions, i);
        if (status) return status;
        const double start = seconds ? now() : 0.0;
        status = kernels[actions[i].kernel].call(values + actions[i].first_value, stream);
        if (status) return status;
        if (seconds) seconds[i] = now() - start;
    }
    return PYOPS_OK;
}

static pyops_status run_recording(const char *who, const pyops_recording *recording, char *const *arrays) {
    const int64_t count = recording->value_count;
    PYOPS_REQUIRE(count >= 0 && count <= PYOPS_RECORDED_VALUES, "%s: value_count=%lld, expected 0 to %d", who, LL(count),
                  PYOPS_RECORDED_VALUES);
    pyops_value values[PYOPS_RECORDED_VALUES];          /* a copy, since another thread may run the recording */
    for (int64_t i = 0; i < count; i++) values[i] = recording->values[i];
    for (const pyops_place *place = recording->places, *end = place + recording->place_count; place < end; place++)
        values[place->value].pointer = arrays[place->array] + place->offset;
    int64_t at;
    return pyops_replay(recording->actions, values, NULL, &at, 0, recording->action_count, NULL);
}

pyops_status pyops_run_recording(const pyops_recording *recording, void *y, void *z, void *a, void *b, void *c, void *work) {
    return run_recording("run_recording", recording, (char *[]){y, z, a, b, c, work});
}

pyops_status pyops_run_recording_1(const pyops_recording *recording, void *y, void *a, void *b) {
    _Alignas(64) char work[PYOPS_RECORDED_WORK];
    return run_recording("run_recording_1", recording, (char *[]){y, NULL, a, b, NULL, work});
}

pyops_status pyops_fma_loop(double *flops, int64_t n, void *stream) {
    (void)stream;
    PYOPS_REQUIRE(n >= 0, "fma_loop: n=%lld, expected at least 0", LL(n));
    const pyops_kernels *k = pyops_active();
    double sum = 0.0;
    #pragma omp parallel
    {
        const double mine = k->fma_loop(n);
        #pragma omp atomic                                /* clang exports a symbol for a reduction */
        sum += mine;
    }
    flops[0] = sum;
    return PYOPS_OK;
}
