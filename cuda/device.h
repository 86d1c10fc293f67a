/* device.h - what only a library for GPUs offers, beside the kernels of pyops.h: a device, its memory, streams, graphs.
 *
 * Read by the Python side as pyops.h is.  Addresses of device memory are numbers: the host has no use for them as pointers.
 * One device and, but for captures, one stream at a time: memory that a stream has been told to use may be handed out again
 * at once, since what uses it next stands behind in the same stream.
 */
#ifndef PYOPS_DEVICE_H
#define PYOPS_DEVICE_H
#include "pyops.h"
#ifdef __cplusplus
extern "C" {
#endif

/* How many devices there are; none, with the reason as a text of an error, where there is no driver or no device. */
PYOPS_API pyops_status pyops_device_count(int32_t *count);
/* Use a device from now on.  Fails where this build has no code for it. */
PYOPS_API pyops_status pyops_device_open(int32_t device);
PYOPS_API const char  *pyops_device_name(void);
/* Of the device in use: version of its instructions (9, 0), multiprocessors, bytes of memory that are free and in all. */
PYOPS_API pyops_status pyops_device_properties(int32_t *major, int32_t *minor, int32_t *multiprocessors);
PYOPS_API pyops_status pyops_device_memory(int64_t *free, int64_t *total);
/* What the operands of matrix products are rounded to: 0 float32, 1 TF32, 2 bfloat16.  Sums stay float32. */
PYOPS_API pyops_status pyops_set_precision(int32_t precision);

/* ---- memory ---- */
PYOPS_API pyops_status pyops_device_malloc(uint64_t *address, int64_t bytes);      /* PYOPS_NO_MEMORY: neither is changed */
PYOPS_API pyops_status pyops_device_free(uint64_t address);
/* To the device, through pinned memory: returns when the bytes at `from` may change again, which is before they arrive. */
PYOPS_API pyops_status pyops_device_upload(uint64_t to, const void *from, int64_t bytes, void *stream);
/* From the device: waits for all that the stream was told to do, and fails with the fault that a kernel reported. */
PYOPS_API pyops_status pyops_device_download(void *to, uint64_t from, int64_t bytes, void *stream);
PYOPS_API pyops_status pyops_device_copy(uint64_t to, uint64_t from, int64_t bytes, void *stream);
PYOPS_API pyops_status pyops_device_zero(uint64_t to, int64_t bytes, void *stream);

/* ---- streams and graphs ---- */
PYOPS_API pyops_status pyops_stream_create(uint64_t *stream);
PYOPS_API pyops_status pyops_stream_destroy(uint64_t stream);
PYOPS_API pyops_status pyops_stream_synchronize(void *stream);                     /* and fails with a fault, as a download does */
/* Between begin and end, what the stream is told is written down and not done. */
PYOPS_API pyops_status pyops_graph_begin(void *stream);
PYOPS_API pyops_status pyops_graph_end(uint64_t *graph, void *stream);
PYOPS_API pyops_status pyops_graph_launch(uint64_t graph, void *stream);
PYOPS_API pyops_status pyops_graph_free(uint64_t graph);

#ifdef __cplusplus
}
#endif
#endif
