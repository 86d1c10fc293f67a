"""Products whose sums have few bits, as in tensor cores: by their definition in fractions, layouts, special numbers.

Runs on the emulation of a GPU too.
"""
import re
from fractions import Fraction

import numpy as np
import pytest
from places import get, of_threads, put

from pyops import backend
from pyops.errors import UserError
from pyops.formats import FormatError, parse
from pyops.plan import Plan
from pyops.quantization import Recipe


def log2_floor(x):
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if Fraction(2) ** e <= x else e - 1


def truncated(x, quantum):
    return int(x / quantum) * quantum               # towards 0


def by_definition(a, b, bits, promote):
    """A sum of products in exact fractions, by csrc/pyops.h."""
    total, r, k = np.float32(0), Fraction(0), 0
    terms = [Fraction(x) * Fraction(y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    while k < len(terms):
        end = min(k + 32, len(terms), (k // promote + 1) * promote if promote else len(terms))
        group = [r, *terms[k:end]]
        if most := max(map(abs, group)):
            r = sum(truncated(v, Fraction(2) ** (log2_floor(most) - bits + 1)) for v in group)
            r = truncated(r, Fraction(2) ** (log2_floor(abs(r)) - bits + 1)) if r else r
        k = end
        if k == len(terms) or promote and k % promote == 0:
            total, r = np.float32(total + np.float32(float(r))), Fraction(0)
    return total


def narrow(a, b, bias=None, before=None, relu=False, **sums):
    """The product of numpy arrays, added to `before` if it is given."""
    shape = (*a.shape[:-1], b.shape[-1])
    c = put(np.full(shape, np.nan, np.float32) if before is None else before.copy())
    given = bias if bias is None else put(bias)
    backend.gemm_narrow(c, put(a), put(b), given, before is not None, relu, **sums)
    return np.asarray(get(c))


def wide(shape, seed=0):
    """Numbers of very different magnitudes, so that alignment drops digits."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 4, shape)).astype(np.float32)


@pytest.mark.parametrize(('bits', 'promote'), [(14, 0), (14, 128), (14, 7), (8, 40), (24, 0), (2, 3)])
def test_sums_of_few_bits_by_the_definition(bits, promote):
    a, b = wide((3, 141), bits), wide((141, 17), promote)
    some = [0, 7, 15, 16]                           # columns: of two tiles
    want = [[by_definition(row, b[:, column], bits, promote) for column in some] for row in a]
    assert narrow(a, b, bits=bits, promote=promote)[:, some].tolist() == np.array(want).tolist()


def test_subnormal_and_large_operands_are_exact():
    a = np.array([[2.0**-149, -(2.0**-140), 3.5, 2.0**-126, 0.0], [2.0**120, -(2.0**120), 1.0, 2.0**-60, 7.0]], np.float32)
    b = np.array([[2.0**-149, 2.0**-130, 0.0, 2.0**-126, 2.0**-149], [64.0, 64.0, -3.0, 2.0**-100, 5.0]], np.float32).T.copy()
    want = [[by_definition(row, column, 14, 0) for column in b.T] for row in a]
    assert narrow(a, b, bits=14).tolist() == np.array(want).tolist()


def test_a_product_of_small_integers_is_exact():
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 9, shape).astype(np.float32) for shape in ((70, 200), (200, 33)))
    assert (narrow(a, b, bits=24) == a @ b).all() and (narrow(a, b, bits=24, promote=50) == a @ b).all()
    assert (narrow(a, b, bits=6) != a @ b).any()


def test_bias_previous_contents_and_relu_come_after_the_sum():
    a, b, bias, before = wide((5, 40)), wide((40, 19)), wide(19), wide((5, 19))
    y = narrow(a, b, bits=14)
    assert (narrow(a, b, bias, bits=14) == y + bias).all()
    assert (narrow(a, b, bias, before, bits=14) == y + bias + before).all()
    assert (narrow(a, b, bias, before, True, bits=14) == np.maximum(y + bias + before, 0)).all()
    empty = narrow(a[:, :0], b[:0], bias, bits=14)
    assert (empty == np.broadcast_to(bias, empty.shape)).all() and narrow(a[:0], b, bits=14).shape == (0, 19)


def test_a_batch_with_any_strides_has_the_bits_of_single_products():
    a, b = wide((2, 3, 70, 50)), wide((2, 3, 50, 21), 1)
    want = np.array([[narrow(a[i, j], b[i, j], bits=14, promote=32) for j in range(3)] for i in range(2)])
    assert (narrow(a, b, bits=14, promote=32) == want).all()
    turned = put(a.transpose(0, 1, 3, 2).copy()).transpose(0, 1, 3, 2)
    c, across = put(np.zeros((3, 70, 2, 21), np.float32)), put(b.transpose(3, 2, 1, 0).copy()).transpose(3, 2, 1, 0)
    backend.gemm_narrow(c.transpose(2, 0, 1, 3), turned, across, bits=14, promote=32)
    assert (np.asarray(get(c)).transpose(2, 0, 1, 3) == want).all()


@of_threads
def test_the_bits_depend_neither_on_threads_nor_on_the_tile():
    a, b, threads = wide((130, 90)), wide((90, 40)), backend.threads()
    try:
        results = []
        for n in (1, 2, 3):
            backend.set_threads(n)
            results.append(narrow(a, b, bits=14))
        parts = [narrow(a[i:], b[:, i:], bits=14) for i in (1, 7)]
        assert all((result == results[0]).all() for result in results)
        assert (parts[0] == results[0][1:, 1:]).all() and (parts[1] == results[0][7:, 7:]).all()
    finally:
        backend.set_threads(threads)


@pytest.mark.parametrize('promote', [0, 40])
def test_infinities_and_nan_stay_in_their_sums(promote):
    a, b = wide((70, 120)), wide((120, 20))
    plain = narrow(a, b, bits=14, promote=promote)
    a[3, 50], a[69, 5], b[100, 7], b[2, 19] = np.inf, np.nan, -np.inf, np.nan
    with np.errstate(invalid='ignore'):
        want = a.astype(np.float64) @ b.astype(np.float64)
    got, finite = narrow(a, b, bits=14, promote=promote), np.isfinite(want)
    assert (got[finite] == plain[finite]).all() and finite.sum() == 68 * 18
    assert np.array_equal(got[~finite], want[~finite].astype(np.float32), equal_nan=True)


def test_a_plan_replays_it():
    a, b, c = put(wide((5, 40))), put(wide((40, 6))), put(np.zeros((5, 6), np.float32))
    with Plan() as plan:
        backend.gemm_narrow(c, a, b, bits=8, promote=16)
    want = np.asarray(get(c)).copy()
    assert [action.kernel for action in plan.actions] == ['gemm_narrow']
    backend.launch('fill', c, 30, 0.0)
    plan.run()
    assert (np.asarray(get(c)) == want).all() and (want != 0).any()


def test_shapes_and_options_that_do_not_fit_are_named():
    c, a = put(np.zeros((2, 3), np.float32)), put(np.zeros((2, 4), np.float32))
    with pytest.raises(ValueError, match=re.escape('gemm_narrow: c (2, 3), a (2, 4) and b (2, 3) do not fit')):
        backend.gemm_narrow(c, a, c, bits=14)
    with pytest.raises(ValueError, match='gemm_narrow: bits=25, expected 2 to 24'):
        backend.gemm_narrow(c, a, put(np.zeros((4, 3), np.float32)), bits=25)
    assert parse('fp8:accumulate=14:promote=128').sums == {'bits': 14, 'promote': 128} and parse('fp8').sums == {}
    assert str(parse('mxfp8:accumulate=14')) == 'mxfp8:accumulate=14' and parse('mxfp8:accumulate=0') == parse('mxfp8')
    for text, message in (('fp8:accumulate=1', 'fp8: accumulate=1: expected a whole number from 2 to 24'),
                          ('fp8:promote=128', 'fp8: promote=128: expected accumulate with it')):
        with pytest.raises(FormatError, match=message):
            parse(text)
    with pytest.raises(UserError, match='have different sums; expected the same accumulate= and promote= in both'):
        Recipe.parse('fp8:accumulate=14,fwd.x=fp8')
    assert Recipe.parse('fp8:accumulate=14,fwd.x=none').rounds
