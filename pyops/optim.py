"""Optimisers: Adam (Kingma and Ba 2014, arXiv:1412.6980), AdamW, Muon, SGD with momentum, and others that are formulas of array
ops; schedules of the learning rate.

All parameters are updated in one call, with gradients clipped by their global norm.  Schedules that a plan can record are
functions here; schedules on the host, in PyTorch's form, are in pyops/schedules.py.
"""
from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import itertools
import math
import numbers
import sys
import types
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from pyops import backend, lbfgs, ndarray, schedules
from pyops.backend import library, state
from pyops.backend.kernels import Kernel, declare
from pyops.hooks import Hook
from pyops.params import Parameters
from pyops.schedules import (  # noqa: F401  names of this module
    SWALR,
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pyops.autograd import Tensor
    from pyops.typing import Array


# PyTorch's name, also for `from pyops.optim.lr_scheduler import StepLR`
lr_scheduler = sys.modules[f'{__name__}.lr_scheduler'] = schedules


class _Later(types.ModuleType):
    """pyops.optim.swa_utils: the names of pyops.nn.averages, a module of models, imported on first use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)
        return getattr(importlib.import_module('pyops.nn.averages'), name)


swa_utils = sys.modules[f'{__name__}.swa_utils'] = _Later(f'{__name__}.swa_utils')


class Entry(NamedTuple):
    """The row of a step in a log: see pyops.fit.History."""
    log: Array                  # (capacity, 3): loss, weight, norm
    written: Array              # (1,) int64: number of steps so far
    loss: Array                 # (1,)
    weight: Array | None        # (1,) int32
    capacity: int


class Group:
    """A group of parameters with settings of its own, which override the optimizer's: group['lr'], group['weight_decay'], ...

    group['params'] is the list of its Tensors, None for a Parameters.  Assigning a setting changes it from the next step on.
    """

    def __init__(self, optimizer: Optimizer, tensors: list[Any] | None) -> None:
        self._optimizer: Optimizer = optimizer
        self._own: dict[str, Any] = {}
        self.tensors = tensors
        # array of one element, which kernels read; the first group's is the optimizer's
        self.rate = backend.put(np.array([optimizer.lr], np.float32)) if optimizer.param_groups else optimizer.rate
        self.initial_lr: float | None = None            # the rate that schedules start from, once there is one
        self.has_own_rate = False                       # whether the group was given an lr: recorded schedules leave it alone

    def __getitem__(self, name: str) -> Any:
        if name in self._own:
            return self._own[name]
        if name in self._optimizer.settings:
            return getattr(self._optimizer, name)
        if name == 'params':
            return self.tensors
        if name == 'lr':
            return _number(self.rate)
        if name == 'betas' and 'beta1' in self._optimizer.settings:
            return self['beta1'], self['beta2']
        if name == 'initial_lr' and self.initial_lr is not None:
            return self.initial_lr
        raise KeyError(name)

    def __setitem__(self, name: str, value: Any) -> None:
        if name == 'betas':
            self['beta1'], self['beta2'] = value
        elif name == 'lr':
            self._optimizer._check(lr=value)
            self.rate[...] = value
        elif name == 'initial_lr':
            self._optimizer._check(initial_lr=value)
            self.initial_lr = value
        elif name in self._optimizer.settings:
            self._optimizer._check_setting(name, value)
            self._own[name] = value
        else:
            raise TypeError(f'{type(self._optimizer).__name__}: {name}: unknown setting of a parameter group, expected one of '
                            f'{", ".join(self.keys())}')

    def keys(self) -> list[str]:
        """Return the names of the settings, and 'params'."""
        return ['params', 'lr', *self._optimizer.settings]

    def settings(self) -> dict[str, Any]:
        """Return {name: value} of the settings without 'params'."""
        return {name: self[name] for name in self.keys()[1:]}

    def __contains__(self, name: str) -> bool:
        return name in self.keys() or name == 'initial_lr' and self.initial_lr is not None

    def setdefault(self, name: str, default: Any) -> Any:
        """Return a setting; set it to `default` first if there is none."""
        if name not in self:
            self[name] = default
        return self[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default

    def __repr__(self) -> str:
        return f'Group({self.settings()})'


def _number(array: Array) -> float:
    """Return the element of an array of one float32 as the shortest number that rounds to it: 0.1, not 0.10000000149."""
    return float(str(backend.get(array).reshape(())[()]))


def _with_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate Optimizer.step: call the hooks that register_step_pre_hook and register_step_post_hook registered."""
    @functools.wraps(step)
    def wrapper(*args: Any, **named: Any) -> Any:
        if args[0]._step_hooks is None:
            return step(*args, **named)
        before, after = args[0]._step_hooks
        for hook in list(before.values()):
            changed = hook(args[0], args, named)
            if changed is not None:
                args, named = changed
        result = step(*args, **named)
        for hook in list(after.values()):
            hook(args[0], args, named)
        return result
    return wrapper


class Optimizer:
    """Base class.  Learning rate, step count and gradient norm are arrays of one element, so that kernels can read them.

    params: a pyops.params.Parameters, or Tensors, such as module.parameters(), or dicts: {'params': Tensors, 'lr': 0.1, ...}
    with settings for these Tensors alone; param_groups lists the groups.  Tensors that make up a whole flat buffer are
    updated in one call, any others in one call each.  A Tensor without a gradient is not updated.
    lr: learning rate.  The order of the arguments is PyTorch's; those that it lacks, such as max_norm, are given by name.
    max_norm: gradients with a larger global norm are scaled down to it during the update; None: no clipping.  The stored
    gradients do not change.
    weight_decay: weight_decay times the parameter is added to its (clipped) gradient.
    maximize: step in the other direction.  foreach, fused, capturable, differentiable: accepted as in PyTorch, without effect.
    """
    maximize = False
    _step_hooks: tuple[dict[int, Any], dict[int, Any]] | None = None        # before and after a step
    MOMENTS: tuple[str, ...] = ()       # state per parameter: the names of its buffers in Parameters
    settings: tuple[str, ...] = ('weight_decay',)       # attributes that a parameter group may override, besides lr
    _update: Callable[..., None]        # a subclass updates one unit: (unit, group, norm or None, *moments)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if '__init__' in vars(cls):
            cls.__init__ = _accepts_torch_options(cls.__init__)         # type: ignore[method-assign]

    def __init__(self, params: Parameters | Iterable[Tensor], lr: float, max_norm: float | None, weight_decay: float) -> None:
        self._check(lr=lr, weight_decay=weight_decay, max_norm=max_norm or 0)
        self.max_norm, self.weight_decay = max_norm, weight_decay
        self.rate = backend.put(np.array([lr], np.float32))     # the learning rate as kernels read it
        self.param_groups: list[Group] = []
        self.count = backend.zeros(1, np.int64)         # number of steps so far
        self.norm = backend.zeros(1)                    # norm of the last gradient before clipping; 0 without max_norm
        self.params = params if isinstance(params, Parameters) else None
        self._units: list[tuple[Any, list[Any]]]
        self._own: dict[str, Any] = {}
        self._tensors: list[Any] = []
        self._together: list[Any] = []
        self._homes: set[int] = set()                   # ids of the Parameters that are units
        self._units, self._groups = [], []
        if self.params is not None:
            unit = _own_share(self.params)
            moments = [getattr(params, name, None) for name in self.MOMENTS]
            self._own = {name: backend.zeros(unit.values.size, unit.values.dtype)
                         for name, moment in zip(self.MOMENTS, moments, strict=True) if moment is None}
            # a Parameters has Adam's moments
            self._units = [(unit, [self._own.get(name, moment) for name, moment in zip(self.MOMENTS, moments, strict=True)])]
            self.param_groups.append(Group(self, None))
            self._groups = [self.param_groups[0]]
        else:
            # set by _apply_groups, when the subclass has all its settings
            self._pending = [self._add(spec) for spec in _group_specs(params)]
            self._name_own()
        self.histories: Any = None      # AmaxHistories of operands with delayed scaling (pyops.quantization)
        self.average: Any = None        # moving average of params.values, after average_parameters()
        self.decay: float = 0.0
        if self.params is not None and self.params.shares is not None:
            self._work, self._work_of_share = self.params.shares.norm_work()
        else:
            self._work = backend.work('grad_norm', max(len(self._units), *(unit.values.size for unit, _ in self._units)))
            self._work_of_share = self._work

    def _add(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Add a parameter group of Tensors, and return its settings."""
        settings = dict(spec)
        tensors = _unique(settings.pop('params'))
        if any(tensor is other for tensor in tensors for other in self._tensors):
            raise ValueError('optimizer: a Tensor is in two parameter groups; give each Tensor once')
        units = update_units(tensors)
        if any(getattr(unit, 'shares', None) is not None for unit in units):
            raise TypeError(f'{type(self).__name__}: ranks share the moments of these parameters, got Tensors; pass the '
                            'Parameters that was given to pyops.distributed.shard')
        self._tensors += tensors
        self.param_groups.append(Group(self, tensors))
        self._units += [(unit, [backend.zeros(unit.values.size, unit.values.dtype) for _ in self.MOMENTS]) for unit in units]
        self._groups += [self.param_groups[-1]] * len(units)
        whole = {id(unit) for unit in units}
        self._together += [tensor for tensor in tensors if id(getattr(tensor, 'home', None)) in whole]
        self._homes |= whole
        return settings

    def _name_own(self) -> None:
        """Name the arrays of the units."""
        self._own = {f'{name}.{i}': moment for i, (_, moments) in enumerate(self._units)
                     for name, moment in zip(self.MOMENTS, moments, strict=True)}
        self._own['norms'] = self._norms = backend.zeros(len(self._units))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group {'params': Tensors, 'lr': 0.1, ...}.  TypeError for an optimizer of a Parameters."""
        if self.params is not None:
            raise TypeError(f'{type(self).__name__}: add_param_group: expected an optimizer of Tensors, got one of Parameters')
        given = param_group['params']
        self._pending = [{}] * len(self.param_groups) + [
            self._add({**param_group, 'params': [given] if hasattr(given, 'requires_grad') else given})]
        self._name_own()
        self._work = self._work_of_share = backend.work('grad_norm', max(len(self._units), *(unit.values.size
                                                                                            for unit, _ in self._units)))
        self._apply_groups()

    _pending: Sequence[dict[str, Any]] = ()
    _recorded: tuple[Any, Any, Any] | None = None       # key, Calls of a step, the arrays that they use; see _record

    def _apply_groups(self) -> None:
        """Set the settings of the parameter groups; a subclass calls it at the end of __init__."""
        for group, settings in zip(self.param_groups, self._pending, strict=False):
            group.has_own_rate |= 'lr' in settings
            for name, value in settings.items():
                group[name] = value
        self._own |= {f'lr.{i}': group.rate for i, group in enumerate(self.param_groups) if i}

    @property
    def defaults(self) -> dict[str, Any]:
        """The settings of a group that has none of its own."""
        return {'lr': self.lr, **{name: getattr(self, name) for name in self.settings}}

    def __repr__(self) -> str:
        lines = [f'{type(self).__name__} (']
        for i, group in enumerate(self.param_groups):
            lines += [f'Parameter Group {i}', *(f'    {name}: {value}' for name, value in group.settings().items())]
        return '\n'.join([*lines, ')'])

    def _check(self, below: float = math.inf, **settings: Any) -> None:
        for name, value in settings.items():
            if not isinstance(value, numbers.Real):
                raise TypeError(f'{type(self).__name__}: {name}: expected a number, got {type(value).__name__}')
            if not 0 <= value < below:          # type: ignore[operator]
                raise ValueError(f'{type(self).__name__}: {name}: expected 0 <= {name} < {below}, got {value}')

    def _check_setting(self, name: str, value: Any) -> None:
        if not isinstance(value, bool):
            self._check(1 if name in ('beta1', 'beta2', 'rho') else math.inf, **{name: value})

    @property
    def lr(self) -> float:
        """Learning rate, of the first parameter group.  Assigning a number sets it for all groups, in `rate` and the rates of
        the groups: arrays of one element that kernels read."""
        return _number(self.rate)

    @lr.setter
    def lr(self, value: float) -> None:
        for group in self.param_groups:
            group.rate[...] = value

    @_with_hooks
    def step(self, closure: Callable[[], Any] | None = None, *, entry: Entry | None = None) -> Any:
        """Update all parameters once.  If ranks share the moments (pyops.distributed.shard), each updates its share and gets
        the others.   closure: called first, to compute the gradients; its result, the loss, is returned
        entry: appended to a log, with the norm of the gradient, before the update (pyops.fit.History.entry)"""
        loss = closure() if closure is not None else None
        for tensor in self._together:                   # Adam's m and v would still move its value
            if not tensor.requires_grad:
                raise RuntimeError(f'optimizer: requires_grad of {tensor.name} was switched off later; '
                                   'create a new optimizer')
            if id(tensor.home) not in self._homes:
                raise RuntimeError(f'optimizer: {tensor.name} was converted to {tensor.dtype} later; create a new optimizer')
        key = None if entry else self._key()
        if key is None:
            self._launch(entry)
        elif self._recorded is None or self._recorded[0] != key:
            self._record(key)
        else:
            self._recorded[1].run()
        if self.histories is not None:
            self.histories.advance()
        for tensor in self._tensors:
            tensor.array.buffer.version += 1            # backward detects that saved values have changed
        return loss

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> Hook:
        """Call hook(optimizer, args, kwargs) before each step; args has the optimizer, then the arguments of step.  What it
        returns, unless None, replaces (args, kwargs).  Return a Hook, whose remove() ends this.  A replayed plan calls none."""
        return Hook(self._all_hooks()[0], hook)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> Hook:
        """Call hook(optimizer, args, kwargs) after each step.  Otherwise as register_step_pre_hook."""
        return Hook(self._all_hooks()[1], hook)

    def _all_hooks(self) -> tuple[dict[int, Any], dict[int, Any]]:
        if self._step_hooks is None:
            self._step_hooks = {}, {}
        return self._step_hooks

    def _launch(self, entry: Entry | None = None) -> None:
        """Launch the kernels of a step."""
        ready = [(unit, group, moments) for (unit, moments), group in zip(self._units, self._groups, strict=True)
                 if unit.grads is not None]
        shares = None if self.params is None else self.params.shares
        if shares is not None:
            ready = [one for one in ready if one[0].values.size]        # with more ranks than chunks, some shares are empty
        is_logged = bool(self.max_norm and ready and entry and shares is None)      # by the launch that finds the norm
        if self.max_norm:
            if ready:
                self._find_norm([unit for unit, *_ in ready], entry if is_logged else None)
            if shares is not None:
                shares.find_norm(self.norm, self._work)
        if not is_logged:
            backend.launch('increment', self.count)
            if entry:
                backend.launch('log_step', entry.log, entry.written, entry.loss, entry.weight, self.norm, 1, entry.capacity)
        for unit, group, moments in ready:
            if self.maximize:                           # negated twice, which is exact
                _negate(unit.grads)
            self._update(unit, group, self.norm if self.max_norm else None, *moments)
            if self.maximize:
                _negate(unit.grads)
        if shares is not None and self.params is not None:
            shares.gather(self.params.values)
        if self.average is not None and self.params is not None:
            backend.launch('ema', self.average, self.params.values, self.count, self.average.size, self.decay)

    def _key(self) -> Any:
        """Return everything that the arguments of the kernels of a step depend on, for a step that _record may record: of an
        optimizer of this module, over flat buffers in host memory, without intermediate results.  Else None."""
        shares = None if self.params is None else self.params.shares        # ranks exchange numbers between the launches
        if self.maximize or len(self.MOMENTS) > 2:
            return None
        if shares or type(self) not in _WITHOUT_TEMPORARIES or state.on_launch or not backend.current_device().is_host:
            return None
        key: list[Any] = [self.max_norm, self.decay, id(self.average), id(self.count), id(self.norm)]
        for (unit, moments), group in zip(self._units, self._groups, strict=True):
            values = unit.values
            if type(unit) is not Parameters or type(values) is not np.ndarray or values.dtype is not ndarray.FLOAT:
                return None
            key += id(values), id(unit.grads), id(unit.touched), id(group.rate), *map(id, moments)
            own = group._own
            for name in self.settings:
                key.append(own[name] if name in own else getattr(self, name))
        return key

    def _record(self, key: Any) -> None:
        """Launch the kernels of a step and keep the calls.  Later steps with the same arrays and settings replay them: for a
        small model the Python code of the launches takes longer than the kernels."""
        launches: list[Any] = []

        def listen(name: str, values: Any) -> bool:
            launches.append((name, values))
            return True
        with backend.hooks(listen=listen):
            self._launch()

        def argument(value: Any) -> Any:
            return 0 if value is None else backend.location(value) if backend.is_array(value) else value
        calls = backend.HOST.calls([(name, list(map(argument, values))) for name, values in launches])
        self._recorded = key, calls, launches

    def __getstate__(self) -> dict[str, Any]:
        """Support copy: recorded calls refer to this optimizer's memory, and hooks are this optimizer's, as in PyTorch."""
        return vars(self) | {'_recorded': None, '_step_hooks': None}

    def __copy__(self) -> Self:
        """Return an optimizer of the same arrays."""
        twin = object.__new__(type(self))
        vars(twin).update(self.__getstate__())
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Support deepcopy and pickle for an optimizer of Tensors: the result updates the Tensors that are copied with it, such
        as the model's in copy.deepcopy((model, optimizer))."""
        if self.params is not None:
            return super().__reduce_ex__(protocol)
        settings = {name: value for name, value in vars(self).items() if name not in _OF_THIS_OPTIMIZER}
        groups = [(group.tensors, dict(group._own), group['lr'], group.initial_lr, group.has_own_rate)
                  for group in self.param_groups]
        moments = [[np.array(backend.get(moment)) for moment in self._moments_of(tensor)] for tensor in self._tensors]
        return _restored, (type(self), settings, groups, moments, int(backend.get(self.count)[0]))

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """{Tensor: {name: moment}}: the moments by PyTorch's names, arrays over the same memory, and the number of steps.

        Empty before the first step, and for an optimizer of a Parameters.
        """
        step = int(backend.get(self.count)[0])
        return {tensor: {'step': step, **{self._torch_name(name): ndarray.as_ndarray(moment) for name, moment in
                                          zip(self.MOMENTS, self._moments_of(tensor), strict=True)}}
                for tensor in self._tensors if step}

    def _torch_name(self, name: str) -> str:
        names = TORCH_MOMENTS.get(name, (name,))
        return names[-1] if isinstance(self, SGD) and name == 'm' or isinstance(self, Adamax) and name == 'v' or \
            isinstance(self, Adagrad) else names[0]

    def _moments_of(self, tensor: Any) -> list[Any]:
        """Return the moments of a Tensor, in its shape: views of its unit's moments."""
        return self._views(tensor, [moments for _, moments in self._units])

    def _moments_in(self, state: dict[str, Any], tensor: Any) -> list[Any]:
        """Return the same of the arrays in a state_dict."""
        return self._views(tensor, [[state[f'{name}.{i}'] for name in self.MOMENTS] for i in range(len(self._units))])

    def _views(self, tensor: Any, of_units: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the views for a Tensor of the flat arrays of its unit."""
        home: Any = getattr(tensor, 'home', None)
        for (unit, _), moments in zip(self._units, of_units, strict=True):
            own: Any = getattr(unit, 'tensor', None)
            if unit is home:
                return [home.view(moment, tensor.name) for moment in moments]
            if own is tensor:
                return [moment.reshape(tensor.shape) for moment in moments]
        raise KeyError(tensor.name)

    def _find_norm(self, units: Sequence[Any], entry: Entry | None) -> None:
        """Compute the global norm.   entry: also count the step and append this entry, in the same launch"""
        norms = None if len(units) == 1 else self._norms
        _find_norm(units, self.norm, norms, self._work_of_share, entry and (self.count, entry))

    def average_parameters(self, decay: float) -> None:
        """From now on keep an exponential moving average of the parameters in `average`: each step moves it towards them by
        1 - decay of the distance, and by more in the first steps (see docs/optimiser.md).  Requires a Parameters."""
        self._check(1, decay=decay)
        if self.params is None or _is_double(self.params):
            raise TypeError(f'{type(self).__name__}: average_parameters: expected an optimizer of a Parameters, got '
                            f'{"Tensors" if self.params is None else "float64 parameters"}')
        self.decay, self.average = decay, backend.empty(self.params.values.shape)
        backend.copy(self.average, self.params.values)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Within this context the parameters have the values of their average, if there is one."""
        if self.average is None or self.params is None:
            yield
            return
        trained = backend.empty(self.average.shape)
        backend.copy(trained, self.params.values)
        backend.copy(self.params.values, self.average)
        try:
            yield
        finally:
            backend.copy(self.params.values, trained)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients.  Call it before each backward pass.  set_to_none: accepted as in PyTorch, without effect."""
        if self.params is not None:
            self.params.zero_grads()
            return
        for unit, _ in self._units:
            unit.zero_grads()

    reset_grad = zero_grad

    def clip_grad_norm(self, max_norm: float = 0.25) -> ndarray.NDArray:
        """Scale the gradients so that their global norm is at most max_norm, and return the norm before; see clip_grad_norm_.
        TypeError for an optimizer of a Parameters: max_norm= of __init__ clips there."""
        if self.params is not None:
            raise TypeError(f'{type(self).__name__}: clip_grad_norm: expected an optimizer of Tensors, got one of Parameters')
        return clip_grad_norm_(self._tensors, max_norm)

    def arrays(self) -> dict[str, Array]:
        """Return {name: array} of the optimiser's state, for a plan."""
        average = {} if self.average is None else dict(average=self.average)
        histories = {} if self.histories is None else self.histories.arrays()
        return dict(lr=self.rate, step=self.count, norm=self.norm, norm_work=self._work) | self._own | average | histories

    def state_dict(self) -> dict[str, Any]:
        """Return copies of everything that a later optimizer needs to continue.

        For an optimizer of Tensors, in PyTorch's form: 'state' has for the number of each Tensor the number of steps and its
        moments by PyTorch's names, NDArrays, and is empty before the first step; 'param_groups' has the settings of each group,
        and the numbers of its Tensors as 'params'.  For one of a Parameters: 'step', 'state' with flat moments and, if there
        are any, the average of the parameters and the amax histories, and 'param_groups'.
        """
        if self.params is not None:
            return self._flat_state()
        number, groups = itertools.count(), []
        for group in self.param_groups:
            settings = group.settings()
            if 'beta1' in settings:
                settings['betas'] = settings.pop('beta1'), settings.pop('beta2')
            if group.initial_lr is not None:
                settings['initial_lr'] = group.initial_lr
            groups.append({**settings, 'params': [next(number) for _ in group.tensors or ()]})
        state = {i: {name: value.copy() if isinstance(value, ndarray.NDArray) else value for name, value in one.items()}
                 for i, one in enumerate(self.state.values())}
        return {'state': state, 'param_groups': groups}

    def _flat_state(self) -> dict[str, Any]:
        """Return copies of the step, the moments of each unit, and the settings of each group."""
        moments = {f'{name}.{i}': np.array(backend.get(moment)) for i, (_, moments) in enumerate(self._units)
                   for name, moment in zip(self.MOMENTS, moments, strict=True)}
        average = {} if self.average is None else {'average': np.array(backend.get(self.average))}
        histories = {} if self.histories is None else {'amax_history': np.array(backend.get(self.histories.history))}
        return {'step': int(backend.get(self.count)[0]), 'state': moments | average | histories,
                'param_groups': [group.settings() for group in self.param_groups]}

    def _from_torch(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state in PyTorch's form in the form of _flat_state()."""
        mine, found, numbers = self._flat_state(), state['state'], itertools.count()
        sizes = [[len(group['params']) for group in groups] for groups in (state['param_groups'], self.param_groups)
                 if all(group.get('params') is not None for group in groups)]
        if len(sizes) == 2 and sum(sizes[0]) != sum(sizes[1]):
            raise ValueError(f'{type(self).__name__}: load_state_dict: expected groups of {sizes[1]} Tensors, got {sizes[0]}; '
                             'the parameters differ')
        steps = {int(np.asarray(one['step'])) for one in found.values() if 'step' in one}
        if len(steps) > 1:
            raise ValueError(f'{type(self).__name__}: load_state_dict: expected one number of steps, got {sorted(steps)}')
        for tensor in self._tensors:
            one = found.get(next(numbers), {})
            for name, place in zip(self.MOMENTS, self._moments_in(mine['state'], tensor), strict=True):
                key = next((key for key in TORCH_MOMENTS.get(name, (name,)) if one.get(key) is not None), None)
                value = place * 0 if key is None else np.asarray(one[key])
                if value.shape != place.shape:
                    raise ValueError(f'{type(self).__name__}: load_state_dict: {key}: expected shape {place.shape}, got '
                                     f'{value.shape}; the parameters differ')
                place[...] = value
        groups = [{name: value for name, value in group.items()
                   if name in ('lr', 'betas', 'initial_lr') or name in self.settings} for group in state['param_groups']]
        # PyTorch's SGD counts no steps; here the first step is the one without a momentum
        step = steps.pop() if steps else int(any('momentum_buffer' in one for one in found.values()))
        return {**mine, 'step': step, 'param_groups': groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy a state from state_dict(), also in its earlier form of flat moments, or from PyTorch's optimizer of the same
        class over the same parameters: all of it or, if a name or a shape differs, none."""
        if any(isinstance(key, int) for key in state['state']) or \
                state['param_groups'] and 'params' in state['param_groups'][0]:
            state = self._from_torch(state)
        mine = self._flat_state()
        given, groups = state['state'], state['param_groups']
        if set(given) != set(mine['state']) or len(groups) != len(self.param_groups):
            raise ValueError(f'{type(self).__name__}: load_state_dict: expected {sorted(mine["state"])} and '
                             f'{len(self.param_groups)} parameter groups, got {sorted(given)} and {len(groups)}')
        for name, value in mine['state'].items():
            if np.shape(given[name]) != value.shape:
                raise ValueError(f'{type(self).__name__}: load_state_dict: {name}: expected shape {value.shape}, got '
                                 f'{np.shape(given[name])}; the parameters differ')
        places = {f'{name}.{i}': moment for i, (_, moments) in enumerate(self._units)
                  for name, moment in zip(self.MOMENTS, moments, strict=True)} | {
                      'average': self.average, 'amax_history': self.histories and self.histories.history}
        for name, value in given.items():
            places[name][...] = np.asarray(value, places[name].dtype)
        self.count[...] = state['step']
        for group, settings in zip(self.param_groups, groups, strict=True):
            for name, value in settings.items():
                group[name] = value

    def clipped(self) -> bool:
        """Return whether the last step clipped its gradient."""
        return self.clips(float(self.norm[0]))

    def clips(self, norm: float) -> bool:
        """Return whether a gradient of this norm is clipped."""
        return bool(self.max_norm and norm > self.max_norm)


# moment -> PyTorch's names of it
TORCH_MOMENTS = {
    'm': ('exp_avg', 'momentum_buffer'), 'v': ('exp_avg_sq', 'exp_inf'), 'most': ('max_exp_avg_sq',),
    'square': ('square_avg', 'sum'), 'velocity': ('momentum_buffer',), 'mean_gradient': ('grad_avg',), 'moved': ('acc_delta',),
    'average': ('ax',), 'last': ('prev',), 'size': ('step_size',)}

# attributes that __init__ derives from the Tensors, or that are state
_OF_THIS_OPTIMIZER = frozenset((
    'rate param_groups count norm params histories average decay _units _own _tensors _together _homes _groups _pending _work '
    '_work_of_share _norms _recorded _parts _step_hooks').split())


def _restored(kind: type[Optimizer], settings: dict[str, Any], groups: Sequence[Any], moments: Sequence[Any],
              step: int) -> Optimizer:
    """Return the optimizer that Optimizer.__reduce_ex__ describes."""
    optimizer = object.__new__(kind)
    vars(optimizer).update(settings)
    for tensors, *_ in groups:
        for tensor in tensors:
            tensor.array                                # noqa: B018   a Parameter gets its memory
    specs: list[Any] = [{'params': tensors} for tensors, *_ in groups]
    Optimizer.__init__(optimizer, specs, groups[0][2], settings['max_norm'], settings['weight_decay'])
    optimizer._apply_groups()
    for group, (_, own, rate, initial, has_own) in zip(optimizer.param_groups, groups, strict=True):
        group.rate[...], group.initial_lr, group.has_own_rate = rate, initial, has_own
        group._own.update(own)
    for tensor, values in zip(optimizer._tensors, moments, strict=True):
        for moment, value in zip(optimizer._moments_of(tensor), values, strict=True):
            moment[...] = value
    optimizer.count[...] = step
    if isinstance(optimizer, Muon):
        optimizer._find_matrices()
    return optimizer


def _accepts_torch_options(init: Callable[..., None]) -> Callable[..., None]:
    """Decorate __init__ of an optimizer: accept maximize, and PyTorch's options that have no effect here."""
    @functools.wraps(init)
    def wrapper(self: Optimizer, *args: Any, maximize: bool = False, foreach: bool | None = None, fused: bool | None = None,
                capturable: bool = False, differentiable: bool = False, **named: Any) -> None:
        self.maximize = self.maximize or maximize           # a base class sets it again
        init(self, *args, **named)
    return wrapper


def _negate(array: Array) -> None:
    """Negate an array in place."""
    view = ndarray.as_ndarray(array)
    view[...] = -view


def _two_betas(who: str, beta1: float | None, beta2: float | None, betas: Sequence[float] | None) -> tuple[float, float]:
    """Return beta1 and beta2, given as such or as a pair; 0.9 and 0.999 if neither is given."""
    if betas is not None:
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise TypeError(f'{who}: betas: expected two numbers, such as (0.9, 0.999), got {betas!r}')
        if (beta1, beta2) != (None, None):
            raise TypeError(f'{who}: got betas and also beta1 or beta2; give one of the two forms')
        beta1, beta2 = betas
    return 0.9 if beta1 is None else beta1, 0.999 if beta2 is None else beta2


class Adam(Optimizer):
    """Adam with bias correction; see docs/optimiser.md.  Give beta1 and beta2, or both as betas (PyTorch's form).

    amsgrad: divide by the largest second moment so far (Reddi et al. 2018).  Such a step is array ops, which no plan records.
    decoupled_weight_decay: as AdamW
    """
    MOMENTS: tuple[str, ...] = ('m', 'v')
    settings: tuple[str, ...] = ('weight_decay', 'beta1', 'beta2', 'eps')
    is_one_kernel = True                # whether a step is the kernel adam alone, which pyops.ops.MLP can include in its own
    decoupled = 0                       # 1: weight_decay decays the parameter itself, as AdamW's

    def __init__(self, params: Parameters | Iterable[Tensor], lr: float = 0.001, betas: Sequence[float] | None = None,
                 eps: float = 1e-8, weight_decay: float = 0.0, amsgrad: bool = False, *, max_norm: float | None = None,
                 beta1: float | None = None, beta2: float | None = None, decoupled_weight_decay: bool = False) -> None:
        beta1, beta2 = _two_betas('Adam', beta1, beta2, betas)
        if amsgrad:
            self.MOMENTS = *self.MOMENTS, 'most'
        if amsgrad or decoupled_weight_decay:
            self.is_one_kernel, self.decoupled = False, max(self.decoupled, int(decoupled_weight_decay))
        super().__init__(params, lr, max_norm, weight_decay)
        self._check(1, beta1=beta1, beta2=beta2)
        self._check(eps=eps)
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self._apply_groups()

    def _update(self, unit: Any, group: Group, norm: Any, m: Array, v: Array, *most: Array) -> None:
        values = unit.values
        if most or _is_double(unit):
            self._update_by_formula(unit, group, norm, m, v, *most)
            return
        backend.launch('adam', values, m, v, unit.grads, unit.touched, norm, self.count, group.rate,
                       values.size, self.max_norm or 1.0, group['beta1'], group['beta2'], group['eps'], group['weight_decay'],
                       self.decoupled)

    def _update_by_formula(self, unit: Any, group: Group, norm: Any, *moments: Array) -> None:
        t, values, g, m, v, *most = _operands(self, unit, group, norm, moments, self.decoupled)
        _move(m, g, group['beta1'])
        _move(v, g * g, group['beta2'])
        for one in most:
            one[...] = one.maximum(v)
        root = (most[0] if most else v).sqrt() * (1 - group['beta2'] ** t) ** -0.5 + group['eps']
        values[...] = values - m / root * (group['lr'] / (1 - group['beta1'] ** t))


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2017, arXiv:1711.05101): lr * weight_decay times the parameter is
    subtracted from it, instead of adding to its gradient."""
    is_one_kernel, decoupled = False, 1

    def __init__(self, params: Parameters | Iterable[Tensor], lr: float = 0.001, betas: Sequence[float] | None = None,
                 eps: float = 1e-8, weight_decay: float = 0.01, amsgrad: bool = False, *, max_norm: float | None = None,
                 beta1: float | None = None, beta2: float | None = None) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, max_norm=max_norm, beta1=beta1, beta2=beta2)


def is_hidden_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether Muon updates this parameter by default: a matrix, but no embedding and no output layer.

    Of those two only a few rows have a gradient, or their rows are classes; Adam trains them better (Jordan et al. 2024).
    """
    return len(shape) == 2 and min(shape) > 1 and not name.startswith('output') and 'embedding' not in name


class Muon(Adam):
    """Muon (Jordan et al. 2024): momentum made orthogonal, for hidden matrices; Adam for all other parameters.

    Each step of a matrix is lr * scale * sqrt(max(rows, columns)) times a matrix whose singular values are all near 1.  With
    scale=0.2 its root mean square is about as large as in Adam (Liu et al. 2025, arXiv:2502.16982), so both use one lr.
    See docs/optimiser.md.

    momentum, nesterov: of the moving average of the gradients of the matrices
    steps: iterations that make it orthogonal, three matrix products each
    weight_decay: decoupled: lr * weight_decay times the matrix is subtracted from it
    matrices: matrices(name, shape) returns whether this parameter is updated as a matrix; the default is is_hidden_matrix
    adam: settings of Adam for the other parameters: beta1, beta2, betas, eps, weight_decay
    """
    COEFFICIENTS = 3.4445, -4.7750, 2.0315
    settings = *Adam.settings, 'momentum', 'matrix_decay'
    momentum, matrix_decay, is_one_kernel = 0.95, 0.0, False

    def __init__(self, params: Parameters | Iterable[Tensor], lr: float = 0.001, *, momentum: float = 0.95,
                 nesterov: bool = True, steps: int = 5, scale: float = 0.2, max_norm: float | None = None,
                 weight_decay: float = 0.0, matrices: Callable[[str, Sequence[int]], bool] = is_hidden_matrix,
                 adam: dict[str, Any] | None = None) -> None:
        if getattr(params, 'shares', None) is not None:
            raise TypeError('Muon: ranks cannot share its moments, since a matrix may be in several shares; use Adam, or '
                            'leave out pyops.distributed.shard')
        super().__init__(params, lr, max_norm=max_norm, **adam or {})
        self._check(1, momentum=momentum)
        self._check(scale=scale, weight_decay=weight_decay)
        if not isinstance(steps, numbers.Integral) or steps < 0:
            raise TypeError(f'Muon: steps: expected a whole number, got {steps!r}')
        self.momentum = momentum
        self.nesterov: bool = nesterov
        self.steps: int = int(steps)
        self.scale: float = scale
        self.matrix_decay = weight_decay
        self._matrices: Callable[[str, Sequence[int]], bool] = matrices
        self._find_matrices()

    def _find_matrices(self) -> None:
        """Divide the parameters into matrices and others."""
        self._parts: dict[int, tuple[list[Any], list[Any]]] = {id(unit): _split(unit, self._matrices)
                                                               for unit, _ in self._units}
        if any(_is_double(unit) for unit, _ in self._units):
            raise TypeError('Muon: expected parameters of float32, got float64; use Adam')
        found = [offsets for batches, _ in self._parts.values() for _, offsets in batches]
        if not found:
            raise ValueError('Muon: expected a hidden matrix among the parameters, got none; use Adam, or give matrices=')
        self._own |= {f'offsets.{i}': offsets for i, offsets in enumerate(found)}

    def _update(self, unit: Any, group: Group, norm: Any, m: Array, v: Array, *most: Array) -> None:
        if most:
            raise ValueError('Muon: adam: amsgrad: expected False, got True')
        batches, ranges = self._parts[id(unit)]
        for shape, offsets in batches:
            self._update_matrices(unit, group, norm, m, shape, offsets)
        for first, end, touched in ranges:
            part = _Part(unit.values[first:end], unit.grads[first:end], touched)
            super()._update(part, group, norm, m[first:end], v[first:end])

    def _update_matrices(self, unit: Any, group: Group, norm: Any, m: Array, shape: tuple[int, int], offsets: Array) -> None:
        count, n = len(offsets), shape[0] * shape[1]
        x = backend.empty((count, *shape), name='muon.x')
        backend.launch('muon_momentum', x, m, unit.grads, norm, offsets, backend.work('muon_momentum', count, n),
                       count, n, self.max_norm or 1.0, group['momentum'], self.nesterov)
        x = orthogonalized(x, self.steps, self.COEFFICIENTS)
        backend.launch('muon_update', unit.values, x, offsets, group.rate, count, n, self.scale * math.sqrt(max(shape)),
                       group['matrix_decay'])


def orthogonalized(x: Array, steps: int, coefficients: Sequence[float]) -> Array:
    """Return matrices (count, rows, columns) near the closest ones with orthonormal rows or columns.  Overwrites x.

    With singular values s of x, sum s^2 <= 1, the result has the same singular vectors and the values f(f(...f(s))) of `steps`
    iterations f(s) = c1 s + c2 s^3 + c3 s^5 (Newton-Schulz).

    An iteration is x = p x with p = c1 I + c2 a + c3 a^2, a = x x' (if x has more rows than columns, x = x p and a = x' x).
    For long matrices most work is in the products with x.  They are avoided: a becomes p a p, since p and a commute, and x is
    multiplied once, in the end, with the product q of all p.
    """
    count, rows, columns = x.shape
    side = min(rows, columns)

    def square(name: str) -> Any:
        return backend.empty((count, side, side), name=f'muon.{name}')

    def gram(a: Array) -> None:
        turned = backend.permuted(x, (0, 2, 1))
        backend.gemm_batched(a, *(x, turned) if rows == side else (turned, x))

    def polynomial(p: Array) -> None:
        backend.gemm_batched(p, a, a)
        backend.launch('muon_polynomial', p, a, count, side, *coefficients)

    def multiplied(p: Array) -> Any:
        y = backend.empty(x.shape, name='muon.y')
        backend.gemm_batched(y, *(p, x) if rows == side else (x, p))
        return y

    a, p = square('a'), square('p')
    if steps < 2 or max(rows, columns) < _LONG * side:
        for _ in range(steps):
            gram(a)
            polynomial(p)
            x = multiplied(p)
        return x
    gram(a)
    polynomial(q := square('q'))
    backend.gemm_batched(product := square('product'), a, q)
    backend.gemm_batched(a, q, product)
    for step in range(1, steps):
        polynomial(p)
        backend.gemm_batched(product, p, q)
        q, product = product, q
        if step < steps - 1:
            backend.gemm_batched(product, a, p)
            backend.gemm_batched(a, p, product)
    return multiplied(q)


# From this ratio of the sides on, five iterations take fewer operations without products with x:  17 side + 2 length products
# of side x side matrices, instead of 5 side + 10 length
_LONG = 1.5


def _is_double(unit: Any) -> bool:
    """Return whether a unit is float64, so that a formula of array ops replaces the kernels, which take float32."""
    return bool(unit.values.dtype == np.float64)


class _Part(NamedTuple):
    """A part of the flat buffers, with the interface of Parameters."""
    values: Any
    grads: Any
    touched: Any


def _own_share(params: Parameters) -> Any:
    """Return what this rank updates of a Parameters, with its interface: all of it, unless ranks share the moments."""
    if params.shares is None:
        return params
    mine, block = params.shares.mine, library.cpu().lib.PYOPS_GRAD_BLOCK
    touched = None if params.touched is None else params.touched[mine.start // block:-(-mine.stop // block)]
    return _Part(params.values[mine], params.grads[mine], touched)


def _split(unit: Any, is_matrix: Callable[[str, Sequence[int]], bool]) -> tuple[list[Any], list[Any]]:
    """Divide the parameters of a unit: return [(shape, offsets of all matrices with it)], and [(first, end, touched)] for the
    ranges of the flat buffer with all other parameters.  A sparse parameter is a range of its own."""
    shapes: dict[Any, list[int]] = {}
    ranges: list[Any] = []
    joins = False               # whether the next parameter may extend the last range
    for name, (first, shape), touched in unit.parts():
        if is_matrix(name, shape):
            shapes.setdefault(tuple(shape), []).append(first)
            joins = False
            continue
        end = first + math.prod(shape)
        if joins and touched is None:
            ranges[-1] = (ranges[-1][0], end, None)
        else:
            ranges.append((first, end, touched))
        joins = touched is None
    return [(shape, backend.put(np.array(starts, np.int64))) for shape, starts in shapes.items()], ranges


class SGD(Optimizer):
    """velocity = momentum * velocity + (1 - dampening) * g, in the first step g;
    param -= lr * velocity, or with nesterov  lr * (g + momentum * velocity)."""
    MOMENTS = 'm',
    settings = 'weight_decay', 'momentum', 'dampening', 'nesterov'

    def __init__(self, params: Parameters | Iterable[Tensor], lr: float = 0.01, momentum: float = 0.0, dampening: float = 0.0,
                 weight_decay: float = 0.0, nesterov: bool = False, *, max_norm: float | None = None) -> None:
        if nesterov and not momentum:
            raise ValueError('SGD: nesterov: expected a momentum > 0, got 0; pass momentum, such as 0.9')
        if nesterov and dampening:
            raise ValueError(f'SGD: nesterov: expected dampening 0, got {dampening}')
        super().__init__(params, lr, max_norm, weight_decay)
        self._check(momentum=momentum, dampening=dampening)
        self.momentum, self.dampening, self.nesterov = momentum, dampening, nesterov
        self._apply_groups()

    def _update(self, unit: Any, group: Group, norm: Any, velocity: Array) -> None:
        values = unit.values
        if _is_double(unit):
            self._update_by_formula(unit, group, norm, velocity)
            return
        backend.launch('sgd', values, velocity if group['momentum'] else None, unit.grads, norm, self.count, group.rate,
                       values.size, self.max_norm or 1.0, group['momentum'], group['dampening'], group['weight_decay'],
                       group['nesterov'])

    def _update_by_formula(self, unit: Any, group: Group, norm: Any, *moments: Array) -> None:
        t, values, g, velocity = _operands(self, unit, group, norm, moments)
        if group['momentum']:
            velocity[...] = g if t == 1 else velocity * group['momentum'] + g * (1 - group['dampening'])
            g = g + velocity * group['momentum'] if group['nesterov'] else velocity
        values[...] = values - g * group['lr']


# ---- optimizers whose steps are formulas of array ops --------------------------------------------------------------------

def _operands(optimizer: Optimizer, unit: Any, group: Group, norm: Any, moments: Sequence[Array],
              decoupled: bool | int = False) -> tuple[Any, ...]:
    """Return the number of the step, and as NDArrays the values of a unit, its gradient, clipped and with weight decay, and its
    moments.   decoupled: decay the values instead"""
    if backend.is_recorded():
        raise TypeError(f'{type(optimizer).__name__}: its steps cannot be recorded in a plan; use Adam, AdamW, Muon or SGD')
    values, g, *rest = map(ndarray.as_ndarray, (unit.values, unit.grads, *moments))
    if norm is not None and optimizer.clips(float(backend.get(norm)[0])):
        g = g * (optimizer.max_norm / float(backend.get(norm)[0]))             # type: ignore[operator]
    decay = group['weight_decay']
    if decay and decoupled:
        values[...] = values * (1 - group['lr'] * decay)
    elif decay:
        g = g + values * decay
    return int(backend.get(optimizer.count)[0]), values, g, *rest


def _move(average: Any, value: Any, decay: float) -> None:
    """Move a moving average towards a value by 1 - decay of the distance."""
    average[...] = average * decay + value * (1 - decay)


class _Formula(Optimizer):
    """Base of optimizers whose steps are array ops.  Each step allocates, and a plan cannot record it.

    RATE: the default of lr;  DEFAULTS: the other settings, in PyTorch's order, which groups have, too; betas stands for beta1
    and beta2.
    """
    RATE, DEFAULTS = 0.01, dict[str, Any]()
    _arguments = inspect.Signature()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        betas = {'beta1': 0.9, 'beta2': 0.999} if 'betas' in cls.DEFAULTS else {}
        by_position = {'lr': cls.RATE, **cls.DEFAULTS, 'betas': None} if betas else {'lr': cls.RATE, **cls.DEFAULTS}
        by_name = {'max_norm': None} | dict.fromkeys(betas)
        kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        cls._arguments = inspect.Signature([
            inspect.Parameter('params', kinds[0]),
            *(inspect.Parameter(name, kinds[0], default=value) for name, value in by_position.items()),
            *(inspect.Parameter(name, kinds[1], default=value) for name, value in by_name.items())])
        cls.settings = 'weight_decay', *betas, *(name for name in cls.DEFAULTS if name not in ('betas', 'weight_decay'))
        cls.__signature__ = cls._arguments                      # type: ignore[attr-defined]

    def __init__(self, *args: Any, **named: Any) -> None:
        try:
            bound = self._arguments.bind(*args, **named)
        except TypeError as error:
            raise TypeError(f'{type(self).__name__}: {error}; expected {self._arguments}') from None
        bound.apply_defaults()
        given = bound.arguments
        if 'betas' in given:
            given['beta1'], given['beta2'] = _two_betas(type(self).__name__, given['beta1'], given['beta2'], given.pop('betas'))
        rate = given.pop('lr')
        super().__init__(given.pop('params'), self.RATE if rate is None else rate, given.pop('max_norm'),
                         given.get('weight_decay', 0.0))
        for name, value in given.items():
            self._check_setting(name, value)
            setattr(self, name, value)
        self._apply_groups()

    def _update(self, unit: Any, group: Group, norm: Any, *moments: Array) -> None:
        self._step(group, *_operands(self, unit, group, norm, moments, group.get('decoupled_weight_decay', False)))

    def _step(self, group: Group, t: int, values: Any, g: Any, *moments: Any) -> None:
        """Make step number t: change values and moments in place, for a gradient g."""
        raise NotImplementedError


class RMSprop(_Formula):
    """square = alpha square + (1 - alpha) g^2;  param -= lr g / (sqrt(square) + eps).

    momentum: of these steps.  centered: subtract the square of the moving average of g from `square`.
    """
    MOMENTS = 'square', 'velocity', 'mean_gradient'
    DEFAULTS = dict(alpha=0.99, eps=1e-8, weight_decay=0.0, momentum=0.0, centered=False)

    def _step(self, group: Group, t: int, values: Any, g: Any, *moments: Any) -> None:
        square, velocity, mean = moments
        _move(square, g * g, group['alpha'])
        spread = square
        if group['centered']:
            _move(mean, g, group['alpha'])
            spread = square - mean * mean
        velocity[...] = velocity * group['momentum'] + g / (spread.sqrt() + group['eps'])
        values[...] = values - velocity * group['lr']


class Adagrad(_Formula):
    """square += g^2;  param -= lr / (1 + (t - 1) lr_decay) g / (sqrt(square) + eps).  Duchi et al. 2011."""
    MOMENTS = 'square',
    DEFAULTS = dict(lr_decay=0.0, weight_decay=0.0, initial_accumulator_value=0.0, eps=1e-10)

    def _step(self, group: Group, t: int, values: Any, g: Any, *moments: Any) -> None:
        square, = moments
        square[...] = square + g * g + (group['initial_accumulator_value'] if t == 1 else 0.0)
        values[...] = values - g / (square.sqrt() + group['eps']) * (group['lr'] / (1 + (t - 1) * group['lr_decay']))


class Adadelta(_Formula):
    """Steps scaled by the ratio of the root mean squares of earlier steps and of gradients.  Zeiler 2012, arXiv:1212.5701."""
    MOMENTS = 'square', 'moved'
    RATE, DEFAULTS = 1.0, dict(rho=0.9, eps=1e-6, weight_decay=0.0)

    def _step(self, group: Group, t: int, values: Any, g: Any, *moments: Any) -> None:
        square, moved = moments
        _move(square, g * g, group['rho'])
        step = (moved + group['eps']).sqrt() / (square + group['eps']).sqrt() * g
        _move(moved, step * step, group['rho'])
        values[...] = values - step * group['lr']


class Adamax(_Formula):
    """Adam with the largest recent |g| in place of the root of the second moment.  Kingma and Ba 2014, section 7.1."""
    MOMENTS = 'm', 'v'
    RATE, DEFAULTS = 0.002, dict(betas=None, eps=1e-8, weight_decay=0.0)

    def _step(self, group: Group, t: int, values: Any, g: Any, *moments: Any) -> None:
        m, most = moments
        _move(m, g, group['beta1'])
        most[...] = (most * group['beta2']).maximum(g.abs() + group['eps'])
        values[...] = values - m / most * (group['lr'] / (1 - group['beta1'] ** t))


class NAdam(_Formula):
    """Adam with Nesterov's momentum.  Dozat 2016."""
    MOMENTS = 'm', 'v'
    RATE, DEFAULTS = 0.002, dict(betas=None, eps=1e-8, weight_decay=0.0, momentum_decay=0.004, decoupled_weight_decay=False)

    def _step(self, group: Group, t: int, values: Any, g: Any, *moments: Any) -> None:
        (m, v), beta1 = moments, group['beta1']

        def momentum(t: int) -> float:
            return beta1 * (1 - 0.5 * 0.96 ** (t * group['momentum_decay']))
        product = math.prod(map(momentum, range(1, t + 1)))
        _move(m, g, beta1)
        _move(v, g * g, group['beta2'])
        root = v.sqrt() * (1 - group['beta2'] ** t) ** -0.5 + group['eps']
        now, after = momentum(t), momentum(t + 1)
        values[...] = values - (g * ((1 - now) / (1 - product)) + m * (after / (1 - product * after))) / root * group['lr']


class RAdam(_Formula):
    """Adam without its second moment in the first steps, when that varies too much.  Liu et al. 2019, arXiv:1908.03265."""
    MOMENTS = 'm', 'v'
    RATE, DEFAULTS = 0.001, dict(betas=None, eps=1e-8, weight_decay=0.0, decoupled_weight_decay=False)

    def _step(self, group: Group, t: int, values: Any, g: Any, *moments: Any) -> None:
        (m, v), beta2 = moments, group['beta2']
        _move(m, g, group['beta1'])
        _move(v, g * g, beta2)
        longest, rest = 2 / (1 - beta2) - 1, 1 - beta2 ** t
        length = longest - 2 * t * beta2 ** t / rest
        step = m * (group['lr'] / (1 - group['beta1'] ** t))
        if length > 5:
            factor = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
            step = step * math.sqrt(factor * rest) / (v.sqrt() + group['eps'])
        values[...] = values - step


class ASGD(_Formula):
    """SGD with a falling rate.  arrays()['average.0'] is the mean of the parameters since step t0.  Polyak and Juditsky 1992.

    A changed lr counts from the next step on; in PyTorch one step later.
    """
    MOMENTS = 'average',
    DEFAULTS = dict(lambd=1e-4, alpha=0.75, t0=1e6, weight_decay=0.0)

    def _step(self, group: Group, t: int, values: Any, g: Any, *moments: Any) -> None:
        average, = moments
        rate = group['lr'] / (1 + group['lambd'] * group['lr'] * (t - 1)) ** group['alpha']
        values[...] = values * (1 - group['lambd'] * rate) - g * rate
        _move(average, values, 1 - 1 / max(1.0, t - 1 - group['t0']))


class Rprop(_Formula):
    """Steps of an own size for each element, in the direction of the gradient: larger while its sign stays, smaller when it
    changes.  Riedmiller and Braun 1993.

    etas: the factors (smaller, larger).  step_sizes: the limits (smallest, largest).
    """
    MOMENTS = 'last', 'size'
    DEFAULTS = dict(etas=(0.5, 1.2), step_sizes=(1e-6, 50.0))

    def _check_setting(self, name: str, value: Any) -> None:
        if name not in self.DEFAULTS:
            super()._check_setting(name, value)
        elif not isinstance(value, tuple | list) or len(value) != 2:
            raise TypeError(f'Rprop: {name}: expected two numbers, such as {self.DEFAULTS[name]}, got {value!r}')
        elif not (0 < value[0] < 1 < value[1] if name == 'etas' else 0 < value[0] <= value[1]):
            raise ValueError(f'Rprop: {name}: expected two numbers, such as {self.DEFAULTS[name]}, got {value}')

    def _step(self, group: Group, t: int, values: Any, g: Any, *moments: Any) -> None:
        (last, size), (smaller, larger) = moments, group['etas']
        turned, same = g * last < 0, g * last > 0
        before = size * 0 + group['lr'] if t == 1 else size
        size[...] = (before * ndarray.where(turned, smaller, ndarray.where(same, larger, 1.0))).clip(*group['step_sizes'])
        last[...] = ndarray.where(turned, 0.0, g)
        values[...] = values - last.sign() * size


class _Move(NamedTuple):
    """A step of LBFGS.   gradient: before it"""
    direction: np.ndarray
    length: float
    gradient: np.ndarray


class LBFGS(Optimizer):
    """Steps along directions from an approximate second derivative (Liu and Nocedal 1989).  step(closure) computes the loss
    several times: closure clears the gradients, runs backward and returns the loss.

    max_iter: steps of a call;  max_eval: losses of a call, None: 1.25 max_iter;  history_size: differences that are kept
    tolerance_grad, tolerance_change: a call ends at smaller gradients, and at smaller changes of parameters or loss
    line_search_fn: None: steps of length lr; 'strong_wolfe': a search.  One parameter group; vectors are on the host, float64.
    """
    settings = 'max_iter', 'max_eval', 'tolerance_grad', 'tolerance_change', 'history_size', 'line_search_fn'

    def __init__(self, params: Parameters | Iterable[Tensor], lr: float = 1.0, max_iter: int = 20, max_eval: int | None = None,
                 tolerance_grad: float = 1e-7, tolerance_change: float = 1e-9, history_size: int = 100,
                 line_search_fn: str | None = None) -> None:
        super().__init__(params, lr, None, 0.0)
        if len(self.param_groups) != 1:
            raise ValueError(f'LBFGS: expected one parameter group, got {len(self.param_groups)}')
        self.max_iter, self.max_eval = max_iter, max_iter * 5 // 4 if max_eval is None else max_eval
        self.tolerance_grad, self.tolerance_change, self.history_size = tolerance_grad, tolerance_change, history_size
        self.line_search_fn = line_search_fn
        for name in self.settings:
            self._check_setting(name, getattr(self, name))
        self._memory, self._evaluations = lbfgs.Memory(history_size), 0
        self._last: _Move | None = None
        self._apply_groups()

    def _check_setting(self, name: str, value: Any) -> None:
        if name == 'line_search_fn':
            if value not in (None, 'strong_wolfe'):
                raise ValueError(f"LBFGS: line_search_fn: expected None or 'strong_wolfe', got {value!r}")
        else:
            super()._check_setting(name, value)

    @_with_hooks
    def step(self, closure: Callable[[], Any] | None = None, *, entry: Entry | None = None) -> Any:
        """Make up to max_iter steps, and return the first loss.   entry: None"""
        if closure is None or entry is not None:
            raise TypeError('LBFGS: step: expected closure, a function that clears the gradients, runs backward and returns '
                            'the loss, and no entry')
        group = self.param_groups[0]
        first_loss = closure()
        now, evaluations = self._point(first_loss, 0.0, None), 1
        for left in range(int(group['max_iter']), 0, -1):
            if np.abs(now.gradient).max() <= group['tolerance_grad']:
                break
            self.count += 1
            move = self._last = self._next_move(now.gradient)
            start = now._replace(step=0.0, slope=float(now.gradient @ move.direction))
            if start.slope > -group['tolerance_change']:
                break
            now, tries = self._search(closure, start, move, left == 1, int(group['max_eval']) - evaluations)
            self._last, evaluations = move._replace(length=now.step), evaluations + tries
            moved = np.abs(move.direction * now.step).max()
            if evaluations >= group['max_eval'] or moved <= group['tolerance_change'] or \
                    abs(now.loss - start.loss) < group['tolerance_change']:
                break
        self._evaluations += evaluations
        return first_loss

    def _next_move(self, gradient: np.ndarray) -> _Move:
        """Return the direction and the first length to try, and remember what the last move changed."""
        lr = self.param_groups[0]['lr']
        if self._last is None:
            return _Move(-gradient, min(1.0, 1.0 / float(np.abs(gradient).sum())) * lr, gradient)
        self._memory.add(self._last.direction * self._last.length, gradient - self._last.gradient)
        return _Move(self._memory.direction(gradient), lr, gradient)

    def _search(self, closure: Callable[[], Any], start: lbfgs.Point, move: _Move, is_last: bool,
                most: int) -> tuple[lbfgs.Point, int]:
        """Move the parameters, and return the point there and the number of losses computed, at most `most` by a search."""
        x, direction, length = self._values(), move.direction, move.length

        def evaluate(length: float) -> lbfgs.Point:
            self._write(x + length * direction)
            return self._point(closure(), length, direction)
        if self.param_groups[0]['line_search_fn']:
            end, tries = lbfgs.strong_wolfe(evaluate, start, length, float(np.abs(direction).max()), most)
            self._write(x + end.step * direction)
            return end, tries
        if not is_last:
            return evaluate(length), 1
        self._write(x + length * direction)         # the loss there would decide nothing
        return start._replace(step=length), 0

    def _point(self, loss: Any, step: float, direction: np.ndarray | None) -> lbfgs.Point:
        gradient = self._flat(lambda tensor: tensor.grad, lambda params: params.grads)
        return lbfgs.Point(step, float(loss), gradient, 0.0 if direction is None else float(gradient @ direction))

    def _values(self) -> np.ndarray:
        return self._flat(lambda tensor: tensor, lambda params: params.values)

    def _flat(self, of_tensor: Callable[[Any], Any], of_params: Callable[[Parameters], Any]) -> np.ndarray:
        """Return numbers of all parameters as one float64 vector."""
        if self.params is not None:
            return backend.get(of_params(self.params)).astype(np.float64)
        found = [(of_tensor(tensor), tensor.size) for tensor in self._tensors]
        return np.concatenate([np.zeros(size) if one is None else one.numpy().reshape(-1) for one, size in found],
                              dtype=np.float64)

    def _write(self, x: np.ndarray) -> None:
        """Set all parameters to the numbers of a vector."""
        if self.params is not None:
            ndarray.as_ndarray(self.params.values)[...] = ndarray.array(x, self.params.values.dtype)
            return
        for tensor, part in zip(self._tensors, np.split(x, np.cumsum([one.size for one in self._tensors])[:-1]), strict=True):
            tensor.array[...] = part.reshape(tensor.shape).astype(tensor.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the kept differences, the last step, the settings and the number of steps."""
        return {**self._flat_state(), 'state': copy.deepcopy({
            'memory': vars(self._memory), 'last': self._last, 'func_evals': self._evaluations})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy a state from state_dict()."""
        given = copy.deepcopy(state['state'])
        super().load_state_dict({**state, 'state': {}})
        vars(self._memory).update(given['memory'])
        self._last, self._evaluations = given['last'] and _Move(*given['last']), given['func_evals']


# optimizers whose steps allocate nothing: the arguments of their kernels are the same in every step
_WITHOUT_TEMPORARIES = Adam, AdamW, SGD


class _Alone:
    """A Tensor updated on its own, with the interface of Parameters."""
    touched = None

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def values(self) -> Array:
        return _flat(self.tensor)

    @property
    def grads(self) -> Array | None:
        return None if self.tensor.grad is None else _flat(self.tensor.grad)

    def zero_grads(self) -> None:
        self.tensor.zero_grad()

    def parts(self) -> list[tuple[str, tuple[int, Sequence[int]], None]]:
        return [(getattr(self.tensor, 'name', ''), (0, self.tensor.shape), None)]


def _flat(tensor: Tensor) -> Any:
    array = tensor.device.kernel_view(tensor.array)
    if array.dtype not in (np.float32, np.float64) or not tensor.array.is_compact():
        raise TypeError(f'optimizer: expected contiguous Tensors of float32 or float64, got {array.dtype}, shape '
                        f'{array.shape}, strides {array.strides}')
    return array.reshape(-1)


def _group_specs(params: Any) -> list[dict[str, Any]]:
    """Return the parameter groups as dicts: one of all Tensors, unless dicts are given."""
    if hasattr(params, 'requires_grad') or hasattr(params, 'parameters'):
        return [{'params': params}]                     # _unique explains it
    given = [one[1] if isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str) else one
             for one in params]                         # named_parameters()
    if not given or not all(isinstance(spec, dict) for spec in given):
        return [{'params': given}]
    for spec in given:
        if 'params' not in spec:
            raise ValueError(f"optimizer: a parameter group needs 'params', got {sorted(spec)}")
    return [{**spec, 'params': spec['params']} for spec in given]


def _find_norm(units: Sequence[Any], norm: Array, norms: Array | None, work: Array,
               logged: tuple[Array, Entry] | None = None) -> None:
    """Compute the norm of the gradients of the units: the norm of their norms.  norms: an array of them, None for one unit.
    logged: the step count, which the last launch increments, and the entry that it appends to a log"""
    if any(map(_is_double, units)):                     # formulas, whose steps no plan records; so this is the first launch
        norm[...] = math.sqrt(sum(float((ndarray.as_ndarray(unit.grads) ** 2).sum()) for unit in units))
        if logged is not None:
            count, entry = logged
            backend.launch('increment', count)
            backend.launch('log_step', entry.log, entry.written, entry.loss, entry.weight, norm, 1, entry.capacity)
        return
    calls = [(norm if norms is None else norms[i:i + 1], unit.grads, unit.touched, unit.grads.size)
             for i, unit in enumerate(units)]
    if norms is not None:
        calls.append((norm, norms, None, len(units)))
    for to, grads, touched, n in calls if logged is None else calls[:-1]:
        backend.launch('grad_norm', to, grads, touched, work, n)
    if logged is not None:
        (to, grads, touched, n), (count, entry) = calls[-1], logged
        backend.launch('grad_norm_logged', to, count, entry.log, entry.written, grads, touched, entry.loss, entry.weight, work,
                       n, entry.capacity)


def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False,
                    foreach: bool | None = None) -> ndarray.NDArray:
    """Scale the gradients of Tensors in place so that their global norm is at most max_norm.  Return the norm before, shape ().

    norm_type: p of the p-norm, also inf.  error_if_nonfinite: raise RuntimeError for a norm that is NaN or infinite.
    foreach: accepted as in PyTorch, without effect.
    Tensors without a gradient are skipped.  An optimizer with max_norm=... does the same while it updates, in one pass less.
    """
    if not isinstance(max_norm, numbers.Real) or not max_norm > 0:
        raise ValueError(f'clip_grad_norm_: max_norm: expected a number > 0, got {max_norm}')
    given = [parameters] if hasattr(parameters, 'requires_grad') else list(parameters)
    units = [unit for unit in update_units(x for x in given if x.grad is not None) if unit.grads is not None]
    if not units:
        return ndarray.zeros(())
    if norm_type != 2 or any(map(_is_double, units)):
        gradients = [ndarray.as_ndarray(unit.grads) for unit in units]
        each = [float(g.abs().max()) if norm_type == math.inf else float((g.abs() ** norm_type).sum()) for g in gradients]
        total = max(each) if norm_type == math.inf else sum(each) ** (1 / norm_type)
        _check_finite(total, error_if_nonfinite)
        if not total <= max_norm:
            for g in gradients:
                g[...] = g * (max_norm / (total + 1e-6))
        return ndarray.array(np.float32(total))
    norm, norms = backend.zeros(1), None if len(units) == 1 else backend.zeros(len(units))
    _find_norm(units, norm, norms, backend.work('grad_norm', max(len(units), *(unit.grads.size for unit in units))))
    _check_finite(float(backend.get(norm)[0]), error_if_nonfinite)
    for unit in units:
        backend.launch('clip', unit.grads, norm, unit.grads.size, max_norm)
    return ndarray.as_ndarray(norm)[0]


def _check_finite(norm: float, error_if_nonfinite: bool) -> None:
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(f'clip_grad_norm_: expected a finite norm, got {norm}; the gradients are unchanged')


def clip_grad_value_(parameters: Iterable[Tensor], clip_value: float, foreach: bool | None = None) -> None:
    """Limit each element of the gradients of Tensors, in place, to +-clip_value.   foreach: without effect"""
    if not isinstance(clip_value, numbers.Real) or not clip_value > 0:
        raise ValueError(f'clip_grad_value_: clip_value: expected a number > 0, got {clip_value}')
    for tensor in [parameters] if hasattr(parameters, 'requires_grad') else parameters:
        if tensor.grad is not None:
            tensor.grad.array[...] = tensor.grad.array.clip(-clip_value, clip_value)


def _unique(params: Any) -> list[Tensor]:
    """Return the leaves that require a gradient, each once.  Raise if there are none, or if params holds anything else."""
    if hasattr(params, 'requires_grad'):
        raise TypeError(f'optimizer: expected several Tensors, got one of shape {params.shape}; pass a list')
    if hasattr(params, 'parameters'):
        raise TypeError(f'optimizer: expected Tensors, got {type(params).__name__}; pass its parameters()')
    found = {id(tensor): tensor for tensor in params}
    for tensor in found.values():
        if not hasattr(tensor, 'requires_grad'):
            raise TypeError(f'optimizer: expected Tensors, got {type(tensor).__name__}')
        if not tensor.is_leaf:
            raise ValueError(f'optimizer: a tensor of shape {tensor.shape} is the result of an op; pass the leaves')
    trained = [tensor for tensor in found.values() if tensor.requires_grad]
    if not trained:
        raise ValueError(f'optimizer: got {len(found)} parameters, and none requires a gradient')
    return trained


def update_units(tensors: Iterable[Tensor]) -> list[Any]:
    """Group Tensors into units that one call can update: whole Parameters, and single Tensors."""
    homes: dict[int, tuple[Any, list[Tensor]]] = {}
    units: list[Any] = []
    for tensor in tensors:
        home = getattr(tensor, 'home', None)
        homes.setdefault(id(home), (home, []))[1].append(tensor)
    for home, members in homes.values():
        whole = home is not None and len(members) == len(home)
        units += [home] if whole else [_Alone(tensor) for tensor in members]
    return units


def _scheduled(optimizer: Any) -> list[Array]:
    """Return the rates that a recorded schedule sets: of all groups that were not given an lr of their own."""
    groups = getattr(optimizer, 'param_groups', None)
    return [optimizer.rate] if groups is None else [group.rate for group in groups if not group.has_own_rate]


def inverse_square_root(optimizer: Optimizer, lr: float, warmup: int) -> None:
    """Set the learning rate for the next step, with a kernel that a plan can record.

    With steps counted from 1, the rate rises linearly to `lr` at step `warmup`, then falls with 1 / sqrt(step) (Vaswani et
    al. 2017, arXiv:1706.03762, section 5.3, where lr = (d_model * warmup) ** -0.5).  warmup=0: constant `lr`.
    """
    for rate in _scheduled(optimizer):
        backend.launch('inverse_square_root', rate, optimizer.count, warmup, lr)


DECAYS = 'cosine', 'linear'         # in the order of pyops_decay


def decaying_rate(optimizer: Optimizer, lr: float, warmup: int, total: int, kind: str = 'linear', *, hold: int = 0,
                  final: float = 0.0) -> None:
    """Set the learning rate for the next step of `total`, with a kernel that a plan can record.

    The rate rises linearly to `lr` at step `warmup`, is constant until `hold` steps are done, then falls to final * lr at the
    end of step `total`: kind 'cosine', half a cosine wave (Loshchilov and Hutter 2016, arXiv:1608.03983), or 'linear'.  With
    hold > warmup it is a warmup-stable-decay schedule (Hu et al. 2024, arXiv:2404.06395).  Later steps get final * lr.
    """
    if kind not in DECAYS:
        raise ValueError(f'decaying_rate: kind: expected one of {", ".join(DECAYS)}, got {kind!r}')
    if not 0 <= final <= 1:
        raise ValueError(f'decaying_rate: final: expected 0 <= final <= 1, got {final}')
    for rate in _scheduled(optimizer):
        backend.launch('decaying_rate', rate, optimizer.count, warmup, max(hold, warmup), total, lr, final, DECAYS.index(kind))


declare(adam=Kernel(), sgd=Kernel(), grad_norm=Kernel(), grad_norm_logged=Kernel(), norm_of_chunks=Kernel(), clip=Kernel(),
        inverse_square_root=Kernel(), decaying_rate=Kernel(), ema=Kernel(), muon_momentum=Kernel(), muon_polynomial=Kernel(),
        muon_update=Kernel())
