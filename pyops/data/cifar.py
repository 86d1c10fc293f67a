"""CIFAR-10: 50,000 + 10,000 colour images of 32 x 32 pixels in ten classes (Krizhevsky 2009), from files on disk.

Both published versions are read: the binary one (data_batch_1.bin, ...) and the one for Python (data_batch_1, ...), which is
pickled.  Unpickling may run code of the file, so that only numpy arrays of integers and plain values are accepted, and numpy
itself unpickles nothing: a damaged dtype ends its process.
"""
from __future__ import annotations

import io
import pickle
import pickletools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from pyops.backend import get
from pyops.data import batches, locate
from pyops.data.datasets import Dataset
from pyops.data.transforms import apply_all
from pyops.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pyops.typing import PathLike

SHAPE = 3, 32, 32
PIXELS = 3 * 32 * 32
CLASSES = 'airplane', 'automobile', 'bird', 'cat', 'deer', 'dog', 'frog', 'horse', 'ship', 'truck'
TRAIN, TEST = tuple(f'data_batch_{i}' for i in range(1, 6)), ('test_batch',)
FOLDERS = '', 'cifar-10-batches-py', 'cifar-10-batches-bin'


class _Kind:
    """A pickled dtype of integers."""

    def __init__(self, name: str, *_: Any) -> None:
        if not re.fullmatch('[|<>]?[iu][1248]', name):
            raise pickle.UnpicklingError(f'it has an array of {name}')
        self.dtype = np.dtype(name)

    def __setstate__(self, state: Any) -> None:
        if state[1] == '>':
            self.dtype = self.dtype.newbyteorder('>')


class _Array:
    """A pickled array."""
    value: np.ndarray

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, is_fortran, content = state
        self._set(content, kind, shape, 'F' if is_fortran else 'C')

    def _set(self, content: bytes, kind: _Kind, shape: tuple[int, ...], order: Any) -> _Array:
        self.value = np.frombuffer(content, kind.dtype).reshape(shape, order=order)
        return self


# What a pickled array consists of, with numpy 1 and 2.  A function for each use: the file may change its attributes.
_ALLOWED: dict[tuple[str, str], Callable[[], Any]] = {
    ('numpy', 'ndarray'): lambda: None, ('numpy', 'dtype'): lambda: lambda *args: _Kind(*args),
    ('_codecs', 'encode'): lambda: lambda text, _: text.encode('latin1')}
for _core in 'core', '_core':
    _ALLOWED[f'numpy.{_core}.multiarray', '_reconstruct'] = lambda: lambda *_: _Array()
    _ALLOWED[f'numpy.{_core}.numeric', '_frombuffer'] = lambda: lambda *args: _Array()._set(*args)


class _Unpickler(pickle.Unpickler):
    """An unpickler of numpy arrays of integers, as _Arrays, and plain values."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f'it refers to {module}.{name}')
        return _ALLOWED[module, name]()


def _check_numbers(content: bytes) -> None:
    """UnpicklingError if a pickle gives an object a number beyond their count: Python takes memory for all numbers up to it.

    Also ValueError if an object is longer than the file.
    """
    for count, (opcode, number, _) in enumerate(pickletools.genops(content)):
        if number is not None and opcode.name in ('PUT', 'BINPUT', 'LONG_BINPUT') and number > count:
            raise pickle.UnpicklingError(f'it gives object {count} the number {number}')


def read_binary(path: PathLike) -> tuple[np.ndarray, np.ndarray]:
    """Return images (N, 3072) and labels (N,), uint8, of a file of the binary version."""
    data = np.fromfile(path, np.uint8)
    if not len(data) or len(data) % (PIXELS + 1):
        raise UserError(f'{path}: has {len(data)} bytes, expected records of {PIXELS + 1}; get the file again')
    records = data.reshape(-1, PIXELS + 1)
    return records[:, 1:], records[:, 0]


def read_pickled(path: PathLike) -> tuple[np.ndarray, np.ndarray]:
    """Return images (N, 3072) and labels (N,), uint8, of a file of the version for Python."""
    try:
        content = Path(path).read_bytes()
        _check_numbers(content)
        found = _Unpickler(io.BytesIO(content), encoding='bytes').load()
        values = {name.decode() if isinstance(name, bytes) else name: value for name, value in found.items()}
        images, labels = (np.asarray(one.value if isinstance(one, _Array) else one)
                          for one in (values['data'], values['labels']))
    except Exception as error:          # a damaged pickle raises nearly anything
        reason = str(error)[:200] or type(error).__name__
        raise UserError(f'{path}: is no pickled batch of CIFAR-10 ({reason}); get the file again') from None
    if (images.dtype != np.uint8 or images.ndim != 2 or images.shape[1] != PIXELS or not len(images)
            or labels.shape != images.shape[:1] or labels.dtype.kind not in 'iu'):
        raise UserError(f'{path}: has images {images.shape} of {images.dtype} and labels {labels.shape} of {labels.dtype}, '
                        f'expected (N, {PIXELS}) of uint8 and (N,) of integers; get the file again')
    if labels.min() < 0 or labels.max() >= len(CLASSES):
        raise _wrong_label(path, labels.min() if labels.min() < 0 else labels.max())
    return images, labels.astype(np.uint8)


def _wrong_label(path: PathLike, label: int) -> UserError:
    return UserError(f'{path}: has a label {label}, expected 0 to {len(CLASSES) - 1}; get the file again')


def load(data_dir: PathLike | None = None, train: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Return images (N, 3072) and labels (N,), uint8, of the training or the test files.

    data_dir: the folder with the files, or the one above it; None: $PYOPS_DATA and ./data.
    UserError if there is no such folder or no such files, or one is damaged.
    """
    names = TRAIN if train else TEST
    for folder in (directory / name for directory in locate.directories(data_dir) for name in FOLDERS):
        for ending, read in (('', read_pickled), ('.bin', read_binary)):
            paths = [Path(folder, name + ending) for name in names]
            if not any(path.is_file() for path in paths):
                continue
            if lacking := [path.name for path in paths if not path.is_file()]:
                raise UserError(f'{folder}: CIFAR-10 is incomplete, {", ".join(lacking)} missing; unpack its archive again')
            parts = [read(path) for path in paths]
            for path, (_, labels) in zip(paths, parts, strict=True):
                if labels.max() >= len(CLASSES):
                    raise _wrong_label(path, labels.max())
            images, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
            return images, labels
    searched = ' or '.join(map(str, locate.directories(data_dir)))
    raise UserError(f'CIFAR-10: {names[0]} not found in {searched}; unpack cifar-10-python.tar.gz or cifar-10-binary.tar.gz of '
                    'https://www.cs.toronto.edu/~kriz/cifar.html there')


class CIFAR10Dataset(Dataset):
    """CIFAR-10 as (image (3, 32, 32) float32 from 0 to 1, label int32); the names of the labels are pyops.data.cifar.CLASSES.

    data_dir, train: as in `load`.  transforms: functions of one image (H, W, C), as everywhere; the channels become the first
    axis afterwards.
    """
    SHAPE = SHAPE

    def __init__(self, data_dir: PathLike | None = None, train: bool = True,
                 transforms: Iterable[Callable[..., Any]] = ()) -> None:
        if not isinstance(train, int | np.bool_):
            raise TypeError(f'CIFAR10Dataset: train: expected True or False, got {train!r}')
        self._set(*load(data_dir, bool(train)), transforms)

    @classmethod
    def of(cls, images: np.ndarray, labels: np.ndarray, transforms: Iterable[Callable[..., Any]] = ()) -> Self:
        """Return a dataset of given images (N, 3072) or (N, 3, 32, 32) uint8 and labels (N,)."""
        dataset = cls.__new__(cls)
        dataset._set(images.reshape(len(images), PIXELS), labels, transforms)
        return dataset

    def _set(self, images: np.ndarray, labels: np.ndarray, transforms: Iterable[Callable[..., Any]]) -> None:
        super().__init__(transforms)
        self.images, self.labels = np.ascontiguousarray(images), labels.astype(np.int32)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: Any) -> Any:
        return self.at(index)

    def batch(self, rows: np.ndarray, seed: int = 0, epoch: int = 0) -> tuple[Any, ...]:
        images = batches.gather_pixels(self.images, rows).reshape(len(rows), *SHAPE)
        if self.transforms:
            last = apply_all(self.transforms, get(images).transpose(0, 2, 3, 1), seed, epoch, rows)
            images = np.ascontiguousarray(last.transpose(0, 3, 1, 2))
        return images, self.labels[rows]
