// async.cpp - asynchronous work: copies to shared memory, bulk copies, products of warpgroups.
//
// Each completes as late as the program allows: a copy at the wait for its group, a bulk copy at a wait for its mbarrier, a
// product at the wait for its group.  Until then the destination contains NaN, and the operands are read at completion.  So a
// missing wait, or a wait after the operands were overwritten, gives a wrong result in every run.  An arrival at another
// block's mbarrier is asynchronous, too: it counts at a wait for the mbarrier, or at a barrier of the cluster.
#include <sched.h>
#include "block.h"
#include "host.h"
#include "matrix.h"
#include "settings.h"

namespace emu {
void begin_pending(Thread *t) {
    if (!t->pending) return;
    t->pending->copy_group = t->pending->product_group = t->pending->store_group = 0;
    t->pending->fences = 0;
    t->pending->fenced = false;
}
static Pending *pending() {
    Thread *t = self();
    if (!t->pending) {
        t->pending = static_cast<Pending *>(own_memory(sizeof(Pending)));
        fill(t->pending, 0, sizeof(Pending));
    }
    return t->pending;
}
void free_pending(Thread *t) {
    if (!t->pending) return;
    own_memory_back(t->pending->copies.data);
    own_memory_back(t->pending->products.data);
    own_memory_back(t->pending->hidden.data);
    own_memory_back(t->pending->stores.data);
    own_memory_back(t->pending);
}

static void write_stores(Pending *p, int groups_left);
void end_pending(Thread *t) {
    Pending *p = t->pending;
    if (!p) return;
    if (!p->copies.empty()) die("exits without having waited for its asynchronous copies");
    if (!p->products.empty()) die("exits without having waited for its wgmma");
    for (const Store &s : p->stores)
        if (!s.data) die("exits before its bulk stores have read shared memory");
    write_stores(p, -1);
}

// ---- cp.async -----------------------------------------------------------------------------------------------
void copy_async(void *to, const void *from, int bytes, int valid) {
    Pending *p = pending();
    if (valid) needs_last_kernel("cp.async");
    if (valid < 0 || valid > bytes) die("cp.async: %d of %d bytes", valid, bytes);
    if (reinterpret_cast<uintptr_t>(to) % bytes || (valid && reinterpret_cast<uintptr_t>(from) % bytes))
        die("cp.async: an address is not aligned to %d bytes", bytes);
    kernel_writes(to, bytes);
    if (valid) kernel_reads(from, valid);
    fill(to, 0xff, bytes);
    p->copies.add({to, from, bytes, valid, p->copy_group});
}
void copy_commit() { pending()->copy_group++; }
void copy_wait(int groups_left) {
    Pending *p = pending();
    size_t kept = 0;
    for (const Copy &c : p->copies) {
        if (c.group >= p->copy_group - groups_left) {
            p->copies[kept++] = c;
            continue;
        }
        copy(c.to, c.from, c.valid);
        fill(static_cast<char *>(c.to) + c.valid, 0, c.bytes - c.valid);
        if (has_tsan()) __tsan_write_range(c.to, c.bytes);
    }
    p->copies.count = kept;
}

// ---- what is in flight to the shared memory of a block ----------------------------------------------------------
// Not a std::mutex, which TSan would take for synchronisation between the blocks.
class Locked {
    Block *b;

public:
    explicit Locked(Block *b) : b(b) {
        while (__atomic_exchange_n(&b->locked, true, __ATOMIC_ACQUIRE)) sched_yield();
    }
    ~Locked() { __atomic_store_n(&b->locked, false, __ATOMIC_RELEASE); }
};
static Block *of_cluster(int rank) { return block->cluster ? block->cluster->blocks[rank] : block; }

void open_shared(Block *b) {
    b->loads.clear();
    b->arrivals.clear();
    b->writes.clear();
    b->closed = false;
}
void close_shared(Block *b) {
    const Locked locked(b);
    if (!b->loads.empty()) die("the block exits, and a bulk load to its shared memory is in flight");
    if (!b->arrivals.empty()) die("the block exits, and an arrival at one of its mbarriers is in flight");
    b->closed = true;
}

// ---- mbarrier -----------------------------------------------------------------------------------------------
// A phase ends when all expected arrivals and all announced bytes have arrived.
struct Mbarrier { uint64_t phase : 1, missing : 15, expected : 15, bytes : 33; };

static Mbarrier *as_mbarrier(uint64_t *barrier) {
    auto *m = reinterpret_cast<Mbarrier *>(barrier);
    if (!m->expected || m->expected == 0x7fff) die("an mbarrier that was not initialised");
    return m;
}
static void end_phase_if_complete(Mbarrier *m) {
    if (m->missing || m->bytes) return;
    m->phase ^= 1;
    m->missing = m->expected;
    block->polls = 0;
}
void mbarrier_init(uint64_t *barrier, int arrivals) {
    needs_hopper("an mbarrier");
    if (arrivals < 1 || arrivals >= 0x7fff) die("an mbarrier of %d arrivals", arrivals);
    kernel_writes(barrier, sizeof *barrier);
    Mbarrier m = {};
    m.missing = m.expected = static_cast<unsigned>(arrivals);
    *reinterpret_cast<Mbarrier *>(barrier) = m;
}
static void count_arrival(uint64_t *barrier, int arrivals, int bytes) {
    Mbarrier *m = as_mbarrier(barrier);
    m->bytes += static_cast<unsigned>(bytes);
    if (static_cast<int>(m->missing) < arrivals) die("more arrivals than the mbarrier expects");
    m->missing -= static_cast<unsigned>(arrivals);
    end_phase_if_complete(m);
}
// Count the arrivals of other blocks: at one mbarrier, or with NULL at all.
static void count_arrivals_at(uint64_t *barrier) {
    size_t kept = 0;
    for (uint64_t *at : block->arrivals) {
        if (barrier && at != barrier) block->arrivals[kept++] = at;
        else count_arrival(at, 1, 0);
    }
    block->arrivals.count = kept;
}
void land_arrivals(Block *b) {
    const Locked locked(b);
    count_arrivals_at(nullptr);
}
void mbarrier_arrive(uint64_t *barrier, int arrivals, int bytes) {
    release(barrier);
    if (static_cast<int>(as_mbarrier(barrier)->missing) < arrivals) {           // an earlier phase may miss only these
        const Locked locked(block);
        count_arrivals_at(barrier);
    }
    count_arrival(barrier, arrivals, bytes);
}
// The mbarrier at the same address in another block, which must not have exited.
static uint64_t *mbarrier_of_block(uint64_t *barrier, int rank) {
    auto *there = static_cast<uint64_t *>(of_block(barrier, rank));
    kernel_reads(there, sizeof *there);         // after its initialisation
    if (of_cluster(rank)->closed) die("block %d of the cluster has exited, so it has no mbarrier", rank);
    as_mbarrier(there);
    return there;
}
void mbarrier_arrive_at(uint64_t *barrier, int rank) {
    needs_hopper("an arrival at an mbarrier of another block");
    if (of_block(barrier, rank) == barrier) return mbarrier_arrive(barrier, 1, 0);
    const Locked locked(of_cluster(rank));
    uint64_t *there = mbarrier_of_block(barrier, rank);
    release(there);
    of_cluster(rank)->arrivals.add(there);
}

// ---- bulk copies --------------------------------------------------------------------------------------------
cudaError_t make_tensor_map(TensorMap *map, void *base, int element_size, uint64_t size0, uint64_t size1, uint64_t stride,
                            uint32_t box0, uint32_t box1, bool swizzle) {
    const uint64_t most = uint64_t(1) << 32, row = size0 * element_size, box_row = static_cast<uint64_t>(box0) * element_size;
    if (element_size != 1 && element_size != 2 && element_size != 4) return cudaErrorInvalidValue;
    if (reinterpret_cast<uintptr_t>(base) % 16 || stride % 16) return cudaErrorInvalidValue;
    if (stride < row || stride >= uint64_t(1) << 40) return cudaErrorInvalidValue;
    if (!size0 || !size1 || size0 > most || size1 > most) return cudaErrorInvalidValue;
    if (!box0 || !box1 || box0 > 256 || box1 > 256 || box_row % 16 || (swizzle && box_row > 128)) return cudaErrorInvalidValue;
    *map = {base,
            element_size,
            {static_cast<long>(size0), static_cast<long>(size1)},
            static_cast<long>(stride),
            {static_cast<int>(box0), static_cast<int>(box1)},
            swizzle};
    return cudaSuccess;
}

static size_t box_bytes(const TensorMap &m) { return static_cast<size_t>(m.box[0]) * m.box[1] * m.element_size; }

// Call take(offset in the box, address in the matrix, bytes) for each run of bytes that is contiguous in both; the address is
// NULL outside the matrix.
template <class F> static void for_each_run(const TensorMap &m, int column, int row, F take) {
    const int box_row = m.box[0] * m.element_size;
    for (int r = 0; r < m.box[1]; r++) {
        for (int at = 0; at < box_row;) {
            int bytes = 16 - at % 16 < box_row - at ? 16 - at % 16 : box_row - at;      // contiguous under the swizzle
            const long y = static_cast<long>(row) + r, x = static_cast<long>(column) + at / m.element_size;
            const bool row_inside = y >= 0 && y < m.size[1], inside = row_inside && x >= 0 && x < m.size[0];
            // up to the end, or the beginning, of the matrix
            const long edge = inside ? m.size[0] : row_inside && x < 0 ? 0 : x + bytes / m.element_size;
            if ((edge - x) * m.element_size < bytes) bytes = static_cast<int>((edge - x) * m.element_size);
            size_t offset = static_cast<size_t>(r) * box_row + at;
            if (m.swizzle) offset ^= (offset >> 7 & 7) << 4;
            take(offset, inside ? static_cast<char *>(m.base) + y * m.stride + x * m.element_size : nullptr, bytes);
            at += bytes;
        }
    }
}

static void check_box(const char *what, const void *shared, const TensorMap &m) {
    needs_hopper(what);
    const int alignment = m.swizzle ? 1024 : 128;
    if (reinterpret_cast<uintptr_t>(shared) % alignment) die("%s: shared memory not aligned to %d bytes", what, alignment);
    if (m.swizzle && m.box[0] * m.element_size != 128) die("%s: the emulator swizzles boxes with rows of 128 bytes only", what);
}

void bulk_load(void *to, const TensorMap &map, int column, int row, uint64_t *barrier) {
    needs_last_kernel("a bulk load");
    check_box("a bulk load", to, map);
    as_mbarrier(barrier);
    check(to, box_bytes(map), true);
    fill(to, 0xff, box_bytes(map));
    const Locked locked(block);
    block->loads.add({static_cast<char *>(to), map, column, row, barrier});
}
void bulk_load_to_all(void *to, const TensorMap &map, int column, int row, uint64_t *barrier, unsigned ranks) {
    if (!ranks || ranks >> cluster_size()) die("a bulk load to blocks %x of a cluster of %d", ranks, cluster_size());
    for (int rank = 0; ranks >> rank; rank++) {
        if (!(ranks >> rank & 1)) continue;
        if (of_block(to, rank) == to) {
            bulk_load(to, map, column, row, barrier);
            continue;
        }
        auto *there = static_cast<char *>(of_block(to, rank));
        check_box("a bulk load", there, map);
        const Locked locked(of_cluster(rank));
        uint64_t *counts = mbarrier_of_block(barrier, rank);
        kernel_writes(there, box_bytes(map));   // after all reads of what was there
        release(counts);
        fill(there, 0xff, box_bytes(map));
        of_cluster(rank)->loads.add({there, map, column, row, counts});
    }
}

// Complete all loads and arrivals that the mbarrier counts.
static bool land(uint64_t *barrier) {
    const Locked locked(block);
    Array<BulkLoad> &loads = block->loads;
    acquire(barrier);                           // after everything that the issuing thread did before
    count_arrivals_at(barrier);
    size_t kept = 0;
    bool any = false;
    for (const BulkLoad &l : loads) {
        if (l.barrier != barrier) {
            loads[kept++] = l;
            continue;
        }
        for_each_run(l.map, l.column, l.row, [&](size_t offset, const char *from, int bytes) {
            if (!from) return fill(l.to + offset, 0, bytes);
            check(const_cast<char *>(from), bytes, false);
            copy(l.to + offset, from, bytes);
        });
        if (has_tsan()) __tsan_write_range(l.to, box_bytes(l.map));
        release(barrier);
        Mbarrier *m = as_mbarrier(barrier);
        m->bytes -= box_bytes(l.map);
        end_phase_if_complete(m);
        any = true;
    }
    loads.count = kept;
    return any;
}

bool mbarrier_test(uint64_t *barrier, int parity) {
    const Mbarrier *m = as_mbarrier(barrier);
    if (static_cast<int>(m->phase) == parity) land(barrier);
    if (static_cast<int>(m->phase) == parity) return false;
    acquire(barrier);
    return true;
}
void mbarrier_wait(uint64_t *barrier, int parity) {
    while (!mbarrier_test(barrier, parity)) poll("a wait at an mbarrier");
    block->polls = 0;                           // another block of the cluster may have ended the phase
}

// Writes and bulk stores of shared memory are ordered by fence_proxy_async of the thread that wrote, which a device requires.
void note_write(const void *to, int bytes) {
    needs_hopper("a write for a bulk store");
    const size_t first = shared_offset(to) / 8;
    if (block->writes.empty()) block->writes.set_zero(block->grid->launch.shared / 8 + 1);
    for (int i = 0; i < bytes / 8; i++) block->writes[first + i] = {self()->number + 1, pending()->fences};
}
void fence_proxy_async() {
    needs_hopper("fence_proxy_async");
    pending()->fences++;
}
static void check_fences(const void *from, size_t bytes) {
    if (block->writes.empty()) return;
    const size_t first = shared_offset(from) / 8;
    for (size_t i = first; i < first + bytes / 8; i++) {
        const NotedWrite &w = block->writes[i];
        if (w.thread && block->thread[w.thread - 1].pending->fences == w.fences)
            die("a bulk store of what thread %d wrote, without fence_proxy_async by that thread", w.thread - 1);
    }
}

void bulk_store(const TensorMap &map, int column, int row, const void *from) {
    needs_last_kernel("a bulk store");
    check_box("a bulk store", from, map);
    check_fences(from, box_bytes(map));
    Pending *p = pending();
    p->stores.add({map, column, row, static_cast<const char *>(from), p->store_group, nullptr});
}
void bulk_commit() { pending()->store_group++; }

static void read_stores(Pending *p, int groups_left) {
    for (Store &s : p->stores) {
        if (s.data || s.group >= p->store_group - groups_left) continue;
        s.data = static_cast<char *>(own_memory(box_bytes(s.map)));
        kernel_reads(s.from, box_bytes(s.map));
        copy(s.data, s.from, box_bytes(s.map));
    }
}
static void write_stores(Pending *p, int groups_left) {
    size_t kept = 0;
    for (const Store &s : p->stores) {
        if (groups_left >= 0 && s.group >= p->store_group - groups_left) {
            p->stores[kept++] = s;
            continue;
        }
        for_each_run(s.map, s.column, s.row, [&](size_t offset, char *to, int bytes) {
            if (!to) return;
            kernel_writes(to, bytes);
            copy(to, s.data + offset, bytes);
        });
        own_memory_back(s.data);
    }
    p->stores.count = kept;
}
void bulk_wait(int groups_left, bool only_read) {
    read_stores(pending(), groups_left);
    if (!only_read) write_stores(pending(), groups_left);
}

// ---- wgmma --------------------------------------------------------------------------------------------------
// While products into some accumulators are pending, their values are stored here, and the accumulators of the thread contain
// NaN.
static Hidden *hide(Pending *p, float *d, int n) {
    Hidden *free_one = nullptr;
    for (Hidden &h : p->hidden) {
        if (h.products && h.d == d) return &h;
        if (!h.products) free_one = &h;
    }
    if (!free_one) {
        p->hidden.add({});
        free_one = &p->hidden[p->hidden.size() - 1];
    }
    free_one->d = d;
    free_one->products = 0;
    copy(free_one->accumulators, d, n / 2 * sizeof(float));
    fill(d, 0xff, n / 2 * sizeof(float));
    return free_one;
}

void wgmma(const Wgmma &product) {
    needs_hopper("wgmma");
    Pending *p = pending();
    if (self()->warp / 4 * 128 + 128 > block->threads)
        die("wgmma requires a whole warpgroup: 4 warps, the first of them a multiple of 4");
    if (!p->fenced) die("wgmma without wg_fence before it");
    Hidden *h = hide(p, product.d, product.n);
    h->products++;
    p->products.add({product, static_cast<int>(h - p->hidden.begin()), p->product_group});
}
void wgmma_fence() { pending()->fenced = true; }
void wgmma_commit() { pending()->product_group++; }
void wgmma_wait(int groups_left) {
    Pending *p = pending();
    size_t kept = 0;
    for (size_t i = 0; i < p->products.size(); i++) {
        const PendingWgmma pending_one = p->products[i];
        if (pending_one.group >= p->product_group - groups_left) {
            p->products[kept++] = pending_one;
            continue;
        }
        Hidden &h = p->hidden[pending_one.hidden];
        WgmmaOfLane own{&pending_one.product, h.accumulators};
        warp(0xffffffffu, multiply_warpgroup, &own);
        end_warp_barrier();                     // a lane that then arrives at an mbarrier does so after all reads
        if (--h.products == 0) copy(h.d, h.accumulators, pending_one.product.n / 2 * sizeof(float));
    }
    p->products.count = kept;
}
}
