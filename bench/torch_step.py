"""What the PyTorch contestants share: a training step as in our programs, greedy decoding, and taking over our weights."""
import torch
from torch import nn

from pyops.text.vocabulary import BOS, EOS, PAD


@torch.no_grad()
def copy_weights(model, values):
    """Give a twin (its named() maps our parameter's name to its own) the arrays values[name]."""
    for name, place in model.named().items():
        place.copy_(torch.from_numpy(values[name]))
    return model


def make_step(model, lr, max_norm=1.0, on_gpu=False):
    """step(*batch) -> loss tensor: one training step of a model that returns its loss, with clipped Adam; on a GPU with
    PyTorch's fused one, which can be captured in a graph."""
    optimizer = torch.optim.Adam(model.parameters(), lr, **(dict(fused=True, capturable=True) if on_gpu else {}))

    def step(*batch):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        return loss.detach()
    return step


def greedy(say, sentences, num_steps):
    """say(said (t, B), <bos> first) -> logits (B, V) of the next words  ->  (at most num_steps, B) int64, <pad> after <eos>."""
    said, done = torch.full((1, sentences), BOS), torch.zeros(sentences, dtype=torch.bool)
    while len(said) <= num_steps and not done.all():
        word = say(said).argmax(-1).masked_fill(done, PAD)
        said = torch.cat([said, word[None]])
        done = done | (word == EOS)
    return said[1:]
