"""Moments shared among the ranks: ZeRO stage 1 (Rajbhandari et al. 2019, arXiv:1910.02054)."""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pyops import backend
from pyops.backend import library
from pyops.distributed import world
from pyops.errors import UserError

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
        self._chunk = library.cpu().lib.PYOPS_NORM_CHUNK
        self.cuts = world.even_cuts(n, self._world.paired, self._chunk)
        if self._world.rank < self._world.paired:
            share = self._world.share_of(self._world.rank)
            self.mine = slice(self.cuts[share], self.cuts[share + 1])
        else:
            self.mine = slice(n, n)

    def reduce_scatter(self, x: np.ndarray, first: int) -> None:
        """Replace this rank's share of x by its sum over all ranks; the rest is undefined.   x: elements from `first` on"""
        self._world.reduce_scatter(x, (np.clip(self.cuts, first, first + len(x)) - first).tolist())

    def reduce_scatter_blocks(self, x: np.ndarray, blocks: np.ndarray) -> None:
        """Replace this rank's share of x by its sum over all ranks.   x: some blocks of the flat buffer, (k, floats of a block)
        with their numbers (k,), ascending"""
        floats = x.shape[1]
        limits = [-(-cut // floats) for cut in self.cuts]           # a chunk is whole blocks
        self._world.reduce_scatter(x.reshape(-1), (np.searchsorted(blocks, limits) * floats).tolist())

    def gather(self, values: np.ndarray) -> None:
        """Copy the share of each rank to all ranks.   values (n,)"""
        backend.call('all_gather', lambda: self._world.all_gather(values, self.cuts), {}, {'values': values})

    def find_norm(self, norm: np.ndarray, work: np.ndarray) -> None:
        """Set norm (1,) to the norm of all shares.   work: of the kernel grad_norm, after it ran on this rank's share"""
        backend.call('norm_over_ranks', lambda: self._find_norm(norm, work), {'work': work}, {'norm': norm})

    def _find_norm(self, norm: np.ndarray, work: np.ndarray) -> None:
        chunks = -(-(self.mine.stop - self.mine.start) // self._chunk)
        of_ranks = self._world.gather(work[:2 * chunks].view(np.float64).copy())
        ordered = sorted(range(self._world.paired), key=self._world.share_of)
        sums = np.concatenate([of_ranks[rank] for rank in ordered])
        norm[...] = np.sqrt(np.cumsum(sums)[-1])                    # cumsum adds in order, as the kernel does

    def whole(self, flat: np.ndarray) -> Array | None:
        """Return on rank 0 the buffer (n,) whose shares the ranks have in `flat`, None on the others."""
        return self._world.gather_shares(flat, self.cuts)


def shard(params: Parameters) -> None:
    """Let each rank hold the moments of a share of these parameters, and update this share alone.

    Call it before the optimizer is created, Adam, AdamW or SGD, which must be given this Parameters.  The results have the same
    bits.  Without other ranks it does nothing.  UserError if the ranks have GPUs.
    """
    if world.size() > 1:
        if world.current().network:
            raise UserError('--shard-optimizer: ranks share moments on CPUs only; leave it out, or give -g 0')
        params.shard(Shares(params.values.size))
