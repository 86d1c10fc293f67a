"""The matrix product as an array op."""
import numpy as np

from pyops.ops.array import ArrayOp, sum_to


def swapped(x):
    """The last two axes exchanged."""
    return x.permute((*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


def rows(x):
    """(..., C) as the matrix of its rows."""
    return x.reshape((-1, x.shape[-1])) if x.size else x.reshape((x.size // max(x.shape[-1], 1), x.shape[-1]))


class MatMul(ArrayOp):
    """y = a b, of matrices (..., M, K) and (..., K, N) whose leading axes are broadcast;  da = dy b', db = a' dy.

    A vector on the left is a row, on the right a column, and that axis goes again.
    """

    def forward(a, b):
        return a @ b, (a, b)

    def backward(dy, ctx, wanted=(True, True)):
        a, b = ctx
        left, right = a.reshape((1, *a.shape)) if a.ndim == 1 else a, b.reshape((*b.shape, 1)) if b.ndim == 1 else b
        if b.ndim == 1:
            dy = dy.reshape((*dy.shape, 1))
        if a.ndim == 1:
            dy = dy.reshape((*dy.shape[:-1], 1, dy.shape[-1]))
        da = db = None
        if wanted[0]:
            da = sum_to(dy @ swapped(right), left.shape).reshape(a.shape)
        if wanted[1] and right.ndim == 2 and left.ndim > 2:         # a sum over all rows: one product and no sum of products
            db = (swapped(rows(left)) @ rows(dy)).reshape(b.shape)
        elif wanted[1]:
            db = sum_to(swapped(left) @ dy, right.shape).reshape(b.shape)
        return da, db

    reference = np.matmul

    def example(normal):
        return [normal(2, 1, 3, 4), normal(5, 4, 2)], {}
