// sanitizer.h - the interface to AddressSanitizer and ThreadSanitizer, if one of them is in the process.
//
// The symbols are weak and resolved at run time, so one build of the emulator works with any sanitizer.  The emulator itself
// is never instrumented.  When it moves data for a kernel, it reports the reads and writes here.  Its own accesses must stay
// invisible: TSan would take them for races, or for synchronisation between threads.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {
__attribute__((weak)) void __asan_poison_memory_region(const volatile void *, size_t);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void *, size_t);
__attribute__((weak)) void *__asan_region_is_poisoned(void *, size_t);
__attribute__((weak)) void __asan_report_error(void *, void *, void *, void *, int, size_t);
__attribute__((weak)) void __sanitizer_start_switch_fiber(void **, const void *, size_t);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void *, const void **, size_t *);
__attribute__((weak)) void *__tsan_create_fiber(unsigned);
__attribute__((weak)) void *__tsan_get_current_fiber(void);
__attribute__((weak)) void __tsan_switch_to_fiber(void *, unsigned);
__attribute__((weak)) void __tsan_acquire(void *);
__attribute__((weak)) void __tsan_release(void *);
__attribute__((weak)) void __tsan_read_range(void *, unsigned long);
__attribute__((weak)) void __tsan_write_range(void *, unsigned long);
}

namespace emu {
static inline bool has_asan() { return __asan_poison_memory_region != nullptr; }
static inline bool has_tsan() { return __tsan_create_fiber != nullptr; }

// Everything before release(word) in one thread happens before everything after acquire(word) in another.
static inline void release(void *word) {
    if (has_tsan()) __tsan_release(word);
}
static inline void acquire(void *word) {
    if (has_tsan()) __tsan_acquire(word);
}

static inline void check(void *p, size_t bytes, bool write) {
    if (!has_asan() || !bytes) return;
    void *bad = __asan_region_is_poisoned(p, bytes), *frame = __builtin_frame_address(0);
    if (bad) __asan_report_error(__builtin_return_address(0), frame, frame, bad, write, bytes);
}
static inline void kernel_reads(const void *p, size_t bytes) {
    check(const_cast<void *>(p), bytes, false);
    if (has_tsan()) __tsan_read_range(const_cast<void *>(p), bytes);
}
static inline void kernel_writes(void *p, size_t bytes) {
    check(p, bytes, true);
    if (has_tsan()) __tsan_write_range(p, bytes);
}

// memset and memcpy without interception by a sanitizer; the compiler inlines small ones.
static inline void fill(void *to, int value, size_t bytes) {
#if defined(__x86_64__)
    if (bytes == 16) return void(__builtin_memset(to, value, 16));
    asm volatile("rep stosb" : "+D"(to), "+c"(bytes) : "a"(value) : "memory");
#else
    for (volatile char *p = static_cast<volatile char *>(to); bytes--;) *p++ = static_cast<char>(value);
#endif
}
static inline void copy(void *to, const void *from, size_t bytes) {
    if (bytes == 4) return void(__builtin_memcpy(to, from, 4));
    if (bytes == 8) return void(__builtin_memcpy(to, from, 8));
    if (bytes == 16) return void(__builtin_memcpy(to, from, 16));
#if defined(__x86_64__)
    asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
#else
    const volatile char *s = static_cast<const volatile char *>(from);
    for (volatile char *p = static_cast<volatile char *>(to); bytes--;) *p++ = *s++;
#endif
}

void *own_memory(size_t bytes);         // for the emulator itself: TSan counts malloc and free as writes
void own_memory_back(void *p);

// A growing array in such memory.  Not std::vector: the linker may merge its functions with instrumented copies from the
// object file of a kernel.
template <class T> struct Array {
    T *data = nullptr;
    size_t count = 0, room = 0;

    void reserve(size_t n) {
        if (n <= room) return;
        T *moved = static_cast<T *>(own_memory(n * sizeof(T)));
        copy(moved, data, count * sizeof(T));
        own_memory_back(data);
        data = moved;
        room = n;
    }
    void set_zero(size_t n) {
        reserve(n);
        count = n;
        fill(data, 0, n * sizeof(T));
    }
    void add(const T &x) {
        if (count == room) reserve(room ? 2 * room : 64);
        data[count++] = x;
    }
    T take_last() { return data[--count]; }
    void clear() { count = 0; }
    bool empty() const { return count == 0; }
    size_t size() const { return count; }
    T &operator[](size_t i) { return data[i]; }
    T *begin() { return data; }
    T *end() { return data + count; }
};
}
