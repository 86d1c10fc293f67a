"""The CPU: memory shared with numpy, kernel launches through cffi, and replay."""
import math
import os

import _cffi_backend
import numpy as np

from pyops import CPU_PRECISIONS, PRECISIONS
from pyops.backend import library, state
from pyops.backend.arrays import ALIGN, Array, as_shape, location
from pyops.backend.calls import Calls
from pyops.backend.device import DTYPES, ERRORS, Block, Buffer, Device, not_compact, wrong_dtype
from pyops.backend.operations import DOUBLE, FLOAT, INT, KernelOperations, layout, suffix_of, truth_of
from pyops.backend.pool import LEAST, Pool
from pyops.files import BLOCK

_ffi = _cffi_backend.FFI()
ADDRESS, _FLOATS, _CData, _BYTE = _ffi.typeof('intptr_t'), _ffi.typeof('float *'), _ffi.CData, np.dtype(np.uint8)
_CHARS = _ffi.typeof('char[]')
cast, _from_buffer = _ffi.cast, _ffi.from_buffer
NULL, SMALL = _ffi.NULL, 8192       # SMALL: the most bytes of a SmallBuffer
FEW = 4096          # elements of an array of ops for which alignment gains less time than it takes
# dtypes of NDArrays -> the C types of pointers to them
KINDS = {FLOAT: _ffi.typeof('float[]'), INT: _ffi.typeof('int32_t[]'), DOUBLE: _ffi.typeof('double[]')}
_DTYPES = {kind: dtype for dtype, kind in KINDS.items()}
# small_memory(kind, n): a pointer to n new elements, which owns them;  zeroed_memory: to zeros
small_memory, zeroed_memory = _ffi.new_allocator(should_clear_after_alloc=False), _ffi.new_allocator()
# buffer_over(pointer): Python's buffer over the elements;  unpacked(pointer, n): n of them as a list
buffer_over, unpacked = _ffi.buffer, _ffi.unpack


def as_floats(pointer):
    """Return a pointer of another type as a pointer to float32."""
    return cast(_FLOATS, pointer)


def aligned(make, shape, dtype, to=ALIGN):
    """Return an array aligned to a cache line, or to this number of bytes, in memory from make(bytes, uint8)."""
    dtype, shape = np.dtype(dtype), as_shape(shape)
    return _aligned(make, math.prod(shape) * dtype.itemsize, shape, dtype, to)


def _aligned(make, nbytes, shape, dtype, to=ALIGN):
    """Return the same for a tuple and a dtype whose array has so many bytes."""
    raw = make(nbytes + to, _BYTE)
    return np.ndarray(shape, dtype, raw, -int(cast(ADDRESS, _from_buffer(raw))) % to)


LARGE = Pool(lambda nbytes: aligned(np.empty, (nbytes,), _BYTE, BLOCK))      # may be saved: see files.write_past_cache
_in_use = {}            # pointer of pooled_memory -> its block of LARGE


def _take(nbytes):
    block = LARGE.take(nbytes)
    pointer = _from_buffer(_CHARS, block)
    _in_use[pointer] = block
    return pointer


# as small_memory, but in aligned memory of the pool; at least 8 bytes
pooled_memory = _ffi.new_allocator(_take, lambda pointer: LARGE.give_back(_in_use.pop(pointer)), False)


class Host(Device):
    """A device with arrays in host memory.  Kernels of csrc/ run on them."""
    is_host, stream = True, NULL
    library = staticmethod(library.cpu)

    # ---- allocate

    def empty_array(self, shape, dtype, name='', kind='intermediate'):
        # a small array of numpy's, in a fifth of the time; kernels may expect that scratch memory is aligned
        if state.on_allocate is None and kind != 'scratch':
            count = shape if type(shape) is int else math.prod(shape) if type(shape) is tuple else SMALL
            if count <= FEW:
                return np.empty(shape, dtype)
        return super().empty_array(shape, dtype, name, kind)

    def new(self, shape, dtype):
        dtype, shape = np.dtype(dtype), as_shape(shape)
        nbytes = math.prod(map(int, shape)) * dtype.itemsize        # numbers of numpy would overflow
        if nbytes < LEAST or dtype.kind not in 'fiu':
            return _aligned(np.empty, nbytes, shape, dtype)
        return LARGE.empty(shape, dtype)

    def zero_array(self, shape, dtype):
        return aligned(np.zeros, shape, dtype)

    def allocate(self, shape, dtype, name):
        return self.wrap(self.empty_array(shape, dtype, name))

    def memory(self):
        return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')

    # ---- copy

    def put(self, array):
        return array

    def wrap(self, owner, foreign=False):
        return Buffer(self, owner, None, foreign)

    def numpy(self, x):
        if 0 in x.shape:
            return np.empty(x.shape, x.dtype)
        item = x.dtype.itemsize
        return np.ndarray(x.shape, x.dtype, x.buffer.owner, item * x.offset, tuple([item * n for n in x.strides]))

    def assign(self, y, value):
        return False

    def kernel_array(self, x):
        if 0 in x.shape or not x.is_compact():
            return self.numpy(x.compact())
        if x.buffer.owner is None:
            raise x._freed()
        return np.ndarray(x.shape, x.dtype, x.buffer.owner, x.dtype.itemsize * x.offset)

    def bits(self, x, dtype):
        if x.dtype == dtype:
            return x
        words = x.dtype.itemsize // 4
        shape, strides = (*x.shape, 2)[:x.ndim + words - 1], (*(n * words for n in x.strides), 1)[:x.ndim + words - 1]
        return type(x)(self.as_dtype(x.buffer, dtype), x.offset * words, shape, strides, dtype)

    def as_dtype(self, buffer, dtype):
        """Return a Buffer over the same memory for arrays of another dtype."""
        return self.wrap(buffer.owner.reshape(-1).view(dtype), True)

    def kernel_view(self, x):
        return self.numpy(x)

    def address(self, owner):
        return location(owner)

    def read(self, address, nbytes):
        return np.array(_ffi.buffer(cast('char *', address), nbytes), _BYTE) if nbytes else np.empty(0, _BYTE)

    def buffer_of(self, data):
        block = self.block(max(data.nbytes, 1))
        block.owner[:data.nbytes] = data
        return block

    def dlpack(self, x, stream, max_version, dl_device, copy):
        how = dict(max_version=max_version, dl_device=dl_device, copy=copy)
        return x.numpy().__dlpack__(**{name: value for name, value in how.items() if value is not None})

    # ---- launch and synchronize

    def synchronize(self):
        pass                                    # a launch returns when the kernel has finished

    def converter(self, kernel, argument, takes_strides):
        name, dtype, kind = argument.name, DTYPES[argument.type], _ffi.typeof(f'{argument.type}[]')
        pointer, is_written = _ffi.typeof(f'{argument.type} *'), not argument.const
        takes_strides |= kernel == 'gemm_batched' and name in 'abc'
        ndarray = np.ndarray

        def convert(array):
            if type(array) is ndarray and array.dtype is dtype and (not takes_strides or array.flags.c_contiguous):
                return _from_buffer(kind, array, is_written)        # the usual case
            if array is None:
                return NULL
            if array.dtype is not dtype and array.dtype != dtype:
                raise wrong_dtype(kernel, name, dtype, array)
            if isinstance(array, Array):
                if takes_strides or array.is_compact():
                    return array.pointer()
                raise not_compact(kernel, name, array)
            if takes_strides and not array.flags.c_contiguous:
                if is_written and not array.flags.writeable:
                    raise ValueError(f'{kernel}: {name}: expected a writeable array, got a read-only one; copy it')
                if array.flags.f_contiguous:            # a transposed view: faster than .ctypes
                    return _from_buffer(kind, array.T, is_written)
                return cast(pointer, array.ctypes.data)
            return _from_buffer(kind, array, is_written)
        return convert

    def host_converter(self, kernel, argument):
        convert = self.converter(kernel, argument, False)
        return lambda value: value if isinstance(value, _CData) else convert(value)

    def check(self, status):
        if status:
            ffi, lib, _ = library.cpu()
            raise ERRORS[status](ffi.string(lib.pyops_last_error()).decode())

    # ---- record and replay

    def block(self, nbytes):
        return Block(self, self.zero_array(nbytes, _BYTE))

    def lease(self, block, shape, dtype, give_back):
        return np.asarray(_Lease(block, shape, dtype, give_back))

    def view(self, block, address, shape, dtype, strides):
        return np.ndarray(shape, dtype, block.owner, address - block.address, strides)

    def calls(self, calls):
        return Calls(calls, self)


class _Lease:
    """The base object of an array over a block, deleted with the last view of the array: then it gives the block back."""
    __slots__ = 'block', 'give_back', '__array_interface__'

    def __init__(self, block, shape, dtype, give_back):
        self.block, self.give_back = block, give_back
        self.__array_interface__ = {'version': 3, 'data': (block.address, False), 'shape': tuple(shape),
                                    'typestr': np.dtype(dtype).str}

    def __del__(self):
        if self.give_back:
            self.give_back(self.block)


class SmallBuffer(Buffer):
    """A Buffer whose memory belongs to the pointer and is freed with it: from Python the cheapest memory to get.

    The numpy array over it, `owner`, is created when it is first asked for, and keeps the memory alive, too.  Setting an
    attribute takes time, so `device` (HOST) and `foreign` belong to the class.
    """
    __slots__ = ('_owner',)
    foreign = False

    def __init__(self, pointer, nbytes):
        self.pointer, self.nbytes, self.version, self.mask = pointer, nbytes, 0, None

    @property
    def owner(self):
        try:
            return self._owner
        except AttributeError:      # not yet created
            if self.pointer is not None:
                self._owner = np.frombuffer(_ffi.buffer(self.pointer), _DTYPES[_ffi.typeof(self.pointer)])
                return self._owner

    def free(self):
        self._owner = self.pointer = None


class ResultBuffer(Buffer):
    """A Buffer over a numpy array that an op computed.  Its pointer is created when it is first asked for: kernel ops take the
    numpy array.  `device` (HOST) and `foreign` belong to the class, as in SmallBuffer."""
    __slots__ = ()
    foreign = True

    def __init__(self, owner):
        self.owner, self.nbytes, self.version, self.mask = owner, owner.nbytes, 0, None

    def __getattr__(self, name):
        if name != 'pointer':           # that is not set yet
            raise AttributeError(f'{type(self).__name__} has no attribute {name!r}')
        self.pointer = _from_buffer(KINDS[self.owner.dtype], self.owner)
        return self.pointer


class CPU(KernelOperations, Host):
    """The CPU, with the kernels of csrc/ for all operations.  Those on NDArrays are called without `launch` unless a plan
    records: its checks of the arguments take as long as a small operation."""
    name = 'cpu'
    _precision = 'fp32'

    def __init__(self):
        super().__init__()
        self._direct = {}                                   # (family of kernels, dtype) -> function of the library

    @property
    def precision(self):
        """The precision of the factors of matrix products: 'fp32' or 'bf16'; sums and everything else are float32."""
        return self._precision

    @precision.setter
    def precision(self, name):
        if name not in CPU_PRECISIONS:
            raise ValueError(f'precision: {name!r}, expected {" or ".join(CPU_PRECISIONS)}')
        if name != self._precision:
            self.check(library.cpu().lib.pyops_set_precision(PRECISIONS.index(name)))
            self._precision = name

    @property
    def exact(self):
        """Whether float32 kernels give the same bits on every instruction set (pyops.set_exact)."""
        return bool(library.cpu().lib.pyops_is_exact())

    @exact.setter
    def exact(self, value):
        self.check(library.cpu().lib.pyops_set_exact(bool(value)))

    def wrap(self, owner, foreign=False):
        return Buffer(self, owner, _from_buffer(KINDS[owner.dtype], owner), foreign)

    def allocate(self, shape, dtype, name):
        count = math.prod(shape)
        if state.on_allocate is not None or dtype not in KINDS or not 0 < count * dtype.itemsize <= SMALL:
            return super().allocate(shape, dtype, name)
        return SmallBuffer(small_memory(KINDS[dtype], count), count * dtype.itemsize)

    # ---- operations on NDArrays

    def _call(self, family, arrays, where, *rest):
        """Call the strided kernel of a family for the dtype of the result, arrays[0], without `launch`.  Return whether it ran:
        not while a plan records, nor with freed memory, for which `launch` raises the error."""
        if state.on_launch is not None:
            return False
        dtype = arrays[0].dtype
        function = self._direct.get((family, dtype)) or self.function(family, dtype)
        try:
            status = function(*[x.buffer.pointer + x.offset for x in arrays], *where, *rest, NULL)
        except TypeError:
            return False
        if status:
            self.check(status)
        return True

    def function(self, family, dtype):
        """Return the function of the library for a family of strided kernels and a dtype."""
        name = f'pyops_{family}' + {FLOAT: '', INT: '_int32', DOUBLE: '_double'}[dtype]
        found = self._direct[family, dtype] = getattr(library.cpu().lib, name)
        return found

    def unary(self, op, y, x):
        where = layout(y.shape, y.shape, y.strides, x.shape, x.strides)
        if not self._call('strided_unary', (y, x), where, self.numbers[op]):
            super().unary(op, y, x)

    def binary(self, op, y, a, b):
        where = layout(y.shape, y.shape, y.strides, a.shape, a.strides, b.shape, b.strides)
        if not self._call('strided_binary', (y, a, b), where, self.numbers[op]):
            super().binary(op, y, a, b)

    def scalar(self, op, y, x, value, reflected):
        where = layout(y.shape, y.shape, y.strides, x.shape, x.strides)
        if y.dtype is DOUBLE or not self._call('strided_scalar', (y, x), where, self.numbers[op], reflected, value):
            super().scalar(op, y, x, value, reflected)

    def where(self, y, condition, a, b):
        condition = condition if condition.dtype is y.dtype else truth_of(condition, y.dtype)
        where = layout(y.shape, *[part for x in (y, condition, a, b) for part in (x.shape, x.strides)])
        if not self._call('strided_where', (y, condition, a, b), where):
            self.launch(f'strided_where{suffix_of(y)}', y, condition, a, b, *where)

    def fill(self, y, value):
        if y.dtype is DOUBLE or not self._call('strided_fill', (y,), layout(y.shape, y.shape, y.strides), value):
            super().fill(y, value)

    def reduce(self, op, y, x):
        where = layout(x.shape, y.shape, y.strides, x.shape, x.strides)
        if not self._call('strided_reduce', (y, x), where, self.numbers[op]):
            super().reduce(op, y, x)


HOST = SmallBuffer.device = ResultBuffer.device = CPU()
