"""A corpus of sentence pairs: read from a file, cut, counted, turned into arrays of ids.

To cut a large file into tokens takes longer than all else that a program does before it trains, so they are kept
(pyops.cache).
"""
import contextlib
import io
import zlib
from pathlib import Path

import numpy as np

from pyops import cache
from pyops.errors import UserError
from pyops.text.preprocess import preprocess
from pyops.text.sentences import Sentences
from pyops.text.vocabulary import EOS, PAD, Vocabulary, tokens_of

_LARGE = 1 << 16        # bytes of a file whose tokens are kept: a smaller one is read as fast
_MANY = 1000            # sentences for which it is worth while to look up every token of their corpus


class Corpus:
    """Sentence pairs: `sources[i]` translates to `targets[i]`; each is the sentence's tokens joined by spaces.  Both are lists,
    or Sentences, as those of a file are.

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
        path = Path(path)
        with _errors(path):
            raw = path.read_bytes()
        is_zip = path.suffix.lower() == '.zip'

        def parse():
            text, name = _inside(raw, path) if is_zip else (raw, str(path))
            return _parse(text, name)

        if len(raw) < _LARGE:
            return cls(path, *map(Sentences.of, parse()))
        return cls.kept(path, io.BytesIO(b'zip' * is_zip + raw), parse)

    @classmethod
    def kept(cls, name, stream, make, *modules):
        """Return the Corpus whose sources and targets make() returns, or their tokens as they were kept when it was last
        called on the bytes of this stream by the same code, that of `modules` included."""
        key = cache.digest(stream, *(thing.__module__ for thing in (cls, preprocess, Sentences)), *modules)
        if key and (found := cache.read_arrays('corpus', key)):
            return cls(name, *(Sentences.of_arrays(tokens.tobytes().decode().split('\n'), ids, lengths)
                               for tokens, ids, lengths in (found[:3], found[3:])))
        pair = [Sentences.of(side) for side in make()]
        if key:
            cache.write_arrays('corpus', key, [array for side in pair for array in (
                np.frombuffer('\n'.join(side.tokens).encode(), np.uint8), side.ids, side.lengths)])
        return cls(name, *pair)

    def __len__(self):
        return len(self.sources)

    def __repr__(self):
        return f'Corpus({self.name!r}, {len(self)} pairs)'

    def first(self, n):
        """Return the corpus of the first `n` pairs, or of all if there are fewer or n is None.  UserError if n < 1."""
        if n is not None and n < 1:
            raise UserError(f'{self.name}: want the first 1 pair or more, got {n}; give a larger number')
        return Corpus(self.name, self.sources[:n], self.targets[:n])

    def take(self, index):
        """Return the corpus of the pairs of these numbers, an array of int64."""
        return Corpus(self.name, *(side.take(index) if isinstance(side, Sentences) else [side[i] for i in index.tolist()]
                                   for side in (self.sources, self.targets)))

    def vocabularies(self, min_count=3):
        """Return the Vocabulary of the sources and that of the targets."""
        return Vocabulary.build(self.sources, min_count), Vocabulary.build(self.targets, min_count)


def encode(sentences, vocabulary, num_steps):
    """Return int32 (N, num_steps): the ids of each sentence's tokens and <eos>, cut or padded to num_steps.

    `sentences` is a Sentences or a list of N sentences, each a list of tokens or its tokens joined by spaces.  A sentence of
    num_steps tokens or more loses its end, <eos> included.
    """
    if num_steps < 1:
        raise UserError(f'num_steps: want 1 or more, got {num_steps}; give a larger number')
    if isinstance(sentences, Sentences) and len(sentences) >= _MANY:
        return sentences.encode(vocabulary.id, num_steps, EOS, PAD)
    tails = [[EOS] + [PAD] * (num_steps - length - 1) for length in range(num_steps)] + [[]]
    flat = []
    for sentence in sentences:
        ids = vocabulary.ids(tokens_of(sentence)[:num_steps])
        flat += ids
        flat += tails[len(ids)]
    return np.array(flat, dtype=np.int32).reshape(-1, num_steps)


@contextlib.contextmanager
def _errors(path):
    """What keeps the corpus at `path` from being read, as a UserError."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f'{path}: no such file; give a .txt or .zip of sentence pairs, '
                        "or fetch one with 'python -m pyops.data get fra-eng'") from error
    except OSError as error:
        raise UserError(f'{path}: want a readable file of sentence pairs, got: {error.strerror or error}; '
                        'give another path') from error


def _inside(raw, path):
    """Return the bytes of the text in the zip at `path`, whose bytes are `raw`, and the name to call it in errors."""
    import zipfile
    try:
        from lzma import LZMAError
    except ImportError:             # not every Python is built with that way of packing
        LZMAError = zlib.error
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            inner = _text_member(archive)
            if inner is None:
                raise UserError(f'{path}: want a zip that holds a .txt file of sentence pairs, '
                                f'got {len(archive.namelist())} other files; give the corpus itself')
            return archive.read(inner), f'{path}:{inner}'
    except (zipfile.BadZipFile, zlib.error, LZMAError, OSError, EOFError, NotImplementedError, RuntimeError) as error:
        raise UserError(f'{path}: want a zip file, but it cannot be read ({error}); fetch it again') from error


def _text_member(archive):
    """Return the name of the corpus inside an open ZipFile, None if there is none.

    It is the first .txt that is neither a note (`_about.txt`) nor a shadow file of the Mac's (`__MACOSX/`).
    """
    for name in archive.namelist():
        folders, _, file = name.rpartition('/')
        if file.endswith('.txt') and not file.startswith(('_', '.')) and '__MACOSX' not in folders.split('/'):
            return name
    return None


def tokenized(pairs):
    """Return sources and targets of (source, target) pairs of raw text, each sentence's tokens joined by spaces."""
    sources, targets = [], []
    for source, target in pairs:
        sources.append(' '.join(preprocess(source).split()))
        targets.append(' '.join(preprocess(target).split()))
    return sources, targets


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
