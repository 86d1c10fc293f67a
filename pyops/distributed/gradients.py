"""Sums of gradients over the parts of a batch and over ranks, in one fixed binary tree."""
from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from pyops import backend
from pyops.backend import library
from pyops.distributed import world

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future, ThreadPoolExecutor

    from pyops.autograd import Tensor
    from pyops.params import Parameters


BLOCK = 2 ** 18         # floats of a block, at least: 1 MiB takes a network much longer than its latency


class GradientSum:
    """Adds the gradients of the parts of a batch in one binary tree: neighbours first, then pairs of neighbours, and so on.

        total.start(parts)
        for each of the parts: zero the gradients, compute the part; total.add()
        total.over_ranks()

    A rank has consecutive parts, a power of two of them, so it computes a whole subtree, and the sum over ranks is the rest of
    the tree: its bits do not depend on the number of ranks.

    Of a sparse gradient (pyops.params.Spec) only the blocks that are marked in `touched` are sent, and on a CPU added.  The
    other blocks are 0, so the sums have the same bits.  In the end each rank has the marks of all ranks.
    A level of the tree needs a copy of the gradients, log2(parts) in all.

    Dense gradients may be sent in blocks while the last part is computed:

        total.cut_blocks(...)                       once
        for block in total.blocks: compute until the block is complete; total.send(block)
        total.add(); total.over_ranks()

    blocks: lists of ranges (first, end) of the flat buffer; all ranks need the same ones.
    on_sum: None, or a function that is called with (number of floats, begin, end in seconds of time.perf_counter) after each
    sum of a block, in another thread
    """

    def __init__(self, params: Parameters) -> None:
        self._grads: Any = params.grads
        self._touched: Any = params.touched             # None: all gradients are dense
        self.is_sparse = self._touched is not None
        self._shares = params.shares
        self._one = backend.put(np.ones(1, np.float32))
        self._levels: list[tuple[Any, Any]] = []        # the gradients of the left half of a subtree, and their blocks
        self._block, n = library.cpu().lib.PYOPS_GRAD_BLOCK, params.grads.size
        self._dense = self._dense_ranges(n) if self.is_sparse else [(0, n)]
        # A GPU adds all sparse blocks of its parts: that takes less time than its host takes to learn which are marked.
        self._adds_marked = self.is_sparse and backend.current_device().is_host
        self._sparse = [] if self._adds_marked else _gaps(self._dense, n)
        self._parts = self._count = self._sent = 0
        self._starts = sorted(start for _, (start, _), _ in params.parts())
        self.blocks: list[list[tuple[int, int]]] = []
        self.on_sum: Callable[[int, float, float], Any] | None = None
        self._thread: ThreadPoolExecutor | None = None          # sends blocks
        self._sums: list[Future[None]] = []

    def cut_blocks(self, completed: Callable[[int, int], int]) -> None:
        """Cut the dense gradients into blocks of at least BLOCK floats, in the order in which backward completes them.

        completed(first, end): when these elements are complete, a number to sort by
        """
        ranges = [(completed(*edges), *edges) for first, end in self._dense
                  for edges in itertools.pairwise([first, *(s for s in self._starts if first < s < end), end])]
        self.blocks, size = [], BLOCK
        for _, first, end in sorted(ranges):
            if size >= BLOCK:
                self.blocks.append([])
                size = 0
            self.blocks[-1].append((first, end))
            size += end - first
        self.blocks = [_joined(block) for block in self.blocks]

    def _dense_ranges(self, n: int) -> list[tuple[int, int]]:
        """Return (first, end) of the elements in dense blocks, and in a last block that is not whole."""
        whole = n // self._block
        is_dense = (backend.get(self._touched)[:whole] & library.cpu().lib.PYOPS_DENSE) != 0
        edges = np.flatnonzero(np.diff(np.concatenate([[False], is_dense, [False]]).astype(np.int8))) * self._block
        ranges = [(int(first), int(end)) for first, end in edges.reshape(-1, 2)]
        return ranges + ([(whole * self._block, n)] if n % self._block else [])

    def start(self, parts: int) -> None:
        """Begin a sum of so many parts, a power of two."""
        self._parts, self._count, self._sent = parts, 0, 0

    def send(self, block: list[tuple[int, int]], fast: bool = False) -> None:
        """Add the earlier parts to the gradients of the next block, which the last part has completed, and begin their sum over
        all ranks, in a thread, or on GPUs on the second stream.   fast: as of over_ranks"""
        for first, end in block:
            for level in range(self._count.bit_length()):
                self._merge_dense(level, first, end)
        self._sent += 1
        if network := world.current().network:
            network.fork()
            for first, end in block:
                self._reduce(first, end, fast)
            return
        if self._thread is None:
            from concurrent.futures import ThreadPoolExecutor  # here: its import takes 3 ms of the start of every program
            self._thread = ThreadPoolExecutor(1, 'sum over ranks')
        world.current().is_patient = True
        self._sums.append(self._thread.submit(self._sum_block, block))

    def join_device(self) -> None:
        """On GPUs, let later work wait for the sums of the blocks that were sent.  A graph with over_ranks() requires it: it
        contains only the messages of its own."""
        if network := world.current().network:
            network.join()

    def _sum_block(self, block: list[tuple[int, int]]) -> None:
        start = time.perf_counter()
        for first, end in block:
            self._reduce(first, end, fast=False)
        if self.on_sum:
            self.on_sum(sum(end - first for first, end in block), start, time.perf_counter())

    def _not_sent(self) -> list[tuple[int, int]]:
        """Return the dense ranges that have not been sent, in the order of the blocks: all ranks need the same order."""
        return [pair for block in self.blocks[self._sent:] for pair in block] if self.blocks else self._dense

    def add(self) -> None:
        """Add the gradients of the next part.  After the last part, the gradients are the sum; before, they are undefined."""
        level = 0
        while self._count >> level & 1:
            self._merge(level)
            level += 1
        self._count += 1
        if self._count < self._parts:
            self._keep(level)

    def _marked(self) -> np.ndarray:
        """Return the sparse blocks whose gradients may be nonzero."""
        whole = self._grads.size // self._block
        return np.flatnonzero(backend.get(self._touched)[:whole] == library.cpu().lib.PYOPS_TOUCHED)

    def _rows(self, flat: Any) -> Any:
        return flat[:flat.size // self._block * self._block].reshape(-1, self._block)

    def _keep(self, level: int) -> None:
        """Copy the gradients to a level of the tree."""
        if level == len(self._levels):
            self._levels.append((backend.zeros(self._grads.size), None))
        kept, marked = self._levels[level][0], None
        for first, end in self._dense + self._sparse:
            backend.copy(kept[first:end], self._grads[first:end])
        if self._adds_marked:
            marked = self._marked()
            self._rows(kept)[marked] = self._rows(self._grads)[marked]
        elif self.is_sparse:
            marked = self._touched.copy()
        self._levels[level] = kept, marked

    def _merge(self, level: int) -> None:
        """Add a level of the tree to the gradients."""
        kept, marked = self._levels[level]
        for first, end in self._not_sent() + self._sparse:
            self._merge_dense(level, first, end)
        if self._adds_marked:
            self._rows(self._grads)[marked] += self._rows(kept)[marked]
            self._touched[marked] |= library.cpu().lib.PYOPS_TOUCHED
        elif self.is_sparse:
            self._touched[...] = self._touched.maximum(marked)      # the or: the upper one of the two bits never changes

    def _merge_dense(self, level: int, first: int, end: int) -> None:
        backend.launch('axpy', self._grads[first:end], self._levels[level][0][first:end], self._one, end - first)

    def over_ranks(self, fast: bool = False) -> None:
        """Replace the gradients by their sum over all ranks; with shares, only the share of this rank, and the rest is
        undefined.   fast: in the order of the library of MPI or NCCL"""
        self.dense_over_ranks(fast)
        self.sparse_over_ranks(fast)

    def dense_over_ranks(self, fast: bool = False) -> None:
        """Do what over_ranks does to the dense gradients.  On GPUs it only queues work, which a graph can contain."""
        if world.size() == 1:
            return
        for one in self._sums:
            one.result()
        self._sums.clear()
        world.current().is_patient = False
        with world.current().messages_of_gpus():
            for first, end in self._not_sent():
                self._reduce(first, end, fast)

    def sparse_over_ranks(self, fast: bool = False) -> None:
        """Do what over_ranks does to the sparse gradients.  The host of a GPU waits for the marks of all ranks, since the
        number of blocks depends on them."""
        if world.size() == 1 or not self.is_sparse:
            return
        marked = self._marked_by_all()
        if not len(marked):
            return
        numbers, rows = backend.put(marked.astype(np.int32)), self._rows(self._grads)
        blocks = backend.empty((len(marked), self._block))
        backend.gather_rows(blocks.reshape(1, *blocks.shape), rows.reshape(1, *rows.shape), numbers)
        if self._shares is None:
            world.all_reduce(blocks, fast)
        else:
            with world.current().messages_of_gpus():
                self._shares.reduce_scatter_blocks(blocks, marked)
        backend.launch('scatter_rows', rows, blocks, numbers, len(rows), *blocks.shape, self._block, self._block)

    def _marked_by_all(self) -> np.ndarray:
        """Give this rank the marks of all ranks, and return the marked blocks."""
        bit, whole = library.cpu().lib.PYOPS_TOUCHED, self._grads.size // self._block
        if world.on_gpus():
            world.all_max(self._touched)
            return self._marked()
        bits = world.union(np.packbits(self._touched[:whole] == bit))
        marked = np.flatnonzero(np.unpackbits(bits, count=whole))
        self._touched[marked] |= bit
        return marked

    def _reduce(self, first: int, end: int, fast: bool) -> None:
        """Sum a range of dense gradients over all ranks."""
        x = self._grads[first:end]
        if self._shares is not None:
            self._shares.reduce_scatter(x, first)
        elif world.on_gpus():
            world.current().sum(x, fast)                # only queued: all_reduce would let the kernels wait for it
        else:
            world.all_reduce(x, fast)


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges (first, end) in ascending order, with adjacent ones joined."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if found and found[-1][1] == first:
            first = found.pop()[0]
        found.append((first, end))
    return found


def _gaps(ranges: list[tuple[int, int]], n: int) -> list[tuple[int, int]]:
    """Return the ranges of n elements between ascending ranges (first, end)."""
    edges = [0, *itertools.chain.from_iterable(ranges), n]
    return [(first, end) for first, end in zip(edges[::2], edges[1::2], strict=True) if first < end]


def average_gradients(parameters: Iterable[Tensor] | Parameters, fast: bool = False) -> None:
    """Replace the gradient of each parameter by its mean over all ranks.  Call it between backward() and optimizer.step().

    parameters: Tensors, such as module.parameters(), or a pyops.params.Parameters.  A Tensor without a gradient is left out; it
    must have none on any rank.
    fast: sum in the order of the library of MPI or NCCL, instead of a fixed tree
    """
    if world.size() == 1:
        return
    from pyops.optim import update_units
    from pyops.params import Parameters
    scale = backend.put(np.array([1 / world.size()], np.float32))
    for unit in [parameters] if isinstance(parameters, Parameters) else update_units(parameters):
        if unit.grads is not None:
            if unit.touched is None:
                world.all_reduce(unit.grads, fast)
            else:
                GradientSum(unit).over_ranks(fast)
            backend.launch('scale', unit.grads, unit.grads, scale, unit.grads.size)
