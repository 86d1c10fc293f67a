"""The programs' manual gradients against the tape's, on the same ops from the same weights.

Where gradients meet in the same order the bits are the same.  In the transformer they do not: by hand a product adds to the
gradient that is there, the tape adds two products.
"""
import numpy as np
import pytest
from arrays import close
from places import get, put
from translation import packed_batch

from mnist import model as mnist
from pyops import functional as F
from pyops.autograd import Tensor, apply
from pyops.ops import EmbeddingGRU, PixelLinear, Positions, sequence_lengths
from pyops.params import key
from pyops.text.vocabulary import BOS, PAD
from seq2seq import model as seq2seq
from transformer import model as transformer


def tensors(params):
    """A leaf for each parameter, over a copy of its value."""
    return {name: Tensor(params[name].value, requires_grad=True) for name in params}


def compare(params, leaves, check):
    for name, leaf in leaves.items():
        assert np.abs(leaf.grad.numpy()).max() > 1e-6, f'{name}: no gradient, the check is vacuous'
        check(name, leaf.grad.numpy(), get(params[name].grad))


def same_bits(name, got, want):
    assert (got == want).all(), f'{name}: {np.abs(got - want).max():.1e} apart'


def nearly_same(name, got, want):
    close(got, want)


# ---- mnist -------------------------------------------------------------------------------------------------------------

def images():
    rng = np.random.default_rng(0)
    pixels = (rng.integers(0, 256, (60, 784)) * (rng.random((60, 784)) < 0.2)).astype(np.uint8)
    return pixels, rng.integers(0, 60, 33), rng.integers(0, 10, 33).astype(np.int32)


def run_mnist(loss_of):
    pixels, rows, labels = images()
    model = mnist.MLP(seed=4)
    loss, _, ctx = model.forward(put(pixels), put(rows), put(labels))
    model.backward(ctx)
    leaves = tensors(model.params)
    taped = loss_of(pixels, rows, labels, **leaves)
    taped.backward()
    return model, get(loss)[0], taped.item(), leaves


def test_mnist_by_hand_and_on_the_tape_are_equal_to_the_bit():
    def loss_of(pixels, rows, labels, w1, bias1, w2, bias2):
        h = F.relu(apply(PixelLinear, put(pixels), put(rows), weight=w1, bias=bias1))
        return F.cross_entropy(F.linear(h, w2, bias2), labels)
    model, by_hand, taped, leaves = run_mnist(loss_of)
    assert by_hand == taped
    compare(model.params, leaves, same_bits)


def test_mnist_by_hand_and_from_formulas():
    """Array ops only: the loss written out."""
    def loss_of(pixels, rows, labels, w1, bias1, w2, bias2):
        x = Tensor(pixels[rows] / np.float32(255))
        y = (x @ w1 + bias1).maximum(0.0) @ w2.T + bias2
        return -(F.log_softmax(y) * F.one_hot(labels, 10)).sum(1).mean()
    model, by_hand, taped, leaves = run_mnist(loss_of)
    close(np.array(taped), by_hand, 1e-6)
    compare(model.params, leaves, nearly_same)


# ---- seq2seq -----------------------------------------------------------------------------------------------------------

def one_sentence(config):
    """Return source, target and labels (T, 1).  The rows of one sentence have the same order, packed or time-major, so dropout
    masks are the same, too."""
    rng, T = np.random.default_rng(0), config.num_steps
    source, labels = (rng.integers(1, words, (T, 1)).astype(np.int32) for words in (config.source_size, config.target_size))
    return source, np.concatenate([np.full((1, 1), BOS, np.int32), labels[:-1]]), labels


def deep_gru(p, prefix, config, seed, ids, context, states, step, fused, lengths=None):
    """seq2seq.model.DeepGRU.forward;  fused: with the op that it has, else with an embedding, a concatenation and a GRU"""
    last, x = [], None
    for i in range(config.layers):
        if i and step is not None:
            x = F.dropout(x, config.dropout, key=key(seed, f'{prefix}.dropout.{i - 1}'), step=step)
        weights = (p[f'{prefix}.rnn.{i}.{name}'] for name in ('w_ih', 'w_hh', 'b_ih', 'b_hh'))
        state = states and states[i]
        if i == 0 and fused:
            named = dict(zip(('w_ih', 'w_hh', 'b_ih', 'b_hh'), weights, strict=True), reset_before=config.reset_before)
            x = apply(EmbeddingGRU, ids, context, state, lengths, table=p[f'{prefix}.embedding.weight'], **named)
        else:
            if i == 0:
                x = F.embedding(ids, p[f'{prefix}.embedding.weight'])
                x = x if context is None else F.concat_context(x, context)
            x = F.gru(x, state, *weights, reset_before=config.reset_before, lengths=lengths)
        last.append(x[-1])
    return x, last


def seq2seq_loss(p, config, seed, source, target, labels, step, fused=True):
    _, last = deep_gru(p, 'encoder', config, seed, source, None, None, step, fused)
    h, _ = deep_gru(p, 'decoder', config, seed, target, last[-1], last, step, fused, sequence_lengths(labels, PAD))
    return F.linear_cross_entropy(h, p['output.weight'], p['output.bias'], labels, ignore_index=PAD)


@pytest.mark.parametrize('step', [None, 3], ids=['evaluation', 'dropout'])
@pytest.mark.parametrize('reset_before', [False, True])
def test_seq2seq_by_hand_and_on_the_tape_are_equal_to_the_bit(reset_before, step):
    """And nearly so where embedding, concatenation and GRU are ops of their own."""
    config = seq2seq.Config(50, 60, embedding=20, hidden=24, layers=2, reset_before=reset_before)
    model, batch = seq2seq.Seq2Seq(config, seed=5), one_sentence(config)
    loss, ctx = model.forward(packed_batch(*batch), step=None if step is None else put(np.array([step])))
    model.backward(ctx)
    for fused in (True, False):
        leaves = tensors(model.params)
        taped = seq2seq_loss(leaves, config, 5, *map(put, batch), step, fused)
        if fused:
            assert taped.item() == get(loss)[0]
        close(np.array(taped.item()), get(loss)[0], 1e-6)
        taped.backward()
        compare(model.params, leaves, same_bits if fused else nearly_same)


# ---- transformer -------------------------------------------------------------------------------------------------------

class Taped:
    """transformer.model.Transformer.forward on Tensors."""

    def __init__(self, leaves, model, seed, step):
        self.p, self.config, self.seed, self.step = leaves, model.config, seed, step
        self.positions = Positions(self.config.d_model, self.config.positions, self.config.d_model ** 0.5)

    def dropped(self, name):
        """Arguments of a function with dropout."""
        return dict(p=self.config.dropout, training=self.step is not None, key=key(self.seed, name), step=self.step)

    def norm(self, x, prefix):
        return F.layer_norm(x, x.shape[-1], self.p[f'{prefix}.weight'], self.p[f'{prefix}.bias'])

    def attention(self, x, memory, prefix, causal=False, lengths=None):
        q, k, v = (F.linear(of, self.p[f'{prefix}.{name}.weight']) for of, name in ((x, 'q'), (memory, 'k'), (memory, 'v')))
        a = F.attention(q, k, v, self.config.heads, causal, lengths, **self.dropped(f'{prefix}.dropout'))
        return F.linear(a, self.p[f'{prefix}.out.weight'])

    def feed_forward(self, x, prefix):
        return F.feed_forward(x, *(self.p[f'{prefix}.{name}'] for name in ('w1', 'b1', 'w2', 'b2')))

    def sublayer(self, x, f, prefix):
        def residual(branch):
            return F.residual(x, branch, **self.dropped(f'{prefix}.residual'))
        if self.config.pre_norm:
            return residual(f(self.norm(x, f'{prefix}.norm')))
        return self.norm(residual(f(x)), f'{prefix}.norm')

    def side(self, side, ids, memory=None, lengths=None):
        x = apply(self.positions, F.embedding(ids, self.p[f'{side}.embedding.weight']))
        x = F.dropout(x, **self.dropped(f'{side}.dropout'))
        for layer in range(self.config.layers):
            block = f'{side}.{layer}'
            own, cross, forward = (f'{block}.{name}' for name in ('self_attention', 'cross_attention', 'feed_forward'))
            x = self.sublayer(x, lambda n, own=own: self.attention(
                n, n, own, memory is not None, lengths if memory is None else None), own)
            if memory is not None:
                x = self.sublayer(x, lambda n, cross=cross: self.attention(n, memory, cross, False, lengths), cross)
            x = self.sublayer(x, lambda n, forward=forward: self.feed_forward(n, forward), forward)
        return self.norm(x, f'{side}.norm') if self.config.pre_norm else x

    def loss(self, source, target, labels):
        lengths = sequence_lengths(source, PAD)
        h = self.side('decoder', target, self.side('encoder', source, lengths=lengths), lengths)
        return F.linear_cross_entropy(h, self.p['output.weight'], self.p['output.bias'], labels, PAD, self.config.smoothing)


@pytest.mark.parametrize('step', [None, 3], ids=['evaluation', 'dropout'])
@pytest.mark.parametrize('pre_norm', [False, True], ids=['post-norm', 'pre-norm'])
def test_transformer_by_hand_and_on_the_tape_are_equal(pre_norm, step):
    config = transformer.Config(50, 60, d_model=24, d_ff=20, heads=3, num_steps=7, pre_norm=pre_norm, smoothing=0.1)
    model, batch = transformer.Transformer(config, seed=5), one_sentence(config)
    loss, ctx = model.forward(packed_batch(*batch), step=None if step is None else put(np.array([step])))
    model.backward(ctx)
    leaves = tensors(model.params)
    taped = Taped(leaves, model, 5, step).loss(*map(put, batch))
    assert taped.item() == get(loss)[0], 'forward has the same bits'
    taped.backward()
    compare(model.params, leaves, nearly_same)
    same_bits('output.weight', leaves['output.weight'].grad.numpy(), get(model.params['output.weight'].grad))
