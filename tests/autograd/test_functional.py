"""Every function on Tensors against PyTorch in float64: value and gradient, with a random upstream gradient, at several
shapes and axes; and the second derivatives, where there are any."""
import operator

import numpy as np
import pytest
from arrays import close, normal

from pyops import functional as F
from pyops.autograd import Tensor, grad
from pyops.philox import dropout_mask


def positive(rng, *shape):
    return np.abs(normal(rng, *shape)) + np.float32(0.2)


def away_from_0(rng, *shape):
    x = normal(rng, *shape)
    return np.where(np.abs(x) < 0.05, np.float32(0.05), x)


def tied(rng, *shape):
    """Few different values, so that maxima are reached in several places."""
    return rng.integers(0, 3, shape).astype(np.float32)


def kept(n, p, step, key):
    return dropout_mask(n, p, step, key) / (1 - p)


class Case:
    """name, ours(F, *tensors), theirs(torch, *tensors), the shapes of the inputs, how these are drawn.

    second: also compare second derivatives."""

    def __init__(self, name, ours, theirs, *shapes, draw=normal, second=True):
        self.name, self.ours, self.theirs, self.shapes, self.draw, self.second = name, ours, theirs, shapes, draw, second

    def inputs(self):
        rng = np.random.default_rng(0)
        draws = self.draw if isinstance(self.draw, tuple) else (self.draw,) * len(self.shapes)
        return [draw(rng, *shape) for draw, shape in zip(draws, self.shapes, strict=True)]


def case(name, ours, theirs, *every, **options):
    """One Case for each list of shapes."""
    return [Case(name, ours, theirs, *shapes, **options) for shapes in every]


def alike(name, *every, theirs=None, **options):
    """The same call of F and of torch (or of a module in it)."""
    def function(torch):
        for part in (theirs or name).split('.'):
            torch = getattr(torch, part)
        return torch
    return case(name, lambda F, *x: getattr(F, name)(*x), lambda torch, *x: function(torch)(*x), *every, **options)


def reduction(name, theirs, **options):
    """Over all axes, one, several, negative ones, with and without keepdims."""
    cases = []
    for axis in (None, 0, -1, (0, 2), (-1, 1), (0, 1, 2)):
        for keepdims in (False, True):
            def ours(F, x, axis=axis, keepdims=keepdims):
                return getattr(F, name)(x, axis, keepdims)

            def twin(torch, x, axis=axis, keepdims=keepdims):
                return theirs(torch, x, tuple(range(x.ndim)) if axis is None else axis, keepdims)
            cases += case(f'{name}-axis-{axis}{"-keepdims" * keepdims}', ours, twin, [(2, 3, 4)], [(1, 5, 1)], **options)
    return cases


ONE = [(5,)], [(2, 3, 4)], [()], [(0, 3)]
TWO = [(3,), (3,)], [(2, 3, 4), (3, 1)], [(), (2, 2)], [(4, 1), (1, 5)], [(2, 0), (1, 1)]
IDS = np.array([[1, 3, 1], [0, 1, 4]], np.int32)
WEIGHTS = np.float32([0.5, 1, 3]), np.float32([2, 1, 0.25])
LABELS = np.array([[1, -100, 2], [0, 4, -100]], np.int32)

def lstm_of_torch(torch, x, h, c, *weights):
    """Return h and c of all steps."""
    states = []
    for x_t in x:
        h, c = torch.lstm_cell(x_t, (h, c), *weights)
        states.append((h, c))
    return [torch.stack(steps) for steps in zip(*states, strict=True)]


CASES = [
    # element by element
    *case('add', lambda F, a, b: a + b, lambda torch, a, b: a + b, *TWO),
    *case('subtract', lambda F, a, b: a - b, lambda torch, a, b: a - b, *TWO),
    *case('multiply', lambda F, a, b: a * b, lambda torch, a, b: a * b, *TWO),
    *case('divide', lambda F, a, b: a / b, lambda torch, a, b: a / b, *TWO, draw=(normal, positive)),
    *case('power', lambda F, a, b: a ** b, lambda torch, a, b: a ** b, *TWO, draw=(positive, normal)),
    *case('numbers', lambda F, x: 2 - (3 * x + 1) / 4 + 2 / x, lambda torch, x: 2 - (3 * x + 1) / 4 + 2 / x, *ONE,
          draw=positive),
    *case('powers-of-numbers', lambda F, x: x**3 + x**-1 + x**0 + 2**x, lambda torch, x: x**3 + x**-1 + x**0 + 2**x, *ONE,
          draw=positive),
    *case('minus', lambda F, x: -x, lambda torch, x: -x, *ONE),
    *case('abs', lambda F, x: abs(x) * x, lambda torch, x: x.abs() * x, *ONE, draw=away_from_0),
    *alike('exp', *ONE), *alike('tanh', *ONE), *alike('sigmoid', *ONE),
    *alike('log', *ONE, draw=positive), *alike('sqrt', *ONE, draw=positive),
    *alike('relu', *ONE, draw=away_from_0),
    *case('silu', lambda F, x: F.silu(x), lambda torch, x: torch.nn.functional.silu(x), *ONE),
    *case('gelu', lambda F, x: F.gelu(x), lambda torch, x: torch.nn.functional.gelu(x), *ONE, second=False),
    *alike('maximum', *TWO), *alike('minimum', *TWO), *alike('maximum', *TWO, draw=tied), *alike('minimum', *TWO, draw=tied),
    *alike('elu', *ONE, theirs='nn.functional.elu', draw=away_from_0),
    *alike('softplus', *ONE, theirs='nn.functional.softplus'),
    *case('softplus-beta-threshold', lambda F, x: F.softplus(x, 2.0, 1.0),
          lambda torch, x: torch.nn.functional.softplus(x, 2.0, 1.0), [(3, 5)]),
    # reductions
    *reduction('sum', lambda torch, x, axis, keep: x.sum(axis, keep)),
    *reduction('mean', lambda torch, x, axis, keep: x.mean(axis, keep)),
    *reduction('max', lambda torch, x, axis, keep: x.amax(axis, keep)),
    *reduction('max', lambda torch, x, axis, keep: x.amax(axis, keep), draw=tied),
    *reduction('min', lambda torch, x, axis, keep: x.amin(axis, keep), draw=tied),
    *reduction('logsumexp', lambda torch, x, axis, keep: x.logsumexp(axis, keep)),
    *case('var', lambda F, x: F.var(x, (0, 2)), lambda torch, x: x.var((0, 2)), [(2, 3, 4)]),
    *(one for axis in (0, 1, -1) for name in ('softmax', 'log_softmax')
      for one in case(f'{name}-axis-{axis}', lambda F, x, name=name, axis=axis: getattr(F, name)(x, axis),
                      lambda torch, x, name=name, axis=axis: getattr(torch, name)(x, axis), [(2, 3, 4)], [(3, 1)])),
    *case('softmax-several-axes', lambda F, x: F.softmax(x, (0, 2)),
          lambda torch, x: (x - x.logsumexp((0, 2), True)).exp(), [(2, 3, 4)]),
    *case('log_softmax-several-axes', lambda F, x: F.log_softmax(x, (0, -1)),
          lambda torch, x: x - x.logsumexp((0, 2), True), [(2, 3, 4)]),
    # shapes
    *case('reshape', lambda F, x: F.reshape(x, (4, -1)), lambda torch, x: x.reshape(4, -1), [(2, 3, 4)]),
    *case('reshape-of-permuted', lambda F, x: x.permute(2, 0, 1).reshape(-1, 2),
          lambda torch, x: x.permute(2, 0, 1).reshape(-1, 2), [(2, 3, 4)]),
    *case('permute', lambda F, x: F.permute(x, (2, 0, -2)), lambda torch, x: x.permute(2, 0, 1), [(2, 3, 4)]),
    *case('transpose', lambda F, x: F.transpose(x, 0, -1), lambda torch, x: x.transpose(0, -1), [(2, 3, 4)]),
    *case('T', lambda F, x: x.T, lambda torch, x: x.T, [(2, 3)]),
    *case('broadcast_to', lambda F, x: F.broadcast_to(x, (2, 3, 4)), lambda torch, x: x.broadcast_to((2, 3, 4)),
          [(3, 1)], [()], [(2, 3, 4)]),
    *case('squeeze-unsqueeze', lambda F, x: x.unsqueeze(1).squeeze(-1), lambda torch, x: x.unsqueeze(1).squeeze(-1), [(3, 1)]),
    *case('flatten', lambda F, x: x.flatten(1), lambda torch, x: x.flatten(1), [(2, 3, 4)]),
    *case('flip', lambda F, x: F.flip(x, (0, -1)), lambda torch, x: x.flip((0, -1)), [(2, 3, 4)]),
    *case('slices', lambda F, x: x[1:, None, ..., 0], lambda torch, x: x[1:, None, ..., 0], [(3, 4, 5)]),
    *case('slices-with-steps', lambda F, x: x[::2, 1:-1:3] * 2, lambda torch, x: x[::2, 1:-1:3] * 2, [(5, 9)]),
    *case('slices-backwards', lambda F, x: x[::-1, 5:0:-2], lambda torch, x: x.flip(0)[:, [5, 3, 1]], [(5, 9)]),
    *case('one-element', lambda F, x: x[1, -1], lambda torch, x: x[1, -1], [(2, 3)]),
    *case('overlapping-slices', lambda F, x: x[:3] * x[1:] + x[0], lambda torch, x: x[:3] * x[1:] + x[0], [(4, 3)]),
    *case('rows', lambda F, x: x[IDS], lambda torch, x: x[torch.tensor(IDS).long()], [(5, 3)]),
    *case('mask', lambda F, x: x[x > 0] * 2, lambda torch, x: x[x > 0] * 2, [(5, 3)], [(7,)]),
    *case('mask-of-first-axes', lambda F, x: x[x[..., 0] > 0].exp(), lambda torch, x: x[x[..., 0] > 0].exp(), [(5, 2, 3)]),
    *case('mask-of-bools', lambda F, x: x[[True, False, True]] * x[np.array([True, True, False])],
          lambda torch, x: x[[0, 2]] * x[:2], [(3, 4)]),
    *case('stack', lambda F, *x: F.stack(x, 1), lambda torch, *x: torch.stack(x, 1), [(2, 3)] * 3, [(2, 3)]),
    *case('stack-behind', lambda F, *x: F.stack(x, -1), lambda torch, *x: torch.stack(x, -1), [(2, 3)] * 2),
    *case('cat', lambda F, *x: F.cat(x, -1), lambda torch, *x: torch.cat(x, -1), [(2, 3), (2, 1), (2, 0)]),
    *case('unbind', lambda F, x: F.unbind(x, 1), lambda torch, x: x.unbind(1), [(2, 3, 4)]),
    *case('unbind-one-used', lambda F, x: F.unbind(x, -1)[1], lambda torch, x: x.unbind(-1)[1], [(2, 3)]),
    *case('split', lambda F, x: F.split(x, 2, 1), lambda torch, x: x.split(2, 1), [(2, 5)], [(2, 4)]),
    *case('split-sizes', lambda F, x: F.split(x, (1, 0, 3), -1), lambda torch, x: x.split((1, 0, 3), -1), [(2, 4)]),
    *case('pad', lambda F, x: F.pad(x, (1, 2, 0, 3), value=0.5),
          lambda torch, x: torch.nn.functional.pad(x, (1, 2, 0, 3), value=0.5), [(2, 3, 4)]),
    *case('pad-pairs', lambda F, x: F.pad(x, ((0, 3), (1, 2))), lambda torch, x: torch.nn.functional.pad(x, (1, 2, 0, 3)),
          [(3, 4)]),
    *case('dilate', lambda F, x: F.dilate(x, (0, -1), 2),
          lambda torch, x: torch.stack([x] + [x * 0] * 2, 2).reshape(2, -1)[:, None].mul(torch.tensor([1.0, 0, 0])[:, None])
          .reshape(6, -1), [(2, 4)]),
    *case('undilate', lambda F, x: F.undilate(x, 1, 1), lambda torch, x: x[:, ::2], [(2, 6)]),
    *case('undilate-dilate', lambda F, x: F.undilate(F.dilate(x, 1, 3), 1, 3), lambda torch, x: x + 0, [(2, 3)]),
    # products
    *alike('matmul', [(3, 4), (4, 2)], [(2, 3, 4), (4, 5)], [(2, 3, 4), (2, 4, 5)], [(5, 1, 3, 4), (2, 4, 2)], [(4,), (4, 2)],
           [(3, 4), (4,)], [(4,), (4,)], [(4,), (2, 4, 3)], [(2, 3, 4), (4,)], [(3, 4), (2, 4, 5)], [(0, 4), (4, 2)],
           [(2, 0), (0, 3)]),
    *case('matmul-transposed', lambda F, a, b: a.T @ b.transpose(-1, -2), lambda torch, a, b: a.T @ b.T, [(4, 3), (5, 4)]),
    *case('conv2d', lambda F, x, w, b: F.conv2d(x, w, b), lambda torch, x, w, b: torch.nn.functional.conv2d(x, w, b),
          [(2, 3, 6, 5), (4, 3, 3, 2), (4,)], [(1, 1, 1, 1), (1, 1, 1, 1), (1,)]),
    *(one for options in (dict(stride=2), dict(padding=1), dict(dilation=2),
                          dict(stride=(1, 3), padding=(2, 0), dilation=(2, 1)))
      for one in case('conv2d-' + '-'.join(f'{k}{v}' for k, v in options.items()),
                      lambda F, x, w, options=options: F.conv2d(x, w, **options),
                      lambda torch, x, w, options=options: torch.nn.functional.conv2d(x, w, **options),
                      [(2, 3, 8, 7), (2, 3, 3, 2)])),
    *case('conv2d-groups', lambda F, x, w, b: F.conv2d(x, w, b, padding='same', groups=2),
          lambda torch, x, w, b: torch.nn.functional.conv2d(x, w, b, padding='same', groups=2),
          [(2, 4, 6, 5), (6, 2, 3, 3), (6,)]),
    *case('conv1d', lambda F, x, w, b: F.conv1d(x, w, b, 2, 1, 2),
          lambda torch, x, w, b: torch.nn.functional.conv1d(x, w, b, 2, 1, 2), [(2, 3, 8), (4, 3, 3), (4,)]),
    *case('max_pool2d', lambda F, x: F.max_pool2d(x, (2, 3), padding=1), lambda torch, x: torch.nn.functional.max_pool2d(
        x, (2, 3), padding=1), [(2, 3, 5, 6)], second=False),
    *case('avg_pool2d', lambda F, x: F.avg_pool2d(x, 3, 2, 1, True, False), lambda torch, x: torch.nn.functional.avg_pool2d(
        x, 3, 2, 1, True, False), [(2, 3, 5, 6)], second=False),
    *case('avg_pool2d-of-padding', lambda F, x: F.avg_pool2d(x, (3, 2), 2, 1, True),
          lambda torch, x: torch.nn.functional.avg_pool2d(x, (3, 2), 2, 1, True), [(2, 3, 6, 5)], second=False),
    *case('max_pool2d-ceil', lambda F, x: F.max_pool2d(x, 2, 3, 1, 2, True),
          lambda torch, x: torch.nn.functional.max_pool2d(x, 2, 3, 1, 2, True), [(2, 3, 5, 6)], second=False),
    *case('group_norm', lambda F, x, w, b: F.group_norm(x, 2, w, b, 0.01),
          lambda torch, x, w, b: torch.nn.functional.group_norm(x, 2, w, b, 0.01), [(3, 4, 5, 2), (4,), (4,)]),
    *case('leaky_relu', lambda F, x: F.leaky_relu(x, 0.2), lambda torch, x: torch.nn.functional.leaky_relu(x, 0.2), [(4, 5)]),
    *case('gelu-tanh', lambda F, x: F.gelu(x, 'tanh'), lambda torch, x: torch.nn.functional.gelu(x, approximate='tanh'),
          [(4, 5)]),
    # layers and losses
    *alike('linear', [(3, 4), (2, 4), (2,)], [(2, 3, 4), (5, 4), (5,)], [(3, 4), (2, 4)], [(4,), (2, 4), (2,)],
           theirs='nn.functional.linear'),
    *case('linear-of-a-view', lambda F, x, w, b: F.linear(x.T, w.T, b[::2]),
          lambda torch, x, w, b: torch.nn.functional.linear(x.T, w.T, b[::2]), [(4, 3), (4, 2), (4,)]),
    *case('feed_forward', lambda F, *x: F.feed_forward(*x),
          lambda torch, x, w1, b1, w2, b2: torch.relu(x @ w1.T + b1) @ w2.T + b2,
          [(2, 3, 4), (6, 4), (6,), (4, 6), (4,)]),
    *case('feed_forward-silu', lambda F, *x: F.feed_forward(*x, activation='silu'),
          lambda torch, x, w1, b1, w2, b2: torch.nn.functional.silu(x @ w1.T + b1) @ w2.T + b2,
          [(2, 3, 4), (6, 4), (6,), (4, 6), (4,)], second=False),
    *case('embedding', lambda F, w: F.embedding(IDS, w), lambda torch, w: torch.nn.functional.embedding(torch.tensor(IDS), w),
          [(5, 3)]),
    *case('layer_norm', lambda F, x, w, b: F.layer_norm(x, w.shape, w, b),
          lambda torch, x, w, b: torch.nn.functional.layer_norm(x, w.shape, w, b), [(2, 3, 5), (5,), (5,)]),
    *case('batch_norm', lambda F, x, w, b: F.batch_norm(x, None, None, w, b, training=True),
          lambda torch, x, w, b: torch.nn.functional.batch_norm(x, None, None, w, b, training=True),
          [(6, 3), (3,), (3,)], [(4, 3, 2, 5), (3,), (3,)]),
    *case('batch_norm-evaluating-images', lambda F, x, w, b: F.batch_norm(x, np.float32([1, 2]), np.float32([3, 2]), w, b),
          lambda torch, x, w, b: torch.nn.functional.batch_norm(
              x, torch.tensor([1, 2], dtype=x.dtype), torch.tensor([3, 2], dtype=x.dtype), w, b), [(3, 2, 4, 3), (2,), (2,)]),
    *case('batch_norm-evaluating', lambda F, x: F.batch_norm(x, np.float32([1, 2, 3]), np.float32([3, 2, 1])),
          lambda torch, x: (x - torch.tensor([1, 2, 3])) / (torch.tensor([3, 2, 1]) + 1e-5)**0.5, [(6, 3)]),
    *case('concat_context', lambda F, x, c: F.concat_context(x, c), lambda torch, x, c: torch.cat([x, c.expand(3, 2, 5)], -1),
          [(3, 2, 4), (2, 5)]),
    *case('residual', lambda F, x, b: F.residual(x, b * b, 0.0), lambda torch, x, b: x + b * b, [(2, 3), (2, 3)]),
    *case('residual-dropout', lambda F, x, b: F.residual(x, b * b, 0.3, key=7, step=2) * x,
          lambda torch, x, b: (x + b * b * torch.tensor(kept(12, 0.3, 2, 7)).reshape(3, 4)) * x, [(3, 4), (3, 4)]),
    *case('dropout', lambda F, x: F.dropout(x * x, 0.3, key=7, step=2),
          lambda torch, x: x * x * torch.tensor(kept(12, 0.3, 2, 7)).reshape(3, 4), [(3, 4)]),
    *case('layers', lambda F, x, w, b, g: F.cross_entropy(
              F.layer_norm(F.relu(F.linear(x, w, b)) + 0.1 * b, g.shape, g, b), [2, 0, -100]),
          lambda torch, x, w, b, g: torch.nn.functional.cross_entropy(torch.nn.functional.layer_norm(
              torch.relu(x @ w.T + b) + 0.1 * b, (5,), g, b), torch.tensor([2, 0, -100])), [(3, 4), (5, 4), (5,), (5,)]),
    *case('gru', lambda F, x, h, *w: F.gru(x, h, *w),
          lambda torch, x, h, *w: torch.gru(x, h[None], w, True, 1, 0.0, False, False, False)[0],
          [(3, 2, 4), (2, 5), (15, 4), (15, 5), (15,), (15,)], second=False),
    *case('gru-last-state', lambda F, x, *w: F.gru(x, None, *w)[-1],
          lambda torch, x, *w: torch.gru(x, x.new_zeros(1, 2, 5), w, True, 1, 0.0, False, False, False)[0][-1],
          [(3, 2, 4), (15, 4), (15, 5), (15,), (15,)], second=False),
    *case('lstm', lambda F, x, h, c, *w: F.cat(F.lstm(x, h, c, *w)),
          lambda torch, x, h, c, *w: torch.cat(lstm_of_torch(torch, x, h, c, *w)),
          [(3, 2, 4), (2, 5), (2, 5), (20, 4), (20, 5), (20,), (20,)], [(1, 2, 4), (2, 5), (2, 5), (20, 4), (20, 5)],
          second=False),
    *case('lstm-output-alone', lambda F, x, *w: F.lstm(x, None, None, *w)[0],
          lambda torch, x, *w: lstm_of_torch(torch, x, x.new_zeros(2, 5), x.new_zeros(2, 5), *w)[0],
          [(3, 2, 4), (20, 4), (20, 5)], second=False),
    *(one for which in ('tanh', 'relu')
      for one in case(f'rnn-{which}', lambda F, x, h, *w, which=which: F.rnn(x, h, *w, nonlinearity=which),
                      lambda torch, x, h, *w, which=which: getattr(torch, f'rnn_{which}')(
                          x, h[None], w, len(w) == 4, 1, 0.0, False, False, False)[0],
                      [(3, 2, 4), (2, 5), (5, 4), (5, 5), (5,), (5,)], [(3, 2, 4), (2, 5), (5, 4), (5, 5)], second=False)),
    *alike('scaled_dot_product_attention', [(3, 4), (5, 4), (5, 2)], [(2, 3, 4, 5), (2, 3, 6, 5), (2, 3, 6, 2)],
           theirs='nn.functional.scaled_dot_product_attention'),
    *case('causal-attention', lambda F, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
          lambda torch, q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
          [(2, 4, 3), (2, 4, 3), (2, 4, 5)]),
    *case('masked-attention', lambda F, q, k, v: F.scaled_dot_product_attention(q, k, v, np.tri(4, 5, 1, bool)),
          lambda torch, q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, torch.tensor(np.tri(4, 5, 1, bool))),
          [(2, 4, 3), (2, 5, 3), (2, 5, 5)]),
    *case('cross_entropy', lambda F, x: F.cross_entropy(x, LABELS),
          lambda torch, x: torch.nn.functional.cross_entropy(x.reshape(6, 5), torch.tensor(LABELS).long().reshape(6)),
          [(2, 3, 5)]),
    *(one for words, options in (('sum', dict(reduction='sum')), ('smoothed', dict(label_smoothing=0.2)),
                                 ('smoothed-none', dict(reduction='none', label_smoothing=0.2)))
      for one in case(f'cross_entropy-{words}', lambda F, x, options=options: F.cross_entropy(x, LABELS.reshape(6), **options),
                      lambda torch, x, options=options: torch.nn.functional.cross_entropy(
                          x, torch.tensor(LABELS).long().reshape(6), **options), [(6, 5)])),
    *(one for words, options in (('', dict()), ('-none', dict(reduction='none')), ('-smoothed', dict(label_smoothing=0.1)))
      for one in case(f'cross_entropy-weight{words}', lambda F, x, w, options=options: F.cross_entropy(
          x, LABELS.reshape(6), weight=w.detach(), **options) + 0 * w.sum(), lambda torch, x, w, options=options:
          torch.nn.functional.cross_entropy(x, torch.tensor(LABELS).long().reshape(6), w.detach(), **options) + 0 * w.sum(),
          [(6, 5), (5,)], draw=(normal, positive), second=False)),
    *case('cross_entropy-classes-along-axis-1', lambda F, x: F.cross_entropy(x, LABELS, reduction='none'),
          lambda torch, x: torch.nn.functional.cross_entropy(x, torch.tensor(LABELS).long(), reduction='none'), [(2, 5, 3)]),
    *case('cross_entropy-mean-along-axis-1', lambda F, x: F.cross_entropy(x, LABELS),
          lambda torch, x: torch.nn.functional.cross_entropy(x, torch.tensor(LABELS).long()), [(2, 5, 3)], second=False),
    *(one for words, options in (('', dict()), ('-sum', dict(reduction='sum')), ('-none', dict(reduction='none')),
                                 ('-smoothed', dict(label_smoothing=0.2)))
      for one in case(f'cross_entropy-probabilities{words}', lambda F, x, p, options=options: F.cross_entropy(x, p, **options),
                      lambda torch, x, p, options=options: torch.nn.functional.cross_entropy(x, p, **options),
                      [(6, 5), (6, 5)], [(2, 5, 3), (2, 5, 3)], [(5,), (5,)], draw=(normal, positive))),
    *(one for words, options in (('', dict()), ('-none-smoothed', dict(reduction='none', label_smoothing=0.1)))
      for one in case(f'cross_entropy-probabilities-weight{words}', lambda F, x, p, w, options=options: F.cross_entropy(
          x, p, w.detach(), **options) + 0 * w.sum(), lambda torch, x, p, w, options=options:
          torch.nn.functional.cross_entropy(x, p, w.detach(), **options) + 0 * w.sum(),
          [(6, 5), (6, 5), (5,)], [(2, 5, 3), (2, 5, 3), (5,)], draw=(normal, positive, positive), second=False)),
    *case('linear_cross_entropy', lambda F, x, w, b: F.linear_cross_entropy(x, w, b, LABELS, label_smoothing=0.1),
          lambda torch, x, w, b: torch.nn.functional.cross_entropy(
              torch.nn.functional.linear(x, w, b).reshape(6, 5), torch.tensor(LABELS).long().reshape(6), label_smoothing=0.1),
          [(2, 3, 4), (5, 4), (5,)], second=False),
    *(one for name in ('mse_loss', 'l1_loss', 'huber_loss', 'smooth_l1_loss') for how in ('mean', 'sum', 'none')
      for one in case(f'{name}-{how}',
                      lambda F, x, y, name=name, how=how: getattr(F, name)(x, y, reduction=how) * (x * y).sum(),
                      lambda torch, x, y, name=name, how=how: getattr(torch.nn.functional, name)(x, y, reduction=how)
                      * (x * y).sum(), [(2, 3), (2, 3)])),
    *case('huber_loss-delta', lambda F, x, y: F.huber_loss(x, y, delta=0.4) * x.sum(),
          lambda torch, x, y: torch.nn.functional.huber_loss(x, y, delta=0.4) * x.sum(), [(5,), (5,)]),
    *case('smooth_l1_loss-0', lambda F, x, y: F.smooth_l1_loss(x, y, beta=0.0) * x.sum(),
          lambda torch, x, y: torch.nn.functional.smooth_l1_loss(x, y, beta=0.0) * x.sum(), [(5,), (5,)]),
    *case('binary_cross_entropy',
          lambda F, x, y, w: F.binary_cross_entropy(F.sigmoid(x), F.sigmoid(y), w.detach()) + 0 * w.sum(),
          lambda torch, x, y, w: torch.nn.functional.binary_cross_entropy(x.sigmoid(), y.sigmoid(), w.detach()) + 0 * w.sum(),
          [(2, 3), (2, 3), (3,)], second=False),
    *case('binary_cross_entropy_with_logits',
          lambda F, x, y: F.binary_cross_entropy_with_logits(x, y, WEIGHTS[0], 'sum', WEIGHTS[1]),
          lambda torch, x, y: torch.nn.functional.binary_cross_entropy_with_logits(
              x, y, torch.tensor(WEIGHTS[0]), reduction='sum', pos_weight=torch.tensor(WEIGHTS[1])), [(2, 3), (2, 3)],
          draw=(normal, positive)),
    *(one for how in ('mean', 'batchmean', 'sum', 'none')
      for one in case(f'kl_div-{how}', lambda F, x, y, how=how: F.kl_div(F.log_softmax(x), F.softmax(y), how),
                      lambda torch, x, y, how=how: torch.nn.functional.kl_div(x.log_softmax(-1), y.softmax(-1), reduction=how),
                      [(2, 3), (2, 3)])),
    *case('kl_div-of-logarithms', lambda F, x, y: F.kl_div(x, y, log_target=True),
          lambda torch, x, y: torch.nn.functional.kl_div(x, y, log_target=True), [(2, 3), (2, 3)]),
    *case('normalize', lambda F, x: F.normalize(x, dim=-1), lambda torch, x: torch.nn.functional.normalize(x, dim=-1),
          [(3, 4)]),
    *case('cosine_similarity', lambda F, a, b: F.cosine_similarity(a, b),
          lambda torch, a, b: torch.nn.functional.cosine_similarity(a, b), [(3, 4), (3, 4)]),
    # by methods
    *alike('sin', *ONE), *alike('cos', *ONE),
    *case('clip', lambda F, x: F.clip(x, -0.5, 1), lambda torch, x: x.clip(-0.5, 1), [(3, 4)]),
    *case('clamp-min', lambda F, x: F.clamp(x, min=0.1), lambda torch, x: x.clamp(min=0.1), [(3, 4)]),
    *case('std', lambda F, x: F.std(x, dim=1, keepdim=True), lambda torch, x: x.std(dim=1, keepdim=True), [(3, 4)]),
    *case('var-of-numpy', lambda F, x: x.var(1), lambda torch, x: x.var(dim=1, correction=0), [(3, 4)]),
    *case('prod', lambda F, x: F.prod(x, 1), lambda torch, x: x.prod(1), [(3, 5)], [(2, 1)]),
    *case('prod-of-all', lambda F, x: F.prod(x), lambda torch, x: x.prod(), [(7,)]),
    *case('norm', lambda F, x: F.norm(x, axis=-1), lambda torch, x: x.norm(dim=-1), [(3, 4)]),
    *case('norm-3', lambda F, x: F.norm(x, 3), lambda torch, x: x.norm(3), [(3, 4)], draw=away_from_0),
    *case('cumsum', lambda F, x: F.cumsum(x, dim=1), lambda torch, x: x.cumsum(1), [(3, 5)], [(2, 1, 4)]),
    *case('sort', lambda F, x: F.sort(x, dim=0, descending=True)[0] * x, lambda torch, x: x.sort(0, descending=True)[0] * x,
          [(4, 3)]),
    *case('topk', lambda F, x: F.topk(x, 2)[0] ** 2, lambda torch, x: x.topk(2)[0] ** 2, [(3, 5)]),
    *case('gather', lambda F, x: F.gather(x * x, 1, np.array([[0, 2, 2], [1, 1, 0]])),
          lambda torch, x: (x * x).gather(1, torch.tensor([[0, 2, 2], [1, 1, 0]])), [(3, 4)]),
    *case('where', lambda F, a, b: F.where(a > b, a * b, b), lambda torch, a, b: torch.where(a > b, a * b, b), [(3, 4), (4,)]),
    *case('einsum', lambda F, a, b: F.einsum('bij,kj->bik', a, b), lambda torch, a, b: torch.einsum('bij,kj->bik', a, b),
          [(2, 3, 4), (5, 4)]),
    *case('einsum-3', lambda F, a, b, c: F.einsum('ij,jk,k->i', a, b, c), lambda torch, a, b, c: torch.einsum('ij,jk,k->i', a,
    b, c),
          [(2, 3), (3, 4), (4,)]),
    *case('repeat', lambda F, x: F.repeat_interleave(x, 3, dim=1) ** 2, lambda torch, x: x.repeat_interleave(3, 1) ** 2, [(2,
    3)]),
    *case('tile', lambda F, x: F.tile(x, (2, 1, 3)) ** 2, lambda torch, x: x.tile(2, 1, 3) ** 2, [(2, 3)]),
    *case('roll', lambda F, x: x.roll(1, 0) * x, lambda torch, x: x.roll(1, 0) * x, [(3, 2)]),
    *case('remainder', lambda F, a, b: a % b, lambda torch, a, b: a % b, [(3, 4), (4,)], draw=(normal, positive)),
    *case('take', lambda F, x: x[..., [0, 2, 0]] * x[:, None, 1:2], lambda torch, x: x[..., [0, 2, 0]] * x[:, None, 1:2], [(3,
    4)]),
    *case('two-index-arrays', lambda F, x: x[[0, 1, 0], :, [2, 0, 2]] ** 2, lambda torch, x: x[[0, 1, 0], :, [2, 0, 2]] ** 2,
          [(2, 3, 4)]),
    *case('chunk-dim', lambda F, x: F.softmax(x, dim=0).chunk(2, dim=1), lambda torch, x: torch.softmax(x, 0).chunk(2, 1),
          [(3, 5)]),
    *case('operators-by-name', lambda F, a, b: a.add(b, alpha=2).mul(a).sub(b).div(b * b + 1).neg() + b.square().add(1).rsqrt(),
          lambda torch, a, b: a.add(b, alpha=2).mul(a).sub(b).div(b * b + 1).neg() + b.square().add(1).rsqrt(), [(3, 4), (4,)]),
    *case('mm-bmm-t', lambda F, a, b, c: (a.mm(b.t()) * c.bmm(c)).sum(0),
          lambda torch, a, b, c: (a.mm(b.t()) * c.bmm(c)).sum(0), [(3, 4), (3, 4), (2, 3, 3)]),
    # chains
    *case('chain', lambda F, x, w: ((x @ w).tanh().sum(1, True) / (x * x + 1)).logsumexp((0, 1)) * w.mean(),
          lambda torch, x, w: ((x @ w).tanh().sum(1, True) / (x * x + 1)).logsumexp((0, 1)) * w.mean(), [(3, 4), (4, 2)]),
    *case('used-many-times', lambda F, x: x * x + x.exp() * x[0] - x, lambda torch, x: x * x + x.exp() * x[0] - x, [(3, 4)]),
]
IDENTITIES = [f'{c.name}-{"-".join("x".join(map(str, s)) or "()" for s in c.shapes)}' for c in CASES]


def several(y):
    return list(y) if isinstance(y, (tuple, list)) else [y]


def run(torch, case, create_graph=False):
    """-> inputs, outputs, random upstream gradients, gradients: ours and theirs."""
    arrays, rng = case.inputs(), np.random.default_rng(1)
    xs = [Tensor(a, requires_grad=True) for a in arrays]
    ts = [torch.tensor(a.astype(np.float64), requires_grad=True) for a in arrays]
    ys, us = several(case.ours(F, *xs)), several(case.theirs(torch, *ts))
    dys = [normal(rng, *u.shape) for u in us]
    for y, u in zip(ys, us, strict=True):
        close(y.numpy(), u.detach().numpy())
    seeds = [Tensor(dy, requires_grad=create_graph) for dy in dys]
    twins = [torch.tensor(dy.astype(np.float64), requires_grad=create_graph) for dy in dys]
    ours = grad(ys, xs, seeds, create_graph=create_graph)
    theirs = torch.autograd.grad(us, ts, twins, create_graph=create_graph)
    for g, t in zip(ours, theirs, strict=True):
        close(g.numpy(), t.detach().numpy())
    return xs + seeds, ts + twins, ours, theirs


@pytest.mark.parametrize('case', CASES, ids=IDENTITIES)
def test_values_and_gradients_are_those_of_torch(torch, case):
    run(torch, case)


def value_and_gradient(f, x):
    x = Tensor(x, requires_grad=True)
    y = f(x)
    y.backward()
    return y.numpy(), x.grad.numpy()


LARGE = pytest.mark.parametrize('c', [1e2, 1e3, 1e4, 1e5, 1e9, -1e9])
LOSSES = {
    'cross_entropy': lambda logits: F.cross_entropy(logits.reshape(1, -1), [0]),
    'linear_cross_entropy': lambda logits: F.linear_cross_entropy([[0.0]], [[0.0]] * logits.size, logits, [0]),
    'log_softmax': lambda logits: -F.log_softmax(logits)[0],
}


@LARGE
@pytest.mark.parametrize('loss', LOSSES)
def test_two_equal_logits_have_the_loss_log_2_however_large_they_are(loss, c):
    y, dx = value_and_gradient(LOSSES[loss], [c, c])
    assert abs(y - np.log(2)) <= np.spacing(np.float32(np.log(2))) and dx.tolist() == [-0.5, 0.5]


EDGES = {
    'a norm at 0': (lambda x: x.norm(), [0.0, 0.0]), 'a row of 0': (lambda x: x.norm(p=2, dim=1), [[0.0, 0.0], [3.0, 4.0]]),
    **{f'norm {p}': (lambda x, p=p: x.norm(p), [0.0, 0.0]) for p in (0, 0.5, 1, 1.5, 3)},
    **{f'norm {p} of numbers': (lambda x, p=p: x.norm(p), [3.0, 0.0, -4.0]) for p in (0, 0.5, 1, 1.5, 3)},
    'limits': (lambda x: x.clamp(0, 1), [0.0, 1.0, 2.0, -1.0, 0.5]), 'one limit': (lambda x: x.clamp(min=0), [0.0, 1.0, -1.0]),
    'relu': (lambda x: x.relu(), [0.0, 1.0, -1.0]), 'a softmax of ()': (lambda x: x.softmax(0) * 2 + x.log_softmax(-1), 1.5),
}


@pytest.mark.parametrize('name', EDGES)
def test_gradients_where_a_derivative_does_not_exist_are_pytorchs(torch, name):
    call, numbers = EDGES[name]
    for dtype in ('float32', 'float64'):
        x, t = Tensor(numbers, dtype=dtype, requires_grad=True), torch.tensor(numbers, dtype=getattr(torch, dtype))
        y, z = call(x), call(t.requires_grad_())
        y.sum().backward()
        z.sum().backward()
        close(y.numpy(), z.detach().numpy())
        close(x.grad.numpy(), np.zeros_like(t.detach()) if t.grad is None else t.grad.numpy())


@pytest.mark.parametrize('dtype', ['float32', 'float64'])
@pytest.mark.parametrize('name, inputs', [
    ('asinh', [[0.0, 0.5, -2.0, 1e30, -1e30]]), ('std', [[2.0, 2.0, 2.0]]),
    ('hypot', [[3e20, 3e-30, 1e38], [4e20, 4e-30, 1e38]]), ('logaddexp', [[1.0, 2.0, 1e30], [0.5, 2.0, -1e30]]),
    ('acosh', [[1.5, 40.0, 1e20, 3e38]]), ('sinc', [[1e-42, 1e-4, 0.003, 0.0033, 0.25]]), ('sinh', [[1e-30, 0.5, 1e3, -1e3]]),
    ('expm1', [[1e-30, -1e-8, 1e-4, 0.49, 0.51, 88.5, 1e3, -1e3]]), ('log1p', [[1e-30, -1e-8, 0.5, -0.999, 1e30]]),
    ('atan', [[0.0, 1e-30, -1.0, 1.5, -1e15]]), ('erf', [[0.0, 1e-30, -0.874, 0.876, 3.9, -9.0]]),
    ('asin', [[1e-30, -0.5, 0.6, -0.61, 0.999]]), ('acos', [[1e-30, -0.5, 0.6, -0.61, 0.999]])])
def test_values_and_gradients_of_extreme_numbers(name, inputs, dtype):
    torch = pytest.importorskip('torch', reason='torch is not installed: pip install torch')
    ours = [Tensor(x, dtype=dtype, requires_grad=True) for x in inputs]
    theirs = [torch.tensor(x.numpy().astype(float), requires_grad=True) for x in ours]
    y, want = (getattr(xs[0], name)(*xs[1:]) for xs in (ours, theirs))
    y.sum().backward()
    want.sum().backward()
    assert np.allclose(y.numpy(), want.detach().numpy(), rtol=1e-6, atol=0)
    for x, other in zip(ours, theirs, strict=True):
        assert np.allclose(x.grad.numpy(), other.grad.numpy(), rtol=1e-5)


ACTIVATIONS = {
    **{name: (name, ()) for name in ('leaky_relu', 'elu', 'selu', 'celu', 'hardtanh', 'relu6', 'hardsigmoid', 'hardswish',
                                     'softshrink', 'hardshrink', 'logsigmoid', 'softplus', 'mish')},
    'elu of 2': ('elu', (2.0,)), 'celu of 0.5': ('celu', (0.5,)), 'leaky_relu of 0': ('leaky_relu', (0.0,)),
    'leaky_relu of 2': ('leaky_relu', (2.0,)), 'softplus of 2': ('softplus', (2.0, 1.0)),
    'softplus to 5': ('softplus', (1.0, 5.0))}


@pytest.mark.parametrize('dtype', ['float32', 'float64'])
@pytest.mark.parametrize('name', ACTIVATIONS)
def test_activations_of_any_number_with_and_without_a_gradient(name, dtype, torch):
    (function, args), tiny = ACTIVATIONS[name], float(np.finfo(dtype).tiny)
    x = np.concatenate([np.linspace(-8, 8, 101), [-0.0, 0.5, -0.5, 6, 19.99, 20.01, -20, 88, -87, 1e30, -1e30, np.inf, -np.inf,
                                                  np.nan, 1e-30, -1e-30, -1e-40]]).astype(dtype)
    ours, theirs = Tensor(x, dtype=dtype, requires_grad=True), torch.tensor(x.astype(float), requires_grad=True)
    y, want = getattr(F, function)(ours, *args), getattr(torch.nn.functional, function)(theirs, *args)
    y.sum().backward()
    want.sum().backward()
    np.testing.assert_array_equal(getattr(F, function)(Tensor(x, dtype=dtype), *args).numpy(), y.numpy())
    rtol = 1e-6 if dtype == 'float32' else 1e-14
    known = np.isfinite(x)
    np.testing.assert_allclose(y.numpy(), want.detach().numpy(), rtol=rtol, atol=rtol * 0.1 if 'hard' in name else tiny)
    np.testing.assert_allclose(ours.grad.numpy()[known], theirs.grad.numpy()[known], rtol=1e-6, atol=1e-7)


def test_a_negative_limit_of_softshrink_is_refused():
    with pytest.raises(ValueError, match='^softshrink: lambd: expected at least 0, got -1$'):
        F.softshrink(Tensor([1.0]), -1)


@pytest.mark.parametrize('name', ['asin', 'acos'])
def test_the_gradient_is_infinite_at_the_ends_of_the_domain_and_nan_beyond(name, torch):
    numbers = [1.0, -1.0, 1.5, -2.0, np.nan]
    x, t = Tensor(numbers, requires_grad=True), torch.tensor(numbers, requires_grad=True)
    y, z = getattr(x, name)(), getattr(t, name)()
    y.sum().backward()
    z.sum().backward()
    np.testing.assert_allclose(y.numpy(), z.detach().numpy(), rtol=1e-6)
    np.testing.assert_array_equal(x.grad.numpy(), t.grad.numpy())


def test_infinities_nan_and_whole_numbers():
    inf, nan = np.inf, np.nan
    assert Tensor([-inf, inf, -inf, 1.0]).logaddexp(Tensor([-inf, inf, inf, -inf])).tolist() == [-inf, inf, inf, 1.0]
    assert Tensor([inf, -inf]).asinh().tolist() == [inf, -inf]
    assert Tensor([50000, 3]).hypot(Tensor([50000, 4])).numpy() == pytest.approx(np.hypot([50000, 3], [50000, 4]))
    assert Tensor([inf, -inf, inf, -inf]).arctan2(Tensor([inf, inf, -inf, -inf])).numpy() == pytest.approx(
        np.arctan2([inf, -inf, inf, -inf], [inf, inf, -inf, -inf]))
    assert F.elu(Tensor([-1e-8, -1e-30])).numpy() == pytest.approx(np.float32([-1e-8, -1e-30]), rel=1e-6)
    assert Tensor([2**31 - 1]).log1p().tolist() == pytest.approx([np.log(2**31)])
    assert Tensor(np.ones((3, 0))).softmax(1).shape == Tensor(np.ones((3, 0))).log_softmax().shape == (3, 0)
    for function in (F.hardshrink, F.softshrink, lambda x: x.heaviside(0.5)):
        assert np.isnan(function(Tensor([nan])).numpy()).all()
    x = Tensor([2.0, 2.0], requires_grad=True)
    x.std().backward()
    assert (x.grad.numpy() == 0).all()


def test_group_norm_of_no_samples_and_of_single_values():
    w, b = (Tensor(np.ones(4, 'f'), requires_grad=True) for _ in range(2))
    for shape in ((0, 4), (0, 4, 3)):
        x = Tensor(np.ones(shape, 'f'), requires_grad=True)
        y = F.group_norm(x, 2, w, b)
        y.sum().backward()
        assert y.shape == x.grad.shape == shape and (w.grad.numpy() == 0).all()
    for shape, size in (((3, 4), 1), ((3, 4, 0), 0)):
        with pytest.raises(ValueError, match=f'group_norm: expected at least 2 values per group, got {size} for x of shape'):
            F.group_norm(np.ones(shape, 'f'), 4, w, b)


def test_functions_at_zero_vectors_zero_scores_and_negative_widths_are_pytorchs(torch):
    zeros, w = np.array([[0, 0, 0], [1, 2, 3]], np.float32), np.ones((2, 3), np.float32)
    mask, added = np.array([[True, False], [False, False]]), np.array([[0, -np.inf], [-np.inf, -np.inf]], np.float32)
    for call in (lambda F, make, x: F.normalize(x), lambda F, make, x: F.cosine_similarity(x, make(w))[1:],
                 lambda F, make, x: F.pad(x, (-1, 1)), lambda F, make, x: F.pad(x, (2, -1, -1, 0), value=3.0),
                 lambda F, make, x: F.scaled_dot_product_attention(x + 1, make(w), x, make(mask)),
                 lambda F, make, x: F.scaled_dot_product_attention(x + 1, make(w), x, make(added))):
        results = []
        for functions, make in ((F, Tensor), (torch.nn.functional, torch.tensor)):
            x = make(zeros).requires_grad_()
            y = call(functions, make, x)
            y.sum().backward()
            results.append((y.detach().numpy(), x.grad.numpy()))
        for got, want in zip(*results, strict=True):
            close(got, want)


@LARGE
def test_logsumexp_of_two_equal_numbers_has_the_gradient_one_half_however_large_they_are(c):
    y, dx = value_and_gradient(F.logsumexp, [c, c])
    assert abs(y - (np.float64(c) + np.log(2))) <= np.spacing(np.float32(abs(c))) and dx.tolist() == [0.5, 0.5]


@LARGE
@pytest.mark.parametrize('function', [*LOSSES, 'logsumexp'])
def test_gradients_of_large_logits_are_those_of_their_differences(function, c):
    """The gradient of a loss sums to 0 over a row, logsumexp's to 1."""
    eps, n = np.finfo(np.float32).eps, 40
    x = np.float32(c) - max(np.spacing(np.float32(abs(c))), 0.125) * np.random.default_rng(3).integers(0, 25, n)
    x = x.astype(np.float32)
    e = np.exp(x.astype(np.float64) - x.max())
    want = e / e.sum() - (np.eye(n)[0] if function in LOSSES else 0)
    _, dx = value_and_gradient(LOSSES.get(function, F.logsumexp), x)
    assert np.abs(dx - want).max() <= 4 * eps
    assert abs(dx.sum(dtype=np.float64) - want.sum()) <= 4 * eps


@pytest.mark.parametrize('case', [pytest.param(c, id=i) for c, i in zip(CASES, IDENTITIES, strict=True) if c.second])
def test_second_derivatives_are_those_of_torch(torch, case):
    xs, ts, ours, theirs = run(torch, case, create_graph=True)
    rng = np.random.default_rng(2)
    vs = [normal(rng, *g.shape) for g in theirs]
    second = grad(ours, xs, [Tensor(v) for v in vs], allow_unused=True)
    wanted = torch.autograd.grad(theirs, ts, [torch.tensor(v.astype(np.float64)) for v in vs], allow_unused=True)
    assert any(w is not None for w in wanted), 'there is nothing to compare'
    for g, w in zip(second, wanted, strict=True):
        if w is None or g is None:              # one of the two may say so, the other say it in zeros
            assert all(not np.any(one.numpy()) for one in (g, w) if one is not None)
        else:
            close(g.numpy(), w.numpy(), 1e-4)


@pytest.mark.parametrize('make', [lambda a: a.copy(), Tensor, lambda a: Tensor(a).array], ids=['numpy', 'Tensor', 'NDArray'])
def test_batch_norm_moves_running_statistics_in_place(torch, make):
    x, start = np.random.default_rng(0).standard_normal((4, 3, 5)).astype(np.float32), np.ones(3, np.float32)
    mean, var, twins = make(start), make(start), (torch.ones(3), torch.ones(3))
    F.batch_norm(x, mean, var, training=True, momentum=0.3)
    torch.nn.functional.batch_norm(torch.tensor(x), *twins, training=True, momentum=0.3)
    for ours, theirs in zip((mean, var), twins, strict=True):
        np.testing.assert_allclose(ours if isinstance(ours, np.ndarray) else ours.numpy(), theirs.numpy(), rtol=1e-5)


def test_batch_norm_refuses_running_statistics_that_it_cannot_update():
    with pytest.raises(ValueError, match='running_var: expected a contiguous array, which batch_norm updates; pass a copy'):
        F.batch_norm(np.ones((3, 2), np.float32), np.ones(2, np.float32), Tensor(np.ones(4, np.float32))[::2], training=True)


def test_batch_norm_in_evaluation_without_running_statistics_names_them():
    with pytest.raises(ValueError, match='batch_norm: running_mean and running_var: expected arrays in evaluation, got None'):
        F.batch_norm(Tensor(np.ones((3, 2), np.float32)), None, None)


@pytest.mark.parametrize('x', [-200.0, -30.0, 0.0, 30.0, 200.0])
@pytest.mark.parametrize('target', [0.0, 0.25, 1.0])
def test_binary_cross_entropy_of_logits_is_finite_and_exact_for_any_logit(x, target):
    y, dx = value_and_gradient(lambda x: F.binary_cross_entropy_with_logits(x, target), x)
    want = max(x, 0) - x * target + np.log1p(np.exp(-abs(x)))
    assert abs(y - want) <= 1e-6 * max(1, want) and abs(dx - (1 / (1 + np.exp(-x)) - target)) <= 1e-6


def test_binary_cross_entropy_of_0_and_1_is_limited_as_in_torch(torch):
    x, target = np.float32([0, 1, 0, 1, 0.5]), np.float32([0, 1, 1, 0, 1])
    ours = F.binary_cross_entropy(x, target, reduction='none').numpy()
    theirs = torch.nn.functional.binary_cross_entropy(torch.tensor(x), torch.tensor(target), reduction='none').numpy()
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_zeros_of_a_target_add_nothing_to_the_divergence(torch):
    x, target = np.log(np.float32([[0.5, 0.5], [0.25, 0.75]])), np.float32([[1, 0], [0.5, 0.5]])
    theirs = torch.nn.functional.kl_div(torch.tensor(x), torch.tensor(target), reduction='none').numpy()
    np.testing.assert_allclose(F.kl_div(x, target, 'none').numpy(), theirs, rtol=1e-6)


@pytest.mark.parametrize('call, message', [
    (lambda x: F.l1_loss(x, x, 'average'), "l1_loss: reduction: expected 'mean', 'sum' or 'none', got 'average'"),
    (lambda x: F.huber_loss(x, x, delta=0.0), 'huber_loss: delta: expected a positive number, got 0.0'),
    (lambda x: x.mm(x[0]), r'mm: expected two arrays of 2 axes, got shapes \(2, 3\) and \(3,\); matmul takes more shapes'),
    (lambda x: x[None].t(), r't: expected at most 2 axes, got shape \(1, 2, 3\); use mT or transpose')])
def test_what_these_functions_refuse(call, message):
    with pytest.raises(ValueError, match=message):
        call(Tensor(np.ones((2, 3), np.float32)))


def test_comparisons_by_name_are_masks():
    a, b = Tensor(np.float32([1, 2, 3])), np.float32([2, 2, 2])
    for name in ('eq', 'ne', 'lt', 'le', 'gt', 'ge'):
        assert getattr(a, name)(b).tolist() == getattr(operator, name)(a.numpy(), b).tolist()
    assert Tensor(np.float32([1, np.inf, -np.inf, np.nan])).isinf().tolist() == [False, True, True, False]
