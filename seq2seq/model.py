"""A deep GRU encoder and decoder, with or without attention.  forward() is a list of calls; backward() is the list reversed.

Sentences are packed: (N,) token ids, (N, H) activations, with a row for each token of the batch.  Ops store nothing: each
forward() returns a ctx, which the caller passes to backward().
"""
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pyops import backend, init, ops
from pyops.errors import UserError
from pyops.ops import ConcatContext, Dropout, Residual
from pyops.ops.packed import Packed
from pyops.params import Parameters, Spec, key
from pyops.text.decoding import Decoder, greedy
from pyops.text.vocabulary import PAD

# The settings in which a checkpoint must agree with the model that loads it.
SIZES = ('embedding', 'hidden', 'layers', 'num_steps', 'reset_before', 'attention', 'bidirectional')
# Settings of checkpoints that were written before these settings existed.
OFF = dict(attention=0, bidirectional=False)


@dataclass(frozen=True)
class Config:
    """Sizes and settings of the model."""
    source_size: int            # tokens in the source vocabulary
    target_size: int            # tokens in the target vocabulary
    embedding: int = 256
    hidden: int = 256
    layers: int = 2
    dropout: float = 0.2
    num_steps: int = 9          # sentences are truncated to this number of tokens
    sigmoid_gain: float = 1.0   # Xavier gain of weights that feed a sigmoid
    tanh_gain: float = 4.0      # Xavier gain of weights that feed a tanh
    reset_before: bool = False  # apply the reset gate before the recurrent product instead of after it
    attention: int = 0          # heads of the decoder's attention to the source, 0: none
    bidirectional: bool = False     # half of the bottom encoder layer's units read the sentence from its end
    smoothing: float = 0.0      # label smoothing
    ops: object = ops           # source of the op classes with matrix products: pyops.ops or a quantization.Family

    def __post_init__(self):
        for name in ('source_size', 'target_size', 'embedding', 'hidden', 'layers', 'num_steps'):
            if getattr(self, name) < 1:
                raise UserError(f'{name}: expected a whole number above 0, got {getattr(self, name)}')
        if self.attention < 0 or self.attention and self.hidden % self.attention:
            raise UserError(f'attention: expected a number of heads that divides --hidden {self.hidden}, or 0 for none, '
                            f'got {self.attention}')
        if self.bidirectional and self.hidden % 2:
            raise UserError(f'bidirectional: expected an even --hidden, got {self.hidden}')


def gru_specs(prefix, inputs, config, H=None):
    """Return the specs of the four parameters of one GRU layer.  Gates are stacked in the order r, z, n.  H: default hidden"""
    sigmoid, tanh = init.xavier_normal(config.sigmoid_gain), init.xavier_normal(config.tanh_gain)
    weight, H = init.stacked(sigmoid, sigmoid, tanh), H or config.hidden
    return {f'{prefix}.w_ih': Spec((3 * H, inputs), weight), f'{prefix}.w_hh': Spec((3 * H, H), weight),
            f'{prefix}.b_ih': Spec((3 * H,), init.zeros()), f'{prefix}.b_hh': Spec((3 * H,), init.zeros())}


def parameter_specs(config):
    """Return {name: Spec} of all trainable parameters."""
    E, H = config.embedding, config.hidden
    specs = {'encoder.embedding.weight': Spec((config.source_size, E), init.uniform(-0.1, 0.1), sparse=True)}
    for layer in range(config.layers):
        if config.bidirectional and not layer:
            for direction in ('forward', 'reverse'):
                specs |= gru_specs(f'encoder.rnn.0.{direction}', E, config, H // 2)
        else:
            specs |= gru_specs(f'encoder.rnn.{layer}', H if layer else E, config)
    specs |= {'decoder.embedding.weight': Spec((config.target_size, E), init.uniform(-0.1, 0.1), sparse=True)}
    for layer in range(config.layers):
        specs |= gru_specs(f'decoder.rnn.{layer}', H if layer else E + H * (not config.attention), config)
    if config.attention:
        specs |= {f'attention.{name}.weight': Spec((H, H), init.xavier_normal()) for name in ('query', 'output')}
    return specs | {'output.weight': Spec((config.target_size, H), init.xavier_normal()),
                    'output.bias': Spec((config.target_size,), init.zeros())}


class Bidirectional:
    """A bottom layer of two EmbeddingGRUs with H/2 units each: one reads the sentences forward, the other from their end.

    h (N, H) and the last states (B, H) belong to both, side by side.
    """

    class Ctx(NamedTuple):
        forward: Any
        reverse: Any
        h: Any              # ctx of the concatenation of h, and of the last states
        both: Any
        last: Any           # (B, H)

    def __init__(self, forward, reverse):
        self.one, self.other, self.concat = forward, reverse, ConcatContext('encoder.rnn.0.both')

    def forward(self, ids, context=None, state=None, lengths=None, rows=None):
        h_one, one = self.one.forward(ids, rows=rows)
        h_other, other = self.other.forward(ids, rows=rows, reverse=True)
        h, c_h = self.concat.forward(h_one[None], h_other)
        last, c_last = self.concat.forward(one.last[None], other.last)
        return h[0], self.Ctx(one, other, c_h, c_last, last[0])

    def backward(self, dh, ctx, dh_last, into=None):
        """Like EmbeddingGRU.backward, without a context; dh and dh_last may be None."""
        def split(gradient, ctx):
            if gradient is None:
                return None, None
            one, other = self.concat.backward(gradient[None], ctx)
            return one[0], other
        for op, c, d, d_last in zip((self.one, self.other), ctx[:2], split(dh, ctx.h), split(dh_last, ctx.both), strict=True):
            op.backward(d, c, d_last)
        return None, None, None


class DeepGRU:
    """Stacked GRU layers with dropout between them.  The first layer embeds token ids and may also read a context vector."""

    def __init__(self, params, prefix, config, bidirectional=False):
        def of_layer(name):
            return *(params[f'{prefix}.rnn.{name}.{part}'] for part in ('w_ih', 'w_hh', 'b_ih', 'b_hh')), config.reset_before

        def embedding_gru(name):
            return config.ops.EmbeddingGRU(params[f'{prefix}.embedding.weight'], *of_layer(name))
        bottom = Bidirectional(embedding_gru('0.forward'), embedding_gru('0.reverse')) if bidirectional else embedding_gru(0)
        self.layers = [bottom, *(config.ops.GRU(*of_layer(layer)) for layer in range(1, config.layers))]
        self.dropouts = [Dropout(config.dropout, key(params.seed, f'{prefix}.dropout.{layer}'), f'{prefix}.dropout.{layer}')
                         for layer in range(config.layers - 1)]

    def forward(self, ids, context=None, states=None, step=None, rows=None):
        """Return h of the top layer (N, H), the last h (B, H) of each layer, and ctx.

        ids (N,); rows: their Packed; context (B, H) or None; states: the initial h (B, H) of each layer, None for zeros;
        step: None for no dropout.  rows None: one step of B sentences, ids (1, B), and h is (1, B, H).
        """
        states = states or [None] * len(self.layers)
        h, saved = self.layers[0].forward(ids, context, states[0], rows=rows)
        ctx, last = [(None, saved)], [h[-1] if rows is None else saved.last]
        for layer, dropout, state in zip(self.layers[1:], self.dropouts, states[1:], strict=True):
            dropped = None
            if step is not None:
                h, dropped = dropout.forward(h, step)
            h, saved = layer.forward(h, state, rows=rows)
            last.append(h[-1] if rows is None else saved.last)
            ctx.append((dropped, saved))
        return h, last, ctx

    def backward(self, dh, dlast, ctx):
        """Return the gradients of the context and of each layer's initial h (None if forward got none).

        dh (N, H) or None; dlast: gradients (B, H) of the last h of each layer, or None.  Empties ctx.
        With several layers the gradient of the context is added to the initial h's of the top layer, and both are this sum.
        """
        dstates = [None] * len(self.layers)
        for i in reversed(range(1, len(self.layers))):
            dropped, saved = ctx.pop()
            dh, dstates[i] = self.layers[i].backward(dh, saved, dlast and dlast[i])
            if dropped:
                dh = self.dropouts[i - 1].backward(dh, dropped)
        _, saved = ctx.pop()
        _, dcontext, dbottom = self.layers[0].backward(dh, saved, dlast and dlast[0], into=dstates[-1])
        return dcontext, [dbottom, *dstates[1:]]


class Memory(NamedTuple):
    """The states of the top encoder layer, (N, H), and where the sentences are in them.

    sources (R,) int32: the sentence of each hypothesis; None: hypothesis r belongs to sentence r % B
    """
    states: Any
    rows: Packed
    sources: Any = None


class SourceAttention:
    """Attention of the decoder's top layer to the encoder's top layer:  y = h + dropout(attention(h w_q', memory) w_o').

    The states of the encoder are both keys and values.  It follows the recurrence, so that a GRU layer remains one kernel for
    all steps (Luong et al. 2015, arXiv:1508.04025, global attention; multi-head: Vaswani et al. 2017, arXiv:1706.03762).
    """

    def __init__(self, params, config):
        self.query, self.output = (config.ops.Linear(params[f'attention.{name}.weight']) for name in ('query', 'output'))
        self.attention = config.ops.Attention(config.attention)
        self.residual = Residual(config.dropout, key(params.seed, 'attention.dropout'), 'attention.residual')
        self.one = backend.put(np.ones(1, np.float32))

    @property
    def has_step(self):
        """Whether Attention.step can be used: on the CPU, without rounded operands."""
        return backend.current_device().is_host and type(self.attention) is ops.Attention

    def forward(self, h, memory, rows=None, step=None):
        """Return y and ctx.  h, y (N, H) of packed rows;  rows None: (R, H), row r is a query of sentence memory.sources[r], or
        r % B."""
        q, c1 = self.query.forward(h)
        if rows is None and self.has_step:
            c = self.attention.step(q, memory.states, memory.states, index=memory.sources, rows=memory.rows)
            o, c3 = self.output.forward(c)
            y, c4 = self.residual.forward(h, o)
            return y, (c1, None, c3, c4)
        if rows is None:
            q = q.reshape(-1, memory.rows.sentences, q.shape[-1])
        c, c2 = self.attention.forward(q, memory.states, memory.states, q_rows=rows, k_rows=memory.rows)
        o, c3 = self.output.forward(c.reshape(h.shape))
        y, c4 = self.residual.forward(h, o, step)
        return y, (c1, c2, c3, c4)

    def backward(self, dy, ctx):
        """Return the gradients of h and of the memory's states, for packed rows.  Overwrites dy."""
        c1, c2, c3, c4 = ctx
        dh, do = self.residual.backward(dy, c4)
        dc = self.output.backward(do, c3)
        dq, dkeys, dvalues = self.attention.backward(dc, c2)
        backend.launch('axpy', dkeys, dvalues, self.one, dkeys.size)
        return self.query.backward(dq, c1, into=dh), dkeys


class State(NamedTuple):
    """What the decoder needs for the next token of R hypotheses of B sentences."""
    context: Any            # (R, H), None with attention
    states: list            # h (R, H) of each layer
    memory: Memory | None   # of the B sentences, with attention


class Seq2Seq:
    """An encoder, a decoder and an output layer that share one set of parameters.

    forward(batch, step, dloss=None) returns the mean loss (1,) and ctx; backward(ctx) adds to params.grads.
    dloss (1,) is the gradient of the loss, None for 1.  With it forward() already adds the gradients of the output layer: zero
    params.grads before it, and call backward() once for each forward().
    batch.source and batch.target have ids (N,) int32 and rows, their Packed; batch.labels (N,) are the expected tokens, and
    the target ids are the labels shifted right after <bos>.

    Without attention the decoder knows the source by its initial state and by a context, the last h of the top encoder layer,
    which its bottom layer reads at every step.  With attention there is no context.
    """

    def __init__(self, config, seed=0):
        self.config = config
        self.params = p = Parameters(parameter_specs(config), seed)
        self.encoder = DeepGRU(p, 'encoder', config, config.bidirectional)
        self.decoder = DeepGRU(p, 'decoder', config)
        self.attention = SourceAttention(p, config) if config.attention else None
        self.output = config.ops.LinearCrossEntropy(p['output.weight'], p['output.bias'], PAD, config.smoothing)
        self.one = backend.put(np.ones(1, np.float32))       # the gradient of the loss

    def forward(self, batch, step=None, gradients=True, dloss=None):
        """Return the loss and ctx.  step (1,) int64: number of the dropout masks, None for no dropout.
        gradients=False: evaluation only, backward() is not allowed."""
        dloss = self.one if dloss is None else dloss
        self.params.round()
        (source, _, source_rows), (target, _, rows), labels = batch
        memory, last, c1 = self.encoder.forward(source, step=step, rows=source_rows)       # (M, H), (B, H) per layer
        context          = None if self.attention else last[-1]
        h, _,         c2 = self.decoder.forward(target, context, last, step, rows)         # (N, H)
        c3 = None
        if self.attention:
            h, c3 = self.attention.forward(h, Memory(memory, source_rows), rows, step)
        loss, c4 = self.output.forward(h, labels, gradients, dloss=dloss)                  # (1,)
        return loss, [c1, c2, c3, dloss, c4]

    def backward(self, ctx):
        """Add to params.grads.  Empties ctx, so that saved activations are freed as early as possible."""
        c4, dloss       = ctx.pop(), ctx.pop()
        dh, dmemory     = self.output.backward(dloss, c4), None
        c3 = ctx.pop()
        if self.attention:
            dh, dmemory = self.attention.backward(dh, c3)
        dcontext, dlast = self.decoder.backward(dh, None, ctx.pop())
        if dcontext is not None and dcontext is not dlast[-1]:          # the context is the top layer's last h
            backend.launch('axpy', dlast[-1], dcontext, self.one, dcontext.size)
        self.encoder.backward(dmemory, dlast, ctx.pop())

    @property
    def attends(self):
        """Whether forced() returns weights of attention."""
        return self.attention is not None

    @backend.float32_activations()      # as in decoding
    def forced(self, source, target, align=False):
        """Decode given tokens.  source, target: Sequences; target is the labels shifted right after <bos>.

        Return h (N, H), the input of the output layer for each label; and with `align` the weights of the attention to the
        source, (B, heads, target.rows.longest, source.rows.longest), else None.
        """
        state   = self.start(source)
        h, _, _ = self.decoder.forward(target.ids, state.context, state.states, rows=target.rows)
        if not self.attention:
            return h, None
        h, (_, c, _, _) = self.attention.forward(h, state.memory, target.rows)
        return h, self.attention.attention.weights(c) if align else None

    @staticmethod
    def valid(ctx):
        """Return the number of labels that are not padding, (1,) int32.  Call it before backward()."""
        return ctx[-1].valid

    def arrays(self):
        """Return {name: array} of the arrays besides parameters that a plan must know."""
        return dict(one=self.one) | (dict(attention_one=self.attention.one) if self.attention else {})

    @backend.float32_activations()      # beam search copies states as float32
    def start(self, source):
        """Encode source, Sequences of B sentences.  Return the initial State of the decoder, with a hypothesis per sentence."""
        h, last, _ = self.encoder.forward(source.ids, rows=source.rows)
        return State(None, last, Memory(h, source.rows)) if self.attention else State(last[-1], last, None)

    @backend.float32_activations()
    def next(self, word, state, parents=None, sources=None):
        """Decode one token.  word (R,) int32: the previous tokens.  Return h (R, H) for the output layer, and the next state.

        parents (R,) int32: row r continues row parents[r] of the state; None: row r.
        sources (R,) int32: row r belongs to sentence sources[r]; requires free_rows.  None: to the same sentence as before, in
        the first step to r % B, where R is a multiple of the number of sentences B.
        """
        state = state if parents is None else self._rows(state, parents)
        if sources is not None and state.memory is not None:
            state = state._replace(memory=state.memory._replace(sources=sources))
        h, states, _ = self.decoder.forward(word[None], state.context, state.states)
        h = h[0]
        if self.attention:
            h, _ = self.attention.forward(h, state.memory)
        return h, state._replace(states=states)

    def twin(self):
        """Return a model with these weights for searches in another thread: this one, which keeps nothing of a search."""
        return self

    @property
    def free_rows(self):
        """Whether next() takes sources: on the CPU, unless attention rounds its operands."""
        return backend.current_device().is_host and (self.attention is None or self.attention.has_step)

    @staticmethod
    def _rows(state, rows):
        """Return the state of these hypotheses."""
        context = None if state.context is None else _gathered(state.context, rows)
        return state._replace(context=context, states=[_gathered(h, rows) for h in state.states])

    def translate(self, source):
        """Translate source, Sequences of B >= 1 sentences, greedily.  Return at most num_steps tokens (., B) int32, <pad> after
        the end."""
        return greedy(self, source, self.config.num_steps)

    def decoding(self, num_steps=None):
        """Return a decoder equivalent to translate() but faster on repeated calls.  Valid while the weights are unchanged.
        num_steps: the largest number of tokens, at most config.num_steps, which is the default."""
        return Decoder(self, num_steps or self.config.num_steps)


def _gathered(x, rows):
    """Return these rows of x (., C)."""
    y = backend.empty((len(rows), x.shape[1]), name='decoder.reordered')
    backend.gather_rows(y[None], x[None], rows)
    return y
