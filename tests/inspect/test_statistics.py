"""Statistics of tensors and of their quantization error, compared with float64 formulas over whole arrays and known values."""
import math

import numpy as np
import pytest

from pyops import backend, formats
from pyops.inspect import statistics
from pyops.inspect.statistics import (
    block_quantization,
    block_scales,
    block_sqnr,
    decibels,
    describe,
    digits,
    exponents,
    quantization,
    rounded,
    row_sum_error,
    scale_codes,
)

SIZE = 131072
DATA = {'normal': lambda rng: rng.standard_normal(SIZE), 'small': lambda rng: 1e-4 * rng.standard_normal(SIZE),
        'laplace': lambda rng: rng.laplace(size=SIZE)}
# SQNR in dB, as in the table of docs/inspect.md
EXPECTED_SQNR = {
    'normal': {'bf16': 55.6, 'fp16': 73.7, 'hifp8': 31.5, 'mxfp8': 30.6, 'mxfp8:scale=rceil': 31.5, 'mxfp8:scale=even': 31.2,
               'mxfp8:elem=e5m2': 25.3, 'mxfp8:elem=e5m2:scale=rceil': 25.5, 'mxfp4': 18.8, 'mxfp4:scale=rceil': 18.8,
               'mxfp4:scale=even': 19.1},
    'small': {'bf16': 55.6, 'fp16': 72.6, 'hifp8': 19.7, 'mxfp8': 30.2, 'mxfp8:scale=rceil': 31.6, 'mxfp8:scale=even': 30.9,
              'mxfp8:elem=e5m2': 25.3, 'mxfp8:elem=e5m2:scale=rceil': 25.6, 'mxfp4': 18.6, 'mxfp4:scale=rceil': 18.7,
              'mxfp4:scale=even': 18.9},
    'laplace': {'bf16': 55.6, 'fp16': 73.7, 'hifp8': 31.5, 'mxfp8': 30.1, 'mxfp8:scale=rceil': 31.5, 'mxfp8:scale=even': 30.8,
                'mxfp8:elem=e5m2': 25.3, 'mxfp8:elem=e5m2:scale=rceil': 25.6, 'mxfp4': 18.0, 'mxfp4:scale=rceil': 17.6,
                'mxfp4:scale=even': 18.1}}
ALL = [*formats.FORMATS, *formats.ELEMENTS, 'mxfp8:elem=e5m2:scale=rceil:block=16', 'fp16:saturate', 'hifp8:amax_target=8',
       'mxfp4:round=stochastic', 'mxfp6', 'nvfp4', 'int8:block=row', 'fp8:block=4x32', 'mxint8:block=2x16',
       'fp8:delayed:margin=2', 'int8:factor=20.7']


@pytest.mark.parametrize('data', EXPECTED_SQNR)
def test_sqnr_is_within_a_fifth_of_a_decibel_of_the_specification(data):
    x = DATA[data](np.random.default_rng(0)).astype(np.float32)
    for fmt, expected in EXPECTED_SQNR[data].items():
        assert abs(quantization(x, fmt)['sqnr_db'] - expected) <= 0.2, fmt


def tensor(rng, shape=(7, 5, 70), special=True):
    """Return values of many magnitudes with zeros and, if special, values that under- and overflow, infinities and NaN."""
    x = (rng.standard_normal(shape) * np.exp(3 * rng.standard_normal(shape))).astype(np.float32)
    flat = x.reshape(-1)
    flat[rng.integers(0, x.size, 60)] = 0
    if special:
        flat[rng.integers(0, x.size, 40)] = [1e-38, -1e-30, 3e38, 7e4, -6e4] * 8
        flat[rng.integers(0, x.size, 8)] = [np.inf, -np.inf, np.nan, np.nan] * 2
    return x


@pytest.mark.parametrize('tile', [64, 1 << 16])
@pytest.mark.parametrize('axis', [-1, 0, 1, 'tokens'])
@pytest.mark.parametrize('fmt', ALL)
def test_quantization_agrees_with_the_formulas(fmt, axis, tile, monkeypatch):
    monkeypatch.setattr(statistics, '_TILE', tile)                  # 64: tiles that end within every axis
    rng = np.random.default_rng(1)
    f = formats.parse(fmt)
    for special, mask in (False, None), (True, None), (True, np.arange(7)[:, None, None] < [7, 3, 1, 0, 5][:5]):
        mask = None if mask is None else mask.transpose(0, 2, 1)
        x = tensor(rng, special=special)
        got, expected = quantization(x, fmt, axis, mask), formulas(x, f, axis, mask)
        assert got.keys() == expected.keys()
        for key in expected:
            assert got[key] == pytest.approx(expected[key], rel=1e-9, nan_ok=True), key


def formulas(x, f, axis, mask):
    """The formulas of docs/inspect.md over whole arrays."""
    flat, axis = (x.reshape(-1, x.shape[-1]), 0) if axis == 'tokens' else (x, axis)
    q = formats.fake_quantize(flat, f, axis)
    codes = formats.encode(flat, f, axis) if f.is_block or f.has_factor else None
    scale = np.ones_like(flat, np.float64)
    if f.is_scaled:
        scale = formats.element_scales(flat, f, axis)
    elif f.is_block:
        s = np.where(codes.scales == 255, np.nan, 2.0 ** (codes.scales.astype(float) - 127))
        scale = np.take(s, np.arange(flat.shape[axis]) // f.block, axis)
    elif codes:
        scale /= codes.factor[0]
    valid = np.ones(x.shape, bool) if mask is None else np.broadcast_to(mask, x.shape)
    x, q, scale = (a.reshape(-1).astype(np.float64)[valid.reshape(-1)] for a in (x, q, scale))
    in_broken = np.isnan(scale)                                     # in a block with NaN or an infinity
    fx, nz = np.isfinite(x), np.isfinite(x) & (x != 0)
    poisoned = fx & ~np.isfinite(q) & in_broken
    lost = fx & ~np.isfinite(q) & ~poisoned
    known = fx & ~poisoned
    a, b = x[known], np.where(lost, np.copysign(np.inf, x), q)[known]
    e = b - a
    percent = [100 * (flags & all_values).sum() / all_values.sum() for flags, all_values in
               ((q == 0, nz), (np.abs(x) < f.min_normal * scale, nz), (np.abs(x) > f.max * scale, fx))]
    mse, amax, rms = (e ** 2).mean(), np.abs(a).max(), np.sqrt((a ** 2).mean())
    with np.errstate(divide='ignore'):                              # log 0 with overflow
        sqnr, psnr = 10 * np.log10((a ** 2).sum() / (e ** 2).sum()), 20 * np.log10(amax / np.sqrt(mse))
    return {'sqnr_db': sqnr, 'mse': mse, 'rmse': np.sqrt(mse),
            'max_abs_error': np.abs(e).max(), 'relative_mse': (e ** 2).sum() / (a ** 2).sum(),
            'cosine': (a * b).sum() / np.sqrt((a ** 2).sum() * (b ** 2).sum()) if not lost.any() else math.nan,
            'psnr_db': psnr,
            'mean_relative_error': np.abs(e[a != 0] / a[a != 0]).mean(),
            'underflow_pct': percent[0], 'subnormal_pct': percent[1], 'saturation_pct': percent[2],
            'overflow': lost.sum(), 'poisoned': poisoned.sum(), 'nan': np.isnan(x).sum(),
            'inf': np.isinf(x).sum(), 'sum_x2': (a ** 2).sum(), 'sum_e2': (e ** 2).sum(), 'amax': amax, 'rms': rms,
            'crest': amax / rms}


def test_padding_is_in_no_sum():
    rng = np.random.default_rng(2)
    x = rng.standard_normal((6, 3, 32)).astype(np.float32)
    mask = (np.arange(6)[:, None] < [6, 2, 4])[:, :, None]
    noisy = np.where(mask, x, 1e6 * rng.standard_normal(x.shape)).astype(np.float32)
    for fmt in formats.FORMATS:                                     # a block is a row here, so no block mixes in padding
        assert quantization(noisy, fmt, -1, mask) == quantization(np.where(mask, x, 0), fmt, -1, mask)
        assert quantization(noisy, fmt, -1, mask) != quantization(noisy, fmt, -1)
    assert describe(noisy, mask) == describe(x[np.broadcast_to(mask, x.shape)])


def test_values_of_empty_zero_and_exact_tensors():
    zeros = quantization(np.zeros((4, 40), np.float32), 'mxfp8')
    assert (zeros['sqnr_db'], zeros['cosine'], zeros['psnr_db'], zeros['relative_mse']) == (math.inf, 1, math.inf, 0)
    assert (zeros['underflow_pct'], zeros['saturation_pct'], zeros['amax'], zeros['rms']) == (0, 0, 0, 0)
    assert math.isnan(zeros['crest'])
    exact = quantization(np.float32([1, 2, -4]), 'hifp8')
    assert exact['sqnr_db'] == math.inf and exact['cosine'] == pytest.approx(1) and exact['max_abs_error'] == 0
    tiny = quantization(np.float32([1e-30, -1e-30]), 'hifp8')
    assert tiny['sqnr_db'] == 0 and tiny['cosine'] == 0 and tiny['underflow_pct'] == 100 and tiny['mean_relative_error'] == 1
    for empty in np.ones((0, 4), np.float32), np.float32([np.nan, np.inf]):
        result = quantization(empty, 'fp16')
        assert math.isnan(result['sqnr_db']) and math.isnan(result['mse']) and math.isnan(result['cosine'])
        assert result['nan'] == result['inf'] == empty.size // 2
    scalar = quantization(np.float32(3.3), 'mxfp4')
    assert scalar['max_abs_error'] == pytest.approx(0.3) and scalar['saturation_pct'] == 100    # 6.6 * 2^-1
    saturated = quantization(np.float32([7.9] * 32), 'mxfp4')
    assert saturated['saturation_pct'] == 100 and saturated['max_abs_error'] == pytest.approx(1.9)
    overflow = quantization(np.float32([1e5, 1]), 'fp16')
    assert (overflow['overflow'], overflow['sqnr_db'], overflow['max_abs_error']) == (1, -math.inf, math.inf)
    assert math.isnan(overflow['cosine']) and overflow['amax'] == 1e5 and overflow['sum_x2'] == 1e10 + 1
    whole = quantization(np.float32([1e5, -1e9]), 'fp16')
    assert (whole['overflow'], whole['sqnr_db'], whole['amax']) == (2, -math.inf, 1e9)
    assert block_sqnr(np.float32([[1e5] * 32 + [1] * 32]), 'fp16').tolist() == [[-math.inf, math.inf]]
    assert math.copysign(1, describe(np.zeros(3, np.float32))['amax']) == 1
    assert (decibels(100, 1), decibels(0, 1), decibels(0, 0)) == (20, -math.inf, math.inf)
    with pytest.raises(formats.FormatError, match='mxfp7'):
        quantization(np.ones(3, np.float32), 'mxfp7')


@pytest.mark.parametrize('tile', [64, 1 << 16])
@pytest.mark.parametrize('axis', [-1, 0, 1, 'tokens'])
@pytest.mark.parametrize('fmt', ['mxfp8', 'mxfp4:block=16', 'hifp8'])
def test_every_block_has_the_statistics_of_a_tensor_of_its_values(fmt, axis, tile, monkeypatch):
    monkeypatch.setattr(statistics, '_TILE', tile)
    f, x = formats.parse(fmt), tensor(np.random.default_rng(3), (5, 9, 35), special=False)
    x[2, :, 20:] = 0
    mask = np.arange(5)[:, None, None] < 4
    flat, along = (x.reshape(-1, 35), 0) if axis == 'tokens' else (x, axis)
    q, valid = formats.fake_quantize(flat, f, along), np.broadcast_to(mask, x.shape).reshape(flat.shape)
    assert np.array_equal(rounded(x, fmt, axis), q.reshape(x.shape))
    got = block_quantization(x, fmt, axis, mask)
    for block in np.ndindex(got['sqnr_db'].shape):
        index = list(block)
        index[along] = slice(block[along] * (f.block or 32), (block[along] + 1) * (f.block or 32))
        expected = quantization(flat[tuple(index)], fmt, -1, valid[tuple(index)])
        for name, values in got.items():
            if valid[tuple(index)].any() or name in ('sqnr_db', 'cosine', 'max_abs_error'):
                assert values[block] == pytest.approx(expected[name], rel=1e-9, nan_ok=True), name
    assert np.isnan(got['sqnr_db']).any() == (axis in (-1, 1))      # the last of 5 rows is padding
    assert np.array_equal(block_sqnr(x, fmt, axis, mask), got['sqnr_db'], equal_nan=True)
    if f.is_block:
        codes = formats.encode(flat, f, along).scales
        assert np.array_equal(block_scales(x, fmt, axis), codes.astype(float) - 127)
    else:
        with pytest.raises(ValueError, match='hifp8: has no scales that are powers of two'):
            block_scales(x, fmt, axis)


def test_a_block_with_nan_has_no_scale():
    x = np.ones((2, 64), np.float32)
    x[1, 40] = np.nan
    assert np.array_equal(block_scales(x, 'mxfp8'), [[-8, -8], [-8, np.nan]], equal_nan=True)
    assert np.array_equal(block_sqnr(x, 'mxfp8'), [[np.inf, np.inf], [np.inf, np.nan]], equal_nan=True)
    result = quantization(x, 'mxfp8')
    assert (result['nan'], result['poisoned'], result['overflow'], result['sqnr_db']) == (1, 31, 0, math.inf)


def test_counts_of_binades_scales_and_mantissa_widths():
    x = np.float32([[0, 1, -1.99, 2, 0.4999, 2 ** -140, -2 ** -149, np.inf, np.nan, 3e38, 8, 5e5] + [0] * 28] * 2)
    once = {-149: 1, -140: 1, -2: 1, 0: 2, 1: 1, 3: 1, 18: 1, 127: 1}
    assert exponents(x, [[True], [False]]) == once and exponents(x) == {key: 2 * count for key, count in once.items()}
    # just below a power of two the float32 log2 is wrong
    assert exponents(np.nextafter(np.float32(2) ** 120, np.float32(0))) == {119: 1} and exponents(np.zeros(3)) == {}
    assert scale_codes(x, 'mxfp8') == {255: 2, 0: 2} and scale_codes(x[:, 10:], 'mxfp4') == {18 - 2 + 127: 2}
    assert scale_codes(x, 'hifp8') == {}
    assert scale_codes(x, 'mxfp8', -1, [[True], [False]]) == {255: 1, 0: 1}
    # 8 and 2 have 3 bits, 2^-5 has 2, 2^18 becomes 2^15 and has 1, 2^-20 has 0; zeros and NaN are not counted
    assert digits(np.float32([8, 2, 2 ** 18, -2 ** -5, 2 ** -20, 2 ** -40, 0, np.nan]), 'hifp8') == {3: 2, 2: 1, 1: 1, 0: 1}
    assert digits(x, 'fp16') == {}


def test_row_sum_error_is_the_largest_deviation_from_1():
    rng = np.random.default_rng(5)
    p = np.exp(rng.standard_normal((3, 2, 4, 40)))
    p = (p / p.sum(-1, keepdims=True)).astype(np.float32)
    p[2, :, 3] = 0                                                  # a fully masked row
    mask = (np.arange(4) < [[4], [2], [4]])[:, None, :, None]
    for fmt in 'mxfp4', 'hifp8':
        q = formats.fake_quantize(p, fmt).astype(float)
        errors = np.abs(q.sum(-1) - 1)
        errors[1, :, 2:] = errors[2, :, 3] = 0
        assert row_sum_error(p, fmt, -1, mask) == pytest.approx(errors.max()) and errors.max() > 1e-4
    assert row_sum_error(p, 'bf16') < 0.01 and math.isnan(row_sum_error(p[2:, :, 3:], 'bf16'))


@pytest.mark.parametrize('shape', [(40, 30), (700, 431)])           # one chunk of the kernel, and many, shared by threads
@pytest.mark.parametrize('mask', [None, np.arange(700)[:, None] % 4 > 0, np.arange(431) < 30, np.ones((1, 1), bool)])
def test_describe_agrees_with_the_formulas(mask, shape):
    x = tensor(np.random.default_rng(4), shape)
    mask = None if mask is None else mask[tuple(slice(n) for n in shape[-mask.ndim:])]
    copy, threads = np.empty_like(x), backend.threads()
    got = describe(x, mask, copy)
    assert np.array_equal(copy.view(np.uint32), x.view(np.uint32))
    try:
        backend.set_threads(3 if threads == 1 else 1)
        assert describe(x, mask) == got
    finally:
        backend.set_threads(threads)
    a = x.astype(np.float64)[np.broadcast_to(True if mask is None else mask, x.shape)]
    f = a[np.isfinite(a)]
    expected = {'count': a.size, 'nan': np.isnan(a).sum(), 'inf': np.isinf(a).sum(), 'zeros': (a == 0).sum(),
                'amax': np.abs(f).max(), 'mean': f.mean(), 'mean_abs': np.abs(f).mean(), 'rms': np.sqrt((f * f).mean()),
                'std': f.std(), 'min': f.min(), 'max': f.max()}
    assert got == pytest.approx(expected, rel=1e-9) and list(got) == list(expected)
    assert all(type(value) in (int, float) for value in got.values())
    for empty in np.ones((0, 3), np.float32), np.full(3, np.nan, np.float32):
        assert describe(empty)['amax'] is None and describe(empty)['count'] == empty.size
    with pytest.raises(ValueError, match='describe: rows=-1 columns=1, expected at least 0'):
        backend.launch('describe', np.empty(4, np.int64), np.empty(3), np.empty(2, np.float32), None, x, None, -1, 1)


def test_entropy_of_attention_is_the_mean_over_the_rows_that_count():
    p = np.zeros((2, 3, 4, 5), np.float32)
    p[:, 0, :, 2] = 1                                       # one key
    p[:, 1] = 0.2                                           # all alike
    rng = np.random.default_rng(1)
    p[:, 2] = rng.dirichlet(np.ones(5), (2, 4))
    rows = [-sum(w * math.log(w) for w in row) / math.log(5) for row in p[:, 2].reshape(-1, 5).astype(float)]
    assert statistics.attention_entropy(p) == pytest.approx([0, 1, np.mean(rows)], rel=1e-6)
    assert statistics.attention_entropy(p[:, 2]) == pytest.approx([np.mean(rows)], rel=1e-12)
    p[0, 2, 1, 3], p[1, 2, 0, 0] = math.nan, -1
    counted = [row for i, row in enumerate(rows) if i not in (1, 4)]
    assert statistics.attention_entropy(p)[2] == pytest.approx(np.mean(counted), rel=1e-6)
    mask = np.zeros((2, 1, 4, 5), bool)
    mask[0, 0, :3, :2] = mask[1, 0, :, :1] = True           # the sentences have two keys and one
    half = np.where(mask, 0.5, 7).astype(np.float32) * np.ones((1, 3, 1, 1), np.float32)
    half[1] = 1
    assert statistics.attention_entropy(half, mask) == pytest.approx([1, 1, 1])
    assert np.isnan(statistics.attention_entropy(half[1:], mask[1:])).all()
