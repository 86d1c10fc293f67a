"""Time LSTM, GRU and RNN layers against PyTorch: python -m bench.recurrent

Two layers on a batch of 16 sequences of 40 steps, forward and backward.  The contestants take turns; a figure is a median: with
one thread of the CPU time of the calling thread, so other processes disturb it little, with more of the time that has passed.
Both have the same weights; results and gradients are compared before and after the timed turns: exit status 1 if they differ.
"""
import sys

import numpy as np

from bench.turns import Comparison, Layer, add_layer_flags, contest, give_weights, prepare, print_title
from pyops import nn
from pyops.autograd import Tensor
from pyops.errors import exits_cleanly
from pyops.flags import ArgumentParser

PROGRAM = 'bench.recurrent'
T, B, H, LAYERS = 40, 16, 100, 2

# name: (layer, sizes of input and state, settings, whether x needs a gradient)
CASES = {
    'LSTM 100 -> 100': ('LSTM', (100, H), {}, True),
    'LSTM 100 -> 100, x without a gradient': ('LSTM', (100, H), {}, False),
    'LSTM 30 -> 100': ('LSTM', (30, H), {}, True),
    'LSTM 30 -> 100, bidirectional': ('LSTM', (30, H), dict(bidirectional=True), True),
    'GRU 100 -> 100': ('GRU', (100, H), {}, True),
    'RNN 100 -> 100, tanh': ('RNN', (100, H), {}, True),
    'RNN 30 -> 100, tanh': ('RNN', (30, H), {}, True),
}


def main(argv=None):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description=__doc__.splitlines()[0])
    add_layer_flags(p)
    args = p.parse_args(argv)
    torch = prepare(args.threads)
    rng, comparison = np.random.default_rng(0), Comparison(PROGRAM)
    print_title(torch, args.threads)
    for name, (layer, sizes, settings, needs_dx) in CASES.items():
        if args.only in name:
            x = rng.standard_normal((T, B, sizes[0]), 'f')
            dy = rng.standard_normal((T, B, H * (1 + settings.get('bidirectional', False))), 'f')
            ours, theirs = (getattr(library, layer)(*sizes, LAYERS, **settings) for library in (nn, torch.nn))
            give_weights(ours, theirs)
            contest(comparison, name, Layer(ours, Tensor(x, requires_grad=needs_dx), Tensor(dy)),
                    Layer(theirs, torch.tensor(x, requires_grad=needs_dx), torch.tensor(dy)), args.seconds, args.threads)
    return comparison.status()


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        sys.exit(main())
