"""MNIST, 60,000 + 10,000 handwritten digits in four idx files; if they are not found, the embedded digits."""
from __future__ import annotations

import io
from typing import TYPE_CHECKING, NamedTuple

from pyops import cache
from pyops.data import idx, locate
from pyops.errors import UserError

if TYPE_CHECKING:       # programs load this module before numpy
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np

    from pyops.typing import PathLike

SIDE = 28               # pixels
CLASSES = 10
EMBEDDED = 'embedded'
TRAINED = 50_000        # MNIST images to train on; the rest of its training file is for evaluation


class Digits(NamedTuple):
    """Images of digits, 0 (paper) to 255 (ink), row by row, and their labels, 0 to 9."""
    name: str                           # their folder, or 'embedded'
    train_images: np.ndarray            # uint8 (N, 784)
    train_labels: np.ndarray            # uint8 (N,)
    test_images: np.ndarray             # uint8 (M, 784)
    test_labels: np.ndarray             # uint8 (M,)
    line: str = ''                      # line for the user about their origin
    images_magic: int = idx.IMAGES_MAGIC
    labels_magic: int = idx.LABELS_MAGIC

    def parts(self) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
        """Return images and labels for training, images and labels for evaluation; labels are int32.

        If the training file has more than TRAINED images, the first TRAINED are for training and the others for evaluation,
        and the test file stays unused until the end; else the test images are for evaluation.
        """
        train = self.train_images, self.train_labels.astype('int32')
        if len(self.train_images) <= TRAINED:
            return train, self.test()
        return tuple(a[:TRAINED] for a in train), tuple(a[TRAINED:] for a in train)

    def test(self) -> tuple[np.ndarray, np.ndarray]:
        """Return images and labels of the test file; labels are int32."""
        return self.test_images, self.test_labels.astype('int32')


def load(data_dir: PathLike | None = None, embedded: bool = False) -> Digits:
    """Return the Digits of MNIST if `locate` finds it, else, or if `embedded`, the digits of `pyops.data.digits`.

    UserError if data_dir is given and does not hold MNIST, $PYOPS_DATA is not a directory, one of the four files is missing
    or damaged, images and labels differ in number, there are none, images are not 28 x 28, or a label is not a digit.
    """
    paths = None if embedded else locate.find_files('mnist', data_dir)
    if paths is not None:
        arrays = [idx.read(path, magic) for path, magic in
                  zip(paths, (idx.IMAGES_MAGIC, idx.LABELS_MAGIC) * 2, strict=True)]
        _check(paths, arrays)
        arrays[::2] = [images.reshape(len(images), -1) for images in arrays[::2]]
        folder = str(locate.find('mnist', data_dir))
        return Digits(folder, arrays[0], arrays[1], arrays[2], arrays[3], f'mnist : {folder}')
    if not embedded:
        if found := locate.find_incomplete('mnist', data_dir):
            raise locate.incomplete('mnist', *found)
        if data_dir is not None:
            raise locate.missing('mnist', data_dir)
    arrays = list(_drawn())
    line = f'embedded digits : {len(arrays[0])} train, {len(arrays[2])} test'
    if not embedded:
        line = f'no MNIST found, using the {line}; get the real one with: python -m pyops.data get mnist'
    return Digits(EMBEDDED, arrays[0], arrays[1], arrays[2], arrays[3], line)


def _drawn() -> Sequence[np.ndarray]:
    """Return the embedded digits, which are drawn once and cached."""
    import numpy as np

    from pyops.data import digits
    key = cache.digest(io.BytesIO(np.__version__.encode()), digits.__name__)
    arrays = cache.read_arrays('digits', key) if key else None
    if arrays is None:
        arrays = digits.digits()
        if key:
            cache.write_arrays('digits', key, arrays)
    for array in arrays:
        array.flags.writeable = False
    return arrays


def _check(paths: Sequence[Path], arrays: Sequence[np.ndarray]) -> None:
    """Raise UserError unless images and labels match."""
    for first in (0, 2):
        (images_path, labels_path), (images, labels) = paths[first:first + 2], arrays[first:first + 2]
        if len(images) != len(labels):
            raise UserError(f'{images_path}: has {len(images)} images, but {labels_path} {len(labels)} labels: '
                            'expected equal numbers; get the files again')
        if images.shape[1:] != (SIDE, SIDE) or not len(images):
            raise UserError(f'{images_path}: has {" x ".join(map(str, images.shape))} pixels, '
                            f'expected images of {SIDE} x {SIDE} and at least one; get the file again')
        if labels.max() >= CLASSES:
            raise UserError(f'{labels_path}: has a label {labels.max()}, expected 0 to {CLASSES - 1}; get the file again')
