"""Who translates for the server: a thread of its own process, or other processes.

A server whose own process also translates stops reading requests while Python prepares the steps of the search, and the
other way round.  So it starts processes, and sends them texts.
"""
from __future__ import annotations

import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from pyops import backend
from pyops.serve.api import encoded
from pyops.text.decoding import Search
from pyops.text.processes import Ended, Process
from pyops.text.translator import Translation, Translator

# A process that translates so many other texts sends those that are done after so many seconds: the server answers ten requests
# at once in much less time than one by one, when the kernels have displaced its code from the caches.
_MANY, _PAUSE = 8, 0.04
Texts = Sequence[tuple[int, str]]       # with numbers, which return with the translations


class Job(NamedTuple):
    """Texts with equal settings.   most: texts that are translated at the same time;  number: of the job.  Texts of another
    number wait until all texts of this one are done."""
    number: int
    search: Search
    alignments: bool
    most: int
    texts: Texts


class End(NamedTuple):
    """Instead of a job: no further ones follow."""


class Ready(NamedTuple):
    """The first answer of a worker.   joins: whether texts of a job can join others that are translated"""
    joins: bool


class Done(NamedTuple):
    """Translated texts.   texts: their numbers, and the translations of each as JSON (api.encoded)
    source_tokens, output_tokens: the numbers of tokens of the texts, and of their best translations"""
    texts: Texts
    source_tokens: int
    output_tokens: int


class Failed(NamedTuple):
    """Texts that could not be translated together: their numbers."""
    numbers: Sequence[int]
    error: Exception


Answer = Ready | Done | Failed
Receive = Callable[[bool], 'Job | End | None']          # receive(wait);  None: there is none yet, without `wait`


class Worker(Protocol):
    """Translates the texts of jobs, in their order."""

    def send(self, job: Job | End) -> None:
        """Give it a job, without waiting for the answer."""

    def receive(self) -> Answer:
        """Wait for an answer; the first is Ready.   Ended: it answers no more"""

    def restart(self) -> None:
        """Start again after the end.  It has forgotten the jobs it had."""

    def close(self) -> None:
        """Free its resources after the end."""


def work(translator: Translator, receive: Receive, send: Callable[[Answer], None]) -> None:
    """Translate jobs until the end."""
    send(Ready(translator.joins))
    job: Job | End | None = None
    while not isinstance(job, End):
        job = receive(True) if job is None else _translate(translator, job, receive, send)


def _translate(translator: Translator, job: Job, receive: Receive, send: Callable[[Answer], None]) -> Job | End | None:
    """Translate a job, and those that continue it.   Return the next one if it is there"""
    waiting: deque[tuple[int, str]] = deque(job.texts)
    following: Job | End | None = None
    active: dict[int, int] = {}                         # order of arrival -> number of a text
    taken = 0

    def texts(most: int) -> list[str]:
        nonlocal following, taken
        while len(waiting) < most and following is None and (following := receive(False)) is not None:
            if isinstance(following, Job) and following._replace(texts=()) == job._replace(texts=()):
                waiting.extend(following.texts)
                following = None
        some = [waiting.popleft() for _ in range(min(most, len(waiting)))]
        active.update(enumerate((number for number, _ in some), taken))
        taken += len(some)
        return [text for _, text in some]

    while waiting:
        taken = 0
        try:
            done, last = list[tuple[int, list[Translation]]](), time.monotonic()
            for some in translator.arriving(texts, job.search, job.most, job.alignments):
                done += some
                if not done or len(active) - len(done) >= _MANY and time.monotonic() < last + _PAUSE:
                    continue
                best = [translations[0] for _, translations in done]
                answers = [(active[order], encoded(translations)) for order, translations in done]
                for order, _ in done:
                    del active[order]
                send(Done(answers, sum(len(one.source) for one in best), sum(len(one.tokens) for one in best)))
                done, last = [], time.monotonic()
        except Exception as error:
            if not active:                              # it failed before a text was taken
                active.update((number, number) for number, _ in waiting)
                waiting.clear()
            send(Failed([*active.values()], error))
            active.clear()
    return following


class Local:
    """A worker in a thread of this process.   threads: of the kernels; None: all cores"""

    def __init__(self, translator: Translator, threads: int | None = None) -> None:
        self._translator, self._threads = translator, threads
        self._begin()

    def _begin(self) -> None:
        self._jobs: queue.SimpleQueue[Job | End] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        # daemon: a second Ctrl-C does not wait for the texts
        threading.Thread(target=self._work, name='translator', daemon=True).start()

    def _work(self) -> None:
        if self._threads:
            backend.set_threads(self._threads)              # OpenMP has a number for each thread that calls it
        try:
            work(self._translator, self._next, self._answers.put)
        finally:
            self._answers.put(None)

    def _next(self, wait: bool) -> Job | End | None:
        try:
            return self._jobs.get(wait)
        except queue.Empty:
            return None

    def send(self, job: Job | End) -> None:
        self._jobs.put(job)

    def receive(self) -> Answer:
        answer = self._answers.get()
        if answer is None:
            raise Ended('the thread that translates has ended')
        return answer

    def restart(self) -> None:
        self._begin()

    def close(self) -> None:
        pass


class Remote:
    """A worker in a process of its own."""

    def __init__(self, process: Process) -> None:
        self.process = process
        process.begin(remote_work)

    def send(self, job: Job | End) -> None:
        self.process.send(job)

    def receive(self) -> Answer:
        answer = self.process.receive()
        assert isinstance(answer, Ready | Done | Failed)
        return answer

    def restart(self) -> None:
        self.process.restart()
        self.process.begin(remote_work)

    def close(self) -> None:
        self.process.close()


def remote_work(translator: Translator, receive: Receive, send: Callable[[Answer], None]) -> None:
    """As work(), in a process of its own: tracebacks are sent as notes."""
    def noted(answer: Answer) -> None:
        if isinstance(answer, Failed):
            answer.error.add_note(f'in a process that translates:\n{"".join(traceback.format_exception(answer.error))}')
        send(answer)
    work(translator, receive, noted)
