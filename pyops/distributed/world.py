"""The ranks of a job, and the operations in which all of them take part: sums, broadcasts, comparisons.

Messages travel by MPI (mpi.py) between ranks on CPUs, and by NCCL (nccl.py) between ranks on GPUs.  With one rank, every
operation returns at once and neither is needed.
"""
from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from pyops import __version__, backend, errors, launcher
from pyops.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyops.distributed.mpi import Mpi
    from pyops.distributed.nccl import Nccl
    from pyops.typing import Array

TIMEOUT = 1800.0        # seconds that a rank waits for another, unless $PYOPS_RANK_TIMEOUT is set
PARTS = 8               # --parts under mpirun, if there are no more ranks
WITH_MPI = 'mpirun', 'mpiexec'      # launchers that always have MPI


class World:
    """All ranks of the job.

    messages: values and arrays in host memory between ranks, None for one rank
    network: arrays in device memory, None on CPUs; it is `messages`, too, if there is no MPI
    hosts: the host of each rank
    """

    def __init__(self, messages: Mpi | Nccl | None = None, network: Nccl | None = None) -> None:
        self.messages, self.network = messages, network
        self.rank: int = messages.rank if messages else 0
        self.size: int = messages.size if messages else 1
        self.hosts: list[str] = [os.uname().nodename]
        self.is_patient = False         # wait for messages asleep, since another thread computes, instead of in a loop
        if messages:
            self._watchdog = Watchdog(self, _timeout())
            with self.waiting():
                if network:
                    network.connect(messages)
                self.hosts = messages.gather(os.uname().nodename)

    def name(self, rank: int) -> str:
        return f'rank {rank} on {self.hosts[rank]}' if rank < len(self.hosts) else f'rank {rank}'

    def waiting(self, peer: int | None = None) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this rank waits for another, None for any: the job ends if that takes too long."""
        return self._watchdog.watch(peer)

    @property
    def joined(self) -> Mpi | Nccl:
        """The messages between several ranks."""
        assert self.messages is not None
        return self.messages

    def abort(self, status: int) -> None:
        self.joined.abort(status)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order."""
        if self.size == 1:
            return [value]
        with self.waiting():
            return self.joined.gather(value)

    def _carrier(self, x: Array) -> Any:
        """Return what sends the elements of an array: on a GPU NCCL, which only queues the messages, on its second stream."""
        return self.messages if isinstance(x, np.ndarray) else self.network

    def messages_of_gpus(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for messages between arrays of GPUs: they are queued between the work before it and the work after
        it.  On CPUs it does nothing."""
        return self.network.messages() if self.network else contextlib.nullcontext()

    # ---- sums ------------------------------------------------------------------------------------------------------------
    #
    # Recursive halving: in each step two ranks exchange halves of their elements and add, so each of the first `paired` ranks,
    # a power of two, ends with the sums of one share.  Doubling in the opposite order gives every rank the sums of all.
    # Shares are numbered by address.  `cuts`, paired + 1 ascending positions, are the limits of the shares of an array.

    @property
    def paired(self) -> int:
        """The largest power of two of ranks.  The others add their arrays to one of these."""
        return 1 << (self.size.bit_length() - 1)

    def share_of(self, rank: int) -> int:
        """Return the number of the share that a rank ends with: its bits in reverse order."""
        bits = self.paired.bit_length() - 1
        return int(f'{rank:0{bits}b}'[::-1], 2) if bits else 0

    def sum(self, x: Array, fast: bool = False) -> None:
        """Replace x (n,), contiguous, by its sum over all ranks, in one binary tree: neighbours first, then pairs of pairs, ...

        2 (R - 1) / R of the array travel from each rank.   fast: in the order of the library of MPI or NCCL
        """
        if self.size > 1 and fast:
            with self.waiting():
                self._carrier(x).sum_in_any_order(x)
        elif self.size > 1:
            cuts = even_cuts(len(x), self.paired)
            self.reduce_scatter(x, cuts)
            self.all_gather(x, cuts)

    def reduce_scatter(self, x: Array, cuts: Sequence[int]) -> None:
        """Replace this rank's share of x (n,) by its sum over all ranks, in the order of sum().  The other elements are
        undefined afterwards."""
        if self.size == 1:
            return
        carrier = self._carrier(x)
        if self.rank >= self.paired:
            with self.waiting(self.rank - self.paired):
                carrier.send(x, self.rank - self.paired)
            return
        spare = carrier.spare(x)
        if (extra := self.rank + self.paired) < self.size:
            with self.waiting(extra):
                carrier.receive(spare, extra)
            carrier.add(x, spare)
        for peer, mine, theirs in self._halves(cuts):
            received = spare[:mine.stop - mine.start]
            with self.waiting(peer):
                carrier.exchange(peer, x[theirs], received, self.is_patient)
            carrier.add(x[mine], received)      # of two numbers, so the order of the two ranks does not matter

    def all_gather(self, x: Array, cuts: Sequence[int]) -> None:
        """Copy each rank's share of x (n,) to all ranks."""
        if self.size == 1:
            return
        carrier = self._carrier(x)
        if self.rank >= self.paired:
            with self.waiting(self.rank - self.paired):
                carrier.receive(x, self.rank - self.paired)
            return
        for peer, mine, theirs in reversed(self._halves(cuts)):
            with self.waiting(peer):
                carrier.exchange(peer, x[mine], x[theirs], self.is_patient)
        if (extra := self.rank + self.paired) < self.size:
            with self.waiting(extra):
                carrier.send(x, extra)

    def gather_shares(self, x: Array, cuts: Sequence[int]) -> np.ndarray | None:
        """Return on rank 0 the array (n,), in host memory, whose shares the ranks have, None on the others.   x: the share of
        this rank"""
        carrier = self._carrier(x)
        if self.rank:
            if x.size:
                with self.waiting(0):
                    carrier.send_to_host(x, 0)
            return None
        whole = np.empty(cuts[-1], x.dtype)
        whole[cuts[0]:cuts[1]] = backend.get(x)
        for peer in range(1, self.paired):
            share = whole[cuts[self.share_of(peer)]:cuts[self.share_of(peer) + 1]]
            if share.size:
                with self.waiting(peer):
                    carrier.receive_on_host(share, peer)
        return whole

    def _halves(self, cuts: Sequence[int]) -> list[tuple[int, slice, slice]]:
        """Return (peer, elements that this rank keeps, elements that the peer keeps) for each step of the halving."""
        low, high, distance, found = 0, self.paired, 1, []
        while distance < self.paired:
            middle = (low + high) // 2
            lower, upper = slice(cuts[low], cuts[middle]), slice(cuts[middle], cuts[high])
            if self.rank & distance:
                low = middle
                found.append((self.rank ^ distance, upper, lower))
            else:
                high = middle
                found.append((self.rank ^ distance, lower, upper))
            distance *= 2
        return found


def even_cuts(n: int, shares: int, unit: int = 1) -> list[int]:
    """Return the limits of shares of n elements, of about equal size, each but the last a multiple of `unit`: shares + 1
    positions.  With few units, some shares are empty."""
    units = -(-n // unit)
    return [min(units * i // shares * unit, n) for i in range(shares + 1)]


class Watchdog:
    """A thread that ends the job if this rank waits longer than `limit` seconds for another rank, 0: for any time."""

    def __init__(self, world: World, limit: float) -> None:
        self._world, self._limit, self._console = world, limit, sys.__stderr__
        self._since = 0.0
        self._peer: int | None = None
        if limit:
            threading.Thread(target=self._run, daemon=True).start()

    @contextlib.contextmanager
    def watch(self, peer: int | None) -> Iterator[None]:
        self._peer, self._since = peer, time.monotonic()
        try:
            yield
        finally:
            self._since = 0.0

    def _run(self) -> None:
        while True:
            time.sleep(min(1.0, self._limit / 4))
            since = self._since
            if since and time.monotonic() - since > self._limit:
                break
        world = self._world
        other = 'another rank' if self._peer is None else world.name(self._peer)
        print(f'error: {world.name(world.rank)} has waited {self._limit:g} seconds for {other}, which hangs or is too slow; '
              'all ranks end; start again to resume, with a larger PYOPS_RANK_TIMEOUT if it is only slow',
              file=self._console, flush=True)
        world.abort(2)


_world = World()


def init() -> None:
    """Join the ranks that a launcher started (mpirun, mpiexec, srun or torchrun); without one, there is one rank, 0 of 1.

    If the current device is a GPU (pyops.use_gpu), each rank has one, and NCCL sends their arrays.  mpirun and mpiexec then
    start MPI, too, which sends everything else; srun and torchrun do not need it.
    UserError if mpi4py, the library of MPI, or NCCL is missing, if MPI has another number of ranks than the launcher's
    variables, or if ranks cannot connect.
    """
    global _world
    place = launcher.launch()
    if place is None or place.size == 1 or _world.size > 1:
        return
    network = None
    if not backend.current_device().is_host:
        from pyops.distributed import nccl
        network = nccl.start(place)
    if network and place.launcher not in WITH_MPI:
        errors.abort_ranks = network.abort
        _world = World(network, network)
    else:
        from pyops.distributed import mpi
        messages = mpi.start(place)
        errors.abort_ranks = messages.abort
        _world = World(messages, network)


def finalize() -> None:
    """Wait for all ranks and leave MPI and NCCL.  Not required at exit."""
    global _world
    if _world.messages:
        barrier()
        if _world.network:
            _world.network.finalize()
        if _world.messages is not _world.network:
            _world.messages.finalize()
        _world, errors.abort_ranks = World(), None


def _timeout() -> float:
    text = os.environ.get('PYOPS_RANK_TIMEOUT', '')
    try:
        value = float(text or TIMEOUT)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise UserError(f'PYOPS_RANK_TIMEOUT={text}: expected a number of seconds, 0 for no limit')
    return value


def current() -> World:
    """Return the World of this process."""
    return _world


# ---- ranks -----------------------------------------------------------------------------------------------------------------

def rank() -> int:
    """Return the number of this rank, 0 to size() - 1."""
    return _world.rank


def size() -> int:
    """Return the number of ranks."""
    return _world.size


def is_first() -> bool:
    """Return whether this is rank 0, the one that prints and writes files."""
    return _world.rank == 0


def hosts() -> list[str]:
    """Return the host of each rank."""
    return list(_world.hosts)


def on_gpus() -> bool:
    """Return whether each of several ranks has a GPU: sums of its arrays are then only queued, and a graph can contain them."""
    return _world.network is not None


def can_overlap(fast: bool = False) -> bool:
    """Return whether gradients may be sent while a part is computed.   fast: in the order of the library of MPI or NCCL"""
    if _world.network:
        return True
    return _world.messages is not None and not fast and _world.messages.can_overlap()


def share_cores() -> int:
    """Return the number of threads for this rank: its cores if the launcher bound it to cores of its own, else its share of
    the cores of its host; at least 1."""
    if not hasattr(os, 'sched_getaffinity'):
        cores = [set(range(os.cpu_count() or 1))] * _world.size
    else:
        cores = gather(os.sched_getaffinity(0))
    here = [mine for host, mine in zip(_world.hosts, cores, strict=True) if host == _world.hosts[_world.rank]]
    return max(1, min(len(cores[_world.rank]), len(set().union(*here)) // len(here)))


# ---- operations of all ranks ------------------------------------------------------------------------------------------------

def all_reduce(x: Array, fast: bool = False) -> Array:
    """Replace x by its sum over all ranks and return it: the same bits on all ranks, in an order that is fixed by their number.

    x: a contiguous array, on any device; float32 if the ranks have GPUs.   fast: the order of the library of MPI or NCCL, which
    may differ from run to run
    TypeError for another dtype on GPUs
    """
    world = _world
    if world.size == 1:
        return x
    if world.network:
        _all_reduce_by_nccl(x, world.network, fast)
        return x
    values = np.ascontiguousarray(backend.get(x))
    world.sum(values.reshape(-1), fast)
    if values is not x:
        x[...] = values
    return x


def _all_reduce_by_nccl(x: Any, network: Nccl, fast: bool) -> None:
    if x.dtype != np.float32:
        raise TypeError(f'all_reduce: expected float32 between GPUs, got {x.dtype}')
    on_device = backend.current_device().put(x).reshape(-1)
    with network.messages():
        _world.sum(on_device, fast)
    if isinstance(x, np.ndarray):
        x[...] = backend.get(on_device).reshape(x.shape)


def all_max(x: Array) -> Array:
    """Replace each element of x, a contiguous array on any device, by its maximum over all ranks and return x.

    x: float32 or int32 if the ranks have GPUs.   TypeError for another dtype on GPUs
    """
    network = _world.network
    if network:
        on_device = backend.current_device().put(x)
        with network.messages():
            network.largest_of_each(on_device)
        if isinstance(x, np.ndarray):
            x[...] = backend.get(on_device)
    elif _world.messages:
        values = np.ascontiguousarray(backend.get(x))
        with _world.waiting():
            _world.messages.largest_of_each(values.reshape(-1))
        if values is not x:
            x[...] = values
    return x


def union(bits: np.ndarray) -> np.ndarray:
    """Return the bitwise or of an array of integers over all ranks."""
    if _world.messages:
        bits = np.ascontiguousarray(bits)
        with _world.waiting():
            _world.messages.union(bits)
    return bits


def largest(number: int) -> int:
    """Return the largest of the numbers that the ranks give."""
    if not _world.messages:
        return number
    with _world.waiting():
        return _world.messages.largest(number)


def barrier() -> None:
    """Wait until all ranks have called this function."""
    if _world.messages:
        with _world.waiting():
            _world.messages.barrier()


def broadcast(value: Any) -> Any:
    """Return the value of rank 0, any object that can be pickled."""
    if not _world.messages:
        return value
    with _world.waiting(0 if _world.rank else None):
        return _world.messages.broadcast(value)


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks, in their order, on each rank."""
    return _world.gather(value)


def on_first(function: Callable[[], Any]) -> Any:
    """Return function() of rank 0 on all ranks; only rank 0 calls it."""
    return broadcast(function() if is_first() else None)


# ---- equality --------------------------------------------------------------------------------------------------------------

def agree(**facts: Any) -> None:
    """Raise UserError, on all ranks, if a rank has other facts than rank 0.

    facts: values that JSON can store; of a dict, such as flags, the error names the entry that differs
    The version of pyops and the instruction set are compared, too: other instructions give other bits, except with exact
    kernels (pyops.set_exact).
    """
    instructions = 'exact' if backend.HOST.exact else f'{backend.isa()} {backend.bf16_isa()}'
    facts = dict(version=__version__, instructions=instructions) | facts
    if _world.network:
        facts['gpu'] = backend.current_device().model
    entries = {f'{name} {entry}' if entry else name: value for name, fact in facts.items()
               for entry, value in (fact.items() if isinstance(fact, dict) else [('', fact)])}
    texts = gather({name: json.dumps(value, sort_keys=True, default=str) for name, value in entries.items()})
    for other, theirs in enumerate(texts):
        for name in texts[0] | theirs:
            one, two = (texts_of_rank.get(name, 'none') for texts_of_rank in (theirs, texts[0]))
            if one != two:
                raise UserError(f'{_world.name(other)} has {name} {_short(one)}, and {_world.name(0)} has {_short(two)}; start '
                                'all ranks with the same program, flags and data, on machines with the same instruction set '
                                '(PYOPS_ISA selects one), or with --exact')


def _short(text: str) -> str:
    return text if len(text) <= 100 else f'{text[:60]}... ({hashlib.sha256(text.encode()).hexdigest()[:8]})'


def same_bits(x: Array, name: str) -> None:
    """Raise UserError, on all ranks, if array x differs from rank 0.   name: of the array, for the message"""
    if _world.size == 1:
        return
    sums = gather(zlib.crc32(np.ascontiguousarray(backend.get(x)).data))
    for other, value in enumerate(sums):
        if value != sums[0]:
            raise UserError(f'{name} of {_world.name(other)} and of {_world.name(0)} differ: a defect of a machine or of the '
                            'program; resume from the last checkpoint, without this host if it happens again')


# ---- parts of a batch --------------------------------------------------------------------------------------------------------

def default_parts() -> int:
    """Return --parts of a new run without the flag: PARTS or the number of ranks under mpirun, else 1."""
    place = launcher.launch()
    if place is None or place.size == 1 and place.launcher != 'mpirun':
        return 1
    return max(PARTS, 1 << (_world.size - 1).bit_length())


def number_of_parts(parts: int | None, fast: bool, samples: int) -> int:
    """Return the number of parts into which each batch is cut.

    parts: a power of two, None for the default;  fast: one part for each rank;  samples: fewest samples of a full batch
    UserError if the ranks cannot share the parts, or if there are more parts than samples.
    """
    ranks = _world.size
    count = ranks if fast else parts or default_parts()
    if not fast and count % ranks:
        remedy = (f'--parts {1 << (ranks - 1).bit_length()}' if ranks & (ranks - 1) == 0 else
                  f'{1 << (ranks.bit_length() - 1)} ranks, or --reduce fast')
        raise UserError(f'--parts {count}: {ranks} ranks cannot share {count} parts evenly; give {remedy}')
    if count > samples:
        raise UserError(f'--parts {count}: expected at most the number of samples of a batch, {samples}; give a larger -b'
                        + ', or fewer ranks' * (count == ranks > 1) + ', or a smaller --parts' * (count > ranks))
    return count
