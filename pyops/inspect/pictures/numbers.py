"""The numbers behind the pictures: counts, quantiles, views of any tensor as a matrix.  Nothing here draws.

Counts and statistics are over all values that are not padding.  What sorts (quantiles, boxes) reads a sample of at most
SAMPLE values that is the same in every run.
"""
import dataclasses
import math
import statistics as standard

import numpy as np

SAMPLE = 65_536
ROWS, COLUMNS = 250, 280            # cells of a map: the pixels that it has
BROKEN_BIN = 255            # the biased exponent of NaN and the infinities
_BIAS = 127


def valid(x, mask=None):
    """All values of x that are not padding, 1-D.  mask: bool that broadcasts to x, True = not padding, or None."""
    if mask is None:
        return x.reshape(-1)
    return x[np.broadcast_to(mask, x.shape)]


def sample(values, most=SAMPLE, seed=0):
    """At most `most` of 1-D values: one from each of as many equal stretches, chosen by `seed`."""
    if len(values) <= most:
        return values
    places = (np.arange(most) + np.random.default_rng(seed).random(most)) * (len(values) / most)
    return values[places.astype(np.int64)]


# ---- distributions -----------------------------------------------------------------------------------------------------

def binades(values):
    """int64 (2, 256): how many of the values that are not 0 have floor(log2 |x|) = e - 127, by sign and e, which is the biased
    exponent of float32 (0: its subnormals; 255: NaN and infinities).  Exact, and counts of tensors add up."""
    counts = np.zeros(512, np.int64)
    for start in range(0, len(values), 1 << 20):
        part = values[start:start + (1 << 20)]
        bits = np.ascontiguousarray(part[part != 0], np.float32).view(np.uint32)
        counts += np.bincount(bits >> 23, minlength=512)
    return counts.reshape(2, 256)


def span_of(counts):
    """Of binades: the first and the last floor(log2 |x|); None where no finite value is but 0."""
    found = np.flatnonzero(counts.sum(0)[:BROKEN_BIN])
    return None if not len(found) else (int(found[0]) - _BIAS, int(found[-1]) - _BIAS)


def histogram(values, most=100):
    """-> edges, counts of finite values in equal bins over their whole range, all of them; None where there are none.  Few
    values have few bins; a constant has one."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    low, high = float(finite.min()), float(finite.max())
    bins = min(most, max(1, math.ceil(2 * len(finite) ** 0.5)))
    if low == high or not high - low > 1e-6 * max(abs(low), abs(high)):
        bins, margin = 1, max(abs(low), 1e-30) * 0.01
        low, high = low - margin, high + margin
    counts, edges = np.zeros(bins, np.int64), None
    for start in range(0, len(finite), 1 << 20):            # in float64, where no difference overflows
        part, edges = np.histogram(finite[start:start + (1 << 20)].astype(np.float64), bins, (low, high))
        counts += part
    return edges, counts


def normal_quantiles(values, points=257):
    """-> theoretical, observed: quantiles of a normal distribution with the values' mean and standard deviation, and theirs.
    Few values are shown one by one.  None where fewer than 3 are finite, or all are the same."""
    ordered = np.sort(values[np.isfinite(values)].astype(np.float64))
    n = len(ordered)
    if n < 3 or ordered[0] == ordered[-1]:
        return None
    if n > points:      # evenly over the normal's axis: the tails are what a Q-Q plot is looked at for
        normal = standard.NormalDist()
        edge = normal.inv_cdf(1 - 0.5 / n)
        z = np.linspace(-edge, edge, points)
        places = np.clip(np.array([normal.cdf(v) for v in z]) * n - 0.5, 0, n - 1)
        observed = np.interp(places, np.arange(n), ordered)
    else:
        normal = standard.NormalDist()
        z = np.array([normal.inv_cdf((i + 0.5) / n) for i in range(n)])
        observed = ordered
    return ordered.mean() + ordered.std() * z, observed


@dataclasses.dataclass(frozen=True)
class Box:
    """Of one group: quartiles, whiskers at the last value within 1.5 interquartile ranges, and up to 60 values beyond."""
    label: str
    low: float
    q1: float
    median: float
    q3: float
    high: float
    beyond: np.ndarray


def boxes(x, mask=None, heads_axis=None, most=12):
    """Boxes of all values and of up to `most` groups of them: the heads, where x has an axis of them, else equal stretches of
    the last axis.  [] where nothing is finite."""
    groups = [('all', valid(x, mask))]
    axis = x.ndim - 1 if heads_axis is None else heads_axis
    if x.ndim >= 2 and x.shape[axis] >= 2:
        count = x.shape[axis]
        edges = np.linspace(0, count, min(count, most) + 1).astype(int)
        for low, high in zip(edges[:-1], edges[1:], strict=True):
            part = np.take(x, range(low, high), axis)
            cut = mask if mask is None or mask.shape[axis] == 1 else np.take(mask, range(low, high), axis)
            groups.append((f'{low}' if high - low == 1 else f'{low}\N{EN DASH}{high - 1}', valid(part, cut)))
    found = []
    for label, values in groups:
        finite = sample(values[np.isfinite(values)]).astype(np.float64)
        if len(finite):
            q1, median, q3 = np.quantile(finite, (0.25, 0.5, 0.75)).tolist()
            reach = 1.5 * (q3 - q1)
            inside = finite[(finite >= q1 - reach) & (finite <= q3 + reach)]
            beyond = finite[(finite < q1 - reach) | (finite > q3 + reach)]
            if len(beyond) > 60:                            # the outermost, and others evenly between
                beyond = np.sort(beyond)[np.linspace(0, len(beyond) - 1, 60).astype(int)]
            found.append(Box(label, float(inside.min(initial=q1)), q1, median, q3, float(inside.max(initial=q3)), beyond))
    return found


# ---- a tensor as a matrix ----------------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class View:
    """How any tensor is laid out as a matrix: `of(x)` does it, for x, its error and its padding alike.

    rows, columns: what the axes are; row_lines, column_lines: where parts (sentences, heads) begin.
    """
    shape: tuple
    order: tuple
    matrix: tuple
    rows: str
    columns: str
    row_lines: tuple = ()
    column_lines: tuple = ()
    fold: int = 0               # elements a row of a tensor of one axis
    first: int | None = None    # so many of the first axis alone are shown

    def of(self, x):
        """The matrix (a view of x where that can be); a fold's last row is filled up with NaN, or False."""
        x = np.broadcast_to(x, self.shape)
        if self.fold:
            padded = np.full(self.matrix, False if x.dtype == bool else np.nan, x.dtype)
            padded.reshape(-1)[:x.size] = x.reshape(-1)
            return padded
        return x[:self.first].transpose(self.order).reshape(self.matrix)


def view_of(shape, layer_type='linear', name='', axis=-1, batch=1, sentences=4):
    """-> View of a tensor of this shape.

    One axis is folded to rows of 32, the block of the MX formats, or more; (tokens, features) stays; of (time, batch, features)
    the rows are the tokens sentence by sentence; attention's (time, batch, heads, C) has its heads side by side; attention
    weights (batch, heads, Tq, Tk) are a sheet of maps, a row a sentence, of the first `sentences`.  Any other shape: leading
    axes down, the last across.  batch: which of three axes counts sentences, None where that is not known.
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
        if layer_type == 'linear' and name == 'weight':             # what is contracted are its inputs
            return View(shape, (0, 1), shape, *(('input', 'output') if axis in (0, -2) else ('output', 'input')))
        return View(shape, (0, 1), shape, 'row', 'column' if name.endswith('weight') else 'feature')
    if n == 3:
        rows, C = shape[0] * shape[1], shape[2]
        if batch is None:
            return View(shape, (0, 1, 2), (rows, C), 'row, the first two axes as one', 'feature')
        T = shape[1 - batch]
        return View(shape, (batch, 1 - batch, 2), (rows, C), 'token, sentence by sentence', 'feature', tuple(range(T, rows, T)))
    if n == 4 and layer_type == 'attention' and name == 'weights':
        B, H, Tq, Tk = shape
        rows = 'query, sentence by sentence' if B <= sentences else f'query, the first {sentences} of {B} sentences'
        B = min(B, sentences)
        return View(shape, (0, 2, 1, 3), (B * Tq, H * Tk), rows, 'key, head by head', tuple(range(Tq, B * Tq, Tq)),
                    tuple(range(Tk, H * Tk, Tk)), first=B)
    if n == 4 and layer_type == 'attention':
        T, B, H, C = shape
        return View(shape, (1, 0, 2, 3), (T * B, H * C), 'token, sentence by sentence', 'channel, head by head',
                    tuple(range(T, T * B, T)), tuple(range(C, H * C, C)))
    return View(shape, tuple(range(n)), (math.prod(shape[:-1]), shape[-1]), 'leading axes', 'last axis')


def shrink(matrix, rows=ROWS, columns=COLUMNS):
    """At most (rows, columns) cells, each the element of largest magnitude of its part, with its sign: no outlier gets lost.
    NaN wins over all."""
    if matrix.shape[0] <= rows and matrix.shape[1] <= columns:
        return np.array(matrix)
    high, low = reduced(np.maximum, matrix, rows, columns), reduced(np.minimum, matrix, rows, columns)
    return np.where(high >= -low, high, low)                # with NaN both are NaN


def reduced(operation, matrix, rows=ROWS, columns=COLUMNS):
    """At most (rows, columns) cells, each what a ufunc makes of its part."""
    for axis, most in ((1, columns), (0, rows)):
        if matrix.shape[axis] > most:
            starts = np.linspace(0, matrix.shape[axis], most, endpoint=False).astype(int)
            matrix = operation.reduceat(matrix, starts, axis)
    return np.array(matrix)


def limits(matrix):
    """-> (low, high, share beyond, signed): what the colours of a map span.  Symmetric about 0 where there are both signs, else
    from 0; the 99.8 % quantile of |x| where the largest is more than twice that, so that one outlier does not turn the rest
    white."""
    finite = matrix[np.isfinite(matrix)]
    finite = sample(finite.reshape(-1))
    if not len(finite):
        return 0.0, 0.0, 0.0, False
    magnitude = np.abs(finite)
    robust, largest = float(np.quantile(magnitude, 0.998)), float(magnitude.max())
    high = robust if 0 < 2 * robust < largest else largest
    signed = bool((finite < 0).any())
    return -high if signed else 0.0, high, float((magnitude > high).mean()), signed


def patch_of(matrix, rows=24, columns=32):
    """Where a window of at most (rows, columns) lies that has the largest finite magnitude in it, cut along multiples of 32
    columns -> slices of rows and of columns."""
    finite = np.where(np.isfinite(matrix), np.abs(matrix), -1)
    if not finite.size:
        return slice(0, 0), slice(0, 0)
    row, column = np.unravel_index(int(finite.argmax()), finite.shape)
    top = min(max(row - rows // 2, 0), max(matrix.shape[0] - rows, 0))
    left = min(column // 32 * 32 if columns >= 32 else max(column - columns // 2, 0), max(matrix.shape[1] - columns, 0))
    return slice(int(top), int(top) + rows), slice(int(left), int(left) + columns)


def relative_errors(x, q, bins=48, lowest=-24):
    """-> edges (bins + 1,), share (bins,) of the values x != 0 whose log2 |(q - x) / x| lies in each bin, with those below
    `lowest` (and exact ones) counted in none."""
    usable = np.isfinite(x) & np.isfinite(q) & (x != 0)
    x, q = x[usable].astype(np.float64), q[usable].astype(np.float64)
    edges = np.linspace(lowest, 2, bins + 1)
    if not len(x):
        return edges, np.zeros(bins)
    relative = np.abs((q - x) / x)
    relative = relative[relative > 0]
    counts, _ = np.histogram(np.log2(relative), edges)
    return edges, counts / len(x)
