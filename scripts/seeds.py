"""Run tests once for each seed of a library whose constants, or orders of threads, are drawn; `make buggify` and
`make schedules` build it and name the tests.

    python -m scripts.seeds buggify 0 1 2 --save --pytest -k 'not torch' tests/ops/test_table.py

--save also writes the counts to docs/reliability.md.
"""
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from pyops.errors import UserError, exits_cleanly
from pyops.flags import ArgumentParser, non_negative_int
from scripts.generated import paragraph
from scripts.totals import PAGE, ROOT, write

PROGRAM = 'scripts.seeds'
# The variables that give the seed to a library.
KINDS = {'buggify': {'PYOPS_BUGGIFY': '{seed}', 'PYOPS_LIBRARY': 'build/drawn/libpyops.so'},
         'schedules': {'PYOPS_SCHEDULE': '{seed}', 'PYOPS_BUGGIFY': '0', 'OMP_NUM_THREADS': '3',
                       'PYOPS_LIBRARY': 'build/drawn/schedules.so'}}


def parser():
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description='Run tests once for each seed of a library that draws.')
    p.add_argument('kind', choices=KINDS, help='what the library draws: constants, or orders of threads')
    p.add_argument('seeds', nargs='+', type=non_negative_int, metavar='SEED')
    p.add_argument('--save', action='store_true', help=f'write the counts to {PAGE.relative_to(ROOT)}')
    p.add_argument('--pytest', nargs='...', default=[], metavar='ARGUMENT', help='the rest is for pytest')
    return p


def counts(path):
    """Return the numbers of tests that ran, and of those that failed, of a report of pytest (JUnit XML)."""
    suite = ElementTree.parse(path).getroot().find('testsuite')
    number = {name: int(suite.get(name)) for name in ('tests', 'skipped', 'failures', 'errors')}
    return number['tests'] - number['skipped'], number['failures'] + number['errors']


def run(kind, seed, arguments):
    """Run pytest with a seed; return counts().  UserError if it wrote no report"""
    environment = os.environ | {name: value.format(seed=seed) for name, value in KINDS[kind].items()}
    with tempfile.TemporaryDirectory(prefix='pyops_seeds_') as folder:
        report = Path(folder) / 'report.xml'
        status = subprocess.run([sys.executable, '-m', 'pytest', '-p', 'no:cacheprovider', f'--junitxml={report}', *arguments],
                                cwd=ROOT, env=environment).returncode
        if status not in (0, 1) or not report.exists():
            raise UserError(f'pytest ended with status {status} before its tests did; see its message above')
        return counts(report)


def text_of(results):
    """Return the text of the page.  results: {seed: counts()}"""
    tests = sorted({ran for ran, _ in results.values()})
    failed = {seed: failures for seed, (_, failures) in results.items() if failures}
    seeds = f'seed{"s" * (len(results) > 1)} {", ".join(map(str, results))}'
    each = ' to '.join(map(str, dict.fromkeys([tests[0], tests[-1]])))
    found = ', '.join(f'{n} with seed {seed}' for seed, n in failed.items()) or '0'
    return paragraph(f'{each} tests with {seeds}: {found} failed.') + '\n'


def main(argv=None):
    args = parser().parse_args(argv)
    results = {seed: run(args.kind, seed, args.pytest) for seed in args.seeds}
    text = text_of(results)
    print(text, end='')
    if args.save:
        write(args.kind, text, f'make {args.kind} SAVE=1')
    return int(any(failed for _, failed in results.values()))


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        sys.exit(main())
