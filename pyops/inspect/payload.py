"""JSON data for the page: per tensor a table row and a `detail`, whose arrays are reduced to a size that can be drawn.

A map (heatmap) has at most `side` rows and columns of cells.  A cell is the element of largest magnitude of its patch, so
no outlier is lost; cells are float16 with a common power-of-two scale.  A cell of padding is NaN; a cell whose patch
contains an infinity or NaN is infinite.
"""
import base64
import math
import os

import numpy as np

from pyops import formats as number_formats
from pyops.inspect import colours, statistics
from pyops.inspect.logs import curves

SIDE = 128                          # most rows and columns of a map
BINS = 96                           # of the histogram of values
_PART = 1 << 13            # values of a histogram whose bins stay in the L1 cache
SENTENCES = 1 << 17                 # bytes of attention weights in a detail with several sentences

DESCRIPTION = 'count', 'nan', 'inf', 'zeros', 'amax', 'mean', 'mean_abs', 'rms', 'std', 'min', 'max'
QUALITY = ('sqnr_db', 'max_abs_error', 'rmse', 'relative_mse', 'cosine', 'psnr_db', 'mean_relative_error', 'underflow_pct',
           'subnormal_pct', 'saturation_pct', 'overflow', 'crest')


def describe_format(fmt):
    """Return the name, colour and limits of a format."""
    f = number_formats.parse(fmt)
    return {'name': str(f), 'colour': colours.of(f), 'max': f.max, 'min_normal': f.min_normal,
            'min_subnormal': f.min_subnormal, 'block': f.block, 'scaled': f.is_scaled}


def used_formats(entries, formats):
    """Return `formats` in canonical form, followed by the formats to which the run rounded the entries."""
    texts = [str(number_formats.parse(fmt)) for fmt in formats]
    used = sorted({str(entry.fmt) for entry in entries if entry.fmt is not None})
    return list(dict.fromkeys(texts + used))


def row(number, entry):
    """Return the table row of a tensor, whose file is not read."""
    return {'id': number, 'layer': entry.layer, 'type': entry.layer_type, 'index': entry.index, 'operation': entry.operation,
            'name': entry.name, 'step': entry.step, 'time': entry.time, 'counter': entry.counter, 'run': entry.training,
            'folder': os.path.dirname(entry.relative_path), 'place': entry.place, 'placeInFolder': entry.place_in_folder,
            'rank': entry.rank, 'sample': entry.sample,
            'maps': is_attention(entry), 'shape': list(entry.shape), 'dtype': entry.dtype,
            'format': str(entry.fmt or 'fp32'), 'axis': entry.axis,
            'uses': [[use['product'], use['operand'], use['format'], use['axis']] for use in entry.uses],
            'statistics': description(entry.statistics) if entry.statistics else None}


def description(numbers):
    """Return the statistics of a manifest line as a list in the order of DESCRIPTION."""
    return [_number(numbers.get(name)) for name in DESCRIPTION]


def describe(x, mask):
    """Compute the statistics of a tensor, as a list in the order of DESCRIPTION."""
    return description(statistics.describe(x, mask))


def quality(x, fmt, axis, mask):
    """Return the error measures of a tensor in a format, as a list in the order of QUALITY."""
    return quality_of(statistics.quantization(x, fmt, axis, mask))


def quality_of(numbers):
    """Return the result of statistics.quantization as a list in the order of QUALITY."""
    return [_number(numbers.get(name)) for name in QUALITY]


def is_attention(entry):
    """Return whether a tensor has attention weights, of shape (B, heads, Tq, Tk)."""
    return entry.is_weights and len(entry.shape) == 4


def detail(x, mask, axis, formats, side=SIDE, half=SIDE // 2, window=None):
    """Return the data of a tensor's plots: values and, for each format, rounded values, errors and block scales.

    x: float32;  mask: as of Logs.mask
    side, half: most rows and columns of the map of values, and of the maps of each format
    window: (first row, last row, first column, last column) of the map, default all; its rows are the leading axes, its
    columns the last axis
    """
    x = np.atleast_1d(x)
    mask = None if mask is None else np.broadcast_to(mask, x.shape)
    valid = x if mask is None else x[mask]
    finite = valid[np.isfinite(valid)]
    limits = _limits(finite)
    return {'values': _map(x, mask, side, window), 'range': [_number(limit) for limit in limits],
            'counts': _histogram(finite, limits),
            'formats': {fmt: _rounded(x, mask, axis, fmt, limits, half, window) for fmt in formats}}


def _rounded(x, mask, axis, fmt, limits, side, window):
    f = number_formats.parse(fmt)
    q = statistics.rounded(x, f, axis)
    valid, q_valid = (x, q) if mask is None else (x[mask], q[mask])
    result = {'counts': _histogram(q_valid[np.isfinite(q_valid) & np.isfinite(valid)], limits)}
    given = statistics.transformed(x, f, axis)
    exponents = _half_octaves(given)
    if f.is_block and x.size:
        scales = statistics.block_scales(x, f, axis)
        exponents -= 2 * _repeat_scales(scales, x.shape, axis, f.block)
        # the scale of a block of zeros means nothing
        result['scales'] = _map(scales.astype(np.float32), ~statistics.zero_blocks(x, f, axis), side)
    elif f.is_scaled and x.size:
        flat, along = (x.reshape(matrix_shape(x.shape)), 0) if axis == 'tokens' else (x, axis)
        with np.errstate(all='ignore'):
            exponents = _half_octaves(np.nan_to_num(given / number_formats.element_scales(flat, f, along).reshape(x.shape)))
    counted = np.isfinite(given) & (given != 0)
    exponents = exponents[counted if mask is None else counted & mask]
    first = int(exponents.min()) if exponents.size else 0
    result['exponents'] = {'first': first / 2, 'counts': np.bincount(exponents - first).tolist()}
    with np.errstate(invalid='ignore'):
        error = q - x
    return {**result, 'rounded': _map(q, mask, side, window), 'error': _map(error, mask, side, window)}


def _repeat_scales(scales, shape, axis, block):
    """Return each element's block scale as int32 in the shape of the tensor, 0 for a NaN scale."""
    tokens = axis == 'tokens'
    axis = 0 if tokens else axis
    count = math.prod(shape[:-1]) if tokens else shape[axis]
    each = np.repeat(np.nan_to_num(scales).astype(np.int32), block, axis)
    return each.take(range(count), axis).reshape(shape)


_SQRT_2 = math.ceil((math.sqrt(2) - 1) * (1 << 23))          # the mantissa of the least float32 above it


def _half_octaves(x):
    """Return floor(2 log2 |x|) of float32 numbers as int32; undefined for 0, infinities and NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.int32) & 0x7fffffff
    if ((bits > 0) & (bits < 1 << 23)).any():                   # subnormal
        mantissa, exponent = np.frexp(np.abs(x))
        return 2 * (exponent - 1) + (mantissa >= np.float64(math.sqrt(0.5)))       # in float64: float32 is below the root
    # a mantissa from sqrt(2) on carries into the exponent
    return ((bits + ((1 << 23) - _SQRT_2)) >> 23) + (bits >> 23) - 2 * 127


def _limits(finite):
    """Return the limits of the histogram of values."""
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if not high - low > 1e-6 * max(abs(low), abs(high)):
        low, high = low - max(abs(low), 1e-30) / 2, high + max(abs(high), 1e-30) / 2
    return low, high


def _histogram(values, limits):
    """Return the counts of finite values in BINS equal bins.

    Values that rounding moved beyond a limit are counted in the outermost bin.  np.histogram takes several times as long,
    because it also compares every value with the edges of its bin.
    """
    low, high = limits
    counts = np.zeros(BINS, np.int64)
    values = values.reshape(-1)
    for start in range(0, values.size, _PART):
        bins = values[start:start + _PART].astype(np.float64)
        bins -= low
        bins *= BINS / (high - low)
        np.maximum(np.minimum(bins, BINS - 1, out=bins), 0, out=bins)
        counts += np.bincount(bins.astype(np.intp), minlength=BINS)
    return counts.tolist()


def matrix_shape(shape):
    """Return (rows, columns) of a tensor's map: its flattened leading axes, and its last axis."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def _map(x, mask, side, window=None):
    """Return the map of x as a dict.

    rows, columns: of x as a matrix;  origin: first row and column;  patch: rows and columns per cell;  shape: in cells;
    scale, values: as of _packed
    """
    rows, columns = matrix_shape(x.shape)
    x = x.reshape(rows, columns)
    mask = None if mask is None else mask.reshape(rows, columns)
    top, bottom, left, right = window or (0, rows - 1, 0, columns - 1)
    x, mask = x[top:bottom + 1, left:right + 1], None if mask is None else mask[top:bottom + 1, left:right + 1]
    patch = [max(1, math.ceil(size / side)) for size in x.shape]
    cells = _extremes(x, mask, patch)
    return {'rows': rows, 'columns': columns, 'origin': [top, left], 'patch': patch, 'shape': list(cells.shape),
            **_packed(cells)}


def _extremes(x, mask, patch):
    """Return the element of largest magnitude of each patch: NaN if all is padding, inf if any element is not finite."""
    if not x.size:
        return np.empty((0, 0), np.float32)
    if not np.isfinite(x).all():
        x = np.where(np.isfinite(x), x, np.float32(np.inf))
    if mask is not None:
        x = np.where(mask, x, np.float32(np.nan))
    if patch == [1, 1]:
        return x
    high, low = (_pooled(_pooled(x, patch[0], choose).T, patch[1], choose).T for choose in (np.fmax, np.fmin))
    return np.where(high >= -low, high, low)


def _pooled(x, size, choose):
    """Reduce each group of `size` rows to one with fmax or fmin, which ignore NaN, so padding too."""
    if size > 64:
        return choose.reduceat(x, np.arange(0, len(x), size), 0)
    result = x[::size].copy()
    for start in range(1, size):                # faster than reduceat for small groups
        rows = x[start::size]
        choose(result[:len(rows)], rows, result[:len(rows)])
    return result


def _packed(cells):
    """Return {'scale', 'values'}: values is little-endian float16 in base64, to be multiplied by scale."""
    finite = np.abs(cells[np.isfinite(cells)])
    largest = float(finite.max()) if finite.size else 0.0
    scale = 2.0 ** math.ceil(math.log2(largest)) if largest else 1.0
    with np.errstate(invalid='ignore'):
        halves = (cells.astype(np.float64) / scale).astype('<f2')
    return {'scale': scale, 'values': base64.b64encode(halves.tobytes()).decode()}


def attention(x, mask, words, first=0, count=None, side=SIDE):
    """Return the attention weights of `count` sentences from `first` on; default: as many as fit in SENTENCES bytes.

    x: (B, heads, Tq, Tk);  words(sentence) returns (words of Tq, words of Tk) or None
    Keys: first, sentences (in the batch), heads, patch, shape (of a map, in cells) and maps, a list with scale and values of
    all heads and words per sentence.
    """
    batch, heads, *size = x.shape
    patch = [math.ceil(length / side) for length in size]
    shape = [math.ceil(length / part) for length, part in zip(size, patch, strict=True)]
    if count is None:
        count = max(1, SENTENCES // (2 * heads * math.prod(shape)))
    mask = None if mask is None else np.broadcast_to(mask, x.shape)
    maps = []
    for sentence in range(first, min(first + count, batch)):
        cells = np.stack([_extremes(x[sentence, head], None if mask is None else mask[sentence, head], patch)
                          for head in range(heads)])
        maps.append({**_packed(cells), 'words': words(sentence)})
    return {'first': first, 'sentences': batch, 'heads': heads, 'patch': patch, 'shape': shape, 'maps': maps}


def thin_steps(steps, most=2000):
    """Return [[step, loss, norm, training]] of about `most` training steps, for each training (see logs.curves)."""
    groups = curves(steps)
    return [row for name, group in groups.items() for row in _thin(group, name, max(most // len(groups), 40))]


def _thin(steps, name, most):
    """Return the rows of at most `most` steps: of each interval the lowest and the highest loss."""
    rows = [[line.get('step'), _number(line.get('loss')), _number(line.get('norm')), name] for line in steps]
    if len(rows) <= most:
        return rows
    size = math.ceil(2 * len(rows) / (most - 2))
    result = [rows[0]]
    for start in range(0, len(rows), size):
        interval = rows[start:start + size]
        extremes = {id(choose(interval, key=_by_loss)) for choose in (min, max)}
        result += [row for row in interval if id(row) in extremes and row is not rows[0]]
    return result if result[-1] is rows[-1] else [*result, rows[-1]]


def _by_loss(row):
    return row[1] if isinstance(row[1], float) else math.inf


def _number(value):
    """Return a value for JSON: a number of six digits, 'inf', '-inf', or None for NaN and missing values."""
    if value is None or isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or math.isnan(value):
        return None
    if math.isinf(value):
        return 'inf' if value > 0 else '-inf'
    return int(value) if isinstance(value, (int, np.integer)) else float(f'{value:.6g}')
