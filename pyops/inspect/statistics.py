"""Statistics of a tensor and of its quantization error.  docs/inspect.md has the formulas.

All sums are float64, over finite values, without padding.  The memory in use is the tensor, its rounded copy and the sums of
its blocks; pieces.py reads and measures large tensors piece by piece.
"""
from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from pyops import backend, formats
from pyops.backend.kernels import Kernel, declare

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyops.formats import Format

BLOCK = 32                          # block size in statistics of formats without blocks

_TILE = 1 << 16                     # values; 0.5 MiB of float64 fit in the L2 cache
_KEPT = 1 << 22                     # values of Roundings
_MOMENTS = 'amax', 'mean', 'mean_abs', 'rms', 'std', 'min', 'max'


def describe(x: Any, mask: np.ndarray | None = None, copy: np.ndarray | None = None) -> dict[str, Any]:
    """Return a dict with count, nan, inf, zeros and, of the finite values, amax, mean, mean_abs, rms, std, min, max.

    x: float32 of any shape;  mask: bool that broadcasts to x, False at padding.  Without finite values, amax to max are None.
    copy: a contiguous float32 array of x's size, which receives all of x in the same pass
    """
    values = np.ascontiguousarray(x, np.float32)
    counts, sums, extremes = np.empty(4, np.int64), np.empty(3), np.empty(2, np.float32)
    valid, rows = None, 1
    if mask is not None:
        mask = mask.reshape((1,) * (np.ndim(x) - mask.ndim) + mask.shape)
        along = max((axis + 1 for axis, n in enumerate(mask.shape) if n != 1), default=0)      # the other axes have one value
        valid = np.broadcast_to(mask.reshape(mask.shape[:along]), np.shape(x)[:along]).astype(np.uint8).reshape(-1)
        rows = valid.size
    backend.launch('describe', counts, sums, extremes, copy, values.reshape(-1), valid, rows, values.size // max(rows, 1))
    count, nan, inf, zeros = counts.tolist()
    result = {'count': count, 'nan': nan, 'inf': inf, 'zeros': zeros}
    finite = count - nan - inf
    if not finite:
        return result | dict.fromkeys(_MOMENTS)
    (total, total_abs, squares), (low, high) = sums.tolist(), extremes.tolist()
    mean = total / finite
    return result | {'amax': max(abs(low), abs(high)), 'mean': mean, 'mean_abs': total_abs / finite,
                     'rms': math.sqrt(squares / finite), 'std': math.sqrt(max(squares / finite - mean * mean, 0.0)),
                     'min': low, 'max': high}


def rounded(x: Any, fmt: str | Format, axis: int | str = -1) -> np.ndarray:
    """Return x rounded to fmt, as float32.  Like fake_quantize, but axis may be 'tokens': the flattened leading axes."""
    flat, axis = flattened(x, axis)
    return formats.fake_quantize(flat, fmt, axis).reshape(np.shape(x))


def transformed(x: Any, fmt: str | Format, axis: int | str = -1) -> np.ndarray:
    """Return the numbers that fmt rounds, in x's shape: x, or with the option `hadamard` its transform along the axis."""
    f = formats.parse(fmt)
    if not f.hadamard:
        return np.asarray(x)
    flat, axis = flattened(x, axis)
    return np.asarray(formats.hadamard(flat, f.hadamard, axis, signs=f.option('signs'))).reshape(np.shape(x))


def quantization(x: Any, fmt: str | Format, axis: int | str = -1, mask: np.ndarray | None = None) -> dict[str, float]:
    """Return a dict of error measures of x rounded to a number format.

    x: float32 of any shape;  fmt: a Format or its text, such as 'mxfp8:scale=rceil'
    axis: the axis that is divided into blocks, or 'tokens' for the flattened leading axes
    mask: bool that broadcasts to x, False at padding, which belongs to blocks but to no sum

    Keys: sqnr_db, mse, rmse, max_abs_error, relative_mse, cosine, psnr_db, mean_relative_error, underflow_pct,
    subnormal_pct, saturation_pct, amax, rms, crest, sum_x2 and sum_e2 (to aggregate tensors), and the counts overflow,
    poisoned, nan and inf.  Without error, sqnr_db and psnr_db are inf; with overflow they are -inf, the other errors inf, and
    cosine is nan; a mean of no values is nan.  FormatError for an unknown format.
    """
    return Roundings(x, mask).quantization(fmt, axis)


def block_quantization(x: Any, fmt: str | Format, axis: int | str = -1,
                       mask: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Return the error measures of each block; arguments as for `quantization`.

    Keys: sqnr_db, cosine, max_abs_error, underflow_pct, saturation_pct.  Each array is float64 and has x's shape (for
    'tokens', tokens by features) with `axis` reduced to the number of blocks.  Formats without blocks use blocks of 32.
    sqnr_db is inf for a block without error, -inf for one with overflow; a block without finite values, or of padding only,
    has nan.
    """
    return measure(x, fmt, axis, mask)[1]


def block_sqnr(x: Any, fmt: str | Format, axis: int | str = -1, mask: np.ndarray | None = None) -> np.ndarray:
    """Return the sqnr_db of each block; see block_quantization."""
    return measure(x, fmt, axis, mask)[1]['sqnr_db']


def measure(x: Any, fmt: str | Format, axis: int | str = -1,
            mask: np.ndarray | None = None) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Return the results of `quantization` and `block_quantization`, both computed in one pass."""
    total, parts = totals(x, fmt, axis, mask)
    return measures(total), parts


def joined(all_totals: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the `totals` of a tensor from its pieces' totals."""
    result: dict[str, float] = {}
    for total in all_totals:
        for name, value in total.items():
            known = result.get(name, 0)
            result[name] = max(known, value) if name in _LARGEST else known + value
    return result


def measures(total: dict[str, float]) -> dict[str, float]:
    """Return the result of `quantization` from `totals`."""
    pairs, overflow = total['pairs'], int(total['overflow'])
    mse = _ratio(total['e2'], pairs, math.nan)
    amax, rms = total['amax'], math.sqrt(_ratio(total['x2'], pairs, math.nan))
    both = math.sqrt(total['x2']) * math.sqrt(total['q2'])
    whole = {
        'sqnr_db': decibels(total['x2'], total['e2']), 'mse': mse, 'rmse': math.sqrt(mse),
        'max_abs_error': total['error'], 'relative_mse': _ratio(total['e2'], total['x2'], 0.0),
        'cosine': _ratio(total['xq'], both, float(total['x2'] == total['q2'])), 'psnr_db': decibels(amax * amax, mse),
        'mean_relative_error': _ratio(total['relative'], total['nonzero_pairs'], 0.0),
        'underflow_pct': 100 * _ratio(total['underflow'], total['nonzero'], 0.0),
        'subnormal_pct': 100 * _ratio(total['subnormal'], total['nonzero'], 0.0),
        'saturation_pct': 100 * _ratio(total['saturated'], total['finite'], 0.0),
        'overflow': overflow, 'poisoned': total['poisoned'], 'nan': total['nan'], 'inf': total['inf'],
        'sum_x2': total['x2'], 'sum_e2': total['e2'], 'amax': amax, 'rms': rms, 'crest': _ratio(amax, rms, math.nan)}
    if not pairs:
        whole |= dict.fromkeys(('sqnr_db', 'max_abs_error', 'relative_mse', 'cosine', 'psnr_db', 'mean_relative_error',
                                'amax'), math.nan)
    if overflow:
        whole |= {'cosine': math.nan, 'mean_relative_error': math.inf}
    return whole


def totals(x: Any, fmt: str | Format, axis: int | str = -1, mask: np.ndarray | None = None,
           amax: np.float32 | None = None) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Return the sums and the largest values over all blocks, for `joined` and `measures`, and the result of
    `block_quantization`.   amax: of the tensor of which x is a piece, as `amax_of` returns it"""
    blocks = Blocks(x, formats.parse(fmt), axis, mask, amax)
    total, sums = _totals_of(blocks)
    x2, q2, e2 = (sums[name] for name in ('x2', 'q2', 'e2'))
    with np.errstate(divide='ignore', invalid='ignore'):
        parts = {'sqnr_db': np.where(e2 > 0, 10 * (np.log10(x2) - np.log10(e2)), np.inf),
                 'cosine': np.where(sums['overflow'] > 0, np.nan,
                                    np.where(q2 > 0, sums['xq'] / (np.sqrt(x2) * np.sqrt(q2)), x2 == 0)),
                 'max_abs_error': sums['error'],
                 'underflow_pct': 100 * sums['underflow'] / np.maximum(sums['nonzero'], 1),
                 'saturation_pct': 100 * sums['saturated'] / np.maximum(sums['finite'], 1)}
    return total, {name: np.where(sums['pairs'] > 0, values, np.nan).reshape(blocks.shape) for name, values in parts.items()}


def _totals_of(blocks: Blocks) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Return the sums and the largest values over all blocks, and of each block."""
    sums, counts, relative = blocks.error_sums()
    total = {name: float(values.max(initial=0) if name in _LARGEST else values.sum()) for name, values in sums.items()}
    return total | counts | {'relative': relative}, sums


def decibels(signal: float, error: float) -> float:
    """Return 10 log10(signal / error) of two energies: inf for an error of 0, -inf for an infinite one."""
    if not error:
        return math.inf
    if math.isinf(error):
        return -math.inf
    return 10 * (math.log10(signal) - math.log10(error)) if signal else -math.inf


def exponents(x: Any, mask: np.ndarray | None = None) -> dict[int, int]:
    """Return the number of values per binade, {floor(log2 |x|): count}, of finite nonzero values without padding."""
    flat = np.asarray(x).reshape(-1)
    valid = None if mask is None else np.broadcast_to(mask, np.shape(x)).reshape(-1)
    lowest, counts = -1100, np.zeros(2200, np.int64)            # the exponents of float64
    for start in range(0, flat.size, _TILE):
        tile = flat[start:start + _TILE]
        if valid is not None:
            tile = tile[valid[start:start + _TILE]]
        tile = tile[np.isfinite(tile) & (tile != 0)]
        counts += np.bincount(np.frexp(tile)[1] - 1 - lowest, minlength=len(counts))      # frexp is exact, log2 is not
    return {int(index) + lowest: int(counts[index]) for index in np.flatnonzero(counts)}


def scale_codes(x: Any, fmt: str | Format, axis: int | str = -1, mask: np.ndarray | None = None) -> dict[int, int]:
    """Return the number of blocks per scale, {E8M0 code: count}; {} for a format without blocks.

    The scale of a code is 2^(code - 127); code 255 is NaN.  Blocks of padding only are not counted.
    """
    f = formats.parse(fmt)
    if not f.is_block:
        return {}
    blocks = Blocks(x, f, axis, mask)
    codes = blocks.codes
    if blocks.valid is not None and codes.size:
        codes = codes[np.logical_or.reduceat(blocks.valid, np.arange(0, blocks.n, blocks.block), axis=1)]
    return {int(code): int(count) for code, count in zip(*np.unique(codes, return_counts=True), strict=True)}


def digits(x: Any, fmt: str | Format, mask: np.ndarray | None = None, amax: np.float32 | None = None) -> dict[int, int]:
    """Return the number of values per HiFloat8 mantissa width, {bits: count}, where bits is 3, 2, 1 or 0.

    Values that round to 0 or to infinity are not counted.  {} for other formats.   amax: as for `totals`
    """
    if formats.parse(fmt).name != 'hifp8':
        return {}
    result = dict.fromkeys((3, 2, 1, 0), 0)
    x = np.asarray(x)
    given = x if amax is None else _extended(x, formats.parse(fmt), -1, amax)
    q = rounded(given, fmt)[tuple(map(slice, x.shape))]
    for exponent, count in exponents(q, mask).items():
        result[3 if abs(exponent) < 4 else 2 if abs(exponent) < 8 else 1 if abs(exponent) < 16 else 0] += count
    return result


def row_sum_error(x: Any, fmt: str | Format, axis: int | str = -1, mask: np.ndarray | None = None) -> float:
    """Return the largest |sum - 1| of the rounded rows of attention weights; nan if all rows are padding."""
    valid = np.ones(np.shape(x), bool) if mask is None else np.broadcast_to(mask, np.shape(x))
    sums = np.where(valid, rounded(x, fmt, axis), 0).sum(-1, dtype=np.float64)
    errors = np.abs(sums - 1)[valid.any(-1) & (np.asarray(x) != 0).any(-1)]     # a fully masked row is all 0
    return float(errors.max()) if errors.size else math.nan


def attention_entropy(x: Any, mask: np.ndarray | None = None) -> np.ndarray:
    """Return how evenly each head of attention weights spreads over the keys, float64 (heads,): 0 for one key, 1 for all alike.

    x: (B, heads, Tq, Tk), or (B, Tq, Tk) for one head;  mask: as for describe.  It is the mean over the rows of
    -sum p ln p / ln n, with the n keys of a row that are no padding.  Rows of padding, with one key, and with negative numbers,
    NaN or infinities do not count; a head without other rows has nan.
    """
    p = np.asarray(x, np.float64)
    valid = np.ones(p.shape, bool) if mask is None else np.broadcast_to(mask, p.shape)
    if p.ndim == 3:
        p, valid = p[:, None], valid[:, None]
    keys = valid.sum(-1)
    counted = (keys > 1) & ((p >= 0) & np.isfinite(p) | ~valid).all(-1)
    p = np.where(valid & counted[..., None] & (p > 0), p, 1)               # 1 ln 1 = 0
    entropy = -(p * np.log(p)).sum(-1) / np.log(np.where(counted, keys, 2))
    rows = counted.sum((0, 2))
    return np.where(rows > 0, np.where(counted, entropy, 0).sum((0, 2)) / np.maximum(rows, 1), math.nan)


def block_scales(x: Any, fmt: str | Format, axis: int | str = -1) -> np.ndarray:
    """Return log2 of each block's scale as float64, in the shape of block_sqnr; nan for a block with NaN or infinity.

    ValueError for a format without blocks.
    """
    f = formats.parse(fmt)
    if not f.is_block:
        raise ValueError(f'{f}: has no scales that are powers of two; expected mxfp8, mxfp6, mxfp4 or mxint8 with blocks along '
                         'one axis')
    view = Blocks(x, f, axis, None)
    return view.exponents().reshape(view.shape)


def flattened(x: Any, axis: Any) -> tuple[np.ndarray, int]:
    """Return x and the axis as a number.  For 'tokens', x is reshaped to tokens by features."""
    x = np.asarray(x)
    return (x.reshape(-1, x.shape[-1] if x.ndim else 1), 0) if axis == 'tokens' else (x, axis)


def amax_of(x: np.ndarray) -> np.float32:
    """Return the largest magnitude of float32 numbers as the formats take it: above all numbers is infinity, above it NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32) & np.uint32(0x7fffffff)
    largest: np.float32 = bits.max(initial=0).view(np.float32)
    return largest


def _extended(x: np.ndarray, f: Format, axis: int, amax: np.float32) -> np.ndarray:
    """Return x at the start of an array that is longer along one axis, and has zeros and amax there: they are in no block of x
    with a number other than 0, so they change only a scale of the whole tensor."""
    block = f.option('block')
    is_square = f.is_scaled and isinstance(block, str) and 'x' in block
    lengths = {0: int(block.partition('x')[0])} if is_square else {axis % x.ndim: block if isinstance(block, int) else 1, 0: 1}
    if axis % x.ndim == 0 and not is_square:
        lengths = {0: block if isinstance(block, int) else 1}
    more = {along: 1 + -x.shape[along] % length for along, length in lengths.items()}
    along = min(more, key=lambda one: x.size // x.shape[one] * more[one])
    result = np.zeros([n + more[along] * (i == along) for i, n in enumerate(x.shape)], np.float32)
    result[tuple(map(slice, x.shape))] = x
    result.reshape(-1)[-1] = amax
    return result


def _ratio(a: float, b: float, default: float) -> float:
    return a / b if b else default


_SUMS = 'pairs', 'finite', 'overflow', 'nonzero', 'underflow', 'saturated', 'x2', 'q2', 'xq', 'e2', 'amax', 'error'


_LARGEST = 'amax', 'error'          # of _SUMS: maxima
_COUNTS = 'nan', 'inf', 'poisoned', 'subnormal', 'nonzero_pairs'


class Blocks:
    """A tensor as (outer, n, inner) with blocks along n.

    full: (outer, n, inner);  shape_of_sums: (outer, blocks, inner);  shape: the same with the axes of the tensor
    x: the values;  valid: bool, False at padding, or None;  both have the shape `full`
    If the format has a Hadamard transform, the values are the transformed ones: the transform is orthogonal, so the energies of
    signal and error are the same.  Padding is a part of a transform without any valid value.
    of: the largest magnitude of the tensor of which x is a piece, as `amax_of` returns it, if a scale depends on all of it
    """

    def __init__(self, x: Any, f: Format, along: int | str, mask: np.ndarray | None, of: np.float32 | None = None) -> None:
        flat, axis = flattened(x, along)
        flat = np.ascontiguousarray(flat, np.float32).reshape(flat.shape)           # ascontiguousarray changes () to (1,)
        axis = axis % max(flat.ndim, 1)
        self.block, self.f = f.block or BLOCK, f.without_hadamard if f.hadamard else f
        self.of_x, self.along = f, along
        self.n = flat.shape[axis] if flat.ndim else 1
        count = -(-self.n // self.block)
        self.full = math.prod(flat.shape[:axis]), self.n, math.prod(flat.shape[axis + 1:])
        self.shape_of_sums = self.full[0], count, self.full[2]
        self.shape = (*flat.shape[:axis], count, *flat.shape[axis + 1:]) if flat.ndim else ()
        self.valid = None if mask is None else np.broadcast_to(mask, np.shape(x)).reshape(self.full)
        if f.hadamard and flat.size:
            flat = transformed(flat, f, axis)
            if self.valid is not None:
                lengths = formats.hadamard_lengths(self.n, f.hadamard)
                starts = np.cumsum([0, *lengths[:-1]])
                self.valid = np.logical_or.reduceat(self.valid, starts, axis=1).repeat(lengths, axis=1)
        self.x, self.flat, self.axis, self._amax_of_all = flat.reshape(self.full), flat, axis, of

    @functools.cached_property
    def amax(self) -> np.ndarray:
        """The largest magnitude of each block."""
        if not self.n:
            return np.zeros(self.shape_of_sums, np.float32)
        largest: np.ndarray = np.maximum.reduceat(np.abs(self.x), np.arange(0, self.n, self.block), axis=1)
        return largest

    @functools.cached_property
    def codes(self) -> np.ndarray:
        """The E8M0 code of each block's scale.  Only the largest value is encoded, since it determines the scale."""
        if not self.n:
            return np.zeros(self.shape_of_sums, np.uint8)
        scales: Any = formats.encode(self.amax.reshape(-1), self.f, block=1).scales
        return np.asarray(scales).reshape(self.shape_of_sums)

    def exponents(self) -> np.ndarray:
        """Return log2 of each block's scale."""
        return np.where(self.codes == 255, np.nan, self.codes.astype(np.float64) - 127)

    @functools.cached_property
    def _given(self) -> np.ndarray:
        return self.flat if self._amax_of_all is None else _extended(self.flat, self.f, self.axis, self._amax_of_all)

    def _inside(self, given: Any) -> np.ndarray:
        """Return the part of numbers like `_given` that belongs to x."""
        return np.ascontiguousarray(np.asarray(given)[tuple(map(slice, self.flat.shape))], np.float32)

    @functools.cached_property
    def rounded(self) -> np.ndarray:
        """The values, rounded, in the shape of `flat`."""
        return self._inside(formats.fake_quantize(self._given, self.f, self.axis))

    @functools.cached_property
    def element_scales(self) -> np.ndarray:
        """The scale of each value, in the shape of `flat`, if the format is scaled."""
        return self._inside(formats.element_scales(self._given, self.f, self.axis))

    def rounded_values(self, x: np.ndarray) -> np.ndarray:
        """Return x rounded, in its shape, where x is the tensor; `rounded` may be a Hadamard transform."""
        return self.rounded.reshape(x.shape) if self.of_x is self.f else rounded(x, self.of_x, self.along)

    def error_sums(self) -> tuple[dict[str, np.ndarray], dict[str, int], float]:
        """Return the sums of each block, the counts and the sum of relative errors, as the kernel error_sums stores them."""
        scales, each, factor = None, None, 1.0
        if self.f.is_block:
            scales = np.exp2(self.exponents())
        elif self.f.has_factor:             # the amax alone determines it
            factor = 1 / float(np.asarray(formats.encode(amax_of(self._given), self.f).factor)[0])
        elif self.f.is_scaled:
            each = self.element_scales.reshape(-1)
        sums, counts, relative = np.empty((len(_SUMS), *self.shape_of_sums)), np.empty(len(_COUNTS), np.int64), np.empty(1)
        backend.launch('error_sums', sums, counts, relative, self.x.reshape(-1), self.rounded.reshape(-1), scales, each,
                       None if self.valid is None else np.ascontiguousarray(self.valid).view(np.uint8).reshape(-1), *self.full,
                       self.block, self.f.min_normal * factor, self.f.max * factor)
        return dict(zip(_SUMS, sums, strict=True)), dict(zip(_COUNTS, counts.tolist(), strict=True)), float(relative[0])


class Roundings:
    """A tensor and its Blocks in each format, rounded once for all that is measured and drawn of it.

    x: float32;  mask: as for `quantization`
    Those of several formats are kept as long as they have at most _KEPT values in all.
    """

    def __init__(self, x: np.ndarray, mask: np.ndarray | None = None) -> None:
        self.x, self.mask = x, mask
        self._blocks: dict[tuple[str, int | str], Blocks] = {}

    def blocks(self, fmt: str | Format, axis: int | str = -1) -> Blocks:
        """Return the Blocks of the tensor in a format."""
        f = formats.parse(fmt)
        key = str(f), axis
        found = self._blocks.get(key)
        if found is None:
            found = Blocks(self.x, f, axis, self.mask)
            if (len(self._blocks) + 1) * self.x.size <= _KEPT:
                self._blocks[key] = found
        return found

    def quantization(self, fmt: str | Format, axis: int | str = -1) -> dict[str, float]:
        """Return the result of the function `quantization` for the tensor."""
        return measures(_totals_of(self.blocks(fmt, axis))[0])


declare(describe=Kernel(), error_sums=Kernel())
