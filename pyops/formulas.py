"""For each op what it computes, in float64 numpy, and an example to check it by: the table behind pyops.gradcheck.

A formula is called as `apply` calls the op: inputs by position, parameters and settings by name.
"""
from typing import NamedTuple

import numpy as np

from pyops import ops
from pyops import references as ref
from pyops.ops import convolution, elementwise, matmul, reductions, shapes


class Case(NamedTuple):
    """formula(*inputs, **named) -> float64 array or arrays;  example(normal) -> inputs, named, in float32.

    normal(*shape) draws numbers.  A float array of the example is a Tensor whose gradient is checked; others are constants.
    """
    formula: object
    example: object


def kept(x, step, p, key):
    return x * ref.dropout_keep(x.size, p, int(step[0]), key).reshape(x.shape) / (1 - np.float64(np.float32(p)))


def gru(x, h0=None, lengths=None, *, w_ih, w_hh, b_ih, b_hh, reset_before=False):
    return ref.gru(x, h0, w_ih, w_hh, b_ih, b_hh, reset_before, lengths)


def gru_example(normal):
    T, B, I, H = 3, 2, 4, 5
    return ([normal(T, B, I), normal(B, H), np.array([3, 2], np.int32)],
            dict(w_ih=normal(3 * H, I), w_hh=normal(3 * H, H), b_ih=normal(3 * H), b_hh=normal(3 * H)))


def embedding_gru(ids, context=None, h0=None, lengths=None, *, table, **named):
    x = ref.embedding(table, ids)
    return gru(x if context is None else ref.concat_context(x, context), h0, lengths, **named)


def embedding_gru_example(normal):
    B, V, E, C, H = 2, 4, 3, 2, 5
    ids = np.array([[1, 0], [3, 1], [1, 1]], np.int32)
    return ([ids, normal(B, C), normal(B, H), np.array([2, 3], np.int32)],
            dict(table=normal(V, E), w_ih=normal(3 * H, E + C), w_hh=normal(3 * H, H), b_ih=normal(3 * H), b_hh=normal(3 * H)))


def attention(q, k, v, lengths=None, step=None, *, heads, causal=False, p=0.0, key=0):
    lengths = np.full(q.shape[1], len(k)) if lengths is None else lengths
    keep = 1.0 if step is None or not p else ref.attention_keep(q.shape[1], heads, len(q), len(k), p, int(step[0]), key)
    return ref.attention(q, k, v, heads, lengths, causal, keep)


KERNEL_OPS = {
    ops.Linear: Case(
        lambda x, weight, bias=0: ref.linear(x, weight, bias),
        lambda n: ([n(2, 3, 4)], dict(weight=n(5, 4), bias=n(5)))),
    ops.FeedForward: Case(
        lambda x, w1, b1, w2, b2: ref.feed_forward(x, w1, b1, w2, b2),
        lambda n: ([n(3, 4)], dict(w1=n(6, 4), b1=n(6), w2=n(4, 6), b2=n(4)))),
    ops.PixelLinear: Case(
        lambda table, rows, weight, bias: table[rows] / 255 @ weight + bias,
        lambda n: ([np.arange(24, dtype=np.uint8).reshape(4, 6) * 10, np.array([2, 0, 2])], dict(weight=n(6, 3), bias=n(3)))),
    ops.MLPGradients: Case(
        lambda images, rows, labels, w1, b1, w2, b2: ref.mlp(images, rows, labels, w1, b1, w2, b2),
        lambda n: ([np.arange(24, dtype=np.uint8).reshape(4, 6) * 10, np.array([2, 0, 2]), np.array([1, 0, 2, 0], np.int32)],
                   dict(w1=n(6, 5), b1=n(5), w2=n(3, 5), b2=n(3)))),
    ops.Embedding: Case(
        lambda ids, weight: ref.embedding(weight, ids),
        lambda n: ([np.array([[1, 0], [3, 1]], np.int32)], dict(weight=n(5, 3)))),
    ops.Positions: Case(
        lambda x, first=0, scale=1.0, size=None, longest=None:
            scale * x + ref.positions(first + len(x), x.shape[2])[first:, None],
        lambda n: ([n(3, 2, 6), 2], dict(size=6, longest=8, scale=3.0))),
    ops.ReLU: Case(lambda x: np.maximum(x, 0), lambda n: ([n(4, 5)], {})),
    ops.Dropout: Case(
        lambda x, step, p, key: kept(x, step, p, key),
        lambda n: ([n(4, 5), np.array([3])], dict(p=0.3, key=7))),
    ops.Residual: Case(
        lambda x, branch, step=None, p=0.0, key=0: x + (branch if step is None or not p else kept(branch, step, p, key)),
        lambda n: ([n(4, 5), n(4, 5), np.array([3])], dict(p=0.3, key=7))),
    ops.LayerNorm: Case(
        lambda x, weight, bias, eps=1e-5: ref.layer_norm(x, weight, bias, eps),
        lambda n: ([n(4, 6)], dict(weight=n(6), bias=n(6)))),
    ops.BatchNorm: Case(
        lambda x, mean=None, var=None, *, weight, bias, training=True, eps=1e-5, momentum=0.1:
            ref.batch_norm(x, weight, bias, *((None, None) if training else (mean, var)), eps),
        lambda n: ([n(7, 3)], dict(weight=n(3), bias=n(3)))),
    ops.ConcatContext: Case(ref.concat_context, lambda n: ([n(3, 2, 4), n(2, 5)], {})),
    ops.GRU: Case(gru, gru_example),
    ops.EmbeddingGRU: Case(embedding_gru, embedding_gru_example),
    ops.Attention: Case(
        attention,
        lambda n: ([n(3, 2, 4), n(5, 2, 4), n(5, 2, 4), np.array([5, 3], np.int32)], dict(heads=2, causal=True))),
    ops.CrossEntropy: Case(
        lambda x, labels, ignore=-1: ref.cross_entropy(x, labels, ignore),
        lambda n: ([n(4, 5), np.array([4, -1, 0, 2], np.int32)], {})),
    ops.LinearCrossEntropy: Case(
        lambda x, labels, gradients=True, *, weight, bias, ignore=-1, smoothing=0.0:
            ref.linear_cross_entropy(x, weight, bias, labels, ignore, smoothing),
        lambda n: ([n(4, 3), np.array([4, -1, 0, 2], np.int32)], dict(weight=n(5, 3), bias=n(5), smoothing=0.1))),
}


# ---- array ops ---------------------------------------------------------------------------------------------------------

def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def logsumexp(x, axis=None, keepdims=False):
    top = x.max(axis, keepdims=True)
    y = np.log(np.exp(x - top).sum(axis, keepdims=True)) + top
    return y if keepdims else y.reshape(x.sum(axis).shape)


def place(x, shape, index):
    y = np.zeros(shape, x.dtype)
    y[index] = x
    return y


def set_item(x, value, index):
    y = np.array(x)
    y[index] = value
    return y


def scatter(x, ids, shape):
    y = np.zeros(shape, x.dtype)
    np.add.at(y, ids, x)
    return y


def split(x, sizes, axis=0):
    return tuple(np.split(x, np.cumsum(sizes)[:-1], axis))


def windows(x, window, stride, dilation):
    Ho, Wo = (convolution.positions(*of) for of in zip(x.shape[2:], window, stride, dilation, strict=True))
    y = np.empty((*x.shape[:2], Ho, Wo, *window), x.dtype)
    for i, j, a, b in np.ndindex(*y.shape[2:]):
        y[:, :, i, j, a, b] = x[:, :, i * stride[0] + a * dilation[0], j * stride[1] + b * dilation[1]]
    return y


def fold(x, shape, stride, dilation):
    y = np.zeros(shape, x.dtype)
    for i, j, a, b in np.ndindex(*x.shape[2:]):
        y[:, :, i * stride[0] + a * dilation[0], j * stride[1] + b * dilation[1]] += x[:, :, i, j, a, b]
    return y


def positive(x):
    return np.abs(x) + np.float32(0.1)


def two(n):
    """Operands that are broadcast to each other."""
    return [n(3, 1, 4), n(2, 1)], {}


def one(n):
    return [n(3, 4)], {}


def along(**named):
    return lambda n: ([n(2, 3, 4)], named)


def distinct(n):
    """No two elements are near each other, so a small step changes no maximum."""
    return np.argsort(n(24)).reshape(2, 3, 4).astype(np.float32)


INDEX = (slice(None, None, -2), None, 1, ...)

ARRAY_OPS = {
    elementwise.Add: Case(np.add, two),
    elementwise.Subtract: Case(np.subtract, two),
    elementwise.Multiply: Case(np.multiply, two),
    elementwise.Divide: Case(np.divide, lambda n: ([n(3, 1, 4), positive(n(2, 1))], {})),
    elementwise.Power: Case(np.power, lambda n: ([positive(n(3, 1, 4)), n(2, 1)], {})),
    elementwise.Maximum: Case(np.maximum, two),
    elementwise.Minimum: Case(np.minimum, two),
    elementwise.Negate: Case(np.negative, one),
    elementwise.Abs: Case(np.abs, one),
    elementwise.Exp: Case(np.exp, one),
    elementwise.Log: Case(np.log, lambda n: ([positive(n(3, 4))], {})),
    elementwise.Sqrt: Case(np.sqrt, lambda n: ([positive(n(3, 4))], {})),
    elementwise.Tanh: Case(np.tanh, one),
    elementwise.Sigmoid: Case(ref.sigmoid, one),
    matmul.MatMul: Case(np.matmul, lambda n: ([n(2, 1, 3, 4), n(5, 4, 2)], {})),
    reductions.Sum: Case(np.sum, along(axis=(0, -1), keepdims=True)),
    reductions.Mean: Case(np.mean, along(axis=(0, -1))),
    reductions.Max: Case(np.max, lambda n: ([distinct(n)], dict(axis=(0, -1)))),
    reductions.Min: Case(np.min, lambda n: ([distinct(n)], dict(axis=(0, -1)))),
    reductions.LogSumExp: Case(logsumexp, along(axis=(0, -1))),
    reductions.LogSoftmax: Case(lambda x, axis=-1: x - logsumexp(x, axis, True), along(axis=(0, -1))),
    reductions.Softmax: Case(softmax, along(axis=(0, -1))),
    shapes.Copy: Case(np.array, one),
    shapes.Reshape: Case(lambda x, shape: x.reshape(shape), along(shape=(4, -1))),
    shapes.Permute: Case(lambda x, axes: x.transpose(axes), along(axes=(2, 0, 1))),
    shapes.BroadcastTo: Case(np.broadcast_to, lambda n: ([n(3, 1)], dict(shape=(2, 3, 4)))),
    shapes.Flip: Case(lambda x, axes: np.flip(x, axes), along(axes=(0, 2))),
    shapes.GetItem: Case(lambda x, index: x[index], along(index=INDEX)),
    shapes.Place: Case(place, lambda n: ([n(1, 1, 4)], dict(shape=(2, 3, 4), index=INDEX))),
    shapes.SetItem: Case(set_item, lambda n: ([n(2, 3, 4), n(1, 4)], dict(index=INDEX))),
    shapes.Pad: Case(lambda x, widths, value=0: np.pad(x, widths, constant_values=value),
                     lambda n: ([n(2, 3)], dict(widths=((1, 0), (2, 3)), value=0.5))),
    shapes.Concatenate: Case(lambda *arrays, axis=0: np.concatenate(arrays, axis),
                             lambda n: ([n(2, 3), n(2, 1)], dict(axis=-1))),
    shapes.Split: Case(split, along(sizes=(1, 2), axis=1)),
    shapes.Stack: Case(lambda *arrays, axis=0: np.stack(arrays, axis), lambda n: ([n(2, 3), n(2, 3)], dict(axis=1))),
    shapes.Unbind: Case(lambda x, axis=0: tuple(np.moveaxis(x, axis, 0)), along(axis=1)),
    shapes.Take: Case(lambda x, ids: x[ids], lambda n: ([n(5, 3), np.array([[1, 0], [3, 1]], np.int32)], {})),
    shapes.Scatter: Case(scatter, lambda n: ([n(4, 3), np.array([1, 0, 3, 1], np.int32)], dict(shape=(5, 3)))),
    convolution.Windows: Case(windows, lambda n: ([n(2, 2, 7, 6)], dict(window=(3, 2), stride=(2, 1), dilation=(1, 3)))),
    convolution.Fold: Case(fold, lambda n: ([n(2, 2, 3, 3, 3, 2)],
                                            dict(shape=(2, 2, 7, 6), stride=(2, 1), dilation=(1, 3)))),
}

CASES = KERNEL_OPS | ARRAY_OPS


def formula_of(op):
    """The formula of an op class; one that is not in the table may bring its own, a function `reference`."""
    return CASES[op].formula if op in CASES else getattr(op, 'reference', None)
