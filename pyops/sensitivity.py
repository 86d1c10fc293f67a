"""python -m pyops inspect sensitivity: the effect of rounding one operand of one layer on the loss and the gradient of a step,
and a search for the cheapest recipe.

A step of a trained translator is repeated on the same sentence pairs with the same weights and without dropout; only the number
formats of operands change.  Kernels are deterministic, so every difference is due to rounding.  docs/inspect.md describes the
search.
"""
import dataclasses
import hashlib
import json
import math
import os
import sys
import types
from typing import NamedTuple

import numpy as np

from pyops import backend, formats, quantization, recipe_files
from pyops.errors import UserError, printable
from pyops.files import write_atomically
from pyops.inspect.tables import Column, cannot_write, finite, number, worst_first, write
from pyops.quantization import OPERANDS, SELECTORS, Family, Recipe
from pyops.training import Progress, watch

TOP = 30
SORTS = {'gradient': Column('cosine', 'cosine', False, '.6f'), 'loss': Column('loss %', 'loss_pct', True, '+.4f'),
         'replayed': Column('replayed %', 'replayed_pct', True, '+.4f')}
_UNROUNDED_BITS = 32
_PATIENCE = 8                           # single operands that may fail in a row, before the next format is tried


class Trial(Family):
    """The source of a model's layers whose formats can be changed after the model is built.

    given: {(layer, kind): {operand: Format}}, read by the layers at each call.  All layers with products are the variants that
    round, also while their formats are empty.
    """

    def __init__(self):
        super().__init__(Recipe())
        self.given = {}

    def of(self, layer, kind):
        self.layers[layer] = True
        return self.given.setdefault((layer, kind), _Operands())

    def history(self, name, is_gradient):
        """Return None: a single step has no past."""


class _Operands(dict):
    def __bool__(self):             # the Family creates the variant that rounds if this is true
        return True


class Result(NamedTuple):
    """loss of a step;  cosine of its gradient with the gradient without rounding;  replayed: loss after updates, NaN if the
    Replay has none"""
    loss: float
    cosine: float
    replayed: float = math.nan


class Row(NamedTuple):
    """A step with one rounded operand.   statistics: loss, loss_pct (the rise of the loss in percent), cosine, overflow; with
    updates replayed, replayed_pct (the loss after them, and its rise over the loss after unrounded ones)"""
    layer: str
    operand: str
    format: formats.Format
    statistics: dict


class Replay:
    """A step of a trained translator that can be repeated with other formats.

    translator: a pyops.text.translator.Translator in float32;  pairs: the Pairs of the step, at least one
    store: a _Store, which keeps results between runs
    updates: None, or the _Updates that follow the step, which then show in Result.replayed
    measure({(layer, operand): Format}) -> Result
    """

    def __init__(self, translator, pairs, store=None, updates=None):
        plain, self.trial = translator.model, Trial()
        self.model = type(plain)(dataclasses.replace(plain.config, ops=self.trial), None)
        self.model.params.values[...] = plain.params.values
        self.batch = pairs.batch_of(np.arange(len(pairs)))
        self.operands = [(layer, operand) for layer, kind in self.trial.given for operand in OPERANDS[kind]]
        self._kinds = {operand: kind for kind, operands in OPERANDS.items() for operand in operands}
        self._store, self.steps, self.updates = store or _Store(None, ''), 0, updates
        self._later = [each.batch_of(np.arange(len(each))) for each in updates.pairs] if updates else []
        self._optimizer, self._set_rate = updates.optimizer(self.model.params) if updates else (None, None)
        self.loss, self._gradient = self._step({})
        self.replayed = self._replayed()
        if not math.isfinite(self.loss):
            raise UserError(f'{translator.path}: the loss of these pairs is {self.loss} without rounding; expected a finite '
                            'loss, so give another checkpoint')
        if updates and not math.isfinite(self.replayed):
            raise UserError(f'{translator.path}: the loss after the replayed steps is {self.replayed} without rounding; give a '
                            'smaller --lr')
        self.costs = self._product_costs()

    def measure(self, chosen):
        """Return the Result of a step with these formats, from the store if it has it."""
        text = str(self.recipe(chosen))
        if text not in self._store.results:
            loss, gradient = self._step(chosen)
            norms = math.sqrt(_dot(gradient, gradient) * _dot(self._gradient, self._gradient))
            cosine = _dot(gradient, self._gradient) / norms if norms else math.nan
            self._store.add(text, Result(loss, cosine, self._replayed()))
        return self._store.results[text]

    @staticmethod
    def recipe(chosen):
        """Return the Recipe of {(layer, operand): Format}."""
        layers = {}
        for (layer, operand), fmt in chosen.items():
            layers.setdefault(layer, {})[operand] = fmt
        return Recipe.of_layers(layers)

    def _step(self, chosen):
        """Return the loss and the gradient of all parameters, in float32."""
        for given in self.trial.given.values():
            given.clear()
        for (layer, operand), fmt in chosen.items():
            self.trial.given[layer, self._kinds[operand]][operand] = fmt
        self.steps += 1
        return self._loss_of(self.batch), np.array(backend.get(self.model.params.grads))

    def _loss_of(self, batch):
        """Return the loss of a batch; its gradient is in the parameters."""
        self.model.params.zero_grads()
        loss, ctx = self.model.forward(batch)
        self.model.backward(ctx)
        return float(backend.get(loss)[0])

    def _replayed(self):
        """Update with the gradient of the step just made and with those of the later batches but the last.  Return the loss of
        the last one, and restore the parameters and the state of the optimizer.  NaN without updates."""
        if not self._later:
            return math.nan
        params, optimizer = self.model.params, self._optimizer
        state = [(array, np.array(backend.get(array))) for array in (params.values, params.m, params.v, optimizer.count)]
        for batch in self._later:
            self._set_rate()
            optimizer.step()
            loss = self._loss_of(batch)
        for array, before in state:
            array[...] = backend.put(before)
        return loss

    def _product_costs(self):
        """Return {(layer, product): operations} of a step."""
        from pyops.plan import Plan
        from pyops.profile import operations
        with Plan(self.model.params, run=False, **self.model.arrays()) as plan:
            _, ctx = self.model.forward(self.batch)
            self.model.backward(ctx)
        costs = {}
        for action in plan.actions:
            for note in action.notes[:1]:
                key = f'{note.op}.{note.layer}' if note.layer else note.op, note.product.kind
                costs[key] = costs.get(key, 0) + operations(action, plan.argument)
        plan.close()
        return {key: cost for key, cost in costs.items() if cost and self._products(*key)}

    def _products(self, layer, product):
        """Return the operands of a product of a layer."""
        return [operand for of, operand in self.operands if of == layer and operand.startswith(f'{product}.')]

    def bits(self, chosen):
        """Return {bits: share of the operations of all products whose wider operand has these bits}; unrounded: 32 bits."""
        shares, total = {}, sum(self.costs.values())
        for (layer, product), cost in self.costs.items():
            widths = [chosen[layer, operand].bits if (layer, operand) in chosen else _UNROUNDED_BITS
                      for operand in self._products(layer, product)]
            shares[max(widths)] = shares.get(max(widths), 0.0) + cost / total
        return dict(sorted(shares.items()))


def _dot(a, b):
    return math.fsum(float(np.vdot(a[i:i + 65536].astype(np.float64), b[i:i + 65536])) for i in range(0, len(a), 65536))


class _Store:
    """Results by recipe in a file of JSON lines; the first line identifies weights and pairs.   path None: in memory only"""

    def __init__(self, path, identity):
        self.path, self.results = path and os.fspath(path), {}
        if path is None:
            return
        try:
            with open(path, 'a+b') as file:
                file.seek(0)
                lines = file.read().split(b'\n')
                if lines[0] and json.loads(lines[0]).get('step') != identity:
                    raise UserError(f'{printable(self.path)}: has the results of another checkpoint, of other pairs or '
                                    'of other replayed steps; name another file with --results')
                for line in lines[1:-1]:                    # what follows the last newline is incomplete
                    found = json.loads(line)
                    self.results[found['recipe']] = Result(*(math.nan if found[key] is None else found[key]
                                                             for key in Result._fields if key in found))
                file.truncate(sum(len(line) + 1 for line in lines[:-1]))
                if len(lines) == 1:
                    file.write(json.dumps({'step': identity}).encode() + b'\n')
        except OSError as error:
            raise cannot_write(path, error, '--results') from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f'{printable(self.path)}: not a file of results; name another file with --results') from error

    def add(self, recipe, result):
        self.results[recipe] = result
        if self.path is None:
            return
        line = {'recipe': recipe, **{key: finite(value) for key, value in result._asdict().items()}}
        try:
            with open(self.path, 'ab') as file:
                file.write(json.dumps(line).encode() + b'\n')
        except OSError as error:
            raise cannot_write(self.path, error, '--results') from error


class _Updates(NamedTuple):
    """Updates of the parameters that a Replay makes after its step.

    pairs: the Pairs of the steps after each update, as many as updates; the loss of the last ones is reported
    optimizer: function of the Parameters, that returns the optimizer in its state before the step and a function that sets the
    learning rate of its next step
    """
    pairs: list
    optimizer: object


def _percent(loss, exact):
    """Return the rise of a loss in percent."""
    return 100 * (loss / exact - 1)


def singles(replay, fmts, operands, progress=iter):
    """Return a Row for each of [(layer, operand)] in each format."""
    rows, trials = [], [(key, fmt) for fmt in fmts for key in operands]
    for (layer, operand), fmt in progress(trials):
        result = replay.measure({(layer, operand): fmt})
        statistics = {'loss': result.loss, 'loss_pct': _percent(result.loss, replay.loss), 'cosine': result.cosine}
        if replay.updates:
            statistics |= {'replayed': result.replayed, 'replayed_pct': _percent(result.replayed, replay.replayed)}
        statistics['overflow'] = not all(map(math.isfinite, statistics.values()))
        rows.append(Row(layer, operand, fmt, statistics))
    return rows


class Found(NamedTuple):
    """The result of a search: {(layer, operand): Format}, its Result, and the number of recipes tried."""
    chosen: dict
    result: Result
    tried: int


def search(replay, rows, most_loss_pct, least_cosine, on_trial=lambda count: None):
    """Return the cheapest recipe found whose loss rises by at most this percentage and whose gradient has at least this cosine.
    If the replay has updates, the limit also holds for the loss after them.

    rows: of `singles`.  The formats are tried from the widest to the narrowest, each on the operands that are still wider.
    Operands with a small error for the operations of their product come first.  Bisection finds how many of them can be rounded
    together; then single ones are tried, until _PATIENCE in a row exceed a limit.
    """
    chosen, tried = {}, 0

    def damage(row):
        """The larger share of a limit that the operand uses up alone, per operation of its product."""
        rise, turn = max(row.statistics['loss_pct'], row.statistics.get('replayed_pct', 0.0)), 1 - row.statistics['cosine']
        if row.statistics['overflow']:
            return math.inf
        used = max(rise / max(most_loss_pct, 1e-12), turn / max(1 - least_cosine, 1e-12), 0.0)
        return used / max(replay.costs.get((row.layer, row.operand.partition('.')[0]), 0), 1)

    def fits(trial):
        nonlocal tried
        tried += 1
        on_trial(tried)
        result = replay.measure(trial)
        most = 1 + most_loss_pct / 100
        return (result.loss <= replay.loss * most and result.cosine >= least_cosine
                and (not replay.updates or result.replayed <= replay.replayed * most))

    def extend(keys, fmt):
        nonlocal chosen
        low, high = 0, len(keys) + 1                    # so many fit, so many do not
        middle = len(keys)
        while high - low > 1:
            low, high = (middle, high) if fits(chosen | dict.fromkeys(keys[:middle], fmt)) else (low, middle)
            middle = (low + high) // 2
        chosen = chosen | dict.fromkeys(keys[:low], fmt)
        failed = 0
        for key in keys[high:]:
            if failed == _PATIENCE:
                break
            is_taken = fits(chosen | {key: fmt})
            chosen, failed = (chosen | {key: fmt}, 0) if is_taken else (chosen, failed + 1)

    for fmt in sorted(dict.fromkeys(row.format for row in rows), key=lambda fmt: -fmt.bits):
        wider = [row for row in rows if row.format == fmt and (
            chosen[row.layer, row.operand].bits if (row.layer, row.operand) in chosen else _UNROUNDED_BITS) > fmt.bits]
        extend([(row.layer, row.operand) for row in sorted(wider, key=damage)], fmt)
    return Found(chosen, replay.measure(chosen), tried)


# ---- the command -------------------------------------------------------------------------------------------------------

def run(options):
    """Print the effect of each operand, and with options.search a recipe.  Return exit status 0."""
    from pyops import checkpoint
    from pyops.inspect.products import parse
    from pyops.text.pairs import Pairs
    from pyops.text.translation import open_corpus
    from pyops.text.translator import of_checkpoint
    fmts = parse(options.formats)
    if None in fmts:
        raise UserError(f'--formats {options.formats}: expected formats; none is the step that the others are compared with')
    _check_search(options, fmts)
    _check_replay(options)
    if not options.checkpoint:
        raise UserError("CKPT: expected a checkpoint of a translator, or the folder of its training run, got ''")
    found = checkpoint.find(options.checkpoint, serving=True, parameters_only=not options.replayed_steps,
                            remedy='give a checkpoint of a translator, or the folder of its training run')
    for line in found.warnings:
        print(line, file=sys.stderr)
    translator = of_checkpoint(found, {'quant': 'none', 'compute': 'float32'})
    corpus, _ = open_corpus(options.corpus, options.data_dir)
    count = min(options.pairs, len(corpus))
    vocabularies = translator.source_vocabulary, translator.target_vocabulary

    def pairs_of(step):
        starts = np.arange(count) * len(corpus) + step * len(corpus) // (options.replayed_steps + 1)
        part = vocabularies[0].read_corpus(corpus.take(starts // count))
        return Pairs.encode(part, *vocabularies, translator.num_steps)

    pairs, *later = map(pairs_of, range(options.replayed_steps + 1))
    hashed = hashlib.blake2b(backend.get(translator.model.params.values).tobytes(), digest_size=16)
    identity = f'{hashed.hexdigest()} {pairs.digest()}'
    updates = _updates(found, later, options.lr) if later else None
    if updates:
        for name in sorted(found.tensors):
            hashed.update(found.tensors[name].tobytes())
        identity += f' {hashed.hexdigest()} {options.lr} ' + ' '.join(each.digest() for each in later)
    replay = Replay(translator, pairs, _Store(options.results, identity), updates)
    operands = _operands(replay, options)
    rows = singles(replay, fmts, operands, lambda trials: watch(trials, len(trials), 'sensitivity', 'steps'))
    ordered = worst_first(rows, SORTS[options.sort])
    result = None
    if options.search is not None:
        with Progress(None, 'recipes', label='search ', file=sys.stderr, after=2.0, every=5.0) as progress:
            result = search(replay, rows, options.search, options.min_cosine, progress.update)
    if options.json:
        text = json.dumps(_document(found.path, count, replay, ordered[:options.top], result), allow_nan=False)
    else:
        text = '\n'.join(_table(found.path, count, replay, ordered, options, result))
    write(options.output, text + '\n')
    if result and options.recipe:
        _write_recipe(options.recipe, found.path, replay, result)
    for name, (translate, _, library) in _LIBRARIES.items():
        if result and getattr(options, name):
            _write_translated(name, getattr(options, name), translate, library, found.path, replay, result)
    return 0


def _updates(found, later, lr):
    """Return the _Updates that continue the training of a checkpoint.   lr: learning rate; None: as in the training"""
    from pyops import checkpoint
    from pyops.text import training
    settings, tensors = found.state['settings'], {
        name: tensor for name, tensor in found.tensors.items() if not name.startswith('trained/')}

    def optimizer(params):
        adam = training.adam(types.SimpleNamespace(params=params), settings | {'lr': lr or settings['lr'], 'ema': 0})
        checkpoint.restore(params, adam, tensors, found.path)
        is_given = lr is not None or training.has_an_end(settings)
        return adam, (lambda: None) if is_given else training.Schedule(settings, adam, None).set_rate

    return _Updates(later, optimizer)


# flags that write a recipe for another library -> how, which formats it has, its name
_LIBRARIES = {'recipe_te': (recipe_files.transformer_engine, recipe_files.transformer_engine_has, 'TransformerEngine'),
              'recipe_torchao': (recipe_files.torchao, recipe_files.torchao_has, 'torchao')}


def _flag(name):
    return f'--{name.replace("_", "-")}'


def _check_replay(options):
    if not options.replayed_steps and (options.lr is not None or options.sort == 'replayed'):
        flag = '--lr' if options.lr is not None else '--sort replayed'
        raise UserError(f'{flag}: has no effect without --replayed-steps K; add it')


def _check_search(options, fmts):
    if options.search is None:
        for name in 'recipe', *_LIBRARIES, 'min_cosine':
            if getattr(options, name) is not None:
                raise UserError(f'{_flag(name)}: has no effect without --search PERCENT; add it')
        return
    for name, (_, has, library) in _LIBRARIES.items():
        if getattr(options, name) and not any(map(has, fmts)):
            raise UserError(f'--formats {options.formats}: {library} has none of these, so {_flag(name)} would have an empty '
                            'recipe; add one that docs/quantization.md lists, such as fp8:block=tensor')
    options.min_cosine = 0.98 if options.min_cosine is None else options.min_cosine
    if len({(fmt.hadamard, fmt.option('signs')) for fmt in fmts}) > 1:
        raise UserError(f'--formats {options.formats}: a search needs formats with the same Hadamard transform, since both '
                        'operands of a product have it; add hadamard=16 to all or to none')


def _operands(replay, options):
    """Return the chosen [(layer, operand)].  UserError if a pattern or selector chooses none."""
    layers = list(dict.fromkeys(layer for layer, _ in replay.operands))
    for pattern in options.layers:
        if not any(quantization.matches(layer, (pattern,)) for layer in layers):
            raise UserError(f'--layers {pattern}: no layer has that name; there are {len(layers)}, such as '
                            f'{", ".join(layers[:3])}')
    names = set()
    for selector in options.operands.split(','):
        if selector.strip() not in SELECTORS:
            raise UserError(f'--operands {selector}: no such operand; expected names of a recipe, such as fwd, wgrad.g or '
                            'attn.k')
        names.update(SELECTORS[selector.strip()])
    found = [(layer, operand) for layer, operand in replay.operands
             if operand in names and quantization.matches(layer, options.layers)]
    if not found:
        raise UserError(f'--operands {options.operands}: the chosen layers have none of these operands')
    return found


def _table(path, count, replay, ordered, options, result):
    """Yield the lines of the ranked table and of the result of the search."""
    layers = len({row.layer for row in ordered})
    yield f'{len(ordered)} steps of {printable(path)} on {count} pairs, one operand of {layers} layers rounded in each'
    after = f', after {options.replayed_steps} updates {replay.replayed:.5f}' if replay.updates else ''
    yield f'loss without rounding : {replay.loss:.5f}{after}; worst first by {SORTS[options.sort].title}'
    yield ''
    columns = [column for name, column in SORTS.items() if name != 'replayed' or replay.updates]
    start = '  '.join(f'{column.title:>{column.width}}' for column in columns)
    shown = ordered[:TOP if options.top is None else options.top]
    wide = max(len('format'), *(len(str(row.format)) for row in shown))
    names = max(len('operand'), *(len(row.operand) for row in shown))
    yield f'{start}  {"format":<{wide}}  {"operand":<{names}}  layer'
    for row in shown:
        start = '  '.join(column.cell(row.statistics) for column in columns)
        yield f'{start}  {str(row.format):<{wide}}  {row.operand:<{names}}  {printable(row.layer)}'
    if len(shown) < len(ordered):
        yield f'... and {len(ordered) - len(shown)} more (--top {len(ordered)} shows all)'
    if result:
        yield ''
        yield from _summary(replay, result)
        yield f'--quant {replay.recipe(result.chosen)!s}'


def _summary(replay, found):
    rise = _percent(found.result.loss, replay.loss)
    after = ''
    if replay.updates:
        after = f', after updates {found.result.replayed:.5f} ({_percent(found.result.replayed, replay.replayed):+.4f} %)'
    yield (f'search : {len(found.chosen)} of {len(replay.operands)} operands rounded, {found.tried} recipes tried; loss '
           f'{found.result.loss:.5f} ({rise:+.4f} %){after}, cosine of the gradient {number(found.result.cosine, ".6f")}')
    shares = ', '.join(f'{bits} bits {share:.1%}' for bits, share in replay.bits(found.chosen).items())
    yield f'operations by the wider operand of their product : {shares}'


def _write_recipe(path, checkpoint_path, replay, found):
    lines = [f'# of {printable(os.path.basename(checkpoint_path))}', *(f'# {line}' for line in _summary(replay, found)),
             *str(replay.recipe(found.chosen)).split(';')]
    try:
        write_atomically(path, ('\n'.join(lines) + '\n').encode())
    except OSError as error:
        raise cannot_write(path, error, '--recipe') from error


def _write_translated(name, path, translate, library, checkpoint_path, replay, found):
    """Write the recipe as a file for another library, and print the number of operands that it cannot express."""
    layers = {layer: {} for layer, kind in replay.trial.given if kind == 'linear'}
    others = 0                                              # operands of attention
    for (layer, operand), fmt in found.chosen.items():
        if layer in layers:
            layers[layer][operand] = fmt
        else:
            others += 1
    title = [f'of {printable(os.path.basename(checkpoint_path))}', *_summary(replay, found)]
    title += [f'{others} operands of attention are rounded in pyops alone'] if others else []
    translated = translate(layers, title)
    try:
        write_atomically(path, translated.text.encode())
    except OSError as error:
        raise cannot_write(path, error, _flag(name)) from error
    if lost := len(translated.lost) + others:
        print(f'{printable(path)}: {lost} of {len(found.chosen)} rounded operands have no equivalent in {library}, and stay '
              'unrounded there', file=sys.stderr)


def _document(path, count, replay, rows, found):
    """Return the document for --json.  Values that are not finite are null."""
    return {'checkpoint': os.fspath(path), 'pairs': count, 'loss': replay.loss, 'replayed': finite(replay.replayed),
            'replayed_steps': len(replay.updates.pairs) if replay.updates else 0,
            'steps': [{'layer': row.layer, 'operand': row.operand, 'format': str(row.format), **{
                key: finite(value) for key, value in row.statistics.items() if key != 'overflow'}} for row in rows],
            'search': found and {'recipe': str(replay.recipe(found.chosen)), 'operands': len(found.chosen),
                                 'tried': found.tried, 'loss': finite(found.result.loss), 'cosine': finite(found.result.cosine),
                                 'replayed': finite(found.result.replayed),
                                 'bits': {str(bits): share for bits, share in replay.bits(found.chosen).items()}}}
