"""Decoding, one token at a time: greedy, and beam search (docs/beam_search.md).

A model provides
    start(source)                      the decoder state before the first token, of B sentences (Sequences) with one hypothesis
                                       each
    next(word, state, parents=None)    h (R, D) of the next token of R hypotheses, and the next state; word (R,) int32 are the
                                       previous tokens.  parents (R,) int32: row r continues row parents[r] of the state.  Row r
                                       belongs to sentence r % B.  None: row r continues row r
    keep(state, sentences)             the state without the other sentences, for a call of next() with parents
    output.prepare(), output.predict(h, prepared), output.topk(h, k)        see LinearCrossEntropy
"""
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pyops import backend, plan
from pyops.errors import UserError
from pyops.text.flags import LARGEST_BEAM, LARGEST_PENALTY, LENGTH_PENALTY
from pyops.text.vocabulary import BOS, EOS, PAD

REPEATS = 4             # copies of an n-gram in a row that end a hypothesis
FEWEST = 4              # finished sentences that are dropped at once: the next steps are then without plans


def greedy(model, source, num_steps):
    """Decode greedily: source, Sequences of B >= 1 sentences -> tokens (at most num_steps, B) int32, <pad> after <eos>."""
    return Decoder(model, num_steps)(source)


class Decoder:
    """Greedy decoding: source, Sequences of B >= 1 sentences -> tokens (at most num_steps, B) int32, <pad> after <eos>.

    Valid while the weights are unchanged.  The output layer is prepared once, and small sources are decoded by plans: see
    _PlansBySize.
    """

    def __init__(self, model, num_steps):
        self.model, self.num_steps, self._prepared = model, num_steps, None
        self._plans = _PlansBySize(lambda source: _DecodePlans(self, source))

    def __call__(self, source):
        if self._prepared is None:
            self._prepared = self.model.output.prepare()
        plans, B = self._plans.get(source), source.rows.sentences
        tokens, rows = np.full((self.num_steps, B), PAD, np.int32), np.arange(B)
        open_, word, state, parents = np.ones(B, bool), _begin(B), None, None
        for t in range(self.num_steps):
            if plans:
                word, state = plans.step(t)
            else:
                word, state = self.next(word, state if t else self.model.start(source), parents)
            found, parents = backend.get(word), None
            tokens[t, rows[open_]] = found[open_]
            open_ &= found != EOS
            if not open_.any():
                break
            if (kept := _kept(open_)) is not None:
                rows, open_, plans = rows[kept], open_[kept], None
                state, word, parents = self.model.keep(state, kept), backend.put(found[kept]), backend.put(kept)
        return tokens[:t + 1]

    def next(self, word, state, parents=None):
        """Return the next token of each row, (R,) int32, and the state after it."""
        h, state = self.model.next(word, state, parents)
        return self.model.output.predict(h, self._prepared), state


def _kept(is_open):
    """Return the unfinished sentences, int32, if the others are no longer worth computing, else None.

    A GPU computes few rows in the time of many, and there the number of rows must not change: a product may divide a sum
    according to it.
    """
    n = len(is_open) - is_open.sum()
    drops = n >= FEWEST and 4 * n >= len(is_open) and backend.current_device().is_host
    return np.flatnonzero(is_open).astype(np.int32) if drops else None


class _PlansBySize:
    """Plans for each size of a source: its numbers of sentences and tokens.   record(source) returns the plans of a size

    A size is recorded the second time it occurs.  Plans hold the memory of all their steps, so only the most recent sizes are
    cached, TOKENS tokens in all.  Sources of more than TOKENS tokens, on the CPU of more than LARGEST, are decoded without
    plans: with so many rows a plan saves little, and recording it takes longer than the search.
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


def _begin(sentences):
    return backend.put(np.full(sentences, BOS, np.int32))


# ---- beam search -----------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Search:
    """The settings of a beam search: at most max_len tokens, `beam` hypotheses per sentence, the `nbest` best results.

    A hypothesis of n tokens, <eos> included, has the score  sum of log probabilities / n ** length_penalty.
    UserError for a setting that is out of range.
    """
    max_len: int
    beam: int = 5
    nbest: int = 1
    length_penalty: float = LENGTH_PENALTY

    def __post_init__(self):
        if not 1 <= self.beam <= LARGEST_BEAM:
            raise UserError(f'beam: expected 1 to {LARGEST_BEAM}, got {self.beam}')
        if not 1 <= self.nbest <= self.beam:
            raise UserError(f'nbest: expected 1 to the beam, {self.beam}, got {self.nbest}')
        if not 0 <= self.length_penalty <= LARGEST_PENALTY:
            raise UserError(f'length penalty: expected a number from 0 to {LARGEST_PENALTY}, got {self.length_penalty}')
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

    Valid while the weights are unchanged.  Small sources are decoded by plans: see _PlansBySize.
    With beam 1 the result is greedy decoding.
    """

    def __init__(self, model, search):
        self.model, self.search = model, search
        self._plans = _PlansBySize(lambda source: _BeamPlans(self, source))
        self._prepared = model.output.prepare() if search.beam == 1 else None

    def __call__(self, source):
        return self._run(source, self._plans.get(source))

    def _run(self, source, plans):
        beams, state = Beams(self.search, source.rows.sentences), None
        for t in range(self.search.max_len):
            if plans:
                (index, logp), state = plans.step(t, beams)
            elif t == 0:
                (index, logp), state = self.first(source, _begin(source.rows.sentences))
            else:
                (index, logp), state = self.later(backend.put(beams.word.ravel()), state, backend.put(beams.parents.ravel()))
            beams.advance(backend.get(index), backend.get(logp))
            if not beams.sentences:
                break
            if (kept := _kept(beams.open)) is not None:
                beams.keep(kept)
                state, plans = self.model.keep(state, kept), None
        return beams.results()

    def first(self, source, word):
        """Return the candidates of the first token, and the state after it."""
        h, state = self.model.next(word, self.model.start(source))
        return self._candidates(h), state

    def later(self, word, state, parents):
        """Return the candidates of the next token, and the state after it."""
        h, state = self.model.next(word, state, parents)
        return self._candidates(h), state

    def _candidates(self, h):
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
            with plan.Plan() as recorded:
                candidates, state = (self.decoder.later(self.word, self.states[-1], self.parents) if t else
                                     self.decoder.first(self.source, self.begin))
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
    open            (B',) bool: whether the sentence is not finished
    """

    def __init__(self, search, sentences):
        B = sentences
        self.search, self.t = search, 0
        self.ids, self.open = np.arange(B), np.ones(B, bool)
        self.sums = np.zeros((1, B))                            # log probability of each hypothesis; NaN: an unused place
        self.tokens = np.zeros((0, 1, B), np.int32)             # (t, beam, B)
        self.places = np.full(B, search.beam)                   # those without a finished hypothesis
        self.finished = [[] for _ in range(B)]                  # by sentence: (is_cut, -score, order, tokens)

    @property
    def sentences(self):
        """The number of sentences that are not finished."""
        return int(self.open.sum())

    def advance(self, index, logp):
        """Add a token.  index (R, k) or (R,), logp (R, k): the candidates of each row of the last step, the best first."""
        W, B = self.sums.shape
        beam, k = self.search.beam, logp.shape[-1]
        logp = np.where(np.isnan(logp), -np.inf, logp).astype(np.float64).reshape(W, B, k)
        index = index.reshape(W, B, k)
        totals = (self.sums[:, :, None] + logp).transpose(1, 0, 2).reshape(B, W * k)
        best = np.argsort(-totals, axis=1, kind='stable')[:, :beam]             # NaN comes last
        sums = np.take_along_axis(totals, best, 1)
        word = np.take_along_axis(index.transpose(1, 0, 2).reshape(B, W * k), best, 1)
        if best.shape[1] < beam:                                # fewer candidates than places
            missing = ((0, 0), (0, beam - best.shape[1]))
            best, word, sums = np.pad(best, missing), np.pad(word, missing), np.pad(sums, missing, constant_values=np.nan)
        parent = best // k                                      # (B, beam)
        live = ~np.isnan(sums) & (np.arange(beam) < self.places[:, None]) & self.open[:, None]

        self.tokens = np.concatenate([np.take_along_axis(self.tokens, parent.T[None], 1), word.T[None]], dtype=np.int32)
        self.t += 1
        is_cut = live & (word != EOS) & self._repeats().T
        ends = live & ((word == EOS) | is_cut | (self.t == self.search.max_len))
        for b, i in zip(*np.nonzero(ends), strict=True):
            finished = self.finished[self.ids[b]]
            score = float(self.search.score(sums[b, i], self.t))
            finished.append((bool(is_cut[b, i]), -score, len(finished), self.tokens[:self.t, i, b].copy()))
        self.places -= ends.sum(1)
        live &= ~ends

        order = np.argsort(~live, axis=1, kind='stable')        # live hypotheses first
        live, sums, word, parent = (np.take_along_axis(x, order, 1) for x in (live, sums, word, parent))
        self.tokens = np.take_along_axis(self.tokens, order.T[None], 1)
        self.sums = np.where(live, sums, np.nan).T
        self.word = np.ascontiguousarray(np.where(live, word, PAD).T, np.int32)
        self.parents = np.ascontiguousarray((np.where(live, parent, 0) * B + np.arange(B)[:, None]).T, np.int32)
        for b in np.flatnonzero(self.open):
            self.open[b] = live[b, 0] and not self._is_decided(self.finished[self.ids[b]], self.sums[0, b])

    def _repeats(self):
        """Return (beam, B) bool: whether the tokens of a hypothesis end in REPEATS copies of an n-gram."""
        found = np.zeros(self.tokens.shape[1:], bool)
        for n in range(1, self.t // REPEATS + 1 if self.search.beam > 1 else 1):
            end = self.tokens[self.t - REPEATS * n:self.t].reshape(REPEATS, n, *found.shape)
            found |= (end == end[0]).all((0, 1))
        return found

    def _is_decided(self, finished, largest):
        """Whether no extension of a hypothesis with at most this log probability can exceed the nbest-th score.

        A sum of log probabilities never grows, and is at most 0, so its score is largest if it stays as it is and is divided by
        the largest length."""
        scores = sorted(negative for is_cut, negative, *_ in finished if not is_cut)
        nbest = self.search.nbest
        return len(scores) >= nbest and -scores[nbest - 1] >= self.search.score(largest, self.search.max_len)

    def keep(self, kept):
        """Drop all sentences but these, indices into `open`."""
        self.ids, self.open, self.places, self.sums = self.ids[kept], self.open[kept], self.places[kept], self.sums[:, kept]
        self.tokens, self.word = self.tokens[:, :, kept], np.ascontiguousarray(self.word[:, kept])
        self.parents = np.ascontiguousarray(self.parents[:, kept])

    def results(self):
        """Return for each sentence its best Hypotheses; those that are cut come after all others."""
        return [[Hypothesis(tokens, -negative, is_cut) for is_cut, negative, _, tokens in sorted(
                 finished, key=lambda entry: entry[:3])[:self.search.nbest]] for finished in self.finished]
