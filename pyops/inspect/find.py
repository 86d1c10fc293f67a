"""Find the tensors of linear layers and attention in a plan.

Ops note which products their launches compute, and a plan stores these Notes with its actions (backend.note_product).  This
module reads the notes, and determines the name of each operand in a dump, the point of the plan at which its array can be
read, and its rounding.  The debug names of arrays are not used.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from pyops import backend
from pyops.backend.kernels import KERNELS, Kernel, Made, Slice
from pyops.inspect.writer import HEADER
from pyops.ops import fp8

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np

    from pyops.plan import Plan


class FoundTensor(NamedTuple):
    """A tensor that a step can save."""
    layer: str
    layer_type: str             # 'linear' or 'attention'
    index: int                  # counts the layers of this type in order of the forward pass
    operation: str              # 'forward' or 'backward'
    name: str                   # 'input', 'weight', 'query', 'grad_output', ...
    time: int | None            # time step, if the layer is used once for each step of a sequence
    shape: tuple[int, ...]
    axis: int                   # axis of the blocks, in formats with blocks
    uses: tuple[dict, ...]      # its roundings, for each product that uses it
    mask: tuple[dict, ...]
    quant_type: str             # name of the format of the layer's operands
    pasts: tuple[Any, ...]      # of each of `uses`: the amax history (length,), None without delayed scaling
    content: Any = None         # equal for tensors of a step that are the same array, unchanged, with the same mask; or None

    def rounded(self) -> FoundTensor:
        """Return the tensor with its uses as they are in the next step: delayed scaling has the factor of its history."""
        from pyops import formats
        uses = tuple(use if past is None else use | {'format': str(formats.of_factor(use['format'], backend.get(past).max()))}
                     for use, past in zip(self.uses, self.pasts, strict=True))
        return self._replace(uses=uses)

    @property
    def nbytes(self) -> int:
        return 4 * math.prod(self.shape) + HEADER


def nbytes_of(looks: Iterable[Look]) -> int:
    """Return the bytes of the tensors of a step, of which those with the same content are saved once."""
    total, seen = 0, set()
    for look in looks:
        for tensor in look.tensors:
            total += HEADER if tensor.content in seen else tensor.nbytes
            if tensor.content is not None:
                seen.add(tensor.content)
    return total


class Look(NamedTuple):
    """Tensors that can be read after `at` actions of the plan.

    read() returns the array of a single tensor, or an array whose first axis counts the tensors."""
    at: int
    tensors: tuple[FoundTensor, ...]
    read: Callable
    is_fresh: bool              # the array is computed by read(), and nothing else writes to it

    def stored(self) -> tuple[str, list[np.ndarray]]:
        """Return the name of the dtype in memory, and one numpy array per tensor, of bfloat16 as float32."""
        found = self.read()
        array = backend.get(found)
        return backend.dtype_name(found.dtype), [array] if self.tensors[0].shape == array.shape else list(array)

    def arrays(self) -> list[np.ndarray]:
        """Return one numpy array per tensor."""
        return self.stored()[1]


def find(plan: Plan, side: Callable[[str, str], str | None] | None = None) -> list[Look]:
    """Return the Looks for all tensors of a plan's linear layers and attention, in order of `at`.

    side(layer, name): returns 'source' or 'target', the sentences whose tokens are the rows of a tensor, or None
    """
    return _Finder(plan, side or (lambda layer, name: None)).looks()


# attention: role in a product -> operation and name of the tensor
_ATTENTION = {'q': ('forward', 'query'), 'k': ('forward', 'key'), 'v': ('forward', 'value'), 'p': ('forward', 'weights'),
              'y': ('forward', 'output'), 'do': ('backward', 'grad_output'), 'ds': ('backward', 'grad_scores'),
              'dq': ('backward', 'grad_query'), 'dk': ('backward', 'grad_key'), 'dv': ('backward', 'grad_value')}
_PARAMETERS = 'weight', 'bias', 'grad_weight', 'grad_bias'
_TRANSPOSED = {('dgrad', 'w'), ('wgrad', 'g'), ('wgrad', 'x')}       # operands of products in FP8


@dataclass
class _Layer:
    name: str
    type: str
    axis: int = -1                  # axis of the weight that forward sums over
    steps: bool = False             # runs once per step of a sequence; its tensors are saved for each step
    rows: tuple = ()                # shape of its input without the last axis
    heads: int = 0                  # number of heads, for attention
    seen: dict = field(default_factory=dict)        # (operation, name) -> one _Seen per use of the layer
    uses: dict = field(default_factory=dict)        # name -> roundings
    pasts: dict = field(default_factory=dict)       # (product, operand) -> amax history of a rounding, None without one
    index: int = 0

    def saw(self, operation, name, at, array, axis=-1, content=None):
        """Record a tensor that can be read after `at` actions.  array: an array, or a _Later;  content: of a _Role"""
        read, is_fresh = (array.make, True) if isinstance(array, _Later) else (lambda: array, False)
        self.seen.setdefault((operation, name), []).append(_Seen(at, array.shape, read, is_fresh, axis, content))


class _Seen(NamedTuple):
    at: int
    shape: tuple[int, ...]
    read: Callable
    is_fresh: bool
    axis: int
    content: tuple | None


class _Later(NamedTuple):
    """An array that make() computes when it is read."""
    shape: tuple[int, ...]
    make: Callable


class _Role(NamedTuple):
    """The array with a role in a product."""
    array: object           # an array, or a _Later
    at: int                 # number of actions after which it can be read
    rounding: int | None    # index of the action that rounded it for the product, if any
    content: tuple | None = None        # equal for two arrays that are the same memory, not written to between their actions


class _Finder:
    def __init__(self, plan, side):
        self.plan, self.side, self.actions = plan, side, plan.replayed
        self.boundary = len(self.actions) if plan.forward is None else plan.forward
        self.layers = {}            # weight, or ('attention', name of the op) -> _Layer, in order of the forward pass

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
        if note.weight is None:                             # the weight is not a parameter of this plan
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
        layer.saw('forward', 'input', x.at, _with_rows(x.array, layer.rows), content=x.content)
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
            # the product for the gradient of the input is preferred, but may not exist: see _of
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
            scalars = self.actions[i].scalars
            adds = any(value for name, value in scalars.items() if name.startswith('accumulate'))      # also of linear_pair
            if adds or scalars.get('relu') or 'activation' in scalars or isinstance(roles.get('g'), Slice):
                # added to other gradients, or to those from other layers, or passed through an activation: recompute it
                array = _Later(array.shape, lambda: self._product_again(i, roles, array.shape))
            layer.saw('backward', 'grad_input', dx.at, array)

    def _product_again(self, i, roles, shape):
        """Recompute the product of one layer for the gradient of an input, in the given shape."""
        if self.actions[i].kernel == 'gemm_fp8':
            return fp8.product_again(self.actions[i].scalars, self._argument_of(self.actions[i])).reshape(shape)
        parts = [roles[role] for role in 'gw']
        names = [(part.source if isinstance(part, Slice) else part).removesuffix("'") for part in parts]
        factors = [self.plan.argument(self.actions[i], name) for name in names]
        factors = [factor if factor.ndim == 2 else backend.as_rows(factor) for factor in factors]
        factors = [part.of(factor) if isinstance(part, Slice) else factor
                   for part, factor in zip(parts, factors, strict=True)]
        return backend.product(*factors).reshape(shape)

    def _parameters(self, layer, note, weight_at, bias_at):
        """Record weight, bias and their gradients, once per layer."""
        if ('forward', 'weight') in layer.seen:
            return
        for name, part, at in ('weight', note.weight, weight_at), ('bias', note.bias, bias_at):
            if part is not None:
                layer.saw('forward', name, at, self.plan.part(part), axis=layer.axis if name == 'weight' else -1)
                made = self.plan.last_write(part)
                if made is not None:
                    layer.saw('backward', f'grad_{name}', made + 1, self.plan.part(part, gradient=True))

    def _name(self, note):
        """Return the layer's name: its weight's name without `weight`, encoder.rnn.0.hh for encoder.rnn.0.w_hh.  If the
        weight has no owner, the name of the op is used, unless that is the name of a parameter."""
        owner, dot, last = note.weight.tensor.name.rpartition('.')
        name = note.weight.tensor.name
        if dot:
            last = last.removeprefix('weight_').removeprefix('w_')
            name = owner if last == 'weight' else f'{owner}.{last}'
        elif note.op not in self.plan.params:
            name = f'{note.op}.{note.layer}' if note.layer else note.op
        if note.weight.is_whole:
            return name
        return f'{name}.{note.weight.offset // math.prod(note.weight.tensor.shape[1:])}'    # its first row

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
        """Return the _Role of an operand of action i: its array before rounding, and the point at which that can be read."""
        action, at = self.actions[i], i if note.product.before else i + 1
        if isinstance(source, Made):
            sizes = action.scalars
            return _Role(_Later(source.shape(sizes), lambda: source.make(sizes, self._argument_of(action))), at, None)
        if isinstance(source, Slice):
            whole = self.role(i, note, source.source)
            return whole._replace(array=source.of(whole.array), content=None)
        argument, axes = source if isinstance(source, tuple) else (source.removesuffix("'"), None)
        j = self.plan.writer(i, argument)
        if j is not None and self.actions[j].kernel == 'hadamard':      # undoes the transform after the rounding
            j = self.plan.writer(j, 'x')
        rounded = None if j is None else KERNELS.get(self.actions[j].kernel, Kernel()).rounds
        if rounded:
            first = self._transform_before(j)
            first, rounded = (j, rounded) if first is None else (first, 'x')
            array = self.plan.argument(self.actions[first], rounded)
            return _Role(array, first + 1, j, self._content(first, rounded, array))
        array = self.plan.argument(action, argument)
        if axes:
            array = backend.permuted(array, axes)
        elif source.endswith("'"):
            array = array.T
        return _Role(array, at, None, self._content(i, argument, array))

    def _content(self, i, argument, array):
        """Return the content of a _Role: an argument of action i that it does not write to."""
        tensor = self.actions[i].tensors[argument]
        return (id(tensor.base or tensor), self.plan.writer(i, argument), backend.location(array),
                tuple(backend.element_strides(array)))

    def _transform_before(self, j):
        """Return the index of the Hadamard transform whose result action j, a rounding, rounds; None without one."""
        i = self.plan.writer(j, 'x')
        is_transform = i is not None and self.actions[i].kernel == 'hadamard' and not self.actions[i].scalars['inverse']
        return i if is_transform else None

    def _argument_of(self, action):
        return lambda name: self.plan.argument(action, name) if name in action.tensors else None

    def _use(self, layer, name, role, product, letter):
        """If the operand `letter` of a product is rounded, record this rounding of the layer's tensor `name`."""
        if role.rounding is None:
            return
        shape = _with_rows(role.array, layer.rows).shape if layer.type == 'linear' else role.array.shape
        if self.actions[role.rounding].kernel == 'fp8_encode':
            fmt, axis = fp8.rounding_of(self.actions[role.rounding].scalars, shape, (product, letter) in _TRANSPOSED)
        else:
            fmt, axis = self._rounding(role.rounding, shape)
        if axis == 0 and layer.steps and name not in _PARAMETERS:
            axis = 'tokens'                                 # of all time steps, which are saved separately
        use = {'product': product, 'operand': letter, 'format': str(fmt), 'axis': axis}
        uses = layer.uses.setdefault(name, [])
        if use not in uses:
            uses.append(use)
            layer.pasts[product, letter] = self._past(role.rounding)

    def _rounding(self, j, shape):
        """Return the Format of action j, a rounding, and the block axis in the saved array, which has this shape."""
        from pyops import formats
        first, (fmt, axis) = self._transform_before(j), self._format(j, shape)
        if first is None:
            return fmt, axis
        sizes = self.actions[first].scalars
        return formats.parse(fmt, hadamard=sizes['block'], signs=sizes['key']), _axis_of(sizes, shape)

    def _format(self, j, shape):
        """Return the Format and the axis of action j without a transform before it."""
        from pyops import formats
        sizes, tensors, target = self.actions[j].scalars, self.actions[j].tensors, None
        axis = _axis_of(sizes, shape) if 'n' in sizes else None
        if 'block_rows' in sizes:
            grid, more = (tuple(sizes[name] for name in names) for names in (
                ('outer', 'rows', 'columns', 'block_rows', 'block_columns'), ('format', 'rounding', 'rule', 'shift', 'flush')))
            return formats.of_grid(grid, shape, *more)
        if 'factor' in tensors:
            made = self.actions[self.plan.writer(j, 'factor')]
            if made.kernel == 'fill':
                return formats.of_tensor(sizes['format'], sizes['rounding'], factor=made.scalars['value']), axis
            target = made.scalars['target']
            if made.kernel == 'delayed_factor':
                return formats.of_delayed(sizes['format'], sizes['rounding'], target, made.scalars['length']), axis
        return formats.of_scalars(*(sizes[name] for name in formats.SCALARS), target), axis

    def _past(self, j):
        """Return the amax history (length,) that scales the tensor of action j, a rounding; None without delayed scaling."""
        if 'factor' not in self.actions[j].tensors:
            return None
        made = self.actions[self.plan.writer(j, 'factor')]
        return self.plan.argument(made, 'history') if made.kernel == 'delayed_factor' else None

    # ---- what was found

    def _of(self, layer):
        """Yield the Looks of a layer."""
        for uses in layer.uses.values():
            uses.sort(key=lambda use: use['product'] == 'wgrad')        # last: it sums over rows; file names have the first use
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
                    times = [n if operation == 'forward' else counts - 1 - n]       # backward starts at the last use
                uses = tuple(layer.uses.get(name, ()))
                pasts = tuple(layer.pasts[use['product'], use['operand']] for use in uses)
                tensors = []
                for step in times:
                    mask = self._mask(layer, name, shape, step)
                    content = one.content and step is None and (one.content, shape, repr(mask)) or None
                    tensors.append(FoundTensor(layer.name, layer.type, layer.index, operation, name, step, shape, one.axis,
                                               uses, mask, quant_type, pasts, content))
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
            by_head = layer.type == 'attention'         # another axis; packed rows (N, ...) have no padding
            parts = [(0, 1, self.side(layer.name, role))] if len(shape) > 2 + by_head else []
        return tuple({'time': t, 'batch': b, 'of': of} for t, b, of in parts if of)


def _axis_of(sizes, shape):
    """Return the axis of an array of this shape that is the axis n of a launch with these sizes."""
    n, inner = sizes['n'], sizes['inner']
    fits = [axis for axis in range(len(shape)) if shape[axis] == n and math.prod(shape[axis + 1:]) == inner]
    return -1 if inner == 1 else fits[0] if fits else 'tokens'


def _with_rows(array, rows):
    """Reshape a matrix of all rows to the axes of the op's arrays; return any other array unchanged."""
    if isinstance(array, _Later) or array.ndim != 2 or len(rows) < 2 or math.prod(rows) != len(array):
        return array
    return array.reshape(*rows, array.shape[-1])


def _by_head(array, heads):
    """Reshape (T, B, D) to (T, B, heads, C), or packed rows (N, D) to (N, heads, C); return any other array unchanged."""
    if isinstance(array, _Later) or array.ndim not in (2, 3):
        return array
    *rows, D = array.shape
    return array.reshape(*rows, heads, D // heads)
