"""Many sentences as arrays: every distinct token once, and of each sentence the numbers of its tokens.

A list of strings takes three times the memory, and to count or encode it, each sentence is taken apart again.
"""
from collections.abc import Sequence

import numpy as np

_AT_ONCE = 4096         # sentences whose ids are a list at a time


class Sentences(Sequence):
    """A sequence of sentences, each its tokens joined by single spaces, as `Corpus` keeps them; equal to any sequence of the
    same texts.  A slice is a Sentences on the same arrays, and so is what take() gives.

    tokens   list of distinct texts without white space
    ids      unsigned int (number of tokens in all,): places in `tokens`
    starts, lengths   int64, int32 (N,): where the tokens of a sentence are in `ids`
    """

    def __init__(self, tokens, ids, starts, lengths):
        self.tokens, self.ids, self.starts, self.lengths = tokens, ids, starts, lengths

    @classmethod
    def of(cls, sentences):
        """Those of an iterable of lists of tokens, or of tokens joined by single spaces."""
        numbers, ids, lengths = {}, [], []
        number = numbers.setdefault
        for sentence in sentences:
            words = sentence.split() if isinstance(sentence, str) else sentence
            ids += [number(word, len(numbers)) for word in words]
            lengths.append(len(words))
        return cls.of_arrays(list(numbers), np.array(ids, np.min_scalar_type(len(numbers))), np.array(lengths, np.int32))

    @classmethod
    def of_arrays(cls, tokens, ids, lengths):
        """Those of sentences that lie one behind another."""
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
            ids, at = part._together().tolist(), 0
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
        """The Sentences that a slice, or an array of numbers or of bool, takes."""
        return Sentences(self.tokens, self.ids, self.starts[index], self.lengths[index])

    def counts(self):
        """{token: how often it occurs}, in the order of first occurrence."""
        ids = self._together()
        counts, first = np.bincount(ids, minlength=len(self.tokens)), np.empty(len(self.tokens), np.int64)
        first[ids[::-1]] = np.arange(len(ids) - 1, -1, -1)          # of equal places the last that is written stays
        seen = np.flatnonzero(counts)
        seen = seen[np.argsort(first[seen])]
        return {self.tokens[id]: count for id, count in zip(seen.tolist(), counts[seen].tolist(), strict=True)}

    def encode(self, number, num_steps, end, pad):
        """int32 (N, num_steps): number(token) of each token, then `end`, cut or filled up with `pad`."""
        numbers = np.array([number(token) for token in self.tokens], np.int32)
        table = np.full((len(self), num_steps), pad, np.int32)
        for step in range(num_steps):
            has = np.flatnonzero(self.lengths > step)
            table[has, step] = numbers[self.ids[self.starts[has] + step]]
            table[self.lengths == step, step] = end
        return table

    def _together(self):
        """The ids of all sentences, one behind another."""
        starts, lengths = self.starts, self.lengths
        behind = np.cumsum(lengths, dtype=np.int64)
        if not len(self) or (starts[0] + behind - lengths == starts).all():
            return self.ids[starts[0]:starts[0] + behind[-1]] if len(self) else self.ids[:0]
        return self.ids[np.repeat(starts - behind + lengths, lengths) + np.arange(behind[-1])]
