"""New Tensors: from numbers, filled, ranges, random.  `pyops.zeros(2, 3)`, `pyops.randn(4, generator=rng)`.

A shape is given as numbers or as one tuple.  dtype: float32, float64, int32 or bool.  generator: a numpy Generator; None:
numbers that depend on pyops.seed and on the number of earlier calls.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyops import ndarray
from pyops.autograd import Tensor
from pyops.autograd.tape import as_array
from pyops.methods import several
from pyops.params import next_key

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from pyops.backend.device import Device
    from pyops.ndarray import NDArray
    from pyops.typing import Numbers


# Numpy's dtypes by PyTorch's names.  int64 is another name of int32, the only dtype of integers: x.long().dtype == pyops.int64.
float32, float64, int32, int64, bool_ = np.float32, np.float64, np.int32, np.int32, np.bool_


def _made(array: NDArray, requires_grad: bool) -> Tensor:
    return Tensor(array, requires_grad)


def tensor(data: Numbers, dtype: DTypeLike | None = None, device: Device | None = None, requires_grad: bool = False) -> Tensor:
    """Return a Tensor with a copy of these numbers."""
    found = as_array(data, None, dtype)
    return _made(ndarray.array(found, None, device or (found.device if hasattr(data, 'device') else None)), requires_grad)


def zeros(*shape: Any, dtype: DTypeLike = np.float32, device: Device | None = None, requires_grad: bool = False) -> Tensor:
    """Return a Tensor of zeros."""
    return _made(ndarray.zeros(several(shape), dtype, device), requires_grad)


def ones(*shape: Any, dtype: DTypeLike = np.float32, device: Device | None = None, requires_grad: bool = False) -> Tensor:
    """Return a Tensor of ones."""
    return _made(ndarray.ones(several(shape), dtype, device), requires_grad)


def empty(*shape: Any, dtype: DTypeLike = np.float32, device: Device | None = None, requires_grad: bool = False) -> Tensor:
    """Return a Tensor with undefined contents."""
    return _made(ndarray.empty(several(shape), dtype, device), requires_grad)


def full(shape: Any, value: float, dtype: DTypeLike | None = None, device: Device | None = None,
         requires_grad: bool = False) -> Tensor:
    """Return a Tensor filled with value: int32 for an int, float32 for a float, unless a dtype is given."""
    return _made(ndarray.full(shape, value, dtype, device), requires_grad)


def zeros_like(x: Tensor, dtype: DTypeLike | None = None, requires_grad: bool = False) -> Tensor:
    """Return zeros with the shape, the dtype and the device of x."""
    return zeros(x.shape, dtype=dtype or x.dtype, device=x.device, requires_grad=requires_grad)


def ones_like(x: Tensor, dtype: DTypeLike | None = None, requires_grad: bool = False) -> Tensor:
    """Return ones with the shape, the dtype and the device of x."""
    return ones(x.shape, dtype=dtype or x.dtype, device=x.device, requires_grad=requires_grad)


def full_like(x: Tensor, value: float, dtype: DTypeLike | None = None, requires_grad: bool = False) -> Tensor:
    """Return a Tensor filled with value, with the shape, the dtype and the device of x."""
    return full(x.shape, value, dtype or x.dtype, x.device, requires_grad)


def arange(start: float, stop: float | None = None, step: float = 1, dtype: DTypeLike | None = None,
           device: Device | None = None,
           requires_grad: bool = False) -> Tensor:
    """Return start, start + step, ... below stop; arange(n): 0 to n - 1."""
    return _made(ndarray.arange(start, stop, step, dtype, device), requires_grad)


def linspace(start: float, stop: float, num: int = 50, dtype: DTypeLike = np.float32, device: Device | None = None,
             requires_grad: bool = False) -> Tensor:
    """Return `num` numbers at equal distances from start to stop, both included."""
    return _made(ndarray.array(np.linspace(start, stop, num), dtype, device), requires_grad)


def eye(rows: int, columns: int | None = None, dtype: DTypeLike = np.float32, device: Device | None = None,
        requires_grad: bool = False) -> Tensor:
    """Return a matrix with ones on its diagonal and zeros elsewhere."""
    return _made(ndarray.array(np.eye(rows, columns), dtype, device), requires_grad)


def _generator(generator: np.random.Generator | None) -> np.random.Generator:
    if generator is None:
        return np.random.Generator(np.random.Philox(key=next_key('tensor')))
    if not isinstance(generator, np.random.Generator):
        raise TypeError(f'generator: expected a numpy Generator, such as numpy.random.default_rng(0), got '
                        f'{type(generator).__name__}')
    return generator


def rand(*shape: Any, generator: np.random.Generator | None = None, low: float = 0.0, high: float = 1.0,
         dtype: DTypeLike = np.float32, device: Device | None = None, requires_grad: bool = False) -> Tensor:
    """Return numbers drawn uniformly from [low, high)."""
    drawn = low + (high - low) * _generator(generator).random(several(shape))
    if np.dtype(dtype) != np.float64:
        drawn = np.minimum(drawn.astype(np.float32), np.nextafter(np.float32(high), np.float32(low)))      # rounded up to high
    return _made(ndarray.array(drawn, dtype, device), requires_grad)


def randn(*shape: Any, generator: np.random.Generator | None = None, mean: float = 0.0, std: float = 1.0,
          dtype: DTypeLike = np.float32, device: Device | None = None, requires_grad: bool = False) -> Tensor:
    """Return numbers drawn from the normal distribution."""
    return _made(ndarray.array(mean + std * _generator(generator).standard_normal(several(shape)), dtype, device),
                 requires_grad)


def randint(low: int, high: int | None = None, size: Any = (), generator: np.random.Generator | None = None,
            device: Device | None = None) -> Tensor:
    """Return int32 numbers drawn uniformly from [low, high); randint(n, size=...): from 0 to n - 1."""
    low, high = (0, low) if high is None else (low, high)
    return Tensor(ndarray.array(_generator(generator).integers(low, high, size), np.int32, device))


def randb(*shape: Any, p: float = 0.5, generator: np.random.Generator | None = None, device: Device | None = None) -> Tensor:
    """Return a mask whose elements are true with probability p."""
    return Tensor(ndarray.array(_generator(generator).random(several(shape)) < p, None, device))


def randperm(n: int, generator: np.random.Generator | None = None, device: Device | None = None) -> Tensor:
    """Return the numbers 0 to n - 1 in random order, int32."""
    return Tensor(ndarray.array(_generator(generator).permutation(n), np.int32, device))


def rand_like(x: Tensor, generator: np.random.Generator | None = None, requires_grad: bool = False) -> Tensor:
    """Return numbers drawn uniformly from [0, 1), with the shape, the dtype and the device of x."""
    return rand(x.shape, generator=generator, dtype=x.dtype, device=x.device, requires_grad=requires_grad)


def randn_like(x: Tensor, generator: np.random.Generator | None = None, requires_grad: bool = False) -> Tensor:
    """Return numbers drawn from the normal distribution, with the shape, the dtype and the device of x."""
    return randn(x.shape, generator=generator, dtype=x.dtype, device=x.device, requires_grad=requires_grad)
