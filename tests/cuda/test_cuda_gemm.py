"""Matrix products of the CUDA library, on the emulator: layouts, precisions, parts of K, bfloat16.

What the op table asks of every library is asked there; here is what only this one has: operands that are rounded, sums that
are cut into parts, several kernels for one product.
"""
import ctypes
import itertools
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from emulated import BF16, FP32, LIBRARY, TF32, call, library, real

from bench import gpu_products
from pyops import PRECISIONS

LADDER = ROOT / 'build' / 'emulated' / 'ladder'
pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason='make emulated')


@pytest.fixture
def precision():
    yield lambda p: library().pyops_set_precision(p)
    library().pyops_set_precision(FP32)


def gemm(c, a, b, bias=None, accumulate=0, relu=0):
    (M, K), N = a.shape, b.shape[1]
    steps = [s // 4 for x in (a, b) for s in x.strides]
    call('gemm', c, a, b, bias, M, N, K, c.strides[0] // 4, *steps, accumulate, relu)
    return c


# ---- what precision makes of an operand ------------------------------------------------------------------------------

def rounded(x, p):
    return gpu_products.rounded(x, PRECISIONS[p])


def bf16(x):
    return (rounded(x, BF16).view(np.uint32) >> 16).astype(np.uint16)


def bound(a, b, extra=0.0):
    """What float32 sums of K rounded operands may lose: products of two TF32 or bfloat16 numbers are exact in float32, so the
    sums alone are rounded, by sqrt(K) roundings of the terms' size with a margin of 4, as in test_kernels.py."""
    k = a.shape[1]
    return 4 * np.finfo(np.float32).eps * (np.sqrt(k + 1) * (np.abs(a) @ np.abs(b) / np.sqrt(max(k, 1))) + extra) + 1e-30


def check(c, a, b, p, add=0.0, relu=0):
    a, b = rounded(a, p).astype(np.float64), rounded(b, p).astype(np.float64)
    want = a @ b + add
    assert (np.abs(c - (np.maximum(want, 0) if relu else want)) <= bound(a, b, 4)).all()


# ---- layouts and sizes -----------------------------------------------------------------------------------------------

def laid_out(x, transposed, shifted):
    """The values of x, along either axis; shifted: a block of a larger matrix, whose lines are no multiple of 16 bytes."""
    rows, columns = x.T.shape if transposed else x.shape
    memory = np.full((rows + 2, columns + 3 if shifted else -(-columns // 4) * 4), np.nan, np.float32)
    block = memory[1:1 + rows, 1:1 + columns] if shifted else memory[:rows, :columns]
    block[...] = x.T if transposed else x
    return block.T if transposed else block


@pytest.mark.parametrize('p', (FP32, TF32, BF16), ids=('fp32', 'tf32', 'bf16'))
@pytest.mark.parametrize('M,N,K', [(1, 1, 1), (1, 70, 33), (70, 1, 64), (33, 130, 65), (64, 64, 64), (129, 131, 17),
                                   (260, 260, 40)])
def test_every_layout_of_every_size(M, N, K, p, precision):
    rng = np.random.default_rng(M * 10007 + N * 101 + K)
    a, b, bias = (rng.standard_normal(s).astype(np.float32) for s in ((M, K), (K, N), (N,)))
    precision(p)
    first = None
    for across_a, across_b, shift_a, shift_b in itertools.product((False, True), repeat=4):
        frame = np.full((M + 2, N + 3), -7.25, np.float32)
        c = gemm(frame[1:-1, 1:-2], laid_out(a, across_a, shift_a), laid_out(b, across_b, shift_b))
        first = c.copy() if first is None else first
        assert (c == first).all(), 'the layout changed a bit'
        frame[1:-1, 1:-2] = -7.25
        assert (frame == -7.25).all(), 'wrote beyond its block'
    check(first, a, b, p)
    for accumulate, given, relu in itertools.product((0, 1), (None, bias), (0, 1)):
        c = np.full((M, N), 1.5 if accumulate else np.nan, np.float32)
        gemm(c, a, b, given, accumulate, relu)
        check(c, a, b, p, 1.5 * accumulate + (0 if given is None else given), relu)


@pytest.mark.parametrize('p', (FP32, TF32, BF16), ids=('fp32', 'tf32', 'bf16'))
def test_any_strides(p, precision):
    rng = np.random.default_rng(1)
    precision(p)
    a, b = rng.standard_normal((50, 90)).astype(np.float32), rng.standard_normal((90, 70)).astype(np.float32)
    for view in (lambda x: np.repeat(x, 3, 1)[:, ::3], lambda x: np.ascontiguousarray(x[::-1])[::-1],
                 lambda x: np.broadcast_to(x[:1], x.shape), lambda x: np.broadcast_to(x[:, :1], x.shape)):
        check(gemm(np.full((50, 70), np.nan, np.float32), view(a), view(b)), view(a), view(b), p)


@pytest.mark.parametrize('p', (FP32, TF32, BF16))
def test_without_terms_the_bias_is_left(p, precision):
    precision(p)
    bias, none = np.arange(-3, 4, dtype=np.float32), np.zeros((40, 0), np.float32)
    c = gemm(np.full((40, 7), np.nan, np.float32), none, np.zeros((0, 7), np.float32), bias)
    assert (c == bias).all()
    gemm(c, none, np.zeros((0, 7), np.float32), bias, 1, 1)
    assert (c == np.maximum(2 * bias, 0)).all()


@pytest.mark.parametrize('p', (FP32, TF32, BF16))
def test_nan_and_infinity_pass_in_their_row_and_column_alone(p, precision):
    precision(p)
    a, b = np.ones((70, 40), np.float32), np.ones((40, 66), np.float32)
    a[4, 39], b[3, 30] = np.nan, np.inf
    c = gemm(np.empty((70, 66), np.float32), a, b, relu=1)
    others = np.delete(c, 4, 0)
    assert np.isnan(c[4]).all() and np.isposinf(others[:, 30]).all() and (np.delete(others, 30, 1) == 40).all()


# ---- parts of K ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('p', (FP32, TF32, BF16), ids=('fp32', 'tf32', 'bf16'))
@pytest.mark.parametrize('M,N,K', [(17, 9, 5000), (40, 33, 4103), (1, 1, 9001)])
def test_few_tiles_share_a_long_sum(M, N, K, p, precision):
    """Fewer tiles than multiprocessors and a long K: parts of it in scratch memory, added in order."""
    rng = np.random.default_rng(K)
    precision(p)
    a, b, bias = (rng.standard_normal(s).astype(np.float32) for s in ((M, K), (K, N), (N,)))
    c = gemm(np.full((M, N), np.nan, np.float32), a, b)
    check(c, a, b, p)
    assert (gemm(np.empty((M, N), np.float32), a, b) == c).all(), 'not the same bits twice'
    frame = np.full((M, N + 2), 2.5, np.float32)
    gemm(frame[:, :N], a, b, bias, 1, 1)
    check(frame[:, :N], a, b, p, bias + 2.5, 1)
    assert (frame[:, N:] == 2.5).all()


@pytest.mark.parametrize('p', (FP32, TF32, BF16), ids=('fp32', 'tf32', 'bf16'))
@pytest.mark.parametrize('sizes', [((33, 9, 40), (70, 64, 33)), ((130, 256, 128), (150, 128, 256)),
                                   ((40, 30, 2100), (64, 64, 64))])
def test_products_that_share_a_launch_have_the_bits_of_separate_ones(sizes, p, precision):
    precision(p)
    rng = np.random.default_rng(8)
    x, weight, dy = ([rng.standard_normal(shape).astype(np.float32) for shape in shapes] for shapes in (
        [(R, I) for R, O, I in sizes], [(O, I) for R, O, I in sizes], [(R, O) for R, O, I in sizes]))
    together, apart = ([np.zeros_like(array) for array in (*dy, *x, *weight)] for _ in range(2))        # y, dx, dweight
    order = [size for both in zip(*sizes, strict=True) for size in both]
    call('linear_pair', *together[:2], *x, *weight, None, None, *order)
    call('linear_pair_backward', *together[2:], None, None, *dy, *x, *weight, *order, 0, 0)
    for i, (R, O, I) in enumerate(sizes):
        gemm(apart[i], x[i], weight[i].T)
        call('linear_backward', apart[2 + i], apart[4 + i], None, dy[i], x[i], weight[i], R, O, I, 0, 0)
    for got, want in zip(together, apart, strict=True):
        assert (got == want).all() and want.any()


PARTS = '''
import numpy as np, sys
from emulated import BF16, call, library, real
from test_cuda_gemm import gemm, matrix_bf16
rng, results = np.random.default_rng(3), []
for p, (M, N, K) in ((0, (70, 33, 5000)), (2, (64, 64, 4096))):
    library().pyops_set_precision(p)
    results.append(gemm(np.zeros((M, N), np.float32), *(rng.standard_normal(s).astype(np.float32) for s in ((M, K), (K, N)))))
    dy, x = (rng.standard_normal((K, n)).astype(np.float32) for n in (M, N))
    results += [np.zeros((M, N), np.float32), np.zeros(M, np.float32), np.zeros((K, N), np.float32)]
    dweight, dbias, dx = results[-3:]
    call("linear_backward", dx, dweight, dbias, dy, x, rng.standard_normal((M, N)).astype(np.float32), K, M, N, 0, 0)
a, b = (matrix_bf16(rng, rows, 8192, 8192, 0) for rows in (128, 256))     # by wgmma, in parts
results.append(np.zeros((128, 256), np.float32))
call("gemm_bf16", results[-1], a, b, 128, 256, 8192, 256, 8192, 8192, 0)
dy, x = (matrix_bf16(rng, 2056, n, n, 0) for n in (120, 104))
results += [np.zeros((120, 104), np.float32), np.zeros(120, np.float32)]
call("linear_backward", None, *results[-2:], real(dy), real(x), None, 2056, 120, 104, 0, 0)
sys.stdout.buffer.write(b"".join(x.tobytes() for x in results))
'''


def test_parts_of_a_sum_are_added_in_one_order_whichever_block_is_the_last():
    def bits(order):
        paths = os.pathsep.join(str(ROOT / path) for path in ('', 'tests', 'tests/helpers', 'tests/cuda'))
        environment = os.environ | {'PYTHONPATH': paths, 'EMU_ORDER': order}
        done = subprocess.run([sys.executable, '-c', PARTS], cwd=ROOT, env=environment, capture_output=True, timeout=480)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout
    first = bits('forward')
    assert len(first) == 4 * (2 * 70 * 33 + 70 + 5000 * 33 + 2 * 64 * 64 + 64 + 4096 * 64 + 128 * 256 + 120 * 104 + 120)
    assert any(first)
    assert bits('reverse') == first and bits('5') == first


def batched(c, a, b, accumulate=0):
    batch = c.shape[:-2]
    a, b = np.broadcast_to(a, batch + a.shape[-2:]), np.broadcast_to(b, batch + b.shape[-2:])
    strides = np.array([s // 4 for x in (c, a, b) for s in x.strides[:-2]] + [0])
    inner = [s // 4 for x in (a, b) for s in x.strides[-2:]]
    call('gemm_batched', c, a, b, np.array([*batch, 0]), strides, len(batch), *c.shape[-2:], a.shape[-1], c.strides[-2] // 4,
         *inner, accumulate)


@pytest.mark.parametrize('p', (FP32, TF32, BF16), ids=('fp32', 'tf32', 'bf16'))
@pytest.mark.parametrize('shape_a,shape_b', [((3, 20, 50), (3, 50, 70)), ((2, 3, 33, 40), (40, 20)), ((1, 7, 5), (6, 5, 4)),
                                             ((5, 8, 3000), (5, 3000, 12)), ((4, 16, 2500), (2500, 9))])
def test_a_batch_has_the_bits_of_its_products(shape_a, shape_b, p, precision):
    """Also where a batch is joined to one tall matrix, and where every product is cut into parts of K."""
    rng = np.random.default_rng(5)
    precision(p)
    a, b = rng.standard_normal(shape_a).astype(np.float32), rng.standard_normal(shape_b).astype(np.float32)
    batch = np.broadcast_shapes(shape_a[:-2], shape_b[:-2])
    for accumulate in (0, 1):
        c = np.full((*batch, shape_a[-2], shape_b[-1]), 0.75, np.float32)
        want = c.copy()
        batched(c, a, b, accumulate)
        every_a, every_b = np.broadcast_to(a, batch + shape_a[-2:]), np.broadcast_to(b, batch + shape_b[-2:])
        for i in np.ndindex(batch):
            gemm(want[i], every_a[i], every_b[i], accumulate=accumulate)
        assert (c == want).all()


# ---- bfloat16 --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('R,C', [(1, 1), (5, 7), (64, 64), (65, 130), (130, 8), (3, 300), (0, 4)])
@pytest.mark.parametrize('transposed', (False, True))
@pytest.mark.parametrize('shifted', (False, True))
def test_to_bf16(R, C, transposed, shifted):
    x = np.random.default_rng(6).standard_normal((R, C)).astype(np.float32)
    special = np.array([0, -0.0, np.inf, -np.inf, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.4e38, 1e-40], np.float32)
    x.reshape(-1)[:len(special)] = special[:x.size]
    from_, ld = laid_out(x, transposed, shifted), C + (3 if shifted else -C % 8)
    y = np.full((R, ld), 7, np.uint16)
    call('to_bf16', y, from_, R, C, ld, *(s // 4 for s in from_.strides))
    assert (y[:, :C] == bf16(x)).all() and (y[:, C:] == 7).all()


def test_to_bf16_keeps_nan():
    x, y = np.array([[0x7FC00000, 0x7F800001, 0xFFFFFFFF]], np.uint32).view(np.float32), np.zeros((1, 3), np.uint16)
    call('to_bf16', y, x, 1, 3, 3, 3, 1)
    assert ((y & 0x7FFF) > 0x7F80).all()


def matrix_bf16(rng, rows, columns, ld, shift):
    """A block of random bfloat16 numbers at a multiple of 16 bytes, or not, with NaN between its rows."""
    memory = np.full(rows * ld + 16, 0x7FC0, np.uint16)
    start = -memory.ctypes.data % 16 // 2 + shift
    block = memory[start:start + rows * ld].reshape(rows, ld)[:, :columns]
    block[...] = bf16(rng.standard_normal((rows, columns)))
    return block


@pytest.mark.parametrize('shift', (0, 1), ids=('aligned', 'unaligned'))
@pytest.mark.parametrize('M,N,K,more', [(1, 1, 1, 7), (64, 64, 64, 0), (128, 256, 64, 8), (130, 257, 72, 16), (50, 300, 200, 0),
                                        (300, 40, 333, 11), (129, 129, 5, 2), (600, 520, 100, 4), (3, 4, 0, 8)])
def test_gemm_bf16(M, N, K, more, shift):
    """By bulk copies and wgmma where rows are at multiples of 16 bytes, and by other tiles where they are not."""
    rng = np.random.default_rng(7)
    a, b = (matrix_bf16(rng, rows, K, K + more, shift) for rows in (M, N))
    wide_a, wide_b = ((x.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for x in (a, b.T))
    for accumulate, ldc in itertools.product((0, 1), (N, N + 1, N + 4)):
        c = np.full((M, ldc), 0.5 if accumulate else np.nan, np.float32)
        call('gemm_bf16', c, a, b, M, N, K, ldc, K + more, K + more, accumulate)
        assert (np.abs(c[:, :N] - (wide_a @ wide_b + 0.5 * accumulate)) <= bound(wide_a, wide_b, 4)).all()
        assert (c[:, N:] == 0.5).all() if accumulate else np.isnan(c[:, N:]).all()


def test_gemm_bf16_refuses_rows_that_overlap():
    one = np.zeros(1, np.uint16)
    with pytest.raises(ValueError, match='gemm_bf16: M=1 N=1 K=5 ldc=1 lda=4 ldb=5'):
        call('gemm_bf16', np.zeros(1, np.float32), one, one, 1, 1, 5, 1, 4, 5, 0)


@pytest.mark.parametrize('p', (TF32, BF16), ids=('tf32', 'bf16'))
@pytest.mark.parametrize('across', (False, True))
def test_a_large_product_is_converted_first(across, p, precision):
    """Large enough, on the emulator's four multiprocessors, that two passes round the operands and turn them, for wgmma."""
    rng = np.random.default_rng(8)
    precision(p)
    M, N, K = 1023, 1020, 250
    a, b, bias = (rng.standard_normal(s).astype(np.float32) for s in ((M, K), (K, N), (N,)))
    c = np.full((M, N + 1), 1.0, np.float32)
    gemm(c[:, :N], laid_out(a, across, False), laid_out(b, across, True), bias, 1, 1)
    check(c[:, :N], a, b, p, bias + 1, 1)
    assert (c[:, N] == 1).all()


# ---- clusters whose blocks share loads by multicast --------------------------------------------------------------------

BY_SIZE, NEVER, ALWAYS = range(3)                      # of pyops_set_multicast


@pytest.fixture
def multicast():
    yield lambda wanted: library().pyops_set_multicast(wanted)
    library().pyops_set_multicast(BY_SIZE)


def gemm_real(c, a, b, bias=None, accumulate=0, relu=0):
    (M, K), N = a.shape, b.shape[1]
    steps = [s // 2 for x in (a, b) for s in x.strides]
    call('gemm', real(c), real(a), real(b), bias, M, N, K, c.strides[0] // c.itemsize, *steps, accumulate, relu)
    return c


def wide(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


def stored_bf16(rng, rows, columns, transposed):
    """A random matrix of bfloat16, stored or stored transposed, whose lines are multiples of 16 bytes."""
    if transposed:
        rows, columns = columns, rows
    x = matrix_bf16(rng, rows, columns, -(-columns // 8) * 8, 0)
    return x.T if transposed else x


# (M, N, K): one row of tiles, two, three and five, of 128 and of 256 columns; the last two in parts of K
SHARED_SIZES = [(100, 300, 72), (256, 520, 200), (300, 260, 136), (384, 256, 64), (600, 120, 136), (129, 257, 8),
                (100, 120, 2056), (300, 120, 4104)]


@pytest.mark.parametrize('across_a', (False, True))
@pytest.mark.parametrize('across_b', (False, True))
@pytest.mark.parametrize('M,N,K', SHARED_SIZES)
def test_blocks_that_share_loads_compute_the_bits_of_blocks_alone(M, N, K, across_a, across_b, multicast):
    rng = np.random.default_rng([M, N, K, across_a, across_b])
    a, b = stored_bf16(rng, M, K, across_a), stored_bf16(rng, K, N, not across_b)
    bias, before = rng.standard_normal(N).astype(np.float32), rng.standard_normal((M, N + 2)).astype(np.float32)
    wide_a, wide_b = wide(a).astype(np.float64), wide(b).astype(np.float64)
    for out, accumulate, given, relu in ((np.float32, 0, None, 0), (np.float32, 1, None, 0), (np.float32, 1, bias, 1),
                                         (np.uint16, 0, bias, 1)):
        found = {}
        for wanted in NEVER, ALWAYS:
            multicast(wanted)
            frame = before.astype(np.float32) if out == np.float32 else bf16(before)
            gemm_real(frame[:, :N], a, b, given, accumulate, relu)
            found[wanted] = frame.copy()
        assert (found[NEVER] == found[ALWAYS]).all()
        c = found[ALWAYS] if out == np.float32 else wide(found[ALWAYS])
        exact = wide_a @ wide_b + (before[:, :N] if accumulate else 0) + (0 if given is None else given)
        exact = np.maximum(exact, 0) if relu else exact
        allowed = bound(wide_a, wide_b, 8) + (0 if out == np.float32 else 2.0**-8 * np.abs(exact))
        assert (np.abs(c[:, :N] - exact) <= allowed).all()
        start = before if out == np.float32 else wide(bf16(before))
        assert (c[:, N:] == start[:, N:]).all(), 'wrote beyond its block'


def placed(x, ld, shift):
    """Return a copy of x in the middle of sevens, and all of that memory.  Rows are ld elements apart, and the first one is
    `shift` elements after a multiple of 16 bytes."""
    memory = np.full(len(x) * ld + 32, 7, x.dtype)
    start = -memory.ctypes.data % 16 // x.itemsize + 8 + shift
    block = memory[start:start + len(x) * ld].reshape(len(x), ld)[:, :x.shape[1]]
    block[...] = x
    return block, memory


@pytest.mark.parametrize('wanted', (NEVER, ALWAYS))
@pytest.mark.parametrize('M,N,K', [*SHARED_SIZES, (257, 193, 72), (272, 64, 72)])
def test_bulk_stores_write_the_bits_that_lanes_write(M, N, K, wanted, multicast):
    """Bulk stores write a c whose rows are at multiples of 16 bytes, lanes another one; no neighbour of c changes."""
    rng = np.random.default_rng([M, N, K])
    a, b = stored_bf16(rng, M, K, False), stored_bf16(rng, K, N, True)
    bias, before = rng.standard_normal(N).astype(np.float32), rng.standard_normal((M, N)).astype(np.float32)
    multicast(wanted)
    cases = list(itertools.product((np.float32, np.uint16), (0, 1), (None, bias), (0, 1)))
    # the emulator takes seconds for a large product; six of the cases have each pair of values
    for out, accumulate, given, relu in cases[::3] if M * N * K > 10**6 else cases:
        found = []
        for shift in 0, 1:
            c, memory = placed(before if out == np.float32 else bf16(before), -(-N // 8) * 8 + 8, shift)
            gemm_real(c, a, b, given, accumulate, relu)
            found.append(c.copy())
            c[...] = 7
            assert (memory == 7).all(), 'wrote beyond its block'
        assert (found[0] == found[1]).all()
        exact = wide(a).astype(np.float64) @ wide(b) + (0 if given is None else given)
        exact += accumulate * (before if out == np.float32 else wide(bf16(before)))
        exact = np.maximum(exact, 0) if relu else exact
        c = found[0] if out == np.float32 else wide(found[0])
        rounding = 0 if out == np.float32 else 2.0**-8 * np.abs(exact)
        assert (np.abs(c - exact) <= bound(wide(a), wide(b), 8) + rounding).all()


def row_sums(dy, before, parts):
    """Return before + the sums of the columns of dy (R, O), in the order of hopper_gemm.cu: each part of R in eight sums of
    every eighth row; pairs of these, the pairs from the first on, then the parts."""
    of_parts = []
    for part in parts:
        eight = np.zeros((8, dy.shape[1]), np.float32)
        for first in range(0, len(dy[part]), 8):
            some = dy[part][first:first + 8]
            eight[:len(some)] += some
        pairs = eight[::2] + eight[1::2]
        of_parts.append(((pairs[0] + pairs[1]) + pairs[2]) + pairs[3])
    total = of_parts[0]
    for one in of_parts[1:]:
        total = total + one
    return before + total


# (R, O, I, parts of R): O in one row of tiles, half of it, two and three; I in one column of tiles and in several
BIAS_SIZES = [(200, 304, 264, 1), (200, 40, 520, 1), (136, 256, 256, 1), (64, 384, 264, 1), (2056, 120, 104, 4),
              (4104, 296, 120, 4)]


@pytest.mark.parametrize('R,O,I,parts', BIAS_SIZES)
def test_wgmma_adds_the_gradient_of_a_bias_in_the_stated_order(R, O, I, parts, multicast):
    rng = np.random.default_rng([R, O, I])
    dy, x = (matrix_bf16(rng, R, columns, columns, 0) for columns in (O, I))
    before = rng.standard_normal(O).astype(np.float32)
    slots = -(-R // 64)
    steps = -(-slots // parts) * 64                     # rows of a part
    want = row_sums(wide(dy), before, [slice(first, first + steps) for first in range(0, R, steps)])
    exact = wide(dy).astype(np.float64).sum(0) + before
    assert (np.abs(want - exact) <= bound(np.ones((1, R)), np.abs(wide(dy)), 4)).all()
    for wanted in NEVER, ALWAYS:
        multicast(wanted)
        dweight, dbias = np.zeros((O, I), np.float32), before.copy()
        call('linear_backward', None, dweight, dbias, real(dy), real(x), None, R, O, I, 0, 0)
        assert dbias.tobytes() == want.tobytes()
        alone = np.zeros_like(dweight)
        call('linear_backward', None, alone, None, real(dy), real(x), None, R, O, I, 0, 0)
        assert dweight.tobytes() == alone.tobytes() and dweight.any()


ACTIVATIONS = 'silu', 'gelu', 'gelu_tanh'              # as numbered by pyops_activation


# Rows of c at the end of a piece of 16 and within it, c of one piece and with an end within a piece, and a sum in parts.
@pytest.mark.parametrize('wanted', (NEVER, ALWAYS))
@pytest.mark.parametrize('activation', ACTIVATIONS)
@pytest.mark.parametrize('R,O,I', [(257, 520, 136), (272, 64, 264), (300, 264, 72), (100, 120, 2056), (100, 2056, 120)])
def test_an_activation_in_the_epilogue_has_the_bits_of_its_kernel(R, O, I, activation, wanted, multicast):
    """Shift 0 has it in the epilogue, as the test of launches below shows; shift 1 has no bulk stores, so a kernel follows."""
    rng, kind = np.random.default_rng([R, O, I]), ACTIVATIONS.index(activation)
    x, dy, weight = (matrix_bf16(rng, rows, columns, columns, 0) for rows, columns in ((R, I), (R, O), (O, I)))
    bias, at = rng.standard_normal(O).astype(np.float32), bf16(3 * rng.standard_normal((R, I)))
    multicast(wanted)
    want_a, want_dx = (placed(np.zeros((R, n), np.uint16), n, 0)[0] for n in (O, I))
    want_y, want_dweight, want_dbias = np.empty_like(want_a), np.ones((O, I), np.float32), np.ones(O, np.float32)
    gemm_real(want_a, x, weight.T, bias)
    call(f'{activation}_forward', real(want_y), real(want_a), R * O)
    call('linear_backward', real(want_dx), want_dweight, want_dbias, real(dy), real(x), real(weight), R, O, I, 0, 0)
    call(f'{activation}_backward', real(want_dx), real(want_dx), real(at), R * I)
    for shift in 0, 1:
        (y, of_y), (a, of_a), (dx, of_dx), (there, _) = (placed(array, array.shape[1], shift)
                                                         for array in (want_y ^ 1, want_a ^ 1, want_dx ^ 1, at))
        dweight, dbias = np.ones((O, I), np.float32), np.ones(O, np.float32)
        call('linear_activation', real(y), real(a), real(x), real(weight), bias, R, O, I, kind)
        call('linear_activation_backward', real(dx), dweight, dbias, real(dy), real(x), real(there), real(weight), R, O, I,
             kind)
        for got, want in (y, want_y), (a, want_a), (dx, want_dx), (dweight, want_dweight), (dbias, want_dbias):
            assert got.tobytes() == want.tobytes()
        y[...], a[...], dx[...] = 7, 7, 7
        assert all((memory == 7).all() for memory in (of_y, of_a, of_dx)), 'wrote beyond its block'


# As above.  A slot of the residual has 128 columns: c ends in its first half, in its second half, and with it.  Fewer and more
# steps along K than masks of a lane.  The third size has tiles of 256 columns.
RESIDUAL_SIZES = (257, 520, 136), (272, 64, 1096), (400, 504, 72), (100, 1024, 120)


@pytest.mark.parametrize('p,wanted', [(0.0, NEVER), (0.3, NEVER), (0.3, ALWAYS)])
@pytest.mark.parametrize('R,O,I', RESIDUAL_SIZES)
def test_a_residual_in_the_epilogue_has_the_bits_of_its_kernel(R, O, I, p, wanted, multicast):
    """Shift 0 has it in the epilogue, as the test of launches below shows; shift 1 has no bulk stores, so a kernel follows."""
    rng, step, key, eps = np.random.default_rng([R, O, I]), np.array([3 + (5 << 32)]), 0x0123456789ABCDEF, 1e-5
    x, weight, residual = (matrix_bf16(rng, rows, columns, columns, 0) for rows, columns in ((R, I), (O, I), (R, O)))
    bias, norm_weight, norm_bias = (rng.standard_normal(O).astype(np.float32) for _ in range(3))
    multicast(wanted)
    want_sum, _ = placed(np.zeros((R, O), np.uint16), O, 0)
    want_y, want_mean, want_rstd = np.empty_like(want_sum), np.empty(R, np.float32), np.empty(R, np.float32)
    gemm_real(want_sum, x, weight.T, bias)
    call('residual_norm_forward', real(want_y), real(want_sum), want_mean, want_rstd, real(residual), real(want_sum), step,
         norm_weight, norm_bias, R, O, p, key, eps)
    assert not p or abs((want_sum == residual).mean() - p) < 0.05
    for shift in 0, 1:
        (y, of_y), (total, of_total), (there, _) = (placed(array, O, shift) for array in (want_sum ^ 1, want_sum ^ 1, residual))
        of_norm, mean, rstd = want_y ^ 1, np.zeros(R, np.float32), np.zeros(R, np.float32)
        call('linear_residual', real(y), real(x), real(weight), bias, real(there), step, R, O, I, p, key)
        call('linear_residual_norm', real(of_norm), real(total), mean, rstd, real(x), real(weight), bias, real(there), step,
             norm_weight, norm_bias, R, O, I, p, key, eps)
        for got, want in ((y, want_sum), (total, want_sum), (of_norm, want_y), (mean, want_mean), (rstd, want_rstd)):
            assert got.tobytes() == want.tobytes()
        y[...], total[...] = 7, 7
        assert (of_y == 7).all() and (of_total == 7).all(), 'wrote beyond its block'


@pytest.mark.parametrize('p', (TF32, BF16), ids=('tf32', 'bf16'))
def test_converted_operands_are_shared_with_the_same_bits(p, precision, multicast):
    rng = np.random.default_rng(9)
    precision(p)
    M, N, K = 1023, 1020, 250                           # 8 rows of tiles, the last of them ragged
    a, b = (rng.standard_normal(s).astype(np.float32) for s in ((M, K), (K, N)))
    found = []
    for wanted in NEVER, ALWAYS:
        multicast(wanted)
        found.append(gemm(np.full((M, N), np.nan, np.float32), a, b))
    assert (found[0] == found[1]).all()
    check(found[1], a, b, p)


@pytest.mark.parametrize('tf32', (0, 1))
@pytest.mark.parametrize('valid', (0, 1, 130, 400))
def test_rows_that_only_the_device_can_count_are_shared_with_the_same_bits(valid, tf32, precision, multicast):
    """The output layer multiplies as many rows as have labels, and scatters the gradients of the others."""
    rng = np.random.default_rng(valid)
    R, D, V = 400, 136, 530
    x, weight = (matrix_bf16(rng, rows, D, D, 0) for rows in (R, V))
    if tf32:
        precision(TF32)
        x, weight = wide(x), wide(weight)
    given = (lambda array: array) if tf32 else real
    bias, dloss = rng.standard_normal(V).astype(np.float32), np.full(1, 0.7, np.float32)
    labels = np.full(R, -1, np.int32)
    labels[rng.choice(R, valid, replace=False)] = rng.integers(0, V, valid)
    size = library().pyops_linear_cross_entropy_work
    size.argtypes, size.restype = [ctypes.c_int64] * 3 + [ctypes.c_int32] * 3, ctypes.c_int64
    found = []
    for wanted in NEVER, ALWAYS:
        multicast(wanted)
        loss, count = np.zeros(1, np.float32), np.zeros(1, np.int32)
        work = np.zeros(size(R, D, V, 1, 1 - tf32, tf32), np.float32)
        dx = np.full((R, D), np.nan, np.float32) if tf32 else np.full((R, D), 0x7FC0, np.uint16)
        dweight, dbias = np.ones((V, D), np.float32), np.ones(V, np.float32)
        call('linear_cross_entropy', loss, count, given(dx), dweight, dbias, dloss, given(x), given(weight), bias, labels, work,
             R, D, V, -1, 0.1, tf32)
        assert count == valid
        found.append((loss, dx, dweight, dbias))
    for alone, shared in zip(*found, strict=True):
        assert alone.tobytes() == shared.tobytes()
    assert (dweight != 1).any() == (dx != 0).any() == (valid > 0)


# No kernel runs, so nothing reads the arrays at these addresses.
LISTED = '''
from emulated import library
import test_cuda_gemm as here
for M, N, K, wanted in SIZES:
    library().pyops_set_multicast(wanted)
    here.call("gemm", 1 << 20, 1 << 63 | 2 << 20, 1 << 63 | 3 << 20, None, M, N, K, N, K, 1, 1, K, 0, 0)
'''


def launches(tmp_path, code, processors=4):
    """Return the lines of EMU_LAUNCHES for some code, each as a list of its columns."""
    path = tmp_path / 'launches'
    path.unlink(missing_ok=True)
    folders = os.pathsep.join(str(ROOT / path) for path in ('', 'tests', 'tests/helpers', 'tests/cuda'))
    environment = os.environ | {'PYTHONPATH': folders, 'EMU_LAUNCHES': str(path), 'EMU_MULTIPROCESSORS': str(processors)}
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stderr
    return [line.split('\t') for line in path.read_text().splitlines()]


def listed(tmp_path, sizes, processors=4):
    """Return for each product (M, N, K, multicast), of bfloat16 arrays along K, its blocks and blocks per cluster."""
    lines = launches(tmp_path, LISTED.replace('SIZES', repr(sizes)), processors)
    assert len(lines) == len(sizes) and all(line[0].startswith('hopper_tiles') for line in lines)
    return [(int(line[1].split(',')[0]), int(line[4])) for line in lines]


ACTIVATED = '''
import test_cuda_gemm as here
R, O, I, mark = 257, 520, 136, 1 << 63
def at(i): return mark | i << 20
here.call("linear_activation", at(1) + FIRST, at(2), at(3), at(4), None, R, O, I, 1)
here.call("linear_activation_backward", at(5), 6 << 20, None, at(7), at(3), at(8) + FIRST, at(4), R, O, I, 1)
'''


CONNECTED = '''
import test_cuda_gemm as here
mark = 1 << 63
def at(i): return mark | i << 20
for R, O, I in here.RESIDUAL_SIZES:
    here.call("linear_residual", at(1), at(2), at(3), None, at(4) + FIRST, 5 << 20, R, O, I, 0.3, 7)
here.call("linear_residual_norm", at(1), at(2), 3 << 20, 4 << 20, at(5), at(6), None, at(7) + FIRST, 8 << 20, 9 << 20, 10 << 20,
          R, O, I, 0.3, 7, 1e-5)
# few tiles and a long sum: several blocks share a tile
here.call("linear_residual", at(1), at(2), at(3), None, at(4), 5 << 20, 128, 128, 4096, 0.3, 7)
'''


def test_a_residual_in_the_epilogue_takes_no_launch(tmp_path):
    def found(first):
        return [re.search(r'\w+', line[0])[0] for line in launches(tmp_path, CONNECTED.replace('FIRST', first))]
    assert found('0') == ['hopper_tiles'] * len(RESIDUAL_SIZES) + ['hopper_tiles', 'forward', 'hopper_tiles', 'drop']
    assert found('2') == ['hopper_tiles', 'drop'] * len(RESIDUAL_SIZES) + ['hopper_tiles', 'forward', 'hopper_tiles', 'drop']


BIASES = '''
import test_cuda_gemm as here
for R, O, I, _ in here.BIAS_SIZES:
    here.call("linear_backward", None, 1 << 20, 2 << 20, 1 << 63 | 3 << 20, 1 << 63 | 4 << 20, None, R, O, I, 0, 0)
R, O, I = 200, 300, 260                                 # rows are no multiples of 16 bytes: other tiles, too large for it
here.call("linear_backward", None, 1 << 20, 2 << 20, 1 << 63 | 3 << 20, 1 << 63 | 4 << 20, None, R, O, I, 0, 0)
'''


def test_the_gradient_of_a_bias_takes_no_launch_where_wgmma_computes_the_one_of_the_weight(tmp_path):
    found = [re.search(r'\w+', line[0])[0] for line in launches(tmp_path, BIASES)]
    assert found[:len(BIAS_SIZES)] == ['hopper_tiles'] * len(BIAS_SIZES)
    assert found[len(BIAS_SIZES):][:1] == ['bf16_product']


CONVERTED = '''
from emulated import library
import test_cuda_gemm as here
library().pyops_set_precision(here.TF32)
for M, N, K in SIZES:
    here.call("gemm", 1 << 30, 2 << 30, 3 << 30, None, M, N, K, N, 1, M, N, 1, 0, 0)
'''


def test_long_sums_of_converted_operands_are_divided_where_the_workspace_has_room(tmp_path):
    """The tests of the output layer compute such parts."""
    lines = launches(tmp_path, CONVERTED.replace('SIZES', '[(1536, 1920, 3072)]'), 132)
    *conversions, product = [re.search(r'\w+', line[0])[0] for line in lines]
    assert conversions == ['convert_transposed'] * 2 and product == 'hopper_tiles'
    assert lines[-1][1] == '132,1,1'                    # without parts there are 96 tiles of 256 columns


@pytest.mark.parametrize('first,names', [
    (0, ['hopper_tiles'] * 3), (2, ['hopper_tiles', 'flat', 'hopper_tiles', 'hopper_tiles', 'flat'])])
def test_an_activation_takes_no_launch_where_its_arrays_are_aligned(first, names, tmp_path):
    found = launches(tmp_path, ACTIVATED.replace('FIRST', str(first)))
    assert [re.search(r'\w+', line[0])[0] for line in found] == names


def test_the_sizes_above_are_computed_by_wgmma_in_clusters_and_without(tmp_path):
    found = listed(tmp_path, [(*size, wanted) for size in SHARED_SIZES for wanted in (NEVER, ALWAYS)])
    for i, (M, _, K) in enumerate(SHARED_SIZES):
        (alone, one), (shared, two) = found[2 * i:2 * i + 2]
        assert (one, two) == (1, 2) and shared % 2 == 0 and alone <= 4
        assert shared > alone or alone == 4             # 1 and 3 rows of tiles have partners below c
        in_parts = K > 2000
        assert not in_parts or alone > -(-M // 128)


def test_loads_are_shared_where_pairs_of_tiles_fill_the_device_in_no_more_waves(tmp_path):
    """On 132 multiprocessors.  3 x 44 tiles are one wave, and the 2 x 44 pairs of a cluster would be two."""
    shared, alone = [(16384, 2048, 512), (13440, 512, 4096)], [(128, 65536, 256), (128 * 3, 256 * 44, 256)]
    found = listed(tmp_path, [(*size, wanted) for wanted in (BY_SIZE, NEVER) for size in shared + alone], 132)
    assert found == [(132, 2)] * 2 + [(132, 1)] * 6
    too_few = 1024, 1024, 256                           # 64 tiles of 128 x 128
    assert listed(tmp_path, [(*too_few, BY_SIZE), (*too_few, ALWAYS)], 132) == [(64, 1), (64, 2)]


def test_an_unknown_multicast_is_an_error():
    assert library().pyops_set_multicast(3)
    assert library().pyops_last_error() == b'set_multicast: multicast=3, expected 0 (by size), 1 (never) or 2 (always)'


# ---- the ladder ------------------------------------------------------------------------------------------------------

@pytest.mark.skipif(not LADDER.exists(), reason='make emulated')
def test_every_step_of_the_ladder_finds_the_same_sums():
    got = subprocess.run([LADDER, '256', '512', '192', LIBRARY], capture_output=True, text=True, timeout=480, check=True)
    lines = got.stdout.splitlines()
    assert lines[0] == 'c = a b of 256 x 512 x 192' and len(lines) == 1 + 9 + 4
    assert [line[0] for line in lines[1:10]] == list('123456789') and all(line.endswith(' right') for line in lines[1:])
    wrong = subprocess.run([LADDER, '250', '512', '192'], capture_output=True, text=True, timeout=120)
    assert wrong.returncode == 2 and 'multiples of 256' in wrong.stderr
