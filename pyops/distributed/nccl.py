"""Messages between ranks that each have a GPU, by NCCL: arrays in device memory, and values that can be pickled.

The library is called through ctypes, and only by functions that have not changed since NCCL 2.13.  All messages are queued on
the second stream of the GPU, so a graph can capture those between arrays.
"""
from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pickle
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from pyops import backend, launcher
from pyops.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyops.distributed.mpi import Mpi

OLDEST = 21300                          # 2.13: ncclGetLastError
_NAME = 'libnccl.so.2'
_INT32, _UINT8, _FLOAT = 2, 1, 7        # of ncclDataType_t
_SUM, _MAX = 0, 2                       # of ncclRedOp_t
_DUPLICATE = 'Duplicate GPU'            # in the text of NCCL's error


class _UniqueId(ctypes.Structure):
    _fields_ = [('bytes', ctypes.c_char * 128)]


_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_FUNCTIONS = {
    'ncclGetVersion': [_POINTER], 'ncclGetUniqueId': [_POINTER], 'ncclCommInitRank': [_POINTER, _INT, _UniqueId, _INT],
    'ncclCommDestroy': [_POINTER], 'ncclGroupStart': [], 'ncclGroupEnd': [],
    'ncclSend': [_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    'ncclRecv': [_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    'ncclAllReduce': [_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    'ncclAllGather': [_POINTER, _POINTER, _SIZE, _INT, _POINTER, _POINTER],
    'ncclBroadcast': [_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER]}


def _candidates() -> Iterator[str]:
    """Yield the paths and names of the library in the order of the search: $PYOPS_NCCL_LIBRARY alone, or a wheel's file and
    then what the loader finds."""
    if path := os.environ.get('PYOPS_NCCL_LIBRARY'):
        yield path
        return
    from importlib.util import find_spec
    found = find_spec('nvidia')                 # a namespace package: its wheels put libraries into nvidia/*/lib
    for folder in (found.submodule_search_locations or () if found else ()):
        yield from map(str, sorted(Path(folder).glob(f'*/lib/{_NAME}')))
    yield _NAME


@functools.cache
def library() -> ctypes.CDLL:
    """Return the library of NCCL.  UserError with the remedy if there is none, or an old one."""
    problems = []
    for name in _candidates():
        try:
            lib = ctypes.CDLL(name)
            for function, arguments in _FUNCTIONS.items():
                getattr(lib, function).argtypes = arguments
            lib.ncclGetErrorString.restype = lib.ncclGetLastError.restype = ctypes.c_char_p
            lib.ncclGetErrorString.argtypes, lib.ncclGetLastError.argtypes = [_INT], [_POINTER]
        except (OSError, AttributeError) as error:          # no library, or an older one
            problems.append(str(error))
            continue
        if version(lib) >= OLDEST:
            return lib
        problems.append(f'{name} has version {version_text(version(lib))}, expected {version_text(OLDEST)} or newer')
    raise UserError(f'several GPUs need NCCL, which is not installed or cannot be used ({"; ".join(problems)}); install it '
                    f'with: {sys.executable} -m pip install nvidia-nccl-cu12 (nvidia-nccl-cu13 for CUDA 13), or set '
                    f'PYOPS_NCCL_LIBRARY to the path of {_NAME}')


def version(lib: ctypes.CDLL) -> int:
    """Return the version of NCCL as it counts: 22803 for 2.28.3."""
    number = ctypes.c_int()
    lib.ncclGetVersion(ctypes.byref(number))
    return number.value


def version_text(number: int) -> str:
    return f'{number // 10000}.{number // 100 % 100}.{number % 100}'


class Nccl:
    """The messages of this rank.   gpu: the device of this rank"""

    def __init__(self, gpu: Any, rank: int, size: int) -> None:
        self._gpu, self.rank, self.size = gpu, rank, size
        self._lib, self._comm = library(), ctypes.c_void_p()
        self._spares: list[Any] = []
        self._one = gpu.put(np.ones(1, np.float32))

    def connect(self, control: Mpi | Nccl) -> None:
        """Join the other ranks.   control: MPI, which sends them the identity of the job; or this object: then NCCL uses
        $NCCL_COMM_ID, by default an address from the launcher's variables, at which rank 0 waits for the others.

        UserError if there is no address, if two ranks use one GPU, or if the ranks cannot connect.
        """
        if control is self and not os.environ.get('NCCL_COMM_ID'):
            address = launcher.meeting_point()
            if not address:
                raise UserError('the launcher names no address at which the ranks can meet; set MASTER_ADDR to the host of '
                                'rank 0 and MASTER_PORT to a free port, or NCCL_COMM_ID to host:port')
            os.environ['NCCL_COMM_ID'] = address
        identity = _UniqueId()
        # With $NCCL_COMM_ID, this function returns the same identity on each rank, without a message.
        if self.rank == 0 or control is self:
            self._join('ncclGetUniqueId', ctypes.byref(identity))
        if control is not self:
            ctypes.memmove(ctypes.byref(identity), control.broadcast(bytes(identity)), ctypes.sizeof(identity))
        self._join('ncclCommInitRank', ctypes.byref(self._comm), self.size, identity, self.rank)

    def _join(self, name: str, *arguments: Any) -> None:
        """Call a function that connects ranks; its errors become errors of the user."""
        try:
            self._call(name, *arguments)
        except RuntimeError as error:
            if _DUPLICATE in str(error):
                raise UserError(f'two ranks use the same GPU ({error}); start at most one rank for each GPU of a host, and let '
                                'CUDA_VISIBLE_DEVICES show each rank all GPUs of its host, or one of its own') from error
            at = os.environ.get('NCCL_COMM_ID')
            raise UserError(f'the ranks cannot connect{f" at {at}" if at else ""}: {error}; NCCL_DEBUG=WARN shows more, and '
                            'NCCL_COMM_ID=host:port selects the address of rank 0') from error

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a function of NCCL.  RuntimeError with its text if it fails."""
        status = getattr(self._lib, name)(*arguments)
        if status:
            self._fail(name, status)

    def _fail(self, name: str, status: int) -> NoReturn:
        texts = self._lib.ncclGetErrorString(status), self._lib.ncclGetLastError(self._comm)
        raise RuntimeError(': '.join([f'NCCL: {name}', *(text.decode(errors='replace').strip() for text in texts if text)]))

    # ---- arrays, in device memory and compact: work of the second stream

    def spare(self, x: Any) -> Any:
        """Return an array like x, float32, whose contents are valid until the next call.  It is never freed, since graphs may
        have its address."""
        if not self._spares or self._spares[-1].size < x.size:
            self._spares.append(self._gpu.new((x.size,), np.float32))
        return self._spares[-1][:x.size]

    def send(self, x: Any, peer: int) -> None:
        self._call('ncclSend', x.location(), x.size, _FLOAT, peer, self._comm, self._gpu.second_stream)

    def receive(self, x: Any, peer: int) -> None:
        self._call('ncclRecv', x.location(), x.size, _FLOAT, peer, self._comm, self._gpu.second_stream)

    def exchange(self, peer: int, sent: Any, received: Any, is_patient: bool) -> None:
        """Send an array to a rank and receive one from it."""
        self._call('ncclGroupStart')
        if sent.size:
            self.send(sent, peer)
        if received.size:
            self.receive(received, peer)
        self._call('ncclGroupEnd')

    def send_to_host(self, x: Any, peer: int) -> None:
        """Send an array to a rank that calls receive_on_host, and wait until it has left: this process may end next."""
        with self.messages():
            self.send(x, peer)
        self._gpu.synchronize()

    def receive_on_host(self, x: np.ndarray, peer: int) -> None:
        """Receive a float32 array from the memory of another GPU in host memory."""
        received = self._gpu.new(x.shape, x.dtype)
        with self.messages():
            self.receive(received, peer)
        x[...] = self._gpu.numpy(received)

    def add(self, x: Any, y: Any) -> None:
        """Add y to x."""
        if x.size:
            self._gpu.launch_on_second('axpy', x, y, self._one, x.size)

    def sum_in_any_order(self, x: Any) -> None:
        """Replace x by its sum over all ranks."""
        self._all_reduce(x, _FLOAT, _SUM)

    def largest_of_each(self, x: Any) -> None:
        """Replace each element of a float32 or int32 array by the largest of all ranks."""
        if x.dtype not in (np.float32, np.int32):
            raise TypeError(f'largest_of_each: expected float32 or int32 between GPUs, got {x.dtype}')
        self._all_reduce(x, _FLOAT if x.dtype == np.float32 else _INT32, _MAX)

    def _all_reduce(self, x: Any, dtype: int, operation: int) -> None:
        self._call('ncclAllReduce', x.location(), x.location(), x.size, dtype, operation, self._comm, self._gpu.second_stream)

    def fork(self) -> None:
        """Let later messages wait for the work that is queued now."""
        self._gpu.fork()

    def join(self) -> None:
        """Let work that is queued later wait for the messages."""
        self._gpu.join()

    @contextlib.contextmanager
    def messages(self) -> Iterator[None]:
        """Queue messages between the work before and the work after the block."""
        self.fork()
        yield
        self.join()

    # ---- values

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order."""
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = self._gathered(np.array([data.size])).reshape(-1)
        padded = np.zeros(int(sizes.max()), np.uint8)
        padded[:data.size] = data
        return [pickle.loads(row[:size].tobytes()) for row, size in zip(self._gathered(padded), sizes, strict=True)]

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0."""
        data = np.frombuffer(pickle.dumps(value), np.uint8) if self.rank == 0 else np.empty(0, np.uint8)
        size = int(self._copied(np.array([data.size]))[0])
        return pickle.loads(self._copied(data if self.rank == 0 else np.empty(size, np.uint8)).tobytes())

    def union(self, bits: np.ndarray) -> None:
        """Replace integers, in host memory, by their bitwise or over all ranks."""
        bits[...] = np.bitwise_or.reduce(self._gathered(bits.reshape(-1))).reshape(bits.shape)

    def largest(self, number: int) -> int:
        """Return the largest of the numbers of the ranks."""
        return int(self._gathered(np.array([number])).max())

    def barrier(self) -> None:
        self._gathered(np.zeros(1, np.uint8))

    def _gathered(self, x: np.ndarray) -> np.ndarray:
        """Return an array (n,) of each rank, (ranks, n)."""
        sent, received = self._gpu.wrap(np.ascontiguousarray(x)), self._gpu.block(self.size * x.nbytes)
        with self.messages():
            self._call('ncclAllGather', sent.pointer, received.pointer, x.nbytes, _UINT8, self._comm, self._gpu.second_stream)
        return self._gpu.read(received.pointer, self.size * x.nbytes).view(x.dtype).reshape(self.size, x.size)

    def _copied(self, x: np.ndarray) -> np.ndarray:
        """Return the array (n,) of rank 0."""
        block = self._gpu.wrap(x)
        with self.messages():
            self._call('ncclBroadcast', block.pointer, block.pointer, x.nbytes, _UINT8, 0, self._comm, self._gpu.second_stream)
        return self._gpu.read(block.pointer, x.nbytes).view(x.dtype)

    # ---- the end

    def abort(self, status: int) -> None:
        """End this rank with this exit status; the launcher ends the others."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)

    def finalize(self) -> None:
        """Leave the other ranks.  Plans with captured messages must not run afterwards."""
        self._gpu.synchronize()
        self._call('ncclCommDestroy', self._comm)

    def can_overlap(self) -> bool:
        return True


def start(place: launcher.Launch) -> Nccl:
    """Return the messages between all ranks, on the GPU of this rank; connect() joins them."""
    return Nccl(backend.current_device(), place.rank, place.size)
