"""Initialisers: each function returns init(generator, shape) -> float32 array, for pyops.params.Spec.

The init's docstring is printed as its description in the plan of a step.
"""
import math

import numpy as np

RELU_GAIN = math.sqrt(2)        # ReLU halves the variance


def _described(text, init):
    init.__doc__ = text
    return init


def zeros():
    """Initialise with 0."""
    return _described('zeros', lambda generator, shape: np.zeros(shape, np.float32))


def ones():
    """Initialise with 1."""
    return _described('ones', lambda generator, shape: np.ones(shape, np.float32))


def constant(value):
    """Initialise with value."""
    return _described(f'constant({value:g})', lambda generator, shape: np.full(shape, value, np.float32))


def uniform(low, high):
    """Initialise uniformly in [low, high)."""
    return _described(f'uniform({low:g}, {high:g})',
                      lambda generator, shape: generator.uniform(low, high, shape).astype(np.float32))


def normal(sigma):
    """Initialise from a normal distribution with mean 0 and standard deviation sigma."""
    return _described(f'normal(0, {sigma:g})',
                      lambda generator, shape: (generator.standard_normal(shape) * sigma).astype(np.float32))


def fans(shape):
    """Return fan_in and fan_out of a weight (fan_out, fan_in) or (out, in, *window); a window multiplies both by its size."""
    if len(shape) < 2:
        raise ValueError(f'init: expected a weight of two axes or more, (fan_out, fan_in, ...), got shape {tuple(shape)}')
    return shape[1] * math.prod(shape[2:]), shape[0] * math.prod(shape[2:])


def xavier_normal(gain=1.0):
    """sigma = gain * sqrt(2 / (fan_in + fan_out)).  Glorot and Bengio 2010."""
    def init(generator, shape):
        return (generator.standard_normal(shape) * gain * np.sqrt(2 / sum(fans(shape)))).astype(np.float32)
    return _described(f'xavier_normal(gain {gain:g})', init)


def xavier_uniform(gain=1.0):
    """Uniform in +-b, b = gain * sqrt(6 / (fan_in + fan_out)): the variance of xavier_normal."""
    def init(generator, shape):
        bound = gain * np.sqrt(6 / sum(fans(shape)))
        return generator.uniform(-bound, bound, shape).astype(np.float32)
    return _described(f'xavier_uniform(gain {gain:g})', init)


def kaiming_normal(gain=RELU_GAIN):
    """sigma = gain / sqrt(fan_in), for weights followed by ReLU.  He et al. 2015, arXiv:1502.01852."""
    def init(generator, shape):
        return (generator.standard_normal(shape) * gain / np.sqrt(fans(shape)[0])).astype(np.float32)
    return _described(f'kaiming_normal(gain {gain:g})', init)


def kaiming_uniform(gain=RELU_GAIN):
    """Uniform in +-b, b = gain * sqrt(3 / fan_in): the variance of kaiming_normal."""
    def init(generator, shape):
        bound = gain * np.sqrt(3 / fans(shape)[0])
        return generator.uniform(-bound, bound, shape).astype(np.float32)
    return _described(f'kaiming_uniform(gain {gain:g})', init)


def stacked(*inits):
    """Stack blocks of equal height along axis 0, each with its own init, such as the gates of a recurrent weight."""
    def init(generator, shape):
        block = (shape[0] // len(inits), *shape[1:])
        return np.concatenate([one(generator, block) for one in inits])
    return _described(' over '.join(one.__doc__ for one in inits), init)
