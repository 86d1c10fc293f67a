"""Random arrays, comparisons that name the worst element, and parameters on the current device."""
import numpy as np
from places import put

from pyops import backend
from pyops.autograd import Tensor
from pyops.data.batches import gather
from pyops.differences import Row
from pyops.params import Parameter

RTOL = 2e-5         # float32 sums compared with float64, relative to the largest element


def normal(rng, *shape, scale=1.0):
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def close(got, expected, rtol=RTOL, name='array'):
    """Compare two arrays.  The error of an element is relative to the largest expected element; report the worst one."""
    expected = np.asarray(expected)
    assert got.shape == expected.shape, f'{name}: shape {got.shape}, expected {expected.shape}'
    row = Row.of(name, got, expected, rtol)
    assert row.ok, (f'{name}: at {list(row.at)} got {row.got:.8g}, expected {row.want:.8g}: '
                    f'error {row.error:.2e}, tolerance {rtol:.0e} of the largest element')


def alike(torch, ours, theirs, *arrays):
    """Compare values and gradients of two functions of these arrays, PyTorch's in float64, for a random upstream gradient."""
    mine = [Tensor(x, requires_grad=True) for x in arrays]
    twins = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in arrays]
    y, want = ours(*mine), theirs(*twins)
    dy = normal(np.random.default_rng(y.size), *y.shape)
    y.backward(dy)
    want.backward(torch.tensor(dy, dtype=torch.float64))
    close(y.numpy(), want.detach().numpy())
    for one, twin in zip(mine, twins, strict=True):
        close(one.grad.numpy(), twin.grad.numpy())


def near(got, expected, tolerance, name='array'):
    """Compare two arrays with an absolute tolerance; report the worst element."""
    assert got.shape == expected.shape, f'{name}: shape {got.shape}, expected {expected.shape}'
    row = Row.of(name, got, expected, np.inf)
    error = abs(row.got - row.want)
    assert error <= tolerance, (f'{name}: at {list(row.at)} got {row.got:.8g}, expected {row.want:.8g}: '
                                f'error {error:.2e}, tolerance {tolerance:.0e}')


def same(got, expected, name='array'):
    """Require equal elements (0 equals -0, NaN equals nothing).  `expected` may be a scalar.  Report the worst element."""
    got, expected = np.asarray(got), np.asarray(expected)
    expected = expected if expected.ndim else np.broadcast_to(expected, got.shape)
    assert got.shape == expected.shape, f'{name}: shape {got.shape}, expected {expected.shape}'
    differs = got != expected
    if not differs.any():
        return
    with np.errstate(invalid='ignore'):
        distance = np.where(differs, np.abs(got.astype(np.float64) - expected), -1)
    at = np.unravel_index(np.where(np.isnan(distance), np.inf, distance).argmax(), got.shape)
    raise AssertionError(f'{name}: {differs.sum()} of {got.size} elements differ; at {[int(i) for i in at]} '
                         f'got {float(got[at]):.9g}, expected {float(expected[at]):.9g}, tolerance 0')


def parameter(name, value, grad=None):
    """Return a Parameter on the current device.  Its gradient is zero by default."""
    return Parameter(name, put(value), put(np.zeros_like(value) if grad is None else grad))


def gathered(table, numbers, rows):
    """Return rows of a table (N, C) float32, (B, C), by launches that a plan records.

    numbers (N, 1) int32: 0, 1, ...;  rows (B,) int64;  all on the current device."""
    ids = gather(numbers, rows, name='numbers').reshape(-1)
    y = backend.empty((len(rows), table.shape[1]), name='batch')
    backend.launch('embedding_forward', y, table, ids, len(rows), *table.shape)
    return y


def of_zeros(name, *shape):
    return parameter(name, np.zeros(shape, np.float32))
