"""Packed rows: the sentences of a batch one after the other, without padding."""
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

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
