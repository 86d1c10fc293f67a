"""Time LSTM, GRU and RNN layers against PyTorch: python -m bench.recurrent

Two layers on a batch of 16 sequences of 40 steps, forward and backward.  The contestants take turns; a figure is a median: with
one thread of the CPU time of the calling thread, so other processes disturb it little, with more of the time that has passed.
"""
import gc
import time

import numpy as np

from bench.contest import require
from bench.convolution import line, medians
from pyops import backend, nn
from pyops.autograd import Tensor
from pyops.errors import exits_cleanly
from pyops.flags import ArgumentParser, positive_int

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


def forward_and_backward(layer, x, dy):
    """Return a function that runs a layer of either library: its output, and gradients from dy."""
    def run():
        layer(x)[0].backward(dy)
    return run


def main(argv=None):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description=__doc__.splitlines()[0])
    p.add_argument('--seconds', type=float, default=2.0, metavar='S', help='for each line (default 2)')
    p.add_argument('--only', default='', metavar='TEXT', help='only lines whose name contains this text')
    p.add_argument('--threads', type=positive_int, default=1, metavar='N', help='default 1')
    args = p.parse_args(argv)
    require('torch')
    import torch
    gc.collect()
    gc.freeze()             # the garbage collector would visit PyTorch's modules again and again
    torch.set_num_threads(args.threads)
    backend.set_threads(args.threads)
    rng = np.random.default_rng(0)
    title = f'{backend.isa()}, PyTorch {torch.__version__}, threads: {args.threads}'
    print(f'{title:46}{"pyops":>12}{"PyTorch":>12}{"ratio":>10}')
    for name, (layer, sizes, settings, needs_dx) in CASES.items():
        if args.only in name:
            x = rng.standard_normal((T, B, sizes[0]), 'f')
            dy = rng.standard_normal((T, B, H * (1 + settings.get('bidirectional', False))), 'f')
            ours, theirs = (getattr(library, layer)(*sizes, LAYERS, **settings) for library in (nn, torch.nn))
            runs = [forward_and_backward(ours, Tensor(x, requires_grad=needs_dx), Tensor(dy)),
                    forward_and_backward(theirs, torch.tensor(x, requires_grad=needs_dx), torch.tensor(dy))]
            line(name, *medians(runs, args.seconds, time.thread_time if args.threads == 1 else time.perf_counter))


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
