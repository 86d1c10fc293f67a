"""Data of the plots: counts, quantiles, and views of tensors as matrices.

Counts and statistics cover all values without padding.  Quantiles and boxes, which require sorting, use a deterministic
sample of at most SAMPLE values.
"""
from __future__ import annotations

import dataclasses
import math
import statistics as standard
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

SAMPLE = 65_536
ROWS, COLUMNS = 250, 280            # largest map, one cell per pixel
SHOWN, PADDING, MISSING = range(3)      # of View.cover; a cell of several elements has the smallest
_RMS = 4                    # end of a colour scale in multiples of the root mean square
BROKEN_BIN = 255            # biased exponent of NaN and the infinities
_BIAS = 127


def valid(x: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    """Return the values of x without padding, 1-D.  mask: bool that broadcasts to x, False at padding, or None."""
    if mask is None:
        return x.reshape(-1)
    return x[np.broadcast_to(mask, x.shape)]


def sample(values: np.ndarray, most: int = SAMPLE, seed: int = 0) -> np.ndarray:
    """Return at most `most` of 1-D values: a random one from each of `most` equal intervals."""
    if len(values) <= most:
        return values
    indices = (np.arange(most) + np.random.default_rng(seed).random(most)) * (len(values) / most)
    return values[indices.astype(np.int64)]


# ---- distributions -----------------------------------------------------------------------------------------------------

def binades(values: np.ndarray) -> np.ndarray:
    """Return int64 (2, 256): the number of nonzero values per sign and biased float32 exponent e = floor(log2 |x|) + 127.

    e = 0 has the subnormals, e = 255 NaN and infinities.  Counts of several tensors can be added.
    """
    counts = np.zeros(512, np.int64)
    for start in range(0, len(values), 1 << 20):
        part = values[start:start + (1 << 20)]
        bits = np.ascontiguousarray(part[part != 0], np.float32).view(np.uint32)
        counts += np.bincount(bits >> 23, minlength=512)
    return counts.reshape(2, 256)


def span_of(counts: np.ndarray) -> tuple[int, int] | None:
    """Return the smallest and largest floor(log2 |x|) in the counts of `binades`, None without finite nonzero values."""
    occupied = np.flatnonzero(counts.sum(0)[:BROKEN_BIN])
    return None if not len(occupied) else (int(occupied[0]) - _BIAS, int(occupied[-1]) - _BIAS)


def histogram(values: np.ndarray, most: int = 100) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (edges, counts) of the finite values in equal bins over their range, None without finite values.

    The number of bins depends on the number of values, up to `most`; a constant has one bin.
    """
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    low, high = float(finite.min()), float(finite.max())
    bins = min(most, max(1, math.ceil(2 * len(finite) ** 0.5)))
    if low == high or not high - low > 1e-6 * max(abs(low), abs(high)):
        bins, margin = 1, max(abs(low), 1e-30) * 0.01
        low, high = low - margin, high + margin
    counts, edges = np.zeros(bins, np.int64), np.zeros(0)
    for start in range(0, len(finite), 1 << 20):            # float64, because high - low may overflow in float32
        part, edges = np.histogram(finite[start:start + (1 << 20)].astype(np.float64), bins, (low, high))
        counts += part
    return edges, counts


def normal_quantiles(values: np.ndarray, points: int = 257) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (expected, observed) quantiles: of a normal distribution with the mean and std of the values, and of the values.

    Up to `points` values all are used.  None if fewer than 3 values are finite or all are equal.
    """
    ordered = np.sort(values[np.isfinite(values)].astype(np.float64))
    n = len(ordered)
    if n < 3 or ordered[0] == ordered[-1]:
        return None
    if n > points:      # spaced evenly along the normal's axis, to resolve the tails
        normal = standard.NormalDist()
        edge = normal.inv_cdf(1 - 0.5 / n)
        z = np.linspace(-edge, edge, points)
        ranks = np.clip(np.array([normal.cdf(v) for v in z]) * n - 0.5, 0, n - 1)
        observed = np.interp(ranks, np.arange(n), ordered)
    else:
        normal = standard.NormalDist()
        z = np.array([normal.inv_cdf((i + 0.5) / n) for i in range(n)])
        observed = ordered
    return ordered.mean() + ordered.std() * z, observed


@dataclasses.dataclass(frozen=True)
class Box:
    """Box plot of one group: quartiles, whiskers at the last value within 1.5 interquartile ranges, up to 60 outliers."""
    label: str
    low: float
    q1: float
    median: float
    q3: float
    high: float
    outliers: np.ndarray


def boxes(x: np.ndarray, mask: np.ndarray | None = None, heads_axis: int | None = None, most: int = 12) -> list[Box]:
    """Return the boxes of all values and of up to `most` groups: the heads if x has them, else equal parts of the last axis.

    Groups without finite values are omitted.
    """
    groups = [('all', valid(x, mask))]
    axis = x.ndim - 1 if heads_axis is None else heads_axis
    if x.ndim >= 2 and x.shape[axis] >= 2:
        count = x.shape[axis]
        edges = np.linspace(0, count, min(count, most) + 1).astype(int)
        for low, high in zip(edges[:-1], edges[1:], strict=True):
            part = np.take(x, range(low, high), axis)
            part_mask = mask if mask is None or mask.shape[axis] == 1 else np.take(mask, range(low, high), axis)
            groups.append((f'{low}' if high - low == 1 else f'{low}\N{EN DASH}{high - 1}', valid(part, part_mask)))
    result = []
    for label, values in groups:
        finite = sample(values[np.isfinite(values)]).astype(np.float64)
        if len(finite):
            q1, median, q3 = np.quantile(finite, (0.25, 0.5, 0.75)).tolist()
            reach = 1.5 * (q3 - q1)
            inside = finite[(finite >= q1 - reach) & (finite <= q3 + reach)]
            outliers = finite[(finite < q1 - reach) | (finite > q3 + reach)]
            if len(outliers) > 60:                          # includes the extremes
                outliers = np.sort(outliers)[np.linspace(0, len(outliers) - 1, 60).astype(int)]
            result.append(Box(label, float(inside.min(initial=q1)), q1, median, q3, float(inside.max(initial=q3)), outliers))
    return result


# ---- a tensor as a matrix ----------------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class View:
    """A layout of a tensor as a matrix.  `of(x)` applies it to the tensor, its error or its padding.

    rows, columns: labels of the axes;  row_lines, column_lines: first rows and columns of parts (sentences, heads)
    """
    shape: tuple
    order: tuple
    matrix: tuple
    rows: str
    columns: str
    row_lines: tuple = ()
    column_lines: tuple = ()
    fold: int = 0               # row length of a folded vector
    first: int | None = None    # number of items of the first axis that are shown, None: all

    def of(self, x: np.ndarray) -> np.ndarray:
        """Return the matrix, a view of x if possible.  The last row of a folded vector is filled with NaN or 0."""
        x = np.broadcast_to(x, self.shape)
        if self.fold:
            padded = np.full(self.matrix, np.nan if x.dtype.kind == 'f' else 0, x.dtype)
            padded.reshape(-1)[:x.size] = x.reshape(-1)
            return padded
        return x[:self.first].transpose(self.order).reshape(self.matrix)

    def cover(self, mask: np.ndarray | None) -> np.ndarray | None:
        """Return uint8 cells: SHOWN, PADDING, or MISSING beyond the end of a folded vector; None if all are shown."""
        is_filled = self.fold and math.prod(self.shape) < math.prod(self.matrix)
        if mask is None and not is_filled:
            return None
        shown = self.of(np.full(self.shape, SHOWN + 1, np.uint8) if mask is None else np.where(mask, SHOWN + 1, PADDING + 1)
                        .astype(np.uint8))
        return np.where(shown == 0, MISSING, shown.astype(np.int16) - 1).astype(np.uint8)


def view_of(shape: Iterable[int], layer_type: str = 'linear', name: str = '', axis: int = -1, batch: int | None = 1,
            sentences: int = 4) -> View:
    """Return the View of a tensor of this shape.

    A vector is folded into rows of a multiple of 32, the block size of the MX formats.  (time, batch, features) has a row
    per token, sentence by sentence.  Attention's (time, batch, heads, C) has the heads side by side.  Attention weights
    (batch, heads, Tq, Tk) have a row of maps per sentence, for the first `sentences`.  Any other shape: the leading axes
    are flattened to rows.
    batch: the batch axis of a tensor with three axes, None if unknown
    """
    shape = tuple(shape)
    n = len(shape)
    if n <= 1:
        count = shape[0] if shape else 1
        fold = count if count <= 32 else 32 * max(1, round((2 * count) ** 0.5 / 32))
        rows = -(-count // fold) if count else 0
        label = 'element' if rows <= 1 else f'element, {fold} in a row'
        return View(shape, tuple(range(n)), (rows, fold), '', label, fold=max(fold, 1))
    if n == 2:
        if layer_type == 'linear' and name == 'weight':             # axis is the contracted axis: the inputs
            return View(shape, (0, 1), shape, *(('input', 'output') if axis in (0, -2) else ('output', 'input')))
        return View(shape, (0, 1), shape, 'row', 'column' if name.endswith('weight') else 'feature')
    if n == 3:
        rows, C = shape[0] * shape[1], shape[2]
        if batch is None:
            return View(shape, (0, 1, 2), (rows, C), 'first two axes, flattened', 'feature')
        T = shape[1 - batch]
        return View(shape, (batch, 1 - batch, 2), (rows, C), 'token, sentence by sentence', 'feature', tuple(range(T, rows, T)))
    if n == 4 and layer_type == 'attention' and name == 'weights':
        B, H, Tq, Tk = shape
        label = 'query, sentence by sentence' if B <= sentences else f'query, the first {sentences} of {B} sentences'
        B = min(B, sentences)
        return View(shape, (0, 2, 1, 3), (B * Tq, H * Tk), label, 'key, head by head', tuple(range(Tq, B * Tq, Tq)),
                    tuple(range(Tk, H * Tk, Tk)), first=B)
    if n == 4 and layer_type == 'attention':
        T, B, H, C = shape
        return View(shape, (1, 0, 2, 3), (T * B, H * C), 'token, sentence by sentence', 'channel, head by head',
                    tuple(range(T, T * B, T)), tuple(range(C, H * C, C)))
    return View(shape, tuple(range(n)), (math.prod(shape[:-1]), shape[-1]), 'leading axes', 'last axis')


def shrink(matrix: np.ndarray, rows: int = ROWS, columns: int = COLUMNS) -> np.ndarray:
    """Reduce a matrix to at most (rows, columns) cells, each the element of largest magnitude of its part, with its sign.

    A part with NaN becomes NaN.
    """
    if matrix.shape[0] <= rows and matrix.shape[1] <= columns:
        return np.array(matrix)
    high, low = reduced(np.maximum, matrix, rows, columns), reduced(np.minimum, matrix, rows, columns)
    return np.where(high >= -low, high, low)                # both are NaN if the part has NaN


def reduced(operation: np.ufunc, matrix: np.ndarray, rows: int = ROWS, columns: int = COLUMNS) -> np.ndarray:
    """Reduce a matrix to at most (rows, columns) cells, each a ufunc reduction of its part."""
    for axis, most in ((1, columns), (0, rows)):
        if matrix.shape[axis] > most:
            starts = np.linspace(0, matrix.shape[axis], most, endpoint=False).astype(int)
            matrix = operation.reduceat(matrix, starts, axis)
    return np.array(matrix)


def limits(matrix: np.ndarray, rms: float | None = None) -> tuple[float, float, float, bool]:
    """Return (low, high, share beyond them, whether signed) for the colour scale of a map.

    The scale is symmetric if there are negative values, else it starts at 0.  Its end is the largest |x|, or the 99.8 %
    quantile if the largest is more than twice that, so that a single outlier does not wash out the rest.
    rms: of the values that the cells of the map are the largest of; then the end is at most 4 times this
    """
    finite = matrix[np.isfinite(matrix)]
    finite = sample(finite.reshape(-1))
    if not len(finite):
        return 0.0, 0.0, 0.0, False
    magnitude = np.abs(finite)
    robust, largest = float(np.quantile(magnitude, 0.998)), float(magnitude.max())
    high = robust if 0 < 2 * robust < largest else largest
    if rms and rms > 0:
        high = min(largest, _RMS * rms)
    signed = bool((finite < 0).any())
    return -high if signed else 0.0, high, float((magnitude > high).mean()), signed


def patch_of(matrix: np.ndarray, rows: int = 24, columns: int = 32) -> tuple[slice, slice]:
    """Return (slice of rows, slice of columns) of a window of at most (rows, columns) around the largest finite magnitude.

    The window starts at a multiple of 32 columns, the block size of the MX formats.
    """
    finite = np.where(np.isfinite(matrix), np.abs(matrix), -1)
    if not finite.size:
        return slice(0, 0), slice(0, 0)
    row, column = np.unravel_index(int(finite.argmax()), finite.shape)
    top = min(max(row - rows // 2, 0), max(matrix.shape[0] - rows, 0))
    left = min(column // 32 * 32 if columns >= 32 else max(column - columns // 2, 0), max(matrix.shape[1] - columns, 0))
    return slice(int(top), int(top) + rows), slice(int(left), int(left) + columns)


def relative_errors(x: np.ndarray, q: np.ndarray, bins: int = 48, lowest: int = -24) -> tuple[np.ndarray, np.ndarray]:
    """Return edges (bins + 1,) and, per bin, the share of the nonzero values by log2 |(q - x) / x|.

    Errors of 0 and below 2^lowest are in no bin.
    """
    usable = np.isfinite(x) & np.isfinite(q) & (x != 0)
    x, q = x[usable].astype(np.float64), q[usable].astype(np.float64)
    edges = np.linspace(lowest, 2, bins + 1)
    if not len(x):
        return edges, np.zeros(bins)
    relative = np.abs((q - x) / x)
    relative = relative[relative > 0]
    counts, _ = np.histogram(np.log2(relative), edges)
    return edges, counts / len(x)
