"""Vocabularies: tokens and their ids."""
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from pyops.errors import UserError
from pyops.text.detokenize import detokenize
from pyops.text.preprocess import plain_quotes, tokenize
from pyops.text.sentences import Sentences, concatenate

PAD, EOS, UNK, BOS = range(4)
SPECIALS = ('<pad>', '<eos>', '<unk>', '<bos>')


def tokens_of(sentence):
    """Return the tokens of a sentence as a list; the sentence is a list of tokens or tokens joined by spaces."""
    return sentence.split() if isinstance(sentence, str) else sentence


@dataclass(frozen=True)
class Encoded:
    """Sentences as ids of tokens, without end marks.

    ids      int32 (total number of tokens,): the sentences one after the other
    lengths  int32 (N,): number of tokens of each sentence
    """
    ids: np.ndarray
    lengths: np.ndarray

    def __len__(self):
        return len(self.lengths)

    def is_cut(self, num_steps):
        """Return bool (N,): whether a sentence with its end mark has more than num_steps tokens."""
        return self.lengths >= num_steps

    def ended(self, num_steps):
        """Return the ids of all sentences with <eos> after each, int32, and the position of the first of each sentence and of
        the end, (N + 1,) int64.   A sentence of num_steps tokens or more is truncated and has no <eos>."""
        if num_steps < 1:
            raise UserError(f'num_steps: expected 1 or more, got {num_steps}; give a larger number')
        kept = np.minimum(self.lengths, num_steps).astype(np.int64)
        starts = np.concatenate([[0], np.cumsum(kept + (kept < num_steps))])
        ids = np.full(starts[-1], EOS, np.int32)
        before = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        ids[concatenate(np.arange(len(ids)), starts[:-1], kept)] = concatenate(self.ids, before, kept)
        return ids, starts


class Vocabulary:
    """A list of distinct tokens, and the Tokenizer (pyops.text.tokenizer) whose tokens are lower-case words.

    A token's id is its index; the first four tokens are `SPECIALS`.
    Text never yields a control token: `<eos>` in a sentence is an unknown word.
    """

    def __init__(self, tokens):
        """Create it from tokens in id order.  UserError unless it starts with SPECIALS and has no duplicates."""
        self.tokens = list(tokens)
        count = len(SPECIALS)
        if tuple(self.tokens[:count]) != SPECIALS:
            got = ' '.join(map(str, self.tokens[:count])) or 'nothing'
            raise UserError(f'vocabulary: expected it to start with {" ".join(SPECIALS)}, got {got}; '
                            'build it from its corpus again')
        if len(set(self.tokens)) != len(self.tokens):
            token, times = Counter(self.tokens).most_common(1)[0]
            raise UserError(f'vocabulary: expected distinct tokens, got {token!r} {times} times; '
                            'build it from its corpus again')
        self._ids = {token: id for id, token in enumerate(self.tokens) if id >= count}

    @classmethod
    def build(cls, sentences, min_count=3):
        """Return the vocabulary of the tokens that occur at least min_count times.

        `sentences` is a Sentences, or an iterable of sentences, each a list of tokens or tokens joined by spaces.  Tokens are
        sorted by frequency; equally frequent ones are in order of first occurrence.
        """
        return cls.of_counts(Counter(sentences.counts() if isinstance(sentences, Sentences) else
                                     chain.from_iterable(map(tokens_of, sentences))), min_count)

    @classmethod
    def of_counts(cls, counts, min_count=3):
        """Return the vocabulary of a Counter of tokens, in order of first occurrence; as build does.  Changes the Counter."""
        for special in SPECIALS:
            counts.pop(special, None)
        return cls([*SPECIALS, *(token for token, count in counts.most_common() if count >= min_count)])

    def __len__(self):
        return len(self.tokens)

    def __eq__(self, other):
        return isinstance(other, Vocabulary) and self.tokens == other.tokens

    __hash__ = None                                         # contains a mutable list

    def __repr__(self):
        return f'Vocabulary({len(self)} tokens)'

    def ids(self, tokens):
        """Return the ids of a list of tokens, UNK for unknown ones."""
        get = self._ids.get
        return [get(token, UNK) for token in tokens]

    def id(self, token):
        """Return the id of a token, UNK if it is unknown."""
        return self._ids.get(token, UNK)

    def known_form(self, token):
        """Return the form of a token that is in the vocabulary, or the token itself if there is none.

        A known token without typographic quotes is its own form.  For any other it is the most frequent token that differs
        only in the kind of quotes: can't for can’t, or can’t for can't if only that is known.  If there is none, and the
        token has typographic quotes, it is the token without the surrounding quotes: you for “you.
        """
        plain = plain_quotes(token)
        if plain == token:
            return token if token in self._ids else self._forms.get(token, token)
        return self._forms.get(plain) or self._forms.get(plain.strip('\'"'), token)

    @cached_property
    def _forms(self):
        """{token with plain quotes: the most frequent token of that form}"""
        return {plain_quotes(token): token for token in reversed(self._ids)}

    def read(self, text):
        """Return the tokens of a raw text in the forms that the vocabulary contains, without <eos>."""
        return [self.known_form(token) for token in tokenize(text) if token != SPECIALS[EOS]]

    def read_corpus(self, corpus):
        """Return the corpus whose sentences `encode` expects: the corpus itself."""
        return corpus

    def encode(self, sentences):
        """Return the Encoded of a Sentences, or of a list of sentences, each a list of tokens or tokens joined by spaces."""
        sentences = sentences if isinstance(sentences, Sentences) else Sentences.of(sentences)
        tokens, ids = sentences.tokens, sentences.together()
        if len(ids) < len(tokens):                          # a few sentences of a large corpus
            numbers = np.array([self.id(tokens[id]) for id in ids.tolist()], np.int32)
        else:
            numbers = np.array(self.ids(tokens), np.int32)[ids]
        return Encoded(numbers, sentences.lengths)

    def sentence(self, ids):
        """Return the tokens of an array of ids joined by spaces, without padding and <eos>."""
        return ' '.join(self.words(ids[(ids != PAD) & (ids != EOS)]))

    def decode(self, ids):
        """Return the raw text of an array of ids; case and spaces are restored by rule (pyops.text.detokenize)."""
        return detokenize(self.sentence(ids).split())

    def state(self):
        """Return a JSON value from which pyops.text.tokenizer.restore makes an equal Vocabulary."""
        return self.tokens

    def words(self, ids):
        """Return the tokens of an iterable of ids, specials included.  IndexError for an id outside 0..len-1."""
        ids = [int(id) for id in ids]
        if ids and min(ids) < 0:                            # a list would index from the end
            raise IndexError(f'token id {min(ids)} is negative')
        return [self.tokens[id] for id in ids]

    @property
    def has_words(self):
        """Whether it has other tokens than SPECIALS."""
        return len(self) > len(SPECIALS)

    def unknown(self, tokens):
        """Return the tokens of a list that are not in the vocabulary, in their order."""
        return [token for token in tokens if token not in self._ids]
