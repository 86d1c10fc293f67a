"""Write the table of README.md from the newest figures in bench/results.

    python -m bench.table                   rewrite the text between <!-- bench --> and <!-- /bench -->
    python -m bench.table --check           write nothing; exit with status 2 if the table is out of date
"""
import textwrap
from pathlib import Path

from bench import results
from pyops.errors import UserError, exits_cleanly
from pyops.flags import ArgumentParser
from scripts.generated import update

PROGRAM = 'bench.table'
# kernels of the table, by the start of their names in bench.kernels
KERNELS = {'gemm 1024 ': 'matrix product 1024 x 1024 x 1024', 'gemm logits': 'matrix product 1152 x 13387 x 256',
           'gemm dx': 'matrix product 1152 x 256 x 13387', 'gemm dweight': 'matrix product 13387 x 256 x 1152',
           'output layer': 'output layer and loss, with gradients', 'gru': 'GRU layer, forward and backward',
           'attention': 'attention, forward and backward'}
# by program, and preset if it is not the first
STEPS = {'seq2seq': 'seq2seq, training step', 'transformer': 'transformer, training step',
         'transformer base': 'transformer `--preset base`, training step', 'mnist': 'mnist, training step'}


def shown(seconds):
    """Three digits."""
    unit, scale = next(pair for pair in (('s', 1), ('ms', 1e3), ('us', 1e6)) if seconds * pair[1] >= 1 or pair[0] == 'us')
    return f'{seconds * scale:.{max(0, 3 - len(str(int(seconds * scale))))}f} {unit}'


def row(what, seconds, rate='', share=None, others=(), memory=None):
    """Return a row.  others: (name, seconds) of each contestant; the fastest is shown; memory: ours and PyTorch's, MiB."""
    best = min(others, key=lambda one: one[1], default=None)
    compared = f'{shown(best[1])}, {best[0]}' if best else ''
    ratio = f'{best[1] / seconds:.2f} x' if best else ''
    mib = f'{memory[0]:.0f} MiB, {memory[1]:.0f} MiB' if memory else ''
    return f'| {what} | {shown(seconds)} | {rate} | {"" if share is None else f"{share:.0%}"} | {compared} | {ratio} | {mib} |'


PLACE = 'machine', 'cpu', 'isa', 'threads', 'torch'         # figures that differ in one are never in one table
TORCH = {'torch': 'PyTorch eager', 'torch-compile': 'PyTorch compiled'}
WHOSE = TORCH | {'jax': 'JAX', 'jax-scan': 'JAX', 'jax-cache': 'JAX, compiled before'}


def contestants(figures):
    """Return the arguments of `row` from the figures of a contest: our seconds, others and memory."""
    theirs = {kind: f for kind, f in figures.items() if kind in WHOSE}
    memory = [f['peak_mib'] for kind, f in theirs.items() if kind in TORCH]
    return dict(seconds=figures['ours']['median_s'], others=[(WHOSE[kind], f['median_s']) for kind, f in theirs.items()],
                memory=(figures['ours']['peak_mib'], min(memory)) if memory else None)


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
            yield row(f'{program}, whole run with start-up', line['runs']['ours'],
                      others=[(WHOSE[kind], s) for kind, s in line['runs'].items() if kind != 'ours'])
    for program, line in sorted(translations.items()):
        yield row(f'{program}, greedy translation of one sentence', **contestants(line['one']))
        rate = f'{line["sentences"] / line["batches"]["ours"]["median_s"]:.0f} sentences/s'
        yield row(f'{program}, greedy translation of {line["sentences"]} in batches', rate=rate, **contestants(line['batches']))
    if scaling:
        (name, ours), (other, alone) = scaling['scaling'].items()
        yield row(f'{scaling["program"]}, training step, {name} compared with {other}', ours['median_s'],
                  others=[(f'pyops on {other}', alone['median_s'])])


def table(folder):
    """Return the text between the marks, from the newest figures of one machine with one version of PyTorch: those of the
    newest kernels, which `make bench` measures first; without any, of the newest figures."""
    trained, translated, kernels = (results.load(name, folder) for name in ('train', 'translate', 'kernels'))
    trained = [line for line in trained if 'precision' not in line]             # steps in float32
    if not (trained or translated or kernels):
        raise UserError(f'{folder}: there are no figures for a table; measure some with: make bench')
    last = max((lines[-1] for lines in ([kernels] if kernels else [trained, translated]) if lines),
               key=lambda line: line['date'])

    def newest(lines):
        """By program and preset, of those from the same machine."""
        return {' '.join(line[key] for key in ('program', 'preset') if key in line): line for line in lines
                if all(line.get(key) == last.get(key) for key in PLACE)}
    steps = newest([line for line in trained if len(line.get('contestants', ())) > 1])
    scaling = newest([line for line in trained if 'scaling' in line])
    used = [newest(kernels).get(''), *steps.values(), *scaling.values(), *newest(translated).values()]
    days = sorted({line['date'] for line in used if line})
    about = (f'{last["threads"]} threads of {last["machine"]}, {last["isa"]} kernels, PyTorch {last["torch"]}; '
             f'{" to ".join(dict.fromkeys((days[0], days[-1])))}')
    with_jax = any('jax' in line['contestants'] for line in steps.values())
    peers = 'the fastest of PyTorch eager, compiled, and JAX where it took part' if with_jax else (
        'the faster of PyTorch eager and compiled')
    explained = (f'Each figure is the median of interleaved runs. Each row is compared with {peers}, '
                 'large products with the faster of PyTorch and NumPy. Limit: peak FMA throughput with the same '
                 'number of threads; for kernels without FMAs, copy bandwidth. Memory: peak of the process, for PyTorch the '
                 'lower of the two.')
    return '\n'.join([
        *textwrap.wrap(f'{about}. {explained}', 120), '',
        '| | pyops | rate | of the limit | compared with | speedup | peak memory: pyops, PyTorch |',
        '|---|---|---|---|---|---|---|',
        *rows(newest(kernels).get(''), steps, next(iter(scaling.values()), None), newest(translated)), '', ''])


def main(argv=None):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description=__doc__.splitlines()[0])
    p.add_argument('--check', action='store_true', help='write nothing; exit with status 2 if the table is out of date')
    p.add_argument('--page', type=Path, default=results.ROOT / 'README.md', metavar='FILE',
                   help='page to update (default README.md)')
    p.add_argument('--results', type=Path, default=results.FOLDER, metavar='DIR',
                   help='folder of the figures (default bench/results)')
    args = p.parse_args(argv)
    update(args.page, 'bench', table(args.results), f'python -m {PROGRAM}', args.check)


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
