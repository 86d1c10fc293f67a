"""GRU: a gated recurrent unit over a whole sequence, as one op."""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops.backend import (
    REAL,
    as_rows,
    axes,
    check,
    check_parameter,
    empty,
    empty_gradient,
    get,
    launch,
    note_product,
    product,
    put,
    work,
)
from pyops.backend.kernels import Kernel, Made, Product, declare

if TYPE_CHECKING:
    from pyops.ops.packed import Packed
    from pyops.params import Parameter
    from pyops.typing import Argument, Array, Example, Normal, Shape, Sizes

AFTER, BEFORE_1, BEFORE_2 = range(3)    # pyops_gru_stage


class GRU:
    """Run a gated recurrent unit over all T steps.

    Shapes   x, dx (T, B, I);  h, dh (T, B, H);  h0, dh0, dh_last (B, H);  lengths (B,) int32
             w_ih (3H, I), w_hh (3H, H), b_ih (3H,), b_hh (3H,): gates stacked in the order r, z, n
    Forward  with h[-1] = h0, zeros if h0 is None, for t = 0 .. T-1:
             r = sigmoid(x[t] w_ir' + b_ir + h[t-1] w_hr' + b_hr)
             z = sigmoid(x[t] w_iz' + b_iz + h[t-1] w_hz' + b_hz)
             n = tanh(x[t] w_in' + b_in + r * u),  u = h[t-1] w_hn' + b_hn       (reset_before False)
             n = tanh(x[t] w_in' + b_in + u w_hn' + b_hn),  u = r * h[t-1]       (reset_before True)
             h[t] = (1 - z) * n + z * h[t-1]
    Backward for t = T-1 .. 0, with d the total gradient of h[t] (from dh[t], from h[t+1], and at t = T-1 from dh_last):
             dn = d (1 - z)(1 - n^2);  dz = d (h[t-1] - n) z (1 - z)
             reset_before False:  dr = dn u r (1 - r);  du = dn r;  dh[t-1] = d z + [dr dz du] w_hh
             reset_before True:   e = dn w_hn;  dr = e h[t-1] r (1 - r);  dh[t-1] = d z + e r + [dr dz] w_h[rz]
             then over all steps at once  dx = [dr dz dn] w_ih;  dw_ih += [dr dz dn]' x;  dw_hh likewise; biases: sums
             sequence b has lengths[b] steps, T if lengths is None: after its end h is 0 and passes no gradient back
    Packed   with rows, all arrays (T, B, ...) become (N, ...): step t of sentence b is row offsets[b] + t, or with reverse row
             offsets[b + 1] - 1 - t.  ctx.last (B, H) is h after the last step of each sentence, h0 for an empty one, and
             dh_last is its gradient.  The bits of h are the same as with lengths
    Saves    x, h0, lengths, h, and gates (T, B, 4H) = r, z, n, u
    Errors   ValueError for a length outside [0, T], with its position; TypeError and ValueError naming the argument
    Source   Cho et al. 2014, arXiv:1406.1078 (reset before the product); cuDNN and PyTorch reset after it
    Notes    if h[-1] of one GRU is the h0 of another, pass dh0 of the second as dh_last to the first.  A gradient of None is 0.
             On a GPU x, and with it h, gates, dh and dx, may be bfloat16: h0, last and their gradients remain float32, and the
             sum for h[t] reads h[t-1] before it is rounded
    """

    class Ctx(NamedTuple):
        x: Array
        h0: Array | None
        lengths: Array | None
        h: Array
        gates: Array
        last: Array | None
        rows: Packed | None
        reverse: bool

    def __init__(self, w_ih: Parameter, w_hh: Parameter, b_ih: Parameter, b_hh: Parameter, reset_before: bool = False,
                 name: str | None = None) -> None:
        self.w_ih, self.w_hh, self.b_ih, self.b_hh, self.reset_before = w_ih, w_hh, b_ih, b_hh, reset_before
        self.name = name or w_ih.owner
        (_, I), (_, H) = axes(w_ih.name, w_ih.value, '3H I'), axes(w_hh.name, w_hh.value, '3H H')
        for parameter, shape in ((w_ih, (3 * H, I)), (w_hh, (3 * H, H)), (b_ih, (3 * H,)), (b_hh, (3 * H,))):
            check_parameter(parameter, shape)

    def forward(self, x: Array, h0: Array | None = None, lengths: Array | None = None, rows: Packed | None = None,
                reverse: bool = False) -> tuple[Array, Ctx]:
        sizes = self.check(x, h0, lengths, rows, reverse)
        h, gates, last = self.launch_forward(x, None, h0, lengths, rows, reverse, (*sizes, x.shape[-1]))
        note_product(self, INPUT_FWD, 'ih', weight=self.w_ih, bias=self.b_ih, steps=True)
        note_product(self, STATE_FWD, 'hh', weight=self.w_hh, bias=self.b_hh, steps=True)
        return h, self.Ctx(x, h0, lengths, h, gates, last, rows, reverse)

    def launch_forward(self, x: Array | None, a: Array | None, h0: Array | None, lengths: Array | None, rows: Packed | None,
                       reverse: bool, sizes: tuple[int, ...]) -> tuple[Array, Array, Array | None]:
        """Run the kernel on x, or on the input product a.  sizes: T, B, N, I.  Return h, gates and last (None without rows)."""
        H, B, dtype = self.w_hh.value.shape[1], sizes[1], (a if x is None else x).dtype
        shape = sizes[:2] if rows is None else sizes[2:3]
        h, gates = empty((*shape, H), dtype, f'{self.name}.h'), empty((*shape, 4 * H), dtype, f'{self.name}.gates')
        last = None if rows is None else empty((B, H), name=f'{self.name}.last')
        launch('gru_forward', h, gates, last, x, a, h0, lengths, None if rows is None else rows.offsets,
               None if x is None else self.w_ih.operand(dtype), self.w_hh.operand(dtype),
               None if x is None else self.b_ih.value, self.b_hh.value,
               work('gru_forward', *sizes, H), *sizes, H, self.reset_before, reverse)
        return h, gates, last

    def check(self, x: Array, h0: Array | None, lengths: Array | None, rows: Packed | None,
              reverse: bool) -> tuple[int, int, int]:
        """Check the arguments of forward.  Return T, B and N."""
        sizes = self.check_rows('x', x, 'I', lengths, rows, reverse)
        check('x', x, (*x.shape[:-1], self.w_ih.value.shape[1]), REAL)
        self.check_h0(h0, sizes[1])
        return sizes

    @staticmethod
    def check_rows(name: str, x: Array, last: str, lengths: Array | None, rows: Packed | None,
                   reverse: bool) -> tuple[int, int, int]:
        """Check the number of axes of x, lengths and rows.  last: the name of the last axis of x, if it is not a step or row.
        Return T, B and N, the number of packed rows, 0 without them."""
        if rows is None:
            T, B = axes(name, x, f'T B {last}')[:2]
            if reverse:
                raise ValueError('reverse: expected rows, got None; padded sequences cannot be reversed')
            if lengths is not None:
                check('lengths', lengths, (B,), np.int32)
            return T, B, 0
        if lengths is not None:
            raise ValueError('lengths: expected None with rows, which contain the lengths')
        rows.check()
        return rows.longest, rows.sentences, axes(name, x, f'N {last}')[0]

    def check_h0(self, h0: Array | None, B: int) -> None:
        if h0 is not None:
            check('h0', h0, (B, self.w_hh.value.shape[1]))

    def backward(self, dh: Array, ctx: Ctx, dh_last: Array | None = None) -> tuple[Array, Array | None]:
        """Return dx and dh0 (None if forward had no h0)."""
        dx = empty_gradient(ctx.x.shape, f'{self.name}.dx', ctx.x.dtype)
        dh0, _ = self.launch_backward(dx, dh, dh_last, ctx)
        note_product(self, INPUT_DGRAD, 'ih', weight=self.w_ih)
        note_product(self, STATE_DGRAD, 'hh', weight=self.w_hh)
        return dx, dh0

    def launch_backward(self, dx: Array | None, dh: Array, dh_last: Array | None, ctx: Any) -> tuple[Array | None, Array]:
        """Run the kernel; dx None: the caller computed the input product.  Return dh0 and dgates."""
        H, rows, shape, dtype = self.w_hh.value.shape[1], ctx.rows, ctx.h.shape[:-1], ctx.h.dtype
        T, B, N = (*shape, 0) if rows is None else (rows.longest, rows.sentences, *shape)
        self.check_gradients(dh, dh_last, shape, B)
        I = 0 if dx is None else dx.shape[-1]
        dh0 = None if ctx.h0 is None else empty_gradient((B, H), f'{self.name}.dh0')
        dgates = empty_gradient((*shape, 4 * H), f'{self.name}.dgates', dtype)
        dw_ih, db_ih, x, w_ih = ((None,) * 4 if dx is None else
                                 (self.w_ih.grad, self.b_ih.grad, ctx.x, self.w_ih.operand(dtype)))
        launch('gru_backward', dx, dh0, dw_ih, self.w_hh.grad, db_ih, self.b_hh.grad, dgates,
               dh, dh_last, x, ctx.h0, ctx.lengths, None if rows is None else rows.offsets, w_ih, self.w_hh.operand(dtype),
               ctx.h, ctx.gates, work('gru_backward', T, B, N, I, H), T, B, N, I, H, self.reset_before, ctx.reverse)
        return dh0, dgates

    def check_gradients(self, dh: Array | None, dh_last: Array | None, shape: Shape, B: int) -> None:
        """shape: (T, B) or (N,)"""
        H = self.w_hh.value.shape[1]
        if dh is not None:
            check('dh', dh, (*shape, H), REAL)
        if dh_last is not None:
            check('dh_last', dh_last, (B, H))

    @staticmethod
    def rounded() -> type[GRU]:
        """Return the op class with rounded operands."""
        from pyops.ops.gru_rounded import QuantizedGRU
        return QuantizedGRU

    @staticmethod
    def reference(x: np.ndarray, h0: np.ndarray | None = None, lengths: np.ndarray | None = None,
                  rows: Packed | None = None, reverse: bool = False, *, w_ih: np.ndarray, w_hh: np.ndarray, b_ih: np.ndarray,
                  b_hh: np.ndarray, reset_before: bool = False) -> np.ndarray:
        if rows is not None:
            h = np.empty((len(x), w_hh.shape[1]))
            for b in range(rows.sentences):
                start, end = rows.offsets[b:b + 2]
                order = np.arange(start, end)[::-1 if reverse else 1]
                if len(order):
                    h[order] = GRU.reference(x[order, None], None if h0 is None else h0[b:b + 1], w_ih=w_ih, w_hh=w_hh,
                                             b_ih=b_ih, b_hh=b_hh, reset_before=reset_before)[:, 0]
            return h

        def sigmoid(x: np.ndarray) -> np.ndarray:
            return 1 / (1 + np.exp(-x))

        H = w_hh.shape[1]
        h = np.zeros((x.shape[1], H)) if h0 is None else h0
        out = []
        for x_t in x:
            a, p = x_t @ w_ih.T + b_ih, h @ w_hh.T + b_hh
            r, z = sigmoid(a[:, :H] + p[:, :H]), sigmoid(a[:, H:2*H] + p[:, H:2*H])
            p_n = (r * h) @ w_hh[2*H:].T + b_hh[2*H:] if reset_before else r * p[:, 2*H:]
            n = np.tanh(a[:, 2*H:] + p_n)
            h = (1 - z) * n + z * h
            out.append(h)
        h = np.stack(out)
        return h if lengths is None else h * (np.arange(len(x))[:, None, None] < lengths[:, None])

    @staticmethod
    def example(normal: Normal) -> Example:
        T, B, I, H = 3, 2, 4, 5
        return ([normal(T, B, I), normal(B, H), np.array([3, 2], np.int32)],
                dict(w_ih=normal(3 * H, I), w_hh=normal(3 * H, H), b_ih=normal(3 * H), b_hh=normal(3 * H)))


# ---- the tensors of the two linear layers that the kernels do not store, recomputed for all steps at once -----------------

def states(s: Sizes, array: Argument) -> np.ndarray:
    """Return h[t-1] for all steps, (T, B, H) or (N, H)."""
    h, h0, offsets = get(array('h')), array('h0'), array('offsets')
    if offsets is not None:
        starts, ends = get(offsets)[:-1], get(offsets)[1:]
        has_steps = ends > starts
        before = np.roll(h, -1 if s['reverse'] else 1, 0)
        first = ends - 1 if s['reverse'] else starts
        before[first[has_steps]] = 0 if h0 is None else get(h0)[has_steps]
        return before
    before = np.zeros((1, s['B'], s['H']), np.float32) if h0 is None else get(h0)[None]
    return np.concatenate([before, h[:-1]])


def input_product(s: Sizes, array: Argument) -> Array:
    """Return x[t] w_ih' + b_ih, (T, B, 3H)."""
    return product(as_rows(array('x')), array('w_ih').T, array('b_ih')).reshape(_gates_shape(s))


def state_product(s: Sizes, array: Argument) -> np.ndarray:
    """Return h[t-1] w_hh' + b_hh, (T, B, 3H);  with reset_before, the last third is u w_hn' + b_hn."""
    H, w, b = s['H'], array('w_hh'), array('b_hh')
    y = get(product(as_rows(put(states(s, array))), w.T, b).reshape(_gates_shape(s)))
    if s['reset_before']:
        u = as_rows(array('gates'))[:, 3 * H:]
        y[..., 2 * H:] = get(product(u, w[2 * H:].T, b[2 * H:]).reshape(_states_shape(s)))
    return y


def input_gradients(s: Sizes, array: Argument) -> np.ndarray:
    """Return dr, dz and dn for all steps, (T, B, 3H)."""
    return np.ascontiguousarray(get(array('dgates'))[..., :3 * s['H']])


def state_gradients(s: Sizes, array: Argument) -> np.ndarray:
    """Return dr, dz and du for all steps, (T, B, 3H);  with reset_before, dr, dz and dn."""
    if s['reset_before']:
        return input_gradients(s, array)
    H, dgates = s['H'], get(array('dgates'))
    return np.concatenate([dgates[..., :2 * H], dgates[..., 3 * H:]], -1)


def state_input_gradients(s: Sizes, array: Argument) -> Array:
    """Return the contribution of the state product to the gradient of h[t-1], for all steps, (T, B, H)."""
    H, w, rows = s['H'], array('w_hh'), as_rows(put(state_gradients(s, array)))
    if not s['reset_before']:
        return product(rows, w).reshape(_states_shape(s))
    through_u = get(product(rows[:, 2 * H:], w[2 * H:])).reshape(_states_shape(s))
    r = get(array('gates'))[..., :H]
    return get(product(rows[:, :2 * H], w[:2 * H])).reshape(_states_shape(s)) + r * through_u


def rows_shape(s: Sizes) -> Shape:
    """Return the axes of the rows: (N,) if they are packed, else (T, B)."""
    return (s['N'],) if s['N'] else (s['T'], s['B'])


def _gates_shape(s: Sizes) -> Shape:
    return *rows_shape(s), 3 * s['H']


def _states_shape(s: Sizes) -> Shape:
    return *rows_shape(s), s['H']


def _flops(s: Sizes) -> int:
    """Return the operations of one product with the weights of a gate for all rows."""
    return 2 * math.prod(rows_shape(s)) * s['H'] * (s['I'] + s['H'])


INPUT_FWD = Product('fwd', {'x': 'x', 'y': Made(_gates_shape, input_product)})
STATE_FWD = Product('fwd', {'x': Made(_states_shape, states), 'y': Made(_gates_shape, state_product)})
INPUT_DGRAD = Product('dgrad', {'g': Made(_gates_shape, input_gradients), 'dx': 'dx'})
STATE_DGRAD = Product('dgrad', {'g': Made(_gates_shape, state_gradients), 'dx': Made(_states_shape, state_input_gradients)})

# Count all positions, including positions beyond the lengths, although they are not computed.
declare(gru_forward=Kernel(flops=lambda s, array: 3 * _flops(s)), gru_backward=Kernel(flops=lambda s, array: 6 * _flops(s)),
        gru_gates_forward=Kernel(), gru_gates_backward=Kernel())
