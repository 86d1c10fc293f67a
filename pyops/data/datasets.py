"""Datasets, and the loader that makes batches of them: every number of an epoch is a function of (seed, epoch)."""
import operator

import numpy as np

from pyops.autograd import Tensor
from pyops.data import batches, mnist
from pyops.data.transforms import apply_all


class Dataset:
    """len(dataset) samples; dataset[i] is one of them, a tuple of arrays and numbers.

    A subclass has __len__ and __getitem__, which returns a sample without transforms: `batch` applies them.  One that makes
    many samples at once overrides `batch` and returns at(index) from __getitem__: the same samples, transformed.
    transforms: functions of one image (H, W, C), the first member of a sample; see pyops.data.transforms.
    """

    transforms = ()         # of a subclass that does not call __init__

    def __init__(self, transforms=()):
        self.transforms = list(transforms or ())

    def __len__(self):
        raise NotImplementedError(f'{type(self).__name__}.__len__')

    def __getitem__(self, index):
        raise NotImplementedError(f'{type(self).__name__}.__getitem__')

    def batch(self, rows, seed=0, epoch=0):
        """Return the samples of these rows, (B,) int64: a tuple of arrays (B, ...), the first one transformed."""
        samples = [self[int(row)] for row in rows]
        for row, sample in zip(rows, samples, strict=True):
            if not isinstance(sample, tuple | list):
                raise TypeError(f'{type(self).__name__}[{row}]: want a tuple, as (image, label), got {type(sample).__name__}')
        first, *rest = (np.stack(column) for column in zip(*samples, strict=True))
        return apply_all(self.transforms, first, seed, epoch, rows), *rest

    def at(self, index):
        """Return what `batch` makes, with seed 0 and epoch 0, of a number, without the first axis; of a slice or numbers."""
        try:
            row = operator.index(index)
        except TypeError:
            return self.batch(np.ascontiguousarray(np.arange(len(self))[index]))
        if not -len(self) <= row < len(self):
            raise IndexError(f'{type(self).__name__}: index {row} is out of bounds for {len(self)} samples')
        return tuple(column[0] for column in self.batch(np.array([row % len(self)])))


class ArrayDataset(Dataset):
    """Arrays of equal length; sample i is (arrays[0][i], arrays[1][i], ...)."""

    def __init__(self, *arrays, transforms=()):
        super().__init__(transforms)
        self.arrays = [np.asarray(array) for array in arrays]
        if not arrays or any(array.ndim < 1 or len(array) != len(self.arrays[0]) for array in self.arrays):
            raise ValueError(f'ArrayDataset: want arrays of equal length, got {[array.shape for array in self.arrays]}')

    def __len__(self):
        return len(self.arrays[0])

    def __getitem__(self, index):
        return self.at(index)

    def batch(self, rows, seed=0, epoch=0):
        first, *rest = (array[rows] for array in self.arrays)
        return apply_all(self.transforms, first, seed, epoch, rows), *rest


class MNISTDataset(Dataset):
    """Digits as (image (28, 28, 1) float32 from 0 paper to 1 ink, label int32): those of MNIST where it is found, else
    the digits drawn here, as pyops.data.mnist.load has it.

    train: the training file, else the test file.  The images stay bytes in one table; a batch is made by a kernel.
    """
    SHAPE = (mnist.SIDE, mnist.SIDE, 1)

    def __init__(self, train=True, data_dir=None, embedded=False, transforms=()):
        if not isinstance(train, int | np.bool_):
            raise TypeError(f'MNISTDataset: train: want True or False, got {train!r}; data_dir is the directory of the files, '
                            'and MNISTDataset.of(images, labels) takes arrays of other files')
        digits = mnist.load(data_dir, embedded)
        self._set(*(digits[1:3] if train else digits[3:5]), transforms)

    @classmethod
    def of(cls, images, labels, transforms=()):
        """A dataset of images (N, 784) uint8 and labels (N,) that are there already."""
        dataset = cls.__new__(cls)
        dataset._set(images, labels, transforms)
        return dataset

    def _set(self, images, labels, transforms):
        super().__init__(transforms)
        self.images, self.labels = images, labels.astype(np.int32)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.at(index)

    def batch(self, rows, seed=0, epoch=0):
        images = batches.gather_pixels(self.images, rows).reshape(len(rows), *self.SHAPE)
        return apply_all(self.transforms, images, seed, epoch, rows), self.labels[rows]


class DataLoader:
    """for images, labels in loader: one epoch of batches, as Tensors; the next loop is the next epoch.

    shuffle: in the order of pyops.data.batches, else in that of the dataset.  drop_last: without an incomplete last batch.
    arrays: numpy arrays in place of Tensors, for work by hand.
    loader.epoch is the one that comes next, and loader.start how many of its samples are left out, since an earlier run
    saw them: set both to resume a run.
    """

    def __init__(self, dataset, batch_size=1, shuffle=False, seed=0, drop_last=False, arrays=False):
        if not hasattr(dataset, 'batch'):
            raise TypeError(f'DataLoader: want a Dataset, got {type(dataset).__name__}; ArrayDataset makes one of arrays')
        if operator.index(batch_size) < 1:
            raise ValueError(f'DataLoader: batch_size: want 1 or more, got {batch_size}')
        self.dataset, self.batch_size, self.shuffle, self.seed, self.drop_last = dataset, batch_size, shuffle, seed, drop_last
        self.arrays, self.epoch, self.start = arrays, 0, 0

    def __len__(self):
        """Batches of a whole epoch."""
        return -(-batches.epoch_end(len(self.dataset), self.batch_size, 0, self.drop_last) // self.batch_size)

    def __iter__(self):
        epoch, start = self.epoch, self.start
        self.epoch, self.start = epoch + 1, 0
        return self._batches(epoch, start)

    def _batches(self, epoch, start):
        for rows in batches.batches(len(self.dataset), self.batch_size, self.seed, epoch, start, self.drop_last, self.shuffle):
            batch = self.dataset.batch(rows, self.seed, epoch)
            yield batch if self.arrays else tuple(map(Tensor, batch))
