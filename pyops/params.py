"""The parameters of a model: one flat buffer with named views, and the same for gradients and Adam's moments.

Zeroing, the gradient norm, an Adam step and a checkpoint therefore take one call each.  An initial value is a function of
(seed, name, shape) alone, independent of the order of construction.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops import backend
from pyops.backend import library
from pyops.backend.kernels import Kernel, declare

if TYPE_CHECKING:
    from collections.abc import Collection, ItemsView, Iterator, Mapping, Sequence

    from numpy.typing import DTypeLike

    from pyops.distributed import Shares
    from pyops.typing import Array, Init, Shape

_FLOAT = np.dtype(np.float32)
ALIGN = 16      # floats: every parameter starts on its own cache line


class Parameter(NamedTuple):
    """One parameter of a Parameters, as op classes take it."""
    name: str
    value: Array
    grad: Array             # backward passes add to it
    touched: Array | None = None       # int32, one word per PYOPS_GRAD_BLOCK floats of a sparse gradient; see Spec
    rounded: Array | None = None       # a bfloat16 copy of the value; see Parameters.round

    @property
    def owner(self) -> str:
        """The layer: 'encoder.rnn.0' for 'encoder.rnn.0.w_ih'; the name itself if it has no dot."""
        return self.name.rpartition('.')[0] or self.name

    def operand(self, dtype: np.dtype) -> Array:
        """Return the array that a product with activations of this dtype multiplies with."""
        return self.value if self.rounded is None or dtype == np.float32 else self.rounded


class Spec(NamedTuple):
    """A parameter before it has memory: its shape, and init(generator, shape) -> float32 array.

    sparse: each step updates only a few rows of the gradient, as for an embedding; backward kernels mark the updated rows in
    `touched` (pyops_zero_touched in pyops.h).  Zeroing, the gradient norm and Adam then skip the reads of all other rows,
    whose gradient is 0; the results are bit-identical.
    """
    shape: Shape
    init: Init
    sparse: bool = False


def generator(seed: int, name: str) -> np.random.Generator:
    """Return a numpy Generator (Philox) keyed with a hash of (seed, name)."""
    return np.random.Generator(np.random.Philox(key=key(seed, name)))


@functools.lru_cache(1024, typed=True)      # typed: 1 and True have other texts
def key(seed: int, name: str) -> int:
    """Return a 64-bit hash of (seed, name)."""
    return int.from_bytes(hashlib.blake2b(f'{seed}/{name}'.encode(), digest_size=8).digest(), 'little')


_seed = 0
_draws: dict[str, Iterator[int]] = {}


def seed(value: int) -> None:
    """Set the process seed, which layers, parameters and transforms use that have neither a name in a module tree nor a seed:
    layers and parameters outside any module, in order of creation, and transforms called on a single image.

    It is 0 by default, so a program draws the same numbers in every run.
    """
    global _seed
    _seed = operator.index(value)
    _draws.clear()


def next_key(kind: str) -> int:
    """Return a 64-bit hash of (process seed, kind, number of earlier calls with that kind)."""
    return key(_seed, f'{kind}.{next(_draws.setdefault(kind, itertools.count()))}')


def random_generator(generator: np.random.Generator | None) -> np.random.Generator:
    """Return a numpy Generator unchanged; for None a new one that depends on pyops.seed and on the number of earlier calls."""
    if generator is None:
        return np.random.Generator(np.random.Philox(key=next_key('tensor')))
    if not isinstance(generator, np.random.Generator):
        raise TypeError(f'generator: expected a numpy Generator, such as numpy.random.default_rng(0), got '
                        f'{type(generator).__name__}')
    return generator


class Parameters:
    """A model's parameters, from {name: Spec}.  params[name] is a Parameter; values, grads, m, v are flat float32 buffers (n,).

    seed: of the initial values; None leaves them 0, for values loaded from elsewhere.
    dtype: float32, or float64 in host memory for modules of that dtype; see nn.Module.double.
    touched: int32, one word per PYOPS_GRAD_BLOCK floats of grads; None if no parameter is sparse.
    shares: None, or the pyops.distributed.Shares among the ranks; then m and v hold the share of this rank alone.
    rounded: the values as bfloat16 (n,), if the device stores activations as bfloat16, else None.
    """

    def __init__(self, specs: Mapping[str, Spec], seed: int | None = 0, dtype: DTypeLike = np.float32) -> None:
        self.seed, self._places, self.dtype, n = seed, {}, np.dtype(dtype), 0
        is_float32 = self.dtype == np.float32
        if not (is_float32 or backend.current_device().is_host):
            raise TypeError(f'parameters of {self.dtype} are on the CPU only, got {backend.current_device()}; use float32')
        self._block = library.cpu().lib.PYOPS_GRAD_BLOCK
        for name, spec in specs.items():
            align = self._block if spec.sparse else ALIGN       # shares no block with the parameter before it
            start = -(-n // align) * align
            self._places[name] = (start, spec.shape)
            n = start + -(-math.prod(spec.shape) // ALIGN) * ALIGN
        self.values, self.grads, self.m, self.v = (backend.zeros(n, self.dtype) for _ in range(4))
        half = is_float32 and backend.activations() == backend.BF16
        self.rounded = backend.zeros(n, backend.BF16) if half else None
        self._is_rounded = False            # inside rounded_once()
        self._sparse = {name for name, spec in specs.items() if spec.sparse and is_float32}
        self.touched = backend.put(self._untouched(n)) if self._sparse else None
        if seed is not None:
            for name, spec in specs.items():
                self.view(self.values, name)[...] = spec.init(generator(seed, name), spec.shape)
        self._inits = {name: getattr(spec.init, '__doc__', None) or 'given values' for name, spec in specs.items()}
        self.shares: Shares | None = None

    def parts(self) -> Iterator[tuple[str, tuple[int, Shape], Array | None]]:
        """Yield each parameter: its name, (index of its first element in the flat buffers, shape), and its `touched`."""
        for name, place in self._places.items():
            yield name, place, self[name].touched

    def places(self) -> ItemsView[str, tuple[int, Shape]]:
        """Return (name, (index of its first element in the flat buffers, shape)) of each parameter."""
        return self._places.items()

    def view(self, flat: Array, name: str) -> Any:
        """Return the part of a flat buffer that belongs to parameter `name`, in its shape."""
        start, shape = self._places[name]
        return flat[start:start + math.prod(shape)].reshape(shape)

    def shard(self, shares: Shares) -> None:
        """Replace m and v by zeros for the share of this rank alone.  Call it before the optimizer is created."""
        self.shares = shares
        self.m, self.v = (backend.zeros(shares.mine.stop - shares.mine.start) for _ in range(2))

    def _untouched(self, n: int) -> np.ndarray:
        """Return the initial `touched` for n floats: 0 for blocks that hold only sparse parameters, else PYOPS_DENSE."""
        touched = np.zeros(-(-n // self._block), np.int32)
        for name in self._places.keys() - self._sparse:
            touched[self._blocks(name)] = library.cpu().lib.PYOPS_DENSE
        return touched

    def __getitem__(self, name: str) -> Parameter:
        touched = None if self.touched is None or name not in self._sparse else self.touched[self._blocks(name)]
        rounded = None if self.rounded is None else self.view(self.rounded, name)
        return Parameter(name, self.view(self.values, name), self.view(self.grads, name), touched, rounded)

    def joined(self, names: Sequence[str]) -> Parameter | None:
        """Return one Parameter with the rows of all these parameters, in this order, over the same memory; None if that needs
        a copy: their memory is not adjacent, their rows differ in shape, or a gradient is sparse."""
        (first, shape), end, rows = self._places[names[0]], self._places[names[0]][0], 0
        for name in names:
            start, (n, *row) = self._places[name]
            if start != end or tuple(row) != shape[1:] or name in self._sparse:
                return None
            end, rows = start + n * math.prod(row), rows + n

        def part(flat: Array) -> Array:
            return flat[first:end].reshape(rows, *shape[1:])
        return Parameter('+'.join(names), part(self.values), part(self.grads),
                         rounded=None if self.rounded is None else part(self.rounded))

    def _blocks(self, name: str) -> slice:
        """Return the slice of gradient blocks that a parameter overlaps."""
        start, shape = self._places[name]
        return slice(start // self._block, -(-(start + math.prod(shape)) // self._block))

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def drop(self, names: Collection[str]) -> None:
        """Forget these parameters; the buffers keep their size."""
        self._places = {name: place for name, place in self._places.items() if name not in names}

    def arrays(self) -> dict[str, Array]:
        """Return {name: view of the values}."""
        return {name: self.view(self.values, name) for name in self}

    def count(self) -> int:
        """Return the total number of elements."""
        return sum(math.prod(shape) for _, shape in self._places.values())

    def initial(self, name: str) -> str:
        """Describe the initial values of a parameter, such as 'zeros'."""
        return self._inits[name]

    def round(self) -> None:
        """Copy the values to `rounded`, if there is one.  A model calls it at the start of each forward pass, so that products
        multiply with the current weights, and no product rounds them itself.  Does nothing inside rounded_once()."""
        if self.rounded is not None and not self._is_rounded:
            backend.convert(self.rounded, self.values)

    @contextlib.contextmanager
    def rounded_once(self) -> Iterator[None]:
        """Round the values now, and not again inside the block: for several forward passes with the same values."""
        self.round()
        before, self._is_rounded = self._is_rounded, True
        try:
            yield
        finally:
            self._is_rounded = before

    def zero_grads(self) -> None:
        if self.dtype is not _FLOAT:
            self.grads.fill(0)
        elif self.touched is None:
            backend.launch('fill', self.grads, self.grads.size, 0.0)
        else:
            backend.launch('zero_touched', self.grads, self.touched, self.grads.size)


declare(zero_touched=Kernel())
