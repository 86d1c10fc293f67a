"""EmbeddingGRU with rounded operands: Embedding, ConcatContext and the rounded GRU."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from pyops.ops.embedding import Embedding
from pyops.ops.embedding_gru import EmbeddingGRU
from pyops.ops.gru_rounded import QuantizedGRU
from pyops.ops.join import ConcatContext

if TYPE_CHECKING:
    from pyops.typing import Array


class QuantizedEmbeddingGRU(EmbeddingGRU):
    """EmbeddingGRU with rounded operands: Embedding, ConcatContext and QuantizedGRU in sequence.

    Saves    the same as these three ops
    """

    class Ctx(NamedTuple):
        embedding: Embedding.Ctx
        concat: ConcatContext.Ctx | None
        gru: QuantizedGRU.Ctx

    def __init__(self, *arguments: Any, recipe: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.embedding, self.concat = Embedding(self.table), ConcatContext()
        self.gru = QuantizedGRU(self.w_ih, self.w_hh, self.b_ih, self.b_hh, self.reset_before, self.name, recipe=recipe)

    layers = QuantizedGRU.layers

    def forward(self, ids: Array, context: Array | None = None, h0: Array | None = None,
                lengths: Array | None = None) -> tuple[Array, Ctx]:
        self.check(ids, context, h0, lengths)
        x, embedding = self.embedding.forward(ids)
        x, concat = (x, None) if context is None else self.concat.forward(x, context)
        h, gru = self.gru.forward(x, h0, lengths)
        return h, self.Ctx(embedding, concat, gru)

    def backward(self, dh: Array, ctx: Ctx, dh_last: Array | None = None) -> tuple[None, Array | None, Array | None]:
        """Return None (ids have no gradient), dcontext (None if forward had no context) and dh0 (None if it had no h0)."""
        dx, dh0 = self.gru.backward(dh, ctx.gru, dh_last)
        dx, dcontext = (dx, None) if ctx.concat is None else self.concat.backward(dx, ctx.concat)
        self.embedding.backward(dx, ctx.embedding)
        return None, dcontext, dh0
