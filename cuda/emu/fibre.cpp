// fibre.cpp - the stacks of threads, each with a guard page.
#include "fibre.h"
#include <pthread.h>
#include <sys/mman.h>
#include "engine.h"
#include "settings.h"

namespace emu {
#if defined(__aarch64__)
// Push the callee-saved registers; of a new stack only the return address matters.
asm(R"(.text
.globl emu_switch_stack
.hidden emu_switch_stack
.type emu_switch_stack, %function
emu_switch_stack:
    sub sp, sp, #160
    stp x19, x20, [sp]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    str x29, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x2, sp
    stp x30, x2, [x0]
    ldp x30, x2, [x1]
    mov sp, x2
    ldp x19, x20, [sp]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldr x29, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size emu_switch_stack, . - emu_switch_stack
)");
constexpr int FRAME = 160;                      // bytes that a switch pops from the stack
#elif defined(__x86_64__)
constexpr int FRAME = 8;                        // the return address, as if the entry had been called
#else
#error "the emulator has no switch of stacks for this CPU"
#endif

constexpr size_t PAGE = 4096;

Fibre *new_fibre(size_t number) {
    auto *fibre = static_cast<Fibre *>(own_memory(sizeof(Fibre)));
    *fibre = Fibre();
    fibre->stack_size = settings().stack;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *memory = mmap(nullptr, fibre->stack_size + PAGE, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED) die("no memory for the stack of a thread");
    mprotect(memory, PAGE, PROT_NONE);                          // guard page: a stack overflow faults here
    fibre->stack = static_cast<char *>(memory) + PAGE;
    fibre->top = fibre->stack + fibre->stack_size - number * 5 % 64 * 64;
    if (has_tsan()) fibre->tsan = __tsan_create_fiber(0);
    return fibre;
}

void make_host_fibre(Fibre *fibre) {
    if (has_tsan()) fibre->tsan = __tsan_get_current_fiber();
    if (!has_asan()) return;
    static thread_local char *stack;                            // pthread_getattr_np reads a file: call it once per OS thread
    static thread_local size_t size;
    if (!stack) {
        pthread_attr_t attributes;
        void *found;
        pthread_getattr_np(pthread_self(), &attributes);
        pthread_attr_getstack(&attributes, &found, &size);
        pthread_attr_destroy(&attributes);
        stack = static_cast<char *>(found);
    }
    fibre->stack = stack;
    fibre->stack_size = size;
}

// Always start from the top: a fibre of an earlier launch may hold addresses of another OS thread's variables.
void restart(Fibre *fibre, void (*entry)()) {
    if (has_asan()) __asan_unpoison_memory_region(fibre->stack, fibre->stack_size);
    char *frame = fibre->top - FRAME;
    fill(frame, 0, FRAME);
    fibre->registers[0] = reinterpret_cast<void *>(entry);
    fibre->registers[1] = frame;
}
}
