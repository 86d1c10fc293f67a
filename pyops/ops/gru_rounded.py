"""GRU with rounded operands, as two linear layers; rounding.py describes the rules."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from pyops.backend import as_rows, copy, empty, empty_gradient, launch, note_product
from pyops.backend.kernels import DGRAD, FWD, WGRAD
from pyops.ops.gru import AFTER, BEFORE_1, BEFORE_2, GRU
from pyops.ops.packed import pad_rows, unpad_rows
from pyops.ops.rounding import Kept, LinearProducts, Rounding

if TYPE_CHECKING:
    from pyops.backend.kernels import Product
    from pyops.ops.packed import Packed
    from pyops.typing import Array, Shape


class QuantizedGRU(GRU):
    """GRU with rounded operands: two linear layers, <name>.ih for all steps at once and <name>.hh, one or two products a step.

    Forward  the steps of GRU, with the products  ih: x w_ih', over I;  hh: h[t-1] w_hh', over H;  with reset_before, only the
             r and z rows of w_hh, then u w_hn', over H
    Backward in each step  hh dgrad: [dr dz du] w_hh, over 3H;  with reset_before dn w_hn, over H, then [dr dz] w_h[rz], over 2H
             for all steps at once  ih dgrad and wgrad as in QuantizedLinear;  hh wgrad: over T B
    Saves    h0 and h in one array, gates, u, and for the layers the same as QuantizedLinear
    Notes    all steps are computed, for any lengths.  Beyond the length of a sequence h is not 0 and must not be read; if
             dh and dh_last are 0 there, no gradient flows back.  Packed rows are padded first, to `longest` steps: each step
             rounds its operands, and the kernels that round read contiguous rows
    """

    class Ctx(NamedTuple):
        shape: Shape
        has_h0: bool
        states: Array              # (T + 1, B, H): h0, or zeros, and h
        gates: Array
        u: Array | None            # (T, B, H), with reset_before
        ih: Kept
        w_hh: Array | None         # the rounded copy if backward can use it
        last: Array | None
        rows: Packed | None
        reverse: bool
        N: int                     # number of packed rows, 0 without them

    def __init__(self, *arguments: Any, recipe: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        (ih, _), (hh, kind) = self.layers(self.name)
        self.ih, self.hh = LinearProducts(recipe, ih, self.w_ih, self.b_ih, steps=True), Rounding(recipe, hh, kind)

    @staticmethod
    def layers(name: str) -> list[tuple[str, str]]:
        return [(f'{name}.ih', 'linear'), (f'{name}.hh', 'linear')]

    def forward(self, x: Array, h0: Array | None = None, lengths: Array | None = None, rows: Packed | None = None,
                reverse: bool = False) -> tuple[Array, Ctx]:
        *_, N = self.check(x, h0, lengths, rows, reverse)
        if rows is not None:
            x, _ = pad_rows(x, rows, x.shape, reverse, name=f'{self.name}.x')
        return self.forward_padded(x, h0, rows, reverse, N)

    def forward_padded(self, x: Array, h0: Array | None, rows: Packed | None, reverse: bool, N: int) -> tuple[Array, Ctx]:
        """Run on padded x (T, B, I), already reversed.  With rows, return packed h."""
        (T, B, _), H = x.shape, self.w_hh.value.shape[1]
        states, gates = empty((T + 1, B, H), name=f'{self.name}.h'), empty((T, B, 4 * H), name=f'{self.name}.gates')
        a, product = empty((T, B, 3 * H), name=f'{self.name}.ih.y'), empty((B, 3 * H), name=f'{self.name}.hh.y')
        u: Any = empty((T, B, H), name=f'{self.name}.u') if self.reset_before else None
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
                self.hh.multiply('fwd', rz, h, w[:2 * H].T, b[:2 * H])
                self._note(FWD, slice(2 * H), (B,))
                launch('gru_gates_forward', u[t], gates[t], a[t], rz, states[t], B, H, BEFORE_1)
                self.hh.multiply('fwd', n, self.hh('fwd.x', u[t], 1, T + t), w[2 * H:].T, b[2 * H:])
                self._note(FWD, slice(2 * H, 3 * H), (B,))
                launch('gru_gates_forward', states[t + 1], gates[t], a[t], n, states[t], B, H, BEFORE_2)
            else:
                self.hh.multiply('fwd', product, h, w.T, b)
                self._note(FWD, slice(3 * H), (B,))
                launch('gru_gates_forward', states[t + 1], gates[t], a[t], product, states[t], B, H, AFTER)
        h, last = states[1:], None
        if rows is not None:
            h, last = unpad_rows(h, rows, N, reverse, states[0], f'{self.name}.packed')
        return h, self.Ctx(x.shape, h0 is not None, states, gates, u, ih, w if self.hh.same('fwd.w', 'dgrad.w') else None,
                           last, rows, reverse, N)

    def backward(self, dh: Array, ctx: Ctx, dh_last: Array | None = None) -> tuple[Array, Array | None]:
        """Return dx and dh0 (None if forward had no h0)."""
        dx, dh0 = self.backward_padded(dh, ctx, dh_last)
        if ctx.rows is not None:
            dx, _ = unpad_rows(dx, ctx.rows, ctx.N, ctx.reverse, name=f'{self.name}.dx')
        return dx, dh0

    def backward_padded(self, dh: Array, ctx: Ctx, dh_last: Array | None = None) -> tuple[Array, Array | None]:
        """Return dx (T, B, I), reversed as x, and dh0.  With rows, dh is packed."""
        (T, B, I), H = ctx.shape, self.w_hh.value.shape[1]
        packed, N, first = ctx.rows, ctx.N, None
        self.check_gradients(dh, dh_last, (T, B) if packed is None else (N,), B)
        if packed is not None:
            dh, first = pad_rows(dh, packed, (N, H), ctx.reverse, dh_last, f'{self.name}.dh')
            dh_last = None
        carry, da = empty_gradient((B, H), f'{self.name}.dh0'), empty_gradient((T, B, 3 * H), f'{self.name}.ih.dy')
        if dh_last is None:
            launch('fill', carry, B * H, 0.0)
        else:
            copy(carry, dh_last)

        w, dw, db = ctx.w_hh, self.w_hh.grad, self.b_hh.grad
        # the parts of the recurrent product: rows of w_hh, the gradient of their output, their input
        if self.reset_before:
            parts = [(slice(0, 2 * H), empty_gradient((T, B, 2 * H), f'{self.name}.hh.dy_rz'), ctx.states[:-1]),
                     (slice(2 * H, 3 * H), empty_gradient((T, B, H), f'{self.name}.hh.dy_n'), ctx.u)]
            du = empty_gradient((B, H), f'{self.name}.du')
        else:
            parts = [(slice(0, 3 * H), empty_gradient((T, B, 3 * H), f'{self.name}.hh.dy'), ctx.states[:-1])]
        weights = [self.hh('dgrad.w', self.w_hh.value[rows], 0) if w is None else w[rows] for rows, _, _ in parts]
        for t in reversed(range(T)):
            above, gates, h = None if dh is None else dh[t], ctx.gates[t], ctx.states[t]
            if self.reset_before:
                d_rz, d_n = parts[0][1][t], parts[1][1][t]
                launch('gru_gates_backward', carry, da[t], d_n, above, None, gates, h, B, H, BEFORE_1)
                self.hh.multiply('dgrad', du, self.hh('dgrad.g', d_n, 1, T + t), weights[1])
                self._note(DGRAD, parts[1][0])
                launch('gru_gates_backward', carry, da[t], d_rz, None, du, gates, h, B, H, BEFORE_2)
                back = d_rz
            else:
                back = parts[0][1][t]
                launch('gru_gates_backward', carry, da[t], back, above, None, gates, h, B, H, AFTER)
            if t or ctx.has_h0:             # without h0, its gradient is not needed
                self.hh.multiply('dgrad', carry, self.hh('dgrad.g', back, 1, t), weights[0], accumulate=True)
                self._note(DGRAD, parts[0][0])

        for i, (rows, g, x) in enumerate(parts):
            self.hh.multiply('wgrad', dw[rows], self.hh('wgrad.g', as_rows(g), 0, i).T, self.hh('wgrad.x', as_rows(x), 0, i),
                             accumulate=True)
            self._note(WGRAD, rows, (T, B))
            launch('column_sums', db[rows], g, T * B, g.shape[-1])
        launch('column_sums', self.b_ih.grad, da, T * B, 3 * H)
        dx = empty_gradient((T, B, I), f'{self.name}.dx')
        self.ih.backward(da, ctx.ih, dx)
        if first is not None and ctx.has_h0:        # the last state of an empty sentence is h0
            launch('residual', carry, carry, first, None, B * H, 0.0, 0)
        return dx, carry if ctx.has_h0 else None

    def _note(self, product: Product, part: slice, rows: Shape | None = None) -> None:
        """Note a product with some rows of w_hh; the rows form a separate layer."""
        note_product(self, product, 'hh', weight=self.w_hh.value[part], bias=self.b_hh.value[part], rows=rows, steps=True)


