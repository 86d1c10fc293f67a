"""Write the table of README.md from the newest figures in bench/results.

    python -m bench.table                   rewrites what stands between <!-- bench --> and <!-- /bench -->
    python -m bench.table --check           writes nothing; ends with 2 where that would be something else
"""
import textwrap
from pathlib import Path

from bench import results
from pyops.errors import UserError, exits_cleanly
from pyops.training import ArgumentParser

PROGRAM = 'bench.table'
BEGIN, END = '<!-- bench -->\n', '<!-- /bench -->\n'
# kernels of the table, by the beginning of their names in bench.kernels
KERNELS = {'gemm 1024 ': 'product 1024 x 1024 x 1024', 'gemm logits': 'product 1152 x 13387 x 256',
           'gemm dx': 'product 1152 x 256 x 13387', 'gemm dweight': 'product 13387 x 256 x 1152',
           'output layer': 'output layer and loss, with gradients', 'gru': 'GRU layer, forward and backward',
           'attention': 'attention, forward and backward'}
STEPS = {'seq2seq': 'seq2seq, training step', 'transformer': 'transformer, training step',
         'mnist': 'mnist, training step'}


def shown(seconds):
    """Three digits."""
    unit, scale = next(pair for pair in (('s', 1), ('ms', 1e3), ('us', 1e6)) if seconds * pair[1] >= 1 or pair[0] == 'us')
    return f'{seconds * scale:.{max(0, 3 - len(str(int(seconds * scale))))}f} {unit}'


def row(what, seconds, rate='', share=None, others=(), memory=None):
    """others: (whose, seconds) of each, of whom the fastest is shown; memory: ours and PyTorch's, MiB."""
    best = min(others, key=lambda one: one[1], default=None)
    beside = f'{shown(best[1])}, {best[0]}' if best else ''
    ratio = f'{best[1] / seconds:.2f} x' if best else ''
    mib = f'{memory[0]:.0f} MiB, {memory[1]:.0f} MiB' if memory else ''
    return f'| {what} | {shown(seconds)} | {rate} | {"" if share is None else f"{share:.0%}"} | {beside} | {ratio} | {mib} |'


WHOSE = {'torch': 'PyTorch eager', 'torch-compile': 'PyTorch compiled'}


def contestants(figures):
    """-> what `row` wants of a contest's figures: our seconds, others and memory."""
    theirs = {kind: f for kind, f in figures.items() if kind != 'ours'}
    return dict(seconds=figures['ours']['median_s'], others=[(WHOSE[kind], f['median_s']) for kind, f in theirs.items()],
                memory=(figures['ours']['peak_mib'], min(f['peak_mib'] for f in theirs.values())) if theirs else None)


def rows(kernels, steps, scaling, translations):
    """kernels, scaling: a line of results or None; steps and translations: program -> line."""
    for case in kernels['cases'] if kernels else ():
        name = next((label for begin, label in KERNELS.items() if case['name'].startswith(begin)), None)
        if name:
            # a PyTorch kernel is timed eagerly
            others = [('PyTorch' if who == 'torch' else who, case[who]) for who in ('torch', 'numpy') if who in case]
            rate = f'{case["rate"]:.0f} {case["unit"]}' if 'rate' in case else ''
            yield row(name, case['seconds'], rate, case['share'], others)
    for program, name in STEPS.items():
        line = steps.get(program)
        if line is None:
            continue
        ours, rate, share = line['contestants']['ours'], '', None
        if 'flops' in ours:
            rate = f'{ours["flops"] / ours["median_s"] / 1e9:.0f} GFLOP/s'
            if kernels:
                share = ours['flops'] / ours['median_s'] / kernels['limits'][line['isa']][str(line['threads'])][0]
        yield row(f'{name}, batch {line["batch_size"]}', rate=rate, share=share, **contestants(line['contestants']))
        if line.get('runs'):
            yield row(f'{program}, whole run with its start-up', line['runs']['ours'],
                      others=[(WHOSE[kind], s) for kind, s in line['runs'].items() if kind != 'ours'])
    for program, line in sorted(translations.items()):
        yield row(f'{program}, greedy translation of one sentence', **contestants(line['one']))
        rate = f'{line["sentences"] / line["batches"]["ours"]["median_s"]:.0f} sentences/s'
        yield row(f'{program}, of {line["sentences"]} in batches', rate=rate, **contestants(line['batches']))
    if scaling:
        (name, ours), (other, alone) = scaling['scaling'].items()
        yield row(f'{scaling["program"]}, training step on {name} against {other}', ours['median_s'],
                  others=[(f'pyops on {other}', alone['median_s'])])


def table(folder):
    """-> the lines between the marks, from the newest figures of the machine that was measured last."""
    trained, translated, kernels = (results.load(name, folder) for name in ('train', 'translate', 'kernels'))
    if not (trained or translated or kernels):
        raise UserError(f'{folder}: no figures to make a table of; measure some with: make bench')
    last = max((lines[-1] for lines in (trained, translated, kernels) if lines), key=lambda line: line['date'])
    place = 'machine', 'isa', 'threads'

    def newest(lines):
        """By program, of those from the same machine."""
        return {line.get('program'): line for line in lines if all(line[key] == last[key] for key in place)}
    steps = newest([line for line in trained if len(line.get('contestants', ())) > 1])
    scaling = newest([line for line in trained if 'scaling' in line])
    used = [newest(kernels).get(None), *steps.values(), *scaling.values(), *newest(translated).values()]
    days = sorted({line['date'] for line in used if line})
    about = (f'{last["threads"]} threads of {last["machine"]}, {last["isa"]} kernels, PyTorch {last["torch"]}; '
             f'{" to ".join(dict.fromkeys((days[0], days[-1])))}')
    explained = ('Medians of interleaved turns; beside them the faster of PyTorch eager and compiled, of large products that '
                 "of PyTorch's and numpy's. Memory is the peak of a process, PyTorch's the lower of the two. The limit is what "
                 'fused multiply-adds in registers reach on as many threads, of what has none copying.')
    return '\n'.join([
        *textwrap.wrap(f'{about}. {explained}', 120), '',
        '| | pyops | rate | of the limit | beside | ratio | peak memory: pyops, PyTorch |', '|---|---|---|---|---|---|---|',
        *rows(newest(kernels).get(None), steps, next(iter(scaling.values()), None), newest(translated)), '', ''])


def main(argv=None):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description=__doc__.splitlines()[0])
    p.add_argument('--check', action='store_true', help='write nothing; end with 2 if the table is another')
    p.add_argument('--readme', type=Path, default=results.ROOT / 'README.md', metavar='FILE', help='default README.md')
    p.add_argument('--results', type=Path, default=results.FOLDER, metavar='DIR', help='default bench/results')
    args = p.parse_args(argv)
    try:
        text = args.readme.read_text()
    except OSError as error:
        raise UserError(f'{args.readme}: cannot be read ({error.strerror}); name another file with --readme') from error
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f'{args.readme}: has no lines {BEGIN.strip()} and {END.strip()}; put them where the table shall be')
    new = before + BEGIN + table(args.results) + END + after
    if new == text:
        return
    if args.check:
        raise UserError(f'{args.readme}: its table is not that of {args.results}; write it with: python -m {PROGRAM}')
    args.readme.write_text(new)
    print(f'{args.readme}: table written')


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
