"""LSTM and RNN: recurrent networks over a whole sequence, as one op."""
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pyops.backend import (
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
    from collections.abc import Sequence

    from pyops.params import Parameter
    from pyops.typing import Argument, Array, Example, Normal, Shape, Sizes

TANH, RELU, CELL_LSTM = range(3)        # pyops_cell in the header


class _Recurrent:
    """Base of LSTM and RNN.  GATES: blocks of H rows in the weights;  STATES: 2 with a cell state c, else 1."""
    GATES, STATES = 1, 1

    def __init__(self, w_ih: Parameter, w_hh: Parameter, b_ih: Parameter | None, b_hh: Parameter | None, cell: int,
                 name: str | None) -> None:
        self.w_ih, self.w_hh, self.b_ih, self.b_hh, self.cell = w_ih, w_hh, b_ih, b_hh, cell
        self.name = name or w_ih.owner
        (rows, I), (_, H) = axes(w_ih.name, w_ih.value, f'{self.GATES}H I'), axes(w_hh.name, w_hh.value, f'{self.GATES}H H')
        rows = self.GATES * H
        for parameter, shape in ((w_ih, (rows, I)), (w_hh, (rows, H)), (b_ih, (rows,)), (b_hh, (rows,))):
            if parameter is not None:
                check_parameter(parameter, shape)
        if (b_ih is None) != (b_hh is None):
            given = 'b_hh' if b_ih is None else 'b_ih'
            raise ValueError(f'{type(self).__name__}: expected both biases or none, got only {given}')

    class Ctx(NamedTuple):
        x: Array
        h0: Array | None
        c0: Array | None
        lengths: Array | None
        y: Array
        gates: Array | None

    def _forward(self, x: Array, states: Sequence[Array | None], lengths: Array | None) -> tuple[Array, Ctx]:
        """Run the kernel.  states: h0, and c0 of an LSTM."""
        T, B, I = axes('x', x, 'T B I')
        check('x', x, (T, B, self.w_ih.value.shape[1]))
        H = self.w_hh.value.shape[1]
        for name, state in zip(('h0', 'c0'), states, strict=False):
            if state is not None:
                check(name, state, (B, H))
        if lengths is not None:
            check('lengths', lengths, (B,), np.int32)
        h0, c0 = (*states, None)[:2]
        y = empty((2, T, B, H) if self.STATES == 2 else (T, B, H), name=f'{self.name}.y')
        gates = empty((T, B, 4 * H), name=f'{self.name}.gates') if self.STATES == 2 else None
        b_ih, b_hh = (None if bias is None else bias.value for bias in (self.b_ih, self.b_hh))
        launch('rnn_forward', y, gates, x, h0, c0, lengths, self.w_ih.value, self.w_hh.value, b_ih, b_hh,
               work('rnn_forward', T, B, I, H, self.cell), T, B, I, H, self.cell)
        note_product(self, INPUT_FWD, 'ih', weight=self.w_ih, bias=self.b_ih, steps=True)
        note_product(self, STATE_FWD, 'hh', weight=self.w_hh, bias=self.b_hh, steps=True)
        return y, self.Ctx(x, h0, c0, lengths, y, gates)

    def _backward(self, name: str, dy: Array, ctx: Ctx, want_dx: bool) -> tuple[Array | None, Array | None, Array | None]:
        """Return dx, dh0 and dc0."""
        (T, B, I), H = ctx.x.shape, self.w_hh.value.shape[1]
        check(name, dy, ctx.y.shape)
        dx = empty_gradient(ctx.x.shape, f'{self.name}.dx') if want_dx else None
        dh0, dc0 = (None if state is None else empty_gradient((B, H), f'{self.name}.d{which}')
                    for which, state in (('h0', ctx.h0), ('c0', ctx.c0)))
        dgates = empty_gradient((T, B, self.GATES * H), f'{self.name}.dgates')
        db_ih, db_hh = (None if bias is None else bias.grad for bias in (self.b_ih, self.b_hh))
        launch('rnn_backward', dx, dh0, dc0, self.w_ih.grad, self.w_hh.grad, db_ih, db_hh, dgates, dy, ctx.x, ctx.h0, ctx.c0,
               ctx.lengths, self.w_ih.value, self.w_hh.value, ctx.y, ctx.gates,
               work('rnn_backward', T, B, I, H, self.cell), T, B, I, H, self.cell)
        if want_dx:
            note_product(self, INPUT_DGRAD, 'ih', weight=self.w_ih)
        note_product(self, STATE_DGRAD, 'hh', weight=self.w_hh)
        return dx, dh0, dc0


class LSTM(_Recurrent):
    """Run a long short-term memory over all T steps.

    Shapes   x, dx (T, B, I);  y, dy (2, T, B, H): y[0] is h, y[1] is c;  h0, dh0, c0, dc0 (B, H);  lengths (B,) int32
             w_ih (4H, I), w_hh (4H, H), b_ih, b_hh (4H,) or None: gates stacked in the order i, f, g, o
    Forward  with h[-1] = h0 and c[-1] = c0, zeros if they are None, for t = 0 .. T-1:
             a = x[t] w_ih' + b_ih + h[t-1] w_hh' + b_hh, in four parts
             i = sigmoid(a_i);  f = sigmoid(a_f);  g = tanh(a_g);  o = sigmoid(a_o)
             c[t] = f c[t-1] + i g;  h[t] = o tanh(c[t])
    Backward for t = T-1 .. 0, with d the total gradient of h[t] and s = tanh(c[t]):
             e = gradient of c[t] from dy[1, t] and from c[t+1], plus d o (1 - s^2)
             di = e g i (1 - i);  df = e c[t-1] f (1 - f);  dg = e i (1 - g^2);  do = d s o (1 - o)
             c[t-1] gets e f, h[t-1] gets [di df dg do] w_hh
             then over all steps at once  dx = da w_ih;  dw_ih += da' x;  dw_hh += da' h[t-1];  biases: sums of da
             sequence b has lengths[b] steps, T if lengths is None: after its end h and c are 0 and pass no gradient back
    Saves    x, h0, c0, lengths, y, and gates (T, B, 4H) = i, f, g, o
    Errors   ValueError for a length outside [0, T], with its position; TypeError and ValueError naming the argument
    Source   Hochreiter and Schmidhuber 1997; the forget gate: Gers et al. 2000
    """
    GATES, STATES = 4, 2

    def __init__(self, w_ih: Parameter, w_hh: Parameter, b_ih: Parameter | None = None, b_hh: Parameter | None = None,
                 name: str | None = None) -> None:
        super().__init__(w_ih, w_hh, b_ih, b_hh, CELL_LSTM, name)

    def forward(self, x: Array, h0: Array | None = None, c0: Array | None = None,
                lengths: Array | None = None) -> tuple[Array, _Recurrent.Ctx]:
        return self._forward(x, (h0, c0), lengths)

    def backward(self, dy: Array, ctx: _Recurrent.Ctx,
                 want_dx: bool = True) -> tuple[Array | None, Array | None, Array | None]:
        """Return dx (None with want_dx=False), dh0 and dc0, None for a state that forward did not have."""
        return self._backward('dy', dy, ctx, want_dx)

    @staticmethod
    def reference(x: np.ndarray, h0: np.ndarray | None = None, c0: np.ndarray | None = None, lengths: np.ndarray | None = None,
                  *, w_ih: np.ndarray, w_hh: np.ndarray, b_ih: np.ndarray | None = None,
                  b_hh: np.ndarray | None = None) -> np.ndarray:
        def sigmoid(x: np.ndarray) -> np.ndarray:
            return 1 / (1 + np.exp(-x))

        zeros = np.zeros((x.shape[1], w_hh.shape[1]))
        h, c, states = zeros if h0 is None else h0, zeros if c0 is None else c0, []
        for x_t in x:
            i, f, g, o = np.split(_sum(x_t, h, w_ih, w_hh, b_ih, b_hh), 4, 1)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(c)
            states.append((h, c))
        return _until_end(np.stack(states, 1), lengths)

    @staticmethod
    def example(normal: Normal) -> Example:
        return _example(normal, LSTM.GATES, LSTM.STATES)


class RNN(_Recurrent):
    """Run a simple recurrent network over all T steps.

    Shapes   x, dx (T, B, I);  h, dh (T, B, H);  h0, dh0 (B, H);  lengths (B,) int32
             w_ih (H, I), w_hh (H, H), b_ih, b_hh (H,) or None
    Forward  with h[-1] = h0, zeros if h0 is None, for t = 0 .. T-1:
             h[t] = tanh(x[t] w_ih' + b_ih + h[t-1] w_hh' + b_hh);  nonlinearity 'relu': max(., 0)
    Backward for t = T-1 .. 0, with d the gradient of h[t], from dh[t] and from h[t+1]:
             da = d (1 - h[t]^2);  'relu': d where h[t] > 0;  h[t-1] gets da w_hh
             then over all steps at once  dx = da w_ih;  dw_ih += da' x;  dw_hh += da' h[t-1];  biases: sums of da
             lengths as in LSTM
    Saves    x, h0, lengths, h
    Errors   ValueError for a length outside [0, T], with its position; TypeError and ValueError naming the argument
    Source   Elman 1990
    """

    def __init__(self, w_ih: Parameter, w_hh: Parameter, b_ih: Parameter | None = None, b_hh: Parameter | None = None,
                 nonlinearity: str = 'tanh', name: str | None = None) -> None:
        if nonlinearity not in ('tanh', 'relu'):
            raise ValueError(f"RNN: nonlinearity: {nonlinearity!r}, expected 'tanh' or 'relu'")
        self.nonlinearity = nonlinearity
        super().__init__(w_ih, w_hh, b_ih, b_hh, RELU if nonlinearity == 'relu' else TANH, name)

    def forward(self, x: Array, h0: Array | None = None, lengths: Array | None = None) -> tuple[Array, _Recurrent.Ctx]:
        return self._forward(x, (h0,), lengths)

    def backward(self, dh: Array, ctx: _Recurrent.Ctx, want_dx: bool = True) -> tuple[Array | None, Array | None]:
        """Return dx (None with want_dx=False) and dh0 (None if forward had no h0)."""
        return self._backward('dh', dh, ctx, want_dx)[:2]

    @staticmethod
    def reference(x: np.ndarray, h0: np.ndarray | None = None, lengths: np.ndarray | None = None, *, w_ih: np.ndarray,
                  w_hh: np.ndarray, b_ih: np.ndarray | None = None, b_hh: np.ndarray | None = None,
                  nonlinearity: str = 'tanh') -> np.ndarray:
        h, states = np.zeros((x.shape[1], w_hh.shape[1])) if h0 is None else h0, []
        for x_t in x:
            a = _sum(x_t, h, w_ih, w_hh, b_ih, b_hh)
            h = np.tanh(a) if nonlinearity == 'tanh' else np.maximum(a, 0)
            states.append(h)
        return _until_end(np.stack(states), lengths)

    @staticmethod
    def example(normal: Normal) -> Example:
        return _example(normal, RNN.GATES, RNN.STATES)


def _sum(x: np.ndarray, h: np.ndarray, w_ih: np.ndarray, w_hh: np.ndarray, b_ih: np.ndarray | None,
         b_hh: np.ndarray | None) -> np.ndarray:
    return x @ w_ih.T + h @ w_hh.T + (0 if b_ih is None or b_hh is None else b_ih + b_hh)


def _until_end(y: np.ndarray, lengths: np.ndarray | None) -> np.ndarray:
    """Return y (..., T, B, H) with zeros after the end of each sequence."""
    return y if lengths is None else y * (np.arange(y.shape[-3])[:, None, None] < lengths[:, None])


def _example(normal: Normal, gates: int, states: int) -> Example:
    T, B, I, H = 3, 2, 4, 5
    return ([normal(T, B, I), *(normal(B, H) for _ in range(states)), np.array([3, 2], np.int32)],
            dict(w_ih=normal(gates * H, I), w_hh=normal(gates * H, H), b_ih=normal(gates * H), b_hh=normal(gates * H)))


# ---- the tensors of the two linear layers that the kernels do not store, recomputed for all steps at once -----------------

def _blocks(s: Sizes) -> int:
    return 4 if s['cell'] == CELL_LSTM else 1


def _gates_shape(s: Sizes) -> Shape:
    return s['T'], s['B'], _blocks(s) * s['H']


def _states_shape(s: Sizes) -> Shape:
    return s['T'], s['B'], s['H']


def _states(s: Sizes, array: Argument) -> np.ndarray:
    """Return h[t-1] for all steps."""
    h, h0 = get(array('y')).reshape(-1, *_states_shape(s))[0], get(array('h0'))
    return np.concatenate([np.zeros((1, s['B'], s['H']), np.float32) if h0 is None else h0[None], h[:-1]])


def _input_product(s: Sizes, array: Argument) -> Array:
    """Return x[t] w_ih' + b_ih."""
    return product(as_rows(array('x')), array('w_ih').T, array('b_ih')).reshape(_gates_shape(s))


def _state_product(s: Sizes, array: Argument) -> Array:
    """Return h[t-1] w_hh' + b_hh."""
    return product(as_rows(put(_states(s, array))), array('w_hh').T, array('b_hh')).reshape(_gates_shape(s))


def _state_gradients(s: Sizes, array: Argument) -> Array:
    """Return the contribution of the state product to the gradient of h[t-1], for all steps."""
    return product(as_rows(array('dgates')), array('w_hh')).reshape(_states_shape(s))


INPUT_FWD = Product('fwd', {'x': 'x', 'y': Made(_gates_shape, _input_product)})
STATE_FWD = Product('fwd', {'x': Made(_states_shape, _states), 'y': Made(_gates_shape, _state_product)})
INPUT_DGRAD = Product('dgrad', {'g': 'dgates', 'dx': 'dx'})
STATE_DGRAD = Product('dgrad', {'g': 'dgates', 'dx': Made(_states_shape, _state_gradients)})


def _flops(s: Sizes) -> int:
    """Return the operations of the two products of all steps, including steps beyond the lengths."""
    return 2 * s['T'] * s['B'] * _blocks(s) * s['H'] * (s['I'] + s['H'])


declare(rnn_forward=Kernel(flops=lambda s, array: _flops(s)), rnn_backward=Kernel(flops=lambda s, array: 2 * _flops(s)))
