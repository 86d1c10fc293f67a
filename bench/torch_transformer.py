"""The transformer in idiomatic PyTorch: reference in the tests, contestant in the benchmarks.

It uses scaled_dot_product_attention; sequences are batch-first, (B, T).
"""
import functools
import math

import torch
from torch import nn
from torch.nn import functional as F

from bench.torch_step import greedy
from pyops.text.vocabulary import PAD
from transformer.export import torch_names

# the functions of pyops.ops.feed_forward.ACTIVATIONS
ACTIVATIONS = {'relu': F.relu, 'silu': F.silu, 'gelu': F.gelu, 'gelu_tanh': functools.partial(F.gelu, approximate='tanh')}


class MultiHeadAttention(nn.Module):
    def __init__(self, config, dtype):
        super().__init__()
        D = config.d_model
        self.heads, self.dropout = config.heads, config.dropout
        self.q, self.k, self.v, self.out = (nn.Linear(D, D, bias=config.bias, dtype=dtype) for _ in range(4))

    def forward(self, x, memory, mask=None, causal=False):
        """mask: True where a query may attend to a key."""
        q, k, v = (projection(rows).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for projection, rows in ((self.q, x), (self.k, memory), (self.v, memory)))
        y = F.scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0, causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config, is_decoder, dtype):
        super().__init__()
        D = config.d_model
        self.pre_norm, self.activation = config.pre_norm, ACTIVATIONS[config.activation]
        self.self_attention = MultiHeadAttention(config, dtype)
        self.cross_attention = MultiHeadAttention(config, dtype) if is_decoder else None
        self.w1, self.w2 = nn.Linear(D, config.d_ff, dtype=dtype), nn.Linear(config.d_ff, D, dtype=dtype)
        self.norms = nn.ModuleList(nn.LayerNorm(D, dtype=dtype) for _ in range(3 if is_decoder else 2))
        self.dropout = nn.Dropout(config.dropout)

    def sublayer(self, x, norm, f):
        return x + self.dropout(f(norm(x))) if self.pre_norm else norm(x + self.dropout(f(x)))

    def forward(self, x, source_mask, memory=None):
        if self.cross_attention is None:
            x = self.sublayer(x, self.norms[0], lambda n: self.self_attention(n, n, source_mask))
        else:
            x = self.sublayer(x, self.norms[0], lambda n: self.self_attention(n, n, causal=True))
            x = self.sublayer(x, self.norms[1], lambda n: self.cross_attention(n, memory, source_mask))
        return self.sublayer(x, self.norms[-1], lambda n: self.w2(self.activation(self.w1(n))))


class TorchTransformer(nn.Module):
    def __init__(self, config, dtype=torch.float32):
        super().__init__()
        self.config, D = config, config.d_model
        self.source_embedding = nn.Embedding(config.source_size, D, dtype=dtype)
        self.target_embedding = self.source_embedding if config.tied else nn.Embedding(config.target_size, D, dtype=dtype)
        self.encoder = nn.ModuleList(Block(config, False, dtype) for _ in range(config.layers))
        self.decoder = nn.ModuleList(Block(config, True, dtype) for _ in range(config.decoder_layers or config.layers))
        self.encoder_norm = nn.LayerNorm(D, dtype=dtype) if config.pre_norm else nn.Identity()
        self.decoder_norm = nn.LayerNorm(D, dtype=dtype) if config.pre_norm else nn.Identity()
        self.output = nn.Linear(D, config.target_size, dtype=dtype)
        if config.tied:
            self.output.weight = self.source_embedding.weight
        self.dropout = nn.Dropout(config.dropout)
        angles = torch.arange(config.num_steps)[:, None] / 10000 ** (torch.arange(0, D, 2, dtype=torch.float64) / D)
        sin, cos = angles.sin(), angles.cos()
        table = torch.cat([sin, cos[:, :D // 2]], -1) if config.halves else torch.stack([sin, cos], -1).flatten(1)[:, :D]
        self.register_buffer('positions', table.to(dtype))

    def embed(self, embedding, ids):
        return self.dropout(embedding(ids) * math.sqrt(self.config.d_model) + self.positions[:ids.shape[1]])

    def forward(self, source, target, labels, valid=None):
        """source, target, labels (T, B) int64 -> mean loss over the labels that are not padding.

        valid (N,) int64: the indices of those labels in labels.T.flatten(); the output layer then computes only their rows.
        """
        h, labels = self.decode(target.T, *self.encode(source.T)).flatten(0, 1), labels.T.flatten()
        if valid is not None:
            h, labels = h.index_select(0, valid), labels.index_select(0, valid)
        return F.cross_entropy(self.output(h), labels, ignore_index=PAD, label_smoothing=self.config.smoothing)

    def encode(self, source):
        """source (B, T) -> encoder output (B, T, D), and the mask of tokens that are not padding."""
        mask = (source != PAD)[:, None, None, :]
        x = self.embed(self.source_embedding, source)
        for block in self.encoder:
            x = block(x, mask)
        return self.encoder_norm(x), mask

    def decode(self, target, memory, source_mask):
        """target (B, T) -> (B, T, D), from which the output layer predicts the next token at each position."""
        x = self.embed(self.target_embedding, target)
        for block in self.decoder:
            x = block(x, source_mask, memory)
        return self.decoder_norm(x)

    def translate(self, source, num_steps):
        """source (T, B) int64 -> (at most num_steps, B) int64, <pad> after <eos>.  The source is encoded once; each step
        decodes all previous tokens again, and only the last one goes through the output layer."""
        seen = self.encode(source.T)
        return greedy(lambda tokens: self.output(self.decode(tokens.T, *seen)[:, -1]), source.shape[1], num_steps)

    def named(self):
        """Return {our parameter name: this module's parameter}."""
        return {ours: self.get_parameter(theirs) for ours, theirs in torch_names(self.config).items()}
