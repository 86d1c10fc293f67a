"""Functions on whole models: clipping, where PyTorch has it, and accuracy."""
from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from pyops.autograd import no_grad
from pyops.autograd.tensor import concatenate
from pyops.nn import sequences
from pyops.optim import clip_grad_norm_, clip_grad_value_

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyops.autograd import Tensor
    from pyops.nn.module import Module

# PyTorch's name, also for `from pyops.nn.utils.rnn import pad_sequence`
rnn = sys.modules[f'{__name__}.rnn'] = sequences
__all__ = ['accuracy', 'clip_grad_norm_', 'clip_grad_value_', 'parameters_to_vector', 'rnn', 'vector_to_parameters']


def parameters_to_vector(parameters: Iterable[Tensor]) -> Tensor:
    """Return all elements of Tensors, one after the other."""
    return concatenate([tensor.reshape(-1) for tensor in parameters])


def vector_to_parameters(vec: Tensor, parameters: Iterable[Tensor]) -> None:
    """Copy the elements of a vector into Tensors, in their order.  ValueError if their numbers differ."""
    given = list(parameters)
    size = sum(tensor.size for tensor in given)
    if vec.shape != (size,):
        raise ValueError(f'vector_to_parameters: expected {size} elements, got shape {vec.shape}')
    first = 0
    with no_grad():
        for tensor in given:
            tensor[...] = vec[first:first + tensor.size].reshape(tensor.shape)
            first += tensor.size


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
