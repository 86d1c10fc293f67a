"""Steps of several ranks, measured and compared with the model of pyops/distributed/model.py.

    python -m bench.scaling measure transformer             the costs of a step on one rank, as flags of the model
    python -m bench.scaling check transformer -n 1 2 4      steps of these numbers of ranks, and the model
    python -m bench.scaling check transformer -n 2 --gbit 0.1 1 10      over links of these bandwidths: Linux, root, ip and tc
    python -m bench.scaling overlap transformer --gbit 1    the sum over two ranks with and without overlap

Each rank has one thread.  A link is the loopback interface of a new network namespace with a limit on its bandwidth.  Two ranks
share it in both directions, so its limit is twice the bandwidth of the link.  The kernel adds no latency.
"""
import collections
import contextlib
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pyops.distributed.model import Link, Work, step_seconds
from pyops.errors import UserError, exits_cleanly
from pyops.flags import ArgumentParser, positive_float, positive_int

PROGRAM = 'bench.scaling'
ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = 'transformer', 'seq2seq', 'mnist'
PARTS = 8
LOCAL = Link(5e-6, 4e9)         # two processes of one host, about
WARM_UP = 3                     # steps that are not counted


def parser():
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description='Measure training steps of several ranks.')
    commands = p.add_commands()
    for name, run, text in (('measure', measure, 'costs of a step on one rank, for python -m pyops.distributed model'),
                            ('check', check, 'steps of several ranks, and the model'),
                            ('overlap', overlap, 'sums over two ranks with and without overlap')):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument('program', choices=PROGRAMS)
        command.add_argument('--steps', type=positive_int, default=10, metavar='N', help='steps (default %(default)s)')
        command.add_argument('-b', '--batch-size', type=positive_int, default=128, metavar='N',
                             help='samples of a batch (default %(default)s)')
        if name == 'check':
            command.add_argument('-n', '--ranks', type=positive_int, nargs='+', default=[1, 2], metavar='N',
                                 help='numbers of ranks (default: 1 2)')
        if name != 'measure':
            command.add_argument('--gbit', type=positive_float, nargs='+', default=[], metavar='X',
                                 help='bandwidths of a link in Gbit/s (default: none, messages in memory)')
        command.set_defaults(run=run)
    return p


# ---- one rank --------------------------------------------------------------------------------------------------------------

def child(program, steps, overlaps, flags):
    """Train and print a JSON object: medians of the seconds of a step and of its sections, on rank 0.

    One rank alone is timed in CPU time, which other processes of the machine hardly change; several ranks in wall time.
    """
    from pyops import distributed
    from pyops.launcher import launch
    from pyops.steps import CutSteps
    seconds, found = collections.defaultdict(list), []
    clock = time.process_time if launch().size == 1 else time.perf_counter

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
    timed(CutSteps, '__call__')
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
    cut, update = found
    gradients = cut._sum
    touched = 0 if gradients._touched is None else len(gradients._marked()) * gradients._block
    per_step = len(seconds['add']) // len(seconds['__call__'])
    adds = [sum(seconds['add'][i:i + per_step]) for i in range(0, len(seconds['add']), per_step)]
    print(json.dumps(dict(
        step=statistics.median(seconds['__call__'][WARM_UP:]), add=statistics.median(adds[WARM_UP:]), adds=per_step,
        over_ranks=statistics.median(seconds['over_ranks'][WARM_UP:] or [0.0]),
        update=_seconds_of(update.run) if distributed.size() == 1 else 0.0,
        hidden=_hidden(cut) if distributed.size() == 1 else 0.0,
        floats=sum(end - first for first, end in gradients._dense) + touched)), file=sys.__stdout__)


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

def run(args, ranks, parts, overlaps=True, prefix=(), **variables):
    """Return the object that child() prints for so many ranks."""
    mpirun = shutil.which('mpirun', path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get('PATH', '')]))
    if mpirun is None:
        raise UserError("mpirun is not installed; install it with: pip install '.[dist]'")
    with tempfile.TemporaryDirectory() as folder:
        flags = ['--parts', str(parts), '-b', str(args.batch_size), '-e', '1000']
        flags += [] if args.program == 'mnist' else ['-c', folder]
        process = subprocess.run(
            [*prefix, mpirun, '-n', str(ranks), '--oversubscribe', '--bind-to', 'none', sys.executable, '-m', PROGRAM, 'child',
             args.program, str(args.steps), str(int(overlaps)), *flags], cwd=ROOT, text=True, capture_output=True,
            env=os.environ | dict(OMP_NUM_THREADS='1', OMPI_ALLOW_RUN_AS_ROOT='1', OMPI_ALLOW_RUN_AS_ROOT_CONFIRM='1',
                                  OMPI_MCA_mpi_yield_when_idle='1') | variables)
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
                many['hidden'])


def measure(args):
    work = measured_work(args)
    print(f'--part-ms {1e3 * work.part:.3g} --sample-ms {1e3 * work.sample:.3g} --add-ms {1e3 * work.add:.3g} '
          f'--update-ms {1e3 * work.update:.3g} --megabytes {4e-6 * work.floats:.3g} --hidden {work.hidden:.2f} '
          f'--samples {args.batch_size}')


def check(args):
    work, cores = measured_work(args), len(os.sched_getaffinity(0))
    print(f'{"ranks":>5} {"link":>12} {"measured":>11} {"model":>11} {"ratio":>6}')
    for gbit in args.gbit or [None]:
        for ranks in args.ranks:
            with _namespace(gbit) as (prefix, variables):
                found = run(args, ranks, max(PARTS, ranks), prefix=prefix, **variables)['step']
            link = LOCAL if gbit is None else Link(5e-5, gbit * 1e9 / 8)
            busy = max(1.0, ranks / cores)              # ranks take turns on the cores
            slower = work._replace(**{name: busy * getattr(work, name) for name in ('part', 'sample', 'add', 'update')})
            expected = step_seconds(slower, link, ranks, args.batch_size, max(PARTS, ranks))
            name = 'memory' if gbit is None else f'{gbit:g} Gbit/s'
            print(f'{ranks:>5} {name:>12} {1e3 * found:8.1f} ms {1e3 * expected:8.1f} ms {found / expected:6.2f}', flush=True)


def overlap(args):
    print(f'{"link":>12} {"step":>11} {"its sum":>11} {"step after":>11} {"its sum":>11} {"hidden":>7}')
    for gbit in args.gbit or [None]:
        with _namespace(gbit) as (prefix, variables):
            beside, after = (run(args, 2, 2, overlaps, prefix, **variables) for overlaps in (True, False))
        name = 'memory' if gbit is None else f'{gbit:g} Gbit/s'
        figures = [one[key] for one in (beside, after) for key in ('step', 'over_ranks')]
        print(f'{name:>12} ' + ' '.join(f'{1e3 * seconds:8.1f} ms' for seconds in figures)
              + f' {1 - beside["over_ranks"] / after["over_ranks"]:7.0%}', flush=True)


@contextlib.contextmanager
def _namespace(gbit):
    """Yield the prefix of a command that runs it in a network namespace with a link of this bandwidth, and the variables with
    which MPI uses it; both empty for None."""
    if gbit is None:
        yield (), {}
        return
    name, rate = f'pyops{os.getpid()}', int(2e9 * gbit)
    if os.geteuid() or not (shutil.which('ip') and shutil.which('tc')):
        raise UserError('--gbit: needs root, ip and tc (Linux, package iproute2); leave --gbit out')
    _command('ip', 'netns', 'add', name)
    try:
        inside = 'ip', 'netns', 'exec', name
        _command(*inside, 'ip', 'link', 'set', 'lo', 'mtu', '9000', 'up')
        _command(*inside, 'tc', 'qdisc', 'add', 'dev', 'lo', 'root', 'tbf', 'rate', f'{rate}bit', 'burst',
                 str(max(20000, rate // 8 // 500)), 'latency', '200ms')
        yield inside, dict(OMPI_MCA_pml='ob1', OMPI_MCA_btl='self,tcp', OMPI_MCA_btl_tcp_if_include='lo')
    finally:
        _command('ip', 'netns', 'del', name)


def _command(*words):
    found = subprocess.run(words, text=True, capture_output=True)
    if found.returncode:
        raise UserError(f'{" ".join(words)}: {" ".join(found.stderr.split())}; use a kernel with network namespaces and the '
                        'queue tbf, or leave --gbit out')


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
