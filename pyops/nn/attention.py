"""Attention and transformer layers on sequences (T, B, E), or (B, T, E) with batch_first.  Vaswani et al. 2017,
arXiv:1706.03762.

Parameter names, shapes and arguments are PyTorch's, except MultiHeadAttention's call and masks; add_bias_kv and add_zero_attn
are refused.
"""
from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from pyops import functional as F
from pyops import init, ops
from pyops.autograd import Tensor, apply
from pyops.autograd.mode import is_interpreted
from pyops.nn.container import ModuleList
from pyops.nn.layers import Dropout, LayerNorm, Linear
from pyops.nn.module import Layer, Module, Parameter

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyops.typing import Numbers


def _added(mask: Numbers, blocks: bool) -> np.ndarray:
    """Return a mask as numbers to add to scores: of bools or integers -inf where it is `blocks`; floats unchanged."""
    values = np.asarray(mask.numpy() if hasattr(mask, 'numpy') else mask)
    return np.where((values != 0) == blocks, np.float32(-np.inf), np.float32(0)) if values.dtype.kind in 'biu' else values


def _joined(masks: list[np.ndarray]) -> np.ndarray:
    """Add masks; where one is -inf, the result is -inf."""
    total = masks[0]
    for mask in masks[1:]:
        total = total + mask
    return total


class _Attention(Layer):
    """Base of both attention layers: the parameters, the projections and the attention."""

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True, add_bias_kv: bool = False,
                 add_zero_attn: bool = False, kdim: int | None = None, vdim: int | None = None,
                 batch_first: bool = False) -> None:
        name = type(self).__name__
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f'{name}: embed_dim {embed_dim} must be a multiple of num_heads {num_heads}')
        if add_bias_kv or add_zero_attn:
            raise ValueError(f'{name}: add_bias_kv and add_zero_attn: expected False, got True; append rows to key and value')
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first
        self.head_dim = embed_dim // num_heads
        self.kdim, self.vdim = embed_dim if kdim is None else kdim, embed_dim if vdim is None else vdim
        sizes = embed_dim, self.kdim, self.vdim
        if sizes == (embed_dim,) * 3:
            self.in_proj_weight = Parameter((3 * embed_dim, embed_dim), init.xavier_uniform())
        else:
            for letter, size in zip('qkv', sizes, strict=True):
                setattr(self, f'{letter}_proj_weight', Parameter((embed_dim, size), init.xavier_uniform()))
        self.in_proj_bias = Parameter((3 * embed_dim,), init.zeros()) if bias else None
        self.out_proj = Linear(embed_dim, embed_dim, bias)
        self.dropout = Dropout(dropout)

    def _project(self, x: Tensor, which: int) -> Tensor:
        """Project x as query (which=0), key (1) or value (2)."""
        rows = slice(which * self.embed_dim, (which + 1) * self.embed_dim)
        weight = self.in_proj_weight[rows] if hasattr(self, 'in_proj_weight') else getattr(self, f'{"qkv"[which]}_proj_weight')
        return F.linear(x, weight, None if self.in_proj_bias is None else self.in_proj_bias[rows])

    def attend(self, query: Tensor, key: Tensor | None, value: Tensor | None, masks: list[np.ndarray], is_causal: bool,
               lengths: Numbers | None, need_weights: bool, average: bool,
               last: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor | None]:
        """Return y and, with need_weights, the weights.  masks: float32, to add to scores (B, heads, L, S).

        last: computes y, in place of out_proj, from the results of attention, with the axes of query
        """
        key = query if key is None else key
        value = key if value is None else value
        if query.ndim == key.ndim == value.ndim == 2:               # one sequence
            batch = 1 - self.batch_first
            query, key, value = (x.unsqueeze(batch) for x in (query, key, value))
            y, weights = self.attend(query, key, value, masks, is_causal, lengths, need_weights, average, last)
            return y.squeeze(batch), None if weights is None else weights.squeeze(0)
        B = query.shape[1 - self.batch_first] if query.ndim == 3 else 'B'
        for name, x, size in (('query', query, self.embed_dim), ('key', key, self.kdim), ('value', value, self.vdim)):
            if x.ndim != 3 or (x.shape[1 - self.batch_first], x.shape[2]) != (B, size):
                axes = f'{B}, T' if self.batch_first else f'T, {B}'
                raise ValueError(f'{name}: expected shape ({axes}, {size}), got {x.shape}')
        if self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        if key.shape[0] != value.shape[0]:
            raise ValueError(f'value: expected {key.shape[0]} steps like the key, got {value.shape[0]}')
        q, k, v = (self._project(x, which) for which, x in enumerate((query, key, value)))
        weights = None
        if masks or need_weights or F.is_double(q):
            (L, B, _), S = q.shape, len(k)
            if lengths is not None:
                inside = np.arange(S) < np.asarray(lengths.numpy() if isinstance(lengths, Tensor) else lengths)[:, None]
                masks = [*masks, _added(inside, False)[:, None, None]]
            if is_causal:
                masks = [*masks, _added(np.tril(np.ones((L, S), bool), S - L), False)]
            y, weights = self._stored(q, k, v, masks)
        else:
            p, seed, step = self.dropout.draw()
            op = ops.Attention(self.num_heads, is_causal, p, seed, self._path or 'attention')
            y = apply(op, q, k, v, None if lengths is None else F.tensor(lengths, q), step)
        if last is None:
            y = self.out_proj(y)
        if self.batch_first:
            y = y.transpose(0, 1)
        if last is not None:
            y = last(y)
        if not need_weights:
            weights = None
        elif average:
            weights = weights.mean(1)                       # type: ignore[union-attr]
        return y, weights

    def _stored(self, q: Tensor, k: Tensor, v: Tensor, masks: list[np.ndarray]) -> tuple[Tensor, Tensor]:
        """Attend on tensor ops that store the scores.  Return y (L, B, E) and the weights (B, heads, L, S)."""
        heads, (L, B, E) = self.num_heads, q.shape
        q, k, v = (x.reshape(x.shape[0], B, heads, E // heads).permute(1, 2, 0, 3) for x in (q, k, v))
        scores = q @ k.transpose(-1, -2) * (E // heads) ** -0.5
        if masks:
            scores = scores + Tensor(_joined(masks), device=q.device)
        weights = self.dropout(F.softmax(scores))
        return (weights @ v).permute(2, 0, 1, 3).reshape(L, B, E), weights

    def settings(self) -> str:
        return f'{self.embed_dim}, {self.num_heads}'


class MultiHeadAttention(_Attention):
    """y = out_proj(softmax(q k' / sqrt(E / heads)) v) per head;  query (L, B, E), key and value (S, B, E) -> y (L, B, E).

    is_causal: query i attends to keys 0 to i + S - L
    lengths (B,) int32: number of keys of each sequence that are not padding
    attn_mask: (L, S), or (B, L, S) per sequence: bool, True where a query may attend to a key, or float32, added to the
    scores.  With a mask the scores are stored; without one they are not (docs/attention.md)
    need_weights: return (y, weights); weights (B, L, S), the mean over heads, or (B, heads, L, S) with
    average_attn_weights=False.  The scores are stored then
    dropout: probability of dropping an attention weight during training
    in_proj_weight (3E, E) and in_proj_bias (3E,) stack the projections of query, key and value.
    MultiheadAttention, as PyTorch spells it, is called as PyTorch's.
    """

    def forward_tensors(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None,
                        attn_mask: Numbers | None = None, is_causal: bool = False, lengths: Numbers | None = None,
                        need_weights: bool = False, average_attn_weights: bool = True) -> Any:
        if lengths is not None and attn_mask is not None:
            raise ValueError('expected lengths or attn_mask, got both')
        masks = []
        if attn_mask is not None:
            added = _added(attn_mask, False)
            masks = [added[:, None] if added.ndim == 3 else added]
        y, weights = self.attend(query, key, value, masks, is_causal, lengths, need_weights, average_attn_weights)
        return (y, weights) if need_weights else y


class MultiheadAttention(_Attention):
    """Attention as PyTorch's nn.MultiheadAttention: returns (y, weights), with None for the weights if need_weights=False.

    query (L, B, E), key (S, B, kdim), value (S, B, vdim), or with the first two axes exchanged with batch_first
    key_padding_mask (B, S), attn_mask (L, S) or (B heads, L, S): bool, True where a key is NOT attended to, or float32, added
    to the scores
    weights: (B, L, S), the mean over heads, or (B, heads, L, S) with average_attn_weights=False, after dropout
    is_causal: query i attends to keys 0 to i + S - L, also without attn_mask;  lengths: as in MultiHeadAttention
    last: a function in place of out_proj, on a Tensor with the axes of query
    Without weights and masks the scores are not stored.
    """

    def forward_tensors(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None,
                        key_padding_mask: Numbers | None = None, need_weights: bool = True, attn_mask: Numbers | None = None,
                        average_attn_weights: bool = True, is_causal: bool = False,
                        lengths: Numbers | None = None,
                        last: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor | None]:
        masks = []
        if attn_mask is not None:
            added = _added(attn_mask, True)
            if added.ndim == 3:
                added = added.reshape(-1, self.num_heads, *added.shape[1:])
            masks.append(added)
        if key_padding_mask is not None:
            added = _added(key_padding_mask, True)
            masks.append(added.reshape(-1, 1, 1, added.shape[-1]))
        return self.attend(query, key, value, masks, is_causal, lengths, need_weights, average_attn_weights, last)


# ---- transformer layers ------------------------------------------------------------------------------------------------

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {'relu': F.relu, 'gelu': F.gelu, 'silu': F.silu}


class _TransformerLayer(Layer):
    """Base of the encoder and decoder layers: self-attention, the feed-forward part and the residual connections."""
    NORMS = 0

    def __init__(self, d_model: int, nhead: int, dim_feedforward: int = 2048, dropout: float = 0.1,
                 activation: str | Callable[[Tensor], Tensor] = 'relu', layer_norm_eps: float = 1e-5, batch_first: bool = False,
                 norm_first: bool = False, bias: bool = True) -> None:
        if isinstance(activation, str) and activation not in _ACTIVATIONS:
            raise ValueError(f'{type(self).__name__}: activation: expected one of {", ".join(_ACTIVATIONS)}, or a function, '
                             f'got {activation!r}')
        if not callable(activation) and not isinstance(activation, str):
            raise TypeError(f'{type(self).__name__}: activation: expected a name or a function, got {activation!r}; pass later '
                            'arguments by name')
        self.self_attn = MultiheadAttention(d_model, nhead, dropout, bias, batch_first=batch_first)
        if self.NORMS == 3:                                         # a decoder's attention to the memory
            self.multihead_attn = MultiheadAttention(d_model, nhead, dropout, bias, batch_first=batch_first)
        self.linear1, self.linear2 = Linear(d_model, dim_feedforward, bias), Linear(dim_feedforward, d_model, bias)
        self.dropout, self.norm_first = Dropout(dropout), norm_first
        self.activation = _ACTIVATIONS[activation] if isinstance(activation, str) else activation
        for number in range(1, self.NORMS + 1):
            setattr(self, f'norm{number}', LayerNorm(d_model, layer_norm_eps, bias=bias))
            setattr(self, f'dropout{number}', Dropout(dropout))

    def _feed_forward(self, x: Tensor, last: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        return (last or self.linear2)(self.dropout(self.activation(self.linear1(x))))

    def _add(self, x: Tensor, branch: Callable[..., Tensor], number: int,
             attention: MultiheadAttention | None = None) -> Tensor:
        """Return norm(x + dropout(branch(x))), or x + dropout(branch(norm(x))) with norm_first.

        branch(x, last) computes its result by last(h), in place of its last layer
        attention: the layer of the branch, None for feed-forward
        """
        norm, dropout = getattr(self, f'norm{number}'), getattr(self, f'dropout{number}')
        linear = self.linear2 if attention is None else attention.out_proj
        if _joins(x, linear, dropout, attention, None if self.norm_first else norm):
            p, key, step = dropout.draw()
            op, parameters, _ = linear.op()
            if self.norm_first:
                return branch(norm(x), lambda h: apply(ops.LinearResidual, h, x, step, **parameters, p=p, key=key))
            parameters |= {'norm_weight': norm.weight, 'norm_bias': norm.bias}
            return branch(x, lambda h: apply(ops.LinearResidualNorm, h, x, step, **{'bias': None} | parameters, p=p, key=key,
                                             eps=norm.eps))
        if self.norm_first:
            return F.residual(x, dropout(branch(norm(x))))
        return norm(F.residual(x, dropout(branch(x))))


def _joins(x: Tensor, linear: Any, dropout: Any, attention: Any, norm: Any) -> bool:
    """Return whether one op may compute these layers and the residual sum, with the same bits: on a GPU, because it saves
    launches.  Layers of other classes, and layers with hooks, are called.   attention, norm: None if there is none"""
    if x.ndim != 3 or is_interpreted() or x.device.is_host or F.is_double(x):
        return False
    for layer, kind in ((linear, Linear), (dropout, Dropout), (attention, MultiheadAttention), (norm, LayerNorm)):
        if layer is not None and (type(layer) is not kind or layer._hooks):
            return False
    return (norm is None or norm.is_one_kernel()) and dropout.generator is None and (dropout.p < 1 or not dropout.training)


class TransformerEncoderLayer(_TransformerLayer):
    """Self-attention and feed-forward, each with dropout, residual connection and layer norm;  src (T, B, d_model).

    src_mask, src_key_padding_mask, is_causal, lengths: restrict the self-attention, as in MultiheadAttention: True in a mask
    is where a key is not attended to
    activation: 'relu', 'gelu', 'silu', or a function on Tensors
    """
    NORMS = 2

    def forward_tensors(self, src: Tensor, src_mask: Numbers | None = None, src_key_padding_mask: Numbers | None = None,
                        is_causal: bool = False, lengths: Numbers | None = None) -> Tensor:
        def attend(x: Tensor, last: Any = None) -> Tensor:
            return self.self_attn(x, key_padding_mask=src_key_padding_mask, need_weights=False, attn_mask=src_mask,
                                  is_causal=is_causal, lengths=lengths, last=last)[0]
        return self._add(self._add(src, attend, 1, self.self_attn), self._feed_forward, 2)


class TransformerDecoderLayer(_TransformerLayer):
    """Self-attention, attention to `memory` (S, B, d_model), the encoder's output, and feed-forward;  tgt (T, B, d_model).

    tgt_mask, tgt_key_padding_mask, tgt_is_causal and lengths restrict the self-attention; the arguments that begin with memory_
    restrict the attention to the memory.  All are as in MultiheadAttention.
    """
    NORMS = 3

    def forward_tensors(self, tgt: Tensor, memory: Tensor, tgt_mask: Numbers | None = None, memory_mask: Numbers | None = None,
                        tgt_key_padding_mask: Numbers | None = None, memory_key_padding_mask: Numbers | None = None,
                        tgt_is_causal: bool = False, memory_is_causal: bool = False, lengths: Numbers | None = None,
                        memory_lengths: Numbers | None = None) -> Tensor:
        def attend(x: Tensor, last: Any = None) -> Tensor:
            return self.self_attn(x, key_padding_mask=tgt_key_padding_mask, need_weights=False, attn_mask=tgt_mask,
                                  is_causal=tgt_is_causal, lengths=lengths, last=last)[0]

        def look_back(x: Tensor, last: Any = None) -> Tensor:
            return self.multihead_attn(x, memory, key_padding_mask=memory_key_padding_mask, need_weights=False,
                                       attn_mask=memory_mask, is_causal=memory_is_causal, lengths=memory_lengths, last=last)[0]
        x = self._add(self._add(tgt, attend, 1, self.self_attn), look_back, 2, self.multihead_attn)
        return self._add(x, self._feed_forward, 3)


class _Stack(Layer):
    """Base of the stacks: num_layers copies of a layer, and a norm at the end."""
    LAYER: type[_TransformerLayer]

    def __init__(self, layer: _TransformerLayer, num_layers: int, norm: Module | None = None) -> None:
        if not isinstance(layer, self.LAYER):
            raise TypeError(f'{type(self).__name__}: expected a {self.LAYER.__name__}, got {type(layer).__name__}')
        if num_layers < 1:
            raise ValueError(f'{type(self).__name__}: num_layers: expected 1 or more, got {num_layers}')
        self.layers = ModuleList(copy.deepcopy(layer) for _ in range(num_layers))
        self.norm = norm

    def _run(self, x: Tensor, *inputs: Tensor, **options: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, *inputs, **options)
        return x if self.norm is None else self.norm(x)


class TransformerEncoder(_Stack):
    """num_layers copies of an encoder layer, then `norm` if given;  src (T, B, d_model).

    Each copy has its own parameters.  Those that nobody has set or used start with the values of their own names, unlike in
    PyTorch, where all copies start equal.  mask, src_key_padding_mask, is_causal, lengths: as in the layer.
    enable_nested_tensor: accepted as in PyTorch, without effect.
    """
    LAYER = TransformerEncoderLayer

    def __init__(self, encoder_layer: TransformerEncoderLayer, num_layers: int, norm: Module | None = None,
                 enable_nested_tensor: bool = True) -> None:
        super().__init__(encoder_layer, num_layers, norm)
        self.enable_nested_tensor = enable_nested_tensor

    def forward_tensors(self, src: Tensor, mask: Numbers | None = None, src_key_padding_mask: Numbers | None = None,
                        is_causal: bool = False, lengths: Numbers | None = None) -> Tensor:
        return self._run(src, src_mask=mask, src_key_padding_mask=src_key_padding_mask, is_causal=is_causal, lengths=lengths)


class TransformerDecoder(_Stack):
    """num_layers copies of a decoder layer, then `norm` if given;  tgt (T, B, d_model), memory (S, B, d_model).

    Arguments as in the layer; copies as in TransformerEncoder.
    """
    LAYER = TransformerDecoderLayer

    def __init__(self, decoder_layer: TransformerDecoderLayer, num_layers: int, norm: Module | None = None) -> None:
        super().__init__(decoder_layer, num_layers, norm)

    def forward_tensors(self, tgt: Tensor, memory: Tensor, tgt_mask: Numbers | None = None, memory_mask: Numbers | None = None,
                        tgt_key_padding_mask: Numbers | None = None, memory_key_padding_mask: Numbers | None = None,
                        tgt_is_causal: bool = False, memory_is_causal: bool = False, lengths: Numbers | None = None,
                        memory_lengths: Numbers | None = None) -> Tensor:
        return self._run(tgt, memory, tgt_mask=tgt_mask, memory_mask=memory_mask, tgt_key_padding_mask=tgt_key_padding_mask,
                         memory_key_padding_mask=memory_key_padding_mask, tgt_is_causal=tgt_is_causal,
                         memory_is_causal=memory_is_causal, lengths=lengths, memory_lengths=memory_lengths)


class Transformer(Layer):
    """An encoder and a decoder, each with a norm at the end;  src (S, B, d_model), tgt (T, B, d_model) -> (T, B, d_model).

    The layers have the sizes and settings; the masks are as in TransformerEncoder and TransformerDecoder.
    """

    def __init__(self, d_model: int = 512, nhead: int = 8, num_encoder_layers: int = 6, num_decoder_layers: int = 6,
                 dim_feedforward: int = 2048, dropout: float = 0.1, activation: str | Callable[[Tensor], Tensor] = 'relu', *,
                 layer_norm_eps: float = 1e-5, batch_first: bool = False, norm_first: bool = False, bias: bool = True) -> None:
        settings = d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias
        self.encoder = TransformerEncoder(TransformerEncoderLayer(*settings), num_encoder_layers,
                                          LayerNorm(d_model, layer_norm_eps, bias=bias))
        self.decoder = TransformerDecoder(TransformerDecoderLayer(*settings), num_decoder_layers,
                                          LayerNorm(d_model, layer_norm_eps, bias=bias))

    @staticmethod
    def generate_square_subsequent_mask(sz: int, device: Any = None, dtype: Any = None) -> Tensor:
        """Return the mask (sz, sz) of a decoder: 0 for steps up to its own, -inf for later ones."""
        return Tensor(np.triu(np.full((sz, sz), -np.inf, np.float32), 1), device=device)

    def forward_tensors(self, src: Tensor, tgt: Tensor, src_mask: Numbers | None = None, tgt_mask: Numbers | None = None,
                        memory_mask: Numbers | None = None, src_key_padding_mask: Numbers | None = None,
                        tgt_key_padding_mask: Numbers | None = None, memory_key_padding_mask: Numbers | None = None,
                        src_is_causal: bool = False, tgt_is_causal: bool = False, memory_is_causal: bool = False) -> Tensor:
        memory = self.encoder(src, mask=src_mask, src_key_padding_mask=src_key_padding_mask, is_causal=src_is_causal)
        return self.decoder(tgt, memory, tgt_mask=tgt_mask, memory_mask=memory_mask, tgt_key_padding_mask=tgt_key_padding_mask,
                            memory_key_padding_mask=memory_key_padding_mask, tgt_is_causal=tgt_is_causal,
                            memory_is_causal=memory_is_causal)
