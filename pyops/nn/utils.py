"""Functions on whole models: clipping, where PyTorch has it, and accuracy."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyops.autograd import no_grad
from pyops.optim import clip_grad_norm_

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyops.nn.module import Module

__all__ = ['accuracy', 'clip_grad_norm_']


def accuracy(model: Module, batches: Iterable[tuple[Any, Any]]) -> float:
    """Return the fraction of correct predictions: rows whose label has the largest of the model's outputs.

    batches: pairs of inputs and labels (N,), such as a DataLoader yields; the outputs are (N, classes).  All modules are in
    evaluation mode meanwhile, and nothing is recorded.  ValueError if there are no rows.
    """
    modes, right, rows = [(module, module.training) for module in model.modules()], 0, 0
    model.eval()
    try:
        with no_grad():
            for x, labels in batches:
                right += (model(x).argmax(-1) == labels).sum().item()
                rows += len(labels)
    finally:
        for module, training in modes:
            module.training = training
    if not rows:
        raise ValueError('accuracy: expected batches of inputs and labels, got none')
    return right / rows
