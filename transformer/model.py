"""A transformer encoder and decoder (Vaswani et al. 2017, arXiv:1706.03762).  forward() is a list of calls; backward() is
the same list reversed.

Sequences are time-major: (T, B) token ids, (T, B, D) activations, D = d_model.  Ops store nothing: each forward() returns a
ctx, which the caller passes to backward().  Where two gradients of one array meet, `into=` adds the second to the first.
"""
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pyops import backend, init, ops
from pyops.errors import UserError
from pyops.ops import Dropout, Embedding, LayerNorm, Positions, Residual, ResidualNorm, sequence_lengths
from pyops.ops.linear import JoinedLinear
from pyops.params import Parameters, Spec, key
from pyops.text.decoding import Decoder, greedy
from pyops.text.vocabulary import PAD

# The settings in which a checkpoint must agree with the model that loads it.
SIZES = ('d_model', 'd_ff', 'heads', 'layers', 'num_steps', 'positions', 'pre_norm')


@dataclass(frozen=True)
class Config:
    """Sizes and settings of the model."""
    source_size: int            # tokens in the source vocabulary
    target_size: int            # tokens in the target vocabulary
    d_model: int = 256
    d_ff: int = 64              # inner size of the feed-forward layers
    heads: int = 4              # attention heads; each gets d_model / heads columns
    layers: int = 2             # number of encoder blocks, and of decoder blocks
    dropout: float = 0.2        # applied to embeddings, attention weights and the output of each sublayer
    num_steps: int = 9          # sentences are truncated or padded to this number of tokens
    positions: int = 1000       # rows of the table of positional encodings: the largest num_steps
    pre_norm: bool = False      # layer norm before each sublayer instead of after its residual sum
    smoothing: float = 0.0      # label smoothing
    ops: object = ops           # source of the op classes with matrix products: pyops.ops or a quantization.Family

    def __post_init__(self):
        for name in ('source_size', 'target_size', 'd_model', 'd_ff', 'heads', 'layers', 'num_steps', 'positions'):
            if getattr(self, name) < 1:
                raise UserError(f'{name}: expected a whole number above 0, got {getattr(self, name)}')
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
    """Return the specs of the four projections of an attention layer, (D, D) each, without bias."""
    D = config.d_model
    gains = dict(q=1.0, k=1.0, v=1.0, out=BRANCH_GAIN)
    return {f'{prefix}.{name}.weight': Spec((D, D), init.xavier_normal(gain)) for name, gain in gains.items()}


def feed_forward_specs(prefix, config):
    D, F = config.d_model, config.d_ff
    return {f'{prefix}.w1': Spec((F, D), init.xavier_normal()), f'{prefix}.b1': Spec((F,), init.zeros()),
            f'{prefix}.w2': Spec((D, F), init.xavier_normal(BRANCH_GAIN)), f'{prefix}.b2': Spec((D,), init.zeros())}


def norm_specs(prefix, config):
    return {f'{prefix}.weight': Spec((config.d_model,), init.ones()), f'{prefix}.bias': Spec((config.d_model,), init.zeros())}


def side_specs(side, words, attentions, config):
    """Return the specs of the encoder or the decoder: an embedding, and per layer the `attentions` and a feed-forward layer."""
    # The embedding is scaled by sqrt(D) and so starts with variance 1; the positional encoding has variance 1/2.
    specs = {f'{side}.embedding.weight': Spec((words, config.d_model), init.normal(config.d_model ** -0.5), sparse=True)}
    for layer in range(config.layers):
        block = f'{side}.{layer}'
        for attention in attentions:
            specs |= attention_specs(f'{block}.{attention}', config) | norm_specs(f'{block}.{attention}.norm', config)
        specs |= feed_forward_specs(f'{block}.feed_forward', config) | norm_specs(f'{block}.feed_forward.norm', config)
    return specs | (norm_specs(f'{side}.norm', config) if config.pre_norm else {})


def output_specs(config):
    return {'output.weight': Spec((config.target_size, config.d_model), init.xavier_normal(LOGIT_GAIN)),
            'output.bias': Spec((config.target_size,), init.zeros())}


def parameter_specs(config):
    """Return {name: Spec} of all trainable parameters."""
    return (side_specs('encoder', config.source_size, ['self_attention'], config)
            | side_specs('decoder', config.target_size, ['self_attention', 'cross_attention'], config) | output_specs(config))


# ---- layers ------------------------------------------------------------------------------------------------------

def joins_products():
    """Return whether one product with several weights is faster than one product for each: on a GPU, where it saves launches.
    On the CPU attention would read longer rows, which costs more than the product saves (docs/speed.md, entry 98)."""
    return not backend.current_device().is_host


class Projections:
    """Linear layers with one input: one product if their weights can be joined without a copy and none of them rounds.

    x (T, B, D) -> a list of arrays (T, B, D), which may be columns of one array
    """

    def __init__(self, layers, params, prefix, names, join):
        self.layers, self.prefix, self.names = layers, prefix, names
        weight = params.joined([layer.weight.name for layer in layers]) if join and joins_products() else None
        self.joined = None if weight is None else JoinedLinear(layers, weight, f'{prefix}.{names}')

    def forward(self, x):
        if self.joined:
            y, ctx = self.joined.forward(x)
            return self.joined.split(y), ctx
        results = [layer.forward(x) for layer in self.layers]
        return [y for y, _ in results], [ctx for _, ctx in results]

    def empty_gradients(self, shape):
        """Return the gradients that backward() takes, and a list of the arrays in them, one for each layer with this shape."""
        if self.joined:
            dy = backend.empty_gradient((*shape[:-1], len(self.layers) * shape[-1]), f'{self.prefix}.d{self.names}')
            return dy, self.joined.split(dy)
        dy = [backend.empty_gradient(shape, f'{self.prefix}.d{name}') for name in self.names]
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

    x (Tq, B, D), memory (Tk, B, D), lengths (B,) int32 of the memory's sequences or None -> (Tq, B, D)
    """

    def __init__(self, params, prefix, config, causal=False):
        make = config.ops
        self.q, self.k, self.v, self.out = (make.Linear(params[f'{prefix}.{name}.weight']) for name in ('q', 'k', 'v', 'out'))
        self.attention = make.Attention(config.heads, causal, config.dropout, key(params.seed, f'{prefix}.dropout'), prefix)
        layers = [self.q, self.k, self.v]
        plain = type(self.attention) is ops.Attention and all(type(layer) is ops.Linear for layer in layers)
        self.qkv = Projections(layers, params, prefix, 'qkv', plain)            # of x, if it is the memory
        self.kv = Projections(layers[1:], params, prefix, 'kv', plain)          # of another memory
        self.prefix = prefix

    def forward(self, x, memory, lengths, step):
        if memory is x:
            (q, k, v), c1 = self.qkv.forward(x)                         # (T, B, D) each
            c2 = None
        else:
            q, c1      = self.q.forward(x)                              # (Tq, B, D)
            (k, v), c2 = self.kv.forward(memory)                        # (Tk, B, D) each
        a, c3 = self.attention.forward(q, k, v, lengths, step)          # (Tq, B, D)
        y, c4 = self.out.forward(a)                                     # (Tq, B, D)
        return y, [c1, c2, c3, c4]

    def backward(self, dy, ctx, into=None, dmemory=None):
        """Return dx, added to `into` if given.  The gradient of the memory is added to dmemory; dmemory=None: the memory
        was x, and its gradient is added to dx."""
        da = self.out.backward(dy, ctx.pop())
        if dmemory is None:
            dqkv, parts = self.qkv.empty_gradients(da.shape)
            self.attention.backward(da, ctx.pop(), out=parts)
            ctx.pop()
            return self.qkv.backward(dqkv, ctx.pop(), into)
        dq = backend.empty_gradient(da.shape, f'{self.prefix}.dq')
        dkv, parts = self.kv.empty_gradients(dmemory.shape)
        self.attention.backward(da, ctx.pop(), out=(dq, *parts))
        self.kv.backward(dkv, ctx.pop(), dmemory)
        return self.q.backward(dq, ctx.pop(), into=into)

    def look_up(self, x, k, v, lengths=None):
        """Attend with projected keys and values, as decoding does.  No backward."""
        q, _ = self.q.forward(x)
        a, _ = self.attention.forward(q, k, v, lengths)
        return self.out.forward(a)


class Sublayer:
    """A layer f with a residual connection and layer norm.

    post-norm, as first published      y = norm(x + dropout(f(x)))         everything after f is one op
    pre-norm                           y = x + dropout(f(norm(x)))
    """

    def __init__(self, params, prefix, config):
        self.pre_norm, name = config.pre_norm, f'{prefix}.residual'
        norm    = params[f'{prefix}.norm.weight'], params[f'{prefix}.norm.bias']
        dropout = config.dropout, key(params.seed, name)
        if self.pre_norm:
            self.norm, self.residual = LayerNorm(*norm), Residual(*dropout, name)
        else:
            self.residual = ResidualNorm(*norm, *dropout, residual=name)

    def forward(self, x, f, step):
        """Return y and ctx.  f(n) returns a branch and its ctx."""
        if self.pre_norm:
            n, c1 = self.norm.forward(x)
            b, c2 = f(n)
            y, c3 = self.residual.forward(x, b, step)
            return y, [c1, c2, c3]
        b, c1 = f(x)
        y, c2 = self.residual.forward(x, b, step)
        return y, [c1, c2]

    def backward(self, dy, ctx, f_backward):
        """Return dx.  f_backward(dbranch, ctx, into) returns dn.  Overwrites dy: x has two uses, whose gradients are added."""
        dx, db = self.residual.backward(dy, ctx.pop())
        dn     = f_backward(db, ctx.pop(), None if self.pre_norm else dx)
        return self.norm.backward(dn, ctx.pop(), into=dx) if self.pre_norm else dn


class EncoderBlock:
    """Self-attention and a feed-forward layer.  causal: each token attends to itself and to earlier ones only."""

    def __init__(self, params, prefix, config, causal=False):
        self.attention = MultiHeadAttention(params, f'{prefix}.self_attention', config, causal)
        self.feed_forward = feed_forward(params, f'{prefix}.feed_forward', config)
        self.first, self.second = (Sublayer(params, f'{prefix}.{name}', config) for name in ('self_attention', 'feed_forward'))

    def forward(self, x, lengths, step):
        x, c1 = self.first.forward(x, lambda n: self.attention.forward(n, n, lengths, step), step)
        x, c2 = self.second.forward(x, self.feed_forward.forward, step)
        return x, [c1, c2]

    def backward(self, dx, ctx):
        dx = self.second.backward(dx, ctx.pop(), self.feed_forward.backward)
        return self.first.backward(dx, ctx.pop(), self.attention.backward)


class Cache(NamedTuple):
    """Decoder cache of one block: keys and values of the tokens so far, (T, R, D) each for R hypotheses, and of the source,
    (T, B, D) each.  spare: two arrays like k and v, or None; reordered() writes to them, so k and v alternate between two pairs
    of arrays and plans can be replayed."""
    k: np.ndarray
    v: np.ndarray
    source_k: np.ndarray
    source_v: np.ndarray
    spare: tuple[np.ndarray, np.ndarray] | None = None

    def reordered(self, parents, t):
        """Return a Cache of len(parents) hypotheses: hypothesis r has the first t tokens of parents[r]."""
        T, R, D = self.k.shape
        spare = self.spare
        if spare is None or spare[0].shape[1] != len(parents):
            spare = tuple(backend.empty((T, len(parents), D), name=f'decoder.cache.{name}') for name in 'kv')
        for new, old in zip(spare, (self.k, self.v), strict=True):
            backend.gather_rows(new[:t], old[:t], parents)
        return self._replace(k=spare[0], v=spare[1], spare=(self.k, self.v) if len(parents) == R else None)

    def kept(self, sentences):
        """Return a Cache with the source's keys and values of these sentences only."""
        T, _, D = self.source_k.shape
        kept = [backend.empty((T, len(sentences), D), name='decoder.cache.source') for _ in range(2)]
        for new, old in zip(kept, (self.source_k, self.source_v), strict=True):
            backend.gather_rows(new, old, sentences)
        return self._replace(source_k=kept[0], source_v=kept[1])


class DecoderBlock:
    def __init__(self, params, prefix, config):
        names = ('self_attention', 'cross_attention', 'feed_forward')
        self.self_attention = MultiHeadAttention(params, f'{prefix}.self_attention', config, causal=True)
        self.cross_attention = MultiHeadAttention(params, f'{prefix}.cross_attention', config)
        self.feed_forward = feed_forward(params, f'{prefix}.feed_forward', config)
        self.first, self.second, self.third = (Sublayer(params, f'{prefix}.{name}', config) for name in names)

    def forward(self, x, memory, lengths, step):
        # No lengths for the target: its padding comes last, and the causal mask hides it from real tokens.
        x, c1 = self.first.forward(x, lambda n: self.self_attention.forward(n, n, None, step), step)
        x, c2 = self.second.forward(x, lambda n: self.cross_attention.forward(n, memory, lengths, step), step)
        x, c3 = self.third.forward(x, self.feed_forward.forward, step)
        return x, [c1, c2, c3]

    def backward(self, dx, ctx, dmemory):
        """Return dx, and add the gradient of the memory to dmemory."""
        dx = self.third.backward(dx, ctx.pop(), self.feed_forward.backward)
        dx = self.second.backward(
            dx, ctx.pop(), lambda db, c, into: self.cross_attention.backward(db, c, into, dmemory))
        return self.first.backward(dx, ctx.pop(), self.self_attention.backward)

    def start(self, memory, num_steps):
        """Return a Cache for num_steps tokens: source keys and values computed, target keys and values empty."""
        return Cache(backend.empty((num_steps, *memory.shape[1:])), backend.empty((num_steps, *memory.shape[1:])),
                     self.cross_attention.k.forward(memory)[0], self.cross_attention.v.forward(memory)[0])

    def next(self, x, t, cache, lengths):
        """Return the block's output for x (1, R, D), token t of the target; its keys and values are added to the cache.

        R is a multiple of the number of sentences B, and row r belongs to sentence r % B.  So in cross-attention the hypotheses
        of a sentence are queries (R / B, B, D) with the same keys, of which there is one copy.
        """
        def look_back(n):
            backend.copy(cache.k[t], self.self_attention.k.forward(n)[0])
            backend.copy(cache.v[t], self.self_attention.v.forward(n)[0])
            return self.self_attention.look_up(n, cache.k[:t + 1], cache.v[:t + 1])

        x, _ = self.first.forward(x, look_back, None)
        def look_at_source(n):
            _, R, D = n.shape
            B = cache.source_k.shape[1]
            y, c = self.cross_attention.look_up(n.reshape(R // B, B, D), cache.source_k, cache.source_v, lengths)
            return y.reshape(1, R, D), c

        x, _ = self.second.forward(x, look_at_source, None)
        return self.third.forward(x, self.feed_forward.forward, None)[0]


def feed_forward(params, prefix, config):
    return config.ops.FeedForward(*(params[f'{prefix}.{name}'] for name in ('w1', 'b1', 'w2', 'b2')))


class Stack:
    """An encoder or decoder: embedding plus positions, then blocks, then, with pre_norm, a final layer norm (the output of
    a pre-norm block is an unnormalised sum)."""

    def __init__(self, params, side, block, positions, config):
        self.embedding = Embedding(params[f'{side}.embedding.weight'])
        self.positions = positions
        self.dropout = Dropout(config.dropout, key(params.seed, f'{side}.dropout'), f'{side}.dropout')
        self.blocks = [block(params, f'{side}.{layer}', config) for layer in range(config.layers)]
        self.norm = LayerNorm(params[f'{side}.norm.weight'], params[f'{side}.norm.bias']) if config.pre_norm else None

    def forward(self, ids, *seen, step=None):
        """Return (T, B, D) and ctx.  ids (T, B); seen: arguments of the blocks' forward() between x and step."""
        x, c = self.enter(ids, step)
        ctx = [c]
        for block in self.blocks:
            x, c = block.forward(x, *seen, step)
            ctx.append(c)
        x, c = self.leave(x)
        return x, [*ctx, c]

    def backward(self, dx, ctx, *dseen):
        """Add the gradients of all parameters.  Overwrites dx.  dseen: gradient arrays to which the blocks add."""
        normed = ctx.pop()
        dx = self.norm.backward(dx, normed) if normed else dx
        for block in reversed(self.blocks):
            dx = block.backward(dx, ctx.pop(), *dseen)
        c1, c2, dropped = ctx.pop()
        dx = self.dropout.backward(dx, dropped) if dropped else dx
        de = self.positions.backward(dx, c2)
        self.embedding.backward(de, c1)

    def enter(self, ids, step=None, first=0):
        """Embed ids (T, B), tokens first, first + 1, ... of their sentences.  Return (T, B, D) and ctx."""
        e, c1 = self.embedding.forward(ids)
        x, c2 = self.positions.forward(e, first)
        x, c3 = (x, None) if step is None else self.dropout.forward(x, step)
        return x, [c1, c2, c3]

    def leave(self, x):
        return self.norm.forward(x) if self.norm else (x, None)


class State(NamedTuple):
    """Decoder state: number of tokens decoded, one Cache per block, and the lengths of the sources."""
    t: int
    caches: list[Cache]
    lengths: np.ndarray


class Transformer:
    """An encoder, a decoder and an output layer that share one set of parameters.

    forward(source, target, labels, step) returns the mean loss (1,) and ctx; backward(ctx) adds to params.grads.
    The loss has gradient 1, so forward() already adds the gradients of the output layer: zero params.grads before it, and call
    backward() once for each forward().
    source, target, labels (T, B) int32: labels are the expected tokens, target is labels shifted right after <bos>.
    """

    def __init__(self, config, seed=0):
        self.config = config
        self.params = p = Parameters(parameter_specs(config), seed)
        self.positions = Positions(config.d_model, config.positions, config.d_model ** 0.5)
        self.encoder = Stack(p, 'encoder', EncoderBlock, self.positions, config)
        self.decoder = Stack(p, 'decoder', DecoderBlock, self.positions, config)
        self.output = config.ops.LinearCrossEntropy(p['output.weight'], p['output.bias'], PAD, config.smoothing)
        self.one = backend.put(np.ones(1, np.float32))       # the gradient of the loss

    def forward(self, source, target, labels, step=None, gradients=True):
        """Return the loss and ctx.  step (1,) int64: number of the dropout masks, None for no dropout.
        gradients=False: evaluation only, backward() is not allowed."""
        lengths  = sequence_lengths(source, PAD)                            # (B,)
        m,    c1 = self.encoder.forward(source, lengths, step=step)         # (T, B, D)
        h,    c2 = self.decoder.forward(target, m, lengths, step=step)      # (T, B, D)
        loss, c3 = self.output.forward(h, labels, gradients, dloss=self.one)    # (1,)
        return loss, [c1, m, c2, c3]

    def backward(self, ctx):
        """Add to params.grads.  Empties ctx, so that saved activations are freed as early as possible."""
        dh = self.output.backward(self.one, ctx.pop())
        c2, m = ctx.pop(), ctx.pop()
        dm = backend.empty_gradient(m.shape, 'encoder.dx')
        backend.launch('fill', dm, dm.size, 0.0)        # every decoder block read m and adds its gradient here
        self.decoder.backward(dh, c2, dm)
        self.encoder.backward(dm, ctx.pop())

    @staticmethod
    def valid(ctx):
        """Return the number of labels that are not padding, (1,) int32.  Call it before backward()."""
        return ctx[-1].valid

    def arrays(self):
        """Return {name: array} of the arrays besides parameters that a plan must know."""
        return dict(one=self.one, positions=self.positions.table)

    def translate(self, source):
        """Translate source (T, B), B >= 1, greedily.  Return at most num_steps tokens (., B) int32, <pad> after <eos>."""
        return greedy(self, source, self.config.num_steps)

    def decoding(self, num_steps=None):
        """Return a decoder equivalent to translate() but faster on repeated calls.  Valid while the weights are unchanged.
        num_steps: the largest number of tokens, at most config.num_steps, which is the default."""
        return Decoder(self, num_steps or self.config.num_steps)

    def start(self, source):
        """Encode source (T, B).  Return the State before the first token."""
        lengths = sequence_lengths(source, PAD)
        memory, _ = self.encoder.forward(source, lengths)
        return State(0, [block.start(memory, self.config.num_steps) for block in self.decoder.blocks], lengths)

    def next(self, word, state, parents=None):
        """Decode one token.  word (R,) int32: the previous tokens.  Return h (R, D) for the output layer, and the next State.

        Only this token's row is computed; earlier keys and values are in the caches.
        parents (R,) int32: row r continues row parents[r] of the state; R is a multiple of the number of sentences B, and row r
        belongs to sentence r % B.  None: row r continues row r, and the caches are updated in place.
        """
        if parents is not None:
            state = state._replace(caches=[cache.reordered(parents, state.t) for cache in state.caches])
        x, _ = self.decoder.enter(word[None], first=state.t)
        for block, cache in zip(self.decoder.blocks, state.caches, strict=True):
            x = block.next(x, state.t, cache, state.lengths)
        h, _ = self.decoder.leave(x)
        return h[0], state._replace(t=state.t + 1)

    def keep(self, state, sentences):
        """Return a State without the other sentences, for a call of next() with parents.  sentences (B',) int32 in host memory,
        ascending."""
        lengths = backend.put(backend.get(state.lengths)[sentences])
        sentences = backend.put(sentences)
        return state._replace(caches=[cache.kept(sentences) for cache in state.caches], lengths=lengths)
