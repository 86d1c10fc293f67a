"""Train, save, stop, resume, translate and serve in turns in one process, and watch its memory, threads and open files.

    python -m scripts.endurance --minutes 30 --save     --save also writes the figures to docs/reliability.md

The exit status is 1 if memory has grown by more than 1 %, or if a thread, a file descriptor, a mapping of shared memory or a
file in the temporary folder is left.
"""
import contextlib
import gc
import io
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from pyops.errors import Interrupted, UserError, exits_cleanly
from pyops.flags import ArgumentParser, positive_float, positive_int
from scripts.totals import PAGE, ROOT, write

PROGRAM = 'scripts.endurance'
SENTENCES = 'Go on.', 'Help me!', 'I am well.', 'Tom is here.'
EPOCHS = 3
WARM_UP = 1 / 5                 # of the time; caches and memory pools grow in it
MOST_GROWTH = 0.01


class Reading(NamedTuple):
    """What a process holds: resident memory in KiB, and numbers of open descriptors, threads, mappings of shared memory, and
    files in the temporary folder."""
    memory: int
    descriptors: int
    threads: int
    shared: int
    files: int


def reading(temporary):
    """Return the Reading of this process (Linux)."""
    gc.collect()
    status = Path('/proc/self/status').read_text().splitlines()
    (memory,) = (int(line.split()[1]) for line in status if line.startswith('VmRSS:'))
    shared = sum('/dev/shm/' in line for line in Path('/proc/self/maps').read_text().splitlines())
    return Reading(memory, len(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task')), shared,
                   sum(len(folders) + len(files) for _, folders, files in os.walk(temporary)))


class Stop(io.StringIO):
    """An output that sends SIGTERM to this process when the n-th line with a loss is written to it."""

    def __init__(self, n):
        super().__init__()
        self.left = n

    def write(self, text):
        self.left -= 'loss : ' in text
        if self.left == 0:
            self.left = -1
            signal.raise_signal(signal.SIGTERM)
        return super().write(text)


def output_of(call, output=None):
    """Return what a call prints."""
    with contextlib.redirect_stdout(output or io.StringIO()) as out:
        call()
    return out.getvalue()


def cycle(kind, lines, threads, folder):
    """Train a model, stop it with SIGTERM when it prints a loss for the n-th time, n = lines, resume it, translate and serve.

    Return (the bits of all tensors, the translations).   RuntimeError if the run was not stopped or not saved, or if the server
    answers with other translations"""
    import server
    from translation import TINY_SEQ2SEQ, TINY_TRANSFORMER, newest

    import pyops
    import seq2seq.train
    import seq2seq.translate
    import transformer.train
    import transformer.translate
    program, flags = (transformer, TINY_TRANSFORMER) if kind == 'transformer' else (seq2seq, TINY_SEQ2SEQ)
    flags = ['-e', str(EPOCHS), '-c', str(folder), *flags, '-d', '0.1', '-b', '16', '-l', '0.01', '--save-every', '1',
             '--threads', str(threads)]
    try:
        output_of(lambda: program.train.main(flags), Stop(lines))
    except Interrupted:
        saved = newest(folder)[1]['run']['epoch']
    else:
        raise RuntimeError(f'{kind}: SIGTERM at line {lines} did not end the run')
    if saved >= EPOCHS:
        raise RuntimeError(f'{kind}: nothing was left to train after SIGTERM at line {lines}')
    output_of(lambda: program.train.main(flags))
    translations = output_of(lambda: program.translate.main(['-c', str(folder), *SENTENCES])).splitlines()[-len(SENTENCES):]
    with server.running(pyops.load(folder)) as running:
        status, answer = server.post(running.port, {'texts': list(SENTENCES)})
        health = server.ask(running.port, 'GET', '/health')[0]
    if not any(translations):
        raise RuntimeError(f'{kind}: all translations are empty')
    served = [best['text'] for best, *_ in answer.get('translations', [])]
    if (status, health, served) != (200, 200, translations):
        raise RuntimeError(f'{kind}: the server answered {status} {answer}, the command translated {translations}')
    return {name: bytes(tensor) for name, tensor in newest(folder)[0].items()}, translations


def run(seconds, threads, seed=0):
    """Repeat cycles for this time in a temporary folder.   Return the list of (seconds since the start, Reading)"""
    rng, readings, expected, said = random.Random(seed), [], {}, 0.0
    start, usual = time.monotonic(), tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix='pyops_endurance_') as work:
        temporary = Path(work) / 'temporary'
        temporary.mkdir()
        tempfile.tempdir = str(temporary)
        try:
            while len(readings) < 4 or time.monotonic() - start < seconds:
                kind = ('transformer', 'seq2seq')[len(readings) % 2]
                found = cycle(kind, rng.randrange(1, 8 * (EPOCHS - 1)), threads, Path(work) / 'run')
                if found != expected.setdefault(kind, found):
                    raise RuntimeError(f'{kind}: turn {len(readings) + 1}, stopped and resumed, has other bits')
                shutil.rmtree(Path(work) / 'run')
                readings.append((time.monotonic() - start, reading(temporary)))
                if readings[-1][0] > said + 30:
                    said = readings[-1][0]
                    print(f'{said:.0f} s : {len(readings)} turns, {readings[-1][1]}', flush=True)
        finally:
            tempfile.tempdir = usual
    return readings


class Result(NamedTuple):
    """The readings of a run, without warm-up: medians of the first and the last tenth."""
    cycles: int
    minutes: float
    first: Reading
    last: Reading

    @property
    def growth(self):
        return self.last.memory / self.first.memory - 1

    def problems(self):
        """Return a text for each kind of growth."""
        more = [f'{last - first} more {name}' for name, first, last in zip(Reading._fields, self.first, self.last, strict=True)
                if name != 'memory' and last > first]
        return [f'memory grew by {self.growth:.2%}'] * (self.growth > MOST_GROWTH) + more


def result(readings):
    """Return the Result of the readings of run()."""
    warm = [held for seconds, held in readings if seconds > readings[-1][0] * WARM_UP]
    part = max(1, len(warm) // 10)
    first, last = (Reading(*(round(statistics.median(values)) for values in zip(*some, strict=True)))
                   for some in (warm[:part], warm[-part:]))
    return Result(len(readings), readings[-1][0] / 60, first, last)


def table(found, threads):
    """Return the text of the page."""
    names = {'memory': 'resident memory', 'descriptors': 'open file descriptors', 'threads': 'threads',
             'shared': 'mappings of shared memory', 'files': 'files in the temporary folder'}
    unit = {'memory': ' KiB'}
    lines = [f'{found.cycles} turns in {found.minutes:.1f} minutes with {threads} threads; resident memory changed by '
             f'{found.growth:+.2%}.', '', '| held | after the warm-up | at the end |', '|---|---|---|']
    lines += [f'| {names[name]} | {first}{unit.get(name, "")} | {last}{unit.get(name, "")} |'
              for name, first, last in zip(Reading._fields, found.first, found.last, strict=True)]
    return '\n'.join([*lines, ''])


def parser():
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description='Train, stop, resume and serve in turns, and watch for leaks.')
    p.add_argument('--minutes', type=positive_float, default=1.0, metavar='N', help='time to run (default %(default)s)')
    p.add_argument('--threads', type=positive_int, default=2, metavar='N', help='threads of OpenMP (default %(default)s)')
    p.add_argument('--save', action='store_true', help=f'write the figures to {PAGE.relative_to(ROOT)}')
    return p


def main(argv=None):
    args = parser().parse_args(argv)
    if not sys.platform.startswith('linux'):
        raise UserError('the figures of a process are read from /proc; run this on Linux')
    sys.path[:0] = [str(ROOT / 'tests' / name) for name in ('helpers', '')]
    found = result(run(60 * args.minutes, args.threads))
    print(table(found, args.threads), end='')
    if args.save:
        write('endurance', table(found, args.threads), f'python -m {PROGRAM} --save')
    for problem in found.problems():
        print(f'problem : {problem}')
    return int(bool(found.problems()))


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        sys.exit(main())
