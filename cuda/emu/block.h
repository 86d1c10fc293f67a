// block.h - a block that runs: its threads, where each of them waits, and what is on its way to its shared memory.
#pragma once
#include <atomic>
#include <condition_variable>
#include <mutex>
#include "engine.h"
#include "fibre.h"
#include "sanitizer.h"

namespace emu {

enum class State { fresh, ready, running, at_barrier, in_warp_operation, at_grid_barrier, at_cluster_barrier, exited };

// ---- asynchronous work of one thread (async.cpp); of each kind, work of group g has landed when a thread waits until
// fewer than `group - g` groups are left
struct Copy { void *to; const void *from; int bytes, valid, group; };
struct PendingWgmma { Wgmma product; int hidden, group; };              // hidden: which of the accumulators
struct Hidden { float *d; int products; float accumulators[128]; };     // products: how many are on their way into them
struct Store { TensorMap map; int column, row; const char *from; int group; char *data; };     // data: what was read, or NULL
struct Pending {
    Array<Copy> copies;
    Array<PendingWgmma> products;
    Array<Hidden> hidden;
    Array<Store> stores;
    int copy_group, product_group, store_group;
    bool fenced;                                // wgmma_fence was called
};

// Two lines of the cache: what the kernel asks for, and what the scheduler looks at when it switches.
struct alignas(64) Thread : ThreadView {
    alignas(64) State state;
    int number, warp;                           // within the block
    int barrier;                                // the number of the barrier that it waits at
    unsigned mask;                              // of the warp operation that it waits in
    Fibre *fibre;
    WarpOperation operation;
    void *argument;
    Pending *pending;                           // made when it is wanted
};
static_assert(sizeof(Thread) == 128);

struct SharedVariable { const void *key; char *memory; size_t bytes; };
struct BulkLoad { char *to; TensorMap map; int column, row; uint64_t *barrier; };

// Where OS threads wait for each other, each of them for its whole block.
struct Meeting {
    std::mutex mutex;
    std::condition_variable all_here;
    unsigned expected = 0, arrived = 0, round = 0;
    bool all = true, all_came = true;           // nobody has left, by now and when the last round ended
    void open(unsigned members);
    bool wait();                                // whether all members have come; those who left are not waited for
    void leave();
    void release_if_full();
};

// To TSan, a word that orders threads is the 8 bytes around it: two of them must not share those.
struct alignas(64) Word { long unused; };

struct Block;
struct Cluster {
    Block *blocks[8];
    Meeting meeting, barrier;                   // of the emulator, between clusters; of the kernel
    Word order;
};
struct Grid {
    Grid(const Launch &l, const Kernel &k) : launch(l), kernel(k), blocks(l.grid.x * l.grid.y * l.grid.z) {}
    const Launch &launch;
    const Kernel &kernel;
    const unsigned blocks;
    std::atomic<unsigned> next{0};              // the block that the next free worker takes
    Meeting meeting;
    Word launched, order;                       // order: barriers of the grid, and its end
};

constexpr int BARRIERS = 16;
struct Block {
    Grid *grid;
    Cluster *cluster;                           // NULL where blocks run by themselves
    unsigned index, runs, random;               // runs: how many blocks have been run here
    bool shuffled;                              // threads run in a random order
    int threads, begun, exited;
    Array<Thread> thread;
    Array<int> order, ready;                    // in which fresh threads begin; those that may go on
    size_t next_ready;
    Array<unsigned> waiting;                    // of each warp, the lanes that wait in a warp operation
    int arrived[BARRIERS], expected[BARRIERS];
    Word *barrier_order, *warp_order;
    int votes, counted;                         // at the barrier that fills, and at the last one
    int at_grid_barrier, at_cluster_barrier;
    Array<SharedVariable> shared_variables;
    Array<BulkLoad> loads;
    unsigned long polls;                        // since something happened
    double polling_since;
    Array<Fibre *> idle, fibres;
    Fibre host;
};
extern __thread Block *block __attribute__((tls_model("initial-exec")));        // that this OS thread runs
static inline Thread *self() { return static_cast<Thread *>(current); }

// ---- memory.cpp ----
char *new_shared(size_t bytes, size_t alignment);
void shared_back(char *p, size_t bytes, size_t alignment);
void reuse_shared_arena();

// ---- async.cpp ----
void begin_pending(Thread *thread);
void end_pending(Thread *thread);               // its thread exits: dies if something was never waited for
void free_pending(Thread *thread);
}
