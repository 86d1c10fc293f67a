"""python -m pyops inspect runs: the first step and action where training runs part, from the tensors that they saved.

Kernels are deterministic, so two runs of one model with the same flags save the same bits.  If a format, a seed or a device
differs, the first tensor that differs shows where that has an effect.
"""
from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops.errors import UserError, printable
from pyops.inspect.choice import select
from pyops.inspect.known import Joint
from pyops.inspect.logs import TAGS, Entry, LogError, Logs, sort_key
from pyops.inspect.pieces import in_parts, parts_of
from pyops.inspect.tables import cannot_write, cut, cut_name, finite, print_skipped, write
from pyops.training import watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

TOLERANCE = 1e-5
TOP = 30                                # lines of the table without --top

_TILE = 1 << 16                         # values; 0.5 MiB of float64 fit in the L2 cache
_PARAMETERS = 'weight', 'bias'          # tensors whose shapes depend on the model alone


class Named(NamedTuple):
    """A run: its name and its folder of saved tensors."""
    name: str
    folder: str


def named(texts: Iterable[str]) -> list[Named]:
    """Parse 'FOLDER' or 'NAME=FOLDER'; the name of a folder is its last part.  UserError for names that are not distinct."""
    runs: list[Named] = []
    for text in texts:
        name, equals, folder = text.partition('=')
        if not equals or os.path.isdir(text):
            name, folder = os.path.basename(os.path.abspath(text)), text
        if not name or not folder or '/' in name:
            raise UserError(f'{printable(text)}: expected a folder of saved tensors, or NAME=FOLDER with a name without /')
        for other in runs:
            if other.name == name:
                raise UserError(f'{printable(other.folder)} and {printable(folder)}: both runs have the name '
                                f'{printable(name)}; name one of them, as in other=FOLDER')
        runs.append(Named(name, folder))
    return runs


class Runs:
    """The tensors of several runs, with the attributes and methods of Logs.  The first run is the reference of the others.

    An entry's relative_path, and the folder of a step, begin with the name of the run.
    settings: {name: {flag: value}} of the settings that are not the same in all runs
    UserError if a folder cannot be read, or is empty without `empty`.
    """

    def __init__(self, runs: Sequence[Named], empty: bool = False) -> None:
        self.names = [run.name for run in runs]
        self.folder = ', '.join(self.names)
        self.entries: list[Entry] = []
        self.steps: list[dict[str, Any]] = []
        self._logs = {run.name: Logs(run.folder, empty) for run in runs}
        self._read = dict.fromkeys(self.names, 0)       # number of steps taken over
        self._take({name: logs.entries for name, logs in self._logs.items()})

    def _take(self, new: dict[str, list[Entry]]) -> list[Entry]:
        added = [dataclasses.replace(entry, relative_path=f'{name}/{entry.relative_path}')
                 for name, entries in new.items() for entry in entries]
        added.sort(key=sort_key)
        if added:
            self.entries = sorted(self.entries + added, key=sort_key)
        for name, logs in self._logs.items():
            for step in logs.steps[self._read[name]:]:
                self.steps.append(step | {'folder': '/'.join(filter(None, (name, step['folder'])))})
            self._read[name] = len(logs.steps)
        return added

    def refresh(self) -> list[Entry]:
        """Read the tensors added since the last call and return their entries, in order."""
        return self._take({name: logs.refresh() for name, logs in self._logs.items()})

    @property
    def skipped(self) -> list[tuple[str, str]]:
        return [(f'{printable(name)}/{file}', reason) for name, logs in self._logs.items() for file, reason in logs.skipped]

    @property
    def run(self) -> dict[str, Any]:
        """The program and the settings that are the same in all runs."""
        lines = [logs.run for logs in self._logs.values()]
        common = {key: value for key, value in (lines[0].get('settings') or {}).items()
                  if all(key in (line.get('settings') or {}) and line['settings'][key] == value for line in lines)}
        programs = {line.get('program') or '' for line in lines}
        return {'program': programs.pop() if len(programs) == 1 else '', 'settings': common}

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        common = self.run['settings']
        return {name: {key: value for key, value in (logs.run.get('settings') or {}).items() if key not in common}
                for name, logs in self._logs.items()}

    def mask(self, entry: Entry) -> np.ndarray | None:
        """As Logs.mask."""
        return self._logs[run_of(entry)].mask(entry)

    def tokens(self, entry: Entry, sentence: int) -> tuple[list[str], list[str]] | None:
        """As Logs.tokens."""
        return self._logs[run_of(entry)].tokens(entry, sentence)

    def batch(self, entry: Entry) -> dict[str, Any]:
        """As Logs.batch."""
        return self._logs[run_of(entry)].batch(entry)


def run_of(entry: Entry) -> str:
    """Return the name of the run of an entry of Runs."""
    return entry.relative_path.partition('/')[0]


# ---- differences -----------------------------------------------------------------------------------------------------

class Pair(NamedTuple):
    """A tensor of the reference and the same tensor of another run."""
    run: str
    reference: Entry
    other: Entry


class Difference(NamedTuple):
    """The difference of a pair.

    relative: root mean square of the difference, divided by the reference's; inf if the reference is 0, if only one has
    a NaN or infinity in a place, or if the shapes differ
    max_error: largest absolute difference of an element;  reason: why the values cannot be compared, '' if they can
    """
    run: str
    entry: Entry                    # of the reference
    relative: float
    max_error: float
    reason: str = ''


class Row(NamedTuple):
    """An action of one run at all steps: its worst Difference, its largest difference of an element, the number of tensors, and
    the first step beyond the tolerance."""
    worst: Difference
    max_error: float
    tensors: int
    first: int | None


class Pairing:
    """Finds the tensors that the reference and another run both saved.  reference: name of the first run."""

    def __init__(self, reference: str) -> None:
        self.reference = reference
        self._known: dict[str, dict[tuple[Any, ...], Entry]] = {}       # run -> key -> entry
        self._counts: dict[tuple[Any, ...], int] = {}

    def add(self, entries: Iterable[Entry]) -> list[Pair]:
        """Return the pairs with at least one new entry, in the order of the reference's steps and actions."""
        added = []
        for entry in entries:
            run = run_of(entry)
            key = _key(entry)
            nth = self._counts[run, key] = self._counts.get((run, key), -1) + 1     # of tensors with the same names
            self._known.setdefault(run, {})[*key, nth] = entry
            added.append((run, (*key, nth)))
        pairs = []
        for run, key in added:
            if run != self.reference:
                pairs.append((run, key))
            else:
                pairs += [(other, key) for other in self._known if other != run]
        of_reference = self._known.get(self.reference, {})
        found = [Pair(run, of_reference[key], self._known[run][key]) for run, key in dict.fromkeys(pairs)
                 if key in of_reference and key in self._known[run]]
        return sorted(found, key=lambda pair: sort_key(pair.reference))

    def unpaired(self, run: str) -> tuple[int, int]:
        """Return the number of tensors that only the reference has, and that only this run has."""
        ours, other = (self._known.get(name, {}).keys() for name in (self.reference, run))
        return len(ours - other), len(other - ours)


def _key(entry):
    folder = os.path.dirname(entry.relative_path).partition('/')[2]
    return (folder, entry.training, entry.layer, entry.operation, entry.name, entry.step, entry.time,
            *(getattr(entry, tag) for tag in TAGS))


def action_of(entry: Entry) -> str:
    """Return what an entry is at every step: its layer, operation, name, time step and place."""
    folder = os.path.dirname(entry.relative_path).partition('/')[2]
    time = '' if entry.time is None else f' t {entry.time}'
    place = ', '.join(filter(None, (folder, f'run {entry.training + 1}' if entry.training else '', entry.place_in_folder)))
    return printable(f'{entry.layer} {entry.operation} {entry.name}{time}' + (f' ({place})' if place else ''))


def check_models(entries: Iterable[Entry]) -> None:
    """Raise UserError if runs have no layer in common, or parameters of one name with different shapes."""
    layers: dict[str, dict[tuple[Any, ...], Entry]] = {}
    for entry in entries:
        layers.setdefault(run_of(entry), {}).setdefault((entry.layer, entry.operation, entry.name, entry.rank), entry)
    (reference, ours), *others = layers.items()
    for run, theirs in others:
        common = [key for key in ours if key in theirs]
        if not common:
            first, second = (printable(next(iter(one))[0]) for one in (ours, theirs))
            raise UserError(f'{printable(reference)} and {printable(run)}: no layer has the same tensor in both, for example '
                            f'{first} and {second}; compare runs of one model, with the same --save-layers')
        for key in common:
            if key[2] in _PARAMETERS and ours[key].shape != theirs[key].shape:
                raise UserError(f'{printable(reference)} and {printable(run)}: {printable(key[0])} {key[2]} has the shapes '
                                f'{ours[key].shape} and {theirs[key].shape}; compare runs of one model')


def difference(pair: Pair, mask: np.ndarray | None = None) -> Difference:
    """Return the Difference of a pair.  mask: bool that broadcasts to the tensor, False at padding.

    LogError if a file cannot be read.
    """
    if pair.reference.shape != pair.other.shape:
        return Difference(pair.run, pair.reference, math.inf, math.inf,
                          f'shapes {pair.reference.shape} and {pair.other.shape}')
    valid = parts_of(mask, pair.reference.shape)
    parts = ((x, y, valid(start, stop)) for start, stop, (x, y) in in_parts(pair.reference, pair.other))
    return Difference(pair.run, pair.reference, *_distance(parts))


def _distance(parts):
    """Return (relative difference, largest difference) of two arrays from their parts: flat (x, y, mask or None)."""
    signal = error = largest = 0.0
    for x, y, valid in parts:
        for start in range(0, x.size, _TILE):
            tile = slice(start, start + _TILE)
            if np.array_equal(x[tile], y[tile]) and valid is None:          # the usual case; without NaN
                a = x[tile].astype(np.float64)
                signal += float(np.einsum('i,i', a, a)) if np.isfinite(a).all() else 0.0
                continue
            a, b = (array[tile] if valid is None else array[tile][valid[tile]] for array in (x, y))
            both = np.isfinite(a) & np.isfinite(b)
            if not both.all():
                a, b, broken = a[both], b[both], (a[~both], b[~both])
                if not np.array_equal(*broken, equal_nan=True):
                    return math.inf, math.inf
            a = a.astype(np.float64)
            e = a - b
            signal, error = signal + float(np.einsum('i,i', a, a)), error + float(np.einsum('i,i', e, e))
            largest = max(largest, float(np.abs(e).max(initial=0)))
    relative = 0.0 if not error else math.sqrt(error / signal) if signal else math.inf
    return relative, largest


def mask_of(runs: Runs, pair: Pair) -> np.ndarray | None:
    """Return where both tensors have words; None without padding.  LogError as of Logs.mask."""
    if pair.reference.shape != pair.other.shape:
        return None
    masks = [mask for entry in (pair.reference, pair.other) if (mask := runs.mask(entry)) is not None]
    return None if not masks else masks[0] if len(masks) == 1 else masks[0] & masks[1]


class Partings:
    """Differences, one by one, and what they say together.

    first: {run: the first Difference beyond the tolerance, in the order of the reference}
    """

    def __init__(self, tolerance: float = TOLERANCE) -> None:
        self.tolerance = tolerance
        self.first: dict[str, Difference] = {}
        self.compared = 0
        self._rows: dict[tuple[str, str], Row] = {}
        self._order: dict[tuple[str, str], Any] = {}        # key -> sort_key of the first entry

    def is_beyond(self, value: float) -> bool:
        return not value <= self.tolerance

    def add(self, one: Difference) -> None:
        self.compared += 1
        key, step = (one.run, action_of(one.entry)), one.entry.step
        row = self._rows.get(key)
        self._order[key] = min(self._order.get(key, sort_key(one.entry)), sort_key(one.entry))
        is_beyond = self.is_beyond(one.relative)
        if row is None:
            self._rows[key] = Row(one, one.max_error, 1, step if is_beyond else None)
        else:
            worst = one if one.relative > row.worst.relative else row.worst
            first = row.first if not is_beyond else step if row.first is None else min(row.first, step)
            self._rows[key] = Row(worst, max(row.max_error, one.max_error), row.tensors + 1, first)
        if is_beyond:
            known = self.first.get(one.run)
            if known is None or sort_key(one.entry) < sort_key(known.entry):
                self.first[one.run] = one

    def rows(self, sort: str = 'worst') -> list[Row]:
        """Return the Rows, by 'worst' (largest first), or by 'order' (as the runs wrote the actions)."""
        if sort == 'order':
            return [self._rows[key] for key in sorted(self._rows, key=self._order.__getitem__)]
        return sorted(self._rows.values(), key=lambda row: (-row.worst.relative, sort_key(row.worst.entry)))


def compare(runs: Runs, entries: Iterable[Entry], tolerance: float = TOLERANCE,
            progress: Callable[[list[Pair]], Iterable[Pair]] = iter,
            known: Joint | None = None) -> tuple[Partings, list[Difference], Pairing, list[Any]]:
    """Compare the entries of all runs with the first run.  Return (Partings, [Difference], Pairing, [(file, reason)]).
    known: differences of earlier commands; receives the others"""
    partings, found, skipped = Partings(tolerance), [], []
    pairing = Pairing(runs.names[0])
    for pair in progress(pairing.add(entries)):
        try:
            mask = mask_of(runs, pair)
            slot = known.of((pair.reference, pair.other), (mask,)) if known else None
            ready = slot.find() if slot else None
            one = Difference(pair.run, pair.reference, *ready) if ready else difference(pair, mask)
            if slot and not ready:
                slot.add(list(one[2:]))
        except LogError as error:
            skipped.append((pair.reference.relative_path, str(error)))
            continue
        partings.add(one)
        found.append(one)
    return partings, found, pairing, skipped


def loss_partings(runs: Runs, tolerance: float = TOLERANCE) -> dict[str, tuple[int, float | None, float | None]]:
    """Return {run: (step, loss of the reference, loss of the run)} of the first step with a relative difference beyond the
    tolerance; runs whose losses agree at all common steps are missing."""
    losses: dict[str, dict[tuple[str, int, int], float | None]] = {name: {} for name in runs.names}
    for step in runs.steps:
        name, _, folder = step['folder'].partition('/')
        losses[name][folder, step.get('training', 0), step['step']] = step.get('loss')
    reference, result = losses[runs.names[0]], {}
    for name in runs.names[1:]:
        for key in sorted(reference.keys() & losses[name].keys(), key=lambda key: key[2]):
            ours, theirs = reference[key], losses[name][key]
            if ours != theirs and (ours is None or theirs is None or not abs(ours - theirs) <= tolerance * abs(ours)):
                result[name] = key[2], ours, theirs
                break
    return result


def batch_partings(runs: Runs, pairs: Iterable[Pair]) -> dict[str, int]:
    """Return {run: first saved step with other sentences than in the reference}."""
    result: dict[str, int] = {}
    seen: set[tuple[str, str, int]] = set()
    for run, reference, other in pairs:
        place = run, reference.folder, reference.step
        if run not in result and place not in seen and runs.batch(reference) != runs.batch(other):
            result[run] = reference.step
        seen.add(place)
    return result


# ---- the command -----------------------------------------------------------------------------------------------------

def run(options: Any) -> int:
    """Compare the runs in options.runs and print where they part.  With --tensorboard one run is enough.  Return exit status
    0."""
    folders = named(options.runs)
    if len(folders) < 2 and not options.tensorboard:
        raise UserError(f'{printable(options.runs[0])}: expected two or more runs to compare; name another folder of saved '
                        'tensors')
    if options.page:
        _check_page(options.page)
    runs = Runs(folders)
    check_models(runs.entries)
    entries = select(runs.entries, options.layers, options.names, options.steps)
    if options.tensorboard:
        from pyops.inspect import events
        unread = events.write(options.tensorboard, runs, entries, lambda entry: (run_of(entry), action_of(entry)))
        if len(folders) < 2:
            print_skipped([*runs.skipped, *unread])
            return 0
    known = Joint(folders[0].folder, 'differences', __name__)
    try:
        partings, found, pairing, unread = compare(runs, entries, options.tolerance,
                                                   lambda pairs: watch(pairs, len(pairs), 'compare', 'pairs'), known)
    finally:
        known.save()                    # also after Ctrl-C: the same command goes on from there
    skipped = [*runs.skipped, *unread]
    for name in runs.names[1:]:
        if not any(one.run == name for one in found):
            raise UserError(unread[-1][1] if unread else _nothing_common(entries, runs.names[0], name))
    losses, batches = loss_partings(runs, options.tolerance), batch_partings(runs, Pairing(runs.names[0]).add(entries))
    if options.csv:
        _write_csv(options.csv, found, partings)
    if options.page:
        _write_page(options.page, runs, entries, partings)
    rows = partings.rows(options.sort)
    if options.json:
        document = _document(runs, partings, pairing, rows[:options.top], losses, batches, skipped)
        write(options.output, json.dumps(document, allow_nan=False) + '\n')
    else:
        width = None if options.output or not sys.stdout.isatty() else shutil.get_terminal_size().columns
        shown = rows[:TOP if options.top is None else options.top]
        lines = [*_summary(runs, partings, pairing, losses, batches), '', *_table(rows, shown, width)]
        write(options.output, '\n'.join(lines) + '\n')
    print_skipped(skipped)
    return 0


def _check_page(folder):
    """Raise UserError before the work if plotly is missing, or if index.html is a file of somebody else."""
    from pyops.inspect import page
    from pyops.inspect.pictures import style
    page.script()
    path = os.path.join(folder, 'index.html')
    if os.path.lexists(path) and not style.is_ours(path):
        raise UserError(f'{printable(path)}: exists and was not written by this program; name another folder with --page')


def _write_page(folder, runs, entries, partings):
    from pyops.inspect import page
    from pyops.inspect.workers import workers
    with workers(0, len(entries)) as work:
        page.write(runs, folder, entries=entries, partings=parting_data(runs, partings),
                   work=lambda function, tasks: watch(work(function, tasks), len(entries), 'index.html'))


def _nothing_common(entries, *names):
    steps = [sorted({entry.step for entry in entries if run_of(entry) == name}) for name in names]
    texts = [f'{printable(name)} has step {", ".join(map(str, few[:6]))}{", ..." * (len(few) > 6)}' if few else
             f'{printable(name)} has none' for name, few in zip(names, steps, strict=True)]
    return f'{" and ".join(texts)} of these tensors; no tensor is in both, so save the same steps and layers'


def text_of(one: Difference) -> str:
    """Return 'step 10, encoder.0.q forward output: 1.20e-03', or the reason instead of the number."""
    return f'step {one.entry.step}, {action_of(one.entry)}: {one.reason or f"{one.relative:.2e}"}'


def _summary(runs, partings, pairing, losses, batches):
    """Yield what is compared and, for each run, where it parts from the reference."""
    reference, *others = map(printable, runs.names)
    yield f'{len(runs.names)} runs: {reference}, the reference, and {", ".join(others)}; tolerance {partings.tolerance:g}'
    for name in runs.names[1:]:
        only = [f'{number} only in {printable(run)}'
                for run, number in zip((reference, name), pairing.unpaired(name), strict=True) if number]
        count = sum(row.tensors for row in partings.rows() if row.worst.run == name)
        settings = runs.settings[name].items()
        differing = ', '.join(f'{key} {value}' for key, value in settings if isinstance(value, int | float | str))
        yield ''
        yield f'{printable(name)}: {count} tensors in both' + ''.join(f', {text}' for text in only)
        yield f'  settings  : {printable(differing) or "the same"}'
        yield '  sentences : ' + (f'other ones from step {batches[name]} on' if name in batches else 'the same')
        yield '  loss      : ' + (f'parts at step {losses[name][0]}: {_loss(losses[name][1])} and {_loss(losses[name][2])}'
                                  if name in losses else 'within the tolerance at every step')
        yield '  tensors   : ' + (f'part at {text_of(partings.first[name])}' if name in partings.first else
                                  'within the tolerance')


def _loss(value):
    return 'not finite' if value is None else f'{value:.7g}'


def _table(rows, shown, width):
    """Yield a line per action and run: the worst difference over all steps."""
    names = max(3, *(len(printable(row.worst.run)) for row in rows))
    yield cut(f'{"worst":>8}  {"max error":>9}  {"step":>6}  {"first":>6}  {"run":<{names}}  action', width)
    for row in shown:
        one, first = row.worst, '-' if row.first is None else row.first
        start = (f'{one.relative:>8.2e}  {row.max_error:>9.2e}  {one.entry.step:>6}  {first:>6}  '
                 f'{printable(one.run):<{names}}  ')
        yield cut_name(start, action_of(one.entry), width)
    if len(shown) < len(rows):
        yield f'... and {len(rows) - len(shown)} more (--top {len(rows)} shows all)'


def _write_csv(path, found, partings):
    """Write a line per pair of tensors, in the order of the reference."""
    try:
        with open(path, 'w', newline='', errors='surrogateescape') as file:
            lines = csv.writer(file)
            lines.writerow(['run', 'step', 'file', 'layer', 'operation', 'name', 'time', *TAGS, 'relative', 'max_error',
                            'beyond', 'reason'])
            for one in found:
                entry = one.entry
                tags = ('' if getattr(entry, tag) is None else getattr(entry, tag) for tag in ('time', *TAGS))
                measures = f'{one.relative:.6g}', f'{one.max_error:.6g}', int(partings.is_beyond(one.relative)), one.reason
                lines.writerow([one.run, entry.step, entry.relative_path, entry.layer, entry.operation, entry.name, *tags,
                                *measures])
    except OSError as error:
        raise cannot_write(path, error, '--csv') from error


def described(one: Difference) -> dict[str, Any]:
    """Return a Difference for JSON; what is not finite is null."""
    entry = one.entry
    return {'run': one.run, 'step': entry.step, 'layer': entry.layer, 'operation': entry.operation, 'name': entry.name,
            'time': entry.time, 'action': action_of(entry), 'relative': finite(one.relative),
            'max_error': finite(one.max_error), 'reason': one.reason}


def _document(runs, partings, pairing, rows, losses, batches, skipped):
    """Return the document for --json."""
    return {'reference': runs.names[0], 'tolerance': partings.tolerance, 'runs': [
        {'name': name, 'settings': runs.settings[name],
         'only_in_reference': pairing.unpaired(name)[0], 'only_in_run': pairing.unpaired(name)[1],
         'other_sentences_from': batches.get(name),
         'loss': dict(zip(('step', 'reference', 'run'), losses[name], strict=True)) if name in losses else None,
         'first': described(partings.first[name]) if name in partings.first else None} for name in runs.names[1:]],
        'actions': [{**described(row.worst), 'max_error': finite(row.max_error), 'tensors': row.tensors, 'first': row.first}
                    for row in rows],
        'skipped': [{'file': file, 'reason': reason} for file, reason in skipped]}


def parting_data(runs: Runs, partings: Partings, pending: int = 0) -> dict[str, Any]:
    """Return the first partings and the table of actions for the page."""
    losses = loss_partings(runs, partings.tolerance)
    return {'reference': runs.names[0], 'names': runs.names, 'tolerance': partings.tolerance, 'compared': partings.compared,
            'pending': pending, 'settings': runs.settings,
            'losses': {name: list(loss) for name, loss in losses.items()},
            'first': {name: described(one) for name, one in partings.first.items()},
            'rows': [[row.worst.run, row.worst.entry.layer, f'{row.worst.entry.operation}.{row.worst.entry.name}',
                      action_of(row.worst.entry), finite(row.worst.relative), row.worst.entry.step, finite(row.max_error),
                      row.first] for row in partings.rows()]}
