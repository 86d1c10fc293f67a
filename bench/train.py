"""Time training steps: pyops alone, or against PyTorch and JAX on the same batches from the same weights.

    python -m bench.train seq2seq --json            one JSON object; median_s is our seconds per step
    python -m bench.train seq2seq --vs torch        a table, with losses along the way on both sides
    python -m bench.train mnist --vs torch          the same, followed by whole runs including start-up
    python -m bench.train mnist --vs torch jax      and JAX, compiled: a call per step, and a scan over the steps of a turn
    python -m bench.train seq2seq --vs torch --precision bf16       bfloat16 beside PyTorch's autocast; and ours in float32
    python -m bench.train seq2seq --scaling         pyops on one thread and on all
    python -m bench.train seq2seq --vs torch --save     and append the figures to bench/results/train.jsonl

After the timed turns the mean losses are compared.  If they differ by more than rounding and other dropout masks explain, the
exit status is 1 and nothing is saved.  With --scaling they must be equal.
"""
import importlib
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from bench import results
from bench.contest import NAMES, Contestant, add_flags, kinds_of, percentiles, print_figures, require
from pyops import CPU_PRECISIONS
from pyops.errors import UserError, exits_cleanly
from pyops.flags import ArgumentParser, non_negative_int, positive_int

PROGRAM = 'bench.train'
# program -> turns of a contest, training steps per turn; a turn must be long compared with waking a process with cold caches
TURNS = {'seq2seq': (20, 3), 'transformer': (20, 3), 'mnist': (60, 50)}
# program -> whole runs to time, by contestant
RUNS = {'mnist': {'ours': ['mnist.train', '--quiet'], 'torch': ['bench.torch_mnist'],
                  'torch-compile': ['bench.torch_mnist', '--compile']}}


def parse(argv):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description=__doc__.splitlines()[0])
    p.add_argument('program', choices=sorted(TURNS))
    p.add_argument('--vs', choices=['torch', 'jax'], nargs='+', default=[],
                   help='beside PyTorch, eager and compiled; beside JAX, compiled, for mnist also a scan over steps')
    p.add_argument('--precision', choices=CPU_PRECISIONS, default='fp32',
                   help='of the factors of products (default fp32); bf16: seq2seq and transformer, for PyTorch autocast; also '
                   'times ours in float32')
    p.add_argument('--scaling', action='store_true', help='ours on one thread beside ours on all')
    p.add_argument('--turns', type=positive_int, metavar='N', help='timed turns of each (default 20; mnist 60)')
    p.add_argument('--warmup', type=non_negative_int, default=3, metavar='N', help='turns before, not timed (default 3)')
    p.add_argument('--runs', type=non_negative_int, default=3, metavar='N', help='whole runs of each (default 3)')
    p.add_argument('--batch-size', type=positive_int, metavar='N', help="default: the program's")
    p.add_argument('--dropout', type=float, default=0.2, metavar='P', help='0 makes the losses comparable to the last digit')
    add_flags(p)
    args = p.parse_args(argv)
    if args.scaling and args.vs:
        raise UserError('--scaling times ours alone; leave out --vs')
    if args.precision == 'bf16' and (args.scaling or args.program == 'mnist'):
        raise UserError('--precision bf16: times steps of seq2seq or transformer, without --scaling; leave it out')
    return args


def contest(args, contestants, turns, length):
    """Let contestants, {name: (kind, threads)}, take turns.  Return a line about the data, and figures and losses by name."""
    args.steps, args.warmup = turns * length, args.warmup * length
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        about = importlib.import_module(f'bench.{args.program}').prepare(args, Path(folder))
        workers = {name: stack.enter_context(Contestant(args.program, 'train', kind, folder, threads))
                   for name, (kind, threads) in contestants.items()}
        seconds, losses, last = {k: [] for k in workers}, {k: [] for k in workers}, {}
        for first in range(0, args.warmup + args.steps, length):
            for name, worker in workers.items():
                answer = last[name] = worker.turn(first, first + length)
                losses[name].append(answer['loss'])
                if first >= args.warmup:
                    seconds[name].append(answer['seconds'] / length)
    figures = {name: percentiles(s) | {key: last[name][key] for key in ('peak_mib', 'flops') if key in last[name]}
               for name, s in seconds.items()}
    return about, figures, losses


def differences(args, losses):
    """Return {name: relative difference} of the contestants whose mean loss is too far from the first one's."""
    # dropout masks differ between the contestants; products with bfloat16 factors change the losses by less than that
    tolerance = 0.0 if args.scaling else 0.01 if args.program == 'mnist' or not args.dropout else 0.1
    means = {name: float(np.mean(found)) for name, found in losses.items()}
    first = next(iter(means.values()))
    away = {name: abs(mean - first) / abs(first) for name, mean in means.items()}
    return {name: d for name, d in away.items() if not d <= tolerance}          # a NaN is too far


def whole_runs(args, kinds):
    """Time whole runs, including start-up, in turns.  Return {kind: median seconds}."""
    seconds = {kind: [] for kind in kinds}
    for _ in range(args.runs):
        for kind in kinds:
            start = time.perf_counter()
            subprocess.run([sys.executable, '-m', *RUNS[args.program][kind]], cwd=results.ROOT, check=True,
                           stdout=subprocess.DEVNULL)
            seconds[kind].append(time.perf_counter() - start)
    return {kind: float(np.median(s)) for kind, s in seconds.items()}


def main(argv=None):
    args = parse(argv)
    from pyops import backend
    threads, program = args.threads or backend.threads(), importlib.import_module(f'bench.{args.program}')
    args.batch_size = args.batch_size or program.BATCH_SIZE
    kinds = kinds_of(args, 'torch' in args.vs, args.precision == 'bf16')
    if 'jax' in args.vs:
        require('jax')
        kinds += ['jax'] + ['jax-scan'] * (args.program == 'mnist')
    contestants = {kind: (kind, threads) for kind in kinds}
    if args.scaling:
        contestants = {f'{n} thread{"s" * (n > 1)}': ('ours', n) for n in dict.fromkeys((threads, 1))}
    turns, length = args.turns or TURNS[args.program][0], TURNS[args.program][1]
    about, figures, losses = contest(args, contestants, turns, length)
    known = {'program': args.program, 'steps': turns * length, 'batch_size': args.batch_size, 'threads': threads,
             'isa': backend.isa()}
    if args.precision == 'bf16':
        known |= {'precision': 'bf16', 'bf16_isa': backend.bf16_isa()}
    ours = next(iter(figures))
    if args.json:
        beside = {k: f for k, f in figures.items() if k != ours}
        print(json.dumps(known | figures[ours] | ({'scaling' if args.scaling else 'vs': beside} if beside else {})))
    else:
        print(f'{args.program}: {about}, batch {args.batch_size}; {threads} threads, {known.get("bf16_isa", known["isa"])}, '
              f'{turns} turns of {length} {"steps" if length > 1 else "step"}')
        names = {name: NAMES.get(name, name) for name in figures}
        print_figures('a training step', figures, args.batch_size, program.UNIT, names)
        print('loss at step        ' + ''.join(f'{(k + 1) * length:8d}' for k in range(0, len(losses[ours]), 10)))
        for name in figures:
            print(f'{names[name]:20}' + ''.join(f'{loss:8.4f}' for loss in losses[name][::10]))
    wrong = differences(args, losses)
    for name, difference in wrong.items():
        print(f'{PROGRAM}: {NAMES.get(name, name)}: its mean loss differs from the loss of {NAMES.get(ours, ours)} by '
              f'{difference:.2%}', file=sys.stderr)
    if wrong:
        return 1
    runs = {}
    if args.vs and args.runs and args.program in RUNS and not args.json:
        print(f'{"a whole run":16} {"median":>10} {"to ours":>8}')
        runs = whole_runs(args, [kind for kind in kinds if kind in RUNS[args.program]])
        for kind, s in runs.items():
            print(f'{NAMES[kind]:16}{s:9.2f} s {s / runs["ours"]:8.2f}x')
    if args.save:
        results.save('train', known | {'scaling' if args.scaling else 'contestants': figures, 'runs': runs})
    return 0


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        sys.exit(main())
