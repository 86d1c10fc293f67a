"""Residual: a residual connection, with dropout of the branch."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops.backend import REAL, check, empty, empty_gradient, launch
from pyops.backend.kernels import Kernel, declare
from pyops.ops.dropout import Dropout

if TYPE_CHECKING:
    from pyops.autograd import Tensor
    from pyops.typing import Array, Example, Normal, Shape, TensorGradients


class Residual:
    """Add a branch to its own input, after dropout of the branch.

    Shapes   x, branch, y, dy, dx, dbranch (...), all equal;  step (1,) int64 array: each step has a different mask
    Forward  y[i] = x[i] + branch[i] * keep[i] / (1 - p), keep as in Dropout;  y = x + branch if step is None or p is 0
    Backward dx = dy, the same array;  dbranch[i] = dy[i] * keep[i] / (1 - p), or the array dy if there was no dropout
    Saves    only the step, which must not change between forward and backward
    Errors   ValueError if not 0 <= p < 1; TypeError and ValueError naming the argument
    Source   He et al. 2015, arXiv:1512.03385; dropout as in Vaswani et al. 2017, arXiv:1706.03762, section 5.4
    Notes    the backward pass of the branch can add its input gradient to dx: op.backward(dbranch, ctx, into=dx)
    """

    class Ctx(NamedTuple):
        shape: Shape
        step: Array | None         # None: no dropout

    def __init__(self, p: float = 0.0, key: int = 0, name: str = 'residual') -> None:
        self.p, self.key, self.name = p, key, name

    def forward(self, x: Array, branch: Array, step: Array | None = None) -> tuple[Array, Ctx]:
        check('x', x, np.shape(x), REAL)
        check('branch', branch, x.shape, x.dtype)
        if step is not None:
            check('step', step, (1,), np.int64)
        y = empty(x.shape, x.dtype, f'{self.name}.y')
        launch('residual', y, x, branch, step, x.size, self.p, self.key)
        return y, self.Ctx(x.shape, step if self.p else None)

    def backward(self, dy: Array, ctx: Ctx) -> tuple[Array, Array]:
        """Return dx and dbranch."""
        check('dy', dy, ctx.shape, REAL)
        if ctx.step is None:
            return dy, dy
        dbranch = empty_gradient(ctx.shape, f'{self.name}.dbranch', dy.dtype)
        launch('dropout', dbranch, dy, ctx.step, dy.size, self.p, self.key)
        return dy, dbranch

    def backward_on_tensors(self, dy: Tensor, ctx: Any, parameters: dict[str, Tensor]) -> TensorGradients:
        from pyops.ops.array import call
        return (dy, dy if ctx.step is None else call(Dropout(self.p, self.key), dy, ctx.step)), {}

    @staticmethod
    def reference(x: np.ndarray, branch: np.ndarray, step: np.ndarray | None = None, p: float = 0.0,
                  key: int = 0) -> np.ndarray:
        return x + (branch if step is None or not p else Dropout.reference(branch, step, p, key))

    @staticmethod
    def example(normal: Normal) -> Example:
        return [normal(4, 5), normal(4, 5), np.array([3])], dict(p=0.3, key=7)


declare(residual=Kernel())
