"""python -m pyops inspect draw: draw a folder of pictures of saved tensors, in several processes.

    DRAW/quick_analysis.png     all values, and the tensors by format, layer type and operation
    DRAW/tensor_stats.txt       a table of all tensors, and the skipped files
    DRAW/distributions/         per tensor: histogram, magnitudes over the range of the formats, boxes, quantiles
    DRAW/heatmaps/              per tensor: values, errors of each format, scales of blocks
    DRAW/comparisons/           per tensor: all formats side by side
    DRAW/attention_maps/        the weights of each head for a sentence, with its words
    DRAW/statistics/            by layer and step: magnitudes, SQNR, gradient flow, entropy of attention, NaN and infinities
    DRAW/index.html             the same, interactive

Each tensor is read and measured once, by the process that draws all its pictures; its statistics and its compressed part of the
page are sent back.  Then the processes share the pictures of layers and of the whole dump, which are drawn from these.
Statistics cover all tensors, pictures at most `limit` tensors per folder; a note reports the omitted ones.
"""
import collections
import contextlib
import dataclasses
import math
import os

import numpy as np

from pyops.errors import UserError
from pyops.inspect.known import Known
from pyops.inspect.logs import TAGS, curves
from pyops.inspect.workers import workers
from pyops.training import watch

FOLDERS = 'distributions', 'heatmaps', 'comparisons', 'attention_maps', 'statistics'
LIMIT, SENTENCES, DPI = 200, 3, 100
LARGE = 1 << 24             # values of a tensor that is measured piece by piece, and whose pictures show some of its rows


@dataclasses.dataclass(frozen=True)
class Options:
    """What to draw.  formats: as in compare.parse_formats; layers, names, steps: as in choice.select; sentences: number of
    sentences per batch with attention maps; limit: number of tensors with pictures, 0: all; jobs: number of processes, 0: one
    per core; page: whether to write index.html, with at most page_max bytes of data; colours: 'largest' or 'rms'."""
    formats: str = 'all'
    layers: tuple = ('*',)
    names: tuple = ('*',)
    steps: object = None
    sentences: int = SENTENCES
    limit: int = LIMIT
    jobs: int = 0
    dpi: int = DPI
    page: bool = True
    page_max: int = 64_000_000
    colours: str = 'largest'


@dataclasses.dataclass
class Summary:
    """The result of draw().  foreign: existing files that draw() did not create and therefore did not overwrite."""
    pictures: int = 0
    tensors: int = 0
    foreign: list = dataclasses.field(default_factory=list)
    skipped: list = dataclasses.field(default_factory=list)     # (file, reason)
    notes: list = dataclasses.field(default_factory=list)       # lines about omitted pictures, NaN and overflow
    removed: int = 0
    page: str = ''              # path of index.html if it was written


@dataclasses.dataclass(frozen=True)
class _Job:
    """A tensor and its pictures to draw; sent to a process."""
    entry: object
    mask: object
    formats: tuple
    pictures: tuple             # of 'distributions', 'heatmaps', 'comparisons'
    sentences: tuple            # (index, words or None)
    folder: str
    stem: str
    place: str                  # of logs.places
    dpi: int
    page: tuple | None          # of page.tasks_of; None: not on the page
    losses: dict                # {text of a format: quantization} that earlier commands measured
    drawing: object             # of _drawing_of, by an earlier command; None if it is unknown
    colours: str                # of Options

    @property
    def needs_values(self):
        """Whether the tensor has to be read."""
        return bool(self.pictures or self.sentences or self.drawing is None or self.page and self.page[5]
                    or any(text not in self.losses for text in self.formats))


@dataclasses.dataclass(frozen=True)
class _SheetJob:
    """A picture of many tensors, or a series of them; sent to a process.

    function: of the module overview; it returns a Sheet or a list of them.   path: without suffix
    """
    function: str
    arguments: tuple
    path: str
    dpi: int


def run(options):
    """Run the command and return its exit status."""
    summary = draw(options.tensor_dir, options.output_dir, Options(
        **{field.name: getattr(options, field.name) for field in dataclasses.fields(Options)}))
    for file, reason in summary.skipped[:10]:
        print(f'skipped: {file}: {reason}')
    if len(summary.skipped) > 10:
        print(f'skipped: {len(summary.skipped) - 10} more, all in {os.path.join(options.output_dir, "tensor_stats.txt")}')
    for path in summary.foreign[:10]:
        print(f'kept, not written by this command: {path}')
    if len(summary.foreign) > 10:
        print(f'kept, not written by this command: {len(summary.foreign) - 10} more files')
    for note in summary.notes:
        print(note)
    if summary.removed:
        print(f'removed: {summary.removed} pictures of an earlier run')
    begin = summary.page or os.path.join(options.output_dir, 'quick_analysis.png')
    print(f'{options.output_dir}: {summary.pictures} pictures of {summary.tensors} tensors; begin with {begin}')
    return 0


def draw(logs, folder, options=None):
    """Draw the tensors of the folder `logs` into `folder`, and return a Summary.

    UserError if nothing can be drawn: no tensors, no matching ones, no readable ones, or a folder that cannot be written.  With
    more than one job the caller's main module must be importable without side effects, as multiprocessing requires.
    """
    from pyops.inspect.choice import select
    from pyops.inspect.compare import parse_formats
    from pyops.inspect.logs import Logs
    from pyops.inspect.pictures import overview, style
    options = options or Options()
    style.require()
    texts = tuple(map(str, parse_formats(options.formats)))
    logs, folder = os.fspath(logs), os.fspath(folder)
    _check_folder(folder, logs)
    source = Logs(logs)
    entries = select(source.entries, options.layers, options.names, options.steps)
    _make_folders(folder)
    summary = Summary(skipped=list(source.skipped))
    tasks = _page_tasks(source, entries, folder, texts, options, summary)
    known = Known(logs)
    jobs, slots = _jobs(source, entries, folder, texts, options, summary, tasks, known)
    records, written, measured = [], set(), {}
    with workers(options.jobs, len(jobs)) as work:
        for slot, result in zip(slots, watch(work(_draw_tensor, jobs), len(jobs), 'pictures'), strict=True):
            if isinstance(result.record, tuple):
                summary.skipped.append(result.record)
            else:
                records.append(result.record)
                _keep(slot, result)
            _count(summary, written, result.drawn)
            if result.measured:
                measured[result.measured[0]] = result.measured
        known.save()
        if not records:
            raise UserError(f'{logs}: none of {len(entries)} tensors can be read; {summary.skipped[-1][1]}')
        summary.tensors = len(records)
        summary.notes += overview.first_losses(records, overview.formats_of(records))
        sheets = _overview_jobs(source, records, folder, options, summary)
        for drawn in watch(work(_draw_sheets, sheets), len(sheets), 'statistics', 'pictures'):
            _count(summary, written, drawn)
    if tasks:
        _write_page(source, entries, folder, texts, measured, summary, options.page_max)
    _write_table(os.path.join(folder, 'tensor_stats.txt'), logs, records, summary)
    summary.removed = _remove_stale(folder, written)
    return summary


# ---- what is drawn -----------------------------------------------------------------------------------------------------

def _check_folder(folder, logs):
    inside, around = os.path.realpath(folder), os.path.realpath(logs)
    if os.path.isdir(around) and os.path.commonpath([inside, around]) == around:
        raise UserError(f'{folder}: is in the folder of the tensors; choose a folder outside it')
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise UserError(f'{folder}: is a file; name a folder for the pictures')


def _make_folders(folder):
    for name in ('', *FOLDERS):
        path = os.path.join(folder, name)
        try:
            os.makedirs(path, exist_ok=True)
        except FileExistsError as error:
            raise UserError(f'{path}: is a file, but a folder is needed there; move the file') from error
        except OSError as error:
            raise UserError(f'{path}: cannot be made ({error.strerror}); choose a folder that can be written') from error
        if not os.access(path, os.W_OK | os.X_OK):
            raise UserError(f'{path}: cannot be written; choose a folder with write permission')


def _steps(steps):
    """Return 'step 0', or 'steps 0, 10, 20'; the middle of a long list is omitted."""
    steps = sorted(steps)
    shown = ', '.join(map(str, steps if len(steps) <= 8 else [*steps[:4], '...', *steps[-3:]]))
    return f'step {shown}' if len(steps) == 1 else f'steps {shown}'


def _jobs(source, entries, folder, texts, options, summary, tasks, known):
    """Return a _Job for each entry, and its Slot of `known`.  Selects the entries with pictures, and adds a note about omitted
    ones to the summary."""
    from pyops.inspect.logs import LogError, places
    from pyops.inspect.pictures import style
    from pyops.inspect.pictures.tensors import axis_of
    stems = collections.Counter(_stem(entry) for entry in entries)
    chosen = _choose(entries, options.limit or len(entries))
    drawn = set(map(id, chosen))
    if len(chosen) < len(entries):
        summary.notes.append(f'pictures of {len(chosen):,} of {len(entries):,} tensors (--limit {options.limit}), of '
                             f'{_steps({entry.step for entry in chosen})}; draw others with --steps, --layers, --names, or all '
                             'with --limit 0')
    maps = _attention_maps(source, _by_step(entries), options, summary)
    jobs, slots = [], []
    for entry, place in zip(entries, places(entries), strict=True):
        stem = _stem(entry)
        if stems[stem] > 1:                     # the same tensor in two formats, from two runs
            stem = f'{stem}_{style.slug(entry.stem, 60)}'
        try:
            mask = source.mask(entry)
        except LogError as error:
            summary.skipped.append((entry.relative_path, str(error)))
            continue
        own = () if entry.fmt is None else (str(entry.fmt),)        # shown first
        formats = tuple(dict.fromkeys((*own, *texts)))
        slots.append(known.of(entry, axis_of(entry, max(len(entry.shape), 1)), mask))
        losses = {text: measures for text in formats if (measures := slots[-1].quantization(text))}
        jobs.append(_Job(entry, mask, formats, FOLDERS[:3] if id(entry) in drawn else (), tuple(maps.get(id(entry), ())),
                         folder, stem, place, options.dpi, tasks.get(id(entry)), losses, slots[-1].drawing(), options.colours))
    return jobs, slots


def _keep(slot, result):
    """Keep what a _Result measured for later commands."""
    for text, measures in result.record.losses.items():
        if slot.quantization(text) is None:
            slot.add_quantization(text, measures)
    if slot.drawing() is None:
        slot.add_drawing(_drawing_of(result.record))


def _drawing_of(record):
    """Return what a Record has from the values of a tensor beside the errors of formats, for JSON."""
    places = np.flatnonzero(record.counts)
    return [record.statistics, [*zip(places.tolist(), record.counts.reshape(-1)[places].tolist(), strict=True)],
            list(record.entropy)]


def _of_drawing(drawing):
    """Return (counts, statistics, entropy) of a Record from the result of _drawing_of."""
    statistics, counted, entropy = drawing
    counts = np.zeros(512, np.int64)
    for place, count in counted:
        counts[place] = count
    return counts.reshape(2, 256), statistics, tuple(entropy)


def _stem(entry):
    """Return the name of a tensor's pictures: step000010_encoder.0.self_attention.q_forward_input, with _t3 for time step 3.

    Phase and component, rank, sample, group, subfolder and the number of the run follow if they apply.
    """
    from pyops.inspect.pictures import style
    time = '' if entry.time is None else f'_t{entry.time}'
    operation = style.slug(entry.operation or 'unknown', 20)
    parts = [entry.phase, entry.component] + [f'{name}{value:0{digits}d}' for name, value, digits in (
        ('rank', entry.rank, 2), ('sample', entry.sample, 3), ('group', entry.group, 3)) if name in entry.tags_in_folder]
    parts += [os.path.dirname(entry.relative_path), f'run{entry.training + 1}' if entry.training else '']
    place = ''.join(f'_{style.slug(part, 30)}' for part in parts if part)
    return f'step{entry.step:06d}_{style.slug(entry.layer, 80)}_{operation}_{style.slug(entry.name, 50)}{time}{place}'


def _by_step(entries):
    """Return the entries in order of priority: the last step, the first, then steps halfway between, and so on."""
    steps = sorted({entry.step for entry in entries})
    order = [len(steps) - 1, 0]
    parts = 2
    while parts < 2 * len(steps):
        order += [round(i * (len(steps) - 1) / parts) for i in range(1, parts, 2)]
        parts *= 2
    ranks = {}
    for index in [*order, *range(len(steps))]:
        ranks.setdefault(steps[index], len(ranks))
    return sorted(entries, key=lambda entry: ranks[entry.step])


def _choose(entries, limit):
    """Return the entries that get pictures: step by step, and within a step the first time step of every tensor before the
    second ones.  If a group exceeds the limit, evenly spaced entries are chosen."""
    seen, groups = collections.Counter(), {}
    for entry in _by_step(entries):
        tensor = entry.step, entry.layer, entry.operation, entry.name
        groups.setdefault((entry.step, seen[tensor]), []).append(entry)
        seen[tensor] += 1
    chosen = []
    for group in groups.values():
        room = limit - len(chosen)
        chosen += group if len(group) <= room else [group[i * len(group) // room] for i in range(room)]
    return chosen


def _attention_maps(source, ranked, options, summary):
    """Return {id of an entry: [(sentence, words)]} for the first sentences of each batch, within the limit."""
    weights = [entry for entry in ranked if entry.is_weights]
    wanted = [(entry, sentence) for entry in weights for sentence in range(min(options.sentences, entry.shape[0]))]
    limit = options.limit or len(wanted)
    found = {}
    for entry, sentence in wanted[:limit]:
        found.setdefault(id(entry), []).append((sentence, source.tokens(entry, sentence)))
    total = sum(entry.shape[0] for entry in weights)
    if total > len(wanted[:limit]):
        why = f', --limit {limit}' if len(wanted) > limit else ' of each batch'
        summary.notes.append(f'attention maps of {len(wanted[:limit]):,} of {total:,} sentences (--sentences '
                             f'{options.sentences}{why})')
    return found


# ---- processes ---------------------------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class _Result:
    record: object              # overview.Record, or (file, reason) if the tensor cannot be read
    drawn: tuple                # of (path, whether it was written)
    measured: tuple | None      # of page.measure


def _draw_tensor(job):
    """Read a tensor, draw the job's pictures, and return a _Result."""
    from pyops import formats
    from pyops.inspect import page
    from pyops.inspect.logs import LogError
    from pyops.inspect.pictures import attention, style, tensors
    from pyops.inspect.statistics import Roundings, attention_entropy
    try:
        if job.needs_values and (result := _draw_large(job)):
            return result
        x = job.entry.load() if job.needs_values else None
    except LogError as error:
        return _Result((job.entry.relative_path, str(error)), (), None)
    if x is None:
        counts, described, entropy = _of_drawing(job.drawing)
        losses = {text: job.losses[text] for text in job.formats}
        measured = page.measure(job.page, None, losses if _has_axis(job.entry) else None, described) if job.page else None
        return _Result(_record_of(job, described, counts, losses, entropy), (), measured)
    drawn, parsed = [], [formats.parse(text) for text in job.formats]
    roundings = Roundings(np.atleast_1d(np.asarray(x, np.float32)), job.mask)
    with style.look() if job.pictures or job.sentences else contextlib.nullcontext():
        if job.pictures:
            tensor = tensors.analyse(job.entry, x, job.mask, parsed, job.losses, job.colours == 'rms', roundings)
            counts, described = tensor.counts, tensor.statistics
            losses = {str(r.format): r.statistics for r in tensor.rounded}
            for kind in job.pictures:
                path = os.path.join(job.folder, kind, f'{job.stem}.png')
                drawn.append((path, tensors.DRAW[kind](tensor).save(path, job.dpi)))
        else:
            counts, described, losses = tensors.measure(job.entry, roundings, parsed, job.losses)
        for sentence, words in job.sentences:
            path = os.path.join(job.folder, 'attention_maps', f'{job.stem}_sentence{sentence}.png')
            sheet = attention.draw_maps(
                tensors.title_of(job.entry),
                f'{tensors.subtitle_of(job.entry)}  ·  sentence {sentence} (0 to {x.shape[0] - 1})',
                *attention.heads_of(x, job.mask, sentence, words))
            drawn.append((path, sheet.save(path, job.dpi)))
    entropy = tuple(attention_entropy(x, job.mask).tolist()) if job.entry.is_weights else ()
    measured = (page.measure(job.page, x, losses if _has_axis(job.entry) else None, roundings=roundings) if job.page
                else None)
    return _Result(_record_of(job, described, counts, losses, entropy), tuple(drawn), measured)


def _draw_large(job):
    """Return the _Result of a large tensor, of which no more than a piece is in memory; None for others.

    Measures are of all values; pictures show evenly spaced rows, and the page has no plots of the tensor.
    """
    from pyops import formats
    from pyops.inspect import page, pieces
    from pyops.inspect.pictures import numbers, style, tensors
    entry, mask = job.entry, job.mask
    if math.prod(entry.shape) <= LARGE or entry.is_weights or not _has_axis(entry):
        return None
    texts = dict.fromkeys((*job.formats, *(job.page[4] if job.page else ())))
    losses = {}
    for text in texts:
        found = job.losses.get(text) or pieces.measure_in_pieces(entry, formats.parse(text), entry.axis, mask)
        if found is None:
            return None
        losses[text] = found if isinstance(found, dict) else found[0]
    parsed = [formats.parse(text) for text in job.formats]
    part = pieces.some_rows(entry, parsed, entry.axis, mask)
    if part is None:
        return None
    described, counts = entry.statistics or pieces.describe_in_pieces(entry, mask), 0
    valid = pieces.parts_of(mask, entry.shape)
    for start, stop, (x,) in pieces.in_parts(entry):
        counts = counts + numbers.binades(numbers.valid(x, valid(start, stop)))
    drawn = []
    if job.pictures:
        x, part_mask, axis = part
        some = dataclasses.replace(entry, shape=x.shape, axis=axis, mask=())
        with style.look():
            tensor = tensors.analyse(some, x, part_mask, parsed, losses, job.colours == 'rms')
            tensor = dataclasses.replace(
                tensor, subtitle=f'{tensors.subtitle_of(entry)}  \N{MIDDLE DOT}  {len(x):,} evenly spaced rows of '
                f'{math.prod(entry.shape[:-1]):,}', shape=entry.shape, statistics=described, counts=counts, is_sampled=True)
            for kind in job.pictures:
                path = os.path.join(job.folder, kind, f'{job.stem}.png')
                drawn.append((path, tensors.DRAW[kind](tensor).save(path, job.dpi)))
    measured = page.measure((*job.page[:5], None, *job.page[6:]), None, losses, described) if job.page else None
    return _Result(_record_of(job, described, counts, {text: losses[text] for text in job.formats}, ()), tuple(drawn), measured)


def _has_axis(entry):
    """Return whether the errors of formats are measured along the entry's axis; the page always does so."""
    from pyops.inspect.pictures import tensors
    return tensors.axis_of(entry, max(len(entry.shape), 1)) == entry.axis


def _record_of(job, described, counts, losses, entropy):
    from pyops.inspect.pictures import overview
    entry = job.entry
    return overview.Record(entry.layer, entry.layer_type, entry.operation or 'unknown', entry.name, entry.step, entry.time,
                           'fp32' if entry.fmt is None else str(entry.fmt), entry.shape, entry.relative_path, described,
                           counts, losses, job.place, _tags_of(entry), entropy)


def _tags_of(entry):
    """Return {column of tensor_stats.txt: text} that distinguishes the instances of a tensor."""
    return {name: str(value) for name, value in (
        ('folder', os.path.dirname(entry.relative_path)), ('run', entry.training + 1 if entry.training else ''),
        *((tag, getattr(entry, tag)) for tag in TAGS)) if value not in ('', None)}


def _count(summary, written, drawn):
    for path, is_drawn in drawn:
        written.add(path)
        summary.pictures += is_drawn
        if not is_drawn:
            summary.foreign.append(path)


def _remove_stale(folder, written):
    """Remove pictures of an earlier run that this run did not draw: files with our mark that have not been renamed."""
    from pyops.inspect.pictures import style
    removed = 0
    for name in FOLDERS:
        with os.scandir(os.path.join(folder, name)) as items:
            for path in sorted(item.path for item in items if item.name.endswith('.png')):
                if path not in written and style.is_ours(path, as_named=True):
                    with contextlib.suppress(OSError):
                        os.unlink(path)
                        removed += 1
    return removed


# ---- the whole ---------------------------------------------------------------------------------------------------------

def _overview_jobs(source, records, folder, options, summary):
    """Return a _SheetJob for quick_analysis.png and for each picture or series of pictures in statistics/."""
    from pyops.inspect.pictures import overview, style
    run = source.run
    about = [style.plain(run.get('program') or ''), style.shortened(os.path.abspath(source.folder), 70),
             _steps({record.step for record in records})]
    jobs = [('draw_quick_analysis', (records, 'Quick analysis', '  \N{MIDDLE DOT}  '.join(filter(None, about)),
                                     len(summary.skipped)), 'quick_analysis')]
    texts = overview.formats_of(records)
    if source.steps:
        jobs.append(('draw_training', (curves(source.steps),), 'statistics/training'))
    jobs += [('draw_gradient_flow', (records,), 'statistics/gradient_flow'),
             ('draw_magnitudes', (records,), 'statistics/magnitudes'), ('draw_sqnr', (records, texts), 'statistics/sqnr')]
    if any(record.entropy for record in records):
        jobs.append(('draw_entropy', (records,), 'statistics/attention_entropy'))
    if any(record.broken for record in records):
        jobs.append(('draw_broken', (records,), 'statistics/broken'))
    layers = overview.by(records, lambda record: (record.layer, record.place))
    limit = options.limit or len(layers)
    if len(layers) > limit:
        summary.notes.append(f'statistics of {limit:,} of {len(layers):,} layers have a picture of their own (--limit {limit})')
    for (layer, place), group in list(layers.items())[:limit]:
        name = style.slug(layer) + (f'_{style.slug(place, 60)}' if place else '')
        jobs.append(('draw_layer', (layer, group, texts), f'statistics/layer_{name}'))
    return [_SheetJob(function, arguments, os.path.join(folder, *name.split('/')), options.dpi)
            for function, arguments, name in jobs]


def _draw_sheets(job):
    """Draw the sheets of a job, and return [(path, whether it was written)]."""
    from pyops.inspect.pictures import overview, style
    with style.look():
        found = getattr(overview, job.function)(*job.arguments)
        sheets = found if isinstance(found, list) else [found]
        paths = [f'{job.path}{f"_{i + 1:03d}" if len(sheets) > 1 else ""}.png' for i in range(len(sheets))]
        return [(path, sheet.save(path, job.dpi)) for path, sheet in zip(paths, sheets, strict=True)]


def _page_tasks(source, entries, folder, texts, options, summary):
    """Return {id of an entry: task of page.tasks_of}, {} if there is no page; without plotly, add a note to the summary."""
    from pyops.inspect import page, payload
    from pyops.inspect.pictures import style
    path = os.path.join(folder, 'index.html')
    if not options.page:
        return {}
    try:
        page.script()
    except UserError as error:
        summary.notes.append(f'no index.html: {error}')
        return {}
    if os.path.lexists(path) and not style.is_ours(path):
        summary.foreign.append(path)
        return {}
    formats = payload.used_formats(entries, texts)
    shown, pictured, sides, _ = page.plan(entries, formats, options.page_max)
    return {id(entry): task for entry, task in zip(shown, page.tasks_of(source, shown, formats, sides, pictured), strict=True)}


def _write_page(source, entries, folder, texts, measured, summary, page_max):
    """Write index.html.  measured: {number of an entry: result of page.measure}; a missing one failed, and fails again."""
    from pyops.inspect import page
    summary.page = page.write(source, folder, texts, page_max, lambda measure, tasks: (
        measured.get(task[0]) or measure(task) for task in tasks), entries)


def _write_table(path, logs, records, summary):
    """Write tensor_stats.txt: a line per tensor, then the skipped files and the notes."""
    from pyops.inspect.pictures import overview, style
    if os.path.lexists(path) and not style.is_ours(path):
        summary.foreign.append(path)
        return
    texts = overview.formats_of(records)
    keys = 'count', 'nan', 'inf', 'zeros', 'amax', 'mean', 'mean_abs', 'rms', 'std', 'min', 'max'
    tags = [name for name in ('folder', 'run', *TAGS) if any(name in record.tags for record in records)]
    rows = [['step', 'layer', 'operation', 'tensor', *tags, 'format', 'shape', *keys, *(f'SQNR {text}' for text in texts)]]
    for record in records:
        time = '' if record.time is None else f'_t{record.time}'
        rows.append([f'{record.step}', style.plain(record.layer), record.operation, style.plain(record.name) + time,
                     *(style.plain(record.tags.get(name, '-')) for name in tags), record.format,
                     'x'.join(map(str, record.shape)) or '1', *(_cell(record.statistics[key]) for key in keys),
                     *(_decibels(record.losses.get(text)) for text in texts)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [f'{style.SOFTWARE}: {len(records)} tensors of {style.plain(logs)}; statistics without padding, SQNR in dB', '']
    for row in rows:
        lines.append('  '.join(cell.ljust(width) if 1 <= i <= 5 + len(tags) else cell.rjust(width)
                               for i, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip())
    lines += ['', f'skipped: {len(summary.skipped)}']
    lines += [f'  {style.plain(file)}: {style.plain(reason)}' for file, reason in summary.skipped]
    lines += ['', *summary.notes] if summary.notes else []
    style.write_whole(path, ('\n'.join(lines) + '\n').encode('utf-8', 'replace'))


def _cell(value):
    return '-' if value is None else f'{value}' if isinstance(value, int) else f'{value:.4g}'


def _decibels(loss):
    value = None if loss is None else loss['sqnr_db']
    return '-' if value is None or math.isnan(value) else 'exact' if value == math.inf else f'{value:.2f}'      # -inf: overflow
