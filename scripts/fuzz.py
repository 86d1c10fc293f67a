"""Give random inputs to the readers of files, requests and flags, and save those that a reader does not survive.

    python -m scripts.fuzz --minutes 10              all readers; --save also writes the counts to docs/reliability.md
    python -m scripts.fuzz checkpoint pt --seed 7    two of them, other inputs
    python -m scripts.fuzz --again build/fuzz/pt-0123456789ab      run a saved input again
"""
import collections
import hashlib
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple

from pyops.errors import UserError, exits_cleanly
from pyops.flags import ArgumentParser, non_negative_int, positive_float
from scripts.generated import update

PROGRAM = 'scripts.fuzz'
ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / 'docs' / 'reliability.md'
FOUND = ROOT / 'build' / 'fuzz'
GRACE = 60              # seconds after its time in which a process can make the valid inputs, and end its last input


def parser():
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description='Give random inputs to the readers.')
    p.add_argument('targets', nargs='*', metavar='TARGET', help='readers (default: all)')
    p.add_argument('--minutes', type=positive_float, default=1.0, metavar='N', help='time to run (default %(default)s)')
    p.add_argument('--seed', type=non_negative_int, default=0, metavar='N', help='other inputs (default %(default)s)')
    p.add_argument('--again', metavar='FILE', help='run a saved input again, and print the traceback')
    p.add_argument('--save', action='store_true', help=f'write the counts to {PAGE.relative_to(ROOT)}')
    return p


class Count(NamedTuple):
    inputs: int
    refused: int
    failures: int


def main(argv=None):
    args = parser().parse_args(argv)
    sys.path[:0] = [str(ROOT / 'tests' / name) for name in ('helpers', '')]
    import fuzzing
    if args.again:
        return run_again(fuzzing, Path(args.again))
    if unknown := set(args.targets) - fuzzing.TARGETS.keys():
        raise UserError(f'{min(unknown)}: no such reader; expected one of {", ".join(fuzzing.TARGETS)}')
    names = args.targets or list(fuzzing.TARGETS)
    FOUND.mkdir(parents=True, exist_ok=True)
    start, counts = time.perf_counter(), {}
    for name in names:
        counts[name] = run(fuzzing, name, args.seed, 60 * args.minutes / len(names))
        print(f'{name:12} {counts[name].inputs:8} inputs {counts[name].refused:8} refused {counts[name].failures:4} failures',
              flush=True)
    print(f'{sum(count.inputs for count in counts.values())} inputs in {time.perf_counter() - start:.0f} s')
    if args.save:
        update(PAGE, 'fuzz', table(counts, args.seed), f'python -m {PROGRAM} --save')
    return int(any(count.failures for count in counts.values()))


def run_again(fuzzing, path):
    """Run a saved input without limits on time and memory.   Return 0 if the reader returns or refuses it."""
    name = path.name.partition('-')[0]
    if name not in fuzzing.TARGETS or not path.is_file():
        raise UserError(f'--again {path}: expected a file that {PROGRAM} has saved, with the name of a reader before the -')
    target = fuzzing.TARGETS[name]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / f'checkpoint_20260101_000000_1{target.suffix}'
        copy.write_bytes(path.read_bytes())
        try:
            target.run(copy)
        except target.errors as error:
            fuzzing.check_line(error)
            print(f'refused : {error}')
        else:
            print('read')
    return 0


def run(fuzzing, name, seed, seconds):
    """Fuzz a reader in a process of its own, which a wrong input may end.   Return a Count"""
    with tempfile.TemporaryDirectory() as folder:
        current = Path(folder) / 'current'
        receive, send = os.pipe()
        child = os.fork()
        if not child:
            os.close(receive)
            status = 1
            try:
                with os.fdopen(send, 'w') as stream:
                    in_child(fuzzing, name, seed, seconds, Path(folder), current, stream)
                status = 0
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        os.close(send)
        count, text = Count(0, 0, 0), b''
        end = time.monotonic() + seconds + GRACE
        while time.monotonic() < end and select.select([receive], [], [], max(0, end - time.monotonic()))[0]:
            if not (part := os.read(receive, 1 << 16)):
                break
            text += part
            *lines, text = text.split(b'\n')
            for line in lines:
                count = Count(*json.loads(line))
        else:
            os.kill(child, signal.SIGKILL)
        os.close(receive)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            data = current.read_bytes() if current.exists() else b''
            print(f'{name} : the process ended with status {status}; the input is {save(name, data)}', flush=True)
            count = count._replace(inputs=count.inputs + 1, failures=count.failures + 1)
    return count


def in_child(fuzzing, name, seed, seconds, folder, current, stream):
    """Run inputs, and write a Count as a line of JSON after each second."""
    inputs, refused, kinds, said = 0, 0, collections.Counter(), 0.0
    end = None
    for data, found in fuzzing.fuzz(name, seed, folder, current.write_bytes):
        now = time.monotonic()
        end = end or now + seconds              # the time starts when the first input has run
        inputs += 1
        if isinstance(found, fuzzing.Failure):
            kinds[found.kind] += 1
            if kinds[found.kind] == 1:
                short = fuzzing.shortened(data, lambda part, kind=found.kind: getattr(
                    fuzzing.outcome(fuzzing.TARGETS[name], part, folder), 'kind', None) == kind)
                print(f'{name} : {found.text}; the input is {save(name, short)}', flush=True)
        elif found:
            refused += 1
        if now - said > 1 or now > end:
            said = now
            print(json.dumps([inputs, refused, kinds.total()]), file=stream, flush=True)
        if now > end:
            return


def save(name, data):
    path = FOUND / f'{name}-{hashlib.sha256(data).hexdigest()[:12]}'
    path.write_bytes(data)
    return path


def table(counts, seed):
    """Return the text of the page."""
    lines = ['| reader | inputs | read | refused | failures |', '|---|---|---|---|---|']
    for name, (inputs, refused, failures) in counts.items():
        lines.append(f'| {name} | {inputs} | {inputs - refused - failures} | {refused} | {failures} |')
    return '\n'.join([f'{sum(count.inputs for count in counts.values())} inputs (seed {seed}):', '', *lines, ''])


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        sys.exit(main())
