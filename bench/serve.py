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
import random
import re
import subprocess
import sys
import threading
import time

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
    p.add_argument('--json', action='store_true', help='print one JSON object and nothing else')
    p.add_argument('--save', action='store_true', help='append the figures to bench/results')
    return p.parse_args(argv)


class Server:
    """A server in its own process.   port: its TCP port"""

    def __init__(self, args):
        command = [sys.executable, '-m', 'pyops', 'serve', args.checkpoint, '--port', '0', '--quiet',
                   '--compute', args.compute]
        command += ['--threads', str(args.threads)] * bool(args.threads)
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

    def metric(self, name):
        """Return the value of a metric."""
        connection = http.client.HTTPConnection('127.0.0.1', self.port, timeout=TIMEOUT)
        connection.request('GET', '/metrics')
        return float(re.search(rf'^{name} (\S+)$', connection.getresponse().read().decode(), re.M)[1])


class Client(threading.Thread):
    """Sends requests until `end`.   latencies: seconds of each;  errors: lines;  wrong: the number of wrong translations"""

    def __init__(self, number, port, args, texts, wanted, end):
        super().__init__()
        self._rng, self._args, self._texts, self._wanted, self._end = random.Random(number), args, texts, wanted, end
        self._connection = http.client.HTTPConnection('127.0.0.1', port, timeout=TIMEOUT)
        self.latencies, self.errors, self.wrong = [], [], 0

    def run(self):
        while time.perf_counter() < self._end:
            chosen = [self._rng.randrange(len(self._texts)) for _ in range(self._args.texts)]
            body = json.dumps({'texts': [self._texts[n] for n in chosen], 'beam': self._args.beam})
            start = time.perf_counter()
            try:
                self._connection.request('POST', '/translate', body)
                answer = self._connection.getresponse()
                content = json.loads(answer.read())
                if answer.status != 200:
                    raise ValueError(f'{answer.status} {content["error"]}')
                found = [best['text'] for best, *_ in content['translations']]
            except (OSError, ValueError, http.client.HTTPException) as error:
                self.errors.append(f'{type(error).__name__}: {error}')
                self._connection.close()
                continue
            self.latencies.append(time.perf_counter() - start)
            self.wrong += found != [self._wanted[n] for n in chosen]
        self._connection.close()


def load(args, texts, wanted):
    """Load the server.  Return the figures."""
    with Server(args) as server:
        start = time.perf_counter()
        clients = [Client(n, server.port, args, texts, wanted, start + args.seconds) for n in range(args.clients)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        seconds = time.perf_counter() - start
        batches = server.metric('pyops_batch_texts_count')
    latencies = [1e3 * latency for client in clients for latency in client.latencies]
    errors = [error for client in clients for error in client.errors]
    for error in sorted(set(errors))[:3]:
        print(error, file=sys.stderr)
    p50, p99 = np.percentile(latencies, (50, 99)).round(3).tolist() if latencies else (None, None)
    return {'requests': len(latencies), 'errors': len(errors), 'wrong': sum(client.wrong for client in clients),
            'p50_ms': p50, 'p99_ms': p99, 'texts_per_s': round(len(latencies) * args.texts / seconds, 1),
            'texts_per_batch': round(len(latencies) * args.texts / max(1.0, batches), 2)}


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
               'texts': args.texts, 'beam': args.beam, 'threads': backend.threads(), 'isa': backend.isa(), **loaded,
               'file_texts_per_s': [before, after]}
    if args.json:
        print(json.dumps(figures))
    else:
        print(f'{args.clients} clients, {args.texts} texts per request, beam {args.beam}, {args.compute}, '
              f'{figures["threads"]} threads, {figures["isa"]}\n'
              f'requests   : {figures["requests"]}, {figures["errors"]} errors, {figures["wrong"]} wrong\n'
              f'latency    : p50 {figures["p50_ms"]} ms, p99 {figures["p99_ms"]} ms\n'
              f'throughput : {figures["texts_per_s"]} texts/s in batches of {figures["texts_per_batch"]}; '
              f'as a file {before} before and {after} after the load')
    if args.save:
        results.save('serve', figures)
    return int(bool(figures['errors'] or figures['wrong'] or not figures['requests']))


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        sys.exit(main())
