"""A transformer encoder and decoder (Vaswani et al. 2017, arXiv:1706.03762): forward is a list of calls, backward the
same list reversed.

Sequences are time-major: (T, B) token ids, (T, B, D) activations, D = d_model.  Every ctx is kept by the caller, not by
an op.  A gradient that meets another is added into it: `into=` hands the array on.
"""
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pyops import backend, init, ops
from pyops.errors import UserError
from pyops.ops import Dropout, Embedding, LayerNorm, Positions, Residual, sequence_lengths
from pyops.params import Parameters, Spec, key
from pyops.text.decoding import Decoder, greedy
from pyops.text.vocabulary import PAD

# what a checkpoint must have in common with the model that it is loaded into
SIZES = ('d_model', 'd_ff', 'heads', 'layers', 'num_steps', 'positions', 'pre_norm')


@dataclass(frozen=True)
class Config:
    """Sizes and settings of the model."""
    source_size: int            # words of the source vocabulary
    target_size: int            # words of the target vocabulary
    d_model: int = 256
    d_ff: int = 64              # inner size of the feed-forward layers
    heads: int = 4              # of each attention; each gets d_model / heads columns
    layers: int = 2             # blocks of the encoder, and of the decoder
    dropout: float = 0.2        # of embeddings, of attention's weights, and of each sublayer before it is added
    num_steps: int = 9          # tokens a sentence is cut or padded to
    positions: int = 1000       # the longest sentence that has positions
    pre_norm: bool = False      # layer norm before each sublayer instead of after its residual sum
    smoothing: float = 0.0      # of the labels
    ops: object = ops           # what has matrix products is made from it: pyops.ops, or a family of pyops.quantization

    def __post_init__(self):
        for name in ('source_size', 'target_size', 'd_model', 'd_ff', 'heads', 'layers', 'num_steps', 'positions'):
            if getattr(self, name) < 1:
                raise UserError(f'{name}: want a whole number above 0, got {getattr(self, name)}')
        if self.d_model % self.heads:
            raise UserError(f'--heads {self.heads}: want a divisor of --d-model {self.d_model}, since heads share it evenly')
        if self.num_steps > self.positions:
            raise UserError(f'--num-steps {self.num_steps}: want at most --positions {self.positions}; '
                            'give shorter sentences or more positions')


# ---- parameters --------------------------------------------------------------------------------------------------

# What a sublayer adds to its input begins small, so that the first steps see through the blocks to the words; and so do
# the logits, so that the loss begins at the logarithm of the number of words.
BRANCH_GAIN, LOGIT_GAIN = 0.25, 0.3


def attention_specs(prefix, config):
    """The four projections of an attention, (D, D) each, without bias."""
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
    """All of the encoder or the decoder: its embedding, and a block of `attentions` and a feed-forward layer a layer."""
    # times sqrt(D), the embedding of a word begins with variance 1, as its position's code has variance 1/2
    specs = {f'{side}.embedding.weight': Spec((words, config.d_model), init.normal(config.d_model ** -0.5), sparse=True)}
    for layer in range(config.layers):
        block = f'{side}.{layer}'
        for attention in attentions:
            specs |= attention_specs(f'{block}.{attention}', config) | norm_specs(f'{block}.{attention}.norm', config)
        specs |= feed_forward_specs(f'{block}.feed_forward', config) | norm_specs(f'{block}.feed_forward.norm', config)
    return specs | (norm_specs(f'{side}.norm', config) if config.pre_norm else {})


def parameter_specs(config):
    """name -> shape and initial value of everything that is learned."""
    return (side_specs('encoder', config.source_size, ['self_attention'], config)
            | side_specs('decoder', config.target_size, ['self_attention', 'cross_attention'], config)
            | {'output.weight': Spec((config.target_size, config.d_model), init.xavier_normal(LOGIT_GAIN)),
               'output.bias': Spec((config.target_size,), init.zeros())})


# ---- layers ------------------------------------------------------------------------------------------------------

class MultiHeadAttention:
    """Queries from x, keys and values from a memory, which may be x; attention; a projection of what it found.

    x (Tq, B, D), memory (Tk, B, D), lengths (B,) int32 of the memory's sentences or None -> (Tq, B, D)
    """

    def __init__(self, params, prefix, config, causal=False):
        make = config.ops
        self.q, self.k, self.v, self.out = (make.Linear(params[f'{prefix}.{name}.weight']) for name in ('q', 'k', 'v', 'out'))
        self.attention = make.Attention(config.heads, causal, config.dropout, key(params.seed, f'{prefix}.dropout'), prefix)

    def forward(self, x, memory, lengths, step):
        q, c1 = self.q.forward(x)                                       # (Tq, B, D)
        k, c2 = self.k.forward(memory)                                  # (Tk, B, D)
        v, c3 = self.v.forward(memory)                                  # (Tk, B, D)
        a, c4 = self.attention.forward(q, k, v, lengths, step)          # (Tq, B, D)
        y, c5 = self.out.forward(a)                                     # (Tq, B, D)
        return y, [c1, c2, c3, c4, c5]

    def backward(self, dy, ctx, into=None, dmemory=None):
        """-> dx, added into `into` where it is given.  The gradient of the memory is added into dmemory; None: the
        memory was x, and its gradient is a part of dx."""
        da         = self.out.backward(dy, ctx.pop())
        dq, dk, dv = self.attention.backward(da, ctx.pop())
        c3, c2, c1 = ctx.pop(), ctx.pop(), ctx.pop()
        dx         = self.q.backward(dq, c1, into=into)
        dmemory    = dx if dmemory is None else dmemory
        self.k.backward(dk, c2, into=dmemory)
        self.v.backward(dv, c3, into=dmemory)
        return dx

    def look_up(self, x, k, v, lengths=None):
        """Forward without gradients on keys and values that are there already."""
        q, _ = self.q.forward(x)
        a, _ = self.attention.forward(q, k, v, lengths)
        return self.out.forward(a)


class Sublayer:
    """A layer f in a residual connection with layer norm.

    post-norm, as first published      y = norm(x + dropout(f(x)))
    pre-norm                           y = x + dropout(f(norm(x)))
    """

    def __init__(self, params, prefix, config):
        self.pre_norm = config.pre_norm
        self.norm = LayerNorm(params[f'{prefix}.norm.weight'], params[f'{prefix}.norm.bias'])
        name = f'{prefix}.residual'
        self.residual = Residual(config.dropout, key(params.seed, name), name)

    def forward(self, x, f, step):
        """f(n) -> branch, ctx."""
        if self.pre_norm:
            n, c1 = self.norm.forward(x)
            b, c2 = f(n)
            y, c3 = self.residual.forward(x, b, step)
        else:
            b, c1 = f(x)
            r, c2 = self.residual.forward(x, b, step)
            y, c3 = self.norm.forward(r)
        return y, [c1, c2, c3]

    def backward(self, dy, ctx, f_backward):
        """f_backward(dbranch, ctx, into) -> dn.  Uses up dy: x reached y in two ways, and their gradients are added."""
        if self.pre_norm:
            dx, db = self.residual.backward(dy, ctx.pop())
            dn     = f_backward(db, ctx.pop(), None)
            return self.norm.backward(dn, ctx.pop(), into=dx)
        dr     = self.norm.backward(dy, ctx.pop())
        dx, db = self.residual.backward(dr, ctx.pop())
        return f_backward(db, ctx.pop(), dx)


class EncoderBlock:
    def __init__(self, params, prefix, config):
        self.attention = MultiHeadAttention(params, f'{prefix}.self_attention', config)
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
    """What decoding keeps of one block: keys and values of the words so far and of the source, (T, B, D) each."""
    k: np.ndarray
    v: np.ndarray
    source_k: np.ndarray
    source_v: np.ndarray


class DecoderBlock:
    def __init__(self, params, prefix, config):
        names = ('self_attention', 'cross_attention', 'feed_forward')
        self.self_attention = MultiHeadAttention(params, f'{prefix}.self_attention', config, causal=True)
        self.cross_attention = MultiHeadAttention(params, f'{prefix}.cross_attention', config)
        self.feed_forward = feed_forward(params, f'{prefix}.feed_forward', config)
        self.first, self.second, self.third = (Sublayer(params, f'{prefix}.{name}', config) for name in names)

    def forward(self, x, memory, lengths, step):
        # the words of a target need no lengths: its padding stands at the end, where no word may look
        x, c1 = self.first.forward(x, lambda n: self.self_attention.forward(n, n, None, step), step)
        x, c2 = self.second.forward(x, lambda n: self.cross_attention.forward(n, memory, lengths, step), step)
        x, c3 = self.third.forward(x, self.feed_forward.forward, step)
        return x, [c1, c2, c3]

    def backward(self, dx, ctx, dmemory):
        """-> dx; the gradient of the memory is added into dmemory."""
        dx = self.third.backward(dx, ctx.pop(), self.feed_forward.backward)
        dx = self.second.backward(
            dx, ctx.pop(), lambda db, c, into: self.cross_attention.backward(db, c, into, dmemory))
        return self.first.backward(dx, ctx.pop(), self.self_attention.backward)

    def start(self, memory, num_steps):
        """-> Cache for decoding num_steps words: of the source computed once and for all, of the words still empty."""
        return Cache(backend.empty((num_steps, *memory.shape[1:])), backend.empty((num_steps, *memory.shape[1:])),
                     self.cross_attention.k.forward(memory)[0], self.cross_attention.v.forward(memory)[0])

    def next(self, x, t, cache, lengths):
        """x (1, B, D), word t of the target -> the block's output for it; its keys and values join the cache."""
        def look_back(n):
            backend.copy(cache.k[t], self.self_attention.k.forward(n)[0])
            backend.copy(cache.v[t], self.self_attention.v.forward(n)[0])
            return self.self_attention.look_up(n, cache.k[:t + 1], cache.v[:t + 1])

        x, _ = self.first.forward(x, look_back, None)
        x, _ = self.second.forward(
            x, lambda n: self.cross_attention.look_up(n, cache.source_k, cache.source_v, lengths), None)
        return self.third.forward(x, self.feed_forward.forward, None)[0]


def feed_forward(params, prefix, config):
    return config.ops.FeedForward(*(params[f'{prefix}.{name}'] for name in ('w1', 'b1', 'w2', 'b2')))


class Stack:
    """Encoder or decoder: embeddings with positions at the bottom, blocks, and in pre-norm, where what comes out of a
    block is a bare sum, a layer norm at the top."""

    def __init__(self, params, side, block, positions, config):
        self.embedding = Embedding(params[f'{side}.embedding.weight'])
        self.positions = positions
        self.dropout = Dropout(config.dropout, key(params.seed, f'{side}.dropout'), f'{side}.dropout')
        self.blocks = [block(params, f'{side}.{layer}', config) for layer in range(config.layers)]
        self.norm = LayerNorm(params[f'{side}.norm.weight'], params[f'{side}.norm.bias']) if config.pre_norm else None

    def forward(self, ids, *seen, step=None):
        """ids (T, B), seen: what a block's forward takes between x and step -> (T, B, D), ctx."""
        x, c = self.enter(ids, step)
        ctx = [c]
        for block in self.blocks:
            x, c = block.forward(x, *seen, step)
            ctx.append(c)
        x, c = self.leave(x)
        return x, [*ctx, c]

    def backward(self, dx, ctx, *dseen):
        """Uses dx up.  dseen: the gradients that blocks add to."""
        normed = ctx.pop()
        dx = self.norm.backward(dx, normed) if normed else dx
        for block in reversed(self.blocks):
            dx = block.backward(dx, ctx.pop(), *dseen)
        c1, c2, dropped = ctx.pop()
        dx = self.dropout.backward(dx, dropped) if dropped else dx
        de = self.positions.backward(dx, c2)
        self.embedding.backward(de, c1)

    def enter(self, ids, step=None, first=0):
        """ids (T, B), the words `first`, first + 1, ... of their sentences -> (T, B, D), ctx."""
        e, c1 = self.embedding.forward(ids)
        x, c2 = self.positions.forward(e, first)
        x, c3 = (x, None) if step is None else self.dropout.forward(x, step)
        return x, [c1, c2, c3]

    def leave(self, x):
        return self.norm.forward(x) if self.norm else (x, None)


class State(NamedTuple):
    """Where decoding stands: how many words were said, a Cache a block, the lengths of the sources."""
    t: int
    caches: list[Cache]
    lengths: np.ndarray


class Transformer:
    """Encoder, decoder and output layer over one set of parameters.

    forward(source, target, labels, step) -> loss (1,), ctx;  backward(ctx) adds to params.grads.
    source, target, labels (T, B) int32: labels are what to say, target the same shifted right behind <bos>.
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
        """step (1,) int64 numbers the dropout masks; None: no dropout.  gradients False: for evaluation, no backward."""
        lengths  = sequence_lengths(source, PAD)                            # (B,)
        m,    c1 = self.encoder.forward(source, lengths, step=step)         # (T, B, D)
        h,    c2 = self.decoder.forward(target, m, lengths, step=step)      # (T, B, D)
        loss, c3 = self.output.forward(h, labels, gradients)                # (1,)
        return loss, [c1, m, c2, c3]

    def backward(self, ctx):
        """Adds to params.grads and uses ctx up, so that what a layer saved can go as soon as it has served."""
        dh = self.output.backward(self.one, ctx.pop())
        c2, m = ctx.pop(), ctx.pop()
        dm = backend.empty(m.shape, name='encoder.dx')
        backend.launch('fill', dm, dm.size, 0.0)        # every block of the decoder looked at m, and adds to this
        self.decoder.backward(dh, c2, dm)
        self.encoder.backward(dm, ctx.pop())

    @staticmethod
    def valid(ctx):
        """How many labels of that forward pass were not padding, (1,) int32; to be asked for before backward."""
        return ctx[-1].valid

    def arrays(self):
        """What it reads beside its parameters, by name, for a plan."""
        return dict(one=self.one, positions=self.positions.table)

    def translate(self, source):
        """Greedy decoding: source (T, B), B >= 1 -> (at most num_steps, B) int32 token ids, <pad> after <eos>."""
        return greedy(self, source, self.config.num_steps)

    def decoding(self):
        """-> decode(source), which is `translate`, sooner from call to call, for as long as the weights stay as they are."""
        return Decoder(self, self.config.num_steps)

    def start(self, source):
        """Read the sources (T, B) -> the State before the first word."""
        lengths = sequence_lengths(source, PAD)
        memory, _ = self.encoder.forward(source, lengths)
        return State(0, [block.start(memory, self.config.num_steps) for block in self.decoder.blocks], lengths)

    def next(self, word, state):
        """word (B,) int32, the last one said -> h (B, D), from which `output` predicts the next, and the State after it.

        Only this word's row is computed; what it looks back at stands in the caches, which are written in place.
        """
        x, _ = self.decoder.enter(word[None], first=state.t)
        for block, cache in zip(self.decoder.blocks, state.caches, strict=True):
            x = block.next(x, state.t, cache, state.lengths)
        h, _ = self.decoder.leave(x)
        return h[0], state._replace(t=state.t + 1)
