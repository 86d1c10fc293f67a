"""Sequences of unlike lengths: padded to one Tensor, and packed for recurrent layers.  pyops.nn.utils.rnn is this module."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyops import functional as F
from pyops.autograd import Tensor
from pyops.autograd.tensor import stack
from pyops.errors import ShapeError
from pyops.nn.recurrent import PackedSequence, lengths_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyops.typing import Numbers

__all__ = ['PackedSequence', 'pack_padded_sequence', 'pack_sequence', 'pad_packed_sequence', 'pad_sequence', 'unpack_sequence',
           'unpad_sequence']


def pad_sequence(sequences: Sequence[Any], batch_first: bool = False, padding_value: float = 0.0) -> Tensor:
    """Return sequences (T_b, ...) as one Tensor (T, B, ...), or (B, T, ...) with batch_first, for the longest T."""
    given = [F.tensor(one) for one in sequences]
    T = max(len(one) for one in given)
    ends = [(0, 0)] * (given[0].ndim - 1)
    return stack([one.pad(((0, T - len(one)), *ends), padding_value) for one in given], 0 if batch_first else 1)


def unpad_sequence(padded_sequences: Tensor, lengths: Numbers, batch_first: bool = False) -> list[Tensor]:
    """Return the sequences of a padded Tensor: the inverse of pad_sequence."""
    rows = padded_sequences if batch_first else padded_sequences.transpose(0, 1)
    known = lengths_of(lengths, rows.shape[1], rows.shape[0])
    return [rows[b, :n] for b, n in enumerate(known.tolist())]


def pack_padded_sequence(input: Any, lengths: Numbers, batch_first: bool = False,
                         enforce_sorted: bool = True) -> PackedSequence:
    """Return the input of a recurrent layer for sequences (T, B, ...), or (B, T, ...) with batch_first, of these lengths (B,).

    enforce_sorted: raise ValueError unless the lengths fall
    """
    x = F.tensor(input)
    x = x.transpose(0, 1) if batch_first else x
    known = lengths_of(lengths, *x.shape[:2])
    if enforce_sorted and (np.diff(known) > 0).any():
        raise ShapeError(f'pack_padded_sequence: lengths: expected falling numbers, got {known.tolist()}; pass '
                         'enforce_sorted=False')
    return PackedSequence(x[:int(known.max())], known)


def pack_sequence(sequences: Sequence[Any], enforce_sorted: bool = True) -> PackedSequence:
    """Return the input of a recurrent layer for a list of sequences (T_b, ...)."""
    return pack_padded_sequence(pad_sequence(sequences), [len(one) for one in sequences], enforce_sorted=enforce_sorted)


def pad_packed_sequence(sequence: PackedSequence, batch_first: bool = False, padding_value: float = 0.0,
                        total_length: int | None = None) -> tuple[Tensor, Tensor]:
    """Return a Tensor (T, B, ...), or (B, T, ...) with batch_first, and the lengths (B,).

    total_length: T; None: the longest
    """
    x, lengths = sequence.padded, sequence.lengths
    T = int(lengths.max()) if total_length is None else total_length
    x = x[:T].pad(((0, max(T - len(x), 0)), *[(0, 0)] * (x.ndim - 1)))
    inside = (np.arange(T)[:, None] < lengths).reshape(T, -1, *[1] * (x.ndim - 2))
    x = F.where(Tensor(np.broadcast_to(inside, x.shape)), x, padding_value)
    return x.transpose(0, 1) if batch_first else x, Tensor(lengths)


def unpack_sequence(packed_sequences: PackedSequence) -> list[Tensor]:
    """Return the sequences of a PackedSequence: the inverse of pack_sequence."""
    return unpad_sequence(packed_sequences.padded, packed_sequences.lengths)
