"""CrossEntropy: masked softmax cross entropy on logits."""
from typing import NamedTuple

import numpy as np

from pyops.backend import axes, check, empty, launch
from pyops.backend.kernels import Kernel, declare


class CrossEntropy:
    """The mean negative log-likelihood of the labels, over rows that are not masked.

    Shapes   x, dx (R, C);  labels (R,) int32 in [0, C) or = ignore;  loss, dloss (1,)
    Forward  max[r] = max_c x[r, c];  sum[r] = sum_c exp(x[r, c] - max[r])
             target = (1 - smoothing) onehot(labels) + smoothing / C
             loss = mean over valid r of log sum[r] + sum_c target[r, c] (max[r] - x[r, c]);  0 if none is valid
    Backward dx[r, c] = dloss / valid * (exp(x[r, c] - max[r]) / sum[r] - target[r, c]);  0 in masked rows
    Saves    x, labels, stats (2, R): max and sum, valid (1,) int32: the number of valid rows
    Errors   ValueError for a label outside the classes, with its position, and unless 0 <= smoothing < 1
    Source   the derivative of log-sum-exp is the softmax; label smoothing: Szegedy et al. 2015, arXiv:1512.00567, section 7
    """

    class Ctx(NamedTuple):
        x: np.ndarray
        labels: np.ndarray
        stats: np.ndarray
        valid: np.ndarray

    def __init__(self, ignore=-1, smoothing=0.0, name='cross_entropy'):
        self.ignore, self.smoothing, self.name = ignore, smoothing, name

    def forward(self, x, labels):
        R, C = axes('x', x, 'R C')
        check('x', x, (R, C))
        check('labels', labels, (R,), np.int32)
        loss = empty(1, name=f'{self.name}.loss')
        valid, stats = empty(1, np.int32, f'{self.name}.valid'), empty((2, R), name=f'{self.name}.stats')
        launch('cross_entropy_forward', loss, valid, stats, x, labels, R, C, self.ignore, self.smoothing)
        return loss, self.Ctx(x, labels, stats, valid)

    def backward(self, dloss, ctx):
        R, C = ctx.x.shape
        check('dloss', dloss, (1,))
        dx = empty((R, C), name=f'{self.name}.dx')
        launch('cross_entropy_backward', dx, dloss, ctx.x, ctx.labels, ctx.stats, ctx.valid, R, C, self.ignore, self.smoothing)
        return dx


declare(cross_entropy_forward=Kernel(), cross_entropy_backward=Kernel())
