"""bfloat16 as the type of activations and their gradients, on the GPU or its emulation.

The rule of every comparison: the reference is the float32 op of the CPU on the same bfloat16 inputs.  A result is rounded once,
when it is stored, so it is off by at most HALF of its own size.  An intermediate result in bfloat16 adds HALF of the size of
the terms that it is a factor of.  Sums in float32 in another order add SUMS of the largest element.  Results in float32
(gradients of parameters, statistics, the loss) have no rounding of their own.
"""
import contextlib
import importlib

import numpy as np
import pytest
from arrays import close, normal, same
from rows import below

from pyops import backend
from pyops.backend import BF16, get, launch, put, to_bf16
from pyops.backend.arrays import from_bf16
from pyops.ops import (
    GELU,
    GRU,
    Attention,
    Dropout,
    Embedding,
    EmbeddingGRU,
    EmbeddingPositions,
    FeedForward,
    GELUTanh,
    LayerNorm,
    Linear,
    LinearCrossEntropy,
    Positions,
    Residual,
    ResidualNorm,
    SiLU,
)
from pyops.ops.packed import Packed
from pyops.ops.relu import ReLU
from pyops.params import Parameter

output_layer = importlib.import_module('pyops.ops.linear_cross_entropy')
HALF, SUMS = 2.0**-8, 1e-5          # half a unit in the last of 8 binary digits, relative
HALF_TF32 = 2.0**-11                # of 11 digits


@pytest.fixture
def on_gpu(device):
    with backend.on(device):
        yield device
    device.storage = device.precision = 'fp32'


def rounded(x):
    """Return float32 numbers rounded to bfloat16."""
    return from_bf16(to_bf16(x))


def numbers(rng, *shape):
    """Return random float32 numbers that bfloat16 represents exactly."""
    return rounded(normal(rng, *shape))


def within(got, exact, name, terms=0.0):
    """Compare a bfloat16 result with the unrounded one.  terms: the sizes of the terms with a rounded factor."""
    assert got.dtype == BF16, f'{name}: is {got.dtype}'
    error = np.abs(get(got) - exact)
    limit = HALF * (np.abs(exact) + terms) + SUMS * np.abs(exact).max(initial=0)
    assert (error <= limit).all(), f'{name}: error {error.max():.3g} at a limit of {limit.flat[(error - limit).argmax()]:.3g}'


def of_host(value):
    """Return a Parameter in host memory."""
    return Parameter('p', value.copy(), np.zeros_like(value))


def of_device(value, with_copy=True):
    """Return the same Parameter on the GPU, with a bfloat16 copy or without."""
    return Parameter('p', put(value.copy()), put(np.zeros_like(value)), rounded=put(to_bf16(value)) if with_copy else None)


def half(x):
    return put(to_bf16(x)) if x.dtype == np.float32 else put(x)


def forward_and_backward(make, values, inputs, dy, copies=True):
    """Run an op in float32 on the CPU and in bfloat16 on the GPU.  make(*parameters) -> op.  Return two lists of results: y,
    input gradients, gradients of the parameters."""
    results = []
    for place, of in ((lambda x: x, of_host), (half, lambda value: of_device(value, copies))):
        with backend.on(backend.HOST if of is of_host else backend.current_device()):
            parameters = [of(value) for value in values]
            op = make(*parameters)
            y, ctx = op.forward(*map(place, inputs))
            gradients = op.backward(place(dy(y.shape)), ctx)
        results.append([y, *(gradients if isinstance(gradients, tuple) else [gradients]), *(p.grad for p in parameters)])
    return results


def compare(results, names, terms=()):
    for name, exact, got, size in zip(names, *results, [*terms, *[0.0] * len(names)], strict=False):
        if name.startswith('parameter'):
            close(get(got), exact, name=name)
        else:
            within(got, exact, name, size)


# ---- conversion ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('n', [1, 7, 8, 4099])
def test_a_conversion_rounds_to_nearest_ties_to_even_and_back_is_exact(n, on_gpu):
    rng = np.random.default_rng(n)
    x = normal(rng, n) * 2.0 ** rng.integers(-130, 127, n).astype(np.float32)
    x[:7] = np.array([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), np.inf, np.nan, 3.4e38, 2.0**-133], np.float32)[:n]
    y, z = backend.empty(n, BF16), backend.empty(n)
    backend.convert(y, put(x))
    backend.convert(z, y)
    expected = rounded(x)
    if n >= 6:
        assert expected[:3].tolist() == [1, 1 + 2**-6, -1] and np.isinf(expected[5])
    assert np.array_equal(get(y), expected, equal_nan=True)
    assert np.array_equal(get(z), expected, equal_nan=True)


def test_a_kernel_refuses_activations_of_two_types(on_gpu):
    x, y = put(np.ones(8, np.float32)), backend.empty(8, BF16)
    with pytest.raises(ValueError, match='relu_forward: float32 and bfloat16 activations in one call, expected one type'):
        launch('relu_forward', y, x, 8)


def test_an_operation_of_ndarrays_refuses_bfloat16(on_gpu):
    x = half(np.ones((2, 3), np.float32))
    with pytest.raises(TypeError, match='NDArray: operations take float32 and int32, got bfloat16; copy the array with '
                                        'pyops.backend.as_float'):
        x + x
    same(get(backend.as_float(x, 'x') * 2), 2)


def test_a_kernel_without_bfloat16_names_the_argument(on_gpu):
    x = backend.empty((2, 3), BF16)
    with pytest.raises(TypeError, match='argmax: x: expected float32, got bfloat16'):
        launch('argmax', backend.empty(2, np.int32), x, 2, 3)
    with pytest.raises(TypeError, match='expected dtype float32, got bfloat16'):
        backend.check('x', x, (2, 3))


# ---- ops without products --------------------------------------------------------------------------------------------

@pytest.mark.parametrize('C', [1, 7, 12, 40, 264, 1032, 4200, 20000])
def test_layer_norm_and_its_residual_form_round_their_results_once(C, on_gpu):
    rng = np.random.default_rng(C)
    values, x, branch = [numbers(rng, C), numbers(rng, C)], numbers(rng, 5, C), numbers(rng, 5, C)
    if C == 1:
        x = x * 0
    gradient = numbers(rng, 5, C)
    compare(forward_and_backward(lambda w, b: LayerNorm(w, b), values, [x], lambda shape: gradient),
            ['y', 'dx', 'parameter weight', 'parameter bias'])
    step = np.array([3])
    # sum is stored: its rounding is an error of xhat, relative to the standard deviation of a row, about 1.4
    results = forward_and_backward(lambda w, b: ResidualNorm(w, b, 0.25, 7), values, [x, branch, step], lambda shape: gradient)
    (y, dx, dbranch), got = results[0][:3], results[1]
    if C > 1:
        weight = np.abs(values[0])
        within(got[0], y, 'y', 4 * weight * (1 + np.abs(x) + np.abs(branch) * 4 / 3))
        near_scale = np.abs(gradient * values[0]).max() * 6
        within(got[1], dx, 'dx', near_scale)
        kept = get(got[2]) != 0
        within(got[2], np.where(kept, get(got[1]) / np.float32(0.75), 0), 'dbranch')
        assert (dbranch[~kept] == 0).all()


@pytest.mark.parametrize('into', [False, True])
def test_layer_norm_backward_adds_to_an_existing_gradient(into, on_gpu):
    rng = np.random.default_rng(1)
    C, x, dy, before = 24, numbers(rng, 6, 24), numbers(rng, 6, 24), numbers(rng, 6, 24)
    results = []
    for place, of in ((np.copy, of_host), (half, of_device)):
        with backend.on(backend.HOST if of is of_host else on_gpu):
            op = LayerNorm(of(numbers(np.random.default_rng(2), C)), of(np.zeros(C, np.float32)))
            _, ctx = op.forward(place(x))
            results.append(op.backward(place(dy), ctx, place(before) if into else None))
    within(results[1], results[0], 'dx')


@pytest.mark.parametrize('shape', [(1,), (7,), (4, 9), (3, 4, 16), (130, 33)])
def test_elementwise_ops_round_their_results_once(shape, on_gpu):
    rng = np.random.default_rng(1)
    x, branch, dy, step = numbers(rng, *shape), numbers(rng, *shape), numbers(rng, *shape), np.array([5])
    compare(forward_and_backward(lambda: Dropout(0.3, 5), [], [x, step], lambda _: dy), ['y', 'dx'])
    compare(forward_and_backward(lambda: Residual(0.3, 5), [], [x, branch, step], lambda _: dy), ['y', 'dx', 'dbranch'])
    compare(forward_and_backward(Residual, [], [x, branch], lambda _: dy), ['y', 'dx', 'dbranch'])
    for activation in (ReLU, SiLU, GELU, GELUTanh):
        compare(forward_and_backward(activation, [], [x], lambda _: dy), ['y', 'dx'])
    if len(shape) == 3:
        compare(forward_and_backward(lambda: Positions(shape[2], 9, 3.0), [], [x], lambda _: dy), ['y', 'dx'])


@pytest.mark.parametrize('n', [1, 8, 1003])
def test_fill_axpy_scale_and_column_sums_take_bfloat16(n, on_gpu):
    rng = np.random.default_rng(n)
    x, y, alpha = numbers(rng, n), numbers(rng, n), np.array([1.7], np.float32)
    a, b, c = half(y), backend.empty(n, BF16), backend.empty(n, BF16)
    launch('axpy', a, half(x), put(alpha), n)
    within(a, y + alpha * x, 'axpy')
    launch('scale', b, half(x), put(alpha), n)
    within(b, alpha * x, 'scale')
    launch('fill', c, n, 0.5)
    same(get(c), 0.5)
    for rows, columns in ((n, 1), (n, 3), (5, n)):
        matrix, sums = numbers(rng, rows, columns), put(np.ones(columns, np.float32))
        launch('column_sums', sums, half(matrix), rows, columns)
        close(get(sums), 1 + matrix.astype(np.float64).sum(0), 1e-5, 'column_sums')


@pytest.mark.parametrize('R,O,I', [(1, 1, 1), (33, 9, 40), (300, 64, 33), (1152, 64, 72), (260, 300, 264)])
def test_linear_backward_takes_bfloat16(R, O, I, on_gpu):
    rng = np.random.default_rng(R)
    dy, x, weight, before = numbers(rng, R, O), np.maximum(numbers(rng, R, I), 0), numbers(rng, O, I), numbers(rng, R, I)
    wide = dy.astype(np.float64)
    for relu, accumulate in ((1, 0), (0, 1)):
        dweight, dbias, dx = put(np.ones((O, I), np.float32)), put(np.ones(O, np.float32)), half(before)
        launch('linear_backward', dx, dweight, dbias, half(dy), half(x), half(weight), R, O, I, relu, accumulate)
        close(get(dweight), 1 + wide.T @ x, 1e-5, 'dweight')
        close(get(dbias), 1 + wide.sum(0), 1e-5, 'dbias')
        within(dx, np.where(x > 0, wide @ weight, 0) if relu else before + wide @ weight, 'dx')
    with pytest.raises(ValueError, match='linear_backward: dx and x have different types, expected one type'):
        launch('linear_backward', dx, dweight, dbias, half(dy), put(x), half(weight), R, O, I, 0, 0)


@pytest.mark.parametrize('sizes', [((33, 9, 40), (70, 64, 33)), ((260, 256, 256), (270, 512, 256))])
def test_a_linear_pair_takes_bfloat16(sizes, on_gpu):
    rng = np.random.default_rng(1)
    x, weight, dy = ([numbers(rng, *shape) for shape in shapes] for shapes in (
        [(R, I) for R, O, I in sizes], [(O, I) for R, O, I in sizes], [(R, O) for R, O, I in sizes]))
    bias, order = numbers(rng, sizes[0][1]), [size for both in zip(*sizes, strict=True) for size in both]
    y, dx = [half(g) for g in dy], [half(value) for value in x]
    dweight, dbias = [put(np.ones_like(w)) for w in weight], put(np.ones_like(bias))
    operands = [half(array) for array in (*dy, *x, *weight)]
    launch('linear_pair', *y, *operands[2:], put(bias), None, *order)
    launch('linear_pair_backward', *dx, *dweight, dbias, None, *operands, *order, 0, 1)
    close(get(dbias), 1 + dy[0].astype(np.float64).sum(0), 1e-5, 'dbias')
    for i, (add_y, add_dx) in enumerate(((bias, 0), (0, x[1]))):
        within(y[i], x[i].astype(np.float64) @ weight[i].T + add_y, f'y{i + 1}')
        within(dx[i], dy[i].astype(np.float64) @ weight[i] + add_dx, f'dx{i + 1}')
        close(get(dweight[i]), 1 + dy[i].astype(np.float64).T @ x[i], 1e-5, f'dweight{i + 1}')
    with pytest.raises(ValueError, match='linear_pair_backward: dx and x have different types, expected one type'):
        launch('linear_pair_backward', *dx, *dweight, dbias, None, *operands[:2], put(x[0]), *operands[3:], *order, 0, 1)


@pytest.mark.parametrize('E', [3, 8, 100])
def test_embedding_positions_rounds_its_result_once(E, on_gpu):
    rng, ids, at, step = np.random.default_rng(E), np.array([1, 0, 3, 1], np.int32), np.arange(4, dtype=np.int32), np.array([5])
    weight, dy, results = normal(rng, 5, E), numbers(rng, 4, E), []
    on_gpu.storage = 'bf16'
    for device, of, place in ((backend.HOST, of_host, np.copy), (on_gpu, of_device, half)):
        with backend.on(device):
            table = of(weight)
            op = EmbeddingPositions(table, Positions(E, 9, 3.0), 0.3, 5)
            y, ctx = op.forward(put(ids), put(at), put(step))
            op.backward(place(dy), ctx)
        results.append((y, get(table.grad)))
    (exact, exact_grad), (y, grad) = results
    within(y, exact, 'y')
    close(grad, exact_grad, name='d weight')


@pytest.mark.parametrize('C', [3, 16, 36])
def test_a_context_is_copied_and_its_gradient_rounded_once(C, on_gpu):
    T, B, H, rng = 5, 3, 2 * C, np.random.default_rng(C)
    x, context, dy = numbers(rng, T, B, C), numbers(rng, B, H), numbers(rng, T, B, C + H)
    y, dx, dcontext = backend.empty((T, B, C + H), BF16), backend.empty((T, B, C), BF16), backend.empty((B, H), BF16)
    launch('concat_context_forward', y, half(x), half(context), T, B, C, H)
    same(get(y), np.concatenate([x, np.broadcast_to(context, (T, B, H))], 2))
    launch('concat_context_backward', dx, dcontext, half(dy), T, B, C, H)
    same(get(dx), dy[..., :C])
    within(dcontext, dy[..., C:].sum(0), 'dcontext')


@pytest.mark.parametrize('E', [3, 8, 100])
def test_an_embedding_rounds_rows_and_adds_gradients_in_float32(E, on_gpu):
    rng = np.random.default_rng(E)
    table, ids, dy = normal(rng, 11, E), rng.integers(0, 11, (6, 5)).astype(np.int32), numbers(rng, 6, 5, E)
    on_gpu.storage = 'bf16'
    weight = of_device(table)
    op = Embedding(weight)
    y, ctx = op.forward(put(ids))
    same(get(y), rounded(table)[ids])
    op.backward(half(dy), ctx)
    expected = np.zeros_like(table)
    np.add.at(expected, ids, dy)
    close(get(weight.grad), expected)
    on_gpu.storage = 'fp32'
    assert op.forward(put(ids))[0].dtype == np.float32


# ---- products --------------------------------------------------------------------------------------------------------

def whole(rng, *shape):
    """Return small whole numbers: their products and sums are exact in float32 and the factors in bfloat16."""
    return rng.integers(-3, 4, shape).astype(np.float32)


SHAPES = [(1, 1, 1), (5, 7, 3), (33, 40, 72), (64, 64, 64), (130, 72, 96), (40, 300, 1000), (136, 264, 200), (256, 256, 320),
          (16, 128, 4096)]


MIXED = ['fhh', 'hfh', 'hhf', 'ffh', 'fhf', 'hff']


@pytest.mark.parametrize(('shape', 'types'), [*[(shape, types) for shape in SHAPES for types in ('hhh', 'fhh')],
                                              *[(shape, types) for shape in SHAPES[:5] for types in MIXED[1:]]])
def test_a_product_is_exact_before_its_one_rounding(shape, types, on_gpu):
    """Letters of types: c, a, b as float32 or half.  Whole numbers, so nothing but the store to c rounds."""
    (M, N, K), rng = shape, np.random.default_rng(sum(shape))
    a, b, bias, before = whole(rng, M, K), whole(rng, K, N), whole(rng, N), whole(rng, M, N)
    place = {'h': half, 'f': put}
    for a_turned, b_turned in ((False, False), (False, True), (True, False), (True, True)):
        x = place[types[1]](a.T.copy()).T if a_turned else place[types[1]](a)
        w = place[types[2]](b.T.copy()).T if b_turned else place[types[2]](b)
        for accumulate, relu in ((False, False), (True, True)):
            c = place[types[0]](before)
            backend.gemm(c, x, w, put(bias), accumulate, relu)
            exact = a @ b + bias + (before if accumulate else 0)
            exact = np.maximum(exact, 0) if relu else exact
            same(get(c), rounded(exact) if types[0] == 'h' else exact, f'{a_turned} {b_turned} {accumulate}')


def test_a_product_takes_blocks_of_larger_matrices_at_any_alignment(on_gpu):
    rng = np.random.default_rng(3)
    a, b = whole(rng, 70, 90), whole(rng, 90, 110)
    for first in (0, 1, 3, 8):
        x, w, c = half(a)[first:, first:80], half(b)[first:80, first:], backend.zeros((70 - first, 200), BF16)
        backend.gemm(c[:, :110 - first], x, w)
        same(get(c)[:, :110 - first], rounded(a[first:, first:80] @ b[first:80, first:]))
        assert not get(c)[:, 110 - first:].any()


def test_a_product_without_summands_is_its_bias(on_gpu):
    c, bias = backend.empty((3, 5), BF16), whole(np.random.default_rng(1), 5)
    backend.gemm(c, backend.empty((3, 0), BF16), backend.empty((0, 5), BF16), put(bias))
    same(get(c), np.broadcast_to(bias, (3, 5)))


@pytest.mark.parametrize('copies', [True, False])
@pytest.mark.parametrize(('rows', 'I', 'O'), [(3, 5, 7), (40, 64, 48), (96, 72, 200)])
def test_linear_multiplies_bfloat16_and_stores_float32_gradients(rows, I, O, copies, on_gpu):
    rng = np.random.default_rng(rows)
    gradient = numbers(rng, rows, O)
    results = forward_and_backward(Linear, [numbers(rng, O, I), numbers(rng, O)], [numbers(rng, rows, I)], lambda _: gradient,
                                   copies)
    compare(results, ['y', 'dx', 'parameter weight', 'parameter bias'])


@pytest.mark.parametrize(('rows', 'D', 'F'), [(3, 5, 7), (40, 64, 96)])
def test_feed_forward_rounds_its_inner_rows_and_results(rows, D, F, on_gpu):
    rng = np.random.default_rng(rows)
    w1, b1, w2, b2 = values = [numbers(rng, F, D), numbers(rng, F), numbers(rng, D, F), numbers(rng, D)]
    x, dy = numbers(rng, rows, D), numbers(rng, rows, D)
    exact, got = forward_and_backward(FeedForward, values, [x], lambda _: dy)
    h = np.maximum(x @ w1.T + b1, 0)
    dh = np.abs(dy @ w2) * (h > 0)
    within(got[0], exact[0], 'y', np.abs(h) @ np.abs(w2.T))
    within(got[1], exact[1], 'dx', dh @ np.abs(w1))
    for name, theirs, ours, terms in zip(('dw1', 'db1', 'dw2', 'db2'), exact[2:], got[2:],
                                         (dh.T @ np.abs(x), dh.sum(0), np.abs(dy.T) @ h, 0), strict=True):
        error = np.abs(get(ours) - theirs)
        assert (error <= HALF * terms + SUMS * np.abs(theirs).max()).all(), name


@pytest.mark.parametrize('activation', ['silu', 'gelu'])
@pytest.mark.parametrize(('rows', 'D', 'F'), [(3, 5, 7), (40, 64, 96), (260, 136, 264)])
def test_a_smooth_feed_forward_layer_rounds_its_inner_rows_and_results(rows, D, F, activation, on_gpu):
    rng = np.random.default_rng(rows)
    values = [numbers(rng, F, D), numbers(rng, F), numbers(rng, D, F), numbers(rng, D)]
    values[0], values[2] = rounded(values[0] / np.float32(8)), rounded(values[2] / np.float32(8))
    x, dy = numbers(rng, rows, D), numbers(rng, rows, D)
    exact, got = forward_and_backward(lambda *parameters: FeedForward(*parameters, activation=activation), values, [x],
                                      lambda _: dy)
    w1, b1, w2, _ = values
    a = x @ w1.T + b1
    slope, dh = 1.2, np.abs(dy @ w2)                    # the largest derivative of both is 1.13
    change = HALF * np.abs(a) * slope                   # of h by the rounding of a
    h = np.abs(a)
    within(got[0], exact[0], 'y', (h + change / HALF) @ np.abs(w2.T))
    da = slope * dh
    bent = 0.8 * dh * np.abs(a)                         # the second derivative is at most 0.8
    within(got[1], exact[1], 'dx', (2 * da + bent) @ np.abs(w1))
    for name, theirs, ours, terms in zip(('dw1', 'db1', 'dw2', 'db2'), exact[2:], got[2:],
                                         ((2 * da + bent).T @ np.abs(x), (2 * da + bent).sum(0),
                                          np.abs(dy.T) @ (h + change / HALF), 0), strict=True):
        error = np.abs(get(ours) - theirs)
        assert (error <= HALF * terms + SUMS * np.abs(theirs).max()).all(), name


@pytest.mark.parametrize('precision,wide', [('fp32', 320), ('tf32', 320), ('tf32', 40), ('bf16', 320)])
def test_the_output_layer_of_float32_adds_the_parts_of_dx_in_any_precision(precision, wide, on_gpu, monkeypatch):
    """Few rows and many words: the vocabulary is divided into parts.   wide: from how many columns on TF32 uses wgmma"""
    assert output_layer.WIDE_FOR_TF32 == 320
    monkeypatch.setattr(output_layer, 'WIDE_FOR_TF32', wide)
    rng, results = np.random.default_rng(4), []
    weight, bias, x = numbers(rng, 2100, 40), numbers(rng, 2100), numbers(rng, 150, 40)
    labels = rng.integers(-1, 2100, 150).astype(np.int32)
    on_gpu.precision = precision
    for place, of in ((backend.HOST, of_host), (on_gpu, lambda value: of_device(value, with_copy=False))):
        with backend.on(place):
            w, b, dloss = of(weight), of(bias), put(np.ones(1, np.float32))
            loss, ctx = LinearCrossEntropy(w, b, ignore=-1).forward(put(x), put(labels), dloss=dloss)
            results.append([get(array).copy() for array in (loss, ctx.dx, w.grad, b.grad)])
    for name, want, got in zip(('loss', 'dx', 'dweight', 'dbias'), *results, strict=True):
        close(got, want, {'fp32': 1e-5, 'tf32': 2**-9, 'bf16': 2**-6}[precision], name)


@pytest.fixture
def by_wgmma(monkeypatch):
    """In TF32 the output layer uses wgmma for few columns, too."""
    monkeypatch.setattr(output_layer, 'WIDE_FOR_TF32', 1)


def compare_output_layers(weight, bias, x, labels, on_gpu, known=True, smoothing=0.0, tf32=False):
    """Compare the output layer of the GPU in bfloat16 with the CPU's in float32.   known: dloss is an argument of forward
    tf32: of float32 arrays, whose numbers have few digits; then only the gradients of the logits are rounded, to TF32"""
    V, used, upstream, results = len(weight), labels >= 0, np.array([1.5], np.float32), []
    on_gpu.precision = 'tf32' if tf32 else 'fp32'
    for place, of in ((lambda x: x, of_host), (put if tf32 else half, of_device)):
        with backend.on(backend.HOST if of is of_host else on_gpu):
            w, b = of(weight), of(bias)
            w.grad[...] = b.grad[...] = 0.25
            op, dloss = LinearCrossEntropy(w, b, smoothing=smoothing), put(upstream)
            loss, ctx = op.forward(place(x), put(labels), dloss=dloss if known else None)
            evaluated, _ = op.forward(place(x), put(labels), gradients=False)
            dx = op.backward(dloss, ctx)
            results.append([get(loss), get(evaluated), int(get(ctx.valid)[0]), dx, get(w.grad), get(b.grad)])
    exact, got = results
    close(got[0], exact[0], 1e-5, 'loss')
    close(got[1], exact[1], 1e-5, 'loss of an evaluation')
    assert got[2] == exact[2] == used.sum() and got[3].dtype == (np.float32 if tf32 else BF16)
    # of the gradient of a logit; one more rounding where dx is for dloss = 1 and multiplied later
    logits = x.astype(np.float64) @ weight.T + bias
    logits -= logits.max(1, keepdims=True)
    size = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    size[used, labels[used]] = np.abs(size[used, labels[used]] - 1)
    size = (size + smoothing / V) * used[:, None] * upstream / max(exact[2], 1)
    assert not get(got[3])[~used].any()
    # the sums of columns are of gradients before they are rounded, but of exponentials with two more digits than bfloat16
    terms = [HALF * size.T @ np.abs(x), HALF / 4 * size.sum(0)]
    if tf32:                                            # exponentials and dx are float32
        terms = [HALF_TF32 * size @ np.abs(weight), HALF_TF32 * size.T @ np.abs(x), 0]
        got[3] = get(got[3])
    else:
        dx = exact.pop(3)
        within(got.pop(3), dx, 'dx', size @ np.abs(weight) + np.abs(dx))
    for name, ours, theirs, limit in zip(('dx', 'dweight', 'dbias')[-len(terms):], got[3:], exact[3:], terms, strict=True):
        error = np.abs(ours - theirs)
        assert (error <= limit + SUMS * (1 + np.abs(theirs).max())).all(), f'{name}: {error.max()}'


# Where D is a multiple of 8 the logits are computed by wgmma, on devices that have it, in tiles of 128 or 256 words.
@pytest.mark.parametrize('smoothing', [0.0, 0.2])
@pytest.mark.parametrize('known', [True, False])
@pytest.mark.parametrize(('R', 'D', 'V', 'tf32'), [
    *((*size, False) for size in ((1, 3, 5), (70, 24, 300), (130, 40, 600), (9, 136, 2100), (100, 40, 600), (128, 8, 384),
                                  (150, 21, 650), (600, 8, 130))),
    (1, 3, 5, True), (9, 136, 2100, True), (150, 21, 650, True), (128, 8, 384, True)])
def test_the_output_layer_rounds_the_gradient_of_the_logits_and_dx(R, D, V, tf32, known, smoothing, on_gpu, by_wgmma):
    rng = np.random.default_rng(R)
    weight, bias, x = numbers(rng, V, D), numbers(rng, V), numbers(rng, R, D)
    labels = rng.integers(0, V, R).astype(np.int32)
    labels[::3] = -1 if R > 1 else labels[::3]
    compare_output_layers(weight, bias, x, labels, on_gpu, known, smoothing, tf32)


def biases(kind, V, rng):
    """Return V biases, multiples of 1/32."""
    tile = np.arange(V, dtype=np.int32) // 128
    near = below(1e4, V, rng)
    return {'high': near, 'low': -near, 'high and low': np.where(tile % 2, near, -near),
            'steps': near - 10 * tile, 'one word': np.where(np.arange(V) == 7, 24, near * 0),
            'words without': np.where((tile == 1) | (np.arange(V) % 5 == 3), -np.inf, near)}[kind].astype(np.float32)


@pytest.mark.parametrize(('kind', 'smoothing'), [
    *((kind, s) for kind in ('high', 'low', 'high and low', 'steps', 'one word') for s in (0.0, 0.1)), ('words without', 0.0)])
@pytest.mark.parametrize(('D', 'V', 'tf32'), [(16, 600, False), (12, 600, False), (16, 384, False), (16, 1000, False),
                                              (12, 600, True)])
def test_the_output_layer_is_exact_for_extreme_logits_and_labels_in_any_tile(D, V, tf32, kind, smoothing, on_gpu, by_wgmma):
    """All numbers are multiples of powers of 2, so that float32 logits are exact, whatever the order of their sums."""
    rng, R = np.random.default_rng([D, V]), 140
    x, weight = np.rint(4 * normal(rng, R, D)) / 4, np.rint(8 * normal(rng, V, D)) / 8
    labels = rng.integers(0, V, R).astype(np.int32)
    labels[:R // 2] = np.resize([0, 127, 128, 255, V // 128 * 128 - 1, V - 1, V - 2, 7], R // 2)
    bias = biases(kind, V, rng)
    labels[np.isinf(bias[labels])] = np.flatnonzero(np.isfinite(bias))[-1]
    if kind == 'one word':                              # its probability is nearly 1 in most rows
        labels[3::2] = 7
    labels[::5] = -1
    compare_output_layers(weight, bias, x, labels, on_gpu, smoothing=smoothing, tf32=tf32)


@pytest.mark.parametrize('tf32', [False, True])
@pytest.mark.parametrize('D', [16, 12])
def test_the_output_layer_of_one_valid_row(D, tf32, on_gpu, by_wgmma):
    rng, labels = np.random.default_rng(D), np.full(70, -1, np.int32)
    labels[66] = 200
    compare_output_layers(numbers(rng, 300, D), numbers(rng, 300), numbers(rng, 70, D), labels, on_gpu, smoothing=0.1,
                          tf32=tf32)


@pytest.fixture
def logits_bytes(on_gpu):
    """A function that sets the number of bytes of logits that are stored at once."""
    yield lambda number: on_gpu.check(on_gpu.library().lib.pyops_set_logits(number))
    on_gpu.library().lib.pyops_set_logits(0)


@pytest.mark.parametrize('tf32', [False, True])
@pytest.mark.parametrize('valid', [300, 200, 128, 100])
def test_the_output_layer_in_groups_of_rows(valid, tf32, on_gpu, logits_bytes, by_wgmma):
    """Of 300 rows in groups of 128; in the last groups only some rows count, or none."""
    rng, (R, D, V) = np.random.default_rng(valid), (300, 24, 300)
    labels = np.full(R, -1, np.int32)
    labels[rng.choice(R, valid, replace=False)] = rng.integers(0, V, valid)
    logits_bytes(128 * 384 * (8 if tf32 else 2))
    compare_output_layers(numbers(rng, V, D), numbers(rng, V), numbers(rng, R, D), labels, on_gpu, smoothing=0.1, tf32=tf32)


@pytest.mark.parametrize('valid', [300, 200, 128])
def test_the_output_layer_of_float32_in_groups_of_rows(valid, on_gpu, logits_bytes):
    rng, (R, D, V), results = np.random.default_rng(valid), (300, 24, 300), []
    labels = np.full(R, -1, np.int32)
    labels[rng.choice(R, valid, replace=False)] = rng.integers(0, V, valid)
    weight, bias, x = normal(rng, V, D), normal(rng, V), normal(rng, R, D)
    logits_bytes(128 * 384 * 4)
    for place, of in ((backend.HOST, of_host), (on_gpu, lambda value: of_device(value, with_copy=False))):
        with backend.on(place):
            w, b = of(weight), of(bias)
            loss, ctx = LinearCrossEntropy(w, b, smoothing=0.1).forward(put(x), put(labels), dloss=put(np.ones(1, np.float32)))
            results.append([get(array).copy() for array in (loss, ctx.dx, w.grad, b.grad)])
    for name, want, got in zip(('loss', 'dx', 'dweight', 'dbias'), *results, strict=True):
        close(got, want, 1e-5, name)


def test_bytes_of_logits_below_0_are_refused(on_gpu, logits_bytes):
    with pytest.raises(ValueError, match='^set_logits: bytes=-1, expected at least 1, or 0 for the usual number$'):
        logits_bytes(-1)


def test_the_output_layer_stores_half_of_the_bytes_in_bfloat16_and_no_logits_in_an_evaluation(on_gpu):
    R, D, V = 1152, 256, 13387
    keys = (1, 0, 0), (1, 1, 0), (0, 1, 0), (1, 0, 1)
    bytes_of = {key: 4 * backend.work_size('linear_cross_entropy', R, D, V, *key) for key in keys}
    logits, rest = R * -(-V // 128) * 128, 0.1 * R * V + 4 * R * D + 2**20          # rest: 12 bytes per 128 logits, x, ...
    assert 4 * logits <= bytes_of[1, 0, 0]
    assert 2 * logits <= bytes_of[1, 1, 0] <= 2 * logits + rest and bytes_of[0, 1, 0] <= rest
    # with TF32 by wgmma, the gradients in both layouts, and both layouts of weight and x
    by_wgmma = 8 * logits + 8 * D * (V + 53) + 4 * R * D
    assert bytes_of[1, 0, 0] <= bytes_of[1, 0, 1] <= max(bytes_of[1, 0, 0], by_wgmma + rest)


@pytest.mark.parametrize('sized,called', [('tf32', 'fp32'), ('fp32', 'tf32')])
def test_the_output_layer_computes_in_a_precision_that_its_work_was_not_sized_for(sized, called, on_gpu):
    """As in a plan, whose arrays stay when the precision changes."""
    rng, (R, D, V), marked, results = np.random.default_rng(1), (200, 24, 300), 100, []
    labels = put(rng.integers(-1, V, R).astype(np.int32))
    for name in sized, called:
        on_gpu.precision, tf32 = name, sized == 'tf32'
        x, weight, bias = (put(numbers(np.random.default_rng(D), *shape)) for shape in ((R, D), (V, D), (V,)))
        loss, valid, dx, dweight, dbias = (backend.empty(n, kind) for n, kind in (
            (1, np.float32), (1, np.int32), ((R, D), np.float32), ((V, D), np.float32), (V, np.float32)))
        size = backend.work_size('linear_cross_entropy', R, D, V, True, False, tf32)
        work = put(np.full(size + marked, 7, np.float32))
        launch('linear_cross_entropy', loss, valid, dx, dweight, dbias, None, x, weight, bias, labels, work, R, D, V, -1, 0.1,
               tf32)
        results.append([get(array) for array in (loss, dx, dweight, dbias)])
        assert (get(work)[size:] == 7).all()
    for want, got in zip(*results, strict=True):
        close(got, want, 2 * HALF_TF32)
    assert any((want != got).any() for want, got in zip(*results, strict=True))


@pytest.mark.parametrize('D', [16, 12])
def test_a_nan_in_a_weight_is_seen_in_the_loss_and_the_gradients_of_bfloat16(D, on_gpu):
    rng = np.random.default_rng(D)
    weight, x, labels = numbers(rng, 300, D), numbers(rng, 5, D), np.array([1, 2, -1, 3, 290], np.int32)
    weight[299, 0] = np.nan
    w, b = of_device(weight), of_device(numbers(rng, 300))
    loss, ctx = LinearCrossEntropy(w, b).forward(half(x), put(labels), dloss=put(np.ones(1, np.float32)))
    assert np.isnan(get(loss)).all() and np.isnan(get(b.grad)).all()
    assert (np.isnan(get(ctx.dx)) == (labels >= 0)[:, None]).all()


def test_the_output_layer_without_a_valid_row_adds_nothing(on_gpu):
    rng = np.random.default_rng(1)
    w, b = of_device(numbers(rng, 300, 16)), of_device(numbers(rng, 300))
    w.grad[...] = b.grad[...] = 2
    dloss = put(np.ones(1, np.float32))
    loss, ctx = LinearCrossEntropy(w, b).forward(half(numbers(rng, 70, 16)), put(np.full(70, -1, np.int32)), dloss=dloss)
    same(get(loss), 0)
    same(get(ctx.dx), 0)
    same(get(w.grad), 2)
    same(get(b.grad), 2)


@pytest.mark.parametrize(('causal', 'p'), [(False, 0.0), (True, 0.25)])
@pytest.mark.parametrize(('Tq', 'Tk'), [(5, 5), (9, 9), (20, 70), (64, 64), (127, 100)])
def test_attention_rounds_weights_gradients_of_scores_and_results(Tq, Tk, causal, p, on_gpu):
    B, heads, C, rng = 2, 2, 8, np.random.default_rng(Tq)
    D = heads * C
    inputs = [numbers(rng, T, B, D) for T in (Tq, Tk, Tk)]
    dy = numbers(rng, Tq, B, D)
    others = [np.array([Tk, Tk - 2], np.int32), np.array([4]) if p else None]
    on_gpu.precision, results = 'fp32', []
    for place, device in ((lambda x: x, backend.HOST), (half, on_gpu)):
        with backend.on(device):
            op = Attention(heads, causal, p, 9)
            y, ctx = op.forward(*map(place, inputs), *(other if other is None else put(other) for other in others))
            results.append([y, *op.backward(place(dy), ctx)])
    exact, got = results
    within(got[0], exact[0], 'y', np.abs(inputs[2]).max())               # the weights are rounded, and add up to 1
    for name, theirs, ours in zip(('dq', 'dk', 'dv'), exact[1:], got[1:], strict=True):
        # y is rounded, and with it dy . y, one of the two terms of the gradient of a score; so are weights and gradients
        within(ours, theirs, name, C * np.abs(exact[0]).max() * np.abs(dy).max() * np.abs(inputs[0]).max() / np.sqrt(C))


@pytest.mark.parametrize('T', [5, 40, 100])
def test_attention_takes_columns_of_one_bfloat16_array(T, on_gpu):
    rng = np.random.default_rng(2)
    qkv, dy = half(numbers(rng, T, 2, 48)), half(numbers(rng, T, 2, 16))
    dqkv, op = backend.empty(qkv.shape, BF16), Attention(2)
    parts = [[x[..., i:i + 16] for i in (0, 16, 32)] for x in (qkv, dqkv)]
    apart = [half(get(part)) for part in parts[0]]
    y, ctx = op.forward(*parts[0])
    expected, its_ctx = op.forward(*apart)
    same(get(y), get(expected))
    op.backward(dy, ctx, out=parts[1])
    same(get(dqkv), np.concatenate([get(x) for x in op.backward(dy, its_ctx)], 2))


def test_a_model_rounds_its_weights_once_and_products_use_the_copy(on_gpu):
    from pyops import init
    from pyops.params import Parameters, Spec
    assert Parameters({'w': Spec((3, 4), init.ones())}).rounded is None
    on_gpu.storage = 'bf16'
    params = Parameters({'a.w': Spec((4, 8), init.xavier_normal()), 'b.w': Spec((4, 8), init.xavier_normal())})
    params.round()
    for name in params:
        same(get(params[name].rounded), rounded(get(params[name].value)))
    joined = params.joined(['a.w', 'b.w'])
    assert joined.operand(BF16).dtype == BF16 and joined.operand(BF16).shape == (8, 8)
    assert joined.operand(np.float32) is joined.value


# ---- recurrent layers ------------------------------------------------------------------------------------------------

def wide(x):
    """Return numbers rounded to bfloat16, as float64."""
    return rounded(np.asarray(x, np.float32)).astype(np.float64)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gru_of_sentence(a, h0, w, b, before, dh, dlast):
    """Run a GRU over one sentence in float64, forward and backward, and round what the kernels store or multiply.

    a (T, 3H): the product of the inputs, rounded;  h0, dlast (H,);  w (3H, H): rounded;  b (3H,);  dh (T, H)
    Return h (T, H), not rounded, h[t-1] and u for the gradient of w, dgates (T, 4H) and dh0 (H,).
    """
    H, T = len(h0), len(a)
    h, states, gates, last = h0, np.empty((T, H)), np.empty((T, 4, H)), np.empty((T, H))
    for t in range(T):
        last[t], p = h, wide(h) @ w.T + b
        r, z, u = sigmoid(a[t, :H] + p[:H]), sigmoid(a[t, H:2 * H] + p[H:2 * H]), p[2 * H:]
        if before:
            u = r * h
        n = np.tanh(a[t, 2 * H:] + (wide(u) @ w[2 * H:].T + b[2 * H:] if before else r * u))
        h = states[t] = (1 - z) * n + z * h
        gates[t] = wide([r, z, n, u])
    d, dgates = dlast, np.empty((T, 4 * H))
    for t in reversed(range(T)):
        (r, z, n, u), h_before = gates[t], wide(last[t]) if t else h0
        d = d + dh[t]
        dn, dz = d * (1 - z) * (1 - n**2), d * (h_before - n) * z * (1 - z)
        du = wide(dn) @ w[2 * H:] if before else dn * r
        dr = du * h_before * r * (1 - r) if before else dn * u * r * (1 - r)
        g = dgates[t] = wide(np.concatenate([dr, dz, dn, du]))
        d = d * z + (du * r + g[:2 * H] @ w[:2 * H] if before else np.delete(g, slice(2 * H, 3 * H)) @ w)
    return states, wide(last), gates[:, 3], dgates, d


class RoundedGRU:
    """Random inputs of a GRU in bfloat16, with a token for each row an EmbeddingGRU with a context, and its results in float64.

    layout: 'packed', 'reversed' (packed rows that are read from the end of a sentence), or 'padded' (with lengths)
    """
    LENGTHS, T, V, E, C = (4, 2, 0, 3, 5, 1, 1), 5, 6, 12, 8

    def __init__(self, tokens, before, layout, H, with_h0=True):
        rng = np.random.default_rng([tokens, before, H])
        self.tokens, self.before, self.layout, self.H, B = tokens, before, layout, H, len(self.LENGTHS)
        I = self.E + self.C if tokens else 10
        steps = [[(t, b) for t in range(length)] for b, length in enumerate(self.LENGTHS)]
        offsets = np.cumsum([0, *self.LENGTHS])
        # the rows of each sentence, in the order of its steps
        self.order = [[t * B + b for t, b in own] if layout == 'padded' else [offsets[b] + t for t, _ in own]
                      for b, own in enumerate(steps)]
        if layout == 'reversed':
            self.order = [own[::-1] for own in self.order]
        self.lead = (self.T, B) if layout == 'padded' else (int(offsets[-1]),)
        self.rows, self.offsets = int(np.prod(self.lead)), offsets.astype(np.int32)
        self.params = dict(table=normal(rng, self.V, self.E)) if tokens else {}
        self.params |= dict(w_ih=normal(rng, 3 * H, I, scale=I**-0.5), w_hh=normal(rng, 3 * H, H, scale=H**-0.5),
                            b_ih=normal(rng, 3 * H), b_hh=normal(rng, 3 * H))
        self.x = rng.integers(0, self.V, self.rows).astype(np.int32) if tokens else numbers(rng, self.rows, I)
        self.context = normal(rng, B, self.C) if tokens else None
        self.h0 = normal(rng, B, H) if with_h0 else None
        self.dh, self.dlast = numbers(rng, self.rows, H), None if layout == 'padded' else normal(rng, B, H)
        self.into = normal(rng, B, self.C) if tokens else None

    def run(self, copies=True):
        """Return the results on the current device."""
        params = {name: of_device(value, copies) for name, value in self.params.items()}
        op = (EmbeddingGRU if self.tokens else GRU)(**params, reset_before=self.before)
        rows = None if self.layout == 'padded' else Packed(put(self.offsets), self.T)
        lengths = None if rows else put(np.array(self.LENGTHS, np.int32))
        others = dict(h0=None if self.h0 is None else put(self.h0), lengths=lengths, rows=rows,
                      reverse=self.layout == 'reversed')
        if self.tokens:
            others['context'] = put(self.context)
        x = self.x.reshape(*self.lead, *self.x.shape[1:])
        h, ctx = op.forward(half(x), **others)
        dlast = None if self.dlast is None else put(self.dlast)
        result = op.backward(half(self.dh.reshape(*self.lead, self.H)), ctx, dlast,
                             **dict(into=put(self.into)) if self.tokens else {})
        names = ('dx', 'dcontext', 'dh0') if self.tokens else ('dx', 'dh0')
        found = dict(h=h, gates=ctx.gates, last=ctx.last, **dict(zip(names, result, strict=True)))
        found = {name: array.reshape(self.rows, -1) if name in ('h', 'gates', 'dx') and array is not None else array
                 for name, array in found.items()}
        return found | {f'd {name}': parameter.grad for name, parameter in params.items()}

    def expected(self):
        """Return the same results in float64, but for gates, and the largest input of a gate."""
        H, (w_ih, w_hh), B = self.H, (wide(self.params[name]) for name in ('w_ih', 'w_hh')), len(self.LENGTHS)
        sentence = np.zeros(self.rows, int)
        for b, own in enumerate(self.order):
            sentence[own] = b
        x = wide(np.concatenate([self.params['table'][self.x], self.context[sentence]], 1) if self.tokens else self.x)
        a = wide(x @ w_ih.T + self.params['b_ih'])
        h, h_before, u, dgates = (np.zeros((self.rows, n * H)) for n in (1, 1, 1, 4))
        last = np.zeros((B, H)) if self.h0 is None else self.h0.astype(np.float64)
        dh0 = np.zeros((B, H)) if self.dlast is None else self.dlast.astype(np.float64)
        for b, own in enumerate(self.order):
            if own:
                h[own], h_before[own], u[own], dgates[own], dh0[b] = gru_of_sentence(
                    a[own], last[b], w_hh, self.params['b_hh'], self.before, self.dh[own], dh0[b])
                last[b] = h[own[-1]]
        da, du = dgates[:, :3 * H], dgates[:, 2 * H:3 * H] if self.before else dgates[:, 3 * H:]
        found = dict(h=h, last=last, dx=da @ w_ih, dh0=dh0)
        found |= {'d b_ih': da.sum(0), 'd b_hh': np.concatenate([da[:, :2 * H], du], 1).sum(0),
                  'd w_hh': np.concatenate([da[:, :2 * H].T @ h_before, du.T @ (u if self.before else h_before)])}
        if not self.tokens:
            return found | {'d w_ih': da.T @ x}, np.abs(a).max()
        sums, table = np.zeros((B, 3 * H)), np.zeros_like(self.params['table'], np.float64)
        np.add.at(sums, sentence, da)
        np.add.at(table, self.x, wide(found.pop('dx')[:, :self.E]))
        sums = wide(sums)
        dw_ih = np.concatenate([da.T @ x[:, :self.E], sums.T @ wide(self.context)], 1)
        return found | {'d w_ih': dw_ih, 'd table': table, 'dcontext': self.into + sums @ w_ih[:, self.E:]}, np.abs(a).max()


@pytest.mark.parametrize('layout,with_h0', [('packed', True), ('reversed', False), ('padded', True), ('padded', False)])
@pytest.mark.parametrize('H', [16, 30, 136, 130])           # 4 multiprocessors: from H = 129 on one step at a time
@pytest.mark.parametrize('before', [False, True], ids=['reset after', 'reset before'])
@pytest.mark.parametrize('tokens', [False, True], ids=['rows', 'tokens'])
def test_a_gru_rounds_what_it_stores_and_multiplies_and_nothing_else(tokens, before, H, layout, with_h0, on_gpu):
    on_gpu.storage = 'bf16'
    case = RoundedGRU(tokens, before, layout, H, with_h0)
    got, (want, a) = case.run(), case.expected()
    for name, exact in want.items():
        if got[name] is None:
            assert (name == 'dh0' and not with_h0) or (name == 'last' and layout == 'padded'), name
        elif name in ('h', 'dx'):
            # its own rounding, and that of an intermediate number that a different order of sums moves to its neighbour
            within(got[name], exact, name, a if name == 'h' else np.abs(exact).max())
            assert np.abs(get(got[name]) - exact).mean() <= HALF * np.abs(exact).mean(), name
        else:
            assert got[name].dtype == np.float32, name
            close(get(got[name]), exact, 2 * HALF, name)        # a unit of the largest factor
    if got['last'] is not None:
        last = get(got['last'])[np.array(case.LENGTHS) > 0]
        assert (rounded(last) != last).mean() > 0.9, 'the states are rounded'
        same(rounded(last), np.array([get(got['h'])[own[-1]] for own in case.order if own]))


@pytest.mark.parametrize('tokens', [False, True], ids=['rows', 'tokens'])
def test_a_gru_gives_the_same_bits_without_copies_of_its_weights_in_every_precision(tokens, on_gpu):
    """With all steps in one kernel; products of float32 and bfloat16 alone may add in another order."""
    on_gpu.storage, case = 'bf16', RoundedGRU(tokens, False, 'packed', 30)
    want = {name: get(array) for name, array in case.run().items() if array is not None}
    for precision, copies in (('bf16', True), ('fp32', False)):
        on_gpu.precision = precision
        for name, array in case.run(copies).items():
            if array is not None:
                same(get(array), want[name], name)


@pytest.mark.parametrize('H', [16, 136])
@pytest.mark.parametrize('before', [False, True], ids=['reset after', 'reset before'])
@pytest.mark.parametrize('packed', [False, True])
def test_a_gru_accumulates_its_state_in_float32(packed, before, H, on_gpu):
    """Each step adds a fortieth of a unit of bfloat16 to a state of 0.5."""
    T, B, w = 60, 3, np.zeros((3 * H, H), np.float32)
    bias = np.repeat(np.array([0, 8, 1], np.float32), H)
    op = GRU(*map(of_device, (w, w, bias, np.zeros_like(bias))), reset_before=before)
    rows = Packed(put(np.arange(B + 1, dtype=np.int32) * T), T) if packed else None
    x = np.zeros((B * T, H) if packed else (T, B, H), np.float32)
    h, _ = op.forward(half(x), put(np.full((B, H), 0.5, np.float32)), rows=rows)
    z, n = sigmoid(8.0), np.tanh(1.0)
    exact = n + (0.5 - n) * z ** np.arange(1, T + 1)
    assert exact[-1] > 0.5 * (1 + 2 * HALF), 'a rounded state would pass'
    within(h, np.broadcast_to(np.tile(exact, B)[:, None] if packed else exact[:, None, None], h.shape), 'h')


def test_a_gru_refuses_arrays_of_two_types(on_gpu):
    on_gpu.storage, case = 'bf16', RoundedGRU(False, False, 'packed', 16)
    params = {name: of_device(value) for name, value in case.params.items()}
    op, rows = GRU(**params), Packed(put(case.offsets), case.T)
    h, ctx = op.forward(half(case.x), put(case.h0), rows=rows)
    with pytest.raises(ValueError, match='gru_backward: float32 and bfloat16 activations in one call, expected one type'):
        op.backward(put(case.dh), ctx)
    with pytest.raises(TypeError, match='h0: expected dtype float32, got bfloat16'):
        op.forward(half(case.x), half(case.h0), rows=rows)
    x, w = put(np.zeros(64, np.float32)), half(np.zeros((3, 1), np.float32))
    with pytest.raises(ValueError, match='gru_forward: w_ih or w_hh is bfloat16 and h float32, expected one type'):
        launch('gru_forward', x, x, None, x, None, None, None, None, x, w, x, x, x, 1, 1, 0, 1, 1, 0, 0)
    with pytest.raises(ValueError, match='embedding_linear_forward: weight is bfloat16 and y float32, expected one type'):
        launch('embedding_linear_forward', x, x, put(np.zeros(1, np.int32)), None, None, w, x, x, 1, 1, 0, 1, 1, 0, 3)
    with pytest.raises(ValueError, match='embedding_linear_backward: weight is bfloat16 and dy float32, expected one type'):
        launch('embedding_linear_backward', x, None, None, x, x, x, x, put(np.zeros(1, np.int32)), None, None, w, x, 1, 1, 0, 1,
               1, 0, 3, 3, 0)


# ---- a model ---------------------------------------------------------------------------------------------------------

# a GRU of each kind: with a context, or with attention and a layer that reads in both directions
MODELS = {'transformer': ('make_transformer', {}), 'seq2seq': ('make_seq2seq', {}),
          'seq2seq attention': ('make_seq2seq', dict(attention=2, bidirectional=True))}


def make_model(name):
    import small_models
    make, settings = MODELS[name]
    return getattr(small_models, make)(**settings)


def losses(name, steps):
    """Train a small model and return its losses."""
    from small_models import pairs
    from translation import train_steps
    return train_steps(make_model(name), pairs()[1], steps, batch_size=16, lr=0.002)


@pytest.mark.parametrize('name', MODELS)
def test_a_model_with_bfloat16_activations_learns_like_one_in_float32(name, on_gpu):
    plain = losses(name, 30)
    on_gpu.precision = on_gpu.storage = 'bf16'
    stored = losses(name, 30)
    assert np.mean(plain[-5:]) < 0.95 * np.mean(plain[:5]), 'nothing was learned: the check is vacuous'
    assert (np.array(stored) != plain).any(), 'nothing was rounded'
    error = np.abs(np.array(stored) / plain - 1)
    assert error[0] <= 8 * HALF and error[:20].max() <= 0.05, error
    assert np.mean(stored[-5:]) < 0.95 * np.mean(stored[:5])


def recorded(model):
    """Return the plan of a training step."""
    from small_models import pairs

    from pyops.optim import Adam
    from pyops.plan import Plan
    batch, optimizer = pairs()[1].batch_of(np.arange(16)), Adam(model.params, 0.001)
    with Plan(model.params, run=False, **model.arrays(), **optimizer.arrays()) as plan:
        model.params.zero_grads()
        _, ctx = model.forward(batch, step=optimizer.count)
        model.backward(ctx)
        optimizer.step()
    return plan


@pytest.mark.parametrize('name', MODELS)
def test_activations_and_their_gradients_take_half_of_the_memory_and_weights_are_rounded_once(name, on_gpu):
    plans = {}
    for storage in ('fp32', 'bf16'):
        on_gpu.precision = on_gpu.storage = storage
        plans[storage] = recorded(make_model(name))
    tensors = {storage: {t.name: t for t in plan.tensors()} for storage, plan in plans.items()}
    halved = {name for name, t in tensors['bf16'].items() if t.dtype == BF16}
    assert {name for name in halved if tensors['bf16'][name].kind == 'parameter'} >= {'parameters_rounded'}
    kinds = {'intermediate', 'gradient'}
    for tensor, t in tensors['fp32'].items():
        if t.kind in kinds and t.base is None and t.dtype == np.float32 and tensor.endswith(
                ('.y', '.h', '.a', '.gates', '.dx', '.dh', '.dgates')) and '.both.' not in tensor:
            other = tensors['bf16'][tensor]
            assert other.dtype == BF16 and 2 * other.nbytes == t.nbytes, tensor
    statistics = [t for name, t in tensors['bf16'].items() if name.endswith(
        ('.mean', '.rstd', '.stats', '.loss', '_grad', '.last', '.dh0', '.dcontext'))]
    assert statistics and all(t.dtype == np.float32 for t in statistics)
    rounding = [action for action in plans['bf16'].actions if action.kernel == 'convert'
                and action.tensors['x'].name == 'parameters']
    assert len(rounding) == 1
    names = {'gemm': ('b',), 'gru_forward': ('w_ih', 'w_hh'), 'embedding_linear_forward': ('weight',)}
    weights = [action.tensors[argument] for action in plans['bf16'].actions for argument in names.get(action.kernel, ())
               if argument in action.tensors and (action.kernel != 'gemm' or 'bias' in action.tensors)]
    assert weights and all(t.dtype == BF16 for t in weights)
    first = 'encoder.embedding.y' if name == 'transformer' else 'decoder.rnn.0.h'
    assert f'Tensor(BFLOAT16)({first})' in str(plans['bf16'])


@pytest.mark.parametrize('name,sizes', [
    ('transformer', ['--d-model', '16', '--heads', '2', '--layers', '1']),
    ('seq2seq', ['--embedding', '16', '--hidden', '16']),
    ('seq2seq', ['--embedding', '16', '--hidden', '16', '--attention', '2', '--bidirectional', '--reset-before'])],
    ids=['transformer', 'seq2seq', 'seq2seq attention'])
def test_a_program_trains_saves_resumes_and_translates_with_bfloat16_activations(name, sizes, on_gpu, tmp_path, capsys):
    train = importlib.import_module(f'{name}.train')
    flags = ['-g', '1', '-f', 'embedded', '--pairs', '64', '-b', '32', *sizes, '--min-count', '1']
    found = {}
    for precision in ('fp32', 'bf16'):
        folder = str(tmp_path / precision)
        for epochs in ('1', '2'):
            train.main([*flags, '--precision', precision, '-e', epochs, '-c', folder])
        assert on_gpu.storage == precision
        out = capsys.readouterr().out
        assert 'loaded from checkpoint' in out and 'BLEU' in out
        found[precision] = [float(line.split('loss : ')[1].split()[0]) for line in out.splitlines() if line.startswith('epoch ')
                            and 'loss' in line]
    assert len(found['bf16']) == 2 and found['bf16'] != found['fp32']
    close(np.array(found['bf16']), np.array(found['fp32']), 8 * HALF)


@pytest.mark.parametrize('flags', [('-b', '16', '--accumulate', '2'), ('-b', '32', '--parts', '2'),
                                   ('-b', '32', '--parts', '2', '--no-plan')], ids=' '.join)
def test_a_step_in_parts_rounds_its_weights_once_with_the_same_bits(on_gpu, flags, tmp_path, monkeypatch):
    from safetensors.numpy import load_file

    from pyops.params import Parameters
    from transformer import train
    convert, create, params, found, count = backend.convert, Parameters.__init__, [], {}, {}

    def create_and_keep(self, *arguments):
        create(self, *arguments)
        params.append(self)

    def convert_and_count(y, x):
        count[way] = count.get(way, 0) + any(x is each.values for each in params)
        convert(y, x)
    monkeypatch.setattr(Parameters, '__init__', create_and_keep)
    monkeypatch.setattr(backend, 'convert', convert_and_count)
    for way in ('once', 'each'):
        if way == 'each':
            monkeypatch.setattr(Parameters, 'rounded_once', lambda self: contextlib.nullcontext())
        train.main(['-g', '1', '--precision', 'bf16', '-f', 'embedded', '--pairs', '64', '--d-model', '16', '--heads', '2',
                    '--layers', '1', '--min-count', '1', '-e', '1', '--hold-out', '0', '-c', str(tmp_path / way), *flags])
        (path,) = (tmp_path / way).glob('*.safetensors')
        found[way] = load_file(path)
    assert found['once'].keys() == found['each'].keys()
    for name, values in found['once'].items():
        assert values.tobytes() == found['each'][name].tobytes(), name
    if '--accumulate' in flags:                             # per recording of the step
        assert count['each'] == 2 * count['once'] > 0
    if '--no-plan' in flags:                                # two steps of two parts
        assert count == {'once': 2, 'each': 4}


def test_quantized_ops_keep_float32_activations(on_gpu):
    from argparse import Namespace

    from pyops.flags import select_storage
    select_storage(Namespace(precision='bf16'), 'mxfp8e4m3')
    assert on_gpu.storage == 'fp32'
    select_storage(Namespace(precision='fp8'), 'fp8')          # layers in FP8 take bfloat16
    assert on_gpu.storage == 'bf16'
    on_gpu.storage = 'fp32'
    select_storage(Namespace(precision='bf16'))
    assert on_gpu.storage == 'bf16'
    with backend.float32_activations():
        assert on_gpu.storage == 'fp32'
    assert on_gpu.storage == 'bf16'


@pytest.mark.parametrize('suffix', ['safetensors', 'pt'])
def test_saved_tensors_of_bfloat16_activations_are_bfloat16_files(on_gpu, suffix, tmp_path, capsys):
    if suffix == 'pt':
        pytest.importorskip('torch', reason='--save-as pt needs torch: pip install torch')
    from pyops.inspect.readers import list_tensors, read
    from transformer import train
    train.main(['-g', '1', '--precision', 'bf16', '--pairs', '64', '-b', '32', '--d-model', '16', '--heads', '2',
                '--layers', '1', '-e', '1', '-c', str(tmp_path / 'ckpt'), '--save-tensors', str(tmp_path / 'saved'),
                '--save-as', suffix])
    found = {}
    for path in sorted((tmp_path / 'saved').glob(f'*.{suffix}')):
        (key, _, dtype, metadata), = list_tensors(str(path))
        found.setdefault(path.stem.rsplit('_fp32_')[1], set()).add(dtype)
        values = read(str(path), key)
        assert np.isfinite(values).all()
        if dtype == 'bfloat16':
            same(values, rounded(values))
    for name in ('input', 'output', 'grad_output', 'query', 'key', 'value', 'grad_query'):
        assert found[name] == {'bfloat16'}, name
    assert found['weight'] == found['grad_weight'] == {'float32'}
