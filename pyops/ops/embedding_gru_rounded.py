"""EmbeddingGRU with rounded operands: Embedding, ConcatContext and the rounded GRU."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from pyops.backend import check, launch
from pyops.ops.embedding import Embedding
from pyops.ops.embedding_gru import EmbeddingGRU
from pyops.ops.gru_rounded import QuantizedGRU
from pyops.ops.join import ConcatContext
from pyops.ops.packed import pad_rows, unpad_rows

if TYPE_CHECKING:
    from pyops.ops.packed import Packed
    from pyops.typing import Array


class QuantizedEmbeddingGRU(EmbeddingGRU):
    """EmbeddingGRU with rounded operands: Embedding, ConcatContext and QuantizedGRU in sequence.

    Packed   rows are padded between Embedding and ConcatContext, see QuantizedGRU
    Saves    the same as these three ops
    """

    class Ctx(NamedTuple):
        embedding: Embedding.Ctx
        concat: ConcatContext.Ctx | None
        gru: QuantizedGRU.Ctx

        @property
        def last(self) -> Array | None:
            return self.gru.last

    def __init__(self, *arguments: Any, recipe: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.embedding, self.concat = Embedding(self.table), ConcatContext()
        self.gru = QuantizedGRU(self.w_ih, self.w_hh, self.b_ih, self.b_hh, self.reset_before, self.name, recipe=recipe)

    layers = QuantizedGRU.layers

    def forward(self, ids: Array, context: Array | None = None, h0: Array | None = None,
                lengths: Array | None = None, rows: Packed | None = None, reverse: bool = False) -> tuple[Array, Ctx]:
        self.check(ids, context, h0, lengths, rows, reverse)
        x, embedding = self.embedding.forward(ids)
        if rows is not None:
            x, _ = pad_rows(x, rows, x.shape, reverse, name=f'{self.name}.x')
        x, concat = (x, None) if context is None else self.concat.forward(x, context)
        h, gru = self.gru.forward_padded(x, h0, rows, reverse, 0 if rows is None else len(ids))
        return h, self.Ctx(embedding, concat, gru)

    def backward(self, dh: Array, ctx: Ctx, dh_last: Array | None = None,
                 into: Array | None = None) -> tuple[None, Array | None, Array | None]:
        """Return None (ids have no gradient), dcontext (None if forward had no context) and dh0 (None if it had no h0).

        into: add dcontext to this array, and return it.
        """
        dx, dh0 = self.gru.backward_padded(dh, ctx.gru, dh_last)
        dx, dcontext = (dx, None) if ctx.concat is None else self.concat.backward(dx, ctx.concat)
        if ctx.gru.rows is not None:
            dx, _ = unpad_rows(dx, ctx.gru.rows, ctx.gru.N, ctx.gru.reverse, name=f'{self.name}.dx')
        self.embedding.backward(dx, ctx.embedding)
        if dcontext is not None and into is not None:
            check('into', into, dcontext.shape)
            launch('residual', into, into, dcontext, None, into.size, 0.0, 0)
            dcontext = into
        return None, dcontext, dh0
