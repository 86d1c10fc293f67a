"""FeedForward: two linear layers with an activation function between them."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops.backend import REAL, as_rows, axes, check, check_parameter, empty, empty_gradient, gemm, launch, note_product
from pyops.backend.kernels import FWD
from pyops.ops.activation import GELU, GELUTanh, SiLU
from pyops.ops.linear import ACTIVATION_FWD, BRANCH_FWD, LAYER_DGRAD, LAYER_WGRAD
from pyops.ops.relu import ReLU

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyops.autograd import Tensor
    from pyops.params import Parameter
    from pyops.typing import Array, Example, Normal, TensorGradients

SMOOTH = 'silu', 'gelu', 'gelu_tanh'        # in the order of pyops_activation in the header
ACTIVATIONS = 'relu', *SMOOTH


class FeedForward:
    """Apply two linear layers with an activation function between them to each row: ReLU, or one of ACTIVATIONS.

    Shapes   x, dx, y, dy (..., D);  w1 (F, D), b1 (F,), w2 (D, F), b2 (D,)
    Forward  a = x w1' + b1;  h = max(a, 0), or SiLU, GELU or GELUTanh of a;  y = h w2' + b2
    Backward da = dy w2 times the derivative of the activation;  dw2 += dy' h;  db2 += sum_r dy[r]
             dx = da w1;  dw1 += da' x;  db1 += sum_r da[r]
    Saves    x and h (..., F);  without ReLU also a (..., F)
    Errors   TypeError and ValueError naming the argument or the parameter
    Source   Vaswani et al. 2017, arXiv:1706.03762, section 3.3
    Notes    the products apply ReLU and its derivative to their sums while they are in registers, and large products of
             bfloat16 on a GPU do so with the others; otherwise these take another pass over h, and one over dh
    """

    class Ctx(NamedTuple):
        x: Array
        h: Array
        a: Array | None        # None for ReLU, whose derivative follows from h

    def __init__(self, w1: Parameter, b1: Parameter, w2: Parameter, b2: Parameter, name: str | None = None,
                 activation: str = 'relu') -> None:
        self.w1, self.b1, self.w2, self.b2, self.name = w1, b1, w2, b2, name or w1.owner
        if activation not in ACTIVATIONS:
            raise ValueError(f'activation {activation!r}: expected one of {", ".join(ACTIVATIONS)}')
        self.activation = activation
        if activation != 'relu':
            self.backward_on_tensors = None     # type: ignore[assignment,method-assign]  # the formula is for ReLU
        F, D = axes(w1.name, w1.value, 'F D')
        for parameter, shape in ((w1, (F, D)), (b1, (F,)), (w2, (D, F)), (b2, (D,))):
            check_parameter(parameter, shape)

    def forward(self, x: Array, into: Callable[..., Any] | None = None) -> tuple[Any, Ctx]:
        """Return y and ctx.   into: of the second layer, as in Linear"""
        F, D = self.w1.value.shape
        check('x', x, (*np.shape(x)[:-1], D), REAL)
        h, y = empty((*x.shape[:-1], F), x.dtype, f'{self.name}.h'), None
        if into is None:
            y = empty(x.shape, x.dtype, f'{self.name}.y')
        a, weight = self._inner(h), self.w1.operand(x.dtype)
        if a is h:
            gemm(as_rows(h), as_rows(x), weight.T, self.b1.value, relu=True)
        else:
            launch('linear_activation', h, a, x, weight, self.b1.value, *as_rows(h).shape, D, SMOOTH.index(self.activation))
        note_product(self, FWD if a is h else ACTIVATION_FWD, 'w1', weight=self.w1, bias=self.b1, rows=x.shape[:-1])
        weight = self.w2.operand(x.dtype)
        if into is None:
            gemm(as_rows(y), as_rows(h), weight.T, self.b2.value)
        else:
            y = into(h, weight, self.b2.value)
        note_product(self, FWD if into is None else BRANCH_FWD, 'w2', weight=self.w2, bias=self.b2, rows=x.shape[:-1])
        return y, self.Ctx(x, h, None if a is h else a)

    def _inner(self, h: Array) -> Array:
        """Return the array for the result of the first layer: h for ReLU, which the product applies."""
        return h if self.activation == 'relu' else empty(h.shape, h.dtype, f'{self.name}.a')

    def backward(self, dy: Array, ctx: Ctx, into: Array | None = None) -> Array:
        """Return dx.  into: add dx to this array, which may be dy, and return it."""
        check('dy', dy, ctx.x.shape, ctx.x.dtype)
        if into is not None:
            check('into', into, ctx.x.shape, ctx.x.dtype)
        x, h, dy = as_rows(ctx.x), as_rows(ctx.h), as_rows(dy)
        (R, F), D = h.shape, x.shape[1]
        dh, weight = empty_gradient((R, F), f'{self.name}.dh', dy.dtype), self.w2.operand(dy.dtype)
        if ctx.a is None:
            launch('linear_backward', dh, self.w2.grad, self.b2.grad, dy, h, weight, R, D, F, True, False)
        else:
            launch('linear_activation_backward', dh, self.w2.grad, self.b2.grad, dy, h, ctx.a, weight, R, D, F,
                   SMOOTH.index(self.activation))
        self._note('w2', self.w2)
        dx = empty_gradient(ctx.x.shape, f'{self.name}.dx', dy.dtype) if into is None else into   # dy is no longer needed
        launch('linear_backward', dx, self.w1.grad, self.b1.grad, dh, x, self.w1.operand(dy.dtype), R, F, D, False,
               into is not None)
        self._note('w1', self.w1)
        return dx

    def _note(self, layer: str, weight: Parameter) -> None:
        for product in (LAYER_WGRAD, LAYER_DGRAD):
            note_product(self, product, layer, weight=weight)

    def backward_on_tensors(self, dy: Tensor, ctx: Any, parameters: dict[str, Tensor]) -> TensorGradients:
        from pyops.ops.array import sum_to
        from pyops.ops.matmul import rows, swapped
        w1, b1, w2, b2 = (parameters[name] for name in ('w1', 'b1', 'w2', 'b2'))
        a = ctx.x @ swapped(w1) + b1
        h, dh = a * (a > 0), (dy @ w2) * (a > 0)
        return (dh @ w1,), {'w1': swapped(rows(dh)) @ rows(ctx.x), 'b1': sum_to(dh, b1.shape),
                            'w2': swapped(rows(dy)) @ rows(h), 'b2': sum_to(dy, b2.shape)}

    @staticmethod
    def rounded() -> type[FeedForward]:
        """Return the op class with rounded operands."""
        from pyops.ops.feed_forward_rounded import QuantizedFeedForward
        return QuantizedFeedForward

    @staticmethod
    def reference(x: np.ndarray, w1: np.ndarray, b1: np.ndarray, w2: np.ndarray, b2: np.ndarray,
                  activation: str = 'relu') -> np.ndarray:
        formulas = {'relu': ReLU.reference, 'silu': SiLU.reference, 'gelu': GELU.reference, 'gelu_tanh': GELUTanh.reference}
        return formulas[activation](x @ w1.T + b1) @ w2.T + b2

    @staticmethod
    def example(normal: Normal) -> Example:
        return [normal(3, 4)], dict(w1=normal(6, 4), b1=normal(6), w2=normal(4, 6), b2=normal(4))
