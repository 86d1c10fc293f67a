"""The tape: apply(op, ...) runs an op and records it as a Node.

Two kinds of op are applied in the same way.  Array ops (pyops/ops/array.py) are formulas whose backward can be recorded in
turn, which gives second derivatives.  Kernel ops, such as Linear or GRU, are the classes that programs with manual
gradients call; here their parameters are Tensors too.  Some of them have a second, differentiable definition of their
gradient, the method `backward_on_tensors`.
"""
from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from pyops import backend, ndarray
from pyops.autograd.mode import mode
from pyops.backend import state
from pyops.backend.arrays import row_major
from pyops.backend.host import HOST, ResultBuffer
from pyops.backend.recorded_ops import RecordedOp, record
from pyops.errors import ShapeError
from pyops.ndarray import NDArray
from pyops.ops.array import ArrayOp
from pyops.params import Parameter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike

    from pyops.autograd import Tensor
    from pyops.backend.device import Buffer, Device
    from pyops.typing import Numbers, Shape

# where the gradient of an input goes: a leaf, or an output of a node
Origin: TypeAlias = 'tuple[Node, int]'
Parent: TypeAlias = 'Recorded | Origin'

_numbers = itertools.count()


# ---- what is recorded --------------------------------------------------------------------------------------------------

class Recorded:
    """The part of a Tensor that the tape uses.  Tensor, the only direct subclass, adds the operators (tensor.py).

    array           the NDArray
    origin          (node, index of its output) of the op that produced it; None for a leaf
    _calls          {op: KernelCall} of the kernel ops whose first parameter it is, kept for the next call; not set before the
                    first
    """
    __slots__ = ('array', 'origin', 'requires_grad', '_grad', '_hooks', '_calls', '__weakref__')
    of_results: ClassVar[type[Tensor]]          # the class of the results of ops, set in tensor.py
    array: NDArray
    origin: Origin | None
    _calls: dict[Any, KernelCall]
    requires_grad: bool
    _grad: Tensor | None
    _hooks: dict[int, Any]                      # hooks of a leaf, by number; not set before the first

    @property
    def shape(self) -> Shape:
        return self.array.shape

    @property
    def ndim(self) -> int:
        return self.array.ndim

    @property
    def size(self) -> int:
        return self.array.size

    @property
    def dtype(self) -> np.dtype:
        """The dtype of numpy(): bool for a mask, however it is stored (array.dtype)."""
        return ndarray.BOOL if self.array.is_mask else self.array.dtype

    @property
    def device(self) -> Device:
        return self.array.device

    @property
    def kind(self) -> tuple[Shape, np.dtype, Device]:
        """(shape, dtype, device)."""
        return self.array.shape, self.array.dtype, self.array.device

    @property
    def grad(self) -> Tensor | None:
        """The gradient accumulated by backward(): a Tensor, or None."""
        return self._grad

    @grad.setter
    def grad(self, value: Numbers | None) -> None:
        self._grad = None if value is None else gradient_for(self, value)


def as_array(data: Numbers, device: Device | None = None, dtype: DTypeLike | None = None) -> NDArray:
    """Convert numbers to an NDArray; without a dtype floats to float32, integers to int32, bools to a mask, and an NDArray is
    returned unchanged."""
    if isinstance(data, Recorded):
        data = data.array
    if isinstance(data, NDArray):
        device = ndarray.named_device(device)
        if device is not None and data.device != device:
            raise TypeError(f'device: expected {device}, got an array on {data.device}; convert it with .numpy()')
        return data if dtype is None else data.astype(dtype)
    data = np.asarray(data)
    if data.dtype.kind not in 'fiub':
        raise TypeError(f'data: expected real numbers, got {data.dtype}')
    return ndarray.array(data, dtype, device)


def constant(array: NDArray) -> Tensor:
    """Wrap an NDArray in a Tensor without a copy or a check."""
    return wrap(array, None)


def wrap(array: NDArray, origin: Origin | None) -> Tensor:
    """Create the Tensor of an op's output."""
    tensor = object.__new__(Recorded.of_results)
    tensor.array = array
    tensor.origin = origin
    tensor.requires_grad = origin is not None
    tensor._grad = None
    return tensor


def gradient_for(tensor: Recorded, value: Numbers) -> Tensor:
    """Convert value (a Tensor, an array or a list) to a gradient of `tensor`.  ValueError for another shape or dtype."""
    if not isinstance(value, Recorded):
        value = constant(as_array(value if isinstance(value, NDArray) else np.asarray(value, tensor.dtype), tensor.device,
                                  None if isinstance(value, NDArray) else tensor.dtype))
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise ShapeError(f'grad: expected shape {tensor.shape} and {tensor.dtype}, got {value.shape} and {value.dtype}')
    return value


def name_of(op: Any) -> str:
    """Return the name of an op class, or of the class of an op instance."""
    return op.__name__ if isinstance(op, type) else type(op).__name__


class Node:
    """One recorded application of an op, with the values its backward needs until backward has run.

    parents     for each input: the leaf Tensor, or (node, index of its output), or None if it needs no gradient
    arrays      the ids of the input and output arrays, by which derivatives() recognises them in ctx
    guards      (buffer, version, shape) of the arrays that backward will read
    outputs     (shape, dtype, device) of each output
    several     whether the op returns a tuple of outputs, and its backward takes a tuple of gradients
    is_scalar   whether the output (1,) of a kernel op was given the shape (), see as_scalar
    call        the RecordedForward that ran; then ctx has NDArrays, else it has arrays for kernels
    hooks       {index of an output: {number: function}}: called with the gradient of that output; see Tensor.register_hook
    """
    __slots__ = ('op', 'ctx', 'parents', 'arrays', 'guards', 'outputs', 'several', 'is_scalar', 'call', 'number', 'hooks',
                 '__weakref__')

    def __init__(self, op: Any, ctx: Any, parents: list[Parent | None], arrays: list[int],
                 guards: list[tuple[Buffer, int, Shape]], outputs: list[tuple[Shape, np.dtype, Device]],
                 several: bool = False) -> None:
        self.op, self.ctx, self.outputs, self.several = op, ctx, outputs, several
        self.parents: Any = parents         # None, like ctx and arrays, after free()
        self.arrays: Any = arrays
        self.guards = guards
        self.is_scalar = False
        self.call: RecordedForward | None = None
        self.number = next(_numbers)
        self.hooks: dict[int, dict[int, Any]] = {}

    @property
    def name(self) -> str:
        return name_of(self.op.op if isinstance(self.op, KernelCall) else self.op)

    def check(self) -> None:
        """Raise RuntimeError if backward cannot run: saved values were freed, or changed in place since forward."""
        if self.parents is None:
            raise RuntimeError(f'{self.name}: this part of the graph was used by an earlier backward, which freed what it had '
                               'saved; pass retain_graph=True to the earlier one')
        for buffer, version, shape in self.guards:
            if buffer.version != version:
                raise RuntimeError(f'{self.name}: an array of shape {shape} that backward needs was changed in place after '
                                   f'forward (version {buffer.version}, expected {version}); change a copy of it instead')

    def free(self) -> None:
        self.ctx = self.parents = self.arrays = None
        self.guards = []


def apply(op: Any, *inputs: Any, **constants: Any) -> Any:
    """Run an op on Tensors, record it, and return a Tensor, or a tuple of them if the op has several outputs.

    An array op:  apply(Sum, x, axis=0).  Inputs that are not Tensors, and all keyword arguments, are constants.
    A kernel op:  apply(Linear, x, weight=w, bias=b).  Keyword arguments go to the op's __init__, Tensors as Parameters;
    positional arguments go to forward, Tensors as C-contiguous arrays.  An op without parameters may also be an instance.
    """
    if mode.interpreter is not None:
        return mode.interpreter(op, inputs, constants)
    if not (isinstance(op, type) and issubclass(op, ArrayOp)):
        return _apply_kernel(op, inputs, constants)
    arrays, parents, record, of_results = [], [], False, Recorded.of_results
    for x in inputs:
        parent = None
        if x.__class__ is of_results or isinstance(x, Recorded):
            if x.requires_grad:
                parent, record = x if x.origin is None else x.origin, True
            x = x.array
        elif isinstance(x, np.ndarray):
            x = as_array(x, next((other.device for other in inputs if isinstance(other, Recorded)), None))
        arrays.append(x)
        parents.append(parent)
    y, ctx = op.forward(*arrays, **constants)         # type: ignore[attr-defined]
    several = type(y) is tuple
    if mode.anomaly:
        check_finite(name_of(op), arrays, y if several else (y,))
    if not (record and mode.grad):
        return tuple(wrap(a, None) for a in y) if several else wrap(y, None)
    guards = [(a.buffer, a.buffer.version, a.shape) for a in ctx if type(a) is NDArray]
    if not several:                                     # the usual case, without loops: small ops take microseconds
        return wrap(y, (Node(op, ctx, parents, [*map(id, arrays), id(y)], guards, [(y.shape, y.dtype, y.buffer.device)]), 0))
    node = Node(op, ctx, parents, [*map(id, (*arrays, *y))], guards, [(a.shape, a.dtype, a.buffer.device) for a in y], True)
    return tuple(wrap(a, (node, i)) for i, a in enumerate(y))


def has_nan(x: Any) -> bool:
    """Return whether an array of floats, of any kind, has a NaN."""
    x = x.array if isinstance(x, Recorded) else x
    return backend.is_array(x) and x.dtype.kind == 'f' and bool(np.isnan(backend.get(x)).any())


def check_finite(name: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Raise RuntimeError, naming the op, if one of its outputs has a NaN."""
    for i, y in enumerate(outputs):
        if has_nan(y):
            bad = [j for j, x in enumerate(inputs) if has_nan(x)]
            cause = f'input {bad[0]} has one already' if bad else 'its inputs have none'
            raise RuntimeError(f'detect_anomaly: {name}: output {i} of shape {y.shape} has a NaN; {cause}')


def parent_of(x: Any) -> Parent | None:
    """Return the destination of the gradient of an input, None if it needs none."""
    if not (isinstance(x, Recorded) and x.requires_grad):
        return None
    return x if x.origin is None else x.origin


# ---- kernel ops --------------------------------------------------------------------------------------------------------

class KernelCall:
    """A kernel op with the settings and parameters of its __init__.  An op applied as an instance has none.

    parameters  (argument, name, value) of each Tensor among the keyword arguments
    one         the op, for forward
    entries     the entries of all parameters, if `one` is made of them: its backward adds to their .grad.  None if a parameter
                is not a module's; then make() creates the op again for backward
    views, device   the NDArrays of all parameters, and their device, None without parameters
    guarded     (buffer, shape) of each of the views
    is_kept     whether `one` reads the memory of `views`, and no view is a module's: the next call may use it again
    forwards    {shape, strides and dtype of each input: its RecordedForward}; None if the launches of the op cannot be recorded
    """
    __slots__ = ('op', 'parameters', 'settings', 'entries', 'views', 'guarded', 'device', 'is_kept', 'one', 'forwards')
    entries: tuple[Any, ...] | None
    views: list[NDArray]
    guarded: list[tuple[Buffer, Shape]]
    device: Device | None

    def __init__(self, op: Any, constants: dict[str, Any]) -> None:
        self.op: Any = op
        self.parameters: list[tuple[str, str, Any]] = []
        self.settings, self.entries, self.views, self.guarded = constants, None, [], []
        self.device, self.is_kept = None, False
        tensors = {name: value for name, value in constants.items() if isinstance(value, Recorded)}
        self.forwards: dict[Any, RecordedForward | None] | None = None
        if not tensors:
            self.one = self.make([])
            if isinstance(op, type) and 'same_launches' in vars(op):
                self.forwards = {}
            return
        device = _same_device(op, list(tensors.values()))
        self.device, self.views = device, [p.array for p in tensors.values()]   # gives a Parameter its memory and its name
        self.guarded = [(view.buffer, view.shape) for view in self.views]
        arrays = [device.kernel_array(view) for view in self.views]
        self.parameters = [(argument, getattr(p, 'name', None) or argument, array)
                           for (argument, p), array in zip(tensors.items(), arrays, strict=True)]
        self.settings = {name: value for name, value in constants.items() if name not in tensors}
        entries = tuple([getattr(p, 'entry', None) for p in tensors.values()])
        is_constant = isinstance(op, type) and all([type(setting) in _CONSTANT for setting in self.settings.values()])
        # of a view that is not compact kernel_array made a copy
        self.is_kept = (is_constant and device.is_host and not any([e is not None for e in entries])
                        and all([view.is_compact() and view.size > 0 for view in self.views]))
        with backend.on(device):
            if is_constant and all([e is not None and e.touched is None and e.rounded is None for e in entries]):
                self.entries = entries
                self.one = op(**dict(zip(tensors, entries, strict=True)), **self.settings)
            else:
                self.one = self.make(arrays)        # forward does not use gradients: any array of the right shape will do
        if (self.entries is not None or self.is_kept) and 'same_launches' in vars(op) and device is HOST:
            self.forwards = {}

    def make(self, grads: Sequence[Any]) -> Any:
        """Return the op with these gradients of its parameters."""
        if not isinstance(self.op, type):
            return self.op
        parameters = {argument: Parameter(name, value, grad)
                      for (argument, name, value), grad in zip(self.parameters, grads, strict=True)}
        return self.op(**parameters, **self.settings)

    def forward_for(self, key: Any, arrays: list[NDArray]) -> RecordedForward | None:
        """Return the RecordedForward for inputs like these; None at their first call, and if it cannot be recorded."""
        forwards: Any = self.forwards
        found = forwards.get(key, _NEW)
        if found is _NEW:                       # it may be the only call with these shapes
            if len(forwards) >= MOST_SHAPES:
                forwards.clear()
            forwards[key], found = _ONCE, None
        elif found is _ONCE:
            forwards[key] = found = _record_forward(self.one, arrays)
        return found

    def fits(self, constants: dict[str, Any]) -> bool:
        """Return whether this is the call with these keyword arguments: the same parameters and equal settings."""
        if len(constants) != len(self.parameters) + len(self.settings):
            return False
        if self.is_kept:
            for (argument, _, _), view in zip(self.parameters, self.views, strict=True):
                if getattr(constants.get(argument), 'array', None) is not view or view.buffer.pointer is None:
                    return False                # another array, or its memory was freed
        else:
            for (argument, _, _), entry in zip(self.parameters, self.entries or (), strict=True):
                if getattr(constants.get(argument), 'entry', None) is not entry:
                    return False
        for name, setting in self.settings.items():
            value = constants.get(name, self)
            # 1.0 and True equal 1, and may be refused where 1 is accepted; a tuple may hold them
            if value is not setting and not (type(value) is type(setting) is not tuple and value == setting):
                return False
        return True


class RecordedForward:
    """The kernels of forward of a KernelCall for inputs of certain shapes, and of backward.

    launches    the RecordedOp of forward; its results are y and the fields of ctx
    ctx_type    the type of ctx
    ctx         the numbers of its fields in [*new arrays, *inputs]
    saved       the numbers in it of inputs and of y
    backwards   {whether it skips dx: RecordedOp of backward, whose arguments are dy and the arrays in ctx, or None}
    """
    __slots__ = ('launches', 'ctx_type', 'ctx', 'saved', 'backwards')

    def __init__(self, launches: RecordedOp, ctx_type: Any) -> None:
        self.launches, self.ctx_type = launches, ctx_type
        y, *self.ctx = launches.results
        self.saved = [i for i in self.ctx if i == y or i >= len(launches.new)]
        self.backwards: dict[bool, RecordedOp | None] = {}

    def backward(self, op: Any, ctx: Sequence[NDArray], skips_dx: bool) -> RecordedOp | None:
        """Return the RecordedOp of op.backward; None if it cannot be recorded."""
        if skips_dx not in self.backwards:
            def run(dy: np.ndarray, *saved: np.ndarray) -> Sequence[Any]:
                found = op.backward(dy, self.ctx_type(*saved), **{'want_dx': False} if skips_dx else {})
                return found if type(found) is tuple else (found,)
            *_, shape, _, dtype = self.launches.new[self.launches.results[0]]
            launches = record(run, [(shape, dtype), *[(a.shape, a.dtype) for a in ctx]], op)
            if launches is not None and not all(i is None or i < len(launches.new) for i in launches.results):
                launches = None                 # a gradient that is dy itself
            self.backwards[skips_dx] = launches
        return self.backwards[skips_dx]


MOST_SHAPES = 64            # of the inputs of a KernelCall, for which forward is recorded
_NEW, _ONCE = 'never ran', 'ran once'       # in place of a RecordedForward


def _record_forward(op: Any, inputs: list[NDArray]) -> RecordedForward | None:
    """Return the RecordedForward of an op for inputs like these; None if it cannot be recorded."""
    if not all([x.strides == row_major(x.shape) for x in inputs]):
        return None
    kind: Any = None

    def run(*arrays: np.ndarray) -> Sequence[Any]:
        nonlocal kind
        y, ctx = op.forward(*arrays)
        kind = type(ctx)
        return y, *ctx
    try:
        launches = record(run, [(x.shape, x.dtype) for x in inputs], op)
    except (TypeError, ValueError):             # the op refuses these inputs, and says why when it runs
        return None
    if launches is None or launches.results[0] is None or launches.results[0] >= len(launches.new) or None in launches.results:
        return None
    return RecordedForward(launches, kind)


_CONSTANT = frozenset((bool, int, float, str, tuple, type(None)))       # types of settings that a kept call may have
_PLAIN = _CONSTANT - {tuple}                                            # whose equal values of one type are the same setting


def _kernel_call(op: Any, constants: dict[str, Any]) -> KernelCall:
    """Return the KernelCall of an op with these keyword arguments.

    The parameters of a layer are the same in every step, so its call is kept with the first of them.  It refers to their
    memory and not to the Tensors, so it keeps no module alive, and no Tensor itself.
    """
    for first in constants.values():
        if isinstance(first, Recorded):
            break
    else:
        is_plain = isinstance(op, type) and all([type(setting) in _PLAIN for setting in constants.values()])
        return _plain_call(op, **constants) if is_plain else KernelCall(op, constants)
    try:
        calls = first._calls
    except AttributeError:                      # its first kernel op
        calls = first._calls = {}
    kernel = calls.get(op)
    if kernel is None or not kernel.fits(constants):
        kernel = KernelCall(op, constants)
        if kernel.entries is not None or kernel.is_kept:
            calls[op] = kernel
    return kernel


@functools.lru_cache(256, typed=True)
def _plain_call(op: Any, /, **settings: Any) -> KernelCall:
    """Return the KernelCall of an op class without parameters, such as ReLU: it is the same in every step."""
    return KernelCall(op, settings)


def kernel_array(x: NDArray, device: Device) -> Any:
    """Return device.kernel_array(x).  Faster for a whole array in host memory: its owner is the same array."""
    owner = x.buffer.owner
    if (type(owner) is np.ndarray and owner.dtype is x.dtype and owner.shape == x.shape and not x.offset
            and x.strides == row_major(x.shape)):
        return owner
    return device.kernel_array(x)


def _apply_recorded(kernel: KernelCall, inputs: tuple[Any, ...], constants: dict[str, Any]) -> Tensor | None:
    """Apply an op whose forward was recorded for inputs like these: one call runs its kernels.  Return None for other inputs:
    then the op itself runs, and raises all errors."""
    key: list[Any] = []
    arrays: list[NDArray] = []
    pointers: list[Any] = []
    parents: list[Parent | None] = []
    record, of_results = False, Recorded.of_results
    for x in inputs:
        if x.__class__ is not of_results:
            return None
        array, parent = x.array, None
        buffer = array.buffer
        if buffer.device is not HOST or buffer.pointer is None:
            return None
        key += array.shape, array.strides, array.dtype
        arrays.append(array)
        pointers.append(buffer.pointer + array.offset if array.offset else buffer.pointer)
        if x.requires_grad:
            parent, record = x if x.origin is None else x.origin, True
        parents.append(parent)
    if len(arrays) > 1 and len({*map(id, arrays)}) < len(arrays):       # derivatives() tells inputs apart by their arrays
        return None
    call: Any = kernel.forwards.get(tuple(key))         # type: ignore[union-attr]
    if call.__class__ is not RecordedForward:
        call = kernel.forward_for(tuple(key), arrays)
        if call is None:
            return None
    launches = call.launches
    found = launches.run(NDArray, pointers)
    if found is None:
        return None
    y = found[launches.results[0]]
    for argument, _, _ in kernel.parameters:
        x, parent = constants[argument], None
        if x.requires_grad:
            parent, record = x if x.origin is None else x.origin, True
        parents.append(parent)
    if not (record and mode.grad):
        return wrap(y, None)
    found += arrays
    guards = []
    for buffer, shape in kernel.guarded:
        guards.append((buffer, buffer.version, shape))
    for i in call.saved:
        array = found[i]
        guards.append((array.buffer, array.buffer.version, array.shape))
    ctx = tuple.__new__(call.ctx_type, map(found.__getitem__, call.ctx))
    node = Node(kernel, ctx, parents, [*map(id, arrays), id(y)], guards, [(y.shape, y.dtype, HOST)])
    node.call = call
    return wrap(y, (node, 0))


def _apply_kernel(op: Any, inputs: tuple[Any, ...], constants: dict[str, Any]) -> Tensor:
    kernel = _kernel_call(op, constants)
    if kernel.forwards is not None and state.hooked_thread is None and state.device is HOST and not mode.anomaly:
        recorded = _apply_recorded(kernel, inputs, constants)
        if recorded is not None:
            return recorded
    device: Any = kernel.device
    arrays: list[Any] = []
    ids: list[int] = []
    parents: list[Parent | None] = []
    sources: list[NDArray | None] = []                  # the NDArrays of the inputs
    record, of_results = False, Recorded.of_results
    for x in inputs:
        array, parent, source = x, None, None
        if x.__class__ is of_results or isinstance(x, Recorded):
            source = x.array
            if source.buffer.device is not device:
                if device is not None:
                    _same_device(op, [x for x in (*inputs, *constants.values()) if isinstance(x, Recorded)])
                device = source.buffer.device
            if x.requires_grad:
                parent, record = x if x.origin is None else x.origin, True
            array = kernel_array(source, device)
            if id(array) in ids:
                array = device.kernel_array(source)     # two Tensors over the same memory: derivatives() tells them apart
        arrays.append(array)
        ids.append(id(array))
        parents.append(parent)
        sources.append(source)
    for argument, _, _ in kernel.parameters:
        x, parent = constants[argument], None
        if x.requires_grad:
            parent, record = x if x.origin is None else x.origin, True
        parents.append(parent)
    if device is None:
        device = ndarray.default_device()
    if device is state.device:
        made, ctx = kernel.one.forward(*arrays)
    else:
        with backend.on(device):
            made, ctx = kernel.one.forward(*arrays)
    y = as_ndarray(made, device)
    if mode.anomaly:
        check_finite(name_of(op), arrays, (y,))
    if not (record and mode.grad):
        return wrap(y, None)
    saved = [*map(id, ctx)]
    guards = [(buffer, buffer.version, shape) for buffer, shape in kernel.guarded]
    for source, number in zip(sources, ids, strict=True):
        if number in saved and source is not None:
            guards.append((source.buffer, source.buffer.version, source.shape))
    ids.append(id(made))
    if ids[-1] in saved:
        guards.append((y.buffer, y.buffer.version, y.shape))
    return wrap(y, (Node(kernel, ctx, parents, ids, guards, [(y.shape, y.dtype, device)]), 0))


def as_scalar(y: Tensor) -> Tensor:
    """Give the new loss (1,) of a kernel op the shape (), without another node: its backward gets a gradient of this shape."""
    if mode.interpreter is not None:
        return y.reshape(())
    array = y.array
    y.array = NDArray(array.buffer, array.offset, (), (), array.dtype)
    if y.origin is not None:
        node = y.origin[0]
        node.outputs, node.is_scalar = [((), array.dtype, array.buffer.device)], True
    return y


def _same_device(op: Any, tensors: Sequence[Recorded]) -> Device:
    """Return the common device of the tensors.  Raises TypeError if they are on several."""
    if not tensors:
        return ndarray.default_device()
    device: Device = tensors[0].array.buffer.device
    for other in tensors:
        if other.array.buffer.device is not device:
            raise TypeError(f'{name_of(op)}: expected all tensors on one device, got {device} and {other.device}')
    return device


def as_ndarray(array: Any, device: Device) -> NDArray:
    """Wrap a C-contiguous array, an output of a kernel op, in an NDArray on the device of its inputs."""
    if isinstance(array, NDArray):
        return array
    shape, dtype = array.shape, array.dtype
    if dtype is not ndarray.FLOAT:
        dtype = ndarray.FLOAT if dtype == ndarray.FLOAT else ndarray.INT
    buffer = ResultBuffer(array) if device is HOST and array.flags.c_contiguous else device.wrap(array, True)
    return NDArray(buffer, 0, shape, row_major(shape), dtype)
