"""What is saved of a training step: the tensors of its linear layers and attention, as its plan has them.

A plan says which kernels run on which arrays, which of these are parameters or gradients of parameters, and where forward
ends.  That is all `find` needs: a product with a parameter before the boundary is a linear layer, a product with one behind
it makes the gradient of a layer's input, and so on.  No layer and no program is asked, so none can be forgotten.

At a step that is saved (`Saving`) the plan runs in pieces, and what a piece has made is copied before the next one may
overwrite it.  At all others it is replayed as ever.  docs/saving.md says what is saved under which name, and what is not
there to be saved.
"""
import math
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pyops import backend
from pyops.errors import UserError
from pyops.inspect.writer import HEADER, Writer, size_text

LOOK_EVERY = 0.3            # seconds between the losses that are written
_PARAMETERS = 'weight', 'bias', 'grad_weight', 'grad_bias'


class Tensor(NamedTuple):
    """A tensor that a step can save."""
    layer: str
    layer_type: str             # 'linear' or 'attention'
    index: int                  # which of that type, in order of the forward pass
    operation: str              # 'forward' or 'backward'
    name: str                   # 'input', 'weight', 'query', 'grad_output', ...
    time: int | None            # of a layer that is used once for each step of a sequence
    shape: tuple[int, ...]
    axis: int                   # that its blocks lie along, in formats that have some
    uses: tuple[dict, ...]      # how it is rounded when used
    mask: tuple[dict, ...]
    quant_type: str             # the name of the format that the layer calculates with

    @property
    def nbytes(self):
        return 4 * math.prod(self.shape) + HEADER


class Look(NamedTuple):
    """What can be read when so many actions of the plan were run: read() -> an array where that is one tensor, or one whose
    first axis are the tensors."""
    at: int
    tensors: tuple[Tensor, ...]
    read: Callable
    is_fresh: bool              # it is made for this look, and nobody else writes to it

    def arrays(self):
        """-> an array of numpy for each of the tensors."""
        array = backend.get(self.read())
        return [array] if self.tensors[0].shape == array.shape else list(array)


def find(plan, side=None):
    """-> the Looks at a plan that show all tensors of its linear layers and attention, in order of `at`.

    side(layer, name) -> 'source' or 'target': the sentences of which a tensor has a row for each word; None: no sentences
    ValueError where the plan has no boundary.
    """
    if plan.forward is None:
        raise ValueError('this plan does not say where its forward pass ends: call pyops.plan.boundary() there')
    return _Finder(plan, side or (lambda layer, name: None)).looks()


class Saving:
    """Does the steps of a training run, and saves tensors at those that are wanted.

    wanted: a pyops.inspect.flags.Wanted;  planned: the pyops.plan.Steps that does a step on rows;  rows: of the first batch
    first, last: the numbers of the first step of this run and of the one behind its last
    run: for the manifest, {'program': ..., 'settings': ...};  side: as for `find`
    sentences(rows) -> lengths, tokens of a batch as the manifest has them; None where there are no sentences

        saving = Saving(...)                UserError where it cannot be saved
        with saving:                        prints what will be saved, and in the end what was
            saving.step(rows)
            saving.note([(loss, weight, norm), ...])
        saving.check()                      UserError where nothing was saved
    """

    def __init__(self, wanted, planned, rows, first, last, run, side=None, sentences=None):
        self.wanted, self.planned, self.next, self._side, self._sentences = wanted, planned, first, side, sentences
        self._noted, self._losses, self._told = first, [], time.perf_counter()
        self._looks, self._is_over, self.summary = {}, False, None
        plan = planned.plan(rows)
        looks = find(plan, side)
        self._layers = set(wanted.choose(list(dict.fromkeys(tensor.layer for look in looks for tensor in look.tensors))))
        looks = self._looks[id(plan)] = self._chosen(looks)
        self.promise, size = self._check(looks, wanted.steps.within(first, last))
        self.writer = Writer(wanted.folder, wanted.limit, wanted.as_, run)
        free = shutil.disk_usage(wanted.folder).free
        if free < size:
            self.writer.close()
            raise UserError(f'{wanted.folder}: {size_text(size)} of tensors will be saved and {size_text(free)} are free; '
                            'make room, or save less with --save-layers, --save-steps or --save-max')

    def _check(self, looks, steps):
        """-> what to say of all that will be saved, its bytes"""
        tensors = [tensor for look in looks for tensor in look.tensors]
        each = sum(tensor.nbytes for tensor in tensors)
        layers, total = len({tensor.layer for tensor in tensors}), each * len(steps)
        if each > self.wanted.limit:
            raise UserError(f'--save-max {self.wanted.limit_text}: one step is {size_text(each)} of {layers} layers; give a '
                            'larger size, or fewer layers with --save-layers')
        which = ('none of the steps to come' if not steps else f'step {steps[0]}' if len(steps) == 1 else
                 f'{len(steps)} steps from {steps[0]} to {steps[-1]}')
        line = (f'saving tensors : {layers} layers, {len(tensors)} tensors and {size_text(each)} a step, {which}, '
                f'{size_text(total)} in {self.wanted.folder}')
        if total > self.wanted.limit:
            fits = self.wanted.limit // each
            line += f'; --save-max {self.wanted.limit_text} ends it after {fits} step' + 's' * (fits > 1)
        return line, min(total, self.wanted.limit)

    def __enter__(self):
        print(self.promise, flush=True)
        return self

    def __exit__(self, *_):
        self._tell()
        self.summary = self.writer.close()
        print(self.summary, flush=True)

    def check(self):
        """UserError where nothing was saved."""
        if not self.summary.tensors:
            why = (f'{self.summary.lost} could not be written' if self.summary.lost else
                   f'--save-steps {self.wanted.steps.text} names none of the steps up to {self.next}')
            raise UserError(f'{self.wanted.folder}: no tensor was saved: {why}; training itself went as ever')

    def step(self, rows):
        """Do the next step."""
        number = self.next
        self.next += 1
        if self._is_over or number not in self.wanted.steps:
            self.planned(rows)
            return
        plan = self.planned.plan(rows)
        if id(plan) not in self._looks:
            self._looks[id(plan)] = self._chosen(find(plan, self._side))
        looks = self._looks[id(plan)]
        if self.writer.taken + sum(tensor.nbytes for look in looks for tensor in look.tensors) > self.wanted.limit:
            self._is_over = True
            print(f'saving of tensors ended before step {number} : --save-max {self.wanted.limit_text} is reached; '
                  'training goes on', flush=True)
            plan.run()
            return
        lengths, tokens = self._sentences(rows) if self._sentences else (None, None)
        if lengths:
            self.writer.batch(number, lengths, tokens)
        done = 0
        for look in looks:
            if look.at > done:
                plan.run(done, look.at)
                done = look.at
            arrays = look.arrays()
            for tensor, array in zip(look.tensors, arrays, strict=True):
                self._save(tensor, array, number, lengths, look.is_fresh or backend.place() is not backend.HOST)
        plan.run(done, len(plan.replayed))

    def _save(self, tensor, array, number, lengths, owned):
        fmt, options, axis = 'fp32', {}, tensor.axis
        if tensor.uses:                                 # the manifest has all of them; a file's name tells the first
            from pyops import formats
            one = formats.parse(tensor.uses[0]['format'])
            fmt, options, axis = one.name, dict(one.options), tensor.uses[0]['axis']
        self.writer.tensor(array, layer=tensor.layer, layer_type=tensor.layer_type, index=tensor.index,
                           operation=tensor.operation, name=tensor.name, step=number, time=tensor.time, format=fmt,
                           quant_type=fmt if tensor.uses else tensor.quant_type, options=options, axis=axis, uses=tensor.uses,
                           mask=tensor.mask, lengths=lengths, owned=owned)

    def note(self, values):
        """(loss, weight, norm) of the steps behind those that were noted before, as pyops.fit.History reads them."""
        self._losses += [(self._noted + i, loss, norm or None) for i, (loss, _, norm) in enumerate(values)]
        self._noted += len(values)
        if time.perf_counter() - self._told > LOOK_EVERY:
            self._tell()

    def _tell(self):
        self.writer.steps(self._losses)
        self._losses, self._told = [], time.perf_counter()

    def _chosen(self, looks):
        return [look for look in looks if look.tensors[0].layer in self._layers]


# ---- what a plan's actions are ----------------------------------------------------------------------------------------

@dataclass
class _Layer:
    name: str
    type: str
    axis: int = -1                  # along which the weight is contracted: 0 where it is stored (I, O)
    is_recurrent: bool = False      # it is used once a step of a sequence, and its tensors are saved step by step
    leading: tuple = ()             # the axes of its input but for the last
    heads: int = 0                  # of attention
    seen: dict = field(default_factory=dict)        # (operation, name) -> _Seen of each time
    uses: dict = field(default_factory=dict)        # name -> roundings
    index: int = 0

    def saw(self, operation, name, at, array, make=None, axis=-1):
        """array: what can be read at `at`; or make() makes it, of the shape of `array`."""
        one = _Seen(at, array.shape, make or (lambda: array), make is not None, axis)
        self.seen.setdefault((operation, name), []).append(one)

    def rows(self, array):
        """The matrix of all rows with the axes that the input has."""
        if array.ndim == 2 and len(self.leading) > 1 and math.prod(self.leading) == len(array):
            return array.reshape(*self.leading, array.shape[-1])
        return array


class _Seen(NamedTuple):
    at: int
    shape: tuple[int, ...]
    read: Callable
    is_fresh: bool
    axis: int


class _Operand(NamedTuple):
    """What argument `name` of action number `action` is at `at`: an operand, before action number `rounding` rounded it."""
    action: int
    name: str
    at: int
    rounding: int | None = None
    offset: int = 0                 # how many numbers behind the first one of that argument it begins,
    shape: tuple | None = None      # and what of it is used; None: all


# in fake-quantised attention, whose products are actions of their own: what a product makes, by the end of its name
#   -> the product's name, its operands, the axes of the arrays in memory (T, B, heads, C) or (B, heads, Tq, Tk) in theirs
_LEFT, _RIGHT, _SAME, _SWAPPED = (2, 0, 1, 3), (3, 0, 1, 2), (0, 1, 2, 3), (0, 1, 3, 2)
_PRODUCTS = {
    'softmax': ('qk', ('query', 'q', _LEFT), ('key', 'k', _RIGHT)),
    'y': ('pv', ('weights', 'p', _SAME), ('value', 'v', _LEFT)),
    'ds': ('dp', ('grad_output', 'do', _LEFT), ('value', 'v', _RIGHT)),
    'dv': ('dv', ('weights', 'p', _SWAPPED), ('grad_output', 'do', _LEFT)),
    'dq': ('dq', ('grad_scores', 'ds', _SAME), ('key', 'k', _LEFT)),
    'dk': ('dk', ('grad_scores', 'ds', _SWAPPED), ('query', 'q', _LEFT)),
}


class _Finder:
    def __init__(self, plan, side):
        self.plan, self.side, self.actions, self.boundary = plan, side, plan.replayed, plan.forward
        self.layers = {}            # key -> _Layer, in order of the forward pass
        self.loss_gradients = {}    # address of what an output layer made for a loss with gradient 1 -> (action, _Layer)
        self.written = [self._spans(action) for action in self.actions]

    def looks(self):
        for i, action in enumerate(self.actions):
            if known := getattr(self, f'_{action.kernel}', None):
                known(i, action)
        counts = {}
        for layer in self.layers.values():
            layer.index = counts[layer.type] = counts.get(layer.type, -1) + 1
        return sorted((look for layer in self.layers.values() for look in self._of(layer)), key=lambda look: look.at)

    # ---- linear layers, by the kernels of their actions

    def _gemm(self, i, action):
        a, b = self.operand(i, 'a'), self.operand(i, 'b')
        if self.is_parameter(b):
            weight, x, used = b, a, 'b'
        elif self.is_parameter(a):
            weight, x, used = a, b, 'a'
        else:
            if i >= self.boundary:
                self._product_of_activations(i, action, a, b)
            return
        if i >= self.boundary:
            self._product_with_weight_behind(i, action, weight, x)
            return
        # stored (O, I), a weight lies transposed in x w'; its contraction then runs along its last axis
        axis = -1 if _is_row_major(self.plan.argument(action, used)) != (used == 'b') else 0
        layer = self.linear(weight, axis, made=(i, 'c'))
        input = self.whole(x)
        layer.leading = input.shape[:-1]
        layer.saw('forward', 'input', x.at, input)
        self.note(layer, 'input', x, 'fwd', 'x')
        self.note(layer, 'weight', weight, 'fwd', 'w')
        self.parameters(layer, i, weight, 'bias')
        layer.saw('forward', 'output', i + 1, layer.rows(self.whole(_Operand(i, 'c', i + 1))))

    def _product_with_weight_behind(self, i, action, weight, dy):
        layer = self.layers.get(_key(self.whole(weight)))
        if layer is None:
            return
        layer.saw('backward', 'grad_output', dy.at, layer.rows(self.whole(dy)))
        self.note(layer, 'grad_output', dy, 'dgrad', 'g')
        self.note(layer, 'weight', weight, 'dgrad', 'w')
        dx = layer.rows(self.whole(_Operand(i, 'c', i + 1)))
        # where it is added to what other layers say about the same input, this layer's part is made once more
        make = (lambda: self.product(action, dx.shape)) if action.scalars['accumulate'] else None
        layer.saw('backward', 'grad_input', i + 1, dx, make)

    def _product_of_activations(self, i, action, a, b):
        """The gradient of a weight, where it is one."""
        layer = self.layers.get(self._key_of_gradient(action, 'c'))
        if layer is not None:
            (dy, x) = (a, b) if layer.axis == -1 else (b, a)
            layer.saw('backward', 'grad_output of weight', dy.at, layer.rows(self.whole(dy)))
            self.note(layer, 'grad_output', dy, 'wgrad', 'g')
            self.note(layer, 'input', x, 'wgrad', 'x')

    def _linear_cross_entropy(self, i, action):
        weight = _Operand(i, 'weight', i + 1)
        if 'dx' in action.tensors and self.is_parameter(weight):
            layer = self.linear(weight)
            layer.saw('forward', 'input', i + 1, self.whole(_Operand(i, 'x', i + 1)))
            self.parameters(layer, i, weight, 'bias')
            self.loss_gradients[self.address(i, 'dx')] = i, layer

    def _scale(self, i, action):
        made, layer = self.loss_gradients.get(self.address(i, 'x'), (None, None))
        if layer is not None and self.writer(i, 'x') == made:
            layer.saw('backward', 'grad_input', i + 1, self.whole(_Operand(i, 'y', i + 1)))
        tensor = action.tensors['y']
        layer, role = self.layers.get(_owner(tensor)), {'dq': 'grad_query', 'dk': 'grad_key'}.get(_last(tensor))
        if layer is not None and role:                      # of fake-quantised attention: 1 / sqrt(C) comes last
            layer.saw('backward', role, i + 1, self._by_head(self.plan.argument(action, 'y'), layer))

    def _pixel_linear_forward(self, i, action):
        weight, sizes = _Operand(i, 'weight', i + 1), action.scalars
        if not self.is_parameter(weight):
            return
        layer = self.linear(weight, 0, made=(i, 'y'))
        table, rows = self.plan.argument(action, 'table'), self.plan.argument(action, 'rows')

        def pixels():
            from pyops.data.batches import gather_pixels
            return gather_pixels(table, rows, sizes['scale'])
        layer.saw('forward', 'input', i + 1, np.broadcast_to(np.float32(0), (sizes['B'], sizes['I'])), pixels)
        self.parameters(layer, i, weight, 'bias')
        layer.saw('forward', 'output', i + 1, self.whole(_Operand(i, 'y', i + 1)))

    def _pixel_linear_backward(self, i, action):
        layer = self.layers.get(self._key_of_gradient(action, 'dweight'))
        if layer is not None:
            layer.saw('backward', 'grad_output', i + 1, self.whole(_Operand(i, 'dy', i + 1)))

    def _gru_forward(self, i, action):
        gru = _GRU(self.plan, action)
        if gru.x is not None:
            self._product_of_steps(i, 'w_ih', 'b_ih', gru.x, None, gru.like_gates, gru.input_product)
        self._product_of_steps(i, 'w_hh', 'b_hh', gru.h, gru.states, gru.like_gates, gru.state_product)

    def _embedding_linear_forward(self, i, action):
        layer = _EmbeddingLinear(self.plan, action)
        self._product_of_steps(i, 'weight', 'bias', layer.like_input, layer.input, layer.like_output, layer.output)

    def _product_of_steps(self, i, weight, bias, x, make_x, y, make_y):
        """A linear layer that takes all steps of a sequence at once; its tensors are saved step by step."""
        operand = _Operand(i, weight, i + 1)
        if self.is_parameter(operand):
            layer = self.linear(operand)
            layer.is_recurrent = True
            layer.saw('forward', 'input', i + 1, x, make_x)
            self.parameters(layer, i, operand, bias)
            layer.saw('forward', 'output', i + 1, y, make_y)

    def _embedding_linear_backward(self, i, action):
        layer, found = self.layers.get(_key(self.plan.argument(action, 'weight'))), _EmbeddingLinear(self.plan, action)
        if layer is not None:
            layer.saw('backward', 'grad_output', i + 1, found.like_output, found.gradients)
            layer.saw('backward', 'grad_input', i + 1, found.like_input, found.input_gradients)

    def _gru_backward(self, i, action):
        gru = _GRU(self.plan, action)
        ih, hh = (self.layers.get(_key(self.plan.argument(action, name))) if name in action.tensors else None
                  for name in ('w_ih', 'w_hh'))
        if ih is not None:
            ih.saw('backward', 'grad_output', i + 1, gru.like_gates, gru.input_gradients)
            if 'dx' in action.tensors:
                ih.saw('backward', 'grad_input', i + 1, self.plan.argument(action, 'dx'))
        if hh is None:
            return
        hh.saw('backward', 'grad_output', i + 1, gru.like_gates, gru.state_gradients)
        hh.saw('backward', 'grad_input', i + 1, gru.h, gru.state_input_gradients)

    # ---- attention

    def _attention_forward(self, i, action):
        sizes = action.scalars
        layer = self.attention(action.tensors['y'], sizes['heads'])
        for role, argument, axis in (('query', 'q', -1), ('key', 'k', -1), ('value', 'v', 0), ('output', 'y', -1)):
            layer.saw('forward', role, i + 1, self._by_head(self.plan.argument(action, argument), layer), axis=axis)
        shape = tuple(sizes[name] for name in ('B', 'heads', 'Tq', 'Tk'))
        layer.saw('forward', 'weights', i + 1, np.broadcast_to(np.float32(0), shape), lambda: _weights(self.plan, action))

    def _attention_backward(self, i, action):
        layer = self.layers.get(_owner(action.tensors['stats']))
        if layer is not None:
            for role, argument in (('output', 'dy'), ('query', 'dq'), ('key', 'dk'), ('value', 'dv')):
                layer.saw('backward', f'grad_{role}', i + 1, self._by_head(self.plan.argument(action, argument), layer))

    def _gemm_batched(self, i, action):
        """A product of fake-quantised attention."""
        tensor = action.tensors['c']
        made = _last(tensor)
        if made == 'softmax':
            self.attention(tensor, tensor.shape[1])
        layer = self.layers.get(_owner(tensor))
        if layer is None or layer.type != 'attention' or made not in _PRODUCTS:
            return
        product, *operands = _PRODUCTS[made]
        for argument, (role, letter, axes) in zip('ab', operands, strict=True):
            operand = self.operand(i, argument)
            array = self.plan.argument(self.actions[operand.action], operand.name)
            if operand.rounding is None:
                array = _permuted(array, axes)
            if role == 'weights' and self._is_dropped(operand):
                role = 'dropped_weights'
            self.note(layer, role, operand, product, letter)
            operation = 'backward' if role.startswith('grad_') else 'forward'
            if role != 'weights' and (operation, role) not in layer.seen:
                layer.saw(operation, role, operand.at, array, axis=0 if role == 'value' else -1)
        if made in ('y', 'dv'):
            array = _permuted(self.plan.argument(action, 'c'), _LEFT)
            layer.saw(*(('forward', 'output') if made == 'y' else ('backward', 'grad_value')), i + 1, array)

    def _attention_softmax_forward(self, i, action):
        layer = self.layers.get(_owner(action.tensors['p']))
        if layer is not None:
            layer.saw('forward', 'weights', i + 1, self.plan.argument(action, 'p'))

    def _is_dropped(self, operand):
        writer = self.writer(operand.action, operand.name)
        return writer is not None and 'w' in self.actions[writer].tensors and (
            self.address(writer, 'w') == self.address(operand.action, operand.name))

    def attention(self, tensor, heads):
        layer = self.layers[_owner(tensor)] = _Layer(_owner(tensor), 'attention', heads=heads)
        return layer

    @staticmethod
    def _by_head(array, layer):
        """(T, B, D) as (T, B, heads, C)"""
        T, B, D = array.shape
        return array.reshape(T, B, layer.heads, D // layer.heads)

    # ---- layers

    def linear(self, weight, axis=-1, made=None):
        """The layer that has this weight; a new one where it is used for the first time.  made: what its product is"""
        array = self.whole(weight)
        if _key(array) not in self.layers:
            tensor = self.actions[weight.action].tensors[weight.name]
            parameter = (tensor.base or tensor).name
            name = re.sub(r'\.w(?:eight)?_([ih]h)', r'.\1', re.sub(r'\.weight$', '', parameter))
            if '.' not in parameter and made:               # a parameter of no layer's name: it is told by what it makes
                name = _owner(self.actions[made[0]].tensors[made[1]]) or name
            whole = self.plan.params[parameter].value
            if array.size != whole.size:                    # rows of a parameter that several layers share
                name += f'.{(backend.location(array) - backend.location(whole)) // array[0].nbytes}'
            self.layers[_key(array)] = _Layer(name, 'linear', axis, bool(re.search(r'\.w(eight)?_[ih]h', parameter)))
        return self.layers[_key(array)]

    def parameters(self, layer, i, weight, bias):
        """Its weight, and its bias where action i has such an argument.  With their gradients, once."""
        if ('forward', 'weight') in layer.seen:
            return
        for name, operand in ('weight', weight), ('bias', _Operand(i, bias, i + 1)):
            if operand.name in self.actions[operand.action].tensors and self.is_parameter(operand):
                value = self.whole(operand)
                layer.saw('forward', name, operand.at, value, axis=layer.axis if name == 'weight' else -1)
                first = (backend.location(value) - backend.location(self.plan.params.values)) // 4
                grad = self.plan.params.grads[first:first + value.size].reshape(value.shape)
                if at := self._last_write(grad):
                    layer.saw('backward', f'grad_{name}', at, grad)

    def note(self, layer, name, operand, product, letter):
        """That the tensor `name` of a layer is rounded for an operand of a product, if it is."""
        if operand.rounding is None:
            return
        shape = self.actions[operand.action].tensors[operand.name].shape
        if layer.type == 'linear':                          # it may be the matrix of the rows of more axes
            shape = layer.rows(self.whole(operand)).shape
        fmt, axis = self._rounding(operand.rounding, shape)
        if axis == 0 and layer.is_recurrent and name not in _PARAMETERS:
            axis = 'tokens'                                 # of all time steps, which are saved one by one
        use = {'product': product, 'operand': letter, 'format': str(fmt), 'axis': axis}
        uses = layer.uses.setdefault(name, [])
        if use not in uses:
            uses.append(use)

    def _rounding(self, i, shape):
        """Action i, a fake_quantize -> Format, axis in the array that is saved, which has that shape"""
        from pyops import formats
        sizes, tensors, target = self.actions[i].scalars, self.actions[i].tensors, None
        if 'factor' in tensors:
            target = self.actions[self.writer(i, 'factor')].scalars['target']
        n, inner = sizes['n'], sizes['inner']
        fits = [axis for axis in range(len(shape)) if shape[axis] == n and math.prod(shape[axis + 1:]) == inner]
        axis = -1 if inner == 1 else fits[0] if fits else 'tokens'
        return formats.of_scalars(*(sizes[name] for name in formats.SCALARS), target), axis

    def _last_write(self, grad):
        """How many actions have run when the gradient of a parameter is complete; None where backward makes none."""
        start = backend.location(grad)
        for i in range(len(self.actions) - 1, self.boundary - 1, -1):
            if self.actions[i].kernel not in ('fill', 'clip') and any(
                    low < start + grad.nbytes and start < high for low, high in self.written[i]):
                return i + 1
        return None

    def product(self, action, shape):
        """What a product with `accumulate` has added, in that shape."""
        c = self.plan.argument(action, 'c')
        made = backend.empty(c.shape)
        backend.gemm(made, self.plan.argument(action, 'a'), self.plan.argument(action, 'b'))
        return made.reshape(shape)

    # ---- arguments

    def operand(self, i, name):
        """The operand of action i, or what it was rounded from."""
        j = self.writer(i, name)
        if j is None or self.actions[j].kernel != 'fake_quantize':
            return _Operand(i, name, i + 1)
        at = j if self.address(j, 'x') == self.address(j, 'y') else j + 1
        used, made = self.actions[i].tensors[name].shape, self.actions[j].tensors['y'].shape
        if math.prod(used) == math.prod(made):
            return _Operand(j, 'x', at, j)
        array = self.plan.argument(self.actions[i], name)
        return _Operand(j, 'x', at, j, (backend.location(array) - self.address(j, 'y')) // 4,
                        used if _is_row_major(array) else used[::-1])

    def is_parameter(self, operand):
        tensor = self.actions[operand.action].tensors[operand.name]
        return (tensor.base or tensor).kind == 'parameter'

    def whole(self, operand):
        """The array as the op had it that made the operand of it: not transposed, and with all its axes."""
        action = self.actions[operand.action]
        array, tensor = self.plan.argument(action, operand.name), action.tensors[operand.name]
        if operand.shape:                                   # some of its rows
            return array.reshape(-1)[operand.offset:operand.offset + math.prod(operand.shape)].reshape(operand.shape)
        if array.ndim == 2 and not _is_row_major(array):
            array = array.T
        base = tensor.base.shape if tensor.base else ()
        if math.prod(base) == array.size and _is_row_major(array):
            return array.reshape(base)
        rows = len(array)
        if len(base) == 3 and array.ndim == 2 and array.shape[1] == base[2] and rows > base[1] > 0 == rows % base[1]:
            return array.reshape(-1, *base[1:])             # some of the steps of a sequence
        return array

    def address(self, i, name):
        return backend.location(self.plan.argument(self.actions[i], name))

    def writer(self, i, name):
        """The number of the action that made this argument of action i; None where it is older than the step."""
        start = self.address(i, name)
        for j in range(i - 1, -1, -1):
            if any(low <= start < high for low, high in self.written[j]):
                return j
        return None

    def _spans(self, action):
        """The memory that an action writes to."""
        _, outputs, _ = action.split()
        starts = [(backend.location(self.plan.argument(action, name)), tensor.nbytes) for name, tensor in outputs.items()]
        return [(start, start + nbytes) for start, nbytes in starts]

    def _key_of_gradient(self, action, name):
        """The key of the layer whose weight has its gradient there."""
        grad, params = self.plan.argument(action, name), self.plan.params
        return backend.location(grad) - backend.location(params.grads) + backend.location(params.values), grad.shape

    # ---- what was found

    def _of(self, layer):
        """The Looks at a layer."""
        for uses in layer.uses.values():
            uses.sort(key=lambda use: use['product'] == 'wgrad')        # whose sums run along the rows; names tell the first
        first = next((use for name in ('input', 'query', *layer.uses) for use in layer.uses.get(name, ())), None)
        quant_type = first['format'].partition(':')[0] if first else 'fp32'
        seen, counts = dict(layer.seen), len(layer.seen.get(('forward', 'output'), [None]))
        made_with_weight = seen.pop(('backward', 'grad_output of weight'), None)
        # a better place is the product that makes the gradient of the input; but there may be none, or none at some steps
        if made_with_weight and len(seen.get(('backward', 'grad_output'), ())) < counts:
            seen['backward', 'grad_output'] = made_with_weight
        for (operation, name), several in seen.items():
            for n, one in enumerate(several):
                times, shape = [None], one.shape
                if layer.is_recurrent and name not in _PARAMETERS and len(shape) == 3:
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


def _key(weight):
    return backend.location(weight), weight.shape


def _is_row_major(array):
    return array.flags.c_contiguous if isinstance(array, np.ndarray) else array.is_compact()


def _permuted(array, axes):
    return array.transpose(axes) if isinstance(array, np.ndarray) else array.permute(axes)


def _owner(tensor):
    """'encoder.0.self_attention' of the Tensor 'encoder.0.self_attention.y'"""
    return (tensor.base or tensor).name.rpartition('.')[0]


def _last(tensor):
    """'y' of the same"""
    return (tensor.base or tensor).name.rpartition('.')[2]


def _weights(plan, action):
    """P of docs/attention.md (B, heads, Tq, Tk), from the operands of attention_forward."""
    sizes = action.scalars
    Tq, Tk, B, heads, C = (sizes[name] for name in ('Tq', 'Tk', 'B', 'heads', 'C'))
    q, k = (plan.argument(action, name).reshape(T, B, heads, C) for name, T in (('q', Tq), ('k', Tk)))
    lengths = plan.argument(action, 'lengths') if 'lengths' in action.tensors else None
    p = backend.empty((B, heads, Tq, Tk))
    backend.gemm_batched(p, _permuted(q, (1, 2, 0, 3)), _permuted(k, (1, 2, 3, 0)))
    backend.launch('attention_softmax_forward', p, None, p, lengths, None, Tq, Tk, B, heads, sizes['causal'], C ** -0.5, 0.0, 0)
    return p


class _GRU:
    """What gru_forward or gru_backward has of its two linear layers; T steps, gates r, z, n.

    Products that the kernel keeps no trace of are made again, for all steps at once.
    """

    def __init__(self, plan, action):
        self.sizes = action.scalars
        self.T, self.B, self.I, self.H = (self.sizes[name] for name in 'TBIH')
        self.array = lambda name: plan.argument(action, name) if name in action.tensors else None
        self.x, self.h = self.array('x'), self.array('h')
        self.like_gates = np.broadcast_to(np.float32(0), (self.T, self.B, 3 * self.H))

    def states(self):
        """h[t-1] of all steps, (T, B, H)"""
        h, h0 = backend.get(self.h), self.array('h0')
        before = np.zeros((1, self.B, self.H), np.float32) if h0 is None else backend.get(h0)[None]
        return np.concatenate([before, h[:-1]])

    def input_product(self):
        """x[t] w_ih' + b_ih"""
        return self._product(backend.as_rows(self.x), self.array('w_ih').T, self.array('b_ih'), 3 * self.H)

    def state_product(self):
        """h[t-1] w_hh' + b_hh;  with reset_before, u w_hn' + b_hn in its last third"""
        H, w, b = self.H, self.array('w_hh'), self.array('b_hh')
        states = backend.put(self.states())
        y = backend.get(self._product(backend.as_rows(states), w.T, b, 3 * H))
        if self.sizes['reset_before']:
            u = backend.as_rows(self.array('gates'))[:, 3 * H:]
            y[..., 2 * H:] = backend.get(self._product(u, w[2 * H:].T, b[2 * H:], H))
        return y

    def input_gradients(self):
        """dr, dz, dn of all steps"""
        return np.ascontiguousarray(self._gradients()[..., :3 * self.H])

    def state_gradients(self):
        """dr, dz, du of all steps;  with reset_before, dr, dz, dn"""
        if self.sizes['reset_before']:
            return self.input_gradients()
        return np.concatenate([self._gradients()[..., :2 * self.H], self._gradients()[..., 3 * self.H:]], -1)

    def state_input_gradients(self):
        """The gradient of h[t-1] that this product makes, of all steps"""
        H, w = self.H, self.array('w_hh')
        gradients = backend.put(self.state_gradients())
        if not self.sizes['reset_before']:
            return self._product(backend.as_rows(gradients), w, None, H)
        rows = backend.as_rows(gradients)
        through_u = backend.get(self._product(rows[:, 2 * H:], w[2 * H:], None, H))
        r = backend.get(self.array('gates'))[..., :H]
        return backend.get(self._product(rows[:, :2 * H], w[:2 * H], None, H)) + r * through_u

    def _gradients(self):
        return backend.get(self.array('dgates'))

    def _product(self, a, b, bias, N):
        return _product(a, b, bias).reshape(self.T, self.B, N)


class _EmbeddingLinear:
    """The linear layer of embedding_linear_forward or _backward, whose input and output are made again, for all positions."""

    def __init__(self, plan, action):
        self.sizes = action.scalars
        T, B, E, C, O = (self.sizes[name] for name in 'TBECO')
        self.array = lambda name: plan.argument(action, name) if name in action.tensors else None
        self.like_input, self.like_output = (np.broadcast_to(np.float32(0), (T, B, n)) for n in (E + C, O))

    def input(self):
        """[table[ids[t,b]], context[b]]"""
        (T, B, _), E, C = self.like_input.shape, self.sizes['E'], self.sizes['C']
        x = backend.empty((T, B, E))
        backend.launch('embedding_forward', x, self.array('table'), self.array('ids'), T * B, self.sizes['V'], E)
        if not C:
            return x
        both = backend.empty(self.like_input.shape)
        backend.launch('concat_context_forward', both, x, self.array('context'), T, B, E, C)
        return both

    def output(self):
        product = _product(backend.as_rows(self.input()), self.array('weight').T, self.array('bias'))
        return product.reshape(self.like_output.shape)

    def gradients(self):
        """Of the output; where a GRU made them, they have more in their rows."""
        T, B, O = self.like_output.shape
        return np.ascontiguousarray(backend.get(self.array('dy')).reshape(T, B, self.sizes['ld'])[..., :O])

    def input_gradients(self):
        gradients = backend.put(self.gradients())
        return _product(backend.as_rows(gradients), self.array('weight'), None).reshape(self.like_input.shape)


def _product(a, b, bias):
    y = backend.empty((a.shape[0], b.shape[1]))
    backend.gemm(y, a, b, bias)
    return y
