"""Positions: sinusoidal positional encoding, added to the token vectors."""
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pyops.backend import HOST, REAL, axes, check, empty, empty_gradient, launch, put
from pyops.backend.kernels import Kernel, declare

if TYPE_CHECKING:
    from pyops.typing import Array, Example, Normal, Shape


class Positions:
    """Scale x and add a vector of sines and cosines, different at each step.

    Shapes   x, dx, y, dy (T, B, size), or packed rows (N, size) with positions (N,) int32;  table (longest, size)
    Forward  y[t, b] = scale x[t, b] + table[first + t];  packed: y[n] = scale x[n] + table[first + positions[n]]
             table[t, 2i] = sin(t / 10000^(2i / size));  table[t, 2i + 1] = cos(t / 10000^(2i / size))
             halves: all sines come first: columns 0, 2, 4, ... and then 1, 3, 5, ... of that table, as in Marian
    Backward dx = scale dy
    Saves    nothing
    Errors   ValueError if first < 0 or first + T > longest, and for a position outside the table; TypeError and ValueError
             naming the argument
    Source   Vaswani et al. 2017, arXiv:1706.03762, section 3.5; section 3.4 uses scale = sqrt(size)
    Notes    the table is not learned.  first: the number of previous steps, in incremental decoding
    """

    class Ctx(NamedTuple):
        shape: Shape

    def __init__(self, size: int, longest: float = 1000, scale: float = 1.0, name: str = 'positions',
                 halves: bool = False) -> None:
        self.scale, self.name, self.halves = scale, name, halves
        table = HOST.zero_array((longest, size), np.float32)
        angles = np.arange(longest)[:, None] / 10000.0 ** (np.arange(0, size, 2) / size)
        half = -(-size // 2)
        sines, cosines = (slice(half), slice(half, None)) if halves else (slice(0, None, 2), slice(1, None, 2))
        table[:, sines] = np.sin(angles)
        table[:, cosines] = np.cos(angles[:, :size // 2])
        self.table = put(table)

    def forward(self, x: Array, first: int = 0, positions: Array | None = None) -> tuple[Array, Ctx]:
        longest, D = self.table.shape
        if positions is None:
            T, B, _ = axes('x', x, 'T B D')
            shape: Shape = (T, B, D)
        else:
            T, B = axes('x', x, 'N D')[0], 1
            shape = (T, D)
            check('positions', positions, (T,), np.int32)
        check('x', x, shape, REAL)
        steps = T if positions is None else 1
        if not 0 <= first <= longest - steps:
            raise ValueError(f'{self.name}: T={steps} steps from first={first} on do not fit in a table of longest={longest}; '
                             'shorten the sequence or make the op with a larger `longest`')
        y = empty(shape, x.dtype, f'{self.name}.y')
        launch('add_positions_forward', y, x, self.table[first:], positions, T, B, D, longest - first, self.scale)
        return y, self.Ctx(shape)

    def backward(self, dy: Array, ctx: Ctx) -> Array:
        check('dy', dy, ctx.shape, REAL)
        dx = empty_gradient(ctx.shape, f'{self.name}.dx', dy.dtype)
        launch('add_positions_backward', dx, dy, dx.size, self.scale)
        return dx

    @staticmethod
    def reference(x: np.ndarray, first: int = 0, positions: np.ndarray | None = None, scale: float = 1.0,
                  size: int | None = None, longest: int | None = None, halves: bool = False) -> np.ndarray:
        if positions is None:
            positions = np.broadcast_to(np.arange(len(x))[:, None], x.shape[:-1])
        table = np.empty(x.shape)
        for column in range(x.shape[-1]):
            angle = (first + positions) / 10000 ** (column // 2 * 2 / x.shape[-1])
            place = column // 2 + column % 2 * -(-x.shape[-1] // 2) if halves else column
            table[..., place] = np.cos(angle) if column % 2 else np.sin(angle)
        return scale * x + table

    @staticmethod
    def example(normal: Normal) -> Example:
        return [normal(3, 2, 6), 2], dict(size=6, longest=8, scale=3.0)


declare(add_positions_forward=Kernel(), add_positions_backward=Kernel())
