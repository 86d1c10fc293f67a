"""Recurrent layers on time-major sequences: x (T, B, I) -> h (T, B, H).

Names and shapes of parameters and the order of gates match PyTorch's.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyops import functional as F
from pyops import init, ndarray, ops
from pyops.autograd import Tensor, apply
from pyops.nn.layers import Dropout
from pyops.nn.module import Layer, Parameter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyops.typing import Numbers, Shape


def _weights(module: Layer, gates: int, input_size: int, hidden_size: int, suffix: str = '') -> None:
    """Add parameters weight_ih, weight_hh, bias_ih, bias_hh with H rows per gate to a module, uniform in +-H^-0.5."""
    bound, H = hidden_size ** -0.5, hidden_size
    for name, shape in (('weight_ih', (gates * H, input_size)), ('weight_hh', (gates * H, H)),
                        ('bias_ih', (gates * H,)), ('bias_hh', (gates * H,))):
        setattr(module, name + suffix, Parameter(shape, init.uniform(-bound, bound)))


def _linear(x: Numbers, weight: Parameter, bias: Parameter) -> Tensor:
    """Return x weight' + bias for one step of a sequence, or for all steps."""
    return apply(ops.Linear, F.tensor(x), weight=weight, bias=bias, steps=True)


def _zeros(x: Tensor, hidden_size: int) -> Tensor:
    """Return the initial state (B, H) for x (B, I): zeros."""
    return Tensor(ndarray.zeros((x.shape[0], hidden_size), device=x.device))


def _check_states(states: Sequence[Any], shape: Shape, most: int) -> None:
    """Raise TypeError or ValueError unless there are at most `most` states, each None or a Tensor of this shape."""
    if len(states) > most:
        raise TypeError(f'expected x and at most {most} state{"s" * (most > 1)}, got {len(states)} states')
    for state in states:
        if state is not None and not isinstance(state, Tensor):
            raise TypeError(f'state: expected a Tensor of shape {shape}, got {type(state).__name__}')
        if state is not None and state.shape != shape:
            raise ValueError(f'state: expected shape {shape}, got {state.shape}')


def _pair(states: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the LSTM states as a tuple of at most two, given as (h, c) or None in one argument or as two arguments."""
    if len(states) == 1 and (states[0] is None or isinstance(states[0], tuple | list)):
        return tuple(states[0] or ())
    if len(states) == 1:
        raise TypeError(f'state: expected (h, c), got {type(states[0]).__name__} alone; c may be None')
    return states


class _Cell(Layer):
    """A single step.  A subclass sets the number of gates and defines step()."""
    GATES, STATES = 1, 1
    weight_ih: Parameter
    weight_hh: Parameter
    bias_ih: Parameter
    bias_hh: Parameter
    step: Callable[..., Any]

    def __init__(self, input_size: int, hidden_size: int) -> None:
        self.input_size, self.hidden_size = input_size, hidden_size
        _weights(self, self.GATES, input_size, hidden_size)

    def forward_tensors(self, x: Tensor, *states: Any) -> Any:
        if x.ndim != 2 or x.shape[1] != self.input_size:
            raise ValueError(f'x: expected shape (B, {self.input_size}), got {x.shape}')
        _check_states(states, (x.shape[0], self.hidden_size), self.STATES)
        return self.step(x, *states)

    def settings(self) -> str:
        return f'{self.input_size}, {self.hidden_size}'


class RNNCell(_Cell):
    """h' = tanh(x weight_ih' + bias_ih + h weight_hh' + bias_hh);  x (B, I), h (B, H) or None for zeros."""

    def step(self, x: Tensor, h: Tensor | None = None) -> Any:
        h = _zeros(x, self.hidden_size) if h is None else h
        return F.tanh(_linear(x, self.weight_ih, self.bias_ih) + _linear(h, self.weight_hh, self.bias_hh))


class GRUCell(_Cell):
    """One step of GRU: return h' for x (B, I) and h (B, H) or None for zeros."""
    GATES = 3

    def step(self, x: Tensor, h: Tensor | None = None) -> Any:
        return F.gru(x.unsqueeze(0), h, self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh).squeeze(0)


class LSTMCell(_Cell):
    """(h', c') = cell(x (B, I), (h, c) or None), states (B, H); see LSTM for the formulas; on arrays cell.forward(x, h, c)."""
    GATES, STATES = 4, 2

    def forward_tensors(self, x: Tensor, *states: Any) -> Any:
        return super().forward_tensors(x, *_pair(states))

    def step(self, x: Tensor, h: Tensor | None = None, c: Tensor | None = None) -> Any:
        h, c = (_zeros(x, self.hidden_size) if state is None else state for state in (h, c))
        return _lstm_step(_linear(x, self.weight_ih, self.bias_ih), h, c, self.weight_hh, self.bias_hh)


def _lstm_step(a: Tensor, h: Tensor, c: Tensor, weight_hh: Parameter, bias_hh: Parameter) -> tuple[Tensor, Tensor]:
    i, f, g, o = F.split(a + _linear(h, weight_hh, bias_hh), h.shape[-1], -1)
    c = F.sigmoid(f) * c + F.sigmoid(i) * F.tanh(g)
    return F.sigmoid(o) * F.tanh(c), c


class _Recurrent(Layer):
    """Base of the multi-layer recurrent layers.  Returns the output and the last state(s) of each layer (L, B, H).

    dropout: applied between layers during training
    """
    GATES, STATES = 1, 1
    run: Callable[..., tuple[Tensor, ...]]      # of one layer: (layer, x, *states) -> output and last states

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, dropout: float = 0.0) -> None:
        if num_layers < 1:
            raise ValueError(f'{type(self).__name__}: num_layers: expected 1 or more, got {num_layers}')
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        for layer in range(num_layers):
            _weights(self, self.GATES, hidden_size if layer else input_size, hidden_size, f'_l{layer}')
        self.dropouts = [Dropout(dropout) for _ in range(num_layers - 1)] if dropout else []

    def weights(self, layer: int) -> list[Parameter]:
        return [getattr(self, f'{name}_l{layer}') for name in ('weight_ih', 'weight_hh', 'bias_ih', 'bias_hh')]

    def forward_tensors(self, x: Tensor, *states: Any) -> Any:
        if x.ndim != 3 or x.shape[2] != self.input_size or not x.shape[0]:
            raise ValueError(f'x: expected shape (T, B, {self.input_size}) with T >= 1, got {x.shape}')
        _check_states(states, (self.num_layers, x.shape[1], self.hidden_size), self.STATES)
        states = (*states, *[None] * (self.STATES - len(states)))
        last = []
        for layer in range(self.num_layers):
            x, *ends = self.run(layer, x, *(state if state is None else state[layer] for state in states))
            last.append(ends)
            if self.dropouts and layer + 1 < self.num_layers:
                x = self.dropouts[layer](x)
        return x, *(F.stack(ends) for ends in zip(*last, strict=True))

    def settings(self) -> str:
        return f'{self.input_size}, {self.hidden_size}' + (f', num_layers={self.num_layers}' if self.num_layers > 1 else '')


class RNN(_Recurrent):
    """h[t] = tanh(x[t] weight_ih' + bias_ih + h[t-1] weight_hh' + bias_hh).

    output (T, B, H), h_n (L, B, H) = rnn(x (T, B, I), h_0 (L, B, H) or None)
    """

    def run(self, layer: int, x: Tensor, h: Tensor | None) -> tuple[Tensor, ...]:
        weight_ih, weight_hh, bias_ih, bias_hh = self.weights(layer)
        h, out = _zeros(x[0], self.hidden_size) if h is None else h, []
        for a in F.unbind(_linear(x, weight_ih, bias_ih)):         # one product for the inputs of all steps
            h = F.tanh(a + _linear(h, weight_hh, bias_hh))
            out.append(h)
        return F.stack(out), h


class LSTM(_Recurrent):
    """With a = x[t] weight_ih' + bias_ih + h[t-1] weight_hh' + bias_hh in four blocks i, f, g, o:

    c[t] = sigmoid(f) c[t-1] + sigmoid(i) tanh(g);  h[t] = sigmoid(o) tanh(c[t]).  Hochreiter and Schmidhuber 1997.
    output (T, B, H), (h_n, c_n) = lstm(x (T, B, I), (h_0, c_0) or None), states (L, B, H); on arrays lstm.forward(x, h_0, c_0)
    """
    GATES, STATES = 4, 2

    def forward_tensors(self, x: Tensor, *states: Any) -> Any:
        output, h_n, c_n = super().forward_tensors(x, *_pair(states))
        return output, (h_n, c_n)

    def run(self, layer: int, x: Tensor, h: Tensor | None, c: Tensor | None) -> tuple[Tensor, ...]:
        weight_ih, weight_hh, bias_ih, bias_hh = self.weights(layer)
        h, c = (_zeros(x[0], self.hidden_size) if state is None else state for state in (h, c))
        out = []
        for a in F.unbind(_linear(x, weight_ih, bias_ih)):
            h, c = _lstm_step(a, h, c, weight_hh, bias_hh)
            out.append(h)
        return F.stack(out), h, c


class GRU(_Recurrent):
    """The op of docs/gru.md, reset gate after the product: one kernel for the whole sequence.

    output (T, B, H), h_n (L, B, H) = gru(x (T, B, I), h_0 (L, B, H) or None)
    """
    GATES = 3

    def run(self, layer: int, x: Tensor, h: Tensor | None) -> tuple[Tensor, ...]:
        w_ih, w_hh, b_ih, b_hh = self.weights(layer)
        output = apply(ops.GRU, x, h, w_ih=w_ih, w_hh=w_hh, b_ih=b_ih, b_hh=b_hh)
        return output, output[-1]
