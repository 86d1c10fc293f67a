"""Linear with rounded operands; rounding.py describes the rules."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops.backend import as_rows, check, empty, empty_gradient, launch, may_overlap
from pyops.ops.linear import Linear
from pyops.ops.rounding import products_of

if TYPE_CHECKING:
    from pyops.typing import Array, Shape


class QuantizedLinear(Linear):
    """Linear with rounded operands.

    Saves    x or its rounded copy, and the rounded copy of the weight, if backward can reuse the copies
    """

    has_fp8 = True                  # fp8.py may compute its products

    class Ctx(NamedTuple):
        shape: Shape
        kept: Any            # of its products

    def __init__(self, *arguments: Any, recipe: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.products = products_of(recipe, self.name, self.weight, self.bias)
        self.has_copies = self.products.has_copies

    backward_on_tensors = None      # type: ignore[assignment]  # the formula of the plain op does not round

    @staticmethod
    def layers(name: str) -> list[tuple[str, str]]:
        return [(name, 'linear')]

    def forward(self, x: Array, out: Array | None = None, copies: Any = None) -> tuple[Array, Ctx]:  # type: ignore[override]
        """Return y, which is `out` if it is given, and the ctx.   copies: as in Fp8Products.forward, if has_copies"""
        O, I = self.weight.value.shape
        check('x', x, (*np.shape(x)[:-1], I), self.products.dtypes)
        y = empty((*x.shape[:-1], O), x.dtype, f'{self.name}.y') if out is None else out
        check('y', y, (*x.shape[:-1], O), x.dtype)
        named: dict[str, Any] = {} if copies is None else {'copies': copies}
        return y, self.Ctx(x.shape, self.products.forward(y, x, **named))

    def backward(self, dy: Array, ctx: Ctx, want_dx: bool = True, into: Array | None = None) -> Array | None:
        """Return dx, or None with want_dx=False.  into: add dx to this array, which may be dy, and return it."""
        check('dy', dy, (*ctx.shape[:-1], len(self.weight.value)), self.products.dtypes)
        if into is not None:
            check('into', into, ctx.shape, dy.dtype)
        if self.bias:
            launch('column_sums', self.bias.grad, dy, *as_rows(dy).shape)
        separate = into is None or may_overlap(into, dy)        # a product must not overwrite its own operand
        dx = None if not want_dx else empty_gradient(ctx.shape, f'{self.name}.dx', dy.dtype) if separate else into
        self.products.backward(dy, ctx.kept, dx, accumulate=not separate)
        if separate and want_dx and into is not None:
            launch('residual', into, into, dx, None, dx.size, 0.0, 0)
            return into
        return dx
