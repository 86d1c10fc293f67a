"""python -m pyops inspect products: the errors of the products of linear layers in every pair of formats, worst first.

Saved tensors are not rounded.  Each product is computed in float64 from the saved operands and from their rounded copies, so
the difference is the error of the formats alone.  docs/inspect.md describes the measures.
"""
from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import sys
from collections import deque
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops import backend, formats
from pyops.errors import UserError, printable
from pyops.inspect.choice import select
from pyops.inspect.compare import TOP, parse_formats
from pyops.inspect.known import Joint
from pyops.inspect.logs import TAGS, Entry, LogError, Logs
from pyops.inspect.pieces import PIECE, has_one_scale
from pyops.inspect.readers import flat
from pyops.inspect.statistics import decibels
from pyops.inspect.tables import Column, cut, cut_name, finite, has_runs, name_of, number, print_skipped, worst_first, write
from pyops.inspect.workers import is_worth_processes, workers
from pyops.quantization import can_multiply
from pyops.training import watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pyops.formats import Format
    from pyops.inspect.known import JointSlot
    from pyops.inspect.workers import Map

# product -> operands of the recipe and their saved tensors
PRODUCTS = {'fwd': {'x': 'input', 'w': 'weight'}, 'dgrad': {'g': 'grad_output', 'w': 'weight'},
            'wgrad': {'g': 'grad_output', 'x': 'input'}}
NONE = 'none'                           # instead of a format: the operand is not rounded, as in a recipe
ROWS = 256

SORTS = {'sqnr': Column('SQNR dB', 'sqnr_db', False, '.2f'),
         'cosine': Column('cosine', 'cosine', False, '.5f'),
         'error': Column('max err/rms', 'max_error_rms', True, '.2e'),
         'overflow': Column('overflow', 'overflow', True, 'd')}

_TILE = 1 << 22                         # elements of an array in float64: 32 MiB


class Accumulation(NamedTuple):
    """How a product is summed: the arguments of backend.gemm_narrow."""
    bits: int
    promote: int = 0


class Pair(NamedTuple):
    """The saved operands of a product; several entries are the time steps of a recurrent layer."""
    product: str
    left: tuple[Entry, ...]
    right: tuple[Entry, ...]

    @property
    def entry(self) -> Entry:
        return self.left[0]


class Row(NamedTuple):
    """A product with its operands in two formats (None: not rounded).  statistics: as _Sums.statistics returns them."""
    pair: Pair
    formats: tuple[Format | None, Format | None]
    statistics: dict[str, Any]

    @property
    def recipe(self) -> str:
        """The formats as a recipe for --quant."""
        return ','.join(f'{self.pair.product}.{operand}={fmt or NONE}'
                        for operand, fmt in zip(PRODUCTS[self.pair.product], self.formats, strict=True))


class Total(NamedTuple):
    """All layers and steps of a product in a pair of formats: SQNR of all together, median and worst of single products."""
    product: str
    formats: tuple[Format | None, Format | None]
    count: int
    sqnr_db: float
    median_db: float
    worst: Row


def parse(text: str) -> list[Format | None]:
    """Parse names of formats separated by commas, where `none` is None.  FormatError for an unknown one."""
    names = [part.strip() for part in text.split(',')]
    found = list(parse_formats(','.join(name for name in names if name != NONE))) if set(names) != {NONE} else []
    return found + [None] * (NONE in names)


def find_pairs(entries: Iterable[Entry], products: Sequence[str] = tuple(PRODUCTS)) -> tuple[list[Pair], list[tuple[str, str]]]:
    """Return the Pairs of linear layers, and [(layer and product, reason)] of products without saved operands.

    Of several tensors with the same name in a layer and step, the first is used.  Time steps are joined.
    """
    groups: dict[tuple[Any, ...], dict[str, dict[int, Entry]]] = {}
    for entry in entries:
        if entry.layer_type == 'linear':
            tensors = groups.setdefault(_key(entry, entry.layer), {})
            tensors.setdefault(entry.name, {}).setdefault(-1 if entry.time is None else entry.time, entry)
    pairs, missing = [], {}
    for (layer, *place), tensors in groups.items():
        shared = groups.get((layer.partition('@')[0], *place), {})         # of a module that ran twice
        for product in products:
            names = PRODUCTS[product].values()
            found = [tensors.get(name) or (shared.get(name, {}) if name == 'weight' else {}) for name in names]
            absent = [name for name, one in zip(names, found, strict=True) if not one]
            if absent:
                if 'weight' in tensors or 'input' in tensors:
                    missing[f'{layer} {product}'] = f'no {" and no ".join(absent)} is saved'
            elif product != 'dgrad' or 'grad_input' in tensors or next(iter(found[0].values())).origin == 'file':
                times = sorted(set(found[0]).intersection(found[1])) if min(map(len, found)) > 1 else None
                left, right = ([one[time] for time in times or sorted(one)] for one in found)
                pairs.append(Pair(product, tuple(left), tuple(right)))
    return pairs, [(printable(name), reason) for name, reason in missing.items()]


def _key(entry, layer):
    """Return what the tensors of one use of a layer have in common.  Files without a manifest have the run's format."""
    return (layer, os.path.dirname(entry.relative_path), entry.training, entry.step, entry.component, entry.rank, entry.sample,
            entry.group, entry.format if entry.origin == 'file' else '')


class _Job(NamedTuple):
    """A product to compute, perhaps in another process.

    formats: () if it is known already;  masks: of the left operand's entries, () if its rows are summed over
    failure: why it cannot be computed, '' if it can
    """
    pair: Pair
    formats: tuple[Format | None, ...]
    limit: int
    masks: tuple[np.ndarray | None, ...]
    accumulation: Accumulation | None
    failure: str = ''


def measure(pairs: Iterable[Pair], fmts: Sequence[Format | None], rows: int = ROWS,
            mask_of: Callable[[Entry], np.ndarray | None] = lambda entry: None,
            progress: Callable[[Iterable[Any]], Iterable[Any]] = iter, accumulation: Accumulation | None = None,
            known: Joint | None = None, work: Map = map) -> tuple[list[Row], list[tuple[str, str]]]:
    """Compute every product in every pair of formats.  Return ([Row], [(file, reason)] of products that cannot be computed).

    Pairs of formats whose Hadamard transforms differ are left out: they do not cancel in the product, and no recipe has them.
    rows: most rows of a result that are computed, evenly spaced among those that are no padding; 0: all
    mask_of: returns an entry's padding, like Logs.mask
    accumulation: of the rounded products; None: sums in float64, as of the exact ones
    known: products of earlier commands; receives the others
    work: a map in order, such as the one of workers();  progress: wraps its results
    In memory are the lines of one product that are needed, in each format, and the operands.  A large operand whose rows are
    summed over is read row by row.  A format that depends on more than a line needs the whole operand and a rounded copy.
    """
    found: list[Row] = []
    skipped: list[tuple[str, str]] = []
    keys = [key for key in itertools.product(fmts, fmts) if can_multiply(*key) and (key != (None, None) or accumulation)]
    about = f'{list(map(str, fmts))} {rows} {accumulation}'
    sent: deque[tuple[Pair, Any, JointSlot | None]] = deque()            # what belongs to the results, in order

    def jobs() -> Iterator[_Job]:
        for pair in pairs:
            masks: tuple[np.ndarray | None, ...] = ()
            failure, slot, ready = '', None, None
            try:
                masks = tuple(map(mask_of, pair.left)) if pair.product != 'wgrad' else ()
            except LogError as error:
                failure = str(error)
            if known and not failure:
                slot = known.of((*pair.left, *pair.right), masks, f'{pair.product} {about}')
                ready = slot.find()
            sent.append((pair, ready, slot))
            yield _Job(pair, () if ready else tuple(fmts), rows, masks, accumulation, failure)

    for statistics, failure in progress(work(_measured, jobs())):
        pair, ready, slot = sent.popleft()
        if failure:
            skipped.append((pair.entry.relative_path, failure))
            continue
        if slot and not ready:
            slot.add(statistics)
        found += [Row(pair, key, one) for key, one in zip(keys, ready or statistics, strict=True)]
    return found, skipped


def _is_quick(job: _Job) -> bool:
    return bool(job.failure) or not job.formats


def _measured(job: _Job) -> tuple[list[dict[str, Any]], str]:
    """Return the statistics of each pair of formats, in order, and why they are missing, '' if they are not."""
    if _is_quick(job):
        return [], job.failure
    try:
        return [one.statistics() for one in _measure(job).values()], ''
    except LogError as error:
        return [], str(error)


def multiply(a: np.ndarray, b: np.ndarray, accumulation: Accumulation | None = None) -> np.ndarray:
    """Return the product of a (R, K) and b (K, C), float64.  With an Accumulation it is the product of backend.gemm_narrow,
    whose operands are float32."""
    if accumulation is None:
        return a @ b
    c = np.empty((len(a), b.shape[1]), np.float32)
    backend.gemm_narrow(c, np.asarray(a, np.float32), np.asarray(b, np.float32), **accumulation._asdict())
    return c.astype(np.float64)


def _accumulation(pair, default):
    """Return the Accumulation that one of two formats has as an option, else the default."""
    sums = next((fmt.sums for fmt in pair if fmt and fmt.sums), None)
    return Accumulation(**sums) if sums else default


def _measure(job):
    """Return {(format, format): _Sums}."""
    pair, fmts, limit, masks, accumulation, _ = job
    along_left, along_right = _sum_axes(pair, _shape(pair.left), _shape(pair.right))
    left, right = _matrix(pair.left, along_left), _matrix(pair.right, along_right)
    chosen = _chosen_rows(pair, left.shape[1 - along_left], limit, masks)
    parts = {fmt: _Lines(left, fmt, along_left).take(chosen) for fmt in fmts}                   # (rows, n), n is summed over
    exact_rows = _Lines(left, None, along_left).take(chosen).astype(np.float64)
    sums = {key: _Sums() for key in itertools.product(fmts, fmts)
            if can_multiply(*key) and (key != (None, None) or accumulation)}
    columns = right.shape[1 - along_right]
    width = max(1, _TILE // max(1, len(chosen), exact_rows.shape[1]))
    for fmt in fmts:
        exact_lines, lines = (_Lines(right, one, along_right) for one in (None, fmt))
        for first in range(0, columns, width):
            which = slice(first, min(first + width, columns))
            exact_part, part = (np.ascontiguousarray(one.take(which).T, np.float64) for one in (exact_lines, lines))
            with np.errstate(all='ignore'):                     # NaN and infinities are counted
                exact = exact_rows @ exact_part
                for left_fmt in fmts:
                    if (left_fmt, fmt) in sums:
                        how = _accumulation((left_fmt, fmt), accumulation)
                        sums[left_fmt, fmt].add(exact, multiply(parts[left_fmt].astype(np.float64), part, how), chosen, first)
    return sums


def _shape(entries):
    """Return the shape of saved tensors as one matrix: their leading axes by the last one."""
    columns = {entry.shape[-1] if entry.shape else 1 for entry in entries}
    if len(columns) > 1:
        raise LogError(f'{printable(entries[0].path)}: its time steps have different sizes; save the tensors again')
    return sum(math.prod(entry.shape[:-1]) for entry in entries), columns.pop()


def _matrix(entries, along):
    """Return saved tensors as one float32 matrix, or as _FileRows if it is large and its rows are summed over.
    along: the axis that the product sums over"""
    shape = _shape(entries)
    if along and len(entries) == 1 and math.prod(shape) > PIECE:
        with entries[0].reading():
            file = flat(entries[0].path, entries[0].key)
        if file is not None and file.size == math.prod(shape):
            return _FileRows(entries[0], file, shape)
    arrays = [entry.load().reshape(-1, shape[1]) for entry in entries]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


class _FileRows(NamedTuple):
    """A matrix in a file, whose rows are read when they are needed."""
    entry: Entry
    file: Any
    shape: tuple[int, int]

    def rows(self, which: slice | np.ndarray) -> np.ndarray:
        columns = self.shape[1]
        ranges = ([(which.start, which.stop)] if isinstance(which, slice) else [(row, row + 1) for row in which.tolist()])
        with self.entry.reading():
            parts = [self.file.read(start * columns, stop * columns) for start, stop in ranges]
        return np.concatenate([np.zeros(0, np.float32), *parts]).reshape(-1, columns)


class _Lines:
    """The lines of a matrix along the axis that a product sums over, rounded.  Lines are rounded when they are taken, unless
    the format depends on more than its own line."""

    def __init__(self, matrix: np.ndarray | _FileRows, fmt: Format | None, along: int) -> None:
        self.matrix, self.fmt, self.along = matrix, fmt, along
        if fmt and not _is_by_line(fmt):
            whole = matrix.rows(slice(0, matrix.shape[0])) if isinstance(matrix, _FileRows) else matrix
            self.matrix, self.fmt = np.asarray(formats.fake_quantize(whole, fmt, along)), None

    def take(self, which: slice | np.ndarray) -> np.ndarray:
        """Return some lines (lines, n)."""
        x = (self.matrix.rows(which) if isinstance(self.matrix, _FileRows) else
             self.matrix[which] if self.along else self.matrix[:, which])
        x = x if self.fmt is None else np.asarray(formats.fake_quantize(x, self.fmt, self.along))
        return x if self.along else x.T


def _is_by_line(fmt):
    """Return whether a line along the axis is rounded in the same way without the rest of the tensor."""
    is_block = not fmt.is_scaled or isinstance(fmt.option('block'), int) or fmt.option('block') == 'axis'
    return is_block and not fmt.is_stochastic and not has_one_scale(fmt)


def _sum_axes(pair, left, right):
    """Return the axes of both operands, of these shapes, that the product sums over.  LogError if their sizes differ."""
    if pair.product == 'wgrad':
        axes = 0, 0
    else:
        stored = _inputs_axis(pair.right[0])
        stored = stored if pair.product == 'fwd' else 1 - stored
        axes = 1, stored if right[stored] == left[1] else 1 - stored
    if left[axes[0]] != right[axes[1]]:
        raise LogError(f'{printable(pair.entry.path)}: {pair.left[0].name} {pair.left[0].shape} and {pair.right[0].name} '
                       f'{pair.right[0].shape} of {printable(pair.entry.layer)} are not the operands of {pair.product}')
    return axes


def _inputs_axis(weight):
    """Return the axis of a weight that forward sums over, as the run recorded it: 1 for (O, I)."""
    for use in weight.uses:
        if use.get('operand') == 'w' and use.get('axis') in (-1, 0, 1):
            return use['axis'] % 2 if use.get('product') == 'fwd' else 1 - use['axis'] % 2
    return 0 if weight.axis == 0 else 1


def _chosen_rows(pair, count, limit, masks):
    """Return the indices of the rows of the result to compute.   masks: of the left operand's entries, if its rows are these"""
    rows = np.arange(count)
    if masks:
        valid = [np.ones(math.prod(entry.shape[:-1]), bool) if mask is None
                 else np.broadcast_to(mask, entry.shape)[..., 0].reshape(-1)
                 for entry, mask in zip(pair.left, masks, strict=True)]
        rows = rows[np.concatenate(valid)]
    return rows if not limit or len(rows) <= limit else rows[np.arange(limit) * len(rows) // limit]


@dataclass
class _Sums:
    """Sums over the elements of a product and of its rounded copy."""
    values: int = 0
    not_finite: int = 0                 # elements that are not finite without rounding, which no sum includes
    overflow: int = 0
    x2: float = 0.0
    q2: float = 0.0
    xq: float = 0.0
    e2: float = 0.0
    error: float = -1.0
    worst: tuple[int, int, float, float] | None = None          # row, column, exact, rounded

    def add(self, exact, rounded, rows, first):
        """Add a part of the result: the given rows, and columns from `first` on."""
        error = np.abs(rounded - exact)
        if not math.isfinite(float(error.sum())):
            known = np.isfinite(exact)
            lost = known & ~np.isfinite(rounded)
            self.not_finite += exact.size - int(known.sum())
            self.overflow += int(lost.sum())
            error = np.where(lost, np.inf, np.where(known, error, -1))
            self._note_worst(error, exact, rounded, rows, first)
            kept = known & ~lost
            self.values += int(known.sum())
            exact, rounded, error = exact[kept], rounded[kept], error[kept]
        else:
            self.values += exact.size
            self._note_worst(error, exact, rounded, rows, first)
        for name, a, b in ('x2', exact, exact), ('q2', rounded, rounded), ('xq', exact, rounded), ('e2', error, error):
            setattr(self, name, getattr(self, name) + float(np.vdot(a, b)))

    def _note_worst(self, error, exact, rounded, rows, first):
        if error.size and (largest := float(error.max())) > self.error:
            self.error = largest
            row, column = np.unravel_index(int(error.argmax()), error.shape)
            self.worst = int(rows[row]), first + int(column), float(exact[row, column]), float(rounded[row, column])

    def statistics(self) -> dict[str, Any]:
        """Return the measures.  With overflow, sqnr_db is -inf, the errors are inf and cosine is nan."""
        e2 = math.inf if self.overflow else self.e2
        kept = self.values - self.overflow
        rms = math.sqrt(self.x2 / kept) if kept else math.nan
        both = math.sqrt(self.x2) * math.sqrt(self.q2)
        row, column, exact, rounded = self.worst or (None, None, None, None)
        error = max(self.error, 0.0) if self.values else math.nan
        cosine = self.xq / both if both else float(self.x2 == self.q2)
        return {'sqnr_db': decibels(self.x2, e2) if self.values else math.nan,
                'cosine': math.nan if self.overflow or not self.values else cosine,
                'max_abs_error': error, 'max_error_rms': error / rms if rms else 0.0 if error == 0 else math.nan,
                'overflow': self.overflow, 'not_finite': self.not_finite, 'values': self.values, 'rms': rms, 'sum_x2': self.x2,
                'sum_e2': e2, 'worst': {'row': row, 'column': column, 'exact': exact, 'rounded': rounded}}


def totals(rows: Iterable[Row]) -> list[Total]:
    """Return the Totals, worst first within each product.  Signals and errors are summed; decibels are not averaged."""
    groups: dict[tuple[str, Any], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.pair.product, row.formats), []).append(row)
    result = []
    for (product, pair), of in groups.items():
        known = [row for row in of if not math.isnan(row.statistics['sqnr_db'])]
        x2, e2 = (math.fsum(row.statistics[key] for row in known) for key in ('sum_x2', 'sum_e2'))
        result.append(Total(product, pair, len(of), decibels(x2, e2) if known else math.nan,
                            median(row.statistics['sqnr_db'] for row in known) if known else math.nan,
                            min(known or of, key=lambda row: row.statistics['sqnr_db'])))
    order = list(PRODUCTS)
    return sorted(result, key=lambda total: (order.index(total.product), math.isnan(total.sqnr_db), total.sqnr_db))


# ---- the command -------------------------------------------------------------------------------------------------------

def run(options):
    """Print the errors of the products in the folder options.logs, as tables or as JSON.  Return exit status 0."""
    fmts = parse(options.formats)
    if set(fmts) == {None} and not options.accumulate:
        raise UserError(f'--formats {options.formats}: rounds nothing; give a format, such as mxfp8')
    logs = Logs(options.logs)
    entries = select(logs.entries, options.layers, steps=options.steps)
    pairs, missing = find_pairs(entries, options.products)
    if not pairs:
        reason = f' ({missing[0][0]}: {missing[0][1]})' if missing else ''
        names = ', '.join(options.products)
        raise UserError(f'{printable(options.logs)}: no linear layer has the operands of {names}{reason}; '
                        'save input, weight and grad_output, as --save-tensors does, or choose other layers')
    known = Joint(options.logs, 'products', __name__)
    values = (math.prod(entry.shape) for pair in pairs for entry in pair.left + pair.right)
    try:
        with workers(0, len(pairs), is_worth_processes(values, 2 * len(fmts)), _is_quick) as work:
            rows, unread = measure(pairs, fmts, options.rows, logs.mask,
                                   lambda results: watch(results, len(pairs), 'products', 'products'),
                                   options.accumulate and Accumulation(*options.accumulate), known, work)
    finally:
        known.save()                    # also after Ctrl-C: the same command goes on from there
    skipped = [*logs.skipped, *missing, *unread]
    if not rows:
        raise UserError(f'{printable(options.logs)}: none of {len(pairs)} products can be computed; {unread[-1][1]}')
    ordered, top = worst_first(rows, SORTS[options.sort]), options.top
    if options.json:
        document = _document(options, fmts, ordered[:top], totals(rows), skipped)
        write(options.output, json.dumps(document, allow_nan=False) + '\n')
    else:
        width = None if options.output or not sys.stdout.isatty() else shutil.get_terminal_size().columns
        shown = ordered[:TOP if top is None else top]
        write(options.output, '\n'.join(_table(options, fmts, rows, shown, width)) + '\n')
    print_skipped(skipped)
    return 0


def _table(options, fmts, rows, shown, width):
    """Yield the lines of the ranked table and of a table of totals for each product."""
    steps = sorted({row.pair.entry.step for row in rows})
    of = f'step {steps[0]}' if len(steps) == 1 else f'{len(steps)} steps from {steps[0]} to {steps[-1]}'
    count, with_run = len({row.pair for row in rows}), has_runs(row.pair.entry for row in rows)
    yield f'{count} product{"s" * (count != 1)} of {printable(options.logs)}, {of}; worst first by {SORTS[options.sort].title}'
    yield ''
    has_overflow = options.sort == 'overflow' or any(row.statistics['overflow'] for row in rows)
    columns = [column for name, column in SORTS.items() if name != 'overflow' or has_overflow]
    wide, digits = max(len(row.recipe) for row in shown), max(4, len(str(steps[-1])))
    elements = [_element(row.statistics['worst']) for row in shown]
    last = max(map(len, (*elements, 'worst element')))
    start = '  '.join(f'{column.title:>{column.width}}' for column in columns)
    yield cut(f'{start}  {"worst element":<{last}}  {"formats":<{wide}}  {"step":>{digits}}  product', width)
    for row, element in zip(shown, elements, strict=True):
        start = '  '.join(column.cell(row.statistics) for column in columns)
        entry = row.pair.entry
        entry = replace(entry, time=None) if len(row.pair.left) > 1 else entry
        start = f'{start}  {element:<{last}}  {row.recipe:<{wide}}  {entry.step:>{digits}}  '
        yield cut_name(start, name_of(entry, row.pair.product, with_run), width)
    if len(shown) < len(rows):
        yield f'... and {len(rows) - len(shown)} more (--top {len(rows)} shows all)'
    found = {(total.product, total.formats): total for total in totals(rows)}
    texts = [str(fmt or NONE) for fmt in fmts]
    wide = max(7, *map(len, texts))
    for product in dict.fromkeys(total.product for total in found.values()):
        one, other = PRODUCTS[product]
        yield ''
        yield cut(f'{product}: SQNR dB of all layers; down: {one}, across: {other}', width)
        yield cut(' ' * wide + ''.join(f'  {text:>{wide}}' for text in texts), width)
        for text, fmt in zip(texts, fmts, strict=True):
            cells = [found.get((product, (fmt, right))) for right in fmts]
            figures = [number(cell.sqnr_db) if cell else '-' for cell in cells]
            yield cut(f'{text:<{wide}}' + ''.join(f'  {figure:>{wide}}' for figure in figures), width)


def _element(worst):
    """Return '[row,column] exact > rounded'."""
    if worst['row'] is None:
        return '-'
    return f'[{worst["row"]},{worst["column"]}] {worst["exact"]:.3g} > {worst["rounded"]:.3g}'


def _document(options, fmts, rows, all_totals, skipped):
    """Return the document for --json.  Values that are not finite are null."""
    return {
        'logs': os.fspath(options.logs), 'formats': [str(fmt or NONE) for fmt in fmts], 'sort': options.sort,
        'rows': options.rows, 'accumulate': options.accumulate, 'products': [_described(row) for row in rows],
        'totals': [{'product': total.product, 'formats': [str(fmt or NONE) for fmt in total.formats], 'count': total.count,
                    'sqnr_db': finite(total.sqnr_db), 'median_db': finite(total.median_db),
                    'worst_db': finite(total.worst.statistics['sqnr_db']), 'worst_layer': total.worst.pair.entry.layer,
                    'worst_step': total.worst.pair.entry.step} for total in all_totals],
        'skipped': [{'file': file, 'reason': reason} for file, reason in skipped]}


def _described(row):
    entry, statistics = row.pair.entry, dict(row.statistics)
    worst = {key: value if value is None else finite(value) for key, value in statistics.pop('worst').items()}
    return {'product': row.pair.product, 'formats': [str(fmt or NONE) for fmt in row.formats], 'recipe': row.recipe,
            'layer': entry.layer, 'index': entry.index, 'step': entry.step, 'run': entry.training,
            **{tag: getattr(entry, tag) for tag in TAGS},
            'files': [[one.relative_path for one in side] for side in (row.pair.left, row.pair.right)],
            **{key: finite(value) for key, value in statistics.items()}, 'worst': worst}
