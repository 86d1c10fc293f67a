"""Windows of texts that are translated in parts, by this process and by others.

    with Divided(translator, task, arguments, write, size, start, number) as work:
        work.run(windows)               calls write(results) for each window, in order

This process translates, too, and alone until there is enough to translate for others.  On the CPU a text has the same
translation in every part and in every process (docs/translate.md).
"""
from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from pyops import backend
from pyops.errors import UserError
from pyops.text.flags import WORTH
from pyops.text.processes import Ended, Process, Start, shares
from pyops.text.translator import WINDOW, Translator, parts_of

_AHEAD = 4              # parts for each process that wait for it; with fewer the next window is read
_WINDOWS = 3            # most windows that have been read and not written
_TRIES = 3              # processes that may end while they translate the same part


class _Window:
    """A window that was read.   first: number of its first text;  missing: number of the results that are"""

    def __init__(self, texts: Sequence[str], first: int) -> None:
        self.texts, self.first = texts, first
        self.results: list[Any] = [None] * len(texts)
        self.missing = len(texts)


class _Part(NamedTuple):
    """Some texts of a window.   places: their positions in it"""
    window: _Window
    places: Sequence[int]


class Divided:
    """Translates windows of texts in this process and in others.

    task(translator, texts, numbers, *arguments) returns a result for each text.  It is a function of a module, so that other
              processes find it by its name.   numbers: of the texts, from 0
    write(results) takes the results of a window
    size: most texts of a part
    start: of the other processes;  number: of all, this one included;  at_once: start them for the first window, whether or not
           that saves time
    """

    def __init__(self, translator: Translator, task: Callable[..., Sequence[Any]], arguments: tuple[Any, ...],
                 write: Callable[[Sequence[Any]], None], size: int, start: Start, number: int, at_once: bool = False) -> None:
        self._translator, self._task, self._arguments, self._write = translator, task, arguments, write
        self._size, self._how, self._number, self._at_once = size, start, number, at_once
        self._count, self._cores = 0, backend.threads()         # texts so far; threads of this process before it has others
        self._timed, self._seconds = 0, 0.0                     # texts that it translated with all cores, and the time
        self._windows: deque[_Window] = deque()                 # not written yet
        self._changed = threading.Condition()                   # guards the attributes below, and the results of windows
        self._parts: deque[_Part] = deque()                     # for whoever is idle
        self._ready = 0                                         # processes that have loaded the checkpoint
        self._failure: BaseException | None = None
        self._is_closed = False
        self._processes: list[Process] = []
        self._threads: list[threading.Thread] = []              # for each process one, which waits for its answers

    def __enter__(self) -> Divided:
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_closed = True
            self._parts.clear()
            self._changed.notify_all()
        for process in self._processes:
            process.stop()
        for thread in self._threads:
            thread.join()
        if self._processes:
            backend.set_threads(self._cores)

    @property
    def window(self) -> int:
        """The number of texts of a full window."""
        return WINDOW * self._size

    @property
    def pids(self) -> list[int]:
        """The ids of the other processes."""
        return [process.pid for process in self._processes]

    def start(self) -> None:
        """Start the other processes, and return when they are ready.   UserError if one cannot load the checkpoint"""
        self._begin()
        with self._changed:
            while self._ready < len(self._processes) and not self._failure:
                self._changed.wait()
            if self._failure:
                raise self._failure

    def run(self, windows: Iterable[Sequence[str]]) -> None:
        """Translate windows.  At an empty one all results so far are written: the next one may come late, or not at all."""
        for texts in windows:
            if texts:
                self.add(texts)
            else:
                self.finish()
        self.finish()

    def add(self, texts: Sequence[str]) -> None:
        """Take a window, and return when the next one may come.   UserError if a process does not start, or ends too often"""
        if self._at_once and self._number > 1 and not self._processes:
            self._begin()
        window = _Window(texts, self._count)
        self._count += len(texts)
        self._windows.append(window)
        order: Sequence[int] = sorted(range(len(texts)), key=lambda n: -len(texts[n]))
        if not self._processes:
            order = self._alone(window, order)
        if order:
            with self._changed:
                self._parts.extend(_Part(window, places) for places in self._divide(order))
                self._changed.notify_all()
        self._write_done()
        while len(self._parts) > _AHEAD * self._number or len(self._windows) >= _WINDOWS:
            self._step()

    def finish(self) -> None:
        """Return when the results of all windows are written."""
        while self._windows:
            self._step()

    # ---- this process ----------------------------------------------------------------------------------------------------

    def _alone(self, window: _Window, order: Sequence[int]) -> Sequence[int]:
        """Translate the texts in this order of a window in this process, unless others save time.  Then start them, and return
        the texts that are left."""
        some = self._size * self._number                # with several threads this process decodes as many batches at once
        if self._number > 1 and not self._timed:        # the first batches take longer: they record plans
            self._translate(_Part(window, order[:some]))
            order = order[some:]
        if self._number > 1 and len(order) > some:
            before = time.monotonic()
            self._translate(_Part(window, order[:some]))
            order = order[some:]
            self._seconds += time.monotonic() - before
            self._timed += some
            if self._seconds * (1 + len(order) / self._timed) > WORTH:
                self._begin()
                return order
        if order:
            self._translate(_Part(window, order))
        return []

    def _divide(self, order: Sequence[int]) -> list[Sequence[int]]:
        """Return parts with about as many texts each, as many for each process.  Texts of a part have similar lengths, and the
        longest are in the first part, so that all processes end at about the same time."""
        count = min(len(order), parts_of(len(order), self._number, self._size))
        ends = [n * len(order) // count for n in range(count + 1)]
        return [order[first:end] for first, end in zip(ends, ends[1:], strict=False)]

    def _step(self) -> None:
        """Translate a part, or wait for other processes if they have all; then write the windows that are done."""
        with self._changed:
            while not (self._parts or self._failure or not self._windows[0].missing):
                self._changed.wait()
            part = self._parts.popleft() if self._parts else None
        if part is not None:
            self._translate(part)
        self._write_done()

    def _translate(self, part: _Part) -> None:
        self._store(part, self._task(self._translator, *self._call(part)))

    def _write_done(self) -> None:
        while True:
            with self._changed:
                if self._failure:
                    raise self._failure
                if not self._windows or self._windows[0].missing:
                    return
                window = self._windows.popleft()
            self._write(window.results)

    # ---- all processes ---------------------------------------------------------------------------------------------------

    def _call(self, part: _Part) -> tuple[Any, ...]:
        """Return the arguments of the task."""
        window = part.window
        return [window.texts[n] for n in part.places], [window.first + n for n in part.places], *self._arguments

    def _store(self, part: _Part, results: Sequence[Any]) -> None:
        with self._changed:
            for n, result in zip(part.places, results, strict=True):
                part.window.results[n] = result
            part.window.missing -= len(part.places)
            self._changed.notify_all()

    def _begin(self) -> None:
        """Start the other processes, and leave each its part of the threads.  They take parts when they are ready."""
        own, *others = shares(self._number)
        for threads in others:
            process = Process(self._how, threads)
            self._processes.append(process)
            thread = threading.Thread(target=self._feed, args=(process,), name='translator', daemon=True)
            self._threads.append(thread)
            thread.start()
        backend.set_threads(own)

    def _feed(self, process: Process) -> None:
        """Send parts to a process."""
        try:
            process.wait()
            with self._changed:
                self._ready += 1
                self._changed.notify_all()
            while (part := self._next()) is not None:
                self._store(part, self._answer(process, part))
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()
        finally:
            process.close()

    def _next(self) -> _Part | None:
        """Wait for a part.   None: there are no more"""
        with self._changed:
            while not (self._parts or self._is_closed):
                self._changed.wait()
            return None if self._is_closed else self._parts.popleft()

    def _answer(self, process: Process, part: _Part) -> Sequence[Any]:
        """Return the results of a part.  If the process ends meanwhile, it is started again."""
        for _ in range(_TRIES):
            try:
                found: Sequence[Any] = process(self._task, *self._call(part))
                return found
            except Ended as error:
                ended = error
                if self._is_closed:
                    break
        raise UserError(f'{ended}, {_TRIES} times with the same lines; give fewer with --processes')
