"""EmbeddingPositions: the input of a transformer, token vectors plus positions, with dropout."""
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pyops.backend import REAL, activations, axes, check, check_parameter, empty, launch
from pyops.backend.kernels import Kernel, declare
from pyops.ops.dropout import Dropout
from pyops.ops.positions import Positions

if TYPE_CHECKING:
    from pyops.params import Parameter
    from pyops.typing import Array, Example, Normal


class EmbeddingPositions:
    """Look up a row of the weight matrix for each id, scale it, add a positional encoding, and drop elements.

    Shapes   ids (N,) int32 in [0, V);  y, dy (N, E);  weight (V, E);  positions (N,) int32, or None: `first` for all rows
             step (1,) int64 array: each step has a different mask; None: no dropout
    Forward  y[n] = keep * (scale weight[ids[n]] + table[first + positions[n]]) / (1 - p), keep as in Dropout, table and scale
             of `encoding`, a Positions
    Backward dweight[ids[n]] += scale (keep * dy[n] / (1 - p)), in the order of n;  ids have no gradient: None
             for a weight with a sparse gradient (pyops.params.Spec), marks the updated blocks in weight.touched
    Saves    ids and the step
    Errors   ValueError if not 0 <= p < 1, for an id or a position outside its table, with its index, and if first is outside
             the table; TypeError and ValueError naming the argument
    Source   Vaswani et al. 2017, arXiv:1706.03762, sections 3.4, 3.5 and 5.4
    Notes    one kernel forward; in float32 bit-equal to Embedding, Positions and Dropout
             on a GPU, y has the type that GPU.storage selects
    """

    class Ctx(NamedTuple):
        ids: Array
        step: Array | None         # None: no dropout

    def __init__(self, weight: Parameter, encoding: Positions, p: float = 0.0, key: int = 0, name: str | None = None) -> None:
        self.weight, self.encoding, self.p, self.key, self.name = weight, encoding, p, key, name or weight.owner
        _, E = axes(weight.name, weight.value, 'V E')
        check_parameter(weight, weight.value.shape, sparse=True)
        check(f'table of {encoding.name}', encoding.table, (len(encoding.table), E))

    def forward(self, ids: Array, positions: Array | None = None, step: Array | None = None,
                first: int = 0) -> tuple[Array, Ctx]:
        (N,), (V, E), longest = axes('ids', ids, 'N'), self.weight.value.shape, len(self.encoding.table)
        check('ids', ids, (N,), np.int32)
        if positions is not None:
            check('positions', positions, (N,), np.int32)
        if step is not None:
            check('step', step, (1,), np.int64)
        if not 0 <= first < longest:
            raise ValueError(f'{self.name}: first={first}, expected 0 to {longest - 1}, the last row of the table of positions')
        y = empty((N, E), activations(), f'{self.name}.y')
        launch('embedding_positions_forward', y, self.weight.value, ids, self.encoding.table[first:], positions, step, N, V, E,
               longest - first, self.encoding.scale, self.p, self.key)
        return y, self.Ctx(ids, step if self.p else None)

    def backward(self, dy: Array, ctx: Ctx) -> None:
        V, E = self.weight.value.shape
        check('dy', dy, (*ctx.ids.shape, E), REAL)
        launch('embedding_positions_backward', self.weight.grad, self.weight.touched, dy, ctx.ids, ctx.step, ctx.ids.size, V, E,
               self.encoding.scale, self.p, self.key)

    @staticmethod
    def reference(ids: np.ndarray, positions: np.ndarray | None = None, step: np.ndarray | None = None, first: int = 0, *,
                  weight: np.ndarray, encoding: Positions, p: float = 0.0, key: int = 0) -> np.ndarray:
        at = np.zeros(len(ids), np.int32) if positions is None else positions
        y = Positions.reference(weight[ids], first, at, encoding.scale, halves=encoding.halves)
        return y if step is None or not p else Dropout.reference(y, step, p, key)

    @staticmethod
    def example(normal: Normal) -> Example:
        return ([np.array([1, 0, 3, 1], np.int32), np.array([0, 1, 0, 1], np.int32), np.array([3])],
                dict(weight=normal(5, 6), encoding=Positions(6, 8, 3.0), p=0.3, key=7))


declare(embedding_positions_forward=Kernel(bytes=lambda s: s['R'] * s['E'] * 12 + s['R'] * 8),
        embedding_positions_backward=Kernel(bytes=lambda s: s['R'] * s['E'] * 12 + s['R'] * 4))
