"""A GPU: memory pool, stream, kernel launches, array operations, and CUDA graphs for plans.

Arrays on a GPU are NDArrays.  All work is enqueued on one stream and does not block the host; the sums over ranks have a second
stream.  Only `numpy` and `synchronize` wait for the device; `numpy` also raises the errors of earlier kernels.
"""
import ctypes
import functools
import gc
import math

import numpy as np

from pyops import PRECISIONS, launcher
from pyops.backend import dlpack, library, state
from pyops.backend.arrays import BF16, as_shape, from_bf16, row_major
from pyops.backend.calls import Calls, Queued
from pyops.backend.device import DLPACK_CUDA, DTYPES, ERRORS, Buffer, not_compact, wrong_dtype
from pyops.backend.operations import FLOAT, KernelOperations
from pyops.environment import early_start_by_default
from pyops.errors import UserError

BF16_MARK = -1 << 63        # bit 63 of the address of a bfloat16 array, see `real` in pyops.h, as a signed integer


def _call(name, *arguments):
    """Call a function of the CUDA library and raise an exception if its status is an error."""
    _check(getattr(library.cuda().lib, name)(*arguments))


def _check(status):
    if status:
        raise ERRORS[status](library.cuda().lib.pyops_last_error().decode())


class MemoryBlock:
    """A block of device memory, returned to its pool when the last reference is deleted."""
    __slots__ = ('pool', 'address', 'nbytes', 'size')

    def __init__(self, pool, address, nbytes, size):
        self.pool, self.address, self.nbytes, self.size = pool, address, nbytes, size

    def __del__(self):
        self.pool.give_back(self.address, self.size)


class Pool:
    """A pool of device memory.  Returned memory is safe to reuse at once: the next user is queued later on the same stream."""
    SMALL, LARGE = 512, 2**20

    def __init__(self):
        self._free = {}             # size -> addresses
        self.reserved = self.used = self.peak = 0           # bytes; peak: the most in use

    def take(self, nbytes):
        """Return a MemoryBlock of at least nbytes.  MemoryError with the requested, free and total sizes."""
        unit = self.LARGE if nbytes > self.LARGE else self.SMALL
        size = -(-max(nbytes, 1) // unit) * unit
        addresses = self._free.get(size)
        address = addresses.pop() if addresses else self._allocate(size, nbytes)
        self.used += size
        self.peak = max(self.peak, self.used)
        return MemoryBlock(self, address, nbytes, size)

    def give_back(self, address, size):
        self.used -= size
        self._free.setdefault(size, []).append(address)

    def trim(self):
        """Free the unused memory of the pool on the device."""
        for size, addresses in list(self._free.items()):       # list(): garbage collection in the loop may add a size
            while addresses:
                _call('pyops_device_free', addresses.pop())
                self.reserved -= size

    def _allocate(self, size, nbytes):
        made = ctypes.c_uint64()
        try:
            _call('pyops_device_malloc', ctypes.byref(made), size)
        except MemoryError:
            self.trim()
            try:
                _call('pyops_device_malloc', ctypes.byref(made), size)
            except MemoryError:
                free, total = memory_info()
                raise MemoryError(f'GPU: {nbytes:,} bytes were asked for, {free:,} of {total:,} are free, '
                                  f'{self.used:,} are in use by this program') from None
        self.reserved += size
        return made.value


def memory_info():
    """Return the free and total bytes of device memory."""
    free, total = ctypes.c_int64(), ctypes.c_int64()
    _call('pyops_device_memory', ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


@functools.cache
def open_device():
    """Open the first device, or in a job of several ranks the one of this rank, and return its number and its name.

    A rank that sees one device only uses it: some launchers show each rank its own.
    UserError if there is no device, if this build has no code for it, if there are more ranks on this host than devices, or
    for a bad PYOPS_EARLY_START.
    """
    early_start_by_default()
    lib, count = library.cuda().lib, ctypes.c_int32()
    if lib.pyops_device_count(ctypes.byref(count)):
        raise UserError(f'{lib.pyops_last_error().decode()}; train on the CPU with -g 0')
    number = launcher.local_rank() if count.value > 1 else 0
    if number >= count.value:
        raise UserError(f'this host has {count.value} GPUs, and the launcher started rank {number + 1} here; start at most one '
                        'rank for each GPU of a host')
    try:
        _call('pyops_device_open', number)
    except RuntimeError as error:
        major, minor, multiprocessors = (ctypes.c_int32() for _ in range(3))
        known = not lib.pyops_device_properties(*map(ctypes.byref, (major, minor, multiprocessors)))
        remedy = ('it is too old, 8.0 is the least:' if known and major.value < 8 else
                  'build it on this machine with `make cuda`, or')
        raise UserError(f'{error}; {remedy} train on the CPU with -g 0') from error
    return number, lib.pyops_device_name().decode()


def _new_stream():
    stream = ctypes.c_uint64()
    _call('pyops_stream_create', ctypes.byref(stream))
    return stream.value


class Choice:
    """An attribute of a GPU: one of several names, in the order of pyops_set_ATTRIBUTE; the first until it is set."""

    def __init__(self, *names):
        self.names = names

    def __set_name__(self, owner, attribute):
        self.attribute = attribute

    def __get__(self, gpu, owner=None):
        return self if gpu is None else gpu.choices.get(self.attribute, self.names[0])

    def __set__(self, gpu, name):
        if name not in self.names:
            raise ValueError(f'{self.attribute}: expected {", ".join(self.names)}, got {name!r}')
        _call(f'pyops_set_{self.attribute}', self.names.index(name))
        gpu.choices[self.attribute] = name


class GPU(KernelOperations):
    """A GPU, with the kernels of cuda/ for all operations.  array_type: NDArray, defined in a higher layer."""
    name = 'gpu'
    library = staticmethod(library.cuda)

    def __init__(self, array_type):
        super().__init__()
        number, self.model = open_device()
        self.dlpack_device = DLPACK_CUDA, number
        self._array_type, self._pool = array_type, Pool()
        self.stream = _new_stream()
        self._fp8 = False
        self.choices = {}                       # names by attribute, of each Choice that was set
        state.gpu = self

    precision = Choice(*PRECISIONS)                     # of the operands of matrix products; sums and parameters are float32
    # for comparisons: a captured graph keeps its kernels
    attention = Choice('by size', 'mma', 'wgmma')       # the kernels in bf16; 'wgmma': wherever it supports the call
    exchange = Choice('by device', 'global memory')     # of the results of a step, by the blocks of a GRU; the same bits
    # whether a kernel may start before the last one has ended, where the device can do it; the same bits
    early_start = Choice('by environment', 'never', 'always')
    multicast = Choice('by size', 'never', 'always')    # whether two blocks of a product by wgmma share loads; the same bits

    @property
    def storage(self):
        """The type of activations and their gradients in memory, 'fp32' or 'bf16', for ops that start from token ids
        (Embedding, EmbeddingGRU); the results of other ops have the type of their input."""
        return 'bf16' if self.activations == BF16 else 'fp32'

    @storage.setter
    def storage(self, name):
        if name not in ('fp32', 'bf16'):
            raise ValueError(f'storage: {name!r}, expected fp32 or bf16')
        self.activations = BF16 if name == 'bf16' else FLOAT

    @property
    def fp8(self):
        """Whether the linear layers of models made from now on multiply by tensor cores in FP8 (pyops.quantization).
        UserError if it is set to True and the device has no such tensor cores"""
        return self._fp8

    @fp8.setter
    def fp8(self, wanted):
        if wanted and (capability := self.capability()) != (9, 0):
            raise UserError(f'--precision fp8: {self.model} has compute capability {capability[0]}.{capability[1]}, and '
                            'products in FP8 need 9.0, as of an H100; give --precision bf16, with --quant to emulate them')
        self._fp8 = bool(wanted)

    @staticmethod
    def capability():
        """Return the compute capability of the device, such as (9, 0)."""
        major, minor, multiprocessors = (ctypes.c_int32() for _ in range(3))
        _call('pyops_device_properties', *map(ctypes.byref, (major, minor, multiprocessors)))
        return major.value, minor.value

    # ---- allocate

    def new(self, shape, dtype):
        shape, dtype = as_shape(shape), np.dtype(dtype)
        return self._array(self.block(math.prod(shape) * dtype.itemsize), shape, dtype)

    def zero_array(self, shape, dtype):
        array = self.new(shape, dtype)
        _call('pyops_device_zero', array.location(), array.nbytes, self.stream)
        return array

    def allocate(self, shape, dtype, name):
        if state.on_allocate is None or not self._records():
            return self.block(math.prod(shape) * dtype.itemsize)
        return state.on_allocate(shape, dtype, name, 'intermediate').buffer

    def memory(self):
        return memory_info()[1]

    def with_peak(self, call):
        """Return the result of call(), and the most bytes of arrays at once in it, beyond those in use before."""
        gc.collect()                            # what it would free in call() hides memory that call() needs
        before = self._pool.peak = self._pool.used
        result = call()
        return result, self._pool.peak - before

    def _array(self, buffer, shape, dtype):
        return self._array_type(buffer, 0, shape, row_major(shape), dtype)

    # ---- copy

    def put(self, array):
        if not isinstance(array, np.ndarray):
            return array
        return self._array(self.wrap(np.ascontiguousarray(array)), array.shape, array.dtype)

    def wrap(self, owner, foreign=False):
        buffer = self.block(owner.nbytes)
        _call('pyops_device_upload', buffer.pointer, owner.ctypes.data, owner.nbytes, self.stream)
        return buffer

    def numpy(self, x):
        if x.dtype == BF16 and not x.is_compact():              # its kernels copy no strides: all elements between the first
            span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.strides, strict=True))          # and the last
            between = self.numpy(self._array_type(x.buffer, x.offset, (span,), (1,), BF16))
            return np.lib.stride_tricks.as_strided(between, x.shape, [4 * step for step in x.strides])
        x = x.compact()
        y = np.empty(x.shape, x.dtype)
        _call('pyops_device_download', y.ctypes.data, x.location(), y.nbytes, self.stream)
        return from_bf16(y) if x.dtype == BF16 else y

    def assign(self, y, value):
        """Copy value, an NDArray or a numpy array, to y with one transfer.  Return False without a copy unless shape and dtype
        are equal, y and an NDArray value are compact and in different buffers on this device, and no plan records."""
        if y.shape != value.shape or y.dtype != value.dtype or not y.is_compact() or state.on_launch is not None:
            return False
        if isinstance(value, np.ndarray):
            value = np.ascontiguousarray(value)
            _call('pyops_device_upload', y.location(), value.ctypes.data, value.nbytes, self.stream)
        elif value.device is self and value.is_compact() and value.buffer is not y.buffer:
            _call('pyops_device_copy', y.location(), value.location(), value.nbytes, self.stream)
        else:
            return False
        return True

    def kernel_array(self, x):
        return x.compact()

    def kernel_view(self, x):
        return x

    def address(self, owner):
        return owner.address

    def bits(self, x, dtype):
        return self._array_type(x.buffer, x.offset, x.shape, x.strides, dtype)

    def read(self, address, nbytes):
        data = np.empty(nbytes, np.uint8)
        _call('pyops_device_download', data.ctypes.data, address, nbytes, self.stream)
        return data

    def buffer_of(self, data):
        return self.wrap(np.ascontiguousarray(data))

    def dlpack(self, x, stream, max_version, dl_device, copy):
        if dl_device not in (None, self.dlpack_device):
            if copy is False:
                raise BufferError(f'array on {self}: DLPack device {dl_device} needs a copy, but copy is False')
            return x.cpu().__dlpack__(max_version=max_version, dl_device=dl_device)
        x = x.copy() if copy else x
        if stream not in (-1, self.stream):
            self.synchronize()                  # no event for the consumer's stream to wait for: wait here
        return dlpack.exported(x, max_version is not None and max_version[0] >= 1, bool(copy))

    def from_dlpack(self, x):
        """Return an NDArray over the memory of another library's array on this GPU."""
        memory = dlpack.Imported(dlpack.capsule_of(x, self.stream))
        return self._array_type(Buffer(self, memory, memory.address, True), memory.offset, memory.shape, memory.strides,
                                memory.dtype)

    # ---- launch and synchronize

    def holds(self, values):
        """Return whether one of the values is an array on this GPU."""
        return any([getattr(value, 'device', None) is self for value in values])

    def synchronize(self):
        _call('pyops_stream_synchronize', self.stream)

    # The second stream is for sums over ranks.  Its work must use memory that nobody frees before join(): the pool assumes one
    # stream.

    @functools.cached_property
    def second_stream(self):
        return _new_stream()

    def fork(self):
        """Let work that is queued on the second stream later wait for all that is queued on the first one now."""
        _call('pyops_stream_wait', self.second_stream, self.stream)

    def join(self):
        """Let work that is queued on the first stream later wait for all that is queued on the second one now."""
        _call('pyops_stream_wait', self.stream, self.second_stream)

    def launch_on_second(self, name, *values):
        """Run a kernel on the second stream; a plan does not record it."""
        function, _, converters, _ = self._functions.get(name) or self._prepare(name)
        arguments = list(values)
        for i, convert in converters:
            arguments[i] = convert(values[i])
        self.check(function(*arguments, self.second_stream))

    def converter(self, kernel, argument, takes_strides):
        name, dtype = argument.name, DTYPES[argument.type]

        def convert(array):
            if array is None:
                return None
            if getattr(array, 'device', None) is not self:
                raise TypeError(f'{kernel}: {name}: is in host memory, but other arguments are on the GPU; copy it there '
                                'with pyops.backend.put, or .to(device)')
            half = argument.real and array.dtype == BF16
            if not half and array.dtype is not dtype and array.dtype != dtype:
                raise wrong_dtype(kernel, name, dtype, array)
            if not takes_strides and not array.is_compact():
                raise not_compact(kernel, name, array)
            return array.location() | BF16_MARK if half else array.location()
        return convert

    def host_converter(self, kernel, argument):
        cast = library.cpu().ffi.cast
        return lambda value: value.ctypes.data if isinstance(value, np.ndarray) else int(cast('intptr_t', value))

    def check(self, status):
        _check(status)

    # ---- record and replay

    def block(self, nbytes):
        memory = self._pool.take(nbytes)
        return Buffer(self, memory, memory.address)

    def lease(self, block, shape, dtype, give_back):
        return self._array(Buffer(self, _Lease(block, give_back), block.pointer), as_shape(shape), np.dtype(dtype))

    def view(self, block, address, shape, dtype, strides):
        item = dtype.itemsize
        return self._array_type(Buffer(self, block.owner, block.pointer), (address - block.pointer) // item, shape,
                                tuple(n // item for n in strides), dtype)

    def tagged(self, address, dtype):
        return address | BF16_MARK if dtype == BF16 else address

    def calls(self, calls):
        return Graph(calls, self)


class _Lease:
    """The memory owner of an array over a block, deleted with the last view of the array."""
    __slots__ = ('block', 'give_back')

    def __init__(self, block, give_back):
        self.block, self.give_back = block, give_back

    nbytes = property(lambda self: self.block.nbytes)
    address = property(lambda self: self.block.pointer)

    def __del__(self):
        if self.give_back:
            self.give_back(self.block)


class Graph(Calls):
    """Recorded calls as CUDA graphs, one for each of the sizes that the arguments were last changed to, and for each section of
    the calls that runs repeatedly.  A Python function that does more than queue work divides a section.

    The second run with the same sizes captures a graph, because kernel loading and setup in the first are not allowed
    during capture.  A graph contains the arguments, so later changes to other sizes and back do not affect it.  A change of
    precision selects other kernels, so all graphs are captured again.
    """
    LARGEST = 32                # number of sizes whose graphs are kept: the most recently used ones
    captures = 0                # number of graphs captured so far

    def __init__(self, calls, gpu):
        # sizes -> {(first, last): graph, None after the first run}; least recently used sizes first
        self._sizes, self._graphs = None, {}
        super().__init__(calls, gpu)
        self._stream, self._precision = gpu.stream, gpu.precision
        self._lib = library.cuda().lib              # for __del__

    def run(self, first=0, last=None, repeated=False):
        whole = not first and last is None
        section = first, len(self.kernels) if last is None else last
        if not (whole or repeated):
            return super().run(*section)
        if self._precision != self._device.precision:
            self._drop()
            self._precision = self._device.precision
        for piece in self._pieces(*section):
            if isinstance(piece, int):
                self._functions[piece]()
            else:
                self._run_captured(piece)

    def _pieces(self, first, last):
        """Return the parts of the calls [first, last) in order: (first, last) of calls that a graph can contain, and numbers of
        functions between them.  A graph cannot call Python, but a Queued only queues work."""
        found = []
        for i, function in self._functions.items():
            if first <= i < last and not isinstance(function, Queued):
                found += [(first, i), i]
                first = i + 1
        return [piece for piece in [*found, (first, last)] if isinstance(piece, int) or piece[0] < piece[1]]

    def _run_captured(self, section):
        """Run the calls of a section as a graph, which the second run captures."""
        graphs = self._graphs[self._sizes] = self._graphs.pop(self._sizes, {})      # the last entry: the most recently used
        if len(self._graphs) > self.LARGEST:
            self._free(self._graphs.pop(next(iter(self._graphs))).values())
        if section not in graphs:
            self._run(*section, timed=False)
            graphs[section] = None
            return
        graphs[section] = graphs[section] or self._capture(*section)
        _call('pyops_graph_launch', graphs[section], self._stream)

    def change(self, places, values, sizes):
        """Replace arguments.  sizes: hashable; equal sizes must come with equal values, so that their graph is still valid."""
        super().change(places, values, sizes)
        self._sizes = sizes

    def close(self):
        self._drop()
        super().close()

    def _drop(self):
        sections, self._graphs = self._graphs, {}
        self._free([graph for graphs in sections.values() for graph in graphs.values()])

    def _free(self, graphs):
        graphs = [graph for graph in graphs if graph is not None]
        if graphs:
            _call('pyops_stream_synchronize', self._stream)
        for graph in graphs:
            _call('pyops_graph_free', graph)

    def __del__(self):
        for graphs in self._graphs.values():
            for graph in graphs.values():
                if graph is not None:
                    self._lib.pyops_graph_free(graph)

    def _capture(self, first, last):
        graph, lib = ctypes.c_uint64(), library.cuda().lib
        _call('pyops_graph_begin', self._stream)
        try:
            super().run(first, last)
        except BaseException:                   # report this error, not an error from ending the capture
            if not lib.pyops_graph_end(ctypes.byref(graph), self._stream):
                lib.pyops_graph_free(graph.value)
            raise
        _call('pyops_graph_end', ctypes.byref(graph), self._stream)
        self.captures += 1
        return graph.value

    def _replay(self, first, last, timed):
        ffi, lib = library.cpu().ffi, library.cuda().lib
        addresses = [int(ffi.cast('intptr_t', memory)) for memory in (self._list, self._values, self._seconds, self._at)]
        if not timed:
            addresses[2] = None
        self._check(lib.pyops_replay(*addresses, first, last, self._stream))
