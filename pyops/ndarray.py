"""NDArray: a shape, strides and an offset into a buffer on a device.

    a = ndarray.array([[1, 2, 3], [4, 5, 6]], dtype='float32')
    a.T, a[::-1, 1:], a.broadcast_to((4, 2, 3))         views: the same memory
    (a + a[0]).sum(axis=1), a @ a.T                     new arrays

It behaves like numpy's ndarray, with dtypes float32 and int32 and at most 8 axes; docs/ndarray.md lists the differences.
A view allocates no memory; operations accept operands with any strides.
"""
from __future__ import annotations

import functools
import gc
import math
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from pyops import backend
from pyops.backend import row_major
from pyops.backend.arrays import Array
from pyops.backend.device import Buffer
from pyops.backend.numpy_device import Numpy
from pyops.environment import backend_name
from pyops.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import DTypeLike

    from pyops.backend.device import Device
    from pyops.backend.gpu import GPU
    from pyops.backend.host import CPU
    from pyops.typing import Axis, Index, Numbers, Shape

FLOAT, INT = np.dtype(np.float32), np.dtype(np.int32)
MAX_AXES = 8
_INT_RANGE = range(-2**31, 2**31)
_NUMBERS, _FLOATS = (int, float, np.integer, np.floating, np.bool_), (float, np.floating)
_COMPARISONS = frozenset(('equal', 'not_equal', 'less', 'less_equal', 'greater', 'greater_equal'))
# Ops on two masks: the first return a mask, as for bools in numpy; a sum or difference could be a mask or row numbers.
_KEEPS_MASKS, _MIXES_MASKS = frozenset(('multiply', 'maximum', 'minimum')), frozenset(('add', 'subtract'))
_UNSURE = -1            # Buffer.mask of such a sum or difference; never a version


# ---- devices ---------------------------------------------------------------------------------------------------------

def cpu() -> CPU:
    """Return the CPU device, which uses the kernels of the library.  Its `precision` can be set."""
    return backend.HOST


@functools.cache
def numpy_device() -> Device:
    """Return the CPU device that uses numpy: the reference for the kernels."""
    return Numpy()


@functools.cache
def gpu() -> GPU:
    """Return the first GPU, which uses the CUDA library.  Its `precision` and `storage` can be set.  UserError if there is
    none."""
    from pyops.backend.gpu import GPU
    return GPU(NDArray)


def default_device() -> Device:
    """Return the device of new arrays, on which ops allocate as well: at first the one that $PYOPS_BACKEND names."""
    return backend.current_device()


def use_gpu(precision: str = 'fp32') -> GPU:
    """Allocate all new arrays on the GPU, including the results of ops, and return the device."""
    device = gpu()
    device.precision, device.storage = precision, 'fp32'
    backend.use(device)
    return device


def _remade(values: np.ndarray, device: str, is_mask: bool = False) -> NDArray:
    devices: dict[str, Any] = {'cpu': cpu, 'numpy_device': numpy_device, 'gpu': gpu}
    place = devices[device]()
    # an array of an op on a GPU may have another dtype, such as a step count
    made = array(values, device=place) if values.dtype in (FLOAT, INT) else place.put(values)
    return _as_mask(made) if is_mask else made


def live_buffers() -> list[Buffer]:
    """Return all Buffers that are still referenced; for memory tests."""
    return [found for found in gc.get_objects() if type(found) is Buffer and found.owner is not None]


# ---- shapes ----------------------------------------------------------------------------------------------------------

@functools.lru_cache(8192)
def broadcast_shape(*shapes: Shape) -> Shape:
    """Return the shape that all shapes broadcast to.  Raises ValueError naming them."""
    try:
        shape = np.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(f'operands could not be broadcast together with shapes {" ".join(map(str, shapes))}') from None
    return _checked(shape)


@functools.lru_cache(8192)
def _fits(shape: Shape, to: Shape) -> bool:
    """Return whether an array of `shape` can be broadcast to `to`."""
    missing = len(to) - len(shape)
    return missing >= 0 and all(n in (1, size) for n, size in zip(shape, to[missing:], strict=True))


def _checked(shape: Shape) -> Shape:
    if len(shape) > MAX_AXES:
        raise ValueError(f'shape {shape}: {len(shape)} axes, expected at most {MAX_AXES}')
    return shape


def _shape_of(shape: Any) -> Shape:
    """Convert an int or several to a checked shape."""
    try:
        shape = tuple(map(operator.index, shape if isinstance(shape, tuple | list) else (shape,)))
    except TypeError:
        raise TypeError(f'shape: expected integers, got {shape!r}') from None
    if any(n < 0 for n in shape):
        raise ValueError(f'shape {shape}: negative sizes are not allowed')
    return _checked(shape)


@functools.lru_cache(8192, typed=True)          # typed: 1.0 equals 1 but is not an axis
def _axes(axis: Axis, ndim: int) -> Shape:
    """Return axes (None for all, an int, or several) as non-negative ints.  Raises np.exceptions.AxisError beyond ndim."""
    if axis is None:
        return tuple(range(ndim))
    found = []
    for one in axis if isinstance(axis, tuple) else (axis,):
        one = operator.index(one)
        if not -ndim <= one < ndim:
            raise np.exceptions.AxisError(one, ndim)
        found.append(one % ndim)
    if len(set(found)) < len(found):
        raise ValueError(f"duplicate value in 'axis': {axis}")
    return tuple(found)


@functools.lru_cache(8192)
def _view_strides(shape: Shape, strides: Shape, to: Shape) -> Shape | None:
    """Return the strides of a view with shape `to` of the same elements in order; None if it requires a copy."""
    if 0 in shape or row_major(shape) == strides:
        return row_major(to)
    old = [(n, step) for n, step in zip(shape, strides, strict=True) if n != 1]
    new = [n for n in to if n != 1]
    found, i, j = [], 0, 0
    while i < len(old):                         # find the smallest groups of old and new axes with equal element counts
        (have, _), need, first = old[i], new[j], j
        i, j = i + 1, j + 1
        while have != need:
            if need < have:
                need, j = need * new[j], j + 1
            elif old[i - 1][1] == old[i][0] * old[i][1]:
                have, i = have * old[i][0], i + 1
            else:
                return None                     # the two old axes cannot be merged: they are not contiguous
        step = old[i - 1][1]
        found += [step * inner for inner in row_major(tuple(new[first:j]))]
    steps = iter(found)
    return tuple([0 if n == 1 else next(steps) for n in to])


# ---- the array -------------------------------------------------------------------------------------------------------

class NDArray(Array):
    """An array: a Buffer, and shape, strides and offset in elements.  Create one with array, empty, zeros, from_numpy, ..."""

    __slots__ = ()
    __array_ufunc__ = None                      # numpy's operators defer to ours

    @property
    def T(self) -> NDArray:
        return NDArray(self.buffer, self.offset, self.shape[::-1], self.strides[::-1], self.dtype)

    @property
    def is_mask(self) -> bool:
        """Whether the elements are truth values: the array is the result of a comparison, was created from bools, or is a view
        or copy of such an array.

        As an index a mask selects elements instead of giving row numbers.  It stays a mask if 0, 1, bools or a mask are
        written into it.
        """
        return self.buffer.mask == self.buffer.version

    # ---- to Python and numpy -----------------------------------------------------------------------

    def numpy(self) -> np.ndarray:
        """Return a numpy array over the same memory; for a mask, a bool copy; from a GPU, a copy that waits for the device."""
        found = self.stored()
        return found.astype(bool) if self.is_mask else found

    def stored(self) -> np.ndarray:
        """Like `numpy`, but a mask is returned as stored: 1 and 0 in its dtype."""
        if self.buffer.owner is None:
            raise self._freed()
        return self.device.numpy(self)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        array = self.numpy()
        if dtype is not None and np.dtype(dtype) != array.dtype:
            if copy is False:
                raise ValueError(f'{array.dtype} to {np.dtype(dtype)}: that needs a copy')
            return array.astype(dtype)
        return array.copy() if copy else array

    def __dlpack__(self, **how: Any) -> Any:
        if self.size and min(self.strides, default=0) < 0:              # torch would abort the process
            raise BufferError(f'array of shape {self.shape}: DLPack consumers may not support negative strides, got '
                              f'{self.strides}; export .copy()')
        return self.numpy().__dlpack__(**{name: value for name, value in how.items() if value is not None})

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.numpy().__dlpack_device__()

    def item(self) -> Any:
        """Return the only element as a Python number.  Raises ValueError for another size."""
        if self.size != 1:
            raise ValueError(f'can only convert an array of size 1 to a number, got shape {self.shape}')
        return self.numpy().item()

    def tolist(self) -> Any:
        return self.numpy().tolist()

    def __format__(self, how: str) -> str:
        return format(self.item(), how) if how and not self.shape else super().__format__(how)

    def __reduce__(self) -> tuple[Any, ...]:
        """Support copy and pickle: the result is an independent array on the same device."""
        return _remade, (np.array(self.stored()), self.device.name, self.is_mask)

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        if self.dtype is not INT or self.ndim or self.is_mask:
            raise TypeError(f'only an int32 array of shape () is an index, got {self._kind()} {self.shape}')
        return self.item()

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ValueError(f'the truth value of an array of shape {self.shape} is ambiguous: it has {self.size} elements; '
                             'use .max() for any of them, .min() for all')
        return bool(self.item())

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError('len() of an array of shape ()')
        return self.shape[0]

    def __iter__(self) -> Iterator[NDArray]:
        if not self.shape:
            raise TypeError('iteration over an array of shape ()')
        return (self[i] for i in range(self.shape[0]))

    def __repr__(self) -> str:
        if self.buffer.owner is None:
            return f'NDArray(shape={self.shape}, dtype={self.dtype}, freed)'
        text = np.array2string(self.numpy(), separator=', ', prefix='NDArray(')
        shape = '' if self.size else f'shape={self.shape}, '
        device = '' if self.device is backend.HOST else f', device={self.device}'
        return f'NDArray({text}, {shape}{"" if self.is_mask else "dtype="}{self._kind()}{device})'

    def _kind(self) -> str:
        return f'mask of {self.dtype}' if self.is_mask else str(self.dtype)

    def __str__(self) -> str:
        return str(self.numpy())

    # ---- views -------------------------------------------------------------------------------------

    def as_strided(self, shape: Shape | int, strides: Sequence[int], offset: int | None = None) -> NDArray:
        """Return a view with these strides, `offset` elements after the start of the buffer (default: this array's offset).

        Strides are in elements.  Raises ValueError if the view would leave the buffer.
        """
        shape, strides = _shape_of(shape), tuple(operator.index(step) for step in strides)
        offset = self.offset if offset is None else operator.index(offset)
        if len(strides) != len(shape):
            raise ValueError(f'as_strided: shape {shape} and strides {strides}: expected equal lengths')
        ends = [(n - 1) * step for n, step in zip(shape, strides, strict=True)]
        low, high = offset + sum(min(end, 0) for end in ends), offset + sum(max(end, 0) for end in ends)
        if 0 not in shape and not 0 <= low <= high < self.buffer.nbytes // self.dtype.itemsize:
            raise ValueError(f'as_strided: shape {shape}, strides {strides} and offset {offset} cover elements {low} to '
                             f'{high}, but the buffer has {self.buffer.nbytes // self.dtype.itemsize}')
        return NDArray(self.buffer, offset, shape, strides, self.dtype)

    def reshape(self, *shape: Any) -> NDArray:
        """Return the same elements in order in another shape: a view if strides allow it, else a compact copy.

        One size may be -1 and is inferred.  Raises ValueError if the number of elements differs.
        """
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        shape = tuple(operator.index(n) for n in (shape if isinstance(shape, tuple | list) else (shape,)))
        size = self.size
        if -1 in shape:
            rest = -math.prod(shape)
            known = rest > 0 and shape.count(-1) == 1 and size % rest == 0
            to = tuple(size // rest if n == -1 else n for n in shape) if known else None
        else:
            to = shape if min(shape, default=0) >= 0 and math.prod(shape) == size else None
        if to is None:
            raise ValueError(f'cannot reshape array of shape {self.shape} into shape {shape}')
        strides = _view_strides(self.shape, self.strides, _checked(to))
        if strides is None:
            return self.copy().reshape(to)
        return NDArray(self.buffer, self.offset, to, strides, self.dtype)

    def permute(self, axes: Iterable[int]) -> NDArray:
        """Return a view whose axis d is axis axes[d] of this array."""
        order = _axes(tuple(axes), len(self.shape))
        if len(order) != len(self.shape):
            raise ValueError(f"permute: axes {tuple(axes)} don't match shape {self.shape}")
        return NDArray(self.buffer, self.offset, tuple([self.shape[d] for d in order]),
                       tuple([self.strides[d] for d in order]), self.dtype)

    def transpose(self, *axes: Any) -> NDArray:
        """Permute the axes; without arguments, reverse their order."""
        order = axes[0] if len(axes) == 1 and (axes[0] is None or not isinstance(axes[0], int)) else axes
        return self.permute(order) if order else self.T

    def swapaxes(self, a: int, b: int) -> NDArray:
        a, b = _axes((a,), self.ndim)[0], _axes((b,), self.ndim)[0]
        order = list(range(self.ndim))
        order[a], order[b] = b, a
        return self.permute(order)

    def broadcast_to(self, shape: Shape | int) -> NDArray:
        """Return a read-only view of another shape, with stride 0 along repeated axes.  ValueError if it does not broadcast."""
        shape = _shape_of(shape)
        if not _fits(self.shape, shape):
            raise ValueError(f'could not broadcast array from shape {self.shape} into shape {shape}')
        steps = [0 if n == 1 else step for n, step in zip(self.shape, self.strides, strict=True)]
        return NDArray(self.buffer, self.offset, shape, (0,) * (len(shape) - len(steps)) + tuple(steps), self.dtype)

    def flip(self, *axes: Any) -> NDArray:
        """Return a view in reverse order along these axes (numbers or one tuple); along all if none or None is given."""
        axis = axes[0] if len(axes) == 1 else axes or None
        offset, strides = self.offset, list(self.strides)
        for d in _axes(tuple(axis) if isinstance(axis, list) else axis, self.ndim):
            offset += max(self.shape[d] - 1, 0) * strides[d]
            strides[d] = -strides[d]
        return NDArray(self.buffer, offset, self.shape, tuple(strides), self.dtype)

    def __getitem__(self, index: Index) -> NDArray:
        """Return a view for integers, slices, Ellipsis and None; take() along the first axis for an array or list of integers;
        a copy of the selected elements for a mask, or bools, in the shape of the first axes."""
        is_array = isinstance(index, NDArray) and (index.shape or index.buffer.mask is not None)
        if is_array or isinstance(index, list | np.ndarray):
            mask = mask_in(index)
            if mask is None:
                return self.take(index)
            ids = selected(mask, self.shape)
            return self.reshape(mask.size, *self.shape[mask.ndim:]).take(ids)
        offset, shape, strides = self._select(index)
        return NDArray(self.buffer, offset, shape, strides, self.dtype)

    def _select(self, index: Index) -> tuple[int, Shape, Shape]:
        items = index if type(index) is tuple else (index,)
        offset, shape, strides, axis = self.offset, [], [], 0
        wanted = sum([item is not None and item is not Ellipsis for item in items])
        if wanted > len(self.shape):
            raise IndexError(f'too many indices for array of shape {self.shape}: {wanted}')
        seen = False
        for item in items:
            if item is None:
                shape.append(1)
                strides.append(0)
                continue
            if item is Ellipsis:
                if seen:
                    raise IndexError("an index can only have a single ellipsis ('...')")
                seen, skipped = True, len(self.shape) - wanted
                shape += self.shape[axis:axis + skipped]
                strides += self.strides[axis:axis + skipped]
                axis += skipped
                continue
            n, step = self.shape[axis], self.strides[axis]
            if type(item) is slice:
                start, stop, by = item.indices(n)
                count = len(range(start, stop, by))
                if count:
                    offset += start * step
                shape.append(count)
                strides.append(step * by)
            else:
                offset += self._position(item, axis) * step
            axis += 1
        shape += self.shape[axis:]
        strides += self.strides[axis:]
        if len(shape) > MAX_AXES:
            _checked(tuple(shape))
        return offset, tuple(shape), tuple(strides)

    def _position(self, item: Any, axis: int) -> int:
        n = self.shape[axis]
        try:
            if isinstance(item, bool | np.bool_):
                raise TypeError
            i = operator.index(item)
        except TypeError:
            raise IndexError('only integers, slices (`:`), ellipsis (`...`) and None are valid indices, and to read also one '
                             f'array or list, of integers or bools, alone; got {type(item).__name__}') from None
        if not -n <= i < n:
            raise IndexError(f'index {i} is out of bounds for axis {axis} with size {n}')
        return i + n if i < 0 else i

    # ---- copies ------------------------------------------------------------------------------------

    def copy(self) -> NDArray:
        """Return a compact copy."""
        y = _new(self.shape, self.dtype, self.buffer.device, 'copy')
        self.buffer.device.unary('copy', y, self)
        return _as_mask(y) if self.is_mask else y

    def compact(self) -> NDArray:
        """Return this array if it is compact, else a compact copy."""
        return self if self.is_compact() else self.copy()

    def astype(self, dtype: DTypeLike) -> NDArray:
        """Convert to float32 or int32 (rounding towards 0).  Returns this array if it has that dtype and is not a mask."""
        y = self._cast(_dtype(dtype))
        if y.buffer.mask is None:
            return y
        y = y.copy()
        y.buffer.mask = None            # from now on numbers, not truth values
        return y

    def _cast(self, dtype: np.dtype) -> NDArray:
        if dtype is self.dtype:
            return self
        y = _new(self.shape, dtype, self.device, 'astype')
        self.device.convert(y, self)
        return y

    def to(self, device: Device) -> NDArray:
        """Return this array if it is on that device, else a copy there."""
        return self if device is self.device else array(self, device=device)

    def take(self, ids: Numbers) -> NDArray:
        """Return a copy of the elements of axis 0 with these indices, negative from the end.  IndexError if one is outside."""
        if not self.shape:
            raise IndexError('too many indices for array of shape (): 1')
        if self.buffer.owner is None:
            raise self._freed()
        n, asked, ids = self.shape[0], ids, _ids(ids, self.shape[0], self.device)
        y = _new(_checked(ids.shape + self.shape[1:]), self.dtype, self.device, 'take')
        width = math.prod(self.shape[1:])
        try:
            self.device.take(y.reshape(ids.size, width), self.compact().reshape(n, width), ids.reshape(ids.size))
        except IndexError:
            wrong = next((i for i in np.asarray(asked).reshape(-1).tolist() if not -n <= i < n), None)
            if wrong is None:
                raise
            raise IndexError(f'index {wrong} is out of bounds for axis 0 with size {n}') from None
        return _as_mask(y) if self.is_mask else y

    def add_at(self, ids: Numbers, rows: Numbers) -> None:
        """self[ids[r]] += rows[r] for r in order; ids may repeat.  In place, for compact float32 arrays."""
        if self.dtype is not FLOAT or not self.is_compact() or not self.shape:
            raise TypeError(f'add_at: expected a compact float32 array of rows, got {self.dtype}, shape {self.shape}, '
                            f'strides {self.strides}')
        ids = _ids(ids, self.shape[0], self.device)
        added = _operand(rows, self)._cast(FLOAT).broadcast_to(ids.shape + self.shape[1:]).compact()
        width = math.prod(self.shape[1:])
        self.device.add_at(self.reshape(self.shape[0], width), ids.reshape(ids.size), added.reshape(ids.size, width))
        self.buffer.version += 1

    # ---- assignment --------------------------------------------------------------------------------

    def __setitem__(self, index: Index, value: Numbers) -> None:
        offset, shape, strides = self._select(index)
        NDArray(self.buffer, offset, shape, strides, self.dtype)._assign(value)

    def fill(self, value: Numbers) -> None:
        """Set every element to value."""
        self._assign(value)

    def _assign(self, value: Numbers) -> None:
        stays_mask = self.is_mask and _is_boolean(value)
        self._write(value)
        if stays_mask:
            self.buffer.mask = self.buffer.version

    def _write(self, value: Any) -> None:
        self._check_writable()
        if self.dtype is not FLOAT and self.dtype is not INT and isinstance(value, _NUMBERS):
            value = np.full(self.shape, value, self.dtype)      # arrays of ops on a GPU: step counts, rows, pixels
        if isinstance(value, NDArray | np.ndarray) and value is not self and self.device.assign(self, value):
            self.buffer.version += 1
            return
        if not isinstance(value, NDArray):
            if isinstance(value, _NUMBERS):
                value = float(value) if self.dtype is FLOAT else _int32(int(value))
                if self.size:
                    self.device.fill(self, value)
                self.buffer.version += 1
                return
            value = array(value, self.dtype, self.device)
        if _identical(self, value):
            return
        _same_device(self, value)
        while len(value.shape) > len(self.shape) and value.shape[0] == 1:
            value = value[0]
        if value.shape != self.shape and not _fits(value.shape, self.shape):
            raise ValueError(f'could not broadcast input array from shape {value.shape} into shape {self.shape}')
        if _overlap(self, value):
            value = value.copy()
        if not self.size:
            pass
        elif value.dtype is self.dtype:
            self.device.unary('copy', self, value)
        else:
            self.device.convert(self, value)
        self.buffer.version += 1

    def _check_writable(self) -> None:
        if 0 in self.strides and 0 not in self.shape and any(
                n > 1 and step == 0 for n, step in zip(self.shape, self.strides, strict=True)):
            raise ValueError(f'array of shape {self.shape}: a broadcast view cannot be written to; copy() it first')

    # ---- element by element ------------------------------------------------------------------------

    def _unary(self, op: str) -> NDArray:
        x = self.astype(FLOAT) if self.dtype is INT and op not in ('negate', 'abs') else self
        device = x.buffer.device
        y = _new(x.shape, x.dtype, device, op)
        device.unary(op, y, x)
        if op in ('negate', 'abs') and x.is_mask:
            y.buffer.mask = _UNSURE if op == 'negate' else y.buffer.version
        return y

    def _binary(self, op: str, other: Any, reflected: bool = False) -> NDArray:
        if type(other) is not NDArray:
            if isinstance(other, _NUMBERS):
                return self._scalar(op, other, reflected)
            other = _operand(other, self)
            if other is NotImplemented:
                return NotImplemented
        a, b = (other, self) if reflected else (self, other)
        both_masks = a.is_mask and b.is_mask
        device = a.buffer.device
        if device is not b.buffer.device:
            _same_device(a, b)
        if a.dtype is not b.dtype or op == 'divide':
            a, b = a._cast(FLOAT), b._cast(FLOAT)
        y = _new(a.shape if a.shape == b.shape else broadcast_shape(a.shape, b.shape), a.dtype, device, op)
        device.binary(op, y, a, b)
        if op in _COMPARISONS or op in _KEEPS_MASKS and both_masks:
            return _as_mask(y)
        if op in _MIXES_MASKS and both_masks:
            y.buffer.mask = _UNSURE
        return y

    def _scalar(self, op: str, value: Any, reflected: bool, y: NDArray | None = None) -> NDArray:
        x = self
        if x.dtype is INT:
            if op == 'divide' or isinstance(value, _FLOATS):
                x = x._cast(FLOAT)
            else:
                value = _int32(int(value))
        if x.dtype is FLOAT:
            value = float(value)
        device = x.buffer.device
        if y is None:
            y = _new(x.shape, x.dtype, device, op)
        device.scalar(op, y, x, value, reflected)
        return _as_mask(y) if op in _COMPARISONS else y

    def _in_place(self, op: str, other: Any) -> NDArray:
        self._check_writable()
        if type(other) is not NDArray:
            if isinstance(other, _NUMBERS):
                if self.dtype is INT and (op == 'divide' or isinstance(other, _FLOATS)):
                    raise TypeError(f'{op}: an int32 array cannot hold the float32 result; use astype first')
                self._scalar(op, other, False, self)
                self.buffer.version += 1
                return self
            other = _operand(other, self)
            if other is NotImplemented:
                return NotImplemented
        _same_device(self, other)
        if self.dtype is INT and (other.dtype is FLOAT or op == 'divide'):
            raise TypeError(f'{op}: an int32 array cannot hold the float32 result; use astype first')
        if other.shape != self.shape and broadcast_shape(self.shape, other.shape) != self.shape:
            raise ValueError(f'non-broadcastable output operand with shape {self.shape}: the result with an operand of shape '
                             f'{other.shape} has shape {broadcast_shape(self.shape, other.shape)}')
        other = other._cast(self.dtype)
        if _overlap(self, other) and not _identical(self, other):
            other = other.copy()
        self.device.binary(op, self, self, other)
        self.buffer.version += 1
        return self

    def __add__(self, other: Numbers) -> NDArray:
        return self._binary('add', other)

    def __radd__(self, other: Numbers) -> NDArray:
        return self._binary('add', other, True)

    def __iadd__(self, other: Numbers) -> NDArray:
        return self._in_place('add', other)

    def __sub__(self, other: Numbers) -> NDArray:
        return self._binary('subtract', other)

    def __rsub__(self, other: Numbers) -> NDArray:
        return self._binary('subtract', other, True)

    def __isub__(self, other: Numbers) -> NDArray:
        return self._in_place('subtract', other)

    def __mul__(self, other: Numbers) -> NDArray:
        return self._binary('multiply', other)

    def __rmul__(self, other: Numbers) -> NDArray:
        return self._binary('multiply', other, True)

    def __imul__(self, other: Numbers) -> NDArray:
        return self._in_place('multiply', other)

    def __truediv__(self, other: Numbers) -> NDArray:
        return self._binary('divide', other)

    def __rtruediv__(self, other: Numbers) -> NDArray:
        return self._binary('divide', other, True)

    def __itruediv__(self, other: Numbers) -> NDArray:
        return self._in_place('divide', other)

    def __pow__(self, other: Numbers) -> NDArray:
        return self._binary('power', other)

    def __rpow__(self, other: Numbers) -> NDArray:
        return self._binary('power', other, True)

    def __ipow__(self, other: Numbers) -> NDArray:
        return self._in_place('power', other)

    def __eq__(self, other: Any) -> NDArray:                # type: ignore[override]
        return self._binary('equal', other)

    def __ne__(self, other: Any) -> NDArray:                # type: ignore[override]
        return self._binary('not_equal', other)

    def __lt__(self, other: Numbers) -> NDArray:
        return self._binary('less', other)

    def __le__(self, other: Numbers) -> NDArray:
        return self._binary('less_equal', other)

    def __gt__(self, other: Numbers) -> NDArray:
        return self._binary('greater', other)

    def __ge__(self, other: Numbers) -> NDArray:
        return self._binary('greater_equal', other)

    __hash__ = None                             # type: ignore[assignment]  # == returns an array

    def __neg__(self) -> NDArray:
        return self._unary('negate')

    def __pos__(self) -> NDArray:
        return self.copy()

    def __abs__(self) -> NDArray:
        return self._unary('abs')

    def maximum(self, other: Numbers) -> NDArray:
        """Return the elementwise maximum; NaN if either operand is NaN."""
        return self._named('maximum', other)

    def minimum(self, other: Numbers) -> NDArray:
        """Return the elementwise minimum; NaN if either operand is NaN."""
        return self._named('minimum', other)

    def _named(self, op: str, other: Numbers) -> NDArray:
        y = self._binary(op, other)
        if y is NotImplemented:
            raise TypeError(f'{op}: expected an array or a number, got {type(other).__name__}')
        return y

    def exp(self) -> NDArray:
        return self._unary('exp')

    def log(self) -> NDArray:
        return self._unary('log')

    def sqrt(self) -> NDArray:
        return self._unary('sqrt')

    def tanh(self) -> NDArray:
        return self._unary('tanh')

    def sigmoid(self) -> NDArray:
        return self._unary('sigmoid')

    def abs(self) -> NDArray:
        return self._unary('abs')

    # ---- products ----------------------------------------------------------------------------------

    def __matmul__(self, other: Numbers) -> NDArray:
        matrix = _operand(other, self)
        return matrix if matrix is NotImplemented else _matmul(self, matrix)

    def __rmatmul__(self, other: Numbers) -> NDArray:
        matrix = _operand(other, self)
        return matrix if matrix is NotImplemented else _matmul(matrix, self)

    # ---- reductions --------------------------------------------------------------------------------

    def _reduce(self, op: str, axis: Axis, keepdims: bool) -> NDArray:
        axes = _axes(tuple(axis) if isinstance(axis, list) else axis, len(self.shape))
        kept = tuple([1 if d in axes else n for d, n in enumerate(self.shape)])
        y = _new(kept, self.dtype, self.buffer.device, op)
        if op != 'sum' and 0 in self.shape and any(self.shape[d] == 0 for d in axes):
            raise ValueError(f'{op} of an array of shape {self.shape} over axes {axes}: it is undefined without elements')
        if 0 not in kept:
            self.buffer.device.reduce(op, y, self)
        if op != 'sum' and self.is_mask:
            _as_mask(y)
        if keepdims:
            return y
        shape = tuple([n for d, n in enumerate(kept) if d not in axes])
        return NDArray(y.buffer, 0, shape, row_major(shape), y.dtype)

    def sum(self, axis: Axis = None, keepdims: bool = False) -> NDArray:
        """Sum over one axis, several or all, in an order that does not depend on threads.  int32 stays int32 and wraps."""
        return self._reduce('sum', axis, keepdims)

    def max(self, axis: Axis = None, keepdims: bool = False) -> NDArray:
        """Return the maximum over one axis, several or all; NaN if there is one."""
        return self._reduce('max', axis, keepdims)

    def min(self, axis: Axis = None, keepdims: bool = False) -> NDArray:
        """Return the minimum over one axis, several or all; NaN if there is one."""
        return self._reduce('min', axis, keepdims)

    def mean(self, axis: Axis = None, keepdims: bool = False) -> NDArray:
        """Return the mean over one axis, several or all, as float32; NaN without elements."""
        y = self._cast(FLOAT).sum(axis, keepdims)
        return y / (self.size / y.size if y.size else 1)

    def softmax(self, axis: Axis = -1) -> NDArray:
        """Return e^x / sum(e^x) along one axis, several or all, without overflow."""
        return _along('softmax', axis, self._cast(FLOAT))

    def log_softmax(self, axis: Axis = -1) -> NDArray:
        """Return log(softmax(x)) along one axis, several or all."""
        return _along('log_softmax', axis, self._cast(FLOAT))

    def softmax_gradient(self, dy: NDArray, axis: Axis = -1, log: bool = False) -> NDArray:
        """Return the gradient of x from dy, the gradient of this array, which is x.softmax(axis), or x.log_softmax(axis)."""
        return _along('log_softmax' if log else 'softmax', axis, dy, self)

    def argmax(self, axis: int | None = None, keepdims: bool = False) -> NDArray:
        """Return the index of the maximum, the first of equals; NaN counts as largest.  axis=None: over the flattened array."""
        if axis is None:
            x, kept = self.reshape(1, self.size), (1,) * self.ndim
        else:
            d, = _axes((axis,), self.ndim)
            x = self.permute([*range(d), *range(d + 1, self.ndim), d])
            kept = self.shape[:d] + (1,) + self.shape[d + 1:]
            x = x.reshape(math.prod(x.shape[:-1]), self.shape[d])
        rows, n = x.shape
        if not n:
            raise ValueError(f'argmax of an array of shape {self.shape} over axis {axis}: it is undefined without elements')
        if self.dtype is INT:                   # largest index counted from the end: the first maximum wins
            y = n - ((x == x.max(1, True)) * array(np.arange(n, 0, -1, dtype=INT), device=self.device)).max(1)
        else:
            y = _new((rows,), INT, self.device, 'argmax')
            if rows:
                self.device.argmax(y, x.compact())
        return y.reshape(kept if keepdims else kept[:0] if axis is None else kept[:d] + kept[d + 1:])


# ---- operands --------------------------------------------------------------------------------------------------------

def _along(op: str, axis: Axis, *arrays: NDArray) -> NDArray:
    """Return softmax or log_softmax (op) of x along axes, or for arrays dy and y its gradient.  A kernel takes one axis of
    compact arrays, so adjacent axes are merged, and other axes are moved to the end."""
    x = arrays[0]
    axes, ndim = sorted(_axes(tuple(axis) if isinstance(axis, list) else axis, x.ndim)), x.ndim
    if axes and axes != list(range(axes[0], axes[-1] + 1)):
        order = [*(d for d in range(ndim) if d not in axes), *axes]
        y = _along(op, tuple(range(ndim - len(axes), ndim)), *(a.permute(order) for a in arrays))
        return y.permute([order.index(d) for d in range(ndim)])
    first, end = (axes[0], axes[-1] + 1) if axes else (ndim, ndim)
    sizes = math.prod(x.shape[:first]), math.prod(x.shape[first:end]), math.prod(x.shape[end:])
    gradient = len(arrays) > 1
    y = _new(x.shape, FLOAT, x.device, f'{op}.dx' if gradient else op)
    if x.size:
        compute = x.device.softmax_backward if gradient else x.device.softmax
        compute(y, *(a.compact() for a in arrays), *sizes, op == 'log_softmax')
    return y


def _new(shape: Shape, dtype: np.dtype, device: Device, name: str) -> NDArray:
    return NDArray(device.allocate(shape, dtype, name), 0, shape, row_major(shape), dtype)


def _dtype(dtype: DTypeLike) -> np.dtype:
    """Return the object FLOAT or INT, so that dtypes can be compared by identity."""
    found = np.dtype(dtype)
    if found == FLOAT:
        return FLOAT
    if found == INT:
        return INT
    raise TypeError(f'{found}: expected float32 or int32')


def _int32(value: int) -> int:
    if value not in _INT_RANGE:
        raise OverflowError(f'Python integer {value} out of bounds for int32')
    return value


def _operand(other: Any, like: NDArray) -> Any:
    """Convert `other` to an NDArray on the device of `like`; NotImplemented if it is not an array or a number."""
    if isinstance(other, NDArray):
        return other
    if isinstance(other, np.ndarray | np.number):
        return array(other, device=like.device)
    if isinstance(other, int | float):
        return array(other, dtype=like.dtype if isinstance(other, int) else FLOAT, device=like.device)
    if isinstance(other, list | tuple):
        return array(other, device=like.device)
    return NotImplemented


def _ids(ids: Any, n: int, device: Device) -> NDArray:
    """Convert row numbers to a compact int32 array; negative ones count from the end of n rows."""
    if isinstance(ids, NDArray) and ids.dtype is INT and not ids.is_mask:
        return (ids + (ids < 0) * n).compact()
    ids = np.asarray(ids)
    if ids.size and ids.dtype.kind not in 'iu':
        raise IndexError(f'arrays used as indices must be of integers, got {ids.dtype}')
    return array(np.where(ids < 0, ids + n, ids), INT, device)


def _as_mask(a: NDArray) -> NDArray:
    """Mark an array as a mask and return it."""
    a.buffer.mask = a.buffer.version
    return a


def _is_boolean(value: Any) -> bool:
    if isinstance(value, NDArray):
        return value.is_mask
    return value in (0, 1) if isinstance(value, _NUMBERS) else np.asarray(value).dtype.kind == 'b'


def mask_in(index: Index) -> np.ndarray | None:
    """Return an array or list used as an index as a numpy array of bools; None if it holds row numbers.

    Raises IndexError if it was computed from masks and could be either, RuntimeError for a mask while a plan records.
    """
    if not isinstance(index, NDArray):
        found = np.asarray(index)
        return found.astype(bool) if found.dtype.kind == 'b' or getattr(index, 'is_mask', False) else None
    if index.buffer.mask is None:
        return None
    if not index.is_mask:
        raise IndexError(f'the index of shape {index.shape} was computed from masks, or is a modified mask: it could be '
                         'a mask or row numbers; use x[index != 0] to select, x[index * 1] for row numbers')
    if backend.is_recorded():
        raise RuntimeError(f'a mask of shape {index.shape} cannot select rows while a plan records: their number would depend '
                           'on the data; multiply by the mask instead')
    return index.numpy()


def selected(mask: np.ndarray, shape: Shape) -> np.ndarray:
    """Return the indices of the elements, along the first axes of an array of that shape, where a numpy mask is true."""
    if not mask.ndim or mask.shape != shape[:mask.ndim]:
        raise IndexError(f'a mask of shape {mask.shape} cannot index an array of shape {shape}: it must have the shape of the '
                         "array's first axes, at least one")
    return np.flatnonzero(mask)


def _same_device(a: NDArray, b: NDArray) -> None:
    if a.device is not b.device:
        raise TypeError(f'arrays on two devices, {a.device} and {b.device}; move one with .to(device)')


def _identical(a: NDArray, b: NDArray) -> bool:
    """Return whether two arrays are views of the same elements in the same order."""
    return a.buffer is b.buffer and a.offset == b.offset and a.shape == b.shape and a.strides == b.strides


def _overlap(a: NDArray, b: NDArray) -> bool:
    """Return whether two arrays may share memory, judged by the first and last byte of each."""
    if a.buffer is not b.buffer and not (a.buffer.foreign or b.buffer.foreign):
        return False
    (low_a, high_a), (low_b, high_b) = (_bounds(x) for x in (a, b))
    return low_a < high_b and low_b < high_a


def _bounds(a: NDArray) -> tuple[int, int]:
    if a.buffer.owner is None:
        raise a._freed()
    if 0 in a.shape:
        return 0, 0
    item, start = a.dtype.itemsize, a.location()
    ends = [item * (n - 1) * step for n, step in zip(a.shape, a.strides, strict=True)]
    return start + sum([min(end, 0) for end in ends]), start + sum([max(end, 0) for end in ends]) + item


def _matmul(a: NDArray, b: NDArray) -> NDArray:
    _same_device(a, b)
    if not a.shape or not b.shape:
        raise ValueError(f'matmul: shapes {a.shape} and {b.shape}: expected at least one axis each')
    if a.dtype is not b.dtype:
        a, b = a._cast(FLOAT), b._cast(FLOAT)
    left, right = a[None] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b
    if left.shape[-1] != right.shape[-2]:
        raise ValueError(f'matmul: shapes {a.shape} and {b.shape} do not fit: {left.shape[-1]} and {right.shape[-2]}')
    batch = broadcast_shape(left.shape[:-2], right.shape[:-2])
    y = _new(_checked((*batch, left.shape[-2], right.shape[-1])), a.dtype, a.device, 'matmul')
    if 0 not in y.shape:
        a.device.matmul(y, left, right)
    if a.ndim == 1 or b.ndim == 1:
        shape = batch + y.shape[-2:-1] * (a.ndim > 1) + y.shape[-1:] * (b.ndim > 1)
        return NDArray(y.buffer, 0, shape, row_major(shape), y.dtype)
    return y


# ---- making arrays ---------------------------------------------------------------------------------------------------

def array(obj: Numbers, dtype: DTypeLike | None = None, device: Device | None = None) -> NDArray:
    """Return a new compact array with the numbers of obj: an NDArray, a numpy array, a list or a number.

    dtype: float32 or int32.  Default: an array's dtype; for Python numbers float32 if any is a float, else int32.  Bools
    become a mask, stored as int32; with a dtype they become numbers.
    Raises TypeError for other dtypes, OverflowError for integers outside int32, ValueError for more than 8 axes.
    """
    is_mask = False
    if isinstance(obj, NDArray):
        if device is None or device is obj.device:
            y = obj if dtype is None else obj.astype(dtype)
            return obj.copy() if y is obj else y
        is_mask, obj = obj.is_mask, obj.stored()
    found = obj if isinstance(obj, np.ndarray) else np.array(obj)
    is_mask = dtype is None and (is_mask or found.dtype.kind == 'b')
    if found is obj:
        dtype = _dtype(dtype if dtype is not None else INT if found.dtype.kind == 'b' else found.dtype)
    else:
        if found.dtype.kind not in 'biuf':
            raise TypeError(f'array: expected numbers, got {found.dtype}')
        dtype = _dtype(dtype) if dtype is not None else INT if found.dtype.kind in 'biu' and found.size else FLOAT
    if dtype is INT and found.dtype.kind in 'iu' and found.dtype != INT and found.size:
        for value in (int(found.min()), int(found.max())):
            _int32(value)
    shape = _checked(found.shape)
    # Constants are never allocated in a plan's memory: a replay would not write them again.
    memory = backend.HOST.zeros(shape, dtype)
    with np.errstate(invalid='ignore', over='ignore'):
        memory[...] = found
    y = NDArray((device or default_device()).wrap(memory), 0, shape, row_major(shape), dtype)
    return _as_mask(y) if is_mask else y


def empty(shape: Shape | int, dtype: DTypeLike = FLOAT, device: Device | None = None) -> NDArray:
    """Return a compact array with undefined contents."""
    return _new(_shape_of(shape), _dtype(dtype), device or default_device(), 'empty')


def full(shape: Shape | int, value: float, dtype: DTypeLike | None = None, device: Device | None = None) -> NDArray:
    """Return a compact array filled with value.  Default dtype: int32 for an int, float32 for a float; a bool gives a mask."""
    is_mask = dtype is None and isinstance(value, bool | np.bool_)
    dtype = _dtype(dtype) if dtype is not None else INT if isinstance(value, int | np.integer | np.bool_) else FLOAT
    y = empty(shape, dtype, device)
    y.fill(value)
    return _as_mask(y) if is_mask else y


def zeros(shape: Shape | int, dtype: DTypeLike = FLOAT, device: Device | None = None) -> NDArray:
    """Return a compact array of zeros."""
    return full(shape, 0, dtype, device)


def ones(shape: Shape | int, dtype: DTypeLike = FLOAT, device: Device | None = None) -> NDArray:
    """Return a compact array of ones."""
    return full(shape, 1, dtype, device)


def arange(start: float, stop: float | None = None, step: float = 1, dtype: DTypeLike | None = None,
           device: Device | None = None) -> NDArray:
    """Return start, start + step, ... below stop, like np.arange."""
    start, stop = (0, start) if stop is None else (start, stop)
    numbers = np.arange(start, stop, step)
    return array(numbers, dtype or (INT if numbers.dtype.kind in 'iu' else FLOAT), device)


def from_numpy(a: np.ndarray, device: Device | None = None) -> NDArray:
    """Return an NDArray over the memory of a numpy array, with its strides.

    Raises TypeError for another dtype, ValueError for a read-only or unaligned array.
    """
    if not isinstance(a, np.ndarray):
        raise TypeError(f'from_numpy: expected a numpy array, got {type(a).__name__}')
    dtype = _dtype(a.dtype)
    if not a.flags.writeable:
        raise ValueError(f'from_numpy: array of shape {a.shape}: read-only; copy it with array()')
    if not a.flags.aligned or any(step % 4 for step in a.strides):
            raise ValueError(f'from_numpy: array of shape {a.shape}: byte strides {a.strides} or address are not multiples '
                             'of the element size; copy it with array()')
    _checked(a.shape)
    device = device or default_device()
    if a.flags.c_contiguous:
        return NDArray(device.wrap(a, True), 0, a.shape, row_major(a.shape), dtype)
    low, high = np.lib.array_utils.byte_bounds(a)
    first = a[tuple(slice(None, None, -1 if step < 0 else 1) for step in a.strides)]       # element 0 has the lowest address
    memory = np.lib.stride_tricks.as_strided(first, ((high - low) // 4,), (4,))
    offset = sum((n - 1) * -step for n, step in zip(a.shape, a.strides, strict=True) if step < 0) // 4
    return NDArray(device.wrap(memory, True), offset, a.shape, tuple(step // 4 for step in a.strides), dtype)


def as_ndarray(array: Any, device: Device | None = None) -> NDArray:
    """Wrap an op's array in an NDArray over the same memory: from_numpy for numpy arrays; an NDArray is returned unchanged."""
    return array if isinstance(array, NDArray) else from_numpy(array, device)


def from_dlpack(x: Any, device: Device | None = None) -> NDArray:
    """Return an NDArray over the memory of another library's array, which must be in CPU memory."""
    return from_numpy(np.from_dlpack(x), device)


def _all_alike(arrays: Iterable[Numbers], who: str) -> tuple[list[NDArray], np.dtype]:
    """Convert to NDArrays and check: at least one, all on one device.  Also return the common dtype, float32 if mixed."""
    given = list(arrays)
    if not given:
        raise ValueError(f'{who}: expected at least one array')
    first = next((a for a in given if isinstance(a, NDArray)), None)
    found = [a if isinstance(a, NDArray) else array(a, device=first.device if first is not None else None) for a in given]
    for other in found:
        _same_device(found[0], other)
    dtype = INT if all(a.dtype is INT for a in found) else FLOAT
    return found, dtype


def concatenate(arrays: Iterable[Numbers], axis: int = 0) -> NDArray:
    """Join arrays along an existing axis.  ValueError if their shapes differ in another axis."""
    arrays, dtype = _all_alike(arrays, 'concatenate')
    first = arrays[0]
    d, = _axes((axis,), first.ndim)
    for other in arrays:
        if other.shape[:d] + other.shape[d + 1:] != first.shape[:d] + first.shape[d + 1:]:
            raise ValueError(f'concatenate: shapes {first.shape} and {other.shape} differ in another axis than {d}')
    y = _new(first.shape[:d] + (sum(a.shape[d] for a in arrays),) + first.shape[d + 1:], dtype, first.device, 'concatenate')
    start = 0
    for a in arrays:
        y[(slice(None),) * d + (slice(start, start + a.shape[d]),)] = a
        start += a.shape[d]
    return _as_mask(y) if all(a.is_mask for a in arrays) else y


def stack(arrays: Iterable[Numbers], axis: int = 0) -> NDArray:
    """Join arrays of one shape along a new axis.  ValueError if shapes differ."""
    arrays, dtype = _all_alike(arrays, 'stack')
    first = arrays[0]
    d, = _axes((axis,), first.ndim + 1)
    for other in arrays:
        if other.shape != first.shape:
            raise ValueError(f'stack: shapes {first.shape} and {other.shape} differ')
    y = _new(_checked(first.shape[:d] + (len(arrays),) + first.shape[d:]), dtype, first.device, 'stack')
    for i, a in enumerate(arrays):
        y[(slice(None),) * d + (i,)] = a
    return _as_mask(y) if all(a.is_mask for a in arrays) else y


def pad(a: NDArray, widths: Any, value: float = 0) -> NDArray:
    """Surround a with `value`.  widths: ((before, after), ...) per axis, one pair for all axes, or one number."""
    widths = np.broadcast_to(np.asarray(widths, np.int64), (a.ndim, 2)).tolist() if a.ndim else []
    if any(n < 0 for pair in widths for n in pair):
        raise ValueError(f'pad: widths {widths}: expected 0 or more')
    y = full(tuple(n + before + after for n, (before, after) in zip(a.shape, widths, strict=True)), value, a.dtype, a.device)
    y[tuple(slice(before, before + n) for n, (before, _) in zip(a.shape, widths, strict=True))] = a
    return _as_mask(y) if a.is_mask and value in (0, 1) else y


if backend_name() == 'numpy':   # at import time, before any array is allocated
    backend.use(numpy_device())
elif backend_name() == 'gpu':
    try:
        use_gpu()
    except UserError as error:
        raise UserError(f'PYOPS_BACKEND=gpu: {error}, or unset PYOPS_BACKEND') from error
