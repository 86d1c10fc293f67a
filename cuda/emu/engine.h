// engine.h - the functions that the emulated language and the wrappers of gpu.cuh and hopper.cuh call.  All algorithms are in
// the .cpp files of this folder, since no sanitizer may instrument them.
#pragma once
#include <tuple>
#include <utility>
#include "runtime.h"
#include "switch.h"

namespace emu {

// The part of a thread that kernels can see; the scheduler's part is in block.h.
struct ThreadView {
    uint3 thread_index, block_index;
    dim3 block_size, grid_size;
    char *dynamic_shared;
    int lane;
};
// initial-exec: access to threadIdx is one instruction instead of a function call, also in a shared library
extern __thread ThreadView *current __attribute__((tls_model("initial-exec")));

[[noreturn]] void die(const char *format, ...) __attribute__((format(printf, 1, 2)));     // prints the kernel, aborts

// ---- launches -------------------------------------------------------------------------------------------------
struct Kernel {                                 // with its arguments, copied at the launch as on a device
    virtual ~Kernel() = default;
    virtual void run() const = 0;               // run one thread
    virtual const char *parameters(size_t *bytes) const = 0;
};
enum class Start { normal, cooperative, early };        // early: before the last kernel of the stream has ended
struct Launch {
    const char *name;
    const void *function;
    dim3 grid, block;
    size_t shared;                              // bytes of dynamic shared memory
    cudaStream_t stream;
    Start start = Start::normal;
    int cluster = 1;                            // blocks per cluster
};
cudaError_t launch(const Launch &what, Kernel *kernel);                 // takes ownership of the kernel

template <class... P> struct KernelOf final : Kernel {
    void (*function)(P...);
    std::tuple<std::decay_t<P>...> arguments;
    template <class... A> KernelOf(void (*function)(P...), A &&...a) : function(function), arguments(std::forward<A>(a)...) {}
    void run() const override { std::apply(function, arguments); }
    const char *parameters(size_t *bytes) const override {
        *bytes = sizeof arguments;
        return reinterpret_cast<const char *>(&arguments);
    }
};
template <class... P, class... A>
cudaError_t launch(const char *name, int cluster, Start start, void (*function)(P...), dim3 grid, dim3 block, size_t shared,
                   cudaStream_t stream, A &&...arguments) {
    static_assert(sizeof...(P) == sizeof...(A), "as many arguments as the kernel has parameters");
    static_assert(sizeof(std::tuple<std::decay_t<P>...>) <= 4096, "a kernel has at most 4 KiB of parameters");
    return launch({name, reinterpret_cast<const void *>(function), grid, block, shared, stream, start, cluster},
                  new KernelOf<P...>(function, std::forward<A>(arguments)...));
}

// ---- waiting --------------------------------------------------------------------------------------------------
// Each begin_... returns the stack to switch to; the switch itself is inlined into the kernel (see switch.h).
Switch begin_barrier(int number, int threads);          // threads: number of participants, 0 for the whole block
Switch begin_warp(unsigned mask, void (*operation)(void *const lanes[32], unsigned mask), void *argument, bool orders);
Switch begin_grid_barrier();
void cluster_arrive();
Switch begin_cluster_wait();
Switch begin_poll(const char *what);
Switch begin_last_kernel_wait();
void switched();                                        // call after a switch has returned
void end_barrier(int number);
void end_warp_barrier();
void end_grid_barrier();
void end_cluster_wait();
static EMU_INLINE void follow(Switch s) {
    if (!s.to) return;
    switch_stack(s.from, s.to);
    switched();
}

static EMU_INLINE void barrier(int number, int threads) {
    follow(begin_barrier(number, threads));
    end_barrier(number);
}
void barrier_arrive(int number, int threads);
int barrier_count(bool vote);
static EMU_INLINE void grid_barrier() {
    follow(begin_grid_barrier());
    end_grid_barrier();
}
static EMU_INLINE void cluster_wait() {
    follow(begin_cluster_wait());
    end_cluster_wait();
}
static EMU_INLINE void poll(const char *what) { follow(begin_poll(what)); }     // call in each iteration of a wait loop
static EMU_INLINE void wait_for_last_kernel() { follow(begin_last_kernel_wait()); }
void fence();                                           // __threadfence

// ---- warps ----------------------------------------------------------------------------------------------------
// Each lane of the mask stores a pointer to its argument; the last lane to arrive runs the operation for all of them.
using WarpOperation = void (*)(void *const lanes[32], unsigned mask);   // NULL for lanes outside the mask
constexpr unsigned WHOLE_WARP = 0xffffffffu;
static EMU_INLINE void warp(unsigned mask, WarpOperation operation, void *argument) {
    follow(begin_warp(mask, operation, argument, false));
}
static EMU_INLINE void warp_barrier(unsigned mask) {    // also orders memory, unlike the other operations
    follow(begin_warp(mask, nullptr, nullptr, true));
    end_warp_barrier();
}
struct Shuffle {
    void *value;
    size_t size;
    int source;
};               // 4 or 8 bytes, replaced by the source's value
struct Match {
    unsigned long long value;
    unsigned same;
};
enum class Reduction { add, min, max, bit_and, bit_or, bit_xor };
template <class T> struct Reduce {
    T value;
    Reduction how;
};           // T: int or unsigned
void do_shuffle(void *const lanes[32], unsigned mask);
void do_ballot(void *const lanes[32], unsigned mask);                   // on unsigned: in one vote, out all votes
void do_match(void *const lanes[32], unsigned mask);
template <class T> void do_reduce(void *const lanes[32], unsigned mask);

// ---- memory ---------------------------------------------------------------------------------------------------
void *shared_variable(const void *key, size_t bytes);                   // of this block; key: identifies the declaration
unsigned shared_offset(const void *address);                            // offset in the dynamic shared memory
int cluster_size();
int cluster_rank();
void *of_block(const void *address, int rank);                          // the same address in another block of the cluster

// ---- matrices: operations of a whole warp; each lane has its fragments -----------------------------------------------
struct Mma {
    float *d;
    const unsigned *a, *b;
};
struct Matrices {
    unsigned *fragments;
    void *row;
    int count;
    bool transposed;
};
void do_mma_tf32(void *const lanes[32], unsigned mask);                 // m16n8k8
void do_mma_bf16(void *const lanes[32], unsigned mask);                 // m16n8k16
void do_load_matrices(void *const lanes[32], unsigned mask);
void do_store_matrices(void *const lanes[32], unsigned mask);
static EMU_INLINE void mma_tf32(float *d, const unsigned *a, const unsigned *b) {
    Mma own{d, a, b};
    warp(WHOLE_WARP, do_mma_tf32, &own);
}
static EMU_INLINE void mma_bf16(float *d, const unsigned *a, const unsigned *b) {
    Mma own{d, a, b};
    warp(WHOLE_WARP, do_mma_bf16, &own);
}
static EMU_INLINE void load_matrices(unsigned *fragments, const void *row, int count, bool transposed) {
    Matrices own{fragments, const_cast<void *>(row), count, transposed};
    warp(WHOLE_WARP, do_load_matrices, &own);
}
void note_write(const void *to, int bytes);                             // to shared memory, at a multiple of 8 bytes
static EMU_INLINE void store_matrices(const unsigned *fragments, void *row, int count, bool transposed) {
    Matrices own{const_cast<unsigned *>(fragments), row, count, transposed};
    warp(WHOLE_WARP, do_store_matrices, &own);
    if (current->lane < 8 * count) note_write(row, 16);
}

// ---- asynchronous copies and products: they complete as late as the program allows ----------------------------------
void copy_async(void *to, const void *from, int bytes, int valid);      // zeros after the first `valid` bytes
void copy_commit();
void copy_wait(int groups_left);

void mbarrier_init(uint64_t *barrier, int arrivals);
void mbarrier_arrive(uint64_t *barrier, int arrivals, int bytes);
void mbarrier_arrive_at(uint64_t *barrier, int rank);                   // at the mbarrier of another block of the cluster
bool mbarrier_test(uint64_t *barrier, int parity);
void mbarrier_wait(uint64_t *barrier, int parity);

struct TensorMap {
    void *base;
    int element_size;
    long size[2], stride;                       // size[1] rows, `stride` bytes apart, of size[0] contiguous elements
    int box[2];
    bool swizzle;                               // the 128-byte swizzle
};
cudaError_t make_tensor_map(TensorMap *map, void *base, int element_size, uint64_t size0, uint64_t size1, uint64_t stride,
                            uint32_t box0, uint32_t box1, bool swizzle);
void bulk_load(void *to, const TensorMap &map, int column, int row, uint64_t *barrier);
void bulk_load_to_all(void *to, const TensorMap &map, int column, int row, uint64_t *barrier, unsigned ranks);
void bulk_store(const TensorMap &map, int column, int row, const void *from);
void bulk_commit();
void fence_proxy_async();                                               // for the writes of this thread that were noted
void bulk_wait(int groups_left, bool only_read);

enum class Element { bf16, tf32, e4m3, e5m2 };
struct Wgmma {                                  // d (64 x n) = a (64 x 32 bytes) * b, or d += a * b
    Element element;
    int n;
    float *d;
    bool a_in_registers, a_transposed, b_transposed, accumulate;
    unsigned a_fragments[4];
    uint64_t a, b;                              // descriptors of matrices in shared memory
    Element b_element = element;
};
unsigned code_of(Element format, float x);      // of the nearest number of E4M3 or E5M2
void wgmma(const Wgmma &product);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int groups_left);

void needs_hopper(const char *what);            // abort unless the compute capability is 9.0
}
