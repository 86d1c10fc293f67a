"""New Tensors: from numbers, filled, ranges, random.  `pyops.zeros(2, 3)`, `pyops.randn(4, generator=rng)`.

A shape is given as numbers or as one tuple.  dtype: float32, float64, int32 or bool.  generator: a numpy Generator; None:
numbers that depend on pyops.seed and on the number of earlier calls.
"""
from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pyops import ndarray
from pyops.autograd import Tensor
from pyops.autograd.tape import as_array
from pyops.methods import accepts_torch_names, several
from pyops.params import random_generator, seed

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import DTypeLike

    from pyops.backend.device import Device
    from pyops.ndarray import NDArray
    from pyops.typing import Numbers

Function = TypeVar('Function', bound='Callable[..., Any]')

# Numpy's dtypes by PyTorch's names.  int64 is another name of int32, the only dtype of integers: x.long().dtype == pyops.int64.
float32, float64, int32, int64, bool_ = np.float32, np.float64, np.int32, np.int32, np.bool_


def _made(array: NDArray, requires_grad: bool) -> Tensor:
    return Tensor(array, requires_grad)


def _accepts_size(function: Function) -> Function:
    """Decorate f(*shape): accept the shape also as one argument, size= or shape=."""
    @functools.wraps(function)
    def wrapper(*shape: Any, **named: Any) -> Any:
        for name in ('size', 'shape'):
            if name in named:
                if shape:
                    raise TypeError(f'{function.__name__}: got sizes and also {name}; give one of them')
                shape = (named.pop(name),)
        return function(*shape, **named)
    return wrapper              # type: ignore[return-value]


def tensor(data: Numbers, dtype: DTypeLike | None = None, device: Device | None = None, requires_grad: bool = False) -> Tensor:
    """Return a Tensor with a copy of these numbers."""
    found = as_array(data, None, dtype)
    return _made(ndarray.array(found, None, device or (found.device if hasattr(data, 'device') else None)), requires_grad)


@_accepts_size
def zeros(*shape: Any, dtype: DTypeLike = np.float32, device: Device | None = None, requires_grad: bool = False) -> Tensor:
    """Return a Tensor of zeros."""
    return _made(ndarray.zeros(several(shape), dtype, device), requires_grad)


@_accepts_size
def ones(*shape: Any, dtype: DTypeLike = np.float32, device: Device | None = None, requires_grad: bool = False) -> Tensor:
    """Return a Tensor of ones."""
    return _made(ndarray.ones(several(shape), dtype, device), requires_grad)


@_accepts_size
def empty(*shape: Any, dtype: DTypeLike = np.float32, device: Device | None = None, requires_grad: bool = False) -> Tensor:
    """Return a Tensor with undefined contents."""
    return _made(ndarray.empty(several(shape), dtype, device), requires_grad)


@accepts_torch_names
def full(shape: Any, fill_value: float, dtype: DTypeLike | None = None, device: Device | None = None,
         requires_grad: bool = False) -> Tensor:
    """Return a Tensor filled with fill_value: int32 for an int, float32 for a float, unless a dtype is given."""
    return _made(ndarray.full(shape, fill_value, dtype, device), requires_grad)


@accepts_torch_names
def zeros_like(x: Tensor, dtype: DTypeLike | None = None, requires_grad: bool = False) -> Tensor:
    """Return zeros with the shape, the dtype and the device of x."""
    return zeros(x.shape, dtype=dtype or x.dtype, device=x.device, requires_grad=requires_grad)


@accepts_torch_names
def ones_like(x: Tensor, dtype: DTypeLike | None = None, requires_grad: bool = False) -> Tensor:
    """Return ones with the shape, the dtype and the device of x."""
    return ones(x.shape, dtype=dtype or x.dtype, device=x.device, requires_grad=requires_grad)


@accepts_torch_names
def full_like(x: Tensor, fill_value: float, dtype: DTypeLike | None = None, requires_grad: bool = False) -> Tensor:
    """Return a Tensor filled with fill_value, with the shape, the dtype and the device of x."""
    return full(x.shape, fill_value, dtype or x.dtype, x.device, requires_grad)


@accepts_torch_names
def arange(start: float, stop: float | None = None, step: float = 1, dtype: DTypeLike | None = None,
           device: Device | None = None,
           requires_grad: bool = False) -> Tensor:
    """Return start, start + step, ... below stop; arange(n): 0 to n - 1."""
    return _made(ndarray.arange(start, stop, step, dtype, device), requires_grad)


@accepts_torch_names
def linspace(start: float, stop: float, num: int = 50, dtype: DTypeLike = np.float32, device: Device | None = None,
             requires_grad: bool = False) -> Tensor:
    """Return `num` numbers at equal distances from start to stop, both included."""
    return _made(ndarray.array(np.linspace(start, stop, num), dtype, device), requires_grad)


def eye(rows: int, columns: int | None = None, dtype: DTypeLike = np.float32, device: Device | None = None,
        requires_grad: bool = False) -> Tensor:
    """Return a matrix with ones on its diagonal and zeros elsewhere."""
    return _made(ndarray.array(np.eye(rows, columns), dtype, device), requires_grad)


@_accepts_size
def rand(*shape: Any, generator: np.random.Generator | None = None, low: float = 0.0, high: float = 1.0,
         dtype: DTypeLike = np.float32, device: Device | None = None, requires_grad: bool = False) -> Tensor:
    """Return numbers drawn uniformly from [low, high)."""
    drawn = low + (high - low) * random_generator(generator).random(several(shape))
    if np.dtype(dtype) != np.float64:
        drawn = np.minimum(drawn.astype(np.float32), np.nextafter(np.float32(high), np.float32(low)))      # rounded up to high
    return _made(ndarray.array(drawn, dtype, device), requires_grad)


@_accepts_size
def randn(*shape: Any, generator: np.random.Generator | None = None, mean: float = 0.0, std: float = 1.0,
          dtype: DTypeLike = np.float32, device: Device | None = None, requires_grad: bool = False) -> Tensor:
    """Return numbers drawn from the normal distribution."""
    return _made(ndarray.array(mean + std * random_generator(generator).standard_normal(several(shape)), dtype, device),
                 requires_grad)


def randint(low: int = 0, high: Any = None, size: Any = (), generator: np.random.Generator | None = None,
            device: Device | None = None) -> Tensor:
    """Return int32 numbers drawn uniformly from [low, high); randint(n, size=...) and randint(n, size): from 0 to n - 1."""
    if isinstance(high, tuple | list):
        high, size = None, high
    low, high = (0, low) if high is None else (low, high)
    return Tensor(ndarray.array(random_generator(generator).integers(low, high, size), np.int32, device))


@_accepts_size
def randb(*shape: Any, p: float = 0.5, generator: np.random.Generator | None = None, device: Device | None = None) -> Tensor:
    """Return a mask whose elements are true with probability p."""
    return Tensor(ndarray.array(random_generator(generator).random(several(shape)) < p, None, device))


def randperm(n: int, generator: np.random.Generator | None = None, device: Device | None = None) -> Tensor:
    """Return the numbers 0 to n - 1 in random order, int32."""
    return Tensor(ndarray.array(random_generator(generator).permutation(n), np.int32, device))


@accepts_torch_names
def rand_like(x: Tensor, generator: np.random.Generator | None = None, requires_grad: bool = False) -> Tensor:
    """Return numbers drawn uniformly from [0, 1), with the shape, the dtype and the device of x."""
    return rand(x.shape, generator=generator, dtype=x.dtype, device=x.device, requires_grad=requires_grad)


@accepts_torch_names
def randn_like(x: Tensor, generator: np.random.Generator | None = None, requires_grad: bool = False) -> Tensor:
    """Return numbers drawn from the normal distribution, with the shape, the dtype and the device of x."""
    return randn(x.shape, generator=generator, dtype=x.dtype, device=x.device, requires_grad=requires_grad)


@accepts_torch_names
def empty_like(x: Tensor, dtype: DTypeLike | None = None, requires_grad: bool = False) -> Tensor:
    """Return a Tensor with undefined contents, with the shape, the dtype and the device of x."""
    return empty(x.shape, dtype=dtype or x.dtype, device=x.device, requires_grad=requires_grad)


@accepts_torch_names
def randint_like(x: Tensor, low: int, high: int | None = None, generator: np.random.Generator | None = None) -> Tensor:
    """Return int32 numbers drawn uniformly from [low, high), or from 0 to low - 1, with the shape and the device of x."""
    return randint(low, high, x.shape, generator, x.device)


def logspace(start: float, end: float, steps: int, base: float = 10.0, dtype: DTypeLike = np.float32,
             device: Device | None = None, requires_grad: bool = False) -> Tensor:
    """Return `steps` powers of base, with exponents at equal distances from start to end, both included."""
    return _made(ndarray.array(np.logspace(start, end, steps, base=base), dtype, device), requires_grad)


def as_tensor(data: Numbers, dtype: DTypeLike | None = None, device: Device | None = None) -> Tensor:
    """Return a Tensor itself if it has this dtype and device, a Tensor over the memory of an NDArray, else a copy."""
    if not isinstance(data, Tensor | ndarray.NDArray):
        return tensor(data, dtype, device)
    x = data if isinstance(data, Tensor) else Tensor(data)
    targets = [target for target in (dtype, device) if target is not None]
    return x.to(*targets) if targets else x


asarray = as_tensor


def from_numpy(a: np.ndarray) -> Tensor:
    """Return a Tensor over the memory of a numpy array of float32, float64 or int32, else TypeError: pyops.tensor copies."""
    return Tensor(ndarray.from_numpy(a))


def normal(mean: Any = 0.0, std: Any = 1.0, size: Any = None, generator: np.random.Generator | None = None,
           device: Device | None = None, requires_grad: bool = False) -> Tensor:
    """Return numbers drawn from normal distributions.  mean and std: numbers, with a size, or Tensors that broadcast."""
    given = [np.asarray(x) for x in (mean, std)]
    shape = np.broadcast_shapes(*(x.shape for x in given)) if size is None else several((size,))
    return _made(ndarray.array(given[0] + given[1] * random_generator(generator).standard_normal(shape), np.float32, device),
                 requires_grad)


def bernoulli(p: Numbers, generator: np.random.Generator | None = None) -> Tensor:
    """Return 1 with the probability in each element of p, else 0, with its shape and dtype; it has no gradient."""
    chances = as_tensor(p).detach()
    return Tensor(ndarray.array(random_generator(generator).random(chances.shape) < chances.numpy(), chances.dtype,
                                chances.device))


def multinomial(weights: Numbers, num_samples: int, replacement: bool = False,
                generator: np.random.Generator | None = None) -> Tensor:
    """Return int32 indices (..., num_samples) drawn with probabilities proportional to weights (n,) or (rows, n).

    replacement: an index may be drawn again.  ValueError for negative weights, or fewer positive ones than samples.
    """
    chances, rng = np.atleast_2d(np.asarray(as_tensor(weights).detach().numpy(), np.float64)), random_generator(generator)
    enough = chances.sum(1) > 0 if replacement else (chances > 0).sum(1) >= num_samples
    if chances.ndim > 2 or (chances < 0).any() or not enough.all():
        raise ValueError(f'multinomial: expected weights (n,) or (rows, n) of at least 0, enough of them positive for '
                         f'{num_samples} samples, got shape {chances.shape}')
    drawn = np.array([rng.choice(len(row), num_samples, replacement, row / row.sum()) for row in chances], np.int32)
    return Tensor(ndarray.array(drawn.reshape((*np.shape(weights)[:-1], num_samples))))


manual_seed = seed
