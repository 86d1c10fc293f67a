"""python -m pyops serve CKPT: the command line of the server.  Starlette and uvicorn are imported when it runs."""
from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from typing import Any

from pyops.errors import Interrupted, UserError, printable, require
from pyops.flags import (
    ArgumentParser,
    add_address_flags,
    add_compute_flag,
    add_gpu_flag,
    add_quant_flags,
    add_threads_flag,
    int_up_to,
    non_negative_float,
    positive_float,
    use_device,
)
from pyops.inspect.choice import size
from pyops.network import listen, url_of
from pyops.text.flags import PROCESSES, add_processes_flag

TOKEN = 'PYOPS_SERVE_TOKEN'
_PACKAGES = 'starlette', 'uvicorn', 'uvloop'
_LARGEST_BODY = 1 << 30
_SHORTEST = 0.05                # seconds of a time limit
_OTHER_FILES = 64               # that the server may open besides its connections


def add_flags(parser: ArgumentParser) -> None:
    """Declare the flags of the command."""
    server, limits = parser.group('server'), parser.group('limits')
    server.add_argument('checkpoint', metavar='CKPT', help='a checkpoint, or a folder: its best or newest checkpoint')
    add_address_flags(server, 8000)
    server.add_argument('--token-file', metavar='FILE',
                        help=f'clients must send the token in FILE, Authorization: Bearer TOKEN (default: ${TOKEN}, else none)')
    server.add_argument('--quiet', action='store_true', help='write no access log to standard error')
    add_threads_flag(parser, 'server')
    add_processes_flag(server, 'the server itself', f'one for each thread, at most {PROCESSES}; 1 on a GPU')
    server.add_argument('-b', '--batch-size', type=int_up_to(4096), default=64, metavar='N',
                        help='texts that a process translates at a time with a beam of up to 5; fewer with a larger one '
                        '(default %(default)s)')
    server.add_argument('--wait', type=non_negative_float, default=2, metavar='MS',
                        help='milliseconds that a text waits for others to translate with it (default %(default)s)')
    limits.add_argument('--queue', type=int_up_to(10**6), default=1024, metavar='N',
                        help='texts that wait; more are refused with 429 (default %(default)s)')
    limits.add_argument('--max-body', type=_body, default='1M', metavar='SIZE',
                        help='bytes of a request: 500k, 1M (default %(default)s)')
    limits.add_argument('--max-texts', type=int_up_to(10**6), default=128, metavar='N',
                        help='texts of a request (default %(default)s)')
    limits.add_argument('--max-chars', type=int_up_to(10**6), default=5000, metavar='N',
                        help='characters of a text (default %(default)s)')
    limits.add_argument('--timeout', type=_seconds, default=30, metavar='S',
                        help='seconds until a request is given up with 504 (default %(default)s)')
    limits.add_argument('--read-timeout', type=_seconds, default=10, metavar='S',
                        help='seconds for the head of a request, for its body, and for the client to take the answer '
                        '(default %(default)s)')
    limits.add_argument('--connections', type=int_up_to(10**5), default=512, metavar='N',
                        help='open connections; more are refused with 503 (default %(default)s)')
    add_gpu_flag(parser)
    add_quant_flags(parser, 'as in the checkpoint')
    add_compute_flag(parser)
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    value = positive_float(text)
    if not _SHORTEST <= value <= 86400:
        raise ArgumentTypeError(f'expected {_SHORTEST} to 86400 seconds, got {text}')
    return value


def _body(text: str) -> int:
    value = size(text)
    if not 1 <= value <= _LARGEST_BODY:
        raise ArgumentTypeError(f'expected 1 byte to 1G, got {text}')
    return value


def run(options: Namespace) -> int:
    """Serve until a signal.   Interrupted: it came, and all accepted requests are answered"""
    for package in _PACKAGES:
        require('serve', package, 'serve')
    if options.max_texts > options.queue:
        raise UserError(f'--max-texts {options.max_texts}: expected at most --queue {options.queue}; raise --queue')
    token = read_token(options.token_file)
    allow_files(options.connections)
    listener = listen(options.host, options.port)
    with listener:
        use_device(options)
        about, workers, warnings = start_workers(options)
        for line in (*warnings, about.rounding):
            if line:
                print(line, file=sys.stderr)
        if not token and not _is_loopback(listener):
            print(f'warning: --host {printable(options.host)}: everybody who reaches this address can translate; '
                  f'give --token-file, or set {TOKEN}', file=sys.stderr)
        return _serve(options, token, about, workers, listener)


def start_workers(options: Namespace) -> tuple[Any, list[Any], Sequence[str]]:
    """Return the About of the translator, the workers, and warnings about the checkpoint.   UserError if it cannot be loaded"""
    from pyops import checkpoint, quantization
    from pyops.serve.workers import Local, Remote
    from pyops.text.processes import Start, default_number, shares, start_processes
    from pyops.text.translator import of_checkpoint
    found = checkpoint.find(options.checkpoint, serving=True, parameters_only=True)
    settings = found.state.get('settings', {}) if isinstance(found.state, dict) else {}
    replaced = quantization.resolve(options, settings) | {'compute': options.compute}
    number = options.processes or default_number()
    if number == 1:
        translator = of_checkpoint(found, replaced)
        return translator.about, [Local(translator, options.threads)], found.warnings
    # Only the processes have the weights.  The path: all load the same checkpoint of a folder
    assert found.path is not None
    processes = start_processes(Start.of(found.path, replaced, options), shares(number))
    return processes[0].about, [Remote(process) for process in processes], found.warnings


def read_token(path: str | None) -> str | None:
    """Return the token in a file, else in the environment, else None.   UserError if it is no token"""
    text, name = os.environ.get(TOKEN) or None, TOKEN
    if path is not None:
        name = f'--token-file {printable(path)}'
        try:
            with open(path, 'rb') as file:
                text = file.read(4096).decode('latin-1').strip()
        except OSError as error:
            raise UserError(f'{name}: cannot be read ({error.strerror}); give a text file with the token') from error
    if text is not None and not (1 <= len(text) <= 1024 and text.isascii() and text.isprintable() and ' ' not in text):
        raise UserError(f'{name}: expected one word of 1 to 1024 printable ASCII characters, the token')
    return text


def allow_files(connections: int) -> None:
    """Raise the limit of open files if it is too low for so many connections.   UserError if that is not permitted"""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise UserError(f'--connections {connections}: needs {needed} open files, and {hard} are permitted; give at most '
                        f'{max(1, hard - _OTHER_FILES)}, or raise the limit (ulimit -Hn)')
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _is_loopback(listener: Any) -> bool:
    import ipaddress
    return ipaddress.ip_address(listener.getsockname()[0].partition('%')[0]).is_loopback


def _serve(options: Namespace, token: str | None, about: Any, workers: Any, listener: Any) -> int:
    from pyops.serve.api import Limits
    from pyops.serve.application import Application, Settings
    from pyops.serve.batching import Batcher
    from pyops.serve.connections import Server, Timing, run_loop
    from pyops.serve.metrics import Metrics
    counters = Metrics()
    batcher = Batcher(workers, counters, options.batch_size, options.wait / 1e3, options.queue)
    limits = Limits(options.max_body, options.max_texts, options.max_chars)
    application = Application(about, batcher, counters,
                              Settings(limits, options.timeout, options.read_timeout, token, options.quiet))
    timing = Timing(options.read_timeout, shutdown=options.timeout + options.read_timeout, connections=options.connections)
    server = Server(application, timing, application.unread)
    caught: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        server.force_exit = bool(caught) and number == signal.SIGINT        # a second Ctrl-C does not wait
        server.should_exit = True
        caught.append(number)
        if len(caught) == 1:
            print('finishing the accepted requests (Ctrl-C again leaves at once)', file=sys.stderr, flush=True)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:                  # nohup
                loop.add_signal_handler(number, stop, number)
        model = application.model
        print(f'serving {model["kind"]} {printable(model["checkpoint"])} at {url_of(listener.getsockname())} (Ctrl-C ends)',
              flush=True)
        await server.serve_on(listener)

    run_loop(main())
    if not server.force_exit:
        batcher.close()
    raise Interrupted(caught[0])
