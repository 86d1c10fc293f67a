"""ConcatContext: concatenate the context of a sequence to the input of every decoder step."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops.backend import REAL, axes, check, empty, empty_gradient, launch
from pyops.backend.kernels import Kernel, declare

if TYPE_CHECKING:
    from pyops.autograd import Tensor
    from pyops.typing import Array, Example, Normal, TensorGradients


class ConcatContext:
    """Concatenate the same context to x at every step.

    Shapes   x, dx (T, B, E);  context, dcontext (B, H);  y, dy (T, B, E + H)
    Forward  y[t, b] = [x[t, b], context[b]]
    Backward dx[t, b] = dy[t, b, :E];  dcontext[b] = sum_t dy[t, b, E:]
    Saves    E and H
    Errors   ValueError for shapes that do not match, naming the argument
    Source   Cho et al. 2014, arXiv:1406.1078, section 2.2
    """

    class Ctx(NamedTuple):
        E: int
        H: int

    def __init__(self, name: str = 'concat_context') -> None:
        self.name = name

    def forward(self, x: Array, context: Array) -> tuple[Array, Ctx]:
        (T, B, E), (_, H) = axes('x', x, 'T B E'), axes('context', context, 'B H')
        check('x', x, (T, B, E), REAL)
        check('context', context, (B, H), x.dtype)
        y = empty((T, B, E + H), x.dtype, f'{self.name}.y')
        launch('concat_context_forward', y, x, context, T, B, E, H)
        return y, self.Ctx(E, H)

    def backward(self, dy: Array, ctx: Ctx) -> tuple[Array, Array]:
        T, B, _ = dy.shape
        check('dy', dy, (T, B, ctx.E + ctx.H), REAL)
        dx = empty_gradient((T, B, ctx.E), f'{self.name}.dx', dy.dtype)
        dcontext = empty_gradient((B, ctx.H), f'{self.name}.dcontext', dy.dtype)
        launch('concat_context_backward', dx, dcontext, dy, T, B, ctx.E, ctx.H)
        return dx, dcontext

    def backward_on_tensors(self, dy: Tensor, ctx: Any, parameters: dict[str, Tensor]) -> TensorGradients:
        return (dy[..., :ctx.E], dy[..., ctx.E:].sum(0)), {}

    @staticmethod
    def reference(x: np.ndarray, context: np.ndarray) -> np.ndarray:
        return np.concatenate([x, np.broadcast_to(context, (len(x), *context.shape))], axis=-1)

    @staticmethod
    def example(normal: Normal) -> Example:
        return [normal(3, 2, 4), normal(2, 5)], {}


declare(concat_context_forward=Kernel(), concat_context_backward=Kernel())
