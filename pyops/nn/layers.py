"""Feed-forward layers: linear, activations, norms, dropout, embedding, convolution.

Parameter names and shapes match PyTorch's, so its weights can be loaded.
"""
from __future__ import annotations

import functools
import math
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from pyops import autograd, backend, init, ndarray, ops, params
from pyops import functional as F
from pyops.autograd import Tensor
from pyops.autograd.mode import is_interpreted
from pyops.methods import accepts_torch_names, normal_axes
from pyops.nn.module import COUNT, KernelLayer, Layer, Parameter
from pyops.ops import convolution

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyops.typing import Array, Numbers


class Identity(Layer):
    """y = x.  Arguments have no effect, as in PyTorch."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def forward_tensors(self, x: Tensor) -> Tensor:
        return x

    def forward_arrays(self, x: Array) -> tuple[Array, Any]:
        return x, None

    def backward(self, dy: Array, ctx: Any) -> Array:
        return dy


class Flatten(Layer):
    """Merge the axes from start_dim to end_dim into one: (B, ...) -> (B, product of the other sizes), a view."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        self.start_dim, self.end_dim = operator.index(start_dim), operator.index(end_dim)

    def forward_tensors(self, x: Any) -> Any:
        if not x.shape:
            raise ValueError('x: expected shape (B, ...), got ()')
        if len(x.shape) == 1 and (self.start_dim, self.end_dim) == (1, -1):
            return x.reshape(x.shape[0], 1)
        (start,), (end,) = normal_axes(self.start_dim, len(x.shape)), normal_axes(self.end_dim, len(x.shape))
        if end < start:
            raise ValueError(f'expected start_dim at or before end_dim, got {self.start_dim} and {self.end_dim} for {x.shape}')
        return x.reshape(*x.shape[:start], math.prod(x.shape[start:end + 1]), *x.shape[end + 1:])

    def forward_arrays(self, x: Any) -> tuple[Any, Any]:
        return self.forward_tensors(x), x.shape

    def backward(self, dy: Array, ctx: Any) -> Array:
        return dy.reshape(ctx)

    def settings(self) -> str:
        return '' if (self.start_dim, self.end_dim) == (1, -1) else f'start_dim={self.start_dim}, end_dim={self.end_dim}'


class Unflatten(Layer):
    """Split an axis into several, of these sizes: the inverse of Flatten.  One size may be -1."""

    def __init__(self, dim: int, unflattened_size: Sequence[int]) -> None:
        self.dim, self.unflattened_size = operator.index(dim), tuple(unflattened_size)

    def forward_tensors(self, x: Any) -> Any:
        (axis,) = normal_axes(self.dim, len(x.shape))
        sizes, known = list(self.unflattened_size), math.prod(n for n in self.unflattened_size if n != -1)
        if -1 in sizes and known:
            sizes[sizes.index(-1)] = x.shape[axis] // known
        if math.prod(sizes) != x.shape[axis]:
            raise ValueError(f'unflattened_size: expected sizes with product {x.shape[axis]}, got {self.unflattened_size}')
        return x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1:])

    def settings(self) -> str:
        return f'dim={self.dim}, unflattened_size={self.unflattened_size}'


class Linear(KernelLayer):
    """y = x weight' + bias;  x (..., in_features), y (..., out_features).

    weight (out_features, in_features) is initialised with kaiming_uniform, bias (out_features,) with zeros.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        self.in_features, self.out_features = in_features, out_features
        self.weight = Parameter((out_features, in_features), init.kaiming_uniform())
        self.bias = Parameter((out_features,), init.zeros()) if bias else None

    def op(self) -> tuple[Any, dict[str, Parameter], dict[str, Any]]:
        return ops.Linear, {'weight': self.weight} if self.bias is None else {'weight': self.weight, 'bias': self.bias}, {}

    def in_double(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def settings(self) -> str:
        return f'{self.in_features}, {self.out_features}{", bias=False" if self.bias is None else ""}'


class Bilinear(Layer):
    """y[..., o] = x1 weight[o] x2' + bias[o];  x1 (..., in1_features), x2 (..., in2_features), y (..., out_features).

    weight (out_features, in1_features, in2_features), bias (out_features,) or None, uniform in +-in1_features^-0.5.
    """

    def __init__(self, in1_features: int, in2_features: int, out_features: int, bias: bool = True) -> None:
        self.in1_features, self.in2_features, self.out_features = in1_features, in2_features, out_features
        values = init.uniform(-in1_features ** -0.5, in1_features ** -0.5)
        self.weight = Parameter((out_features, in1_features, in2_features), values)
        self.bias = Parameter((out_features,), values) if bias else None

    def forward_tensors(self, x1: Tensor, x2: Tensor) -> Tensor:
        return F.bilinear(x1, x2, self.weight, self.bias)

    def settings(self) -> str:
        return f'{self.in1_features}, {self.in2_features}, {self.out_features}{", bias=False" if self.bias is None else ""}'


class _Activation(KernelLayer):
    """Base of activations with a kernel.  inplace: accepted as in PyTorch, without effect: x is never changed."""

    def __init__(self, inplace: bool = False) -> None:
        self.inplace = inplace


class ReLU(_Activation):
    """y = max(x, 0)"""

    def op(self) -> tuple[Any, dict[str, Parameter], dict[str, Any]]:
        return ops.ReLU, {}, {'name': self._path or 'relu'}

    def in_double(self, x: Tensor) -> Tensor:
        return F.relu(x)


class SiLU(_Activation):
    """y = x / (1 + exp(-x))"""

    def op(self) -> tuple[Any, dict[str, Parameter], dict[str, Any]]:
        return ops.SiLU, {}, {'name': self._path or 'silu'}

    def in_double(self, x: Tensor) -> Tensor:
        return F.silu(x)


class GELU(_Activation):
    """y = x (1 + erf(x / sqrt(2))) / 2; with approximate='tanh' y = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2."""

    def __init__(self, approximate: str = 'none') -> None:
        if approximate not in ('none', 'tanh'):
            raise ValueError(f"GELU: approximate: expected 'none' or 'tanh', got {approximate!r}")
        self.approximate = approximate

    def op(self) -> tuple[Any, dict[str, Parameter], dict[str, Any]]:
        op = ops.GELU if self.approximate == 'none' else ops.GELUTanh
        return op, {}, {'name': self._path or op.kernel}

    def in_double(self, x: Tensor) -> Tensor:
        return F.gelu(x, self.approximate)

    def settings(self) -> str:
        return '' if self.approximate == 'none' else f'approximate={self.approximate!r}'


class Softmax(Layer):
    """y = exp(x) / sum exp(x) along an axis."""

    @accepts_torch_names
    def __init__(self, axis: int = -1) -> None:
        self.axis = axis

    def forward_tensors(self, x: Tensor) -> Tensor:
        return F.softmax(x, self.axis)

    def settings(self) -> str:
        return f'axis={self.axis}'


class LogSoftmax(Softmax):
    """y = x - log sum exp(x) along an axis."""

    def forward_tensors(self, x: Tensor) -> Tensor:
        return F.log_softmax(x, self.axis)


class Dropout(Layer):
    """Set each element to 0 with probability p during training and scale the rest by 1 / (1 - p).  Identity in evaluation.

    The mask is a function of (seed, name of the layer in the tree, `count`).  `count` is an array of one element, the number
    of calls so far; replaying a plan increments it too.
    inplace: accepted as in PyTorch, without effect: x is never changed.
    generator: a numpy Generator that draws the masks instead: an element is kept if its number of generator.random(shape) is
    at least p.  A call on Tensors may also be given its mask: dropout(x, mask=keep), where nonzero keeps an element.  A plan
    cannot record either.
    """
    count: Array

    def __init__(self, p: float = 0.5, inplace: bool = False, *, generator: np.random.Generator | None = None) -> None:
        if not 0 <= p <= 1:
            raise ValueError(f'Dropout: p: expected 0 <= p <= 1, got {p}')
        if not isinstance(generator, np.random.Generator | None):
            raise TypeError('Dropout: generator: expected a numpy Generator, such as numpy.random.default_rng(0), got '
                            f'{type(generator).__name__}')
        self.p, self.inplace, self.generator = p, inplace, generator
        self.register_buffer('count', backend.zeros(1, np.int64), persistent=False)

    def draw(self) -> tuple[float, int, Any]:
        """Return p, key and step of the next mask; p is 0 and step None if nothing is dropped."""
        if not (self.training and self.p):
            return 0.0, 0, None
        if self.p == 1:
            raise ValueError('dropout: expected a probability below 1 of dropping an attention weight, got 1')
        if self._path is None:
            self.root().build()
        step = backend.empty(1, np.int64, f'{self._path or "dropout"}.step')
        backend.launch('tick', step, self.count)
        return self.p, params.key(self.seed, self._path), step         # type: ignore[arg-type]

    def _given_mask(self, shape: tuple[int, ...], mask: Numbers | None) -> np.ndarray | None:
        """Return float32 factors of x: of `mask`, or drawn from the generator; None to use the counter or to drop nothing."""
        if not (self.training and self.p) or (mask is None and self.generator is None):
            return None
        if backend.is_recorded():
            raise TypeError('got a mask or a generator while a plan records, which would replay one mask; use neither')
        if mask is None:
            keep = self.generator.random(shape) >= self.p          # type: ignore[union-attr]
        else:
            keep = np.asarray(mask.numpy() if hasattr(mask, 'numpy') else mask) != 0
        if keep.shape != shape:
            raise ValueError(f'mask: expected shape {shape}, got {keep.shape}')
        return keep * np.float32(1 / (1 - self.p))

    def forward_tensors(self, x: Tensor, mask: Numbers | None = None) -> Tensor:
        if self.training and self.p == 1:
            return x * 0.0
        factors = self._given_mask(x.shape, mask)
        if factors is not None:
            return x * F.tensor(factors, x)
        p, key, step = self.draw()
        if not p:
            return x
        op = ops.Dropout(p, key, self._path or 'dropout')
        if F.is_double(x):                              # the same mask as in float32
            kept = autograd.apply(op, Tensor(np.ones(x.shape, np.float32), device=x.device), step) != 0
            return x * kept.astype(x.dtype) / (1 - p)
        return autograd.apply(op, x, step)

    def forward_arrays(self, x: Array) -> tuple[Array, Any]:
        if self.generator is not None or self.p == 1:
            return Layer.forward_arrays(self, x)
        p, key, step = self.draw()
        if not p:
            return x, None
        op = ops.Dropout(p, key, self._path or 'dropout')
        y, ctx = op.forward(x, step)
        return y, (op, ctx)

    def backward(self, dy: Array, ctx: Any) -> Array:
        if ctx is None:
            return dy
        if not isinstance(ctx[0], ops.Dropout):
            return Layer.backward(self, dy, ctx)
        op, ctx = ctx
        return op.backward(dy, ctx)

    def settings(self) -> str:
        return f'p={self.p}'


class Dropout1d(Dropout):
    """Dropout of whole channels: x (N, C, ...)."""

    def forward_tensors(self, x: Tensor, mask: Numbers | None = None) -> Tensor:
        if not (self.training and self.p):
            return x
        kept = super().forward_tensors(F.tensor(np.ones(x.shape[:2], np.float32), x), mask)
        return x * kept.reshape(*x.shape[:2], *[1] * (x.ndim - 2))

    def forward_arrays(self, x: Array) -> tuple[Array, Any]:
        return Layer.forward_arrays(self, x)

    def backward(self, dy: Array, ctx: Any) -> Array:
        return Layer.backward(self, dy, ctx)


class Dropout2d(Dropout1d):
    """Dropout of whole channels of images (N, C, H, W)."""


class Dropout3d(Dropout1d):
    """Dropout of whole channels of volumes (N, C, D, H, W)."""


class FeatureAlphaDropout(Dropout1d):
    """AlphaDropout of whole channels: x (N, C, ...)."""

    def forward_tensors(self, x: Tensor, mask: Numbers | None = None) -> Tensor:
        if not (self.training and self.p):
            return x
        kept = super().forward_tensors(F.tensor(np.ones(x.shape, np.float32), x), mask) != 0
        return F.keeping_moments(x, kept, self.p)


class AlphaDropout(Dropout1d):
    """Set elements to the limit of selu with probability p during training, and keep mean 0 and variance 1."""

    def forward_tensors(self, x: Tensor, mask: Numbers | None = None) -> Tensor:
        if not (self.training and self.p):
            return x
        kept = Dropout.forward_tensors(self, F.tensor(np.ones(x.shape, np.float32), x), mask) != 0
        return F.keeping_moments(x, kept, self.p)


def _accepts_dim(init: Callable[..., None]) -> Callable[..., None]:
    """Decorate __init__ of a norm: accept its first argument also by the needle course's name, dim."""
    @functools.wraps(init)
    def wrapper(self: Layer, *args: Any, dim: int | None = None, **named: Any) -> None:
        init(self, *args if dim is None else (dim, *args), **named)
    return wrapper


class LayerNorm(KernelLayer):
    """Normalise the last axis to mean 0 and variance 1, then scale by weight and add bias;  x (..., features).

    normalized_shape: the size of the last axis, or a tuple of the sizes of several, normalised together.
    elementwise_affine=False: without weight and bias;  bias=False: without bias.
    """

    @_accepts_dim
    def __init__(self, normalized_shape: int | Sequence[int], eps: float = 1e-5, elementwise_affine: bool = True,
                 bias: bool = True) -> None:
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.normalized_shape, self.eps = shape, eps
        self.weight = Parameter(shape, init.ones()) if elementwise_affine else None
        self.bias = Parameter(shape, init.zeros()) if elementwise_affine and bias else None

    @property
    def features(self) -> int:
        """Number of elements that are normalised together."""
        return math.prod(self.normalized_shape)

    def op(self) -> tuple[Any, dict[str, Parameter], dict[str, Any]]:
        return ops.LayerNorm, {'weight': self.weight, 'bias': self.bias}, {'eps': self.eps}       # type: ignore[dict-item]

    def is_one_kernel(self) -> bool:
        """Return whether ops.LayerNorm computes it."""
        return len(self.normalized_shape) == 1 and self.bias is not None

    def in_double(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    def forward_tensors(self, x: Tensor) -> Tensor:
        if self.is_one_kernel():
            return super().forward_tensors(x)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    def forward_arrays(self, x: Array) -> tuple[Array, Any]:
        return super().forward_arrays(x) if self.is_one_kernel() else Layer.forward_arrays(self, x)

    def backward(self, dy: Array, ctx: Any) -> Array:
        return super().backward(dy, ctx) if self.is_one_kernel() else Layer.backward(self, dy, ctx)

    def settings(self) -> str:
        size = self.features if len(self.normalized_shape) == 1 else self.normalized_shape
        return f'{size}{", elementwise_affine=False" if self.weight is None else ", bias=False" if self.bias is None else ""}'


LayerNorm1d = LayerNorm


class _BatchNorm(KernelLayer):
    """Normalise each channel over the batch to mean 0 and variance 1, then scale by weight and add bias.

    Training updates running_mean and running_var, moving averages that replace the batch statistics in evaluation.
    affine=False: without weight and bias.  track_running_stats=False: evaluation normalises over the batch, too.
    momentum=None: the averages are over all batches since the layer was made.
    num_batches_tracked: the number of these batches, int32 of shape (), in host memory; replays of a plan do not count.
    """
    running_mean: Tensor | None
    running_var: Tensor | None
    dimensions: tuple[int, ...]         # of x

    @_accepts_dim
    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
                 track_running_stats: bool = True) -> None:
        self.num_features = self.features = num_features
        self.eps, self.momentum, self.affine, self.track_running_stats = eps, momentum, affine, track_running_stats
        self.weight = Parameter((num_features,), init.ones()) if affine else None
        self.bias = Parameter((num_features,), init.zeros()) if affine else None
        self.running_mean = self.running_var = None
        self.num_batches_tracked: Tensor | None = None
        if track_running_stats:
            self.register_buffer('running_mean', Tensor(ndarray.as_ndarray(backend.zeros(num_features))))
            self.register_buffer('running_var', Tensor(ndarray.as_ndarray(backend.put(np.ones(num_features, np.float32)))))
            self.register_buffer(COUNT, Tensor(ndarray.from_numpy(np.zeros((), np.int32), backend.HOST)))

    def op(self) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        return (ops.BatchNorm, {'weight': self.weight, 'bias': self.bias},
                {'training': self.training or not self.track_running_stats, 'eps': self.eps,
                 'momentum': self._weight_of_batch() if self.momentum is None else self.momentum})

    def _weight_of_batch(self) -> float:
        """Return the weight of this batch in averages over all batches; 0 without averages."""
        return 0.0 if self.num_batches_tracked is None else 1 / max(int(self.num_batches_tracked.array.numpy()), 1)

    def constants(self) -> tuple[Any, ...]:
        return self.running_mean, self.running_var

    def in_double(self, x: Tensor) -> Tensor:
        _, _, settings = self.op()
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, **settings)

    def forward_tensors(self, x: Tensor) -> Tensor:
        self._check(x)
        if self.affine or F.is_double(x):
            return super().forward_tensors(x)
        op, _, settings = self.op()
        parameters = {name: Tensor(np.full(self.num_features, value, np.float32), device=x.device)
                      for name, value in (('weight', 1), ('bias', 0))}
        return autograd.apply(op, x, *self.constants(), **parameters, **settings)

    def forward_arrays(self, x: Array) -> tuple[Array, Any]:
        self._check(x)
        return super().forward_arrays(x) if self.affine else Layer.forward_arrays(self, x)

    def backward(self, dy: Array, ctx: Any) -> Array:
        return super().backward(dy, ctx) if self.affine else Layer.backward(self, dy, ctx)

    def _check(self, x: Any) -> None:
        if len(x.shape) not in self.dimensions:
            raise ValueError(f'x: expected {" or ".join(map(str, self.dimensions))} axes, got shape {x.shape}')
        if not self.training or is_interpreted():
            return
        if self.momentum is None and backend.is_recorded():
            raise TypeError('momentum: expected a number while a plan records, got None: the count of batches is in Python')
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.array.numpy()[...] += 1

    def settings(self) -> str:
        more = ''.join(f', {name}=False' for name in ('affine', 'track_running_stats') if not getattr(self, name))
        return f'{self.num_features}{more}'


class BatchNorm1d(_BatchNorm):
    """Normalise each feature over the batch to mean 0 and variance 1, then scale by weight and add bias.

    x (B, features), or sequences (B, features, L), normalised over B and L.  Training updates running_mean and running_var,
    moving averages that replace the batch statistics in evaluation.
    """
    dimensions = 2, 3


class BatchNorm2d(_BatchNorm):
    """BatchNorm1d of images (N, features, H, W): each channel is normalised over N, H and W."""
    dimensions = 4,


class BatchNorm3d(_BatchNorm):
    """BatchNorm1d of volumes (N, features, D, H, W): each channel is normalised over N, D, H and W."""
    dimensions = 5,


class GroupNorm(Layer):
    """Normalise each group of channels of each sample to mean 0 and variance 1, then scale by weight and add bias.

    x (N, channels, ...);  weight and bias (channels,), absent with affine=False.  Wu and He 2018, arXiv:1803.08494.
    """

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True) -> None:
        if num_groups < 1 or num_channels % num_groups:
            raise ValueError(f'GroupNorm: num_groups: expected a divisor of {num_channels} channels, got {num_groups}')
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, eps
        self.weight = Parameter((num_channels,), init.ones()) if affine else None
        self.bias = Parameter((num_channels,), init.zeros()) if affine else None

    def forward_tensors(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or x.shape[1] != self.num_channels:
            raise ValueError(f'x: expected shape (N, {self.num_channels}, ...), got {x.shape}')
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)

    def settings(self) -> str:
        return f'{self.num_groups}, {self.num_channels}{"" if self.weight is not None else ", affine=False"}'


class _InstanceNorm(Layer):
    """Normalise each channel of each sample to mean 0 and variance 1;  x (N, channels, ...) or one sample.

    affine=True: then scale by weight and add bias.  track_running_stats: False; there are no running statistics.
    """
    dimensions = 0          # axes after the channels

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = False,
                 track_running_stats: bool = False) -> None:
        if track_running_stats:
            raise ValueError(f'{type(self).__name__}: track_running_stats: expected False, got True; every sample has '
                             'statistics of its own')
        self.num_features, self.eps, self.momentum, self.affine = num_features, eps, momentum, affine
        self.weight = Parameter((num_features,), init.ones()) if affine else None
        self.bias = Parameter((num_features,), init.zeros()) if affine else None

    def forward_tensors(self, x: Tensor) -> Tensor:
        if x.ndim not in (self.dimensions + 1, self.dimensions + 2) or x.shape[-self.dimensions - 1] != self.num_features:
            raise ValueError(f'x: expected {self.dimensions + 2} axes, the second of size {self.num_features}, got {x.shape}')
        one = x.ndim == self.dimensions + 1
        y = F.group_norm(x.unsqueeze(0) if one else x, self.num_features, self.weight, self.bias, self.eps)
        return y.squeeze(0) if one else y

    def settings(self) -> str:
        return f'{self.num_features}{", affine=True" if self.affine else ""}'


class InstanceNorm1d(_InstanceNorm):
    """Normalise each channel of each sequence (N, channels, L) to mean 0 and variance 1."""
    dimensions = 1


class InstanceNorm2d(_InstanceNorm):
    """Normalise each channel of each image (N, channels, H, W) to mean 0 and variance 1."""
    dimensions = 2


class InstanceNorm3d(_InstanceNorm):
    """Normalise each channel of each volume (N, channels, D, H, W) to mean 0 and variance 1."""
    dimensions = 3


class RMSNorm(Layer):
    """Divide the last axes, of sizes normalized_shape, by their root mean square, then scale by weight.

    eps: added to the mean square; None: the distance from 1 to the next float32.  elementwise_affine=False: without weight.
    """

    def __init__(self, normalized_shape: int | Sequence[int], eps: float | None = None,
                 elementwise_affine: bool = True) -> None:
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps = eps
        self.weight = Parameter(self.normalized_shape, init.ones()) if elementwise_affine else None

    def forward_tensors(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)

    def settings(self) -> str:
        return f'{self.normalized_shape}, eps={self.eps}'


class Embedding(KernelLayer):
    """y = weight[ids];  ids (...) of any integer type, y (..., embedding_dim).

    weight (num_embeddings, embedding_dim) is initialised with normal(1).  padding_idx: the row of this id starts as zeros and
    gets no gradient; a negative one counts from the end.  max_norm, norm_type, scale_grad_by_freq: see F.embedding.  sparse:
    accepted as in PyTorch, without effect.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, max_norm: float | None = None,
                 norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False) -> None:
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f'Embedding: padding_idx: expected one of {num_embeddings} rows, got {padding_idx}')
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.max_norm, self.norm_type, self.scale_grad_by_freq = max_norm, norm_type, scale_grad_by_freq
        normal = init.normal(1.0)
        self.weight = Parameter((num_embeddings, embedding_dim),
                                normal if self.padding_idx is None else init.with_zero_row(normal, self.padding_idx))

    @classmethod
    def from_pretrained(cls, embeddings: Numbers, freeze: bool = True, padding_idx: int | None = None,
                        max_norm: float | None = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False,
                        sparse: bool = False) -> Embedding:
        """Return a layer with this table (num_embeddings, embedding_dim).   freeze: it is not trained"""
        rows, size = np.shape(embeddings)               # type: ignore[arg-type]
        layer = cls(rows, size, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        layer.weight.assign(embeddings)
        layer.weight.requires_grad_(not freeze)
        return layer

    def op(self) -> tuple[Any, dict[str, Parameter], dict[str, Any]]:
        return ops.Embedding, {'weight': self.weight}, {'padding_idx': self.padding_idx}

    def _is_one_kernel(self) -> bool:
        return self.max_norm is None and not self.scale_grad_by_freq and self.weight.dtype == np.float32

    def forward_tensors(self, ids: Tensor) -> Tensor:
        if self._is_one_kernel():
            return super().forward_tensors(ids)
        return F.embedding(ids, self.weight, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq)

    def backward(self, dy: Array, ctx: Any) -> Any:
        return super().backward(dy, ctx) if self._is_one_kernel() else Layer.backward(self, dy, ctx)

    def forward_arrays(self, ids: Any) -> tuple[Array, Any]:
        if not self._is_one_kernel():
            return Layer.forward_arrays(self, ids)
        if isinstance(ids, np.ndarray) and ids.dtype.kind in 'iu' and not backend.is_recorded():
            ids = ids if ids.dtype == np.int32 else backend.put(ndarray.array(ids, np.int32, ndarray.cpu()).numpy())
        return super().forward_arrays(ids)

    def settings(self) -> str:
        return f'{self.num_embeddings}, {self.embedding_dim}' + (
            '' if self.padding_idx is None else f', padding_idx={self.padding_idx}') + (
            '' if self.max_norm is None else f', max_norm={self.max_norm}') + (
            ', scale_grad_by_freq=True' if self.scale_grad_by_freq else '')


class EmbeddingBag(Layer):
    """The mean, sum or maximum of the rows weight[ids] of each bag; see F.embedding_bag.

    weight (num_embeddings, embedding_dim) is initialised with normal(1).
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, *, mode: str = 'mean', sparse: bool = False) -> None:
        self.num_embeddings, self.embedding_dim, self.mode = num_embeddings, embedding_dim, mode
        self.weight = Parameter((num_embeddings, embedding_dim), init.normal(1.0))

    def forward_tensors(self, ids: Tensor, offsets: Tensor | None = None) -> Tensor:
        return F.embedding_bag(ids, self.weight, offsets, self.mode)

    def settings(self) -> str:
        return f'{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}'


class _Images(KernelLayer):
    """Base of layers of images (N, C, H, W), on Tensors also of one image (C, H, W)."""

    def forward_tensors(self, x: Tensor) -> Tensor:
        if len(x.shape) != 3:
            return super().forward_tensors(x)
        return super().forward_tensors(x.unsqueeze(0)).squeeze(0)


class _Convolution(_Images):
    """Base of the convolutions.  DIMENSIONS: axes of an image after the channels.

    weight (out_channels, in_channels / groups, *kernel_size) is initialised with kaiming_uniform, bias (out_channels,) with
    zeros.  kernel_size, stride, padding and dilation: an int, or a tuple with one for each axis; padding also 'same' or
    'valid'.  padding_mode: 'zeros', or 'reflect', 'replicate' or 'circular', as in F.pad.
    """
    DIMENSIONS = 2

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int | Sequence[int], stride: int | Sequence[int] = 1,
                 padding: int | str | Sequence[int] = 0, dilation: int | Sequence[int] = 1, groups: int = 1,
                 bias: bool = True, padding_mode: str = 'zeros') -> None:
        _naming(self, convolution.check_settings, *(x if isinstance(x, str) else self._both(x, fill) for x, fill in (
            (stride, 1), (padding, 0), (dilation, 1))), groups)
        if padding_mode not in ('zeros', 'reflect', 'replicate', 'circular'):
            raise ValueError(f"{type(self).__name__}: padding_mode: expected 'zeros', 'reflect', 'replicate' or 'circular', "
                             f'got {padding_mode!r}')
        self.kernel_size = self._each('kernel_size', kernel_size, 1)
        self.in_channels, self.out_channels, self.groups, self.padding_mode = in_channels, out_channels, groups, padding_mode
        self.stride, self.dilation = self._each('stride', stride, 1), self._each('dilation', dilation, 1)
        self.padding: Any = padding if isinstance(padding, str) else self._each('padding', padding, 0)
        self._add_weights(bias)

    def _add_weights(self, bias: bool) -> None:
        self.weight, self.bias = _filters(self.in_channels, self.out_channels, self.kernel_size, self.groups, bias)

    def _both(self, value: Any, fill: int) -> Any:
        """Return a setting as the pair of images, whose height is 1 for sequences."""
        return value if self.DIMENSIONS == 2 else (fill, F.one(value))

    def _each(self, name: str, value: Any, least: int) -> tuple[int, ...]:
        """Return a setting as a tuple with an int for each axis.  ValueError for fewer than `least`."""
        return _naming(self, convolution.pair, name, self._both(value, 1), least)[-self.DIMENSIONS:]

    def _padded(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return x, padded if the mode is not zeros, and the padding that remains."""
        if self.padding_mode == 'zeros' or self.padding == 'valid':
            return x, self.padding
        if self.padding == 'same':
            totals = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
            widths = [(n // 2, n - n // 2) for n in totals]
        else:
            widths = [(n, n) for n in self.padding]
        return F.pad(x, [n for pair in reversed(widths) for n in pair], self.padding_mode), 0

    def settings(self) -> str:
        one = (1,) * self.DIMENSIONS
        options = (('stride', self.stride, one), ('padding', self.padding, (0,) * self.DIMENSIONS),
                   ('dilation', self.dilation, one), ('groups', self.groups, 1), ('bias', self.bias is not None, True),
                   ('padding_mode', self.padding_mode, 'zeros'), ('output_padding', getattr(self, 'output_padding', 0), 0))
        more = ''.join(f', {name}={value!r}' for name, value, default in options if value != default)
        return f'{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}{more}'


class Conv2d(_Convolution):
    """y[n, o] = sum over channels and window of x * weight[o], plus bias[o];  x (N, C, H, W) -> y (N, O, Ho, Wo).

    weight (out_channels, in_channels / groups, kh, kw) is initialised with kaiming_uniform, bias (out_channels,) with zeros.
    kernel_size, stride, padding and dilation: an int or a pair; padding also 'same' or 'valid'.  See pyops.ops.Conv2d.
    padding_mode: 'zeros', or 'reflect', 'replicate' or 'circular', as in F.pad.
    """

    def op(self) -> tuple[Any, dict[str, Parameter], dict[str, Any]]:
        return (ops.Conv2d, {'weight': self.weight} | ({'bias': self.bias} if self.bias is not None else {}),
                {'stride': self.stride, 'padding': self.padding, 'dilation': self.dilation, 'groups': self.groups})

    def in_double(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)

    def forward_tensors(self, x: Tensor) -> Tensor:
        if self.padding_mode == 'zeros':
            return super().forward_tensors(x)
        x, padding = self._padded(x)
        return F.conv2d(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)

    def forward_arrays(self, x: Array) -> tuple[Array, Any]:
        return super().forward_arrays(x) if self.padding_mode == 'zeros' else Layer.forward_arrays(self, x)

    def backward(self, dy: Array, ctx: Any) -> Array:
        return super().backward(dy, ctx) if self.padding_mode == 'zeros' else Layer.backward(self, dy, ctx)


class Conv(Layer):
    """The convolution of the needle course: x (N, C, H, W) -> (N, O, Ho, Wo), padded by kernel_size // 2 on each side.

    weight (k, k, in_channels, out_channels) is initialised with kaiming_uniform, bias (out_channels,) uniformly in
    +-(in_channels k^2)^-0.5.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, bias: bool = True) -> None:
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.stride = _naming(self, F.one, kernel_size), _naming(self, F.one, stride)
        terms = in_channels * self.kernel_size ** 2
        self.weight = Parameter(shape=(self.kernel_size, self.kernel_size, in_channels, out_channels),
                                init=init.uniform(-math.sqrt(6 / terms), math.sqrt(6 / terms)))
        self.bias = Parameter((out_channels,), init.uniform(-terms ** -0.5, terms ** -0.5)) if bias else None

    def forward_tensors(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight.permute(3, 2, 0, 1), self.bias, self.stride, self.kernel_size // 2)

    def settings(self) -> str:
        more = ('' if self.stride == 1 else f', stride={self.stride}') + ('' if self.bias is not None else ', bias=False')
        return f'{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}{more}'


class Conv1d(_Convolution):
    """Conv2d of sequences: x (N, C, L) -> y (N, O, Lo);  weight (out_channels, in_channels / groups, k).  Settings: ints."""
    DIMENSIONS = 1

    def forward_tensors(self, x: Tensor) -> Tensor:
        x, padding = self._padded(x)
        return F.conv1d(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)

    forward_arrays, backward = Layer.forward_arrays, Layer.backward


class Conv3d(Layer):
    """Conv2d of volumes: x (N, C, D, H, W) -> y (N, O, Do, Ho, Wo);  weight (out_channels, in_channels / groups, kd, kh, kw).

    kernel_size, stride, padding and dilation: an int or three; padding also 'same' or 'valid'.  padding_mode: 'zeros'.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int | Sequence[int], stride: int | Sequence[int] = 1,
                 padding: int | str | Sequence[int] = 0, dilation: int | Sequence[int] = 1, groups: int = 1,
                 bias: bool = True, padding_mode: str = 'zeros') -> None:
        if padding_mode != 'zeros':
            raise ValueError(f"Conv3d: padding_mode: expected 'zeros', got {padding_mode!r}")
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.stride, self.dilation = (_naming(self, F.triple, name, value) for name, value in (
            ('kernel_size', kernel_size), ('stride', stride), ('dilation', dilation)))
        self.padding = padding if isinstance(padding, str) else _naming(self, F.triple, 'padding', padding, 0)
        self.weight, self.bias = _filters(in_channels, out_channels, self.kernel_size, groups, bias)

    def forward_tensors(self, x: Tensor) -> Tensor:
        return F.conv3d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)

    def settings(self) -> str:
        options = (('stride', (1, 1, 1)), ('padding', (0, 0, 0)), ('dilation', (1, 1, 1)), ('groups', 1),
                   ('output_padding', (0, 0, 0)))
        more = ''.join(f', {name}={getattr(self, name)!r}' for name, default in options
                       if getattr(self, name, default) != default)
        return (f'{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}{more}'
                f'{", bias=False" if self.bias is None else ""}')


class ConvTranspose2d(_Convolution):
    """The transpose of Conv2d: x (N, C, H, W) -> y (N, O, Ho, Wo), Ho = (H - 1) stride - 2 padding + dilation (kh - 1) +
    output_padding + 1.

    weight (in_channels, out_channels / groups, kh, kw).  output_padding: below the stride.  See F.conv_transpose2d.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int | Sequence[int], stride: int | Sequence[int] = 1,
                 padding: int | Sequence[int] = 0, output_padding: int | Sequence[int] = 0, groups: int = 1, bias: bool = True,
                 dilation: int | Sequence[int] = 1, padding_mode: str = 'zeros') -> None:
        if padding_mode != 'zeros' or isinstance(padding, str):
            raise ValueError(f"{type(self).__name__}: expected padding_mode 'zeros' and a padding of ints, got "
                             f'{padding_mode!r} and {padding!r}')
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias)
        self.output_padding = self._each('output_padding', output_padding, 0)

    def _add_weights(self, bias: bool) -> None:
        self.weight, _ = _filters(self.out_channels, self.in_channels, self.kernel_size, self.groups, False)
        self.bias = Parameter((self.out_channels,), init.zeros()) if bias else None

    def forward_tensors(self, x: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        more = self.output_padding
        if output_size is not None:
            more = _rest_of_size(x.shape[-self.DIMENSIONS:], output_size, self)
        function: Any = F.conv_transpose2d if self.DIMENSIONS == 2 else F.conv_transpose1d
        return function(x, self.weight, self.bias, self.stride, self.padding, more, self.groups, self.dilation)

    forward_arrays, backward = Layer.forward_arrays, Layer.backward


class ConvTranspose3d(Conv3d):
    """The transpose of Conv3d: x (N, C, D, H, W) -> y (N, O, Do, Ho, Wo);  weight (in_channels, out_channels / groups, kd, kh,
    kw).  Settings and sizes as in ConvTranspose2d, with ints or triples."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int | Sequence[int], stride: int | Sequence[int] = 1,
                 padding: int | Sequence[int] = 0, output_padding: int | Sequence[int] = 0, groups: int = 1, bias: bool = True,
                 dilation: int | Sequence[int] = 1, padding_mode: str = 'zeros') -> None:
        if isinstance(padding, str):
            raise ValueError(f'ConvTranspose3d: padding: expected ints, got {padding!r}')
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode)
        self.output_padding = _naming(self, F.triple, 'output_padding', output_padding, 0)
        self.weight, _ = _filters(out_channels, in_channels, self.kernel_size, groups, False)

    def forward_tensors(self, x: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        more = self.output_padding
        if output_size is not None:
            more = _rest_of_size(x.shape[-3:], output_size, self)
        settings: Any = self.stride, self.padding, more, self.groups, self.dilation
        return F.conv_transpose3d(x, self.weight, self.bias, *settings)


def _rest_of_size(sizes: Sequence[int], output_size: Sequence[int], layer: Any) -> tuple[int, ...]:
    """Return the output_padding of a transposed convolution with which images of these sizes become output_size."""
    return tuple(n - ((size - 1) * s - 2 * p + d * (k - 1) + 1) for n, size, s, p, d, k in zip(
        output_size[-len(sizes):], sizes, layer.stride, layer.padding, layer.dilation, layer.kernel_size, strict=True))


class ConvTranspose1d(ConvTranspose2d):
    """ConvTranspose2d of sequences: x (N, C, L) -> y (N, O, Lo);  weight (in_channels, out_channels / groups, k)."""
    DIMENSIONS = 1


class MaxPool2d(_Images):
    """The maximum of each window: x (N, C, H, W) -> (N, C, Ho, Wo).

    kernel_size, stride, padding, dilation: an int or a pair; stride None: kernel_size.  ceil_mode: a last window may reach
    beyond the padding.  return_indices: return also the positions of the maxima, for MaxUnpool2d.
    """

    def __init__(self, kernel_size: int | Sequence[int], stride: int | Sequence[int] | None = None,
                 padding: int | Sequence[int] = 0, dilation: int | Sequence[int] = 1, return_indices: bool = False,
                 ceil_mode: bool = False) -> None:
        self.return_indices = return_indices
        self.kernel_size, self.stride = kernel_size, kernel_size if stride is None else stride
        self.padding, self.dilation, self.ceil_mode = padding, dilation, ceil_mode
        _naming(self, ops.MaxPool2d, kernel_size, stride, padding, dilation, ceil_mode)

    def op(self) -> tuple[Any, dict[str, Parameter], dict[str, Any]]:
        return ops.MaxPool2d, {}, {'kernel_size': self.kernel_size, 'stride': self.stride, 'padding': self.padding,
                                   'dilation': self.dilation, 'ceil_mode': self.ceil_mode, 'name': self._path or 'max_pool2d'}

    def in_double(self, x: Tensor) -> Any:
        return F.max_pool2d(x, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode, self.return_indices)

    def forward_tensors(self, x: Tensor) -> Any:
        return self.in_double(x) if self.return_indices else super().forward_tensors(x)

    def forward_arrays(self, x: Array) -> tuple[Any, Any]:
        return Layer.forward_arrays(self, x) if self.return_indices else super().forward_arrays(x)

    def backward(self, dy: Any, ctx: Any) -> Array:
        return Layer.backward(self, dy, ctx) if self.return_indices else super().backward(dy, ctx)

    def settings(self) -> str:
        return _pooling_settings(self, dilation=1, ceil_mode=False)


class AvgPool2d(_Images):
    """The average of each window: x (N, C, H, W) -> (N, C, Ho, Wo).

    kernel_size, stride, padding: an int or a pair; stride None: kernel_size.  ceil_mode: a last window may reach beyond the
    padding; only its elements inside count.  count_include_pad: padding counts as zeros.
    """

    def __init__(self, kernel_size: int | Sequence[int], stride: int | Sequence[int] | None = None,
                 padding: int | Sequence[int] = 0, ceil_mode: bool = False, count_include_pad: bool = True,
                 divisor_override: int | None = None) -> None:
        self.kernel_size, self.stride = kernel_size, kernel_size if stride is None else stride
        self.padding, self.ceil_mode, self.count_include_pad = padding, ceil_mode, count_include_pad
        self.divisor_override = divisor_override
        _naming(self, ops.AvgPool2d, kernel_size, stride, padding, ceil_mode)

    def in_double(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, self.kernel_size, self.stride, self.padding, self.ceil_mode, self.count_include_pad,
                            self.divisor_override)

    def forward_tensors(self, x: Tensor) -> Tensor:
        return super().forward_tensors(x) if self.divisor_override is None else self.in_double(x)

    def forward_arrays(self, x: Array) -> tuple[Array, Any]:
        return super().forward_arrays(x) if self.divisor_override is None else Layer.forward_arrays(self, x)

    def backward(self, dy: Array, ctx: Any) -> Array:
        return super().backward(dy, ctx) if self.divisor_override is None else Layer.backward(self, dy, ctx)

    def op(self) -> tuple[Any, dict[str, Parameter], dict[str, Any]]:
        return ops.AvgPool2d, {}, {'kernel_size': self.kernel_size, 'stride': self.stride, 'padding': self.padding,
                                   'ceil_mode': self.ceil_mode, 'count_include_pad': self.count_include_pad,
                                   'name': self._path or 'avg_pool2d'}

    def settings(self) -> str:
        return _pooling_settings(self, ceil_mode=False, count_include_pad=True)


class MaxPool1d(Layer):
    """The maximum of each window: x (N, C, L) -> (N, C, Lo).  Settings as in MaxPool2d, all ints."""

    def __init__(self, kernel_size: int, stride: int | None = None, padding: int = 0, dilation: int = 1,
                 return_indices: bool = False, ceil_mode: bool = False) -> None:
        self.return_indices = return_indices
        self.kernel_size = F.one(kernel_size)
        self.stride, self.padding = self.kernel_size if stride is None else F.one(stride), F.one(padding)
        self.dilation, self.ceil_mode = F.one(dilation), ceil_mode
        _naming(self, ops.MaxPool2d, self.kernel_size, self.stride, self.padding, self.dilation, ceil_mode)

    def forward_tensors(self, x: Tensor) -> Tensor:
        return F.max_pool1d(x, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode, self.return_indices)

    settings = MaxPool2d.settings


class AvgPool1d(Layer):
    """The average of each window: x (N, C, L) -> (N, C, Lo).  Settings as in AvgPool2d, all ints."""

    def __init__(self, kernel_size: int, stride: int | None = None, padding: int = 0, ceil_mode: bool = False,
                 count_include_pad: bool = True) -> None:
        self.kernel_size = F.one(kernel_size)
        self.stride, self.padding = self.kernel_size if stride is None else F.one(stride), F.one(padding)
        self.ceil_mode, self.count_include_pad = ceil_mode, count_include_pad
        _naming(self, ops.AvgPool2d, self.kernel_size, self.stride, self.padding, ceil_mode)

    def forward_tensors(self, x: Tensor) -> Tensor:
        return F.avg_pool1d(x, self.kernel_size, self.stride, self.padding, self.ceil_mode, self.count_include_pad)

    settings = AvgPool2d.settings


def _naming(layer: Layer, function: Any, *args: Any) -> Any:
    """Call a function that checks arguments of a layer; prefix its errors with the name of the layer."""
    try:
        return function(*args)
    except (TypeError, ValueError) as error:
        raise type(error)(f'{type(layer).__name__}: {error}') from None


def _pooling_settings(layer: Any, **defaults: Any) -> str:
    """Return the text of a pooling layer's settings that differ from the defaults."""
    defaults = {'stride': layer.kernel_size, 'padding': 0} | defaults
    more = ''.join(f', {name}={getattr(layer, name)}' for name, value in defaults.items() if getattr(layer, name) != value)
    return f'kernel_size={layer.kernel_size}{more}'


def _filters(in_channels: int, out_channels: int, window: tuple[int, ...], groups: int,
             bias: bool) -> tuple[Parameter, Parameter | None]:
    """Return the weight and the bias of a convolution."""
    if groups < 1 or in_channels % groups or out_channels % groups:
        raise ValueError(f'groups: expected a divisor of {in_channels} and {out_channels} channels, got {groups}')
    return (Parameter((out_channels, in_channels // groups, *window), init.kaiming_uniform()),
            Parameter((out_channels,), init.zeros()) if bias else None)
