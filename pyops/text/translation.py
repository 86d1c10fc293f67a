"""Shared by the translation programs: choosing a corpus, translating a line of text."""
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pyops import backend
from pyops.data import locate
from pyops.errors import UserError
from pyops.text.corpus import Corpus
from pyops.text.decoding import BeamDecoder, Search
from pyops.text.flags import BEAM, LENGTH_PENALTY
from pyops.text.pairs import Ragged, Sequences
from pyops.text.tokenizer import Tokenizer, restore
from pyops.text.vocabulary import EOS, PAD, SPECIALS

TINY = 512              # pairs
EMBEDDED = 'embedded'   # instead of a file name
_SHOWN = 60             # characters of a sentence shown in a warning
_GPU_ROWS = 64          # sentences of every batch on a GPU


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


def sentence(words):
    """Join a list of words to a sentence as in a Corpus: separated by spaces, without <eos> at the end."""
    return ' '.join(words[:-1] if words[-1:] == [SPECIALS[EOS]] else words)


@dataclass(frozen=True)
class Translator:
    """A model with fixed weights, its two tokenizers, the sentence length, and the format of answers.

    model.decoding(num_steps) returns decode(source: Sequences) -> ids (T, B); pyops.text.decoding has the rest that a model
    provides.  lines(source words, output words), both with <eos>, returns the lines to print.
    search: the settings of answer() and sentences(), None for greedy decoding;  scores: whether answer() adds the scores
    """
    model: object
    source_vocabulary: Tokenizer
    target_vocabulary: Tokenizer
    num_steps: int
    lines: Callable
    search: Search | None = None
    scores: bool = False

    @functools.cached_property
    def _decoders(self):
        return {}

    def sentences(self, sources, batch_size=128):
        """Translate sentences, given and returned as in tokenizer.read_corpus(corpus)."""
        sources = [self.source_vocabulary.read(source) for source in sources]
        return [self.target_vocabulary.sentence(ids)
                for (ids, _), *_ in self._ids(sources, self.search or self._search(), batch_size)]

    def translate(self, texts, batch_size=64, beam=BEAM, nbest=1, length_penalty=LENGTH_PENALTY, max_len=None, scores=True):
        """Translate sentences of raw text by beam search (docs/beam_search.md).  Return for each a list of at most `nbest`
        pairs (text, score), the best first.

        A text without words gives [('', 0.0)].   beam=1: greedy decoding.  scores=False: it is faster, and its scores are None.
        max_len: the largest number of tokens of a translation, end mark included; default and largest: num_steps
        On the CPU a text has the same translation in any batch, and batch_size has an effect on speed only.
        UserError for a setting that is out of range.
        """
        search = self._search(beam, nbest, length_penalty, max_len)
        sources = [self.source_vocabulary.read(text) for text in texts]
        outputs = iter(self._ids([source for source in sources if source], search, batch_size, scores))
        return [[(self.target_vocabulary.decode(ids), score) for ids, score in next(outputs)] if source else [('', 0.0)]
                for source in sources]

    def lengths(self, sentences):
        """Return the number of tokens, without the end mark, of each sentence of the target language, (N,)."""
        return self.target_vocabulary.encode(sentences).lengths

    def _search(self, beam=1, nbest=1, length_penalty=LENGTH_PENALTY, max_len=None):
        if max_len is not None and max_len > self.num_steps:
            raise UserError(f'max_len: expected 1 to {self.num_steps}, the length of sentences in training, got {max_len}')
        return Search(self.num_steps if max_len is None else max_len, beam, nbest, length_penalty)

    def _ids(self, sources, search, batch_size, scores=False):
        """Return for each source, a list of words, a list of pairs: the ids of a translation, with <eos> and without padding,
        and its score.

        Batches have sentences of about equal length, so that few of them wait for a longer one.
        """
        encoded = Ragged.of(self.source_vocabulary.encode(sources), self.num_steps)
        order = np.argsort(encoded.lengths, kind='stable')
        decode, rows = self._decoder(search, scores), _rows(batch_size)
        results = [None] * len(encoded)
        for first in range(0, len(encoded), rows):
            some = order[first:first + rows]
            filled = np.resize(some, rows) if not backend.current_device().is_host else some
            found = decode(Sequences.of([encoded[n] for n in filled], self.num_steps))
            for i, hypotheses in zip(some, found, strict=False):
                results[i] = [(ids[ids != PAD], score) for ids, score in hypotheses]
        return results

    def _decoder(self, search, scores):
        """Return decode(source) -> for each sentence a list of pairs (ids, score).  It is kept for the next call."""
        is_greedy = search.beam == 1 and not scores
        key = (search.max_len, 1) if is_greedy else search
        if key not in self._decoders:
            if is_greedy:
                greedy = self.model.decoding(search.max_len)
                self._decoders[key] = lambda source: [[(ids, None)] for ids in greedy(source).T]
            else:
                beam = BeamDecoder(self.model, search)
                self._decoders[key] = lambda source: [[(found.tokens, found.score) for found in some] for some in beam(source)]
        return self._decoders[key]

    def answer(self, line):
        """Yield the lines to print for a line of raw text: unknown words, the translation.  Warn on stderr if truncated."""
        words = self.source_vocabulary.read(line)
        if not words:
            return
        if unknown := self.source_vocabulary.unknown(words):
            yield f'unknown words : {" ".join(dict.fromkeys(unknown))}'
        read, tokens = [*words, SPECIALS[EOS]], int(self.source_vocabulary.encode([words]).lengths[0]) + 1
        if tokens > self.num_steps:
            start = line if len(line) <= _SHOWN else line[:_SHOWN] + '...'
            print(f'warning: too long, only the first {self.num_steps} of {tokens} tokens, end mark included, are read: '
                  f'{start!r}', file=sys.stderr, flush=True)
            read = self.source_vocabulary.first(words, self.num_steps)
        (found,) = self._ids([words], self.search or self._search(), 1, self.scores)
        for i, (ids, score) in enumerate(found):
            output = [*self.target_vocabulary.sentence(ids).split(), *[SPECIALS[EOS]] * (EOS in ids)]
            *before, last = self.lines(read, output)
            yield from before[:0 if i else None]                # the source only once
            yield f'{last}   {score:.4f}' if self.scores else last


def _rows(batch_size):
    """Return the number of sentences in a batch.  On a GPU every batch has the same, because 64 sentences take the time of one
    and a plan has been recorded.  There the last bits of a score may depend on the batch: products divide a sum
    according to the number of rows."""
    return batch_size if backend.current_device().is_host else _GPU_ROWS


def check_vocabularies(path, state, vocabularies, pairs):
    """Raise UserError unless the checkpoint `path` was trained with these tokenizers and on these pairs."""
    remedy = f'give the corpus it was trained on, {state["corpus"]}, or start from scratch in another folder'
    for which, vocabulary, trained in zip(('source', 'target'), vocabularies, restore(state['vocabularies']), strict=True):
        if trained != vocabulary:
            raise UserError(f'{path}: its {which} vocabulary of {len(trained)} words differs from the corpus, '
                            f'{len(vocabulary)} words; {remedy}')
    if state['pairs'] != pairs.digest():
        raise UserError(f'{path}: was trained on other pairs than the corpus has; {remedy}')
