"""Products of linear layers on tensor cores in FP8: the numbers of fake quantization as codes and scales.

A recipe names the formats, as for fake quantization (rounding.py): fp8 or fp8:elem=e5m2 with one scale for the tensor
(block=tensor), for blocks of 128 along the axis of the sum (the default) or of 128x128.  Both operands of a product have such a
format, or none; then the product has the precision of the device.  Codes and scales decode to the numbers that fake
quantization gives, so only the sums differ: gemm_fp8 adds the products of 128 terms to a sum in float32 (csrc/pyops.h).

A tensor in two products is read once and written twice, as it is and transposed, because tensor cores need both operands with
the axis of the sum contiguous.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops.backend import REAL, as_rows, byte_strides, element_strides, empty, gemm, launch, note_product
from pyops.backend.kernels import DGRAD, FWD, WGRAD, Kernel, Product, declare, product_of_shape
from pyops.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyops.formats import Format
    from pyops.params import Parameter
    from pyops.typing import Array, Shape, Sizes

BLOCK = 128                                     # PYOPS_FP8_BLOCK
_ALIGN = 16                                     # bytes: rows of codes begin at multiples of it
_LEAST = 0                                      # the distance of rows: the least, whatever the number of rows of a plan's step
_BLOCKS = {'tensor': 0, BLOCK: 1, '128x128': 2}     # block of a format -> pyops_fp8_scales

# Of gemm_fp8: saving finds the arrays that were encoded, and those are no transposes.
FP8_FWD = Product('fwd', {'x': 'a', 'w': 'b', 'y': 'c'})
FP8_DGRAD = Product('dgrad', {'g': 'a', 'w': 'b', 'dx': 'c'})
FP8_WGRAD = Product('wgrad', {'g': 'a', 'x': 'b'})


class Matrix(NamedTuple):
    """A matrix in FP8 whose products sum over its last axis.

    codes (R, ld) uint8 of (R, C), ld a multiple of 16;  scales float32;  format, blocks: numbers in csrc/pyops.h
    """
    codes: Array
    scales: Array
    shape: tuple[int, int]
    format: int
    blocks: int

    @classmethod
    def empty(cls, shape: Shape, fmt: Format, name: str, kind: str) -> Matrix:
        """Return a Matrix without contents.  name, kind: as for backend.empty"""
        (R, C), blocks = shape, _BLOCKS[fmt.option('block')]
        of_rows, of_columns = -(-R // BLOCK), -(-C // BLOCK)
        return cls(empty((R, -(-C // _ALIGN) * _ALIGN), np.uint8, name, kind),
                   empty([(1,), (of_columns, R), (of_columns, of_rows)][blocks], np.float32, f'{name}.scales', kind), (R, C),
                   fmt.scaled_scalars()[0], blocks)


def encode(x: Array, fmt: Format, name: str, kind: str = 'intermediate') -> Matrix:
    """Return x (R, C), C-contiguous float32 or bfloat16, in FP8.

    fmt: one that check_format accepts;  name, kind: of the new arrays in a plan
    """
    made = Matrix.empty(x.shape, fmt, name, kind)
    _launch(x, fmt, made, None)
    return made


def encode_transposed(x: Array, fmt: Format, name: str, kind: str = 'intermediate') -> Matrix:
    """Return the transpose (C, R) of x in FP8.   Arguments as for encode"""
    made = Matrix.empty(x.shape[::-1], fmt, name, kind)
    _launch(x, fmt, None, made)
    return made


def encode_both(x: Array, fmt: Format, name: str, transposed: str, kind: str = 'intermediate') -> tuple[Matrix, Matrix]:
    """Return x and its transpose in FP8, from one read of x.   transposed: the name of the transpose;  else as for encode"""
    both = Matrix.empty(x.shape, fmt, name, kind), Matrix.empty(x.shape[::-1], fmt, transposed, kind)
    _launch(x, fmt, *both)
    return both


def _launch(x: Array, fmt: Format, plain: Matrix | None, transposed: Matrix | None) -> None:
    R, C = x.shape
    (codes, scales), (other, its_scales) = ((m.codes, m.scales) if m else (None, None) for m in (plain, transposed))
    launch('fp8_encode', codes, other, scales, its_scales, x, R, C, C, _LEAST, _LEAST, fmt.scaled_scalars()[0],
           _BLOCKS[fmt.option('block')])


def gemm_fp8(c: Array, a: Matrix, b: Matrix, bias: Array | None = None, accumulate: bool = False, relu: bool = False) -> None:
    """Compute c (+)= a b' + bias;  c (M, N) float32 or bfloat16, a (M, K), b (N, K), bias (N,) or None.   relu: as in gemm

    ValueError if the shapes do not fit.
    """
    (M, K), N = a.shape, b.shape[0]
    if c.shape != (M, N) or b.shape[1] != K:
        raise ValueError(f'gemm_fp8: c {c.shape}, a {a.shape} and b {b.shape} do not fit')
    row, column = element_strides(c)
    if M and N > 1 and column != 1:
        raise ValueError(f'gemm_fp8: c: expected contiguous rows, got strides {byte_strides(c)}')
    launch('gemm_fp8', c, a.codes, b.codes, a.scales, b.scales, bias, M, N, K, max(row, N), _LEAST, _LEAST, a.format,
           b.format, a.blocks, b.blocks, accumulate, relu)


def product_again(sizes: Sizes, array: Callable[[str], Any]) -> Array:
    """Return the product (M, N) of a recorded gemm_fp8 alone, float32.   sizes, array: its scalars and arrays, by name"""
    c = empty((sizes['M'], sizes['N']), np.float32)
    scalars = dict(sizes, ldc=sizes['N'], accumulate=False)
    names = 'M N K ldc lda ldb a_format b_format a_blocks b_blocks accumulate relu'.split()
    launch('gemm_fp8', c, *map(array, ('a', 'b', 'a_scales', 'b_scales', 'bias')), *(scalars[name] for name in names))
    return c


def rounding_of(sizes: Sizes, shape: Shape, transposed: bool) -> tuple[Format, Any]:
    """Return the Format of a recorded fp8_encode, and its axis in an array of this shape.

    sizes: its scalars;  transposed: whether the transpose is used
    """
    from pyops import formats  # not at the top: it is used by tools only
    fmt = formats.parse('fp8', elem=formats.ELEMENTS[sizes['format'] - 1],
                        block=next(block for block, number in _BLOCKS.items() if number == sizes['blocks']))
    return formats.of_grid(fmt.grid((sizes['R'], sizes['C']), int(not transposed)), shape, *fmt.scaled_scalars())


def check_format(operand: str, fmt: Format) -> None:
    """UserError if tensor cores cannot multiply with this format of an operand."""
    options = set(fmt.options) - {'elem', 'block'}
    if fmt.name != 'fp8' or options or fmt.option('block') not in _BLOCKS:
        raise UserError(f'{operand}={fmt}: tensor cores multiply fp8 or fp8:elem=e5m2, in blocks of 128 or with '
                        'block=128x128 or block=tensor; give one of these, or emulate it with --precision bf16, in Python '
                        'without fp8=True')


def check_products(formats: dict[str, Format]) -> None:
    """UserError if tensor cores cannot compute the products of a linear layer with these formats, {operand: Format}."""
    for operand, fmt in formats.items():
        check_format(operand, fmt)
    for product in ('fwd', 'dgrad', 'wgrad'):
        found = [operand for operand in formats if operand.startswith(f'{product}.')]
        if len(found) == 1:
            raise UserError(f'{found[0]}={formats[found[0]]}: a product in FP8 needs a format for both operands; '
                            f'give {product}={formats[found[0]]}')


# of one x, for layers that all multiply it: {formats of fwd.x and wgrad.x: x in FP8, its transpose in FP8}
Copies = dict[tuple['Format | None', 'Format | None'], tuple[Matrix | None, Matrix | None]]


class Kept(NamedTuple):
    """Arrays that a linear layer saves for backward."""
    x: Array | Matrix               # x, or its transpose in FP8 for wgrad
    w: Matrix | None                # the transpose of the weight for dgrad, if forward has made it


class Fp8Products:
    """The three products of a linear layer, as rounding.LinearProducts has them: weight (O, I), bias (O,) or None.

    recipe.weights is None, or the weights in FP8 by layer, which forward passes share (quantization.Family.same_weights)
    """
    dtypes = REAL                   # of activations and their gradients
    has_copies = True               # whether forward() has the argument copies

    def __init__(self, recipe: Any, name: str, weight: Parameter, bias: Parameter | None = None) -> None:
        self.recipe, self.name, self.weight, self.bias = recipe, name, weight, bias
        self.formats: dict[str, Format] = recipe.of(name, 'linear')
        check_products(self.formats)

    def forward(self, y: Array, x: Array, relu: bool = False, copies: Copies | None = None) -> Kept:
        """Compute y (..., O) from x (..., I) and return Kept.

        copies: of x, which is encoded only if they lack it in the formats of this layer;  None: there are none
        """
        rows, bias = as_rows(x), self.bias and self.bias.value
        copies, formats = {} if copies is None else copies, (self.formats.get('fwd.x'), self.formats.get('wgrad.x'))
        if formats not in copies:
            copies[formats] = self._encoded(rows, 'fwd.x', 'wgrad.x')
        qx, tx = copies[formats]
        weights = {} if self.recipe.weights is None else self.recipe.weights
        if self.name not in weights:
            weights[self.name] = self._encoded(self.weight.value, 'fwd.w', 'dgrad.w')
        qw, tw = weights[self.name]
        if qx and qw:
            gemm_fp8(as_rows(y), qx, qw, bias, relu=relu)
        else:
            gemm(as_rows(y), rows, self.weight.operand(x.dtype).T, bias, relu=relu)
        note_product(self, FP8_FWD if qx and qw else FWD, weight=self.weight, bias=self.bias, rows=x.shape[:-1])
        return Kept(tx or rows, tw)

    def backward(self, g: Array, kept: Kept, dx: Array | None = None, accumulate: bool = False) -> None:
        """Add the weight gradient for g = dy (..., O) to weight.grad.  If dx (..., I) is given, write the input gradient to it,
        or add with accumulate=True."""
        g, w = as_rows(g), self.weight
        qg, tg = self._encoded(g, 'dgrad.g' if dx is not None else '', 'wgrad.g', 'gradient')
        if 'wgrad.g' in self.formats:
            gemm_fp8(w.grad, tg or self._transposed(g, 'wgrad.g', 'gradient'),
                     kept.x if isinstance(kept.x, Matrix) else self._transposed(kept.x, 'wgrad.x'), accumulate=True)
        else:
            gemm(w.grad, g.T, kept.x, accumulate=True)
        note_product(self, FP8_WGRAD if 'wgrad.g' in self.formats else WGRAD, weight=w)
        if dx is None:
            return
        if qg:
            gemm_fp8(as_rows(dx), qg, kept.w or self._transposed(w.value, 'dgrad.w'), accumulate=accumulate)
        else:
            gemm(as_rows(dx), g, w.operand(g.dtype), accumulate=accumulate)
        note_product(self, FP8_DGRAD if qg else DGRAD, weight=w)

    def _encoded(self, x: Array, plain: str, transposed: str,
                 kind: str = 'intermediate') -> tuple[Matrix | None, Matrix | None]:
        """Return x in FP8 for the operand `plain`, and its transpose for `transposed` if that has the same format; None for an
        operand without a format."""
        fmt, name = self.formats.get(plain), f'{self.name}.{plain}'
        if fmt is None:
            return None, None
        if fmt != self.formats.get(transposed):
            return encode(x, fmt, name, kind), None
        return encode_both(x, fmt, name, f'{self.name}.{transposed}', kind)

    def _transposed(self, x: Array, operand: str, kind: str = 'intermediate') -> Matrix:
        return encode_transposed(x, self.formats[operand], f'{self.name}.{operand}', kind)


declare(fp8_encode=Kernel(rounds='x'), gemm_fp8=Kernel(product_of_shape))
