"""Averages of the weights of a model over steps of training: torch.optim.swa_utils, also as pyops.optim.swa_utils."""
from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from pyops.autograd import Tensor, no_grad
from pyops.nn.layers import _BatchNorm
from pyops.nn.module import Module
from pyops.schedules import SWALR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ['SWALR', 'AveragedModel', 'get_ema_avg_fn', 'get_ema_multi_avg_fn', 'get_swa_avg_fn', 'get_swa_multi_avg_fn',
           'update_bn']


def get_ema_avg_fn(decay: float = 0.999) -> Callable[..., Tensor]:
    """Return avg_fn of a moving average, which moves towards the weights by 1 - decay of the distance."""
    _check_decay(decay)
    return lambda averaged, current, number: averaged * decay + current * (1 - decay)


def get_ema_multi_avg_fn(decay: float = 0.999) -> Callable[..., None]:
    """Return multi_avg_fn of a moving average, as get_ema_avg_fn."""
    return _of_each(get_ema_avg_fn(decay))


def get_swa_avg_fn() -> Callable[..., Tensor]:
    """Return avg_fn of the mean of all weights so far."""
    return lambda averaged, current, number: averaged + (current - averaged) / (int(number) + 1)


def get_swa_multi_avg_fn() -> Callable[..., None]:
    """Return multi_avg_fn of the mean of all weights so far."""
    return _of_each(get_swa_avg_fn())


def _of_each(average: Callable[..., Tensor]) -> Callable[..., None]:
    def average_all(averaged: Iterable[Tensor], current: Iterable[Tensor], number: Any) -> None:
        for one, other in zip(averaged, current, strict=True):
            one[...] = average(one, other, number)
    return average_all


def _check_decay(decay: float) -> None:
    if not 0 <= decay <= 1:
        raise ValueError(f'decay: expected 0 to 1, got {decay}')


class AveragedModel(Module):
    """A copy of a model whose weights are the average of the model's weights at each update_parameters(model).

    model: copied as self.module, which a call runs.  device: accepted as in PyTorch, without effect.
    avg_fn(averaged, current, n_averaged) returns a new average of a Tensor; multi_avg_fn(averaged, current, n_averaged) changes
    a list of averages in place; None: the mean of all.  n_averaged, int32 of shape (), is the number of updates so far.
    use_buffers: average buffers of floats, too; otherwise they are copied.
    """
    n_averaged: Tensor

    def __init__(self, model: Module, device: Any = None, avg_fn: Callable[..., Any] | None = None,
                 multi_avg_fn: Callable[..., None] | None = None, use_buffers: bool = False) -> None:
        if avg_fn is not None and multi_avg_fn is not None:
            raise ValueError('AveragedModel: expected avg_fn or multi_avg_fn, got both')
        self.module = copy.deepcopy(model)
        self.register_buffer('n_averaged', Tensor(np.zeros((), np.int32)))
        self.avg_fn, self.multi_avg_fn, self.use_buffers = avg_fn, multi_avg_fn, use_buffers

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)

    def update_parameters(self, model: Module) -> None:
        """Add the weights of the model to the average."""
        mine, theirs = self.module.parameters(), model.parameters()
        if [one.shape for one in mine] != [one.shape for one in theirs]:
            raise ValueError('AveragedModel: update_parameters: expected the model that was copied, got one of other shapes')
        pairs: list[tuple[Any, Any]] = list(zip(mine, (one.detach() for one in theirs), strict=True))
        buffers = list(zip(self.module.buffers(), model.buffers(), strict=True))
        averaged = [pair for pair in buffers if self.use_buffers and pair[0].dtype.kind == 'f']
        with no_grad():
            pairs += averaged
            if not self.n_averaged.item():
                for one, other in pairs:
                    one[...] = other
            elif self.avg_fn is None:
                average = self.multi_avg_fn or get_swa_multi_avg_fn()
                average([one for one, _ in pairs], [other for _, other in pairs], self.n_averaged)
            else:
                for one, other in pairs:
                    one[...] = self.avg_fn(one, other, self.n_averaged)
            for one, other in buffers:
                if not any(one is done for done, _ in averaged):
                    one[...] = other
            self.n_averaged += 1


def update_bn(loader: Iterable[Any], model: Module, device: Any = None) -> None:
    """Set the running statistics of the batch norms of a model to the means over the batches of a loader, one pass in training
    mode.

    loader: batches of inputs, or tuples and lists of which the first is the input.  device: without effect
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    momenta, was_training = [norm.momentum for norm in norms], [(module, module.training) for module in model.modules()]
    for norm in norms:
        for name, value in (('running_mean', 0), ('running_var', 1), ('num_batches_tracked', 0)):
            getattr(norm, name)[...] = value
        norm.momentum = None
    model.train()
    try:
        with no_grad():
            for batch in loader:
                model(batch[0] if isinstance(batch, tuple | list) else batch)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for module, training in was_training:
            module.training = training
