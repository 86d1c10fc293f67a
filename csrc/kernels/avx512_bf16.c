/* The bfloat16 micro-kernel of AVX512_BF16, compiled with -mavx512bf16 -mavx512bw (see Makefile).  All other kernels are those
 * of AVX-512. */
#if (defined __x86_64__ || defined __i386__) && !PYOPS_LOWERED
#define ISA avx512_bf16
#define VL 16
#define TILE_M 14
#define TILE_N 32
#define EXACT 0
#include "bf16_body.inc"
#else
typedef int no_avx512_on_this_architecture;
#endif
