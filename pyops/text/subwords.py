"""Subwords: byte-pair encoding (BPE) of raw text, with case and punctuation.

Sennrich et al. 2016: frequent words are one token, and rare words are several.  The smallest tokens are bytes, so every text
can be encoded, and there are no unknown words.  The merges are learned by the library `tokenizers`.  They are applied here, to
all distinct words at once, because BPE dropout (Provilkov et al. 2020) needs random numbers that can be repeated, and the
library has no seed.
"""
import io
import json
import re
from itertools import accumulate, pairwise

import numpy as np

from pyops import cache
from pyops.errors import UserError
from pyops.text.preprocess import normalize
from pyops.text.sentences import Sentences, concatenate
from pyops.text.vocabulary import SPECIALS, Encoded

SMALLEST = len(SPECIALS) + 256          # tokens of a vocabulary without merges
VARIANTS = 64                           # with dropout: most segmentations of a distinct word in an epoch
_LONGEST = 40                           # characters without a break; longer words are encoded in parts
_LARGE = 1 << 20                        # characters of text from which its words are cached
_AT_ONCE = 1 << 18                      # elements of the tables in which words are segmented
# A word with the space before it; digits are words of their own, so that unseen numbers are copied digit by digit.
_LETTER, _REST = '[^\\W\\d_]', '[^\\w ]|_'
_WORD = re.compile(f" ?\\d| ?{_LETTER}{{1,{_LONGEST}}}(?:['-]{_LETTER}{{1,{_LONGEST}}}){{0,3}}| ?(?:{_REST}){{1,{_LONGEST}}}")
# the same for the library, whose regular expressions have other classes
_WORD_OF_LIBRARY = _WORD.pattern.replace(_LETTER, r'[\p{L}\p{Nl}\p{No}]').replace(_REST, r'[^\p{L}\p{N} ]').replace(
    r'\d', r'\p{Nd}')
_VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
# the character for each byte in the library's files
_CHARACTERS = [chr(byte) if byte in _VISIBLE else chr(256 + byte - sum(b < byte for b in _VISIBLE)) for byte in range(256)]
_NONE = np.iinfo(np.int32).max          # the rank of a pair that is not merged


def train(sentences, size):
    """Return the Subwords with `size` tokens, or fewer if no pair occurs twice, learned from sentences of raw text.

    The result depends on the sentences alone, and is cached.  UserError if size < SMALLEST or `tokenizers` is not installed.
    """
    if size < SMALLEST:
        raise UserError(f'vocabulary of {size} subwords: expected {SMALLEST} or more: {len(SPECIALS)} marks and 256 bytes')
    library = _library()
    text = '\n'.join(sentences).encode(errors='replace')
    version = f'{library.__version__} {size}\n'.encode()
    key = cache.digest(io.BytesIO(version + text), __name__, normalize.__module__)
    if key and (found := cache.read('bpe', key)):
        return Subwords(bytes(found).decode())
    result = Subwords(_train(library, [f' {normalize(sentence)}' for sentence in sentences], size))
    if key:
        cache.write('bpe', key, result.text.encode())
    return result


def _library():
    try:
        import tokenizers
    except ImportError as error:
        raise UserError('tokenizers, which learns subwords, is not installed: '
                        'install it with: pip install tokenizers') from error
    return tokenizers


def _train(library, texts, size):
    """Return the JSON of the library's tokenizer; loaded by the library, it encodes raw text as Subwords does."""
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
    pipeline = library.Tokenizer(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(library.Regex(_WORD_OF_LIBRARY), 'isolated'),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    pipeline.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=size, min_frequency=2, special_tokens=list(SPECIALS), show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    pipeline.normalizer = normalizers.Sequence([normalizers.NFC(), *(
        normalizers.Replace(library.Regex(pattern), new) for pattern, new in (('[‘’ʼ]', "'"), ('[“”]', '"'), (r'\s+', ' '))),
        normalizers.Strip(), normalizers.Prepend(' ')])
    pipeline.decoder = decoders.ByteLevel()
    return pipeline.to_str()


class Subwords:
    """A Tokenizer (pyops.text.tokenizer) whose tokens are sequences of bytes, for all languages of a corpus.

    Sentences are raw text.  It is read after preprocess.normalize, so decode(encode(text)) is normalize(text).
    text: JSON of the library `tokenizers`.  Only the merges and the vocabulary are read, so the library is not needed.
    """

    def __init__(self, text):
        """UserError if `text` is not the JSON of a byte-level BPE whose first tokens are SPECIALS."""
        self.text = text
        try:
            model = json.loads(text)['model']
            names, ids, merges = list(model['vocab']), model['vocab'], model['merges']
            if sorted(ids.values()) != list(range(len(ids))):
                raise ValueError('ids are not consecutive')
            names.sort(key=ids.__getitem__)
            if tuple(names[:len(SPECIALS)]) != SPECIALS:
                raise ValueError(f'it does not start with {" ".join(SPECIALS)}')
            self._pieces = [b''] * len(SPECIALS) + _byte_strings(names[len(SPECIALS):])
            self._bytes = np.array([ids[character] for character in _CHARACTERS], np.int32)
            parts = np.array([id for a, b in merges for id in (ids[a], ids[b], ids[a + b])], np.int64).reshape(-1, 3)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
            raise UserError(f'subwords: not a byte-level BPE of tokenizers ({type(error).__name__}: {error}); '
                            'train it from its corpus again') from error
        # The base exceeds all ids and the id of padding, len(self): a key identifies a pair.
        keys = parts[:, 0] * (len(self) + 1) + parts[:, 1]
        self._ranks = np.argsort(keys, kind='stable').astype(np.int32)
        self._keys, self._merged = keys[self._ranks], parts[:, 2].astype(np.int32)

    def __len__(self):
        return len(self._pieces)

    def __eq__(self, other):
        return isinstance(other, Subwords) and self.text == other.text

    __hash__ = None

    def __repr__(self):
        return f'Subwords({len(self)} tokens)'

    def state(self):
        """Return a JSON value from which pyops.text.tokenizer.restore makes an equal Subwords."""
        return {'bpe': self.text}

    def read(self, text):
        """Return the words of a raw text, separated by white space."""
        return normalize(text).split()

    def read_corpus(self, corpus):
        """Return the corpus whose sentences `encode` expects: raw text."""
        return corpus.raw()

    def unknown(self, words):
        """Return []: no word is unknown."""
        return []

    def encode(self, sentences):
        """Return the Encoded of a list of sentences of raw text, each a string or a list of words."""
        words = _words(sentences)
        pieces = self._segment(words.tokens)
        return _joined(pieces, words, words.ids)

    def encode_epoch(self, sentences, dropout, seed, epoch, stream=0):
        """Like encode, with BPE dropout: each merge is skipped with probability `dropout`, at each step of each word.

        The result depends on the arguments alone.  stream: another number for other random numbers in the same epoch.
        A word that occurs n times has min(n, VARIANTS) segmentations; each occurrence gets one of them.
        0 <= seed, epoch < 2**64.
        """
        if not dropout:
            return self.encode(sentences)
        words = _words(sentences)
        variants = np.minimum(np.bincount(words.ids, minlength=len(words.tokens)), VARIANTS)
        # The last word of the counter separates these numbers from others with the key (seed, epoch): see data.batches.
        generator = np.random.Philox(key=np.array([seed, epoch], np.uint64), counter=[0, 0, 0, 1 + stream])
        pieces = self._segment(words.tokens, np.repeat(np.arange(len(words.tokens)), variants), dropout, generator)
        chosen = _random(generator, len(words.ids)).astype(np.int64) % variants[words.ids]
        return _joined(pieces, words, (np.cumsum(variants) - variants)[words.ids] + chosen)

    def sentence(self, ids):
        """Return the text of an array of ids, without marks; bytes that are not UTF-8 become U+FFFD."""
        return ' '.join(b''.join(self._pieces[id] for id in ids.tolist()).decode(errors='replace').split())

    decode = sentence

    def words(self, ids):
        """Return the token of each id as text to show: a space is ▁, and a byte that is not UTF-8 is like \\xe2."""
        return [SPECIALS[id] if id < len(SPECIALS) else self._pieces[id].decode(errors='backslashreplace').replace(' ', '▁')
                for id in map(int, ids)]

    def _segment(self, words, rows=None, dropout=0.0, generator=None):
        """Return the Encoded of words[rows]: the tokens of each.  rows: None: all.

        Of the pairs of neighbouring tokens that have merges, the one that was learned first is merged, until there is none.
        """
        texts = [word.encode(errors='replace') for word in words]
        lengths = np.array([len(text) for text in texts], np.int64)
        starts, flat = np.cumsum(lengths) - lengths, self._bytes[np.frombuffer(b''.join(texts), np.uint8)]
        rows = np.arange(len(words)) if rows is None else rows
        order = rows[by_length := np.argsort(lengths[rows], kind='stable')]
        counts, tables, done = np.empty(len(rows), np.int32), [], 0
        while done < len(rows):
            # As many words as fill a table that fits into the cache; the longest is the last.
            widths = lengths[order[done:]]
            some = max(1, int(np.searchsorted(widths * np.arange(1, len(widths) + 1), _AT_ONCE)))
            part = order[done:done + some]
            table = np.full((some, lengths[part[-1]]), len(self), np.int32)
            table[np.arange(table.shape[1]) < lengths[part][:, None]] = concatenate(flat, starts[part], lengths[part])
            self._merge(table, dropout, generator)
            used = table != len(self)
            counts[by_length[done:done + some]] = used.sum(1)
            tables.append(table[used])
            done += some
        # back from the order of lengths to the order of rows
        ids, sorted_counts = np.concatenate(tables or [flat]), counts[by_length]
        places = np.empty(len(rows), np.int64)
        places[by_length] = np.cumsum(sorted_counts, dtype=np.int64) - sorted_counts
        return Encoded(concatenate(ids, places, counts), counts)

    def _merge(self, table, dropout, generator):
        """Merge the tokens in each row of a table of ids (rows, width), padded at the end with len(self), in place."""
        rows, ids = np.arange(len(table)), table
        threshold = np.uint64(dropout * 2**32)              # 2**32 for a dropout of 1, which leaves single bytes
        while len(rows) and ids.shape[1] > 1 and len(self._keys):
            keys = ids[:, :-1] * np.int64(len(self) + 1) + ids[:, 1:]
            places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
            ranks = np.where(self._keys[places] == keys, self._ranks[places], _NONE)
            if dropout:
                ranks[_random(generator, ranks.size).reshape(ranks.shape) < threshold] = _NONE
            left = ranks.argmin(1)
            rank = ranks[np.arange(len(rows)), left]
            is_merged = rank != _NONE
            table[rows[~is_merged], :ids.shape[1]] = ids[~is_merged]
            table[rows[~is_merged], ids.shape[1]:] = len(self)
            rows, ids, left, rank = rows[is_merged], ids[is_merged], left[is_merged], rank[is_merged]
            ids[np.arange(len(rows)), left] = self._merged[rank]
            ids = ids[np.arange(ids.shape[1]) != left[:, None] + 1].reshape(len(rows), ids.shape[1] - 1)
        table[rows, :ids.shape[1]] = ids
        table[rows, ids.shape[1]:] = len(self)


def _byte_strings(names):
    """Return the bytes that names of tokens mean, a character each.   ValueError if a character means none"""
    text = ''.join(names)                   # one call for all: a call per token takes 15 ms for 8000 tokens, at every start
    if foreign := set(text).difference(_CHARACTERS):
        raise ValueError(f'a token has the character {min(foreign)!r}')
    flat = text.translate({ord(character): byte for byte, character in enumerate(_CHARACTERS)}).encode('latin-1')
    ends = list(accumulate(map(len, names), initial=0))
    return [flat[start:end] for start, end in pairwise(ends)]


def _words(sentences):
    """Return the Sentences of the words of sentences: each word with the space before it.  Large texts are cached."""
    texts = [sentence if isinstance(sentence, str) else ' '.join(sentence) for sentence in sentences]
    key = None
    if sum(map(len, texts)) >= _LARGE:
        key = cache.digest(io.BytesIO('\n'.join(texts).encode(errors='replace')), __name__, *(
            thing.__module__ for thing in (normalize, Sentences)))
        if key and (found := cache.read_arrays('words', key)):
            tokens, ids, lengths = found
            return Sentences.of_arrays(tokens.tobytes().decode().split('\n'), ids, lengths)
    words = Sentences.of(_WORD.findall(f' {normalize(text)}') for text in texts)
    if key:
        cache.write_arrays('words', key, [np.frombuffer('\n'.join(words.tokens).encode(errors='replace'), np.uint8),
                                          words.ids, words.lengths])
    return words


def _joined(pieces, words, which):
    """Return the Encoded of sentences of words.  which: for each word of the text, the index of its tokens in pieces."""
    counts = pieces.lengths[which]
    starts = np.cumsum(pieces.lengths, dtype=np.int64) - pieces.lengths
    ends = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    lengths = ends[words.starts + words.lengths] - ends[words.starts]
    return Encoded(concatenate(pieces.ids, starts[which], counts), lengths.astype(np.int32))


def _random(generator, count):
    """Return random uint32 (count,)."""
    return generator.random_raw((count + 1) // 2).view(np.uint32)[:count]
