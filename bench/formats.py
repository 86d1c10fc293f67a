"""Train with each number format, and measure the loss and the error of the products.

    python -m bench.formats                         300 steps of a small transformer with each recipe
    python -m bench.formats --only nvfp4 mxfp4      recipes whose names contain one of these words
    python -m bench.formats --search --jobs 2       instead: recipes found by inspect sensitivity, beside recipes by guess
    python -m bench.formats --jobs 2 --save         two runs at once; also write the table to docs/quantization.md, with --only
                                                    these rows of it

The transformer has two blocks with d_model 64 on each side, and learns the embedded corpus in batches of 32 pairs. All runs
have the same initial weights, batches and dropout. The loss is the mean of the last 50 training steps. The errors of products
are measured in one step of the run without rounding: each product of all linear layers, with its two operands rounded as in the
recipe, relative to the exact product.

--search trains each recipe with three seeds. inspect sensitivity finds its recipes in the last step of the run without rounding
with seed 0: the operands of all layers in nvfp4 or fp8, for two limits.
"""
import concurrent.futures
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pyops.errors import UserError, exits_cleanly
from pyops.flags import ArgumentParser, positive_int
from pyops.formats import parse
from pyops.inspect.products import PRODUCTS
from pyops.steplog import RECORD
from scripts import generated

PROGRAM = 'bench.formats'
PAGE = Path(__file__).resolve().parents[1] / 'docs/quantization.md'
STEPS, LAST = 300, 50
TRAIN = ('transformer.train', '-f', 'embedded', '-e', '1', '-b', '32', '--d-model', '64', '--d-ff', '128', '--max-steps',
         str(STEPS), '--threads', '1')


class Recipe(NamedTuple):
    """A recipe for --quant: one format for all operands, others for gradients and weights, a transform of weight gradients."""
    name: str
    forward: str                    # format of x and w
    gradient: str = ''              # of g; '' the same
    wgrad: str = ''                 # of both operands of wgrad; '' the same
    weight: str = ''                # of w, in both of its products; '' the same

    def __str__(self):
        parts = [self.forward]
        if self.gradient:
            parts += [f'dgrad.g={self.gradient}', f'wgrad.g={self.gradient}']
        if self.wgrad:
            parts.append(f'wgrad={self.wgrad}')
        if self.weight:
            parts += [f'fwd.w={self.weight}', f'dgrad.w={self.weight}']
        return ','.join(parts)

    def formats(self, product):
        """Return the formats of the two operands of a product, in the order of PRODUCTS."""
        if product == 'wgrad' and self.wgrad:
            return self.wgrad, self.wgrad
        special = {'g': self.gradient, 'w': self.weight}
        return tuple(special.get(operand) or self.forward for operand in PRODUCTS[product])


RECIPES = [
    Recipe('not rounded', 'none'), Recipe('bf16', 'bf16'), Recipe('fp16', 'fp16'), Recipe('hifp8', 'hifp8'),
    Recipe('E4M3 without a scale', 'e4m3'), Recipe('E5M2 without a scale', 'e5m2'),
    Recipe('mxfp8', 'mxfp8'), Recipe('mxfp8, gradients E5M2', 'mxfp8', 'mxfp8:elem=e5m2'),
    Recipe('mxfp8, scales rounded up', 'mxfp8:scale=rceil'),
    Recipe('mxfp8, blocks of 32 x 32', 'mxfp8:block=32x32'),
    Recipe('fp8, blocks of 128', 'fp8'), Recipe('fp8, weights in 128 x 128', 'fp8', weight='fp8:block=128x128'),
    Recipe('fp8, one scale for a tensor', 'fp8:block=tensor'),
    Recipe('fp8, delayed scaling', 'fp8:delayed'),
    Recipe('fp8, sums of 14 bits', 'fp8:accumulate=14'),
    Recipe('fp8, sums of 14 bits for 128 terms', 'fp8:accumulate=14:promote=128'),
    Recipe('mxfp6, E3M2', 'mxfp6'), Recipe('mxfp6, E2M3', 'mxfp6:elem=e2m3'), Recipe('mxint8', 'mxint8'),
    Recipe('int8', 'int8'), Recipe('int8, a scale per row', 'int8:block=row'),
    Recipe('int8, a scale per column', 'int8:block=column'),
    Recipe('nvfp4', 'nvfp4'), Recipe('nvfp4, amax at 4 or 6', 'nvfp4:scale=mse'),
    Recipe('nvfp4, amax at 4 or 6 by mean error', 'nvfp4:scale=mae'),
    Recipe('nvfp4, blocks of 16 x 16', 'nvfp4:block=16x16'),
    Recipe('nvfp4, weights in 16 x 16', 'nvfp4', weight='nvfp4:block=16x16'),
    Recipe('nvfp4, Hadamard in wgrad', 'nvfp4', wgrad='nvfp4:hadamard=16'),
    Recipe('nvfp4, Hadamard everywhere', 'nvfp4:hadamard=16'),
    Recipe('nvfp4, stochastic gradients', 'nvfp4', 'nvfp4:round=stochastic'),
    Recipe('mxfp4', 'mxfp4'), Recipe('mxfp4, Hadamard everywhere', 'mxfp4:hadamard=32'),
    Recipe('mxfp4, blocks of 32 x 32', 'mxfp4:block=32x32'), Recipe('int4', 'int4')]


GUESSES = [Recipe('fp8', 'fp8'), Recipe('nvfp4', 'nvfp4'), Recipe('nvfp4, amax at 4 or 6', 'nvfp4:scale=mse')]
SEARCHED = 'nvfp4:scale=mse', 'fp8'
LIMITS = (1, 0.98), (0.1, 0.99)     # largest rise of the loss in %, smallest cosine of the gradient
SEEDS = range(3)


class Figures(NamedTuple):
    """loss: mean of the last steps;  sqnr: {product: dB}, inf for exact products"""
    loss: float
    sqnr: dict[str, float]


def run(*arguments):
    """Run a module of this tree and return its standard output.   UserError with its last line if it fails"""
    done = subprocess.run([sys.executable, '-m', *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f'{arguments[0]}: failed: {(done.stderr.splitlines() or ["without a message"])[-1]}')
    return done.stdout


def train(recipe, folder, *flags):
    """Train with a Recipe or a text for --quant, and return the loss."""
    run(*TRAIN, *([] if str(recipe) == 'none' else ['--quant', recipe]), '-c', folder, *flags)
    path, = folder.glob('steps_*.f32')
    losses = np.fromfile(path, RECORD[0]).reshape(-1, RECORD[1])[:, 0]
    assert len(losses) == STEPS, path
    return float(losses[-LAST:].mean(dtype=np.float64))


def errors(recipe, tensors):
    """Return {product: SQNR in dB} over all linear layers of the saved tensors."""
    if recipe.forward == 'none':
        return dict.fromkeys(PRODUCTS, float('inf'))
    found = {}
    for product in PRODUCTS:
        left, right = recipe.formats(product)
        document = json.loads(run('pyops', 'inspect', 'products', tensors, '--products', product, '--formats',
                                  ','.join(dict.fromkeys((left, right))), '--json', '--top', '1'))
        names = document['formats']
        wanted = [names[0], names[-1]]
        found[product] = next(total['sqnr_db'] for total in document['totals'] if total['formats'] == wanted)
    return found


def table(figures):
    """Return the lines of the table.   figures: {recipe: Figures}"""
    yield '| recipe | `--quant` | loss | SQNR of `fwd` | `dgrad` | `wgrad` |'
    yield '|---|---|---:|---:|---:|---:|'
    for recipe, one in figures.items():
        cells = ['exact' if np.isinf(db) else f'{db:.1f} dB' for db in (one.sqnr[product] for product in PRODUCTS)]
        flag = '' if recipe.forward == 'none' else f'`{recipe}`'
        yield f'| {recipe.name} | {flag} | {one.loss:.3f} | {" | ".join(cells)} |'


def recipes_for(checkpoint, folder):
    """Yield (name, recipe for --quant, share of operations in 4 bits) of the recipes that inspect sensitivity finds."""
    for percent, cosine in LIMITS:
        path = folder / f'recipe_{percent}.txt'
        document = json.loads(run('pyops', 'inspect', 'sensitivity', checkpoint, '-f', 'embedded', '--formats',
                                  ','.join(SEARCHED), '--results', folder / 'results.jsonl', '--search', percent,
                                  '--min-cosine', cosine, '--recipe', path, '--json'))
        yield f'found, loss + {percent} %, cosine {cosine}', f'@{path}', document['search']['bits'].get('4', 0.0)


def search_table(losses):
    """Return the lines of the table of --search.   losses: {(name, share of 4 bits): [loss of each seed]}, first not rounded"""
    exact, *_ = losses.values()
    yield f'| recipe | operations in 4 bits | {" | ".join(f"loss, seed {seed}" for seed in SEEDS)} | rise, mean |'
    yield '|---|---:|' + '---:|' * (len(SEEDS) + 1)
    for (name, share), values in losses.items():
        rise = np.mean([100 * (value / one - 1) for value, one in zip(values, exact, strict=True)])
        yield f'| {name} | {100 * share:.0f} % | {" | ".join(f"{value:.3f}" for value in values)} | {rise:.2f} % |'


def search(root, pool):
    """Return the lines of the table of --search."""
    train('none', root / 'searched')
    guesses = [(guess.name, str(guess), float(parse(guess.forward).bits == 4)) for guess in GUESSES]
    recipes = [('not rounded', 'none', 0.0), *guesses, *recipes_for(root / 'searched', root)]
    jobs = {(name, share): [pool.submit(train, recipe, root / f'{number}_{seed}', '--seed', seed) for seed in SEEDS]
            for number, (name, recipe, share) in enumerate(recipes)}
    return search_table({key: [job.result() for job in of_seeds] for key, of_seeds in jobs.items()})


def main(argv=None):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description=__doc__.splitlines()[0], docstring=__doc__)
    p.add_argument('--only', nargs='+', default=[], metavar='WORD', help='only recipes whose names contain one of these words')
    p.add_argument('--jobs', type=positive_int, default=1, metavar='N', help='runs at once, of one thread each (default 1)')
    p.add_argument('--search', action='store_true', help='compare recipes found by inspect sensitivity with recipes by guess')
    p.add_argument('--save', action='store_true', help='write the table to docs/quantization.md')
    args = p.parse_args(argv)
    chosen = [recipe for recipe in RECIPES if not args.only or any(word in recipe.name for word in args.only)]
    if not chosen:
        raise UserError(f'--only {" ".join(args.only)}: no recipe has such a name; the names are '
                        f'{"; ".join(recipe.name for recipe in RECIPES)}')
    with tempfile.TemporaryDirectory() as temporary, concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        root = Path(temporary)
        if args.search:
            return show(search(root, pool), 'formats search', args.save)
        train(RECIPES[0], root / 'tensors_of', '--save-tensors', root / 'tensors', '--save-steps', f'{STEPS - 1}:{STEPS}:1',
              '--save-layers', '*')

        def measured(recipe):
            return Figures(train(recipe, root / str(RECIPES.index(recipe))), errors(recipe, root / 'tensors'))
        figures = dict(zip(chosen, pool.map(measured, chosen), strict=True))
    return show(merged(table(figures), PAGE.read_text()) if args.save and args.only else table(figures), 'formats', args.save)


def merged(lines, page):
    """Return the lines of a table: new ones of some recipes, the page's for the others, in the order of RECIPES."""
    head, rule, *rows = lines
    known = dict.fromkeys(recipe.name for recipe in RECIPES)
    old = page.partition('<!-- formats -->')[2].partition('<!-- /formats -->')[0].strip().splitlines()
    for row in [*old[2:], *rows]:
        name = row.split('|')[1].strip()
        if name in known:
            known[name] = row
    return [head, rule, *filter(None, known.values())]


def show(lines, mark, save):
    """Print a table, and write it to the page if `save`."""
    text = '\n'.join(lines)
    print(text)
    if save:
        generated.update(PAGE, mark, f'\n{text}\n', f'python -m {PROGRAM} --save')


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
