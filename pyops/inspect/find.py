"""Find the tensors of linear layers and attention in a plan.

Ops say which products their launches compute, and a plan keeps that as the Notes of its actions (backend.note_product).  So
all there is to do here is to read the notes: what each role is called in a dump, at which point of the plan its array can be
read, and how it was rounded.  Names of arrays play no part: they are for people.
"""
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from pyops import backend
from pyops.backend.kernels import Made
from pyops.inspect.writer import HEADER


class Tensor(NamedTuple):
    """A tensor that a step can save."""
    layer: str
    layer_type: str             # 'linear' or 'attention'
    index: int                  # which of that type, in order of the forward pass
    operation: str              # 'forward' or 'backward'
    name: str                   # 'input', 'weight', 'query', 'grad_output', ...
    time: int | None            # of a layer that is used once for each step of a sequence
    shape: tuple[int, ...]
    axis: int                   # of the blocks, in formats with blocks
    uses: tuple[dict, ...]      # how products that use it round it
    mask: tuple[dict, ...]
    quant_type: str             # the name of the format that the layer calculates with

    @property
    def nbytes(self):
        return 4 * math.prod(self.shape) + HEADER


class Look(NamedTuple):
    """Tensors that can be read once `at` actions of the plan have run.

    read() returns the array of the one tensor, or an array whose first axis counts the tensors."""
    at: int
    tensors: tuple[Tensor, ...]
    read: Callable
    is_fresh: bool              # it is computed for this look, and nothing else writes to it

    def arrays(self):
        """Return a numpy array for each of the tensors."""
        array = backend.get(self.read())
        return [array] if self.tensors[0].shape == array.shape else list(array)


def find(plan, side=None):
    """Return the Looks at a plan that show all tensors of its linear layers and attention, in order of `at`.

    side(layer, name) -> 'source' or 'target', the sentences whose words are the rows of a tensor; None: there are no sentences
    """
    return _Finder(plan, side or (lambda layer, name: None)).looks()


# of attention: role in a product -> operation, and the name of the tensor
_ATTENTION = {'q': ('forward', 'query'), 'k': ('forward', 'key'), 'v': ('forward', 'value'), 'p': ('forward', 'weights'),
              'y': ('forward', 'output'), 'do': ('backward', 'grad_output'), 'ds': ('backward', 'grad_scores'),
              'dq': ('backward', 'grad_query'), 'dk': ('backward', 'grad_key'), 'dv': ('backward', 'grad_value')}
_PARAMETERS = 'weight', 'bias', 'grad_weight', 'grad_bias'


@dataclass
class _Layer:
    name: str
    type: str
    axis: int = -1                  # of the weight, that forward sums over
    steps: bool = False             # it takes the steps of a sequence one by one, and its tensors are saved step by step
    rows: tuple = ()                # the axes of its input but for the last
    heads: int = 0                  # of attention
    seen: dict = field(default_factory=dict)        # (operation, name) -> _Seen of each time
    uses: dict = field(default_factory=dict)        # name -> roundings
    index: int = 0

    def saw(self, operation, name, at, array, axis=-1):
        """array: what can be read at `at`, or _Later."""
        read, is_fresh = (array.make, True) if isinstance(array, _Later) else (lambda: array, False)
        self.seen.setdefault((operation, name), []).append(_Seen(at, array.shape, read, is_fresh, axis))


class _Seen(NamedTuple):
    at: int
    shape: tuple[int, ...]
    read: Callable
    is_fresh: bool
    axis: int


class _Later(NamedTuple):
    """An array that make() makes when it is looked at."""
    shape: tuple[int, ...]
    make: Callable


class _Role(NamedTuple):
    """The array of a role in a product."""
    array: object           # or _Later
    at: int                 # how many actions have run when it can be read
    rounding: int | None    # the action that rounded it for the product, if any


class _Finder:
    def __init__(self, plan, side):
        self.plan, self.side, self.actions = plan, side, plan.replayed
        self.boundary = len(self.actions) if plan.forward is None else plan.forward
        self.layers = {}            # the weight of a linear layer, ('attention', name of the op) -> _Layer, in order of forward

    def looks(self):
        for i, action in enumerate(self.actions):
            for note in action.notes:
                if note.product.kind in ('fwd', 'dgrad', 'wgrad', 'matmul'):
                    self._linear(i, note)
                else:
                    self._attention(i, note)
        counts = {}
        for layer in self.layers.values():
            layer.index = counts[layer.type] = counts.get(layer.type, -1) + 1
        return sorted((look for layer in self.layers.values() for look in self._of(layer)), key=lambda look: look.at)

    # ---- linear layers

    def _linear(self, i, note):
        kind, roles = note.product.kind, note.product.roles
        if note.weight is None:                             # the weight is no parameter of this plan
            return
        if kind == 'matmul':
            kind = 'fwd' if i < self.boundary else 'dgrad'
            if kind == 'dgrad':
                roles = {{'x': 'g', 'y': 'dx'}.get(role, role): source for role, source in roles.items()}
        if kind == 'fwd':
            self._forward(i, note, roles)
        elif layer := self.layers.get(note.weight):
            self._backward(i, note, roles, layer, kind)

    def _forward(self, i, note, roles):
        layer = self.layers.setdefault(note.weight, _Layer(self._name(note), 'linear', note.product.axis, note.steps))
        x = self.role(i, note, roles['x'])
        layer.rows = x.array.shape[:-1] if note.rows is None else note.rows
        layer.saw('forward', 'input', x.at, _with_rows(x.array, layer.rows))
        self._use(layer, 'input', x, 'fwd', 'x')
        at = i if note.product.before else i + 1
        if 'w' in roles:
            w = self.role(i, note, roles['w'])
            at = w.at
            self._use(layer, 'weight', w, 'fwd', 'w')
        self._parameters(layer, note, at, i if note.product.before else i + 1)
        if 'y' in roles:
            y = self.role(i, note, roles['y'])
            layer.saw('forward', 'output', y.at, _with_rows(y.array, layer.rows))

    def _backward(self, i, note, roles, layer, kind):
        rows = layer.rows if note.rows is None else note.rows
        if 'g' in roles:
            g = self.role(i, note, roles['g'])
            # the product that makes the gradient of the input is the better place, but there may be none: see _of
            name = 'grad_output' if kind == 'dgrad' else 'grad_output of weight'
            layer.saw('backward', name, g.at, _with_rows(g.array, rows))
            self._use(layer, 'grad_output', g, kind, 'g')
        if kind == 'dgrad' and 'w' in roles:
            self._use(layer, 'weight', self.role(i, note, roles['w']), 'dgrad', 'w')
        if kind == 'wgrad' and 'x' in roles:
            self._use(layer, 'input', self.role(i, note, roles['x']), 'wgrad', 'x')
        if 'dx' in roles:
            dx = self.role(i, note, roles['dx'])
            array = _with_rows(dx.array, rows)
            if self.actions[i].scalars.get('accumulate'):   # it is added to those of other layers: make this layer's part again
                array = _Later(array.shape, lambda: self._product_again(i, array.shape))
            layer.saw('backward', 'grad_input', dx.at, array)

    def _product_again(self, i, shape):
        """What a product with `accumulate` has added, in that shape."""
        a, b = (self.plan.argument(self.actions[i], name) for name in 'ab')
        return backend.product(a, b).reshape(shape)

    def _parameters(self, layer, note, weight_at, bias_at):
        """Its weight and bias, and their gradients, once."""
        if ('forward', 'weight') in layer.seen:
            return
        for name, part, at in ('weight', note.weight, weight_at), ('bias', note.bias, bias_at):
            if part is not None:
                layer.saw('forward', name, at, self.plan.part(part), axis=layer.axis if name == 'weight' else -1)
                made = self.plan.last_write(part)
                if made is not None:
                    layer.saw('backward', f'grad_{name}', made + 1, self.plan.part(part, gradient=True))

    def _name(self, note):
        """The name of its parameter without `weight`: encoder.rnn.0.hh of encoder.rnn.0.w_hh.  A parameter without an owner
        has the name of the op, if that has one of its own."""
        owner, dot, last = note.weight.tensor.name.rpartition('.')
        name = note.weight.tensor.name
        if dot:
            last = last.removeprefix('weight_').removeprefix('w_')
            name = owner if last == 'weight' else f'{owner}.{last}'
        elif note.op not in self.plan.params:
            name = f'{note.op}.{note.layer}' if note.layer else note.op
        if note.weight.is_whole:
            return name
        return f'{name}.{note.weight.offset // math.prod(note.weight.tensor.shape[1:])}'    # the first of its rows

    # ---- attention

    def _attention(self, i, note):
        product, key = note.product, ('attention', note.op)
        if product.kind in ('forward', 'qk'):
            self.layers[key] = _Layer(note.op, 'attention', heads=note.heads)
        layer = self.layers.get(key)
        if layer is None:
            return
        for letter, source in product.roles.items():
            operation, name = _ATTENTION[letter]
            name = product.names.get(letter, name)
            role = self.role(i, note, source)
            self._use(layer, name, role, product.kind, letter)
            if (operation, name) not in layer.seen and (name != 'weights' or product.kind in ('forward', 'softmax')):
                layer.saw(operation, name, role.at, _by_head(role.array, layer.heads), axis=0 if name == 'value' else -1)

    # ---- the arrays of roles

    def role(self, i, note, source):
        """The array of a role in action i, and where it can be read: before it was rounded, where it was."""
        action, at = self.actions[i], i if note.product.before else i + 1
        if isinstance(source, Made):
            sizes = action.scalars
            return _Role(_Later(source.shape(sizes), lambda: source.make(sizes, self._argument_of(action))), at, None)
        argument, axes = source if isinstance(source, tuple) else (source.removesuffix("'"), None)
        j = self.plan.writer(i, argument)
        if j is not None and self.actions[j].kernel == 'fake_quantize':
            return _Role(self.plan.argument(self.actions[j], 'x'), j + 1, j)
        array = self.plan.argument(action, argument)
        if axes:
            array = backend.permuted(array, axes)
        elif source.endswith("'"):
            array = array.T
        return _Role(array, at, None)

    def _argument_of(self, action):
        return lambda name: self.plan.argument(action, name) if name in action.tensors else None

    def _use(self, layer, name, role, product, letter):
        """Note that the tensor `name` of a layer is rounded for an operand of a product, if it is."""
        if role.rounding is None:
            return
        shape = _with_rows(role.array, layer.rows).shape if layer.type == 'linear' else role.array.shape
        fmt, axis = self._rounding(role.rounding, shape)
        if axis == 0 and layer.steps and name not in _PARAMETERS:
            axis = 'tokens'                                 # of all time steps, which are saved one by one
        use = {'product': product, 'operand': letter, 'format': str(fmt), 'axis': axis}
        uses = layer.uses.setdefault(name, [])
        if use not in uses:
            uses.append(use)

    def _rounding(self, j, shape):
        """Action j, a fake_quantize -> Format, axis in the array that is saved, which has that shape."""
        from pyops import formats
        sizes, tensors, target = self.actions[j].scalars, self.actions[j].tensors, None
        if 'factor' in tensors:
            target = self.actions[self.plan.writer(j, 'factor')].scalars['target']
        n, inner = sizes['n'], sizes['inner']
        fits = [axis for axis in range(len(shape)) if shape[axis] == n and math.prod(shape[axis + 1:]) == inner]
        axis = -1 if inner == 1 else fits[0] if fits else 'tokens'
        return formats.of_scalars(*(sizes[name] for name in formats.SCALARS), target), axis

    # ---- what was found

    def _of(self, layer):
        """The Looks at a layer."""
        for uses in layer.uses.values():
            uses.sort(key=lambda use: use['product'] == 'wgrad')        # whose sums run along the rows; names tell the first
        first = next((use for name in ('input', 'query', *layer.uses) for use in layer.uses.get(name, ())), None)
        quant_type = first['format'].partition(':')[0] if first else 'fp32'
        seen, counts = dict(layer.seen), len(layer.seen.get(('forward', 'output'), [None]))
        made_with_weight = seen.pop(('backward', 'grad_output of weight'), None)
        if made_with_weight and len(seen.get(('backward', 'grad_output'), ())) < counts:
            seen['backward', 'grad_output'] = made_with_weight
        for (operation, name), several in seen.items():
            for n, one in enumerate(several):
                times, shape = [None], one.shape
                if layer.steps and name not in _PARAMETERS and len(shape) == 3:
                    times, shape = range(shape[0]), shape[1:]
                elif counts > 1 and name not in _PARAMETERS:
                    times = [n if operation == 'forward' else counts - 1 - n]       # backward meets the last use first
                tensors = [Tensor(layer.name, layer.type, layer.index, operation, name, step, shape, one.axis,
                                  tuple(layer.uses.get(name, ())), self._mask(layer, name, shape, step), quant_type)
                           for step in times]
                yield Look(one.at, tuple(tensors), one.read, one.is_fresh)

    def _mask(self, layer, name, shape, step):
        role = name.removeprefix('grad_')
        if layer.type == 'attention' and name in ('weights', 'dropped_weights', 'grad_scores'):
            parts = [(2, 0, self.side(layer.name, 'query')), (3, 0, self.side(layer.name, 'key'))]
        elif name in _PARAMETERS:
            return ()
        elif step is not None:
            parts = [(None, 0, self.side(layer.name, role))]
        else:
            parts = [(0, 1, self.side(layer.name, role))] if len(shape) > 2 else []
        return tuple({'time': t, 'batch': b, 'of': of} for t, b, of in parts if of)


def _with_rows(array, rows):
    """The matrix of all rows with the axes that these have in the op's arrays."""
    if isinstance(array, _Later) or array.ndim != 2 or len(rows) < 2 or math.prod(rows) != len(array):
        return array
    return array.reshape(*rows, array.shape[-1])


def _by_head(array, heads):
    """(T, B, D) as (T, B, heads, C); other arrays as they are."""
    if isinstance(array, _Later) or array.ndim != 3:
        return array
    T, B, D = array.shape
    return array.reshape(T, B, heads, D // heads)
