"""The live page of saved tensors: an HTTP server that reads folders while training runs write to them.

The page polls the server every second for new rows, error measures and losses; the data of a tensor's plots are computed on
demand.  One thread of low priority polls the folder and computes the error measures in the selected format, newest tensors
first.

The server answers GET requests for four paths only, and no request can name a file.  To prevent DNS rebinding, the Host
header must be an IP address, localhost or the value of --host.
"""
import contextlib
import http.server
import ipaddress
import json
import os
import secrets
import threading
import time
import urllib.parse
from collections import OrderedDict

from pyops.errors import UserError, printable
from pyops.formats import FORMATS
from pyops.inspect import page, payload
from pyops.inspect.known import Known
from pyops.inspect.logs import Logs
from pyops.inspect.runs import Named, Pairing, Partings, Runs, difference, mask_of, named, parting_data, run_of
from pyops.inspect.statistics import quantization
from pyops.network import cannot_listen, resolve, url_of

_POLL = 0.5                         # seconds between two listings of the folder
_KEEP = 30                          # seconds between two times that new measures are kept for later commands
_EVENTS = 1000                      # events per response
_CACHE = 64 << 20                   # bytes of cached responses
_IDLE_TIMEOUT = 30                  # seconds after which an idle connection is closed


def run(options):
    """Run `python -m pyops inspect serve LOGS` until Ctrl-C."""
    runs = named(options.logs) if len(options.logs) > 1 else [Named('', options.logs[0])]
    for _, folder in runs:
        if os.path.exists(folder) and not os.path.isdir(folder):
            raise UserError(f'{printable(folder)}: is a file; give the folder of saved tensors, the value of --save-tensors '
                            'or TENSOR_SAVE_DIR')
    # Use one thread in our kernels, which are not loaded yet, and leave the cores to the training run.
    os.environ.setdefault('OMP_NUM_THREADS', '1')
    plotly = page.script()
    source = Source(*runs)
    with open_server(source, plotly, options.host, options.port) as server:
        folders = ', '.join(printable(folder) for _, folder in runs)
        print(f'serving {folders} at {server.url} (Ctrl-C ends)', flush=True)
        source.refresh()
        if source.waiting:
            print(source.waiting, flush=True)
        threading.Thread(target=source.follow, daemon=True).start()
        if options.open:
            import webbrowser
            webbrowser.open(server.url)
        server.serve_forever()


class Source:
    """The state of the folders of one or more runs (Named), for the server.  All methods are thread-safe.

    waiting: a line about what is missing, '' if there are tensors
    """

    def __init__(self, *runs):
        self._runs = runs
        self.folder = ', '.join(name for name, _ in runs) if len(runs) > 1 else runs[0].folder
        self.waiting = ''
        self._lock = threading.RLock()          # guards all attributes below
        self._wake = threading.Event()          # set when a page selects another format
        self._responses, self._size = OrderedDict(), 0
        self._computing = threading.Semaphore(2)    # concurrent requests; leaves cores to the training run
        self._known = {}                        # name of a run -> Known; only the thread that measures uses it
        self._reset(None)

    def _reset(self, logs):
        """Start over with another folder (a Logs), or without one."""
        self.serial = secrets.token_hex(8)      # a page that has another serial reloads everything
        self._logs, self._opened = logs, self._identity() if logs else None
        self._entries, self._events, self._quality, self._failed = [], [], {}, []
        self._format, self._steps, self._n_steps = '', [], 0
        self._todo = {}                         # format -> numbers of the tensors not yet measured, the newest last
        self._partings, self._pairing, self._pairs = None, None, []     # of several runs
        if logs and len(self._runs) > 1:
            self._partings, self._pairing = Partings(), Pairing(logs.names[0])
        self._responses.clear()
        self._size = 0

    def _identity(self):
        found = []
        for _, folder in self._runs:
            with contextlib.suppress(OSError):
                status = os.stat(folder)
                found.append((folder, status.st_dev, status.st_ino))
        return found

    def _is_deleted(self):
        """Return whether the first tensor of a run was deleted."""
        first = {}
        for entry in self._entries:
            if len(first) < len(self._runs):
                first.setdefault(entry.relative_path.partition('/')[0] if len(self._runs) > 1 else '', entry)
        return any(not os.path.exists(entry.path) for entry in first.values())

    def refresh(self):
        """Add the tensors saved since the last call."""
        with self._lock:
            if self._logs and (self._identity() != self._opened or self._is_deleted()):
                self._reset(None)               # a folder was created, deleted or replaced
            try:
                if self._logs is None:
                    missing = [folder for _, folder in self._runs if not os.path.isdir(folder)]
                    if missing:
                        self.waiting = f'{printable(missing[0])}: waiting for this folder to be created'
                        return
                    self._reset(Runs(self._runs, empty=True) if len(self._runs) > 1 else Logs(self.folder, empty=True))
                    new = self._logs.entries
                else:
                    new = self._logs.refresh()
            except UserError as error:
                self.waiting = str(error)
                return
            for entry in new:
                number = len(self._entries)
                self._events.append(('tensor', number))
                self._entries.append(entry)
                for todo in self._todo.values():
                    todo.append(number)
            if self._pairing:
                self._pairs += self._pairing.add(new)
            self.waiting = '' if self._entries else f'{printable(self.folder)}: waiting for the first tensor'

    def follow(self):
        """Poll the folder and measure its tensors in an endless loop."""
        with contextlib.suppress(AttributeError, OSError):
            os.nice(10)                         # affects only this thread on Linux
        due, keep = 0.0, time.monotonic() + _KEEP
        while True:
            if time.monotonic() >= due:
                self.refresh()
                due = time.monotonic() + _POLL
            is_idle = not self._measure() and not self._compare()
            if is_idle or time.monotonic() >= keep:
                self.save()
                keep = time.monotonic() + _KEEP
            if is_idle:
                self._wake.wait(max(0.0, due - time.monotonic()))
                self._wake.clear()

    def _measure(self):
        """Measure one tensor in the selected format, the newest first.  Return False if none is left."""
        with self._lock:
            fmt, serial = self._format, self.serial
            if fmt not in self._todo:
                self._todo[fmt] = list(range(len(self._entries)))
            if not fmt or not self._todo[fmt]:
                return False
            number = self._todo[fmt].pop()
            entry = self._entries[number]
        try:
            mask = self._mask(entry)
            slot = self._known_of(entry, mask)
            numbers, statistics = slot.quantization(fmt), entry.statistics or slot.description()
            x = None if numbers and statistics else entry.load()
            if not statistics:
                statistics = payload.describe(x, mask)
                slot.add_description(statistics)
            if not numbers:
                numbers = quantization(x, fmt, entry.axis, mask)
                slot.add_quantization(fmt, numbers)
            measures, failure = payload.quality_of(numbers), None
            statistics = None if entry.statistics else statistics
        except UserError as error:
            statistics, measures, failure = None, [None] * len(payload.QUALITY), str(error)
        with self._lock:
            if serial == self.serial:
                self._quality.setdefault(fmt, {})[number] = measures, statistics
                self._events.append(('quality', number, fmt))
                if failure and (entry.relative_path, failure) not in self._failed:
                    self._failed.append((entry.relative_path, failure))
        return True

    def _known_of(self, entry, mask):
        """Return the Slot of a tensor."""
        name = run_of(entry) if len(self._runs) > 1 else self._runs[0].name
        if name not in self._known:
            self._known[name] = Known(dict(self._runs)[name])
        return self._known[name].of(entry, entry.axis, mask)

    def save(self):
        """Keep the new measures for later commands."""
        for known in list(self._known.values()):
            known.save()

    def _compare(self):
        """Compare one tensor with the same one of the first run.  Return False if none is left."""
        with self._lock:
            if not self._pairs:
                return False
            pair, serial, logs = self._pairs.pop(0), self.serial, self._logs
        try:
            with self._lock:
                mask = mask_of(logs, pair)
            found, failure = difference(pair, mask), None
        except UserError as error:
            found, failure = None, (pair.reference.relative_path, str(error))
        with self._lock:
            if serial == self.serial:
                if found:
                    self._partings.add(found)
                elif failure not in self._failed:
                    self._failed.append(failure)
        return True

    def _mask(self, entry):
        with self._lock:
            return self._logs.mask(entry) if self._logs else None

    def formats(self):
        with self._lock:
            return payload.used_formats(self._entries, FORMATS)

    # ---- responses ---------------------------------------------------------------------------------------------------

    def changes(self, query):
        """Return the events of `serial` from number `after` on, for JSON."""
        with self._lock:
            after = _count(query, 'after') if query.get('serial') == self.serial else 0
            fmt = query.get('format', '')
            if fmt != self._format and fmt in self.formats():
                self._format = fmt
                self._wake.set()
            events = self._events[after:after + _EVENTS]
            tensors, quality = [], []
            for kind, number, *fmt in events:
                if kind == 'tensor':
                    tensors.append(payload.row(number, self._entries[number]))
                else:
                    quality.append([fmt[0], number, *self._quality[fmt[0]][number]])
            pending = len(self._entries) - len(self._quality.get(self._format, ())) if self._format else 0
            version = after + len(events)
            return {'serial': self.serial, 'version': version, 'more': version < len(self._events),
                    'tensors': tensors, 'quality': quality, 'waiting': self.waiting, 'pending': pending,
                    'formats': [payload.describe_format(fmt) for fmt in self.formats()], 'steps': self._thin(),
                    'run': self._logs.run if self._logs else {},
                    'partings': self._parted(query),
                    'skipped': [*(self._logs.skipped if self._logs else []), *self._failed]}

    def _parted(self, query):
        """Return the data of the differences, or None if the page has them."""
        if not self._partings:
            return None
        key = f'{self.serial} {self._partings.compared} {len(self._pairs)} {len(self._logs.steps)}'
        if query.get('partings') == key:
            return None
        return parting_data(self._logs, self._partings, len(self._pairs)) | {'key': key}

    def _thin(self):
        steps = self._logs.steps if self._logs else []
        if len(steps) != self._n_steps:
            self._steps, self._n_steps = payload.thin_steps(steps), len(steps)
        return self._steps

    def detail(self, query):
        """Return the data of a tensor's plots in one format, or in a window of its map if the query has one, for JSON."""
        entry = self._entry(query)
        fmt = query.get('format', '')
        if fmt not in self.formats():
            raise _Refused(404, f'{fmt or "(nothing)"}: unknown format')
        window = None
        if 'window' in query:
            window = [_count({'window': part}, 'window') for part in query['window'].split(',')]
            rows, columns = payload.matrix_shape(entry.shape)
            if len(window) != 4 or not (window[0] <= window[1] < rows and window[2] <= window[3] < columns):
                raise _Refused(400, 'window: expected first row, last row, first column, last column')
        return payload.detail(entry.load(), self._mask(entry), entry.axis, (fmt,), half=payload.SIDE, window=window)

    def attention(self, query):
        """Return the attention weights of one sentence, for JSON."""
        entry, sentence = self._entry(query), _count(query, 'sentence')
        if not payload.is_attention(entry) or sentence >= entry.shape[0]:
            raise _Refused(404, 'no such attention map')
        mask = self._mask(entry)
        with self._lock:
            words = self._logs.tokens(entry, sentence) if self._logs else None
        return payload.attention(entry.load(), mask, lambda _: words, sentence, 1)

    def _entry(self, query):
        with self._lock:
            number = _count(query, 'id')
            if query.get('serial') != self.serial or number >= len(self._entries):
                raise _Refused(404, 'no such tensor; load the page again')
            return self._entries[number]

    def cached(self, compute, query):
        """Return compute(query) as JSON bytes, from the cache of recent responses if possible."""
        key = compute.__name__, *sorted(query.items())
        with self._lock:
            if key in self._responses:
                self._responses.move_to_end(key)
                return self._responses[key]
            serial = self.serial
        with self._computing:
            response = _json(compute(query))
        with self._lock:
            if serial == self.serial and key not in self._responses:
                self._responses[key] = response
                self._size += len(response)
                while self._size > _CACHE:
                    self._size -= len(self._responses.popitem(last=False)[1])
        return response


def _json(value):
    return json.dumps(value, separators=(',', ':'), allow_nan=False).encode()


class _Refused(Exception):
    """An invalid request: its HTTP status and a message."""


def _count(query, name):
    text = query.get(name, '')
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise _Refused(400, f'{name}: expected a non-negative integer')
    return int(text)


# ---- HTTP ------------------------------------------------------------------------------------------------------------

def open_server(source, plotly, host, port):
    """Return a server that is bound to its port.  UserError if the host or port cannot be used."""
    family, address = resolve(host, port)
    try:
        return _Server(source, plotly, host, family, address)
    except OSError as error:
        raise cannot_listen(host, port, error) from error


class _Server(http.server.ThreadingHTTPServer):
    def __init__(self, source, plotly, host, family, address):
        self.address_family = family
        self.source, self.host = source, host
        super().__init__(address, _Handler)
        data = {'live': True, **page.head(source.folder, FORMATS)}
        self.page = ''.join(page.render(data, (), plotly)).encode()

    def server_bind(self):
        # HTTPServer.server_bind would look up the host name, which may block on DNS
        http.server.socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]

    @property
    def url(self):
        return url_of(self.server_address)

    def accepts(self, host):
        """Return whether a Host header is safe against DNS rebinding: an IP address, localhost or the value of --host."""
        try:
            name = urllib.parse.urlsplit(f'//{host}').hostname or ''
        except ValueError:
            return False
        if name in ('localhost', self.host.lower()):
            return True
        with contextlib.suppress(ValueError):
            return bool(ipaddress.ip_address(name))
        return False

    def handle_error(self, request, client_address):
        import sys
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):    # the browser disconnected
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    server_version, sys_version = 'pyops', ''
    timeout = _IDLE_TIMEOUT

    def do_GET(self):
        source = self.server.source
        try:
            if not self.server.accepts(self.headers.get('Host', '')):
                raise _Refused(403, f'open {self.server.url} instead')
            parts = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(parts.query, max_num_fields=16))
            if parts.path == '/':
                return self._answer(200, 'text/html; charset=utf-8', self.server.page)
            if parts.path == '/changes':
                return self._answer(200, 'application/json', _json(source.changes(query)))
            if parts.path in ('/detail', '/attention'):
                compute = source.detail if parts.path == '/detail' else source.attention
                return self._answer(200, 'application/json', source.cached(compute, query))
            raise _Refused(404, 'no such page')
        except _Refused as error:
            status, line = error.args
        except UserError as error:
            status, line = 410, str(error)
        except ValueError:
            status, line = 400, 'malformed request'
        self._answer(status, 'text/plain; charset=utf-8', line.encode(errors='backslashreplace') + b'\n')

    def _answer(self, status, kind, body):
        self.send_response(status)
        for name, value in (('Content-Type', kind), ('Content-Length', str(len(body))), ('Cache-Control', 'no-store'),
                            ('X-Content-Type-Options', 'nosniff'), ('Cross-Origin-Resource-Policy', 'same-origin'),
                            ('Referrer-Policy', 'no-referrer'), ('Content-Security-Policy', "frame-ancestors 'none'")):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Log nothing, because every page sends a request per second."""
