"""Dropout: random zeros in training; a counter-based generator replaces a stored mask."""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops.backend import REAL, check, empty, empty_gradient, launch
from pyops.backend.kernels import Kernel, declare

if TYPE_CHECKING:
    from pyops.autograd import Tensor
    from pyops.typing import Array, Example, Normal, TensorGradients


class Dropout:
    """Zero each element with probability p and scale the rest by 1 / (1 - p).

    Shapes   x, y, dy, dx (...);  step (1,) int64 array: each step has a different mask
    Forward  y[i] = x[i] * keep[i] / (1 - p),  keep from Philox4x32-10 at counter (i / 4, step) with the key of this op
    Backward dx[i] = dy[i] * keep[i] / (1 - p), with the same keep, recomputed
    Saves    only the step, which must not change between forward and backward
    Errors   ValueError if not 0 <= p < 1
    Source   Srivastava et al. 2014, JMLR 15; Salmon et al. 2011, doi:10.1145/2063384.2063405
    Notes    the same key, step and shape give the same mask on every device; key = pyops.params.key(seed, name)
    """

    class Ctx(NamedTuple):
        step: Array

    def __init__(self, p: float, key: int, name: str = 'dropout') -> None:
        self.p, self.key, self.name = p, key, name

    def forward(self, x: Array, step: Array) -> tuple[Array, Ctx]:
        return self._apply('x', x, step, 'y'), self.Ctx(step)

    def backward(self, dy: Array, ctx: Ctx) -> Array:
        return self._apply('dy', dy, ctx.step, 'dx', empty_gradient)

    def _apply(self, argument: str, x: Array, step: Array | None, result: str, allocate: Callable[..., Array] = empty) -> Array:
        check(argument, x, np.shape(x), REAL)
        check('step', step, (1,), np.int64)
        y = allocate(x.shape, name=f'{self.name}.{result}', dtype=x.dtype)
        launch('dropout', y, x, step, x.size, self.p, self.key)
        return y

    def backward_on_tensors(self, dy: Tensor, ctx: Any, parameters: dict[str, Tensor]) -> TensorGradients:
        from pyops.ops.array import call
        return (call(self, dy, ctx.step),), {}

    @staticmethod
    def reference(x: np.ndarray, step: np.ndarray, p: float, key: int) -> np.ndarray:
        from pyops.philox import dropout_mask  # imported here because only references need it: programs start faster
        return x * dropout_mask(x.size, p, int(step[0]), key).reshape(x.shape) / (1 - np.float64(np.float32(p)))

    @staticmethod
    def example(normal: Normal) -> Example:
        return [normal(4, 5), np.array([3])], dict(p=0.3, key=7)


declare(dropout=Kernel())
