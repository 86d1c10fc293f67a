"""Random training programs: nets of pyops.nn, losses, optimisers and batches, trained in several ways that must agree.

A program is drawn from a list of numbers, so that a failing one can be made shorter: `shrink`.  The ways:

    bits equal      step by step without a plan; from a plan for each batch size; the plan of another batch size recorded
                    before or after, and run between; plan memory never reused; plan memory full of NaN before the first
                    step; two and three threads
    float64         the loss of the first step and its derivative in two directions, against the formulas of the ops; and
                    what the last step changes, against the formulas of the optimisers
    on a GPU        or the emulator instead, loss and gradient of the first step, against the CPU
"""
import copy
import math
import random
from dataclasses import dataclass, replace

import numpy as np
from arrays import RTOL, gathered
from places import ON_GPU, get, put

from pyops import backend, nn, optim
from pyops.autograd import Tensor
from pyops.autograd.mode import interpreted_by
from pyops.data.batches import gather
from pyops.differences import as_double, formula_of, in_float64
from pyops.fit import History
from pyops.ndarray import as_ndarray
from pyops.optim import is_hidden_matrix
from pyops.plan import _pointers, _Reference
from pyops.steps import Steps

SAMPLES, TOKENS, NUMBERS = 40, 11, 60           # samples of a data set; different tokens; numbers of a program
LOSS_TOLERANCE, DERIVATIVE_TOLERANCE = 1e-4, 5e-3
LARGEST, ROUNDING = 1e18, 2.0**-23              # of a number whose square is finite; of a number near 1
ROUNDINGS = 16                                  # within a kernel, at most; a formula rounds its result only
SMALLEST = 2.0**-126                            # normal number: smaller ones lose digits
DERIVATIVE_STEPS = 2.0**-13, 2.0**-17, 2.0**-21
WIDTHS = 3, 1, 2, 5, 8, 16, 17, 33
LARGE = 50                      # one of so many programs is so large that threads share the work of most of its kernels
ACTIVATIONS = 'ReLU', 'GELU', 'SiLU', 'Tanh', 'Sigmoid', 'LeakyReLU'


class Draws:
    """Choices from a list of numbers.  When it is used up, each is the first, simplest option."""

    def __init__(self, numbers, is_large=None):
        """is_large: whether sizes are large; None: draw it"""
        self._numbers = iter(numbers)
        self.is_large = self.pick(*[False] * (LARGE - 1), True) if is_large is None else is_large

    def pick(self, *options):
        return options[next(self._numbers, 0) % len(options)]

    def widths(self, most=33):
        return self.sized([n for n in WIDTHS if n <= most], (160, 64, 300) if most > 17 else (160, 64))

    def sized(self, small, large):
        """Pick from one of two lists."""
        return self.pick(*(large if self.is_large else small))


@dataclass
class Program:
    """shape: of a sample; if the first layer is an Embedding, of its result;  layers: (name, *arguments) each
    classes: of the cross entropy, 0 for a squared error;  optimizer: (name, settings)
    sizes: number of samples of each batch;  seed: of the data and the first parameters
    joins: (i, j, 'sum' or 'product') each: the input of layer j becomes that with the input of layer i, which so has two
           consumers;  twice: numbers of layers that run twice in a row, with the same parameters
    tied: whether the last layer has the weight of the embedding"""
    shape: tuple
    layers: list
    classes: int
    optimizer: tuple
    sizes: list
    seed: int = 0
    joins: tuple = ()
    twice: tuple = ()
    tied: bool = False

    def __str__(self):
        layers = ', '.join(f'{name}({", ".join(map(repr, rest))})' for name, *rest in self.layers)
        loss = f'cross entropy of {self.classes} classes' if self.classes else 'squared error'
        name, settings = self.optimizer
        loss += ''.join(f'; {how} of the inputs of layers {i} and {j}' for i, j, how in self.joins)
        loss += ''.join(f'; layer {i} twice' for i in self.twice) + '; tied' * self.tied
        return (f'samples {self.shape}: {layers}; {loss}; {name}({", ".join(f"{k}={v}" for k, v in settings.items())}); '
                f'batches of {self.sizes}; seed {self.seed}')

    @property
    def has_dropout(self):
        return any(name == 'Dropout' or name in ('Attention', 'Encoder') and rest[2] for name, *rest in self.layers)


def program_of(numbers):
    """Return the Program of a list of numbers."""
    draws = Draws(numbers)
    kind = draws.pick('vectors', 'sequences', 'images', 'tokens')
    if kind == 'vectors':
        shape = (draws.widths(),)
    elif kind == 'images':
        shape = draws.pick(1, 2, 3, 4), draws.sized((4, 5, 8, 9), (16, 15)), draws.sized((4, 6, 9), (16, 17))
    else:
        shape = draws.pick(1, 2, 5, 9), draws.widths(17)
    layers, now = [('Embedding', TOKENS, shape[1])] if kind == 'tokens' else [], shape
    shapes = {len(layers): now}                 # number of a layer -> shape of its input
    for _ in range(draws.pick(1, 2, 3, 4, 6)):
        layer, now = _LAYERS[len(now)](draws, now)
        layers += layer
        shapes[len(layers)] = now
    if len(now) == 2:
        layers.append(('Mean', 1))
        now = now[1:]
    elif len(now) == 3:
        layers.append(('Flatten',))
        now = (math.prod(now),)
    classes = draws.pick(3, 0, 2, 17)
    layers.append(('Linear', now[0], classes or 1))
    optimizer = draws.pick(('SGD', dict(lr=0.05)), ('Adam', dict(lr=0.01)), ('AdamW', dict(lr=0.01, weight_decay=0.1)),
                           ('SGD', dict(lr=0.05, momentum=0.9, nesterov=True)),
                           ('SGD', dict(lr=0.05, momentum=0.5, dampening=0.5, weight_decay=0.01)),
                           ('Adam', dict(lr=0.01, max_norm=0.5, weight_decay=0.01)), ('Muon', dict(lr=0.01)))
    if optimizer[0] == 'Muon' and not any(name == 'Linear' and min(rest[:2]) > 1 for name, *rest in layers[:-1]):
        optimizer = 'Adam', dict(lr=0.01, max_norm=1.0)
    least = 2 if 'BatchNorm' in str(layers) else 1
    rows = {'vectors': 1, 'images': 4}.get(kind, shape[0])           # of a large sample: its batches have fewer
    large = [n // rows for n in (900, 300, 96)]
    one, other = (max(draws.sized(small, large), least) for small in ((4, 1, 2, 7, 16, 33), (3, 1, 8, 40)))
    steps = draws.sized((2, 1, 3, 1, 2, 3, 2, 1, 5, 2, 3, 4, 8, 1, 2, 20), (2, 1, 3))
    program = Program(shape, layers, classes, optimizer, [other if draws.pick(0, 0, 1) else one for _ in range(steps)],
                      draws.pick(*range(50)))
    return _branched(draws, program, shapes)


def _branched(draws, program, shapes):
    """Return a Program of these layers, some of which share activations or parameters."""
    pairs = [(i, j) for j in shapes for i in shapes if i < j and shapes[i] == shapes[j]]
    joins = [(*draws.pick(*pairs), draws.pick('sum', 'product')) for _ in range(draws.pick(0, 1, 0, 2)) if pairs]
    alike = [i for i in shapes if i + 1 in shapes and shapes[i] == shapes[i + 1] and program.layers[i][0] in _WITH_PARAMETERS]
    twice = [draws.pick(*alike)] if alike and draws.pick(False, True) else []
    tied = False
    if program.layers[0][0] == 'Embedding' and program.layers[-1][1] == program.layers[0][2] and draws.pick(False, True):
        program.layers[-1], program.classes, tied = ('Linear', program.layers[0][2], TOKENS), TOKENS, True
    return replace(program, joins=tuple(joins), twice=tuple(twice), tied=tied)


def _of_vector(draws, shape):
    n, = shape
    kind = draws.pick('Linear', 'activation', 'LayerNorm', 'BatchNorm1d', 'Residual', 'Dropout', 'Softmax')
    if kind == 'Linear':
        width = draws.widths()
        return [('Linear', n, width, draws.pick(True, False))], (width,)
    if kind == 'Residual':
        return [('Residual', n, draws.pick(*ACTIVATIONS))], shape
    if kind == 'activation':
        return [(draws.pick(*ACTIVATIONS),)], shape
    if kind == 'Dropout':
        return [('Dropout', draws.pick(0.5, 0.1))], shape
    return [(kind,) if kind == 'Softmax' else (kind, n)] if n > 1 else [('Tanh',)], shape


def _of_sequence(draws, shape):
    T, n = shape
    kind = draws.pick('Linear', 'activation', 'LayerNorm', 'GRU', 'LSTM', 'RNN', 'Attention', 'Encoder', 'Dropout', 'Mean')
    if kind in ('GRU', 'LSTM', 'RNN'):
        hidden = draws.widths(17)
        both = draws.pick(False, True)
        return [(kind, n, hidden, 1, draws.pick(True, False), True, 0.0, both)], (T, hidden * (1 + both))
    if kind in ('Attention', 'Encoder'):
        width = draws.sized((4, 8, 16), (128, 64))
        heads, dropout = draws.pick(1, 2, 4), draws.pick(0.0, 0.0, 0.1)
        return [('Linear', n, width, True), (kind, width, heads, dropout, draws.pick(False, True))], (T, width)
    if kind == 'Mean':
        return [('Mean', 1)], (n,)
    layers, (n,) = _of_vector(Draws([{'Linear': 0, 'activation': 1, 'LayerNorm': 2, 'Dropout': 5}[kind],
                                     *(draws.pick(*range(8)) for _ in range(2))], draws.is_large), (n,))
    return layers, (T, n)


def _of_image(draws, shape):
    C, H, W = shape
    kind = draws.pick('Conv2d', 'activation', 'BatchNorm2d', 'MaxPool2d', 'AvgPool2d', 'GroupNorm', 'Flatten', 'Dropout')
    if kind == 'Conv2d':
        k, stride, padding, out = draws.pick(1, 2, 3), draws.pick(1, 2), draws.pick(0, 1), draws.sized((2, 1, 3, 8), (16, 8))
        k = min(k, H + 2 * padding, W + 2 * padding)
        return [(kind, C, out, k, stride, padding)], (out, *((n + 2 * padding - k) // stride + 1 for n in (H, W)))
    if kind in ('MaxPool2d', 'AvgPool2d'):
        return ([(kind, 2)], (C, H // 2, W // 2)) if min(H, W) > 3 else ([('Tanh',)], shape)
    if kind == 'Flatten':
        return [('Flatten',)], (C * H * W,)
    if kind == 'activation':
        return [(draws.pick(*ACTIVATIONS),)], shape
    groups = 2 if C % 2 == 0 else 1
    if kind == 'GroupNorm' and C * H * W == groups:         # one number has no variance
        return [('Tanh',)], shape
    return [{'GroupNorm': (kind, groups, C), 'BatchNorm2d': (kind, C), 'Dropout': (kind, 0.3)}[kind]], shape


_LAYERS = {1: _of_vector, 2: _of_sequence, 3: _of_image}


# of which a layer may run twice in a row
_WITH_PARAMETERS = 'Linear', 'Residual', 'LayerNorm', 'BatchNorm1d', 'BatchNorm2d', 'GroupNorm', 'Conv2d', 'GRU', 'LSTM', 'RNN'


class Net(nn.Module):
    """The layers of a program, one after the other, and its joins."""

    def __init__(self, program):
        super().__init__()
        self.program = program
        self.layers = nn.ModuleList([_layer(*layer) for layer in program.layers])
        if program.tied:
            self.layers[-1].weight = self.layers[0].weight

    def forward(self, x):
        seen = []
        for number, ((name, *_), layer) in enumerate(zip(self.program.layers, self.layers, strict=True)):
            for i, j, how in self.program.joins:
                if j == number:
                    x = x + seen[i] if how == 'sum' else x * seen[i]
            seen.append(x)
            for _ in range(1 + (number in self.program.twice)):
                x = _output(name, layer, x)
        return x


def _output(name, layer, x):
    """Return the output of a layer."""
    if name in ('GRU', 'LSTM', 'RNN'):
        return layer(x)[0]
    if name == 'Attention':
        return layer(x, x, x, need_weights=False)[0]
    if name == 'Embedding':
        return layer(x).transpose(0, 1)             # from (T, B, C)
    return x.mean(1) if name == 'Mean' else layer(x)


def _layer(name, *rest):
    if name == 'Mean':
        return nn.Identity()
    if name == 'Residual':
        return nn.Residual(nn.Sequential(nn.Linear(rest[0], rest[0]), getattr(nn, rest[1])()))
    if name == 'Attention':
        width, heads, dropout, _ = rest
        return nn.MultiheadAttention(width, heads, dropout, batch_first=True)
    if name == 'Encoder':
        width, heads, dropout, norm_first = rest
        return nn.TransformerEncoderLayer(width, heads, 2 * width, dropout, batch_first=True, norm_first=norm_first)
    if name == 'RNN':
        inputs, hidden, layers, bias, batch_first, dropout, both = rest
        return nn.RNN(inputs, hidden, layers, bias=bias, batch_first=batch_first, dropout=dropout, bidirectional=both)
    return getattr(nn, name)(*rest)


class Training:
    """The model, data and step of a program on the current device."""

    def __init__(self, program):
        rng = np.random.default_rng(program.seed)
        self.program, self.net = program, Net(program).reset_parameters(program.seed)
        self.params = self.net.params           # the module searches its tree for them
        self.buffers = self.net.buffer_arrays()
        _vary(self.params, np.random.default_rng(program.seed))
        name, settings = program.optimizer
        self.optimizer, self.history = getattr(optim, name)(self.params, **settings), History()
        self.x = put(rng.standard_normal((SAMPLES, math.prod(program.shape))).astype(np.float32))
        self.ids = put(rng.integers(0, TOKENS, (SAMPLES, program.shape[0])).astype(np.int32))
        self.numbers = put(np.arange(SAMPLES, dtype=np.int32).reshape(-1, 1))
        self.labels = put(rng.integers(0, program.classes or 2, (SAMPLES, 1)).astype(np.int32))
        self.one = put(np.ones((), np.float32))
        self.batches = [rng.integers(0, SAMPLES, size) for size in program.sizes]
        self.first = None           # loss and gradient of the first step without a plan

    def loss(self, rows):
        if self.program.layers[0][0] == 'Embedding':
            x = gather(self.ids, rows)
        else:
            x = gathered(self.x, self.numbers, rows).reshape(len(rows), *self.program.shape)
        y = self.net(Tensor(as_ndarray(x)))
        if not self.program.classes:
            return nn.MSELoss()(y, Tensor(as_ndarray(gathered(self.x, self.numbers, rows)))[:, :1])
        return nn.CrossEntropyLoss()(y, Tensor(as_ndarray(gather(self.labels, rows, name='labels').reshape(-1))))

    def gradient(self, rows):
        """Return the loss of a batch; its gradient is in the parameters."""
        self.params.zero_grads()
        loss = self.loss(rows)
        loss.backward(Tensor(as_ndarray(self.one)))
        if self.first is None and not backend.is_recorded():
            self.first = loss.item(), get(self.params.grads).astype(np.float64)
        return loss

    def step(self, rows):
        self.update(self.gradient(rows))

    def update(self, loss):
        self.optimizer.step()
        self.history.add(loss.device.kernel_array(loss.array).reshape(1), None, self.optimizer.norm)

    def steps(self):
        """Return the Steps that run step() from plans."""
        return Steps(self.step, self.params, x=self.x, ids=self.ids, numbers=self.numbers, labels=self.labels, one=self.one,
                     **self.buffers, **self.optimizer.arrays(), **self.history.arrays())

    def state(self):
        """Return {name: bytes} of losses, parameters, moments and statistics."""
        arrays = self.buffers | dict(parameters=self.params.values, m=self.params.m, v=self.params.v, losses=self.history.log)
        return {name: get(array).tobytes() for name, array in arrays.items()}

    def changing(self):
        """Return all arrays that a step changes."""
        params = self.params
        return [params.values, params.grads, params.m, params.v, *self.buffers.values(),
                *self.optimizer.arrays().values(), *self.history.arrays().values()]


def _vary(params, rng):
    """Change parameters that begin as a constant, so that each number of a bias or norm weight has an effect of its own, and
    few inputs of the next layer are exactly at the kink of an activation."""
    for name in params:
        part = params.view(params.values, name)
        values = get(part)
        if values.size and (values == values.flat[0]).all():
            part[...] = put((values + 0.2 * rng.standard_normal(values.shape)).astype(np.float32))


# ---- the ways --------------------------------------------------------------------------------------------------------

class Trained:
    """A program that runs several times from the same start, without a plan or from plans that it records once: recording
    takes longer than running."""

    def __init__(self, program):
        self.training = Training(program)
        self.steps = self.training.steps()
        self._start = [(array, put(get(array).copy())) for array in self.training.changing()]
        sizes, unused = set(program.sizes), {5, SAMPLES}.difference(program.sizes)
        # Rows of another batch size: the second of the program, if it has two.
        self.other = put(next((rows for rows in self.training.batches if len(rows) != program.sizes[0]), None)
                         if len(sizes) > 1 else np.arange(sorted(unused)[program.seed % len(unused)]))

    def at_the_start(self):
        """Return the Training as it was before all steps."""
        for array, start in self._start:
            array[...] = start
        return self.training

    def without_a_plan(self):
        """Run all steps; return the Training."""
        *others, last = self.at_the_start().batches
        for rows in others:
            self.training.step(put(rows))
        loss = self.training.gradient(put(last))
        before = self._updated('values', 'm', 'v', 'grads')
        self.training.update(loss)
        self.last = before, self._updated('values', 'm', 'v')
        return self.training

    def _updated(self, *names):
        """Return copies of these buffers of the parameters in float64."""
        return {name: get(getattr(self.training.params, name)).astype(np.float64) for name in names}

    def run(self, runner=None):
        """Run all steps from plans; return the Training.  runner: as of Steps"""
        self.at_the_start()
        if runner:
            self.steps.runner = runner
        for rows in self.training.batches:
            self.steps(put(rows))
        vars(self.steps).pop('runner', None)
        return self.training


def planned(trained):
    """Half of the programs record the plan of another batch size before their own, and half after them."""
    if trained.training.program.seed // 2 % 2:
        trained.steps.plan(trained.other)
    return trained.run()


def after_another_size(trained):
    trained.steps(trained.other)
    return trained.run()


def without_reuse(trained):
    plans = {}

    def run(plan):
        if plan not in plans:
            plans[plan] = spread(plan)
        plans[plan].run()
    return trained.run(run)


def spread(plan):
    """Return a plan with the launches of another, in which each array has memory of its own."""
    blocks, found, device = {}, copy.copy(plan), plan._device

    def moved(tensor, value):
        tensor = tensor.base or tensor          # there is one for each allocation
        if id(tensor) not in blocks:
            blocks[id(tensor)] = device.block(value.block.nbytes)
        block = blocks[id(tensor)]
        return _Reference(block, value.address - value.block.address + block.address, value.strides, value.dtype)
    found.actions = []
    for action in plan.replayed:
        values = list(action.values)
        for i, name in _pointers(action.kernel):
            if isinstance(values[i], _Reference):
                values[i] = moved(action.tensors[name], values[i])
        found.actions.append(action._replace(values=tuple(values)))
    found._compile()
    return found


def on_nan(trained):
    """The memory of a plan is full of NaN before each step."""
    def run(plan):
        for block in plan._blocks:
            block.owner[...] = 0xff
        plan.run()
    return trained.run(run)


def on_threads(trained, threads):
    before = backend.threads()
    backend.set_threads(threads)
    try:
        return trained.run()
    finally:
        backend.set_threads(before)


WAYS = {'planned': planned, 'after another batch size': after_another_size, 'without reuse of memory': without_reuse}
if not ON_GPU:
    WAYS |= {'in memory full of NaN': on_nan, 'on two threads': lambda trained: on_threads(trained, 2),
             'on three threads': lambda trained: on_threads(trained, 3)}


def difference(program):
    """Train a program in all ways.  Return text about the first difference, or None."""
    with np.errstate(all='ignore'):
        trained = Trained(program)
        expected = trained.without_a_plan().state()
        for name, way in WAYS.items():
            state = way(trained).state()
            if wrong := [part for part in expected if state[part] != expected[part]]:
                return f'{name}: {", ".join(wrong)} differ from those of steps without a plan'
        if ON_GPU:
            return difference_from_the_cpu(program)
        return difference_of_the_update(trained) or (
            None if program.has_dropout else difference_from_float64(trained.at_the_start()))


def difference_from_the_cpu(program):
    """Compare loss and gradient of the first step on a GPU with those on the CPU.  Return text about a difference, or None."""
    losses, gradients = [], []
    for device in (backend.current_device(), backend.HOST):
        with backend.on(device):
            training = Training(program)
            training.params.zero_grads()
            loss = training.loss(put(training.batches[0]))
            loss.backward()
            losses.append(loss.item())
            gradients.append(get(training.params.grads).astype(np.float64))
    if not abs(losses[0] - losses[1]) <= LOSS_TOLERANCE * max(abs(losses[1]), 1):
        return f'CPU: the loss is {losses[0]:.8g}, expected {losses[1]:.8g}'
    error = np.linalg.norm(gradients[0] - gradients[1]) / (np.linalg.norm(gradients[1]) + 1e-12)
    return f'CPU: the gradient differs by {error:.1e} of its norm' if error > DERIVATIVE_TOLERANCE else None


def difference_from_float64(training):
    """Compare loss and gradient of the first step of a Training with float64.  Return text about a difference, or None."""
    if training.first is None:
        training.gradient(training.batches[0])
    got, gradient = training.first
    formula = Formula(training, training.batches[0])
    exact = formula.loss
    if not abs(got - exact) <= LOSS_TOLERANCE * max(abs(exact), 1):
        # Norms of almost equal numbers enlarge rounding: then float32 numbers near those of the formula give other losses, too.
        spread = max(abs(formula.again(np.random.default_rng(seed)) - exact) for seed in range(4))
        return None if abs(got - exact) <= ROUNDINGS * spread else f'float64: the loss is {got:.8g}, expected {exact:.8g}'
    # The gradient of a logit is p - 1 in float32: of a loss below this, rounding p to 1 takes too many of its digits.
    if training.program.classes and exact < ROUNDING / DERIVATIVE_TOLERANCE:
        return None
    directions = {'a random direction': np.random.default_rng(0).choice([-1.0, 1.0], gradient.shape),
                  'the direction of the gradient': np.sign(gradient)}
    for name, direction in directions.items():
        def error(step, back=1.0, seed=None, direction=direction):
            return _derivative_error(training.params, formula, gradient, direction * step, -back * step * direction, seed)
        # A kink between the two points spoils one step size, and rarely all.
        errors = []
        for step in DERIVATIVE_STEPS:
            errors.append(error(step))
            if abs(errors[-1]) <= DERIVATIVE_TOLERANCE:
                break
        else:
            # If a kink is nearer than the smallest step, the derivative to one side is right.  If the norm of an almost
            # constant row bends the loss within it, the last two sizes disagree, and none can tell.  As with the loss, rounding
            # may change the derivative as much.
            near = max(abs(error(DERIVATIVE_STEPS[0], seed=seed) - errors[0]) for seed in range(4))
            if not (any(abs(error(sign * step, 0.0)) <= DERIVATIVE_TOLERANCE for sign in (1, -1))
                    or abs(errors[-2] - errors[-1]) > max(map(abs, errors[-2:])) / 2 or abs(errors[-1]) <= ROUNDINGS * near):
                return f'float64: the derivative in {name} differs by {errors[-1]:.1e} of the norm of the gradient'
    return None


def _derivative_error(params, formula, gradient, one, other, seed=None):
    """Return the error of the derivative between two points, as a share of the largest that the norm of the gradient allows.

    one, other: added to the parameters;  seed: of the rounding of the formula's results (default: they are not rounded)
    """
    kept, losses = params.values.copy(), []
    points = [(kept + step).astype(np.float32) for step in (one, other)]
    for point in points:
        params.values[...] = point
        losses.append(formula.again(None if seed is None else np.random.default_rng(seed)))
    params.values[...] = kept
    moved = points[0].astype(np.float64) - points[1]
    return (gradient @ moved - (losses[0] - losses[1])) / (np.linalg.norm(gradient) * np.linalg.norm(moved) + 1e-12)


def difference_of_the_update(trained):
    """Compare what the last step without a plan changes with float64.  Return text about a difference, or None."""
    (before, after), training = trained.last, trained.training
    if not all(np.abs(array).max(initial=0.0) <= LARGEST for array in before.values()):
        return None                             # also NaN; squares of larger gradients overflow in float32
    name, settings = training.program.optimizer
    is_matrix = np.zeros(len(before['values']), bool)
    for key in training.params:
        part = training.params.view(is_matrix, key)
        part[...] = name == 'Muon' and is_hidden_matrix(key, part.shape)
    expected, slack = update_of(name, settings, len(training.batches), is_matrix, **before)
    for key, exact in expected.items():
        kept = before[key] if key == 'values' else 0
        tolerance = SMALLEST + RTOL * np.abs(exact - kept).max(initial=0.0) + ROUNDING * np.abs(exact).max(initial=0.0)
        errors = np.abs(after[key] - exact)
        if key == 'values':
            errors = np.where(is_matrix, 0, np.where(errors <= slack, 0, errors - slack))
        error = errors.max(initial=0.0)
        if not error <= tolerance:
            return f'float64: {key} after the last step: one differs by {error:.1e}, tolerance {tolerance:.1e}'
    return None


def update_of(name, settings, t, is_matrix, values, m, v, grads):
    """Return {buffer: array} after step t of an optimiser, in float64, and how much rounding a gradient changes each value.
    Of Muon's matrices only m counts, since their step has its own test."""
    lr, decay, g, before = settings['lr'], settings.get('weight_decay', 0.0), grads, values
    norm = np.linalg.norm(g)
    if norm > settings.get('max_norm', np.inf):
        g = g * (settings['max_norm'] / norm)
    if name == 'AdamW':
        values = values * (1 - lr * decay)
    else:
        g = g + decay * values          # may cancel: the sum is then as inexact as its larger part
    if name == 'SGD':
        momentum = settings.get('momentum', 0.0)
        velocity = g if t == 1 else momentum * m + (1 - settings.get('dampening', 0.0)) * g
        step = g + momentum * velocity if settings.get('nesterov') else velocity
        return dict(values=values - lr * step, **dict(m=velocity) if momentum else {}), np.zeros_like(values)
    m = np.where(is_matrix, 0.95 * m + 0.05 * g, 0.9 * m + 0.1 * g)
    v = np.where(is_matrix, v, 0.999 * v + 0.001 * g**2)
    root = np.sqrt(v / (1 - 0.999**t)) + 1e-8
    rounding = ROUNDING * (np.abs(grads) + decay * np.abs(before)) * 0.1 / (1 - 0.9**t)
    return dict(values=values - lr * m / (1 - 0.9**t) / root, m=m, v=v), lr * rounding / root


class Formula:
    """The loss of a batch in float64: the formulas of the ops, listed once, since the layers take longer than they.

    loss: at the parameters of that time;  again(): at the present ones.  Other Tensors keep their values
    again(rng): with each result changed at random as much as rounding to float32 may change it
    """

    def __init__(self, training, rows):
        self._calls, self._places, self._results = [], {}, []
        with interpreted_by(self._record):
            y = training.loss(rows)
        self._end = self._places[id(y)]
        self.loss = float(np.asarray(y.array))

    def _record(self, op, inputs, constants):
        made = in_float64(op, inputs, constants)
        reference, named = formula_of(op, constants)
        self._calls.append((reference, [self._argument(x) for x in inputs],
                            {name: self._argument(x) for name, x in named.items()}))
        for y in made if isinstance(made, tuple) else (made,):
            self._places[id(y)] = len(self._places)
            self._results.append(y)                     # else another Tensor may get its id
        return made

    def _argument(self, x):
        """Return (number of a result, None), or (None, a value)."""
        return (self._places[id(x)], None) if id(x) in self._places else (None, x)

    def again(self, rng=None):
        found = []

        def value(argument):
            place, x = argument
            return as_double(x) if place is None else found[place]
        for reference, inputs, named in self._calls:
            y = reference(*map(value, inputs), **{name: value(x) for name, x in named.items()})
            for one in y if isinstance(y, tuple) else (y,):
                one = np.asarray(one)
                one = one if one.dtype.kind == 'i' else one.astype(np.float64)
                found.append(one if rng is None or one.dtype.kind == 'i' else
                             one * (1 + ROUNDING / 2 * rng.uniform(-1, 1, one.shape)))
        return float(found[self._end])


# ---- search ----------------------------------------------------------------------------------------------------------

def numbers_of(seed):
    """Return the numbers of the program with this seed."""
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(NUMBERS)]


def shrink(numbers, fails):
    """Return a short list of small numbers for which fails(numbers) is still true."""
    numbers, size = list(numbers), len(numbers)
    while size:
        at = 0
        while at < len(numbers):
            shorter = numbers[:at] + numbers[at + size:]
            if fails(shorter):
                numbers = shorter
            else:
                at += size
        size //= 2
    for at in range(len(numbers)):
        for smaller in (0, 1, 2, 3, numbers[at] % 60):
            changed = [*numbers[:at], smaller, *numbers[at + 1:]]
            if smaller < numbers[at] and fails(changed):
                numbers = changed
                break
    return numbers
