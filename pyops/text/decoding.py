"""Greedy decoding, one token at a time.

model.start(source (T, B)) returns the initial decoder state; model.next(word (B,) int32, state) returns h (B, D) for the next
token, and the next state; model.output.prepare() returns a form of the output weights for fast prediction;
model.output.predict(h, prepared) returns the next token (B,) int32.
"""
import numpy as np

from pyops import backend, plan
from pyops.text.vocabulary import BOS, EOS, PAD


def greedy(model, source, num_steps, prepared=None):
    """Decode greedily: source (T, B), B >= 1 -> tokens (at most num_steps, B) int32, <pad> after <eos>.

    prepared: model.output.prepare() of the current weights; None: computed here.
    """
    prepared = model.output.prepare() if prepared is None else prepared
    state, word = model.start(source), _begin(source.shape[1])

    def step(t):
        nonlocal word, state
        h, state = model.next(word, state)
        word = model.output.predict(h, prepared)
        return word
    return _decode(step, num_steps, source.shape[1])


class Decoder:
    """Equivalent to greedy(model, source, num_steps) but faster on repeated calls; valid while the weights are unchanged.

    The output layer is prepared once.  Each source shape is recorded as plans at its second call and replayed from then on.
    """

    def __init__(self, model, num_steps):
        self.model, self.num_steps, self._prepared, self._plans = model, num_steps, None, {}

    def __call__(self, source):
        if self._prepared is None:
            self._prepared = self.model.output.prepare()
        if source.shape not in self._plans:
            self._plans[source.shape] = None
            return greedy(self.model, source, self.num_steps, self._prepared)
        plans = self._plans[source.shape] or _DecodePlans(self.model, source.shape, self._prepared)
        self._plans[source.shape] = plans
        plans.source[...] = source
        return _decode(plans.step, self.num_steps, source.shape[1])


class _DecodePlans:
    """The plans for decoding sources (T, B), one per token, recorded on first use.  The first plan includes model.start()."""

    def __init__(self, model, shape, prepared):
        self.model, self.prepared = model, prepared
        self.source, self.word, self.plans, self.words = backend.zeros(shape, np.int32), _begin(shape[1]), [], []

    def step(self, t):
        """Return token t of each sentence, (B,) int32."""
        if t < len(self.plans):
            self.plans[t].run()
            return self.words[t]
        with plan.Plan() as recorded:
            state = self.state if t else self.model.start(self.source)
            h, self.state = self.model.next(self.words[-1] if t else self.word, state)
            word = self.model.output.predict(h, self.prepared)
        self.plans.append(recorded)
        self.words.append(word)
        return word


def _begin(sentences):
    return backend.put(np.full(sentences, BOS, np.int32))


def _decode(step, num_steps, sentences):
    """Collect step(t) -> token t of each sentence (B,) until every sentence has ended.  Return (at most num_steps, B)."""
    tokens, done = np.empty((num_steps, sentences), np.int32), np.zeros(sentences, bool)
    for t in range(num_steps):
        tokens[t] = backend.get(step(t))
        done |= tokens[t] == EOS
        if done.all():
            break
    tokens = tokens[:t + 1]
    tokens[1:][np.logical_or.accumulate(tokens == EOS)[:-1]] = PAD
    return tokens
