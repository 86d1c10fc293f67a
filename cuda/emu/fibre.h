// fibre.h - fibres: a CUDA thread that waits switches to the stack of another one, within the same OS thread.
#pragma once
#include <cstddef>
#include "sanitizer.h"
#include "switch.h"

namespace emu {
struct Fibre {
    void *registers[4] = {};            // of a suspended fibre: program counter, stack pointer, two more
    char *stack = nullptr;
    size_t stack_size = 0;
    char *top = nullptr;                // the initial stack pointer
    void *asan_stack = nullptr, *tsan = nullptr;
};
Fibre *new_fibre(size_t number);        // number: spreads the tops of the stacks over the sets of the cache
void make_host_fibre(Fibre *fibre);     // a fibre for the stack of the calling OS thread
void restart(Fibre *fibre, void (*entry)());

// Notify the sanitizers before and after a switch.
static inline void leave_fibre(Fibre *from, Fibre *to) {
    if (has_asan()) __sanitizer_start_switch_fiber(&from->asan_stack, to->stack, to->stack_size);
    if (has_tsan()) __tsan_switch_to_fiber(to->tsan, 1);        // 1: the switch does not synchronise
}
static inline void enter_fibre(Fibre *fibre) {                  // NULL: the fibre has just started
    if (has_asan()) __sanitizer_finish_switch_fiber(fibre ? fibre->asan_stack : nullptr, nullptr, nullptr);
}
}
