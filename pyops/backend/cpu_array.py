"""The CPU as a device of arrays: the kernels of csrc/strided.c and csrc/gemm.c."""
import functools

import numpy as np

from pyops import backend
from pyops.backend import launch, library
from pyops.backend.device import Buffer, Device

_FLOAT, _INT = np.dtype(np.float32), np.dtype(np.int32)


@functools.lru_cache(8192)
def _layout(shape, *operands):
    """-> shape and strides as a kernel wants them, and how many axes.  operands: the shape and the strides of each, which
    are broadcast to `shape`."""
    ffi, strides = library.cpu().ffi, []
    for own, steps in zip(operands[::2], operands[1::2], strict=True):
        strides += [0] * (len(shape) - len(own)) + [0 if n == 1 else step for n, step in zip(own, steps, strict=True)]
    return ffi.new('int64_t[]', list(shape)), ffi.new('int64_t[]', strides), len(shape)


class CPU(Device):
    name = 'cpu'

    def __init__(self):
        ffi, lib, _ = library.cpu()
        self._from_buffer = ffi.from_buffer
        self._kinds = {_FLOAT: ffi.typeof('float[]'), _INT: ffi.typeof('int32_t[]')}
        self._numbers = {name.removeprefix('PYOPS_OP_').lower(): getattr(lib, name)
                         for name in dir(lib) if name.startswith('PYOPS_OP_')}

    def allocate(self, shape, dtype, name):
        return self.wrap(backend.empty(shape, dtype, name))

    def wrap(self, owner, foreign=False):
        return Buffer(self, owner, self._from_buffer(self._kinds[owner.dtype], owner), foreign)

    def unary(self, op, y, x):
        launch('strided_unary' if y.dtype is _FLOAT else 'strided_unary_int32', y, x,
               *_layout(y.shape, y.shape, y.strides, x.shape, x.strides), self._numbers[op])

    def binary(self, op, y, a, b):
        launch('strided_binary' if y.dtype is _FLOAT else 'strided_binary_int32', y, a, b,
               *_layout(y.shape, y.shape, y.strides, a.shape, a.strides, b.shape, b.strides), self._numbers[op])

    def scalar(self, op, y, x, value, reflected):
        launch('strided_scalar' if y.dtype is _FLOAT else 'strided_scalar_int32', y, x,
               *_layout(y.shape, y.shape, y.strides, x.shape, x.strides), self._numbers[op], reflected, value)

    def fill(self, y, value):
        launch('strided_fill' if y.dtype is _FLOAT else 'strided_fill_int32', y,
               *_layout(y.shape, y.shape, y.strides), value)

    def convert(self, y, x):
        launch('strided_from_int32' if y.dtype is _FLOAT else 'strided_to_int32', y, x,
               *_layout(y.shape, y.shape, y.strides, x.shape, x.strides))

    def reduce(self, op, y, x):
        launch('strided_reduce' if y.dtype is _FLOAT else 'strided_reduce_int32', y, x,
               *_layout(x.shape, y.shape, y.strides, x.shape, x.strides), self._numbers[op])

    def argmax(self, y, x):
        launch('argmax', y, x, *x.shape)

    def matmul(self, y, a, b):
        (*batch, M, N), K = y.shape, a.shape[-1]
        if y.dtype is not _FLOAT:               # exact, modulo 2^32: one outer product after the other
            self.fill(y, 0)
            for k in range(K):
                y += a[..., k:k + 1] * b[..., k:k + 1, :]
        elif batch:
            operands = [part[:-2] for x in (y, a, b) for part in (x.shape, x.strides)]
            launch('gemm_batched', y, a, b, *_layout(tuple(batch), *operands),
                   M, N, K, N, *a.strides[-2:], *b.strides[-2:], False)
        else:
            launch('gemm', y, a, b, None, M, N, K, N, *a.strides, *b.strides, False, False)

    def take(self, y, x, ids):
        # rows are moved as they are, whatever their bits mean
        y, x = (part if part.dtype is _FLOAT else part.numpy().view(_FLOAT) for part in (y, x))
        try:
            launch('embedding_forward', y, x, ids, ids.size, *x.shape)
        except ValueError as error:
            raise IndexError(f'take: {error}') from None

    def add_at(self, y, ids, rows):
        try:
            launch('embedding_backward', y, rows, ids, ids.size, *y.shape)
        except ValueError as error:
            raise IndexError(f'add_at: {error}') from None
