/* device.h - functions that only a library for GPUs has, in addition to the kernels of pyops.h: a device, its memory, streams,
 * graphs.
 *
 * The Python side parses this file like pyops.h.  Addresses of device memory are integers, since the host cannot dereference
 * them.  One device and, except for captures, one stream at a time: freed memory may be reused at once, because its next user
 * is queued later on the same stream.  A second stream, see pyops_stream_wait, must use memory that is never freed.
 */
#ifndef PYOPS_DEVICE_H
#define PYOPS_DEVICE_H
#include "pyops.h"
#ifdef __cplusplus
extern "C" {
#endif

/* clang-format off */
/* Number of devices.  0 and an error with the reason if there is no driver or no device. */
PYOPS_API pyops_status pyops_device_count(int32_t *count);
/* Select the device for all later calls.  Fails if this build contains no code for it. */
PYOPS_API pyops_status pyops_device_open(int32_t device);
PYOPS_API const char  *pyops_device_name(void);
/* Of the selected device: compute capability (9, 0), multiprocessors; bytes of memory, free and total. */
PYOPS_API pyops_status pyops_device_properties(int32_t *major, int32_t *minor, int32_t *multiprocessors);
PYOPS_API pyops_status pyops_device_memory(int64_t *free, int64_t *total);
/* Kernels of attention in bfloat16, for comparisons: 0 by size, 1 mma.sync always, 2 wgmma wherever it supports the call. */
PYOPS_API pyops_status pyops_set_attention(int32_t kernels);
/* How the blocks of a GRU exchange a step's results, for comparisons: 0 by device and size, 1 through global memory always. */
PYOPS_API pyops_status pyops_set_exchange(int32_t exchange);
/* Whether two blocks of a product by wgmma share loads by multicast, for comparisons: 0 by size, 1 never, 2 always. */
PYOPS_API pyops_status pyops_set_multicast(int32_t multicast);
/* Whether a kernel may start before the last one of its stream has ended: 0 if PYOPS_EARLY_START is set and the device can do it,
 * 1 never, 2 always.  2 is an error without capability 9.0, code for it in this build, and CUDA 12.3. */
PYOPS_API pyops_status pyops_set_early_start(int32_t early_start);
/* The bytes of logits that the output layer stores at once, for tests: 0 is 1 GiB.  It changes the size of its `work`. */
PYOPS_API pyops_status pyops_set_logits(int64_t bytes);

/* ---- memory ---- */
PYOPS_API pyops_status pyops_device_malloc(uint64_t *address, int64_t bytes);      /* PYOPS_NO_MEMORY: *address is unchanged */
PYOPS_API pyops_status pyops_device_free(uint64_t address);
/* Copy to the device through pinned memory.  Returns when the bytes at `from` may change again, which is before they arrive. */
PYOPS_API pyops_status pyops_device_upload(uint64_t to, const void *from, int64_t bytes, void *stream);
/* Copy from the device.  Synchronises the stream, and returns the fault that a kernel reported. */
PYOPS_API pyops_status pyops_device_download(void *to, uint64_t from, int64_t bytes, void *stream);
PYOPS_API pyops_status pyops_device_copy(uint64_t to, uint64_t from, int64_t bytes, void *stream);
PYOPS_API pyops_status pyops_device_zero(uint64_t to, int64_t bytes, void *stream);

/* ---- streams and graphs ---- */
PYOPS_API pyops_status pyops_stream_create(uint64_t *stream);
PYOPS_API pyops_status pyops_stream_destroy(uint64_t stream);
PYOPS_API pyops_status pyops_stream_synchronize(void *stream);                     /* returns a fault, like a download */
/* Let work that is queued on `stream` later wait for the work that is queued on `other` now.  During a capture of `other`, it
 * joins `stream` to the capture. */
PYOPS_API pyops_status pyops_stream_wait(void *stream, void *other);
/* Between begin and end, work on the stream is recorded and not executed. */
PYOPS_API pyops_status pyops_graph_begin(void *stream);
PYOPS_API pyops_status pyops_graph_end(uint64_t *graph, void *stream);
PYOPS_API pyops_status pyops_graph_launch(uint64_t graph, void *stream);
PYOPS_API pyops_status pyops_graph_free(uint64_t graph);

#ifdef __cplusplus
}
#endif
#endif
