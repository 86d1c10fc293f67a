"""Data sets: locating and downloading them, Dataset classes, transforms, and the order of training batches."""
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:       # the names of _HOMES
    from pyops.data.cifar import CIFAR10Dataset
    from pyops.data.datasets import ArrayDataset, Dataset, MNISTDataset, Subset
    from pyops.data.loader import DataLoader, default_collate
    from pyops.data.transforms import RandomCrop, RandomFlipHorizontal
    from pyops.data.words import WordCorpus, WordDataset

_HOMES = {'Dataset': 'datasets', 'ArrayDataset': 'datasets', 'MNISTDataset': 'datasets', 'Subset': 'datasets',
          'DataLoader': 'loader', 'default_collate': 'loader', 'CIFAR10Dataset': 'cifar', 'WordCorpus': 'words',
          'WordDataset': 'words', 'RandomFlipHorizontal': 'transforms', 'RandomCrop': 'transforms'}
__all__ = ['ArrayDataset', 'CIFAR10Dataset', 'DataLoader', 'Dataset', 'MNISTDataset', 'RandomCrop', 'RandomFlipHorizontal',
           'Subset', 'WordCorpus', 'WordDataset', 'default_collate']


def __getattr__(name: str) -> Any:
    """Import classes on first use: the downloader requires neither numpy nor the kernels."""
    if name not in _HOMES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(importlib.import_module(f'pyops.data.{_HOMES[name]}'), name)
