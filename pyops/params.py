"""The parameters of a model: one flat buffer with named views, and the same for gradients and Adam's moments.

So zeroing, the gradient norm, an Adam step and a checkpoint are one call each.  An initial value is a function of
(seed, name, shape) alone: building layers in another order changes nothing.
"""
import hashlib
import itertools
import operator
from typing import NamedTuple

import numpy as np

from pyops import backend
from pyops.backend import library
from pyops.backend.kernels import Kernel, declare

ALIGN = 16      # floats: every parameter begins on its own cache line


class Parameter(NamedTuple):
    name: str
    value: np.ndarray
    grad: np.ndarray        # backward passes add to it
    touched: np.ndarray | None = None       # int32, a word for each PYOPS_GRAD_BLOCK floats of a sparse gradient, see Spec

    @property
    def owner(self):
        """What it belongs to: 'encoder.rnn.0' of 'encoder.rnn.0.w_ih'; its own name where there is no dot."""
        return self.name.rpartition('.')[0] or self.name


class Spec(NamedTuple):
    """What a parameter is before it has memory: its shape, and init(generator, shape) -> float32 array.

    sparse: a step adds to few rows of its gradient, as to those of an embedding, and whatever adds to it says in `touched`
    which (pyops_zero_touched in pyops.h).  Zeroing, the gradient norm and Adam then leave the gradient of the others alone,
    which is 0: the same bits, without reading them.
    """
    shape: tuple[int, ...]
    init: object
    sparse: bool = False


def generator(seed, name):
    """A numpy Generator that is a function of (seed, name): Philox, keyed with a hash of both."""
    return np.random.Generator(np.random.Philox(key=key(seed, name)))


def key(seed, name):
    """64 bits from (seed, name)."""
    return int.from_bytes(hashlib.blake2b(f'{seed}/{name}'.encode(), digest_size=8).digest(), 'little')


_seed, _draws = 0, {}


def seed(value):
    """Seed the random numbers of the process, for what has neither a name in a tree of modules nor a seed of its own: layers
    and parameters that belong to no module, in the order in which they are made, and transforms called on a single image.

    The seed is 0 unless this is called, so a program repeats its numbers in every run.
    """
    global _seed
    _seed = operator.index(value)
    _draws.clear()


def next_key(kind):
    """Return 64 bits from (the seed of the process, kind, the number of earlier calls for that kind)."""
    return key(_seed, f'{kind}.{next(_draws.setdefault(kind, itertools.count()))}')


class Parameters:
    """specs: {name: Spec}.  params[name] is a Parameter; values, grads, m and v are the flat float32 buffers (n,).
    seed None: all are zero, for values that come from elsewhere.

    touched: int32, a word for each PYOPS_GRAD_BLOCK floats of grads; None where no parameter is sparse.
    """

    def __init__(self, specs, seed=0):
        self.seed, self._places, n = seed, {}, 0
        self._block = library.cpu().lib.PYOPS_GRAD_BLOCK
        for name, spec in specs.items():
            align = self._block if spec.sparse else ALIGN       # the first of its blocks is its own
            start = -(-n // align) * align
            self._places[name] = (start, spec.shape)
            n = start + -(-int(np.prod(spec.shape)) // ALIGN) * ALIGN
        self.values, self.grads, self.m, self.v = (backend.zeros(n) for _ in range(4))
        self._sparse = {name for name, spec in specs.items() if spec.sparse}
        self.touched = backend.put(self._untouched(n)) if self._sparse else None
        for name, spec in specs.items() if seed is not None else ():
            self.view(self.values, name)[...] = spec.init(generator(seed, name), spec.shape)
        self._inits = {name: spec.init for name, spec in specs.items()}

    def view(self, flat, name):
        """The part of a flat buffer that belongs to `name`, in its shape."""
        start, shape = self._places[name]
        return flat[start:start + int(np.prod(shape))].reshape(shape)

    def _untouched(self, n):
        """What `touched` begins as: 0 for the blocks of sparse parameters that no other parameter reaches into."""
        touched = np.zeros(-(-n // self._block), np.int32)
        for name in self._places.keys() - self._sparse:
            touched[self._blocks(name)] = library.cpu().lib.PYOPS_DENSE
        return touched

    def __getitem__(self, name):
        touched = self.touched[self._blocks(name)] if name in self._sparse else None
        return Parameter(name, self.view(self.values, name), self.view(self.grads, name), touched)

    def _blocks(self, name):
        """Which blocks of the flat buffers a parameter has a part in."""
        start, shape = self._places[name]
        return slice(start // self._block, -(-(start + int(np.prod(shape))) // self._block))

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
        if self.touched is None:
            backend.launch('fill', self.grads, self.grads.size, 0.0)
        else:
            backend.launch('zero_touched', self.grads, self.touched, self.grads.size)


declare(zero_touched=Kernel())
