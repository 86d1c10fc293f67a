"""The routes of the server, as a Starlette application."""
from __future__ import annotations

import asyncio
import hmac
import json
import os
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import Future
from datetime import UTC, datetime
from importlib import resources
from typing import Any, NamedTuple

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from pyops.errors import printable
from pyops.serve import metrics, openapi
from pyops.serve.api import Limits, Refused, answer, check_size, parse
from pyops.serve.batching import Batcher, Closed, Full
from pyops.text.translator import About

GONE = 499              # nginx's status for a client that disconnected; it is logged and counted, nobody receives it
_ENDING = 'the server is shutting down'
_DRAINED = 8            # a body that is too large is read up to this multiple of the limit, so that its client gets the answer
_STATIC = '/static/'
_TYPES = {'.html': 'text/html; charset=utf-8', '.js': 'text/javascript; charset=utf-8', '.css': 'text/css; charset=utf-8',
          '.svg': 'image/svg+xml', '.png': 'image/png', '.ico': 'image/x-icon'}
_HEADERS = [(b'x-content-type-options', b'nosniff'), (b'referrer-policy', b'no-referrer'), (b'cache-control', b'no-store'),
            (b'content-security-policy', b"default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
                                         b"base-uri 'none'; form-action 'self'; frame-ancestors 'none'")]

Message = MutableMapping[str, Any]


class Settings(NamedTuple):
    """limits: of a request;  timeout: seconds for a translation;  read_timeout: seconds for a body
    token: what clients send as a bearer token; None: none is required;  quiet: no access log"""
    limits: Limits = Limits()
    timeout: float = 30.0
    read_timeout: float = 10.0
    token: str | None = None
    quiet: bool = False


class Application:
    """The ASGI application of a translator.   log(...) writes the access log."""

    def __init__(self, about: About, batcher: Batcher, counters: metrics.Metrics, settings: Settings) -> None:
        self.about, self.batcher, self.metrics, self.settings = about, batcher, counters, settings
        self.model = {'kind': about.kind, 'checkpoint': os.path.basename(about.path or '')}
        self._start = time.monotonic()
        self._files = _page()
        self._document = openapi.document(settings.limits, about.num_steps, bool(settings.token))
        self._docs = openapi.page(self._document)
        # A table instead of Starlette's routing, whose layers take longer than the rest of a request.
        self._routes: dict[str, Callable[[Request], Awaitable[Response]]] = {
            '/translate': self.translate, '/health': self.health, '/metrics': self.counters, '/openapi.json': self.openapi,
            '/docs': self.docs, '/': self.index}

    # ---- routes ----------------------------------------------------------------------------------------------------------

    async def translate(self, request: Request) -> Response:
        start = time.monotonic()
        self._authorize(request)
        if request.headers.get('sec-fetch-site') == 'cross-site':
            raise Refused(403, 'sent by a page of another site; send it from a program or from the page of this server')
        limits = self.settings.limits
        wanted = parse(await read_body(request, limits.body, self.settings.read_timeout), limits, self.about.search)
        check_size(wanted, self.about.num_steps)
        request.scope['pyops.note'] = f'{len(wanted.texts)} text{"s" * (len(wanted.texts) != 1)}'
        try:
            ticket = self.batcher.submit(wanted.texts, wanted.search, wanted.alignments)
        except Full as error:
            raise Refused(429, f'the queue is full ({self.batcher.queued} texts); try again later', Retry_After='1') from error
        except Closed as error:
            raise Refused(503, _ENDING, Connection='close') from error
        try:
            results = await self._result(ticket.future, request)
        finally:
            self.batcher.drop(ticket)
        return Response(answer(results, self.model, time.monotonic() - start), media_type='application/json')

    async def _result(self, future: Future[Any], request: Request) -> Any:
        """Return the result of a ticket.   Refused: it takes too long, the client is gone, or the model failed"""
        done, gone = asyncio.wrap_future(future), asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({done, gone}, timeout=self.settings.timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
        if not done.done():
            done.cancel()
            if gone.done() and not gone.cancelled():
                raise Refused(GONE, 'the client disconnected')
            raise Refused(504, f'not translated within {self.settings.timeout:g} seconds; send fewer texts or try again later',
                          Retry_After='1')
        if (error := done.exception()) is not None:
            line = 'not enough memory' if isinstance(error, MemoryError) else type(error).__name__
            raise Refused(500, f'the translation failed ({line}); the log of the server has the details') from error
        return done.result()

    async def health(self, request: Request) -> Response:
        ready = self.batcher.is_ready
        return _json({'ready': ready, 'model': self.model, 'uptime': round(time.monotonic() - self._start, 3)},
                     200 if ready else 503)

    async def counters(self, request: Request) -> Response:
        self._authorize(request)
        gauges = {'queue_texts': ('texts that wait', float(self.batcher.queued)),
                  'uptime_seconds': ('time since the start', round(time.monotonic() - self._start, 3))}
        return Response(self.metrics.text(gauges), media_type=metrics.CONTENT_TYPE)

    async def openapi(self, request: Request) -> Response:
        return _json(self._document)

    async def docs(self, request: Request) -> Response:
        return Response(self._docs, media_type=_TYPES['.html'])

    async def index(self, request: Request) -> Response:
        return self._file('index.html')

    async def static(self, request: Request) -> Response:
        return self._file(request.scope['path'].removeprefix(_STATIC))

    def _file(self, name: str) -> Response:
        if name not in self._files:
            raise Refused(404, 'no such file')
        content, kind = self._files[name]
        return Response(content, media_type=kind)

    def _authorize(self, request: Request) -> None:
        if self.settings.token is None:
            return
        scheme, _, given = request.headers.get('authorization', '').partition(' ')
        is_equal = hmac.compare_digest(given.strip().encode(), self.settings.token.encode())
        if scheme.lower() != 'bearer' or not is_equal:
            raise Refused(401, 'expected the header Authorization: Bearer TOKEN with the token of this server',
                          WWW_Authenticate='Bearer')

    # ---- errors, log, metrics --------------------------------------------------------------------------------------------

    async def _answer(self, scope: Message, receive: Callable[[], Awaitable[Message]],
                      send: Callable[[Message], Awaitable[None]]) -> None:
        """Answer a request by its route."""
        request = Request(scope, receive, send)
        path = scope['path']
        is_static = path.startswith(_STATIC) and '/' not in path[len(_STATIC):] and path != _STATIC
        route = self.static if is_static else self._routes.get(path)
        methods = ('POST',) if route == self.translate else ('GET', 'HEAD')
        try:
            if route is None:
                raise Refused(404, 'no such page; see /docs')
            if scope['method'] not in methods:
                allowed = ', '.join(methods)
                raise Refused(405, f'{printable(scope["method"])[:20]}: expected {allowed}', Allow=allowed)
            response = await route(request)
        except Refused as error:
            response = _json({'error': error.line}, error.status, error.headers)
        await response(scope, receive, send)

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]],
                       send: Callable[[Message], Awaitable[None]]) -> None:
        """Answer a request, log it and count it.  A bug answers with 500 and prints its traceback."""
        if scope['type'] != 'http':
            raise RuntimeError(f'unexpected ASGI scope {scope["type"]}')
        start, status = time.monotonic(), 0

        async def observed(message: Message) -> None:
            nonlocal status
            if message['type'] == 'http.response.start':
                status = message['status']
                message['headers'] = [*message['headers'], *_HEADERS]
            await send(message)
        try:
            await self._answer(scope, receive, observed)
        except asyncio.CancelledError:                      # the server ends, and no longer waits for this request
            if not status:
                await _json({'error': _ENDING}, 503, {'Connection': 'close'})(scope, receive, observed)
        except Exception:
            traceback.print_exc(file=sys.stderr)
            if status:
                raise
            await _json({'error': 'the server failed; its log has the details'}, 500)(scope, receive, observed)
        finally:
            route = self._route(scope['path'])
            seconds = time.monotonic() - start
            self.metrics.request(route, status or GONE, seconds)
            client = scope['client'][0] if scope.get('client') else '-'
            target = scope.get('raw_path', b'').decode('latin-1')
            self.log(client, f'{scope["method"]} {target}', status or GONE,
                     f'{1e3 * seconds:.1f} ms {scope.get("pyops.note", "")}'.rstrip())

    def _route(self, path: str) -> str:
        """Return the name of a route for the metrics, which are bounded whatever clients send."""
        return '/static' if path.startswith(_STATIC) else path if path in self._routes else 'other'

    def unread(self, client: str, status: int, line: str) -> None:
        """Log and count a request that never became one: see connections.Report."""
        self.metrics.request('none', status, 0.0)
        self.log(client, '-', status, line)

    def log(self, client: str, request: str, status: int, more: str) -> None:
        """Write a line of the access log."""
        if self.settings.quiet:
            return
        now = datetime.now(UTC).isoformat(timespec='milliseconds')
        try:
            print(f'{now} {client} "{printable(request)[:200]}" {status} {more}', file=sys.stderr, flush=True)
        except OSError:                                     # the terminal is gone, or the disk is full
            pass


async def read_body(request: Request, most: int, seconds: float) -> bytes:
    """Return the body of a request.   Refused: larger than `most` bytes, not there in time, or the client is gone"""
    too_large = Refused(413, f'body: expected at most {most} bytes; send fewer texts at once', Connection='close')
    length = request.headers.get('content-length', '')
    if length.isascii() and length.isdigit() and int(length[:20]) > most and 'expect' in request.headers:
        raise too_large                         # the client waits for permission to send it
    chunks, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= most:
                    chunks.append(chunk)
                elif size > _DRAINED * most:
                    break
    except TimeoutError as error:
        raise Refused(408, f'body: did not arrive within {seconds:g} seconds', Connection='close') from error
    except ClientDisconnect as error:
        raise Refused(GONE, 'the client disconnected') from error
    if size > most:
        raise too_large
    return b''.join(chunks)


async def _disconnected(request: Request) -> None:
    """Return when the client has disconnected."""
    while (await request.receive())['type'] != 'http.disconnect':
        pass


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(value, allow_nan=False), status, headers, 'application/json')


def _page() -> dict[str, tuple[bytes, str]]:
    """Return the files of the web page by name: content and type.  They are in memory, so no request can name another file."""
    folder = resources.files('pyops.serve') / 'page'
    return {file.name: (file.read_bytes(), _TYPES[os.path.splitext(file.name)[1]]) for file in folder.iterdir()
            if os.path.splitext(file.name)[1] in _TYPES}
