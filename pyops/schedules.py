"""Schedules of the learning rate on the host, in PyTorch's form: schedule = StepLR(optimizer, 30); schedule.step() once an
epoch.

Each is a factor of the rates that the optimizer's groups had when the schedule was made, as a function of the number of steps.
Schedules that a plan can record are kernels: pyops.optim.decaying_rate and inverse_square_root.
"""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Schedule:
    """Base class.  A subclass defines rate(lr), the learning rate after self.last_epoch steps for an initial rate lr."""

    def __init__(self, optimizer: Any) -> None:
        if not hasattr(optimizer, 'param_groups'):
            raise TypeError(f'{type(self).__name__}: expected an optimizer, got {type(optimizer).__name__}')
        self.optimizer, self.last_epoch = optimizer, 0
        self.base_lrs = [group['lr'] for group in optimizer.param_groups]
        self._set()

    def rate(self, lr: float) -> float:
        raise NotImplementedError(f'{type(self).__name__}.rate(lr)')

    def step(self) -> None:
        """Set the rates for the next epoch, or the next step of training, as the program counts."""
        self.last_epoch += 1
        self._set()

    def _set(self) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group['lr'] = self.rate(lr)

    def get_last_lr(self) -> list[float]:
        """Return the current rate of each group."""
        return [group['lr'] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the initial rates."""
        return {'last_epoch': self.last_epoch, 'base_lrs': list(self.base_lrs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of state_dict(), and set the rates."""
        self.last_epoch, self.base_lrs = state['last_epoch'], list(state['base_lrs'])
        self._set()


class LambdaLR(Schedule):
    """lr * factor(t), for a function of the number of steps t."""

    def __init__(self, optimizer: Any, lr_lambda: Callable[[int], float]) -> None:
        self.factor = lr_lambda
        super().__init__(optimizer)

    def rate(self, lr: float) -> float:
        return lr * self.factor(self.last_epoch)


class StepLR(Schedule):
    """The rate is multiplied by gamma every step_size steps."""

    def __init__(self, optimizer: Any, step_size: int, gamma: float = 0.1) -> None:
        if step_size < 1:
            raise ValueError(f'StepLR: step_size: expected at least 1, got {step_size}')
        self.step_size, self.gamma = step_size, gamma
        super().__init__(optimizer)

    def rate(self, lr: float) -> float:
        return lr * self.gamma ** (self.last_epoch // self.step_size)


class MultiStepLR(Schedule):
    """The rate is multiplied by gamma when each of these numbers of steps is reached."""

    def __init__(self, optimizer: Any, milestones: Sequence[int], gamma: float = 0.1) -> None:
        self.milestones, self.gamma = sorted(milestones), gamma
        super().__init__(optimizer)

    def rate(self, lr: float) -> float:
        return lr * self.gamma ** sum(step <= self.last_epoch for step in self.milestones)


class ExponentialLR(Schedule):
    """The rate is multiplied by gamma in each step."""

    def __init__(self, optimizer: Any, gamma: float) -> None:
        self.gamma = gamma
        super().__init__(optimizer)

    def rate(self, lr: float) -> float:
        return lr * self.gamma ** self.last_epoch


class CosineAnnealingLR(Schedule):
    """Half a cosine wave from lr to eta_min in T_max steps (Loshchilov and Hutter 2016, arXiv:1608.03983)."""

    def __init__(self, optimizer: Any, T_max: int, eta_min: float = 0.0) -> None:
        if T_max < 1:
            raise ValueError(f'CosineAnnealingLR: T_max: expected at least 1, got {T_max}')
        self.T_max, self.eta_min = T_max, eta_min
        super().__init__(optimizer)

    def rate(self, lr: float) -> float:
        return self.eta_min + (lr - self.eta_min) * (1 + math.cos(math.pi * self.last_epoch / self.T_max)) / 2


class LinearLR(Schedule):
    """Warm-up: a factor that rises linearly from start_factor to end_factor in total_iters steps, then stays."""

    def __init__(self, optimizer: Any, start_factor: float = 1 / 3, end_factor: float = 1.0, total_iters: int = 5) -> None:
        if not 0 < start_factor <= 1 or total_iters < 1:
            raise ValueError(f'LinearLR: expected 0 < start_factor <= 1 and total_iters of at least 1, got {start_factor} and '
                             f'{total_iters}')
        self.start_factor, self.end_factor, self.total_iters = start_factor, end_factor, total_iters
        super().__init__(optimizer)

    def rate(self, lr: float) -> float:
        done = min(self.last_epoch, self.total_iters) / self.total_iters
        return lr * (self.start_factor + (self.end_factor - self.start_factor) * done)
