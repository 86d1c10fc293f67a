"""The base class and helpers of array ops.

An array op uses only the operators that NDArray and Tensor have in common.  So the same backward formulas run on NDArrays for
first derivatives and on Tensors for higher derivatives.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyops import methods

if TYPE_CHECKING:
    from pyops.typing import Axis, Shape


class ArrayOp:
    """An op on NDArrays.  It has no state, so it is not instantiated: forward and backward are functions in a class.

    y, ctx = Op.forward(*arrays, **constants)       y: an array, or a tuple of arrays
    gradients = Op.backward(dy, ctx)                a gradient for each array, in order; one array: not a tuple
    gradients = Op.backward(dy, ctx, wanted)        for ops on several arrays: wanted[i] is False if gradient i is not needed

    ctx is a tuple of the shapes, constants and arrays that backward needs.  Second derivatives differentiate through an array
    in ctx if it is an input or y; any other array in ctx is a constant.  A gradient is a new array, or dy or a view of dy.
    For gradients that are mostly zeros, add_to(dx, dy, ctx) may add in place.
    """


def call(op: Any, x: Any, *more: Any, **constants: Any) -> Any:
    """Apply an op inside a formula: record it on the tape if x is a Tensor, else run only its forward."""
    tape = getattr(x, 'tape', None)
    return tape(op, x, *more, **constants) if tape else op.forward(x, *more, **constants)[0]


def sum_to(d: Any, shape: Shape) -> Any:
    """Undo broadcasting: sum d over the axes along which `shape` was stretched."""
    if d.shape == shape:
        return d
    extra = d.ndim - len(shape)
    stretched = tuple(i for i, n in enumerate(d.shape) if i < extra or n != shape[i - extra])
    return d.sum(stretched, keepdims=True).reshape(shape)


def normal_axes(axis: Axis, ndim: int) -> Shape:
    """Return axis (None for all, an int, or several; negative ints count from the end) as a sorted tuple of axes in [0, ndim).
    Raise ValueError for an axis out of bounds or given twice."""
    return tuple(sorted(methods.normal_axes(methods.as_axes(axis), ndim)))
