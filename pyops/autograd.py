"""Automatic differentiation: a Tensor is an array with a record of the op that produced it; see docs/autograd.md.

Every op applied to a Tensor creates a Node: the op, the values its backward needs, and the origins of its inputs.  Nodes are
numbered in order of creation, so an op has a larger number than everything it depends on, and backward visits the nodes
from the largest number to the smallest.

Two kinds of op are applied in the same way.  Array ops (pyops/ops/array.py) are formulas whose backward can be recorded in
turn, which gives second derivatives.  Kernel ops, such as Linear or GRU, are the classes that programs with manual
gradients call; here their parameters are Tensors too.  Some of them have a second, differentiable definition of their
gradient, the method `backward_on_tensors`.
"""
import contextlib
import functools
import heapq
import inspect
import itertools
import math
import numbers
import operator as operators
import threading

import numpy as np

from pyops import backend, ndarray
from pyops.ndarray import NDArray
from pyops.ops import ReLU, elementwise, matmul, reductions, shapes
from pyops.ops.array import ArrayOp, normal_axes
from pyops.params import Parameter

_numbers = itertools.count()


class _Mode(threading.local):
    grad = True
    before = ()             # values of `grad` outside the open no_grad and enable_grad blocks
    interpreter = None      # runs ops instead of `apply`


_mode = _Mode()


class _Grad:
    """Context manager and decorator: `with no_grad(): ...` or `@no_grad()` above a function."""

    def __init__(self, enabled):
        self.enabled = enabled

    def __enter__(self):
        _mode.before, _mode.grad = (*_mode.before, _mode.grad), self.enabled        # not in self: it may be entered twice

    def __exit__(self, *_):
        *_mode.before, _mode.grad = _mode.before

    def __call__(self, function):
        if inspect.isgeneratorfunction(function):
            raise TypeError(f'{function.__name__}: a generator runs after the call that creates it; use `with` inside its body')

        @functools.wraps(function)
        def wrapped(*args, **kwargs):
            with _Grad(self.enabled):
                return function(*args, **kwargs)
        return wrapped


def no_grad():
    """Disable recording inside the block: results require no gradient, and leaves may be changed in place."""
    return _Grad(False)


def enable_grad():
    """Enable recording inside the block, within no_grad()."""
    return _Grad(True)


def is_grad_enabled():
    """Return whether ops are recorded."""
    return _mode.grad


def is_interpreted():
    """Return whether gradcheck is evaluating the function in float64; state that lasts must not change then."""
    return _mode.interpreter is not None


@contextlib.contextmanager
def interpreted_by(run):
    """Inside the block, apply(op, *inputs, **constants) calls run(op, inputs, constants), and nothing is recorded."""
    before, _mode.interpreter = _mode.interpreter, run
    try:
        with no_grad():
            yield
    finally:
        _mode.interpreter = before


# ---- the tape ----------------------------------------------------------------------------------------------------------

def name_of(op):
    """Return the name of an op class, or of the class of an op instance."""
    return op.__name__ if isinstance(op, type) else type(op).__name__


class Node:
    """One recorded application of an op, with the values its backward needs until backward has run.

    parents     for each input: the leaf Tensor, or (node, index of its output), or None if it needs no gradient
    arrays      the ids of the input and output arrays, by which derivatives() recognises them in ctx
    guards      (buffer, version, shape) of the arrays that backward will read
    outputs     (shape, dtype, device) of each output
    several     whether the op returns a tuple of outputs, and its backward takes a tuple of gradients
    """
    __slots__ = ('op', 'ctx', 'parents', 'arrays', 'guards', 'outputs', 'several', 'number', '__weakref__')

    def __init__(self, op, ctx, parents, arrays, guards, outputs, several=False):
        self.op, self.ctx, self.parents, self.arrays = op, ctx, parents, arrays
        self.guards, self.outputs, self.several = guards, outputs, several
        self.number = next(_numbers)

    @property
    def name(self):
        return name_of(self.op.op if isinstance(self.op, _Kernel) else self.op)

    def check(self):
        """Raise RuntimeError if backward cannot run: saved values were freed, or changed in place since forward."""
        if self.parents is None:
            raise RuntimeError(f'{self.name}: this part of the graph was used by an earlier backward, which freed what it had '
                               'saved; pass retain_graph=True to the earlier one')
        for buffer, version, shape in self.guards:
            if buffer.version != version:
                raise RuntimeError(f'{self.name}: an array of shape {shape} that backward needs was changed in place after '
                                   f'forward (version {buffer.version}, expected {version}); change a copy of it instead')

    def free(self):
        self.ctx = self.parents = self.arrays = None
        self.guards = ()


def apply(op, *inputs, **constants):
    """Run an op on Tensors, record it, and return a Tensor, or a tuple of them if the op has several outputs.

    An array op:  apply(Sum, x, axis=0).  Inputs that are not Tensors, and all keyword arguments, are constants.
    A kernel op:  apply(Linear, x, weight=w, bias=b).  Keyword arguments go to the op's __init__, Tensors as Parameters;
    positional arguments go to forward, Tensors as C-contiguous arrays.  An op without parameters may also be an instance.
    """
    if _mode.interpreter is not None:
        return _mode.interpreter(op, inputs, constants)
    if not (isinstance(op, type) and issubclass(op, ArrayOp)):
        return _apply_kernel(op, inputs, constants)
    arrays, parents, record = [], [], False
    for x in inputs:
        parent = None
        if isinstance(x, Tensor):
            if x.requires_grad:
                parent, record = x if x.origin is None else x.origin, True
            x = x.array
        elif isinstance(x, np.ndarray):
            x = _as_array(x, next((other.device for other in inputs if isinstance(other, Tensor)), None))
        arrays.append(x)
        parents.append(parent)
    y, ctx = op.forward(*arrays, **constants)
    several = type(y) is tuple
    if not (record and _mode.grad):
        return tuple(_result(a, None) for a in y) if several else _result(y, None)
    outputs = y if several else (y,)
    node = Node(op, ctx, parents, [id(a) for a in (*arrays, *outputs)],
                [(a.buffer, a.buffer.version, a.shape) for a in ctx if type(a) is NDArray],
                [(a.shape, a.dtype, a.buffer.device) for a in outputs], several)
    return tuple(_result(a, (node, i)) for i, a in enumerate(y)) if several else _result(y, (node, 0))


def _parent(x):
    """Return the destination of the gradient of an input, None if it needs none."""
    if not (isinstance(x, Tensor) and x.requires_grad):
        return None
    return x if x.origin is None else x.origin


# ---- kernel ops --------------------------------------------------------------------------------------------------------

class _Kernel:
    """A recorded kernel op: its class, the settings of its __init__, and its parameters as (argument, name, value).

    Backward creates it again with other gradient arrays.  An op applied as an instance has no parameters.
    """
    __slots__ = ('op', 'parameters', 'settings')

    def __init__(self, op, parameters, settings):
        self.op, self.parameters, self.settings = op, parameters, settings

    def make(self, grads):
        if not isinstance(self.op, type):
            return self.op
        parameters = {argument: Parameter(name, value, grad)
                      for (argument, name, value), grad in zip(self.parameters, grads, strict=True)}
        return self.op(**parameters, **self.settings)


@functools.cache
def _skips_dx(op):
    """Return whether the op's backward can skip computing dx."""
    return 'want_dx' in inspect.signature(op.backward).parameters


def _apply_kernel(op, inputs, constants):
    tensors = {name: value for name, value in constants.items() if isinstance(value, Tensor)}
    every = [x for x in (*inputs, *tensors.values()) if isinstance(x, Tensor)]
    device = _same_device(op, every)
    kernel = _Kernel(op, [(argument, getattr(p, 'name', None) or argument, device.plain(p.array))
                          for argument, p in tensors.items()],
                     {name: value for name, value in constants.items() if name not in tensors})
    arrays = [device.plain(x.array) if isinstance(x, Tensor) else x for x in inputs]
    # forward does not use gradients: any array of the right shape will do
    with backend.on(device.place):
        made, ctx = kernel.make([value for _, _, value in kernel.parameters]).forward(*arrays)
    y = _over(made, device)
    if not _mode.grad or not any([x.requires_grad for x in every]):
        return _result(y, None)
    saved = {id(a) for a in ctx}
    read = [x.array for x, a in zip(inputs, arrays, strict=True) if isinstance(x, Tensor) and id(a) in saved]
    read += [p.array for p in tensors.values()] + [y] * (id(made) in saved)
    node = Node(kernel, ctx, [_parent(x) for x in (*inputs, *tensors.values())], [id(a) for a in (*arrays, made)],
                [(a.buffer, a.buffer.version, a.shape) for a in read], [(y.shape, y.dtype, device)])
    return _result(y, (node, 0))


def _same_device(op, tensors):
    """Return the common device of the tensors.  Raises TypeError if they are on several."""
    if not tensors:
        return ndarray.default_device()
    device = tensors[0].device
    for other in tensors:
        if other.device is not device:
            raise TypeError(f'{name_of(op)}: expected all tensors on one device, got {device} and {other.device}')
    return device


def _over(array, device):
    """Wrap a C-contiguous array, an output of a kernel op, in an NDArray on the device of its inputs."""
    if isinstance(array, NDArray):
        return array
    dtype = ndarray.FLOAT if array.dtype == np.float32 else ndarray.INT
    return NDArray(device.wrap(array, True), 0, array.shape, ndarray.row_major(array.shape), dtype)


# ---- backward ----------------------------------------------------------------------------------------------------------

class _Backward:
    """One traversal of the tape.

    create_graph    gradients are Tensors, and operations on them are recorded; else they are NDArrays
    accumulate      the gradient of a leaf starts from its current .grad
    relevant        the ids of the requested leaves and the nodes on paths to them; None: everything is relevant
    """

    def __init__(self, create_graph, retain_graph, accumulate, relevant=None):
        self.create_graph, self.retain_graph, self.accumulate, self.relevant = create_graph, retain_graph, accumulate, relevant
        self.leaves = {}        # id of a leaf -> slot [gradient so far, whether it may be added to in place, the leaf]
        self.nodes = {}         # node -> one slot [gradient so far, whether ...] per output
        self.heap = []          # (-number, node) of the nodes still to visit
        self.captured = {}      # (node, output) -> gradient, for requested tensors that are not leaves

    def slot(self, parent):
        """Return the slot in which the gradient of a leaf or of a node's output is accumulated."""
        if type(parent) is tuple:
            node, output = parent
            slots = self.nodes.get(node)
            if slots is None:
                slots = self.nodes[node] = [[None, False] for _ in node.outputs]
                heapq.heappush(self.heap, (-node.number, node))
            return slots[output]
        slot = self.leaves.get(id(parent))
        if slot is None:
            slot = self.leaves[id(parent)] = [None, False, parent]
            if self.accumulate and parent.grad is not None:
                slot[0] = parent.grad if self.create_graph else parent.grad.array
                slot[1] = not self.create_graph and slot[0].is_compact()
        return slot

    def add(self, parent, gradient):
        """Add a gradient to a leaf or a node's output."""
        slot = self.slot(parent)
        if slot[0] is None:
            slot[0] = gradient
        elif slot[1]:
            slot[0] += gradient
        else:
            slot[0], slot[1] = slot[0] + gradient, not self.create_graph

    def sum_of(self, parent):
        """Return the gradient of `parent` as an array that may be added to in place."""
        slot = self.slot(parent)
        if not slot[1]:
            if slot[0] is None:
                shape, dtype, device = parent[0].outputs[parent[1]] if type(parent) is tuple else parent.kind
                slot[0] = ndarray.zeros(shape, dtype, device)
            else:
                slot[0] = slot[0].copy()
            slot[1] = True
        return slot[0]

    def wanted(self, parent):
        """Return whether the gradient of an input is needed."""
        if self.relevant is None or parent is None:
            return parent is not None
        if type(parent) is tuple:
            return parent[0] in self.relevant or parent in self.captured
        return id(parent) in self.relevant

    def run(self):
        before, _mode.grad = _mode.grad, self.create_graph
        try:
            while self.heap:
                _, node = heapq.heappop(self.heap)
                slots = self.nodes.pop(node)
                for i, slot in enumerate(slots):
                    if (node, i) in self.captured:
                        self.captured[node, i] = slot[0]
                if self.relevant is None or node in self.relevant:
                    node.check()
                    step = self.kernel_op if isinstance(node.op, _Kernel) else self.array_op
                    step(node, [slot[0] for slot in slots])
                    if not self.retain_graph:
                        node.free()
        finally:
            _mode.grad = before

    def array_op(self, node, dys):
        """Run the backward of an array op, on NDArrays or on Tensors."""
        op, ctx, wanted = node.op, node.ctx, [self.wanted(parent) for parent in node.parents]
        if self.create_graph:
            ctx = tuple(self.tensor(node, a) if type(a) is NDArray else a for a in ctx)
        elif hasattr(op, 'add_to'):         # the gradient of a part of x is added in place
            return op.add_to(self.sum_of(node.parents[0]), dys[0], ctx)
        dy = dys[0]
        if node.several:
            dy = tuple(self.zeros(output) if dy is None else dy for dy, output in zip(dys, node.outputs, strict=True))
        gradients = op.backward(dy, ctx, wanted) if _asks_what_is_wanted(op) else op.backward(dy, ctx)
        self.pass_on(node, gradients, wanted)

    def pass_on(self, node, gradients, wanted):
        """Add the gradients of a node's inputs to their parents."""
        if not isinstance(gradients, (tuple, list)):
            gradients = (gradients,)
        for parent, gradient, needed in zip(node.parents, gradients, wanted, strict=False):     # ids come last and have none
            if needed and gradient is not None:
                shape = parent[0].outputs[parent[1]][0] if type(parent) is tuple else parent.shape
                if gradient.shape != shape:
                    raise RuntimeError(f'{node.name}: its backward returned a gradient of shape {gradient.shape} '
                                       f'for an input of shape {shape}')
                self.add(parent, gradient)

    def kernel_op(self, node, dys):
        """Run the backward of a kernel op, which adds to the gradients of its parameters itself."""
        kernel, dy = node.op, dys[0]
        wanted = [self.wanted(parent) for parent in node.parents]
        device, n = node.outputs[0][2], len(node.parents) - len(kernel.parameters)
        if self.create_graph:
            self.pass_on(node, self.derivatives(node, dy, device, n), wanted)
            return
        sums = [self.sum_of(parent) if needed else ndarray.zeros(value.shape, device=device)
                for parent, needed, (_, _, value) in zip(node.parents[n:], wanted[n:], kernel.parameters, strict=True)]
        op = kernel.make([device.plain(d) for d in sums])
        options = {} if any(wanted[:n]) or not _skips_dx(type(op)) else {'want_dx': False}
        dy = dy.compact()
        given = device.plain(dy)
        with backend.on(device.place):
            gradients = op.backward(given, node.ctx, **options)
        for d in sums:
            d.buffer.version += 1
        known, arrays = {id(given): dy}, []         # Residual returns dy itself, twice: keep them identical
        for gradient in gradients if type(gradients) is tuple else (gradients,):
            if gradient is not None and id(gradient) not in known:
                known[id(gradient)] = _over(gradient, device)
            arrays.append(known.get(id(gradient)))
        self.pass_on(node, arrays, wanted)

    def derivatives(self, node, dy, device, n):
        """Return the gradients of the n inputs and the parameters of a kernel op, computed with recorded array ops."""
        kernel = node.op
        if getattr(kernel.op, 'backward_on_tensors', None) is None:
            raise RuntimeError(f'{node.name}: has no second derivative: its gradient is computed by a kernel; '
                               'use array ops (@, +, exp, sum ...) for a function that needs create_graph')

        def tensor(array):
            """Wrap an array of ctx, with its history if it is an input or the output."""
            if not backend.is_array(array) or array.dtype not in (np.float32, np.int32):
                return array
            i = node.arrays.index(id(array)) if id(array) in node.arrays else None
            return _result(_over(array, device), None if i is None else (node, 0) if i == n else node.parents[i])
        parameters = {argument: _result(_over(value, device), parent)
                      for (argument, _, value), parent in zip(kernel.parameters, node.parents[n:], strict=True)}
        op = kernel.make([value for _, _, value in kernel.parameters])
        inputs, gradients = op.backward_on_tensors(dy, type(node.ctx)(*map(tensor, node.ctx)), parameters)
        return [*inputs, *[None] * (n - len(inputs)), *(gradients[argument] for argument in parameters)]

    def tensor(self, node, array):
        """Wrap an array of ctx as a Tensor with its history, for second derivatives."""
        try:
            i = node.arrays.index(id(array))
        except ValueError:
            return _result(array, None)
        n = len(node.parents)
        return _result(array, node.parents[i] if i < n else (node, i - n))

    def zeros(self, output):
        """Return the gradient of an output that was not used: zeros."""
        array = ndarray.zeros(*output)
        return _result(array, None) if self.create_graph else array


@functools.cache
def _asks_what_is_wanted(op):
    return 'wanted' in inspect.signature(op.backward).parameters


def _start(walk, outputs, gradients):
    """Set the gradients of the outputs."""
    if _mode.interpreter is not None:
        raise RuntimeError('gradcheck: the function computes gradients itself, which is not supported in float64; '
                           'pass float32=True')
    for y, dy in zip(outputs, gradients, strict=True):
        if not y.requires_grad:
            raise RuntimeError(f'backward: a tensor of shape {y.shape} needs no gradient: nothing that led to it was made '
                               'with requires_grad=True, or it was made within no_grad()')
        if dy is None:
            if y.size != 1:
                raise RuntimeError(f'backward: a tensor of shape {y.shape} is not a scalar; pass its gradient, or sum it first')
            dy = Tensor(ndarray.ones(*y.kind))
        else:
            dy = dy if isinstance(dy, Tensor) else Tensor(dy, device=y.device)
            if dy.shape != y.shape:
                raise ValueError(f'backward: the gradient of a tensor of shape {y.shape} has shape {dy.shape}')
            if not walk.create_graph:
                dy = Tensor(dy.array.copy())        # it may be a .grad, to which backward adds
        walk.add(_parent(y), dy if walk.create_graph else dy.array)


def backward(outputs, gradients, create_graph=False, retain_graph=None):
    """Add the gradients of the outputs, started with `gradients`, to the .grad of all leaves."""
    walk = _Backward(create_graph, create_graph if retain_graph is None else retain_graph, accumulate=True)
    _start(walk, outputs, gradients)
    walk.run()
    taken = set()
    for gradient, ours, leaf in walk.leaves.values():
        if create_graph:
            leaf.grad = gradient
        elif leaf.grad is None or leaf.grad.array is not gradient:
            leaf.grad = _result(gradient if ours else _own(gradient, taken), None)


def _own(gradient, taken):
    """Return a compact gradient with memory of its own: x and y in x + y get the same array.  taken: ids of Buffers in use."""
    if id(gradient.buffer) in taken or not gradient.is_compact():
        gradient = gradient.copy()
    taken.add(id(gradient.buffer))
    return gradient


def grad(outputs, inputs, grad_outputs=None, create_graph=False, retain_graph=None, allow_unused=False):
    """Return the gradients of the inputs, leaves or not, as a tuple of Tensors.  No .grad changes.

    inputs: a Tensor or several.  grad_outputs: the gradient of each output; None: 1, for a scalar.
    create_graph, retain_graph: see Tensor.backward.
    allow_unused: return None for an input that the outputs do not depend on, instead of raising RuntimeError.
    """
    outputs, inputs = ([x] if isinstance(x, Tensor) else list(x) for x in (outputs, inputs))
    if grad_outputs is None or isinstance(grad_outputs, Tensor):
        grad_outputs = [grad_outputs] * len(outputs)
    for i, x in enumerate(inputs):
        if not x.requires_grad and _mode.interpreter is None:
            raise RuntimeError(f'grad: input {i} of shape {x.shape} needs no gradient: make it with requires_grad=True')
    parents = [_parent(x) for x in inputs]
    captured = dict.fromkeys(p for p in parents if type(p) is tuple)
    relevant = _relevant([_parent(y) for y in outputs], {id(p) for p in parents if type(p) is not tuple}, captured)
    walk = _Backward(create_graph, create_graph if retain_graph is None else retain_graph, False, relevant)
    walk.captured = captured
    _start(walk, outputs, grad_outputs)
    walk.run()
    found = [captured[p] if type(p) is tuple else walk.leaves.get(id(p), [None])[0] for p in parents]
    for i, (gradient, x) in enumerate(zip(found, inputs, strict=True)):
        if gradient is None and not allow_unused:
            raise RuntimeError(f'grad: the outputs do not depend on input {i} of shape {x.shape}; '
                               'allow_unused=True gives None for it')
    taken = set()
    return tuple(g if g is None or create_graph else _result(_own(g, taken), None) for g in found)


def _relevant(parents, leaves, captured):
    """Return the leaves, and the nodes reachable from `parents` on a path to a leaf or to an output in `captured`."""
    nodes, todo = set(), [p[0] for p in parents if type(p) is tuple]
    while todo:
        node = todo.pop()
        if node not in nodes:
            nodes.add(node)
            todo.extend(p[0] for p in node.parents or () if type(p) is tuple)
    relevant = set(leaves)
    for node in sorted(nodes, key=lambda node: node.number):        # inputs come before results
        # A freed node is relevant: visiting it must raise.
        if node.parents is None or any(p in captured or p[0] in relevant if type(p) is tuple else id(p) in relevant
                                       for p in node.parents):
            relevant.add(node)
    return relevant


# ---- the tensor --------------------------------------------------------------------------------------------------------

def _as_array(data, device=None):
    """Convert numbers to an NDArray: floats to float32, integers to int32, bools to a mask."""
    if isinstance(data, Tensor):
        data = data.array
    if isinstance(data, NDArray):
        if device is not None and data.device != device:
            raise TypeError(f'device: expected {device}, got an array on {data.device}; convert it with .numpy()')
        return data
    data = np.asarray(data)
    if data.dtype.kind not in 'fiub':
        raise TypeError(f'data: expected real numbers, got {data.dtype}')
    return ndarray.array(data, {'f': np.float32, 'b': None}.get(data.dtype.kind, np.int32), device)


def constant(array):
    """Wrap an NDArray in a Tensor without a copy or a check."""
    return _result(array, None)


def _result(array, origin):
    """Create the Tensor of an op's output."""
    tensor = Tensor.__new__(Tensor)
    tensor.array, tensor.origin, tensor.requires_grad, tensor._grad = array, origin, origin is not None, None
    return tensor


def gradient_for(tensor, value):
    """Convert value (a Tensor, an array or a list) to a gradient of `tensor`.  ValueError for another shape or dtype."""
    if not isinstance(value, Tensor):
        value = Tensor(value if isinstance(value, NDArray) else np.asarray(value, np.float32), device=tensor.device)
    if value.shape != tensor.shape or value.dtype != np.float32:
        raise ValueError(f'grad: expected shape {tensor.shape} and float32, got {value.shape} and {value.dtype}')
    return value


def _remade(array, requires_grad, grad):
    tensor = Tensor(array, requires_grad)
    tensor.grad = grad
    return tensor


class Tensor:
    """An NDArray that takes part in automatic differentiation.

    data            an NDArray, whose memory is shared, or numbers in numpy arrays or lists, which are copied
    requires_grad   True makes it a leaf: backward() adds the gradient to its .grad, a Tensor or None

    .array          the NDArray
    .origin         (node, index of its output) of the op that produced it; None for a leaf
    Names are PyTorch's; axes are called `axis` and `keepdims` as in numpy, which PyTorch accepts too.
    """
    __slots__ = ('array', 'origin', 'requires_grad', '_grad', '__weakref__')
    __array_ufunc__ = None          # makes numpy array + Tensor call Tensor.__radd__
    tape = staticmethod(apply)      # for formulas that run with or without a tape (pyops/ops/array.py)

    def __init__(self, data, requires_grad=False, device=None):
        self.array, self.origin, self.requires_grad, self._grad = _as_array(data, device), None, False, None
        self.requires_grad_(requires_grad)

    # -- properties and conversions

    shape = property(lambda self: self.array.shape)
    ndim = property(lambda self: self.array.ndim)
    size = property(lambda self: self.array.size)
    dtype = property(lambda self: self.array.dtype)
    device = property(lambda self: self.array.device)
    kind = property(lambda self: (self.array.shape, self.array.dtype, self.array.device))
    is_leaf = property(lambda self: self.origin is None)

    def __repr__(self):
        how = (f', op={self.origin[0].name}' if type(self.origin) is tuple else
               ', requires_grad=True' if self.requires_grad else '')
        return f'Tensor({np.array2string(self.array.numpy(), separator=", ", prefix="Tensor(")}{how})'

    def __len__(self):
        if not self.ndim:
            raise TypeError('len() of a 0-d tensor')
        return self.shape[0]

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __bool__(self):
        if self.size != 1:
            raise ValueError(f'the truth value of a tensor of shape {self.shape} is ambiguous: it has {self.size} elements; '
                             'use .max() for any of them, .min() for all')
        return bool(self.item())

    def __float__(self):
        return float(self.item())

    def __int__(self):
        return int(self.item())

    def __array__(self, dtype=None, copy=None):
        return np.array(self.array.numpy(), dtype, copy=copy)

    def __dlpack__(self, **how):
        return self.array.__dlpack__(**how)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __format__(self, how):
        return format(self.array, how) if how else str(self)

    def __reduce__(self):
        """Support deepcopy and pickle: the result is an independent leaf with its gradient."""
        if self.origin is not None:
            raise RuntimeError(f'a tensor of shape {self.shape} with a history cannot be copied or pickled; use detach()')
        return _remade, (self.array, self.requires_grad, self.grad)

    __hash__ = object.__hash__

    def numpy(self):
        """Return a numpy array over the same memory; the tape does not notice changes to it."""
        return self.array.numpy()

    def item(self):
        """Return the only element as a Python number.  Raises ValueError for several elements."""
        if self.size != 1:
            raise ValueError(f'item: expected a tensor of one element, got shape {self.shape}')
        return self.array.numpy().item()

    def tolist(self):
        return self.array.numpy().tolist()

    # -- gradients

    def requires_grad_(self, requires_grad=True):
        if requires_grad and self.dtype != np.float32:
            raise TypeError(f'requires_grad: expected a tensor of float32, got {self.dtype}: only real numbers have a gradient')
        if not requires_grad and self.origin is not None:
            raise RuntimeError('requires_grad can be switched off for leaves only; use detach()')
        self.requires_grad = requires_grad
        return self

    def detach(self):
        """Return a Tensor over the same memory without the history."""
        return _result(self.array, None)

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, value):
        """Replace the array by another of the same shape and dtype."""
        array = _as_array(value, self.device)
        if array.shape != self.shape or array.dtype != self.dtype:
            raise ValueError(f'data: expected shape {self.shape} and {self.dtype}, got {array.shape} and {array.dtype}')
        self.array = array

    def clone(self):
        """Return a copy through which gradients flow."""
        return apply(shapes.Copy, self)

    @property
    def grad(self):
        """The gradient accumulated by backward(): a Tensor, or None."""
        return self._grad

    @grad.setter
    def grad(self, value):
        self._grad = None if value is None else gradient_for(self, value)

    def zero_grad(self):
        self.grad = None

    def backward(self, grad=None, create_graph=False, retain_graph=None):
        """Add the gradient of this tensor with respect to each leaf it depends on to the leaf's .grad.

        grad            the gradient of this tensor; None: 1, for a scalar
        create_graph    record the gradients so that they can be differentiated again.  Prefer grad() for this: a .grad with
                        a history and its leaf keep each other alive
        retain_graph    keep the values saved by the ops for another backward; None: same as create_graph
        """
        backward([self], [grad], create_graph, retain_graph)

    # -- arithmetic

    def __neg__(self):
        return apply(elementwise.Negate, self)

    def __abs__(self):
        return apply(elementwise.Abs, self)

    abs = __abs__

    def exp(self):
        return apply(elementwise.Exp, self)

    def log(self):
        return apply(elementwise.Log, self)

    def sqrt(self):
        return apply(elementwise.Sqrt, self)

    def tanh(self):
        return apply(elementwise.Tanh, self)

    def sigmoid(self):
        return apply(elementwise.Sigmoid, self)

    def relu(self):
        return apply(ReLU, self)

    def maximum(self, other):
        return apply(elementwise.Maximum, self, _operand(self, other))

    def minimum(self, other):
        return apply(elementwise.Minimum, self, _operand(self, other))

    def matmul(self, other):
        return self @ other

    # -- reductions

    def sum(self, axis=None, keepdims=False):
        return apply(reductions.Sum, self, axis=axis, keepdims=keepdims)

    def mean(self, axis=None, keepdims=False):
        return apply(reductions.Mean, self, axis=axis, keepdims=keepdims)

    def max(self, axis=None, keepdims=False):
        return apply(reductions.Max, self, axis=axis, keepdims=keepdims)

    def min(self, axis=None, keepdims=False):
        return apply(reductions.Min, self, axis=axis, keepdims=keepdims)

    def argmax(self, axis=None, keepdims=False):
        """Return the index of the largest element, int32, without a gradient."""
        return _result(self.array.argmax(axis, keepdims=keepdims), None)

    def logsumexp(self, axis=None, keepdims=False):
        return apply(reductions.LogSumExp, self, axis=axis, keepdims=keepdims)

    def softmax(self, axis=-1):
        return apply(reductions.Softmax, self, axis=axis)

    def log_softmax(self, axis=-1):
        return apply(reductions.LogSoftmax, self, axis=axis)

    # -- shapes

    def reshape(self, *shape):
        return apply(shapes.Reshape, self, shape=_several(shape))

    view = reshape

    def flatten(self, start=0):
        """Merge all axes from `start` on into one."""
        return self.reshape(*self.shape[:start], math.prod(self.shape[start:]))

    def squeeze(self, axis):
        """Remove an axis of size 1."""
        axis, = normal_axes(axis, self.ndim)
        if self.shape[axis] != 1:
            raise ValueError(f'squeeze: axis {axis} of shape {self.shape} is not of size 1')
        return self.reshape(*self.shape[:axis], *self.shape[axis + 1:])

    def unsqueeze(self, axis):
        """Insert an axis of size 1 at position `axis`."""
        axis, = normal_axes(axis, self.ndim + 1)
        return self.reshape(*self.shape[:axis], 1, *self.shape[axis:])

    def permute(self, *axes):
        return apply(shapes.Permute, self, axes=_several(axes))

    def transpose(self, a, b):
        """Exchange two axes."""
        (a,), (b,), axes = normal_axes(a, self.ndim), normal_axes(b, self.ndim), list(range(self.ndim))
        axes[a], axes[b] = b, a
        return self.permute(*axes)

    @property
    def T(self):
        return self.permute(*reversed(range(self.ndim)))

    def broadcast_to(self, *shape):
        return apply(shapes.BroadcastTo, self, shape=_several(shape))

    expand = broadcast_to

    def flip(self, *axes):
        """Reverse the order along these axes, given as numbers or one tuple; along all if none or None is given."""
        axes = None if axes in ((), (None,)) else _several(axes)
        return apply(shapes.Flip, self, axes=normal_axes(axes, self.ndim))

    def __getitem__(self, index):
        """Integers, slices, ... and None: a view.  A Tensor, array or list of integers: rows along the first axis.  A mask, or
        bools in the shape of the first axes: the elements where it is true."""
        if isinstance(index, (Tensor, NDArray, np.ndarray, list)):
            index = index.array if isinstance(index, Tensor) else index
            mask = ndarray.mask_in(index)
            if mask is None:
                return apply(shapes.Take, self, _as_array(index, self.device))
            ids = ndarray.selected(mask, self.shape)
            rows = self if mask.ndim == 1 else self.reshape(mask.size, *self.shape[mask.ndim:])
            return apply(shapes.Take, rows, _as_array(ids, self.device))
        return apply(shapes.GetItem, self, index=index)

    # -- in place

    def __setitem__(self, index, value):
        value = _operand(self, value)
        self._change(lambda: apply(shapes.SetItem, self, value, index=index),
                     lambda array: array.__setitem__(index, getattr(value, 'array', value)), value)

    def _change(self, recorded, in_place, value):
        """Change this tensor in its memory if nothing is recorded; else replace it by the result of an op, so that values
        saved by earlier ops do not change."""
        if _mode.interpreter is None and (
                not _mode.grad or not (self.requires_grad or isinstance(value, Tensor) and value.requires_grad)):
            in_place(self.array)
            return self
        if self.origin is None and self.requires_grad:
            raise RuntimeError(f'in-place change of a leaf of shape {self.shape} that requires a gradient; use no_grad()')
        result = recorded()
        if result.shape != self.shape:
            raise ValueError(f'in-place: a tensor of shape {self.shape} cannot become one of shape {result.shape}')
        self.array, self.origin, self.requires_grad = result.array, result.origin, result.requires_grad
        return self


def _several(values):
    """Accept both f(1, 2) and f((1, 2))."""
    return tuple(values[0]) if len(values) == 1 and not isinstance(values[0], numbers.Integral) else values


def _operand(tensor, other):
    """Return an operand: a Tensor or a number unchanged, an array as a constant, else NotImplemented."""
    if isinstance(other, (Tensor, numbers.Real)):
        return other
    if isinstance(other, (NDArray, np.ndarray, np.generic, list)):
        return Tensor(other, device=tensor.device)
    return NotImplemented


def _operators():
    """Define a + b, 1 + b, a += b and the comparisons for all operators."""
    def binary(op):
        def method(self, other):
            other = _operand(self, other)
            return other if other is NotImplemented else apply(op, self, other)

        def reflected(self, other):
            other = _operand(self, other)
            return other if other is NotImplemented else apply(op, other, self)
        return method, reflected

    def in_place(op, operator):
        def method(self, other):
            other = _operand(self, other)
            if other is NotImplemented:
                return other
            return self._change(lambda: apply(op, self, other),
                                lambda array: operator(array, getattr(other, 'array', other)), other)
        return method

    def comparison(operator):
        def method(self, other):
            other = _operand(self, other)
            if other is NotImplemented:
                return other
            if _mode.interpreter is not None:
                return _mode.interpreter(operator, (self, other), {})
            return _result(operator(self.array, getattr(other, 'array', other)), None)
        return method

    for name, op in (('add', elementwise.Add), ('sub', elementwise.Subtract), ('mul', elementwise.Multiply),
                     ('truediv', elementwise.Divide), ('pow', elementwise.Power), ('matmul', matmul.MatMul)):
        method, reflected = binary(op)
        setattr(Tensor, f'__{name}__', method)
        setattr(Tensor, f'__r{name}__', reflected)
        if op is not matmul.MatMul:
            setattr(Tensor, f'__i{name}__', in_place(op, getattr(operators, f'i{name}')))
    for name in ('eq', 'ne', 'lt', 'le', 'gt', 'ge'):
        setattr(Tensor, f'__{name}__', comparison(getattr(operators, name)))


_operators()
