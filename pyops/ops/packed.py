"""Packed rows: the sentences of a batch one after the other, without padding."""
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pyops.backend import axes, check, check_rows, empty, launch
from pyops.backend.kernels import Kernel, declare

if TYPE_CHECKING:
    from pyops.typing import Array


class Packed(NamedTuple):
    """Where the sentences of a batch are in an array of rows (N, ...): sentence b is rows offsets[b] to offsets[b + 1] - 1.

    offsets   (B + 1,) int32 on the device, ascending, from 0 to N
    longest   upper limit of the length of a sentence, the same for all batches: it determines sizes of scratch memory and the
              index of an element in a dropout mask
    """
    offsets: Array
    longest: int

    @property
    def sentences(self) -> int:
        """The number of sentences."""
        return len(self.offsets) - 1


def pad_rows(x: Array, rows: Packed, name: str = 'padded') -> Array:
    """Return packed rows (N, C), possibly columns of a larger array, as time steps (longest, B, C), 0 beyond each sentence.
    ValueError for a sentence that is longer than `longest`."""
    distance = check_rows('x', x, axes('x', x, 'N C'))
    y = empty((rows.longest, rows.sentences, x.shape[1]), name=name)
    launch('pad_rows', y, x, rows.offsets, *y.shape, distance)
    return y


def pack_rows(y: Array, x: Array, rows: Packed) -> None:
    """Copy time steps x (longest, B, C) to packed rows y (N, C), without the padding."""
    check('x', x, (rows.longest, rows.sentences, y.shape[-1]))
    check('y', y, y.shape)
    launch('pack_rows', y, x, rows.offsets, *x.shape)


# ---- the same in numpy, for references ----------------------------------------------------------------------------------

def lengths_of(rows: Packed) -> np.ndarray:
    """Return the lengths of the sentences, (B,)."""
    return np.diff(np.asarray(rows.offsets))


def padded(x: np.ndarray, rows: Packed) -> np.ndarray:
    """Return `pad_rows` of x."""
    y = np.zeros((rows.longest, rows.sentences, *x.shape[1:]), x.dtype)
    for b, n in enumerate(lengths_of(rows)):
        y[:n, b] = x[rows.offsets[b]:rows.offsets[b] + n]
    return y


def packed(x: np.ndarray, rows: Packed) -> np.ndarray:
    """Return time steps x as packed rows, `pack_rows` of x."""
    return np.concatenate([x[:n, b] for b, n in enumerate(lengths_of(rows))]) if rows.sentences else x[:0, 0]


declare(pad_rows=Kernel(), pack_rows=Kernel())
