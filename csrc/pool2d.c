/* pool2d.c - the maximum or the average of each window of a plane.
 *
 * Threads share planes.  A window inside the plane is the common case: rows and columns outside are cut off once per window.
 */
#include <math.h>
#include "internal.h"

#define SIZES \
    int64_t planes, int64_t H, int64_t W, int64_t Ho, int64_t Wo, int64_t kh, int64_t kw, int64_t stride_h, int64_t stride_w, \
        int64_t pad_h, int64_t pad_w

/* The steps [from, to) of a window that starts at `first` and are inside an axis of n elements. */
static pyops_range inside(int64_t first, int64_t steps, int64_t dilation, int64_t n) {
    const int64_t from = first < 0 ? (dilation - 1 - first) / dilation : 0;
    const int64_t to = n > first ? pyops_min(steps, (n - first + dilation - 1) / dilation) : 0;
    return (pyops_range){from, pyops_max(from, to)};
}

#define REAL float
#define NAMED(kernel) pyops_##kernel
#define TEXT(kernel) #kernel
#include "pool2d.inc"
#undef REAL
#undef NAMED
#undef TEXT

/* doubles, for checks of gradients */
#define REAL double
#define NAMED(kernel) pyops_##kernel##_double
#define TEXT(kernel) #kernel "_double"
#include "pool2d.inc"
