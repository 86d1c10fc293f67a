"""Parts of a training run that the translation programs share: the data divided, resuming, the validation loss."""
import contextlib
import os
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np

from pyops import __version__, backend, checkpoint, distributed, fit, plan, quantization
from pyops.data import locate
from pyops.data.batches import FixedBatches, TokenBatches
from pyops.errors import UserError
from pyops.flags import plan_requested, use_gpu
from pyops.optim import Adam, decaying_rate, inverse_square_root
from pyops.steps import Cut
from pyops.text import evaluation, serving
from pyops.text.corpus import Corpus
from pyops.text.flags import EMBEDDED_HOLD_OUT, NOTHING
from pyops.text.mapped import SETTINGS, Packed, is_packed
from pyops.text.pairs import Pairs
from pyops.text.split import hold_out
from pyops.text.testsets import TATOEBA, open_excluded, open_test_set
from pyops.text.tokenizer import Tokenizer, of_corpus, restore, states
from pyops.text.translation import EMBEDDED, check_vocabularies, is_fra_eng, open_corpus
from pyops.text.vocabulary import BOS, SPECIALS

MAX_NORM = 1.0          # gradients longer than this are clipped
# Without --keep-best bleu the BLEU of an epoch is of the first validation sentences: one for so many pairs to train on, at most
# and at least so many.  They take about 1 % of the time of an epoch.
PAIRS_PER_SENTENCE, MOST_SENTENCES, FEWEST_SENTENCES = 100, 500, 250
METRICS = {'bleu': 'bleu', 'loss': 'validation', None: None}    # of --keep-best: its name in metrics.jsonl


class Data(NamedTuple):
    """The corpus of a training run, divided: pairs to train on and to validate with, and sentences to test with."""
    corpus: Corpus
    vocabularies: tuple[Tokenizer, Tokenizer]       # source, target
    train: Pairs
    validation: Pairs
    test: Corpus
    chosen: Corpus                                  # the pairs before they were divided
    hold_out: float                                 # share that was held out
    sentences: Corpus                               # the sentences of `train`
    excluded: np.ndarray | None                     # pairs of `chosen` that `train` and `validation` leave out; None: none
    test_set: dict | None                           # {'name', 'sha256'} of the test set that is excluded

    @classmethod
    def load(cls, args, settings, least=1, state=None):
        """Return the Data for the flags and settings of a run, and print lines about it.

        settings['hold_out'] and settings['exclude'] None are replaced by the defaults of the corpus.
        least: fewest pairs to train on;  state: of the checkpoint that the run resumes, None: a new run
        """
        if is_packed(args.corpus):
            return cls._of_packed(Packed(args.corpus), args, settings, least)
        corpus, line = open_corpus(args.corpus, args.data_dir, settings['tiny'])
        print(line, flush=True)
        if settings['hold_out'] is None:
            settings['hold_out'] = EMBEDDED_HOLD_OUT if corpus.name == EMBEDDED else 0.0
        check_keep_best(args, settings['hold_out'], 'give --hold-out 0.02')
        is_default = settings['exclude'] is None
        tests, excluded = excluded_test_set(args, settings, corpus, state), None
        if tests and (excluded := tests.occurs_in(corpus)).all():
            raise UserError(f'--exclude {settings["exclude"]}: all {len(corpus)} pairs of {corpus.name} have a sentence of '
                            f'{tests.path}; give another test set, or --exclude {NOTHING}')
        vocabularies = of_corpus(corpus, settings, restore(state['vocabularies']) if state else None, excluded)
        if settings['tokenizer'] == 'bpe':
            print(subwords_line(len(vocabularies[0]), settings['vocabulary']), flush=True)
        chosen = corpus.first(settings['pairs'] or None)
        excluded = None if excluded is None else excluded[:len(chosen)]
        parts = hold_out(chosen, settings['hold_out'], excluded)
        if tests:
            number = len(chosen) - sum(map(len, parts))
            print(f'excluded : {number} of {len(chosen)} pairs, which have a sentence of {tests.path}'
                  + f'; this is the default, --exclude {NOTHING} trains on them' * (is_default and not state), flush=True)
        train, validation, test = map(vocabularies[0].read_corpus, parts)
        source, target = vocabularies
        encoded = [(source.encode(part.sources), target.encode(part.targets)) for part in (train, validation)]
        if line := cut_line(*encoded[0], settings['num_steps']):
            print(line, flush=True)
        if len(train) < least:
            raise UserError(f'{corpus.name}: has {len(train)} pairs to train on, and a batch is {least}; give a smaller -b')
        pairs = (Pairs.of(*sides, settings['num_steps']) for sides in encoded)
        data = cls(corpus, vocabularies, *pairs, test, chosen, settings['hold_out'], train, excluded,
                   tests and dict(name=settings['exclude'], sha256=tests.sha256))
        if settings['bpe_dropout']:
            data.train.reserve(data.encode_epoch(1.0, 0, 0))        # single bytes
        return data

    @classmethod
    def _of_packed(cls, packed, args, settings, least):
        """Return the Data of a packed corpus, whose pairs are mapped files, and print lines about it."""
        for name in SETTINGS:
            given, value = getattr(args, name), packed.content['settings'][name]
            if given not in (None, value):
                raise UserError(f'--{name.replace("_", "-")} {given}: {packed.folder} was packed with {value}; leave the flag '
                                'out, or pack the corpus again')
            settings[name] = value
        for name in ('hold_out', 'tiny', 'pairs', 'exclude', 'bpe_dropout'):
            if settings[name] not in (None, 0, NOTHING):
                flag = f'--{name.replace("_", "-")}'
                raise UserError(f'{flag} {settings[name]}: needs the text of the corpus, and {packed.folder} has encoded '
                                f'pairs; leave {flag} out')
        settings |= dict(hold_out=0.0, exclude=NOTHING)
        train, validation = map(packed.pairs, ('train', 'validation'))
        check_keep_best(args, len(validation), 'pack the corpus with --validation TEXT')
        if args.keep_best == 'bleu':
            raise UserError(f'--keep-best bleu: {packed.folder} has encoded pairs, and no raw text to translate; give '
                            '--keep-best loss')
        nothing = Corpus(packed.folder, [], [])
        print(f'packed corpus : {packed.folder}, {len(train)} pairs, {len(validation)} for validation', flush=True)
        if len(train) < least:
            raise UserError(f'{packed.folder}: has {len(train)} pairs to train on, and a batch is {least}; give a smaller -b')
        return cls(nothing, packed.vocabularies(), train, validation, nothing, nothing, 0.0, nothing, None, None)

    def texts(self, part):
        """Return sources, lists of references and the number of sources left out of 'validation' or 'test', as raw text."""
        return evaluation.test_set(self.chosen, self.hold_out, part, self.excluded)

    @property
    def shared(self):
        """Whether sources and targets have one vocabulary, so that they can share embeddings."""
        return self.vocabularies[0] is self.vocabularies[1]

    def encode_epoch(self, dropout, seed, epoch):
        """Return the Pairs to train on in an epoch, with BPE dropout: a function of the sentences and the arguments alone."""
        source, target = self.vocabularies
        return Pairs.of(source.encode_epoch(self.sentences.sources, dropout, seed, epoch),
                        target.encode_epoch(self.sentences.targets, dropout, seed, epoch, stream=1), self.train.longest)

    def start_epoch(self, settings, run):
        """Encode the sentences to train on for the epoch that begins.  With BPE dropout they differ in each epoch; otherwise
        nothing is done."""
        if settings['bpe_dropout']:
            self.train.assign(self.encode_epoch(settings['bpe_dropout'], run.seed, run.epoch))

    def state(self, program, settings):
        """Return what the checkpoints of a run on this data contain besides its progress."""
        return dict(program=program, settings=settings, pairs=self.train.digest(), corpus=self.corpus.name,
                    excluded=self.test_set, vocabularies=states(self.vocabularies))

    def lines(self, rows):
        """Return a line for each of these pairs: source, tab, target, with their tokens separated by spaces."""
        return [f'{self.sentences.sources[row]}\t{self.sentences.targets[row]}' for row in rows]

    def describe(self, rows):
        """Return lengths and tokens of these pairs for the manifest of saved tensors: {'source': one entry per sentence, ...}.

        target: the decoder's input, <bos> and all tokens but the last, which is <eos> unless the sentence was truncated.
        """
        lengths, tokens = {}, {}
        tables = self.train.source, self.train.labels
        for side, table, vocabulary in zip(('source', 'target'), tables, self.vocabularies, strict=True):
            sentences = [table[row] for row in backend.get(rows)]
            lengths[side] = [len(ids) for ids in sentences]
            words = [vocabulary.words(ids) for ids in sentences]
            tokens[side] = [[SPECIALS[BOS], *line[:-1]] for line in words] if side == 'target' else words
        return lengths, tokens


def check_keep_best(args, held_out, remedy):
    """Raise UserError if --keep-best needs held-out pairs and there are none (held_out 0), or sacrebleu and it is missing."""
    if args.keep_best and not held_out:
        raise UserError(f'--keep-best {args.keep_best}: nothing is held out to validate with; {remedy}')
    if args.keep_best == 'bleu':
        evaluation.check()


def excluded_test_set(args, settings, corpus, state=None):
    """Return the TestSet whose sentences a run does not train on, None if it trains on all; and set settings['exclude'].

    settings['exclude'] None is replaced by the default: tatoeba-test if the corpus is fra-eng and the data folder has both.
    state: of the checkpoint that the run resumes; None: a new run.  Its test set is required again.
    """
    name, recorded = settings['exclude'], state and state.get('excluded')       # older checkpoints have none
    if state:
        trained = recorded['name'] if recorded else NOTHING
        name = trained if args.exclude is None else args.exclude
        if (name == NOTHING) != (trained == NOTHING):
            raise UserError(f'--exclude {name}: {args.checkpoint} was trained with {trained}; leave --exclude out, or '
                            'give another folder with -c')
    elif name is None:
        name = TATOEBA if is_fra_eng(corpus) and locate.find(TATOEBA, args.data_dir) else NOTHING
    settings['exclude'] = name
    if name == NOTHING:
        return None
    return open_excluded(args.checkpoint, recorded, args.data_dir, name) if state else open_test_set(name, args.data_dir)


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
    """Return the checkpoint.Found of a training run: what -c names, else none, and ./checkpoints as the folder.

    Of several ranks, rank 0 reads the checkpoint and sends it to the others.
    """
    return distributed.on_first(lambda: _find_checkpoint(args, program))


def _find_checkpoint(args, program):
    if args.checkpoint is None:
        return checkpoint.fresh('.' if plan_requested(args) else './checkpoints')
    found = checkpoint.find(args.checkpoint)
    checkpoint.check_program(found, program)
    if found.state and 'run' not in found.state:
        maker = 'averaged' if 'averaged' in found.state else 'converted by transformer.from_marian'
        raise UserError(f'{found.path}: was {maker} and cannot be trained further; give another folder with -c, or -e 0 to '
                        'serve it')
    return found


def select_exact(args, found):
    """Select exact kernels (pyops.set_exact) by --exact or --no-exact, else as the checkpoint found was trained, else by
    PYOPS_EXACT.  Return whether they are used, for the settings of the run.  Print a line if they were not, or were, before.

    UserError if a run that was exact cannot be: on a GPU, or with another precision
    """
    was = found.state and found.state['settings'].get('exact', False)
    if was and args.exact is None:
        args.exact = True
        try:
            use_gpu(args)
        except UserError as error:
            raise UserError(f'{found.path} was trained with --exact; {error}') from error
    now = backend.HOST.exact
    if was is not None and was != now:
        print(f'{found.path} was trained {"with" if was else "without"} --exact, and is now trained '
              f'{"with" if now else "without"} it', flush=True)
    return now


def session(args, program):
    """Return the facts about this start of a program that are needed to repeat its steps (pyops.rewind)."""
    return dict(program=program, flags=args.argv, folder=os.getcwd(), version=__version__, isa=backend.isa(),
                device=repr(backend.current_device()), precision=args.precision, exact=backend.HOST.exact)


def start_run(args, found, settings, data, model, optimizer, wanted=None):
    """Return the fit.Run of a training run: new, or resumed from the checkpoint found, whose tensors are copied into the model.

    Return None, after a line about it, if all epochs are done or --patience has ended the run.
    wanted: tensors to save; UserError if none can be saved.
    UserError if the ranks differ in flags, settings or data.
    """
    if distributed.size() > 1:
        names = ('epochs', 'max_steps', 'reduce', 'precision', 'no_plan', 'keep_best', 'patience', 'shard_optimizer',
                 'save_every', 'save_minutes')
        distributed.agree(flags={name: getattr(args, name) for name in names}, settings=settings, data=data.train.digest())
    if settings['quant'] != 'none':
        print(model.config.ops.check(), flush=True)
        model.config.ops.attach(optimizer)
    if found.state is None:
        return fit.Run(settings['seed'], settings['batch_size'])
    check_vocabularies(found.path, found.state, data.vocabularies, data.train, ', or start from scratch in another folder')
    checkpoint.restore(model.params, optimizer, found.tensors, found.path)
    found.tensors.clear()                                       # free the second copy of the model
    print('loaded from checkpoint', flush=True)
    run = fit.Run(**(found.state['run'] | {'batch_size': settings['batch_size']}))
    metric = METRICS[args.keep_best]
    if metric and run.best is not None and run.best_of(metric) is None:
        print(f'best checkpoint : selected by {metric} from now on, formerly by {run.best_metric} ({run.best:.5g} of epoch '
              f'{run.best_epoch}); the next epoch replaces {checkpoint.BEST}', flush=True)
    reason, remedy = run.why_over(metric, args.patience), 'a larger --patience trains on'
    if run.epoch >= args.epochs:
        reason, remedy = f'all {args.epochs} epochs are done', f'-e {run.epoch + 10} trains on'
    if reason is None or plan_requested(args):
        return run
    if wanted:
        raise UserError(f'{wanted.folder}: no tensor was saved: {reason} ({run.epoch} in {found.path}); {remedy}')
    print(f'{reason} ({run.epoch} in {found.path}); {remedy}, -e 0 serves')
    return None


def batches(settings, pairs, drop_last=False):
    """Return the batches of a run: of --batch-tokens tokens if that is set, else of --batch-size pairs."""
    tokens, longest, parts = settings['batch_tokens'], settings['num_steps'], settings['accumulate']
    if not tokens:
        return FixedBatches(len(pairs), settings['batch_size'], drop_last, on_host=True, parts=parts)
    if tokens < longest:
        raise UserError(f'--batch-tokens {tokens}: a sentence has up to --num-steps {longest} tokens; give at least that')
    return TokenBatches(pairs.lengths, tokens, parts)


def parts(args, settings, pairs, batches, count):
    """Return the Parts of the batches of a run; with --parts or several ranks its CutPairs.  Also set settings['parts'].

    count: the optimizer's step count
    """
    fewest = settings['batch_size'] * settings['accumulate']
    number = distributed.number_of_parts(settings['parts'], args.reduce == 'fast',
                                         len(pairs) if settings['batch_tokens'] else min(fewest, len(pairs)))
    settings['parts'] = number
    return Parts(pairs, batches, count) if number == 1 else CutPairs(pairs, number, count, args.reduce == 'fast')


def adam(model, settings):
    """Return the optimizer of a training run: Adam, which clips long gradients, with the moving average that --ema asks for."""
    optimizer = Adam(model.params, settings['lr'], max_norm=MAX_NORM)
    if settings['ema']:
        optimizer.average_parameters(settings['ema'])
    return optimizer


class Schedule:
    """The learning rate of each step of a run, as the settings of the schedule ask.

    It is a function of the step count, so a resumed run continues the schedule; one that ends with the run, if -e is the same.
    steps: number of steps of the run, for a schedule that ends with it
    """

    def __init__(self, settings, optimizer, steps):
        self._settings, self._optimizer, self._steps = settings, optimizer, steps

    @classmethod
    def of_run(cls, settings, optimizer, run, batches, epochs):
        """Return the Schedule of a run that ends after so many epochs."""
        return cls(settings, optimizer, fit.planned_steps(run, batches, epochs, optimizer) if has_an_end(settings) else None)

    def set_rate(self):
        """Set the learning rate of the next step; call it in a step."""
        lr, warmup = self._settings['lr'], self._settings['warmup']
        if has_an_end(self._settings):
            decaying_rate(self._optimizer, lr, warmup, self._steps, self._settings['schedule'])
        elif warmup:
            inverse_square_root(self._optimizer, lr, warmup)


def has_an_end(settings):
    """Return whether the learning rate depends on the number of steps of the run."""
    return settings['schedule'] != 'inverse-root'


class Parts:
    """The parts of a batch (--accumulate): their gradients add up to the gradient of the batch's mean loss.

    batches: as in batches();  count: the optimizer's step count, from which dropout masks are numbered
    tokens (1,) int32: the number of target tokens of the batch
    """

    def __init__(self, pairs, batches, count):
        self._pairs, self._batches, self._count = pairs, batches, count
        self._shares, self.tokens = backend.put(np.ones(batches.parts, np.float32)), backend.zeros(1, np.int32)
        self._loss, self._mask = backend.zeros(1), backend.zeros(1, np.int64)
        self._masks = backend.put(np.array([int(backend.get(count)[0]) * batches.parts]))       # number of masks so far

    def arrays(self):
        """Return {name: array} for a plan."""
        return dict(shares=self._shares, tokens=self.tokens, batch_loss=self._loss, mask=self._mask, masks=self._masks)

    def sizes(self, rows):
        """Return the sizes of the parts of a batch.  Also sets the number of its tokens, and the parts' shares of them.
        rows: on the host."""
        sizes = [self._pairs.sizes(part) for part in self._batches.split(rows)]
        targets = np.array([target for _, _, target in sizes])
        # arrays are copied from the host; to fill with a number takes a kernel on a GPU
        self.tokens[...] = np.array([targets.sum()], np.int32)
        self._shares[:len(sizes)] = (targets / targets.sum()).astype(np.float32)
        return tuple(size for part in sizes for size in part)

    def filled(self, rows):
        """Return the pairs of a batch, on a GPU with fillers behind each part, and their sizes; see Pairs.filled.  Also sets
        the same as sizes(), without the fillers."""
        self.sizes(rows)
        parts, sizes = zip(*(self._pairs.filled(part) for part in self._batches.split(rows)), strict=True)
        return np.concatenate(parts), tuple(size for part in sizes for size in part)

    def gradients(self, model, rows, sizes):
        """Add the gradients of a batch to the gradients of the parameters, and return its mean loss, (1,)."""
        if len(sizes) == 3:
            return self.gradients_of(model, self._pairs.batch(rows, *sizes), self._count, None)
        backend.launch('fill', self._loss, 1, 0.0)
        first = 0
        with model.params.rounded_once(), quantization.same_weights(model.config.ops):
            for i in range(len(sizes) // 3):
                count, *tokens = sizes[3 * i:3 * i + 3]
                share = self._shares[i:i + 1]
                backend.launch('tick', self._mask, self._masks)
                loss = self.gradients_of(model, self._pairs.batch(rows[first:], count, *tokens), self._mask, share)
                backend.launch('axpy', self._loss, loss, share, 1)
                first += count
        return self._loss

    @staticmethod
    def step(gradients, update):
        """Return step(rows, *sizes), which calls update(gradients(rows, *sizes))."""
        return lambda rows, *sizes: update(gradients(rows, *sizes))

    @staticmethod
    def gradients_of(model, batch, mask, share):
        """Add the gradients of `share` times the mean loss of a batch, and return the mean loss."""
        with quantization.recording(model.config.ops):
            loss, ctx = model.forward(batch, mask, dloss=share)
            plan.boundary()
            model.backward(ctx)
        return loss


class CutPairs(Cut):
    """Batches of pairs cut into parts of about the same number of target tokens (--parts).   tokens: as in Parts"""

    def __init__(self, pairs, parts, count, fast=False):
        super().__init__(parts, count, lambda rows: pairs.lengths[rows, 1], fast)
        self._pairs, self.tokens, self.sizes, self.filled = pairs, self.weight, pairs.sizes, pairs.filled

    def gradients(self, model, rows, sizes):
        """Add the gradients of a part to the gradients of the parameters.   rows: of the part;  sizes: as from Pairs.sizes"""
        self.note(Parts.gradients_of(model, self._pairs.batch(rows, *sizes), self.mask, self.share))


class Validation:
    """Computes the validation metrics of an epoch.   data: the Data of the run;  args: its flags

    translator: the Translator of the model, for BLEU: with --keep-best bleu of all validation sentences, else of a sample of a
    large corpus, if sacrebleu is installed
    """

    def __init__(self, model, data, args, translator):
        self._model, self._pairs, self._batch_size = model, data.validation, args.batch_size or 128
        self.metric = METRICS[args.keep_best]
        self._translator, self._sources, self._references = translator, [], []
        if args.keep_best == 'bleu':
            self._sources, self._references, _ = data.texts('validation')
        elif (count := min(len(data.train) // PAIRS_PER_SENTENCE, MOST_SENTENCES)) >= FEWEST_SENTENCES and (
                len(self._pairs) and not is_packed(args.corpus) and find_spec('sacrebleu')):
            with contextlib.suppress(UserError):            # no sentence is left
                self._sources, self._references = (side[:count] for side in data.texts('validation')[:2])

    def __call__(self):
        """Return {'validation': mean loss per token, 'bleu': BLEU of greedy translations against one reference}; {} if there is
        nothing to validate with, and no BLEU without sentences to translate."""
        if not len(self._pairs):
            return {}
        values = {'validation': validation_loss(self._model, self._pairs, self._batch_size)}
        if self._sources:
            values['bleu'] = distributed.on_first(self._bleu)
        return values

    def _bleu(self):
        value = evaluation.bleu(self._translator.translate(self._sources, beam=1), self._references)
        self._translator.reset()                                    # the weights will change
        return value

    @staticmethod
    def text(values):
        """Return the end of the line about an epoch: its validation metrics, if it has any."""
        return ''.join(f' {name} : {values[name]:.{digits}f}' for name, digits in (('validation', 5), ('bleu', 2))
                       if name in values)


def validation_loss(model, pairs, batch_size):
    """Return the mean loss per token over all pairs, without dropout.  Ranks share the batches."""
    losses = {}                                                     # loss and tokens by number of the first pair
    with model.params.rounded_once(), quantization.same_weights(model.config.ops):
        for first in range(batch_size * distributed.rank(), len(pairs), batch_size * distributed.size()):
            batch = pairs.batch_of(np.arange(first, min(first + batch_size, len(pairs))))
            loss, ctx = model.forward(batch, gradients=False)
            losses[first] = float(loss[0]), int(model.valid(ctx)[0])
    losses = {first: value for part in distributed.gather(losses) for first, value in part.items()}
    loss_sum = tokens = 0
    for _, (loss, valid) in sorted(losses.items()):                 # in the same order with any number of ranks
        loss_sum += loss * valid
        tokens += valid
    return loss_sum / tokens


def score(saver, optimizer, translator, test):
    """Print the scores of the test sentences, if any, at the end of a run: of its best checkpoint, if it keeps one."""
    if not len(test) or not distributed.is_first():
        return
    with optimizer.averaged():
        if path := saver.load_best():
            print(f'loading from checkpoint : {path}', flush=True)
            translator.reset()
        serving.score(translator, test)


def side(layer, name):
    """Return which sentences, 'source' or 'target', correspond to the rows of tensor `name` of a saved layer."""
    if layer.startswith('encoder'):
        return 'source'
    of_memory = layer.endswith(('.cross_attention.k', '.cross_attention.v'))
    crosses = layer == 'attention' or layer.endswith('.cross_attention')        # of seq2seq, of the transformer
    return 'source' if of_memory or crosses and name in ('key', 'value') else 'target'
