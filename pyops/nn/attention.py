"""Attention and the layers of a transformer, on time-major sequences (T, B, E).  Vaswani et al. 2017, arXiv:1706.03762.
Names and shapes of parameters are PyTorch's."""
from pyops import functional as F
from pyops import init
from pyops.nn.layers import Dropout, LayerNorm, Linear
from pyops.nn.module import Layer, Parameter


class MultiHeadAttention(Layer):
    """y = out_proj of softmax(q k' / sqrt(E / heads)) v in each head;  query (L, B, E), key and value (S, B, E) -> y (L, B, E).

    attn_mask: (L, S), or (B, L, S) for all heads of a sentence: bool, True where a query may see a key, or float32, added.
    is_causal: query i sees keys 0 to i.  dropout: of y, in training
    in_proj_weight (3E, E) and in_proj_bias (3E,) hold those of query, key and value, one under another.
    """

    def __init__(self, embed_dim, num_heads, dropout=0.0, bias=True):
        if embed_dim % num_heads:
            raise ValueError(f'MultiHeadAttention: embed_dim {embed_dim} is no multiple of num_heads {num_heads}')
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.in_proj_weight = Parameter((3 * embed_dim, embed_dim), init.xavier_uniform())
        self.in_proj_bias = Parameter((3 * embed_dim,), init.zeros()) if bias else None
        self.out_proj = Linear(embed_dim, embed_dim, bias)
        self.dropout = Dropout(dropout)

    def _heads(self, x, which):
        """The part of a projection that belongs to query, key or value (0, 1, 2) -> (B, heads, T, E / heads)"""
        E, heads, (T, B, _) = self.embed_dim, self.num_heads, x.shape
        rows = slice(which * E, (which + 1) * E)
        y = F.linear(x, self.in_proj_weight[rows], None if self.in_proj_bias is None else self.in_proj_bias[rows])
        return y.reshape(T, B, heads, E // heads).permute(1, 2, 0, 3)

    def on_tensors(self, query, key=None, value=None, attn_mask=None, is_causal=False):
        key = query if key is None else key
        value = key if value is None else value
        for name, x in (('query', query), ('key', key), ('value', value)):
            if x.ndim != 3 or x.shape[1:] != (query.shape[1], self.embed_dim):
                raise ValueError(f'{name}: want shape (T, {query.shape[1] if query.ndim > 1 else "B"}, {self.embed_dim}), '
                                 f'got {x.shape}')
        if attn_mask is not None and attn_mask.ndim == 3:
            attn_mask = attn_mask[:, None]
        q, k, v = (self._heads(x, which) for which, x in enumerate((query, key, value)))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal)               # (B, heads, L, E / heads)
        return self.dropout(self.out_proj(y.permute(2, 0, 1, 3).reshape(*query.shape)))

    def settings(self):
        return f'{self.embed_dim}, {self.num_heads}'


MultiheadAttention = MultiHeadAttention


class _TransformerLayer(Layer):
    """What encoder and decoder share: feed forward, and how a branch is added."""

    def __init__(self, d_model, nhead, dim_feedforward, dropout, norm_first):
        self.self_attn = MultiHeadAttention(d_model, nhead)
        self.linear1, self.linear2 = Linear(d_model, dim_feedforward), Linear(dim_feedforward, d_model)
        self.dropout, self.norm_first = Dropout(dropout), norm_first

    def _feed_forward(self, x):
        return self.linear2(self.dropout(F.relu(self.linear1(x))))

    def _add(self, x, branch, norm, dropout):
        """x + dropout(branch(x)), normed behind it, or before the branch where norm_first."""
        if self.norm_first:
            return F.residual(x, dropout(branch(norm(x))))
        return norm(F.residual(x, dropout(branch(x))))


class TransformerEncoderLayer(_TransformerLayer):
    """Self attention and feed forward, each with dropout, residual connection and layer norm;  x (T, B, d_model)."""

    def __init__(self, d_model, nhead, dim_feedforward=2048, dropout=0.1, norm_first=False):
        super().__init__(d_model, nhead, dim_feedforward, dropout, norm_first)
        self.norm1, self.norm2 = LayerNorm(d_model), LayerNorm(d_model)
        self.dropout1, self.dropout2 = Dropout(dropout), Dropout(dropout)

    def on_tensors(self, x, mask=None, is_causal=False):
        x = self._add(x, lambda x: self.self_attn(x, attn_mask=mask, is_causal=is_causal), self.norm1, self.dropout1)
        return self._add(x, self._feed_forward, self.norm2, self.dropout2)


class TransformerDecoderLayer(_TransformerLayer):
    """Self attention, attention to `memory`, the encoder's output (S, B, d_model), and feed forward;  x (T, B, d_model).

    is_causal: position t of x sees positions 0 to t
    """

    def __init__(self, d_model, nhead, dim_feedforward=2048, dropout=0.1, norm_first=False):
        super().__init__(d_model, nhead, dim_feedforward, dropout, norm_first)
        self.multihead_attn = MultiHeadAttention(d_model, nhead)
        self.norm1, self.norm2, self.norm3 = LayerNorm(d_model), LayerNorm(d_model), LayerNorm(d_model)
        self.dropout1, self.dropout2, self.dropout3 = Dropout(dropout), Dropout(dropout), Dropout(dropout)

    def on_tensors(self, x, memory, mask=None, memory_mask=None, is_causal=False):
        x = self._add(x, lambda x: self.self_attn(x, attn_mask=mask, is_causal=is_causal), self.norm1, self.dropout1)
        x = self._add(x, lambda x: self.multihead_attn(x, memory, attn_mask=memory_mask), self.norm2, self.dropout2)
        return self._add(x, self._feed_forward, self.norm3, self.dropout3)
