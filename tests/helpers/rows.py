"""The rows of the op table: each builds an op and its arguments at any size, and has the same op in PyTorch.

The float64 formula is the op's own `reference`.  `large` is a size that runs on several threads.  tests/ops/test_table.py
checks every property for every row.  An op without a row is tested on its own `example`.
"""
import functools
import inspect
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from arrays import normal
from places import get, put

from pyops.backend import check, empty_gradient, library
from pyops.differences import every_op, settings_of
from pyops.ops import (
    GELU,
    GRU,
    LSTM,
    RNN,
    Attention,
    AvgPool2d,
    BatchNorm,
    ConcatContext,
    Conv2d,
    CrossEntropy,
    Dropout,
    Embedding,
    EmbeddingGRU,
    EmbeddingPositions,
    FeedForward,
    GELUTanh,
    LayerNorm,
    Linear,
    LinearCrossEntropy,
    LinearResidual,
    LinearResidualNorm,
    MaxPool2d,
    MLPGradients,
    PixelLinear,
    Positions,
    ReLU,
    Residual,
    ResidualNorm,
    SiLU,
)
from pyops.ops.array import ArrayOp
from pyops.ops.attention import dropout_factors, visible
from pyops.ops.packed import Packed
from pyops.params import Parameter
from pyops.philox import dropout_mask
from pyops.quantization import Recipe, family


@dataclass
class Built:
    """An op ready to run: float inputs and parameters by name, and constants (ids, labels, step) that have no gradient.

    dy: the upstream gradient, None for a random one;  noise: the size of the numbers to which gradients of parameters add
    """
    op: Any
    inputs: dict
    params: dict
    constants: dict = field(default_factory=dict)
    dy: Any = None
    noise: float = 1.0

    def arguments(self):
        """Return the arguments of forward by name, in its order: ids come first, other constants last."""
        return dict(sorted((self.inputs | self.constants).items(), key=lambda item: item[0] != 'ids'))


def labels_with_masked_rows(rng, shape, classes, ignore):
    labels = rng.integers(0, classes, shape).astype(np.int32)
    labels[rng.random(shape) < 0.25] = ignore
    return labels


def as_half(x):
    """Return x with float16's precision, float32."""
    return x.astype(np.float16).astype(np.float32)


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


class HalfLinearRow(LinearOfSequencesRow):
    """All numbers are float16's, so rounding to that format changes none."""
    name = 'halves-linear'             # not rounded to bf16, unlike the products of other linear layers

    def build(self, size, rng):
        built = super().build(size, rng)
        T, B, O, _ = size
        inputs, params = ({name: as_half(value) for name, value in values.items()} for values in (built.inputs, built.params))
        return Built(Linear, inputs, params, dy=as_half(normal(rng, T, B, O)))


class FP8LinearRow(LinearOfSequencesRow):
    """All numbers are multiples of 1/2 up to 3.5, and each tensor has a 3.5: with its scale 3.5 / 448 they are E4M3's."""
    name = 'fp8-linear'

    def build(self, size, rng):
        T, B, O, I = size

        def numbers(*shape):
            found = rng.integers(-7, 8, shape) / np.float32(2)
            found.reshape(-1)[0] = 3.5
            return found.astype(np.float32)
        return Built(Linear, dict(x=numbers(T, B, I)), dict(weight=numbers(O, I), bias=normal(rng, O)), dy=numbers(T, B, O))


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


class SmoothFeedForwardRow:
    """FeedForward with an activation other than ReLU."""
    sizes = ((1, 1, 1, 1), (2, 3, 4, 7), (4, 7, 33, 257))                                         # T, B, D, F
    large = (9, 101, 100, 96)

    def __init__(self, activation, theirs=None, **options):
        self.name, self.activation = f'feed_forward-{activation}', activation
        self.theirs, self.options = theirs or activation, options           # PyTorch's function

    def build(self, size, rng):
        T, B, D, F = size
        params = dict(w1=normal(rng, F, D), b1=normal(rng, F), w2=normal(rng, D, F), b2=normal(rng, D))
        return Built(functools.partial(FeedForward, activation=self.activation), dict(x=normal(rng, T, B, D)), params)

    def torch(self, torch, x, w1, b1, w2, b2):
        linear = torch.nn.functional.linear
        h = getattr(torch.nn.functional, self.theirs)(linear(x, w1, b1), **self.options)
        return linear(h, w2, b2)


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


class HalvesOfPositionsRow(PositionsRow):
    name = 'halves-of-positions'

    def build(self, size, rng):
        return Built(lambda: Positions(size[-1], scale=self.SCALE, halves=True), dict(x=normal(rng, *size)), {})

    def torch(self, torch, x):
        order = [*range(0, x.shape[-1], 2), *range(1, x.shape[-1], 2)]
        return self.SCALE * x + super().torch(torch, torch.zeros_like(x))[..., order]


class PackedPositions(Positions):
    """Positions of packed rows; its arguments are arrays only."""

    def forward(self, x, positions):
        return super().forward(x, positions=positions)

    @staticmethod
    def reference(x, positions, scale):
        return Positions.reference(x, positions=positions, scale=scale)


class PackedPositionsRow(PositionsRow):
    name = 'packed-positions'
    sizes = ((1, 1), (6, 5), (28, 16), (3, 33), (140, 64))                                        # N, D
    large = (909, 300)

    def build(self, size, rng):
        N, D = size
        return Built(lambda: PackedPositions(D, scale=self.SCALE, longest=9), dict(x=normal(rng, N, D)), {},
                     dict(positions=rng.integers(0, 9, N).astype(np.int32)))

    def torch(self, torch, x, positions):
        table = super().torch(torch, torch.zeros(9, 1, x.shape[-1], dtype=x.dtype))[:, 0]
        return self.SCALE * x + table[positions.long()]


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


class BatchNormOfImagesRow(BatchNormRow):
    wrong_axis = BatchNormRow.wrong_axis | {'x': 1}
    sizes = ((3, 1, 2, 1), (2, 5, 3, 4), (7, 33, 5, 5), (2, 5, 4, 8), (3, 8, 64, 70), (2, 3, 1, 129))            # N, C, H, W
    large = (9, 30, 41, 33)

    def __init__(self, training):
        super().__init__(training)
        self.name = self.name.replace('norm', 'norm-of-images')

    def build(self, size, rng):
        built = super().build((size[0], size[1]), rng)
        built.inputs['x'] = normal(rng, *size) + np.float32(0.5)
        return built


class PoolRow:
    """settings: the op's, as PyTorch takes them."""
    wrong_axis = {'x': None}                # any shape is accepted
    sizes = ((1, 1, 4, 5), (2, 3, 7, 6), (2, 9, 33, 40))                                          # N, C, H, W
    large = (5, 31, 64, 66)

    def __init__(self, op, name='', **settings):
        self.op, self.settings = op, settings
        self.function = {MaxPool2d: 'max_pool2d', AvgPool2d: 'avg_pool2d'}[op]
        self.name = f'{self.function}{name}'

    def build(self, size, rng):
        """All elements differ by at least 0.01, so a small step changes no maximum."""
        x = rng.permutation(np.prod(size)).reshape(size).astype(np.float32) / 100
        return Built(lambda: self.op(**self.settings), dict(x=x), {})

    def torch(self, torch, x):
        return getattr(torch.nn.functional, self.function)(x, **self.settings)


class Conv2dRow:
    """settings: the op's, as PyTorch takes them."""
    wrong_axis = {'x': 1}
    sizes = ((1, 1, 4, 5, 1, 2, 3), (2, 4, 6, 5, 6, 3, 2), (3, 2, 7, 9, 4, 3, 3), (2, 12, 9, 8, 36, 3, 3),
             (19, 4, 4, 4, 14, 3, 3))                                                            # N, C, H, W, O, kh, kw
    large = (7, 12, 19, 17, 34, 3, 3)

    def __init__(self, name='', bias=True, **settings):
        self.name, self.bias, self.settings = f'conv2d{name}', bias, settings
        groups = settings.get('groups', 1)
        self.sizes = tuple(size for size in self.sizes if size[1] % groups == size[4] % groups == 0)

    def build(self, size, rng):
        N, C, H, W, O, kh, kw = size
        params = dict(weight=normal(rng, O, C // self.settings.get('groups', 1), kh, kw))
        if self.bias:
            params['bias'] = normal(rng, O)
        return Built(functools.partial(Conv2d, **self.settings), dict(x=normal(rng, N, C, H, W)), params)

    def torch(self, torch, x, weight, bias=None):
        return torch.nn.functional.conv2d(x, weight, bias, **self.settings)


class WideConv2dRow(Conv2dRow):
    """Sums of more terms than a block of a product has, more columns than a block of windows, filters for a few rows, and
    enough channels for AMX to split the factors."""
    sizes = ((1, 90, 12, 11, 40, 2, 2), (2, 3, 33, 32, 40, 3, 3), (3, 40, 2, 1, 5, 5, 5), (1, 3, 40, 41, 3, 9, 9),
             (2, 70, 6, 7, 70, 3, 3))


class EvenConv2dRow(Conv2dRow):
    """Strides that divide the image, and filters with a position in each phase."""
    sizes = ((2, 3, 8, 12, 5, 7, 7), (3, 4, 12, 4, 9, 5, 4), (19, 4, 4, 8, 14, 4, 4), (2, 33, 4, 4, 40, 4, 5),
             (1, 2, 8, 64, 3, 4, 4))                                                             # vectors of each phase
    large = (7, 12, 24, 20, 34, 5, 5)


class TiledConv2dRow(Conv2dRow):
    """3 x 3 filters of many channels, computed in tiles: odd and even sizes, several vectors, sums of several blocks."""
    sizes = ((2, 16, 7, 28, 17, 3, 3), (1, 18, 5, 63, 16, 3, 3), (3, 33, 4, 31, 20, 3, 3), (1, 260, 3, 23, 16, 3, 3))
    large = (6, 17, 25, 31, 40, 3, 3)


class DepthwiseConv2dRow(Conv2dRow):
    """A filter or two for each channel."""
    sizes = ((1, 1, 4, 5, 1, 2, 3), (2, 4, 6, 5, 4, 3, 2), (3, 5, 7, 9, 10, 3, 3), (2, 33, 9, 18, 33, 5, 5),
             (3, 6, 20, 21, 6, 3, 3), (35, 2, 3, 4, 2, 3, 3))                                    # in several parts
    large = (7, 40, 29, 27, 40, 3, 3)

    def build(self, size, rng):
        self.settings['groups'] = size[1]
        return super().build(size, rng)


class PixelLinearRow:
    name = 'pixel_linear'
    wrong_axis = {'rows': None}             # any length is accepted
    sizes = ((1, 1, 1, 1), (5, 3, 9, 4), (9, 7, 17, 33), (6, 40, 784, 30), (3, 2, 2100, 40))      # N, B, I, O
    large = (300, 401, 784, 70)

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
    wrong_axis = {'rows': None}             # any length is accepted
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
    wrong_axis = {'x': None}                # any shape is accepted
    sizes = ((1,), (2, 3), (5, 17), (40, 1001))
    large = (300, 1001)

    def build(self, size, rng):
        x = normal(rng, *size)
        return Built(ReLU, dict(x=np.where(np.abs(x) < 1e-3, np.float32(1e-3), x)), {})     # away from the kink

    def torch(self, torch, x):
        return torch.relu(x)


class ActivationRow:
    wrong_axis = {'x': None}                # any shape is accepted
    sizes = ((1,), (2, 3), (5, 17), (40, 1001))
    large = (300, 1001)

    def __init__(self, op, theirs=None, **options):
        self.name, self.op, self.theirs, self.options = op.kernel, op, theirs or op.kernel, options

    def build(self, size, rng):
        return Built(self.op, dict(x=normal(rng, *size, scale=3.0)), {})

    def torch(self, torch, x):
        return getattr(torch.nn.functional, self.theirs)(x, **self.options)


class EmbeddingRow:
    name = 'embedding'
    wrong_axis = {'ids': None}              # any shape is accepted
    sizes = ((1, 1, 1, 1), (2, 3, 5, 4), (9, 16, 7, 33), (9, 64, 50, 64))                         # T, B, V, E
    large = (9, 461, 50, 64)

    def build(self, size, rng):
        T, B, V, E = size
        ids = rng.integers(0, V, (T, B)).astype(np.int32)
        return Built(Embedding, {}, dict(weight=normal(rng, V, E)), dict(ids=ids))

    def torch(self, torch, weight, ids):
        return torch.nn.functional.embedding(ids.long(), weight)


class SparseEmbeddingRow(EmbeddingRow):
    """An embedding that marks the rows it adds to.  Several rows share a block; in the third size a row spans two."""
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


class ResidualNormRow(ResidualRow):
    sizes = ((1, 3), (2, 3, 5), (3, 5, 33), (2, 70, 8), (4, 40, 257), (9, 40, 256))              # ..., C
    large = (9, 101, 300)

    def __init__(self, with_dropout):
        super().__init__(with_dropout)
        self.name = self.name.replace('residual', 'residual_norm')

    def build(self, size, rng):
        built, C = super().build(size, rng), size[-1]
        return Built(lambda weight, bias: ResidualNorm(weight, bias, self.P, self.KEY), built.inputs,
                     dict(weight=normal(rng, C), bias=normal(rng, C)), built.constants)

    def torch(self, torch, x, branch, weight, bias, step=None):
        return torch.nn.functional.layer_norm(super().torch(torch, x, branch, step), x.shape[-1:], weight, bias)


class LinearResidualRow(ResidualRow):
    sizes = ((1, 1, 1), (2, 3, 5, 7), (3, 5, 17, 33), (9, 40, 64))                                # ..., O, I
    large = (9, 101, 100, 96)

    def __init__(self, with_dropout):
        super().__init__(with_dropout)
        self.name = f'linear_{self.name}'

    def build(self, size, rng):
        *rows, O, I = size
        return Built(lambda weight, bias: LinearResidual(weight, bias, self.P, self.KEY),
                     dict(x=normal(rng, *rows, I), residual=normal(rng, *rows, O)),
                     dict(weight=normal(rng, O, I), bias=normal(rng, O)), super().build(size, rng).constants)

    def torch(self, torch, x, residual, weight, bias, step=None):
        return super().torch(torch, residual, torch.nn.functional.linear(x, weight, bias), step)


class LinearResidualNormRow(LinearResidualRow):
    sizes = ((1, 3, 1), (2, 3, 5, 7), (3, 5, 17, 33), (9, 40, 64))                                # ..., O, I

    def __init__(self, with_dropout):
        super().__init__(with_dropout)
        self.name = self.name.replace('residual', 'residual_norm')

    def build(self, size, rng):
        built, O = super().build(size, rng), size[-2]
        return Built(lambda weight, bias, norm_weight, norm_bias: LinearResidualNorm(
                         weight, bias, norm_weight, norm_bias, self.P, self.KEY),
                     built.inputs, built.params | dict(norm_weight=normal(rng, O), norm_bias=normal(rng, O)), built.constants)

    def torch(self, torch, x, residual, weight, bias, norm_weight, norm_bias, step=None):
        total = super().torch(torch, x, residual, weight, bias, step)
        return torch.nn.functional.layer_norm(total, total.shape[-1:], norm_weight, norm_bias)


class EmbeddingPositionsRow(ResidualRow):
    wrong_axis = {'ids': None}              # any number of rows is accepted
    sizes = ((1, 1, 1), (6, 5, 4), (28, 7, 33), (33, 9, 64), (140, 50, 30))                       # N, V, E
    large = (909, 50, 300)
    SCALE = 1.75

    def __init__(self, with_dropout):
        super().__init__(with_dropout)
        self.name = self.name.replace('residual', 'embedding_positions')

    def build(self, size, rng):
        N, V, E = size
        return Built(lambda weight: EmbeddingPositions(weight, Positions(E, 9, self.SCALE), self.P, self.KEY), {},
                     dict(weight=normal(rng, V, E)),
                     dict(ids=rng.integers(0, V, N).astype(np.int32), positions=rng.integers(0, 9, N).astype(np.int32))
                     | (dict(step=np.array([self.STEP])) if self.with_dropout else {}))

    def torch(self, torch, weight, ids, positions, step=None):
        table = PositionsRow().torch(torch, torch.zeros(9, 1, weight.shape[1], dtype=weight.dtype))[:, 0]
        y = self.SCALE * torch.nn.functional.embedding(ids.long(), weight) + table[positions.long()]
        return y * torch.tensor(self.kept(y.shape))


class ConcatContextRow:
    name = 'concat_context'
    wrong_axis = {'x': 1, 'context': 0}     # the last axis may have any length, so the test doubles the batch
    sizes = ((1, 1, 1, 1), (2, 3, 4, 5), (9, 17, 33, 16), (9, 64, 32, 64))                        # T, B, E, H
    large = (9, 257, 65, 64)

    def build(self, size, rng):
        T, B, E, H = size
        return Built(ConcatContext, dict(x=normal(rng, T, B, E), context=normal(rng, B, H)), {})

    def torch(self, torch, x, context):
        return torch.cat([x, context.expand(len(x), -1, -1)], -1)


class GRURow:
    sizes = ((1, 1, 1, 1), (2, 3, 4, 5), (3, 7, 17, 16), (4, 13, 8, 33), (9, 24, 40, 96))         # T, B, I, H
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
        """Return one length T, one length 0, and random ones."""
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


class RecurrentRow:
    """LSTM and RNN.  settings: of RNN."""
    sizes = ((1, 1, 1, 1), (2, 3, 4, 5), (3, 7, 17, 16), (4, 13, 8, 33), (9, 24, 40, 96))         # T, B, I, H
    large = (9, 251, 40, 64)

    def __init__(self, op, with_states=True, with_lengths=False, bias=True, **settings):
        words = [op.__name__.lower(), *settings.values(), *['no-states'] * (not with_states),
                 *['lengths'] * with_lengths, *['no-bias'] * (not bias)]
        self.name = '-'.join(words)
        self.op, self.with_states, self.with_lengths, self.bias, self.settings = op, with_states, with_lengths, bias, settings

    def build(self, size, rng):
        T, B, I, H = size
        scale, rows = 1 / np.sqrt(H), self.op.GATES * H
        params = dict(w_ih=normal(rng, rows, I, scale=scale), w_hh=normal(rng, rows, H, scale=scale))
        if self.bias:
            params |= dict(b_ih=normal(rng, rows), b_hh=normal(rng, rows))
        inputs = dict(x=normal(rng, T, B, I))
        if self.with_states:
            inputs |= {name: normal(rng, B, H) for name in ('h0', 'c0')[:self.op.STATES]}
        return Built(lambda **p: self.op(**p, **self.settings), inputs, params, GRURow.lengths(self, T, B, rng))

    def torch(self, torch, x, w_ih, w_hh, b_ih=None, b_hh=None, h0=None, c0=None, lengths=None):
        H = w_hh.shape[1]
        h, c = (torch.zeros(x.shape[1], H, dtype=torch.float64) if state is None else state for state in (h0, c0))
        cell = self.settings.get('nonlinearity', 'tanh') if self.op.STATES == 1 else 'lstm'
        states = []
        for x_t in x:
            if cell == 'lstm':
                h, c = torch.lstm_cell(x_t, (h, c), w_ih, w_hh, b_ih, b_hh)
            else:
                h = getattr(torch, f'rnn_{cell}_cell')(x_t, h, w_ih, w_hh, b_ih, b_hh)
            states.append(torch.stack([h, c][:self.op.STATES]))
        y = torch.stack(states, 1)
        if lengths is not None:
            y = y * (torch.arange(len(x))[:, None, None] < lengths[:, None])
        return y if self.op.STATES == 2 else y[0]


class EmbeddingGRURow:
    """False for context, with_h0 or with_lengths omits that argument."""
    sizes = ((1, 1, 1, 1, 1, 1), (2, 3, 4, 5, 3, 2), (3, 7, 17, 6, 10, 16), (9, 24, 40, 72, 70, 80),
             (4, 13, 700, 8, 5, 33))                                                             # T, B, V, E, C, H
    large = (9, 251, 2000, 64, 16, 48)      # enough different tokens for products on several threads

    def __init__(self, reset_before, context, with_h0, with_lengths=False):
        self.name = (f'embedding_gru-reset-{"before" if reset_before else "after"}{"" if context else "-no-context"}'
                     f'{"" if with_h0 else "-no-h0"}{"-lengths" if with_lengths else ""}')
        self.gru, self.context, self.with_h0 = GRURow(reset_before, with_h0, with_lengths), context, with_h0
        # any shape of ids is accepted if they are the only input
        self.wrong_axis = {} if context or with_h0 or with_lengths else {'ids': None}

    def build(self, size, rng):
        T, B, V, E, C, H = size
        built = self.gru.build((T, B, E + C if self.context else E, H), rng)
        constants = dict(ids=rng.integers(0, V, (T, B)).astype(np.int32))
        constants['ids'][T // 2:, B // 2:] = V - 1              # like padding, one id at many positions
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
    """lengths: None omits lengths and step; 'full' masks nothing; 'any' includes lengths 0 and Tk."""
    sizes = ((1, 1, 1, 1, 1), (3, 5, 2, 2, 4), (5, 3, 2, 1, 7), (6, 6, 1, 2, 4), (4, 9, 3, 2, 16), (9, 9, 3, 4, 64),
             (2, 130, 2, 2, 33), (64, 64, 2, 1, 20), (70, 130, 2, 2, 5), (130, 70, 2, 1, 17),
             (5, 6, 1, 1, 300))                                                                  # Tq, Tk, B, heads, C
    large = (33, 65, 23, 3, 31)
    wants_op = True
    wrong_axis = {'k': 1, 'v': 0}           # q: the last axis; any number of rows of k is accepted

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
        some = seen.any(-1, keepdim=True)           # no visible key would give NaN: show all keys and set the result to 0
        if self.p:
            scores = (q @ k.transpose(2, 3) / (D // op.heads)**0.5).masked_fill(~(seen | ~some), -torch.inf)
            y = scores.softmax(-1) * torch.tensor(self.keep(Tq, Tk, B, op.heads)) @ v
        else:
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen | ~some)
        return (y * some).permute(2, 0, 1, 3).reshape(Tq, B, D)


class AttentionOfColumns:
    """Attention whose q, k and v are columns of one array (T, B, 3 D), or, if q is an array of its own, of (Tk, B, 2 D)."""

    def __init__(self, *settings):
        self.op = Attention(*settings)

    def forward(self, *arguments):
        *arrays, lengths, step = arguments
        for name, array in zip(('q', 'kv') if len(arrays) > 1 else ('qkv',), arrays, strict=True):
            check(name, array, (*array.shape[:-1], array.shape[-1] // len(name) * len(name)))
        y, ctx = self.op.forward(*self.columns(*arrays), lengths, step)
        return y, (ctx, [array.shape for array in arrays])

    def backward(self, dy, ctx):
        ctx, shapes = ctx
        gradients = [empty_gradient(shape, 'gradient') for shape in shapes]
        self.op.backward(dy, ctx, out=self.columns(*gradients))
        return tuple(gradients)

    @staticmethod
    def columns(*arrays):
        columns = []
        for array, parts in zip(arrays, (1, 2) if len(arrays) > 1 else (3,), strict=True):
            D = array.shape[-1] // parts
            columns += [array[..., i * D:(i + 1) * D] for i in range(parts)]
        return columns

    def reference(self, *arguments, **settings):
        *arrays, lengths, step = arguments
        return Attention.reference(*self.columns(*arrays), lengths, step, **settings_of(self.op))


class AttentionOfColumnsRow(AttentionRow):
    sizes = ((1, 1, 1, 1, 1), (6, 6, 1, 2, 4), (3, 3, 2, 3, 5), (9, 9, 3, 4, 64), (70, 70, 2, 2, 5), (2, 2, 3, 2, 33))
    large = (33, 33, 23, 3, 31)
    wrong_axis = {'qkv': None, 'q': None, 'kv': None}

    def __init__(self, own_q=False, **settings):
        super().__init__(**settings)
        self.name, self.own_q = self.name.replace('attention', 'attention-of-columns' + '-kv' * own_q), own_q
        if own_q:
            self.sizes = *self.sizes, (4, 9, 3, 2, 16), (2, 130, 2, 2, 33), (70, 130, 2, 2, 5), (130, 70, 2, 1, 17)

    def build(self, size, rng):
        built = super().build(size, rng)
        q, k, v = built.inputs.values()
        inputs = {'q': q, 'kv': np.concatenate([k, v], -1)} if self.own_q else {'qkv': np.concatenate([q, k, v], -1)}
        constants = built.constants or dict(lengths=np.full(size[2], size[1], np.int32), step=np.zeros(1, np.int64))
        return Built(lambda: AttentionOfColumns(size[3], self.causal, self.p, 0x0123456789ABCDEF), inputs, {}, constants)

    def torch(self, torch, *, op, lengths, step, **inputs):
        return super().torch(torch, *op.columns(*inputs.values()), op.op, lengths, step)


class PackedArguments:
    """Attention of packed rows, with arrays as arguments: the offsets of q, of k, or both, then step.

    longest: of q and of k;   packs: 'q', 'k' or 'qk'
    """

    def rows(self, arrays):
        """Return q_rows and k_rows."""
        offsets = dict(zip(self.packs, arrays, strict=True))
        return [Packed(offsets[name], n) if name in offsets else None for name, n in zip('qk', self.longest, strict=True)]

    def forward(self, q, k, v, *arrays):
        *offsets, step = arrays
        return super().forward(q, k, v, None, step, *self.rows(offsets))

    def reference(self, q, k, v, *arrays):
        *offsets, step = arrays
        return Attention.reference(q, k, v, None, step, *self.rows(offsets), heads=self.heads, causal=self.causal, p=self.p,
                                   key=self.key)


class PackedAttention(PackedArguments, Attention):
    def __init__(self, heads, causal, p, key, longest, packs):
        super().__init__(heads, causal, p, key)
        self.longest, self.packs = longest, packs

    @staticmethod
    def rounded():
        return PackedAttentionInProducts


class PackedAttentionInProducts(PackedArguments, Attention.rounded()):
    def __init__(self, heads, causal, p, key, longest, packs, recipe):
        super().__init__(heads, causal, p, key, recipe=recipe)
        self.longest, self.packs = longest, packs


class PackedAttentionRow(AttentionRow):
    """Lengths include 0, 1 and the longest; sizes as in AttentionRow."""
    sizes = ((1, 1, 1, 1, 1), (3, 5, 4, 2, 4), (6, 6, 5, 1, 7), (5, 20, 40, 2, 8), (20, 20, 40, 4, 64), (9, 12, 30, 2, 33),
             (2, 130, 6, 2, 33), (70, 130, 4, 2, 5), (130, 70, 4, 1, 17), (64, 64, 5, 1, 20), (5, 6, 4, 1, 300))
    large = (33, 65, 61, 3, 31)
    wrong_axis = {'v': 0}

    def __init__(self, packs='qk', **settings):
        super().__init__(**settings)
        self.name, self.packs = self.name.replace('attention', f'packed-{packs}-attention'), packs

    def build(self, size, rng):
        Tq, Tk, B, heads, C = size
        inputs, offsets = {}, {}
        for name, T in (('q', Tq), ('k', Tk)):
            lengths = rng.integers(0, T + 1, B)
            lengths[:4] = [T, 1, 0, T][:B]
            offsets[f'{name}_rows'] = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
        if self.packs == 'qk' and Tq == Tk:
            offsets['k_rows'] = offsets['q_rows']               # self-attention
        for name, kind, T in (('q', 'q', Tq), ('k', 'k', Tk), ('v', 'k', Tk)):
            rows = (offsets[f'{kind}_rows'][-1],) if kind in self.packs else (T, B)
            inputs[name] = normal(rng, *rows, heads * C)
        constants = {name: offsets[name] for name in ('q_rows', 'k_rows') if name[0] in self.packs}
        return Built(lambda: PackedAttention(heads, self.causal, self.p, 0x0123456789ABCDEF, (Tq, Tk), self.packs), inputs, {},
                     constants | dict(step=np.array([7 + (3 << 32)])))

    def torch(self, torch, q, k, v, op, step, q_rows=None, k_rows=None):
        (Tq, Tk), B = op.longest, len(q_rows if k_rows is None else k_rows) - 1
        keep, results = np.broadcast_to(self.keep(Tq, Tk, B, op.heads), (B, op.heads, Tq, Tk)), []
        for b in range(B):
            rows = [(slice(None), b) if offsets is None else slice(*offsets[b:b + 2]) for offsets in (q_rows, k_rows, k_rows)]
            q_b, k_b, v_b = (x[at].reshape(-1, op.heads, x.shape[-1] // op.heads).transpose(0, 1)
                             for x, at in zip((q, k, v), rows, strict=True))
            n, m = q_b.shape[1], k_b.shape[1]
            seen = torch.ones(n, m, dtype=bool).tril(m - n if self.causal else m)
            scores = q_b @ k_b.transpose(1, 2) / q_b.shape[-1]**0.5
            scores = scores.masked_fill(~seen & seen.any(-1, keepdim=True), -torch.inf)
            weights = (scores.softmax(-1) if m else scores) * torch.tensor(keep[b, :, :n, :m].copy()) * seen
            results.append((weights @ v_b).transpose(0, 1).reshape(n, q.shape[-1]))
        return torch.stack(results, 1) if q_rows is None else torch.cat(results)


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
    """Return exact float32 numbers between top and 3 (or 24 float spacings, if larger) below it.  Many are equal."""
    step = max(np.spacing(np.float32(top)), np.float32(0.125))
    return np.float32(top) - step * rng.integers(0, 25, shape).astype(np.float32)


class LargeCrossEntropyRow(CrossEntropyRow):
    """Logits just below a large number.  Of each five rows, one has equal logits, one a single huge logit, one is negated."""
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
        labels[2::5][labels[2::5] >= 0] = 0         # a loss of 1e9 would hide errors in the other rows
        x[3::5] *= -1
        return x


class LinearCrossEntropyRow:
    name, smoothing = 'linear_cross_entropy', 0.0
    sizes = ((1, 1, 1, 2), (3, 4, 6, 5), (2, 7, 16, 33), (3, 60, 40, 150), (5, 70, 17, 1100), (6, 70, 66, 600))     # T, B, D, V
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


class OneBlockLinearCrossEntropyRow(LinearCrossEntropyRow):
    """Few enough rows for one block: each thread packs its parts of the weight, and threads share columns of dx."""
    name = 'linear_cross_entropy-one-block'
    sizes = ((1, 3, 70, 513), (2, 90, 70, 600))                                                 # T, B, D, V
    large = (3, 70, 100, 700)


class LargeLinearCrossEntropyRow(LinearCrossEntropyRow):
    """Biases just below 1e4.  All numbers are multiples of powers of 2, so that float32 logits are exact."""

    def __init__(self, smoothing=0.0):
        self.name, self.smoothing = f'linear_cross_entropy-large{"-smoothed" if smoothing else ""}', smoothing

    def build(self, size, rng):
        built = super().build(size, rng)
        for arrays, step in ((built.inputs, 4), (built.params, 8)):
            arrays |= {name: np.rint(step * value) / np.float32(step) for name, value in arrays.items()}
        built.params['bias'] = below(1e4, size[-1], rng)
        return built


class ExampleRow:
    """The example of an op class; it has one size."""
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
    """The rounded variant of another row's op, composed of single products, with a recipe that rounds nothing."""

    def __init__(self, row, *sizes, recipe=None):
        self.row, self.name, self.sizes, self.recipe = row, f'{row.name}-in-products', sizes, recipe or Recipe()

    def __getattr__(self, name):
        return getattr(self.row, name)

    def build(self, size, rng):
        built = self.row.build(size, rng)

        def op(**parameters):
            plain = built.op(**parameters)
            # an op stores the arguments of its constructor under their names
            arguments = inspect.signature(type(plain)).parameters
            return type(plain).rounded()(**{name: getattr(plain, name) for name in arguments}, recipe=self.recipe)
        return Built(op, built.inputs, built.params, built.constants, built.dy)


TABLE = [LinearRow(), PixelLinearRow(), MLPGradientsRow(), ReLURow(), ActivationRow(SiLU), ActivationRow(GELU),
         ActivationRow(GELUTanh, 'gelu', approximate='tanh'),
         EmbeddingRow(), SparseEmbeddingRow(), DropoutRow(), EmbeddingPositionsRow(False), EmbeddingPositionsRow(True),
         ConcatContextRow(), CrossEntropyRow(), LinearCrossEntropyRow(), OneBlockLinearCrossEntropyRow(),
         AttentionRow(), AttentionRow(causal=True), AttentionRow(lengths='any'), AttentionRow(p=0.3, lengths='full'),
         AttentionRow(True, 0.3, 'any'),
         AttentionOfColumnsRow(), AttentionOfColumnsRow(causal=True, p=0.3, lengths='any'),
         AttentionOfColumnsRow(own_q=True), AttentionOfColumnsRow(own_q=True, p=0.3, lengths='any'),
         PackedAttentionRow(), PackedAttentionRow(causal=True), PackedAttentionRow(causal=True, p=0.3),
         PackedAttentionRow('q', p=0.3), PackedAttentionRow('k', causal=True, p=0.3), PackedAttentionRow('k'),
         *(GRURow(before, h0) for before in (False, True) for h0 in (True, False)),
         *(EmbeddingGRURow(before, True, h0) for before in (False, True) for h0 in (True, False)),
         EmbeddingGRURow(False, False, False),
         *(GRURow(before, True, True) for before in (False, True)),
         *(EmbeddingGRURow(before, True, True, True) for before in (False, True)),
         *(RecurrentRow(op, **settings) for op, settings in ((LSTM, {}), (RNN, {}), (RNN, dict(nonlinearity='relu')))),
         *(RecurrentRow(op, False) for op in (LSTM, RNN)), *(RecurrentRow(op, bias=False) for op in (LSTM, RNN)),
         *(RecurrentRow(op, with_lengths=True) for op in (LSTM, RNN)),
         *(row(with_dropout) for row in (ResidualRow, ResidualNormRow, LinearResidualRow, LinearResidualNormRow)
           for with_dropout in (False, True)),
         LinearOfSequencesRow(), LinearWithoutBiasRow(), FeedForwardRow(), LayerNormRow(),
         *(SmoothFeedForwardRow(activation) for activation in ('silu', 'gelu')),
         SmoothFeedForwardRow('gelu_tanh', 'gelu', approximate='tanh'),
         PositionsRow(), HalvesOfPositionsRow(), PackedPositionsRow(), SmoothedLinearCrossEntropyRow(),
         *(BatchNormRow(training) for training in (True, False)),
         *(BatchNormOfImagesRow(training) for training in (True, False)),
         *(PoolRow(op, name, **settings) for op in (MaxPool2d, AvgPool2d) for name, settings in (
             ('', dict(kernel_size=2)), ('-overlapping', dict(kernel_size=3, stride=(2, 1), padding=1)),
             ('-gaps', dict(kernel_size=(1, 2), stride=3, padding=(0, 1))))),
         PoolRow(MaxPool2d, '-dilation', kernel_size=(2, 3), stride=2, padding=1, dilation=(2, 1)),
         *(PoolRow(op, '-ceil', kernel_size=(3, 2), stride=(2, 3), padding=1, ceil_mode=True) for op in (MaxPool2d, AvgPool2d)),
         PoolRow(AvgPool2d, '-inside', kernel_size=(3, 4), stride=2, padding=(1, 2), count_include_pad=False),
         Conv2dRow(), Conv2dRow('-same', padding='same'), Conv2dRow('-padding', padding=(1, 2), bias=False),
         Conv2dRow('-stride', stride=(2, 3), padding=2), Conv2dRow('-dilation', dilation=(1, 2), padding=(0, 1)),
         Conv2dRow('-groups', groups=2, stride=(1, 2), dilation=(2, 1), padding=1), WideConv2dRow('-wide', padding=2),
         WideConv2dRow('-wide-stride', padding=3, stride=4), DepthwiseConv2dRow('-depthwise', padding=1),
         TiledConv2dRow('-tiles', padding=1), TiledConv2dRow('-tiles-padding', padding=(0, 2), bias=False),
         EvenConv2dRow('-even', stride=2, padding=1), EvenConv2dRow('-even-4', stride=4, padding=3, bias=False),
         EvenConv2dRow('-even-mixed', stride=(3, 2), padding=2),
         DepthwiseConv2dRow('-depthwise-stride', stride=2, padding=(1, 0), bias=False),
         SmoothedCrossEntropyRow(),
         *(row(smoothing) for row in (LargeCrossEntropyRow, LargeLinearCrossEntropyRow) for smoothing in (0.0, 0.1)),
         *(InProductsRow(row, (3, 5, 2, 2, 4), (1, 6, 2, 1, 5), (9, 7, 2, 2, 33), (6, 150, 1, 2, 4)) for row in (
             AttentionRow(lengths='any'), AttentionRow(True, 0.3, 'any'))),
         *(InProductsRow(row, (3, 5, 4, 2, 4), (6, 6, 5, 1, 7), (9, 12, 30, 2, 33)) for row in (
             PackedAttentionRow(causal=True, p=0.3), PackedAttentionRow('q'), PackedAttentionRow('k', causal=True))),
         *(InProductsRow(GRURow(before, h0), (2, 3, 4, 5), (4, 13, 8, 33)) for before in (False, True) for h0 in (True, False)),
         InProductsRow(EmbeddingGRURow(False, True, True), (2, 3, 4, 5, 3, 2), (4, 13, 30, 8, 5, 33)),
         InProductsRow(EmbeddingGRURow(True, False, False), (2, 3, 4, 5, 3, 2), (4, 13, 30, 8, 5, 33)),
         *(InProductsRow(row, (3, 4, 6, 5), (3, 60, 40, 150)) for row in (
             SmoothedLinearCrossEntropyRow(), LargeLinearCrossEntropyRow(0.1))),
         InProductsRow(PixelLinearRow(), (5, 3, 9, 4), (6, 40, 784, 30)),
         InProductsRow(LinearOfSequencesRow(), (2, 3, 5, 7), (3, 5, 17, 33)),
         InProductsRow(HalfLinearRow(), (2, 3, 5, 7), (3, 25, 17, 65), recipe=Recipe.parse('fp16:accumulate=24:promote=16')),
         InProductsRow(FP8LinearRow(), (2, 3, 5, 7), (3, 25, 17, 65), (4, 40, 70, 257),
                       recipe=family(Recipe.parse('fp8:block=tensor'), fp8=True)),
         InProductsRow(FeedForwardRow(), (2, 3, 4, 7), (1, 5, 17, 16)),
         InProductsRow(SmoothFeedForwardRow('silu'), (2, 3, 4, 7), (1, 5, 17, 16))]
EXAMPLES = [pytest.param(row, row.sizes[0], id=row.name)
            for row in (ExampleRow(op) for op in every_op() if not issubclass(op, ArrayOp))]
EACH = [pytest.param(row, size, id=f'{row.name}-{"x".join(map(str, size))}') for row in TABLE for size in row.sizes]
SMALL = [p for p in EACH if np.prod([s for s in p.values[1] if s >= 1]) <= 700]
FIRST = [pytest.param(row, row.sizes[1], id=row.name) for row in TABLE]


class Run:
    """Forward and backward of a row, with a random upstream gradient and random initial parameter gradients.

    `place` puts an array on the current device, for the op.  The attributes are numpy arrays.
    """

    def __init__(self, row, size, backward=True, place=put):
        self.row, self.built = row, row.build(size, np.random.default_rng(0))
        b, rng = self.built, np.random.default_rng(1)
        self.noise = {name: normal(rng, *value.shape, scale=b.noise) for name, value in b.params.items()}
        self.params = {name: Parameter(name, place(value), put(self.noise[name].copy())) for name, value in b.params.items()}
        self.op = b.op(**self.params)
        self.placed = {name: place(value) if isinstance(value, np.ndarray) else value for name, value in b.arguments().items()}
        y, self.ctx = self.op.forward(*self.placed.values())
        self.y = get(y)
        self.dy = normal(rng, *self.y.shape) if b.dy is None else b.dy
        if backward:
            self.grads = self.backward()

    def backward(self):
        """Return the gradients of the inputs by name, then the amounts added to the gradients of the parameters."""
        before = {name: get(p.grad).copy() for name, p in self.params.items()}
        result = self.op.backward(put(self.dy), self.ctx)
        result = result if isinstance(result, tuple) else (result,)
        grads = dict(zip(self.built.inputs, (get(dx) for dx in result if dx is not None), strict=True))
        return grads | {name: get(p.grad) - before[name] for name, p in self.params.items()}

    def variables(self):
        """Return inputs and parameters by name, in float64."""
        return {name: a.astype(np.float64) for name, a in (self.built.inputs | self.built.params).items()}

    def reference(self, variables):
        """Return the result of the float64 formula of the op."""
        inputs = [variables.get(name, value) for name, value in self.built.arguments().items()]
        parameters = {name: variables[name] for name in self.params}
        return self.op.reference(*inputs, **settings_of(self.op) | parameters)

    def extra(self):
        """Return {'op': op} for PyTorch versions that need more than its parameters."""
        return {'op': self.op} if getattr(self.row, 'wants_op', False) else {}
