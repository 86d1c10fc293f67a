"""Matrices in FP8: codes and scales, equal to fake quantization, and products against float64 within a derived bound.

Runs on the emulation of a GPU too.
"""
import itertools
import os
import re

import numpy as np
import pytest
from places import ON_GPU, get, of_threads, put

from pyops import backend, formats
from pyops.errors import UserError
from pyops.formats import parse
from pyops.ops.fp8 import Matrix, check_products, encode, encode_both, encode_transposed, gemm_fp8

BLOCKS = '128', '128x128', 'tensor'
ELEMENTS = 'e4m3', 'e5m2'
FORMATS = [parse(f'fp8:elem={element}:block={block}') for element, block in itertools.product(ELEMENTS, BLOCKS)]
U = 2.0**-24                    # of a rounding to float32


def numbers(shape, seed=0, special=False):
    """Numbers of very different magnitudes; special: with zeros, an infinity, NaN and subnormal numbers."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 6, (shape[0], 1))).astype(np.float32)
    if special:
        x[:, 3 % shape[1]], x[0] = 0, -0.0
        x[shape[0] // 2, shape[1] // 2], x[shape[0] // 3, shape[1] // 3] = np.nan, -np.inf
        x[-2:] *= np.float32(2.0**-130)
    return x


def host(array):
    return np.asarray(get(array))


def as_bf16(x):
    y = backend.empty(x.shape, backend.BF16)
    backend.convert(y, x)
    return y


def decoded(x, fmt, axis=-1):
    return np.asarray(host(formats.fake_quantize(put(x), fmt, axis)), np.float64)


def codes_and_scales(m):
    return host(m.codes)[:, :m.shape[1]], host(m.scales)


def expected(x, fmt):
    """Codes and scales of x and of its transpose, from pyops.formats."""
    for axis in (-1, 0):
        found = formats.encode(put(x), fmt, axis)
        codes, scales = host(found.codes).astype(np.uint8), host(found.scales).reshape(found.scales.shape[-2:])
        yield (codes, scales.T) if axis else (codes.T, scales)


@pytest.mark.parametrize('shape', [(130, 200), (1, 1), (3, 400), (257, 17)], ids=str)
@pytest.mark.parametrize('fmt', FORMATS, ids=str)
def test_codes_and_scales_are_those_of_fake_quantization(fmt, shape):
    for special in (False, True) if min(shape) > 2 else (False,):
        x = numbers(shape, special=special)
        for m, (codes, scales) in zip(encode_both(put(x), fmt, 'x', 'xt'), expected(x, fmt), strict=True):
            got, of_blocks = codes_and_scales(m)
            assert (got == codes).all()
            assert np.array_equal(of_blocks.reshape(-1), scales.reshape(-1), equal_nan=True)
    if ON_GPU:                                          # one copy alone; activations stored as bfloat16
        half = as_bf16(put(x))
        rounded = host(half)
        both = encode_both(half, fmt, 'x', 'xt')
        each = encode(half, fmt, 'x'), encode_transposed(half, fmt, 'xt')
        for m, alone, (codes, _) in zip(both, each, expected(rounded, fmt), strict=True):
            assert (codes_and_scales(m)[0] == codes).all() and (codes_and_scales(alone)[0] == codes).all()


def test_one_copy_leaves_the_other_out():
    x = put(numbers((40, 50)))
    for fmt in FORMATS:
        plain, transposed = encode_both(x, fmt, 'x', 'xt')
        for m, alone in ((plain, encode(x, fmt, 'x')), (transposed, encode_transposed(x, fmt, 'xt'))):
            for got, want in zip(codes_and_scales(alone), codes_and_scales(m), strict=True):
                assert (got == want).all()


def bound(a, b, K):
    """The largest error of gemm_fp8 for decoded operands in float64.

    The products of codes are exact.  A sum of 128 of them has at most 127 roundings, the scales and their product 3, and the
    sum of all blocks one each.  Tensor cores of a GPU truncate 33 addends of each 32 terms to 14 bits: four times in a block.
    """
    terms = min(K, 128) + -(-K // 128) + 3
    of_sums = 4 * 33 * 2.0**-13 if ON_GPU and not os.environ.get('PYOPS_EMULATE_CUDA') else 0
    return (terms * U + of_sums) * (abs(a) @ abs(b).T) + 1e-37


def check(c, a, b, want=None):
    exact = a @ b.T if want is None else want
    assert (abs(c - exact) <= bound(a, b, a.shape[1])).all(), (abs(c - exact) / bound(a, b, a.shape[1])).max()


def multiplied(x, w, f, g, **how):
    c = put(np.full((len(x), len(w)), np.nan, np.float32))
    gemm_fp8(c, encode(put(x), f, 'x'), encode(put(w), g, 'w'), **how)
    return host(c)


@pytest.mark.parametrize('f', FORMATS, ids=str)
def test_products_are_those_of_the_decoded_numbers(f):
    x, w = numbers((70, 300)), numbers((150, 300), 1)
    for g in FORMATS:
        check(multiplied(x, w, f, g), decoded(x, f), decoded(w, g))


@pytest.mark.parametrize('M,N,K', [(1, 1, 1), (5, 3, 128), (129, 2, 17), (40, 50, 1300), (300, 260, 130)])
def test_products_of_all_shapes(M, N, K):
    x, w = numbers((M, K)), numbers((N, K), 1)
    for f, g in ((FORMATS[0], FORMATS[1]), (FORMATS[3], FORMATS[0]), (FORMATS[2], FORMATS[5])):
        check(multiplied(x, w, f, g), decoded(x, f), decoded(w, g))


def test_bias_previous_contents_and_relu_come_after_the_sum():
    x, w, (bias,), before = numbers((50, 140)), numbers((33, 140), 1), numbers((1, 33), 2), numbers((50, 33), 3)
    f, g = FORMATS[:2]
    a, b = decoded(x, f), decoded(w, g)
    exact, slack = a @ b.T + bias, 4 * U * (abs(bias) + abs(before))
    got = multiplied(x, w, f, g, bias=put(bias), relu=True)
    assert (abs(got - np.maximum(exact, 0)) <= bound(a, b, 140) + slack).all() and (got == 0).any() and (got > 0).any()
    c = put(before.copy())
    gemm_fp8(c, encode(put(x), f, 'x'), encode(put(w), g, 'w'), put(bias), accumulate=True)
    assert (abs(host(c) - (exact + before)) <= bound(a, b, 140) + slack).all()
    if ON_GPU:                                          # c in bfloat16, also in rows of an odd length
        half = as_bf16(put(before))
        start = host(half)
        gemm_fp8(half, encode(put(x), f, 'x'), encode(put(w), g, 'w'), put(bias), accumulate=True)
        want = exact + start
        assert (abs(host(half) - want) <= bound(a, b, 140) + slack + 2.0**-8 * abs(want)).all()


def test_a_product_without_terms_is_the_bias():
    fmt, bias = FORMATS[0], numbers((1, 5))[0]
    empty = [Matrix(put(np.zeros((rows, 0), np.uint8)), put(np.zeros((0, rows), np.float32)), (rows, 0), 1, 1)
             for rows in (3, 5)]
    c = put(np.full((3, 5), np.nan, np.float32))
    gemm_fp8(c, *empty, put(bias))
    assert (host(c) == bias).all() and encode(put(np.zeros((0, 4), np.float32)), fmt, 'x').shape == (0, 4)


def test_infinities_and_nan_spread_as_in_fake_quantization():
    x, w = numbers((140, 260), special=True), numbers((20, 260), 1)
    for f in FORMATS:
        want = decoded(x, f) @ decoded(w, f).T
        assert (np.isnan(multiplied(x, w, f, f)) == np.isnan(want)).all()


@of_threads
def test_the_number_of_threads_changes_no_bit():
    x, w = numbers((300, 400)), numbers((310, 400), 1)
    threads, results = backend.threads(), []
    try:
        for n in (1, 2, 3, 8):
            backend.set_threads(n)
            a, at = encode_both(x, FORMATS[0], 'x', 'xt')
            c = np.empty((300, 310), np.float32)
            gemm_fp8(c, a, encode(w, FORMATS[2], 'w'))
            results.append([*codes_and_scales(a), *codes_and_scales(at), c])
    finally:
        backend.set_threads(threads)
    for other in results[1:]:
        assert all(np.array_equal(one, two) for one, two in zip(results[0], other, strict=True))


@pytest.mark.parametrize('formats_of,message', [
    ({'fwd.x': 'mxfp8', 'fwd.w': 'fp8'}, 'fwd.x=mxfp8: tensor cores multiply fp8 or fp8:elem=e5m2'),
    ({'fwd.x': 'fp8:block=64', 'fwd.w': 'fp8'}, 'fwd.x=fp8:block=64: tensor cores multiply'),
    ({'fwd.x': 'fp8:delayed', 'fwd.w': 'fp8'}, 'fwd.x=fp8:block=tensor:delayed=16: tensor cores multiply'),
    ({'fwd.x': 'fp8:round=stochastic', 'fwd.w': 'fp8'}, 'fwd.x=fp8:round=stochastic: tensor cores multiply'),
    ({'wgrad.g': 'fp8'}, 'wgrad.g=fp8: a product in FP8 needs a format for both operands; give wgrad=fp8')])
def test_formats_that_tensor_cores_cannot_multiply_are_errors(formats_of, message):
    with pytest.raises(UserError, match=re.escape(message)):
        check_products({operand: parse(fmt) for operand, fmt in formats_of.items()})


def test_operands_that_do_not_fit_are_errors():
    a, b = (encode(put(numbers(shape)), FORMATS[0], 'x') for shape in ((4, 20), (6, 21)))
    with pytest.raises(ValueError, match=r'^gemm_fp8: c \(4, 6\), a \(4, 20\) and b \(6, 21\) do not fit$'):
        gemm_fp8(put(np.zeros((4, 6), np.float32)), a, b)
    with pytest.raises(ValueError, match='^gemm_fp8: lda=20, expected a multiple of 16 of at least 20'):
        c = put(np.zeros((4, 6), np.float32))
        backend.launch('gemm_fp8', c, a.codes, a.codes, a.scales, a.scales, None, 4, 6, 20, 6, 20, 32, 1, 1, 1, 1, False, False)
