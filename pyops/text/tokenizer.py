"""The tokenizers of the translators and their protocol.

    --tokenizer word           Vocabulary: lower-case words, one vocabulary per language; rare words are unknown
    --tokenizer bpe            Subwords: parts of raw text, one vocabulary for both languages; no word is unknown
    transformer.from_marian    Pieces: the SentencePiece models of a converted model

In each, id 0 is padding, 1 the end mark, 2 an unknown word and 3 the begin mark (pyops.text.vocabulary).
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pyops.errors import UserError
from pyops.text.pieces import Pieces
from pyops.text.split import hold_out
from pyops.text.subwords import Subwords, train
from pyops.text.vocabulary import Encoded, Vocabulary

if TYPE_CHECKING:
    from pyops.text.corpus import Corpus

Sentence = str | Sequence[str]          # words, or words joined by spaces


class Tokenizer(Protocol):
    """Text to ids and back.  Sentences are in the form that read() and read_corpus() return: of tokens, or of raw text."""

    def read(self, text: str) -> list[str]:
        """Return a raw text as the words of a sentence; [] if it has none."""

    def read_corpus(self, corpus: Corpus) -> Corpus:
        """Return the same pairs as sentences."""

    def encode(self, sentences: Sequence[Sentence]) -> Encoded:
        """Return the ids of sentences, without end marks."""

    def unknown(self, words: list[str]) -> list[str]:
        """Return the words of a sentence that are unknown."""

    def sentence(self, ids: np.ndarray) -> str:
        """Return the sentence of ids, words joined by spaces, without padding and end mark."""

    def decode(self, ids: np.ndarray) -> str:
        """Return the raw text of ids."""

    def words(self, ids: np.ndarray) -> list[str]:
        """Return a text for each id, to show."""

    def state(self) -> Any:
        """Return a JSON value for `restore`."""

    def __len__(self) -> int:
        """Return the number of tokens, marks included."""


def of_corpus(corpus, settings, trained=None, excluded=None):
    """Return the tokenizers of sources and targets that a run with these settings has on a corpus.

    trained: the tokenizers of its checkpoint, if it has one.  Subwords are then not learned again: they encode any corpus.
    excluded: pairs that the run does not train on, as in hold_out; no word or subword is learned from them.
    UserError if a language has no word, or the vocabulary of subwords is too small.
    """
    if settings['tokenizer'] == 'word':
        vocabularies = corpus.without(excluded).vocabularies(settings['min_count'])
        for side, vocabulary in zip(('source', 'target'), vocabularies, strict=True):
            if not vocabulary.has_words:
                raise UserError(f'{corpus.name}: no {side} word occurs {settings["min_count"]} times or more; '
                                'give --min-count 1 or a larger corpus')
        return vocabularies
    if trained:
        return trained
    training, _, _ = hold_out(corpus, settings['hold_out'], excluded)
    raw = training.raw()
    subwords = train([*raw.sources, *raw.targets], settings['vocabulary'])
    return subwords, subwords


def states(tokenizers):
    """Return the JSON value for a checkpoint of the tokenizers of sources and targets: {'source': ..., 'target': ...}.

    The target is None if both are one.
    """
    source, target = tokenizers
    return dict(source=source.state(), target=None if source is target else target.state())


def restore(states):
    """Return the tokenizers of sources and targets from a value of `states`.   UserError if it is damaged"""
    try:
        source, target = (_restored(states[side]) for side in ('source', 'target'))
        if source is None:
            raise TypeError
    except (KeyError, TypeError) as error:
        raise UserError('vocabularies: damaged: expected the tokenizers of sources and targets; make the file again') from error
    return source, source if target is None else target


def _restored(state):
    if isinstance(state, dict):
        return Pieces.restore(state) if 'spm' in state else Subwords(state['bpe'])
    if state is not None and not all(isinstance(token, str) for token in state):
        raise TypeError
    return None if state is None else Vocabulary(state)
