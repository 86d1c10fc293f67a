"""Load the server of translations with concurrent clients, and check every answer.

    python -m bench.serve CKPT                      64 clients for 10 seconds
    python -m bench.serve CKPT --compute int8       the server and the file mode with weights in int8
    python -m bench.serve CKPT --save               and append the figures to bench/results/serve.jsonl

Each client sends a request after the answer to the previous one, over one connection.  Every answer is compared with the
translation by pyops.load, and the throughput with the throughput for the same texts as a file, measured before and after the
load.  Clients and server share the cores of this machine.  The exit status is 1 if an answer is wrong or missing.
"""
import http.client
import json
import os
import random
import re
import selectors
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from bench import results
from pyops import COMPUTE_TYPES
from pyops.errors import UserError, exits_cleanly
from pyops.flags import ArgumentParser, int_up_to, positive_float, positive_int
from pyops.text.flags import BEAM, LARGEST_BEAM

PROGRAM = 'bench.serve'
TIMEOUT = 60            # seconds


def parse(argv):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description=__doc__.splitlines()[0])
    p.add_argument('checkpoint', metavar='CKPT', help='a checkpoint, or a folder of them')
    p.add_argument('--clients', type=int_up_to(400), default=64, metavar='N', help='concurrent clients (default %(default)s)')
    p.add_argument('--seconds', type=positive_float, default=10, metavar='S', help='time of the load (default %(default)s)')
    p.add_argument('--texts', type=int_up_to(64), default=1, metavar='N', help='texts of a request (default %(default)s)')
    p.add_argument('--beam', type=int_up_to(LARGEST_BEAM), default=BEAM, metavar='N', help='(default %(default)s)')
    p.add_argument('--sentences', type=positive_int, default=1000, metavar='N',
                   help='different sentences of the corpus that are sent (default %(default)s)')
    p.add_argument('-f', '--corpus', metavar='FILE', help='sentence pairs (default: fra-eng if found, else embedded)')
    p.add_argument('--data-dir', metavar='DIR', help='where to look for the data (default $PYOPS_DATA, then ./data)')
    p.add_argument('--threads', type=positive_int, metavar='N', help='of the server, and of the file mode (default: all cores)')
    p.add_argument('--compute', choices=COMPUTE_TYPES, default=COMPUTE_TYPES[0],
                   help='type of the weights, of the server and of the file mode (default %(default)s)')
    p.add_argument('--processes', type=positive_int, metavar='N', help='of the server (default: its own)')
    p.add_argument('--json', action='store_true', help='print one JSON object and nothing else')
    p.add_argument('--save', action='store_true', help='append the figures to bench/results')
    return p.parse_args(argv)


class Server:
    """A server in its own process.   port: its TCP port"""

    def __init__(self, args):
        command = [sys.executable, '-m', 'pyops', 'serve', args.checkpoint, '--port', '0', '--quiet',
                   '--compute', args.compute]
        for name in 'threads', 'processes':
            command += [f'--{name}', str(getattr(args, name))] * bool(getattr(args, name))
        self.process = subprocess.Popen(command, cwd=results.ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        found = re.search(r':(\d+) \(Ctrl-C', self.process.stdout.readline())
        if not found:
            raise UserError(f'the server did not start: {self.process.communicate()[1]}')
        self.port = int(found[1])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.communicate()

    def seconds(self):
        """Return the processor time of the server and of the processes that translate for it."""
        processes = [self.process.pid]
        processes += [int(pid) for pid in Path(f'/proc/{processes[0]}/task/{processes[0]}/children').read_text().split()]
        ticks = [Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[11:13] for pid in processes]
        return [sum(map(int, pair)) / os.sysconf('SC_CLK_TCK') for pair in ticks]

    def metric(self, name):
        """Return the value of a metric."""
        connection = http.client.HTTPConnection('127.0.0.1', self.port, timeout=TIMEOUT)
        connection.request('GET', '/metrics')
        return float(re.search(rf'^{name} (\S+)$', connection.getresponse().read().decode(), re.M)[1])


class Client:
    """Sends a request after the answer to the previous one.  Clients use the cores that the server needs.  So they read just
    enough of HTTP for the answers of this server, and compare the answers when the load has ended: see check().

    texts: as JSON;  latencies: seconds of each request;  errors: lines
    """

    def __init__(self, number, port, args, texts):
        self._rng, self._count, self._texts = random.Random(number), args.texts, texts
        self._request = (f'POST /translate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n'
                         f'{{"beam": {args.beam}, "texts": [%s]}}')
        self._more = len(f'{{"beam": {args.beam}, "texts": []}}')
        self.socket = socket.create_connection(('127.0.0.1', port), TIMEOUT)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.latencies, self.errors, self._answers = [], [], []
        self.send()

    def send(self):
        """Send a request."""
        self._chosen = self._rng.choices(range(len(self._texts)), k=self._count)
        texts = ', '.join([self._texts[n] for n in self._chosen])       # as ASCII
        self._answer, self._size, self._start = b'', 0, time.perf_counter()
        self.socket.sendall((self._request % (len(texts) + self._more, texts)).encode())

    def receive(self):
        """Receive a part of an answer.  Return whether it is complete."""
        part = self.socket.recv(1 << 16)
        self._answer += part
        if not self._size and (end := self._answer.find(b'\r\n\r\n')) >= 0:
            self._size = end + 4 + int(re.search(rb'\r\ncontent-length: (\d+)', self._answer[:end], re.I)[1])
        if part and not (self._size and len(self._answer) >= self._size):
            return False
        if not part:
            self.errors.append('the server closed the connection')
        elif self._answer[9:12] != b'200':
            self.errors.append(f'{self._answer[9:12].decode()} {self._body(self._answer)["error"]}')
        else:
            self.latencies.append(time.perf_counter() - self._start)
            self._answers.append((self._chosen, self._answer))
        return True

    def check(self, wanted):
        """Return the number of wrong answers.   wanted: the translations of all texts"""
        return sum([best['text'] for best, *_ in self._body(answer)['translations']] != [wanted[n] for n in chosen]
                   for chosen, answer in self._answers)

    @staticmethod
    def _body(answer):
        return json.loads(answer.partition(b'\r\n\r\n')[2])


def run(clients, seconds):
    """Let clients send requests for some time.  A request that is not answered within TIMEOUT is an error."""
    end = time.perf_counter() + seconds
    with selectors.DefaultSelector() as selector:
        for client in clients:
            selector.register(client.socket, selectors.EVENT_READ, client)
        while selector.get_map():
            ready = [key.data for key, _ in selector.select(TIMEOUT)]
            for client in ready or [key.data for key in selector.get_map().values()]:
                if not ready:
                    client.errors.append(f'no answer within {TIMEOUT} seconds')
                elif not client.receive():
                    continue
                elif time.perf_counter() < end and not client.errors:
                    client.send()
                    continue
                selector.unregister(client.socket)
                client.socket.close()


def load(args, texts, wanted):
    """Load the server.  Return the figures."""
    with Server(args) as server:
        start, own, others = time.perf_counter(), time.process_time(), server.seconds()
        encoded = [json.dumps(text) for text in texts]
        clients = [Client(n, server.port, args, encoded) for n in range(args.clients)]
        run(clients, args.seconds)
        seconds = time.perf_counter() - start
        own = time.process_time() - own
        others = [after - before for before, after in zip(others, server.seconds(), strict=True)]
        size = server.metric('pyops_batch_texts_sum') / max(1.0, server.metric('pyops_batch_texts_count'))
    latencies = [1e3 * latency for client in clients for latency in client.latencies]
    errors = [error for client in clients for error in client.errors]
    for error in sorted(set(errors))[:3]:
        print(error, file=sys.stderr)
    p50, p99 = np.percentile(latencies, (50, 99)).round(3).tolist() if latencies else (None, None)
    requests = max(1, len(latencies))
    return {'requests': len(latencies), 'errors': len(errors), 'wrong': sum(client.check(wanted) for client in clients),
            'p50_ms': p50, 'p99_ms': p99, 'texts_per_s': round(len(latencies) * args.texts / seconds, 1),
            'texts_per_batch': round(size, 2), 'clients_ms': round(1e3 * own / requests, 3),
            'server_ms': [round(1e3 * used / requests, 3) for used in others]}


def main(argv=None):
    args = parse(argv)
    import pyops
    from pyops import backend
    from pyops.text.translation import open_corpus
    if args.threads:
        backend.set_threads(args.threads)
    corpus, _ = open_corpus(args.corpus, args.data_dir)
    known = sorted({source for source, _ in corpus.texts()})
    texts = random.Random(0).sample(known, min(args.sentences, len(known)))
    translator = pyops.load(args.checkpoint, compute=args.compute)
    wanted = list(translator.translate(iter(texts), args.beam))

    def file_rate():
        """Return the texts per second of the file mode."""
        start = time.perf_counter()
        again = list(translator.translate(iter(texts), args.beam))
        seconds = time.perf_counter() - start
        if again != wanted:
            raise UserError('the translations of a file differ in a second run; find out why before measuring')
        return round(len(texts) / seconds, 1)
    before, loaded, after = file_rate(), load(args, texts, wanted), file_rate()
    figures = {'checkpoint': repr(translator), 'compute': args.compute, 'clients': args.clients, 'seconds': args.seconds,
               'texts': args.texts, 'beam': args.beam, 'threads': backend.threads(), 'isa': backend.isa(),
               'processes': args.processes, **loaded,
               'file_texts_per_s': [before, after]}
    if args.json:
        print(json.dumps(figures))
    else:
        print(f'{args.clients} clients, {args.texts} texts per request, beam {args.beam}, {args.compute}, '
              f'{figures["threads"]} threads, {figures["isa"]}\n'
              f'requests   : {figures["requests"]}, {figures["errors"]} errors, {figures["wrong"]} wrong\n'
              f'latency    : p50 {figures["p50_ms"]} ms, p99 {figures["p99_ms"]} ms\n'
              f'processor  : {figures["clients_ms"]} ms per request by the clients, '
              f'{" and ".join(map(str, figures["server_ms"]))} by the server and each process that translates\n'
              f'throughput : {figures["texts_per_s"]} texts/s, {figures["texts_per_batch"]} at a time by each process; '
              f'as a file {before} before and {after} after the load')
    if args.save:
        results.save('serve', figures)
    return int(bool(figures['errors'] or figures['wrong'] or not figures['requests']))


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        sys.exit(main())
