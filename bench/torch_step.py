"""What the PyTorch contestants share: a training step as in our programs, and taking over our weights."""
import torch
from torch import nn


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
