"""Initialisers in PyTorch's form: nn.init.kaiming_normal_(layer.weight) sets the values of a Tensor in place, and returns it.

pyops.init has the same ones as functions of shapes, for Parameters that do not have values yet.
generator: a numpy Generator; None: the next from the process seed (pyops.seed).
"""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from pyops import init
from pyops.autograd import no_grad
from pyops.nn.module import Parameter
from pyops.params import next_key

if TYPE_CHECKING:
    from pyops.autograd import Tensor
    from pyops.typing import Init

Generator = np.random.Generator | None


def _set(tensor: Tensor, make: Init, generator: Generator) -> Tensor:
    """Set a Tensor to make(generator, shape)."""
    values = make(np.random.default_rng(next_key('init')) if generator is None else generator, tensor.shape)
    if isinstance(tensor, Parameter):
        tensor.assign(values)                   # also before its tree is complete
    else:
        with no_grad():
            tensor[...] = values
    return tensor


def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """Return the factor by which weights before this function grow.   param: the negative slope of 'leaky_relu', 0.01 if None

    nonlinearity: 'linear', 'conv1d', 'conv2d', 'sigmoid', 'tanh', 'relu', 'leaky_relu' or 'selu'
    """
    slope = 0.01 if param is None else param
    gains = {**dict.fromkeys(('linear', 'conv1d', 'conv2d', 'conv3d', 'conv_transpose1d', 'conv_transpose2d', 'sigmoid'), 1.0),
             'tanh': 5 / 3, 'relu': math.sqrt(2), 'leaky_relu': math.sqrt(2 / (1 + slope ** 2)), 'selu': 0.75}
    if nonlinearity not in gains:
        raise ValueError(f'calculate_gain: nonlinearity: expected one of {", ".join(gains)}, got {nonlinearity!r}')
    return gains[nonlinearity]


def zeros_(tensor: Tensor) -> Tensor:
    """Set all elements to 0."""
    return _set(tensor, init.zeros(), None)


def ones_(tensor: Tensor) -> Tensor:
    """Set all elements to 1."""
    return _set(tensor, init.ones(), None)


def constant_(tensor: Tensor, val: float) -> Tensor:
    """Set all elements to val."""
    return _set(tensor, init.constant(val), None)


def uniform_(tensor: Tensor, a: float = 0.0, b: float = 1.0, generator: Generator = None) -> Tensor:
    """Draw the elements uniformly from [a, b)."""
    return _set(tensor, init.uniform(a, b), generator)


def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: Generator = None) -> Tensor:
    """Draw the elements from a normal distribution."""
    return _set(tensor, lambda rng, shape: (rng.standard_normal(shape) * std + mean).astype(np.float32), generator)


def trunc_normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0,
                  generator: Generator = None) -> Tensor:
    """Draw the elements from a normal distribution, again while they are outside a to b."""
    if not a < b or mean + 8 * std < a or mean - 8 * std > b:
        raise ValueError(f'trunc_normal_: expected a < b within 8 std of the mean, got {a} and {b} for {mean} and {std}')

    def make(rng: np.random.Generator, shape: Any) -> np.ndarray:
        values = rng.standard_normal(shape) * std + mean
        while (outside := (values < a) | (values > b)).any():
            values[outside] = rng.standard_normal(np.count_nonzero(outside)) * std + mean
        return values.astype(np.float32)
    return _set(tensor, make, generator)


def eye_(tensor: Tensor) -> Tensor:
    """Set a matrix to 1 on its diagonal, 0 elsewhere."""
    return _set(tensor, lambda rng, shape: np.eye(*_matrix('eye_', shape), dtype=np.float32), None)


def xavier_uniform_(tensor: Tensor, gain: float = 1.0, generator: Generator = None) -> Tensor:
    """Draw uniformly from +-b, b = gain sqrt(6 / (fan_in + fan_out)).  Glorot and Bengio 2010."""
    return _set(tensor, init.xavier_uniform(gain), generator)


def xavier_normal_(tensor: Tensor, gain: float = 1.0, generator: Generator = None) -> Tensor:
    """Draw from a normal distribution of standard deviation gain sqrt(2 / (fan_in + fan_out))."""
    return _set(tensor, init.xavier_normal(gain), generator)


def kaiming_uniform_(tensor: Tensor, a: float = 0, mode: str = 'fan_in', nonlinearity: str = 'leaky_relu',
                     generator: Generator = None) -> Tensor:
    """Draw uniformly with the variance of kaiming_normal_."""
    return _set(tensor, init.kaiming_uniform(_kaiming_gain(tensor, a, mode, nonlinearity)), generator)


def kaiming_normal_(tensor: Tensor, a: float = 0, mode: str = 'fan_in', nonlinearity: str = 'leaky_relu',
                    generator: Generator = None) -> Tensor:
    """Draw from a normal distribution of standard deviation gain / sqrt(fan).  He et al. 2015, arXiv:1502.01852.

    mode: 'fan_in' or 'fan_out'.  nonlinearity, a: as in calculate_gain
    """
    return _set(tensor, init.kaiming_normal(_kaiming_gain(tensor, a, mode, nonlinearity)), generator)


def _kaiming_gain(tensor: Tensor, a: float, mode: str, nonlinearity: str) -> float:
    """Return the gain that pyops.init divides by the root of fan_in."""
    if mode not in ('fan_in', 'fan_out'):
        raise ValueError(f"kaiming: mode: expected 'fan_in' or 'fan_out', got {mode!r}")
    fan_in, fan_out = init.fans(tensor.shape)
    return calculate_gain(nonlinearity, a) * (1.0 if mode == 'fan_in' else math.sqrt(fan_in / fan_out))


def orthogonal_(tensor: Tensor, gain: float = 1, generator: Generator = None) -> Tensor:
    """Set a matrix (rows, product of the other sizes) to gain times one with orthonormal rows or columns."""
    def make(rng: np.random.Generator, shape: Any) -> np.ndarray:
        rows, columns = shape[0], math.prod(shape[1:])
        q, r = np.linalg.qr(rng.standard_normal((max(rows, columns), min(rows, columns))))
        q = q * np.sign(np.diag(r))
        return (gain * (q if rows >= columns else q.T)).reshape(shape).astype(np.float32)
    if tensor.ndim < 2:
        raise ValueError(f'orthogonal_: expected two axes or more, got shape {tensor.shape}')
    return _set(tensor, make, generator)


def sparse_(tensor: Tensor, sparsity: float, std: float = 0.01, generator: Generator = None) -> Tensor:
    """Draw a matrix from a normal distribution, then set the fraction `sparsity` of each column, rounded up, to 0.

    Martens 2010.
    """
    def make(rng: np.random.Generator, shape: Any) -> np.ndarray:
        values = (rng.standard_normal(shape) * std).astype(np.float32)
        for column in range(shape[1]):
            values[rng.permutation(shape[0])[:math.ceil(sparsity * shape[0])], column] = 0
        return values
    _matrix('sparse_', tensor.shape)
    if not 0 <= sparsity <= 1:
        raise ValueError(f'sparse_: sparsity: expected 0 to 1, got {sparsity}')
    return _set(tensor, make, generator)


def dirac_(tensor: Tensor, groups: int = 1) -> Tensor:
    """Set filters (O, C, k, ...) so that a convolution with padding returns its input in each group: 1 at the centre of the
    filter of output i for input i.  ValueError for another number of axes than 3 to 5, or groups that do not divide O."""
    if tensor.ndim not in (3, 4, 5) or tensor.shape[0] % groups:
        raise ValueError(f'dirac_: expected filters (O, C, k, ...) of 3 to 5 axes, O a multiple of {groups} groups, got shape '
                         f'{tensor.shape}')

    def make(rng: np.random.Generator, shape: Any) -> np.ndarray:
        values, outputs = np.zeros(shape, np.float32), shape[0] // groups
        for i in range(min(outputs, shape[1])):
            values[(slice(i, None, outputs), i, *(n // 2 for n in shape[2:]))] = 1
        return values
    return _set(tensor, make, None)


def _matrix(who: str, shape: Any) -> tuple[int, int]:
    if len(shape) != 2:
        raise ValueError(f'{who}: expected a matrix, got shape {shape}')
    return shape
