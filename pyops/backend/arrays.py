"""The two array types of ops: numpy arrays in host memory, and NDArrays on a GPU.

The functions of this module accept both, so that no other module needs to know the difference.
"""
import functools
import math
from typing import Any

import _cffi_backend
import numpy as np

MAX_AXES = 8        # of an NDArray
ALIGN = 64          # bytes: a vector that crosses two cache lines costs two accesses
# The dtype of bfloat16 arrays, which only a GPU has.  NumPy has no bfloat16: this is a 2-byte dtype without arithmetic.
BF16 = np.dtype([('bfloat16', np.uint16)])
_ffi = _cffi_backend.FFI()
_ADDRESS, _cast, _from_buffer = _ffi.typeof('intptr_t'), _ffi.cast, _ffi.from_buffer


def as_shape(shape):
    """Return an int or several as a tuple of Python ints."""
    return shape if isinstance(shape, tuple) else (shape,) if type(shape) is int else tuple(np.atleast_1d(shape).tolist())


@functools.lru_cache(8192)
def row_major(shape):
    """Return the strides of a contiguous array in elements."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def dtype_name(dtype):
    """Return the name of a dtype: 'float32', 'bfloat16'."""
    return 'bfloat16' if dtype == BF16 else np.dtype(dtype).name


def from_bf16(array):
    """Return a numpy array of dtype BF16 as float32."""
    return (array.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(array):
    """Return a numpy array of float32 rounded to the dtype BF16, to the nearest, ties to even; NaN stays NaN."""
    array = np.ascontiguousarray(array, np.float32)
    bits = array.view(np.uint32)
    rounded = (bits + np.uint32(0x7fff) + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(array), np.uint32(0x7fc0), rounded).astype(np.uint16).view(BF16)


class Array:
    """The memory of an NDArray: a Buffer, and offset, shape and strides in elements.  pyops.ndarray adds the operations.

    An array_type, NDArray, checks every assignment to these attributes, because kernels trust them.  So a new array is first
    an Array, whose attributes are set in a fraction of that time, and becomes an array_type by its __class__.
    """

    __slots__ = ('buffer', 'offset', 'shape', 'strides', 'dtype', '__weakref__')
    buffer: Any
    offset: Any
    shape: Any
    strides: Any
    dtype: Any

    @property
    def device(self):
        return self.buffer.device

    @property
    def ndim(self):
        return len(self.shape)

    @property
    def size(self):
        return math.prod(self.shape)

    @property
    def nbytes(self):
        return self.size * self.dtype.itemsize

    def is_compact(self):
        """Return whether the elements are contiguous in row-major order."""
        compact = row_major(self.shape)
        return self.strides == compact or 0 in self.shape or all(
            n == 1 or step == packed for n, step, packed in zip(self.shape, self.strides, compact, strict=True))

    def pointer(self):
        """Return a C pointer to the first element, for kernels.  Raises ValueError if the memory was freed."""
        try:
            return self.buffer.pointer + self.offset
        except TypeError:
            raise self._freed() from None

    def location(self):
        """Return the address of the first element, on the device.  Raises ValueError if the memory was freed."""
        if self.buffer.owner is None:
            raise self._freed()
        return self.buffer.address + self.dtype.itemsize * self.offset

    def kernel_view(self):
        """Return this array in the array type that kernel ops take on its device, over the same memory."""
        if self.buffer.owner is None:
            raise self._freed()
        return self.buffer.device.kernel_view(self)

    def _freed(self):
        return ValueError(f'array of shape {self.shape}: its memory was freed')


ARRAY_TYPES = np.ndarray, Array


def is_array(value):
    """Return whether value is an array that ops accept: a numpy array or an NDArray."""
    return isinstance(value, ARRAY_TYPES)


def get(array):
    """Return an array as a numpy array, bfloat16 as float32.  For an array on a GPU this is a copy and waits for the GPU."""
    return array if isinstance(array, np.ndarray) else array.numpy()


def as_kernel_array(array):
    """Return an array in the array type of ops on its device: an NDArray in host memory as a numpy array."""
    return array.kernel_view() if isinstance(array, Array) else array


def location(array):
    """Return the address of the first element."""
    if not isinstance(array, np.ndarray):
        return array.location()
    if array.flags.c_contiguous:                # takes a third of the time; recording a plan needs thousands
        return int(_cast(_ADDRESS, _from_buffer(array)))
    return array.ctypes.data


def byte_strides(array):
    return array.strides if isinstance(array, np.ndarray) else tuple([array.dtype.itemsize * n for n in array.strides])


def element_strides(array):
    if not isinstance(array, np.ndarray):
        return array.strides
    item, strides = array.itemsize, array.strides
    if len(strides) == 2:                       # without a loop, for products
        return [strides[0] // item, strides[1] // item]
    return [n // item for n in strides]


def is_contiguous(array):
    """Return whether the elements are contiguous in row-major order."""
    return array.flags.c_contiguous if isinstance(array, np.ndarray) else array.is_compact()


def permuted(array, axes):
    """Return a view whose axis i is axis axes[i] of the array."""
    return array.transpose(axes) if isinstance(array, np.ndarray) else array.permute(axes)


def as_rows(array):
    """View a C-contiguous array (..., C) as the matrix (R, C) of its rows."""
    return array if array.ndim == 2 else array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def may_overlap(a, b):
    """Return whether two C-contiguous arrays overlap in memory."""
    return location(a) < location(b) + b.nbytes and location(b) < location(a) + a.nbytes
