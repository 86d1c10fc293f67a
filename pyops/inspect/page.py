"""index.html: saved tensors as one interactive page that needs neither a network nor a server.

The page is page.html with page.css, page.js and plotly's JavaScript in it.  Its data lie in it too, deflated: a catalogue
(rows of the table, statistics, loss) and one detail for each tensor.  What would make it larger than `page_max` is left
out, first the resolution of maps, then pictures, then tensors, by steps that are spread evenly; the page says so.
"""
import base64
import collections
import hashlib
import importlib.resources
import json
import math
import os
import re
import zlib

from pyops.errors import UserError
from pyops.files import open_atomically
from pyops.formats import FORMATS
from pyops.inspect import payload
from pyops.inspect.writer import size_text

PAGE_MAX = 64_000_000               # bytes
# cells of a map of values either way, and of the two maps that there are for every format
_SIDES = (128, 64), (128, 48), (96, 48), (96, 32), (64, 32), (64, 24), (48, 24), (32, 16), (16, 8)
_ROW = 400                          # bytes that a row of the table and its numbers in one format need, at most


def write(logs, folder, formats=FORMATS, page_max=PAGE_MAX, work=map, entries=None):
    """Write folder/index.html, complete or not at all.  -> its path.

    logs: a Logs.  formats: those to show, beside them those that the tensors were rounded to in their run.
    page_max: bytes of the data, plotly's 5 MB apart.  work: a map that may work in parallel, such as that of a process pool.
    entries: which tensors, all of logs by default.
    UserError where plotly is not installed or the file cannot be written.
    """
    plotly = script()
    entries = logs.entries if entries is None else entries
    formats = payload.used_formats(entries, formats)
    entries, pictured, sides, left = plan(entries, formats, page_max)
    tasks = (_task(logs, number, entry, formats, sides if number in pictured else None)
             for number, entry in enumerate(entries))
    blobs = _blobs(logs, entries, formats, left, work(_measure, tasks))
    path = os.path.join(folder, 'index.html')
    try:
        os.makedirs(folder, exist_ok=True)
        with open_atomically(path) as file:
            file.writelines(part.encode() for part in render({'live': False, **head(logs.folder, formats)}, blobs, plotly))
    except OSError as error:
        raise UserError(f'{path}: the page cannot be written ({error.strerror or error}); want a folder that you may write '
                        'to, with room in it') from error
    return path


def script():
    """plotly's JavaScript.  UserError where plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UserError('plotly is not installed: install it with: pip install plotly') from error
    return get_plotlyjs()


def head(folder, formats):
    """What the page knows before any data."""
    return {'title': os.path.basename(os.path.abspath(folder)), 'quality': payload.QUALITY,
            'description': payload.DESCRIPTION, 'formats': [payload.describe_format(fmt) for fmt in formats]}


def render(data, blobs, plotly):
    """The page in pieces of text.  data: its `head`;  blobs: (id, text of letters that HTML leaves alone)."""
    def read(name):
        return importlib.resources.files('pyops.inspect').joinpath(name).read_text(encoding='utf-8')
    scripts = {'plotly': plotly, 'script': read('page.js')}
    # The browser runs these two scripts and no other, whatever a name in the data may look like.
    digests = (hashlib.sha256(text.encode()).digest() for text in scripts.values())
    hashes = ' '.join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    network = 'self' if data['live'] else 'none'
    policy = (f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
              f"connect-src '{network}'; base-uri 'none'; form-action 'none'")
    parts = {**scripts, 'policy': policy, 'style': read('page.css'), 'data': _json(data)}
    for place, text in enumerate(re.split(r'\{\{(\w+)\}\}', read('page.html'))):
        if place % 2 == 0:
            yield text
        elif text == 'blobs':
            for name, blob in blobs:
                yield f'<script type="text/plain" id="{name}">{blob}</script>\n'
        else:
            yield parts[text]


def plan(entries, formats, page_max):
    """What fits into page_max bytes.  -> entries, numbers of those with pictures, cells of their maps as in _SIDES, lines
    that say what is left out."""
    row = _ROW * (1 + len(formats))
    everything = entries
    entries = [entries[number] for number in sorted(_fit(entries, lambda _: row, page_max / 2))]
    room = page_max - row * len(entries)
    for sides in _SIDES:
        if sum(_bytes(entry, len(formats), *sides) for entry in entries) <= room:
            break
    pictured = _fit(entries, lambda entry: _bytes(entry, len(formats), *sides), room)
    left = []
    if len(entries) < len(everything):
        left.append(f'This page has {_count(entries, everything)}.')
    if len(pictured) < len(entries):
        left.append(f'It has pictures of {_count([entries[number] for number in pictured], entries)}.')
    for cells, whole, what in zip(sides, _SIDES[0], ('values', 'rounded numbers and errors'), strict=True):
        if cells < whole:
            left.append(f'Maps of {what} have at most {cells} cells either way instead of {whole}.')
    if left:
        left.append(f'A larger --page-max than {size_text(page_max)} takes more; python -m pyops inspect serve shows all.')
    return entries, pictured, sides, left


def _count(some, entries):
    steps, all_steps = ({entry.step for entry in those} for those in (some, entries))
    return f'{len(some)} of {len(entries)} tensors, of {len(steps)} of {len(all_steps)} steps'


def _fit(entries, need, room):
    """Numbers of entries that fit: those of the last step, of the first, then of those in the middle of the widest gaps."""
    by_step, fitting = collections.defaultdict(list), set()
    for number, entry in enumerate(entries):
        by_step[entry.step].append(number)
    for step in _spread(sorted(by_step)):
        for number in by_step[step]:
            room -= need(entries[number])
            if room < 0:
                return fitting
            fitting.add(number)
    return fitting


def _spread(steps):
    """The steps in an order of which every beginning is spread over all."""
    order = dict.fromkeys((*steps[-1:], *steps[:1]))
    gaps = [(0, len(steps) - 1)]
    while gaps:
        middles = [(low, (low + high) // 2, high) for low, high in gaps]
        order |= dict.fromkeys(steps[middle] for low, middle, _ in middles if middle > low)
        gaps = [gap for low, middle, high in middles if middle > low for gap in ((low, middle), (middle, high))]
    return list(order)


def _bytes(entry, formats, side, half):
    """Bytes of a tensor's detail, measured on random numbers of all magnitudes, which deflate makes hardly smaller."""
    def cells(side):
        return math.prod(min(length, side) for length in payload.matrix_shape(entry.shape))
    weights = min(2 * math.prod(entry.shape), payload.SENTENCES) if payload.is_attention(entry) else 0
    return int(2.75 * cells(side) + formats * (5.4 * cells(half) + 450) + 1.4 * weights) + 600


def _task(logs, number, entry, formats, sides):
    """All that _measure needs, which may run in another process."""
    mask, failure, words = None, None, []
    try:
        mask = logs.mask(entry)
    except UserError as error:
        failure = str(error)
    if sides and payload.is_attention(entry):
        words = [logs.tokens(entry, sentence) for sentence in range(min(entry.shape[0], payload.SENTENCES))]
    return number, entry, mask, words, tuple(formats), sides, failure


def _measure(task):
    """-> (number of the tensor, its statistics, {format: quality}, its detail deflated or None, why it could not be read)."""
    number, entry, mask, words, formats, sides, failure = task
    try:
        if failure:
            raise UserError(failure)
        x = entry.load()
        statistics = None if entry.statistics else payload.describe(x, mask)
        quality = {fmt: payload.quality(x, fmt, entry.axis, mask) for fmt in formats}
        if not sides:
            return number, statistics, quality, None, None
        detail = payload.detail(x, mask, entry.axis, formats, *sides)
        if payload.is_attention(entry):
            detail['attention'] = payload.attention(x, mask, words.__getitem__, side=sides[0])
        return number, statistics, quality, _packed(detail), None
    except UserError as error:
        return number, None, {}, None, str(error)


def _blobs(logs, entries, formats, left, measured):
    """(id, text) of every part of the data."""
    rows = [payload.row(number, entry) for number, entry in enumerate(entries)]
    quality = {fmt: [None] * len(rows) for fmt in formats}
    pictured, skipped = [], [list(item) for item in logs.skipped]
    for number, statistics, numbers, detail, failure in measured:
        rows[number]['statistics'] = rows[number]['statistics'] or statistics
        for fmt, values in numbers.items():
            quality[fmt][number] = values
        if detail:
            pictured.append(number)
            yield f't{number}', detail
        if failure:
            skipped.append([entries[number].place or entries[number].file, failure])
    yield 'catalogue', _packed({'run': logs.run, 'steps': payload.thin_steps(logs.steps), 'skipped': skipped, 'left': left,
                                'tensors': rows, 'quality': quality, 'pictured': pictured})


def _packed(value):
    return base64.b64encode(zlib.compress(_json(value).encode(), 6)).decode()


def _json(value):
    """JSON in ASCII that may stand in a <script>: no `<` ends it."""
    return json.dumps(value, separators=(',', ':'), allow_nan=False).replace('<', '\\u003c')
