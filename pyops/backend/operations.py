"""Operations on NDArrays as launches of the strided, gemm, softmax, embedding and argmax kernels."""
import functools

import numpy as np

from pyops.backend import library
from pyops.backend.arrays import BF16
from pyops.backend.device import Device

FLOAT, INT = np.dtype(np.float32), np.dtype(np.int32)


@functools.lru_cache(8192)
def _layout(shape, *operands):
    """Return shape and strides as C arrays, and the number of axes.  operands: shape and strides of each operand, which is
    broadcast to `shape`."""
    ffi, strides = library.cpu().ffi, []
    for own, steps in zip(operands[::2], operands[1::2], strict=True):
        strides += [0] * (len(shape) - len(own)) + [0 if n == 1 else step for n, step in zip(own, steps, strict=True)]
    return ffi.new('int64_t[]', list(shape)), ffi.new('int64_t[]', strides), len(shape)


def _suffix(y):
    """Return the end of the name of the kernel for the dtype of y."""
    if y.dtype == BF16:
        raise TypeError('NDArray: operations take float32 and int32, got bfloat16; copy the array with pyops.backend.as_float')
    return '' if y.dtype is FLOAT else '_int32'


class KernelOperations(Device):
    """The operations of a Device that launches kernels."""

    @functools.cached_property
    def _numbers(self):
        """{name of an operation: its number in pyops.h}"""
        lib = library.cpu().lib
        return {name.removeprefix('PYOPS_OP_').lower(): getattr(lib, name) for name in dir(lib) if name.startswith('PYOPS_OP_')}

    def bits(self, x):
        """Return a compact int32 NDArray as a float32 array for `launch`, with the same bits."""
        raise NotImplementedError

    def unary(self, op, y, x):
        self.launch(f'strided_unary{_suffix(y)}', y, x,
                    *_layout(y.shape, y.shape, y.strides, x.shape, x.strides), self._numbers[op])

    def binary(self, op, y, a, b):
        self.launch(f'strided_binary{_suffix(y)}', y, a, b,
                    *_layout(y.shape, y.shape, y.strides, a.shape, a.strides, b.shape, b.strides), self._numbers[op])

    def scalar(self, op, y, x, value, reflected):
        self.launch(f'strided_scalar{_suffix(y)}', y, x,
                    *_layout(y.shape, y.shape, y.strides, x.shape, x.strides), self._numbers[op], reflected, value)

    def fill(self, y, value):
        self.launch(f'strided_fill{_suffix(y)}', y,
                    *_layout(y.shape, y.shape, y.strides), value)

    def convert(self, y, x):
        self.launch('strided_from_int32' if y.dtype is FLOAT else 'strided_to_int32', y, x,
                    *_layout(y.shape, y.shape, y.strides, x.shape, x.strides))

    def reduce(self, op, y, x):
        self.launch(f'strided_reduce{_suffix(y)}', y, x,
                    *_layout(x.shape, y.shape, y.strides, x.shape, x.strides), self._numbers[op])

    def softmax(self, y, x, outer, n, inner, log):
        self.launch('softmax_forward', y, x, outer, n, inner, log)

    def softmax_backward(self, dx, dy, y, outer, n, inner, log):
        self.launch('softmax_backward', dx, dy, y, outer, n, inner, log)

    def argmax(self, y, x):
        self.launch('argmax', y, x, *x.shape)

    def matmul(self, y, a, b):
        (*batch, M, N), K = y.shape, a.shape[-1]
        if y.dtype is not FLOAT:                # a sum of outer products, exact modulo 2^32
            self.fill(y, 0)
            for k in range(K):
                y += a[..., k:k + 1] * b[..., k:k + 1, :]
        elif batch:
            operands = [part[:-2] for x in (y, a, b) for part in (x.shape, x.strides)]
            self.launch('gemm_batched', y, a, b, *_layout(tuple(batch), *operands),
                        M, N, K, N, *a.strides[-2:], *b.strides[-2:], False)
        else:
            self.launch('gemm', y, a, b, None, M, N, K, N, *a.strides, *b.strides, False, False)

    def take(self, y, x, ids):
        # the kernel copies rows bit by bit, so int32 rows can pass as float32
        y, x = (part if part.dtype is FLOAT else self.bits(part) for part in (y, x))
        try:
            self.launch('embedding_forward', y, x, ids, ids.size, *x.shape)
        except ValueError as error:
            raise IndexError(f'take: {error}') from None

    def add_at(self, y, ids, rows):
        try:
            self.launch('embedding_backward', y, None, rows, ids, ids.size, *y.shape)
        except ValueError as error:
            raise IndexError(f'add_at: {error}') from None
