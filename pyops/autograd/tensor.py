"""The Tensor class: an array with a record of the op that produced it."""
from __future__ import annotations

import math
import numbers
import operator as operators
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from pyops import ndarray
from pyops.autograd.gradients import backward
from pyops.autograd.mode import mode
from pyops.autograd.tape import Recorded, apply, as_array, wrap
from pyops.ndarray import NDArray
from pyops.ops import ReLU, elementwise, matmul, reductions, shapes
from pyops.ops.array import normal_axes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import DTypeLike

    from pyops.backend.device import Device
    from pyops.typing import Axis, Index, Numbers


def _remade(array: NDArray, requires_grad: bool, grad: Tensor | None) -> Tensor:
    tensor = Tensor(array, requires_grad)
    tensor.grad = grad
    return tensor


class Tensor(Recorded):
    """An NDArray that takes part in automatic differentiation.

    data            an NDArray, whose memory is shared, or numbers in numpy arrays or lists, which are copied
    requires_grad   True makes it a leaf: backward() adds the gradient to its .grad, a Tensor or None

    .array          the NDArray
    .origin         (node, index of its output) of the op that produced it; None for a leaf
    Names are PyTorch's; axes are called `axis` and `keepdims` as in numpy, which PyTorch accepts too.
    """
    __slots__ = ()
    __array_ufunc__ = None          # makes numpy array + Tensor call Tensor.__radd__
    tape = staticmethod(apply)      # for formulas that run with or without a tape (pyops/ops/array.py)

    def __init__(self, data: Numbers, requires_grad: bool = False, device: Device | None = None) -> None:
        self.array, self.origin, self.requires_grad, self._grad = as_array(data, device), None, False, None
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
            raise ValueError(f'the truth value of a tensor of shape {self.shape} is ambiguous: it has {self.size} elements; '
                             'use .max() for any of them, .min() for all')
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

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

    def item(self) -> Any:
        """Return the only element as a Python number.  Raises ValueError for several elements."""
        if self.size != 1:
            raise ValueError(f'item: expected a tensor of one element, got shape {self.shape}')
        return self.array.numpy().item()

    def tolist(self) -> Any:
        return self.array.numpy().tolist()

    # -- gradients

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        if requires_grad and self.dtype != np.float32:
            raise TypeError(f'requires_grad: expected a tensor of float32, got {self.dtype}: only real numbers have a gradient')
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
        if array.shape != self.shape or array.dtype != self.dtype:
            raise ValueError(f'data: expected shape {self.shape} and {self.dtype}, got {array.shape} and {array.dtype}')
        self.array = array

    def clone(self) -> Tensor:
        """Return a copy through which gradients flow."""
        return apply(shapes.Copy, self)

    def zero_grad(self) -> None:
        self.grad = None

    def backward(self, grad: Numbers | None = None, create_graph: bool = False, retain_graph: bool | None = None) -> None:
        """Add the gradient of this tensor with respect to each leaf it depends on to the leaf's .grad.

        grad            the gradient of this tensor; None: 1, for a scalar
        create_graph    record the gradients so that they can be differentiated again.  Prefer grad() for this: a .grad with
                        a history and its leaf keep each other alive
        retain_graph    keep the values saved by the ops for another backward; None: same as create_graph
        """
        backward([self], [grad], create_graph, retain_graph)

    # -- arithmetic

    if TYPE_CHECKING:               # _operators() below defines them
        def _of_two(self, other: Numbers, /) -> Tensor: ...
        __add__ = __radd__ = __iadd__ = __sub__ = __rsub__ = __isub__ = __mul__ = __rmul__ = __imul__ = _of_two
        __truediv__ = __rtruediv__ = __itruediv__ = __pow__ = __rpow__ = __ipow__ = __matmul__ = __rmatmul__ = _of_two
        __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _of_two       # type: ignore[assignment]

    def __neg__(self) -> Tensor:
        return apply(elementwise.Negate, self)

    def __abs__(self) -> Tensor:
        return apply(elementwise.Abs, self)

    abs = __abs__

    def exp(self) -> Tensor:
        return apply(elementwise.Exp, self)

    def log(self) -> Tensor:
        return apply(elementwise.Log, self)

    def sqrt(self) -> Tensor:
        return apply(elementwise.Sqrt, self)

    def tanh(self) -> Tensor:
        return apply(elementwise.Tanh, self)

    def sigmoid(self) -> Tensor:
        return apply(elementwise.Sigmoid, self)

    def relu(self) -> Tensor:
        return apply(ReLU, self)

    def maximum(self, other: Numbers) -> Tensor:
        return apply(elementwise.Maximum, self, _operand(self, other))

    def minimum(self, other: Numbers) -> Tensor:
        return apply(elementwise.Minimum, self, _operand(self, other))

    def matmul(self, other: Numbers) -> Tensor:
        return self @ other

    # -- reductions

    def sum(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        return apply(reductions.Sum, self, axis=axis, keepdims=keepdims)

    def mean(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        return apply(reductions.Mean, self, axis=axis, keepdims=keepdims)

    def max(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        return apply(reductions.Max, self, axis=axis, keepdims=keepdims)

    def min(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        return apply(reductions.Min, self, axis=axis, keepdims=keepdims)

    def argmax(self, axis: int | None = None, keepdims: bool = False) -> Tensor:
        """Return the index of the largest element, int32, without a gradient."""
        return wrap(self.array.argmax(axis, keepdims=keepdims), None)

    def logsumexp(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        return apply(reductions.LogSumExp, self, axis=axis, keepdims=keepdims)

    def softmax(self, axis: int = -1) -> Tensor:
        return apply(reductions.Softmax, self, axis=axis)

    def log_softmax(self, axis: int = -1) -> Tensor:
        return apply(reductions.LogSoftmax, self, axis=axis)

    # -- shapes

    def reshape(self, *shape: Any) -> Tensor:
        return apply(shapes.Reshape, self, shape=_several(shape))

    view = reshape

    def flatten(self, start: int = 0) -> Tensor:
        """Merge all axes from `start` on into one."""
        return self.reshape(*self.shape[:start], math.prod(self.shape[start:]))

    def squeeze(self, axis: int) -> Tensor:
        """Remove an axis of size 1."""
        axis, = normal_axes(axis, self.ndim)
        if self.shape[axis] != 1:
            raise ValueError(f'squeeze: axis {axis} of shape {self.shape} is not of size 1')
        return self.reshape(*self.shape[:axis], *self.shape[axis + 1:])

    def unsqueeze(self, axis: int) -> Tensor:
        """Insert an axis of size 1 at position `axis`."""
        axis, = normal_axes(axis, self.ndim + 1)
        return self.reshape(*self.shape[:axis], 1, *self.shape[axis:])

    def permute(self, *axes: Any) -> Tensor:
        return apply(shapes.Permute, self, axes=_several(axes))

    def transpose(self, a: int, b: int) -> Tensor:
        """Exchange two axes."""
        (a,), (b,), axes = normal_axes(a, self.ndim), normal_axes(b, self.ndim), list(range(self.ndim))
        axes[a], axes[b] = b, a
        return self.permute(*axes)

    @property
    def T(self) -> Tensor:
        return self.permute(*reversed(range(self.ndim)))

    def broadcast_to(self, *shape: Any) -> Tensor:
        return apply(shapes.BroadcastTo, self, shape=_several(shape))

    expand = broadcast_to

    def flip(self, *axes: Any) -> Tensor:
        """Reverse the order along these axes, given as numbers or one tuple; along all if none or None is given."""
        axis = None if axes in ((), (None,)) else _several(axes)
        return apply(shapes.Flip, self, axes=normal_axes(axis, self.ndim))

    def __getitem__(self, index: Index) -> Tensor:
        """Integers, slices, ... and None: a view.  A Tensor, array or list of integers: rows along the first axis.  A mask, or
        bools in the shape of the first axes: the elements where it is true."""
        if isinstance(index, (Tensor, NDArray, np.ndarray, list)):
            index = index.array if isinstance(index, Tensor) else index
            mask = ndarray.mask_in(index)
            if mask is None:
                return apply(shapes.Take, self, as_array(index, self.device))
            ids = ndarray.selected(mask, self.shape)
            rows = self if mask.ndim == 1 else self.reshape(mask.size, *self.shape[mask.ndim:])
            return apply(shapes.Take, rows, as_array(ids, self.device))
        return apply(shapes.GetItem, self, index=index)

    # -- in place

    def __setitem__(self, index: Index, value: Numbers) -> None:
        value = _operand(self, value)
        self._change(lambda: apply(shapes.SetItem, self, value, index=index),
                     lambda array: array.__setitem__(index, getattr(value, 'array', value)), value)

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


def _several(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Accept both f(1, 2) and f((1, 2))."""
    return tuple(values[0]) if len(values) == 1 and not isinstance(values[0], numbers.Integral) else values


def _operand(tensor: Tensor, other: Any) -> Any:
    """Return an operand: a Tensor or a number unchanged, an array as a constant, else NotImplemented."""
    if isinstance(other, (Tensor, numbers.Real)):
        return other
    if isinstance(other, (NDArray, np.ndarray, np.generic, list)):
        return Tensor(other, device=tensor.device)
    return NotImplemented


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

    for name, op in (('add', elementwise.Add), ('sub', elementwise.Subtract), ('mul', elementwise.Multiply),
                     ('truediv', elementwise.Divide), ('pow', elementwise.Power), ('matmul', matmul.MatMul)):
        method, reflected = binary(op)
        setattr(Tensor, f'__{name}__', method)
        setattr(Tensor, f'__r{name}__', reflected)
        if op is not matmul.MatMul:
            setattr(Tensor, f'__i{name}__', in_place(op, getattr(operators, f'i{name}')))
    for name in ('eq', 'ne', 'lt', 'le', 'gt', 'ge'):
        setattr(Tensor, f'__{name}__', comparison(getattr(operators, name)))


_operators()
Recorded.of_results = Tensor
