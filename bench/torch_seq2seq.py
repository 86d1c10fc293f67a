"""The seq2seq model in idiomatic PyTorch: reference in the tests, contestant in the benchmarks.

It uses nn.GRU with its own dropout, packed sequences in the encoder, scaled_dot_product_attention, nn.Linear over all
positions, and cross entropy that ignores padding.
"""
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from bench.torch_step import greedy
from pyops.text.vocabulary import PAD
from seq2seq.export import torch_names


class TorchSeq2Seq(nn.Module):
    def __init__(self, config, dtype=torch.float32):
        super().__init__()
        self.config = config
        E, H, layers, self.heads = config.embedding, config.hidden, config.layers, config.attention

        def gru(inputs, layers, hidden=H, **options):
            return nn.GRU(inputs, hidden, layers, dropout=config.dropout if layers > 1 else 0.0, dtype=dtype, **options)
        self.source_embedding = nn.Embedding(config.source_size, E, dtype=dtype)
        parts = [gru(E, layers)]
        if config.bidirectional:
            parts = [gru(E, 1, H // 2, bidirectional=True), *([gru(H, layers - 1)] if layers > 1 else [])]
        self.encoder, self.between = nn.ModuleList(parts), nn.Dropout(config.dropout)
        self.target_embedding = nn.Embedding(config.target_size, E, dtype=dtype)
        self.decoder = gru(E if self.heads else E + H, layers)
        if self.heads:
            self.query, self.context = (nn.Linear(H, H, bias=False, dtype=dtype) for _ in range(2))
            self.after = nn.Dropout(config.dropout)
        self.output = nn.Linear(H, config.target_size, dtype=dtype)

    def encode(self, source):
        """source (S, B) -> h of the top layer (S, B, H), the last h of all layers (L, B, H), mask of the tokens (B, S)."""
        mask, states = (source != PAD).T, []
        x = pack_padded_sequence(self.source_embedding(source), mask.sum(1).cpu(), enforce_sorted=False)
        for i, rnn in enumerate(self.encoder):
            if i:
                x = x._replace(data=self.between(x.data))
            x, last = rnn(x)
            states.append(torch.cat(list(last), -1)[None] if rnn.bidirectional else last)
        return pad_packed_sequence(x, total_length=len(source))[0], torch.cat(states), mask

    def decode(self, target, encoded, states):
        """target (T, B), states (L, B, H) -> input of the output layer (T, B, H), next states."""
        memory, last, mask = encoded
        x = self.target_embedding(target)
        if not self.heads:
            return self.decoder(torch.cat([x, last[-1].expand(len(x), -1, -1)], -1), states)
        h, states = self.decoder(x, states)
        (T, B, H), heads = h.shape, self.heads
        q, k = (x.reshape(len(x), B, heads, H // heads).permute(1, 2, 0, 3) for x in (self.query(h), memory))
        c = nn.functional.scaled_dot_product_attention(q, k, k, mask[:, None, None])
        return h + self.after(self.context(c.permute(2, 0, 1, 3).reshape(T, B, H))), states

    def forward(self, source, target, labels):
        """source, target, labels (T, B) int64 -> mean loss over the labels that are not padding."""
        encoded = self.encode(source)
        logits = self.output(self.decode(target, encoded, encoded[1])[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)

    def translate(self, source, num_steps):
        """source (T, B) int64 -> (at most num_steps, B) int64, <pad> after <eos>.  The decoder state is carried along."""
        encoded = self.encode(source)
        states = encoded[1]

        def predict(tokens):
            nonlocal states
            h, states = self.decode(tokens[-1:], encoded, states)
            return self.output(h[-1])
        return greedy(predict, source.shape[1], num_steps)

    def named(self):
        """Return {our parameter name: this module's parameter}."""
        return {ours: self.get_parameter(theirs) for ours, theirs in torch_names(self.config).items()}
