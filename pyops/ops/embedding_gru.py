"""EmbeddingGRU: embedding lookup and gated recurrent unit as one op."""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pyops.backend import (
    activations,
    as_rows,
    axes,
    check,
    check_parameter,
    empty,
    empty_gradient,
    get,
    launch,
    note_product,
    product,
    put,
    work,
)
from pyops.backend.kernels import Kernel, Made, Product, declare
from pyops.ops.gru import GRU, STATE_DGRAD, STATE_FWD, rows_shape
from pyops.ops.join import ConcatContext

if TYPE_CHECKING:
    from pyops.ops.packed import Packed
    from pyops.params import Parameter
    from pyops.typing import Argument, Array, Example, Normal, Shape, Sizes


class EmbeddingGRU(GRU):
    """Look up a row for each token, concatenate a context to it, and run a GRU over all T steps.

    Shapes   ids (T, B) int32 in [0, V);  context, dcontext (B, C);  h, dh (T, B, H);  h0, dh0, dh_last (B, H);  lengths (B,)
             table (V, E);  w_ih (3H, E + C), or (3H, E) without a context;  w_hh, b_ih, b_hh as in GRU
    Forward  x[t, b] = [table[ids[t, b]], context[b]], then as in GRU
    Backward da = [dr dz dn] as in GRU, and with w_ih = [w_e w_c]:
             u[v] = sum of da over the positions of token v;  s[b] = sum_t da[t, b]
             dtable[v] += u[v] w_e;  dcontext = s w_c;  dw_ih += [sum_v u[v]' table[v], sum_b s[b]' context[b]]
             ids have no gradient
    Packed   with rows, ids are (N,), and h, dh (N, H), as in GRU
    Saves    ids, context, h0, lengths, h, gates;  x is never stored
    Errors   TypeError and ValueError naming the argument; ValueError for an id outside the table and a length outside [0, T]
    Source   Embedding, ConcatContext and GRU in sequence
    Notes    x w_ih' is table[v] w_e' for each distinct token plus context[b] w_c' for each sequence: two small products.
             On a GPU, h has the type that GPU.storage selects; context, states and their gradients are float32
    """

    class Ctx(NamedTuple):
        ids: Array
        context: Array | None
        h0: Array | None
        lengths: Array | None
        h: Array
        gates: Array
        last: Array | None
        rows: Packed | None
        reverse: bool

    def __init__(self, table: Parameter, w_ih: Parameter, w_hh: Parameter, b_ih: Parameter, b_hh: Parameter,
                 reset_before: bool = False, name: str | None = None) -> None:
        super().__init__(w_ih, w_hh, b_ih, b_hh, reset_before, name)
        self.table = table
        (_, E), (_, I) = axes(table.name, table.value, 'V E'), w_ih.value.shape
        check_parameter(table, table.value.shape, sparse=True)
        if E > I:
            raise ValueError(f'{w_ih.name}: expected shape (3H, E + C) with E = {E} as in {table.name}, got {w_ih.value.shape}')

    def sizes(self, ids: Array, rows: Packed | None) -> tuple[int, ...]:
        """Return T, B, N, V, E, C and 3H: the size arguments of the embedding_linear kernels."""
        (V, E), (gates, I) = self.table.value.shape, self.w_ih.value.shape
        lead = (*ids.shape, 0) if rows is None else (rows.longest, rows.sentences, *ids.shape)
        return (*lead, V, E, I - E, gates)

    def forward(self, ids: Array, context: Array | None = None, h0: Array | None = None, lengths: Array | None = None,
                rows: Packed | None = None, reverse: bool = False) -> tuple[Array, Ctx]:
        self.check(ids, context, h0, lengths, rows, reverse)
        T, B, N, *_ = sizes = self.sizes(ids, rows)
        a = empty((*ids.shape, sizes[-1]), activations(), f'{self.name}.a')
        launch('embedding_linear_forward', a, self.table.value, ids, context, None if rows is None else rows.offsets,
               self.w_ih.operand(a.dtype), self.b_ih.value, work('embedding_linear_forward', *sizes), *sizes)
        note_product(self, INPUT_FWD, 'ih', weight=self.w_ih, bias=self.b_ih, steps=True)
        h, gates, last = self.launch_forward(None, a, h0, lengths, rows, reverse, (T, B, N, 0))
        note_product(self, STATE_FWD, 'hh', weight=self.w_hh, bias=self.b_hh, steps=True)
        return h, self.Ctx(ids, context, h0, lengths, h, gates, last, rows, reverse)

    def check(self, ids: Array, context: Array | None, h0: Array | None, lengths: Array | None, rows: Packed | None,
              reverse: bool) -> None:
        _, B, _ = self.check_rows('ids', ids, '', lengths, rows, reverse)
        check('ids', ids, ids.shape, np.int32)
        *_, C, _ = self.sizes(ids, rows)
        if context is not None:
            check('context', context, (B, C))
        elif C:
            raise ValueError(f'context: expected shape {(B, C)}, got None')
        self.check_h0(h0, B)

    def backward(self, dh: Array, ctx: Ctx, dh_last: Array | None = None,
                 into: Array | None = None) -> tuple[None, Array | None, Array | None]:
        """Return None (ids have no gradient), dcontext (None if forward had no context) and dh0 (None if it had no h0).

        into: add dcontext to this array, and return it.
        """
        if ctx.context is None:
            dcontext = None
        elif into is None:
            dcontext = empty_gradient(ctx.context.shape, f'{self.name}.dcontext')
        else:
            check('into', into, ctx.context.shape)
            dcontext = into
        dh0, dgates = self.launch_backward(None, dh, dh_last, ctx)
        note_product(self, STATE_DGRAD, 'hh', weight=self.w_hh)
        sizes = self.sizes(ctx.ids, ctx.rows)
        launch('embedding_linear_backward', self.table.grad, self.table.touched, dcontext, self.w_ih.grad, self.b_ih.grad,
               dgates, self.table.value, ctx.ids, ctx.context, None if ctx.rows is None else ctx.rows.offsets,
               self.w_ih.operand(dgates.dtype), work('embedding_linear_backward', *sizes), *sizes, dgates.shape[-1],
               into is not None)
        note_product(self, INPUT_DGRAD, 'ih', weight=self.w_ih)
        return None, dcontext, dh0

    @staticmethod
    def rounded() -> type[EmbeddingGRU]:
        """Return the op class with rounded operands."""
        from pyops.ops.embedding_gru_rounded import QuantizedEmbeddingGRU
        return QuantizedEmbeddingGRU

    @staticmethod
    def reference(ids: np.ndarray, context: np.ndarray | None = None, h0: np.ndarray | None = None,
                  lengths: np.ndarray | None = None, rows: Packed | None = None, reverse: bool = False, *, table: np.ndarray,
                  w_ih: np.ndarray, w_hh: np.ndarray, b_ih: np.ndarray, b_hh: np.ndarray,
                  reset_before: bool = False) -> np.ndarray:
        if context is None:
            x = table[ids]
        elif rows is None:
            x = ConcatContext.reference(table[ids], context)
        else:
            x = np.concatenate([table[ids], np.repeat(context, np.diff(get(rows.offsets)), 0)], -1)
        return GRU.reference(x, h0, lengths, rows, reverse, w_ih=w_ih, w_hh=w_hh, b_ih=b_ih, b_hh=b_hh,
                             reset_before=reset_before)

    @staticmethod
    def example(normal: Normal) -> Example:
        B, V, E, C, H = 2, 4, 3, 2, 5
        ids = np.array([[1, 0], [3, 1], [1, 1]], np.int32)
        return ([ids, normal(B, C), normal(B, H), np.array([2, 3], np.int32)],
                dict(table=normal(V, E), w_ih=normal(3 * H, E + C), w_hh=normal(3 * H, H), b_ih=normal(3 * H),
                     b_hh=normal(3 * H)))


# ---- the linear layer on tokens and contexts, recomputed for all positions --------------------------------------------------

def inputs(s: Sizes, array: Argument) -> Array:
    """Return [table[ids[t, b]], context[b]] for all positions, (T, B, E + C), or (N, E + C) of packed rows."""
    T, B, E, C = (s[name] for name in 'TBEC')
    x = empty((*rows_shape(s), E))
    launch('embedding_forward', x, array('table'), array('ids'), math.prod(rows_shape(s)), s['V'], E)
    if not C:
        return x
    if array('offsets') is not None:
        context = np.repeat(get(array('context')), np.diff(get(array('offsets'))), 0)
        return put(np.concatenate([get(x), context], -1))
    both = empty((T, B, E + C))
    launch('concat_context_forward', both, x, array('context'), T, B, E, C)
    return both


def outputs(s: Sizes, array: Argument) -> Array:
    return product(as_rows(inputs(s, array)), array('weight').T, array('bias')).reshape(_output_shape(s))


def output_gradients(s: Sizes, array: Argument) -> Array:
    """Return the first O elements of each row of dy, (T, B, O); dy has row stride ld."""
    return np.ascontiguousarray(get(array('dy')).reshape(*rows_shape(s), s['ld'])[..., :s['O']])


def input_gradients(s: Sizes, array: Argument) -> Array:
    return product(as_rows(put(output_gradients(s, array))), array('weight')).reshape(_input_shape(s))


def _input_shape(s: Sizes) -> Shape:
    return *rows_shape(s), s['E'] + s['C']


def _output_shape(s: Sizes) -> Shape:
    return *rows_shape(s), s['O']


INPUT_FWD = Product('fwd', {'x': Made(_input_shape, inputs), 'y': Made(_output_shape, outputs)})
INPUT_DGRAD = Product('dgrad', {'g': Made(_output_shape, output_gradients), 'dx': Made(_input_shape, input_gradients)})


def _inputs(s: Sizes, array: Argument) -> Array:
    """Return the number of elements in the distinct rows that embedding_linear multiplies: token rows and context rows."""
    return len(np.unique(get(array('ids')))) * s['E'] + s['B'] * s['C']


declare(embedding_linear_forward=Kernel(
            flops=lambda s, array: 2 * s['O'] * _inputs(s, array),
            bytes=lambda s: 4 * (math.prod(rows_shape(s)) * (1 + s['E'] + s['O']) + s['B'] * s['C']
                                 + (s['E'] + s['C'] + 1) * s['O'])),
        embedding_linear_backward=Kernel(
            flops=lambda s, array: 4 * s['O'] * _inputs(s, array),
            bytes=lambda s: 4 * (math.prod(rows_shape(s)) * (1 + 3 * s['E'] + s['O']) + 2 * s['B'] * s['C']
                                 + (3 * (s['E'] + s['C']) + 2) * s['O'])))
