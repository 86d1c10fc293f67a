"""Kill training runs, cut their power, and let calls fail, at random moments; each resumed run must equal an undisturbed one.

    python -m scripts.faults --rounds 200 --save     --save also writes the counts to docs/reliability.md
"""
import contextlib
import functools
import io
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from pyops.errors import UserError, exits_cleanly
from pyops.flags import ArgumentParser, non_negative_int, positive_int
from scripts.totals import PAGE, ROOT, write

PROGRAM = 'scripts.faults'
KILL, CUT, FILE, MEMORY = 'SIGKILL', 'power cut', 'a file call fails', 'an allocation fails'
THREADS, WRITES = 'an allocation fails, with two threads', 'a write or a mapping of a file fails'


def forked(call, kill_after=None):
    """Run call() in a child without its output; kill it after this time in seconds.   Return its exit status, or -signal"""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        status = 1
        with contextlib.suppress(BaseException), open(os.devnull, 'w') as null:
            for number in (1, 2):
                os.dup2(null.fileno(), number)
            call()
            status = 0
        os._exit(status)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kills(rounds, seed, work):
    """Kill runs of the seq2seq program at random moments.   Yield ('SIGKILL', whether the resumed run has the bits of an
    undisturbed one)"""
    from translation import TINY_SEQ2SEQ, newest

    import seq2seq.train
    rng = random.Random(seed)

    def train(folder):
        return lambda: seq2seq.train.main(['-e', '3', '-c', str(folder), *TINY_SEQ2SEQ, '-d', '0.1', '--save-every', '1',
                                           '--threads', '1'])

    def bits(folder):
        return {name: bytes(tensor) for name, tensor in newest(folder)[0].items()}
    times = []
    for name in ('whole', 'again', 'once_more'):
        start = time.monotonic()
        if forked(train(work / name)):
            raise RuntimeError('the undisturbed run failed')
        times.append(time.monotonic() - start)
    seconds, expected = min(times), bits(work / 'whole')
    n = done = 0
    while done < rounds:
        folder, n = work / f'kill_{n}', n + 1
        killed = forked(train(folder), rng.uniform(0, seconds)) == -signal.SIGKILL
        if not killed:
            seconds *= 0.9                      # the machine has become faster
            continue
        done += 1
        status = forked(train(folder))
        yield KILL, status == 0 and bits(folder) == expected


def file_faults(kind, rounds, seed, work):
    """Let a file call of a small run fail, or cut the power there, chosen at random.

    Yield (the kind, whether the resumed run has the bits of an undisturbed one)"""
    import faults
    import numpy as np
    import pytest
    rng = np.random.default_rng(seed)
    with pytest.MonkeyPatch.context() as patch:
        count = faults.Fault(patch, 10**6)
        faults.train(work / 'whole')
        calls = 10**6 - count.left
    expected = faults.tensors_of(work / 'whole')
    rescue = work / 'rescue'
    rescue.mkdir()
    n = done = 0
    while done < rounds:
        folder = path = work / f'{kind}_{n}'
        n, at = n + 1, int(rng.integers(1, calls + 1))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, 'tempdir', str(rescue))
            fault = faults.Fault(patch, at, cut=kind == CUT)
            try:
                faults.train(folder)
            except (faults.PowerCut, UserError, OSError) as error:
                saved = re.search(r'resume with -c (\S+)$', str(error))
                path = Path(saved[1]) if saved else folder
        if not fault.name:                      # a run makes fewer calls on a faster machine
            calls = at - fault.left
            continue
        done += 1
        if kind == CUT and folder.exists():
            fault.lose(folder, rng)
        faults.train(path)
        yield kind, faults.tensors_of(rescue if path != folder else folder) == expected
        for file in rescue.iterdir():
            file.unlink()


def run(rounds, seed):
    """Return ({kind: number of faults}, {kind: number of runs with other bits})."""
    import faults
    tried, wrong = Counter(), Counter()
    # The kills come first: they fork this process, which has no threads of OpenMP yet.
    for kind, results in ((KILL, kills), (CUT, file_faults), (FILE, file_faults)):
        with tempfile.TemporaryDirectory(prefix='pyops_faults_') as work, contextlib.redirect_stdout(io.StringIO()), \
                contextlib.redirect_stderr(io.StringIO()):
            arguments = (rounds, seed, Path(work))
            for _, is_equal in results(*arguments) if kind == KILL else results(kind, *arguments):
                tried[kind] += 1
                wrong[kind] += not is_equal
    with tempfile.TemporaryDirectory(prefix='pyops_faults_') as work:
        for kind, fail in ((MEMORY, faults.fail_allocations), (THREADS, functools.partial(faults.fail_allocations, threads=2)),
                           (WRITES, faults.fail_writes_and_mappings)):
            if (failed := fail(Path(work))) is not None:
                tried[kind] = failed
    return tried, wrong


def table(tried, wrong, seed):
    """Return the text of the page."""
    lines = [f'{tried.total()} faults (seed {seed}):', '', '| fault | times | with other results |', '|---|---|---|']
    return '\n'.join([*lines, *(f'| {kind} | {count} | {wrong[kind]} |' for kind, count in tried.items()), ''])


def parser():
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description='Kill training runs, cut their power, and let calls fail.')
    p.add_argument('--rounds', type=positive_int, default=20, metavar='N', help='runs of each kind (default %(default)s)')
    p.add_argument('--seed', type=non_negative_int, default=0, metavar='N', help='other moments (default %(default)s)')
    p.add_argument('--save', action='store_true', help=f'write the counts to {PAGE.relative_to(ROOT)}')
    return p


def main(argv=None):
    args = parser().parse_args(argv)
    if not sys.platform.startswith('linux'):
        raise UserError('the faults need /proc and a preloaded library; run this on Linux')
    sys.path[:0] = [str(ROOT / 'tests' / name) for name in ('helpers', '')]
    tried, wrong = run(args.rounds, args.seed)
    print(table(tried, wrong, args.seed), end='')
    if args.save:
        write('faults', table(tried, wrong, args.seed), f'python -m {PROGRAM} --save')
    return int(bool(wrong.total()))


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        sys.exit(main())
