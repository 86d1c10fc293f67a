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

    def _unary(self, op):
        return getattr(np, op)(self)

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

    @classmethod
    def within(cls, name, got, want, atol, rtol):
        """Return the row of the element that exceeds atol + rtol |want| by most, PyTorch's rule."""
        row = cls.of(name, got, want, math.inf)
        if not got.size:
            return row
        distance, allowed = np.where(np.isfinite(got), np.abs(got - want), np.inf), atol + rtol * np.abs(want)
        at = np.unravel_index((distance - allowed).argmax(), distance.shape)
        return row._replace(at=tuple(map(int, at)), got=float(got[at]), want=float(want[at]),
                            ok=bool((distance <= allowed).all()))


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
        limit = ' + '.join(f'{n:g}{of}' for n, of in zip(self.tolerance, ('', ' of the element'), strict=True)) \
            if isinstance(self.tolerance, tuple) else f'{self.tolerance:g}'
        lines += [(row.name, str(row.shape), str(list(row.at)), f'{row.got:.6g}', f'{row.want:.6g}', f'{row.error:.1e}',
                   'ok' if row.ok else f'WRONG: above {limit}') for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return '\n'.join('  '.join(cell.ljust(width) if i in (0, 1, 2, 6) else cell.rjust(width)
                                   for i, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
                         for line in lines)


def _finite(value):
    return value if math.isfinite(value) else None


def gradcheck(f, inputs, tolerance=None, float32=False, seed=0, *, eps=None, atol=None, rtol=None, raise_exception=False):
    """Compare the outputs of f with f in float64, and the gradients of its inputs with central differences.  Return a Report.

    f           a function of Tensors that returns a Tensor or a tuple of Tensors
    inputs      its arguments: Tensors, arrays of floats or numbers, or a dict of these by name.  int32 arrays are constants.
    tolerance   the largest error of an element, relative to the largest element of its array; 2e-5 suits a few ops in sequence
    float32     take the differences of f in float32 with a large step, to 1e-3: for an f that computes gradients itself
    eps         the step of the differences; None: 1e-5, with float32 2e-2 and more
    atol, rtol  if one is given: an element may differ by atol + rtol times its size, PyTorch's rule, in place of tolerance; the
                other is then 1e-5 or 1e-3
    raise_exception     raise a RuntimeError with the table of the Report if a row is wrong

    The upstream gradient is random: with all ones, the gradient of a softmax is 0 and tests nothing.  If f has a kink, such as
    ReLU at 0, the differences of an input within 1e-5 of the kink (float32: 4e-2) are invalid.
    """
    named = dict(inputs) if isinstance(inputs, dict) else {f'input {i}': x for i, x in enumerate(_sequence(inputs))}
    tensors = {name: x.detach() if isinstance(x, Tensor) else Tensor(x) for name, x in named.items()}
    if tolerance is None:
        tolerance = FLOAT32_TOLERANCE if float32 else TOLERANCE
    if (atol, rtol) != (None, None):
        tolerance = 1e-5 if atol is None else atol, 1e-3 if rtol is None else rtol
    evaluate = _own_values(f) if float32 else _float64_values(f)
    return _report(f, tensors, evaluate, tolerance, seed, eps, float32, raise_exception)


def _report(f, tensors, evaluate, tolerance, seed, eps, float32, raise_exception):
    """Return the Report of f for {name: Tensor}.   evaluate: {name: numpy array} -> the outputs as float64 arrays
    tolerance: one number, or the pair atol and rtol"""
    tensors = {name: Tensor(x.array, requires_grad=x.dtype.kind == 'f') for name, x in tensors.items()}
    leaves = {name: x for name, x in tensors.items() if x.requires_grad}
    if not leaves:
        raise ValueError('gradcheck: expected at least one input of floats, got none')

    ys = _outputs(f(*tensors.values()))
    rng = generator(seed, 'upstream gradient')      # independent of the streams of the inputs
    dys = [rng.standard_normal(y.shape).astype(np.float32) for y in ys]
    if not any(y.requires_grad for y in ys):
        raise RuntimeError('gradcheck: what f gives depends on none of its inputs')
    counted = [(y, Tensor(dy, dtype=y.dtype)) for y, dy in zip(ys, dys, strict=True) if y.requires_grad]
    gradients = autograd.grad([y for y, _ in counted], leaves.values(), [dy for _, dy in counted], allow_unused=True)

    values = {name: x.numpy().astype(np.float64) if name in leaves and not float32 else x.numpy().copy()
              for name, x in tensors.items()}
    make = functools.partial(Row.within, atol=tolerance[0], rtol=tolerance[1]) if isinstance(tolerance, tuple) else \
        functools.partial(Row.of, tolerance=tolerance)
    rows = []
    for i, (y, want) in enumerate(zip(ys, evaluate(values), strict=True)):
        rows.append(make(f'y{i}' if len(ys) > 1 else 'y', y.numpy(), want))

    def loss():
        return sum((y * dy).sum() for y, dy in zip(evaluate(values), dys, strict=True))

    for (name, x), gradient in zip(leaves.items(), gradients, strict=True):
        got = np.zeros(x.shape) if gradient is None else gradient.numpy()
        rows.append(make(f'd {name}', got, central_differences(loss, values[name], float32, eps)))
    report = Report(rows, tolerance)
    if raise_exception and not report:
        raise RuntimeError(f'gradcheck: a gradient differs from central differences\n{report}')
    return report


# ---- PyTorch's functions, in pyops.autograd ------------------------------------------------------------------------------

# options of PyTorch's checks without effect here
_IGNORED = frozenset(('nondet_tol check_undefined_grad check_grad_dtypes check_batched_grad check_batched_forward_grad '
                      'check_forward_ad check_backward_ad check_fwd_over_rev check_rev_over_rev fast_mode masked '
                      'gen_non_contig_grad_outputs').split())


def torch_gradcheck(func, inputs, *, eps=1e-6, atol=1e-5, rtol=1e-3, raise_exception=True, float32=False, **options):
    """Return whether the gradients of func agree with central differences: torch.autograd.gradcheck.

    inputs      the arguments of func: a Tensor or several; those that require a gradient are checked, others passed on
    eps         the step of the differences
    atol, rtol  an element may differ by atol + rtol times its size
    raise_exception     False: return False for a wrong gradient; else it is a RuntimeError
    float32     as in pyops.gradcheck

    Differences of float64 inputs are taken of func itself, of float32 inputs of its formula in float64.  The other
    options of PyTorch have no effect: func has one random upstream gradient.  ValueError if no input requires a gradient.
    """
    _check_options('gradcheck', options)
    given = _sequence(inputs)
    at = [i for i, x in enumerate(given) if isinstance(x, Tensor) and x.requires_grad]
    if not at:
        raise ValueError('gradcheck: expected a Tensor that requires a gradient among the inputs, got none')
    kept = [i for i, y in enumerate(_outputs(func(*given))) if isinstance(y, Tensor) and y.requires_grad]

    def f(*checked):
        args = dict(enumerate(given)) | dict(zip(at, checked, strict=True))
        ys = _outputs(func(*args.values()))
        return tuple(ys[i] for i in kept)
    if not kept:
        raise RuntimeError('gradcheck: what func gives depends on no input that requires a gradient')
    is_double = all(given[i].dtype == np.float64 for i in at)
    evaluate = _own_values(f) if is_double or float32 else _float64_values(f)
    return bool(_report(f, {f'input {i}': given[i].detach() for i in at}, evaluate, (atol, rtol), 0, None if float32 else eps,
                        float32, raise_exception))


def torch_gradgradcheck(func, inputs, grad_outputs=None, *, eps=1e-6, atol=1e-5, rtol=1e-3, raise_exception=True, **options):
    """Return whether the second derivatives of func agree with differences of its gradients: torch.autograd.gradgradcheck.

    grad_outputs    the upstream gradients of the results that require one; None: random ones.  Otherwise as gradcheck; for
    inputs of float32 the differences have a large step, and atol and rtol are at least 1e-3.
    """
    _check_options('gradgradcheck', options)
    given = _sequence(inputs)
    ys = [y for y in _outputs(func(*given)) if isinstance(y, Tensor) and y.requires_grad]
    if grad_outputs is None:
        rng = generator(0, 'upstream gradient')
        grad_outputs = [Tensor(rng.standard_normal(y.shape), requires_grad=True, dtype=y.dtype) for y in ys]

    def first(*args):
        xs, dys = args[:len(given)], args[len(given):]
        ys = [y for y in _outputs(func(*xs)) if isinstance(y, Tensor) and y.requires_grad]
        found = autograd.grad(ys, [x for x in xs if isinstance(x, Tensor) and x.requires_grad], dys, create_graph=True,
                              allow_unused=True)
        return tuple(one for one in found if one is not None)
    float32 = any(isinstance(x, Tensor) and x.dtype == np.float32 for x in given)
    atol, rtol = (max(FLOAT32_TOLERANCE, one) if float32 else one for one in (atol, rtol))
    return torch_gradcheck(first, (*given, *_sequence(grad_outputs)), eps=eps, atol=atol, rtol=rtol,
                           raise_exception=raise_exception, float32=float32)


def _check_options(who, options):
    unknown = sorted(options.keys() - _IGNORED)
    if unknown:
        raise TypeError(f'{who}: {", ".join(unknown)}: no such option, expected eps, atol, rtol, raise_exception or one of '
                        f'{", ".join(sorted(_IGNORED))}')


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


def _own_values(f):
    """Return evaluate(values) that runs f itself, in the dtype of the values."""
    def evaluate(values):
        ys = _outputs(f(*(Tensor(value, value.dtype.kind == 'f', dtype=value.dtype) for value in values.values())))
        return [y.numpy().astype(np.float64) for y in ys]
    return evaluate


def central_differences(loss, value, float32=False, eps=None):
    """Return the gradient of loss() with respect to the array `value`, which loss reads, by changing one element at a time.

    float32: for a loss computed in float32, use four points and a large step.  eps: the step, None: one that suits the dtype
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
            step = eps or FLOAT32_STEP * max(1.0, abs(float(kept)))
            result[at] = (4 * rise(step) - rise(2 * step)) / 3
        else:
            result[at] = rise(eps or STEP)
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
