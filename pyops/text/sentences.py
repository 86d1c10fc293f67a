"""Many sentences as arrays: each distinct token once, and per sentence the indices of its tokens.

A list of strings takes three times the memory, and counting or encoding it has to split every sentence again.
"""
from collections.abc import Sequence

import numpy as np

_AT_ONCE = 4096         # sentences iterated over at a time


class Sentences(Sequence):
    """A sequence of sentences, each a string of tokens joined by single spaces, as in a Corpus.  It equals any sequence of the
    same strings.  A slice, like take(), is a Sentences on the same arrays.

    tokens   list of distinct strings without white space
    ids      unsigned int (total number of tokens,): indices into `tokens`
    starts, lengths   int64, int32 (N,): position and number of a sentence's tokens in `ids`
    """

    def __init__(self, tokens, ids, starts, lengths):
        self.tokens, self.ids, self.starts, self.lengths = tokens, ids, starts, lengths

    @classmethod
    def of(cls, sentences):
        """Create Sentences from an iterable of lists of tokens, or of tokens joined by single spaces."""
        numbers, ids, lengths = {}, [], []
        number = numbers.setdefault
        for sentence in sentences:
            words = sentence.split() if isinstance(sentence, str) else sentence
            ids += [number(word, len(numbers)) for word in words]
            lengths.append(len(words))
        return cls.of_arrays(list(numbers), np.array(ids, np.min_scalar_type(len(numbers))), np.array(lengths, np.int32))

    @classmethod
    def of_arrays(cls, tokens, ids, lengths):
        """Create Sentences from the concatenated ids of all sentences and their lengths."""
        return cls(tokens, ids, np.cumsum(lengths, dtype=np.int64) - lengths, lengths)

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.take(index)
        start, length = self.starts[index], self.lengths[index]
        return ' '.join([self.tokens[id] for id in self.ids[start:start + length].tolist()])

    def __iter__(self):
        tokens = self.tokens
        for first in range(0, len(self), _AT_ONCE):
            part = self.take(slice(first, first + _AT_ONCE))
            ids, at = part.together().tolist(), 0
            for length in part.lengths.tolist():
                yield ' '.join([tokens[id] for id in ids[at:at + length]])
                at += length

    def __eq__(self, other):
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(one == another for one, another in zip(self, other, strict=True))

    __hash__ = None

    def __repr__(self):
        return f'Sentences({len(self)})'

    def take(self, index):
        """Return the Sentences selected by a slice, or by an array of indices or bools."""
        return Sentences(self.tokens, self.ids, self.starts[index], self.lengths[index])

    def counts(self):
        """Return {token: number of occurrences}, in the order of first occurrence."""
        ids = self.together()
        counts, first = np.bincount(ids, minlength=len(self.tokens)), np.empty(len(self.tokens), np.int64)
        first[ids[::-1]] = np.arange(len(ids) - 1, -1, -1)          # for repeated indices the last assignment wins
        seen = np.flatnonzero(counts)
        seen = seen[np.argsort(first[seen])]
        return {self.tokens[id]: count for id, count in zip(seen.tolist(), counts[seen].tolist(), strict=True)}

    def together(self):
        """Return the concatenated ids of all sentences."""
        starts, lengths = self.starts, self.lengths
        if not len(self) or (starts[0] + np.cumsum(lengths, dtype=np.int64) - lengths == starts).all():
            return self.ids[starts[0]:starts[0] + int(lengths.sum(dtype=np.int64))] if len(self) else self.ids[:0]
        return concatenate(self.ids, starts, lengths)


def concatenate(values, starts, lengths):
    """Return the concatenated slices values[start:start + length], for arrays of starts (int64) and lengths."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return values[np.repeat(starts - ends + lengths, lengths) + np.arange(ends[-1] if len(ends) else 0)]
