"""Allocation and kernel launches for the ops: `empty`, `zeros` and `put` allocate arrays, `launch` runs a kernel.

No module outside this package calls the kernel libraries, so the device is selected here, and a plan (pyops/plan.py) records
the launches of a step here.

`use` selects the device of new arrays: the CPU, with numpy arrays, or a GPU, with NDArrays.  A kernel runs on the device of
its arguments.
"""
import contextlib
import functools
import math
import os
import weakref

import _cffi_backend
import numpy as np

from pyops.backend import library

# C type of a pointer argument in the header -> dtype of the array
DTYPES = {'float': np.dtype(np.float32), 'double': np.dtype(np.float64), 'int32_t': np.dtype(np.int32),
          'int64_t': np.dtype(np.int64), 'uint64_t': np.dtype(np.uint64), 'uint8_t': np.dtype(np.uint8),
          'uint16_t': np.dtype(np.uint16)}
# status returned by a library -> exception
ERRORS = {1: ValueError, 2: MemoryError, 3: RuntimeError}


ALIGN = 64          # bytes: a vector that crosses two cache lines costs two accesses
_ffi = _cffi_backend.FFI()
_ADDRESS, _cast, _from_buffer, _BYTE = _ffi.typeof('intptr_t'), _ffi.cast, _ffi.from_buffer, np.dtype(np.uint8)


def as_shape(shape):
    """Return an int or several as a tuple of Python ints."""
    return shape if isinstance(shape, tuple) else tuple(np.atleast_1d(shape).tolist())


@functools.lru_cache(8192)
def row_major(shape):
    """Return the strides of a contiguous array in elements."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def _aligned(make, shape, dtype):
    """Return an array aligned to a cache line, in memory from make(bytes, uint8)."""
    dtype, shape = np.dtype(dtype), as_shape(shape)
    raw = make(math.prod(shape) * dtype.itemsize + ALIGN, _BYTE)
    return np.ndarray(shape, dtype, raw, -int(_cast(_ADDRESS, _from_buffer(raw))) % ALIGN)


class Host:
    """The CPU as the place of new arrays: numpy arrays and the kernels of csrc/."""
    name = 'cpu'

    def empty(self, shape, dtype, name=''):
        return _aligned(np.empty, shape, dtype)

    def allocate(self, shape, dtype, name):
        """Like `empty` of this module, but always on the CPU."""
        return empty(shape, dtype, name) if _place is self else self.empty(shape, dtype)

    def zeros(self, shape, dtype):
        return _aligned(np.zeros, shape, dtype)

    def put(self, array):
        return array

    def launch(self, name, *values):
        return launch(name, *values)

    def work_size(self, name, *sizes):
        return getattr(library.cpu().lib, f'pyops_{name}_work')(*sizes)

    def memory(self):
        """Return the size of the physical memory in bytes."""
        return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')

    def synchronize(self):
        """Wait until all launched kernels have finished: a no-op on the CPU, where launches are synchronous."""

    # ---- for plans

    def calls(self, calls):
        from pyops.backend.calls import Calls
        return Calls(calls)

    def block(self, nbytes):
        """Allocate nbytes of memory and return an object with nbytes; location(block) is the address."""
        return self.zeros(nbytes, np.uint8)

    def lease(self, block, shape, dtype, give_back):
        """Return an array over a block.  give_back(block) is called when the last view is deleted, unless give_back is None."""
        lease = _Lease(block, shape, dtype)
        if give_back:
            weakref.finalize(lease, give_back, block)
        return np.asarray(lease)

    def view(self, block, address, shape, dtype, strides):
        """Return an array at an address in a block, with strides in bytes."""
        return np.ndarray(shape, dtype, block, address - location(block), strides)


class _Lease:
    """The base object of an array over a block, deleted with the last view of the array."""

    def __init__(self, memory, shape, dtype):
        self.memory = memory
        self.__array_interface__ = {'version': 3, 'data': (memory.ctypes.data, False), 'shape': tuple(shape),
                                    'typestr': np.dtype(dtype).str}


HOST = Host()
_place = HOST
_gpu = None                 # the open GPU, if any; it runs the kernels that receive its arrays
_allocate = None            # allocates the arrays of `empty` while a plan records
_listen = None              # called with (name, values) before each launch while a plan records; returns whether to run it
_note = None                # receives the arguments of note_product while a plan records


def place():
    """Return the place of new arrays: HOST, or a pyops.backend.gpu.GPU."""
    return _place


def use(place):
    """Allocate new arrays on this place from now on."""
    global _place
    _place = place


@contextlib.contextmanager
def on(place):
    """Allocate new arrays on this place inside the block."""
    before = _place
    use(place)
    try:
        yield
    finally:
        use(before)


def set_gpu(gpu):
    """Register the open GPU."""
    global _gpu
    _gpu = gpu


def empty(shape, dtype=np.float32, name='tensor', kind='intermediate'):
    """Return an uninitialized C-contiguous array.

    name    its name in a plan, beginning with the name of the op: 'encoder.y'
    kind    its kind in a plan: 'intermediate', 'gradient' or 'scratch'
    """
    return _place.empty(shape, dtype, name) if _allocate is None else _allocate(shape, dtype, name, kind)


def empty_gradient(shape, name):
    """Return an uninitialized C-contiguous float32 array that is a gradient.  name: as for `empty`."""
    return empty(shape, name=name, kind='gradient')


def zeros(shape, dtype=np.float32):
    """Return a C-contiguous array of zeros, which a plan never allocates."""
    return _place.zeros(shape, dtype)


def put(array):
    """Return a numpy array on the place of new arrays: on the CPU the same array, on a GPU a copy."""
    return _place.put(array)


def get(array):
    """Return an array as a numpy array.  For an array on a GPU this is a copy and waits for the GPU."""
    return array if isinstance(array, np.ndarray) else array.numpy()


@contextlib.contextmanager
def hooks(allocate=None, listen=None, note=None):
    """Install hooks inside the block: allocate(shape, dtype, name, kind) returns the arrays of `empty`, listen(name, values)
    returns whether a launch runs, and note(...) receives the arguments of `note_product`.  None keeps the current hook."""
    global _allocate, _listen, _note
    before = _allocate, _listen, _note
    _allocate, _listen, _note = allocate or _allocate, listen or _listen, note or _note
    try:
        yield
    finally:
        _allocate, _listen, _note = before


def note_product(op, product, layer='', **facts):
    """Record in the current plan the Product (pyops/backend/kernels.py) that the last launch computes; no-op without a plan.

    op      an object with a `name`;  layer: a suffix of the name, for ops with several layers
    weight, bias    of a linear layer: Parameters, or arrays in the memory of parameters
    rows    the shape of the row axes in the op's arrays, such as (T, B);  None: the row axes of the input
    steps   True: the layer processes a sequence step by step, and its tensors are saved step by step
    heads   the number of heads of attention
    """
    if _note is not None:
        _note(op, product, layer, **facts)


def is_recorded():
    """Return whether a plan is recording; then every operation of a step on arrays must be a launch."""
    return _listen is not None


def hooked(shape, dtype, name):
    """Return an array allocated by the recording plan, or None if no plan records."""
    return _allocate(shape, dtype, name, 'intermediate') if _allocate else None


def is_array(value):
    """Return whether value is an array that ops accept: a numpy array or an NDArray."""
    return isinstance(value, np.ndarray) or hasattr(value, 'is_compact')


def location(array):
    """Return the address of the first element."""
    if not isinstance(array, np.ndarray):
        return array.location()
    if array.flags.c_contiguous:                # takes a third of the time; recording a plan needs thousands
        return int(_cast(_ADDRESS, _from_buffer(array)))
    return array.ctypes.data


def byte_strides(array):
    return array.strides if isinstance(array, np.ndarray) else tuple(array.dtype.itemsize * n for n in array.strides)


def may_overlap(a, b):
    """Return whether two C-contiguous arrays overlap in memory."""
    return location(a) < location(b) + b.nbytes and location(b) < location(a) + a.nbytes


def axes(name, array, names):
    """Return the shape of an array with the named axes, such as 'T B I'.  TypeError if it is not an array, ValueError for
    a different number of axes; both name the argument."""
    if not is_array(array):
        raise TypeError(f'{name}: want an array, got {type(array).__name__}')
    if array.ndim != len(names.split()):
        raise ValueError(f'{name}: want shape ({", ".join(names.split())}), got {array.shape}')
    return array.shape


def check_parameter(parameter, shape, sparse=False):
    """Check the value and the gradient of a Parameter.  sparse: whether the op marks the updated blocks in `touched`."""
    if parameter.touched is not None and not sparse:
        raise ValueError(f'{parameter.name}: its gradient is sparse, and this op adds to all of it; make it of a Spec '
                         'without sparse=True')
    check(parameter.name, parameter.value, shape)
    check(f'gradient of {parameter.name}', parameter.grad, shape)


def check(name, array, shape, dtype=np.float32):
    """Raise TypeError or ValueError, naming the argument, unless array is C-contiguous with this shape and dtype."""
    if not is_array(array):
        raise TypeError(f'{name}: want a {np.dtype(dtype)} array, got {type(array).__name__}')
    if array.dtype != dtype:
        raise TypeError(f'{name}: want dtype {np.dtype(dtype)}, got {array.dtype}')
    if not _is_contiguous(array):
        raise TypeError(f'{name}: want a C-contiguous array, got shape {array.shape} with strides {array.strides}; copy it')
    if array.shape != tuple(shape):
        raise ValueError(f'{name}: want shape {tuple(shape)}, got {array.shape}')


def check_kept(saved):
    """Raise ValueError if `saved`, a field of the ctx passed to backward, is None because forward had gradients=False."""
    if saved is None:
        raise ValueError('ctx: it comes from forward(..., gradients=False), which keeps nothing for backward')


def _is_contiguous(array):
    return array.flags.c_contiguous if isinstance(array, np.ndarray) else array.is_compact()


def permuted(array, axes):
    """Return a view whose axis i is axis axes[i] of the array."""
    return array.transpose(axes) if isinstance(array, np.ndarray) else array.permute(axes)


def as_rows(array):
    """View a C-contiguous array (..., C) as the matrix (R, C) of its rows."""
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def address(array):
    """Return a raw pointer to the first element, for kernels that take strides; the caller must keep the array alive."""
    ffi = library.cpu().ffi
    return ffi.cast(_pointer_types()[array.dtype], array.ctypes.data)


@functools.cache
def _pointer_types():
    return {dtype: f'{name} *' for name, dtype in DTYPES.items()}


def _pointer_converter(function, argument, takes_strides):
    ffi, dtype = library.cpu().ffi, DTYPES[argument.type]
    kind, raw = f'{argument.type}[]', ffi.CData
    strided = function in ('gemm', 'gemm_batched') and argument.name in 'abc'       # their strides are arguments, too

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


def plain(array):
    """Return an array in the type of its place: an NDArray in host memory as a numpy array."""
    return array.device.plain_view(array) if hasattr(array, 'is_compact') else array


def _as_plain(value):
    """Convert an argument of a launch for a plan."""
    if isinstance(value, library.cpu().ffi.CData):
        return np.array(list(value), np.int64)      # shape or strides
    return plain(value)


@functools.cache
def _prepare(name):
    """Return the C function, its number of arguments without the stream, (index, converter) for each pointer argument, and
    NULL for the stream."""
    ffi, lib, functions = library.cpu()
    arguments = functions['pyops_' + name].arguments[:-1]
    takes_strides = name == 'gemm' or any(a.name == 'strides' for a in arguments)
    pointers = [(i, _pointer_converter(name, a, takes_strides)) for i, a in enumerate(arguments) if a.pointer]
    return getattr(lib, 'pyops_' + name), len(arguments), pointers, ffi.NULL


def launch(name, *values):
    """Run the kernel pyops_<name> with these arguments, in the order of the header without the stream.

    Arrays must have the declared dtype.  A numpy array must be C-contiguous, an NDArray compact unless the kernel takes its
    strides.  None is NULL.  Raises ValueError with the kernel's message for invalid arguments, MemoryError for lack of memory.
    """
    if _gpu is not None and _gpu.holds(values):
        return _gpu.launch(name, *values)
    function, count, pointers, stream = _prepare(name)
    if len(values) != count:
        raise TypeError(f'{name}: want {count} arguments, got {len(values)}')
    converted = list(values)                    # keeps the arrays alive during the call
    for i, convert in pointers:
        converted[i] = convert(values[i])
    if is_wanted(name, values):
        status = function(*converted, stream)
        if status:
            check_status(status)


def is_wanted(name, values):
    """Return whether a launch must run now; a recording plan receives the launch and can suppress it."""
    return _listen is None or _listen(name, [_as_plain(value) for value in values])


def _element_strides(array):
    return [n // 4 for n in array.strides] if isinstance(array, np.ndarray) else array.strides


def gemm(c, a, b, bias=None, accumulate=False, relu=False):
    """Compute c (+)= a b + bias.  c (M, N) with contiguous rows, a (M, K) and b (K, N) with any strides, bias (N,) or None.

    relu: apply c = max(c, 0) last.  A transposed operand is a view: gemm(dweight, dy.T, x, accumulate=True).
    """
    (M, N), K = c.shape, a.shape[1]
    if a.shape[0] != M or b.shape != (K, N):
        raise ValueError(f'gemm: c {c.shape}, a {a.shape} and b {b.shape} do not fit')
    row, column = _element_strides(c)
    if M and N > 1 and column != 1:
        raise ValueError(f'gemm: c: want contiguous rows, got strides {c.strides}')
    # an empty array has strides of 0
    launch('gemm', c, a, b, bias, M, N, K, max(row, N), *_element_strides(a), *_element_strides(b), accumulate, relu)


def product(a, b, bias=None):
    """Return a b + bias as a new array; operands as in `gemm`."""
    c = empty((a.shape[0], b.shape[1]))
    gemm(c, a, b, bias)
    return c


def gemm_batched(c, a, b, accumulate=False):
    """Compute c (+)= a b for each index of the leading axes.  c (..., M, N) with contiguous rows, a (..., M, K), b (..., K, N),
    with equal leading axes and any strides."""
    *batch, M, N = c.shape
    K = a.shape[-1]
    if a.shape != (*batch, M, K) or b.shape != (*batch, K, N):
        raise ValueError(f'gemm_batched: c {c.shape}, a {a.shape} and b {b.shape} do not fit')
    strides = [_element_strides(operand) for operand in (c, a, b)]
    if N > 1 and strides[0][-1] != 1:
        raise ValueError(f'gemm_batched: c: want contiguous rows, got strides {c.strides}')
    layout = np.array(batch, np.int64), np.array([operand[:-2] for operand in strides], np.int64).reshape(-1)
    launch('gemm_batched', c, a, b, *layout, len(batch), M, N, K, max(strides[0][-2], N), *strides[1][-2:], *strides[2][-2:],
           accumulate)


def copy(y, x):
    """Copy x to y, both C-contiguous float32 of equal size, with a launch, so that a plan records it."""
    launch('strided_unary', y, x, np.array([y.size], np.int64), np.ones(2, np.int64), 1, library.cpu().lib.PYOPS_OP_COPY)


def check_status(status):
    """Raise an exception with the library's message if the status of a C call is an error."""
    if status:
        ffi, lib, _ = library.cpu()
        raise ERRORS[status](ffi.string(lib.pyops_last_error()).decode())


def work_size(name, *sizes):
    """Return the workspace size of the kernel pyops_<name> for these sizes, in floats."""
    return _place.work_size(name, *sizes)


def work(name, *sizes):
    """Allocate the workspace of the kernel pyops_<name> for these sizes."""
    return empty(work_size(name, *sizes), name='work', kind='scratch')


def isa():
    """Return the instruction set of the selected kernels: 'generic', 'avx2' or 'avx512'."""
    ffi, lib, _ = library.cpu()
    return ffi.string(lib.pyops_isa()).decode()


def threads():
    """Return the maximum number of threads of a kernel."""
    return library.cpu().lib.pyops_threads()


def set_threads(n):
    """Set the number of threads (1 to 1024); results do not depend on it."""
    check_status(library.cpu().lib.pyops_set_threads(n))
