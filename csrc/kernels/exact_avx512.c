/* The kernels of avx512.c without fused multiply-adds, for pyops_set_exact, compiled with
 * -mavx512f -mavx512vl -mavx512dq -ffp-contract=off (see Makefile). */
#if defined __x86_64__ && !PYOPS_WITHOUT_EXACT
#define ISA exact_avx512
#define VL 16
#define TILE_M 14
#define TILE_N 32
#define EXACT 1
#include "table_body.inc"
#else
typedef int no_avx512_on_this_architecture;
#endif
