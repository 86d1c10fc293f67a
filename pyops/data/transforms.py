"""Random augmentation of images.

A transform is a pure function of the image and four random words, which are a function of (seed, epoch, sample index): an
epoch can be repeated or resumed with any batch size.  Any function of one image is a transform too.
"""
from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from pyops import params
from pyops.philox import philox4x32

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def random_words(seed: int, name: str, epoch: int, indices: Any) -> np.ndarray:
    """Return four random words per sample, (B, 4) uint32: Philox4x32-10 with counter (index, epoch), 64 bits each.

    Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; dropout uses the same generator.
    """
    low, half, key = np.uint64(0xFFFFFFFF), np.uint64(32), params.key(seed, name)
    index, epochs = np.asarray(indices, np.uint64), np.full(len(indices), epoch, np.uint64)
    return philox4x32(np.stack([index & low, index >> half, epochs & low, epochs >> half], -1), (key & 0xFFFFFFFF, key >> 32))


class Transform:
    """Base class: transform(x) of one image (H, W, C); transform.batch(x, words) of images (B, H, W, C), four words each.

    Without words, the n-th such call in a process derives them from n and the process seed (pyops.seed).
    """

    def __call__(self, x: np.ndarray, words: np.ndarray | None = None) -> np.ndarray:
        x = np.asarray(x)
        if x.ndim != 3:
            raise ValueError(f'{self!r}: expected an image (H, W, C), got shape {x.shape}')
        words = random_words(params.next_key('transform'), 'alone', 0, [0]) if words is None else np.asarray(words)[None]
        return self.batch(x[None], words)[0]

    def batch(self, x: np.ndarray, words: np.ndarray) -> np.ndarray:
        raise NotImplementedError(f'{type(self).__name__}.batch(x, words)')


class RandomFlipHorizontal(Transform):
    """Mirror left and right with probability p."""

    def __init__(self, p: float = 0.5) -> None:
        if not 0 <= p <= 1:
            raise ValueError(f'RandomFlipHorizontal: p: expected 0 <= p <= 1, got {p}')
        self.p = p

    def batch(self, x: np.ndarray, words: np.ndarray) -> np.ndarray:
        flipped = words[:, 0] < self.p * 2**32
        y = x.copy()
        y[flipped] = x[flipped, :, ::-1]
        return y

    def __repr__(self) -> str:
        return f'RandomFlipHorizontal(p={self.p})'


class RandomCrop(Transform):
    """Shift by up to `padding` pixels in either direction; pixels from outside are 0."""

    def __init__(self, padding: int = 3) -> None:
        if operator.index(padding) < 0:
            raise ValueError(f'RandomCrop: padding: expected 0 or more, got {padding}')
        self.padding = padding

    def batch(self, x: np.ndarray, words: np.ndarray) -> np.ndarray:
        p, (_, H, W, _) = self.padding, x.shape
        padded = np.pad(x, ((0, 0), (p, p), (p, p), (0, 0)))
        corners = words[:, :2].astype(np.uint64) * np.uint64(2 * p + 1) >> np.uint64(32)        # uniform in 0 .. 2p
        y = np.empty_like(x)
        for b, (row, column) in enumerate(corners.tolist()):
            y[b] = padded[b, row:row + H, column:column + W]
        return y

    def __repr__(self) -> str:
        return f'RandomCrop(padding={self.padding})'


def apply_all(transforms: Iterable[Callable[..., Any]], x: np.ndarray, seed: int, epoch: int,
              indices: np.ndarray) -> np.ndarray:
    """Apply all transforms to images (B, H, W, C) with these sample indices; the n-th one draws as `transform.n`."""
    for place, transform in enumerate(transforms):
        if hasattr(transform, 'batch'):
            if x.ndim != 4:
                raise ValueError(f'{transform!r}: expected images (B, H, W, C), got shape {x.shape}')
            x = transform.batch(x, random_words(seed, f'transform.{place}', epoch, indices))
        else:
            x = np.stack([transform(one) for one in x]) if len(x) else x
    return x
