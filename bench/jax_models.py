"""The models in idiomatic JAX: contestants in the benchmark of training steps.

Parameters are dicts {our parameter name: array} in our layout, sequences are batch-first, (B, T).  A loss takes parameters, a
batch and a random key.
"""
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from pyops.text.vocabulary import PAD

BETA1, BETA2, EPS, MAX_NORM = 0.9, 0.999, 1e-8, 1.0


# ---- training steps ------------------------------------------------------------------------------------------------------

def update(loss, lr, state, batch):
    """Train on one batch with Adam and clipping, and return the new state and the loss.

    state: parameters, both moments, number of steps, random key
    """
    params, m, v, count, key = state
    key, mine = jax.random.split(key)
    value, grads = jax.value_and_grad(loss)(params, batch, mine)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    scale, count = jnp.minimum(1.0, MAX_NORM / (norm + 1e-6)), count + 1
    m = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * scale * g, m, grads)
    v = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * (scale * g) ** 2, v, grads)
    rate, root = lr / (1 - BETA1 ** count), jnp.sqrt(1 - BETA2 ** count)
    params = jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) / root + EPS), params, m, v)
    return (params, m, v, count, key), value


class Training:
    """Training with loss(params, batch, key) from these weights.  Steps are compiled and reuse the memory of the state."""

    def __init__(self, loss, weights, lr):
        params = {name: jnp.asarray(value) for name, value in weights.items()}
        zeros = [jax.tree.map(jnp.zeros_like, params) for _ in range(2)]
        # rbg: the faster random numbers
        self.state = params, *zeros, jnp.zeros((), jnp.float32), jax.random.key(0, impl='rbg')
        one = functools.partial(update, loss, lr)
        self._step = jax.jit(one, donate_argnums=0)

        def several(state, batches, same):
            return jax.lax.scan(lambda state, batch: one(state, (*same, *batch)), state, batches)
        self._steps = jax.jit(several, donate_argnums=0)

    @staticmethod
    def put(*arrays):
        """Return arrays that are not copied in every step."""
        return tuple(map(jnp.asarray, arrays))

    def step(self, *batch):
        """Train on a batch and return the loss."""
        self.state, loss = self._step(self.state, batch)
        return float(loss)

    def several_steps(self, batches, *same):
        """Train on batches, arrays with one more axis, in one call and return their losses.  same: the first arrays of every
        batch."""
        self.state, losses = self._steps(self.state, batches, same)
        return np.asarray(losses)


# ---- models --------------------------------------------------------------------------------------------------------------

def cross_entropy(logits, labels, smoothing=0.0):
    """Return the mean over the labels that are not negative; `smoothing` is the share that all classes have in common."""
    all_logs = jax.nn.log_softmax(logits)
    logs = jnp.take_along_axis(all_logs, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    if smoothing:
        logs = (1 - smoothing) * logs + smoothing * all_logs.mean(-1)
    return -jnp.sum(jnp.where(labels >= 0, logs, 0)) / jnp.maximum(jnp.sum(labels >= 0), 1)


def mnist_logits(params, images):
    """images (B, 784) -> (B, 10)"""
    return jax.nn.relu(images @ params['w1'] + params['bias1']) @ params['w2'].T + params['bias2']


def mnist_loss(params, batch, key):
    """batch: images (N, 784) float, labels (N,), rows (B,)"""
    images, labels, rows = batch
    return cross_entropy(mnist_logits(params, images[rows]), labels[rows])


def dropout(p, key):
    """Return drop(x) with another mask in every call."""
    numbers = itertools.count()

    def drop(x):
        if not p:
            return x
        keep = jax.random.bernoulli(jax.random.fold_in(key, next(numbers)), 1 - p, x.shape)
        return jnp.where(keep, x / (1 - p), 0)
    return drop


def seq2seq_loss(params, batch, key, config):
    """batch: source, target, labels (B, T)"""
    source, target, labels = batch
    drop = dropout(config.dropout, key)

    def gru(prefix, x, h, mask):
        """x (B, T, I), h (B, H) -> (B, T, H), last h.  mask (B, T): the tokens that are not padding"""
        w_ih, w_hh, b_ih, b_hh = (params[f'{prefix}.{name}'] for name in ('w_ih', 'w_hh', 'b_ih', 'b_hh'))

        def cell(h, inputs):
            a, is_token = inputs
            a_r, a_z, a_n = jnp.split(a, 3, -1)
            u_r, u_z, u_n = jnp.split(h @ w_hh.T + b_hh, 3, -1)
            z = jax.nn.sigmoid(a_z + u_z)
            new = (1 - z) * jnp.tanh(a_n + jax.nn.sigmoid(a_r + u_r) * u_n) + z * h
            h = jnp.where(is_token[:, None], new, h)
            return h, h
        last, hs = jax.lax.scan(cell, h, ((x @ w_ih.T + b_ih).swapaxes(0, 1), mask.T))
        return hs.swapaxes(0, 1), last

    def stack(side, x, states, mask):
        last = []
        for layer, h in enumerate(states):
            x, end = gru(f'{side}.rnn.{layer}', drop(x) if layer else x, h, mask)
            last.append(end)
        return x, last
    zeros = jnp.zeros((len(source), config.hidden))
    _, last = stack('encoder', params['encoder.embedding.weight'][source], [zeros] * config.layers, source != PAD)
    x = params['decoder.embedding.weight'][target]
    context = jnp.broadcast_to(last[-1][:, None], (*x.shape[:2], config.hidden))
    h, _ = stack('decoder', jnp.concatenate([x, context], -1), last, jnp.ones(target.shape, bool))
    return cross_entropy(h @ params['output.weight'].T + params['output.bias'], jnp.where(labels == PAD, -1, labels))


def transformer_loss(params, batch, key, config):
    """batch: source, target, labels (B, T).  For ReLU, without tied weights."""
    source, target, labels = batch
    D, heads, drop = config.d_model, config.heads, dropout(config.dropout, key)
    angles = np.arange(config.num_steps)[:, None] / 10000 ** (np.arange(0, D, 2) / D)
    positions = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(config.num_steps, -1)[:, :D].astype(np.float32)

    def attend(prefix, x, memory, mask):
        """mask: True where a query may attend to a key, broadcast to (B, heads, Tq, Tk)"""
        q, k, v = (jnp.einsum('btd,ed->bte', rows, params[f'{prefix}.{name}.weight']).reshape(*rows.shape[:2], heads, -1)
                   for name, rows in (('q', x), ('k', memory), ('v', memory)))
        scores = jnp.einsum('bqhd,bkhd->bhqk', q, k) / math.sqrt(D // heads)
        weights = drop(jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)))
        return jnp.einsum('bhqk,bkhd->bqhd', weights, v).reshape(x.shape) @ params[f'{prefix}.out.weight'].T

    def feed_forward(prefix, x):
        w1, b1, w2, b2 = (params[f'{prefix}.{name}'] for name in ('w1', 'b1', 'w2', 'b2'))
        return jax.nn.relu(x @ w1.T + b1) @ w2.T + b2

    def norm(prefix, x):
        mean = x.mean(-1, keepdims=True)
        rstd = jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
        return (x - mean) * rstd * params[f'{prefix}.norm.weight'] + params[f'{prefix}.norm.bias']

    def sublayer(prefix, x, branch):
        """branch(x) -> what is added to x"""
        if config.pre_norm:
            return x + drop(branch(norm(prefix, x)))
        return norm(prefix, x + drop(branch(x)))

    def embed(side, ids):
        return drop(params[f'{side}.embedding.weight'][ids] * math.sqrt(D) + positions[:ids.shape[1]])

    def leave(side, x):
        return norm(side, x) if config.pre_norm else x

    mask, causal = (source != PAD)[:, None, None], jnp.tril(jnp.ones((target.shape[1],) * 2, bool))
    memory, x = embed('encoder', source), embed('decoder', target)
    for layer in range(config.layers):
        at, ff = f'encoder.{layer}.self_attention', f'encoder.{layer}.feed_forward'
        memory = sublayer(at, memory, lambda n, at=at: attend(at, n, n, mask))
        memory = sublayer(ff, memory, lambda n, ff=ff: feed_forward(ff, n))
    memory = leave('encoder', memory)
    for layer in range(config.decoder_layers or config.layers):
        at, cross, ff = (f'decoder.{layer}.{name}' for name in ('self_attention', 'cross_attention', 'feed_forward'))
        x = sublayer(at, x, lambda n, at=at: attend(at, n, n, causal))
        x = sublayer(cross, x, lambda n, cross=cross: attend(cross, n, memory, mask))
        x = sublayer(ff, x, lambda n, ff=ff: feed_forward(ff, n))
    logits = leave('decoder', x) @ params['output.weight'].T + params['output.bias']
    return cross_entropy(logits, jnp.where(labels == PAD, -1, labels), config.smoothing)
