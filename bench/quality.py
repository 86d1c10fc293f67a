"""Train the transformer and its PyTorch twin for the same time, and draw BLEU against seconds.

    python -m bench.quality --minutes 30                    the default recipe on fra-eng
    python -m bench.quality --epochs 10                     the same steps for both, whatever time they take
    python -m bench.quality --minutes 5 --recipe --preset base --batch-tokens 1024 --hold-out 0.02 --precision bf16
    python -m bench.quality --draw RESULT.json -o docs/images/quality.svg

docs/speed.md describes the measurement.  The result file is complete after each evaluation; Ctrl-C keeps what it contains.
"""
import argparse
import datetime
import functools
import itertools
import json
import math
import platform
import shlex
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from bench import learners, results
from bench.contest import BF16, NAMES, Contestant, add_contestant_flags, kinds_of
from bench.table import WHOSE
from pyops import CPU_PRECISIONS, __version__
from pyops.errors import UserError, exits_cleanly
from pyops.files import write_atomically
from pyops.flags import ArgumentParser, output_file, positive_float, positive_int

PROGRAM = 'bench.quality'
RECIPE = '--recipe minutes-30'
# settings that the twin does not have; for all other flags of transformer.train see _settings
REFUSED = 'accumulate', 'parts', 'bpe_dropout', 'ema', 'quant', 'quant_layers'
CALIBRATION, RUN = 0, 1     # numbers of runs, for learners.Learner.turn
EVERY = 120.0               # --eval-every
WARM_UP = 3                 # turns of one step before the calibration
FOREVER = 10**9             # steps, of a calibration
BATCH_SIZE = 128            # pairs, of the validation loss


def parse(argv):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description=__doc__.splitlines()[0])
    p.add_argument('--minutes', type=positive_float, metavar='M', help='training time of each contestant')
    p.add_argument('--epochs', type=positive_int, metavar='N', help='instead of --minutes: train both for N epochs')
    p.add_argument('--eval-every', type=positive_float, metavar='S',
                   help=f'seconds of training between evaluations (default {EVERY:g}; with --epochs after each epoch)')
    p.add_argument('--slice', type=positive_float, default=20.0, metavar='S',
                   help='seconds after which the contestants take turns (default 20)')
    p.add_argument('--calibrate', type=positive_float, default=30.0, metavar='S',
                   help='seconds in which the speed of each contestant is measured (default 30)')
    p.add_argument('--sentences', type=positive_int, metavar='N', help='use the first N test sentences (default: all)')
    p.add_argument('--sort', action='store_true', help="give PyTorch batches of sentences of similar length, which have little "
                   'padding (default: the batches of pyops); with --epochs both get them')
    p.add_argument('--draw', metavar='RESULT', help='draw a result file instead of training; needs matplotlib')
    p.add_argument('-o', '--output', type=output_file, metavar='FILE',
                   help='result file (default bench/results/quality_DATE.json); with --draw: the picture, .svg or .png')
    add_contestant_flags(p)
    p.add_argument('--recipe', nargs=argparse.REMAINDER, metavar='FLAG',
                   help=f'the last flag: all that follows is passed to transformer.train (default: {RECIPE})')
    args = p.parse_args(argv)
    if args.draw is None and (args.minutes is None) == (args.epochs is None):
        p.error('expected either --minutes M or --epochs N')
    if args.minutes and args.eval_every is None:
        args.eval_every = EVERY
    if args.draw is not None and args.output is None:
        p.error(f'--draw {args.draw}: expected -o FILE, the picture to write')
    return args


# ---- data and settings -----------------------------------------------------------------------------------------------

def _settings(flags):
    """Return the parsed flags of transformer.train and the settings of a new run.  UserError for a flag that the twin lacks, or
    that has no effect here; such flags of a recipe itself, as its epochs, are ignored."""
    from pyops import checkpoint
    from pyops.data import locate
    from pyops.flags import use_gpu
    from pyops.settings import resolve
    from pyops.text.flags import FIXED, defaults_of, parse_training
    from transformer import train
    from transformer.model import SIZES
    parser = train.parser()
    args = parse_training(parser, flags, train.RECIPES)
    usable = {*train.DEFAULTS, 'recipe', 'preset', 'corpus', 'data_dir', 'precision'}.difference(REFUSED)
    own = parse_training(parser, ['--recipe', args.recipe] if args.recipe else [], train.RECIPES)
    for action in parser._actions:
        if action.dest not in usable and getattr(args, action.dest, None) != getattr(own, action.dest, None):
            raise UserError(f'--recipe {action.option_strings[-1]}: expected flags of the data, the batches, the model '
                            'or the schedule, and that the PyTorch twin supports; leave it out')
    if args.corpus is None and locate.find('fra-eng', args.data_dir) is None:
        raise UserError('fra-eng is not found; get it with: python -m pyops.data get fra-eng, '
                        'or give another corpus: --recipe -f FILE ...')
    args.gpu = 0
    use_gpu(args)
    found = checkpoint.fresh('.')
    settings = resolve(args, found, defaults_of(args, found, train.DEFAULTS), SIZES, FIXED, train.PRESETS)
    for name in REFUSED:
        if settings[name] != train.DEFAULTS[name]:              # by a preset or an environment variable
            raise UserError(f'{name} {settings[name]}: expected {train.DEFAULTS[name]}; the PyTorch twin supports nothing '
                            'else; unset CUSTOM_QUANT_TYPE, or give another --preset')
    return args, settings


class Judge:
    """Scores weights with our model, whoever trained them: BLEU of its translations of the test sentences, and its mean loss
    per token of the validation pairs."""

    def __init__(self, model, data, sentences):
        from pyops.text.translator import Translator
        self.model, self.translator = model, Translator(model, *data.vocabularies)
        sources, references, self.left_out = data.texts('test')
        self.sources, self.references, self.validation = sources[:sentences], references[:sentences], data.validation

    def _load(self, path):
        with np.load(path) as weights:
            for name in self.model.params:
                self.model.params[name].value[...] = weights[name]

    def loss(self, path):
        """Return the validation loss of the weights in an .npz file."""
        from pyops.text.training import validation_loss
        self._load(path)
        return validation_loss(self.model, self.validation, BATCH_SIZE)

    def scores(self, path, beam=1):
        """Return the report of pyops.text.evaluation for the weights in an .npz file."""
        from pyops.text import evaluation
        self._load(path)
        self.translator.reset()
        return evaluation.evaluate(self.translator.translate(self.sources, beam=beam), self.sources, self.references)


# ---- the contest -----------------------------------------------------------------------------------------------------

def calibrate(workers, seconds):
    """Measure the workers, {kind: Contestant}, in turns.  Return {kind: {'start_s': seconds of the first steps beyond the time
    of later ones, such as of the compiler; 'step_s': seconds per step}}."""
    turn = functools.partial(_turn, number=CALIBRATION, total=FOREVER)
    first = {kind: [turn(worker, 0.001) for _ in range(WARM_UP)] for kind, worker in workers.items()}
    later = {kind: [] for kind in workers}
    for _ in range(WARM_UP):
        for kind, worker in workers.items():
            later[kind].append(turn(worker, seconds / WARM_UP))
    figures = {}
    for kind in workers:
        step = sum(answer['trained_s'] for answer in later[kind]) / sum(answer['steps'] for answer in later[kind])
        start = sum(answer['trained_s'] - answer['steps'] * step for answer in first[kind])
        figures[kind] = dict(start_s=max(start, 0.0), step_s=step)
    return figures


def faster(figures, seconds=None, steps=None):
    """Return the kind of PyTorch that does more steps in so many seconds, or needs less time for so many steps, if the time of
    its first steps counts."""
    theirs = {kind: f for kind, f in figures.items() if kind != 'ours'}
    if seconds is None:
        return min(theirs, key=lambda kind: theirs[kind]['start_s'] + steps * theirs[kind]['step_s'])
    return max(theirs, key=lambda kind: (seconds - theirs[kind]['start_s']) / theirs[kind]['step_s'])


def _turn(worker, seconds, save=0, until=None, *, number, total):
    return worker.turn(number, total, math.ceil(1000 * seconds), save, until or total)


class Side:
    """A contestant in the run: its process, the steps it will do, its figures.

    every: seconds of training between evaluations; None: it is evaluated after each of `stops`, numbers of steps
    """

    def __init__(self, worker, total, every, stops):
        self.worker, self.turn = worker, functools.partial(_turn, worker, number=RUN, total=total)
        self.due = self.every = every or math.inf
        self.stops = [total] if every else [*stops]
        self.seconds, self.loss_sum, self.steps, self.pause, self.pause_cpu = 0.0, 0.0, 0, 0.0, 0.0
        self.figures = dict(planned_steps=total, points=[])
        self.is_done = False

    def train(self, seconds):
        """Train for so many seconds, at most until an evaluation is due.  Return whether one is."""
        answer = self.turn(min(seconds, self.due - self.seconds), until=self.stops[0])
        self.seconds += answer['trained_s']
        self.loss_sum, self.steps = self.loss_sum + answer['loss'] * answer['steps'], self.steps + answer['steps']
        self.pause, self.pause_cpu = self.pause + answer['pause_s'], self.pause_cpu + answer['pause_cpu_s']
        is_stop, self.is_done = answer['done'] >= self.stops[0], answer['done'] >= self.figures['planned_steps']
        if is_stop and not self.is_done:
            self.stops.pop(0)
        self.figures |= dict(steps=answer['done'], epochs=answer['epoch'], seconds=self.seconds, peak_mib=answer['peak_mib'],
                             pause_s=self.pause, pause_cpu_s=self.pause_cpu)
        return is_stop or self.seconds >= self.due

    def evaluate(self, judge, path):
        """Append a point with the scores of the current weights, and return it."""
        self.turn(0, save=1)
        validation, scores = judge.loss(path), judge.scores(path)
        point = dict(seconds=self.seconds, step=self.figures['steps'], epoch=self.figures['epochs'],
                     loss=self.loss_sum / self.steps, validation=validation, bleu=scores['one_reference']['bleu'],
                     bleu_of_all=scores['all_references']['bleu'])
        self.figures['points'].append(point)
        self.loss_sum, self.steps = 0.0, 0
        while self.due <= self.seconds:                 # a step may take longer than the time between evaluations
            self.due += self.every
        return point


def planned(args, figures, steps, warmup):
    """Return {kind: number of steps of the run} of the contestants: pyops and one kind of PyTorch.

    figures: of calibrate();  steps: of --epochs, None without it.  UserError if the warmup does not fit.
    """
    seconds = None if steps else 60 * args.minutes
    kinds = 'ours', faster(figures, seconds, steps)
    totals = {kind: steps or max(int(seconds / figures[kind]['step_s']), 1) for kind in kinds}
    least = min(totals, key=totals.get)
    if warmup >= totals[least]:
        raise UserError(f'--warmup {warmup}: expected less than the {totals[least]} steps of {NAMES[least]}; '
                        'give a smaller --warmup or a longer time')
    return totals


def contest(args, stack, folder, settings, data, judge, report, save):
    """Calibrate, train in turns and evaluate.  report: the dict of the result; save(): writes it."""
    pairs, kinds, suffix = data.train, kinds_of(args, True), BF16 * (report['precision'] == 'bf16')
    workers = {}
    for kind in kinds:
        workers[kind] = stack.enter_context(Contestant('learners', 'train', kind + suffix, folder, report['threads']))
    print(f'calibrating : {", ".join(NAMES[kind] for kind in kinds)}', flush=True)
    figures = report['calibration'] = calibrate(workers, args.calibrate)
    ends = epoch_ends(settings, pairs, args.epochs, args.sort) if args.epochs else []
    steps = ends[-1] if ends else None
    for kind, f in figures.items():
        print(f'{NAMES[kind]:16}{f["step_s"]:9.4f} s per step, {f["start_s"]:6.1f} s more for the first steps', flush=True)
    totals = planned(args, figures, steps, settings['warmup'])
    print(f'planned : {", ".join(f"{steps} steps of {NAMES[kind]}" for kind, steps in totals.items())}', flush=True)
    for kind in kinds:
        if kind not in totals:
            workers[kind].process.stdin.close()
    sides = {kind: Side(workers[kind], total, args.eval_every, ends) for kind, total in totals.items()}
    report['contestants'] = {kind: side.figures for kind, side in sides.items()}
    while not all(side.is_done for side in sides.values()):
        for kind, side in sides.items():
            if not side.is_done and side.train(args.slice):
                point = side.evaluate(judge, folder / f'{kind}.npz')
                save()
                print('{:6.1f} min  {:16}step {step:6d}  epoch {epoch:6.2f}  loss {loss:.4f}  '
                      'validation {validation:.4f}  BLEU {bleu:.2f}'.format(
                    point['seconds'] / 60, NAMES[kind], **point), flush=True)
    from pyops.text.flags import BEAM
    for kind, side in sides.items():
        side.figures['beam'] = dict(beam=BEAM) | judge.scores(folder / f'{kind}.npz', BEAM)
        save()
    report['is_finished'] = True
    save()


def epoch_ends(settings, pairs, epochs, is_sorted):
    """Return the number of steps of a run after each of so many epochs."""
    from pyops.text.training import batches
    of_run = batches(settings, pairs, drop_last=True)
    counts = (sum(1 for _ in learners.ordered(of_run, pairs.lengths, settings['seed'], epoch, is_sorted))
              for epoch in range(epochs))
    return list(itertools.accumulate(counts))


def padding_share(settings, pairs, is_sorted, count=200):
    """Return the share of padding in the first batches, if each is padded to its longest sentences."""
    from pyops.text.training import batches
    of_run = batches(settings, pairs, drop_last=True)
    order = learners.ordered(of_run, pairs.lengths, settings['seed'], 0, is_sorted)
    some = [rows for rows, _ in zip(order, range(count), strict=False)]
    return 1 - sum(int(pairs.lengths[rows].sum()) for rows in some) / sum(sum(learners.positions(pairs, rows)) for rows in some)


def measure(args):
    """Run the contest and write the result file."""
    from pyops.text import evaluation
    kinds_of(args, True)                            # before minutes of work
    evaluation.check()
    recipe = shlex.split(RECIPE) if args.recipe is None else args.recipe
    flags, settings = _settings(recipe)
    from pyops import backend
    from pyops.settings import configure
    from pyops.text.training import Data
    from transformer.model import Config, Transformer
    threads = args.threads or backend.threads()
    backend.set_threads(threads)
    configure(Config, settings, 1, 1)               # report contradictions before the data is read
    data = Data.load(flags, settings, least=settings['batch_size'])
    if not data.hold_out:
        raise UserError('--recipe: nothing is held out to test with; add --hold-out 0.02')
    model = Transformer(configure(Config, settings, *map(len, data.vocabularies)), settings['seed'])
    judge = Judge(model, data, args.sentences)
    output = Path(args.output or results.FOLDER / f'quality_{datetime.datetime.now():%Y%m%d_%H%M}.json')
    report = results.about() | dict(
        pyops=__version__, python=platform.python_version(), numpy=np.__version__, threads=threads, isa=backend.isa(),
        precision=flags.precision or CPU_PRECISIONS[0],
        minutes=args.minutes, epochs=args.epochs, eval_every_s=args.eval_every, slice_s=args.slice,
        recipe=shlex.join(recipe), settings=settings, parameters=model.params.count(), corpus=Path(data.corpus.name).name,
        pairs=len(data.train), test_sentences=len(judge.sources), left_out=judge.left_out,
        is_sorted=args.sort, padding=padding_share(settings, data.train, args.sort), is_finished=False)
    print(f'test : {len(judge.sources)} sentences; {judge.left_out} more have a translation that occurs in training\n'
          f'padding in the batches of PyTorch : {report["padding"]:.0%}', flush=True)

    def save():
        write_atomically(output, json.dumps(report, indent=1).encode() + b'\n')

    try:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            learners.prepare(Path(folder), settings, model.config, model, data.train, args.sort, bool(args.epochs))
            contest(args, stack, Path(folder), settings, data, judge, report, save)
    except BaseException:
        if any(side['points'] for side in report.get('contestants', {}).values()):
            print(f'not finished; the figures so far : {output}', file=sys.stderr, flush=True)
        raise
    for line in summary(report):
        print(line)
    print(f'written : {output}')


# ---- the result ------------------------------------------------------------------------------------------------------

def reached(points, bleu):
    """Return the seconds at which a curve of points first reaches this BLEU, interpolated; None if it does not."""
    before = dict(seconds=0.0, bleu=0.0)
    for point in points:
        if point['bleu'] >= bleu:
            share = (bleu - before['bleu']) / (point['bleu'] - before['bleu']) if point['bleu'] > before['bleu'] else 1.0
            return before['seconds'] + share * (point['seconds'] - before['seconds'])
        before = point
    return None


def summary(report):
    """Yield lines about a finished result."""
    for kind, f in report['contestants'].items():
        last, beam = f['points'][-1], f['beam']
        yield (f'{NAMES[kind]:16}{f["steps"]:7d} steps, {f["epochs"]:.2f} epochs in {f["seconds"] / 60:.1f} min; BLEU '
               f'{last["bleu"]:.2f} greedy, {beam["one_reference"]["bleu"]:.2f} with beam {beam["beam"]}; '
               f'{f["pause_cpu_s"] / max(f["pause_s"], 1e-9):.1%} CPU while paused; {f["peak_mib"]:.0f} MiB')
    (ours, theirs) = report['contestants'].values()
    if seconds := reached(ours['points'], theirs['points'][-1]['bleu']):
        yield (f'pyops reaches the final BLEU of PyTorch after {seconds / 60:.1f} min, '
               f'{theirs["seconds"] / seconds:.2f} times as fast')


def load(path):
    """Return the report in a result file.  UserError if it is not one with at least a point per contestant."""
    try:
        report = json.loads(Path(path).read_text())
        curves = [f['points'] for f in report['contestants'].values()]
    except OSError as error:
        raise UserError(f'{path}: cannot be read ({error.strerror}); give a result of python -m {PROGRAM}') from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f'{path}: not a result of python -m {PROGRAM}; give the file that it wrote') from error
    if not all(curves):
        raise UserError(f'{path}: a contestant was not evaluated yet; wait, or measure again with a smaller --eval-every')
    return report


def draw(report, path):
    """Draw BLEU against minutes of training, one curve per contestant.  UserError if the file cannot be written."""
    from pyops.inspect.pictures import style
    style.require()
    suffix = Path(path).suffix.lower()
    if suffix not in ('.svg', '.png'):
        raise UserError(f'{path}: expected a name that ends in .svg or .png')
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    with style.look(), matplotlib.rc_context({'svg.hashsalt': PROGRAM}):        # the same picture has the same bytes
        figure = Figure(figsize=(7.2, 4.2), layout='constrained')
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        _draw_curves(axes, report, style)
        figure.suptitle(f'BLEU of {report["test_sentences"]:,} unseen sentences, English to French', x=0.02, ha='left',
                        fontsize=11, fontweight='bold')
        axes.set_title(f'{report["threads"]} threads of {report["machine"]}; greedy decoding, one reference; '
                       f'{report["parameters"] / 1e6:.1f} million parameters', loc='left', fontsize=8.5, color=style.GREY)
        try:
            figure.savefig(path, dpi=160, metadata={'Date': None} if suffix == '.svg' else None)
        except OSError as error:
            raise UserError(f'{path}: the picture cannot be written ({error.strerror or error}); name a file in a folder that '
                            'exists') from error


def _draw_curves(axes, report, style):
    # Blue and vermilion of Okabe and Ito differ in lightness and for colour-blind readers; so do the markers.
    kinds = report['contestants']
    looks = dict(zip(kinds, ((style.NAME_COLORS[0], 'o'), (style.NAME_COLORS[1], 's')), strict=True))
    curves = {kind: f['points'] for kind, f in kinds.items()}
    highest = 1.05 * max(p['bleu'] for points in curves.values() for p in points) or 1.0
    one, other = (points[-1]['bleu'] / highest for points in curves.values())
    apart = max(0.0, 14 - 115 * abs(one - other)) * (1 if one >= other else -1)     # points; the axes are about 230 high
    for (kind, points), up in zip(curves.items(), (apart, -apart), strict=True):
        color, marker = looks[kind]
        axes.plot([p['seconds'] / 60 for p in points], [p['bleu'] for p in points], color=color, marker=marker, markersize=4,
                  linewidth=2, solid_capstyle='round')
        last = points[-1]
        name = NAMES[kind] if kind == 'ours' else f'{WHOSE[kind]}, {report["torch"].partition("+")[0]}'
        axes.annotate(f'{name}\n{last["bleu"]:.1f} after {kinds[kind]["epochs"]:.1f} epochs',
                      (last['seconds'] / 60, last['bleu']), (8, up), textcoords='offset points', color=color, va='center',
                      fontweight='bold', annotation_clip=False)
    ours, theirs = curves.values()
    final = theirs[-1]['bleu']
    if (seconds := reached(ours, final)) and report['is_finished']:
        axes.plot([seconds / 60, theirs[-1]['seconds'] / 60], [final, final], color=style.GREY, linewidth=0.9,
                  linestyle=(0, (4, 3)), zorder=1)
        axes.annotate(f'{seconds / 60:.1f} min', (seconds / 60, final), (0, -5), textcoords='offset points', color=style.GREY,
                      ha='left', va='top', fontsize=8.5)
    axes.set_xlim(0, 1.02 * max(p['seconds'] for points in curves.values() for p in points) / 60)
    axes.set_ylim(0, highest)
    axes.set_xlabel('minutes of training', color=style.GREY)
    axes.set_ylabel('BLEU', color=style.GREY)
    axes.grid(axis='y', color=style.LIGHT, linewidth=0.8)
    axes.tick_params(colors=style.GREY, length=3)
    for side in ('top', 'right'):
        axes.spines[side].set_visible(False)
    for side in ('left', 'bottom'):
        axes.spines[side].set_color(style.RULE)


def main(argv=None):
    args = parse(argv)
    if args.draw is not None:
        draw(load(args.draw), args.output)
    else:
        measure(args)


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main(sys.argv[1:])
