"""Dropout: random zeros in training; a counter-based generator replaces a stored mask."""
from typing import NamedTuple

import numpy as np

from pyops.backend import check, empty, empty_gradient, launch
from pyops.backend.kernels import Kernel, declare


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
        step: np.ndarray

    def __init__(self, p, key, name='dropout'):
        self.p, self.key, self.name = p, key, name

    def forward(self, x, step):
        return self._apply('x', x, step, 'y'), self.Ctx(step)

    def backward(self, dy, ctx):
        return self._apply('dy', dy, ctx.step, 'dx', empty_gradient)

    def _apply(self, argument, x, step, result, allocate=empty):
        check(argument, x, np.shape(x))
        check('step', step, (1,), np.int64)
        y = allocate(x.shape, name=f'{self.name}.{result}')
        launch('dropout', y, x, step, x.size, self.p, self.key)
        return y

    def backward_on_tensors(self, dy, ctx, parameters):
        from pyops.ops.array import call
        return (call(self, dy, ctx.step),), {}

    @staticmethod
    def reference(x, step, p, key):
        from pyops.philox import dropout_mask  # imported here because only references need it: programs start faster
        return x * dropout_mask(x.size, p, int(step[0]), key).reshape(x.shape) / (1 - np.float64(np.float32(p)))

    @staticmethod
    def example(normal):
        return [normal(4, 5), np.array([3])], dict(p=0.3, key=7)


declare(dropout=Kernel())
