"""Run random training programs for a given time, and make those that fail short.

    python -m scripts.soak --seconds 600        on the CPU; with PYOPS_BACKEND=gpu PYOPS_EMULATE_CUDA=1 on the emulator
    python -m scripts.soak --seed 1000          other programs
    python -m scripts.soak --save               programs that no run had before; adds the counts to docs/reliability.md

Ctrl-C and SIGTERM end a run early; its counts are saved, too.
"""
import collections
import functools
import gc
import multiprocessing
import os
import re
import sys
import time
from typing import NamedTuple

from pyops.errors import Interrupted, exits_cleanly
from pyops.flags import ArgumentParser, positive_int
from scripts import totals
from scripts.totals import ROOT, Runs
from scripts.workers import Ended, Workers, cores

PROGRAM = 'scripts.soak'


def parser():
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description='Train random programs in several ways and compare the bits.')
    p.add_argument('--seconds', type=positive_int, default=60, metavar='N', help='time to run (default %(default)s)')
    p.add_argument('--workers', type=positive_int, default=cores(), metavar='N', help='processes (default: one for each core)')
    totals.add_flags(p)
    return p


class Counts(NamedTuple):
    """The sentence of the page.   kinds: of layers;  places: devices and instruction sets"""
    runs: Runs
    layers: int
    kinds: int
    steps: int
    failed: int
    places: tuple

    @classmethod
    def read(cls, text):
        layers, kinds, places, steps, failed = re.search(
            r'with (\d+) layers of (\d+) kinds on (.*), and (\d+) training steps: (\d+) failed', text).groups()
        return cls(Runs.read(text), int(layers), int(kinds), int(steps), int(failed), tuple(places.split(' and ')))

    def __add__(self, later):
        return Counts(self.runs + later.runs, self.layers + later.layers, max(self.kinds, later.kinds),
                      self.steps + later.steps, self.failed + later.failed, tuple(dict.fromkeys(self.places + later.places)))

    def __str__(self):
        programs = self.runs.last - self.runs.first + 1
        return (f'{programs} programs ({self.runs}) with {self.layers} layers of {self.kinds} kinds on '
                f'{" and ".join(self.places)}, and {self.steps} training steps: {self.failed} failed.\n')


def main(argv=None):
    args = parser().parse_args(argv)
    # Threads that wait for the next kernel take no time from those that work: there are more of them than cores.
    os.environ.setdefault('OMP_WAIT_POLICY', 'passive')
    os.environ.setdefault('OPENBLAS_NUM_THREADS', '1')          # of numpy, for the formulas: each core runs a program
    start, seed = time.perf_counter(), totals.first_seed(args, 'soak')
    with Workers() as workers:
        found = run(workers, seed, args.seconds, args.workers)
        if found:
            counts, seconds = found
            programs = counts.runs.last - seed + 1
            print(f'{counts}in {time.perf_counter() - start:.0f} s, {1000 * seconds / programs:.0f} ms of processor time each')
            totals.save(args, 'soak', counts, f'python -m {PROGRAM} --save')
    if workers.signal:
        raise Interrupted(workers.signal)
    return int(not found or bool(counts.failed))


def run(workers, first, seconds, processes):
    """Run the programs from seed `first` on.   Return Counts and the seconds of processor time; None without any program."""
    sys.path[:0] = [str(ROOT / 'tests' / name) for name in ('helpers', '')]
    next_one = multiprocessing.get_context('fork').Value('Q', first)
    begun, layers, steps, failed, places, times, said = {}, collections.Counter(), 0, 0, {}, 0.0, -60.0
    end, runs = time.monotonic() + seconds, Runs.one(first, first)
    while (left := end - time.monotonic()) > 0 and not workers.signal:         # again if programs have ended all processes
        for number, message in workers.run([functools.partial(in_process, next_one)] * processes, left):
            if isinstance(message, Ended):
                if number not in begun:
                    return None                         # it could not start
                print(f'seed {begun[number]} : the process ended with status {message.status}', flush=True)
                failed += 1
            elif isinstance(message, int):
                begun[number] = message
            else:
                place, names, count, is_wrong, time_of_it = message
                layers.update(names)
                steps, failed, times = steps + count, failed + is_wrong, times + time_of_it
                places[place] = None
                if time.monotonic() > said + 60:
                    said = time.monotonic()
                    print(f'seed {begun[number]}, {failed} failed', flush=True)
        begun.clear()
    last = next_one.value - 1
    if last < first:
        return None
    return Counts(runs._replace(last=last), layers.total(), len(layers), steps, failed, tuple(places)), times


def in_process(next_one, send, is_over):
    """Run programs.   Before each, send its seed; after it, the device, its layers and steps, whether it failed, and the
    seconds of processor time"""
    import pyops.ndarray  # noqa: F401, I001     with PYOPS_BACKEND=gpu the import selects the GPU, before the next ones
    from pyops import backend
    from random_programs import WAYS, difference, numbers_of, program_of, shrink
    place = f'{backend.current_device()!r} {backend.isa()}'
    gc.freeze()                                 # what was imported: else each search for garbage visits it
    while not is_over():
        with next_one.get_lock():
            seed = next_one.value
            next_one.value += 1
        send(seed)
        program, start = program_of(numbers_of(seed)), time.process_time()
        if found := difference(program):
            print(f'seed {seed} : {found}\n  {program}', flush=True)
            first = found.partition(':')[0]
            numbers = shrink(numbers_of(seed), lambda numbers, first=first: _is_same(difference, program_of(numbers), first))
            print(f'seed {seed}, made short : {numbers}\n  {program_of(numbers)}', flush=True)
        send([place, [name for name, *_ in program.layers], len(program.sizes) * (len(WAYS) + 1), bool(found),
              time.process_time() - start])


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
