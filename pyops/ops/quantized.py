"""The ops that have matrix products, with every operand of every product rounded to a number format: fake quantisation.

Each has the constructor of the plain op and a recipe beside it, and the same forward and backward.  An operand is rounded
along the axis that its product sums over, and always from the tensor that was not rounded: so a tensor in two products has
two copies.  A format without blocks makes the same copy for both, and then it is made once.  Sums, biases, softmax and gates
stay float32.  Backward takes a rounded operand for the operand itself (straight through), and rounds what its own products
take.

What is made by rounding is called <layer>.<product>.<operand>, as encoder.0.self_attention.q.fwd.x.  docs/quantization.md has
the tables of products and axes.
"""
from typing import NamedTuple

import numpy as np

from pyops.backend import (
    as_rows,
    check,
    check_kept,
    copy,
    empty,
    gemm,
    gemm_batched,
    launch,
    may_overlap,
    note_product,
    put,
)
from pyops.backend.kernels import (
    DGRAD,
    DGRAD_INPUTS_FIRST,
    FWD,
    FWD_INPUTS_FIRST,
    WGRAD,
    WGRAD_INPUTS_FIRST,
    Kernel,
    Product,
    declare,
)
from pyops.formats import fake_quantize
from pyops.ops.attention import Attention
from pyops.ops.embedding import Embedding
from pyops.ops.embedding_gru import EmbeddingGRU
from pyops.ops.feed_forward import FeedForward
from pyops.ops.gru import GRU
from pyops.ops.join import ConcatContext
from pyops.ops.linear import Linear
from pyops.ops.linear_cross_entropy import LinearCrossEntropy
from pyops.ops.pixel_linear import PixelLinear
from pyops.params import key


class Rounding:
    """Rounds the operands of one layer's products.

    recipe.of(layer, kind) -> {'fwd.x': Format, ...};  recipe.step, recipe.seed: of the random numbers of round=stochastic
    """

    def __init__(self, recipe, layer, kind):
        self.recipe, self.layer, self.formats = recipe, layer, recipe.of(layer, kind)

    def __call__(self, operand, x, axis, time=0):
        """x rounded along axis, or x itself where the recipe leaves this operand alone.  time: of a layer that runs many times
        in a pass."""
        fmt = self.formats.get(operand)
        if fmt is None:
            return x
        name = f'{self.layer}.{operand}'
        seed = key(self.recipe.seed, f'{name}.{time}') if fmt.is_stochastic else 0
        return fake_quantize(x, fmt, axis, name=name, step=self.recipe.step, seed=seed)

    def same(self, one, other):
        """Whether a tensor has the same copy as either operand, whatever the axes: so it is made once."""
        fmt = self.formats.get(one)
        return fmt == self.formats.get(other) and (fmt is None or not (fmt.is_block or fmt.is_stochastic))


class Kept(NamedTuple):
    """What a linear layer's backward needs of forward."""
    x: np.ndarray               # as it is, or the rounded copy where that will do
    w: np.ndarray | None        # the rounded copy where that will do


class LinearProducts:
    """The three products of a linear layer with rounded operands.  weight (O, I), or with inputs_first (I, O); bias or None.

    Forward  y = x w' + bias, summed over I;  dgrad dx = g w, over O;  wgrad dw += g' x, over the rows
    """

    def __init__(self, recipe, name, weight, bias=None, inputs_first=False, steps=False):
        self.name, self.weight, self.bias, self.inputs_first, self.steps = name, weight, bias, inputs_first, steps
        self.round = Rounding(recipe, name, 'linear')
        self.along_inputs, self.along_outputs = (0, 1) if inputs_first else (1, 0)
        self.products = (FWD_INPUTS_FIRST, DGRAD_INPUTS_FIRST, WGRAD_INPUTS_FIRST) if inputs_first else (FWD, DGRAD, WGRAD)

    def forward(self, y, x, relu=False):
        """Write y (..., O) of x (..., I) -> Kept."""
        rows, w = as_rows(x), self.weight.value
        qx, qw = self.round('fwd.x', rows, 1), self.round('fwd.w', w, self.along_inputs)
        gemm(as_rows(y), qx, qw if self.inputs_first else qw.T, self.bias and self.bias.value, relu=relu)
        note_product(self, self.products[0], weight=self.weight, bias=self.bias, rows=x.shape[:-1], steps=self.steps)
        return Kept(qx if self.round.same('fwd.x', 'wgrad.x') else rows, qw if self.round.same('fwd.w', 'dgrad.w') else None)

    def backward(self, g, kept, dx=None, accumulate=False):
        """Add to the weight's gradient, of g = dy (..., O); write dx (..., I), or add to it, where it is given."""
        g, w = as_rows(g), self.weight
        qx = kept.x if self.round.same('fwd.x', 'wgrad.x') else self.round('wgrad.x', kept.x, 0)
        qg = self.round('wgrad.g', g, 0)
        gemm(w.grad, *((qx.T, qg) if self.inputs_first else (qg.T, qx)), accumulate=True)
        note_product(self, self.products[2], weight=w)
        if dx is None:
            return
        if not self.round.same('wgrad.g', 'dgrad.g'):
            qg = self.round('dgrad.g', g, 1)
        qw = self.round('dgrad.w', w.value, self.along_outputs) if kept.w is None else kept.w
        gemm(as_rows(dx), qg, qw.T if self.inputs_first else qw, accumulate=accumulate)
        note_product(self, self.products[1], weight=w)


class QuantizedLinear(Linear):
    """Linear with rounded operands.

    Saves    x and the weight, rounded for forward where backward takes the same copy, else x alone
    """

    class Ctx(NamedTuple):
        shape: tuple[int, ...]
        kept: Kept

    def __init__(self, *arguments, recipe, **named):
        super().__init__(*arguments, **named)
        self.products = LinearProducts(recipe, self.name, self.weight, self.bias)

    @staticmethod
    def layers(name):
        return [(name, 'linear')]

    def forward(self, x):
        O, I = self.weight.value.shape
        check('x', x, (*np.shape(x)[:-1], I))
        y = empty((*x.shape[:-1], O), name=f'{self.name}.y')
        return y, self.Ctx(x.shape, self.products.forward(y, x))

    def backward(self, dy, ctx, want_dx=True, into=None):
        """-> dx, or None where nobody wants it.  into: an array to add dx to, which is then what is returned; it may be dy."""
        check('dy', dy, (*ctx.shape[:-1], len(self.weight.value)))
        if into is not None:
            check('into', into, ctx.shape)
        if self.bias:
            launch('column_sums', self.bias.grad, dy, *as_rows(dy).shape)
        separate = into is None or may_overlap(into, dy)        # a product cannot lie where its operand does
        dx = None if not want_dx else empty(ctx.shape, name=f'{self.name}.dx') if separate else into
        self.products.backward(dy, ctx.kept, dx, accumulate=not separate)
        if separate and want_dx and into is not None:
            launch('residual', into, into, dx, None, dx.size, 0.0, 0)
            return into
        return dx


class QuantizedFeedForward(FeedForward):
    """FeedForward with rounded operands: two linear layers, <name>.w1 and <name>.w2.

    Saves    h, whose signs the rectifier's backward needs, and of both layers what QuantizedLinear saves
    """

    class Ctx(NamedTuple):
        shape: tuple[int, ...]
        h: np.ndarray
        first: Kept
        second: Kept

    def __init__(self, *arguments, recipe, **named):
        super().__init__(*arguments, **named)
        (first, _), (second, _) = self.layers(self.name)
        self.first = LinearProducts(recipe, first, self.w1, self.b1)
        self.second = LinearProducts(recipe, second, self.w2, self.b2)

    @staticmethod
    def layers(name):
        return [(f'{name}.w1', 'linear'), (f'{name}.w2', 'linear')]

    def forward(self, x):
        F, D = self.w1.value.shape
        check('x', x, (*np.shape(x)[:-1], D))
        h, y = empty((*x.shape[:-1], F), name=f'{self.name}.h'), empty(x.shape, name=f'{self.name}.y')
        first = self.first.forward(h, x, relu=True)
        return y, self.Ctx(x.shape, h, first, self.second.forward(y, h))

    def backward(self, dy, ctx, into=None):
        """-> dx.  into: an array to add dx to, which is then what is returned; it may be dy."""
        check('dy', dy, ctx.shape)
        if into is not None:
            check('into', into, ctx.shape)
        h, dy = as_rows(ctx.h), as_rows(dy)
        dh = empty(h.shape, name=f'{self.name}.dh')
        launch('column_sums', self.b2.grad, dy, *dy.shape)
        self.second.backward(dy, ctx.second, dh)
        launch('relu_backward', dh, dh, h, dh.size)
        launch('column_sums', self.b1.grad, dh, *dh.shape)
        dx = empty(ctx.shape, name=f'{self.name}.dx') if into is None else into         # dy has been read
        self.first.backward(dh, ctx.first, dx, into is not None)
        return dx


class QuantizedPixelLinear(PixelLinear):
    """PixelLinear with rounded operands: the batch is gathered as floats first, and all its pixels are computed.

    Saves    what QuantizedLinear saves, nothing with gradients=False
    """

    class Ctx(NamedTuple):
        kept: Kept | None

    def __init__(self, *arguments, recipe, **named):
        super().__init__(*arguments, **named)
        self.products = LinearProducts(recipe, self.name, self.weight, self.bias, inputs_first=True)

    layers = QuantizedLinear.layers

    def forward(self, table, rows, gradients=True):
        self.check(table, rows)
        (I, O), N, B = self.weight.value.shape, len(table), len(rows)
        x, y = empty((B, I), name=f'{self.name}.x'), empty((B, O), name=f'{self.name}.y')
        launch('gather_pixels', x, table, rows, N, B, I, self.scale)
        kept = self.products.forward(y, x)
        return y, self.Ctx(kept if gradients else None)

    def backward(self, dy, ctx):
        check_kept(ctx.kept)
        check('dy', dy, (len(ctx.kept.x), len(self.bias.value)))
        launch('column_sums', self.bias.grad, dy, *dy.shape)
        self.products.backward(dy, ctx.kept)


class QuantizedLinearCrossEntropy(LinearCrossEntropy):
    """LinearCrossEntropy with rounded operands: all logits lie in memory, those of masked rows too.

    Saves    logits, labels, stats of CrossEntropy, and what QuantizedLinear saves; nothing with gradients=False
    """

    class Ctx(NamedTuple):
        valid: np.ndarray
        shape: tuple[int, ...]
        logits: np.ndarray | None
        labels: np.ndarray | None
        stats: np.ndarray | None
        kept: Kept | None

    def __init__(self, *arguments, recipe, **named):
        super().__init__(*arguments, **named)
        self.products = LinearProducts(recipe, self.name, self.weight, self.bias)

    layers = QuantizedLinear.layers

    def _logits(self, x):
        """x (..., D) -> logits (R, V), Kept."""
        logits = empty((len(as_rows(x)), len(self.weight.value)), name=f'{self.name}.logits')
        return logits, self.products.forward(logits, x)

    def forward(self, x, labels, gradients=True):
        check('labels', labels, np.shape(labels), np.int32)
        check('x', x, (*labels.shape, self.weight.value.shape[1]))
        loss, valid = empty(1, name=f'{self.name}.loss'), empty(1, np.int32, f'{self.name}.valid')
        stats = empty((2, labels.size), name=f'{self.name}.stats')
        logits, kept = self._logits(x)
        launch('cross_entropy_forward', loss, valid, stats, logits, labels, *logits.shape, self.ignore,
               self.smoothing if gradients else 0.0)
        return loss, self.Ctx(valid, x.shape, *((logits, labels, stats, kept) if gradients else [None] * 4))

    def backward(self, dloss, ctx):
        check('dloss', dloss, (1,))
        check_kept(ctx.kept)
        dlogits, dx = empty(ctx.logits.shape, name=f'{self.name}.dlogits'), empty(ctx.shape, name=f'{self.name}.dx')
        launch('cross_entropy_backward', dlogits, dloss, ctx.logits, ctx.labels, ctx.stats, ctx.valid, *ctx.logits.shape,
               self.ignore, self.smoothing)
        launch('column_sums', self.bias.grad, dlogits, *dlogits.shape)
        self.products.backward(dlogits, ctx.kept, dx)
        return dx

    def prepare(self):
        """-> None: what weight is rounded to is found in every call."""

    def predict(self, x, prepared=None):
        """x (B, D) -> the index (B,) int32 of the largest logit."""
        check('x', x, (len(x), self.weight.value.shape[1]))
        logits, _ = self._logits(x)
        index = empty(len(x), np.int32, f'{self.name}.index')
        launch('argmax', index, logits, *logits.shape)
        return index


class QuantizedAttention(Attention):
    """Attention with rounded operands: its scores and weights lie in memory, and each of its six products is one of its own.

    Forward  qk: s = q k', over C;  W = dropout(softmax(s / sqrt(C)));  pv: y = W v, over Tk
    Backward dp: dW = dy v', over C;  dv: dv = W' dy, over Tq;  dS from dW, as in Attention
             dq: dq = dS k / sqrt(C), over Tk;  dk: dk = dS' q / sqrt(C), over Tq
    Saves    q, k, v and W, rounded for forward where backward takes the same copy; the softmax; lengths and step
    Notes    blocks lie within a head, and within a sentence.  Those along Tk have the values of keys that a query may not see,
             whose weights are 0, and share a scale with them.
    """

    class Ctx(NamedTuple):
        q: np.ndarray
        k: np.ndarray
        v: np.ndarray
        w: np.ndarray
        softmax: np.ndarray
        step: np.ndarray | None

    def __init__(self, *arguments, recipe, **named):
        super().__init__(*arguments, **named)
        self.round = Rounding(recipe, self.name, 'attention')
        self._factors = {}              # 1 / sqrt(C), in memory, by C

    @staticmethod
    def layers(name):
        return [(name, 'attention')]

    def forward(self, q, k, v, lengths=None, step=None):
        self.check(q, k, v, lengths, step)
        (Tq, B, _), Tk = q.shape, len(k)
        q, k, v = map(self._by_head, (q, k, v))
        C, rounded = q.shape[-1], self.round
        qq, qk = rounded('qk.q', q, 3), rounded('qk.k', k, 3)
        softmax = empty((B, self.heads, Tq, Tk), name=f'{self.name}.softmax')           # the scores first
        gemm_batched(softmax, qq.transpose(1, 2, 0, 3), qk.transpose(1, 2, 3, 0))
        note_product(self, QK, heads=self.heads)
        w = empty(softmax.shape, name=f'{self.name}.w') if step is not None and self.p else softmax
        launch('attention_softmax_forward', softmax, None if w is softmax else w, softmax, lengths, step, Tq, Tk, B, self.heads,
               self.causal, C ** -0.5, self.p, self.key)
        note_product(self, SOFTMAX)
        qw, qv = rounded('pv.p', w, 3), rounded('pv.v', v, 0)
        y = empty((Tq, B, self.heads * C), name=f'{self.name}.y')
        gemm_batched(self._by_head(y).transpose(1, 2, 0, 3), qw, qv.transpose(1, 2, 0, 3))
        note_product(self, PV if w is softmax else DROPPED_PV)
        return y, self.Ctx(qq if rounded.same('qk.q', 'dk.q') else q, qk if rounded.same('qk.k', 'dq.k') else k,
                           qv if rounded.same('pv.v', 'dp.v') else v, qw if rounded.same('pv.p', 'dv.p') else w, softmax, step)

    def backward(self, dy, ctx):
        """-> dq, dk, dv."""
        (Tq, B, heads, C), Tk, rounded = ctx.q.shape, len(ctx.k), self.round
        check('dy', dy, (Tq, B, heads * C))
        dy = self._by_head(dy)
        dq, dk, dv = (empty((T, B, heads * C), name=f'{self.name}.d{name}') for T, name in ((Tq, 'q'), (Tk, 'k'), (Tk, 'v')))

        qdy, qv = rounded('dp.do', dy, 3), ctx.v if rounded.same('pv.v', 'dp.v') else rounded('dp.v', ctx.v, 3)
        ds = empty(ctx.softmax.shape, name=f'{self.name}.ds')                           # the gradients of the weights first
        gemm_batched(ds, qdy.transpose(1, 2, 0, 3), qv.transpose(1, 2, 3, 0))
        note_product(self, DP)
        if not rounded.same('dp.do', 'dv.do'):
            qdy = rounded('dv.do', dy, 0)
        qw = ctx.w if rounded.same('pv.p', 'dv.p') else rounded('dv.p', ctx.w, 2)
        gemm_batched(self._by_head(dv).transpose(1, 2, 0, 3), qw.transpose(0, 1, 3, 2), qdy.transpose(1, 2, 0, 3))
        note_product(self, DROPPED_DV if ctx.step is not None and self.p else DV)
        launch('attention_softmax_backward', ds, ds, ctx.softmax, ctx.step, Tq, Tk, B, heads, self.p, self.key)

        qds, qk = rounded('dq.ds', ds, 3), ctx.k if rounded.same('qk.k', 'dq.k') else rounded('dq.k', ctx.k, 0)
        gemm_batched(self._by_head(dq).transpose(1, 2, 0, 3), qds, qk.transpose(1, 2, 0, 3))
        note_product(self, DQ)
        if not rounded.same('dq.ds', 'dk.ds'):
            qds = rounded('dk.ds', ds, 2)
        qq = ctx.q if rounded.same('qk.q', 'dk.q') else rounded('dk.q', ctx.q, 0)
        gemm_batched(self._by_head(dk).transpose(1, 2, 0, 3), qds.transpose(0, 1, 3, 2), qq.transpose(1, 2, 0, 3))
        note_product(self, DK)
        for gradient, product in ((dq, SCALED_DQ), (dk, SCALED_DK)):
            launch('scale', gradient, gradient, self._factor(C), gradient.size)
            note_product(self, product)
        return dq, dk, dv

    def _by_head(self, x):
        """(T, B, D) as (T, B, heads, C)."""
        T, B, D = x.shape
        return x.reshape(T, B, self.heads, D // self.heads)

    def _factor(self, C):
        if C not in self._factors:
            self._factors[C] = put(np.full(1, C ** -0.5, np.float32))
        return self._factors[C]


# the axes of an operand (B, heads, M, K) in the array that it is a view of, (T, B, heads, C) or (B, heads, Tq, Tk)
LEFT, RIGHT, SAME, SWAPPED = (2, 0, 1, 3), (3, 0, 1, 2), (0, 1, 2, 3), (0, 1, 3, 2)
QK = Product('qk', {'q': ('a', LEFT), 'k': ('b', RIGHT)})
SOFTMAX = Product('softmax', {'p': 'p'})
PV = Product('pv', {'p': ('a', SAME), 'v': ('b', LEFT), 'y': ('c', LEFT)})
DP = Product('dp', {'do': ('a', LEFT), 'v': ('b', RIGHT)})
DV = Product('dv', {'p': ('a', SWAPPED), 'do': ('b', LEFT), 'dv': ('c', LEFT)})
DQ = Product('dq', {'ds': ('a', SAME), 'k': ('b', LEFT)})
DK = Product('dk', {'ds': ('a', SWAPPED), 'q': ('b', LEFT)})
SCALED_DQ, SCALED_DK = Product('scale', {'dq': 'y'}), Product('scale', {'dk': 'y'})
DROPPED_PV, DROPPED_DV = (product._replace(names={'p': 'dropped_weights'}) for product in (PV, DV))


AFTER, BEFORE_1, BEFORE_2 = range(3)    # pyops_gru_stage


class QuantizedGRU(GRU):
    """GRU with rounded operands: two linear layers, <name>.ih of all steps at once and <name>.hh, a product or two each step.

    Forward  the steps of GRU; its products  ih: x w_ih', over I;  hh: h[t-1] w_hh', over H, and with reset_before of r and z
             alone, then u w_hn', over H
    Backward of each step  hh dgrad: [dr dz du] w_hh, over 3H;  with reset_before dn w_hn, over H, then [dr dz] w_h[rz], over 2H
             over all steps at once  ih dgrad and wgrad as in QuantizedLinear;  hh wgrad: over T B
    Saves    h with h0 before it, gates, u, and of the layers what QuantizedLinear saves
    Notes    all steps are computed, whatever the lengths.  Behind these h is not 0, but nobody should read it: where dh and
             dh_last are 0 there, no gradient comes back
    """

    class Ctx(NamedTuple):
        shape: tuple[int, ...]
        has_h0: bool
        states: np.ndarray              # (T + 1, B, H): h0, or zeros, and h
        gates: np.ndarray
        u: np.ndarray | None            # (T, B, H), with reset_before
        ih: Kept
        w_hh: np.ndarray | None         # as Kept.w

    def __init__(self, *arguments, recipe, **named):
        super().__init__(*arguments, **named)
        (ih, _), (hh, kind) = self.layers(self.name)
        self.ih, self.hh = LinearProducts(recipe, ih, self.w_ih, self.b_ih, steps=True), Rounding(recipe, hh, kind)

    @staticmethod
    def layers(name):
        return [(f'{name}.ih', 'linear'), (f'{name}.hh', 'linear')]

    def forward(self, x, h0=None, lengths=None):
        self.check(x, h0, lengths)
        (T, B, _), H = x.shape, self.w_hh.value.shape[1]
        states, gates = empty((T + 1, B, H), name=f'{self.name}.h'), empty((T, B, 4 * H), name=f'{self.name}.gates')
        a, product = empty((T, B, 3 * H), name=f'{self.name}.ih.y'), empty((B, 3 * H), name=f'{self.name}.hh.y')
        u = empty((T, B, H), name=f'{self.name}.u') if self.reset_before else None
        if h0 is None:
            launch('fill', states[0], B * H, 0.0)
        else:
            copy(states[0], h0)
        ih = self.ih.forward(a, x)
        w, b = self.hh('fwd.w', self.w_hh.value, 1), self.b_hh.value
        for t in range(T):
            h = self.hh('fwd.x', states[t], 1, t)
            if self.reset_before:
                rz, n = product.reshape(-1)[:B * 2 * H].reshape(B, 2 * H), product.reshape(-1)[B * 2 * H:].reshape(B, H)
                gemm(rz, h, w[:2 * H].T, b[:2 * H])
                self._note(FWD, slice(2 * H), (B,))
                launch('gru_gates_forward', u[t], gates[t], a[t], rz, states[t], B, H, BEFORE_1)
                gemm(n, self.hh('fwd.x', u[t], 1, T + t), w[2 * H:].T, b[2 * H:])
                self._note(FWD, slice(2 * H, 3 * H), (B,))
                launch('gru_gates_forward', states[t + 1], gates[t], a[t], n, states[t], B, H, BEFORE_2)
            else:
                gemm(product, h, w.T, b)
                self._note(FWD, slice(3 * H), (B,))
                launch('gru_gates_forward', states[t + 1], gates[t], a[t], product, states[t], B, H, AFTER)
        return states[1:], self.Ctx(x.shape, h0 is not None, states, gates, u, ih,
                                    w if self.hh.same('fwd.w', 'dgrad.w') else None)

    def backward(self, dh, ctx, dh_last=None):
        """-> dx, dh0 (None where forward had no h0)."""
        (T, B, I), H = ctx.shape, self.w_hh.value.shape[1]
        self.check_gradients(dh, dh_last, T, B)
        carry, da = empty((B, H), name=f'{self.name}.dh0'), empty((T, B, 3 * H), name=f'{self.name}.ih.dy')
        if dh_last is None:
            launch('fill', carry, B * H, 0.0)
        else:
            copy(carry, dh_last)

        w, dw, db = ctx.w_hh, self.w_hh.grad, self.b_hh.grad
        # the parts of the recurrent product: rows of w_hh, the gradient of what they make, their other operand
        if self.reset_before:
            parts = [(slice(0, 2 * H), empty((T, B, 2 * H), name=f'{self.name}.hh.dy_rz'), ctx.states[:-1]),
                     (slice(2 * H, 3 * H), empty((T, B, H), name=f'{self.name}.hh.dy_n'), ctx.u)]
            du = empty((B, H), name=f'{self.name}.du')
        else:
            parts = [(slice(0, 3 * H), empty((T, B, 3 * H), name=f'{self.name}.hh.dy'), ctx.states[:-1])]
        weights = [self.hh('dgrad.w', self.w_hh.value[rows], 0) if w is None else w[rows] for rows, _, _ in parts]
        for t in reversed(range(T)):
            above, gates, h = None if dh is None else dh[t], ctx.gates[t], ctx.states[t]
            if self.reset_before:
                d_rz, d_n = parts[0][1][t], parts[1][1][t]
                launch('gru_gates_backward', carry, da[t], d_n, above, None, gates, h, B, H, BEFORE_1)
                gemm(du, self.hh('dgrad.g', d_n, 1, T + t), weights[1])
                self._note(DGRAD, parts[1][0])
                launch('gru_gates_backward', carry, da[t], d_rz, None, du, gates, h, B, H, BEFORE_2)
                back = d_rz
            else:
                back = parts[0][1][t]
                launch('gru_gates_backward', carry, da[t], back, above, None, gates, h, B, H, AFTER)
            if t or ctx.has_h0:             # does anyone want the gradient of h[t-1]?
                gemm(carry, self.hh('dgrad.g', back, 1, t), weights[0], accumulate=True)
                self._note(DGRAD, parts[0][0])

        for i, (rows, g, x) in enumerate(parts):
            gemm(dw[rows], self.hh('wgrad.g', as_rows(g), 0, i).T, self.hh('wgrad.x', as_rows(x), 0, i), accumulate=True)
            self._note(WGRAD, rows, (T, B))
            launch('column_sums', db[rows], g, T * B, g.shape[-1])
        launch('column_sums', self.b_ih.grad, da, T * B, 3 * H)
        dx = empty((T, B, I), name=f'{self.name}.dx')
        self.ih.backward(da, ctx.ih, dx)
        return dx, carry if ctx.has_h0 else None

    def _note(self, product, part, rows=None):
        """Note a product with some rows of w_hh: those are a layer of their own."""
        note_product(self, product, 'hh', weight=self.w_hh.value[part], bias=self.b_hh.value[part], rows=rows, steps=True)


class QuantizedEmbeddingGRU(EmbeddingGRU):
    """EmbeddingGRU with rounded operands: Embedding, ConcatContext and QuantizedGRU, one after the other.

    Saves    what they save
    """

    class Ctx(NamedTuple):
        embedding: Embedding.Ctx
        concat: ConcatContext.Ctx | None
        gru: QuantizedGRU.Ctx

    def __init__(self, *arguments, recipe, **named):
        super().__init__(*arguments, **named)
        self.embedding, self.concat = Embedding(self.table), ConcatContext()
        self.gru = QuantizedGRU(self.w_ih, self.w_hh, self.b_ih, self.b_hh, self.reset_before, self.name, recipe=recipe)

    layers = QuantizedGRU.layers

    def forward(self, ids, context=None, h0=None, lengths=None):
        self.check(ids, context, h0, lengths)
        x, embedding = self.embedding.forward(ids)
        x, concat = (x, None) if context is None else self.concat.forward(x, context)
        h, gru = self.gru.forward(x, h0, lengths)
        return h, self.Ctx(embedding, concat, gru)

    def backward(self, dh, ctx, dh_last=None):
        """-> None, since ids have no gradient, dcontext (None where forward had no context), dh0 (None where it had no h0)."""
        dx, dh0 = self.gru.backward(dh, ctx.gru, dh_last)
        dx, dcontext = (dx, None) if ctx.concat is None else self.concat.backward(dx, ctx.concat)
        self.embedding.backward(dx, ctx.embedding)
        return None, dcontext, dh0


# the name in pyops.ops -> what takes its place where a recipe says something about the layers that it is
OPS = {'Attention': QuantizedAttention, 'EmbeddingGRU': QuantizedEmbeddingGRU, 'FeedForward': QuantizedFeedForward,
       'GRU': QuantizedGRU, 'Linear': QuantizedLinear, 'LinearCrossEntropy': QuantizedLinearCrossEntropy,
       'PixelLinear': QuantizedPixelLinear}


declare(attention_softmax_forward=Kernel(), attention_softmax_backward=Kernel())
