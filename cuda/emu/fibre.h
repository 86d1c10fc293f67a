// fibre.h - stacks to switch between: a CUDA thread that waits gives the CPU to another one within the same OS thread.
#pragma once
#include <cstddef>
#include "sanitizer.h"
#include "switch.h"

namespace emu {
struct Fibre {
    void *registers[4] = {};            // of a fibre that does not run: where it goes on, the stack pointer, two more
    char *stack = nullptr;
    size_t stack_size = 0;
    char *top = nullptr;                // where it begins
    void *asan_stack = nullptr, *tsan = nullptr;
};
Fibre *new_fibre(size_t number);        // the number spreads the tops of the stacks over the sets of the cache
void make_host_fibre(Fibre *fibre);     // the stack of the OS thread that calls
void restart(Fibre *fibre, void (*entry)());

// What the sanitizers want to know before a switch, and after it.
static inline void leave_fibre(Fibre *from, Fibre *to) {
    if (has_asan()) __sanitizer_start_switch_fiber(&from->asan_stack, to->stack, to->stack_size);
    if (has_tsan()) __tsan_switch_to_fiber(to->tsan, 1);        // 1: the switch orders nothing
}
static inline void enter_fibre(Fibre *fibre) {                  // NULL: one that has just begun
    if (has_asan()) __sanitizer_finish_switch_fiber(fibre ? fibre->asan_stack : nullptr, nullptr, nullptr);
}
}
