"""Statistics of a tensor, and of what a number format leaves of it.  docs/inspect.md has the formulas.

All sums are float64 and over finite numbers; padding is left out where a mask says what it is.  Work goes in tiles of half a
MiB, so that the memory needed is that of the tensor and of its rounded copy.
"""
import math
from typing import NamedTuple

import numpy as np

from pyops import formats

BLOCK = 32                          # numbers of a block in the pictures of formats that have none

_TILE = 1 << 16                     # numbers; 0.5 MiB of float64 stay in a cache
_MOMENTS = 'amax', 'mean', 'mean_abs', 'rms', 'std', 'min', 'max'


def describe(x, mask=None):
    """What a manifest says of a tensor: count, nan, inf, zeros, and of finite numbers amax, mean, mean_abs, rms, std, min, max.

    x: float32 of any shape.  mask: bool that broadcasts to it, False at padding.  None where no number is finite.
    """
    count = nan = inf = zeros = finite = 0
    total = total_abs = squares = 0.0
    least, most = math.inf, -math.inf
    flat = np.asarray(x).reshape(-1)
    keep = None if mask is None else np.broadcast_to(mask, np.shape(x)).reshape(-1)
    for start in range(0, flat.size, _TILE):
        tile = flat[start:start + _TILE].astype(np.float64)
        if keep is not None:
            tile = tile[keep[start:start + _TILE]]
        count += tile.size
        zeros += tile.size - int(np.count_nonzero(tile))
        with np.errstate(invalid='ignore'):             # Inf - Inf
            one = float(tile.sum())
        if not math.isfinite(one):
            bad, before = int(np.isnan(tile).sum()), tile.size
            tile = tile[np.isfinite(tile)]
            nan, inf, one = nan + bad, inf + before - tile.size - bad, float(tile.sum())
        if tile.size:
            finite += tile.size
            total += one
            total_abs += float(np.abs(tile).sum())
            squares += float(np.einsum('i,i', tile, tile))     # not np.dot: its threads spin beside a training step's
            least, most = min(least, float(tile.min())), max(most, float(tile.max()))
    result = {'count': count, 'nan': nan, 'inf': inf, 'zeros': zeros}
    if not finite:
        return result | dict.fromkeys(_MOMENTS)
    mean = total / finite
    return result | {'amax': max(-least, most), 'mean': mean, 'mean_abs': total_abs / finite,
                     'rms': math.sqrt(squares / finite), 'std': math.sqrt(max(squares / finite - mean * mean, 0.0)),
                     'min': least, 'max': most}


def rounded(x, fmt, axis=-1):
    """fake_quantize where axis may also be 'tokens': blocks along all leading axes, flattened.  -> float32 of x's shape."""
    flat, axis = _flattened(x, axis)
    return formats.fake_quantize(flat, fmt, axis).reshape(np.shape(x))


def quantization(x, fmt, axis=-1, mask=None):
    """What is left of x in a number format -> dict of floats, and of the whole numbers overflow, nan, inf.

    x: float32 of any shape.  fmt: a name, a text or a Format.  axis: along which blocks lie, or 'tokens' for all leading axes,
    flattened.  mask: bool that broadcasts to x, False at padding; padding takes part in blocks and in no sum.

    sqnr_db, mse, rmse, max_abs_error, relative_mse, cosine, psnr_db, mean_relative_error, underflow_pct, subnormal_pct,
    saturation_pct, overflow, nan, inf, amax, rms, crest, and sum_x2, sum_e2 to aggregate with.  A ratio to no error is inf;
    what has no value, such as the mean of nothing, is nan.  FormatError where there is no such format.
    """
    return measure(x, fmt, axis, mask)[0]


def block_quantization(x, fmt, axis=-1, mask=None):
    """What is left of each block of x; arguments as of `quantization`.

    -> sqnr_db, cosine, max_abs_error, underflow_pct, saturation_pct, each float64 of x's shape with `axis` cut to one place a
    block (for 'tokens', of x's tokens by features, so cut).  A format without blocks is cut into blocks of 32.  inf where
    there is no error, nan where a block has no finite number, or padding alone.
    """
    return measure(x, fmt, axis, mask)[1]


def block_sqnr(x, fmt, axis=-1, mask=None):
    """The sqnr_db of each block, as block_quantization has it."""
    return measure(x, fmt, axis, mask)[1]['sqnr_db']


def measure(x, fmt, axis=-1, mask=None):
    """-> what `quantization` gives, what `block_quantization` gives: both of one pass over the numbers"""
    f = formats.parse(fmt)
    blocks = _Blocks(x, f, axis, mask)
    sums = {name: np.zeros(blocks.shape_of_sums) for name in _SUMS}
    counts, relative = dict.fromkeys(('nan', 'inf', 'overflow', 'subnormal', 'nonzero_pairs'), 0), 0.0
    for tile in blocks.tiles():
        relative += _add(sums, counts, tile, f)
    total = {name: float(values.sum()) for name, values in sums.items()}
    pairs, mse = total['pairs'], _ratio(total['e2'], total['pairs'], math.nan)
    amax, rms = float(sums['amax'].max(initial=0)), math.sqrt(_ratio(total['x2'], pairs, math.nan))
    both = math.sqrt(total['x2']) * math.sqrt(total['q2'])
    whole = {
        'sqnr_db': decibels(total['x2'], total['e2']), 'mse': mse, 'rmse': math.sqrt(mse),
        'max_abs_error': float(sums['error'].max(initial=0)), 'relative_mse': _ratio(total['e2'], total['x2'], 0.0),
        'cosine': _ratio(total['xq'], both, float(total['x2'] == total['q2'])), 'psnr_db': decibels(amax * amax, mse),
        'mean_relative_error': _ratio(relative, counts['nonzero_pairs'], 0.0),
        'underflow_pct': 100 * _ratio(total['underflow'], total['nonzero'], 0.0),
        'subnormal_pct': 100 * _ratio(counts['subnormal'], total['nonzero'], 0.0),
        'saturation_pct': 100 * _ratio(total['saturated'], total['finite'], 0.0),
        'overflow': counts['overflow'], 'nan': counts['nan'], 'inf': counts['inf'],
        'sum_x2': total['x2'], 'sum_e2': total['e2'], 'amax': amax, 'rms': rms, 'crest': _ratio(amax, rms, math.nan)}
    if not pairs:
        whole |= dict.fromkeys(('sqnr_db', 'max_abs_error', 'relative_mse', 'cosine', 'psnr_db', 'mean_relative_error',
                                'amax'), math.nan)
    x2, q2, e2 = (sums[name] for name in ('x2', 'q2', 'e2'))
    with np.errstate(divide='ignore', invalid='ignore'):
        parts = {'sqnr_db': np.where(e2 > 0, 10 * (np.log10(x2) - np.log10(e2)), np.inf),
                 'cosine': np.where(q2 > 0, sums['xq'] / (np.sqrt(x2) * np.sqrt(q2)), x2 == 0), 'max_abs_error': sums['error'],
                 'underflow_pct': 100 * sums['underflow'] / np.maximum(sums['nonzero'], 1),
                 'saturation_pct': 100 * sums['saturated'] / np.maximum(sums['finite'], 1)}
    return whole, {name: np.where(sums['pairs'] > 0, values, np.nan).reshape(blocks.shape) for name, values in parts.items()}


def _add(sums, counts, tile, f):
    """Add the numbers of a tile to the sums of their blocks and to the counts.  -> sum |e / x|"""
    x, q, keep = tile.x, tile.q, tile.keep
    # No float32 is so large that a finite sum of them would not be finite in float64.
    with np.errstate(invalid='ignore'):
        is_whole = tile.is_full and math.isfinite(float(x.sum()) + float(q.sum()))
    size = np.abs(x)
    if is_whole:                                        # nothing to leave out, as of most
        nonzero, gone, over = size > 0, q == 0, size > f.max * tile.scale
        subnormal = size < f.min_normal * tile.scale
        pairs = finite = np.float64(x.shape[2])
    else:
        in_x = keep & np.isfinite(x)
        in_both = in_x & np.isfinite(q)
        counts['nan'] += _count(keep & np.isnan(x))
        counts['inf'] += _count(keep & np.isinf(x))
        counts['overflow'] += _count(in_x & ~in_both)
        nonzero, gone, over = in_x & (size > 0), q == 0, in_x & (size > f.max * tile.scale)
        subnormal = in_x & (size < f.min_normal * tile.scale)
        pairs, finite = in_both.sum(2), in_x.sum(2)
        x, q, size = (np.where(in_both, array, 0) for array in (x, q, size))
    error = np.abs(q - x)
    for name, a, b in ('x2', x, x), ('q2', q, q), ('xq', x, q), ('e2', error, error):
        sums[name][tile.blocks] = np.einsum('obki,obki->obi', a, b)
    sums['amax'][tile.blocks], sums['error'][tile.blocks] = size.max(2), error.max(2)
    sums['pairs'][tile.blocks], sums['finite'][tile.blocks] = pairs, finite
    for name, truths in ('nonzero', nonzero), ('underflow', nonzero & gone), ('saturated', over):
        if truths.any():
            sums[name][tile.blocks] = finite if truths.all() and is_whole else truths.sum(2)
    counts['subnormal'] += _count(nonzero & subnormal)
    counts['nonzero_pairs'] += _count(size)
    return float(np.divide(error, size, out=error, where=size > 0).sum())


def decibels(signal, error):
    """10 log10(signal / error) of two energies; inf where there is no error."""
    if not error:
        return math.inf
    return 10 * (math.log10(signal) - math.log10(error)) if signal else -math.inf


def exponents(x, mask=None):
    """How many numbers lie in each binade -> {floor(log2 |x|): count}, of those that are finite and not 0, and no padding."""
    flat = np.asarray(x).reshape(-1)
    keep = None if mask is None else np.broadcast_to(mask, np.shape(x)).reshape(-1)
    lowest, counts = -1100, np.zeros(2200, np.int64)            # float64 has room for any float
    for start in range(0, flat.size, _TILE):
        tile = flat[start:start + _TILE]
        if keep is not None:
            tile = tile[keep[start:start + _TILE]]
        tile = tile[np.isfinite(tile) & (tile != 0)]
        counts += np.bincount(np.frexp(tile)[1] - 1 - lowest, minlength=len(counts))      # exact, as log2 is not
    return {int(place) + lowest: int(counts[place]) for place in np.flatnonzero(counts)}


def scale_codes(x, fmt, axis=-1, mask=None):
    """How many blocks have each scale -> {code of E8M0: count}: a scale of 2^(code - 127), 255 for NaN; {} without blocks.
    Blocks of padding alone are not counted.
    """
    f = formats.parse(fmt)
    if not f.is_block:
        return {}
    blocks = _Blocks(x, f, axis, mask)
    codes = blocks.codes()
    if mask is not None and codes.size:
        codes = codes[np.logical_or.reduceat(blocks.keep, np.arange(0, blocks.n, blocks.block), axis=1)]
    return {int(code): int(count) for code, count in zip(*np.unique(codes, return_counts=True), strict=True)}


def digits(x, fmt, mask=None):
    """Of a HiFloat8, whose numbers have 3, 2, 1 or 0 digits behind the point: how many have each -> {digits: count} of what
    rounds to a finite number that is not 0.  {} for other formats.
    """
    if formats.parse(fmt).name != 'hifp8':
        return {}
    result = dict.fromkeys((3, 2, 1, 0), 0)
    for exponent, count in exponents(rounded(x, fmt), mask).items():
        result[3 if abs(exponent) < 4 else 2 if abs(exponent) < 8 else 1 if abs(exponent) < 16 else 0] += count
    return result


def row_sum_error(x, fmt, axis=-1, mask=None):
    """Of attention weights, whose rows add up to 1: the largest |sum of a rounded row - 1|; nan where all is padding."""
    keep = np.ones(np.shape(x), bool) if mask is None else np.broadcast_to(mask, np.shape(x))
    sums = np.where(keep, rounded(x, fmt, axis), 0).sum(-1, dtype=np.float64)
    errors = np.abs(sums - 1)[keep.any(-1) & (np.asarray(x) != 0).any(-1)]      # a row that sees nothing is all 0
    return float(errors.max()) if errors.size else math.nan


def block_scales(x, fmt, axis=-1):
    """log2 of the scale of each block, shaped as block_sqnr has it; float64, nan where the block holds NaN or an infinity.

    ValueError for a format without blocks.
    """
    f = formats.parse(fmt)
    if not f.is_block:
        raise ValueError(f'{f}: has no scales; want mxfp8 or mxfp4')
    view = _Blocks(x, f, axis, None)
    return view.exponents().reshape(view.shape)


def _flattened(x, axis):
    """-> x as tokens by features for an axis of 'tokens', and the axis as a number."""
    x = np.asarray(x)
    return (x.reshape(-1, x.shape[-1] if x.ndim else 1), 0) if axis == 'tokens' else (x, axis)


def _count(truths):
    return int(np.count_nonzero(truths))


def _ratio(a, b, otherwise):
    return a / b if b else otherwise


_SUMS = 'pairs', 'finite', 'nonzero', 'underflow', 'saturated', 'x2', 'q2', 'xq', 'e2', 'amax', 'error'


class _Tile(NamedTuple):
    """A piece of a tensor as (outer, blocks, numbers of a block, inner).  blocks: where its blocks are among all."""
    x: np.ndarray               # float64
    q: np.ndarray               # float64
    scale: np.ndarray | float   # 2^s of each block
    keep: np.ndarray            # bool, False at padding and where the last block has no numbers
    is_full: bool               # keep is True everywhere
    blocks: tuple


class _Blocks:
    """A tensor seen as (outer, n, inner) with blocks along n, rounded, in pieces of whole blocks.

    shape_of_sums: (outer, blocks, inner).  shape: the same with the tensor's own axes.
    """

    def __init__(self, x, f, axis, mask):
        flat, axis = _flattened(x, axis)
        flat = np.ascontiguousarray(flat, np.float32).reshape(flat.shape)           # which makes (1,) of ()
        axis = axis % max(flat.ndim, 1)
        self.block, self.f = f.block or BLOCK, f
        self.n = flat.shape[axis] if flat.ndim else 1
        count = -(-self.n // self.block)
        self.full = math.prod(flat.shape[:axis]), self.n, math.prod(flat.shape[axis + 1:])
        self.shape_of_sums = self.full[0], count, self.full[2]
        self.shape = (*flat.shape[:axis], count, *flat.shape[axis + 1:]) if flat.ndim else ()
        self.x = flat.reshape(self.full)
        self.keep = None if mask is None else np.broadcast_to(mask, np.shape(x)).reshape(self.full)

    def codes(self):
        """Of each block's scale, which depends on its largest number alone: so that is all that is encoded."""
        if not self.n:
            return np.zeros(self.shape_of_sums, np.uint8)
        largest = np.maximum.reduceat(np.abs(self.x), np.arange(0, self.n, self.block), axis=1)
        return formats.encode(largest, self.f, block=1).scales

    def exponents(self):
        """log2 of each block's scale."""
        codes = self.codes()
        return np.where(codes == 255, np.nan, codes.astype(np.float64) - 127)

    def tiles(self):
        outer, n, inner = self.full
        rounded = formats.fake_quantize(self.x, self.f, 1)
        scale = 1.0
        if self.f.is_block:
            scale = np.exp2(self.exponents())
        elif self.f.option('amax_target'):
            scale = 1 / float(formats.encode(self.x, self.f).factor[0])
        i_step = max(1, min(inner, _TILE // self.block))
        b_step = max(1, min(self.shape_of_sums[1], _TILE // (i_step * self.block)))
        o_step = max(1, _TILE // (i_step * b_step * self.block))
        for o in range(0, outer, o_step):
            for b in range(0, self.shape_of_sums[1], b_step):
                for i in range(0, inner, i_step):
                    blocks = slice(o, o + o_step), slice(b, b + b_step), slice(i, i + i_step)
                    place = blocks[0], slice(b * self.block, (b + b_step) * self.block), blocks[2]
                    x, is_full = self._padded(self.x[place], np.float64)
                    keep = np.ones(self.x[place].shape, bool) if self.keep is None else self.keep[place]
                    keep, _ = self._padded(keep, bool)
                    yield _Tile(x, self._padded(rounded[place], np.float64)[0],
                                scale[blocks][:, :, None] if isinstance(scale, np.ndarray) else scale,
                                keep, is_full and self.keep is None, blocks)

    def _padded(self, piece, dtype):
        """-> a piece as (outer, blocks, block, inner), the last block filled up with zeros; whether it was full."""
        outer, n, inner = piece.shape
        blocks = -(-n // self.block)
        is_full = blocks * self.block == n
        result = (np.empty if is_full else np.zeros)((outer, blocks * self.block, inner), dtype)
        result[:, :n] = piece
        return result.reshape(outer, blocks, self.block, inner), is_full
