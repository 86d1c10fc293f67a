"""ResidualNorm: layer norm of a residual connection."""
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pyops.backend import REAL, axes, check, check_parameter, empty, empty_gradient, launch, work
from pyops.backend.kernels import Kernel, declare
from pyops.ops.layer_norm import LayerNorm
from pyops.ops.residual import Residual

if TYPE_CHECKING:
    from pyops.params import Parameter
    from pyops.typing import Array, Example, Normal


class ResidualNorm:
    """Add a branch to its own input, after dropout of the branch, and normalise the sum over the last axis.

    Shapes   x, branch, y, dy, dx, dbranch (..., C);  weight (C,), bias (C,)
             step (1,) int64 array: each step has a different mask
    Forward  sum = x + branch * keep / (1 - p), as in Residual;  y = layer norm of sum, as in LayerNorm
    Backward dx = gradient of sum, as in LayerNorm;  dbranch = dx * keep / (1 - p), or the array dx if there was no dropout
             dweight and dbias add, as in LayerNorm
    Saves    sum, the step, and mean and rstd of each row of sum
    Errors   ValueError if not 0 <= p < 1 and for a negative eps; TypeError and ValueError naming the argument or the parameter
    Source   a post-norm sublayer of Vaswani et al. 2017, arXiv:1706.03762, section 3.1
    Notes    one kernel forward and one backward; bit-equal to Residual and LayerNorm
             residual: the name of the residual connection, for its tensors
             a pre-norm sublayer uses the sum, ctx.sum, as well: the backward pass adds the gradient of that use
             forward_of_product() is forward() with the last product of the branch in the same call
    """

    class Ctx(NamedTuple):
        sum: Array
        mean: Array
        rstd: Array
        step: Array | None         # None: no dropout

    def __init__(self, weight: Parameter, bias: Parameter, p: float = 0.0, key: int = 0, eps: float = 1e-5,
                 name: str | None = None, residual: str = 'residual') -> None:
        self.weight, self.bias, self.p, self.key, self.eps = weight, bias, p, key, eps
        self.name, self.residual = name or weight.owner, residual
        C, = axes(weight.name, weight.value, 'C')
        check_parameter(weight, (C,))
        check_parameter(bias, (C,))

    def forward(self, x: Array, branch: Array, step: Array | None = None) -> tuple[Array, Ctx]:
        C = len(self.weight.value)
        check('x', x, (*np.shape(x)[:-1], C), REAL)
        check('branch', branch, x.shape, x.dtype)
        y, ctx = self._results(x, step)
        launch('residual_norm_forward', y, *ctx[:3], x, branch, step, self.weight.value, self.bias.value, ctx.mean.size, C,
               self.p, self.key, self.eps)
        return y, ctx

    def forward_of_product(self, x: Array, step: Array | None, h: Array, weight: Array,
                           bias: Array | None) -> tuple[Array, Ctx]:
        """Return what forward(x, h weight' + bias, step) returns, from one call.

        h (..., I), weight (C, I), bias (C,) or None
        """
        C, I = axes('weight', weight, 'C I')
        check('x', x, (*np.shape(x)[:-1], len(self.weight.value)), REAL)
        check('h', h, (*x.shape[:-1], I), x.dtype)
        y, ctx = self._results(x, step)
        launch('linear_residual_norm', y, *ctx[:3], h, weight, bias, x, step, self.weight.value, self.bias.value, ctx.mean.size,
               C, I, self.p, self.key, self.eps)
        return y, ctx

    def _results(self, x: Array, step: Array | None) -> tuple[Array, Ctx]:
        """Return empty arrays for y and ctx."""
        if step is not None:
            check('step', step, (1,), np.int64)
        rows = x.shape[:-1]
        y, total = empty(x.shape, x.dtype, f'{self.name}.y'), empty(x.shape, x.dtype, f'{self.residual}.y')
        mean, rstd = empty(rows, name=f'{self.name}.mean'), empty(rows, name=f'{self.name}.rstd')
        return y, self.Ctx(total, mean, rstd, step if self.p else None)

    def backward(self, dy: Array, ctx: Ctx, into: Array | None = None) -> tuple[Array, Array]:
        """Return dx and dbranch.  into: add dx to this array, the gradient of another use of the sum, and return it as dx."""
        C, R = len(self.weight.value), ctx.mean.size
        check('dy', dy, ctx.sum.shape, ctx.sum.dtype)
        if into is not None:
            check('into', into, ctx.sum.shape, ctx.sum.dtype)
        dx = empty_gradient(dy.shape, f'{self.name}.dx', dy.dtype) if into is None else into
        dbranch = None if ctx.step is None else empty_gradient(dy.shape, f'{self.residual}.dbranch', dy.dtype)
        launch('residual_norm_backward', dx, dbranch, self.weight.grad, self.bias.grad, dy, ctx.sum, ctx.step,
               self.weight.value, ctx.mean, ctx.rstd, work('layer_norm_backward', R, C), R, C, self.p, self.key,
               into is not None)
        return dx, dx if dbranch is None else dbranch

    @staticmethod
    def reference(x: np.ndarray, branch: np.ndarray, step: np.ndarray | None = None, *, weight: np.ndarray, bias: np.ndarray,
                  p: float = 0.0, key: int = 0, eps: float = 1e-5) -> np.ndarray:
        return LayerNorm.reference(Residual.reference(x, branch, step, p, key), weight, bias, eps)

    @staticmethod
    def example(normal: Normal) -> Example:
        return [normal(4, 6), normal(4, 6), np.array([3])], dict(weight=normal(6), bias=normal(6), p=0.3, key=7)


declare(residual_norm_forward=Kernel(), residual_norm_backward=Kernel())
