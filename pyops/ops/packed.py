"""Packed: the layout of sentences of different lengths that are stored one after the other, without padding."""
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pyops.backend import axes, check, check_rows, empty, launch
from pyops.backend.kernels import Kernel, declare

if TYPE_CHECKING:
    from pyops.typing import Array, Shape


class Packed(NamedTuple):
    """The sentences in an array of rows (N, D): sentence b is rows offsets[b] to offsets[b + 1] - 1.

    offsets (B + 1,) int32: ascending from 0 to N, on the device of the rows
    longest: an upper limit of the length of any sentence, at least 1, the same for all batches.  It sizes work and grids and
             numbers the elements of dropout masks; it need not be the length of a sentence of this batch.
    """
    offsets: Array
    longest: int

    @property
    def sentences(self) -> int:
        return len(self.offsets) - 1

    def check(self) -> None:
        """Raise TypeError or ValueError unless the fields have the types and shapes above."""
        (entries,) = axes('rows.offsets', self.offsets, 'B+1')
        check('rows.offsets', self.offsets, (entries,), np.int32)
        if entries < 1 or self.longest < 1:
            raise ValueError(f'rows: expected offsets (B + 1,) and longest of at least 1, got shape {self.offsets.shape} and '
                             f'longest={self.longest}')


def pad_rows(x: Array | None, rows: Packed, shape: Shape, reverse: bool = False, last: Array | None = None,
             name: str = 'padded') -> tuple[Array, Array | None]:
    """Copy packed rows x of this shape (N, C), zeros if x is None, to padded sequences (longest, B, C), which are 0 after the
    end of each sentence.  x may be columns of a larger array.

    last (B, C): added at the last step of each sentence.  Also return first (B, C): `last` of the empty sentences, 0 for the
    others; None without `last`.
    """
    T, B, (N, C) = rows.longest, rows.sentences, shape
    y, first = empty((T, B, C), name=name), None if last is None else empty((B, C), name=f'{name}.first')
    launch('pad_rows', y, first, x, last, rows.offsets, T, B, N, C, C if x is None else check_rows('x', x, shape), reverse)
    return y, first


def unpad_rows(y: Array, rows: Packed, N: int, reverse: bool = False, first: Array | None = None,
               name: str = 'packed', out: Array | None = None) -> tuple[Array, Array]:
    """Copy padded sequences (longest, B, C) to packed rows (N, C), which are `out` if it is given.  Also return the last step
    of each sentence (B, C), for an empty one `first` (B, C), 0 if it is None."""
    T, B, C = y.shape
    x, last = empty((N, C), name=name) if out is None else out, empty((B, C), name=f'{name}.last')
    check('x', x, (N, C))
    launch('unpad_rows', x, last, y, first, rows.offsets, T, B, N, C, reverse)
    return x, last


# ---- the same in numpy, for references ----------------------------------------------------------------------------------

def lengths_of(rows: Packed) -> np.ndarray:
    """Return the lengths of the sentences, (B,)."""
    return np.diff(np.asarray(rows.offsets))


def padded(x: np.ndarray, rows: Packed) -> np.ndarray:
    """Return the padded sequences of packed rows x, `pad_rows` of x."""
    y = np.zeros((rows.longest, rows.sentences, *x.shape[1:]), x.dtype)
    for b, n in enumerate(lengths_of(rows)):
        y[:n, b] = x[rows.offsets[b]:rows.offsets[b] + n]
    return y


def packed(x: np.ndarray, rows: Packed) -> np.ndarray:
    """Return the packed rows of padded sequences x, `unpad_rows` of x."""
    return np.concatenate([x[:n, b] for b, n in enumerate(lengths_of(rows))]) if rows.sentences else x[:0, 0]


declare(pad_rows=Kernel(), unpad_rows=Kernel())
