"""BatchNorm: normalise each column to mean 0 and variance 1 over the rows of a batch, then scale and shift it."""
from __future__ import annotations

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
    """Normalise each column over the rows.

    Shapes   x, dx, y, dy (R, C);  weight, bias, running_mean, running_var (C,)
    Forward  in training mean = mean_r x and var = mean_r (x - mean)^2, else mean = running_mean and var = running_var
             rstd = 1 / sqrt(var + eps);  xhat = (x - mean) rstd;  y = xhat weight + bias
             in training running_mean += momentum (mean - running_mean), and running_var likewise with var R / (R - 1)
    Backward g = dy weight;  in training dx = rstd (g - mean_r g - xhat mean_r (g xhat)), else dx = rstd g
             dweight += sum_r dy xhat;  dbias += sum_r dy
    Saves    x, and mean and rstd of each column
    Errors   ValueError for a single row in training, since its variance is undefined, for a negative eps, and for
             evaluation without running statistics; TypeError and ValueError naming the argument or the parameter
    Source   Ioffe and Szegedy 2015, arXiv:1502.03167
    Notes    running_mean and running_var are updated in place; None: no running statistics
    """

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
        R, _ = axes('x', x, 'R C')
        check('x', x, (R, C))
        for name, array in (('running_mean', running_mean), ('running_var', running_var)):
            if array is not None:
                check(name, array, (C,))
        y, mean, rstd = (empty(shape, name=f'{self.name}.{name}') for name, shape in (('y', (R, C)), ('mean', C), ('rstd', C)))
        launch('batch_norm_forward', y, running_mean, running_var, mean, rstd, x, self.weight.value, self.bias.value,
               R, C, self.eps, self.momentum, self.training)
        return y, self.Ctx(x, mean, rstd)

    def backward(self, dy: Array, ctx: Ctx) -> Array:
        R, C = ctx.x.shape
        check('dy', dy, (R, C))
        dx = empty_gradient((R, C), f'{self.name}.dx')
        launch('batch_norm_backward', dx, self.weight.grad, self.bias.grad, dy, ctx.x, self.weight.value, ctx.mean, ctx.rstd,
               R, C, self.training)
        return dx

    def backward_on_tensors(self, dy: Tensor, ctx: Any, parameters: dict[str, Tensor]) -> TensorGradients:
        if self.training:
            return LayerNorm.backward_on_tensors(self, dy, ctx, parameters, axis=0)      # type: ignore[arg-type]
        return (dy * (parameters['weight'] * ctx.rstd),), {
            'weight': (dy * ((ctx.x - ctx.mean) * ctx.rstd)).sum(0), 'bias': dy.sum(0)}

    @staticmethod
    def reference(x: np.ndarray, running_mean: np.ndarray | None = None, running_var: np.ndarray | None = None, *,
                  weight: np.ndarray, bias: np.ndarray, training: bool = True, eps: float = 1e-5,
                  momentum: float = 0.1) -> np.ndarray:
        mean, var = (x.mean(0), x.var(0)) if training else (running_mean, running_var)
        return (x - mean) / np.sqrt(var + eps) * weight + bias       # type: ignore[operator]

    @staticmethod
    def example(normal: Normal) -> Example:
        return [normal(7, 3)], dict(weight=normal(3), bias=normal(3))


declare(batch_norm_forward=Kernel(), batch_norm_backward=Kernel())
