"""The backward passes of kernel ops as formulas on Tensors, for second derivatives: those that are short.

Each is  f(dy, ctx, parameters, op) -> gradients of the inputs, {parameter: gradient},  with Tensors in ctx and parameters
where the op itself finds arrays.  What an op saves of its own making has no history, so it is made again from the inputs.
"""
from pyops import ops
from pyops.ops.array import call, sum_to
from pyops.ops.matmul import rows, swapped
from pyops.ops.reductions import Softmax
from pyops.ops.shapes import Scatter


def linear(dy, ctx, parameters, op):
    weight = parameters['weight']
    gradients = {'weight': swapped(rows(dy)) @ rows(ctx.x)}
    if 'bias' in parameters:
        gradients['bias'] = sum_to(dy, parameters['bias'].shape)
    return (dy @ weight,), gradients


def feed_forward(dy, ctx, parameters, op):
    w1, b1, w2, b2 = (parameters[name] for name in ('w1', 'b1', 'w2', 'b2'))
    a = ctx.x @ swapped(w1) + b1
    h, dh = a * (a > 0), (dy @ w2) * (a > 0)
    return (dh @ w1,), {'w1': swapped(rows(dh)) @ rows(ctx.x), 'b1': sum_to(dh, b1.shape),
                        'w2': swapped(rows(dy)) @ rows(h), 'b2': sum_to(dy, b2.shape)}


def relu(dy, ctx, parameters, op):
    return (dy * (ctx.y > 0),), {}


def embedding(dy, ctx, parameters, op):
    return (None,), {'weight': call(Scatter, dy, ctx.ids, shape=parameters['weight'].shape)}


def dropout(dy, ctx, parameters, op):
    return (call(op, dy, ctx.step),), {}


def residual(dy, ctx, parameters, op):
    return (dy, dy if ctx.step is None else call(ops.Dropout(op.p, op.key), dy, ctx.step)), {}


def concat_context(dy, ctx, parameters, op):
    return (dy[..., :ctx.E], dy[..., ctx.E:].sum(0)), {}


def layer_norm(dy, ctx, parameters, op, axis=-1):
    weight, bias, x = parameters['weight'], parameters['bias'], ctx.x
    centred = x - x.mean(axis, True)
    rstd = 1 / ((centred * centred).mean(axis, True) + op.eps).sqrt()
    xhat, g = centred * rstd, dy * weight
    dx = rstd * (g - g.mean(axis, True) - xhat * (g * xhat).mean(axis, True))
    return (dx,), {'weight': sum_to(dy * xhat, weight.shape), 'bias': sum_to(dy, bias.shape)}


def batch_norm(dy, ctx, parameters, op):
    if op.training:
        return layer_norm(dy, ctx, parameters, op, axis=0)
    return (dy * (parameters['weight'] * ctx.rstd),), {
        'weight': (dy * ((ctx.x - ctx.mean) * ctx.rstd)).sum(0), 'bias': dy.sum(0)}


def cross_entropy(dloss, ctx, parameters, op):
    labels, classes = ctx.labels, ctx.x.shape[1]
    column, valid = labels.reshape(-1, 1), (labels != op.ignore).reshape(-1, 1) * 1.0
    onehot = (column == type(labels)(range(classes), device=labels.device)) * 1.0
    target = onehot * (1 - op.smoothing) + op.smoothing / classes
    share = valid / valid.sum().maximum(1.0)
    return (dloss * (share * (call(Softmax, ctx.x, axis=1) - target)), None), {}


DERIVATIVES = {ops.Linear: linear, ops.FeedForward: feed_forward, ops.ReLU: relu, ops.Embedding: embedding,
               ops.Dropout: dropout, ops.Residual: residual, ops.ConcatContext: concat_context,
               ops.LayerNorm: layer_norm, ops.BatchNorm: batch_norm, ops.CrossEntropy: cross_entropy}
