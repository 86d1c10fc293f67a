"""LinearCrossEntropy with rounded operands; rounding.py describes the rules."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops.backend import as_rows, check, check_kept, empty, empty_gradient, launch
from pyops.ops.linear_cross_entropy import LinearCrossEntropy
from pyops.ops.linear_rounded import QuantizedLinear
from pyops.ops.rounding import Kept, LinearProducts

if TYPE_CHECKING:
    from pyops.typing import Array, Shape


class QuantizedLinearCrossEntropy(LinearCrossEntropy):
    """LinearCrossEntropy with rounded operands: all logits are stored, including masked rows.

    Saves    logits, labels, stats of CrossEntropy, and the same as QuantizedLinear; nothing with gradients=False
    Notes    forward does not use dloss: backward adds all gradients of parameters
    """

    class Ctx(NamedTuple):
        valid: Array
        shape: Shape
        logits: Array | None
        labels: Array | None
        stats: Array | None
        kept: Kept | None

    def __init__(self, *arguments: Any, recipe: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.products = LinearProducts(recipe, self.name, self.weight, self.bias)

    layers = QuantizedLinear.layers

    def _logits(self, x: Array) -> tuple[Array, Kept]:
        """Return the logits (R, V) for x (..., D), and Kept."""
        logits = empty((len(as_rows(x)), len(self.weight.value)), name=f'{self.name}.logits')
        return logits, self.products.forward(logits, x)

    def forward(self, x: Array, labels: Array, gradients: bool = True, *, dloss: Array | None = None) -> tuple[Array, Ctx]:
        check('labels', labels, np.shape(labels), np.int32)
        check('x', x, (*labels.shape, self.weight.value.shape[1]))
        loss, valid = empty(1, name=f'{self.name}.loss'), empty(1, np.int32, f'{self.name}.valid')
        stats = empty((2, labels.size), name=f'{self.name}.stats')
        logits, kept = self._logits(x)
        launch('cross_entropy_forward', loss, valid, stats, logits, labels, *logits.shape, self.ignore,
               self.smoothing if gradients else 0.0)
        return loss, self.Ctx(valid, x.shape, *((logits, labels, stats, kept) if gradients else [None] * 4))

    def backward(self, dloss: Array, ctx: Ctx) -> Array:
        check('dloss', dloss, (1,))
        check_kept(ctx.kept)
        dlogits, dx = empty_gradient(ctx.logits.shape, f'{self.name}.dlogits'), empty_gradient(ctx.shape, f'{self.name}.dx')
        launch('cross_entropy_backward', dlogits, dloss, ctx.logits, ctx.labels, ctx.stats, ctx.valid, *ctx.logits.shape,
               self.ignore, self.smoothing)
        launch('column_sums', self.bias.grad, dlogits, *dlogits.shape)
        self.products.backward(dlogits, ctx.kept, dx)        # type: ignore[arg-type]
        return dx

    def prepare(self) -> None:
        """Return None: each call of predict() rounds the weight again."""

    def predict(self, x: Array, prepared: Array | None = None) -> Array:
        """Return the index (B,) int32 of the largest logit for each row of x (B, D)."""
        check('x', x, (len(x), self.weight.value.shape[1]))
        logits, _ = self._logits(x)
        index = empty(len(x), np.int32, f'{self.name}.index')
        launch('argmax', index, logits, *logits.shape)
        return index

    def topk(self, x: Array, k: int) -> tuple[Array, Array]:
        """Return for each row of x (R, D) the indices (R, k) int32 of the k largest logits, and their log softmax (R, k)."""
        check('x', x, (len(x), self.weight.value.shape[1]))
        logits, _ = self._logits(x)
        index, logp = empty((len(x), k), np.int32, f'{self.name}.indices'), empty((len(x), k), name=f'{self.name}.logp')
        launch('log_softmax_topk', index, logp, logits, *logits.shape, k)
        return index, logp
