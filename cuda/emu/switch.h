// switch.h - the switch from one stack to another: a few instructions, where swapcontext would make a system call each time.
//
// A CPU predicts where a function returns to from the latest call, and after a switch that was another thread's.  So the
// switch stands in the kernel itself, inlined, with no return behind it: that took half the time off a barrier.
#pragma once
#define EMU_INLINE inline __attribute__((always_inline))

namespace emu {
struct Switch { void **from, **to; };   // registers to save and to load; `to` is NULL where there is nothing to do

#if defined(__x86_64__)
// Leave in `from` where this fibre is, and go on where `to` was left.  The compiler keeps nothing in the other registers.
static EMU_INLINE void switch_stack(void **from, void **to) {
    asm volatile(
        "leaq 1f(%%rip), %%rax\n"
        "movq %%rax, (%0)\n"
        "movq %%rsp, 8(%0)\n"
        "movq %%rbp, 16(%0)\n"
        "movq %%rbx, 24(%0)\n"
        "movq 24(%1), %%rbx\n"
        "movq 16(%1), %%rbp\n"
        "movq 8(%1), %%rsp\n"
        "jmp *(%1)\n"
        "1:\n"
        : "+D"(from), "+S"(to) :
        : "rax", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "cc", "memory",
          "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7",
          "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
}
#else
extern "C" void emu_switch_stack(void **from, void **to);       // the same; in fibre.cpp
static EMU_INLINE void switch_stack(void **from, void **to) { emu_switch_stack(from, to); }
#endif
}
