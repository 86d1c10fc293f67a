"""The queue of the server: workers translate the texts of all requests, several at a time.

Texts of different requests are translated together if their settings are equal.  A worker whose texts can be joined by others
gets new ones as soon as some of its texts are translated; any other worker gets the next ones when all of them are.  Those are
always the text that has waited longest, and the most similar to it in length.  A text has the same translation whatever is
translated with it (docs/translate.md).
"""
from __future__ import annotations

import itertools
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from pyops.serve.metrics import Metrics
from pyops.serve.workers import Done, End, Failed, Job, Ready, Worker
from pyops.text.decoding import Search
from pyops.text.flags import BATCH_SIZE, BEAM
from pyops.text.processes import Ended

WAIT = 0.002                    # seconds that a text waits for others before it is given to a worker
CAPACITY = 1024                 # texts in the queue
_SHARED = 8                     # fewer texts are not divided among workers
_PAUSE = 1.0                    # seconds between two attempts to restart a worker


class Key(NamedTuple):
    """Texts with equal keys can be translated together.   alone: a number that only this text has, or None"""
    search: Search
    alignments: bool
    alone: int | None = None


class Full(Exception):
    """The queue has no room for the texts of a request."""


class Closed(Exception):
    """The batcher takes no more requests."""


class Ticket:
    """A request in the queue.   future: its result is a list with the translations of each text as JSON (api.encoded)"""

    def __init__(self, texts: int) -> None:
        self.future: Future[list[str]] = Future()
        self.future.set_running_or_notify_cancel()          # asyncio cannot cancel it: see Batcher.drop
        self.results = [''] * texts
        self.missing, self.is_dropped = texts, False


class _Item:
    """A text in the queue.   index: its number in the request"""
    __slots__ = 'text', 'ticket', 'index', 'since'

    def __init__(self, text: str, ticket: Ticket, index: int, since: float) -> None:
        self.text, self.ticket, self.index, self.since = text, ticket, index, since


class _Working:
    """A worker, and the texts that it translates.

    items: by number;  key, job: of these texts, key and number of the Job;  is_ready: whether it takes jobs;  joins: see Ready
    since: the time of its last answer, or when it got the first of these texts
    """

    def __init__(self, worker: Worker) -> None:
        self.worker, self.items, self.key, self.job = worker, dict[int, _Item](), Key(Search(1), False), 0
        self.is_ready = self.joins = False
        self.since = 0.0


class Batcher:
    """Translates the texts of requests, with a thread that gives texts to workers, and one for the answers of each.

    workers: closed by close()
    batch_size: most texts that a worker translates at a time with a beam of up to 5; with a larger one fewer, so that it needs
                no more memory
    wait: seconds;  capacity: texts
    """

    def __init__(self, workers: Sequence[Worker], metrics: Metrics, batch_size: int = BATCH_SIZE, wait: float = WAIT,
                 capacity: int = CAPACITY) -> None:
        self._metrics, self._size, self._wait, self._capacity = metrics, batch_size, wait, capacity
        self._changed = threading.Condition()           # guards all attributes below, and the tickets
        self._groups: dict[Key, list[_Item]] = {}       # in each group the oldest first; none is empty
        self._queued, self._closed, self._ended = 0, False, False       # queued: texts;  ended: workers get no more of them
        self._numbers = itertools.count()               # of texts, jobs and keys
        self._working = [_Working(worker) for worker in workers]
        # daemon: a second Ctrl-C does not wait for the texts
        self._threads = [threading.Thread(target=self._give, name='batcher', daemon=True),
                         *(threading.Thread(target=self._receive, args=(working,), name='answers', daemon=True)
                           for working in self._working)]
        for thread in self._threads:
            thread.start()

    @property
    def queued(self) -> int:
        """The number of texts that wait."""
        return self._queued

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests, and its threads run."""
        return not self._closed and all(thread.is_alive() for thread in self._threads)

    def submit(self, texts: Sequence[str], search: Search, alignments: bool = False) -> Ticket:
        """Enqueue the texts of a request.   Full, Closed: none of them was enqueued"""
        ticket = Ticket(len(texts))
        with self._changed:
            if self._closed:
                raise Closed
            if self._queued + len(texts) > self._capacity:
                raise Full
            if not texts:
                ticket.future.set_result([])
                return ticket
            now = time.monotonic()
            self._enqueue(Key(search, alignments), [_Item(text, ticket, index, now) for index, text in enumerate(texts)])
        return ticket

    def drop(self, ticket: Ticket) -> None:
        """Take a request out of the queue.  The result of texts that a worker has is discarded."""
        with self._changed:
            ticket.is_dropped = True
            for key in list(self._groups):
                self._keep(key, [item for item in self._groups[key] if item.ticket is not ticket])
            self._changed.notify()

    def close(self) -> None:
        """Take no more requests, and return when all that were taken are done."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        for thread in self._threads:
            thread.join()

    def _enqueue(self, key: Key, items: list[_Item]) -> None:
        """The caller holds the lock."""
        self._groups.setdefault(key, []).extend(items)
        self._queued += len(items)
        self._changed.notify()

    def _keep(self, key: Key, items: list[_Item]) -> None:
        """Replace a group by a part of it.  The caller holds the lock."""
        self._queued -= len(self._groups[key]) - len(items)
        self._groups[key] = items
        if not items:
            del self._groups[key]

    # ---- from the queue to the workers -----------------------------------------------------------------------------------

    def _give(self) -> None:
        """Give texts to workers, until the end."""
        with self._changed:
            while not self._closed or self._groups or any(working.items for working in self._working):
                self._changed.wait(self._give_all())
            self._ended = True
            for working in self._working:
                if working.is_ready:
                    working.worker.send(End())

    def _give_all(self) -> float | None:
        """Give the texts of the oldest group to workers.   Return the seconds until more can be given if nothing changes, or
        None.  The caller holds the lock."""
        while self._groups:
            key = min(self._groups, key=lambda key: self._groups[key][0].since)
            free = [working for working in self._working if working.is_ready and (
                not working.items or working.joins and working.key == key and key.alone is None)]
            if not free:
                return None
            working = min(free, key=lambda working: len(working.items))
            group, size = self._groups[key], max(1, self._size * BEAM // max(BEAM, key.search.beam))
            # All workers together have all texts.  Without a limit one worker would take most of them, and the other one the
            # few that arrive until then, again and again.
            every = self._queued + sum(len(other.items) for other in self._working)
            room = min(size, max(_SHARED, -(-every // len(self._working)))) - len(working.items)
            if room <= 0:
                return None
            left = group[0].since + self._wait - time.monotonic()
            if len(group) < room and left > 0 and not self._closed:
                return left
            self._send(working, key, alike([len(item.text) for item in group], room), size)
        return None

    def _send(self, working: _Working, key: Key, chosen: Sequence[int], size: int) -> None:
        """Give texts to a worker.   chosen: indices into their group.   The caller holds the lock."""
        group, taken = self._groups[key], set(chosen)
        items = {next(self._numbers): group[n] for n in chosen}
        self._keep(key, [item for n, item in enumerate(group) if n not in taken])
        if not working.items:
            working.key, working.job, working.since = key, next(self._numbers), time.monotonic()
        working.items |= items
        working.worker.send(Job(working.job, key.search, key.alignments, size,
                                [(number, item.text) for number, item in items.items()]))

    # ---- from the workers to the requests --------------------------------------------------------------------------------

    def _receive(self, working: _Working) -> None:
        """Take the answers of a worker, until the end."""
        while True:
            try:
                answer = working.worker.receive()
            except Ended as error:
                if not self._restart(working, error):
                    break
                continue
            if isinstance(answer, Ready):
                with self._changed:
                    working.is_ready, working.joins = True, answer.joins
                    if self._ended:
                        working.worker.send(End())
                    self._changed.notify()
            elif isinstance(answer, Done):
                self._finish(working, answer)
            else:
                self._again(working, answer)
        working.worker.close()

    def _finish(self, working: _Working, answer: Done) -> None:
        ended: list[Ticket] = []
        with self._changed:
            now = time.monotonic()
            self._metrics.done(len(working.items), len(answer.texts), answer.source_tokens, answer.output_tokens,
                                now - working.since)
            working.since = now
            for number, result in answer.texts:
                item = working.items.pop(number)
                ticket = item.ticket
                ticket.results[item.index] = result
                ticket.missing -= 1
                if not ticket.missing and not ticket.is_dropped:
                    ended.append(ticket)
            self._changed.notify()
        for ticket in ended:                            # without the lock: callbacks run here
            ticket.future.set_result(ticket.results)

    def _again(self, working: _Working, answer: Failed) -> None:
        """Translate texts that failed together again, each alone, so that only requests fail whose texts fail.  One text that
        failed is an error."""
        with self._changed:
            items = [working.items.pop(number) for number in answer.numbers]
            if len(items) > 1:
                for item in items:
                    if not item.ticket.is_dropped:
                        self._enqueue(working.key._replace(alone=next(self._numbers)), [item])
            self._changed.notify()
        if len(items) == 1:
            traceback.print_exception(answer.error, file=sys.stderr)
            self._fail(items[0].ticket, answer.error)

    def _restart(self, working: _Working, error: Ended) -> bool:
        """Restart a worker that has ended.   Return False if it should have"""
        with self._changed:
            working.is_ready = False
            lost = [*working.items]
        self._again(working, Failed(lost, error))
        while not self._ended:
            try:
                working.worker.restart()
                return True
            except Exception as failure:
                traceback.print_exception(failure, file=sys.stderr)
                time.sleep(_PAUSE)
        return False

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        with self._changed:                             # another worker may fail a text of this request at the same time
            is_wanted, ticket.is_dropped = not ticket.is_dropped, True
        self.drop(ticket)
        if is_wanted:
            ticket.future.set_exception(error)


def alike(lengths: Sequence[int], size: int) -> list[int]:
    """Return the indices of at most `size` lengths: number 0, and those which differ least among each other with it."""
    if len(lengths) <= size:
        return list(range(len(lengths)))
    order = sorted(range(len(lengths)), key=lambda n: lengths[n])
    at = order.index(0)
    starts = range(max(0, at - size + 1), min(at, len(order) - size) + 1)
    first = min(starts, key=lambda start: lengths[order[start + size - 1]] - lengths[order[start]])
    return order[first:first + size]

