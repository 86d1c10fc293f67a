"""The loader that makes batches of the samples of a dataset, in the calling thread or ahead of it in others."""
from __future__ import annotations

import collections
import itertools
import operator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from pyops.autograd import Tensor
from pyops.backend import get
from pyops.data import batches
from pyops.data.datasets import Dataset, IterableDataset
from pyops.ndarray import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


def default_collate(samples: Sequence[Any]) -> Any:
    """Join samples of one structure to a batch: numbers, arrays and Tensors to an array (B, ...), texts to a list, and tuples,
    lists and dicts element by element; lists become tuples.

    Raises ValueError for arrays of different shapes, TypeError for samples of anything else.
    """
    first = samples[0]
    if isinstance(first, str | bytes):
        return list(samples)
    if isinstance(first, dict):
        return {name: default_collate([sample[name] for sample in samples]) for name in first}
    if isinstance(first, tuple | list):
        if len({len(sample) for sample in samples}) > 1:
            raise ValueError(f'samples: expected equal numbers of elements, got {sorted({len(sample) for sample in samples})}; '
                             'pass collate_fn')
        columns = [default_collate(column) for column in zip(*samples, strict=True)]
        return type(first)(*columns) if hasattr(first, '_fields') else tuple(columns)
    arrays = [one.numpy() if isinstance(one, Tensor) else get(one) if isinstance(one, NDArray) else np.asarray(one)
              for one in samples]
    if any(array.dtype.kind not in 'biuf' for array in arrays):
        raise TypeError(f'samples: expected numbers, arrays, texts, or tuples or dicts of them, got {type(first).__name__}; '
                        'pass collate_fn')
    if len({array.shape for array in arrays}) > 1:
        raise ValueError(f'samples: expected equal shapes, got {sorted({array.shape for array in arrays})}; pass collate_fn')
    return np.stack(arrays)


def default_convert(batch: Any) -> Any:
    """Convert arrays to Tensors, also within tuples, lists and dicts; return anything else unchanged."""
    if isinstance(batch, np.ndarray | NDArray):
        return Tensor(batch) if batch.dtype.kind in 'biuf' else batch
    if isinstance(batch, dict):
        return {name: default_convert(value) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        values = list(map(default_convert, batch))
        return type(batch)(*values) if hasattr(batch, '_fields') else type(batch)(values)
    return batch


def get_worker_info() -> None:
    """Return None: batches are made in threads of this process, which share one dataset."""


def _without_axis(batch: Any) -> Any:
    """Return the only sample of a batch."""
    if isinstance(batch, dict):
        return {name: _without_axis(value) for name, value in batch.items()}
    if isinstance(batch, tuple):
        values = list(map(_without_axis, batch))
        return type(batch)(*values) if hasattr(batch, '_fields') else tuple(values)
    return np.asarray(batch[0]) if isinstance(batch, np.ndarray) else batch[0]


class DataLoader:
    """An iterable over batches: `for images, labels in loader` runs one epoch of Tensors; the next loop runs the next epoch.

    dataset: a Dataset, any object with __len__ and __getitem__, or an IterableDataset.  The samples of the latter two may be
    numbers, arrays, texts, and tuples or dicts of them; see default_collate.
    shuffle: use the order of pyops.data.batches, or a permutation drawn from `generator`, a numpy Generator, for each epoch.
    sampler: an iterable of the indices of an epoch, instead of shuffle.  batch_sampler: an iterable of lists of indices, one
    per batch, instead of batch_size, shuffle, sampler and drop_last.  batch_size=None: yield the samples one by one, without
    the axis of a batch.
    num_workers: number of threads that make batches ahead, prefetch_factor each.  The batches and their order do not depend on
    it.  An exception in a thread is raised in the loop, at its batch.
    collate_fn: makes a batch of a list of samples; its result is yielded as it is.
    pin_memory, timeout, worker_init_fn, multiprocessing_context, persistent_workers: accepted as in PyTorch, without effect.
    drop_last: leave out an incomplete last batch.  arrays: yield numpy arrays instead of Tensors, for manual gradients.
    loader.epoch is the next epoch, loader.start the number of its samples to skip, which an earlier run used: set both to
    resume a run.
    """

    def __init__(self, dataset: Any, batch_size: int | None = 1, shuffle: bool = False, sampler: Iterable[int] | None = None,
                 batch_sampler: Iterable[Sequence[int]] | None = None, num_workers: int = 0,
                 collate_fn: Callable[[list[Any]], Any] | None = None, pin_memory: bool = False, drop_last: bool = False,
                 timeout: float = 0, worker_init_fn: Callable[[int], Any] | None = None, multiprocessing_context: Any = None,
                 generator: np.random.Generator | None = None, *, prefetch_factor: int | None = None,
                 persistent_workers: bool = False, seed: int = 0, arrays: bool = False) -> None:
        prefetch_factor = 2 if prefetch_factor is None else prefetch_factor
        if isinstance(dataset, IterableDataset):
            if shuffle or sampler is not None or batch_sampler is not None or num_workers:
                raise ValueError('DataLoader: expected no shuffle, sampler, batch_sampler or num_workers for an '
                                 'IterableDataset, which is read in order')
        elif not hasattr(dataset, '__getitem__') or (sampler is batch_sampler is None and not hasattr(dataset, '__len__')):
            raise TypeError('DataLoader: dataset: expected an object with __len__ and __getitem__, got '
                            f'{type(dataset).__name__}; ArrayDataset makes one of arrays')
        if batch_size is None and (batch_sampler is not None or drop_last):
            raise ValueError('DataLoader: batch_size: expected a number with batch_sampler or drop_last, got None')
        self._is_batched, batch_size = batch_size is not None, 1 if batch_size is None else batch_size
        for name, number, least in (('batch_size', batch_size, 1), ('num_workers', num_workers, 0),
                                    ('prefetch_factor', prefetch_factor, 1)):
            if operator.index(number) < least:
                raise ValueError(f'DataLoader: {name}: expected {least} or more, got {number}')
        for name, given in (('sampler', sampler), ('batch_sampler', batch_sampler)):
            if given is not None and not hasattr(given, '__iter__'):
                raise TypeError(f'DataLoader: {name}: expected an iterable of indices, got {type(given).__name__}')
        if sampler is not None and shuffle:
            raise ValueError('DataLoader: sampler: expected None with shuffle=True; a sampler decides the order')
        if batch_sampler is not None and (batch_size != 1 or shuffle or sampler is not None or drop_last):
            raise ValueError('DataLoader: batch_sampler: expected no batch_size, shuffle, sampler or drop_last beside it')
        if not isinstance(generator, np.random.Generator | None):
            raise TypeError('DataLoader: generator: expected a numpy Generator, such as numpy.random.default_rng(0), got '
                            f'{type(generator).__name__}')
        self.dataset, self.batch_size, self.shuffle, self.seed, self.drop_last = dataset, batch_size, shuffle, seed, drop_last
        self.sampler, self.batch_sampler, self.collate_fn, self.generator = sampler, batch_sampler, collate_fn, generator
        self.num_workers, self.prefetch_factor = num_workers, prefetch_factor
        self.arrays, self.epoch, self.start = arrays, 0, 0

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch.  TypeError for a sampler without a length."""
        if self.batch_sampler is not None:
            return len(self.batch_sampler)                  # type: ignore[arg-type]
        if isinstance(self.dataset, IterableDataset) and not hasattr(self.dataset, '__len__'):
            raise TypeError(f'DataLoader: {type(self.dataset).__name__} has no length')
        n = len(self.dataset if self.sampler is None else self.sampler)             # type: ignore[arg-type]
        return -(-batches.epoch_end(n, self.batch_size, 0, self.drop_last) // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        epoch, start = self.epoch, self.start
        self.epoch, self.start = epoch + 1, 0
        if isinstance(self.dataset, IterableDataset):
            return self._read(itertools.islice(self.dataset, start, None))
        made = self._made_ahead if self.num_workers else map
        return made(lambda rows: self._batch(rows, epoch), self._rows(epoch, start))        # type: ignore[operator]

    def _read(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Yield batches of samples in their order."""
        while found := list(itertools.islice(samples, self.batch_size)):
            if len(found) == self.batch_size or not self.drop_last:
                yield self._joined(found)

    def _rows(self, epoch: int, start: int) -> Iterator[np.ndarray]:
        """Return an iterator over the indices of an epoch's batches after `start` samples."""
        if self.batch_sampler is not None:
            return self._given_rows(self.batch_sampler, start)
        if self.sampler is not None:
            return self._drawn(itertools.islice(iter(self.sampler), start, None))
        if self.shuffle and self.generator is not None:
            return self._drawn(iter(self.generator.permutation(len(self.dataset))[start:]))
        return batches.batches(len(self.dataset), self.batch_size, self.seed, epoch, start, self.drop_last, self.shuffle,
                               on_host=not isinstance(self.dataset, Dataset))

    def _drawn(self, indices: Iterator[Any]) -> Iterator[np.ndarray]:
        """Yield the indices in batches of batch_size."""
        while rows := list(itertools.islice(indices, self.batch_size)):
            if len(rows) == self.batch_size or not self.drop_last:
                yield np.array([operator.index(row) for row in rows], np.int64)

    @staticmethod
    def _given_rows(given: Iterable[Sequence[int]], start: int) -> Iterator[np.ndarray]:
        """Yield the batches of a batch_sampler, without their first `start` samples."""
        for rows in given:
            if start < len(rows):
                yield np.array([operator.index(row) for row in rows[start:]], np.int64)
            start = max(start - len(rows), 0)

    def _batch(self, rows: Any, epoch: int) -> Any:
        """Return the batch with these indices."""
        is_dataset = isinstance(self.dataset, Dataset)
        if self.collate_fn is None and is_dataset and self.dataset.makes_batches:
            return self._finished(self.dataset.batch(rows, self.seed, epoch))
        rows = get(rows)
        return self._joined(self.dataset.samples(rows, self.seed, epoch) if is_dataset else
                            [self.dataset[int(row)] for row in rows])

    def _joined(self, samples: list[Any]) -> Any:
        """Return the batch of these samples."""
        if self.collate_fn is not None:
            return self.collate_fn(samples if self._is_batched else samples[0])
        try:
            batch = default_collate(samples)
        except (TypeError, ValueError) as error:
            raise type(error)(f'DataLoader: {type(self.dataset).__name__}: {error}') from None
        return self._finished(batch)

    def _finished(self, batch: Any) -> Any:
        """Return a batch as it is yielded."""
        if not self._is_batched:
            batch = _without_axis(batch)
        return batch if self.arrays else default_convert(batch)

    def _made_ahead(self, make: Callable[[Any], Any], every: Iterator[Any]) -> Iterator[Any]:
        """Yield make(rows) for the rows of every batch, in order, made in threads ahead of the caller."""
        threads = ThreadPoolExecutor(self.num_workers, 'pyops-loader')
        try:
            pending = collections.deque(threads.submit(make, rows)
                                        for rows in itertools.islice(every, self.num_workers * self.prefetch_factor))
            while pending:
                batch = pending.popleft().result()
                pending.extend(threads.submit(make, rows) for rows in itertools.islice(every, 1))
                yield batch
        finally:                                            # also when the loop is left early
            threads.shutdown(wait=True, cancel_futures=True)
