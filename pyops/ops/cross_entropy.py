"""CrossEntropy: masked softmax cross entropy on logits."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops.backend import axes, check, empty, empty_gradient, launch
from pyops.backend.kernels import Kernel, declare

if TYPE_CHECKING:
    from pyops.autograd import Tensor
    from pyops.typing import Array, Example, Normal, TensorGradients


class CrossEntropy:
    """Compute the mean negative log-likelihood of the labels over the rows that are not masked.

    Shapes   x, dx (R, C);  labels (R,) int32 in [0, C) or = ignore;  loss, dloss (1,)
    Forward  max[r] = max_c x[r, c];  sum[r] = sum_c exp(x[r, c] - max[r])
             target = (1 - smoothing) onehot(labels) + smoothing / C
             loss = mean over valid r of log sum[r] + sum_c target[r, c] (max[r] - x[r, c]);  0 if no row is valid
    Backward dx[r, c] = dloss / valid * (exp(x[r, c] - max[r]) / sum[r] - target[r, c]);  0 in masked rows
    Saves    x, labels, stats (2, R): max and sum, valid (1,) int32: the number of valid rows
    Errors   ValueError for a label outside [0, C) other than ignore, with its position, and if not 0 <= smoothing < 1
    Source   the derivative of log-sum-exp is the softmax; label smoothing: Szegedy et al. 2015, arXiv:1512.00567, section 7
    """

    same_launches = True            # see pyops/backend/recorded_ops.py

    class Ctx(NamedTuple):
        x: Array
        labels: Array
        stats: Array
        valid: Array

    def __init__(self, ignore: int = -1, smoothing: float = 0.0, name: str = 'cross_entropy') -> None:
        self.ignore, self.smoothing, self.name = ignore, smoothing, name

    def forward(self, x: Array, labels: Array) -> tuple[Array, Ctx]:
        R, C = axes('x', x, 'R C')
        check('x', x, (R, C))
        check('labels', labels, (R,), np.int32)
        loss = empty(1, name=f'{self.name}.loss')
        valid, stats = empty(1, np.int32, f'{self.name}.valid'), empty((2, R), name=f'{self.name}.stats')
        launch('cross_entropy_forward', loss, valid, stats, x, labels, R, C, self.ignore, self.smoothing)
        return loss, self.Ctx(x, labels, stats, valid)

    def backward(self, dloss: Array, ctx: Ctx) -> Array:
        R, C = ctx.x.shape
        check('dloss', dloss, (1,))
        dx = empty_gradient((R, C), f'{self.name}.dx')
        launch('cross_entropy_backward', dx, dloss, ctx.x, ctx.labels, ctx.stats, ctx.valid, R, C, self.ignore, self.smoothing)
        return dx

    def backward_on_tensors(self, dloss: Tensor, ctx: Any, parameters: dict[str, Tensor]) -> TensorGradients:
        from pyops.ops.array import call
        from pyops.ops.reductions import Softmax
        labels, classes = ctx.labels, ctx.x.shape[1]
        column, valid = labels.reshape(-1, 1), (labels != self.ignore).reshape(-1, 1) * 1.0
        onehot = (column == type(labels)(range(classes), device=labels.device)) * 1.0
        target = onehot * (1 - self.smoothing) + self.smoothing / classes
        share = valid / valid.sum().maximum(1.0)
        return (dloss * (share * (call(Softmax, ctx.x, axis=1) - target)), None), {}

    @staticmethod
    def reference(x: np.ndarray, labels: np.ndarray, ignore: int = -1, smoothing: float = 0.0) -> np.ndarray:
        valid = labels != ignore
        if not valid.any():
            return np.zeros(1)
        x, labels = x[valid], labels[valid]
        top = x.max(-1, keepdims=True)
        target = (1 - smoothing) * np.eye(x.shape[1])[labels] + smoothing / x.shape[1]
        return np.array([(np.log(np.exp(x - top).sum(-1)) + (target * (top - x)).sum(-1)).mean()])

    @staticmethod
    def example(normal: Normal) -> Example:
        return [normal(4, 5), np.array([4, -1, 0, 2], np.int32)], {}


declare(cross_entropy_forward=Kernel(), cross_entropy_backward=Kernel())
