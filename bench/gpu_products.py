"""Matrix products and the ops around them at the sizes of the programs: errors, times, and the same bits after timing.

The references of products are float64 products of the rounded operands, computed by numpy.
"""
import functools
import math
from typing import NamedTuple

import numpy as np

from bench.gpu_contest import compare, median_seconds, precision_of, repeated, same_bits

PRECISIONS = 'bf16', 'tf32', 'fp32'             # what matters most first
EPS = float(np.finfo(np.float32).eps)
SHARED = 10**6          # products with as many sums may have enough tiles for clusters that share loads by multicast
HALF = 2.0**-8          # the largest relative error of rounding to bfloat16
SAMPLED = 2**31         # multiply-adds of a reference; of a larger product, some rows are compared element by element


class Shape(NamedTuple):
    """A product (M, K) x (K, N).  layout: N or T for each operand, T: it is stored transposed."""
    name: str
    M: int
    N: int
    K: int
    layout: str
    relu: bool = False


def layer(name, rows, outputs, inputs, relu=False):
    """The three products of a linear layer: forward, gradient of the input, gradient of the weight."""
    return [Shape(name, rows, outputs, inputs, 'NT', relu), Shape(f'{name} dx', rows, inputs, outputs, 'NN'),
            Shape(f'{name} dweight', outputs, inputs, rows, 'TN')]


# Edges, every layout, rows that are no multiple of 16 bytes, long sums in parts.
RAGGED = [Shape('ragged', *sizes, layout) for sizes in ((129, 131, 17), (33, 1, 65), (40, 33, 4103))
          for layout in ('NT', 'NN', 'TN', 'TT')]
# The square first, which has a goal of its own; 9 tokens x 128 sentences, 64 x 256, and 8 sequences of 1024 tokens
FULL = [Shape('square', 8192, 8192, 8192, 'NT'), *RAGGED, *layer('seq2seq gates', 1152, 768, 256),
        Shape('seq2seq decoder gates', 1152, 768, 512, 'NT'),
        *layer('logits', 1152, 13387, 256),
        *layer('transformer q', 1152, 256, 256), *layer('transformer ff', 1152, 64, 256, True),
        *layer('base q', 16384, 512, 512), *layer('base ff', 16384, 2048, 512, True),
        Shape('base logits', 16384, 13387, 512, 'NT'),
        *layer('124M qkv', 8192, 2304, 768), *layer('124M ff', 8192, 3072, 768, True)]
# Rows, width of the model and inner width of feed-forward layers with a smooth activation.
ACTIVATIONS = (1152, 256, 64), (16384, 512, 2048), (8192, 768, 3072)
TRIAL_ACTIVATIONS = (260, 64, 256),
# Rows, width of the model and inputs of layers whose result is added to a residual: the last of attention and of feed-forward
# layers.  The first is computed by tiles, with kernels that follow.
RESIDUALS = (1152, 256, 64), (16384, 512, 512), (16384, 512, 2048), (8192, 768, 3072)
TRIAL_RESIDUALS = (260, 64, 256),
# The last is large enough for the emulator's four multiprocessors to convert the operands and use wgmma.
TRIAL = [*layer('gates', 36, 48, 16), *RAGGED, *layer('ff', 130, 264, 72, True), *layer('logits', 12, 30, 16),
         Shape('converted', 1020, 1024, 200, 'NT')]


def rounded(x, precision):
    """Round float32 operands as the library does: tf32 keeps 10 bits, ties away from zero; bf16 7 bits, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    if precision == 'tf32':
        bits = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    if precision == 'bf16':
        bits = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


class Product:
    """The float64 product of float32 matrices (M, K) and (K, N), of some or all rows, and the size of its errors."""

    def __init__(self, a, b, rng):
        (M, K), N = a.shape, b.shape[1]
        self.factor = EPS * (4 * math.sqrt(K) + K / 8)
        count = min(M, max(2, SAMPLED // (N * K)))
        self.rows = np.unique(np.r_[0, M - 1, rng.choice(M, count, replace=False)]) if count < M else np.arange(M)
        # Every element of the rows that are not compared: sums of whole rows with random signs.
        self.signs = rng.choice([-1.0, 1.0], N)
        left, right = np.square(a), np.square(b)
        a, b = a.astype(np.float64), b.astype(np.float64)
        self.exact, self.sums = a[self.rows] @ b, a @ (b @ self.signs)
        self.spread, self.spread_of_rows = np.sqrt(left[self.rows] @ right), np.sqrt(left @ right.sum(1))


class Reference:
    """The float64 result of a Product with bias, activation and initial value, and bounds of the error.

    Float32 units round each of K sums; tensor cores truncate once per instruction of at least 8 terms.  s, the root of the
    summed squares, is the size of a sum of random signs.  So an error of eps s (4 sqrt(K) + K / 8) is allowed.  Operands with
    one bit less than bfloat16 exceed it 60 times at K = 16384.
    """

    def __init__(self, product, bias, initial, relu, rounds=False):
        """rounds: results are rounded to bfloat16"""
        self.relu, self.rows, self.signs = relu, product.rows, product.signs
        N = len(self.signs)
        self.exact = product.exact + bias
        self.sums = product.sums + bias @ self.signs
        if initial is not None:
            self.exact += initial[self.rows]
            self.sums += initial @ self.signs
        self.allowed = product.factor * product.spread + 2 * EPS * (np.abs(self.exact) + 1)
        self.allowed += HALF * np.abs(self.exact) if rounds else 0
        self.sums_allowed = 4 * product.factor * product.spread_of_rows + 8 * EPS * math.sqrt(N) * (np.abs(self.sums) + 1)
        if rounds:                                      # each by at most HALF of an element, whose signs are random
            self.sums_allowed += 4 * HALF * (product.spread_of_rows + np.linalg.norm(bias))

    def check(self, run, figure, c):
        want = np.maximum(self.exact, 0) if self.relu else self.exact
        run.check(figure, f'{len(self.rows)} of {len(c)} rows', (np.abs(c[self.rows] - want) / self.allowed).max(), 1.0)
        if not self.relu:
            sums = np.concatenate([part.astype(np.float64) @ self.signs for part in np.array_split(c, -(-len(c) // 1024))])
            run.check(figure, 'sums of all rows', (np.abs(sums - self.sums) / self.sums_allowed).max(), 1.0)


class Case:
    """The operands of a Shape on the host, on the GPU and in PyTorch."""

    def __init__(self, shape, torch):
        from pyops import backend
        self.shape, self.torch, self.product = shape, torch, None
        _, M, N, K, layout, _ = shape
        rng = self.rng = np.random.default_rng([M, N, K])
        self.a, self.b = rng.standard_normal((M, K), np.float32), rng.standard_normal((K, N), np.float32)
        self.is_forward, self.is_dweight = layout == 'NT', layout == 'TN'
        self.bias = rng.standard_normal(N, np.float32) if self.is_forward else np.zeros(N, np.float32)
        self.initial = rng.standard_normal((M, N), np.float32) if self.is_dweight else None     # gradients accumulate
        self.start = np.full((M, N), np.nan, np.float32) if self.initial is None else self.initial
        stored = [np.ascontiguousarray(x.T if kind == 'T' else x) for x, kind in zip((self.a, self.b), layout, strict=True)]
        self.stored, self.c = [backend.put(x) for x in stored], backend.zeros((M, N))
        self.device_bias = backend.put(self.bias) if self.is_forward else None
        if torch:
            self.torch_stored = [torch.put(x) for x in stored]
            self.torch_bias, self.torch_c = torch.put(self.bias), torch.put(self.start)

    def views(self, stored):
        """Return both operands, (M, K) and (K, N), as views of stored matrices."""
        return [x.T if kind == 'T' else x for x, kind in zip(stored, self.shape.layout, strict=True)]

    def reference(self, precision, is_plain=False, rounds=False):
        """Return the Reference.  is_plain: without bias and activation.  rounds: with results in bfloat16."""
        bias, relu = (np.zeros_like(self.bias), False) if is_plain else (self.bias, self.shape.relu)
        if self.product is None or self.product[0] != precision:        # which takes seconds for a large shape
            self.product = precision, Product(rounded(self.a, precision), rounded(self.b, precision), self.rng)
        return Reference(self.product[1], bias, self.initial, relu, rounds)

    def result(self, call, c=None):
        """Return c, of the operands unless another is given, after one call."""
        from pyops import backend
        c = self.c if c is None else c
        if c.dtype == backend.BF16:
            backend.convert(c, backend.put(self.start))
        else:
            c[...] = self.start
        call()
        return backend.get(c)

    def gemm(self):
        """Return call() of the product of float32 operands."""
        from pyops import backend
        views = self.views(self.stored)
        return lambda: backend.gemm(self.c, *views, self.device_bias, self.is_dweight, self.shape.relu)

    def gemm_stored(self):
        """Return call() of the product of bfloat16 operands, and c: bfloat16, but float32 if it is the gradient of a weight."""
        from pyops import backend
        views = self.views([stored_bf16(x) for x in self.stored])
        c = self.c if self.is_dweight else backend.empty(self.c.shape, backend.BF16)
        return lambda: backend.gemm(c, *views, self.device_bias, self.is_dweight, self.shape.relu), c

    def gemm_bf16(self, gpu):
        """Return call() of the product of matrices in bfloat16: by wgmma if their rows are multiples of 16 bytes."""
        name, M, N, K, _, _ = self.shape
        ld = K if name == 'ragged' else -(-K // 8) * 8
        halves = [to_bf16(gpu, x, rows, K, ld) for x, rows in zip(self.stored, (M, N), strict=True)]
        return lambda: gpu.launch('gemm_bf16', self.c, *halves, M, N, K, N, ld, ld, False)

    def torch_call(self, precision, is_plain=False):
        """Return call() of the same in PyTorch; with bf16, its operands are bfloat16 matrices."""
        stored = [x.bfloat16() for x in self.torch_stored] if precision == 'bf16' else self.torch_stored
        a, b = self.views(stored)
        if is_plain or not (self.is_forward or self.is_dweight):
            return lambda: a @ b
        if self.is_dweight:
            return self._torch_adding(a, b)
        bias, torch = self.torch_bias.to(a.dtype), self.torch.torch
        call = torch._addmm_activation if self.shape.relu else torch.addmm          # one kernel, as in a compiled step
        return lambda: call(bias, a, b)

    def _torch_adding(self, a, b):
        """Return call() that adds a @ b to the float32 result: one kernel, where PyTorch has one for these types."""
        c, torch = self.torch_c, self.torch.torch
        if a.dtype == c.dtype:
            return lambda: c.addmm_(a, b)

        def call():
            return torch.addmm(c, a, b, out_dtype=c.dtype, out=c)
        try:
            call()
        except (TypeError, RuntimeError):               # before PyTorch 2.8, and on CPUs
            return lambda: c.add_(a @ b)
        return call


def choosing(gpu, setting, value, call):
    """Return a function that calls while a setting of the GPU has this value."""
    def run():
        usual = getattr(gpu, setting)
        setattr(gpu, setting, value)
        try:
            return call()
        finally:
            setattr(gpu, setting, usual)
    return run


def changed(results, before):
    """Return the number of elements of float32 arrays whose bits differ."""
    return np.count_nonzero(results.view(np.uint32) != before.view(np.uint32))


def products(run):
    """Compare matrix products with float64 products, time them against torch.matmul, and compare their bits after timing.

    Large ones are also computed and timed without multicast: the bits are the same.
    """
    from pyops import backend
    gpu, torch, sizes = run.gpu, run.torch, run.sizes

    def measure(case, what, precision, call, is_plain=False, c=None):
        figure = run.figure(f'{what} {precision}')
        if figure is None:
            return
        result = functools.partial(case.result, c=c)
        first = result(call)
        case.reference(precision, is_plain, c is not None and c.dtype == backend.BF16).check(run, figure, first)
        contestants = {'ours': (repeated(call), gpu.synchronize)}
        alone = choosing(gpu, 'multicast', 'never', call)
        is_large = precision != 'fp32' and case.shape.M * case.shape.N >= SHARED
        if is_large:
            contestants['without multicast'] = repeated(alone), gpu.synchronize
            for name, other in ('never', alone), ('always', choosing(gpu, 'multicast', 'always', call)):
                run.check(figure, f'multicast {name}: changed elements', changed(result(other), first))
        if torch:
            theirs = repeated(case.torch_call(precision, is_plain))

            def torch_run(n):
                with torch.torch.no_grad(), torch.precision(precision):
                    theirs(n)
            contestants['torch'] = torch_run, torch.wait
        seconds = median_seconds(contestants, sizes.product_turns, sizes.product_seconds)
        same_bits(run, figure, {'c': result(call)}, {'c': first})
        _, M, N, K, _, _ = case.shape
        rate, note = 2 * M * N * K / seconds['ours'], ''
        if is_large:
            figure['without_multicast_s'] = seconds.pop('without multicast')
            note = f', without multicast {1e3 * figure["without_multicast_s"]:.3f} ms'
        run.timed(figure, seconds, flops=2 * M * N * K, flops_per_s=rate)
        run.show(figure, f'{rate * 1e-12:7.1f} TFLOP/s{note}')

    for shape in sizes.products:
        what = f'{shape.name} {shape.M}x{shape.N}x{shape.K} {shape.layout}'
        if run.is_over():                               # not even its operands
            run.figure(what)
            continue
        case = Case(shape, torch)
        for precision in PRECISIONS:
            gpu.precision = precision
            if precision == 'bf16':                     # the products of the transformer
                call, c = case.gemm_stored()
                measure(case, f'{what} stored as', precision, call, c=c)
            measure(case, what, precision, case.gemm())
            if precision == 'bf16' and case.is_forward and not shape.relu:
                measure(case, f'{what} of bf16 matrices', precision, case.gemm_bf16(gpu), is_plain=True)
        gpu.precision = 'fp32'
    activations(run)
    residuals(run)


def activations(run):
    """Compare linear_activation and the gradient of its input with float64: in bfloat16, where products compute the activation.

    The activation is compared at the product as the GPU has stored it: its own error is a rounding to bfloat16.
    """
    from pyops.ops.activation import GELU, GELUTanh, SiLU
    from pyops.ops.feed_forward import SMOOTH
    kinds = {op.kernel: op.reference for op in (SiLU, GELU, GELUTanh)}
    for rows, width, inner in run.sizes.activations:
        for kind, name in enumerate(SMOOTH):
            figure = run.figure(f'linear and {name} {rows}x{inner}x{width} bf16')
            if figure is not None:
                _activation(run, figure, rows, width, inner, kind, kinds[name])


def _activation(run, figure, rows, width, inner, kind, function):
    from pyops import backend
    gpu, sizes, rng = run.gpu, run.sizes, np.random.default_rng([rows, width, inner])

    x, dy = (rounded(rng.standard_normal((rows, width), np.float32), 'bf16') for _ in range(2))
    w1, w2 = (rounded(rng.standard_normal(shape, np.float32) / math.sqrt(width), 'bf16')
              for shape in ((inner, width), (width, inner)))
    bias = rng.standard_normal(inner, np.float32)
    there = {name: stored_bf16(backend.put(array)) for name, array in dict(x=x, dy=dy, w1=w1, w2=w2).items()}
    a, y, dx = (backend.empty((rows, inner), backend.BF16) for _ in range(3))
    device_bias, dweight = backend.put(bias), backend.zeros((width, inner))

    def forward():
        gpu.launch('linear_activation', y, a, there['x'], there['w1'], device_bias, rows, inner, width, kind)

    def backward():
        gpu.launch('linear_activation_backward', dx, dweight, None, there['dy'], y, a, there['w2'], rows, width, inner, kind)

    def results():
        forward()
        backward()
        return {name: backend.get(array) for name, array in dict(a=a, y=y, dx=dx).items()}
    gpu.precision = 'bf16'
    first = results()
    product = Reference(Product(x, w1.T, rng), bias, None, False)
    stored, STEP = first['a'][product.rows].astype(np.float64), 1e-5

    def check(name, want, allowed, at):
        run.check(figure, f'{name}, {len(at)} of {rows} rows', (np.abs(first[name][at] - want) / allowed).max(), 1.0)
    check('a', product.exact, product.allowed + HALF * np.abs(product.exact), product.rows)
    y_want = function(stored)
    check('y', y_want, HALF * np.abs(y_want) + 8 * EPS * (np.abs(stored) + 1), product.rows)
    product = Reference(Product(dy, w2, rng), np.zeros(inner, np.float32), None, False)
    stored = first['a'][product.rows].astype(np.float64)
    slope = (function(stored + STEP) - function(stored - STEP)) / (2 * STEP)
    dx_want = slope * product.exact                     # the product is rounded, and so is the result
    check('dx', dx_want, np.abs(slope) * product.allowed + 2 * HALF * np.abs(dx_want) + 16 * EPS * (np.abs(product.exact) + 1),
          product.rows)
    seconds = median_seconds({'ours': (repeated(forward), gpu.synchronize), 'backward': (repeated(backward), gpu.synchronize)},
                             sizes.product_turns, sizes.product_seconds)
    same_bits(run, figure, results(), first)
    flops, figure['backward_s'] = 2 * rows * inner * width, seconds.pop('backward')
    run.timed(figure, seconds, flops=flops, flops_per_s=flops / seconds['ours'])
    run.show(figure, f'{flops / seconds["ours"] * 1e-12:7.1f} TFLOP/s, backward {1e3 * figure["backward_s"]:.3f} ms')
    gpu.precision = 'fp32'


def residuals(run):
    """Compare linear_residual and linear_residual_norm with float64, in bfloat16 with dropout, and with separate kernels."""
    for rows, width, inputs in run.sizes.residuals:
        figure = run.figure(f'linear and residual {rows}x{width}x{inputs} bf16')
        if figure is not None:
            _residual(run, figure, rows, width, inputs)


def _residual(run, figure, rows, width, inputs):
    from pyops import backend
    from pyops.ops import LayerNorm
    from pyops.philox import dropout_mask
    gpu, sizes, rng, p, key, eps = run.gpu, run.sizes, np.random.default_rng([rows, width, inputs]), 0.25, 7, 1e-5

    x, weight, residual = (rounded(rng.standard_normal(shape, np.float32) / np.float32(scale), 'bf16') for shape, scale in (
        ((rows, inputs), 1), ((width, inputs), math.sqrt(inputs)), ((rows, width), 1)))
    bias, norm_weight, norm_bias = (rng.standard_normal(width, np.float32) for _ in range(3))
    of = {name: stored_bf16(backend.put(array)) for name, array in dict(x=x, weight=weight, residual=residual).items()}
    here = {name: backend.put(array) for name, array in dict(bias=bias, norm_weight=norm_weight, norm_bias=norm_bias,
                                                             step=np.array([3])).items()}
    y, total, norm, branch = (backend.empty((rows, width), backend.BF16) for _ in range(4))
    mean, rstd = backend.empty(rows), backend.empty(rows)
    after = here['norm_weight'], here['norm_bias'], rows, width

    def product():
        gpu.launch('linear_residual', y, of['x'], of['weight'], here['bias'], of['residual'], here['step'], rows, width, inputs,
                   p, key)

    def ours():
        gpu.launch('linear_residual_norm', norm, total, mean, rstd, of['x'], of['weight'], here['bias'], of['residual'],
                   here['step'], *after, inputs, p, key, eps)

    def separate():
        backend.gemm(branch, of['x'], of['weight'].T, here['bias'])
        gpu.launch('residual_norm_forward', norm, total, mean, rstd, of['residual'], branch, here['step'], *after, p, key, eps)

    def results(call):
        call()
        return {name: backend.get(array) for name, array in dict(y=y, sum=total, norm=norm, mean=mean, rstd=rstd).items()}
    gpu.precision = 'bf16'
    product()
    first = results(ours)
    exact = Reference(Product(x, weight.T, rng), bias, None, False)
    at, keep = exact.rows, dropout_mask(rows * width, p, 3, key).reshape(rows, width)
    run.check(figure, 'y: dropped elements that differ from the residual', np.count_nonzero((first['y'] != residual)[~keep]))
    want = residual[at] + keep[at] * exact.exact / (1 - p)
    allowed = (exact.allowed + HALF * np.abs(exact.exact)) / (1 - p) + HALF * np.abs(want) + 4 * EPS
    run.check(figure, f'y, {len(at)} of {rows} rows', (np.abs(first['y'][at] - want) / allowed).max(), 1.0)
    run.check(figure, 'sum: elements that differ from y', np.count_nonzero(first['sum'] != first['y']))
    want = LayerNorm.reference(first['sum'][at].astype(np.float64), norm_weight, norm_bias, eps)
    allowed = HALF * np.abs(want) + 64 * EPS * (1 + np.abs(norm_weight) * (1 + np.abs(first['sum'][at])))
    run.check(figure, f'norm, {len(at)} of {rows} rows', (np.abs(first['norm'][at] - want) / allowed).max(), 1.0)
    same_bits(run, figure, results(separate), first)
    seconds = median_seconds({'ours': (repeated(ours), gpu.synchronize), 'separate': (repeated(separate), gpu.synchronize)},
                             sizes.product_turns, sizes.product_seconds)
    same_bits(run, figure, results(ours), first)
    flops, figure['separate_s'] = 2 * rows * inputs * width, seconds.pop('separate')
    run.timed(figure, seconds, flops=flops, flops_per_s=flops / seconds['ours'])
    run.show(figure, f'as two kernels {1e3 * figure["separate_s"]:.3f} ms')
    gpu.precision = 'fp32'


def stored_bf16(x):
    """Return a float32 array of the current device as bfloat16; on the CPU the rounded numbers as float32."""
    from pyops import backend
    if backend.current_device().is_host:
        return rounded(x, 'bf16')
    y = backend.empty(x.shape, backend.BF16)
    backend.convert(y, x)
    return y


def to_bf16(gpu, x, rows, columns, ld):
    """Return a matrix on the GPU in bfloat16, with rows of ld elements in memory."""
    from pyops import backend
    y = backend.zeros((rows, ld), np.uint16)
    gpu.launch('to_bf16', y, x, rows, columns, ld, columns, 1)
    return y


# ---- ops -------------------------------------------------------------------------------------------------------------

# Relative error of a chain of a few products that round their operands.
TOLERANCE = {'fp32': 1e-5, 'tf32': 2e-3, 'bf16': 2e-2}


def attention(T, B, D, heads, causal=False, p=0.0, stored=lambda x: x):
    def make():
        from pyops import backend
        from pyops.ops import Attention
        rng = np.random.default_rng(0)
        q, k, v, dy = (stored(backend.put(rng.standard_normal((T, B, D), np.float32))) for _ in range(4))
        lengths = backend.put(rng.integers(1, T + 1, B).astype(np.int32))
        op, step = Attention(heads, causal, p, key=3), backend.put(np.array([5], np.int64))

        def call():
            y, ctx = op.forward(q, k, v, lengths, step)
            return dict(zip(('y', 'dq', 'dk', 'dv'), (y, *op.backward(dy, ctx)), strict=True))
        return call
    return make


def gru(T, B, inputs, H, stored=lambda x: x):
    def make():
        from pyops import backend
        from pyops.ops import GRU
        rng = np.random.default_rng(0)
        scale = 1 / math.sqrt(H)
        params = parameters(rng, scale, w_ih=(3 * H, inputs), w_hh=(3 * H, H), b_ih=(3 * H,), b_hh=(3 * H,))
        x, h0, dh = (backend.put(rng.standard_normal(shape, np.float32)) for shape in ((T, B, inputs), (B, H), (T, B, H)))
        x, dh = stored(x), stored(dh)
        lengths = backend.put(rng.integers(1, T + 1, B).astype(np.int32))
        op = GRU(*(params[name] for name in params))

        def call():
            params.zero_grads()
            params.round()
            h, ctx = op.forward(x, h0, lengths)
            dx, dh0 = op.backward(dh, ctx)
            return dict(h=h, dx=dx, dh0=dh0, gradients=params.grads)
        return call
    return make


def output_layer(R, D, V, stored=lambda x: x):
    def make():
        from pyops import backend
        from pyops.ops import LinearCrossEntropy
        rng = np.random.default_rng(0)
        params = parameters(rng, 1 / math.sqrt(D), weight=(V, D), bias=(V,))
        x, one = stored(backend.put(rng.standard_normal((R, D), np.float32))), backend.put(np.ones(1, np.float32))
        labels = rng.integers(0, V, R)
        labels[rng.random(R) < 0.15] = -1
        labels = backend.put(labels.astype(np.int32))
        op = LinearCrossEntropy(params['weight'], params['bias'], smoothing=0.1)

        def call():
            params.zero_grads()
            params.round()
            loss, ctx = op.forward(x, labels, dloss=one)
            return dict(loss=loss, dx=op.backward(one, ctx), gradients=params.grads)
        return call
    return make


def layer_norm(rows, C):
    """Layer norm of a residual sum, in bfloat16."""
    def make():
        from pyops import backend
        from pyops.ops import ResidualNorm
        rng = np.random.default_rng(0)
        params = parameters(rng, 1.0, weight=(C,), bias=(C,))
        x, branch, dy = (stored_bf16(backend.put(rng.standard_normal((rows, C), np.float32))) for _ in range(3))
        op = ResidualNorm(params['weight'], params['bias'])

        def call():
            params.zero_grads()
            y, ctx = op.forward(x, branch)
            dx, _ = op.backward(dy, ctx)        # without dropout the gradient of the branch is the same array
            return dict(y=y, sum=ctx.sum, dx=dx, gradients=params.grads)
        return call
    return make


def digits_step(N, B, H):
    def make():
        from mnist.train import prepare
        from pyops import backend
        rng = np.random.default_rng(0)
        images = (rng.integers(0, 256, (N, 784)) * (rng.random((N, 784)) < 0.2)).astype(np.uint8)
        model, optimizer, step, _ = prepare(images, rng.integers(0, 10, N).astype(np.int32), H)
        initial, batches = backend.get(model.params.values).copy(), [backend.put(rng.integers(0, N, B)) for _ in range(3)]

        def call():
            reset(model.params, optimizer, initial)
            for batch in batches:
                loss = step(batch)
            return dict(loss=loss, m=model.params.m, v=model.params.v)
        return call
    return make


def formats(rows, columns):
    """Every format: rounding, and codes."""
    def make():
        from pyops import backend
        from pyops.formats import ELEMENTS, FORMATS, decode, encode, fake_quantize
        rng = np.random.default_rng(0)
        x = (rng.standard_normal((rows, columns)) * np.exp2(rng.integers(-12, 12, (rows, 1)))).astype(np.float32)
        here = backend.put(x)
        names = [*FORMATS, *(name for name in ELEMENTS if name != 'e2m1'), 'hifp8:round=hybrid', 'mxfp4:scale=even']

        def call():
            made = {}
            for name in names:
                for axis in (0, 1):
                    made[f'{name} axis {axis}'] = fake_quantize(here, name, axis)
                codes = encode(here, name)
                made[f'{name} decoded'] = decode(codes)
            return made
        return call
    return make


def parameters(rng, scale, **shapes):
    from pyops.params import Parameters, Spec
    values = {name: (scale * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    return Parameters({name: Spec(shape, lambda _, shape, name=name: values[name]) for name, shape in shapes.items()})


def reset(params, optimizer, initial):
    """Set a model and its optimizer back to their start."""
    params.values[...] = initial
    for moments in (params.m, params.v):
        moments[...] = np.zeros(moments.shape, np.float32)
    optimizer.count[...] = np.zeros(1, np.int64)


STORED = 'stored as'       # bf16, the precision that follows
FULL_LAYERS = {
    'attention 9x128x256': attention(9, 128, 256, 4, p=0.2), 'attention 64x256x512': attention(64, 256, 512, 8, p=0.1),
    'attention 1024x8x768 causal': attention(1024, 8, 768, 12, causal=True),
    'gru 9x128x256': gru(9, 128, 256, 256), 'gru 9x128x512->256': gru(9, 128, 512, 256), 'gru 64x64x512': gru(64, 64, 512, 512),
    'output layer 1152x256x13387': output_layer(1152, 256, 13387),
    'output layer 4096x512x13387': output_layer(4096, 512, 13387),
    **{f'{name} {STORED}': make for name, make in {
        'attention 9x128x256': attention(9, 128, 256, 4, p=0.2, stored=stored_bf16),
        'attention 64x256x512': attention(64, 256, 512, 8, p=0.1, stored=stored_bf16),
        'output layer 1152x256x13387': output_layer(1152, 256, 13387, stored_bf16),
        'output layer 4096x512x13387': output_layer(4096, 512, 13387, stored_bf16),
        'gru 9x128x256': gru(9, 128, 256, 256, stored_bf16), 'gru 64x64x512': gru(64, 64, 512, 512, stored_bf16),
        'layer norm 1152x256': layer_norm(1152, 256), 'layer norm 16384x512': layer_norm(16384, 512)}.items()},
    'mlp_step 100x784x30': digits_step(5000, 100, 30), 'formats 2048x1024': formats(2048, 1024)}
TRIAL_LAYERS = {
    'attention 9x4x32': attention(9, 4, 32, 2, p=0.2), 'attention 70x1x64 causal': attention(70, 1, 64, 2, causal=True),
    'gru 5x8x16->32': gru(5, 8, 16, 32), 'output layer 40x16x70': output_layer(40, 16, 70),
    **{f'{name} {STORED}': make for name, make in {
        'attention 9x4x32': attention(9, 4, 32, 2, p=0.2, stored=stored_bf16),
        'output layer 40x16x70': output_layer(40, 16, 70, stored_bf16), 'gru 5x8x16->32': gru(5, 8, 16, 32, stored_bf16),
        'layer norm 40x24': layer_norm(40, 24)}.items()},
    'mlp_step 20x784x30': digits_step(60, 20, 30), 'formats 40x70': formats(40, 70)}

ROUNDS_EXACTLY = 'formats'          # the same bits on both devices
FLOAT32_ONLY = 'formats', 'mlp_step'


def layers(run):
    """Compare forward and backward of ops with the CPU library's, and their bits after timing."""
    from pyops import backend
    for name, make in run.sizes.layers.items():
        references = None
        is_stored = name.endswith(STORED)
        for precision in PRECISIONS[-1:] if name.startswith(FLOAT32_ONLY) else PRECISIONS[:1] if is_stored else PRECISIONS:
            figure = run.figure(f'{name} {precision}')
            if figure is None:
                continue
            if references is None:
                with backend.on(backend.HOST):
                    references = {key: np.array(value) for key, value in make()().items()}
            with precision_of(precision, is_stored):
                _layer(run, figure, name, make(), references, precision)


def _layer(run, figure, name, call, references, precision):
    from pyops import backend
    gpu = run.gpu

    def result(call=call):
        return {key: backend.get(value).copy() for key, value in call().items()}
    first = result()
    if name.startswith(ROUNDS_EXACTLY):
        for key, want in references.items():
            run.check(figure, f'{key}: different numbers', np.count_nonzero(first[key] != want))
    else:
        compare(run, figure, first, references, TOLERANCE[precision])
    contestants = {'ours': (repeated(call), gpu.synchronize)}
    if name.startswith('gru'):
        through_memory = choosing(gpu, 'exchange', 'global memory', call)       # never as a cluster
        contestants['through global memory'] = repeated(through_memory), gpu.synchronize
        for key, array in result(through_memory).items():
            run.check(figure, f'{key} through global memory: changed elements', changed(array, first[key]))
    seconds = median_seconds(contestants, run.sizes.product_turns, run.sizes.product_seconds)
    same_bits(run, figure, result(), first)
    run.timed(figure, seconds)
    run.show(figure)
