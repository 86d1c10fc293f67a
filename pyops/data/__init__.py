"""Data sets: locating and downloading them, Dataset classes, transforms, and the order of training batches."""
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:       # the names of _HOMES
    from pyops.data.cifar import CIFAR10Dataset
    from pyops.data.datasets import (
        ArrayDataset,
        ChainDataset,
        ConcatDataset,
        Dataset,
        IterableDataset,
        MNISTDataset,
        NDArrayDataset,
        StackDataset,
        Subset,
        TensorDataset,
        random_split,
    )
    from pyops.data.loader import DataLoader, default_collate, default_convert, get_worker_info
    from pyops.data.samplers import (
        BatchSampler,
        RandomSampler,
        Sampler,
        SequentialSampler,
        SubsetRandomSampler,
        WeightedRandomSampler,
    )
    from pyops.data.transforms import RandomCrop, RandomFlipHorizontal
    from pyops.data.words import WordCorpus, WordDataset, batchify, get_batch

_HOMES = {
    **dict.fromkeys(('ArrayDataset', 'ChainDataset', 'ConcatDataset', 'Dataset', 'IterableDataset', 'MNISTDataset',
                     'NDArrayDataset', 'StackDataset', 'Subset', 'TensorDataset', 'random_split'), 'datasets'),
    **dict.fromkeys(('DataLoader', 'default_collate', 'default_convert', 'get_worker_info'), 'loader'),
    'CIFAR10Dataset': 'cifar',
    **dict.fromkeys(('BatchSampler', 'RandomSampler', 'Sampler', 'SequentialSampler', 'SubsetRandomSampler',
                     'WeightedRandomSampler'), 'samplers'),
    **dict.fromkeys(('WordCorpus', 'WordDataset', 'batchify', 'get_batch'), 'words'),
    **dict.fromkeys(('RandomFlipHorizontal', 'RandomCrop'), 'transforms')}
__all__ = ['ArrayDataset', 'BatchSampler', 'CIFAR10Dataset', 'ChainDataset', 'ConcatDataset', 'DataLoader', 'Dataset',
           'IterableDataset', 'MNISTDataset', 'NDArrayDataset', 'RandomCrop', 'RandomFlipHorizontal', 'RandomSampler',
           'Sampler', 'SequentialSampler', 'StackDataset', 'Subset', 'SubsetRandomSampler', 'TensorDataset',
           'WeightedRandomSampler', 'WordCorpus', 'WordDataset', 'batchify', 'default_collate', 'default_convert', 'get_batch',
           'get_worker_info', 'random_split']


def __getattr__(name: str) -> Any:
    """Import classes on first use: the downloader requires neither numpy nor the kernels."""
    if name not in _HOMES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(importlib.import_module(f'pyops.data.{_HOMES[name]}'), name)
