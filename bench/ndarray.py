"""Time array operations against numpy: python -m bench.ndarray [--size N] [--threads N]

Elementwise operations, reductions and products of N x N matrices, each with a new result, and the overhead of an operation
on small arrays and Tensors.  The contestants take turns; a figure is the shortest of many runs.  numpy uses one thread,
except for products.
"""
import time

import numpy as np

from pyops import backend, ndarray
from pyops.autograd import Tensor
from pyops.errors import exits_cleanly
from pyops.flags import ArgumentParser, positive_int

PROGRAM = 'bench.ndarray'


def short_rows(x):
    """Return a copy of three columns of x in rows of four."""
    return x[:len(x) // 4 * 4].reshape(-1, 4)[:, :3].copy()


CASES = {
    'a + b': (lambda a, b: a + b, np.add),
    'a + b.T': (lambda a, b: a + b.T, lambda x, z: x + z.T),
    'a.T + b.T': (lambda a, b: a.T + b.T, lambda x, z: np.add(x.T, z.T, order='C')),
    'a * b': (lambda a, b: a * b, np.multiply),
    'a + row': (lambda a, b: a + b[0], lambda x, z: x + z[0]),
    'a * column': (lambda a, b: a * b[:, :1], lambda x, z: x * z[:, :1]),
    'a[...] = b.T': (lambda a, b: a.__setitem__(..., b.T), lambda x, z: np.copyto(x, z.T)),
    'maximum(a, 0)': (lambda a, b: a.maximum(0), lambda x, z: np.maximum(x, 0)),
    'exp': (lambda a, b: a.exp(), lambda x, z: np.exp(x)),
    'tanh': (lambda a, b: a.tanh(), lambda x, z: np.tanh(x)),
    'log': (lambda a, b: b.log(), lambda x, z: np.log(z)),
    'copy of a.T': (lambda a, b: a.T.copy(), lambda x, z: x.T.copy()),
    'copy of [:, :3], rows of 4': (lambda a, b: short_rows(a), lambda x, z: short_rows(x)),
    'sum': (lambda a, b: a.sum(), lambda x, z: x.sum()),
    'sum(0)': (lambda a, b: a.sum(0), lambda x, z: x.sum(0)),
    'sum(1)': (lambda a, b: a.sum(1), lambda x, z: x.sum(1)),
    'max': (lambda a, b: a.max(), lambda x, z: x.max()),
    'max(0)': (lambda a, b: a.max(0), lambda x, z: x.max(0)),
    'max(1)': (lambda a, b: a.max(1), lambda x, z: x.max(1)),
}


def best(contestants, seconds, repeats):
    """Return the shortest time of each contestant, taking turns for about `seconds`."""
    times = [float('inf')] * len(contestants)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, run in enumerate(contestants):
            start = time.perf_counter()
            for _ in range(repeats):
                run()
            times[i] = min(times[i], (time.perf_counter() - start) / repeats)
    return times


def line(name, times):
    """Print a row of the table: our time per number of threads, numpy's time, and the ratios."""
    unit, scale = ('us', 1e6) if times[-1] < 1e-3 else ('ms', 1e3)
    *ours, theirs = times
    print(f'{name:28}' + ''.join(f'{scale * t:9.2f} {unit}' for t in times) + ''.join(f'{theirs / t:8.2f} x' for t in ours))


def main(argv=None):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description=__doc__.splitlines()[0])
    p.add_argument('--size', type=positive_int, default=4096, metavar='N', help='rows and columns (default 4096)')
    p.add_argument('--threads', type=positive_int, metavar='N', help='beside one (default: all cores)')
    p.add_argument('--seconds', type=float, default=1.0, metavar='S', help='for each operation (default 1)')
    args = p.parse_args(argv)
    counts = sorted({1, args.threads or backend.threads()})
    rng = np.random.default_rng(0)

    def with_threads(n, run):
        def turn():
            backend.set_threads(n)
            run()
        return turn

    def contest(name, ours, theirs, x, z):
        a, b, x = ndarray.array(x), ndarray.array(z), x.copy()          # a copy, since a case modifies its operand
        runs = [with_threads(n, lambda: ours(a, b)) for n in counts] + [lambda: theirs(x, z)]
        rough = best(runs, 0.01, 1)[-1]
        line(name, best(runs, args.seconds, max(1, int(1e-3 / rough))))

    print(f'{backend.isa()}, numpy {np.__version__}; float32, {args.size} x {args.size}')
    print(f'{"":28}' + ''.join(f'{f"{n} threads" if n > 1 else "1 thread":>12}' for n in counts) + f'{"numpy":>12}'
          + ''.join(f'{f"to {n}":>10}' for n in counts))
    x, z = rng.standard_normal((args.size, args.size), 'f'), rng.random((args.size, args.size), 'f') + np.float32(0.5)
    for name, (ours, theirs) in CASES.items():
        contest(name, ours, theirs, x, z)
    for shape_a, shape_b in (((512, 512), (512, 512)), ((64, 128, 64), (64, 64, 128)), ((2000, 8, 16), (2000, 16, 8)),
                             ((32, 100, 64), (64, 64))):
        contest(f'{shape_a} @ {shape_b}'.replace(', ', 'x'), lambda a, b: a @ b, np.matmul,
                rng.standard_normal(shape_a, 'f'), rng.standard_normal(shape_b, 'f'))
    few = rng.standard_normal((3, 4), 'f')
    for name, run in (('a + b of 3 x 4', lambda a, b: a + b), ('a * 2 of 3 x 4', lambda a, b: a * 2),
                      ('a.sum(1) of 3 x 4', lambda a, b: a.sum(1)), ('a[1:, ::2] of 3 x 4', lambda a, b: a[1:, ::2]),
                      ('a @ b.T of 3 x 4', lambda a, b: a @ b.T)):
        contest(name, run, run, few, few)
    x, y = Tensor(few, requires_grad=True), Tensor(few)
    contest('x * y of 3 x 4, Tensors', lambda _a, _b: x * y, lambda a, b: a * b, few, few)


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
