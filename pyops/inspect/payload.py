"""JSON data for the page: per tensor a table row and a `detail`, whose arrays are reduced to a size that can be drawn.

A map (heatmap) has at most `side` rows and columns of cells.  A cell is the element of largest magnitude of its patch, so
no outlier is lost; cells are float16 with a common power-of-two scale.  A cell of padding is NaN; a cell whose patch
contains an infinity or NaN is infinite.
"""
import base64
import math
import os

import numpy as np

from pyops import backend
from pyops import formats as number_formats
from pyops.backend import library
from pyops.backend.kernels import Kernel, declare
from pyops.inspect import colours, statistics
from pyops.inspect.logs import curves

SIDE = 128                          # most rows and columns of a map
BINS = 96                           # of the histogram of values
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


def quality_of(numbers):
    """Return the result of statistics.quantization as a list in the order of QUALITY."""
    return [_number(numbers.get(name)) for name in QUALITY]


def is_attention(entry):
    """Return whether a tensor has attention weights, of shape (B, heads, Tq, Tk)."""
    return entry.is_weights and len(entry.shape) == 4


def detail(x, mask, axis, formats, side=SIDE, half=SIDE // 2, window=None, roundings=None):
    """Return the data of a tensor's plots: values and, for each format, rounded values, errors and block scales.

    x: float32;  mask: as of Logs.mask
    side, half: most rows and columns of the map of values, and of the maps of each format
    window: (first row, last row, first column, last column) of the map, default all; its rows are the leading axes, its
    columns the last axis
    roundings: statistics.Roundings of x and mask, made if missing
    """
    x = np.ascontiguousarray(np.atleast_1d(x), np.float32)
    roundings = roundings or statistics.Roundings(x, mask)
    valid = None if mask is None else np.ascontiguousarray(np.broadcast_to(mask, x.shape)).view(np.uint8)
    limits = _limits(x, mask)
    return {'values': _map(x, valid, side, window), 'range': [_number(limit) for limit in limits],
            'counts': _histogram(x, limits, None, valid),
            'formats': {fmt: _rounded(roundings.blocks(fmt, axis), x, valid, limits, half, window) for fmt in formats}}


def _rounded(blocks, x, valid, limits, side, window):
    q = blocks.rounded_values(x)
    result = {'counts': _histogram(q, limits, x, valid)}
    is_block, is_scaled = blocks.f.is_block and x.size > 0, blocks.f.is_scaled and x.size > 0
    first, counts = _half_octaves(blocks.flat, valid, *((blocks.full, blocks.block, blocks.exponents()) if is_block else ()),
                                  each=blocks.element_scales if is_scaled and not is_block else None)
    if is_block:
        scales = blocks.exponents().reshape(blocks.shape).astype(np.float32)
        # the scale of a block of zeros means nothing
        result['scales'] = _map(scales, (blocks.amax != 0).reshape(blocks.shape).view(np.uint8), side)
    result['exponents'] = {'first': first / 2, 'counts': counts}
    return {**result, 'rounded': _map(q, valid, side, window), 'error': _map(q, valid, side, window, x)}


def _half_octaves(x, valid=None, shape=None, block=1, exponents=None, each=None):
    """Return (first, counts) of finite float32 numbers but 0 by floor(2 log2 |x / scale|), from the first such number on.

    shape: (outer, n, inner) of x;  exponents: log2 of the scale of each block along n, NaN: 0;  each: a scale of each number
    """
    lib = library.cpu().lib
    counts = np.empty(lib.PYOPS_HALF_OCTAVES, np.int64)
    scales = None if exponents is None else np.nan_to_num(exponents).astype(np.int32).reshape(-1)
    backend.launch('octave_counts', counts, x.reshape(-1), scales, each, valid, *(shape or (1, x.size, 1)), block)
    places = np.flatnonzero(counts)
    if not places.size:
        return 0, []
    return int(places[0]) + lib.PYOPS_LEAST_OCTAVE, counts[places[0]:places[-1] + 1].tolist()


def _limits(x, mask=None):
    """Return the limits of the histogram of values."""
    numbers = statistics.describe(x, mask)
    low, high = (0.0, 1.0) if numbers['min'] is None else (numbers['min'], numbers['max'])
    if not high - low > 1e-6 * max(abs(low), abs(high)):
        low, high = low - max(abs(low), 1e-30) / 2, high + max(abs(high), 1e-30) / 2
    return low, high


def _histogram(values, limits, others=None, valid=None):
    """Return the counts of finite values in BINS equal bins; of those alone where `others` are finite, too.

    Values that rounding moved beyond a limit are counted in the outermost bin.
    """
    counts = np.empty(BINS, np.int64)
    backend.launch('bin_counts', counts, values, others, valid, values.size, BINS, *limits)
    return counts.tolist()


def matrix_shape(shape):
    """Return (rows, columns) of a tensor's map: its flattened leading axes, and its last axis."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def _map(x, valid, side, window=None, minus=None):
    """Return the map of x, or of x - minus, as a dict.

    rows, columns: of x as a matrix;  origin: first row and column;  patch: rows and columns per cell;  shape: in cells;
    scale, values: as of _packed
    """
    rows, columns = matrix_shape(x.shape)
    top, bottom, left, right = window or (0, rows - 1, 0, columns - 1)
    x, valid, minus = (None if array is None else array.reshape(rows, columns)[top:bottom + 1, left:right + 1]
                       for array in (x, valid, minus))
    patch = [max(1, math.ceil(size / side)) for size in x.shape]
    cells = _extremes(x, valid, patch, minus)
    return {'rows': rows, 'columns': columns, 'origin': [top, left], 'patch': patch, 'shape': list(cells.shape),
            **_packed(cells)}


def _extremes(x, valid, patch, minus=None):
    """Return the element of largest magnitude of each patch of x, or of x - minus: NaN if all is padding, inf if any element is
    not finite.   valid: uint8, 0 at padding, or None"""
    if not x.size:
        return np.empty((0, 0), np.float32)
    cells = np.empty([-(-size // part) for size, part in zip(x.shape, patch, strict=True)], np.float32)
    x, valid, minus = (None if array is None else np.ascontiguousarray(array) for array in (x, valid, minus))
    backend.launch('patch_extremes', cells, x, minus, valid, *x.shape, *patch)
    return cells


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
    valid = None if mask is None else np.ascontiguousarray(np.broadcast_to(mask, x.shape)).view(np.uint8)
    maps = []
    for sentence in range(first, min(first + count, batch)):
        cells = np.stack([_extremes(x[sentence, head], None if valid is None else valid[sentence, head], patch)
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


declare(bin_counts=Kernel(), octave_counts=Kernel(), patch_extremes=Kernel())
