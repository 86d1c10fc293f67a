"""python -m pyops inspect compare: the errors of number formats on the saved tensors of a folder, worst first.

Saved tensors are not rounded, so any format can be tried on them without another training run.
"""
from __future__ import annotations

import contextlib
import csv
import functools
import json
import math
import os
import shutil
import sys
from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops import formats
from pyops.errors import UserError, printable
from pyops.inspect import codes as codes_of
from pyops.inspect.choice import select
from pyops.inspect.known import Known
from pyops.inspect.logs import TAGS, Entry, LogError, Logs
from pyops.inspect.pieces import measure_in_pieces
from pyops.inspect.statistics import BLOCK, block_scales, decibels, digits, exponents, measure, row_sum_error, scale_codes
from pyops.inspect.tables import (
    Column,
    cannot_write,
    cut,
    cut_name,
    finite,
    has_runs,
    name_of,
    number,
    print_skipped,
    worst_first,
    write,
)
from pyops.inspect.workers import is_worth_processes, workers
from pyops.inspect.writer import size_text
from pyops.training import watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pyops.formats import Format
    from pyops.inspect.known import Slot
    from pyops.inspect.workers import Map

TOP = 30                                        # lines of the table without --top


SORTS = {'sqnr': Column('SQNR dB', 'sqnr_db', False, '.2f'),
         'cosine': Column('cosine', 'cosine', False, '.5f'),
         'error': Column('max error', 'max_abs_error', True, '.2e'),
         'underflow': Column('under %', 'underflow_pct', True, '.2f'),
         'saturation': Column('satur %', 'saturation_pct', True, '.2f'),
         'overflow': Column('overflow', 'overflow', True, 'd'),
         'poisoned': Column('poisoned', 'poisoned', True, 'd'),
         'block': Column('block dB', 'worst_block_db', False, '.2f')}

_CODES = Column('code std', 'code_std', True, '.3f'), Column('scale std', 'scale_std', True, '.3f')     # with --save-codes
_DROPPED = 'block', 'cosine', 'error'           # columns to omit on a narrow terminal, in this order
_RARE = 'overflow', 'poisoned'                  # columns that are there only if there is any
_LINE, _MUCH = 250, 50_000_000             # bytes of a line of --per-block, and above which its size is announced
_ROOM = 30                                      # characters for a tensor's name before columns are omitted
_BLOCK_COLUMNS = 'sqnr_db', 'cosine', 'max_abs_error', 'underflow_pct', 'saturation_pct'


class Row(NamedTuple):
    """One tensor in one format.  statistics: from statistics.measure, and worst_block_db.  histograms: counts by binade,
    by scale and by digits, empty if they do not apply; with a folder of codes by code and by octave of the scale, too."""
    entry: Entry
    format: formats.Format
    statistics: dict
    histograms: dict


class Total(NamedTuple):
    """All tensors in one format: SQNR of all together and of each operation; median and worst of single tensors."""
    format: formats.Format
    tensors: int
    sqnr_db: float
    forward_db: float
    backward_db: float
    median_db: float
    worst: Row | None
    poisoned: int = 0       # finite numbers in blocks with NaN or an infinity, which the SQNR excludes


def parse_formats(text: str) -> list[Format]:
    """Parse 'all' (of formats.FORMATS), 'every' (format there is), or names with options, separated by commas, into a list of
    distinct Formats.  Raises FormatError."""
    groups = {'all': formats.FORMATS, 'every': formats.FORMATS + formats.MORE_FORMATS + formats.ELEMENTS}
    names = [name for part in text.split(',') for name in groups.get(part.strip(), (part,))]
    return list(dict.fromkeys(map(formats.parse, names)))


class _Job(NamedTuple):
    """A tensor to measure, perhaps in another process.  failure: why it cannot be, '' if it can"""
    entry: Entry
    mask: np.ndarray | None
    axis: int | str
    formats: tuple[Format, ...]
    failure: str = ''


def compare(entries: Iterable[Entry], fmts: Sequence[Format],
            mask_of: Callable[[Entry], np.ndarray | None] = lambda entry: None, axis: int | str | None = None,
            progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
            on_blocks: Callable[..., Any] | None = None, folder: codes_of.Folder | None = None,
            known: Known | None = None, work: Map = map) -> tuple[list[Row], list[tuple[str, str]]]:
    """Round every tensor to each of the formats.  Return ([Row], [(file, reason)] of unreadable files).

    mask_of: returns an entry's padding, like Logs.mask.  axis: of the blocks; None: the entry's axis.
    on_blocks: called with (entry, format, axis, statistics of the blocks, log2 of their scales or None)
    folder: receives files with codes and scales, which then have statistics, too.  One tensor at a time is in memory, a large
    one in pieces if neither on_blocks nor folder needs all of it.
    known: measures of earlier commands, which are used unless on_blocks or folder needs the tensor; receives the others
    work: a map in order, such as the one of workers(), if neither on_blocks nor folder is given;  progress: wraps its results
    """
    rows: list[Row] = []
    skipped: list[tuple[str, str]] = []
    sent: deque[tuple[Entry, dict[Format, Any], Slot | None]] = deque()       # what belongs to the results, in order

    def jobs() -> Iterator[_Job]:
        for entry in entries:
            slot, ready = None, {}
            try:
                mask, along = mask_of(entry), _axis(entry, axis)
            except LogError as error:
                sent.append((entry, {}, None))
                yield _Job(entry, None, 0, (), str(error))
                continue
            if known and not on_blocks and not folder:
                slot = known.of(entry, along, mask)
                ready = {fmt: parts for fmt in fmts if (parts := slot.row(fmt))}
            sent.append((entry, ready, slot))
            yield _Job(entry, mask, along, tuple(fmt for fmt in fmts if fmt not in ready))

    def whole(job: _Job) -> tuple[list[Any], str]:
        return _measured(job, functools.partial(_more, on_blocks=on_blocks, folder=folder, skipped=skipped))

    for found, failure in progress(map(whole, jobs()) if on_blocks or folder else work(_measured, jobs())):
        entry, ready, slot = sent.popleft()
        if failure:
            skipped.append((entry.relative_path, failure))
            continue
        new = iter(found)
        for fmt in fmts:
            row = Row(entry, fmt, *(ready[fmt] if fmt in ready else next(new)))
            rows.append(row)
            if slot and fmt not in ready:
                slot.add_row(fmt, row.statistics, row.histograms)
    return rows, skipped


def _is_quick(job: _Job) -> bool:
    return bool(job.failure) or not job.formats


def _measured(job: _Job, more: Callable[..., None] | None = None) -> tuple[list[Any], str]:
    """Return [(statistics, histograms)] in each format of a job, and why they are missing, '' if they are not.

    more: called with (job, format, x, statistics, histograms, statistics of the blocks), which it may change
    """
    entry, mask, along, fmts, failure = job
    if failure:
        return [], failure
    try:
        in_pieces = {} if more else {fmt: parts for fmt in fmts if (parts := measure_in_pieces(entry, fmt, along, mask))}
        x = entry.load() if len(in_pieces) < len(fmts) else None
    except LogError as error:
        return [], str(error)
    binades = {} if x is None else exponents(x, mask)
    found = []
    for fmt in fmts:
        if fmt in in_pieces:
            found.append(in_pieces[fmt])
            continue
        whole, blocks = measure(x, fmt, along, mask)
        worst = float(np.fmin.reduce(blocks['sqnr_db'], axis=None, initial=math.nan))       # ignores NaN: no SQNR
        if entry.is_weights:
            whole['row_sum_error'] = row_sum_error(x, fmt, along, mask)
        histograms = {'exponents': binades, 'scales': scale_codes(x, fmt, along, mask), 'digits': digits(x, fmt, mask)}
        if more:
            more(job, fmt, x, whole, histograms, blocks)
        found.append((whole | {'worst_block_db': worst}, histograms))
    return found, ''


def _more(job, fmt, x, whole, histograms, blocks, on_blocks, folder, skipped):
    """Write codes to a folder, add their statistics, and call on_blocks."""
    entry = job.entry
    if folder:
        try:
            found = folder.add(entry, fmt, job.axis, x, job.mask)
            histograms |= {'codes': found.codes, 'scale_octaves': found.scales}
            whole |= {'code_std': found.code_std, 'scale_std': found.scale_std}
        except LogError as error:
            skipped.append((entry.relative_path, str(error)))
            histograms |= {'codes': {}, 'scale_octaves': {}}
            whole |= {'code_std': math.nan, 'scale_std': math.nan}
    if on_blocks:
        on_blocks(entry, fmt, job.axis, blocks, block_scales(x, fmt, job.axis) if fmt.is_block else None)


def totals(rows: Sequence[Row]) -> list[Total]:
    """Return the Totals, worst format first.  Signals and errors are summed over tensors; decibels are not averaged."""
    result = []
    for fmt in dict.fromkeys(row.format for row in rows):
        of = [row for row in rows if row.format == fmt]
        single = [row.statistics['sqnr_db'] for row in of if not math.isnan(row.statistics['sqnr_db'])]
        worst = min((row for row in of if not math.isnan(row.statistics['sqnr_db'])),
                    key=lambda row: row.statistics['sqnr_db'], default=None)
        forward, backward = (_sqnr([row for row in of if row.entry.operation == operation])
                             for operation in ('forward', 'backward'))
        result.append(Total(fmt, len(of), _sqnr(of), forward, backward, median(single) if single else math.nan, worst,
                            sum(row.statistics['poisoned'] for row in of)))
    return sorted(result, key=lambda total: (-total.poisoned, math.isnan(total.sqnr_db), total.sqnr_db))


def ranked(rows: Iterable[Row], sort: str = 'sqnr') -> list[Row]:
    """Return the rows sorted by a key of SORTS, worst first: rows that lost numbers first, rows without that value last."""
    return worst_first(rows, SORTS[sort])


def _sqnr(rows):
    sums = [(row.statistics['sum_x2'], row.statistics['sum_e2']) for row in rows if not math.isnan(row.statistics['sqnr_db'])]
    return decibels(*map(math.fsum, zip(*sums, strict=True))) if sums else math.nan


def _axis(entry, axis):
    if axis is None or axis == 'tokens' or -len(entry.shape) <= axis < max(len(entry.shape), 1):
        return entry.axis if axis is None else axis
    raise LogError(f'{printable(entry.relative_path)}: has the shape {entry.shape} and no axis {axis}; leave --axis out, or '
                   'choose tensors with --names')


# ---- the command ---------------------------------------------------------------------------------------------------

def run(options):
    """Print the errors of options.formats on the tensors in options.logs, as a table or as JSON.  Return exit status 0."""
    fmts = parse_formats(options.formats)
    logs = Logs(options.logs)
    entries = select(logs.entries, options.layers, options.names, options.steps)
    if options.per_block and (nbytes := _LINE * _block_lines(entries, fmts, options.axis)) > _MUCH:
        print(f'--per-block: {printable(options.per_block)} will have about {size_text(nbytes)}; choose fewer tensors with '
              '--layers, --names or --steps, or fewer formats', file=sys.stderr, flush=True)
    folder = codes_of.Folder(options.save_codes, options.logs) if options.save_codes else None
    known = Known(options.logs)
    try:
        is_worth = is_worth_processes((math.prod(entry.shape) for entry in entries), len(fmts))
        with _Blocks(options.per_block) as blocks, workers(0, len(entries), is_worth, _is_quick) as work:
            rows, unread = compare(entries, fmts, logs.mask, options.axis,
                                   lambda results: watch(results, len(entries), 'compare'),
                                   blocks.add if options.per_block else None, folder, known, work)
    finally:
        known.save()                    # also after Ctrl-C: the same command goes on from there
    skipped = [*logs.skipped, *unread]
    if not rows:
        raise UserError(f'{printable(options.logs)}: none of {len(entries)} tensors can be read; {skipped[-1][1]}')
    ordered, top = ranked(rows, options.sort), options.top
    if options.json:
        document = _document(options, fmts, ordered[:top], totals(rows), skipped)
        write(options.output, json.dumps(document, allow_nan=False) + '\n')
    else:
        width = None if options.output or not sys.stdout.isatty() else shutil.get_terminal_size().columns
        shown = ordered[:TOP if top is None else top]
        write(options.output, '\n'.join(_table(options, rows, shown, width)) + '\n')
    print_skipped(skipped)
    return 0


class _Blocks:
    """A CSV file with a line for each block of each tensor in each format; writes nothing if the path is None."""

    def __init__(self, path):
        self.path = path

    def __enter__(self):
        if self.path:
            with self._failing():
                self._file = open(self.path, 'w', newline='', errors='surrogateescape')
                self._csv = csv.writer(self._file)
                self._csv.writerow(['file', 'tensor', 'step', 'layer', 'operation', 'name', *TAGS, 'format', 'block', 'row',
                                    'column', *_BLOCK_COLUMNS, 'log2_scale'])
        return self

    def __exit__(self, kind, error, trace):
        if self.path:
            with self._failing() if kind is None else contextlib.suppress(OSError):
                self._file.close()

    def add(self, entry, fmt, axis, blocks, scales):
        # the index of a block, such as 3:0:17, has one number per axis of the tensor
        start = [entry.relative_path, entry.key, entry.step, entry.layer, entry.operation, entry.name,
                 *('' if getattr(entry, tag) is None else getattr(entry, tag) for tag in TAGS), str(fmt)]
        with self._failing():
            for index in np.ndindex(blocks['sqnr_db'].shape):
                figures = (f'{blocks[name][index]:.6g}' for name in _BLOCK_COLUMNS)
                scale = '' if scales is None else f'{scales[index]:g}'
                corner = _first_element(entry, fmt, axis, index)
                self._csv.writerow([*start, ':'.join(map(str, index)), *corner, *figures, scale])

    @contextlib.contextmanager
    def _failing(self):
        try:
            yield
        except OSError as error:
            raise cannot_write(self.path, error, '--per-block') from error


def _first_element(entry, fmt, axis, index):
    """Return the row and the column of a block's first element in the tensor as a matrix: leading axes by last axis."""
    shape = entry.shape or (1,)
    shape = (math.prod(shape[:-1]), shape[-1]) if axis == 'tokens' else shape
    axis = 0 if axis == 'tokens' else axis % len(shape)
    element = [i * (fmt.block or BLOCK) if j == axis else i for j, i in enumerate(index or (0,))]
    return divmod(int(np.ravel_multi_index(element, shape)), shape[-1])


def _block_lines(entries, fmts, axis):
    """Return the number of lines of the CSV file."""
    lines = 0
    for entry in entries:
        along = _axis(entry, axis)
        count = math.prod(entry.shape)
        length = count // max(entry.shape[-1], 1) if along == 'tokens' else (entry.shape or (1,))[along]
        for fmt in fmts if count else ():
            lines += count // length * -(-length // (fmt.block or BLOCK))
    return lines


# ---- the table -----------------------------------------------------------------------------------------------------

def _table(options, rows, shown, width):
    """Yield the lines of the table, cut to `width` columns (None: not cut)."""
    entries = {row.entry for row in rows}
    steps = sorted({entry.step for entry in entries})
    of = f'step {steps[0]}' if len(steps) == 1 else f'{len(steps)} steps from {steps[0]} to {steps[-1]}'
    tensors = f'{len(entries)} tensor' + 's' * (len(entries) != 1)
    yield f'{tensors} of {printable(options.logs)}, {of}; worst first by {SORTS[options.sort].title}'
    yield ''
    wide, digits = max(6, *(len(str(row.format)) for row in rows)), max(4, len(str(steps[-1])))
    with_run, rare = has_runs(entries), [name for name in _RARE if any(row.statistics[name] for row in rows)]
    columns = _columns(options.sort, wide + digits, width, rare, rows[0].statistics)
    start = '  '.join(f'{column.title:>{column.width}}' for column in columns)
    yield cut(f'{start}  {"format":<{wide}}  {"step":>{digits}}  tensor', width)
    for row in shown:
        start = '  '.join(column.cell(row.statistics) for column in columns)
        start = f'{start}  {str(row.format):<{wide}}  {row.entry.step:>{digits}}  '
        yield cut_name(start, name_of(row.entry, with_run=with_run), width)
    if len(shown) < len(rows):
        yield f'... and {len(rows) - len(shown)} more (--top {len(rows)} shows all)'
    yield ''
    titles = ('SQNR dB', ' forward', 'backward', ' median', '  worst', *(['poisoned'] if 'poisoned' in rare else []))
    yield cut(f'{"format":<{wide}}  {"  ".join(titles)}  worst tensor', width)
    for total in totals(rows):
        worst, name = math.nan, '-'
        if total.worst:
            worst, entry = total.worst.statistics['sqnr_db'], total.worst.entry
            name = f'{name_of(entry, with_run=with_run)}, step {entry.step}'
        values = [number(value) for value in (total.sqnr_db, total.forward_db, total.backward_db, total.median_db, worst)]
        values += [str(total.poisoned)] if 'poisoned' in rare else []
        figures = '  '.join(f'{value:>{len(title)}}' for value, title in zip(values, titles, strict=True))
        yield cut_name(f'{str(total.format):<{wide}}  {figures}  ', name, width)
    if options.save_codes:
        for title, key in ('codes, % by octave', 'codes'), ('scales, % of blocks by octave', 'scale_octaves'):
            yield ''
            yield f'{"format":<{wide}}  {title}'
            for fmt in dict.fromkeys(row.format for row in rows):
                histograms = [row.histograms[key] for row in rows if row.format == fmt]
                yield cut(f'{str(fmt):<{wide}}  {codes_of.shares(fmt, histograms, key == "codes") or "-"}', width)


def _columns(sort, others, width, rare, statistics):
    """Return the columns that fit beside the name, and always the column of --sort.  rare: which of _RARE have one, too."""
    columns = [column for name, column in SORTS.items() if name not in _RARE or name == sort or name in rare]
    columns += [column for column in _CODES if column.key in statistics]
    for name in _DROPPED:
        if width is None or sum(column.width + 2 for column in columns) + others + 4 + _ROOM <= width:
            break
        if name != sort:
            columns.remove(SORTS[name])
    return columns


# ---- JSON ----------------------------------------------------------------------------------------------------------

def _document(options, fmts, rows, all_totals, skipped):
    """Return the document for --json.  Values that are not finite are null, such as the SQNR if sum_e2 is 0."""
    return {
        'logs': os.fspath(options.logs), 'formats': [str(fmt) for fmt in fmts], 'sort': options.sort,
        'tensors': [{'file': row.entry.relative_path, 'key': row.entry.key, 'step': row.entry.step, 'time': row.entry.time,
                     'layer': row.entry.layer, 'layer_type': row.entry.layer_type, 'index': row.entry.index,
                     'operation': row.entry.operation, 'name': row.entry.name, 'run': row.entry.training,
                     **{tag: getattr(row.entry, tag) for tag in TAGS}, 'shape': row.entry.shape,
                     'axis': _axis(row.entry, options.axis), 'format': str(row.format),
                     **{key: finite(value) for key, value in row.statistics.items()}, **row.histograms} for row in rows],
        'totals': [{'format': str(total.format), 'tensors': total.tensors, 'sqnr_db': finite(total.sqnr_db),
                    'forward_db': finite(total.forward_db), 'backward_db': finite(total.backward_db),
                    'median_db': finite(total.median_db), 'poisoned': total.poisoned,
                    'worst_db': finite(total.worst.statistics['sqnr_db']) if total.worst else None,
                    'worst_file': total.worst.entry.relative_path if total.worst else None} for total in all_totals],
        'skipped': [{'file': file, 'reason': reason} for file, reason in skipped]}
