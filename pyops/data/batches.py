"""The order in which training sees its samples: a pure function of (n, seed, epoch), so that any point can be resumed.
"""
import numpy as np

from pyops import backend
from pyops.backend.kernels import Kernel, declare


def epoch_order(n, seed, epoch):
    """Return a permutation of 0..n-1, int64 (n,), that depends on nothing but the three arguments.

    `seed` and `epoch` are counted from 0 and below 2**64; together they are the key of a Philox generator, so orders
    of different seeds or epochs are independent.
    """
    key = np.array([seed, epoch], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(n)


def gather(table, rows, first=-1, name='ids'):
    """Rows of a table (N, T) int32 as steps, (T, B) int32; with first >= 0 shifted by one step behind that id.

    rows is (B,) int64.  ValueError for a row outside the table.
    """
    (N, T), B = table.shape, len(rows)
    ids = backend.empty((T, B), np.int32, name)
    backend.launch('gather_sequences', ids, table, rows, N, B, T, first)
    return ids


def epoch_end(n, batch_size, start=0, drop_last=False):
    """How many of n samples have been seen when an epoch ends that goes on after `start` of them."""
    return n - (n - start) % batch_size if drop_last else n


def gather_pixels(table, rows, scale=1 / 255, name='pixels'):
    """Rows of a table (N, C) uint8 as floats, (B, C) float32 from 0 to 1.  ValueError for a row outside the table."""
    (N, C), B = table.shape, len(rows)
    y = backend.empty((B, C), name=name)
    backend.launch('gather_pixels', y, table, rows, N, B, C, scale)
    return y


def batches(n, batch_size, seed, epoch, start=0, drop_last=False, shuffle=True, at_once=1):
    """Yield the indices of one epoch's batches, int64 (batch_size,) each; the last may be smaller, or is dropped then.
    They lie where arrays are made (pyops.backend.place).

    `start` is the count of samples that were seen already: what follows is what an uninterrupted epoch would have
    yielded after them.  ValueError if it is outside 0..n or batch_size is not positive.
    shuffle False: 0, 1, 2, ... in every epoch.   at_once: so many batches as one array, fewer at the end.
    """
    if batch_size < 1:
        raise ValueError(f'batch_size: want 1 or more, got {batch_size}')
    if not 0 <= start <= n:
        raise ValueError(f'start: want 0 to {n}, got {start}')
    order = backend.put(epoch_order(n, seed, epoch) if shuffle else np.arange(n))     # on a GPU a batch crosses no bus
    end = epoch_end(n, batch_size, start, drop_last)
    for first in range(start, end, at_once * batch_size):
        yield order[first:min(first + at_once * batch_size, end)]


def split(indices, batch_size):
    """The batches of several as one array: views of it."""
    return [indices[first:first + batch_size] for first in range(0, len(indices), batch_size)]


declare(gather_sequences=Kernel(bytes=lambda s: s['B'] * s['T'] * 8 + s['B'] * 8))
