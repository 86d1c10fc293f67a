"""Decoding: a translation word by word."""
import numpy as np

from pyops import backend
from pyops.text.vocabulary import BOS, EOS, PAD


def greedy(model, source, num_steps):
    """Say the likeliest word after each one: source (T, B), B >= 1 -> (at most num_steps, B) int32, <pad> after <eos>.

    model.start(source) -> state, whatever the model keeps of a sentence; model.next(word (B,) int32, state) -> h (B, D) of
    the word after it, and the next state; model.output.predict(h) -> that word, (B,) int32.
    """
    state, word = model.start(source), np.full(source.shape[1], BOS, np.int32)
    done, said = np.zeros(word.shape, bool), []
    while len(said) < num_steps and not done.all():
        h, state = model.next(backend.put(word), state)
        word = backend.get(model.output.predict(h))
        said.append(np.where(done, PAD, word).astype(np.int32))
        done |= word == EOS
    return np.stack(said)
