// switch.h - the switch from one stack to another: a few instructions, whereas swapcontext makes a system call.
//
// A CPU predicts the target of a return from the most recent call, and after a switch of stacks that was a call of another
// thread.  So the switch is inlined into the kernel, with no return after it: this halved the time of a barrier.
#pragma once
#define EMU_INLINE inline __attribute__((always_inline))

namespace emu {
struct Switch { void **from, **to; };   // registers to save and to load; `to` is NULL if no switch is needed

#if defined(__x86_64__)
// Save the state of this fibre in `from` and continue from the state in `to`.  The clobbers make the compiler save all other
// registers.
static EMU_INLINE void switch_stack(void **from, void **to) {
    asm volatile("leaq 1f(%%rip), %%rax\n"
                 "movq %%rax, (%0)\n"
                 "movq %%rsp, 8(%0)\n"
                 "movq %%rbp, 16(%0)\n"
                 "movq %%rbx, 24(%0)\n"
                 "movq 24(%1), %%rbx\n"
                 "movq 16(%1), %%rbp\n"
                 "movq 8(%1), %%rsp\n"
                 "jmp *(%1)\n"
                 "1:\n"
                 : "+D"(from), "+S"(to)
                 :
                 : "rax", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "cc", "memory", "xmm0", "xmm1",
                   "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14",
                   "xmm15");
}
#else
extern "C" void emu_switch_stack(void **from, void **to);       // the same, in fibre.cpp
static EMU_INLINE void switch_stack(void **from, void **to) { emu_switch_stack(from, to); }
#endif
}
