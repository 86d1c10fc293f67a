"""Methods of NDArray and Tensor that few programs call, on top of torch_methods.py.

Each is a short formula of other operations, so a Tensor has its gradient.  Names are numpy's, else PyTorch's.
"""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from pyops.errors import ShapeError
from pyops.methods import _index, _numpy, accepts_torch_names, normal_axes, several
from pyops.torch_methods import TorchMethods

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyops.typing import Axis, Numbers


class FurtherMethods(TorchMethods):
    """Methods that are formulas of those in TorchMethods."""
    __slots__ = ()

    def _found(self, numbers: Any) -> Self:
        """Return numpy's result as a constant."""
        return self._constant(self._plain()._operand(np.asarray(numbers)))

    # ---- element by element ------------------------------------------------------------------------

    def exp2(self) -> Self:
        """Return 2^x."""
        return (self * math.log(2)).exp()

    def erfc(self) -> Self:
        """Return 1 - erf(x)."""
        return 1 - self.erf()

    def arcsinh(self) -> Self:
        """Return the number whose hyperbolic sine is x."""
        where = self._function('where')
        sign = where(self < 0, -1.0, 1.0)
        size = self * sign                                      # unlike abs(x) it has a gradient at 0
        is_large = size > 1e9                                   # there the result is log(2 x) to the last bit
        x = where(is_large, 1.0, size)
        square = x * x
        small = (x + square / ((square + 1).sqrt() + 1)).log1p()
        return where(is_large, where(is_large, size, 1.0).log() + math.log(2), small) * sign

    def arccosh(self) -> Self:
        """Return the number >= 0 whose hyperbolic cosine is x; NaN below 1."""
        where = self._function('where')
        is_large = self > 1e9                                   # there the result is log(2 x) to the last bit
        x = where(is_large, 1.0, self)
        more = x - 1
        small = (more + (more * (x + 1)).sqrt()).log1p()
        return where(is_large, where(is_large, self, 1.0).log() + math.log(2), small)

    def arctanh(self) -> Self:
        """Return the number whose hyperbolic tangent is x; NaN beyond -1 and 1."""
        return (self.log1p() - (-self).log1p()) / 2

    def deg2rad(self) -> Self:
        """Return degrees as radians."""
        return self * (math.pi / 180)

    def rad2deg(self) -> Self:
        """Return radians as degrees."""
        return self * (180 / math.pi)

    def sinc(self) -> Self:
        """Return sin(pi x) / (pi x), 1 at 0."""
        where, angle = self._function('where'), self * math.pi
        is_small = abs(angle) < 0.5                             # there the gradient of sin(x) / x loses digits
        inside, square, series = where(is_small, 1.0, angle), where(is_small, angle * angle, 0.0), 1.0
        for n in (13, 11, 9, 7, 5, 3):                          # 1 - x^2 / 3! + x^4 / 5! ...
            series = 1 - square * (1 / (n * (n - 1))) * series
        return where(is_small, series, inside.sin() / inside)

    def signbit(self) -> Self:
        """Return the mask of negative elements, with -0.0."""
        return self._found(np.signbit(_numpy(self)))

    def copysign(self, other: Numbers) -> Self:
        """Return |x| with the sign of other."""
        return abs(self) * np.where(np.signbit(_numpy(other)), -1.0, 1.0).astype(np.float32)

    def heaviside(self, values: Numbers) -> Self:
        """Return 0 for negative elements, 1 for positive ones, `values` for 0 and NaN for NaN; without a gradient."""
        x, where = self._plain(), self._plain()._function('where')
        return self._constant(where(x == 0, getattr(values, 'array', values), where(x < 0, 0.0, where(x > 0, 1.0, x))))

    def fmax(self, other: Numbers) -> Self:
        """Return the larger of x and other; of a number and NaN the number."""
        return self._without_nan(other, 'maximum')

    def fmin(self, other: Numbers) -> Self:
        """Return the smaller of x and other; of a number and NaN the number."""
        return self._without_nan(other, 'minimum')

    def _without_nan(self, other: Numbers, name: str) -> Self:
        where, y = self._function('where'), self._operand(other)
        y = y if hasattr(y, 'isnan') else self * 0 + y
        return where(self.isnan(), y, where(y.isnan(), self, getattr(self, name)(y)))

    def ldexp(self, other: Numbers) -> Self:
        """Return x 2^other."""
        return self * 2.0 ** self._operand(other)

    def logaddexp2(self, other: Numbers) -> Self:
        """Return log2(2^x + 2^other)."""
        return (self * math.log(2)).logaddexp(self._operand(other) * math.log(2)) / math.log(2)

    def isposinf(self) -> Self:
        """Return the mask of elements that are infinity."""
        return self._constant(self._plain() == math.inf)

    def isneginf(self) -> Self:
        """Return the mask of elements that are -infinity."""
        return self._constant(self._plain() == -math.inf)

    # ---- order -------------------------------------------------------------------------------------

    def msort(self) -> Self:
        """Return x sorted along axis 0."""
        return self.sort(0)

    @accepts_torch_names
    def mode(self, axis: int = -1, keepdims: bool = False) -> tuple[Self, Self]:
        """Return the most frequent element along an axis, of several the smallest, and its last int32 index."""
        d, = normal_axes(axis, self.ndim)
        rows = np.moveaxis(_numpy(self), d, -1)
        at = np.empty(rows.shape[:-1], np.int32)
        for place in np.ndindex(at.shape):
            values, counts = np.unique(rows[place], return_counts=True)
            at[place] = np.flatnonzero(rows[place] == values[counts.argmax()])[-1]
        index = self._found(np.expand_dims(at, d))
        y = self.take_along_axis(index, d)
        return (y, index) if keepdims else (y.squeeze(d), index.squeeze(d))

    def searchsorted(self, v: Numbers, side: str = 'left') -> Self:
        """Return the int32 positions in the sorted vector x before which v keeps the order; 'right': after equal elements."""
        return self._found(np.searchsorted(_numpy(self), _numpy(v), side))              # type: ignore[call-overload]

    @accepts_torch_names
    def unique_consecutive(self, return_inverse: bool = False, return_counts: bool = False, axis: int | None = None) -> Any:
        """Return x without elements, or slices along an axis, that equal the one before; also the number of the result for each
        element, and how many elements it stands for."""
        x = self.reshape(-1) if axis is None else self
        d, = normal_axes(0 if axis is None else axis, x.ndim)
        rows = np.moveaxis(_numpy(x), d, 0).reshape(x.shape[d], -1)
        first = np.r_[np.ones(min(len(rows), 1), bool), (rows[1:] != rows[:-1]).any(1)]
        y, inverse = x[(slice(None),) * d + (np.flatnonzero(first),)], np.cumsum(first) - 1
        more = ([self._found(inverse if axis is not None else inverse.reshape(self.shape))] if return_inverse else []) + (
            [self._found(np.bincount(inverse))] if return_counts else [])
        return (y, *more) if more else y

    @accepts_torch_names
    def logcumsumexp(self, axis: int) -> Self:
        """Return the logarithms of the sums of e^x over the first 1, 2, ... elements along an axis, without overflow."""
        x, n = self.moveaxis(axis, -1), self.shape[normal_axes(axis, self.ndim)[0]]
        every = self._function('where')(np.tri(n, dtype=bool), x.unsqueeze(-2), -math.inf)
        return every.logsumexp(-1).moveaxis(-1, axis)

    def histc(self, bins: int = 100, min: float = 0, max: float = 0) -> Self:
        """Return how many elements are in each of `bins` equal parts of min to max, float32; 0 and 0: of all elements."""
        x = _numpy(self)
        low, high = (x.min(), x.max()) if min == max == 0 else (min, max)
        low, high = (low - 1, high + 1) if low == high else (low, high)
        return self._found(np.histogram(x, bins, (low, high))[0].astype(np.float32))

    # ---- products ----------------------------------------------------------------------------------

    def vdot(self, other: Numbers) -> Self:
        """Return the sum of the products of all elements."""
        return (self.reshape(-1) * self._operand(other).reshape(-1)).sum()

    def ger(self, vec2: Numbers) -> Self:
        """PyTorch's name of outer."""
        return self.outer(vec2)

    def addmv(self, mat: Numbers, vec: Numbers, beta: float = 1, alpha: float = 1) -> Self:
        """Return beta x + alpha mat @ vec."""
        return self * beta + (self._operand(mat) @ vec) * alpha

    def addr(self, vec1: Numbers, vec2: Numbers, beta: float = 1, alpha: float = 1) -> Self:
        """Return beta x + alpha times the outer product of two vectors."""
        return self * beta + self._operand(vec1).outer(vec2) * alpha

    def addbmm(self, batch1: Numbers, batch2: Numbers, beta: float = 1, alpha: float = 1) -> Self:
        """Return beta x + alpha times the sum of the products of two stacks of matrices."""
        return self * beta + self._operand(batch1).bmm(batch2).sum(0) * alpha

    def kron(self, other: Numbers) -> Self:
        """Return the Kronecker product: a copy of `other` for each element of x, times it."""
        y = self._operand(other)
        n = max(self.ndim, y.ndim)
        a, b = ((1,) * (n - one.ndim) + tuple(one.shape) for one in (self, y))
        x = self.reshape(*[size for one in a for size in (one, 1)]) * y.reshape(*[size for one in b for size in (1, one)])
        return x.reshape(*[one * other for one, other in zip(a, b, strict=True)])

    @accepts_torch_names
    def cross(self, other: Numbers, axis: int = -1) -> Self:
        """Return the cross products of vectors of 3 elements along an axis."""
        y = self._operand(other)
        if self.shape[axis] != 3 or y.shape[axis] != 3:
            raise ShapeError(f'cross: expected 3 elements along axis {axis}, got shapes {self.shape} and {y.shape}')
        a, b = self.moveaxis(axis, -1), y.moveaxis(axis, -1)
        forward, back = [1, 2, 0], [2, 0, 1]
        return (a[..., forward] * b[..., back] - a[..., back] * b[..., forward]).moveaxis(-1, axis)

    def cov(self, *, correction: int = 1) -> Self:
        """Return the covariances of the rows of a matrix, with n - correction in the denominator."""
        x = self if self.ndim > 1 else self.reshape(1, -1)
        x = x - x.mean(1, keepdims=True)
        y = x @ x.T / (x.shape[1] - correction)
        return y if self.ndim > 1 else y.reshape(())

    def corrcoef(self) -> Self:
        """Return the correlations of the rows of a matrix."""
        y = self.cov()
        if not y.ndim:
            return y / y
        spread = y.diagonal().sqrt()
        return y / spread.unsqueeze(1) / spread

    def matrix_power(self, n: int) -> Self:
        """Return the product of n equal matrices, of a negative n of their inverses; the unit matrix for 0."""
        if n < 0:
            return self.inverse().matrix_power(-n)
        y: Any = self * 0 + np.eye(self.shape[-1], dtype=np.float32)
        x = self
        while n:
            y, n = (y @ x if n % 2 else y), n // 2
            x = x @ x if n else x
        return y

    def inverse(self) -> Self:
        """Return the inverses of matrices.  ValueError (numpy's LinAlgError) for a singular one.

        They are computed in float64; two steps of Newton's iteration y (2 - x y) then give first and second derivatives.
        """
        y = self._found(np.linalg.inv(_numpy(self).astype(np.float64)).astype(self.dtype))
        for _ in range(2 if getattr(self, 'requires_grad', False) else 0):
            y = y * 2 - y @ (self @ y)
        return y

    def slogdet(self) -> tuple[Self, Self]:
        """Return the signs of the determinants of matrices, and the logarithms of their absolute values."""
        x = _numpy(self).astype(np.float64)
        sign, log = (self._found(np.asarray(one, self.dtype)) for one in np.linalg.slogdet(x))
        if not getattr(self, 'requires_grad', False):
            return sign, log
        near = self._found(np.linalg.inv(x).astype(self.dtype)) @ (self - self._constant(self._plain().copy()))
        terms = near - near @ near / 2                  # of the series of log(1 + near), which is 0: its derivatives count
        return sign, log + terms.diagonal(0, -2, -1).sum(-1)

    def det(self) -> Self:
        """Return the determinants of matrices.  LinAlgError for the gradient of a singular one."""
        sign, log = self.slogdet()
        return sign * log.exp()

    def logdet(self) -> Self:
        """Return the logarithms of the determinants of matrices, NaN for negative ones."""
        sign, log = self.slogdet()
        return self._function('where')(sign < 0, math.nan, log)

    # ---- shapes and parts --------------------------------------------------------------------------

    def rot90(self, k: int = 1, dims: Sequence[int] = (0, 1)) -> Self:
        """Return x turned by k quarters from the first of two axes towards the second."""
        a, b = normal_axes(tuple(dims), self.ndim)
        if k % 4 == 2:
            return self.flip((a, b))
        return self if k % 4 == 0 else self.flip(b).swapaxes(a, b) if k % 4 == 1 else self.swapaxes(a, b).flip(b)

    @accepts_torch_names
    def split_with_sizes(self, sizes: Sequence[int], axis: int = 0) -> tuple[Self, ...]:
        """PyTorch's name of split."""
        return self.split(list(sizes), axis)

    def hsplit(self, sections: Any) -> tuple[Self, ...]:
        """Split along axis 1, a vector along axis 0, as tensor_split."""
        return self.tensor_split(sections, min(1, self.ndim - 1))

    def vsplit(self, sections: Any) -> tuple[Self, ...]:
        """Split along axis 0, as tensor_split."""
        return self.tensor_split(sections, 0)

    def dsplit(self, sections: Any) -> tuple[Self, ...]:
        """Split along axis 2, as tensor_split."""
        return self.tensor_split(sections, 2)

    def diag_embed(self, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Self:
        """Return matrices of zeros with the last axis of x as their diagonal; dim1 and dim2: their axes in the result."""
        n = self.shape[-1] + abs(offset)
        rows = np.arange(self.shape[-1]) + max(-offset, 0)
        y = self.new_zeros(*self.shape[:-1], n, n)
        y[..., rows, rows + offset] = self
        return y.moveaxis((-2, -1), (dim1, dim2))

    def diagflat(self, offset: int = 0) -> Self:
        """Return a matrix of zeros with all elements of x as its diagonal."""
        return self.reshape(-1).diag_embed(offset)

    def fill_diagonal_(self, fill_value: float, wrap: bool = False) -> Self:
        """Set the diagonal of a matrix to a number, in place.   wrap: again after each square part of a tall matrix"""
        if self.ndim != 2:
            raise ValueError(f'fill_diagonal_: expected a matrix, got shape {self.shape}')
        height, width = self.shape
        places = np.arange(0, height * width if wrap else min(height, width) * width, width + 1)
        self[places // width, places % width] = fill_value
        return self

    def index_put(self, indices: Sequence[Any], values: Numbers, accumulate: bool = False) -> Self:
        """Return a copy with y[indices] = values;  accumulate: values are added, also at equal places."""
        y = self.clone()
        return y.index_put_(indices, values, accumulate)

    def index_put_(self, indices: Sequence[Any], values: Numbers, accumulate: bool = False) -> Self:
        """Set x[indices] to values, in place.   accumulate: as in index_put"""
        index = tuple(map(_index, indices))
        if not accumulate:
            self[index] = values
            return self
        places = np.arange(self.size).reshape(self.shape)[tuple(_numpy(one) for one in index)]
        added = self._operand(values)
        added = added.broadcast_to(places.shape) if hasattr(added, 'broadcast_to') else np.full(places.shape, added, np.float32)
        return self._replace(lambda x: x.reshape(-1)._with_added(
            places.reshape(-1).astype(np.int32), added.reshape(-1)).reshape(x.shape), (added,))

    def masked_scatter(self, mask: Numbers, source: Numbers) -> Self:
        """Return x with the elements where mask is true replaced by the first elements of source, in order."""
        mask = np.broadcast_to(_numpy(mask).astype(bool), self.shape)
        y, source = self.clone(), self._operand(source)
        y[mask] = source.reshape(-1)[:int(mask.sum())]
        return y

    @accepts_torch_names
    def scatter_reduce(self, axis: int, index: Numbers, src: Numbers, reduce: str, *, include_self: bool = True) -> Self:
        """Return x with src[..., j, ...] combined into [..., index[..., j, ...], ...]; places may be equal.

        reduce: 'sum', 'mean', 'prod', 'amax' or 'amin'.  include_self: False: places with src lose the element of x
        """
        if reduce not in ('sum', 'mean', 'prod', 'amax', 'amin'):
            raise ValueError(f"scatter_reduce: reduce: expected 'sum', 'mean', 'prod', 'amax' or 'amin', got {reduce!r}")
        places, src = self._places(axis, index, 'scatter_reduce'), self._operand(src)
        at = np.arange(self.size).reshape(self.shape)[places].reshape(-1)
        parts, x = src[tuple(map(slice, np.shape(_numpy(index))))].reshape(-1), self.reshape(-1)
        count = np.bincount(at, minlength=self.size)
        neutral = {'prod': 1.0, 'amax': -math.inf, 'amin': math.inf}.get(reduce, 0.0)
        if not include_self:
            x = self._function('where')(count > 0, neutral, x)
        if reduce in ('sum', 'mean'):
            y = x._with_added(at.astype(np.int32), parts)
            terms = np.maximum(count + include_self, 1).astype(np.float32)
            return (y / self._operand(np.where(count > 0, terms, 1)) if reduce == 'mean' else y).reshape(self.shape)
        # the k-th part of each place in row k
        order = np.argsort(at, kind='stable')
        rank = np.empty(len(at), np.int64)
        rank[order] = np.arange(len(at)) - np.searchsorted(at[order], at[order])
        table = self.new_full((int(rank.max(initial=-1)) + 1, self.size), neutral)
        table[rank, at] = parts
        return getattr(self._function('concatenate')([x.unsqueeze(0), table]), reduce)(0).reshape(self.shape)

    @accepts_torch_names
    def select_scatter(self, src: Numbers, axis: int, index: int) -> Self:
        """Return a copy with the slice at an index along an axis replaced by src."""
        y = self.clone()
        y[(slice(None),) * normal_axes(axis, self.ndim)[0] + (index,)] = src
        return y

    @accepts_torch_names
    def slice_scatter(self, src: Numbers, axis: int = 0, start: int | None = None, end: int | None = None,
                      step: int = 1) -> Self:
        """Return a copy with the slices start to end along an axis replaced by src."""
        y = self.clone()
        y[(slice(None),) * normal_axes(axis, self.ndim)[0] + (slice(start, end, step),)] = src
        return y

    def sum_to_size(self, *size: Any) -> Self:
        """Return the sums over the axes that broadcasting from this shape would add or enlarge."""
        shape = several(size)
        more = self.ndim - len(shape)
        axes = tuple(d for d in range(self.ndim) if d < more or shape[d - more] == 1 != self.shape[d])
        return self.sum(axes, keepdims=True).reshape(shape) if axes else self

    @accepts_torch_names
    def compress(self, condition: Numbers, axis: Axis = None) -> Self:
        """Return the slices along an axis, None: of the flattened array, for which condition is true."""
        x, d = self._along(axis)
        return x[(slice(None),) * d + (np.flatnonzero(_numpy(condition)),)]

    # ---- facts -------------------------------------------------------------------------------------

    @property
    def is_cuda(self) -> bool:
        """Whether the memory is a GPU's."""
        return not self.device.is_host

    def is_complex(self) -> bool:
        """Return False: there are no complex numbers."""
        return False

    def is_signed(self) -> bool:
        """Return whether the elements can be negative: False for a mask."""
        return not self._plain().is_mask

    def is_nonzero(self) -> bool:
        """Return whether the only element is not 0."""
        return bool(self)

    def is_same_size(self, other: Any) -> bool:
        """Return whether the shapes are equal."""
        return bool(self.shape == other.shape)

    def get_device(self) -> int:
        """Return the number of the GPU, -1 on the CPU."""
        return 0 if self.is_cuda else -1

    def cuda(self, device: Any = None, non_blocking: bool = False) -> Self:
        """Return x on the first GPU.   device, non_blocking: accepted as in PyTorch, without effect"""
        return self.to('cuda')

    def data_ptr(self) -> int:
        """Return the address of the first element."""
        return int(self._plain().location())

    def tobytes(self) -> bytes:
        """Return the elements in row-major order as bytes, one each for a mask."""
        return _numpy(self).tobytes()


def _define() -> None:
    """Define the names of equal meaning."""
    for name, of in {'asinh': 'arcsinh', 'acosh': 'arccosh', 'atanh': 'arctanh', 'sgn': 'sign', 'bitwise_and': '__and__',
                     'bitwise_or': '__or__', 'bitwise_xor': '__xor__', 'bitwise_not': '__invert__',
                     'bitwise_left_shift': '__lshift__', 'bitwise_right_shift': '__rshift__'}.items():
        def method(self: Any, *args: Any, of: str = of) -> Any:
            return getattr(self, of)(*args)
        method.__name__, method.__doc__ = name, f'Another name of {of}.'
        setattr(FurtherMethods, name, method)


_define()
