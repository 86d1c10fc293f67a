"""Processes that translate for another one: the server, or the translation of a long text.

    workers = start_processes(Start.of(translator.path, replaced, args), shares(2))
    workers[0](function, *arguments)        function(translator, *arguments), called in that process
    workers[0].begin(function)              function(translator, receive, send) there, which exchanges objects with this process

Python runs one thread of a process at a time, and one product by two threads takes longer than two products by one thread
each.  So processes with a part of the threads each translate more than one with all threads.
"""
from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from pyops import backend, checkpoint
from pyops.errors import UserError
from pyops.flags import use_device
from pyops.text.flags import PROCESSES
from pyops.text.translator import About, Translator, of_checkpoint

if TYPE_CHECKING:
    import queue
    from multiprocessing.connection import Connection

_END = 10.0             # seconds that a process has to end
_REMEDY = 'give fewer with --processes'
_DEVICE = 'gpu', 'precision', 'exact', 'threads'        # flags of use_device


class Ended(RuntimeError):
    """The process ended before it answered.  It is started again when it is called again."""


class Start(NamedTuple):
    """What a process needs to translate.   path: of the checkpoint;  replaced: as of of_checkpoint;  device: flags as of
    use_device"""
    path: str
    replaced: dict[str, Any]
    device: Namespace

    @classmethod
    def of(cls, path: str, replaced: dict[str, Any], args: Any) -> Start:
        """args: a Namespace that has the flags of use_device among others"""
        return cls(path, replaced, Namespace(**{name: getattr(args, name) for name in _DEVICE}))

    def translator(self) -> Translator:
        """Load the checkpoint in this process."""
        use_device(self.device)
        return of_checkpoint(checkpoint.find(self.path, serving=True, parameters_only=True), self.replaced)


def default_number() -> int:
    """Return the number of processes without --processes: one for each thread, at most PROCESSES; on a GPU one."""
    return min(PROCESSES, backend.threads()) if backend.current_device().is_host else 1


def shares(number: int) -> list[int]:
    """Return how many threads each of so many processes has: at least one, and together as many as this process."""
    threads = backend.threads()
    return [max(1, threads // number + (n < threads % number)) for n in range(number)]


class Process:
    """A process that translates.   threads: of its kernels;  about: its translator, after wait()

    It is started again after it ended, but not after stop().  Only one thread may call it; others may call stop().
    """
    about: About

    def __init__(self, start: Start, threads: int) -> None:
        self._start = start._replace(device=Namespace(**vars(start.device) | {'threads': threads}))
        self._is_stopped = False
        self._begin()

    def _begin(self) -> None:
        import socket  # here, since a program for a few sentences starts no process
        import subprocess
        from multiprocessing.connection import Connection
        ours, theirs = socket.socketpair()
        # It imports what this process would.  -P: not also from the current folder.  process_group: the signals of a terminal
        # go to this process, which decides when the other one ends
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, '-P', '-m', __name__, str(theirs.fileno())], stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()], process_group=0,
                    env=os.environ | {'PYTHONPATH': path})
            except OSError as error:
                ours.close()
                raise UserError(f'a process that translates cannot be started ({error.strerror}); {_REMEDY}') from error
        self._connection = Connection(ours.detach())
        if self._is_stopped:
            self._process.kill()
        with contextlib.suppress(OSError):                  # it has ended: wait() says so
            self._connection.send(self._start)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> None:
        """Return when the checkpoint is loaded.   UserError if it cannot be"""
        try:
            found = self._connection.recv()
        except (EOFError, OSError) as error:
            raise UserError(f'a process that translates {self._ended()}; {_REMEDY}') from error
        if isinstance(found, Exception):
            raise found
        self.about = found

    def begin(self, function: Callable[..., Any]) -> None:
        """Call function(translator, receive, send) in the process, which ends after it.

        function: of a module.  receive(wait) returns the next object that was given to send() here;  without `wait` None if
        there is none.  send(object) is for receive() here.
        """
        self.send((function, None))

    def send(self, message: Any) -> None:
        """Send an object.  If the process has ended, receive() says so."""
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def receive(self) -> Any:
        """Wait for an object.   Ended: the process has ended"""
        try:
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise Ended(f'the process that translated {self._ended()}') from error

    def restart(self) -> None:
        """Start the process again after its end.   UserError if that is impossible"""
        self._connection.close()
        self._begin()
        self.wait()

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return function(translator, *arguments), or raise what it raises.

        function: of a module: the process finds it by its name
        Ended if the process ends meanwhile;  UserError if it had ended before, and cannot be started again
        """
        if self._process.poll() is not None and not self._is_stopped:
            self.restart()
        self.send((function, arguments))
        found = self.receive()
        if isinstance(found, Exception):
            raise found
        return found

    def _ended(self) -> str:
        import subprocess
        try:
            status = self._process.wait(_END)
        except subprocess.TimeoutExpired:                   # it closed the connection and hangs
            self._process.kill()
            status = self._process.wait()
        return f'was ended by signal {-status}' if status < 0 else f'ended with status {status}'

    def stop(self) -> None:
        """End the process at once, also while another thread calls it: there the call raises Ended."""
        self._is_stopped = True
        self._process.kill()

    def close(self) -> None:
        """End the process: it does when the connection is closed."""
        self._connection.close()
        self._ended()


def start_processes(start: Start, threads: Sequence[int]) -> list[Process]:
    """Start a process for each number of threads, and return them when all are ready.   UserError if one cannot load"""
    workers: list[Process] = []
    try:
        for number in threads:
            workers.append(Process(start, number))
        for worker in workers:
            worker.wait()
    except BaseException:
        for worker in workers:
            worker.close()
        raise
    return workers


# ---- in the process --------------------------------------------------------------------------------------------------

def main(number: str) -> None:
    """Translate for the process at the other end of a connection, until it closes it.   number: of the descriptor"""
    import queue
    from multiprocessing.connection import Connection
    # A supervisor sends signals to all processes: the one that started this one decides when it ends.
    for name in signal.SIGINT, signal.SIGHUP, signal.SIGTERM:
        signal.signal(name, signal.SIG_IGN)
    received: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    with contextlib.suppress(ConnectionError), Connection(int(number)) as connection:
        threading.Thread(target=_receive, args=(connection, received), daemon=True).start()
        start: Start = pickle.loads(received.get())
        try:
            translator = start.translator()
        except (UserError, MemoryError) as error:
            return connection.send(error)
        connection.send(translator.about)
        while not isinstance(found := _answer(translator, received.get()), _Begun):
            connection.send(found)
        found.function(translator, partial(_next, received), connection.send)


def _receive(connection: Connection, received: queue.SimpleQueue[bytes]) -> None:
    """Take what arrives, until the other process closes the connection or has ended.  Then end this process at once: nobody
    waits for what it translates."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            received.put(connection.recv_bytes())
    os._exit(0)


class _Begun(NamedTuple):
    """A call of begin()."""
    function: Callable[..., Any]


def _answer(translator: Translator, call: bytes) -> Any:
    try:
        function, arguments = pickle.loads(call)
        return _Begun(function) if arguments is None else function(translator, *arguments)
    except Exception as error:
        error.add_note(f'in a process that translates:\n{traceback.format_exc()}')
        return error


def _next(received: queue.SimpleQueue[bytes], wait: bool) -> Any:
    """Return the next object that was received.   None: there is none yet, without `wait`"""
    if not wait and received.empty():
        return None
    return pickle.loads(received.get())


if __name__ == '__main__':
    main(sys.argv[1])
