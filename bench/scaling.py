"""Steps of several ranks, measured and compared with the model of pyops/distributed/model.py.

    python -m bench.scaling measure transformer             the costs of a step on one rank, as flags of the model
    python -m bench.scaling check transformer -n 1 2 4      steps of these numbers of ranks, and the model
    python -m bench.scaling check transformer -n 2 --gbit 0.1 1 --delay-ms 0 1      over links (bench/links.py): Linux, root
    python -m bench.scaling overlap transformer --gbit 1    the sum over two ranks with and without overlap
    python -m bench.scaling threads transformer -n 2        ranks of one thread, and one rank of as many threads

Each rank has one thread, except where a command compares with threads.
"""
import collections
import contextlib
import functools
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.links import MEMORY, connected
from pyops.distributed.model import Link, Work, step_seconds, sum_seconds
from pyops.errors import UserError, exits_cleanly
from pyops.flags import ArgumentParser, non_negative_float, positive_float, positive_int

PROGRAM = 'bench.scaling'
ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = 'transformer', 'seq2seq', 'mnist'
PARTS = 8
LOCAL = Link(5e-6, 4e9)         # two processes of one host, about
STACK_SECONDS = 5e-5            # of a message over a link without a delay, about
WARM_UP = 3                     # steps that are not counted


def parser():
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description='Measure training steps of several ranks.')
    commands = p.add_commands()
    for name, run, text in (('measure', measure, 'costs of a step on one rank, for python -m pyops.distributed model'),
                            ('check', check, 'steps of several ranks, and the model'),
                            ('overlap', overlap, 'sums over two ranks with and without overlap'),
                            ('threads', threads, 'steps of ranks of one thread, and of one rank of as many threads')):
        command = commands.add_parser(name, help=text, description=text)
        # a step of mnist.train on one rank and one part is a part of a plan of several steps
        command.add_argument('program', choices=PROGRAMS[:2] if name == 'threads' else PROGRAMS)
        command.add_argument('--steps', type=positive_int, default=10, metavar='N', help='steps (default %(default)s)')
        command.add_argument('-b', '--batch-size', type=positive_int, default=128, metavar='N',
                             help='samples of a batch (default %(default)s)')
        if name == 'check':
            command.add_argument('-n', '--ranks', type=positive_int, nargs='+', default=[1, 2], metavar='N',
                                 help='numbers of ranks (default: 1 2)')
        if name == 'threads':
            command.add_argument('-n', '--ranks', type=positive_int, default=2, metavar='N',
                                 help='number of ranks, and of threads (default %(default)s)')
            command.add_argument('--turns', type=positive_int, default=3, metavar='N',
                                 help='runs of each case, in turns (default %(default)s)')
        if name in ('check', 'overlap'):
            command.add_argument('--gbit', type=positive_float, nargs='+', default=[], metavar='X',
                                 help='bandwidths of a link in Gbit/s (default: none, messages in memory)')
            command.add_argument('--delay-ms', type=non_negative_float, nargs='+', default=[0.0], metavar='X',
                                 help='delays of a link in milliseconds, with --gbit (default: 0)')
        command.set_defaults(run=run)
    return p


# ---- one rank --------------------------------------------------------------------------------------------------------------

def child(program, steps, overlaps, flags):
    """Train and print a JSON object: medians of the seconds of a step and of its sections, on rank 0.

    One rank of one thread is timed in CPU time, which other processes of the machine hardly change; all others in wall time.
    """
    from pyops import backend, distributed
    from pyops.launcher import launch
    from pyops.steps import CutSteps, SizedSteps, Steps
    seconds, found = collections.defaultdict(list), []
    clock = time.process_time if launch().size == backend.threads() == 1 else time.perf_counter

    def timed(cls, name):
        function = getattr(cls, name)

        def call(self, *args, **kwargs):
            start = clock()
            result = function(self, *args, **kwargs)
            seconds[name].append(clock() - start)
            return result
        setattr(cls, name, call)

    def recorded(self, *args, _function=CutSteps.record_update, **kwargs):
        plan = _function(self, *args, **kwargs)
        found[:] = [self, plan]
        return plan

    def ignored(self, plan):
        pass
    for cls in (CutSteps, Steps, SizedSteps):           # the others: of one part
        timed(cls, '__call__')
    timed(distributed.GradientSum, 'add')
    timed(distributed.GradientSum, 'over_ranks')
    CutSteps.record_update = recorded
    if not overlaps:
        CutSteps.overlap = ignored
    __import__(f'{program}.train')
    with contextlib.redirect_stdout(open(os.devnull, 'w')):
        sys.modules[f'{program}.train'].main([*flags, '--max-steps', str(steps + WARM_UP)])
    if not distributed.is_first():
        return
    step = statistics.median(seconds['__call__'][WARM_UP:])
    if not found:
        print(json.dumps(dict(step=step)), file=sys.__stdout__)
        return
    cut, update = found
    gradients = cut._sum
    touched = 0 if gradients._touched is None else len(gradients._marked()) * gradients._block
    per_step = len(seconds['add']) // len(seconds['__call__'])
    adds = [sum(seconds['add'][i:i + per_step]) for i in range(0, len(seconds['add']), per_step)]
    print(json.dumps(dict(
        step=step, add=statistics.median(adds[WARM_UP:]), adds=per_step,
        over_ranks=statistics.median(seconds['over_ranks'][WARM_UP:] or [0.0]),
        update=_seconds_of(update.run) if distributed.size() == 1 else 0.0,
        hidden=_hidden(cut) if distributed.size() == 1 else 0.0,
        floats=sum(end - first for first, end in gradients._dense) + touched,
        sums=sum(map(len, gradients.blocks or [gradients._dense])) + gradients.is_sparse)), file=sys.__stdout__)


def _seconds_of(function):
    """Return the median CPU time of a function."""
    times = []
    for _ in range(9):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return statistics.median(times)


def _hidden(cut):
    """Return the share of the time of a part that follows the first complete block of gradients."""
    plan = next(iter(getattr(cut._gradients, '_sized', {}).values()), None) or next(iter(cut._gradients.plans.values()))[0]
    cut.overlap(plan)
    end = max(cut._completed(plan, *pair) for pair in cut._sum.blocks[0])
    after, whole = (_seconds_of(functools.partial(plan.run, first)) for first in (end, 0))
    return min(after / whole, 1.0)


# ---- several ranks ---------------------------------------------------------------------------------------------------------

def run(args, ranks, parts, overlaps=True, network=MEMORY, threads=1, more=()):
    """Return the object that child() prints for so many ranks;  more: further flags of the program."""
    mpirun = shutil.which('mpirun', path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get('PATH', '')]))
    if mpirun is None:
        raise UserError("mpirun is not installed; install it with: pip install '.[dist]'")
    with tempfile.TemporaryDirectory() as folder:
        flags = ['--parts', str(parts), '-b', str(args.batch_size), '-e', '1000', *more]
        flags += [] if args.program == 'mnist' else ['-c', folder]
        process = subprocess.run(
            [*network.launcher, mpirun, '-n', str(ranks), '--oversubscribe', '--bind-to', 'none', *network.rank, sys.executable,
             '-m', PROGRAM, 'child', args.program, str(args.steps), str(int(overlaps)), *flags], cwd=ROOT, text=True,
            capture_output=True, env=os.environ | dict(
                OMP_NUM_THREADS=str(threads), OMPI_ALLOW_RUN_AS_ROOT='1', OMPI_ALLOW_RUN_AS_ROOT_CONFIRM='1',
                OMPI_MCA_mpi_yield_when_idle='1') | network.variables)
    if process.returncode:
        raise UserError(f'{ranks} ranks of {args.program}.train ended with status {process.returncode}: '
                        + ' '.join(process.stderr.split())[-500:])
    return json.loads(process.stdout.splitlines()[-1])


def measured_work(args):
    """Return the Work of a program, from steps with 2 and with PARTS parts."""
    few, many = (run(args, 1, parts) for parts in (2, PARTS))
    computed = [one['step'] - one['add'] - one['update'] for one in (few, many)]
    part = max((computed[1] - computed[0]) / (PARTS - 2), 0.0)
    return Work(part, (computed[0] - 2 * part) / args.batch_size, many['add'] / PARTS, many['update'], many['floats'],
                many['hidden'], many['sums'])


def measure(args):
    work = measured_work(args)
    print(f'--part-ms {1e3 * work.part:.3g} --sample-ms {1e3 * work.sample:.3g} --add-ms {1e3 * work.add:.3g} '
          f'--update-ms {1e3 * work.update:.3g} --megabytes {4e-6 * work.floats:.3g} --hidden {work.hidden:.2f} '
          f'--sums {work.sums} --samples {args.batch_size}')


def links(args):
    """Return (name, Link of the model, bandwidth in Gbit/s or None, delay in seconds) of the links that the flags name."""
    if not args.gbit and any(args.delay_ms):
        raise UserError('--delay-ms: needs a link; give its bandwidth with --gbit')
    if not args.gbit:
        return [('memory', LOCAL, None, 0.0)]
    return [(f'{gbit:g} Gbit/s, {ms:g} ms', Link(STACK_SECONDS + ms / 1e3, gbit * 1e9 / 8), gbit, ms / 1e3)
            for gbit in args.gbit for ms in args.delay_ms]


def check(args):
    work, cores = measured_work(args), len(os.sched_getaffinity(0))
    print(f'{"ranks":>5} {"link":>20} {"measured":>11} {"model":>11} {"ratio":>6}')
    for (name, link, gbit, delay), ranks in itertools.product(links(args), args.ranks):
        with connected(ranks, gbit, delay) as network:
            found = run(args, ranks, max(PARTS, ranks), network=network)['step']
        busy = max(1.0, ranks / cores)              # ranks take turns on the cores
        slower = work._replace(**{name: busy * getattr(work, name) for name in ('part', 'sample', 'add', 'update')})
        expected = step_seconds(slower, link, ranks, args.batch_size, max(PARTS, ranks))
        print(f'{ranks:>5} {name:>20} {1e3 * found:8.1f} ms {1e3 * expected:8.1f} ms {found / expected:6.2f}', flush=True)


def overlap(args):
    print(f'{"":>20} {"sum beside backward":>23} {"sum after backward":>35}')
    print(f'{"link":>20} {"step":>11} {"sum":>11} {"step":>11} {"sum":>11} {"model":>11} {"hidden":>7}')
    for name, link, gbit, delay in links(args):
        with connected(2, gbit, delay) as network:
            beside, after = (run(args, 2, 2, overlaps, network) for overlaps in (True, False))
        model = sum_seconds(Work(0, 0, 0, 0, after['floats'], sums=after['sums']), link, 2)
        figures = [*(one[key] for one in (beside, after) for key in ('step', 'over_ranks')), model]
        print(f'{name:>20} ' + ' '.join(f'{1e3 * seconds:8.1f} ms' for seconds in figures)
              + f' {1 - beside["over_ranks"] / after["over_ranks"]:7.0%}', flush=True)


def threads(args):
    n, seconds = args.ranks, collections.defaultdict(list)
    cases = [(f'1 rank of {n} threads, 1 part', 1, 1, n, ()), (f'1 rank of {n} threads, {n} parts', 1, n, n, ()),
             (f'{n} ranks of 1 thread, {n} parts', n, n, 1, ()),
             ('the same, --shard-optimizer', n, n, 1, ['--shard-optimizer'])]
    for _ in range(args.turns):
        for name, ranks, parts, count, more in cases:
            seconds[name].append(run(args, ranks, parts, threads=count, more=more)['step'])
    first = statistics.median(seconds[cases[0][0]])
    for name, values in seconds.items():
        middle = statistics.median(values)
        print(f'{name:>28} {1e3 * middle:8.1f} ms {middle / first:6.2f}   of runs of {1e3 * min(values):.1f} to '
              f'{1e3 * max(values):.1f} ms')


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ['child']:
        child(argv[1], int(argv[2]), int(argv[3]), argv[4:])
        return
    args = parser().parse_args(argv)
    args.run(args)


if __name__ == '__main__':
    with exits_cleanly(PROGRAM, ranks=True):
        main()
