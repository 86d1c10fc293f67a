"""The random Hadamard transform before rounding: its matrix, what it leaves unchanged, and what it gains.

Runs on the emulation of a GPU too.
"""
import itertools

import numpy as np
import pytest
from places import get, of_threads, put

from pyops import backend, quantization
from pyops.errors import UserError
from pyops.formats import (
    ELEMENTS,
    FORMATS,
    MORE_FORMATS,
    FormatError,
    decode,
    encode,
    fake_quantize,
    hadamard,
    hadamard_lengths,
    parse,
)
from pyops.inspect import statistics
from pyops.philox import philox4x32
from pyops.plan import Plan

SHAPES = [((5, 96), -1), ((5, 70), 1), ((54, 7), 0), ((3, 47, 33), 1), ((31,), 0), ((2, 1), 1), ((1,), 0), ((20, 0), 0),
          ((0, 20), 1)]


def matrix(length):
    """The orthogonal matrix of Sylvester (1867)."""
    h = np.ones((1, 1))
    while len(h) < length:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(length)


def signs(seed):
    """The 32 signs, by the definition in csrc/pyops.h."""
    counter = np.zeros((8, 4), np.uint64)
    counter[:, 0] = np.arange(8)
    return np.where(philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(-1) >> 31, -1.0, 1.0)


def by_definition(x, block, axis, seed):
    """The transform as a product with a block-diagonal matrix, in float64."""
    n, s = x.shape[axis], signs(seed)
    whole, at = np.zeros((n, n)), 0
    for length in hadamard_lengths(n, block):
        position = at % block
        whole[at:at + length, at:at + length] = matrix(length) * s[position:position + length]
        at += length
    return np.moveaxis(whole @ np.moveaxis(x.astype(np.float64), axis, -2), -2, axis) if x.ndim > 1 else whole @ x


def transformed(x, *how, **options):
    return np.asarray(get(hadamard(put(x), *how, **options)))


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(('shape', 'axis'), SHAPES)
@pytest.mark.parametrize('block', [1, 2, 8, 16, 32])
def test_the_transform_is_a_product_with_signs_and_sylvesters_matrix_and_can_be_undone(shape, axis, block):
    for seed in (0, 7, 2**40 + 3):
        x = normal(shape, seed)
        y = transformed(x, block, axis, signs=seed)
        assert y.shape == x.shape and np.abs(y - by_definition(x, block, axis, seed)).max(initial=0) < 2e-6
        assert np.abs(transformed(y, block, axis, signs=seed, inverse=True) - x).max(initial=0) < 2e-6


def test_an_axis_ends_with_shorter_transforms():
    assert hadamard_lengths(70, 16) == [16] * 4 + [4, 2] and hadamard_lengths(31, 32) == [16, 8, 4, 2, 1]
    assert hadamard_lengths(32, 32) == [32] and hadamard_lengths(0, 16) == []


def test_signs_depend_on_the_seed_and_are_the_same_for_every_block():
    x = np.ones((1, 64), np.float32)
    found = {tuple(transformed(x, 16, signs=seed)[0, :16].tolist()) for seed in range(20)}
    assert len(found) == 20 and (transformed(x, 16, signs=5).reshape(4, 16) == transformed(x, 16, signs=5)[0, :16]).all()


@of_threads
def test_the_bits_depend_neither_on_threads_nor_on_the_layout():
    x, threads = normal((301, 1030)), backend.threads()
    try:
        results = []
        for n in (1, 2, 3):
            backend.set_threads(n)
            results += [hadamard(x, 32), hadamard(x.T.copy(), 32, 0).T]
        assert all((result == results[0]).all() for result in results)
    finally:
        backend.set_threads(threads)


def test_the_additions_are_a_butterfly_in_float32():
    x = normal((6, 32), 3)
    y = (x * signs(9).astype(np.float32)).reshape(6, 32)
    for distance in (1, 2, 4, 8, 16):
        pairs = y.reshape(6, -1, 2, distance)
        y = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2).reshape(6, 32)
    y = y * np.float32(0.25) * np.float32(0.70710678)
    assert (transformed(x, 32, signs=9) == y).all()
    assert (transformed(x.T.copy(), 32, 0, signs=9) == y.T).all()


@pytest.mark.parametrize('name', FORMATS + MORE_FORMATS + ELEMENTS)
def test_every_format_rounds_the_transformed_numbers_and_transforms_them_back(name):
    x = normal((33, 70))
    for block, axis in itertools.product((16, 32), (0, 1)):
        f = parse(name, hadamard=block, signs=3)
        given = put(x)
        rounded = fake_quantize(hadamard(given, block, axis, signs=3), name, axis)
        want = np.asarray(get(hadamard(rounded, block, axis, signs=3, inverse=True)))
        assert (np.asarray(get(fake_quantize(given, f, axis))) == want).all() and (np.asarray(get(given)) == x).all()
        assert (np.asarray(get(decode(encode(given, f, axis)))) == want).all()
        assert f.depends_on_axis and f.without_hadamard == parse(name) and parse(str(f)) == f


def test_a_product_of_transformed_operands_is_unchanged_without_rounding():
    x, w = normal((40, 70)), normal((50, 70), 1)
    for block in (16, 32):
        for a, b in ((transformed(x, block, signs=4), transformed(w, block, signs=4)),
                     (transformed(x.T.copy(), block, 0, signs=4).T, transformed(w, block, signs=4))):
            assert np.abs(a.astype(np.float64) @ b.T - x.astype(np.float64) @ w.T).max() < 1e-4


def test_products_with_outliers_gain_and_products_of_normal_numbers_do_not_lose():
    def decibels(x, w, fmt):
        y = x.astype(np.float64) @ w.T
        error = np.asarray(get(fake_quantize(put(x), fmt)), np.float64) @ np.asarray(get(fake_quantize(put(w), fmt))).T - y
        return 10 * np.log10((y ** 2).sum() / (error ** 2).sum())

    rng = np.random.default_rng(0)
    plain = [normal((64, 256), seed) for seed in (1, 2)]
    outliers = [np.where(rng.random(x.shape) < 0.01, 20 * x, x).astype(np.float32) for x in plain]
    for fmt in ('mxfp4', 'int4:block=32'):
        gained = decibels(*outliers, f'{fmt}:hadamard=32') - decibels(*outliers, fmt)
        assert gained > 2, (fmt, gained)
        assert abs(decibels(*plain, f'{fmt}:hadamard=32') - decibels(*plain, fmt)) < 1, fmt


@pytest.mark.parametrize('fmt', ['mxfp4:hadamard=16', 'nvfp4:hadamard=16', 'hifp8:hadamard=32:amax_target=224',
                                 'int8:block=row:hadamard=16'])
def test_statistics_measure_the_transformed_numbers_with_the_same_energies(fmt):
    x = normal((6, 5, 96)) * 3
    mask = np.ones((6, 5, 1), bool)
    mask[3:, 2] = False
    got = statistics.quantization(x, fmt, -1, mask)
    q, valid = fake_quantize(x, fmt).astype(np.float64), np.broadcast_to(mask, x.shape)
    e2, x2 = ((q - x)[valid] ** 2).sum(), (x[valid].astype(np.float64) ** 2).sum()
    assert got['sum_x2'] == pytest.approx(x2, rel=1e-5) and got['sum_e2'] == pytest.approx(e2, rel=1e-4)
    inner = statistics.transformed(x, fmt)
    assert got['amax'] == pytest.approx(np.abs(inner[valid]).max()) and got['overflow'] == 0
    if parse(fmt).is_block:
        assert (statistics.block_scales(x, fmt) == statistics.block_scales(inner, parse(fmt).without_hadamard)).all()
    along = statistics.quantization(x, fmt, 0, mask)            # padding within a transform
    assert np.isfinite(along['sqnr_db']) and along['sum_x2'] > got['sum_x2']


def test_a_plan_records_three_launches():
    x = put(normal((4, 64)))
    with Plan(run=False, x=x) as plan:
        y = fake_quantize(x, 'mxfp4:hadamard=16', name='layer.fwd.x')
    assert [action.kernel for action in plan.actions] == ['hadamard', 'fake_quantize', 'hadamard']
    plan.run()
    assert (np.asarray(get(y)) == np.asarray(get(fake_quantize(x, 'mxfp4:hadamard=16')))).all()


@pytest.mark.parametrize(('fmt', 'message'), [
    ('mxfp4:hadamard=8', 'mxfp4: hadamard=8: expected 16 or 32, or 0 for no transform'),
    ('mxfp4:hadamard', 'mxfp4: hadamard=true: expected 16 or 32'),
    ('nvfp4:signs=3', 'nvfp4: signs=3: expected hadamard=16 or hadamard=32 with it'),
    ('hifp8:hadamard=16:signs=-1', 'hifp8: signs=-1: expected a whole number from 0 to 2147483647')])
def test_a_wrong_transform_is_named(fmt, message):
    with pytest.raises(FormatError) as error:
        parse(fmt)
    assert str(error.value).startswith(message)


def test_the_kernel_refuses_other_blocks():
    x = put(np.zeros((4, 8), np.float32))
    for layout, message in (((4, 8, 1, 0), 'block=0, expected a power of two from 1 to 32'), ((4, 8, 1, 12), 'block=12'),
                            ((4, 8, 1, 64), 'block=64'), ((-1, 8, 1, 16), 'outer=-1')):
        with pytest.raises(ValueError, match=message):
            backend.launch('hadamard', x, x, *layout, 0, 0)


def test_a_recipe_gives_both_operands_of_a_product_the_same_transform():
    recipe = quantization.Recipe.parse('nvfp4,wgrad=nvfp4:hadamard=16,pv.v=none')
    assert str(recipe.formats['wgrad.x']) == 'nvfp4:hadamard=16' and recipe.formats['fwd.x'].hadamard == 0
    assert quantization.Recipe.parse('fwd.x=mxfp4:hadamard=16').formats.keys() == {'fwd.x'}
    with pytest.raises(UserError, match='fwd.x=mxfp4:hadamard=16 and fwd.w=mxfp4: the operands of a product have'):
        quantization.Recipe.parse('mxfp4,fwd.x=mxfp4:hadamard=16')
    with pytest.raises(UserError, match='different Hadamard transforms'):
        quantization.Recipe.parse('fwd.x=mxfp4:hadamard=16,fwd.w=mxfp4:hadamard=16:signs=1')
