"""Time greedy translation against PyTorch and CTranslate2, on the same sentences with the same weights.

    python -m bench.translate seq2seq               one sentence alone, and 1000 in batches
    python -m bench.translate transformer --save    and append the figures to bench/results/translate.jsonl
    python -m bench.translate transformer --no-torch --compute bf16 int8 --ctranslate2 float32 int8

--compute adds our compute types, --ctranslate2 the types of CTranslate2 (only for the transformer).

The weights are untrained: no sentence ends early, so all contestants decode equally many tokens.  Each contestant uses the
fastest of several batch sizes, which it tries first.
"""
import importlib.util
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from bench import results
from bench.contest import NAMES, Contestant, add_flags, kinds_of, percentiles, print_figures
from pyops.errors import UserError, exits_cleanly
from pyops.flags import ArgumentParser, positive_int

PROGRAM = 'bench.translate'
ALONE = 20              # sentences per turn, one after the other: threads keep spinning for a while after a turn
SIZES = 64, 128, 256    # batch sizes to try


def parse(argv):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description=__doc__.splitlines()[0])
    p.add_argument('program', choices=('seq2seq', 'transformer'))
    p.add_argument('--no-torch', action='store_true', help='ours alone')
    p.add_argument('--compute', nargs='+', choices=('bf16', 'int8'), default=[], help='also ours in these compute types')
    p.add_argument('--ctranslate2', nargs='+', choices=('float32', 'int8'), default=[], metavar='TYPE',
                   help='also CTranslate2 in these compute types: float32, int8')
    p.add_argument('--sentences', type=positive_int, default=1000, metavar='N', help='in batches (default 1000)')
    p.add_argument('--turns', type=positive_int, default=7, metavar='N', help='timed turns with all of them (default 7), '
                   f'and twice as many with {ALONE} one by one')
    add_flags(p)
    return p.parse_args(argv)


def contest(args, kinds, threads):
    """Run the contest.  Return a line about the data; the figures by kind, of one sentence and of all in batches, with the
    batch size; and by kind the number of sentences whose translation differs from ours."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        about = importlib.import_module(f'bench.{args.program}').prepare_sentences(args, Path(folder))
        workers = {kind: stack.enter_context(Contestant(args.program, 'translate', kind, folder, threads)) for kind in kinds}
        few, words, size = min(ALONE, args.sentences), {}, {}
        for worker in workers.values():                     # warm up: compile, record
            for _ in range(3):
                worker.turn(0, few, 1)
        alone = {kind: [] for kind in kinds}
        for turn in range(2 * args.turns):
            first = turn * few % (args.sentences - few + 1)
            for kind, worker in workers.items():
                alone[kind].append(worker.turn(first, first + few, 1))
        for kind, worker in workers.items():
            tried = {}
            for n in SIZES:
                for _ in range(2):
                    worker.turn(0, args.sentences, n)
                tried[n] = min(worker.turn(0, args.sentences, n)['seconds'] for _ in range(2))
            size[kind] = min(tried, key=tried.get)
        batches = {kind: [] for kind in kinds}
        for _ in range(args.turns):
            for kind, worker in workers.items():
                answer = worker.turn(0, args.sentences, size[kind])
                words[kind] = answer['words']
                batches[kind].append(answer)
    one = {kind: percentiles([answer['seconds'] / few for answer in answers]) | {'peak_mib': answers[-1]['peak_mib']}
           for kind, answers in alone.items()}
    many = {kind: percentiles([answer['seconds'] for answer in answers])
            | {'peak_mib': answers[-1]['peak_mib'], 'batch_size': size[kind]} for kind, answers in batches.items()}
    differ = {kind: sum(a != b for a, b in zip(words['ours'], words[kind], strict=True)) for kind in kinds[1:]}
    return about, one, many, differ


def contestants(args):
    """Return the kinds of contestants.   UserError if a package is missing"""
    if args.ctranslate2 and args.program != 'transformer':
        raise UserError(f'--ctranslate2: has no model like {args.program}; leave it out, or time transformer')
    for package, remedy in (('ctranslate2', f'{sys.executable} -m pip install ctranslate2'),
                            ('transformer.export', 'a newer pyops')):
        if args.ctranslate2 and importlib.util.find_spec(package) is None:
            raise UserError(f'--ctranslate2: {package} is not installed; install it: {remedy}')
    return [*kinds_of(args, not args.no_torch), *(f'ours/{name}' for name in args.compute),
            *(f'ct2/{name}' for name in args.ctranslate2)]


def main(argv=None):
    args = parse(argv)
    kinds = contestants(args)
    from pyops import backend
    threads = args.threads or backend.threads()
    about, one, many, differ = contest(args, kinds, threads)
    figures = {'program': args.program, 'threads': threads, 'isa': backend.isa(), 'sentences': args.sentences,
               'one': one, 'batches': many, 'differ': differ}
    if args.json:
        print(json.dumps(figures))
    else:
        print(f'{args.program}: greedy, {about}; {threads} threads, {backend.float32_isa()}')
        print_figures('one sentence', one, 1, 'sentences')
        print_figures(f'{args.sentences} in batches', many, args.sentences, 'sentences')
        print('in batches of   : ' + ', '.join(f'{NAMES[kind]} {f["batch_size"]}' for kind, f in many.items()))
        for kind, n in differ.items():
            print(f'{NAMES[kind]:16}: {n} of {args.sentences} sentences in other words than ours')
    if args.save:
        results.save('translate', figures)


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
