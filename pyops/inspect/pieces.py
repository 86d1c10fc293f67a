"""The measures of a large tensor in a number format: its file is read and measured piece by piece, in bounded memory.

A piece is a range of the file that rounds as it does within the tensor: whole blocks.  For a scale of the whole tensor, its
largest magnitude is found first, in another pass over the file.
Counts and maxima are of the whole tensor.  Sums of float64 numbers are added in another order, so the measures made from
them may differ by a relative error of 1e-12.
"""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pyops.inspect.readers import flat
from pyops.inspect.statistics import (
    BLOCK,
    amax_of,
    digits,
    exponents,
    joined,
    measures,
    scale_codes,
    totals,
    transformed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
    """Return the Layout of the pieces of a tensor that is not empty; None if a format needs all of it at once: for a scale of a
    column, or for random numbers by the place in the tensor."""
    size, blocks = fmt.option('block'), fmt.block or BLOCK
    if fmt.is_scaled and size == 'column' or fmt.is_stochastic or not shape:
        return None
    if axis == 'tokens':
        outer, n, inner = 1, math.prod(shape[:-1]), shape[-1]
    else:
        at = int(axis) % len(shape)
        outer, n, inner = math.prod(shape[:at]), shape[at], math.prod(shape[at + 1:])
    unit = math.lcm(blocks, fmt.hadamard or 1, size if isinstance(size, int) else 1)
    if not fmt.is_scaled or isinstance(size, int) or size == 'tensor':
        return Layout(outer, n, inner, 1, unit)
    if size == 'axis':
        return Layout(outer, n, inner, 1, 0)
    if inner > 1 or n != shape[-1]:         # rows of blocks in two dimensions, and measures of blocks along another axis
        return None
    return Layout(outer, n, inner, 1 if size == 'row' else int(size.partition('x')[0]), 0)


def parts_of(mask: np.ndarray | None, shape: Shape) -> Callable[[int, int], np.ndarray | None]:
    """Return a function of (start, stop), that returns the mask of these values of a tensor of this shape in C order, flat; it
    returns None without a mask.   mask: bool that broadcasts to the shape, False at padding"""
    if mask is None:
        return lambda start, stop: None
    mask = mask.reshape((1,) * (len(shape) - mask.ndim) + mask.shape)
    along = max((axis + 1 for axis, n in enumerate(mask.shape) if n > 1), default=0)       # the other axes have one value
    rows = np.broadcast_to(mask.reshape(mask.shape[:along]), shape[:along]).reshape(-1)
    inner = max(math.prod(shape[along:]), 1)

    def part(start: int, stop: int) -> np.ndarray:
        first = start // inner
        whole = rows[first:-(-stop // inner)].repeat(inner)
        return whole[start - first * inner:stop - first * inner]
    return part


def in_parts(*entries: Entry) -> Iterator[tuple[int, int, list[np.ndarray]]]:
    """Yield start, stop and the values there of tensors of one shape, flat, in C order: PIECE values at a time of large ones
    whose files allow it, else all of them.   LogError if a file is damaged."""
    count = math.prod(entries[0].shape)
    files = []
    for entry in entries:
        with entry.reading():
            files.append(flat(entry.path, entry.key) if count > PIECE else None)
    if any(file is None or file.size != count for file in files):
        yield 0, count, [entry.load().reshape(-1) for entry in entries]
        return
    for start in range(0, count, PIECE):
        stop = min(start + PIECE, count)
        values = []
        for entry, file in zip(entries, files, strict=True):
            with entry.reading():
                values.append(file.read(start, stop))       # type: ignore[union-attr]
        yield start, stop, values


def has_one_scale(fmt: Format) -> bool:
    """Return whether a scale or a factor depends on the largest magnitude of the whole tensor."""
    return fmt.name == 'nvfp4' or fmt.has_factor or fmt.is_scaled and fmt.option('block') == 'tensor'


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
        valid = parts_of(mask, entry.shape)
        amax = None
        if has_one_scale(fmt):
            amax = amax_of(np.array([amax_of(transformed(file.read(start, stop).reshape(shape), fmt, 1))
                                     for start, stop, shape in layout.pieces()]))
        found, worst = [], math.nan
        histograms: dict[str, dict[int, int]] = {'exponents': {}, 'scales': {}, 'digits': {}}
        for start, stop, shape in layout.pieces():
            x = file.read(start, stop).reshape(shape)
            part = valid(start, stop)
            part = part if part is None else part.reshape(shape)
            total, blocks = totals(x, fmt, 1, part, amax)
            found.append(total)
            worst = float(np.fmin.reduce(blocks['sqnr_db'], axis=None, initial=worst))
            for name, counts in (('exponents', exponents(x, part)), ('scales', scale_codes(x, fmt, 1, part)),
                                 ('digits', digits(x, fmt, part, amax))):
                for key, count in counts.items():
                    histograms[name][key] = histograms[name].get(key, 0) + count
    whole = measures(joined(found)) | {'worst_block_db': worst}
    return whole, {name: counts if name == 'digits' else dict(sorted(counts.items())) for name, counts in histograms.items()}
