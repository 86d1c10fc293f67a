"""Small data and models of the programs, for tests that train the same model in several ways."""
import functools

import numpy as np
from translation import small_corpus

from seq2seq import model as seq2seq
from transformer import model as transformer


@functools.cache
def pairs():
    _, vocabularies, pairs = small_corpus(128, num_steps=6)
    return [len(vocabulary) for vocabulary in vocabularies], pairs


@functools.cache
def digits():
    rng = np.random.default_rng(0)
    images = (rng.integers(0, 256, (60, 784)) * (rng.random((60, 784)) < 0.2)).astype(np.uint8)
    return images, rng.integers(0, 10, 60).astype(np.int32)


def make_seq2seq(**settings):
    sizes, _ = pairs()
    return seq2seq.Seq2Seq(seq2seq.Config(*sizes, embedding=12, hidden=16, num_steps=6, **settings), seed=3)


def make_transformer():
    sizes, _ = pairs()
    config = transformer.Config(*sizes, d_model=16, d_ff=24, heads=2, layers=1, num_steps=6, dropout=0.1, smoothing=0.1)
    return transformer.Transformer(config, seed=3)


def shaken(module):
    """Return the module with random noise added to its parameters and statistics, so that none is 0 or 1."""
    rng = np.random.default_rng(1)
    state = module.state_dict()
    for name, value in state.items():
        if value.dtype.kind != 'f':             # a count of batches
            continue
        noise = rng.standard_normal(value.shape) * 0.5
        state[name] = (value + (np.abs(noise) if 'var' in name else noise)).astype(np.float32)
    module.load_state_dict(state)
    return module
