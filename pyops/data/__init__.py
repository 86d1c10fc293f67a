"""Data sets: locating and downloading them, Dataset classes, transforms, and the order of training batches."""
from __future__ import annotations

import importlib
from typing import Any

_HOMES = {'Dataset': 'datasets', 'ArrayDataset': 'datasets', 'MNISTDataset': 'datasets', 'DataLoader': 'datasets',
          'RandomFlipHorizontal': 'transforms', 'RandomCrop': 'transforms'}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Import classes on first use: the downloader requires neither numpy nor the kernels."""
    if name not in _HOMES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(importlib.import_module(f'pyops.data.{_HOMES[name]}'), name)
