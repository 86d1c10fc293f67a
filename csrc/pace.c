/* pace.c - shares of threads that follow their speeds.
 *
 * All threads wait for one whose core is slower, or whose core has another program on its second hyperthread.  So the shares of
 * work that is divided beforehand follow the speeds of the threads in the products before it.  Each number is computed by one
 * thread in any case, so this changes no bits.
 */
#include "internal.h"

pyops_pace *pyops_pace_of(int64_t threads) {
    static _Thread_local pyops_pace own;
    if (threads > PYOPS_PACED) return NULL;
    if (own.threads != threads) {
        for (int64_t t = 0; t < threads; t++) own.shares[t] = 1.0 / (double)threads;
        /* in a test build the first thread is drawn to be slower or faster at first */
        own.shares[0] *= (double)PYOPS_TUNED(pace_first, 16, 4, 64, 1) / 16;
    }
    own.threads = threads;
    return &own;
}

/* Follow by a quarter: what slows a thread often ends within a product.  No share falls below a quarter of the mean, so that its
 * thread is measured with enough work. */
void pyops_follow(pyops_pace *p) {
    double all = 0.0, sum = 0.0;
    for (int64_t t = 0; t < p->threads; t++) {
        if (p->speeds[t] == 0.0) return; /* a thread without work cannot be compared */
        all += p->speeds[t];
    }
    for (int64_t t = 0; t < p->threads; t++) {
        const double share = 0.75 * p->shares[t] + 0.25 * p->speeds[t] / all, least = 0.25 / (double)p->threads;
        sum += p->shares[t] = share > least ? share : least;
    }
    for (int64_t t = 0; t < p->threads; t++) p->shares[t] /= sum;
}

/* Where a part begins. */
static int64_t begin_of(const pyops_pace *p, int64_t part, int64_t parts, int64_t first, int64_t members, int64_t n,
                        int64_t unit) {
    if (part == parts) return n;
    double before = (double)part, all = (double)parts;
    if (p) {
        before = all = 0.0;
        for (int64_t t = 0; t < parts * members; t++) {
            all += p->shares[first + t];
            if (t < part * members) before += p->shares[first + t];
        }
    }
    return pyops_min((int64_t)((double)n / (double)unit * before / all + 0.5) * unit, n);
}

pyops_range pyops_part_of(const pyops_pace *p, int64_t part, int64_t parts, int64_t first, int64_t members, int64_t n,
                          int64_t unit) {
    return (pyops_range){begin_of(p, part, parts, first, members, n, unit),
                         begin_of(p, part + 1, parts, first, members, n, unit)};
}
