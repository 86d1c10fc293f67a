"""Array ops that reduce along axes.  axis: None for all axes, an int, or a tuple of ints; -1 is the last axis."""
import math

import numpy as np

from pyops.methods import bounded, softmax_axes
from pyops.ops.array import ArrayOp, normal_axes
from pyops.ops.examples import distinct, of_three_axes


def kept(shape, axis):
    """Return the shape with size 1 for the reduced axes."""
    axes = normal_axes(axis, len(shape))
    return tuple(1 if i in axes else n for i, n in enumerate(shape))


class Sum(ArrayOp):
    """y = sum x;  dx = dy, broadcast."""

    def forward(x, axis=None, keepdims=False):
        return x.sum(axis, keepdims), (x.shape, axis)

    def backward(dy, ctx):
        shape, axis = ctx
        return dy.reshape(kept(shape, axis)).broadcast_to(shape)

    reference, example = np.sum, of_three_axes(axis=(0, -1), keepdims=True)


class Mean(ArrayOp):
    """y = sum x / n;  dx = dy / n, broadcast."""

    def forward(x, axis=None, keepdims=False):
        return x.mean(axis, keepdims), (x.shape, axis)

    def backward(dy, ctx):
        shape, axis = ctx
        small = kept(shape, axis)
        n = math.prod(shape) // max(math.prod(small), 1)
        return (dy * (1 / max(n, 1))).reshape(small).broadcast_to(shape)

    reference, example = np.mean, of_three_axes(axis=(0, -1))


class Max(ArrayOp):
    """y = max x;  dx = dy where x = y, divided equally among tied elements."""

    def forward(x, axis=None, keepdims=False):
        y = x.max(axis, keepdims)
        return y, (x, y, axis)

    def backward(dy, ctx):
        x, y, axis = ctx
        small = kept(x.shape, axis)
        largest = x == y.reshape(small)
        return largest * (dy.reshape(small) / largest.sum(axis, keepdims=True))

    reference = np.max

    def example(normal):
        return [distinct(normal)], dict(axis=(0, -1))


class Min(ArrayOp):
    """y = min x;  dx = dy where x = y, divided equally among tied elements."""

    def forward(x, axis=None, keepdims=False):
        y = x.min(axis, keepdims)
        return y, (x, y, axis)

    backward = Max.backward

    reference = np.min

    def example(normal):
        return [distinct(normal)], dict(axis=(0, -1))


class Norm(ArrayOp):
    """y = (sum |x|^p)^(1 / p);  dx = dy sign(x) (|x| / y)^(p - 1), 0 where x is 0."""

    def forward(x, p=2.0, axis=None, keepdims=False):
        y = x.norm(p, axis, keepdims)
        return y, (x, y, p, axis)

    def backward(dy, ctx):
        x, y, p, axis = ctx
        small = kept(x.shape, axis)
        dy, y = dy.reshape(small), y.reshape(small)
        y = y + (y == 0)
        if p == 2:
            return x * (dy / y)
        return dy * x.sign() * ((abs(x) + (x == 0)) / y) ** (p - 1)

    example = of_three_axes(p=3.0, axis=(0, -1))

    def reference(x, p, axis=None, keepdims=False):
        return (np.abs(x) ** p).sum(axis, keepdims=keepdims) ** (1 / p)


class LogSumExp(ArrayOp):
    """y = log sum exp(x);  dx = dy exp(x - max) / sum exp(x - max).

    Subtracting the largest x prevents overflow of exp.  The gradient is not computed as exp(x - y): if the maximum is large,
    y has lost digits of log sum exp(x - max).
    """

    def forward(x, axis=None, keepdims=False):
        top = bounded(x.max(axis, keepdims=True))
        total = (x - top).exp().sum(axis, keepdims=True)
        y = total.log() + top
        if not keepdims:
            axes = normal_axes(axis, x.ndim)
            y = y.reshape(tuple(n for i, n in enumerate(x.shape) if i not in axes))
        return y, (x, top, total, axis)

    def backward(dy, ctx):
        x, top, total, axis = ctx
        e = (x - top).exp()
        if getattr(x, 'tape', None):            # a saved array is a constant in second derivatives: recompute the sum
            total = e.sum(axis, keepdims=True)
        return e * (dy.reshape(top.shape) / total)

    def reference(x, axis=None, keepdims=False):
        top = x.max(axis, keepdims=True)
        y = np.log(np.exp(x - top).sum(axis, keepdims=True)) + top
        return y if keepdims else y.reshape(x.sum(axis).shape)

    example = of_three_axes(axis=(0, -1))


class LogSoftmax(ArrayOp):
    """y = x - log sum exp(x);  dx = dy - exp(y) sum dy."""

    def forward(x, axis=-1):
        axis = softmax_axes(axis, x.ndim)
        y = x.log_softmax(axis)
        return y, (y, axis)

    def backward(dy, ctx):
        y, axis = ctx
        if getattr(dy, 'tape', None):           # second derivatives need ops that have a derivative
            return dy - y.exp() * dy.sum(axis, keepdims=True)
        return y.softmax_gradient(dy, axis, log=True)

    def reference(x, axis=-1):
        return x - LogSumExp.reference(x, axis, True)

    example = of_three_axes(axis=(0, -1))


class Softmax(ArrayOp):
    """y = exp(x) / sum exp(x);  dx = y (dy - sum dy y)."""

    def forward(x, axis=-1):
        axis = softmax_axes(axis, x.ndim)
        y = x.softmax(axis)
        return y, (y, axis)

    def backward(dy, ctx):
        y, axis = ctx
        if getattr(dy, 'tape', None):
            return y * (dy - (dy * y).sum(axis, keepdims=True))
        return y.softmax_gradient(dy, axis)

    def reference(x, axis=-1):
        e = np.exp(x - x.max(axis, keepdims=True))
        return e / e.sum(axis, keepdims=True)

    example = of_three_axes(axis=(0, -1))
