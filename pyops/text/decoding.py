"""Decoding: a translation word by word.

model.start(source (T, B)) -> state, whatever the model keeps of the sentences;  model.next(word (B,) int32, state) -> h (B, D)
of the word after it, and the next state;  model.output.prepare() -> what it reads of its weights to be quick;
model.output.predict(h, prepared) -> that word, (B,) int32.
"""
import numpy as np

from pyops import backend, plan
from pyops.text.vocabulary import BOS, EOS, PAD


def greedy(model, source, num_steps, prepared=None):
    """Say the likeliest word after each one: source (T, B), B >= 1 -> (at most num_steps, B) int32, <pad> after <eos>.

    prepared: from model.output.prepare(), of the weights as they are now; None: it is called.
    """
    prepared = model.output.prepare() if prepared is None else prepared
    state, word = model.start(source), _begin(source.shape[1])

    def step(t):
        nonlocal word, state
        h, state = model.next(word, state)
        word = model.output.predict(h, prepared)
        return word
    return _say(step, num_steps, source.shape[1])


class Decoder:
    """decoder(source) is greedy(model, source, num_steps), sooner from call to call: the output layer is prepared once, so the
    model's weights must stay as they are; and what start and next launch is recorded, for each number of sentences, when it
    comes for the second time, and replayed from then on."""

    def __init__(self, model, num_steps):
        self.model, self.num_steps, self._prepared, self._recorded = model, num_steps, None, {}

    def __call__(self, source):
        if self._prepared is None:
            self._prepared = self.model.output.prepare()
        if source.shape not in self._recorded:
            self._recorded[source.shape] = None
            return greedy(self.model, source, self.num_steps, self._prepared)
        recorded = self._recorded[source.shape] or _Recorded(self.model, source.shape, self._prepared)
        self._recorded[source.shape] = recorded
        recorded.source[...] = source
        return _say(recorded.step, self.num_steps, source.shape[1])


class _Recorded:
    """The plans of decoding (T, B) sentences: the first starts, and one for each word, recorded when it is first said."""

    def __init__(self, model, shape, prepared):
        self.model, self.prepared = model, prepared
        self.source, self.word, self.plans, self.words = backend.zeros(shape, np.int32), _begin(shape[1]), [], []

    def step(self, t):
        """Say word t -> (B,) int32."""
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


def _say(step, num_steps, sentences):
    """step(t) -> word t of each sentence (B,);  until every sentence has ended -> (at most num_steps, B)."""
    said, done = np.empty((num_steps, sentences), np.int32), np.zeros(sentences, bool)
    for t in range(num_steps):
        said[t] = backend.get(step(t))
        done |= said[t] == EOS
        if done.all():
            break
    said = said[:t + 1]
    said[1:][np.logical_or.accumulate(said == EOS)[:-1]] = PAD
    return said
