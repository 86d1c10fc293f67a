"""The queue of the server: workers translate the texts of all requests, in batches.

Texts of different requests are translated together if their settings are equal.  A batch always contains the text that has
waited longest, and those most similar to it in length.  A text has the same translation in every batch (docs/translate.md).
"""
from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future

from pyops.serve.metrics import Metrics
from pyops.serve.workers import Worker
from pyops.text.decoding import Search
from pyops.text.flags import BATCH_SIZE, BEAM

Key = tuple[Search, bool]       # texts with the same settings can be translated together: search, alignments
WAIT = 0.002                    # seconds that a text waits for others if the model is idle
CAPACITY = 1024                 # texts in the queue
_SHARED = 8                     # fewer texts are not divided among workers


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


class Batcher:
    """Translates the texts of requests, with a thread for each worker.

    workers: closed by close()
    batch_size: largest number of texts of a batch with a beam of up to 5; with a larger one fewer, so that a batch needs no
                more memory
    wait: seconds;  capacity: texts
    """

    def __init__(self, workers: Sequence[Worker], metrics: Metrics, batch_size: int = BATCH_SIZE, wait: float = WAIT,
                 capacity: int = CAPACITY) -> None:
        self._metrics, self._size, self._wait, self._capacity = metrics, batch_size, wait, capacity
        self._changed = threading.Condition()           # guards all attributes below, and the tickets
        self._groups: dict[Key, list[_Item]] = {}       # in each group the oldest first; none is empty
        self._queued, self._running, self._closed = 0, 0, False         # numbers of texts
        # daemon: a second Ctrl-C does not wait for the batch
        self._threads = [threading.Thread(target=self._run, args=(worker,), name='translator', daemon=True)
                         for worker in workers]
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
            self._groups.setdefault((search, alignments), []).extend(
                _Item(text, ticket, index, now) for index, text in enumerate(texts))
            self._queued += len(texts)
            self._changed.notify()
        return ticket

    def drop(self, ticket: Ticket) -> None:
        """Take a request out of the queue.  Its texts in the present batch are translated, and the result is discarded."""
        with self._changed:
            ticket.is_dropped = True
            for key in list(self._groups):
                self._keep(key, [item for item in self._groups[key] if item.ticket is not ticket])
            self._changed.notify()

    def close(self) -> None:
        """Take no more requests, and return when all that were taken are done."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _keep(self, key: Key, items: list[_Item]) -> None:
        """Replace a group by a part of it.  The caller holds the lock."""
        self._queued -= len(self._groups[key]) - len(items)
        self._groups[key] = items
        if not items:
            del self._groups[key]

    # ---- the threads -----------------------------------------------------------------------------------------------------

    def _run(self, worker: Worker) -> None:
        try:
            while (batch := self._next()) is not None:
                key, items = batch
                self._translate(worker, key, items)
                with self._changed:
                    self._running -= len(items)
        finally:
            worker.close()

    def _next(self) -> tuple[Key, list[_Item]] | None:
        """Wait for the next batch.   None: closed, and the queue is empty"""
        with self._changed:
            try:
                return self._wait_for_texts()
            finally:
                self._changed.notify()                  # another worker may take the rest

    def _wait_for_texts(self) -> tuple[Key, list[_Item]] | None:
        while True:
            while not self._groups and not self._closed:
                self._changed.wait()
            if not self._groups:
                return None
            key = min(self._groups, key=lambda key: self._groups[key][0].since)
            group, size = self._groups[key], max(1, self._size * BEAM // max(BEAM, key[0].beam))
            left = group[0].since + self._wait - time.monotonic()
            if len(group) >= size or left <= 0 or self._closed:
                break
            self._changed.wait(left)
        # Batches of all workers together have all texts.  Without a limit one worker would take most of them, and the other one
        # the few that arrive until then, again and again.
        size = min(size, max(_SHARED, -(-(self._queued + self._running) // len(self._threads))))
        chosen = alike([len(item.text) for item in group], size)
        items = [group[n] for n in chosen]
        taken = set(chosen)
        self._keep(key, [item for n, item in enumerate(group) if n not in taken])
        self._running += len(items)
        return key, items

    def _translate(self, worker: Worker, key: Key, items: list[_Item]) -> None:
        """Translate a batch.  If that fails, each text alone, so that only requests fail whose texts fail."""
        start, failure = time.monotonic(), None
        try:
            found = worker([item.text for item in items], *key)
        except Exception as error:
            failure = error
        if failure is not None:
            if len(items) == 1:
                traceback.print_exception(failure, file=sys.stderr)
                return self._fail(items[0].ticket, failure)
            for item in items:
                if not item.ticket.is_dropped:
                    self._translate(worker, key, [item])
            return
        self._metrics.batch(len(items), found.source_tokens, found.output_tokens, time.monotonic() - start)
        with self._changed:
            done = []
            for item, result in zip(items, found.texts, strict=True):
                ticket = item.ticket
                ticket.results[item.index] = result
                ticket.missing -= 1
                if not ticket.missing and not ticket.is_dropped:
                    done.append(ticket)
        for ticket in done:                             # without the lock: callbacks run here
            ticket.future.set_result(ticket.results)

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

