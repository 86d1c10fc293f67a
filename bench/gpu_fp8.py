"""Products in FP8 at the sizes of the programs against float64 products of the decoded operands, timed beside _scaled_mm.

The codes are timed alone: both copies of an activation in bfloat16.
"""
import functools

import numpy as np

from bench.gpu_contest import median_seconds, precision_of, repeated, same_bits
from bench.gpu_products import HALF, SAMPLED, Shape, layer, stored_bf16

# The scales of both operands, as in pyops.ops.fp8: TransformerEngine's, and DeepSeek-V3's in fwd and dgrad, and in wgrad.
KINDS = {'tensor': ('fp8:block=tensor', 'fp8:block=tensor'), '1x128 128x128': ('fp8', 'fp8:block=128x128'),
         '1x128 1x128': ('fp8', 'fp8')}
FULL = [Shape('square', 8192, 8192, 8192, 'NT'), *layer('transformer q', 1152, 256, 256), *layer('base q', 16384, 512, 512),
        *layer('base ff', 16384, 2048, 512), *layer('124M qkv', 8192, 2304, 768), *layer('124M ff', 8192, 3072, 768)]
TRIAL = [*layer('q', 130, 48, 40), Shape('long', 33, 17, 1100, 'NT')]
# Tensor cores truncate some K addends in all to 14 bits of the largest one, a partial sum of 128 terms: up to about
# 3 s sqrt(128 / K), where s is the root of the summed squares of all terms.  Errors of random signs add up to 2^-13 * 20 s.
TRUNCATED = 2.0**-13 * 64


def values(matrix):
    """Return the numbers (R, C) of a pyops.ops.fp8.Matrix in float64."""
    from pyops import backend, formats
    R, C = matrix.shape
    element = ('e4m3', 'e5m2')[matrix.format - 1]
    every = formats.decode(formats.Codes(np.arange(256, dtype=np.uint8), None, formats.parse(element), 0))
    scales = np.asarray(backend.get(matrix.scales), np.float64)
    numbers = np.asarray(every, np.float64)[np.asarray(backend.get(matrix.codes))[:, :C]]
    if matrix.blocks:
        scales = scales.T.repeat(128 if matrix.blocks == 2 else 1, 0)[:R].repeat(128, 1)[:, :C]
    return numbers * scales


class Case:
    """The operands of a Shape on the GPU, one kind of scales, and the float64 product of some rows."""

    def __init__(self, shape, kind):
        from pyops import backend
        from pyops.formats import parse
        from pyops.ops.fp8 import encode
        _, M, N, K, layout, _ = shape
        rng = np.random.default_rng([M, N, K])
        self.fmt = parse(KINDS[kind][0])
        self.x = stored_bf16(backend.put(rng.standard_normal((M, K), np.float32)))
        self.a = encode(self.x, self.fmt, 'a')
        self.b = encode(backend.put(rng.standard_normal((N, K), np.float32)), parse(KINDS[kind][1]), 'b')
        self.is_sum = layout == 'TN'                                # a weight's gradient: float32, added
        self.c = backend.zeros((M, N)) if self.is_sum else backend.empty((M, N), backend.BF16)
        a, b = values(self.a), values(self.b)
        count = min(M, max(2, SAMPLED // (N * K)))
        self.rows = np.unique(np.r_[0, M - 1, rng.choice(M, count, replace=False)])
        self.exact = a[self.rows] @ b.T
        self.allowed = TRUNCATED * np.sqrt(np.square(a[self.rows]) @ np.square(b).T)
        self.allowed += (0 if self.is_sum else HALF) * abs(self.exact)

    def __call__(self):
        from pyops.ops.fp8 import gemm_fp8
        gemm_fp8(self.c, self.a, self.b)

    def result(self):
        from pyops import backend
        self()
        return backend.get(self.c).copy()

    def torch_call(self, torch):
        """Return a call of torch._scaled_mm with the same codes, whose results have one scale."""
        from pyops import backend
        M, K = self.a.shape
        a, b = (torch.put(np.ascontiguousarray(backend.get(m.codes)[:, :K])).view(torch.torch.float8_e4m3fn)
                for m in (self.a, self.b))
        one = torch.put(np.ones((), np.float32))
        out = torch.torch.float32 if self.is_sum else torch.torch.bfloat16
        return lambda: torch.torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=out, use_fast_accum=False)


def fp8(run):
    """Compare products in FP8 with float64 before the timing, and bit for bit after it."""
    with precision_of('bf16', stores_bf16=True):
        for shape in run.sizes.fp8:
            for kind in KINDS:
                _product(run, shape, kind)
            _codes(run, shape)


def _product(run, shape, kind):
    gpu, torch = run.gpu, run.torch
    figure = run.figure(f'{shape.name} {shape.M}x{shape.N}x{shape.K} fp8 {kind}')
    if figure is None:
        return
    case = Case(shape, kind)
    first = case.result()
    run.check(figure, f'{len(case.rows)} of {shape.M} rows', (np.abs(first[case.rows] - case.exact) / case.allowed).max(), 1.0)
    contestants = {'ours': (repeated(case), gpu.synchronize)}
    if torch:
        try:
            theirs = case.torch_call(torch)
            theirs()
            contestants['torch'] = repeated(theirs), torch.wait
        except Exception as error:                      # report and leave out a contestant that fails
            print(f'torch._scaled_mm: left out ({" ".join(str(error).split())[:200]})')
    seconds = median_seconds(contestants, run.sizes.product_turns, run.sizes.product_seconds)
    same_bits(run, figure, {'c': case.result()}, {'c': first})
    flops = 2 * shape.M * shape.N * shape.K
    rates = {who: flops / s if s else 0.0 for who, s in seconds.items()}
    run.timed(figure, seconds, flops=flops, flops_per_s=rates)
    run.show(figure, f'TFLOP/s: {", ".join(f"{who} {rate * 1e-12:.1f}" for who, rate in rates.items())};')


def _codes(run, shape):
    """Time both copies of a (M, K) in bfloat16, for each kind of scales; they are compared with fake quantization."""
    from pyops import backend, formats
    from pyops.ops.fp8 import encode_both
    for kind in ('fp8:block=tensor', 'fp8', 'fp8:block=128x128'):
        figure = run.figure(f'{shape.name} {shape.M}x{shape.K} codes of {kind}', bytes=4 * shape.M * shape.K)
        if figure is None:
            return
        rng, fmt = np.random.default_rng([shape.M, shape.K]), formats.parse(kind)
        x = stored_bf16(backend.put(rng.standard_normal((shape.M, shape.K), np.float32)))
        with backend.on(backend.HOST):
            rounded = np.asarray(backend.get(x), np.float32)
            want = [formats.fake_quantize(rounded, fmt, axis) for axis in (1, 0)]
        call = functools.partial(encode_both, x, fmt, 'x', 'xt')
        first = {name: values(m).astype(np.float32) for name, m in zip(('codes', 'transposed'), call(), strict=True)}
        for (name, numbers), exact in zip(first.items(), (want[0], want[1].T), strict=True):
            run.check(figure, f'{name}: different numbers', np.count_nonzero(numbers != exact))
        seconds = median_seconds({'ours': (repeated(call), run.gpu.synchronize)}, run.sizes.product_turns,
                                 run.sizes.product_seconds)
        same_bits(run, figure, {name: values(m).astype(np.float32) for name, m in zip(first, call(), strict=True)}, first)
        run.timed(figure, seconds)
        run.show(figure)
