"""Plots of a whole dump: the quick analysis, and statistics by layer and step."""
import dataclasses
import math

import numpy as np

from pyops.inspect import statistics
from pyops.inspect.pictures import numbers, style

ROWS = 40                   # rows per page of statistics
_MAX_STEPS = 6              # steps per page of statistics
_MAX_CURVES = 18            # runs in the plot of the training
_MAX_HEADS = 32             # columns of the table of entropy
_MAX_COLUMNS = 12           # steps in the table of NaN and infinities


@dataclasses.dataclass(frozen=True)
class Record:
    """The metadata and statistics of one tensor."""
    layer: str
    layer_type: str
    operation: str
    name: str
    step: int
    time: int | None
    format: str             # to which the run rounded it, or 'fp32'
    shape: tuple
    file: str
    statistics: dict        # of pyops.inspect.statistics.describe
    counts: np.ndarray      # of numbers.binades
    losses: dict            # format -> pyops.inspect.statistics.quantization
    place: str = ''         # distinguishes it from the other tensors of its layer: pyops.inspect.logs.places
    tags: dict = dataclasses.field(default_factory=dict)        # {column of tensor_stats.txt: text}
    entropy: tuple = ()     # of each head of attention weights: pyops.inspect.statistics.attention_entropy

    @property
    def kind(self):
        return style.kind_of(self.operation, self.name)

    @property
    def row(self):
        """The layer, and the place if there is one: the name of a curve."""
        return f'{self.layer} ({self.place})' if self.place else self.layer

    @property
    def broken(self):
        """The number of NaN and infinities."""
        return self.statistics['nan'] + self.statistics['inf']

    @property
    def title(self):
        """Such as 'step 10, encoder.0.q backward grad_weight', with the time step and the place if they apply."""
        time = '' if self.time is None else f', t {self.time}'
        return style.plain(f'step {self.step}, {self.row} {self.operation} {self.name}{time}')


# ---- data --------------------------------------------------------------------------------------------------------------

def totals(records):
    """Return {kind: counts of numbers.binades} and the numbers of values, zeros, NaN and infinities of all tensors."""
    counts = {kind: np.zeros((2, 256), np.int64) for kind in style.KINDS}
    for record in records:
        counts[record.kind] += record.counts
    return (counts, *(sum(record.statistics[key] for record in records) for key in ('count', 'zeros', 'nan', 'inf')))


def shares(records, key):
    """Return [(value of key, number of records)], most frequent first."""
    counts = {}
    for record in records:
        counts[key(record)] = counts.get(key(record), 0) + 1
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def sqnr(records, text):
    """Return the SQNR in dB of a format over several tensors, from the total energies; None if unknown."""
    measures = [record.losses[text] for record in records if text in record.losses]
    signal, noise = (sum(measure[key] for measure in measures) for key in ('sum_x2', 'sum_e2'))
    if not measures or math.isnan(signal) or math.isnan(noise):
        return None
    return statistics.decibels(signal, noise)


def rms(records):
    """Return the root mean square of several tensors, None without finite values."""
    pairs = [(record.statistics['rms'], record.statistics['count'] - record.statistics['nan'] - record.statistics['inf'])
             for record in records if record.statistics['rms'] is not None]
    count = sum(n for _, n in pairs)
    return math.sqrt(sum(value * value * n for value, n in pairs) / count) if count else None


def amax(records):
    return max((record.statistics['amax'] for record in records if record.statistics['amax'] is not None), default=None)


def by(records, key):
    """Return {key(record): records}, in order of first appearance."""
    groups = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


FLOWS = {'at the output': ('grad_output',), 'at the input': ('grad_input', 'grad_query', 'grad_key', 'grad_value'),
         'of the weight': ('grad_weight',)}


def gradient_flow(records):
    """Return the layers in forward order, the steps, and {key of FLOWS: rms (layers, steps), NaN if unknown}."""
    backward = [record for record in records if record.operation == 'backward']
    known = {record.row for record in backward}
    forward = [record.row for record in records if record.operation == 'forward' and record.row in known]
    layers = list(dict.fromkeys([*forward, *(record.row for record in reversed(backward))]))
    steps = sorted({record.step for record in backward})
    flows = {flow: np.full((len(layers), len(steps)), np.nan) for flow in FLOWS}
    for (layer, step), group in by(backward, lambda record: (record.row, record.step)).items():
        for flow, names in FLOWS.items():
            value = rms([record for record in group if record.name in names])
            flows[flow][layers.index(layer), steps.index(step)] = np.nan if value is None else value
    return layers, steps, flows


def formats_of(records):
    """Return the texts of the formats with error measures."""
    return list(dict.fromkeys(text for record in records for text in record.losses))


def first_losses(records, texts):
    """Return lines about the first tensor with NaN or infinities, and the first that overflows in each format.

    records: in the order in which the run wrote them
    """
    lines = []
    for record in (record for record in records if record.broken):
        lines.append(f'first NaN or infinity: {record.title}: {record.statistics["nan"]:,} NaN and '
                     f'{record.statistics["inf"]:,} infinities in {record.statistics["count"]:,} values')
        break
    for text in texts:
        for record in (record for record in records if record.losses.get(text, {}).get('overflow')):
            lines.append(f'first overflow in {text}: {record.title}: {record.losses[text]["overflow"]:,} of '
                         f'{record.statistics["count"]:,} values')
            break
    return lines


def some_steps(steps, most=_MAX_STEPS):
    """Return at most `most` evenly spaced steps, with the first and the last."""
    return [steps[i] for i in sorted({round(i) for i in np.linspace(0, len(steps) - 1,
                                                                    min(most, len(steps)))})] if steps else []


# ---- the quick analysis ------------------------------------------------------------------------------------------------

def draw_quick_analysis(records, title, subtitle, skipped=0):
    """Return a Sheet with four panels: all values, and the tensors by format, layer type and operation."""
    counts, values, zeros, nan, inf = totals(records)
    sheet = style.Sheet(12, 7.55, title, subtitle)
    cards = [('tensors', f'{len(records):,}'), ('layers', f'{len({r.layer for r in records}):,}'),
             ('steps', f'{len({r.step for r in records}):,}'), ('values', f'{values:,}'),
             ('zeros', style.percent(100 * zeros / max(values, 1))), ('NaN', f'{nan:,}'), ('Inf', f'{inf:,}'),
             ('files skipped', f'{skipped:,}')]
    for i, (label, value) in enumerate(cards):
        alarm = label in ('NaN', 'Inf', 'files skipped') and value != '0'
        sheet.text(0.35 + i * 1.42, 0.98, label, fontsize=7.5, color=style.GREY)
        sheet.text(0.35 + i * 1.42, 1.21, value, fontsize=11.5, color=style.BROKEN if alarm else style.INK)
    _draw_all_values(sheet.axes(0.85, 1.8, 10.8, 2.75, 'All values, by sign and magnitude'), counts)
    groups = [('Tensors by format', shares(records, lambda r: r.format), lambda name, i: style.color_of(name)),
              ('Tensors by layer type', shares(records, lambda r: r.layer_type), lambda name,
               i: style.NAME_COLORS[(5, 3, 4, 7, 2, 8, 6, 1)[i]]),
              ('Tensors by operation', shares(records, lambda r: r.operation),
               lambda name, i: style.KINDS['gradients' if name == 'backward' else 'activations'])]
    for i, (heading, parts, color) in enumerate(groups):
        _draw_bars(sheet, 0.6 + i * 3.85, 5.55, heading, parts, color)
    return sheet


def _draw_all_values(axes, counts):
    total = sum(count.sum() for count in counts.values())
    span = numbers.span_of(sum(counts.values()))
    finite = {kind: count[:, :numbers.BROKEN_BIN] for kind, count in counts.items()}
    binades = sum(finite.values()).sum(0)
    if span is None:
        axes.text(0.5, 0.5, 'no finite nonzero value', ha='center', va='center', color=style.GREY, transform=axes.transAxes)
        return
    # The axis omits the smallest 0.1 % of the values, whose exponents may go far down.
    cumulative = np.cumsum(binades)
    low, high = int(np.searchsorted(cumulative, 0.001 * binades.sum(), 'right')), span[1] + 127
    hidden = 100 * (cumulative[low - 1] if low else 0) / binades.sum()
    width = high - low + 1
    bottom = np.zeros(2 * width + 1)
    edges = np.arange(-width - 0.5, width + 1.5)
    for kind, count in finite.items():
        part = 100 * count[:, low:high + 1] / total
        stack = np.concatenate([part[1][::-1], [0], part[0]])                           # negative | 0 | positive
        if stack.any():
            axes.stairs(bottom + stack, edges, baseline=bottom, fill=True, color=style.KINDS[kind], alpha=0.85, linewidth=0)
        bottom = bottom + stack
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, bottom.max() * 1.08)
    step = next(s for s in (1, 2, 4, 5, 10, 20, 40) if width / s <= 8)
    exponents = [e for e in range(-160, 161, step) if low <= e + 127 <= high]
    positions = [e + 127 - low + 0.5 for e in exponents]
    if positions and positions[0] < width / 30:                 # its label would overlap the label of 0
        del exponents[0], positions[0]
    style.scale(axes, 'x',
                'value' + (f'     (not shown: {style.percent(hidden)} of the values, below {style.power(low - 127)})' if hidden
                           else ''),
                [-position for position in positions[::-1]] + [0] + positions,
                [style.MINUS + style.power(e) for e in exponents[::-1]] + ['0'] + [style.power(e) for e in exponents])
    style.scale(axes, 'y', '% of the values', most=5)
    x, y, width, _ = axes.inches
    for i, kind in enumerate(reversed(style.KINDS)):
        axes.sheet.text(x + width - 1.15 * i, y - 0.09, f'\N{BLACK SQUARE} {kind}', color=style.KINDS[kind], fontsize=9,
                        ha='right')


def _draw_bars(sheet, x, y, heading, parts, color_of):
    """Draw a bar per part with its number and its share.  More than eight parts are merged into 'others'."""
    if len(parts) > 8:
        parts = [*parts[:7], ('others', sum(n for _, n in parts[7:]))]
    total, most = sum(n for _, n in parts), max(n for _, n in parts)
    sheet.text(x, y - 0.15, heading, fontsize=9.5)
    sheet.text(x + 3.5, y - 0.15, f'{total:,}', fontsize=8.5, color=style.GREY, ha='right')
    for i, (name, n) in enumerate(parts):
        down, length = y + 0.15 + i * 0.22, 1.05 * n / most
        color = style.GREY if name == 'others' else color_of(name, i)
        sheet.text(x, down, style.shortened(name, 13), fontsize=8.5, va='center')
        sheet.line(x + 1.1, down, x + 1.1 + length, down, color, 8)
        sheet.text(x + 1.22 + length, down, f'{n:,}  {100 * n / total:.0f} %', fontsize=8.5, color=style.GREY, va='center')


# ---- statistics by layer and step --------------------------------------------------------------------------------------

def draw_training(curves):
    """Return a Sheet with loss and gradient norm of every training step.  curves: of logs.curves."""
    count = sum(map(len, curves.values()))
    names = list(curves)[:_MAX_CURVES]
    more = f', {len(names)} of {len(curves)} runs' if len(names) < len(curves) else ''
    sheet = style.Sheet(12, 4.6 + 0.22 * len(names[1:]), 'Training', f'{count:,} steps{more}')
    for i, (key, label) in enumerate((('loss', 'loss'), ('norm', 'gradient norm'))):
        axes = sheet.axes(1.0 + i * 5.7, 1.1, 4.8, 2.8, label.capitalize())
        known = []
        for j, name in enumerate(names):
            points = np.array([(line['step'], line[key]) for line in curves[name] if isinstance(line.get(key), int | float)
                               and math.isfinite(line[key])], np.float64).reshape(-1, 2)
            known.append(points[:, 1])
            color = style.NAME_COLORS[i if len(names) == 1 else j % len(style.NAME_COLORS)]
            axes.plot(*points.T, color=color, linewidth=1.2, linestyle='-' if j < len(style.NAME_COLORS) else '--',
                      marker='o' if len(points) < 40 else '', markersize=3)
        values = np.concatenate(known)
        if not len(values):
            axes.text(0.5, 0.5, 'not recorded', ha='center', va='center', color=style.GREY, transform=axes.transAxes)
            continue
        if key == 'norm' and (values > 0).all() and values.max() > 20 * values.min():
            axes.set_yscale('log')
        axes.margins(y=0.1)
        axes.autoscale_view()
        style.scale(axes, 'x', 'step')
        style.scale(axes, 'y', label)
    for j, name in enumerate(names if len(names) > 1 else ()):
        sheet.text(1.0, 4.55 + 0.22 * j, '\N{BLACK SQUARE}', color=style.NAME_COLORS[j % len(style.NAME_COLORS)], fontsize=10)
        sheet.text(1.2, 4.55 + 0.22 * j, style.shortened(name, 100), fontsize=8.5)
    return sheet


def draw_gradient_flow(records):
    """Return Sheets of ROWS layers each with the rms of the gradients of output, input and weight, one line per step."""
    layers, steps, flows = gradient_flow(records)
    drawn = {flow: values for flow, values in flows.items() if (values > 0).any()}
    sheets, shown = [], some_steps(steps)
    if not drawn:
        return []
    low, high = (operation([operation(values[values > 0]) for values in drawn.values()]) for operation in (np.min, np.max))
    for start in range(0, len(layers), ROWS):
        part = layers[start:start + ROWS]
        room = _label_width(part)
        sheet, top = _sheet_of_rows(len(part), room + len(drawn) * 3.5 + 0.3, 'Gradient flow',
                                    _page(start, len(layers), 'layers, first at the top') + _steps_note(steps, shown))
        for i, (flow, values) in enumerate(drawn.items()):
            axes = sheet.axes(room + i * 3.5, top, 3.2, len(part) * _PITCH, f'Gradient {flow}, rms')
            axes.set_xscale('log')
            axes.set_xlim(low / 1.6, high * 1.6)
            axes.set_ylim(len(part) - 0.5, -0.5)
            for j, step in enumerate(shown):
                y = values[start:start + ROWS, steps.index(step)]
                known = np.flatnonzero(y > 0)
                axes.plot(y[known], known, color=_step_color(j, len(shown)), linewidth=1.1, marker='o', markersize=4,
                          label=f'step {step}')
            style.scale(axes, 'x', '', most=5)
            style.scale(axes, 'y', '', range(len(part)), [_row_label(layer) for layer in part] if i == 0 else [''] * len(part))
        _legend_of_steps(sheet, room, top, shown)
        sheets.append(sheet)
    return sheets


def draw_magnitudes(records):
    """Return Sheets of ROWS tensors each with a line from rms to the largest magnitude for each step."""
    rows = [(label, group) for label, group in by(records, _tensor).items() if any(r.statistics['amax'] for r in group)]
    sizes = [value for _, group in rows for r in group for value in (r.statistics['rms'], r.statistics['amax']) if value]
    if not sizes:
        return []
    steps = sorted({record.step for record in records})
    shown, sheets = some_steps(steps), []
    low, high = math.floor(math.log2(min(sizes))) - 1, math.ceil(math.log2(max(sizes))) + 1
    ticks = _binary_ticks(low, high)
    for start in range(0, len(rows), ROWS):
        part = rows[start:start + ROWS]
        room = _label_width([label for label, _ in part])
        sheet, top = _sheet_of_rows(len(part), room + 8.3, 'Magnitudes',
                                    _page(start, len(rows), 'tensors') + _steps_note(steps, shown))
        axes = sheet.axes(room, top, 8.0, len(part) * _PITCH)
        axes.set_xlim(low, high)
        axes.set_ylim(len(part) - 0.5, -0.5)
        for i, (_, group) in enumerate(part):
            for j, step in enumerate(shown):
                of_step = [r for r in group if r.step == step]
                ends = rms(of_step), amax(of_step)
                if all(ends):
                    y = i + (j - (len(shown) - 1) / 2) * 0.7 / len(shown)
                    color = _step_color(j, len(shown)) if len(shown) > 1 else style.KINDS[group[0].kind]
                    a, b = map(math.log2, ends)
                    axes.plot((a, b), (y, y), color=color, linewidth=1.4, solid_capstyle='butt')
                    axes.plot(a, y, color=color, marker='o', markersize=3.5, markeredgewidth=0)
                    axes.plot(b, y, color=color, marker='|', markersize=5, markeredgewidth=1.4)
        style.scale(axes, 'x', '|x|     dot: rms, bar: largest', ticks, [style.power(tick) for tick in ticks])
        style.scale(axes, 'y', '', range(len(part)), [_row_label(label) for label, _ in part], size=7.5)
        _legend_of_steps(sheet, room, top, shown)
        sheets.append(sheet)
    return sheets


def draw_sqnr(records, texts):
    """Return Sheets of ROWS tensors each with the SQNR of each format over all steps, as a coloured table."""
    rows = [(label, [sqnr(group, text) for text in texts]) for label, group in by(records, _tensor).items()]
    finite = [value for _, values in rows for value in values if value is not None and math.isfinite(value)]
    if not texts or not rows:
        return []
    low, high = min([*finite, 0]), max([*finite, 10])

    def level(value):
        return 1 if value == math.inf else 0 if value is None or value == -math.inf else (value - low) / (high - low)

    def text_of(value):
        return ('exact' if value == math.inf else 'overflow' if value == -math.inf else style.MINUS if value is None
                else f'{value:.1f}'.replace('-', style.MINUS))
    return _tables('SQNR by format', 'tensors', ', dB, over all steps', rows,
                   [(style.shortened(text, 15), style.color_of(text)) for text in texts], level, text_of, 1.15)


def draw_entropy(records):
    """Return Sheets of ROWS layers each with the entropy of each head, at the first and the last step, as coloured tables."""
    weights = [record for record in records if record.entropy]
    sheets = []
    for step in dict.fromkeys(some_steps(sorted({record.step for record in weights}), 2)):
        rows = []
        for label, group in by([record for record in weights if record.step == step], lambda record: record.row).items():
            heads = max(len(record.entropy) for record in group)
            known = np.full((len(group), heads), np.nan)
            for i, record in enumerate(group):
                known[i, :len(record.entropy)] = record.entropy
            counts = np.isfinite(known).sum(0)
            sums = np.nansum(known, 0)
            rows.append((label, [sums[i] / counts[i] if counts[i] else None for i in range(min(heads, _MAX_HEADS))]))
        across = max(len(values) for _, values in rows)
        rows = [(label, values + [None] * (across - len(values))) for label, values in rows]
        sheets += _tables('Entropy of attention', 'layers', f', step {step}; 0: one key, 1: all keys alike', rows,
                          [(f'head {i}', style.INK) for i in range(across)], lambda value: value or 0,
                          lambda value: style.MINUS if value is None else f'{value:.2f}', 0.62)
    return sheets


def draw_broken(records):
    """Return Sheets of ROWS layers each with the number of NaN and infinities at each step, the first layer with any on top."""
    broken = [record for record in records if record.broken]
    if not broken:
        return []
    first, steps = broken[0].step, sorted({record.step for record in records})
    shown = sorted({first, *some_steps([step for step in steps if step != first], _MAX_COLUMNS - 1)})
    layers = by(records, lambda record: record.row)
    rows = []
    for label in dict.fromkeys(record.row for record in broken):
        groups = by(layers[label], lambda record: record.step)
        rows.append((label, [sum(record.broken for record in groups[step]) if step in groups else None for step in shown]))
    most = max(value or 0 for _, values in rows for value in values)
    return _tables('NaN and infinities', 'layers', f', first in {style.shortened(broken[0].title, 90)}', rows,
                   [(f'step {step}', style.INK) for step in shown],
                   lambda value: 0.25 + 0.75 * math.log1p(value) / math.log1p(most) if value else 0,
                   lambda value: style.MINUS if value is None else f'{value:,}', 0.85)


def _tables(title, items, note, rows, columns, level, text_of, wide):
    """Return Sheets of ROWS rows each with a coloured table.

    rows: [(label, values)];  columns: [(heading, colour)];  level(value): from 0 to 1 on the colour map
    text_of(value): in its cell;  wide: inches per column
    """
    cmap, sheets = style.sequential(), []
    for start in range(0, len(rows), ROWS):
        part = rows[start:start + ROWS]
        room = _label_width([label for label, _ in part])
        sheet, top = _sheet_of_rows(len(part), max(room + wide * len(columns) + 0.3, 6.5), title,
                                    _page(start, len(rows), items) + note)
        tall = len(part) * _PITCH
        colors = cmap(0.85 * np.array([[level(value) for value in values] for _, values in part], np.float64))
        sheet.image(room, top, wide * len(columns), tall, (colors * 255).round().astype(np.uint8))
        for j in range(1, len(columns)):
            sheet.line(room + j * wide, top, room + j * wide, top + tall, style.PAPER, 1)
        for i in range(1, len(part)):
            sheet.line(room, top + i * _PITCH, room + wide * len(columns), top + i * _PITCH, style.PAPER, 0.5)
        for i, (_, values) in enumerate(part):
            for j, value in enumerate(values):
                sheet.text(room + (j + 0.5) * wide, top + (i + 0.5) * _PITCH, text_of(value), ha='center', va='center',
                           fontsize=7.5, color=style.readable_on(colors[i, j]))
        for j, (heading, color) in enumerate(columns):
            sheet.text(room + (j + 0.5) * wide, top - 0.1, heading, fontsize=8.5, color=color, ha='center')
        sheet.ticks(room, top, wide * len(columns), tall, 'y', '', [((i + 0.5) / len(part), _row_label(label)) for i,
                                                                    (label, _) in enumerate(part)],
                    size=7.5)
        sheets.append(sheet)
    return sheets


def draw_layer(layer, records, texts):
    """Return a Sheet of one layer: largest magnitude, rms and SQNR in each format of its tensors, over the steps."""
    names = by(records, lambda record: record.name)
    steps = sorted({record.step for record in records})
    kinds = ', '.join(dict.fromkeys(record.layer_type for record in records))
    period = f'step {steps[0]}' if len(steps) == 1 else f'{len(steps)} steps, {steps[0]} to {steps[-1]}'
    place = f'  \N{MIDDLE DOT}  {records[0].place}' if records[0].place else ''
    titles = style.plain(layer), f'{kinds}{place}  \N{MIDDLE DOT}  {period}'
    return _layer_at_a_step(*titles, names, texts) if len(steps) == 1 else _layer_over_steps(*titles, names, texts, steps)


def _layer_at_a_step(title, subtitle, names, texts):
    """Return a Sheet with a row per tensor: a line from rms to the largest, and a dot for the SQNR in each format."""
    tall = len(names) * 0.3
    sheet = style.Sheet(12, 1.45 + tall + 0.75, title, subtitle)
    room, wide = 1.6, 4.6
    axes = sheet.axes(room, 1.3, wide, tall, 'From root mean square to the largest |x|')
    ends = {name: (rms(group), amax(group)) for name, group in names.items()}
    sizes = [value for pair in ends.values() for value in pair if value]
    axes.set_ylim(len(names) - 0.5, -0.5)
    labels = [style.shortened(name, 18) for name in names]
    if sizes:
        low, high = math.floor(math.log2(min(sizes))) - 1, math.ceil(math.log2(max(sizes))) + 1
        axes.set_xlim(low, high)
        for i, (name, pair) in enumerate(ends.items()):
            if all(pair):
                color = style.KINDS[names[name][0].kind]
                a, b = map(math.log2, pair)
                axes.plot((a, b), (i, i), color=color, linewidth=2, solid_capstyle='butt')
                axes.plot(a, i, color=color, marker='o', markersize=5, markeredgewidth=0)
                axes.plot(b, i, color=color, marker='|', markersize=9, markeredgewidth=2)
        ticks = _binary_ticks(low, high)
        style.scale(axes, 'x', '|x|     dot: rms, bar: largest', ticks, [style.power(tick) for tick in ticks])
    style.scale(axes, 'y', '', range(len(names)), labels)
    axes = sheet.axes(room + wide + 0.4, 1.3, wide, tall, 'Signal-to-quantization-noise ratio')
    axes.set_ylim(len(names) - 0.5, -0.5)
    values = {text: [sqnr(group, text) for group in names.values()] for text in texts}
    finite = [value for column in values.values() for value in column if value is not None and math.isfinite(value)]
    axes.set_xlim(min([*finite, 0]) - 1, max([*finite, 10]) * 1.06)
    for text, column in values.items():
        points = [(value, i) for i, value in enumerate(column) if value is not None and math.isfinite(value)]
        if points:
            axes.plot(*zip(*points, strict=True), color=style.color_of(text), linestyle='', marker='o', markersize=6.5,
                      alpha=0.9,
                      markeredgewidth=0)
    style.scale(axes, 'x', 'SQNR, dB (6 dB: one bit)')
    style.scale(axes, 'y', '', range(len(names)), [''] * len(names))
    _legend_of_formats(sheet, room + wide + 0.4, 1.0, texts)
    return sheet


def _layer_over_steps(title, subtitle, names, texts, steps):
    """Return a Sheet with magnitudes of all tensors over the steps, and per tensor the SQNR in each format."""
    across = 4
    down = -(-len(names) // across) if texts else 0
    sheet = style.Sheet(12, 4.75 + down * 2.15 + (0.3 if down else 0), title, subtitle)
    for i, (heading, measure) in enumerate((('Largest |x|', amax), ('Root mean square', rms))):
        axes = sheet.axes(0.95 + i * 4.75, 1.1, 4.0, 2.75, heading)
        drawn = False
        for j, (_, group) in enumerate(names.items()):
            points = [(step, value) for step, of_step in sorted(by(group, lambda r: r.step).items())
                      if (value := measure(of_step))]
            if points:
                drawn = True
                axes.plot(*zip(*points, strict=True), color=style.NAME_COLORS[j % 9], linewidth=1.2, marker='o', markersize=3.5,
                          linestyle='-' if j < 9 else '--')
        if drawn:
            axes.set_yscale('log')
            low, high = axes.get_ylim()
            if high < 100 * low:                # span two powers of ten, so that there are ticks
                middle = math.sqrt(low * high)
                low, high = 10 ** math.floor(math.log10(middle) - 0.5), 10 ** math.ceil(math.log10(middle) + 0.5)
            axes.set_ylim(low, high)
            _step_axis(axes, steps)
            style.scale(axes, 'y', '', most=5)
    for j, name in enumerate(names):
        y = 1.2 + j * min(0.21, 2.7 / len(names))
        sheet.text(10.1, y, '\N{BLACK SQUARE}', color=style.NAME_COLORS[j % 9], fontsize=10)
        sheet.text(10.3, y, style.shortened(name, 20), fontsize=8.5)
    for j, (name, group) in enumerate(names.items() if texts else ()):
        row, column = divmod(j, across)
        axes = sheet.axes(0.95 + column * 2.8, 5.1 + row * 2.15, 2.3, 1.35, f'SQNR of {style.shortened(name, 22)}')
        values = []
        for text in texts:
            points = [(step, value) for step, of_step in sorted(by(group, lambda r: r.step).items())
                      if (value := sqnr(of_step, text)) is not None and math.isfinite(value)]
            values += [value for _, value in points]
            if points:
                axes.plot(*zip(*points, strict=True), color=style.color_of(text), linewidth=1.2, marker='o', markersize=3)
        if not values:
            axes.text(0.5, 0.5, 'no finite SQNR', ha='center', va='center', fontsize=8, color=style.GREY,
                      transform=axes.transAxes)
            continue
        axes.set_ylim(min(0, *values) * 1.1, max(10, *values) * 1.12)
        _step_axis(axes, steps)
        style.scale(axes, 'y', 'dB' if column == 0 else '', most=4)
    _legend_of_formats(sheet, 0.95, 4.6, texts)
    return sheet


def _legend_of_formats(sheet, x, y, texts):
    for text in texts:
        sheet.key(x, y, text, style.color_of(text), fontsize=8.5)
        x += 0.45 + 0.085 * len(text)


_PITCH = 0.21               # inches per row
_LABEL = 46                 # most characters of a row label


def _tensor(record):
    place = f'  {record.place}' if record.place else ''
    return f'{style.plain(record.layer)}  {style.plain(record.name)}{place}'


def _row_label(text):
    return style.shortened(text, _LABEL)


def _label_width(labels):
    return 0.55 + 0.075 * min(max(map(len, labels)), _LABEL)


def _page(start, count, items):
    return f'{count:,} {items}' if count <= ROWS else f'{items} {start + 1} to {min(start + ROWS, count)} of {count:,}'


def _steps_note(steps, shown):
    if len(steps) == 1:
        return f', step {steps[0]}'
    return f', {len(shown)} of {len(steps)} steps' if len(shown) < len(steps) else ''


def _sheet_of_rows(rows, width, title, subtitle):
    top = 1.25
    return style.Sheet(max(width, 6), top + max(rows, 2) * _PITCH + 0.65, title, subtitle), top


def _step_color(index, count):
    """Return the colour of a step, from pale for the first to dark for the last."""
    return style.sequential()(0.35 + 0.6 * (index / (count - 1) if count > 1 else 0.5))


def _legend_of_steps(sheet, x, top, steps):
    for j, step in enumerate(steps if len(steps) > 1 else ()):
        sheet.key(x + j * 1.0, top - 0.32, f'step {step}', _step_color(j, len(steps)), fontsize=8)


def _binary_ticks(low, high):
    step = next(s for s in (1, 2, 4, 5, 10, 20, 40, 80) if (high - low) / s <= 12)
    return [tick for tick in range(-160, 161, step) if low <= tick <= high]


def _step_axis(axes, steps):
    low, high = steps[0], steps[-1]
    margin = 0.05 * (high - low) or 1
    axes.set_xlim(low - margin, high + margin)
    style.scale(axes, 'x', 'step', steps if len(steps) <= 4 else None, [str(step) for step in steps] if len(steps) <= 4
                else None, most=4)
