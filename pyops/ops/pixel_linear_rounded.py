"""PixelLinear with rounded operands; rounding.py describes the rules."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from pyops.backend import check, check_kept, empty, launch
from pyops.ops.linear_rounded import QuantizedLinear
from pyops.ops.pixel_linear import PixelLinear
from pyops.ops.rounding import Kept, LinearProducts

if TYPE_CHECKING:
    from pyops.typing import Array


class QuantizedPixelLinear(PixelLinear):
    """PixelLinear with rounded operands: the batch is first gathered as float32, and no pixel is skipped.

    Saves    the same as QuantizedLinear; nothing with gradients=False
    """

    class Ctx(NamedTuple):
        kept: Kept | None

    def __init__(self, *arguments: Any, recipe: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.products = LinearProducts(recipe, self.name, self.weight, self.bias, inputs_first=True)

    layers = QuantizedLinear.layers

    def forward(self, table: Array, rows: Array, gradients: bool = True) -> tuple[Array, Ctx]:
        self.check(table, rows)
        (I, O), N, B = self.weight.value.shape, len(table), len(rows)
        x, y = empty((B, I), name=f'{self.name}.x'), empty((B, O), name=f'{self.name}.y')
        launch('gather_pixels', x, table, rows, N, B, I, self.scale)
        kept = self.products.forward(y, x)
        return y, self.Ctx(kept if gradients else None)

    def backward(self, dy: Array, ctx: Ctx) -> None:
        check_kept(ctx.kept)
        check('dy', dy, (len(ctx.kept.x), len(self.bias.value)))
        launch('column_sums', self.bias.grad, dy, *dy.shape)
        self.products.backward(dy, ctx.kept)         # type: ignore[arg-type]
