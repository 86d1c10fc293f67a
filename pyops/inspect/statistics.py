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
            squares += float(_dot(tile, tile))
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
    f = formats.parse(fmt)
    nan = inf = finite = pairs = overflow = nonzero = nonzero_pairs = underflow = subnormal = saturated = 0
    sum_x2 = sum_q2 = sum_xq = sum_e2 = sum_relative = amax = max_error = 0.0
    for tile in _Blocks(x, f, axis, mask).tiles():
        x_, q, scale, keep = tile.x, tile.q, tile.scale, tile.keep
        size = np.abs(x_)
        in_x = keep & np.isfinite(x_)
        in_both = in_x & np.isfinite(q)
        is_nonzero = in_x & (size > 0)
        nan += _count(keep & np.isnan(x_))
        inf += _count(keep & np.isinf(x_))
        overflow += _count(in_x & ~in_both)
        finite += _count(in_x)
        pairs += _count(in_both)
        nonzero += _count(is_nonzero)
        underflow += _count(is_nonzero & (q == 0))
        subnormal += _count(is_nonzero & (size < f.min_normal * scale))
        saturated += _count(in_x & (size > f.max * scale))
        x_, q, size = x_[in_both], q[in_both], size[in_both]                # flat
        if x_.size:
            error, is_nonzero = np.abs(q - x_), size > 0
            nonzero_pairs += _count(is_nonzero)
            sum_x2 += float(_dot(x_, x_))
            sum_q2 += float(_dot(q, q))
            sum_xq += float(_dot(x_, q))
            sum_e2 += float(_dot(error, error))
            sum_relative += float(np.divide(error, size, out=np.zeros_like(error), where=is_nonzero).sum())
            amax, max_error = max(amax, float(size.max())), max(max_error, float(error.max()))
    mse, rms = _ratio(sum_e2, pairs, math.nan), math.sqrt(_ratio(sum_x2, pairs, math.nan))
    both = math.sqrt(sum_x2) * math.sqrt(sum_q2)
    result = {
        'sqnr_db': decibels(sum_x2, sum_e2), 'mse': mse, 'rmse': math.sqrt(mse), 'max_abs_error': max_error,
        'relative_mse': _ratio(sum_e2, sum_x2, 0.0), 'cosine': _ratio(sum_xq, both, float(sum_x2 == sum_q2)),
        'psnr_db': decibels(amax * amax, mse), 'mean_relative_error': _ratio(sum_relative, nonzero_pairs, 0.0),
        'underflow_pct': 100 * _ratio(underflow, nonzero, 0.0), 'subnormal_pct': 100 * _ratio(subnormal, nonzero, 0.0),
        'saturation_pct': 100 * _ratio(saturated, finite, 0.0), 'overflow': overflow, 'nan': nan, 'inf': inf,
        'sum_x2': sum_x2, 'sum_e2': sum_e2, 'amax': amax, 'rms': rms, 'crest': _ratio(amax, rms, math.nan)}
    if not pairs:
        result |= dict.fromkeys(('sqnr_db', 'max_abs_error', 'relative_mse', 'cosine', 'psnr_db', 'mean_relative_error',
                                 'amax'), math.nan)
    return result


def decibels(signal, error):
    """10 log10(signal / error) of two energies; inf where there is no error."""
    if not error:
        return math.inf
    return 10 * (math.log10(signal) - math.log10(error)) if signal else -math.inf


def block_sqnr(x, fmt, axis=-1, mask=None):
    """The sqnr_db of each block, as block_quantization has it."""
    return block_quantization(x, fmt, axis, mask)['sqnr_db']


def block_quantization(x, fmt, axis=-1, mask=None):
    """What is left of each block of x; arguments as of `quantization`.

    -> sqnr_db, cosine, max_abs_error, underflow_pct, saturation_pct, each float64 of x's shape with `axis` cut to one place a
    block (for 'tokens', of x's tokens by features, so cut).  A format without blocks is cut into blocks of 32.  inf where
    there is no error, nan where a block has no finite number, or padding alone.
    """
    f = formats.parse(fmt)
    blocks = _Blocks(x, f, axis, mask)
    names = 'pairs', 'finite', 'nonzero', 'underflow', 'saturated', 'x2', 'q2', 'xq', 'e2', 'error'
    sums = {name: np.zeros(blocks.blocks) for name in names}
    for tile in blocks.tiles():
        in_x = tile.keep & np.isfinite(tile.x)
        pair = in_x & np.isfinite(tile.q)
        x_, q, nonzero = np.where(pair, tile.x, 0), np.where(pair, tile.q, 0), in_x & (tile.x != 0)
        error, starts = np.abs(q - x_), np.arange(0, x_.shape[1], blocks.block)
        for name, values in zip(names, (pair, in_x, nonzero, nonzero & (tile.q == 0),
                                        in_x & (np.abs(tile.x) > f.max * tile.scale), x_ * x_, q * q, x_ * q, error * error),
                                strict=False):
            sums[name][tile.blocks] = np.add.reduceat(values, starts, axis=1, dtype=np.float64)
        sums['error'][tile.blocks] = np.maximum.reduceat(error, starts, axis=1)
    pairs, finite, nonzero, underflow, saturated, x2, q2, xq, e2, error = (sums[name].reshape(blocks.shape) for name in names)
    with np.errstate(divide='ignore', invalid='ignore'):
        result = {'sqnr_db': np.where(e2 > 0, 10 * (np.log10(x2) - np.log10(e2)), np.inf),
                  'cosine': np.where(q2 > 0, xq / (np.sqrt(x2) * np.sqrt(q2)), x2 == 0), 'max_abs_error': error,
                  'underflow_pct': 100 * underflow / np.maximum(nonzero, 1),
                  'saturation_pct': 100 * saturated / np.maximum(finite, 1)}
    return {name: np.where(pairs > 0, values, np.nan) for name, values in result.items()}


def block_scales(x, fmt, axis=-1):
    """log2 of the scale of each block, shaped as block_sqnr has it; float64, nan where the block holds NaN or an infinity.

    ValueError for a format without blocks.
    """
    f = formats.parse(fmt)
    if not f.is_block:
        raise ValueError(f'{f}: has no scales; want mxfp8 or mxfp4')
    flat, axis = _flattened(x, axis)
    return _exponents(formats.encode(flat, f, axis).scales)


def _exponents(codes):
    """What the codes of E8M0 stand for: 2 to this."""
    return np.where(codes == 255, np.nan, codes.astype(np.float64) - 127)


def _flattened(x, axis):
    """-> x as tokens by features for an axis of 'tokens', and the axis as a number."""
    x = np.asarray(x)
    return (x.reshape(-1, x.shape[-1] if x.ndim else 1), 0) if axis == 'tokens' else (x, axis)


def _count(truths):
    return int(np.count_nonzero(truths))


def _dot(a, b):
    return np.einsum('i,i', a, b)       # not np.dot: its threads spin while the kernels', or a training step's, want the cores


def _ratio(a, b, otherwise):
    return a / b if b else otherwise


class _Tile(NamedTuple):
    """A piece of a tensor, (outer, n, inner) with blocks along n.  blocks: where its blocks are among all."""
    x: np.ndarray               # float64
    q: np.ndarray               # float64
    scale: np.ndarray | float   # 2^s of each number's block
    keep: np.ndarray            # bool, False at padding
    blocks: tuple


class _Blocks:
    """A tensor, rounded, seen as (outer, n, inner) with blocks along n, in pieces of whole blocks.

    blocks: (outer, blocks, inner).  shape: the same with the tensor's own axes.
    """

    def __init__(self, x, f, axis, mask):
        flat, self.axis = _flattened(x, axis)
        q = formats.fake_quantize(flat, f, self.axis)
        self.block, self.f = f.block or BLOCK, f
        axis = self.axis % max(flat.ndim, 1)
        self.n = flat.shape[axis] if flat.ndim else 1
        self.full = math.prod(flat.shape[:axis]), self.n, math.prod(flat.shape[axis + 1:])
        count = -(-self.n // self.block)
        self.blocks = self.full[0], count, self.full[2]
        self.shape = (*flat.shape[:axis], count, *flat.shape[axis + 1:]) if flat.ndim else ()
        self.x, self.q = flat.reshape(self.full), q.reshape(self.full)
        self.keep = None if mask is None else np.broadcast_to(mask, np.shape(x)).reshape(self.full)
        self.scale = 1.0
        codes = formats.encode(flat, f, self.axis) if f.is_block or f.option('amax_target') else None
        if f.is_block:
            self.scale = np.exp2(_exponents(codes.scales)).reshape(self.blocks)
        elif codes is not None:
            self.scale = 1 / float(codes.factor[0])

    def tiles(self):
        outer, n, inner = self.full
        i_step = max(1, min(inner, _TILE // self.block))
        n_step = max(1, min(-(-n // self.block), _TILE // (i_step * self.block))) * self.block
        o_step = max(1, _TILE // (i_step * n_step))
        for o in range(0, outer, o_step):
            for start in range(0, n, n_step):
                first = start // self.block
                for i in range(0, inner, i_step):
                    place = slice(o, o + o_step), slice(start, start + n_step), slice(i, i + i_step)
                    blocks = place[0], slice(first, first + n_step // self.block), place[2]
                    x = self.x[place].astype(np.float64, order='C')
                    keep = np.ones(x.shape, bool) if self.keep is None else self.keep[place]
                    scale = self.scale
                    if isinstance(scale, np.ndarray):
                        scale = np.repeat(scale[blocks], self.block, axis=1)[:, :x.shape[1]]
                    yield _Tile(x, self.q[place].astype(np.float64, order='C'), scale, keep, blocks)
