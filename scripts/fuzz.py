"""Give random inputs to the readers of files, requests and flags, and save those that a reader does not survive.

    python -m scripts.fuzz --minutes 10              all readers, on all cores
    python -m scripts.fuzz checkpoint pt --seed 7    two of them, other inputs
    python -m scripts.fuzz --minutes 60 --save       seeds that no run had before; adds the counts to docs/reliability.md
    python -m scripts.fuzz --again build/fuzz/pt-0123456789ab      run a saved input again

Ctrl-C and SIGTERM end a run early; its counts are saved, too.  Inputs that reach new lines stay in build/fuzz/corpus, for the
next run.
"""
import collections
import functools
import hashlib
import importlib.util
import mmap
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from pyops.errors import Interrupted, UserError, exits_cleanly
from pyops.flags import ArgumentParser, positive_float, positive_int
from scripts import totals
from scripts.totals import ROOT, Runs
from scripts.workers import Ended, Workers, cores

PROGRAM = 'scripts.fuzz'
FOUND = ROOT / 'build' / 'fuzz'
_SIZE = 1 << 20             # bytes of an input that stay if the process ends


def parser():
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description='Give random inputs to the readers.')
    p.add_argument('targets', nargs='*', metavar='TARGET', help='readers (default: all)')
    p.add_argument('--minutes', type=positive_float, default=1.0, metavar='N', help='time to run (default %(default)s)')
    p.add_argument('--workers', type=positive_int, default=cores(), metavar='N',
                   help='processes, each with a seed (default: a core each)')
    totals.add_flags(p)
    p.add_argument('--again', metavar='FILE', help='run a saved input again, and print the traceback')
    return p


class Count(NamedTuple):
    inputs: int = 0
    refused: int = 0
    failures: int = 0

    def __add__(self, other):
        return Count(*map(sum, zip(self, other, strict=True)))


class Counts(NamedTuple):
    """The table of the page.   readers: {name: Count}"""
    runs: Runs
    readers: dict

    @classmethod
    def read(cls, text):
        rows = re.findall(r'^\| ([a-z_]+) \| (\d+) \| \d+ \| (\d+) \| (\d+) \|$', text, re.M)
        return cls(Runs.read(text), {name: Count(*map(int, numbers)) for name, *numbers in rows})

    def __add__(self, later):
        names = dict.fromkeys([*self.readers, *later.readers])
        return Counts(self.runs + later.runs, {name: self.readers.get(name, Count()) + later.readers.get(name, Count())
                                               for name in names})

    def __str__(self):
        lines = [f'{sum(count.inputs for count in self.readers.values())} inputs ({self.runs}):', '',
                 '| reader | inputs | read | refused | failures |', '|---|---|---|---|---|']
        lines += [f'| {name} | {inputs} | {inputs - refused - failures} | {refused} | {failures} |'
                  for name, (inputs, refused, failures) in self.readers.items()]
        return '\n'.join([*lines, ''])


def main(argv=None):
    args = parser().parse_args(argv)
    sys.path[:0] = [str(ROOT / 'tests' / name) for name in ('helpers', '')]
    import fuzzing
    if args.again:
        return run_again(fuzzing, Path(args.again))
    if unknown := set(args.targets) - fuzzing.TARGETS.keys():
        raise UserError(f'{min(unknown)}: no such reader; expected one of {", ".join(fuzzing.TARGETS)}')
    names = args.targets or list(fuzzing.TARGETS)
    if not args.targets and not importlib.util.find_spec('sentencepiece'):
        names.remove('marian')
        print('marian : left out, sentencepiece is not installed: pip install sentencepiece', file=sys.stderr)
    first = totals.first_seed(args, 'fuzz')
    runs = Runs.one(first, first + args.workers - 1)
    FOUND.mkdir(parents=True, exist_ok=True)
    fuzzing.PROBES.prepare()
    start, counts = time.perf_counter(), {}
    with Workers() as workers:
        for name in names:
            if not workers.signal:
                counts[name] = run(fuzzing, workers, name, range(runs.first, runs.last + 1), 60 * args.minutes / len(names))
        print(f'{sum(count.inputs for count in counts.values())} inputs in {time.perf_counter() - start:.0f} s')
        totals.save(args, 'fuzz', Counts(runs, counts), f'python -m {PROGRAM} --save')
    if workers.signal:
        raise Interrupted(workers.signal)
    return int(any(count.failures for count in counts.values()))


def run_again(fuzzing, path):
    """Run a saved input without limits on time and memory.   Return 0 if the reader returns or refuses it."""
    name = path.name.partition('-')[0]
    if name not in fuzzing.TARGETS or not path.is_file():
        raise UserError(f'--again {path}: expected a file that {PROGRAM} has saved, with the name of a reader before the -')
    target, data = fuzzing.TARGETS[name], path.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        try:
            target.run(target.given(data, folder))
        except target.errors as error:
            fuzzing.check_line(error)
            print(f'refused : {error}')
        else:
            print('read')
    return 0


def run(fuzzing, workers, name, seeds, seconds):
    """Fuzz a reader in a process for each seed, which a wrong input may end.   Return a Count"""
    counts, times = [Count()] * len(seeds), [0.0] * len(seeds)
    in_memory = '/dev/shm' if os.access('/dev/shm', os.W_OK) else None         # files there cost little
    with tempfile.TemporaryDirectory(dir=in_memory) as folder:
        inputs = [mmap.mmap(-1, _SIZE) for _ in seeds]          # shared: the input of a process that ended
        tasks = [functools.partial(in_process, fuzzing, name, seed, Path(folder) / str(seed), last)
                 for seed, last in zip(seeds, inputs, strict=True)]
        for number, message in workers.run(tasks, seconds):
            if isinstance(message, Ended):
                size = int.from_bytes(inputs[number][:8], 'little')
                print(f'{name} : the process ended with status {message.status}; the input is '
                      f'{save(name, inputs[number][8:8 + size])}', flush=True)
                counts[number] += Count(1, 0, 1)
            else:
                *count, times[number] = message
                counts[number] = Count(*count)
    total = sum(counts, Count())
    print(f'{name:12} {total.inputs:8} inputs {total.refused:8} refused {total.failures:4} failures'
          f'{total.inputs / max(sum(times), 1e-9):8.0f} inputs a second of processor time', flush=True)
    return total


def in_process(fuzzing, name, seed, folder, last, send, is_over):
    """Run inputs, and send inputs, refused, failures and seconds of processor time after each second and at the end."""
    refused, kinds, said, start = 0, collections.Counter(), 0.0, None
    place = FOUND / 'corpus' / name
    place.mkdir(parents=True, exist_ok=True)
    folder.mkdir()
    before = {path.name: path.read_bytes() for path in sorted(place.iterdir())}
    corpus = list(before.values())

    def note(data):
        data = data[:_SIZE - 8]
        last[:8 + len(data)] = len(data).to_bytes(8, 'little') + data
    for inputs, (data, found) in enumerate(fuzzing.fuzz(name, seed, folder, note, corpus), 1):
        start = start or time.process_time()
        if isinstance(found, fuzzing.Failure):
            kinds[found.kind] += 1
            if kinds[found.kind] == 1:
                short = fuzzing.shortened(data, lambda part, kind=found.kind: getattr(
                    fuzzing.outcome(fuzzing.TARGETS[name], part), 'kind', None) == kind)
                print(f'{name} : {found.text}; the input is {save(name, short)}', flush=True)
        elif found:
            refused += 1
        is_last = is_over()
        if is_last or time.monotonic() - said > 1:
            said = time.monotonic()
            send([inputs, refused, kinds.total(), time.process_time() - start])
        if is_last:
            break
    share(place, before, corpus)


def share(place, before, corpus):
    """Replace the inputs of earlier runs in a folder by those that still reach a line of their own, and by new ones.

    before: {file name: input} of earlier runs
    """
    after = {hashlib.sha256(data).hexdigest()[:16]: data for data in corpus}
    for name in before.keys() - after.keys():
        (place / name).unlink(missing_ok=True)          # another process may have done it
    for name in after.keys() - before.keys():
        (place / name).write_bytes(after[name])


def save(name, data):
    path = FOUND / f'{name}-{hashlib.sha256(data).hexdigest()[:12]}'
    path.write_bytes(data)
    return path


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        sys.exit(main())
