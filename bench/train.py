"""Time training steps: ours alone, or beside PyTorch on the same batches from the same weights.

    python -m bench.train seq2seq --json            one JSON object; median_s is our seconds a step
    python -m bench.train seq2seq --vs torch        a table, and the loss of every tenth step on both sides

Each contestant is a process of its own (bench/worker.py) that waits while another works, and they take turns step by
step, so that a slow minute of the machine falls on all of them.
"""
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from pyops.errors import UserError, exits_cleanly
from pyops.training import ArgumentParser, positive_int

PROGRAM = 'bench.train'
NAMES = {'ours': 'pyops', 'torch': 'PyTorch eager', 'torch-compile': 'PyTorch compile'}
ROOT = Path(__file__).resolve().parents[1]


def parse(argv):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description=__doc__.splitlines()[0])
    p.add_argument('program', choices=['seq2seq'])
    p.add_argument('--vs', choices=['torch'], help='beside PyTorch, eager and compiled')
    p.add_argument('--no-compile', action='store_true', help='leave out torch.compile, which takes a minute to warm up')
    p.add_argument('--json', action='store_true', help='print one JSON object and nothing else')
    p.add_argument('--steps', type=positive_int, default=60, metavar='N', help='timed steps of each (default 60)')
    p.add_argument('--warmup', type=int, default=3, metavar='N', help='steps before, not timed (default 3)')
    p.add_argument('--batch-size', type=positive_int, default=128, metavar='N')
    p.add_argument('--threads', type=positive_int, metavar='N', help='for every contestant (default: all cores)')
    p.add_argument('--data-dir', metavar='DIR', help='where to look for fra-eng (default $PYOPS_DATA, then ./data)')
    p.add_argument('--dropout', type=float, default=0.2, metavar='P', help='0 makes the losses comparable to the last digit')
    return p.parse_args(argv)


class Contestant:
    """A worker process: step(k) runs its training step on batch k."""

    def __init__(self, kind, folder, threads):
        self.kind = kind
        command = [sys.executable, '-m', 'bench.worker', kind, str(folder), str(threads)]
        self.process = subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.answer()                                   # ready

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise UserError(f'{NAMES[self.kind]}: its process ended, see above')
        return json.loads(line)

    def step(self, k):
        print(k, file=self.process.stdin, flush=True)
        return self.answer()

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def prepare(args, folder):
    """Write what all contestants share: batches, configuration, initial weights.  -> a line about the data."""
    from dataclasses import asdict

    from pyops.data.batches import batches
    from pyops.text.translation import Pairs, open_corpus
    from seq2seq.model import Config, Seq2Seq
    corpus, _ = open_corpus(data_dir=args.data_dir)
    vocabularies = corpus.vocabularies()
    config = Config(*map(len, vocabularies), dropout=args.dropout)
    pairs = Pairs.encode(corpus, *vocabularies, config.num_steps)
    wanted, epoch = [], 0
    while len(wanted) < args.warmup + args.steps:
        wanted += [indices for indices in batches(len(pairs), args.batch_size, 0, epoch) if len(indices) == args.batch_size]
        epoch += 1
    arrays = {f'{k}.{name}': ids for k, indices in enumerate(wanted[:args.warmup + args.steps])
              for name, ids in zip(('source', 'target', 'labels'), pairs.batch(indices), strict=True)}
    model = Seq2Seq(config)
    np.savez(folder / 'batches.npz', **arrays)
    np.savez(folder / 'weights.npz', **{name: model.params[name].value for name in model.params})
    (folder / 'config.json').write_text(json.dumps(asdict(config)))
    return (f'{args.program}: {config.num_steps} steps, vocabularies {config.source_size}/{config.target_size}, '
            f'batch {args.batch_size}, {corpus.name}')


def main(argv=None):
    args = parse(argv)
    from pyops import backend
    threads = args.threads or backend.threads()
    kinds = ['ours'] + (['torch'] + ['torch-compile'] * (not args.no_compile) if args.vs else [])
    with tempfile.TemporaryDirectory() as folder:
        about = prepare(args, Path(folder))
        contestants = [Contestant(kind, folder, threads) for kind in kinds]
        seconds, losses, memory = {k: [] for k in kinds}, {k: [] for k in kinds}, {}
        for k in range(args.warmup + args.steps):
            for contestant in contestants:
                answer = contestant.step(k)
                losses[contestant.kind].append(answer['loss'])
                memory[contestant.kind] = answer['peak_mib']
                if k >= args.warmup:
                    seconds[contestant.kind].append(answer['seconds'])
        for contestant in contestants:
            contestant.close()
    figures = {kind: dict(zip(('p20_s', 'median_s', 'p80_s'), np.percentile(s, (20, 50, 80)).round(6).tolist(), strict=True))
               | {'peak_mib': memory[kind]} for kind, s in seconds.items()}
    if args.json:
        print(json.dumps({'program': args.program, 'steps': args.steps, 'threads': threads, 'isa': backend.isa()}
                         | figures['ours'] | ({'vs': {k: figures[k] for k in kinds[1:]}} if args.vs else {})))
        return
    print(f'{about}; {threads} threads, {backend.isa()}, {args.steps} steps in turn')
    print(f'{"":16} {"median":>9} {"p20":>9} {"p80":>9} {"pairs/s":>8} {"peak MiB":>9} {"to ours":>8}')
    for kind, f in figures.items():
        times = ''.join(f'{1e3 * f[name]:7.1f} ms' for name in ('median_s', 'p20_s', 'p80_s'))
        ratio = f['median_s'] / figures['ours']['median_s']
        print(f'{NAMES[kind]:16}{times} {args.batch_size / f["median_s"]:8.0f} {f["peak_mib"]:9.0f} {ratio:7.2f}x')
    print('loss at step    ' + ''.join(f'{k + 1:8d}' for k in range(0, len(losses['ours']), 10)))
    for kind in kinds:
        print(f'{NAMES[kind]:16}' + ''.join(f'{loss:8.4f}' for loss in losses[kind][::10]))


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
