"""A folder of saved tensors, read: what pyops' programs and torch.attach write, and dumps of other programs.

The folder and its folders are read, one level deep (a folder for each rank).  Where a manifest.jsonl names a tensor, its
line tells all there is to know and the file is opened by `load` alone.  A file that no line names is asked itself: for the
line in its metadata, or else for its shape, with the rest taken from its name.

Nothing that is read is trusted.  Headers are checked against the size of their file before anything is allocated, .npy is
read without pickles and .pt with torch's weights_only, links and names that lead out of the folder are refused.  What
cannot be read is listed in `Logs.skipped` with the reason, and the rest is read.
"""
import hashlib
import math
import os
import re
import stat
from dataclasses import dataclass, field

from pyops.errors import UserError
from pyops.inspect.checks import Refused, is_whole, parse_json, printable
from pyops.inspect.manifest import NAME, Manifest, known_format, parse_format, tensor_line
from pyops.inspect.readers import DESCRIBERS, READERS, SIZES, SUFFIXES, NoTorch
from pyops.inspect.writer import MANIFEST, padding

_TIME = re.compile(r'(.+)_t(\d{1,9})', re.S)


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
        return None if self.format == 'fp32' else parse_format(self.format, self.options)

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
            array = READERS[os.path.splitext(self.file)[1]](self.path, self.key)
        except NoTorch as error:
            raise LogError(f'{printable(self.path)}: {error}') from error
        except Refused as error:
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


def _order(entry):
    return entry.step, entry.counter, entry.run, entry.place, entry.key


def _digest(*texts):
    return hashlib.sha256('\0'.join(texts).encode('utf-8', 'surrogatepass')).hexdigest()[:8]


# ---- a folder --------------------------------------------------------------------------------------------------------

class _Folder:
    """One folder of tensors: its manifest, which of its files are entries, which are not and why."""

    def __init__(self, root, below, shown):
        self.root, self.below = root, below
        self.path = os.path.join(shown, below) if below else shown
        self.manifest = Manifest(os.path.join(self.path, MANIFEST))
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
                    raise Refused('a link that leads out of the folder')
                status = item.stat()
                if stat.S_ISDIR(status.st_mode):
                    folders.append(item.name)
                    continue
                seen = status.st_size, status.st_mtime_ns
                if self.refused.get(item.name, (None, None))[1] != seen or item.name in self.waiting:
                    self._take(item.name, status, new)
                if item.name in self.known:
                    self.refused.pop(item.name, None)
            except Refused as error:
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
            raise Refused(f'not a tensor: want {", ".join(SUFFIXES)}')
        line = self.waiting.pop(file, None)
        path, place = os.path.join(self.path, file), os.path.join(self.below, file)
        shared = {'folder': self.path, 'file': file, 'place': place}
        if line is not None:
            if math.prod(line['shape']) * SIZES.get(line['dtype'], 2) > status.st_size:
                raise Refused(f'truncated: {status.st_size} bytes for a tensor of shape {tuple(line["shape"])}')
            found = [Entry(**{**line, **shared}, key='tensor', origin=self.manifest.origin(line['run']))]
        else:
            found = [self._ask(shared, *tensor) for tensor in DESCRIBERS[suffix](path)]
        self.known.add(file)
        new += found

    def _ask(self, shared, key, shape, dtype, metadata):
        """An Entry of what a file says about itself, in its metadata (a dict, maybe with a manifest line) or its name."""
        run = max(self.manifest.runs - 1, 0)
        if isinstance(metadata.get('pyops'), str) and key == 'tensor':
            line = tensor_line({**parse_json(metadata['pyops']), 'file': shared['file']})
            if line['shape'] != shape:
                raise Refused(f'holds a tensor of shape {shape}, its metadata says {line["shape"]}')
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
                     format=known_format(fmt) or 'fp32', options={},
                     axis=0 if layer_type == 'attention' and name == 'value' and shape else -1, uses=(), shape=shape,
                     dtype=dtype, mask=(), statistics=None, run=run)


def _foreign(stem, metadata):
    """What the name of a file without a manifest tells; `metadata`, as dumps of Megatron have it, knows better."""
    match = NAME.fullmatch(stem)
    found = {'timestamp': '', 'counter': 0, 'layer': '' if match else stem, 'layer_type': 'other', 'index': None,
             'operation': '', 'format': 'fp32', 'name': stem, 'step': 0} | (match.groupdict() if match else {})
    for key, name in (('layer_type', 'layer_type'), ('operation', 'operation'), ('format', 'quant_type'),
                      ('name', 'tensor_name')):
        value = metadata.get(name)
        if isinstance(value, str) and value and (key != 'operation' or value in ('forward', 'backward')):
            found[key] = value
    if metadata.get('layer_type') and not match:
        found['layer'] = ''
    if is_whole(metadata.get('layer_idx')):
        found['index'] = metadata['layer_idx']
    for name in ('step', 'iteration'):
        if is_whole(metadata.get(name)):
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
