"""A corpus of sentence pairs: read from a file, cut, counted, turned into arrays of ids.

A sentence is kept as its tokens joined by single spaces.  A list of token objects would take five times the memory,
and splitting it again costs a fraction of a microsecond.
"""
import zipfile
import zlib
from pathlib import Path

import numpy as np

from pyops.errors import UserError
from pyops.text.preprocess import preprocess
from pyops.text.vocabulary import EOS, PAD, Vocabulary, tokens_of

try:
    from lzma import LZMAError
except ImportError:             # not every Python is built with that way of packing
    LZMAError = zlib.error


class Corpus:
    """Sentence pairs: `sources[i]` translates to `targets[i]`; each is the sentence's tokens joined by spaces.

    `name` is the file's path, or what a corpus without a file calls itself.
    """

    def __init__(self, name, sources, targets):
        if len(sources) != len(targets):
            raise ValueError(f'{len(sources)} sources and {len(targets)} targets')
        self.name = str(name)
        self.sources = sources
        self.targets = targets

    @classmethod
    def load(cls, path):
        """Read a .txt file with one pair a line, a tab between, or a .zip that holds such a file.

        Columns after the second (attributions, in newer Tatoeba files) and blank lines are passed over.
        UserError if the file is missing, broken, empty, not UTF-8, or has a line without two sentences.
        """
        raw, name = _read(Path(path))
        return cls(path, *_parse(raw, name))

    @classmethod
    def from_pairs(cls, name, pairs):
        """Make a corpus of (source, target) pairs of raw text."""
        sources, targets = [], []
        for source, target in pairs:
            sources.append(' '.join(preprocess(source).split()))
            targets.append(' '.join(preprocess(target).split()))
        return cls(name, sources, targets)

    def __len__(self):
        return len(self.sources)

    def __repr__(self):
        return f'Corpus({self.name!r}, {len(self)} pairs)'

    def first(self, n):
        """Return the corpus of the first `n` pairs, or of all if there are fewer or n is None.  UserError if n < 1."""
        if n is not None and n < 1:
            raise UserError(f'{self.name}: want the first 1 pair or more, got {n}; give a larger number')
        return Corpus(self.name, self.sources[:n], self.targets[:n])

    def vocabularies(self, min_count=3):
        """Return the Vocabulary of the sources and that of the targets."""
        return Vocabulary.build(self.sources, min_count), Vocabulary.build(self.targets, min_count)


def encode(sentences, vocabulary, num_steps):
    """Return int32 (N, num_steps): the ids of each sentence's tokens and <eos>, cut or padded to num_steps.

    `sentences` is a list of N sentences, each a list of tokens or its tokens joined by spaces.  A sentence of
    num_steps tokens or more loses its end, <eos> included.
    """
    if num_steps < 1:
        raise UserError(f'num_steps: want 1 or more, got {num_steps}; give a larger number')
    tails = [[EOS] + [PAD] * (num_steps - length - 1) for length in range(num_steps)] + [[]]
    flat = []
    for sentence in sentences:
        ids = vocabulary.ids(tokens_of(sentence)[:num_steps])
        flat += ids
        flat += tails[len(ids)]
    return np.array(flat, dtype=np.int32).reshape(-1, num_steps)


def _read(path):
    """Return the bytes of the text file at `path`, or inside the zip there, and the name to call it in errors."""
    try:
        if path.suffix.lower() != '.zip':
            return path.read_bytes(), str(path)
        with zipfile.ZipFile(path) as archive:
            inner = _text_member(archive)
            if inner is None:
                raise UserError(f'{path}: want a zip that holds a .txt file of sentence pairs, '
                                f'got {len(archive.namelist())} other files; give the corpus itself')
            return archive.read(inner), f'{path}:{inner}'
    except (zipfile.BadZipFile, zlib.error, LZMAError, EOFError, NotImplementedError, RuntimeError) as error:
        raise UserError(f'{path}: want a zip file, but it cannot be read ({error}); fetch it again') from error
    except FileNotFoundError as error:
        raise UserError(f'{path}: no such file; give a .txt or .zip of sentence pairs, '
                        "or fetch one with 'python -m pyops.data get fra-eng'") from error
    except OSError as error:
        raise UserError(f'{path}: want a readable file of sentence pairs, got: {error.strerror or error}; '
                        'give another path') from error


def _text_member(archive):
    """Return the name of the corpus inside an open ZipFile, None if there is none.

    It is the first .txt that is neither a note (`_about.txt`) nor a shadow file of the Mac's (`__MACOSX/`).
    """
    for name in archive.namelist():
        folders, _, file = name.rpartition('/')
        if file.endswith('.txt') and not file.startswith(('_', '.')) and '__MACOSX' not in folders.split('/'):
            return name
    return None


def _parse(raw, name):
    try:
        text = raw.decode('utf-8-sig')                      # a byte order mark is no part of the first word
    except UnicodeDecodeError as error:
        line = raw.count(b'\n', 0, error.start) + 1
        raise UserError(f'{name}: line {line}: want UTF-8 text, got byte 0x{raw[error.start]:02x} '
                        f'at offset {error.start}; convert the file to UTF-8') from error
    sources, targets = [], []
    # Not splitlines: some sentences hold exotic line separators, which are white space inside a line.
    for number, line in enumerate(preprocess(text).split('\n'), 1):
        source, tab, rest = line.partition('\t')
        source, target = source.split(), rest.partition('\t')[0].split()
        if source and target:
            sources.append(' '.join(source))
            targets.append(' '.join(target))
        elif tab or source:
            got = 'an empty one' if tab else 'no tab'
            raise UserError(f'{name}: line {number}: want two sentences with a tab between, got {got}; '
                            'mend or remove the line')
    if not sources:
        raise UserError(f'{name}: want sentence pairs, one a line with a tab between, got an empty file; '
                        'give another corpus')
    return sources, targets
