/* Products in int8 with AVX-VNNI, compiled with -mavx2 -mfma -mavxvnni (see Makefile).  The AVX2 table supplies all other
 * kernels. */
#include "../internal.h"
#if defined __AVXVNNI__
#define VL 8
#include "int8_body.inc"
pyops_int8_kernel *const pyops_int8_avx2_vnni = row_int8_group;
#else
pyops_int8_kernel *const pyops_int8_avx2_vnni = NULL;         /* this compiler has no AVX-VNNI */
#endif
