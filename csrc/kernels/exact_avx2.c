/* The kernels of avx2.c without fused multiply-adds, for pyops_set_exact, compiled with
 * -mavx2 -ffp-contract=off (see Makefile). */
#if defined __x86_64__ && !PYOPS_WITHOUT_EXACT
#define ISA exact_avx2
#define VL 8
#define TILE_M 6
#define TILE_N 16
#define EXACT 1
#include "table_body.inc"
#else
typedef int no_avx2_on_this_architecture;
#endif
