"""Products on the CPU with factors rounded to bfloat16: the op table in that precision, rounding, and training.

HALF is half a unit in the last of 8 binary digits, relative.  The reference of y is the float64 formula, of a gradient the same
op in float32.  A product rounds its factors, and the next product rounds its result, so that an error is a few HALF of the
largest element.
"""
import numpy as np
import pytest
from arrays import close, near, normal, same
from places import on_the_cpu
from rows import EACH, EXAMPLES, Run
from test_bf16 import HALF, numbers, rounded
from test_table import (  # noqa: F401  collected here, with the fixture of this file
    test_parameter_gradients_add_and_activation_gradients_overwrite,
    test_same_bits_for_any_number_of_threads,
    test_writes_stay_inside_and_nothing_uninitialised_is_read,
)

from pyops import backend
from pyops.backend import HOST, library
from pyops.ops import FeedForward
from pyops.params import Parameter

pytestmark = on_the_cpu


@pytest.fixture(autouse=True)
def bf16():
    HOST.precision = 'bf16'
    yield
    HOST.precision = 'fp32'


def in_float32(function):
    """Return function() with float32 products."""
    HOST.precision = 'fp32'
    try:
        return function()
    finally:
        HOST.precision = 'bf16'


# ---- one product -----------------------------------------------------------------------------------------------------

LAYOUTS = [(a, b) for a in ('rows', 'columns', 'strided') for b in ('rows', 'columns', 'strided')]


def laid_out(x, layout):
    """Return an array equal to x: C-contiguous, transposed, or with gaps along both axes."""
    if layout == 'strided':
        return np.repeat(np.repeat(x, 2, 0), 3, 1)[::2, ::3]
    return x if layout == 'rows' else x.T.copy().T


@pytest.mark.parametrize(('a_layout', 'b_layout'), LAYOUTS)
@pytest.mark.parametrize(('M', 'N', 'K'), [(1, 1, 1), (1, 70, 2), (3, 33, 31), (9, 32, 64), (15, 100, 65), (29, 40, 257),
                                           (140, 64, 256), (150, 33, 600), (20, 530, 300), (7, 9, 1300)])
def test_a_product_sums_the_rounded_factors_in_float32(M, N, K, a_layout, b_layout):
    rng = np.random.default_rng(M + N + K)
    a, b, bias, before = normal(rng, M, K), normal(rng, K, N), normal(rng, N), normal(rng, M, N)
    x, w = laid_out(a, a_layout), laid_out(b, b_layout)
    exact = rounded(a).astype(np.float64) @ rounded(b)
    for given, accumulate, relu in ((None, False, False), (bias, True, False), (bias, True, True)):
        c = before.copy()
        backend.gemm(c, x, w, given, accumulate, relu)
        y = exact + (0 if given is None else given) + (before if accumulate else 0)
        close(c, np.maximum(y, 0) if relu else y, 1e-6 * np.sqrt(K), f'bias {given is not None}, relu {relu}')


def test_factors_are_rounded_to_nearest_ties_to_even_and_overflow_to_infinity():
    x = np.concatenate([[1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 3.4e38, 2.0**-126, 1.25 * 2.0**-126, -0.0],
                        normal(np.random.default_rng(1), 2000) * 2.0 ** (np.arange(-1000, 1000) / 10)]).astype('f')
    one = np.ones((1, 1), np.float32)
    for a, b in ((x[:, None], one), (one, x[None])):                    # c is a factor times 1
        c = np.empty((len(a), b.shape[1]), np.float32)
        backend.gemm(c, a, b)
        same(c.ravel(), rounded(x))
    assert rounded(x)[:4].tolist() == [1, 1 + 2**-6, -1, np.inf]


def test_a_subnormal_factor_is_rounded_or_becomes_0():
    x = np.array([[2.0**-130], [-(2.0**-127)], [2.0**-149]], np.float32)
    c = np.empty((3, 40), np.float32)
    backend.gemm(c, x, np.ones((1, 40), np.float32))
    assert ((c == 0) | (c == rounded(x))).all()


@pytest.mark.parametrize('K', [1, 2, 33])
def test_nan_stays_nan_and_infinity_stays_infinity(K):
    a, b = np.ones((9, K), np.float32), np.ones((K, 40), np.float32)
    a.view(np.uint32)[4, -1] = 0x7F800001               # a NaN whose upper 16 bits equal infinity's
    b[0, 30] = -np.inf
    c = np.empty((9, 40), np.float32)
    backend.gemm(c, a, b)
    assert np.isnan(c[4]).all()
    c = np.delete(c, 4, 0)
    assert (c[:, 30] == -np.inf).all() and (np.delete(c, 30, 1) == K).all()


def test_products_of_a_batch_round_their_factors():
    rng = np.random.default_rng(2)
    a, b, c = normal(rng, 3, 5, 40, 50), normal(rng, 3, 5, 50, 33), np.empty((3, 5, 40, 33), np.float32)
    backend.gemm_batched(c, a, b)
    close(c, rounded(a).astype(np.float64) @ rounded(b), 1e-6 * np.sqrt(50))


# ---- the op table ----------------------------------------------------------------------------------------------------

ROUNDED = 'linear', 'gru', 'embedding_gru', 'feed_forward', 'linear_cross_entropy', 'conv2d'    # ops with products in bfloat16


@pytest.mark.parametrize('row,size', [*EACH, *EXAMPLES])
def test_an_op_is_off_by_a_few_roundings_of_its_largest_element(row, size):
    run, plain = Run(row, size), in_float32(lambda: Run(row, size))
    if run.y.size:
        close(run.y, run.reference(run.variables()), 4 * HALF, 'y')
    for name, grad in run.grads.items():
        if row.name.startswith('rnn-relu'):             # rounding may change the sign before a ReLU, seldom
            error = np.abs(grad - plain.grads[name])
            assert np.median(error) <= 12 * HALF * np.abs(plain.grads[name]).max(), name
        elif row.name != 'feed_forward':                # tested below, for the same reason
            # a single unit has no larger gradient beside a small one
            close(grad, plain.grads[name], (24 if max(size) == 1 else 12) * HALF, f'd {name}')
    if row.name.startswith(ROUNDED) and max(size) > 1:
        assert any((grad != plain.grads[name]).any() for name, grad in run.grads.items()), 'nothing was rounded'


@pytest.mark.parametrize(('rows', 'D', 'F'), [(3, 5, 7), (40, 64, 96), (300, 33, 257)])
def test_feed_forward_rounds_the_factors_of_both_products(rows, D, F):
    rng = np.random.default_rng(rows)
    values = [numbers(rng, *shape) for shape in ((F, D), (F,), (D, F), (D,))]
    x, dy = numbers(rng, rows, D), numbers(rng, rows, D)

    def results():
        parameters = [Parameter(name, value.copy(), np.zeros_like(value))
                      for name, value in zip(('w1', 'b1', 'w2', 'b2'), values, strict=True)]
        op = FeedForward(*parameters)
        y, ctx = op.forward(x)
        return [y, op.backward(dy, ctx), *(p.grad for p in parameters)]

    w1, b1, w2, _ = values                              # bfloat16 represents them, so h before rounding is float32's
    h = np.maximum(x @ w1.T + b1, 0)
    dh = np.abs(dy) @ np.abs(w2) * (h > 0)
    terms = [h @ np.abs(w2.T), dh @ np.abs(w1), dh.T @ np.abs(x), dh.sum(0), np.abs(dy.T) @ h, 0 * values[3]]
    exact, got = in_float32(results), results()
    for name, theirs, ours, size in zip(('y', 'dx', 'dw1', 'db1', 'dw2', 'db2'), exact, got, terms, strict=True):
        assert (np.abs(ours - theirs) <= HALF * size + 1e-5 * np.abs(theirs).max()).all(), name
    assert (got[0] != exact[0]).any()


# ---- the switch ------------------------------------------------------------------------------------------------------

def test_float32_products_have_the_same_bits_before_and_after_bfloat16():
    rng = np.random.default_rng(3)
    a, b, c = normal(rng, 40, 50), normal(rng, 50, 60), np.empty((3, 40, 60), np.float32)
    for i, precision in enumerate(('fp32', 'bf16', 'fp32')):
        HOST.precision = precision
        backend.gemm(c[i], a, b)
    same(c[2], c[0])
    assert (c[1] != c[0]).any()


def test_another_precision_is_refused_and_changes_nothing():
    with pytest.raises(ValueError, match="^precision: 'tf32', expected fp32 or bf16$"):
        HOST.precision = 'tf32'
    assert HOST.precision == 'bf16'
    ffi, lib, _ = library.cpu()
    assert lib.pyops_set_precision(1) == 1
    assert ffi.string(lib.pyops_last_error()).decode() == (
        'set_precision: precision=1, expected 0 (float32) or 2 (bfloat16) on the CPU')


def test_the_instruction_set_of_bfloat16_is_that_of_float32_or_extends_avx512():
    assert backend.bf16_isa() == backend.isa() or backend.isa() == 'avx512' and backend.bf16_isa().endswith('_bf16')


@pytest.mark.parametrize('first', ['fp32', 'bf16'])
def test_a_plan_uses_the_precision_of_its_replay(first):
    from small_models import make_seq2seq, pairs

    from pyops.plan import Plan
    batch = pairs()[1].batch_of(np.arange(40))

    def gradients(model):
        model.params.zero_grads()
        loss, ctx = model.forward(batch)
        model.backward(ctx)
        return loss
    HOST.precision = first
    model = make_seq2seq()
    with Plan(model.params, run=False, **model.arrays()) as plan:
        loss = gradients(model)
    for precision in ('fp32', 'bf16', 'fp32'):
        HOST.precision = precision
        plan.run()
        replayed = loss.copy(), model.params.grads.copy()
        other = make_seq2seq()
        same(replayed[0], gradients(other), precision)
        same(replayed[1], other.params.grads, precision)


# ---- training --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('which', ['seq2seq', 'transformer'])
def test_losses_in_bfloat16_are_within_one_percent_of_float32(which):
    from small_models import make_seq2seq, make_transformer, pairs
    from translation import train_steps
    make = make_seq2seq if which == 'seq2seq' else make_transformer

    def losses():
        return np.array(train_steps(make(), pairs()[1], 60, batch_size=16, lr=0.003))
    got, exact = losses(), in_float32(losses)
    assert exact[-10:].mean() < 0.8 * exact[:10].mean(), 'nothing was learned: the check is vacuous'
    assert (got != exact).any(), 'nothing was rounded'
    near(got[:1], exact[:1], 0.01 * exact[0], 'the first loss')
    near(got[-10:].mean(keepdims=True), exact[-10:].mean(keepdims=True), 0.01 * exact[-10:].mean(), 'the last losses')


@pytest.mark.parametrize('which', ['seq2seq', 'transformer'])
def test_a_resumed_run_in_bfloat16_equals_a_whole_one(which, tmp_path):
    from importlib import import_module

    from translation import TINY_SEQ2SEQ, TINY_TRANSFORMER, assert_same_training, newest
    train, flags = import_module(f'{which}.train'), TINY_SEQ2SEQ if which == 'seq2seq' else TINY_TRANSFORMER
    flags = [*flags, '--precision', 'bf16']
    for epochs, folder in (('2', 'whole'), ('1', 'parts'), ('2', 'parts')):
        train.main(['-e', epochs, '-c', str(tmp_path / folder), *flags])
    assert_same_training(newest(tmp_path / 'whole'), newest(tmp_path / 'parts'))
    train.main(['-e', '2', '-c', str(tmp_path / 'fp32'), *flags, '--precision', 'fp32'])
    got, plain = newest(tmp_path / 'whole')[0], newest(tmp_path / 'fp32')[0]
    assert any(tensor.tobytes() != plain[name].tobytes() for name, tensor in got.items()), 'nothing was rounded'
