"""Samplers: iterables of the indices of an epoch, or of its batches, for DataLoader(sampler=...) and batch_sampler.

generator: a numpy Generator; None: the next of the process seed (pyops.seed).
"""
from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from pyops.data.datasets import random_generator

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class Sampler:
    """Base class.  A subclass defines __iter__ and, if it can, __len__."""

    def __init__(self, data_source: Any = None) -> None:
        self.data_source = data_source

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError(f'{type(self).__name__}.__iter__')


class SequentialSampler(Sampler):
    """The indices of a dataset in order."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data_source)))

    def __len__(self) -> int:
        return len(self.data_source)


class RandomSampler(Sampler):
    """The indices of a dataset in random order.  replacement: draw each of num_samples from all;  num_samples: None: as many as
    the dataset has."""

    def __init__(self, data_source: Any, replacement: bool = False, num_samples: int | None = None,
                 generator: np.random.Generator | None = None) -> None:
        super().__init__(data_source)
        self.replacement, self.num_samples, self.generator = replacement, num_samples, random_generator(generator)
        if len(self) < 1:
            raise ValueError(f'RandomSampler: num_samples: expected 1 or more, got {len(self)}')

    def __iter__(self) -> Iterator[int]:
        n, count = len(self.data_source), len(self)
        if self.replacement:
            yield from self.generator.integers(n, size=count).tolist()
            return
        orders = (self.generator.permutation(n).tolist() for _ in itertools.count())
        yield from itertools.islice(itertools.chain.from_iterable(orders), count)

    def __len__(self) -> int:
        return len(self.data_source) if self.num_samples is None else self.num_samples


class SubsetRandomSampler(Sampler):
    """These indices in random order."""

    def __init__(self, indices: Sequence[int], generator: np.random.Generator | None = None) -> None:
        super().__init__()
        self.indices, self.generator = indices, random_generator(generator)

    def __iter__(self) -> Iterator[int]:
        return (self.indices[i] for i in self.generator.permutation(len(self.indices)))

    def __len__(self) -> int:
        return len(self.indices)


class WeightedRandomSampler(Sampler):
    """num_samples indices, each drawn with a probability in proportion to its weight.   replacement: also repeatedly"""

    def __init__(self, weights: Any, num_samples: int, replacement: bool = True,
                 generator: np.random.Generator | None = None) -> None:
        super().__init__()
        self.weights = np.asarray(weights, np.float64)
        self.num_samples, self.replacement, self.generator = num_samples, replacement, random_generator(generator)
        possible = len(self.weights) if replacement else np.count_nonzero(self.weights)
        if self.weights.ndim != 1 or not (self.weights >= 0).all() or not self.weights.sum() > 0:
            raise ValueError(f'WeightedRandomSampler: weights: expected numbers of at least 0, not all 0, got {weights}')
        if not 1 <= num_samples or not replacement and num_samples > possible:
            raise ValueError(f'WeightedRandomSampler: num_samples: expected 1 or more, and without replacement at most the '
                             f'{possible} weights above 0, got {num_samples}')

    def __iter__(self) -> Iterator[int]:
        shares = self.weights / self.weights.sum()
        yield from self.generator.choice(len(shares), self.num_samples, self.replacement, shares).tolist()

    def __len__(self) -> int:
        return self.num_samples


class BatchSampler(Sampler):
    """The indices of another sampler in lists of batch_size.   drop_last: without an incomplete last one"""

    def __init__(self, sampler: Iterable[int], batch_size: int, drop_last: bool = False) -> None:
        if batch_size < 1:
            raise ValueError(f'BatchSampler: batch_size: expected 1 or more, got {batch_size}')
        super().__init__()
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.sampler)
        while batch := list(itertools.islice(indices, self.batch_size)):
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch

    def __len__(self) -> int:
        n = len(self.sampler)                   # type: ignore[arg-type]
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)
