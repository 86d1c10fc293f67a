"""LinearResidual and LinearResidualNorm: a linear layer as the branch of a residual connection."""
from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops.backend import as_rows, check, empty, launch
from pyops.ops.dropout import Dropout
from pyops.ops.layer_norm import LayerNorm
from pyops.ops.linear import Linear
from pyops.ops.residual import Residual
from pyops.ops.residual_norm import ResidualNorm

if TYPE_CHECKING:
    from pyops.autograd import Tensor
    from pyops.params import Parameter
    from pyops.typing import Array, Example, Normal, TensorGradients


def _backward_on_tensors(linear: Linear, dropout: Dropout, dy: Any, ctx: Any, parameters: dict[str, Tensor]) -> TensorGradients:
    """Return the gradients of x, residual, weight and bias.   dy: of the sum;  ctx: with x and step"""
    (dx,), gradients = linear.backward_on_tensors(_dropped(dropout, dy, ctx.step), ctx, parameters)
    return (dx, dy), gradients


def _dropped(dropout: Dropout, x: Tensor, step: Array | None) -> Tensor:
    from pyops.ops.array import call
    return x if step is None else call(dropout, x, step)


class LinearResidual:
    """Add the result of a linear layer to an array, after dropout of the result.

    Shapes   x, dx (..., I);  residual, y, dy, dresidual (..., O);  weight (O, I);  bias (O,) or None
             step (1,) int64 array: each step has a different mask
    Forward  y = residual + (x weight' + bias) * keep / (1 - p), keep as in Dropout; all 1 if step is None or p is 0
    Backward dresidual = dy, the same array;  db = dy * keep / (1 - p);  dx, dweight and dbias as in Linear, of db
    Saves    x and the step, which must not change between forward and backward
    Errors   ValueError if not 0 <= p < 1; TypeError and ValueError naming the argument or the parameter
    Source   as in Linear and Residual
    Notes    one kernel forward; bit-equal to Linear and Residual.  On a GPU a large product of bfloat16 adds its result to the
             residual, without storing it
    """

    class Ctx(NamedTuple):
        x: Array
        step: Array | None         # None: no dropout

    def __init__(self, weight: Parameter, bias: Parameter | None = None, p: float = 0.0, key: int = 0,
                 name: str | None = None) -> None:
        self.linear, self.p, self.key = Linear(weight, bias, name), p, key
        self.connection = Residual(p, key, f'{self.linear.name}.residual')

    def forward(self, x: Array, residual: Array, step: Array | None = None) -> tuple[Array, Ctx]:
        if step is not None:
            check('step', step, (1,), np.int64)
        y, ctx = self.linear.forward(x, into=functools.partial(self._product, residual, step))
        return y, self.Ctx(ctx.x, step if self.p else None)

    def _product(self, residual: Array, step: Array | None, x: Array, weight: Array, bias: Array | None) -> Array:
        shape = *x.shape[:-1], len(weight)
        check('residual', residual, shape, x.dtype)
        y = empty(shape, x.dtype, f'{self.connection.name}.y')
        launch('linear_residual', y, x, weight, bias, residual, step, *as_rows(y).shape, x.shape[-1], self.p,
               self.key)
        return y

    def backward(self, dy: Array, ctx: Ctx) -> tuple[Array | None, Array]:
        """Return dx and dresidual."""
        shape = *ctx.x.shape[:-1], len(self.linear.weight.value)
        dresidual, branch = self.connection.backward(dy, Residual.Ctx(shape, ctx.step))
        return self.linear.backward(branch, Linear.Ctx(ctx.x)), dresidual

    def backward_on_tensors(self, dy: Tensor, ctx: Any, parameters: dict[str, Tensor]) -> TensorGradients:
        return _backward_on_tensors(self.linear, Dropout(self.p, self.key), dy, ctx, parameters)

    @staticmethod
    def reference(x: np.ndarray, residual: np.ndarray, step: np.ndarray | None = None, *, weight: np.ndarray,
                  bias: np.ndarray | None = None, p: float = 0.0, key: int = 0) -> np.ndarray:
        return Residual.reference(residual, Linear.reference(x, weight, bias), step, p, key)

    @staticmethod
    def example(normal: Normal) -> Example:
        return [normal(2, 3, 4), normal(2, 3, 5), np.array([3])], dict(weight=normal(5, 4), bias=normal(5), p=0.3, key=7)


class LinearResidualNorm:
    """Add the result of a linear layer to an array, after dropout of the result, and normalise the sum over the last axis.

    Shapes   x, dx (..., I);  residual, y, dy, dresidual (..., O);  weight (O, I);  bias, norm_weight, norm_bias (O,)
             step (1,) int64 array: each step has a different mask
    Forward  sum = residual + (x weight' + bias) * keep / (1 - p), as in LinearResidual;  y = layer norm of sum
    Backward dresidual = gradient of sum, as in LayerNorm;  db = dresidual * keep / (1 - p);
             dx, dweight and dbias as in Linear, of db
    Saves    as Linear and ResidualNorm; residual, which only second derivatives read
    Errors   as in Linear and ResidualNorm
    Source   as in Linear and ResidualNorm
    Notes    bit-equal to Linear and ResidualNorm.  On a GPU a large product of bfloat16 adds its result to the residual,
             without storing it; otherwise the kernels are theirs
    """

    class Ctx(NamedTuple):
        x: Array
        residual: Array
        sum: Array
        mean: Array
        rstd: Array
        step: Array | None         # None: no dropout

    def __init__(self, weight: Parameter, bias: Parameter | None, norm_weight: Parameter, norm_bias: Parameter, p: float = 0.0,
                 key: int = 0, eps: float = 1e-5, name: str | None = None) -> None:
        self.linear, self.p, self.key, self.eps = Linear(weight, bias, name), p, key, eps
        name = self.linear.name
        self.norm = ResidualNorm(norm_weight, norm_bias, p, key, eps, f'{name}.norm', f'{name}.residual')

    def forward(self, x: Array, residual: Array, step: Array | None = None) -> tuple[Array, Ctx]:
        check('residual', residual, (*np.shape(x)[:-1], len(self.linear.weight.value)), x.dtype)
        (y, norm), linear = self.linear.forward(x, into=functools.partial(self.norm.forward_of_product, residual, step))
        return y, self.Ctx(linear.x, residual, *norm)

    def backward(self, dy: Array, ctx: Ctx) -> tuple[Array | None, Array]:
        """Return dx and dresidual."""
        dresidual, branch = self.norm.backward(dy, ResidualNorm.Ctx(ctx.sum, ctx.mean, ctx.rstd, ctx.step))
        return self.linear.backward(branch, Linear.Ctx(ctx.x)), dresidual

    def backward_on_tensors(self, dy: Tensor, ctx: Any, parameters: dict[str, Tensor]) -> TensorGradients:
        dropout, branch = Dropout(self.p, self.key), ctx.x @ parameters['weight'].T
        branch = branch + parameters['bias'] if 'bias' in parameters else branch
        total = ctx.residual + _dropped(dropout, branch, ctx.step)
        of_norm = {name: parameters[f'norm_{name}'] for name in ('weight', 'bias')}
        norm: Any = self.norm           # has eps, as a LayerNorm
        (dsum,), of_norm = LayerNorm.backward_on_tensors(norm, dy, LayerNorm.Ctx(total, ctx.mean, ctx.rstd), of_norm)
        inputs, gradients = _backward_on_tensors(self.linear, dropout, dsum, ctx, parameters)
        return inputs, gradients | {f'norm_{name}': gradient for name, gradient in of_norm.items()}

    @staticmethod
    def reference(x: np.ndarray, residual: np.ndarray, step: np.ndarray | None = None, *, weight: np.ndarray,
                  bias: np.ndarray, norm_weight: np.ndarray, norm_bias: np.ndarray, p: float = 0.0, key: int = 0,
                  eps: float = 1e-5) -> np.ndarray:
        branch = Linear.reference(x, weight, bias)
        return ResidualNorm.reference(residual, branch, step, weight=norm_weight, bias=norm_bias, p=p, key=key, eps=eps)

    @staticmethod
    def example(normal: Normal) -> Example:
        return ([normal(2, 3, 4), normal(2, 3, 5), np.array([3])],
                dict(weight=normal(5, 4), bias=normal(5), norm_weight=normal(5), norm_bias=normal(5), p=0.3, key=7))
