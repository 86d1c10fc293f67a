"""Fake quantization: round the operands of the matrix products of an op to a number format, stored as float32.

op.rounded() returns the variant of an op with rounded operands, from <op>_rounded.py.  Its constructor has the additional
argument recipe; forward and backward have the same signatures.  An operand is rounded along the axis that its product sums
over, always from the original tensor, so a tensor in two products has two copies.  A format without blocks gives the same copy
for both products, so it is computed once.  Biases, softmax and gates remain float32, and sums, unless a format has the option
accumulate.  Backward treats rounding as the identity (straight-through estimator) and rounds the operands of its own products.

A rounded array is named <layer>.<product>.<operand>, such as encoder.0.self_attention.q.fwd.x.  docs/quantization.md lists the
products and axes.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops.backend import as_rows, gemm, gemm_batched, gemm_narrow, note_product
from pyops.backend.kernels import DGRAD, DGRAD_INPUTS_FIRST, FWD, FWD_INPUTS_FIRST, WGRAD, WGRAD_INPUTS_FIRST
from pyops.formats import fake_quantize
from pyops.params import key

if TYPE_CHECKING:
    from pyops.ops.fp8 import Fp8Products
    from pyops.params import Parameter
    from pyops.typing import Array

GRADIENTS = 'g', 'do', 'ds'         # the operands of the products that are gradients


class Rounding:
    """Rounding of the operands of the products of one layer.

    recipe.of(layer, kind) returns {'fwd.x': Format, ...};  recipe.step and recipe.seed seed the random numbers of
    round=stochastic;  recipe.history(name, is_gradient) returns the history of an operand with delayed scaling, as for
    fake_quantize
    """

    def __init__(self, recipe: Any, layer: str, kind: str) -> None:
        self.recipe, self.layer, self.formats = recipe, layer, recipe.of(layer, kind)

    def __call__(self, operand: str, x: Array, axis: int, time: int = 0) -> Array:
        """Return x rounded along axis, or x if the recipe does not round this operand.

        time: the index of the call, for a layer that runs several times in a pass.
        """
        fmt = self.formats.get(operand)
        if fmt is None:
            return x
        name = f'{self.layer}.{operand}'
        is_gradient = operand.rpartition('.')[2] in GRADIENTS
        seed = key(self.recipe.seed, f'{name}.{time}') if fmt.is_stochastic else 0
        history = self.recipe.history(name, is_gradient) if fmt.delayed else None
        return fake_quantize(x, fmt, axis, name=name, kind='gradient' if is_gradient else 'intermediate',
                             step=self.recipe.step, seed=seed, history=history)

    def multiply(self, product: str, c: Array, a: Array, b: Array, bias: Array | None = None, accumulate: bool = False,
                 relu: bool = False) -> None:
        """Compute c (+)= a b + bias, as backend.gemm or, with further axes, backend.gemm_batched, with sums in float32 or as
        the formats of the product's operands specify."""
        operands = [fmt for operand, fmt in self.formats.items() if operand.startswith(f'{product}.') and fmt.sums]
        if operands:
            gemm_narrow(c, a, b, bias, accumulate, relu, **operands[0].sums)
        elif c.ndim == 2:
            gemm(c, a, b, bias, accumulate, relu)
        else:
            gemm_batched(c, a, b, accumulate)

    def same(self, one: str, other: str) -> bool:
        """Return whether both operands, which are the same tensor, have the same rounded copy for all axes."""
        fmt = self.formats.get(one)
        return fmt == self.formats.get(other) and (fmt is None or not (fmt.depends_on_axis or fmt.is_stochastic))


class Kept(NamedTuple):
    """Arrays that a linear layer saves for backward."""
    x: Array               # the rounded copy if backward can use it, else x
    w: Array | None        # the rounded copy if backward can use it


class LinearProducts:
    """The three products of a linear layer with rounded operands.  weight (O, I), with inputs_first (I, O); bias (O,) or None.

    Forward  y = x w' + bias, summed over I;  dgrad dx = g w, over O;  wgrad dw += g' x, over the rows
    """
    dtypes = np.dtype(np.float32)           # of activations and their gradients
    has_copies = False                      # each layer rounds its input, under its own name and with its own random numbers

    def __init__(self, recipe: Any, name: str, weight: Parameter, bias: Parameter | None = None, inputs_first: bool = False,
                 steps: bool = False) -> None:
        self.name, self.weight, self.bias, self.inputs_first, self.steps = name, weight, bias, inputs_first, steps
        self.round = Rounding(recipe, name, 'linear')
        self.along_inputs, self.along_outputs = (0, 1) if inputs_first else (1, 0)
        self.products = (FWD_INPUTS_FIRST, DGRAD_INPUTS_FIRST, WGRAD_INPUTS_FIRST) if inputs_first else (FWD, DGRAD, WGRAD)

    def forward(self, y: Array, x: Array, relu: bool = False) -> Kept:
        """Compute y (..., O) from x (..., I) and return Kept."""
        rows, w = as_rows(x), self.weight.value
        qx, qw = self.round('fwd.x', rows, 1), self.round('fwd.w', w, self.along_inputs)
        self.round.multiply('fwd', as_rows(y), qx, qw if self.inputs_first else qw.T, self.bias and self.bias.value, relu=relu)
        note_product(self, self.products[0], weight=self.weight, bias=self.bias, rows=x.shape[:-1], steps=self.steps)
        return Kept(qx if self.round.same('fwd.x', 'wgrad.x') else rows, qw if self.round.same('fwd.w', 'dgrad.w') else None)

    def backward(self, g: Array, kept: Kept, dx: Array | None = None, accumulate: bool = False) -> None:
        """Add the weight gradient for g = dy (..., O) to weight.grad.  If dx (..., I) is given, write the input gradient to it,
        or add with accumulate=True."""
        g, w = as_rows(g), self.weight
        qx = kept.x if self.round.same('fwd.x', 'wgrad.x') else self.round('wgrad.x', kept.x, 0)
        qg = self.round('wgrad.g', g, 0)
        self.round.multiply('wgrad', w.grad, *((qx.T, qg) if self.inputs_first else (qg.T, qx)), accumulate=True)
        note_product(self, self.products[2], weight=w)
        if dx is None:
            return
        if not self.round.same('wgrad.g', 'dgrad.g'):
            qg = self.round('dgrad.g', g, 1)
        qw = self.round('dgrad.w', w.value, self.along_outputs) if kept.w is None else kept.w
        self.round.multiply('dgrad', as_rows(dx), qg, qw.T if self.inputs_first else qw, accumulate=accumulate)
        note_product(self, self.products[1], weight=w)


def products_of(recipe: Any, name: str, weight: Parameter, bias: Parameter | None) -> LinearProducts | Fp8Products:
    """Return the products of a linear layer: emulated, or by tensor cores in FP8 if the recipe says so."""
    if not recipe.fp8:
        return LinearProducts(recipe, name, weight, bias)
    from pyops.ops.fp8 import Fp8Products
    return Fp8Products(recipe, name, weight, bias)
