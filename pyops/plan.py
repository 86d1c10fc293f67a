"""The plan of a training step: a list of kernel launches (actions) that can be replayed, timed, printed and drawn.

    with Plan(model.params, batch=batch, lr=optimizer.rate) as plan:      # run the step once and record it
        loss, ctx = model.forward(...)
        plan.boundary()
        model.backward(ctx)
        optimizer.step()
    plan.run()                                                          # replay it without the Python code of the ops

Scalar kernel arguments (sizes, the dropout probability) are fixed when they are recorded.  Everything that changes from
step to step (the batch, the learning rate, the step count, the gradient norm) is an array, which kernels read at every
replay: its value cannot be recorded.

Arrays that ops allocate while the plan records are in blocks owned by the plan.  When the last reference to an array is
dropped, its block is reused, so the plan's memory is the peak that one step needs.
"""
from __future__ import annotations

import bisect
import contextlib
import functools
import json
import math
import operator
import os
import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from pyops import backend, distributed
from pyops.backend import kernels, library, location
from pyops.backend.calls import Queued
from pyops.profile import Profile, write_trace

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator

    from pyops.params import Parameters
    from pyops.typing import Array, PathLike

_NBYTES = operator.attrgetter('nbytes')
_LAYOUT = ('shape', 'strides')      # size arguments of strided kernels, whose arrays are in host memory


_recording = []     # a stack: the last plan records


def boundary() -> None:
    """Mark the end of the forward pass of a step.  Does nothing unless a plan records in this thread."""
    if _recording and backend.is_recorded():
        _recording[-1].boundary()


class PlanTensor(NamedTuple):
    """An array used by actions.  base: the PlanTensor it is a view of, or None."""
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    kind: str           # 'parameter', 'gradient', 'moment', 'input' (given by name), 'mapped' (an input that is a mapped file,
                        # which takes no memory of the process), 'intermediate', 'scratch'
    base: PlanTensor | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        kind = '' if self.dtype == np.float32 else backend.dtype_name(self.dtype).upper()
        return f'Tensor{f"({kind})" if kind else ""}({self.name}){_shape(self.shape)}'


def _shape(shape):
    return f'({", ".join(map(str, shape))})'


class Part(NamedTuple):
    """A parameter, or a part of one with contiguous memory."""
    tensor: PlanTensor      # the parameter
    offset: int             # of the part, in elements
    shape: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        return math.prod(self.shape) == math.prod(self.tensor.shape)


class Note(NamedTuple):
    """The facts that an op passes to backend.note_product about a launch."""
    op: str
    product: kernels.Product
    layer: str
    weight: Part | None
    bias: Part | None
    rows: tuple[int, ...] | None
    steps: bool
    heads: int


class Action(NamedTuple):
    """One launch of pyops_<kernel>: all argument values in the header's order, and the PlanTensors of the array arguments."""
    kernel: str
    values: tuple
    tensors: dict[str, PlanTensor]  # by argument name, as in the header
    once: bool = False              # ran when it was recorded; not replayed
    notes: tuple[Note, ...] = ()

    @property
    def scalars(self) -> dict[str, Any]:
        """The scalar arguments by name, with the shapes and strides of strided kernels as tuples."""
        arguments = library.cpu().functions['pyops_' + self.kernel].arguments
        return {a.name: tuple(v.tolist()) if a.name in _LAYOUT else v for a, v in zip(arguments, self.values, strict=False)
                if not a.pointer or a.name in _LAYOUT}

    def split(self) -> tuple[dict[str, PlanTensor], dict[str, PlanTensor], dict[str, PlanTensor]]:
        """Return inputs, outputs and scratch: dicts of PlanTensors by argument name."""
        arguments = {a.name: a for a in library.cpu().functions['pyops_' + self.kernel].arguments}
        inputs = {name: t for name, t in self.tensors.items() if arguments[name].const}
        outputs = {name: t for name, t in self.tensors.items() if not arguments[name].const and name != 'work'}
        return inputs, outputs, {name: t for name, t in self.tensors.items() if name == 'work'}

    def __str__(self) -> str:
        sizes = ' '.join(f'{name}={value:g}' if isinstance(value, float) else
                         f'{name}={_shape(value)}' if isinstance(value, tuple) else f'{name}={int(value)}'
                         for name, value in self.scalars.items())
        return _line(self, f'[{sizes}]')


class HostAction(NamedTuple):
    """A Python function between the kernels of a step (backend.call), such as a sum over ranks; with the interface of an
    Action."""
    kernel: str                     # the name of the function
    function: Callable[[], Any]
    inputs: dict[str, PlanTensor]
    outputs: dict[str, PlanTensor]
    arrays: dict[str, Array]        # the inputs and outputs
    once: bool = False
    notes: tuple[Note, ...] = ()

    @property
    def tensors(self) -> dict[str, PlanTensor]:
        return self.inputs | self.outputs

    @property
    def scalars(self) -> dict[str, Any]:
        return {}

    def split(self) -> tuple[dict[str, PlanTensor], dict[str, PlanTensor], dict[str, PlanTensor]]:
        """Return inputs, outputs and scratch, as Action.split does."""
        return self.inputs, self.outputs, {}

    def __str__(self) -> str:
        return _line(self, '[on a second stream]' if isinstance(self.function, Queued) else '[on the host]')


def _line(action, sizes):
    """Return the line of a listing about an action."""
    inputs, outputs, _ = action.split()
    sides = [', '.join(f'{name} {tensor}' for name, tensor in side.items()) for side in (inputs, outputs)]
    title = ''.join(word.capitalize() for word in action.kernel.split('_'))
    return f'{"[once]" if action.once else ""}{title}Action: {sides[0]}{" " if sides[0] else ""}-> {sides[1]}  {sizes}'


class MemoryUse(NamedTuple):
    """Memory of a step in bytes.  peak: parameters, gradients, moments, named inputs and the plan's own blocks together."""
    parameters: int
    gradients: int
    moments: int
    inputs: int
    intermediates: int      # blocks of the plan
    saved_by_reuse: int     # additional bytes if every array had its own block
    peak: int

    def __str__(self) -> str:
        return '\n'.join(f'{name.replace("_", " "):15} {value:>14,} bytes' for name, value in self._asdict().items())

    def line(self) -> str:
        """Return a line with the bytes of tensors that outlive a step, of intermediate tensors and of gradients."""
        return (f'allocated : {self.parameters + self.moments + self.inputs} bytes for tensors, {self.intermediates} for '
                f'intermediate and {self.gradients} for gradient tensors')


class Plan:
    """Records the launches inside its `with` block, and replays them.

    params: the pyops.params.Parameters of the step, for names and the memory summary.
    run: run kernels while recording; False: run nothing until run() is called.
    inputs: other arrays that outlive a step, by name.
    """

    def __init__(self, params: Parameters | None = None, /, *, run: bool = True, **inputs: Array) -> None:
        self._runs_while_recorded, self._device = run, backend.current_device()
        self.actions, self.replayed = [], []    # all actions; after recording, the ones that run() replays
        self.params, self.inputs = params, inputs
        self.initial = []                       # descriptions of the parameter initialisation
        self._boundary = None                   # number of forward actions
        self._once = False
        # Weak: an array among the results of a step would otherwise keep the plan, and the plan the array, for ever.
        give_back = weakref.WeakMethod(self._give_back)
        self._returned = lambda block: (give_back() or _ignore)(block)
        self._named = {}                        # (address, shape) -> PlanTensor, for arrays that outlive the step
        self._regions = []                      # (start, end, PlanTensor) of the buffers that outlive the step
        self._parts = []                        # the same for the named parts of those buffers
        self._blocks, self._starts = [], []     # memory blocks of the plan and their addresses, both sorted by address
        self._free = []                         # blocks that no array uses
        self._live = {}                         # block address -> PlanTensor of the array that uses it
        self._allocated = []                    # the block of each allocation, in order
        self._asked = 0                         # bytes allocated, counting reused blocks every time
        self._closed = False
        self._written = {}                      # of _writes
        self._writers: dict[int, list[int]] | None = None       # of writer
        self._spans = None                      # of _last_write
        self._know(params, inputs)

    def _know(self, params, inputs):
        if params is not None:
            for flat, suffix, kind in ((params.values, '', 'parameter'), (params.grads, '_grad', 'gradient'),
                                       (params.m, '_adam_m', 'moment'), (params.v, '_adam_v', 'moment')):
                whole = PlanTensor({'': 'parameters'}.get(suffix, 'all' + suffix), flat.shape, flat.dtype, kind)
                self._regions.append((location(flat), location(flat) + flat.nbytes, whole))
                if flat.size != params.values.size:         # the moments of a share
                    continue
                self._know_parts(params, flat, suffix, kind)
            if params.touched is not None:
                self._know_touched(params)
            if params.rounded is not None:
                self._know_rounded(params)
            self.initial = [f'[once]InitAction: {self._named[location(params[name].value), params[name].value.shape]} '
                            f'= {params.initial(name)}' for name in params]
        for name, array in inputs.items():
            start = location(array)
            kind = 'mapped' if isinstance(array, np.memmap) else 'input'
            self._regions.append((start, start + array.nbytes, PlanTensor(name, array.shape, array.dtype, kind)))

    def _know_parts(self, params, flat, suffix, kind):
        """Name the parts of a flat buffer that belong to the parameters."""
        first, item = location(flat), flat.dtype.itemsize
        for name, (start, shape) in params.places():
            low, tensor = first + item * start, PlanTensor(name + suffix, tuple(shape), flat.dtype, kind)
            self._named[low, tensor.shape] = tensor
            self._parts.append((low, low + tensor.nbytes, tensor))

    def _know_touched(self, params):
        """Name the `touched` words of sparse gradients; they count as gradients."""
        flat = params.touched
        whole = PlanTensor('touched', flat.shape, flat.dtype, 'gradient')
        self._regions.append((location(flat), location(flat) + flat.nbytes, whole))
        for name in params:
            part = params[name].touched
            if part is not None:
                self._named[location(part), part.shape] = PlanTensor(f'{name}_touched', part.shape, part.dtype, 'gradient')

    def _know_rounded(self, params):
        """Name the bfloat16 copies of the parameters; they count as parameters."""
        flat = params.rounded
        whole = PlanTensor('parameters_rounded', flat.shape, flat.dtype, 'parameter')
        self._regions.append((location(flat), location(flat) + flat.nbytes, whole))
        self._know_parts(params, flat, '_rounded', 'parameter')

    # ---- recording ---------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self.actions:
            raise RuntimeError('a plan records only once; create another one')
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(backend.hooks(self._allocate, self._record, self._note, self._call))
        _recording.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _recording.remove(self)
        self._stack.close()
        if error[0] is None:
            self._compile()

    def boundary(self) -> None:
        """Mark the end of the forward pass."""
        self._boundary = len(self.actions)

    @contextlib.contextmanager
    def once(self) -> Iterator[None]:
        """Inside the block, launches run now and are not replayed."""
        self._once = True
        try:
            yield
        finally:
            self._once = False

    def _allocate(self, shape, dtype, name, kind):
        shape = (shape,) if isinstance(shape, int | np.integer) else tuple(int(n) for n in shape)
        dtype = np.dtype(dtype)
        nbytes = -(-max(math.prod(shape) * dtype.itemsize, 1) // backend.ALIGN) * backend.ALIGN
        self._asked += nbytes
        # Best fit; a block more than twice as large stays free for a larger array.
        fits = [block for block in self._free if nbytes <= block.nbytes <= 2 * nbytes]
        if fits:
            block = min(fits, key=_NBYTES)
            self._free.remove(block)
        else:
            block = self._device.block(nbytes)
            i = bisect.bisect(self._starts, block.address)
            self._starts.insert(i, block.address)
            self._blocks.insert(i, block)
        self._live[block.address] = PlanTensor(name, shape, dtype, kind)
        self._allocated.append(block)
        # no reuse for an array computed once: it must outlive the step
        return self._device.lease(block, shape, dtype, None if self._once else self._returned)

    @contextlib.contextmanager
    def again(self) -> Iterator[list[tuple[str, list[int | float]]]]:
        """Inside the block, run the step again with other sizes: each allocation gets the block that it got in the recording,
        and kernels do not run.  Yields a list to which each launch is appended as (kernel, values), arrays as addresses.

        ValueError if an array is larger than its block, or if the step makes more arrays than before.
        """
        blocks, calls = iter(self._allocated), []

        def allocate(shape, dtype, name, kind):
            shape = (shape,) if isinstance(shape, int | np.integer) else tuple(int(n) for n in shape)
            block = next(blocks, None)
            if block is None or math.prod(shape) * np.dtype(dtype).itemsize > block.nbytes:
                raise ValueError(f'{name} {shape}: the plan has no memory for this array: it was recorded with '
                                 f'{"fewer arrays" if block is None else "a smaller one"}')
            return self._device.lease(block, shape, dtype, None)

        def record(kernel, values):
            arguments = library.cpu().functions['pyops_' + kernel].arguments
            calls.append((kernel, [value.tolist() if a.name in _LAYOUT else _address(self._device, value) if a.pointer
                                   else value
                                   for a, value in zip(arguments, values, strict=False)]))
            return False

        def record_call(name):
            calls.append((name, []))
            return False

        with backend.hooks(allocate, record, lambda *_, **__: None, lambda name, *_: record_call(name)):
            yield calls

    def _give_back(self, block):
        self._live.pop(block.address, None)
        self._free.append(block)

    def _record(self, kernel, values):
        tensors, kept = {}, list(values)
        for i, name in _pointers(kernel):
            if kept[i] is not None:
                tensors[name], kept[i] = self._argument(kept[i], kernel, name)
        self.actions.append(Action(kernel, tuple(kept), tensors, self._once))
        return self._runs_while_recorded or self._once

    def _call(self, name, function, inputs, outputs):
        tensors = [{key: self._argument(array, name, key)[0] for key, array in side.items()} for side in (inputs, outputs)]
        self.actions.append(HostAction(name, function, *tensors, inputs | outputs, self._once))
        return self._runs_while_recorded or self._once

    def _note(self, op, product, layer, weight=None, bias=None, rows=None, steps=False, heads=0):
        weight, bias = (one if one is None else self._part(one) for one in (weight, bias))
        note = Note(op.name, product, layer, weight, bias, rows, steps, heads)
        self.actions[-1] = self.actions[-1]._replace(notes=(*self.actions[-1].notes, note))

    def _part(self, parameter):
        """Return the Part for a Parameter, or for an array in the memory of one; None for any other array."""
        array = backend.as_kernel_array(getattr(parameter, 'value', parameter))
        start = location(array)
        for low, high, tensor in self._parts:
            if low <= start < high and tensor.kind == 'parameter':
                return Part(tensor, (start - low) // tensor.dtype.itemsize, array.shape)
        return None

    def _argument(self, array, kernel, name):
        """Return the PlanTensor of an argument, and the form in which an action holds it: a _Reference for an array of the
        plan, since a reference to the array would keep its block from being reused; any other array itself."""
        start, shape = location(array), array.shape
        i = bisect.bisect(self._starts, start) - 1
        if i >= 0 and start < self._starts[i] + self._blocks[i].nbytes:
            block = self._blocks[i]
            base = self._live[block.address]
            tensor = base if base.shape == shape else PlanTensor(f'{base.name}_view', shape, array.dtype, base.kind, base)
            return tensor, _Reference(block, start, backend.byte_strides(array), array.dtype)
        tensor = self._named.get((start, shape)) or self._part_of_a_region(array, start)
        return tensor or PlanTensor(f'{kernel}.{name}', shape, array.dtype, 'input'), array

    def _part_of_a_region(self, array, start):
        """Return the PlanTensor of an array in a buffer that outlives the step; None if it is in none."""
        shape = array.shape
        owners = [tensor for low, high, tensor in self._regions if low <= start < high]
        inside = [tensor for tensor in owners if tensor.shape == shape]
        joined = self._joined(start, start + array.nbytes)
        if joined and not inside:
            return PlanTensor(joined[0], shape, array.dtype, joined[1].kind, joined[1])
        inside = inside or [tensor for low, high, tensor in self._parts if low <= start < high] or owners
        if not inside or inside[0].shape == shape:
            return inside[0] if inside else None
        return PlanTensor(f'{inside[0].name}_view', shape, array.dtype, inside[0].kind, inside[0])

    def _joined(self, start, end):
        """Return (name, PlanTensor of the region) if a memory range consists of several adjacent parameters or gradients: their
        names, without the common beginning of the later ones."""
        parts = [part for part in self._parts if part[0] < end and start < part[1]]
        if len(parts) < 2 or parts[0][0] != start or parts[-1][1] != end:
            return None
        common = os.path.commonprefix([tensor.name for *_, tensor in parts])
        owner = common[:common.rfind('.') + 1]
        names = '+'.join(tensor.name.removeprefix(owner) if i else tensor.name for i, (*_, tensor) in enumerate(parts))
        return names, next(tensor for low, high, tensor in self._regions if low <= start < high)

    # ---- running -----------------------------------------------------------------------------------

    def _compile(self):
        """Convert the recorded calls to the layout that pyops_replay expects."""
        self.replayed = [action for action in self.actions if not action.once]
        self._calls = self._device.calls([
            (action.kernel, action.function if isinstance(action, HostAction) else
             [_address(self._device, v) for v in action.values]) for action in self.replayed])

    def run(self, first: int = 0, last: int | None = None, repeated: bool = False) -> None:
        """Replay the step, or actions first to last - 1.  Raises ValueError naming the action whose kernel refused its
        arguments, and RuntimeError after close().

        On a GPU the step is only enqueued; reading a result waits for it.   repeated: these actions will be replayed often, so
        that a GPU captures them as a graph, as it does the whole step
        """
        if self._closed:
            raise RuntimeError('this plan is closed and its memory freed; record another one')
        self._calls.run(first, last, repeated)

    def timed(self, first: int = 0, last: int | None = None) -> list[tuple[Action, float]]:
        """Replay actions first to last - 1, all by default, and return each with its seconds."""
        times = self._calls.time(first, last)
        return list(zip(self.replayed[first:last], times, strict=True))

    def feed(self, **arrays: Any) -> None:
        """Copy arrays into the inputs with these names.  Raises TypeError for a dtype that cannot be cast, and ValueError for
        another shape, which requires another plan."""
        for name, array in arrays.items():
            target = self.inputs[name]
            array = array if backend.is_array(array) else np.asarray(array)
            if not np.can_cast(array.dtype, target.dtype, 'same_kind'):
                raise TypeError(f'{name}: expected {target.dtype}, got {array.dtype}')
            if array.shape != target.shape:
                raise ValueError(f'{name}: this plan was recorded with shape {target.shape}, got {array.shape}; '
                                 'record another plan for that shape')
            target[...] = array.astype(target.dtype, copy=False) if isinstance(array, np.ndarray) else array

    def check(self) -> None:
        """Replay action by action.  Raises FloatingPointError naming the first action with a result that is not finite."""
        for i, action in enumerate(self.replayed):
            self.run(first=i, last=i + 1)
            for argument, tensor in action.split()[1].items():
                if tensor.dtype in backend.REAL and not np.isfinite(backend.get(self.argument(action, argument))).all():
                    raise FloatingPointError(f'action {i}, {action}: {argument} is not finite')

    def close(self) -> None:
        """Free the plan's memory.  run() raises afterwards."""
        self._closed = True
        self.actions, self.replayed, self._blocks, self._starts, self._free, self._allocated = [], [], [], [], [], []
        self._written, self._writers, self._spans = {}, None, None
        self._calls.close()

    @property
    def forward(self) -> int | None:
        """The number of replayed actions before the boundary; None without a boundary."""
        return None if self._boundary is None else len([a for a in self.actions[:self._boundary] if not a.once])

    def argument(self, action: Action, name: str) -> Any:
        """Return the array passed as an action's argument, None for NULL."""
        if isinstance(action, HostAction):
            return action.arrays[name]
        names = [a.name for a in library.cpu().functions[f'pyops_{action.kernel}'].arguments]
        value = action.values[names.index(name)]
        if not isinstance(value, _Reference):
            return value
        tensor = action.tensors[name]
        return self._device.view(value.block, value.address, tensor.shape, tensor.dtype, value.strides)

    def part(self, part: Part, gradient: bool = False) -> Any:
        """Return the array of a Part, or its gradient; in the parameter's own shape if the Part is the whole parameter."""
        parameter = self.params[part.tensor.name]
        array = parameter.grad if gradient else parameter.value
        if part.is_whole:
            return array
        return array.reshape(-1)[part.offset:part.offset + math.prod(part.shape)].reshape(part.shape)

    def writer(self, number: int, argument: str) -> int | None:
        """Return the number of the last replayed action before `number` that wrote to the allocation of this argument; None if
        that happened before the step."""
        tensor = self.replayed[number].tensors[argument]
        tensor = tensor.base or tensor      # each allocation has its own PlanTensor, also if it reuses memory
        if self._writers is None:
            self._writers = {}
            for i in range(len(self.replayed)):
                for written, *_ in self._writes(i):
                    self._writers.setdefault(id(written), []).append(i)
        writers = self._writers.get(id(tensor), [])
        place = bisect.bisect_left(writers, number)
        return writers[place - 1] if place else None

    def last_write(self, part: Part) -> int | None:
        """Return the number of the replayed action that completes the gradient of a Part; None if there is none.

        A kernel that takes all gradients as one array counts only if it has a note: the others fill or clip."""
        return self._last_write(self.part(part, gradient=True), declared=True)

    def last_write_to(self, array: Array) -> int | None:
        """Return the number of the last replayed action that writes to memory of an array; None if there is none."""
        return self._last_write(array)

    def _last_write(self, array, declared=False):
        if self._spans is None:             # (first address, end, number of the action, whether last_write counts it)
            of_all = {id(region) for *_, region in self._regions}
            spans = [(start, end, i, bool(action.notes) or id(tensor) not in of_all)
                     for i, action in enumerate(self.replayed) for tensor, start, end in self._writes(i)]
            self._spans = np.array(spans, np.int64).reshape(-1, 4).T
        starts, ends, numbers, counted = self._spans
        found = numbers[(starts < location(array) + array.nbytes) & (location(array) < ends) & (counted >= declared)]
        return int(found[-1]) if found.size else None

    def _writes(self, number):
        """Return (PlanTensor of the allocation, first address, end) of each array that a replayed action writes to."""
        if number not in self._written:
            action, found = self.replayed[number], []
            for name, tensor in action.split()[1].items():
                start = location(self.argument(action, name))
                found.append((tensor.base or tensor, start, start + tensor.nbytes))
            self._written[number] = found
        return self._written[number]

    def undeclared(self) -> list[str]:
        """Return a line for each action on a parameter or its gradient whose kernel or product is not declared."""
        known = {id(tensor) for *_, tensor in self._parts} | {
            id(tensor) for *_, tensor in self._regions if tensor.kind in ('parameter', 'gradient')}
        found = []
        for i, action in enumerate(self.actions):
            names = [tensor.name for tensor in action.tensors.values() if id(tensor.base or tensor) in known]
            kernel = kernels.KERNELS.get(action.kernel)
            if isinstance(action, HostAction):
                continue
            if names and kernel is None:
                found.append(f'action {i}, {action.kernel}: takes {names[0]}, and the kernel is not declared; the module that '
                             'launches it must: pyops.backend.kernels.declare')
            elif names and kernel.flops and not action.notes:
                found.append(f'action {i}, {action.kernel}: takes {names[0]}, and its product is not declared; the op must '
                             'call note_product after the launch')
        return found

    # ---- reports -------------------------------------------------------------------------------------

    def tensors(self) -> list[PlanTensor]:
        """Return all PlanTensors of the actions, with gradients and views, in order of first use."""
        seen = {}
        for action in self.actions:
            for tensor in action.tensors.values():
                for one in (tensor.base, tensor):
                    if one is not None:
                        seen.setdefault((one.name, one.shape), one)
        return list(seen.values())

    def __str__(self) -> str:
        tensors = self.tensors()
        is_gradient = [t.kind == 'gradient' for t in tensors]
        groups = {
            'Tensors': [t for t, g in zip(tensors, is_gradient, strict=True) if not g and t.base is None],
            'Tensor Views': [t for t in tensors if t.base is not None],
            'Grad Tensors': [t for t, g in zip(tensors, is_gradient, strict=True) if g and t.base is None],
        }
        lines = []
        for title, members in groups.items():
            lines += [f'{title}:', *(f'\t{tensor}' + (f' of {tensor.base}' if tensor.base else '') for tensor in members)]
        return '\n'.join([*lines, self.listing()])

    def listing(self, initial: bool = True) -> str:
        """Return the actions as text.   initial: begin with the initial values of the parameters"""
        lines = ['Actions:', *(self.initial if initial else [])]
        for i, action in enumerate(self.actions):
            if i == self._boundary:
                lines.append('============= BoundaryAction: boundary action =============')
            lines.append(str(action))
        return '\n'.join(lines)

    def summary(self) -> str:
        """Return one line: the number of kernels in forward, backward and update, and the peak memory.  The update starts
        after the last kernel that writes a gradient."""
        replayed, forward = self.replayed, self.forward
        count = f'{len(replayed)} kernel' + 's' * (len(replayed) != 1)
        if forward is not None:
            last = max((i for i, action in enumerate(replayed, 1)
                        if any(tensor.kind == 'gradient' for tensor in action.split()[1].values())), default=forward)
            update = max(last, forward)
            count += f' ({forward} forward, {update - forward} backward, {len(replayed) - update} update)'
        return f'step : {count}, peak memory {self.memory().peak / 2**20:.1f} MiB'

    def memory(self) -> MemoryUse:
        """Return the MemoryUse of the step."""
        kinds = {kind: 0 for kind in ('parameter', 'gradient', 'moment', 'input', 'mapped')}
        for start, end, tensor in self._regions:
            kinds[tensor.kind] += end - start
        blocks = sum(block.nbytes for block in self._blocks)
        return MemoryUse(kinds['parameter'], kinds['gradient'], kinds['moment'], kinds['input'], blocks,
                      self._asked - blocks, sum(kinds.values()) - kinds['mapped'] + blocks)

    def profile(self, runs: int = 20) -> Profile:
        """Run the plan `runs` times, timing every action, and return a pyops.profile.Profile."""
        self.run()                                  # warm up
        times, whole = [], []
        for _ in range(runs):
            times.append(self._calls.time())
            self.run()                              # on a GPU, the first of these is captured
            self._device.synchronize()
            start = time.perf_counter()
            self.run()
            self._device.synchronize()
            whole.append(time.perf_counter() - start)
        return Profile(self.replayed, np.array(times), np.array(whole), self.argument, self._device)

    def dot(self, path: PathLike) -> None:
        """Write the plan as a Graphviz graph: a box per action, an ellipse per tensor; backward boxes are rounded and shaded.

        Raises UserError if the file cannot be written.
        """
        from pyops.errors import UserError
        lines = ['digraph plan {', '  rankdir=TB; node [fontname="Helvetica", fontsize=10];']
        tensors = {(t.name, t.shape): f't{i}' for i, t in enumerate(self.tensors())}
        kinds = {(t.name, t.shape): t.kind for t in self.tensors()}
        colours = dict(parameter='#cfe2ff', gradient='#ffd9cc', moment='#e8e8e8', input='#d9f2d9', scratch='#ffffff',
                       intermediate='#fff6cc', mapped='#d9f2d9')
        for (name, shape), node in tensors.items():
            lines.append(f'  {node} [label={json.dumps(f"{name}{chr(10)}{_shape(shape)}")}, shape=ellipse, style=filled, '
                         f'fillcolor="{colours[kinds[name, shape]]}"];')
        for i, action in enumerate(self.actions):
            after = self._boundary is not None and i >= self._boundary
            lines.append(f'  a{i} [label={json.dumps(action.kernel)}, shape=box, style="filled{",rounded" if after else ""}", '
                         f'fillcolor="{"#f4f4f4" if after else "#ffffff"}"];')
            inputs, outputs, _ = action.split()
            lines += [f'  {tensors[t.name, t.shape]} -> a{i};' for t in inputs.values()]
            lines += [f'  a{i} -> {tensors[t.name, t.shape]};' for t in outputs.values()]
        try:
            with open(path, 'w') as file:
                file.write('\n'.join([*lines, '}', '']))
        except OSError as error:
            raise UserError(f'{path}: cannot write the graph ({error.strerror}); name another file') from error


UPDATE = 'After the parts of a batch:'       # the heading above the actions of `update`


def before_training(args: Namespace, plan: Plan, update: Plan | None = None) -> str | None:
    """Return the text printed before training: a summary of the step; with -v all its actions; with --quiet None.

    update: the actions after the parts of a batch, if `plan` is the step of a part
    """
    if args.listing == 'kernels':
        return '\n'.join([plan.listing(), *([UPDATE, update.listing(initial=False)] if update else [])])
    if args.listing == 'summary':
        return f'{plan.summary()}\n-v lists its kernels; --plan, --profile and --dot describe it instead of training'


def describe(args: Namespace, plan: Plan, update: Plan | None = None,
             timeline: Callable[[], list[dict[str, Any]]] | None = None) -> None:
    """Print and write the reports on a step that the flags of pyops.flags.add_plan_flags request.

    update: the actions after the parts of a batch, if `plan` is the step of a part
    timeline() returns the events of a whole step, for the trace; None: the actions of `plan`.  All ranks call this function,
    and rank 0 writes the files.
    """
    if args.plan:
        print(plan)
        print(plan.memory())
        if update:
            print(UPDATE, update.listing(initial=False), sep='\n')
    if args.profile is not None:
        import shutil  # not at the top: the import takes milliseconds
        columns = shutil.get_terminal_size().columns                    # 80 without a terminal
        events = timeline() if timeline and args.profile else None
        profile = plan.profile()
        print(profile.table(columns))
        if update:
            print(UPDATE, update.profile().table(columns), sep='\n')
        if args.profile:
            events = profile.events() if events is None else events
            if distributed.is_first():
                write_trace(args.profile, events)
            print(f'trace written : {args.profile}')
    if args.dot is not None:
        if distributed.is_first():
            plan.dot(args.dot)
        print(f'graph written : {args.dot} (draw it: dot -Tsvg {args.dot} -o plan.svg)')


class _Reference(NamedTuple):
    """A reference to an array of the plan: its block, which stays allocated, its address, strides in bytes, and dtype."""
    block: object
    address: int
    strides: tuple[int, ...]
    dtype: np.dtype


@functools.cache
def _pointers(kernel):
    """Return (number, name) of each argument of a kernel that is an array, except shapes, strides and the stream."""
    arguments = library.cpu().functions['pyops_' + kernel].arguments[:-1]
    return tuple([(i, a.name) for i, a in enumerate(arguments) if a.pointer and a.name not in _LAYOUT])


def _ignore(block):
    """Do nothing with the block of a plan that is gone."""


def _address(device, value):
    """Return a value of an action on a device as an integer: arrays as their address."""
    if type(value) is int or type(value) is float:          # the usual case
        return value
    if value is None:
        return 0
    if isinstance(value, _Reference):
        return device.tagged(value.address, value.dtype)
    return device.tagged(location(value), value.dtype) if backend.is_array(value) else value
