"""Shared by the contests within one process: contestants take turns, and have the same results before and after."""
import contextlib
import ctypes
import gc
import sys
import time

import numpy as np

from bench.contest import require
from pyops.flags import positive_float, positive_int

TOLERANCE = 1e-4        # of the largest number of a result: float32 sums in another order differ by less


def add_layer_flags(p):
    """Add the flags of the contests of layers."""
    p.add_argument('--seconds', type=positive_float, default=2.0, metavar='S', help='for each line (default 2)')
    p.add_argument('--only', default='', metavar='TEXT', help='only lines whose name contains this text')
    p.add_argument('--threads', type=positive_int, default=1, metavar='N', help='of both (default 1)')


def prepare(threads):
    """Prepare this process for a contest with PyTorch, and return the module torch.  UserError if it is not installed."""
    require('torch')
    import torch

    from pyops import backend
    keep_memory()
    gc.collect()
    gc.freeze()             # the garbage collector would visit PyTorch's modules again and again
    torch.set_num_threads(threads)
    backend.set_threads(threads)
    return torch


def print_title(torch, threads):
    """Print the title of the lines of contest()."""
    from pyops import backend
    title = f'{backend.float32_isa()}, PyTorch {torch.__version__}, {threads} thread{"s" * (threads > 1)}'
    print(f'{title:46}{"pyops":>12}{"PyTorch":>12}{"ratio":>10}')


def keep_memory():
    """Let malloc keep freed memory, of all contestants, as bench.contest.KEEP_MEMORY does in processes of PyTorch."""
    with contextlib.suppress(AttributeError, OSError):              # glibc alone has mallopt
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 2**28)):           # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
            mallopt(option, value)


def medians(runs, seconds, clock=time.thread_time):
    """Return the median time in seconds of each function, taking turns for about `seconds`, at least three times each.

    clock: by default the CPU time of the calling thread.
    """
    times = [[] for _ in runs]
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times[0]) < 3:
        for run, found in zip(runs, times, strict=True):
            start = clock()
            run()
            found.append(clock() - start)
    return [float(np.median(found)) for found in times]


# ---- results -------------------------------------------------------------------------------------------------------------

def as_numpy(value):
    """Return a number or an array of pyops, PyTorch or numpy as a float64 array."""
    value = value.detach() if hasattr(value, 'detach') else value
    return np.asarray(value.numpy() if hasattr(value, 'numpy') else value, np.float64)


def difference(got, want):
    """Return the largest difference of two lists of results, each relative to the largest magnitude in `want`.

    inf if their number or a shape differs, or if a number is missing: NaN in one of them.
    """
    got, want = ([as_numpy(value) for value in values] for values in (got, want))
    if [one.shape for one in got] != [one.shape for one in want]:
        return np.inf
    away = [np.abs(a - b).max(initial=0.0) / max(np.abs(b).max(initial=0.0), 1e-30) for a, b in zip(got, want, strict=True)]
    largest = float(max(away, default=0.0))
    return np.inf if any(np.isnan(one) for one in away) else largest


class Comparison:
    """Comparisons of a benchmark's results.  `wrong` has a line for each that failed."""

    def __init__(self, program):
        self.program, self.wrong = program, []

    def compare(self, name, when, got, want, tolerance=TOLERANCE):
        """Compare our results with another contestant's: lists of arrays.  when: 'before' or 'after' the timed turns."""
        away = difference(got, want)
        if not away <= tolerance:
            self.wrong.append(f'{name}: {when} the timed turns its results differ by {away:.2e} of the largest number')

    def status(self):
        """Print what failed, to stderr, and return the exit status."""
        for line in self.wrong:
            print(f'{self.program}: {line}', file=sys.stderr)
        return 1 if self.wrong else 0


class Layer:
    """A layer of pyops or PyTorch with its input x and the gradient dy of its output; dy None: forward alone.

    A call runs it and returns its output, the first one of a recurrent layer.
    """

    def __init__(self, layer, x, dy):
        self.layer, self.x, self.dy = layer, x, dy

    def __call__(self):
        y = self.layer(self.x)
        y = y[0] if isinstance(y, tuple) else y
        if self.dy is not None:
            y.backward(self.dy)
        return y

    def results(self):
        """Return its output and, after a backward pass, all gradients of one call."""
        tensors = [] if self.dy is None else [tensor for tensor in (self.x, *self.layer.parameters()) if tensor.requires_grad]
        for tensor in tensors:
            tensor.grad = None
        return [self(), *(tensor.grad for tensor in tensors)]


def give_weights(ours, theirs):
    """Copy the parameters and buffers of our module to its twin in PyTorch."""
    import torch
    theirs.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in ours.state_dict().items()}, strict=False)


def contest(comparison, name, ours, theirs, seconds, threads, tolerance=TOLERANCE):
    """Time two contestants, functions with a method results(), and compare these before and after.  Print a line.

    A time is CPU time of the calling thread if there is one thread, else time that has passed.
    """
    comparison.compare(name, 'before', ours.results(), theirs.results(), tolerance)
    mine, other = medians([ours, theirs], seconds, time.thread_time if threads == 1 else time.perf_counter)
    comparison.compare(name, 'after', ours.results(), theirs.results(), tolerance)
    print(f'{name:46}{1e3 * mine:9.2f} ms{1e3 * other:9.2f} ms{other / mine:8.2f} x', flush=True)
