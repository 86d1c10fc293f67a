"""Linear: the matrix product with a bias."""
from __future__ import annotations

from collections.abc import Callable, Sequence
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
from pyops.backend.kernels import FWD, Kernel, Made, Product, declare

if TYPE_CHECKING:
    from pyops.autograd import Tensor
    from pyops.params import Parameter
    from pyops.typing import Array, Example, Normal, Sizes, TensorGradients

# of linear_backward and linear_activation_backward
LAYER_WGRAD = Product('wgrad', {'g': 'dy', 'x': 'x'})
LAYER_DGRAD = Product('dgrad', {'g': 'dy', 'w': 'weight', 'dx': 'dx'})
# of linear_activation
ACTIVATION_FWD = Product('fwd', {'x': 'x', 'w': 'weight', 'y': 'a'})


def _branch(s: Sizes, array: Callable[[str], Array]) -> Array:
    """Return the product of linear_residual and linear_residual_norm, which they do not store."""
    y = empty((s['R'], s['O']), array('x').dtype)
    gemm(y, as_rows(array('x')), array('weight').T, array('bias'))
    return y


BRANCH_FWD = Product('fwd', {'x': 'x', 'w': 'weight', 'y': Made(lambda s: (s['R'], s['O']), _branch)})
# of linear_pair and linear_pair_backward, for each layer of the pair
PAIR_FWD = [Product('fwd', {'x': f'x{i}', 'w': f'weight{i}', 'y': f'y{i}'}) for i in (1, 2)]
PAIR_WGRAD, PAIR_DGRAD = ([product.replaced(roles={role: f'{name}{i}' for role, name in product.roles.items()}) for i in (1, 2)]
                          for product in (LAYER_WGRAD, LAYER_DGRAD))
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

    same_launches = True            # see pyops/backend/recorded_ops.py
    has_copies = False              # whether layers with one input share copies of it: see forward_each

    class Ctx(NamedTuple):
        x: Array

    def __init__(self, weight: Parameter, bias: Parameter | None = None, name: str | None = None, steps: bool = False) -> None:
        self.weight, self.bias, self.name, self.steps = weight, bias, name or weight.owner, steps
        O, _ = axes(weight.name, weight.value, 'O I')
        check_parameter(weight, weight.value.shape)
        if bias:
            check_parameter(bias, (O,))

    def forward(self, x: Array, out: Array | None = None, into: Callable[..., Any] | None = None) -> tuple[Any, Ctx]:
        """Return y, which is `out` if it is given, and the ctx.

        into: a function of x, weight and bias.  It launches a kernel that computes the product and what follows it; its
        result is returned as y.
        """
        O, I = self.weight.value.shape
        check('x', x, (*np.shape(x)[:-1], I), REAL)
        if into is not None:
            result = into(x, self.weight.operand(x.dtype), self.bias and self.bias.value)
            self._note(BRANCH_FWD, bias=self.bias, rows=x.shape[:-1], steps=self.steps)
            return result, self.Ctx(x)
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


def forward_each(layers: Sequence[Linear], x: Array, outs: Sequence[Array | None] | None = None,
                 copies: dict[Any, Any] | None = None) -> list[tuple[Any, Any]]:
    """Return y and the ctx of each layer for the same x (..., I), which is encoded once for all that multiply it in FP8.

    outs: the `out` of each layer;  copies: of x, shared with other layers; see fp8.Copies
    """
    copies = {} if copies is None else copies
    results = []
    for layer, out in zip(layers, outs or [None] * len(layers), strict=True):
        named: dict[str, Any] = {} if out is None else {'out': out}
        results.append(layer.forward(x, **named | ({'copies': copies} if layer.has_copies else {})))
    return results


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


class LinearPair:
    """Two Linear layers that do not depend on each other as one kernel: on a GPU, one launch instead of two.

    Shapes   as in Linear, for the x1, y1, dy1, dx1 of the first layer, then of the second
    Notes    the results have the bits of separate layers, and a plan finds the products of each layer under its name
    Errors   as in Linear; ValueError if a gradient is added to an array that overlaps an input of the kernel
    """

    class Ctx(NamedTuple):
        x1: Array
        x2: Array

    def __init__(self, first: Linear, second: Linear) -> None:
        self.layers = first, second

    def forward(self, x1: Array, x2: Array) -> tuple[tuple[Array, Array], Ctx]:
        """Return y1 and y2, and the ctx."""
        (first, second), xs = self.layers, (x1, x2)
        for i, (layer, x) in enumerate(zip(self.layers, xs, strict=True), 1):
            check(f'x{i}', x, (*np.shape(x)[:-1], layer.weight.value.shape[1]), REAL)
        y1, y2 = (empty((*x.shape[:-1], len(layer.weight.value)), x.dtype, f'{layer.name}.y')
                  for layer, x in zip(self.layers, xs, strict=True))
        launch('linear_pair', y1, y2, x1, x2, first.weight.operand(x1.dtype), second.weight.operand(x2.dtype),
               first.bias and first.bias.value, second.bias and second.bias.value, *self._sizes(xs))
        for layer, x, product in zip(self.layers, xs, PAIR_FWD, strict=True):
            layer._note(product, bias=layer.bias, rows=x.shape[:-1], steps=layer.steps)
        return (y1, y2), self.Ctx(x1, x2)

    def backward(self, dy1: Array, dy2: Array, ctx: Ctx,
                 into: tuple[Array | None, Array | None] = (None, None)) -> tuple[Array, Array]:
        """Return dx1 and dx2.  into: for each, the array that it is added to, or None."""
        (first, second), dys = self.layers, (dy1, dy2)
        for i, (layer, dy, x, array) in enumerate(zip(self.layers, dys, ctx, into, strict=True)):
            check(f'dy{i + 1}', dy, (*x.shape[:-1], len(layer.weight.value)), x.dtype)
            if array is not None:
                check(f'into[{i}]', array, x.shape, x.dtype)
                if any(may_overlap(array, other) for other in (*dys, *ctx)):
                    raise ValueError(f'into[{i}]: it overlaps dy or x, which the same kernel reads; give another array')
        dx1, dx2 = (empty_gradient(x.shape, f'{layer.name}.dx', x.dtype) if array is None else array
                    for layer, x, array in zip(self.layers, ctx, into, strict=True))
        launch('linear_pair_backward', dx1, dx2, first.weight.grad, second.weight.grad, first.bias and first.bias.grad,
               second.bias and second.bias.grad, dy1, dy2, *ctx, first.weight.operand(dy1.dtype),
               second.weight.operand(dy2.dtype), *self._sizes(ctx), into[0] is not None, into[1] is not None)
        for layer, *products in zip(self.layers, PAIR_WGRAD, PAIR_DGRAD, strict=True):
            for product in products:
                layer._note(product)
        return dx1, dx2

    def _sizes(self, xs: tuple[Array, Array]) -> list[int]:
        """Return R1, R2, O1, O2, I1, I2."""
        sizes = [(len(as_rows(x)), *layer.weight.value.shape) for layer, x in zip(self.layers, xs, strict=True)]
        return [size for both in zip(*sizes, strict=True) for size in both]


def _flops_of_pair(s: Sizes) -> int:
    return 2 * (s['R1'] * s['O1'] * s['I1'] + s['R2'] * s['O2'] * s['I2'])


declare(linear_backward=Kernel(lambda s, array: (2 if array('dx') is None else 4) * s['R'] * s['O'] * s['I']),
        linear_activation=Kernel(lambda s, array: 2 * s['R'] * s['O'] * s['I']),
        linear_activation_backward=Kernel(lambda s, array: 4 * s['R'] * s['O'] * s['I']),
        linear_residual=Kernel(lambda s, array: 2 * s['R'] * s['O'] * s['I']),
        linear_residual_norm=Kernel(lambda s, array: 2 * s['R'] * s['O'] * s['I']),
        linear_pair=Kernel(lambda s, array: _flops_of_pair(s)),
        linear_pair_backward=Kernel(lambda s, array: 2 * _flops_of_pair(s)))
