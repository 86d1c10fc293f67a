"""GPU benchmark: kernels and products against references and PyTorch, training steps against the CPU and PyTorch.

    python -m bench.gpu                             a table; with --json FILE the figures too
    python -m bench.gpu --only transformer --trial  a smoke test with small sizes (also on the emulator, without torch)

All results are compared with references before they are timed, and must have the same bits after it.  PyTorch runs eagerly,
compiled, and with its step captured in a CUDA graph; the fastest counts.  All contestants share this process and take turns; a
turn is many steps, followed by a synchronisation.
"""
import itertools
import math
import sys
import time
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from bench import gpt2, gpu_attention, gpu_fp8, gpu_products, llmc
from bench.gpu_attention import attention
from bench.gpu_contest import Run, Torch, compare, median_seconds, precision_of, repeated, same_bits
from bench.gpu_fp8 import fp8
from bench.gpu_products import PRECISIONS, choosing, layers, products, reset
from pyops.errors import exits_cleanly
from pyops.flags import ArgumentParser, positive_float, positive_int
from transformer.train import PRESETS

PROGRAM = 'bench.gpu'
FULL = SimpleNamespace(
    turns=7, seconds=0.3, product_turns=3, product_seconds=0.04, memory=2**24, products=gpu_products.FULL,
    activations=gpu_products.ACTIVATIONS, residuals=gpu_products.RESIDUALS,
    layers=gpu_products.FULL_LAYERS, attention=gpu_attention.FULL, fp8=gpu_fp8.FULL,
    source=7939, target=13387, batch=128, pairs=20_000,
    num_steps=9, checked=3, seq2seq={}, transformer={}, base=dict(batch=256, num_steps=64, checked=1),
    # llm.c's padded vocabulary: with a multiple of 8 words, all contestants have aligned rows of logits
    gpt2=dict(batch=16, count=256, checked=1, words=50304), mnist=dict(images=50_000, epochs=10))
TRIAL = SimpleNamespace(
    turns=2, seconds=0.0, product_turns=1, product_seconds=0.0, memory=2**12, products=gpu_products.TRIAL,
    activations=gpu_products.TRIAL_ACTIVATIONS, residuals=gpu_products.TRIAL_RESIDUALS,
    layers=gpu_products.TRIAL_LAYERS, attention=gpu_attention.TRIAL, fp8=gpu_fp8.TRIAL,
    source=20, target=30, batch=4, pairs=40, num_steps=5,
    checked=3, seq2seq=dict(embedding=8, hidden=8), transformer=dict(d_model=16, d_ff=8),
    base=dict(batch=2, num_steps=8, d_model=16, d_ff=32, heads=2, layers=1, checked=1),
    gpt2=dict(batch=2, count=8, positions=16, words=128, layers=2, heads=2, width=32), mnist=dict(images=400, epochs=1))

# Relative errors of a training step: of the first loss, of later ones, which Adam drives apart where rounding turns the sign of
# a gradient, and of the gradient, relative to its norm.
LOSS_TOLERANCE = {'fp32': 1e-5, 'tf32': 2**-8, 'bf16': 2**-6, 'fp8': 2**-6}
LATER_TOLERANCE = {'fp32': 1e-3, 'tf32': 0.05, 'bf16': 0.05, 'fp8': 0.05}
GRADIENT_TOLERANCE = {'fp32': 1e-3, 'tf32': 0.05, 'bf16': 0.2, 'fp8': 0.2}
# Dense products of bfloat16, FLOP/s, from NVIDIA's data sheets, by a part of the device's name; the first that fits.
PEAKS = {'H100 PCIe': 756e12, 'H100 NVL': 835e12, 'H100': 989e12, 'H200 NVL': 835e12, 'H200': 989e12, 'A100': 312e12}

TORCH_TOLERANCE = 0.1       # of its loss, whose dropout has other random numbers


def parse(argv):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description=__doc__.splitlines()[0])
    p.add_argument('--only', choices=list(SECTIONS), action='append', help='one part of it; may be given several times')
    p.add_argument('--json', metavar='FILE', help='write all figures there, after each one')
    p.add_argument('--limit', type=positive_int, metavar='SECONDS', help='begin no figure after this time')
    p.add_argument('--peak', type=positive_float, metavar='TFLOPS',
                   help="of the device, in dense products of bfloat16 (default: from the device's name, if it is known)")
    p.add_argument('--trial', action='store_true', help='small sizes, to see that it runs')
    p.add_argument('--no-torch', action='store_true', help='ours alone')
    args = p.parse_args(argv)
    if not args.no_torch and find_spec('torch') is None:
        print('torch is not installed: ours alone', file=sys.stderr)
        args.no_torch = True
    return args


# ---- memory ----------------------------------------------------------------------------------------------------------

def memory(run):
    """Time memory-bound kernels, compare their results with the CPU's and their bandwidth with a copy."""
    from pyops import backend
    gpu, torch, sizes = run.gpu, run.torch, run.sizes
    n, rng = sizes.memory, np.random.default_rng(0)
    C, V = 256, max(sizes.memory // 256 // 2, 2)
    given = {name: rng.random(n, np.float32) for name in 'xymvg'}
    given |= dict(one=np.array([1], np.float32), lr=np.array([1], np.float32), norm=np.array([1], np.float32),
                  step=np.array([1], np.int64), ids=rng.integers(0, V, n // C).astype(np.int32),
                  weight=np.ones(C, np.float32), bias=np.zeros(C, np.float32), mean=np.zeros(n // C, np.float32),
                  rstd=np.zeros(n // C, np.float32))
    kernels = {     # bytes of traffic, the results, and the launch, with the names of arrays
        'copy (scale)': (8 * n, 'y', ('scale', 'y', 'x', 'one', n)),
        'adam': (28 * n, 'xmv', ('adam', 'x', 'm', 'v', 'g', None, 'norm', 'step', 'lr', n, 1.0, 0.9, 0.999, 1e-8, 0.0, 0)),
        'dropout': (8 * n, 'y', ('dropout', 'y', 'x', 'step', n, 0.2, 7)),
        'layer_norm_forward': (8 * n, ('y', 'mean', 'rstd'), ('layer_norm_forward', 'y', 'mean', 'rstd', 'x', 'weight', 'bias',
                                                              n // C, C, 1e-5)),
        'embedding_forward': (8 * n, 'y', ('embedding_forward', 'y', 'm', 'ids', n // C, n // C, C)),
    }
    arrays = {name: backend.put(array) for name, array in given.items()}
    if torch:
        a, b = torch.put(given['x']), torch.put(given['y'])
        theirs = median_seconds({'torch copy': (repeated(lambda: b.copy_(a)), torch.wait)}, sizes.turns, sizes.seconds)
        run.report['torch_copy_bytes_per_s'] = 8 * n / theirs['torch copy']
    copy = run.report.get('torch_copy_bytes_per_s', 0.0)
    for what, (moved, outputs, (kernel, *arguments)) in kernels.items():
        figure = run.figure(what, floats=n)
        if figure is None:
            continue
        here = [arrays.get(value, value) if isinstance(value, str) else value for value in arguments]

        def result(kernel=kernel, here=here, outputs=outputs):
            for name, array in arrays.items():          # earlier kernels changed some
                array[...] = given[name]
            gpu.launch(kernel, *here)
            return {name: backend.get(arrays[name]).copy() for name in outputs}
        host = {name: array.copy() for name, array in given.items()}
        backend.HOST.launch(kernel, *(host[value] if isinstance(value, str) else value for value in arguments))
        first = result()
        compare(run, figure, first, {name: host[name] for name in outputs}, 1e-5)
        seconds = median_seconds({'ours': (repeated(lambda kernel=kernel, here=here: gpu.launch(kernel, *here)),
                                           gpu.synchronize)}, sizes.turns, sizes.seconds)
        same_bits(run, figure, result(), first)
        rate = moved / seconds['ours']
        copy = max(copy, rate) if kernel == 'scale' else copy
        run.timed(figure, seconds, bytes_per_s=rate, of_copy=rate / copy)
        run.show(figure, f'{rate / 1e9:8.0f} GB/s {rate / copy:7.1%} of a copy')


# ---- training --------------------------------------------------------------------------------------------------------

class Trained:
    """A model and its optimizer on the current device, and the first steps of its training.

    steps(rows) trains and returns its loss, or a list of losses.  around(call) calls call() with other settings of the GPU.
    """

    def __init__(self, model, optimizer, steps, batches, around=lambda call: call()):
        from pyops import backend
        self.model, self.optimizer, self.steps, self.batches, self.around = model, optimizer, steps, batches, around
        self.initial = backend.get(model.params.values).copy()
        self.weights = {name: backend.get(array).copy() for name, array in model.params.arrays().items()}

    def first(self, count):
        """Train from the initial state.  Return the losses, the gradients after the first step, and the parameters."""
        return self.around(lambda: self._first(count))

    def _first(self, count):
        from pyops import backend
        reset(self.model.params, self.optimizer, self.initial)
        losses, gradients = [], None
        for rows in self.batches[:count]:
            losses += np.ravel([backend.get(loss) for loss in _list(self.steps(rows))]).tolist()
            if gradients is None:
                gradients = backend.get(self.model.params.grads).copy()
        return dict(losses=np.array(losses, np.float32), gradients=gradients,
                    values=backend.get(self.model.params.values).copy())

    def repeated(self, rows):
        """Return run(n), which trains on rows() n times."""
        run = repeated(lambda: self.steps(rows()))
        return lambda n: self.around(lambda: run(n))

    def close(self):
        self.steps.close()


def peak_of(model, tflops=None):
    """Return the peak of bfloat16 products in FLOP/s: the given one, else by the name of the device; None if it is unknown."""
    return 1e12 * tflops if tflops else next((peak for name, peak in PEAKS.items() if name in model), None)


def rate(run, figure):
    """Add FLOP/s of a timed step, in bf16 their share of the peak, and of a language model the tokens a second of each
    contestant, to its figure.  Return a note with ours and with memory.

    FLOP/s count the products of the step; memory: bytes of arrays of a training, beyond those before it.
    """
    figure['flops_per_s'] = figure['flops'] / figure['ours_s']
    note = f'{figure["flops_per_s"] * 1e-12:.3g} TFLOP/s'
    if run.report['peak'] and figure['what'].endswith('bf16'):
        figure['of_peak'] = figure['flops_per_s'] / run.report['peak']
        note += f', {figure["of_peak"]:.1%} of the peak'
    if 'tokens' in figure:
        figure['tokens_per_s'] = {name: figure['tokens'] / seconds for name, seconds in figure['all_s'].items()}
        note += f', {figure["tokens_per_s"]["ours"]:.0f} tokens/s'
    run.save()
    return note + ''.join(f', {name} {size / 2**20:.0f} MiB' for name, size in figure['memory'].items())


def _list(losses):
    return losses if isinstance(losses, list) else [losses]


def check_training(run, figure, first, reference, precision):
    """Compare the first steps of a training with a reference."""
    off = np.abs(first['losses'] / reference['losses'] - 1)
    run.check(figure, 'first loss', off[0], LOSS_TOLERANCE[precision])
    run.check(figure, f'{len(off)} losses', off.max(), LATER_TOLERANCE[precision])
    ours, theirs = (result['gradients'].astype(np.float64) for result in (first, reference))
    run.check(figure, 'gradients', np.linalg.norm(ours - theirs) / np.linalg.norm(theirs), GRADIENT_TOLERANCE[precision])


class Contest:
    """Our training steps against PyTorch's, timed in two contests: eager and as a graph, then compiled, which takes long.

    trained: a Trained; first: the result of its first(count); ours: run(n).
    torch_step(compiled) -> step(rows) -> loss; rows() -> indices (k, B) on PyTorch's device.
    others: {name: (Trained, run(n))}, the same training with other settings, which must have the same bits.
    """

    def __init__(self, run, figure, trained, count, first, precision, ours, torch_step, rows, others=None):
        self.run, self.figure, self.trained, self.count, self.first = run, figure, trained, count, first
        self.precision, self.torch_step, self.rows = precision, torch_step, rows
        self.others = {name: other for name, (other, _) in (others or {}).items()}
        self.ours = {name: (step, run.gpu.synchronize)
                     for name, step in {'ours': ours, **{name: step for name, (_, step) in (others or {}).items()}}.items()}

    def against(self, kind):
        """Time the steps against PyTorch's of this kind, eager or compiled.

        Afterwards our training starts again and must have the same bits.  PyTorch's first loss must be close to ours.
        """
        contestants, sizes = dict(self.ours), self.run.sizes
        if self.run.torch:
            contestants |= self._torch(kind)
        timed = median_seconds(contestants, sizes.turns, sizes.seconds)
        same_bits(self.run, self.figure, self.trained.first(self.count), self.first)
        for name, other in self.others.items():
            results = {f'{what}, {name},': array for what, array in other.first(self.count).items()}
            same_bits(self.run, self.figure, results, {f'{what}, {name},': array for what, array in self.first.items()})
            self.figure[f'{name.replace(" ", "_")}_s'] = timed.pop(name)
        self.run.timed(self.figure, timed)

    def finish(self, note):
        """Time the steps against compiled PyTorch, on a GPU and if time is left, and print the figure.  note(run, figure)"""
        torch = self.run.torch
        if torch and torch.has_gpu and not self.run.is_over():
            self.against('compiled')
        elif torch and torch.has_gpu:
            print(f'{self.figure["what"]}: torch compiled is left out: the time limit is over')
        others = {name: self.figure[f'{name.replace(" ", "_")}_s'] for name in self.others}
        notes = [note(self.run, self.figure), *(f'{name} {1e3 * seconds:.3f} ms' for name, seconds in others.items())]
        self.run.show(self.figure, ', '.join(notes))
        for trained in self.trained, *self.others.values():
            trained.close()

    def _torch(self, kind):
        torch = self.run.torch
        before = torch.start_peak()
        step = self.torch_step(kind == 'compiled')
        try:
            with torch.precision(self.precision):
                loss = float(step(self.rows()[0]))
                step(self.rows()[0])                    # its peak contains Adam's moments
        except Exception as error:                      # report and leave out a contestant that fails
            print(f'torch {kind}: left out ({" ".join(str(error).split())[:200]})', file=sys.stderr)
            return {}
        if torch.has_gpu and 'memory' in self.figure:
            self.figure['memory'][f'torch {kind}'] = torch.peak() - before
        self.run.check(self.figure, f'loss of torch {kind}', abs(loss / self.first['losses'][0] - 1), TORCH_TOLERANCE)
        return torch.contestants(step, self.rows, self.precision, kind)


class Translator(NamedTuple):
    """A training of a translator on random sentences.  module: of bench, with ours() and theirs();  preset: settings of the
    program."""
    what: str
    module: str
    lr: float
    preset: dict = {}

    def config(self, sizes, own):
        """Return the Config.  own: {name: setting}, of `sizes`"""
        settings = {name: value for name, value in self.preset.items() if name not in ('lr', 'warmup')}
        settings |= dict(num_steps=sizes.num_steps) | own
        return self.ours()[0](sizes.source, sizes.target, **settings)

    def ours(self):
        return import_module(f'bench.{self.module}').ours()

    def theirs(self):
        return import_module(f'bench.{self.module}').theirs()

    def about(self, config, batch):
        """Return the sizes of a step, for a report."""
        return dict(batch=batch, num_steps=config.num_steps)

    def data(self, rng, config, count):
        """Return Pairs of `count` random sentences with realistic sizes; padded, 15 % is padding."""
        from pyops.text.pairs import Pairs
        return Pairs(*(random_sentences(rng, count, config.num_steps, words)
                       for words in (config.source_size, config.target_size)), config.num_steps)

    def trained(self, config, pairs, batches, around=lambda call: call()):
        """Return the Trained of a new model on the current device.  around: of Trained."""
        from bench.translation import planned_steps
        from pyops.optim import Adam
        model = self.ours()[1](config)
        optimizer = Adam(model.params, self.lr, max_norm=1.0)
        return Trained(model, optimizer, planned_steps(model, pairs, self.lr, optimizer), batches, around)

    def flops(self, trained, rows):
        """Return the operations of the products of a step on these rows, without fillers."""
        from bench.translation import flops_of_step
        return flops_of_step(trained.steps, rows)

    def torch_batches(self, torch, config, pairs):
        """Return batch(rows), the tensors of these rows as PyTorch's step takes them."""
        t = torch.torch
        from pyops.text.vocabulary import BOS
        tables = [torch.put(x.padded(config.num_steps)).long() for x in (pairs.source, pairs.labels)]

        def batch(rows):
            source, labels = (table[rows].T for table in tables)
            target = t.cat([t.full_like(labels[:1], BOS), labels[:-1]])
            return source.contiguous(), target, labels.contiguous()
        return batch

    def torch_step(self, torch, config, weights, compiled):
        """Return step(*batch) -> loss of PyTorch's model with the initial weights of a Trained."""
        from bench.torch_step import copy_weights, make_step
        twin = copy_weights(self.theirs()(config), weights).to(torch.device)
        return make_step(torch.torch.compile(twin) if compiled else twin, self.lr, on_gpu=torch.has_gpu)


class LanguageModel(NamedTuple):
    """A training of GPT-2 as in bench.gpt2, on sequences of random tokens; methods as of Translator, `config` is a llmc.Size.

    Sequences are as long as the table of positions.
    """
    what: str

    def config(self, sizes, own):
        return llmc.Size(**own)

    def about(self, config, batch):
        return dict(batch=batch, num_steps=config.positions, tokens=batch * config.positions)

    def data(self, rng, config, count):
        return rng.integers(0, config.words, count * config.positions + 1).astype(np.int32)

    def trained(self, config, tokens, batches, around=lambda call: call()):
        from bench.gpt2_model import GPT2, training_steps
        from pyops.optim import AdamW
        model = GPT2(config, llmc.random_tensors(config))
        optimizer = AdamW(model.params, gpt2.LR, weight_decay=0.0)
        return Trained(model, optimizer, training_steps(model, optimizer, tokens, config.positions), batches, around)

    def flops(self, trained, rows):
        from bench.translation import flops_of
        return flops_of(trained.steps.plan(rows))       # the plan of the steps so far, which have computed the lengths

    def torch_batches(self, torch, config, tokens):
        ids, labels = (torch.put(part.reshape(-1, config.positions)).long() for part in (tokens[:-1], tokens[1:]))
        return lambda rows: (ids[rows], labels[rows])

    def torch_step(self, torch, config, weights, compiled):
        from bench.torch_gpt2 import TorchGPT2, make_step
        twin = TorchGPT2(config, llmc.random_tensors(config)).to(torch.device)
        return make_step(torch.torch.compile(twin) if compiled else twin, gpt2.LR, on_gpu=torch.has_gpu)


TRAININGS = {'seq2seq': Translator('seq2seq step', 'seq2seq', 0.005),
             'transformer': Translator('transformer small step', 'transformer', 0.001),
             'base': Translator('transformer base step', 'transformer', PRESETS['base']['lr'], PRESETS['base']),
             'gpt2': LanguageModel('GPT-2 step')}


class Sized(NamedTuple):
    """A training at its sizes.  batch: rows of a batch;  checked: steps that are compared;  count: rows of the data"""
    training: object
    config: object
    batch: int
    checked: int
    count: int


def training_of(name, sizes):
    """Return the Sized training of this name."""
    own = dict(getattr(sizes, name))
    batch, checked = own.pop('batch', sizes.batch), own.pop('checked', sizes.checked)
    count = own.pop('count', max(sizes.pairs, 4 * batch))
    return Sized(TRAININGS[name], TRAININGS[name].config(sizes, own), batch, checked, count)


def training_contest(run, name, precision):
    """Check and time the training steps of a model on random data.

    Where the device can start kernels early, the same steps are also timed with early starts.  Return finish(), which times
    them against compiled PyTorch: after the checks of all precisions.
    """
    from pyops import backend
    gpu, torch, sizes, rng = run.gpu, run.torch, run.sizes, np.random.default_rng(0)
    training, config, batch, checked, count = training_of(name, sizes)
    figure = run.figure(f'{training.what} {precision}', **training.about(config, batch))
    if figure is None:
        return lambda: None
    data = training.data(rng, config, count)
    order = rng.permutation(count)[:count // batch * batch].reshape(-1, batch)

    def with_early_start(choice):
        return training.trained(config, data, order, lambda call: choosing(gpu, 'early_start', choice, call)())

    if ('reference', name) not in run.kept:             # in float32 for each precision
        with backend.on(backend.HOST):
            there = training.trained(config, data, order)
            run.kept['reference', name] = there.first(checked)
            run.kept['flops', name] = training.flops(there, order[0])
            there.close()
    figure['flops'] = run.kept['flops', name]
    others, place = {}, iter(range(2**62))

    def next_rows():
        return order[next(place) % len(order)]
    with precision_of(precision, stores_bf16=True):
        def start():
            trained = with_early_start('never')
            return trained, trained.first(checked)
        (here, first), needed = gpu.with_peak(start)
        figure['memory'] = {'ours': needed}
        check_training(run, figure, first, run.kept['reference', name], precision)
        if can_start_early(gpu):
            early = with_early_start('always')
            same_bits(run, figure, early.first(checked), first)
            others['early start'] = early, early.repeated(next_rows)
    torch_step = rows = None
    if torch:
        indices, torch_batch, counter = torch.put(order), training.torch_batches(torch, config, data), iter(range(2**62))

        def rows():
            return indices[next(counter) % len(order), None]

        def torch_step(compiled):
            step = training.torch_step(torch, config, here.weights, compiled)
            return lambda chosen: step(*torch_batch(chosen))
    contest = Contest(run, figure, here, checked, first, precision, here.repeated(next_rows), torch_step, rows, others)
    with precision_of(precision, stores_bf16=True):
        contest.against('eager')

    def finish():
        with precision_of(precision, stores_bf16=True):
            contest.finish(rate)
    return finish


def can_start_early(gpu):
    """Return whether kernels of this device can start before the last one has ended."""
    try:
        choosing(gpu, 'early_start', 'always', lambda: None)()
    except ValueError:
        return False
    return True


def random_sentences(rng, n, steps, words):
    """Return n sentences of random ids above the special ones; on average they are 15 % shorter than `steps` tokens."""
    from pyops.text.pairs import Ragged
    from pyops.text.vocabulary import SPECIALS
    lengths = np.clip(rng.normal(0.85 * steps, 0.15 * steps, n).round(), 1, steps).astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return Ragged(rng.integers(len(SPECIALS), words, starts[-1]).astype(np.int32), starts)


def training(name, precisions=PRECISIONS):
    def section(run):
        for finish in [training_contest(run, name, precision) for precision in precisions]:
            finish()
    return section


def mnist(run):
    """Check and time the training steps on random digits, as many in a graph as in training, and time a whole training."""
    from mnist.train import AT_ONCE, AT_ONCE_ON_GPU, prepare
    from pyops import backend
    from pyops.data.batches import batches
    from pyops.steps import Steps
    gpu, torch, sizes = run.gpu, run.torch, run.sizes
    n, epochs, rng = sizes.mnist['images'], sizes.mnist['epochs'], np.random.default_rng(0)
    images = (rng.integers(0, 256, (n, 784)) * (rng.random((n, 784)) < 0.2)).astype(np.uint8)
    labels = rng.integers(0, 10, n).astype(np.int32)
    checked, at_once = (math.gcd(steps, n // 100) for steps in (AT_ONCE, AT_ONCE_ON_GPU))       # steps per graph
    figure = run.figure(f'mnist, {at_once} steps of 100 images')
    if figure is None:
        return

    def trained():
        model, optimizer, step, inputs = prepare(images, labels)
        steps = Steps(lambda rows: [losses for losses, _ in step.each(rows, 100)], model.params, **inputs, **optimizer.arrays())
        return Trained(model, optimizer, steps, list(batches(n, 100, 0, 0, at_once=checked)))
    with backend.on(backend.HOST):
        reference = trained().first(2)
    here = trained()
    first = here.first(2)
    check_training(run, figure, first, reference, 'fp32')

    def stream():
        for epoch in itertools.count():
            yield from batches(n, 100, 0, epoch, at_once=at_once)
    order = stream()
    torch_step = rows = None
    if torch:
        from bench.torch_mnist import TorchMLP
        from bench.torch_step import copy_weights, make_step
        t = torch.torch
        x, y = torch.put(images).float() / 255, torch.put(labels).long()
        rest = []

        def rows():
            if not rest:
                rest.extend(t.randperm(n, device=torch.device).reshape(-1, at_once, 100))
            return rest.pop()

        def torch_step(compiled):
            twin = copy_weights(TorchMLP(), here.weights).to(torch.device)
            train = make_step(t.compile(twin) if compiled else twin, 0.001, on_gpu=torch.has_gpu)
            return lambda chosen: train(x[chosen], y[chosen])
    contest = Contest(run, figure, here, 2, first, 'fp32', repeated(lambda: here.steps(next(order))), torch_step, rows)
    contest.against('eager')
    start = time.perf_counter()
    for epoch in range(epochs):
        for chosen in batches(n, 100, 0, epoch, at_once=at_once):
            here.steps(chosen)
    gpu.synchronize()
    run.timed(figure, {'ours': figure['ours_s']}, training_s=time.perf_counter() - start)
    contest.finish(lambda run, figure: f'{epochs} epochs of {n} images in {figure["training_s"]:.3f} s')


def fp8_training(run):
    """Check the first training steps of the transformer in FP8, as with --precision fp8 and with all else in float32, against
    the same formats emulated in float32 on the GPU, and time them; bit for bit again after the timing."""
    from pyops.quantization import FP8_RECIPE, Recipe, family
    rng, recipe = np.random.default_rng(0), Recipe.parse(FP8_RECIPE)
    training, config, batch, checked, count = training_of('transformer', run.sizes)
    data, order = training.data(rng, config, count), rng.permutation(count)[:count // batch * batch].reshape(-1, batch)

    def trained(fp8):
        return training.trained(replace(config, ops=family(recipe, fp8=fp8)), data, order)
    reference = None
    for rest in ('fp32', 'bf16'):
        figure = run.figure(f'{training.what} fp8, else {rest}', **training.about(config, batch))
        if figure is None:
            return
        if reference is None:
            there = trained(False)
            reference = there.first(checked)
            there.close()
        with precision_of('fp8' if rest == 'bf16' else rest, stores_bf16=rest == 'bf16'):
            here = trained(True)
            first = here.first(checked)
            check_training(run, figure, first, reference, 'fp8')
            seconds = median_seconds({'ours': (here.repeated(lambda: order[0]), run.gpu.synchronize)}, run.sizes.turns,
                                     run.sizes.seconds)
            same_bits(run, figure, here.first(checked), first)
            run.timed(figure, seconds)
            run.show(figure)
            here.close()


def fp8_section(run):
    fp8(run)
    fp8_training(run)


SECTIONS = {'products': products, 'layers': layers, 'attention': attention, 'fp8': fp8_section, 'memory': memory,
            'mnist': mnist, 'seq2seq': training('seq2seq'), 'transformer': training('transformer'),
            'base': training('base', ['bf16']), 'gpt2': training('gpt2', ['bf16'])}


def main(argv=None):
    start, args = time.monotonic(), parse(argv)
    from pyops.ndarray import use_gpu
    gpu, torch, sizes = use_gpu(), Torch(not args.no_torch), TRIAL if args.trial else FULL
    version = torch.torch.__version__ if torch else None
    print(gpu.model + (f', PyTorch {version}' if torch else ''), flush=True)
    run = Run(gpu, torch, sizes, dict(device=gpu.model, torch=version, date=time.strftime('%Y-%m-%d'),
                                      peak=peak_of(gpu.model, args.peak)), args.json,
              start + args.limit if args.limit else math.inf)
    for name in args.only or SECTIONS:
        run.section(name)
        SECTIONS[name](run)
    for line in run.report['wrong']:
        print(f'WRONG {line}')
    return run.status()


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        sys.exit(main())
