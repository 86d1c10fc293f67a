"""Methods: the methods that NDArray and Tensor share, written once, and numpy's protocols for both.

A method has numpy's name, arguments and result if numpy has the name, else PyTorch's; docs/ndarray.md compares them.  Axes are
called `axis` (None, an int, or several) and `keepdims`; PyTorch's `dim` and `keepdim` are accepted everywhere.

A class defines a few primitives, on which the methods below are built:

    shape, dtype, device
    _unary(op)  _reduced(op, axis, keepdims)  and the operators
    reshape, permute, broadcast_to, flip, copy, [], where(condition, a, b), concatenate, take_rows, cumulated, argsort
    _constant(array)    wraps an NDArray that has no gradient
    _plain()            returns the NDArray
    _moved(device)      returns x on a device, given as such or by its name
"""
from __future__ import annotations

import functools
import inspect
import math
import operator
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from pyops.backend.arrays import BF16
from pyops.errors import ShapeError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import DTypeLike

    from pyops.typing import Axis, Numbers, Shape

Function = TypeVar('Function', bound='Callable[..., Any]')
# PyTorch's names of arguments -> the names here, of which a function has at most one
TORCH_NAMES = {
    'dim': ('axis',), 'keepdim': ('keepdims',), 'dims': ('axis', 'axes', 'reps'), 'axes': ('axis', 'widths'),
    'input': ('x', 'a', 'ids', 'labels'), 'other': ('b',), 'target': ('labels',), 'tensor': ('x', 'labels'), 'x1': ('a',),
    'x2': ('b',), 'dim0': ('a',), 'dim1': ('b', 'axis1'), 'dim2': ('axis2',), 'axis1': ('a',), 'axis2': ('b',),
    'pad': ('widths',), 'p': ('ord',), 'split_size_or_sections': ('sizes',), 'split_size': ('sizes',), 'diagonal': ('k',),
    'shifts': ('shift',), 'size': ('shape',), 'end': ('stop',), 'steps': ('num',),
    'indices_or_sections': ('sections',), 'vec2': ('other',), 'vec': ('other',), 'mat2': ('other',)}


# names of devices for x.to: PyTorch's, and ours of a GPU
DEVICE_NAMES = 'cpu', 'cuda', 'cuda:0', 'gpu'


def numpy_dtype(dtype: DTypeLike) -> np.dtype:
    """Return np.dtype(dtype), and BF16 for bfloat16, a name that numpy knows only once ml_dtypes was imported."""
    if isinstance(dtype, str) and dtype == 'bfloat16':
        return BF16
    found = np.dtype(dtype)
    return BF16 if found.kind == 'V' and found.name == 'bfloat16' else found


# reductions that take numpy's dtype, out, initial and where -> the number that changes no result; None: there is none
_REDUCTIONS = {'sum': 0, 'mean': 0, 'prod': 1, 'max': None, 'min': None, 'any': 0, 'all': 1}
_OF_NUMPY = 'dtype', 'out', 'initial', 'where'


def _reduced_as_numpy(reduce: Callable[..., Any], x: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Run a reduction with arguments of numpy.  dtype: x is converted to it first; out: an array that gets the result;
    initial: an element in addition; where: a mask of the elements that count, which max and min take with initial."""
    who = reduce.__name__
    dtype, out, initial, where = (named.pop(name, None) for name in _OF_NUMPY)
    if initial is not None and who in ('mean', 'any', 'all'):
        raise TypeError(f'{who}: initial: only sum, prod, max and min take it')
    x, count = x if dtype is None else x.astype(dtype), None
    if where is not None and where is not True:
        neutral = initial if _REDUCTIONS[who] is None else _REDUCTIONS[who]
        if neutral is None:
            raise ValueError(f'{who}: where: expected `initial` as well, the result where no element counts')
        choose = x._function('where')
        if who == 'mean':
            count = choose(x._operand(where), 1, 0).broadcast_to(x.shape).sum(*args, **named)
        x = choose(where, x, neutral)
    if initial is not None and not x.size:
        y = x.sum(*args, **named) + initial
    else:
        y = reduce(x, *args, **named) if count is None else x.sum(*args, **named) / count
        if initial is not None:
            y = (y + initial if who == 'sum' else y * initial if who == 'prod' else
                 y.maximum(initial) if who == 'max' else y.minimum(initial))
    return _stored(y, out)


def _stored(y: Any, out: Any) -> Any:
    """Return y, or write it into `out`, unless that is None, and return that."""
    if out is None:
        return y
    if out.shape != y.shape:
        raise ShapeError(f'out: expected shape {y.shape}, got {out.shape}')
    out[...] = y.numpy() if isinstance(out, np.ndarray) else y
    return out


# other methods that take numpy's out; the first ones also its dtype
_CONVERTED = frozenset(('cumsum', 'cumprod', 'var', 'std', 'trace'))
_WITH_OUT = _CONVERTED | {'argmax', 'argmin', 'ptp', 'take', 'clip', 'round', 'dot', 'diagonal'}


def _stored_as_numpy(method: Any, x: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Run a method with numpy's out and dtype: x is converted to the dtype first."""
    out, dtype = named.pop('out', None), named.pop('dtype', None)
    if dtype is not None and method.__name__ not in _CONVERTED:
        raise TypeError(f'{method.__name__}: dtype: only {", ".join(sorted(_CONVERTED | _REDUCTIONS.keys()))} take it')
    return _stored(method(x if dtype is None else x.astype(dtype), *args, **named), out)


def accepts_torch_names(function: Function) -> Function:
    """Decorate a function that takes `axis` or `keepdims`: accept them as `dim`, `dims` and `keepdim` as well; x as `input` ...
    A reduction also takes numpy's dtype, out, initial and where.
    """
    own = {name for name, one in inspect.signature(function).parameters.items() if one.kind is not one.VAR_POSITIONAL}
    names = {theirs: next(name for name in ours if name in own) for theirs, ours in TORCH_NAMES.items()
             if theirs not in own and own.intersection(ours)}

    takes_numpys, takes_out = (function.__name__ in kinds and 'self' in own for kinds in (_REDUCTIONS, _WITH_OUT))

    @functools.wraps(function)
    def wrapper(*args: Any, **named: Any) -> Any:
        if named:
            for given in named.keys() & names.keys():
                name = names[given]
                if name in named:
                    raise TypeError(f'{function.__name__}: got {name} and also {given}, its name in PyTorch; give one of them')
                named[name] = named.pop(given)
            if takes_numpys and isinstance(args[0], Methods) and not named.keys().isdisjoint(_OF_NUMPY):
                return _reduced_as_numpy(function, args[0], args[1:], named)
            if takes_out and isinstance(args[0], Methods) and ('out' in named or 'dtype' in named):
                return _stored_as_numpy(function, args[0], args[1:], named)
        return function(*args, **named)
    return wrapper              # type: ignore[return-value]


def accepts_tuple(*names: str) -> Callable[[Function], Function]:
    """Decorate a method f(*values): accept the values also as one tuple with one of these names, as in f(shape=(2, 3))."""
    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def wrapper(self: Any, *values: Any, **named: Any) -> Any:
            if not named:
                return function(self, *values)
            is_fortran = 'order' in named and function.__name__ == 'reshape' and is_fortran_order(self, named.pop('order'))
            for name in names:
                if name in named:
                    if values:
                        raise TypeError(f'{function.__name__}: got values and also {name}; give one of them')
                    values = (named.pop(name),)
            if is_fortran:
                return function(self.T, tuple(several(values)[::-1]), **named).T
            return function(self, *values, **named)
        return wrapper              # type: ignore[return-value]
    return decorate


def is_fortran_order(x: Any, order: str | None) -> bool:
    """Return whether numpy's `order` counts elements along the first axis first.  A and K are the order in memory."""
    if order not in ('C', 'F', 'A', 'K', None):
        raise ValueError(f"order: expected 'C', 'F', 'A' or 'K', got {order!r}")
    return order == 'F' or order in ('A', 'K') and not x._plain().is_compact() and x._plain().T.is_compact()


@functools.lru_cache(8192, typed=True)          # typed: 1.0 equals 1 but is not an axis
def normal_axes(axis: Axis, ndim: int) -> Shape:
    """Return axes (None for all, an int, or a tuple) as non-negative ints in the given order.

    Raises np.exceptions.AxisError, a ValueError and IndexError, beyond ndim, and ValueError for an axis that is given twice.
    """
    if axis is None:
        return tuple(range(ndim))
    found = []
    for one in axis if isinstance(axis, tuple) else (axis,):
        one = operator.index(one)               # type: ignore[arg-type]
        if not -ndim <= one < ndim:
            raise np.exceptions.AxisError(one, ndim)
        found.append(one % ndim)
    if len(set(found)) < len(found):
        raise ValueError(f"duplicate value in 'axis': {axis}")
    return tuple(found)


def as_axes(axis: Any) -> Any:
    """Return several axes as a tuple; None and an int unchanged."""
    return tuple(axis) if isinstance(axis, list | range) else axis


@functools.lru_cache(8192, typed=True)
def _squeezed(shape: Shape, axis: Axis) -> Shape:
    """Return a shape without these axes of size 1, or without all.  ValueError if one has another size."""
    axes = normal_axes(axis, len(shape))
    if axis is not None and any(shape[d] != 1 for d in axes):
        raise ValueError(f'squeeze: cannot remove axis {axis} of shape {shape}: its size is not 1')
    return tuple(n for d, n in enumerate(shape) if n != 1 or d not in axes)


def softmax_axes(axis: Axis, ndim: int) -> Axis:
    """Return the axes of a softmax; those of an array of shape (), also given as 0 or -1, as in PyTorch, are none."""
    return () if not ndim and axis in (0, -1) else as_axes(axis)


def flipped_axes(axes: tuple[Any, ...], axis: Axis, ndim: int) -> Shape:
    """Return the axes of x.flip(*axes) or x.flip(axis=axis): all if neither is given."""
    given = as_axes(axis) if axes in ((), (None,)) else several(axes)
    return normal_axes(given, ndim)


def several(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the values of a call f(1, 2) or f((1, 2)) as a tuple."""
    return values if len(values) != 1 or hasattr(values[0], '__index__') else tuple(values[0])


def arrays_of(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arrays of a call f(x, y) or f([x, y]) as a tuple."""
    first = operands[0] if len(operands) == 1 else None
    return tuple(first) if isinstance(first, list | tuple) and any(isinstance(x, Methods) for x in first) else operands


class Methods:
    """The methods that NDArray and Tensor have in common."""
    __slots__ = ()

    if TYPE_CHECKING:                   # the primitives
        @property
        def shape(self) -> Shape: ...
        @property
        def ndim(self) -> int: ...
        @property
        def size(self) -> int: ...
        dtype: Any
        device: Any
        def __getitem__(self, index: Any) -> Any: ...
        _unary: Callable[..., Any]
        _reduced: Callable[..., Any]
        _cumulated: Callable[..., Any]
        _pieces: Callable[..., Any]
        _constant: Callable[..., Any]
        _plain: Callable[..., Any]
        _operand: Callable[..., Any]
        _function: Callable[..., Any]
        _moved: Callable[..., Any]
        _put_at: Callable[..., Any]
        take_rows: Callable[..., Any]
        reshape: Callable[..., Any]
        permute: Callable[..., Any]
        broadcast_to: Callable[..., Any]
        flip: Callable[..., Any]
        copy: Callable[..., Any]
        astype: Callable[..., Any]
        maximum: Callable[..., Any]
        minimum: Callable[..., Any]
        argmax: Callable[..., Any]
        __add__: Any
        __sub__: Any
        __mul__: Any
        __truediv__: Any
        __rtruediv__: Any
        __matmul__: Any
        __pow__: Any
        __neg__: Any
        __abs__: Any
        __floordiv__: Any
        trunc: Callable[..., Any]

    # ---- element by element ------------------------------------------------------------------------

    def exp(self) -> Self:
        """Return e^x."""
        return self._unary('exp')

    def log(self) -> Self:
        """Return the natural logarithm."""
        return self._unary('log')

    def sqrt(self) -> Self:
        """Return the square root."""
        return self._unary('sqrt')

    def tanh(self) -> Self:
        """Return the hyperbolic tangent."""
        return self._unary('tanh')

    def sigmoid(self) -> Self:
        """Return 1 / (1 + e^-x)."""
        return self._unary('sigmoid')

    def sin(self) -> Self:
        """Return the sine."""
        return self._unary('sin')

    def cos(self) -> Self:
        """Return the cosine."""
        return self._unary('cos')

    def tan(self) -> Self:
        """Return the tangent."""
        return self._unary('tan')

    def log1p(self) -> Self:
        """Return log(1 + x), accurate for small x."""
        return self._unary('log1p')

    def floor(self) -> Self:
        """Return the largest whole number that is at most x, without a gradient."""
        return self._unary('floor')

    def ceil(self) -> Self:
        """Return the smallest whole number that is at least x, without a gradient."""
        return self._unary('ceil')

    def abs(self) -> Self:
        """Return the absolute value."""
        return abs(self)

    def relu(self) -> Self:
        """Return max(x, 0)."""
        return self.maximum(0)

    def square(self) -> Self:
        """Return x * x."""
        return self * self

    def reciprocal(self) -> Self:
        """Return 1 / x."""
        return 1.0 / self

    def sign(self) -> Self:
        """Return 1, 0 or -1 in the dtype of x; NaN for NaN.  It has no gradient."""
        x = self._plain()
        return self._constant(x._unary('sign') if x.dtype.kind == 'f' else ((x > 0) * 1 - (x < 0) * 1).astype(x.dtype))

    @accepts_torch_names
    def round(self, decimals: int = 0) -> Self:
        """Return x rounded to a number of decimals, halves to even, without a gradient."""
        x = self._plain() * 10.0 ** decimals if decimals else self._plain()
        y = x._unary('round')
        return self._constant(y / 10.0 ** decimals if decimals else y)

    __round__ = round

    def isnan(self) -> Self:
        """Return a mask of the elements that are NaN."""
        x = self._plain()
        return self._constant(x != x)

    def isfinite(self) -> Self:
        """Return a mask of the elements that are neither NaN nor infinite."""
        x = self._plain()
        return self._constant(abs(x) < math.inf)

    def isinf(self) -> Self:
        """Return a mask of the elements that are infinite."""
        return self._constant(abs(self._plain()) == math.inf)

    # the operators by PyTorch's names

    def add(self, other: Numbers, alpha: float = 1) -> Self:
        """Return x + alpha * other."""
        return self + (other if alpha == 1 else self._operand(other) * alpha)

    def sub(self, other: Numbers, alpha: float = 1) -> Self:
        """Return x - alpha * other."""
        return self - (other if alpha == 1 else self._operand(other) * alpha)

    def mul(self, other: Numbers) -> Self:
        """Return x * other."""
        return self * other

    def div(self, other: Numbers, rounding_mode: str | None = None) -> Self:
        """Return x / other; rounding_mode: 'floor' or 'trunc', without a gradient."""
        if rounding_mode not in (None, 'floor', 'trunc'):
            raise ValueError(f"div: rounding_mode: expected None, 'floor' or 'trunc', got {rounding_mode!r}")
        if rounding_mode == 'floor':
            return self // other
        return (self / other).trunc().astype((self // other).dtype) if rounding_mode else self / other

    def neg(self) -> Self:
        """Return -x."""
        return -self

    def eq(self, other: Numbers) -> Self:
        """Return the mask x == other."""
        return self == other

    def ne(self, other: Numbers) -> Self:
        """Return the mask x != other."""
        return self != other

    def lt(self, other: Numbers) -> Self:
        """Return the mask x < other."""
        return self < other

    def le(self, other: Numbers) -> Self:
        """Return the mask x <= other."""
        return self <= other

    def gt(self, other: Numbers) -> Self:
        """Return the mask x > other."""
        return self > other

    def ge(self, other: Numbers) -> Self:
        """Return the mask x >= other."""
        return self >= other

    def rsqrt(self) -> Self:
        """Return 1 / sqrt(x)."""
        return 1.0 / self.sqrt()

    def pow(self, exponent: Numbers) -> Self:
        """Return x ** exponent."""
        return self ** exponent

    power = pow

    @accepts_torch_names
    def clip(self, min: Any = None, max: Any = None) -> Self:
        """Return x with elements below `min` replaced by `min`, and those above `max` by `max`.  None: no limit."""
        if min is None and max is None:
            raise ValueError('clip: expected min, max or both, got neither')
        y = self if min is None else self.maximum(min)
        return y if max is None else y.minimum(max)

    clamp = clip

    def where(self, condition: Numbers, other: Numbers) -> Self:
        """Return x where condition is not 0, else `other`; PyTorch's x.where."""
        return self._function('where')(condition, self, other)

    def masked_fill(self, mask: Numbers, value: Any) -> Self:
        """Return x with the elements where mask is true replaced by `value`."""
        return self._function('where')(mask, value, self)

    def matmul(self, other: Numbers) -> Self:
        """Return the matrix product x @ other."""
        return self @ other

    def mm(self, other: Numbers) -> Self:
        """Return the product of two matrices."""
        return self._product('mm', other, 2)

    def bmm(self, other: Numbers) -> Self:
        """Return the products of two stacks of matrices: (B, M, K), (B, K, N) -> (B, M, N)."""
        return self._product('bmm', other, 3)

    def _product(self, who: str, other: Numbers, ndim: int) -> Self:
        other = self._operand(other)
        if self.ndim != ndim or other.ndim != ndim:
            raise ShapeError(f'{who}: expected two arrays of {ndim} axes, got shapes {self.shape} and {other.shape}; matmul '
                             'takes more shapes')
        return self @ other

    def t(self) -> Self:
        """Return the transpose of a matrix; PyTorch's x.t()."""
        if self.ndim > 2:
            raise ValueError(f't: expected at most 2 axes, got shape {self.shape}; use mT or transpose')
        return self.permute(tuple(reversed(range(self.ndim))))

    @accepts_torch_names
    def dot(self, other: Numbers) -> Self:
        """Return the sum of products over the last axis of x and the last but one of `other` (its only one if it is a
        vector)."""
        other = self._operand(other)
        if not self.ndim or not other.ndim:
            return self * other
        if other.ndim <= 2:
            return self @ other
        rows = self.reshape(math.prod(self.shape[:-1]), self.shape[-1])
        columns = other.permute((other.ndim - 2, *range(other.ndim - 2), other.ndim - 1)).reshape(other.shape[-2], -1)
        return (rows @ columns).reshape(*self.shape[:-1], *other.shape[:-2], other.shape[-1])

    @accepts_torch_names
    def tril(self, k: int = 0) -> Self:
        """Return matrices (..., M, N) with zeros above diagonal k."""
        return self._function('where')(np.tri(*self.shape[-2:], k=k, dtype=bool), self, 0)

    @accepts_torch_names
    def triu(self, k: int = 0) -> Self:
        """Return matrices (..., M, N) with zeros below diagonal k."""
        return self._function('where')(~np.tri(*self.shape[-2:], k=k - 1, dtype=bool), self, 0)

    def put(self, indices: Numbers, values: Numbers) -> None:
        """Set the elements at these positions of the flattened array, in place: np.put.  Values are repeated if there are
        fewer than positions; of equal positions the last counts.  IndexError for a position outside."""
        at = _numpy(indices).reshape(-1)
        if at.size and (at.dtype.kind not in 'iu' or at.min() < -self.size or at.max() >= self.size):
            raise IndexError(f'put: indices: expected integers from {-self.size} to {self.size - 1}, got {at.tolist()}')
        values = self._operand(values)
        if isinstance(values, Methods) and values.ndim:
            values = values.reshape(-1).take_rows(np.arange(at.size) % max(values.size, 1))
        self._put_at(at.astype(np.int64) % max(self.size, 1), values)

    def _element(self, index: tuple[Any, ...]) -> Self:
        """Return the element at a position of the flattened array, or at an index for each axis."""
        index = several(index)
        if len(index) == 1 and self.ndim != 1:
            at, = index
            if not -self.size <= at < self.size:
                raise IndexError(f'item: index {at} is out of bounds for size {self.size}')
            index = np.unravel_index(at % self.size, self.shape)
        if len(index) != self.ndim:
            raise ValueError(f'item: expected one index, or one for each of {self.ndim} axes, got {index}')
        return self[tuple(index)]

    def __contains__(self, value: Any) -> bool:
        return bool((self._plain() == _plain(value)).any().item())

    # ---- reductions --------------------------------------------------------------------------------

    @accepts_torch_names
    def sum(self, axis: Axis = None, keepdims: bool = False) -> Self:
        """Sum over axes, in an order that does not depend on threads.  int32 stays int32 and wraps."""
        return self._reduced('sum', as_axes(axis), keepdims)

    @accepts_torch_names
    def mean(self, axis: Axis = None, keepdims: bool = False) -> Self:
        """Return the mean over axes; of integers as float32; NaN without elements."""
        return self._reduced('mean', as_axes(axis), keepdims)

    @accepts_torch_names
    def max(self, axis: Axis = None, keepdims: bool = False) -> Self:
        """Return the maximum over axes; NaN if there is one.  x.max(y) of an array y is x.maximum(y), as in PyTorch."""
        if isinstance(axis, Methods):
            return self.maximum(axis)
        return self._reduced('max', as_axes(axis), keepdims)

    @accepts_torch_names
    def min(self, axis: Axis = None, keepdims: bool = False) -> Self:
        """Return the minimum over axes; NaN if there is one.  x.min(y) of an array y is x.minimum(y), as in PyTorch."""
        if isinstance(axis, Methods):
            return self.minimum(axis)
        return self._reduced('min', as_axes(axis), keepdims)

    amax, amin = max, min

    @accepts_torch_names
    def var(self, axis: Axis = None, ddof: int = 0, keepdims: bool = False, correction: int | None = None,
            unbiased: bool | None = None, where: Numbers | None = None) -> Self:
        """Return the variance: the sum of squared deviations from the mean, divided by n - ddof.

        `correction` and `unbiased` are PyTorch's names: correction=1 and unbiased=True both mean ddof=1.
        where: a mask of the elements that count
        """
        ddof = correction if correction is not None else int(unbiased) if unbiased is not None else ddof
        if where is not None and where is not True:
            choose, mask = self._function('where'), self._operand(where)
            deviation = choose(mask, self - self.mean(axis, keepdims=True, where=mask), 0)
            count = choose(mask, 1, 0).broadcast_to(self.shape).sum(axis, keepdims=keepdims) - ddof
            return (deviation * deviation).sum(axis, keepdims=keepdims) / count.maximum(0)        # 0 / 0 is NaN, as numpy's
        deviation = self - self.mean(axis, keepdims=True)
        total = (deviation * deviation).sum(axis, keepdims=keepdims)
        n = math.prod(self.shape[d] for d in normal_axes(as_axes(axis), self.ndim)) - ddof
        return total / n if n > 0 else total / 0.0

    @accepts_torch_names
    def std(self, axis: Axis = None, ddof: int = 0, keepdims: bool = False, correction: int | None = None,
            unbiased: bool | None = None, where: Numbers | None = None) -> Self:
        """Return the standard deviation, the square root of `var`; the gradient of equal elements is 0."""
        var, choose = self.var(axis, ddof, keepdims, correction, unbiased, where), self._function('where')
        return choose(var == 0, 0.0, choose(var == 0, 1.0, var).sqrt())

    @accepts_torch_names
    def prod(self, axis: Axis = None, keepdims: bool = False) -> Self:
        """Return the product over axes; 1 without elements."""
        axes = normal_axes(as_axes(axis), self.ndim)
        kept = [d for d in range(self.ndim) if d not in axes]
        shape = tuple(self.shape[d] for d in kept)
        x = self.int() if getattr(self._plain(), 'is_mask', False) else self       # type: ignore[attr-defined]
        x = x.permute((*axes, *kept)).reshape(math.prod(self.shape[d] for d in axes), *shape)
        while (n := x.shape[0]) > 1:            # multiply the halves: the number of roundings grows with log n
            half = x[:n // 2] * x[n // 2:n // 2 * 2]
            x = self._function('concatenate')([half, x[n - 1:]]) if n % 2 else half
        y = x.reshape(shape) if x.shape[0] else x.sum(0) + 1
        return y.reshape(tuple(1 if d in axes else n for d, n in enumerate(self.shape))) if keepdims else y

    @accepts_torch_names
    def ptp(self, axis: Axis = None, keepdims: bool = False) -> Self:
        """Return the maximum minus the minimum over axes."""
        return self.max(axis, keepdims) - self.min(axis, keepdims)

    @accepts_torch_names
    def norm(self, ord: float | str = 2, axis: Axis = None, keepdims: bool = False, p: float | str | None = None) -> Self:
        """Return the norm of vectors over axes: (sum |x|^ord)^(1 / ord).

        ord inf: the largest absolute value; -inf: the smallest; 0: the number of elements that are not 0; 'fro': 2.
        p: PyTorch's name of ord.
        """
        ord = ord if p is None else p
        ord = 2 if ord in (None, 'fro') else ord
        if not isinstance(ord, int | float | np.integer | np.floating):
            raise ValueError(f"norm: ord: expected a number or 'fro', got {ord!r}; np.linalg.norm(x.numpy(), ord) has others")
        if abs(ord) == math.inf:
            return abs(self).max(axis, keepdims) if ord > 0 else abs(self).min(axis, keepdims)
        if ord == 0:
            return self._function('where')(self._plain() != 0, 1.0, self * 0).sum(axis, keepdims)      # its gradient is 0
        if ord == 1:
            return abs(self).sum(axis, keepdims)
        return self._power_norm(float(ord), as_axes(axis), keepdims)

    def _power_norm(self, ord: float, axis: Axis, keepdims: bool) -> Self:
        """Return the norm for any other number `ord`."""
        if ord == 2:
            return (self * self).sum(axis, keepdims).sqrt()
        return (abs(self) ** ord).sum(axis, keepdims) ** (1 / ord)

    @accepts_torch_names
    def any(self, axis: Axis = None, keepdims: bool = False) -> Self:
        """Return a mask: whether any element along the axes is not 0."""
        return self._tested('max', 0, axis, keepdims)

    @accepts_torch_names
    def all(self, axis: Axis = None, keepdims: bool = False) -> Self:
        """Return a mask: whether all elements along the axes are not 0."""
        return self._tested('min', 1, axis, keepdims)

    def _tested(self, op: str, of_none: int, axis: Axis, keepdims: bool) -> Self:
        mask, axes = self._plain() != 0, normal_axes(as_axes(axis), self.ndim)
        if all(self.shape[d] for d in axes):
            return self._constant(mask._reduced(op, axes, keepdims))
        return self._constant(mask.sum(axes, keepdims) == (0 if of_none else -1))

    @accepts_torch_names
    def argmin(self, axis: int | None = None, keepdims: bool = False) -> Self:
        """Return the index of the minimum, int32, the first of equals; NaN counts as smallest."""
        x = self._plain()
        x = x * 1 if x.is_mask else x
        return self._constant((-x if x.dtype.kind == 'f' else -x - 1).argmax(axis, keepdims=keepdims))

    @accepts_torch_names
    def logsumexp(self, axis: Axis = None, keepdims: bool = False) -> Self:
        """Return log(sum(e^x)) over axes, without overflow."""
        top = bounded(self.max(axis, keepdims=True))
        y = (self - top).exp().sum(axis, keepdims=True).log() + top
        return y if keepdims else y.squeeze(tuple(normal_axes(as_axes(axis), self.ndim)))

    @accepts_torch_names
    def softmax(self, axis: Axis = -1) -> Self:
        """Return e^x / sum(e^x) along axes, without overflow."""
        axis = softmax_axes(axis, self.ndim)
        if not self.size:
            return self.exp()
        e = (self - bounded(self.max(axis, keepdims=True))).exp()
        return e / e.sum(axis, keepdims=True)

    @accepts_torch_names
    def log_softmax(self, axis: Axis = -1) -> Self:
        """Return log(softmax(x)) along axes."""
        axis = softmax_axes(axis, self.ndim)
        if not self.size:
            return self.exp()
        below = self - bounded(self.max(axis, keepdims=True))
        return below - below.exp().sum(axis, keepdims=True).log()

    # ---- along an axis -----------------------------------------------------------------------------

    def _along(self, axis: int | None) -> tuple[Self, int]:
        """Return x and a non-negative axis; for None the flattened x and 0."""
        return (self.reshape(-1), 0) if axis is None else (self, normal_axes(axis, self.ndim)[0])

    @accepts_torch_names
    def cumsum(self, axis: int | None = None) -> Self:
        """Return the sums of the first 1, 2, ... elements along an axis; None: of the flattened array."""
        x, d = self._along(axis)
        return x._cumulated(d)

    @accepts_torch_names
    def cumprod(self, axis: int | None = None) -> Self:
        """Return the products of the first 1, 2, ... elements along an axis; None: of the flattened array."""
        x, d = self._along(axis)
        step, before = 1, (slice(None),) * d
        while step < x.shape[d]:
            later = x[(*before, slice(step, None))] * x[(*before, slice(0, x.shape[d] - step))]
            x, step = self._function('concatenate')([x[(*before, slice(0, step))], later], d), 2 * step
        return x

    def _argextreme(self, axis: int, sign: int) -> np.ndarray:
        """Return the positions of the running maxima along an axis, for sign -1 of minima: the last of equals; NaN wins."""
        x = _numpy(self)
        best = (np.maximum if sign > 0 else np.minimum).accumulate(x, axis)
        at = np.arange(x.shape[axis], dtype=np.int32).reshape([-1 if d == axis else 1 for d in range(x.ndim)])
        return np.maximum.accumulate(np.where((x == best) | (x != x), at, 0), axis)

    @accepts_torch_names
    def cummax(self, axis: int) -> tuple[Self, Self]:
        """Return the maxima of the first 1, 2, ... elements along an axis, and their indices, int32, the last of equals."""
        d, = normal_axes(axis, self.ndim)
        at = self._constant(self._plain()._operand(self._argextreme(d, 1)))
        return self.take_along_axis(at, d), at

    @accepts_torch_names
    def cummin(self, axis: int) -> tuple[Self, Self]:
        """Return the minima of the first 1, 2, ... elements along an axis, and their indices, int32, the last of equals."""
        d, = normal_axes(axis, self.ndim)
        at = self._constant(self._plain()._operand(self._argextreme(d, -1)))
        return self.take_along_axis(at, d), at

    @accepts_torch_names
    def argsort(self, axis: int | None = -1, descending: bool = False, *, kind: str | None = None,
                stable: bool | None = None) -> Self:
        """Return the int32 indices that sort x along an axis; equal elements keep their order, NaN is last.

        kind, stable: accepted, and without effect: every sort is stable.

        Arrays on a GPU are sorted on the CPU.  RuntimeError while a plan records on a GPU.
        """
        x, d = self._along(axis)
        return x._constant(x._plain()._sorting(d, descending))

    @accepts_torch_names
    def sort(self, axis: int | None = -1, descending: bool = False, *, kind: str | None = None,
             stable: bool | None = None) -> Self:
        """Return a sorted copy, like np.sort; None: of the flattened array.  pyops.functional.sort also returns the indices.
        kind, stable: as in argsort."""
        x, d = self._along(axis)
        return x._picked(x.argsort(d, descending=descending), d)

    @accepts_torch_names
    def topk(self, k: int, axis: int = -1, largest: bool = True) -> tuple[Self, Self]:
        """Return the k largest (or smallest) elements along an axis in order, and their indices.  ValueError for an invalid
        k."""
        d, = normal_axes(axis, self.ndim)
        if not 0 <= k <= self.shape[d]:
            raise ValueError(f'topk: expected k from 0 to {self.shape[d]}, the size of axis {axis}, got {k}')
        best = self.argsort(d, descending=largest)[(slice(None),) * d + (slice(0, k),)]
        return self._picked(best, d), best

    def _picked(self, order: Any, axis: int) -> Self:
        """Return the elements at indices of all rows along an axis, a part of what argsort returns."""
        return self.take_along_axis(order, axis)

    @accepts_torch_names
    def take_along_axis(self, indices: Numbers, axis: int | None = -1) -> Self:
        """Return the elements of x at `indices` along an axis; x and indices broadcast along the other axes."""
        x, d = self._along(axis)
        indices = _numpy(indices)
        if indices.ndim != x.ndim:
            raise ValueError(f'take_along_axis: indices and array must have the same number of axes, got {indices.ndim} and '
                             f'{x.ndim}')
        index = [np.arange(n).reshape([-1 if i == e else 1 for i in range(x.ndim)]) for e, n in enumerate(x.shape)]
        index[d] = indices
        return x[tuple(index)]

    @accepts_torch_names
    def gather(self, axis: int, index: Numbers) -> Self:
        """Return x[..., index[..., j, ...], ...] along an axis, PyTorch's gather: index may be smaller than x along other
        axes."""
        d, = normal_axes(axis, self.ndim)
        index = _numpy(index)
        part = self[tuple(slice(None) if i == d else slice(0, n) for i, n in enumerate(index.shape))]
        return part.take_along_axis(index, d)

    @accepts_torch_names
    def index_select(self, axis: int, index: Numbers) -> Self:
        """Return the slices of x at these indices along an axis."""
        return self.take(index, axis)

    @accepts_torch_names
    def take(self, indices: Numbers, axis: int | None = None, *, mode: str = 'raise') -> Self:
        """Return the elements at these indices along an axis; None: of the flattened array.  Negative ones count from the
        end.  mode: numpy's 'raise', 'wrap' or 'clip', for indices outside."""
        x, d = self._along(axis)
        if mode != 'raise':
            n, at = x.shape[d], _numpy(indices)
            if mode not in ('wrap', 'clip'):
                raise ValueError(f"take: mode: expected 'raise', 'wrap' or 'clip', got {mode!r}")
            indices = at % n if mode == 'wrap' else at.clip(0, n - 1)
        return x[(slice(None),) * d + (_index(indices),)]

    @accepts_torch_names
    def repeat(self, repeats: int | Sequence[int], axis: int | None = None) -> Self:
        """Repeat each element along an axis, like np.repeat; None: of the flattened array.  PyTorch's repeat is `tile`."""
        x, d = self._along(axis)
        counts = np.broadcast_to(np.asarray(_numpy(repeats), int), x.shape[d])
        return x[(slice(None),) * d + (np.repeat(np.arange(x.shape[d]), counts),)]

    repeat_interleave = repeat

    def tile(self, *reps: Any) -> Self:
        """Repeat the whole array reps[i] times along axis i; fewer numbers than axes apply to the last axes."""
        reps = several(reps)
        ndim = max(self.ndim, len(reps))
        reps, shape = (1,) * (ndim - len(reps)) + reps, (1,) * (ndim - self.ndim) + self.shape
        split = [n for size in shape for n in (1, size)]
        wide = [n for rep, size in zip(reps, shape, strict=True) for n in (rep, size)]
        if ndim > 4:                            # an array has at most 8 axes
            x = self.reshape(shape)
            for d, rep in enumerate(reps):
                x = x if rep == 1 else self._function('concatenate')([x] * rep, d)
            return x
        return self.reshape(tuple(split)).broadcast_to(tuple(wide)).reshape(
            tuple(rep * size for rep, size in zip(reps, shape, strict=True)))

    @accepts_torch_names
    def roll(self, shift: int | Sequence[int], axis: Axis = None) -> Self:
        """Move the elements by `shift` along an axis; those that leave at the end enter at the start.  None: flattened.
        Several axes: by shift along each, or by one of as many shifts."""
        if isinstance(shift, tuple | list) or isinstance(axis, tuple | list):
            shifts, axes = (value if isinstance(value, tuple | list) else (value,) for value in (shift, axis))
            if len(shifts) != len(axes) and 1 not in (len(shifts), len(axes)):
                raise ValueError(f'roll: shift: expected one number, or one for each of {len(axes)} axes, got {shift}')
            y, many = self, max(len(shifts), len(axes))
            for by, d in zip(many // len(shifts) * tuple(shifts), many // len(axes) * tuple(axes), strict=True):
                y = y.roll(by, d)
            return y
        x, d = self._along(axis)
        n = x.shape[d]
        return x[(slice(None),) * d + ((np.arange(n) - shift) % max(n, 1),)].reshape(self.shape)

    @accepts_torch_names
    def split(self, sizes: int | Sequence[int], axis: int = 0) -> tuple[Self, ...]:
        """Split along an axis into pieces of these sizes, or of one size (the last may be smaller): views.

        ValueError if the sizes do not add up.  np.split(x, ...) takes numpy's arguments: a number of pieces, or their ends.
        """
        d, = normal_axes(axis, self.ndim)
        n = self.shape[d]
        if isinstance(sizes, int):
            if sizes < 1:
                raise ValueError(f'split: expected pieces of at least one element, got {sizes}')
            sizes = [sizes] * (n // sizes) + [n % sizes] * (n % sizes > 0)
        if sum(sizes) != n or min(sizes, default=0) < 0:
            raise ShapeError(f'split: pieces of {tuple(sizes)} do not make up axis {axis} of {n} elements')
        return self._pieces(tuple(sizes), d)

    @accepts_torch_names
    def chunk(self, chunks: int, axis: int = 0) -> tuple[Self, ...]:
        """Split along an axis into at most `chunks` pieces of equal size (the last may be smaller)."""
        if chunks < 1:
            raise ValueError(f'chunk: expected at least one piece, got {chunks}')
        return self.split(max(1, -(-self.shape[normal_axes(axis, self.ndim)[0]] // chunks)), axis)

    # ---- shapes ------------------------------------------------------------------------------------

    @accepts_tuple('axes', 'dims')
    def transpose(self, *axes: Any, dim0: int | None = None, dim1: int | None = None) -> Self:
        """Permute the axes; without arguments, reverse their order; dim0 and dim1: exchange these two.

        Two axes of an array with more than two exchange them, as in PyTorch.  transpose(0, 1) of a matrix is numpy's:
        it changes nothing.
        """
        if dim0 is not None and dim1 is not None:
            return self.swapaxes(dim0, dim1)
        order = () if axes == (None,) else several(axes)
        if len(order) == 2 and self.ndim > 2:
            return self.swapaxes(*order)
        return self.permute(order if order else tuple(range(self.ndim))[::-1])

    @property
    def T(self) -> Self:
        """The array with its axes in reverse order."""
        return self.permute(tuple(range(self.ndim))[::-1])

    @property
    def mT(self) -> Self:
        """The array with its last two axes exchanged."""
        return self.swapaxes(-1, -2)

    @accepts_torch_names
    def swapaxes(self, a: int, b: int) -> Self:
        """Exchange two axes."""
        (a,), (b,), order = normal_axes(a, self.ndim), normal_axes(b, self.ndim), list(range(self.ndim))
        order[a], order[b] = b, a
        return self.permute(tuple(order))

    def moveaxis(self, source: Axis, destination: Axis) -> Self:
        """Move axes to other positions; the other axes keep their order."""
        start, end = normal_axes(as_axes(source), self.ndim), normal_axes(as_axes(destination), self.ndim)
        if len(start) != len(end):
            raise ValueError(f'moveaxis: expected as many source axes as destinations, got {source} and {destination}')
        order = [d for d in range(self.ndim) if d not in start]
        for to, d in sorted(zip(end, start, strict=True)):
            order.insert(to, d)
        return self.permute(tuple(order))

    movedim = moveaxis

    @accepts_torch_names
    def diagonal(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Self:
        """Return the elements x[..., i, i + offset, ...] of two axes as the last axis, a copy.  PyTorch's defaults are the
        same."""
        x = self.moveaxis((axis1, axis2), (-2, -1))
        rows = np.arange(max(-offset, 0), max(min(x.shape[-2], x.shape[-1] - offset), max(-offset, 0)))
        return x[..., rows, rows + offset]

    @accepts_torch_names
    def trace(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Self:
        """Return the sum of a diagonal."""
        return self.diagonal(offset, axis1, axis2).sum(-1)

    def nonzero(self) -> tuple[Self, ...]:
        """Return the int32 indices of the elements that are not 0, an array for each axis."""
        found = np.nonzero(_numpy(self))
        fits = max(self.shape, default=0) < 2**31           # array() checks each number of another dtype
        return tuple(self._constant(self._plain()._operand(one.astype(np.int32) if fits else one)) for one in found)

    @accepts_torch_names
    def squeeze(self, axis: Axis = None) -> Self:
        """Remove axes of size 1: these, or all.  ValueError if one has another size."""
        return self._reshape(_squeezed(self.shape, as_axes(axis)))

    @accepts_torch_names
    def unsqueeze(self, axis: Axis) -> Self:
        """Insert axes of size 1 at these positions of the result."""
        axes = as_axes(axis)
        ndim = self.ndim + (len(axes) if isinstance(axes, tuple) else 1)
        at, sizes = normal_axes(axes, ndim), iter(self.shape)
        return self._reshape(tuple([1 if d in at else next(sizes) for d in range(ndim)]))

    expand_dims = unsqueeze

    def flatten(self, start_dim: Any = 0, end_dim: int = -1, *, order: str = 'C') -> Self:
        """Merge the axes from start_dim to end_dim into one.  A view if strides allow it, as reshape.

        order: numpy's, also by position: 'F' counts along the first axis first
        """
        start_dim, order = (0, start_dim) if isinstance(start_dim, str) else (start_dim, order)
        if is_fortran_order(self, order):
            return self.T.flatten()
        if not self.ndim:
            return self.reshape(1)
        (start,), (end,) = normal_axes(start_dim, self.ndim), normal_axes(end_dim, self.ndim)
        if end < start:
            raise ValueError(f'flatten: expected start_dim at or before end_dim, got {start_dim} and {end_dim}')
        return self.reshape(*self.shape[:start], math.prod(self.shape[start:end + 1]), *self.shape[end + 1:])

    def ravel(self, order: str = 'C') -> Self:
        """Return the elements as one axis: a view if strides allow it.   order: 'F' counts along the first axis first"""
        return (self.T if order != 'C' and is_fortran_order(self, order) else self)._reshape((-1,))

    def _reshape(self, shape: Shape) -> Self:
        """Do what reshape does, for a tuple of ints."""
        return self.reshape(shape)

    def view(self, *shape: Any) -> Self:
        """PyTorch's name of reshape.  It copies if strides require it."""
        return self.reshape(*shape)

    def expand(self, *shape: Any) -> Self:
        """Like broadcast_to; a size of -1 keeps the size of that axis."""
        sizes = several(shape)
        missing = len(sizes) - self.ndim
        return self.broadcast_to(tuple(self.shape[d - missing] if n == -1 and d >= missing else n for d, n in enumerate(sizes)))

    def view_as(self, other: Any) -> Self:
        """Return x in the shape of another array, as reshape."""
        return self._reshape(tuple(other.shape))

    reshape_as = view_as

    def expand_as(self, other: Any) -> Self:
        """Return x broadcast to the shape of another array."""
        return self.broadcast_to(tuple(other.shape))

    @accepts_torch_names
    def pad(self, widths: Any, value: float = 0) -> Self:
        """Pad with `value`.  widths: ((before, after), ...) per axis, one pair for all axes, or one number, as in np.pad."""
        return self._function('pad_axes')(self, widths, value)

    # ---- dtypes and facts --------------------------------------------------------------------------

    @property
    def itemsize(self) -> Any:
        """Bytes per element in memory."""
        return self._plain().dtype.itemsize

    @property
    def nbytes(self) -> Any:
        """Bytes of all elements."""
        return self.size * self.itemsize

    def to(self, *targets: Any, device: Any = None, dtype: Any = None, non_blocking: bool = False, copy: bool = False) -> Self:
        """Convert to a dtype, move to a device, or both; x.to(y) takes both from an array.  PyTorch's arguments.

        A device may be given by its name: 'cpu', 'cuda' or 'gpu'.  x itself is returned if nothing changes, unless `copy`.
        non_blocking has no effect.  Moving a Tensor that requires a gradient is a RuntimeError.
        """
        y, targets = self, (*targets, *[target for target in (device, dtype) if target is not None])
        if not targets:
            raise TypeError('to: expected a dtype, a device or an array, got nothing')
        for target in targets:
            if isinstance(target, Methods):
                y = y.to(target.device, bool if target._plain().is_mask else target.dtype)
            elif hasattr(target, 'launch') or isinstance(target, str) and target.partition(':')[0] in DEVICE_NAMES:
                y = y._moved(target)
            elif not isinstance(target, bool):              # by position, PyTorch's non_blocking
                has = np.dtype(bool) if y._plain().is_mask else y.dtype
                y = y if numpy_dtype(target) == has else y.astype(target)
        return y.copy() if copy and y is self else y

    def type_as(self, other: Any) -> Self:
        """Convert to the dtype of another array."""
        return self.to(bool if other._plain().is_mask else other.dtype)

    def is_floating_point(self) -> bool:
        """Return whether the elements are float32 or float64, and no mask."""
        return self.dtype.kind == 'f' and not self._plain().is_mask

    def clone(self) -> Self:
        """PyTorch's name of copy."""
        return self.copy()

    def numel(self) -> Any:
        """Return the number of elements."""
        return self.size

    def dim(self) -> Any:
        """Return the number of axes."""
        return self.ndim

    def element_size(self) -> Any:
        """PyTorch's name of itemsize."""
        return self.itemsize

    def contiguous(self) -> Self:
        """Return x if its elements are contiguous in row-major order, else a compact copy."""
        return self if self._plain().is_compact() else self.copy()

    # ---- numpy's protocols -------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **named: Any) -> Any:
        """Run numpy's elementwise functions, such as np.exp(x), and np.add.reduce and its like, with the operations of x."""
        from pyops.numpy_protocols import apply_ufunc
        return apply_ufunc(ufunc, method, inputs, out, named)

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, named: Any) -> Any:
        """Run numpy's other functions, such as np.sum(x) and np.concatenate([x, y]); those without a counterpart here run on
        numpy arrays."""
        from pyops.numpy_protocols import apply_function
        return apply_function(function, args, named)


def _conversions() -> None:
    """Define PyTorch's x.float(), x.int() ...  Not in the class: there these names would hide the types in annotations."""
    def method(dtype: type, text: str) -> Callable[..., Any]:
        def convert(self: Methods) -> Any:
            return self.astype(dtype)
        convert.__doc__ = text
        return convert

    for names, dtype, text in ((('float',), np.float32, 'Return x as float32.'), (('double',), np.float64,
    'Return x as float64.'),
                               (('int', 'long'), np.int32, 'Return x as int32, rounded towards 0.'),
                               (('bool',), np.bool_, 'Return a mask of the elements that are not 0.')):
        for name in names:
            setattr(Methods, name, method(dtype, text))


_conversions()


def bounded(x: Any) -> Any:
    """Replace infinities by the largest number of the dtype, so that x - bounded(x) is not NaN for an infinite x."""
    largest = float(np.finfo(x.dtype).max) if x.dtype.kind == 'f' else math.inf
    return x.maximum(-largest).minimum(largest)


def _plain(value: Any) -> Any:
    return value._plain() if isinstance(value, Methods) else value


def _numpy(values: Any) -> np.ndarray:
    """Return an array, a Tensor or a list as a numpy array."""
    return np.asarray(values.numpy() if hasattr(values, 'numpy') else values)


def _index(indices: Any) -> Any:
    """Return indices that NDArray and Tensor take as an index array, also a single number."""
    return indices if hasattr(indices, 'numpy') and indices.ndim else np.asarray(_numpy(indices))
