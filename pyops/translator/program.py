"""Base class of the translation programs: flags, settings, training.  A subclass adds its model and the lines it prints.

    class Mine(Program): ...            name, DEFAULTS, flags of its own, its model, the lines it prints
    PROGRAM = Mine()
    PROGRAM.main()                      runs `python -m mine.train`

numpy, the library and the model are imported on first use, so that --help is quick and requires none of them.
"""
import dataclasses
import math
import sys
from collections.abc import Callable
from typing import NamedTuple

from pyops.errors import UserError
from pyops.inspect import flags
from pyops.training import (
    ArgumentParser,
    Progress,
    add_gpu_flag,
    add_max_steps_flag,
    add_plan_flags,
    add_quant_flags,
    add_threads_flag,
    asks_for_plan,
    fraction,
    int_up_to,
    non_negative_float,
    non_negative_int,
    positive_float,
    positive_int,
    say,
    use_gpu,
)

EMBEDDED_HOLD_OUT = 0.1
MAX_NORM = 1.0          # gradients longer than this are clipped


class Architecture(NamedTuple):
    """The contents of a program's model.py."""
    sizes: tuple[str, ...]      # settings in which a checkpoint must agree with the model that loads it
    config: type                # a dataclass: config(source_size, target_size, num_steps=..., ops=..., ...)
    model: type                 # model(config, seed): forward, backward, valid, arrays, translate, params
    parameter_specs: Callable   # parameter_specs(config) -> name: Spec

    def configure(self, settings, source_size=1, target_size=1):
        """Return the model's config for these settings and vocabulary sizes; UserError if they contradict each other."""
        from pyops.quantization import family_of
        fields = [field.name for field in dataclasses.fields(self.config)]
        return self.config(source_size, target_size, **{name: settings[name] for name in fields if name in settings},
                           ops=family_of(settings))


class Program:
    """A translation program.  Subclasses override the attributes and hooks.  Hooks return the text to print, or None."""
    name = ''                   # name of its package, stored in its checkpoints
    description = ''
    epochs = 10                 # default of -e
    dropped = ''                # where dropout is applied, for --help
    # The value of a setting without a flag, or that the program has no flag for.  In a resumed run the checkpoint's values
    # take precedence.
    DEFAULTS = dict(batch_size=128, seed=0, hold_out=None, tiny=0, pairs=0, min_count=3, num_steps=9, warmup=0,
                    quant='none', quant_layers='')
    PRESETS = {}                # --preset NAME: values that replace those in DEFAULTS; the first is the default
    GROWING = ()                # settings that the model's memory depends on
    drop_last = False           # leave out the last batch of an epoch if it is smaller than the others

    def add_flags(self, parser):
        """Add the program's own flags to the groups of an ArgumentParser."""

    def architecture(self):
        """Return the Architecture; imports the model."""
        raise NotImplementedError

    # ---- hooks that return text to print -----------------------------------------------------------

    line_first = False          # print the line of an epoch before the line about its checkpoint

    def at_start(self, args):
        """Return the first lines to print."""

    def before_data(self, args, settings):
        """Return the lines to print before the corpus is opened."""

    def after_data(self, args, settings, found, vocabularies):
        """Return the lines to print once the corpus is loaded.  found: the checkpoint.Found of this run."""

    def before_epochs(self, plan):
        """Return the lines to print before training with plans.  plan: the plan of a step."""

    def progress(self, epoch, total, initial):
        """Return the Progress of an epoch (counted from 0) of `total` pairs, `initial` of which an earlier run did."""
        return Progress(total, 'pairs', initial)

    def epoch_line(self, values):
        """Return the line to print after an epoch; the validation loss is appended.  values: see pyops.fit."""
        raise NotImplementedError

    def answer(self, read, output):
        """Return the lines of a translation.  read, output: the tokens of the sentence and of its translation, with <eos>."""
        raise NotImplementedError

    @staticmethod
    def side(layer, name):
        """Return which sentences, 'source' or 'target', correspond to the rows of tensor `name` of a saved layer."""
        if layer.startswith('encoder'):
            return 'source'
        of_memory = layer.endswith(('.cross_attention.k', '.cross_attention.v'))
        return 'source' if of_memory or layer.endswith('.cross_attention') and name in ('key', 'value') else 'target'

    # ---- shared by all programs --------------------------------------------------------------------

    def parser(self):
        p = ArgumentParser(prog=f'python -m {self.name}.train', description=self.description)
        training, checkpoints, data = map(p.group, ('training', 'checkpoints', 'data'))
        training.add_argument('-e', '--epochs', type=non_negative_int, default=self.epochs, metavar='N',
                              help='train until N epochs are done; 0 serves a checkpoint (default %(default)s)')
        self.add_setting(training, '-b', '--batch-size', type=positive_int, help='sentence pairs per step')
        self.add_setting(training, '-l', '--lr', type=positive_float, metavar='X', help='learning rate of Adam')
        self.add_setting(training, '--seed', type=non_negative_int, help='seed of weights, dropout and data order')
        add_max_steps_flag(p)
        add_threads_flag(p)
        checkpoints.add_argument('-c', '--checkpoint', metavar='PATH',
                                 help='a checkpoint to resume; or a folder: resume its newest checkpoint, and write new ones '
                                 'there (default: start from scratch, write to ./checkpoints)')
        checkpoints.add_argument('--save-every', type=positive_int, default=10, metavar='N',
                                 help='epochs between checkpoints (default %(default)s)')
        checkpoints.add_argument('--save-minutes', type=non_negative_float, default=10, metavar='M',
                                 help='also save when the last checkpoint is M minutes old; the next one replaces it; 0 '
                                 'disables this (default %(default)s)')
        data.add_argument('-f', '--corpus', metavar='FILE',
                          help='sentence pairs, one per line, separated by a tab: a text, or a .zip, .gz, .bz2 or .xz file '
                          "of one; or 'embedded' (default: fra-eng if found, else embedded)")
        data.add_argument('--data-dir', metavar='DIR',
                          help='search for fra-eng only in DIR (default: $PYOPS_DATA, then ./data)')
        data.add_argument('-t', '--tiny', type=int, choices=(0, 1), nargs='?', const=1,
                          help='1: use only the first 512 pairs and their words, for a trial '
                          f'(default {self.DEFAULTS["tiny"]})')
        data.add_argument('--pairs', type=positive_int, metavar='N',
                          help='train on the first N pairs only, with the vocabularies of all (default: all)')
        self.add_setting(data, '--min-count', type=positive_int, help='treat words that occur less often as unknown')
        data.add_argument('--hold-out', type=fraction, metavar='F',
                          help='share of the sentences that is held out for validation and test '
                          f'(default 0; embedded corpus {EMBEDDED_HOLD_OUT})')
        self.add_setting(data, '--num-steps', type=int_up_to(1000),
                         help='tokens per sentence, end mark included; longer sentences are cut, shorter ones padded')
        self.add_setting(p.group('model'), '-d', '--dropout', type=fraction, metavar='P', help=f'dropout rate, {self.dropped}')
        if self.PRESETS:
            first, *others = self.PRESETS
            texts = [f'{name}: ' + ', '.join(setting.replace('_', '-') + ('' if value is True else f' {value}')
                                             for setting, value in self.PRESETS[name].items()) for name in others]
            p.group('presets and schedule').add_argument(
                '--preset', choices=list(self.PRESETS), help=f'set of defaults; {"; ".join(texts)} (default {first})')
        self.add_flags(p)
        add_gpu_flag(p)
        add_quant_flags(p, 'as in the checkpoint, in a new run $CUSTOM_QUANT_TYPE, else none')
        add_plan_flags(p)
        flags.add_saving_flags(p)
        return p

    def parse(self, argv=None):
        return self.parser().parse_args(argv)

    def add_setting(self, group, *flags, type, help, metavar='N'):
        """Add the flag of a setting in DEFAULTS to a group of a parser."""
        name = flags[-1].removeprefix('--').replace('-', '_')
        group.add_argument(*flags, type=type, metavar=metavar, help=f'{help} (default {self.DEFAULTS[name]})')

    def resolve(self, args, state, path):
        """Return the settings as a dict: flags take precedence over the checkpoint, then the preset, then DEFAULTS.

        Raises UserError if a size, the seed or the data selection differs from the checkpoint's, or the preset has another
        size.
        """
        from pyops import quantization
        stored, sizes = state['settings'] if state else {}, self.architecture().sizes

        def refuse(name, value):
            flag, was = '--' + name.replace('_', '-'), f'with {stored[name]}'
            given = f'{flag} {value}'
            if isinstance(value, bool):                     # a flag without a value
                given, was = (flag, 'without it') if value else (f'--no-{flag[2:]}', f'with {flag}')
                flag = given
            elif name == 'pairs' and not stored[name]:
                was = 'with all pairs'
            raise UserError(f'{given}: {path} was trained {was}; leave {flag} out, or give another folder with -c')

        settings, defaults, is_another = {}, self.DEFAULTS, False
        if self.PRESETS:
            preset = settings['preset'] = args.preset or stored.get('preset') or next(iter(self.PRESETS))
            defaults, is_another = defaults | self.PRESETS.get(preset, {}), stored.get('preset', preset) != preset
        for name, default in defaults.items():
            given = getattr(args, name, None)
            settings[name] = stored.get(name, default) if given is None else given
            is_fixed = name in (*sizes, 'seed', 'tiny', 'pairs', 'min_count', 'hold_out')
            if is_fixed and name in stored and settings[name] != stored[name]:
                refuse(name, settings[name])
            if name in sizes and is_another and given is None and settings[name] != default:
                refuse('preset', preset)
        return settings | quantization.resolve(args, state and stored)

    def load(self, found):
        """Return tensors and state of the checkpoint found, None and None if there is none.  UserError if it belongs to
        another program."""
        for warning in found.warnings:
            print(warning, file=sys.stderr)
        if found.path is not None and found.state.get('program') != self.name:
            raise UserError(f'{found.path}: a checkpoint of {found.state.get("program")}, not of {self.name}; '
                            'give another with -c')
        return found.tensors, found.state

    def main(self, argv=None):
        args = self.parse(argv)
        wanted = flags.wanted(args)
        use_gpu(args)
        from pyops import backend, checkpoint  # after parsing: --help needs no library
        if args.threads:
            backend.set_threads(args.threads)
        say(self.at_start(args))
        if args.epochs == 0:
            if args.save_tensors is not None:
                raise UserError('--save-tensors: -e 0 serves and runs no training step whose tensors could be saved')
            from pyops.translator.serving import serve
            return serve(self, args.checkpoint, args)
        if args.checkpoint is not None:
            found = checkpoint.find(args.checkpoint)
        else:
            found = checkpoint.fresh('.' if asks_for_plan(args) else './checkpoints')
        train(self, args, found, wanted)


def cut_line(corpus, num_steps):
    """Return a line with the number of sentences that training cuts, None if it cuts none."""
    sources, targets, pairs = corpus.count_cut(num_steps)
    if pairs:
        return (f'cut to --num-steps {num_steps} tokens, end mark included : {sources} sources, {targets} targets, '
                f'{pairs} of {len(corpus)} pairs ({pairs / len(corpus):.1%}); a larger --num-steps cuts fewer')


def train(program, args, found, wanted=None):
    """Train from scratch or resume the checkpoint found, then score the test sentences.  wanted: tensors to save, or None."""
    import contextlib

    from pyops import checkpoint, fit, plan
    from pyops.data.batches import epoch_order
    from pyops.optim import Adam, inverse_square_root
    from pyops.text.split import hold_out
    from pyops.text.translation import EMBEDDED, Pairs, Translator, check_vocabularies, open_corpus
    from pyops.text.vocabulary import SPECIALS
    from pyops.translator.serving import score

    # settings
    stored, state = program.load(found)
    settings, architecture = program.resolve(args, state, found.path), program.architecture()
    architecture.configure(settings)                    # report contradictions before minutes of loading
    say(program.before_data(args, settings))

    # data
    corpus, line = open_corpus(args.corpus, args.data_dir, settings['tiny'])
    say(line)
    if settings['hold_out'] is None:
        settings['hold_out'] = EMBEDDED_HOLD_OUT if corpus.name == EMBEDDED else 0.0
    vocabularies = corpus.vocabularies(settings['min_count'])
    for side, vocabulary in zip(('source', 'target'), vocabularies, strict=True):
        if len(vocabulary) == len(SPECIALS):
            raise UserError(f'{corpus.name}: no {side} word occurs {settings["min_count"]} times or more; '
                            'give --min-count 1 or a larger corpus')
    training, validation, test = hold_out(corpus.first(settings['pairs'] or None), settings['hold_out'])
    say(cut_line(training, settings['num_steps']))
    sentences = Pairs.encode(training, *vocabularies, settings['num_steps'])
    pairs = sentences.placed()
    held_out = Pairs.encode(validation, *vocabularies, settings['num_steps']).placed()
    if program.drop_last and len(pairs) < settings['batch_size']:
        raise UserError(f'{corpus.name}: has {len(pairs)} pairs to train on, and a batch is {settings["batch_size"]}; '
                        'give a smaller -b')
    say(program.after_data(args, settings, found, vocabularies))

    # model
    config = architecture.configure(settings, *map(len, vocabularies))
    fit.check_model_memory(architecture.parameter_specs(config), program.GROWING)
    model = architecture.model(config, settings['seed'])
    optimizer = Adam(model.params, settings['lr'], max_norm=MAX_NORM)
    if settings['quant'] != 'none':
        say(config.ops.check())
        config.ops.step = optimizer.count
    run = fit.Run(settings['seed'], settings['batch_size'])
    if state:
        check_vocabularies(found.path, state, vocabularies, pairs)
        fit.restore(model.params, optimizer, stored, found.path)
        stored.clear()                                    # free the second copy of the model
        run = fit.Run(**(state['run'] | {'batch_size': settings['batch_size']}))
        print('loaded from checkpoint')
        if run.epoch >= args.epochs and not asks_for_plan(args):
            if wanted:
                raise UserError(f'{wanted.folder}: no tensor was saved: all {args.epochs} epochs are done ({run.epoch} in '
                                f'{found.path}); -e {run.epoch + 10} trains on')
            print(f'all {args.epochs} epochs are done ({run.epoch} in {found.path}); '
                  f'-e {run.epoch + 10} trains on, -e 0 serves')
            return

    # training
    state = dict(program=program.name, settings=settings, pairs=pairs.digest(), corpus=corpus.name,
                 vocabularies=dict(zip(('source', 'target'), (v.tokens for v in vocabularies), strict=True)))

    history = fit.History()

    def step(rows):
        # a function of the step count alone, so that a resumed run continues the schedule
        if settings['warmup']:
            inverse_square_root(optimizer, settings['lr'], settings['warmup'])
        model.params.zero_grads()
        loss, ctx = model.forward(*pairs.batch(rows), step=optimizer.count)
        valid = model.valid(ctx)
        plan.boundary()
        model.backward(ctx)
        optimizer.step()
        history.add(loss, valid, optimizer.norm)

    planned = plan.Steps(step, model.params, **pairs.arrays(), **model.arrays(), **optimizer.arrays(), **history.arrays())
    first_batch = epoch_order(len(pairs), run.seed, run.epoch)[:run.batch_size]
    if asks_for_plan(args):
        return plan.describe(args, planned.plan(first_batch))
    run_step = step if args.no_plan else planned
    checkpoint.check_free_space(found.folder, fit.checkpoint_bytes(model.params))
    if not args.no_plan:
        recorded = planned.plan(first_batch)
        fit.check_step_memory(recorded)
        say(program.before_epochs(recorded))
        say(plan.before_training(args, recorded))
    saving = None
    if wanted:
        from pyops.inspect.saving import Saving
        first = int(optimizer.count[0])
        steps = fit.steps_left(run, len(pairs), args.epochs, program.drop_last, args.max_steps)
        saving = Saving(wanted, planned, first_batch, first, first + steps, dict(program=program.name, settings=settings),
                        program.side, lambda rows: sentence_info(sentences, vocabularies, rows))
        run_step, history.on_read = saving.step, saving.note

    def results(sizes):
        return [(loss, int(valid), optimizer.clips(norm)) for loss, valid, norm in history.read(len(sizes))]

    def validate():
        return {'validation': evaluate(model, held_out, run.batch_size)} if len(held_out) else {}

    def line(values):
        validation = f' validation : {values["validation"]:.5f}' if 'validation' in values else ''
        return program.epoch_line(values) + validation

    with saving or contextlib.nullcontext():
        ended = fit.fit(run, len(pairs), args.epochs, run_step, results, found.folder,
                        fit.Saver(found, model.params, optimizer, run, state), args.save_every, validate,
                        line=line, progress=program.progress, drop_last=program.drop_last,
                        line_first=program.line_first, max_steps=args.max_steps, save_minutes=args.save_minutes,
                        chance_loss=math.log(len(vocabularies[1])))
    if ended.done and ended.signal is None and len(test):
        score(Translator(model, *vocabularies, settings['num_steps'], program.answer), test)
    if saving:
        saving.check()
    ended.leave()


def sentence_info(pairs, vocabularies, rows):
    """Return lengths and tokens of pairs, {'source': one entry per sentence, 'target': ...}, for the manifest of saved tensors.

    target: the decoder's input, <bos> and all tokens but the last, which is <eos> unless the sentence was truncated.
    """
    from pyops import backend
    from pyops.text.vocabulary import BOS, PAD, SPECIALS
    lengths, tokens, rows = {}, {}, backend.get(rows)
    for side, table, vocabulary in zip(('source', 'target'), (pairs.source, pairs.labels), vocabularies, strict=True):
        sentences = [ids[ids != PAD] for ids in table[rows]]
        lengths[side] = [len(ids) for ids in sentences]
        words = [vocabulary.words(ids) for ids in sentences]
        tokens[side] = [[SPECIALS[BOS], *line[:-1]] for line in words] if side == 'target' else words
    return lengths, tokens


def evaluate(model, pairs, batch_size):
    """Return the mean loss per valid token over all pairs, without dropout."""
    import numpy as np

    from pyops import backend
    loss_sum = tokens = 0
    for first in range(0, len(pairs), batch_size):
        indices = backend.put(np.arange(first, min(first + batch_size, len(pairs))))
        loss, ctx = model.forward(*pairs.batch(indices), gradients=False)
        valid = int(model.valid(ctx)[0])
        loss_sum += float(loss[0]) * valid
        tokens += valid
    return loss_sum / tokens
