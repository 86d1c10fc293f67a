"""The floor under the ops: arrays come from `empty`, `zeros` and `put`, and every kernel is started by `launch`.

Nothing else in the package calls a library, so this is the one place where a device is chosen, and where a plan
(pyops/plan.py) listens to what a step does.

Arrays are made where `use` says: on the CPU, where they are numpy's, or on a GPU, where they are NDArrays.  A kernel runs
where the arrays are that it is given.
"""
import contextlib
import functools
import math
import os
import weakref

import _cffi_backend
import numpy as np

from pyops.backend import library

# of the arrays behind pointers, by their type in the header
DTYPES = {'float': np.dtype(np.float32), 'double': np.dtype(np.float64), 'int32_t': np.dtype(np.int32),
          'int64_t': np.dtype(np.int64), 'uint64_t': np.dtype(np.uint64), 'uint8_t': np.dtype(np.uint8),
          'uint16_t': np.dtype(np.uint16)}
# by the status that a library returns
ERRORS = {1: ValueError, 2: MemoryError, 3: RuntimeError}


ALIGN = 64          # bytes: a vector that crosses two cache lines costs two accesses
_ffi = _cffi_backend.FFI()
_ADDRESS, _cast, _from_buffer, _BYTE = _ffi.typeof('intptr_t'), _ffi.cast, _ffi.from_buffer, np.dtype(np.uint8)


def as_shape(shape):
    """A number or several as a tuple of Python's numbers."""
    return shape if isinstance(shape, tuple) else tuple(np.atleast_1d(shape).tolist())


@functools.lru_cache(8192)
def row_major(shape):
    """The strides of a compact array, in elements."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def _aligned(make, shape, dtype):
    """An array whose memory, from make(bytes, uint8), begins on a cache line."""
    dtype, shape = np.dtype(dtype), as_shape(shape)
    raw = make(math.prod(shape) * dtype.itemsize + ALIGN, _BYTE)
    return np.ndarray(shape, dtype, raw, -int(_cast(_ADDRESS, _from_buffer(raw))) % ALIGN)


class Host:
    """The place of arrays that are numpy's, and of the kernels of csrc/."""
    name = 'cpu'

    def empty(self, shape, dtype, name=''):
        return _aligned(np.empty, shape, dtype)

    def allocate(self, shape, dtype, name):
        """As `empty` of this module, but here, wherever arrays are made now."""
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
        """Bytes there are."""
        return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')

    def synchronize(self):
        """Wait until all is done that was launched: on the CPU it is."""

    # ---- what a plan wants

    def calls(self, calls):
        from pyops.backend.calls import Calls
        return Calls(calls)

    def block(self, nbytes):
        """Memory: something with nbytes and, in location(block), an address."""
        return self.zeros(nbytes, np.uint8)

    def lease(self, block, shape, dtype, give_back):
        """An array over a block; give_back(block) when the last view of it is gone.  None: never."""
        lease = _Lease(block, shape, dtype)
        if give_back:
            weakref.finalize(lease, give_back, block)
        return np.asarray(lease)

    def view(self, block, address, shape, dtype, strides):
        """An array in a block, strides in bytes."""
        return np.ndarray(shape, dtype, block, address - location(block), strides)


class _Lease:
    """The base of an array over a block: when the last view of the array is gone, so is this."""

    def __init__(self, memory, shape, dtype):
        self.memory = memory
        self.__array_interface__ = {'version': 3, 'data': (memory.ctypes.data, False), 'shape': tuple(shape),
                                    'typestr': np.dtype(dtype).str}


HOST = Host()
_place = HOST
_gpu = None                 # the GPU that is open, if any: where kernels run that are given its arrays
_allocate = None            # hands out the arrays of `empty`, while a plan records
_listen = None              # asked with (name, values) before each launch, while a plan records
_note = None                # hears which product the last launch was, while a plan records


def place():
    """Where arrays are made now: HOST, or a pyops.backend.gpu.GPU."""
    return _place


def use(place):
    """Make arrays there from now on."""
    global _place
    _place = place


@contextlib.contextmanager
def on(place):
    """Make arrays there inside the block."""
    before = _place
    use(place)
    try:
        yield
    finally:
        use(before)


def set_gpu(gpu):
    """Say that a GPU is open."""
    global _gpu
    _gpu = gpu


def empty(shape, dtype=np.float32, name='tensor'):
    """A C-contiguous array of any content.  A plan calls it by `name`, after the op that asks for it."""
    return (_allocate or _place.empty)(shape, dtype, name)


def zeros(shape, dtype=np.float32):
    """A C-contiguous array of zeros, which is never a plan's."""
    return _place.zeros(shape, dtype)


def put(array):
    """A numpy array where arrays are made: on the CPU the array itself, else a copy."""
    return _place.put(array)


def get(array):
    """The numbers of an array as a numpy array: a copy where they lie on a GPU, which is waited for."""
    return array if isinstance(array, np.ndarray) else array.numpy()


@contextlib.contextmanager
def hooks(allocate=None, listen=None, note=None):
    """Inside the block allocate(shape, dtype, name) hands out the arrays of `empty`, listen(name, values) decides of every
    launch whether it runs, and note(...) takes the arguments of `note_product`.  None leaves any of them as it is."""
    global _allocate, _listen, _note
    before = _allocate, _listen, _note
    _allocate, _listen, _note = allocate or _allocate, listen or _listen, note or _note
    try:
        yield
    finally:
        _allocate, _listen, _note = before


def note_product(op, product, layer='', **facts):
    """Tell a plan that records what the last launch computes: a Product (pyops/backend/kernels.py) of an op's layer.

    op      with a `name`;  layer: a name behind that, of an op with several layers
    weight, bias    of a linear layer: Parameters, or arrays in the memory of parameters
    rows    the axes that the rows of its matrices have in the op's arrays, (T, B);  None: those of its input
    steps   True: the layer takes the steps of a sequence one by one, and its tensors are saved step by step
    heads   of attention
    """
    if _note is not None:
        _note(op, product, layer, **facts)


def is_recorded():
    """Whether a plan records: then all that a step does to arrays has to be a launch."""
    return _listen is not None


def hooked(shape, dtype, name):
    """The array that a plan hands out, or None where none records."""
    return _allocate(shape, dtype, name) if _allocate else None


def is_array(value):
    """Whether it is an array that ops take: numpy's, or an NDArray."""
    return isinstance(value, np.ndarray) or hasattr(value, 'is_compact')


def location(array):
    """The address of the first element."""
    if not isinstance(array, np.ndarray):
        return array.location()
    if array.flags.c_contiguous:                # a third of the time, and to record a plan asks for thousands
        return int(_cast(_ADDRESS, _from_buffer(array)))
    return array.ctypes.data


def byte_strides(array):
    return array.strides if isinstance(array, np.ndarray) else tuple(array.dtype.itemsize * n for n in array.strides)


def may_overlap(a, b):
    """Whether two C-contiguous arrays have memory in common."""
    return location(a) < location(b) + b.nbytes and location(b) < location(a) + a.nbytes


def axes(name, array, names):
    """The sizes of an array's axes, 'T B I' for three; TypeError or ValueError, naming the argument, for another number."""
    if not is_array(array):
        raise TypeError(f'{name}: want an array, got {type(array).__name__}')
    if array.ndim != len(names.split()):
        raise ValueError(f'{name}: want shape ({", ".join(names.split())}), got {array.shape}')
    return array.shape


def check_parameter(parameter, shape, sparse=False):
    """`check` for the value and the gradient of a Parameter.  sparse: whether the op says which rows of it were touched."""
    if parameter.touched is not None and not sparse:
        raise ValueError(f'{parameter.name}: its gradient is sparse, and this op adds to all of it; make it of a Spec '
                         'without sparse=True')
    check(parameter.name, parameter.value, shape)
    check(f'gradient of {parameter.name}', parameter.grad, shape)


def check(name, array, shape, dtype=np.float32):
    """Raise TypeError or ValueError, naming the argument, unless it is a C-contiguous array of that shape and dtype."""
    if not is_array(array):
        raise TypeError(f'{name}: want a {np.dtype(dtype)} array, got {type(array).__name__}')
    if array.dtype != dtype:
        raise TypeError(f'{name}: want dtype {np.dtype(dtype)}, got {array.dtype}')
    if not _is_contiguous(array):
        raise TypeError(f'{name}: want a C-contiguous array, got shape {array.shape} with strides {array.strides}; copy it')
    if array.shape != tuple(shape):
        raise ValueError(f'{name}: want shape {tuple(shape)}, got {array.shape}')


def check_kept(saved):
    """Raise ValueError where `saved`, of the ctx that a backward pass got, is None: forward was told gradients=False."""
    if saved is None:
        raise ValueError('ctx: it comes from forward(..., gradients=False), which keeps nothing for backward')


def _is_contiguous(array):
    return array.flags.c_contiguous if isinstance(array, np.ndarray) else array.is_compact()


def permuted(array, axes):
    """A view whose axis i is axis axes[i] of the array."""
    return array.transpose(axes) if isinstance(array, np.ndarray) else array.permute(axes)


def as_rows(array):
    """A C-contiguous array (..., C) as the matrix (R, C) of its rows: a view."""
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def address(array):
    """A raw pointer to the first element, for kernels that take strides; the caller keeps the array alive."""
    ffi = library.cpu().ffi
    return ffi.cast(_pointer_types()[array.dtype], array.ctypes.data)


@functools.cache
def _pointer_types():
    return {dtype: f'{name} *' for name, dtype in DTYPES.items()}


def _pointer_converter(function, argument, takes_strides):
    ffi, dtype = library.cpu().ffi, DTYPES[argument.type]
    kind, raw = f'{argument.type}[]', ffi.CData
    strided = function in ('gemm', 'gemm_batched') and argument.name in 'abc'       # whose strides are arguments too

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
    """An array as the place has it that it belongs to: an NDArray in the host's memory as numpy's."""
    return array.device.plain_view(array) if hasattr(array, 'is_compact') else array


def _as_plain(value):
    """A value of a launch for a plan."""
    if isinstance(value, library.cpu().ffi.CData):
        return np.array(list(value), np.int64)      # shape or strides
    return plain(value)


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
    if _gpu is not None and _gpu.holds(values):
        return _gpu.launch(name, *values)
    function, count, pointers, stream = _prepare(name)
    if len(values) != count:
        raise TypeError(f'{name}: want {count} arguments, got {len(values)}')
    converted = list(values)                    # which keeps the arrays alive during the call
    for i, convert in pointers:
        converted[i] = convert(values[i])
    if is_wanted(name, values):
        status = function(*converted, stream)
        if status:
            check_status(status)


def is_wanted(name, values):
    """Whether a launch shall run now: a plan that records is told of it, and may say no."""
    return _listen is None or _listen(name, [_as_plain(value) for value in values])


def _element_strides(array):
    return [n // 4 for n in array.strides] if isinstance(array, np.ndarray) else array.strides


def gemm(c, a, b, bias=None, accumulate=False, relu=False):
    """c (+)= a b + bias.  c (M, N) with contiguous rows, a (M, K), b (K, N) of any strides, bias (N,) or None.

    relu: c = max(c, 0) at the very end.  A transposed operand is a view: gemm(dweight, dy.T, x, accumulate=True).
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
    """a b + bias as a new array; the operands are those of `gemm`."""
    c = empty((a.shape[0], b.shape[1]))
    gemm(c, a, b, bias)
    return c


def gemm_batched(c, a, b, accumulate=False):
    """c (+)= a b for each place of the leading axes.  c (..., M, N) with contiguous rows, a (..., M, K), b (..., K, N), the
    leading axes the same and of any strides."""
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
    """y = x, both C-contiguous float32 of one size; a launch, so that a plan records it."""
    launch('strided_unary', y, x, np.array([y.size], np.int64), np.ones(2, np.int64), 1, library.cpu().lib.PYOPS_OP_COPY)


def check_status(status):
    """Turn the status of a C call into an exception with the library's text."""
    if status:
        ffi, lib, _ = library.cpu()
        raise ERRORS[status](ffi.string(lib.pyops_last_error()).decode())


def work_size(name, *sizes):
    """Floats of scratch that the kernel pyops_<name> wants for these sizes."""
    return _place.work_size(name, *sizes)


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
