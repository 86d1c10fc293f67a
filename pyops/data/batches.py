"""The order of training batches: a pure function of (n, seed, epoch), so that training can resume at any point."""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops import backend
from pyops.backend.kernels import Kernel, declare

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyops.typing import Array


def epoch_order(n: int, seed: int, epoch: int) -> np.ndarray:
    """Return a permutation of 0..n-1, int64 (n,), that depends only on the three arguments.

    0 <= seed, epoch < 2**64; together they are the key of a Philox generator, so orders for different seeds or epochs are
    independent.
    """
    key = np.array([seed, epoch], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(n)


def gather(table: Array, rows: Array, first: int = -1, name: str = 'ids') -> Array:
    """Return rows of a table (N, T) int32 as time steps, (T, B) int32.  rows: (B,) int64.

    first >= 0: shift each sequence right by one step and start it with this id.  ValueError for a row outside the table.
    """
    (N, T), B = table.shape, len(rows)
    ids = backend.empty((T, B), np.int32, name)
    backend.launch('gather_sequences', ids, table, rows, N, B, T, first)
    return ids


def pack(table: Array, starts: Array, rows: Array, total: int, first: int = -1,
         name: str = 'ids') -> tuple[Array, Array, Array]:
    """Return sentences one after the other, without padding: ids (total,), positions (total,) and offsets (B + 1,), int32.

    Sentence n of the table is table[starts[n]:starts[n + 1]];  table int32, starts (N + 1,) int64, rows (B,) int64.  Sentence b
    of the result is ids[offsets[b]:offsets[b + 1]]; positions are the indices of the tokens in their sentences.
    total: the sum of the lengths of the chosen sentences.   first >= 0: shift each sentence right by one token, start it with
    this id and drop its last token.   ValueError for a row outside the table, and for a wrong total.
    """
    offsets = backend.empty(len(rows) + 1, np.int32, f'{name}.offsets')
    ids, positions = backend.empty(total, np.int32, name), backend.empty(total, np.int32, f'{name}.positions')
    backend.launch('pack_sequences', ids, positions, offsets, table, starts, rows, len(starts) - 1, len(rows), total, first)
    return ids, positions, offsets


class PackedPairs(NamedTuple):
    """Sentence pairs, packed: ids, positions and offsets of the sources and of the targets as in `pack`, and the ids of the
    labels, which the targets are, shifted by one token."""
    source: tuple[Any, Any, Any]
    target: tuple[Any, Any, Any]
    labels: Any


def pack_pairs(source: tuple[Array, Array], labels: tuple[Array, Array], rows: Array, source_total: int, target_total: int,
               first: int) -> PackedPairs:
    """Return these pairs of two tables (ids, starts), as three calls of `pack` would; first: the first id of each target."""
    N, B = len(source[1]) - 1, len(rows)
    sides = [(backend.empty(total, np.int32, name), backend.empty(total, np.int32, f'{name}.positions'),
              backend.empty(B + 1, np.int32, f'{name}.offsets'))
             for name, total in (('source', source_total), ('target', target_total))]
    ids = backend.empty(target_total, np.int32, 'labels')
    backend.launch('pack_pairs', *sides[0], *sides[1], ids, *source, *labels, rows, N, B, source_total, target_total, first)
    return PackedPairs(sides[0], sides[1], ids)


def pack_ids(table: Array, starts: Array, rows: Array, total: int, first: int = -1, name: str = 'ids') -> Array:
    """Return only the ids of `pack`: for a second array with the positions and offsets of the first, such as labels."""
    ids = backend.empty(total, np.int32, name)
    backend.launch('pack_sequences', ids, None, None, table, starts, rows, len(starts) - 1, len(rows), total, first)
    return ids


def epoch_end(n: int, batch_size: int, start: int = 0, drop_last: bool = False) -> int:
    """Return the number of samples used when an epoch ends that resumes after `start` of n samples."""
    return n - (n - start) % batch_size if drop_last else n


def gather_pixels(table: Array, rows: Array, scale: float = 1 / 255, name: str = 'pixels') -> Any:
    """Return rows of a table (N, C) uint8 times scale, (B, C) float32.  rows: (B,) int64.  ValueError for a row outside."""
    (N, C), B = table.shape, len(rows)
    y = backend.empty((B, C), name=name)
    backend.launch('gather_pixels', y, table, rows, N, B, C, scale)
    return y


def batches(n: int, batch_size: int, seed: int, epoch: int, start: int = 0, drop_last: bool = False, shuffle: bool = True,
            at_once: int = 1, on_host: bool = False) -> Iterator[Any]:
    """Yield the indices of one epoch's batches, int64 (batch_size,) each; the last may be smaller, or is dropped.

    start: number of samples already used; the rest of the epoch is the same as without the interruption.
    shuffle=False: 0, 1, 2, ... in every epoch.   at_once: batches per array, fewer in the last.
    The arrays are on the device of pyops.backend.current_device, or with on_host in host memory.
    ValueError if start is not in 0..n or batch_size is below 1.
    """
    if batch_size < 1:
        raise ValueError(f'batch_size: expected 1 or more, got {batch_size}')
    if not 0 <= start <= n:
        raise ValueError(f'start: expected 0 to {n}, got {start}')
    order = epoch_order(n, seed, epoch) if shuffle else np.arange(n)
    order = order if on_host else backend.put(order)                # one transfer to a GPU per epoch
    end = epoch_end(n, batch_size, start, drop_last)
    for first in range(start, end, at_once * batch_size):
        yield order[first:min(first + at_once * batch_size, end)]


@dataclass(frozen=True)
class FixedBatches:
    """Batches of batch_size samples of an epoch's order.   on_host: yield them in host memory
    parts: number of such batches that are one batch of the training, whose gradients are summed
    """
    samples: int
    batch_size: int
    drop_last: bool = False
    on_host: bool = False
    parts: int = 1

    def batches(self, seed: int, epoch: int, start: int = 0, at_once: int = 1) -> Iterator[Any]:
        """Return an iterator over the indices of an epoch's batches after `start` samples;  at_once: batches per array."""
        return batches(self.samples, self.parts * self.batch_size, seed, epoch, start, self.drop_last, at_once=at_once,
                       on_host=self.on_host)

    def sizes(self, indices: Array) -> list[int]:
        """Return the number of samples of each batch in an array that batches() yielded."""
        return [len(batch) for batch in split(indices, self.parts * self.batch_size)]

    def split(self, indices: Array) -> list[Any]:
        """Return the parts of a batch."""
        return split(indices, self.batch_size)

    def end(self, start: int = 0) -> int:
        """Return the number of samples used when an epoch ends that resumes after `start` samples."""
        return epoch_end(self.samples, self.parts * self.batch_size, start, self.drop_last)

    def count(self, seed: int, epoch: int, start: int = 0) -> int:
        """Return the number of batches of an epoch after `start` samples."""
        return -(-(self.end(start) - start) // (self.parts * self.batch_size))


class TokenBatches:
    """Batches of consecutive sentences of an epoch's order: as many as have at most `tokens` tokens on each side.

    lengths (N, sides): the numbers of tokens of the samples.  A longer sentence is a batch of its own.  Methods as in
    FixedBatches, with one batch per array, in host memory.
    """

    def __init__(self, lengths: np.ndarray, tokens: int, parts: int = 1) -> None:
        if tokens < 1:
            raise ValueError(f'tokens: expected 1 or more, got {tokens}')
        self.samples, self.tokens, self.parts, self._lengths = len(lengths), tokens, parts, lengths

    def batches(self, seed: int, epoch: int, start: int = 0, at_once: int = 1) -> Iterator[np.ndarray]:
        if not 0 <= start <= self.samples:
            raise ValueError(f'start: expected 0 to {self.samples}, got {start}')
        order = epoch_order(self.samples, seed, epoch)[start:]
        ends = [0, *self._ends(order)]
        for first in range(0, len(ends) - 1, self.parts):
            yield order[ends[first]:ends[min(first + self.parts, len(ends) - 1)]]

    def split(self, indices: np.ndarray) -> list[np.ndarray]:
        return np.split(indices, list(self._ends(indices))[:-1])

    def _ends(self, indices: np.ndarray) -> Iterator[int]:
        """Yield the number of samples up to the end of each part."""
        totals, end = np.cumsum(self._lengths[indices], axis=0), 0      # tokens up to and with each sample
        while end < len(indices):
            most = self.tokens + (totals[end - 1] if end else 0 * totals[0])
            fits = min(int(np.searchsorted(side, limit, 'right')) for side, limit in zip(totals.T, most, strict=True))
            end = max(fits, end + 1)
            yield end

    def sizes(self, indices: np.ndarray) -> list[int]:
        return [len(indices)]

    def end(self, start: int = 0) -> int:
        return self.samples

    def count(self, seed: int, epoch: int, start: int = 0) -> int:
        return sum(1 for _ in self.batches(seed, epoch, start))


def split(indices: Array, batch_size: int) -> list[Any]:
    """Split an array of several batches into views of one batch each."""
    return [indices[first:first + batch_size] for first in range(0, len(indices), batch_size)]


declare(gather_sequences=Kernel(bytes=lambda s: s['B'] * s['T'] * 8 + s['B'] * 8),
        pack_sequences=Kernel(bytes=lambda s: s['total'] * 12 + s['B'] * 28),
        pack_pairs=Kernel(bytes=lambda s: s['source_total'] * 12 + s['target_total'] * 20 + s['B'] * 48))
