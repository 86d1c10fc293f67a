"""Datasets.  Every random number is a function of (seed, epoch, sample)."""
from __future__ import annotations

import bisect
import itertools
import math
import operator
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from pyops.autograd import Tensor
from pyops.backend import get
from pyops.data import batches, mnist
from pyops.data.transforms import apply_all
from pyops.params import next_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pyops.typing import PathLike


class Dataset:
    """A sequence of len(dataset) samples; dataset[i] is a tuple of arrays and numbers.

    A subclass defines __len__ and __getitem__, which returns an untransformed sample: `batch` applies the transforms.  A
    subclass that can create many samples at once overrides `batch` and returns at(index) from __getitem__: the same samples,
    transformed.
    transforms: functions of one image (H, W, C), the first element of a sample; see pyops.data.transforms.
    """

    makes_batches: bool = True                            # whether a loader calls batch(), or joins samples()
    transforms: Sequence[Callable[..., Any]] = ()         # default for subclasses that do not call __init__

    def __init__(self, transforms: Iterable[Callable[..., Any]] = ()) -> None:
        self.transforms = list(transforms or ())

    _transforms_itself = False                            # whether __getitem__ applies the transforms

    def apply_transforms(self, x: Any) -> Any:
        """Return x after all transforms, for a __getitem__ of a subclass; a loader then does not apply them again."""
        self._transforms_itself = True
        for transform in self.transforms:
            x = transform(x)
        return x

    def __len__(self) -> int:
        raise NotImplementedError(f'{type(self).__name__}.__len__')

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError(f'{type(self).__name__}.__getitem__')

    def __add__(self, other: Any) -> ConcatDataset:
        """Return the samples of this dataset, then the samples of another."""
        return ConcatDataset([self, other])

    def samples(self, rows: np.ndarray, seed: int = 0, epoch: int = 0) -> list[Any]:
        """Return the samples with these indices, (B,) int64, as a list, the first element of each transformed."""
        if type(self).batch is not Dataset.batch:           # __getitem__ returns transformed samples, of another epoch
            return list(zip(*self.batch(rows, seed, epoch), strict=True))
        samples = [self[int(row)] for row in rows]
        if not self.transforms or self._transforms_itself:
            return samples
        return [(apply_all(self.transforms, np.asarray(first)[None], seed, epoch, rows[i:i + 1])[0], *others)
                for i, (first, *others) in enumerate(samples)]

    def batch(self, rows: np.ndarray, seed: int = 0, epoch: int = 0) -> tuple[Any, ...]:
        """Return the samples with these indices, (B,) int64, as a tuple of arrays (B, ...), the first one transformed."""
        samples = [self[int(row)] for row in rows]
        for row, sample in zip(rows, samples, strict=True):
            if not isinstance(sample, tuple | list):
                raise TypeError(
                    f'{type(self).__name__}[{row}]: expected a tuple such as (image, label), got {type(sample).__name__}')
        first, *rest = (np.stack(column) for column in zip(*samples, strict=True))
        return (first if self._transforms_itself else apply_all(self.transforms, first, seed, epoch, rows)), *rest

    def at(self, index: Any) -> tuple[Any, ...]:
        """Return batch(), with seed 0 and epoch 0, for a slice or indices; for a single index without the first axis."""
        try:
            row = operator.index(index)
        except TypeError:
            return self.batch(np.ascontiguousarray(np.arange(len(self))[index]))
        if not -len(self) <= row < len(self):
            raise IndexError(f'{type(self).__name__}: index {row} is out of bounds for {len(self)} samples')
        return tuple(column[0] for column in self.batch(np.array([row % len(self)])))


class ArrayDataset(Dataset):
    """A dataset of arrays of equal length; sample i is (arrays[0][i], arrays[1][i], ...)."""

    def __init__(self, *arrays: Any, transforms: Iterable[Callable[..., Any]] = ()) -> None:
        super().__init__(transforms)
        self.arrays = [np.asarray(array) for array in arrays]
        if not arrays or any(array.ndim < 1 or len(array) != len(self.arrays[0]) for array in self.arrays):
            raise ValueError(f'ArrayDataset: expected arrays of equal length, got {[array.shape for array in self.arrays]}')

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, index: Any) -> Any:
        return self.at(index)

    def batch(self, rows: np.ndarray, seed: int = 0, epoch: int = 0) -> tuple[Any, ...]:
        first, *rest = (array[rows] for array in self.arrays)
        return apply_all(self.transforms, first, seed, epoch, rows), *rest


NDArrayDataset = ArrayDataset           # the needle course's name


class TensorDataset(ArrayDataset):
    """A dataset of Tensors of equal length: sample i is (tensors[0][i], tensors[1][i], ...).  Arrays are copied."""

    def __init__(self, *tensors: Any) -> None:
        self.tensors = tuple(one if isinstance(one, Tensor) else Tensor(one) for one in tensors)
        super().__init__(*(one.numpy() for one in self.tensors))

    def __getitem__(self, index: Any) -> Any:
        return tuple(tensor[index] for tensor in self.tensors)

    def samples(self, rows: np.ndarray, seed: int = 0, epoch: int = 0) -> list[Any]:
        return [self[int(row)] for row in rows]


class MNISTDataset(Dataset):
    """Digits as (image (28, 28, 1) float32 from 0 (paper) to 1 (ink), label int32): MNIST if found, else the embedded digits
    (pyops.data.mnist.load).

    train: use the training file, else the test file.  Images are stored as bytes in one table; a kernel gathers batches.
    """
    SHAPE = (mnist.SIDE, mnist.SIDE, 1)

    def __init__(self, train: bool = True, data_dir: PathLike | None = None, embedded: bool = False,
                 transforms: Iterable[Callable[..., Any]] = ()) -> None:
        if not isinstance(train, int | np.bool_):
            raise TypeError(f'MNISTDataset: train: expected True or False, got {train!r}; data_dir names the folder, '
                            'and MNISTDataset.of(images, labels) takes arrays of other files')
        digits = mnist.load(data_dir, embedded)
        images, labels = digits[1:3] if train else digits[3:5]
        self._set(images, labels, transforms)

    @classmethod
    def of(cls, images: np.ndarray, labels: np.ndarray, transforms: Iterable[Callable[..., Any]] = ()) -> Self:
        """Return a dataset of given images (N, 784) uint8 and labels (N,)."""
        dataset = cls.__new__(cls)
        dataset._set(images, labels, transforms)
        return dataset

    def _set(self, images: np.ndarray, labels: np.ndarray, transforms: Iterable[Callable[..., Any]]) -> None:
        super().__init__(transforms)
        self.images, self.labels = images, labels.astype(np.int32)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: Any) -> Any:
        return self.at(index)

    def batch(self, rows: np.ndarray, seed: int = 0, epoch: int = 0) -> tuple[Any, ...]:
        images = batches.gather_pixels(self.images, rows).reshape(len(rows), *self.SHAPE)
        return apply_all(self.transforms, images, seed, epoch, rows), self.labels[rows]


def _samples(dataset: Any, rows: Any, seed: int, epoch: int) -> list[Any]:
    """Return the samples of a Dataset or of another sequence with these indices."""
    if isinstance(dataset, Dataset):
        return dataset.samples(rows, seed, epoch)
    return [dataset[int(row)] for row in rows]


class Subset(Dataset):
    """Some samples of a dataset, or of any sequence: sample i is dataset[indices[i]], with the transforms of the dataset.

    indices: integers, also negative ones, a slice or a mask; the attribute is what was given, and can be set.
    """

    def __init__(self, dataset: Any, indices: Any) -> None:
        super().__init__()
        self.dataset, self.indices = dataset, indices
        self.makes_batches = getattr(dataset, 'makes_batches', False)

    @property
    def indices(self) -> Any:
        """The indices as they were given."""
        return self._given

    @indices.setter
    def indices(self, indices: Any) -> None:
        self._given, self._rows = indices, np.arange(len(self.dataset))[indices]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if self.makes_batches:
            return self.at(index)
        rows = self._rows[index]
        found = _samples(self.dataset, np.atleast_1d(rows), 0, 0)
        return found if np.ndim(rows) else found[0]

    def samples(self, rows: np.ndarray, seed: int = 0, epoch: int = 0) -> list[Any]:
        return _samples(self.dataset, self._rows[get(rows)], seed, epoch)

    def batch(self, rows: np.ndarray, seed: int = 0, epoch: int = 0) -> tuple[Any, ...]:
        return self.dataset.batch(self._rows[get(rows)], seed, epoch)


class ConcatDataset(Dataset):
    """Several datasets, or other sequences, one after the other."""
    makes_batches = False

    def __init__(self, datasets: Iterable[Any]) -> None:
        super().__init__()
        self.datasets = list(datasets)
        if not self.datasets:
            raise ValueError('ConcatDataset: expected at least one dataset, got none')
        self.cumulative_sizes = np.cumsum([len(one) for one in self.datasets]).tolist()

    def __len__(self) -> int:
        return self.cumulative_sizes[-1]

    def __getitem__(self, index: Any) -> Any:
        row = operator.index(index)
        if not -len(self) <= row < len(self):
            raise IndexError(f'ConcatDataset: index {row} is out of bounds for {len(self)} samples')
        return self.samples(np.array([row % len(self)]))[0]

    def samples(self, rows: np.ndarray, seed: int = 0, epoch: int = 0) -> list[Any]:
        found = []
        for row in get(rows):
            which = bisect.bisect_right(self.cumulative_sizes, row)
            first = self.cumulative_sizes[which - 1] if which else 0
            found += _samples(self.datasets[which], np.array([row - first]), seed, epoch)
        return found


class IterableDataset:
    """Base of datasets that are read in order: a subclass defines __iter__.  A DataLoader joins its samples to batches."""

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError(f'{type(self).__name__}.__iter__')

    def __add__(self, other: IterableDataset) -> ChainDataset:
        """Return the samples of this dataset, then the samples of another."""
        return ChainDataset([self, other])


class ChainDataset(IterableDataset):
    """Several IterableDatasets, one after the other.  It has a length if all of them do."""

    def __init__(self, datasets: Iterable[Any]) -> None:
        self.datasets = list(datasets)
        for one in self.datasets:
            if not isinstance(one, IterableDataset):
                raise TypeError(f'ChainDataset: expected IterableDatasets, got {type(one).__name__}; ConcatDataset joins '
                                'others')

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(self.datasets)

    def __len__(self) -> int:
        return sum(map(len, self.datasets))                 # type: ignore[arg-type]


class StackDataset(Dataset):
    """Several datasets of equal length, or other sequences, side by side: sample i has sample i of each, as a tuple, or as a
    dict if they are given by name."""
    makes_batches = False

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__()
        if bool(args) == bool(named):
            raise ValueError('StackDataset: expected datasets by position or by name, got '
                             f'{"both" if args else "none"}')
        self.datasets: Any = args or named
        lengths = {len(one) for one in args or named.values()}
        if len(lengths) > 1:
            raise ValueError(f'StackDataset: expected datasets of equal length, got {sorted(lengths)}')
        self._length, = lengths

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        row = operator.index(index)
        if not -self._length <= row < self._length:
            raise IndexError(f'StackDataset: index {row} is out of bounds for {self._length} samples')
        return self.samples(np.array([row % self._length]))[0]

    def samples(self, rows: np.ndarray, seed: int = 0, epoch: int = 0) -> list[Any]:
        named = self.datasets if isinstance(self.datasets, dict) else {}
        found = list(zip(*(_samples(one, get(rows), seed, epoch) for one in named.values() or self.datasets), strict=True))
        return [dict(zip(named, sample, strict=True)) for sample in found] if named else found


def random_generator(generator: np.random.Generator | None) -> np.random.Generator:
    """Return a numpy Generator: the given one, or the next from the process seed (pyops.seed)."""
    return np.random.default_rng(next_key('data')) if generator is None else generator


def random_split(dataset: Any, lengths: Sequence[float], generator: np.random.Generator | None = None) -> list[Subset]:
    """Divide the samples of a dataset at random into Subsets of these lengths.

    lengths: whole numbers that add up to the length of the dataset, or fractions that add up to 1; what rounding leaves goes to
    the first parts, one sample each.  generator: a numpy Generator; None: the next of the process seed (pyops.seed).
    """
    n, sizes = len(dataset), list[Any](lengths)
    if math.isclose(sum(sizes), 1) and n != 1:
        sizes = [math.floor(n * share) for share in sizes]
        for i in range(n - sum(sizes)):
            sizes[i % len(sizes)] += 1
    if sum(sizes) != n or any(size != int(size) or size < 0 for size in sizes):
        raise ValueError(f'random_split: lengths: expected numbers with sum {n}, the length of the dataset, or fractions with '
                         f'sum 1, got {list(lengths)}')
    order = random_generator(generator).permutation(n)
    ends = np.cumsum([0, *sizes]).astype(int)
    return [Subset(dataset, order[first:end].tolist()) for first, end in itertools.pairwise(ends)]
