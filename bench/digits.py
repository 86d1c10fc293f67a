"""Time from the start of a command to 98 % and to 99 % of MNIST's test file.

    python -m bench.digits                          an MLP and a convolutional network, seeds 0 to 9
    python -m bench.digits --seeds 3 --threads 1 --json

Each run is a process of its own that loads the data, trains and classifies the test file.  If a mean share is below its
percentage, the exit status is 1 and nothing is saved.
"""
import json
import os
import re
import sys

import numpy as np

from bench import results
from bench.contest import timed_command
from pyops.errors import UserError, exits_cleanly
from pyops.flags import ArgumentParser, positive_int

PROGRAM = 'bench.digits'
# settings found by search; the last argument of each is the seed
PROGRAMS = {98: ['-m', 'mnist.train', '--data-dir', '{folder}', '--quiet', '--hidden', '256', '-e', '5', '-l', '0.003',
                 '--schedule', 'linear', '--test', '--seed'],
            99: ['examples/digits_cnn.py', '{folder}', '-e', '2', '-s']}
CORRECT = re.compile(r'test :  \[\d+/(\d+)\] correct : (\d+)|accuracy : (\S+)')


def parse(argv):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description=__doc__.splitlines()[0])
    p.add_argument('--data-dir', metavar='DIR', help='search for MNIST only in DIR (default: $PYOPS_DATA, then ./data)')
    p.add_argument('--percent', type=int, choices=PROGRAMS, help='only the program that reaches this (default: both)')
    p.add_argument('--seeds', type=positive_int, default=10, metavar='N', help='runs of each (default %(default)s)')
    p.add_argument('--threads', type=positive_int, metavar='N', help='(default: all cores)')
    p.add_argument('--json', action='store_true', help='print one JSON object and nothing else')
    p.add_argument('--save', action='store_true', help='append the figures to bench/results')
    return p.parse_args(argv)


def run(command, threads):
    """Return seconds, CPU seconds, and the share of the test file that is correct."""
    environment = dict(os.environ, PYTHONPATH=str(results.ROOT))
    if threads:
        environment['OMP_NUM_THREADS'] = str(threads)
    seconds, cpu, out = timed_command(command, environment)
    found = CORRECT.search(out)
    if not found:
        raise UserError(f'{" ".join(command)}: it printed no result of the test file: {out.strip()[-300:]}')
    return seconds, cpu, float(found[3]) if found[3] else int(found[2]) / int(found[1])


def main(argv=None):
    args = parse(argv)
    from pyops import backend
    from pyops.data import locate
    paths = locate.find_files('mnist', args.data_dir)
    if paths is None:
        raise UserError('MNIST was not found: give its folder with --data-dir, or set PYOPS_DATA')
    folder, figures, missed = str(paths[0].parent), {}, []
    for percent in [args.percent] if args.percent else PROGRAMS:
        command = [word.format(folder=folder) for word in PROGRAMS[percent]]
        found = np.array([run([*command, str(seed)], args.threads) for seed in range(args.seeds)])
        seconds, cpu, correct = found.T
        figures[str(percent)] = {'mean_s': round(seconds.mean(), 3), 'longest_s': round(seconds.max(), 3),
                                 'mean_cpu_s': round(cpu.mean(), 3), 'mean_correct': round(correct.mean(), 5),
                                 'least_correct': round(correct.min(), 4)}
        if correct.mean() < percent / 100:
            missed.append(f'{percent} %: missed, {correct.mean():.2%} of the test file')
        if not args.json:
            one = figures[str(percent)]
            print(f'{percent} %: {one["mean_s"]:.2f} s from the start of the command, at most {one["longest_s"]:.2f} '
                  f'({one["mean_cpu_s"]:.2f} s of CPU time); {one["mean_correct"]:.2%} of the test file, at least '
                  f'{one["least_correct"]:.2%}: {" ".join(command[:2] if command[0] == "-m" else command[:1])}', flush=True)
    known = {'seeds': args.seeds, 'threads': args.threads or backend.threads(), 'isa': backend.isa()}
    if args.json:
        print(json.dumps(known | {'programs': figures}))
    for line in missed:
        print(f'{PROGRAM}: {line}', file=sys.stderr)
    if args.save and not missed:
        results.save('digits', known | {'programs': figures})
    return 1 if missed else 0


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        sys.exit(main())
