"""A folder of saved tensors, read: what pyops' programs and torch.attach write, and dumps of other programs.

The folder and its folders are read, one level deep (a folder for each rank).  Where a manifest.jsonl names a tensor, its
line tells all there is to know and the file is opened by `load` alone.  A file that no line names is asked itself: for the
line in its metadata, or else for its shape, with the rest taken from its name.

Nothing that is read is trusted.  Headers are checked against the size of their file before anything is allocated, .npy is
read without pickles and .pt with torch's weights_only, links and names that lead out of the folder are refused.  What
cannot be read is listed in `Logs.skipped` with the reason, and the rest is read.
"""
import contextlib
import functools
import hashlib
import json
import math
import os
import pickle
import re
import stat
import zipfile
from dataclasses import dataclass, field

import numpy as np

from pyops.errors import UserError
from pyops.inspect.writer import MANIFEST, VERSION, padding

SUFFIXES = '.safetensors', '.pt', '.npy'

# bytes; a writer stays far below both, and what is longer would only fill our memory
_HEADER_LIMIT = 16 << 20
_LINE_LIMIT = 64 << 20
_AXES_LIMIT = 32                    # numpy's own in version 1
_COMPLAINTS = 100                   # lines of one manifest that are named as bad
_SAFE_TORCH = 2, 6                  # before it weights_only could be made to run code (CVE-2025-32434)

# What a safetensors file calls the kinds of number that fit a float32 -> how they lie in the file, their name
_KINDS = {'F64': ('<f8', 'float64'), 'F32': ('<f4', 'float32'), 'F16': ('<f2', 'float16'), 'BF16': ('<u2', 'bfloat16')}
_SIZES = {'float64': 8, 'float32': 4}   # bytes; 2 of all others
_WANT = 'want float64, float32, float16 or bfloat16'

# {timestamp}_{counter}_{layer_type}_{operation}_{quant_type}_{tensor_name}; other programs have the phase and the component
# between operation and format (pre_FA) and come without a number of the layer
_NAME = re.compile(r'(?:.*_)?(?P<timestamp>\d{8}_\d{6})_(?P<counter>\d{1,15})_'
                   r'(?P<layer_type>[A-Za-z]\w*?)(?:_L(?P<index>\d{1,9}))?_(?P<operation>forward|backward)'
                   r'(?:_(?:pre|post|unknown)_[A-Za-z]+)?_(?P<format>[A-Za-z0-9]+)_(?P<name>.+)', re.S)
_TIME = re.compile(r'(.+)_t(\d{1,9})', re.S)
_STATISTICS = 'count', 'nan', 'inf', 'zeros', 'amax', 'mean', 'mean_abs', 'rms', 'std', 'min', 'max'


class LogError(UserError):
    """A saved tensor that cannot be read: the file and the reason."""


@dataclass(frozen=True)
class Entry:
    """One saved tensor; the numbers come with `load`.

    key: its name within the file, '' where the file is a bare tensor.  origin: pyops, torch or file (no manifest).
    layer: its name in the model, e.g. encoder.0.self_attention.q, or linear_L3.  index: counts layers of that type.
    format, options, axis: how it was rounded when it was used; what is stored is not rounded.  uses: every rounding, as
    in the manifest.  mask: which axes hold padding, as in the manifest.  run: which run of the folder it comes from.
    """
    folder: str
    file: str
    key: str
    origin: str
    counter: int
    timestamp: str
    layer: str
    layer_type: str
    index: int
    operation: str
    name: str
    step: int
    time: int | None
    format: str
    options: dict = field(hash=False)
    axis: int | str
    uses: tuple = field(hash=False)
    shape: tuple
    dtype: str
    mask: tuple = field(hash=False)
    statistics: dict | None = field(hash=False)
    place: str = ''                 # the path of the file below the folder that was opened
    run: int = 0

    @property
    def path(self):
        return os.path.join(self.folder, self.file)

    @property
    def fmt(self):
        """The Format that it was rounded to when used, None for fp32."""
        return None if self.format == 'fp32' else _parse(self.format, self.options)

    @property
    def title(self):
        """E.g. 'encoder.0.self_attention.q forward input, step 10', with ', t 3' for a time step and the format."""
        time = '' if self.time is None else f', t {self.time}'
        fmt = '' if self.format == 'fp32' else f', {self.format}'
        return printable(f'{self.layer} {self.operation} {self.name}, step {self.step}{time}{fmt}')

    @property
    def stem(self):
        """A name for files made of this tensor: letters, digits and -_. only, another one for each tensor."""
        base = os.path.splitext(self.place)[0] + (f'.{self.key}' if self.key not in ('', 'tensor') else '')
        safe = re.sub(r'[^A-Za-z0-9_.-]', '_', base).lstrip('.')[:150]
        return safe if safe == base else f'{safe}-{_digest(self.place, self.key)}'

    def load(self):
        """-> float32, C-contiguous, of `shape`.  LogError where the file is gone, damaged or another one than it was."""
        try:
            array = _READERS[os.path.splitext(self.file)[1]](self.path, self.key)
        except _NoTorch as error:
            raise LogError(f'{printable(self.path)}: {error}') from error
        except _Refused as error:
            raise LogError(f'{printable(self.path)}: {error}; save it again or take it away') from error
        except OSError as error:
            raise LogError(f'{printable(self.path)}: cannot be read ({error.strerror or error}); save it again or take it '
                           'away') from error
        if array.shape != self.shape:
            raise LogError(f'{printable(self.path)}: holds a tensor of shape {array.shape}, its manifest says {self.shape}; '
                           'save it again or take it away')
        return array


class Logs:
    """The tensors of a folder and what its manifests say about them.

    entries: list of Entry, in order of (step, counter).  skipped: list of (file, reason).  steps: a dict with step, loss
    and norm for each training step.  run: the last run line, {} without one.
    UserError where the folder cannot be read or holds no tensor; `empty=True` takes one in which they are still to appear.
    """

    def __init__(self, folder, empty=False):
        self.folder = os.fspath(folder)
        if not os.path.isdir(self.folder):
            raise UserError(f'{printable(self.folder)}: there is no such folder; want one with saved tensors, such as '
                            '--save-tensors or TENSOR_SAVE_DIR names')
        self.entries, self.steps, self.run = [], [], {}
        self._root = os.path.realpath(self.folder)
        self._folders = {}              # path below the root -> _Folder
        self.refresh()
        if not self.entries and not empty:
            reasons = '; '.join(f'{file}: {reason}' for file, reason in self.skipped[:3])
            raise UserError(f'{printable(self.folder)}: holds no saved tensor ({reasons or "it is empty"}); want the '
                            f'{", ".join(SUFFIXES)} files that --save-tensors or torch.attach writes')

    @property
    def skipped(self):
        return [(file, reason) for below in sorted(self._folders) for file, reason in self._folders[below].skipped()]

    def refresh(self):
        """Read what was added since the last time.  -> the new entries, in order.  Costs a listing of the folder."""
        new = []
        top = self._refresh('', new)
        for name in sorted(top):
            self._refresh(name, new)
        new.sort(key=_order)
        if new:
            self.entries = sorted(self.entries + new, key=_order)
        return new

    def _refresh(self, below, new):
        """Read one folder.  -> the names of the folders in it."""
        state = self._folders.get(below) or _Folder(self._root, below, self.folder)
        names = state.refresh(new)
        if below in self._folders or not below or state.known or state.manifest.lines or state.manifest.refused:
            self._folders[below] = state        # a folder of pictures is no part of the logs and nothing to complain of
        self.steps += state.manifest.take_steps()
        self.run = state.manifest.run or self.run
        return names

    def mask(self, entry):
        """-> bool array that broadcasts to the tensor, True where it is not padding; None where there is no padding.

        LogError where the manifest has a mask and not the lengths it speaks of.
        """
        if not entry.mask:
            return None
        lengths = self._batch(entry).get('lengths') or {}
        for item in entry.mask:
            of, count = item['of'], entry.shape[item['batch']]
            if len(lengths.get(of, ())) != count:
                raise LogError(f'{printable(entry.path)}: the manifest has no lengths of its {count} {printable(of)} sentences '
                               f'at step {entry.step}, so its padding is not known; save it again')
        return padding(entry.shape, entry.mask, lengths, entry.time or 0)

    def tokens(self, entry, sentence):
        """Words beside attention weights (B, heads, Tq, Tk), of one sentence of the batch.

        -> (Tq words, Tk words), '' at padding; None where the words are not known.
        """
        sides = {item['time']: item['of'] for item in entry.mask}
        words = self._batch(entry).get('tokens')
        if not words or len(entry.shape) != 4 or not {2, 3} <= sides.keys():
            return None
        result = []
        for axis in (2, 3):
            sentences = words.get(sides[axis], ())
            if sentence >= len(sentences):
                return None
            size = entry.shape[axis]
            result.append([*sentences[sentence][:size], *[''] * (size - len(sentences[sentence]))])
        return tuple(result)

    def _batch(self, entry):
        below = os.path.relpath(entry.folder, self.folder)
        state = self._folders.get('' if below == '.' else below)
        return state.manifest.batches.get((entry.run, entry.step), {}) if state else {}


def printable(text):
    """`text` in one line that a terminal shows as it is: control characters and broken encodings as \\x1b and the like."""
    return ''.join(letter if letter.isprintable() else letter.encode('unicode_escape', 'surrogatepass').decode()
                   for letter in str(text))


def _order(entry):
    return entry.step, entry.counter, entry.run, entry.place, entry.key


def _digest(*texts):
    return hashlib.sha256('\0'.join(texts).encode('utf-8', 'surrogatepass')).hexdigest()[:8]


def _parse(name, options):
    from pyops import formats
    return formats.parse(':'.join([name, *(f'{key}={value}' for key, value in options.items())]))


# ---- a folder --------------------------------------------------------------------------------------------------------

class _Refused(Exception):
    """Why a file or a line is skipped."""


class _NoTorch(_Refused):
    """It is not the file that is wrong."""


class _Folder:
    """One folder of tensors: its manifest, which of its files are entries, which are not and why."""

    def __init__(self, root, below, shown):
        self.root, self.below = root, below
        self.path = os.path.join(shown, below) if below else shown
        self.manifest = _Manifest(os.path.join(self.path, MANIFEST))
        self.known = set()              # files that are entries
        self.refused = {}               # file -> (reason, size and time when it was read)
        self.waiting = {}               # file -> its line, until the file is there

    def skipped(self):
        prefix = self.below and self.below + '/'
        missing = ((file, 'the manifest names it and it is not there') for file in self.waiting)
        refused = ((file, reason) for file, (reason, _) in self.refused.items())
        return [(printable(prefix + file), reason) for file, reason in (*self.manifest.refused, *sorted(refused), *missing)]

    def refresh(self, new):
        """Append new entries to `new`.  -> the names of the folders in this one."""
        # The manifest first: a file is there before its line.
        for line in self.manifest.read():
            self.waiting.setdefault(line['file'], line)
        names, folders = self._list(), []
        for item in names:
            try:
                if item.name == MANIFEST or item.name.startswith('.') or item.name in self.known:
                    self.waiting.pop(item.name, None)
                    continue
                if not _inside(item, self.root):
                    raise _Refused('a link that leads out of the folder')
                status = item.stat()
                if stat.S_ISDIR(status.st_mode):
                    folders.append(item.name)
                    continue
                seen = status.st_size, status.st_mtime_ns
                if self.refused.get(item.name, (None, None))[1] != seen or item.name in self.waiting:
                    self._take(item.name, status, new)
                if item.name in self.known:
                    self.refused.pop(item.name, None)
            except _Refused as error:
                self.refused[item.name] = str(error), _seen(item)
            except OSError as error:
                self.refused[item.name] = f'cannot be read ({error.strerror or error})', _seen(item)
        return folders

    def _list(self):
        try:
            with os.scandir(self.path) as items:
                return sorted(items, key=lambda item: item.name)
        except OSError as error:
            if not self.below:
                raise UserError(f'{printable(self.path)}: cannot be read ({error.strerror}); want a folder of saved tensors '
                                'that you may read') from error
            self.manifest.refused[:] = [('', f'cannot be read ({error.strerror})')]
            return []

    def _take(self, file, status, new):
        suffix = os.path.splitext(file)[1]
        if not stat.S_ISREG(status.st_mode) or suffix not in SUFFIXES:
            raise _Refused(f'not a tensor: want {", ".join(SUFFIXES)}')
        line = self.waiting.pop(file, None)
        path, place = os.path.join(self.path, file), os.path.join(self.below, file)
        shared = {'folder': self.path, 'file': file, 'place': place}
        if line is not None:
            if math.prod(line['shape']) * _SIZES.get(line['dtype'], 2) > status.st_size:
                raise _Refused(f'truncated: {status.st_size} bytes for a tensor of shape {tuple(line["shape"])}')
            found = [Entry(**{**line, **shared}, key='tensor', origin=self.manifest.origin(line['run']))]
        else:
            found = [self._ask(shared, *tensor) for tensor in _DESCRIBERS[suffix](path)]
        self.known.add(file)
        new += found

    def _ask(self, shared, key, shape, dtype, metadata):
        """An Entry of what a file says about itself, in its metadata (a dict, maybe with a manifest line) or its name."""
        run = max(self.manifest.runs - 1, 0)
        if isinstance(metadata.get('pyops'), str) and key == 'tensor':
            line = _tensor_line({**_json(metadata['pyops']), 'file': shared['file']})
            if line['shape'] != shape:
                raise _Refused(f'holds a tensor of shape {shape}, its metadata says {line["shape"]}')
            return Entry(**{**line, **shared, 'dtype': dtype}, run=run, key=key, origin=self.manifest.origin(run))
        stem = os.path.splitext(shared['file'])[0]
        found = _foreign(stem, metadata)
        name, time = found['name'], None
        if key not in ('', 'tensor', 'data'):
            name = f'{name}.{key}' if name != stem else key
        elif _TIME.fullmatch(name):
            name, time = _TIME.fullmatch(name).groups()
        layer_type, index, fmt = found['layer_type'].lower(), found['index'], found['format'].lower()
        layer = found['layer'] or (layer_type if index is None else f'{layer_type}_L{index}')
        return Entry(**shared, key=key, origin='file', counter=int(found['counter']), timestamp=found['timestamp'],
                     layer=layer, layer_type=layer_type, index=int(index or 0),
                     operation=found['operation'] or ('backward' if 'grad' in name else 'forward'), name=name,
                     step=found['step'], time=None if time is None else int(time),
                     format=_known_format(fmt) or 'fp32', options={},
                     axis=0 if layer_type == 'attention' and name == 'value' and shape else -1, uses=(), shape=shape,
                     dtype=dtype, mask=(), statistics=None, run=run)


def _foreign(stem, metadata):
    """What the name of a file without a manifest tells; `metadata`, as dumps of Megatron have it, knows better."""
    match = _NAME.fullmatch(stem)
    found = {'timestamp': '', 'counter': 0, 'layer': '' if match else stem, 'layer_type': 'other', 'index': None,
             'operation': '', 'format': 'fp32', 'name': stem, 'step': 0} | (match.groupdict() if match else {})
    for key, name in (('layer_type', 'layer_type'), ('operation', 'operation'), ('format', 'quant_type'),
                      ('name', 'tensor_name')):
        value = metadata.get(name)
        if isinstance(value, str) and value and (key != 'operation' or value in ('forward', 'backward')):
            found[key] = value
    if metadata.get('layer_type') and not match:
        found['layer'] = ''
    if _is_whole(metadata.get('layer_idx')):
        found['index'] = metadata['layer_idx']
    for name in ('step', 'iteration'):
        if _is_whole(metadata.get(name)):
            found['step'] = metadata[name]
    return found


def _inside(item, root):
    """Whether a directory's item is no link, or one that stays in the folder that was opened."""
    return not item.is_symlink() or os.path.realpath(item.path).startswith(os.path.join(root, ''))


def _seen(item):
    try:
        status = item.stat(follow_symlinks=False)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


# ---- the manifest ----------------------------------------------------------------------------------------------------

class _Manifest:
    """manifest.jsonl, read as far as it is written; a half line at its end is left for the next time."""

    def __init__(self, path):
        self.path = path
        self.offset = self.lines = self.runs = self.bad = 0
        self.run, self.origins = {}, []
        self.batches = {}               # (run, step) -> the batch line
        self.refused = []               # (manifest.jsonl:line, reason)
        self._steps = []

    def origin(self, run):
        return self.origins[run] if run < len(self.origins) else 'pyops'

    def take_steps(self):
        steps, self._steps = self._steps, []
        return steps

    def read(self):
        """-> the tensor lines that were added, checked, as arguments of Entry."""
        try:
            if not stat.S_ISREG(os.lstat(self.path).st_mode):
                return self._refuse_file('not a plain file')
            with open(self.path, 'rb') as file:
                if os.fstat(file.fileno()).st_size < self.offset:
                    self.offset = 0     # written anew
                file.seek(self.offset)
                return list(self._lines(file))
        except FileNotFoundError:
            return []
        except OSError as error:
            return self._refuse_file(f'cannot be read ({error.strerror or error})')

    def _refuse_file(self, reason):
        if (MANIFEST, reason) not in self.refused:
            self.refused.append((MANIFEST, reason))
        return []

    def _lines(self, file):
        while line := file.readline(_LINE_LIMIT):
            if not line.endswith(b'\n'):
                if len(line) == _LINE_LIMIT:
                    self._refuse_file(f'a line of more than {_LINE_LIMIT >> 20} MiB; what comes after it is not read')
                return
            self.offset += len(line)
            self.lines += 1
            try:
                tensor = self._line(_json(line)) if line.strip() else None
                if tensor:
                    yield tensor
            except _Refused as error:
                self.bad += 1
                if self.bad < _COMPLAINTS:
                    self.refused.append((f'{MANIFEST}:{self.lines}', str(error)))
                elif self.bad == _COMPLAINTS:
                    self.refused.append((f'{MANIFEST}:{self.lines}', 'more lines like those above; not listed'))

    def _line(self, line):
        kind = line.get('kind')
        if kind == 'run':
            self.runs += 1
            self.run = line
            self.origins.append(line['origin'] if line.get('origin') in ('pyops', 'torch') else 'file')
            if not isinstance(line.get('version'), int) or line['version'] > VERSION:
                raise _Refused(f'a manifest of version {line.get("version")}: want {VERSION}, or a newer pyops')
        elif kind == 'tensor':
            return {**_tensor_line(line), 'run': max(self.runs - 1, 0)}
        elif kind == 'batch':
            self.batches[max(self.runs - 1, 0), _whole(line, 'step')] = _batch_line(line)
        elif kind == 'step':
            self._steps.append({'step': _whole(line, 'step'), 'loss': _number(line, 'loss'), 'norm': _number(line, 'norm')})
        elif kind == 'lost':
            self.refused.append((_text(line, 'file'), f'lost when it was saved: {printable(_text(line, "reason"))}'))


def _json(text):
    """-> dict.  What is not finite becomes None."""
    try:
        line = json.loads(text, parse_constant=lambda name: None)
    except (ValueError, RecursionError) as error:           # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise _Refused('not a line of JSON') from error
    if not isinstance(line, dict):
        raise _Refused('not a JSON object')
    return line


def _tensor_line(line):
    """The arguments of Entry that a tensor's line has, checked."""
    file = _text(line, 'file')
    if os.path.basename(file) != file or file in ('', '.', '..') or os.path.splitext(file)[1] not in SUFFIXES:
        raise _Refused(f'names the file {file!r}: want {", ".join(SUFFIXES)} beside the manifest')
    shape = _items(line, 'shape', lambda size: _is_whole(size))
    if len(shape) > _AXES_LIMIT:
        raise _Refused(f'shape has {len(shape)} axes')
    fmt, options = _text(line, 'format'), line.get('options') or {}
    known = isinstance(options, dict) and _known_format(fmt, tuple(sorted((key, str(options[key])) for key in options)))
    if not known:
        raise _Refused(f'format {printable(fmt)} with options {printable(options)}: there is no such format')
    time, axis, layer_type = line.get('time'), line.get('axis', -1), _text(line, 'layer_type')
    if time is not None and not _is_whole(time):
        raise _Refused(f'time is {printable(time)}')
    if axis != 'tokens' and not (isinstance(axis, int) and -len(shape) <= axis < max(len(shape), 1)):
        raise _Refused(f'axis is {printable(axis)} of a tensor with {len(shape)} axes')
    if line.get('operation') not in ('forward', 'backward'):
        raise _Refused(f'operation is {printable(line.get("operation"))}: want forward or backward')
    uses = _items(line, 'uses', lambda use: isinstance(use, dict), ())
    mask = _items(line, 'mask', lambda item: _is_mask(item, shape), ())
    match = _NAME.fullmatch(os.path.splitext(file)[0])
    return {'file': file, 'counter': _whole(line, 'counter'), 'timestamp': match['timestamp'] if match else '',
            'layer': _text(line, 'layer'), 'layer_type': layer_type, 'index': _whole(line, 'index'),
            'operation': line['operation'], 'name': _text(line, 'name'), 'step': _whole(line, 'step'), 'time': time,
            'format': known, 'options': options, 'axis': axis, 'uses': tuple(uses), 'shape': tuple(shape),
            'dtype': _text(line, 'dtype', 'float32'), 'mask': tuple(mask), 'statistics': _statistics(line.get('statistics'))}


def _batch_line(line):
    """The lengths and words of a batch line, checked: of each side a list of numbers, a list of lists of text."""
    lengths, tokens = line.get('lengths') or {}, line.get('tokens') or {}
    if not isinstance(lengths, dict) or not all(_is_list(side, _is_whole) for side in lengths.values()):
        raise _Refused('lengths: want a list of numbers for each side')
    if not isinstance(tokens, dict) or not all(
            _is_list(side, lambda sentence: _is_list(sentence, lambda word: isinstance(word, str)))
            for side in tokens.values()):
        raise _Refused('tokens: want a list of words for each sentence of each side')
    return {'lengths': lengths, 'tokens': tokens}


def _is_list(value, check):
    return isinstance(value, list) and all(check(item) for item in value)


def _is_whole(value):
    return type(value) is int and 0 <= value < 1 << 53      # bool is an int too


def _is_mask(item, shape):
    if not isinstance(item, dict) or not isinstance(item.get('of'), str) or 'time' not in item:
        return False
    time, batch = item['time'], item.get('batch')
    return (time is None or _is_whole(time) and time < len(shape)) and _is_whole(batch) and batch < len(shape)


def _text(line, key, default=None):
    value = line.get(key, default)
    if not isinstance(value, str):
        raise _Refused(f'{key} is {printable(value)}: want text')
    return value


def _whole(line, key):
    value = line.get(key)
    if not _is_whole(value):
        raise _Refused(f'{key} is {printable(value)}: want a whole number')
    return value


def _number(line, key):
    value = line.get(key)
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e300 else None


def _items(line, key, check, default=None):
    value = line.get(key, default)
    if value is default and default is not None:
        return default
    if not _is_list(value, check):
        raise _Refused(f'{key} is {printable(value)[:80]}, which is not what a manifest has there')
    return value


def _statistics(values):
    """The statistics of a line, None where one is missing or no number."""
    if not isinstance(values, dict) or not all(key in values for key in _STATISTICS):
        return None
    return {key: values[key] if _is_whole(values[key]) else _number(values, key) for key in _STATISTICS}


@functools.lru_cache(maxsize=256)
def _known_format(name, options=()):
    """The name that formats.parse gives a format, or None where it knows none of that name with such options."""
    if name in ('fp32', 'float32', 'none'):
        return None if options else 'fp32'
    from pyops import formats
    try:
        return _parse(name, dict(options)).name
    except formats.FormatError:
        return None


# ---- files -----------------------------------------------------------------------------------------------------------
# A describer gives (key, shape, dtype, metadata) of each tensor of a file, a reader one tensor as float32.
# Either raises _Refused or OSError.

def _safetensors_header(file):
    """-> header, where the tensors begin, how many bytes they have.

    Read here and not by the library: its numpy side knows no bfloat16, and of a large file only one tensor may be wanted.
    """
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    length = int.from_bytes(start, 'little')
    if len(start) < 8 or length > size - 8:
        raise _Refused(f'truncated or no safetensors file: {size} bytes')
    if length > _HEADER_LIMIT:
        raise _Refused(f'a header of {length} bytes: want at most {_HEADER_LIMIT}')
    header = file.read(length)
    return _json(header), 8 + length, size - 8 - length


def _safetensors_tensor(key, value, size):
    """-> shape, kind, first byte of a tensor of the header."""
    try:
        shape, kind, (begin, end) = tuple(value['shape']), value['dtype'], value['data_offsets']
        right = all(map(_is_whole, (*shape, begin, end))) and len(shape) <= _AXES_LIMIT and begin <= end
    except (TypeError, KeyError, ValueError):
        right = False
    if not right or not isinstance(kind, str):
        raise _Refused(f'its header is damaged at {printable(key)[:80]}')
    if kind not in _KINDS:
        raise _Refused(f'a tensor of {printable(kind)[:20]}: {_WANT}')
    if end > size or end - begin != math.prod(shape) * np.dtype(_KINDS[kind][0]).itemsize:
        raise _Refused(f'truncated or damaged: {size} bytes of numbers, a tensor of shape {shape} in {begin}:{end}')
    return shape, kind, begin


def _describe_safetensors(path):
    with open(path, 'rb') as file:
        header, _, size = _safetensors_header(file)
    metadata = header.pop('__metadata__', None)
    metadata = metadata if isinstance(metadata, dict) else {}
    result, reasons = [], []
    for key, value in header.items():
        try:
            shape, kind, _ = _safetensors_tensor(key, value, size)
            result.append((key, shape, _KINDS[kind][1], metadata))
        except _Refused as error:
            reasons.append(str(error))
    return _some(result, reasons)


def _read_safetensors(path, key):
    with _open(path) as file:
        header, start, size = _safetensors_header(file)
        if key not in header:
            raise _Refused(f'has no tensor {printable(key)!r}')
        shape, kind, begin = _safetensors_tensor(key, header[key], size)
        file.seek(start + begin)
        array = np.fromfile(file, _KINDS[kind][0], math.prod(shape))
    if array.size != math.prod(shape):
        raise _Refused('truncated while it was read')
    return _widen(array, kind == 'BF16').reshape(shape)


def _describe_npy(path):
    array = _map_npy(path)
    return [('', array.shape, array.dtype.name, {})]


def _read_npy(path, key):
    return _widen(_map_npy(path))


def _map_npy(path):
    try:
        # Mapped, so that a header that promises more than the file has allocates nothing.
        array = np.load(path, mmap_mode='r', allow_pickle=False)
    except OSError:
        raise
    except Exception as error:          # numpy reads the header with Python's tokenizer, which has errors of its own
        raise _Refused(f'truncated, of Python objects or no .npy file ({printable(error)[:100]})') from error
    if not isinstance(array, np.ndarray):
        raise _Refused('an archive of arrays: want one .npy file an array')
    if array.dtype.kind != 'f' or array.dtype.itemsize > 8:
        raise _Refused(f'a tensor of {printable(array.dtype)[:40]}: {_WANT}')
    return array


def _describe_pt(path):
    tensors, metadata = _load_pt(path)
    result, reasons = [], []
    for key, tensor in tensors.items():
        try:
            result.append((key, *_describe_torch(tensor, os.path.getsize(path)), metadata))
        except _Refused as error:
            reasons.append(str(error))
    return _some(result, reasons)


def _read_pt(path, key):
    tensors, _ = _load_pt(path)
    if key not in tensors:
        raise _Refused(f'has no tensor {printable(key)!r}')
    _describe_torch(tensors[key], os.path.getsize(path))
    return np.array(tensors[key].detach().float().resolve_neg().numpy(), np.float32, order='C')


def _describe_torch(tensor, size):
    """-> shape, dtype of a tensor that is dense and not larger than its file."""
    torch = _torch()
    kind = str(tensor.dtype).removeprefix('torch.')
    if tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise _Refused(f'a tensor of {kind}: {_WANT}')
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != 'cpu':
        raise _Refused('a tensor that is sparse, quantised or without numbers: want a dense one')
    if tensor.numel() * tensor.element_size() > size or tensor.dim() > _AXES_LIMIT:
        raise _Refused(f'a tensor of shape {tuple(tensor.shape)} in a file of {size} bytes')
    return tuple(tensor.shape), kind


def _load_pt(path):
    """-> ({key: tensor}, metadata) of a file of torch.save.  Its pickle may build tensors and nothing else.

    The zip is looked at first: packed records could unfold to any size, and a file of before torch 1.6 is one pickle whose
    tensors would be allocated at the size that it claims.  Mapped storages cannot grow.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except OSError:
        raise
    except Exception as error:          # whatever the bytes bring about, below too
        raise _Refused('truncated or no file of torch.save (since torch 1.6, which made them zip files)') from error
    size = os.path.getsize(path)
    if sum(record.file_size for record in records) > size or any(record.compress_type != zipfile.ZIP_STORED or
           record.filename.endswith('data.pkl') and record.file_size > _HEADER_LIMIT for record in records):
        raise _Refused('its zip has packed or oversized records, which torch.save does not write')
    torch = _torch()
    try:
        with contextlib.ExitStack() as files:
            # torch maps a file by its name, and a name has to be UTF-8 for that
            mapped = _is_utf8(path)
            source = path if mapped else files.enter_context(open(path, 'rb'))
            payload = torch.load(source, map_location='cpu', weights_only=True, mmap=mapped)
    except OSError:
        raise
    except pickle.UnpicklingError as error:
        raise _Refused('holds Python objects, which could run code, or is damaged: want tensors alone') from error
    except Exception as error:
        raise _Refused(f'damaged ({type(error).__name__} in torch.load)') from error
    if isinstance(payload, torch.Tensor):
        return {'': payload}, {}
    if isinstance(payload, dict):
        metadata = payload.get('metadata')
        metadata = metadata if isinstance(metadata, dict) else {}
        tensors = {str(key): value for key, value in payload.items() if isinstance(value, torch.Tensor)}
        if tensors:
            return tensors, {**metadata, 'pyops': payload.get('pyops')}
    raise _Refused('holds no tensor: want one, or a dict of tensors')


def _is_utf8(text):
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _torch():
    try:
        import torch
    except ImportError as error:
        raise _NoTorch('torch is not installed, which reads .pt: install it with: pip install torch') from error
    if tuple(int(part) for part in re.findall(r'\d+', torch.__version__)[:2]) < _SAFE_TORCH:
        raise _NoTorch(f'torch {torch.__version__} can be made to run code by a .pt file: want torch '
                       f'{".".join(map(str, _SAFE_TORCH))} or newer')
    return torch


def _open(path):
    """A plain file, opened; anything else could keep us waiting for ever."""
    if not os.path.isfile(path):
        raise _Refused('there is no such file any more')
    return open(path, 'rb')


def _widen(array, bfloat16=False):
    """float32 of float16 or bfloat16 (exact) and of float64 (rounded; beyond float32's range infinite)."""
    if bfloat16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over='ignore', invalid='ignore'):
        return np.array(array, np.float32, order='C')


def _some(result, reasons):
    if not result:
        raise _Refused(reasons[0] if reasons else 'holds no tensor')
    return result


_DESCRIBERS = {'.safetensors': _describe_safetensors, '.npy': _describe_npy, '.pt': _describe_pt}
_READERS = {'.safetensors': _read_safetensors, '.npy': _read_npy, '.pt': _read_pt}
