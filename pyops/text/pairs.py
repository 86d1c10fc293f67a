"""Encoded sentence pairs and their batches, in which the tokens of all sentences follow each other without padding."""
from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pyops import backend
from pyops.data.batches import pack_pairs
from pyops.ops.packed import Packed
from pyops.text.vocabulary import BOS, PAD, Encoded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyops.text.corpus import Corpus
    from pyops.text.tokenizer import Tokenizer
    from pyops.typing import Array

# On a GPU the sizes of a batch are rounded up to multiples of these, so that its graphs can be replayed.
ROWS, SENTENCES = 64, 16
LONGEST_FILLER = 16         # tokens: a GRU takes a step for each token of the longest sentence of a batch


class Sequences(NamedTuple):
    """The token ids of several sentences, packed.   ids, positions (N,) int32: position = index of a token in its sentence"""
    ids: Array
    positions: Array
    rows: Packed

    @classmethod
    def of(cls, sentences: Sequence[np.ndarray], longest: int) -> Sequences:
        """Place sentences, arrays of ids of at most `longest` tokens each, on the current device."""
        lengths = np.array([len(ids) for ids in sentences], np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        positions = np.arange(offsets[-1], dtype=np.int32) - np.repeat(offsets[:-1], lengths)
        ids, positions, offsets = map(backend.put, (np.concatenate(sentences).astype(np.int32), positions, offsets))
        return cls(ids, positions, Packed(offsets, longest))


class Batch(NamedTuple):
    """A batch of sentence pairs.   labels (N,) int32: the expected tokens;  target: labels shifted right after <bos>."""
    source: Sequences
    target: Sequences
    labels: Array


@dataclass(frozen=True)
class Ragged:
    """The token ids of many sentences: sentence n is ids[starts[n]:starts[n + 1]].   ids int32, starts (N + 1,) int64"""
    ids: Array
    starts: Array

    @classmethod
    def of(cls, encoded: Encoded, num_steps: int) -> Ragged:
        """Return encoded sentences with <eos> after each; one of num_steps tokens or more is truncated and has no <eos>."""
        return cls(*encoded.ended(num_steps))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, n: int) -> np.ndarray:
        """Return the ids of a sentence, for tables in host memory."""
        return self.ids[self.starts[n]:self.starts[n + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """The lengths of the sentences, (N,) int64."""
        return np.diff(self.starts)

    def placed(self) -> Ragged:
        """Return the table on the current device."""
        return Ragged(backend.put(self.ids), backend.put(self.starts))

    def with_fillers(self, lengths: np.ndarray) -> Ragged:
        """Return the table with further sentences of these lengths, whose tokens are <pad>."""
        ids = np.full(lengths.sum(), PAD, np.int32)
        return Ragged(np.concatenate([self.ids, ids]), np.concatenate([self.starts, self.starts[-1] + lengths.cumsum()]))

    def padded(self, length: int) -> np.ndarray:
        """Return the sentences padded to a length, (N, length) int32, for tables in host memory."""
        table = np.full((len(self), length), PAD, np.int32)
        table[np.arange(length) < self.lengths[:, None]] = self.ids
        return table


class Pairs:
    """Encoded sentence pairs: source and labels, Ragged in host memory.   longest: the largest allowed length of a sentence

    Batches are packed on the current device from copies of the tables, which arrays() or the first batch there makes.  On a GPU
    the copies end with fillers: pairs of any two lengths up to the largest length of a filler, whose tokens are <pad>.  Their
    labels are <pad>, so they change neither the loss nor a gradient.
    """

    def __init__(self, source: Ragged, labels: Ragged, longest: int) -> None:
        self.source, self.labels, self.longest = source, labels, longest
        self.lengths = np.stack([source.lengths, labels.lengths], 1)    # (N, 2)
        self._placed: dict[backend.Device, tuple[Ragged, Ragged]] = {}

    @classmethod
    def of(cls, source: Encoded, target: Encoded, num_steps: int) -> Pairs:
        """Return the pairs of encoded sources and targets; see Ragged.of."""
        return cls(Ragged.of(source, num_steps), Ragged.of(target, num_steps), num_steps)

    @classmethod
    def encode(cls, corpus: Corpus, source_vocabulary: Tokenizer, target_vocabulary: Tokenizer, num_steps: int) -> Pairs:
        """Return the pairs of a corpus as read_corpus of the tokenizers returns it."""
        return cls.of(source_vocabulary.encode(corpus.sources), target_vocabulary.encode(corpus.targets), num_steps)

    def __len__(self) -> int:
        return len(self.source)

    @property
    def _longest_filler(self) -> int:
        return min(self.longest, LONGEST_FILLER)

    def _on_host(self) -> tuple[Ragged, Ragged]:
        """Return the tables in host memory, for a GPU with fillers: of a source and b target tokens, in the order of (a, b)."""
        if backend.current_device().is_host:
            return self.source, self.labels
        lengths = np.indices(2 * [self._longest_filler + 1]).reshape(2, -1)
        return self.source.with_fillers(lengths[0]), self.labels.with_fillers(lengths[1])

    def _tables(self) -> tuple[Ragged, Ragged]:
        device = backend.current_device()
        if device not in self._placed:
            source, labels = self._on_host()
            self._placed[device] = source.placed(), labels.placed()
        return self._placed[device]

    def reserve(self, pairs: Pairs) -> None:
        """Make room on the current device for other encodings of the same sentences, at most as long as these pairs."""
        self._placed = {backend.current_device(): pairs._tables()}
        self.assign(self)

    def assign(self, pairs: Pairs) -> None:
        """Replace the sentences by another encoding, also on the device, where plans read them.  Call reserve() first."""
        self._placed = {backend.current_device(): self._tables()}       # copies on other devices are of the old encoding
        for table, mine in zip(pairs._on_host(), self._tables(), strict=True):
            mine.ids[:len(table.ids)], mine.starts[...] = backend.put(table.ids), backend.put(table.starts)
        self.source, self.labels = pairs.source, pairs.labels
        self.lengths[...] = pairs.lengths           # in place: TokenBatches reads it

    def arrays(self) -> dict[str, Array]:
        """Return {name: array} of the tables, for a plan."""
        source, labels = self._tables()
        return dict(source_table=source.ids, source_starts=source.starts, label_table=labels.ids, label_starts=labels.starts)

    def sizes(self, rows: np.ndarray) -> tuple[int, int, int]:
        """Return the numbers of pairs, of source tokens and of target tokens.  rows: on the host."""
        source, target = self.lengths[rows].sum(0).tolist()
        return len(rows), source, target

    def filled(self, rows: np.ndarray) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Return these pairs and their sizes; on a GPU with fillers at the end, so that the sizes are multiples of SENTENCES
        and ROWS.   rows: on the host"""
        sizes = count, *tokens = self.sizes(rows)
        if backend.current_device().is_host:
            return rows, sizes
        longest, tokens = self._longest_filler, np.array(tokens)
        enough = -(-(ROWS - 1) // longest)                      # fillers for any number of tokens that can be missing
        missing, fillers = -tokens % ROWS, enough + -(count + enough) % SENTENCES
        lengths = np.clip(missing - longest * np.arange(fillers)[:, None], 0, longest)          # of source and target
        chosen = len(self) + lengths @ (longest + 1, 1)
        return np.concatenate([rows, chosen]), (count + fillers, *(tokens + missing).tolist())

    def batch(self, rows: Array, count: int, source_tokens: int, target_tokens: int) -> Batch:
        """Return the Batch of the first `count` of these pairs.  rows: on the device;  count and so on: from sizes()."""
        (source, labels), rows = self._tables(), rows[:count]
        packed = pack_pairs((source.ids, source.starts), (labels.ids, labels.starts), rows, source_tokens, target_tokens, BOS)
        return Batch(*(Sequences(ids, positions, Packed(offsets, self.longest))
                       for ids, positions, offsets in (packed.source, packed.target)), packed.labels)

    def batch_of(self, rows: np.ndarray) -> Batch:
        """Return the Batch of these pairs.  rows: on the host."""
        return self.batch(backend.put(rows), *self.sizes(rows))

    def padded(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return source, target and labels of these pairs, padded and time-major, (longest, B) int32 in host memory."""
        source, labels = (np.stack([np.pad(table[n], (0, self.longest - len(table[n])), constant_values=PAD) for n in rows], 1)
                          for table in (self.source, self.labels))
        target = np.concatenate([np.full((1, len(rows)), BOS, np.int32), labels[:-1]])
        target[np.arange(self.longest)[:, None] >= self.lengths[rows, 1]] = PAD
        return source, target, labels

    def digest(self) -> str:
        """Return a hash of all ids, with which a resumed run detects that its pairs have changed."""
        digest = hashlib.blake2b(digest_size=16)
        for table in (self.source, self.labels):        # padded, as in checkpoints of earlier versions
            digest.update(table.padded(self.longest))
        return digest.hexdigest()
