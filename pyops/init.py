"""Initial values: each function returns init(generator, shape) -> float32 array, for pyops.params.Spec.

The init's docstring says what it does, for the plan of a step.
"""
import numpy as np


def _described(text, init):
    init.__doc__ = text
    return init


def zeros():
    return _described('zeros', lambda generator, shape: np.zeros(shape, np.float32))


def ones():
    return _described('ones', lambda generator, shape: np.ones(shape, np.float32))


def uniform(low, high):
    return _described(f'uniform({low:g}, {high:g})',
                      lambda generator, shape: generator.uniform(low, high, shape).astype(np.float32))


def normal(sigma):
    return _described(f'normal(0, {sigma:g})',
                      lambda generator, shape: (generator.standard_normal(shape) * sigma).astype(np.float32))


def xavier_normal(gain=1.0):
    """sigma = gain * sqrt(2 / (fan_in + fan_out)) for a weight (fan_out, fan_in).  Glorot and Bengio 2010."""
    def init(generator, shape):
        fan_out, fan_in = shape
        return (generator.standard_normal(shape) * gain * np.sqrt(2 / (fan_in + fan_out))).astype(np.float32)
    return _described(f'xavier_normal(gain {gain:g})', init)


def stacked(*inits):
    """Blocks of equal height, one under another, each with its own init: the gates of a recurrent weight."""
    def init(generator, shape):
        block = (shape[0] // len(inits), *shape[1:])
        return np.concatenate([one(generator, block) for one in inits])
    return _described(' over '.join(one.__doc__ for one in inits), init)
