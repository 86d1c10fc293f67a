/* nccl.c - a stand-in for NCCL in tests: the functions that pyops calls, between processes of one host with emulated GPUs.
 *
 * Messages pass through a shared file, so they need no network.  Like NCCL it only queues work on a stream, here as a function
 * of the host, so that a captured graph contains it.
 *
 * STANDIN_CUDA    path of the emulated CUDA library, which must be loaded
 * STANDIN_FOLDER  where the shared files are; a new folder for each job
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };
enum { UINT8 = 1, INT32 = 2, FLOAT = 7, SUM = 0, MAX = 2 };
enum { MOST = 8, ROOM = 1 << 16, PATIENCE = 60 };       /* ranks, bytes of a channel, seconds */

typedef struct { char text[128]; } Id;
typedef struct {            /* bytes from one rank to another */
    _Atomic uint64_t written, read;
    char data[ROOM];
} Channel;
typedef struct {
    _Atomic int device[MOST];       /* of each rank, plus 1 */
    Channel channel[MOST][MOST];    /* [from][to] */
} Shared;
typedef struct {
    int rank, size;
    Shared *shared;
} Comm;
typedef enum { SEND, RECEIVE, REDUCE, GATHER, BROADCAST } Kind;
typedef struct {
    Kind kind;
    Comm *comm;
    const char *from;
    char *to;
    size_t count;
    int type, operation, peer;
} Op;
typedef struct {
    int n;
    Op op[2 * MOST];
} Batch;
typedef struct {            /* a message that is under way */
    int peer;
    const char *from;       /* of a message that is sent */
    char *to;               /* of a message that is received */
    size_t bytes, done;
} Transfer;

static char problem[256];
static int depth;           /* of groups */
static Batch group;
int64_t standin_queued, standin_run;        /* batches of messages */
int64_t standin_sent;                       /* bytes */

static int fail(int status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(problem, sizeof problem, format, arguments);
    va_end(arguments);
    return status;
}
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static void *cuda(const char *name) {
    void *library = dlopen(getenv("STANDIN_CUDA"), RTLD_NOW | RTLD_NOLOAD);
    void *found = library ? dlsym(library, name) : NULL;
    if (!found) {
        fprintf(stderr, "stand-in for NCCL: no %s in STANDIN_CUDA\n", name);
        _exit(3);
    }
    return found;
}

/* ---- messages ---- */
static int progress(Comm *comm, Transfer *t) {
    Channel *c = t->from ? &comm->shared->channel[comm->rank][t->peer] : &comm->shared->channel[t->peer][comm->rank];
    const uint64_t written = atomic_load(&c->written), read = atomic_load(&c->read);
    size_t n = t->from ? ROOM - (size_t)(written - read) : (size_t)(written - read);
    const size_t at = (size_t)((t->from ? written : read) % ROOM);
    if (n > t->bytes - t->done) n = t->bytes - t->done;
    if (n > ROOM - at) n = ROOM - at;
    if (t->from) {
        memcpy(c->data + at, t->from + t->done, n);
        atomic_store(&c->written, written + n);
        standin_sent += (int64_t)n;
    } else {
        memcpy(t->to + t->done, c->data + at, n);
        atomic_store(&c->read, read + n);
    }
    t->done += n;
    return n > 0;
}
/* Complete all transfers.  Those in the same direction with the same rank complete in order. */
static void complete(Comm *comm, Transfer *transfers, int n) {
    const double until = now() + PATIENCE;
    for (;;) {
        int left = 0, moved = 0;
        for (int i = 0; i < n; i++) {
            int waits = transfers[i].done == transfers[i].bytes;
            for (int j = 0; j < i; j++)
                waits |= transfers[j].done < transfers[j].bytes && transfers[j].peer == transfers[i].peer &&
                    !transfers[j].from == !transfers[i].from;
            left += transfers[i].done < transfers[i].bytes;
            if (!waits) moved |= progress(comm, &transfers[i]);
        }
        if (!left) return;
        if (!moved) sched_yield();
        if (now() > until) {
            fprintf(stderr, "stand-in for NCCL: rank %d waited %d seconds\n", comm->rank, PATIENCE);
            _exit(3);
        }
    }
}
static size_t bytes_of(const Op *op) { return op->count * (op->type == UINT8 ? 1 : 4); }

/* The last rank is added first: not the order of pyops with more than two ranks. */
static void reduce(const Op *op) {
    Comm *comm = op->comm;
    const size_t bytes = bytes_of(op);
    char *all = malloc(bytes * (size_t)comm->size);
    Transfer transfers[2 * MOST];
    int n = 0;
    for (int peer = 0; peer < comm->size; peer++) {
        if (peer == comm->rank) memcpy(all + bytes * (size_t)peer, op->from, bytes);
        if (peer == comm->rank) continue;
        transfers[n++] = (Transfer){peer, op->from, NULL, bytes, 0};
        transfers[n++] = (Transfer){peer, NULL, all + bytes * (size_t)peer, bytes, 0};
    }
    complete(comm, transfers, n);
    for (size_t i = 0; i < op->count; i++) {
        const size_t last = (size_t)comm->size - 1;
        float sum = ((float *)(all + bytes * last))[i], largest = sum;
        int32_t most = ((int32_t *)(all + bytes * last))[i];
        for (size_t rank = last; rank-- > 0;) {
            const float term = ((float *)(all + bytes * rank))[i];
            const int32_t other = ((int32_t *)(all + bytes * rank))[i];
            sum += term;
            largest = term > largest ? term : largest;
            most = other > most ? other : most;
        }
        if (op->type == INT32) ((int32_t *)op->to)[i] = most;
        else ((float *)op->to)[i] = op->operation == SUM ? sum : largest;
    }
    free(all);
}

static void run(void *data) {
    Batch *batch = data;
    Transfer transfers[2 * MOST];
    int n = 0;
    standin_run++;
    for (int i = 0; i < batch->n; i++) {
        const Op *op = &batch->op[i];
        Comm *comm = op->comm;
        const size_t bytes = bytes_of(op);
        if (op->kind == SEND) transfers[n++] = (Transfer){op->peer, op->from, NULL, bytes, 0};
        if (op->kind == RECEIVE) transfers[n++] = (Transfer){op->peer, NULL, op->to, bytes, 0};
        if (op->kind == REDUCE) reduce(op);
        for (int peer = 0; peer < comm->size; peer++) {
            const int other = peer != comm->rank;
            if (op->kind == GATHER && other) transfers[n++] = (Transfer){peer, op->from, NULL, bytes, 0};
            if (op->kind == GATHER && other) transfers[n++] = (Transfer){peer, NULL, op->to + bytes * (size_t)peer, bytes, 0};
            if (op->kind == GATHER && !other) memmove(op->to + bytes * (size_t)peer, op->from, bytes);
            if (op->kind == BROADCAST && comm->rank == op->peer && other)
                transfers[n++] = (Transfer){peer, op->from, NULL, bytes, 0};
        }
        if (op->kind == BROADCAST && comm->rank != op->peer) transfers[n++] = (Transfer){op->peer, NULL, op->to, bytes, 0};
    }
    if (batch->n) complete(batch->op[0].comm, transfers, n);
}

static int queue_batch(const Batch *batch, void *stream) {
    Batch *kept = malloc(sizeof *kept);         /* never freed: a graph may run it again */
    *kept = *batch;
    standin_queued++;
    int (*launch)(void *, void (*)(void *), void *) = (int (*)(void *, void (*)(void *), void *))cuda("cudaLaunchHostFunc");
    const int error = launch(stream, run, kept);
    return error ? fail(1, "cudaLaunchHostFunc: error %d", error) : SUCCESS;
}
static void *group_stream;
static int add(Op op, void *stream) {
    if (op.type != UINT8 && op.type != INT32 && op.type != FLOAT) return fail(INVALID_ARGUMENT, "type %d", op.type);
    if (op.kind == REDUCE && op.type != FLOAT && (op.type != INT32 || op.operation != MAX))
        return fail(INVALID_ARGUMENT, "type %d with operation %d", op.type, op.operation);
    if (op.peer < 0 || op.peer >= op.comm->size) return fail(INVALID_ARGUMENT, "rank %d", op.peer);
    if (!depth) {
        const Batch one = {1, {op}};
        return queue_batch(&one, stream);
    }
    if (group.n == 2 * MOST) return fail(INVALID_USAGE, "a group of more than %d messages", 2 * MOST);
    group_stream = stream;
    group.op[group.n++] = op;
    return SUCCESS;
}

/* ---- the functions of NCCL ---- */
int ncclGetVersion(int *version) {
    *version = getenv("STANDIN_VERSION") ? atoi(getenv("STANDIN_VERSION")) : 22803;
    return SUCCESS;
}
const char *ncclGetErrorString(int status) { return status == INVALID_USAGE ? "invalid usage" : "an error"; }
const char *ncclGetLastError(void *comm) {
    (void)comm;
    return problem;
}
int ncclGetUniqueId(Id *id) {
    memset(id, 0, sizeof *id);
    const char *address = getenv("NCCL_COMM_ID");
    if (address && !strchr(address, ':')) return fail(INVALID_ARGUMENT, "Invalid NCCL_COMM_ID");
    if (address) snprintf(id->text, sizeof id->text, "%s", address);
    else snprintf(id->text, sizeof id->text, "random-%d-%.9f", (int)getpid(), now());
    return SUCCESS;
}
int ncclCommInitRank(Comm **made, int size, Id id, int rank) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", getenv("STANDIN_FOLDER"), id.text);
    const int file = open(path, O_RDWR | O_CREAT, 0600);
    if (size > MOST || file < 0 || ftruncate(file, sizeof(Shared))) return fail(SYSTEM_ERROR, "%s cannot be used", path);
    Shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (shared == MAP_FAILED) return fail(SYSTEM_ERROR, "%s cannot be mapped", path);
    int device = 0;
    ((int (*)(int *))cuda("cudaGetDevice"))(&device);
    atomic_store(&shared->device[rank], device + 1);
    const double until = now() + PATIENCE;
    for (int other = 0; other < size; other++) {
        while (!atomic_load(&shared->device[other])) {
            if (now() > until) return fail(SYSTEM_ERROR, "rank %d does not connect", other);
            sched_yield();
        }
        if (other != rank && atomic_load(&shared->device[other]) == device + 1)
            return fail(INVALID_USAGE, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %x", rank, other,
                        device);
    }
    *made = malloc(sizeof **made);
    **made = (Comm){rank, size, shared};
    return SUCCESS;
}
int ncclCommDestroy(Comm *comm) {
    munmap(comm->shared, sizeof *comm->shared);
    free(comm);
    return SUCCESS;
}
int ncclGroupStart(void) {
    depth++;
    return SUCCESS;
}
int ncclGroupEnd(void) {
    if (--depth) return SUCCESS;
    const Batch batch = group;
    group.n = 0;
    return batch.n ? queue_batch(&batch, group_stream) : SUCCESS;
}
int ncclSend(const void *from, size_t count, int type, int peer, Comm *comm, void *stream) {
    return add((Op){SEND, comm, from, NULL, count, type, 0, peer}, stream);
}
int ncclRecv(void *to, size_t count, int type, int peer, Comm *comm, void *stream) {
    return add((Op){RECEIVE, comm, NULL, to, count, type, 0, peer}, stream);
}
int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, Comm *comm, void *stream) {
    return add((Op){REDUCE, comm, from, to, count, type, operation, 0}, stream);
}
int ncclAllGather(const void *from, void *to, size_t count, int type, Comm *comm, void *stream) {
    return add((Op){GATHER, comm, from, to, count, type, 0, 0}, stream);
}
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Comm *comm, void *stream) {
    return add((Op){BROADCAST, comm, from, to, count, type, 0, root}, stream);
}
