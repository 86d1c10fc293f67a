"""Array ops that move elements.  They form pairs; each op of a pair computes the gradient of the other:

    Reshape and Reshape, Permute and Permute, Flip and Flip; BroadcastTo and Sum; GetItem and Place; Pad and GetItem;
    Concatenate and Split; Stack and Unbind; Take and Scatter; CumSum and CumSum; AsType and AsType; Windows and Fold
    (pyops/ops/convolution.py).
"""
import math

import numpy as np

from pyops import ndarray
from pyops.ops.array import ArrayOp, call, sum_to
from pyops.ops.examples import INDEX, of_three_axes, one


class Copy(ArrayOp):
    """Copy x to newly allocated memory."""

    def forward(x):
        return x.copy(), ()

    def backward(dy, ctx):
        return dy

    reference, example = np.array, one


class Reshape(ArrayOp):
    """Change the shape; the elements keep their order.  A view if the strides allow it, else a copy."""

    def forward(x, shape):
        return x.reshape(shape), (x.shape,)

    def backward(dy, ctx):
        return dy.reshape(ctx[0])

    def reference(x, shape):
        return x.reshape(shape)

    example = of_three_axes(shape=(4, -1))


class Permute(ArrayOp):
    """Permute the axes: axis i of y is axis axes[i] of x.  A view."""

    def forward(x, axes):
        return x.permute(axes), (tuple(a % x.ndim for a in axes),)

    def backward(dy, ctx):
        axes, = ctx
        return dy.permute(tuple(sorted(range(len(axes)), key=axes.__getitem__)))

    def reference(x, axes):
        return x.transpose(axes)

    example = of_three_axes(axes=(2, 0, 1))


class BroadcastTo(ArrayOp):
    """Repeat along new axes and along axes of size 1: a view with stride 0."""

    def forward(x, shape):
        return x.broadcast_to(shape), (x.shape,)

    def backward(dy, ctx):
        return sum_to(dy, ctx[0])

    reference = np.broadcast_to

    def example(normal):
        return [normal(3, 1)], dict(shape=(2, 3, 4))


class Flip(ArrayOp):
    """Reverse the elements along the axes: a view with negative strides."""

    def forward(x, axes):
        return x.flip(axes), (axes,)

    def backward(dy, ctx):
        return call(Flip, dy, axes=ctx[0])

    def reference(x, axes):
        return np.flip(x, axes)

    example = of_three_axes(axes=(0, 2))


class GetItem(ArrayOp):
    """y = x[index], for an index of ints, slices, ... and None: a view."""

    def forward(x, index):
        return x[index], (x.shape, index)

    def backward(dy, ctx):
        shape, index = ctx
        return call(Place, dy, shape=shape, index=index)

    def add_to(dx, dy, ctx):
        """Add the gradient to dx in place: a loop over the steps of a sequence adds each step's gradient to its slice."""
        part = dx[ctx[1]]
        part += dy

    def reference(x, index):
        return x[index]

    example = of_three_axes(index=INDEX)


class Place(ArrayOp):
    """y[index] = x, in zeros of the given shape."""

    def forward(x, shape, index):
        y = ndarray.zeros(shape, x.dtype, x.device)
        y[index] = x
        return y, (index,)

    def backward(dy, ctx):
        return dy[ctx[0]]

    def reference(x, shape, index):
        y = np.zeros(shape, x.dtype)
        y[index] = x
        return y

    def example(normal):
        return [normal(1, 1, 4)], dict(shape=(2, 3, 4), index=INDEX)


class SetItem(ArrayOp):
    """Copy x and assign `value`, an array or a number, to y[index]."""

    def forward(x, value, index):
        y = x.copy()
        y[index] = value
        return y, (getattr(value, 'shape', ()), index)

    def backward(dy, ctx, wanted=(True, True)):
        shape, index = ctx
        return wanted[0] and call(SetItem, dy, 0.0, index=index), wanted[1] and sum_to(dy[index], shape)

    def reference(x, value, index):
        y = np.array(x)
        y[index] = value
        return y

    def example(normal):
        return [normal(2, 3, 4), normal(1, 4)], dict(index=INDEX)


class Put(ArrayOp):
    """Copy x and assign `value`, an array or a number, to the positions `at` of the flattened copy: to the last of equal
    ones."""

    def forward(x, value, at):
        y = x.copy()
        y._put_at(at, value)
        return y, (getattr(value, 'shape', ()), at)

    def backward(dy, ctx, wanted=(True, True)):
        shape, at = ctx
        dvalue = None
        if wanted[1]:
            dvalue = call(Take, dy.reshape(-1), at)
            last = ndarray.last_of_equals(at.reshape(-1))
            if last is not None:                # the others were overwritten
                counts = np.zeros(at.size, np.float32)
                counts[last] = 1
                dvalue = dvalue * counts.reshape(at.shape)
            small = shape[len(shape) - min(len(shape), at.ndim):]
            dvalue = sum_to(dvalue, small).reshape(shape)
        return wanted[0] and call(Put, dy, 0.0, at=at), dvalue

    def reference(x, value, at):
        y = np.array(x)
        y.reshape(-1)[at] = value
        return y

    def example(normal):
        return [normal(2, 3), normal(2, 3)], dict(at=np.array([[0, 5, 1], [3, 0, 2]]))


class Select(ArrayOp):
    """y = x.reshape(-1)[at] for positions `at` of the flattened array;  dx[at[i]] += dy[i]."""

    def forward(x, at):
        return x.reshape(-1)[at], (x.shape, at)

    def backward(dy, ctx):
        shape, at = ctx
        return call(Scatter, dy.reshape(-1), at.reshape(-1), shape=(math.prod(shape),)).reshape(shape)

    def reference(x, at):
        return np.array(x).reshape(-1)[at]

    def example(normal):
        return [normal(2, 3)], dict(at=np.array([[0, 5, 1], [3, 0, 2]]))


class Where(ArrayOp):
    """y = a where condition is not 0, else b.  The gradient goes to the chosen operand."""

    def forward(a, b, condition):
        return ndarray.where(condition, a, b), (getattr(a, 'shape', ()), getattr(b, 'shape', ()), condition)

    def backward(dy, ctx, wanted=(True, True, False)):
        a, b, condition = ctx
        return (wanted[0] and sum_to(call(Where, dy, 0.0, condition), a),
                wanted[1] and sum_to(call(Where, dy, 0.0, condition == 0), b), None)

    def reference(a, b, condition):
        return np.where(condition, a, b)

    def example(normal):
        return [normal(2, 3), normal(3), np.array([[1, 0, 1], [0, 0, 1]], np.int32)], {}


class AsType(ArrayOp):
    """Convert between float32 and float64."""

    def forward(x, dtype):
        return x.astype(dtype), (x.dtype,)

    def backward(dy, ctx):
        return dy.astype(ctx[0])

    def reference(x, dtype):
        return x

    example = of_three_axes(dtype='float32')


class CumSum(ArrayOp):
    """y[i] = x[0] + ... + x[i] along an axis;  dx[i] = dy[i] + dy[i+1] + ... """

    def forward(x, axis):
        return x.cumsum(axis), (axis,)

    def backward(dy, ctx):
        axis, = ctx
        return dy.flip(axis).cumsum(axis).flip(axis)

    def reference(x, axis):
        return x.cumsum(axis)

    example = of_three_axes(axis=1)


class Pad(ArrayOp):
    """Pad with `value`: widths[i] = (before, after) is the number of elements added at each end of axis i."""

    def forward(x, widths, value=0.0):
        inside = tuple(slice(before, before + n) for (before, _), n in zip(widths, x.shape, strict=True))
        return ndarray.pad_axes(x, widths, value), (inside,)

    def backward(dy, ctx):
        return dy[ctx[0]]

    def reference(x, widths, value=0):
        return np.pad(x, widths, constant_values=value)

    def example(normal):
        return [normal(2, 3)], dict(widths=((1, 0), (2, 3)), value=0.5)


class Concatenate(ArrayOp):
    """Concatenate arrays along an axis."""

    def forward(*arrays, axis=0):
        return ndarray.concatenate(arrays, axis), (tuple(a.shape[axis] for a in arrays), axis)

    def backward(dy, ctx):
        sizes, axis = ctx
        return call(Split, dy, sizes=sizes, axis=axis)

    def reference(*arrays, axis=0):
        return np.concatenate(arrays, axis)

    def example(normal):
        return [normal(2, 3), normal(2, 1)], dict(axis=-1)


class Split(ArrayOp):
    """Split x into pieces of the given sizes along an axis: views."""

    def forward(x, sizes, axis=0):
        before, pieces = (slice(None),) * (axis % x.ndim), []
        start = 0
        for size in sizes:
            pieces.append(x[(*before, slice(start, start + size))])
            start += size
        return tuple(pieces), (axis,)

    def backward(dys, ctx):
        return call(Concatenate, *dys, axis=ctx[0])

    def reference(x, sizes, axis=0):
        return tuple(np.split(x, np.cumsum(sizes)[:-1], axis))

    example = of_three_axes(sizes=(1, 2), axis=1)


class Stack(ArrayOp):
    """Stack arrays of equal shape along a new axis."""

    def forward(*arrays, axis=0):
        return ndarray.stack(arrays, axis), (axis,)

    def backward(dy, ctx):
        return call(Unbind, dy, axis=ctx[0])

    def reference(*arrays, axis=0):
        return np.stack(arrays, axis)

    def example(normal):
        return [normal(2, 3), normal(2, 3)], dict(axis=1)


class Unbind(ArrayOp):
    """Split x along an axis into slices without that axis: views."""

    def forward(x, axis=0):
        before = (slice(None),) * (axis % x.ndim)
        return tuple(x[(*before, i)] for i in range(x.shape[axis])), (axis,)

    def backward(dys, ctx):
        return call(Stack, *dys, axis=ctx[0])

    def reference(x, axis=0):
        return tuple(np.moveaxis(x, axis, 0))

    example = of_three_axes(axis=1)


class Take(ArrayOp):
    """Gather rows along the first axis: y[i] = x[ids[i]], with ids (...) int32."""

    def forward(x, ids):
        return x.take_rows(ids), (x.shape, ids + (ids < 0) * x.shape[0])         # negative ids count from the end

    def backward(dy, ctx):
        shape, ids = ctx
        return call(Scatter, dy, ids, shape=shape)

    def add_to(dx, dy, ctx):
        """Add the gradient to dx in place."""
        dx.add_at(ctx[1], dy)

    def reference(x, ids):
        return x[ids]

    def example(normal):
        return [normal(5, 3), np.array([[1, 0], [3, 1]], np.int32)], {}


class Scatter(ArrayOp):
    """Add rows along the first axis: y[ids[i]] += x[i], in the order of i, in zeros of the given shape."""

    def forward(x, ids, shape):
        y = ndarray.zeros(shape, x.dtype, x.device)
        y.add_at(ids, x)
        return y, (ids,)

    def backward(dy, ctx):
        return call(Take, dy, ctx[0])

    def reference(x, ids, shape):
        y = np.zeros(shape, x.dtype)
        np.add.at(y, ids, x)
        return y

    def example(normal):
        return [normal(4, 3), np.array([1, 0, 3, 1], np.int32)], dict(shape=(5, 3))
