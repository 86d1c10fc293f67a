"""Attention with rounded operands, as six products; rounding.py describes the rules."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops.backend import check, empty, empty_gradient, launch, note_product, put
from pyops.backend.kernels import Product
from pyops.ops.attention import Attention, offsets
from pyops.ops.packed import pad_rows, unpad_rows
from pyops.ops.rounding import Rounding

if TYPE_CHECKING:
    from pyops.ops.packed import Packed
    from pyops.typing import Array, Shape


class QuantizedAttention(Attention):
    """Attention with rounded operands: scores and weights are stored, and each of the six products is a separate launch.

    Forward  qk: s = q k', over C;  W = dropout(softmax(s / sqrt(C)));  pv: y = W v, over Tk
    Backward dp: dW = dy v', over C;  dv: dv = W' dy, over Tq;  dS from dW, as in Attention
             dq: dq = dS k / sqrt(C), over Tk;  dk: dk = dS' q / sqrt(C), over Tq
    Saves    q, k, v and W, or their rounded copies if backward can reuse them; the softmax; step
    Notes    a block never spans two heads or sequences.  Blocks along Tk include the values of masked keys, whose
             weights are 0; these values affect the scale of the block.
             Packed rows are copied to padded arrays (longest, B, D) and back, because a launch computes the products of all
             sentences, which needs equal sizes.  The padding is 0, so it changes no scale.
    """

    class Ctx(NamedTuple):
        q: Array
        k: Array
        v: Array
        w: Array
        softmax: Array
        step: Array | None
        q_rows: Packed | None
        k_rows: Packed | None
        shapes: tuple[Shape, Shape]         # of q, and of k and v

    def __init__(self, *arguments: Any, recipe: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.round = Rounding(recipe, self.name, 'attention')
        self._factors: dict[int, Array] = {}        # C -> array that holds 1 / sqrt(C)

    @staticmethod
    def layers(name: str) -> list[tuple[str, str]]:
        return [(name, 'attention')]

    def forward(self, q: Array, k: Array, v: Array, lengths: Array | None = None, step: Array | None = None,
                q_rows: Packed | None = None, k_rows: Packed | None = None) -> tuple[Array, Ctx]:
        self.check(q, k, v, lengths, step, q_rows, k_rows)
        for name, x in (('q', q), ('k', k), ('v', v)):
            check(name, x, x.shape)             # columns of a larger array cannot be rounded
        shapes = q.shape, k.shape
        q, k, v = (self._padded(x, rows, name) for x, rows, name in ((q, q_rows, 'q'), (k, k_rows, 'k'), (v, k_rows, 'v')))
        (Tq, B, _), Tk = q.shape, len(k)
        q, k, v = map(self._by_head, (q, k, v))
        C, rounded = q.shape[-1], self.round
        qq, qk = rounded('qk.q', q, 3), rounded('qk.k', k, 3)
        softmax = empty((B, self.heads, Tq, Tk), name=f'{self.name}.softmax')           # holds the scores first
        rounded.multiply('qk', softmax, qq.transpose(1, 2, 0, 3), qk.transpose(1, 2, 3, 0))
        note_product(self, QK, heads=self.heads)
        w = empty(softmax.shape, name=f'{self.name}.w') if step is not None and self.p else softmax
        launch('attention_softmax_forward', softmax, None if w is softmax else w, softmax, lengths, *offsets(q_rows, k_rows),
               step, Tq, Tk, B, self.heads, self.causal, C ** -0.5, self.p, self.key)
        note_product(self, SOFTMAX)
        qw, qv = rounded('pv.p', w, 3), rounded('pv.v', v, 0)
        y = empty((Tq, B, self.heads * C), name=f'{self.name}.y')
        rounded.multiply('pv', self._by_head(y).transpose(1, 2, 0, 3), qw, qv.transpose(1, 2, 0, 3))
        note_product(self, PV if w is softmax else DROPPED_PV)
        if q_rows is not None:
            y, _ = unpad_rows(y, q_rows, shapes[0][0], name=f'{self.name}.y_rows')
        return y, self.Ctx(qq if rounded.same('qk.q', 'dk.q') else q, qk if rounded.same('qk.k', 'dq.k') else k,
                           qv if rounded.same('pv.v', 'dp.v') else v, qw if rounded.same('pv.p', 'dv.p') else w, softmax, step,
                           q_rows, k_rows, shapes)

    def weights(self, ctx: Ctx) -> Array:
        return ctx.softmax

    def backward(self, dy: Array, ctx: Ctx, out: tuple[Array, Array, Array] | None = None) -> tuple[Array, Array, Array]:
        """Return dq, dk and dv.  out: the arrays to write them to."""
        (Tq, B, heads, C), Tk, rounded = ctx.q.shape, len(ctx.k), self.round
        check('dy', dy, ctx.shapes[0])
        dy = self._by_head(self._padded(dy, ctx.q_rows, 'dy'))
        results = self._gradients(*ctx.shapes) if out is None else out
        all_rows = ctx.q_rows, ctx.k_rows, ctx.k_rows
        for name, gradient, shape in zip(('dq', 'dk', 'dv'), results, (ctx.shapes[0], *2 * ctx.shapes[1:]), strict=True):
            check(name, gradient, shape)
        dq, dk, dv = (x if rows is None else empty_gradient((T, B, heads * C), f'{self.name}.{name}_steps')
                      for x, rows, T, name in zip(results, all_rows, (Tq, Tk, Tk), ('dq', 'dk', 'dv'), strict=True))

        qdy, qv = rounded('dp.do', dy, 3), ctx.v if rounded.same('pv.v', 'dp.v') else rounded('dp.v', ctx.v, 3)
        ds = empty_gradient(ctx.softmax.shape, f'{self.name}.ds')          # holds the weight gradients first
        rounded.multiply('dp', ds, qdy.transpose(1, 2, 0, 3), qv.transpose(1, 2, 3, 0))
        note_product(self, DP)
        if not rounded.same('dp.do', 'dv.do'):
            qdy = rounded('dv.do', dy, 0)
        qw = ctx.w if rounded.same('pv.p', 'dv.p') else rounded('dv.p', ctx.w, 2)
        rounded.multiply('dv', self._by_head(dv).transpose(1, 2, 0, 3), qw.transpose(0, 1, 3, 2), qdy.transpose(1, 2, 0, 3))
        note_product(self, DROPPED_DV if ctx.step is not None and self.p else DV)
        launch('attention_softmax_backward', ds, ds, ctx.softmax, ctx.step, Tq, Tk, B, heads, self.p, self.key)

        qds, qk = rounded('dq.ds', ds, 3), ctx.k if rounded.same('qk.k', 'dq.k') else rounded('dq.k', ctx.k, 0)
        rounded.multiply('dq', self._by_head(dq).transpose(1, 2, 0, 3), qds, qk.transpose(1, 2, 0, 3))
        note_product(self, DQ)
        if not rounded.same('dq.ds', 'dk.ds'):
            qds = rounded('dk.ds', ds, 2)
        qq = ctx.q if rounded.same('qk.q', 'dk.q') else rounded('dk.q', ctx.q, 0)
        rounded.multiply('dk', self._by_head(dk).transpose(1, 2, 0, 3), qds.transpose(0, 1, 3, 2), qq.transpose(1, 2, 0, 3))
        note_product(self, DK)
        for gradient, product in ((dq, SCALED_DQ), (dk, SCALED_DK)):
            launch('scale', gradient, gradient, self._factor(C), gradient.size)
            note_product(self, product)
        for result, steps, rows in zip(results, (dq, dk, dv), all_rows, strict=True):
            if rows is not None:
                unpad_rows(steps, rows, len(result), out=result)
        return results

    def _padded(self, x: Array, rows: Packed | None, name: str) -> Array:
        return x if rows is None else pad_rows(x, rows, x.shape, name=f'{self.name}.{name}_steps')[0]

    def _by_head(self, x: Array) -> Any:
        """View (T, B, D) as (T, B, heads, C)."""
        T, B, D = x.shape
        return x.reshape(T, B, self.heads, D // self.heads)

    def _factor(self, C: int) -> Array:
        if C not in self._factors:
            self._factors[C] = put(np.full(1, C ** -0.5, np.float32))
        return self._factors[C]


# The axes of an operand (B, heads, M, K) in its base array, (T, B, heads, C) or (B, heads, Tq, Tk).
LEFT, RIGHT, SAME, SWAPPED = (2, 0, 1, 3), (3, 0, 1, 2), (0, 1, 2, 3), (0, 1, 3, 2)
QK = Product('qk', {'q': ('a', LEFT), 'k': ('b', RIGHT)})
SOFTMAX = Product('softmax', {'p': 'p'})
PV = Product('pv', {'p': ('a', SAME), 'v': ('b', LEFT), 'y': ('c', LEFT)})
DP = Product('dp', {'do': ('a', LEFT), 'v': ('b', RIGHT)})
DV = Product('dv', {'p': ('a', SWAPPED), 'do': ('b', LEFT), 'dv': ('c', LEFT)})
DQ = Product('dq', {'ds': ('a', SAME), 'k': ('b', LEFT)})
DK = Product('dk', {'ds': ('a', SWAPPED), 'q': ('b', LEFT)})
SCALED_DQ, SCALED_DK = Product('scale', {'dq': 'y'}), Product('scale', {'dk': 'y'})
DROPPED_PV, DROPPED_DV = (product.replaced(names={'p': 'dropped_weights'}) for product in (PV, DV))
