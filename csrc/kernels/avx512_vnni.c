/* Products in int8 with AVX512_VNNI, compiled with -mavx512vnni -mavx512bw (see Makefile).  The AVX-512 table supplies all
 * other kernels. */
#include "../internal.h"
#if (defined __x86_64__ || defined __i386__) && !PYOPS_LOWERED
#define VL 16
#include "int8_body.inc"
pyops_int8_kernel *const pyops_int8_avx512_vnni = row_int8_group;
#else
pyops_int8_kernel *const pyops_int8_avx512_vnni = NULL;
#endif
