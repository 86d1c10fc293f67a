"""The parameters of a model: one flat buffer with named views, and the same for gradients and Adam's moments.

So zeroing, the gradient norm, an Adam step and a checkpoint are one call each.  An initial value is a function of
(seed, name, shape) alone: building layers in another order changes nothing.
"""
import hashlib
from typing import NamedTuple

import numpy as np

from pyops import backend

ALIGN = 16      # floats: every parameter begins on its own cache line


class Parameter(NamedTuple):
    name: str
    value: np.ndarray
    grad: np.ndarray        # backward passes add to it

    @property
    def owner(self):
        """What it belongs to: 'encoder.rnn.0' of 'encoder.rnn.0.w_ih'; its own name where there is no dot."""
        return self.name.rpartition('.')[0] or self.name


class Spec(NamedTuple):
    """What a parameter is before it has memory: its shape, and init(generator, shape) -> float32 array."""
    shape: tuple[int, ...]
    init: object


def generator(seed, name):
    """A numpy Generator that is a function of (seed, name): Philox, keyed with a hash of both."""
    return np.random.Generator(np.random.Philox(key=key(seed, name)))


def key(seed, name):
    """64 bits from (seed, name)."""
    return int.from_bytes(hashlib.blake2b(f'{seed}/{name}'.encode(), digest_size=8).digest(), 'little')


class Parameters:
    """specs: {name: Spec}.  params[name] is a Parameter; values, grads, m and v are the flat float32 buffers (n,)."""

    def __init__(self, specs, seed=0):
        self.seed, self._places, n = seed, {}, 0
        for name, spec in specs.items():
            self._places[name] = (n, spec.shape)
            n += -(-int(np.prod(spec.shape)) // ALIGN) * ALIGN
        self.values, self.grads, self.m, self.v = (backend.zeros(n) for _ in range(4))
        for name, spec in specs.items():
            self.view(self.values, name)[...] = spec.init(generator(seed, name), spec.shape)
        self._inits = {name: spec.init for name, spec in specs.items()}

    def view(self, flat, name):
        """The part of a flat buffer that belongs to `name`, in its shape."""
        start, shape = self._places[name]
        return flat[start:start + int(np.prod(shape))].reshape(shape)

    def __getitem__(self, name):
        return Parameter(name, self.view(self.values, name), self.view(self.grads, name))

    def __iter__(self):
        return iter(self._places)

    def __len__(self):
        return len(self._places)

    def arrays(self):
        """The values by name: views."""
        return {name: self.view(self.values, name) for name in self}

    def count(self):
        """How many numbers there are to learn."""
        return sum(int(np.prod(shape)) for _, shape in self._places.values())

    def initial(self, name):
        """What the first values of a parameter are, in words."""
        return getattr(self._inits[name], '__doc__', None) or 'given values'

    def zero_grads(self):
        backend.launch('fill', self.grads, self.grads.size, 0.0)
