"""The functions that ops call: allocation, kernel launches, and checks of their arguments.

No module outside this package calls the kernel libraries.  A call goes through these modules in order:

    op.forward(x)                   pyops/ops         checks x with `axes` and `check`, allocates y with `empty`
    launch('relu_forward', y, x)    this module       selects the device of the arguments
    device.launch(...)              device.py         converts the arguments, passes the launch to a plan that records
    device.converter(...)           host.py, gpu.py   checks dtype and strides of an argument, returns its address
    pyops_relu_forward(...)         library.py        the function of the library, opened by cffi or ctypes

`use` selects the device of new arrays: the CPU, with numpy arrays, or a GPU, with NDArrays.  A kernel runs on the device of
its arguments.
"""
import contextlib
import math

import numpy as np

from pyops.backend import library, state
from pyops.backend.arrays import (  # noqa: F401  (callers import these from here)
    ALIGN,
    BF16,
    Array,
    as_kernel_array,
    as_rows,
    byte_strides,
    dtype_name,
    element_strides,
    get,
    is_array,
    is_contiguous,
    location,
    may_overlap,
    permuted,
    row_major,
    to_bf16,
)
from pyops.backend.host import HOST
from pyops.backend.state import hooks  # noqa: F401
from pyops.errors import ShapeError

state.device = HOST
_FLOAT = np.dtype(np.float32)
REAL = _FLOAT, BF16                     # the dtypes of activations, for `check`


# ---- the current device ----------------------------------------------------------------------------------------------

def current_device():
    """Return the Device of new arrays: HOST, or the one that `use` or `on` selected."""
    return state.device


def device_of(array):
    """Return the Device of an array of ops: HOST for a numpy array."""
    return array.device if isinstance(array, Array) else HOST


def use(device):
    """Allocate new arrays on this Device from now on."""
    state.device = device


class on:
    """Allocate new arrays on this Device inside the block."""
    __slots__ = ('device', 'before')            # a class, because a generator takes four times as long

    def __init__(self, device):
        self.device = device

    def __enter__(self):
        self.before = state.device
        state.device = self.device

    def __exit__(self, *_):
        state.device = self.before


def set_gpu(gpu):
    """Set the open GPU; None closes it for `launch`."""
    state.gpu = gpu


# ---- allocation ------------------------------------------------------------------------------------------------------

def empty(shape, dtype=np.float32, name='tensor', kind='intermediate'):
    """Return an uninitialized C-contiguous array.

    name    its name in a plan, beginning with the name of the op: 'encoder.y'
    kind    its kind in a plan: 'intermediate', 'gradient' or 'scratch'
    """
    return state.device.empty_array(shape, dtype, name, kind)


def empty_gradient(shape, name, dtype=np.float32):
    """Return an uninitialized C-contiguous array that is a gradient.  name: as for `empty`."""
    return empty(shape, dtype, name, 'gradient')


def activations():
    """Return the dtype of the activations that an op computes from token ids: float32, or BF16 as `GPU.storage` says."""
    return state.device.activations


@contextlib.contextmanager
def float32_activations():
    """Let ops compute float32 activations from token ids inside the block, whatever `GPU.storage` says."""
    device, before = state.device, state.device.activations
    device.activations = np.dtype(np.float32)
    try:
        yield
    finally:
        device.activations = before


def zeros(shape, dtype=np.float32):
    """Return a C-contiguous array of zeros, which a plan never allocates."""
    return state.device.zero_array(shape, dtype)


def put(array):
    """Return a numpy array on the current device: on the CPU the same array, on a GPU a copy."""
    return state.device.put(array)


def work_size(name, *sizes):
    """Return the workspace size of the kernel pyops_<name> for these sizes, in floats."""
    return state.device.work_size(name, *sizes)


def work(name, *sizes):
    """Allocate the workspace of the kernel pyops_<name> for these sizes."""
    return empty(work_size(name, *sizes), name='work', kind='scratch')


# ---- checks ----------------------------------------------------------------------------------------------------------

def axes(name, array, names):
    """Return the shape of an array with the named axes, such as 'T B I'.  TypeError if it is not an array, ValueError for
    a different number of axes; both name the argument."""
    if not is_array(array):
        raise TypeError(f'{name}: expected an array, got {type(array).__name__}')
    if array.ndim != len(names.split()):
        raise ShapeError(f'{name}: expected shape ({", ".join(names.split())}), got {array.shape}')
    return array.shape


def check_parameter(parameter, shape, sparse=False):
    """Check the value and the gradient of a Parameter.  sparse: whether the op marks the updated blocks in `touched`."""
    if parameter.touched is not None and not sparse:
        raise ValueError(f'{parameter.name}: its gradient is sparse, and this op adds to all of it; make it of a Spec '
                         'without sparse=True')
    check(parameter.name, parameter.value, shape)
    check(f'gradient of {parameter.name}', parameter.grad, shape)


def check(name, array, shape, dtype=_FLOAT):
    """Raise TypeError or ValueError, naming the argument, unless array is C-contiguous with this shape and dtype, or one of
    several dtypes."""
    if (type(array) is np.ndarray and (array.dtype is dtype or (dtype is REAL and array.dtype is _FLOAT))
            and array.flags.c_contiguous and array.shape == shape):
        return                              # the usual case
    _check_dtype(name, array, dtype)
    if not is_contiguous(array):
        raise TypeError(f'{name}: expected a C-contiguous array, got shape {array.shape} with strides {array.strides}; copy it')
    if array.shape != tuple(shape):
        raise ShapeError(f'{name}: expected shape {tuple(shape)}, got {array.shape}')


def check_rows(name, array, shape, dtype=_FLOAT):
    """Check an array (..., D) as `check` does, but accept rows at any equal distance of at least D, as in columns
    of a larger array.  Return the distance in elements."""
    _check_dtype(name, array, dtype)
    if array.shape != tuple(shape):
        raise ShapeError(f'{name}: expected shape {tuple(shape)}, got {array.shape}')
    *rows, D = array.shape
    if is_contiguous(array):
        return D
    *strides, column = element_strides(array)
    distance, count = None, 1           # of rows; number of rows in one step along the current axis
    for n, stride in zip(reversed(rows), reversed(strides), strict=True):
        if n > 1:                       # the stride of an axis of size 1 means nothing
            distance = stride if distance is None else distance
            if stride != distance * count:
                distance = -1
        count *= n
    distance = D if distance is None else distance
    if distance < D or (D > 1 and column != 1):
        raise TypeError(f'{name}: expected contiguous rows at equal distances, got shape {array.shape} with strides '
                        f'{array.strides}; copy it')
    return distance


def _check_dtype(name, array, dtype):
    if is_array(array) and (array.dtype in REAL if dtype is REAL else array.dtype == dtype):
        return
    expected = ' or '.join(map(dtype_name, dtype if dtype is REAL else [dtype]))
    if not is_array(array):
        raise TypeError(f'{name}: expected a {expected} array, got {type(array).__name__}')
    raise TypeError(f'{name}: expected dtype {expected}, got {dtype_name(array.dtype)}')


def check_kept(saved):
    """Raise ValueError if `saved`, a field of the ctx passed to backward, is None because forward had gradients=False."""
    if saved is None:
        raise ValueError('ctx: it comes from forward(..., gradients=False), which keeps nothing for backward')


# ---- launches --------------------------------------------------------------------------------------------------------

def launch(name, *values):
    """Run the kernel pyops_<name> with these arguments, in the order of the header without the stream.

    Arrays must have the declared dtype, and be C-contiguous unless the kernel takes their strides.  None is NULL.  Raises
    ValueError with the kernel's message for invalid arguments, MemoryError for lack of memory.
    """
    device = state.gpu if state.gpu is not None and state.gpu.holds(values) else HOST
    device.launch(name, *values)


def call(name, function, inputs, outputs):
    """Run function(), Python code between the kernels of a step, such as a sum over ranks.  A recording plan calls it at every
    replay.

    inputs, outputs: {name: array} of the arrays that it reads and writes, at least one output.  They must outlive the step.
    A graph of a GPU can contain it only if it is a pyops.backend.calls.Queued.  Its own launches are not recorded.
    """
    if state.on_call is None or not state.in_hooked_thread() or state.on_call(name, function, inputs, outputs):
        with state.without_hooks():
            function()


def gemm(c, a, b, bias=None, accumulate=False, relu=False):
    """Compute c (+)= a b + bias.  c (M, N) with contiguous rows, a (M, K) and b (K, N) with any strides, bias (N,) or None.

    relu: apply c = max(c, 0) last.  A transposed operand is a view: gemm(dweight, dy.T, x, accumulate=True).
    """
    (M, N), K = c.shape, a.shape[1]
    if a.shape[0] != M or b.shape != (K, N):
        raise ValueError(f'gemm: c {c.shape}, a {a.shape} and b {b.shape} do not fit')
    row, column = element_strides(c)
    if M and N > 1 and column != 1:
        raise ValueError(f'gemm: c: expected contiguous rows, got strides {c.strides}')
    # an empty array has strides of 0
    launch('gemm', c, a, b, bias, M, N, K, max(row, N), *element_strides(a), *element_strides(b), accumulate, relu)


def product(a, b, bias=None):
    """Return a b + bias as a new array; operands as in `gemm`."""
    c = empty((a.shape[0], b.shape[1]))
    gemm(c, a, b, bias)
    return c


def gemm_batched(c, a, b, accumulate=False):
    """Compute c (+)= a b for each index of the leading axes.  c (..., M, N) with contiguous rows, a (..., M, K), b (..., K, N),
    with equal leading axes and any strides."""
    batch, sizes = _batched('gemm_batched', c, a, b)
    launch('gemm_batched', c, a, b, *batch, *sizes, accumulate)


def gemm_narrow(c, a, b, bias=None, accumulate=False, relu=False, *, bits, promote=0):
    """Compute c (+)= a b + bias with sums of few bits, as in tensor cores, for each index of the leading axes.

    Shapes as in `gemm_batched`, bias (N,) or None, relu as in `gemm`.  bits: of the sums, 2 to 24;  promote: the number of
    terms after which a sum is added to one in float32, 0: after all.  csrc/pyops.h has the definition.
    """
    batch, sizes = _batched('gemm_narrow', c, a, b)
    launch('gemm_narrow', c, a, b, bias, *batch, *sizes, accumulate, relu, bits, promote)


def _batched(who, c, a, b):
    """Return (shape, strides, ndim) of the leading axes, and (M, N, K, ldc, strides of a and b), as kernels take them."""
    *batch, M, N = c.shape
    K = a.shape[-1]
    if a.shape != (*batch, M, K) or b.shape != (*batch, K, N):
        raise ValueError(f'{who}: c {c.shape}, a {a.shape} and b {b.shape} do not fit')
    strides = [element_strides(operand) for operand in (c, a, b)]
    if M and N > 1 and math.prod(batch) and strides[0][-1] != 1:
        raise ValueError(f'{who}: c: expected contiguous rows, got strides {c.strides}')
    layout = np.array(batch, np.int64), np.array([operand[:-2] for operand in strides], np.int64).reshape(-1), len(batch)
    return layout, (M, N, K, max(strides[0][-2], N), *strides[1][-2:], *strides[2][-2:])


def copy(y, x):
    """Copy x to y, both C-contiguous float32 of equal size, with a launch, so that a plan records it."""
    launch('strided_unary', y, x, np.array([y.size], np.int64), np.ones(2, np.int64), 1, library.cpu().lib.PYOPS_OP_COPY)


def gather_rows(y, x, rows):
    """Compute y[t, r] = x[t, rows[r]]: y (T, R, C) and x (T, N, C) C-contiguous float32, rows (R,) int32."""
    (T, R, C), N = y.shape, x.shape[1]
    if x.shape != (T, N, C) or rows.shape != (R,):
        raise ValueError(f'gather_rows: y {y.shape}, x {x.shape} and rows {rows.shape} do not fit')
    launch('gather_rows', y, x, rows, T, N, R, C)


def convert(y, x):
    """Copy x to y, of the same shape; their dtypes may be float32 or BF16, their rows (..., D) at any equal distance."""
    *rows, D = x.shape
    distances = [check_rows(name, array, x.shape, REAL) for name, array in (('y', y), ('x', x))]
    launch('convert', y, x, math.prod(rows), D, *distances)


def as_float(x, name):
    """Return a compact float32 copy of bfloat16 rows (..., D) at any equal distance; a float32 array itself.  name: of the
    copy, as for `empty`."""
    if x.dtype != BF16:
        return x
    y = empty(x.shape, name=name)
    convert(y, x)
    return y


# ---- plans -----------------------------------------------------------------------------------------------------------

def is_recorded():
    """Return whether a plan is recording in this thread; then every operation of a step on arrays must be a launch."""
    return state.on_launch is not None and state.in_hooked_thread()


def note_product(op, product, layer='', **facts):
    """Record in the current plan the Product (pyops/backend/kernels.py) that the last launch computes; no-op without a plan.

    op      an object with a `name`;  layer: a suffix of the name, for ops with several layers
    weight, bias    of a linear layer: Parameters, or arrays in the memory of parameters
    rows    the shape of the row axes in the op's arrays, such as (T, B);  None: the row axes of the input
    steps   True: the layer processes a sequence step by step, and its tensors are saved step by step
    heads   the number of heads of attention
    """
    if state.on_note is not None and state.in_hooked_thread():
        state.on_note(op, product, layer, **facts)


# ---- settings of the CPU library -------------------------------------------------------------------------------------

def isa():
    """Return the instruction set of the selected kernels: 'generic', 'avx2' or 'avx512'."""
    ffi, lib, _ = library.cpu()
    return ffi.string(lib.pyops_isa()).decode()


def float32_isa():
    """Return the instruction set of large products in float32: the same as `isa` or 'amx_bf16' (docs/linear.md)."""
    ffi, lib, _ = library.cpu()
    return ffi.string(lib.pyops_float32_isa()).decode()


def bf16_isa():
    """Return the instruction set of products in bfloat16: the same as `isa`, 'avx512_bf16' or 'amx_bf16'."""
    ffi, lib, _ = library.cpu()
    return ffi.string(lib.pyops_bf16_isa()).decode()


def int8_isa():
    """Return the instruction set of products in int8: the same as `isa`, 'avx2_vnni', 'avx512_vnni' or 'amx_int8'."""
    ffi, lib, _ = library.cpu()
    return ffi.string(lib.pyops_int8_isa()).decode()


def set_exact(exact: bool = True) -> None:
    """Choose kernels that give the same bits on every instruction set of x86-64, or (False) the faster default; for the whole
    process.  docs/determinism.md has the guarantee.   ValueError on another architecture, and with the precision bf16
    """
    HOST.exact = exact


def threads():
    """Return the maximum number of threads of a kernel."""
    return library.cpu().lib.pyops_threads()


def set_threads(n):
    """Set the number of threads (1 to 1024); results do not depend on it."""
    HOST.check(library.cpu().lib.pyops_set_threads(n))
