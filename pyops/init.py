"""Initialisers: each function returns init(generator, shape) -> float32 array, for pyops.params.Spec.

The init's docstring is printed as its description in the plan of a step.
"""
from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pyops.typing import Init, Shape

RELU_GAIN = math.sqrt(2)        # ReLU halves the variance


def _described(text: str, init: Init) -> Init:
    init.__doc__ = text
    return init


def zeros() -> Init:
    """Initialise with 0."""
    return _described('zeros', lambda generator, shape: np.zeros(shape, np.float32))


def ones() -> Init:
    """Initialise with 1."""
    return _described('ones', lambda generator, shape: np.ones(shape, np.float32))


def constant(value: float) -> Init:
    """Initialise with value."""
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


def xavier_normal(gain: float = 1.0) -> Init:
    """sigma = gain * sqrt(2 / (fan_in + fan_out)).  Glorot and Bengio 2010."""
    def init(generator: np.random.Generator, shape: Shape) -> np.ndarray:
        return (generator.standard_normal(shape) * gain * np.sqrt(2 / sum(fans(shape)))).astype(np.float32)
    return _described(f'xavier_normal(gain {gain:g})', init)


def xavier_uniform(gain: float = 1.0) -> Init:
    """Uniform in +-b, b = gain * sqrt(6 / (fan_in + fan_out)): the variance of xavier_normal."""
    def init(generator: np.random.Generator, shape: Shape) -> np.ndarray:
        bound = gain * np.sqrt(6 / sum(fans(shape)))
        return generator.uniform(-bound, bound, shape).astype(np.float32)
    return _described(f'xavier_uniform(gain {gain:g})', init)


def kaiming_normal(gain: float = RELU_GAIN) -> Init:
    """sigma = gain / sqrt(fan_in), for weights followed by ReLU.  He et al. 2015, arXiv:1502.01852."""
    def init(generator: np.random.Generator, shape: Shape) -> np.ndarray:
        return (generator.standard_normal(shape) * gain / np.sqrt(fans(shape)[0])).astype(np.float32)
    return _described(f'kaiming_normal(gain {gain:g})', init)


def kaiming_uniform(gain: float = RELU_GAIN) -> Init:
    """Uniform in +-b, b = gain * sqrt(3 / fan_in): the variance of kaiming_normal."""
    def init(generator: np.random.Generator, shape: Shape) -> np.ndarray:
        bound = gain * np.sqrt(3 / fans(shape)[0])
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
