"""Embedding: a table row for each token."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops.backend import REAL, activations, axes, check, check_parameter, copy, empty, launch
from pyops.backend.kernels import Kernel, declare

if TYPE_CHECKING:
    from pyops.autograd import Tensor
    from pyops.params import Parameter
    from pyops.typing import Array, Example, Normal, TensorGradients


class Embedding:
    """Look up a row of the weight matrix for each id.

    Shapes   ids (...) int32 in [0, V);  y, dy (..., E);  weight (V, E)
    Forward  y[r] = weight[ids[r]]
    Backward dweight[ids[r]] += dy[r], in the order of r, unless ids[r] is padding_idx;  ids have no gradient: None
             for a weight with a sparse gradient (pyops.params.Spec), marks the updated blocks in weight.touched
    Saves    ids
    Errors   ValueError for an id outside the table, with its position; TypeError for a wrong dtype or strides
    Source   a product with a one-hot matrix, computed without its zeros
    Notes    on a GPU, y has the type that GPU.storage selects
    """

    class Ctx(NamedTuple):
        ids: Array

    def __init__(self, weight: Parameter, padding_idx: int | None = None, name: str | None = None) -> None:
        self.weight, self.padding_idx, self.name = weight, padding_idx, name or weight.owner
        axes(weight.name, weight.value, 'V E')
        check_parameter(weight, weight.value.shape, sparse=True)

    def forward(self, ids: Array) -> tuple[Array, Ctx]:
        V, E = self.weight.value.shape
        check('ids', ids, np.shape(ids), np.int32)
        y = empty((*ids.shape, E), activations(), f'{self.name}.y')
        launch('embedding_forward', y, self.weight.value, ids, ids.size, V, E)
        return y, self.Ctx(ids)

    def backward(self, dy: Array, ctx: Ctx) -> None:
        V, E = self.weight.value.shape
        check('dy', dy, (*ctx.ids.shape, E), REAL)
        padding = kept = None
        if self.padding_idx is not None:            # restored afterwards: others may add to this row, such as a tied output
            padding, kept = self.weight.grad[self.padding_idx], empty(E, name=f'{self.name}.padding', kind='scratch')
            copy(kept, padding)
        launch('embedding_backward', self.weight.grad, self.weight.touched, dy, ctx.ids, ctx.ids.size, V, E)
        if padding is not None:
            copy(padding, kept)

    def backward_on_tensors(self, dy: Tensor, ctx: Any, parameters: dict[str, Tensor]) -> TensorGradients:
        from pyops.ops.array import call
        from pyops.ops.shapes import Scatter
        if self.padding_idx is not None:
            dy = dy * (ctx.ids != self.padding_idx).unsqueeze(-1)
        return (None,), {'weight': call(Scatter, dy, ctx.ids, shape=parameters['weight'].shape)}

    @staticmethod
    def reference(ids: np.ndarray, weight: np.ndarray, padding_idx: int | None = None) -> np.ndarray:
        return weight[ids]

    @staticmethod
    def example(normal: Normal) -> Example:
        return [np.array([[1, 0], [3, 1]], np.int32)], dict(weight=normal(5, 3))


declare(embedding_forward=Kernel(bytes=lambda s: 2 * s['R'] * s['E'] * 4 + s['R'] * 4),
        embedding_backward=Kernel(bytes=lambda s: 3 * s['R'] * s['E'] * 4 + s['R'] * 4))
