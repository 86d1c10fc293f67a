"""NDArray: a shape, strides and an offset into a buffer on a device.

    a = ndarray.array([[1, 2, 3], [4, 5, 6]], dtype='float32')
    a.T, a[::-1, 1:], a.broadcast_to((4, 2, 3))         views: the same memory
    (a + a[0]).sum(axis=1), a @ a.T                     new arrays

It behaves like numpy's ndarray, with dtypes float32, int32 and float64 and at most 8 axes; docs/ndarray.md lists the
differences.  The methods that it shares with Tensors are in pyops/methods.py.
A view allocates no memory; operations accept operands with any strides.
"""
from __future__ import annotations

import functools
import gc
import importlib
import math
import operator
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from pyops import FP8, backend
from pyops.backend import row_major, small
from pyops.backend.arrays import MAX_AXES, Array
from pyops.backend.device import DLPACK_CUDA, Buffer
from pyops.backend.device import Device as _Device
from pyops.backend.numpy_device import Numpy
from pyops.backend.recorded import recorded
from pyops.environment import backend_name
from pyops.errors import ShapeError, UserError
from pyops.further_methods import FurtherMethods
from pyops.methods import (
    DEVICE_NAMES,
    Methods,
    accepts_torch_names,
    accepts_tuple,
    arrays_of,
    as_axes,
    flipped_axes,
    normal_axes,
    numpy_dtype,
    several,
    softmax_axes,
)
from pyops.names import ALIASES, METHODS, NUMPYS
from pyops.torch_methods import check_stored, function_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import DTypeLike

    from pyops.backend.device import Device
    from pyops.backend.gpu import GPU
    from pyops.backend.host import CPU
    from pyops.typing import Axis, Index, Numbers, Shape

FLOAT, INT, DOUBLE, BOOL = (np.dtype(kind) for kind in (np.float32, np.int32, np.float64, np.bool_))
_INT_RANGE = range(-2**31, 2**31)
_NUMBERS, _FLOATS = (int, float, np.integer, np.floating, np.bool_), (float, np.floating)
_COMPARISONS = frozenset(('equal', 'not_equal', 'less', 'less_equal', 'greater', 'greater_equal'))
# Ops on two masks, as for bools in numpy: the first return a mask, a sum is their union, a difference an error.
_KEEPS_MASKS, _MIXES_MASKS = frozenset(('multiply', 'maximum', 'minimum')), frozenset(('add', 'subtract'))
_BASIC = frozenset((int, slice, type(None), type(Ellipsis)))        # types of indices that select a view
_new_object, _index = object.__new__, operator.index


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


class NoGPU:
    """Stands for a GPU on a machine without one: enabled() is False, and arrays cannot be made on it."""
    name = 'gpu'

    def enabled(self) -> bool:
        """Return False."""
        return False

    def __repr__(self) -> str:
        return 'pyops.cuda()'


@functools.cache
def cuda() -> Any:
    """Return the first GPU, or where there is none, a NoGPU.  cuda.is_available(): whether there is one."""
    try:
        return gpu()
    except UserError:
        return NoGPU()


cuda.is_available = lambda: cuda().enabled()                # type: ignore[attr-defined]


def all_devices() -> list[Any]:
    """Return the CPU, the CPU with numpy, and the GPU, or a NoGPU."""
    return [cpu(), numpy_device(), cuda()]


def named_device(device: Any) -> Any:
    """Return the device with PyTorch's name 'cpu', 'cuda' or 'cuda:0', or 'gpu'; anything but a text unchanged."""
    if isinstance(device, NoGPU):
        return gpu()                                        # explains what is missing
    if not isinstance(device, str):
        return device
    if device not in DEVICE_NAMES:
        raise ValueError(f'device: expected one of {", ".join(DEVICE_NAMES)}, or a device, got {device!r}')
    return cpu() if device == 'cpu' else gpu()


def default_device() -> Device:
    """Return the device of new arrays, on which ops allocate as well: at first the one that $PYOPS_BACKEND names."""
    return backend.current_device()


def use_gpu(precision: str = 'fp32') -> GPU:
    """Allocate all new arrays on the GPU, including the results of ops, and return the device.

    precision: 'fp32', 'tf32' or 'bf16', of the factors of products;  'fp8': as bf16, and linear layers of models made from now
    on whose operands a recipe rounds to fp8 multiply in it (pyops.quantization).
    UserError if there is no GPU, or it cannot multiply in FP8
    """
    device = gpu()
    device.fp8 = precision == FP8
    device.precision, device.storage = 'bf16' if device.fp8 else precision, 'fp32'
    backend.use(device)
    return device


def _remade(values: np.ndarray, device: str, is_mask: bool = False) -> NDArray:
    devices: dict[str, Any] = {'cpu': cpu, 'numpy_device': numpy_device, 'gpu': gpu}
    place = devices[device]()
    # an array of an op on a GPU may have another dtype, such as a step count
    known = values.dtype in (FLOAT, INT, DOUBLE)
    made = array(values, values.dtype, place) if known else place.put(values)
    return _as_mask(made) if is_mask else made


def live_buffers() -> list[Buffer]:
    """Return all Buffers that are still referenced; for memory tests."""
    return [found for found in gc.get_objects() if isinstance(found, Buffer) and found.owner is not None]


# ---- shapes ----------------------------------------------------------------------------------------------------------

@functools.lru_cache(8192)
def broadcast_shape(*shapes: Shape) -> Shape:
    """Return the shape that all shapes broadcast to.  Raises ValueError naming them."""
    try:
        shape = np.broadcast_shapes(*shapes)
    except ValueError:
        raise ShapeError(f'operands could not be broadcast together with shapes {" ".join(map(str, shapes))}') from None
    return _checked(shape)


@functools.lru_cache(8192)
def _fits(shape: Shape, to: Shape) -> bool:
    """Return whether an array of `shape` can be broadcast to `to`."""
    missing = len(to) - len(shape)
    return missing >= 0 and all(n in (1, size) for n, size in zip(shape, to[missing:], strict=True))


@functools.lru_cache(8192)
def _reduced_shapes(shape: Shape, axes: Shape) -> tuple[Shape, Shape]:
    """Return the shape after a reduction over axes with keepdims, and without."""
    return (tuple([1 if d in axes else n for d, n in enumerate(shape)]),
            tuple([n for d, n in enumerate(shape) if d not in axes]))


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


@functools.lru_cache(8192)
def _reshaped(shape: Shape, strides: Shape, asked: Shape) -> tuple[Shape, Shape | None]:
    """Return `asked` with -1 replaced by the size that fits, and the strides of that view; None if it requires a copy."""
    size = math.prod(shape)
    if -1 in asked:
        rest = -math.prod(asked)
        known = rest > 0 and asked.count(-1) == 1 and size % rest == 0
        to = tuple([size // rest if n == -1 else n for n in asked]) if known else None
    else:
        to = asked if min(asked, default=0) >= 0 and math.prod(asked) == size else None
    if to is None:
        raise ShapeError(f'cannot reshape array of shape {shape} into shape {asked}')
    return to, _view_strides(shape, strides, _checked(to))


@functools.lru_cache(8192)
def _permuted(shape: Shape, strides: Shape, order: Shape) -> tuple[Shape, Shape]:
    """Return shape and strides with the axes in this order."""
    return tuple([shape[d] for d in order]), tuple([strides[d] for d in order])


def _part(selected: slice, n: int) -> tuple[int, int, int]:
    """Return the first number that a slice selects of 0 ... n - 1, 0 if there is none, how many it selects, and the step."""
    start, stop, by = selected.indices(n)
    count = stop - start if by == 1 else len(range(start, stop, by))
    return (start, count, by) if count > 0 else (0, 0, by)


def _view(x: NDArray, offset: int, shape: Shape, strides: Shape) -> NDArray:
    """Return a view of x.  Setting the attributes here takes half the time of __new__."""
    y = _new_object(Array)
    y.buffer = x.buffer
    y.offset = offset
    y.shape = shape
    y.strides = strides
    y.dtype = x.dtype
    y.__class__ = NDArray               # type: ignore[assignment]
    return y                            # type: ignore[return-value]


# ---- the array -------------------------------------------------------------------------------------------------------

class NDArray(Array, FurtherMethods):
    """An array: a Buffer, and shape, strides and offset in elements.  Create one with array, empty, zeros, from_numpy, ..."""

    __slots__ = ()

    def __new__(cls, buffer: Buffer, offset: int, shape: Shape, strides: Shape, dtype: np.dtype) -> Self:
        y = _new_object(Array)
        y.buffer, y.offset, y.shape, y.strides, y.dtype = buffer, offset, shape, strides, dtype
        y.__class__ = cls               # type: ignore[assignment]
        return y                        # type: ignore[return-value]

    def __setattr__(self, name: str, value: Any) -> None:
        """Reshape in place for x.shape = (3, 4), like numpy.  AttributeError if that requires a copy, and for any other
        attribute: kernels read and write memory as these say."""
        if name != 'shape':
            if name in Array.__slots__:
                raise AttributeError(f'{name}: cannot be set; use as_strided, astype or reshape, which return another array')
            super().__setattr__(name, value)            # its error names the class
        to, strides = _reshaped(self.shape, self.strides, tuple(map(_index, several((value,)))))
        if strides is None:
            raise AttributeError(f'shape: an array of shape {self.shape} and strides {self.strides} cannot become {to} in '
                                 'place; use reshape, which copies')
        super().__setattr__('shape', to)
        super().__setattr__('strides', strides)

    @property
    def T(self) -> NDArray:
        return _view(self, self.offset, self.shape[::-1], self.strides[::-1])       # the fast path

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

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Address, shape, strides and dtype, for numpy and other libraries.  An AttributeError for a mask, which numpy reads as
        a bool copy, and on a GPU; numpy then calls `__array__`."""
        if self.is_mask or not self.device.is_host:
            raise AttributeError(f'__array_interface__: {"a mask" if self.is_mask else "an array on a GPU"} has none; '
                                 'use .numpy()')
        described = self.stored().__array_interface__
        self.buffer.pinned = self.buffer.owner          # the reader keeps this array alive, but could outlive buffer.free()
        return described

    def __dlpack__(self, *, stream: Any = None, max_version: tuple[int, int] | None = None,
                   dl_device: tuple[int, int] | None = None, copy: bool | None = None) -> Any:
        """Return a DLPack capsule over the same memory, or a copy if copy is True.

        dl_device: (1, 0) copies an array on a GPU to the CPU.  A mask is copied to bools on the CPU, and is 1 and 0 on a GPU.
        BufferError for negative strides and for another device.
        """
        if self.size and min(self.strides, default=0) < 0:              # torch would abort the process
            raise BufferError(f'array of shape {self.shape}: DLPack consumers may not support negative strides, got '
                              f'{self.strides}; export .copy()')
        return self.device.dlpack(self, stream, max_version, None if dl_device is None else tuple(map(int, dl_device)), copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device.dlpack_device

    def item(self, *index: Any) -> Any:
        """Return the only element as a Python number; or the one at a position of the flattened array, or at an index for
        each axis.  Raises ValueError for another size."""
        if index:
            return self._element(index).item()
        if self.size != 1:
            raise ShapeError(f'can only convert an array of size 1 to a number, got shape {self.shape}')
        if self.buffer.device is backend.HOST and self.buffer.pointer is not None:
            value = self.buffer.pointer[self.offset]            # without an array of numpy, which takes microseconds
            return bool(value) if self.is_mask else value
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
            raise ShapeError(f'the truth value of an array of shape {self.shape} is ambiguous: it has {self.size} elements; '
                             'use .any() or .all()')
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

    @accepts_tuple('shape')
    def reshape(self, *shape: Any) -> NDArray:
        """Return the same elements in order in another shape: a view if strides allow it, else a compact copy.

        One size may be -1 and is inferred.  Raises ValueError if the number of elements differs.
        """
        if len(shape) == 1 and type(shape[0]) is not int:
            shape = shape[0] if isinstance(shape[0], tuple) else tuple(shape[0]) if isinstance(shape[0], list) else shape
        return self._reshape(tuple(map(_index, shape)))

    def _reshape(self, shape: Shape) -> NDArray:
        to, strides = _reshaped(self.shape, self.strides, shape)
        return _view(self, self.offset, to, strides) if strides is not None else self.copy()._reshape(to)

    @accepts_tuple('axes', 'dims')
    def permute(self, *axes: Any) -> NDArray:
        """Return a view whose axis d is axis axes[d] of this array."""
        order = normal_axes(several(axes), len(self.shape))
        if len(order) != len(self.shape):
            raise ShapeError(f"permute: axes {several(axes)} don't match shape {self.shape}")
        return _view(self, self.offset, *_permuted(self.shape, self.strides, order))

    @accepts_tuple('shape')
    def broadcast_to(self, *shape: Any) -> NDArray:
        """Return a read-only view of another shape, with stride 0 along repeated axes.  ValueError if it does not broadcast."""
        shape = _shape_of(several(shape))
        if not _fits(self.shape, shape):
            raise ShapeError(f'could not broadcast array from shape {self.shape} into shape {shape}')
        steps = [0 if n == 1 else step for n, step in zip(self.shape, self.strides, strict=True)]
        return _view(self, self.offset, shape, (0,) * (len(shape) - len(steps)) + tuple(steps))

    @accepts_torch_names
    def flip(self, *axes: Any, axis: Axis = None) -> NDArray:
        """Return a view in reverse order along these axes (numbers or one tuple); along all if none or None is given."""
        offset, strides = self.offset, list(self.strides)
        for d in flipped_axes(axes, axis, self.ndim):
            offset += max(self.shape[d] - 1, 0) * strides[d]
            strides[d] = -strides[d]
        return _view(self, offset, self.shape, tuple(strides))

    def __getitem__(self, index: Index) -> NDArray:
        """Return a view for integers, slices, Ellipsis and None; a copy for an index with arrays or lists of integers, masks or
        bools, as numpy's."""
        kind = type(index)
        if kind is int and self.shape and 0 <= index < self.shape[0]:           # type: ignore[operator]  # the fast path
            return _view(self, self.offset + index * self.strides[0], self.shape[1:], self.strides[1:])
        if kind not in _BASIC and is_advanced(index):
            if kind is tuple:
                return _small_gathered(self, *index)
            if kind is list or kind is NDArray and index.buffer.mask is None:
                return _small_gathered(self, index)
            return self._at(index)
        return _view(self, *self._select(index))

    def _at(self, index: Any) -> NDArray:
        """Return a copy of the elements at an index with arrays."""
        y = _small_select(self, index) if type(index) is NDArray else _small_take(self, index)
        if y is None:
            index = plain_index(index)
            if self.buffer.device is backend.HOST and self.size <= small.MOST_ROWS and not backend.is_recorded():
                y = _small_get(self, numpy_index(index))
        return gathered(self, index) if y is None else y

    def _select(self, index: Index) -> tuple[int, Shape, Shape]:
        if self.shape:                  # the most frequent indices without the loop
            if type(index) is int:
                return self.offset + self._position(index, 0) * self.strides[0], self.shape[1:], self.strides[1:]
            if type(index) is slice:
                start, count, by = _part(index, self.shape[0])
                step = self.strides[0]
                return self.offset + start * step, (count,) + self.shape[1:], (step * by,) + self.strides[1:]   # noqa: RUF005
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
                start, count, by = _part(item, n)
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
            i = operator.index(item)
        except TypeError:
            raise IndexError('only integers, slices (`:`), ellipsis (`...`), None, arrays or lists of integers or bools are '
                             f'valid indices; got {type(item).__name__}') from None
        if not -n <= i < n:
            raise IndexError(f'index {i} is out of bounds for axis {axis} with size {n}')
        return i + n if i < 0 else i

    # ---- copies ------------------------------------------------------------------------------------

    def copy(self, order: str = 'C') -> NDArray:
        """Return a compact copy.   order: accepted as in numpy, without effect"""
        y = _SMALL_UNARY['copy'](self)
        if y is not None:
            return y
        y = _new(self.shape, self.dtype, self.buffer.device, 'copy')
        self.buffer.device.unary('copy', y, self)
        return _as_mask(y) if self.is_mask else y

    def compact(self) -> NDArray:
        """Return this array if it is compact, else a compact copy."""
        return self if self.is_compact() else self.copy()

    def astype(self, dtype: DTypeLike, copy: bool = False) -> NDArray:
        """Convert to float32, float64, int32 (rounding towards 0; any integer dtype) or bool (a mask of the elements that are
        not 0).  Returns this array if it has that dtype and is not a mask, unless `copy`."""
        if copy:
            y = self.astype(dtype)
            return y.copy() if y is self else y
        if numpy_dtype(dtype) == BOOL:
            return self if self.is_mask else self != 0
        y = self._cast(_dtype(dtype))
        if y.buffer.mask is None:
            return y
        y = y.copy()
        y.buffer.mask = None            # from now on numbers, not truth values
        return y

    def _cast(self, dtype: np.dtype) -> NDArray:
        if dtype is self.dtype:
            return self
        y = _small_convert(self, dtype)
        if y is not None:
            return y
        y = _new(self.shape, dtype, self.device, 'astype')
        self.device.convert(y, self)
        return y

    def _moved(self, device: Any) -> NDArray:
        device = named_device(device)
        return self if device is self.device else array(self, device=device)

    def cpu(self) -> NDArray:
        """Return this array if it is on the CPU, else a copy there."""
        return self.to(cpu())

    def take_rows(self, ids: Numbers) -> NDArray:
        """Return a copy of the elements of axis 0 with these indices, negative from the end.  IndexError if one is outside."""
        if not self.shape:
            raise IndexError('too many indices for array of shape (): 1')
        if self.buffer.owner is None:
            raise self._freed()
        n, asked, ids = self.shape[0], ids, _ids(ids, self.shape[0], self.device)
        y = _new(_checked(ids.shape + self.shape[1:]), self.dtype, self.device, 'take')
        width, x, count = math.prod(self.shape[1:]), self.compact(), ids.size
        try:
            self.device.take(_matrix(y, count, width), _matrix(x, n, width),
                             NDArray(ids.buffer, ids.offset, (count,), (1,), INT))
        except IndexError:
            wrong = next((i for i in np.asarray(asked).reshape(-1).tolist() if not -n <= i < n), None)
            if wrong is None:
                raise
            raise IndexError(f'index {wrong} is out of bounds for axis 0 with size {n}') from None
        return _as_mask(y) if self.is_mask else y

    def add_at(self, ids: Numbers, rows: Numbers) -> None:
        """self[ids[r]] += rows[r] for r in order; ids may repeat.  In place, for compact arrays of floats."""
        if self.dtype is INT or not self.is_compact() or not self.shape:
            raise TypeError(f'add_at: expected a compact array of rows of floats, got {self.dtype}, shape {self.shape}, '
                            f'strides {self.strides}')
        ids = _ids(ids, self.shape[0], self.device)
        added = _operand(rows, self)._cast(self.dtype).broadcast_to(ids.shape + self.shape[1:]).compact()
        width = math.prod(self.shape[1:])
        self.device.add_at(self.reshape(self.shape[0], width), ids.reshape(ids.size), added.reshape(ids.size, width))
        self.buffer.version += 1

    # ---- assignment --------------------------------------------------------------------------------

    def __setitem__(self, index: Index, value: Numbers) -> None:
        if is_advanced(index):
            if type(index) is NDArray and _small_fill_where(self, index, value):
                return
            index = plain_index(index)
            if backend.is_recorded() or not _small_put(self, numpy_index(index), value):
                self._put_at(positions(index, self.shape), value)
            return
        part = self if index is Ellipsis else NDArray(self.buffer, *self._select(index), self.dtype)
        if self.buffer.mask is not None or not _small_assign(part, value):
            part._assign(value)

    def _put_at(self, at: np.ndarray, value: Any) -> None:
        """self.reshape(-1)[at] = value, for a numpy array of positions in the flattened array; of equal ones the last
        counts."""
        self._check_writable()
        stays_mask = self.is_mask and _is_boolean(value)
        value = _operand(value, self)
        if value is NotImplemented:
            raise TypeError('expected numbers to assign, got an object of another type')
        while value.ndim > at.ndim and value.shape[0] == 1:
            value = value[0]
        if not _fits(value.shape, at.shape):
            raise ShapeError(f'shape mismatch: value array of shape {value.shape} could not be broadcast to indexing result of '
                             f'shape {at.shape}')
        rows, places = value._cast(self.dtype).broadcast_to(at.shape).reshape(at.size), at.reshape(-1)
        last = last_of_equals(places)
        if last is not None:
            places, rows = places[last], rows.take_rows(last)
        if places.size:
            target = self if self.is_compact() else self.copy()
            rows = rows.copy() if _overlap(target, rows) else rows.compact()
            self.device.put_rows(target.reshape(self.size, 1), array(places, INT, self.device), rows.reshape(places.size, 1))
            if target is not self:
                self.device.unary('copy', self, target)
        self.buffer.version += 1
        if stays_mask:
            self.buffer.mask = self.buffer.version

    def fill(self, value: Numbers) -> None:
        """Set every element to value."""
        self._assign(value)

    def _assign(self, value: Numbers) -> None:
        stays_mask = self.is_mask and _is_boolean(value)
        self._write(value)
        if stays_mask:
            self.buffer.mask = self.buffer.version

    def _write(self, value: Any) -> None:
        if _small_assign(self, value):
            return
        self._check_writable()
        if self.dtype not in (FLOAT, INT, DOUBLE) and isinstance(value, _NUMBERS):
            value = np.full(self.shape, value, self.dtype)      # arrays of ops on a GPU: step counts, rows, pixels
        if isinstance(value, NDArray | np.ndarray) and value is not self and self.device.assign(self, value):
            self.buffer.version += 1
            return
        if not isinstance(value, NDArray):
            if isinstance(value, _NUMBERS):
                value = _int32(int(value)) if self.dtype is INT else float(value)
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
            raise ShapeError(f'could not broadcast input array from shape {value.shape} into shape {self.shape}')
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
        y = _SMALL_UNARY[op](self)
        if y is not None:
            return y
        if self.dtype is INT and op in _WHOLE:
            return self.copy()
        if op == 'negate' and self.is_mask:
            raise TypeError('-: a mask has no negative; use ~mask for its inverse, -mask.astype(int) for numbers')
        x = self.astype(FLOAT) if self.dtype is INT and op not in ('negate', 'abs') else self
        device = x.buffer.device
        y = _new(x.shape, x.dtype, device, op)
        device.unary(op, y, x)
        return _as_mask(y) if op == 'abs' and x.is_mask else y

    def _binary(self, op: str, other: Any) -> NDArray:
        y = _SMALL_BINARY[op](self, other) if type(other) is NDArray else _SMALL_SCALAR[op](self, other, False)
        return self._binary_of_any(op, other) if y is None else y

    def _binary_of_any(self, op: str, other: Any, reflected: bool = False) -> NDArray:
        if type(other) is not NDArray:
            if isinstance(other, _NUMBERS):
                return self._scalar(op, other, reflected)
            other = _operand(other, self)
            if other is NotImplemented:
                return NotImplemented
        a, b = (other, self) if reflected else (self, other)
        both_masks = a.buffer.mask is not None and a.is_mask and b.is_mask
        if both_masks and op in _MIXES_MASKS:
            if op == 'subtract':
                raise TypeError('-: expected numbers, got two masks; use a ^ b or a & ~b, or a.astype(int) for numbers')
            return a._logical('or', b)
        device = a.buffer.device
        if device is not b.buffer.device:
            _same_device(a, b)
        if a.dtype is not b.dtype or op == 'divide':
            common = _common_dtype(a, b) if a.dtype is not b.dtype or a.dtype is not INT else FLOAT
            a, b = a._cast(common), b._cast(common)
            if not both_masks and (y := _SMALL_BINARY[op](a, b)) is not None:
                return y
        y = _new(a.shape if a.shape == b.shape else broadcast_shape(a.shape, b.shape), a.dtype, device, op)
        device.binary(op, y, a, b)
        return _as_mask(y) if op in _COMPARISONS or op in _KEEPS_MASKS and both_masks else y

    def _scalar(self, op: str, value: Any, reflected: bool, y: NDArray | None = None) -> NDArray:
        x = self
        if x.dtype is INT:
            if op == 'divide' or isinstance(value, _FLOATS):
                x = x._cast(FLOAT)
            else:
                value = _int32(int(value))
        if x.dtype is not INT:
            value = float(value)
        if y is None and x is not self:
            small_result: NDArray | None = _SMALL_SCALAR[op](x, value, reflected)
            if small_result is not None:
                return small_result
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
        if op in _MIXES_MASKS | _KEEPS_MASKS and self.is_mask and other.is_mask:
            self[...] = self._binary_of_any(op, other)
            return self
        if self.dtype is INT and (other.dtype is not INT or op == 'divide'):
            raise TypeError(f'{op}: an int32 array cannot hold the float32 result; use astype first')
        if other.shape != self.shape and broadcast_shape(self.shape, other.shape) != self.shape:
            raise ShapeError(f'non-broadcastable output operand with shape {self.shape}: the result with an operand of shape '
                             f'{other.shape} has shape {broadcast_shape(self.shape, other.shape)}')
        other = other._cast(self.dtype)
        if _overlap(self, other) and not _identical(self, other):
            other = other.copy()
        self.device.binary(op, self, self, other)
        self.buffer.version += 1
        return self

    def _logical(self, op: str, other: Any) -> NDArray:
        """Return a & b, a | b or a ^ b, for masks and int32.  These operations are symmetric."""
        if type(other) is int and self.dtype is INT and self.buffer.mask is None:
            return self._binary(op, other)
        other = _operand(other, self)
        if other is NotImplemented:
            return NotImplemented
        for x in self, other:
            if x.dtype is not INT and not x.is_mask:
                raise TypeError(f'{op}: expected masks or int32 arrays, got {x._kind()}; compare it first, as in (x > 0) & y')
        if not (self.is_mask and other.is_mask):
            return self._cast(INT)._binary(op, other._cast(INT))
        if self.dtype is other.dtype:               # on floats these operations compute truth values
            return _as_mask(self._binary(op, other))
        return _as_mask(self._cast(INT)._binary(op, other._cast(INT)))

    def __invert__(self) -> NDArray:
        """Return the inverse of a mask; of int32, the inverse of all bits."""
        if self.is_mask:
            return self == 0
        if self.dtype is not INT:
            raise TypeError(f'~: expected a mask or an int32 array, got {self._kind()}; compare it first, as in ~(x > 0)')
        return -self - 1

    if TYPE_CHECKING:               # _operators() below defines them
        def _of_two(self, other: Any, /) -> NDArray: ...
        __add__ = __radd__ = __iadd__ = __sub__ = __rsub__ = __isub__ = __mul__ = __rmul__ = __imul__ = _of_two
        __truediv__ = __rtruediv__ = __itruediv__ = __pow__ = __rpow__ = __ipow__ = _of_two
        __floordiv__ = __rfloordiv__ = __ifloordiv__ = __mod__ = __rmod__ = __imod__ = _of_two
        __and__ = __rand__ = __iand__ = __or__ = __ror__ = __ior__ = __xor__ = __rxor__ = __ixor__ = _of_two
        __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _of_two       # type: ignore[assignment]

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

    # ---- products ----------------------------------------------------------------------------------

    def __matmul__(self, other: Numbers) -> NDArray:
        y = _small_matmul(self, other) if type(other) is NDArray else None
        if y is not None:
            return y
        matrix = _operand(other, self)
        return matrix if matrix is NotImplemented else _matmul(self, matrix)

    def dot(self, other: Numbers) -> NDArray:
        """Return the sum of products over the last axis of x and the last but one of `other` (its only one if it is a
        vector)."""
        y = _small_matmul(self, other) if type(other) is NDArray and len(other.shape) <= 2 else None
        return super().dot(other) if y is None else y

    def __rmatmul__(self, other: Numbers) -> NDArray:
        matrix = _operand(other, self)
        return matrix if matrix is NotImplemented else _matmul(matrix, self)

    # ---- reductions --------------------------------------------------------------------------------

    def _reduce(self, op: str, axis: Axis, keepdims: bool) -> NDArray:
        axes = normal_axes(axis, len(self.shape))
        y = _SMALL_REDUCE[op](self, axes, bool(keepdims))
        if y is not None:
            return y
        kept, shape = _reduced_shapes(self.shape, axes)
        y = _new(kept, self.dtype, self.buffer.device, op)
        if op != 'sum' and 0 in self.shape and any(self.shape[d] == 0 for d in axes):
            raise ValueError(f'{op} of an array of shape {self.shape} over axes {axes}: it is undefined without elements')
        if 0 not in kept:
            self.buffer.device.reduce(op, y, self)
        if op != 'sum' and self.is_mask:
            _as_mask(y)
        return y if keepdims else NDArray(y.buffer, 0, shape, row_major(shape), y.dtype)

    def _reduced(self, op: str, axis: Axis, keepdims: bool) -> NDArray:
        if op == 'sum' and self.dtype is not INT and self.is_mask:
            return self._cast(INT)._reduce(op, axis, keepdims)             # a number of elements, as in numpy
        if op != 'mean':
            return self._reduce(op, axis, keepdims)
        y = (self if self.dtype is not INT else self._cast(FLOAT))._reduce('sum', axis, keepdims)
        return y._scalar('divide', self.size / y.size, False, y) if y.size else y

    @accepts_torch_names
    def softmax(self, axis: Axis = -1) -> NDArray:
        """Return e^x / sum(e^x) along one axis, several or all, without overflow."""
        return super().softmax(axis) if self.dtype is DOUBLE else _along('softmax', axis, self._cast(FLOAT))

    @accepts_torch_names
    def log_softmax(self, axis: Axis = -1) -> NDArray:
        """Return log(softmax(x)) along one axis, several or all."""
        return super().log_softmax(axis) if self.dtype is DOUBLE else _along('log_softmax', axis, self._cast(FLOAT))

    def softmax_gradient(self, dy: NDArray, axis: Axis = -1, log: bool = False) -> NDArray:
        """Return the gradient of x from dy, the gradient of this array, which is x.softmax(axis), or x.log_softmax(axis)."""
        if self.dtype is not DOUBLE:
            return _along('log_softmax' if log else 'softmax', axis, dy, self)
        if log:
            return dy - self.exp() * dy.sum(axis, keepdims=True)
        return self * (dy - (dy * self).sum(axis, keepdims=True))

    @accepts_torch_names
    def argmax(self, axis: int | None = None, keepdims: bool = False) -> NDArray:
        """Return the index of the maximum, the first of equals; NaN counts as largest.  axis=None: over the flattened array."""
        if axis is None:
            x, kept = _matrix(self.compact(), 1, self.size), (1,) * self.ndim
        else:
            d, = normal_axes((axis,), self.ndim)
            x = self if d == self.ndim - 1 else self.permute([*range(d), *range(d + 1, self.ndim), d])
            kept = self.shape[:d] + (1,) + self.shape[d + 1:]
            x = _matrix(x.compact(), math.prod(x.shape[:-1]), self.shape[d])
        rows, n = x.shape
        if not n:
            raise ValueError(f'argmax of an array of shape {self.shape} over axis {axis}: it is undefined without elements')
        if self.dtype is INT:                   # largest index counted from the end: the first maximum wins
            y = n - ((x == x.max(1, True)) * array(np.arange(n, 0, -1, dtype=INT), device=self.device)).max(1)
        else:
            y = _new((rows,), INT, self.device, 'argmax')
            if rows:
                self.device.argmax(y, x)
        shape = kept if keepdims else kept[:0] if axis is None else kept[:d] + kept[d + 1:]
        return NDArray(y.buffer, y.offset, shape, row_major(shape), INT)

    @accepts_torch_names
    def prod(self, axis: Axis = None, keepdims: bool = False) -> NDArray:
        """Return the product over axes; 1 without elements."""
        if not self.device.is_host:
            return super().prod(axis, keepdims)
        return self._running('multiply', tuple(sorted(normal_axes(as_axes(axis), self.ndim))), bool(keepdims))

    @accepts_torch_names
    def cumprod(self, axis: int | None = None) -> NDArray:
        """Return the products of the first 1, 2, ... elements along an axis; None: of the flattened array."""
        x, d = self._along(axis)
        return x._running('multiply', (d,)) if self.device.is_host else super().cumprod(axis)

    def _running(self, op: str, axes: Shape, keepdims: bool | None = None) -> NDArray:
        """Return the running results of op, 'add' or 'multiply', along axes in ascending order; if keepdims is a bool, only the
        last ones."""
        x, kept = self._cast(INT) if self.is_mask else self, [d for d in range(self.ndim) if d not in axes]
        first = axes[0] if axes else 0
        if axes != tuple(range(first, first + len(axes))):              # the results have the order of the other axes
            x, first = x.permute((*kept, *axes)), len(kept)
        x = x.compact()
        sizes = [math.prod(part) for part in (x.shape[:first], x.shape[first:first + len(axes)], x.shape[first + len(axes):])]
        shape = self.shape if keepdims is None else _reduced_shapes(self.shape, axes)[not keepdims]
        y = _new(shape, x.dtype, x.device, 'cumulate')
        if y.size:
            x.device.cumulate(op, y, x, *sizes, keepdims is not None)
        return y

    def _cumulated(self, axis: int) -> NDArray:
        """Return the sums of the first 1, 2, 3 ... elements along an axis; on a GPU in log n steps: each adds to every element
        the one that is 1, 2, 4 ... before it."""
        if self.device.is_host:
            return self._running('add', (axis,))
        y = (self if not self.is_mask else self.astype(INT)).copy()
        before, n, step = (slice(None),) * axis, self.shape[axis], 1
        while step < n:
            y[(*before, slice(step, None))] += y[(*before, slice(0, n - step))].copy()
            step *= 2
        return y

    def _sorting(self, axis: int, descending: bool) -> NDArray:
        """Return the indices that sort along an axis."""
        if not self.device.is_host:
            if backend.is_recorded():
                raise RuntimeError('argsort: arrays on a GPU are sorted on the CPU, which a plan cannot record; sort before or '
                                   'after the recording')
            return array(array(self.stored(), self.dtype, cpu())._sorting(axis, descending), device=self.device)
        x = self.moveaxis(axis, -1)._cast(DOUBLE)
        x = (x if not descending else x * -1.0).compact()        # a mask of float64 has no negative
        y = _new(x.shape, INT, self.device, 'argsort')
        if y.size:
            shape = math.prod(x.shape[:-1]), x.shape[-1]
            self.device.argsort(y.reshape(shape), x.reshape(shape))
        return y.moveaxis(-1, axis)

    def nonzero(self) -> tuple[NDArray, ...]:
        """Return the int32 indices of the elements that are not 0, an array for each axis."""
        return _small_nonzero(self) or super().nonzero()

    def _picked(self, order: NDArray, axis: int) -> NDArray:
        if not order.size:
            return super()._picked(order, axis)
        x, order = (a.moveaxis(axis, -1).compact() for a in (self, order))
        rows, n = self.size // self.shape[axis], self.shape[axis]
        at = order.reshape(rows, -1) + array(np.arange(0, rows * n, n, dtype=INT), device=self.device).reshape(rows, 1)
        y = _new(order.shape, self.dtype, self.device, 'take')
        self.device.take(_matrix(y, y.size, 1), _matrix(x, x.size, 1), at.reshape(-1))
        return (_as_mask(y) if self.is_mask else y).moveaxis(-1, axis).compact()

    def _pieces(self, sizes: Shape, axis: int) -> tuple[NDArray, ...]:
        ends = [sum(sizes[:i + 1]) for i in range(len(sizes))]
        return tuple(self[(slice(None),) * axis + (slice(end - size, end),)] for size, end in zip(sizes, ends, strict=True))

    @accepts_torch_names
    def unbind(self, axis: int = 0) -> tuple[NDArray, ...]:
        """Return the slices along an axis, without that axis: views."""
        d, = normal_axes(axis, self.ndim)
        return tuple(self[(slice(None),) * d + (i,)] for i in range(self.shape[d]))

    def flatten(self, start_dim: Any = 0, end_dim: int = -1, *, order: str = 'C') -> NDArray:
        """Return a copy with the axes from start_dim to end_dim merged; reshape and ravel return a view if possible."""
        y = super().flatten(start_dim, end_dim, order=order)
        return y.copy() if y.buffer is self.buffer else y

    def bits_of(self) -> NDArray:
        """Return an int32 view of the bits; of float64 with a last axis of 2."""
        return self if self.dtype is INT else self.device.bits(self, INT)

    # ---- for pyops/methods.py ------------------------------------------------------------------------

    def _plain(self) -> NDArray:
        return self

    def _constant(self, array: NDArray) -> NDArray:
        return array

    def _operand(self, other: Any) -> NDArray:
        return _operand(other, self)

    def _function(self, name: str) -> Any:
        return globals()[name]

    def _with_added(self, ids: np.ndarray, rows: Any) -> NDArray:
        """Return a copy with y[ids[i]] += rows[i] for i in order."""
        rows = _operand(rows, self)
        if self.dtype is INT:                   # add_at adds floats
            numbers = np.array(self.stored())
            np.add.at(numbers, ids, rows._cast(INT).stored())
            return array(numbers, INT, self.device)
        y = self.copy()
        y.add_at(ids, rows)
        return y

    def _replace(self, compute: Callable[[NDArray], NDArray], operands: Any = ()) -> NDArray:
        """Replace the elements by the elements of compute(self)."""
        result = compute(self)
        check_stored(result, self)
        self[...] = result
        return self


# the short ways of operations on small arrays, by name; each returns None if the general one below has to run
_BINARY_OPS = ('add', 'subtract', 'multiply', 'divide', 'power', 'maximum', 'minimum', 'floor_divide', 'remainder', 'and', 'or',
               'xor', *sorted(_COMPARISONS))
_SMALL_BINARY = {op: small.binary(NDArray, op, op in _COMPARISONS, op in _KEEPS_MASKS | _MIXES_MASKS) for op in _BINARY_OPS}
_SMALL_SCALAR = {op: small.scalar(NDArray, op, op in _COMPARISONS) for op in _BINARY_OPS}
_WHOLE = 'floor', 'round', 'ceil', 'trunc'              # of int32 they are copies
_SMALL_UNARY = {op: small.unary(NDArray, op) for op in ('copy', 'negate', 'abs', 'sqrt', 'exp', 'log', 'tanh', 'sigmoid',
                                                        'floor', 'sin', 'cos', 'expm1', 'log1p', 'arctan', 'arcsin',
                                                        'arccos', 'erf', 'round', 'ceil', 'trunc', 'sign', 'tan', 'elu',
                                                        'softplus', 'hardsigmoid', 'hardswish')}
_SMALL_REDUCE = {op: small.reduce(NDArray, op) for op in ('sum', 'max', 'min')}
_small_convert, _small_matmul, _small_where = small.convert(NDArray), small.matmul(NDArray), small.where(NDArray)
_small_assign, _small_take, (_small_get, _small_put) = small.in_place('copy'), small.take(NDArray), small.elements(NDArray)
_small_nonzero, _small_fill_where, _small_select = small.nonzero(NDArray), small.fill_where(NDArray), small.select(NDArray)
_small_gathered = recorded(NDArray, lambda x, *index: x._at(index if len(index) > 1 else index[0]))
_small_concatenate, _small_stack = small.join(NDArray, False), small.join(NDArray, True)


def _operators() -> None:
    """Define a + b, 1 + b and a += b for all operators, and the comparisons.  Small arrays take the short way."""
    def binary(op: str) -> tuple[Any, Any, Any]:
        of_arrays, of_number, changes = _SMALL_BINARY[op], _SMALL_SCALAR[op], small.in_place(op)

        def method(self: NDArray, other: Any) -> NDArray:
            y = of_arrays(self, other) if type(other) is NDArray else of_number(self, other, False)
            return self._binary_of_any(op, other) if y is None else y

        def reflected(self: NDArray, other: Any) -> NDArray:
            y = of_number(self, other, True)
            return self._binary_of_any(op, other, True) if y is None else y

        def in_place(self: NDArray, other: Any) -> NDArray:
            return self if changes(self, other) else self._in_place(op, other)
        return method, reflected, in_place

    def logical(op: str) -> tuple[Any, Any, Any]:
        def method(self: NDArray, other: Any) -> NDArray:
            return self._logical(op, other)

        def in_place(self: NDArray, other: Any) -> NDArray:
            self[...] = self._logical(op, other)
            return self
        return method, method, in_place

    for name, make, op in (('add', binary, 'add'), ('sub', binary, 'subtract'), ('mul', binary, 'multiply'),
                           ('truediv', binary, 'divide'), ('pow', binary, 'power'), ('floordiv', binary, 'floor_divide'),
                           ('mod', binary, 'remainder'), ('and', logical, 'and'), ('or', logical, 'or'),
                           ('xor', logical, 'xor')):
        for prefix, method in zip(('', 'r', 'i'), make(op), strict=True):
            setattr(NDArray, f'__{prefix}{name}__', method)
    for name, op in (('eq', 'equal'), ('ne', 'not_equal'), ('lt', 'less'), ('le', 'less_equal'), ('gt', 'greater'),
                     ('ge', 'greater_equal')):
        setattr(NDArray, f'__{name}__', binary(op)[0])


_operators()


# methods of several kernels, which run as one call for small arrays
_RECORDED = ('round', '__round__', 'sign', 'isfinite', 'isinf', 'ceil', 'clip', 'clamp', 'tril', 'triu', 'mean', 'var',
             'std', 'ptp', 'norm', 'any', 'all', 'argmax', 'argmin', 'logsumexp', 'softmax', 'log_softmax', 'argsort', 'sort',
             'topk', 'repeat', 'repeat_interleave', 'tile', 'roll', 'diagonal', 'trace', 'pad', 'prod', 'cumsum', 'cumprod',
             'take', 'index_select', '_running', '_sorting')
for _name in _RECORDED:
    setattr(NDArray, _name, recorded(NDArray, getattr(NDArray, _name)))


# ---- operands --------------------------------------------------------------------------------------------------------

def _along(op: str, axis: Axis, *arrays: NDArray) -> NDArray:
    """Return softmax or log_softmax (op) of x along axes, or for arrays dy and y its gradient.  A kernel takes one axis of
    compact arrays, so adjacent axes are merged, and other axes are moved to the end."""
    x = arrays[0]
    axes, ndim = sorted(normal_axes(softmax_axes(axis, x.ndim), x.ndim)), x.ndim
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


def check_width(dtype: np.dtype) -> None:
    """Raise TypeError for the dtypes of 16 bits, which arrays do not have."""
    if dtype == backend.BF16 or dtype == np.float16:
        raise TypeError(f'{"bfloat16" if dtype == backend.BF16 else dtype}: arrays are float32, float64, int32 or bool; for '
                        "products of bfloat16 set device.precision = 'bf16', for numbers in 16 bits use pyops.formats.encode")


def _dtype(dtype: DTypeLike) -> np.dtype:
    """Return the object FLOAT, DOUBLE or INT, so that dtypes can be compared by identity: INT for integers and bool."""
    found = numpy_dtype(dtype)
    if found.kind in 'iub':
        return INT
    if found == FLOAT:
        return FLOAT
    if found == DOUBLE:
        return DOUBLE
    check_width(found)
    raise TypeError(f'{found}: expected float32, float64, int32 or bool')


def _is_bool(dtype: DTypeLike | None) -> bool:
    return dtype is not None and numpy_dtype(dtype) == BOOL


def _common_dtype(*arrays: NDArray) -> np.dtype:
    """Return the dtype of an operation on these arrays: float64 before float32 before int32."""
    found = {a.dtype for a in arrays}
    return DOUBLE if DOUBLE in found else FLOAT if FLOAT in found else INT


def _int32(value: int) -> int:
    if value not in _INT_RANGE:
        raise OverflowError(f'Python integer {value} out of bounds for int32')
    return value


def _operand(other: Any, like: NDArray) -> Any:
    """Convert `other` to an NDArray on the device of `like`; NotImplemented if it is not an array or a number."""
    if isinstance(other, NDArray):
        return other
    if isinstance(other, np.ndarray | np.generic):
        return array(other, DOUBLE if like.dtype is DOUBLE and np.asarray(other).dtype.kind == 'f' else None, like.device)
    if isinstance(other, int | float):
        real = DOUBLE if like.dtype is DOUBLE else FLOAT
        return array(other, None if isinstance(other, bool) else like.dtype if isinstance(other, int) else real, like.device)
    if isinstance(other, list | tuple):
        return _operand(np.asarray(other), like)
    return NotImplemented


def _matrix(x: NDArray, rows: int, columns: int) -> NDArray:
    """View a compact array as a matrix of as many elements: reshape without its checks."""
    return NDArray(x.buffer, x.offset, (rows, columns), (columns, 1), x.dtype)


def _ids(ids: Any, n: int, device: Device) -> NDArray:
    """Convert row numbers to a compact int32 array; negative ones count from the end of n rows."""
    if isinstance(ids, NDArray) and ids.dtype is INT and not ids.is_mask:
        return (ids + (ids < 0) * n).compact()
    ids = np.asarray(ids)
    if ids.size and ids.dtype.kind not in 'iu':
        raise IndexError(f'arrays used as indices must be of integers, got {ids.dtype}')
    return array(np.where(ids < 0, ids + n, ids) if ids.size and ids.min() < 0 else ids, INT, device)


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

    Raises IndexError for a mask into which numbers were written, which could be either, RuntimeError for a mask while a plan
    records.
    """
    if not isinstance(index, NDArray):
        found = np.asarray(index)
        return found.astype(bool) if found.dtype.kind == 'b' or getattr(index, 'is_mask', False) else None
    if index.buffer.mask is None:
        return None
    if not index.is_mask:
        raise IndexError(f'the index of shape {index.shape} is a mask into which numbers were written: it could be '
                         'a mask or row numbers; use x[index != 0] to select, x[index * 1] for row numbers')
    if backend.is_recorded():
        raise RuntimeError(f'a mask of shape {index.shape} cannot select rows while a plan records: their number would depend '
                           'on the data; multiply by the mask instead')
    return index.numpy()


def is_advanced(index: Index) -> bool:
    """Return whether an index has arrays, lists or bools, so that it selects a copy."""
    if type(index) is tuple:
        for item in index:
            if type(item) not in _BASIC and _is_array_index(item):
                return True
        return False
    return type(index) not in _BASIC and _is_array_index(index)


def _is_array_index(item: Any) -> bool:
    if isinstance(item, NDArray):
        return bool(item.shape) or item.buffer.mask is not None or item.dtype is not INT
    if isinstance(item, np.ndarray):
        return bool(item.shape) or item.dtype.kind not in 'iu'
    return isinstance(item, list | tuple | range | bool | np.bool_ | Methods)


def plain_index(index: Any) -> Any:
    """Replace the Tensors in an index by their arrays."""
    if isinstance(index, tuple):
        return tuple([item._plain() if isinstance(item, Methods) else item for item in index])
    if isinstance(index, list) and any(isinstance(item, Methods) for item in index):
        return [item.numpy() if isinstance(item, Methods) else item for item in index]      # type: ignore[attr-defined]
    return index._plain() if isinstance(index, Methods) else index


def _single_array(index: tuple[Any, ...], ndim: int) -> tuple[int, Any, tuple[Any, ...]] | None:
    """Return (its place, the array, the index with a slice in that place) for an index of one array of integers, slices, None
    and Ellipsis; else None."""
    arrays = [i for i, item in enumerate(index) if _is_array_index(item)]
    others = [item for i, item in enumerate(index) if i not in arrays]
    if len(arrays) != 1 or not all(item is None or item is Ellipsis or isinstance(item, slice) for item in others):
        return None
    at = arrays[0]
    ids = index[at]
    if isinstance(ids, bool | np.bool_) or mask_in(ids) is not None or not np.ndim(ids):
        return None
    before, index = index[:at], (*index[:at], slice(None), *index[at + 1:])
    if Ellipsis in before:
        named = sum(item is not None and item is not Ellipsis for item in index)
        at += ndim - named - 1
    return (at, ids, index) if 0 <= at else None


def gathered(x: Any, index: Index) -> Any:
    """Return x[index] for an index with arrays; x is an NDArray or a Tensor."""
    if type(index) is tuple and len(index) == 1:
        index, = index
    if type(index) is not tuple:
        mask = mask_in(index)
        if mask is None and np.ndim(index):
            return x.take_rows(index)
        if mask is not None and mask.ndim and mask.shape == x.shape[:mask.ndim]:
            return x.reshape(mask.size, *x.shape[mask.ndim:]).take_rows(np.flatnonzero(mask))
    elif (single := _single_array(index, x.ndim)) is not None:          # on the device, so that a plan can record it
        d, ids, index = single
        view = x[index]
        y = view.moveaxis(d, 0).take_rows(ids)
        new = y.ndim - view.ndim + 1
        return y.moveaxis(tuple(range(new)), tuple(range(d, d + new)))
    at = positions(index, x.shape)
    return x.reshape(x.size).take_rows(at.reshape(-1)).reshape(at.shape)


def numpy_index(index: Index) -> Any:
    """Return an index with its arrays as numpy arrays.  RuntimeError for arrays of a recording plan: their values would be
    frozen."""
    if isinstance(index, tuple):
        return tuple(map(numpy_index, index))
    if isinstance(index, list | range):
        return np.asarray(index) if index else np.zeros(0, np.int64)
    if not isinstance(index, NDArray):
        return np.asarray(index).astype(bool) if getattr(index, 'is_mask', False) else index
    mask = mask_in(index)
    if mask is not None:
        return mask
    if index.dtype is not INT:
        raise IndexError(f'arrays used as indices must be of integers or bools, got {index.dtype}')
    if backend.is_recorded():
        raise RuntimeError('an index with several arrays cannot be recorded by a plan: their values would be frozen; index '
                           'one axis at a time')
    return index.numpy()


def positions(index: Index, shape: Shape) -> np.ndarray:
    """Return where the elements x[index] are in x.reshape(-1), for an x of this shape, as a numpy array of int64 in the
    shape of x[index].  IndexError as in numpy."""
    index = numpy_index(index)
    if math.prod(shape) <= small.MOST_ROWS:
        return np.asarray(small.offsets(shape, row_major(shape))[index], np.int64)
    found: Any = 0
    for d, (n, step) in enumerate(zip(shape, row_major(shape), strict=True)):
        along = (np.arange(n) * step).reshape([-1 if i == d else 1 for i in range(len(shape))])
        found = found + np.broadcast_to(along, shape)[index]
    return np.asarray(found if shape else np.zeros((), np.int64)[index], np.int64)


def last_of_equals(places: np.ndarray) -> np.ndarray | None:
    """Return the indices of the last occurrence of each number; None if all are different."""
    unique, last = np.unique(places[::-1], return_index=True)
    return None if len(unique) == len(places) else len(places) - 1 - last


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
    y = _small_matmul(a, b)
    if y is not None:
        return y
    _same_device(a, b)
    if not a.shape or not b.shape:
        raise ShapeError(f'matmul: shapes {a.shape} and {b.shape}: expected at least one axis each')
    if a.dtype is not b.dtype:
        common = _common_dtype(a, b)
        a, b = a._cast(common), b._cast(common)
    left, right = a[None] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b
    if left.shape[-1] != right.shape[-2]:
        raise ShapeError(f'matmul: shapes {a.shape} and {b.shape} do not fit: {left.shape[-1]} and {right.shape[-2]}')
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

    dtype: float32, float64, int32 (any integer dtype) or bool.  Default: the dtype of an NDArray; for other numbers float32 if
    any is a float, also for numpy's float64, else int32.  Bools become a mask, stored as int32; with a dtype they become
    numbers.
    Raises TypeError for other dtypes, OverflowError for integers outside int32, ValueError for more than 8 axes.
    """
    device = named_device(device)
    if type(obj) is list and not _is_bool(dtype):
        y = _small_from_list(obj, dtype if dtype is None else _dtype(dtype), device)
        if y is not None:
            return y
    is_mask = False
    if isinstance(obj, NDArray):
        if device is None or device is obj.device:
            y = obj if dtype is None else obj.astype(dtype)
            return obj.copy() if y is obj else y
        is_mask, stored = obj.is_mask, obj.stored()
        dtype, obj = obj.dtype if dtype is None and not is_mask else dtype, stored
    found = obj if isinstance(obj, np.ndarray) else np.array(obj)
    if found.dtype.kind not in 'biuf':
        raise TypeError(f'array: expected numbers, got {found.dtype}')
    is_mask = _is_bool(dtype) or dtype is None and (is_mask or found.dtype.kind == 'b')
    if is_mask:
        found, dtype = found if found.dtype.kind == 'b' or found.dtype == FLOAT else found != 0, None
    if dtype is not None:
        dtype = _dtype(dtype)
    elif found is obj:
        dtype = INT if found.dtype.kind in 'biu' else FLOAT
    else:
        dtype = INT if found.dtype.kind in 'biu' and (found.size or is_mask) else FLOAT
    if dtype is INT and found.dtype.kind in 'iu' and found.dtype != INT and found.size:
        for value in (int(found.min()), int(found.max())):
            _int32(value)
    shape = _checked(found.shape)
    y = _small_from_numpy(found, dtype, device)
    if y is not None:
        return _as_mask(y) if is_mask else y
    # Constants are never allocated in a plan's memory: a replay would not write them again.
    memory = backend.HOST.zero_array(shape, dtype)
    with np.errstate(invalid='ignore', over='ignore'):
        memory[...] = found
    y = NDArray((device or default_device()).wrap(memory), 0, shape, row_major(shape), dtype)
    return _as_mask(y) if is_mask else y


def empty(shape: Shape | int, dtype: DTypeLike = FLOAT, device: Device | None = None) -> NDArray:
    """Return a compact array with undefined contents."""
    return _new(_shape_of(shape), _dtype(dtype), named_device(device) or default_device(), 'empty')


def _kind_of(number: type, dtype: DTypeLike | None) -> tuple[np.dtype, bool]:
    """Return the dtype of an array filled with numbers of this type, and whether it is a mask."""
    is_mask = dtype is None and issubclass(number, bool | np.bool_) or _is_bool(dtype)
    return _dtype(dtype) if dtype is not None else INT if issubclass(number, int | np.integer | np.bool_) else FLOAT, is_mask


_small_full, _small_from_numpy = small.full(NDArray, _kind_of), small.from_numpy(NDArray)
_small_from_list = small.from_list(NDArray)


def full(shape: Shape | int, fill_value: float, dtype: DTypeLike | None = None, device: Device | None = None) -> NDArray:
    """Return a compact array of one number.  Default dtype: int32 for an int, float32 for a float; a bool gives a mask."""
    device = named_device(device)
    filled = _small_full(shape, fill_value, dtype, device)
    if filled is not None:
        return filled
    dtype, is_mask = _kind_of(type(fill_value), dtype)
    y = empty(shape, dtype, device)
    y.fill(bool(fill_value) if is_mask else fill_value)
    return _as_mask(y) if is_mask else y


def zeros(shape: Shape | int, dtype: DTypeLike = FLOAT, device: Device | None = None) -> NDArray:
    """Return a compact array of zeros."""
    return full(shape, 0, dtype, device)


def ones(shape: Shape | int, dtype: DTypeLike = FLOAT, device: Device | None = None) -> NDArray:
    """Return a compact array of ones."""
    return full(shape, 1, dtype, device)


@accepts_torch_names
def arange(start: float, stop: float | None = None, step: float = 1, dtype: DTypeLike | None = None,
           device: Device | None = None) -> NDArray:
    """Return start, start + step, ... below stop, like np.arange."""
    (start, stop), device = (0, start) if stop is None else (start, stop), named_device(device)
    if type(start) is type(stop) is type(step) is int and start in _INT_RANGE and stop in _INT_RANGE and step and dtype is None:
        y = _small_from_list(range(start, stop, step), INT, device)
        if y is not None:
            return y
    numbers = np.arange(start, stop, step)
    if dtype is None and numbers.dtype.kind == 'i' and numbers.size:
        _int32(int(numbers[0])), _int32(int(numbers[-1]))       # those between are in the range, too
        numbers = numbers.astype(INT)
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
    item = dtype.itemsize
    if a.dtype != dtype:
        raise TypeError(f'from_numpy: expected float32, float64 or int32, got {a.dtype}; copy it with array()')
    if not a.flags.aligned or any(step % item for step in a.strides):
            raise ValueError(f'from_numpy: array of shape {a.shape}: byte strides {a.strides} or address are not multiples '
                             'of the element size; copy it with array()')
    _checked(a.shape)
    device = device or default_device()
    if a.flags.c_contiguous:
        return NDArray(device.wrap(a, True), 0, a.shape, row_major(a.shape), dtype)
    low, high = np.lib.array_utils.byte_bounds(a)
    first = a[tuple(slice(None, None, -1 if step < 0 else 1) for step in a.strides)]       # element 0 has the lowest address
    memory = np.lib.stride_tricks.as_strided(first, ((high - low) // item,), (item,))
    offset = sum((n - 1) * -step for n, step in zip(a.shape, a.strides, strict=True) if step < 0) // item
    return NDArray(device.wrap(memory, True), offset, a.shape, tuple(step // item for step in a.strides), dtype)


def as_ndarray(array: Any, device: Device | None = None) -> NDArray:
    """Wrap an op's array in an NDArray over the same memory: from_numpy for numpy arrays; an NDArray is returned unchanged."""
    return array if isinstance(array, NDArray) else from_numpy(array, device)


def from_dlpack(x: Any, device: Device | None = None) -> NDArray:
    """Return an NDArray over the memory of another library's array, with its strides: torch.from_dlpack in reverse.

    An array in CPU memory is copied if `device`, by default the current device, is a GPU; one on the first GPU stays there
    without a copy, unless device is another one.
    TypeError for a dtype that NDArrays lack, ValueError for a read-only array, BufferError for another device.
    """
    if not hasattr(x, '__dlpack_device__') or x.__dlpack_device__()[0] != DLPACK_CUDA:
        return from_numpy(np.from_dlpack(x), device)
    y: NDArray = gpu().from_dlpack(x)
    _checked(y.shape)
    return y if device is None else y.to(device)


def _all_alike(arrays: Iterable[Numbers], who: str) -> tuple[list[NDArray], np.dtype]:
    """Convert to NDArrays and check: at least one, all on one device.  Also return the common dtype."""
    given = list(arrays)
    if not given:
        raise ValueError(f'{who}: expected at least one array')
    first = next((a for a in given if isinstance(a, NDArray)), None)
    found = [a if isinstance(a, NDArray) else array(a, device=first.device if first is not None else None) for a in given]
    for other in found:
        _same_device(found[0], other)
    return found, _common_dtype(*found)


@accepts_torch_names
def concatenate(arrays: Iterable[Numbers], axis: int = 0) -> NDArray:
    """Join arrays along an existing axis.  ValueError if their shapes differ in another axis."""
    arrays = list(arrays)
    return _two_concatenated(*arrays, axis) if len(arrays) == 2 else _concatenated(arrays, axis)


def _concatenated(arrays: list[Any], axis: int) -> NDArray:
    y = _small_concatenate(arrays, axis)
    if y is not None:
        return y
    arrays, dtype = _all_alike(arrays, 'concatenate')
    first = arrays[0]
    d, = normal_axes((axis,), first.ndim)
    for other in arrays:
        if other.shape[:d] + other.shape[d + 1:] != first.shape[:d] + first.shape[d + 1:]:
            raise ShapeError(f'concatenate: shapes {first.shape} and {other.shape} differ in another axis than {d}')
    y = _new(first.shape[:d] + (sum(a.shape[d] for a in arrays),) + first.shape[d + 1:], dtype, first.device, 'concatenate')
    start = 0
    for a in arrays:
        NDArray(y.buffer, start * y.strides[d], a.shape, y.strides, dtype)._write(a)
        start += a.shape[d]
    return _as_mask(y) if all(a.is_mask for a in arrays) else y


@accepts_torch_names
def stack(arrays: Iterable[Numbers], axis: int = 0) -> NDArray:
    """Join arrays of one shape along a new axis.  ValueError if shapes differ."""
    arrays = list(arrays)
    return _two_stacked(*arrays, axis) if len(arrays) == 2 else _stacked(arrays, axis)


def _stacked(arrays: list[Any], axis: int) -> NDArray:
    y = _small_stack(arrays, axis)
    if y is not None:
        return y
    arrays, dtype = _all_alike(arrays, 'stack')
    first = arrays[0]
    d, = normal_axes((axis,), first.ndim + 1)
    for other in arrays:
        if other.shape != first.shape:
            raise ShapeError(f'stack: shapes {first.shape} and {other.shape} differ')
    y = _new(_checked(first.shape[:d] + (len(arrays),) + first.shape[d:]), dtype, first.device, 'stack')
    for i, a in enumerate(arrays):
        NDArray(y.buffer, i * y.strides[d], a.shape, y.strides[:d] + y.strides[d + 1:], dtype)._write(a)
    return _as_mask(y) if all(a.is_mask for a in arrays) else y


# one call copies both
_two_concatenated = recorded(NDArray, lambda a, b, axis: _concatenated([a, b], axis))
_two_stacked = recorded(NDArray, lambda a, b, axis: _stacked([a, b], axis))


def where(condition: Any, a: Any, b: Any) -> NDArray:
    """Return the elements of a where condition is not 0, else the elements of b; all three broadcast.  Exact for NaN and
    infinities."""
    y = _small_where(condition, a, b) if type(condition) is NDArray else None
    return _where(condition, a, b) if y is None else y


@functools.partial(recorded, NDArray)
def _where(condition: Any, a: Any, b: Any) -> NDArray:
    first = next((x for x in (condition, a, b) if isinstance(x, NDArray)), None)
    like = first if first is not None else array(condition)
    condition = _operand(condition, like)
    real = next((x for x in (a, b) if isinstance(x, NDArray)), like if first is None else condition)
    if isinstance(a, int | float) and isinstance(b, int | float):           # numbers alone decide the dtype, not the condition
        real = array([a, b] if isinstance(a, bool) == isinstance(b, bool) else [a + 0, b + 0], device=condition.device)
    a, b = _operand(a, real), _operand(b, real)
    both_masks, common = a.is_mask and b.is_mask, _common_dtype(a, b)
    shape = broadcast_shape(condition.shape, a.shape, b.shape)
    for x in a, b:
        _same_device(condition, x)
    a, b = a._cast(common), b._cast(common)
    y = _new(shape, common, condition.device, 'where')
    if 0 not in shape:
        condition.device.where(y, condition, a, b)
    return _as_mask(y) if both_masks else y


@functools.partial(recorded, NDArray)
def einsum(subscripts: str, *operands: Numbers) -> NDArray:
    """Return the sum of products of the operands over the letters that the result lacks, such as 'bij,bjk->bik'.  See
    pyops/contraction.py."""
    from pyops.contraction import einsum
    return einsum(subscripts, *(a if isinstance(a, NDArray) else array(a) for a in arrays_of(operands)))


@functools.partial(recorded, NDArray)
def pad_axes(a: NDArray, widths: Any, value: float = 0) -> NDArray:
    """Surround a with `value`.  widths: ((before, after), ...) per axis, one pair for all axes, or one number."""
    widths = np.broadcast_to(np.asarray(widths, np.int64), (a.ndim, 2)).tolist() if a.ndim else []
    if any(n < 0 for pair in widths for n in pair):
        raise ValueError(f'pad: widths {widths}: expected 0 or more')
    y = full(tuple(n + before + after for n, (before, after) in zip(a.shape, widths, strict=True)), value, a.dtype, a.device)
    y[tuple(slice(before, before + n) for n, (before, _) in zip(a.shape, widths, strict=True))] = a
    return _as_mask(y) if a.is_mask and value in (0, 1) else y


pad = pad_axes


def _on_device(name: str) -> Callable[..., NDArray]:
    """Return the method of devices that makes an NDArray there as a function of pyops.creation or pyops.init does."""
    module = 'pyops.init' if name == 'one_hot' else 'pyops.creation'

    def create(self: Device, *args: Any, **named: Any) -> NDArray:
        return getattr(importlib.import_module(module), name)(*args, **named, device=self).array
    create.__name__, create.__doc__ = name, f'Return an NDArray on this device, as {module}.{name}.'
    return create


# functions of new arrays that pyops.creation has for Tensors
_MADE = frozenset(('empty_like', 'eye', 'full_like', 'linspace', 'logspace', 'ones_like', 'rand', 'randb', 'randint', 'randn',
                   'zeros_like'))
# methods of devices that return NDArrays, as in the needle course
for _name in ('empty', 'full', 'one_hot', 'ones', 'rand', 'randb', 'randn', 'zeros'):
    setattr(_Device, _name, _on_device(_name))


def __getattr__(name: str) -> Callable[..., NDArray]:
    """Return the function of a method: add(x, y) is x.add(y); or of new arrays: rand, linspace, zeros_like, ..."""
    if name in _MADE:
        make = getattr(importlib.import_module('pyops.creation'), name)
        return lambda *shape, **named: make(*shape, **named).array
    if name not in METHODS and name not in ALIASES and name not in NUMPYS:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return function_of(NDArray, ALIASES.get(name, name), lambda x: x if isinstance(x, Methods) else array(x))


if backend_name() == 'numpy':   # at import time, before any array is allocated
    backend.use(numpy_device())
elif backend_name() == 'gpu':
    try:
        use_gpu()
    except UserError as error:
        raise UserError(f'PYOPS_BACKEND=gpu: {error}, or unset PYOPS_BACKEND') from error
