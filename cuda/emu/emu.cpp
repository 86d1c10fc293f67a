// emu.cpp - the CPU runtime.  Never compile this file with -fsanitize=thread: its own bookkeeping is not to be checked.
// One block runs on one OS thread; each CUDA thread of it is a fiber.  A thread that waits switches straight to the next one.
// CUEMU_SCHED=fwd|rev|<seed>  order of threads     CUEMU_THREADS=n  blocks at a time     CUEMU_LAZY=1  queue work until a sync
#include "emu.h"
#include <atomic>
#include <condition_variable>
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <thread>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <sys/mman.h>
#if defined(CUEMU_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
static void check_range(const void* p, size_t n, bool w) { if (void* q = __asan_region_is_poisoned((void*)p, n)) __asan_report_error(__builtin_return_address(0), __builtin_frame_address(0), __builtin_frame_address(0), q, w, n); }
static void hide(void* p, size_t n) { __asan_poison_memory_region(p, n); }
static void show(void* p, size_t n) { __asan_unpoison_memory_region(p, n); }
#else
static void check_range(const void*, size_t, bool) {}
static void hide(void*, size_t) {}
static void show(void*, size_t) {}
#endif
#if defined(CUEMU_TSAN)
extern "C" { void* __tsan_create_fiber(unsigned); void __tsan_switch_to_fiber(void*, unsigned); void* __tsan_get_current_fiber(void); void __tsan_acquire(void*); void __tsan_release(void*); }
static void rel(void* p) { __tsan_release(p); }
static void acq(void* p) { __tsan_acquire(p); }
constexpr bool kReuse = false;                   // one tsan fiber per CUDA thread, else races between two of them hide
#else
static void rel(void*) {}
static void acq(void*) {}
constexpr bool kReuse = true;
#endif
namespace {
#if defined(CUEMU_TSAN)                           // malloc and free count as writes to TSan; these do not
void* own_alloc(size_t n) { return (void*)syscall(SYS_mmap, nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); }
void own_free(void*) {}
#else
void* own_alloc(size_t n) { return malloc(n); }
void own_free(void* p) { free(p); }
#endif
// Internal linkage on purpose: a std::vector here could be merged by the linker with an instrumented copy from a kernel's object file.
template <class T> struct Vec {
  T* d = nullptr; size_t n = 0, cap = 0;
  void push_back(const T& x) { if (n == cap) reserve(cap ? cap * 2 : 64); d[n++] = x; }
  void reserve(size_t c) { T* e = (T*)own_alloc(c * sizeof(T)); for (size_t i = 0; i < n; i++) e[i] = d[i]; own_free(d); d = e; cap = c; }
  void resize0(size_t c) { if (c > cap) reserve(c); n = c; raw_zero(d, c * sizeof(T)); }
  static void raw_zero(void* p, size_t k) { asm volatile("rep stosb" : "+D"(p), "+c"(k) : "a"(0) : "memory"); }
  T& operator[](size_t i) { return d[i]; } T* begin() { return d; } T* end() { return d + n; } size_t size() const { return n; } bool empty() const { return !n; } void clear() { n = 0; } T& back() { return d[n - 1]; } void pop_back() { n--; }
};
void raw_fill(void* p, int v, size_t k) { asm volatile("rep stosb" : "+D"(p), "+c"(k) : "a"(v) : "memory"); }
void raw_copy(void* d, const void* s, size_t k) { asm volatile("rep movsb" : "+D"(d), "+S"(s), "+c"(k) : : "memory"); }
}
namespace cuemu {
__thread Thr* cur;
bool poison = !getenv("CUEMU_NOPOISON");
static int g_sched = [] { const char* s = getenv("CUEMU_SCHED"); return !s || !strcmp(s, "fwd") ? 0 : !strcmp(s, "rev") ? 1 : 2 + atoi(s); }();
static int g_workers = getenv("CUEMU_THREADS") ? atoi(getenv("CUEMU_THREADS")) : 1;
static size_t g_stack = getenv("CUEMU_STACK") ? (size_t)atol(getenv("CUEMU_STACK")) : sizeof(void*) * (
#if defined(CUEMU_ASAN) || defined(CUEMU_TSAN)
  32768);
#else
  8192);
#endif
struct Fiber { void* sp = nullptr; char* stk = nullptr; size_t size = 0; void** top = nullptr; void* fake = nullptr; void* tsan = nullptr; };
enum { NEW, READY, RUN, WBAR, WWARP, WGRID, DONE };
struct Grid { const char* name; dim3 gd, bd; size_t smem; std::function<void()> body; bool coop; unsigned nblk, arrived = 0, phase = 0; std::atomic<unsigned> next{0}; std::mutex m; std::condition_variable cv; alignas(64) long tok0; alignas(64) long tok1; };
struct SharedVar { void* key; char* p; size_t n; };
struct Tma { void* dst; const void* base; int es; long d0, d1, stride1; int box0, box1; bool swz; int c0, c1; uint64_t* bar; };
struct Block {
  Grid* g; int nthr, nextnew, done, ingrid; Vec<Thr> t; Vec<unsigned> waiting; Vec<int> order, ready; size_t rhead;
  Vec<Fiber*> idle, all; int arrived[16], need[16], vote[2], voteturn; long tok[16]; Fiber host; Vec<SharedVar> sh; unsigned rng, seq; Vec<Tma> tma; unsigned long spins;
};
static __thread Block* B;
void die(const char* fmt, const char* a, long b, long c) { fprintf(stderr, "cuemu: "); fprintf(stderr, fmt, a, b, c); fputc('\n', stderr); fflush(stderr); abort(); }
const char* kname() { return B ? B->g->name : "?"; }
// ---- fibers
extern "C" void cuemu_switch(void** save, void* load);
#if defined(__x86_64__)
asm(".text\n.globl cuemu_switch\n.type cuemu_switch,@function\ncuemu_switch:\n pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n movq %rsp,(%rdi)\n movq %rsi,%rsp\n"
    " popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n popq %rcx\n jmp *%rcx\n.size cuemu_switch,.-cuemu_switch\n");
#else
#error "cuemu: write the context switch for this CPU"
#endif
static void fiber_main();
static Fiber* new_fiber(Block* b) {
  Fiber* f = new Fiber; f->size = g_stack;
  char* m = (char*)mmap(nullptr, f->size + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m == MAP_FAILED) die("no memory for a fiber stack");
  mprotect(m, 4096, PROT_NONE); f->stk = m + 4096;                                  // a kernel that overflows its stack faults
  f->top = (void**)(f->stk + f->size - (b->all.size() * 5 & 63) * 64); b->all.push_back(f);   // spread the stack tops over the cache sets
#if defined(CUEMU_TSAN)
  f->tsan = __tsan_create_fiber(0);
#endif
  return f;
}
static void do_switch(Fiber* from, Fiber* to) {
#if defined(CUEMU_ASAN)
  __sanitizer_start_switch_fiber(&from->fake, to->stk, to->size);
#elif defined(CUEMU_TSAN)
  __tsan_switch_to_fiber(to->tsan, 1);                                              // 1: the switch orders nothing
#endif
  cuemu_switch(&from->sp, to->sp);
#if defined(CUEMU_ASAN)
  __sanitizer_finish_switch_fiber(from->fake, nullptr, nullptr);
#endif
}
// ---- scheduling
static unsigned rnd(Block* b, unsigned n) { b->rng = b->rng * 1664525u + 1013904223u; return (b->rng >> 8) % n; }
static void swp(int& a, int& b) { int t = a; a = b; b = t; }
static void make_ready(Block* b, Thr* t) { t->st = READY; b->ready.push_back(t->lin); }
static Thr* pick0(Block* b) {
  if (b->nextnew < b->nthr) return &b->t[b->order[b->nextnew++]];
  if (b->rhead == b->ready.size()) return nullptr;
  if (g_sched >= 2) swp(b->ready[b->rhead], b->ready[b->rhead + rnd(b, b->ready.size() - b->rhead)]);
  Thr* t = &b->t[b->ready[b->rhead++]]; if (b->rhead == b->ready.size()) { b->ready.clear(); b->rhead = 0; }
  return t;
}
static void grid_wait(Block* b) {
  Grid* g = b->g; if (!g->coop) die("%s: grid sync in a launch that is not cooperative", g->name);
  std::unique_lock<std::mutex> l(g->m); unsigned ph = g->phase;
  if (++g->arrived == g->nblk) { g->arrived = 0; g->phase++; g->cv.notify_all(); } else g->cv.wait(l, [&] { return g->phase != ph; });
  b->ingrid = 0; for (auto& t : b->t) if (t.st == WGRID) make_ready(b, &t);
}
static Thr* pick(Block* b) {
  Thr* t = pick0(b); if (t || b->done == b->nthr) return t;
  if (b->ingrid && b->ingrid == b->nthr - b->done) { grid_wait(b); return pick0(b); }
  fprintf(stderr, "cuemu: DEADLOCK in %s, block (%u,%u,%u): %d of %d threads have exited; these wait:\n", b->g->name, b->t[0].bid.x, b->t[0].bid.y, b->t[0].bid.z, b->done, b->nthr);
  int n = 0; for (auto& t : b->t) if (t.st != DONE && n++ < 6) { Dl_info d; bool k = t.site && dladdr(t.site, &d) && d.dli_sname;
    fprintf(stderr, "  thread %d (warp %d lane %d): %s %d, mask %08x %s\n", t.lin, t.warp, t.lane, t.st == WBAR ? "barrier" : t.st == WWARP ? "warp op" : "grid barrier", t.st == WBAR ? t.bar : 0, t.st == WWARP ? t.wmask : 0, k ? d.dli_sname : ""); }
  fflush(stderr); abort();
}
static Fiber* restart(Fiber* f) {          // always from the top: a parked fiber may hold thread-local addresses of another OS thread
  show(f->stk, f->size); void** s = f->top; *--s = nullptr; *--s = (void*)fiber_main; for (int i = 0; i < 6; i++) *--s = nullptr;
  f->sp = s; return f;
}
static Fiber* get_fiber(Block* b, Thr* t) {
  if (!kReuse) return restart( b->all[b->nthr <= 256 ? t->lin * 2 + (b->seq & 1) : t->lin]);        // neighbouring blocks get different fibers, so races between blocks show too
  if (b->idle.empty()) return restart(new_fiber(b));
  Fiber* f = b->idle.back(); b->idle.pop_back(); return restart(f);
}
static void go(Fiber* from, Thr* nx, Block* b) { if (nx->st == NEW) nx->f = get_fiber(b, nx); nx->st = RUN; cur = nx; do_switch(from, nx->f); }
static void suspend() { Block* b = B; Thr* self = cur; Thr* nx = pick(b); if (nx == self) { self->st = RUN; return; } go(self->f, nx, b); }
static void bar_check(Block* b, int id) {
  int need = b->need[id] ? b->need[id] : b->nthr - b->done;                         // exited threads do not count (Volta and later)
  if (!b->arrived[id] || b->arrived[id] < need) return;
  b->arrived[id] = b->need[id] = 0; const void* site = nullptr; static bool strict = getenv("CUEMU_STRICTBAR");
  for (auto& t : b->t) if (t.st == WBAR && t.bar == id) { if (strict && site && t.site && site != t.site) die("%s: threads of one block met at different __syncthreads", b->g->name); if (t.site) site = t.site; make_ready(b, &t); }
}
void bar_sync(int id, int n, const void* site, bool arrive_only) {
  Block* b = B; Thr* t = cur; rel(&b->tok[id]); b->arrived[id]++; if (n) b->need[id] = n;
  t->bar = id; t->site = site; if (!arrive_only) t->st = WBAR;
  bar_check(b, id);
  if (!arrive_only) { suspend(); acq(&b->tok[id]); }
}
int bar_vote(int p) { Block* b = B; int k = b->voteturn; b->vote[k] += p; bar_sync(0, 0, nullptr, false); int v = b->vote[k]; bar_sync(0, 0, nullptr, false); b->vote[k] = 0; return v; }
void warp_op(unsigned mask, WarpOp op, void* arg, bool sync) {
  Block* b = B; Thr* t = cur; Thr* w = &b->t[t->warp * 32]; int lanes = std::min(32, b->nthr - t->warp * 32);
  if (!(mask >> t->lane & 1)) die("%s: lane %ld calls a warp op whose mask %lx lacks it", b->g->name, t->lane, mask);
  if (lanes < 32 && mask >> lanes) { if (mask != 0xffffffffu) die("%s: mask %lx names lanes the block does not have", b->g->name, mask); mask = (1u << lanes) - 1; }
  t->wmask = mask; t->wop = (const void*)op; t->warg = arg; t->st = WWARP; t->site = __builtin_return_address(0); if (sync) rel(w);
  unsigned& wait = b->waiting[t->warp]; wait |= 1u << t->lane; bool all = (wait & mask) == mask;
  if (!all) for (int i = 0; i < lanes; i++) if ((mask >> i & 1) && w[i].st == DONE) die("%s: lane %ld, named in mask %lx, has exited", b->g->name, i, mask);
  for (int i = 0; i < lanes && all; i++) if (mask >> i & 1) { if (w[i].wmask != mask) all = false; else if (w[i].wop != (const void*)op) die("%s: lanes of one warp met in different warp ops (lane %ld)", b->g->name, i); }
  if (all) {
    wait &= ~mask; void* a[32]; for (int i = 0; i < 32; i++) a[i] = mask >> i & 1 ? w[i].warg : nullptr;
    if (op) op(a, mask);
    for (int i = 0; i < lanes; i++) if ((mask >> i & 1) && &w[i] != t) make_ready(b, &w[i]);
    t->st = RUN;
  } else suspend();
  if (sync) acq(w);
}
void grid_sync() { Block* b = B; rel(&b->g->tok1); cur->st = WGRID; b->ingrid++; suspend(); acq(&b->g->tok1); }
void yield() { make_ready(B, cur); suspend(); }
static void fiber_main() {
#if defined(CUEMU_ASAN)
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  for (;;) {
    Block* b = B; acq(&b->g->tok0); b->g->body();
    Thr* t = cur; Fiber* me = t->f; if (t->nwg) die("%s: thread %ld exits with wgmma it never waited for", b->g->name, t->lin);
    if (t->ncp) die("%s: thread %ld exits with cp.async copies it never waited for", b->g->name, t->lin);
    t->st = DONE; b->done++; rel(&b->g->tok1); for (int i = 0; i < 16; i++) if (b->arrived[i]) bar_check(b, i);
    unsigned wm = b->waiting[t->warp]; for (int i = 0; wm >> i; i++) if ((wm >> i & 1) && (b->t[t->warp * 32 + i].wmask >> t->lane & 1)) die("%s: lane %ld exits while its warp waits for it in a warp op", b->g->name, t->lane);
    Thr* nx = pick(b);
    if (nx && nx->st == NEW && kReuse) { nx->f = me; nx->st = RUN; cur = nx; continue; }          // threads that never wait need no switch
    if (kReuse) b->idle.push_back(me);
    if (nx) go(me, nx, b); else { cur = nullptr; do_switch(me, &b->host); }
  }
}
// ---- memory: filled with NaN, red zones under ASan.  Under TSan a block's shared memory comes from an arena that hands out no
// address twice in a launch, or two blocks that used the same bytes one after the other would look like a race.
static size_t capacity(size_t n, size_t al) { return (n + al - 1) / al * al + (64 + al - 1) / al * al; }
static char* fresh(size_t n, size_t al) { char* p = (char*)aligned_alloc(al, capacity(n, al)); raw_fill(p, poison ? 0xFF : 0, n); hide(p + n, capacity(n, al) - n); return p; }
static void drop(char* p, size_t n, size_t al) { show(p, capacity(n, al)); free(p); }
#if defined(CUEMU_TSAN)
static char* g_arena = (char*)syscall(SYS_mmap, nullptr, 4ul << 30, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0); static std::atomic<size_t> g_top;
static char* smem_new(size_t n, size_t al) { size_t o = g_top.fetch_add((n + 2047) / 1024 * 1024); if (o + n > (4ul << 30)) die("too much shared memory in one launch for a TSan run"); char* p = g_arena + o; raw_fill(p, 0xFF, n); (void)al; return p; }
static void smem_del(char*, size_t, size_t) {}
static void arena_reset() { g_top = 0; }
extern "C" { void __tsan_read_range(void*, unsigned long); void __tsan_write_range(void*, unsigned long); }
#else
static char* smem_new(size_t n, size_t al) { return fresh(n, al); }
static void smem_del(char* p, size_t n, size_t al) { drop(p, n, al); }
static void arena_reset() {}
static void __tsan_read_range(void*, unsigned long) {}
static void __tsan_write_range(void*, unsigned long) {}
#endif
void* shared_var(void* key, size_t n) { Block* b = B; for (auto& s : b->sh) if (s.key == key) return s.p; char* p = smem_new(n, 128); b->sh.push_back({key, p, n}); return p; }
// ---- cp.async lands as late as the program allows; until then the destination holds NaNs
void cp_async(void* d, const void* s, int n, int valid) {
  Thr* t = cur; if (((uintptr_t)d | (uintptr_t)s) % n) die("%s: cp.async address not aligned to its size", B->g->name);
  check_range(d, n, true); if (valid) check_range(s, valid, false);
  if (t->ncp == t->capcp) { t->capcp = t->capcp ? 2 * t->capcp : 16; auto* e = (AsyncCopy*)own_alloc(t->capcp * sizeof(AsyncCopy)); for (int i = 0; i < t->ncp; i++) e[i] = t->cp[i]; own_free(t->cp); t->cp = e; }
  raw_fill(d, 0xFF, n); __tsan_read_range((void*)s, valid); __tsan_write_range(d, n); t->cp[t->ncp++] = {d, s, n, valid, t->cpgroup};
}
void cp_commit() { cur->cpgroup++; }
void cp_wait(int N) { Thr* t = cur; int k = 0; for (int i = 0; i < t->ncp; i++) { AsyncCopy& c = t->cp[i]; if (c.group < t->cpgroup - N) { raw_copy(c.dst, c.src, c.valid); raw_fill((char*)c.dst + c.valid, 0, c.n - c.valid); __tsan_write_range(c.dst, c.n); } else t->cp[k++] = c; } t->ncp = k; }
// ---- Hopper: mbarriers; TMA copies land when a thread waits for them; wgmma runs when it is waited for
struct Mbar { uint64_t phase : 1, pend : 15, exp : 15, tx : 33; };
static void mbar_check(Mbar* m) { if (!m->pend && !m->tx) { m->phase ^= 1; m->pend = m->exp; B->spins = 0; } }
void mbar_op(uint64_t* p, int arrivals, long tx) { auto* m = (Mbar*)p; rel(p); if (!m->exp) die("%s: mbarrier used before init", kname()); m->tx += tx; if ((int)m->pend < arrivals) die("%s: more arrivals than the mbarrier expects", kname()); m->pend -= arrivals; mbar_check(m); }
void tma_2d(void* dst, const void* base, int es, const long* dim, long stride1, const int* box, bool swz, int c0, int c1, uint64_t* p) {
  if ((uintptr_t)dst % (swz ? 1024 : 128)) die("%s: TMA destination misaligned", kname());
  if (swz && box[0] * es != 128) die("%s: 128-byte swizzle needs a 128-byte inner box", kname());
  check_range(dst, (size_t)box[0] * box[1] * es, true); raw_fill(dst, 0xFF, (size_t)box[0] * box[1] * es);
  B->tma.push_back({dst, base, es, dim[0], dim[1], stride1, box[0], box[1], swz, c0, c1, p});
}
static bool land(uint64_t* p) {
  Block* b = B; bool any = false; size_t k = 0; acq(p);                              // the copy comes after the producer's arrive
  for (size_t i = 0; i < b->tma.size(); i++) { Tma t = b->tma[i]; if (t.bar != p) { b->tma[k++] = t; continue; }
    for (int r = 0; r < t.box1; r++) for (int c = 0; c < t.box0; c++) { long y = t.c1 + r, x = t.c0 + c; char* d = (char*)t.dst + ((size_t)r * t.box0 + c) * t.es; if (t.swz) { size_t o = ((size_t)r * t.box0 + c) * t.es; d = (char*)t.dst + (o ^ ((o >> 7 & 7) << 4)); }
      if (y < 0 || y >= t.d1 || x < 0 || x >= t.d0) raw_fill(d, 0, t.es); else { const char* s = (const char*)t.base + y * t.stride1 + x * t.es; check_range(s, t.es, false); raw_copy(d, s, t.es); } }
    __tsan_write_range(t.dst, (size_t)t.box0 * t.box1 * t.es); auto* m = (Mbar*)p; m->tx -= (long)t.box0 * t.box1 * t.es; rel(p); mbar_check(m); any = true; }
  b->tma.n = k; return any;
}
void mbar_wait(uint64_t* p, int parity) {
  auto* m = (Mbar*)p; while ((int)m->phase == parity) if (!land(p)) { if (++B->spins > 4096ul * B->nthr) die("%s: DEADLOCK, nobody completes the mbarrier thread %ld waits for", kname(), cur->lin); yield(); }
  acq(p);
}
struct WgOp { float* d; uint64_t a, b; void (*run)(void**, unsigned); };
struct WgQ { WgOp op; int group; };
static WgQ* wq(Thr* t) { if (!t->wg) t->wg = own_alloc(64 * sizeof(WgQ)); return (WgQ*)t->wg; }
void wg_push(WgOp o) { Thr* t = cur; if (t->nwg == 64) die("%s: more than 64 wgmma in flight", kname()); wq(t)[t->nwg++] = {o, t->wggroup}; }
void wg_commit() { cur->wggroup++; }
void wg_wait(int n) { Thr* t = cur; WgQ* q = wq(t); int k = 0; for (int i = 0; i < t->nwg; i++) if (q[i].group < t->wggroup - n) warp_op(0xffffffffu, q[i].op.run, &q[i].op, false); else q[k++] = q[i]; t->nwg = k; }
char* dyn_base() { return cur->dyn; }
void note_read(const void* p, unsigned long n) { check_range(p, n, false); __tsan_read_range((void*)p, n); }
// ---- launch
static void run_block(Block* b, Grid* g, unsigned i) {
  b->g = g; b->seq++; b->nthr = g->bd.x * g->bd.y * g->bd.z; b->nextnew = b->done = b->ingrid = b->voteturn = b->vote[0] = 0; b->spins = 0; b->tma.clear(); b->ready.clear(); b->rhead = 0; b->rng = 12345u + g_sched * 7919u + i;
  for (int k = 0; k < 16; k++) b->arrived[k] = b->need[k] = 0;
  if ((int)b->t.size() != b->nthr) { for (auto& t : b->t) own_free(t.cp); b->t.resize0(b->nthr); }
  b->order.resize0(b->nthr); b->waiting.resize0((b->nthr + 31) / 32); char* dyn = g->smem ? smem_new(g->smem, 1024) : nullptr;
  for (int k = 0; k < b->nthr; k++) { Thr& t = b->t[k]; t.lin = k; t.lane = k & 31; t.warp = k >> 5; t.st = NEW; t.cpgroup = t.wggroup = t.nwg = 0; t.dyn = dyn; t.blk = b; t.bd = g->bd; t.gd = g->gd; t.site = nullptr;
    t.tid = {k % g->bd.x, k / g->bd.x % g->bd.y, k / g->bd.x / g->bd.y}; t.bid = {i % g->gd.x, i / g->gd.x % g->gd.y, i / g->gd.x / g->gd.y}; b->order[k] = g_sched == 1 ? b->nthr - 1 - k : k; }
  if (g_sched >= 2) for (int k = b->nthr - 1; k > 0; k--) swp(b->order[k], b->order[rnd(b, k + 1)]);
  if (!kReuse) while ((int)b->all.size() < (b->nthr <= 256 ? 2 : 1) * b->nthr) new_fiber(b);                    // all made by the host: a fiber's maker is ordered before it
  go(&b->host, pick(b), b);
  for (auto& s : b->sh) smem_del(s.p, s.n, 128);
  b->sh.clear(); if (dyn) smem_del(dyn, g->smem, 1024);
}
static std::mutex g_pool_m; static Vec<Block*> g_pool;                              // blocks keep their fibers for the next launch
static void worker(Grid* g, long fixed) {
  Block* b = nullptr; { std::lock_guard<std::mutex> l(g_pool_m); if (g_pool.size()) { b = g_pool.back(); g_pool.pop_back(); } }
  if (!b) b = new Block();
  B = b; rel(&g->tok0);
#if defined(CUEMU_ASAN)
  static thread_local char* sp; static thread_local size_t sn;
  if (!sp) { pthread_attr_t a; void* p; size_t n; pthread_getattr_np(pthread_self(), &a); pthread_attr_getstack(&a, &p, &n); pthread_attr_destroy(&a); sp = (char*)p; sn = n; }
  b->host.stk = sp; b->host.size = sn;
#elif defined(CUEMU_TSAN)
  b->host.tsan = __tsan_get_current_fiber();
#endif
  if (fixed >= 0) run_block(b, g, (unsigned)fixed); else for (unsigned i; (i = g->next++) < g->nblk;) run_block(b, g, i);
  B = nullptr; std::lock_guard<std::mutex> l(g_pool_m); g_pool.push_back(b);
}
static void run_grid(Grid& g) {
  arena_reset(); rel(&g.tok0); std::vector<std::thread> v; int n = g.coop ? (int)g.nblk : (int)std::min<long>(g_workers, g.nblk);
  for (int i = 1; i < n; i++) v.emplace_back([&g, i] { worker(&g, g.coop ? i : -1); });
  worker(&g, g.coop ? 0 : -1); for (auto& t : v) t.join();
  acq(&g.tok1);
}
}  // namespace cuemu
// ---------------------------------------------------------------- streams, graphs, memory
using cuemu::poison;
struct CuGraph { std::vector<std::function<void()>> n; };
struct CuStream { CuGraph* cap = nullptr; std::vector<std::function<void()>> q; };
struct CuEvent { std::chrono::steady_clock::time_point t; };
static CuStream g_null; static int g_capturing; static bool g_lazy = getenv("CUEMU_LAZY"); static std::vector<CuStream*> g_streams; static thread_local cudaError_t g_err; static std::map<void*, size_t> g_mem; static std::map<const void*, size_t> g_optin;
static cudaError_t fail(cudaError_t e) { g_err = e; return e; }
// What device there is: EMU_DEVICES=0 none, -1 no driver; EMU_CAPABILITY=7.5; EMU_MEMORY=bytes; EMU_MULTIPROCESSORS
static long env(const char* n, long d) { const char* s = getenv(n); return s && *s ? atol(s) : d; }
static int g_devices = env("EMU_DEVICES", 1), g_sms = env("EMU_MULTIPROCESSORS", 4), g_major = 9, g_minor = 0;
static bool g_cap = [] { const char* s = getenv("EMU_CAPABILITY"); return s && sscanf(s, "%d.%d", &g_major, &g_minor) == 2; }();
static size_t g_total = env("EMU_MEMORY", sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE)), g_used;
static cudaError_t absent() { return g_devices < 0 ? cudaErrorInsufficientDriver : g_devices ? cudaSuccess : cudaErrorNoDevice; }
cudaError_t cudaGetDeviceCount(int* n) { *n = std::max(0, g_devices); return absent() ? fail(absent()) : cudaSuccess; }
cudaError_t cudaSetDevice(int d) { return absent() ? fail(absent()) : d ? fail(cudaErrorInvalidDevice) : cudaSuccess; }
cudaError_t cudaGetDevice(int* d) { *d = 0; return absent() ? fail(absent()) : cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t* f, size_t* t) { if (absent()) return fail(absent()); *f = g_total - g_used; *t = g_total; return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) {
  if (absent()) return fail(absent());
  switch (a) { case cudaDevAttrMaxThreadsPerBlock: *v = 1024; break; case cudaDevAttrMaxSharedMemoryPerBlock: *v = 49152; break; case cudaDevAttrWarpSize: *v = 32; break; case cudaDevAttrMultiProcessorCount: *v = g_sms; break;
    case cudaDevAttrL2CacheSize: *v = 50 << 20; break; case cudaDevAttrMaxThreadsPerMultiProcessor: *v = 2048; break; case cudaDevAttrComputeCapabilityMajor: *v = g_major; break; case cudaDevAttrComputeCapabilityMinor: *v = g_minor; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *v = 228 << 10; break; case cudaDevAttrCooperativeLaunch: *v = 1; break; case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = 227 << 10; break; default: return fail(cudaErrorInvalidValue); }
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int d) { if (absent()) return fail(absent()); if (d) return fail(cudaErrorInvalidDevice);
  *p = {"emulated device", g_total, 49152, 227 << 10, 228 << 10, 32, 1024, 2048, g_sms, g_major, g_minor, 50 << 20}; return cudaSuccess; }
static void drain(CuStream* s) { auto q = std::move(s->q); s->q.clear(); for (auto& f : q) f(); }
static void drain_all() { drain(&g_null); for (auto* s : g_streams) drain(s); }
static cudaError_t push(cudaStream_t s, std::function<void()> f) {
  if (s && s->cap) { s->cap->n.push_back(std::move(f)); return cudaSuccess; }
  if (!s && g_capturing) return fail(cudaErrorStreamCaptureUnsupported);              // the legacy stream while another one captures
  if (!g_lazy) { f(); return cudaSuccess; }
  if (!s) { for (auto* o : g_streams) drain(o); s = &g_null; } else drain(&g_null);    // the legacy stream waits for all, and all for it
  s->q.push_back(std::move(f)); return cudaSuccess;
}
namespace cuemu {
cudaError_t set_max_smem(const void* f, int v) { if (v > 227 * 1024) return fail(cudaErrorInvalidValue); g_optin[f] = v; return cudaSuccess; }
int occupancy(int n, size_t smem) { return n < 1 || n > 1024 ? 0 : (int)std::min<size_t>(std::min(32, 2048 / n), 228 * 1024 / (smem + 1024)); }
cudaError launch(bool coop, const void* fn, const char* name, dim3 gd, dim3 bd, size_t smem, CuStreamTag* s, std::function<void()> body) {
  if (cudaError e = absent()) return fail(e);
  if (g_major < 8) return fail(cudaErrorNoKernelImageForDevice);
  unsigned n = bd.x * bd.y * bd.z; unsigned long nb = (unsigned long)gd.x * gd.y * gd.z;
  if (!nb || gd.x > 2147483647u || gd.y > 65535 || gd.z > 65535 || !n || n > 1024 || bd.z > 64) return fail(cudaErrorInvalidConfiguration);
  auto it = g_optin.find(fn); if (smem > (it == g_optin.end() ? 48 * 1024 : it->second)) return fail(cudaErrorInvalidValue);
  if (coop && nb > (unsigned long)g_sms * occupancy(n, smem)) return fail(cudaErrorCooperativeLaunchTooLarge);
  return push((cudaStream_t)s, [=] { Grid g; g.name = name; g.gd = gd; g.bd = bd; g.smem = smem; g.coop = coop; g.nblk = (unsigned)nb; g.body = body; run_grid(g); });
}
}
cudaError_t cudaMalloc(void** p, size_t n) { if (absent()) return fail(absent()); if (g_capturing) return fail(cudaErrorStreamCaptureUnsupported); *p = nullptr; if (!n) return cudaSuccess; if (n > g_total - g_used) return fail(cudaErrorMemoryAllocation); *p = cuemu::fresh(n, 256); g_mem[*p] = n; g_used += n; return cudaSuccess; }
cudaError_t cudaFree(void* p) { if (!p) return cudaSuccess; drain_all(); auto it = g_mem.find(p); if (it == g_mem.end()) return fail(cudaErrorInvalidValue); g_used -= it->second; cuemu::drop((char*)p, it->second, 256); g_mem.erase(it); return cudaSuccess; }
cudaError_t cudaMallocHost(void** p, size_t n) { if (absent()) return fail(absent()); *p = malloc(n); return cudaSuccess; }
cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) { return cudaMallocHost(p, n); }
cudaError_t cudaFreeHost(void* p) { drain_all(); free(p); return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind, cudaStream_t st) { return push(st, [=] { memcpy(d, s, n); }); }
cudaError_t cudaMemsetAsync(void* d, int v, size_t n, cudaStream_t st) { return push(st, [=] { memset(d, v, n); }); }
cudaError_t cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind k) { cudaError_t e = cudaMemcpyAsync(d, s, n, k, nullptr); drain_all(); return e; }
cudaError_t cudaMemset(void* d, int v, size_t n) { return cudaMemsetAsync(d, v, n, nullptr); }
cudaError_t cudaStreamCreate(cudaStream_t* s) { if (absent()) return fail(absent()); *s = new CuStream; g_streams.push_back(*s); return cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t s) { drain(s); g_streams.erase(std::find(g_streams.begin(), g_streams.end(), s)); delete s; return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { if (g_capturing) return fail(cudaErrorStreamCaptureUnsupported); if (!s) drain_all(); else { drain(&g_null); drain(s); } return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { if (g_capturing) return fail(cudaErrorStreamCaptureUnsupported); drain_all(); return cudaSuccess; }
cudaError_t cudaGetLastError() { cudaError_t e = g_err; g_err = cudaSuccess; return e; }
cudaError_t cudaPeekAtLastError() { return g_err; }
static const struct { cudaError_t e; const char *name, *text; } g_errors[] = {
#define E(name, text) {name, #name, text},
  E(cudaSuccess, "no error") E(cudaErrorInvalidValue, "invalid argument") E(cudaErrorMemoryAllocation, "out of memory") E(cudaErrorInvalidConfiguration, "invalid configuration argument") E(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version")
  E(cudaErrorNoDevice, "no CUDA-capable device is detected") E(cudaErrorInvalidDevice, "invalid device ordinal") E(cudaErrorNoKernelImageForDevice, "no kernel image is available for execution on the device") E(cudaErrorNotReady, "device not ready")
  E(cudaErrorCooperativeLaunchTooLarge, "too many blocks in cooperative launch") E(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing") E(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture")
  E(cudaErrorStreamCaptureImplicit, "operation would make the legacy stream depend on a capturing blocking stream") E(cudaErrorInvalidResourceHandle, "invalid resource handle")
#undef E
};
const char* cudaGetErrorString(cudaError_t e) { for (auto& x : g_errors) if (x.e == e) return x.text; return "unrecognized error code"; }
const char* cudaGetErrorName(cudaError_t e) { for (auto& x : g_errors) if (x.e == e) return x.name; return "unrecognized error code"; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { return cudaStreamCreate(s); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return cudaEventCreate(e); }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t s) { return s && s->cap ? fail(cudaErrorStreamCaptureUnsupported) : s && !s->q.empty() ? cudaErrorNotReady : cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t* e) { *e = new CuEvent; return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t e) { delete e; return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return push(s, [=] { e->t = std::chrono::steady_clock::now(); }); }
cudaError_t cudaEventSynchronize(cudaEvent_t) { drain_all(); return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) { *ms = std::chrono::duration<float, std::milli>(b->t - a->t).count(); return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { if (!g_capturing) drain_all(); return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) { if (!s || s->cap) return fail(cudaErrorStreamCaptureUnsupported); s->cap = new CuGraph; g_capturing++; return cudaSuccess; }
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* g) { *g = s->cap; s->cap = nullptr; g_capturing--; return cudaSuccess; }
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* e, cudaGraph_t g, unsigned long long) { *e = new CuGraph(*g); return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) { for (auto& f : e->n) push(s, f); return cudaSuccess; }
cudaError_t cudaGraphDestroy(cudaGraph_t g) { delete g; return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t g) { delete g; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* st) { *st = s && s->cap ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone; return cudaSuccess; }
