"""Several ranks for tests: threads of this process that exchange messages as MPI does, or processes that mpirun starts."""
import contextlib
import os
import queue
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import ROOT, environment_without

from pyops.distributed import mpi, world

MPIRUN = shutil.which('mpirun', path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get('PATH', '')]))
LAUNCHED = 'OMPI_COMM_WORLD_RANK', 'PMI_RANK', 'SLURM_PROCID', 'RANK'
# mpirun refuses root, and a waiting rank would use a whole core, of which there are fewer than ranks
ALLOWED = dict(OMPI_ALLOW_RUN_AS_ROOT='1', OMPI_ALLOW_RUN_AS_ROOT_CONFIRM='1', OMPI_MCA_mpi_yield_when_idle='1',
               OMP_NUM_THREADS='1')


def has_mpi():
    try:
        import mpi4py  # noqa: F401     not mpi4py.MPI, which starts MPI
    except ImportError:
        return False
    return MPIRUN is not None


needs_mpi = pytest.mark.skipif(not has_mpi(), reason="needs mpi4py and mpirun: pip install '.[dist]'")


def environment(**values):
    return environment_without(*LAUNCHED, **ALLOWED | values)


def start(*arguments, **variables):
    """Start mpirun with these arguments; the ranks' standard output and standard error are pipes."""
    return subprocess.Popen([MPIRUN, '--oversubscribe', '--bind-to', 'none', *map(str, arguments)], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(**variables))


def run_ranks(ranks, *arguments, **variables):
    """Run python with these arguments on so many ranks.  Return the exit status, standard output and standard error."""
    process = start('-n', ranks, sys.executable, *arguments, **variables)
    out, err = process.communicate(timeout=480)
    return process.returncode, out, err


def lines_of(err, *programs):
    """Return the lines of standard error without the lines of mpirun about ranks that ended."""
    lines = map(str.strip, err.splitlines())            # mpirun puts a blank before a line that follows one of its own
    return [line for line in lines if line.startswith((*programs, 'rank ', 'error: '))]


class Done:
    """The request of a message that has been sent."""

    def Test(self):
        return True


class Receipt:
    """The request of a message to be received."""

    def __init__(self, x, box):
        self._x, self._box, self._done = x, box, False

    def Test(self):
        if not self._done:
            with contextlib.suppress(queue.Empty):
                self._x[...] = self._box.get_nowait()
                self._done = True
        return self._done


class Comm:
    """A communicator between threads, with the functions of mpi4py that World uses."""

    def __init__(self, rank, boxes, barrier, shared):
        self.rank, self.size, self._boxes, self._barrier, self._shared = rank, len(shared), boxes, barrier, shared

    def Send(self, x, peer):
        self._boxes[self.rank, peer].put(x.copy())

    def Recv(self, x, peer):
        x[...] = self._boxes[peer, self.rank].get(timeout=240)

    def Sendrecv(self, x, peer, recvbuf, source):
        self.Send(x, peer)
        self.Recv(recvbuf, source)

    def Isend(self, x, peer):
        self.Send(x, peer)
        return Done()

    def Irecv(self, x, peer):
        return Receipt(x, self._boxes[peer, self.rank])

    def allgather(self, value):
        self._shared[self.rank] = value
        self._barrier.wait(240)
        values = list(self._shared)
        self._barrier.wait(240)
        return values


def on_threads(ranks, function):
    """Return the results of function(world) on so many ranks, each a thread."""
    boxes = {(one, other): queue.Queue() for one in range(ranks) for other in range(ranks)}
    barrier, shared, results = threading.Barrier(ranks), [None] * ranks, [None] * ranks

    def run(rank):
        results[rank] = function(world.World(mpi.Mpi(Comm(rank, boxes, barrier, shared))))
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    return results

