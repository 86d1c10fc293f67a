"""A server of translations for tests: in this process, with a model that can be held, or as a command."""
import contextlib
import functools
import http.client
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from types import SimpleNamespace

from conftest import ROOT, environment_without
from pids import until  # noqa: F401  (tests of the server import it from here)
from translation import TINY_TRANSFORMER

import pyops
from pyops.network import listen
from pyops.serve.application import Application, Settings
from pyops.serve.batching import Batcher
from pyops.serve.connections import Server, Timing, run_loop
from pyops.serve.metrics import Metrics
from pyops.serve.workers import Local
from pyops.text import embedded
from transformer import train

_folder = tempfile.TemporaryDirectory(prefix='pyops-server-')       # deleted when this process exits
TEXTS = [text for text, _ in embedded.corpus().first(400).texts()][::3]


@functools.cache
def checkpoint():
    """Return the folder of the checkpoint of a small transformer, trained for a second."""
    folder = os.path.join(_folder.name, 'ckpt')
    with contextlib.redirect_stdout(io.StringIO()):
        train.main(['-e', '15', '-c', folder, *TINY_TRANSFORMER, '-b', '16', '--d-model', '32', '-d', '0'])
    return folder


@functools.cache
def model():
    return pyops.load(checkpoint())


class Held:
    """The translator, but its batches wait for `go`, and no text joins them.

    batches: the texts of each;  entered: set when one has begun
    """
    joins = False

    def __init__(self, fails=lambda texts: False):
        self.go, self.entered, self.batches, self._fails = threading.Event(), threading.Event(), [], fails

    def __getattr__(self, name):
        return getattr(model(), name)

    def arriving(self, texts, search, batch_size, alignments):
        arrived = 0
        while some := texts(batch_size):
            self.batches.append(list(some))
            self.entered.set()
            assert self.go.wait(240)
            if self._fails(some):
                raise RuntimeError('a bug in the model')
            found = model().translations(some, search.beam, search.nbest, search.length_penalty, search.max_len,
                                         alignments=alignments)
            yield list(enumerate(found, arrived))
            arrived += len(some)


@contextlib.contextmanager
def running(translator=None, queue=1024, batch_size=64, timing=None, workers=None, **settings):
    """Run a server in a thread.   Yield it, with port, batcher, application and server"""
    counters = Metrics()
    translator = translator or model()
    batcher = Batcher(workers or [Local(translator)], counters, batch_size, capacity=queue)
    application = Application(translator.about, batcher, counters, Settings(**{'quiet': True} | settings))
    listener = listen('127.0.0.1', 0)
    server = Server(application, timing or Timing(shutdown=5), application.unread)
    thread = threading.Thread(target=lambda: run_loop(server.serve_on(listener)))
    thread.start()
    try:
        yield SimpleNamespace(port=listener.getsockname()[1], batcher=batcher, application=application, server=server)
    finally:
        if isinstance(translator, Held):
            translator.go.set()
        server.should_exit = True
        thread.join(120)
        batcher.close()
        assert not thread.is_alive()


def ask(port, method, path, body=None, **headers):
    """Return the status, the headers and the body of an answer."""
    connection = http.client.HTTPConnection('127.0.0.1', port, timeout=240)
    try:
        connection.request(method, path, body, {name.replace('_', '-'): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def post(port, fields, **headers):
    """POST /translate.   Return the status and the object of the answer"""
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    status, _, answer = ask(port, 'POST', '/translate', body, **headers)
    return status, json.loads(answer)


def request(body, *heads, path='/translate'):
    """Return the bytes of a POST request."""
    return '\r\n'.join([f'POST {path} HTTP/1.1', 'Host: x', f'Content-Length: {len(body)}', *heads, '', '']).encode() + body


def connect(port):
    return socket.create_connection(('127.0.0.1', port), timeout=240)


def read_all(connection):
    """Return all bytes until the server closes the connection; a reset ends them, too."""
    data = b''
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            data += part
    return data


@contextlib.contextmanager
def command(*flags, **values):
    """Run python -m pyops serve.   Yield the process, with port; it is killed if it still runs at the end"""
    environment = environment_without('PYOPS_SERVE_TOKEN', PYTHONPATH=str(ROOT), OMP_NUM_THREADS='1', **values)
    line = [sys.executable, '-m', 'pyops', 'serve', checkpoint(), '--port', '0', *map(str, flags)]
    with subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            process.line = process.stdout.readline()
            assert process.line, process.stderr.read()
            process.port = int(process.line.split(' (Ctrl-C')[0].rpartition(':')[2])
            yield process
        finally:
            process.kill()
