"""Backward: visit the recorded nodes from the last to the first, and add up gradients.

Nodes are numbered in order of creation, so an op has a larger number than everything it depends on, and backward visits the
nodes from the largest number to the smallest.
"""
from __future__ import annotations

import functools
import heapq
import inspect
from typing import TYPE_CHECKING, Any

import numpy as np

from pyops import backend, ndarray
from pyops.autograd.mode import mode
from pyops.autograd.tape import KernelCall, Recorded, as_array, as_ndarray, has_nan, kernel_array, parent_of, wrap
from pyops.backend import state
from pyops.backend.arrays import row_major
from pyops.backend.host import HOST
from pyops.ndarray import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyops.autograd import Tensor
    from pyops.autograd.tape import Node, Parent, RecordedForward
    from pyops.backend.device import Device
    from pyops.typing import Shape


class _Backward:
    """One traversal of the tape.

    create_graph    gradients are Tensors, and operations on them are recorded; else they are NDArrays
    accumulate      the gradient of a leaf starts from its current .grad
    relevant        the ids of the requested leaves and the nodes on paths to them; None: everything is relevant
    """

    def __init__(self, create_graph: bool, retain_graph: bool, accumulate: bool, relevant: set[Any] | None = None) -> None:
        self.create_graph, self.retain_graph, self.accumulate, self.relevant = create_graph, retain_graph, accumulate, relevant
        # id of a leaf -> slot [gradient so far, whether it may be added to in place, the leaf]
        self.leaves: dict[int, list[Any]] = {}
        self.nodes: dict[Node, list[list[Any]]] = {}        # node -> one slot [gradient so far, whether ...] per output
        self.heap: list[tuple[int, Node]] = []              # (-number, node) of the nodes still to visit
        self.captured: dict[Any, Any] = {}  # (node, output) -> gradient, for requested tensors that are not leaves

    def slot(self, parent: Any) -> list[Any]:
        """Return the slot in which the gradient of a leaf or of a node's output is accumulated."""
        if type(parent) is tuple:
            node, output = parent
            slots = self.nodes.get(node)
            if slots is None:
                slots = self.nodes[node] = [[None, False]]
                for _ in node.outputs[1:]:
                    slots.append([None, False])
                heapq.heappush(self.heap, (-node.number, node))
            return slots[output]
        slot = self.leaves.get(id(parent))
        if slot is None:
            slot = self.leaves[id(parent)] = [None, False, parent]
            if self.accumulate and parent.grad is not None and not getattr(parent, '_hooks', None):
                slot[0] = parent.grad if self.create_graph else parent.grad.array
                slot[1] = not self.create_graph and slot[0].is_compact()
        return slot

    def add(self, parent: Parent | None, gradient: Any) -> None:
        """Add a gradient to a leaf or a node's output."""
        slot = self.slot(parent)
        if slot[0] is None:
            slot[0] = gradient
        elif slot[1]:
            slot[0] += gradient
        else:
            slot[0], slot[1] = slot[0] + gradient, not self.create_graph

    def sum_of(self, parent: Any) -> NDArray:
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

    def wanted(self, parent: Parent | None) -> bool:
        """Return whether the gradient of an input is needed."""
        if self.relevant is None or parent is None:
            return parent is not None
        if type(parent) is tuple:
            return parent[0] in self.relevant or parent in self.captured
        return id(parent) in self.relevant

    def run(self) -> None:
        before, mode.grad = mode.grad, self.create_graph
        try:
            while self.heap:
                _, node = heapq.heappop(self.heap)
                slots = self.nodes.pop(node)
                if node.hooks or self.captured:
                    self.notify(node, slots)
                if self.relevant is None or node in self.relevant:
                    node.check()
                    if node.op.__class__ is not KernelCall:
                        self.array_op(node, [slot[0] for slot in slots])
                    elif node.call is None or self.create_graph or not self.recorded_op(node, node.call, slots[0][0]):
                        self.kernel_op(node, slots[0][0])
                    if not self.retain_graph:
                        node.free()
        finally:
            mode.grad = before

    def notify(self, node: Node, slots: list[list[Any]]) -> None:
        """Call the hooks of the outputs of a node with their gradients, which are complete, and note those that grad() asked
        for."""
        for i, slot in enumerate(slots):
            if node.hooks and slot[0] is not None:
                slot[0] = self.hooked(node.hooks.get(i), slot[0])
            if self.captured and (node, i) in self.captured:
                self.captured[node, i] = slot[0]

    def hooked(self, hooks: dict[int, Any] | None, gradient: Any) -> Any:
        """Return the gradient after all hooks: each gets it as a Tensor, and may return another one of the same shape."""
        for hook in list((hooks or {}).values()):
            given = gradient if self.create_graph else wrap(gradient, None)
            result = hook(given)
            if result is not None:
                if not isinstance(result, Recorded) or result.shape != given.shape or result.dtype != given.dtype:
                    raise TypeError(f'register_hook: the hook must return None or a Tensor of shape {given.shape} and '
                                    f'{given.dtype}, got {getattr(result, "shape", type(result).__name__)}')
                gradient = result if self.create_graph else result.array
        return gradient

    def array_op(self, node: Node, dys: list[Any]) -> None:
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

    def pass_on(self, node: Node, gradients: Any, wanted: list[bool]) -> None:
        """Add the gradients of a node's inputs to their parents."""
        if not isinstance(gradients, (tuple, list)):
            gradients = (gradients,)
        for parent, gradient, needed in zip(node.parents, gradients, wanted, strict=False):     # ids come last and have none
            if needed and gradient is not None:
                shape, dtype, _ = parent[0].outputs[parent[1]] if type(parent) is tuple else parent.kind
                if gradient.shape != shape:
                    raise RuntimeError(f'{node.name}: its backward returned a gradient of shape {gradient.shape} '
                                       f'for an input of shape {shape}')
                if mode.anomaly and has_nan(gradient):
                    raise RuntimeError(f'detect_anomaly: {node.name}: its backward computed a gradient with a NaN for an input '
                                       f'of shape {shape}; the gradient of its output has none')
                # float64, if another input has it
                self.add(parent, gradient if gradient.dtype is dtype else gradient.astype(dtype))

    def kernel_op(self, node: Node, dy: Any) -> None:
        """Run the backward of a kernel op, which adds to the gradients of its parameters itself."""
        kernel, parents = node.op, node.parents
        wanted = [*map(self.wanted, parents)] if self.relevant is not None else [p is not None for p in parents]
        device, n = node.outputs[0][2], len(parents) - len(kernel.parameters)
        if self.create_graph:
            self.pass_on(node, self.derivatives(node, dy, device, n), wanted)
            return
        wants_dx = True in wanted[:n]
        op, sums = kernel.one, []
        if kernel.parameters:
            leaves = parents[n:]
            if self.adds_to_entries(kernel, leaves):
                sums = [leaf.grad.array for leaf in leaves]
            else:
                sums = [self.sum_of(parent) if needed else ndarray.zeros(value.shape, device=device)
                        for parent, needed, (_, _, value) in zip(leaves, wanted[n:], kernel.parameters, strict=True)]
                op = kernel.make([device.kernel_array(d) for d in sums])
        options = {} if wants_dx or not _skips_dx(type(op)) else {'want_dx': False}      # type: ignore[arg-type]
        if not dy.is_compact():
            dy = dy.copy()
        given = kernel_array(dy, device)
        if node.is_scalar:
            given = given.reshape(1)
        ctx = node.ctx if node.call is None else type(node.ctx)(*[kernel_array(x, device) for x in node.ctx])
        if device is state.device:
            gradients = op.backward(given, ctx, **options)
        else:
            with backend.on(device):
                gradients = op.backward(given, ctx, **options)
        for d in sums:
            d.buffer.version += 1
        if mode.anomaly:
            for d, (_, name, _) in zip(sums, kernel.parameters, strict=True):
                if has_nan(d):
                    raise RuntimeError(f'detect_anomaly: {node.name}: its backward computed a gradient with a NaN for {name} '
                                       f'of shape {d.shape}; the gradient of its output has none')
        if not wants_dx:
            return
        known, arrays = {id(given): dy}, []         # Residual returns dy itself, twice: keep them identical
        for gradient, needed in zip(gradients if type(gradients) is tuple else (gradients,), wanted, strict=False):
            if needed and gradient is not None and id(gradient) not in known:
                known[id(gradient)] = as_ndarray(gradient, device)
            arrays.append(known.get(id(gradient)))
        self.pass_on(node, arrays, wanted)

    def recorded_op(self, node: Node, call: RecordedForward, dy: NDArray) -> bool:
        """Run the backward of a kernel op whose forward was recorded: one call runs its kernels.  Return whether it ran; else
        the op itself has to, as for a gradient in other memory, gradients of parameters elsewhere, and while a plan records."""
        kernel, ctx, parents = node.op, node.ctx, node.parents
        n = len(parents) - len(kernel.parameters)
        leaves = parents[n:]
        if (dy.buffer.device is not HOST or state.hooked_thread is not None or state.device is not HOST or mode.anomaly
                or dy.dtype is not node.outputs[0][1] or dy.strides != row_major(dy.shape)
                or (leaves and not self.adds_to_entries(kernel, leaves))):
            return False
        wants_dx = False
        for parent in parents[:n]:
            wants_dx = wants_dx or parent is not None and (self.relevant is None or self.wanted(parent))
        skips_dx = not wants_dx and _skips_dx(type(kernel.one))         # type: ignore[arg-type]
        launches = call.backwards.get(skips_dx) or call.backward(kernel.one, ctx, skips_dx)
        if launches is None:
            return False
        pointers = []
        try:
            for x in (dy, *ctx):
                pointers.append(x.buffer.pointer + x.offset)
        except TypeError:               # the pointer of freed memory is None
            return False
        new = launches.run(NDArray, pointers)
        if new is None:
            return False
        for leaf in leaves:
            leaf.grad.array.buffer.version += 1
        if wants_dx:
            for parent, i in zip(parents, launches.results, strict=False):
                if i is not None and parent is not None and (self.relevant is None or self.wanted(parent)):
                    self.add(parent, new[i])
        return True

    def adds_to_entries(self, kernel: KernelCall, leaves: list[Any]) -> bool:
        """Return whether backward may add to the gradients of the entries of a kernel op: they are the .grad of all its
        parameters, each is wanted, and no hook waits for it."""
        if kernel.entries is None or not self.accumulate or self.relevant is not None:
            return False
        for leaf, entry in zip(leaves, kernel.entries, strict=True):
            if leaf is None or leaf.entry is not entry or not leaf.requires_grad or getattr(leaf, '_hooks', None):
                return False
        return True

    def derivatives(self, node: Node, dy: Any, device: Device, n: int) -> list[Any]:
        """Return the gradients of the n inputs and the parameters of a kernel op, computed with recorded array ops."""
        kernel = node.op
        if getattr(kernel.op, 'backward_on_tensors', None) is None:
            raise RuntimeError(f'{node.name}: has no second derivative: its gradient is computed by a kernel; '
                               'use array ops (@, +, exp, sum ...) for a function that needs create_graph')

        def tensor(array: Any) -> Any:
            """Wrap an array of ctx, with its history if it is an input or the output."""
            if not backend.is_array(array) or array.dtype not in (np.float32, np.int32):
                return array
            i = node.arrays.index(id(array)) if id(array) in node.arrays else None
            return wrap(as_ndarray(array, device), None if i is None else (node, 0) if i == n else node.parents[i])
        parameters = {argument: wrap(as_ndarray(value, device), parent)
                      for (argument, _, value), parent in zip(kernel.parameters, node.parents[n:], strict=True)}
        op = kernel.make([value for _, _, value in kernel.parameters])
        inputs, gradients = op.backward_on_tensors(dy, type(node.ctx)(*map(tensor, node.ctx)), parameters)
        return [*inputs, *[None] * (n - len(inputs)), *(gradients[argument] for argument in parameters)]

    def tensor(self, node: Node, array: NDArray) -> Tensor:
        """Wrap an array of ctx as a Tensor with its history, for second derivatives."""
        try:
            i = node.arrays.index(id(array))
        except ValueError:
            return wrap(array, None)
        n = len(node.parents)
        return wrap(array, node.parents[i] if i < n else (node, i - n))

    def zeros(self, output: tuple[Shape, np.dtype, Device]) -> NDArray | Tensor:
        """Return the gradient of an output that was not used: zeros."""
        array = ndarray.zeros(*output)
        return wrap(array, None) if self.create_graph else array


@functools.cache
def _skips_dx(op: Any) -> bool:
    """Return whether the op's backward can skip computing dx."""
    return 'want_dx' in inspect.signature(op.backward).parameters


@functools.cache
def _asks_what_is_wanted(op: Any) -> bool:
    return 'wanted' in inspect.signature(op.backward).parameters


def _start(walk: _Backward, outputs: Sequence[Tensor], gradients: Sequence[Any]) -> None:
    """Set the gradients of the outputs."""
    if mode.interpreter is not None:
        raise RuntimeError('gradcheck: the function computes gradients itself, which is not supported in float64; '
                           'pass float32=True')
    for y, dy in zip(outputs, gradients, strict=True):
        if not y.requires_grad:
            raise RuntimeError(f'backward: a tensor of shape {y.shape} needs no gradient: nothing that led to it was made '
                               'with requires_grad=True, or it was made within no_grad()')
        if dy is None:
            if y.size != 1:
                raise RuntimeError(f'backward: a tensor of shape {y.shape} is not a scalar; pass its gradient, or sum it first')
            one = ndarray.ones(*y.kind)
            walk.add(parent_of(y), wrap(one, None) if walk.create_graph else one)
        else:
            dy = dy if isinstance(dy, Recorded) else wrap(as_array(dy, y.device, y.dtype), None)
            if dy.shape != y.shape:
                raise ValueError(f'backward: the gradient of a tensor of shape {y.shape} has shape {dy.shape}')
            if not walk.create_graph:
                dy = wrap(dy.array.copy(), None)    # it may be a .grad, to which backward adds
            walk.add(parent_of(y), dy if walk.create_graph else dy.array)


def backward(tensors: Tensor | Sequence[Tensor], grad_tensors: Any = None, retain_graph: bool | None = None,
             create_graph: bool = False, inputs: Tensor | Sequence[Tensor] | None = None) -> None:
    """Add the gradients of tensors with respect to each leaf they depend on to the leaf's .grad.

    grad_tensors    the gradient of each tensor; None: 1, for a scalar
    retain_graph    keep the values saved by the ops for another backward; None: same as create_graph
    create_graph    record the gradients so that they can be differentiated again.  Prefer grad() for this: a .grad with a
                    history and its leaf keep each other alive
    inputs          the only leaves to get a gradient; None: all
    """
    outputs: list[Tensor] = [tensors] if isinstance(tensors, Recorded) else list(tensors)
    given = [grad_tensors] if grad_tensors is None or isinstance(tensors, Recorded) else list(grad_tensors)
    gradients = given * len(outputs) if grad_tensors is None else given
    if len(gradients) != len(outputs):
        raise ValueError(f'backward: expected a gradient for each of {len(outputs)} tensors, got {len(gradients)}')
    relevant = None
    if inputs is not None:
        leaves = [inputs] if isinstance(inputs, Recorded) else list(inputs)
        for x in leaves:
            if x.origin is not None or not x.requires_grad:
                raise ValueError(f'backward: inputs: expected leaves that require a gradient, got a tensor of shape {x.shape}; '
                                 'use grad()')
        relevant = _relevant([parent_of(y) for y in outputs], set(map(id, leaves)), {})
    walk = _Backward(create_graph, create_graph if retain_graph is None else retain_graph, accumulate=True, relevant=relevant)
    _start(walk, outputs, gradients)
    walk.run()
    taken: set[int] = set()
    for gradient, ours, leaf in walk.leaves.values():
        if hooks := getattr(leaf, '_hooks', None):
            gradient = walk.hooked(hooks, gradient)
            new = gradient if create_graph else wrap(_own(gradient, taken), None)
            leaf.grad = new if leaf.grad is None else leaf.grad + new
        elif create_graph:
            leaf.grad = gradient
        elif leaf.grad is None or leaf.grad.array is not gradient:
            leaf.grad = wrap(gradient if ours else _own(gradient, taken), None)


def _own(gradient: NDArray, taken: set[int]) -> NDArray:
    """Return a compact gradient with memory of its own: x and y in x + y get the same array.  taken: ids of Buffers in use."""
    if id(gradient.buffer) in taken or not gradient.is_compact():
        gradient = gradient.copy()
    taken.add(id(gradient.buffer))
    return gradient


def grad(outputs: Tensor | Sequence[Tensor], inputs: Tensor | Sequence[Tensor], grad_outputs: Any = None,
         retain_graph: bool | None = None, create_graph: bool = False, allow_unused: bool | None = None,
         materialize_grads: bool = False) -> tuple[Tensor, ...]:
    """Return the gradients of the inputs, leaves or not, as a tuple of Tensors.  No .grad changes.

    inputs: a Tensor or several.  grad_outputs: the gradient of each output; None: 1, for a scalar.
    retain_graph, create_graph: see backward.
    allow_unused: return None for an input that the outputs do not depend on, instead of raising RuntimeError.
    materialize_grads: return zeros for it.
    """
    if isinstance(outputs, Recorded) and not isinstance(grad_outputs, list | tuple):
        grad_outputs = [grad_outputs]
    outputs, inputs = ([x] if isinstance(x, Recorded) else list(x) for x in (outputs, inputs))
    if grad_outputs is None or isinstance(grad_outputs, Recorded):
        grad_outputs = [grad_outputs] * len(outputs)
    for i, x in enumerate(inputs):
        if not x.requires_grad and mode.interpreter is None:
            raise RuntimeError(f'grad: input {i} of shape {x.shape} needs no gradient: make it with requires_grad=True')
    parents = [parent_of(x) for x in inputs]
    captured = dict.fromkeys(p for p in parents if type(p) is tuple)
    relevant = _relevant([parent_of(y) for y in outputs], {id(p) for p in parents if type(p) is not tuple}, captured)
    walk = _Backward(create_graph, create_graph if retain_graph is None else retain_graph, False, relevant)
    walk.captured = captured
    _start(walk, outputs, grad_outputs)
    walk.run()
    found = [captured[p] if type(p) is tuple else walk.leaves.get(id(p), [None])[0] for p in parents]
    found = [g if g is None or type(p) is tuple else walk.hooked(getattr(p, '_hooks', None), g)
             for p, g in zip(parents, found, strict=True)]
    for i, (gradient, x) in enumerate(zip(found, inputs, strict=True)):
        if gradient is None and not (allow_unused or materialize_grads):
            raise RuntimeError(f'grad: the outputs do not depend on input {i} of shape {x.shape}; '
                               'allow_unused=True gives None for it')
    taken: set[int] = set()
    if materialize_grads:
        found = [(wrap(zeros, None) if create_graph else zeros) if g is None else g for g, zeros in (
            (g, ndarray.zeros(x.shape, x.dtype, x.device)) for g, x in zip(found, inputs, strict=True))]
    return tuple(g if g is None or create_graph else wrap(_own(g, taken), None) for g in found)    # type: ignore[misc]


def _relevant(parents: list[Parent | None], leaves: set[int], captured: dict[Any, Any]) -> set[Any]:
    """Return the leaves, and the nodes reachable from `parents` on a path to a leaf or to an output in `captured`."""
    nodes, todo = set(), [p[0] for p in parents if type(p) is tuple]
    while todo:
        node = todo.pop()
        if node not in nodes:
            nodes.add(node)
            todo.extend(p[0] for p in node.parents or () if type(p) is tuple)
    relevant: set[Any] = set(leaves)
    for node in sorted(nodes, key=lambda node: node.number):        # inputs come before results
        # A freed node is relevant: visiting it must raise.
        if node.parents is None or any(p in captured or p[0] in relevant if type(p) is tuple else id(p) in relevant
                                       for p in node.parents):
            relevant.add(node)
    return relevant
