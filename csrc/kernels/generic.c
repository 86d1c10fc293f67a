/* Baseline kernels: SSE2 on x86-64, NEON on arm64, whatever the compiler has elsewhere.  On x86-64 they also serve
 * pyops_set_exact, since SSE2 has no fused multiply-add.  (32-bit x86 may compute floats in registers of 80 bits.) */
#define ISA generic
#define VL 4
#define TILE_M 4
#define TILE_N 8
#if defined __x86_64__
#define EXACT 2
#else
#define EXACT 0
#endif
#include "table_body.inc"
