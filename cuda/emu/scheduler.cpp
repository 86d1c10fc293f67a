// scheduler.cpp - run the blocks of a grid, and the threads of a block, in the order set by EMU_ORDER.
//
// One OS thread runs one block at a time (all blocks at once if they may wait for each other), and each CUDA thread of it is a
// fibre.  A thread that must wait switches directly to the next runnable thread.  If there is none, that is a deadlock, and
// the report lists the waiting threads.  Threads that never wait run one after the other on the same fibre, without any
// switch.
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <sched.h>
#include <thread>
#include <vector>
#include "block.h"
#include "host.h"
#include "settings.h"

namespace emu {
__thread ThreadView *current;
__thread Block *block;

void die(const char *format, ...) {
    flockfile(stderr); // two threads may find a mistake at the same time
    fputs("emulator: ", stderr);
    if (block) {
        const Launch &l = block->grid->launch;
        fprintf(stderr, "%s", l.name);
        if (current)
            fprintf(stderr, ", block (%u, %u, %u), thread %d", current->block_index.x, current->block_index.y,
                    current->block_index.z, self()->number);
        fputs(": ", stderr);
    }
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    fflush(stderr);
    abort();
}

// ---- the next thread --------------------------------------------------------------------------------------------
static unsigned random_below(Block *b, unsigned n) {
    b->random = b->random * 1664525u + 1013904223u;
    return (b->random >> 8) % n;
}
static void swap(int &a, int &b) {
    const int c = a;
    a = b;
    b = c;
}
static void make_ready(Block *b, Thread *t) {
    t->state = State::ready;
    b->ready.add(t->number);
}

static EMU_INLINE Thread *next_ready(Block *b) {
    if (b->begun < b->threads) return &b->thread[b->order[b->begun++]];
    if (b->next_ready == b->ready.size()) return nullptr;
    if (b->shuffled) swap(b->ready[b->next_ready], b->ready[b->next_ready + random_below(b, b->ready.size() - b->next_ready)]);
    Thread *t = &b->thread[b->ready[b->next_ready++]];
    if (b->next_ready == b->ready.size()) {
        b->ready.clear();
        b->next_ready = 0;
    }
    return t;
}

[[noreturn]] static void report_deadlock(Block *b) {
    const uint3 at = b->thread[0].block_index;
    fprintf(stderr, "emulator: DEADLOCK in %s, block (%u, %u, %u): %d of %d threads have exited, and these wait:\n",
            b->grid->launch.name, at.x, at.y, at.z, b->exited, b->threads);
    int shown = 0;
    for (const Thread &t : b->thread) {
        if (t.state == State::exited || shown++ >= 6) continue;
        fprintf(stderr, "  thread %d (warp %d, lane %d) ", t.number, t.warp, t.lane);
        if (t.state == State::at_barrier) fprintf(stderr, "at barrier %d", t.barrier);
        else if (t.state == State::in_warp_operation) fprintf(stderr, "in a warp operation for lanes %08x", t.mask);
        else fprintf(stderr, "at the barrier of the %s", t.state == State::at_grid_barrier ? "grid" : "cluster");
        fputc('\n', stderr);
    }
    fflush(stderr);
    abort();
}

void Meeting::open(unsigned members) {
    expected = members;
    arrived = 0;
    all = true;
}
void Meeting::release_if_full() {
    if (!arrived || arrived < expected) return;
    arrived = 0;
    all_came = all;
    round++;
    all_here.notify_all();
}
unsigned Meeting::arrive() {
    std::unique_lock<std::mutex> lock(mutex);
    const unsigned ending = round;
    arrived++;
    release_if_full();
    return ending;
}
bool Meeting::wait_for(unsigned ending) {
    std::unique_lock<std::mutex> lock(mutex);
    all_here.wait(lock, [&] { return round != ending; });
    return all_came;
}
void Meeting::leave() {
    std::unique_lock<std::mutex> lock(mutex);
    expected--;
    all = false;
    release_if_full();
}

// If no thread of the block can run before other blocks have arrived at a barrier, the OS thread waits too.
static bool meet_other_blocks(Block *b) {
    const bool grid = b->at_grid_barrier == b->threads - b->exited;
    if (grid) {
        if (!b->grid->meeting.wait()) die("a barrier of the grid after some of its blocks have exited");
        b->at_grid_barrier = 0;
    } else if (b->at_cluster_barrier && b->cluster_passed != b->cluster_full) {
        if (b->cluster) b->cluster->barrier.wait_for(b->cluster_meeting);       // excluding blocks that have exited
        b->cluster_passed = b->cluster_full;
        b->at_cluster_barrier = 0;
    } else {
        return false;
    }
    for (Thread &t : b->thread)
        if (t.state == (grid ? State::at_grid_barrier : State::at_cluster_barrier)) make_ready(b, &t);
    return true;
}

// ---- kernels that start early ----------------------------------------------------------------------------------
// The last kernel ends as late as the program allows: when no thread of the block can run without its results.
static bool end_last_kernel(Block *b) {
    if (!b->is_early) return false;
    b->is_early = false;
    open_arrays();
    for (Thread &t : b->thread)
        if (t.state == State::behind_last_kernel) make_ready(b, &t);
    return true;
}

// NULL if all have exited.
static EMU_INLINE Thread *next_thread(Block *b) {
    Thread *t = next_ready(b);
    if (t || b->exited == b->threads) return t;
    if (!end_last_kernel(b) && !meet_other_blocks(b)) report_deadlock(b);
    return next_ready(b);
}

// ---- switching --------------------------------------------------------------------------------------------------
static void run_threads();

// For TSan a fibre is a thread.  So each CUDA thread has its own fibre, and consecutive blocks have different ones; otherwise
// TSan would miss races between them.  In the largest blocks, two sets of fibres would cost too much.
static bool own_fibres() { return has_tsan(); }
static int fibre_sets(const Block *b) { return b->threads <= 256 ? 2 : 1; }

static Fibre *fibre_for(Block *b, const Thread *t) {
    Fibre *fibre;
    if (own_fibres()) fibre = b->fibres[t->number * fibre_sets(b) + b->runs % fibre_sets(b)];
    else if (b->idle.empty()) b->fibres.add(fibre = new_fibre(b->fibres.size()));
    else fibre = b->idle.take_last();
    restart(fibre, run_threads);
    return fibre;
}

static EMU_INLINE Switch go_to(Block *b, Fibre *from, Thread *t) {
    if (t->state == State::fresh) t->fibre = fibre_for(b, t);
    t->state = State::running;
    current = t;
    leave_fibre(from, t->fibre);
    return {from->registers, t->fibre->registers};
}
static void run_from_host(Block *b) {
    const Switch s = go_to(b, &b->host, next_thread(b));
    switch_stack(s.from, s.to);
    enter_fibre(&b->host);
}

// The calling thread waits, for the event in its state, until another thread makes it ready.
static EMU_INLINE Switch begin_wait(Block *b, Thread *t) {
    Thread *next = next_thread(b);
    if (next != t) return go_to(b, t->fibre, next);
    t->state = State::running;
    return {nullptr, nullptr};
}
void switched() { enter_fibre(self()->fibre); }

static void release_barrier_if_full(Block *b, int number) {
    // excluding threads that have exited, as on devices since Volta
    const int expected = b->expected[number] ? b->expected[number] : b->threads - b->exited;
    if (!b->arrived[number] || b->arrived[number] < expected) return;
    b->arrived[number] = b->expected[number] = 0;
    b->polls = 0;
    if (number == 0) {
        b->counted = b->votes;
        b->votes = 0;
    }
    for (Thread &t : b->thread)
        if (t.state == State::at_barrier && t.barrier == number) make_ready(b, &t);
}

// Threads that have exited are not waited for.
static void arrive_at_cluster_if_full(Block *b) {
    if (!b->cluster_arrivals || b->cluster_arrivals < b->threads - b->exited) return;
    b->cluster_arrivals = 0;
    b->polls = 0;
    b->cluster_full++;
    if (b->cluster) b->cluster_meeting = b->cluster->barrier.arrive();
}

constexpr unsigned EARLY_BLOCKS = 2;
static bool starts_early(const Block *b) { return b->grid->launch.start == Start::early; }

static void exit_thread(Block *b, Thread *t) {
    end_pending(t);
    if (starts_early(b) && !t->waited) die("exits without wait_for_last_kernel");
    if (t->at_cluster % 2) die("exits between cluster_arrive and cluster_wait");
    t->state = State::exited;
    if (++b->exited == b->threads) close_shared(b);
    arrive_at_cluster_if_full(b);
    b->polls = 0;
    release(&b->grid->order);
    for (int i = 0; i < BARRIERS; i++)
        if (b->arrived[i]) release_barrier_if_full(b, i);
    const unsigned waiting = b->waiting[t->warp];
    for (int lane = 0; waiting >> lane; lane++)
        if ((waiting >> lane & 1) && (b->thread[t->warp * 32 + lane].mask >> t->lane & 1))
            die("exits while its warp waits for it in a warp operation");
}

// The main loop of a fibre: run the kernel for one thread after the other, as long as none of them waits.
static void run_threads() {
    enter_fibre(nullptr);
    for (;;) {
        Block *b = block;
        Thread *t = self();
        acquire(&b->grid->launched);
        b->grid->kernel.run();
        Fibre *fibre = t->fibre;
        exit_thread(b, t);
        Thread *next = next_thread(b);
        if (next && next->state == State::fresh && !own_fibres()) {
            next->fibre = fibre;
            next->state = State::running;
            current = next;
            continue;
        }
        if (!own_fibres()) b->idle.add(fibre);
        if (next) {
            const Switch s = go_to(b, fibre, next);
            switch_stack(s.from, s.to);
        } else {
            current = nullptr;
            leave_fibre(fibre, &b->host);
            switch_stack(fibre->registers, b->host.registers);
        }
    }
}

// ---- barriers ---------------------------------------------------------------------------------------------------
static EMU_INLINE void arrive(Block *b, int number, int threads) {
    if (number < 0 || number >= BARRIERS) die("barrier %d: not 0 to %d", number, BARRIERS - 1);
    if (threads % 32) die("barrier %d for %d threads: not whole warps", number, threads);
    release(&b->barrier_order[number]);
    if (threads) b->expected[number] = threads;
    if (++b->arrived[number] > b->threads) die("more arrivals at barrier %d than the block has threads", number);
}
Switch begin_barrier(int number, int threads) {
    Block *b = block;
    Thread *t = self();
    arrive(b, number, threads);
    t->state = State::at_barrier;
    t->barrier = number;
    release_barrier_if_full(b, number);
    return begin_wait(b, t);
}
void end_barrier(int number) { acquire(&block->barrier_order[number]); }
void barrier_arrive(int number, int threads) {
    arrive(block, number, threads);
    release_barrier_if_full(block, number);
}

int barrier_count(bool vote) {
    Block *b = block;
    b->votes += vote;
    barrier(0, 0);
    return b->counted;                          // valid until all threads of the block have reached the next barrier
}

Switch begin_grid_barrier() {
    Block *b = block;
    if (b->grid->launch.start != Start::cooperative) die("a barrier of the grid in a launch that is not cooperative");
    release(&b->grid->order);
    self()->state = State::at_grid_barrier;
    b->at_grid_barrier++;
    return begin_wait(b, self());
}
void end_grid_barrier() { acquire(&block->grid->order); }

// The cluster's barrier.  A thread may be a round ahead of another one, but never two: so two words order all rounds.
static Word *cluster_order(Block *b, unsigned round) {
    return &(b->cluster ? b->cluster->blocks[0] : b)->cluster_order[round % 2];
}
void cluster_arrive() {
    Block *b = block;
    Thread *t = self();
    if (t->at_cluster++ % 2) die("a second cluster_arrive without cluster_wait");
    release(cluster_order(b, t->at_cluster / 2));
    b->cluster_arrivals++;
    arrive_at_cluster_if_full(b);
}
Switch begin_cluster_wait() {
    Block *b = block;
    Thread *t = self();
    if (t->at_cluster++ % 2 == 0) die("cluster_wait without cluster_arrive");
    if (t->at_cluster / 2 <= b->cluster_passed) return {nullptr, nullptr};
    t->state = State::at_cluster_barrier;
    b->at_cluster_barrier++;
    return begin_wait(b, t);
}
void end_cluster_wait() {
    acquire(cluster_order(block, self()->at_cluster / 2 - 1));
    land_arrivals(block);
}

int cluster_size() { return block->grid->launch.cluster; }
int cluster_rank() { return static_cast<int>(current->block_index.x) % cluster_size(); }

// TSan does not support fences.  So all threads that call one are ordered, in the order of the calls.  This may hide a race
// between two of them, but a correct use of a fence and a flag is not a false alarm.
static Word fences;
void fence() {
    acquire(&fences);
    release(&fences);
}

static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

Switch begin_poll(const char *what) {
    Block *b = block;
    // whether only this block can end the wait
    const bool alone = b->grid->launch.start != Start::cooperative && !b->cluster && settings().workers <= 1;
    if (b->polls > 2ul * b->threads) end_last_kernel(b);
    if (++b->polls > 4096ul * b->threads) {
        if (alone) die("DEADLOCK: %s waits for an event that no thread can cause", what);
        const double patience = settings().patience;
        if (b->polls == 4096ul * b->threads + 1) b->polling_since = now();
        else if (now() - b->polling_since > patience) die("DEADLOCK: %s waited %g s for another block", what, patience);
    }
    if (!alone) sched_yield();
    make_ready(b, self());
    return begin_wait(b, self());
}

Switch begin_last_kernel_wait() {
    Block *b = block;
    Thread *t = self();
    t->waited = true;
    if (!b->is_early) return {nullptr, nullptr};
    t->state = State::behind_last_kernel;
    return begin_wait(b, t);
}

void needs_last_kernel(const char *what) {
    if (starts_early(block) && !self()->waited) die("%s before wait_for_last_kernel", what);
}

// ---- warp operations --------------------------------------------------------------------------------------------
Switch begin_warp(unsigned mask, WarpOperation operation, void *argument, bool orders) {
    Block *b = block;
    Thread *t = self(), *lanes = &b->thread[t->warp * 32];
    const int size = b->threads - t->warp * 32 < 32 ? b->threads - t->warp * 32 : 32;
    if (!(mask >> t->lane & 1)) die("calls a warp operation for lanes %08x, and is not one of them", mask);
    if (size < 32 && mask >> size) {            // a full mask means all lanes of a partial warp
        if (mask != 0xffffffffu) die("a warp operation for lanes %08x, which the block does not have", mask);
        mask = (1u << size) - 1;
    }
    t->mask = mask;
    t->operation = operation;
    t->argument = argument;
    t->state = State::in_warp_operation;
    if (orders) release(&b->warp_order[t->warp]);
    unsigned &waiting = b->waiting[t->warp];
    waiting |= 1u << t->lane;

    bool complete = (waiting & mask) == mask;
    for (int i = 0; i < size; i++) {
        if (!(mask >> i & 1)) continue;
        if (!complete) {
            if (lanes[i].state == State::exited) die("a warp operation for lanes %08x, but lane %d has exited", mask, i);
        } else if (lanes[i].mask != mask) {
            complete = false;                   // that lane waits in an operation with another mask
        } else if (lanes[i].operation != operation) {
            die("the lanes of a warp met in different warp operations (lane %d)", i);
        }
    }
    if (!complete) return begin_wait(b, t);

    waiting &= ~mask;
    b->polls = 0;
    if (operation) {
        void *arguments[32];
        for (int i = 0; i < 32; i++) arguments[i] = mask >> i & 1 ? lanes[i].argument : nullptr;
        operation(arguments, mask);
    }
    for (int i = 0; i < size; i++)
        if ((mask >> i & 1) && &lanes[i] != t) make_ready(b, &lanes[i]);
    t->state = State::running;
    return {nullptr, nullptr};
}
void end_warp_barrier() { acquire(&block->warp_order[self()->warp]); }

// ---- a block ----------------------------------------------------------------------------------------------------
static void prepare(Block *b, Grid *grid, unsigned index, Cluster *cluster) {
    const Launch &l = grid->launch;
    b->grid = grid;
    b->cluster = cluster;
    b->index = index;
    b->runs++;
    b->shuffled = settings().order == Settings::Order::shuffled;
    b->random = 12345u + settings().seed * 7919u + index;
    b->begun = b->exited = b->votes = b->at_grid_barrier = b->at_cluster_barrier = b->cluster_arrivals = 0;
    b->cluster_full = b->cluster_passed = 0;
    b->polls = 0;
    b->is_early = false;
    open_shared(b);
    b->ready.clear();
    b->next_ready = 0;
    for (int i = 0; i < BARRIERS; i++) b->arrived[i] = b->expected[i] = 0;

    const int threads = static_cast<int>(l.block.x * l.block.y * l.block.z);
    if (b->threads != threads) {
        for (Thread &t : b->thread) free_pending(&t);
        b->threads = threads;
        b->thread.set_zero(threads);
        b->order.set_zero(threads);
        b->waiting.set_zero((threads + 31) / 32);
        own_memory_back(b->barrier_order);
        b->barrier_order = nullptr;
    }
    // New words for each block; otherwise its barriers would order it after the previous blocks.
    if (own_fibres() || !b->barrier_order) {
        const size_t words = (BARRIERS + 2 + b->waiting.size()) * sizeof(Word);
        void *memory = own_fibres() ? new_shared(words, 64) : own_memory(words);
        b->barrier_order = static_cast<Word *>(memory);
        b->cluster_order = b->barrier_order + BARRIERS;
        b->warp_order = b->cluster_order + 2;
    }
    char *dynamic = l.shared ? new_shared(l.shared, 1024) : nullptr;
    const uint3 at = {index % l.grid.x, index / l.grid.x % l.grid.y, index / l.grid.x / l.grid.y};
    for (int i = 0; i < threads; i++) {
        Thread &t = b->thread[i];
        const unsigned n = static_cast<unsigned>(i);
        t.thread_index = {n % l.block.x, n / l.block.x % l.block.y, n / l.block.x / l.block.y};
        t.block_index = at;
        t.block_size = l.block;
        t.grid_size = l.grid;
        t.dynamic_shared = dynamic;
        t.number = i;
        t.lane = i % 32;
        t.warp = i / 32;
        t.state = State::fresh;
        t.at_cluster = 0;
        t.waited = false;
        begin_pending(&t);
        b->order[i] = settings().order == Settings::Order::reverse ? threads - 1 - i : i;
    }
    if (settings().order == Settings::Order::shuffled)
        for (int i = threads - 1; i > 0; i--) swap(b->order[i], b->order[random_below(b, i + 1)]);
    // For TSan a fibre is ordered after its creation, so the host creates all of them before the first one runs.
    if (own_fibres())
        while (b->fibres.size() < static_cast<size_t>(threads * fibre_sets(b))) b->fibres.add(new_fibre(b->fibres.size()));
}

static void clean_up(Block *b) {
    for (SharedVariable &v : b->shared_variables) shared_back(v.memory, v.bytes, 128);
    b->shared_variables.clear();
    if (char *dynamic = b->thread[0].dynamic_shared) shared_back(dynamic, b->grid->launch.shared, 1024);
}

// The first blocks of an early launch run while the last kernel still runs.  Memory is closed for all blocks at once, so not if
// several run concurrently; then, and for other blocks, only the calls of wait_for_last_kernel are checked.
static bool has_early_block(Grid *grid) {
    return grid->launch.start == Start::early && settings().workers <= 1 && grid->next <= EARLY_BLOCKS;
}

static void run_block(Block *b, Grid *grid, unsigned index) {
    prepare(b, grid, index, nullptr);
    if (has_early_block(grid)) {
        b->is_early = true;
        close_arrays(grid->kernel);
    }
    run_from_host(b);
    clean_up(b);
}

// ---- a grid -----------------------------------------------------------------------------------------------------
// Block structures are reused by later launches, including their fibres.
static std::mutex pool_lock;
static Array<Block *> pool;

struct Worker {
    Block *b;
    explicit Worker(Grid *grid) {
        {
            std::lock_guard<std::mutex> lock(pool_lock);
            b = pool.empty() ? nullptr : pool.take_last();
        }
        if (!b) {
            b = static_cast<Block *>(own_memory(sizeof(Block)));
            fill(b, 0, sizeof(Block));
        }
        block = b;
        make_host_fibre(&b->host);
        release(&grid->launched);
    }
    ~Worker() {
        block = nullptr;
        std::lock_guard<std::mutex> lock(pool_lock);
        pool.add(b);
    }
};

// The index of the n-th block to run.  Shuffled order: a stride that is coprime to the number of blocks.
static unsigned block_in_turn(unsigned n, unsigned blocks) {
    if (settings().order == Settings::Order::forward) return n;
    if (settings().order == Settings::Order::reverse) return blocks - 1 - n;
    auto share_a_factor = [](unsigned a, unsigned b) {
        while (b) {
            const unsigned rest = a % b;
            a = b;
            b = rest;
        }
        return a != 1;
    };
    unsigned step = (settings().seed * 2654435761u >> 8) % blocks + 1;
    while (share_a_factor(step, blocks)) step++;
    return static_cast<unsigned>((static_cast<unsigned long>(n) * step + settings().seed) % blocks);
}

// A worker: run one block after the other.
static void run_blocks(Grid *grid) {
    Worker worker(grid);
    for (unsigned i; (i = grid->next++) < grid->blocks;) run_block(worker.b, grid, block_in_turn(i, grid->blocks));
}

// All blocks of a cooperative grid run at once.
static void run_one(Grid *grid, unsigned index) {
    Worker worker(grid);
    run_block(worker.b, grid, index);
    grid->meeting.leave();
}

// The blocks of a cluster run concurrently, one cluster after the other.  They synchronise before the first thread runs, so
// that the shared memory of all blocks exists, and after the last thread, so that it exists as long as any of them may access
// it.
static void run_rank(Grid *grid, Cluster *cluster, unsigned rank) {
    Worker worker(grid);
    const unsigned size = grid->launch.cluster, clusters = grid->blocks / size;
    for (unsigned i = 0; i < clusters; i++) {
        cluster->blocks[rank] = worker.b;
        if (rank == 0) cluster->barrier.open(size);
        prepare(worker.b, grid, block_in_turn(i, clusters) * size + rank, cluster);
        cluster->meeting.wait();
        run_from_host(worker.b);
        cluster->barrier.leave();
        cluster->meeting.wait();
        clean_up(worker.b);
    }
}

void run_grid(const Launch &launch, const Kernel &kernel) {
    Grid grid(launch, kernel);
    DeviceMemoryOpen open;
    Cluster cluster;
    grid.meeting.open(grid.blocks);
    cluster.meeting.open(launch.cluster);
    reuse_shared_arena();
    release(&grid.launched);
    unsigned workers = static_cast<unsigned>(settings().workers);
    if (launch.start == Start::cooperative || grid.blocks < workers) workers = grid.blocks;
    if (launch.cluster > 1) workers = launch.cluster;
    auto work = [&](unsigned number) {
        if (launch.start == Start::cooperative) run_one(&grid, number);
        else if (launch.cluster > 1) run_rank(&grid, &cluster, number);
        else run_blocks(&grid);
    };
    std::vector<std::thread> others;
    for (unsigned i = 1; i < workers; i++) others.emplace_back(work, i);
    work(0);
    for (std::thread &other : others) other.join();
    acquire(&grid.order);
}
}
