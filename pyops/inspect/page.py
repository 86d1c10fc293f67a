"""index.html: an interactive page of saved tensors in one file, which needs neither a network nor a server.

The file contains page.html, page.css, page.js and plotly.js.  It also embeds the compressed data: a catalogue (table rows,
statistics, loss) and one detail per tensor.  To stay within `page_max` bytes, the maps get coarser first, then details are
omitted, then tensors; evenly spaced steps remain, and the page lists the omissions.
"""
from __future__ import annotations

import base64
import collections
import hashlib
import importlib.resources
import json
import math
import os
import re
import zlib
from typing import TYPE_CHECKING, Any

from pyops.errors import UserError
from pyops.files import open_atomically
from pyops.formats import FORMATS
from pyops.inspect import payload
from pyops.inspect.statistics import Roundings
from pyops.inspect.writer import size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pyops.formats import Format
    from pyops.inspect.logs import Entry, Logs
    from pyops.inspect.runs import Runs
    from pyops.typing import PathLike

PAGE_MAX = 64_000_000               # bytes
# most rows and columns of the map of values, and of the maps of each format
_SIDES = (128, 64), (128, 48), (96, 48), (96, 32), (64, 32), (64, 24), (48, 24), (32, 16), (16, 8)
_ROW = 400                          # most bytes of a table row and of its error measures in one format


def write(logs: Logs | Runs, folder: PathLike, formats: Sequence[str | Format] = FORMATS, page_max: int = PAGE_MAX,
          work: Callable[..., Iterable[Any]] = map, entries: list[Entry] | None = None,
          partings: dict[str, Any] | None = None) -> str:
    """Write folder/index.html atomically and return its path.

    logs: a Logs, or a Runs, whose runs are shown side by side
    formats: the formats to show, in addition to those that the run used
    page_max: most bytes of data, without plotly's 5 MB;  work: a function like `map`, such as the map of a process pool
    entries: the tensors, default all of logs;  partings: of runs.parting_data
    UserError if plotly is not installed or the file cannot be written.
    """
    plotly = script()
    entries = logs.entries if entries is None else entries
    formats = payload.used_formats(entries, formats)
    entries, pictured, sides, omissions = plan(entries, formats, page_max)
    measured = work(measure, tasks_of(logs, entries, formats, sides, pictured))
    blobs = _blobs(logs, entries, formats, omissions, measured, partings)
    path = os.path.join(folder, 'index.html')
    try:
        os.makedirs(folder, exist_ok=True)
        with open_atomically(path) as file:
            file.writelines(part.encode() for part in render({'live': False, **head(logs.folder, formats)}, blobs, plotly))
    except OSError as error:
        raise UserError(f'{path}: the page cannot be written ({error.strerror or error}); give a writable folder with '
                        'enough free space') from error
    return path


def script() -> str:
    """Return plotly.js.  UserError if plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UserError('plotly is not installed; install it with: pip install plotly') from error
    return get_plotlyjs()


def head(folder, formats):
    """Return the data that the page needs before it loads any tensor."""
    return {'title': os.path.basename(os.path.abspath(folder)), 'quality': payload.QUALITY,
            'description': payload.DESCRIPTION, 'formats': [payload.describe_format(fmt) for fmt in formats]}


def render(data, blobs, plotly):
    """Yield the parts of the page.  data: the result of `head`;  blobs: (id, text without HTML special characters)."""
    def read(name):
        return importlib.resources.files('pyops.inspect').joinpath(name).read_text(encoding='utf-8')
    scripts = {'plotly': plotly, 'script': read('page.js')}
    # The content security policy allows these two scripts only, so names in the data can never run code.
    digests = (hashlib.sha256(text.encode()).digest() for text in scripts.values())
    hashes = ' '.join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    network = 'self' if data['live'] else 'none'
    policy = (f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
              f"connect-src '{network}'; base-uri 'none'; form-action 'none'")
    parts = {**scripts, 'policy': policy, 'style': read('page.css'), 'data': _json(data)}
    for i, text in enumerate(re.split(r'\{\{(\w+)\}\}', read('page.html'))):
        if i % 2 == 0:
            yield text
        elif text == 'blobs':
            for name, blob in blobs:
                yield f'<script type="text/plain" id="{name}">{blob}</script>\n'
        else:
            yield parts[text]


def plan(entries, formats, page_max):
    """Select what fits into page_max bytes.

    Return the entries, the numbers of those with plots, the size of their maps as in _SIDES, and sentences about the
    omissions.
    """
    row = _ROW * (1 + len(formats))
    all_entries = entries
    entries = [entries[number] for number in sorted(_fit(entries, lambda _: row, page_max / 2))]
    budget = page_max - row * len(entries)
    for sides in _SIDES:
        if sum(_bytes(entry, len(formats), *sides) for entry in entries) <= budget:
            break
    pictured = _fit(entries, lambda entry: _bytes(entry, len(formats), *sides), budget)
    omissions = []
    if len(entries) < len(all_entries):
        omissions.append(f'This page has {_count(entries, all_entries)}.')
    if len(pictured) < len(entries):
        omissions.append(f'It has plots of {_count([entries[number] for number in pictured], entries)}.')
    for side, full, name in zip(sides, _SIDES[0], ('values', 'rounded values and errors'), strict=True):
        if side < full:
            omissions.append(f'Maps of {name} have at most {side} \N{MULTIPLICATION SIGN} {side} cells instead of '
                             f'{full} \N{MULTIPLICATION SIGN} {full}.')
    if omissions:
        omissions.append(f'To show more, raise --page-max above {size_text(page_max)} or use python -m pyops inspect serve.')
    return entries, pictured, sides, omissions


def _count(some, entries):
    steps, all_steps = ({entry.step for entry in group} for group in (some, entries))
    return f'{len(some)} of {len(entries)} tensors, from {len(steps)} of {len(all_steps)} steps'


def _fit(entries, need, budget):
    """Return the numbers of entries that fit: the last step, the first, then steps in the middle of the widest gaps."""
    by_step, fitting = collections.defaultdict(list), set()
    for number, entry in enumerate(entries):
        by_step[entry.step].append(number)
    for step in _spread(sorted(by_step)):
        for number in by_step[step]:
            budget -= need(entries[number])
            if budget < 0:
                return fitting
            fitting.add(number)
    return fitting


def _spread(steps):
    """Return the steps in an order whose every prefix is evenly spread over all steps."""
    order = dict.fromkeys((*steps[-1:], *steps[:1]))
    gaps = [(0, len(steps) - 1)]
    while gaps:
        middles = [(low, (low + high) // 2, high) for low, high in gaps]
        order |= dict.fromkeys(steps[middle] for low, middle, _ in middles if middle > low)
        gaps = [gap for low, middle, high in middles if middle > low for gap in ((low, middle), (middle, high))]
    return list(order)


def _bytes(entry, formats, side, half):
    """Return an upper bound of a detail's bytes, fitted to random values of all magnitudes, which hardly compress."""
    def cells(side):
        return math.prod(min(length, side) for length in payload.matrix_shape(entry.shape))
    weights = min(2 * math.prod(entry.shape), payload.SENTENCES) if payload.is_attention(entry) else 0
    return int(2.75 * cells(side) + formats * (5.4 * cells(half) + 450) + 1.4 * weights) + 600


def tasks_of(logs, entries, formats, sides, pictured):
    """Yield the argument of `measure` for each entry.  formats: as of payload.used_formats;  others: as `plan` returns them."""
    for number, entry in enumerate(entries):
        yield _task(logs, number, entry, formats, sides if number in pictured else None)


def _task(logs, number, entry, formats, sides):
    """Return the argument of `measure`, which may run in another process."""
    mask, failure, words = None, None, []
    try:
        mask = logs.mask(entry)
    except UserError as error:
        failure = str(error)
    if sides and payload.is_attention(entry):
        words = [logs.tokens(entry, sentence) for sentence in range(min(entry.shape[0], payload.SENTENCES))]
    return number, entry, mask, words, tuple(formats), sides, failure


def measure(task, x=None, known=None, described=None, roundings=None):
    """Return (number, statistics, {format: quality}, compressed detail or None, error message or None) of a tensor.

    x: the tensor, loaded if it is missing and needed;  known: {format: result of statistics.quantization}, computed if missing
    described: result of statistics.describe, computed if missing;  roundings: statistics.Roundings of x, made if missing
    """
    number, entry, mask, words, formats, sides, failure = task
    try:
        if failure:
            raise UserError(failure)
        known = known or {}
        is_known = not sides and (described or entry.statistics) and all(fmt in known for fmt in formats)
        x = entry.load() if x is None and not is_known else x
        statistics = (None if entry.statistics else payload.description(described) if described else
                      payload.describe(x, mask))
        roundings = roundings or Roundings(x, mask)
        quality = {fmt: payload.quality_of(known[fmt] if fmt in known else roundings.quantization(fmt, entry.axis))
                   for fmt in formats}
        if not sides:
            return number, statistics, quality, None, None
        detail = payload.detail(x, mask, entry.axis, formats, *sides, roundings=roundings)
        if payload.is_attention(entry):
            detail['attention'] = payload.attention(x, mask, words.__getitem__, side=sides[0])
        return number, statistics, quality, _packed(detail), None
    except UserError as error:
        return number, None, {}, None, str(error)


def _blobs(logs, entries, formats, omissions, measured, partings):
    """Yield (id, text) of each part of the data."""
    rows = [payload.row(number, entry) for number, entry in enumerate(entries)]
    quality = {fmt: [None] * len(rows) for fmt in formats}
    pictured, skipped = [], [list(item) for item in logs.skipped]
    for number, statistics, measures, detail, failure in measured:
        rows[number]['statistics'] = rows[number]['statistics'] or statistics
        for fmt, values in measures.items():
            quality[fmt][number] = values
        if detail:
            pictured.append(number)
            yield f't{number}', detail
        if failure:
            skipped.append([entries[number].relative_path or entries[number].file, failure])
    yield 'catalogue', _packed({'run': logs.run, 'steps': payload.thin_steps(logs.steps), 'skipped': skipped,
                                'omissions': omissions, 'tensors': rows, 'quality': quality, 'pictured': pictured,
                                'partings': partings})


def _packed(value):
    return base64.b64encode(zlib.compress(_json(value).encode(), 4)).decode()


def _json(value):
    """Return ASCII JSON that is safe within <script>: it contains no `<`."""
    return json.dumps(value, separators=(',', ':'), allow_nan=False).replace('<', '\\u003c')
