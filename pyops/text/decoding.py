"""Decoding, one token at a time: greedy, and beam search (docs/beam_search.md).

A model provides
    start(source)                      the decoder state before the first token, of B sentences (Sequences) with one hypothesis
                                       each
    next(word, state, parents=None, sources=None)
                                       h (R, D) of the next token of R hypotheses, and the next state; word (R,) int32 are the
                                       previous tokens.  parents (R,) int32: row r continues row parents[r] of the state; None:
                                       row r.  sources (R,) int32: row r belongs to sentence sources[r]; None: as in the state,
                                       at first to sentence r % B
    free_rows                          whether next() takes sources.  If not, R is a multiple of B
    reserve(rows, tokens, sentences, longest), start(source, reserved), follow(state, parents)
                                       optional: memory for the states of all searches, see _SizedSteps and transformer.model
    twin()                             optional: a model with the same weights, for searches in another thread
    draft(), given(words, positions, state), room(rows, tokens, sentences, longest)
                                       optional: a faster model, whose tokens are checked: see _Draft and transformer.model
    output.prepare(), output.predict(h, prepared), output.topk(h, k)        see LinearCrossEntropy
"""
import functools
import math
import numbers
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pyops import backend, plan
from pyops.errors import UserError
from pyops.ops.packed import Packed
from pyops.steps import SizedPlan
from pyops.text.flags import LARGEST_BEAM, LARGEST_PENALTY, LENGTH_PENALTY
from pyops.text.pairs import Sequences
from pyops.text.vocabulary import BOS, EOS, PAD

REPEATS = 4             # copies of an n-gram in a row that end a hypothesis, also of greedy decoding
NONE = -1               # before the first token of a hypothesis
FEWEST = 4              # finished sentences for which a search leaves its plans: later steps then compute fewer rows


def greedy(model, source, num_steps):
    """Decode greedily: source, Sequences of B >= 1 sentences -> tokens (at most num_steps, B) int32, <pad> after the end."""
    return Decoder(model, num_steps)(source)


def repeats(tokens, chosen):
    """Return whether hypotheses end in REPEATS copies of an n-gram, bool (...).

    tokens (t, ...): their ids;  chosen: the hypotheses to look at, bool (...); the result of all others is False
    """
    found = np.zeros(chosen.shape, bool)
    if len(tokens) < REPEATS:
        return found
    same = tokens == tokens[-1]
    if np.count_nonzero(same) < REPEATS:                    # of one sentence: nearly always
        return found
    suspects = chosen & (same.sum(0) >= REPEATS)            # few
    if suspects.any():
        some = tokens[:, suspects]
        for n in range(1, len(some) // REPEATS + 1):
            end = some[len(some) - REPEATS * n:].reshape(REPEATS, n, -1)
            found[suspects] |= (end == end[0]).all((0, 1))
    return found


class Supply(NamedTuple):
    """Sentences that join a search when others have ended, so that its steps always have about the same number of rows.

    sentences, tokens: the most that are searched at a time, and their most source tokens
    part: the number of sentences for which there must be room before some join
    take(sentences, tokens) returns the next ones as Sequences, at most so many with so many tokens, or None
    """
    sentences: int
    tokens: int
    part: int
    take: Callable[[int, int], Sequences | None]


class Decoder:
    """Greedy decoding: source, Sequences of B >= 1 sentences -> tokens (at most num_steps, B) int32, <pad> after the end.

    A sentence ends with <eos>, or with REPEATS copies of an n-gram.  Valid while the weights are unchanged.  The output layer
    is prepared once, and sources are decoded by plans: see _SizedSteps and _PlansBySize.  A sentence alone is decoded with a
    draft, if the model has one: see _Draft.
    """

    def __init__(self, model, num_steps):
        self.model, self.num_steps, self._prepared = model, num_steps, None
        self._plans = _PlansBySize(lambda source: _DecodePlans(self, source))
        self._sized = _SizedSteps(model, self._predict, num_steps)

    def __call__(self, source):
        found = dict(ended for some in self.stream(source) for ended in some)
        result = np.full((max(map(len, found.values())), len(found)), PAD, np.int32)
        for b, tokens in found.items():
            result[:len(tokens), b] = tokens
        return result

    def stream(self, source, more=None):
        """Yield after each step the list of sentences that have ended: number, tokens (n,) int32, perhaps with <pad> after the
        end.

        more: a Supply of sentences that join; their numbers follow the numbers of the source
        """
        if self._prepared is None:
            self._prepared = self.model.output.prepare()
        if source.rows.sentences == 1 and not more and self._draft and self._draft.is_worthwhile:
            yield [(0, self._drafted(source))]
        elif self._sized.is_for(source, more):
            yield from self._together(source, more)
        else:
            yield list(enumerate(self._by_size(source).T))

    def _drafted(self, source):
        """Decode one sentence with the draft.   Return its tokens (n,) int32"""
        found, state = self._draft.decode(source)
        steps, tokens = _Steps(self.model, self._predict, state), np.full((self.num_steps, 1), PAD, np.int32)
        n, is_open = len(found), np.ones(1, bool)
        tokens[:n, 0] = found
        while n < self.num_steps and tokens[n - 1] != EOS and not repeats(tokens[:n], is_open)[0]:
            tokens[n], n = backend.get(steps.step(n, tokens[n - 1])), n + 1
        return tokens[:n, 0]

    def _by_size(self, source):
        """Decode with steps of one size.   Return tokens (n, B) int32, <pad> after the end"""
        B = source.rows.sentences
        tokens, rows = np.full((self.num_steps, B), PAD, np.int32), np.arange(B, dtype=np.int32)
        open_, word, parents, sources = np.ones(B, bool), _begin(B), None, None
        plans = self._plans.get(source)
        steps = None if plans else _Steps(self.model, self._predict).start(source)
        for t in range(self.num_steps):
            if plans:
                word, state = plans.step(t)
            else:
                word = steps.step(t, word, parents, sources)
            found, parents, sources = backend.get(word), None, None
            tokens[t, rows[open_]] = found[open_]
            open_ &= found != EOS
            open_ &= ~repeats(tokens[:t + 1, rows], open_)
            if not open_.any():
                break
            if _drops(self.model, open_, plans):
                if plans:
                    steps, plans = _Steps(self.model, self._predict, state), None
                kept = np.flatnonzero(open_).astype(np.int32)
                rows, open_ = rows[kept], open_[kept]
                word, parents, sources = found[kept], kept, rows
        return tokens[:t + 1]

    def _together(self, source, more):
        """Decode with steps of any number of rows.   Yield as stream()"""
        B = begun = source.rows.sentences
        most = max(B, more.sentences) if more else B
        steps = self._sized.start(source, most, more)
        ids, slots, parents = np.arange(B), np.arange(B), None
        tokens, lengths, word = np.full((self.num_steps, B), NONE, np.int32), np.zeros(B, np.int32), _begin(B)
        while True:                                             # the newest tokens are the last, whenever a sentence began
            while more and len(ids) + more.part <= most and (new := more.take(most - len(ids), steps.free(slots))):
                n, slots = new.rows.sentences, steps.add(new, slots)
                parents = np.arange(len(ids), dtype=np.int32) if parents is None else parents
                parents = np.append(parents, np.zeros(n, np.int32))
                ids, lengths = np.append(ids, np.arange(begun, begun + n)), np.append(lengths, np.zeros(n, np.int32))
                tokens, word = np.pad(tokens, ((0, 0), (0, n)), constant_values=NONE), np.append(word, _begin(n))
                begun += n
            if not len(ids):
                break
            word = backend.get(steps.step(lengths, word, parents, None if parents is None else slots))
            tokens[:-1], tokens[-1] = tokens[1:], word
            lengths, parents = lengths + 1, None
            is_open = (word != EOS) & (lengths < self.num_steps)
            is_open &= ~repeats(tokens[-lengths.max():], is_open)
            if is_open.all():
                yield []
            else:
                yield [(int(ids[r]), tokens[-lengths[r]:, r].copy()) for r in np.flatnonzero(~is_open)]
                parents, tokens = np.flatnonzero(is_open).astype(np.int32), tokens[:, is_open]
                lengths, word, ids, slots = (x[is_open] for x in (lengths, word, ids, slots))

    @functools.cached_property
    def _draft(self):
        """The _Draft of a model that has one, else None."""
        draft = self.model.draft() if hasattr(self.model, 'draft') else None
        return None if draft is None else _Draft(self.model, draft, self._predict, self.num_steps)

    def next(self, word, state):
        """Return the next token of each row, (R,) int32, and the state after it."""
        h, state = self.model.next(word, state)
        return self._predict(h), state

    def _predict(self, h):
        return self.model.output.predict(h, self._prepared)


class _Draft:
    """Greedy decoding of one sentence by a model and its draft, a faster model with nearly the same weights.

    The draft decodes the sentence.  Then the model predicts all tokens in one pass, given the draft's: it reads its weights
    once instead of once for each token, which takes most of the time of a step with one row.  Up to the first difference these
    are the model's own tokens, since a row has the same bits among others as alone; from there on it decodes step by step.

    The draft is dropped after LEAST tokens if fewer than half were right.
    """
    LEAST = 256

    def __init__(self, model, draft, predict, num_steps):
        longest = model.config.num_steps
        self._model, self._predict, self._decode = model, predict, Decoder(draft, num_steps)
        self._state = model.room(1, longest, 1, longest)
        self._ids, self._offsets = backend.zeros(longest, np.int32), self._state.memory_rows.offsets
        self._words, self._positions = _begin(num_steps), np.arange(max(num_steps, longest), dtype=np.int32)
        self._drafted = self._right = 0
        self._plan, capacity = None, (longest, num_steps)
        if min(capacity) >= _SizedSteps.LEAST:
            with SizedPlan(run=False) as self._plan:
                self._plan.results = self._check(*capacity)
            self._plan.learn_sizes(self._check, capacity)

    @property
    def is_worthwhile(self):
        return self._drafted < self.LEAST or 2 * self._right >= self._drafted

    def decode(self, source):
        """Return the tokens of a source of one sentence up to the first that differs from the draft's, (n,) int32, and the
        state after them, valid until the next call."""
        drafted = self._decode(source)[:, 0]
        N, n = len(source.ids), len(drafted)
        self._ids[:N], self._offsets[1] = source.ids, N
        self._words[1:n] = drafted[:-1]
        if self._plan:
            self._plan.resize((N, n))
            self._plan.run()
        found = _first(self._plan.results, n) if self._plan else self._check(N, n)
        wrong = np.flatnonzero(found != drafted)[:1]
        kept = int(wrong[0]) + 1 if len(wrong) else n
        self._drafted, self._right = self._drafted + n, self._right + kept - len(wrong)
        return found[:kept].copy(), self._state.alone(kept, 1)

    def _check(self, N, n):
        """Return the n tokens that the model predicts for a source of N tokens, given the draft's."""
        rows = Packed(self._offsets, N)
        state = self._model.start(Sequences(self._ids[:N], self._positions[:N], rows), self._state)
        return self._predict(self._model.given(self._words[:n], self._positions[:n], state))


def _drops(model, is_open, plans):
    """Return whether the rows of finished sentences are not computed from now on.

    With plans, only if that saves more than the plans do.  Never on a GPU, which computes few rows in the time of many; there
    a product may also divide its sums according to the number of rows.
    """
    finished = len(is_open) - is_open.sum()
    fewest = max(FEWEST, len(is_open) // 4) if plans else 1
    return model.free_rows and finished >= fewest


class _PlansBySize:
    """Plans for each size of a source: its numbers of sentences and tokens.   record(source) returns the plans of a size

    They are for models that cannot use _SizedSteps, and for the first sentence.  A size is recorded the second time it occurs.
    Plans hold the memory of all their steps, so only the most recent sizes are cached, TOKENS tokens in all.  Sources of more
    than TOKENS tokens, on the CPU of more than LARGEST, are decoded without plans: with so many rows a plan saves little, and
    recording it takes longer than the search.
    """
    TOKENS, LARGEST = 512, 128

    def __init__(self, record):
        self._record, self._seen, self._plans = record, set(), {}       # the plans of the last call are the last

    def get(self, source):
        """Return the plans for a source, which they have read; None if there are none."""
        size = source.rows.sentences, len(source.ids)
        if size[1] > (min(self.TOKENS, self.LARGEST) if backend.current_device().is_host else self.TOKENS):
            return None
        if size not in self._seen:
            self._seen.add(size)
            return None
        plans = self._plans.pop(size, None) or self._record(source)
        plans.feed(source)
        self._plans[size] = plans
        while sum(tokens for _, tokens in self._plans) > self.TOKENS:
            del self._plans[next(iter(self._plans))]
        return plans


class _Input:
    """Sequences of one size, in memory that plans read.   source: an example"""

    def __init__(self, source):
        ids, positions, offsets = (backend.zeros(len(x), np.int32) for x in (source.ids, source.positions, source.rows.offsets))
        self.source = source._replace(ids=ids, positions=positions, rows=source.rows._replace(offsets=offsets))
        self.begin = _begin(source.rows.sentences)

    def feed(self, source):
        """Copy Sequences of the same size into the memory."""
        self.source.ids[...], self.source.positions[...] = source.ids, source.positions
        self.source.rows.offsets[...] = source.rows.offsets


class _DecodePlans(_Input):
    """The plans for decoding sources of one size, one per token, recorded on first use.  The first plan includes
    model.start()."""

    def __init__(self, decoder, source):
        super().__init__(source)
        self.decoder, self.plans, self.results = decoder, [], []

    def step(self, t):
        """Return token t of each sentence, (B,) int32, and the state after it."""
        if t < len(self.plans):
            self.plans[t].run()
            return self.results[t]
        with plan.Plan() as recorded:
            word, state = self.results[-1] if t else (self.begin, self.decoder.model.start(self.source))
            result = self.decoder.next(word, state)
        self.plans.append(recorded)
        self.results.append(result)
        return result


class _Steps:
    """The steps of a search, launched one kernel after the other.

    results(h): arrays for h (R, D), the output of model.next();  state: after the last step, None before start()
    """

    def __init__(self, model, results, state=None):
        self._model, self._results, self._state = model, results, state

    def start(self, source):
        self._state = self._model.start(source)
        return self

    def step(self, t, word, parents=None, sources=None):
        """Return the results of step t; word, parents and sources as for model.next()."""
        h, self._state = self._model.next(word, self._state, parents, sources)
        return self._results(h)


class _SizedSteps:
    """The same by one plan for all searches, with any numbers of rows, sentences and source tokens: launching the kernels of a
    step takes 0.5 ms in Python, a replay 0.03 ms.  It needs a model with reserve().  A size seldom occurs again, and recording
    plans for a size takes longer than a search.

    Sentences may be added to a search, so the numbers of tokens of its rows may differ.

    results: as for _Steps; an array, or a tuple of arrays;  num_steps: the largest number of steps
    """
    LEAST = 5               # steps: with fewer the sizes of a plan cannot be learned
    TOKENS, SENTENCES = 512, 64         # that are encoded at a time; of a longer sentence all tokens

    def __init__(self, model, results, num_steps):
        self._model, self._results, self._num_steps = model, results, num_steps
        self._plan = self._state = None
        self._is_first = True

    def is_for(self, source, more):
        """Whether it decodes a source.  Not the first sentence alone, which takes less time than to record the plan.   more: a
        Supply, or None"""
        is_first, self._is_first = self._is_first, False
        return (hasattr(self._model, 'reserve') and self._model.free_rows and self._num_steps >= self.LEAST
                and (source.rows.sentences > 1 or more is not None or not is_first))

    def start(self, source, rows, more=None):
        """Encode a source for a search of at most `rows` rows.  Return this object.   more: the Supply of sentences that may be
        added"""
        B, N, longest = source.rows.sentences, len(source.ids), source.rows.longest
        capacity = max(self.TOKENS, longest)
        tokens, sentences = (N, B) if more is None else (max(N, more.tokens), max(B, 2 * more.sentences))
        state, self._room = self._model.reserve(rows, max(tokens, capacity + self.LEAST), sentences, longest)
        if state is not self._state:
            self._record_encoder(state, capacity, self._room[1])
            self._record(state, self._room)
        state.sources[:B] = np.arange(B)
        self._sentences = self._tokens = 0
        self._free, self._places = np.empty(0, np.int32), 0
        self._append(source)
        return self

    def free(self, slots):
        """Return for how many more source tokens there is room.   slots: numbers of the sentences that are still searched"""
        return self._room[1] - int(np.diff(self._state.memory_rows.offsets)[slots].sum())

    def add(self, source, slots):
        """Encode more sentences.   slots: the numbers of the sentences that are still searched, ascending.   Return the numbers
        that they have now, and after them the new ones, for `sources` of step()."""
        if self._sentences + source.rows.sentences > self._room[2] or self._tokens + len(source.ids) > self._room[1]:
            self._model.keep_sources(self._state, slots)
            self._sentences = len(slots)
            self._tokens, slots = int(self._state.memory_rows.offsets[len(slots)]), np.arange(len(slots))
        return np.concatenate([slots, self._append(source)])

    def _append(self, source):
        """Encode sentences.   Return their numbers"""
        first, B = self._sentences, source.rows.sentences
        self._encode(source)
        self._state.memory_rows.offsets[first:first + B + 1] = source.rows.offsets + self._tokens
        self._sentences, self._tokens = first + B, self._tokens + len(source.ids)
        return np.arange(first, first + B)

    def _record_encoder(self, state, capacity, most):
        """Record a plan that encodes some sentences, at most `capacity` tokens.   most: source tokens that a state can hold"""
        self._source = Sequences(*(backend.zeros(n, np.int32) for n in (capacity, capacity)),
                                 Packed(backend.zeros(self.SENTENCES + 1, np.int32), state.memory_rows.longest))

        def encode(tokens, sentences, at):
            ids, positions, rows = self._source
            rows = rows._replace(offsets=rows.offsets[:sentences + 1])
            self._model.encode(Sequences(ids[:tokens], positions[:tokens], rows), state, at)
        with SizedPlan(run=False) as self._encoder:
            encode(*(sizes := (capacity, self.SENTENCES, most - capacity)))
        self._encoder.learn_sizes(encode, sizes)

    def _encode(self, source):
        """Encode a source, some sentences at a time: what they need stays in the caches."""
        ids, positions, (offsets, _) = source
        first, B, capacity = 0, source.rows.sentences, len(self._source.ids)
        while first < B:
            at = int(offsets[first])
            end = min(first + self.SENTENCES, int(np.searchsorted(offsets, at + capacity, 'right')) - 1)
            n = int(offsets[end]) - at
            self._source.ids[:n], self._source.positions[:n] = ids[at:at + n], positions[at:at + n]
            self._source.rows.offsets[:end - first + 1] = offsets[first:end + 1] - at
            self._encoder.resize((n, end - first, self._tokens + at))
            self._encoder.run()
            first = end

    def _record(self, state, room):
        word, capacity = backend.zeros(room[0], np.int32), (room[0], room[2])

        def step(rows, sentences):
            h, _ = self._model.next(word[:rows], state.part(rows, sentences))
            return self._results(h)
        with SizedPlan(run=False) as recorded:
            recorded.results = step(*capacity)
        recorded.learn_sizes(step, capacity)
        self._plan, self._state, self._word = recorded, state, word

    def step(self, t, word, parents=None, sources=None):
        """As _Steps.step(); t may be an array (R,).  The results are valid until the next step."""
        R, state = len(word), self._state
        index, longest = state.index, int(np.max(t)) + 1
        if parents is not None:
            index[:longest, :R] = index[:longest, parents]
        if sources is not None:
            state.sources[:R] = sources
        state.positions[:R], self._word[:R] = t, word
        if len(self._free) < R:
            self._find_places(index[:longest, :R], state.positions[:R])
        state.places[:R], self._free = self._free[:R], self._free[R:]
        index[state.positions[:R], np.arange(R)] = state.places[:R]
        self._plan.resize((R, self._sentences))
        self._plan.run()
        found = self._plan.results
        return tuple(_first(x, R) for x in found) if isinstance(found, tuple) else _first(found, R)

    def _find_places(self, index, positions):
        """Find the rows of the caches that no hypothesis reads.   index (longest, R): the rows that each reads, up to the one
        before its position;  positions (R,)"""
        R, most = len(positions), self._state.index.size
        is_free = np.ones(most, bool)
        is_free[index[np.arange(len(index))[:, None] < positions]] = False
        while True:                                     # as few as possible, which stay in the caches of the CPU
            self._free = np.flatnonzero(is_free[:self._places]).astype(np.int32)
            if len(self._free) >= 4 * R or self._places == most:
                return
            self._places = min(most, self._places + 4 * R)


def _first(array, rows):
    """Return the first elements of a contiguous array as an array with so many rows."""
    shape = rows, *array.shape[1:]
    return array.reshape(-1)[:math.prod(shape)].reshape(shape)


def _begin(sentences):
    return backend.put(np.full(sentences, BOS, np.int32))


# ---- beam search -----------------------------------------------------------------------------------------------------

def check_whole(name, value):
    """Raise TypeError for a value that is not a whole number.   name: of the argument"""
    try:
        operator.index(value)
    except TypeError:
        raise TypeError(f'{name}: expected a whole number, got {value!r}') from None


@dataclass(frozen=True)
class Search:
    """The settings of a beam search: at most max_len tokens, `beam` hypotheses per sentence, the `nbest` best results.

    A hypothesis of n tokens, <eos> included, has the score  sum of log probabilities / n ** length_penalty.
    UserError for a setting that is out of range, TypeError for one of another type.
    """
    max_len: int
    beam: int = 5
    nbest: int = 1
    length_penalty: float = LENGTH_PENALTY

    def __post_init__(self):
        for name in ('max_len', 'beam', 'nbest'):
            check_whole(name, getattr(self, name))
        if not isinstance(self.length_penalty, numbers.Real):
            raise TypeError(f'length_penalty: expected a number, got {self.length_penalty!r}')
        if not 1 <= self.beam <= LARGEST_BEAM:
            raise UserError(f'beam: expected 1 to {LARGEST_BEAM}, got {self.beam}')
        if not 1 <= self.nbest <= self.beam:
            raise UserError(f'nbest: expected 1 to the beam, {self.beam}, got {self.nbest}')
        if not 0 <= self.length_penalty <= LARGEST_PENALTY:
            raise UserError(f'length_penalty: expected a number from 0 to {LARGEST_PENALTY}, got {self.length_penalty}')
        if self.max_len < 1:
            raise UserError(f'max_len: expected at least 1, got {self.max_len}')

    def score(self, log_probability, length):
        return log_probability / length ** self.length_penalty


class Hypothesis(NamedTuple):
    """A result: its tokens (n,) int32, <eos> included if it has one, and its score.  is_cut: it ended in a repetition."""
    tokens: np.ndarray
    score: float
    is_cut: bool


class BeamDecoder:
    """Beam search: source, Sequences of B >= 1 sentences -> for each a list of at most nbest Hypotheses, the best first.

    Valid while the weights are unchanged.  Sources are decoded by plans: see _SizedSteps and _PlansBySize.
    With beam 1 the result is greedy decoding.
    """

    def __init__(self, model, search):
        self.model, self.search = model, search
        self._plans = _PlansBySize(lambda source: _BeamPlans(self, source))
        self._sized = _SizedSteps(model, self.candidates, search.max_len)
        self._prepared = model.output.prepare() if search.beam == 1 else None

    def __call__(self, source):
        found = dict(ended for some in self.stream(source) for ended in some)
        return [found[b] for b in range(len(found))]

    def stream(self, source, more=None):
        """Yield after each step the list of sentences that have ended: number, list of Hypotheses.

        more: a Supply of sentences that join; their numbers follow the numbers of the source
        """
        if self._sized.is_for(source, more):
            return self._together(source, more)
        return iter([self._by_size(source)])

    def _by_size(self, source):
        """Search with steps of one size."""
        B = source.rows.sentences
        plans = self._plans.get(source)
        steps = None if plans else _Steps(self.model, self.candidates).start(source)
        beams, rows = Beams(self.search, B), None
        for t in range(self.search.max_len):
            if plans:
                (index, logp), state = plans.step(t, beams)
            elif t == 0:
                index, logp = steps.step(t, _begin(B))
            elif self.model.free_rows:
                rows, word, parents, columns = beams.live(rows)
                index, logp = steps.step(t, word, parents, beams.ids[columns].astype(np.int32))
            else:
                index, logp = steps.step(t, backend.put(beams.word.ravel()), backend.put(beams.parents.ravel()))
            beams.advance(backend.get(index), backend.get(logp), rows)
            if not beams.sentences:
                break
            if _drops(self.model, beams.open, plans):
                if plans:
                    steps, plans = _Steps(self.model, self.candidates, state), None
                beams.keep(np.flatnonzero(beams.open))
        return beams.take_results()

    def _together(self, source, more):
        """Search with steps of any number of rows.   Yield as stream()"""
        B, beam = source.rows.sentences, self.search.beam
        most = beam * (max(B, more.sentences) if more else B)
        steps = self._sized.start(source, most, more)
        beams, rows, slots = Beams(self.search, B), None, np.arange(B)
        while True:
            while (more and (room := (most - int(beams.places.sum())) // beam) >= more.part
                    and (new := more.take(room, steps.free(slots)))):
                slots = steps.add(new, slots)
                beams.add(new.rows.sentences)
            if not beams.sentences:
                break
            rows, word, parents, columns = beams.live(rows)
            index, logp = steps.step(beams.lengths[columns], word, parents, slots[columns])
            beams.advance(backend.get(index), backend.get(logp), rows)
            if beams.open.all():
                yield []
            else:
                yield beams.take_results(beams.ids[~beams.open])
                slots = slots[beams.open]
                beams.keep(np.flatnonzero(beams.open))

    def candidates(self, h):
        """Return the most likely tokens of each row, (R, k) int32, and their log probabilities (R, k)."""
        index, logp = self.model.output.topk(h, min(self.search.beam, self.model.config.target_size))
        if self.search.beam == 1:                   # as greedy decoding, also if the logits of two tokens round differently
            index = self.model.output.predict(h, self._prepared)
        return index, logp


class _BeamPlans(_Input):
    """The plans for sources of one size, one per token, recorded on first use.  The first plan includes model.start()."""

    def __init__(self, decoder, source):
        super().__init__(source)
        self.decoder, rows = decoder, decoder.search.beam * source.rows.sentences
        self.word, self.parents = backend.zeros(rows, np.int32), backend.zeros(rows, np.int32)
        self.plans, self.candidates, self.states = [], [], []

    def step(self, t, beams):
        """Return the candidates of token t, and the state after it."""
        if t:
            self.word[...], self.parents[...] = backend.put(beams.word.ravel()), backend.put(beams.parents.ravel())
        if t < len(self.plans):
            self.plans[t].run()
        else:
            model = self.decoder.model
            with plan.Plan() as recorded:
                h, state = (model.next(self.word, self.states[-1], self.parents) if t else
                            model.next(self.begin, model.start(self.source)))
                candidates = self.decoder.candidates(h)
            self.plans.append(recorded)
            self.candidates.append(candidates)
            self.states.append(state)
        return self.candidates[t], self.states[t]


class Beams:
    """The hypotheses of B sentences.  Independent of the model: advance() takes the candidates of the next token.

    Each sentence has `beam` places.  A step extends each hypothesis of a sentence by its candidates.  Those with the largest
    sums of log probabilities take the places that finished hypotheses have left; of equal ones the better parent comes first,
    then the candidate that is listed first.  A hypothesis finishes with <eos>, at max_len tokens, or in a repetition, and keeps
    its place.  A sentence is finished if all its hypotheses are, or if none of the others can exceed the nbest-th score.

    word, parents   (beam, B') int32: the tokens of the B' sentences that are still computed, and the rows of the previous step
                    that they continue: row i * B' + b is hypothesis i of sentence b.  Unused places have <pad>
    lengths         (B',): the numbers of tokens of their hypotheses
    open            (B',) bool: whether the sentence is not finished
    """

    def __init__(self, search, sentences):
        B = sentences
        self.search = search
        self.ids, self.lengths, self.open = np.arange(B), np.zeros(B, np.int32), np.ones(B, bool)
        self.sums = np.zeros((1, B))                            # log probability of each hypothesis; NaN: an unused place
        self.word, self.parents = np.full((1, B), BOS, np.int32), np.zeros((1, B), np.int32)
        self.tokens = np.zeros((0, 1, B), np.int32)             # (t, beam, B), the newest last, NONE before the first
        self.places = np.full(B, search.beam)                   # those without a finished hypothesis
        self.nth = np.full(B, np.nan)                           # nbest-th score of the finished that are not cut; NaN: fewer
        self.finished = {b: [] for b in range(B)}               # by sentence: (is_cut, -score, order, tokens)
        self._begun = B

    @property
    def sentences(self):
        """The number of sentences that are not finished."""
        return int(self.open.sum())

    def live(self, rows=None):
        """Return the places of the live hypotheses, indices into the raveled `word`, ascending; and for the next step their
        word and parents, (R,) int32 each, and the indices of their sentences into `open`.   rows: the places that the last step
        computed, None for all"""
        places = np.flatnonzero(~np.isnan(self.sums) & self.open)
        parents = self.parents.ravel()[places]
        if rows is not None:
            parents = np.searchsorted(rows, parents).astype(np.int32)
        return places, self.word.ravel()[places], parents, places % len(self.open)

    def add(self, n):
        """Add n sentences."""
        places, B = self.sums.shape[0], len(self.open)
        new, self._begun = range(self._begun, self._begun + n), self._begun + n
        self.ids = np.append(self.ids, new)
        self.finished.update((b, []) for b in new)
        self.lengths, self.open = np.append(self.lengths, np.zeros(n, np.int32)), np.append(self.open, np.ones(n, bool))
        self.places, self.nth = np.append(self.places, [self.search.beam] * n), np.append(self.nth, [np.nan] * n)
        self.sums = np.pad(self.sums, ((0, 0), (0, n)), constant_values=np.nan)
        self.sums[0, B:] = 0.0
        self.tokens = np.pad(self.tokens, ((0, 0), (0, 0), (0, n)), constant_values=NONE)
        self.word = np.concatenate([self.word, np.full((places, n), BOS, np.int32)], 1)
        self.parents = np.concatenate([self.parents, np.zeros((places, n), np.int32)], 1)

    def advance(self, index, logp, rows=None):
        """Add a token.  index (R, k) or (R,), logp (R, k): the candidates of each row of the last step, the best first.

        rows: the places of these rows, from live();  None: all places
        """
        W, B = self.sums.shape
        beam, k = self.search.beam, logp.shape[-1]
        index, logp = index.reshape(-1, k), np.where(np.isnan(logp), -np.inf, logp).astype(np.float64)
        if rows is not None:                                    # the sums of all other places are NaN
            index, logp = _spread(index, rows, W * B), _spread(logp, rows, W * B)
        index, logp = index.reshape(W, B, k), logp.reshape(W, B, k)
        totals = (self.sums[:, :, None] + logp).transpose(1, 0, 2).reshape(B, W * k)
        best, rows = np.argsort(-totals, axis=1, kind='stable')[:, :beam], np.arange(B)[:, None]        # NaN comes last
        sums, word = totals[rows, best], index.transpose(1, 0, 2).reshape(B, W * k)[rows, best]
        if best.shape[1] < beam:                                # fewer candidates than places
            missing = ((0, 0), (0, beam - best.shape[1]))
            best, word, sums = np.pad(best, missing), np.pad(word, missing), np.pad(sums, missing, constant_values=np.nan)
        parent = best // k                                      # (B, beam)
        live = ~np.isnan(sums) & (np.arange(beam) < self.places[:, None]) & self.open[:, None]

        before = self.tokens[len(self.tokens) - self.lengths.max():]
        self.tokens = np.concatenate([before[:, parent.T, np.arange(B)], word.T[None]], dtype=np.int32)
        self.lengths += 1
        is_cut = repeats(self.tokens, (live & (word != EOS)).T).T
        ends = live & ((word == EOS) | is_cut | (self.lengths == self.search.max_len)[:, None])
        if ends.any():
            for b, i in np.argwhere(ends).tolist():
                self._finish(b, sums[b, i], self.tokens[-self.lengths[b]:, i, b].copy(), bool(is_cut[b, i]))
            self.places -= ends.sum(1)
            live &= ~ends
            order = np.argsort(~live, axis=1, kind='stable')    # live hypotheses first, as they are if none has ended
            live, sums, word, parent = (x[rows, order] for x in (live, sums, word, parent))
            self.tokens = self.tokens[:, order.T, np.arange(B)]
        self.sums = np.where(live, sums, np.nan).T
        self.word = np.ascontiguousarray(np.where(live, word, PAD).T, np.int32)
        self.parents = np.ascontiguousarray((np.where(live, parent, 0) * B + rows).T, np.int32)
        # No extension of a live hypothesis can exceed the nbest-th score: a sum of log probabilities never grows and is at most
        # 0, so its score is largest if the sum does not change and is divided by the largest length.
        self.open &= live[:, 0] & ~(self.nth >= self.search.score(self.sums[0], self.search.max_len))

    def _finish(self, b, log_probability, tokens, is_cut):
        """Add a finished hypothesis of sentence b, an index into `open`."""
        finished, nbest = self.finished[self.ids[b]], self.search.nbest
        finished.append((is_cut, -float(self.search.score(log_probability, len(tokens))), len(finished), tokens))
        scores = sorted(negative for is_cut, negative, *_ in finished if not is_cut)
        if len(scores) >= nbest:
            self.nth[b] = -scores[nbest - 1]

    def keep(self, kept):
        """Drop all sentences but these, indices into `open`."""
        self.ids, self.open, self.places, self.nth = self.ids[kept], self.open[kept], self.places[kept], self.nth[kept]
        self.lengths = self.lengths[kept]
        self.sums = self.sums[:, kept]
        self.tokens, self.word = self.tokens[:, :, kept], np.ascontiguousarray(self.word[:, kept])
        self.parents = np.ascontiguousarray(self.parents[:, kept])

    def take_results(self, ids=None):
        """Return pairs: the number of a sentence, and its best Hypotheses; those that are cut come after all others.  They are
        no longer stored.   ids: the numbers of the sentences, None for all"""
        return [(int(b), [Hypothesis(tokens, -negative, is_cut) for is_cut, negative, _, tokens in sorted(
                 self.finished.pop(b), key=lambda entry: entry[:3])[:self.search.nbest]])
                for b in (list(self.finished) if ids is None else ids)]


def _spread(values, rows, count):
    """Return (count, k) zeros with these rows set to values (R, k)."""
    result = np.zeros((count, values.shape[1]), values.dtype)
    result[rows] = values
    return result
