"""Number formats: every rounding against tables of all values that a format has, and against ml_dtypes.

Runs once for each instruction set and on the emulation of a GPU, as the op table does.
"""
import itertools
import math
import os
import pickle

import numpy as np
import pytest
from places import ON_GPU, get, of_threads, on_the_cpu, put

import pyops
from pyops import backend
from pyops.formats import ELEMENTS, FORMATS, Codes, FormatError, decode, encode, fake_quantize, parse
from pyops.plan import Plan

# digits behind the point, least and largest exponent of normal numbers, the largest number
IEEE = {'e4m3': (3, -6, 8, 448.0), 'e5m2': (2, -14, 15, 57344.0), 'e2m1': (1, 0, 2, 6.0),
        'bf16': (7, -126, 127, 255 * 2.0 ** 120), 'fp16': (10, -14, 15, 65504.0)}
NUMBERS = ('hifp8', *IEEE)
# random numbers: five millions in the main run, fewer where the table runs again
MAIN = not (ON_GPU or os.environ.get('PYOPS_ISA') or os.environ.get('PYOPS_LIBRARY'))
MANY = 5_000_000 if MAIN else 100_000


def quantized(x, fmt, axis=-1, **options):
    return np.asarray(get(fake_quantize(put(np.array(x, np.float32, order='C')), fmt, axis, **options)))


def codes_of(x, fmt, axis=-1, **options):
    codes = encode(put(np.array(x, np.float32, order='C')), fmt, axis, **options)
    return codes, *(part if part is None else np.asarray(get(part)) for part in (codes.codes, codes.scales))


def same(a, b):
    """Equal in every bit, but that one NaN is as good as another."""
    return (a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))


# ---- what values there are -----------------------------------------------------------------------------------------

PREFIXES = {'11': 4, '10': 3, '01': 2, '001': 1, '0001': 0, '0000': None}       # the width of the exponent behind it


def hifp8_value(code):
    """By the description of the layout, bit by bit, from the front."""
    bits = f'{code:08b}'
    if bits in ('00000000', '10000000'):
        return 0.0 if bits[0] == '0' else math.nan
    sign, rest = (-1.0 if bits[0] == '1' else 1.0), bits[1:]
    if rest == '1101111':
        return sign * math.inf
    prefix, width = next((prefix, width) for prefix, width in PREFIXES.items() if rest.startswith(prefix))
    rest = rest[len(prefix):]
    if width is None:
        return sign * 2.0 ** (int(rest, 2) - 23)
    exponent, digits = rest[:width], rest[width:]
    e = int('1' + exponent[1:], 2) if width else 0
    e = -e if exponent.startswith('1') else e
    return sign * 2.0 ** e * (1 + int(digits, 2) / 2 ** len(digits))


def positives(name):
    """All finite values >= 0, in order, and one more: what the next would be."""
    if name == 'hifp8':
        return np.array(sorted({abs(v) for v in map(hifp8_value, range(256)) if math.isfinite(v)}) + [49152.0])
    digits, least, most, largest = IEEE[name]
    subnormal = [k * 2.0 ** (least - digits) for k in range(2 ** digits)]
    normal = [(1 + k / 2 ** digits) * 2.0 ** e for e in range(least, most + 1) for k in range(2 ** digits)]
    values = [v for v in subnormal + normal if v <= largest]
    return np.array([*values, 2 * values[-1] - values[-2]])


def interesting(name, seed=0):
    """float32: all values of a format, the middle of every two, what lies just beside, specials, and random bits."""
    v = positives(name)
    with np.errstate(over='ignore'):
        at = np.concatenate([v, (v[1:] + v[:-1]) / 2]).astype(np.float32)
        at = np.concatenate([at, np.nextafter(at, np.float32(0)), np.nextafter(at, np.float32(np.inf))])
    special = np.array([0, 1, 2, 0x7fffff, 0x800000, 0x7f7fffff, 0x7f800000, 0x7f800001, 0x7fc00000, 0x7fffffff],
                       np.uint32).view(np.float32)
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2 ** 32, MANY // 2, np.uint32).view(np.float32)
    near = (rng.standard_normal(MANY // 2) * 2.0 ** rng.integers(-40, 20, MANY // 2)).astype(np.float32)
    x = np.concatenate([at, special, bits, near])
    return np.concatenate([x, -x[:at.size + special.size]])


def rounded(v, name, mode='rne'):
    """|v| float64 -> the format's nearest value (for rne and away), the next towards 0 (floor); the one past the last of the
    table stands for all that is too large."""
    table = positives(name)
    v = np.minimum(np.abs(v), table[-1])
    above = np.clip(np.searchsorted(table, v, 'left'), 1, len(table) - 1)
    low, high = table[above - 1], table[above]
    up = v - low > high - v if mode != 'floor' else v >= high
    tie = (v - low == high - v) & (mode != 'floor')
    # the places of an even last digit are even, since 0 is at place 0
    up = np.where(tie, True if mode == 'away' else above % 2 == 0, up)
    return np.where(v == low, low, np.where(up, high, low))


def expected(x, name, mode, saturate):
    """A number format's rounding of x, in float64 by the table."""
    with np.errstate(invalid='ignore', over='ignore'):
        q, largest = rounded(np.nan_to_num(x.astype(np.float64), nan=0.0), name, mode), positives(name)[-2]
        too_large = q > largest
        beyond = np.nan if name == 'e4m3' else largest if name == 'e2m1' else np.inf
        q = np.where(too_large, largest if saturate else beyond, q)
        q = np.where(np.isinf(x), np.inf if name not in ('e4m3', 'e2m1') else np.nan, q)
        q = np.where(np.isnan(x), np.nan, np.copysign(q, x))
        return np.where(q == 0, 0.0 if name == 'hifp8' else q, q).astype(np.float32)


# ---- numbers ---------------------------------------------------------------------------------------------------------

def test_all_codes_of_hifp8():
    want = np.array([hifp8_value(code) for code in range(256)], np.float32)
    assert np.isfinite(want).sum() == 253 and len(set(want[np.isfinite(want)])) == 253
    for code, value in {0x00: 0.0, 0x01: 2.0 ** -22, 0x07: 2.0 ** -16, 0x08: 1.0, 0x7e: 2.0 ** -15, 0x6e: 32768.0, 0x09: 1.125,
                        0x88: -1.0, 0x6f: math.inf, 0xef: -math.inf}.items():
        assert want[code] == value, hex(code)
    codes = np.arange(256, dtype=np.uint16 if ON_GPU else np.uint8)
    assert same(np.asarray(get(decode(Codes(put(codes), None, parse('hifp8'), 0)))), want).all()
    assert (codes_of(want, 'hifp8', overflow='inf')[1] == codes).all()
    assert same(quantized(want, 'hifp8'), want).all()           # an infinity stays one, a NaN too


@pytest.mark.parametrize('name', NUMBERS)
@pytest.mark.parametrize('mode', ['rne', 'away', 'floor'])
def test_rounding_by_the_table_of_all_values(name, mode):
    x = interesting(name)[:400_000]         # the table's own come first
    for overflow in ('saturate', 'inf'):
        got, want = quantized(x, name, round=mode, overflow=overflow), expected(x, name, mode, overflow == 'saturate')
        wrong = ~same(got, want)
        if name == 'hifp8' and mode == 'rne':           # ties: where digits get fewer the places do not tell what is even
            below = np.nextafter(x, np.float32(0), where=np.isfinite(x), out=x.copy())
            wrong &= expected(x, name, 'away', True) == expected(below, name, 'away', True)
        assert not wrong.any(), (x[wrong][:3], got[wrong][:3], want[wrong][:3])


@pytest.mark.parametrize('name', IEEE)
def test_ml_dtypes_rounds_the_same(name):
    ml_dtypes = pytest.importorskip('ml_dtypes', reason='ml_dtypes is not installed: pip install ml_dtypes')
    kind = {'bf16': ml_dtypes.bfloat16, 'fp16': np.float16, 'e4m3': ml_dtypes.float8_e4m3fn, 'e5m2': ml_dtypes.float8_e5m2,
            'e2m1': ml_dtypes.float4_e2m1fn}[name]
    x = interesting(name, 1)
    assert not MAIN or x.size >= 5_000_000
    if name == 'e2m1':                  # which has no code for the others
        x = x[np.isfinite(x)]
    with np.errstate(all='ignore'):
        theirs = x.astype(kind)
    got = quantized(x, name, overflow='inf')
    assert same(got, theirs.astype(np.float32)).all()
    _, codes, _ = codes_of(x, name, overflow='inf')
    finite = ~np.isnan(got)             # NaN has many codes
    assert (codes[finite] == theirs.view(np.uint16 if theirs.itemsize == 2 else np.uint8)[finite]).all()


@pytest.mark.parametrize('fmt', [*ELEMENTS, 'hifp8', 'hifp8:round=rne', 'hifp8:round=hybrid', 'bf16', 'fp16',
                                 'mxint8:block=1:scale=ceil', 'e4m3:overflow=inf', 'e5m2:round=floor', 'e3m2:round=away'])
def test_codes_mean_the_rounded_numbers(fmt):
    """In every bit, also of infinities and NaN, if the format has them."""
    name = parse(fmt).element
    x = interesting(name if name in NUMBERS else 'e2m1', 3)[:50_000]
    if name in ('e2m1', 'e3m2', 'e2m3', 'mxint8'):
        x = x[np.isfinite(x)]
    codes, found, _ = codes_of(x, fmt)
    assert same(np.asarray(get(decode(codes))), quantized(x, fmt)).all()
    assert len(np.unique(found)) > 2 ** min(codes.format.bits - 1, 8)


def test_hybrid_rounding_of_hifp8():
    """By section 1.3 of the description, with Python's integers."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(4000) * 2.0 ** rng.integers(-26, 17, 4000)).astype(np.float32)
    x = np.concatenate([x, (x.view(np.uint32) & 0xffff0000).view(np.float32)])
    nearest = expected(x, 'hifp8', 'away', True)
    got = quantized(x, 'hifp8', round='hybrid')
    for value, q, to_nearest in zip(x.tolist(), got.tolist(), nearest.tolist(), strict=True):
        a, e = abs(value), math.frexp(abs(value))[1] - 1 if value else -99
        fraction = int(np.float32(a).view(np.uint32)) & 0x7fffff
        if -4 < e < 4 or a >= 40960:
            want = to_nearest
        elif e < -23:
            want = 0.0
        elif e == -23:
            want = 2.0 ** -22 if (fraction >> 10) + 8192 >= fraction & 0x3fff else 0.0
        else:
            m = 2 if 4 <= abs(e) <= 7 else 1 if 8 <= abs(e) <= 15 else 0
            first = (fraction & ((1 << (23 - m)) - 1)) >> (23 - m - 14)
            want = min(((fraction >> (23 - m)) + (1 << m) + (first >= fraction & 0x3fff)) * 2.0 ** (e - m), 32768.0)
        assert q == math.copysign(want, value) if want else q == 0, (value, q, want)


@pytest.mark.parametrize('fmt', ['hifp8', 'bf16', 'fp16', 'e4m3', 'mxfp8', 'mxfp4'])
def test_stochastic_rounding_goes_up_as_often_as_it_should(fmt):
    n = 20_000
    for value in (1.03125 if fmt != 'bf16' else 1.001953125, 5.2, 1e-3):
        x = np.full(n, value, np.float32)
        q = quantized(x, fmt, round='stochastic', seed=3)
        low, high = q.min(), q.max()
        assert low <= np.float32(value) <= high and len(set(q.tolist())) <= 2
        if high > low:
            share, want = (q == high).mean(), (float(np.float32(value)) - low) / (high - low)
            assert abs(share - want) <= 5 * math.sqrt(want * (1 - want) / n) + 1e-9, (value, share, want)


def test_stochastic_rounding_follows_seed_and_step():
    x = np.linspace(0.1, 9, 1000, dtype=np.float32)
    step = put(np.zeros(1, np.int64))
    first = quantized(x, 'mxfp8', round='stochastic', seed=1)
    assert same(first, quantized(x, 'mxfp8', round='stochastic', seed=1, step=step)).all()
    assert not same(first, quantized(x, 'mxfp8', round='stochastic', seed=2)).all()
    backend.launch('increment', step)
    assert not same(first, quantized(x, 'mxfp8', round='stochastic', seed=1, step=step)).all()
    exact = quantized(x, 'fp16')
    assert same(quantized(exact, 'fp16', round='stochastic'), exact).all()        # what has a code keeps it
    assert quantized(np.zeros(64), 'bf16', round='stochastic').any() == 0


def test_amax_target_scales_the_tensor():
    x = np.random.default_rng(0).standard_normal((37, 50)).astype(np.float32) * 1e-4
    factor = np.float32(8) / np.abs(x).max()
    got = quantized(x, 'hifp8', amax_target=8)
    assert same(got, quantized(x * factor, 'hifp8') / factor).all()
    assert np.abs(got - x).max() < np.abs(quantized(x, 'hifp8') - x).max()
    codes, _, _ = codes_of(x, 'hifp8', amax_target=8)
    assert same(np.asarray(get(decode(codes))), got).all()
    assert (quantized(np.zeros(5), 'hifp8', amax_target=8) == 0).all()
    assert np.isposinf(quantized([1, np.inf], 'hifp8', amax_target=8)[1])


class Delayed:
    """Delayed scaling by its definition, in numpy: the scale of a step comes from the amax of the steps before."""

    def __init__(self, f):
        self.f, self.past, self.amax = f, [], np.float32(0)

    def rounded(self, x):
        now = np.abs(x).max(initial=0) if not np.isnan(x).any() else np.float32(np.nan)
        before = max(self.past[-self.f.delayed:], default=np.float32(0))
        with np.errstate(divide='ignore', over='ignore', invalid='ignore'):
            factor = np.float32(self.f.max * 2.0 ** -self.f.option('margin')) / np.float32(before or now)
        if not 0 < factor < np.inf or not np.isfinite(before or now):
            factor = np.float32(1)
        if np.isfinite(now):
            self.amax = max(self.amax, now)
        if self.f.name == 'int8':
            with np.errstate(invalid='ignore'):
                whole = np.clip(np.rint(x * factor), -127, 127) + np.float32(0)
            return np.where(np.isfinite(x), whole, np.float32(np.nan)).astype(np.float32) / factor
        with np.errstate(over='ignore'):
            return expected(x * factor, self.f.element, 'rne', True) / factor

    def end_step(self):
        self.past.append(self.amax)
        self.amax = np.float32(0)


@pytest.mark.parametrize('fmt', ['fp8:delayed', 'fp8:delayed=1', 'fp8:delayed=3:margin=2', 'fp8:elem=e5m2:delayed=2:margin=-3',
                                 'int8:delayed=4'])
def test_delayed_scaling_by_its_definition(fmt):
    f, rng = parse(fmt), np.random.default_rng(3)
    rows, row = 5, 2                                    # of the histories of all operands; the others must stay 0
    histories, amax = put(np.zeros((rows, f.delayed), np.float32)), put(np.zeros(rows, np.float32))
    want = Delayed(f)
    sizes = [(40, 33), (40, 33), (1, 1), (7, 3), (0, 4), (300, 601), (5, 5), (6, 6), (2, 8), (9, 9)]
    for step, size in enumerate(sizes):
        for call in range(1 + step % 2):                # several tensors of a step share its scale
            x = (rng.standard_normal(size) * 10.0 ** rng.uniform(-6, 6)).astype(np.float32)
            if step == 3:
                x[...] = 0
            if step == 6:
                x[1, 1:3] = np.inf, -np.inf
            if step == 8 and call == 0:
                x[0, 0] = np.nan
            got = fake_quantize(put(x), f, history=(histories[row], amax[row:row + 1]))
            assert same(np.asarray(get(got)), want.rounded(x)).all(), (step, call)
        backend.launch('advance_amax', histories, amax, rows, f.delayed)
        want.end_step()
        after = np.asarray(get(histories))
        past = ([np.float32(0)] * f.delayed + want.past)[-f.delayed:][::-1]
        assert (after[row] == past).all() and not np.delete(after, row, 0).any() and not np.asarray(get(amax)).any()


def test_the_first_step_of_delayed_scaling_and_its_codes():
    x = np.random.default_rng(0).standard_normal((37, 50)).astype(np.float32) * 1e-4
    for fmt in ('fp8:delayed', 'fp8:elem=e5m2:delayed=2:margin=1', 'int8:delayed', 'fp8:factor=1234567.9'):
        codes, numbers, scales = codes_of(x, fmt)
        f, got = parse(fmt), quantized(x, fmt)
        assert scales is None and codes.factor.shape == (1,) and numbers.max() < 256
        assert same(np.asarray(get(decode(codes))), got).all()
        want = np.float32(f.option('factor') or f.target / np.abs(x).max())
        assert np.asarray(get(codes.factor))[0] == want, fmt
        empty = put(np.zeros(f.delayed or 1, np.float32)), put(np.zeros(1, np.float32))
        assert same(quantized(x, fmt, history=empty if f.delayed else None), got).all()


def test_a_plan_replays_delayed_scaling_and_its_history():
    rng = np.random.default_rng(1)
    x, histories, amax = put(np.zeros((6, 7), np.float32)), put(np.zeros((1, 3), np.float32)), put(np.zeros(1, np.float32))
    with Plan(run=False, x=x, histories=histories, amax=amax) as plan:
        y = fake_quantize(x, 'fp8:delayed=3', history=(histories[0], amax))
        backend.launch('advance_amax', histories, amax, 1, 3)
    assert [action.kernel for action in plan.actions] == ['delayed_factor', 'fake_quantize', 'advance_amax']
    want = Delayed(parse('fp8:delayed=3'))
    for _ in range(6):
        values = (rng.standard_normal((6, 7)) * 10.0 ** rng.uniform(-3, 3)).astype(np.float32)
        x[...] = values
        plan.run()
        assert same(np.asarray(get(y)), want.rounded(values)).all()
        want.end_step()


# ---- blocks ------------------------------------------------------------------------------------------------------------

def scale_of(amax, element, rule, shift):
    """s of a block by the definitions, with exact exponents; amax a finite number above 0."""
    digits, _, emax, largest = IEEE[element]
    amax = float(amax)
    exponent = math.frexp(amax)[1] - 1
    if rule == 'floor':
        s = exponent - emax
    elif rule == 'ceil':
        s = exponent + (amax > 2.0 ** exponent) - emax
    elif rule == 'even':
        up = math.floor(amax / 2.0 ** (exponent - digits) + 0.5) * 2.0 ** (exponent - digits)
        s = math.frexp(up)[1] - 1 - emax
    else:
        product = float(np.float32(amax) * (np.float32(1) / np.float32(largest)))
        exponent = math.frexp(product)[1] - 1 if product else -200
        s = exponent + (product > 2.0 ** exponent if product else 0)
    return max(-127, min(127, s + shift))


def blocks_by_hand(x, fmt):
    """The last axis in blocks; x (R, n) -> rounded, scales."""
    f = parse(fmt)
    blocks = -(-x.shape[1] // f.block)
    y, scales = np.empty_like(x), np.empty((len(x), blocks), np.uint8)
    for r, b in itertools.product(range(len(x)), range(blocks)):
        part = slice(b * f.block, (b + 1) * f.block)
        v, amax = x[r, part].astype(np.float64), np.abs(x[r, part]).max()
        if not np.isfinite(v).all():
            y[r, part], scales[r, b] = np.nan, 255
        elif amax == 0 or f.option('flush_subnormal_blocks') and amax < 2.0 ** -126:
            y[r, part], scales[r, b] = v * 0, 0
        else:
            s = scale_of(amax, f.element, f.option('scale'), f.option('shift'))
            q = np.minimum(rounded(v / 2.0 ** s, f.element, f.option('round')), f.max)
            with np.errstate(over='ignore'):
                y[r, part], scales[r, b] = np.copysign(q, v) * 2.0 ** s, s + 127
    return y, scales


def rows_of_blocks():
    """Rows of 100: blocks of all magnitudes, with tails, zeros, subnormal numbers, infinities and NaN."""
    rng = np.random.default_rng(7)
    x = (rng.standard_normal((400, 100)) * 2.0 ** rng.integers(-10, 10, (400, 1))).astype(np.float32)
    with np.errstate(over='ignore'):
        x[:100] = rng.integers(0, 2 ** 32, (100, 1), np.uint32).view(np.float32) * rng.standard_normal((100, 100))
    x[100:110] = 0
    x[110:150] *= np.float32(2.0 ** -125)
    x[150:160] = rng.integers(0, 2 ** 23, (10, 100), np.uint32).view(np.float32)         # subnormal
    x[160:170, 3], x[170:180, 99], x[180:190, 40] = np.inf, np.nan, -np.inf
    x[190:200] = -0.0
    x[200:210, ::2] = 0
    for i, edge in enumerate((448, 449, 464, 6, 6.5, 7, 57344, 61440, 31.999998, 2.0 ** 120, 3.4e38)):
        x[210 + i] = rng.uniform(-1, 1, 100)
        x[210 + i, 5] = edge
    return x


BLOCKS = ['mxfp8', 'mxfp4', 'mxfp8:elem=e5m2', 'mxfp8:block=16', 'mxfp4:block=1', 'mxfp8:block=100', 'mxfp8:block=7',
          'mxfp8:round=away', 'mxfp4:round=floor', 'mxfp8:shift=-1', 'mxfp8:flush_subnormal_blocks',
          *(f'{name}:scale={rule}' for name in ('mxfp8', 'mxfp4', 'mxfp8:elem=e5m2') for rule in ('rceil', 'ceil', 'even'))]


@pytest.mark.parametrize('fmt', BLOCKS)
def test_blocks_by_their_definition(fmt):
    x = rows_of_blocks()
    want, scales = blocks_by_hand(x, fmt)
    got = quantized(x, fmt)
    wrong = ~same(got, want)
    assert not wrong.any(), (np.argwhere(wrong)[:3], x[wrong][:3], got[wrong][:3], want[wrong][:3])
    codes, _, got_scales = codes_of(x, fmt)
    assert (got_scales == scales).all()
    assert same(np.asarray(get(decode(codes))), got).all()


@pytest.mark.parametrize('inner', [1, 5])
def test_bf16_in_blocks_whose_scale_is_exact_is_bf16(inner):
    """No format has such blocks, but the kernels accept them; the scale of numbers near 1 is far below 1."""
    rng, block = np.random.default_rng(5), 32
    x = (rng.choice((-1, 1), (2, 70, inner)) * rng.uniform(0.5, 1.9, (2, 70, inner))).astype(np.float32)
    y, number = put(np.full_like(x, np.nan)), parse('bf16').scalars()[1]
    backend.launch('fake_quantize', y, put(x), None, None, *x.shape, block, number, 0, 1, 0, 0, 0, 0)
    assert same(np.asarray(get(y)), quantized(x, 'bf16')).all()


@pytest.mark.parametrize('inner', [1, 5])
def test_a_factor_scales_what_is_rounded_in_blocks(inner):
    x = np.random.default_rng(6).standard_normal((2, 70, inner)).astype(np.float32)
    y, factor = put(np.full_like(x, np.nan)), np.float32(3.3)
    backend.launch('fake_quantize', y, put(x), put(np.array([factor])), None, *x.shape, *parse('mxfp8').scalars(), 0)
    assert same(np.asarray(get(y)), quantized(x * factor, 'mxfp8', 1) / factor).all()


@pytest.mark.parametrize('x,target,factor', [
    ([2, -1], 8, 4), ([0, 0], 8, 1), ([1, np.inf], 8, 1), ([np.nan, 1], 8, 1), ([3e38], 1e-30, 1), ([1e-45], 8, 1), ([], 8, 1)])
def test_the_factor_of_an_amax_is_1_if_there_is_none(x, target, factor):
    got = put(np.full(1, np.nan, np.float32))
    backend.launch('amax_factor', got, put(np.array(x, np.float32)), len(x), float(target))
    assert get(got)[0] == factor


def test_all_codes_of_e5m2_have_the_values_of_ml_dtypes():
    ml_dtypes = pytest.importorskip('ml_dtypes', reason='ml_dtypes is not installed: pip install ml_dtypes')
    codes, y = np.arange(256, dtype=np.uint16), put(np.zeros(256, np.float32))
    number = parse('mxfp8:elem=e5m2').scalars()[1]
    backend.launch('decode', y, put(codes), None, None, 1, 256, 1, 0, number)
    want = codes.astype(np.uint8).view(ml_dtypes.float8_e5m2).astype(np.float32)
    assert np.isinf(want).sum() == 2 and np.isnan(want).sum() == 6
    assert same(np.asarray(get(y)), want).all()


def test_blocks_along_any_axis():
    rng = np.random.default_rng(2)
    for shape, axis in (((5, 70, 3), 1), ((70, 5), 0), ((3, 4, 33), -1), ((2, 40, 700), -2), ((65,), 0), ((33, 1, 2, 600), 0),
                        ((2, 3, 0), 1), ((0, 7), 0), ((), 0), ((1,), -1), ((3, 67, 32), 1)):
        x = rng.standard_normal(shape).astype(np.float32) * 10
        for fmt in ('mxfp8', 'mxfp4:block=16', 'hifp8'):
            last = np.moveaxis(x, axis, -1) if shape else x.reshape(1)
            want = quantized(last.reshape(math.prod(last.shape[:-1]), last.shape[-1]), fmt).reshape(last.shape)
            got = quantized(x, fmt, axis)
            assert got.shape == shape and same(got, np.moveaxis(want, -1, axis) if shape else want.reshape(())).all()
            codes, _, scales = codes_of(x, fmt, axis)
            assert same(np.asarray(get(decode(codes))), got).all()
            if scales is not None:
                blocks = [-(-n // codes.format.block) if i == axis % len(shape) else n for i, n in enumerate(shape)]
                assert scales.shape == tuple(blocks or [1])


@pytest.mark.parametrize('shift', [-256, 0, 256])
def test_a_block_of_zeros_has_the_smallest_scale_with_any_shift(shift):
    x = np.zeros((3, 40), np.float32)
    for axis in (-1, 0):
        codes, numbers, scales = codes_of(x, f'mxfp8:shift={shift}', axis)
        assert (scales == 0).all() and (numbers == 0).all() and (np.asarray(get(decode(codes))) == 0).all()


def test_a_block_is_rounded_by_its_exact_exponent():
    """31.999998 is below 2^5, though the logarithm in float32 says 5: the scale is 2^-4, and 448 * 2^-4 = 28."""
    x = np.array([31.999998] + [1.0] * 31, np.float32)
    assert quantized(x, 'mxfp8')[0] == 28
    assert codes_of(x, 'mxfp8')[2][0] == 127 - 4


def test_the_table_of_signal_to_noise():
    """Known figures of normal and Laplace data; another draw of as many numbers is up to 0.2 dB away."""
    rng = np.random.default_rng(0)
    n = 13_107 * 10 if not ON_GPU else 32 * 500
    normal, laplace = rng.standard_normal(n), rng.laplace(size=n)
    for data, fmt, want in ((normal, 'bf16', 55.6), (normal, 'fp16', 73.7), (normal, 'hifp8', 31.5), (normal, 'mxfp8', 30.6),
                            (normal, 'mxfp8:scale=rceil', 31.5), (normal, 'mxfp8:elem=e5m2', 25.3), (normal, 'mxfp4', 18.8),
                            (normal * 1e-4, 'hifp8', 19.7), (laplace, 'mxfp8', 30.0), (laplace, 'mxfp4:scale=rceil', 17.6)):
        x = data.astype(np.float32)
        error = quantized(x, fmt).astype(np.float64) - x
        assert abs(10 * math.log10((x.astype(np.float64) ** 2).sum() / (error ** 2).sum()) - want) < 0.25, fmt


@pytest.mark.parametrize('fmt', ['hifp8', 'mxfp8', 'mxfp4:scale=even', 'bf16', 'fp16', 'mxfp8:round=stochastic',
                                 'hifp8:round=hybrid:amax_target=224', 'fp8:delayed:round=stochastic'])
@of_threads
def test_the_same_bits_for_any_number_of_threads_and_at_any_address(fmt):
    x = np.random.default_rng(5).standard_normal(300 * 601 + 1).astype(np.float32)
    threads = backend.threads()
    try:
        for axis in (0, 1):
            results = []
            for n, start in ((1, 0), (2, 1), (3, 0), (8, 1)):
                backend.set_threads(n)
                part = np.empty(x.size, np.float32)[start:][:300 * 601].reshape(300, 601)
                part[...] = x[:-1].reshape(300, 601)
                results.append(fake_quantize(part, fmt, axis))
            assert all(same(result, results[0]).all() for result in results)
        backend.set_threads(1)                          # one long row, whose blocks threads share
        row = fake_quantize(x, fmt)
        backend.set_threads(3)
        assert same(fake_quantize(x, fmt), row).all()
        if parse(fmt).is_block and not parse(fmt).is_stochastic:
            blocks = x[:x.size // 32 * 32].reshape(-1, 32)
            assert same(row[:blocks.size], fake_quantize(blocks, fmt).reshape(-1)).all()
    finally:
        backend.set_threads(threads)


def test_in_place_and_nothing_beside():
    x = np.random.default_rng(5).standard_normal((40, 33)).astype(np.float32)
    for fmt, layout in itertools.product(('hifp8', 'mxfp8', 'mxfp4'), ((40, 33, 1), (1, 40, 33))):
        want = quantized(x, fmt, 1 if layout[2] == 1 else 0)
        memory = put(np.concatenate([np.full(16, 7, np.float32), x.reshape(-1), np.full(16, 7, np.float32)]))
        inside = memory[16:-16]
        backend.launch('fake_quantize', inside, inside, None, None, *layout, *parse(fmt).scalars(), 0)
        after = np.asarray(get(memory))
        assert same(after[16:-16], want.reshape(-1)).all() and (after[:16] == 7).all() and (after[-16:] == 7).all()


def test_a_plan_records_and_replays_it():
    x = put(np.linspace(-3, 3, 256, dtype=np.float32).reshape(4, 64))
    with Plan(run=False, x=x) as plan:
        y = fake_quantize(x, 'mxfp4', name='layer.fwd.x')
    assert 'FakeQuantizeAction: x Tensor(x)(4, 64) -> y Tensor(layer.fwd.x)(4, 64)' in str(plan)
    plan.run()
    assert same(np.asarray(get(y)), quantized(get(x), 'mxfp4')).all()


# ---- arrays, names, options ---------------------------------------------------------------------------------------------

@on_the_cpu
def test_arrays_of_any_kind():
    x = np.arange(12, dtype=np.float64).reshape(3, 4)[:, ::2] / 7
    want = fake_quantize(x.astype(np.float32).copy(), 'fp16')
    assert same(fake_quantize(x, 'fp16'), want).all() and same(fake_quantize(x.tolist(), 'fp16'), want).all()
    for device in (pyops.cpu(), pyops.numpy_device()):
        from pyops.ndarray import array
        y = fake_quantize(array(x.astype(np.float32), device=device), 'fp16')
        assert y.device is device and same(y.numpy(), want).all()
    with pytest.raises(ValueError, match='axis 2 is out of bounds'):
        fake_quantize(x, 'mxfp8', 2)
    with pytest.raises(ValueError, match='e2m1 has no code for infinities and NaN'):
        encode([1, math.nan], 'e2m1')


@on_the_cpu
def test_tensors_of_torch_and_a_missing_axis(torch):
    x = torch.linspace(-3, 3, 40).reshape(2, 20)
    want = fake_quantize(x.numpy(), 'mxfp8')
    assert same(fake_quantize(x.clone().requires_grad_(), 'mxfp8'), want).all()
    assert same(fake_quantize(x.bfloat16(), 'mxfp8'), fake_quantize(x.bfloat16().float().numpy(), 'mxfp8')).all()
    with pytest.raises(TypeError, match='^axis: expected an integer, got None$'):
        fake_quantize(x, 'mxfp8', None)


def test_names_and_options():
    assert FORMATS == ('hifp8', 'mxfp8', 'mxfp4', 'bf16', 'fp16')
    for name in FORMATS + ELEMENTS:
        assert str(parse(name)) == name
    f = parse('MXFP8:block=16:scale=rceil')
    assert str(f) == 'mxfp8:scale=rceil:block=16' and parse(str(f)) == f and hash(parse(str(f))) == hash(f)
    assert pickle.loads(pickle.dumps(f)) == f
    assert parse('mxfp8', block=32) == parse('mxfp8')                     # what is as by default is not said
    assert parse('fp16', saturate=True) == parse('fp16:saturate') == parse('fp16:overflow=saturate')
    assert parse(parse('hifp8:amax_target=8'), round='hybrid').options == {'round': 'hybrid', 'amax_target': 8.0}
    assert parse('fp8:delayed') == parse('fp8:block=tensor:delayed=16') == parse('fp8', delayed=True)
    assert str(parse('fp8:delayed=0')) == 'fp8'
    assert str(parse('int8:delayed=2:margin=1')) == 'int8:block=tensor:delayed=2:margin=1'
    for value in np.random.default_rng(0).lognormal(0, 30, 100).astype(np.float32):        # all digits of a factor are kept
        assert np.float32(parse(str(parse('fp8', factor=value))).option('factor')) == value
    assert (f.block, f.is_block, f.bits, f.max, f.min_normal, f.min_subnormal) == (16, True, 8, 448, 2 ** -6, 2 ** -9)
    assert (parse('hifp8').block, parse('hifp8').max, parse('hifp8').min_subnormal) == (0, 32768, 2 ** -22)
    with pytest.raises(TypeError):
        parse(8)


@pytest.mark.parametrize(('fmt', 'message'), [
    ('mxpf8', 'mxpf8: no such number format; did you mean mxfp8'),
    ('', '(nothing): no such number format; expected one of: hifp8'),
    ('mxfp8:scal=rceil', 'scal: mxfp8 has no such option; did you mean scale? expected one of: elem, scale'),
    ('mxfp8:scale=ceill', 'mxfp8: scale=ceill: did you mean ceil'),
    ('mxfp8:block=0', 'mxfp8: block=0: expected a whole number from 1 to 4096'),
    ('mxfp8:block=many', 'mxfp8: block=many: expected a whole number from 1 to 4096'),
    ('mxfp4:elem=e4m3', 'mxfp4: elem=e4m3: did you mean e2m1? expected one of: e2m1'),
    ('mxfp8:round=hybrid', 'mxfp8: round=hybrid: expected one of: rne, away, floor, stochastic'),
    ('bf16:scale=floor', 'scale: bf16 has no such option'),
    ('hifp8:amax_target=0', 'hifp8: amax_target=0: expected a number above 0'),
    ('mxfp8:delayed', 'delayed: mxfp8 has no such option'),
    ('fp8:delayed=-1', 'fp8: delayed=-1: expected a whole number from 0 to 4096'),
    ('fp8:delayed:block=128', 'fp8: block=128: expected block=tensor, as the whole tensor has one scale with delayed'),
    ('int8:factor=2:block=row', 'int8: block=row: expected block=tensor, as the whole tensor has one scale with factor'),
    ('fp8:margin=1', 'fp8: margin=1: expected delayed with it'),
    ('fp8:delayed:factor=2', 'fp8: delayed=16 and factor=2: expected one of them'),
    ('fp16:saturate=perhaps', 'fp16: saturate=perhaps: expected true or false'),
])
def test_what_does_not_exist_is_named_with_what_does(fmt, message):
    with pytest.raises(FormatError) as error:
        parse(fmt)
    assert str(error.value).startswith(message) and isinstance(error.value, ValueError)


def test_kernels_refuse_what_they_do_not_know():
    x = put(np.zeros(4, np.float32))
    def call(*values):
        backend.launch('fake_quantize', x, x, None, None, *values, 0)
    for values, message in {
            (1, 4, 1, -1, 0, 0, 0, 0, 0, 0): 'block=-1', (1, 4, 1, 0, 11, 0, 0, 0, 0, 0): 'format=11',
            (1, 4, 1, 0, 1, 4, 0, 0, 0, 0): 'rounding=4, expected another rounding or format 0',
            (1, 4, 1, 0, 1, 3, 0, 0, 0, 0): 'step is NULL, expected an array for stochastic rounding',
            (1, 4, 1, 32, 1, 0, 0, 7, 0, 0): 'rule=7', (1, 4, 1, 32, 1, 0, 0, 0, 999, 0): 'shift=999',
            (1, 4, 1, 32, 0, 0, 0, 0, 0, 0): 'format 0 has no blocks', (-1, 4, 1, 0, 0, 0, 0, 0, 0, 0): 'outer=-1'}.items():
        with pytest.raises(ValueError, match=message):
            call(*values)
    with pytest.raises(ValueError, match='target=0'):
        backend.launch('amax_factor', x[:1], x, 4, 0.0)
    with pytest.raises(ValueError, match='delayed_factor: target=-1'):
        backend.launch('delayed_factor', x[:1], x[:1], x, x, 4, 4, -1.0)
    with pytest.raises(ValueError, match='delayed_factor: length=0'):
        backend.launch('delayed_factor', x[:1], x[:1], x, x, 4, 0, 1.0)
    with pytest.raises(ValueError, match='advance_amax: rows=-1 length=4'):
        backend.launch('advance_amax', x, x, -1, 4)
    with pytest.raises(ValueError, match=r'history: expected shapes \(16,\) and \(1,\) .* got \(4,\)'):
        fake_quantize(x, 'fp8:delayed', history=(x, x[:1]))


def test_complex_numbers_are_refused_with_the_remedy():
    with pytest.raises(TypeError, match=r'^x: expected real numbers, got complex ones; round x\.real and x\.imag$'):
        fake_quantize(np.ones(4, complex), 'nvfp4')
