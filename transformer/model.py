"""A transformer encoder and decoder (Vaswani et al. 2017, arXiv:1706.03762).  forward() is a list of calls; backward() is
the same list reversed.

The tokens of all sentences of a batch are packed: (N,) ids, (N, D) activations, D = d_model, and Packed rows that say where
each sentence begins.  So nothing is computed for padding.  Ops store nothing: each forward() returns a ctx, which the caller
passes to backward().  Where two gradients of one array meet, `into=` adds the second to the first.
"""
import copy
import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from pyops import backend, init, ops
from pyops.errors import UserError
from pyops.ops import LayerNorm, Positions, ResidualNorm
from pyops.ops.attention import append_rows, follow_parents
from pyops.ops.feed_forward import ACTIVATIONS
from pyops.ops.linear import JoinedLinear, LinearPair, forward_each
from pyops.ops.packed import Packed
from pyops.params import Parameters, Spec, key
from pyops.text.decoding import Decoder, greedy
from pyops.text.vocabulary import PAD

# The settings in which a checkpoint must agree with the model that loads it.
SIZES = ('d_model', 'd_ff', 'heads', 'layers', 'decoder_layers', 'num_steps', 'positions', 'pre_norm', 'tied', 'activation')


@dataclass(frozen=True)
class Config:
    """Sizes and settings of the model."""
    source_size: int            # tokens in the source vocabulary
    target_size: int            # tokens in the target vocabulary
    d_model: int = 256
    d_ff: int = 64              # inner size of the feed-forward layers
    heads: int = 4              # attention heads; each gets d_model / heads columns
    layers: int = 2             # number of encoder blocks
    decoder_layers: int = 0     # number of decoder blocks; 0: as many as encoder blocks
    dropout: float = 0.2        # applied to embeddings, attention weights and the output of each sublayer
    num_steps: int = 9          # sentences are truncated to this number of tokens
    positions: int = 1000       # rows of the table of positional encodings: the largest num_steps
    pre_norm: bool = False      # layer norm before each sublayer instead of after its residual sum
    tied: bool = False          # one matrix for both embeddings and the output layer; needs one vocabulary for both languages
    smoothing: float = 0.0      # label smoothing
    activation: str = 'relu'    # of the feed-forward layers: 'relu', 'silu', 'gelu', 'gelu_tanh'
    bias: bool = False          # whether the projections of attention have biases
    halves: bool = False        # positional encodings: all sines, then all cosines, instead of pairs of both
    ops: object = ops           # source of the op classes with matrix products: pyops.ops or a quantization.Family

    def __post_init__(self):
        for name in ('source_size', 'target_size', 'd_model', 'd_ff', 'heads', 'layers', 'num_steps', 'positions'):
            if getattr(self, name) < 1:
                raise UserError(f'{name}: expected a whole number above 0, got {getattr(self, name)}')
        if self.activation not in ACTIVATIONS:
            raise UserError(f'--activation {self.activation}: expected one of {", ".join(ACTIVATIONS)}')
        if self.decoder_layers < 0:
            raise UserError(f'--decoder-layers {self.decoder_layers}: expected 0 or more')
        if self.tied and self.source_size != self.target_size:
            raise UserError(f'--tied: expected one vocabulary for both languages, got {self.source_size} and '
                            f'{self.target_size} tokens; use --tokenizer bpe, or leave out --tied')
        if self.d_model % self.heads:
            raise UserError(f'--heads {self.heads}: expected a divisor of --d-model {self.d_model}: heads share it evenly')
        if self.num_steps > self.positions:
            raise UserError(f'--num-steps {self.num_steps}: expected at most --positions {self.positions}: '
                            'lower --num-steps or raise --positions')


# ---- parameters --------------------------------------------------------------------------------------------------

# Small initial branches: the first gradients pass through the residual connections to the embeddings.  Small initial
# logits: the first loss is close to log(target_size).
BRANCH_GAIN, LOGIT_GAIN = 0.25, 0.3


def attention_specs(prefix, config):
    """Return the specs of the four projections of an attention layer: weights (D, D), and with config.bias biases (D,)."""
    D = config.d_model
    gains = dict(q=1.0, k=1.0, v=1.0, out=BRANCH_GAIN)
    biases = {f'{prefix}.{name}.bias': Spec((D,), init.zeros()) for name in gains} if config.bias else {}
    return {f'{prefix}.{name}.weight': Spec((D, D), init.xavier_normal(gain)) for name, gain in gains.items()} | biases


def feed_forward_specs(prefix, config):
    D, F = config.d_model, config.d_ff
    return {f'{prefix}.w1': Spec((F, D), init.xavier_normal()), f'{prefix}.b1': Spec((F,), init.zeros()),
            f'{prefix}.w2': Spec((D, F), init.xavier_normal(BRANCH_GAIN)), f'{prefix}.b2': Spec((D,), init.zeros())}


def norm_specs(prefix, config):
    return {f'{prefix}.weight': Spec((config.d_model,), init.ones()), f'{prefix}.bias': Spec((config.d_model,), init.zeros())}


def embedding_spec(words, config, sparse=True):
    # The embedding is scaled by sqrt(D) and so starts with variance 1; the positional encoding has variance 1/2.
    return Spec((words, config.d_model), init.normal(config.d_model ** -0.5), sparse=sparse)


def side_specs(side, words, layers, attentions, config):
    """Return the specs of the encoder or the decoder: an embedding, and per layer the `attentions` and a feed-forward layer."""
    specs = {} if config.tied else {f'{side}.embedding.weight': embedding_spec(words, config)}
    for layer in range(layers):
        block = f'{side}.{layer}'
        for attention in attentions:
            specs |= attention_specs(f'{block}.{attention}', config) | norm_specs(f'{block}.{attention}.norm', config)
        specs |= feed_forward_specs(f'{block}.feed_forward', config) | norm_specs(f'{block}.feed_forward.norm', config)
    return specs | (norm_specs(f'{side}.norm', config) if config.pre_norm else {})


def output_specs(config):
    shape = config.target_size, config.d_model
    weight = {} if config.tied else {'output.weight': Spec(shape, init.xavier_normal(LOGIT_GAIN))}
    return weight | {'output.bias': Spec((config.target_size,), init.zeros())}


def parameter_specs(config):
    """Return {name: Spec} of all trainable parameters."""
    # With one matrix, the output layer gives every row a gradient.
    shared = {'embedding.weight': embedding_spec(config.target_size, config, sparse=False)} if config.tied else {}
    return (shared | side_specs('encoder', config.source_size, config.layers, ['self_attention'], config)
            | side_specs('decoder', config.target_size, config.decoder_layers or config.layers,
                         ['self_attention', 'cross_attention'], config) | output_specs(config))


# ---- layers ------------------------------------------------------------------------------------------------------

def joins_products():
    """Return whether one product with several weights is faster than one product for each: on a GPU, where it saves launches.
    On the CPU attention would read longer rows, which costs more than the product saves (docs/speed.md, Transformer step)."""
    return not backend.current_device().is_host


def is_compact(config):
    """Return whether the weights are compact, for inference: see pyops.compute."""
    return getattr(config.ops, 'is_compact', False)


def joins_residuals(config):
    """Return whether the last product of a sublayer is one call with the residual sum and the layer norm after it: on a GPU,
    whose product adds its result to x, unless operands are rounded (docs/cuda_gemm.md, Residual connections)."""
    return joins_products() and config.ops is ops


def adds_in_place(config):
    """Return whether the last product of a sublayer adds its result to the residual sum: with rounded weights."""
    return is_compact(config) and config.ops.rounds


def has_step(attention):
    """Return whether Attention.step can be used, which copies no keys: on the CPU, without rounded operands."""
    return backend.current_device().is_host and type(attention) is ops.Attention


class Projections:
    """Linear layers with one input: one product if their weights can be joined without a copy and none of them rounds.

    x (N, D) -> a list of arrays (N, D), which may be columns of one array
    """

    def __init__(self, layers, params, prefix, names, join):
        self.layers, self.prefix, self.names = layers, prefix, names
        weight = params.joined([layer.weight.name for layer in layers]) if join and joins_products() else None
        bias = params.joined([layer.bias.name for layer in layers]) if weight and layers[0].bias else None
        joins = weight is not None and (bias is not None or layers[0].bias is None)
        self.joined = JoinedLinear(layers, weight, f'{prefix}.{names}', bias) if joins else None

    def forward(self, x, copies=None):
        """Return the list and ctx.   copies: of x, see forward_each()"""
        if self.joined:
            y, ctx = self.joined.forward(x)
            return self.joined.split(y), ctx
        results = forward_each(self.layers, x, copies=copies)
        return [y for y, _ in results], [ctx for _, ctx in results]

    def empty_gradients(self, like):
        """Return the gradients that backward() takes, and a list of the arrays in them, one for each layer, with the shape and
        dtype of `like`."""
        shape = like.shape
        if self.joined:
            dy = backend.empty_gradient((*shape[:-1], len(self.layers) * shape[-1]), f'{self.prefix}.d{self.names}',
                                        like.dtype)
            return dy, self.joined.split(dy)
        dy = [backend.empty_gradient(shape, f'{self.prefix}.d{name}', like.dtype) for name in self.names]
        return dy, dy

    def backward(self, dy, ctx, into=None):
        """Return dx, added to `into` if given."""
        if self.joined:
            return self.joined.backward(dy, ctx, into=into)
        for layer, its_dy, its_ctx in zip(self.layers, dy, ctx, strict=True):
            into = layer.backward(its_dy, its_ctx, into=into)
        return into


class MultiHeadAttention:
    """Multi-head attention with its four projections.  Queries come from x; keys and values from a memory, which may be x.

    x (N, D), memory (M, D), rows, memory_rows: the Packed rows of their sentences -> (N, D)
    crosses: keys and values always come from another memory.
    copies: of a memory that several layers share, see forward_each()
    """

    def __init__(self, params, prefix, config, causal=False, crosses=False):
        make, self.prefix, self.D = config.ops, prefix, config.d_model

        def of(name, part):
            return params[f'{prefix}.{name}.{part}']

        def layer(name):
            return make.Linear(of(name, 'weight'), of(name, 'bias') if config.bias else None)
        self.is_compact = is_compact(config)
        if self.is_compact:
            names = 'kv' if crosses else 'qkv'
            self.q = layer('q') if crosses else None
            self.qkv = self.kv = make.Projections([of(name, 'weight') for name in names],
                                                  [of(name, 'bias') for name in names if config.bias], f'{prefix}.{names}')
        else:
            self.q, self.k, self.v = layers = [layer(name) for name in 'qkv']
        self.out = layer('out')
        self.attention = make.Attention(config.heads, causal, config.dropout, key(params.seed, f'{prefix}.dropout'), prefix)
        self.pair = None
        if self.is_compact:
            return
        plain = type(self.attention) is ops.Attention and all(type(layer) is ops.Linear for layer in layers)
        self.qkv = Projections(layers, params, prefix, 'qkv', plain)            # of x, if it is the memory
        self.kv = Projections(layers[1:], params, prefix, 'kv', plain)          # of another memory
        if crosses and self.kv.joined:
            self.pair = LinearPair(self.q, self.kv.joined)                      # both in one launch

    def forward(self, x, memory, rows, memory_rows, step, into=None, copies=None):
        if memory is x:
            (q, k, v), c1 = self.qkv.forward(x)                         # (N, D) each
            c2 = None
        elif self.pair:
            (q, kv), c1 = self.pair.forward(x, memory)                  # (N, D), (M, 2 D)
            (k, v), c2 = self.kv.joined.split(kv), None
        else:
            q, c1      = self.q.forward(x)                              # (N, D)
            named = {} if self.is_compact else {'copies': copies}
            (k, v), c2 = self.kv.forward(memory, **named)               # (M, D) each
        a, c3 = self.attention.forward(q, k, v, step=step, q_rows=rows, k_rows=memory_rows)     # (N, D)
        y, c4 = self.project(a, into)                                   # (N, D)
        return y, [c1, c2, c3, c4]

    def project(self, a, into=None):
        """Apply the last projection.   into: see Sublayer"""
        return self.out.forward(a) if into is None else self.out.forward(a, into=into)

    def backward(self, dy, ctx, into=None, dmemory=None):
        """Return dx, added to `into` if given.  The gradient of the memory is added to dmemory, a MemoryGradient;
        dmemory=None: the memory was x, and its gradient is added to dx."""
        da = self.out.backward(dy, ctx.pop())
        if dmemory is None:
            dqkv, parts = self.qkv.empty_gradients(da)
            self.attention.backward(da, ctx.pop(), out=parts)
            ctx.pop()
            return self.qkv.backward(dqkv, ctx.pop(), into)
        dq = backend.empty_gradient(da.shape, f'{self.prefix}.dq', da.dtype)
        dkv, parts = self.kv.empty_gradients(dmemory.memory)
        self.attention.backward(da, ctx.pop(), out=(dq, *parts))
        c2, c1 = ctx.pop(), ctx.pop()
        if self.pair:
            dx, dmemory.sum = self.pair.backward(dq, dkv, c1, into=(into, dmemory.sum))
            return dx
        dmemory.sum = self.kv.backward(dkv, c2, dmemory.sum)
        return self.q.backward(dq, c1, into=into)

    # Decoding, without backward.  Keys and values are in two arrays, or with compact weights in the last columns of one.

    def empty_tokens(self, T, W):
        """Return arrays for the keys and values of T tokens of W hypotheses."""
        widths = [3 * self.D] if self.is_compact else [self.D] * 2
        return tuple(backend.empty((T, W, width), name='decoder.cache') for width in widths)

    def empty_memory(self, N):
        """Return arrays for the keys and values of another memory, (N, D)."""
        widths = [2 * self.D] if self.is_compact else [self.D] * 2
        return tuple(backend.empty((N, width), name='decoder.cache.source') for width in widths)

    def of_memory(self, memory, out, copies):
        """Compute the keys and values of another memory (N, D) in `out`, from empty_memory()."""
        if self.is_compact:
            self.kv.product(memory, out=out[0])
        else:
            forward_each((self.k, self.v), memory, out, copies)

    def append(self, x, tokens, state):
        """Compute the keys and values of the newest token of each hypothesis of a State, x (R, D), in `tokens`.   Return the
        queries (R, D)."""
        if state.places is not None:
            *new, q = ([self.qkv.product(x)] * 2 if self.is_compact else
                       [y for y, _ in forward_each((self.k, self.v, self.q), x)])
            for array, rows in zip(tokens, new, strict=True):
                append_rows(array, rows, state.places)
            return q[:, :self.D]
        t, R = state.t, len(x)
        places = [array[t:t + R, 0] if state.given else array[t, :R] for array in tokens]
        if self.is_compact:
            return self.qkv.forward(x, out=places[0])[0][0]
        return forward_each((self.k, self.v, self.q), x, (*places, None))[-1][0]

    def keys_and_values(self, arrays):
        return self.kv.split(arrays[0])[-2:] if self.is_compact else arrays


class MemoryGradient:
    """The gradient of the memory (M, D), a sum over the decoder blocks.   sum: None before the first of them"""

    def __init__(self, memory):
        self.memory, self.sum = memory, None


FIRST_SUBLAYER = 'self_attention'         # of any block


class Sum(NamedTuple):
    """The state between two pre-norm sublayers: the sum x (N, D) of all branches so far, and n (N, D), its layer norm."""
    x: np.ndarray
    n: np.ndarray


class Sublayer:
    """A layer f with a residual connection and layer norm.  Everything after f is one op.

    post-norm, as first published      y = norm(x + dropout(f(x)))
    pre-norm                           x = x + dropout(f(n));  n = norm(x), the input of the next sublayer: a Sum to a Sum
                                       with rounded weights (pyops.compute), f adds to x in place

    On a GPU the last product of f also computes the op.
    following: the prefix of the next sublayer, whose norm a pre-norm sublayer computes
    """

    def __init__(self, params, prefix, config, following):
        self.pre_norm, name = config.pre_norm, f'{prefix}.residual'
        norm = norm_of(params, following if config.pre_norm else prefix)
        self.residual = ResidualNorm(*norm, config.dropout, key(params.seed, name), residual=name)
        self.norm = LayerNorm(*norm) if config.pre_norm and adds_in_place(config) else None
        self.joins = joins_residuals(config)

    def forward(self, x, f, step):
        """Return y and ctx.  f(n) returns a branch and its ctx;  f(n, into) gives `into` to its last layer, and returns the
        result and ctx: compact layers add the branch to an array, others call a function in place of their product."""
        x, n = x if self.pre_norm else (x, x)
        if self.norm:
            x, c1 = f(n, x)
            return Sum(x, self.norm.forward(x)[0]), [c1, None]
        if self.joins:
            (y, c2), c1 = f(n, functools.partial(self.residual.forward_of_product, x, step))
        else:
            b, c1 = f(n)
            y, c2 = self.residual.forward(x, b, step)
        return Sum(c2.sum, y) if self.pre_norm else y, [c1, c2]

    def backward(self, dy, ctx, f_backward):
        """Return dx, of pre-norm sublayers a Sum of gradients.  f_backward(dbranch, ctx, into) returns dn.  Overwrites dy: x
        has two uses, whose gradients are added."""
        if self.pre_norm:
            dx, db = self.residual.backward(dy.n, ctx.pop(), into=dy.x)
            return Sum(dx, f_backward(db, ctx.pop(), None))
        dx, db = self.residual.backward(dy, ctx.pop())
        return f_backward(db, ctx.pop(), dx)


def norm_of(params, prefix):
    """Return the parameters of a layer norm."""
    return params[f'{prefix}.norm.weight'], params[f'{prefix}.norm.bias']


def sublayers(params, prefix, config, names, following):
    """Return the Sublayers of a block, in order.  following: the prefix of the first sublayer of the next
    block; for the last block, of the stack"""
    prefixes = [f'{prefix}.{name}' for name in names]
    return [Sublayer(params, at, config, then) for at, then in zip(prefixes, [*prefixes[1:], following], strict=True)]


class EncoderBlock:
    """Self-attention and a feed-forward layer.  causal: each token attends to itself and to earlier ones only.
    following: see sublayers()"""

    def __init__(self, params, prefix, config, following, causal=False):
        self.attention = MultiHeadAttention(params, f'{prefix}.self_attention', config, causal)
        self.feed_forward = feed_forward(params, f'{prefix}.feed_forward', config)
        self.first, self.second = sublayers(params, prefix, config, (FIRST_SUBLAYER, 'feed_forward'), following)

    def forward(self, x, rows, step):
        x, c1 = self.first.forward(x, lambda n, *into: self.attention.forward(n, n, rows, rows, step, *into), step)
        x, c2 = self.second.forward(x, self.feed_forward.forward, step)
        return x, [c1, c2]

    def backward(self, dx, ctx):
        dx = self.second.backward(dx, ctx.pop(), self.feed_forward.backward)
        return self.first.backward(dx, ctx.pop(), self.attention.backward)


class Cache(NamedTuple):
    """The keys and values in a decoder block, in the arrays of MultiHeadAttention: of the tokens so far, (T, W, .) each for at
    most W hypotheses, and of the source, (N, .) each.  spare: arrays like tokens, or None; reordered() writes to them, so
    tokens alternate between two sets of arrays and plans can be replayed."""
    tokens: tuple[np.ndarray, ...]
    source: tuple[np.ndarray, ...]
    spare: tuple[np.ndarray, ...] | None = None

    def reordered(self, parents, t):
        """Return a Cache of len(parents) hypotheses: hypothesis r has the first t tokens of parents[r]."""
        spare = self.spare
        if spare is None or spare[0].shape[1] != len(parents):
            spare = self._empty(len(parents))
        for new, old in zip(spare, self.tokens, strict=True):
            backend.gather_rows(new[:t], old[:t], parents)
        return self._replace(tokens=spare, spare=self.tokens if len(parents) == self.tokens[0].shape[1] else None)

    def _empty(self, W):
        return tuple(backend.empty((len(array), W, array.shape[2]), name='decoder.cache') for array in self.tokens)

    def widened(self, W, t):
        """Return a Cache for W hypotheses or more, with the same rows of the first t tokens."""
        before = self.tokens[0].shape[1]
        if W <= before:
            return self
        wider = self._empty(W)
        for new, old in zip(wider, self.tokens, strict=True):
            for s in range(t):
                backend.copy(new[s, :before], old[s])
        return self._replace(tokens=wider)


class DecoderBlock:
    def __init__(self, params, prefix, config, following):
        names = (FIRST_SUBLAYER, 'cross_attention', 'feed_forward')
        self.self_attention = MultiHeadAttention(params, f'{prefix}.self_attention', config, causal=True)
        self.cross_attention = MultiHeadAttention(params, f'{prefix}.cross_attention', config, crosses=True)
        self.feed_forward = feed_forward(params, f'{prefix}.feed_forward', config)
        self.first, self.second, self.third = sublayers(params, prefix, config, names, following)

    def forward(self, x, rows, step, memory, memory_rows, copies=None):
        x, c1 = self.first.forward(x, lambda n, *into: self.self_attention.forward(n, n, rows, rows, step, *into), step)
        x, c2 = self.second.forward(
            x, lambda n, into=None: self.cross_attention.forward(n, memory, rows, memory_rows, step, into, copies), step)
        x, c3 = self.third.forward(x, self.feed_forward.forward, step)
        return x, [c1, c2, c3]

    def backward(self, dx, ctx, dmemory):
        """Return dx, and add the gradient of the memory to dmemory, a MemoryGradient."""
        dx = self.third.backward(dx, ctx.pop(), self.feed_forward.backward)
        dx = self.second.backward(
            dx, ctx.pop(), lambda db, c, into: self.cross_attention.backward(db, c, into, dmemory))
        return self.first.backward(dx, ctx.pop(), self.self_attention.backward)

    def reserve(self, rows, tokens, num_steps):
        """Return an empty Cache for num_steps tokens of so many hypotheses, and for so many source tokens."""
        return Cache(self.self_attention.empty_tokens(num_steps, rows), self.cross_attention.empty_memory(tokens))

    def start(self, memory, cache, copies, at=0):
        """Compute the keys and values of source tokens (N, D) in a Cache, from token `at` on.   copies: of the source, see
        forward_each()"""
        self.cross_attention.of_memory(memory, tuple(array[at:at + len(memory)] for array in cache.source), copies)

    def next(self, x, cache, state):
        """Return the block's output for x (R, D) or a Sum, token state.t of the target; its keys and values are added to the
        cache.  With state.given: for R tokens of one hypothesis from state.t on.

        Without it R is a multiple of the number of sentences B, and row r belongs to sentence r % B.  So in cross-attention the
        hypotheses of a sentence have the same keys, stored once.
        """
        t, rows = state.t, state.memory_rows

        def look_back(n, *into):
            attention = self.self_attention
            q, (k, v) = attention.append(n, cache.tokens, state), attention.keys_and_values(cache.tokens)
            if state.positions is not None:
                a = attention.attention.step(q, k, v, len(k), state.index, positions=state.positions)
            elif state.given:
                a = attention.attention.step(q, k, v, t + len(n), causal=True)
            elif has_step(attention.attention):
                a = attention.attention.step(q, k, v, t + 1, state.index)
            else:
                a = attention.attention.forward(q[None], k[:t + 1], v[:t + 1])[0][0]
            return attention.project(a, *into)

        def look_at_source(n, *into):
            attention = self.cross_attention
            q, (k, v) = attention.q.forward(n)[0], attention.keys_and_values(cache.source)
            if has_step(attention.attention):
                a = attention.attention.step(q, k, v, index=state.sources, rows=rows)
            else:
                queries = q.reshape(-1, rows.sentences, q.shape[1])
                a = attention.attention.forward(queries, k, v, k_rows=rows)[0].reshape(q.shape)
            return attention.project(a, *into)

        x, _ = self.first.forward(x, look_back, None)
        x, _ = self.second.forward(x, look_at_source, None)
        return self.third.forward(x, self.feed_forward.forward, None)[0]


def feed_forward(params, prefix, config):
    return config.ops.FeedForward(*(params[f'{prefix}.{name}'] for name in ('w1', 'b1', 'w2', 'b2')),
                                  activation=config.activation)


class Inputs(NamedTuple):
    """The arguments of a block's forward(), kept instead of its ctx, which backward computes again."""
    arguments: tuple

    def context(self, block):
        return block.forward(*self.arguments)[1]


def run_block(block, arguments, recompute):
    """Return the output of a block and what context_of() needs: its ctx, or with recompute only its inputs."""
    if recompute:
        return block.forward(*arguments)[0], Inputs(arguments)      # the plan reuses the memory of the ctx for the next block
    return block.forward(*arguments)


def context_of(block, saved):
    """Return the ctx of a block for its backward(), computed again if run_block() has saved only the inputs."""
    return saved.context(block) if isinstance(saved, Inputs) else saved


class Stack:
    """An encoder or decoder: embedding plus positions, then blocks.  With pre_norm the first layer norm follows the embedding,
    and the last sublayer computes the final layer norm.

    block(params, prefix, config, following) makes a block, see sublayers()
    """

    def __init__(self, params, side, block, layers, positions, config):
        weight = params['embedding.weight' if config.tied else f'{side}.embedding.weight']
        self.embedding = config.ops.EmbeddingPositions(weight, positions, config.dropout, key(params.seed, f'{side}.dropout'))
        first = [f'{side}.{layer}.{FIRST_SUBLAYER}' for layer in range(layers)]
        self.blocks = [block(params, f'{side}.{layer}', config, following)
                       for layer, following in enumerate([*first[1:], side])]
        self.norm = LayerNorm(*norm_of(params, first[0])) if config.pre_norm else None

    def forward(self, sequences, *seen, step=None, recompute=False):
        """Return (N, D) and ctx.  sequences: Sequences of N tokens;  seen: arguments of the blocks' forward() after step;
        recompute: keep only the inputs of each block."""
        x, c = self.enter(sequences.ids, step, positions=sequences.positions)
        ctx = [c]
        for block in self.blocks:
            x, c = run_block(block, (x, sequences.rows, step, *seen), recompute)
            ctx.append(c)
        return self.leave(x), ctx

    def backward(self, dx, ctx, *dseen):
        """Add the gradients of all parameters.  Overwrites dx.  dseen: arguments of the blocks' backward()."""
        dx = Sum(None, dx) if self.norm else dx
        for block in reversed(self.blocks):
            dx = block.backward(dx, context_of(block, ctx.pop()), *dseen)
        c1, c2 = ctx.pop()
        self.embedding.backward(self.norm.backward(dx.n, c2, into=dx.x) if self.norm else dx, c1)

    def enter(self, ids, step=None, first=0, positions=None):
        """Embed ids (N,).  Return the input of the first block and ctx.  positions (N,): the tokens' positions in their
        sentences; None: first."""
        x, c1 = self.embedding.forward(ids, positions, step, first)
        if not self.norm:
            return x, (c1, None)
        n, c2 = self.norm.forward(x)
        return Sum(x, n), (c1, c2)

    def leave(self, x):
        """Return the output (N, D) of the stack from the output of the last block."""
        return x.n if self.norm else x


class State(NamedTuple):
    """Decoder state: number of tokens decoded, one Cache per block, the Packed rows of the sources, the number of hypotheses,
    the rows of the caches that hold their tokens, and the sentence of each hypothesis, (R,) int32, None for r % B (see
    Attention.step).   given: the next rows are successive tokens of the only hypothesis;  positions, places (R,) int32: of the
    next token of each hypothesis, and the row of the caches for its keys and values; None for t"""
    t: int
    caches: list[Cache]
    memory_rows: Packed
    hypotheses: int
    index: np.ndarray | None = None
    sources: np.ndarray | None = None
    given: bool = False
    positions: np.ndarray | None = None
    places: np.ndarray | None = None

    def part(self, hypotheses, sentences):
        """Return the State for the next tokens of so many hypotheses of so many sentences in the memory of this one, see
        Transformer.reserve."""
        rows = self.memory_rows._replace(offsets=self.memory_rows.offsets[:sentences + 1])
        return self._replace(memory_rows=rows, hypotheses=hypotheses, sources=self.sources[:hypotheses],
                             positions=self.positions[:hypotheses], places=self.places[:hypotheses])

    def alone(self, t, hypotheses):
        """Return the State for token t of the first hypotheses, one of each sentence, in the memory of this one."""
        return self.part(hypotheses, hypotheses)._replace(t=t, index=None, positions=None, places=None)


class Transformer:
    """An encoder, a decoder and an output layer that share one set of parameters.

    forward(batch, step, dloss=None) returns the mean loss (1,) and ctx; backward(ctx) adds to params.grads.
    batch: a pyops.text.pairs.Batch
    dloss (1,) is the gradient of the loss, None for 1.  With it forward() already adds the gradients of the output layer: zero
    params.grads before it, and call backward() once for each forward().
    recompute: backward() computes the activations of each block again instead of keeping them: less memory, the same bits
    """

    def __init__(self, config, seed=0, recompute=False):
        self.config, self.recompute = config, recompute
        self.params = p = Parameters(parameter_specs(config), seed)
        self.positions = Positions(config.d_model, config.positions, config.d_model ** 0.5, halves=config.halves)
        self.encoder = Stack(p, 'encoder', EncoderBlock, config.layers, self.positions, config)
        self.decoder = Stack(p, 'decoder', DecoderBlock, config.decoder_layers or config.layers, self.positions, config)
        self.output = config.ops.LinearCrossEntropy(p['embedding.weight' if config.tied else 'output.weight'], p['output.bias'],
                                                    PAD, config.smoothing, 'output')
        self.one = backend.put(np.ones(1, np.float32))       # the gradient of the loss
        self._reserved = None, (0, 0, 0)                     # of reserve()

    def forward(self, batch, step=None, gradients=True, dloss=None):
        """Return the loss and ctx.  step (1,) int64: number of the dropout masks, None for no dropout.
        gradients=False: evaluation only, backward() is not allowed."""
        self.params.round()
        dloss    = self.one if dloss is None else dloss
        again    = self.recompute and gradients
        m,    c1 = self.encoder.forward(batch.source, step=step, recompute=again)           # (N, D)
        h,    c2 = self.decoder.forward(batch.target, m, batch.source.rows, {}, step=step, recompute=again)     # (M, D)
        loss, c3 = self.output.forward(h, batch.labels, gradients, dloss=dloss)             # (1,)
        return loss, [c1, m, c2, dloss, c3]

    def backward(self, ctx):
        """Add to params.grads.  Empties ctx, so that saved activations are freed as early as possible."""
        c3 = ctx.pop()
        dh = self.output.backward(ctx.pop(), c3)
        c2, dm = ctx.pop(), MemoryGradient(ctx.pop())
        self.decoder.backward(dh, c2, dm)
        self.encoder.backward(dm.sum, ctx.pop())

    attends = True          # whether forced() returns weights of attention

    @backend.float32_activations()      # as in decoding
    def forced(self, source, target, align=False):
        """Decode given tokens.  source, target: Sequences; target is the labels shifted right after <bos>.

        Return h (N, D), the input of the output layer for each label; and with `align` the weights of the last decoder block's
        attention to the source, (B, heads, target.rows.longest, source.rows.longest), else None.
        """
        m, _   = self.encoder.forward(source)
        h, ctx = self.decoder.forward(target, m, source.rows, {})
        if not align:
            return h, None
        _, (c, _), _ = ctx[-1]                  # of the last block, its second sublayer, the branch before the residual sum
        _, _, c, _ = c
        return h, self.decoder.blocks[-1].cross_attention.attention.weights(c)

    @staticmethod
    def valid(ctx):
        """Return the number of labels that are not padding, (1,) int32.  Call it before backward()."""
        return ctx[-1].valid

    def arrays(self):
        """Return {name: array} of the arrays besides parameters that a plan must know."""
        return dict(one=self.one, positions=self.positions.table)

    def translate(self, source):
        """Translate source, Sequences of B >= 1 sentences, greedily.  Return at most num_steps tokens (., B) int32, <pad> after
        the end."""
        return greedy(self, source, self.config.num_steps)

    def decoding(self, num_steps=None):
        """Return a decoder equivalent to translate() but faster on repeated calls.  Valid while the weights are unchanged.
        num_steps: the largest number of tokens, at most config.num_steps, which is the default."""
        return Decoder(self, num_steps or self.config.num_steps)

    @backend.float32_activations()      # beam search and the caches copy states as float32
    def start(self, source, reserved=None):
        """Encode source, Sequences.  Return the State before the first token, in a State from reserve() if it is given."""
        B = source.rows.sentences
        if reserved is None:
            caches = [block.reserve(B, len(source.ids), self.config.num_steps) for block in self.decoder.blocks]
            state = State(0, caches, source.rows, B)
        else:
            state = reserved.alone(0, B)
            state.memory_rows.offsets[...], state.sources[...] = source.rows.offsets, np.arange(B)
        self.encode(source, state)
        return state

    @backend.float32_activations()
    def encode(self, source, state, at=0):
        """Encode source, Sequences, and compute its keys and values in the caches of a State, from source token `at` on."""
        memory, _ = self.encoder.forward(source)
        copies = {}
        for block, cache in zip(self.decoder.blocks, state.caches, strict=True):
            block.start(memory, cache, copies, at)

    def keep_sources(self, state, kept):
        """Move the keys and values of some sources of a State from reserve() to its front.   kept: their numbers, ascending"""
        offsets = state.memory_rows.offsets
        places = np.concatenate([np.arange(offsets[b], offsets[b + 1]) for b in kept] or [[]]).astype(int)
        for cache in state.caches:
            for array in cache.source:
                array[:len(places)] = array[places]
        offsets[1:len(kept) + 1] = np.cumsum(np.diff(offsets)[kept])

    def room(self, rows, tokens, sentences, longest):
        """Return a new State with room for so many hypotheses, source tokens and sentences of at most `longest` tokens."""
        steps = self.config.num_steps
        offsets, index, sources, positions, places = (
            backend.zeros(n, np.int32) for n in (sentences + 1, (steps, rows), rows, rows, rows))
        caches = [block.reserve(rows, tokens, steps) for block in self.decoder.blocks]
        return State(0, caches, Packed(offsets, longest), rows, index, sources, positions=positions, places=places)

    def reserve(self, rows, tokens, sentences, longest):
        """Return a State with room for searches of at most so many hypotheses, source tokens and sentences of at most `longest`
        tokens; and its room (rows, tokens, sentences).  Requires free_rows.

        All searches get the same object until one needs more room.  Their keys and values stay in its memory, where plans read
        them.
        """
        need, (state, room) = (rows, tokens, sentences), self._reserved
        if state is None or longest != state.memory_rows.longest or any(n > has for n, has in zip(need, room, strict=True)):
            room = tuple(max(n + n // 4 + 8, has) for n, has in zip(need, room, strict=True))
            self._reserved = self.room(*room, longest), room
        return self._reserved

    @backend.float32_activations()
    def next(self, word, state, parents=None, sources=None):
        """Decode one token.  word (R,) int32: the previous tokens.  Return h (R, D) for the output layer, and the next State.

        Only this token's row is computed; earlier keys and values are in the caches.
        parents (R,) int32: row r continues row parents[r] of the state.  None: row r continues row r, and the caches are
        updated in place.
        sources (R,) int32: row r belongs to sentence sources[r]; requires free_rows.  None: to the same sentence as before, in
        the first step to r % B, where R is a multiple of the number of sentences B.
        """
        if parents is not None:
            state = self.follow(state, parents)
        if sources is not None:
            state = state._replace(sources=sources)
        x, _ = self.decoder.enter(word, first=state.t, positions=state.positions)
        return self._decode(x, state), state._replace(t=state.t + 1)

    def _decode(self, x, state):
        for block, cache in zip(self.decoder.blocks, state.caches, strict=True):
            x = block.next(x, cache, state)
        return self.decoder.leave(x)

    @backend.float32_activations()
    def given(self, words, positions, state):
        """Decode the first n tokens of one sentence, which are given: words (n,) int32, each the previous token;
        positions (n,) int32: 0 to n - 1;  state: from start(), of one hypothesis.   Requires free_rows.

        Return h (n, D), with the bits of n calls of next().  The caches of the state then have their keys and values.
        """
        return self._decode(self.decoder.enter(words, positions=positions)[0], state._replace(given=True))

    def draft(self):
        """Return a Transformer with these weights in int8, for the tokens that a greedy decoder of one sentence checks; None if
        its weights are not packed float32 on the CPU."""
        if not is_compact(self.config) or self.config.ops.rounds or not self.free_rows:
            return None
        draft = Transformer(replace(self.config, ops=type(self.config.ops)('int8')), seed=None)
        draft.config.ops.pack(draft.params, self.params.arrays())
        for name, values in draft.params.arrays().items():
            values[...] = self.params[name].value
        return draft

    def twin(self):
        """Return a Transformer with these layers and weights that reserves its own memory, for searches in another thread."""
        twin = copy.copy(self)
        twin._reserved = None, (0, 0, 0)
        return twin

    def follow(self, state, parents):
        """Return the State in which hypothesis r continues hypothesis parents[r]."""
        t, R, caches = state.t, len(parents), state.caches
        if self.free_rows:
            return state._replace(caches=[cache.widened(R, t) for cache in caches], hypotheses=R,
                                  index=follow_parents(state.index, parents, t, state.hypotheses, 'decoder.index'))
        return state._replace(caches=[cache.reordered(parents, t) for cache in caches], hypotheses=R)

    @property
    def free_rows(self):
        """Whether next() takes sources: all attention layers of the decoder have a step that reads keys by index, without
        copies."""
        return all(has_step(layer.attention) for block in self.decoder.blocks
                   for layer in (block.self_attention, block.cross_attention))
