"""The further methods of NDArray and Tensor, on top of methods.py, and the methods that change an array in place.

Each is a short formula of other operations, so a Tensor has its gradient.  Names are numpy's, else PyTorch's.
"""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from pyops.errors import ShapeError
from pyops.methods import Methods, _index, _numpy, _plain, accepts_torch_names, as_axes, normal_axes, several
from pyops.names import IN_PLACE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import DTypeLike

    from pyops.typing import Axis, Numbers, Shape


class TorchMethods(Methods):
    """Methods that are formulas of those in Methods."""
    __slots__ = ()

    if TYPE_CHECKING:                   # primitives
        __floordiv__: Any
        __mod__: Any
        __rmod__: Any
        __rfloordiv__: Any
        __setitem__: Callable[..., None]
        _with_added: Callable[..., Any]
        _replace: Callable[..., Any]

    # ---- element by element ------------------------------------------------------------------------

    def expm1(self) -> Self:
        """Return e^x - 1, accurate for small x."""
        return self._unary('expm1')

    def log2(self) -> Self:
        """Return the logarithm to base 2."""
        return self.log() * (1 / math.log(2))

    def log10(self) -> Self:
        """Return the logarithm to base 10."""
        return self.log() * (1 / math.log(10))

    def sinh(self) -> Self:
        """Return the hyperbolic sine."""
        return (self.expm1() - (-self).expm1()) / 2

    def cosh(self) -> Self:
        """Return the hyperbolic cosine."""
        return (self.exp() + (-self).exp()) / 2

    def arctan(self) -> Self:
        """Return the angle whose tangent is x, from -pi/2 to pi/2."""
        return self._unary('arctan')

    def arcsin(self) -> Self:
        """Return the angle whose sine is x, from -pi/2 to pi/2; NaN beyond -1 and 1."""
        return self._unary('arcsin')

    def arccos(self) -> Self:
        """Return the angle whose cosine is x, from 0 to pi; NaN beyond -1 and 1."""
        return self._unary('arccos')

    def arctan2(self, other: Numbers) -> Self:
        """Return the angle of the points (other, x), from -pi to pi; 0 for (0, 0)."""
        where, x = self._function('where'), self._operand(other)
        steep = abs(self) > abs(x)
        over, under = where(steep, x, self), where(steep, self, x)
        infinite = abs(over) == math.inf                    # then both are: the angle of (1, 1), (1, -1), ...
        over, under = (where(infinite, where(part > 0, 1.0, -1.0), part) for part in (over, under))
        angle = (over / where(under == 0, 1.0, under)).arctan()
        half = where(self < 0, -1.0, 1.0).astype(angle.dtype) * (math.pi / 2)
        return where(steep, half - angle, where(x < 0, angle + half * 2, angle))

    def erf(self) -> Self:
        """Return the error function."""
        return self._unary('erf')

    def trunc(self) -> Self:
        """Return the next whole number towards 0, without a gradient."""
        return self._unary('trunc')

    def frac(self) -> Self:
        """Return x - x.trunc()."""
        return self - self.trunc()

    def fmod(self, other: Numbers) -> Self:
        """Return the remainder of x / other with the sign of x; `%` has the sign of `other`."""
        size = abs(self._operand(other))
        return self._function('where')(self < 0, -(-self % size), self % size)

    def remainder(self, other: Numbers) -> Self:
        """Return x % other, with the sign of `other`."""
        return self % other

    def floor_divide(self, other: Numbers) -> Self:
        """Return x // other, without a gradient."""
        return self // other

    def hypot(self, other: Numbers) -> Self:
        """Return sqrt(x^2 + other^2)."""
        other = self._operand(other)
        size = abs(self).maximum(abs(other))
        is_extreme = (size > 1e18) & (size < math.inf) | (size < 1e-18) & (size > 0)       # the squares leave float32's range
        scale = self._function('where')(is_extreme, size, 1.0)
        x, y = self / scale, other / scale
        return (x * x + y * y).sqrt() * scale

    def logaddexp(self, other: Numbers) -> Self:
        """Return log(e^x + e^other), without overflow."""
        other = self._operand(other)
        difference = self._function('where')(self == other, 0.0, self - other)         # of two infinities, too
        return self.maximum(other) + (-abs(difference)).exp().log1p()

    def xlogy(self, other: Numbers) -> Self:
        """Return x log(other), and 0 where x is 0."""
        where, other = self._function('where'), self._operand(other)
        return where(self == 0, 0.0, self * where(self == 0, 1.0, other).log())

    def logit(self, eps: float | None = None) -> Self:
        """Return log(x / (1 - x)); eps: with x clipped to eps ... 1 - eps."""
        x = self if eps is None else self.clip(eps, 1 - eps)
        return (x / (1.0 - x)).log()

    def float_power(self, exponent: Numbers) -> Self:
        """Return x ** exponent as float64."""
        return self.astype(np.float64) ** exponent

    def clamp_min(self, min: Numbers) -> Self:
        """Return the maximum of x and min."""
        return self.clip(min=min)

    def clamp_max(self, max: Numbers) -> Self:
        """Return the minimum of x and max."""
        return self.clip(max=max)

    def lerp(self, end: Numbers, weight: Numbers) -> Self:
        """Return x + weight (end - x)."""
        return self + self._operand(weight) * (self._operand(end) - self)

    def addcmul(self, tensor1: Numbers, tensor2: Numbers, value: float = 1) -> Self:
        """Return x + value * tensor1 * tensor2."""
        return self + self._operand(tensor1) * tensor2 * value

    def addcdiv(self, tensor1: Numbers, tensor2: Numbers, value: float = 1) -> Self:
        """Return x + value * tensor1 / tensor2."""
        return self + self._operand(tensor1) / tensor2 * value

    def nan_to_num(self, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Self:
        """Replace NaN by `nan`, and infinities by posinf and neginf; None: the largest and smallest number of the dtype."""
        where, largest = self._function('where'), float(np.finfo(self.dtype).max) if self.dtype.kind == 'f' else 0.0
        y = where(self.isnan(), nan, self)
        if posinf is neginf is None and largest and not abs(nan) > largest:
            return y.clip(-largest, largest)
        y = where(self == math.inf, largest if posinf is None else posinf, y)
        return where(self == -math.inf, -largest if neginf is None else neginf, y)

    def __lshift__(self, other: Numbers) -> Self:
        return self * self._power_of_two(other)

    def __rshift__(self, other: Numbers) -> Self:
        half = self._operand(other) // 2
        return self // self._power_of_two(half) // self._power_of_two(self._operand(other) - half)

    def _power_of_two(self, exponent: Any) -> Any:
        exponent = self._operand(exponent)
        for x in (self, exponent):
            if isinstance(x, float) or getattr(x, 'dtype', np.dtype(np.int32)).kind == 'f':
                raise TypeError('<< and >>: expected int32 arrays and whole numbers, got floats')
        return 2 ** exponent

    def __divmod__(self, other: Numbers) -> tuple[Self, Self]:
        return self // other, self % other

    def __rdivmod__(self, other: Numbers) -> tuple[Self, Self]:
        return other // self, other % self

    # ---- comparisons -------------------------------------------------------------------------------

    def logical_and(self, other: Numbers) -> Self:
        """Return the mask of elements where x and other are not 0."""
        return (self != 0) & (self._operand(other) != 0)

    def logical_or(self, other: Numbers) -> Self:
        """Return the mask of elements where x or other is not 0."""
        return (self != 0) | (self._operand(other) != 0)

    def logical_xor(self, other: Numbers) -> Self:
        """Return the mask of elements where exactly one of x and other is not 0."""
        return (self != 0) ^ (self._operand(other) != 0)

    def logical_not(self) -> Self:
        """Return the mask of elements that are 0."""
        return self == 0

    def isclose(self, other: Numbers, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Self:
        """Return the mask |x - other| <= atol + rtol |other|.  Equal infinities are close; equal_nan: NaN and NaN, too."""
        x = self._plain()
        x = x.astype(np.int32) if x.is_mask else x
        y = x._operand(_plain(other))
        y = y.astype(np.int32) if getattr(y, 'is_mask', False) else y
        close = (x == y) | (abs(x - y) <= abs(y) * rtol + atol) & (abs(y) < math.inf)
        return self._constant(close | x.isnan() & y.isnan() if equal_nan else close)

    def allclose(self, other: Numbers, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
        """Return whether all elements are close, see isclose."""
        return bool(self.isclose(other, rtol, atol, equal_nan).all())

    def equal(self, other: Numbers) -> bool:
        """Return whether shapes and elements are equal; NaN equals nothing."""
        other = self._operand(other)
        return self.shape == other.shape and bool((self == other).all())

    # ---- reductions --------------------------------------------------------------------------------

    def _merged(self, axis: Axis) -> tuple[Self, Shape]:
        """Return x with these axes merged into a last one, and the shape of a reduction over them with keepdims."""
        axes = normal_axes(as_axes(axis), self.ndim)
        kept = [d for d in range(self.ndim) if d not in axes]
        x = self.permute((*kept, *axes)).reshape(*(self.shape[d] for d in kept), math.prod(self.shape[d] for d in axes))
        return x, tuple(1 if d in axes else n for d, n in enumerate(self.shape))

    @accepts_torch_names
    def median(self, axis: Axis = None, keepdims: bool = False) -> Self:
        """Return the median over axes, of an even number of elements the mean of the middle two; NaN if there is one."""
        x, shape = self._merged(axis)
        n = x.shape[-1]
        if not n:
            raise ValueError(f'median of an array of shape {self.shape} over axis {axis}: it is undefined without elements')
        ordered = x.sort(-1)
        middle = (ordered[..., (n - 1) // 2] + ordered[..., n // 2]) / 2
        last = ordered[..., n - 1]              # NaN is last
        y = self._function('where')(last.isnan(), last, middle)
        return y.reshape(shape) if keepdims else y

    @accepts_torch_names
    def quantile(self, q: Numbers, axis: Axis = None, keepdims: bool = False, *, method: str = 'linear',
                 interpolation: str | None = None) -> Self:
        """Return quantile q over axes, 0 <= q <= 1; of several q along a new first axis.  NaN if there is one.

        method: between the two nearest elements 'linear', 'lower', 'higher', 'midpoint' or 'nearest'; interpolation: PyTorch's
        name.  ValueError for another q, and without elements.
        """
        method, at = method if interpolation is None else interpolation, np.asarray(_numpy(q), np.float64)
        x, shape = self._merged(axis)
        n = x.shape[-1]
        if not n or not ((at >= 0) & (at <= 1)).all():
            raise ValueError(f'quantile: expected 0 <= q <= 1 and at least one element, got q {at.tolist()} and {n} elements')
        place = at.reshape(-1) * (n - 1)
        rounded = {'linear': place, 'lower': np.floor(place), 'higher': np.ceil(place), 'nearest': np.round(place),
                   'midpoint': (np.floor(place) + np.ceil(place)) / 2}
        if method not in rounded:
            raise ValueError(f'quantile: method: expected one of {", ".join(rounded)}, got {method!r}')
        below = np.floor(rounded[method]).astype(np.int32)
        part = (rounded[method] - below).astype(x.dtype if x.dtype.kind == 'f' else np.float32)
        ordered = x.sort(-1)
        low, high = ordered[..., below], ordered[..., np.minimum(below + 1, n - 1)]
        y = self._function('where')(part == 0, low, low + (high - low) * part)        # infinity minus infinity is NaN
        last = ordered[..., n - 1:]             # NaN is last
        y = self._function('where')(last.isnan(), last, y).moveaxis(-1, 0)
        return y.reshape(*at.shape, *(shape if keepdims else y.shape[1:]))

    @accepts_torch_names
    def kthvalue(self, k: int, axis: int = -1, keepdims: bool = False) -> tuple[Self, Self]:
        """Return the k-th smallest elements along an axis, counted from 1, and their int32 indices.  ValueError for an invalid
        k."""
        d, = normal_axes(axis, self.ndim)
        if not 1 <= k <= self.shape[d]:
            raise ValueError(f'kthvalue: expected k from 1 to {self.shape[d]}, the size of axis {axis}, got {k}')
        at = self.argsort(d)[(slice(None),) * d + (slice(k - 1, k),)]
        y = self._picked(at, d)
        return (y, at) if keepdims else (y.squeeze(d), at.squeeze(d))

    @accepts_torch_names
    def aminmax(self, axis: int | None = None, keepdims: bool = False) -> tuple[Self, Self]:
        """Return the minimum and the maximum along an axis, or of all elements."""
        return self.min(axis, keepdims), self.max(axis, keepdims)

    @accepts_torch_names
    def count_nonzero(self, axis: Axis = None, keepdims: bool = False) -> Self:
        """Return the number of elements over axes that are not 0, int32."""
        return (self != 0).sum(axis, keepdims)

    @accepts_torch_names
    def nansum(self, axis: Axis = None, keepdims: bool = False) -> Self:
        """Return the sum over axes, with NaN as 0."""
        return self._function('where')(self.isnan(), 0, self).sum(axis, keepdims)

    @accepts_torch_names
    def nanmean(self, axis: Axis = None, keepdims: bool = False) -> Self:
        """Return the mean over axes of the elements that are not NaN."""
        return self.nansum(axis, keepdims) / (self == self).sum(axis, keepdims)

    def dist(self, other: Numbers, p: float = 2) -> Self:
        """Return the p-norm of x - other."""
        return (self - other).norm(p)

    def bincount(self, weights: Numbers | None = None, minlength: int = 0) -> Self:
        """Return how often each of 0, 1, 2 ... occurs, int32, or the sums of their weights, without a gradient."""
        found = np.bincount(_numpy(self), None if weights is None else _numpy(weights), minlength)
        return self._constant(self._plain()._operand(found))

    @accepts_torch_names
    def unique(self, return_index: bool = False, return_inverse: bool = False, return_counts: bool = False,
               axis: int | None = None) -> Any:
        """Return the different elements in ascending order, or slices along an axis, without a gradient; np.unique."""
        found = np.unique(_numpy(self), return_index, return_inverse, return_counts, axis)
        ours = [self._constant(self._plain()._operand(one)) for one in (found if isinstance(found, tuple) else (found,))]
        return tuple(ours) if len(ours) > 1 else ours[0]

    # ---- products ----------------------------------------------------------------------------------

    def outer(self, other: Numbers) -> Self:
        """Return the products of all elements of x and other: (M, N)."""
        return self.reshape(-1, 1) * self._operand(other).reshape(1, -1)

    def inner(self, other: Numbers) -> Self:
        """Return the sums of products over the last axes of x and other."""
        other = self._operand(other)
        return self.dot(other.swapaxes(-1, -2) if other.ndim > 1 else other)

    def mv(self, other: Numbers) -> Self:
        """Return the product of a matrix and a vector."""
        return self @ other

    def baddbmm(self, batch1: Numbers, batch2: Numbers, beta: float = 1, alpha: float = 1) -> Self:
        """Return beta x + alpha batch1 @ batch2, for stacks of matrices."""
        return self * beta + self._operand(batch1).bmm(batch2) * alpha

    def addmm(self, mat1: Numbers, mat2: Numbers, beta: float = 1, alpha: float = 1) -> Self:
        """Return beta x + alpha mat1 @ mat2."""
        return self * beta + self._operand(mat1).mm(mat2) * alpha

    # ---- parts -------------------------------------------------------------------------------------

    @accepts_torch_names
    def select(self, axis: int, index: int) -> Self:
        """Return the slice at an index along an axis, without that axis: a view."""
        return self[(slice(None),) * normal_axes(axis, self.ndim)[0] + (index,)]

    @accepts_torch_names
    def narrow(self, axis: int, start: int, length: int) -> Self:
        """Return `length` slices from `start` along an axis: a view.  IndexError if they are not all inside."""
        d, = normal_axes(axis, self.ndim)
        start, length = int(start), int(length)
        begin = start + self.shape[d] if start < 0 else start
        if not 0 <= begin <= begin + length <= self.shape[d]:
            raise IndexError(f'narrow: start {start} and length {length} exceed the {self.shape[d]} elements of axis {axis}')
        return self[(slice(None),) * d + (slice(begin, begin + length),)]

    @accepts_torch_names
    def diff(self, n: int = 1, axis: int = -1) -> Self:
        """Return the differences of neighbours along an axis, n times."""
        d, x = normal_axes(axis, self.ndim)[0], self
        for _ in range(n):
            x = x[(slice(None),) * d + (slice(1, None),)] - x[(slice(None),) * d + (slice(0, -1),)]
        return x

    def masked_select(self, mask: Numbers) -> Self:
        """Return the elements where mask is true; x and mask broadcast."""
        mask = _numpy(mask).astype(bool)
        shape = np.broadcast_shapes(self.shape, mask.shape)
        return self.broadcast_to(shape)[np.broadcast_to(mask, shape)]

    def argwhere(self) -> Self:
        """Return the indices of the elements that are not 0: (their number, ndim), int32."""
        found = np.argwhere(_numpy(self)).astype(np.int32)
        return self._constant(self._plain()._operand(found))

    @accepts_torch_names
    def unfold(self, axis: int, size: int, step: int) -> Self:
        """Return the windows of `size` elements along an axis, `step` apart; their elements are the new last axis."""
        d, = normal_axes(axis, self.ndim)
        if size > self.shape[d] or step < 1:
            raise ValueError(f'unfold: size {size} and step {step} do not fit axis {axis} of {self.shape[d]} elements')
        starts = np.arange(0, self.shape[d] - size + 1, step)
        return self.take(starts[:, None] + np.arange(size), d).moveaxis(d + 1, -1)

    @accepts_torch_names
    def tensor_split(self, sections: int | Sequence[int], axis: int = 0) -> tuple[Self, ...]:
        """Split along an axis into a number of pieces, sizes differing by 1 at most, or at the given positions: views."""
        d, = normal_axes(axis, self.ndim)
        n, before = self.shape[d], (slice(None),) * d
        if isinstance(sections, int):
            ends = [(n // sections) * i + min(i, n % sections) for i in range(1, sections)]
        else:
            ends = list(sections)
        return tuple(self[(*before, slice(a, b))] for a, b in zip([0, *ends], [*ends, n], strict=True))

    def fliplr(self) -> Self:
        """Return x with axis 1 in reverse order."""
        return self.flip(1)

    def flipud(self) -> Self:
        """Return x with axis 0 in reverse order."""
        return self.flip(0)

    @accepts_torch_names
    def diag(self, k: int = 0) -> Self:
        """Return diagonal k of a matrix, or the matrix with this diagonal from a vector."""
        if self.ndim == 2:
            return self.diagonal(k)
        if self.ndim != 1:
            raise ValueError(f'diag: expected a vector or a matrix, got shape {self.shape}')
        widened = self.pad(((max(-k, 0), max(k, 0)),)).unsqueeze(-1)
        return self._function('where')(np.eye(len(widened), k=k, dtype=bool), widened, 0)

    @accepts_torch_names
    def unflatten(self, axis: int, sizes: Sequence[int]) -> Self:
        """Split an axis into several of these sizes; one may be -1."""
        d, = normal_axes(axis, self.ndim)
        sizes = list(several((sizes,)))
        if -1 in sizes:
            sizes[sizes.index(-1)] = self.shape[d] // -math.prod(sizes)
        if math.prod(sizes) != self.shape[d]:
            raise ShapeError(f'unflatten: sizes {sizes} do not make up axis {axis} of {self.shape[d]} elements')
        return self._reshape((*self.shape[:d], *sizes, *self.shape[d + 1:]))

    # ---- writing, into a copy ----------------------------------------------------------------------

    def _places(self, axis: int, index: Numbers, who: str) -> tuple[Any, ...]:
        """Return the index of the elements x[..., index[..., j, ...], ...] along an axis."""
        d, at = normal_axes(axis, self.ndim)[0], _numpy(index)
        if at.ndim != self.ndim:
            raise ShapeError(f'{who}: index and array must have the same number of axes, got {at.ndim} and {self.ndim}')
        places: list[Any] = list(np.indices(at.shape, sparse=True))
        places[d] = at
        return tuple(places)

    @accepts_torch_names
    def scatter(self, axis: int, index: Numbers, src: Numbers) -> Self:
        """Return a copy of x with y[..., index[..., j, ...], ...] = src[..., j, ...]; src may be a number, or larger than
        index.  Of equal places the last counts."""
        places, y, src = self._places(axis, index, 'scatter'), self.copy(), self._operand(src)
        y[places] = src if not np.ndim(src) else src[tuple(map(slice, np.shape(_numpy(index))))]
        return y

    @accepts_torch_names
    def scatter_add(self, axis: int, index: Numbers, src: Numbers) -> Self:
        """Return x with src[..., j, ...] added at [..., index[..., j, ...], ...]; places may be equal."""
        places, src = self._places(axis, index, 'scatter_add'), self._operand(src)
        at = np.arange(self.size).reshape(self.shape)[places]
        added = src[tuple(map(slice, at.shape))].reshape(-1)
        return self.reshape(-1)._with_added(at.reshape(-1).astype(np.int32), added).reshape(self.shape)

    @accepts_torch_names
    def index_add(self, axis: int, index: Numbers, source: Numbers, alpha: float = 1) -> Self:
        """Return x with alpha times the slices of source along an axis added to those at `index`; indices may be equal."""
        source = self._operand(source)
        rows = (source if alpha == 1 else source * alpha).moveaxis(axis, 0)
        return self.moveaxis(axis, 0)._with_added(_numpy(index).astype(np.int32), rows).moveaxis(0, axis)

    @accepts_torch_names
    def index_copy(self, axis: int, index: Numbers, source: Numbers) -> Self:
        """Return a copy of x with the slices at `index` along an axis replaced by source."""
        y = self.copy()
        y[(slice(None),) * normal_axes(axis, self.ndim)[0] + (_index(index),)] = source
        return y

    @accepts_torch_names
    def index_fill(self, axis: int, index: Numbers, value: Numbers) -> Self:
        """Return a copy of x with the slices at `index` along an axis filled with value."""
        return self.index_copy(axis, index, value)

    # ---- new arrays, and facts ---------------------------------------------------------------------

    def new_full(self, size: Any, fill_value: float, dtype: DTypeLike | None = None, device: Any = None) -> Self:
        """Return a new array of this shape, filled with a number, with the dtype and the device of x unless given."""
        full = self._plain()._function('full')
        return self._constant(full(several((size,)), fill_value, dtype or self.dtype, device or self.device))

    def new_zeros(self, *size: Any, dtype: DTypeLike | None = None, device: Any = None) -> Self:
        """Return zeros with the dtype and the device of x unless given."""
        return self.new_full(several(size), 0, dtype, device)

    def new_ones(self, *size: Any, dtype: DTypeLike | None = None, device: Any = None) -> Self:
        """Return ones with the dtype and the device of x unless given."""
        return self.new_full(several(size), 1, dtype, device)

    def new_empty(self, *size: Any, dtype: DTypeLike | None = None, device: Any = None) -> Self:
        """Return an array with undefined contents, with the dtype and the device of x unless given."""
        return self._constant(self._plain()._function('empty')(several(size), dtype or self.dtype, device or self.device))

    def new_tensor(self, data: Numbers, dtype: DTypeLike | None = None, device: Any = None) -> Self:
        """Return a copy of these numbers, on the device of x unless given."""
        return self._constant(self._plain()._function('array')(_numpy(data), dtype, device or self.device))

    def positive(self) -> Self:
        """Return a copy."""
        return self.copy()

    def type(self, dtype: DTypeLike) -> Self:
        """PyTorch's name of astype."""
        return self.astype(dtype)

    def half(self) -> Self:
        """Raise TypeError: there are no arrays of 16 bits.  The message says what there is in their place."""
        return self.to('float16')

    def bfloat16(self) -> Self:
        """Raise TypeError, as half."""
        return self.to('bfloat16')

    def stride(self, dim: int | None = None) -> Any:
        """Return the strides in elements, or one axis's stride."""
        strides = self._plain().strides
        return tuple(strides) if dim is None else strides[normal_axes(dim, self.ndim)[0]]

    def is_contiguous(self) -> bool:
        """Return whether the elements are contiguous in row-major order."""
        return bool(self._plain().is_compact())

    # ---- in place ----------------------------------------------------------------------------------

    def fill_(self, value: Numbers) -> Self:
        """Set all elements to a number."""
        if np.ndim(value):                      # type: ignore[arg-type]
            raise ValueError(f'fill_: expected one number, got shape {np.shape(value)}; use copy_')     # type: ignore[arg-type]
        self[...] = value
        return self

    def zero_(self) -> Self:
        """Set all elements to 0."""
        return self.fill_(0)

    def copy_(self, src: Numbers, non_blocking: bool = False) -> Self:
        """Set the elements to src, broadcast and converted.  non_blocking has no effect."""
        self[...] = self._operand(src).bool() if self._plain().is_mask else src
        return self


def _in_place(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **named: Any) -> Any:
        return self._replace(lambda x: getattr(x, name)(*args, **named), (*args, *named.values()))
    method.__name__, method.__qualname__ = f'{name}_', f'TorchMethods.{name}_'
    method.__doc__ = f'Set x to x.{name}(...), in place.'
    return method


def _define() -> None:
    """Define the names of equal meaning, and the methods that change an array in place."""
    for name, of in {
            'acos': 'arccos', 'asin': 'arcsin', 'atan': 'arctan', 'atan2': 'arctan2', 'absolute': 'abs', 'fix': 'trunc',
            'negative': 'neg',
            'subtract': 'sub', 'multiply': 'mul', 'divide': 'div', 'true_divide': 'div', 'greater': 'gt', 'greater_equal': 'ge',
            'less': 'lt', 'less_equal': 'le', 'not_equal': 'ne', 'swapdims': 'swapaxes', 'take_along_dim': 'take_along_axis',
            'nelement': 'numel', 'ndimension': 'dim'}.items():
        setattr(TorchMethods, name, getattr(TorchMethods, of))
    for name in IN_PLACE:
        setattr(TorchMethods, f'{name}_', _in_place(name))


_define()


def check_stored(result: Any, x: Any) -> None:
    """Raise ValueError or TypeError if a result cannot replace the elements of x."""
    if result.shape != x.shape:
        raise ShapeError(f'in place: a result of shape {result.shape} cannot be stored in an array of shape {x.shape}')
    result_dtype, own = (np.dtype(bool) if a._plain().is_mask else a.dtype for a in (result, x))
    if not np.can_cast(result_dtype, own, 'same_kind'):
        raise TypeError(f'in place: a result of {result_dtype} cannot be stored in an array of {own}; convert it first')


# ---- functions -------------------------------------------------------------------------------------------------------

def function_of(owner: type, name: str, convert: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return the function f(x, ...) = convert(x).name(...), for a method of a class."""
    def function(*args: Any, **named: Any) -> Any:
        for given in ('input', 'x', 'a'):
            if not args and given in named:
                args = (named.pop(given),)
        if not args:
            raise TypeError(f'{name}: expected an array as its first argument, got none')
        return getattr(convert(args[0]), name)(*args[1:], **named)
    function.__name__ = function.__qualname__ = name
    function.__doc__ = f'The method {name} of the first argument.  {getattr(owner, name).__doc__ or ""}'
    return function
