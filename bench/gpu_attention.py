"""Attention over long sequences: forward and backward against float64, timed beside PyTorch's flash attention in TFLOP/s.

Inputs and results are bfloat16, as in a transformer with --precision bf16, and in PyTorch.
"""
import contextlib
import math
from typing import NamedTuple

import numpy as np

from bench.gpu_contest import median_seconds, precision_of, repeated, same_bits
from bench.gpu_products import rounded, stored_bf16

UNIT = 2.0**-8          # the largest relative error of rounding to bfloat16
FLOAT = 2.0**-13        # of float32 sums of the terms here, and of 2^x
TINY = 1e-6
CHUNK = 512             # queries of a reference at once
FIGURE = dict(y='forward', dq='backward', dk='backward', dv='backward')         # the figure that has the checks of a result


class Shape(NamedTuple):
    T: int
    B: int
    heads: int
    C: int
    causal: bool


def shapes(rows, width, lengths):
    """Return shapes with `rows` tokens and `width` columns, for heads of 64 and 128."""
    return [Shape(T, rows // T, width // C, C, causal) for T in lengths for C in (64, 128) for causal in (False, True)]


# 16384 tokens of 2048 columns, as in the benchmarks of FlashAttention.  The longest first: they matter most.
FULL = shapes(16384, 2048, (8192, 4096, 2048, 1024, 512))
TRIAL = [Shape(150, 2, 1, 64, False), Shape(270, 1, 1, 128, True), Shape(140, 1, 2, 32, True)]


def reference(q, k, v, dy, seen, factors=None, rounds=False):
    """Return {name: (float64 result, bound of the error)} for one head of one sequence in bfloat16, and max and sum (Tq,).

    q, dy (Tq, C), k, v (Tk, C); query i sees the first seen[i] keys; factors (Tq, Tk): of dropout.
    Operands are rounded.  So is each weight when it multiplies v or dy, and each gradient of a score when it multiplies k or q:
    by at most UNIT.  The gradients of scores contain y, with its error.  rounds: whether results are rounded to bfloat16.
    """
    (Tq, C), Tk = q.shape, len(k)
    exact_dy = dy.astype(np.float64)
    q, k, v, dy = (rounded(x, 'bf16').astype(np.float64) for x in (q, k, v, dy))
    made = {name: (np.zeros((rows, C)), np.zeros((rows, C))) for name, rows in (('y', Tq), ('dq', Tq), ('dk', Tk), ('dv', Tk))}
    stored = UNIT if rounds else 0.0
    largest, total = np.full(Tq, -np.inf), np.zeros(Tq)
    for first in range(0, Tq, CHUNK):
        some = slice(first, first + CHUNK)
        mask = np.arange(Tk) < seen[some, None]
        s = np.where(mask, q[some] @ k.T / math.sqrt(C), -np.inf)
        top = s.max(-1, keepdims=True, initial=-np.inf)
        e = np.where(mask, np.exp(s - np.where(np.isfinite(top), top, 0)), 0)
        sums = e.sum(-1, keepdims=True)
        P, D = e / np.where(sums > 0, sums, 1), 1.0 if factors is None else factors[some]
        W, dW = D * P, dy[some] @ v.T
        y, y_error = W @ v, (UNIT + FLOAT) * (W @ np.abs(v))
        y_error += stored * np.abs(y)
        terms = exact_dy[some] * y
        dsum_error = (np.abs(exact_dy[some]) * y_error + FLOAT * np.abs(terms)).sum(-1, keepdims=True)
        dS = P * (D * dW - terms.sum(-1, keepdims=True)) / math.sqrt(C)
        dS_error = UNIT * np.abs(dS) + P * (dsum_error + FLOAT * D * (np.abs(dy[some]) @ np.abs(v).T)) / math.sqrt(C)
        largest[some], total[some] = top[:, 0], sums[:, 0]
        for name, value, error in (('y', y, y_error), ('dq', dS @ k, dS_error @ np.abs(k))):
            made[name][0][some], made[name][1][some] = value, error
        for name, value, error in (('dk', dS.T @ q[some], dS_error.T @ np.abs(q[some])),
                                   ('dv', W.T @ dy[some], (UNIT + FLOAT) * (W.T @ np.abs(dy[some])))):
            made[name][0][...] += value
            made[name][1][...] += error
    for name in ('dq', 'dk', 'dv'):
        made[name][1][...] += stored * np.abs(made[name][0])
    return made, largest, total


class Case:
    """The inputs of a Shape on the host and on the GPU, and the references of one or two heads."""

    def __init__(self, shape):
        from pyops import backend
        from pyops.ops import Attention
        T, B, heads, C, causal = shape
        self.shape = shape
        rng = np.random.default_rng([T, C, causal])
        self.given = [rounded(rng.standard_normal((T, B, heads * C), np.float32), 'bf16') for _ in range(4)]
        self.arrays = [stored_bf16(backend.put(x)) for x in self.given]
        self.op = Attention(heads, causal)
        seen = np.arange(1, T + 1) if causal else np.full(T, T)
        self.references = {}
        for b, h in {(B - 1, heads - 1)} | ({(0, 0)} if T <= 2048 else set()):          # a reference of 8192 takes seconds
            self.references[b, h] = reference(*(self.head(x, b, h) for x in self.given), seen, rounds=True)[0]

    def head(self, x, b, h):
        """Return head h of sequence b in an array (T, B, heads * C)."""
        return x[:, b, h * self.shape.C:(h + 1) * self.shape.C]

    def forward(self):
        return self.op.forward(*self.arrays[:3])

    def results(self):
        """Return y, dq, dk and dv after one forward and one backward."""
        from pyops import backend
        y, ctx = self.forward()
        return {name: backend.get(x).copy()
                for name, x in zip(FIGURE, (y, *self.op.backward(self.arrays[3], ctx)), strict=True)}

    def check(self, run, figures, results, prefix, allowed=1.0):
        """Compare results {name: (T, B, heads * C)} with the references.  allowed: of the bounds."""
        for name in results:
            figure = figures[FIGURE[name]]
            worst = max(float((np.abs(self.head(results[name], b, h) - made[name][0]) / (made[name][1] + TINY)).max())
                        for (b, h), made in self.references.items())
            run.check(figure, f'{prefix} {name}, {len(self.references)} heads', worst, allowed)

    def flops(self):
        """Return the operations of forward and backward.  With a causal mask they count half, as in other benchmarks."""
        T, B, heads, C, causal = self.shape
        forward = 4 * B * heads * T * T * C / (2 if causal else 1)
        return {'forward': forward, 'backward': 2.5 * forward}


class Flash:
    """PyTorch's scaled_dot_product_attention in bfloat16: flash attention on a GPU, any kernel on the CPU."""

    def __init__(self, torch, case):
        self.torch, (T, B, self.heads, self.C, self.causal) = torch, case.shape
        to_heads = [torch.put(x).bfloat16().reshape(T, B, self.heads, self.C).permute(1, 2, 0, 3).contiguous()
                    for x in case.given]
        self.inputs, self.dy = [x.requires_grad_() for x in to_heads[:3]], to_heads[3]
        self.y = self.forward()

    def forward(self):
        from torch.nn.attention import SDPBackend, sdpa_kernel
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if self.torch.has_gpu else contextlib.nullcontext():
            return self.torch.torch.nn.functional.scaled_dot_product_attention(*self.inputs, is_causal=self.causal)

    def backward(self):
        return self.torch.torch.autograd.grad(self.y, self.inputs, self.dy, retain_graph=True)

    def results(self):
        arrays = [x.detach().permute(2, 0, 1, 3).flatten(2).float().cpu().numpy() for x in (self.forward(), *self.backward())]
        return dict(zip(FIGURE, arrays, strict=True))


def attention(run):
    """Time attention with wgmma, with mma.sync and in PyTorch; compare with float64 before, and bit for bit after."""
    with precision_of('bf16', stores_bf16=True):
        _attention(run)


def _attention(run):
    gpu, torch, sizes = run.gpu, run.torch, run.sizes
    for shape in sizes.attention:
        name = f'attention {shape.T}x{shape.B}x{shape.heads}x{shape.C}{" causal" if shape.causal else ""}'
        if run.is_over():
            run.figure(name)
            continue
        case = Case(shape)
        calls, before = {}, {}
        figures = {part: run.figure(f'{name} {part}') for part in ('forward', 'backward')}
        if None in figures.values():
            continue
        for kernels in ('wgmma', 'mma'):
            gpu.attention = kernels
            before[kernels] = case.results()
            case.check(run, figures, before[kernels], kernels)
            calls['ours' if kernels == 'wgmma' else kernels] = _calls(gpu, case, kernels)
        if torch:
            try:
                flash = Flash(torch, case)
                # It may round other intermediate results.
                case.check(run, figures, flash.results(), 'torch', 8.0)
                calls['torch'] = {'forward': (repeated(flash.forward), torch.wait),
                                  'backward': (repeated(flash.backward), torch.wait)}
            except Exception as error:                  # report and leave out a contestant that fails
                print(f'torch flash attention: left out ({" ".join(str(error).split())[:200]})')
        flops = case.flops()
        for part, figure in figures.items():
            seconds = median_seconds({who: call[part] for who, call in calls.items()}, sizes.product_turns,
                                     sizes.product_seconds)
            mma = seconds.pop('mma')
            rates = {who: flops[part] / s for who, s in {**seconds, 'mma': mma}.items()}
            run.timed(figure, seconds, flops=flops[part], mma_s=mma, flops_per_s=rates)
            note = ', '.join(f'{who} {rate * 1e-12:.1f}' for who, rate in rates.items())
            for kernels, first in before.items():
                gpu.attention = kernels
                same_bits(run, figure, {f'{kernels} {name}': x for name, x in case.results().items() if FIGURE[name] == part},
                          {f'{kernels} {name}': x for name, x in first.items()})
            run.show(figure, f'TFLOP/s: {note};')
        gpu.attention = 'by size'


def _calls(gpu, case, kernels):
    """Return {part: (run, wait)} of forward and backward with these kernels."""
    _, ctx = case.forward()

    def with_kernels(call):
        def run(n):
            gpu.attention = kernels
            for _ in range(n):
                call()
        return run, gpu.synchronize
    return {'forward': with_kernels(case.forward), 'backward': with_kernels(lambda: case.op.backward(case.arrays[3], ctx))}
