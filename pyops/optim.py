"""Optimisers: Adam (Kingma and Ba 2014, arXiv:1412.6980) and SGD with momentum, and a learning rate schedule.

All parameters are updated in one call, with gradients clipped by their global norm.
"""
from __future__ import annotations

import inspect
import math
import numbers
from typing import TYPE_CHECKING, Any

import numpy as np

from pyops import backend
from pyops.backend.kernels import Kernel, declare
from pyops.params import Parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pyops.autograd import Tensor
    from pyops.typing import Array


class Optimizer:
    """Base class.  Learning rate, step count and gradient norm are arrays of one element, so that kernels can read them.

    params: a pyops.params.Parameters, or Tensors, such as module.parameters().  Tensors that make up a whole flat buffer are
    updated in one call, any others in one call each.  A Tensor without a gradient is not updated.
    lr: learning rate.  Only params and lr are positional: libraries order the other arguments differently.
    max_norm: gradients with a larger global norm are scaled down to it during the update; None: no clipping.  The stored
    gradients do not change.
    weight_decay: weight_decay times the parameter is added to its (clipped) gradient.
    """
    MOMENTS: tuple[str, ...] = ()       # state per parameter: the names of its buffers in Parameters
    _update: Callable[..., None]        # a subclass updates one unit: (unit, norm or None, *moments)

    def __init__(self, params: Parameters | Iterable[Tensor], lr: float, max_norm: float | None, weight_decay: float) -> None:
        self._check(lr=lr, weight_decay=weight_decay, max_norm=max_norm or 0)
        self.max_norm, self.weight_decay = max_norm, weight_decay
        self._lr = backend.put(np.array([lr], np.float32))
        self.count = backend.zeros(1, np.int64)         # number of steps so far
        self.norm = backend.zeros(1)                    # norm of the last gradient before clipping; 0 without max_norm
        self.params = params if isinstance(params, Parameters) else None
        self._units: list[tuple[Any, list[Any]]]
        self._own: dict[str, Any] = {}
        self._tensors: list[Any] = []
        self._together: list[Any] = []
        if self.params is not None:
            self._units = [(self.params, [getattr(params, name) for name in self.MOMENTS])]
        else:
            self._tensors = _unique(params)
            units = _units(self._tensors)
            whole = {id(unit) for unit in units}
            self._together = [tensor for tensor in self._tensors if id(getattr(tensor, 'home', None)) in whole]
            self._units = [(unit, [backend.zeros(unit.values.size) for _ in self.MOMENTS]) for unit in units]
            self._own = {f'{name}.{i}': moment for i, (_, moments) in enumerate(self._units)
                         for name, moment in zip(self.MOMENTS, moments, strict=True)}
            self._own['norms'] = self._norms = backend.zeros(len(units))
        self._work = backend.work('grad_norm', max(len(self._units), *(unit.values.size for unit, _ in self._units)))

    def _check_positional(self, more: tuple[Any, ...]) -> None:
        """Raise TypeError if arguments after lr were given by position."""
        if more:
            names = [p.name for p in inspect.signature(type(self)).parameters.values() if p.kind is p.KEYWORD_ONLY]
            raise TypeError(f'{type(self).__name__}: only params and lr may be given by position, got {len(more)} more: '
                            f'{", ".join(map(repr, more))}; give the rest by name: {", ".join(names)}')

    def _check(self, below: float = math.inf, **settings: Any) -> None:
        for name, value in settings.items():
            if not isinstance(value, numbers.Real):
                raise TypeError(f'{type(self).__name__}: {name}: expected a number, got {type(value).__name__}')
            if not 0 <= value < below:          # type: ignore[operator]
                raise ValueError(f'{type(self).__name__}: {name}: expected 0 <= {name} < {below}, got {value}')

    @property
    def lr(self) -> Array:
        """Learning rate, an array of one element.  Assigning a number changes the element."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._lr[...] = value

    def step(self) -> None:
        """Update all parameters once."""
        for tensor in self._together:                   # Adam's m and v would still move its value
            if not tensor.requires_grad:
                raise RuntimeError(f'optimizer: requires_grad of {tensor.name} was switched off later; '
                                   'create a new optimizer')
        ready = [(unit, moments) for unit, moments in self._units if unit.grads is not None]
        if self.max_norm:
            self._find_norm([unit for unit, _ in ready])
        backend.launch('increment', self.count)
        for unit, moments in ready:
            self._update(unit, self.norm if self.max_norm else None, *moments)
        for tensor in self._tensors:
            tensor.array.buffer.version += 1            # backward detects that saved values have changed

    def _find_norm(self, units: Sequence[Any]) -> None:
        """Compute the global norm: the norm of the norms of the units."""
        alone = len(units) == 1
        for i, unit in enumerate(units):
            grads, norm = unit.grads, self.norm if alone else self._norms[i:i + 1]
            backend.launch('grad_norm', norm, grads, unit.touched, self._work, grads.size)
        if not alone:
            backend.launch('grad_norm', self.norm, self._norms, None, self._work, len(units))

    def zero_grad(self) -> None:
        """Clear the gradients.  Call it before each backward pass."""
        for unit, _ in self._units:
            unit.zero_grads()

    def arrays(self) -> dict[str, Array]:
        """Return {name: array} of the optimiser's state, for a plan."""
        return dict(lr=self.lr, step=self.count, norm=self.norm, norm_work=self._work) | self._own

    def clipped(self) -> bool:
        """Return whether the last step clipped its gradient."""
        return self.clips(float(self.norm[0]))

    def clips(self, norm: float) -> bool:
        """Return whether a gradient of this norm is clipped."""
        return bool(self.max_norm and norm > self.max_norm)


class Adam(Optimizer):
    """Adam with bias correction; see docs/optimiser.md.  Give beta1 and beta2, or both as betas (PyTorch's form)."""
    MOMENTS = 'm', 'v'

    def __init__(self, params: Parameters | Iterable[Tensor], lr: float = 0.001, *more: Any, max_norm: float | None = None,
                 beta1: float | None = None, beta2: float | None = None, betas: Sequence[float] | None = None,
                 eps: float = 1e-8, weight_decay: float = 0.0) -> None:
        self._check_positional(more)
        if betas is not None:
            if not isinstance(betas, tuple | list) or len(betas) != 2:
                raise TypeError(f'Adam: betas: expected two numbers, such as (0.9, 0.999), got {betas!r}')
            if (beta1, beta2) != (None, None):
                raise TypeError('Adam: got betas and also beta1 or beta2; give one of the two forms')
            beta1, beta2 = betas
        beta1, beta2 = 0.9 if beta1 is None else beta1, 0.999 if beta2 is None else beta2
        super().__init__(params, lr, max_norm, weight_decay)
        self._check(1, beta1=beta1, beta2=beta2)
        self._check(eps=eps)
        self.beta1, self.beta2, self.eps = beta1, beta2, eps

    def _update(self, unit: Any, norm: Any, m: Array, v: Array) -> None:
        values = unit.values
        backend.launch('adam', values, m, v, unit.grads, unit.touched, norm, self.count, self.lr,
                       values.size, self.max_norm or 1.0, self.beta1, self.beta2, self.eps, self.weight_decay)


class SGD(Optimizer):
    """velocity = momentum * velocity + g;  param -= lr * velocity, or with nesterov  lr * (g + momentum * velocity)."""
    MOMENTS = 'm',

    def __init__(self, params: Parameters | Iterable[Tensor], lr: float = 0.01, *more: Any, momentum: float = 0.0,
                 weight_decay: float = 0.0, nesterov: bool = False, max_norm: float | None = None) -> None:
        self._check_positional(more)
        if nesterov and not momentum:
            raise ValueError('SGD: nesterov: expected a momentum > 0, got 0; pass momentum, such as 0.9')
        super().__init__(params, lr, max_norm, weight_decay)
        self._check(momentum=momentum)
        self.momentum, self.nesterov = momentum, nesterov

    def _update(self, unit: Any, norm: Any, velocity: Array) -> None:
        values = unit.values
        backend.launch('sgd', values, velocity if self.momentum else None, unit.grads, norm, self.lr,
                       values.size, self.max_norm or 1.0, self.momentum, self.weight_decay, self.nesterov)


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


def _flat(tensor: Tensor) -> Any:
    array = tensor.device.kernel_view(tensor.array)
    if array.dtype != np.float32 or not tensor.array.is_compact():
        raise TypeError(f'optimizer: expected contiguous float32 Tensors, got {array.dtype}, shape {array.shape}, '
                        f'strides {array.strides}')
    return array.reshape(-1)


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


def _units(tensors: Iterable[Tensor]) -> list[Any]:
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


def inverse_square_root(optimizer: Optimizer, lr: float, warmup: int) -> None:
    """Set the learning rate for the next step, with a kernel that a plan can record.

    With steps counted from 1, the rate rises linearly to `lr` at step `warmup`, then falls with 1 / sqrt(step) (Vaswani et
    al. 2017, arXiv:1706.03762, section 5.3, where lr = (d_model * warmup) ** -0.5).  warmup=0: constant `lr`.
    """
    backend.launch('inverse_square_root', optimizer.lr, optimizer.count, warmup, lr)


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
    backend.launch('decaying_rate', optimizer.lr, optimizer.count, warmup, max(hold, warmup), total, lr, final,
                   DECAYS.index(kind))


declare(adam=Kernel(), sgd=Kernel(), grad_norm=Kernel(), clip=Kernel(), inverse_square_root=Kernel(), decaying_rate=Kernel())
