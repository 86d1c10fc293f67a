// block.h - a running block: its threads, what each of them waits for, and pending copies to its shared memory.
#pragma once
#include <atomic>
#include <condition_variable>
#include <mutex>
#include "engine.h"
#include "fibre.h"
#include "sanitizer.h"

namespace emu {

enum class State {
    fresh,
    ready,
    running,
    at_barrier,
    in_warp_operation,
    at_grid_barrier,
    at_cluster_barrier,
    behind_last_kernel,
    exited
};

// ---- asynchronous work of one thread (async.cpp).  Work of group g is complete after a wait that leaves fewer than `group -
// g` groups, where `group` is the current group of that kind
struct Copy {
    void *to;
    const void *from;
    int bytes, valid, group;
};
struct PendingWgmma {
    Wgmma product;
    int hidden, group;
};              // hidden: index of the accumulators
struct Hidden {
    float *d;
    int products;
    float accumulators[128];
};     // products: number of pending products
struct Store {
    TensorMap map;
    int column, row;
    const char *from;
    int group;
    char *data;
};     // data: a copy, or NULL
struct Pending {
    Array<Copy> copies;
    Array<PendingWgmma> products;
    Array<Hidden> hidden;
    Array<Store> stores;
    int copy_group, product_group, store_group;
    unsigned fences;                            // calls of fence_proxy_async
    bool fenced;                                // wgmma_fence was called
};

// Two cache lines: the fields that kernels read, and the fields that the scheduler reads in a switch.
struct alignas(64) Thread : ThreadView {
    alignas(64) State state;
    int number, warp;                           // within the block
    int barrier;                                // number of the barrier that it waits at
    bool waited;                                // it has called wait_for_last_kernel
    unsigned mask;                              // mask of the warp operation that it waits in
    unsigned at_cluster;                        // number of its arrivals at the cluster's barrier, and of its waits
    Fibre *fibre;
    WarpOperation operation;
    void *argument;
    Pending *pending;                           // allocated at the first use
};
static_assert(sizeof(Thread) == 128);

struct SharedVariable {
    const void *key;
    char *memory;
    size_t bytes;
};
struct BulkLoad {
    char *to;
    TensorMap map;
    int column, row;
    uint64_t *barrier;
};

// The last noted write to 8 bytes of shared memory: it is fenced if its thread has called fence_proxy_async more often since.
struct NotedWrite {
    int thread;                                 // 1 + its number; 0: none
    unsigned fences;
};

// A barrier of OS threads; each runs a block.  The rounds are counted; arrive() returns the one that is ending.
struct Meeting {
    std::mutex mutex;
    std::condition_variable all_here;
    unsigned expected = 0, arrived = 0, round = 0;
    bool all = true, all_came = true;           // no member has left: until now; until the end of the last round
    void open(unsigned members);
    unsigned arrive();
    bool wait_for(unsigned ending);             // return whether all members came; those that left are not waited for
    bool wait() { return wait_for(arrive()); }
    void leave();
    void release_if_full();
};

// TSan synchronises on the 8 bytes around an address: two words must not share them.
struct alignas(64) Word { long unused; };

struct Block;
struct Cluster {
    Block *blocks[8];
    Meeting meeting, barrier;                   // meeting: for the emulator, between clusters; barrier: for the kernel
};
struct Grid {
    Grid(const Launch &l, const Kernel &k) : launch(l), kernel(k), blocks(l.grid.x * l.grid.y * l.grid.z) {}
    const Launch &launch;
    const Kernel &kernel;
    const unsigned blocks;
    std::atomic<unsigned> next{0};              // the next block to run
    Meeting meeting;
    Word launched, order;                       // order: barriers of the grid, and its end
};

constexpr int BARRIERS = 16;
struct Block {
    Grid *grid;
    Cluster *cluster;                           // NULL without clusters
    unsigned index, runs, random;               // runs: number of blocks that ran on this structure
    bool shuffled;                              // run threads in a random order
    int threads, begun, exited;
    Array<Thread> thread;
    Array<int> order, ready;                    // order: in which threads start; ready: threads that can continue
    size_t next_ready;
    Array<unsigned> waiting;                    // per warp, the lanes that wait in a warp operation
    int arrived[BARRIERS], expected[BARRIERS];
    Word *barrier_order, *warp_order, *cluster_order;   // cluster_order: of block 0, two words, for even and odd rounds
    int votes, counted;                         // votes at the current barrier and at the previous one
    int at_grid_barrier, at_cluster_barrier;
    int cluster_arrivals;                       // in the round that is not full
    unsigned cluster_full, cluster_passed;      // rounds in which all threads of this block, of all blocks, have arrived
    unsigned cluster_meeting;                   // the meeting of round cluster_full
    Array<SharedVariable> shared_variables;
    // What is in flight to this block's shared memory.  Other blocks of the cluster add to it, so there is a lock (async.cpp).
    Array<BulkLoad> loads;
    Array<NotedWrite> writes;                   // to dynamic shared memory; empty before the first one
    Array<uint64_t *> arrivals;                 // of threads of other blocks, at these mbarriers
    bool locked, closed;                        // closed: all threads have exited
    bool is_early;                              // for this block the last kernel of the stream still runs
    unsigned long polls;                        // since the last progress
    double polling_since;
    Array<Fibre *> idle, fibres;
    Fibre host;
};
extern __thread Block *block __attribute__((tls_model("initial-exec")));        // the block that this OS thread runs
static inline Thread *self() { return static_cast<Thread *>(current); }

// ---- scheduler.cpp ----
void needs_last_kernel(const char *what);     // abort if the thread has not waited for it

// ---- memory.cpp ----
char *new_shared(size_t bytes, size_t alignment);
void shared_back(char *p, size_t bytes, size_t alignment);
void reuse_shared_arena();

// While the last kernel still runs, the arrays that the parameters of the next one point to are inaccessible.
void close_arrays(const Kernel &kernel);
void open_arrays();

// ---- async.cpp ----
void begin_pending(Thread *thread);
void end_pending(Thread *thread);               // at its exit: abort if the thread did not wait for its asynchronous work
void free_pending(Thread *thread);
void open_shared(Block *b);                     // before its first thread
void close_shared(Block *b);                    // after its last thread: abort if something is in flight to its shared memory
void land_arrivals(Block *b);                   // after a barrier of the cluster
}
