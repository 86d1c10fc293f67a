"""Train a decoder-only transformer to continue any text, letter by letter, and let it write.

    python examples/language_model.py                               a short run on embedded sentences, then 200 letters
    python examples/language_model.py book.txt -c ckpt -e 50        on any text; the same command resumes
    python examples/language_model.py book.txt -c ckpt -e 0 --prompt "Once upon"

The text is cut into windows of --context letters.  The model reads a begin mark and all letters of a window but the last, and
predicts all its letters.  Blocks and their gradients come from the transformer's encoder, with a causal mask.
"""
import functools
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))        # this source tree, from any current folder

from pyops import backend, checkpoint, fit, flags, plan
from pyops.data.batches import pack, pack_ids
from pyops.errors import UserError, exits_cleanly
from pyops.ops import LinearCrossEntropy, Positions
from pyops.ops.packed import Packed
from pyops.optim import Adam
from pyops.params import Parameters
from pyops.text import embedded
from pyops.text.pairs import Sequences
from transformer.model import Config, EncoderBlock, Stack, output_specs, side_specs

PAD, BEGIN, FIRST = 0, 1, 2             # ids: letters are numbered from FIRST


class LanguageModel:
    """windows: Sequences of N letters, each window shifted right after BEGIN;  labels (N,) int32: letters to predict."""

    def __init__(self, config, seed=0):
        self.config = config
        decoder_specs = side_specs('decoder', config.target_size, config.layers, ['self_attention'], config)
        self.params = p = Parameters(decoder_specs | output_specs(config), seed)
        self.positions = Positions(config.d_model, config.positions, config.d_model ** 0.5)
        block = functools.partial(EncoderBlock, causal=True)
        self.decoder = Stack(p, 'decoder', block, config.layers, self.positions, config)
        self.output = LinearCrossEntropy(p['output.weight'], p['output.bias'], PAD)
        self.one = backend.put(np.ones(1, np.float32))              # the gradient of the loss

    def forward(self, windows, labels, step):
        h,    c1 = self.decoder.forward(windows, step=step)         # (N, D)
        loss, c2 = self.output.forward(h, labels, dloss=self.one)   # (1,)
        return loss, [c1, c2]

    def backward(self, ctx):
        dh = self.output.backward(self.one, ctx.pop())
        self.decoder.backward(dh, ctx.pop())

    def arrays(self):
        return dict(one=self.one, positions=self.positions.table)

    def write(self, ids, length, rng):
        """Yield `length` more ids after `ids`, each drawn from the model's distribution."""
        weight, bias = (backend.get(self.params[f'output.{name}'].value) for name in ('weight', 'bias'))
        for _ in range(length):
            seen = [BEGIN, *ids][-self.config.num_steps:]
            h, _ = self.decoder.forward(Sequences.of([np.array(seen)], self.config.num_steps))
            logits = weight[FIRST:] @ backend.get(h)[-1] + bias[FIRST:]
            p = np.exp(logits.astype(np.float64) - logits.max())
            ids = [*ids, FIRST + int(rng.choice(len(p), p=p / p.sum()))]
            yield ids[-1]


def parser():
    p = flags.ArgumentParser(prog='language_model.py', description='Train a transformer on a text, and let it write.')
    p.add_argument('text', nargs='?', help='a text file, UTF-8 (default: 2000 sentences of the embedded corpus)')
    p.add_argument('-c', '--checkpoint', metavar='PATH', help='a folder: resume its newest checkpoint, and save there')
    p.add_argument('-l', '--lr', type=flags.positive_float, default=0.002, help='learning rate (default %(default)s)')
    p.add_argument('--prompt', default='', help='the beginning of the text that the model writes')
    for *names, least, default, text in (
            ('-e', '--epochs', 0, 5, 'number of epochs'), ('-b', '--batch-size', 1, 16, 'windows per step'),
            ('--context', 1, 32, 'letters per window'), ('--d-model', 1, 64, 'size of a hidden state'),
            ('--layers', 1, 2, 'number of blocks'), ('--write', 0, 200, 'letters to write')):
        kind = flags.int_up_to(65536) if least else flags.non_negative_int
        p.add_argument(*names, type=kind, default=default, metavar='N', help=f'{text} (default %(default)s)')
    for add_flags in (flags.add_max_steps_flag, flags.add_threads_flag, flags.add_gpu_flag, flags.add_plan_flags):
        add_flags(p)
    return p


def read(path, context):
    """Return the windows of a text as ids, (N, context) int32, and its letters in the order of their ids."""
    try:
        text = Path(path).read_text('utf-8') if path else '\n'.join(list(embedded.corpus().sources)[:2000])
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'{path}: cannot be read as UTF-8 text ({error}); name a text file') from error
    if len(text) < context:
        raise UserError(f'{path}: has {len(text)} letters; give a longer text or a smaller --context than {context}')
    letters = sorted(set(text))
    ids = np.searchsorted(np.array(letters), np.array(list(text))).astype(np.int32) + FIRST
    return ids[:len(ids) // context * context].reshape(-1, context), letters


def main(argv=None):
    args = parser().parse_args(argv)
    flags.use_device(args)

    # data and model
    windows, letters = read(args.text, args.context)
    table, starts = backend.put(windows.ravel()), backend.put(np.arange(0, windows.size + 1, args.context))
    config = Config(1, FIRST + len(letters), args.d_model, 4 * args.d_model, layers=args.layers, dropout=0.1,
                    num_steps=args.context, positions=args.context, pre_norm=True)
    model = LanguageModel(config)
    optimizer, history, run = Adam(model.params, args.lr, max_norm=1.0), fit.History(), fit.Run(0, args.batch_size)
    found = checkpoint.find(args.checkpoint) if args.checkpoint else None
    if found and found.path:
        if found.state.get('letters') != letters:
            raise UserError(f'{found.path}: was not trained on the letters of {args.text}; give another folder with -c')
        checkpoint.restore(model.params, optimizer, found.tensors, found.path)
        run = fit.Run(**found.state['run'] | {'batch_size': args.batch_size})
        print(found.line)

    # step
    def step(rows):
        model.params.zero_grads()
        total = len(rows) * args.context
        ids, positions, offsets = pack(table, starts, rows, total, BEGIN)
        labels = pack_ids(table, starts, rows, total, name='labels')
        loss, ctx = model.forward(Sequences(ids, positions, Packed(offsets, args.context)), labels, optimizer.count)
        plan.boundary()
        model.backward(ctx)
        optimizer.step(entry=history.entry(loss, None))

    train_step = fit.training_step(args, step, model.params, fit.first_batch(run, len(windows)), '-b or --context', table=table,
                                   starts=starts, **model.arrays(), **optimizer.arrays(), **history.arrays())
    if train_step is None:
        return

    # loop
    saver = fit.Saver(found, model.params, optimizer, run, dict(letters=letters)) if found else None
    trainer = fit.Trainer(run, len(windows), args.epochs, optimizer, history, saver=saver, max_steps=args.max_steps,
                          chance_loss=math.log(len(letters)))
    with trainer:
        for epoch in trainer.epochs():
            for rows in epoch.batches(unit='windows', lines=0):
                train_step(rows)
            print(f'epoch {epoch.number + 1} loss : {epoch.end()["loss"]:.5f}', flush=True)
    trainer.leave()

    if unknown := sorted(set(args.prompt) - set(letters)):
        raise UserError(f'--prompt: the text has no {unknown[0]!r}; leave it out')
    start = [FIRST + letters.index(letter) for letter in args.prompt]
    written = model.write(start, args.write, np.random.default_rng(0))
    print(args.prompt + ''.join(letters[i - FIRST] for i in written))


if __name__ == '__main__':
    with exits_cleanly('language_model.py'):
        main()
