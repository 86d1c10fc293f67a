"""A corpus of sentence pairs: reading, tokenizing, counting, and encoding as an array of ids.

Tokenizing a large file takes longer than everything else before training, so the tokens are cached (pyops.cache).
"""
import importlib
import io
import zlib
from pathlib import Path

import numpy as np

from pyops import cache
from pyops.data import columns
from pyops.errors import UserError
from pyops.text.preprocess import preprocess
from pyops.text.sentences import Sentences
from pyops.text.vocabulary import Vocabulary

_LARGE = 1 << 16        # bytes from which a file's tokens are cached; smaller files are read as fast
# First bytes of a file -> the format, and the module that decompresses it.
_COMPRESSED = {b'\x1f\x8b': ('gzip', 'gzip'), b'BZh': ('bz2', 'bz2'), b'\xfd7zXZ\0': ('xz', 'lzma')}
_UNREADABLE = {b'\x28\xb5\x2f\xfd': 'zstd', b'7z\xbc\xaf\x27\x1c': '7z', b'Rar!\x1a\7': 'RAR'}


class Corpus:
    """Sentence pairs: `sources[i]` translates to `targets[i]`.  Both are sequences of sentences, whose tokens are joined by
    spaces: lists, or Sentences if read from a file.  `raw` returns a corpus whose sentences are raw text.

    `name` is the file's path, or another name for a corpus without a file.
    texts()    returns all pairs of the file or of the embedded corpus, (source, target) as raw text; None: there is no raw text
    numbers    positions of this corpus's pairs among them, int64; None: all, in order
    """

    def __init__(self, name, sources, targets, texts=None, numbers=None):
        if len(sources) != len(targets):
            raise ValueError(f'{len(sources)} sources and {len(targets)} targets')
        self.name = str(name)
        self.sources = sources
        self.targets = targets
        self._texts, self._numbers = texts, numbers

    @classmethod
    def load(cls, path):
        """Read sentence pairs from a text file, or from a zip, gzip, bz2 or xz file with one text.

        A line is a source, a tab and a target; a third column (the attribution in newer Tatoeba files) and blank lines are
        ignored.  The file format is detected from the first bytes.
        UserError if the file is missing, damaged, empty, not UTF-8 or a zip with several texts, or if a line lacks a
        sentence or has more than three columns.
        """
        path = Path(path)
        raw = read_bytes(path)

        def tokens():
            return parse(*unpack(raw, path))

        def texts():
            return raw_pairs(decode(*unpack(read_bytes(path), path)))

        if len(raw) < _LARGE:
            return cls(path, *map(Sentences.of, tokens()), texts)
        return cls.cached(path, io.BytesIO(b'zip' * _is_zip(raw, path) + raw), tokens, texts)

    @classmethod
    def cached(cls, name, stream, make, texts, *modules):
        """Return the Corpus of the sources and targets that make() returns.  The tokens are cached; the key is the rest of the
        stream and the source code, including `modules`."""
        key = cache.digest(stream, *(thing.__module__ for thing in (cls, preprocess, Sentences, columns.decode)), *modules)
        if key and (found := cache.read_arrays('corpus', key)):
            return cls(name, *(Sentences.of_arrays(tokens.tobytes().decode().split('\n'), ids, lengths)
                               for tokens, ids, lengths in (found[:3], found[3:])), texts)
        pair = [Sentences.of(side) for side in make()]
        if key:
            cache.write_arrays('corpus', key, [array for side in pair for array in (
                np.frombuffer('\n'.join(side.tokens).encode(), np.uint8), side.ids, side.lengths)])
        return cls(name, *pair, texts)

    def texts(self):
        """Return the pairs as (source, target) of raw text, read again from the file.  ValueError if there is no raw text;
        UserError if the file cannot be read or has fewer pairs than when it was opened."""
        if self._texts is None:
            raise ValueError(f'{self.name}: has no raw text')
        pairs = self._texts()
        numbers = range(len(self)) if self._numbers is None else self._numbers.tolist()
        if numbers and max(numbers) >= len(pairs):
            raise UserError(f'{self.name}: has changed since it was opened; start again')
        return [pairs[number] for number in numbers]

    def raw(self):
        """Return the corpus of the same pairs whose sentences are raw text, with each white space as one plain space."""
        sides = ([' '.join(sentence.split()) for sentence in side] for side in zip(*self.texts(), strict=True))
        return Corpus(self.name, *(sides if len(self) else ([], [])), self._texts, self._numbers)

    def __len__(self):
        return len(self.sources)

    def __repr__(self):
        return f'Corpus({self.name!r}, {len(self)} pairs)'

    def first(self, n):
        """Return the corpus of the first n pairs, or of all if there are fewer or n is None.  UserError if n < 1."""
        if n is not None and n < 1:
            raise UserError(f'{self.name}: expected the first 1 pair or more, got {n}; give a larger number')
        numbers = None if self._numbers is None else self._numbers[:n]
        return Corpus(self.name, self.sources[:n], self.targets[:n], self._texts, numbers)

    def take(self, index):
        """Return the corpus of the pairs with these indices, int64."""
        return Corpus(self.name, *(side.take(index) if isinstance(side, Sentences) else [side[i] for i in index.tolist()]
                                   for side in (self.sources, self.targets)),
                      self._texts, index if self._numbers is None else self._numbers[index])

    def without(self, excluded):
        """Return the corpus of the pairs that are not excluded.  bool (len(self),); None: none is excluded"""
        return self if excluded is None else self.take(np.flatnonzero(~excluded))

    def vocabularies(self, min_count=3):
        """Return the Vocabularies of the sources and of the targets."""
        return Vocabulary.build(self.sources, min_count), Vocabulary.build(self.targets, min_count)


def read_bytes(path, dataset='fra-eng'):
    """Return the bytes of a file of sentence pairs.  UserError, which recommends the data set, if it cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f'{path}: no such file; give a .txt or .zip of sentence pairs, '
                        f"or fetch one with 'python -m pyops.data get {dataset}'") from error
    except OSError as error:
        raise UserError(f'{path}: cannot be read ({error.strerror or error}); give another file of sentence pairs') from error


def unpack(raw, path):
    """Return the text in the file at `path` with the bytes `raw`, as bytes, and a name for it in error messages.

    UserError if it is damaged, or an archive without exactly one text.
    """
    if _is_zip(raw, path):
        return _member(raw, path)
    kind, module = next((found for magic, found in _COMPRESSED.items() if raw.startswith(magic)), (None, None))
    if kind:
        try:
            raw = importlib.import_module(module).decompress(raw)
        except ImportError as error:                        # optional modules of a Python build
            raise UserError(f'{path}: this Python has no module {module} to unpack it; unpack it and give the text') from error
        except _damages() as error:
            raise UserError(f'{path}: truncated or damaged {kind} file ({error}); get the file again') from error
    kind = next((name for magic, name in _UNREADABLE.items() if raw.startswith(magic)), None)
    if kind or raw[257:262] == b'ustar':
        raise UserError(f'{path}: holds a {kind or "tar"} archive, which cannot be read; unpack it and give the text')
    return raw, str(path)


def _member(raw, path):
    """Like unpack, for a zip."""
    import zipfile
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            texts = list(filter(_is_text, archive.namelist()))
            if not texts:
                raise UserError(f'{path}: holds no .txt file of sentence pairs, only {len(archive.namelist())} other files; '
                                'give the corpus itself')
            if len(texts) > 1:
                raise UserError(f'{path}: holds {len(texts)} .txt files, {_listed(texts)}; unpack it and give one of them')
            return archive.read(texts[0]), f'{path}:{texts[0]}'
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, *_damages()) as error:
        raise UserError(f'{path}: truncated or damaged zip file ({error}); get the file again') from error


def _is_zip(raw, path):
    return raw.startswith(b'PK\3\4') or path.suffix.lower() == '.zip'


def _damages():
    """Return the exceptions raised for truncated or damaged compressed data."""
    try:
        from lzma import LZMAError
    except ImportError:
        LZMAError = zlib.error
    return OSError, EOFError, ValueError, zlib.error, LZMAError


def _is_text(name):
    """Return whether a zip member is a text, and not a note (`_about.txt`) or a macOS shadow file (`__MACOSX/`)."""
    folders, _, file = name.rpartition('/')
    return file.endswith('.txt') and not file.startswith(('_', '.')) and '__MACOSX' not in folders.split('/')


def _listed(things, most=5):
    """Return the first `most` things as text, and the number of the others."""
    others = len(things) - most
    return ', '.join(map(str, things[:most])) + (f' and {others} more' if others > 0 else '')


def tokenized(pairs):
    """Return sources and targets of (source, target) pairs of raw text, with each sentence's tokens joined by spaces."""
    sources, targets = [], []
    for source, target in pairs:
        sources.append(' '.join(preprocess(source).split()))
        targets.append(' '.join(preprocess(target).split()))
    return sources, targets


def decode(content, name):
    """Return UTF-8 text without a byte order mark.  UserError if it is not UTF-8."""
    try:
        return columns.decode(content)
    except ValueError as error:
        raise UserError(f'{name}: {error}; convert the file to UTF-8') from error


def raw_pairs(text):
    """Return the (source, target) pairs of a text that `parse` accepts, as raw text."""
    lines = (line.split('\t') for line in text.split('\n') if line.strip())
    return [(source.strip(), target.strip()) for source, target, *_ in lines]


def parse(raw, name, first=1):
    """Return the sources and targets in the bytes of a text, with each sentence's tokens joined by spaces.

    first: number of its first line, for messages

    UserError if it is empty or not UTF-8, or a line has other columns than Corpus.load accepts.
    """
    text = decode(raw, name)
    sources, targets = [], []
    wide = []                                               # numbers of lines with too many columns
    # Not splitlines: some sentences contain exotic line separators, which are white space within a line.
    for number, line in enumerate(preprocess(text).split('\n'), first):
        source, *rest = line.split('\t')
        source, target = source.split(), rest[0].split() if rest else []
        if source and target:
            sources.append(' '.join(source))
            targets.append(' '.join(target))
        elif rest or source:
            got = 'an empty sentence' if rest else 'no tab'
            raise UserError(f'{name}: line {number}: {got}; a line is two sentences with a tab between: '
                            'correct or remove the line')
        if len(rest) > 2:
            wide.append(number)
    if wide:
        raise UserError(f'{name}: more than three columns in line {_listed(wide)}; a line is two sentences and at most an '
                        'attribution, with tabs between: remove the other columns')
    if not sources:
        raise UserError(f'{name}: no sentence pairs; give a file with one pair a line and a tab between its sentences')
    return sources, targets
