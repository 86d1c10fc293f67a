"""The measures of a large tensor in a number format: its file is read and measured piece by piece, in bounded memory.

A piece is a range of the file that rounds as it does within the tensor: whole blocks.  For a scale of the whole tensor, its
largest magnitude is found first, in another pass over the file.
Counts and maxima are of the whole tensor.  Sums of float64 numbers are added in another order, so the measures made from
them may differ by a relative error of 1e-12.
"""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops.inspect.readers import flat
from pyops.inspect.statistics import (
    BLOCK,
    amax_of,
    describe,
    digits,
    exponents,
    joined,
    measures,
    scale_codes,
    totals,
    transformed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

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


def describe_in_pieces(entry: Entry, mask: np.ndarray | None) -> dict[str, Any]:
    """Return the result of statistics.describe for a large tensor, read piece by piece.   LogError if the file is damaged"""
    valid, found = parts_of(mask, entry.shape), []
    for start, stop, (x,) in in_parts(entry):
        found.append(describe(x, valid(start, stop)))
    result = {name: sum(one[name] for one in found) for name in ('count', 'nan', 'inf', 'zeros')}
    known = [(one, one['count'] - one['nan'] - one['inf']) for one in found if one['amax'] is not None]
    if not known:
        return found[0] | result
    finite = sum(count for _, count in known)
    mean, mean_abs, squares = (math.fsum(count * one[name] ** power for one, count in known) / finite
                               for name, power in (('mean', 1), ('mean_abs', 1), ('rms', 2)))
    return result | {'amax': max(one['amax'] for one, _ in known), 'mean': mean, 'mean_abs': mean_abs,
                     'rms': math.sqrt(squares), 'std': math.sqrt(max(squares - mean * mean, 0.0)),
                     'min': min(one['min'] for one, _ in known), 'max': max(one['max'] for one, _ in known)}


def some_rows(entry: Entry, fmts: Iterable[Format], axis: int,
              mask: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None, int] | None:
    """Return about PIECE values of a large tensor, their mask, and the axis of their blocks.

    They are evenly spaced groups of rows, which contain whole blocks of all formats.  A scale of the whole tensor becomes one
    of these rows.  None if the file or the axis does not allow it.   LogError if the file is damaged.
    """
    ndim, columns = len(entry.shape), entry.shape[-1] if entry.shape else 1
    is_last = axis % max(ndim, 1) == ndim - 1
    if ndim < 2 or not is_last and ndim > 2:
        return None
    sizes = [1]
    for fmt in fmts:
        block = fmt.option('block')
        sizes.append(int(block.partition('x')[0]) if isinstance(block, str) and 'x' in block else
                     1 if is_last or not isinstance(block, int) else block)
        sizes.append(1 if is_last else max(fmt.hadamard, BLOCK))
    group, rows = math.lcm(*sizes), math.prod(entry.shape[:-1])
    groups, chosen = -(-rows // group), PIECE // (group * columns)
    with entry.reading():
        file = flat(entry.path, entry.key)
        if file is None or file.size != rows * columns or not 0 < chosen < groups:
            return None
        ranges = [(first * group * columns, min((first + 1) * group, rows) * columns)
                  for first in (i * groups // chosen for i in range(chosen))]
        x = np.concatenate([file.read(start, stop) for start, stop in ranges]).reshape(-1, columns)
    valid = parts_of(mask, entry.shape)
    parts = [part for start, stop in ranges if (part := valid(start, stop)) is not None]
    return x, np.concatenate(parts).reshape(x.shape) if parts else None, 1 if is_last else 0
