"""The measures of a large tensor in a number format: its file is read and measured piece by piece, in bounded memory.

A piece is a range of the file that rounds as it does within the tensor: whole blocks, and no scale for the whole tensor.
Counts and maxima are of the whole tensor.  Sums of float64 numbers are added in another order, so the measures made from
them may differ by a relative error of 1e-12.
"""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pyops.inspect.readers import flat
from pyops.inspect.statistics import BLOCK, digits, exponents, joined, measures, scale_codes, totals

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyops.formats import Format
    from pyops.inspect.logs import Entry
    from pyops.typing import Shape

PIECE = 1 << 21                     # values: 8 MiB of float32


class Layout(NamedTuple):
    """A tensor as (outer, n, inner) with blocks along n.  Pieces begin at multiples of outer_unit along outer, and of n_unit
    along n; n_unit 0: they have all of n."""
    outer: int
    n: int
    inner: int
    outer_unit: int
    n_unit: int

    def pieces(self) -> Iterator[tuple[int, int, Shape]]:
        """Yield (start, stop, shape) of each piece: a range of the tensor in C order, whose axis 1 has the blocks."""
        row = self.n * self.inner
        if row <= PIECE or not self.n_unit:
            step = max(PIECE // row // self.outer_unit, 1) * self.outer_unit
            for first in range(0, self.outer, step):
                last = min(first + step, self.outer)
                yield first * row, last * row, self._shape(last - first, self.n)
            return
        step = max(PIECE // self.inner // self.n_unit, 1) * self.n_unit
        for start in range(0, self.outer * row, row):
            for first in range(0, self.n, step):
                last = min(first + step, self.n)
                yield start + first * self.inner, start + last * self.inner, self._shape(1, last - first)

    def _shape(self, outer: int, n: int) -> Shape:
        return (outer, n) if self.inner == 1 else (outer, n, self.inner)        # formats read the last axis as columns


def layout_of(shape: Shape, fmt: Format, axis: int | str) -> Layout | None:
    """Return the Layout of the pieces of a tensor that is not empty; None if a format needs all of it at once: for a scale of
    the whole tensor or of a column, or for random numbers by the place in the tensor."""
    size, blocks = fmt.option('block'), fmt.block or BLOCK
    has_one_scale = fmt.name == 'nvfp4' or fmt.has_factor or fmt.is_scaled and size in ('tensor', 'column')
    if has_one_scale or fmt.is_stochastic or not shape:
        return None
    if axis == 'tokens':
        outer, n, inner = 1, math.prod(shape[:-1]), shape[-1]
    else:
        at = int(axis) % len(shape)
        outer, n, inner = math.prod(shape[:at]), shape[at], math.prod(shape[at + 1:])
    unit = math.lcm(blocks, fmt.hadamard or 1, size if isinstance(size, int) else 1)
    if not fmt.is_scaled or isinstance(size, int):
        return Layout(outer, n, inner, 1, unit)
    if size == 'axis':
        return Layout(outer, n, inner, 1, 0)
    if inner > 1 or n != shape[-1]:         # rows of blocks in two dimensions, and measures of blocks along another axis
        return None
    return Layout(outer, n, inner, 1 if size == 'row' else int(size.partition('x')[0]), 0)


def measure_in_pieces(entry: Entry, fmt: Format, axis: int | str,
                      mask: np.ndarray | None) -> tuple[dict[str, float], dict[str, dict[int, int]]] | None:
    """Return the statistics and the histograms of a large tensor, as in a Row of compare.

    None if the tensor is small, or if its file, its kind or the format allows no pieces.  LogError if the file is damaged.
    """
    if math.prod(entry.shape) <= PIECE or entry.is_weights or not (layout := layout_of(entry.shape, fmt, axis)):
        return None
    with entry.reading():
        file = flat(entry.path, entry.key)
        if file is None or file.size != math.prod(entry.shape):
            return None
        valid = None if mask is None else np.broadcast_to(mask, entry.shape).reshape(-1)
        found, worst = [], math.nan
        histograms: dict[str, dict[int, int]] = {'exponents': {}, 'scales': {}, 'digits': {}}
        for start, stop, shape in layout.pieces():
            x = file.read(start, stop).reshape(shape)
            part = None if valid is None else valid[start:stop].reshape(shape)
            total, blocks = totals(x, fmt, 1, part)
            found.append(total)
            worst = float(np.fmin.reduce(blocks['sqnr_db'], axis=None, initial=worst))
            for name, counts in (('exponents', exponents(x, part)), ('scales', scale_codes(x, fmt, 1, part)),
                                 ('digits', digits(x, fmt, part))):
                for key, count in counts.items():
                    histograms[name][key] = histograms[name].get(key, 0) + count
    whole = measures(joined(found)) | {'worst_block_db': worst}
    return whole, {name: counts if name == 'digits' else dict(sorted(counts.items())) for name, counts in histograms.items()}
