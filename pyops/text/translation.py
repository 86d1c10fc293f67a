"""Shared by the translation programs: choosing a corpus, encoded pairs, batches, translating a line of text."""
import functools
import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pyops import backend
from pyops.data import locate
from pyops.data.batches import gather
from pyops.errors import UserError
from pyops.text.corpus import Corpus, encode
from pyops.text.detokenize import detokenize
from pyops.text.preprocess import tokenize
from pyops.text.vocabulary import BOS, EOS, PAD, SPECIALS, Vocabulary, tokens_of

TINY = 512              # pairs
EMBEDDED = 'embedded'   # instead of a file name
_SHOWN = 60             # characters of a sentence shown in a warning


def open_corpus(path=None, data_dir=None, tiny=False):
    """Return a Corpus and a line for the user that names it: the file `path` ('embedded': the embedded corpus), else fra-eng
    if `locate` finds it, else the embedded corpus.  tiny: only its first 512 pairs.

    UserError if the file cannot be read, `path` is empty, data_dir is given and does not hold fra-eng, or $PYOPS_DATA is not
    a directory.
    """
    if path == '':
        raise UserError("corpus '': no such file; give a file or 'embedded'")
    chosen = path or locate.find('fra-eng', data_dir) or EMBEDDED
    if chosen == EMBEDDED:
        if data_dir is not None and not path:
            raise locate.missing('fra-eng', data_dir)
        from pyops.text import embedded
        corpus = embedded.corpus()
        line = f'embedded corpus : {len(corpus)} pairs'
        if not path:
            line = f'no corpus found, using the {line}; get the real one with: python -m pyops.data get fra-eng'
    else:
        line, corpus = f'corpus : {chosen}', Corpus.load(chosen)
    return (corpus.first(TINY) if tiny else corpus), line


@dataclass(frozen=True)
class Pairs:
    """Encoded sentence pairs: source and labels, int32 (N, num_steps)."""
    source: np.ndarray
    labels: np.ndarray

    @classmethod
    def encode(cls, corpus, source_vocabulary, target_vocabulary, num_steps):
        return cls(encode(corpus.sources, source_vocabulary, num_steps),
                   encode(corpus.targets, target_vocabulary, num_steps))

    def __len__(self):
        return len(self.source)

    def placed(self):
        """Return the pairs on the device of pyops.backend.current_device, where batches are gathered."""
        return Pairs(backend.put(self.source), backend.put(self.labels))

    def arrays(self):
        """Return {name: table} for a plan."""
        return dict(source_table=self.source, label_table=self.labels)

    def batch(self, indices):
        """Return source, target and labels of these pairs, time-major (num_steps, B) int32; target is labels after <bos>."""
        return (gather(self.source, indices, name='source'), gather(self.labels, indices, BOS, name='target'),
                gather(self.labels, indices, name='labels'))

    def digest(self):
        """Return a hash of all ids, with which a resumed run detects that its pairs have changed."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(backend.get(self.source))
        digest.update(backend.get(self.labels))
        return digest.hexdigest()


def sentence(words):
    """Join tokens to a sentence as in a Corpus: separated by spaces, without <eos>."""
    return ' '.join(word for word in words if word != SPECIALS[EOS])


@dataclass(frozen=True)
class Translator:
    """A model with fixed weights, its two vocabularies, the sentence length, and the format of answers.

    model.decoding() returns decode(source (T, B)) -> ids (T', B).  lines(source tokens, output tokens), both with <eos>,
    returns the lines to print.
    """
    model: object
    source_vocabulary: Vocabulary
    target_vocabulary: Vocabulary
    num_steps: int
    lines: Callable

    @functools.cached_property
    def _decode(self):
        return self.model.decoding()

    def sentences(self, sources, batch_size=128):
        """Translate sentences, given and returned as in a Corpus, without <eos>."""
        return [sentence(words) for words in self._words(sources, batch_size)]

    def translate(self, texts, batch_size=128):
        """Translate sentences of raw text, and return raw text; case and spaces are restored by rule (pyops.text.detokenize).
        A text without words gives ''."""
        sources = [tokenize(text) for text in texts]
        outputs = self._words([source for source in sources if source], batch_size)
        return [detokenize(word for word in next(outputs) if word != SPECIALS[EOS]) if source else '' for source in sources]

    def _words(self, sources, batch_size):
        for first in range(0, len(sources), batch_size):
            source = encode(list(map(self._read, sources[first:first + batch_size])), self.source_vocabulary, self.num_steps)
            output = self._decode(backend.put(np.ascontiguousarray(source.T)))
            for ids in output.T:
                yield self.target_vocabulary.words(ids[ids != PAD])

    def _read(self, source):
        """Return the tokens of a sentence in the forms that the vocabulary contains."""
        return [self.source_vocabulary.known_form(token) for token in tokens_of(source)]

    def answer(self, line):
        """Yield the lines to print for a line of raw text: unknown words, the translation.  Warn on stderr if truncated."""
        tokens = self._read(token for token in tokenize(line) if token != SPECIALS[EOS])
        if not tokens:
            return
        if unknown := self.source_vocabulary.unknown(tokens):
            yield f'unknown words : {" ".join(dict.fromkeys(unknown))}'
        read = [*tokens, SPECIALS[EOS]]
        if len(read) > self.num_steps:
            start = line if len(line) <= _SHOWN else line[:_SHOWN] + '...'
            print(f'warning: too long, only the first {self.num_steps} of {len(read)} tokens, end mark included, are read: '
                  f'{start!r}', file=sys.stderr, flush=True)
        (words,) = self._words([tokens], 1)
        yield from self.lines(read[:self.num_steps], words)


def check_vocabularies(path, state, vocabularies, pairs):
    """Raise UserError unless the checkpoint `path` was trained on these vocabularies and pairs."""
    remedy = f'give the corpus it was trained on, {state["corpus"]}, or start from scratch in another folder'
    for which, vocabulary in zip(('source', 'target'), vocabularies, strict=True):
        trained = Vocabulary(state['vocabularies'][which])
        if trained != vocabulary:
            raise UserError(f'{path}: its {which} vocabulary of {len(trained)} words differs from the corpus, '
                            f'{len(vocabulary)} words; {remedy}')
    if state['pairs'] != pairs.digest():
        raise UserError(f'{path}: was trained on other pairs of the same vocabulary; {remedy}')
