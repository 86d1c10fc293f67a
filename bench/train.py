"""Time training steps: ours alone, or beside PyTorch on the same batches from the same weights.

    python -m bench.train seq2seq --json            one JSON object; median_s is our seconds a step
    python -m bench.train seq2seq --vs torch        a table, and losses along the way on both sides
    python -m bench.train mnist --vs torch          the same, and then whole runs with their start-up

Each contestant is a process of its own (bench/worker.py) that waits while another works, and they take turns, so that a
slow minute of the machine falls on all of them.
"""
import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from pyops.errors import UserError, exits_cleanly
from pyops.training import ArgumentParser, non_negative_int, positive_int

PROGRAM = 'bench.train'
NAMES = {'ours': 'pyops', 'torch': 'PyTorch eager', 'torch-compile': 'PyTorch compile'}
ROOT = Path(__file__).resolve().parents[1]
# program -> turns of a contest, training steps in a turn: a turn must be long against waking a process
TURNS = {'seq2seq': (60, 1), 'transformer': (60, 1), 'mnist': (60, 50)}
# program -> whole runs to time, by contestant
RUNS = {'mnist': {'ours': ['mnist.train', '--quiet'], 'torch': ['bench.torch_mnist'],
                  'torch-compile': ['bench.torch_mnist', '--compile']}}


def parse(argv):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description=__doc__.splitlines()[0])
    p.add_argument('program', choices=sorted(TURNS))
    p.add_argument('--vs', choices=['torch'], help='beside PyTorch, eager and compiled')
    p.add_argument('--no-compile', action='store_true', help='leave out torch.compile, which takes a minute to warm up')
    p.add_argument('--json', action='store_true', help='print one JSON object and nothing else')
    p.add_argument('--turns', type=positive_int, metavar='N', help='timed turns of each (default 60)')
    p.add_argument('--warmup', type=non_negative_int, default=3, metavar='N', help='turns before, not timed (default 3)')
    p.add_argument('--runs', type=non_negative_int, default=3, metavar='N', help='whole runs of each (default 3)')
    p.add_argument('--batch-size', type=positive_int, metavar='N', help="default: the program's")
    p.add_argument('--threads', type=positive_int, metavar='N', help='for every contestant (default: all cores)')
    p.add_argument('--data-dir', metavar='DIR', help='where to look for the data (default $PYOPS_DATA, then ./data)')
    p.add_argument('--dropout', type=float, default=0.2, metavar='P', help='0 makes the losses comparable to the last digit')
    args = p.parse_args(argv)
    if args.vs and importlib.util.find_spec('torch') is None:
        raise UserError(f'--vs torch: torch is not installed; install it with: {sys.executable} -m pip install torch')
    return args


class Contestant:
    """A worker process: turn(first, last) runs its training steps on those batches."""

    def __init__(self, program, kind, folder, threads):
        self.kind = kind
        command = [sys.executable, '-m', 'bench.worker', program, kind, str(folder), str(threads)]
        self.process = subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.answer()                                   # ready

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise UserError(f'{NAMES[self.kind]}: its process ended, see above')
        return json.loads(line)

    def turn(self, first, last):
        print(first, last, file=self.process.stdin, flush=True)
        return self.answer()

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def contest(args, kinds, threads, turns, length):
    """Let the contestants take turns -> a line about the data, figures and losses by kind."""
    args.steps, args.warmup = turns * length, args.warmup * length
    with tempfile.TemporaryDirectory() as folder:
        about = importlib.import_module(f'bench.{args.program}').prepare(args, Path(folder))
        contestants = [Contestant(args.program, kind, folder, threads) for kind in kinds]
        seconds, losses, memory = {k: [] for k in kinds}, {k: [] for k in kinds}, {}
        for first in range(0, args.warmup + args.steps, length):
            for contestant in contestants:
                answer = contestant.turn(first, first + length)
                losses[contestant.kind].append(answer['loss'])
                memory[contestant.kind] = answer['peak_mib']
                if first >= args.warmup:
                    seconds[contestant.kind].append(answer['seconds'])
        for contestant in contestants:
            contestant.close()
    names = ('p20_s', 'median_s', 'p80_s')
    return about, {kind: dict(zip(names, np.percentile(s, (20, 50, 80)).round(7).tolist(), strict=True))
                   | {'peak_mib': memory[kind]} for kind, s in seconds.items()}, losses


def whole_runs(args, kinds):
    """Seconds of whole runs, start-up included, in turn -> median by kind."""
    seconds = {kind: [] for kind in kinds}
    for _ in range(args.runs):
        for kind in kinds:
            start = time.perf_counter()
            subprocess.run([sys.executable, '-m', *RUNS[args.program][kind]], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            seconds[kind].append(time.perf_counter() - start)
    return {kind: float(np.median(s)) for kind, s in seconds.items()}


def main(argv=None):
    args = parse(argv)
    from pyops import backend
    threads = args.threads or backend.threads()
    args.batch_size = args.batch_size or importlib.import_module(f'bench.{args.program}').BATCH_SIZE
    kinds = ['ours'] + (['torch'] + ['torch-compile'] * (not args.no_compile) if args.vs else [])
    turns, length = args.turns or TURNS[args.program][0], TURNS[args.program][1]
    about, figures, losses = contest(args, kinds, threads, turns, length)
    if args.json:
        print(json.dumps({'program': args.program, 'steps': turns * length, 'threads': threads, 'isa': backend.isa()}
                         | figures['ours'] | ({'vs': {k: figures[k] for k in kinds[1:]}} if args.vs else {})))
        return
    unit = importlib.import_module(f'bench.{args.program}').UNIT
    print(f'{args.program}: {about}, batch {args.batch_size}; {threads} threads, {backend.isa()}, '
          f'{turns} turns of {length} {"steps" if length > 1 else "step"}')
    print(f'{"a training step":16} {"median":>10} {"p20":>10} {"p80":>10} {unit + "/s":>9} {"peak MiB":>9} {"to ours":>8}')
    for kind, f in figures.items():
        times = ''.join(f'{1e3 * f[name]:8.2f} ms' for name in ('median_s', 'p20_s', 'p80_s'))
        ratio = f['median_s'] / figures['ours']['median_s']
        print(f'{NAMES[kind]:16}{times} {args.batch_size / f["median_s"]:9.0f} {f["peak_mib"]:9.0f} {ratio:7.2f}x')
    print('loss at step    ' + ''.join(f'{(k + 1) * length:8d}' for k in range(0, len(losses['ours']), 10)))
    for kind in kinds:
        print(f'{NAMES[kind]:16}' + ''.join(f'{loss:8.4f}' for loss in losses[kind][::10]))
    if args.vs and args.runs and args.program in RUNS:
        print(f'{"a whole run":16} {"median":>10} {"to ours":>8}')
        runs = whole_runs(args, kinds)
        for kind, s in runs.items():
            print(f'{NAMES[kind]:16}{s:9.2f} s {s / runs["ours"]:8.2f}x')


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
