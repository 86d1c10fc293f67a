"""Kernels below the ops: the matrix product with all its strides, the optimiser, the small ones, the library's manners.

Runs once for each instruction set and on the emulation of a GPU, as the op table does.
"""
import functools
import itertools
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from backends import cpu_has
from conftest import ROOT, environment_without
from places import gemm, get, launch, of_threads, on_the_cpu, put

from pyops import backend, init
from pyops.backend import library
from pyops.ops import Embedding, Linear
from pyops.ops.elementwise import Sigmoid
from pyops.optim import SGD, Adam, AdamW, decaying_rate
from pyops.params import Parameters, Spec

TILE_M, TILE_N = map(int, library.cpu().ffi.string(library.cpu().lib.pyops_gemm_tile()).decode().split('x'))


def rounding_bound(a, b, extra=0.0):
    """What float32 may lose in a sum of K products: sqrt(K) roundings of the terms' size, with a margin of 4."""
    k = a.shape[1]
    return 4 * np.finfo(np.float32).eps * (np.sqrt(k + 1) * (np.abs(a) @ np.abs(b) / np.sqrt(max(k, 1))) + extra) + 1e-30


@pytest.fixture(params=['fp32', 'bf16'])
def precision(request):
    """Run a test of the CPU twice, with float32 factors and with bfloat16 factors."""
    backend.HOST.precision = request.param
    yield
    backend.HOST.precision = 'fp32'


# ---- matrix product ---------------------------------------------------------------------------------

M_SIZES = (1, TILE_M - 1, TILE_M, TILE_M + 1, 2 * TILE_M, 151)
N_SIZES = (1, TILE_N - 1, TILE_N, TILE_N + 1, 2 * TILE_N, 67)


@pytest.mark.parametrize('M', M_SIZES)
@pytest.mark.parametrize('N', N_SIZES)
@pytest.mark.parametrize('K', (1, 7, 256, 300))
def test_gemm_of_every_tile_edge(M, N, K):
    rng = np.random.default_rng(M * 10007 + N * 101 + K)
    a, b, bias = rng.standard_normal((M, K)), rng.standard_normal((K, N)), rng.standard_normal(N)
    a, b, bias = (x.astype(np.float32) for x in (a, b, bias))
    want = a.astype(np.float64) @ b
    bound = rounding_bound(a.astype(np.float64), b, 4)
    for accumulate, given, relu in itertools.product((0, 1), (None, bias), (0, 1)):
        c = np.full((M, N), 1.5 if accumulate else np.nan, np.float32)          # overwriting must not read c
        gemm(c, a, b, given, accumulate, relu)
        sums = want + (0 if given is None else bias) + 1.5 * accumulate
        err = np.abs(c - (np.maximum(sums, 0) if relu else sums))
        assert (err <= bound).all(), (accumulate, given is not None, relu)


LAYOUTS = {
    'rows': lambda x: x,
    'transposed': lambda x: np.ascontiguousarray(x.T).T,
    'block of a larger matrix': lambda x: np.pad(x, 3)[3:-3, 3:-3],
    'every second column': lambda x: np.repeat(x, 2, 1)[:, ::2],
    'rows backwards': lambda x: np.ascontiguousarray(x[::-1])[::-1],
    'one row for all (stride 0)': None,
}


@pytest.mark.parametrize('layout_a', LAYOUTS)
@pytest.mark.parametrize('layout_b', LAYOUTS)
def test_gemm_takes_any_strides_without_a_copy(layout_a, layout_b):
    rng = np.random.default_rng(1)
    M, N, K = 2 * TILE_M + 1, TILE_N + 3, 41
    arrays = []
    for layout, shape in ((layout_a, (M, K)), (layout_b, (K, N))):
        x = rng.standard_normal(shape).astype(np.float32)
        arrays.append(LAYOUTS[layout](x) if LAYOUTS[layout] else np.broadcast_to(x[0], shape))
    a, b = arrays
    frame = np.full((M + 2, N + 5), -7.25, np.float32)
    c = frame[1:-1, 2:-3]
    gemm(c, a, b)
    assert (np.abs(c - a.astype(np.float64) @ b) <= rounding_bound(a.astype(np.float64), b)).all()
    frame[1:-1, 2:-3] = -7.25
    assert (frame == -7.25).all(), 'wrote beyond its block'


@pytest.mark.parametrize('M,N,K', [(0, 5, 3), (5, 0, 3), (4, 3, 0)])
def test_gemm_of_empty_operands(M, N, K):
    c, bias = np.full((M, N), 2.0, np.float32), np.arange(N, dtype=np.float32)
    a, b = np.zeros((M, max(K, 1)), np.float32)[:, :K], np.zeros((max(K, 1), N), np.float32)[:K]
    gemm(c, a, b, bias, accumulate=1)
    assert (c == 2 + bias).all()
    gemm(c, a, b)
    assert (c == 0).all()
    gemm(c, a, b, bias - 1)
    gemm(c, a, b, bias - 1, accumulate=1, relu=1)
    assert (c == np.maximum(2 * bias - 2, 0)).all()


@pytest.mark.parametrize('M,N,K', [(1152, 768, 256), (128, 3000, 256), (2500, 256, 300), (300, 256, 3000)])
def test_large_gemm_against_a_product_with_a_vector(M, N, K):
    """c t = a (b t) for a random t costs O(n^2) in float64, so the large shapes of the programs can be checked."""
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((M, K)).astype(np.float32), rng.standard_normal((K, N)).astype(np.float32)
    t, c = rng.standard_normal(N), np.empty((M, N), np.float32)
    gemm(c, a, b)
    err = np.abs(c @ t - a.astype(np.float64) @ (b @ t)).max()
    assert err <= 20 * np.finfo(np.float32).eps * np.sqrt(K * N)


def test_gemm_of_integers_is_exact_and_independent_of_threads():
    """Small integers leave no rounding, so every instruction set and device must give these very bits."""
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-8, 9, shape).astype(np.float32) for shape in ((201, 333), (333, 170)))
    c = np.empty((201, 170), np.float32)
    gemm(c, a, b)
    assert (c == a.astype(np.float64) @ b).all()


@of_threads
@pytest.mark.parametrize('turned', [False, True])
@pytest.mark.parametrize('M,N,K', [(1, 9000, 1100), (200, 190, 700), (1000, 33, 517), (22, 20, 20000), (9, 9, 120000)])
def test_gemm_gives_the_same_bits_for_any_number_of_threads(M, N, K, turned, precision):
    """Tall and low products, too, of which a thread must not get so few rows that these are summed in another order."""
    rng = np.random.default_rng(4)
    a, b = rng.standard_normal((M, K)).astype(np.float32), rng.standard_normal((K, N)).astype(np.float32)
    bias = rng.standard_normal(N).astype(np.float32)
    if turned:
        b = np.ascontiguousarray(b.T).T
    before, results = backend.threads(), []
    try:
        for threads in (1, 2, 3, 4, 7):
            backend.set_threads(threads)
            c = np.empty((M, N), np.float32)
            gemm(c, a, b, bias)
            results.append(c)
    finally:
        backend.set_threads(before)
    assert all((c == results[0]).all() for c in results)


@of_threads
@pytest.mark.parametrize('M,N,K', [(600, 130, 140), (300, 300, 300), (60, 40, 4000), (17, 1200, 600)])
def test_the_bits_of_a_product_do_not_depend_on_the_speeds_of_threads(M, N, K):
    """Shares follow the speeds in the products before.  More threads than cores have different ones."""
    rng = np.random.default_rng(6)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((M, K), (K, N)))
    before, expected = backend.threads(), np.empty((M, N), np.float32)
    try:
        backend.set_threads(1)
        gemm(expected, a, b, None)
        backend.set_threads((os.cpu_count() or 1) + 1)
        for _ in range(30):
            c = np.empty_like(expected)
            gemm(c, a, b, None)
            assert np.array_equal(c, expected)
    finally:
        backend.set_threads(before)


@of_threads
@pytest.mark.parametrize('order', 'CF')
@pytest.mark.parametrize('M,K', [(9, 40), (33, 700), (5000, 519)])
def test_a_product_with_a_vector_has_the_bits_of_a_column_for_any_number_of_threads(M, K, order):
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((M, K)).astype(np.float32, order), rng.standard_normal((K, 40)).astype(np.float32)
    before = backend.threads()
    try:
        for accumulate, relu in itertools.product((0, 1), (0, 1)):
            columns = np.ones((M, 40), np.float32)
            gemm(columns, a, b, None, accumulate, relu)
            for threads in (1, 2, 3):
                backend.set_threads(threads)
                c = np.ones((M, 1), np.float32)
                gemm(c, a, np.ascontiguousarray(b[:, 7:8]), None, accumulate, relu)
                assert np.array_equal(c, columns[:, 7:8]), (threads, accumulate, relu)
    finally:
        backend.set_threads(before)


@on_the_cpu                     # a GPU may divide K according to the number of rows
@pytest.mark.parametrize('N', (1, 3, 8, 16, 19, 64, 77))
@pytest.mark.parametrize('K', (1, 3, 16, 37, 256, 600))
def test_a_row_of_a_product_has_the_same_bits_for_any_number_of_rows(N, K, precision):
    """Rows along K times columns along K, as in a linear layer: translations must not depend on the batch."""
    rng = np.random.default_rng(N * 1000 + K)
    a, weight, bias, before = (rng.standard_normal(shape).astype('f') for shape in ((40, K), (N, K), N, (40, N)))
    for given, relu, accumulate in itertools.product((None, bias), (0, 1), (0, 1)):
        def product(rows, given=given, relu=relu, accumulate=accumulate):
            c = before[rows].copy()
            gemm(c, a[rows], weight.T, given, accumulate, relu)
            return c
        whole = product(slice(0, 40))
        for M in range(1, 20):
            assert np.array_equal(product(slice(5, 5 + M)), whole[5:5 + M]), (M, given is not None, relu, accumulate)


@pytest.mark.parametrize('M, N, K', [(9, 33, 20), (9, 133, 300)])        # the factors of the second one are split with AMX
def test_gemm_passes_nan_and_infinity_on(M, N, K):
    a, b = np.ones((M, K), np.float32), np.ones((K, N), np.float32)
    a[4, 7], b[3, 30] = np.nan, np.inf
    c = np.empty((M, N), np.float32)
    gemm(c, a, b)
    assert np.isnan(c[4]).all() and np.isfinite(np.delete(c, 4, 0)[:, :30]).all() and np.isinf(np.delete(c, 4, 0)[:, 30]).all()


HUGE = float(np.finfo(np.float32).max)


@pytest.mark.parametrize('a_value, b_value, product', [
    (np.inf, np.inf, np.inf), (-np.inf, 1.3, -np.inf), (np.inf, -np.inf, -np.inf), (0, np.inf, np.nan), (1.7, np.nan, np.nan),
    (HUGE, 0.9, HUGE * 0.9), (-HUGE, 1.1, -np.inf), (0.7, HUGE, HUGE * 0.7), (1e-30, 1e-5, 1e-35), (1e-37, 1e30, 1e-7),
    (1.00000012, 16777215, 16777217)])
def test_a_large_product_of_extreme_numbers(a_value, b_value, product):
    """Factors and products below 2^-102 have fewer bits with AMX (docs/linear.md)."""
    M, N, K = 20, 128, 160
    a, b, c = np.zeros((M, K), np.float32), np.zeros((K, N), np.float32), np.empty((M, N), np.float32)
    a[:, 71], b[71] = a_value, b_value
    gemm(c, a, b)
    few = backend.float32_isa() == 'amx_bf16' and (abs(a_value) < 2**-102 or abs(product) < 2**-102)
    assert np.allclose(c, np.float32(product), rtol=2.0**-8 if few else 2.0**-23, atol=0, equal_nan=True), c[0, 0]


@pytest.mark.parametrize('M, N, K', [(37, 96, 300), (130, 257, 513), (64, 1024, 1000)])
def test_a_large_product_has_the_errors_of_float32(M, N, K):
    """Errors of the terms and roundings of sums have any sign, so their mean is less than half a unit of the sum of magnitudes;
    the same is true of numpy's product."""
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((M, K)).astype('f'), rng.standard_normal((K, N)).astype('f')
    magnitudes, exact = np.abs(a).astype('d') @ np.abs(b), a.astype('d') @ b
    c = np.empty((M, N), np.float32)
    gemm(c, a, b)
    for found in (c, a @ b):
        error = np.abs(found - exact) / magnitudes * 2**24
        assert error.mean() <= 0.5 and error.max() <= 8


@pytest.mark.parametrize('K', (256, 257, 511, 512, 513, 769))
def test_gemm_rectifies_the_whole_sum_and_no_part_of_it(K):
    """A sum is done in blocks of 256: here the terms of the next block have the other sign and are twice as large."""
    a, b = np.ones((TILE_M + 1, K), np.float32), np.ones((K, TILE_N + 1), np.float32)
    for first in (1, -1):
        signs = np.array([first * (-2) ** (k // 256) for k in range(K)], np.float32)
        c = np.full((TILE_M + 1, TILE_N + 1), np.nan, np.float32)
        gemm(c, a * signs, b, relu=1)
        assert (c == max(signs.sum(), 0)).all()
        gemm(c, a * signs, b)
        gemm(c, -a * signs, b, np.full(TILE_N + 1, 0.5, np.float32), accumulate=1, relu=1)
        assert (c == 0.5).all()


def test_gemm_rectifies_without_hiding_nan():
    a, b = np.ones((TILE_M + 1, 2), np.float32), -np.ones((2, TILE_N + 1), np.float32)
    a[0, 0], a[-1, 1] = np.nan, np.inf
    c = np.empty((TILE_M + 1, TILE_N + 1), np.float32)
    gemm(c, a, b, relu=1)
    assert np.isnan(c[0]).all() and (c[1:] == 0).all()
    gemm(c, -a, b, relu=1)
    assert np.isnan(c[0]).all() and (c[1:-1] == 2).all() and np.isinf(c[-1]).all()


def test_gemm_refuses_impossible_sizes():
    one = np.zeros((1, 1), np.float32)
    for sizes, text in (((-1, 1, 1, 1), 'M=-1'), ((1, 5, 1, 4), 'ldc=4, expected at least N=5')):
        with pytest.raises(ValueError, match=text):
            launch('gemm', one, one, one, None, *sizes, 1, 1, 1, 1, 0, 0)


# ---- small ones -------------------------------------------------------------------------------------

SIZES = (0, 1, 15, 17, 16384, 40001)


@pytest.mark.parametrize('n', SIZES)
def test_fill_axpy_and_scale(n):
    rng = np.random.default_rng(5)
    x, y, alpha = rng.standard_normal(n).astype('f'), rng.standard_normal(n).astype('f'), np.array([-1.5], 'f')
    before = y.copy()
    launch('axpy', y, x, alpha, n)
    assert np.abs(y - (before - 1.5 * x)).max(initial=0) <= 1e-6
    launch('scale', y, x, alpha, n)
    assert (y == -1.5 * x).all()
    launch('scale', y, y, alpha, n)
    assert np.abs(y - 2.25 * x).max(initial=0) <= 1e-6
    launch('fill', y, n, 3.5)
    assert (y == 3.5).all()


@pytest.mark.parametrize('R,C,ldy,ldx', [(0, 3, 3, 3), (1, 1, 1, 1), (5, 7, 9, 8), (700, 500, 501, 503)])
def test_convert_copies_rows_and_nothing_between_them(R, C, ldy, ldx):
    rng = np.random.default_rng(31)
    x, y = rng.standard_normal((R, ldx)).astype('f'), np.full((R, ldy), -7, 'f')
    launch('convert', y, x, R, C, ldy, ldx)
    assert (y[:, :C] == x[:, :C]).all() and (y[:, C:] == -7).all()


@on_the_cpu
@pytest.mark.parametrize('rows,columns', [(0, 3), (3, 0), (1, 1), (7, 9), (1, 8191), (1, 8193), (5000, 3), (3, 300_000),
                                          (90, 8192)])
@pytest.mark.parametrize('with_valid', (False, True))
def test_a_description_counts_and_sums_the_numbers_of_valid_rows(rows, columns, with_valid):
    """Whole numbers, so that the sums are exact."""
    rng = np.random.default_rng(36)
    x = rng.integers(-9, 10, (rows, columns)).astype('f')
    for special in (np.nan, np.inf, -np.inf):
        x[rng.random(x.shape) < 0.02] = special
    valid = (rng.random(rows) < 0.7).astype('u1') if with_valid else None
    counts, sums, extremes = np.full(4, -1), np.full(3, -1.0), np.full(2, -1, 'f')
    for copy in (np.full_like(x, -7), None):
        launch('describe', counts, sums, extremes, copy, x, valid, rows, columns)
        used = x[valid > 0] if with_valid else x
        finite = used[np.isfinite(used)].astype('d')
        assert counts.tolist() == [used.size, np.isnan(used).sum(), np.isinf(used).sum(), (used == 0).sum()]
        assert sums.tolist() == [finite.sum(), np.abs(finite).sum(), (finite * finite).sum()]
        assert extremes.tolist() == [finite.min(initial=np.inf), finite.max(initial=-np.inf)]
        assert copy is None or copy.tobytes() == x.tobytes()


@on_the_cpu
@pytest.mark.parametrize('outer,n,inner,block', [(1, 0, 1, 4), (2, 7, 1, 4), (300, 64, 1, 32), (3, 40, 1, 5), (1, 9, 37, 4),
                                                 (2, 70, 16, 32), (40, 33, 200, 8)])
@pytest.mark.parametrize('scaled', ('', 'blocks', 'each'))
@pytest.mark.parametrize('with_valid', (False, True))
def test_error_sums_are_those_of_the_numbers_of_each_block(outer, n, inner, block, scaled, with_valid):
    """Whole numbers, so that the sums are exact; the relative errors are multiples of 1/8."""
    rng, blocks = np.random.default_rng(37), -(-n // block)
    x = rng.choice(np.array([-8, -4, -2, -1, 0, 1, 2, 4, 8, np.nan, np.inf, -np.inf], 'f'), (outer, n, inner))
    q = rng.integers(-9, 10, x.shape).astype('f')
    q[rng.random(x.shape) < 0.05] = np.inf
    scales, each, scale = None, None, np.ones(x.shape)
    if scaled == 'blocks':
        scales = rng.choice([0.5, 1, 2, np.nan], (outer, blocks, inner))
        scale = scales.repeat(block, 1)[:, :n]
    elif scaled:
        each = rng.choice(np.array([0.5, 1, 2], 'f'), x.shape)
        scale = each.astype('d')
    q[np.isnan(scale)] = np.nan
    valid = (rng.random(x.shape) < 0.7).astype('u1') if with_valid else None
    sums, counts, relative = np.full((12, outer, blocks, inner), -1.0), np.full(5, -1), np.full(1, -1.0)
    launch('error_sums', sums, counts, relative, x, q, scales, each, valid, outer, n, inner, block, 2.0, 3.0)

    used = np.ones(x.shape, bool) if valid is None else valid > 0
    finite, known = used & np.isfinite(x), np.isfinite(q)
    lost = finite & ~known & ~np.isnan(scale)
    pairs, nonzero = finite & known | lost, finite & (x != 0)
    of_x = np.where(pairs, x, 0).astype('d')
    of_q = np.where(lost, x, np.where(pairs, q, 0)).astype('d')
    error, size = abs(of_q - of_x), abs(of_x)
    with np.errstate(invalid='ignore'):
        saturated, subnormal = finite & (abs(x) > 3 * scale), nonzero & (abs(x) < 2 * scale)
    starts = np.arange(0, n, block)
    wanted = [np.add.reduceat(np.asarray(flags, 'd'), starts, 1) if n else np.zeros((outer, 0, inner)) for flags in (
        pairs, finite, lost, nonzero, nonzero & (q == 0), saturated, of_x**2, of_q**2, of_x * of_q, error**2)]
    wanted += [np.maximum.reduceat(values, starts, 1) if n else np.zeros((outer, 0, inner)) for values in (size, error)]
    for name in (9, 11):
        wanted[name] = np.where(wanted[2] > 0, np.inf, wanted[name])
    for name, (got, want) in enumerate(zip(sums, wanted, strict=True)):
        assert (got == want).all(), name
    assert counts.tolist() == [np.count_nonzero(flags) for flags in (
        used & np.isnan(x), used & np.isinf(x), finite & ~pairs, subnormal, size > 0)]
    assert relative[0] == np.divide(error, size, out=np.zeros_like(error), where=size > 0).sum()


def numbers_of_all_kinds(rng, shape):
    x = (rng.standard_normal(shape) * 2.0 ** rng.integers(-140, 100, shape)).astype('f')
    for special in (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45):
        x[rng.random(x.shape) < 0.03] = special
    return x


@on_the_cpu
@pytest.mark.parametrize('n,bins', [(0, 7), (1, 1), (2500, 96), (300_000, 256)])
@pytest.mark.parametrize('with_q', (False, True))
@pytest.mark.parametrize('with_valid', (False, True))
def test_bin_counts_are_those_of_finite_numbers_in_equal_bins(n, bins, with_q, with_valid):
    rng = np.random.default_rng(38)
    x, q = rng.standard_normal(n).astype('f'), numbers_of_all_kinds(rng, n)
    x[rng.random(n) < 0.1], x[rng.random(n) < 0.1] = np.nan, np.inf
    q, valid = q if with_q else None, (rng.random(n) < 0.7).astype('u1') if with_valid else None
    counts = np.full(bins, -1)
    launch('bin_counts', counts, x, q, valid, n, bins, -1.5, 2.0)
    used = np.isfinite(x) & (np.isfinite(q) if with_q else True) & (valid > 0 if with_valid else True)
    places = np.clip((x[used].astype('d') + 1.5) * (bins / 3.5), 0, bins - 1).astype(int)
    assert counts.tolist() == np.bincount(places, minlength=bins).tolist()


@on_the_cpu
@pytest.mark.parametrize('outer,n,inner,block', [(1, 0, 1, 4), (2, 7, 1, 4), (300, 64, 1, 32), (3, 40, 1, 5), (1, 9, 37, 4),
                                                 (40, 33, 200, 8), (2, 3, 2100, 2)])
@pytest.mark.parametrize('scaled', ('', 'blocks', 'each'))
@pytest.mark.parametrize('with_valid', (False, True))
def test_octave_counts_are_those_of_numbers_divided_by_their_scale(outer, n, inner, block, scaled, with_valid):
    rng, blocks = np.random.default_rng(39), -(-n // block)
    x = numbers_of_all_kinds(rng, (outer, n, inner))
    scales, each, number = None, None, x.astype('d')
    if scaled == 'blocks':
        scales = rng.integers(-127, 128, (outer, blocks, inner)).astype('i4')
        number = np.ldexp(number, -scales.repeat(block, 1)[:, :n])
    elif scaled:
        each = rng.choice(np.array([1e-30, 0.7, 3, 1e30, np.nan, 0, np.inf], 'f'), x.shape)
        with np.errstate(all='ignore'):
            number = np.clip(x / each, -np.finfo('f').max, np.finfo('f').max).astype('d')
    valid = (rng.random(x.shape) < 0.7).astype('u1') if with_valid else None
    lib = library.cpu().lib
    counts = np.full(lib.PYOPS_HALF_OCTAVES, -1)
    launch('octave_counts', counts, x, scales, each, valid, outer, n, inner, block)
    used = np.isfinite(x) & (x != 0) & (number != 0) & ~np.isnan(number) & (valid > 0 if with_valid else True)
    octaves = np.floor(2 * np.log2(abs(number[used]))).astype(int)
    assert counts.tolist() == np.bincount(octaves - lib.PYOPS_LEAST_OCTAVE, minlength=counts.size).tolist()


@on_the_cpu
@pytest.mark.parametrize('rows,columns,patch', [(0, 3, (1, 1)), (3, 0, (1, 1)), (5, 7, (1, 1)), (5, 7, (2, 3)), (4, 6, (2, 3)),
                                                (9, 5000, (4, 3000)), (700, 400, (90, 80))])
@pytest.mark.parametrize('with_minus', (False, True))
@pytest.mark.parametrize('with_valid', (False, True))
def test_patch_extremes_are_the_numbers_of_largest_magnitude(rows, columns, patch, with_minus, with_valid):
    rng = np.random.default_rng(40)
    x, minus = rng.integers(-9, 10, (2, rows, columns)).astype('f')
    x[rng.random(x.shape) < 0.02] = np.nan
    x[rng.random(x.shape) < 0.02] = -np.inf
    minus, valid = minus if with_minus else None, (rng.random(x.shape) < 0.4).astype('u1') if with_valid else None
    down, across = -(-rows // patch[0]), -(-columns // patch[1])
    cells = np.full((down, across), -7, 'f')
    launch('patch_extremes', cells, x, minus, valid, rows, columns, *patch)
    with np.errstate(invalid='ignore'):
        number = x if minus is None else x - minus
    for r in range(down):
        for c in range(across):
            where = np.s_[r * patch[0]:(r + 1) * patch[0], c * patch[1]:(c + 1) * patch[1]]
            own = number[where].reshape(-1) if valid is None else number[where][valid[where] > 0]
            if not own.size:
                assert np.isnan(cells[r, c])
            elif not np.isfinite(own).all():
                assert cells[r, c] == np.inf
            else:
                assert cells[r, c] == max(own, key=lambda v: (abs(v), v))


def bf16_bits(x):
    """The upper half of the bits of float32, rounded to the nearest, ties to even."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16_bits(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


@on_the_cpu                     # of the CUDA library: tests/cuda/test_cuda_gemm.py
@pytest.mark.parametrize('R,C', [(0, 4), (1, 1), (5, 7), (65, 130), (700, 500)])
@pytest.mark.parametrize('order', 'CF')
def test_to_bf16_rounds_ties_to_even_and_keeps_nan(R, C, order):
    x = np.random.default_rng(32).standard_normal((R, C)).astype('f')
    special = np.array([0, -0.0, np.inf, -np.inf, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-23, 3.4e38, 1e-40], 'f')
    x.reshape(-1)[:len(special)] = special[:x.size]
    from_, y = np.asarray(x, order=order), np.full((R, C + 3), 7, np.uint16)
    launch('to_bf16', y, from_.ravel('K'), R, C, C + 3, *(s // 4 for s in from_.strides))
    assert (y[:, :C] == bf16_bits(x)).all() and (y[:, C:] == 7).all()
    nan, y = np.array([0x7FC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view('f'), np.zeros(3, np.uint16)
    launch('to_bf16', y, nan, 1, 3, 3, 3, 1)
    assert np.isnan(from_bf16_bits(y)).all()


@on_the_cpu
@pytest.mark.parametrize('M,N,K', [(1, 1, 1), (0, 3, 2), (3, 4, 0), (5, 3, 19), (40, 33, 257), (230, 210, 200)])
@pytest.mark.parametrize('accumulate', (0, 1))
def test_gemm_bf16_of_whole_numbers_is_exact(M, N, K, accumulate):
    rng = np.random.default_rng(33)
    a, b = (rng.integers(-9, 10, (rows, K + more)).astype('f') for rows, more in ((M, 1), (N, 2)))
    c = np.full((M, N + 1), 0.5, 'f')
    launch('gemm_bf16', c, bf16_bits(a), bf16_bits(b), M, N, K, N + 1, K + 1, K + 2, accumulate)
    assert (c[:, :N] == a[:, :K] @ b[:, :K].T + 0.5 * accumulate).all() and (c[:, N:] == 0.5).all()


@pytest.mark.parametrize('R,C', [(0, 3), (1, 1), (7, 255), (100, 257), (1152, 768)])
def test_column_sums_add(R, C):
    x = np.random.default_rng(6).standard_normal((R, C)).astype('f')
    y = np.ones(C, 'f')
    launch('column_sums', y, x, R, C)
    assert np.abs(y - (1 + x.astype('d').sum(0))).max() <= 1e-6 * (1 + np.abs(x).sum(0).max(initial=0))


@pytest.mark.parametrize('R,O,I', [(0, 3, 2), (1, 1, 1), (7, 0, 3), (7, 3, 0), (33, 9, 40), (70, 64, 33), (1152, 64, 70),
                                   (260, 300, 257), (5000, 3, 4)])
@pytest.mark.parametrize('way', ['new', 'added', 'relu', 'no-dx', 'no-bias'])
def test_linear_backward_has_the_bits_of_its_products(R, O, I, way):
    """Small and large tiles, sums that several blocks share, and sizes without a term or without a result."""
    rng = np.random.default_rng(R)
    dy, x, weight = (rng.standard_normal(shape).astype('f') for shape in ((R, O), (R, I), (O, I)))
    if way == 'relu':
        x = np.maximum(x, 0)
        x[R // 2:, :1] = np.nan
    dweight, dbias = np.full((O, I), 0.5, 'f'), None if way == 'no-bias' else np.full(O, -0.5, 'f')
    dx = None if way == 'no-dx' else np.full((R, I), 0.25 if way == 'added' else np.nan, 'f')
    want_dweight, want_dx = np.full((O, I), 0.5, 'f'), np.full((R, I), 0.25 if way == 'added' else np.nan, 'f')
    launch('linear_backward', dx, dweight, dbias, dy, x, weight, R, O, I, way == 'relu', way == 'added')
    launch('gemm', want_dweight, dy, x, None, O, I, R, I, 1, O, I, 1, 1, 0)
    launch('gemm', want_dx, dy, weight, None, R, I, O, I, O, 1, I, 1, way == 'added', 0)
    if way == 'relu':
        launch('relu_backward', want_dx, want_dx, x, R * I)
        assert (dx[~(x > 0)] == 0).all()
    assert np.array_equal(dweight, want_dweight, equal_nan=True) and (dx is None or (dx == want_dx).all())
    if dbias is not None:
        wide = dy.astype('d')
        assert np.abs(dbias - (wide.sum(0) - 0.5)).max(initial=0) <= 1e-6 * (1 + np.abs(wide).sum(0).max(initial=0))


@pytest.mark.parametrize('dx,relu,accumulate', [(False, 1, 0), (True, 1, 1)])
def test_linear_backward_refuses_relu_without_dx_or_with_a_sum(dx, relu, accumulate):
    x = np.zeros((2, 2), 'f')
    with pytest.raises(ValueError, match=f'linear_backward: relu={relu} accumulate={accumulate}, expected dx, and one of'):
        launch('linear_backward', x.copy() if dx else None, x, None, x, x, x, 2, 2, 2, relu, accumulate)


@pytest.mark.parametrize('R,O,I', [(0, 3, 2), (1, 1, 1), (7, 0, 3), (7, 3, 0), (33, 9, 40), (1152, 64, 70)])
@pytest.mark.parametrize('kind,activation', [*enumerate(('silu', 'gelu', 'gelu_tanh'))])
def test_a_linear_layer_with_an_activation_has_the_bits_of_two_kernels(R, O, I, kind, activation):
    rng = np.random.default_rng(R)
    dy, x, at, weight, bias = (rng.standard_normal(s).astype('f') for s in ((R, O), (R, I), (R, I), (O, I), (O,)))
    y, a, want_y, want_a = (np.full((R, O), np.nan, 'f') for _ in range(4))
    launch('linear_activation', y, a, x, weight, bias, R, O, I, kind)
    launch('gemm', want_a, x, weight, bias, R, O, I, O, I, 1, 1, I, 0, 0)
    launch(f'{activation}_forward', want_y, want_a, R * O)
    assert y.tobytes() == want_y.tobytes() and a.tobytes() == want_a.tobytes()
    (dx, want_dx), (dweight, want_dweight), (dbias, want_dbias) = (
        [np.full(shape, value, 'f') for _ in range(2)] for shape, value in (((R, I), np.nan), ((O, I), 0.5), (O, -0.5)))
    launch('linear_activation_backward', dx, dweight, dbias, dy, x, at, weight, R, O, I, kind)
    launch('linear_backward', want_dx, want_dweight, want_dbias, dy, x, weight, R, O, I, 0, 0)
    launch(f'{activation}_backward', want_dx, want_dx, at, R * I)
    for got, want in (dx, want_dx), (dweight, want_dweight), (dbias, want_dbias):
        assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize('R,O,I', [(0, 3, 2), (1, 1, 1), (7, 3, 0), (33, 9, 40), (1152, 64, 70)])
@pytest.mark.parametrize('p', [0.0, 0.3])
def test_a_linear_layer_with_a_residual_has_the_bits_of_separate_kernels(R, O, I, p):
    rng, step, key, eps = np.random.default_rng(R), np.array([5 + (3 << 32)]), 0x0123456789ABCDEF, 1e-5
    x, weight, bias, residual, norm_weight, norm_bias = (
        rng.standard_normal(s).astype('f') for s in ((R, I), (O, I), (O,), (R, O), (O,), (O,)))
    branch, want_sum, want_y, y, total, of_norm = (np.full((R, O), np.nan, 'f') for _ in range(6))
    (mean, want_mean), (rstd, want_rstd) = [[np.full(R, np.nan, 'f') for _ in range(2)] for _ in range(2)]
    launch('gemm', branch, x, weight, bias, R, O, I, O, I, 1, 1, I, 0, 0)
    launch('residual_norm_forward', want_y, want_sum, want_mean, want_rstd, residual, branch, step, norm_weight, norm_bias, R,
           O, p, key, eps)
    launch('linear_residual', y, x, weight, bias, residual, step, R, O, I, p, key)
    launch('linear_residual_norm', of_norm, total, mean, rstd, x, weight, bias, residual, step, norm_weight, norm_bias, R, O, I,
           p, key, eps)
    launch('residual', branch, residual, branch, step, R * O, p, key)
    for got, want in (y, branch), (total, want_sum), (of_norm, want_y), (mean, want_mean), (rstd, want_rstd):
        assert got.tobytes() == want.tobytes()
    dropped = (y == residual).mean() if y.size > 500 else p
    assert abs(dropped - p) < 0.1


@pytest.mark.parametrize('kernel,arrays', [('linear_activation', 5), ('linear_activation_backward', 7)])
@pytest.mark.parametrize('sizes,kind,message', [((2, -1, 2), 0, 'R=2 O=-1 I=2, expected at least 0'), (
    (2, 2, 2), 3, r'activation=3, expected 0 \(SiLU\), 1 \(GELU\) or 2 \(GELU with tanh\)')])
def test_a_linear_layer_with_an_activation_refuses_wrong_numbers(kernel, arrays, sizes, kind, message):
    x = np.zeros((2, 2), 'f')
    with pytest.raises(ValueError, match=f'{kernel}: {message}'):
        launch(kernel, *[x] * arrays, *sizes, kind)


def test_the_gradients_of_an_activation_need_dx():
    x = np.zeros((2, 2), 'f')
    with pytest.raises(ValueError, match='linear_activation_backward: dx is NULL, expected an array'):
        launch('linear_activation_backward', None, *[x] * 6, 2, 2, 2, 0)


@pytest.mark.parametrize('sizes', [((1, 1, 1), (5, 4, 3)), ((33, 9, 40), (70, 64, 33)), ((260, 256, 256), (270, 512, 256)),
                                   ((0, 3, 2), (7, 3, 5)), ((6, 3, 0), (6, 1, 1)), ((1152, 64, 70), (9, 300, 2049))])
@pytest.mark.parametrize('adds', [(0, 0), (0, 1), (1, 1)])
def test_a_linear_pair_has_the_bits_of_two_linear_layers(sizes, adds):
    """Sizes that share a launch on a GPU, and sizes that cannot."""
    rng = np.random.default_rng(7)
    x, weight, dy = ([rng.standard_normal(shape).astype('f') for shape in shapes] for shapes in (
        [(R, I) for R, O, I in sizes], [(O, I) for R, O, I in sizes], [(R, O) for R, O, I in sizes]))
    bias = [rng.standard_normal(sizes[0][1]).astype('f'), None]
    y = [np.full((R, O), np.nan, 'f') for R, O, I in sizes]
    order = [size for both in zip(*sizes, strict=True) for size in both]            # R1, R2, O1, O2, I1, I2
    launch('linear_pair', *y, *x, *weight, *bias, *order)
    dweight, dbias = [np.full_like(w, 0.5) for w in weight], [np.full(sizes[0][1], -0.5, 'f'), None]
    dx = [np.full((R, I), 0.25 if add else np.nan, 'f') for (R, O, I), add in zip(sizes, adds, strict=True)]
    want = [array.copy() for array in (*dx, *dweight)]
    launch('linear_pair_backward', *dx, *dweight, *dbias, *dy, *x, *weight, *order, *adds)
    for i, (R, O, I) in enumerate(sizes):
        alone = np.full((R, O), np.nan, 'f')
        launch('gemm', alone, x[i], weight[i], bias[i], R, O, I, O, I, 1, 1, I, 0, 0)
        assert (y[i] == alone).all()
        launch('linear_backward', want[i], want[2 + i], None, dy[i], x[i], weight[i], R, O, I, 0, adds[i])
    assert all((array == other).all() for array, other in zip((*dx, *dweight), want, strict=True))
    wide = dy[0].astype('d')
    assert np.abs(dbias[0] - (wide.sum(0) - 0.5)).max(initial=0) <= 1e-6 * (1 + np.abs(wide).sum(0).max(initial=0))


@pytest.mark.parametrize('kernel,arrays,more', [('linear_pair', 8, ()), ('linear_pair_backward', 12, (0, 0))])
def test_a_linear_pair_refuses_negative_sizes(kernel, arrays, more):
    x = np.zeros((2, 2), 'f')
    with pytest.raises(ValueError, match=f'{kernel}: R1=2 R2=-1 O1=2 O2=2 I1=2 I2=2, expected at least 0'):
        launch(kernel, *[x] * arrays, 2, -1, 2, 2, 2, 2, *more)


@pytest.mark.parametrize('R,C', [(1, 1), (5, 7), (33, 1001), (701, 400)])
def test_argmax_takes_the_first_of_equals_and_nan_as_largest(R, C):
    x = np.random.default_rng(7).integers(0, 9, (R, C)).astype('f')         # many ties
    x[R // 2, C // 2] = np.nan
    index = np.empty(R, np.int32)
    launch('argmax', index, x, R, C)
    assert (index == x.argmax(-1)).all()


def linear_argmax(x, weight, bias, prepare=True):
    (V, D), R = weight.shape, len(x)
    index, prepared = np.full(R, -1, np.int32), None
    if prepare:
        prepared = np.full(backend.work_size('linear_argmax_prepare', D, V), np.nan, 'f')
        launch('linear_argmax_prepare', prepared, weight, bias, D, V)
    launch('linear_argmax', index, x, weight, bias, prepared, backend.work('linear_argmax', R, D, V), R, D, V)
    return index


@pytest.mark.parametrize('R,D,V', [(0, 3, 5), (1, 1, 1), (3, 2, 17), (5, 7, 33), (70, 31, 300), (65, 300, 2000),
                                   (1, 256, 13387), (2, 5000, 40)])
@pytest.mark.parametrize('kind', ['normal', 'ascending', 'whole', 'zeros', 'tiny', 'huge', 'wide', 'ends'])
def test_linear_argmax(R, D, V, kind):
    """The screened product says the same as all logits."""
    rng = np.random.default_rng(8)
    x, weight, bias = (rng.standard_normal(shape).astype('f') for shape in ((R, D), (V, D), V))
    if kind == 'ascending':                                     # every word is larger than those before it
        bias += np.arange(V, dtype='f')
    if kind == 'whole':                                         # exact, and many ties
        x, weight, bias = np.round(x), np.round(weight), np.round(bias)
    if kind == 'zeros':
        x[rng.random(R) < 0.5], weight[rng.random(V) < 0.5], bias[:] = 0, 0, 0
    if kind == 'tiny':                                          # beyond what is rounded; the squares underflow
        x *= np.float32(1e-25)
        bias[:] = 0
    if kind == 'huge':
        weight *= np.float32(1e25)
    if kind == 'wide':                                          # numbers of all sizes in a row
        x, weight = (a * np.exp(5 * rng.standard_normal(a.shape)).astype('f') for a in (x, weight))
    if kind == 'ends':                                          # the largest products of rounded numbers
        x, weight, bias = np.sign(x), np.sign(weight), np.zeros(V, 'f')
        x[:R // 2], weight[V // 2] = 1, 1
    logits = x.astype('d') @ weight.T.astype('d') + bias
    index = linear_argmax(x, weight, bias)
    assert (index == linear_argmax(x, weight, bias, prepare=False)).all()
    if kind in ('whole', 'zeros', 'ends'):
        assert (index == logits.argmax(1)).all()
    slack = 1e-6 * (np.abs(x.astype('d')) @ np.abs(weight.T.astype('d')) + np.abs(bias))
    assert (logits.max(1) - logits[np.arange(R), index] <= slack.max(1)).all()


def test_linear_argmax_with_nan_and_infinities():
    rng = np.random.default_rng(9)
    x, weight, bias = (rng.standard_normal(shape).astype('f') for shape in ((6, 20), (700, 20), 700))
    clean = linear_argmax(x, weight, bias)
    spoiled = weight.copy()
    spoiled[600, 3] = np.nan                                    # in every row the largest, of those the first
    spoiled[650] = np.nan
    assert (linear_argmax(x, spoiled, bias) == 600).all()
    spoiled = x.copy()
    spoiled[2, 0], spoiled[4, 1] = np.nan, np.inf
    index = linear_argmax(spoiled, weight, bias)
    assert index[2] == 0 and index[4] == np.flatnonzero(weight[:, 1] > 0)[0] and (np.delete(index - clean, (2, 4)) == 0).all()
    for value, want in ((np.inf, 333), (np.nan, 333), (-np.inf, None)):
        spoiled = bias.copy()
        spoiled[333] = value
        index = linear_argmax(x, weight, spoiled)
        assert (index == want).all() if want else (index != 333).all()


def test_linear_argmax_has_the_same_words_on_any_number_of_threads():
    rng = np.random.default_rng(10)
    x, weight, bias = (rng.integers(-2, 3, shape).astype('f') for shape in ((33, 300), (5000, 300), 5000))
    before, found = backend.threads(), {}
    try:
        for threads in (1, 2, 8):
            backend.set_threads(threads)
            found[threads] = linear_argmax(x, weight, bias).tolist()
    finally:
        backend.set_threads(before)
    assert found[1] == found[2] == found[8] == (x @ weight.T + bias).argmax(1).tolist()


SOFTMAX_SHAPES = ((1, 1, 1), (7, 3, 1), (5, 16, 1), (3, 31, 1), (70, 33, 1), (2, 1001, 1), (4, 5, 3), (1, 512, 2), (1, 513, 3),
                  (3, 600, 15), (2, 9, 16), (2, 4, 40), (3, 5, 64), (1, 7, 200), (2, 0, 3), (0, 4, 5),
                  (1, 300_001, 1))              # outer, n, inner


def softmax(x, dy, log):
    """Return the result of the kernel and the gradient of x."""
    y, dx = np.full_like(x, -77), np.full_like(x, -77)
    launch('softmax_forward', y, x, *x.shape, log)
    launch('softmax_backward', dx, dy, y, *x.shape, log)
    return y, dx


def softmax_reference(x, dy, log):
    if not x.size:
        return x, x
    below = x - x.max(1, keepdims=True)
    y = below - np.log(np.exp(below).sum(1, keepdims=True)) if log else np.exp(below) / np.exp(below).sum(1, keepdims=True)
    if log:
        return y, dy - np.exp(y) * dy.sum(1, keepdims=True)
    return y, y * (dy - (dy * y).sum(1, keepdims=True))


@pytest.mark.parametrize('log', [0, 1])
@pytest.mark.parametrize('shape', SOFTMAX_SHAPES, ids=str)
def test_softmax_along_an_axis_and_its_gradient(shape, log):
    rng = np.random.default_rng(sum(shape))
    x, dy = (5 * rng.standard_normal(shape)).astype('f'), rng.standard_normal(shape).astype('f')
    for got, want in zip(softmax(x, dy, log), softmax_reference(x.astype('d'), dy.astype('d'), log), strict=True):
        assert (np.abs(got - want) <= 3e-6 * (1 + np.abs(want) + log * np.abs(dy).sum(1, keepdims=True))).all()


@pytest.mark.parametrize('shape', [(2, 40, 1), (3, 4, 1), (2, 5, 3), (2, 5, 32), (2, 300_000, 1)], ids=str)
def test_softmax_of_masked_elements_is_0_and_of_a_nan_or_infinity_nan(shape):
    x, dy = np.random.default_rng(1).standard_normal(shape).astype('f'), np.ones(shape, 'f')
    masked = x.copy()
    masked[:, 1:3] = -np.inf
    y, dx = softmax(masked, dy, 0)
    assert (y[:, 1:3] == 0).all() and (dx[:, 1:3] == 0).all() and np.allclose(y.sum(1), 1, atol=1e-6)
    assert np.isneginf(softmax(masked, dy, 1)[0][:, 1:3]).all()
    for special in (np.nan, np.inf):
        broken = x.copy()
        broken[0, -1] = special
        for log in (0, 1):
            y = softmax(broken, dy, log)[0]
            assert np.isnan(y[0]).any(0).all() and (log or np.isnan(y[0]).all()) and np.isfinite(y[1:]).all()
    assert np.isnan(softmax(np.full(shape, -np.inf, 'f'), dy, 0)[0]).all()


@of_threads
def test_softmax_has_the_same_bits_for_any_number_of_threads():
    rng, before, found = np.random.default_rng(2), backend.threads(), {}
    cases = [(rng.standard_normal(shape).astype('f'), rng.standard_normal(shape).astype('f'), log)
             for shape in ((3001, 33, 1), (30011, 3, 1), (4001, 7, 5), (301, 9, 100), (5, 40_000, 1), (1, 300_001, 1))
             for log in (0, 1)]
    try:
        for threads in (1, 2, 3, 8):
            backend.set_threads(threads)
            found[threads] = b''.join(part.tobytes() for case in cases for part in softmax(*case))
    finally:
        backend.set_threads(before)
    assert found[1] == found[2] == found[3] == found[8]


def linear_topk(x, weight, bias, k):
    (V, D), R = weight.shape, len(x)
    index, logp = np.full((R, k), -1, np.int32), np.full((R, k), np.nan, 'f')
    launch('linear_topk', index, logp, x, weight, bias, backend.work('linear_topk', R, D, V, k), R, D, V, k)
    return index, logp


def log_softmax_topk(x, k):
    R, C = x.shape
    index, logp = np.full((R, k), -1, np.int32), np.full((R, k), np.nan, 'f')
    launch('log_softmax_topk', index, logp, x, R, C, k)
    return index, logp


def topk_reference(x, k):
    """Return indices and log softmax of the k largest elements of each row, in float64."""
    index = np.argsort(-x, axis=1, kind='stable')[:, :k]
    m = x.max(1, keepdims=True)
    logs = x - m - np.log(np.exp(x - m).sum(1, keepdims=True))
    return index, np.take_along_axis(logs, index, 1)


@pytest.mark.parametrize('R,C', [(0, 5), (1, 1), (3, 7), (40, 33), (5, 512), (4, 513), (9, 2000), (2, 13387)])
@pytest.mark.parametrize('k', [1, 2, 5, 32])
def test_log_softmax_topk_of_logits(R, C, k):
    k = min(k, C)
    x = np.random.default_rng(R * 1000 + C).standard_normal((R, C)).astype('f') * 5
    index, logp = log_softmax_topk(x, k)
    want, want_logp = topk_reference(x.astype('d'), k)
    assert (index == want).all()
    assert (np.abs(logp - want_logp) <= 3e-6 * (1 + np.abs(want_logp))).all()
    assert (logp <= 0).all()


@pytest.mark.parametrize('k', [1, 4, 32])
def test_log_softmax_topk_takes_the_lowest_index_of_equals(k):
    x = np.random.default_rng(3).integers(-2, 2, (50, 700)).astype('f')
    x[x == -1] *= 0                                             # zeros of both signs are equal
    x[7] = -0.0
    index, logp = log_softmax_topk(x, k)
    assert (index == topk_reference(x.astype('d'), k)[0]).all()
    assert np.abs(logp[7] + np.log(700)).max() <= 1e-5


def test_log_softmax_topk_with_nan_and_infinities():
    x = np.random.default_rng(4).standard_normal((6, 900)).astype('f')
    x[1, [300, 800]] = np.nan                                   # largest, the first one first
    x[2, 650] = np.inf
    x[3, :600], x[4] = -np.inf, -np.inf
    index, logp = log_softmax_topk(x, 5)
    rest = np.delete(x[1], [300, 800]).max()
    assert index[1, 0] == 300 and index[1, 1] == 800 and x[1, index[1, 2]] == rest and np.isnan(logp[1]).all()
    assert index[2, 0] == 650 and np.isnan(logp[2, 0])
    want, want_logp = topk_reference(x[3:4].astype('d'), 5)     # minus infinity has probability 0
    assert (index[3] == want).all() and np.abs(logp[3] - want_logp).max() <= 1e-5
    assert (index[4] == range(5)).all() and np.isnan(logp[4]).all()
    for r in (0, 5):
        assert (index[r] == topk_reference(x[r:r + 1].astype('d'), 5)[0]).all() and np.isfinite(logp[r]).all()
    few = np.full((1, 600), -np.inf, 'f')                       # fewer numbers than k
    few[0, 550] = 2.0
    index, logp = log_softmax_topk(few, 3)
    assert index.tolist() == [[550, 0, 1]] and logp.tolist() == [[0.0, -np.inf, -np.inf]]


@pytest.mark.parametrize('R,D,V,k', [(0, 3, 5, 2), (1, 1, 1, 1), (3, 2, 17, 5), (5, 7, 33, 32), (70, 31, 600, 4),
                                     (130, 300, 2000, 5), (5, 256, 13387, 5)])
def test_linear_topk_finds_the_largest_logits(R, D, V, k):
    rng = np.random.default_rng(R + V)
    x, weight, bias = (rng.standard_normal(shape).astype('f') for shape in ((R, D), (V, D), V))
    weight *= np.float32(2 / D ** 0.5)
    logits = x.astype('d') @ weight.T.astype('d') + bias
    index, logp = linear_topk(x, weight, bias, k)
    _, want = topk_reference(logits, k)
    own = logits - logits.max(1, keepdims=True, initial=-np.inf)
    own -= np.log(np.exp(own).sum(1, keepdims=True))
    slack = 1e-5 * (1 + np.abs(want))
    assert (np.abs(logp - want) <= slack).all()                              # the k largest
    assert (np.abs(np.take_along_axis(own, index, 1) - want) <= slack).all()   # stored at the indices
    assert all(len(set(row)) == k for row in index.tolist())


def test_linear_topk_is_log_softmax_topk_of_the_product():
    rng = np.random.default_rng(6)
    x, weight, bias = (rng.standard_normal(shape).astype('f') for shape in ((150, 40), (1300, 40), 1300))
    weight[900:] = weight[:400]                                 # ties
    bias[900:] = bias[:400]
    logits = np.empty((150, 1300), 'f')
    gemm(logits, x, weight.T, bias)
    for got, want in zip(linear_topk(x, weight, bias, 6), log_softmax_topk(logits, 6), strict=True):
        assert np.array_equal(got, want)


@on_the_cpu
@pytest.mark.parametrize('D', [24, 300])
def test_linear_topk_of_a_row_has_the_same_bits_for_any_number_of_rows_and_threads(D, precision):
    rng = np.random.default_rng(11)
    x, weight, bias = (rng.standard_normal(shape).astype('f') for shape in ((300, D), (3000, D), 3000))
    whole = linear_topk(x, weight, bias, 5)
    for first, rows in ((0, 1), (17, 2), (5, 5), (3, 8), (100, 9), (31, 160)):
        for got, want in zip(linear_topk(x[first:first + rows], weight, bias, 5), whole, strict=True):
            assert np.array_equal(got, want[first:first + rows])
    threads = backend.threads()
    try:
        for n in (1, 2, 3):
            backend.set_threads(n)
            for got, want in zip(linear_topk(x, weight, bias, 5), whole, strict=True):
                assert np.array_equal(got, want)
    finally:
        backend.set_threads(threads)


@pytest.mark.parametrize('k', [0, 6, 33])
def test_topk_refuses_a_k_that_is_not_possible(k):
    x = np.zeros((2, 40 if k == 33 else 5), 'f')
    with pytest.raises(ValueError, match=f'log_softmax_topk: k={k}, expected 1 to {32 if k == 33 else 5}'):
        log_softmax_topk(x, k)


@pytest.mark.parametrize('T,N,R,C', [(0, 3, 2, 4), (1, 1, 1, 1), (3, 5, 9, 7), (2, 40, 33, 64), (5, 4, 0, 8)])
def test_gather_rows_of_each_step(T, N, R, C):
    rng = np.random.default_rng(T + N)
    x, rows = rng.standard_normal((T, N, C)).astype('f'), rng.integers(0, N, R).astype(np.int32)
    y = np.full((T, R, C), np.nan, 'f')
    launch('gather_rows', y, x, rows, T, N, R, C)
    assert np.array_equal(y, x[:, rows])


@pytest.mark.parametrize('R,P', [(63, 1), (1, 63), (3, 41)])
def test_the_variance_of_equal_numbers_is_not_below_0_by_rounding(R, P):
    """A negative one would give NaN, for eps is smaller than its rounding."""
    C = 100
    x = np.broadcast_to(np.random.default_rng(8).standard_normal((C, 1)).astype('f'), (R, C, P)).copy()
    y, ones, zeros = np.empty_like(x), np.ones(C, 'f'), np.zeros(C, 'f')
    mean, rstd, running_mean, running_var = (np.full(C, np.nan, 'f') for _ in range(4))
    running_mean[...] = running_var[...] = 0
    launch('batch_norm_forward', y, running_mean, running_var, mean, rstd, x, ones, zeros, R, C, P, 1e-30, 1.0, 1)
    assert (running_var >= 0).all() and (rstd > 0).all() and np.isfinite(rstd).all() and np.isfinite(y).all()
    if P > 1:
        n, y, mean, rstd = P, np.empty((R * C, P), 'f'), np.empty(R * C, 'f'), np.empty(R * C, 'f')
        launch('layer_norm_forward', y, mean, rstd, x.reshape(-1, P), np.ones(n, 'f'), np.zeros(n, 'f'), R * C, n, 1e-30)
        assert (rstd > 0).all() and np.isfinite(rstd).all() and np.isfinite(y).all()


@pytest.mark.parametrize('N,R,C', [(3, 2, 4), (1, 1, 1), (50, 33, 7), (4, 0, 8), (300, 300, 1), (900, 700, 400)])
def test_scatter_rows_writes_the_rows_and_nothing_else(N, R, C):
    rng = np.random.default_rng(N + R)
    x, rows = rng.standard_normal((R, C + 2)).astype('f'), rng.permutation(N)[:R].astype(np.int32)
    y = rng.standard_normal((N, C + 3)).astype('f')
    want = y.copy()
    want[rows, :C] = x[:, :C]
    launch('scatter_rows', y, x, rows, N, R, C, C + 3, C + 2)
    assert np.array_equal(y, want)
    if R:
        with pytest.raises(ValueError, match=rf'scatter_rows: rows\[0\]={N}, expected 0 to {N - 1}'):
            launch('scatter_rows', y, x[:1], np.array([N], np.int32), N, 1, C, C + 3, C + 2)


def test_exp_sigmoid_and_tanh_are_good_to_a_few_units_in_the_last_place():
    """Seen through the kernels that use them: a GRU without recurrence, and cross entropy of two classes."""
    x = np.concatenate([np.linspace(-30, 30, 4001), np.geomspace(1e-6, 1, 500), -np.geomspace(1e-6, 1, 500)]).astype('f')
    n, eye = x.size, np.zeros((3, 1), 'f')
    h, gates = np.empty((1, n, 1), 'f'), np.empty((1, n, 4), 'f')
    w_ih, zero = np.ones((3, 1), 'f'), np.zeros(3, 'f')
    launch('gru_forward', h, gates, None, x, None, None, None, None, w_ih, eye, zero, zero,
                   backend.work('gru_forward', 1, n, 0, 1, 1), 1, n, 0, 1, 1, 0, 0)
    exact = x.astype('d')
    for got, want in ((gates[0, :, 0], Sigmoid.reference(exact)), (gates[0, :, 2], np.tanh(exact))):
        assert (np.abs(got - want) <= 4 * np.finfo('f').eps * np.abs(want)).all()
    logits = np.stack([x, np.zeros_like(x)], 1)
    dx, loss, valid, stats = np.empty_like(logits), np.empty(1, 'f'), np.empty(1, 'i'), np.empty((2, n), 'f')
    labels = np.ones(n, np.int32)
    launch('cross_entropy_forward', loss, valid, stats, logits, labels, n, 2, -1, 0.0)
    assert (stats[0] == np.maximum(x, 0)).all()
    assert np.abs(stats[1] - (1 + np.exp(-np.abs(exact)))).max() <= 2 * np.finfo('f').eps
    launch('cross_entropy_backward', dx, np.array([n], 'f'), logits, labels, stats, valid, n, 2, -1, 0.0)
    assert (np.abs(dx[:, 0] - Sigmoid.reference(exact)) <= 4 * np.finfo('f').eps * Sigmoid.reference(exact)).all()


def test_silu_gelu_and_their_derivatives_are_good_to_a_few_units_in_the_last_place_of_x(torch):
    x = np.concatenate([np.linspace(-30, 30, 40001), np.geomspace(1e-30, 1e30, 500), -np.geomspace(1e-30, 1e30, 500)])
    x, exact = x.astype('f'), torch.tensor(x.astype('f').astype('d'), requires_grad=True)
    for name, function in (('silu', torch.nn.functional.silu), ('gelu', torch.nn.functional.gelu),
                           ('gelu_tanh', functools.partial(torch.nn.functional.gelu, approximate='tanh'))):
        y, dx = np.empty_like(x), np.empty_like(x)
        launch(f'{name}_forward', y, x, x.size)
        launch(f'{name}_backward', dx, np.ones_like(x), x, x.size)
        want = function(exact)
        derivative, = torch.autograd.grad(want.sum(), exact)
        want, derivative = want.detach().numpy(), derivative.numpy()
        near_0 = np.minimum(np.abs(x), 1 + np.abs(want))        # of a large negative x only an absolute error matters
        assert (np.abs(y - want) <= 4 * np.finfo('f').eps * near_0).all(), name
        assert (np.abs(dx - derivative) <= 16 * np.finfo('f').eps).all(), name
        launch(f'{name}_forward', y[:2], np.array([np.nan, np.inf], 'f'), 2)
        assert np.isnan(y[0]) and y[1] == np.inf


# ---- norms ------------------------------------------------------------------------------------------

@pytest.mark.parametrize('R', [3, 7, 100])
@pytest.mark.parametrize('P', [1, 6])
def test_a_batch_norm_of_equal_numbers_has_no_variance_below_0(R, P):
    """Rounding of the mean alone could make one."""
    C, rng = 500, np.random.default_rng(17)
    of_channel = (1000 * rng.standard_normal(C)).astype('f')
    x = np.ascontiguousarray(np.broadcast_to(of_channel[:, None], (R, C, P)))
    y, (mean, var, batch_mean, rstd, bias) = np.full_like(x, np.nan), np.zeros((5, C), 'f')
    launch('batch_norm_forward', y, mean, var, batch_mean, rstd, x, np.ones(C, 'f'), bias, R, C, P, 1e-30, 1.0, 1)
    assert np.isfinite(y).all() and np.isfinite(rstd).all()
    assert (var >= 0).all() and (var <= np.square(16 * np.finfo('f').eps * of_channel)).all()


@on_the_cpu
def test_a_layer_norm_of_a_long_row_whose_first_number_stands_out_is_finite():
    """Of equal deviations from the first number, rounding can make the sum of squares less than the square of the sum."""
    R, C, eps = 8, 1 << 20, 1e-6
    x = np.zeros((R, C), 'f')
    x[:, 0] = np.linspace(0.7, 1.3, R)
    y, mean, rstd = np.full_like(x, np.nan), np.empty(R, 'f'), np.empty(R, 'f')
    launch('layer_norm_forward', y, mean, rstd, x, np.ones(C, 'f'), np.zeros(C, 'f'), R, C, eps)
    assert np.isfinite(y).all() and (rstd <= 1.0001 / np.sqrt(eps)).all()


# ---- optimiser --------------------------------------------------------------------------------------

@pytest.mark.parametrize('n', (1, 17, 16384, 100_003))
def test_grad_norm_and_clip(n):
    grad = np.random.default_rng(8).standard_normal(n).astype('f') + np.float32(0.1)
    norm, want = np.empty(1, 'f'), np.sqrt((grad.astype('d') ** 2).sum())
    launch('grad_norm', norm, grad, None, backend.work('grad_norm', n), n)
    assert abs(norm[0] - want) <= 2 * np.finfo('f').eps * want              # summed in double
    for limit in (0.5 * want, 2 * want):
        clipped = grad.copy()
        launch('clip', clipped, norm, n, limit)
        if limit > want:
            assert (clipped == grad).all()
        else:
            assert np.abs(clipped - grad * (limit / want)).max() <= 1e-6 * np.abs(grad).max()


@pytest.mark.parametrize('n', (0, 1, 17, 16384, 100_003))
@pytest.mark.parametrize('weighted', (False, True))
def test_a_norm_with_an_entry_has_the_bits_of_its_three_kernels(n, weighted):
    rng, work = np.random.default_rng(n), backend.work('grad_norm', n)
    log, touched = np.full((3, 3), -7, 'f'), rng.integers(0, 2, -(-n // BLOCK)).astype(np.int32)
    norm, step, written = np.full(1, np.nan, 'f'), np.array([41]), np.array([2])
    together, apart = ([array.copy() for array in (norm, step, log, written)] for _ in range(2))
    for place in 2, 0, 1, 2:                            # the log is a ring
        grad, loss = rng.standard_normal(n).astype('f'), rng.standard_normal(1).astype('f')
        grad[np.repeat(touched == 0, BLOCK)[:n]] = 0
        valid = rng.integers(1, 99, 1).astype(np.int32) if weighted else None
        launch('grad_norm_logged', *together, grad, touched, loss, valid, work, n, 3)
        norm, step, log, written = apart
        launch('grad_norm', norm, grad, touched, work, n)
        launch('increment', step)
        launch('log_step', log, written, loss, valid, norm, 1, 3)
        assert all(one.tobytes() == other.tobytes() for one, other in zip(together, apart, strict=True))
        assert log[place, 0] == loss[0] and log[place, 2] == norm[0]
    assert step[0] == 45 and written[0] == 6


class Rate:
    """What a schedule of the learning rate reads and sets."""

    def __init__(self, steps_done):
        self.rate, self.count = put(np.zeros(1, 'f')), put(np.array([steps_done]))


def rates(steps, *arguments, **settings):
    found = []
    for done in steps:
        decaying_rate(rate := Rate(done), *arguments, **settings)
        found.append(float(get(rate.rate)[0]))
    return found


@pytest.mark.parametrize('kind', ['cosine', 'linear'])
def test_a_decaying_rate_rises_holds_and_falls_to_its_final_share(kind, torch):
    weight = torch.zeros(1, requires_grad=True)
    theirs = torch.optim.SGD([weight], 0.5)
    if kind == 'cosine':
        twin = torch.optim.lr_scheduler.CosineAnnealingLR(theirs, 40, eta_min=0.05)
    else:
        twin = torch.optim.lr_scheduler.LinearLR(theirs, 1.0, 0.1, 40)
    want = [0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5, 0.5]         # a warm-up of five steps, and three more at the peak
    for _ in range(40):
        want.append(theirs.param_groups[0]['lr'])
        theirs.step()
        twin.step()
    want += 3 * [0.05]
    assert rates(range(51), 0.5, 5, 48, kind, hold=8, final=0.1) == pytest.approx(want, rel=1e-6)
    assert rates((5, 48, 10 ** 9), 0.5, 5, 48, kind) == [0.5, 0, 0]                     # no hold, down to 0
    assert rates((0, 1, 2, 3), 0.5, 2, 1, kind) == [0.25, 0.5, 0, 0]                    # a run that ends in its warm-up


@pytest.mark.parametrize('arguments, settings, text', [
    ((0.1, 5, 48, 'step'), {}, "decaying_rate: kind: expected one of cosine, linear, got 'step'"),
    ((0.1, 5, 48), {'final': 1.5}, 'decaying_rate: final: expected 0 <= final <= 1, got 1.5'),
    ((0.1, -5, 48), {}, 'decaying_rate: warmup=-5 hold=0 total=48, expected at least 0'),
])
def test_a_decaying_rate_rejects_impossible_settings(arguments, settings, text):
    with pytest.raises(ValueError, match=text):
        decaying_rate(Rate(0), *arguments, **settings)


@pytest.mark.parametrize('warmup', [0, 1, 7])
def test_a_rate_rises_and_falls_with_the_inverse_square_root(warmup):
    for done in (0, 1, 5, 6, 7, 100, 10**6):
        rate, t = np.zeros(1, 'f'), done + 1
        launch('inverse_square_root', rate, np.array([done]), warmup, 0.25)
        want = 0.25 * (min(t / warmup, (warmup / t) ** 0.5) if warmup else 1)
        assert abs(rate[0] - want) <= 1e-7 * want


def test_steps_are_logged_in_a_ring():
    log, written, want, done = np.full((3, 3), -7, 'f'), np.zeros(1, np.int64), np.full((3, 3), -7, 'f'), 0
    for i, steps in enumerate((1, 2, 1, 3, 2)):
        loss, valid, norm = np.arange(steps) + 1.5 + i, np.arange(steps) + 10 * i, 0.25 * np.arange(steps) + i
        given = [None if i == 1 else valid.astype('i'), None if i == 2 else norm.astype('f')]
        launch('log_step', log, written, loss.astype('f'), *given, steps, 3)
        for k in range(steps):
            want[(done + k) % 3] = loss[k], 0 if i == 1 else valid[k], 0 if i == 2 else norm[k]
        done += steps
        assert (log == want).all() and written[0] == done


@pytest.mark.parametrize('nesterov', (0, 1))
@pytest.mark.parametrize('count,n', [(0, 5), (2, 0), (1, 1), (3, 257), (2, 16384), (3, 33_001), (40, 9000)])
def test_momentum_and_update_of_muon_are_their_formulas(count, n, nesterov):
    """Matrices in another order than their offsets, with gaps, in chunks of 16384 numbers, with and without clipping."""
    rng = np.random.default_rng(34)
    offsets = 5 + (n + 3) * rng.permutation(count)
    places = offsets[:, None] + np.arange(n)
    size = 5 + (n + 3) * count
    work = np.zeros(backend.work_size('muon_momentum', count, n), 'f')
    for norm in (None, np.array([0.5], 'f'), np.array([4.0], 'f')):
        grad, m, param = rng.standard_normal((3, size)).astype('f')
        x, before = np.full((count + 1, n), -7, 'f'), m.copy()
        launch('muon_momentum', x, m, grad, norm, offsets, work, count, n, 2.0, 0.75, nesterov)
        g = grad[places].astype('d') * (0.5 if norm is not None and norm[0] == 4 else 1)
        want = 0.75 * before[places] + 0.25 * g
        u = 0.75 * want + 0.25 * g if nesterov else want
        assert np.abs(m[places] - want).max(initial=0) <= 1e-6
        unit = u / np.linalg.norm(u, axis=1, keepdims=True)
        assert np.abs(x[:count] - unit).max(initial=0) <= 1e-6 and (x[count:] == -7).all()
        kept, start = np.ones(size, bool), param.copy()
        kept[places] = False
        assert (m[kept] == before[kept]).all()
        launch('muon_update', param, x, offsets, np.array([0.5], 'f'), count, n, 3.0, 0.25)
        assert np.abs(param[places] - (0.875 * start[places] - 1.5 * x[:count])).max(initial=0) <= 1e-6
        assert (param[kept] == start[kept]).all()


def test_muon_divides_by_no_norm_below_its_least():
    x, m, work = np.empty((1, 4), 'f'), np.zeros(4, 'f'), np.zeros(64, 'f')
    launch('muon_momentum', x, m, np.array([3e-9, 4e-9, 0, 0], 'f'), None, np.zeros(1, np.int64), work, 1, 4, 1.0, 0.0, 0)
    assert np.abs(x - [[0.03, 0.04, 0, 0]]).max() <= 1e-8


@pytest.mark.parametrize('count,n', [(0, 3), (1, 1), (3, 17), (2, 400)])
def test_the_polynomial_of_muon_is_its_formula(count, n):
    rng = np.random.default_rng(35)
    p, a = rng.standard_normal((2, count + 1, n, n)).astype('f')
    want = 2.5 * np.eye(n) - 0.5 * a + 1.25 * p.astype('d')
    want[count:] = p[count:]
    launch('muon_polynomial', p, a, count, n, 2.5, -0.5, 1.25)
    assert np.abs(p - want).max() <= 2e-6


def make_params(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {'a': (33, 7), 'b': (5,), 'c': (1000, 300)}       # enough for several threads
    return Parameters({name: Spec(shape, lambda generator, shape: rng.standard_normal(shape).astype('f'))
                       for name, shape in shapes.items()}), shapes


@pytest.mark.parametrize('scale', (1e-3, 1.0))      # norms on either side of the limit
def test_adam_with_clipping_equals_torch(torch, scale):
    params, shapes = make_params()
    twins = {name: torch.tensor(get(params[name].value).astype('d'), requires_grad=True) for name in shapes}
    ours, theirs = Adam(params, lr=0.01, max_norm=1.0), torch.optim.Adam(twins.values(), lr=0.01)
    rng, clips = np.random.default_rng(9), 0
    for _ in range(20):
        for name, twin in twins.items():
            grad = (scale * rng.standard_normal(shapes[name])).astype('f')
            params[name].grad[...] = grad
            twin.grad = torch.tensor(grad.astype('d'))
        before = get(params.grads).copy()
        ours.step()
        assert (get(params.grads) == before).all()
        clips += ours.clipped()
        torch.nn.utils.clip_grad_norm_(twins.values(), 1.0)
        theirs.step()
        for name, twin in twins.items():
            assert np.abs(get(params[name].value) - twin.detach().numpy()).max() <= 2e-5
    assert clips == (20 if scale == 1.0 else 0) and get(ours.count)[0] == 20


@pytest.mark.parametrize('max_norm', (None, 1.0))
@pytest.mark.parametrize('make, twin', [
    (lambda p, **more: SGD(p, 0.1, **more), lambda torch, p: torch.optim.SGD(p, 0.1)),
    (lambda p, **more: SGD(p, 0.1, weight_decay=0.3, **more), lambda torch, p: torch.optim.SGD(p, 0.1, weight_decay=0.3)),
    (lambda p, **more: SGD(p, 0.1, momentum=0.9, **more), lambda torch, p: torch.optim.SGD(p, 0.1, 0.9)),
    (lambda p, **more: SGD(p, 0.1, momentum=0.9, weight_decay=0.3, nesterov=True, **more),
     lambda torch, p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.3, nesterov=True)),
    (lambda p, **more: SGD(p, 0.1, momentum=0.9, dampening=0.4, **more), lambda torch, p: torch.optim.SGD(p, 0.1, 0.9, 0.4)),
    (lambda p, **more: Adam(p, 0.01, weight_decay=0.3, **more), lambda torch, p: torch.optim.Adam(p, 0.01, weight_decay=0.3)),
    (lambda p, **more: AdamW(p, 0.01, weight_decay=0.3, **more), lambda torch, p: torch.optim.AdamW(p, 0.01, weight_decay=0.3)),
    (lambda p, **more: AdamW(p, **more), lambda torch, p: torch.optim.AdamW(p)),
], ids=['sgd', 'sgd-decay', 'momentum', 'nesterov-decay', 'dampening', 'adam-decay', 'adamw', 'adamw-defaults'])
def test_optimisers_equal_torch(torch, make, twin, max_norm):
    params, shapes = make_params()
    twins = {name: torch.tensor(get(params[name].value).astype('d'), requires_grad=True) for name in shapes}
    ours, theirs, rng = make(params, max_norm=max_norm), twin(torch, twins.values()), np.random.default_rng(9)
    for _ in range(10):
        for name, one in twins.items():
            grad = (0.1 * rng.standard_normal(shapes[name])).astype('f')
            params[name].grad[...] = grad
            one.grad = torch.tensor(grad.astype('d'))
        before = get(params.grads).copy()
        ours.step()
        assert (get(params.grads) == before).all() and ours.clipped() == bool(max_norm)
        if max_norm:
            torch.nn.utils.clip_grad_norm_(twins.values(), max_norm)
        theirs.step()
    for name, one in twins.items():
        assert np.abs(get(params[name].value) - one.detach().numpy()).max() <= 2e-5
    ours.zero_grad()
    assert not get(params.grads).any() and get(ours.count)[0] == 10


@pytest.mark.parametrize('nesterov,dampening', [(False, 0.0), (False, 0.4), (True, 0.0)])
def test_sgd_with_momentum_is_its_formulas_in_float64(nesterov, dampening):
    params, shapes = make_params()
    ours = SGD(params, 0.1, momentum=0.9, dampening=dampening, weight_decay=0.3, nesterov=nesterov)
    want = {name: get(params[name].value).astype('d') for name in shapes}
    velocity, rng = dict.fromkeys(shapes, 0.0), np.random.default_rng(9)
    for step in range(5):
        for name, shape in shapes.items():
            params[name].grad[...] = grad = rng.standard_normal(shape).astype('f')
            g = grad + 0.3 * want[name]
            velocity[name] = 0.9 * velocity[name] + (1 - dampening if step else 1) * g
            want[name] -= 0.1 * (g + 0.9 * velocity[name] if nesterov else velocity[name])
        ours.step()
    for name in shapes:
        assert np.abs(get(params[name].value) - want[name]).max() <= 2e-5, name


@pytest.mark.parametrize('make,names', [(Adam, 'mv'), (functools.partial(SGD, lr=0.1, momentum=0.9), 'm')], ids=['adam', 'sgd'])
def test_moments_without_gradients_become_0_and_no_denormal_number(make, names):
    params, _ = make_params()
    optimizer = make(params)
    least = np.finfo('f').tiny
    for name in names:
        getattr(params, name)[...] = 1.0005 * least
    optimizer.step()
    for name in names:                              # 0.9 or 0.999 times the value would be denormal
        assert not get(getattr(params, name)).any()
    params.m[...] = 4 * least
    optimizer.step()
    assert (get(params.m) >= least).all()           # normal numbers are kept


# ---- sparse gradients

BLOCK, TOUCHED, DENSE, NORM_CHUNK = (getattr(library.cpu().lib, f'PYOPS_{name}')
                                     for name in ('GRAD_BLOCK', 'TOUCHED', 'DENSE', 'NORM_CHUNK'))


def words_and_gradient(n, rng):
    """-> random words of all kinds, for each of n elements whether they call it touched, a gradient that is 0 at the others."""
    words = rng.choice(np.array([0, TOUCHED, DENSE, TOUCHED | DENSE], np.int32), -(-n // BLOCK), p=[0.7, 0.1, 0.1, 0.1])
    here = np.repeat(words != 0, BLOCK)[:n]
    return words, here, np.where(here, rng.standard_normal(n), 0).astype('f')


@pytest.mark.parametrize('n', (1, 255, 256, 257, 8192, 50_000, 300_007))
def test_zero_touched_and_grad_norm_go_where_something_was_added(n):
    words, here, grad = words_and_gradient(n, np.random.default_rng(n))
    norms = np.empty((2, 1), 'f')
    launch('grad_norm', norms[0], grad, None, backend.work('grad_norm', n), n)
    grad[~here] = np.nan                            # which nobody reads
    launch('grad_norm', norms[1], grad, words, backend.work('grad_norm', n), n)
    assert norms[0] == norms[1] and np.isfinite(norms).all()
    after = words.copy()
    launch('zero_touched', grad, after, n)
    assert (grad[here] == 0).all() and np.isnan(grad[~here]).all() and (after == words & ~TOUCHED).all()
    launch('zero_touched', grad, None, n)
    assert (grad == 0).all()


@pytest.mark.parametrize('n', (1, NORM_CHUNK, 50_000, 300_007))
def test_the_norm_of_chunks_that_were_summed_apart_has_the_same_bits(n):
    grad = np.random.default_rng(n).standard_normal(n).astype('f')
    whole, apart, part = (np.full(1, np.nan, 'f') for _ in range(3))
    launch('grad_norm', whole, grad, None, backend.work('grad_norm', n), n)
    work, cuts = backend.work('grad_norm', n), [0, *range(3 * NORM_CHUNK, n, 4 * NORM_CHUNK), n]
    work[...] = np.nan
    for first, end in reversed(list(itertools.pairwise(cuts))):
        launch('grad_norm', part, grad[first:end], None, work[backend.work_size('grad_norm', first) // 2 * 2:], end - first)
    launch('norm_of_chunks', apart, work, n)
    assert apart.tobytes() == whole.tobytes() and whole[0] > 0
    if len(cuts) > 2:
        assert part[0] < whole[0], 'one call sums all: this tests little'


@pytest.mark.parametrize('max_norm', (None, 1.0))
@pytest.mark.parametrize('weight_decay, decoupled', ((0.0, 0), (0.3, 0), (0.3, 1)))
@pytest.mark.parametrize('n', (200, 5000, 300_007))         # the last is worth several threads
def test_adam_gives_the_same_bits_where_nothing_was_added(n, weight_decay, decoupled, max_norm):
    rng = np.random.default_rng(4)
    dense = [rng.standard_normal(n).astype('f') for _ in range(2)] + [rng.random(n).astype('f')]
    for array in dense:                             # an infinity and NaN flow on as ever, and so does -0
        array[[3, n // 2, n - 1]] = np.inf, np.nan, -0.0
    sparse, lr = [array.copy() for array in dense], np.full(1, 0.01, 'f')
    for t in range(1, 7):
        words, _, grad = words_and_gradient(n, rng)
        norm = np.full(1, 3.0, 'f') if max_norm else None
        numbers = n, max_norm or 1.0, 0.9, 0.999, 1e-8, weight_decay, decoupled
        launch('adam', *dense, grad, None, norm, np.array([t]), lr, *numbers)
        launch('adam', *sparse, grad, words, norm, np.array([t]), lr, *numbers)
    for a, b in zip(dense, sparse, strict=True):
        assert (a.view(np.int32) == b.view(np.int32)).all()


def test_a_sparse_parameter_has_blocks_of_its_own_and_others_are_dense():
    specs = {'a': Spec((5,), init.zeros()), 'table': Spec((7, 90), init.zeros(), sparse=True), 'b': Spec((700,), init.zeros()),
             'empty': Spec((0, 4), init.zeros(), sparse=True), 'last': Spec((3, 256), init.zeros(), sparse=True)}
    params = Parameters(specs)
    assert get(params.touched).tolist() == [DENSE, 0, 0, *4 * [DENSE], 0, 0, 0]
    assert [params[name].touched is None for name in specs] == [True, False, True, False, False]
    op, dy = Embedding(params['table']), put(np.ones((2, 90), 'f'))
    _, ctx = op.forward(put(np.array([2, 2], np.int32)))
    op.backward(dy, ctx)                            # elements 180 to 270
    assert get(params['table'].touched).tolist() == [TOUCHED, TOUCHED, DENSE]
    assert get(params['table'].grad).any(1).tolist() == [False, False, True, False, False, False, False]
    params.zero_grads()
    assert not get(params.grads).any() and get(params.touched).tolist() == [DENSE, 0, 0, *4 * [DENSE], 0, 0, 0]
    with pytest.raises(ValueError, match='table: its gradient is sparse, and this op adds to all of it; make it of a Spec'):
        Linear(params['table'], None)


def unchecked(optimizer, **settings):
    """The optimizer with settings that it would have refused, so that the kernel has to."""
    vars(optimizer).update(settings)
    return optimizer


@pytest.mark.parametrize('make, text', [
    (lambda p: unchecked(SGD(p), momentum=1.0), r'sgd: momentum=1, expected 0 <= momentum < 1'),
    (lambda p: unchecked(SGD(p), momentum=float('nan')), 'sgd: momentum='),
    (lambda p: unchecked(SGD(p), weight_decay=-1), 'sgd: weight_decay=-1, expected at least 0'),
    (lambda p: SGD(p, momentum=float('nan')), 'SGD: momentum: expected 0 <= momentum < '),
    (lambda p: SGD(p, nesterov=True), 'SGD: nesterov: expected a momentum > 0'),
    (lambda p: unchecked(Adam(p), weight_decay=float('nan')), 'adam: weight_decay='),
    (lambda p: SGD([]), 'optimizer: got 0 parameters'),
])
def test_optimisers_say_what_they_want(make, text):
    with pytest.raises(ValueError, match=text):
        make(make_params()[0]).step()
    with pytest.raises(TypeError, match='optimizer: expected Tensors, got ndarray'):
        SGD([np.zeros(3)])


def test_adam_refuses_a_step_before_the_first():
    params, _ = make_params()
    adam = Adam(params, lr=0.01)
    adam.count[0] = -1
    with pytest.raises(ValueError, match='adam: step=0, expected at least 1'):
        adam.step()


@of_threads
def test_sparse_gradients_give_the_same_bits_for_any_number_of_threads():
    before, results = backend.threads(), []
    rng = np.random.default_rng(12)
    ids, dy = rng.integers(0, 4001, 1200).astype(np.int32), rng.standard_normal((1200, 250)).astype('f')
    try:
        for threads in (1, 2, 5):
            backend.set_threads(threads)
            params = Parameters({'table': Spec((4001, 250), init.normal(1), sparse=True), 'other': Spec((300,), init.zeros())})
            adam, op = Adam(params, lr=0.01, max_norm=1.0), Embedding(params['table'])
            for step in range(3):
                params.zero_grads()
                _, ctx = op.forward(ids[step * 400:][:400])
                op.backward(dy[step * 400:][:400], ctx)
                adam.step()
            results.append([params.values, params.m, params.v, params.touched, params.grads, adam.norm])
    finally:
        backend.set_threads(before)
    assert all((a == b).all() for result in results for a, b in zip(result, results[0], strict=True))


@of_threads
def test_the_optimiser_gives_the_same_bits_for_any_number_of_threads():
    before, results = backend.threads(), []
    try:
        for threads in (1, 2, 5):
            backend.set_threads(threads)
            params, _ = make_params()
            adam, sgd = Adam(params, lr=0.01, max_norm=1.0), SGD(params, momentum=0.9)
            params.grads[...] = np.random.default_rng(10).standard_normal(params.grads.size)
            adam.step()
            sgd.step()
            results.append((params.values.copy(), adam.norm.copy()))
    finally:
        backend.set_threads(before)
    assert all((v == results[0][0]).all() and n == results[0][1] for v, n in results)


def test_tick_gives_each_number_once():
    counter, seen = np.array([5]), np.zeros(3, np.int64)
    for i in range(3):
        launch('tick', seen[i:i + 1], counter)
    assert seen.tolist() == [6, 7, 8] and counter[0] == 8


@pytest.mark.parametrize('make, sigma, bound', [
    (init.constant(1.5), 0, 1.5), (init.zeros(), 0, 0), (init.ones(), 0, 1), (init.uniform(-3, 3), 3 ** 0.5, 3),
    (init.normal(0.2), 0.2, None),
    (init.xavier_normal(), (2 / 500) ** 0.5, None), (init.xavier_uniform(2), 2 * (2 / 500) ** 0.5, 2 * (6 / 500) ** 0.5),
    (init.kaiming_normal(), (2 / 300) ** 0.5, None), (init.kaiming_uniform(), (2 / 300) ** 0.5, (6 / 300) ** 0.5),
    (init.kaiming_uniform(1), (1 / 300) ** 0.5, (3 / 300) ** 0.5),
], ids=lambda value: getattr(value, '__doc__', None) if callable(value) else '')
def test_initial_values_have_the_width_of_their_formula(make, sigma, bound):
    for shape in ((200, 300), (8, 12, 5, 5) if make.__doc__.startswith('kaiming') else (200, 300)):     # fan_in 300
        values = make(np.random.default_rng(0), shape)
        assert values.shape == shape and values.dtype == np.float32
        if len(shape) == 2 or sigma:
            assert abs(values.std() - sigma) <= 0.05 * sigma + 1e-6
        assert bound is None or 0.98 * bound <= abs(values).max() <= 1.000001 * bound


def test_initial_values_that_need_two_axes_say_so():
    with pytest.raises(ValueError, match=r'init: expected a weight of two axes or more, .* got shape \(3,\)'):
        init.kaiming_uniform()(np.random.default_rng(0), (3,))


def test_initial_values_depend_on_seed_name_and_shape_alone():
    def draw(names, seed):
        params = Parameters({name: Spec((4, 3), lambda g, shape: g.standard_normal(shape).astype('f')) for name in names}, seed)
        return {name: get(params[name].value) for name in params}
    one, other, seeded = draw('abc', 0), draw('cba', 0), draw('abc', 1)
    for name in 'abc':
        assert (one[name] == other[name]).all() and (one[name] != seeded[name]).any()
    assert (one['a'] != one['b']).any()


# ---- the library's manners ----------------------------------------------------------------------------

@on_the_cpu
def test_the_requested_kernels_run():
    """Otherwise one instruction set would be tested three times."""
    want = os.environ.get('PYOPS_ISA')
    if want:
        assert want in (backend.isa(), backend.bf16_isa())
    assert backend.float32_isa() == ('amx_bf16' if backend.bf16_isa() == 'amx_bf16' else backend.isa())
    best = next(isa for isa in ('avx512', 'avx2', 'generic') if cpu_has(isa))
    if not want and not os.environ.get('PYOPS_LIBRARY'):
        assert backend.isa() == best
        assert backend.bf16_isa() == next(isa for isa in ('amx_bf16', 'avx512_bf16', best) if cpu_has(isa))
    assert (TILE_M, TILE_N) == {'generic': (4, 8), 'avx2': (6, 16), 'avx512': (14, 32)}[backend.isa()]


@on_the_cpu
@pytest.mark.parametrize('isa', ['generic', 'avx2', 'avx512', 'avx512_bf16', 'amx_bf16'])
def test_PYOPS_ISA_forces_the_kernels_in_a_new_process(isa):
    if not cpu_has(isa):
        pytest.skip(f'this CPU has no {isa}: run on one that has it')
    out = subprocess.run([sys.executable, '-c', 'from pyops import backend; print(backend.isa(), backend.bf16_isa())'],
                         cwd=ROOT, text=True, env=environment_without('PYOPS_LIBRARY', PYOPS_ISA=isa), capture_output=True)
    assert out.stdout.split() == ['avx512' if isa.endswith('_bf16') else isa, isa], out.stderr


@on_the_cpu
@pytest.mark.skipif(bool(os.environ.get('ASAN_OPTIONS')), reason='the sanitizer exports symbols of its own: run without it')
def test_only_the_abi_is_visible():
    if not shutil.which('nm'):
        pytest.skip('binutils are not installed: apt install binutils')
    path = os.environ.get('PYOPS_LIBRARY') or ROOT / 'pyops' / 'libpyops.so'
    out = subprocess.run(['nm', '-D', '--defined-only', path], text=True, capture_output=True, check=True).stdout
    visible = {line.split()[-1] for line in out.splitlines()}
    assert visible == set(library.cpu().functions)


@on_the_cpu
def test_every_prototype_is_read_as_cffi_reads_it():
    ffi, lib, functions = library.cpu()
    assert set(functions) == {name for name in dir(lib) if name.startswith('pyops_')
                              and ffi.typeof(getattr(lib, name)).kind == 'function'}
    for name, function in functions.items():
        theirs = ffi.typeof(getattr(lib, name))
        assert len(function.arguments) == len(theirs.args), name
        for ours, arg in zip(function.arguments, theirs.args, strict=True):
            assert arg.cname == (f'{ours.type} *' if ours.pointer else ours.type), f'{name}: {ours.name}'


@on_the_cpu
def test_loading_leaves_denormals_alone():
    """A library linked with -ffast-math would turn them off for the whole process."""
    backend.isa()
    assert np.float32(1e-45) * np.float32(1) > 0


def test_launch_refuses_wrong_types_and_counts():
    x = put(np.zeros(4, np.float32))
    with pytest.raises(TypeError, match='fill: y: expected float32, got float64'):
        backend.launch('fill', put(np.zeros(4)), 4, 0.0)
    with pytest.raises(TypeError, match='fill: expected 3 arguments, got 2'):
        backend.launch('fill', x, 4)
    assert (get(x) == 0).all()


@on_the_cpu
def test_launch_refuses_an_array_that_may_not_be_written_to():
    x = np.zeros(4, np.float32)
    x.flags.writeable = False
    with pytest.raises((BufferError, ValueError)):
        backend.launch('fill', x, 4, 1.0)
    assert (x == 0).all()


@on_the_cpu
def test_gemm_refuses_read_only_rows_of_a_wider_matrix():
    """Their address passes to the kernel without numpy's own check of a buffer."""
    c, a, b = np.zeros((3, 8), np.float32), np.ones((3, 5), np.float32), np.ones((5, 4), np.float32)
    left = c[:, :4]
    left.flags.writeable = False
    with pytest.raises(ValueError, match='gemm: c: expected a writeable array, got a read-only one; copy it'):
        backend.gemm(left, a, b)
    assert (c == 0).all()
    backend.gemm(c[:, :4], a, b)
    assert (c == [5, 5, 5, 5, 0, 0, 0, 0]).all()


@on_the_cpu
def test_every_argument_check_of_the_c_library_names_the_accepted_values():
    sources = [path for folder in ('csrc', 'cuda') for path in (ROOT / folder).rglob('*.*')
               if path.suffix in ('.c', '.h', '.inc', '.cu', '.cuh')]
    texts = [text for path in sources
             for text in re.findall(r'(?<!define )PYOPS_REQUIRE\([^"]*((?:"(?:[^"\\]|\\.)*"\s*)+)', path.read_text())]
    assert len(texts) > 100
    assert [text for text in texts if 'expected ' not in text] == []


@on_the_cpu
def test_a_replay_runs_a_part_of_its_actions_and_stops_at_the_first_that_fails():
    ffi, lib, _ = library.cpu()
    actions, values, at = ffi.new('pyops_action[4]'), ffi.new('pyops_value[12]'), ffi.new('int64_t *')
    y, seconds = np.zeros((4, 5), 'f'), np.full(4, -1.0)
    for i, n in enumerate((5, 4, -1, 5)):
        actions[i].kernel, actions[i].first_value = lib.pyops_kernel_number(b'pyops_fill'), 3 * i
        values[3 * i].pointer = ffi.cast('void *', y[i].ctypes.data)
        values[3 * i + 1].integer, values[3 * i + 2].real = n, i + 1
    measured = ffi.cast('double *', seconds.ctypes.data)
    assert lib.pyops_replay(actions, values, measured, at, 1, 2, ffi.NULL) == 0
    assert y.tolist() == [[0] * 5, [2] * 4 + [0], [0] * 5, [0] * 5] and at[0] == 1
    assert seconds[1] >= 0 and (seconds[[0, 2, 3]] == -1).all()
    assert lib.pyops_replay(actions, values, ffi.NULL, at, 0, 4, ffi.NULL) == 1 and at[0] == 2
    assert ffi.string(lib.pyops_last_error()) == b'fill: n=-1, expected at least 0'
    assert y.tolist() == [[1] * 5, [2] * 4 + [0], [0] * 5, [0] * 5]


@on_the_cpu
def test_threads_are_checked():
    before = backend.threads()
    for bad in (0, -3, 5000):
        with pytest.raises(ValueError, match=f'threads={bad}, expected 1 to 1024'):
            backend.set_threads(bad)
    assert backend.threads() == before


@on_the_cpu
def test_a_process_that_used_threads_ends_cleanly():
    """OpenMP's workers may still spin when Python unloads its libraries: ours must stay."""
    code = ('import numpy as np; from pyops import backend; backend.set_threads(2)\n'
            'x = np.zeros(1 << 20, np.float32); backend.launch("fill", x, x.size, 1.0)')
    spin = os.environ | {'OMP_WAIT_POLICY': 'active', 'GOMP_SPINCOUNT': 'infinite'}
    for _ in range(3):
        assert subprocess.run([sys.executable, '-c', code], cwd=ROOT, env=spin).returncode == 0


# ---- batches ------------------------------------------------------------------------------------------

@pytest.mark.parametrize('B,C', [(0, 5), (1, 1), (7, 33), (100, 784)])
def test_gather_pixels(B, C):
    rng = np.random.default_rng(11)
    table, rows = rng.integers(0, 256, (20, C)).astype(np.uint8), rng.integers(0, 20, B)
    y = np.empty((B, C), 'f')
    launch('gather_pixels', y, table, rows, 20, B, C, 1 / 255)
    assert np.abs(y - table[rows] / 255).max(initial=0) <= 1e-7


@pytest.mark.parametrize('B,T', [(0, 5), (1, 1), (7, 9), (3, 0)])
def test_gather_sequences_time_major_and_shifted(B, T):
    rng = np.random.default_rng(12)
    table, rows = rng.integers(4, 99, (20, T)).astype(np.int32), rng.integers(0, 20, B)
    ids = np.empty((T, B), np.int32)
    launch('gather_sequences', ids, table, rows, 20, B, T, -1)
    assert (ids == table[rows].T).all()
    launch('gather_sequences', ids, table, rows, 20, B, T, 3)
    assert (ids[:1] == 3).all() and (ids[1:] == table[rows].T[:-1]).all()


def sentences(rng, n, longest):
    """Return a table of n sentences of 0 to `longest` tokens: their ids one after the other, and where each starts."""
    lengths = rng.integers(0, longest + 1, n)
    starts = np.concatenate([[0], lengths.cumsum()])
    return rng.integers(4, 99, starts[-1]).astype(np.int32), starts


@pytest.mark.parametrize('B,longest', [(0, 5), (1, 1), (1, 0), (7, 9), (8, 40), (9, 100), (300, 3), (700, 20)])
def test_pack_sequences_without_padding_and_shifted(B, longest):
    rng = np.random.default_rng(12)
    table, starts = sentences(rng, 20, longest)
    rows = rng.integers(0, 20, B)
    want = [table[starts[row]:starts[row + 1]] for row in rows]
    total = sum(map(len, want))
    ids, positions, offsets = np.empty(total, np.int32), np.empty(total, np.int32), np.empty(B + 1, np.int32)
    launch('pack_sequences', ids, positions, offsets, table, starts, rows, 20, B, total, -1)
    assert offsets.tolist() == [0, *np.cumsum([len(x) for x in want])]
    assert ids.tolist() == [i for x in want for i in x] and positions.tolist() == [t for x in want for t in range(len(x))]
    launch('pack_sequences', ids, None, None, table, starts, rows, 20, B, total, 3)
    assert ids.tolist() == [i for x in want for i in [3, *x][:len(x)]]
    for of, array in enumerate((positions, offsets), 1):
        alone = np.empty_like(array)
        launch('pack_sequences', *(alone if i == of else None for i in range(3)), table, starts, rows, 20, B, total, -1)
        assert (alone == array).all()


@pytest.mark.parametrize('B,longest', [(0, 5), (1, 1), (7, 9), (9, 100), (300, 3)])
def test_pack_pairs_has_the_results_of_three_calls_of_pack_sequences(B, longest):
    rng = np.random.default_rng(13)
    tables, rows = [sentences(rng, 20, longest) for _ in range(2)], rng.integers(0, 20, B)
    totals = [int((starts[rows + 1] - starts[rows]).sum()) for _, starts in tables]

    def arrays(total):
        return [np.full(total, -5, np.int32), np.full(total, -5, np.int32), np.full(B + 1, -5, np.int32)]
    source, target, (labels, *_) = (arrays(total) for total in (totals[0], totals[1], totals[1]))
    launch('pack_pairs', *source, *target, labels, *tables[0], *tables[1], rows, 20, B, *totals, 3)
    for got, table, total, first in ((source, tables[0], totals[0], -1), (target, tables[1], totals[1], 3),
                                     ([labels], tables[1], totals[1], -1)):
        want = arrays(total)
        launch('pack_sequences', *want, *table, rows, 20, B, total, first)
        for ours, theirs in zip(got, want, strict=False):
            assert (ours == theirs).all()
    for side, name in enumerate(('source', 'target')):
        wrong = [total + (i == side) for i, total in enumerate(totals)]
        (source, target), labels = (arrays(total) for total in wrong), np.empty(wrong[1], np.int32)
        message = f'pack_pairs: ({name}_)?total={wrong[side]}, expected {totals[side]}, the sum of the lengths'
        with pytest.raises(ValueError, match=message):
            launch('pack_pairs', *source, *target, labels, *tables[0], *tables[1], rows, 20, B, *wrong, 3)


@pytest.mark.parametrize('rows,total,message', [
    ([3, -1], 4, r'rows\[1\]=-1, expected 0 to 3'), ([4], 4, r'rows\[0\]=4, expected 0 to 3'),
    ([0, 1], 7, 'total=7, expected 6, the sum of the lengths'), ([0, 1, 0], 7, 'total=7, expected .*the sum of the lengths'),
    ([], 1, 'total=1, expected 0, the sum of the lengths'), ([0, 2], 4, r'starts\[2\]=6, expected at most starts\[3\]=5')])
def test_a_batch_that_cannot_be_packed_is_refused_and_nothing_outside_is_written(rows, total, message):
    table, starts = np.arange(9, dtype=np.int32), np.array([0, 4, 6, 5, 9])
    rows, guarded = np.array(rows, np.int64), np.full(total + 2, 77, np.int32)
    offsets = np.empty(len(rows) + 1, np.int32)
    with pytest.raises(ValueError, match=f'pack_sequences: {message}'):
        launch('pack_sequences', guarded[1:-1], None, offsets, table, starts, rows, 4, len(rows), total, -1)
    assert guarded[0] == guarded[-1] == 77
    with pytest.raises(ValueError, match='pack_sequences: N=4 B=0 total=2147483648, expected total from 0 to 2'):
        launch('pack_sequences', None, None, None, table, starts, rows, 4, 0, 1 << 31, -1)


@pytest.mark.parametrize('bad', [-1, 3])
def test_gather_rows_refuses_a_row_outside_the_array(bad):
    y, x = np.zeros((2, 2, 4), 'f'), np.zeros((2, 3, 4), 'f')
    with pytest.raises(ValueError, match=rf'gather_rows: rows\[1\]={bad}, expected 0 to 2'):
        launch('gather_rows', y, x, np.array([0, bad], np.int32), 2, 3, 2, 4)


@pytest.mark.parametrize('kernel,dtype', [('gather_pixels', np.uint8), ('gather_sequences', np.int32)])
@pytest.mark.parametrize('bad', [-1, 20])
def test_rows_outside_the_data_are_refused(kernel, dtype, bad):
    out = np.empty((1, 2), np.float32 if kernel == 'gather_pixels' else np.int32)
    with pytest.raises(ValueError, match=rf'{kernel}: rows\[1\]={bad}, expected 0 to 19'):
        launch(kernel, out, np.zeros((20, 1), dtype), np.array([0, bad]), 20, 2, 1, 1)
