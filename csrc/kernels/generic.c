/* Baseline kernels: SSE2 on x86-64, NEON on arm64, whatever the compiler has elsewhere. */
#define ISA generic
#define VL 4
#define TILE_M 4
#define TILE_N 8
#include "table_body.inc"
