"""Operations on NDArrays as launches of the strided, gemm, softmax, embedding and argmax kernels."""
import functools

import numpy as np

from pyops.backend import library
from pyops.backend.arrays import BF16
from pyops.backend.device import Device

FLOAT, INT, DOUBLE = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.float64)
# kernel of a conversion: dtypes of result and input -> its name
CONVERSIONS = {(FLOAT, INT): 'strided_from_int32', (INT, FLOAT): 'strided_to_int32',
                (DOUBLE, FLOAT): 'strided_double_from_float', (DOUBLE, INT): 'strided_double_from_int32',
                (FLOAT, DOUBLE): 'strided_double_to_float', (INT, DOUBLE): 'strided_double_to_int32'}


@functools.lru_cache(8192)
def layout(shape, *operands):
    """Return shape and strides as C arrays, and the number of axes.  operands: shape and strides of each operand, which is
    broadcast to `shape`."""
    ffi, strides = library.cpu().ffi, []
    for own, steps in zip(operands[::2], operands[1::2], strict=True):
        strides += [0] * (len(shape) - len(own)) + [0 if n == 1 else step for n, step in zip(own, steps, strict=True)]
    return ffi.new('int64_t[]', list(shape)), ffi.new('int64_t[]', strides), len(shape)


def suffix_of(y):
    """Return the end of the names of the kernels for the dtype of y.  TypeError if its device has none."""
    if y.dtype is FLOAT:
        return ''
    if y.dtype == BF16:
        raise TypeError('NDArray: operations take float32 and int32, got bfloat16; copy the array with pyops.backend.as_float')
    if y.dtype is not DOUBLE:
        return '_int32'
    if not y.device.is_host:
        raise TypeError('NDArray: float64 is supported on the CPU only, got an array on the GPU; use .astype("float32")')
    return '_double'


def truth_of(condition, dtype):
    """Return an array of this dtype with 1 where condition is not 0, else 0; condition itself if it is such a mask."""
    return (condition if condition.is_mask else condition != 0)._cast(dtype)


class KernelOperations(Device):
    """The operations of a Device that launches kernels."""

    @functools.cached_property
    def numbers(self):
        """{name of an operation: its number in pyops.h}"""
        lib = library.cpu().lib
        return {name.removeprefix('PYOPS_OP_').lower(): getattr(lib, name) for name in dir(lib) if name.startswith('PYOPS_OP_')}

    def unary(self, op, y, x):
        self.launch(f'strided_unary{suffix_of(y)}', y, x,
                    *layout(y.shape, y.shape, y.strides, x.shape, x.strides), self.numbers[op])

    def binary(self, op, y, a, b):
        self.launch(f'strided_binary{suffix_of(y)}', y, a, b,
                    *layout(y.shape, y.shape, y.strides, a.shape, a.strides, b.shape, b.strides), self.numbers[op])

    def scalar(self, op, y, x, value, reflected):
        if y.dtype is DOUBLE:
            number = self._number(y, value)
            return self.binary(op, y, *((number, x) if reflected else (x, number)))
        self.launch(f'strided_scalar{suffix_of(y)}', y, x,
                    *layout(y.shape, y.shape, y.strides, x.shape, x.strides), self.numbers[op], reflected, value)

    def where(self, y, condition, a, b):
        """((a ^ b) & chosen) ^ b: the CUDA library has no kernel for this."""
        suffix_of(y)                                    # raise for float64 on a GPU
        chosen = 0 - truth_of(condition, INT)           # all bits are 1, or none
        y, a, b = y.bits_of(), a.bits_of(), b.bits_of()
        self.binary('xor', y, a, b)
        self.binary('and', y, y, chosen)
        self.binary('xor', y, y, b)

    def _number(self, like, value):
        """Return an array of shape () on this device: kernels for float64 take no scalars."""
        return type(like)(self.wrap(np.array(value, like.dtype)), 0, (), (), like.dtype)

    def fill(self, y, value):
        if y.dtype is DOUBLE:
            return self.unary('copy', y, self._number(y, value))
        self.launch(f'strided_fill{suffix_of(y)}', y,
                    *layout(y.shape, y.shape, y.strides), value)

    def convert(self, y, x):
        if DOUBLE in (x.dtype, y.dtype):
            suffix_of(x), suffix_of(y)              # raise for a GPU
        self.launch(CONVERSIONS[y.dtype, x.dtype], y, x, *layout(y.shape, y.shape, y.strides, x.shape, x.strides))

    def reduce(self, op, y, x):
        self.launch(f'strided_reduce{suffix_of(y)}', y, x,
                    *layout(x.shape, y.shape, y.strides, x.shape, x.strides), self.numbers[op])

    def softmax(self, y, x, outer, n, inner, log):
        self.launch('softmax_forward', y, x, outer, n, inner, log)

    def softmax_backward(self, dx, dy, y, outer, n, inner, log):
        self.launch('softmax_backward', dx, dy, y, outer, n, inner, log)

    def argmax(self, y, x):
        self.launch('argmax_double' if x.dtype is DOUBLE else 'argmax', y, x, *x.shape)

    def argsort(self, y, x):
        self.launch('argsort_double', y, x, *x.shape)

    def cumulate(self, op, y, x, outer, n, inner, last):
        self.launch(f'cumulate{suffix_of(y)}', y, x, outer, n, inner, self.numbers[op], last)

    def matmul(self, y, a, b):
        (*batch, M, N), K = y.shape, a.shape[-1]
        if y.dtype is DOUBLE:
            operands = [part[:-2] for x in (y, a, b) for part in (x.shape, x.strides)]
            self.launch('matmul_double', y, a, b, *layout(tuple(batch), *operands),
                        M, N, K, N, *a.strides[-2:], *b.strides[-2:])
        elif y.dtype is not FLOAT:              # a sum of outer products, exact modulo 2^32
            self.fill(y, 0)
            for k in range(K):
                y += a[..., k:k + 1] * b[..., k:k + 1, :]
        elif batch:
            operands = [part[:-2] for x in (y, a, b) for part in (x.shape, x.strides)]
            self.launch('gemm_batched', y, a, b, *layout(tuple(batch), *operands),
                        M, N, K, N, *a.strides[-2:], *b.strides[-2:], False)
        else:
            self.launch('gemm', y, a, b, None, M, N, K, N, *a.strides, *b.strides, False, False)

    def take(self, y, x, ids):
        y, x = self._words(y), self._words(x)
        try:
            self.launch('embedding_forward', y, x, ids, ids.size, *x.shape)
        except ValueError as error:
            raise IndexError(f'take: {error}') from None

    def add_at(self, y, ids, rows):
        try:
            if y.dtype is DOUBLE:
                self.launch('add_rows_double', y, rows, ids, ids.size, *y.shape)
            else:
                self.launch('embedding_backward', y, None, rows, ids, ids.size, *y.shape)
        except ValueError as error:
            raise IndexError(f'add_at: {error}') from None

    def put_rows(self, y, ids, rows):
        y, rows = self._words(y), self._words(rows)
        self.launch('scatter_rows', y, rows, ids, y.shape[0], *rows.shape, rows.shape[1], rows.shape[1])

    def _words(self, x):
        """Return rows (R, C) as rows of float32 with the same bits, for kernels that only copy."""
        words = self.bits(x, FLOAT)
        return words if words.ndim == 2 else words.reshape(len(words), x.shape[1] * 2)
