"""BatchNorm: normalise each channel to mean 0 and variance 1 over a batch, then scale and shift it."""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops.backend import axes, check, check_parameter, empty, empty_gradient, launch
from pyops.backend.kernels import Kernel, declare
from pyops.ops.layer_norm import LayerNorm

if TYPE_CHECKING:
    from pyops.autograd import Tensor
    from pyops.params import Parameter
    from pyops.typing import Array, Example, Normal, TensorGradients


class BatchNorm:
    """Normalise each channel over rows and positions.

    Shapes   x, dx, y, dy (R, C, ...): rows of C features, or C channels of sequences or images
             weight, bias, running_mean, running_var (C,)
    Forward  with means over all axes but the second, n values each: in training mean = mean x and
             var = mean (x - mean)^2, else mean = running_mean and var = running_var
             rstd = 1 / sqrt(var + eps);  xhat = (x - mean) rstd;  y = xhat weight + bias
             in training running_mean += momentum (mean - running_mean), and running_var likewise with var n / (n - 1)
    Backward g = dy weight;  in training dx = rstd (g - mean g - xhat mean (g xhat)), else dx = rstd g
             dweight += sum dy xhat;  dbias += sum dy
    Saves    x, and mean and rstd of each channel
    Errors   ValueError for a single value per channel in training, since its variance is undefined, for a negative eps, and
             for evaluation without running statistics; TypeError and ValueError naming the argument or the parameter
    Source   Ioffe and Szegedy 2015, arXiv:1502.03167
    Notes    running_mean and running_var are updated in place; None: no running statistics
    """
    same_launches = True            # see pyops/backend/recorded_ops.py

    class Ctx(NamedTuple):
        x: Array
        mean: Array
        rstd: Array

    def __init__(self, weight: Parameter, bias: Parameter, training: bool = True, eps: float = 1e-5, momentum: float = 0.1,
                 name: str | None = None) -> None:
        self.weight, self.bias, self.name = weight, bias, name or weight.owner
        self.training, self.eps, self.momentum = training, eps, momentum
        C, = axes(weight.name, weight.value, 'C')
        check_parameter(weight, (C,))
        check_parameter(bias, (C,))

    def forward(self, x: Array, running_mean: Array | None = None, running_var: Array | None = None) -> tuple[Array, Ctx]:
        C = len(self.weight.value)
        shape = np.shape(x) if len(np.shape(x)) > 2 else axes('x', x, 'R C')
        check('x', x, (shape[0], C, *shape[2:]))
        for name, array in (('running_mean', running_mean), ('running_var', running_var)):
            if array is not None:
                check(name, array, (C,))
        y, mean, rstd = (empty(shape, name=f'{self.name}.{name}') for name, shape in (('y', shape), ('mean', C), ('rstd', C)))
        launch('batch_norm_forward', y, running_mean, running_var, mean, rstd, x, self.weight.value, self.bias.value,
               *_sizes(x), self.eps, self.momentum, self.training)
        return y, self.Ctx(x, mean, rstd)

    def backward(self, dy: Array, ctx: Ctx) -> Array:
        check('dy', dy, ctx.x.shape)
        dx = empty_gradient(dy.shape, f'{self.name}.dx')
        launch('batch_norm_backward', dx, self.weight.grad, self.bias.grad, dy, ctx.x, self.weight.value, ctx.mean, ctx.rstd,
               *_sizes(dy), self.training)
        return dx

    def backward_on_tensors(self, dy: Tensor, ctx: Any, parameters: dict[str, Tensor]) -> TensorGradients:
        over, per_channel = (0, *range(2, dy.ndim)), (-1, *[1] * (dy.ndim - 2))
        if self.training:
            rows = {name: value.reshape(per_channel) for name, value in parameters.items()}
            (dx,), gradients = LayerNorm.backward_on_tensors(self, dy, ctx, rows, axis=over)        # type: ignore[arg-type]
            return (dx,), {name: gradient.reshape(-1) for name, gradient in gradients.items()}
        mean, rstd, weight = (a.reshape(per_channel) for a in (ctx.mean, ctx.rstd, parameters['weight']))
        return (dy * (weight * rstd),), {'weight': (dy * ((ctx.x - mean) * rstd)).sum(over), 'bias': dy.sum(over)}

    @staticmethod
    def reference(x: np.ndarray, running_mean: np.ndarray | None = None, running_var: np.ndarray | None = None, *,
                  weight: np.ndarray, bias: np.ndarray, training: bool = True, eps: float = 1e-5,
                  momentum: float = 0.1) -> np.ndarray:
        over, per_channel = (0, *range(2, x.ndim)), (-1, *[1] * (x.ndim - 2))
        mean, var = (x.mean(over), x.var(over)) if training else (running_mean, running_var)
        mean, scale, bias = (a.reshape(per_channel) for a in (mean, weight / np.sqrt(var + eps), bias))     # type: ignore
        return (x - mean) * scale + bias

    @staticmethod
    def example(normal: Normal) -> Example:
        return [normal(7, 3)], dict(weight=normal(3), bias=normal(3))


def _sizes(x: Array) -> tuple[int, int, int]:
    """Return the sizes of x (R, C, ...) as rows, channels and positions."""
    return x.shape[0], x.shape[1], math.prod(x.shape[2:])


declare(batch_norm_forward=Kernel(), batch_norm_backward=Kernel())
