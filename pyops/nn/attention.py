"""Attention and transformer layers on time-major sequences (T, B, E).  Vaswani et al. 2017, arXiv:1706.03762.

Parameter names and shapes match PyTorch's.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pyops import functional as F
from pyops import init, ops
from pyops.autograd import Tensor, apply
from pyops.nn.layers import Dropout, LayerNorm, Linear
from pyops.nn.module import Layer, Parameter

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyops.typing import Numbers


class MultiHeadAttention(Layer):
    """y = out_proj(softmax(q k' / sqrt(E / heads)) v) per head;  query (L, B, E), key and value (S, B, E) -> y (L, B, E).

    is_causal: query i attends to keys 0 to i + S - L
    lengths (B,) int32: number of keys of each sequence that are not padding
    attn_mask: (L, S), or (B, L, S) per sequence: bool, True where a query may attend to a key, or float32, added to the
    scores.  With a mask the scores are stored; without one they are not (docs/attention.md)
    dropout: probability of dropping an attention weight during training
    in_proj_weight (3E, E) and in_proj_bias (3E,) stack the projections of query, key and value.
    """

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True) -> None:
        if embed_dim % num_heads:
            raise ValueError(f'MultiHeadAttention: embed_dim {embed_dim} must be a multiple of num_heads {num_heads}')
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.in_proj_weight = Parameter((3 * embed_dim, embed_dim), init.xavier_uniform())
        self.in_proj_bias = Parameter((3 * embed_dim,), init.zeros()) if bias else None
        self.out_proj = Linear(embed_dim, embed_dim, bias)
        self.dropout = Dropout(dropout)

    def _project(self, x: Tensor, which: int) -> Tensor:
        """Project x as query (which=0), key (1) or value (2)."""
        rows = slice(which * self.embed_dim, (which + 1) * self.embed_dim)
        return F.linear(x, self.in_proj_weight[rows], None if self.in_proj_bias is None else self.in_proj_bias[rows])

    def _masked(self, q: Tensor, k: Tensor, v: Tensor, mask: Numbers, is_causal: bool) -> Tensor:
        """Attend with a mask, on tensor ops that store the scores."""
        heads, (L, B, E), S = self.num_heads, q.shape, k.shape[0]
        q, k, v = (x.reshape(x.shape[0], B, heads, E // heads).permute(1, 2, 0, 3) for x in (q, k, v))
        mask = np.asarray(mask)
        added = np.where(mask, 0, -np.inf) if mask.dtype.kind in 'bi' else mask
        if is_causal:
            added = added + np.where(np.tril(np.ones((L, S), bool), S - L), 0, -np.inf)
        bias = Tensor(added[:, None] if added.ndim == 3 else added, device=q.device)
        scores = q @ k.transpose(-1, -2) * (E // heads) ** -0.5 + bias
        return (self.dropout(F.softmax(scores)) @ v).permute(2, 0, 1, 3).reshape(L, B, E)

    def forward_tensors(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None,
                   attn_mask: Numbers | None = None, is_causal: bool = False, lengths: Numbers | None = None) -> Tensor:
        key = query if key is None else key
        value = key if value is None else value
        for name, x in (('query', query), ('key', key), ('value', value)):
            if x.ndim != 3 or x.shape[1:] != (query.shape[1], self.embed_dim):
                raise ValueError(f'{name}: expected shape (T, {query.shape[1] if query.ndim > 1 else "B"}, {self.embed_dim}), '
                                 f'got {x.shape}')
        if lengths is not None and attn_mask is not None:
            raise ValueError('expected lengths or attn_mask, got both')
        q, k, v = (self._project(x, which) for which, x in enumerate((query, key, value)))
        if attn_mask is not None:
            return self.out_proj(self._masked(q, k, v, attn_mask, is_causal))
        p, seed, step = self.dropout.draw()
        op = ops.Attention(self.num_heads, is_causal, p, seed, self._path or 'attention')
        return self.out_proj(apply(op, q, k, v, None if lengths is None else F.tensor(lengths, q), step))

    def settings(self) -> str:
        return f'{self.embed_dim}, {self.num_heads}'


MultiheadAttention = MultiHeadAttention


class _TransformerLayer(Layer):
    """Base of the encoder and decoder layers: the feed-forward part and the residual connections."""

    def __init__(self, d_model: int, nhead: int, dim_feedforward: int, dropout: float, norm_first: bool) -> None:
        self.self_attn = MultiHeadAttention(d_model, nhead, dropout)
        self.linear1, self.linear2 = Linear(d_model, dim_feedforward), Linear(dim_feedforward, d_model)
        self.dropout, self.norm_first = Dropout(dropout), norm_first

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.dropout(F.relu(self.linear1(x))))

    def _add(self, x: Tensor, branch: Callable[[Tensor], Tensor], norm: Callable[[Tensor], Tensor],
             dropout: Callable[[Tensor], Tensor]) -> Tensor:
        """Return norm(x + dropout(branch(x))), or x + dropout(branch(norm(x))) with norm_first."""
        if self.norm_first:
            return F.residual(x, dropout(branch(norm(x))))
        return norm(F.residual(x, dropout(branch(x))))


class TransformerEncoderLayer(_TransformerLayer):
    """Self-attention and feed-forward, each with dropout, residual connection and layer norm;  x (T, B, d_model).

    mask, is_causal, lengths: restrict the self-attention, as in MultiHeadAttention
    """

    def __init__(self, d_model: int, nhead: int, dim_feedforward: int = 2048, dropout: float = 0.1,
                 norm_first: bool = False) -> None:
        super().__init__(d_model, nhead, dim_feedforward, dropout, norm_first)
        self.norm1, self.norm2 = LayerNorm(d_model), LayerNorm(d_model)
        self.dropout1, self.dropout2 = Dropout(dropout), Dropout(dropout)

    def forward_tensors(self, x: Tensor, mask: Numbers | None = None, is_causal: bool = False,
                   lengths: Numbers | None = None) -> Tensor:
        def attend(x: Tensor) -> Tensor:
            return self.self_attn(x, attn_mask=mask, is_causal=is_causal, lengths=lengths)
        x = self._add(x, attend, self.norm1, self.dropout1)
        return self._add(x, self._feed_forward, self.norm2, self.dropout2)


class TransformerDecoderLayer(_TransformerLayer):
    """Self-attention, attention to `memory` (S, B, d_model), the encoder's output, and feed-forward;  x (T, B, d_model).

    mask, is_causal restrict the self-attention, memory_mask and memory_lengths the attention to memory, as in
    MultiHeadAttention.
    """

    def __init__(self, d_model: int, nhead: int, dim_feedforward: int = 2048, dropout: float = 0.1,
                 norm_first: bool = False) -> None:
        super().__init__(d_model, nhead, dim_feedforward, dropout, norm_first)
        self.multihead_attn = MultiHeadAttention(d_model, nhead, dropout)
        self.norm1, self.norm2, self.norm3 = LayerNorm(d_model), LayerNorm(d_model), LayerNorm(d_model)
        self.dropout1, self.dropout2, self.dropout3 = Dropout(dropout), Dropout(dropout), Dropout(dropout)

    def forward_tensors(self, x: Tensor, memory: Tensor, mask: Numbers | None = None, memory_mask: Numbers | None = None,
                   is_causal: bool = False, memory_lengths: Numbers | None = None) -> Tensor:
        def attend(x: Tensor) -> Tensor:
            return self.self_attn(x, attn_mask=mask, is_causal=is_causal)

        def look_back(x: Tensor) -> Tensor:
            return self.multihead_attn(x, memory, attn_mask=memory_mask, lengths=memory_lengths)
        x = self._add(x, attend, self.norm1, self.dropout1)
        x = self._add(x, look_back, self.norm2, self.dropout2)
        return self._add(x, self._feed_forward, self.norm3, self.dropout3)
