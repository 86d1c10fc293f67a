"""The seq2seq model in idiomatic PyTorch: reference in the tests, contestant in the benchmarks.

It uses nn.GRU with its own dropout, nn.Linear over all positions, and cross entropy that ignores padding.
"""
import torch
from torch import nn

from bench.torch_step import greedy
from pyops.text.vocabulary import PAD


class TorchSeq2Seq(nn.Module):
    def __init__(self, config, dtype=torch.float32):
        super().__init__()
        E, H, layers = config.embedding, config.hidden, config.layers
        rnn = dict(num_layers=layers, dropout=config.dropout if layers > 1 else 0.0, dtype=dtype)
        self.source_embedding = nn.Embedding(config.source_size, E, dtype=dtype)
        self.encoder = nn.GRU(E, H, **rnn)
        self.target_embedding = nn.Embedding(config.target_size, E, dtype=dtype)
        self.decoder = nn.GRU(E + H, H, **rnn)
        self.output = nn.Linear(H, config.target_size, dtype=dtype)

    def forward(self, source, target, labels):
        """source, target, labels (T, B) int64 -> mean loss over the labels that are not padding."""
        _, last = self.encoder(self.source_embedding(source))
        t = self.target_embedding(target)
        h, _ = self.decoder(torch.cat([t, last[-1].expand(len(t), -1, -1)], -1), last)
        logits = self.output(h)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)

    def translate(self, source, num_steps):
        """source (T, B) int64 -> (at most num_steps, B) int64, <pad> after <eos>.  The decoder state is carried along."""
        _, states = self.encoder(self.source_embedding(source))
        context = states[-1:]

        def predict(tokens):
            nonlocal states
            h, states = self.decoder(torch.cat([self.target_embedding(tokens[-1:]), context], -1), states)
            return self.output(h[-1])
        return greedy(predict, source.shape[1], num_steps)

    def named(self):
        """Return {our parameter name: this module's parameter}."""
        places = {'encoder.embedding.weight': self.source_embedding.weight,
                  'decoder.embedding.weight': self.target_embedding.weight,
                  'output.weight': self.output.weight, 'output.bias': self.output.bias}
        for side, rnn in (('encoder', self.encoder), ('decoder', self.decoder)):
            for layer in range(rnn.num_layers):
                for ours, theirs in (('w_ih', 'weight_ih'), ('w_hh', 'weight_hh'), ('b_ih', 'bias_ih'), ('b_hh', 'bias_hh')):
                    places[f'{side}.rnn.{layer}.{ours}'] = getattr(rnn, f'{theirs}_l{layer}')
        return places
