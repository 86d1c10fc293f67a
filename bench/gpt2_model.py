"""GPT-2 (Radford et al. 2019) in ops of pyops: a decoder-only transformer with learned positions, for a training step.

The blocks and their gradients are the transformer's encoder blocks with a causal mask.  One matrix is the embedding and,
without a bias, the output layer.  The tokens of all sequences of a batch follow each other: ids (N,), activations (N, D).
"""
import numpy as np

from pyops import backend, init, plan
from pyops.data.batches import pack, pack_ids
from pyops.ops import Embedding, LinearCrossEntropy, ResidualNorm
from pyops.ops.packed import Packed
from pyops.params import Parameter, Parameters, Spec
from pyops.steps import Steps
from transformer.model import FIRST_SUBLAYER, Config, EncoderBlock, Sum, context_of, norm_of, run_block, side_specs

SIDE = 'decoder'


def config_of(size):
    """Return the transformer.model.Config of a bench.llmc.Size."""
    return Config(size.words, size.words, size.width, 4 * size.width, size.heads, size.layers, dropout=0.0,
                  num_steps=size.positions, positions=size.positions, pre_norm=True, tied=True, activation='gelu_tanh',
                  bias=True)


class GPT2:
    """ids, labels, positions (N,) int32;  rows: Packed.   tensors: (name, values) as bench.llmc.read_model yields them

    recompute: as of transformer.model.Transformer
    """

    def __init__(self, size, tensors, recompute=False):
        self.size, self.recompute, config = size, recompute, config_of(size)
        D = size.width
        specs = {'embedding.weight': Spec((size.words, D), init.zeros()),
                 'positions.weight': Spec((size.positions, D), init.zeros())}
        self.params = p = Parameters(specs | side_specs(SIDE, size.words, size.layers, ['self_attention'], config), None)
        self.set(tensors)
        self.embedding, self.positions = Embedding(p['embedding.weight']), Embedding(p['positions.weight'])
        first = [f'{SIDE}.{layer}.{FIRST_SUBLAYER}' for layer in range(size.layers)]
        self.enter = ResidualNorm(*norm_of(p, first[0]), residual=f'{SIDE}.residual')
        self.blocks = [EncoderBlock(p, f'{SIDE}.{layer}', config, following, causal=True)
                       for layer, following in enumerate([*first[1:], SIDE])]
        # zeros that no optimizer changes: GPT-2's output layer has no bias
        self.bias = Parameter('output.bias', backend.zeros(size.words), backend.zeros(size.words))
        self.output = LinearCrossEntropy(p['embedding.weight'], self.bias, name='output')
        self.one = backend.put(np.ones(1, np.float32))              # the gradient of the loss

    def set(self, tensors):
        """Copy the tensors of a file to the parameters."""
        for name, values in tensors:
            for ours, part in parts(name, values):
                self.params[ours].value[...] = part

    def forward(self, ids, labels, positions, rows):
        """Return the loss (1,) and ctx.   Adds the gradients of the output layer: zero params.grads before it"""
        self.params.round()
        x,    c1 = self.embedding.forward(ids)                      # (N, D)
        at,   c2 = self.positions.forward(positions)                # (N, D)
        n,    c3 = self.enter.forward(x, at)
        x, ctx = Sum(c3.sum, n), [c1, c2, c3]
        for block in self.blocks:
            x, c = run_block(block, (x, rows, None), self.recompute)
            ctx.append(c)
        loss, c = self.output.forward(x.n, labels, dloss=self.one)  # (1,)
        return loss, [*ctx, c]

    def backward(self, ctx):
        """Add to params.grads.  Empties ctx."""
        dx = Sum(None, self.output.backward(self.one, ctx.pop()))
        for block in reversed(self.blocks):
            dx = block.backward(dx, context_of(block, ctx.pop()))
        c3, c2, c1 = ctx.pop(), ctx.pop(), ctx.pop()
        dx, dat = self.enter.backward(dx.n, c3, into=dx.x)
        self.positions.backward(dat, c2)
        self.embedding.backward(dx, c1)


def parts(name, values):
    """Yield (our name, values) of the parameters in a tensor of a file."""
    if name in ('wte', 'wpe'):
        yield {'wte': 'embedding.weight', 'wpe': 'positions.weight'}[name], values
        return
    kind = {'w': 'weight', 'b': 'bias'}[name[-1]]
    if name[:-1] == 'lnf':
        yield f'{SIDE}.norm.{kind}', values
        return
    for layer, part in enumerate(values):
        block = f'{SIDE}.{layer}'
        if name[:-1] == 'qkv':
            for letter, third in zip('qkv', np.split(part, 3), strict=True):
                yield f'{block}.self_attention.{letter}.{kind}', third
        else:
            yield f'{block}.' + {'ln1': f'self_attention.norm.{kind}', 'ln2': f'feed_forward.norm.{kind}',
                                 'attproj': f'self_attention.out.{kind}', 'fc': f'feed_forward.{name[-1]}1',
                                 'fcproj': f'feed_forward.{name[-1]}2'}[name[:-1]], part


def training_steps(model, optimizer, tokens, length):
    """Return Steps of a training step on rows (B,) int64: row r is `length` of the tokens (N,) int32, from r length on, and its
    labels are the tokens one later."""
    begins = length * np.arange((len(tokens) - 1) // length + 1)
    table, starts, later = map(backend.put, (tokens, begins, begins + 1))

    def step(rows):
        total = rows.size * length
        model.params.zero_grads()
        ids, positions, offsets = pack(table, starts, rows, total)
        labels = pack_ids(table, later, rows, total, name='labels')
        loss, ctx = model.forward(ids, labels, positions, Packed(offsets, length))
        plan.boundary()
        model.backward(ctx)
        optimizer.step()
        return loss
    return Steps(step, model.params, table=table, starts=starts, later=later, one=model.one, bias=model.bias.value,
                 dbias=model.bias.grad, **optimizer.arrays())
