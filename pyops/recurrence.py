"""RNN, LSTM and GRU step by step, as formulas of Tensors: for float64, and for LSTMs with a projection.

Kernels run whole sequences of float32 (pyops/ops/rnn.py, gru.py); arguments and results are the same here.  The order of gates
is PyTorch's: i, f, g, o of an LSTM, r, z, n of a GRU.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyops.autograd import Tensor
from pyops.autograd.tensor import stack, where

if TYPE_CHECKING:
    from collections.abc import Callable


def rnn(x: Tensor, h: Tensor | None, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None, nonlinearity: str,
        lengths: Tensor | None) -> Tensor:
    """Return h (T, B, H) of all steps, as pyops.functional.rnn."""
    def step(x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        return getattr(x + _product(h, w_hh, b_hh), nonlinearity)(),
    return _steps(step, _product(x, w_ih, b_ih), [_state(h, x, w_hh.shape[1])], lengths)[0]


def lstm(x: Tensor, h: Tensor | None, c: Tensor | None, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None,
         lengths: Tensor | None, w_hr: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return h (T, B, P) and c (T, B, H) of all steps, as pyops.functional.lstm.

    w_hr (P, H): each h is multiplied by its transpose, and w_hh is (4H, P); None: P = H
    """
    H = len(w_hh) // 4

    def step(x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        i, f, g, o = (x + _product(h, w_hh, b_hh)).split(H, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return _product(o.sigmoid() * c.tanh(), w_hr), c
    h, c = _steps(step, _product(x, w_ih, b_ih), [_state(h, x, w_hh.shape[1]), _state(c, x, H)], lengths)
    return h, c


def gru(x: Tensor, h: Tensor | None, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, reset_before: bool,
        lengths: Tensor | None) -> Tensor:
    """Return h (T, B, H) of all steps, as pyops.functional.gru."""
    H = w_hh.shape[1]

    def step(x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        (a_r, a_z, a_n), (p_r, p_z, p_n) = x.split(H, -1), _product(h, w_hh, b_hh).split(H, -1)
        r, z = (a_r + p_r).sigmoid(), (a_z + p_z).sigmoid()
        n = (a_n + (_product(r * h, w_hh[2 * H:], b_hh[2 * H:]) if reset_before else r * p_n)).tanh()
        return (1 - z) * n + z * h,
    return _steps(step, _product(x, w_ih, b_ih), [_state(h, x, H)], lengths)[0]


def _product(x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """Return x weight' + bias, without those that are None."""
    y = x if weight is None else x @ weight.T
    return y if bias is None else y + bias


def _state(state: Tensor | None, x: Tensor, size: int) -> Tensor:
    """Return the state (B, size), zeros for None."""
    return Tensor(np.zeros((x.shape[1], size)), dtype=x.dtype, device=x.device) if state is None else state


def _steps(step: Callable[..., tuple[Tensor, ...]], x: Tensor, states: Any, lengths: Tensor | None) -> list[Tensor]:
    """Run the steps of x (T, B, ...).  Return the states of all steps (T, B, size), 0 after the end of a sequence."""
    found = []
    for t in range(len(x)):
        states = step(x[t], *states)
        found.append(states if lengths is None else [where((lengths > t).unsqueeze(1), state, 0.0) for state in states])
    return [stack(list(one)) for one in zip(*found, strict=True)]
