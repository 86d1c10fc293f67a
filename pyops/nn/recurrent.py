"""Recurrent layers and their cells.  Arguments, parameters and the order of gates match PyTorch's.

A layer reads sequences x (T, B, I), or (B, T, I) with batch_first, and runs one kernel per layer and direction.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyops import functional as F
from pyops import init, ndarray, recurrence
from pyops.autograd import Tensor
from pyops.errors import ShapeError
from pyops.nn.layers import Dropout
from pyops.nn.module import Layer, Parameter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyops.typing import Numbers, Shape


class PackedSequence:
    """Sequences of unlike lengths, as nn.utils.rnn.pack_padded_sequence makes and recurrent layers take and return them.

    padded (T, B, ...): what follows the end of a sequence has no effect;  lengths (B,): the numbers of steps, numpy int64
    """

    def __init__(self, padded: Tensor, lengths: np.ndarray) -> None:
        self.padded, self.lengths = padded, lengths

    @property
    def data(self) -> Tensor:
        """The steps of all sequences, without padding (N, ...): all first steps, then all second ones, ..., of the longest
        sequence first."""
        order = self.sorted_indices.numpy()
        steps, places = np.nonzero(np.arange(len(self.padded))[:, None] < self.lengths[order])
        return self.padded[steps, order[places]]

    @property
    def batch_sizes(self) -> Tensor:
        """The number of sequences that have each step (T,)."""
        return Tensor((np.arange(len(self.padded))[:, None] < self.lengths).sum(1))

    @property
    def sorted_indices(self) -> Tensor:
        """The sequences in the order of their lengths, the longest first (B,)."""
        return Tensor(np.argsort(-self.lengths, kind='stable'))

    @property
    def unsorted_indices(self) -> Tensor:
        """The place of each sequence in that order (B,)."""
        return Tensor(np.argsort(self.sorted_indices.numpy(), kind='stable'))


def lengths_of(lengths: Numbers, T: int, B: int) -> np.ndarray:
    """Return lengths (B,) as numpy int64.  ValueError unless each is from 1 to T."""
    found = np.asarray(lengths.numpy() if isinstance(lengths, Tensor | ndarray.NDArray) else lengths)
    if found.shape != (B,) or found.dtype.kind not in 'iu' or found.min() < 1 or found.max() > T:
        raise ValueError(f'lengths: expected {B} whole numbers from 1 to {T}, got {found.tolist()}')
    return found.astype(np.int64)


def _check_flags(who: str, **flags: Any) -> None:
    """Raise TypeError unless each flag is a bool: an argument in the wrong place is usually a number."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f'{who}: {name}: expected True or False, got {flag!r}; pass later arguments by name')


def _check_sizes(who: str, **sizes: int) -> None:
    """Raise ValueError unless each size is at least 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f'{who}: {name}: expected 1 or more, got {size}')


def _check_states(states: Sequence[Any], axes: Shape, sizes: Sequence[int], most: int) -> None:
    """Raise TypeError or ValueError unless there are at most `most` states, each None or a Tensor (*axes, one of sizes)."""
    if len(states) > most:
        raise TypeError(f'expected x and at most {most} state{"s" * (most > 1)}, got {len(states)} states')
    for state, size in zip(states, sizes, strict=False):
        shape = *axes, size
        if state is not None and not isinstance(state, Tensor):
            raise TypeError(f'state: expected a Tensor of shape {shape}, got {type(state).__name__}')
        if state is not None and state.shape != shape:
            raise ShapeError(f'state: expected shape {shape}, got {state.shape}')


def _with_hx(states: tuple[Any, ...], hx: Any) -> tuple[Any, ...]:
    """Return the states of a call, given by position or as PyTorch's hx."""
    if hx is not None and states:
        raise TypeError('got a state and also hx; give one of them')
    return states if hx is None else (hx,)


def _pair(states: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the LSTM states as a tuple of at most two, given as (h, c) or None in one argument or as two arguments."""
    if len(states) == 1 and (states[0] is None or isinstance(states[0], tuple | list)):
        return tuple(states[0] or ())
    if len(states) == 1:
        raise TypeError(f'state: expected (h, c), got {type(states[0]).__name__} alone; c may be None')
    return states


def _settings(layer: Any, **defaults: Any) -> str:
    """Return the sizes and the arguments that differ from their defaults."""
    given = [f'{name}={getattr(layer, name)!r}' for name, default in defaults.items()
             if getattr(layer, name, default) != default]
    return ', '.join([f'{layer.input_size}, {layer.hidden_size}', *given])


class _Weights(Layer):
    """Base of layers and cells.  GATES: blocks of H rows in each weight;  STATES: 2 for h and c, else 1."""
    GATES, STATES = 1, 1
    hidden_size: int
    bias: bool
    proj_size = 0

    @property
    def output_size(self) -> int:
        """The size of h: proj_size, or hidden_size without a projection."""
        return self.proj_size or self.hidden_size

    def state_sizes(self) -> tuple[int, ...]:
        """Return the sizes of h and c."""
        return self.output_size, self.hidden_size

    def add_weights(self, input_size: int, suffix: str = '') -> None:
        """Add weight_ih, weight_hh and, with bias, bias_ih, bias_hh, uniform in +-H^-0.5; with a projection also weight_hr."""
        H = self.hidden_size
        shapes: dict[str, Shape] = {'weight_ih': (self.GATES * H, input_size), 'weight_hh': (self.GATES * H, self.output_size)}
        if self.bias:
            shapes |= {'bias_ih': (self.GATES * H,), 'bias_hh': (self.GATES * H,)}
        if self.proj_size:
            shapes['weight_hr'] = self.proj_size, H
        for name, shape in shapes.items():
            setattr(self, name + suffix, Parameter(shape, init.uniform(-H ** -0.5, H ** -0.5)))

    def weights(self, suffix: str = '') -> list[Any]:
        """Return weight_ih, weight_hh, bias_ih, bias_hh, None for a bias that the layer does not have, and after them weight_hr
        if there is one."""
        return [getattr(self, name + suffix) for name in ('weight_ih', 'weight_hh')] + [
            getattr(self, name + suffix) if self.bias else None for name in ('bias_ih', 'bias_hh')] + [
            getattr(self, name + suffix) for name in ('weight_hr',) if self.proj_size]

    def run(self, weights: list[Any], x: Tensor, *states: Any, lengths: Any = None) -> tuple[Tensor, ...]:
        """Run one layer on x (T, B, I) from states (B, H).  Return h and, for an LSTM, c of all steps, 0 after the end of a
        sequence."""
        raise NotImplementedError


class _RNN(_Weights):
    nonlinearity: str

    def run(self, weights: list[Any], x: Tensor, *states: Any, lengths: Any = None) -> tuple[Tensor, ...]:
        h, = states
        w_ih, w_hh, b_ih, b_hh = weights
        return F.rnn(x, h, w_ih, w_hh, b_ih, b_hh, self.nonlinearity, lengths),

    def set_nonlinearity(self, nonlinearity: str) -> None:
        if nonlinearity not in ('tanh', 'relu'):
            raise ValueError(f"{type(self).__name__}: nonlinearity: {nonlinearity!r}, expected 'tanh' or 'relu'")
        self.nonlinearity = nonlinearity


class _LSTM(_Weights):
    GATES, STATES = 4, 2

    def run(self, weights: list[Any], x: Tensor, *states: Any, lengths: Any = None) -> tuple[Tensor, ...]:
        h, c = states
        w_ih, w_hh, b_ih, b_hh, *projection = weights
        if projection:
            return recurrence.lstm(x, h, c, w_ih, w_hh, b_ih, b_hh, lengths, *projection)
        return F.lstm(x, h, c, w_ih, w_hh, b_ih, b_hh, lengths)


class _GRU(_Weights):
    GATES = 3

    def run(self, weights: list[Any], x: Tensor, *states: Any, lengths: Any = None) -> tuple[Tensor, ...]:
        h, = states
        w_ih, w_hh, b_ih, b_hh = weights
        if not self.bias:                       # the kernel always adds biases
            b_ih = b_hh = Tensor(ndarray.zeros((w_hh.shape[0],), w_hh.dtype, device=x.device))
        return F.gru(x, h, w_ih, w_hh, b_ih, b_hh, lengths=lengths),


# ---- cells: one step ---------------------------------------------------------------------------------------------------

class _Cell(_Weights):
    """Base of the cells: x (B, I), states (B, H) or None for zeros; also x (I,) and states (H,)."""

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True) -> None:
        _check_flags(type(self).__name__, bias=bias)
        _check_sizes(type(self).__name__, input_size=input_size, hidden_size=hidden_size)
        self.input_size, self.hidden_size, self.bias = input_size, hidden_size, bias
        self.add_weights(input_size)

    def forward_tensors(self, x: Tensor, *states: Any, hx: Any = None) -> Any:
        states = _with_hx(states, hx)
        if x.ndim not in (1, 2) or x.shape[-1] != self.input_size:
            raise ShapeError(f'x: expected shape (B, {self.input_size}), got {x.shape}')
        if x.ndim == 1:
            _check_states(states, (), self.state_sizes(), self.STATES)
            rows = [state if state is None else state.unsqueeze(0) for state in states]
            one = _Cell.forward_tensors(self, x.unsqueeze(0), *rows)
            return tuple(y.squeeze(0) for y in one) if self.STATES > 1 else one.squeeze(0)
        _check_states(states, (x.shape[0],), self.state_sizes(), self.STATES)
        states = (*states, *[None] * (self.STATES - len(states)))
        results = tuple(y[0] for y in self.run(self.weights(), x.unsqueeze(0), *states))
        return results if self.STATES > 1 else results[0]

    def settings(self) -> str:
        return _settings(self, bias=True, nonlinearity='tanh')


class RNNCell(_RNN, _Cell):
    """h' = tanh(x weight_ih' + bias_ih + h weight_hh' + bias_hh), or max(., 0) with nonlinearity='relu'."""

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True, nonlinearity: str = 'tanh') -> None:
        self.set_nonlinearity(nonlinearity)
        super().__init__(input_size, hidden_size, bias)


class LSTMCell(_LSTM, _Cell):
    """(h', c') = cell(x (B, I), (h, c) or None), states (B, H); see LSTM for the formulas; on arrays cell.forward(x, h, c)."""

    def forward_tensors(self, x: Tensor, *states: Any, hx: Any = None) -> Any:
        return super().forward_tensors(x, *_pair(_with_hx(states, hx)))


class GRUCell(_GRU, _Cell):
    """One step of GRU: return h' for x (B, I) and h (B, H) or None for zeros."""


# ---- layers: whole sequences -------------------------------------------------------------------------------------------

class _Recurrent(_Weights):
    """Base of the layers.  Returns the output (T, B, D H) and the last state(s) (L D, B, H), for L layers and D directions.

    One sequence x (T, I) needs no batch: its states are (L D, H), and the output (T, D H).

    bias: False: no biases.  batch_first: x and the output are (B, T, ...); states are not.
    dropout: applied to the output of each layer but the last, during training.
    bidirectional: D = 2; a second network reads the sequence from its end, and the output is both side by side.
    A call also takes the states as hx=, and lengths= (B,): the number of steps of each sequence, from 1 to T.  The output is 0
    after the end of a sequence, the last states are those at its end, and the second direction begins there.  A PackedSequence
    in place of x has its own lengths, and the output is one, too.
    """

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
                 dropout: float = 0.0, bidirectional: bool = False, proj_size: int = 0) -> None:
        name = type(self).__name__
        _check_flags(name, bias=bias, batch_first=batch_first, bidirectional=bidirectional)
        _check_sizes(name, input_size=input_size, hidden_size=hidden_size, num_layers=num_layers)
        if not 0 <= dropout <= 1:
            raise ValueError(f'{name}: dropout: expected 0 to 1, got {dropout}')
        if proj_size and (self.STATES < 2 or not 0 < proj_size < hidden_size):
            raise ValueError(f'{name}: proj_size: expected {"0 to " + str(hidden_size - 1) if self.STATES > 1 else "0"}, '
                             f'got {proj_size}')
        self.proj_size = proj_size
        self.input_size, self.hidden_size, self.num_layers, self.bias = input_size, hidden_size, num_layers, bias
        self.batch_first, self.dropout, self.bidirectional = batch_first, dropout, bidirectional
        for layer, suffixes in enumerate(self.suffixes()):
            for suffix in suffixes:
                self.add_weights(self.output_size * len(suffixes) if layer else input_size, suffix)
        self.dropouts = [Dropout(dropout) for _ in range(num_layers - 1)] if dropout else []

    def flatten_parameters(self) -> None:
        """Do nothing: the parameters of a tree share one buffer."""

    @property
    def all_weights(self) -> list[list[Parameter]]:
        """The parameters of each layer and direction."""
        return [[one for one in self.weights(suffix) if one is not None] for layer in self.suffixes() for suffix in layer]

    def suffixes(self) -> list[list[str]]:
        """Return for each layer the ends of the parameter names of each direction."""
        directions = ('', '_reverse') if self.bidirectional else ('',)
        return [[f'_l{layer}{direction}' for direction in directions] for layer in range(self.num_layers)]

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not inputs or not isinstance(inputs[0], PackedSequence):
            return super().__call__(*inputs, **named)
        packed, *states = inputs
        x = packed.padded.transpose(0, 1) if self.batch_first else packed.padded
        y, *rest = super().__call__(x, *states, lengths=packed.lengths, **named)
        return PackedSequence(y.transpose(0, 1) if self.batch_first else y, packed.lengths), *rest

    def forward_tensors(self, x: Tensor, *states: Any, hx: Any = None, lengths: Numbers | None = None) -> Any:
        T, states = (1 if self.batch_first else 0), _with_hx(states, hx)
        if x.ndim == 2:
            if lengths is not None:
                raise ValueError('lengths: expected None for one sequence')
            _check_states(states, (self.num_layers * (1 + self.bidirectional),), self.state_sizes(), self.STATES)
            results = _Recurrent.forward_tensors(self, x.unsqueeze(1 - T),
                                                 *(state if state is None else state.unsqueeze(1) for state in states))
            return results[0].squeeze(1 - T), *(state.squeeze(1) for state in results[1:])
        if x.ndim != 3 or x.shape[2] != self.input_size or not x.shape[T]:
            axes = 'B, T' if self.batch_first else 'T, B'
            raise ShapeError(f'x: expected shape ({axes}, {self.input_size}) with T >= 1, got {x.shape}')
        if self.batch_first:
            x = x.transpose(0, 1)
        _check_states(states, (self.num_layers * (1 + self.bidirectional), x.shape[1]), self.state_sizes(), self.STATES)
        states = (*states, *[None] * (self.STATES - len(states)))
        backward = ends = given = None
        if lengths is not None:
            (steps, B), known = x.shape[:2], lengths_of(lengths, *x.shape[:2])
            times = np.arange(steps)[:, None]
            backward = np.where(times < known, known - 1 - times, times), np.arange(B)[None]       # each sequence reversed
            ends, given = (known - 1, np.arange(B)), F.tensor(known.astype(np.int32), x)
        last: list[list[Tensor]] = []
        for layer, suffixes in enumerate(self.suffixes()):
            outputs = []
            for reverse, suffix in enumerate(suffixes):
                first = [state if state is None else state[len(last)] for state in states]
                turned = x if not reverse else x.flip(0) if backward is None else x[backward]
                results = self.run(self.weights(suffix), turned, *first, lengths=given)
                last.append([y[-1 if ends is None else ends] for y in results])
                y = results[0]
                outputs.append(y if not reverse else y.flip(0) if backward is None else y[backward])
            x = outputs[0] if len(outputs) == 1 else F.cat(outputs, -1)
            if self.dropouts and layer + 1 < self.num_layers:
                x = self.dropouts[layer](x)
        output = x.transpose(0, 1) if self.batch_first else x
        return output, *(F.stack(states) for states in zip(*last, strict=True))

    def settings(self) -> str:
        return _settings(self, num_layers=1, nonlinearity='tanh', bias=True, batch_first=False, dropout=0.0,
                         bidirectional=False)


class RNN(_RNN, _Recurrent):
    """h[t] = tanh(x[t] weight_ih' + bias_ih + h[t-1] weight_hh' + bias_hh), or max(., 0) with nonlinearity='relu'.

    output (T, B, D H), h_n (L D, B, H) = rnn(x (T, B, I), h_0 (L D, B, H) or None).  See pyops.ops.RNN.
    """

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, nonlinearity: str = 'tanh', bias: bool = True,
                 batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False) -> None:
        self.set_nonlinearity(nonlinearity)
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)


class LSTM(_LSTM, _Recurrent):
    """With a = x[t] weight_ih' + bias_ih + h[t-1] weight_hh' + bias_hh in four blocks i, f, g, o:

    c[t] = sigmoid(f) c[t-1] + sigmoid(i) tanh(g);  h[t] = sigmoid(o) tanh(c[t]).  See pyops.ops.LSTM.
    output (T, B, D H), (h_n, c_n) = lstm(x (T, B, I), (h_0, c_0) or None), states (L D, B, H).  On arrays:
    lstm.forward(x, h_0, c_0)

    proj_size P: h[t] = sigmoid(o) tanh(c[t]) weight_hr', with P numbers in place of H; the steps are array ops.
    """

    def forward_tensors(self, x: Tensor, *states: Any, hx: Any = None, lengths: Numbers | None = None) -> Any:
        output, h_n, c_n = super().forward_tensors(x, *_pair(_with_hx(states, hx)), lengths=lengths)
        return output, (h_n, c_n)


class GRU(_GRU, _Recurrent):
    """The op of docs/gru.md, reset gate after the product.

    output (T, B, D H), h_n (L D, B, H) = gru(x (T, B, I), h_0 (L D, B, H) or None)
    """
