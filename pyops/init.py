"""Initialisers: each function returns init(generator, shape) -> float32 array, for pyops.params.Spec.

The init's docstring is printed as its description in the plan of a step.

With a shape, or with two numbers fan_in and fan_out, they follow the needle course and return Tensors: zeros(3, 4),
constant(3, 4, c=2.0), kaiming_uniform(8, 16), xavier_normal(8, 16, gain=2.0), kaiming_normal(27, 4, shape=(3, 3, 3, 4)).
rand, randn, randb, zeros_like, ones_like and one_hot(n, labels) are functions of Tensors alone.
"""
from __future__ import annotations

import functools
import importlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyops.typing import Init, Shape

RELU_GAIN = math.sqrt(2)        # ReLU halves the variance


def _described(text: str, init: Init) -> Init:
    init.__doc__ = text
    return init


def _of_tensors(name: str) -> Callable[..., Any]:
    """Return a function of pyops.creation, which is imported on first use."""
    return getattr(importlib.import_module('pyops.creation'), name)


def zeros(*shape: Any, **named: Any) -> Any:
    """Initialise with 0.  zeros(3, 4): a Tensor, as pyops.zeros."""
    if shape:
        return _of_tensors('zeros')(*shape, **named)
    return _described('zeros', lambda generator, shape: np.zeros(shape, np.float32))


def ones(*shape: Any, **named: Any) -> Any:
    """Initialise with 1.  ones(3, 4): a Tensor, as pyops.ones."""
    if shape:
        return _of_tensors('ones')(*shape, **named)
    return _described('ones', lambda generator, shape: np.ones(shape, np.float32))


def constant(value: Any, *shape: Any, c: float | None = None, **named: Any) -> Any:
    """Initialise with value.  constant(3, 4, c=2.0): a Tensor filled with c, 1 unless given."""
    if shape or c is not None or isinstance(value, tuple | list):
        sizes = value if isinstance(value, tuple | list) else (value, *shape)
        return _of_tensors('full')(sizes, 1.0 if c is None else c, **{'dtype': np.float32, **named})
    return _described(f'constant({value:g})', lambda generator, shape: np.full(shape, value, np.float32))


def uniform(low: float, high: float) -> Init:
    """Initialise uniformly in [low, high)."""
    return _described(f'uniform({low:g}, {high:g})',
                      lambda generator, shape: generator.uniform(low, high, shape).astype(np.float32))


def normal(sigma: float) -> Init:
    """Initialise from a normal distribution with mean 0 and standard deviation sigma."""
    return _described(f'normal(0, {sigma:g})',
                      lambda generator, shape: (generator.standard_normal(shape) * sigma).astype(np.float32))


def fans(shape: Shape) -> tuple[int, int]:
    """Return fan_in and fan_out of a weight (fan_out, fan_in) or (out, in, *window); a window multiplies both by its size."""
    if len(shape) < 2:
        raise ValueError(f'init: expected a weight of two axes or more, (fan_out, fan_in, ...), got shape {tuple(shape)}')
    return shape[1] * math.prod(shape[2:]), shape[0] * math.prod(shape[2:])


def _accepts_fans(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate f(gain) -> init: f(fan_in, fan_out, gain=) returns a Tensor (fan_in, fan_out), or of shape=."""
    @functools.wraps(function)
    def wrapper(*args: Any, gain: float | None = None, shape: Shape | None = None, nonlinearity: str = 'relu',
                generator: np.random.Generator | None = None, **place: Any) -> Any:
        chosen = () if gain is None else (gain,)
        if len(args) < 2:
            if shape is not None or place or generator is not None:
                raise TypeError(f'{function.__name__}: got a shape, a device or a generator without fan_in and fan_out')
            return function(*args, *chosen)
        if nonlinearity != 'relu' or len(args) > 2:
            raise ValueError(f'{function.__name__}: expected fan_in, fan_out and nonlinearity relu, got {args} and '
                             f'{nonlinearity}; give gain= for another one')
        rng = importlib.import_module('pyops.params').random_generator(generator)
        return _of_tensors('tensor')(function(*chosen)(rng, tuple(args if shape is None else shape), given=args), **place)
    return wrapper


@_accepts_fans
def xavier_normal(gain: float = 1.0) -> Init:
    """sigma = gain * sqrt(2 / (fan_in + fan_out)).  Glorot and Bengio 2010."""
    def init(generator: np.random.Generator, shape: Shape, given: Shape | None = None) -> np.ndarray:
        return (generator.standard_normal(shape) * gain * np.sqrt(2 / sum(given or fans(shape)))).astype(np.float32)
    return _described(f'xavier_normal(gain {gain:g})', init)


@_accepts_fans
def xavier_uniform(gain: float = 1.0) -> Init:
    """Uniform in +-b, b = gain * sqrt(6 / (fan_in + fan_out)): the variance of xavier_normal."""
    def init(generator: np.random.Generator, shape: Shape, given: Shape | None = None) -> np.ndarray:
        bound = gain * np.sqrt(6 / sum(given or fans(shape)))
        return generator.uniform(-bound, bound, shape).astype(np.float32)
    return _described(f'xavier_uniform(gain {gain:g})', init)


@_accepts_fans
def kaiming_normal(gain: float = RELU_GAIN) -> Init:
    """sigma = gain / sqrt(fan_in), for weights followed by ReLU.  He et al. 2015, arXiv:1502.01852."""
    def init(generator: np.random.Generator, shape: Shape, given: Shape | None = None) -> np.ndarray:
        return (generator.standard_normal(shape) * gain / np.sqrt((given or fans(shape))[0])).astype(np.float32)
    return _described(f'kaiming_normal(gain {gain:g})', init)


@_accepts_fans
def kaiming_uniform(gain: float = RELU_GAIN) -> Init:
    """Uniform in +-b, b = gain * sqrt(3 / fan_in): the variance of kaiming_normal."""
    def init(generator: np.random.Generator, shape: Shape, given: Shape | None = None) -> np.ndarray:
        bound = gain * np.sqrt(3 / (given or fans(shape))[0])
        return generator.uniform(-bound, bound, shape).astype(np.float32)
    return _described(f'kaiming_uniform(gain {gain:g})', init)


def with_zero_row(init: Init, row: int) -> Init:
    """Initialise with `init`, then set one row to 0: the padding of an embedding."""
    def zeroed(generator: np.random.Generator, shape: Shape) -> np.ndarray:
        values = init(generator, shape)
        values[row] = 0
        return values
    return _described(f'{init.__doc__}, row {row} zeros', zeroed)


def stacked(*inits: Init) -> Init:
    """Stack blocks of equal height along axis 0, each with its own init, such as the gates of a recurrent weight."""
    def init(generator: np.random.Generator, shape: Shape) -> np.ndarray:
        block = (shape[0] // len(inits), *shape[1:])
        return np.concatenate([one(generator, block) for one in inits])
    return _described(' over '.join(str(one.__doc__) for one in inits), init)


def one_hot(n: int, labels: Any, **place: Any) -> Any:
    """Return a Tensor (..., n) with 1 at each label, 0 elsewhere: F.one_hot(labels, n)."""
    found = importlib.import_module('pyops.functional').one_hot(labels, n)
    return _of_tensors('tensor')(found, **place)


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the functions of new Tensors that the needle course has here."""
    if name not in ('rand', 'randn', 'randb', 'zeros_like', 'ones_like'):
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return _of_tensors(name)
