"""Time training steps of a small net on Tensors, without a plan, against PyTorch: python -m bench.eager

A multilayer perceptron with ReLU, cross entropy and Adam, by default 784-100-10 with batches of 32 on one thread.  Both start
with the same weights and train on the same random batches, which exist before the timed turns.  The contestants take turns in
one process; a figure is the median.  The losses before and after the timed turns must agree: exit status 1 if they do not.
"""
import itertools
import sys
import time

import numpy as np

from bench.contest import NAMES, percentiles, require
from bench.turns import Comparison, keep_memory
from pyops.errors import UserError, exits_cleanly
from pyops.flags import ArgumentParser, positive_int

PROGRAM = 'bench.eager'
BATCHES, STEPS = 16, 50         # different batches; steps in a turn
LOSSES = 0.01                   # tolerance: after thousands of steps the weights differ by more than rounding


def weights_of(sizes, rng):
    """Return [(weight (O, I), bias (O,))] of each layer."""
    return [(rng.standard_normal((O, I), np.float32) * np.float32(I ** -0.5), np.zeros(O, np.float32))
            for I, O in itertools.pairwise(sizes)]


def ours(sizes, weights, batches, lr):
    """Return step(k) -> loss, as a float: our step on batch k."""
    from pyops import Tensor, nn, optim
    from pyops import functional as F
    layers = [nn.Linear(I, O) for I, O in itertools.pairwise(sizes)]
    model = nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())][:-1])
    for layer, (weight, bias) in zip(layers, weights, strict=True):
        layer.weight, layer.bias = weight, bias
    optimizer = optim.Adam(model.parameters(), lr)
    batches = [(Tensor(x), Tensor(labels)) for x, labels in batches]

    def step(k):
        x, labels = batches[k % len(batches)]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss
    return step


def theirs(sizes, weights, batches, lr):
    """Return the same in PyTorch, with its fused Adam."""
    import torch
    layers = [torch.nn.Linear(I, O) for I, O in itertools.pairwise(sizes)]
    model = torch.nn.Sequential(*[part for layer in layers for part in (layer, torch.nn.ReLU())][:-1])
    with torch.no_grad():
        for layer, (weight, bias) in zip(layers, weights, strict=True):
            layer.weight.copy_(torch.from_numpy(weight))
            layer.bias.copy_(torch.from_numpy(bias))
    optimizer = torch.optim.Adam(model.parameters(), lr, fused=True)
    batches = [(torch.from_numpy(x), torch.from_numpy(labels).long()) for x, labels in batches]

    def step(k):
        x, labels = batches[k % len(batches)]
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss
    return step


def main(argv=None):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description=__doc__.splitlines()[0])
    p.add_argument('--sizes', type=positive_int, nargs='+', default=[784, 100, 10], metavar='N',
                   help='of the input and of each layer (default 784 100 10)')
    p.add_argument('--batch-size', type=positive_int, default=32, metavar='N', help='default 32')
    p.add_argument('--threads', type=positive_int, default=1, metavar='N', help='default 1')
    p.add_argument('--turns', type=positive_int, default=40, metavar='N', help='of 50 steps each (default 40)')
    p.add_argument('--no-torch', action='store_true', help='time pyops alone')
    args = p.parse_args(argv)
    if len(args.sizes) < 2:
        raise UserError(f'--sizes {args.sizes[0]}: expected at least two numbers, of the input and of a layer')
    makers = {'ours': ours}
    if not args.no_torch:
        require('torch')
        import torch
        torch.set_num_threads(args.threads)
        keep_memory()
        makers['torch'] = theirs
    from pyops import backend
    backend.set_threads(args.threads)
    rng = np.random.default_rng(0)
    weights = weights_of(args.sizes, rng)
    batches = [(rng.random((args.batch_size, args.sizes[0]), np.float32),
                rng.integers(0, args.sizes[-1], args.batch_size).astype(np.int32)) for _ in range(BATCHES)]
    steps = {name: make(args.sizes, weights, batches, 0.001) for name, make in makers.items()}
    seconds, losses = {name: [] for name in steps}, {}
    comparison = Comparison(PROGRAM)
    for turn in range(args.turns + 1):                  # the first is not counted
        for name, step in steps.items():
            start = time.perf_counter()
            for k in range(turn * STEPS, (turn + 1) * STEPS):
                loss = step(k)
            seconds[name].append((time.perf_counter() - start) / STEPS)
            losses[name] = loss.item()
        if turn in (0, args.turns):
            for name, loss in losses.items():
                comparison.compare(NAMES[name], 'after' if turn else 'before', [losses['ours']], [loss], LOSSES)
    figures = {name: percentiles(found[1:]) for name, found in seconds.items()}
    print(f'{"-".join(map(str, args.sizes))}, batch {args.batch_size}, {args.threads} thread{"s" * (args.threads > 1)}, '
          f'{args.turns} turns of {STEPS} steps')
    for name, f in figures.items():
        low, median, high = (1e6 * f[key] for key in ('p20_s', 'median_s', 'p80_s'))
        print(f'{NAMES[name]:16}{median:8.0f} us a step, 20 to 80 % {low:.0f} to {high:.0f} us; '
              f'{f["median_s"] / figures["ours"]["median_s"]:.2f} x; last loss {losses[name]:.6f}')
    return comparison.status()


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        sys.exit(main())
