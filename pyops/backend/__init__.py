"""The floor under the ops: arrays come from `empty` and `zeros`, and every kernel is started by `launch`.

Nothing else in the package calls the library, so this is the one place where a device is chosen, and where a plan
(pyops/plan.py) listens to what a step does.
"""
import contextlib
import functools
import math

import numpy as np
from cffi import FFI

from pyops.backend import library

_DTYPES = {'float': np.dtype(np.float32), 'double': np.dtype(np.float64),
           'int32_t': np.dtype(np.int32), 'int64_t': np.dtype(np.int64),
           'uint64_t': np.dtype(np.uint64), 'uint8_t': np.dtype(np.uint8), 'uint16_t': np.dtype(np.uint16)}
_ERRORS = {1: ValueError, 2: MemoryError, 3: RuntimeError}


ALIGN = 64          # bytes: a vector that crosses two cache lines costs two accesses
_ffi = FFI()
_ADDRESS, _cast, _from_buffer, _BYTE = _ffi.typeof('intptr_t'), _ffi.cast, _ffi.from_buffer, np.dtype(np.uint8)


def _aligned(make, shape, dtype):
    """An array whose memory, from make(bytes, uint8), begins on a cache line."""
    dtype = np.dtype(dtype)
    shape = shape if isinstance(shape, tuple) else tuple(np.atleast_1d(shape).tolist())
    raw = make(math.prod(shape) * dtype.itemsize + ALIGN, _BYTE)
    return np.ndarray(shape, dtype, raw, -int(_cast(_ADDRESS, _from_buffer(raw))) % ALIGN)


def _plain_empty(shape, dtype, name):
    return _aligned(np.empty, shape, dtype)


_allocate = _plain_empty
_listen = None              # asked with (name, values) before each launch, while a plan records


def empty(shape, dtype=np.float32, name='tensor'):
    """A C-contiguous array of any content.  A plan calls it by `name`, after the op that asks for it."""
    return _allocate(shape, dtype, name)


@contextlib.contextmanager
def hooks(allocate=None, listen=None):
    """Inside the block allocate(shape, dtype, name) hands out the arrays of `empty`, and listen(name, values) says of
    every launch whether it shall run.  None leaves either as it is."""
    global _allocate, _listen
    before = _allocate, _listen
    _allocate, _listen = allocate or _allocate, listen or _listen
    try:
        yield
    finally:
        _allocate, _listen = before


def zeros(shape, dtype=np.float32):
    return _aligned(np.zeros, shape, dtype)


def axes(name, array, names):
    """The sizes of an array's axes, 'T B I' for three; TypeError or ValueError, naming the argument, for another number."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f'{name}: want an array, got {type(array).__name__}')
    if array.ndim != len(names.split()):
        raise ValueError(f'{name}: want shape ({", ".join(names.split())}), got {array.shape}')
    return array.shape


def check_parameter(parameter, shape):
    """`check` for the value and the gradient of a Parameter."""
    check(parameter.name, parameter.value, shape)
    check(f'gradient of {parameter.name}', parameter.grad, shape)


def check(name, array, shape, dtype=np.float32):
    """Raise TypeError or ValueError, naming the argument, unless it is a C-contiguous array of that shape and dtype."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype or not array.flags.c_contiguous:
        got = f'{array.dtype}, strides {array.strides}' if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f'{name}: want a C-contiguous {np.dtype(dtype)} array, got {got}')
    if array.shape != tuple(shape):
        raise ValueError(f'{name}: want shape {tuple(shape)}, got {array.shape}')


def as_rows(array):
    """A C-contiguous array (..., C) as the matrix (R, C) of its rows: a view."""
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def address(array):
    """A raw pointer to the first element, for kernels that take strides; the caller keeps the array alive."""
    ffi = library.cpu().ffi
    return ffi.cast(_pointer_types()[array.dtype], array.ctypes.data)


@functools.cache
def _pointer_types():
    return {dtype: f'{name} *' for name, dtype in _DTYPES.items()}


def _pointer_converter(function, argument, takes_strides):
    ffi, dtype = library.cpu().ffi, _DTYPES[argument.type]
    kind, raw = f'{argument.type}[]', ffi.CData
    strided = function == 'gemm' and argument.name in 'abc'     # whose strides are arguments too

    def convert(array):
        if isinstance(array, raw):
            return array
        if array is None:
            return ffi.NULL
        if array.dtype is not dtype and array.dtype != dtype:
            raise TypeError(f'{function}: {argument.name}: want {dtype}, got {array.dtype}')
        if not isinstance(array, np.ndarray):       # an NDArray
            if takes_strides or array.is_compact():
                return array.pointer()
            raise TypeError(f'{function}: {argument.name}: want a compact array, got shape {array.shape}, '
                            f'strides {array.strides}')
        if strided and not array.flags.c_contiguous:
            return address(array)
        return ffi.from_buffer(kind, array, require_writable=not argument.const)
    return convert


def _as_numpy(value):
    """A value of a launch as a plan wants it: arrays of any kind as numpy's, over the same memory."""
    if isinstance(value, library.cpu().ffi.CData):
        return np.array(list(value), np.int64)      # shape or strides
    return value.numpy() if hasattr(value, 'numpy') else value


@functools.cache
def _prepare(name):
    """The C function, its number of arguments, and for each that is a pointer its place and what turns a Python value
    into it; the last argument, the stream, is NULL."""
    ffi, lib, functions = library.cpu()
    arguments = functions['pyops_' + name].arguments[:-1]
    takes_strides = name == 'gemm' or any(a.name == 'strides' for a in arguments)
    pointers = [(i, _pointer_converter(name, a, takes_strides)) for i, a in enumerate(arguments) if a.pointer]
    return getattr(lib, 'pyops_' + name), len(arguments), pointers, ffi.NULL


def launch(name, *values):
    """Run the kernel pyops_<name> of the header on arrays and numbers, in the header's order without the stream.

    A numpy array must be C-contiguous and of the declared dtype; an NDArray of that dtype, and compact unless the kernel
    takes its strides; None is NULL.  What the kernel refuses raises ValueError with its text, exhausted memory MemoryError.
    """
    function, count, pointers, stream = _prepare(name)
    if len(values) != count:
        raise TypeError(f'{name}: want {count} arguments, got {len(values)}')
    converted = list(values)                    # which keeps the arrays alive during the call
    for i, convert in pointers:
        converted[i] = convert(values[i])
    if _listen is None or _listen(name, [_as_numpy(value) for value in values]):
        status = function(*converted, stream)
        if status:
            check_status(status)


def gemm(c, a, b, bias=None, accumulate=False, relu=False):
    """c (+)= a b + bias.  c (M, N) with contiguous rows, a (M, K), b (K, N) of any strides, bias (N,) or None.

    relu: c = max(c, 0) at the very end.  A transposed operand is a view: gemm(dweight, dy.T, x, accumulate=True).
    """
    (M, N), K, item = c.shape, a.shape[1], 4
    if a.shape[0] != M or b.shape != (K, N):
        raise ValueError(f'gemm: c {c.shape}, a {a.shape} and b {b.shape} do not fit')
    if M and N > 1 and c.strides[1] != item:
        raise ValueError(f'gemm: c: want contiguous rows, got strides {c.strides}')
    # an empty array has strides of 0
    launch('gemm', c, a, b, bias, M, N, K, max(c.strides[0] // item, N), *(s // item for s in (*a.strides, *b.strides)),
           accumulate, relu)


def check_status(status):
    """Turn the status of a C call into an exception with the library's text."""
    if status:
        ffi, lib, _ = library.cpu()
        raise _ERRORS[status](ffi.string(lib.pyops_last_error()).decode())


def work_size(name, *sizes):
    """Floats of scratch that the kernel pyops_<name> wants for these sizes."""
    return getattr(library.cpu().lib, f'pyops_{name}_work')(*sizes)


def work(name, *sizes):
    """The scratch array itself."""
    return empty(work_size(name, *sizes), name='work')


def isa():
    """The instruction set whose kernels run: 'generic', 'avx2' or 'avx512'."""
    ffi, lib, _ = library.cpu()
    return ffi.string(lib.pyops_isa()).decode()


def threads():
    """How many threads a kernel may use."""
    return library.cpu().lib.pyops_threads()


def set_threads(n):
    """Use n threads (1 to 1024) from now on; results do not depend on it."""
    check_status(library.cpu().lib.pyops_set_threads(n))
