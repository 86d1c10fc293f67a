"""The plan of a training step: every kernel launch as an action that can be read, replayed, timed and drawn.

    with Plan(model.params, batch=batch, lr=optimizer.lr) as plan:      # run once by hand-written code, and recorded
        loss, ctx = model.forward(...)
        plan.boundary()
        model.backward(ctx)
        optimizer.step()
    plan.run()                                                          # again, without the Python of the ops

What a kernel gets by value (sizes, the share of dropout) is fixed when it is recorded.  Whatever changes from step to
step (the batch, the learning rate, the step count, the gradient norm) is an array, which replayed kernels read anew:
there is no way to record its value.

Arrays that ops ask for while the plan records lie in blocks of the plan.  When the last reference to an array goes,
its block is handed out again, so the plan's memory is what a step needs at its widest point.
"""
import bisect
import contextlib
import json
import math
import re
import time
from typing import NamedTuple

import numpy as np

from pyops import backend
from pyops.backend import kernels, library, location
from pyops.backend.device import Buffer

_GRADIENT = re.compile(r'\.d[a-z]+\d?$')     # what ops call the gradients they make


_LAYOUT = ('shape', 'strides')      # what kernels on strided arrays call their arrays of sizes, which are in host memory


_recording = []     # the plan that records now, if any


def boundary():
    """Say, in a step that may be recorded, that its forward pass ends here."""
    if _recording:
        _recording[-1].boundary()


class Tensor(NamedTuple):
    """An array that actions name.  base: the Tensor it is a view of, or None."""
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    kind: str           # 'parameter', 'gradient', 'moment', 'input' (given by name), 'intermediate', 'scratch'
    base: 'Tensor | None' = None

    @property
    def nbytes(self):
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self):
        kind = '' if self.dtype == np.float32 else self.dtype.name.upper()
        return f'Tensor{f"({kind})" if kind else ""}({self.name}){_shape(self.shape)}'


def _shape(shape):
    return f'({", ".join(map(str, shape))})'


class Part(NamedTuple):
    """A parameter, or a part of one with contiguous memory."""
    tensor: Tensor          # the parameter
    offset: int             # of the part, in elements
    shape: tuple[int, ...]

    @property
    def is_whole(self):
        return math.prod(self.shape) == math.prod(self.tensor.shape)


class Note(NamedTuple):
    """What an op says about a launch: see backend.note_product."""
    op: str
    product: kernels.Product
    layer: str
    weight: Part | None
    bias: Part | None
    rows: tuple[int, ...] | None
    steps: bool
    heads: int


class Action(NamedTuple):
    """One launch: kernel pyops_<kernel> with values as the header orders them, and the Tensors of those that are arrays."""
    kernel: str
    values: tuple
    tensors: dict[str, Tensor]      # by the header's name of the argument
    once: bool = False              # done when it was recorded, and not again
    notes: tuple[Note, ...] = ()

    @property
    def scalars(self):
        """The arguments that are numbers, by name, and those that say how arrays lie: tuples of numbers."""
        arguments = library.cpu().functions['pyops_' + self.kernel].arguments
        return {a.name: tuple(v.tolist()) if a.name in _LAYOUT else v for a, v in zip(arguments, self.values, strict=False)
                if not a.pointer or a.name in _LAYOUT}

    def split(self):
        """-> inputs, outputs, scratch: dicts of Tensors by argument name."""
        arguments = {a.name: a for a in library.cpu().functions['pyops_' + self.kernel].arguments}
        inputs = {name: t for name, t in self.tensors.items() if arguments[name].const}
        outputs = {name: t for name, t in self.tensors.items() if not arguments[name].const and name != 'work'}
        return inputs, outputs, {name: t for name, t in self.tensors.items() if name == 'work'}

    def __str__(self):
        inputs, outputs, _ = self.split()
        sides = [', '.join(f'{name} {tensor}' for name, tensor in side.items()) for side in (inputs, outputs)]
        sizes = ' '.join(f'{name}={value:g}' if isinstance(value, float) else
                         f'{name}={_shape(value)}' if isinstance(value, tuple) else f'{name}={int(value)}'
                         for name, value in self.scalars.items())
        title = ''.join(word.capitalize() for word in self.kernel.split('_'))
        return f'{"[once]" if self.once else ""}{title}Action: {sides[0]}{" " if sides[0] else ""}-> {sides[1]}  [{sizes}]'


class Memory(NamedTuple):
    """Bytes.  peak is all of a step: parameters, gradients, moments, named inputs and the plan's own blocks."""
    parameters: int
    gradients: int
    moments: int
    inputs: int
    intermediates: int      # blocks of the plan
    saved_by_reuse: int     # what more they would be if every array had a block of its own
    peak: int

    def __str__(self):
        return '\n'.join(f'{name.replace("_", " "):15} {value:>14,} bytes' for name, value in self._asdict().items())


class Plan:
    """Records what is launched inside its `with` block and replays it.

    params: the pyops.params.Parameters of the step, for names and the account of memory.
    run: whether kernels run while they are recorded, or from the first run() on.
    inputs: other arrays that live longer than a step, by the names they shall have.
    """

    def __init__(self, params=None, /, *, run=True, **inputs):
        self._runs_while_recorded, self._place = run, backend.place()
        self.actions, self.replayed = [], []    # all; those that a replay runs, once it is recorded
        self.params, self.inputs = params, inputs
        self.initial = []                       # lines about what was done once before
        self._boundary = None                   # how many actions are forward
        self._once = False
        self._named = {}                        # address -> Tensor, of arrays that outlive the step
        self._regions = []                      # (start, end, Tensor) of the same, and of the parts that have names
        self._parts = []
        self._blocks, self._starts = [], []     # all memory of the plan in the order of its addresses, and these
        self._free = []                         # the part that no array holds
        self._live = {}                         # address -> Tensor of arrays handed out
        self._asked = 0                         # bytes handed out, reuse or not
        self._closed = False
        self._written = {}                      # of _writes
        self._know(params, inputs)

    def _know(self, params, inputs):
        if params is not None:
            for flat, suffix, kind in ((params.values, '', 'parameter'), (params.grads, '_grad', 'gradient'),
                                       (params.m, '_adam_m', 'moment'), (params.v, '_adam_v', 'moment')):
                whole = Tensor({'': 'parameters'}.get(suffix, 'all' + suffix), flat.shape, flat.dtype, kind)
                self._regions.append((location(flat), location(flat) + flat.nbytes, whole))
                for name in params:
                    part = params.view(flat, name)
                    tensor = Tensor(name + suffix, part.shape, part.dtype, kind)
                    self._named[location(part), part.shape] = tensor
                    self._parts.append((location(part), location(part) + part.nbytes, tensor))
            if params.touched is not None:
                self._know_touched(params)
            self.initial = [f'[once]InitAction: {self._named[location(params[name].value), params[name].value.shape]} '
                            f'= {params.initial(name)}' for name in params]
        for name, array in inputs.items():
            start = location(array)
            self._regions.append((start, start + array.nbytes, Tensor(name, array.shape, array.dtype, 'input')))

    def _know_touched(self, params):
        """What says which blocks of sparse gradients are not 0; it counts as one of them."""
        flat = params.touched
        whole = Tensor('touched', flat.shape, flat.dtype, 'gradient')
        self._regions.append((location(flat), location(flat) + flat.nbytes, whole))
        for name in params:
            part = params[name].touched
            if part is not None:
                self._named[location(part), part.shape] = Tensor(f'{name}_touched', part.shape, part.dtype, 'gradient')

    # ---- recording ---------------------------------------------------------------------------------

    def __enter__(self):
        if self.actions:
            raise RuntimeError('a plan records once; make another one')
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(backend.hooks(self._allocate, self._record, self._note))
        _recording.append(self)
        return self

    def __exit__(self, *error):
        _recording.remove(self)
        self._stack.close()
        if error[0] is None:
            self._compile()

    def boundary(self):
        """Say that the forward pass ends here."""
        self._boundary = len(self.actions)

    @contextlib.contextmanager
    def once(self):
        """What is launched inside is done now and left out when the plan runs again."""
        self._once = True
        try:
            yield
        finally:
            self._once = False

    def _allocate(self, shape, dtype, name):
        shape = (shape,) if isinstance(shape, int | np.integer) else tuple(int(n) for n in shape)
        nbytes = -(-max(math.prod(shape) * np.dtype(dtype).itemsize, 1) // backend.ALIGN) * backend.ALIGN
        self._asked += nbytes
        # the smallest free block that fits, unless most of it would lie idle
        fits = [block for block in self._free if nbytes <= block.nbytes <= 2 * nbytes]
        if fits:
            block = min(fits, key=lambda b: b.nbytes)
            self._free = [b for b in self._free if b is not block]
        else:
            block = self._place.block(nbytes)
            place = bisect.bisect(self._starts, _start(block))
            self._starts.insert(place, _start(block))
            self._blocks.insert(place, block)
        kind = 'scratch' if name == 'work' else 'gradient' if _GRADIENT.search(name) else 'intermediate'
        self._live[_start(block)] = Tensor(name, shape, np.dtype(dtype), kind)
        # what is computed once must outlive the step
        return self._place.lease(block, shape, dtype, None if self._once else self._give_back)

    def _give_back(self, block):
        self._live.pop(_start(block), None)
        self._free.append(block)

    def _record(self, kernel, values):
        arguments = library.cpu().functions['pyops_' + kernel].arguments
        tensors = {a.name: self._tensor(v, f'{kernel}.{a.name}') for a, v in zip(arguments, values, strict=False)
                   if a.pointer and v is not None and a.name not in _LAYOUT}
        self.actions.append(Action(kernel, tuple(self._keep(v) for v in values), tensors, self._once))
        return self._runs_while_recorded or self._once

    def _note(self, op, product, layer, weight=None, bias=None, rows=None, steps=False, heads=0):
        weight, bias = (one if one is None else self._part(one) for one in (weight, bias))
        note = Note(op.name, product, layer, weight, bias, rows, steps, heads)
        self.actions[-1] = self.actions[-1]._replace(notes=(*self.actions[-1].notes, note))

    def _part(self, parameter):
        """A Parameter, or an array in the memory of one, as a Part; None for any other array."""
        array = backend.plain(getattr(parameter, 'value', parameter))
        start = location(array)
        for low, high, tensor in self._parts:
            if low <= start < high and tensor.kind == 'parameter':
                return Part(tensor, (start - low) // tensor.dtype.itemsize, array.shape)
        return None

    def _keep(self, value):
        """An action keeps arrays that are not the plan's alive; it must not do that with the plan's, or no block would
        ever be free again."""
        if not backend.is_array(value):
            return value
        block = self._block_of(value)
        return value if block is None else _Place(block, location(value), backend.byte_strides(value))

    def _block_of(self, array):
        start = location(array)
        place = bisect.bisect(self._starts, start) - 1
        if place >= 0 and start < self._starts[place] + self._blocks[place].nbytes:
            return self._blocks[place]
        return None

    def _tensor(self, array, fallback):
        start, shape = location(array), array.shape
        if (start, shape) in self._named:
            return self._named[start, shape]
        base = None
        block = self._block_of(array)
        if block is not None:
            base = self._live[_start(block)]
        else:
            inside = [tensor for low, high, tensor in self._regions if low <= start < high and tensor.shape == shape]
            inside += [tensor for low, high, tensor in self._parts + self._regions if low <= start < high]
            base = inside[0] if inside else None
        if base is None:
            return Tensor(fallback, shape, array.dtype, 'input')
        if base.shape == shape:
            return base
        return Tensor(f'{base.name}_view', shape, array.dtype, base.kind, base)

    # ---- running -----------------------------------------------------------------------------------

    def _compile(self):
        """Lay the calls out as pyops_replay wants them."""
        self.replayed = [action for action in self.actions if not action.once]
        self._calls = self._place.calls([(action.kernel, [_address(v) for v in action.values]) for action in self.replayed])

    def run(self, first=0, last=None):
        """Do the step again.  ValueError names the action that a kernel refused; RuntimeError after close().

        On a GPU the step is only told to it: what is read from it waits.
        """
        if self._closed:
            raise RuntimeError('this plan was closed and its memory given back; record another one')
        self._calls.run(first, last)

    def feed(self, **arrays):
        """Copy arrays into the inputs of those names.  TypeError for another kind of numbers, ValueError for another shape,
        which needs a plan of its own."""
        for name, array in arrays.items():
            place = self.inputs[name]
            array = array if backend.is_array(array) else np.asarray(array)
            if not np.can_cast(array.dtype, place.dtype, 'same_kind'):
                raise TypeError(f'{name}: want {place.dtype}, got {array.dtype}')
            if array.shape != place.shape:
                raise ValueError(f'{name}: this plan was recorded with shape {place.shape}, got {array.shape}; '
                                 'record another plan for that shape')
            place[...] = array.astype(place.dtype, copy=False) if isinstance(array, np.ndarray) else array

    def check(self):
        """Run action by action; FloatingPointError names the first whose result is not finite."""
        for i, action in enumerate(self.replayed):
            self.run(first=i, last=i + 1)
            for argument, tensor in action.split()[1].items():
                if tensor.dtype == np.float32 and not np.isfinite(backend.get(self.argument(action, argument))).all():
                    raise FloatingPointError(f'action {i}, {action}: {argument} is not finite')

    def close(self):
        """Give the memory back; the plan cannot run any more."""
        self._closed = True
        self.actions, self.replayed, self._blocks, self._starts, self._free = [], [], [], [], []
        self._written = {}
        self._calls.close()

    @property
    def forward(self):
        """How many of the replayed actions stand before the boundary; None where there is none."""
        return None if self._boundary is None else len([a for a in self.actions[:self._boundary] if not a.once])

    def argument(self, action, name):
        """The array that an action's argument stands for, None where it is NULL."""
        names = [a.name for a in library.cpu().functions[f'pyops_{action.kernel}'].arguments]
        value = action.values[names.index(name)]
        if not isinstance(value, _Place):
            return value
        tensor = action.tensors[name]
        return self._place.view(value.block, value.address, tensor.shape, tensor.dtype, value.strides)

    def part(self, part, gradient=False):
        """The array of a Part, or that of its gradient: in the parameter's own shape where it is the whole of it."""
        parameter = self.params[part.tensor.name]
        array = parameter.grad if gradient else parameter.value
        if part.is_whole:
            return array
        return array.reshape(-1)[part.offset:part.offset + math.prod(part.shape)].reshape(part.shape)

    def writer(self, number, argument):
        """The number of the last replayed action before `number` that wrote to the allocation behind this argument of it;
        None where that is older than the step."""
        tensor = self.replayed[number].tensors[argument]
        tensor = tensor.base or tensor      # each allocation has a Tensor of its own, also where it gets the memory of another
        return next((i for i in range(number - 1, -1, -1) if any(written is tensor for written, *_ in self._writes(i))), None)

    def last_write(self, part):
        """The number of the replayed action that completes the gradient of a Part; None where there is none.

        Kernels that take all gradients as one array count where a note says that they compute some: others fill or clip."""
        array = self.part(part, gradient=True)
        low, high = location(array), location(array) + array.nbytes
        for i in range(len(self.replayed) - 1, -1, -1):
            for tensor, start, end in self._writes(i):
                is_of_all = any(tensor is region for *_, region in self._regions)
                if start < high and low < end and (self.replayed[i].notes or not is_of_all):
                    return i
        return None

    def _writes(self, number):
        """-> (Tensor of the allocation, first address, end) of each array that a replayed action writes to."""
        if number not in self._written:
            action, found = self.replayed[number], []
            for name, tensor in action.split()[1].items():
                start = location(self.argument(action, name))
                found.append((tensor.base or tensor, start, start + tensor.nbytes))
            self._written[number] = found
        return self._written[number]

    def undeclared(self):
        """-> lines about actions on parameters, or on their gradients, of which nobody says what they compute."""
        known = {id(tensor) for *_, tensor in self._parts} | {
            id(tensor) for *_, tensor in self._regions if tensor.kind in ('parameter', 'gradient')}
        found = []
        for i, action in enumerate(self.actions):
            names = [tensor.name for tensor in action.tensors.values() if id(tensor.base or tensor) in known]
            kernel = kernels.KERNELS.get(action.kernel)
            if names and kernel is None:
                found.append(f'action {i}, {action.kernel}: takes {names[0]}, and the kernel is not declared; the module that '
                             'launches it must: pyops.backend.kernels.declare')
            elif names and kernel.flops and not action.notes:
                found.append(f'action {i}, {action.kernel}: takes {names[0]}, and its product is not declared; the op must '
                             'call note_product behind the launch')
        return found

    # ---- what it can tell ----------------------------------------------------------------------------

    def tensors(self):
        """All Tensors of the actions, in the order of their first use; gradients and views among them."""
        seen = {}
        for action in self.actions:
            for tensor in action.tensors.values():
                for one in (tensor.base, tensor):
                    if one is not None:
                        seen.setdefault((one.name, one.shape), one)
        return list(seen.values())

    def __str__(self):
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

    def listing(self):
        """The actions alone."""
        lines = ['Actions:', *self.initial]
        for i, action in enumerate(self.actions):
            if i == self._boundary:
                lines.append('============= BoundaryAction: boundary action =============')
            lines.append(str(action))
        return '\n'.join(lines)

    def summary(self):
        """Return one line: the number of kernels in each part of the step, and its peak memory.  The update begins after the
        last kernel that writes a gradient."""
        replayed, forward = self.replayed, self.forward
        count = f'{len(replayed)} kernel' + 's' * (len(replayed) != 1)
        if forward is not None:
            last = max((i for i, action in enumerate(replayed, 1)
                        if any(tensor.kind == 'gradient' for tensor in action.split()[1].values())), default=forward)
            update = max(last, forward)
            count += f' ({forward} forward, {update - forward} backward, {len(replayed) - update} update)'
        return f'step : {count}, peak memory {self.memory().peak / 2**20:.1f} MiB'

    def memory(self):
        """-> Memory: what the step needs."""
        kinds = {kind: 0 for kind in ('parameter', 'gradient', 'moment', 'input')}
        for start, end, tensor in self._regions:
            kinds[tensor.kind] += end - start
        blocks = sum(block.nbytes for block in self._blocks)
        return Memory(kinds['parameter'], kinds['gradient'], kinds['moment'], kinds['input'], blocks,
                      self._asked - blocks, sum(kinds.values()) + blocks)

    def profile(self, runs=20):
        """Run the plan `runs` times and measure every action -> pyops.profile.Profile."""
        from pyops.profile import Profile
        self.run()                                  # warm
        times, whole = [], []
        for _ in range(runs):
            times.append(self._calls.time())
            self.run()                              # on a GPU, the first of these is captured
            self._place.synchronize()
            start = time.perf_counter()
            self.run()
            self._place.synchronize()
            whole.append(time.perf_counter() - start)
        return Profile(self.replayed, np.array(times), np.array(whole), self.argument, self._place)

    def dot(self, path):
        """Write the plan as a Graphviz graph: actions are boxes, tensors ellipses, the boundary a dashed line of boxes."""
        from pyops.errors import UserError
        lines = ['digraph plan {', '  rankdir=TB; node [fontname="Helvetica", fontsize=10];']
        tensors = {(t.name, t.shape): f't{i}' for i, t in enumerate(self.tensors())}
        kinds = {(t.name, t.shape): t.kind for t in self.tensors()}
        colours = dict(parameter='#cfe2ff', gradient='#ffd9cc', moment='#e8e8e8', input='#d9f2d9', scratch='#ffffff',
                       intermediate='#fff6cc')
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


class Steps:
    """Calls step(rows) -> arrays by a plan for each number of rows, recorded when the first such batch comes.

    rows (B,) int64 says which samples are the batch; params and inputs as for Plan.  The arrays that a step returns are
    the same objects at every replay, with new content.
    """

    def __init__(self, step, params, /, **inputs):
        self._step, self._params, self._inputs, self.plans = step, params, inputs, {}

    def __call__(self, rows):
        plan, results = self.plans.get(len(rows)) or self._record(len(rows))
        plan.inputs['rows'][...] = rows
        plan.run()
        return results

    def plan(self, rows):
        """The plan of a step on these rows, ready to run; nothing is run."""
        plan, _ = self.plans.get(len(rows)) or self._record(len(rows))
        plan.inputs['rows'][...] = rows
        return plan

    def _record(self, size):
        rows = backend.zeros(size, np.int64)
        with Plan(self._params, run=False, rows=rows, **self._inputs) as plan:
            results = self._step(rows)
        self.plans[size] = plan, results
        return plan, results


def before_training(args, plan):
    """Return the text about a step that is printed before training: a summary, with -v all its actions, with --quiet none."""
    if args.listing == 'kernels':
        return plan.listing()
    if args.listing == 'summary':
        return f'{plan.summary()}\n-v lists its kernels; --plan, --profile and --dot describe it instead of training'


def tell(args, plan):
    """Print and write the descriptions of a step that the flags of pyops.training.add_plan_flags ask for."""
    if args.plan:
        print(plan)
        print(plan.memory())
    if args.profile is not None:
        profile = plan.profile()
        import shutil  # not above: it takes milliseconds, which a training run of mnist would notice
        print(profile.table(shutil.get_terminal_size().columns))        # 80 if it is no terminal
        if args.profile:
            profile.trace(args.profile)
            print(f'trace written : {args.profile}')
    if args.dot is not None:
        plan.dot(args.dot)
        print(f'graph written : {args.dot} (draw it: dot -Tsvg {args.dot} -o plan.svg)')


class _Place(NamedTuple):
    """Where an array of the plan lay: its block, which it keeps, its address, and its strides in bytes."""
    block: object
    address: int
    strides: tuple[int, ...]


def _address(value):
    """A value of an action as a number: arrays as their address."""
    if value is None:
        return 0
    if isinstance(value, _Place):
        return value.address
    if isinstance(value, library.cpu().ffi.CData):
        return int(library.cpu().ffi.cast('intptr_t', value))
    return location(value) if backend.is_array(value) else value


def _start(block):
    return block.address if isinstance(block, Buffer) else location(block)
