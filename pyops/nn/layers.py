"""Feed-forward layers and losses: linear, activations, norms, dropout, embedding, convolution.

Parameter names and shapes match PyTorch's, so its weights can be loaded.
"""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from pyops import autograd, backend, init, ndarray, ops, params
from pyops import functional as F
from pyops.methods import accepts_torch_names
from pyops.nn.module import KernelLayer, Layer, Parameter
from pyops.ops import convolution

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyops.autograd import Tensor
    from pyops.typing import Array


class Identity(Layer):
    """y = x"""

    def forward_tensors(self, x: Tensor) -> Tensor:
        return x

    def forward_arrays(self, x: Array) -> tuple[Array, Any]:
        return x, None

    def backward(self, dy: Array, ctx: Any) -> Array:
        return dy


class Flatten(Layer):
    """(B, ...) -> (B, product of the other sizes): a view."""

    def forward_tensors(self, x: Tensor) -> Tensor:
        if not x.shape:
            raise ValueError('x: expected shape (B, ...), got ()')
        return x.reshape(x.shape[0], math.prod(x.shape[1:]))

    def forward_arrays(self, x: Any) -> tuple[Any, Any]:
        return self.forward_tensors(x), x.shape

    def backward(self, dy: Array, ctx: Any) -> Array:
        return dy.reshape(ctx)


class Linear(KernelLayer):
    """y = x weight' + bias;  x (..., in_features), y (..., out_features).

    weight (out_features, in_features) is initialised with kaiming_uniform, bias (out_features,) with zeros.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        self.in_features, self.out_features = in_features, out_features
        self.weight = Parameter((out_features, in_features), init.kaiming_uniform())
        self.bias = Parameter((out_features,), init.zeros()) if bias else None

    def op(self) -> tuple[Any, dict[str, Parameter], dict[str, Any]]:
        return ops.Linear, {'weight': self.weight} | ({'bias': self.bias} if self.bias is not None else {}), {}

    def settings(self) -> str:
        return f'{self.in_features}, {self.out_features}{", bias=False" if self.bias is None else ""}'


class ReLU(KernelLayer):
    """y = max(x, 0)"""

    def op(self) -> tuple[Any, dict[str, Parameter], dict[str, Any]]:
        return ops.ReLU, {}, {'name': self._path or 'relu'}


class SiLU(KernelLayer):
    """y = x / (1 + exp(-x))"""

    def op(self) -> tuple[Any, dict[str, Parameter], dict[str, Any]]:
        return ops.SiLU, {}, {'name': self._path or 'silu'}


class GELU(KernelLayer):
    """y = x (1 + erf(x / sqrt(2))) / 2"""

    def op(self) -> tuple[Any, dict[str, Parameter], dict[str, Any]]:
        return ops.GELU, {}, {'name': self._path or 'gelu'}


class Tanh(Layer):
    """y = tanh(x)"""

    def forward_tensors(self, x: Tensor) -> Tensor:
        return F.tanh(x)


class Sigmoid(Layer):
    """y = 1 / (1 + exp(-x))"""

    def forward_tensors(self, x: Tensor) -> Tensor:
        return F.sigmoid(x)


class Softmax(Layer):
    """y = exp(x) / sum exp(x) along an axis."""

    @accepts_torch_names
    def __init__(self, axis: int = -1) -> None:
        self.axis = axis

    def forward_tensors(self, x: Tensor) -> Tensor:
        return F.softmax(x, self.axis)

    def settings(self) -> str:
        return f'axis={self.axis}'


class Dropout(Layer):
    """Set each element to 0 with probability p during training and scale the rest by 1 / (1 - p).  Identity in evaluation.

    The mask is a function of (seed, name of the layer in the tree, `count`).  `count` is an array of one element, the number
    of calls so far; replaying a plan increments it too.
    """
    count: Array

    def __init__(self, p: float = 0.5) -> None:
        if not 0 <= p < 1:
            raise ValueError(f'Dropout: p: expected 0 <= p < 1, got {p}')
        self.p = p
        self.register_buffer('count', backend.zeros(1, np.int64), persistent=False)

    def draw(self) -> tuple[float, int, Any]:
        """Return p, key and step of the next mask; p is 0 and step None if nothing is dropped."""
        if not (self.training and self.p):
            return 0.0, 0, None
        if self._path is None:
            self.root().build()
        step = backend.empty(1, np.int64, f'{self._path or "dropout"}.step')
        backend.launch('tick', step, self.count)
        return self.p, params.key(self.seed, self._path), step         # type: ignore[arg-type]

    def forward_tensors(self, x: Tensor) -> Tensor:
        p, key, step = self.draw()
        return autograd.apply(ops.Dropout(p, key, self._path or 'dropout'), x, step) if p else x

    def forward_arrays(self, x: Array) -> tuple[Array, Any]:
        p, key, step = self.draw()
        if not p:
            return x, None
        op = ops.Dropout(p, key, self._path or 'dropout')
        y, ctx = op.forward(x, step)
        return y, (op, ctx)

    def backward(self, dy: Array, ctx: Any) -> Array:
        if ctx is None:
            return dy
        op, ctx = ctx
        return op.backward(dy, ctx)

    def settings(self) -> str:
        return f'p={self.p}'


class LayerNorm(KernelLayer):
    """Normalise the last axis to mean 0 and variance 1, then scale by weight and add bias;  x (..., features)."""

    def __init__(self, features: int, eps: float = 1e-5) -> None:
        self.features, self.eps = features, eps
        self.weight, self.bias = Parameter((features,), init.ones()), Parameter((features,), init.zeros())

    def op(self) -> tuple[Any, dict[str, Parameter], dict[str, Any]]:
        return ops.LayerNorm, {'weight': self.weight, 'bias': self.bias}, {'eps': self.eps}

    def settings(self) -> str:
        return f'{self.features}'


LayerNorm1d = LayerNorm


class _BatchNorm(KernelLayer):
    """Normalise each channel over the batch to mean 0 and variance 1, then scale by weight and add bias.

    Training updates running_mean and running_var, moving averages that replace the batch statistics in evaluation.
    """
    running_mean: Array
    running_var: Array
    dimensions: tuple[int, ...]         # of x

    def __init__(self, features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        self.features, self.eps, self.momentum = features, eps, momentum
        self.weight, self.bias = Parameter((features,), init.ones()), Parameter((features,), init.zeros())
        self.register_buffer('running_mean', backend.zeros(features))
        self.register_buffer('running_var', backend.put(np.ones(features, np.float32)))

    def op(self) -> tuple[Any, dict[str, Parameter], dict[str, Any]]:
        return (ops.BatchNorm, {'weight': self.weight, 'bias': self.bias},
                {'training': self.training, 'eps': self.eps, 'momentum': self.momentum})

    def constants(self) -> tuple[Any, ...]:
        return self.running_mean, self.running_var

    def forward_tensors(self, x: Tensor) -> Tensor:
        self._check(x)
        return super().forward_tensors(x)

    def forward_arrays(self, x: Array) -> tuple[Array, Any]:
        self._check(x)
        return super().forward_arrays(x)

    def _check(self, x: Any) -> None:
        if np.ndim(x) not in self.dimensions:
            raise ValueError(f'x: expected {" or ".join(map(str, self.dimensions))} axes, got shape {np.shape(x)}')

    def settings(self) -> str:
        return f'{self.features}'


class BatchNorm1d(_BatchNorm):
    """Normalise each feature over the batch to mean 0 and variance 1, then scale by weight and add bias.

    x (B, features), or sequences (B, features, L), normalised over B and L.  Training updates running_mean and running_var,
    moving averages that replace the batch statistics in evaluation.
    """
    dimensions = 2, 3


class BatchNorm2d(_BatchNorm):
    """BatchNorm1d of images (N, features, H, W): each channel is normalised over N, H and W."""
    dimensions = 4,


class Embedding(KernelLayer):
    """y = weight[ids];  ids (...) of any integer type, y (..., dim).  weight (number, dim) is initialised with normal(1)."""

    def __init__(self, number: int, dim: int) -> None:
        self.number, self.dim = number, dim
        self.weight = Parameter((number, dim), init.normal(1.0))

    def op(self) -> tuple[Any, dict[str, Parameter], dict[str, Any]]:
        return ops.Embedding, {'weight': self.weight}, {}

    def forward_arrays(self, ids: Any) -> tuple[Array, Any]:
        if isinstance(ids, np.ndarray) and ids.dtype.kind in 'iu' and not backend.is_recorded():
            ids = ids if ids.dtype == np.int32 else backend.put(ndarray.array(ids, np.int32, ndarray.cpu()).numpy())
        return super().forward_arrays(ids)

    def settings(self) -> str:
        return f'{self.number}, {self.dim}'


class Conv2d(KernelLayer):
    """y[n, o] = sum over channels and window of x * weight[o], plus bias[o];  x (N, C, H, W) -> y (N, O, Ho, Wo).

    weight (out_channels, in_channels / groups, kh, kw) is initialised with kaiming_uniform, bias (out_channels,) with zeros.
    kernel_size, stride, padding and dilation: an int or a pair; padding also 'same' or 'valid'.  See pyops.ops.Conv2d.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int | Sequence[int], stride: int | Sequence[int] = 1,
                 padding: int | str | Sequence[int] = 0, dilation: int | Sequence[int] = 1, groups: int = 1,
                 bias: bool = True) -> None:
        self.kernel_size = convolution.pair('kernel_size', kernel_size, 1)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.weight, self.bias = _filters(in_channels, out_channels, self.kernel_size, groups, bias)

    def op(self) -> tuple[Any, dict[str, Parameter], dict[str, Any]]:
        return (ops.Conv2d, {'weight': self.weight} | ({'bias': self.bias} if self.bias is not None else {}),
                {'stride': self.stride, 'padding': self.padding, 'dilation': self.dilation, 'groups': self.groups})

    def settings(self) -> str:
        options = (('stride', self.stride, 1), ('padding', self.padding, 0), ('dilation', self.dilation, 1),
                   ('groups', self.groups, 1), ('bias', self.bias is not None, True))
        more = ''.join(f', {name}={value!r}' for name, value, default in options if value != default)
        return f'{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}{more}'


class Conv1d(Layer):
    """Conv2d of sequences: x (N, C, L) -> y (N, O, Lo);  weight (out_channels, in_channels / groups, kernel_size)."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, padding: int | str = 0,
                 dilation: int = 1, groups: int = 1, bias: bool = True) -> None:
        self.kernel_size, self.in_channels, self.out_channels = kernel_size, in_channels, out_channels
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.weight, self.bias = _filters(in_channels, out_channels, (kernel_size,), groups, bias)

    def forward_tensors(self, x: Tensor) -> Tensor:
        return F.conv1d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)

    settings = Conv2d.settings


class MaxPool2d(KernelLayer):
    """The maximum of each window: x (N, C, H, W) -> (N, C, Ho, Wo).  Settings: an int or a pair; stride None: kernel_size."""

    def __init__(self, kernel_size: int | Sequence[int], stride: int | Sequence[int] | None = None,
                 padding: int | Sequence[int] = 0, dilation: int | Sequence[int] = 1) -> None:
        self.kernel_size, self.stride = kernel_size, kernel_size if stride is None else stride
        self.padding, self.dilation = padding, dilation

    def op(self) -> tuple[Any, dict[str, Parameter], dict[str, Any]]:
        return ops.MaxPool2d, {}, {'kernel_size': self.kernel_size, 'stride': self.stride, 'padding': self.padding,
                                   'dilation': self.dilation, 'name': self._path or 'max_pool2d'}

    def settings(self) -> str:
        return _pooling_settings(self, dilation=1)


class AvgPool2d(KernelLayer):
    """The average of each window: x (N, C, H, W) -> (N, C, Ho, Wo).

    kernel_size, stride, padding: an int or a pair; stride None: kernel_size.  count_include_pad: padding counts as zeros.
    """

    def __init__(self, kernel_size: int | Sequence[int], stride: int | Sequence[int] | None = None,
                 padding: int | Sequence[int] = 0, count_include_pad: bool = True) -> None:
        self.kernel_size, self.stride = kernel_size, kernel_size if stride is None else stride
        self.padding, self.count_include_pad = padding, count_include_pad

    def op(self) -> tuple[Any, dict[str, Parameter], dict[str, Any]]:
        return ops.AvgPool2d, {}, {'kernel_size': self.kernel_size, 'stride': self.stride, 'padding': self.padding,
                                   'count_include_pad': self.count_include_pad, 'name': self._path or 'avg_pool2d'}

    def settings(self) -> str:
        return _pooling_settings(self, count_include_pad=True)


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


# ---- losses ------------------------------------------------------------------------------------------------------------

class CrossEntropyLoss(Layer):
    """Return the mean of -log softmax(x)[label] over rows whose label is not ignore_index;  x (..., C), labels (...) int32.

    On arrays, x is (R, C) and the loss (1,); backward(dloss (1,), ctx) returns dx.
    """

    def __init__(self, ignore_index: int = -100) -> None:
        self.ignore_index = ignore_index

    def forward_tensors(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(x, labels, self.ignore_index)

    def forward_arrays(self, x: Array, labels: Array) -> tuple[Array, Any]:
        op = ops.CrossEntropy(self.ignore_index, name=self._path or 'loss')
        loss, ctx = op.forward(x, labels)
        return loss, (op, ctx)

    def backward(self, dy: Array, ctx: Any) -> Array:
        op, ctx = ctx
        return self._naming(op.backward, dy, ctx)


class SoftmaxLoss(CrossEntropyLoss):
    """CrossEntropyLoss under the name that the needle course uses."""


class MSELoss(Layer):
    """Return the mean squared difference of x and target, which have one shape."""

    def forward_tensors(self, x: Tensor, target: Tensor) -> Tensor:
        if x.shape != target.shape:
            raise ValueError(f'target: expected shape {x.shape}, got {target.shape}')
        return F.mse_loss(x, target)
