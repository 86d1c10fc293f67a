"""The HTTP server, uvicorn's, with limits of its own for connections.

uvicorn bounds the size of a head, but no time except an idle connection's.  Here a connection is closed if its request
does not arrive in time, or if its client does not read the answer.  If there are too many, the one that has waited longest
for its client makes room for the next, so stalled clients cannot keep others out.  All errors are JSON.
"""
from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple

import uvicorn
import uvloop
from uvicorn.protocols.http.h11_impl import H11Protocol

_PERIOD = 0.1               # seconds between two checks of all connections
_LARGEST_HEAD = 16384       # bytes


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine, such as serve_on(), in an event loop of uvloop, which takes less time for a request than asyncio's."""
    uvloop.run(main)


class Timing(NamedTuple):
    """Limits of connections: seconds, and a number.

    read: for the head of a request, for its body, and for the client to take the answer
    idle: for the next request of a connection
    shutdown: from the first signal until the requests that were accepted are given up
    """
    read: float = 10.0
    idle: float = 15.0
    shutdown: float = 35.0
    connections: int = 512


Report = Callable[[str, int, str], None]        # report(client, status, line): a request that never reached the application


class Connection(H11Protocol):
    """A connection.   timing: see Timing;  report: see Report"""

    def __init__(self, *arguments: Any, timing: Timing, report: Report, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._timing, self._report = timing, report
        self._reading_since: float | None = None        # the start of a head, or of the rest of a body after its answer
        self._stuck_since: float | None = None          # the client does not take the answer, or the last part of it
        self._used = time.monotonic()                   # when it was made, a head began, or an answer ended

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def waits_since(self) -> float | None:
        """When the connection began to wait for its client: for a head, a body, the next request, or until the answer is taken.

        None while a request is worked on, and while the connection closes.
        """
        if self.transport.is_closing():
            return None
        if self.flow.write_paused:
            return self._used if self._stuck_since is None else self._stuck_since
        return None if self._is_busy and not self.cycle.more_body else self._used

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._reading_since = self._used
        if len(self.connections) > self._timing.connections:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_busy:
            self._reading_since = None
        elif self._reading_since is None:
            self._reading_since = self._used = time.monotonic()

    def on_response_complete(self) -> None:
        self._reading_since, self._used = None, time.monotonic()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, f'not an HTTP request with a head of up to {_LARGEST_HEAD} bytes')

    def shutdown(self) -> None:
        try:
            super().shutdown()
        except Exception:                               # h11: the client has broken the protocol
            self.transport.abort()

    def check(self, now: float) -> None:
        """Close the connection if its time is up."""
        if self.flow.write_paused or self.transport.is_closing():
            self._stuck_since = now if self._stuck_since is None else self._stuck_since
            if now - self._stuck_since > self._timing.read:
                self.transport.abort()
            return
        self._stuck_since = None
        if not self._is_busy and self._reading_since is not None and now - self._reading_since > self._timing.read:
            self._refuse(408, f'the request did not arrive within {self._timing.read:g} seconds')

    def _make_room(self) -> None:
        """Close the connection that has waited longest for its client, or this new one if all others are worked on."""
        waiting = {other: since for other in self.connections if (since := other.waits_since) is not None}
        oldest = min(waiting, key=waiting.__getitem__)
        if oldest.flow.write_paused:
            oldest.transport.abort()
        elif oldest.cycle is not None and oldest._reading_since is None and not oldest._is_busy:
            oldest.transport.close()                    # between two requests: its client expects no answer
        else:
            oldest._refuse(503, 'too many connections; try again later', 'Retry-After: 1\r\n')

    def _refuse(self, status: int, line: str, headers: str = '') -> None:
        """Answer without h11, which may be in any state, and close the connection."""
        body = json.dumps({'error': line})
        self.transport.write(f'HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n'
                             f'Content-Length: {len(body)}\r\nConnection: close\r\n{headers}\r\n{body}'.encode())
        self.transport.close()
        self._report(self.client[0] if self.client else '-', status, line)


class Server(uvicorn.Server):
    """Serves an ASGI application on a socket that listens, until should_exit is set."""

    def __init__(self, application: Any, timing: Timing, report: Report) -> None:
        protocol: Any = partial(Connection, timing=timing, report=report)
        super().__init__(uvicorn.Config(
            application, loop='none', http=protocol, ws='none', lifespan='off', interface='asgi3', log_config=None,
            log_level='error', access_log=False, proxy_headers=False, server_header=False,
            h11_max_incomplete_event_size=_LARGEST_HEAD, timeout_keep_alive=max(1, round(timing.idle)),
            timeout_graceful_shutdown=max(1, round(timing.shutdown))))

    def capture_signals(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()                             # the command handles them

    async def serve_on(self, listener: socket.socket) -> None:
        """Serve until should_exit is set, and the requests that were accepted are answered."""
        watch = asyncio.create_task(self._watch())
        try:
            await self.serve(sockets=[listener])
        finally:
            watch.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_PERIOD)
            now = time.monotonic()
            for connection in list(self.server_state.connections):
                connection.check(now)
