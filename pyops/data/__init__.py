"""Data sets: where they are found or downloaded from, datasets and transforms, and the order in which training sees them."""
import importlib

_HOMES = {'Dataset': 'datasets', 'ArrayDataset': 'datasets', 'MNISTDataset': 'datasets', 'DataLoader': 'datasets',
          'RandomFlipHorizontal': 'transforms', 'RandomCrop': 'transforms'}
__all__ = list(_HOMES)


def __getattr__(name):
    """Classes are imported when they are asked for: the downloader needs neither numpy nor the kernels."""
    if name not in _HOMES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(importlib.import_module(f'pyops.data.{_HOMES[name]}'), name)
