"""Twenty translations of a checkpoint, chosen by a rule, as the table of docs/quality.md.

    python -m scripts.translations CKPT             print the table
    python -m scripts.translations CKPT --save      write it to the page, after <!-- translations -->

The rule: the first test sentence of each number of words from 3 to 30; if there is none, the first validation sentence. If
these are fewer than twenty, also the second ones of 3, 4, ... words; if they are more, twenty at equal distances.
"""
from pathlib import Path

from pyops.errors import exits_cleanly
from pyops.flags import ArgumentParser
from scripts.generated import update

PROGRAM = 'scripts.translations'
PAGE = Path(__file__).resolve().parents[1] / 'docs' / 'quality.md'
NUMBER, SHORTEST, LONGEST = 20, 3, 30
TITLE = '| words | English | translation | reference |\n|---:|---|---|---|\n'


def parser():
    p = ArgumentParser(prog=f'python -m {PROGRAM}', docstring=__doc__,
                       description='Print twenty translations of sentences that a checkpoint was not trained on.')
    p.add_argument('checkpoint', help='a checkpoint, or a folder: its best or newest checkpoint')
    p.add_argument('-f', '--corpus', metavar='FILE', help='the corpus of the training run (default: fra-eng, else embedded)')
    p.add_argument('--data-dir', metavar='DIR', help='search for fra-eng only in DIR (default: $PYOPS_DATA, then ./data)')
    p.add_argument('--save', action='store_true', help='write the table to the page')
    p.add_argument('--page', type=Path, default=PAGE, metavar='FILE', help='another page (default: docs/quality.md)')
    return p


def main(argv=None):
    args = parser().parse_args(argv)
    import pyops
    from pyops.text import evaluation, serving
    translator = pyops.load(args.checkpoint)
    trained = serving.trained_corpus(args, translator)
    parts = [list(zip(*evaluation.test_set(trained.corpus, trained.hold_out, part, trained.excluded)[:2], strict=True))
             for part in ('test', 'validation')]
    rows = chosen(*parts)
    outputs = translator.translate([source for source, _ in rows])
    table = TITLE + ''.join(f'| {len(source.split())} | {_cell(source)} | {_cell(output)} | {_cell(references[0])} |\n'
                            for (source, references), output in zip(rows, outputs, strict=True))
    if args.save:
        update(args.page, 'translations', table, f'python -m {PROGRAM} CKPT --save')
    else:
        print(table, end='')


def chosen(test, validation):
    """Return at most NUMBER of these pairs (source, references) by the rule above, the shortest sources first."""
    by_length = [{n: [] for n in range(SHORTEST, LONGEST + 1)} for _ in range(2)]
    for found, pairs in zip(by_length, (test, validation), strict=True):
        for source, references in pairs:
            found.get(len(source.split()), []).append((source, references))
    candidates = [(found or other)[:2] for found, other in zip(*(some.values() for some in by_length), strict=True)]
    some = [found[:1] for found in candidates]
    if sum(map(len, some)) > NUMBER:
        first = [pair for found in some for pair in found]
        return [first[round(i * (len(first) - 1) / (NUMBER - 1))] for i in range(NUMBER)]
    for n, found in enumerate(candidates):
        if sum(map(len, some)) == NUMBER:
            break
        some[n] = found
    return [pair for found in some for pair in found]


def _cell(text):
    return ' '.join(text.split()).replace('|', '\\|')


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
