"""Facts about kernels that the header does not have.  The module that launches a kernel declares it, beside its op.

    declare(gru_forward=Kernel(flops=...), gru_backward=Kernel(flops=...))

pyops.profile reads the costs.  A kernel without special costs is declared, too, as Kernel(): the tests refuse a plan whose
kernels are not all declared.
"""
from collections.abc import Callable
from typing import NamedTuple


class Kernel(NamedTuple):
    """The costs of one call.  s: the sizes and scalars by the header's names.

    flops   (s, array) -> operations of its matrix products, two for a multiply-add; array(name) is an argument, None where it
            is NULL.  None: the kernel has no matrix product and is bound by memory
    bytes   (s) -> bytes that cross memory.  None: each operand once
    """
    flops: Callable | None = None
    bytes: Callable | None = None


KERNELS = {}        # name without pyops_ -> Kernel, of all modules imported so far


def declare(**kernels):
    """Add kernels to KERNELS.  ValueError for a kernel that was declared before."""
    for name, kernel in kernels.items():
        if name in KERNELS:
            raise ValueError(f'{name}: this kernel is declared twice; declare it in one module only')
        KERNELS[name] = kernel


def product_of_shape(s, array):
    """The operations of a product (M, K) (K, N)."""
    return 2 * s['M'] * s['N'] * s['K']


def products_of_shapes(s, array):
    """The operations of a product for each index of the leading axes."""
    count = 1
    for n in s['shape']:
        count *= n
    return count * product_of_shape(s, array)


# kernels that belong to no single op
declare(gemm=Kernel(product_of_shape), gemm_batched=Kernel(products_of_shapes), gemm_bf16=Kernel(product_of_shape),
        to_bf16=Kernel(), fill=Kernel(), axpy=Kernel(), scale=Kernel(), column_sums=Kernel(), argmax=Kernel(),
        increment=Kernel(), tick=Kernel(), fma_loop=Kernel(),
        gather_pixels=Kernel(bytes=lambda s: s['B'] * s['C'] * 5 + s['B'] * 8),
        **{f'strided_{kind}{suffix}': Kernel() for kind in ('unary', 'binary', 'scalar', 'fill', 'reduce')
           for suffix in ('', '_int32')}, strided_from_int32=Kernel(), strided_to_int32=Kernel())
