/* AVX-512 kernels, compiled with -mavx512f -mavx512vl -mavx512dq -mfma (see Makefile). */
#if defined __x86_64__ || defined __i386__
#define ISA avx512
#define VL 16
#define TILE_M 14
#define TILE_N 32
#define EXACT 0
#include "table_body.inc"
#else
typedef int no_avx512_on_this_architecture;
#endif
