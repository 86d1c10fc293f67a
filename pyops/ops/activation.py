"""SiLU, and GELU in its exact form and with tanh: smooth alternatives to the ReLU."""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops.backend import REAL, check, empty, empty_gradient, launch
from pyops.backend.kernels import Kernel, declare

if TYPE_CHECKING:
    from pyops.autograd import Tensor
    from pyops.typing import Array, Example, Normal, TensorGradients


class _Activation:
    """Base of the three.  kernel: the kernels are <kernel>_forward and <kernel>_backward."""
    kernel: str

    class Ctx(NamedTuple):
        x: Array

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.kernel

    def forward(self, x: Array) -> tuple[Array, Ctx]:
        check('x', x, np.shape(x), REAL)
        y = empty(x.shape, x.dtype, f'{self.name}.y')
        launch(f'{self.kernel}_forward', y, x, x.size)
        return y, self.Ctx(x)

    def backward(self, dy: Array, ctx: Ctx) -> Array:
        check('dy', dy, ctx.x.shape, ctx.x.dtype)
        dx = empty_gradient(dy.shape, f'{self.name}.dx', dy.dtype)
        launch(f'{self.kernel}_backward', dx, dy, ctx.x, dy.size)
        return dx

    @staticmethod
    def example(normal: Normal) -> Example:
        return [normal(4, 5)], {}


class SiLU(_Activation):
    """Multiply each element by its sigmoid; also called swish.

    Shapes   x, y, dy, dx (...)
    Forward  y[i] = x[i] s,  s = 1 / (1 + e^-x[i])
    Backward dx[i] = dy[i] s (1 + x[i] (1 - s))
    Saves    x
    Errors   TypeError and ValueError naming the argument
    Source   Hendrycks and Gimpel 2016, arXiv:1606.08415; Ramachandran et al. 2017, arXiv:1710.05941
    """
    kernel = 'silu'
    same_launches = True            # see pyops/backend/recorded_ops.py

    def backward_on_tensors(self, dy: Tensor, ctx: Any, parameters: dict[str, Tensor]) -> TensorGradients:
        s = ctx.x.sigmoid()
        return (dy * (s + ctx.x * s * (1 - s)),), {}

    @staticmethod
    def reference(x: np.ndarray) -> np.ndarray:
        return x / (1 + np.exp(-x))


class GELU(_Activation):
    """Multiply each element by the probability that a normal number is below it.

    Shapes   x, y, dy, dx (...)
    Forward  y[i] = x[i] P(x[i]),  P(x) = (1 + erf(x / sqrt(2))) / 2
    Backward dx[i] = dy[i] (P(x[i]) + x[i] e^(-x[i]^2 / 2) / sqrt(2 pi))
    Saves    x
    Errors   TypeError and ValueError naming the argument
    Source   Hendrycks and Gimpel 2016, arXiv:1606.08415; this is the exact form, not the approximation with tanh
    """
    kernel = 'gelu'
    same_launches = True            # see pyops/backend/recorded_ops.py

    @staticmethod
    def reference(x: np.ndarray) -> np.ndarray:
        return x * np.vectorize(lambda t: math.erfc(-t / math.sqrt(2)) / 2, otypes=[float])(x)


class GELUTanh(_Activation):
    """GELU with an approximation of the normal distribution function, which GPT-2 was trained with.

    Shapes   x, y, dy, dx (...)
    Forward  y[i] = x[i] s(v),  s(v) = 1 / (1 + e^-v),  v = sqrt(8 / pi) (x[i] + 0.044715 x[i]^3)
    Backward dx[i] = dy[i] (s + x[i] s (1 - s) v'),  v' = sqrt(8 / pi) (1 + 0.134145 x[i]^2)
    Saves    x
    Errors   TypeError and ValueError naming the argument
    Notes    the same as x (1 + tanh(v / 2)) / 2, the usual way of writing it
    Source   Hendrycks and Gimpel 2016, arXiv:1606.08415
    """
    kernel = 'gelu_tanh'
    same_launches = True            # see pyops/backend/recorded_ops.py

    def backward_on_tensors(self, dy: Tensor, ctx: Any, parameters: dict[str, Tensor]) -> TensorGradients:
        x, scale = ctx.x, math.sqrt(8 / math.pi)
        s = ((x + x * x * x * 0.044715) * scale).sigmoid()
        return (dy * (s + x * s * (1 - s) * (x * x * 0.134145 + 1) * scale),), {}

    @staticmethod
    def reference(x: np.ndarray) -> np.ndarray:
        return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3))) / 2


declare(silu_forward=Kernel(), silu_backward=Kernel(), gelu_forward=Kernel(), gelu_backward=Kernel(),
        gelu_tanh_forward=Kernel(), gelu_tanh_backward=Kernel(), normal_cdf_double=Kernel())
