"""Comparison of gradients with central differences: pyops.gradcheck(f, inputs), and `python -m pyops gradcheck` for all ops.

A difference of two float32 values loses most of its digits.  So the function runs twice: with the ops for values and gradients,
and with their references in float64 for the differences.  An op class provides both:

    reference(*inputs, **named)     the formula in numpy, called as `apply` calls the op: inputs by position, parameters and
                                    settings by name.  Returns a float64 array or several
    example(normal)                 returns inputs and named arguments in float32, small enough to take all differences;
                                    normal(*shape) draws random numbers.  The check covers the gradient of each float32 array;
                                    other arrays are constants
"""
import functools
import inspect
import math
import operator
from types import BuiltinFunctionType
from typing import NamedTuple

import numpy as np

from pyops import autograd, backend, ops
from pyops.autograd import Tensor
from pyops.autograd.mode import interpreted_by, is_interpreted
from pyops.autograd.tape import constant
from pyops.ops.array import ArrayOp
from pyops.params import generator

TOLERANCE = 2e-5        # for sums in float32, relative to the largest element
STEP = 1e-5             # for differences in float64, with an error of about 1e-10
SLACK = 1e-3            # added to the largest element, for gradients that are 0
FLOAT32_STEP = 2e-2     # four points: a truncation error of order STEP^4, a rounding error of about 1e-7 / STEP
FLOAT32_TOLERANCE = 1e-3


_LOGICAL = operator.and_, operator.or_, operator.xor, operator.invert


class Double(np.ndarray):
    """A float64 array in place of the NDArray of a Tensor, with the NDArray attributes that functions of Tensors use."""
    device, is_mask = None, False

    def numpy(self):
        return np.asarray(self)

    stored = numpy

    def floor(self):
        return np.floor(self)

    def _function(self, name):
        return lambda *args: np.asarray(getattr(np, name)(*args)).view(Double)

    def is_compact(self):
        return self.flags.c_contiguous

    def _reduced(self, op, axis, keepdims):
        return getattr(np, op)(self, axis, keepdims=keepdims)

    def _sorting(self, axis, descending):
        return np.argsort(-self if descending else self, axis, kind='stable')


def settings_of(op):
    """Return the attributes of an op instance that its reference takes as arguments, by name."""
    named = _names(type(op))
    return {name: value for name, value in vars(op).items() if name in named}


@functools.cache
def _names(op):
    """Return the names of the arguments of an op's reference."""
    return frozenset(inspect.signature(op.reference).parameters)


def as_double(x):
    """Convert a Tensor to an array for the references: float32 to float64, int32 unchanged.  Other values are unchanged."""
    if not isinstance(x, Tensor):
        return x
    x = x.array.stored()
    return x.astype(np.float64) if x.dtype == np.float32 else x


def formula_of(op, constants):
    """Return the float64 reference of op and its named arguments.   RuntimeError if it has none"""
    kind = op if isinstance(op, type) else type(op)
    reference = op if isinstance(op, BuiltinFunctionType) else getattr(kind, 'reference', None)
    if reference is None:
        raise RuntimeError(f'gradcheck: {kind.__name__} has no float64 formula: give the class a function `reference`, '
                           'called with arrays as the op is, or pass float32=True')
    if reference is not op and kind is not op:
        constants = settings_of(op) | constants
    return reference, {name: value for name, value in constants.items() if name != 'name'}      # of the op, for plans


def in_float64(op, inputs, constants):
    """Apply the float64 reference of op; replaces `apply` during differences.  A comparison is a function of `operator`."""
    reference, constants = formula_of(op, constants)
    if op in _LOGICAL:                  # masks are stored as floats, which numpy's bit operations reject
        inputs = [x.array.numpy().astype(bool) if isinstance(x, Tensor) and x.array.dtype.kind in 'bf' else x for x in inputs]
    y = reference(*map(as_double, inputs), **{name: as_double(value) for name, value in constants.items()})
    return tuple(map(_result, y)) if isinstance(y, tuple) else _result(y)


def _result(y):
    y = np.asarray(y)
    array = (y if y.dtype.kind == 'i' else y.astype(np.float64)).view(Double)
    array.is_mask = y.dtype.kind == 'b'
    return constant(array)


class Row(NamedTuple):
    """The worst element of one array."""
    name: str
    shape: tuple
    at: tuple
    got: float
    want: float
    error: float        # relative to the largest expected element
    ok: bool

    @classmethod
    def of(cls, name, got, want, tolerance):
        if not got.size:
            return cls(name, got.shape, (), 0.0, 0.0, 0.0, True)
        distance = np.where(np.isfinite(got), np.abs(got - want), np.inf)
        at = np.unravel_index(distance.argmax(), distance.shape)
        error = distance[at] / (np.abs(want).max() + SLACK)
        return cls(name, got.shape, tuple(map(int, at)), float(got[at]), float(want[at]), float(error),
                   bool(error <= tolerance))


class Report:
    """The rows of a check.  True if all rows are ok; str() returns a table, as_json() a dict of JSON values."""
    HEADINGS = ('', 'shape', 'worst at', 'analytic', 'numeric', 'error', '')

    def __init__(self, rows, tolerance):
        self.rows, self.tolerance = rows, tolerance

    @property
    def ok(self):
        return all(row.ok for row in self.rows)

    __bool__ = ok.fget

    def as_json(self):
        """Return {'passed': bool, 'tolerance': float,
        'arrays': [a dict for each row]}.  Numbers that are not finite are None."""
        return {'passed': self.ok, 'tolerance': self.tolerance, 'arrays': [
            {'name': row.name, 'shape': list(row.shape), 'worst_at': list(row.at), 'analytic': _finite(row.got),
             'numeric': _finite(row.want), 'error': _finite(row.error), 'passed': row.ok} for row in self.rows]}

    def __str__(self):
        lines = [self.HEADINGS]
        lines += [(row.name, str(row.shape), str(list(row.at)), f'{row.got:.6g}', f'{row.want:.6g}', f'{row.error:.1e}',
                   'ok' if row.ok else f'WRONG: above {self.tolerance:g}') for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return '\n'.join('  '.join(cell.ljust(width) if i in (0, 1, 2, 6) else cell.rjust(width)
                                   for i, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
                         for line in lines)


def _finite(value):
    return value if math.isfinite(value) else None


def gradcheck(f, inputs, tolerance=None, float32=False, seed=0):
    """Compare the outputs of f with f in float64, and the gradients of its inputs with central differences.  Return a Report.

    f           a function of Tensors that returns a Tensor or a tuple of Tensors
    inputs      its arguments: Tensors, arrays of floats or numbers, or a dict of these by name.  int32 arrays are constants.
    tolerance   the largest error of an element, relative to the largest element of its array; 2e-5 suits a few ops in sequence
    float32     take the differences of f in float32 with a large step, to 1e-3: for an f that computes gradients itself

    The upstream gradient is random: with all ones, the gradient of a softmax is 0 and tests nothing.  If f has a kink, such as
    ReLU at 0, the differences of an input within 1e-5 of the kink (float32: 4e-2) are invalid.
    """
    named = dict(inputs) if isinstance(inputs, dict) else {f'input {i}': x for i, x in enumerate(_sequence(inputs))}
    tensors = {name: x.detach() if isinstance(x, Tensor) else Tensor(x) for name, x in named.items()}
    tensors = {name: Tensor(x.array, requires_grad=x.dtype.kind == 'f') for name, x in tensors.items()}
    leaves = {name: x for name, x in tensors.items() if x.requires_grad}
    if not leaves:
        raise ValueError('gradcheck: expected at least one input of floats, got none')
    if tolerance is None:
        tolerance = FLOAT32_TOLERANCE if float32 else TOLERANCE

    ys = _outputs(f(*tensors.values()))
    rng = generator(seed, 'upstream gradient')      # independent of the streams of the inputs
    dys = [rng.standard_normal(y.shape).astype(np.float32) for y in ys]
    if not any(y.requires_grad for y in ys):
        raise RuntimeError('gradcheck: what f gives depends on none of its inputs')
    counted = [(y, Tensor(dy, dtype=y.dtype)) for y, dy in zip(ys, dys, strict=True) if y.requires_grad]
    gradients = autograd.grad([y for y, _ in counted], leaves.values(), [dy for _, dy in counted], allow_unused=True)

    evaluate = _float32_values(f) if float32 else _float64_values(f)
    values = {name: x.numpy().astype(np.float64) if name in leaves and not float32 else x.numpy().copy()
              for name, x in tensors.items()}
    rows = []
    for i, (y, want) in enumerate(zip(ys, evaluate(values), strict=True)):
        rows.append(Row.of(f'y{i}' if len(ys) > 1 else 'y', y.numpy(), want, tolerance))

    def loss():
        return sum((y * dy).sum() for y, dy in zip(evaluate(values), dys, strict=True))

    for (name, x), gradient in zip(leaves.items(), gradients, strict=True):
        got = np.zeros(x.shape) if gradient is None else gradient.numpy()
        rows.append(Row.of(f'd {name}', got, central_differences(loss, values[name], float32), tolerance))
    return Report(rows, tolerance)


def _sequence(inputs):
    return [inputs] if isinstance(inputs, (Tensor, np.ndarray)) else list(inputs)


def _outputs(y):
    return list(y) if isinstance(y, (tuple, list)) else [y]


def _float64_values(f):
    def evaluate(values):
        with interpreted_by(in_float64):
            ys = _outputs(f(*(constant(value.view(Double)) for value in values.values())))
        return [np.asarray(y.array) for y in ys]
    return evaluate


def _float32_values(f):
    def evaluate(values):
        ys = _outputs(f(*(Tensor(value, requires_grad=value.dtype == np.float32) for value in values.values())))
        return [y.numpy().astype(np.float64) for y in ys]
    return evaluate


def central_differences(loss, value, float32=False):
    """Return the gradient of loss() with respect to the array `value`, which loss reads, by changing one element at a time.

    float32: for a loss computed in float32, use four points and a large step.
    """
    result = np.zeros(value.shape)
    for at in np.ndindex(value.shape):
        kept = value[at]

        def rise(step, at=at, kept=kept):
            """Return the slope of the loss between kept - step and kept + step, both rounded to the dtype of value."""
            value[at] = kept + step
            high, above = float(value[at]), loss()
            value[at] = kept - step
            low, below = float(value[at]), loss()
            return (above - below) / (high - low)

        if float32:
            step = FLOAT32_STEP * max(1.0, abs(float(kept)))
            result[at] = (4 * rise(step) - rise(2 * step)) / 3
        else:
            result[at] = rise(STEP)
        value[at] = kept
    return result


# ---- every op ----------------------------------------------------------------------------------------------------------

def every_op():
    """Return the op classes of the package: kernel ops, then array ops."""
    from pyops.ops import elementwise, matmul, reductions, shapes
    found = [getattr(ops, name) for name in ops.__all__ if isinstance(getattr(ops, name), type)]
    for module in (elementwise, matmul, reductions, shapes):
        found += [op for op in vars(module).values()
                  if isinstance(op, type) and issubclass(op, ArrayOp) and op.__module__ == module.__name__]
    return found


def find_op(name):
    """Return the op class with this name, None if there is none.  'LayerNorm', 'layer_norm' and 'layernorm' are equivalent."""
    return {op.__name__.lower(): op for op in every_op()}.get(name.replace('_', '').lower())


def check_op(op, seed=0):
    """Check an op class on its example and return a Report."""
    rng = np.random.default_rng(seed)
    inputs, named = op.example(lambda *shape: rng.standard_normal(shape).astype(np.float32))
    arrays = {name: value for name, value in named.items() if isinstance(value, np.ndarray)}
    settings = {name: value for name, value in named.items() if name not in arrays}
    free = [i for i, x in enumerate(inputs) if isinstance(x, np.ndarray) and x.dtype == np.float32]
    given = {f'x{i}' if len(free) > 1 else 'x': inputs[i] for i in free} | arrays

    def f(*tensors):
        # constants: numpy arrays for the reference, arrays on the current device for the op
        args = list(inputs) if is_interpreted() else [backend.put(x) for x in inputs]
        for i, x in zip(free, tensors, strict=False):
            args[i] = x
        return autograd.apply(op, *args, **dict(zip(arrays, tensors[len(free):], strict=True)), **settings)

    return gradcheck(f, given)
