"""The page of saved tensors, live: a small server that reads a folder while a training run writes into it.

The page asks every second what is new and gets rows, statistics and the loss; a tensor's pictures are made when they are
looked at.  One thread follows the folder and measures tensors in the format that is shown, last ones first; it is nice to
the training run beside it.

The server answers GET for four paths and nothing else.  It reads no file that a request names, and answers only those who
call it by an address, by localhost or by the name in --host: a page elsewhere whose name is made to lead here (DNS
rebinding) gets nothing.
"""
import contextlib
import errno
import http.server
import ipaddress
import json
import os
import secrets
import socket
import threading
import time
import urllib.parse
from collections import OrderedDict

from pyops.errors import UserError
from pyops.formats import FORMATS
from pyops.inspect import page, payload
from pyops.inspect.logs import Logs, printable

_LOOK = 0.5                         # seconds between two looks at the folder
_EVENTS = 1000                      # news in one answer
_CACHE = 64 << 20                   # bytes of answers that are kept
_QUIET = 30                         # seconds after which an idle connection is closed


def run(options):
    """python -m pyops inspect serve LOGS.  Ends with Ctrl-C."""
    if os.path.exists(options.logs) and not os.path.isdir(options.logs):
        raise UserError(f'{printable(options.logs)}: is a file; want the folder of saved tensors, such as --save-tensors or '
                        'TENSOR_SAVE_DIR names')
    # One thread for our kernels, which are loaded when the first tensor is measured: a training run wants the cores.
    os.environ.setdefault('OMP_NUM_THREADS', '1')
    plotly = page.script()
    source = Source(options.logs)
    with open_server(source, plotly, options.host, options.port) as server:
        print(f'serving {printable(options.logs)} at {server.url} (Ctrl-C ends)', flush=True)
        source.look()
        if source.waiting:
            print(source.waiting, flush=True)
        threading.Thread(target=source.follow, daemon=True).start()
        if options.open:
            import webbrowser
            webbrowser.open(server.url)
        server.serve_forever()


class Source:
    """What the server knows of a folder.  Every method may be called by any thread.

    waiting: what it waits for, in a line; '' where there are tensors.
    """

    def __init__(self, folder):
        self.folder = os.fspath(folder)
        self.waiting = ''
        self._lock = threading.RLock()          # over all below
        self._wanted = threading.Event()        # somebody asked for numbers that are not there
        self._answers, self._size = OrderedDict(), 0
        self._making = threading.Semaphore(2)   # pictures at a time: the training run wants its cores
        self._begin(None)

    def _begin(self, logs):
        """Everything anew: of another folder, or of none."""
        self.serial = secrets.token_hex(8)      # of this begin: a page that knows another one starts over
        self._logs, self._place = logs, self._identity() if logs else None
        self._entries, self._news, self._quality, self._failed = [], [], {}, []
        self._format, self._steps, self._steps_of = '', [], 0
        self._answers.clear()
        self._size = 0

    def _identity(self):
        with contextlib.suppress(OSError):
            status = os.stat(self.folder)
            return status.st_dev, status.st_ino
        return None

    def look(self):
        """Take what was added to the folder."""
        with self._lock:
            if self._logs and (self._identity() != self._place or self._entries and not os.path.exists(self._entries[0].path)):
                self._begin(None)               # taken away, perhaps to make room for another run
            try:
                if self._logs is None:
                    if not os.path.isdir(self.folder):
                        self.waiting = f'{printable(self.folder)}: there is no such folder yet; waiting for it'
                        return
                    self._begin(Logs(self.folder, empty=True))
                    new = self._logs.entries
                else:
                    new = self._logs.refresh()
            except UserError as error:
                self.waiting = str(error)
                return
            for entry in new:
                self._news.append(('tensor', len(self._entries)))
                self._entries.append(entry)
            self.waiting = '' if self._entries else f'{printable(self.folder)}: no tensor is there yet; waiting for the first'

    def follow(self):
        """Look at the folder and measure its tensors, for ever."""
        with contextlib.suppress(AttributeError, OSError):
            os.nice(10)                         # on Linux of this thread alone
        due = 0.0
        while True:
            if time.monotonic() >= due:
                self.look()
                due = time.monotonic() + _LOOK
            if not self._measure():
                self._wanted.wait(max(0.0, due - time.monotonic()))
                self._wanted.clear()

    def _missing(self):
        """Numbers of the tensors that are not measured in the format that is shown."""
        done = self._quality.get(self._format, {})
        return [number for number in range(len(self._entries) - 1, -1, -1) if number not in done] if self._format else []

    def _measure(self):
        """Measure one tensor.  -> whether there was one."""
        with self._lock:
            missing, fmt, serial = self._missing(), self._format, self.serial
            if not missing:
                return False
            number = missing[0]
            entry = self._entries[number]
        try:
            x, mask = entry.load(), self._mask(entry)
            statistics = None if entry.statistics else payload.describe(x, mask)
            numbers, failure = payload.quality(x, fmt, entry.axis, mask), None
        except UserError as error:
            statistics, numbers, failure = None, [None] * len(payload.QUALITY), str(error)
        with self._lock:
            if serial == self.serial:
                self._quality.setdefault(fmt, {})[number] = numbers, statistics
                self._news.append(('quality', number, fmt))
                if failure and (entry.place, failure) not in self._failed:
                    self._failed.append((entry.place, failure))
        return True

    def _mask(self, entry):
        with self._lock:
            return self._logs.mask(entry) if self._logs else None

    def formats(self):
        with self._lock:
            return payload.used_formats(self._entries, FORMATS)

    # ---- answers -----------------------------------------------------------------------------------------------------

    def changes(self, query):
        """What is new since news number `after` of `serial`, as JSON."""
        with self._lock:
            after = _whole(query, 'after') if query.get('serial') == self.serial else 0
            fmt = query.get('format', '')
            if fmt != self._format and fmt in self.formats():
                self._format = fmt
                self._wanted.set()
            news = self._news[after:after + _EVENTS]
            tensors, quality = [], []
            for kind, number, *fmt in news:
                if kind == 'tensor':
                    tensors.append(payload.row(number, self._entries[number]))
                else:
                    quality.append([fmt[0], number, *self._quality[fmt[0]][number]])
            return {'serial': self.serial, 'version': after + len(news), 'more': after + len(news) < len(self._news),
                    'tensors': tensors, 'quality': quality, 'waiting': self.waiting, 'pending': len(self._missing()),
                    'formats': [payload.describe_format(fmt) for fmt in self.formats()], 'steps': self._thin(),
                    'run': self._logs.run if self._logs else {},
                    'skipped': [*(self._logs.skipped if self._logs else []), *self._failed]}

    def _thin(self):
        steps = self._logs.steps if self._logs else []
        if len(steps) != self._steps_of:
            self._steps, self._steps_of = payload.thin_steps(steps), len(steps)
        return self._steps

    def detail(self, query):
        """The pictures of a tensor in one format, as JSON; of a window of its map where one is named."""
        entry = self._entry(query)
        fmt = query.get('format', '')
        if fmt not in self.formats():
            raise _Refused(404, f'{fmt or "(nothing)"}: no such format here')
        window = None
        if 'window' in query:
            window = [_whole({'window': part}, 'window') for part in query['window'].split(',')]
            rows, columns = payload.matrix_shape(entry.shape)
            if len(window) != 4 or not (window[0] <= window[1] < rows and window[2] <= window[3] < columns):
                raise _Refused(400, 'window: want first row, last row, first column, last column')
        return payload.detail(entry.load(), self._mask(entry), entry.axis, (fmt,), half=payload.SIDE, window=window)

    def attention(self, query):
        """The attention weights of one sentence, as JSON."""
        entry, sentence = self._entry(query), _whole(query, 'sentence')
        if not payload.is_attention(entry) or sentence >= entry.shape[0]:
            raise _Refused(404, 'no such attention map')
        mask = self._mask(entry)
        with self._lock:
            words = self._logs.tokens(entry, sentence) if self._logs else None
        return payload.attention(entry.load(), mask, lambda _: words, sentence, 1)

    def _entry(self, query):
        with self._lock:
            number = _whole(query, 'id')
            if query.get('serial') != self.serial or number >= len(self._entries):
                raise _Refused(404, 'no such tensor; load the page again')
            return self._entries[number]

    def kept(self, make, query):
        """make(query) as JSON text in bytes, made once while it is among the last ones."""
        key = make.__name__, *sorted(query.items())
        with self._lock:
            if key in self._answers:
                self._answers.move_to_end(key)
                return self._answers[key]
            serial = self.serial
        with self._making:
            answer = _json(make(query))
        with self._lock:
            if serial == self.serial and key not in self._answers:
                self._answers[key] = answer
                self._size += len(answer)
                while self._size > _CACHE:
                    self._size -= len(self._answers.popitem(last=False)[1])
        return answer


def _json(value):
    return json.dumps(value, separators=(',', ':'), allow_nan=False).encode()


class _Refused(Exception):
    """A request that is not answered: its HTTP status and a line."""


def _whole(query, name):
    text = query.get(name, '')
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise _Refused(400, f'{name}: want a whole number')
    return int(text)


# ---- http ------------------------------------------------------------------------------------------------------------

def open_server(source, plotly, host, port):
    """A server that is bound and does not answer yet.  UserError where it cannot be bound."""
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UserError(f'--host {printable(host)}: no such address; want one of this machine, such as 127.0.0.1') from error
    try:
        return _Server(source, plotly, host, family, address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f'--port {port}: another program listens there; end it, or give --port 0 for any free '
                            'one') from error
        if error.errno == errno.EACCES:
            raise UserError(f'--port {port}: not for you to use; give one above 1023, or --port 0 for any free one') from error
        raise UserError(f'--host {printable(host)}: cannot listen there ({error.strerror}); want an address of this machine, '
                        'such as 127.0.0.1') from error


class _Server(http.server.ThreadingHTTPServer):
    def __init__(self, source, plotly, host, family, address):
        self.address_family = family
        self.source, self.host = source, host
        super().__init__(address, _Handler)
        data = {'live': True, **page.head(source.folder, FORMATS)}
        self.page = ''.join(page.render(data, (), plotly)).encode()

    def server_bind(self):
        # not HTTPServer's, which asks the network for this machine's name
        http.server.socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]

    @property
    def url(self):
        return f'http://{f"[{self.server_name}]" if ":" in self.server_name else self.server_name}:{self.server_port}'

    def knows(self, host):
        """Whether a Host header names this server in a way that no one else's name service can."""
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
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):    # a browser that left
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    server_version, sys_version = 'pyops', ''
    timeout = _QUIET

    def do_GET(self):
        source = self.server.source
        try:
            if not self.server.knows(self.headers.get('Host', '')):
                raise _Refused(403, f'open {self.server.url} instead')
            parts = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(parts.query, max_num_fields=16))
            if parts.path == '/':
                return self._answer(200, 'text/html; charset=utf-8', self.server.page)
            if parts.path == '/changes':
                return self._answer(200, 'application/json', _json(source.changes(query)))
            if parts.path in ('/detail', '/attention'):
                make = source.detail if parts.path == '/detail' else source.attention
                return self._answer(200, 'application/json', source.kept(make, query))
            raise _Refused(404, 'there is no such page')
        except _Refused as error:
            status, line = error.args
        except UserError as error:
            status, line = 410, str(error)
        except ValueError:
            status, line = 400, 'the address cannot be read'
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
        """Nothing: requests come every second."""
