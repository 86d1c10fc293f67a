"""Kill a random rank of a training run at a random moment, many times, and check what is left.

    python -m bench.kills --times 50 --ranks 2

Each round starts the same command again; the first kill waits for a checkpoint.  After the kill all processes must end within
--limit seconds, with a status other than 0, and the newest checkpoint must be whole and not older than before.  In the end the
last checkpoint is compared with one of a single undisturbed process: they must have the same bits.
"""
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pyops import checkpoint
from pyops.errors import UserError, exits_cleanly
from pyops.flags import ArgumentParser, non_negative_int, positive_float, positive_int

PROGRAM = 'bench.kills'
ROOT = Path(__file__).resolve().parents[1]
TRAIN = ('-m', 'seq2seq.train', '-f', 'embedded', '-t', '1', '--embedding', '16', '--hidden', '24', '-b', '100', '--parts', '8',
         '-e', '1000000', '--save-every', '1000000', '--save-minutes', '0.01')


def parser():
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description='Kill random ranks of a training run, and check what is left.')
    p.add_argument('--times', type=positive_int, default=50, metavar='N', help='number of kills (default %(default)s)')
    p.add_argument('--ranks', type=positive_int, default=2, metavar='N', help='ranks (default %(default)s)')
    p.add_argument('--most', type=positive_float, default=6.0, metavar='S',
                   help='kill at most this many seconds after the ranks have started (default %(default)s)')
    p.add_argument('--limit', type=positive_float, default=30.0, metavar='S',
                   help='seconds in which all processes must have ended (default %(default)s)')
    p.add_argument('--seed', type=non_negative_int, default=0, metavar='N',
                   help='seed of the moments and ranks (default %(default)s)')
    return p


def start(ranks, folder):
    """Start mpirun with so many ranks of the training run."""
    mpirun = shutil.which('mpirun', path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get('PATH', '')]))
    if mpirun is None:
        raise UserError("mpirun is not installed; install it with: pip install '.[dist]'")
    command = [mpirun, '-n', str(ranks), '--oversubscribe', '--bind-to', 'none', sys.executable, *TRAIN, '-c', folder]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | dict(
        OMP_NUM_THREADS='1', OMPI_ALLOW_RUN_AS_ROOT='1', OMPI_ALLOW_RUN_AS_ROOT_CONFIRM='1', OMPI_MCA_mpi_yield_when_idle='1',
        PYOPS_RANK_TIMEOUT='20'))


def processes():
    """Return {pid: parent} of all processes that have not ended."""
    found = {}
    for path in Path('/proc').iterdir():
        try:
            state, parent = (path / 'stat').read_text().rpartition(')')[2].split()[:2] if path.name.isdigit() else ('Z', 0)
        except OSError:
            continue
        if state != 'Z':
            found[int(path.name)] = int(parent)
    return found


def ranks_of(process):
    """Return {rank: pid} of the ranks that have started below a process."""
    parents, found = processes(), {}
    for pid in parents:
        above = pid
        while above in parents and above != process.pid:
            above = parents[above]
        if above == process.pid and pid != process.pid:
            try:
                variables = Path(f'/proc/{pid}/environ').read_bytes().split(b'\0')
            except OSError:
                continue
            found |= {int(one.partition(b'=')[2]): pid for one in variables if one.startswith(b'OMPI_COMM_WORLD_RANK=')}
    return found


def steps_of(folder):
    """Return the number of steps of the newest checkpoint, 0 without one.  UserError if it is damaged."""
    found = checkpoint.find(folder)
    return int(found.tensors['step'][0]) if found.tensors else 0


def kill_once(process, ranks, wait, chosen, limit, is_ready):
    """Kill a rank `wait` seconds after all ranks have started and is_ready() is true.  Return (status, seconds) until all
    processes had ended.  UserError if one still runs."""
    end = time.monotonic() + 120
    while len(found := ranks_of(process)) < ranks or not is_ready():
        if time.monotonic() > end or process.poll() is not None:
            raise UserError(f'the ranks have not started: status {process.poll()}')
        time.sleep(0.05)
    time.sleep(wait)
    os.kill(found[chosen], signal.SIGKILL)
    begin = time.monotonic()
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        raise UserError(f'mpirun still runs {limit:g} seconds after rank {chosen} was killed') from None
    while left := set(found.values()) & set(processes()):
        if time.monotonic() - begin > limit:
            raise UserError(f'processes {sorted(left)} still run {limit:g} seconds after rank {chosen} was killed')
        time.sleep(0.05)
    return status, time.monotonic() - begin


def main(argv=None):
    args = parser().parse_args(argv)
    rng, slowest, before, saved = random.Random(args.seed), 0.0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, args.times + 1):
            wait, chosen = rng.uniform(0, args.most), rng.randrange(args.ranks)
            status, seconds = kill_once(start(args.ranks, folder), args.ranks, wait, chosen, args.limit,
                                        lambda first=number == 1: not first or any(Path(folder).glob('*.safetensors')))
            steps, slowest = steps_of(folder), max(slowest, seconds)
            if status == 0 or steps < before:
                raise UserError(f'kill {number}, of rank {chosen} after {wait:.2f} s: status {status}, {steps} steps are '
                                f'saved, {before} before')
            print(f'kill {number} : rank {chosen} after {wait:.2f} s, ended in {seconds:.2f} s with status {status}, '
                  f'{steps} steps saved', flush=True)
            saved, before = saved + (steps > before), steps
        left = [name for name in os.listdir(folder) if 'tmp' in name]
        compare(folder, before)
    print(f'kills : {args.times}, all processes ended within {slowest:.2f} s, {saved} rounds saved more steps, '
          f'{len(left)} temporary files are left\n{before} steps have the bits of an undisturbed process')


def compare(folder, steps):
    """Raise UserError unless the newest checkpoint has the bits of a run of so many steps in one process."""
    with tempfile.TemporaryDirectory() as other:
        subprocess.run([sys.executable, *TRAIN, '--max-steps', str(steps), '-c', other], cwd=ROOT, check=True,
                       stdout=subprocess.DEVNULL, env=os.environ | dict(OMP_NUM_THREADS='1'))
        one, two = (checkpoint.find(path).tensors for path in (folder, other))
        different = [name for name in one.keys() | two.keys() if name not in one or name not in two
                     or one[name].tobytes() != two[name].tobytes()]
    if different:
        raise UserError(f'{steps} steps: {different[0]} has other bits than in an undisturbed process')


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
