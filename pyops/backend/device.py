"""The device protocol: memory, copies, kernel launches, record and replay, and operations on NDArrays.

Three classes implement it: CPU (host.py) and GPU (gpu.py) with kernels, and Numpy (numpy_device.py), the reference in the
tests, whose operations on NDArrays are numpy's.
"""
import _cffi_backend
import numpy as np

from pyops.backend import state
from pyops.backend.arrays import as_kernel_array, dtype_name

# C type of a pointer argument in the header -> dtype of the array
DTYPES = {'float': np.dtype(np.float32), 'double': np.dtype(np.float64), 'int32_t': np.dtype(np.int32),
          'int64_t': np.dtype(np.int64), 'uint64_t': np.dtype(np.uint64), 'uint8_t': np.dtype(np.uint8),
          'uint16_t': np.dtype(np.uint16)}
DLPACK_CPU, DLPACK_CUDA = 1, 2         # the types of devices in DLPack
# status returned by a library -> exception
ERRORS = {1: ValueError, 2: MemoryError, 3: RuntimeError}
# pointer arguments that are in host memory on every device
HOST_ARGUMENTS = 'shape', 'strides', 'flops'
# kernels with a stride argument for each array that may be strided; their callers check the other arrays
_ROW_STRIDES = ('gemm', 'convert', 'attention_forward', 'attention_backward', 'attention_step', 'pad_rows', 'scatter_rows')
_CData = _cffi_backend.FFI.CData


class Buffer:
    """A block of device memory.

    device    the Device
    owner     the object that keeps the memory alive, in host memory a C-contiguous numpy array over it; None after free()
    nbytes    its size in bytes
    pointer   the pointer to its first element for kernels; None on a device that does not use pointers
    foreign   whether other code may hold arrays over the same memory
    version   the number of in-place changes so far
    mask      the version at which it holds a mask, see NDArray.is_mask; None: it never held a mask
    pinned    the owner, if other code knows the address: the memory then outlives free()
    """
    __slots__ = ('device', 'owner', 'nbytes', 'pointer', 'foreign', 'version', 'mask', 'pinned', '__weakref__')

    def __init__(self, device, owner, pointer=None, foreign=False):
        self.device, self.owner, self.nbytes, self.pointer = device, owner, owner.nbytes, pointer
        self.foreign, self.version, self.mask, self.pinned = foreign, 0, None, None

    @property
    def address(self):
        """The address of the first byte."""
        return self.device.address(self.owner)

    def free(self):
        """Free the memory now; later use of an array over it raises ValueError."""
        self.owner = self.pointer = None


class Block(Buffer):
    """A Buffer of a plan, which asks for its address many times."""
    __slots__ = ('address',)

    def __init__(self, device, owner, pointer=None):
        super().__init__(device, owner, pointer)
        self.address = device.address(owner)


def _converting_call(function, count, converters):
    """Return a function (stream, *values) that converts these values and calls `function`.  It is compiled from its text: a
    loop over the arguments takes as long as a small kernel."""
    known = {'function': function} | {f'c{i}': convert for i, convert in converters}
    names = ['stream', *(f'v{i}' for i in range(count))]
    values = [*(f'c{i}(v{i})' if f'c{i}' in known else f'v{i}' for i in range(count)), 'stream']
    return eval(f'lambda {", ".join(names)}: function({", ".join(values)})', known)


class Device:
    """The protocol of a device.  A method without a body here must be implemented.

    Ops work on the device's own array type: numpy arrays in host memory, NDArrays on a GPU.  NDArrays exist on every device.
    """
    name = '?'
    activations = np.dtype(np.float32)      # dtype of the activations that ops compute from token ids
    fp8 = False             # whether linear layers of models made from now on multiply in FP8 (pyops.quantization)
    is_host = False         # whether arrays are in host memory; then ops take numpy arrays, and a launch waits for its kernel
    stream = None           # the last argument of every kernel
    dlpack_device = DLPACK_CPU, 0       # type and number of the device in DLPack

    def __init__(self):
        self._functions = {}        # kernel -> what _prepare returns

    def __repr__(self):
        return f'pyops.{self.name}()'

    def enabled(self):
        """Return True: the device exists.  See pyops.ndarray.cuda."""
        return True

    # ---- allocate

    def empty_array(self, shape, dtype, name='', kind='intermediate'):
        """Return an uninitialized C-contiguous array for ops: memory of the plan that records on this device, if any.
        name, kind: its name and kind in the plan."""
        if state.on_allocate is None or not self._records():
            return self.new(shape, dtype)
        return state.on_allocate(shape, dtype, name, kind)

    def new(self, shape, dtype):
        """Return an uninitialized C-contiguous array for ops, which no plan owns."""
        raise NotImplementedError

    def zero_array(self, shape, dtype):
        """Return a C-contiguous array of zeros for ops, which no plan owns."""
        raise NotImplementedError

    def allocate(self, shape, dtype, name):
        """Return the uninitialized Buffer of an NDArray; memory and name as for `empty_array`."""
        raise NotImplementedError

    def memory(self):
        """Return the size of the device's memory in bytes."""
        raise NotImplementedError

    # ---- copy

    def put(self, array):
        """Return a numpy array as an array for ops: in host memory the same array, else a copy."""
        raise NotImplementedError

    def wrap(self, owner, foreign=False):
        """Return a Buffer with the elements of a C-contiguous numpy array: in host memory the same memory, else a copy."""
        raise NotImplementedError

    def numpy(self, x):
        """Return an NDArray as a numpy array: in host memory the same memory, else a copy, after waiting for the device."""
        raise NotImplementedError

    def assign(self, y, value):
        """Copy value, an NDArray or a numpy array, to the NDArray y with a copy function of the device, if one applies; return
        whether it did."""
        raise NotImplementedError

    def kernel_array(self, x):
        """Return an NDArray, made compact if necessary, in the array type of ops."""
        raise NotImplementedError

    def bits(self, x, dtype):
        """Return an NDArray over the same memory with another dtype of 4 bytes; a float64 array gets a last axis of 2."""
        raise NotImplementedError

    def kernel_view(self, x):
        """Return an NDArray with its strides, in the array type of ops."""
        raise NotImplementedError

    def address(self, owner):
        """Return the address of the first byte of a Buffer's owner."""
        raise NotImplementedError

    def dlpack(self, x, stream, max_version, dl_device, copy):
        """Return a DLPack capsule over the memory of an NDArray, or with `copy` of a copy.

        stream: the consumer's, an address; None: CUDA's default stream; -1: no synchronization
        max_version: the newest version of DLPack that the consumer knows, or None;  dl_device: where the memory shall be
        BufferError for another device than this one; a GPU also copies to the CPU.
        """
        raise NotImplementedError

    def read(self, address, nbytes):
        """Return a copy of nbytes of device memory, uint8, after waiting for the device."""
        raise NotImplementedError

    def buffer_of(self, data):
        """Return a new Buffer with a copy of `data`, uint8."""
        raise NotImplementedError

    # ---- launch and synchronize

    def launch(self, name, *values):
        """Run the kernel pyops_<name> on arrays of this device: see pyops.backend.launch."""
        function, count, converters, convert_and_call = self._functions.get(name) or self._prepare(name)
        if len(values) != count:
            raise TypeError(f'{name}: expected {count} arguments, got {len(values)}')
        # `values` keeps the arrays alive during the call
        if state.on_launch is None:
            status = convert_and_call(self.stream, *values)
        else:
            arguments = list(values)
            for i, convert in converters:
                arguments[i] = convert(values[i])
            status = self._listen(name, values) and function(*arguments, self.stream)
        if status:
            self.check(status)

    def work_size(self, name, *sizes):
        """Return the workspace size of the kernel pyops_<name> for these sizes, in floats."""
        return getattr(self.library().lib, f'pyops_{name}_work')(*sizes)

    def synchronize(self):
        """Wait until all launched kernels have finished."""
        raise NotImplementedError

    def library(self):
        """Return the Library that runs the kernels."""
        raise NotImplementedError

    def converter(self, kernel, argument, takes_strides):
        """Return a function from an array to the value of this pointer argument.  TypeError for a wrong dtype, and for strides
        unless the kernel takes them."""
        raise NotImplementedError

    def host_converter(self, kernel, argument):
        """Return the same for one of HOST_ARGUMENTS."""
        raise NotImplementedError

    def check(self, status):
        """Raise an exception with the library's message if the status of a C call is an error."""
        raise NotImplementedError

    # ---- record and replay

    def block(self, nbytes):
        """Return a Buffer of nbytes for a plan."""
        raise NotImplementedError

    def lease(self, block, shape, dtype, give_back):
        """Return an array for ops over a block.  give_back(block) is called when the last view is deleted, unless give_back is
        None."""
        raise NotImplementedError

    def view(self, block, address, shape, dtype, strides):
        """Return an array for ops at an address in a block, with strides in bytes."""
        raise NotImplementedError

    def tagged(self, address, dtype):
        """Return the value of a pointer argument for an array of this dtype at an address."""
        return address

    def calls(self, calls):
        """Return a list of (kernel, values) as pyops.backend.calls.Calls, which replays them."""
        raise NotImplementedError

    # ---- operations on NDArrays
    #
    # They write the output y, which has the shape of the result; inputs broadcast to it.  y is one of the inputs or has no
    # memory in common with them.  All arrays have the same dtype unless stated otherwise.

    def unary(self, op, y, x):
        """Compute y = op(x): copy, negate, abs; for floats also sqrt, exp, log, tanh, sigmoid, floor, sin, cos,
        expm1, log1p, arctan, arcsin, arccos, erf, round (halves to even), ceil, trunc, sign (NaN of NaN), tan, elu, softplus,
        hardsigmoid, hardswish."""
        raise NotImplementedError

    def binary(self, op, y, a, b):
        """Compute y = op(a, b): add, subtract, multiply, divide (float32), power, maximum, minimum, equal, not_equal, less,
        less_equal, greater, greater_equal (1 or 0), floor_divide, remainder, and, or,
        xor (bit by bit; floats: truth values)."""
        raise NotImplementedError

    def scalar(self, op, y, x, value, reflected):
        """Compute y = op(x, value), or op(value, x) if reflected."""
        raise NotImplementedError

    def where(self, y, condition, a, b):
        """Compute y = a where condition is not 0, else b, bit for bit.  condition may have another dtype."""
        raise NotImplementedError

    def fill(self, y, value):
        """Set all elements of y to value."""
        raise NotImplementedError

    def convert(self, y, x):
        """Copy x to y, which has another dtype; float32 to int32 truncates toward 0."""
        raise NotImplementedError

    def reduce(self, op, y, x):
        """Compute y = sum, max or min of x over the axes with size 1 in y; x and y have the same number of axes."""
        raise NotImplementedError

    def softmax(self, y, x, outer, n, inner, log):
        """Compute y = exp(x) / sum exp(x), or its logarithm, along the axis of n elements; x (outer, n, inner), compact
        float32.  y is not x."""
        raise NotImplementedError

    def softmax_backward(self, dx, dy, y, outer, n, inner, log):
        """Compute the gradient of softmax with respect to x, from its result y and the gradient dy; dx is neither of them."""
        raise NotImplementedError

    def argmax(self, y, x):
        """Compute y (R,) int32 = the first argmax of each row of x (R, C), compact, float32 or float64; NaN is largest."""
        raise NotImplementedError

    def argsort(self, y, x):
        """Compute y (R, C) int32 = the indices that sort each row of x (R, C), compact float64, in ascending order; equal
        elements keep their order, NaN is last.  Only for arrays in host memory."""
        raise NotImplementedError

    def cumulate(self, op, y, x, outer, n, inner, last):
        """Compute y[o, i] = x[o, 0] op ... op x[o, i] along the second axis of x (outer, n, inner), both compact; op: 'add' or
        'multiply'.  last: only y[o] with i = n - 1.  Only for arrays in host memory."""
        raise NotImplementedError

    def matmul(self, y, a, b):
        """Compute y (..., M, N) = a (..., M, K) @ b (..., K, N); y is compact."""
        raise NotImplementedError

    def take(self, y, x, ids):
        """Compute y[r] = x[ids[r]];  y (R, E), x (V, E), ids (R,) int32, all compact.  IndexError for ids outside [0, V)."""
        raise NotImplementedError

    def add_at(self, y, ids, rows):
        """Compute y[ids[r]] += rows[r], in the order of r;  shapes as in take, float32 or float64."""
        raise NotImplementedError

    def put_rows(self, y, ids, rows):
        """Compute y[ids[r]] = rows[r];  shapes as in take; the ids are valid and all different."""
        raise NotImplementedError

    # ---- the steps of `launch` and `empty`

    def _prepare(self, name, replacement=None):
        """Return the C function, or its replacement, the number of its arguments without the stream, (index, converter) for
        each pointer, and a function (stream, *values) that converts the pointers and calls the function."""
        _, lib, functions = self.library()
        arguments = functions['pyops_' + name].arguments[:-1]
        takes_strides = name in _ROW_STRIDES or any(a.name == 'strides' for a in arguments)
        converters = [(i, self.host_converter(name, a) if a.name in HOST_ARGUMENTS else self.converter(name, a, takes_strides))
                      for i, a in enumerate(arguments) if a.pointer]
        function = replacement or getattr(lib, 'pyops_' + name)
        call = _converting_call(function, len(arguments), converters)
        found = self._functions[name] = function, len(arguments), converters, call
        return found

    def _records(self):
        """Return whether the hooks apply to this device; all devices with arrays in host memory are equal in this respect."""
        # The thread first: hooks of another thread may be removed at any time.
        return state.in_hooked_thread() and state.hooked_device.is_host is self.is_host

    def _listen(self, name, values):
        """Pass a launch to the recording plan.  Return whether to run it now."""
        if not state.in_hooked_thread():
            return True
        if not self._records():
            raise RuntimeError(f'{name}: runs on {self}, but the plan records on {state.hooked_device}; move the arrays with '
                               'pyops.backend.put, or launch the kernel before or after the recording')
        return state.on_launch(name, [_recorded(value) for value in values])


def _recorded(value):
    """Return an argument of a launch for a plan: arrays in the array type of ops, shapes and strides as numpy arrays."""
    return np.array(list(value), np.int64) if isinstance(value, _CData) else as_kernel_array(value)


def wrong_dtype(kernel, argument, dtype, array):
    """Return the TypeError for an argument of another dtype."""
    return TypeError(f'{kernel}: {argument}: expected {dtype}, got {dtype_name(array.dtype)}')


def not_compact(kernel, argument, array):
    """Return the TypeError for strides that the kernel does not take."""
    return TypeError(f'{kernel}: {argument}: expected a compact array, got shape {array.shape} with strides {array.strides}; '
                     'pass .compact()')
