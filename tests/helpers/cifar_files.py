"""Small files in the two published formats of CIFAR-10."""
import pickle

import numpy as np

from pyops.data import cifar


def images_of(seed, n):
    """Return n images (n, 3072) and labels (n,), uint8, at random."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, cifar.PIXELS), np.uint8), rng.integers(0, 10, n, np.uint8)


def write_binary(folder, n):
    """Write the files of the binary version with n images each."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate((*cifar.TRAIN, *cifar.TEST)):
        images, labels = images_of(seed, n)
        (folder / f'{name}.bin').write_bytes(np.hstack([labels[:, None], images]).tobytes())


def write_pickled(folder, n):
    """Write the files of the version for Python with n images each: dicts with keys of bytes, labels in a list."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate((*cifar.TRAIN, *cifar.TEST)):
        images, labels = images_of(seed, n)
        batch = {b'batch_label': b'x', b'labels': labels.tolist(), b'data': images, b'filenames': [b'a.png'] * n}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
