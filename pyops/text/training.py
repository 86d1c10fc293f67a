"""Parts of a training run that the translation programs share: the data divided, resuming, the validation loss."""
import sys
from typing import NamedTuple

import numpy as np

from pyops import backend, checkpoint, fit
from pyops.errors import UserError
from pyops.flags import plan_requested
from pyops.text.corpus import Corpus
from pyops.text.flags import EMBEDDED_HOLD_OUT
from pyops.text.split import hold_out
from pyops.text.translation import EMBEDDED, Pairs, check_vocabularies, open_corpus
from pyops.text.vocabulary import BOS, PAD, SPECIALS, Vocabulary


class Data(NamedTuple):
    """The corpus of a training run, divided: pairs to train on and to validate with, and sentences to test with."""
    corpus: Corpus
    vocabularies: tuple[Vocabulary, Vocabulary]     # source, target
    train: Pairs
    validation: Pairs
    test: Corpus

    @classmethod
    def load(cls, args, settings, least=1):
        """Return the Data for the flags and settings of a run, and print lines about it.

        settings['hold_out'] None is replaced by the corpus's default.  least: fewest pairs to train on.
        """
        corpus, line = open_corpus(args.corpus, args.data_dir, settings['tiny'])
        print(line, flush=True)
        if settings['hold_out'] is None:
            settings['hold_out'] = EMBEDDED_HOLD_OUT if corpus.name == EMBEDDED else 0.0
        vocabularies = corpus.vocabularies(settings['min_count'])
        for side, vocabulary in zip(('source', 'target'), vocabularies, strict=True):
            if len(vocabulary) == len(SPECIALS):
                raise UserError(f'{corpus.name}: no {side} word occurs {settings["min_count"]} times or more; '
                                'give --min-count 1 or a larger corpus')
        train, validation, test = hold_out(corpus.first(settings['pairs'] or None), settings['hold_out'])
        if line := cut_line(train, settings['num_steps']):
            print(line, flush=True)
        if len(train) < least:
            raise UserError(f'{corpus.name}: has {len(train)} pairs to train on, and a batch is {least}; give a smaller -b')
        pairs = (Pairs.encode(part, *vocabularies, settings['num_steps']) for part in (train, validation))
        return cls(corpus, vocabularies, *pairs, test)

    def state(self, program, settings):
        """Return what the checkpoints of a run on this data contain besides its progress."""
        return dict(program=program, settings=settings, pairs=self.train.digest(), corpus=self.corpus.name,
                    vocabularies=dict(zip(('source', 'target'), (v.tokens for v in self.vocabularies), strict=True)))

    def describe(self, rows):
        """Return lengths and tokens of these pairs for the manifest of saved tensors: {'source': one entry per sentence, ...}.

        target: the decoder's input, <bos> and all tokens but the last, which is <eos> unless the sentence was truncated.
        """
        lengths, tokens, rows = {}, {}, backend.get(rows)
        tables = self.train.source, self.train.labels
        for side, table, vocabulary in zip(('source', 'target'), tables, self.vocabularies, strict=True):
            sentences = [ids[ids != PAD] for ids in table[rows]]
            lengths[side] = [len(ids) for ids in sentences]
            words = [vocabulary.words(ids) for ids in sentences]
            tokens[side] = [[SPECIALS[BOS], *line[:-1]] for line in words] if side == 'target' else words
        return lengths, tokens


def cut_line(corpus, num_steps):
    """Return a line with the number of sentences that training cuts, None if it cuts none."""
    sources, targets, pairs = corpus.count_cut(num_steps)
    if pairs:
        return (f'cut to --num-steps {num_steps} tokens, end mark included : {sources} sources, {targets} targets, '
                f'{pairs} of {len(corpus)} pairs ({pairs / len(corpus):.1%}); a larger --num-steps cuts fewer')


def find_checkpoint(args, program):
    """Return the checkpoint.Found of a training run: what -c names, else none, and ./checkpoints as the folder."""
    if args.checkpoint is None:
        return checkpoint.fresh('.' if plan_requested(args) else './checkpoints')
    found = checkpoint.find(args.checkpoint)
    check_program(found, program)
    return found


def check_program(found, program):
    """Print the warnings about the checkpoint found.  UserError if it belongs to another program."""
    for warning in found.warnings:
        print(warning, file=sys.stderr)
    if found.path is not None and found.state.get('program') != program:
        raise UserError(f'{found.path}: a checkpoint of {found.state.get("program")}, not of {program}; give another with -c')


def start_run(args, found, settings, data, model, optimizer, wanted=None):
    """Return the fit.Run of a training run: new, or resumed from the checkpoint found, whose tensors are copied into the model.

    Return None, after a line about it, if all epochs are done.  wanted: tensors to save; UserError if none can be saved.
    """
    if settings['quant'] != 'none':
        print(model.config.ops.check(), flush=True)
        model.config.ops.step = optimizer.count
    if found.state is None:
        return fit.Run(settings['seed'], settings['batch_size'])
    check_vocabularies(found.path, found.state, data.vocabularies, data.train)
    fit.restore(model.params, optimizer, found.tensors, found.path)
    found.tensors.clear()                                       # free the second copy of the model
    print('loaded from checkpoint', flush=True)
    run = fit.Run(**(found.state['run'] | {'batch_size': settings['batch_size']}))
    if run.epoch < args.epochs or plan_requested(args):
        return run
    if wanted:
        raise UserError(f'{wanted.folder}: no tensor was saved: all {args.epochs} epochs are done ({run.epoch} in '
                        f'{found.path}); -e {run.epoch + 10} trains on')
    print(f'all {args.epochs} epochs are done ({run.epoch} in {found.path}); -e {run.epoch + 10} trains on, -e 0 serves')
    return None


def validation_loss(model, pairs, batch_size):
    """Return {'validation': mean loss per valid token over all pairs, without dropout}, or {} if there are no pairs."""
    loss_sum = tokens = 0
    for first in range(0, len(pairs), batch_size):
        indices = backend.put(np.arange(first, min(first + batch_size, len(pairs))))
        loss, ctx = model.forward(*pairs.batch(indices), gradients=False)
        valid = int(model.valid(ctx)[0])
        loss_sum += float(loss[0]) * valid
        tokens += valid
    return {'validation': loss_sum / tokens} if tokens else {}


def validation_text(values):
    """Return the end of the line about an epoch: its validation loss, if it has one."""
    return f' validation : {values["validation"]:.5f}' if 'validation' in values else ''


def side(layer, name):
    """Return which sentences, 'source' or 'target', correspond to the rows of tensor `name` of a saved layer."""
    if layer.startswith('encoder'):
        return 'source'
    of_memory = layer.endswith(('.cross_attention.k', '.cross_attention.v'))
    return 'source' if of_memory or layer.endswith('.cross_attention') and name in ('key', 'value') else 'target'
