"""Measure the machine's limits, and the speed of kernels at the programs' shapes relative to the limits and to PyTorch.

    python -m bench.kernels                 a table; requires torch
    python -m bench.kernels gemm gru        only cases whose names contain one of these words
    python -m bench.kernels --save          and append the figures to bench/results/kernels.jsonl

The limits are measured first: peak FMA throughput for each instruction set and copy bandwidth, on one thread and on all.
pyops, PyTorch and (for large products) numpy take turns; the table shows the median and the 20th and 80th percentiles.
Results and gradients are compared before and after the timed turns: if they differ, the exit status is 1 and nothing is saved.
"""
import os
import subprocess
import sys
import time
from typing import NamedTuple

import numpy as np

from bench import results
from bench.products import HEADS, ISAS, PRODUCTS, B, D, T, V, operands
from bench.turns import TOLERANCE, Comparison, prepare
from pyops.doctor import cpu_name
from pyops.errors import exits_cleanly
from pyops.flags import ArgumentParser, positive_float, positive_int

PROGRAM = 'bench.kernels'
EIGHT_BITS = ('hifp8', 'mxfp8', 'mxfp8:elem=e5m2', 'mxfp8:block=32x32', 'mxint8', 'fp8', 'fp8:elem=e5m2', 'fp8:block=tensor',
              'int8', 'e4m3', 'e5m2')
ROUNDED = 2000, 4000                    # shape of the array that is rounded to number formats


class Case(NamedTuple):
    """A case to time.  Either flops or nbytes is its amount of work, the other is 0; the nonzero one selects the limit.
    theirs, numpy: the same in PyTorch and in numpy, if available.  Each returns its results, a list of arrays to compare.
    reset(): called before results are compared, so that they equal a first call's
    of(results): what is compared, if not the results
    tolerance: relative to the largest compared number
    """
    name: str
    flops: float
    nbytes: float
    ours: object
    theirs: object
    numpy: object = None
    reset: object = None
    of: object = None
    tolerance: float = TOLERANCE

    def compare(self, comparison, when):
        """Compare the results of all contestants."""
        if self.reset:
            self.reset()
        of = self.of or list
        ours = of(self.ours())
        for who, run in (('PyTorch', self.theirs), ('numpy', self.numpy)):
            if run:
                comparison.compare(f'{self.name}, {who}', when, ours, of(run()), self.tolerance)


def limits_of(isa, threads):
    """Measure (FLOP/s, B/s) in a separate process, since the instruction set is chosen when the library is loaded.  None if
    this CPU lacks it."""
    code = ('import sys; from pyops import backend, profile; backend.set_threads(int(sys.argv[1])); '
            'print(*profile.machine()[:2])')
    out = subprocess.run([sys.executable, '-c', code, str(threads)], cwd=results.ROOT, text=True, capture_output=True,
                         env=os.environ | {'PYOPS_ISA': isa})
    return tuple(map(float, out.stdout.split())) if out.returncode == 0 else None


def roofline(threads):
    """Return {isa: {threads: (FLOP/s, B/s)}}, each the best of three turns."""
    found = {}
    for _ in range(3):
        for isa in ISAS:
            for n in sorted({1, threads}):
                limits = limits_of(isa, n)
                if limits:
                    best = found.setdefault(isa, {}).get(n, (0.0, 0.0))
                    found[isa][n] = tuple(map(max, limits, best))
    return found


# ---- cases: pyops and PyTorch -----------------------------------------------------------------------

def gemm_cases(rng, torch):
    from pyops import backend
    for name, (M, N, K), turned in PRODUCTS:
        a, b = operands(rng, (M, N, K), turned)
        c, x, w, y = backend.empty((M, N)), torch.from_numpy(a), torch.from_numpy(b), torch.empty(M, N)
        reads_b = name.startswith('gemm one')           # a matrix-vector product: limited by reading b
        is_large = M * N * K >= 2**30                   # numpy uses threads for these too
        out = np.empty((M, N), np.float32) if is_large else None
        yield Case(name, 0 if reads_b else 2 * M * N * K, 4 * N * K if reads_b else 0,
                   lambda c=c, a=a, b=b: backend.gemm(c, a, b) or [c], lambda x=x, w=w, y=y: [torch.mm(x, w, out=y)],
                   (lambda a=a, b=b, out=out: [np.matmul(a, b, out=out)]) if is_large else None)


def op_cases(rng, torch):
    """Yield cases of whole ops, forward and backward."""
    from pyops import ops
    from pyops.params import Parameters, Spec

    def parameters(**shapes):
        p = Parameters({name: Spec(shape, lambda generator, shape: generator.standard_normal(shape) * 0.05)
                        for name, shape in shapes.items()}, 0)
        return p, [torch.from_numpy(np.array(p[name].value)).requires_grad_() for name in shapes]

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    def tensor(x):
        return torch.from_numpy(x).requires_grad_()

    # output layer and loss, every row valid
    p, (weight, bias) = parameters(weight=(V, D), bias=(V,))
    output, x, labels, one = ops.LinearCrossEntropy(p['weight'], p['bias']), normal(T * B, D), rng.integers(0, V, T * B), \
        np.ones(1, np.float32)
    tx, tl, labels32 = tensor(x), torch.from_numpy(labels), labels.astype(np.int32)

    def ours():
        loss, ctx = output.forward(x, labels32, dloss=one)
        return [loss, output.backward(one, ctx), p['weight'].grad, p['bias'].grad]

    def theirs():
        tx.grad = weight.grad = bias.grad = None
        loss = torch.nn.functional.cross_entropy(torch.nn.functional.linear(tx, weight, bias), tl)
        loss.backward()
        return [loss.reshape(1), tx.grad, weight.grad, bias.grad]
    yield Case('output layer and loss, with gradients', 3 * 2 * T * B * D * V, 0, ours, theirs, reset=p.zero_grads)

    # predict the most likely tokens
    with torch.no_grad():
        for R in (1, B):
            rows = normal(R, D)
            trows, prepared = torch.from_numpy(rows), output.prepare()
            yield Case(f'likeliest of {V} words, {R} row{"s" * (R > 1)}', 2 * R * D * V, 0,
                       lambda rows=rows, prepared=prepared: [output.predict(rows, prepared)],
                       lambda trows=trows: [torch.nn.functional.linear(trows, weight, bias).argmax(-1)], tolerance=0.0)

    # a GRU layer
    p, values = parameters(w_ih=(3 * D, D), w_hh=(3 * D, D), b_ih=(3 * D,), b_hh=(3 * D,))
    gru, module = ops.GRU(*(p[name] for name in p)), torch.nn.GRU(D, D)
    with torch.no_grad():
        for place, value in zip(module.parameters(), values, strict=True):
            place.copy_(value)
    x, dh = normal(T, B, D), normal(T, B, D)
    tx, tdh = tensor(x), torch.from_numpy(dh)

    def ours_gru():
        h, ctx = gru.forward(x)
        return [h, gru.backward(dh, ctx)[0], *(p[name].grad for name in p)]

    def theirs_gru():
        tx.grad = None
        module.zero_grad()
        h = module(tx)[0]
        h.backward(tdh)
        return [h, tx.grad, *(parameter.grad for parameter in module.parameters())]
    yield Case('gru 9 x 128 x 256, forward and backward', 3 * 2 * T * B * (2 * D) * 3 * D, 0, ours_gru, theirs_gru,
               reset=p.zero_grads)

    # attention of four heads
    attention = ops.Attention(HEADS)
    q, k, v, dy = (normal(T, B, D) for _ in range(4))
    tq, tk, tv, tdy = (tensor(x) for x in (q, k, v, dy))

    def split(x):
        return x.view(T, B, HEADS, D // HEADS).permute(1, 2, 0, 3)

    def ours_attention():
        y, ctx = attention.forward(q, k, v)
        return [y, *attention.backward(dy, ctx)]

    def theirs_attention():
        tq.grad = tk.grad = tv.grad = None
        y = torch.nn.functional.scaled_dot_product_attention(split(tq), split(tk), split(tv))
        y.backward(split(tdy))
        return [y.permute(2, 0, 1, 3).reshape(T, B, D), tq.grad, tk.grad, tv.grad]
    yield Case('attention 9 x 128 x 256, forward and backward', 0, 4 * 11 * T * B * D, ours_attention, theirs_attention)

    # layer norm
    p, (weight, bias) = parameters(weight=(D,), bias=(D,))
    norm, x, dy = ops.LayerNorm(p['weight'], p['bias']), normal(T * B, D), normal(T * B, D)
    tx, tdy = tensor(x), torch.from_numpy(dy)

    def ours_norm():
        y, ctx = norm.forward(x)
        return [y, norm.backward(dy, ctx), p['weight'].grad, p['bias'].grad]

    def theirs_norm():
        tx.grad = weight.grad = bias.grad = None
        y = torch.nn.functional.layer_norm(tx, (D,), weight, bias)
        y.backward(tdy)
        return [y, tx.grad, weight.grad, bias.grad]
    yield Case('layer norm 1152 x 256, forward and backward', 0, 4 * 5 * T * B * D, ours_norm, theirs_norm, reset=p.zero_grads)


def pass_cases(rng, torch):
    """Yield cases of one pass over memory."""
    from pyops import backend
    n = 8_000_000                                               # floats: the size of seq2seq's parameters, larger than caches
    x, y, step, lr = rng.standard_normal(n, np.float32), backend.zeros(n), np.ones(1, np.int64), np.full(1, 1e-3, np.float32)
    one, tx, ty = np.ones(1, np.float32), torch.from_numpy(x.copy()), torch.empty(n)
    yield Case('copy, 32 MB', 0, 8 * n, lambda: backend.launch('scale', y, x, one, n) or [y], lambda: [ty.copy_(tx)],
               tolerance=0.0)

    def kept(results):
        """Masks differ: the numbers as if all were kept, and the share that is."""
        (dropped,) = (np.asarray(result) for result in results)
        return [np.where(dropped, dropped, x / np.float32(0.8)), np.mean(dropped != 0)]
    yield Case('dropout, 32 MB', 0, 8 * n, lambda: backend.launch('dropout', y, x, step, n, 0.2, 7) or [y],
               lambda: [torch.nn.functional.dropout(tx, 0.2)], of=kept, tolerance=5e-3)
    values, m, v = (backend.zeros(n) for _ in range(3))
    parameter = torch.nn.Parameter(tx.clone())
    parameter.grad = tx
    optimizer = torch.optim.Adam([parameter], 1e-3, fused=True)

    def reset_adam():
        values[:], m[:], v[:] = x, 0, 0
        parameter.data.copy_(tx)
        optimizer.state.clear()

    def ours_adam():
        backend.launch('adam', values, m, v, x, None, None, step, lr, n, 1.0, 0.9, 0.999, 1e-8, 0.0, 0)
        return [values]

    def theirs_adam():
        optimizer.step()
        return [parameter]
    yield Case('adam, 8 million parameters', 0, 7 * 4 * n, ours_adam, theirs_adam, reset=reset_adam)
    table, ids = rng.standard_normal((V, D), np.float32), rng.integers(0, V, T * B).astype(np.int32)
    rows, ttable, tids = backend.empty((T * B, D)), torch.from_numpy(table), torch.from_numpy(ids).long()
    yield Case('embedding 1152 of 13387 x 256', 0, 8 * T * B * D,
               lambda: backend.launch('embedding_forward', rows, table, ids, T * B, V, D) or [rows],
               lambda: [torch.nn.functional.embedding(tids, ttable)], tolerance=0.0)


def format_cases(rng, torch):
    """Yield cases of rounding to number formats and back, beside PyTorch's casts where there is one with the same results; the
    case 'copy, 32 MB' has as many bytes.  A tensor with one scale is read twice, which does not count."""
    from pyops import formats
    x = rng.standard_normal(ROUNDED, np.float32)
    n = x.size
    tx = torch.from_numpy(x)
    casts = {'bf16': torch.bfloat16, 'fp16': torch.float16, 'e4m3': torch.float8_e4m3fn, 'e5m2': torch.float8_e5m2}

    def with_scale():                                           # what training in PyTorch does with one scale per tensor
        scale = tx.abs().max() / 448
        return [(tx / scale).to(torch.float8_e4m3fn).float() * scale]

    def cast_and_back(dtype):
        return lambda: [tx.to(dtype).float()]
    theirs = {name: cast_and_back(dtype) for name, dtype in casts.items()} | {'fp8:block=tensor': with_scale}
    for name in ('bf16', 'fp16', *EIGHT_BITS):
        yield Case(f'{name} and back, 32 MB', 0, 8 * n, lambda name=name: [formats.fake_quantize(x, name)], theirs.get(name),
                   tolerance=0.0)
    for name in ('e4m3', 'e5m2'):
        yield Case(f'codes of {name}, 32 to 8 MB', 0, 5 * n, lambda name=name: [formats.encode(x, name).codes],
                   lambda name=name: [tx.to(casts[name]).view(torch.uint8)], tolerance=0.0)


# ---- timing ----------------------------------------------------------------------------------------------------------------

def percentiles(contestants, seconds):
    """Return the (20th, 50th, 80th percentile) of seconds per call for each contestant, taking turns for about `seconds`."""
    times, repeats = [[] for _ in contestants], []
    for run in contestants:                     # calls per turn: about a millisecond
        run()
        start = time.perf_counter()
        run()
        repeats.append(max(1, round(1e-3 / max(time.perf_counter() - start, 1e-7))))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for found, run, n in zip(times, contestants, repeats, strict=True):
            start = time.perf_counter()
            for _ in range(n):
                run()
            found.append((time.perf_counter() - start) / n)
    return [np.percentile(found, (20, 50, 80)).tolist() for found in times]


def shown(seconds):
    unit, scale = ('us', 1e6) if seconds < 1e-3 else ('ms', 1e3)
    return f'{scale * seconds:7.2f} {unit}'


def main(argv=None):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description=__doc__.splitlines()[0])
    p.add_argument('words', nargs='*', metavar='WORD', help='cases whose names hold one of these words (default all)')
    p.add_argument('--threads', type=positive_int, metavar='N', help='on both sides (default: all cores)')
    p.add_argument('--seconds', type=positive_float, default=2.0, metavar='S', help='for each case (default 2)')
    p.add_argument('--save', action='store_true', help='append the figures to bench/results/kernels.jsonl')
    args = p.parse_args(argv)
    # All contestants share this process; the threads of each spin for milliseconds after a call and occupy the cores of the
    # next contestant.  With this they sleep sooner; OpenMP reads it when it is loaded.
    os.environ.setdefault('GOMP_SPINCOUNT', '3000')
    from pyops import backend
    threads = args.threads or backend.threads()
    torch = prepare(threads)
    found = roofline(threads)
    print(f'{cpu_name()}; {backend.isa()} is used, {threads} threads')
    for isa, by_threads in found.items():
        print(f'{isa:8}', *(f'  {n} thread{"s" * (n > 1)}: {flops / 1e9:6.1f} GFLOP/s {copy / 1e9:5.1f} GB/s'
                            for n, (flops, copy) in by_threads.items()))
    flops, copy = found[backend.isa()][threads]
    print(f'\n{"":46}{"ours":>10} {"20 to 80 %":>24} {"":>14} {"of limit":>8} {"PyTorch":>11} {"ratio":>7} '
          f'{"numpy":>10} {"ratio":>7}')
    rng, figures, comparison = np.random.default_rng(0), [], Comparison(PROGRAM)
    for case in (case for make in (gemm_cases, op_cases, pass_cases, format_cases) for case in make(rng, torch)):
        if args.words and not any(word in case.name for word in args.words):
            continue
        others = {name: run for name, run in (('torch', case.theirs), ('numpy', case.numpy)) if run}
        case.compare(comparison, 'before')
        (low, median, high), *theirs = percentiles([case.ours, *others.values()], args.seconds)
        case.compare(comparison, 'after')
        medians = {name: times[1] for name, times in zip(others, theirs, strict=True)}
        rate = (case.flops or case.nbytes) / median
        share = rate / (flops if case.flops else copy)
        beside = ' '.join(f'{shown(seconds)} {seconds / median:6.2f}x' for seconds in medians.values())
        print(f'{case.name:46}{shown(median)} {shown(low):>11} - {shown(high)} {rate / 1e9:7.1f} '
              f'{"GFLOP/s" if case.flops else "GB/s   "} {share:7.0%}  {beside}', flush=True)
        figures.append({'name': case.name, 'seconds': median, 'p20': low, 'p80': high, 'share': share,
                        'unit': 'GFLOP/s' if case.flops else 'GB/s', 'rate': rate / 1e9} | medians)
    status = comparison.status()
    if args.save and not status:
        results.save('kernels', {'isa': backend.isa(), 'threads': threads, 'limits': found, 'cases': figures})
    return status


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        sys.exit(main())
