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
from pyops.text.tokenizer import Tokenizer, of_corpus, restore, states
from pyops.text.translation import EMBEDDED, Pairs, check_vocabularies, open_corpus
from pyops.text.vocabulary import BOS, PAD, SPECIALS


class Data(NamedTuple):
    """The corpus of a training run, divided: pairs to train on and to validate with, and sentences to test with."""
    corpus: Corpus
    vocabularies: tuple[Tokenizer, Tokenizer]       # source, target
    train: Pairs
    validation: Pairs
    test: Corpus
    sentences: Corpus                               # the sentences of `train`

    @classmethod
    def load(cls, args, settings, least=1, state=None):
        """Return the Data for the flags and settings of a run, and print lines about it.

        settings['hold_out'] None is replaced by the corpus's default.  least: fewest pairs to train on.
        state: of the checkpoint which the run resumes; None: a new run.
        """
        corpus, line = open_corpus(args.corpus, args.data_dir, settings['tiny'])
        print(line, flush=True)
        if settings['hold_out'] is None:
            settings['hold_out'] = EMBEDDED_HOLD_OUT if corpus.name == EMBEDDED else 0.0
        vocabularies = of_corpus(corpus, settings, restore(state['vocabularies']) if state else None)
        if settings['tokenizer'] == 'bpe':
            print(subwords_line(len(vocabularies[0]), settings['vocabulary']), flush=True)
        parts = hold_out(corpus.first(settings['pairs'] or None), settings['hold_out'])
        train, validation, test = map(vocabularies[0].read_corpus, parts)
        source, target = vocabularies
        encoded = [(source.encode(part.sources), target.encode(part.targets)) for part in (train, validation)]
        if line := cut_line(*encoded[0], settings['num_steps']):
            print(line, flush=True)
        if len(train) < least:
            raise UserError(f'{corpus.name}: has {len(train)} pairs to train on, and a batch is {least}; give a smaller -b')
        return cls(corpus, vocabularies, *(Pairs.of(*sides, settings['num_steps']) for sides in encoded), test, train)

    @property
    def shared(self):
        """Whether sources and targets have one vocabulary, so that they can share embeddings."""
        return self.vocabularies[0] is self.vocabularies[1]

    def encode_epoch(self, dropout, seed, epoch):
        """Return the Pairs to train on in an epoch, with BPE dropout: a function of the sentences and the arguments alone."""
        source, target = self.vocabularies
        return Pairs.of(source.encode_epoch(self.sentences.sources, dropout, seed, epoch),
                        target.encode_epoch(self.sentences.targets, dropout, seed, epoch, stream=1), self.train.source.shape[1])

    def start_epoch(self, pairs, settings, run):
        """Encode the sentences to train on for the epoch that begins, in `train` and in `pairs`, its copy on the device.

        With BPE dropout they differ in each epoch; otherwise nothing is done.
        """
        if settings['bpe_dropout']:
            encoded = self.encode_epoch(settings['bpe_dropout'], run.seed, run.epoch)
            self.train.assign(encoded)
            pairs.assign(encoded)

    def state(self, program, settings):
        """Return what the checkpoints of a run on this data contain besides its progress."""
        return dict(program=program, settings=settings, pairs=self.train.digest(), corpus=self.corpus.name,
                    vocabularies=states(self.vocabularies))

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


def subwords_line(tokens, wanted):
    """Return a line with the number of subwords; if it is smaller than --vocabulary, with the reason."""
    return f'subwords : {tokens}' + f' (--vocabulary {wanted}; no other pair of tokens occurs twice)' * (tokens < wanted)


def cut_line(sources, targets, num_steps):
    """Return a line with the number of sentences (Encoded) that training cuts, None if it cuts none."""
    cut = [side.is_cut(num_steps) for side in (sources, targets)]
    if pairs := int((cut[0] | cut[1]).sum()):
        return (f'cut to --num-steps {num_steps} tokens, end mark included : {cut[0].sum()} sources, {cut[1].sum()} targets, '
                f'{pairs} of {len(sources)} pairs ({pairs / len(sources):.1%}); a larger --num-steps cuts fewer')


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
