"""Moments shared among the ranks: ZeRO stage 1 (Rajbhandari et al. 2019, arXiv:1910.02054)."""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pyops import backend
from pyops.backend import library
from pyops.backend.calls import Queued
from pyops.distributed import world

if TYPE_CHECKING:
    from pyops.params import Parameters
    from pyops.typing import Array


class Shares:
    """The shares of the ranks in flat buffers of n floats.  Each rank updates the parameters of its share.

    cuts: the limits of the shares, in the order of their addresses;  mine: the slice of this rank.  Shares are whole chunks of
    the gradient norm, so with few chunks some shares are empty.
    """

    def __init__(self, n: int, of: world.World | None = None) -> None:
        self._world = of or world.current()
        self.cuts = world.even_cuts(n, self._world.paired, library.cpu().lib.PYOPS_NORM_CHUNK)
        if self._world.rank < self._world.paired:
            share = self._world.share_of(self._world.rank)
            self.mine = slice(self.cuts[share], self.cuts[share + 1])
        else:
            self.mine = slice(n, n)
        self._n = n
        self._sums = [_floats_of_sums(cut) for cut in self.cuts]    # the limits in the work of grad_norm

    def reduce_scatter(self, x: Array, first: int) -> None:
        """Replace this rank's share of x by its sum over all ranks; the rest is undefined.   x: elements from `first` on"""
        self._world.reduce_scatter(x, (np.clip(self.cuts, first, first + len(x)) - first).tolist())

    def reduce_scatter_blocks(self, x: Array, blocks: np.ndarray) -> None:
        """Replace this rank's share of x by its sum over all ranks.   x: some blocks of the flat buffer, (k, floats of a block)
        with their numbers (k,), ascending"""
        floats = x.shape[1]
        limits = [-(-cut // floats) for cut in self.cuts]           # a chunk is whole blocks
        self._world.reduce_scatter(x.reshape(-1), (np.searchsorted(blocks, limits) * floats).tolist())

    def gather(self, values: Array) -> None:
        """Copy the share of each rank to all ranks.   values (n,)"""
        self._all_gather('all_gather', values, self.cuts)

    def norm_work(self) -> tuple[Array, Array]:
        """Return the workspace of the gradient norm, and the part of it for the kernel grad_norm on this rank's share."""
        work = backend.work('grad_norm', self._n)
        return work, work[_floats_of_sums(self.mine.start):]

    def find_norm(self, norm: Array, work: Array) -> None:
        """Set norm (1,) to the norm of all shares.   work: of norm_work(), after grad_norm ran on this rank's share"""
        self._all_gather('gather_norms', work[:self._sums[-1]], self._sums)
        backend.launch('norm_of_chunks', norm, work, self._n)

    def _all_gather(self, name: str, x: Array, cuts: list[int]) -> None:
        """Copy the share of each rank in x to all ranks, as an action of a plan."""
        def messages() -> None:
            with self._world.messages_of_gpus():
                self._world.all_gather(x, cuts)
        backend.call(name, Queued(messages) if self._world.network else messages, {}, {'shares': x})

    def whole(self, flat: Array) -> np.ndarray | None:
        """Return on rank 0 the buffer (n,), in host memory, whose shares the ranks have in `flat`, None on the others."""
        return self._world.gather_shares(flat, self.cuts)


def _floats_of_sums(n: int) -> int:
    """Return how many floats at the beginning of the work of grad_norm hold the sums of n floats: two for each chunk."""
    return backend.work_size('grad_norm', n) // 2 * 2


def shard(params: Parameters) -> None:
    """Let each rank hold the moments of a share of these parameters, and update this share alone.

    Call it before the optimizer is created, Adam, AdamW or SGD, which must be given this Parameters.  The results have the same
    bits.  Without other ranks it does nothing.
    """
    if world.size() > 1:
        params.shard(Shares(params.values.size))
