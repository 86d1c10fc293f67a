"""GPU benchmark: kernels against memory bandwidth, matrix products and training steps against PyTorch.

    python -m bench.gpu                             a table; with --json FILE the figures too
    python -m bench.gpu --only transformer --trial  a smoke test with small sizes (also on the emulator, without torch)

PyTorch runs eagerly, compiled, and with its step captured in a CUDA graph; the fastest counts.  All contestants share this
process and take turns; a turn is many steps, followed by a synchronisation.
"""
import contextlib
import json
import math
import sys
import time
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np

from pyops.errors import UserError, exits_cleanly
from pyops.flags import ArgumentParser

PROGRAM = 'bench.gpu'
PRECISIONS = 'fp32', 'tf32', 'bf16'
FULL = SimpleNamespace(
    turns=7, seconds=0.3, memory=2**24, product=8192, source=7939, target=13387, batch=128, pairs=20_000, num_steps=9,
    layer=dict(rows=1152, inner=256), seq2seq={}, transformer={},
    base=dict(batch=256, num_steps=64), mnist=dict(images=50_000, epochs=10))
TRIAL = SimpleNamespace(
    turns=2, seconds=0.0, memory=2**12, product=64, source=20, target=30, batch=4, pairs=40, num_steps=5,
    layer=dict(rows=12, inner=16), seq2seq=dict(embedding=8, hidden=8), transformer=dict(d_model=16, d_ff=8),
    base=dict(batch=2, num_steps=8, d_model=16, d_ff=32, heads=2, layers=1),
    mnist=dict(images=200, epochs=1))


def parse(argv):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description=__doc__.splitlines()[0])
    p.add_argument('--only', choices=list(SECTIONS), action='append', help='one part of it; may be given several times')
    p.add_argument('--json', metavar='FILE', help='write all figures there')
    p.add_argument('--trial', action='store_true', help='small sizes, to see that it runs')
    p.add_argument('--no-torch', action='store_true', help='ours alone')
    args = p.parse_args(argv)
    if not args.no_torch and find_spec('torch') is None:
        print('torch is not installed: ours alone', file=sys.stderr)
        args.no_torch = True
    return args


# ---- contests --------------------------------------------------------------------------------------------------------

def median_seconds(contestants, sizes):
    """Time contestants {name: (run(n), wait())}: n repetitions, and synchronisation.  Return {name: seconds per repetition}."""
    repeats, seconds = {}, {name: [] for name in contestants}
    for name, (run, wait) in contestants.items():
        run(3)                                          # warm up: compile, capture, load
        wait()
        start = time.perf_counter()
        run(3)
        wait()
        one = (time.perf_counter() - start) / 3
        repeats[name] = max(1, math.ceil(sizes.seconds / max(one, 1e-6)))
    for _ in range(sizes.turns):
        for name, (run, wait) in contestants.items():
            start = time.perf_counter()
            run(repeats[name])
            wait()
            seconds[name].append((time.perf_counter() - start) / repeats[name])
    return {name: float(np.median(s)) for name, s in seconds.items()}


def repeated(call):
    """Return run(n), which calls call() n times."""
    def run(n):
        for _ in range(n):
            call()
    return run


class Torch:
    """The PyTorch contestants; false if PyTorch is not used."""

    def __init__(self, wanted):
        self.torch = None
        if wanted:
            import torch
            self.torch, self.has_gpu = torch, torch.cuda.is_available()
            self.device = 'cuda' if self.has_gpu else 'cpu'

    def __bool__(self):
        return self.torch is not None

    def wait(self):
        if self.has_gpu:
            self.torch.cuda.synchronize()

    @contextlib.contextmanager
    def precision(self, name):
        """Inside the block, float32 products have the precision of ours; bf16 means autocast."""
        torch = self.torch
        torch.set_float32_matmul_precision('highest' if name == 'fp32' else 'high')
        torch.backends.cudnn.allow_tf32 = name != 'fp32'
        with torch.autocast(self.device, torch.bfloat16) if name == 'bf16' else contextlib.nullcontext():
            yield

    def contestants(self, make_step, batches, precision, compiles=True):
        """Return {name: (run, wait)} for the contestants that work.

        make_step(compiled) -> step(*batch); batches() -> a batch of device tensors.
        """
        made = {}
        kinds = {'eager': self._plain, 'compiled': self._plain}
        if self.has_gpu:
            kinds |= {'graph': self._graph, 'compiled graph': self._graph}
        for name, make in kinds.items():
            if 'compiled' in name and not (compiles and self.has_gpu):
                continue
            try:
                made[f'torch {name}'] = make(make_step('compiled' in name), batches, precision), self.wait
            except Exception as error:                  # report and leave out a contestant that fails
                print(f'torch {name}: left out ({" ".join(str(error).split())[:200]})', file=sys.stderr)
        return made

    def _plain(self, step, batches, precision):
        def run(n):
            with self.precision(precision):
                for _ in range(n):
                    step(*batches())
        run(2)
        return run

    def _graph(self, step, batches, precision):
        torch = self.torch
        place = [tensor.clone() for tensor in batches()]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), self.precision(precision):
            for _ in range(3):
                step(*place)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), self.precision(precision):
            step(*place)

        def run(n):
            for _ in range(n):
                for to, value in zip(place, batches(), strict=True):
                    to.copy_(value)
                graph.replay()
        run(2)
        return run


def best(seconds):
    """Return the name of the fastest PyTorch contestant, or None."""
    theirs = {name: s for name, s in seconds.items() if name.startswith('torch')}
    return min(theirs, key=theirs.get) if theirs else None


def compare(what, seconds, **more):
    """Print a line of the report and return its figures."""
    opponent = best(seconds)
    ratio = seconds[opponent] / seconds['ours'] if opponent else None
    figure = dict(what=what, ours_s=seconds['ours'], all_s=seconds, best=opponent, ratio=ratio) | more
    versus = f'{opponent} {1e3 * seconds[opponent]:10.3f} ms {ratio:6.2f} x' if opponent else ''
    print(f'{what:58} ours {1e3 * seconds["ours"]:10.3f} ms   {versus}', flush=True)
    return figure


# ---- memory and products ---------------------------------------------------------------------------------------------

def memory(gpu, torch, sizes):
    """Time memory-bound kernels and compare their bandwidth with a copy."""
    from pyops import backend
    n, rng = sizes.memory, np.random.default_rng(0)
    C, V = 256, max(sizes.memory // 256 // 2, 2)
    x, y, m, v, g = (backend.put(rng.random(n, np.float32)) for _ in range(5))
    one, step, lr, norm = (backend.put(np.array([1], t)) for t in (np.float32, np.int64, np.float32, np.float32))
    ids = backend.put(rng.integers(0, V, n // C).astype(np.int32))
    weight, bias = backend.put(np.ones(C, np.float32)), backend.put(np.zeros(C, np.float32))
    mean, rstd = backend.zeros(n // C), backend.zeros(n // C)
    kernels = {     # bytes of traffic, and the launch
        'copy (scale)': (8 * n, ('scale', y, x, one, n)),
        'adam': (28 * n, ('adam', x, m, v, g, None, norm, step, lr, n, 1.0, 0.9, 0.999, 1e-8, 0.0)),
        'dropout': (8 * n, ('dropout', y, x, step, n, 0.2, 7)),
        'layer_norm_forward': (8 * n, ('layer_norm_forward', y, mean, rstd, x, weight, bias, n // C, C, 1e-5)),
        'embedding_forward': (8 * n, ('embedding_forward', y, m, ids, n // C, n // C, C)),
    }
    contestants = {name: (repeated(lambda call=call: gpu.launch(*call)), gpu.synchronize)
                   for name, (_, call) in kernels.items()}
    seconds = median_seconds(contestants, sizes)
    if torch:
        a, b = torch.torch.rand(n, device=torch.device), torch.torch.empty(n, device=torch.device)
        seconds |= median_seconds({'torch copy': (repeated(lambda: b.copy_(a)), torch.wait)}, sizes)
    rates = {name: moved / seconds[name] for name, (moved, _) in kernels.items()}
    copy = max(rates['copy (scale)'], 8 * n / seconds.get('torch copy', math.inf))
    figures = []
    for name, rate in rates.items():
        print(f'{name:58} {rate / 1e9:8.0f} GB/s {rate / copy:7.1%} of a copy', flush=True)
        figures.append(dict(what=name, bytes_per_s=rate, of_copy=rate / copy, floats=n))
    return figures


def products(gpu, torch, sizes):
    """Time matrix products against torch.matmul."""
    from pyops import backend
    figures, rng = [], np.random.default_rng(0)
    N = sizes.product

    def contest(what, ours, theirs, precision, flops):
        contestants = {'ours': (repeated(ours), gpu.synchronize)}
        if torch:
            def run(n):
                with torch.precision(precision):
                    for _ in range(n):
                        theirs()
            contestants['torch matmul'] = run, torch.wait
        seconds = median_seconds(contestants, sizes)
        figures.append(compare(what, seconds, flops_per_s=flops / seconds['ours']))

    floats = [rng.standard_normal((N, N), np.float32) for _ in range(2)]
    a, b = (backend.zeros((N, N), np.uint16) for _ in range(2))
    for half, whole in zip((a, b), floats, strict=True):
        gpu.launch('to_bf16', half, backend.put(whole), N, N, N, N, 1)
    c = backend.zeros((N, N))
    theirs = [torch.torch.tensor(x, device=torch.device).bfloat16() for x in floats] if torch else None
    contest(f'product {N}^3 bf16', lambda: gpu.launch('gemm_bf16', c, a, b, N, N, N, N, N, N, False),
            lambda: theirs[0] @ theirs[1].T, 'fp32', 2 * N**3)

    rows, inner, words = sizes.layer['rows'], sizes.layer['inner'], sizes.target
    for M, N, K, name in ((rows, words, inner, 'logits'), (words, inner, rows, 'dweight'), (rows, inner, words, 'dx')):
        left = rng.standard_normal((K, M) if name == 'dweight' else (M, K), np.float32)
        right = rng.standard_normal((N, K) if name == 'logits' else (K, N), np.float32)
        a, b, c = backend.put(left), backend.put(right), backend.zeros((M, N))
        at, bt = (a.T if name == 'dweight' else a), (b.T if name == 'logits' else b)
        if torch:
            ta, tb = (torch.torch.tensor(x, device=torch.device) for x in (left, right))
            ta, tb = (ta.T if name == 'dweight' else ta), (tb.T if name == 'logits' else tb)
        for precision in PRECISIONS[:2]:
            gpu.precision = precision
            contest(f'product {M}x{K}x{N} ({name}) {precision}', lambda c=c, at=at, bt=bt: backend.gemm(c, at, bt),
                    lambda ta=torch and ta, tb=torch and tb: ta @ tb, precision, 2 * M * N * K)
        gpu.precision = 'fp32'
    return figures


# ---- training --------------------------------------------------------------------------------------------------------

def translation_contest(what, gpu, torch, sizes, ours, theirs, config, lr, precision, batch):
    """Time one training step of a translator on random sentences with realistic sizes and 15 % padding at their ends."""
    from bench.torch_step import copy_weights, make_step
    from bench.translation import planned_steps
    from pyops import backend
    from pyops.text.translation import Pairs
    from pyops.text.vocabulary import BOS
    rng = np.random.default_rng(0)
    pairs = Pairs(*(padded(rng, sizes.pairs, config.num_steps, words) for words in (config.source_size, config.target_size)))
    order = rng.permutation(sizes.pairs)
    gpu.precision = precision
    model = ours(config)
    weights = {name: backend.get(array) for name, array in model.params.arrays().items()}
    steps = planned_steps(model, pairs.placed(), lr)
    batches = [backend.put(order[k:k + batch]) for k in range(0, sizes.pairs - batch + 1, batch)]
    place = iter(range(2**62))
    contestants = {'ours': (repeated(lambda: steps(batches[next(place) % len(batches)])), gpu.synchronize)}
    if torch:
        t = torch.torch
        tables = [t.tensor(x, device=torch.device).long() for x in (pairs.source, pairs.labels)]
        rows = [t.tensor(order[k:k + batch], device=torch.device) for k in range(0, sizes.pairs - batch + 1, batch)]
        counter = iter(range(2**62))

        def next_batch():
            chosen = rows[next(counter) % len(rows)]
            source, labels = (table[chosen].T for table in tables)
            target = t.cat([t.full_like(labels[:1], BOS), labels[:-1]])
            return source.contiguous(), target, labels.contiguous()

        def make(compiled):
            twin = copy_weights(theirs()(config), weights).to(torch.device)
            return make_step(t.compile(twin) if compiled else twin, lr, on_gpu=torch.has_gpu)

        contestants |= torch.contestants(make, next_batch, precision)
    figure = compare(f'{what} {precision}', median_seconds(contestants, sizes), batch=batch, num_steps=config.num_steps)
    for made in steps.plans.values():
        made[0].close()
    gpu.precision = 'fp32'
    return figure


def padded(rng, n, steps, words):
    """Return random ids (n, steps) int32 above the special ones, padded after random lengths: 15 % padding on average."""
    from pyops.text.vocabulary import PAD, SPECIALS
    ids = rng.integers(len(SPECIALS), words, (n, steps)).astype(np.int32)
    lengths = np.clip(rng.normal(0.85 * steps, 0.15 * steps, n).round(), 1, steps)
    ids[np.arange(steps) >= lengths[:, None]] = PAD
    return ids


def seq2seq(gpu, torch, sizes):
    from bench.seq2seq import ours, theirs
    Config, Model = ours()
    config = Config(sizes.source, sizes.target, num_steps=sizes.num_steps, **sizes.seq2seq)
    return [translation_contest('seq2seq step', gpu, torch, sizes, Model, theirs, config, 0.005, precision, sizes.batch)
            for precision in PRECISIONS]


def transformer(gpu, torch, sizes):
    from bench.transformer import ours, theirs
    Config, Model = ours()
    config = Config(sizes.source, sizes.target, num_steps=sizes.num_steps, **sizes.transformer)
    return [translation_contest('transformer small step', gpu, torch, sizes, Model, theirs, config, 0.001, precision,
                                sizes.batch) for precision in PRECISIONS]


def base(gpu, torch, sizes):
    from bench.transformer import ours, theirs
    Config, Model = ours()
    settings = dict(d_model=512, d_ff=2048, heads=8, layers=6, pre_norm=True, smoothing=0.1, dropout=0.1) | sizes.base
    batch = settings.pop('batch')
    config = Config(sizes.source, sizes.target, **settings)
    sizes = SimpleNamespace(**vars(sizes) | {'pairs': max(4 * batch, 8)})
    return [translation_contest('transformer base step', gpu, torch, sizes, Model, theirs, config, 0.0007, 'bf16', batch)]


def mnist(gpu, torch, sizes):
    """Time the whole training on digits without loading them: seconds for all epochs."""
    from bench.torch_mnist import TorchMLP
    from bench.torch_step import copy_weights, make_step
    from mnist.train import AT_ONCE, prepare
    from pyops import backend, plan
    from pyops.data.batches import batches, split
    n, epochs, rng = sizes.mnist['images'], sizes.mnist['epochs'], np.random.default_rng(0)
    images = (rng.integers(0, 256, (n, 784)) * (rng.random((n, 784)) < 0.2)).astype(np.uint8)
    labels = rng.integers(0, 10, n).astype(np.int32)
    model, optimizer, step, inputs = prepare(images, labels)
    steps = plan.Steps(lambda rows: [step(batch) for batch in split(rows, 100)], model.params, **inputs, **optimizer.arrays())
    weights = {name: backend.get(array) for name, array in model.params.arrays().items()}

    def run(times):
        for _ in range(times):
            for epoch in range(epochs):
                for rows in batches(n, 100, 0, epoch, at_once=AT_ONCE):
                    steps(rows)

    contestants = {'ours': (run, gpu.synchronize)}
    if torch:
        t = torch.torch
        x, y = t.tensor(images, device=torch.device).float() / 255, t.tensor(labels, device=torch.device).long()
        order = {}

        def next_batch():
            if not order.get('rest'):
                order['rest'] = list(t.randperm(n, device=torch.device).split(100))
            rows = order['rest'].pop()
            return x[rows], y[rows]

        def make(compiled):
            twin = copy_weights(TorchMLP(), weights).to(torch.device)
            return make_step(t.compile(twin) if compiled else twin, 0.001, on_gpu=torch.has_gpu)

        for name, (one, wait) in torch.contestants(make, next_batch, 'fp32').items():
            contestants[name] = (lambda times, one=one: one(times * epochs * (n // 100))), wait
    sizes = SimpleNamespace(**vars(sizes) | {'turns': min(sizes.turns, 3), 'seconds': 0.0})
    return [compare(f'mnist, {epochs} epochs of {n} images', once_seconds(contestants, sizes))]


def once_seconds(contestants, sizes):
    """Like median_seconds, for long runs: one run per turn."""
    seconds = {name: [] for name in contestants}
    for _ in range(sizes.turns):
        for name, (run, wait) in contestants.items():
            start = time.perf_counter()
            run(1)
            wait()
            seconds[name].append(time.perf_counter() - start)
    return {name: float(np.median(s)) for name, s in seconds.items()}


SECTIONS = {'memory': memory, 'products': products, 'mnist': mnist, 'seq2seq': seq2seq, 'transformer': transformer,
            'base': base}


def main(argv=None):
    args = parse(argv)
    from pyops.ndarray import use_gpu
    gpu, torch, sizes = use_gpu(), Torch(not args.no_torch), TRIAL if args.trial else FULL
    print(f'{gpu.model}' + (f', PyTorch {torch.torch.__version__}' if torch else ''), flush=True)
    report = dict(device=gpu.model, torch=torch.torch.__version__ if torch else None, date=time.strftime('%Y-%m-%d'))
    for name in args.only or SECTIONS:
        report[name] = SECTIONS[name](gpu, torch, sizes)
        if args.json:                                   # after each section, so that a later failure loses nothing
            try:
                with open(args.json, 'w') as file:
                    json.dump(report, file, indent=1)
            except OSError as error:
                raise UserError(f'{args.json}: cannot be written ({error.strerror}); name another file with --json') from error


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
