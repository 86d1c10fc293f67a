"""Linear: the matrix product with a bias."""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops.backend import (
    REAL,
    as_rows,
    axes,
    check,
    check_parameter,
    empty,
    empty_gradient,
    gemm,
    launch,
    may_overlap,
    note_product,
)
from pyops.backend.kernels import FWD, Kernel, Product, declare

if TYPE_CHECKING:
    from pyops.autograd import Tensor
    from pyops.params import Parameter
    from pyops.typing import Array, Example, Normal, TensorGradients

# of linear_backward
LAYER_WGRAD = Product('wgrad', {'g': 'dy', 'x': 'x'})
LAYER_DGRAD = Product('dgrad', {'g': 'dy', 'w': 'weight', 'dx': 'dx'})
# product.operand of a linear layer, in the order of a training step: the operand names in a recipe (pyops/quantization.py)
OPERANDS = 'fwd.x', 'fwd.w', 'dgrad.g', 'dgrad.w', 'wgrad.g', 'wgrad.x'


class Linear:
    """Multiply each row by the transposed weight matrix and add a bias.

    Shapes   x, dx (..., I);  y, dy (..., O);  weight (O, I);  bias (O,) or None
    Forward  y = x weight' + bias
    Backward dx = dy weight;  dweight += dy' x;  dbias += sum_r dy[r]
    Saves    x
    Errors   TypeError for a wrong dtype or strides, ValueError for a wrong shape, each naming the argument
    Source   the chain rule; docs/linear.md derives it
    Notes    steps=True: x is one step of a sequence, or all steps, in a recurrent layer.  A plan then saves the tensors step by
             step; results do not change
    """

    class Ctx(NamedTuple):
        x: Array

    def __init__(self, weight: Parameter, bias: Parameter | None = None, name: str | None = None, steps: bool = False) -> None:
        self.weight, self.bias, self.name, self.steps = weight, bias, name or weight.owner, steps
        O, _ = axes(weight.name, weight.value, 'O I')
        check_parameter(weight, weight.value.shape)
        if bias:
            check_parameter(bias, (O,))

    def forward(self, x: Array, out: Array | None = None) -> tuple[Array, Ctx]:
        """Return y, which is `out` if it is given, and the ctx."""
        O, I = self.weight.value.shape
        check('x', x, (*np.shape(x)[:-1], I), REAL)
        y = empty((*x.shape[:-1], O), x.dtype, f'{self.name}.y') if out is None else out
        if out is not None:
            check('y', y, (*x.shape[:-1], O), x.dtype)
        gemm(as_rows(y), as_rows(x), self.weight.operand(x.dtype).T, self.bias and self.bias.value)
        self._note(FWD, bias=self.bias, rows=x.shape[:-1], steps=self.steps)
        return y, self.Ctx(x)

    def backward(self, dy: Array, ctx: Ctx, want_dx: bool = True, into: Array | None = None) -> Array | None:
        """Return dx, or None with want_dx=False, as for the first layer, whose input needs no gradient.

        into: add dx to this array, which may be dy, and return it.
        """
        O, I = self.weight.value.shape
        check('dy', dy, (*ctx.x.shape[:-1], O), ctx.x.dtype)
        if into is not None:
            check('into', into, ctx.x.shape, ctx.x.dtype)
        separate = into is None or may_overlap(into, dy)        # a product must not overwrite its own operand
        dx = None if not want_dx else empty_gradient(ctx.x.shape, f'{self.name}.dx', dy.dtype) if separate else into
        launch('linear_backward', dx, self.weight.grad, self.bias and self.bias.grad, dy, ctx.x, self.weight.operand(dy.dtype),
               *as_rows(dy).shape, I, False, not separate)
        self._note(LAYER_WGRAD)
        if dx is None:
            return None
        self._note(LAYER_DGRAD)
        if separate and into is not None:
            launch('residual', into, into, dx, None, dx.size, 0.0, 0)
        return dx if into is None else into

    def _note(self, product: Product, **facts: Any) -> None:
        note_product(self, product, weight=self.weight, **facts)

    def backward_on_tensors(self, dy: Tensor, ctx: Any, parameters: dict[str, Tensor]) -> TensorGradients:
        from pyops.ops.array import sum_to
        from pyops.ops.matmul import rows, swapped
        weight = parameters['weight']
        gradients = {'weight': swapped(rows(dy)) @ rows(ctx.x)}
        if 'bias' in parameters:
            gradients['bias'] = sum_to(dy, parameters['bias'].shape)
        return (dy @ weight,), gradients

    @staticmethod
    def rounded() -> type[Linear]:
        """Return the op class with rounded operands."""
        from pyops.ops.linear_rounded import QuantizedLinear
        return QuantizedLinear

    @staticmethod
    def reference(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None, steps: bool = False) -> np.ndarray:
        y = x @ weight.T
        return y if bias is None else y + bias

    @staticmethod
    def example(normal: Normal) -> Example:
        return [normal(2, 3, 4)], dict(weight=normal(5, 4), bias=normal(5))


class JoinedLinear(Linear):
    """Several Linear layers with one input as one product.

    Shapes   x, dx (..., I);  y, dy (..., n O): the n results side by side;  weight (n O, I): their weights one below the other;
             bias (n O,): their biases, or None
    Notes    a plan finds the product of each layer under the name of that layer.  docs/attention.md has an example
    """

    def __init__(self, layers: Sequence[Linear], weight: Parameter, name: str, bias: Parameter | None = None) -> None:
        super().__init__(weight, bias, name)
        self.layers = layers
        if weight.value.shape != (len(layers) * len(layers[0].weight.value), layers[0].weight.value.shape[1]):
            raise ValueError(f'{name}: expected a weight of {len(layers)} times {layers[0].weight.value.shape}, '
                             f'got {weight.value.shape}')

    def split(self, y: Array) -> list[Array]:
        """Return the columns of each layer, views of y or of dy."""
        O = y.shape[-1] // len(self.layers)
        return [y[..., i * O:(i + 1) * O] for i in range(len(self.layers))]

    def _note(self, product: Product, **facts: Any) -> None:
        for i, layer in enumerate(self.layers):
            note_product(layer, product.part(i, len(self.layers)), weight=layer.weight,
                         **facts | ({'bias': layer.bias} if 'bias' in facts else {}))


declare(linear_backward=Kernel(lambda s, array: (2 if array('dx') is None else 4) * s['R'] * s['O'] * s['I']))
