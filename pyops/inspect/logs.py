"""Reader of a folder of saved tensors: dumps of pyops' programs, of torch.attach and of other programs.

The folder and its direct subfolders (one per rank) are read.  For a tensor listed in manifest.jsonl, the manifest line has
all the metadata, and only `load` opens the file.  A file missing from the manifest is inspected directly: the manifest line
embedded in its metadata is used or, without one, the shape in its header and the fields in its file name.

No file is trusted: readers.py checks headers before it allocates memory, and links and names that lead out of the folder are
refused.  `Logs.skipped` lists every unreadable file with the reason; the others are still read.
"""
from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyops.errors import UserError, printable
from pyops.inspect.checks import Refused, is_count, parse_json
from pyops.inspect.index import Index
from pyops.inspect.manifest import NAME, Manifest, known_format, parse_format, tensor_line
from pyops.inspect.readers import SUFFIXES, list_file, nbytes, read
from pyops.inspect.writer import MANIFEST, padding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy as np

    from pyops.formats import Format
    from pyops.typing import PathLike, Shape

TAGS = 'phase', 'component', 'rank', 'sample', 'group'           # fields of an Entry that come from dumps of Megatron
ATTENTION_WEIGHTS = 'weights', 'attention_weights', 'attention_probs', 'attn_weights'      # names that programs use

_TIME = re.compile(r'(.+)_t(\d{1,9})', re.S)
# A file of DumpTensors of TransformerEngine, in the folder of its rank, and (operation, name here) of its tensors.
_DUMPED = re.compile(r'(?P<layer>.+)_(?P<tensor>activation|weight|output|gradient|dgrad|wgrad)_iter_(?P<step>\d{6,9})', re.S)
_RANK = re.compile(r'rank_(\d{1,9})')
_RANK_FOLDER = re.compile(r'rank[_-]?(\d{1,9})')        # as writers of any kind name it
_MEANING = {'activation': ('forward', 'input'), 'weight': ('forward', 'weight'), 'output': ('forward', 'output'),
            'gradient': ('backward', 'grad_output'), 'dgrad': ('backward', 'grad_input'), 'wgrad': ('backward', 'grad_weight')}
DUMPED_NAMES = {ours: theirs for theirs, ours in _MEANING.items()}
_BARE = '', 'tensor', 'data', 'high_precision'      # keys of the only tensor of a file, or of the one that it is about
_USED = {'pyops', 'layer_type', 'operation', 'quant_type', 'tensor_name', 'layer_idx', 'step', 'iteration', 'phase',
         'component', 'rank', 'sample', 'sample_idx', 'group', 'group_idx'}      # items of a file's metadata
_REFUSED = 3                        # most lines in `skipped` about the tensors of a file
_READERS = (__name__, 'pyops.inspect.checks', 'pyops.inspect.packed', 'pyops.inspect.readers', 'pyops.inspect.torch_files')


class LogError(UserError):
    """A saved tensor cannot be read.  The message has the file and the reason."""


@dataclass(frozen=True)
class Entry:
    """The metadata of one saved tensor.  `load` reads the values.

    key: name within the file; '' if the file is a bare tensor
    origin: pyops, torch or file (not in a manifest)
    layer: name in the model, such as encoder.0.self_attention.q, or linear_L3;  index: number among the layers of its type
    format, options, axis: the rounding that the run applied when it used the tensor; the stored values are not rounded
    uses: all roundings, as in the manifest;  mask: the axes with padding, as in the manifest
    run: number of the run line in the folder's manifest;  training: number of the training, which a resumed run continues
    phase, component, rank, sample, group: from dumps of Megatron, '' or None elsewhere
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
    relative_path: str = ''         # path of the file relative to the folder given to Logs
    run: int = 0
    training: int = 0
    phase: str = ''
    component: str = ''
    rank: int | None = None
    sample: int | None = None
    group: int | None = None

    @property
    def path(self) -> str:
        return os.path.join(self.folder, self.file)

    @property
    def fmt(self) -> Format | None:
        """The Format to which the run rounded the tensor, None for fp32."""
        return None if self.format == 'fp32' else parse_format(self.format, self.options)

    @property
    def title(self) -> str:
        """Such as 'encoder.0.self_attention.q forward input, step 10'; ', t 3', ', rank 7' and ', mxfp8' are appended if they
        apply."""
        time = '' if self.time is None else f', t {self.time}'
        origin = f', {self.place}' if self.place else ''
        fmt = '' if self.format == 'fp32' else f', {self.format}'
        return printable(f'{self.layer} {self.operation} {self.name}, step {self.step}{time}{origin}{fmt}')

    @property
    def tags(self) -> dict[str, str]:
        """What distinguishes tensors of one layer, name and step: {'rank': 'rank 7', ...} of the fields that are known."""
        texts = {name: f'{name} {value}' for name in ('rank', 'sample', 'group') if (value := getattr(self, name)) is not None}
        if self.phase or self.component:
            texts = {'part': ' '.join(filter(None, (self.phase, self.component)))} | texts
        return texts

    @property
    def place(self) -> str:
        """The tags as one text, such as 'pre FA, rank 7, sample 0'; '' without tags."""
        return printable(', '.join(self.tags.values()))

    @property
    def tags_in_folder(self) -> dict[str, str]:
        """The tags to write beside the entry's subfolder: without the rank if the subfolder is named after it."""
        named = _RANK_FOLDER.fullmatch(os.path.basename(os.path.dirname(self.relative_path)))
        is_named = named is not None and self.rank == int(named[1])
        return {name: text for name, text in self.tags.items() if name != 'rank' or not is_named}

    @property
    def place_in_folder(self) -> str:
        """The tags_in_folder as one text."""
        return printable(', '.join(self.tags_in_folder.values()))

    @property
    def is_weights(self) -> bool:
        """Whether this is a tensor of attention weights, (B, heads, Tq, Tk) or (B, Tq, Tk), that is not empty."""
        return (self.layer_type == 'attention' and self.name in ATTENTION_WEIGHTS and len(self.shape) in (3, 4)
                and 0 not in self.shape)

    @property
    def stem(self) -> str:
        """A base name for files about this tensor.  It is unique and consists of letters, digits and -_. only."""
        base = os.path.splitext(self.relative_path)[0] + (f'.{self.key}' if self.key not in ('', 'tensor') else '')
        safe = re.sub(r'[^A-Za-z0-9_.-]', '_', base).lstrip('.')[:150]
        return safe if safe == base else f'{safe}-{_digest(self.relative_path, self.key)}'

    def load(self) -> np.ndarray:
        """Return the values as a C-contiguous float32 array.  LogError if the file is missing, damaged or was replaced."""
        with self.reading():
            array = read(self.path, self.key)
        if array.shape != self.shape:
            raise LogError(f'{printable(self.path)}: the tensor has shape {array.shape}, but the manifest lists {self.shape}; '
                           'save the tensor again or remove the file')
        return array

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Turn errors of the readers into LogErrors."""
        try:
            yield
        except Refused as error:
            raise LogError(f'{printable(self.path)}: {error}; save the tensor again or remove the file') from error
        except OSError as error:
            raise LogError(f'{printable(self.path)}: cannot be read ({error.strerror or error}); save the tensor again or '
                           'remove the file') from error


class Logs:
    """The tensors of a folder with the metadata of its manifests.

    entries: list of Entry, ordered by (step, counter);  skipped: list of (file, reason)
    steps: a dict with step, loss, norm, training and folder per training step
    run: the last run line of the manifest, {} without one
    empty: accept a folder without tensors, because a run may still add them
    UserError if the folder cannot be read, or is empty without `empty`.
    """

    def __init__(self, folder: PathLike, empty: bool = False) -> None:
        self.folder = os.fspath(folder)
        if not os.path.isdir(self.folder):
            raise UserError(f'{printable(self.folder)}: no such folder; give the folder of saved tensors, the value of '
                            '--save-tensors or TENSOR_SAVE_DIR')
        self.entries: list[Entry] = []
        self.steps: list[dict[str, Any]] = []
        self.run: dict[str, Any] = {}
        self._root = os.path.realpath(self.folder)
        self._folders: dict[str, _Folder] = {}      # path relative to the root -> _Folder
        self._index = Index(self.folder, 'tensors', *_READERS)
        self.refresh()
        if not self.entries and not empty:
            reasons = '; '.join(f'{file}: {reason}' for file, reason in self.skipped[:3])
            raise UserError(f'{printable(self.folder)}: contains no saved tensor ({reasons or "it is empty"}); expected '
                            f'{", ".join(SUFFIXES)} files, as written by --save-tensors or torch.attach')

    @property
    def skipped(self) -> list[tuple[str, str]]:
        return [(file, reason) for name in sorted(self._folders) for file, reason in self._folders[name].skipped()]

    def refresh(self) -> list[Entry]:
        """Read the tensors added since the last call and return their entries, in order.  The folder is listed anew."""
        new: list[Entry] = []
        subfolders = self._refresh('', new)
        for name in sorted(subfolders):
            self._refresh(name, new)
        self._index.save()
        new.sort(key=sort_key)
        if new:
            self.entries = sorted(self.entries + new, key=sort_key)
        return new

    def _refresh(self, name: str, new: list[Entry]) -> list[str]:
        """Read one folder, append its new entries to `new` and return the names of its subfolders."""
        state = self._folders.get(name) or _Folder(self._root, name, self.folder, self._index)
        subfolders = state.refresh(new)
        if name in self._folders or not name or state.known or state.manifest.lines or state.manifest.refused:
            self._folders[name] = state         # other subfolders, such as one of pictures, are ignored without a report
        self.steps += [step | {'folder': name} for step in state.manifest.take_steps()]
        self.run = state.manifest.run or self.run
        return subfolders

    def mask(self, entry: Entry) -> np.ndarray | None:
        """Return a bool array that broadcasts to the tensor and is False at padding, or None for a tensor without padding.

        LogError if the manifest lacks the lengths to which the mask refers.
        """
        if not entry.mask:
            return None
        lengths = self.batch(entry).get('lengths') or {}
        for item in entry.mask:
            side, count = item['of'], entry.shape[item['batch']]
            if side not in lengths or len(lengths[side]) != count:
                raise LogError(f'{printable(entry.path)}: unknown padding: the manifest has no lengths of the {count} '
                               f'{printable(side)} sentences at step {entry.step}; save the tensor again')
        return padding(entry.shape, entry.mask, lengths, entry.time or 0)

    def tokens(self, entry: Entry, sentence: int) -> tuple[list[str], list[str]] | None:
        """Return the words of one sentence of the batch for attention weights of shape (B, heads, Tq, Tk).

        The result is (Tq query words, Tk key words) with '' at padding, or None if the manifest has no words.
        """
        sides = {item['time']: item['of'] for item in entry.mask}
        words = self.batch(entry).get('tokens')
        if not words or len(entry.shape) != 4 or not {2, 3} <= sides.keys():
            return None
        result = []
        for axis in (2, 3):
            sentences = words.get(sides[axis], ())
            if sentence >= len(sentences):
                return None
            size = entry.shape[axis]
            result.append([*sentences[sentence][:size], *[''] * (size - len(sentences[sentence]))])
        return result[0], result[1]

    def batch(self, entry: Entry) -> dict[str, Any]:
        """Return the manifest's batch line of the entry's step, with `lengths` and `tokens`; {} without one."""
        name = os.path.relpath(entry.folder, self.folder)
        state = self._folders.get('' if name == '.' else name)
        return state.manifest.batches.get((entry.run, entry.step), {}) if state else {}


def places(entries: Sequence[Entry]) -> list[str]:
    """Return per entry the text that distinguishes it from the other entries of its layer: 'rank0, run 2, sample 1'.

    It has the subfolder, the number of the training and the tags, without those that are the same in the whole layer.
    """
    known = [_origin(os.path.dirname(entry.relative_path), entry.training) | entry.tags_in_folder for entry in entries]
    values: dict[str, dict[str, set[str]]] = {}
    for entry, texts in zip(entries, known, strict=True):
        of_layer = values.setdefault(entry.layer, {})
        for name in _PLACES:
            of_layer.setdefault(name, set()).add(texts.get(name, ''))
    return [printable(', '.join(texts[name] for name in _PLACES if texts.get(name) and len(values[entry.layer][name]) > 1))
            for entry, texts in zip(entries, known, strict=True)]


def curves(steps: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the steps of Logs.steps by training: {'rank0, run 2': [...]}; '' is the only one."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for step in steps:
        groups.setdefault((step.get('folder', ''), step.get('training', 0)), []).append(step)
    folders, numbers = ({key[i] for key in groups} for i in (0, 1))
    result = {}
    for folder, number in sorted(groups):
        texts = _origin(folder if len(folders) > 1 else '', number) if len(numbers) > 1 else {'folder': folder}
        name = ', '.join(filter(None, texts.values())) if len(groups) > 1 else ''
        result[printable(name)] = groups[folder, number]
    return result


def _origin(folder: str, training: int) -> dict[str, str]:
    return {'folder': folder, 'training': f'run {training + 1}'}


_PLACES = 'folder', 'training', 'part', 'rank', 'sample', 'group'


def sort_key(entry: Entry) -> tuple[int, int, int, str, str]:
    """The order of Logs.entries: by step, then as the run wrote them."""
    return entry.step, entry.counter, entry.run, entry.relative_path, entry.key


def _digest(*texts: str) -> str:
    return hashlib.sha256('\0'.join(texts).encode('utf-8', 'surrogatepass')).hexdigest()[:8]


# ---- a folder --------------------------------------------------------------------------------------------------------

class _Folder:
    """One folder of tensors: its manifest, and the state of each file.

    root: real path of the folder given to Logs;  name: the folder relative to it, '' for the folder itself;
    opened: the folder given to Logs, as the user wrote it;  index: of that folder
    """

    def __init__(self, root: str, name: str, opened: str, index: Index) -> None:
        self.root, self.name, self.index = root, name, index
        self.path = os.path.join(opened, name) if name else opened
        self.manifest = Manifest(os.path.join(self.path, MANIFEST))
        self.known: set[str] = set()    # files with entries
        self.refused: dict[str, tuple[str, Any]] = {}       # file -> (reason, (size, mtime) at the last attempt)
        self.missing: dict[str, dict[str, Any]] = {}        # file -> its manifest line, until the file exists
        self.refused_parts: dict[str, list[str]] = {}       # file -> lines about single tensors

    def skipped(self) -> list[tuple[str, str]]:
        prefix = self.name and self.name + '/'
        missing = ((file, 'the manifest lists this file, but it does not exist') for file in self.missing)
        refused = ((file, reason) for file, (reason, _) in self.refused.items())
        parts = ((file, reason) for file in sorted(self.refused_parts) for reason in self.refused_parts[file])
        return [(printable(prefix + file), reason) for file, reason in (
            *self.manifest.refused, *sorted(refused), *parts, *missing)]

    def refresh(self, new: list[Entry]) -> list[str]:
        """Append new entries to `new` and return the names of the subfolders."""
        # Manifest first: writers create a file before its line.
        for line in self.manifest.read():
            self.missing.setdefault(line['file'], line)
        subfolders = []
        for item in self._list():
            try:
                if item.name == MANIFEST or item.name.startswith('.') or item.name in self.known:
                    self.missing.pop(item.name, None)
                    continue
                if not _is_inside(item, self.root):
                    raise Refused('a link that leads out of the folder')
                status = item.stat()
                if stat.S_ISDIR(status.st_mode):
                    subfolders.append(item.name)
                    continue
                version = status.st_size, status.st_mtime_ns
                if self.refused.get(item.name, (None, None))[1] != version or item.name in self.missing:
                    self._add(item.name, status, new)
                if item.name in self.known:
                    self.refused.pop(item.name, None)
            except Refused as error:
                self.refused[item.name] = str(error), _version(item)
            except OSError as error:
                self.refused[item.name] = f'cannot be read ({error.strerror or error})', _version(item)
        return subfolders

    def _list(self) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self.path) as items:
                return sorted(items, key=lambda item: item.name)
        except OSError as error:
            if not self.name:
                raise UserError(f'{printable(self.path)}: cannot be read ({error.strerror}); give a readable folder of saved '
                                'tensors') from error
            self.manifest.refused[:] = [('', f'cannot be read ({error.strerror})')]
            return []

    def _add(self, file: str, status: os.stat_result, new: list[Entry]) -> None:
        """Append the entries of one file to `new`."""
        if file.endswith('.safetensors.index.json'):        # names the files of a checkpoint: readers.py opens it
            return
        if not stat.S_ISREG(status.st_mode) or os.path.splitext(file)[1] not in SUFFIXES:
            raise Refused(f'not a tensor file; expected {", ".join(SUFFIXES)}')
        line = self.missing.pop(file, None)
        shared = {'folder': self.path, 'file': file, 'relative_path': os.path.join(self.name, file)}
        if line is not None:
            if nbytes(line['shape'], line['dtype']) > status.st_size:
                raise Refused(f'truncated: {status.st_size} bytes for a tensor of shape {tuple(line["shape"])}')
            entries = [Entry(**{**line, **shared}, key='tensor', origin=self.manifest.origin(line['run']))]
        else:
            tensors, metadata = self._listing(file, status)
            entries = [self._inspect(shared, *tensor, metadata) for tensor in tensors]
        self.known.add(file)
        new += entries

    def _listing(self, file: str, status: os.stat_result) -> tuple[list[tuple[str, Shape, str]], dict[str, Any]]:
        """Return (key, shape, dtype) of the tensors of a file, and what is used of its metadata."""
        name = os.path.join(self.name, file)
        found = self.index.find(name, status, 'tensors')
        if found is None:
            tensors, refused = list_file(os.path.join(self.path, file))
            metadata = {key: value for key, value in (tensors[0][3] if tensors else {}).items()
                        if key in _USED and isinstance(value, (str, int))}
            lines = [f'{printable(key)[:80]}: {reason}' if key else reason for key, reason in refused]
            found = [[tensor[:3] for tensor in tensors], metadata, lines]
            self.index.add(name, status, 'tensors', found)
        tensors, metadata, lines = found
        if lines:
            rest = len(lines) - _REFUSED
            self.refused_parts[file] = lines[:_REFUSED] + [f'{rest} more of its tensors cannot be read'] * (rest > 0)
        return [(key, tuple(shape), dtype) for key, shape, dtype in tensors], metadata

    def _inspect(self, shared: dict[str, Any], key: str, shape: Shape, dtype: str, metadata: dict[str, Any]) -> Entry:
        """Return the Entry of a tensor that the manifest does not list, from the file's metadata (a dict) and its name."""
        run = max(self.manifest.runs - 1, 0)
        if isinstance(metadata.get('pyops'), str) and key == 'tensor':
            line = tensor_line(_of_link(parse_json(metadata['pyops']), shared['file']))
            if line['shape'] != shape:
                raise Refused(f'the tensor has shape {shape}, but the metadata of the file has {line["shape"]}')
            return Entry(**{**line, **shared, 'dtype': dtype}, run=run, training=self.manifest.training, key=key,
                         origin=self.manifest.origin(run))
        stem = os.path.splitext(shared['file'])[0]
        fields = _fields(stem, metadata, os.path.basename(shared['folder']))
        name, time = fields['name'], None
        if key not in _BARE and '.' in key and fields['layer'] == stem:      # a checkpoint, perhaps one file of several
            fields['layer'], _, name = key.rpartition('.')
        elif key not in _BARE:
            name = f'{name}.{key}' if name != stem else key
        elif match := _TIME.fullmatch(name):
            name, time = match.groups()
        layer_type, index, fmt = fields['layer_type'].lower(), fields['index'], fields['format'].lower()
        layer = fields['layer'] or (layer_type if index is None else f'{layer_type}_L{index}')
        return Entry(**shared, key=key, origin='file', counter=int(fields['counter']), timestamp=fields['timestamp'],
                     layer=layer, layer_type=layer_type, index=int(index or 0),
                     operation=fields['operation'] or ('backward' if 'grad' in name else 'forward'), name=name,
                     step=fields['step'], time=None if time is None else int(time),
                     format=known_format(fmt) or 'fp32', options={},
                     axis=0 if layer_type == 'attention' and name == 'value' and shape else -1, uses=(), shape=shape,
                     dtype=dtype, mask=(), statistics=None, run=run, training=self.manifest.training, phase=fields['phase'],
                     component=fields['component'], rank=_optional_int(fields['rank']),
                     sample=_optional_int(fields['sample']), group=_optional_int(fields['group']))


def _of_link(line: dict[str, Any], file: str) -> dict[str, Any]:
    """Return the line in the metadata of a file with this name.  A file whose name has another layer is a link to the file of
    that line, for the same tensor in two layers: the layer's name is unknown."""
    match = NAME.fullmatch(os.path.splitext(file)[0])
    if match and match['index'] is not None and int(match['index']) != line.get('index'):
        line = {**line, 'index': int(match['index']), 'counter': int(match['counter']),
                'layer': f'{match["layer_type"]}_L{match["index"]}'}
    return {**line, 'file': file}


def _optional_int(text: str | None) -> int | None:
    return None if text is None else int(text)


def _fields(stem: str, metadata: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the fields in a file's name; TransformerEngine has the rank in the name of the folder.  `metadata`, as in dumps of
    Megatron, takes precedence."""
    match = NAME.fullmatch(stem)
    fields: dict[str, Any] = {'timestamp': '', 'counter': 0, 'layer': '' if match else stem, 'layer_type': 'other',
                              'index': None, 'operation': '', 'format': 'fp32', 'name': stem, 'step': 0, 'phase': '',
                              'component': '', 'rank': None, 'sample': None, 'group': None}
    if match:
        fields |= {key: value for key, value in match.groupdict().items() if value is not None}
        fields['step'] = int(fields['step'])
    elif dumped := _DUMPED.fullmatch(stem):
        operation, name = _MEANING[dumped['tensor']]
        rank = _RANK.fullmatch(folder)
        fields |= {'layer': dumped['layer'], 'layer_type': 'linear', 'operation': operation, 'name': name,
                   'step': int(dumped['step']), 'rank': rank and rank[1]}
    for key, name in (('layer_type', 'layer_type'), ('operation', 'operation'), ('format', 'quant_type'),
                      ('name', 'tensor_name'), ('phase', 'phase'), ('component', 'component')):
        value = metadata.get(name)
        if isinstance(value, str) and value and (key != 'operation' or value in ('forward', 'backward')):
            fields[key] = value
    if metadata.get('layer_type') and not match:
        fields['layer'] = ''
    for key, names in (('index', ('layer_idx',)), ('step', ('step', 'iteration')), ('rank', ('rank',)),
                       ('sample', ('sample', 'sample_idx')), ('group', ('group', 'group_idx'))):
        for name in names:
            if is_count(metadata.get(name)):
                fields[key] = metadata[name]
    if fields['phase'] == 'unknown':
        fields['phase'] = ''
    return fields


def _is_inside(item: os.DirEntry[str], root: str) -> bool:
    """Return whether a directory item is not a link, or is a link to a target inside `root`."""
    return not item.is_symlink() or os.path.realpath(item.path).startswith(os.path.join(root, ''))


def _version(item: os.DirEntry[str]) -> tuple[int, int] | None:
    """Return (size, mtime) of a directory item, by which a changed file is recognized."""
    try:
        status = item.stat(follow_symlinks=False)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
