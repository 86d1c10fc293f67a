"""Memory of deleted large arrays, reused by new ones.

malloc returns a large block to the system when it is freed.  A new array of the same size then costs a page fault for every
4 KiB, which took a fifth of the training step of a small LSTM.  Code that allocates arrays of the same sizes again and again,
such as eager training, gets the memory of earlier ones here.
"""
import os
import threading

import numpy as np

from pyops.backend.arrays import location

LEAST = 1 << 17         # bytes of an array from the pool; malloc reuses smaller blocks itself


def _limit():
    """Return the most bytes of unused memory that a pool keeps."""
    return min(1 << 28, os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') // 16)


class _Lease:
    """The base object of an array over a block.  It is deleted with the last view of the array and returns the block."""
    __slots__ = ('pool', 'block', '__array_interface__')

    def __init__(self, pool, block, shape, dtype):
        self.pool, self.block = pool, block
        self.__array_interface__ = {'version': 3, 'data': (location(block), False), 'shape': shape, 'typestr': dtype.str}

    def __del__(self):
        self.pool.give_back(self.block)


class Pool:
    """Blocks of memory that no array uses.  make(nbytes) returns a new block, a numpy array of bytes.

    unused      the bytes of all unused blocks, at most `limit`
    """

    def __init__(self, make, limit=None):
        self.make, self.limit, self.unused = make, _limit() if limit is None else limit, 0
        self._blocks = {}                       # bytes of a block -> unused blocks, the latest used size last
        self._lock = threading.RLock()          # garbage collection within a method may delete an array

    def empty(self, shape, dtype):
        """Return an uninitialized C-contiguous array of at least LEAST bytes.  dtype: numbers or bytes."""
        count = 1
        for n in shape:
            count *= int(n)                     # n may be a number of numpy
        return np.asarray(_Lease(self, self.take(dtype.itemsize * count), shape, dtype))

    def take(self, nbytes):
        """Return a block of at least nbytes, which are at least 8; its user calls give_back."""
        size = self._rounded(nbytes)
        with self._lock:
            blocks = self._blocks.get(size)
            block = blocks.pop() if blocks else None
            if block is not None:
                self.unused -= size
        return self._made(size) if block is None else block

    def _made(self, size):
        try:
            return self.make(size)
        except MemoryError:
            self.clear()
            return self.make(size)

    def give_back(self, block):
        """Keep an unused block.  Beyond the limit, the blocks of the sizes that were not used for longest are freed."""
        size = block.nbytes
        with self._lock:
            blocks = self._blocks.pop(size, [])
            blocks.append(block)
            self._blocks[size] = blocks         # now the last
            self.unused += size
            while self.unused > self.limit:
                oldest, blocks = next(iter(self._blocks.items()))
                if blocks:
                    self.unused -= blocks.pop(0).nbytes
                if not blocks:
                    del self._blocks[oldest]

    def clear(self):
        """Free all unused blocks."""
        with self._lock:
            self._blocks.clear()
            self.unused = 0

    @staticmethod
    def _rounded(nbytes):
        """Round up to one of eight sizes between two powers of 2, so that batches of similar lengths share blocks."""
        step = 1 << (nbytes.bit_length() - 4)
        return -(-nbytes // step) * step
