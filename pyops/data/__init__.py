"""Data sets: locating and downloading them, Dataset classes, transforms, and the order of training batches."""
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:       # the names of _HOMES
    from pyops.data.datasets import ArrayDataset, DataLoader, Dataset, MNISTDataset
    from pyops.data.transforms import RandomCrop, RandomFlipHorizontal

_HOMES = {'Dataset': 'datasets', 'ArrayDataset': 'datasets', 'MNISTDataset': 'datasets', 'DataLoader': 'datasets',
          'RandomFlipHorizontal': 'transforms', 'RandomCrop': 'transforms'}
__all__ = ['ArrayDataset', 'DataLoader', 'Dataset', 'MNISTDataset', 'RandomCrop', 'RandomFlipHorizontal']


def __getattr__(name: str) -> Any:
    """Import classes on first use: the downloader requires neither numpy nor the kernels."""
    if name not in _HOMES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(importlib.import_module(f'pyops.data.{_HOMES[name]}'), name)
