// stream.cpp - streams, events and graphs.
//
// A stream is a queue of work.  It runs the work at once, or, with EMU_LAZY=1, only when something waits for it: a program
// that reads a result too early then always reads NaN.  During a capture, the work is added to a graph.
#include <algorithm>
#include <chrono>
#include <deque>
#include <memory>
#include <vector>
#include "host.h"
#include "settings.h"

struct CUgraph_st {
    std::vector<emu::Work> nodes;
    cudaStreamCaptureMode mode;
    cudaStream_t origin;
    bool invalidated = false;                        // invalidated by an operation that a capture does not allow
};
struct CUgraphExec_st { std::vector<emu::Work> nodes; };
struct CUstream_st {
    bool blocking;                              // synchronises with the legacy stream
    cudaGraph_t capture = nullptr;
    std::deque<emu::Work> queue;
};
struct CUevent_st {
    struct Record {
        bool done = false;
        std::chrono::steady_clock::time_point time;
    };
    std::shared_ptr<Record> record;             // the latest one; NULL counts as done
    cudaStream_t stream = nullptr;
    cudaGraph_t capture = nullptr;              // the capture in which it was recorded, if any
};

namespace emu {
std::recursive_mutex runtime;
static CUstream_st legacy{true, nullptr, {}};   // the stream NULL
static std::vector<cudaStream_t> streams;

// Run the work of a stream in order, all of it, or until an event is done: later work may wait for the stream that waits now.
static void finish(cudaStream_t stream, const CUevent_st::Record *until = nullptr) {
    while (!stream->queue.empty() && !(until && until->done)) {
        const Work work = std::move(stream->queue.front());
        stream->queue.pop_front();
        work();
    }
}
void finish_all_streams() {
    finish(&legacy);
    for (cudaStream_t stream : streams) finish(stream);
}

cudaError_t unsafe_while_capturing() {
    for (cudaStream_t stream : streams)
        if (stream->capture && stream->capture->mode != cudaStreamCaptureModeRelaxed) {
            stream->capture->invalidated = true;
            return fail(cudaErrorStreamCaptureUnsupported);
        }
    return cudaSuccess;
}

static bool known(cudaStream_t stream) { return !stream || std::find(streams.begin(), streams.end(), stream) != streams.end(); }

cudaError_t enqueue(cudaStream_t stream, Work work) {
    if (!known(stream)) return fail(cudaErrorInvalidResourceHandle);
    if (stream && stream->capture) {
        if (stream->capture->invalidated) return fail(cudaErrorStreamCaptureInvalidated);
        stream->capture->nodes.push_back(std::move(work));
        return cudaSuccess;
    }
    for (cudaStream_t other : streams)
        if (!stream && other->capture && other->blocking) {
            other->capture->invalidated = true;
            return fail(cudaErrorStreamCaptureImplicit);
        }
    if (!settings().lazy) {
        work();
        return cudaSuccess;
    }
    if (!stream) {
        for (cudaStream_t other : streams)
            if (other->blocking) finish(other);
    } else if (stream->blocking) {
        finish(&legacy);
    }
    (stream ? stream : &legacy)->queue.push_back(std::move(work));
    return cudaSuccess;
}
}
using namespace emu;

// ---- streams ----------------------------------------------------------------------------------------------------
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    Inside inside(runtime);
    if (const cudaError_t error = absent()) return error;
    *stream = new CUstream_st{flags != cudaStreamNonBlocking, nullptr, {}};
    streams.push_back(*stream);
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithFlags(stream, cudaStreamDefault); }

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    Inside inside(runtime);
    if (!stream || !known(stream)) return fail(cudaErrorInvalidResourceHandle);
    finish(stream);
    streams.erase(std::find(streams.begin(), streams.end(), stream));
    delete stream;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    Inside inside(runtime);
    if (const cudaError_t error = absent()) return error;
    if (!known(stream)) return fail(cudaErrorInvalidResourceHandle);
    if (stream && stream->capture) {
        stream->capture->invalidated = true;
        return fail(cudaErrorStreamCaptureUnsupported);
    }
    if (!stream || stream->blocking) finish(&legacy);
    if (stream) {
        finish(stream);
    } else {
        for (cudaStream_t other : streams)
            if (other->blocking) finish(other);
    }
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    Inside inside(runtime);
    if (!known(stream)) return fail(cudaErrorInvalidResourceHandle);
    if (stream && stream->capture) {
        stream->capture->invalidated = true;
        return fail(cudaErrorStreamCaptureUnsupported);
    }
    return (stream ? stream : &legacy)->queue.empty() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaDeviceSynchronize() {
    Inside inside(runtime);
    if (const cudaError_t error = absent()) return error;
    if (const cudaError_t error = unsafe_while_capturing()) return error;
    finish_all_streams();
    return cudaSuccess;
}

// ---- events -----------------------------------------------------------------------------------------------------
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    if (const cudaError_t error = absent()) return error;
    *event = new CUevent_st;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    Inside inside(runtime);
    auto record = std::make_shared<CUevent_st::Record>();
    event->record = record;
    event->stream = stream;
    event->capture = stream ? stream->capture : nullptr;
    return enqueue(stream, [record] {
        record->time = std::chrono::steady_clock::now();
        record->done = true;
    });
}
// Run the work that the event depends on.  In a graph there is none left, since nodes run in the order of their capture.
static void finish_until(const std::shared_ptr<CUevent_st::Record> &record, cudaStream_t stream) {
    if (record && !record->done && known(stream)) finish(stream ? stream : &legacy, record.get());
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    Inside inside(runtime);
    if (!known(stream)) return fail(cudaErrorInvalidResourceHandle);
    auto is_captured_there = [=](cudaStream_t other) { return other->capture == event->capture; };
    if (event->capture && std::any_of(streams.begin(), streams.end(), is_captured_there)) {    // the stream joins the capture
        if (!stream) return fail(cudaErrorStreamCaptureImplicit);
        stream->capture = event->capture;
        return cudaSuccess;
    }
    return enqueue(stream, [record = event->record, from = event->stream] { finish_until(record, from); });
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    Inside inside(runtime);
    if (const cudaError_t error = unsafe_while_capturing()) return error;
    finish_until(event->record, event->stream);
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    Inside inside(runtime);
    if (const cudaError_t error = unsafe_while_capturing()) return error;
    return event->record && !event->record->done ? cudaErrorNotReady : cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    Inside inside(runtime);
    if (!from->record || !to->record) return fail(cudaErrorInvalidResourceHandle);
    if (!from->record->done || !to->record->done) return fail(cudaErrorNotReady);
    *milliseconds = std::chrono::duration<float, std::milli>(to->record->time - from->record->time).count();
    return cudaSuccess;
}

// ---- functions of the host --------------------------------------------------------------------------------------
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    Inside inside(runtime);
    return enqueue(stream, [=] {
        DeviceMemoryOpen open;                      // it may be work of the device
        function(data);
    });
}

// ---- graphs -----------------------------------------------------------------------------------------------------
// The work of a node is fixed at its capture, including copies of kernel arguments, as on the device.
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    Inside inside(runtime);
    if (!known(stream)) return fail(cudaErrorInvalidResourceHandle);
    if (!stream || stream->capture) return fail(cudaErrorStreamCaptureUnsupported);
    stream->capture = new CUgraph_st{{}, mode, stream};
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    Inside inside(runtime);
    *graph = nullptr;
    if (!stream || !known(stream)) return fail(cudaErrorInvalidResourceHandle);
    const cudaGraph_t captured = stream->capture;
    if (!captured || captured->origin != stream) return fail(cudaErrorStreamCaptureUnmatched);
    for (cudaStream_t other : streams)
        if (other->capture == captured) other->capture = nullptr;
    if (captured->invalidated) {
        delete captured;
        return fail(cudaErrorStreamCaptureInvalidated);
    }
    *graph = captured;
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
    Inside inside(runtime);
    if (!known(stream)) return fail(cudaErrorInvalidResourceHandle);
    *status = !stream || !stream->capture ? cudaStreamCaptureStatusNone
        : stream->capture->invalidated    ? cudaStreamCaptureStatusInvalidated
                                          : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    if (nodes) return fail(cudaErrorNotSupported);
    *count = graph->nodes.size();
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *ready, cudaGraph_t graph, unsigned long long) {
    *ready = new CUgraphExec_st{graph->nodes};
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t ready, cudaStream_t stream) {
    Inside inside(runtime);
    for (const Work &node : ready->nodes)
        if (const cudaError_t error = enqueue(stream, node)) return error;
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t ready) {
    delete ready;
    return cudaSuccess;
}
