"""ReLU: the rectified linear unit."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops.backend import REAL, check, empty, empty_gradient, launch
from pyops.backend.kernels import Kernel, declare

if TYPE_CHECKING:
    from pyops.autograd import Tensor
    from pyops.typing import Array, Example, Normal, TensorGradients


class ReLU:
    """Replace negative elements by 0.

    Shapes   x, y, dy, dx (...)
    Forward  y[i] = max(x[i], 0); NaN stays NaN
    Backward dx[i] = dy[i] where y[i] > 0, else 0
    Saves    y, which the next layer also saves
    Errors   TypeError and ValueError naming the argument
    Source   Nair and Hinton 2010; at 0, which has no derivative, dx = 0
    """

    same_launches = True            # see pyops/backend/recorded_ops.py

    class Ctx(NamedTuple):
        y: Array

    def __init__(self, name: str = 'relu') -> None:
        self.name = name

    def forward(self, x: Array) -> tuple[Array, Ctx]:
        check('x', x, np.shape(x), REAL)
        y = empty(x.shape, x.dtype, f'{self.name}.y')
        launch('relu_forward', y, x, x.size)
        return y, self.Ctx(y)

    def backward(self, dy: Array, ctx: Ctx) -> Array:
        check('dy', dy, ctx.y.shape, ctx.y.dtype)
        dx = empty_gradient(dy.shape, f'{self.name}.dx', dy.dtype)
        launch('relu_backward', dx, dy, ctx.y, dy.size)
        return dx

    def backward_on_tensors(self, dy: Tensor, ctx: Any, parameters: dict[str, Tensor]) -> TensorGradients:
        return (dy * (ctx.y > 0),), {}

    @staticmethod
    def reference(x: np.ndarray) -> np.ndarray:
        return np.maximum(x, 0)

    @staticmethod
    def example(normal: Normal) -> Example:
        return [normal(4, 5)], {}


declare(relu_forward=Kernel(), relu_backward=Kernel())
