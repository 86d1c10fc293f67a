"""Encoded sentence pairs in files that training maps into memory: for a corpus that is larger than memory.

A folder has four arrays for each part, 'train' and perhaps 'validation', and a JSON file that is written last:

    train.source.ids.npy, train.source.starts.npy, train.labels.ids.npy, train.labels.starts.npy      as in pairs.Ragged
    pairs.json      the tokenizers, the settings they were made with, the number of pairs and a hash of each part

The kernel that gathers a batch reads its sentences from the mapped file.  All processes of a host share the pages.
"""
from __future__ import annotations

import contextlib
import errno
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pyops.errors import UserError
from pyops.files import write_atomically
from pyops.text.corpus import Corpus, decode, parse, raw_pairs
from pyops.text.flags import MOST_STEPS
from pyops.text.pairs import Pairs, Ragged
from pyops.text.subwords import train
from pyops.text.tokenizer import restore, states
from pyops.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyops.text.vocabulary import Encoded

CONTENT = 'pairs.json'
FORMAT = 'pyops-pairs-1'
TABLES = 'source.ids', 'source.starts', 'labels.ids', 'labels.starts'
SETTINGS = 'tokenizer', 'min_count', 'vocabulary', 'num_steps'      # of a run that the folder determines
AT_ONCE = 1 << 24           # bytes of text that are encoded at once
ARCHIVES = b'PK\3\4', b'\x1f\x8b', b'BZh', b'\xfd7zXZ'         # first bytes
LEARN_FROM = 2_000_000      # pairs from which subwords are learned, at most


class MappedPairs(Pairs):
    """Pairs whose tables are mapped files.   hash: of all ids, from the folder"""

    def __init__(self, source: Ragged, labels: Ragged, longest: int, hash: str) -> None:
        super().__init__(source, labels, longest)
        self._hash = hash

    def digest(self) -> str:
        return self._hash


def is_packed(path: str | None) -> bool:
    """Return whether `path` is a folder that pack() has written."""
    return bool(path) and (Path(str(path)) / CONTENT).is_file()


class Packed:
    """A folder that pack() has written.   content: of its JSON file;  UserError if it cannot be read"""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        path = self.folder / CONTENT
        try:
            self.content: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f'{path}: cannot be read ({error}); pack the corpus again') from error
        found = self.content.get('format') if isinstance(self.content, dict) else None
        if found != FORMAT:
            raise UserError(f'{path}: format {found}, expected {FORMAT}; pack the corpus again with this version of pyops')
        if not _is_content(self.content):
            raise UserError(f'{path}: damaged: facts about the settings or the parts are missing; pack the corpus again')

    def vocabularies(self) -> Any:
        """Return the tokenizers of sources and targets."""
        return restore(self.content.get('vocabularies'))

    def pairs(self, part: str) -> Pairs:
        """Return the pairs of 'train' or 'validation', none if the folder does not have this part.  UserError if a file is
        missing or has another size than when it was packed."""
        about, longest = self.content['parts'].get(part), self.content['settings']['num_steps']
        if about is None:
            return Pairs(*(Ragged(np.empty(0, np.int32), np.zeros(1, np.int64)) for _ in range(2)), longest)
        arrays = []
        for table in TABLES:
            path = self.folder / f'{part}.{table}.npy'
            try:
                array = np.load(path, mmap_mode='r')
            except Exception as error:      # numpy parses the header with Python's tokenizer, which raises its own errors
                if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                    raise MemoryError(f'{path} cannot be mapped') from error
                raise UserError(f'{path}: cannot be mapped ({error}); pack the corpus again') from error
            dtype = np.int64 if table.endswith('starts') else np.int32
            if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != dtype:
                raise UserError(f'{path}: expected one axis of {dtype.__name__}; pack the corpus again')
            if len(array) != about['lengths'][table]:
                raise UserError(f'{path}: has {len(array)} elements, expected {about["lengths"][table]}; pack the corpus again')
            if dtype is np.int64 and not _are_starts(array, len(arrays[-1])):
                raise UserError(f'{path}: damaged: the sentences do not follow each other; pack the corpus again')
            arrays.append(array)
        return MappedPairs(Ragged(*arrays[:2]), Ragged(*arrays[2:]), longest, about['hash'])


def _is_content(content: dict[str, Any]) -> bool:
    """Return whether the JSON of a folder has the structure that pack() writes."""
    settings, parts = content.get('settings'), content.get('parts')
    if not (isinstance(settings, dict) and isinstance(parts, dict)):
        return False
    steps = settings.get('num_steps')
    return type(steps) is int and 0 < steps <= MOST_STEPS and all(
        isinstance(part, dict) and isinstance(part.get('hash'), str) and isinstance(part.get('lengths'), dict)
        and all(type(part['lengths'].get(table)) is int for table in TABLES) for part in parts.values())


def _are_starts(starts: np.ndarray, count: int) -> bool:
    """Return whether these are the positions of sentences of `count` ids in all: kernels read what is between them."""
    return bool(len(starts) and starts[0] == 0 and starts[-1] == count and (np.diff(starts) >= 0).all())


def pack(path: str, folder: str, settings: dict[str, Any], validation: str | None = None) -> str:
    """Encode a text of sentence pairs into a folder, a part of the text at a time.  Return a line about it.

    settings: {name: value} of SETTINGS;  validation: None, or another text, which is packed for validation
    UserError if the text cannot be read or a line is not a pair of sentences, and if the folder cannot be written.
    """
    place = Path(folder)
    vocabularies = _learn(path, settings)
    try:
        place.mkdir(parents=True, exist_ok=True)
        (place / CONTENT).unlink(missing_ok=True)           # from now on the folder is incomplete
        parts = {part: _write(text, place / part, vocabularies, settings['num_steps'])
                 for part, text in (('train', path), ('validation', validation)) if text}
        content = dict(format=FORMAT, corpus=str(path), settings=settings, vocabularies=states(vocabularies), parts=parts)
        write_atomically(place / CONTENT, json.dumps(content).encode(), fsync=True)
    except OSError as error:
        raise UserError(f'{folder}: cannot be written ({error.strerror}); name another folder, or free some space') from error
    return f'packed : {parts["train"]["lengths"]["source.starts"] - 1} pairs in {folder}; train on them with -f {folder}'


def _corpora(path: str) -> Iterator[Corpus]:
    """Yield the pairs of a text, the pairs of about AT_ONCE bytes at a time."""
    first = 1
    try:
        with open(path, 'rb') as file:
            while lines := file.readlines(AT_ONCE):
                if lines[0].startswith(ARCHIVES):
                    raise UserError(f'{path}: is not a text; unpack it, and give the text')
                text, count = b''.join(lines), len(lines)
                if text.strip():
                    yield Corpus(path, *parse(text, path, first), lambda text=text: raw_pairs(decode(text, path)))
                first += count
    except OSError as error:
        raise UserError(f'{path}: cannot be read ({error.strerror}); give a text with a pair of sentences a line') from error
    if first == 1:
        raise UserError(f'{path}: no sentence pairs; give a file with one pair a line and a tab between its sentences')


def _learn(path: str, settings: dict[str, Any]) -> Any:
    """Return the tokenizers of sources and targets: words of the whole text, or subwords of its first pairs."""
    if settings['tokenizer'] == 'word':
        counts: tuple[Counter[str], ...] = Counter(), Counter()
        for corpus in _corpora(path):
            for count, side in zip(counts, (corpus.sources, corpus.targets), strict=True):
                for sentence in side:
                    count.update(sentence.split())
        vocabularies = tuple(Vocabulary.of_counts(count, settings['min_count']) for count in counts)
        for side, vocabulary in zip(('source', 'target'), vocabularies, strict=True):
            if not vocabulary.has_words:
                raise UserError(f'{path}: no {side} word occurs {settings["min_count"]} times or more; give --min-count 1 or a '
                                'larger corpus')
        return vocabularies
    sources: list[str] = []
    targets: list[str] = []
    for corpus in _corpora(path):
        raw = corpus.raw()
        sources += raw.sources
        targets += raw.targets
        if len(sources) >= LEARN_FROM:
            break
    subwords = train([*sources[:LEARN_FROM], *targets[:LEARN_FROM]], settings['vocabulary'])
    return subwords, subwords


def _write(path: str, prefix: Path, vocabularies: Any, num_steps: int) -> dict[str, Any]:
    """Write the arrays of a part, and return its entry in the JSON file."""
    digests = {table: hashlib.blake2b(digest_size=16) for table in TABLES}
    with contextlib.ExitStack() as stack:
        files = {table: stack.enter_context(_Array(Path(f'{prefix}.{table}.npy'), dtype))
                 for table, dtype in zip(TABLES, 2 * (np.int32, np.int64), strict=True)}
        for side in ('source', 'labels'):
            files[f'{side}.starts'].append(np.zeros(1, np.int64))
        for corpus in _corpora(path):
            sentences = vocabularies[0].read_corpus(corpus)
            for side, vocabulary, texts in zip(('source', 'labels'), vocabularies, (sentences.sources, sentences.targets),
                                               strict=True):
                encoded: Encoded = vocabulary.encode(texts)
                ids, starts = encoded.ended(num_steps)
                files[f'{side}.starts'].append(starts[1:] + files[f'{side}.ids'].length)
                files[f'{side}.ids'].append(ids)
                digests[f'{side}.ids'].update(ids)
                digests[f'{side}.starts'].update(np.diff(starts))       # lengths: independent of AT_ONCE
        whole = hashlib.blake2b(b''.join(digest.digest() for digest in digests.values()), digest_size=16)
        return dict(hash=whole.hexdigest(), lengths={table: file.length for table, file in files.items()})


class _Array:
    """A file .npy of one axis that grows; its header is written at the end.   length: elements so far"""
    HEADER = 128

    def __init__(self, path: Path, dtype: type) -> None:
        self.length, self._dtype = 0, np.dtype(dtype)
        self._file = open(path, 'wb')
        self._file.write(b' ' * self.HEADER)

    def append(self, array: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(array, self._dtype).data)
        self.length += len(array)

    def __enter__(self) -> _Array:
        return self

    def __exit__(self, *error: Any) -> None:
        text = repr({'descr': self._dtype.str, 'fortran_order': False, 'shape': (self.length,)}).encode()
        self._file.seek(0)
        self._file.write(b'\x93NUMPY\x01\x00' + (self.HEADER - 10).to_bytes(2, 'little')
                         + text.ljust(self.HEADER - 11) + b'\n')
        self._file.close()
