"""Time training steps: pyops alone, or against PyTorch and JAX on the same batches from the same weights.

    python -m bench.train seq2seq --json            one JSON object; median_s is our seconds per step
    python -m bench.train seq2seq --vs torch        a table, with losses along the way on both sides
    python -m bench.train mnist --vs torch          the same, followed by whole runs including start-up
    python -m bench.train mnist --vs torch jax      and JAX, compiled: a call per step, and a scan over the steps of a turn;
                                                    its whole runs compile, or find compiled code in JAX's cache
    python -m bench.train seq2seq --vs torch --precision bf16       bfloat16 beside PyTorch's autocast; and ours in float32
    python -m bench.train transformer --precision fp8               ours with linear layers in FP8, in bfloat16, and in float32
    python -m bench.train seq2seq --scaling         pyops on one thread and on all
    python -m bench.train seq2seq --vs torch --save     and append the figures to bench/results/train.jsonl
    python -m bench.train transformer --preset base --recompute --vs torch jax      16 pairs of 64 tokens; also recomputed

After the timed turns the mean losses are compared.  If they differ by more than rounding and other dropout masks explain, the
exit status is 1 and nothing is saved.  On one thread, and with recomputation, they must be equal to ours.  After whole runs the
shares of correct answers are compared.
"""
import importlib
import json
import re
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench import results
from bench.contest import (
    FP8_KINDS,
    NAMES,
    RECOMPUTE,
    Contestant,
    add_flags,
    add_recompute_flag,
    environment_of,
    figures_of,
    kinds_of,
    print_figures,
    require,
    timed_command,
)
from pyops import CPU_PRECISIONS, FP8
from pyops.errors import UserError, exits_cleanly
from pyops.flags import ArgumentParser, fraction, non_negative_int, positive_int
from transformer.train import PRESETS

PROGRAM = 'bench.train'


class Case(NamedTuple):
    """Turns of a contest, training steps of a turn, samples of a batch.  A turn must be long compared with waking a process
    with cold caches."""
    turns: int
    length: int
    batch_size: int


# (program, preset) -> Case.  The first preset is the program without one
SMALL = next(iter(PRESETS))
CASES = {('mnist', SMALL): Case(60, 50, 100), ('seq2seq', SMALL): Case(20, 3, 128), ('transformer', SMALL): Case(20, 3, 128),
         ('transformer', 'base'): Case(10, 1, 16)}
# program -> whole runs to time, by contestant.  jax compiles each time, jax-cache has the compiled code of an earlier run
RUNS = {'mnist': {'ours': ['mnist.train', '--quiet'], 'torch': ['bench.torch_mnist'],
                  'torch-compile': ['bench.torch_mnist', '--compile'],
                  'jax': ['bench.jax_mnist', '{threads}'], 'jax-cache': ['bench.jax_mnist', '{threads}']}}
ACCURACY = 0.02         # difference of the share of correct answers after a whole run: the initial weights differ
CORRECT = re.compile(r'^evaluating :  \[\d+/(\d+)\] correct : (\d+)$', re.M)


def parse(argv):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description=__doc__.splitlines()[0])
    p.add_argument('program', choices=sorted({program for program, _ in CASES}))
    p.add_argument('--preset', choices=list(PRESETS), default=SMALL,
                   help='of the transformer; base: with sentences joined to pairs of 64 tokens, which need no padding '
                   '(default %(default)s)')
    p.add_argument('--vs', choices=['torch', 'jax'], nargs='+', default=[],
                   help='beside PyTorch, eager and compiled; beside JAX, compiled, for mnist also a scan over steps')
    p.add_argument('--precision', choices=(*CPU_PRECISIONS, FP8), default='fp32',
                   help='of the factors of products (default fp32); bf16: seq2seq and transformer, for PyTorch autocast; also '
                   'times ours in float32; fp8: transformer, ours alone, which also runs in bfloat16 and in float32')
    p.add_argument('--scaling', action='store_true', help='ours on one thread beside ours on all')
    add_recompute_flag(p)
    p.add_argument('--turns', type=positive_int, metavar='N', help='timed turns of each (default 20; mnist 60; base 10)')
    p.add_argument('--warmup', type=non_negative_int, default=3, metavar='N', help='turns before, not timed (default 3)')
    p.add_argument('--runs', type=non_negative_int, default=3, metavar='N', help='whole runs of each (default 3)')
    p.add_argument('--batch-size', type=positive_int, metavar='N', help="default: the program's")
    p.add_argument('--dropout', type=fraction, metavar='P',
                   help="0 makes the losses comparable to the last digit (default: the program's)")
    add_flags(p)
    args = p.parse_args(argv)
    args.case = CASES.get((args.program, args.preset))
    if args.case is None:
        raise UserError(f'--preset {args.preset}: {args.program} has no such preset; leave it out, or time transformer')
    if args.scaling and args.vs:
        raise UserError('--scaling times ours alone; leave out --vs')
    if args.recompute and (args.scaling or args.program != 'transformer'):
        raise UserError('--recompute: times steps of transformer, without --scaling; leave it out')
    if args.precision == 'bf16' and (args.scaling or args.program == 'mnist'):
        raise UserError('--precision bf16: times steps of seq2seq or transformer, without --scaling; leave it out')
    if args.precision == FP8 and (args.vs or args.scaling or args.recompute or args.program != 'transformer'):
        raise UserError('--precision fp8: times ours in steps of transformer, without --vs, --scaling and --recompute; '
                        'leave it out')
    return args


def contest(args, contestants, turns, length):
    """Let contestants, {name: (kind, threads)}, take turns.  Return a line about the data, and figures and losses by name."""
    args.steps, args.warmup = turns * length, args.warmup * length
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        about = importlib.import_module(f'bench.{args.program}').prepare(args, Path(folder))
        workers = {name: stack.enter_context(Contestant(args.program, 'train', kind, folder, threads))
                   for name, (kind, threads) in contestants.items()}
        timed, losses = {k: [] for k in workers}, {k: [] for k in workers}
        for first in range(0, args.warmup + args.steps, length):
            for name, worker in workers.items():
                answer = worker.turn(first, first + length)
                losses[name].append(answer['loss'])
                if first >= args.warmup:
                    timed[name].append(answer)
    return about, {name: figures_of(answers, length) for name, answers in timed.items()}, losses


def differences(args, losses):
    """Return {name: relative difference} of the contestants whose mean loss is too far from the first one's."""
    def tolerance(name):
        # dropout masks differ between the contestants; products with bfloat16 factors change the losses by less than that
        same = args.scaling or RECOMPUTE in name
        return 0.0 if same else 0.01 if args.program == 'mnist' or args.dropout == 0 else 0.1
    means = {name: float(np.mean(found)) for name, found in losses.items()}
    first = next(iter(means.values()))
    away = {name: abs(mean - first) / abs(first) for name, mean in means.items()}
    return {name: d for name, d in away.items() if not d <= tolerance(name)}        # a NaN is too far


def run_environment(args, kind, threads, cache):
    """Return the environment of a whole run.  cache: folder of JAX's compiled code."""
    data = {'PYOPS_DATA': args.data_dir} if args.data_dir else {}
    caching = {'JAX_ENABLE_COMPILATION_CACHE': 'false'} if kind == 'jax' else {
        'JAX_COMPILATION_CACHE_DIR': cache, 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
        'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1'} if kind == 'jax-cache' else {}
    return environment_of(kind, threads) | {'OMP_NUM_THREADS': str(threads)} | data | caching


def whole_runs(args, kinds, threads):
    """Time whole runs, including start-up, in turns.  Return {kind: median seconds}, the same of CPU time, and {kind: share of
    correct answers at the end}."""
    timed, correct = {kind: [] for kind in kinds}, {}
    with tempfile.TemporaryDirectory() as cache:
        def run(kind):
            command = [word.format(threads=threads) for word in RUNS[args.program][kind]]
            return timed_command(['-m', *command], run_environment(args, kind, threads, cache))
        if 'jax-cache' in kinds:
            run('jax-cache')                                # not timed: it fills the cache
        for _ in range(args.runs):
            for kind in kinds:
                *seconds, out = run(kind)
                timed[kind].append(seconds)
                count, right = map(int, CORRECT.findall(out)[-1])
                correct[kind] = right / count
    wall, cpu = ({kind: float(np.median([one[i] for one in found])) for kind, found in timed.items()} for i in (0, 1))
    return wall, cpu, correct


def main(argv=None):
    args = parse(argv)
    from pyops import backend
    threads, program = args.threads or backend.threads(), importlib.import_module(f'bench.{args.program}')
    args.batch_size = args.batch_size or args.case.batch_size
    kinds = kinds_of(args, 'torch' in args.vs, args.precision == 'bf16', args.recompute)
    if args.precision == FP8:
        kinds = list(FP8_KINDS)
    if 'jax' in args.vs:
        require('jax')
        kinds += ['jax'] + ['jax-scan'] * (args.program == 'mnist')
    contestants = {kind: (kind, threads) for kind in kinds}
    if args.scaling:
        contestants = {f'{n} thread{"s" * (n > 1)}': ('ours', n) for n in dict.fromkeys((threads, 1))}
    turns, length = args.turns or args.case.turns, args.case.length
    about, figures, losses = contest(args, contestants, turns, length)
    known = {'program': args.program} | ({'preset': args.preset} if args.preset != SMALL else {})
    known |= {'steps': turns * length, 'batch_size': args.batch_size, 'threads': threads, 'isa': backend.isa()}
    if args.precision != 'fp32':
        known |= {'precision': args.precision, 'bf16_isa': backend.bf16_isa()}
    ours = next(iter(figures))
    if args.json:
        beside = {k: f for k, f in figures.items() if k != ours}
        print(json.dumps(known | figures[ours] | ({'scaling' if args.scaling else 'vs': beside} if beside else {})))
    else:
        print(f'{" ".join(known[name] for name in ("program", "preset") if name in known)}: {about}, batch {args.batch_size}; '
              f'{threads} threads, {known.get("bf16_isa", backend.float32_isa())}, '
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
    runs, cpu, correct = {}, {}, {}
    if args.vs and args.runs and args.program in RUNS and not args.json:
        of_runs = [kind for kind in [*kinds, *['jax-cache'] * ('jax' in kinds)] if kind in RUNS[args.program]]
        runs, cpu, correct = whole_runs(args, of_runs, threads)
        print(f'{"a whole run":16} {"median":>10} {"CPU time":>11} {"to ours":>8} {"correct":>8}')
        for kind, s in runs.items():
            print(f'{NAMES[kind]:16}{s:9.2f} s {cpu[kind]:9.2f} s {s / runs["ours"]:8.2f}x {correct[kind]:8.2%}')
    less = [kind for kind, share in correct.items() if not abs(share - correct['ours']) <= ACCURACY]
    for kind in less:
        print(f'{PROGRAM}: {NAMES[kind]}: {correct[kind]:.2%} correct after a whole run, pyops {correct["ours"]:.2%}',
              file=sys.stderr)
    if args.save and not less:
        results.save('train', known | {'scaling' if args.scaling else 'contestants': figures, 'runs': runs, 'runs_cpu': cpu})
    return 1 if less else 0


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        sys.exit(main())
