"""Functions on whole models: clipping, where PyTorch has it, and accuracy."""
from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pyops.autograd import Tensor, no_grad
from pyops.autograd.tensor import concatenate
from pyops.nn import sequences
from pyops.nn.module import Module, Parameter
from pyops.optim import clip_grad_norm_, clip_grad_value_
from pyops.params import next_key

if TYPE_CHECKING:
    from collections.abc import Iterable

T = TypeVar('T', bound=Module)

# PyTorch's name, also for `from pyops.nn.utils.rnn import pad_sequence`
rnn = sys.modules[f'{__name__}.rnn'] = sequences
__all__ = ['accuracy', 'clip_grad_norm_', 'clip_grad_value_', 'get_total_norm', 'parameters_to_vector', 'remove_weight_norm',
           'rnn', 'spectral_norm', 'vector_to_parameters', 'weight_norm']


def get_total_norm(tensors: Iterable[Tensor], norm_type: float = 2.0, error_if_nonfinite: bool = False,
                   foreach: bool | None = None) -> Tensor:
    """Return the norm of all elements of Tensors together, shape ().

    error_if_nonfinite: raise RuntimeError for a norm that is NaN or infinite.  foreach: accepted as in PyTorch, without effect.
    """
    flat = [tensor.detach().reshape(-1) for tensor in ([tensors] if isinstance(tensors, Tensor) else tensors)]
    norm = concatenate(flat).norm(norm_type) if flat else Tensor(0.0)
    if error_if_nonfinite and not np.isfinite(norm.item()):
        raise RuntimeError(f'get_total_norm: expected a finite norm, got {norm.item()}')
    return norm


def _replaced(module: Module, name: str) -> Parameter:
    """Remove a Parameter from a module, so that the attribute can hold a Tensor computed from others, and return it."""
    module.root().build()                   # outside the module it would not get a value
    weight = getattr(module, name)
    if not isinstance(weight, Parameter):
        raise ValueError(f'{name}: expected a Parameter of {type(module).__name__}, got {type(weight).__name__}')
    delattr(module, name)
    return weight


def weight_norm(module: T, name: str = 'weight', dim: int | None = 0) -> T:
    """Compute a weight as g v / |v| from Parameters name_g and name_v before each call of a module, and return the module.
    Salimans and Kingma 2016, arXiv:1602.07868.

    dim: the axis of g; each slice of v along it is normalised.  None: one norm of all
    """
    weight = _replaced(module, name)
    axes = None if dim is None else tuple(d for d in range(weight.ndim) if d != dim % weight.ndim)
    values = weight.detach()
    setattr(module, f'{name}_g', Parameter(values.norm(2, axes, keepdims=dim is not None).numpy()))
    setattr(module, f'{name}_v', Parameter(values.numpy()))

    def compute(module: Module, inputs: Any) -> None:
        g, v = getattr(module, f'{name}_g'), getattr(module, f'{name}_v')
        object.__setattr__(module, name, v * (g / v.norm(2, axes, keepdims=dim is not None)))
    vars(module).setdefault('_weight_norms', {})[name] = module.register_forward_pre_hook(compute), compute
    compute(module, ())
    return module


def remove_weight_norm(module: T, name: str = 'weight') -> T:
    """Make a weight of weight_norm a Parameter again, with its present value.  ValueError if there is none."""
    hook, compute = vars(module).get('_weight_norms', {}).pop(name, (None, None))
    if hook is None:
        raise ValueError(f'remove_weight_norm: {name}: {type(module).__name__} has no weight_norm of this name')
    hook.remove()
    compute(module, ())
    weight = getattr(module, name).numpy()
    for each in (name, f'{name}_g', f'{name}_v'):
        delattr(module, each)
    setattr(module, name, Parameter(weight))
    return module


def spectral_norm(module: T, name: str = 'weight', n_power_iterations: int = 1, eps: float = 1e-12, dim: int = 0) -> T:
    """Divide a weight, kept as Parameter name_orig, by its largest singular value before each call, and return the module.
    Miyato et al. 2018, arXiv:1802.05957.

    The value is estimated with n_power_iterations steps in each call during training.   dim: the axis of rows of the matrix
    """
    weight = _replaced(module, name)
    setattr(module, f'{name}_orig', Parameter(weight.numpy()))
    rows = weight.shape[dim]
    u = np.random.default_rng(next_key('spectral_norm')).standard_normal(rows).astype(np.float32)
    module.register_buffer(f'{name}_u', Tensor(u / np.linalg.norm(u)))

    def compute(module: Module, inputs: Any) -> None:
        weight, u = getattr(module, f'{name}_orig'), getattr(module, f'{name}_u')
        matrix = weight.moveaxis(dim, 0).reshape(rows, -1)
        with no_grad():
            v = (u @ matrix) / (u @ matrix).norm().maximum(eps)
            for _ in range(n_power_iterations if module.training else 0):
                u[...] = (matrix @ v) / (matrix @ v).norm().maximum(eps)
                v = (u @ matrix) / (u @ matrix).norm().maximum(eps)
        object.__setattr__(module, name, weight / (u.copy() @ (matrix @ v)))
    module.register_forward_pre_hook(compute)
    compute(module, ())
    return module


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
