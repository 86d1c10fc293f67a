"""Time training steps with and without saving tensors.

    python -m bench.saving                          transformer: 10 layers every 10th step
    python -m bench.saving seq2seq --layers 9 --every 5 --json

Both train the same model and take turns.  A turn with saving ends when everything is on disk.
"""
import json
import shutil
import tempfile
import time

import numpy as np

from pyops.errors import exits_cleanly
from pyops.flags import ArgumentParser, positive_int

PROGRAM = 'bench.saving'


def parse(argv):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description=__doc__.splitlines()[0])
    p.add_argument('program', nargs='?', choices=('transformer', 'seq2seq', 'mnist'), default='transformer')
    p.add_argument('--layers', type=positive_int, default=10, metavar='N', help='layers that are saved (default 10)')
    p.add_argument('--every', type=positive_int, default=10, metavar='N', help='steps from one that is saved to the next '
                   '(default 10)')
    p.add_argument('--steps', type=positive_int, default=20, metavar='N', help='training steps in a turn (default 20)')
    p.add_argument('--turns', type=positive_int, default=9, metavar='N', help='timed turns of each (default 9)')
    p.add_argument('--corpus', metavar='FILE', help="sentence pairs, or 'embedded' (default: as in training)")
    p.add_argument('--folder', metavar='DIR', help='where the dumps of the turns go (default: the folder for temporary files)')
    p.add_argument('--json', action='store_true', help='print one JSON object and nothing else')
    return p.parse_args(argv)


def prepare(args):
    """Return Steps of the program, and rows(k), which returns the indices of batch k."""
    if args.program == 'mnist':
        from mnist import train
        from pyops.data import mnist
        from pyops.steps import Steps
        images, labels = mnist.load().parts()[0]
        model, optimizer, step, inputs = train.prepare(images, labels, as_one=False)
        steps, size = Steps(step, model.params, **inputs, **optimizer.arrays()), 100
        n = len(images)
    else:
        import importlib

        from bench.translation import planned_steps
        from pyops.text.pairs import Pairs
        from pyops.text.translation import open_corpus
        Config, Model = importlib.import_module(f'bench.{args.program}').ours()
        corpus, _ = open_corpus(args.corpus)
        vocabularies = corpus.vocabularies()
        config = Config(*map(len, vocabularies))
        pairs = Pairs.encode(corpus, *vocabularies, config.num_steps)
        steps, size, n = planned_steps(Model(config), pairs, 0.001), 128, len(pairs)
    return steps, lambda k: np.random.default_rng(k).integers(0, n, size)


def main(argv=None):
    args = parse(argv)
    from pyops import backend
    from pyops.inspect.find import find
    from pyops.inspect.flags import StepRanges, Wanted
    from pyops.inspect.saving import Saving
    steps, rows = prepare(args)
    names = list(dict.fromkeys(look.tensors[0].layer for look in find(steps.plan(rows(0)))))[:args.layers]
    wanted = Wanted('', tuple(names), StepRanges('', (range(0, 2**62, args.every),)), 2**62, '', 'safetensors')
    seconds, summary = {'plain': [], 'saving': []}, None
    for turn in range(-1, args.turns):
        for kind, times in seconds.items():
            folder = tempfile.mkdtemp(dir=args.folder)
            batches = [rows(k) for k in range(args.steps)]
            saving = Saving(wanted._replace(folder=folder), steps, batches[0], 0, args.steps, {})
            start = time.perf_counter()
            for batch in batches:
                (saving.step if kind == 'saving' else steps)(batch)
            summary = saving.writer.close() if kind == 'saving' else summary
            if turn >= 0:                               # the first turn is a warm-up
                times.append((time.perf_counter() - start) / args.steps)
            saving.writer.close()
            shutil.rmtree(folder)
    median = {kind: float(np.median(times)) for kind, times in seconds.items()}
    ratio = np.median(np.array(seconds['saving']) / np.array(seconds['plain']))
    result = {'program': args.program, 'layers': len(names), 'every': args.every, 'steps': args.steps, 'turns': args.turns,
              'threads': backend.threads(), 'isa': backend.isa(), 'tensors_a_turn': summary.tensors,
              'bytes_a_turn': summary.bytes, 'plain_s': round(median['plain'], 6), 'saving_s': round(median['saving'], 6),
              'overhead': round(float(ratio) - 1, 4)}
    if args.json:
        print(json.dumps(result))
        return
    print(f'{args.program}: {len(names)} layers every {args.every} steps, {summary.tensors} tensors and '
          f'{summary.bytes / 1e6:.1f} MB in {args.steps} steps')
    print(f'a step without saving {1e3 * median["plain"]:.2f} ms, with {1e3 * median["saving"]:.2f} ms: '
          f'{result["overhead"]:+.1%} (median of {args.turns} turns)')


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
