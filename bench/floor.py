"""Check that matrix products reach a share of the multiply-add limit, so that a slow fallback does not go unnoticed.

    python -m bench.floor                   the large products; exit status 1 if one is below 60 % of the limit
    python -m bench.floor logits projection only products whose names contain one of these words
    python -m bench.floor --share 0.8 --threads 2

The limit is peak FMA throughput with the same number of threads.  Limit and product take turns within the same second, and the
best turn of each counts, so a slow minute of the machine affects both.  With one thread, the default, CPU time is measured:
other programs may run.  What is below the floor is measured again.

A program on the other hyperthread of the core, or another guest of the host, slows products but not the limit, whose factors
are in registers.  A product that stays below the floor is therefore compared with the product of numpy's BLAS, too, and passes
with the same share of its speed.  `make floor` sets OPENBLAS_NUM_THREADS=1: CPU time of a second thread is counted late.  The
instruction set that the library selected is compared with the best one of this CPU.
"""
import math
import os
import subprocess
import sys
import time

import numpy as np

from bench.products import ISAS, PRODUCTS, operands
from bench.results import ROOT
from pyops import backend
from pyops.errors import UserError, exits_cleanly
from pyops.flags import ArgumentParser, positive_float, positive_int

PROGRAM = 'bench.floor'
ATTEMPTS = 3            # measurements of products below the floor: other processes may have disturbed the first
ROUNDS = 2_000_000      # of a measurement of the limit: milliseconds, so that waking threads is negligible
LEAST = 2**26           # multiply-adds of the products that are checked: smaller ones depend on what else is in the caches


def multiply_adds():
    """Multiply and add in registers.  Return the number of operations."""
    done = np.empty(1, np.float64)
    backend.launch('fma_loop', done, ROUNDS)
    return float(done[0])


def rates(run, flops, seconds, reference=multiply_adds):
    """Return the rates of run(), which has `flops` operations, and of reference(), which returns its number, in FLOP/s.  The
    best of turns within `seconds` counts, in CPU time if there is one thread."""
    times, others = [], []
    clock = time.process_time if backend.threads() == 1 else time.perf_counter
    end = clock() + seconds
    while clock() < end or not times:
        start = clock()
        done = reference()
        between = clock()
        run()
        times.append(max(clock() - between, 1e-9))
        others.append(done / max(between - start, 1e-9))
    return flops / min(times), max(others)


def chosen(words):
    """Return the products whose names contain one of `words`, or all.  UserError if there are none."""
    large = [product for product in PRODUCTS if math.prod(product[1]) >= LEAST]
    found = [product for product in large if not words or any(word in product[0] for word in words)]
    if not found:
        raise UserError(f'{" ".join(words)}: no product has such a name, expected words of: '
                        + ', '.join(name for name, *_ in large))
    return found


def cases(products):
    """Yield name, run, number of operations, the factor of the limit and numpy's product for each product."""
    rng, precision = np.random.default_rng(0), backend.HOST.precision
    for name, (M, N, K), turned in products:
        a, b = operands(rng, (M, N, K), turned)
        c = backend.empty((M, N))

        def run(c=c, a=a, b=b):
            backend.gemm(c, a, b)

        def numpy_product(c=c, a=a, b=b, flops=2 * M * N * K):
            np.matmul(a, b, out=c)
            return flops
        yield name, run, 2 * M * N * K, 1, numpy_product
        if M == N == K and backend.bf16_isa() == 'avx512_bf16':
            backend.HOST.precision = 'bf16'
            try:
                # an instruction has twice the multiply-adds
                yield f'{name} in bfloat16', run, 2 * M * N * K, 2, numpy_product
            finally:
                backend.HOST.precision = precision


def limit():
    """Return peak FMA throughput of one thread with the selected instruction set, in FLOP/s."""
    backend.set_threads(1)
    return max(rates(lambda: None, 0, 0.02)[1] for _ in range(ATTEMPTS))


def limits():
    """Return {instruction set: limit()} of those that this CPU has.  Each needs a process: it is selected when the library is
    loaded."""
    found = {}
    for isa in ISAS:
        out = subprocess.run([sys.executable, '-c', 'from bench import floor; print(floor.limit())'], cwd=ROOT, text=True,
                             capture_output=True, env=os.environ | {'PYOPS_ISA': isa})
        if out.returncode == 0:
            found[isa] = float(out.stdout)
    return found


def main(argv=None):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description=__doc__.splitlines()[0])
    p.add_argument('words', nargs='*', metavar='WORD', help='products whose names contain one of these words (default all)')
    p.add_argument('--share', type=positive_float, default=0.6, metavar='S', help='of the limit (default 0.6)')
    p.add_argument('--threads', type=positive_int, default=1, metavar='N', help='default 1')
    p.add_argument('--seconds', type=positive_float, default=0.5, metavar='S', help='for each product (default 0.5)')
    args = p.parse_args(argv)
    below, products = [], chosen(args.words)
    backend.set_threads(args.threads)

    def line(name, rate, limit):
        print(f'{name:46}{rate / 1e9:8.1f} of {limit / 1e9:6.1f} GFLOP/s{rate / limit:7.0%}', flush=True)
        return rate >= args.share * limit

    for _ in range(ATTEMPTS):
        found = limits()
        best = max(found, key=found.__getitem__)
        if found[backend.isa()] >= args.share * found[best]:
            break
    kernels = f'{backend.isa()} kernels; the fastest are {best}'
    if not line(kernels, found[backend.isa()], found[best]):
        below.append(kernels)
    for name, run, flops, factor, numpy_product in cases(products):
        run()
        for _ in range(ATTEMPTS):
            rate, limit = rates(run, flops, args.seconds)
            if rate >= args.share * limit * factor:
                break
        if not line(name, rate, limit * factor):
            rate, limit = rates(run, flops, args.seconds, numpy_product)
            if not line(f'    beside numpy x {factor}', rate, limit * factor):
                below.append(name)
    for name in below:
        print(f'{PROGRAM}: {name}: below {args.share:.0%} of limit and numpy', file=sys.stderr)
    return 1 if below else 0


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        sys.exit(main())
