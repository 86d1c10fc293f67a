"""Time array operations against numpy: python -m bench.ndarray [--size N] [--threads N] [--small]

Elementwise operations, reductions and products of N x N matrices, each with a new result, and the overhead of an operation
on small arrays and Tensors.  The contestants take turns; a figure is the shortest of many runs.  numpy uses one thread,
except for products.

--small: operations on arrays and Tensors of 3 x 4 and products of many small matrices, on one thread.  A figure is the median
CPU time of a call, and an operation that takes 2 us more than numpy's, or a product that takes longer than numpy's, is
marked.
"""
import time

import numpy as np

from bench.turns import medians
from pyops import backend, functional, ndarray, nn
from pyops.autograd import Tensor
from pyops.errors import exits_cleanly
from pyops.flags import ArgumentParser, positive_float, positive_int

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


# expressions of a, b, c, the Tensor t (3, 4), the row numbers i (4,) and the mask m (3, 4): one for both, or ours and numpy's
SMALL = (
    'a + b', 'a * 2', 'a > b', '-a', 'abs(a)', 'a ** 2', 'a % 2.0', 'a // 2.0', 'm & m', '~m', 'a.copy()', 'a.astype("int32")',
    *((f'b.{name}()', f'np.{name}(b)') for name in (
        'exp', 'log', 'sqrt', 'tanh', 'sin', 'floor', 'ceil', 'round', 'sign', 'isnan', 'isfinite', 'isinf', 'square',
        'reciprocal', 'tril', 'triu', 'ptp', 'sort')),
    ('a.sigmoid()', '1 / (1 + np.exp(-a))'), ('a.relu()', 'np.maximum(a, 0)'), 'a.clip(-1.0, 1.0)',
    ('where(m, a, b)', 'np.where(m, a, b)'),
    *(f'a.{name}({axis})' for name in ('sum', 'mean', 'max', 'argmax', 'argmin', 'var', 'std', 'any', 'all', 'prod', 'cumsum')
      for axis in (None, 0, 1)), ('a.sort(0)', 'np.sort(a, 0)'),
    ('a.norm()', 'np.linalg.norm(a)'),
    ('a.logsumexp(1)', '(top := a.max(1, keepdims=True))[:, 0] + np.log(np.exp(a - top).sum(1))'),
    ('a.softmax(1)', '(e := np.exp(a - a.max(1, keepdims=True))) / e.sum(1, keepdims=True)'), 'a.argsort(1)',
    ('a.topk(2)', 'np.take_along_axis(a, best := np.argsort(-a, 1)[:, :2], 1), best'), 'a.repeat(2)', 'a.repeat(2, 1)',
    ('a.tile(2)', 'np.tile(a, 2)'), ('a.roll(1, 1)', 'np.roll(a, 1, 1)'), 'a.diagonal()', 'a.trace()', 'm.nonzero()',
    ('a.pad(1)', 'np.pad(a, 1)'), ('concatenate([a, b])', 'np.concatenate([a, b])'), ('stack([a, b])', 'np.stack([a, b])'),
    ('a.split(2, 1)', 'np.split(a, 2, 1)'), 'a.take(i, 0)', 'a[1]', 'a[1:, ::2]', 'a[i]', 'a[:, i]', 'a[m]', 'a[[0, 2]]',
    'c.__setitem__(..., b)', 'c.__setitem__(1, 1.0)', 'c.__setitem__([0, 2], b[:2])',
    'c.__setitem__(([0, 1], [1, 2]), b[0, :2])', 'c.__setitem__(m, 1.0)', 'c.__iadd__(b)', 'a.T', 'a.reshape(2, 6)',
    'a.ravel()', 'a[None]', 'a.swapaxes(0, 1)', ('a.moveaxis(0, 1)', 'np.moveaxis(a, 0, 1)'),
    ('a.flip(0)', 'np.flip(a, 0)'), 'a[:1].squeeze(0)', ('a.expand_dims(0)', 'np.expand_dims(a, 0)'),
    ('a.broadcast_to((2, 3, 4))', 'np.broadcast_to(a, (2, 3, 4))'), ('zeros((3, 4))', 'np.zeros((3, 4), "f")'),
    ('arange(12)', 'np.arange(12)'), ('array([1.0, 2.0, 3.0])', 'np.array([1.0, 2.0, 3.0])'),
    'a[1, 2].item()', 'a.tolist()', 'a @ b.T', 'a[0].dot(b[0])',
    *(f'np.{call}' for call in (
        'sum(a)', 'sum(a, axis=0)', 'mean(a, 0)', 'max(a, axis=1)', 'argmax(a, 1)', 'exp(a)', 'add(a, b)', 'maximum(a, 0)',
        'where(m, a, b)', 'concatenate([a, b])', 'stack([a, b])', 'clip(a, 0, 1)', 'reshape(a, (4, 3))', 'dot(a, b.T)')),
    't[:, [0, 2]]', 't[[0, 2]]', 't[t > 0]', 't[i]', 't.diagonal()', 't.repeat(2, 0)', 't.take([0, 2], 0)',
    't.__setitem__([0, 2], 1.0)', 't.__setitem__(m, 1.0)', 't + t', 't.sum(0)', 't.var(1)',
    *((f'einsum("{how}", a, b)', f'np.einsum("{how}", a, b)') for how in ('ij,kj->ik', 'ij,ij->i', 'ij,ij')))
# the same of Tensors that require gradients, so that each operation is recorded: x (3, 4), a weight w (4, 4) and a bias v (4,);
# and of labels (3,)
TENSORS = (
    'x + x', 'x * x', 'x.sum()', ('F.relu(x)', 'np.maximum(x, 0)'), ('F.linear(x, w, v)', 'x @ w.T + v'),
    ('linear(x)', 'x @ w.T + v'), ('F.dropout(x)', 'x * (generator.random(x.shape, "f") >= 0.5) * 2'),
    ('F.layer_norm(x, 4)', '(d := x - x.mean(1, keepdims=True)) / np.sqrt((d * d).mean(1, keepdims=True) + 1e-5)'),
    ('F.softmax(x)', '(e := np.exp(x - x.max(1, keepdims=True))) / e.sum(1, keepdims=True)'),
    ('F.cross_entropy(x, labels)', '(np.log(np.exp(x).sum(1)) - x[np.arange(3), labels]).mean()'))
BATCHES = (((64, 8, 8), (64, 8, 8)), ((1000, 4, 4), (1000, 4, 4)), ((1000, 4, 4), (4, 4)), ((4, 4), (1000, 4, 4)),
           ((10, 1, 4, 4), (10, 4, 4)), ((2000, 3, 3), (2000, 3, 1)), ((256, 16, 16), (256, 16, 16)),
           ((64, 1, 64), (64, 64, 1)), ((2, 3, 4), (2, 4, 3)), ((64, 2, 32, 8), (64, 2, 8, 32)))


def cpu_times(runs, seconds=0.1):
    """Return the median CPU time of a call of each function, taking turns, each of about a millisecond."""
    def turn(run, count):
        def calls():
            for _ in range(count):
                run()
        return calls
    counts = [max(1, round(20e-3 / medians([turn(run, 20)], 0)[0])) for run in runs]
    return [found / count for found, count in zip(medians(list(map(turn, runs, counts)), seconds), counts, strict=True)]


def small_names(rng):
    """Return the names in SMALL with our arrays, and those with numpy's."""
    x, z = rng.standard_normal((3, 4), 'f'), rng.random((3, 4), 'f') + np.float32(0.5)
    theirs = dict(a=x, b=z, c=z + 1, t=z + 2, i=np.array([0, 2, 1, 1], np.int32), m=x > 0)
    ours = vars(ndarray) | {name: ndarray.array(value) for name, value in theirs.items()}
    w, v, labels = rng.standard_normal((4, 4), 'f'), rng.standard_normal(4, 'f'), np.array([2, 0, 3], np.int32)
    linear = nn.Linear(4, 4)
    linear.weight, linear.bias = w, v
    tensors = {name: Tensor(value, requires_grad=True) for name, value in dict(x=z, w=w, v=v).items()}
    return (ours | tensors | dict(t=Tensor(ours['t']), labels=Tensor(labels), F=functional, linear=linear, np=np),
            theirs | dict(x=z, w=w, v=v, labels=labels, generator=rng, np=np))


def small(rng):
    """Print the table of --small."""
    backend.set_threads(1)
    print(f'{backend.isa()}, numpy {np.__version__}; median CPU time of a call in us: pyops, numpy, difference')
    ours, theirs = small_names(rng)

    def row(name, our_time, numpys, allowed):
        over = our_time - numpys
        print(f'{name:36}{1e6 * our_time:9.2f}{1e6 * numpys:9.2f}{1e6 * over:9.2f}{" *" if over > allowed else ""}')

    for texts in (*SMALL, *TENSORS):
        mine, other = texts if isinstance(texts, tuple) else (texts, texts)
        row(mine, *cpu_times([eval(f'lambda: ({mine})', ours), eval(f'lambda: ({other})', theirs)]), 2e-6)
    for shapes in BATCHES:
        for name, transposed in (('', False), (' of b.mT', True)):
            a, b = (rng.standard_normal(shape, 'f') for shape in shapes)
            b = np.ascontiguousarray(b.swapaxes(-1, -2)).swapaxes(-1, -2) if transposed else b
            c, d = ndarray.from_numpy(a), ndarray.from_numpy(b)
            row(f'{" @ ".join(map(str, shapes))}{name}'.replace(', ', 'x'),
                *cpu_times([lambda c=c, d=d: c @ d, lambda a=a, b=b: a @ b]), 0)


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
    p.add_argument('--seconds', type=positive_float, default=1.0, metavar='S', help='for each operation (default 1)')
    p.add_argument('--small', action='store_true', help='small arrays alone')
    args = p.parse_args(argv)
    if args.small:
        return small(np.random.default_rng(0))
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
