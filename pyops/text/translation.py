"""Shared by the translation programs: corpus and encoded pairs, resuming, validation, translating a line of text."""
import functools
import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pyops import backend, checkpoint, fit
from pyops.data import locate
from pyops.data.batches import gather
from pyops.errors import UserError
from pyops.flags import plan_requested
from pyops.text.corpus import Corpus, encode
from pyops.text.flags import EMBEDDED_HOLD_OUT
from pyops.text.preprocess import tokenize
from pyops.text.split import hold_out
from pyops.text.vocabulary import BOS, EOS, PAD, SPECIALS, Vocabulary, tokens_of

TINY = 512              # pairs
EMBEDDED = 'embedded'   # instead of a file name
_SHOWN = 60             # characters of a sentence shown in a warning


def open_corpus(path=None, data_dir=None, tiny=False):
    """Return a Corpus and a line for the user that names it: the file `path` ('embedded': the embedded corpus), else fra-eng
    if `locate` finds it, else the embedded corpus.  tiny: only its first 512 pairs.

    UserError if the file cannot be read, `path` is empty, data_dir is given and does not hold fra-eng, or $PYOPS_DATA is not
    a directory.
    """
    if path == '':
        raise UserError("corpus '': no such file; give a file or 'embedded'")
    chosen = path or locate.find('fra-eng', data_dir) or EMBEDDED
    if chosen == EMBEDDED:
        if data_dir is not None and not path:
            raise locate.missing('fra-eng', data_dir)
        from pyops.text import embedded
        corpus = embedded.corpus()
        line = f'embedded corpus : {len(corpus)} pairs'
        if not path:
            line = f'no corpus found, using the {line}; get the real one with: python -m pyops.data get fra-eng'
    else:
        line, corpus = f'corpus : {chosen}', Corpus.load(chosen)
    return (corpus.first(TINY) if tiny else corpus), line


@dataclass(frozen=True)
class Pairs:
    """Encoded sentence pairs: source and labels, int32 (N, num_steps)."""
    source: np.ndarray
    labels: np.ndarray

    @classmethod
    def encode(cls, corpus, source_vocabulary, target_vocabulary, num_steps):
        return cls(encode(corpus.sources, source_vocabulary, num_steps),
                   encode(corpus.targets, target_vocabulary, num_steps))

    def __len__(self):
        return len(self.source)

    def placed(self):
        """Return the pairs on the device of pyops.backend.current_device, where batches are gathered."""
        return Pairs(backend.put(self.source), backend.put(self.labels))

    def arrays(self):
        """Return {name: table} for a plan."""
        return dict(source_table=self.source, label_table=self.labels)

    def batch(self, indices):
        """Return source, target and labels of these pairs, time-major (num_steps, B) int32; target is labels after <bos>."""
        return (gather(self.source, indices, name='source'), gather(self.labels, indices, BOS, name='target'),
                gather(self.labels, indices, name='labels'))

    def digest(self):
        """Return a hash of all ids, with which a resumed run detects that its pairs have changed."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(backend.get(self.source))
        digest.update(backend.get(self.labels))
        return digest.hexdigest()


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


def sentence(words):
    """Join tokens to a sentence as in a Corpus: separated by spaces, without <eos>."""
    return ' '.join(word for word in words if word != SPECIALS[EOS])


@dataclass(frozen=True)
class Translator:
    """A model with fixed weights, its two vocabularies, the sentence length, and the format of answers.

    model.decoding() returns decode(source (T, B)) -> ids (T', B).  lines(source tokens, output tokens), both with <eos>,
    returns the lines to print.
    """
    model: object
    source_vocabulary: Vocabulary
    target_vocabulary: Vocabulary
    num_steps: int
    lines: Callable

    @functools.cached_property
    def _decode(self):
        return self.model.decoding()

    def sentences(self, sources, batch_size=128):
        """Translate sentences, given and returned as in a Corpus, without <eos>."""
        return [sentence(words) for words in self._words(sources, batch_size)]

    def _words(self, sources, batch_size):
        for first in range(0, len(sources), batch_size):
            source = encode(list(map(self._read, sources[first:first + batch_size])), self.source_vocabulary, self.num_steps)
            output = self._decode(backend.put(np.ascontiguousarray(source.T)))
            for ids in output.T:
                yield self.target_vocabulary.words(ids[ids != PAD])

    def _read(self, source):
        """Return the tokens of a sentence in the forms that the vocabulary contains."""
        return [self.source_vocabulary.known_form(token) for token in tokens_of(source)]

    def answer(self, line):
        """Yield the lines to print for a line of raw text: unknown words, the translation.  Warn on stderr if truncated."""
        tokens = self._read(token for token in tokenize(line) if token != SPECIALS[EOS])
        if not tokens:
            return
        if unknown := self.source_vocabulary.unknown(tokens):
            yield f'unknown words : {" ".join(dict.fromkeys(unknown))}'
        read = [*tokens, SPECIALS[EOS]]
        if len(read) > self.num_steps:
            start = line if len(line) <= _SHOWN else line[:_SHOWN] + '...'
            print(f'warning: too long, only the first {self.num_steps} of {len(read)} tokens, end mark included, are read: '
                  f'{start!r}', file=sys.stderr, flush=True)
        (words,) = self._words([tokens], 1)
        yield from self.lines(read[:self.num_steps], words)


def check_vocabularies(path, state, vocabularies, pairs):
    """Raise UserError unless the checkpoint `path` was trained on these vocabularies and pairs."""
    remedy = f'give the corpus it was trained on, {state["corpus"]}, or start from scratch in another folder'
    for which, vocabulary in zip(('source', 'target'), vocabularies, strict=True):
        trained = Vocabulary(state['vocabularies'][which])
        if trained != vocabulary:
            raise UserError(f'{path}: its {which} vocabulary of {len(trained)} words is not that of the corpus, '
                            f'{len(vocabulary)} words; {remedy}')
    if state['pairs'] != pairs.digest():
        raise UserError(f'{path}: was trained on other pairs of the same vocabulary; {remedy}')
