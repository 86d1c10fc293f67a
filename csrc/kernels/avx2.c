/* AVX2 + FMA kernels, compiled with -mavx2 -mfma (see Makefile). */
#if defined __x86_64__ || defined __i386__
#define ISA avx2
#define VL 8
#define TILE_M 6
#define TILE_N 16
#define EXACT 0
#include "table_body.inc"
#else
typedef int no_avx2_on_this_architecture;
#endif
