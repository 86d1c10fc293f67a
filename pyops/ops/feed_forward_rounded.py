"""FeedForward with rounded operands; rounding.py describes the rules."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops.backend import as_rows, check, empty, empty_gradient, launch
from pyops.ops.feed_forward import FeedForward
from pyops.ops.rounding import products_of

if TYPE_CHECKING:
    from pyops.typing import Array, Shape


class QuantizedFeedForward(FeedForward):
    """FeedForward with rounded operands: two linear layers, <name>.w1 and <name>.w2.

    Saves    h or a, which backward of the activation reads, and for each layer the same as QuantizedLinear
    """

    has_fp8 = True                  # fp8.py may compute its products

    class Ctx(NamedTuple):
        shape: Shape
        h: Array
        a: Array | None
        first: Any            # of the products of each layer
        second: Any

    def __init__(self, *arguments: Any, recipe: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        (first, _), (second, _) = self.layers(self.name)
        self.first = products_of(recipe, first, self.w1, self.b1)
        self.second = products_of(recipe, second, self.w2, self.b2)

    backward_on_tensors = None      # type: ignore[assignment]  # the formula of the plain op does not round

    @staticmethod
    def layers(name: str) -> list[tuple[str, str]]:
        return [(f'{name}.w1', 'linear'), (f'{name}.w2', 'linear')]

    def forward(self, x: Array) -> tuple[Array, Ctx]:
        F, D = self.w1.value.shape
        check('x', x, (*np.shape(x)[:-1], D), self.first.dtypes)
        h, y = empty((*x.shape[:-1], F), x.dtype, f'{self.name}.h'), empty(x.shape, x.dtype, f'{self.name}.y')
        a = self._inner(h)
        first = self.first.forward(a, x, relu=a is h)
        if a is not h:
            launch(f'{self.activation}_forward', h, a, a.size)
        return y, self.Ctx(x.shape, h, None if a is h else a, first, self.second.forward(y, h))

    def backward(self, dy: Array, ctx: Ctx, into: Array | None = None) -> Array:
        """Return dx.  into: add dx to this array, which may be dy, and return it."""
        check('dy', dy, ctx.shape, ctx.h.dtype)
        if into is not None:
            check('into', into, ctx.shape, dy.dtype)
        h, dy = as_rows(ctx.h), as_rows(dy)
        dh = empty_gradient(h.shape, f'{self.name}.dh', dy.dtype)
        launch('column_sums', self.b2.grad, dy, *dy.shape)
        self.second.backward(dy, ctx.second, dh)
        launch(f'{self.activation}_backward', dh, dh, h if ctx.a is None else ctx.a, dh.size)       # dh becomes da
        launch('column_sums', self.b1.grad, dh, *dh.shape)
        dx = empty_gradient(ctx.shape, f'{self.name}.dx', dy.dtype) if into is None else into       # dy is no longer needed
        self.first.backward(dh, ctx.first, dx, into is not None)
        return dx
