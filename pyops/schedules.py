"""Schedules of the learning rate on the host, in PyTorch's form: schedule = StepLR(optimizer, 30); schedule.step() once an
epoch.  pyops.optim.lr_scheduler is this module.

Each is a factor of the rates that the optimizer's groups had at first, as a function of the number of steps.  Several schedules
of one optimizer multiply their changes, as in PyTorch.
Schedules that a plan can record are kernels: pyops.optim.decaying_rate and inverse_square_root.
"""
from __future__ import annotations

import bisect
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class _Steps:
    """What all schedules share: the rates now, and their state as a dict."""
    optimizer: Any

    def get_last_lr(self) -> list[float]:
        """Return the current rate of each group."""
        return [group['lr'] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the optimizer and functions."""
        return {name: list(value) if isinstance(value, list) else value for name, value in vars(self).items()
                if name != 'optimizer' and not callable(value)} | {'_last_lr': self.get_last_lr()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of state_dict(), and set the rates."""
        vars(self).update({name: value for name, value in state.items() if name != '_last_lr'})
        for group, lr in zip(self.optimizer.param_groups, state['_last_lr'], strict=True):
            group['lr'] = lr
        self._set_momenta()

    def _set_momenta(self) -> None:
        """Set other settings of the groups that the schedule changes: none, unless a subclass does."""


class Schedule(_Steps):
    """Base class.  A subclass defines rate(lr), the learning rate after self.last_epoch steps for an initial rate lr.

    last_epoch: continue after this step, counted from 0, of an optimizer that had a schedule; -1: begin.
    """
    chains = True           # whether a step multiplies the rate that it finds, if another schedule has set it

    def __init__(self, optimizer: Any, last_epoch: int = -1) -> None:
        if not hasattr(optimizer, 'param_groups'):
            raise TypeError(f'{type(self).__name__}: expected an optimizer, got {type(optimizer).__name__}')
        self.optimizer, self.last_epoch = optimizer, last_epoch + 1
        if last_epoch >= 0 and not all('initial_lr' in group for group in optimizer.param_groups):
            raise KeyError(f"{type(self).__name__}: last_epoch: expected 'initial_lr' in each parameter group, which an "
                           'earlier schedule sets')
        self.base_lrs = [group.setdefault('initial_lr', group['lr']) for group in optimizer.param_groups]
        self._set(self.last_epoch)

    def rate(self, lr: float) -> float:
        raise NotImplementedError(f'{type(self).__name__}.rate(lr)')

    def step(self, epoch: float | None = None) -> None:
        """Set the rates for the next epoch, or the next step of training, as the program counts.   epoch: for this one"""
        before = self.last_epoch
        self.last_epoch = before + 1 if epoch is None else epoch              # type: ignore[assignment]
        self._set(before if epoch is None else None)

    def _set(self, before: float | None) -> None:
        """Set the rates.  A rate that is not this schedule's of step `before`, but changed by another, is multiplied by the
        change since then; None: it is replaced."""
        now = self.last_epoch
        for group, lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            value, found = self.rate(lr), group['lr']
            if before is not None and self.chains:
                self.last_epoch = before                        # type: ignore[assignment]
                old = self.rate(lr) if before != now else lr
                self.last_epoch = now
                if old and abs(found - old) > 1e-6 * abs(old):  # rates are stored in float32
                    value = found * value / old
            group['lr'] = value
        self._set_momenta()


class LambdaLR(Schedule):
    """lr * factor(t), for a function of the number of steps t, or a list with a function for each parameter group."""
    chains = False

    def __init__(self, optimizer: Any, lr_lambda: Callable[[int], float] | Sequence[Callable[[int], float]],
                 last_epoch: int = -1) -> None:
        self.factor = lr_lambda
        super().__init__(optimizer, last_epoch)

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name != 'factor'}

    def _set(self, before: float | None) -> None:
        groups = self.optimizer.param_groups
        factors = list(self.factor) if isinstance(self.factor, list | tuple) else [self.factor] * len(groups)
        for group, lr, factor in zip(groups, self.base_lrs, factors, strict=True):
            group['lr'] = lr * factor(self.last_epoch)


class MultiplicativeLR(LambdaLR):
    """The rate is multiplied by factor(t) in step t, for a function of the number of steps t > 0."""

    def _set(self, before: float | None) -> None:
        groups = self.optimizer.param_groups
        factors = list(self.factor) if isinstance(self.factor, list | tuple) else [self.factor] * len(groups)
        for group, factor in zip(groups, factors, strict=True):
            if self.last_epoch > 0:
                group['lr'] = group['lr'] * factor(self.last_epoch)


class StepLR(Schedule):
    """The rate is multiplied by gamma every step_size steps."""

    def __init__(self, optimizer: Any, step_size: int, gamma: float = 0.1, last_epoch: int = -1) -> None:
        if step_size < 1:
            raise ValueError(f'StepLR: step_size: expected at least 1, got {step_size}')
        self.step_size, self.gamma = step_size, gamma
        super().__init__(optimizer, last_epoch)

    def rate(self, lr: float) -> float:
        return lr * self.gamma ** (self.last_epoch // self.step_size)


class MultiStepLR(Schedule):
    """The rate is multiplied by gamma when each of these numbers of steps is reached."""

    def __init__(self, optimizer: Any, milestones: Sequence[int], gamma: float = 0.1, last_epoch: int = -1) -> None:
        self.milestones, self.gamma = sorted(milestones), gamma
        super().__init__(optimizer, last_epoch)

    def rate(self, lr: float) -> float:
        return lr * self.gamma ** sum(step <= self.last_epoch for step in self.milestones)


class ExponentialLR(Schedule):
    """The rate is multiplied by gamma in each step."""

    def __init__(self, optimizer: Any, gamma: float, last_epoch: int = -1) -> None:
        self.gamma = gamma
        super().__init__(optimizer, last_epoch)

    def rate(self, lr: float) -> float:
        return lr * self.gamma ** self.last_epoch


class ConstantLR(Schedule):
    """The rate is multiplied by factor in the first total_iters steps."""

    def __init__(self, optimizer: Any, factor: float = 1 / 3, total_iters: int = 5, last_epoch: int = -1) -> None:
        if not 0 <= factor <= 1:
            raise ValueError(f'ConstantLR: factor: expected 0 to 1, got {factor}')
        self.factor, self.total_iters = factor, total_iters
        super().__init__(optimizer, last_epoch)

    def rate(self, lr: float) -> float:
        return lr * self.factor if self.last_epoch < self.total_iters else lr


class LinearLR(Schedule):
    """Warm-up: a factor that rises linearly from start_factor to end_factor in total_iters steps, then stays."""

    def __init__(self, optimizer: Any, start_factor: float = 1 / 3, end_factor: float = 1.0, total_iters: int = 5,
                 last_epoch: int = -1) -> None:
        if not 0 < start_factor <= 1 or total_iters < 1:
            raise ValueError(f'LinearLR: expected 0 < start_factor <= 1 and total_iters of at least 1, got {start_factor} and '
                             f'{total_iters}')
        self.start_factor, self.end_factor, self.total_iters = start_factor, end_factor, total_iters
        super().__init__(optimizer, last_epoch)

    def rate(self, lr: float) -> float:
        done = min(self.last_epoch, self.total_iters) / self.total_iters
        return lr * (self.start_factor + (self.end_factor - self.start_factor) * done)


class PolynomialLR(Schedule):
    """The rate falls as (1 - t / total_iters)^power, and stays 0."""

    def __init__(self, optimizer: Any, total_iters: int = 5, power: float = 1.0, last_epoch: int = -1) -> None:
        self.total_iters, self.power = total_iters, power
        super().__init__(optimizer, last_epoch)

    def rate(self, lr: float) -> float:
        return lr * (1 - min(self.last_epoch, self.total_iters) / self.total_iters) ** self.power


class CosineAnnealingLR(Schedule):
    """Half a cosine wave from lr to eta_min in T_max steps (Loshchilov and Hutter 2016, arXiv:1608.03983)."""

    def __init__(self, optimizer: Any, T_max: int, eta_min: float = 0.0, last_epoch: int = -1) -> None:
        if T_max < 1:
            raise ValueError(f'CosineAnnealingLR: T_max: expected at least 1, got {T_max}')
        self.T_max, self.eta_min = T_max, eta_min
        super().__init__(optimizer, last_epoch)

    def rate(self, lr: float) -> float:
        return self.eta_min + (lr - self.eta_min) * (1 + math.cos(math.pi * self.last_epoch / self.T_max)) / 2


class CosineAnnealingWarmRestarts(Schedule):
    """CosineAnnealingLR that starts again after T_0 steps, then after T_mult times as many, and so on."""
    chains = False

    def __init__(self, optimizer: Any, T_0: int, T_mult: int = 1, eta_min: float = 0.0, last_epoch: int = -1) -> None:
        if T_0 < 1 or T_mult < 1:
            raise ValueError(f'CosineAnnealingWarmRestarts: expected T_0 and T_mult of at least 1, got {T_0} and {T_mult}')
        self.T_0, self.T_mult, self.eta_min = T_0, T_mult, eta_min
        super().__init__(optimizer, last_epoch)

    def rate(self, lr: float) -> float:
        length, now = self.T_0, float(self.last_epoch)
        if self.T_mult == 1:
            now %= length
        while now >= length:
            now, length = now - length, length * self.T_mult
        return self.eta_min + (lr - self.eta_min) * (1 + math.cos(math.pi * now / length)) / 2


def _between(first: float, last: float, share: float, strategy: str) -> float:
    """Return the number at a share of the way from first to last, along half a cosine wave or a line."""
    return first + (last - first) * ((1 - math.cos(math.pi * share)) / 2 if strategy == 'cos' else share)


class OneCycleLR(Schedule):
    """The rate rises from max_lr / div_factor to max_lr in pct_start of all steps, then falls to that / final_div_factor (Smith
    and Topin 2017, arXiv:1708.07120).

    max_lr: a number, or one for each parameter group.  The number of steps is total_steps, or epochs times steps_per_epoch.
    anneal_strategy: 'cos' or 'linear'.  three_phase: fall to max_lr / div_factor as fast as it rose, then further.
    cycle_momentum: meanwhile momentum, or beta1, falls from max_momentum to base_momentum and rises again.
    """
    chains = False

    def __init__(self, optimizer: Any, max_lr: float | Sequence[float], total_steps: int | None = None,
                 epochs: int | None = None, steps_per_epoch: int | None = None, pct_start: float = 0.3,
                 anneal_strategy: str = 'cos', cycle_momentum: bool = True, base_momentum: float = 0.85,
                 max_momentum: float = 0.95, div_factor: float = 25.0, final_div_factor: float = 1e4,
                 three_phase: bool = False, last_epoch: int = -1) -> None:
        steps = (epochs or 0) * (steps_per_epoch or 0) if total_steps is None else total_steps
        if steps < 1:
            raise ValueError('OneCycleLR: expected total_steps, or epochs and steps_per_epoch, of at least 1, got '
                             f'{total_steps}, {epochs} and {steps_per_epoch}')
        if anneal_strategy not in ('cos', 'linear'):
            raise ValueError(f"OneCycleLR: anneal_strategy: expected 'cos' or 'linear', got {anneal_strategy!r}")
        self.total_steps, self.strategy, self.final = steps, anneal_strategy, final_div_factor
        up = float(pct_start * steps) - 1
        self.ends = [up, 2 * up, steps - 1] if three_phase else [up, steps - 1]
        groups = getattr(optimizer, 'param_groups', ())
        most = list(max_lr) if isinstance(max_lr, list | tuple) else [max_lr] * len(groups)
        self.div_factor = div_factor
        for group, lr in zip(groups, most, strict=True):
            if last_epoch < 0:
                group['initial_lr'] = lr / div_factor
        self.momenta = (base_momentum, max_momentum) if cycle_momentum else None
        super().__init__(optimizer, last_epoch)

    def _at(self, points: Sequence[float]) -> float:
        """Return the number now, on the way through points[0] at the first step and points[i + 1] at ends[i]."""
        if self.last_epoch > self.total_steps:
            raise ValueError(f'OneCycleLR: step {self.last_epoch + 1}: expected at most {self.total_steps} steps')
        phase = min(bisect.bisect_left(self.ends, self.last_epoch), len(self.ends) - 1)
        start = self.ends[phase - 1] if phase else 0.0
        return _between(points[phase], points[phase + 1], (self.last_epoch - start) / (self.ends[phase] - start), self.strategy)

    def rate(self, lr: float) -> float:
        most, least = lr * self.div_factor, lr / self.final
        return self._at([lr, most, lr, least] if len(self.ends) == 3 else [lr, most, least])

    def _set_momenta(self) -> None:
        if self.momenta is not None:
            low, high = self.momenta
            value = self._at([high, low, high, high] if len(self.ends) == 3 else [high, low, high])
            _set_momentum(self.optimizer, value)


def _set_momentum(optimizer: Any, value: float) -> None:
    """Set momentum, or else beta1, of all groups."""
    for group in optimizer.param_groups:
        group['momentum' if 'momentum' in group else 'beta1'] = value


class CyclicLR(Schedule):
    """The rate rises from base_lr to max_lr in step_size_up steps, falls in step_size_down, and so on (Smith 2015,
    arXiv:1506.01186).

    mode: 'triangular'; 'triangular2': each cycle is half as high; 'exp_range': the height is multiplied by gamma each step.
    cycle_momentum: momentum, or beta1, moves against the rate, from max_momentum to base_momentum.
    """
    chains = False

    def __init__(self, optimizer: Any, base_lr: float, max_lr: float, step_size_up: int = 2000,
                 step_size_down: int | None = None, mode: str = 'triangular', gamma: float = 1.0,
                 cycle_momentum: bool = True, base_momentum: float = 0.8, max_momentum: float = 0.9,
                 last_epoch: int = -1) -> None:
        if mode not in ('triangular', 'triangular2', 'exp_range'):
            raise ValueError(f"CyclicLR: mode: expected 'triangular', 'triangular2' or 'exp_range', got {mode!r}")
        self.up, self.down = step_size_up, step_size_up if step_size_down is None else step_size_down
        self.max_lr, self.mode, self.gamma = max_lr, mode, gamma
        self.momenta = (base_momentum, max_momentum) if cycle_momentum else None
        for group in getattr(optimizer, 'param_groups', ()):
            if last_epoch < 0:
                group['initial_lr'] = base_lr
        super().__init__(optimizer, last_epoch)

    def _height(self) -> float:
        cycle, place = divmod(self.last_epoch, self.up + self.down)
        height = place / self.up if place <= self.up else (self.up + self.down - place) / self.down
        return height * {'triangular': 1, 'triangular2': 0.5 ** cycle, 'exp_range': self.gamma ** self.last_epoch}[self.mode]

    def rate(self, lr: float) -> float:
        return lr + (self.max_lr - lr) * self._height()

    def _set_momenta(self) -> None:
        if self.momenta is not None:
            _set_momentum(self.optimizer, self.momenta[1] - (self.momenta[1] - self.momenta[0]) * self._height())


class SequentialLR(_Steps):
    """One schedule after the other: schedulers[i + 1] begins, at its own step 0, when milestones[i] steps are done."""

    def __init__(self, optimizer: Any, schedulers: Sequence[Any], milestones: Sequence[int], last_epoch: int = -1) -> None:
        if len(milestones) != len(schedulers) - 1 or any(one.optimizer is not optimizer for one in schedulers):
            raise ValueError(f'SequentialLR: expected schedules of this optimizer and a milestone between each two, got '
                             f'{len(schedulers)} schedules and {len(milestones)} milestones')
        self.optimizer, self.last_epoch, self._milestones, self._schedulers = optimizer, last_epoch + 1, milestones, schedulers
        self._begin(0)

    def _begin(self, i: int) -> None:
        for group in self.optimizer.param_groups:
            group['lr'] = group['initial_lr']
        self._schedulers[i].step(0)

    def step(self) -> None:
        """Make a step of the schedule whose turn it is."""
        self.last_epoch += 1
        i = bisect.bisect_right(self._milestones, self.last_epoch)
        if i and self._milestones[i - 1] == self.last_epoch:
            self._schedulers[i].step(0)
        else:
            self._schedulers[i].step()

    def state_dict(self) -> dict[str, Any]:
        return {'last_epoch': self.last_epoch, '_last_lr': self.get_last_lr(),
                '_schedulers': [one.state_dict() for one in self._schedulers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for one, own in zip(self._schedulers, state['_schedulers'], strict=True):
            one.load_state_dict(own)
        _Steps.load_state_dict(self, {name: value for name, value in state.items() if name != '_schedulers'})


class ChainedScheduler(_Steps):
    """Several schedules at once; each multiplies the rate."""

    def __init__(self, schedulers: Sequence[Any], optimizer: Any = None) -> None:
        self.optimizer, self._schedulers = schedulers[0].optimizer, schedulers

    def step(self) -> None:
        """Make a step of all schedules."""
        for one in self._schedulers:
            one.step()

    state_dict, load_state_dict = SequentialLR.state_dict, SequentialLR.load_state_dict         # type: ignore[assignment]
    last_epoch = 0


class ReduceLROnPlateau(_Steps):
    """The rate is multiplied by factor when a measure, given to step(measure), has not improved for `patience` steps.

    mode: 'min': lower is better; 'max'.  threshold: the least improvement, a share of the best with threshold_mode 'rel', a
    difference with 'abs'.  cooldown: steps after a reduction that do not count.  min_lr: the lowest rate, or one per group.
    eps: the least change of a rate.
    """

    def __init__(self, optimizer: Any, mode: str = 'min', factor: float = 0.1, patience: int = 10, threshold: float = 1e-4,
                 threshold_mode: str = 'rel', cooldown: int = 0, min_lr: float | Sequence[float] = 0.0,
                 eps: float = 1e-8) -> None:
        if mode not in ('min', 'max') or threshold_mode not in ('rel', 'abs') or not factor < 1:
            raise ValueError("ReduceLROnPlateau: expected mode 'min' or 'max', threshold_mode 'rel' or 'abs' and a factor "
                             f'below 1, got {mode!r}, {threshold_mode!r} and {factor}')
        self.optimizer, self.mode, self.factor, self.patience = optimizer, mode, factor, patience
        self.threshold, self.threshold_mode, self.cooldown, self.eps = threshold, threshold_mode, cooldown, eps
        self.min_lrs = list(min_lr) if isinstance(min_lr, list | tuple) else [min_lr] * len(optimizer.param_groups)
        self.best, self.num_bad_epochs, self.cooldown_counter = (math.inf if mode == 'min' else -math.inf), 0, 0
        self.last_epoch = 0

    def is_better(self, measure: float) -> bool:
        """Return whether a measure is better than the best so far."""
        sign = 1 if self.mode == 'min' else -1
        change = sign * self.threshold
        return sign * measure < sign * (self.best * (1 - change) if self.threshold_mode == 'rel' else self.best - change)

    def step(self, metrics: Any) -> None:
        """Compare a measure with the best so far, and reduce the rates if it is time."""
        measure = float(metrics)
        self.last_epoch += 1
        if self.is_better(measure):
            self.best, self.num_bad_epochs = measure, 0
        else:
            self.num_bad_epochs += 1
        if self.cooldown_counter:
            self.cooldown_counter, self.num_bad_epochs = self.cooldown_counter - 1, 0
        if self.num_bad_epochs > self.patience:
            for group, least in zip(self.optimizer.param_groups, self.min_lrs, strict=True):
                lr = max(group['lr'] * self.factor, least)
                if group['lr'] - lr > self.eps:
                    group['lr'] = lr
            self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0


LRScheduler = Schedule          # PyTorch's name of the base class


class SWALR(_Steps):
    """The rate moves from its present value to swa_lr within anneal_epochs steps, for averaged weights (Izmailov et al. 2018,
    arXiv:1803.05407).

    swa_lr: a number, or a list with one for each parameter group.  anneal_strategy: 'cos' or 'linear'
    """

    def __init__(self, optimizer: Any, swa_lr: float | Sequence[float], anneal_epochs: int = 10, anneal_strategy: str = 'cos',
                 last_epoch: int = -1) -> None:
        groups = optimizer.param_groups
        if anneal_strategy not in ('cos', 'linear'):
            raise ValueError(f"SWALR: anneal_strategy: expected 'cos' or 'linear', got {anneal_strategy!r}")
        if not isinstance(anneal_epochs, int) or anneal_epochs < 0:
            raise ValueError(f'SWALR: anneal_epochs: expected a whole number of at least 0, got {anneal_epochs}')
        self.swa_lrs = list(swa_lr) if isinstance(swa_lr, list | tuple) else [swa_lr] * len(groups)
        if len(self.swa_lrs) != len(groups):
            raise ValueError(f'SWALR: swa_lr: expected one number, or {len(groups)}, one for each group, got {swa_lr}')
        self.optimizer, self.last_epoch = optimizer, last_epoch + 1
        self.anneal_epochs, self.anneal_strategy = anneal_epochs, anneal_strategy

    def _share(self, step: int) -> float:
        """Return the weight of swa_lr in step `step`."""
        t = max(0.0, min(1.0, step / max(1, self.anneal_epochs)))
        return t if self.anneal_strategy == 'linear' else (1 - math.cos(math.pi * t)) / 2

    def step(self) -> None:
        """Set the rates for the next step."""
        self.last_epoch += 1
        now = max(1, self.last_epoch) if self.anneal_epochs == 0 else self.last_epoch
        before, share = self._share(now - 1), self._share(now)
        for group, end in zip(self.optimizer.param_groups, self.swa_lrs, strict=True):
            start = end if before == 1 else (group['lr'] - before * end) / (1 - before)
            group['lr'] = end * share + start * (1 - share)
