"""LayerNorm: normalise each row to mean 0 and variance 1, then scale and shift each column."""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops.backend import REAL, axes, check, check_parameter, empty, empty_gradient, launch, work
from pyops.backend.kernels import Kernel, declare

if TYPE_CHECKING:
    from pyops.autograd import Tensor
    from pyops.params import Parameter
    from pyops.typing import Array, Axis, Example, Normal, TensorGradients


class LayerNorm:
    """Normalise over the last axis.

    Shapes   x, dx, y, dy (..., C);  weight (C,), bias (C,)
    Forward  mean = mean_c x;  rstd = 1 / sqrt(mean_c (x - mean)^2 + eps);  xhat = (x - mean) rstd
             y = xhat weight + bias
    Backward g = dy weight;  dx = rstd (g - mean_c g - xhat mean_c (g xhat))
             dweight += sum_r dy xhat;  dbias += sum_r dy
    Saves    x, and mean and rstd of each row
    Errors   ValueError for a negative eps; TypeError and ValueError naming the argument or the parameter
    Source   Ba, Kiros and Hinton 2016, arXiv:1607.06450; docs/layer_norm.md derives the gradient
    Notes    eps prevents a division by 0 for a constant row, which has variance 0 and y = bias
    """

    class Ctx(NamedTuple):
        x: Array
        mean: Array
        rstd: Array

    def __init__(self, weight: Parameter, bias: Parameter, eps: float = 1e-5, name: str | None = None) -> None:
        self.weight, self.bias, self.eps, self.name = weight, bias, eps, name or weight.owner
        C, = axes(weight.name, weight.value, 'C')
        check_parameter(weight, (C,))
        check_parameter(bias, (C,))

    def forward(self, x: Array) -> tuple[Array, Ctx]:
        C = len(self.weight.value)
        check('x', x, (*np.shape(x)[:-1], C), REAL)
        rows = x.shape[:-1]
        y = empty(x.shape, x.dtype, f'{self.name}.y')
        mean, rstd = empty(rows, name=f'{self.name}.mean'), empty(rows, name=f'{self.name}.rstd')
        launch('layer_norm_forward', y, mean, rstd, x, self.weight.value, self.bias.value, math.prod(rows), C, self.eps)
        return y, self.Ctx(x, mean, rstd)

    def backward(self, dy: Array, ctx: Ctx, into: Array | None = None) -> Array:
        """Return dx.  into: add dx to this array, which may be dy, and return it."""
        C, R = len(self.weight.value), ctx.mean.size
        check('dy', dy, ctx.x.shape, ctx.x.dtype)
        if into is not None:
            check('into', into, ctx.x.shape, ctx.x.dtype)
        dx = empty_gradient(ctx.x.shape, f'{self.name}.dx', dy.dtype) if into is None else into
        launch('layer_norm_backward', dx, self.weight.grad, self.bias.grad, dy, ctx.x, self.weight.value, ctx.mean, ctx.rstd,
               work('layer_norm_backward', R, C), R, C, into is not None)
        return dx

    def backward_on_tensors(self, dy: Tensor, ctx: Any, parameters: dict[str, Tensor], axis: Axis = -1) -> TensorGradients:
        from pyops.ops.array import sum_to
        weight, bias, x = parameters['weight'], parameters['bias'], ctx.x
        centred = x - x.mean(axis, True)
        rstd = 1 / ((centred * centred).mean(axis, True) + self.eps).sqrt()
        xhat, g = centred * rstd, dy * weight
        dx = rstd * (g - g.mean(axis, True) - xhat * (g * xhat).mean(axis, True))
        return (dx,), {'weight': sum_to(dy * xhat, weight.shape), 'bias': sum_to(dy, bias.shape)}

    @staticmethod
    def reference(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float = 1e-5) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight + bias

    @staticmethod
    def example(normal: Normal) -> Example:
        return [normal(4, 6)], dict(weight=normal(6), bias=normal(6))


declare(layer_norm_forward=Kernel(), layer_norm_backward=Kernel())
