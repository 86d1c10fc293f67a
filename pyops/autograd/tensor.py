"""The Tensor class: an array with a record of the op that produced it."""
from __future__ import annotations

import functools
import mmap
import numbers
import operator as operators
import weakref
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from pyops import backend, ndarray
from pyops.autograd.gradients import backward
from pyops.autograd.mode import mode
from pyops.autograd.tape import Recorded, apply, as_array, wrap
from pyops.errors import DtypeError, ShapeError
from pyops.further_methods import FurtherMethods
from pyops.hooks import Hook
from pyops.methods import accepts_torch_names, accepts_tuple, arrays_of, flipped_axes, normal_axes, numpy_dtype, several
from pyops.ndarray import NDArray
from pyops.ops import ReLU, elementwise, matmul, reductions, shapes
from pyops.params import random_generator
from pyops.torch_methods import check_stored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import DTypeLike

    from pyops.backend.device import Device
    from pyops.typing import Axis, Index, Numbers


def _remade(array: NDArray, requires_grad: bool, grad: Tensor | None) -> Tensor:
    tensor = Tensor(array, requires_grad)
    tensor.grad = grad
    return tensor


class Tensor(Recorded, FurtherMethods):
    """An NDArray that takes part in automatic differentiation.

    data            an NDArray, whose memory is shared, or numbers in numpy arrays or lists, which are copied
    requires_grad   True makes it a leaf: backward() adds the gradient to its .grad, a Tensor or None
    dtype           float32, float64, int32 or bool; None: float32 for numpy's floats and lists, int32 for integers

    .array          the NDArray
    .origin         (node, index of its output) of the op that produced it; None for a leaf
    Names are numpy's, else PyTorch's; the methods shared with NDArrays are in pyops/methods.py.
    """
    __slots__ = ()
    tape = staticmethod(apply)      # for formulas that run with or without a tape (pyops/ops/array.py)

    def __init__(self, data: Numbers, requires_grad: bool = False, device: Device | None = None,
                 dtype: DTypeLike | None = None) -> None:
        self.array, self.origin, self.requires_grad, self._grad = as_array(data, device, dtype), None, False, None
        self.requires_grad_(requires_grad)

    # -- properties and conversions

    @property
    def is_leaf(self) -> bool:
        return self.origin is None

    def __repr__(self) -> str:
        how = (f', op={self.origin[0].name}' if type(self.origin) is tuple else
               ', requires_grad=True' if self.requires_grad else '')
        return f'Tensor({np.array2string(self.array.numpy(), separator=", ", prefix="Tensor(")}{how})'

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError('len() of a 0-d tensor')
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ShapeError(f'the truth value of a tensor of shape {self.shape} is ambiguous: it has {self.size} elements; '
                             'use .any() or .all()')
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return self.array.__index__()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.array.numpy(), dtype, copy=copy)

    def __dlpack__(self, **how: Any) -> Any:
        return self.array.__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __format__(self, how: str) -> str:
        return format(self.array, how) if how else str(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Support deepcopy and pickle: the result is an independent leaf with its gradient."""
        if self.origin is not None:
            raise RuntimeError(f'a tensor of shape {self.shape} with a history cannot be copied or pickled; use detach()')
        return _remade, (self.array, self.requires_grad, self.grad)

    __hash__ = object.__hash__

    def numpy(self) -> np.ndarray:
        """Return a numpy array over the same memory; the tape does not notice changes to it."""
        return self.array.numpy()

    def item(self, *index: Any) -> Any:
        """Return the only element as a Python number; or the one at a position of the flattened array, or at an index for
        each axis.  Raises ValueError for several elements."""
        if index:
            return self.array.item(*index)
        if self.size != 1:
            raise ShapeError(f'item: expected a tensor of one element, got shape {self.shape}')
        return self.array.numpy().item()

    def tolist(self) -> Any:
        return self.array.numpy().tolist()

    def realize_cached_data(self) -> NDArray:
        """Return the NDArray; the needle course's name of x.array."""
        return self.array

    cached_data = property(realize_cached_data)

    @staticmethod
    def make_const(data: Numbers, *, requires_grad: bool = False) -> Tensor:
        """Return a Tensor without a history over an NDArray or the array of a Tensor; the needle course's function."""
        return Tensor(data, requires_grad)

    def share_memory_(self) -> Self:
        """Move the elements to memory that processes forked later share, in place, and return x.  Views made before keep the
        other memory.  On a GPU nothing changes."""
        if self.device.is_host and not self.is_shared():
            old = self.array
            memory = np.frombuffer(mmap.mmap(-1, max(old.nbytes, 1)), old.dtype, old.size).reshape(old.shape)
            self.array = ndarray.from_numpy(memory, old.device)
            self.array[...] = old
            if old.is_mask:
                self.array = self.array.astype(bool)
        return self

    def is_shared(self) -> bool:
        """Return whether processes forked later share the elements: after share_memory_, and on a GPU."""
        if not self.device.is_host:
            return True
        base: Any = self.array.stored()
        while isinstance(base, np.ndarray):
            base = base.base
        return isinstance(getattr(base, 'obj', base), mmap.mmap)

    # -- gradients

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        if requires_grad and self.dtype.kind != 'f':
            raise DtypeError(f'requires_grad: expected a tensor of floats, got {self.dtype}: only real numbers have a gradient')
        if not requires_grad and self.origin is not None:
            raise RuntimeError('requires_grad can be switched off for leaves only; use detach()')
        self.requires_grad = requires_grad
        return self

    def detach(self) -> Tensor:
        """Return a Tensor over the same memory without the history."""
        return wrap(self.array, None)

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Numbers) -> None:
        """Replace the array by another of the same shape and dtype."""
        array = as_array(value, self.device)
        if array.shape != self.shape or array.dtype != self.array.dtype:
            raise ValueError(f'data: expected shape {self.shape} and {self.array.dtype}, got {array.shape} and {array.dtype}')
        self.array = array

    def zero_grad(self) -> None:
        self.grad = None

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Hook:
        """Call hook(gradient) in each backward when the gradient of this tensor is complete; a Tensor that it returns replaces
        the gradient.  Return a Hook, whose remove() ends this.  RuntimeError if this tensor requires no gradient."""
        if not self.requires_grad:
            raise RuntimeError(f'register_hook: a tensor of shape {self.shape} requires no gradient')
        if self.origin is None:
            if getattr(self, '_hooks', None) is None:
                self._hooks = {}
            return Hook(self._hooks, hook)
        node, output = self.origin
        return Hook(node.hooks.setdefault(output, {}), hook)

    def retain_grad(self) -> None:
        """Let backward also set the .grad of this tensor, the result of an op; leaves have one anyway."""
        if not self.requires_grad:
            raise RuntimeError(f'retain_grad: a tensor of shape {self.shape} requires no gradient')
        if self.origin is None:
            return
        this = weakref.ref(self)                        # a strong reference would be a cycle

        def keep(gradient: Tensor) -> None:
            tensor = this()
            if tensor is not None:
                new = gradient if mode.grad else gradient.copy()
                tensor._grad = new if tensor._grad is None else tensor._grad + new
        self.register_hook(keep)

    def backward(self, gradient: Numbers | None = None, retain_graph: bool | None = None, create_graph: bool = False,
                 inputs: Any = None) -> None:
        """Add the gradient of this tensor with respect to each leaf it depends on to the leaf's .grad.

        gradient        the gradient of this tensor; None: 1, for a scalar
        retain_graph, create_graph, inputs  see pyops.autograd.backward
        """
        backward([self], [gradient], retain_graph, create_graph, inputs)

    @property
    def grad_fn(self) -> Any:
        """The node of the op that produced this tensor, None for a leaf."""
        return None if self.origin is None else self.origin[0]

    def detach_(self) -> Self:
        """Remove the history, in place."""
        self.origin, self.requires_grad = None, False
        return self

    # -- arithmetic

    if TYPE_CHECKING:               # _operators() below defines them
        def _of_two(self, other: Numbers, /) -> Tensor: ...
        __add__ = __radd__ = __iadd__ = __sub__ = __rsub__ = __isub__ = __mul__ = __rmul__ = __imul__ = _of_two
        __truediv__ = __rtruediv__ = __itruediv__ = __pow__ = __rpow__ = __ipow__ = __matmul__ = __rmatmul__ = _of_two
        __mod__ = __rmod__ = __imod__ = __floordiv__ = __rfloordiv__ = _of_two
        __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _of_two
        __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _of_two       # type: ignore[assignment]

    def __neg__(self) -> Tensor:
        return apply(elementwise.Negate, self)

    def __abs__(self) -> Tensor:
        return apply(elementwise.Abs, self)

    def __pos__(self) -> Tensor:
        return self.copy()

    def __invert__(self) -> Tensor:
        """Return the inverse of a mask; of int32, the inverse of all bits."""
        return mode.interpreter(operators.invert, (self,), {}) if mode.interpreter else wrap(~self.array, None)

    def relu(self) -> Tensor:
        if mode.interpreter is None and self.dtype.kind in 'ib':            # the kernel takes float32 and bfloat16
            return self.maximum(0)
        is_double = mode.interpreter is None and self.array.dtype == np.float64
        return where(self <= 0, 0.0, self) if is_double else apply(ReLU, self)

    def maximum(self, other: Numbers) -> Tensor:
        return apply(elementwise.Maximum, self, _operand(self, other))

    def minimum(self, other: Numbers) -> Tensor:
        return apply(elementwise.Minimum, self, _operand(self, other))

    def _unary(self, op: str) -> Tensor:
        gradient = _UNARY.get(op)
        return apply(gradient, self) if gradient else wrap(self.array._unary(op), None)

    def _reduced(self, op: str, axis: Axis, keepdims: bool) -> Tensor:
        return apply(_REDUCTIONS[op], self, axis=axis, keepdims=keepdims)

    def _power_norm(self, ord: float, axis: Axis, keepdims: bool) -> Tensor:
        return apply(reductions.Norm, self, p=ord, axis=axis, keepdims=keepdims)

    @accepts_torch_names
    def clip(self, min: Any = None, max: Any = None) -> Tensor:
        """Return x with elements below `min` replaced by `min`, and those above `max` by `max`.  None: no limit.
        An element that equals a limit has the whole gradient, as in PyTorch."""
        if not self.requires_grad or not mode.grad:
            return super().clip(min, max)
        if min is None and max is None:
            raise ValueError('clip: expected min, max or both, got neither')
        y = self if min is None else where(self < min, min, self)
        return y if max is None else where(y > max, max, y)

    clamp = clip

    @accepts_torch_names
    def argmax(self, axis: int | None = None, keepdims: bool = False) -> Tensor:
        """Return the index of the largest element, int32, without a gradient."""
        return wrap(self.array.argmax(axis, keepdims=keepdims), None)

    @accepts_torch_names
    def logsumexp(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        return apply(reductions.LogSumExp, self, axis=axis, keepdims=keepdims)

    @accepts_torch_names
    def softmax(self, axis: Axis = -1) -> Tensor:
        return apply(reductions.Softmax, self, axis=axis)

    @accepts_torch_names
    def log_softmax(self, axis: Axis = -1) -> Tensor:
        return apply(reductions.LogSoftmax, self, axis=axis)

    # -- shapes

    @accepts_tuple('shape')
    def reshape(self, *shape: Any) -> Tensor:
        return apply(shapes.Reshape, self, shape=several(shape))

    @accepts_tuple('axes', 'dims')
    def permute(self, *axes: Any) -> Tensor:
        return apply(shapes.Permute, self, axes=several(axes))

    @accepts_tuple('shape')
    def broadcast_to(self, *shape: Any) -> Tensor:
        return apply(shapes.BroadcastTo, self, shape=several(shape))

    @accepts_torch_names
    def flip(self, *axes: Any, axis: Axis = None) -> Tensor:
        """Reverse the order along these axes, given as numbers or one tuple; along all if none or None is given."""
        return apply(shapes.Flip, self, axes=flipped_axes(axes, axis, self.ndim))

    def copy(self, order: str = 'C') -> Tensor:
        """Return a copy through which gradients flow.   order: accepted as in numpy, without effect"""
        return apply(shapes.Copy, self)

    def astype(self, dtype: DTypeLike, copy: bool = False) -> Tensor:
        """Convert to float32, float64, int32 (any integer dtype) or bool.  Gradients flow between floats only.
        copy: return a copy also of a tensor of that dtype."""
        if copy and self.dtype == np.dtype(dtype):
            return self.copy()
        to = numpy_dtype(dtype)
        if to.kind == 'f' and self.dtype.kind == 'f':
            return apply(shapes.AsType, self, dtype=to)
        return wrap(self.array.astype(to), None)

    def _moved(self, device: Any) -> Tensor:
        target = ndarray.named_device(device)
        if target is not self.device and self.requires_grad:
            raise RuntimeError(f'to: a tensor of shape {self.shape} that requires a gradient cannot move to {target}; '
                               'use detach().to(device)')
        return self if target is self.device else wrap(self.array._moved(target), None)

    def cpu(self) -> Tensor:
        """Return this tensor if it is on the CPU, else a copy there."""
        return self.to(ndarray.cpu())

    def take_rows(self, ids: Any) -> Tensor:
        """Return the elements of axis 0 with these indices, negative from the end."""
        if not self.ndim:
            raise IndexError('too many indices for a tensor of shape (): 1')
        return apply(shapes.Take, self, ids if isinstance(ids, NDArray) else as_array(np.asarray(ids), self.device))

    @accepts_torch_names
    def unbind(self, axis: int = 0) -> tuple[Tensor, ...]:
        """Return the slices along an axis, without that axis."""
        return apply(shapes.Unbind, self, axis=normal_axes(axis, self.ndim)[0])

    def __getitem__(self, index: Index) -> Tensor:
        """Integers, slices, ... and None: a view.  With arrays, Tensors or lists of integers, masks or bools: a copy."""
        if not ndarray.is_advanced(index):
            return apply(shapes.GetItem, self, index=index)
        index = ndarray.plain_index(index)
        if mode.interpreter is None and not backend.is_recorded():
            if not (mode.grad and self.requires_grad):
                return wrap(self.array[index], None)
            if self.array.size <= _FEW:
                return apply(shapes.Select, self, at=ndarray.positions(index, self.shape))
        return ndarray.gathered(self, index)

    # -- for pyops/methods.py

    def _cumulated(self, axis: int) -> Tensor:
        return apply(shapes.CumSum, self, axis=axis)

    def _pieces(self, sizes: tuple[int, ...], axis: int) -> tuple[Tensor, ...]:
        return apply(shapes.Split, self, sizes=sizes, axis=axis)

    def _plain(self) -> NDArray:
        return self.array

    def _constant(self, array: NDArray) -> Tensor:
        return wrap(array, None)

    def _operand(self, other: Any) -> Any:
        return _operand(self, other)

    def _function(self, name: str) -> Any:
        return globals()[name]

    def _with_added(self, ids: np.ndarray, rows: Any) -> Tensor:
        if self.dtype.kind != 'f':
            return wrap(self.array._with_added(ids, getattr(rows, 'array', rows)), None)
        rows = rows if isinstance(rows, Tensor) else Tensor(rows, device=self.device, dtype=self.dtype)
        rows = rows.broadcast_to((*ids.shape, *self.shape[1:])).astype(self.dtype)
        return self + apply(shapes.Scatter, rows, ids, shape=self.shape)

    # -- in place

    def __setitem__(self, index: Index, value: Numbers) -> None:
        value, index = _operand(self, value), ndarray.plain_index(index)
        if value is NotImplemented:
            raise TypeError('expected numbers to assign, got an object of another type')
        if ndarray.is_advanced(index):
            self._change(lambda: apply(shapes.Put, self, value, at=ndarray.positions(index, self.shape)),
                         lambda array: array.__setitem__(index, getattr(value, 'array', value)), value)
            return
        self._change(lambda: apply(shapes.SetItem, self, value, index=index),
                     lambda array: array.__setitem__(index, getattr(value, 'array', value)), value)

    def _put_at(self, at: np.ndarray, value: Any) -> None:
        self._change(lambda: apply(shapes.Put, self, value, at=at),
                     lambda array: array._put_at(at, getattr(value, 'array', value)), value)

    def normal_(self, mean: float = 0.0, std: float = 1.0, generator: np.random.Generator | None = None) -> Self:
        """Set the elements to numbers drawn from the normal distribution."""
        return self.copy_(mean + std * random_generator(generator).standard_normal(self.shape))

    def uniform_(self, low: float = 0.0, high: float = 1.0, generator: np.random.Generator | None = None) -> Self:
        """Set the elements to numbers drawn uniformly from [low, high)."""
        return self.copy_(low + (high - low) * random_generator(generator).random(self.shape))

    def bernoulli_(self, p: Numbers = 0.5, generator: np.random.Generator | None = None) -> Self:
        """Set each element to 1 with probability p, else to 0."""
        return self.copy_((random_generator(generator).random(self.shape) < np.asarray(p)) * 1)

    def random_(self, low: int = 0, high: int | None = None, generator: np.random.Generator | None = None) -> Self:
        """Set the elements to whole numbers drawn uniformly from [low, high), or from 0 to low - 1; without arguments up to the
        largest that the dtype holds exactly."""
        low, high = (low, high) if high is not None else (0, low or (2**31 - 1 if self.dtype.kind == 'i' else 2**24))
        return self.copy_(random_generator(generator).integers(low, high, self.shape))

    def exponential_(self, lambd: float = 1.0, generator: np.random.Generator | None = None) -> Self:
        """Set the elements to numbers drawn from the exponential distribution with mean 1 / lambd."""
        return self.copy_(random_generator(generator).exponential(1 / lambd, self.shape))

    def geometric_(self, p: float, generator: np.random.Generator | None = None) -> Self:
        """Set each element to the number of trials up to the first success, of probability p each."""
        return self.copy_(random_generator(generator).geometric(p, self.shape))

    def log_normal_(self, mean: float = 1.0, std: float = 2.0, generator: np.random.Generator | None = None) -> Self:
        """Set the elements to e^y for y drawn from the normal distribution."""
        return self.copy_(np.exp(mean + std * random_generator(generator).standard_normal(self.shape)))

    def bernoulli(self, generator: np.random.Generator | None = None) -> Tensor:
        """Return 1 with the probability in each element, else 0; it has no gradient."""
        return self.detach().clone().bernoulli_(self.detach().numpy(), generator)

    # PyTorch's changes of the shape; views keep theirs

    def _reshaped(self, reshaped: Tensor) -> Self:
        if self.origin is None and self.requires_grad and mode.grad:
            raise RuntimeError(f'in-place change of a leaf of shape {self.shape} that requires a gradient; use no_grad()')
        self.array, self.origin, self.requires_grad = reshaped.array, reshaped.origin, reshaped.requires_grad or (
            self.requires_grad and self.origin is None)
        return self

    def unsqueeze_(self, dim: int) -> Self:
        """Insert an axis of size 1, in place."""
        return self._reshaped(self.unsqueeze(dim))

    def squeeze_(self, dim: Axis = None) -> Self:
        """Remove axes of size 1, in place."""
        return self._reshaped(self.squeeze(dim))

    def transpose_(self, dim0: int, dim1: int) -> Self:
        """Exchange two axes, in place."""
        return self._reshaped(self.swapaxes(dim0, dim1))

    def t_(self) -> Self:
        """Transpose a matrix, in place."""
        return self._reshaped(self.t())

    def _replace(self, compute: Callable[[Tensor], Tensor], operands: tuple[Any, ...] = ()) -> Self:
        """Replace the elements by the elements of compute(self)."""
        def recorded() -> Tensor:
            result = compute(self)
            check_stored(result, self)
            return result.astype(self.dtype)
        value = next((x for x in operands if isinstance(x, Tensor) and x.requires_grad), None)
        return self._change(recorded, lambda array: array._replace(lambda _: compute(self).array), value)

    def _change(self, recorded: Callable[[], Tensor], in_place: Callable[[NDArray], Any], value: Any) -> Self:
        """Change this tensor in its memory if nothing is recorded; else replace it by the result of an op, so that values
        saved by earlier ops do not change."""
        if mode.interpreter is None and (
                not mode.grad or not (self.requires_grad or isinstance(value, Tensor) and value.requires_grad)):
            in_place(self.array)
            return self
        if self.origin is None and self.requires_grad:
            raise RuntimeError(f'in-place change of a leaf of shape {self.shape} that requires a gradient; use no_grad()')
        result = recorded()
        if result.shape != self.shape:
            raise ValueError(f'in-place: a tensor of shape {self.shape} cannot become one of shape {result.shape}')
        self.array, self.origin, self.requires_grad = result.array, result.origin, result.requires_grad
        return self


_FEW = 512              # elements from which an index with arrays selects elements one by one, not rows


def _operand(tensor: Tensor, other: Any) -> Any:
    """Return an operand: a Tensor or a number unchanged, an array as a constant, else NotImplemented."""
    if other.__class__ in (Tensor, float, int) or isinstance(other, (Tensor, numbers.Real)):       # numbers.Real takes long
        return other
    if isinstance(other, NDArray):
        return Tensor(other, device=tensor.device)
    if isinstance(other, (np.ndarray, np.generic, list)):
        other = np.asarray(other)
        keeps = tensor.array.dtype == np.float64 and other.dtype.kind == 'f'          # do not round to float32 on the way
        return Tensor(other, device=tensor.device, dtype=tensor.dtype if keeps else None)
    return NotImplemented


# ---- functions of several tensors ------------------------------------------------------------------------------------

def _tensors(values: Any) -> list[Tensor]:
    """Convert to Tensors, on the device of the first that is one."""
    values = list(values)
    device = next((x.device for x in values if isinstance(x, Tensor)), None)
    return [x if isinstance(x, Tensor) else Tensor(x, device=device) for x in values]


@accepts_torch_names
def concatenate(tensors: Any, axis: int = 0) -> Tensor:
    """Join tensors along an existing axis."""
    return apply(shapes.Concatenate, *_tensors(tensors), axis=axis)


@accepts_torch_names
def stack(tensors: Any, axis: int = 0) -> Tensor:
    """Join tensors of one shape along a new axis."""
    return apply(shapes.Stack, *_tensors(tensors), axis=axis)


def where(condition: Numbers, a: Numbers, b: Numbers) -> Tensor:
    """Return the elements of a where condition is not 0, else the elements of b; all three broadcast.  The condition has no
    gradient."""
    like = next((x for x in (a, b, condition) if isinstance(x, Tensor)), None)
    like = Tensor(condition) if like is None else like
    condition = condition.detach() if isinstance(condition, Tensor) else Tensor(condition, device=like.device)
    return apply(shapes.Where, _operand(like, a), _operand(like, b), condition)


def pad_axes(x: Tensor, widths: Any, value: float = 0) -> Tensor:
    """Pad with `value`.  widths: ((before, after), ...) per axis, one pair for all axes, or one number."""
    pairs = np.broadcast_to(np.asarray(widths, np.int64), (x.ndim, 2)).tolist()
    if any(n < 0 for pair in pairs for n in pair):
        raise ValueError(f'pad: expected widths of at least 0, got {widths}')
    return apply(shapes.Pad, x, widths=tuple(map(tuple, pairs)), value=value)


def einsum(subscripts: str, *operands: Numbers) -> Tensor:
    """Return the sum of products of the operands over the letters that the result lacks, such as 'bij,bjk->bik'.  See
    pyops/contraction.py."""
    from pyops.contraction import einsum
    return einsum(subscripts, *_tensors(arrays_of(operands)))


# the others, such as floor, have no gradient
_UNARY = {op.__name__.lower(): op for op in (
    elementwise.Exp, elementwise.Log, elementwise.Sqrt, elementwise.Tanh, elementwise.Sigmoid, elementwise.Sin, elementwise.Cos,
    elementwise.Expm1, elementwise.Log1p, elementwise.Arctan, elementwise.Arcsin, elementwise.Arccos, elementwise.Erf,
    elementwise.Tan)}
_REDUCTIONS = {op.__name__.lower(): op for op in (reductions.Sum, reductions.Mean, reductions.Max, reductions.Min)}


def _operators() -> None:
    """Define a + b, 1 + b, a += b and the comparisons for all operators."""
    def binary(op: type) -> tuple[Callable[..., Any], Callable[..., Any]]:
        def method(self: Tensor, other: Any) -> Any:
            other = _operand(self, other)
            return other if other is NotImplemented else apply(op, self, other)

        def reflected(self: Tensor, other: Any) -> Any:
            other = _operand(self, other)
            return other if other is NotImplemented else apply(op, other, self)
        return method, reflected

    def in_place(op: type, operator: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Tensor, other: Any) -> Any:
            other = _operand(self, other)
            if other is NotImplemented:
                return other
            return self._change(lambda: apply(op, self, other),
                                lambda array: operator(array, getattr(other, 'array', other)), other)
        return method

    def comparison(operator: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Tensor, other: Any) -> Any:
            other = _operand(self, other)
            if other is NotImplemented:
                return other
            if mode.interpreter is not None:
                return mode.interpreter(operator, (self, other), {})
            return wrap(operator(self.array, getattr(other, 'array', other)), None)
        return method

    def constant(operator: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        forward = comparison(operator)

        def reflected(self: Tensor, other: Any) -> Any:
            other = _operand(self, other)
            return other if other is NotImplemented else forward(_tensors([other, self])[0], self)
        return forward, reflected

    for name, op in (('add', elementwise.Add), ('sub', elementwise.Subtract), ('mul', elementwise.Multiply),
                     ('truediv', elementwise.Divide), ('pow', elementwise.Power), ('mod', elementwise.Remainder),
                     ('matmul', matmul.MatMul)):
        method, reflected = binary(op)
        setattr(Tensor, f'__{name}__', method)
        setattr(Tensor, f'__r{name}__', reflected)
        if op is not matmul.MatMul:
            setattr(Tensor, f'__i{name}__', in_place(op, getattr(operators, f'i{name}')))
    for name in ('eq', 'ne', 'lt', 'le', 'gt', 'ge'):
        setattr(Tensor, f'__{name}__', comparison(getattr(operators, name)))
    for name in ('floordiv', 'and_', 'or_', 'xor'):         # these have no gradient
        method, reflected = constant(getattr(operators, name))
        setattr(Tensor, f'__{name.strip("_")}__', method)
        setattr(Tensor, f'__r{name.strip("_")}__', reflected)


_operators()


def _methods_of_constants() -> None:
    """Let methods of several ops run on the array of a Tensor without a gradient: there they are one call."""
    def method(name: str) -> Callable[..., Any]:
        of_array, of_tensor = getattr(NDArray, name), getattr(Tensor, name)

        @functools.wraps(of_tensor)
        def run(self: Tensor, *args: Any, **named: Any) -> Any:
            if mode.interpreter is not None or mode.grad and self.requires_grad or any(
                    isinstance(value, Tensor) for value in (*args, *named.values())):
                return of_tensor(self, *args, **named)
            return wrap(of_array(self.array, *args, **named), None)
        return run

    for name in ('diagonal', 'trace', 'repeat', 'repeat_interleave', 'roll', 'take', 'index_select', 'tile', 'tril', 'triu',
                 'var', 'std', 'ptp', 'prod', 'cumprod'):
        setattr(Tensor, name, method(name))


_methods_of_constants()
Recorded.of_results = Tensor
