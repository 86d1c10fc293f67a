"""What the page is told of saved tensors: a row for the table of each, and a detail, numbers made small enough to draw.

Everything here is JSON.  A map (a heatmap) has at most `side` cells either way: a cell is the element of largest magnitude
of its patch, so that a single outlier is seen; its numbers are float16 times a power of two.  Padding is NaN in a map, an
element that is infinite or NaN makes its cell infinite.
"""
import base64
import math
import os

import numpy as np

from pyops import formats as number_formats
from pyops.inspect import colours, statistics

SIDE = 128                          # cells of a map at most, either way
BINS = 96                           # of the histogram of values
SENTENCES = 1 << 17                 # bytes of attention weights in a detail that holds several sentences

DESCRIPTION = 'count', 'nan', 'inf', 'zeros', 'amax', 'mean', 'mean_abs', 'rms', 'std', 'min', 'max'
QUALITY = ('sqnr_db', 'max_abs_error', 'rmse', 'relative_mse', 'cosine', 'psnr_db', 'mean_relative_error', 'underflow_pct',
           'subnormal_pct', 'saturation_pct', 'overflow', 'crest')


def describe_format(fmt):
    """A format for the page: its name, colour and limits."""
    f = number_formats.parse(fmt)
    return {'name': str(f), 'colour': colours.of(f), 'max': f.max, 'min_normal': f.min_normal,
            'min_subnormal': f.min_subnormal, 'block': f.block}


def used_formats(entries, wanted):
    """`wanted` as canonical texts, and behind them those that tensors were rounded to when they were used."""
    texts = [str(number_formats.parse(fmt)) for fmt in wanted]
    used = sorted({str(entry.fmt) for entry in entries if entry.fmt is not None})
    return list(dict.fromkeys(texts + used))


def row(number, entry):
    """What the page knows of a tensor without reading it."""
    return {'id': number, 'layer': entry.layer, 'type': entry.layer_type, 'index': entry.index, 'operation': entry.operation,
            'name': entry.name, 'step': entry.step, 'time': entry.time, 'counter': entry.counter, 'run': entry.run,
            'folder': os.path.dirname(entry.place), 'shape': list(entry.shape), 'dtype': entry.dtype,
            'format': str(entry.fmt or 'fp32'), 'axis': entry.axis,
            'uses': [[use['product'], use['operand'], use['format'], use['axis']] for use in entry.uses],
            'statistics': description(entry.statistics) if entry.statistics else None}


def description(numbers):
    """The statistics of a tensor, as of a manifest, in the order of DESCRIPTION."""
    return [_number(numbers.get(name)) for name in DESCRIPTION]


def describe(x, mask):
    """The statistics of a tensor whose manifest has none, in the order of DESCRIPTION."""
    return description(statistics.describe(x, mask))


def quality(x, fmt, axis, mask):
    """What a format does to a tensor, in the order of QUALITY."""
    numbers = statistics.quantization(x, fmt, axis, mask)
    return [_number(numbers.get(name)) for name in QUALITY]


def is_attention(entry):
    """Whether a tensor is a map of attention weights, (B, heads, Tq, Tk)."""
    return entry.layer_type == 'attention' and entry.name == 'weights' and len(entry.shape) == 4 and 0 not in entry.shape


def detail(x, mask, axis, formats, side=SIDE, half=SIDE // 2, window=None):
    """The pictures of a tensor, and of what each format makes of it.

    x: float32.  mask: as Logs.mask.  side, half: cells of a map of values, and of the two maps of each format, either way.
    window: (first row, last row, first column, last column) of the map, all by default; rows are the leading axes, columns
    the last one.
    """
    x = np.atleast_1d(x)
    mask = None if mask is None else np.broadcast_to(mask, x.shape)
    kept = x if mask is None else x[mask]
    finite = kept[np.isfinite(kept)]
    ends = _ends(finite)
    return {'values': _map(x, mask, side, window), 'range': [_number(end) for end in ends], 'counts': _histogram(finite, ends),
            'formats': {fmt: _rounded(x, mask, axis, fmt, ends, half, window) for fmt in formats}}


def _rounded(x, mask, axis, fmt, ends, side, window):
    f = number_formats.parse(fmt)
    q = statistics.rounded(x, f, axis)
    kept, q_kept = (x, q) if mask is None else (x[mask], q[mask])
    result = {'counts': _histogram(q_kept[np.isfinite(q_kept) & np.isfinite(kept)], ends)}
    exponents = _half_octaves(x)
    if f.is_block and x.size:
        scales = statistics.block_scales(x, f, axis)
        exponents -= 2 * _spread(scales, x.shape, axis, f.block)
        result['scales'] = _map(scales.astype(np.float32), None, side)
    good = np.isfinite(x) & (x != 0)
    exponents = exponents[good if mask is None else good & mask]
    first = int(exponents.min()) if exponents.size else 0
    result['exponents'] = {'first': first / 2, 'counts': np.bincount(exponents - first).tolist()}
    with np.errstate(invalid='ignore'):
        error = q - x
    return {**result, 'rounded': _map(q, mask, side, window), 'error': _map(error, mask, side, window)}


def _spread(scales, shape, axis, block):
    """The scale of the block of each number, of the tensor's shape; int32, with 0 for the scale that is not a number."""
    tokens = axis == 'tokens'
    axis = 0 if tokens else axis
    count = math.prod(shape[:-1]) if tokens else shape[axis]
    each = np.repeat(np.nan_to_num(scales).astype(np.int32), block, axis)
    return each.take(range(count), axis).reshape(shape)


def _half_octaves(x):
    """floor(2 log2 |x|), int32, of the elements that have one."""
    mantissa, exponent = np.frexp(np.abs(x))
    return 2 * (exponent - 1) + (mantissa >= math.sqrt(0.5))


def _ends(finite):
    """Where the histogram of values begins and ends."""
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if not high - low > 1e-6 * max(abs(low), abs(high)):
        low, high = low - max(abs(low), 1e-30) / 2, high + max(abs(high), 1e-30) / 2
    return low, high


def _histogram(values, ends):
    """Counts; what rounding carried over an end counts in the last bin there."""
    return np.histogram(np.clip(values.astype(np.float64), *ends), BINS, ends)[0].tolist()


def matrix_shape(shape):
    """(rows, columns) of a tensor's map: its leading axes as one, and its last axis."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def _map(x, mask, side, window=None):
    """-> {'rows', 'columns': of x as a matrix, 'origin', 'patch': (rows, columns) of a cell, 'shape': in cells, 'scale',
    'values'}."""
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
    """The element of largest magnitude of every patch; NaN where all is padding, inf where something is not finite."""
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
    """Groups of `size` rows as one row, with fmax or fmin, which pass over padding."""
    if size > 64:
        return choose.reduceat(x, np.arange(0, len(x), size), 0)
    result = x[::size].copy()
    for start in range(1, size):                # faster than reduceat where groups are small
        rows = x[start::size]
        choose(result[:len(rows)], rows, result[:len(rows)])
    return result


def _packed(cells):
    """-> {'scale', 'values'}: little-endian float16 in base64; a number is scale times that."""
    finite = np.abs(cells[np.isfinite(cells)])
    largest = float(finite.max()) if finite.size else 0.0
    scale = 2.0 ** math.ceil(math.log2(largest)) if largest else 1.0
    with np.errstate(invalid='ignore'):
        halves = (cells.astype(np.float64) / scale).astype('<f2')
    return {'scale': scale, 'values': base64.b64encode(halves.tobytes()).decode()}


def attention(x, mask, words, first=0, count=None, side=SIDE):
    """Attention weights of `count` sentences from `first` on, as many as fit in SENTENCES by default.

    x: (B, heads, Tq, Tk).  words(sentence) -> (words of Tq, words of Tk) or None.
    -> 'first', 'sentences' (of the batch), 'heads', 'patch', 'shape' of a map in cells, 'maps': for each sentence 'scale' and
    'values' of all heads and 'words'.
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
    """[[step, loss, norm]] of at most `most` of the training steps: of every stretch those with the least and largest loss."""
    rows = [[line.get('step'), _number(line.get('loss')), _number(line.get('norm'))] for line in steps]
    if len(rows) <= most:
        return rows
    size = math.ceil(2 * len(rows) / (most - 2))
    kept = [rows[0]]
    for start in range(0, len(rows), size):
        stretch = rows[start:start + size]
        ends = {id(choose(stretch, key=_by_loss)) for choose in (min, max)}
        kept += [line for line in stretch if id(line) in ends and line is not rows[0]]
    return kept if kept[-1] is rows[-1] else [*kept, rows[-1]]


def _by_loss(line):
    return line[1] if isinstance(line[1], float) else math.inf


def _number(value):
    """A number that JSON has: six digits; None for NaN and what is missing; 'inf' and '-inf'."""
    if value is None or isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or math.isnan(value):
        return None
    if math.isinf(value):
        return 'inf' if value > 0 else '-inf'
    return int(value) if isinstance(value, (int, np.integer)) else float(f'{value:.6g}')
