"""The three plots of a tensor: the distribution of its values, maps of values and errors, and a comparison of all formats.

`analyse` extracts the data for all plots from the tensor; its result is small.
"""
import dataclasses
import math

import numpy as np

from pyops import formats as number_formats
from pyops.inspect import statistics
from pyops.inspect.pictures import numbers, style


@dataclasses.dataclass(frozen=True)
class FormatAnalysis:
    """The error of a number format on a tensor."""
    format: number_formats.Format
    statistics: dict            # of pyops.inspect.statistics.quantization
    error: np.ndarray           # q - x as a small matrix, like Analysis.values
    scales: np.ndarray | None   # exponents of the block scales as a matrix of the same shape
    cover: np.ndarray | None    # like Analysis.cover for the scales: blocks of zeros have none
    exponents: tuple            # smallest, median and largest exponent; (0, 0, 0) without scales
    patch: np.ndarray           # q in the window of Analysis.patch
    relative: tuple             # edges, shares of numbers.relative_errors


@dataclasses.dataclass(frozen=True)
class Analysis:
    """The data of a tensor's plots."""
    title: str
    subtitle: str
    kind: str                   # key of style.KINDS
    format: str                 # to which the run rounded it, or 'fp32'
    shape: tuple
    statistics: dict            # of pyops.inspect.statistics.describe
    is_sampled: bool            # boxes and quantiles use a sample of the values
    counts: np.ndarray          # of numbers.binades
    histogram: tuple | None
    normal: tuple | None
    boxes: list
    boxes_of: str               # the groups of the boxes: head or feature
    view: numbers.View
    values: np.ndarray          # x as a small matrix, 0 at padding
    cover: np.ndarray | None    # of numbers.View.cover, of the same shape
    window: tuple               # (first row, first column) of patch
    patch: np.ndarray           # x in a window around its largest value
    patch_cover: np.ndarray | None
    rounded: list               # of FormatAnalysis
    is_rms: bool = False        # the colours of maps reach to multiples of the rms, not to the largest value

    @property
    def parts(self):
        """(rows, columns) of the largest part of the matrix that one cell of `values` covers."""
        return tuple(-(-full // max(small, 1)) for full, small in zip(self.view.matrix, self.values.shape, strict=True))


def subtitle_of(entry):
    """Return the subtitle: step, operation, shape and format."""
    time = '' if entry.time is None else f', time step {entry.time}'
    fmt = 'not quantized' if entry.fmt is None else f'trained with {entry.fmt}'
    place = f'  ·  {entry.place}' if entry.place else ''
    return f'step {entry.step}{time}{place}  ·  {entry.operation}  ·  {style.shape_text(entry.shape)}  ·  {fmt}'


def title_of(entry):
    return f'{style.plain(entry.layer)}  ·  {style.plain(entry.name)}'


def analyse(entry, x, mask, formats, known=None, is_rms=False, roundings=None):
    """Return the Analysis of x, the tensor of a logs.Entry.  mask: bool, False at padding, or None;  known: as for `measure`;
    is_rms: as in Analysis;  roundings: statistics.Roundings of x, made if missing"""
    x = np.atleast_1d(np.asarray(x, np.float32))            # a scalar is drawn as a vector with one element
    roundings = roundings or statistics.Roundings(x, mask)
    values = numbers.valid(x, mask)
    is_heads = entry.layer_type == 'attention' and x.ndim == 4
    heads_axis = (1 if entry.is_weights else 2) if is_heads else None
    # the mask entry of the manifest has the batch axis; dumps of pyops are time first
    batch = next((item['batch'] for item in entry.mask), 1 if entry.origin == 'pyops' else None)
    view = numbers.view_of(x.shape, entry.layer_type, 'weights' if entry.is_weights else entry.name, entry.axis, batch)
    cover = view.cover(mask)
    hidden = None if cover is None else cover > 0
    matrix = view.of(x) if hidden is None else np.where(hidden, 0, view.of(x))
    rows, columns = numbers.patch_of(matrix)
    sampled = numbers.sample(values)
    rounded = [_round(roundings, fmt, axis_of(entry, x.ndim), view, cover, (rows, columns), sampled,
                      (known or {}).get(str(fmt))) for fmt in formats]
    return Analysis(
        title=title_of(entry), subtitle=subtitle_of(entry), kind=style.kind_of(entry.operation, entry.name),
        format='fp32' if entry.fmt is None else str(entry.fmt), shape=x.shape,
        statistics=entry.statistics or statistics.describe(x, mask), is_sampled=len(values) > numbers.SAMPLE,
        counts=numbers.binades(values), histogram=numbers.histogram(values), normal=numbers.normal_quantiles(sampled),
        boxes=numbers.boxes(x, mask, heads_axis), boxes_of='head' if is_heads else 'feature' if x.ndim > 1 else '',
        view=view, values=numbers.shrink(matrix),
        cover=None if cover is None else numbers.reduced(np.minimum, cover), window=(rows.start, columns.start),
        patch=np.array(matrix[rows, columns]),
        patch_cover=None if cover is None else np.array(cover[rows, columns]), rounded=rounded, is_rms=is_rms)


def measure(entry, roundings, formats, known=None):
    """Return (counts of binades, statistics, {format: quantization}) of the tensor of statistics.Roundings, without plots.
    known: {text of a format: quantization}, computed if missing"""
    x, mask, known = roundings.x, roundings.mask, known or {}
    losses = {str(fmt): known.get(str(fmt)) or roundings.quantization(fmt, axis_of(entry, x.ndim)) for fmt in formats}
    return numbers.binades(numbers.valid(x, mask)), entry.statistics or statistics.describe(x, mask), losses


def axis_of(entry, ndim):
    """Return the axis of the blocks, or the last one of so many if the entry has no valid axis."""
    return entry.axis if isinstance(entry.axis, int) and -ndim <= entry.axis < ndim else -1


def _round(roundings, fmt, axis, view, cover, window, sampled, known):
    x, mask, blocks = roundings.x, roundings.mask, roundings.blocks(fmt, axis)
    q = blocks.rounded_values(x)
    with np.errstate(invalid='ignore', over='ignore'):
        error = view.of(q - x)
    scales, scale_cover, exponents = None, None, (0, 0, 0)
    if fmt.is_block and x.size:
        along = axis % x.ndim
        repeated, is_zero = (np.repeat(array, fmt.block, along).take(range(x.shape[along]), along)
                             for array in (blocks.exponents().reshape(blocks.shape).astype(np.float32),
                                           (blocks.amax == 0).reshape(blocks.shape)))
        scale_cover = np.where(view.of(is_zero), numbers.MISSING, 0 if cover is None else cover)
        scales = numbers.reduced(np.maximum, np.where(scale_cover > 0, -128, view.of(repeated)))
        scale_cover = numbers.reduced(np.minimum, scale_cover)
        used = numbers.valid(np.where(is_zero, np.nan, repeated), mask)
        used = used[np.isfinite(used)]
        exponents = tuple(np.quantile(used, (0, 0.5, 1)).tolist()) if len(used) else (0, 0, 0)
    elif fmt.is_scaled and x.size:
        used = numbers.valid(blocks.element_scales, mask)
        used = np.log2(used[np.isfinite(used) & (used > 0)])
        exponents = tuple(np.quantile(used, (0, 0.5, 1)).tolist()) if len(used) else (0, 0, 0)
    elif fmt.option('factor'):
        exponents = (-math.log2(fmt.option('factor')),) * 3
    elif fmt.target and (amax := float(np.max(np.abs(blocks.flat), initial=0, where=np.isfinite(blocks.flat)))):
        exponents = (math.log2(amax / fmt.target),) * 3
    q_sampled = numbers.sample(numbers.valid(q, mask))
    error = numbers.shrink(error if cover is None else np.where(cover > 0, 0, error))
    return FormatAnalysis(fmt, known or roundings.quantization(fmt, axis), error, scales, scale_cover, exponents,
                          np.array(view.of(q)[window]), numbers.relative_errors(sampled, q_sampled))


# ---- distributions -----------------------------------------------------------------------------------------------------

def draw_distribution(tensor):
    """Return a Sheet with histogram, magnitudes with the ranges of the formats, box plots and a normal Q-Q plot."""
    sheet = style.Sheet(12, 8.45, tensor.title, tensor.subtitle)
    color = style.KINDS[tensor.kind]
    _facts(sheet, tensor)
    note = f'of a sample of {numbers.SAMPLE:,} values' if tensor.is_sampled else ''
    left, right, width, top, bottom, height = 0.85, 6.85, 4.85, 1.75, 5.35, 2.75
    _draw_histogram(sheet.axes(left, top, width, height, 'Values'), tensor, color)
    lanes = min(0.175 * len(tensor.rounded), 1.6)
    _draw_exponents(sheet, (right, top, width, height), lanes, tensor, color)
    grouped = len(tensor.boxes) > 2
    _draw_boxes(sheet.axes(left, bottom, width, height - 0.55, f'Boxes by {tensor.boxes_of}' if grouped else 'Box', note),
                tensor, color)
    _draw_quantiles(sheet.axes(right, bottom, width, height - 0.55, 'Quantiles', note), tensor, color)
    return sheet


def _facts(sheet, tensor):
    """Draw a row of key statistics."""
    s = tensor.statistics
    count = s['count']
    cards = [('values', f'{count:,}'), ('largest |x|', style.number(s['amax'])), ('rms', style.number(s['rms'])),
             ('mean', style.number(s['mean'])), ('std', style.number(s['std'])), ('smallest', style.number(s['min'])),
             ('largest', style.number(s['max'])), ('zeros', style.percent(100 * s['zeros'] / count if count else 0))]
    if s['nan'] or s['inf']:
        cards.append(('NaN, Inf', f'{s["nan"]:,}, {s["inf"]:,}'))
    if tensor.cover is not None and (tensor.cover == numbers.PADDING).any():
        cards.append(('padding', style.percent(100 * (1 - count / max(math.prod(tensor.shape), 1)))))
    for i, (label, value) in enumerate(cards):
        x = 0.35 + i * min(1.42, (sheet.width - 0.7) / len(cards))
        sheet.text(x, 0.98, label, fontsize=7.5, color=style.GREY)
        sheet.text(x, 1.19, value or '\N{EM DASH}', fontsize=10.5, color=style.BROKEN if label == 'NaN, Inf' else style.INK)


def _nothing(axes, text):
    axes.text(0.5, 0.5, text, ha='center', va='center', color=style.GREY, transform=axes.transAxes)


def _draw_histogram(axes, tensor, color):
    if tensor.histogram is None:
        return _nothing(axes, 'no finite value')
    edges, counts = tensor.histogram
    axes.stairs(counts, edges, fill=True, color=color, alpha=0.85, linewidth=0)
    mean, std = tensor.statistics['mean'], tensor.statistics['std']
    top, is_log = counts.max(), counts.max() > 20
    if len(counts) > 10 and mean is not None and std:
        x = np.linspace(edges[0], edges[-1], 200)
        bell = counts.sum() * (edges[1] - edges[0]) / (std * math.sqrt(2 * math.pi)) * np.exp(-0.5 * ((x - mean) / std) ** 2)
        axes.plot(x, bell, color=style.INK, linewidth=0.9, linestyle=(0, (4, 2)), label='normal, same mean and std')
        axes.legend(loc='upper right', borderaxespad=0)
        top = max(top, bell.max())
    if is_log:
        axes.set_yscale('log')
    axes.set_ylim((0.7, top ** 1.25) if is_log else (0, max(top * 1.25, 1)))
    middle = (edges[0] + edges[-1]) / 2
    if len(counts) == 1:                        # a constant: one tick at its value
        axes.set_xlim(middle - 2 * (edges[1] - edges[0]), middle + 2 * (edges[1] - edges[0]))
        style.scale(axes, 'x', 'value', [middle], [style.number(middle, 6)])
    else:
        style.scale(axes, 'x', 'value')
    style.scale(axes, 'y', 'values per bin', most=5)
    return None


def _reach(rounded, which=1):
    """Return log2 of the smallest subnormal, smallest normal and largest value of a format.

    which: the block scale that applies, 0: smallest, 1: median, 2: largest
    """
    f = rounded.format
    return tuple(math.log2(edge) + rounded.exponents[which] for edge in (f.min_subnormal, f.min_normal, f.max))


def _draw_exponents(sheet, box, lanes, tensor, color):
    from matplotlib.collections import PolyCollection
    x, y, width, height = box
    span, counts = numbers.span_of(tensor.counts), tensor.counts.sum(0)
    rounded = tensor.rounded
    low, high = span or (-8, 8)
    if rounded:             # include the limits of the first format if they are close
        sub, normal, top = _reach(rounded[0])
        low, high = min(low, max(sub - 2, low - 14)), max(high, min(top + 1, high + 12))
    low, high = low - 1, high + 2
    ticks = [t for t in range(-160, 161, next(s for s in (1, 2, 4, 5, 10, 20, 40, 80) if (high - low) / s <= 9))
             if low <= t <= high]
    labels = [style.power(t) for t in ticks]
    gap = 0.08 if rounded else 0
    axes = sheet.axes(x, y, width, height - lanes - gap, 'Magnitudes by binade')
    axes.stairs(100 * counts / max(counts.sum(), 1), np.arange(257) - 127, fill=True, color=color, alpha=0.85, linewidth=0)
    axes.set_xlim(low, high)
    axes.set_ylim(0, max(100 * counts.max() / max(counts.sum(), 1), 1) * 1.2)
    if span is None:
        _nothing(axes, 'no finite nonzero value')
    if rounded:
        _shade(axes, rounded[0], low, high)
    style.scale(axes, 'y', '% of nonzero values', most=5)
    style.scale(axes, 'x', '' if rounded else '|x|', ticks, [''] * len(ticks) if rounded else labels)
    if not rounded:
        return
    lane = sheet.axes(x, y + height - lanes, width, lanes)
    bars = []
    for i, r in enumerate(rounded):
        sub, normal, top = np.clip(_reach(r), low, high)
        tint, ink = style.color_of(r.format), style.ink_of(style.color_of(r.format))
        bars += [((sub, normal), i, (tint, 0.35)), ((normal, top), i, tint)]
        middle = y + height - lanes + (i + 0.5) / len(rounded) * lanes
        if sub >= high or top <= low:
            text, position = ('above \N{BLACK RIGHT-POINTING SMALL TRIANGLE}', 0.995) if sub >= high else (
                '\N{BLACK LEFT-POINTING SMALL TRIANGLE} below', 0.005)
            sheet.text(x + position * width, middle, text, color=ink, fontsize=7.5, ha='right' if sub >= high else 'left',
                       va='center')
        if r.exponents[0] < r.exponents[2]:
            ends = np.clip((_reach(r, 0)[0], _reach(r, 2)[2]), low, high)
            lane.plot(ends, (i, i), color=tint, linewidth=1, zorder=1)
        sheet.text(x - 0.015 * width, middle, style.shortened(r.format, 16), fontsize=7.5, color=ink, ha='right', va='center')
    lane.add_collection(PolyCollection([[(start, i - 0.25), (start, i + 0.25), (end, i + 0.25), (end, i - 0.25)]
                                        for (start, end), i, _ in bars],
                                       facecolors=[color for *_, color in bars], linewidth=0), autolim=False)
    lane.set_xlim(low, high)
    lane.set_ylim(len(rounded) - 0.5, -0.5)
    blocks = ' at the median scale; line: all blocks' if any(r.exponents[0] < r.exponents[2] for r in rounded) else ''
    style.scale(lane, 'x', f'|x|     dark: normal, pale: subnormal{blocks}', ticks, labels)


def _shade(axes, rounded, low, high):
    """Shade the subnormal and the normal range of a format."""
    sub, normal, top = _reach(rounded)
    tint, ink = style.color_of(rounded.format), style.ink_of(style.color_of(rounded.format))
    x, y, width, height = axes.inches

    def name(at, text, align):
        axes.sheet.text(x + (at - low) / (high - low) * width, y + 0.03 * height, text, color=ink, fontsize=7.5, ha=align,
                        va='top')

    for start, end, alpha in ((sub - 1, normal, 0.07), (normal, top, 0.16)):        # values above half the smallest round up
        start, end = max(start, low), min(end, high)
        if end > start:
            axes.axvspan(start, end, color=tint, alpha=alpha, linewidth=0, zorder=0)
    # the limits of a block format differ from block to block
    of = ' at the median scale' if rounded.exponents[0] < rounded.exponents[2] else ''
    for limit, align, text in ((top, 'left', f' overflow{of}'), (sub - 1, 'right', f'underflow{of} ')):
        if low < limit < high:
            axes.axvline(limit, color=tint, linewidth=1)
        if ((high - limit) if align == 'left' else (limit - low)) / (high - low) * axes.inches[2] > 0.085 * len(text):
            name(limit, text, align)
    for start, end, text in ((sub - 1, normal, 'subnormal'), (normal, top, f'{rounded.format}: normal')):
        start, end = max(start, low), min(end, high)
        if (end - start) / (high - low) * axes.inches[2] > 0.072 * len(text):
            name((start + end) / 2, text, 'center')


def _draw_boxes(axes, tensor, color):
    from matplotlib.collections import LineCollection, PolyCollection
    boxes = tensor.boxes if len(tensor.boxes) > 2 else tensor.boxes[:1]
    if not boxes:
        return _nothing(axes, 'no finite value')
    # outliers far beyond the whiskers would leave the boxes a line: asinh is linear up to the largest box, then logarithmic
    size = max(max(abs(box.q1), abs(box.q3)) for box in boxes)
    reach = max(max(np.abs(box.outliers).max(initial=0), abs(box.low), abs(box.high)) for box in boxes)
    is_wide = 0 < 30 * size < reach
    if is_wide:
        boxes = [numbers.Box(box.label, *np.arcsinh(np.array([box.low, box.q1, box.median, box.q3, box.high]) / size).tolist(),
                             np.arcsinh(box.outliers / size)) for box in boxes]
    lines, medians, bodies = [], [], []
    for i, box in enumerate(boxes):
        bodies.append([(i - 0.32, box.q1), (i + 0.32, box.q1), (i + 0.32, box.q3), (i - 0.32, box.q3)])
        medians.append([(i - 0.32, box.median), (i + 0.32, box.median)])
        lines += [[(i, box.low), (i, box.q1)], [(i, box.q3), (i, box.high)]]
        lines += [[(i - 0.16, edge), (i + 0.16, edge)] for edge in (box.low, box.high)]
    axes.add_collection(PolyCollection(bodies, facecolors=[(style.GREY if i == 0 and len(boxes) > 1 else color, 0.45)
                                                           for i in range(len(boxes))],
                                       linewidth=0))
    axes.add_collection(LineCollection(lines, colors=style.GREY, linewidths=0.8))
    axes.add_collection(LineCollection(medians, colors=style.INK, linewidths=1.4))
    axes.plot(np.concatenate([np.full(len(box.outliers), i) for i, box in enumerate(boxes)]),
              np.concatenate([box.outliers for box in boxes]), linestyle='', marker='.', markersize=3, color=color, alpha=0.5,
              markeredgewidth=0)
    axes.autoscale_view()
    axes.set_xlim(-0.6, len(boxes) - 0.4) if len(boxes) > 1 else axes.set_xlim(-2, 2)
    if is_wide:
        decades = range(math.floor(math.log10(reach)), math.ceil(math.log10(size)) - 1, -1)
        powers = [10.0 ** exponent for exponent in decades[::-(-len(decades) // 3)]]
        ticks = [*(-power for power in powers), 0.0, *powers[::-1]]
        style.scale(axes, 'y', 'value, asinh scale', [math.asinh(tick / size) for tick in ticks], [*map(style.number, ticks)])
    else:
        style.scale(axes, 'y', 'value', most=5)
    labels = [box.label for box in boxes]
    crowded = sum(map(len, labels)) * 0.085 > axes.inches[2] * 0.85
    style.scale(axes, 'x', tensor.boxes_of if len(boxes) > 1 else '', range(len(boxes)), labels, grid=False,
                rotation=35 if crowded else 0)
    return None


def _draw_quantiles(axes, tensor, color):
    if tensor.normal is None:
        return _nothing(axes, 'fewer than three values, or all are equal')
    expected, observed = tensor.normal
    low, high = min(expected[0], observed[0]), max(expected[-1], observed[-1])
    axes.axline((0, 0), slope=1, color=style.INK, linewidth=0.9, linestyle=(0, (4, 2)), label='normal distribution')
    axes.plot(expected, observed, linestyle='', marker='o', markersize=2.8, color=color, markeredgewidth=0)
    axes.set_xlim(expected[0] - 0.03 * np.ptp(expected), expected[-1] + 0.03 * np.ptp(expected))
    axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    style.scale(axes, 'x', 'quantile of a normal distribution with the same mean and std')
    style.scale(axes, 'y', 'quantile of the values', most=5)
    axes.legend(loc='upper left', borderaxespad=0)
    return None


# ---- heatmaps ----------------------------------------------------------------------------------------------------------

_PANELS, _PANEL_WIDTH, _PANEL_HEIGHT, _PITCH = 4, 2.85, 2.55, 3.6       # in a row; inches


def draw_heatmap(tensor):
    """Return a Sheet with maps of the tensor, of the error q - x in each format, and of block scales."""
    panels = [('x', style.INK, '', tensor.values, tensor.cover, None, tensor.statistics['rms'])]
    for r in tensor.rounded:
        tint = style.color_of(r.format)
        panels.append((f'{style.shortened(r.format, 17)}:  error q {style.MINUS} x', tint,
                       style.decibels(r.statistics['sqnr_db']), r.error, tensor.cover, None, r.statistics['rmse']))
        if r.scales is not None:
            panels.append((f'{style.shortened(r.format, 17)}:  scales', tint, f'blocks of {r.format.block}', r.scales,
                           r.cover, style.power, None))
    across = min(len(panels), _PANELS)
    down = -(-len(panels) // across)
    height = 1.25 + down * _PITCH + 0.15
    sheet = style.Sheet(max(0.85 + across * (_PANEL_WIDTH + 0.35) + 0.1, 7.5), height, tensor.title, tensor.subtitle)
    broken = is_beyond = False
    for i, (title, color, note, matrix, cover, format_tick, rms) in enumerate(panels):
        row, column = divmod(i, across)
        corner = 0.85 + column * (_PANEL_WIDTH + 0.35), 1.15 + row * _PITCH
        if not matrix.size:
            sheet.text(corner[0], corner[1] + 0.3, 'no value', color=style.GREY)
            continue
        low, high, beyond, signed = (numbers.limits(matrix, rms if tensor.is_rms else None) if format_tick is None
                                     else (*_whole_limits(matrix, cover), 0, False))
        cmap = style.diverging() if signed else style.sequential()
        box = *corner, _PANEL_WIDTH, _PANEL_HEIGHT
        sheet.heading(*box[:3], title, note, color)
        sheet.image(*box, style.painted(matrix, low, high, cmap, cover))
        is_beyond |= beyond > 0
        broken |= bool((~np.isfinite(matrix) & _is_shown(cover)).any())
        _draw_parts(sheet, box, tensor.view)
        first = i == 0
        sheet.ticks(*box, 'y', tensor.view.rows if first else '', _element_ticks(tensor.view.matrix[0], 5, column == 0))
        sheet.ticks(*box, 'x', tensor.view.columns if first else '', _element_ticks(tensor.view.matrix[1], 6))
        style.color_bar(sheet, corner[0] + 0.55, corner[1] + _PANEL_HEIGHT + 0.48, _PANEL_WIDTH - 1.1, cmap, low, high,
                        beyond > 0, format_tick)
    sheet.text(0.35, height - 0.14, _legend_of_maps(tensor, broken, is_beyond), fontsize=7.5, color=style.GREY)
    return sheet


def _legend_of_maps(tensor, broken, is_beyond):
    part = style.shape_text(tensor.parts)
    remarks = [f'each cell shows the largest magnitude of {part} elements'] if math.prod(tensor.parts) > 1 else []
    remarks += ['grey: padding'] if tensor.cover is not None and (tensor.cover == numbers.PADDING).any() else []
    remarks += ['magenta: NaN or Inf'] if broken else []
    remarks += ['arrows: some values exceed the colour scale'] if is_beyond else []
    remarks += ['q: x rounded to the format'] if tensor.rounded else []
    return '   \N{MIDDLE DOT}   '.join(remarks)


def _is_shown(cover):
    return True if cover is None else cover == numbers.SHOWN


def _whole_limits(matrix, cover):
    values = matrix[np.isfinite(matrix) & _is_shown(cover)]
    return (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)


def _element_ticks(count, most, labelled=True, first=0):
    """Return up to `most` ticks [(position from 0 to 1, index)] at the centres of the cells first, ..., first + count - 1."""
    step = next(s * 10 ** p for p in range(12) for s in (1, 2, 5) if count <= most * s * 10 ** p) if count else 1
    return [((i + 0.5 - first) / count, str(i) if labelled else '') for i in range(first, first + count) if i % step == 0]


def _draw_parts(sheet, box, view):
    x, y, width, height = box
    rows, columns = view.matrix
    if len(view.row_lines) <= 48:
        for row in view.row_lines:
            sheet.line(x, y + height * row / rows, x + width, y + height * row / rows, style.RULE, 0.6)
    if len(view.column_lines) <= 48:
        for column in view.column_lines:
            sheet.line(x + width * column / columns, y, x + width * column / columns, y + height, style.RULE, 0.6)


# ---- comparisons -------------------------------------------------------------------------------------------------------

def draw_comparison(tensor):
    """Return a Sheet with a window of the tensor in every format side by side, its errors on one scale, and statistics."""
    rounded = tensor.rounded
    columns = len(rounded) + 1
    wide = max(12.0, 0.75 + columns * 1.55)
    pitch = (wide - 0.85 - 0.35 + 0.16) / columns
    side = pitch - 0.16
    sheet = style.Sheet(wide, 7.7, tensor.title, tensor.subtitle)
    top, high = 1.2, 1.45
    if tensor.patch.size:
        low, most, _, signed = numbers.limits(tensor.patch)
        cmap = style.diverging() if signed else style.sequential()
        with np.errstate(invalid='ignore', over='ignore'):
            errors = [r.patch - tensor.patch for r in rounded]
        # each format has its own scale: on a shared one, the errors of a coarse format would hide all others
        worst = [float(np.abs(error[np.isfinite(error)]).max(initial=0)) for error in errors]
        for i in range(columns):
            x = 0.85 + i * pitch
            box = x, top, side, high
            fmt = rounded[i - 1].format if i else None
            sheet.heading(*box[:3], style.shortened(fmt, int(side / 0.085)) if i else 'x',
                          color=style.color_of(fmt) if i else style.INK)
            sheet.image(*box, style.painted(rounded[i - 1].patch if i else tensor.patch, low, most, cmap, tensor.patch_cover))
            _window_ticks(sheet, box, tensor, i == 0, i == 0)
            if i:
                box = x, top + high + 0.16, side, high
                most_error = worst[i - 1]
                sheet.image(*box, style.painted(errors[i - 1], -most_error, most_error, style.diverging(), tensor.patch_cover))
                sheet.text(x + side, top + 2 * high + 0.42, f'\N{PLUS-MINUS SIGN} {style.number(most_error)}', fontsize=7.5,
                           color=style.GREY, ha='right')
                _window_ticks(sheet, box, tensor, False, True)
        bar = 0.95, side - 0.55
        sheet.text(0.85, top + high + 0.55, 'values', fontsize=8, color=style.GREY)
        style.color_bar(sheet, bar[0] + 0.1, top + high + 0.62, bar[1], cmap, low, most, False)
        sheet.text(0.85, top + high + 1.1, f'errors q {style.MINUS} x', fontsize=8, color=style.GREY)
        style.color_bar(sheet, bar[0] + 0.1, top + high + 1.17, bar[1], style.diverging(), -1, 1, False, _share_of_largest)
    else:
        sheet.text(0.85, top + 0.3, 'no value', color=style.GREY)
    if rounded:
        y, tall = top + 2 * high + 0.95, 2.0
        _draw_sqnr(sheet.axes(1.15, y, 2.45, tall, 'SQNR'), rounded)
        _draw_relative(sheet.axes(4.55, y, 2.75, tall, 'Relative error per value',
                                  'of a sample' if tensor.is_sampled else ''), rounded)
        _table(sheet, 7.7, y - 0.09, wide - 7.7 - 0.35, tall, rounded)
    return sheet


def _share_of_largest(value):
    """Label the colour bar of errors, whose ends are the largest error of each format."""
    return '0' if not value else f'{style.MINUS if value < 0 else ""}largest'


def _window_ticks(sheet, box, tensor, with_rows, with_columns):
    (row, column), (rows, columns) = tensor.window, tensor.patch.shape
    sheet.ticks(*box, 'y', '', _element_ticks(rows, 4, with_rows, row), size=7.5)
    sheet.ticks(*box, 'x', '', _element_ticks(columns, 4, with_columns, column), size=7.5)


def _draw_sqnr(axes, rounded):
    values = [r.statistics['sqnr_db'] for r in rounded]
    finite = [value for value in values if value is not None and math.isfinite(value)]
    most, least = max([*finite, 10]), min([*finite, 0])
    for i, (r, value) in enumerate(zip(rounded, values, strict=True)):
        tint = style.color_of(r.format)
        length = most if value == math.inf else value if value is not None and math.isfinite(value) else 0
        axes.barh(i, length, height=0.62, color=tint, alpha=0.35 if value == math.inf else 1, linewidth=0)
        axes.text(max(length, 0) + 0.02 * (most - least), i, style.decibels(value), va='center', fontsize=8.5, color=style.INK)
    axes.set_xlim(min(least * 1.15, 0), most * 1.32)
    axes.set_ylim(len(rounded) - 0.4, -0.6)
    style.scale(axes, 'x', 'SQNR, dB (6 dB: one bit)', most=5)
    style.scale(axes, 'y', '', range(len(rounded)), [style.shortened(r.format, 12) for r in rounded], grid=False)


def _draw_relative(axes, rounded):
    drawn = False
    for r in rounded:
        edges, shares = r.relative
        if shares.any():
            drawn = True
            axes.stairs(100 * shares, edges, color=style.color_of(r.format), linewidth=1.4, baseline=None)
    if not drawn:
        return _nothing(axes, 'no error' if any(r.statistics['sqnr_db'] == math.inf for r in rounded) else 'no finite value')
    top = max(100 * r.relative[1].max() for r in rounded)
    axes.set_ylim(0, top * 1.12)
    edges = rounded[0].relative[0]
    axes.set_xlim(edges[0], edges[-1])
    ticks = range(int(edges[0]), int(edges[-1]) + 1, 4)
    style.scale(axes, 'x', f'|(q {style.MINUS} x) / x|', ticks, [style.power(tick) for tick in ticks])
    style.scale(axes, 'y', '% of values', most=5)
    return None


_COLUMNS = (('cosine', 'cosine', lambda v: '' if v is None else f'{v:.6f}'),
            ('max |q\N{MINUS SIGN}x|', 'max_abs_error', style.number),
            ('underflow', 'underflow_pct', style.percent), ('subnormal', 'subnormal_pct', style.percent),
            ('saturated', 'saturation_pct', style.percent))


def _table(sheet, x, y, width, height, rounded):
    """Draw a table of error measures with a row per format."""
    pitch = min(height / (len(rounded) + 1), 0.36)
    ends = [x + width * share for share in (0.37, 0.56, 0.70, 0.85, 1.0)]
    for (label, _, _), end in zip(_COLUMNS, ends, strict=True):
        sheet.text(end, y, label, fontsize=7.5, color=style.GREY, ha='right')
    for i, r in enumerate(rounded):
        below = y + (i + 1) * pitch
        sheet.text(x, below, style.shortened(r.format, 9), fontsize=8.5, color=style.color_of(r.format))
        for (_, key, text), end in zip(_COLUMNS, ends, strict=True):
            sheet.text(end, below, text(r.statistics[key]) or '\N{EM DASH}', fontsize=8, color=style.INK, ha='right')
    overflow = [f'{r.format}: {r.statistics["overflow"]:,}' for r in rounded if r.statistics['overflow']]
    if overflow:
        sheet.text(x, y + (len(rounded) + 1) * pitch, style.shortened(f'overflow: {", ".join(overflow)}', 70),
                   fontsize=8, color=style.BROKEN)


DRAW = {'distributions': draw_distribution, 'heatmaps': draw_heatmap, 'comparisons': draw_comparison}
