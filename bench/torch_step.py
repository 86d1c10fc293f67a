"""Shared by the PyTorch contestants: a training step as in our programs, greedy decoding, and copying our weights."""
import itertools

import torch
from torch import nn

from pyops.text.vocabulary import BOS, EOS, PAD


@torch.no_grad()
def copy_weights(model, values):
    """Copy the arrays values[name] into a twin, whose named() maps our parameter names to its parameters.  Return it."""
    for name, place in model.named().items():
        place.copy_(torch.from_numpy(values[name]))
    return model


def make_step(model, lr, max_norm=1.0, on_gpu=False, rate=None, in_bf16=False):
    """Return step(*batch) -> loss tensor: one training step of a model that returns its loss, with clipping and PyTorch's
    fused Adam, its fastest, which a graph on a GPU can capture.

    rate(k) -> the learning rate of step k, counted from 0; None: always `lr`
    in_bf16: with PyTorch's autocast to bfloat16, on the CPU
    """
    optimizer = torch.optim.Adam(model.parameters(), lr, fused=True, capturable=on_gpu)
    steps = itertools.count()

    def step(*batch):
        if rate:
            for group in optimizer.param_groups:
                group['lr'] = rate(next(steps))
        optimizer.zero_grad()
        with torch.autocast('cpu', torch.bfloat16, enabled=in_bf16):
            loss = model(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        return loss.detach()
    return step


def greedy(predict, sentences, num_steps):
    """Decode greedily: predict(tokens (t, B), <bos> first) -> logits (B, V) of the next tokens.  Return (at most num_steps,
    B) int64, <pad> after <eos>."""
    tokens, done = torch.full((1, sentences), BOS), torch.zeros(sentences, dtype=torch.bool)
    while len(tokens) <= num_steps and not done.all():
        word = predict(tokens).argmax(-1).masked_fill(done, PAD)
        tokens = torch.cat([tokens, word[None]])
        done = done | (word == EOS)
    return tokens[1:]
