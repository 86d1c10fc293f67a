"""PixelLinear: the first layer of a network on uint8 images with mostly zero pixels."""
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pyops.backend import axes, check, check_kept, check_parameter, empty, launch, note_product, work
from pyops.backend.kernels import Kernel, Made, Product, declare

if TYPE_CHECKING:
    from pyops.params import Parameter
    from pyops.typing import Argument, Array, Example, Normal, Sizes


class PixelLinear:
    """Gather rows of a table of pixels, multiply them by a weight matrix and add a bias.

    Shapes   table (N, I) uint8;  rows (B,) int64;  y, dy (B, O);  weight (I, O);  bias (O,)
    Forward  x = scale table[rows];  y = x weight + bias
    Backward dweight += x' dy;  dbias += sum_b dy[b];  pixels have no gradient: None
    Saves    table and rows; ink (B,) int32: the number of nonzero pixels of each row, and places (B, I + 8) uint16: their
             indices; with gradients=False, as in evaluation, neither ink nor places.  x is never stored
    Errors   ValueError for a row outside the table, with its position; TypeError and ValueError naming the argument
    Source   Linear fused with the gather of the batch; zero pixels are skipped
    """

    class Ctx(NamedTuple):
        table: Array
        rows: Array
        ink: Array | None
        places: Array | None

    def __init__(self, weight: Parameter, bias: Parameter, scale: float = 1 / 255, name: str | None = None) -> None:
        self.weight, self.bias, self.scale, self.name = weight, bias, scale, name or weight.owner
        _, O = axes(weight.name, weight.value, 'I O')
        check_parameter(weight, weight.value.shape)
        check_parameter(bias, (O,))

    def forward(self, table: Array, rows: Array, gradients: bool = True) -> tuple[Array, Ctx]:
        self.check(table, rows)
        (I, O), N, B = self.weight.value.shape, len(table), len(rows)
        y, ink, places = empty((B, O), name=f'{self.name}.y'), None, None
        if gradients:
            ink, places = empty(B, np.int32, f'{self.name}.ink'), empty((B, I + 8), np.uint16, f'{self.name}.places')
        launch('pixel_linear_forward', y, ink, places, table, rows, self.weight.value, self.bias.value, N, B, I, O, self.scale)
        note_product(self, FWD, weight=self.weight, bias=self.bias)
        return y, self.Ctx(table, rows, ink, places)

    def check(self, table: Array, rows: Array) -> None:
        (N, _), (B,) = axes('table', table, 'N I'), axes('rows', rows, 'B')
        check('table', table, (N, len(self.weight.value)), np.uint8)
        check('rows', rows, (B,), np.int64)

    def backward(self, dy: Array, ctx: Ctx) -> None:
        (I, O), N, B = self.weight.value.shape, len(ctx.table), len(ctx.rows)
        check_kept(ctx.places)
        check('dy', dy, (B, O))
        launch('pixel_linear_backward', self.weight.grad, self.bias.grad, dy, ctx.table, ctx.rows,
               ctx.ink, ctx.places,
               work('pixel_linear_backward', B, I, O), N, B, I, O, self.scale)
        note_product(self, WGRAD, weight=self.weight)

    @staticmethod
    def rounded() -> type[PixelLinear]:
        """Return the op class with rounded operands."""
        from pyops.ops.pixel_linear_rounded import QuantizedPixelLinear
        return QuantizedPixelLinear

    @staticmethod
    def reference(table: np.ndarray, rows: np.ndarray, weight: np.ndarray, bias: np.ndarray,
                  scale: float = 1 / 255) -> np.ndarray:
        return scale * table[rows] @ weight + bias

    @staticmethod
    def example(normal: Normal) -> Example:
        return ([np.arange(24, dtype=np.uint8).reshape(4, 6) * 10, np.array([2, 0, 2])],
                dict(weight=normal(6, 3), bias=normal(3)))


def pixels(s: Sizes, array: Argument) -> Array:
    """Return scale table[rows] as float32, (B, I)."""
    x = empty((s['B'], s['I']))
    launch('gather_pixels', x, array('table'), array('rows'), s['N'], s['B'], s['I'], s['scale'])
    return x


PIXELS = Made(lambda s: (s['B'], s['I']), pixels)
FWD = Product('fwd', {'x': PIXELS, 'y': 'y'}, axis=0)
WGRAD = Product('wgrad', {'g': 'dy'}, axis=0)

declare(pixel_linear_forward=Kernel(
            bytes=lambda s: s['B'] * (s['I'] + 8) + 4 * (s['I'] * s['O'] + s['O'] + s['B'] * s['O'])),
        pixel_linear_backward=Kernel(
            bytes=lambda s: s['B'] * (s['I'] + 8) + 4 * (2 * s['I'] * s['O'] + 2 * s['O'] + s['B'] * s['O'])))
