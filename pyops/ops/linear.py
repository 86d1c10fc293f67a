"""Linear: the matrix product with a bias that most layers are made of."""
from typing import NamedTuple

import numpy as np

from pyops.backend import axes, check, check_parameter, empty, gemm, launch


class Linear:
    """Multiply each row with a weight matrix and add a bias.

    Shapes   x, dx (R, I);  y, dy (R, O);  weight (O, I);  bias (O,) or None
    Forward  y = x weight' + bias
    Backward dx = dy weight;  dweight += dy' x;  dbias += sum_r dy[r]
    Saves    x
    Errors   TypeError for a wrong dtype or strides, ValueError for a wrong shape, each naming the argument
    Source   the chain rule; docs/linear.md derives it
    """

    class Ctx(NamedTuple):
        x: np.ndarray

    def __init__(self, weight, bias=None, name=None):
        self.weight, self.bias, self.name = weight, bias, name or weight.owner
        O, _ = axes(weight.name, weight.value, 'O I')
        check_parameter(weight, weight.value.shape)
        if bias:
            check_parameter(bias, (O,))

    def forward(self, x):
        O, I = self.weight.value.shape
        R, _ = axes('x', x, 'R I')
        check('x', x, (R, I))
        y = empty((R, O), name=f'{self.name}.y')
        gemm(y, x, self.weight.value.T, self.bias and self.bias.value)
        return y, self.Ctx(x)

    def backward(self, dy, ctx, want_dx=True):
        """-> dx, or None where nobody wants it: the first layer's input has no gradient."""
        (O, I), R = self.weight.value.shape, len(ctx.x)
        check('dy', dy, (R, O))
        dx = None
        if want_dx:
            dx = empty((R, I), name=f'{self.name}.dx')
            gemm(dx, dy, self.weight.value)
        gemm(self.weight.grad, dy.T, ctx.x, accumulate=True)
        if self.bias:
            launch('column_sums', self.bias.grad, dy, R, O)
        return dx
