"""Print JSON: the instruction set, whether kernels are exact, and {name: SHA-256 of results} for the op table, functions on
Tensors, products, decoding and optimisers.

    PYOPS_EXACT=1 PYOPS_ISA=avx2 python tests/helpers/exact_bits.py

tests/backend/test_exact.py compares the output of all instruction sets.
"""
import hashlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCTS = ((1, 5, 3), (3, 40, 700), (8, 129, 257), (9, 31, 64), (61, 17, 530), (130, 101, 40), (300, 200, 600), (70, 1, 90))


def digest(arrays):
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def table():
    """Yield (name, arrays): results and gradients of the op table at all sizes, and of the example of every other op."""
    for row, size in [p.values for p in (*EACH, *EXAMPLES)] + [(row, row.large) for row in TABLE]:
        run = Run(row, size)
        yield f'{row.name} {size}', [run.y, *run.grads.values()]


def functions():
    """Yield (name, arrays): functions on Tensors and their gradients, of few and many elements."""
    rng = np.random.default_rng(0)
    for shape in (1,), (16,), (23,), (7, 33), (65, 16), (16, 65), (3, 300), (2, 300000):
        x = rng.standard_normal(shape).astype('f')
        for name in ('exp', 'log', 'tanh', 'sigmoid', 'sqrt'):
            yield f'{name} {shape}', [getattr(pyops.tensor(np.abs(x)), name)().numpy()]
        for name in ('sin', 'cos', 'tan', 'expm1', 'log1p', 'arctan', 'arcsin', 'arccos', 'erf'):
            yield f'{name} {shape}', [getattr(pyops.tensor(x * scale), name)().numpy() for scale in (1, 1e9)]
        yield f'power {shape}', [(pyops.tensor(x * 10) ** exponent).numpy() for exponent in (3, -1.5, x)]
        for axis in range(len(shape)):
            for name in ('softmax', 'log_softmax'):
                tensor = pyops.tensor(x, requires_grad=True)
                y = getattr(F, name)(tensor, axis)
                y.backward(pyops.tensor(rng.standard_normal(shape).astype('f')))
                yield f'{name} {shape} {axis}', [y.numpy(), tensor.grad.numpy()]
            for name in ('sum', 'mean', 'max'):
                yield f'{name} {shape} {axis}', [getattr(pyops.tensor(x), name)(axis).numpy()]
        yield f'sum of all {shape}', [pyops.tensor(x).sum().numpy()]


def products():
    """Yield (name, arrays): matrix products of every layout, also of those with few rows."""
    rng = np.random.default_rng(0)
    for (M, N, K), order_a, order_b in itertools.product(PRODUCTS, 'CF', 'CF'):
        a = np.asarray(rng.standard_normal((M, K)).astype('f'), order=order_a)
        b = np.asarray(rng.standard_normal((K, N)).astype('f'), order=order_b)
        added, bias = rng.standard_normal((M, N)).astype('f'), rng.standard_normal(N).astype('f')
        rectified = np.empty_like(added)
        backend.gemm(added, a, b, accumulate=True)
        backend.gemm(rectified, a, b, bias=bias, relu=True)
        yield f'product {M} {N} {K} {order_a}{order_b}', [added, rectified]


def decoding():
    """Yield (name, arrays): the most probable tokens and their logarithms."""
    rng = np.random.default_rng(0)
    for C in 5, 40, 3000:
        x = rng.standard_normal((9, C)).astype('f')
        index, logp = np.empty((9, 4), 'i'), np.empty((9, 4), 'f')
        backend.launch('log_softmax_topk', index, logp, x, 9, C, 4)
        yield f'log_softmax_topk {C}', [index, logp]


def optimisers():
    """Yield (name, arrays): parameters and moments after three steps of each optimiser."""
    for kind, settings in ((optim.Adam, {}), (optim.AdamW, {}), (optim.Muon, {}), (optim.SGD, {'momentum': 0.9})):
        rng = np.random.default_rng(0)
        layer = nn.Linear(300, 240)
        shapes = {name: value.shape for name, value in layer.state_dict().items()}
        layer.load_state_dict({name: rng.standard_normal(shape).astype('f') for name, shape in shapes.items()})
        optimizer = kind(layer.parameters(), 0.01, max_norm=1.0, **settings)
        for _ in range(3):
            optimizer.zero_grad()
            layer(pyops.tensor(rng.standard_normal((5, 300)).astype('f'))).tanh().sum().backward()
            optimizer.step()
        yield kind.__name__, [*layer.state_dict().values(), *(backend.get(a) for a in optimizer.arrays().values())]


if __name__ == '__main__':
    sys.path[:0] = [str(ROOT), str(ROOT / 'tests/helpers')]
    import itertools

    import numpy as np
    from rows import EACH, EXAMPLES, TABLE, Run

    import pyops
    from pyops import backend, nn, optim
    from pyops import functional as F
    results = {name: digest(arrays) for part in (table, functions, products, decoding, optimisers) for name, arrays in part()}
    print(json.dumps({'isa': backend.isa(), 'is_exact': backend.HOST.exact, 'results': results}))
