"""Kernels on strided arrays: every operation over every layout beside numpy, reductions, products of batches, and what only
arrays of float64 have: sorting and sums of rows.

Runs once for each instruction set and on the emulation of a GPU, as the op table does.
"""
import itertools
import math
import threading

import numpy as np
import pytest
from places import ON_GPU, gemm, of_threads, on_the_cpu
from places import launch as launch_kernel

from pyops import backend
from pyops.backend import library

LIB, FFI = library.cpu().lib, library.cpu().ffi
SUFFIX = {'<f4': '', '<i4': '_int32', '<f8': '_double'}


def number(name):
    return getattr(LIB, f'PYOPS_OP_{name.upper()}')


def geometry(*arrays):
    """shape and strides of arrays of one shape as the kernels want them, and how many axes."""
    shape = arrays[0].shape
    assert all(a.shape == shape for a in arrays)
    strides = [stride // a.itemsize for a in arrays for stride in a.strides]
    return np.array([*shape, 0], np.int64), np.array([*strides, 0], np.int64), len(shape)


def launch(name, *values, arrays):
    """The kernel of the dtype of the first array on views; `values` follow ndim."""
    launch_kernel(name + SUFFIX[arrays[0].dtype.str], *arrays, *geometry(*arrays), *values)


def same(got, want):
    """Equal bits, but for NaN, whose bits mean nothing."""
    want = np.asarray(want, got.dtype)
    assert got.shape == want.shape
    whole = f'i{got.itemsize}'
    assert ((got.view(whole) == want.view(whole)) | (np.isnan(got) & np.isnan(want) if got.dtype.kind == 'f' else False)).all()


def values(rng, shape, dtype):
    if dtype == np.int32:
        return rng.integers(-2**31, 2**31, shape, endpoint=False).astype(dtype)
    x = rng.standard_normal(shape).astype(dtype)
    flat = x.reshape(-1)
    for special in (0.0, -0.0, np.inf, -np.inf, np.nan, 1e-42, 3e38):
        if flat.size > 3:
            flat[rng.integers(flat.size)] = special
    return x


def across(x):
    """The same values in memory whose fastest axis is the first."""
    return np.asfortranarray(x)


LAYOUTS = {
    'contiguous': lambda x: x.copy(),
    'transposed': across,
    'every second column': lambda x: np.repeat(x, 2, -1)[..., ::2],
    'backwards': lambda x: x[..., ::-1].copy()[..., ::-1],
    'all axes backwards': lambda x: np.flip(np.flip(x).copy()),
    'inside a larger array': lambda x: np.pad(x, 2)[(slice(2, -2),) * x.ndim],
    'one row for all': lambda x: np.broadcast_to(x[:1], x.shape),
    'one column for all': lambda x: np.broadcast_to(x[..., :1], x.shape),
    'one value for all': lambda x: np.broadcast_to(x.reshape(-1)[:1].reshape((1,) * x.ndim), x.shape),
}
SHAPES = ((7,), (1, 1), (33, 130), (5, 1, 19), (4, 3, 5, 6), (600, 3), (3, 270, 2))
DTYPES = (np.float32, np.int32)
ALL_DTYPES = (*DTYPES, *[np.float64] * (not ON_GPU))


def bit_by_bit(name):
    """Return numpy's function for 'and', 'or', 'xor': of truth values for floats."""
    return lambda a, b: getattr(np, ('logical_' if a.dtype.kind == 'f' else 'bitwise_') + name)(a, b)


UNARY = {'copy': np.positive, 'negate': np.negative, 'abs': np.abs, 'sqrt': np.sqrt, 'floor': np.floor,
         'round': np.rint, 'ceil': np.ceil, 'trunc': np.trunc, 'sign': np.sign}
BINARY = {'add': np.add, 'subtract': np.subtract, 'multiply': np.multiply, 'divide': np.divide, 'maximum': np.maximum,
          'minimum': np.minimum, 'equal': np.equal, 'not_equal': np.not_equal, 'less': np.less,
          'less_equal': np.less_equal, 'greater': np.greater, 'greater_equal': np.greater_equal,
          'floor_divide': np.floor_divide, 'remainder': np.remainder,
          **{name: bit_by_bit(name) for name in ('and', 'or', 'xor')}}
ids = {'ids': lambda v: getattr(v, '__name__', None) or (str(v) if isinstance(v, tuple) else None)}
quiet = pytest.mark.filterwarnings('ignore::RuntimeWarning')


def result(shape, dtype, layout='contiguous'):
    """An array to write into, inside a frame that must stay as it is: -> view, check()."""
    frame = np.full([n + 4 for n in shape], -77, dtype)
    inside = (slice(2, -2),) * len(shape)
    y = frame[inside]
    if layout == 'transposed':
        frame = np.asfortranarray(frame)
        y = frame[inside]

    def check():
        outside = np.ones(frame.shape, bool)
        outside[inside] = False
        assert (frame[outside] == -77).all(), 'wrote beyond its view'
    return y, check


@on_the_cpu
@pytest.mark.parametrize('layout_a', LAYOUTS)
@pytest.mark.parametrize('layout_b', LAYOUTS)
@pytest.mark.parametrize('dtype', ALL_DTYPES, **ids)
def test_where_copies_the_bits_on_every_layout(layout_a, layout_b, dtype):
    rng = np.random.default_rng(1)
    for shape in SHAPES:
        a, b = (LAYOUTS[layout](values(rng, shape, dtype)) for layout in (layout_a, layout_b))
        for layout in (layout_a, 'contiguous', 'one row for all'):
            condition = LAYOUTS[layout](rng.choice(np.array([0, 1, -0.0, 3], dtype), shape))
            y, check = result(shape, dtype)
            launch('strided_where', arrays=(y, condition, a, b))
            assert y.tobytes() == np.where(condition != 0, a, b).tobytes()
            check()


@quiet
@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('shape', SHAPES, **ids)
@pytest.mark.parametrize('dtype', ALL_DTYPES, **ids)
def test_unary_on_every_layout(layout, shape, dtype):
    rng = np.random.default_rng(0)
    x = LAYOUTS[layout](values(rng, shape, dtype))
    for name, want in UNARY.items():
        if dtype == np.int32 and name not in ('copy', 'negate', 'abs'):
            continue
        for to in ('contiguous', 'transposed'):
            y, check = result(shape, dtype, to)
            launch('strided_unary', number(name), arrays=(y, x))
            same(y, want(x))
            check()


@quiet
@pytest.mark.parametrize('layout_a', LAYOUTS)
@pytest.mark.parametrize('layout_b', LAYOUTS)
@pytest.mark.parametrize('dtype', ALL_DTYPES, **ids)
def test_binary_on_every_layout(layout_a, layout_b, dtype):
    rng = np.random.default_rng(1)
    for shape in SHAPES:
        a, b = (LAYOUTS[layout](values(rng, shape, dtype)) for layout in (layout_a, layout_b))
        for name, want in BINARY.items():
            if dtype == np.int32 and name == 'divide':
                continue
            y, check = result(shape, dtype)
            launch('strided_binary', number(name), arrays=(y, a, b))
            if name in ('maximum', 'minimum'):          # which zero is larger is nobody's business
                y, a, b = y + dtype(0), a + dtype(0), b + dtype(0)
            same(y, want(a, b))
            check()


@quiet
@pytest.mark.parametrize('dtype', DTYPES, **ids)
def test_division_by_0_and_minus_1_and_its_remainder(dtype):
    """Of integers: a / 0 is 0, and the least number / -1 is itself, as in numpy."""
    least, largest = (-2**31, 2**31 - 1) if dtype == np.int32 else (-np.inf, np.inf)
    a, b = (part.astype(dtype) for part in np.meshgrid([0, 1, -1, 7, -7, least, largest], [0, -1, 1, 3, -3, least, largest]))
    for name in ('floor_divide', 'remainder'):
        y, check = result(a.shape, dtype)
        launch('strided_binary', number(name), arrays=(y, a, b))
        same(y, BINARY[name](a, b))
        check()


@pytest.mark.parametrize('dtype', ALL_DTYPES, **ids)
def test_and_or_xor_of_each_pair(dtype):
    numbers = [0, 1, -1, 6] if dtype == np.int32 else [0.0, -0.0, 2.5, np.inf, np.nan]
    a, b = (part.astype(dtype) for part in np.meshgrid(numbers, numbers))
    for name in ('and', 'or', 'xor'):
        y, check = result(a.shape, dtype)
        launch('strided_binary', number(name), arrays=(y, a, b))
        same(y, BINARY[name](a, b))
        check()


@pytest.mark.parametrize('dtype', ALL_DTYPES, **ids)
def test_axes_in_any_order_of_memory(dtype):
    """Adjacent axes may be one longer axis in all operands, in some, or in none."""
    rng, shape = np.random.default_rng(23), (2, 3, 4, 2)

    def in_order(order):
        """The shape in memory whose slowest axis is order[0]."""
        return np.empty([shape[axis] for axis in order], dtype).transpose(np.argsort(order))
    orders = [*itertools.permutations(range(4))]
    for order in orders:
        for other in (order, orders[0], orders[rng.integers(len(orders))]):
            x, z, y = in_order(order), in_order(other), in_order(order)
            x[...], z[...] = values(rng, shape, np.int32), values(rng, shape, np.int32)
            launch('strided_binary', number('subtract'), arrays=(y, x, z))
            same(y, x - z)
            launch('strided_unary', number('negate'), arrays=(y, z))
            same(y, -z)


@quiet
@pytest.mark.parametrize('dtype', DTYPES, **ids)
@pytest.mark.parametrize('reflected', (0, 1))
def test_scalar_on_either_side(dtype, reflected):
    rng = np.random.default_rng(2)
    x, value = across(values(rng, (37, 50), dtype)), dtype(3)
    for name, want in BINARY.items():
        if dtype == np.int32 and name == 'divide':
            continue
        y, check = result(x.shape, dtype)
        launch('strided_scalar', number(name), reflected, value, arrays=(y, x))
        same(y, want(value, x) if reflected else want(x, value))
        check()


def ulps(got, exact):
    """Error in units of the last place of the exact result."""
    with np.errstate(invalid='ignore', over='ignore'):
        return np.abs(got.astype('d') - exact) / np.spacing(np.abs(exact.astype('f')))


@quiet
def test_functions_over_all_of_float():
    rng = np.random.default_rng(3)
    x = np.concatenate([np.linspace(-110, 95, 20001), np.linspace(-1.1, 1.1, 20001), np.linspace(-5, 5, 20001),
                        rng.integers(0, 2**32, 200_000, dtype=np.uint32).view('f'),
                        [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 88.72, 88.73, 1.0, -1.0]]).astype('f')
    exact = x.astype('d')
    with np.errstate(all='ignore'):
        wants = {'sin': np.sin(exact), 'cos': np.cos(exact), 'exp': np.exp(exact), 'log': np.log(exact), 'tanh': np.tanh(exact),
                 'sigmoid': 1 / (1 + np.exp(-exact)), 'expm1': np.expm1(exact), 'log1p': np.log1p(exact),
                 'arctan': np.arctan(exact), 'arcsin': np.arcsin(exact), 'arccos': np.arccos(exact), 'tan': np.tan(exact),
                 'elu': np.where(exact > 0, exact, np.expm1(exact)), 'softplus': np.logaddexp(exact, 0),
                 'hardsigmoid': np.clip(exact + 3, 0, 6) / 6, 'hardswish': exact * (np.clip(exact + 3, 0, 6) / 6),
                 'erf': np.vectorize(math.erf)(exact)}
    for name, want in wants.items():
        y = np.empty_like(x)
        launch('strided_unary', number(name), arrays=(y, x))
        with np.errstate(over='ignore'):
            rounded = want.astype('f')
        special = ~np.isfinite(rounded) | (rounded == 0)
        same(y[special], rounded[special])              # NaN, infinities, and zeros with their signs
        if name.startswith('hard'):                     # x + 3 loses digits near -3
            assert (np.abs(y[~special] - want[~special]) <= 2**-22 + 2**-22 * np.abs(want[~special])).all(), name
            continue
        limit = 4 if ON_GPU or name in ('exp', 'log', 'tanh', 'sigmoid', 'softplus') else 2
        assert ulps(y[~special], want[~special]).max() <= limit, name


@quiet
def test_sin_and_cos_near_their_zeros_and_of_large_numbers():
    rng = np.random.default_rng(24)
    halves = np.concatenate([np.arange(1, 40_000), rng.integers(1, 2**24, 40_000), 2.0 ** np.arange(18, 60)]) * (np.pi / 2)
    ends = 33554430, 33554432, 33554436, 3.4028235e38
    x = np.concatenate([halves, 2.0 ** rng.uniform(-149, 128, 100_000), ends]).astype('f')
    x = np.concatenate([x, -x])
    y = np.empty_like(x)
    for name, want in (('sin', np.sin), ('cos', np.cos)):
        launch('strided_unary', number(name), arrays=(y, x))
        assert ulps(y, want(x.astype('d'))).max() <= (2 if ON_GPU else 0.65), name


@on_the_cpu
@quiet
def test_sin_and_cos_do_not_depend_on_a_large_neighbour():
    x = np.random.default_rng(25).standard_normal(3000).astype('f') * 100
    for name in ('sin', 'cos', 'tan'):
        small, large, strided = (np.empty_like(x) for _ in range(3))
        launch('strided_unary', number(name), arrays=(small, x))
        mixed = x.copy()
        mixed[::100] = large_number = np.float32(1e30)
        launch('strided_unary', number(name), arrays=(large, mixed))
        kept = mixed != large_number
        same(large[kept], small[kept])
        launch('strided_unary', number(name), arrays=(strided, np.repeat(x, 2)[::2]))
        same(strided, small)
        launch('strided_unary', number(name), arrays=(mixed, mixed))             # in place
        same(mixed, large)


@on_the_cpu
@quiet
def test_functions_of_float64():
    """The C library and numpy may round differently; exact ones are in UNARY."""
    rng = np.random.default_rng(3)
    x = np.concatenate([np.linspace(-745, 710, 5001), rng.standard_normal(5000), 10.0 ** rng.uniform(-300, 300, 5000),
                        [0.0, -0.0, np.inf, -np.inf, np.nan, 5e-324, 1.0]])
    for name, want in {'sin': np.sin, 'cos': np.cos, 'exp': np.exp, 'log': np.log, 'tanh': np.tanh, 'expm1': np.expm1,
                       'log1p': np.log1p, 'tan': np.tan, 'arctan': np.arctan, 'arcsin': np.arcsin, 'arccos': np.arccos,
                       'erf': np.vectorize(math.erf), 'elu': lambda x: np.where(x > 0, x, np.expm1(x)),
                       'softplus': lambda x: np.logaddexp(x, 0), 'hardsigmoid': lambda x: np.clip(x + 3, 0, 6) / 6,
                       'hardswish': lambda x: x * np.clip(x + 3, 0, 6) / 6,
                       'sigmoid': lambda x: np.exp(np.minimum(x, 0)) / (1 + np.exp(-np.abs(x)))}.items():
        y, wanted = np.empty_like(x), want(x)
        launch('strided_unary', number(name), arrays=(y, x))
        special = ~np.isfinite(wanted) | (wanted == 0)
        same(y[special], wanted[special])
        assert (np.abs(y - wanted)[~special] <= 4 * np.spacing(np.abs(wanted[~special]))).all(), name
    a, b, y = np.abs(x), rng.permutation(x), np.empty_like(x)
    launch('strided_binary', number('power'), arrays=(y, a, b))
    wanted = a ** b
    special = ~np.isfinite(wanted) | (wanted == 0)
    same(y[special], wanted[special])
    assert (np.abs(y - wanted)[~special] <= 4 * np.spacing(wanted[~special])).all()


@quiet
def test_powers_of_any_numbers():
    rng, n = np.random.default_rng(26), 40_000
    a = np.concatenate([2.0 ** rng.uniform(-149, 128, n), rng.uniform(0.5, 2, n), 1 + rng.standard_normal(n) * 1e-3,
                        -(2.0 ** rng.uniform(-20, 20, n)), rng.integers(-40, 40, n)]).astype('f')
    b = np.concatenate([rng.uniform(-1.2, 1.2, n), rng.uniform(-140, 128, n), rng.uniform(-9e4, 9e4, n),
                        rng.integers(-8, 9, n), rng.integers(-5, 20, n)]).astype('f')
    special = np.array([0, -0.0, 1, -1, 2, -2, 0.5, np.inf, -np.inf, np.nan, 3e38, 1e-45, -1e-45, 3, -3, 2.5, -2.5, 16777217,
                        1 / 3, 201, -201], 'f')
    pairs = [part.reshape(-1) for part in np.meshgrid(special, special)]
    for x, e in ((a, b), pairs, (a[::-1], b[::-1])):
        y, want = np.empty(x.shape, 'f'), x.astype('d') ** e.astype('d')
        launch('strided_binary', number('power'), arrays=(y, x, e))
        rounded = want.astype('f')
        exact = ~np.isfinite(rounded) | (rounded == 0)
        same(y[exact], rounded[exact])
        assert ulps(y[~exact], want[~exact]).max() <= 0.6


@on_the_cpu
@quiet
def test_a_power_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(27)
    x, e = rng.standard_normal((2, 2000)).astype('f') * 3
    y, mixed, column = (np.empty_like(x) for _ in range(3))
    launch('strided_binary', number('power'), arrays=(y, x, e))
    other = x.copy()
    other[::50] = np.inf
    launch('strided_binary', number('power'), arrays=(mixed, other, e))
    same(np.delete(mixed, np.s_[::50]), np.delete(y, np.s_[::50]))
    launch('strided_binary', number('power'), arrays=(column, np.repeat(x, 2)[::2], e[::-1].copy()[::-1]))
    same(column, y)
    for exponent in (4, -1.5):
        launch('strided_scalar', number('power'), 0, exponent, arrays=(y, x))
        launch('strided_binary', number('power'), arrays=(mixed, x, np.full_like(x, exponent)))
        same(mixed, y)
    launch('strided_scalar', number('power'), 0, 3, arrays=(mixed, x))
    same(mixed, x * x * x)
    launch('strided_binary', number('power'), arrays=(x, x, e))                 # in place
    launch('strided_binary', number('power'), arrays=(e, other, e))
    same(np.delete(x, np.s_[::50]), np.delete(e, np.s_[::50]))


@quiet
def test_power():
    rng = np.random.default_rng(4)
    a, b = (np.abs(rng.standard_normal((40, 9))).astype('f') + np.float32(0.1), rng.standard_normal((40, 9)).astype('f') * 9)
    y = np.empty_like(a)
    launch('strided_binary', number('power'), arrays=(y, a, across(b)))
    assert ulps(y, a.astype('d') ** b).max() <= 2
    x = values(rng, (40, 9), np.float32)
    for exponent in (2, 1, 0.5, -1, 3, 0, -2):
        launch('strided_scalar', number('power'), 0, exponent, arrays=(y, x))
        want = x ** np.float32(exponent)
        assert ((np.isnan(y) & np.isnan(want)) | (y == want) | (ulps(y, want.astype('d')) <= 2)).all(), exponent
    x, y = values(rng, (40, 9), np.int32), np.empty((40, 9), 'i')
    e = rng.integers(0, 70, (40, 9)).astype('i')
    launch('strided_binary', number('power'), arrays=(y, x, e))
    same(y, x ** e)
    with pytest.raises(ValueError, match='int32 to a negative power'):
        launch('strided_binary', number('power'), arrays=(y, x, e - 1))
    with pytest.raises(ValueError, match='int32 to a negative power'):
        launch('strided_scalar', number('power'), 0, -1, arrays=(y, x))


@quiet
def test_conversions_go_towards_zero():
    x = np.array([0.0, -0.0, 1.9, -1.9, 2.0**31, -2.0**31, 1e20, np.inf, -np.inf, np.nan, 16777217], 'f')
    y, back = np.empty(x.size, 'i'), np.empty(x.size, 'f')
    launch_kernel('strided_to_int32', y, x, *geometry(y, x))
    assert y.tolist() == [0, 0, 1, -1] + [-2**31] * 6 + [16777216]
    y[0] = 2**31 - 1
    launch_kernel('strided_from_int32', back, y, *geometry(back, y))
    same(back, y.astype('f'))
    wide, tall = np.arange(35 * 200, dtype='i').reshape(35, 200), np.empty((200, 35), 'f')
    launch_kernel('strided_from_int32', tall, wide, *geometry(tall, wide.T))
    same(tall, wide.T)


@quiet
@pytest.mark.parametrize('layout', LAYOUTS)
def test_conversions_between_int32_and_float_on_every_layout(layout):
    rng = np.random.default_rng(15)
    for shape in SHAPES:
        x = LAYOUTS[layout](values(rng, shape, np.int32))
        y, check = result(shape, np.float32)
        launch_kernel('strided_from_int32', y, x, *geometry(y, x))
        same(y, x.astype('f'))
        check()
        edges = np.array([0.0, -0.0, 1.9, -1.9, 2.0**31, -2.0**31, -2.0**32, np.inf, np.nan], 'f')
        x = LAYOUTS[layout](rng.choice(edges, shape))
        y, check = result(shape, np.int32)
        launch_kernel('strided_to_int32', y, x, *geometry(y, x))
        inside = (x >= -2.0**31) & (x < 2.0**31)
        same(y, np.where(inside, np.where(inside, x, 0).astype(np.int64), -2**31).astype(np.int32))
        check()


@on_the_cpu
@quiet
@pytest.mark.parametrize('layout', LAYOUTS)
def test_conversions_from_and_to_float64_on_every_layout(layout):
    rng = np.random.default_rng(13)
    edges = np.array([0.0, -0.0, 1.9, -1.9, 2147483647.5, 2147483648.0, -2147483648.5, -2147483649.0, 1e300, np.inf, -np.inf,
                      np.nan, 2.0**-149, 1e-46, 3.5e38, 1 + 2.0**-24, 1 + 2.0**-24 + 2.0**-50])
    whole = [0, 0, 1, -1, 2**31 - 1, -2**31, -2**31, -2**31, -2**31, -2**31, -2**31, -2**31, 0, 0, -2**31, 1, 1]
    for shape in (*SHAPES, (17, 3)):
        at = rng.integers(edges.size, size=shape)
        x, as_whole = LAYOUTS[layout](edges[at]), LAYOUTS[layout](np.array(whole, 'i')[at])
        y, check = result(shape, np.int32)
        launch_kernel('strided_double_to_int32', y, x, *geometry(y, x))
        same(y, as_whole)
        check()
        y, check = result(shape, np.float32)
        launch_kernel('strided_double_to_float', y, x, *geometry(y, x))
        same(y, x.astype('f'))
        check()
        for source, kernel in ((LAYOUTS[layout](values(rng, shape, np.float32)), 'float'),
                               (LAYOUTS[layout](values(rng, shape, np.int32)), 'int32')):
            y, check = result(shape, np.float64)
            launch_kernel(f'strided_double_from_{kernel}', y, source, *geometry(y, source))
            same(y, source.astype('d'))
            check()


@on_the_cpu
@pytest.mark.parametrize('shape', [(8191,), (8192,), (8193,), (3, 16385), (2, 3, 8200), (16400, 2)], ids=str)
def test_float64_in_pieces_of_a_row(shape):
    """A row is processed in pieces of 8192 numbers."""
    rng = np.random.default_rng(14)
    a, b = rng.standard_normal((2, *shape))
    for x, z in ((a, b), (a[..., ::-1], b), (a, b[..., :1])):
        z = np.broadcast_to(z, shape)
        y, check = result(shape, np.float64)
        launch('strided_binary', number('subtract'), arrays=(y, x, z))
        same(y, x - z)
        check()


@pytest.mark.parametrize('dtype', DTYPES, **ids)
@pytest.mark.parametrize('layout', ('contiguous', 'transposed'))
def test_fill(dtype, layout):
    for shape in SHAPES:
        y, check = result(shape, dtype, layout)
        launch_kernel('strided_fill' + ('_int32' if dtype == np.int32 else ''), y, *geometry(y), 9)
        assert (y == 9).all()
        check()


def test_in_place_over_the_input_itself():
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((2, 70, 150)).astype('f')
    for view in (a, a.T, a[::-1, ::2]):
        other = b.T[:view.shape[0], :view.shape[1]] if view.shape == b.T.shape else b[:view.shape[0], :view.shape[1]]
        want = view + other
        launch('strided_binary', number('add'), arrays=(view, view, other))
        same(view, want)


# ---- reductions ------------------------------------------------------------------------------------------------------

REDUCE_SHAPES = ((1,), (64,), (1000,), (5, 7), (3, 260), (260, 3), (300, 1500), (4, 5, 6, 7), (2, 1, 9, 1, 40))
REDUCTIONS = {'sum': np.add, 'max': np.maximum, 'min': np.minimum}


def reduce(name, x, axes, dtype):
    kept = [1 if d in axes else n for d, n in enumerate(x.shape)]
    y = np.full(kept, -77, dtype)
    # An empty array of numpy has strides of 0, which the kernel takes for reduced axes.
    strides = [0 if d in axes else y.itemsize * math.prod(kept[d + 1:]) for d in range(x.ndim)]
    every = np.lib.stride_tricks.as_strided(y, x.shape, strides)
    launch('strided_reduce', number(name), arrays=(every, x))
    return y


def all_axes(ndim):
    return [axes for n in range(ndim + 1) for axes in itertools.combinations(range(ndim), n)]


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('shape', REDUCE_SHAPES, **ids)
def test_reductions_of_every_layout_over_every_set_of_axes(layout, shape):
    rng = np.random.default_rng(6)
    for dtype in ALL_DTYPES:
        # whole numbers, of which float32 can hold every sum
        x = LAYOUTS[layout](rng.integers(-20, 21, shape).astype(dtype))
        for axes in all_axes(len(shape)):
            for name, want in REDUCTIONS.items():
                same(reduce(name, x, axes, dtype), want.reduce(x, axes, keepdims=True))


def test_sums_are_as_good_as_pairwise_ones():
    rng = np.random.default_rng(7)
    for shape, axes in (((3_000_000,), (0,)), ((100_003, 11), (0,)), ((11, 100_003), (1,)), ((3000, 400), (0,)),
                        ((200_000, 2), (0, 1)), ((64, 65536), (0,))):
        x = rng.random(shape, 'f') + np.float32(1)                      # all of one sign: where a naive sum is worst
        want = x.sum(axes, 'd', keepdims=True)
        ours, theirs = (np.abs(y / want - 1).max() for y in (reduce('sum', x, axes, np.float32), x.sum(axes, keepdims=True)))
        assert ours <= max(theirs, 1.2e-7), (shape, axes, ours, theirs)


def test_int32_sums_wrap_around():
    x = np.random.default_rng(8).integers(-2**31, 2**31, (700, 900)).astype('i')
    for axes in all_axes(2):
        same(reduce('sum', x, axes, np.int32), x.sum(axes, np.int32, keepdims=True))


@pytest.mark.parametrize('shape', [(5,), (300,), (70_000, 3), (3, 70_000), (40, 2000), (400_000,)], **ids)
def test_max_and_min_pass_nan_and_infinity_on(shape):
    rng = np.random.default_rng(9)
    for special in (np.nan, np.inf, -np.inf):
        for _ in range(5):
            x = rng.standard_normal(shape).astype('f')
            x[tuple(rng.integers(n) for n in shape)] = special
            for axes, dtype in itertools.product(all_axes(len(shape)), {np.float32, ALL_DTYPES[-1]} - {np.int32}):
                for name, want in REDUCTIONS.items():
                    if name != 'sum' or len(axes) == 0:
                        same(reduce(name, x.astype(dtype), axes, dtype), want.reduce(x.astype(dtype), axes, keepdims=True))
    x = np.full(shape, -np.inf, 'f')
    same(reduce('max', x, tuple(range(len(shape))), np.float32), np.full((1,) * len(shape), -np.inf))


@pytest.mark.parametrize('dtype', ALL_DTYPES, **ids)
def test_nothing_to_reduce_and_nothing_at_all(dtype):
    x = np.empty((0, 3), dtype)
    assert (reduce('sum', x, (0,), dtype) == 0).all()
    assert reduce('sum', np.empty((3, 0), dtype), (1,), dtype).tolist() == [[0], [0], [0]]
    with pytest.raises(ValueError, match='no elements'):
        reduce('max', x, (0,), dtype)
    assert reduce('sum', x, (1,), dtype).shape == (0, 1)
    y = np.empty((0, 3), dtype)
    launch('strided_binary', number('add'), arrays=(y, x, x))
    y, x = np.full((), 5, dtype), np.full((), 2, dtype)
    launch('strided_binary', number('add'), arrays=(y, x, x))
    assert y == 4
    launch('strided_reduce', number('sum'), arrays=(y, x))
    assert y == 2


# ---- threads, sizes, refusals -------------------------------------------------------------------------------------------

@of_threads
def test_the_same_bits_for_any_number_of_threads():
    rng = np.random.default_rng(10)
    x, column = rng.standard_normal((1300, 700)).astype('f'), rng.standard_normal((1300, 1)).astype('f')
    wide = rng.standard_normal((37, 20_001))
    before, results = backend.threads(), []
    try:
        for threads in (1, 2, 3, 8):
            backend.set_threads(threads)
            got = []
            everywhere = np.broadcast_to(column, x.shape)
            for a, b in ((x, x), (x.T, x.T), (x, everywhere), (x[::-1, ::-1], x), (x[:, ::3], x[:, 1::3])):
                n = min(a.shape[1], b.shape[1])
                y = np.empty((a.shape[0], n), 'f')
                launch('strided_binary', number('multiply'), arrays=(y, a[:, :n], b[:, :n]))
                launch('strided_unary', number('exp'), arrays=(y, y))
                got.append(y)
            y = np.empty_like(x)
            launch('strided_binary', number('add'), arrays=(y, x, across(x)))
            got.append(y)
            for view in (x, x.T, x.reshape(-1), x.reshape(-1, 7), x.reshape(10, 130, 700), x[:, ::2]):
                for axes in all_axes(view.ndim):
                    got += [reduce(name, view, axes, np.float32) for name in REDUCTIONS]
            y = np.empty_like(wide)
            launch('strided_unary', number('negate'), arrays=(y, wide))
            got.append(y)
            results.append(got)
    finally:
        backend.set_threads(before)
    same(results[0][-1], -wide)
    for got in results[1:]:
        for a, b in zip(got, results[0], strict=True):
            same(a, b)


@pytest.mark.parametrize('dtype', ALL_DTYPES, **ids)
def test_eight_axes_and_no_more(dtype):
    x = np.arange(2**8, dtype=dtype).reshape((2,) * 8)
    y = np.empty((2,) * 8, dtype)
    launch('strided_binary', number('add'), arrays=(y, x, x.T))
    same(y, x + x.T)
    with pytest.raises(ValueError, match='ndim=9, expected 0 to 8'):
        launch('strided_unary', number('copy'), arrays=(y[None], x[None]))


def test_impossible_calls_are_refused():
    x = np.zeros(3, 'f')
    with pytest.raises(ValueError, match=r'strided_fill: shape\[0\]=-1'):
        launch_kernel('strided_fill', x, np.array([-1]), np.array([1]), 1, 0.0)
    for kernel, count, op, last in (('unary', 2, 26, 25), ('binary', 3, 18, 17), ('reduce', 2, 3, 2), ('unary', 2, -1, 25)):
        with pytest.raises(ValueError, match=f'strided_{kernel}: op={op}, expected 0 to {last}'):
            launch(f'strided_{kernel}', op, arrays=(x,) * count)
    whole = np.zeros(3, 'i')
    with pytest.raises(ValueError, match='int32 has no division'):
        launch('strided_binary', number('divide'), arrays=(whole,) * 3)
    with pytest.raises(ValueError, match='expected copy, negate or abs'):
        launch('strided_unary', number('exp'), arrays=(whole,) * 2)


# ---- products of batches -------------------------------------------------------------------------------------------------

def batched(c, a, b, *accumulate):
    """c (+)= a @ b, whose leading axes are one batch, strides of 0 included.  accumulate: of float32"""
    batch = c.shape[:-2]
    a, b = np.broadcast_to(a, batch + a.shape[-2:]), np.broadcast_to(b, batch + b.shape[-2:])
    strides = [stride // c.itemsize for x in (c, a, b) for stride in x.strides[:-2]]
    launch_kernel('matmul_double' if c.dtype == np.float64 else 'gemm_batched', c, a, b,
                  np.array([*batch, 0]), np.array([*strides, 0]), len(batch),
                  *c.shape[-2:], a.shape[-1], max(c.strides[-2] // c.itemsize, c.shape[-1]),
                  *(stride // c.itemsize for x in (a, b) for stride in x.strides[-2:]), *accumulate)


BATCHES = [((), ()), ((3,), (3,)), ((3,), ()), ((), (3,)), ((4, 1), (1, 5)), ((2, 3), (2, 3)), ((2, 3), (3,)), ((40,), (40,)),
           ((40, 3), ()), ((0,), ())]


@pytest.mark.parametrize('batch_a,batch_b', BATCHES, **ids)
@pytest.mark.parametrize('M,K,N', [(1, 1, 1), (5, 7, 3), (1, 40, 9), (17, 33, 20), (40, 70, 50), (4, 0, 3), (0, 3, 4)])
def test_batched_products_equal_single_ones_bit_for_bit(batch_a, batch_b, M, K, N):
    rng = np.random.default_rng(11)
    for across_a, across_b in itertools.product((False, True), repeat=2):
        a, b = rng.standard_normal((*batch_a, M, K)).astype('f'), rng.standard_normal((*batch_b, K, N)).astype('f')
        a = np.ascontiguousarray(a.swapaxes(-1, -2)).swapaxes(-1, -2) if across_a else a
        b = np.ascontiguousarray(b.swapaxes(-1, -2)).swapaxes(-1, -2) if across_b else b
        batch = np.broadcast_shapes(batch_a, batch_b)
        c = rng.standard_normal((*batch, M, N)).astype('f')
        want = c.copy()
        every_a, every_b = np.broadcast_to(a, (*batch, M, K)), np.broadcast_to(b, (*batch, K, N))
        for accumulate in (1, 0):
            batched(c, a, b, accumulate)
            for i in np.ndindex(batch):
                gemm(want[i], every_a[i], every_b[i], accumulate=bool(accumulate))
            same(c, want)


def test_products_of_a_row_and_a_column_with_gaps_have_the_bits_of_one():
    rng = np.random.default_rng(17)
    a, b = rng.standard_normal((9, 1, 21)).astype('f'), rng.standard_normal((9, 21, 3)).astype('f')[..., 1:2]
    c, want = np.empty((9, 1, 1), 'f'), np.empty((9, 1, 1), 'f')
    batched(c, a, b, 0)
    for one, row, column in zip(want, a, b, strict=True):
        gemm(one, row, column)
    same(c, want)


def test_batched_products_leave_what_is_between_their_results():
    """One b for all, and rows of a without gaps, but results with gaps: no taller matrix."""
    rng = np.random.default_rng(16)
    a, b = rng.standard_normal((3, 5, 7)).astype('f'), rng.standard_normal((7, 4)).astype('f')
    frame = rng.standard_normal((3, 8, 4)).astype('f')
    before, c = frame.copy(), frame[:, :5]
    batched(c, a, b, 0)
    want = np.empty((3, 5, 4), 'f')
    for one, part in zip(want, a, strict=True):
        gemm(one, part, b)
    same(c.copy(), want)
    same(frame[:, 5:].copy(), before[:, 5:])


@on_the_cpu
@pytest.mark.parametrize('batch_a,batch_b', BATCHES, **ids)
@pytest.mark.parametrize('M,K,N', [(1, 1, 1), (5, 7, 3), (1, 40, 9), (17, 33, 20), (4, 0, 3), (0, 3, 4), (4, 3, 0)])
def test_products_of_float64_on_every_layout(batch_a, batch_b, M, K, N):
    """Whole numbers, so that every sum is exact; rows of the result in a wider matrix."""
    rng = np.random.default_rng(15)
    batch = np.broadcast_shapes(batch_a, batch_b)
    for across_a, across_b in itertools.product((False, True), repeat=2):
        a, b = rng.integers(-9, 10, (*batch_a, M, K)).astype('d'), rng.integers(-9, 10, (*batch_b, K, N)).astype('d')
        a = np.ascontiguousarray(a.swapaxes(-1, -2)).swapaxes(-1, -2) if across_a else a
        b = np.ascontiguousarray(b.swapaxes(-1, -2)).swapaxes(-1, -2) if across_b else b
        c, check = result((*batch, M, N), np.float64)
        batched(c, a, b)
        same(c, a @ b)
        check()


@of_threads
def test_products_of_float64_give_the_same_bits_for_any_number_of_threads():
    rng = np.random.default_rng(16)
    a, b = rng.standard_normal((7, 50, 200)), rng.standard_normal((7, 200, 130))
    before, results = backend.threads(), []
    try:
        for threads in (1, 2, 3):
            backend.set_threads(threads)
            c = np.empty((7, 50, 130))
            batched(c, a, b)
            results.append(c)
    finally:
        backend.set_threads(before)
    assert (np.abs(results[0] - a @ b) <= 1e-12).all()
    for c in results[1:]:
        same(c, results[0])


@of_threads
def test_batched_products_give_the_same_bits_for_any_number_of_threads():
    rng = np.random.default_rng(12)
    before = backend.threads()
    for shape_a, shape_b in (((300, 40, 50), (300, 50, 30)), ((2, 300, 200), (2, 200, 300)), ((60, 100, 64), (64, 70)),
                             ((20_000, 20, 5), (20_000, 5, 5))):
        a, b = rng.standard_normal(shape_a).astype('f'), rng.standard_normal(shape_b).astype('f')
        results = []
        try:
            for threads in (1, 2, 5):
                backend.set_threads(threads)
                c = np.empty((*shape_a[:-1], shape_b[-1]), 'f')
                batched(c, a, b, 0)
                results.append(c)
        finally:
            backend.set_threads(before)
        assert np.abs(results[0] - a @ b).max() < 1e-3
        for c in results[1:]:
            same(c, results[0])


# ---- rows of float64: the largest, the order, sums at indices ---------------------------------------------------------------

def rows_with_equals(rng, R, C):
    """Numbers of which many are equal, infinite or NaN."""
    x = rng.integers(-3, 4, (R, C)).astype('d')
    x[rng.random((R, C)) < 0.1] = np.nan
    x[rng.random((R, C)) < 0.1] = np.inf
    x[rng.random((R, C)) < 0.1] = -np.inf
    return x


@on_the_cpu
@pytest.mark.parametrize('R,C', [(0, 3), (1, 1), (40, 2), (40, 3), (40, 7), (9, 300)])
def test_argmax_of_float64_takes_the_first_of_equals_and_nan_as_largest(R, C):
    rng = np.random.default_rng(17)
    for x in (rows_with_equals(rng, R, C), rng.standard_normal((R, C)), np.sort(rng.standard_normal((R, C)))):
        y = np.full(R, -1, np.int32)
        launch_kernel('argmax_double', y, x, R, C)
        assert (y == x.argmax(1)).all()


@on_the_cpu
@pytest.mark.parametrize('R,C', [(0, 3), (3, 0), (1, 1), (40, 2), (40, 3), (40, 4), (40, 5), (30, 8), (30, 9), (5, 333),
                                 (1, 5000)])
def test_argsort_of_float64_is_stable_with_nan_last(R, C):
    rng = np.random.default_rng(18)
    for x in (rows_with_equals(rng, R, C), rng.standard_normal((R, C)), -np.sort(-rng.standard_normal((R, C)))):
        frame = np.full((R + 2, C), -77, np.int32)
        launch_kernel('argsort_double', frame[1:-1], x, R, C)
        assert (frame[1:-1] == x.argsort(1, kind='stable')).all() and (frame[[0, -1]] == -77).all()


@of_threads
def test_argsort_gives_the_same_order_for_any_number_of_threads():
    x = rows_with_equals(np.random.default_rng(19), 1001, 70)
    before = backend.threads()
    try:
        for threads in (1, 2, 3, 5):
            backend.set_threads(threads)
            y = np.empty(x.shape, np.int32)
            launch_kernel('argsort_double', y, x, *x.shape)
            assert (y == x.argsort(1, kind='stable')).all()
    finally:
        backend.set_threads(before)


@on_the_cpu
def test_nothing_is_sorted_in_a_thread_without_scratch_memory():
    results = []

    def sort():
        y = np.empty((3, 0), np.int32)
        launch_kernel('argsort_double', y, np.empty((3, 0)), 3, 0)
        results.append(y.shape)
    thread = threading.Thread(target=sort)
    thread.start()
    thread.join()
    assert results == [(3, 0)]


@on_the_cpu
@pytest.mark.parametrize('R,V,E', [(0, 3, 2), (1, 1, 1), (7, 3, 5), (50, 9, 1), (4, 20, 33), (5, 4, 0)])
def test_rows_of_float64_are_added_at_their_indices(R, V, E):
    rng = np.random.default_rng(20)
    ids = rng.integers(V, size=R).astype('i')
    x, y = rng.integers(-9, 10, (R, E)).astype('d'), rng.integers(-9, 10, (V, E)).astype('d')
    want = y.copy()
    np.add.at(want, ids, x)
    launch_kernel('add_rows_double', y, x, ids, R, V, E)
    same(y, want)


# ---- sums and products of the first elements ---------------------------------------------------------------------------------

@on_the_cpu             # a GPU has no kernel for it
@pytest.mark.parametrize('dtype', ALL_DTYPES, **ids)
@pytest.mark.parametrize('outer,n,inner', [(1, 1, 1), (0, 3, 2), (2, 0, 3), (2, 3, 0), (3, 7, 1), (2, 5, 63), (2, 5, 64),
                                           (3, 4, 65), (2, 3, 200)])
def test_cumulated_sums_and_products(dtype, outer, n, inner):
    """Whole numbers: sums and products are exact in float32, and wrap around in int32."""
    rng = np.random.default_rng(21)
    x = rng.integers(-2**31, 2**31, (outer, n, inner)).astype(dtype) if dtype == np.int32 else rng.integers(
        1, 4, (outer, n, inner)).astype(dtype)
    for op, want in (('add', np.cumsum), ('multiply', np.cumprod)):
        every = want(x, 1, dtype=dtype)
        empty = np.full((outer, inner), op == 'multiply', dtype)
        for last, wanted in ((0, every), (1, every[:, -1] if n else empty)):
            frame = np.full((wanted.shape[0] + 2, *wanted.shape[1:]), -77, dtype)
            launch_kernel('cumulate' + SUFFIX[np.dtype(dtype).str], frame[1:-1], x, outer, n, inner, number(op), last)
            same(frame[1:-1], wanted)
            assert (frame[[0, -1]] == -77).all()


@of_threads
def test_cumulated_sums_are_the_same_for_any_number_of_threads():
    x = np.random.default_rng(22).standard_normal((7, 90, 500)).astype('f')
    before = backend.threads()
    try:
        for threads in (1, 2, 3):
            backend.set_threads(threads)
            y = np.empty_like(x)
            launch_kernel('cumulate', y, x, *x.shape, number('add'), 0)
            same(y, x.astype('d').cumsum(1).astype('f'))
    finally:
        backend.set_threads(before)
