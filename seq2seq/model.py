"""A deep GRU encoder and decoder.  forward() is a list of calls; backward() is the same list reversed.

Sequences are time-major: (T, B) token ids, (T, B, H) activations.  Ops store nothing: each forward() returns a ctx, which
the caller passes to backward().
"""
from dataclasses import dataclass

import numpy as np

from pyops import backend, init, ops
from pyops.errors import UserError
from pyops.ops import Dropout, sequence_lengths
from pyops.params import Parameters, Spec, key
from pyops.text.decoding import Decoder, greedy
from pyops.text.vocabulary import PAD

# The settings in which a checkpoint must agree with the model that loads it.
SIZES = ('embedding', 'hidden', 'layers', 'num_steps', 'reset_before')


@dataclass(frozen=True)
class Config:
    """Sizes and settings of the model."""
    source_size: int            # tokens in the source vocabulary
    target_size: int            # tokens in the target vocabulary
    embedding: int = 256
    hidden: int = 256
    layers: int = 2
    dropout: float = 0.2
    num_steps: int = 9          # sentences are truncated or padded to this number of tokens
    sigmoid_gain: float = 1.0   # Xavier gain of weights that feed a sigmoid
    tanh_gain: float = 4.0      # Xavier gain of weights that feed a tanh
    reset_before: bool = False  # apply the reset gate before the recurrent product instead of after it
    ops: object = ops           # source of the op classes with matrix products: pyops.ops or a quantization.Family

    def __post_init__(self):
        for name in ('source_size', 'target_size', 'embedding', 'hidden', 'layers', 'num_steps'):
            if getattr(self, name) < 1:
                raise UserError(f'{name}: expected a whole number above 0, got {getattr(self, name)}')


def gru_specs(prefix, inputs, config):
    """Return the specs of the four parameters of one GRU layer.  Gates are stacked in the order r, z, n."""
    sigmoid, tanh = init.xavier_normal(config.sigmoid_gain), init.xavier_normal(config.tanh_gain)
    weight, H = init.stacked(sigmoid, sigmoid, tanh), config.hidden
    return {f'{prefix}.w_ih': Spec((3 * H, inputs), weight), f'{prefix}.w_hh': Spec((3 * H, H), weight),
            f'{prefix}.b_ih': Spec((3 * H,), init.zeros()), f'{prefix}.b_hh': Spec((3 * H,), init.zeros())}


def parameter_specs(config):
    """Return {name: Spec} of all trainable parameters."""
    E, H = config.embedding, config.hidden
    specs = {'encoder.embedding.weight': Spec((config.source_size, E), init.uniform(-0.1, 0.1), sparse=True)}
    for layer in range(config.layers):
        specs |= gru_specs(f'encoder.rnn.{layer}', H if layer else E, config)
    specs |= {'decoder.embedding.weight': Spec((config.target_size, E), init.uniform(-0.1, 0.1), sparse=True)}
    for layer in range(config.layers):
        specs |= gru_specs(f'decoder.rnn.{layer}', H if layer else E + H, config)
    return specs | {'output.weight': Spec((config.target_size, H), init.xavier_normal()),
                    'output.bias': Spec((config.target_size,), init.zeros())}


class DeepGRU:
    """Stacked GRU layers with dropout between them.  The first layer embeds token ids and may also read a context vector."""

    def __init__(self, params, prefix, config):
        def of_layer(layer):
            return *(params[f'{prefix}.rnn.{layer}.{name}'] for name in ('w_ih', 'w_hh', 'b_ih', 'b_hh')), config.reset_before
        self.layers = [config.ops.EmbeddingGRU(params[f'{prefix}.embedding.weight'], *of_layer(0)),
                       *(config.ops.GRU(*of_layer(layer)) for layer in range(1, config.layers))]
        self.dropouts = [Dropout(config.dropout, key(params.seed, f'{prefix}.dropout.{layer}'), f'{prefix}.dropout.{layer}')
                         for layer in range(config.layers - 1)]

    def forward(self, ids, context=None, states=None, step=None, lengths=None):
        """Return h of the top layer (T, B, H), the last h (B, H) of each layer, and ctx.

        ids (T, B); context (B, H) or None; states: the initial h (B, H) of each layer, None for zeros; step: None for no
        dropout; lengths (B,): h is 0 from that position on, None if every sequence has length T.
        """
        states = states or [None] * len(self.layers)
        h, saved = self.layers[0].forward(ids, context, states[0], lengths)
        ctx, last = [(None, saved)], [h[-1]]
        for layer, dropout, state in zip(self.layers[1:], self.dropouts, states[1:], strict=True):
            dropped = None
            if step is not None:
                h, dropped = dropout.forward(h, step)
            h, saved = layer.forward(h, state, lengths)
            last.append(h[-1])
            ctx.append((dropped, saved))
        return h, last, ctx

    def backward(self, dh, dlast, ctx):
        """Return the gradients of the context and of each layer's initial h (None if forward got none).

        dh (T, B, H) or None; dlast: gradients (B, H) of the last h of each layer, or None.  Empties ctx.
        """
        dstates = [None] * len(self.layers)
        for i in reversed(range(1, len(self.layers))):
            dropped, saved = ctx.pop()
            dh, dstates[i] = self.layers[i].backward(dh, saved, dlast and dlast[i])
            if dropped:
                dh = self.dropouts[i - 1].backward(dh, dropped)
        _, saved = ctx.pop()
        _, dcontext, dstates[0] = self.layers[0].backward(dh, saved, dlast and dlast[0])
        return dcontext, dstates


class Seq2Seq:
    """An encoder, a decoder and an output layer that share one set of parameters.

    forward(source, target, labels, step) returns the mean loss (1,) and ctx; backward(ctx) adds to params.grads.
    The loss has gradient 1, so forward() already adds the gradients of the output layer: zero params.grads before it, and call
    backward() once for each forward().
    source, target, labels (T, B) int32: labels are the expected tokens, target is labels shifted right after <bos>.
    """

    def __init__(self, config, seed=0):
        self.config = config
        self.params = p = Parameters(parameter_specs(config), seed)
        self.encoder = DeepGRU(p, 'encoder', config)
        self.decoder = DeepGRU(p, 'decoder', config)
        self.output = config.ops.LinearCrossEntropy(p['output.weight'], p['output.bias'], ignore=PAD)
        self.one = backend.put(np.ones(1, np.float32))       # the gradient of the loss

    def forward(self, source, target, labels, step=None, gradients=True):
        """Return the loss and ctx.  step (1,) int64: number of the dropout masks, None for no dropout.
        gradients=False: evaluation only, backward() is not allowed."""
        lengths = sequence_lengths(labels, PAD)                            # (B,); h beyond them is never read
        _, last, c1 = self.encoder.forward(source, step=step)              # (B, H) per layer
        h, _,    c2 = self.decoder.forward(target, last[-1], last, step, lengths)      # (T, B, H)
        loss,    c3 = self.output.forward(h, labels, gradients, dloss=self.one)      # (1,)
        return loss, [c1, c2, c3]

    def backward(self, ctx):
        """Add to params.grads.  Empties ctx, so that saved activations are freed as early as possible."""
        dh              = self.output.backward(self.one, ctx.pop())
        dcontext, dlast = self.decoder.backward(dh, None, ctx.pop())
        backend.launch('axpy', dlast[-1], dcontext, self.one, dcontext.size)       # the context is the top layer's last h
        self.encoder.backward(None, dlast, ctx.pop())

    @staticmethod
    def valid(ctx):
        """Return the number of labels that are not padding, (1,) int32.  Call it before backward()."""
        return ctx[-1].valid

    def arrays(self):
        """Return {name: array} of the arrays besides parameters that a plan must know."""
        return dict(one=self.one)

    def start(self, source):
        """Encode source (T, B).  Return the initial decoder state: context (B, H) and h of each layer."""
        _, last, _ = self.encoder.forward(source)
        return last[-1], last

    def next(self, word, state, parents=None):
        """Decode one token.  word (R,) int32: the previous tokens.  Return h (R, H) for the output layer, and the next state.

        parents (R,) int32: row r continues row parents[r] of the state; None: row r.
        """
        context, states = state if parents is None else self._rows(state, parents)
        h, states, _ = self.decoder.forward(word[None], context, states)
        return h[0], (context, states)

    def keep(self, state, sentences):
        """Return a state without the other sentences, for a call of next() with parents.  Here it is the same: all arrays are
        rows of hypotheses, and next() reads only the parents."""
        return state

    @staticmethod
    def _rows(state, rows):
        """Return the state of these rows."""
        def gathered(x):
            y = backend.empty((len(rows), x.shape[1]), name='decoder.reordered')
            backend.gather_rows(y[None], x[None], rows)
            return y
        context, states = state
        return gathered(context), [gathered(h) for h in states]

    def translate(self, source):
        """Translate source (T, B), B >= 1, greedily.  Return at most num_steps tokens (., B) int32, <pad> after <eos>."""
        return greedy(self, source, self.config.num_steps)

    def decoding(self, num_steps=None):
        """Return a decoder equivalent to translate() but faster on repeated calls.  Valid while the weights are unchanged.
        num_steps: the largest number of tokens, at most config.num_steps, which is the default."""
        return Decoder(self, num_steps or self.config.num_steps)
