"""Who translates a batch of the server: its own process, or others.

Python runs one thread of a process at a time.  A server whose own process also translates therefore stops reading requests
while Python prepares the steps of the search, and the other way round; and one product by two threads takes longer than two
products by one thread each.  So the server starts processes, each with its part of the threads, and sends them batches.
"""
from __future__ import annotations

import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

from pyops import backend, checkpoint
from pyops.errors import UserError
from pyops.flags import use_device
from pyops.serve.api import encoded
from pyops.text.decoding import Search
from pyops.text.translator import Translator, of_checkpoint

_END = 10.0             # seconds that a process has to end


class Answers(NamedTuple):
    """The translations of a batch.   texts: the translations of each text as JSON (api.encoded)
    source_tokens, output_tokens: the numbers of tokens of the texts, and of their best translations"""
    texts: list[str]
    source_tokens: int
    output_tokens: int


class Worker(Protocol):
    """Translates one batch at a time.  Any exception means that the batch was not translated."""

    def __call__(self, texts: Sequence[str], search: Search, alignments: bool) -> Answers: ...

    def close(self) -> None: ...


class Local:
    """A worker in this process.   threads: of the kernels; None: all cores"""

    def __init__(self, translator: Translator, threads: int | None = None) -> None:
        self._translator, self._threads = translator, threads

    def __call__(self, texts: Sequence[str], search: Search, alignments: bool) -> Answers:
        if self._threads:
            backend.set_threads(self._threads)              # OpenMP has a number for each thread that calls it
        # Without batch_size: several threads translate a part of the batch each.
        found = self._translator.translations(texts, search.beam, search.nbest, search.length_penalty, search.max_len,
                                              alignments=alignments)
        return Answers([encoded(of_text) for of_text in found], sum(len(best.source) for best, *_ in found),
                       sum(len(best.tokens) for best, *_ in found))

    def close(self) -> None:
        pass


class Start(NamedTuple):
    """What a process needs to translate.   path: of the checkpoint;  replaced: as of of_checkpoint;  device: flags as of
    use_device"""
    path: str
    replaced: dict[str, Any]
    device: Any

    def worker(self) -> Local:
        """Load the checkpoint in this process."""
        use_device(self.device)
        found = checkpoint.find(self.path, serving=True, parameters_only=True)
        return Local(of_checkpoint(found, self.replaced), self.device.threads)


class Process:
    """A worker in a process of its own, which is started again after it ended."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._begin()

    def _begin(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            number = str(theirs.fileno())
            self._process = subprocess.Popen([sys.executable, '-m', __name__, number], stdin=subprocess.DEVNULL,
                                             pass_fds=[theirs.fileno()])
        self._connection = Connection(ours.detach())
        self._connection.send(self._start)

    def wait(self) -> None:
        """Return when the checkpoint is loaded.   UserError if it cannot be"""
        try:
            failure = self._connection.recv()
        except (EOFError, OSError) as error:
            raise UserError(f'a process that translates {self._ended()}; give fewer with --processes') from error
        if failure is not None:
            raise failure

    def __call__(self, texts: Sequence[str], search: Search, alignments: bool) -> Answers:
        if self._process.poll() is not None:
            self._connection.close()
            self._begin()
            self.wait()
        try:
            self._connection.send((list(texts), search, alignments))
            found = self._connection.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(f'the process that translated {self._ended()}') from error
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, Answers)
        return found

    def _ended(self) -> str:
        try:
            status = self._process.wait(_END)
        except subprocess.TimeoutExpired:                   # it closed the connection and hangs
            self._process.kill()
            status = self._process.wait()
        return f'was ended by signal {-status}' if status < 0 else f'ended with status {status}'

    def close(self) -> None:
        """End the process: it does when the connection is closed."""
        self._connection.close()
        self._ended()


def processes(number: int, start: Start) -> list[Process]:
    """Start processes that share the threads, and return them when all are ready.   UserError if one cannot load"""
    device = type(start.device)(**vars(start.device) | {'threads': max(1, backend.threads() // number)})
    workers = [Process(start._replace(device=device)) for _ in range(number)]
    try:
        for worker in workers:
            worker.wait()
    except BaseException:
        for worker in workers:
            worker.close()
        raise
    return workers


def main(number: str) -> None:
    """Translate batches for the process at the other end of a connection, until it closes it.   number: of the descriptor"""
    # The signals of a terminal go to all its processes: the server finishes the accepted requests, and then ends this one.
    for name in signal.SIGINT, signal.SIGHUP:
        signal.signal(name, signal.SIG_IGN)
    with Connection(int(number)) as connection:
        try:
            start = connection.recv()
            try:
                work: Local = start.worker()
            except (UserError, MemoryError) as error:
                return connection.send(error)
            connection.send(None)
            while True:
                batch = connection.recv()
                try:
                    found: Any = work(*batch)
                except Exception as error:
                    error.add_note(f'in a process that translates:\n{traceback.format_exc()}')
                    found = error
                connection.send(found)
        except (EOFError, ConnectionError):
            return None


if __name__ == '__main__':
    main(sys.argv[1])
