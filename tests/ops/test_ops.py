"""One table of ops; every property below is checked for every row at every size.

A row builds the op and its arguments at any size, and has the same in PyTorch.  The formula in float64 is the op's own
`reference`.  `large` is a size that is worth several threads.  Every op of the package is also tested on its own `example`; a
row adds sizes, PyTorch, threads and bad arguments.
`make test-all` runs this file on each instruction set and on the emulated CUDA library.
"""
import functools
import inspect
import itertools
import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from places import get, launch, of_threads, put

from pyops import backend
from pyops.backend import library
from pyops.differences import Row, central_differences, every_op, settings_of
from pyops.ops import (
    GRU,
    Attention,
    BatchNorm,
    ConcatContext,
    CrossEntropy,
    Dropout,
    Embedding,
    EmbeddingGRU,
    FeedForward,
    LayerNorm,
    Linear,
    LinearCrossEntropy,
    MLPGradients,
    PixelLinear,
    Positions,
    ReLU,
    Residual,
    sequence_lengths,
)
from pyops.ops.array import ArrayOp
from pyops.ops.attention import dropout_factors, visible
from pyops.params import Parameter
from pyops.philox import dropout_mask, philox4x32
from pyops.quantization import Recipe


@dataclass
class Built:
    """An op ready to run: float inputs and parameters by name, and constants (ids, labels, step) that have no gradient."""
    op: Any
    inputs: dict
    params: dict
    constants: dict = field(default_factory=dict)

    def arguments(self):
        """What forward takes, in its order: ids come first, other constants last."""
        return dict(sorted((self.inputs | self.constants).items(), key=lambda item: item[0] != 'ids'))


def normal(rng, *shape, scale=1.0):
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def labels_with_masked_rows(rng, shape, classes, ignore):
    labels = rng.integers(0, classes, shape).astype(np.int32)
    labels[rng.random(shape) < 0.25] = ignore
    return labels


class LinearRow:
    name = 'linear'
    sizes = ((1, 1, 1), (3, 5, 7), (6, 16, 256), (7, 17, 257), (13, 32, 40), (64, 100, 96))      # R, O, I
    large = (901, 100, 96)

    def build(self, size, rng):
        *shape, O, I = size
        params = dict(weight=normal(rng, O, I), bias=normal(rng, O))
        return Built(Linear, dict(x=normal(rng, *shape, I)), params)

    def torch(self, torch, x, weight, bias=None):
        return torch.nn.functional.linear(x, weight, bias)


class LinearOfSequencesRow(LinearRow):
    name = 'linear-of-sequences'
    sizes = ((1, 1, 1, 1), (2, 3, 5, 7), (3, 5, 17, 33), (4, 16, 40, 257))                        # T, B, O, I
    large = (9, 101, 100, 96)


class LinearWithoutBiasRow(LinearRow):
    name = 'linear-without-bias'

    def build(self, size, rng):
        built = super().build(size, rng)
        del built.params['bias']
        return built


class FeedForwardRow:
    name = 'feed_forward'
    sizes = ((1, 1, 1, 1), (2, 3, 4, 7), (1, 5, 17, 16), (4, 7, 33, 257), (3, 16, 64, 100))       # T, B, D, F
    large = (9, 101, 100, 96)

    def build(self, size, rng):
        T, B, D, F = size
        params = dict(w1=normal(rng, F, D), b1=normal(rng, F), w2=normal(rng, D, F), b2=normal(rng, D))
        x = normal(rng, T, B, D)
        for _ in range(100):                    # away from the kink
            near = np.abs(Linear.reference(x.astype(np.float64), params['w1'], params['b1'])).min(-1) < 1e-3
            x[near] = normal(rng, near.sum(), D)
        assert not near.any()
        return Built(FeedForward, dict(x=x), params)

    def torch(self, torch, x, w1, b1, w2, b2):
        linear = torch.nn.functional.linear
        return linear(torch.relu(linear(x, w1, b1)), w2, b2)


class LayerNormRow:
    name = 'layer_norm'
    sizes = ((1, 1, 3), (2, 3, 5), (3, 5, 33), (2, 70, 8), (4, 40, 257))                          # T, B, C
    large = (9, 101, 300)

    def build(self, size, rng):
        C = size[-1]
        return Built(LayerNorm, dict(x=normal(rng, *size) + np.float32(0.5)), dict(weight=normal(rng, C), bias=normal(rng, C)))

    def torch(self, torch, x, weight, bias):
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias)


class PositionsRow:
    name = 'positions'
    sizes = ((1, 1, 1), (2, 3, 5), (4, 7, 16), (3, 1, 33), (20, 7, 64))                           # T, B, D
    large = (9, 101, 300)
    SCALE = 1.75

    def build(self, size, rng):
        return Built(lambda: Positions(size[-1], scale=self.SCALE), dict(x=normal(rng, *size)), {})

    def torch(self, torch, x):
        T, _, D = x.shape
        angles = torch.arange(T, dtype=torch.float64).outer(10000 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D))
        return self.SCALE * x + torch.stack([angles.sin(), angles.cos()], -1).reshape(T, 1, -1)[..., :D]


class BatchNormRow:
    wrong_axis = {'running_mean': 0, 'running_var': 0}
    sizes = ((4, 1), (3, 5), (70, 33), (129, 8), (40, 257))                                       # R, C
    large = (301, 300)

    def __init__(self, training):
        self.name, self.training = f'batch_norm{"" if training else "-evaluation"}', training

    def build(self, size, rng):
        C = size[-1]
        running = {} if self.training else dict(running_mean=normal(rng, C), running_var=normal(rng, C) ** 2 + np.float32(0.1))
        return Built(lambda **p: BatchNorm(**p, training=self.training), dict(x=normal(rng, *size) + np.float32(0.5)),
                     dict(weight=normal(rng, C), bias=normal(rng, C)), running)

    def torch(self, torch, x, weight, bias, running_mean=None, running_var=None):
        running = (None, None) if self.training else (running_mean.double(), running_var.double())
        return torch.nn.functional.batch_norm(x, *running, weight, bias, self.training)


class PixelLinearRow:
    name = 'pixel_linear'
    wrong_axis = {'rows': None}             # any length will do
    sizes = ((1, 1, 1, 1), (5, 3, 9, 4), (9, 7, 17, 33), (6, 40, 784, 30), (3, 2, 2100, 40))      # N, B, I, O
    large = (300, 401, 784, 30)

    def build(self, size, rng):
        N, B, I, O = size
        table = (rng.integers(0, 256, (N, I)) * (rng.random((N, I)) < 0.3)).astype(np.uint8)
        table[0, 0] = 255
        rows = rng.integers(0, N, B)
        rows[0] = 0
        params = dict(weight=normal(rng, I, O), bias=normal(rng, O))
        return Built(PixelLinear, {}, params, dict(table=table, rows=rows))

    def torch(self, torch, weight, bias, table, rows):
        return table[rows].double() / 255 @ weight + bias


class MLPGradientsRow:
    name = 'mlp_gradients'
    wrong_axis = {'rows': None}             # any length will do
    sizes = ((1, 1, 1, 1, 1), (4, 3, 5, 3, 2), (9, 7, 17, 33, 5), (6, 40, 784, 30, 10), (3, 2, 2100, 40, 17),
             (5, 130, 20, 128, 128))                                                             # N, B, I, H, C
    large = (300, 401, 784, 30, 10)

    def build(self, size, rng):
        N, B, I, H, C = size
        images = (rng.integers(0, 256, (N, I)) * (rng.random((N, I)) < 0.3)).astype(np.uint8)
        images[0, 0] = 255
        rows, labels = rng.integers(0, N, B), rng.integers(0, C, N).astype(np.int32)
        rows[0] = 0
        params = dict(w1=normal(rng, I, H, scale=2 / np.sqrt(I)), b1=normal(rng, H), w2=normal(rng, C, H), b2=normal(rng, C))
        for _ in range(100):                    # away from the kink
            near = np.abs(images[rows] / 255 @ params['w1'] + params['b1']).min(0) < 1e-3
            params['b1'][near] = normal(rng, near.sum())
        assert not near.any()
        return Built(MLPGradients, {}, params, dict(images=images, rows=rows, labels=labels))

    def torch(self, torch, w1, b1, w2, b2, images, rows, labels):
        r = torch.relu(images[rows].double() / 255 @ w1 + b1)
        return torch.nn.functional.cross_entropy(r @ w2.T + b2, labels[rows].long()).reshape(1)


class ReLURow:
    name = 'relu'
    wrong_axis = {'x': None}                # any shape will do
    sizes = ((1,), (2, 3), (5, 17), (40, 1001))
    large = (300, 1001)

    def build(self, size, rng):
        x = normal(rng, *size)
        return Built(ReLU, dict(x=np.where(np.abs(x) < 1e-3, np.float32(1e-3), x)), {})     # away from the kink

    def torch(self, torch, x):
        return torch.relu(x)


class EmbeddingRow:
    name = 'embedding'
    wrong_axis = {'ids': None}              # any shape will do
    sizes = ((1, 1, 1, 1), (2, 3, 5, 4), (9, 16, 7, 33), (9, 64, 50, 64))                         # T, B, V, E
    large = (9, 461, 50, 64)

    def build(self, size, rng):
        T, B, V, E = size
        ids = rng.integers(0, V, (T, B)).astype(np.int32)
        return Built(Embedding, {}, dict(weight=normal(rng, V, E)), dict(ids=ids))

    def torch(self, torch, weight, ids):
        return torch.nn.functional.embedding(ids.long(), weight)


class SparseEmbeddingRow(EmbeddingRow):
    """An embedding that also says which rows it adds to; several share a block, or, in the third size, have two."""
    name = 'embedding-sparse'
    sizes = ((1, 1, 1, 1), (2, 3, 5, 4), (3, 4, 90, 99), (9, 64, 50, 64))

    def build(self, size, rng):
        built = super().build(size, rng)
        words = np.zeros(-(-built.params['weight'].size // library.cpu().lib.PYOPS_GRAD_BLOCK), np.int32)
        built.op = lambda weight: Embedding(weight._replace(touched=put(words)))
        return built


class DropoutRow:
    name = 'dropout'
    wants_op = True
    wrong_axis = {'x': None}
    sizes = ((1, 0.2), (3, 0.5), (257, 0.2), (4097, 0.0), (9000, 0.9))                            # n, p
    large = (70_001, 0.3)

    def build(self, size, rng):
        n, p = size
        return Built(lambda: Dropout(p, 0x0123456789ABCDEF), dict(x=normal(rng, n)), {}, dict(step=np.array([7 + (3 << 32)])))

    def keep(self, op, n):
        return dropout_mask(n, op.p, 7 + (3 << 32), op.key) / (1 - op.p)

    def torch(self, torch, x, step, op):
        return x * torch.tensor(self.keep(op, x.numel()))


class ResidualRow:
    sizes = ((1,), (2, 3), (3, 5, 17), (9, 1001))
    large = (70, 4001)
    STEP, P, KEY = 7 + (3 << 32), 0.3, 0x0123456789ABCDEF

    def __init__(self, with_dropout):
        self.name, self.with_dropout = f'residual{"-dropout" if with_dropout else ""}', with_dropout

    def build(self, size, rng):
        return Built(lambda: Residual(self.P, self.KEY), dict(x=normal(rng, *size), branch=normal(rng, *size)), {},
                     dict(step=np.array([self.STEP])) if self.with_dropout else {})

    def kept(self, shape):
        if not self.with_dropout:
            return np.ones(shape)
        return dropout_mask(int(np.prod(shape)), self.P, self.STEP, self.KEY).reshape(shape) / (1 - self.P)

    def torch(self, torch, x, branch, step=None):
        return x + branch * torch.tensor(self.kept(x.shape))


class ConcatContextRow:
    name = 'concat_context'
    wrong_axis = {'x': 1, 'context': 0}     # the last axis may have any length: double the batch
    sizes = ((1, 1, 1, 1), (2, 3, 4, 5), (9, 17, 33, 16), (9, 64, 32, 64))                        # T, B, E, H
    large = (9, 257, 65, 64)

    def build(self, size, rng):
        T, B, E, H = size
        return Built(ConcatContext, dict(x=normal(rng, T, B, E), context=normal(rng, B, H)), {})

    def torch(self, torch, x, context):
        return torch.cat([x, context.expand(len(x), -1, -1)], -1)


class GRURow:
    sizes = ((1, 1, 1, 1), (2, 3, 4, 5), (3, 7, 17, 16), (4, 13, 8, 33), (9, 24, 40, 64))         # T, B, I, H
    large = (9, 251, 40, 64)

    def __init__(self, reset_before, with_h0, with_lengths=False):
        self.name = (f'gru-reset-{"before" if reset_before else "after"}{"" if with_h0 else "-no-h0"}'
                     f'{"-lengths" if with_lengths else ""}')
        self.reset_before, self.with_h0, self.with_lengths = reset_before, with_h0, with_lengths

    def build(self, size, rng):
        T, B, I, H = size
        scale = 1 / np.sqrt(H)
        params = dict(w_ih=normal(rng, 3 * H, I, scale=scale), w_hh=normal(rng, 3 * H, H, scale=scale),
                      b_ih=normal(rng, 3 * H), b_hh=normal(rng, 3 * H))
        inputs = dict(x=normal(rng, T, B, I))
        if self.with_h0:
            inputs['h0'] = normal(rng, B, H)
        return Built(lambda **p: GRU(**p, reset_before=self.reset_before), inputs, params, self.lengths(T, B, rng))

    def lengths(self, T, B, rng):
        """One sentence with all steps, one with none, and the others between."""
        if not self.with_lengths:
            return {}
        lengths = rng.integers(0, T + 1, B).astype(np.int32)
        lengths[0], lengths[1:2] = T, 0
        return dict(lengths=lengths)

    def torch(self, torch, x, w_ih, w_hh, b_ih, b_hh, h0=None, lengths=None):
        if lengths is not None:
            return self.torch(torch, x, w_ih, w_hh, b_ih, b_hh, h0) * (torch.arange(len(x))[:, None, None] < lengths[:, None])
        H = w_hh.shape[1]
        if not self.reset_before:
            twin = torch.nn.GRU(x.shape[2], H, dtype=torch.float64)
            names = dict(weight_ih_l0=w_ih, weight_hh_l0=w_hh, bias_ih_l0=b_ih, bias_hh_l0=b_hh)
            return torch.func.functional_call(twin, names, (x, None if h0 is None else h0[None]))[0]
        h, out = torch.zeros(x.shape[1], H, dtype=torch.float64) if h0 is None else h0, []
        for x_t in x:
            a = x_t @ w_ih.T + b_ih
            r, z = torch.sigmoid(a[:, :2*H] + h @ w_hh[:2*H].T + b_hh[:2*H]).split(H, 1)
            n = torch.tanh(a[:, 2*H:] + (r * h) @ w_hh[2*H:].T + b_hh[2*H:])
            h = (1 - z) * n + z * h
            out.append(h)
        return torch.stack(out)


class EmbeddingGRURow:
    """context, with_h0 and with_lengths False leave them out."""
    sizes = ((1, 1, 1, 1, 1, 1), (2, 3, 4, 5, 3, 2), (3, 7, 17, 6, 10, 16), (9, 24, 40, 24, 16, 64),
             (4, 13, 700, 8, 5, 33))                                                             # T, B, V, E, C, H
    large = (9, 251, 300, 24, 16, 64)

    def __init__(self, reset_before, context, with_h0, with_lengths=False):
        self.name = (f'embedding_gru-reset-{"before" if reset_before else "after"}{"" if context else "-no-context"}'
                     f'{"" if with_h0 else "-no-h0"}{"-lengths" if with_lengths else ""}')
        self.gru, self.context, self.with_h0 = GRURow(reset_before, with_h0, with_lengths), context, with_h0
        # of ids any shape will do where nothing stands beside them
        self.wrong_axis = {} if context or with_h0 or with_lengths else {'ids': None}

    def build(self, size, rng):
        T, B, V, E, C, H = size
        built = self.gru.build((T, B, E + C if self.context else E, H), rng)
        constants = dict(ids=rng.integers(0, V, (T, B)).astype(np.int32))
        constants['ids'][T // 2:, B // 2:] = V - 1              # as padding, which is the token of many positions
        inputs = dict(context=normal(rng, B, C)) if self.context else {}
        if self.with_h0:
            inputs['h0'] = built.inputs['h0']

        def make(**parameters):
            return EmbeddingGRU(**parameters, reset_before=self.gru.reset_before)
        return Built(make, inputs, dict(table=normal(rng, V, E)) | built.params, constants | built.constants)

    def input_of(self, table, ids, context, concatenate):
        x = table[ids]
        return x if context is None else concatenate([x, context + 0 * x[..., :1]], -1)

    def torch(self, torch, table, w_ih, w_hh, b_ih, b_hh, ids, context=None, h0=None, lengths=None):
        x = self.input_of(table, ids.long(), context, torch.cat)
        return self.gru.torch(torch, x, w_ih, w_hh, b_ih, b_hh, h0, lengths)


class AttentionRow:
    """lengths None leaves them out, with step; 'full' masks nothing; 'any' has sentences of 0 and of all words."""
    sizes = ((1, 1, 1, 1, 1), (3, 5, 2, 2, 4), (5, 3, 2, 1, 7), (6, 6, 1, 2, 4), (4, 9, 3, 2, 16), (9, 9, 3, 4, 64),
             (2, 130, 2, 2, 33), (64, 64, 2, 1, 20), (70, 130, 2, 2, 5), (130, 70, 2, 1, 17),
             (5, 6, 1, 1, 300))                                                                  # Tq, Tk, B, heads, C
    large = (33, 65, 23, 3, 31)
    wants_op = True
    wrong_axis = {'k': 1, 'v': 0}           # of q the last axis, of k any number of rows would do

    def __init__(self, causal=False, p=0.0, lengths=None):
        self.name = 'attention' + '-causal' * causal + '-dropout' * (p > 0) + f'-lengths-{lengths}' * bool(lengths)
        self.causal, self.p, self.lengths = causal, p, lengths

    def build(self, size, rng):
        Tq, Tk, B, heads, C = size
        q, k, v = (normal(rng, T, B, heads * C) for T in (Tq, Tk, Tk))
        constants = {}
        if self.lengths:
            lengths = np.full(B, Tk, np.int32)
            if self.lengths == 'any' and B > 1:
                lengths[:-1] = rng.integers(0, Tk + 1, B - 1)
                lengths[0] = 0
            constants = dict(lengths=lengths, step=np.array([7 + (3 << 32)]))
        return Built(lambda: Attention(heads, self.causal, self.p, 0x0123456789ABCDEF), dict(q=q, k=k, v=v), {}, constants)

    def keep(self, Tq, Tk, B, heads):
        return dropout_factors(B, heads, Tq, Tk, self.p, 7 + (3 << 32), 0x0123456789ABCDEF) if self.p else 1.0

    def torch(self, torch, q, k, v, op, lengths=None, step=None):
        (Tq, B, D), Tk = q.shape, len(k)
        lengths = np.full(B, Tk) if lengths is None else lengths.numpy()
        q, k, v = (x.reshape(len(x), B, op.heads, D // op.heads).permute(1, 2, 0, 3) for x in (q, k, v))
        seen = torch.tensor(visible(Tq, Tk, lengths, self.causal).copy())
        some = seen.any(-1, keepdim=True)           # a query that sees nothing would be NaN: let it see all, and take it out
        if self.p:
            scores = (q @ k.transpose(2, 3) / (D // op.heads)**0.5).masked_fill(~(seen | ~some), -torch.inf)
            y = scores.softmax(-1) * torch.tensor(self.keep(Tq, Tk, B, op.heads)) @ v
        else:
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen | ~some)
        return (y * some).permute(2, 0, 1, 3).reshape(Tq, B, D)


class CrossEntropyRow:
    name, smoothing = 'cross_entropy', 0.0
    wrong_axis = {'x': 0}
    sizes = ((1, 2), (3, 5), (8, 17), (33, 100), (20, 1001))                                      # R, C
    large = (81, 1001)

    def build(self, size, rng):
        R, C, *_ = size
        labels = labels_with_masked_rows(rng, R, C, -1)
        labels[0] = C - 1
        return Built(lambda: CrossEntropy(smoothing=self.smoothing), dict(x=self.logits(size, labels, rng)), {},
                     dict(labels=labels))

    def logits(self, size, labels, rng):
        return normal(rng, *size, scale=3)

    def torch(self, torch, x, labels):
        return torch.nn.functional.cross_entropy(x, labels.long(), ignore_index=-1, label_smoothing=self.smoothing).reshape(1)


class SmoothedCrossEntropyRow(CrossEntropyRow):
    name, smoothing, sizes = 'cross_entropy-smoothed', 0.1, ((1, 2), (3, 5), (33, 100), (20, 1001))


def below(top, shape, rng):
    """float32 numbers from 0 to 3 below top, exact, and many of them equal; where floats are farther apart, 24 of these."""
    step = max(np.spacing(np.float32(top)), np.float32(0.125))
    return np.float32(top) - step * rng.integers(0, 25, shape).astype(np.float32)


class LargeCrossEntropyRow(CrossEntropyRow):
    """Rows just below a large number; every fifth from the second on is all equal, has one huge logit, is as far below 0."""
    sizes = ((1, 2, 1e2), (3, 2, 1e2), (9, 5, 1e4), (12, 17, 1e9), (33, 100, 1e4), (20, 1001, 1e2))       # R, C, top
    large = (81, 1001, 1e4)

    def __init__(self, smoothing=0.0):
        self.name, self.smoothing = f'cross_entropy-large{"-smoothed" if smoothing else ""}', smoothing

    def logits(self, size, labels, rng):
        R, C, top = size
        x = below(top, (R, C), rng)
        x[1::5] = top
        x[2::5] = normal(rng, *x[2::5].shape)
        x[2::5, 0] = top
        labels[2::5][labels[2::5] >= 0] = 0         # a loss of 1e9 would hide those of the other rows
        x[3::5] *= -1
        return x


class LinearCrossEntropyRow:
    name, smoothing = 'linear_cross_entropy', 0.0
    sizes = ((1, 1, 1, 2), (3, 4, 6, 5), (2, 7, 16, 33), (3, 60, 40, 150), (5, 70, 17, 1100))     # T, B, D, V
    large = (7, 75, 17, 1100)

    def build(self, size, rng):
        T, B, D, V = size
        labels = labels_with_masked_rows(rng, (T, B), V, 0)
        labels[0, 0] = V - 1
        params = dict(weight=normal(rng, V, D), bias=normal(rng, V))
        return Built(lambda **p: LinearCrossEntropy(**p, ignore=0, smoothing=self.smoothing), dict(x=normal(rng, T, B, D)),
                     params, dict(labels=labels))

    def torch(self, torch, x, weight, bias, labels):
        logits = torch.nn.functional.linear(x, weight, bias).reshape(labels.numel(), -1)
        return torch.nn.functional.cross_entropy(logits, labels.reshape(-1).long(), ignore_index=0,
                                                 label_smoothing=self.smoothing).reshape(1)


class SmoothedLinearCrossEntropyRow(LinearCrossEntropyRow):
    name, smoothing = 'linear_cross_entropy-smoothed', 0.1


class LargeLinearCrossEntropyRow(LinearCrossEntropyRow):
    """Biases just below 1e4.  All numbers are multiples of powers of 2 for which logits have no rounding in float32."""

    def __init__(self, smoothing=0.0):
        self.name, self.smoothing = f'linear_cross_entropy-large{"-smoothed" if smoothing else ""}', smoothing

    def build(self, size, rng):
        built = super().build(size, rng)
        for arrays, step in ((built.inputs, 4), (built.params, 8)):
            arrays |= {name: np.rint(step * value) / np.float32(step) for name, value in arrays.items()}
        built.params['bias'] = below(1e4, size[-1], rng)
        return built


class ExampleRow:
    """The example of an op class, which has one size."""
    sizes = ((1,),)

    def __init__(self, op):
        self.name, self.op = f'{op.__name__}-example', op

    def build(self, size, rng):
        given, named = self.op.example(functools.partial(normal, rng))
        _, *names = inspect.signature(self.op.forward).parameters
        inputs = {name: value for name, value in zip(names, given, strict=False) if isinstance(value, np.ndarray)}
        params = {name: value for name, value in named.items() if isinstance(value, np.ndarray)}
        settings = {name: value for name, value in named.items() if name not in params}
        floats = {name: value for name, value in inputs.items() if value.dtype == np.float32}
        return Built(lambda **parameters: self.op(**parameters, **settings), floats, params,
                     {name: value for name, value in inputs.items() if name not in floats})


class InProductsRow:
    """The rounded variant of another row's op, which is made of single products, with a recipe that rounds nothing."""

    def __init__(self, row, *sizes, recipe=None):
        self.row, self.name, self.sizes, self.recipe = row, f'{row.name}-in-products', sizes, recipe or Recipe()

    def __getattr__(self, name):
        return getattr(self.row, name)

    def build(self, size, rng):
        built = self.row.build(size, rng)

        def op(**parameters):
            plain = built.op(**parameters)
            # every op is made of what it keeps under the names of its constructor's arguments
            arguments = inspect.signature(type(plain)).parameters
            return type(plain).rounded()(**{name: getattr(plain, name) for name in arguments}, recipe=self.recipe)
        return Built(op, built.inputs, built.params, built.constants)


TABLE = [LinearRow(), PixelLinearRow(), MLPGradientsRow(), ReLURow(), EmbeddingRow(), SparseEmbeddingRow(), DropoutRow(),
         ConcatContextRow(), CrossEntropyRow(), LinearCrossEntropyRow(),
         AttentionRow(), AttentionRow(causal=True), AttentionRow(lengths='any'), AttentionRow(p=0.3, lengths='full'),
         AttentionRow(True, 0.3, 'any'),
         *(GRURow(before, h0) for before in (False, True) for h0 in (True, False)),
         *(EmbeddingGRURow(before, True, h0) for before in (False, True) for h0 in (True, False)),
         EmbeddingGRURow(False, False, False),
         *(GRURow(before, True, True) for before in (False, True)),
         *(EmbeddingGRURow(before, True, True, True) for before in (False, True)),
         *(ResidualRow(with_dropout) for with_dropout in (False, True)),
         LinearOfSequencesRow(), LinearWithoutBiasRow(), FeedForwardRow(), LayerNormRow(),
         PositionsRow(), SmoothedLinearCrossEntropyRow(),
         *(BatchNormRow(training) for training in (True, False)),
         SmoothedCrossEntropyRow(),
         *(row(smoothing) for row in (LargeCrossEntropyRow, LargeLinearCrossEntropyRow) for smoothing in (0.0, 0.1)),
         *(InProductsRow(row, (3, 5, 2, 2, 4), (1, 6, 2, 1, 5), (9, 7, 2, 2, 33), (6, 150, 1, 2, 4)) for row in (
             AttentionRow(lengths='any'), AttentionRow(True, 0.3, 'any'))),
         *(InProductsRow(GRURow(before, h0), (2, 3, 4, 5), (4, 13, 8, 33)) for before in (False, True) for h0 in (True, False)),
         InProductsRow(EmbeddingGRURow(False, True, True), (2, 3, 4, 5, 3, 2), (4, 13, 30, 8, 5, 33)),
         InProductsRow(EmbeddingGRURow(True, False, False), (2, 3, 4, 5, 3, 2), (4, 13, 30, 8, 5, 33)),
         *(InProductsRow(row, (3, 4, 6, 5), (3, 60, 40, 150)) for row in (
             SmoothedLinearCrossEntropyRow(), LargeLinearCrossEntropyRow(0.1))),
         InProductsRow(PixelLinearRow(), (5, 3, 9, 4), (6, 40, 784, 30)),
         InProductsRow(LinearOfSequencesRow(), (2, 3, 5, 7), (3, 5, 17, 33)),
         InProductsRow(FeedForwardRow(), (2, 3, 4, 7), (1, 5, 17, 16))]
EXAMPLES = [pytest.param(row, row.sizes[0], id=row.name)
            for row in (ExampleRow(op) for op in every_op() if not issubclass(op, ArrayOp))]
EACH = [pytest.param(row, size, id=f'{row.name}-{"x".join(map(str, size))}') for row in TABLE for size in row.sizes]
SMALL = [p for p in EACH if np.prod([s for s in p.values[1] if s >= 1]) <= 700]
FIRST = [pytest.param(row, row.sizes[1], id=row.name) for row in TABLE]

RTOL = 2e-5         # of float32 sums against float64, relative to the largest element


def close(got, want, rtol=RTOL, name='y'):
    """Fail with the worst element unless all of `got` is near `want`, relative to the largest element of that."""
    want = np.asarray(want)
    assert got.shape == want.shape, name
    row = Row.of(name, got, want, rtol)
    assert row.ok, f'{name}: at {list(row.at)} got {row.got:.8g}, want {row.want:.8g}: error {row.error:.2e} > {rtol:.0e}'


def parameter(name, value, grad=None):
    """A Parameter where arrays are made; without a gradient it has one of zeros."""
    return Parameter(name, put(value), put(np.zeros_like(value) if grad is None else grad))


def of_zeros(name, *shape):
    return parameter(name, np.zeros(shape, np.float32))


class Run:
    """One forward and one backward of a row, with a random upstream gradient and parameter gradients that start as noise.

    The op has its arrays where arrays are made: `place` brings one there.  What is kept here is numpy's.
    """

    def __init__(self, row, size, backward=True, place=put):
        self.row, self.built = row, row.build(size, np.random.default_rng(0))
        b, rng = self.built, np.random.default_rng(1)
        self.noise = {name: normal(rng, *value.shape) for name, value in b.params.items()}
        self.params = {name: Parameter(name, place(value), put(self.noise[name].copy())) for name, value in b.params.items()}
        self.op = b.op(**self.params)
        self.placed = {name: place(value) for name, value in b.arguments().items()}
        y, self.ctx = self.op.forward(*self.placed.values())
        self.y = get(y)
        self.dy = normal(rng, *self.y.shape)
        if backward:
            self.grads = self.backward()

    def backward(self):
        """-> gradients of the inputs by name, then what was added to the gradients of the parameters."""
        before = {name: get(p.grad).copy() for name, p in self.params.items()}
        result = self.op.backward(put(self.dy), self.ctx)
        result = result if isinstance(result, tuple) else (result,)
        grads = dict(zip(self.built.inputs, (get(dx) for dx in result if dx is not None), strict=True))
        return grads | {name: get(p.grad) - before[name] for name, p in self.params.items()}

    def variables(self):
        """What has a gradient, in float64."""
        return {name: a.astype(np.float64) for name, a in (self.built.inputs | self.built.params).items()}

    def reference(self, variables):
        """What the formula of the op gives, called as forward is."""
        inputs = [variables.get(name, value) for name, value in self.built.arguments().items()]
        parameters = {name: variables[name] for name in self.params}
        return self.op.reference(*inputs, **settings_of(self.op) | parameters)

    def extra(self):
        """The op itself, for twins in PyTorch that need more of it than its parameters."""
        return {'op': self.op} if getattr(self.row, 'wants_op', False) else {}


@pytest.mark.parametrize('row,size', [*EACH, *EXAMPLES])
def test_forward_equals_the_formula_in_float64(row, size):
    run = Run(row, size, backward=False)
    close(run.y, run.reference(run.variables()))


@pytest.mark.parametrize('row,size', [*SMALL, *EXAMPLES])
def test_backward_equals_central_differences(row, size):
    """Differentiates the float64 reference, so steps can be small; the kernel only has to agree with it."""
    run = Run(row, size)
    variables = run.variables()
    for name, value in variables.items():
        numeric = central_differences(lambda: (run.reference(variables) * run.dy).sum(), value)
        if max(size) > 1:
            assert np.abs(numeric).max() > 1e-3, f'{name}: the check is vacuous'
        close(run.grads[name], numeric, 5e-5, f'd {name}')


@pytest.mark.parametrize('row,size', EACH)
def test_forward_and_backward_equal_torch(row, size, torch):
    run = Run(row, size)
    leaves = {name: torch.tensor(a, requires_grad=True) for name, a in run.variables().items()}
    constants = {name: torch.tensor(a) for name, a in run.built.constants.items()}
    y = row.torch(torch, **leaves, **constants, **run.extra())
    close(run.y, y.detach().numpy())
    y.backward(torch.tensor(run.dy.astype(np.float64)))
    for name, leaf in leaves.items():
        close(run.grads[name], leaf.grad.numpy(), 5e-5, f'd {name}')


@pytest.mark.parametrize('row,size', [*EACH, *EXAMPLES])
def test_parameter_gradients_add_and_activation_gradients_overwrite(row, size):
    run = Run(row, size)
    again = run.backward()
    for name, grad in run.grads.items():
        if name in run.params:
            total = run.noise[name] + 2 * grad          # whose size is what rounding is relative to
            err = np.abs(get(run.params[name].grad) - total).max()
            assert err <= 1e-6 * (np.abs(run.noise[name]).max() + np.abs(total).max()), (name, err)
            assert np.abs(again[name] - grad).max() <= 1e-6 * (np.abs(run.noise[name]).max() + np.abs(total).max()), name
        else:
            assert (again[name] == grad).all()


GUARD = {np.dtype(t): value for t, value in (
    (np.float32, -7.25), (np.int32, -725), (np.int64, -725), (np.uint8, 201), (np.uint16, 7777))}


@pytest.mark.parametrize('row,size', [*EACH, *EXAMPLES])
def test_writes_stay_inside_and_nothing_uninitialised_is_read(row, size, guard=33):
    """Every array an op asks for lies between guard zones, starts as NaN and at an odd float; inputs keep their bits."""
    zones = []

    def guarded(array):
        zone = np.full(array.size + 2 * guard, GUARD[array.dtype], array.dtype)
        zone[guard:guard + array.size] = array.reshape(-1)
        zones.append((put(zone), array.size))
        return zones[-1][0][guard:guard + array.size].reshape(array.shape)

    def allocate(shape, dtype, name=''):
        return guarded(np.full(shape, np.nan if dtype == np.float32 else 99, dtype))

    plain = Run(row, size)
    with backend.hooks(allocate):
        run = Run(row, size, place=guarded)
    given = run.placed | {name: p.value for name, p in run.params.items()}
    assert len(zones) > len(given), 'the op asked for no array: the check is vacuous'
    for zone, n in ((get(zone), n) for zone, n in zones):
        for side in (zone[:guard], zone[guard + n:]):
            assert (side == GUARD[zone.dtype]).all(), 'a guard zone was written'
    for name, array in (run.built.inputs | run.built.params | run.built.constants).items():
        assert (get(given[name]) == array).all(), f'{name} was changed'
    assert (run.y == plain.y).all()
    for name, grad in run.grads.items():
        assert np.isfinite(grad).all() and (grad == plain.grads[name]).all(), name


@of_threads
@pytest.mark.parametrize('row,size', [*(pytest.param(row, row.large, id=row.name) for row in TABLE),
                                      pytest.param(AttentionRow(True, 0.3, 'any'), (9, 7, 65, 4, 64), id='short attention')])
def test_same_bits_for_any_number_of_threads(row, size):
    before = backend.threads()
    try:
        runs = []
        for threads in (1, 2, 3, 8):
            backend.set_threads(threads)
            runs.append(Run(row, size))
    finally:
        backend.set_threads(before)
    for run in runs[1:]:
        assert (run.y == runs[0].y).all()
        for name, grad in run.grads.items():
            assert (grad == runs[0].grads[name]).all(), name


@pytest.mark.parametrize('row,size', FIRST)
def test_bad_arguments_are_refused_by_name(row, size):
    built = row.build(size, np.random.default_rng(0))
    op = built.op(**{name: parameter(name, value) for name, value in built.params.items()})
    arguments = built.arguments()
    placed = {name: put(array) for name, array in arguments.items()}
    for name, array in arguments.items():
        def call(bad, name=name):
            return op.forward(*(placed | {name: put(bad)}).values())
        with pytest.raises(TypeError, match=name):
            call(np.zeros(array.shape, np.float16))
        if array.ndim > 1:
            with pytest.raises(TypeError, match=name):
                call(put(np.asfortranarray(np.repeat(array, 2, -1)))[..., ::2])
        axis = getattr(row, 'wrong_axis', {}).get(name, -1)
        if axis is not None:
            with pytest.raises(ValueError, match='want shape'):
                call(np.concatenate([array, array], axis))
    y, ctx = op.forward(*placed.values())
    with pytest.raises(TypeError, match='dy|dh|dloss'):
        op.backward(put(np.zeros(y.shape, np.float64)), ctx)
    if row.name != 'dropout':
        with pytest.raises(ValueError, match='dy|dh|dloss'):
            op.backward(put(np.zeros((*y.shape[:-1], y.shape[-1] + 1), np.float32)), ctx)


# ---- what only some ops have ------------------------------------------------------------------

def test_ids_outside_the_table_are_refused_with_their_position():
    for bad in (-1, 4):
        with pytest.raises(ValueError, match=rf'ids\[2\]={bad}, want 0 to 3'):
            Embedding(of_zeros('weight', 4, 2)).forward(put(np.array([0, 3, bad], np.int32)))
        gru = EmbeddingGRU(*(of_zeros(str(shape), *shape) for shape in ((4, 2), (9, 2), (9, 3), (9,), (9,))))
        with pytest.raises(ValueError, match=rf'ids\[2\]={bad}, want 0 to 3'):
            gru.forward(put(np.array([[0, 3, bad]], np.int32)))


@pytest.mark.parametrize('bad', [-2, 5])
def test_labels_outside_the_classes_are_refused_with_their_position(bad):
    labels = put(np.array([0, 4, bad], np.int32))
    with pytest.raises(ValueError, match=rf'labels\[2\]={bad}, want 0 to 4'):
        CrossEntropy().forward(put(np.zeros((3, 5), np.float32)), labels)
    op = LinearCrossEntropy(of_zeros('weight', 5, 2), of_zeros('bias', 5))
    with pytest.raises(ValueError, match=rf'labels\[2\]={bad}, want 0 to 4'):
        op.forward(put(np.zeros((3, 2), np.float32)), labels)


@pytest.mark.parametrize('p', [-0.1, 1.0, float('nan')])
def test_dropout_wants_a_share_below_one(p):
    x, step = put(np.zeros(3, np.float32)), put(np.zeros(1, np.int64))
    with pytest.raises(ValueError, match='dropout: p='):
        Dropout(p, 1).forward(x, step)
    with pytest.raises(ValueError, match='residual: p='):
        Residual(p, 1).forward(x, x, step)


def test_dropout_changes_with_step_and_key_and_keeps_the_right_share():
    n = 200_000
    x = put(np.ones(n, np.float32))
    masks = [get(Dropout(0.2, key).forward(x, put(np.array([step])))[0]) for key, step in ((1, 1), (1, 2), (2, 1), (1, 1))]
    assert (masks[0] == masks[3]).all()
    for other in masks[1:3]:
        assert 0.6 < (masks[0] == other).mean() < 0.76             # independent: 0.8^2 + 0.2^2 = 0.68
    for mask in masks:
        assert abs((mask > 0).mean() - 0.8) <= 5 * np.sqrt(0.16 / n)
        assert (mask[mask > 0] == np.float32(1) / (np.float32(1) - np.float32(0.2))).all()


@pytest.mark.parametrize('n', (1, 4099, 70_001))
def test_residual_drops_what_dropout_drops_and_may_overwrite_what_it_adds(n):
    rng, step = np.random.default_rng(2), np.array([5])
    x, branch = normal(rng, n), normal(rng, n)
    want = x + get(Dropout(0.4, 3).forward(put(branch), put(step))[0])
    close(get(Residual(0.4, 3).forward(put(x), put(branch), put(step))[0]), want, 1e-6)
    for place in (0, 1):
        operands = [x.copy(), branch.copy()]
        launch('residual', operands[place], *operands, step, n, 0.4, 3)
        close(operands[place], want, 1e-6)
        assert (operands[1 - place] == (x, branch)[1 - place]).all()


def test_residual_without_dropout_passes_its_gradient_on_without_a_copy():
    x, step = put(np.ones((2, 3), np.float32)), put(np.zeros(1, np.int64))
    for op, given in ((Residual(0.5, 1), None), (Residual(0.0, 1), step)):
        y, ctx = op.forward(x, 2 * x, given)
        dx, dbranch = op.backward(x, ctx)
        assert (get(y) == 3).all() and dx is x and dbranch is x
    y, ctx = Residual(0.5, 1).forward(x, 2 * x, step)
    dx, dbranch = Residual(0.5, 1).backward(x, ctx)
    assert dx is x and dbranch is not x and (get(dbranch) == (get(y) - 1) / 2).all()


def test_philox_gives_the_published_numbers():
    """The known answers of Random123's kat_vectors for philox4x32-10: they prove the reference, the table proves us."""
    for counter, key, want in [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0],
         [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ]:
        assert philox4x32(np.array(counter, np.uint32), key).tolist() == want


@pytest.mark.parametrize('op', ['cross_entropy', 'linear_cross_entropy'])
def test_cross_entropy_of_extreme_rows(op):
    """Logits whose exponentials overflow, all-equal rows, and batches without one valid row."""
    x = np.array([[1000, 0, -1000], [88, 89, 90], [5, 5, 5]], np.float32)
    labels = np.array([0, 2, 1], np.int32)
    for now in (labels, np.full(3, -1, np.int32)):
        if op == 'cross_entropy':
            loss_op = CrossEntropy()
        else:
            loss_op = LinearCrossEntropy(parameter('weight', np.eye(3, dtype=np.float32)), of_zeros('bias', 3))
        loss, ctx = loss_op.forward(put(x), put(now))
        loss, dx = get(loss), get(loss_op.backward(put(np.ones(1, np.float32)), ctx))
        close(loss, CrossEntropy.reference(x.astype(np.float64), now))
        assert np.isfinite(dx).all()
        assert get(ctx.valid)[0] == (now >= 0).sum()
        if (now < 0).all():
            assert loss[0] == 0 and (dx == 0).all()


def large_rows(C, top):
    """(row of C logits, its label) of many kinds, whose largest logit is about top."""
    rng = np.random.default_rng(6)
    x, step = below(top, C, rng), max(np.spacing(np.float32(top)), np.float32(0.125))
    huge = normal(rng, C)
    huge[C // 2] = top
    rising = (top - step * np.arange(C)[::-1]).astype(np.float32)       # every tile of logits has another maximum
    pair = np.zeros(C, np.float32)
    pair[[0, -1]] = top
    return {'near': (x, C // 3), 'far below zero': (-x, C // 3), 'all tied': (np.full(C, top, np.float32), C - 1),
            'one huge': (huge, C // 2), 'one huge, not the label': (huge, C - 1 if C > 2 else 0),
            'rising': (rising, C - 1), 'falling': (rising[::-1].copy(), C - 1), 'two tied': (pair, 0)}


def loss_of_one_row(op, x, label, smoothing):
    """-> logits (C,) as the op has them, loss, gradient of the logits (C,).  A second row is ignored."""
    C, rows, ignored = len(x), np.stack([x, x[::-1]]), np.array([label, -1], np.int32)
    one = put(np.ones(1, np.float32))
    if op == 'cross_entropy':
        op = CrossEntropy(smoothing=smoothing)
        loss, ctx = op.forward(put(rows), put(ignored))
        dx = get(op.backward(one, ctx))
        assert (dx[1] == 0).all()
        return x, get(loss)[0], dx[0]
    if op == 'mlp_gradients':                           # whose hidden layer is 0, so that the biases are the logits
        bias = parameter('b2', x)
        op = MLPGradients(of_zeros('w1', 2, 3), of_zeros('b1', 3), of_zeros('w2', C, 3), bias)
        loss, ctx = op.forward(put(np.ones((1, 2), np.uint8)), put(np.zeros(1, np.int64)), put(ignored[:1]))
        op.backward(one, ctx)
        return x, get(loss)[0], get(bias.grad)
    make = LinearCrossEntropy if op == 'linear_cross_entropy' else functools.partial(
        LinearCrossEntropy.rounded(), recipe=Recipe())
    bias, difference = parameter('bias', np.full(C, x.max(), np.float32)), rows - x.max()
    op = make(parameter('weight', np.ascontiguousarray(difference.T)), bias, smoothing=smoothing)
    loss, ctx = op.forward(put(np.eye(2, dtype=np.float32)), put(ignored))
    op.backward(one, ctx)
    return difference[0] + x.max(), get(loss)[0], get(bias.grad)


@pytest.mark.parametrize('op,smoothing,C', [
    *itertools.product(['cross_entropy', 'linear_cross_entropy', 'linear_cross_entropy-in-products'], [0.0, 0.1],
                       [2, 5, 16, 17, 100, 1100]),
    *itertools.product(['mlp_gradients'], [0.0], [2, 10, 17, 128])])
def test_a_large_maximum_costs_no_digit_of_the_loss_or_its_gradient(op, smoothing, C):
    """Rounding errors are those of exponentials, logarithm and sums, all relative to the loss and not to the logits.

    A sum of C equal terms one by one, as in a library that is not optimised, has an error of up to C / 2 eps.
    """
    rtol = (3 + C / 2) * np.finfo(np.float32).eps
    for top in (1.0, 1e2, 1e4, 1e9):
        for kind, (x, label) in large_rows(C, top).items():
            logits, loss, dx = loss_of_one_row(op, x, label, smoothing)
            logits = logits.astype(np.float64)
            want = CrossEntropy.reference(logits[None], np.array([label]), smoothing=smoothing)[0]
            assert abs(loss - want) <= rtol * (1 + want), (kind, top, loss, want)
            e, target = np.exp(logits - logits.max()), (1 - smoothing) * np.eye(C)[label] + smoothing / C
            assert np.abs(dx - (e / e.sum() - target)).max() <= rtol, (kind, top)
            assert abs(dx.astype(np.float64).sum()) <= rtol, (kind, top)


def test_a_nan_logit_is_seen_in_the_loss():
    x = np.zeros((2, 40), np.float32)
    x[1, 3] = np.nan
    loss, _ = CrossEntropy().forward(put(x), put(np.zeros(2, np.int32)))
    assert np.isnan(get(loss)[0])


@pytest.mark.parametrize('row', [LinearCrossEntropyRow(), SmoothedLinearCrossEntropyRow()], ids=lambda row: row.name)
def test_evaluation_gives_the_loss_without_smoothing_and_forms_no_gradients(row):
    size = (3, 60, 40, 150)
    run, plain = Run(row, size), Run(LinearCrossEntropyRow(), size)
    loss, ctx = run.op.forward(*run.placed.values(), gradients=False)
    assert get(loss)[0] == plain.y[0] and ctx.dx is None and ctx.dweight is None
    assert (run.y[0] == plain.y[0]) == (row.smoothing == 0)


@pytest.mark.parametrize('bad', [-0.1, 1.0, float('nan')])
def test_smoothing_is_a_share_below_one(bad):
    labels = put(np.zeros(3, np.int32))
    with pytest.raises(ValueError, match='cross_entropy_forward: smoothing=.*, want 0 <= smoothing < 1'):
        CrossEntropy(smoothing=bad).forward(put(np.zeros((3, 2), np.float32)), labels)
    run = Run(LinearCrossEntropyRow(), (3, 4, 6, 5), backward=False)
    op = LinearCrossEntropy(*run.params.values(), smoothing=bad)
    with pytest.raises(ValueError, match='linear_cross_entropy: smoothing=.*, want 0 <= smoothing < 1'):
        op.forward(*run.placed.values())


def test_a_smoothed_loss_is_least_at_its_target():
    """At logits that are the logarithm of the target the loss is the target's entropy, and its gradient is 0."""
    V, s = 37, 0.2
    target = (1 - s) * np.eye(V) + s / V
    op = LinearCrossEntropy(parameter('weight', np.log(target).T.astype('f', order='C')), of_zeros('bias', V), smoothing=s)
    loss, ctx = op.forward(put(np.eye(V, dtype=np.float32)), put(np.arange(V, dtype=np.int32)))
    close(get(loss), [-(target[0] * np.log(target[0])).sum()], 1e-6)
    assert np.abs(get(ctx.dx)).max() <= 1e-6 and np.abs(get(ctx.dweight)).max() <= 1e-6


def test_masked_rows_do_not_influence_the_loss():
    """The output layer computes valid rows only: NaN in a masked row is never touched."""
    row, size = LinearCrossEntropyRow(), (3, 60, 40, 150)
    run = Run(row, size)
    x, labels = run.built.inputs['x'].copy(), run.built.constants['labels']
    x[labels == 0] = np.nan
    loss, ctx = run.op.forward(put(x), put(labels))
    loss, dx = get(loss), get(run.op.backward(put(run.dy), ctx))
    assert loss[0] == run.y[0] and (dx == run.grads['x']).all() and (dx[labels == 0] == 0).all()


def test_predict_is_the_argmax_of_the_logits():
    run = Run(LinearCrossEntropyRow(), (3, 60, 40, 150))
    x = run.built.inputs['x'][0]
    want = Linear.reference(x.astype(np.float64), *run.built.params.values()).argmax(-1)
    assert (get(run.op.predict(put(x))) == want).all() and (get(run.op.predict(put(x), run.op.prepare())) == want).all()


@pytest.mark.parametrize('row,size', [(LinearOfSequencesRow(), (5, 60, 300, 300)), (LinearOfSequencesRow(), (2, 3, 7, 7)),
                                      (FeedForwardRow(), (5, 60, 300, 70)), (FeedForwardRow(), (2, 3, 4, 5)),
                                      (LayerNormRow(), (5, 60, 300)), (LayerNormRow(), (2, 3, 5))],
                         ids=lambda value: getattr(value, 'name', None))
@pytest.mark.parametrize('where', ['elsewhere', 'dy'])
def test_backward_adds_dx_to_the_array_it_is_given(row, size, where):
    """Where gradients meet, as behind a residual connection, whose dx and dbranch may be the same array."""
    run = Run(row, size)
    start = run.dy.copy() if where == 'dy' else normal(np.random.default_rng(2), *run.grads['x'].shape)
    want, into = start.astype(np.float64) + run.grads['x'], put(start)
    for p in run.params.values():
        p.grad[...] = 0
    got = run.op.backward(into if where == 'dy' else put(run.dy), run.ctx, into=into)
    assert got is into
    close(get(got), want, 1e-6)
    for name, p in run.params.items():
        close(get(p.grad), run.grads[name], 1e-5)


def test_backward_refuses_an_array_of_another_shape_to_add_to():
    for row, size in ((LinearRow(), (3, 5, 7)), (FeedForwardRow(), (2, 3, 4, 7)), (LayerNormRow(), (2, 3, 5))):
        run = Run(row, size)
        with pytest.raises(ValueError, match='into: want shape'):
            run.op.backward(put(run.dy), run.ctx, into=put(np.zeros(5, np.float32)))


def test_what_works_on_rows_takes_one_row_and_none():
    for row, size in ((LinearRow(), (3, 5, 7)), (FeedForwardRow(), (1, 3, 4, 7)), (LayerNormRow(), (1, 3, 5))):
        run = Run(row, size)
        x = run.built.inputs['x'].reshape(3, -1)
        y, ctx = run.op.forward(put(x[1]))
        assert y.shape == run.y.shape[-1:]
        close(get(y), run.y.reshape(3, -1)[1], 1e-6)
        close(get(run.op.backward(put(run.dy.reshape(3, -1)[1]), ctx)), run.grads['x'].reshape(3, -1)[1], 1e-6)
        before = [get(p.grad).copy() for p in run.params.values()]
        y, ctx = run.op.forward(put(x[:0]))
        assert run.op.backward(y, ctx).shape == x[:0].shape
        assert all((get(p.grad) == kept).all() for p, kept in zip(run.params.values(), before, strict=True))


def test_positions_begin_where_they_are_told_to():
    op, x = Positions(5, longest=12, scale=2.0), normal(np.random.default_rng(2), 12, 3, 5)
    whole = get(op.forward(put(x))[0])
    for first in (0, 1, 9, 11):
        y, ctx = op.forward(put(x[first:]), first)
        assert (get(y) == whole[first:]).all() and (get(op.backward(y, ctx)) == 2 * get(y)).all()


@pytest.mark.parametrize('T,first', [(13, 0), (1, 12), (5, 8), (1, -1)])
def test_positions_beyond_the_table_are_refused(T, first):
    op = Positions(5, longest=12, name='places')
    with pytest.raises(ValueError, match=f'places: T={T} steps from first={first} on do not lie in a table of longest=12'):
        op.forward(put(np.zeros((T, 3, 5), np.float32)), first)


def test_the_table_of_positions_is_that_of_the_formula():
    table = get(Positions(7, longest=900).table)
    assert table.shape == (900, 7) and table.dtype == np.float32
    want = Positions.reference(np.zeros((900, 1, 7)))[:, 0]
    assert np.abs(table - want).max() <= 1.01 * 2**-25          # half the distance of two floats below 1


def layer_norm(C, weight=1.0, bias=0.0, **settings):
    return LayerNorm(parameter('weight', np.full(C, weight, np.float32)), parameter('bias', np.full(C, bias, np.float32)),
                     **settings)


@pytest.mark.parametrize('C', (1, 3, 64, 333))
def test_layer_norm_of_a_constant_row_is_the_bias(C):
    """However large the constant is: a mean that is off by one rounding would show as 0.3, since rstd is 316."""
    op = layer_norm(C, 2.0, 0.7)
    x = np.repeat(np.array([[0], [-3.3], [10000.3], [1e6 / 3]], np.float32), C, 1)
    y, ctx = op.forward(put(x))
    assert (get(y) == np.float32(0.7)).all() and (get(ctx.mean) == x[:, 0]).all()
    close(get(ctx.rstd), np.full(4, 1 / np.sqrt(1e-5)), 1e-5)
    assert np.isfinite(get(op.backward(put(normal(np.random.default_rng(2), 4, C)), ctx))).all()


@pytest.mark.parametrize('C', (5, 256, 1001))
def test_layer_norm_far_from_zero_loses_no_more_than_the_rounding_of_the_mean(C):
    """At 1e4 a float32 has a distance of 2^-10 from the next; E[x^2] - E[x]^2 would leave no digit of the variance."""
    x = normal(np.random.default_rng(2), 20, C) + np.float32(1e4)
    y, ctx = layer_norm(C).forward(put(x))
    y, mean, rstd, exact = get(y), get(ctx.mean), get(ctx.rstd), x.astype(np.float64)
    assert np.abs(mean - exact.mean(-1)).max() <= 1.01 * 2**-11
    close(rstd, 1 / np.sqrt(exact.var(-1) + 1e-5), 1e-6)
    assert (np.abs(y - LayerNorm.reference(exact, 1, 0)) <= 1.01 * 2**-11 * rstd[:, None] + 1e-5).all()


def test_layer_norm_does_not_see_a_gradient_that_is_the_same_everywhere():
    """Which is why the checks above need a random dy: with this one any dx near 0 would pass."""
    op = layer_norm(256)
    _, ctx = op.forward(put(normal(np.random.default_rng(2), 7, 256)))
    assert np.abs(get(op.backward(put(np.ones((7, 256), np.float32)), ctx))).max() <= 1e-5


@pytest.mark.parametrize('eps', (-1e-5, float('nan')))
def test_layer_norm_refuses_a_negative_eps(eps):
    with pytest.raises(ValueError, match='layer_norm_forward: eps=.*, want at least 0'):
        layer_norm(3, eps=eps).forward(put(np.zeros((2, 3), np.float32)))


def test_layer_norm_wants_a_column():
    with pytest.raises(ValueError, match='layer_norm_forward: R=2 C=0'):
        layer_norm(0).forward(put(np.zeros((2, 0), np.float32)))


@pytest.mark.parametrize('row,size', [(GRURow(before, True), (4, 13, 8, 33)) for before in (False, True)]
                         + [(EmbeddingGRURow(before, True, True), (4, 13, 30, 8, 5, 33)) for before in (False, True)],
                         ids=lambda value: getattr(value, 'name', None))
@pytest.mark.parametrize('which', ['dh', 'dh_last', 'both'])
def test_gru_takes_the_gradient_of_the_last_state_apart(row, size, which):
    """dh_last is one more gradient of h[T-1]; None is zeros."""
    run = Run(row, size, backward=False)
    dh, last = (run.dy, run.dy[0] * 3)
    whole = np.zeros_like(dh) if which == 'dh_last' else dh.copy()
    if which != 'dh':
        whole[-1] += last
    want = run.op.backward(put(whole), run.ctx)
    got = run.op.backward(None if which == 'dh_last' else put(dh), run.ctx, None if which == 'dh' else put(last))
    for a, b in zip(got, want, strict=True):
        if b is not None:                       # ids have no gradient
            close(get(a), get(b), 1e-6)


@of_threads
@pytest.mark.parametrize('reset_before', [False, True])
def test_a_gru_of_few_long_rows_gives_the_same_bits_for_any_number_of_threads(reset_before):
    """Its recurrent weights are not packed, and threads have one row each, or two, or all three."""
    row, size, before, runs = GRURow(reset_before, True), (3, 3, 5, 1000), backend.threads(), []
    try:
        for threads in (1, 2, 3):
            backend.set_threads(threads)
            runs.append(Run(row, size))
    finally:
        backend.set_threads(before)
    close(runs[0].y, runs[0].reference(runs[0].variables()))
    for run in runs[1:]:
        assert (run.y == runs[0].y).all() and all((grad == runs[0].grads[name]).all() for name, grad in run.grads.items())


@pytest.mark.parametrize('lengths', [(4, 2, 0, 3, 4, 1, 1), (0, 0, 1, 0, 0, 0, 0), (0,) * 7, (4,) * 7, (2,), (3, 1, 2)],
                         ids=lambda lengths: '-'.join(map(str, lengths)))
@pytest.mark.parametrize('with_h0', [True, False])
@pytest.mark.parametrize('reset_before', [False, True])
def test_a_gru_of_sentences_with_lengths_is_one_of_all_steps_that_is_not_looked_at_behind_them(reset_before, with_h0, lengths):
    """The same bits of h, and the gradients of a dh that is 0 behind the lengths, whatever stands there in dh and dh_last."""
    T, B, I, H = 4, len(lengths), 8, 33
    row, before = GRURow(reset_before, with_h0), np.array(lengths, np.int32)
    run = Run(row, (T, B, I, H), backward=False)
    has = np.arange(T)[:, None, None] < before[:, None]
    x, h0 = run.placed['x'], run.placed.get('h0')
    dh, last = run.dy, normal(np.random.default_rng(3), B, H)
    want = run.op.backward(put(dh * has), run.ctx, put(last * has[-1]))
    sums = [get(p.grad).copy() for p in run.params.values()]
    h, ctx = run.op.forward(x, h0, put(before))
    assert (get(h) == run.y * has).all() and (get(ctx.gates) == get(run.ctx.gates) * has).all()
    for noise, p in zip(run.noise.values(), run.params.values(), strict=True):
        p.grad[...] = put(noise)
    dx, dh0 = run.op.backward(put(dh), ctx, put(last))
    close(get(dx), get(want[0]), 1e-5)
    assert (get(dx) * ~has == 0).all() and (dh0 is None) == (not with_h0)
    if with_h0:
        close(get(dh0), get(want[1]), 1e-5)
    for p, sum_ in zip(run.params.values(), sums, strict=True):
        close(get(p.grad), sum_, 1e-5)


def test_a_gru_refuses_a_length_that_is_none():
    row = GRURow(False, True)
    run = Run(row, (4, 3, 8, 5), backward=False)
    for bad in (-1, 5):
        with pytest.raises(ValueError, match=rf'gru_forward: lengths\[1\]={bad}, want 0 to 4'):
            run.op.forward(*run.placed.values(), put(np.array([4, bad, 0], np.int32)))
    with pytest.raises(ValueError, match=r'lengths: want shape \(3,\)'):
        run.op.forward(*run.placed.values(), put(np.zeros(4, np.int32)))


def test_an_embedding_gru_is_an_embedding_a_context_and_a_gru():
    """The same numbers but for the order of sums, with words that occur often, once and never."""
    run, (T, B, C) = Run(EmbeddingGRURow(False, True, True), (9, 24, 40, 24, 16, 64)), (9, 24, 16)
    table, *weights = (parameter(name, value) for name, value in run.built.params.items())
    embedding, concat, gru = Embedding(table), ConcatContext(), GRU(*weights)
    x, c1 = embedding.forward(run.placed['ids'])
    both, c2 = concat.forward(x, run.placed['context'])
    h, c3 = gru.forward(both, run.placed['h0'])
    close(run.y, get(h), 1e-6)
    dboth, dh0 = gru.backward(put(run.dy), c3)
    dx, dcontext = concat.backward(dboth, c2)
    embedding.backward(dx, c1)
    assert get(dcontext).shape == (B, C) and len(np.unique(run.built.constants['ids'])) < T * B
    grads = dict(context=dcontext, h0=dh0) | {p.name: p.grad for p in (table, *weights)}
    for name, want in grads.items():
        close(run.grads[name], get(want), 1e-5)


def test_an_embedding_gru_says_what_it_wants():
    def make(table=(4, 2), w_ih=(9, 5)):
        return EmbeddingGRU(*(of_zeros(name, *shape) for name, shape in dict(
            table=table, w_ih=w_ih, w_hh=(9, 3), b_ih=(9,), b_hh=(9,)).items()))
    ids = put(np.zeros((2, 3), np.int32))
    with pytest.raises(ValueError, match=r'w_ih: want shape \(3H, E \+ C\) with E = 6 as in table, got \(9, 5\)'):
        make(table=(4, 6))
    with pytest.raises(ValueError, match=r'context: want shape \(3, 3\), got None'):
        make().forward(ids)
    with pytest.raises(ValueError, match=r'context: want shape \(3, 0\), got \(3, 2\)'):
        make(w_ih=(9, 2)).forward(ids, put(np.zeros((3, 2), np.float32)))
    with pytest.raises(ValueError, match=r'h0: want shape \(3, 3\)'):
        make(w_ih=(9, 2)).forward(ids, None, put(np.zeros((3, 2), np.float32)))


def test_kernels_refuse_an_input_product_that_is_half_given():
    x = [put(np.zeros(64, np.float32)) for _ in range(12)]
    ids = put(np.zeros(2, np.int32))
    with pytest.raises(ValueError, match='gru_forward: I=0, want 0 where there is no x, and only there'):
        launch('gru_forward', *x[:3], None, None, None, *x[3:8], 1, 1, 0, 2, 0)
    with pytest.raises(ValueError, match='gru_forward: I=0, want a where it is 0, and only there'):
        launch('gru_forward', *x[:2], None, None, None, None, *x[3:8], 1, 1, 0, 2, 0)
    with pytest.raises(ValueError, match='gru_backward: I=3, want 0 where there is no x, and only there'):
        launch('gru_backward', None, None, *x[:5], None, None, None, None, None, *x[5:10], 1, 1, 3, 2, 0)
    with pytest.raises(ValueError, match='embedding_linear_forward: C=2, want 0 where there is no context, and only there'):
        launch('embedding_linear_forward', x[0], x[1], ids, None, *x[2:5], 1, 2, 3, 2, 2, 2)
    with pytest.raises(ValueError, match='embedding_linear_backward: ld=1, want at least O=2'):
        launch('embedding_linear_backward', x[0], None, None, *x[1:5], ids, None, *x[5:7], 1, 2, 3, 2, 0, 2, 1)
    with pytest.raises(ValueError, match='embedding_linear_forward: T=1 B=2 V=0 E=2 C=0 O=2'):
        launch('embedding_linear_forward', x[0], x[1], ids, None, *x[2:5], 1, 2, 0, 2, 0, 2)


# ---- attention ----------------------------------------------------------------------------------

def attend(op, q, k, v, *lengths_and_step):
    """forward -> y, ctx."""
    y, ctx = op.forward(*(None if a is None else put(a) for a in (q, k, v, *lengths_and_step)))
    return get(y), ctx


def attend_back(op, dy, ctx):
    return tuple(get(grad) for grad in op.backward(put(dy), ctx))


def attention_run(op, size, lengths=None, step=None, seed=0):
    """-> inputs (q, k, v), dy, y, gradients."""
    (Tq, Tk, B, D), rng = size, np.random.default_rng(seed)
    inputs, dy = [normal(rng, T, B, D) for T in (Tq, Tk, Tk)], normal(rng, Tq, B, D)
    y, ctx = attend(op, *inputs, lengths, step)
    return inputs, dy, y, attend_back(op, dy, ctx)


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('Tq,Tk', [(1, 4), (5, 5), (9, 7), (40, 70)])
def test_a_sentence_of_padding_alone_gives_zeros_and_disturbs_no_other(Tq, Tk, causal):
    op, lengths = Attention(2, causal), np.array([Tk, 0, 3], np.int32)
    (q, k, v), dy, y, grads = attention_run(op, (Tq, Tk, 3, 6), lengths)
    for result in (y, *grads):
        assert np.isfinite(result).all() and (result[:, 1] == 0).all()
    top, total = get(attend(op, q, k, v, lengths)[1].stats)
    assert (top[1] == -np.inf).all() and (total[1] == 0).all()
    others = [np.ascontiguousarray(x[:, [0, 2]]) for x in (q, k, v, dy)]
    y2, ctx = attend(op, *others[:3], lengths[[0, 2]])
    for got, want in zip((y, *grads), (y2, *attend_back(op, others[3], ctx)), strict=True):
        assert (got[:, [0, 2]] == want).all() and np.abs(want).max() > 1e-3


def test_keys_beyond_a_length_are_not_even_read():
    lengths, op = np.array([7, 70], np.int32), Attention(2)
    (q, k, v), dy, y, grads = attention_run(op, (40, 90, 2, 10), lengths)
    for x in (k, v):
        x[7:, 0] = x[70:, 1] = np.nan
    y2, ctx = attend(op, q, k, v, lengths)
    assert (y2 == y).all()
    for got, want in zip(attend_back(op, dy, ctx), grads, strict=True):
        assert (got == want).all()
    assert all((grad[7:, 0] == 0).all() and (grad[70:, 1] == 0).all() for grad in grads[1:])


def test_gradients_pass_through_masks(torch):
    """Through the values, and through the softmax to queries and keys: every row that takes part has one, PyTorch's."""
    lengths, op = np.array([9, 4, 6], np.int32), Attention(4, causal=True)
    inputs, dy, _, grads = attention_run(op, (9, 9, 3, 32), lengths)
    leaves = [torch.tensor(x.astype(np.float64), requires_grad=True) for x in inputs]
    AttentionRow(causal=True).torch(torch, *leaves, op, torch.tensor(lengths)).backward(torch.tensor(dy.astype(np.float64)))
    for name, got, leaf in zip('qkv', grads, leaves, strict=True):
        close(got, leaf.grad.numpy(), 5e-5)
        for b, length in enumerate(lengths):
            # the first query sees one key only, whose weight is 1 whatever the query is
            taking_part = got[1:, b] if name == 'q' else got[:length, b]
            assert (np.abs(taking_part).max(-1) > 1e-3).all(), f'd{name} of sentence {b}'


@pytest.mark.parametrize('Tq,Tk', [(2, 6), (9, 9), (5, 130)])
def test_dropout_of_the_weights_is_the_counter_s(Tq, Tk):
    """With equal scores and values 1, 2, 4, ... in columns of their own, y shows every element of the mask."""
    B, heads, p, step, key = 2, 3, 0.4, 5 + (9 << 32), 0xFEDCBA9876543210
    q, k = np.zeros((Tq, B, heads * Tk), 'f'), np.zeros((Tk, B, heads * Tk), 'f')
    v = np.broadcast_to(np.tile(np.eye(Tk, dtype='f')[:, None], heads), k.shape).copy()
    y, _ = attend(Attention(heads, p=p, key=key), q, k, v, None, np.array([step]))
    got = y.reshape(Tq, B, heads, Tk).transpose(1, 2, 0, 3) * Tk
    assert np.abs(got - dropout_factors(B, heads, Tq, Tk, p, step, key)).max() < 1e-5
    plain, _ = attend(Attention(heads, p=p, key=key), q, k, v)
    assert np.abs(plain * Tk - 1).max() < 1e-5, 'without a step there is no dropout'


@pytest.mark.parametrize('T', [9, 70])
def test_decoding_word_by_word_equals_one_causal_call(T):
    B, D, op = 3, 24, Attention(3, causal=True)
    (q, k, v), _, y, _ = attention_run(op, (T, T, B, D))
    for t in range(T):
        step, _ = attend(op, q[t:t + 1], k[:t + 1], v[:t + 1])
        assert np.abs(step[0] - y[t]).max() <= 1e-6


@pytest.mark.parametrize('Tq,Tk', [(2, 9), (9, 9), (40, 150)])
def test_attention_to_extreme_scores(Tq, Tk):
    """Scores in the hundreds, where float32 itself leaves the weights an error of 1e-4."""
    rng = np.random.default_rng(3)
    q, k, v, dy = (normal(rng, T, 2, 16, scale=8) for T in (Tq, Tk, Tk, Tq))
    k[Tk // 2] = k[Tk - 1] = 2 * q[0]
    op = Attention(1)
    y, ctx = attend(op, q, k, v)
    close(y, Attention.reference(*(x.astype(np.float64) for x in (q, k, v)), heads=1), 1e-3)
    assert np.abs(y[0] - (v[Tk // 2] + v[Tk - 1]) / 2).max() < 1e-3
    assert np.abs(get(ctx.stats)[0]).max() > 400 and all(np.isfinite(grad).all() for grad in attend_back(op, dy, ctx))


@pytest.mark.parametrize('Tq,Tk', [(1, 5), (6, 20), (40, 150)])
@pytest.mark.parametrize('which', 'qkv')
def test_attention_passes_nan_on(Tq, Tk, which):
    op, arrays = Attention(2), dict(zip('qkv', attention_run(Attention(2), (Tq, Tk, 2, 8))[0], strict=True))
    arrays[which][-1, 1, 5] = np.nan            # of the second sentence, its last row, in its second head
    y, ctx = attend(op, *arrays.values())
    bad = np.zeros(y.shape, bool)
    bad[-1 if which == 'q' else slice(None), 1, 5 if which == 'v' else slice(4, 8)] = True
    assert (np.isnan(y) == bad).all() and np.isnan(get(ctx.stats)[1]).any() == (which != 'v')


@pytest.mark.parametrize('Tk', [1, 9, 64, 65, 300])
@pytest.mark.parametrize('Tq', [1, 4, 33])
def test_maxima_and_sums_of_attention_are_exact(Tq, Tk):
    rng = np.random.default_rng(4)
    q, k = normal(rng, Tq, 1, 8, scale=2), normal(rng, Tk, 1, 8, scale=2)
    _, ctx = attend(Attention(1), q, k, k)
    scores = q[:, 0].astype('d') @ k[:, 0].T.astype('d') / np.sqrt(8)
    (top,), (total,) = get(ctx.stats)[:, 0].astype('d')
    assert np.abs(top - scores.max(-1)).max() <= 1e-6 * np.abs(scores).max()
    assert np.abs(top + np.log(total) - np.logaddexp.reduce(scores, -1)).max() <= 1e-6 * np.abs(scores).max()


@pytest.mark.parametrize('in_products', [False, True])
@pytest.mark.parametrize('Tq,Tk,C', [(1, 5, 1), (1, 70, 3), (4, 2, 3), (5, 7, 4), (20, 130, 3), (70, 200, 1)])
@pytest.mark.parametrize('score', [1e2, 1e4, 1e9])
def test_attention_to_large_scores_has_the_weights_of_their_differences(score, Tq, Tk, C, in_products):
    """Scores have one channel, so dot products are exact; 1 / sqrt(C) rounds them, as it rounds those of the reference."""
    rng = np.random.default_rng(7)
    q, k, v = np.zeros((Tq, 1, C), 'f'), np.zeros((Tk, 1, C), 'f'), normal(rng, Tk, 1, C)
    q[..., 0], k[..., 0] = 1, below(score * np.sqrt(C), (Tk, 1), rng)
    op, dy = (attention_in_products if in_products else Attention)(1), normal(rng, Tq, 1, C)
    y, ctx = attend(op, q, k, v)
    _, _, dv = attend_back(op, dy, ctx)
    s = (k[:, 0, 0] * (np.float32(1) / np.sqrt(np.float32(C)))).astype(np.float64)
    weights = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
    close(y[:, 0], np.tile(weights @ v[:, 0], (Tq, 1)), 1e-5)
    close(dv[:, 0], weights[:, None] * dy[:, 0].sum(0, dtype=np.float64), 1e-5)


@pytest.mark.parametrize('bad', [-1, 6])
def test_lengths_outside_the_keys_are_refused_with_their_position(bad):
    q, k = np.zeros((2, 3, 4), 'f'), np.zeros((5, 3, 4), 'f')
    with pytest.raises(ValueError, match=rf'attention_forward: lengths\[2\]={bad}, want 0 to 5'):
        attend(Attention(2), q, k, k, np.array([0, 5, bad], np.int32))


def test_attention_refuses_heads_and_shares_that_cannot_be():
    q = np.zeros((2, 3, 4), 'f')
    with pytest.raises(ValueError, match='q: want shape .* D a multiple of 3 heads'):
        attend(Attention(3), q, q, q)
    for p in (-0.1, 1.0, float('nan')):
        with pytest.raises(ValueError, match='attention_forward: p='):
            attend(Attention(2, p=p), q, q, q)


attention_in_products = functools.partial(Attention.rounded(), recipe=Recipe())


def test_attention_in_products_refuses_what_the_whole_one_refuses():
    make, q, k = attention_in_products, np.zeros((2, 3, 4), 'f'), np.zeros((5, 3, 4), 'f')
    with pytest.raises(ValueError, match=r'attention_softmax_forward: lengths\[2\]=6, want 0 to 5'):
        attend(make(2), q, k, k, np.array([0, 5, 6], np.int32))
    for p in (-0.1, 1.0, float('nan')):
        with pytest.raises(ValueError, match='attention_softmax_forward: p='):
            attend(make(2, p=p), q, k, k)


@pytest.mark.parametrize('Tq,Tk,B', [(3, 0, 2), (0, 3, 2), (3, 3, 0)])
def test_attention_in_products_of_nothing(Tq, Tk, B):
    _, _, y, grads = attention_run(attention_in_products(2, True), (Tq, Tk, B, 4), np.zeros(B, np.int32))
    assert not any(np.any(result) for result in (y, *grads)) and [len(grad) for grad in grads] == [Tq, Tk, Tk]


def test_attention_in_products_survives_extreme_scores_and_passes_nan_on():
    rng = np.random.default_rng(3)
    q, k, v, dy = (normal(rng, T, 2, 16, scale=8) for T in (40, 150, 150, 40))
    k[70] = k[149] = 2 * q[0]
    op = attention_in_products(1)
    y, ctx = attend(op, q, k, v)
    close(y, Attention.reference(*(x.astype(np.float64) for x in (q, k, v)), heads=1), 1e-3)
    assert all(np.isfinite(grad).all() for grad in attend_back(op, dy, ctx))
    q[3, 1, 5] = np.nan
    y, _ = attend(op, q, k, v)
    assert np.isnan(y[3, 1]).all() and np.isnan(y).sum() == 16


@pytest.mark.parametrize('kernel,count', [('gru_gates_forward', 5), ('gru_gates_backward', 7)])
def test_gates_refuse_a_stage_that_there_is_not(kernel, count):
    arrays = [put(np.zeros(12, np.float32)) for _ in range(count)]
    for stage in (-1, 3):
        with pytest.raises(ValueError, match=f'{kernel}: stage={stage}, want 0 to 2'):
            backend.launch(kernel, *arrays, 1, 3, stage)
    with pytest.raises(ValueError, match=f'{kernel}: B=1 H=0'):
        backend.launch(kernel, *arrays, 1, 0, 0)


def test_attention_of_nothing():
    code = ('import numpy as np; from places import get, put; from pyops.ops import Attention\n'
            'q, k = put(np.zeros((1, 2, 4), "f")), put(np.zeros((0, 2, 4), "f"))\n'
            'print(get(Attention(2).forward(q, k, k)[0]).any())')
    fresh = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True,      # no scratch yet
                           env=os.environ | {'PYTHONPATH': str(ROOT / 'tests/helpers')})
    assert fresh.stdout == 'False\n', fresh.stderr

    def sizes(Tq, Tk, B):
        return attention_run(Attention(2), (Tq, Tk, B, 4))
    _, _, y, grads = sizes(3, 0, 2)
    assert (y == 0).all() and (grads[0] == 0).all()
    assert (sizes(0, 3, 2)[3][1] == 0).all() and sizes(3, 3, 0)[2].size == 0


@pytest.mark.parametrize('T,B', [(0, 2), (1, 1), (9, 7), (40, 33)])
def test_sequence_lengths(T, B):
    ids = np.random.default_rng(5).integers(0, 3, (T, B)).astype(np.int32)          # padding inside a sentence does not end it
    if T > 1:
        ids[:, 0], ids[T // 2:, 1] = 0, 0
    want = [max((t + 1 for t in range(T) if ids[t, b] != 0), default=0) for b in range(B)]
    assert get(sequence_lengths(put(ids), 0)).tolist() == want
    with pytest.raises(TypeError, match='ids'):
        sequence_lengths(put(ids.astype(np.int64)), 0)


def test_parameters_of_the_wrong_shape_are_refused_by_name():
    w, b = of_zeros('w', 4, 3), of_zeros('b', 5)
    for make in (lambda: Linear(w, b), lambda: PixelLinear(w, b), lambda: LinearCrossEntropy(w, b),
                 lambda: GRU(of_zeros('x', 6, 3), of_zeros('y', 6, 2), b, of_zeros('z', 6))):
        with pytest.raises(ValueError, match=r'b: want shape \(.\,\), got \(5,\)'):
            make()
    with pytest.raises(ValueError, match=r'gradient of w: want shape \(4, 3\), got \(3, 4\)'):
        Embedding(parameter('w', np.zeros((4, 3), np.float32), np.zeros((3, 4), np.float32)))


@pytest.mark.parametrize('row,size', [(LinearCrossEntropyRow(), (3, 4, 6, 5)), (PixelLinearRow(), (9, 7, 17, 33))],
                         ids=lambda value: getattr(value, 'name', ''))
def test_backward_without_gradients_says_why(row, size):
    run = Run(row, size, backward=False)
    y, ctx = run.op.forward(*run.placed.values(), gradients=False)
    with pytest.raises(ValueError, match='gradients=False'):
        run.op.backward(put(np.ones(y.shape, np.float32)), ctx)


@pytest.mark.parametrize('size', (*PixelLinearRow.sizes, PixelLinearRow.large))
def test_pixels_that_are_not_saved_give_the_same(size):
    run = Run(PixelLinearRow(), size, backward=False)
    y, ctx = run.op.forward(*run.placed.values(), gradients=False)
    assert np.array_equal(get(y), run.y) and ctx.ink is None and ctx.places is None


def batch_norm(C, weight=1.0, bias=0.0, **settings):
    return BatchNorm(parameter('weight', np.full(C, weight, np.float32)), parameter('bias', np.full(C, bias, np.float32)),
                     **settings)


def test_batch_norm_keeps_the_running_statistics_of_torch(torch):
    rng, twin = np.random.default_rng(4), torch.nn.BatchNorm1d(130, momentum=0.3, dtype=torch.float64)
    mean, var, op = put(np.zeros(130, np.float32)), put(np.ones(130, np.float32)), batch_norm(130, momentum=0.3)
    for R in (2, 100, 65):
        x = normal(rng, R, 130) + np.float32(3)
        y, _ = op.forward(put(x), mean, var)
        close(get(y), twin(torch.tensor(x).double()).detach().numpy(), 1e-4 if R == 2 else RTOL)
        close(get(mean), twin.running_mean.numpy())
        close(get(var), twin.running_var.numpy())
    before = get(mean).copy(), get(var).copy()
    y, _ = batch_norm(130, training=False).forward(put(x), mean, var)
    close(get(y), twin.eval()(torch.tensor(x).double()).detach().numpy())
    assert (get(mean) == before[0]).all() and (get(var) == before[1]).all()


@pytest.mark.parametrize('R', (2, 1000))
def test_batch_norm_of_a_constant_column_is_the_bias(R):
    y, ctx = batch_norm(3, 2.0, 0.7).forward(put(np.full((R, 3), 12345.678, np.float32)))
    assert (get(y) == np.float32(0.7)).all() and (get(ctx.rstd) == np.float32(1 / np.sqrt(np.float32(1e-5)))).all()


def test_batch_norm_says_what_it_wants():
    x = put(np.zeros((1, 3), np.float32))
    for op, arguments, text in ((batch_norm(3), (x,), 'R=1, want at least 2 rows in training'),
                                (batch_norm(3, training=False), (x,), 'want running statistics outside training'),
                                (batch_norm(3, eps=-1), (put(np.zeros((2, 3), np.float32)),), 'eps=-1, want at least 0'),
                                (batch_norm(3), (x, x), r'running_mean: want shape \(3,\)')):
        with pytest.raises(ValueError, match=text):
            op.forward(*arguments)
