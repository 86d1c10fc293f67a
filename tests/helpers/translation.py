"""Shared by the tests of the translators: batches, a small corpus, training steps, comparisons of runs."""
import numpy as np

from pyops import backend, checkpoint
from pyops.ops.packed import Packed
from pyops.optim import Adam
from pyops.text import embedded
from pyops.text.pairs import Batch, Pairs, Sequences
from pyops.text.vocabulary import BOS, PAD


def padded(rng, words, T, B):
    """Return (T, B) int32 ids of sentences with random lengths from 2 to T, padded at the end."""
    ids = rng.integers(1, words, (T, B)).astype(np.int32)
    ids[np.arange(T)[:, None] >= rng.integers(2, T + 1, B)] = PAD
    return ids


def random_batch(config, B, seed=0):
    """Return source, target and labels (T, B), with padding of several lengths."""
    rng = np.random.default_rng(seed)
    source, labels = (padded(rng, words, config.num_steps, B) for words in (config.source_size, config.target_size))
    return source, np.concatenate([np.full((1, B), BOS, np.int32), labels[:-1]]), labels


def packed_batch(source, target, labels):
    """Return the Batch of padded, time-major arrays (T, B) on the current device."""
    def sentences(ids, lengths):
        return [column[:length] for column, length in zip(ids.T, lengths, strict=True)]
    lengths = (labels != PAD).sum(0)
    return Batch(Sequences.of(sentences(source, (source != PAD).sum(0)), len(source)),
                 Sequences.of(sentences(target, lengths), len(target)),
                 backend.put(np.concatenate(sentences(labels, lengths)).astype(np.int32)))


def batch_of(source, target, labels, T):
    """Return the Batch over arrays of ids (B * T,), which belong to B sentences of T tokens each."""
    B = len(source) // T
    positions = backend.put(np.tile(np.arange(T, dtype=np.int32), B))
    rows = Packed(backend.put(np.arange(B + 1, dtype=np.int32) * T), T)
    return Batch(Sequences(source, positions, rows), Sequences(target, positions, rows), labels)


def small_corpus(n=512, num_steps=9):
    corpus = embedded.corpus().first(n)
    vocabularies = corpus.vocabularies(1)
    return corpus, vocabularies, Pairs.encode(corpus, *vocabularies, num_steps)


def train_steps(model, pairs, steps, batch_size=64, lr=0.005, seed=0):
    """Train and return the losses.  The order of the pairs depends only on the seed."""
    optimizer, losses = Adam(model.params, lr, max_norm=1.0), []
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        model.params.zero_grads()
        loss, ctx = model.forward(pairs.batch_of(rng.integers(0, len(pairs), batch_size)), step=optimizer.count)
        model.backward(ctx)
        optimizer.step()
        losses.append(float(loss[0]))
    return losses


def assert_same_gradients(params, leaves, rtol=1e-4):
    """Compare the gradient of each parameter with the float64 torch leaf of the same name; it must not be zero.

    rtol is relative to the largest element.  It is twice the op table's, because a model is several ops deep."""
    assert set(leaves) == set(params)
    for name, leaf in leaves.items():
        scale = leaf.grad.abs().max().item()
        assert scale > 1e-6, f'{name}: the gradient is 0: this test checks nothing'
        err = np.abs(params[name].grad - leaf.grad.numpy()).max()
        assert err <= rtol * scale, f'{name}: {err / scale:.1e}'


# ---- whole runs ----------------------------------------------------------------------------------------

# flags of a run that takes seconds
TINY_SEQ2SEQ = ['-f', 'embedded', '-t', '1', '--embedding', '16', '--hidden', '24', '-b', '100']
TINY_TRANSFORMER = ['-f', 'embedded', '-t', '1', '--d-model', '16', '--d-ff', '8', '-b', '100']


def newest(folder):
    """Return (tensors, state) of the newest checkpoint in a folder."""
    found = checkpoint.find(folder, serving=True)
    return found.tensors, found.state


def assert_same_training(one, other):
    """Require two checkpoints to have the same bits, except for the time and id of their runs and the names of their files."""
    (tensors, state), (other_tensors, other_state) = one, other
    assert set(tensors) == set(other_tensors) and len(tensors) > 3 * 10
    for name, tensor in tensors.items():
        assert tensor.tobytes() == other_tensors[name].tobytes(), name
    for state_ in (state, other_state):
        assert state_['run'].pop('seconds') >= 0 and len(state_['run'].pop('id')) == 8
        state_['run'].pop('kept')
    assert state == other_state
