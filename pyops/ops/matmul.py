"""The matrix product as an array op."""
import math

import numpy as np

from pyops.backend import is_recorded, note_product
from pyops.backend.kernels import Product
from pyops.ops.array import ArrayOp, sum_to


def swapped(x):
    """Swap the last two axes of x: a view."""
    return x.permute((*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


def rows(x):
    """Reshape x (..., C) to the matrix (R, C) of its rows."""
    return x.reshape((math.prod(x.shape[:-1]), x.shape[-1]))


class MatMul(ArrayOp):
    """y = a b, for matrices (..., M, K) and (..., K, N) with leading axes broadcast;  da = dy b', db = a' dy.

    A vector on the left is a row, a vector on the right a column; the added axis is removed from y.
    """

    name = 'matmul'

    def forward(a, b):
        y = a @ b
        if is_recorded() and a.ndim == b.ndim == 2:
            _note(b, {'x': 'a', 'w': 'b', 'y': 'c'}, 0)
            _note(a, {'x': 'b', 'w': 'a', 'y': 'c'}, 1)
        return y, (a, b)

    def backward(dy, ctx, wanted=(True, True)):
        a, b = ctx
        left, right = a.reshape((1, *a.shape)) if a.ndim == 1 else a, b.reshape((*b.shape, 1)) if b.ndim == 1 else b
        if b.ndim == 1:
            dy = dy.reshape((*dy.shape, 1))
        if a.ndim == 1:
            dy = dy.reshape((*dy.shape[:-1], 1, dy.shape[-1]))
        da = db = None
        if wanted[0]:
            da = dy @ swapped(right)
            if is_recorded() and a.ndim == b.ndim == 2 and not hasattr(dy, 'tape'):
                _note(b, {'x': 'a', 'w': "b'", 'y': 'c'}, 0)
            da = sum_to(da, left.shape).reshape(a.shape)
        if wanted[1] and right.ndim == 2 and left.ndim > 2:         # one product replaces a batch and its sum
            db = (swapped(rows(left)) @ rows(dy)).reshape(b.shape)
        elif wanted[1]:
            db = swapped(left) @ dy
            if is_recorded() and a.ndim == b.ndim == 2 and not hasattr(dy, 'tape'):
                _note(a, {'x': 'b', 'w': "a'", 'y': 'c'}, 1)
            db = sum_to(db, right.shape).reshape(b.shape)
        return da, db

    reference = np.matmul

    def example(normal):
        return [normal(2, 1, 3, 4), normal(5, 4, 2)], {}


def _note(operand, roles, contracted):
    """Note the last product for a plan, in case this operand is a parameter.

    roles: the argument of the kernel for each role;  contracted: the axis of the operand that y = a b sums over
    """
    if operand.is_compact():
        weight = operand
    else:                                               # the transpose of the stored weight
        weight, contracted = operand.permute((1, 0)), 1 - contracted
        roles = roles | {'w': roles['w'].removesuffix("'") if roles['w'].endswith("'") else roles['w'] + "'"}
    note_product(MatMul, Product('matmul', roles, -contracted), weight=weight)
