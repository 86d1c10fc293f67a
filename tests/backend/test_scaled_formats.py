"""Formats whose blocks have a float as scale, or two dimensions, and the elements of MXFP6 and MXINT8: compared in every bit
with their definitions, written with numpy and the types of ml_dtypes.

Runs on the emulation of a GPU too.
"""
import itertools
import math

import numpy as np
import pytest
from places import get, of_threads, put

from pyops import backend
from pyops.formats import FormatError, decode, element_scales, encode, fake_quantize, of_grid, parse
from pyops.plan import Plan

ml_dtypes = pytest.importorskip('ml_dtypes', reason='ml_dtypes is not installed: pip install ml_dtypes')

TYPES = {'e4m3': ml_dtypes.float8_e4m3fn, 'e5m2': ml_dtypes.float8_e5m2, 'e2m1': ml_dtypes.float4_e2m1fn,
         'e3m2': ml_dtypes.float6_e3m2fn, 'e2m3': ml_dtypes.float6_e2m3fn}
LARGEST = {'e4m3': 448, 'e5m2': 57344, 'e2m1': 6, 'e3m2': 28, 'e2m3': 7.5, 'mxint8': 127 / 64, 'int8': 127, 'int4': 7}
EMAX = {'e4m3': 8, 'e5m2': 15, 'e2m1': 2, 'e3m2': 4, 'e2m3': 2, 'mxint8': 0}
F32 = np.float32


def element(v, name):
    """Round float32 numbers to an element, saturating, with ties to even."""
    v = np.clip(v, -LARGEST[name], LARGEST[name]).astype(F32)
    if name in TYPES:
        return v.astype(TYPES[name]).astype(F32)
    unit = F32(64 if name == 'mxint8' else 1)
    return np.rint(v * unit) / unit + F32(0)                # integers have no -0


def scale_of(amax, f, factor, target=6):
    if f.name == 'nvfp4':
        return element(F32(F32(amax / F32(target)) * factor), 'e4m3') / factor
    if f.name in ('fp8', 'int8', 'int4'):
        return F32(1) if amax == 0 else max(F32(amax / F32(LARGEST[f.element])), F32(2.0 ** -126))
    if amax == 0:
        return F32(2.0 ** -127)
    exponent = math.frexp(float(amax))[1] - 1
    if f.option('scale') == 'rceil':
        s = math.frexp(float(amax) / LARGEST[f.element])
        exponent, emax = s[1] - 1 + (s[0] > 0.5), 0
    else:
        emax = EMAX[f.element]
    return F32(2.0 ** min(max(exponent - emax, -127), 127))


def error_of(v, s, f):
    """The sum of the errors of nvfp4:scale=mse or mae for a block v with scale s, added as pyops.h says."""
    rounded = np.zeros_like(v) if s == 0 else element(v / s, 'e2m1')
    error = (rounded.astype(np.float64) * np.float64(s) - v).astype(F32).astype(np.float64).ravel()
    error = error * error if f.option('scale') == 'mse' else np.abs(error)
    return np.cumsum([np.cumsum(error[p::256])[-1] for p in range(min(256, error.size))])[-1]       # one after the other


def by_definition(x, f, blocks):
    """Round x.  blocks: slices of x that share a scale."""
    y, finite = np.empty_like(x), np.abs(x).max(initial=0)
    largest = F32(2688 if f.option('scale') == 'six' else 1536)
    factor = largest / finite if 0 < finite < np.inf and np.isfinite(largest / finite) else F32(1)
    for block in blocks:
        v = x[block]
        if not v.size:
            continue
        if not np.isfinite(v).all():
            y[block] = np.nan
            continue
        s = scale_of(np.abs(v).max(), f, factor)
        if f.option('scale') in ('mse', 'mae') and v.any():
            four = scale_of(np.abs(v).max(), f, factor, 4)
            s = four if error_of(v, four, f) < error_of(v, s, f) else s
        with np.errstate(over='ignore', under='ignore'):
            y[block] = v * F32(0) if s == 0 else element(v / s, f.element) * s
    return y


def blocks_of(shape, f, axis):
    """The slices of a matrix (rows, columns) that share a scale."""
    block, (rows, columns) = f.option('block'), shape
    if block == 'tensor':
        return [(slice(None), slice(None))]
    if block in ('row', 'column', 'axis'):
        down, across = {'row': (1, columns), 'column': (rows, 1), 'axis': (1, columns) if axis == -1 else (rows, 1)}[block]
    elif isinstance(block, int):
        down, across = (1, block) if axis == -1 else (block, 1)
    else:
        down, across = map(int, block.split('x'))
    corners = itertools.product(range(0, rows, max(down, 1)), range(0, columns, max(across, 1)))
    return [(slice(r, r + down), slice(c, c + across)) for r, c in corners]


def same(a, b):
    return np.array_equal(np.asarray(a).view(np.uint32)[~np.isnan(a)], np.asarray(b).view(np.uint32)[~np.isnan(b)]) and (
        np.isnan(a) == np.isnan(b)).all()


def matrix(rows=70, columns=150, special=True):
    rng = np.random.default_rng(rows)
    powers = 2.0 ** rng.integers(-8, 8, (rows, columns // 10 + 1)).repeat(10, 1)[:, :columns]
    x = (rng.standard_normal((rows, columns)) * powers).astype(F32)
    x[:, 3], x[5] = 0, -0.0
    if special:
        x[20, 40], x[40, 90] = np.nan, np.inf
        x[60:66] *= F32(2.0 ** -130)
        x[66:] = 0
    return x


FORMATS = ['fp8', 'fp8:block=128x128', 'fp8:elem=e5m2:block=64', 'fp8:block=row', 'fp8:block=column', 'fp8:block=tensor',
           'int8', 'int8:block=row', 'int8:block=column', 'int8:block=tensor', 'int4', 'int4:block=32',
           'nvfp4', 'nvfp4:block=16x16', 'nvfp4:scale=mse', 'nvfp4:scale=mae', 'nvfp4:scale=mse:block=40x40',
           'mxfp8:block=32x32', 'mxfp4:block=16x16:scale=rceil', 'mxfp6:block=32x32', 'mxfp6', 'mxfp6:elem=e2m3', 'mxint8',
           'mxfp6:scale=rceil', 'mxfp6:elem=e2m3:scale=rceil', 'mxint8:scale=rceil']


@pytest.mark.parametrize('fmt', FORMATS)
def test_rounding_by_the_definition(fmt):
    f = parse(fmt)
    for special, axis in itertools.product((True, False), (-1, 0)):
        x = matrix(special=special)
        want = by_definition(x, f, blocks_of(x.shape, f, axis))
        got = np.asarray(get(fake_quantize(put(x), fmt, axis)))
        wrong = ~((got == want) & (np.signbit(got) == np.signbit(want)) | np.isnan(got) & np.isnan(want))
        assert not wrong.any(), (axis, np.argwhere(wrong)[:3], x[wrong][:3], got[wrong][:3], want[wrong][:3])
        codes = encode(put(x), fmt, axis)
        assert same(np.asarray(get(decode(codes))), got)
        assert codes.format.bits <= 8 and np.asarray(get(codes.codes)).max() < 2 ** codes.format.bits


@pytest.mark.parametrize('fmt', ['nvfp4', 'nvfp4:scale=mse', 'fp8', 'fp8:block=100', 'fp8:block=1500', 'int8:block=column',
                                 'int8:block=row', 'mxfp8:block=32x32', 'mxfp6:block=48x48', 'mxint8'])
@pytest.mark.parametrize('shape', [(70, 2500), (300, 1100)])        # several strips; blocks of more rows than a band, too
def test_wide_and_tall_matrices(shape, fmt):
    x, f = matrix(*shape), parse(fmt)
    for axis in (-1, 0) if f.depends_on_axis else (-1,):
        want = by_definition(x, f, blocks_of(shape, f, axis))
        assert same(np.asarray(get(fake_quantize(put(x), fmt, axis))), want), axis


@pytest.mark.parametrize('fmt', ['fp8', 'fp8:block=3x1000', 'nvfp4', 'int8:block=row', 'int8:block=column', 'mxfp6:block=32x32',
                                 'nvfp4:scale=mae:block=4x1100'])
def test_rows_of_several_pieces_by_the_definition(fmt):
    """A row is processed in pieces of 1024 numbers."""
    f, x = parse(fmt), matrix(7, 2100, special=False)
    for axis in (-1, 0):
        want = by_definition(x, f, blocks_of(x.shape, f, axis))
        assert same(np.asarray(get(fake_quantize(put(x), fmt, axis))), want)
        assert same(np.asarray(get(decode(encode(put(x), fmt, axis)))), want)


@pytest.mark.parametrize('rounding,rounded', [
    ('floor', np.trunc), ('away', lambda v: np.copysign(np.floor(np.abs(v.astype('d')) + 0.5), v))], ids=['floor', 'away'])
@pytest.mark.parametrize('block', ['axis', 'row', 300])
def test_other_roundings_of_integers_by_the_definition(rounding, rounded, block):
    f, x = parse(f'int8:block={block}:round={rounding}'), matrix(7, 2100, special=False)
    for axis in (-1, 0):
        want = np.empty_like(x)
        for part in blocks_of(x.shape, f, axis):
            scale = scale_of(np.abs(x[part]).max(), f, F32(1))
            want[part] = np.clip(rounded(x[part] / scale), -127, 127).astype(F32) * scale + F32(0)
        got = np.asarray(get(fake_quantize(put(x), f, axis)))
        assert (got == want).all()
        assert (np.asarray(get(decode(encode(put(x), f, axis)))) == want).all()


@pytest.mark.parametrize('fmt', ['fp8:block=7', 'int8:block=axis', 'mxint8', 'int4:block=50'])
def test_blocks_along_a_middle_axis_are_those_of_each_matrix(fmt):
    x = np.random.default_rng(12).standard_normal((3, 50, 40)).astype(F32)
    want = np.stack([np.asarray(get(fake_quantize(put(part), fmt, 0))) for part in x])
    assert same(np.asarray(get(fake_quantize(put(x), fmt, 1))), want)
    assert same(np.asarray(get(decode(encode(put(x), fmt, 1)))), want)


@pytest.mark.parametrize('rule', ['mse', 'mae'])
def test_the_scale_of_a_long_block_follows_from_all_its_numbers(rule):
    """The errors of a block are added in pieces of 256 numbers; here the last ones decide."""
    rng, x = np.random.default_rng(11), np.zeros((200, 300), F32)
    x[:, 256:] = rng.standard_normal((200, 44))
    f = parse(f'nvfp4:scale={rule}:block=300')
    blocks = blocks_of(x.shape, f, -1)
    factor = F32(1536) / np.abs(x).max()
    six, four = (np.array([scale_of(np.abs(row).max(), f, factor, target) for row in x]) for target in (6, 4))
    chosen = np.array([error_of(row, b, f) < error_of(row, a, f) for row, a, b in zip(x, six, four, strict=True)])
    assert 20 < chosen.sum() < 180, 'one of the two scales is the better one everywhere: this test checks nothing'
    assert same(np.asarray(get(fake_quantize(put(x), f, -1))), by_definition(x, f, blocks))


def test_scales_are_those_of_the_hardware():
    x = matrix(32, 64, special=False)
    codes = encode(put(x), 'nvfp4')
    scales, factor = (np.asarray(get(part)) for part in (codes.scales, codes.factor))
    assert scales.shape == (1, 32, 4) and factor[0] == F32(2688) / np.abs(x).max() and scales.max() == 448
    assert (scales.astype(ml_dtypes.float8_e4m3fn).astype(F32) == scales).all()
    assert np.asarray(get(encode(put(x), 'fp8:block=128x128').scales)).tolist() == [[[F32(np.abs(x).max() / F32(448))]]]
    sizes = {fmt: np.asarray(get(encode(put(x), fmt).scales)).shape for fmt in (
        'int8', 'int8:block=column', 'int8:block=tensor', 'mxfp8:block=16x32', 'fp8')}
    assert sizes == {'int8': (1, 32, 1), 'int8:block=column': (1, 1, 64), 'int8:block=tensor': (1, 1, 1),
                     'mxfp8:block=16x32': (1, 2, 2), 'fp8': (1, 32, 1)}
    codes = np.asarray(get(encode(put(np.array([[-127, 127, 1, -1, 0.4, 0]], F32)), 'int8').codes))
    assert codes.tolist() == [[0x81, 0x7f, 1, 0xff, 0, 0]]                                        # two's complement
    for name, kind in TYPES.items():
        if name in ('e3m2', 'e2m3'):
            values = np.arange(64, dtype=np.uint8).view(kind).astype(F32)
            assert (np.asarray(get(encode(put(values), name).codes)) == np.arange(64)).all()
            assert same(np.asarray(get(fake_quantize(put(values), name))), values)


@pytest.mark.parametrize('name', ['mxfp8', 'mxint8'])
@pytest.mark.parametrize('rounding', ['rne', 'away', 'floor'])
def test_a_flushed_block_of_two_dimensions_is_0_and_the_others_stay(rounding, name):
    x = matrix(8, 64, special=False)
    x[:2, 32:] *= F32(2.0 ** -140)
    assert 0 < np.abs(x[:2, 32:]).max() < 2.0 ** -126
    got, kept = (np.asarray(get(fake_quantize(put(x), f'{name}:block=2x32:round={rounding}{flush}')))
                 for flush in (':flush_subnormal_blocks', ''))
    assert kept[:2, 32:].any() and not got[:2, 32:].any()
    kept[:2, 32:] = 0
    assert (got == kept).all()


def test_arrays_of_any_shape_and_both_directions_of_a_weight():
    rng = np.random.default_rng(1)
    for shape in ((3, 4, 50), (7,), (), (0, 5), (5, 0), (2, 3, 4, 20), (1, 40)):
        x = rng.standard_normal(shape).astype(F32)
        for fmt in FORMATS:
            f = parse(fmt)
            flat = x.reshape(math.prod(shape[:-1]), shape[-1] if shape else 1)
            want = by_definition(flat, f, blocks_of(flat.shape, f, -1)).reshape(shape)
            got = np.asarray(get(fake_quantize(put(x), fmt)))
            assert got.shape == shape and same(got, want), (fmt, shape)
    x = rng.standard_normal((64, 48)).astype(F32)
    middle = np.asarray(get(fake_quantize(put(x.reshape(4, 16, 48)), 'fp8:block=8', 1)))
    assert same(middle.reshape(64, 48), by_definition(x, parse('fp8:block=8'), blocks_of((64, 48), parse('fp8:block=8'), 0)))
    for fmt, is_same in (('mxfp8:block=16x16', True), ('nvfp4:block=16x16', True), ('int8:block=row', True), ('mxfp8', False),
                         ('nvfp4', False), ('int8', False)):
        both = [np.asarray(get(fake_quantize(put(x), fmt, axis))) for axis in (-1, 0)]
        assert same(*both) == is_same == (not parse(fmt).depends_on_axis), fmt


def test_the_scale_of_each_element():
    x = matrix(special=True)
    for fmt in ('fp8', 'nvfp4:block=16x16', 'int8:block=column', 'mxfp8:block=32x32'):
        f, scales = parse(fmt), element_scales(x, fmt)
        known = ~np.isnan(scales)
        with np.errstate(all='ignore'):
            ratio = np.where(scales > 0, x / scales, 0)
            want = np.where(scales == 0, x * F32(0), element(ratio, f.element)) * scales
        q = np.asarray(fake_quantize(x, fmt))
        assert scales.shape == x.shape and (np.isnan(q) == ~known).all() and known.any()
        assert same(q[known], want[known].astype(F32))


@of_threads
def test_threads_and_stochastic_rounding():
    x = np.random.default_rng(5).standard_normal((300, 601)).astype(F32)
    threads = backend.threads()
    try:
        for fmt in ('nvfp4:round=stochastic', 'nvfp4:scale=mse:block=64x64', 'fp8:block=tensor', 'int8:block=column',
                    'mxfp4:block=16x16:round=stochastic'):
            results = []
            for n in (1, 3):
                backend.set_threads(n)
                results.append(fake_quantize(x, fmt, seed=3))
            assert same(*results), fmt
            memory = x.copy()
            grid, scalars = parse(fmt).grid(x.shape, -1), parse(fmt).scaled_scalars()
            step = np.zeros(1, np.int64)
            scales = np.empty(grid[0] * -(-grid[1] // grid[3]) * -(-grid[2] // grid[4]), F32)
            factor = encode(x, fmt).factor if 'nvfp4' in fmt else None
            backend.launch('scaled_quantize', memory, None, scales, memory, factor, step, *grid, *scalars, 3)      # in place
            assert same(memory, results[0]), fmt
    finally:
        backend.set_threads(threads)
    half = np.full(20_000, 2.5, F32)
    half[0] = 7
    rounded = fake_quantize(half, 'int4:block=tensor:round=stochastic', seed=1)[1:]
    assert set(rounded.tolist()) == {2, 3} and 0.48 < (rounded == 3).mean() < 0.52


def test_a_plan_records_it_and_a_format_is_found_again():
    x = np.random.default_rng(2).standard_normal((64, 160)).astype(F32)
    with Plan(run=False, x=put(x)) as plan:
        y = fake_quantize(put(x), 'nvfp4', name='layer.fwd.x')
    plan.run()
    assert same(np.asarray(get(y)), np.asarray(get(fake_quantize(put(x), 'nvfp4'))))
    for fmt, axis, part in itertools.product(FORMATS, (-1, 0), (x, x[:5, :8].copy(), x[:1, :8].copy())):     # short blocks, too
        f = parse(fmt)
        if f.is_scaled:
            again, along = of_grid(f.grid(part.shape, axis % 2), part.shape, *f.scaled_scalars())
            q = [np.asarray(fake_quantize(part, *pair)) for pair in ((f, axis), (again, along if along != 'tokens' else 0))]
            assert same(*q) and again.name == f.name, (fmt, axis, str(again), along)


@pytest.mark.parametrize(('fmt', 'message'), [
    ('nvfp4:block=0', 'nvfp4: block=0: expected a whole number from 1 to 4096, two of them such as 32x32'),
    ('nvfp4:block=row', 'nvfp4: block=row: expected a whole number'),
    ('nvfp4:scale=floor', 'nvfp4: scale=floor: expected one of: six, mse, mae'),
    ('int8:block=rows', 'int8: block=rows: expected a whole number from 1 to 4096, two of them such as 32x32, or axis, row'),
    ('mxfp8:block=16x', 'mxfp8: block=16x: expected a whole number'),
    ('mxfp6:elem=e4m3', 'mxfp6: elem=e4m3: did you mean'),
    ('fp8:scale=floor', 'scale: fp8 has no such option'),
    ('int3', 'int3: no such number format; did you mean int')])
def test_what_is_wrong_is_named(fmt, message):
    with pytest.raises(FormatError) as error:
        parse(fmt)
    assert str(error.value).startswith(message)


def test_kernels_refuse_what_they_do_not_know():
    x = put(np.zeros((4, 4), F32))
    scales = put(np.zeros(16, F32))
    for values, message in {
            (1, 4, 4, 0, 1, 1, 0, 4, 0, 0): 'block_rows=0', (1, 4, 4, 1, 1, 0, 0, 4, 0, 0): 'format=0, expected another',
            (1, 4, 4, 1, 1, 11, 0, 4, 0, 0): 'format=11', (1, 4, 4, 1, 1, 1, 0, 8, 0, 0): 'rule=8',
            (1, 4, 4, 1, 1, 1, 0, 6, 0, 0): 'format=1, expected 3 with rule 6',
            (-1, 4, 4, 1, 1, 1, 0, 4, 0, 0): 'outer=-1', (1, 4, 4, 1, 1, 1, 3, 4, 0, 0): 'step is NULL'}.items():
        with pytest.raises(ValueError, match=message):
            backend.launch('scaled_quantize', x, None, scales, x, None, None, *values, 0)
