"""Run random training programs for a given time, and make those that fail short.

    python -m scripts.soak --seconds 600        on the CPU; with PYOPS_BACKEND=gpu PYOPS_EMULATE_CUDA=1 on the emulator
    python -m scripts.soak --seed 1000 --save   other programs; --save also writes the counts to docs/reliability.md
"""
import collections
import sys
import time
from pathlib import Path

from pyops.errors import exits_cleanly
from pyops.flags import ArgumentParser, non_negative_int, positive_int
from scripts.generated import update

PROGRAM = 'scripts.soak'
ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / 'docs' / 'reliability.md'


def parser():
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description='Train random programs in several ways and compare the bits.')
    p.add_argument('--seconds', type=positive_int, default=60, metavar='N', help='time to run (default %(default)s)')
    p.add_argument('--seed', type=non_negative_int, default=0, metavar='N',
                   help='seed of the first program (default %(default)s)')
    p.add_argument('--save', action='store_true', help=f'write the counts to {PAGE.relative_to(ROOT)}')
    return p


def main(argv=None):
    args = parser().parse_args(argv)
    sys.path[:0] = [str(ROOT / 'tests' / name) for name in ('helpers', '')]
    import pyops.ndarray  # noqa: F401, I001     with PYOPS_BACKEND=gpu the import selects the GPU, before the next ones
    from pyops import backend
    from random_programs import WAYS, difference, numbers_of, program_of, shrink
    start, seed, failed, steps, layers = time.perf_counter(), args.seed, [], 0, collections.Counter()
    while time.perf_counter() - start < args.seconds:
        program = program_of(numbers_of(seed))
        if found := difference(program):
            first = found.partition(':')[0]
            numbers = shrink(numbers_of(seed), lambda numbers, first=first: _is_same(difference, program_of(numbers), first))
            print(f'seed {seed} : {found}\n  {numbers}\n  {program_of(numbers)}', flush=True)
            failed.append(seed)
        steps += len(program.sizes) * (len(WAYS) + 1)
        layers.update(name for name, *_ in program.layers)
        seed += 1
    count = seed - args.seed
    where = f'{backend.current_device()!r}, {backend.isa()}'
    print(f'{count} programs with {layers.total()} layers and {steps} training steps on {where} in '
          f'{time.perf_counter() - start:.0f} s: {len(failed)} failed')
    if args.save:
        text = (f'{count} programs (seeds {args.seed} to {seed - 1}, {where}) with {layers.total()} layers of {len(layers)} '
                f'kinds and {steps} training steps: {len(failed)} failed.\n')
        update(PAGE, 'soak', text, f'python -m {PROGRAM} --save')
    return int(bool(failed))


def _is_same(difference, program, first):
    """Return whether a program fails in the same way; one that raises an exception does not."""
    try:
        found = difference(program)
    except Exception:
        return False
    return found is not None and found.startswith(first)


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        sys.exit(main())
