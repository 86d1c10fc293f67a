"""LinearCrossEntropy: output layer and masked loss as one op, which never stores all logits."""
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pyops.backend import (
    BF16,
    REAL,
    axes,
    check,
    check_kept,
    check_parameter,
    current_device,
    empty,
    empty_gradient,
    launch,
    note_product,
    work,
    work_size,
)
from pyops.backend.kernels import Kernel, Product, declare
from pyops.ops.cross_entropy import CrossEntropy

if TYPE_CHECKING:
    from pyops.params import Parameter
    from pyops.typing import Array, Example, Normal


# On a GPU, with operands rounded to TF32: with as many columns, wgmma saves more time than its transposed operands take
# (docs/output_layer.md).
WIDE_FOR_TF32 = 320


class LinearCrossEntropy:
    """Compute logits with a linear layer, and the softmax cross entropy of the valid rows.

    Shapes   x, dx (..., D);  labels (...) int32 in [0, V) or = ignore;  weight (V, D);  bias (V,);  loss, dloss (1,)
    Forward  logits = x weight' + bias;  loss as in CrossEntropy, with target = (1 - smoothing) onehot(labels) + smoothing / V
    Backward dlogits = dloss / valid * (softmax(logits) - target)
             dx = dlogits weight;  dweight += dlogits' x;  dbias += sum_r dlogits[r]
    Saves    dx, dweight and dbias for dloss = 1, computed in forward while a block of logits is in cache;
             backward multiplies them by dloss and adds.  With dloss in forward only dx.  Nothing with gradients=False.
    Errors   ValueError for a label outside [0, V) other than ignore, with its position, if not 0 <= smoothing < 1,
             and if forward and backward get different arrays dloss
    Source   the computation order of the fused linear cross entropy in Liger-Kernel, arXiv:2410.10989, section 3.2;
             label smoothing: Szegedy et al. 2015, arXiv:1512.00567, section 7
    Notes    masked rows are skipped.  valid (1,) int32 in the ctx is the number of valid rows.
             gradients=False is for evaluation: the loss is computed without label smoothing; dloss is not used.
             forward(..., dloss=dloss) is for callers that know the upstream gradient before the loss.  It already adds the
             gradients of weight and bias, so it takes no memory for them; backward(dloss, ctx) only returns dx.
    """

    class Ctx(NamedTuple):
        valid: Array
        dx: Array | None
        dweight: Array | None
        dbias: Array | None
        dloss: Array | None     # given to forward, which then added dweight and dbias

    def __init__(self, weight: Parameter, bias: Parameter, ignore: int = -1, smoothing: float = 0.0,
                 name: str | None = None) -> None:
        self.weight, self.bias, self.ignore, self.smoothing, self.name = weight, bias, ignore, smoothing, name or weight.owner
        V, _ = axes(weight.name, weight.value, 'V D')
        check_parameter(weight, weight.value.shape)
        check_parameter(bias, (V,))

    def forward(self, x: Array, labels: Array, gradients: bool = True, *, dloss: Array | None = None) -> tuple[Array, Ctx]:
        V, D = self.weight.value.shape
        check('labels', labels, np.shape(labels), np.int32)
        check('x', x, (*labels.shape, D), REAL)
        loss, valid = empty(1, name=f'{self.name}.loss'), empty(1, np.int32, f'{self.name}.valid')
        dx = dweight = dbias = None
        if not gradients:
            dloss = None
        elif dloss is None:
            dx = empty_gradient(x.shape, f'{self.name}.dx1', x.dtype)
            dweight = empty_gradient((V, D), f'{self.name}.dweight1')
            dbias = empty_gradient(V, f'{self.name}.dbias1')
        else:
            check('dloss', dloss, (1,))
            dx = empty_gradient(x.shape, f'{self.name}.dx', x.dtype)
            dweight, dbias = self.weight.grad, self.bias.grad
        tf32 = current_device().precision == 'tf32' and D >= WIDE_FOR_TF32
        launch('linear_cross_entropy', loss, valid, dx, dweight, dbias, dloss, x, self.weight.operand(x.dtype),
               self.bias.value, labels, work('linear_cross_entropy', labels.size, D, V, gradients, x.dtype == BF16, tf32),
               labels.size, D, V, self.ignore, self.smoothing if gradients else 0.0, tf32)
        if gradients:
            note_product(self, LOGITS, weight=self.weight, bias=self.bias)
        if dloss is None:
            return loss, self.Ctx(valid, dx, dweight, dbias, None)
        note_product(self, DGRAD, weight=self.weight)
        return loss, self.Ctx(valid, dx, None, None, dloss)

    def backward(self, dloss: Array, ctx: Ctx) -> Array:
        check('dloss', dloss, (1,))
        check_kept(ctx.dx)
        if ctx.dloss is not None:
            if dloss is not ctx.dloss:
                raise ValueError(f'{self.name}: backward got another dloss than forward, expected the same array: '
                                 'forward used it for the gradients')
            return ctx.dx           # type: ignore[return-value]
        dx = empty_gradient(ctx.dx.shape, f'{self.name}.dx', ctx.dx.dtype)
        launch('scale', dx, ctx.dx, dloss, dx.size)
        note_product(self, SCALED, weight=self.weight)
        launch('axpy', self.weight.grad, ctx.dweight, dloss, ctx.dweight.size)
        launch('axpy', self.bias.grad, ctx.dbias, dloss, ctx.dbias.size)
        return dx

    def prepare(self) -> Array | None:
        """Return a rounded copy of weight and bias that lets predict() rule out most classes; valid until either changes."""
        V, D = self.weight.value.shape
        prepared = empty(work_size('linear_argmax_prepare', D, V), name=f'{self.name}.prepared')
        launch('linear_argmax_prepare', prepared, self.weight.value, self.bias.value, D, V)
        return prepared

    def predict(self, x: Array, prepared: Array | None = None) -> Array:
        """Return the index (B,) int32 of the largest logit for each row of x (B, D).

        prepared: the result of prepare(), for the same indices in less time.
        """
        V, D = self.weight.value.shape
        check('x', x, (len(x), D))
        index = empty(len(x), np.int32, f'{self.name}.index')
        launch('linear_argmax', index, x, self.weight.value, self.bias.value, prepared, work('linear_argmax', len(x), D, V),
               len(x), D, V)
        return index

    def topk(self, x: Array, k: int) -> tuple[Array, Array]:
        """Return for each row of x (R, D) the indices (R, k) int32 of the k largest logits, and their log softmax (R, k).

        The largest logit comes first, of equal ones the lowest index.  1 <= k <= 32, k <= V.
        """
        V, D = self.weight.value.shape
        check('x', x, (len(x), D))
        index, logp = empty((len(x), k), np.int32, f'{self.name}.indices'), empty((len(x), k), name=f'{self.name}.logp')
        launch('linear_topk', index, logp, x, self.weight.value, self.bias.value, work('linear_topk', len(x), D, V, k),
               len(x), D, V, k)
        return index, logp

    @staticmethod
    def rounded() -> type[LinearCrossEntropy]:
        """Return the op class with rounded operands."""
        from pyops.ops.linear_cross_entropy_rounded import QuantizedLinearCrossEntropy
        return QuantizedLinearCrossEntropy

    @staticmethod
    def reference(x: np.ndarray, labels: np.ndarray, gradients: bool = True, *, weight: np.ndarray, bias: np.ndarray,
                  ignore: int = -1, smoothing: float = 0.0) -> np.ndarray:
        logits = x.reshape(labels.size, -1) @ weight.T + bias
        return CrossEntropy.reference(logits, labels.reshape(-1), ignore, smoothing)

    @staticmethod
    def example(normal: Normal) -> Example:
        return ([normal(4, 3), np.array([4, -1, 0, 2], np.int32)],
                dict(weight=normal(5, 3), bias=normal(5), smoothing=0.1))


LOGITS = Product('fwd', {'x': 'x'})             # the logits and their gradients are never stored
DGRAD = Product('dgrad', {'dx': 'dx'})          # with dloss
SCALED = Product('dgrad', {'dx': 'y'})          # of `scale`: dx for dloss = 1, times dloss

declare(linear_cross_entropy=Kernel(
            flops=lambda s, array: (2 if array('dx') is None else 6) * int(array('valid')[0]) * s['D'] * s['V']),
        linear_argmax=Kernel(), linear_argmax_prepare=Kernel(), log_softmax_topk=Kernel(),
        linear_topk=Kernel(flops=lambda s, array: 2 * s['R'] * s['D'] * s['V']))
