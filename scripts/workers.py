"""Tasks in processes of their own, until their time is over or a signal comes: what they have reported by then counts."""
import contextlib
import json
import os
import selectors
import signal
import sys
import time
import traceback
from typing import NamedTuple

GRACE = 60              # seconds after its time in which a task ends; then its process is killed
_ASKED = 0.2            # seconds in which a signal reaches the tasks
_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def cores():
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


class Ended(NamedTuple):
    """The process of a task failed.   status: its exit status, or -signal"""
    status: int


class Workers:
    """Runs tasks in processes.   signal: the signal.Signals that came, or None

    Inside the block SIGINT, SIGTERM and SIGHUP ask the tasks to end; a second one ends this process.
    """

    def __init__(self):
        self.signal, self._before = None, {}

    def __enter__(self):
        self._before = {number: signal.signal(number, self._stop) for number in _SIGNALS
                        if signal.getsignal(number) != signal.SIG_IGN}
        return self

    def __exit__(self, *error):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number, frame):
        self.signal = signal.Signals(number)
        self.__exit__()

    def _note(self, number, frame):
        self.signal = signal.Signals(number)

    def run(self, tasks, seconds):
        """Run each task(send, is_over).   Yield (number of a task, message), and (number, Ended) for a process that failed

        send(message): a value of JSON.   is_over(): whether `seconds` have passed since its first call, or a signal came
        """
        end, asked, children = time.monotonic() + seconds + GRACE, False, set()
        sys.stdout.flush()
        with selectors.DefaultSelector() as pipes:
            try:
                for number, task in enumerate(tasks):
                    receive, send = os.pipe()
                    # A new process drops signals that come before Python has started in it, unless they are blocked.
                    with _blocked(_SIGNALS) as mask:
                        child = os.fork()
                        if not child:
                            self._run(task, seconds, send, [receive, *pipes.get_map()], mask)
                    os.close(send)
                    children.add(child)
                    pipes.register(receive, selectors.EVENT_READ, [number, child, b''])
                while pipes.get_map():
                    if self.signal and not asked:
                        asked, end = True, min(end, time.monotonic() + GRACE)
                        _kill(children, signal.SIGTERM)
                    if time.monotonic() > end:
                        _kill(children, signal.SIGKILL)
                    for key, _ in pipes.select(_ASKED):
                        number, child, text = key.data
                        part = os.read(key.fd, 1 << 16)
                        *lines, key.data[2] = (text + part).split(b'\n')
                        yield from ((number, json.loads(line)) for line in lines)
                        if not part:
                            pipes.unregister(key.fd)
                            os.close(key.fd)
                            children.remove(child)
                            if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
                                yield number, Ended(status)
            finally:
                _kill(children, signal.SIGKILL)
                for child in children:
                    os.waitpid(child, 0)
                for pipe in list(pipes.get_map()):
                    os.close(pipe)

    def _run(self, task, seconds, stream, others, mask):
        """Run a task in a new process, which ends with it.   others: pipes of this process and of other tasks

        mask: the signals that are blocked while the task runs
        """
        end, status = None, 1

        def is_over():
            nonlocal end
            end = end or time.monotonic() + seconds
            return self.signal is not None or time.monotonic() > end
        try:
            # A signal to the group of processes reaches all, and then the first one asks the others: they count one only.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            for number in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, self._note)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for pipe in others:
                os.close(pipe)
            with os.fdopen(stream, 'w') as out:
                task(lambda message: print(json.dumps(message), file=out, flush=True), is_over)
            status = 0
        except BaseException:
            with contextlib.suppress(BaseException):
                traceback.print_exc()
        os._exit(status)


@contextlib.contextmanager
def _blocked(signals):
    """Block signals.   The value is the set of those that were blocked before."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _kill(children, number):
    for child in children:
        os.kill(child, number)
