"""Tests of single ops, beyond the properties of the op table.  `make test-all` runs them on each backend."""
import functools
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import test_table
from arrays import RTOL, close, near, normal, of_zeros, parameter, same
from conftest import ROOT
from places import ON_GPU, get, launch, of_threads, put
from rows import (
    AttentionRow,
    Conv2dRow,
    EmbeddingGRURow,
    FeedForwardRow,
    GRURow,
    LayerNormRow,
    LinearCrossEntropyRow,
    LinearOfSequencesRow,
    LinearRow,
    PixelLinearRow,
    Run,
    SmoothedLinearCrossEntropyRow,
    below,
)

from pyops import backend, init
from pyops.backend import location
from pyops.ops import (
    GRU,
    Attention,
    AvgPool2d,
    BatchNorm,
    ConcatContext,
    Conv2d,
    Conv2dFilters,
    Conv2dTransposed,
    CrossEntropy,
    Dropout,
    Embedding,
    EmbeddingGRU,
    EmbeddingPositions,
    LayerNorm,
    Linear,
    LinearCrossEntropy,
    MaxPool2d,
    MLPGradients,
    PixelLinear,
    Positions,
    Residual,
    ResidualNorm,
    sequence_lengths,
)
from pyops.ops.attention import dropout_factors
from pyops.ops.linear import JoinedLinear, LinearPair
from pyops.ops.packed import Packed, pad_rows, unpad_rows
from pyops.params import Parameter, Parameters, Spec
from pyops.philox import philox4x32
from pyops.quantization import Recipe


def test_ids_outside_the_table_are_refused_with_their_position():
    for bad in (-1, 4):
        with pytest.raises(ValueError, match=rf'ids\[2\]={bad}, expected 0 to 3'):
            Embedding(of_zeros('weight', 4, 2)).forward(put(np.array([0, 3, bad], np.int32)))
        gru = EmbeddingGRU(*(of_zeros(str(shape), *shape) for shape in ((4, 2), (9, 2), (9, 3), (9,), (9,))))
        with pytest.raises(ValueError, match=rf'ids\[2\]={bad}, expected 0 to 3'):
            gru.forward(put(np.array([[0, 3, bad]], np.int32)))


@pytest.mark.parametrize('bad', [-2, 5])
def test_labels_outside_the_classes_are_refused_with_their_position(bad):
    labels = put(np.array([0, 4, bad], np.int32))
    with pytest.raises(ValueError, match=rf'labels\[2\]={bad}, expected 0 to 4'):
        CrossEntropy().forward(put(np.zeros((3, 5), np.float32)), labels)
    op = LinearCrossEntropy(of_zeros('weight', 5, 2), of_zeros('bias', 5))
    with pytest.raises(ValueError, match=rf'labels\[2\]={bad}, expected 0 to 4'):
        op.forward(put(np.zeros((3, 2), np.float32)), labels)


@pytest.mark.parametrize('p', [-0.1, 1.0, float('nan')])
def test_dropout_wants_a_share_below_one(p):
    x, step = put(np.zeros(3, np.float32)), put(np.zeros(1, np.int64))
    with pytest.raises(ValueError, match='dropout: p='):
        Dropout(p, 1).forward(x, step)
    with pytest.raises(ValueError, match='residual: p='):
        Residual(p, 1).forward(x, x, step)


def test_dropout_changes_with_step_and_key_and_keeps_the_right_share():
    n = 200_000
    x = put(np.ones(n, np.float32))
    masks = [get(Dropout(0.2, key).forward(x, put(np.array([step])))[0]) for key, step in ((1, 1), (1, 2), (2, 1), (1, 1))]
    same(masks[0], masks[3], 'masks[0]')
    for other in masks[1:3]:
        assert 0.6 < (masks[0] == other).mean() < 0.76             # independent: 0.8^2 + 0.2^2 = 0.68
    for mask in masks:
        assert abs((mask > 0).mean() - 0.8) <= 5 * np.sqrt(0.16 / n)
        same(mask[mask > 0], np.float32(1) / (np.float32(1) - np.float32(0.2)), 'mask[mask > 0]')


@pytest.mark.parametrize('n', (1, 4099, 70_001))
def test_residual_drops_what_dropout_drops_and_may_overwrite_what_it_adds(n):
    rng, step = np.random.default_rng(2), np.array([5])
    x, branch = normal(rng, n), normal(rng, n)
    want = x + get(Dropout(0.4, 3).forward(put(branch), put(step))[0])
    close(get(Residual(0.4, 3).forward(put(x), put(branch), put(step))[0]), want, 1e-6)
    for place in (0, 1):
        operands = [x.copy(), branch.copy()]
        launch('residual', operands[place], *operands, step, n, 0.4, 3)
        close(operands[place], want, 1e-6)
        same(operands[1 - place], (x, branch)[1 - place], 'operands[1 - place]')


def test_residual_without_dropout_passes_its_gradient_on_without_a_copy():
    x, step = put(np.ones((2, 3), np.float32)), put(np.zeros(1, np.int64))
    for op, given in ((Residual(0.5, 1), None), (Residual(0.0, 1), step)):
        y, ctx = op.forward(x, 2 * x, given)
        dx, dbranch = op.backward(x, ctx)
        same(get(y), 3, 'y')
        assert dx is x and dbranch is x
    y, ctx = Residual(0.5, 1).forward(x, 2 * x, step)
    dx, dbranch = Residual(0.5, 1).backward(x, ctx)
    same(get(dbranch), (get(y) - 1) / 2, 'dbranch')
    assert dx is x and dbranch is not x


def test_philox_gives_the_published_numbers():
    """Compare the numpy reference with Random123's kat_vectors for philox4x32-10; the op table compares the kernels with it."""
    for counter, key, want in [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0],
         [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ]:
        assert philox4x32(np.array(counter, np.uint32), key).tolist() == want


@pytest.mark.parametrize('op', ['cross_entropy', 'linear_cross_entropy'])
def test_cross_entropy_of_extreme_rows(op):
    """Logits whose exponentials overflow, all-equal rows, and batches without one valid row."""
    x = np.array([[1000, 0, -1000], [88, 89, 90], [5, 5, 5]], np.float32)
    labels = np.array([0, 2, 1], np.int32)
    for now in (labels, np.full(3, -1, np.int32)):
        if op == 'cross_entropy':
            loss_op = CrossEntropy()
        else:
            loss_op = LinearCrossEntropy(parameter('weight', np.eye(3, dtype=np.float32)), of_zeros('bias', 3))
        loss, ctx = loss_op.forward(put(x), put(now))
        loss, dx = get(loss), get(loss_op.backward(put(np.ones(1, np.float32)), ctx))
        close(loss, CrossEntropy.reference(x.astype(np.float64), now))
        assert np.isfinite(dx).all()
        assert get(ctx.valid)[0] == (now >= 0).sum()
        if (now < 0).all():
            same(dx, 0, 'dx')
            assert loss[0] == 0


def large_rows(C, top):
    """Return {kind: (C logits, label)}; the largest logit is about `top`."""
    rng = np.random.default_rng(6)
    x, step = below(top, C, rng), max(np.spacing(np.float32(top)), np.float32(0.125))
    huge = normal(rng, C)
    huge[C // 2] = top
    rising = (top - step * np.arange(C)[::-1]).astype(np.float32)       # every tile of logits has another maximum
    pair = np.zeros(C, np.float32)
    pair[[0, -1]] = top
    return {'near': (x, C // 3), 'far below zero': (-x, C // 3), 'all tied': (np.full(C, top, np.float32), C - 1),
            'one huge': (huge, C // 2), 'one huge, not the label': (huge, C - 1 if C > 2 else 0),
            'rising': (rising, C - 1), 'falling': (rising[::-1].copy(), C - 1), 'two tied': (pair, 0)}


def loss_of_one_row(op, x, label, smoothing):
    """Return the logits (C,) that the op computes, the loss, and the gradient of the logits (C,).  A second row is masked."""
    C, rows, ignored = len(x), np.stack([x, x[::-1]]), np.array([label, -1], np.int32)
    one = put(np.ones(1, np.float32))
    if op == 'cross_entropy':
        op = CrossEntropy(smoothing=smoothing)
        loss, ctx = op.forward(put(rows), put(ignored))
        dx = get(op.backward(one, ctx))
        same(dx[1], 0, 'dx[1]')
        return x, get(loss)[0], dx[0]
    if op == 'mlp_gradients':                           # the hidden layer is 0, so the biases are the logits
        bias = parameter('b2', x)
        op = MLPGradients(of_zeros('w1', 2, 3), of_zeros('b1', 3), of_zeros('w2', C, 3), bias)
        loss, ctx = op.forward(put(np.ones((1, 2), np.uint8)), put(np.zeros(1, np.int64)), put(ignored[:1]))
        op.backward(one, ctx)
        return x, get(loss)[0], get(bias.grad)
    make = LinearCrossEntropy if op == 'linear_cross_entropy' else functools.partial(
        LinearCrossEntropy.rounded(), recipe=Recipe())
    bias, difference = parameter('bias', np.full(C, x.max(), np.float32)), rows - x.max()
    op = make(parameter('weight', np.ascontiguousarray(difference.T)), bias, smoothing=smoothing)
    loss, ctx = op.forward(put(np.eye(2, dtype=np.float32)), put(ignored))
    op.backward(one, ctx)
    return difference[0] + x.max(), get(loss)[0], get(bias.grad)


@pytest.mark.parametrize('op,smoothing,C', [
    *itertools.product(['cross_entropy', 'linear_cross_entropy', 'linear_cross_entropy-in-products'], [0.0, 0.1],
                       [2, 5, 16, 17, 100, 1100]),
    *itertools.product(['mlp_gradients'], [0.0], [2, 10, 17, 128])])
def test_a_large_maximum_costs_no_digit_of_the_loss_or_its_gradient(op, smoothing, C):
    """The rounding errors of exponentials, logarithm and sums are relative to the loss, not to the logits.

    A sum of C equal terms one by one, as in a library that is not optimised, has an error of up to C / 2 eps.
    """
    rtol = (3 + C / 2) * np.finfo(np.float32).eps
    for top in (1.0, 1e2, 1e4, 1e9):
        for kind, (x, label) in large_rows(C, top).items():
            logits, loss, dx = loss_of_one_row(op, x, label, smoothing)
            logits = logits.astype(np.float64)
            want = CrossEntropy.reference(logits[None], np.array([label]), smoothing=smoothing)[0]
            assert abs(loss - want) <= rtol * (1 + want), (kind, top, loss, want)
            e, target = np.exp(logits - logits.max()), (1 - smoothing) * np.eye(C)[label] + smoothing / C
            assert np.abs(dx - (e / e.sum() - target)).max() <= rtol, (kind, top)
            assert abs(dx.astype(np.float64).sum()) <= rtol, (kind, top)


def test_a_nan_logit_is_seen_in_the_loss():
    x = np.zeros((2, 40), np.float32)
    x[1, 3] = np.nan
    loss, _ = CrossEntropy().forward(put(x), put(np.zeros(2, np.int32)))
    assert np.isnan(get(loss)[0])


@pytest.mark.parametrize('row', [LinearCrossEntropyRow(), SmoothedLinearCrossEntropyRow()], ids=lambda row: row.name)
@pytest.mark.parametrize('size', [(3, 60, 40, 150), (5, 60, 8, 20)], ids=['one block', 'two blocks'])
def test_evaluation_gives_the_loss_without_smoothing_and_forms_no_gradients(row, size):
    run, plain = Run(row, size), Run(LinearCrossEntropyRow(), size)
    loss, ctx = run.op.forward(*run.placed.values(), gradients=False)
    assert get(loss)[0] == plain.y[0] and ctx.dx is None and ctx.dweight is None
    assert (run.y[0] == plain.y[0]) == (row.smoothing == 0)


@pytest.mark.parametrize('bad', [-0.1, 1.0, float('nan')])
def test_smoothing_is_a_share_below_one(bad):
    labels = put(np.zeros(3, np.int32))
    with pytest.raises(ValueError, match='cross_entropy_forward: smoothing=.*, expected 0 <= smoothing < 1'):
        CrossEntropy(smoothing=bad).forward(put(np.zeros((3, 2), np.float32)), labels)
    run = Run(LinearCrossEntropyRow(), (3, 4, 6, 5), backward=False)
    op = LinearCrossEntropy(*run.params.values(), smoothing=bad)
    with pytest.raises(ValueError, match='linear_cross_entropy: smoothing=.*, expected 0 <= smoothing < 1'):
        op.forward(*run.placed.values())


def test_a_smoothed_loss_is_least_at_its_target():
    """If the logits are the logarithm of the target, the loss is the entropy of the target, and the gradient is 0."""
    V, s = 37, 0.2
    target = (1 - s) * np.eye(V) + s / V
    op = LinearCrossEntropy(parameter('weight', np.log(target).T.astype('f', order='C')), of_zeros('bias', V), smoothing=s)
    loss, ctx = op.forward(put(np.eye(V, dtype=np.float32)), put(np.arange(V, dtype=np.int32)))
    close(get(loss), [-(target[0] * np.log(target[0])).sum()], 1e-6)
    assert np.abs(get(ctx.dx)).max() <= 1e-6 and np.abs(get(ctx.dweight)).max() <= 1e-6


def test_masked_rows_do_not_influence_the_loss():
    """The output layer computes valid rows only, so it never reads NaN in a masked row."""
    row, size = LinearCrossEntropyRow(), (3, 60, 40, 150)
    run = Run(row, size)
    x, labels = run.built.inputs['x'].copy(), run.built.constants['labels']
    x[labels == 0] = np.nan
    loss, ctx = run.op.forward(put(x), put(labels))
    loss, dx = get(loss), get(run.op.backward(put(run.dy), ctx))
    same(dx, run.grads['x'], 'dx')
    same(dx[labels == 0], 0, 'dx[labels == 0]')
    assert loss[0] == run.y[0]


def gradients_added_in_forward(run, labels=None):
    """Return the loss, dx and the parameter gradients, which start as in `run`, with run.dy given to forward."""
    op = run.built.op(**{name: parameter(name, value, run.noise[name].copy()) for name, value in run.built.params.items()})
    dloss, x = put(run.dy), run.placed['x']
    loss, ctx = op.forward(x, run.placed['labels'] if labels is None else put(labels), dloss=dloss)
    grads = {name: get(p.grad).copy() for name, p in (('weight', op.weight), ('bias', op.bias))}
    dx = get(op.backward(dloss, ctx))
    for name, p in (('weight', op.weight), ('bias', op.bias)):
        same(get(p.grad), grads[name], f'd {name}')                     # backward adds nothing
    return get(loss), dx, grads


OUTPUT_LAYERS = [pytest.param(row, size, id=f'{row.name}-{"x".join(map(str, size))}')
                 for row in (LinearCrossEntropyRow(), SmoothedLinearCrossEntropyRow()) for size in (*row.sizes, row.large)]


@pytest.mark.parametrize('row,size', OUTPUT_LAYERS)
def test_forward_with_the_upstream_gradient_adds_what_backward_adds_without_it(row, size):
    """The op table compares the gradients of backward with the formula, for the same random upstream gradient."""
    run = Run(row, size)
    loss, dx, grads = gradients_added_in_forward(run)
    same(loss, run.y, 'loss')
    close(dx, run.grads['x'], 1e-6, 'dx')
    for name, grad in grads.items():
        want = run.noise[name] + run.grads[name]
        near(grad, want, 1e-6 * (np.abs(run.noise[name]).max() + np.abs(want).max()), f'd {name}')


def test_two_uses_of_an_output_layer_add_their_gradients_in_forward():
    run, one = Run(LinearCrossEntropyRow(), (5, 70, 17, 1100)), put(np.ones(1, np.float32))
    weight, bias = (parameter(name, value) for name, value in run.built.params.items())
    op, inputs = LinearCrossEntropy(weight, bias, ignore=0), (run.placed['x'], run.placed['labels'])
    _, first = op.forward(*inputs, dloss=one)
    once = get(weight.grad).copy(), get(bias.grad).copy()
    _, second = op.forward(*inputs, dloss=one)
    same(get(op.backward(one, first)), get(op.backward(one, second)), 'dx')
    for p, grad in zip((weight, bias), once, strict=True):
        assert np.abs(grad).max() > 1e-3
        close(get(p.grad), 2 * grad, 1e-6, f'd {p.name}')


def test_forward_without_a_valid_row_adds_nothing_to_the_gradients():
    run = Run(LinearCrossEntropyRow(), (5, 70, 17, 1100), backward=False)
    loss, dx, grads = gradients_added_in_forward(run, np.zeros_like(run.built.constants['labels']))
    same(loss, 0, 'loss')
    same(dx, 0, 'dx')
    for name, grad in grads.items():
        same(grad, run.noise[name], f'd {name}')


def test_an_evaluation_does_not_use_an_upstream_gradient():
    run = Run(SmoothedLinearCrossEntropyRow(), (3, 4, 6, 5), backward=False)
    loss, ctx = run.op.forward(*run.placed.values(), gradients=False, dloss=put(run.dy))
    same(get(loss), get(run.op.forward(*run.placed.values(), gradients=False)[0]), 'loss')
    for name, p in run.params.items():
        same(get(p.grad), run.noise[name], f'd {name}')
    with pytest.raises(ValueError, match='gradients=False'):
        run.op.backward(put(run.dy), ctx)


def test_backward_refuses_an_upstream_gradient_that_forward_did_not_use():
    run = Run(LinearCrossEntropyRow(), (3, 4, 6, 5), backward=False)
    _, ctx = run.op.forward(*run.placed.values(), dloss=put(run.dy))
    with pytest.raises(ValueError, match='another dloss than forward, expected the same array'):
        run.op.backward(put(run.dy.copy()), ctx)
    with pytest.raises(ValueError, match=r'dloss: expected shape \(1,\), got \(2,\)'):
        run.op.forward(*run.placed.values(), dloss=put(np.ones(2, np.float32)))
    loss, valid, x = np.zeros(1, np.float32), np.zeros(1, np.int32), np.zeros((2, 3), np.float32)
    weight, bias, labels = np.zeros((4, 3), np.float32), np.zeros(4, np.float32), np.zeros(2, np.int32)
    scratch = np.zeros(backend.work_size('linear_cross_entropy', 2, 3, 4, False, False, False), np.float32)
    with pytest.raises(ValueError, match='linear_cross_entropy: dloss without dx, dweight and dbias, expected NULL'):
        launch('linear_cross_entropy', loss, valid, None, None, None, run.dy, x, weight, bias, labels, scratch,
               2, 3, 4, -1, 0.0, False)


@of_threads
@pytest.mark.parametrize('row', [LinearCrossEntropyRow(), SmoothedLinearCrossEntropyRow()], ids=lambda row: row.name)
def test_gradients_added_in_forward_are_the_same_bits_for_any_number_of_threads(row):
    before, results = backend.threads(), []
    try:
        for threads in (1, 2, 3, 8):
            backend.set_threads(threads)
            results.append(gradients_added_in_forward(Run(row, row.large, backward=False)))
    finally:
        backend.set_threads(before)
    for _, dx, grads in results[1:]:
        same(dx, results[0][1], 'dx')
        for name, grad in grads.items():
            same(grad, results[0][2][name], f'd {name}')


def test_predict_is_the_argmax_of_the_logits():
    run = Run(LinearCrossEntropyRow(), (3, 60, 40, 150))
    x = run.built.inputs['x'][0]
    want = Linear.reference(x.astype(np.float64), *run.built.params.values()).argmax(-1)
    same(get(run.op.predict(put(x))), want, 'predictions')
    same(get(run.op.predict(put(x), run.op.prepare())), want, 'predictions of prepared weights')


@pytest.mark.parametrize('row,size', [(LinearOfSequencesRow(), (5, 60, 300, 300)), (LinearOfSequencesRow(), (2, 3, 7, 7)),
                                      (FeedForwardRow(), (5, 60, 300, 70)), (FeedForwardRow(), (2, 3, 4, 5)),
                                      (LayerNormRow(), (5, 60, 300)), (LayerNormRow(), (2, 3, 5))],
                         ids=lambda value: getattr(value, 'name', None))
@pytest.mark.parametrize('where', ['elsewhere', 'dy'])
def test_backward_adds_dx_to_the_array_it_is_given(row, size, where):
    """A residual connection adds two gradients; its dx and dbranch may be the same array."""
    run = Run(row, size)
    start = run.dy.copy() if where == 'dy' else normal(np.random.default_rng(2), *run.grads['x'].shape)
    want, into = start.astype(np.float64) + run.grads['x'], put(start)
    for p in run.params.values():
        p.grad[...] = 0
    got = run.op.backward(into if where == 'dy' else put(run.dy), run.ctx, into=into)
    assert got is into
    close(get(got), want, 1e-6)
    for name, p in run.params.items():
        close(get(p.grad), run.grads[name], 1e-5, f'd {name}')


def test_backward_refuses_an_array_of_another_shape_to_add_to():
    for row, size in ((LinearRow(), (3, 5, 7)), (FeedForwardRow(), (2, 3, 4, 7)), (LayerNormRow(), (2, 3, 5))):
        run = Run(row, size)
        with pytest.raises(ValueError, match='into: expected shape'):
            run.op.backward(put(run.dy), run.ctx, into=put(np.zeros(5, np.float32)))


def test_what_works_on_rows_takes_one_row_and_none():
    for row, size in ((LinearRow(), (3, 5, 7)), (FeedForwardRow(), (1, 3, 4, 7)), (LayerNormRow(), (1, 3, 5))):
        run = Run(row, size)
        x = run.built.inputs['x'].reshape(3, -1)
        y, ctx = run.op.forward(put(x[1]))
        assert y.shape == run.y.shape[-1:]
        close(get(y), run.y.reshape(3, -1)[1], 1e-6)
        close(get(run.op.backward(put(run.dy.reshape(3, -1)[1]), ctx)), run.grads['x'].reshape(3, -1)[1], 1e-6)
        before = [get(p.grad).copy() for p in run.params.values()]
        y, ctx = run.op.forward(put(x[:0]))
        assert run.op.backward(y, ctx).shape == x[:0].shape
        for p, kept in zip(run.params.values(), before, strict=True):
            same(get(p.grad), kept, f'd {p.name}')


def test_positions_begin_where_they_are_told_to():
    op, x = Positions(5, longest=12, scale=2.0), normal(np.random.default_rng(2), 12, 3, 5)
    whole = get(op.forward(put(x))[0])
    for first in (0, 1, 9, 11):
        y, ctx = op.forward(put(x[first:]), first)
        same(get(y), whole[first:], 'y')
        same(get(op.backward(y, ctx)), 2 * get(y), 'dx')


@pytest.mark.parametrize('T,first', [(13, 0), (1, 12), (5, 8), (1, -1)])
def test_positions_beyond_the_table_are_refused(T, first):
    op = Positions(5, longest=12, name='places')
    with pytest.raises(ValueError, match=f'places: T={T} steps from first={first} on do not fit in a table of longest=12'):
        op.forward(put(np.zeros((T, 3, 5), np.float32)), first)


def test_packed_positions_equal_the_positions_of_steps():
    op, x = Positions(8, longest=12, scale=2.0), normal(np.random.default_rng(2), 7, 3, 8)
    want = get(op.forward(put(x), 4)[0])
    rows = np.random.default_rng(3).permutation(21)
    y, ctx = op.forward(put(x.reshape(21, 8)[rows]), 4, put((rows // 3).astype(np.int32)))
    same(get(y), want.reshape(21, 8)[rows], 'y')
    same(get(op.backward(y, ctx)), 2 * get(y), 'dx')
    assert op.forward(put(np.zeros((0, 8), 'f')), 0, put(np.zeros(0, np.int32)))[0].shape == (0, 8)


@pytest.mark.parametrize('bad', [-1, 8])
def test_packed_positions_outside_the_table_are_refused_with_their_row(bad):
    op = Positions(4, longest=12)
    with pytest.raises(ValueError, match=rf'add_positions_forward: positions\[2\]={bad}, expected 0 to 7'):
        op.forward(put(np.zeros((3, 4), 'f')), 4, put(np.array([0, 7, bad], np.int32)))
        backend.synchronize()
    with pytest.raises(ValueError, match='places: T=1 steps from first=12 on do not fit in a table of longest=12'):
        Positions(4, longest=12, name='places').forward(put(np.zeros((3, 4), 'f')), 12, put(np.zeros(3, np.int32)))


def test_the_table_of_positions_is_that_of_the_formula():
    table = get(Positions(7, longest=900).table)
    assert table.shape == (900, 7) and table.dtype == np.float32
    want = Positions.reference(np.zeros((900, 1, 7)))[:, 0]
    assert np.abs(table - want).max() <= 1.01 * 2**-25          # half the spacing of floats below 1


def layer_norm(C, weight=1.0, bias=0.0, **settings):
    return LayerNorm(parameter('weight', np.full(C, weight, np.float32)), parameter('bias', np.full(C, bias, np.float32)),
                     **settings)


def of_work(R, C):
    return np.empty(backend.work_size('layer_norm_backward', R, C), np.float32)


def norm_of_residual(C, rng, p=0.3, key=11):
    """Return the fused op, then the two ops that it replaces.  All have the same parameters; their gradients differ."""
    values, start = (normal(rng, C), normal(rng, C)), (normal(rng, C), normal(rng, C))

    def parameters():
        return [Parameter(name, put(value), put(grad.copy())) for name, value, grad in zip('wb', values, start, strict=True)]
    return ResidualNorm(*parameters(), p, key), Residual(p, key), LayerNorm(*parameters())


@pytest.mark.parametrize('step', [None, 7 + (3 << 32)], ids=['no-dropout', 'dropout'])
@pytest.mark.parametrize('shape', [(1, 1), (5, 3), (9, 13, 256), (70, 33), (200, 16), (3, 1000), (9, 2052), (2, 257), (3, 8200),
                                   (3, 2051)], ids=lambda shape: 'x'.join(map(str, shape)))
def test_residual_norm_has_the_bits_of_residual_and_layer_norm(shape, step):
    rng = np.random.default_rng(2)
    fused, residual, norm = norm_of_residual(shape[-1], rng)
    x, branch, dy = (put(normal(rng, *shape)) for _ in range(3))
    step = None if step is None else put(np.array([step]))
    y, ctx = fused.forward(x, branch, step)
    total, c1 = residual.forward(x, branch, step)
    want, c2 = norm.forward(total)
    for name, ours, theirs in (('y', y, want), ('sum', ctx.sum, total), ('mean', ctx.mean, c2.mean),
                               ('rstd', ctx.rstd, c2.rstd)):
        same(get(ours), get(theirs), name)
    dx, dbranch = fused.backward(dy, ctx)
    want_dx, want_dbranch = residual.backward(norm.backward(dy, c2), c1)
    same(get(dx), get(want_dx), 'dx')
    same(get(dbranch), get(want_dbranch), 'dbranch')
    assert (dbranch is dx) == (step is None)
    same(get(fused.weight.grad), get(norm.weight.grad), 'd weight')
    same(get(fused.bias.grad), get(norm.bias.grad), 'd bias')


@pytest.mark.parametrize('size,settings', [
    ((1, 16, 5, 48, 16, 3, 3), dict(padding=1)), ((1, 16, 5, 28, 16, 3, 2), {}), ((1, 16, 5, 28, 16, 2, 3), {}),
    *(((1, 16, 5, 28, 16, 3, 3), {name: pair}) for name in ('stride', 'dilation') for pair in ((1, 2), (2, 1))),
    ((1, 32, 5, 28, 32, 3, 3), dict(groups=2)), ((1, 16, 5, 28, 15, 3, 3), {}), ((1, 15, 5, 28, 16, 3, 3), {})], ids=str)
def test_a_convolution_that_lacks_one_property_of_those_computed_in_tiles(size, settings):
    """The first of the sizes has all, and a last vector of tiles beyond the row."""
    row = Conv2dRow('-tiles-or-not', **settings)
    test_table.test_forward_equals_the_formula_in_float64(row, size)
    test_table.test_backward_equals_the_slope_along_a_random_direction(row, size)


@pytest.mark.parametrize('with_lengths', [False, True])
def test_a_gru_without_dx_has_the_same_bits_in_all_other_gradients(monkeypatch, with_lengths):
    run = Run(GRURow(False, True, with_lengths), (4, 7, 8, 33))
    for name, p in run.params.items():
        p.grad[...] = put(run.noise[name])
    seen = []

    def without_dx(name, first, *values):
        if name == 'gru_backward':
            seen.append(first.shape)
            first = None
        backend.launch(name, first, *values)
    monkeypatch.setattr('pyops.ops.gru.launch', without_dx)
    again = run.backward()
    assert seen == [run.grads['x'].shape]
    for name in run.grads.keys() - {'x'}:
        same(again[name], run.grads[name], f'd {name}')


def test_residual_norm_with_dropout_of_nothing_has_the_bits_without_dropout():
    rng = np.random.default_rng(3)
    fused = norm_of_residual(33, rng, p=0.0)[0]
    x, branch, dy = (put(normal(rng, 70, 33)) for _ in range(3))
    results = []
    for step in (put(np.array([7])), None):
        y, ctx = fused.forward(x, branch, step)
        results.append([get(part).copy() for part in (y, *fused.backward(dy, ctx))])
    for name, ours, theirs in zip(('y', 'dx', 'dbranch'), *results, strict=True):
        same(ours, theirs, name)


@pytest.mark.parametrize('C', [5, 256, 8200])
def test_residual_norm_may_overwrite_what_it_adds_and_its_gradient(C):
    rng, step, R = np.random.default_rng(2), np.array([5]), 70
    op = norm_of_residual(C, rng)[0]
    x, branch, dy = (normal(rng, R, C) for _ in range(3))
    y, ctx = op.forward(put(x), put(branch), put(step))
    before = get(op.weight.grad).copy(), get(op.bias.grad).copy()
    want = op.backward(put(dy), ctx)
    for place in (0, 1):
        operands, again = [x.copy(), branch.copy()], np.empty_like(x)
        launch('residual_norm_forward', again, operands[place], np.empty(R, 'f'), np.empty(R, 'f'), *operands, step,
               get(op.weight.value), get(op.bias.value), R, C, op.p, op.key, op.eps)
        same(again, get(y), 'y')
        same(operands[place], get(ctx.sum), 'sum')
        same(operands[1 - place], (x, branch)[1 - place], 'the other operand')
    (dweight, dbias), dbranch = before, np.empty_like(x)
    launch('residual_norm_backward', dy, dbranch, dweight, dbias, dy, get(ctx.sum), step, get(op.weight.value), get(ctx.mean),
           get(ctx.rstd), of_work(R, C), R, C, op.p, op.key, 0)
    for name, ours, theirs in (('dx', dy, want[0]), ('dbranch', dbranch, want[1]), ('d weight', dweight, op.weight.grad),
                               ('d bias', dbias, op.bias.grad)):
        same(ours, get(theirs), name)


@pytest.mark.parametrize('C', [5, 256, 8200])
@pytest.mark.parametrize('step', [None, 5], ids=['no-dropout', 'dropout'])
def test_residual_norm_adds_the_gradient_of_another_use_of_the_sum(C, step):
    """As in a pre-norm transformer: layer norm adds to the gradient of the sum, then all of it goes to the branch."""
    rng = np.random.default_rng(2)
    fused, residual, norm = norm_of_residual(C, rng)
    x, branch, dy, dsum = (normal(rng, 70, C) for _ in range(4))
    step = None if step is None else put(np.array([step]))
    _, ctx = fused.forward(put(x), put(branch), step)
    total, c1 = residual.forward(put(x), put(branch), step)
    _, c2 = norm.forward(total)
    into, other = put(dsum.copy()), put(dsum.copy())
    dx, dbranch = fused.backward(put(dy), ctx, into=into)
    want_dx, want_dbranch = residual.backward(norm.backward(put(dy), c2, into=other), c1)
    assert dx is into
    for name, ours, theirs in (('dx', dx, want_dx), ('dbranch', dbranch, want_dbranch),
                               ('d weight', fused.weight.grad, norm.weight.grad), ('d bias', fused.bias.grad, norm.bias.grad)):
        same(get(ours), get(theirs), name)


@pytest.mark.parametrize('step', [None, 7 + (3 << 32)], ids=['no-dropout', 'dropout'])
@pytest.mark.parametrize('N,V,E', [(1, 1, 1), (3, 5, 7), (9, 3, 34), (40, 10, 64), (33, 8, 257), (700, 20, 16)])
def test_embedding_positions_has_the_bits_of_its_three_ops(N, V, E, step):
    rng = np.random.default_rng(4)
    value, start, dy = normal(rng, V, E), normal(rng, V, E), put(normal(rng, N, E))
    fused, alone = (Parameter('table.weight', put(value), put(start.copy())) for _ in range(2))
    positions = Positions(E, 12, 1.75)
    ids, at = put(rng.integers(0, V, N).astype(np.int32)), put(rng.integers(0, 12, N).astype(np.int32))
    step = None if step is None else put(np.array([step]))
    op, embedding, dropout = EmbeddingPositions(fused, positions, 0.3, 11), Embedding(alone), Dropout(0.3, 11)
    y, ctx = op.forward(ids, at, step)
    op.backward(dy, ctx)
    e, c1 = embedding.forward(ids)
    want, c2 = positions.forward(e, positions=at)
    if step is not None:
        want, c3 = dropout.forward(want, step)
        dy = dropout.backward(dy, c3)
    embedding.backward(positions.backward(dy, c2), c1)
    same(get(y), get(want), 'y')
    same(get(fused.grad), get(alone.grad), 'd weight')
    later, _ = op.forward(ids, None, None, first=7)
    want, _ = positions.forward(embedding.forward(ids)[0][None], 7)
    same(get(later), get(want)[0], 'all rows at one position')


def test_embedding_positions_names_what_is_outside_a_table():
    op = EmbeddingPositions(parameter('table.weight', np.ones((5, 4), np.float32)), Positions(4, 6))
    ids, at = np.array([0, 4, 5], np.int32), np.array([0, 5, 6], np.int32)
    with pytest.raises(ValueError, match=r'embedding_positions_forward: ids\[2\]=5, expected 0 to 4'):
        op.forward(put(ids), put(at[:1].repeat(3)))
    with pytest.raises(ValueError, match=r'embedding_positions_forward: positions\[2\]=6, expected 0 to 5'):
        op.forward(put(ids[:1].repeat(3)), put(at))
    with pytest.raises(ValueError, match='table: first=6, expected 0 to 5, the last row of the table of positions'):
        op.forward(put(ids[:1]), first=6)
    with pytest.raises(ValueError, match='embedding_positions_forward: p=1, expected 0 <= p < 1'):
        EmbeddingPositions(op.weight, op.encoding, 1.0).forward(put(ids[:1]))


@pytest.mark.parametrize('settings,message', [(dict(p=1.0), 'p=1, expected 0 <= p < 1'),
                                              (dict(eps=-1.0), 'eps=-1, expected at least 0')])
def test_residual_norm_refuses_settings_out_of_range(settings, message):
    op = ResidualNorm(*(parameter(name, np.ones(3, np.float32)) for name in 'wb'), **settings)
    x = put(np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match=f'residual_norm_forward: {message}'):
        op.forward(x, x, put(np.array([1])))


@pytest.mark.parametrize('with_dropout', [False, True])
def test_residual_norm_needs_an_array_for_dbranch_just_if_it_drops(with_dropout):
    x, row, step = np.zeros((2, 3), np.float32), np.zeros(3, np.float32), np.array([1]) if with_dropout else None
    expected = 'an array with dropout' if with_dropout else 'NULL without dropout'
    with pytest.raises(ValueError, match=f'residual_norm_backward: dbranch: expected {expected}'):
        launch('residual_norm_backward', x, None if with_dropout else x, row, row, x, x, step, row, row[:2], row[:2],
               of_work(2, 3), 2, 3, 0.5, 1, 0)


@pytest.mark.parametrize('C', (1, 3, 64, 333))
def test_layer_norm_of_a_constant_row_is_the_bias(C):
    """This holds for large constants, too.  rstd is 316, so one rounding error in the mean would change y by 0.3."""
    op = layer_norm(C, 2.0, 0.7)
    x = np.repeat(np.array([[0], [-3.3], [10000.3], [1e6 / 3]], np.float32), C, 1)
    y, ctx = op.forward(put(x))
    same(get(y), np.float32(0.7), 'y')
    same(get(ctx.mean), x[:, 0], 'mean')
    close(get(ctx.rstd), np.full(4, 1 / np.sqrt(1e-5)), 1e-5)
    assert np.isfinite(get(op.backward(put(normal(np.random.default_rng(2), 4, C)), ctx))).all()


@pytest.mark.parametrize('C', (5, 256, 1001))
def test_layer_norm_far_from_zero_loses_no_more_than_the_rounding_of_the_mean(C):
    """The spacing of floats at 1e4 is 2^-10; E[x^2] - E[x]^2 would lose all digits of the variance."""
    x = normal(np.random.default_rng(2), 20, C) + np.float32(1e4)
    y, ctx = layer_norm(C).forward(put(x))
    y, mean, rstd, exact = get(y), get(ctx.mean), get(ctx.rstd), x.astype(np.float64)
    assert np.abs(mean - exact.mean(-1)).max() <= 1.01 * 2**-11
    close(rstd, 1 / np.sqrt(exact.var(-1) + 1e-5), 1e-6)
    assert (np.abs(y - LayerNorm.reference(exact, 1, 0)) <= 1.01 * 2**-11 * rstd[:, None] + 1e-5).all()


def test_layer_norm_does_not_see_a_gradient_that_is_the_same_everywhere():
    """So other tests need a random dy: with a constant one, any dx near 0 would pass."""
    op = layer_norm(256)
    _, ctx = op.forward(put(normal(np.random.default_rng(2), 7, 256)))
    assert np.abs(get(op.backward(put(np.ones((7, 256), np.float32)), ctx))).max() <= 1e-5


@pytest.mark.parametrize('eps', (-1e-5, float('nan')))
def test_layer_norm_refuses_a_negative_eps(eps):
    with pytest.raises(ValueError, match='layer_norm_forward: eps=.*, expected at least 0'):
        layer_norm(3, eps=eps).forward(put(np.zeros((2, 3), np.float32)))


def test_layer_norm_wants_a_column():
    with pytest.raises(ValueError, match='layer_norm_forward: R=2 C=0'):
        layer_norm(0).forward(put(np.zeros((2, 0), np.float32)))


@pytest.mark.parametrize('row,size', [(GRURow(before, True), (4, 13, 8, 33)) for before in (False, True)]
                         + [(EmbeddingGRURow(before, True, True), (4, 13, 30, 8, 5, 33)) for before in (False, True)],
                         ids=lambda value: getattr(value, 'name', None))
@pytest.mark.parametrize('which', ['dh', 'dh_last', 'both'])
def test_gru_takes_the_gradient_of_the_last_state_apart(row, size, which):
    """dh_last is added to the gradient of h[T-1].  None means zeros."""
    run = Run(row, size, backward=False)
    dh, last = (run.dy, run.dy[0] * 3)
    whole = np.zeros_like(dh) if which == 'dh_last' else dh.copy()
    if which != 'dh':
        whole[-1] += last
    want = run.op.backward(put(whole), run.ctx)
    got = run.op.backward(None if which == 'dh_last' else put(dh), run.ctx, None if which == 'dh' else put(last))
    for a, b in zip(got, want, strict=True):
        if b is not None:                       # ids have no gradient
            close(get(a), get(b), 1e-6)


@of_threads
@pytest.mark.parametrize('reset_before', [False, True])
def test_a_gru_of_few_long_rows_gives_the_same_bits_for_any_number_of_threads(reset_before):
    """The recurrent weights are not packed.  A thread has one, two or three rows."""
    row, size, before, runs = GRURow(reset_before, True), (3, 3, 5, 1000), backend.threads(), []
    try:
        for threads in (1, 2, 3):
            backend.set_threads(threads)
            runs.append(Run(row, size))
    finally:
        backend.set_threads(before)
    close(runs[0].y, runs[0].reference(runs[0].variables()))
    for run in runs[1:]:
        same(run.y, runs[0].y, 'y')
        for name, grad in run.grads.items():
            same(grad, runs[0].grads[name], f'd {name}')


@pytest.mark.parametrize('lengths', [(4, 2, 0, 3, 4, 1, 1), (0, 0, 1, 0, 0, 0, 0), (0,) * 7, (4,) * 7, (2,), (3, 1, 2)],
                         ids=lambda lengths: '-'.join(map(str, lengths)))
@pytest.mark.parametrize('with_h0', [True, False])
@pytest.mark.parametrize('reset_before', [False, True])
def test_a_gru_of_sentences_with_lengths_is_one_of_all_steps_that_is_not_looked_at_behind_them(reset_before, with_h0, lengths):
    """h has the same bits.  After the lengths, dh and dh_last are ignored."""
    T, B, I, H = 4, len(lengths), 8, 33
    row, before = GRURow(reset_before, with_h0), np.array(lengths, np.int32)
    run = Run(row, (T, B, I, H), backward=False)
    has = np.arange(T)[:, None, None] < before[:, None]
    x, h0 = run.placed['x'], run.placed.get('h0')
    dh, last = run.dy, normal(np.random.default_rng(3), B, H)
    want = run.op.backward(put(dh * has), run.ctx, put(last * has[-1]))
    sums = [get(p.grad).copy() for p in run.params.values()]
    h, ctx = run.op.forward(x, h0, put(before))
    same(get(h), run.y * has, 'h')
    same(get(ctx.gates), get(run.ctx.gates) * has, 'gates')
    for noise, p in zip(run.noise.values(), run.params.values(), strict=True):
        p.grad[...] = put(noise)
    dx, dh0 = run.op.backward(put(dh), ctx, put(last))
    close(get(dx), get(want[0]), 1e-5, 'd x')
    same(get(dx) * ~has, 0, 'dx after the lengths')
    assert (dh0 is None) == (not with_h0)
    if with_h0:
        close(get(dh0), get(want[1]), 1e-5, 'd h0')
    for p, sum_ in zip(run.params.values(), sums, strict=True):
        close(get(p.grad), sum_, 1e-5, f'd {p.name}')


def test_a_gru_refuses_a_length_that_is_none():
    row = GRURow(False, True)
    run = Run(row, (4, 3, 8, 5), backward=False)
    for bad in (-1, 5):
        with pytest.raises(ValueError, match=rf'gru_forward: lengths\[1\]={bad}, expected 0 to 4'):
            run.op.forward(*run.placed.values(), put(np.array([4, bad, 0], np.int32)))
    with pytest.raises(ValueError, match=r'lengths: expected shape \(3,\)'):
        run.op.forward(*run.placed.values(), put(np.zeros(4, np.int32)))


def test_an_embedding_gru_is_an_embedding_a_context_and_a_gru():
    """The results differ only by the order of sums.  Some words occur often, some once, some never."""
    run, (T, B, C) = Run(EmbeddingGRURow(False, True, True), (9, 24, 40, 24, 16, 64)), (9, 24, 16)
    table, *weights = (parameter(name, value) for name, value in run.built.params.items())
    embedding, concat, gru = Embedding(table), ConcatContext(), GRU(*weights)
    x, c1 = embedding.forward(run.placed['ids'])
    both, c2 = concat.forward(x, run.placed['context'])
    h, c3 = gru.forward(both, run.placed['h0'])
    close(run.y, get(h), 1e-6)
    dboth, dh0 = gru.backward(put(run.dy), c3)
    dx, dcontext = concat.backward(dboth, c2)
    embedding.backward(dx, c1)
    assert get(dcontext).shape == (B, C) and len(np.unique(run.built.constants['ids'])) < T * B
    grads = dict(context=dcontext, h0=dh0) | {p.name: p.grad for p in (table, *weights)}
    for name, want in grads.items():
        close(run.grads[name], get(want), 1e-5, f'd {name}')


def test_an_embedding_gru_says_what_it_wants():
    def make(table=(4, 2), w_ih=(9, 5)):
        return EmbeddingGRU(*(of_zeros(name, *shape) for name, shape in dict(
            table=table, w_ih=w_ih, w_hh=(9, 3), b_ih=(9,), b_hh=(9,)).items()))
    ids = put(np.zeros((2, 3), np.int32))
    with pytest.raises(ValueError, match=r'w_ih: expected shape \(3H, E \+ C\) with E = 6 as in table, got \(9, 5\)'):
        make(table=(4, 6))
    with pytest.raises(ValueError, match=r'context: expected shape \(3, 3\), got None'):
        make().forward(ids)
    with pytest.raises(ValueError, match=r'context: expected shape \(3, 0\), got \(3, 2\)'):
        make(w_ih=(9, 2)).forward(ids, put(np.zeros((3, 2), np.float32)))
    with pytest.raises(ValueError, match=r'h0: expected shape \(3, 3\)'):
        make(w_ih=(9, 2)).forward(ids, None, put(np.zeros((3, 2), np.float32)))


def test_kernels_refuse_an_input_product_that_is_half_given():
    x = [put(np.zeros(64, np.float32)) for _ in range(12)]
    ids = put(np.zeros(2, np.int32))
    with pytest.raises(ValueError, match='gru_forward: I=0, expected 0 if x is NULL, else at least 1'):
        launch('gru_forward', *x[:2], None, x[2], None, None, None, None, *x[3:8], 1, 1, 0, 0, 2, 0, 0)
    with pytest.raises(ValueError, match='gru_forward: I=0, expected 0 if a is given, else at least 1'):
        launch('gru_forward', *x[:2], None, None, None, None, None, None, *x[3:8], 1, 1, 0, 0, 2, 0, 0)
    with pytest.raises(ValueError, match='gru_backward: I=3, expected 0 if x is NULL, else at least 1'):
        launch('gru_backward', None, None, *x[:5], None, None, None, None, None, None, *x[5:10], 1, 1, 0, 3, 2, 0, 0)
    with pytest.raises(ValueError, match='embedding_linear_forward: C=2, expected 0 if context is NULL, else at least 1'):
        launch('embedding_linear_forward', x[0], x[1], ids, None, None, *x[2:5], 1, 2, 0, 3, 2, 2, 2)
    with pytest.raises(ValueError, match='embedding_linear_backward: ld=1, expected at least O=2'):
        launch('embedding_linear_backward', x[0], None, None, *x[1:5], ids, None, None, *x[5:7], 1, 2, 0, 3, 2, 0, 2, 1, 0)
    with pytest.raises(ValueError, match='embedding_linear_forward: T=1 B=2 V=0 E=2 C=0 O=2'):
        launch('embedding_linear_forward', x[0], x[1], ids, None, None, *x[2:5], 1, 2, 0, 0, 2, 0, 2)


# ---- attention ----------------------------------------------------------------------------------

def attend(op, q, k, v, *lengths_and_step):
    """Run forward and return y, ctx."""
    y, ctx = op.forward(*(None if a is None else put(a) for a in (q, k, v, *lengths_and_step)))
    return get(y), ctx


def attend_back(op, dy, ctx):
    return tuple(get(grad) for grad in op.backward(put(dy), ctx))


def attention_run(op, size, lengths=None, step=None, seed=0):
    """Return inputs (q, k, v), dy, y and the gradients."""
    (Tq, Tk, B, D), rng = size, np.random.default_rng(seed)
    inputs, dy = [normal(rng, T, B, D) for T in (Tq, Tk, Tk)], normal(rng, Tq, B, D)
    y, ctx = attend(op, *inputs, lengths, step)
    return inputs, dy, y, attend_back(op, dy, ctx)


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('Tq,Tk', [(1, 4), (5, 5), (9, 7), (40, 70)])
def test_a_sentence_of_padding_alone_gives_zeros_and_disturbs_no_other(Tq, Tk, causal):
    op, lengths = Attention(2, causal), np.array([Tk, 0, 3], np.int32)
    (q, k, v), dy, y, grads = attention_run(op, (Tq, Tk, 3, 6), lengths)
    for result in (y, *grads):
        same(result[:, 1], 0, 'result[:, 1]')
        assert np.isfinite(result).all()
    top, total = get(attend(op, q, k, v, lengths)[1].stats)
    same(top[1], -np.inf, 'top[1]')
    same(total[1], 0, 'total[1]')
    others = [np.ascontiguousarray(x[:, [0, 2]]) for x in (q, k, v, dy)]
    y2, ctx = attend(op, *others[:3], lengths[[0, 2]])
    for got, want in zip((y, *grads), (y2, *attend_back(op, others[3], ctx)), strict=True):
        same(got[:, [0, 2]], want, 'got[:, [0, 2]]')
        assert np.abs(want).max() > 1e-3


def test_keys_beyond_a_length_are_not_even_read():
    lengths, op = np.array([7, 70], np.int32), Attention(2)
    (q, k, v), dy, y, grads = attention_run(op, (40, 90, 2, 10), lengths)
    for x in (k, v):
        x[7:, 0] = x[70:, 1] = np.nan
    y2, ctx = attend(op, q, k, v, lengths)
    same(y2, y, 'y')
    for got, want in zip(attend_back(op, dy, ctx), grads, strict=True):
        same(got, want)
    assert all((grad[7:, 0] == 0).all() and (grad[70:, 1] == 0).all() for grad in grads[1:])


def test_gradients_pass_through_masks(torch):
    """Every row that is not masked has a gradient, equal to PyTorch's: of values, queries and keys."""
    lengths, op = np.array([9, 4, 6], np.int32), Attention(4, causal=True)
    inputs, dy, _, grads = attention_run(op, (9, 9, 3, 32), lengths)
    leaves = [torch.tensor(x.astype(np.float64), requires_grad=True) for x in inputs]
    AttentionRow(causal=True).torch(torch, *leaves, op, torch.tensor(lengths)).backward(torch.tensor(dy.astype(np.float64)))
    for name, got, leaf in zip('qkv', grads, leaves, strict=True):
        close(got, leaf.grad.numpy(), 5e-5, f'd {name}')
        for b, length in enumerate(lengths):
            # the first query sees one key, whose weight is always 1
            taking_part = got[1:, b] if name == 'q' else got[:length, b]
            assert (np.abs(taking_part).max(-1) > 1e-3).all(), f'd{name} of sentence {b}'


@pytest.mark.parametrize('Tq,Tk', [(2, 6), (9, 9), (5, 130)])
def test_dropout_of_the_weights_is_the_counter_s(Tq, Tk):
    """With equal scores and the identity as values, y contains every element of the mask."""
    B, heads, p, step, key = 2, 3, 0.4, 5 + (9 << 32), 0xFEDCBA9876543210
    q, k = np.zeros((Tq, B, heads * Tk), 'f'), np.zeros((Tk, B, heads * Tk), 'f')
    v = np.broadcast_to(np.tile(np.eye(Tk, dtype='f')[:, None], heads), k.shape).copy()
    y, _ = attend(Attention(heads, p=p, key=key), q, k, v, None, np.array([step]))
    got = y.reshape(Tq, B, heads, Tk).transpose(1, 2, 0, 3) * Tk
    assert np.abs(got - dropout_factors(B, heads, Tq, Tk, p, step, key)).max() < 1e-5
    plain, _ = attend(Attention(heads, p=p, key=key), q, k, v)
    assert np.abs(plain * Tk - 1).max() < 1e-5, 'without a step there is no dropout'


@pytest.mark.parametrize('T', [9, 70])
def test_decoding_word_by_word_equals_one_causal_call(T):
    B, D, op = 3, 24, Attention(3, causal=True)
    (q, k, v), _, y, _ = attention_run(op, (T, T, B, D))
    for t in range(T):
        step, _ = attend(op, q[t:t + 1], k[:t + 1], v[:t + 1])
        assert np.abs(step[0] - y[t]).max() <= 1e-6


@pytest.mark.parametrize('Tq,Tk', [(2, 9), (9, 9), (40, 150)])
def test_attention_to_extreme_scores(Tq, Tk):
    """Scores in the hundreds: rounding them to float32 changes the weights by 1e-4."""
    rng = np.random.default_rng(3)
    q, k, v, dy = (normal(rng, T, 2, 16, scale=8) for T in (Tq, Tk, Tk, Tq))
    k[Tk // 2] = k[Tk - 1] = 2 * q[0]
    op = Attention(1)
    y, ctx = attend(op, q, k, v)
    close(y, Attention.reference(*(x.astype(np.float64) for x in (q, k, v)), heads=1), 1e-3)
    assert np.abs(y[0] - (v[Tk // 2] + v[Tk - 1]) / 2).max() < 1e-3
    assert np.abs(get(ctx.stats)[0]).max() > 400 and all(np.isfinite(grad).all() for grad in attend_back(op, dy, ctx))


@pytest.mark.parametrize('Tq,Tk', [(1, 5), (6, 20), (40, 150)])
@pytest.mark.parametrize('which', 'qkv')
def test_attention_passes_nan_on(Tq, Tk, which):
    op, arrays = Attention(2), dict(zip('qkv', attention_run(Attention(2), (Tq, Tk, 2, 8))[0], strict=True))
    arrays[which][-1, 1, 5] = np.nan            # second sentence, last row, second head
    y, ctx = attend(op, *arrays.values())
    bad = np.zeros(y.shape, bool)
    bad[-1 if which == 'q' else slice(None), 1, 5 if which == 'v' else slice(4, 8)] = True
    same(np.isnan(y), bad, 'NaN in y')
    assert np.isnan(get(ctx.stats)[1]).any() == (which != 'v')


@pytest.mark.parametrize('Tk', [1, 9, 64, 65, 300])
@pytest.mark.parametrize('Tq', [1, 4, 33])
def test_maxima_and_sums_of_attention_are_exact(Tq, Tk):
    rng = np.random.default_rng(4)
    q, k = normal(rng, Tq, 1, 8, scale=2), normal(rng, Tk, 1, 8, scale=2)
    _, ctx = attend(Attention(1), q, k, k)
    scores = q[:, 0].astype('d') @ k[:, 0].T.astype('d') / np.sqrt(8)
    (top,), (total,) = get(ctx.stats)[:, 0].astype('d')
    assert np.abs(top - scores.max(-1)).max() <= 1e-6 * np.abs(scores).max()
    assert np.abs(top + np.log(total) - np.logaddexp.reduce(scores, -1)).max() <= 1e-6 * np.abs(scores).max()


@pytest.mark.parametrize('in_products', [False, True])
@pytest.mark.parametrize('Tq,Tk,C', [(1, 5, 1), (1, 70, 3), (4, 2, 3), (5, 7, 4), (20, 130, 3), (70, 200, 1)])
@pytest.mark.parametrize('score', [1e2, 1e4, 1e9])
def test_attention_to_large_scores_has_the_weights_of_their_differences(score, Tq, Tk, C, in_products):
    """Scores have one nonzero channel, so dot products are exact; 1 / sqrt(C) rounds them, also in the reference."""
    rng = np.random.default_rng(7)
    q, k, v = np.zeros((Tq, 1, C), 'f'), np.zeros((Tk, 1, C), 'f'), normal(rng, Tk, 1, C)
    q[..., 0], k[..., 0] = 1, below(score * np.sqrt(C), (Tk, 1), rng)
    op, dy = (attention_in_products if in_products else Attention)(1), normal(rng, Tq, 1, C)
    y, ctx = attend(op, q, k, v)
    _, _, dv = attend_back(op, dy, ctx)
    s = (k[:, 0, 0] * (np.float32(1) / np.sqrt(np.float32(C)))).astype(np.float64)
    weights = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
    close(y[:, 0], np.tile(weights @ v[:, 0], (Tq, 1)), 1e-5)
    close(dv[:, 0], weights[:, None] * dy[:, 0].sum(0, dtype=np.float64), 1e-5)


# ---- packed rows

def offsets_of(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def packed_rows(lengths, longest):
    return Packed(put(offsets_of(lengths)), longest)


def sentence_major(x):
    """Return time steps (T, B, D) as rows, sentence by sentence."""
    return np.ascontiguousarray(x.swapaxes(0, 1)).reshape(-1, x.shape[-1])


def attend_packed(op, q, k, v, dy, q_rows, k_rows, step=None):
    """Return y and the gradients."""
    y, ctx = op.forward(put(q), put(k), put(v), None, None if step is None else put(step), q_rows, k_rows)
    return get(y), *(get(grad) for grad in op.backward(put(dy), ctx))


@pytest.mark.parametrize('in_products', [False, True])
@pytest.mark.parametrize('causal,p', [(False, 0.0), (True, 0.3)])
@pytest.mark.parametrize('Tq,Tk,B,heads,C', [(1, 7, 5, 2, 8), (3, 3, 4, 2, 16), (5, 20, 9, 1, 33), (9, 9, 7, 4, 8),
                                             (13, 4, 6, 2, 24), (20, 20, 5, 2, 64), (40, 70, 2, 2, 16), (70, 130, 2, 1, 12)])
def test_packed_rows_of_equal_lengths_have_the_bits_of_time_steps(Tq, Tk, B, heads, C, causal, p, in_products):
    op = (attention_in_products if in_products else Attention)(heads, causal=causal, p=p, key=9)
    step = np.array([4 + (1 << 40)])
    (q, k, v), dy, y, grads = attention_run(op, (Tq, Tk, B, heads * C), None, step)
    got = attend_packed(op, *map(sentence_major, (q, k, v, dy)), packed_rows([Tq] * B, Tq), packed_rows([Tk] * B, Tk), step)
    for name, a, b in zip(('y', 'dq', 'dk', 'dv'), got, (y, *grads), strict=True):
        same(a, sentence_major(b), name)
    if not in_products:         # one of them packed
        got = attend_packed(op, sentence_major(q), k, v, sentence_major(dy), packed_rows([Tq] * B, Tq), None, step)
        for a, b, rows in zip(got, (y, *grads), (True, True, False, False), strict=True):
            same(a, sentence_major(b) if rows else b)


@pytest.mark.parametrize('seed', range(12))
def test_attention_of_packed_rows_of_random_lengths(seed):
    """Each sentence has the results and gradients of a call of its own: on the CPU the same bits."""
    rng = np.random.default_rng(seed)
    B, heads, C, causal = rng.integers(1, 41), rng.integers(1, 5), 8 * rng.integers(1, 9), bool(seed % 2)
    longest = int(rng.choice([4, 12, 20, 64, 90]))
    lengths = [rng.choice([0, 1, 2, longest, *rng.integers(0, longest + 1, 4)], B) for _ in 'qk']
    if seed % 3 == 0:
        lengths[1] = lengths[0]                     # self-attention
    op, D = Attention(heads, causal), heads * C
    q, k, v, dy = (normal(rng, lengths[i].sum(), D) for i in (0, 1, 1, 0))
    got = attend_packed(op, q, k, v, dy, *(packed_rows(n, longest) for n in lengths))
    starts = [offsets_of(n) for n in lengths]
    for b in range(B):
        i, j = (slice(*start[b:b + 2]) for start in starts)
        y, ctx = attend(op, q[i, None], k[j, None], v[j, None])
        alone = y, *attend_back(op, dy[i, None], ctx)
        for name, a, rows, want in zip(('y', 'dq', 'dk', 'dv'), got, (i, i, j, j), alone, strict=True):
            if backend.current_device().is_host:
                same(a[rows], want[:, 0], f'{name} of sentence {b}')
            else:
                near(a[rows], want[:, 0], 1e-5 * (1 + np.abs(want).max(initial=0)), f'{name} of sentence {b}')


def test_the_dropout_mask_of_a_sentence_does_not_depend_on_the_other_lengths():
    rng, longest, step = np.random.default_rng(3), 12, put(np.array([8]))
    op, last = Attention(2, p=0.5, key=7), normal(rng, 9, 8)
    results = []
    for lengths in ([3, 12, 9], [12, 0, 9], [1, 1, 9]):
        x = put(np.concatenate([normal(rng, sum(lengths) - 9, 8), last]))
        rows = packed_rows(lengths, longest)
        results.append(get(op.forward(x, x, x, None, step, rows, rows)[0])[-9:])
    same(results[1], results[0], 'y')
    same(results[2], results[0], 'y')


@of_threads
@pytest.mark.parametrize('longest,B', [(20, 128), (64, 40), (130, 9), (3, 700)])
def test_packed_rows_have_the_same_bits_for_any_number_of_threads(longest, B):
    rng = np.random.default_rng(5)
    lengths = [rng.integers(0, longest + 1, B) for _ in 'qk']
    arguments = [normal(rng, n, 256) for n in (lengths[0].sum(), lengths[1].sum(), lengths[1].sum(), lengths[0].sum())]
    before, runs = backend.threads(), []
    try:
        for threads in (1, 2, 5):
            backend.set_threads(threads)
            runs.append(attend_packed(Attention(4, True, 0.1, 3), *arguments, *(packed_rows(n, longest) for n in lengths),
                                      np.array([2])))
    finally:
        backend.set_threads(before)
    for run in runs[1:]:
        for name, a, b in zip(('y', 'dq', 'dk', 'dv'), run, runs[0], strict=True):
            same(a, b, name)


@pytest.mark.parametrize('in_products', [False, True])
@pytest.mark.parametrize('lengths,message', [
    ([2, 5, 1], r'q_offsets\[2\] - q_offsets\[1\]=5, expected 0 to 4'),
    ([2, -1, 1], r'q_offsets\[2\] - q_offsets\[1\]=-1, expected 0 to 4')])
def test_packed_rows_that_are_too_long_are_refused_with_their_sentence(lengths, message, in_products):
    op = (attention_in_products if in_products else Attention)(2)
    message = message.replace('q_offsets', 'offsets') if in_products else f'attention_forward: {message}'
    x = np.zeros((8, 4), 'f')
    with pytest.raises(ValueError, match=message):
        attend_packed(op, x, x, x, x, packed_rows(lengths, 4), packed_rows([4, 0, 4], 4))
        backend.synchronize()


def test_packed_rows_replace_lengths_and_must_start_at_0():
    x, rows = put(np.zeros((6, 4), 'f')), packed_rows([2, 4], 4)
    with pytest.raises(ValueError, match='attention_forward: lengths and k_offsets, expected one of them to be NULL'):
        Attention(2).forward(x, x, x, put(np.array([2, 4], np.int32)), None, rows, rows)
    with pytest.raises(ValueError, match=r'k_rows.offsets: expected shape \(3,\), got \(4,\)'):
        Attention(2).forward(x, x, x, None, None, rows, packed_rows([2, 2, 2], 4))
    with pytest.raises(ValueError, match=r'attention_forward: k_offsets\[0\]=1, expected 0'):
        Attention(2).forward(x, x, x, None, None, rows, Packed(put(np.array([1, 3, 6], np.int32)), 4))
        backend.synchronize()


def test_the_weights_of_packed_rows_are_padded_with_zeros():
    from pyops.ops.attention import weights
    rng, lengths, (heads, C) = np.random.default_rng(6), ([3, 0, 1, 5], [2, 4, 5, 5]), (2, 3)
    q, k = (normal(rng, sum(n), 2 * heads * C)[:, :heads * C] for n in lengths)         # columns of a larger array
    starts = [offsets_of(n) for n in lengths]
    arrays = dict(q=put(q), k=put(k), q_offsets=put(starts[0]), k_offsets=put(starts[1]))
    p = get(weights(dict(Tq=5, Tk=6, B=4, heads=heads, C=C, causal=True), arrays.get))
    want = np.zeros((4, heads, 5, 6))
    for b, (n, m) in enumerate(zip(*lengths, strict=True)):
        for h in range(heads):
            rows = [x[start[b]:start[b + 1], h * C:h * C + C].astype('d') for x, start in zip((q, k), starts, strict=True)]
            scores = rows[0] @ rows[1].T / np.sqrt(C)
            for i in range(n):
                seen = max(0, min(m, i + 1 + m - n))
                e = np.exp(scores[i, :seen])
                want[b, h, i, :seen] = e / e.sum() if seen else 0
    near(p, want, 1e-6)
    assert (p[want == 0] == 0).all() and want.any()
    attention = Attention(heads, causal=True)
    q, k = (put(np.ascontiguousarray(x)) for x in (q, k))
    _, ctx = attention.forward(q, k, k, q_rows=Packed(put(starts[0]), 5), k_rows=Packed(put(starts[1]), 6))
    near(get(attention.weights(ctx)), want, 1e-6)


@pytest.mark.parametrize('T,B,C', [(1, 1, 1), (4, 3, 5), (70, 9, 300), (3, 0, 4)])
def test_rows_are_padded_and_packed_again(T, B, C):
    rng = np.random.default_rng(7)
    lengths = rng.integers(0, T + 1, B)
    rows, x = packed_rows(lengths, T), normal(rng, lengths.sum(), C)
    wide = put(np.concatenate([x, x], 1))
    steps, columns = (pad_rows(one, rows, x.shape)[0] for one in (put(x), wide[:, C:]))
    want = np.zeros((T, B, C), 'f')
    for b, start in enumerate(offsets_of(lengths)[:-1]):
        want[:lengths[b], b] = x[start:start + lengths[b]]
    same(get(steps), want, 'time steps')
    same(get(columns), want, 'time steps of columns of a larger array')
    back = put(np.full_like(x, np.nan))
    unpad_rows(steps, rows, len(x), out=back)
    same(get(back), x, 'rows')


@pytest.mark.parametrize('bad', [-1, 6])
def test_lengths_outside_the_keys_are_refused_with_their_position(bad):
    q, k = np.zeros((2, 3, 4), 'f'), np.zeros((5, 3, 4), 'f')
    with pytest.raises(ValueError, match=rf'attention_forward: lengths\[2\]={bad}, expected 0 to 5'):
        attend(Attention(2), q, k, k, np.array([0, 5, bad], np.int32))


def test_attention_refuses_heads_and_shares_that_cannot_be():
    q = np.zeros((2, 3, 4), 'f')
    with pytest.raises(ValueError, match='q: expected shape .* D a multiple of 3 heads'):
        attend(Attention(3), q, q, q)
    for p in (-0.1, 1.0, float('nan')):
        with pytest.raises(ValueError, match='attention_forward: p='):
            attend(Attention(2, p=p), q, q, q)


@pytest.mark.parametrize('bias', [False, True])
@pytest.mark.parametrize('n', [2, 3])
@pytest.mark.parametrize('rows,inputs,outputs', [((5,), 7, 16), ((9, 5), 32, 48), ((3, 40), 256, 256), ((1, 1), 64, 48)])
def test_joined_linear_layers_equal_separate_ones(n, rows, inputs, outputs, bias):
    rng, names = np.random.default_rng(0), [f'{name}.weight' for name in 'qkv'[:n]]
    biases = [f'{name}.bias' for name in 'qkv'[:n]] if bias else []
    params = Parameters({name: Spec((outputs, inputs), init.xavier_normal()) for name in names}
                        | {name: Spec((outputs,), init.normal(1.0)) for name in biases})
    layers = [Linear(params[name], params[name.replace('weight', 'bias')] if bias else None) for name in names]
    joined = JoinedLinear(layers, params.joined(names), 'joined', params.joined(biases) if bias else None)
    x, dy, into = put(normal(rng, *rows, inputs)), normal(rng, *rows, n * outputs), normal(rng, *rows, inputs)
    start = normal(rng, params.grads.size)
    backend.copy(params.grads, put(start))
    y, ctx = joined.forward(x)
    dx = get(joined.backward(put(dy), ctx, into=put(into.copy())))
    grads = get(params.grads).copy()
    backend.copy(params.grads, put(start))
    total = put(into.copy())
    for i, layer in enumerate(layers):
        one, ctx = layer.forward(x)
        if backend.current_device().is_host:
            same(get(joined.split(y)[i]), get(one), f'y of layer {i}')
        near(get(joined.split(y)[i]), get(one), 1e-5, f'y of layer {i}')
        layer.backward(put(dy[..., i * outputs:(i + 1) * outputs].copy()), ctx, into=total)
    near(dx, get(total), 2e-6 * np.abs(dx).max(), 'dx')
    near(grads, get(params.grads), 2e-6 * np.abs(grads).max(), 'gradients')
    assert np.abs(grads - start).max() > 0.1


@pytest.mark.parametrize('adds', [(False, False), (True, False), (True, True)])
def test_a_linear_pair_equals_its_layers(adds):
    rng, names = np.random.default_rng(0), ['q.weight', 'k.weight', 'v.weight', 'q.bias']
    params = Parameters({name: Spec((16,) if 'bias' in name else (16, 16), init.normal(1.0)) for name in names})
    layers = [Linear(params[name], params['q.bias'] if name == 'q.weight' else None) for name in names[:3]]
    joined = JoinedLinear(layers[1:], params.joined(names[1:3]), 'kv')
    xs, dys = [normal(rng, 5, 16), normal(rng, 7, 16)], [normal(rng, 5, 16), normal(rng, 7, 32)]
    sums, results = [normal(rng, *x.shape) if add else None for x, add in zip(xs, adds, strict=True)], []
    for pair in (True, False):
        into = [None if array is None else put(array.copy()) for array in sums]
        params.zero_grads()
        x1, x2, dy1, dy2 = map(put, (*xs, *dys))
        if pair:
            op = LinearPair(layers[0], joined)
            (y1, y2), ctx = op.forward(x1, x2)
            dx1, dx2 = op.backward(dy1, dy2, ctx, into=tuple(into))
        else:
            (y1, c1), (y2, c2) = layers[0].forward(x1), joined.forward(x2)
            dx1, dx2 = layers[0].backward(dy1, c1, into=into[0]), joined.backward(dy2, c2, into=into[1])
        assert all(array is None or dx is array for dx, array in zip((dx1, dx2), into, strict=True))
        results.append([get(array).copy() for array in (y1, y2, dx1, dx2, params.grads)])
    for name, got, want in zip(('y1', 'y2', 'dx1', 'dx2', 'gradients'), *results, strict=True):
        near(got, want, 1e-5, name)
    with pytest.raises(ValueError, match=r'into\[1\]: it overlaps dy or x, which the same kernel reads; give another array'):
        op.backward(dy1, dy2, ctx, into=(None, ctx.x2))
    with pytest.raises(ValueError, match='x2: expected shape'):
        op.forward(x1, put(normal(rng, 7, 15)))


def test_a_joined_weight_must_have_the_rows_of_its_layers():
    params = Parameters({name: Spec((4, 4), init.ones()) for name in ('a', 'b', 'c')})
    with pytest.raises(ValueError, match=r'qk: expected a weight of 2 times \(4, 4\), got \(12, 4\)'):
        JoinedLinear([Linear(params['a']), Linear(params['b'])], params.joined(['a', 'b', 'c']), 'qk')


def test_parameters_are_joined_only_if_that_needs_no_copy():
    params = Parameters({'a': Spec((4, 4), init.ones()), 'b': Spec((8, 4), init.ones()), 'wide': Spec((4, 8), init.ones()),
                         'odd': Spec((3, 8), init.ones()), 'after': Spec((2, 8), init.ones()),
                         'sparse': Spec((2, 8), init.ones(), sparse=True)})
    whole = params.joined(['a', 'b'])
    assert whole.name == 'a+b' and whole.value.shape == whole.grad.shape == (12, 4)
    assert location(whole.value) == location(params['a'].value) and location(whole.grad) == location(params['a'].grad)
    assert params.joined(['a']).value.shape == (4, 4)
    for names in (['b', 'a'], ['a', 'wide'], ['a', 'b', 'wide'], ['odd', 'after'], ['after', 'sparse'], ['sparse']):
        assert params.joined(names) is None, names


def test_attention_takes_columns_and_refuses_rows_at_other_distances():
    x = put(np.zeros((3, 4, 24), 'f'))
    q, k, v, apart = x[..., :8], x[..., 8:16], x[..., 16:], x[:, :2, :8]
    y, ctx = Attention(2).forward(q, k, v)
    alone = put(np.zeros((3, 4, 8), 'f'))
    for bad, message in (((x[..., :16:2], k, v), 'q: expected contiguous rows at equal distances'),
                         ((q, alone, v), 'v: expected the row distance of k, 8 elements, got 24')):
        with pytest.raises((TypeError, ValueError), match=message):
            Attention(2).forward(*bad)
    with pytest.raises(TypeError, match='q: expected contiguous rows at equal distances'):
        Attention(2).forward(apart, apart, apart)
    with pytest.raises(ValueError, match=r'dk: expected shape \(3, 4, 8\), got \(3, 4, 24\)'):
        Attention(2).backward(y, ctx, out=(q, x, v))
    with pytest.raises(TypeError, match='q: expected a C-contiguous array'):
        attention_in_products(2).forward(q, k, v)


attention_in_products = functools.partial(Attention.rounded(), recipe=Recipe())


def test_attention_in_products_refuses_what_the_whole_one_refuses():
    make, q, k = attention_in_products, np.zeros((2, 3, 4), 'f'), np.zeros((5, 3, 4), 'f')
    with pytest.raises(ValueError, match=r'attention_softmax_forward: lengths\[2\]=6, expected 0 to 5'):
        attend(make(2), q, k, k, np.array([0, 5, 6], np.int32))
    for p in (-0.1, 1.0, float('nan')):
        with pytest.raises(ValueError, match='attention_softmax_forward: p='):
            attend(make(2, p=p), q, k, k)


@pytest.mark.parametrize('Tq,Tk,B', [(3, 0, 2), (0, 3, 2), (3, 3, 0)])
def test_attention_in_products_of_nothing(Tq, Tk, B):
    _, _, y, grads = attention_run(attention_in_products(2, True), (Tq, Tk, B, 4), np.zeros(B, np.int32))
    assert not any(np.any(result) for result in (y, *grads)) and [len(grad) for grad in grads] == [Tq, Tk, Tk]


def test_attention_in_products_survives_extreme_scores_and_passes_nan_on():
    rng = np.random.default_rng(3)
    q, k, v, dy = (normal(rng, T, 2, 16, scale=8) for T in (40, 150, 150, 40))
    k[70] = k[149] = 2 * q[0]
    op = attention_in_products(1)
    y, ctx = attend(op, q, k, v)
    close(y, Attention.reference(*(x.astype(np.float64) for x in (q, k, v)), heads=1), 1e-3)
    assert all(np.isfinite(grad).all() for grad in attend_back(op, dy, ctx))
    q[3, 1, 5] = np.nan
    y, _ = attend(op, q, k, v)
    assert np.isnan(y[3, 1]).all() and np.isnan(y).sum() == 16


@pytest.mark.parametrize('kernel,count', [('gru_gates_forward', 5), ('gru_gates_backward', 7)])
def test_gates_refuse_a_stage_that_there_is_not(kernel, count):
    arrays = [put(np.zeros(12, np.float32)) for _ in range(count)]
    for stage in (-1, 3):
        with pytest.raises(ValueError, match=f'{kernel}: stage={stage}, expected 0 to 2'):
            backend.launch(kernel, *arrays, 1, 3, stage)
    with pytest.raises(ValueError, match=f'{kernel}: B=1 H=0'):
        backend.launch(kernel, *arrays, 1, 0, 0)


def test_attention_of_nothing():
    code = ('import numpy as np; from places import get, put; from pyops.ops import Attention\n'
            'q, k = put(np.zeros((1, 2, 4), "f")), put(np.zeros((0, 2, 4), "f"))\n'
            'print(get(Attention(2).forward(q, k, k)[0]).any())')
    fresh = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True,      # no scratch yet
                           env=os.environ | {'PYTHONPATH': str(ROOT / 'tests/helpers')})
    assert fresh.stdout == 'False\n', fresh.stderr

    def sizes(Tq, Tk, B):
        return attention_run(Attention(2), (Tq, Tk, B, 4))
    _, _, y, grads = sizes(3, 0, 2)
    same(y, 0, 'y')
    same(grads[0], 0, 'grads[0]')
    same(sizes(0, 3, 2)[3][1], 0, 'dk')
    assert sizes(3, 3, 0)[2].size == 0


@pytest.mark.parametrize('T,B', [(0, 2), (1, 1), (9, 7), (40, 33)])
def test_sequence_lengths(T, B):
    ids = np.random.default_rng(5).integers(0, 3, (T, B)).astype(np.int32)          # padding inside a sentence does not end it
    if T > 1:
        ids[:, 0], ids[T // 2:, 1] = 0, 0
    want = [max((t + 1 for t in range(T) if ids[t, b] != 0), default=0) for b in range(B)]
    assert get(sequence_lengths(put(ids), 0)).tolist() == want
    with pytest.raises(TypeError, match='ids'):
        sequence_lengths(put(ids.astype(np.int64)), 0)


def test_parameters_of_the_wrong_shape_are_refused_by_name():
    w, b = of_zeros('w', 4, 3), of_zeros('b', 5)
    for make in (lambda: Linear(w, b), lambda: PixelLinear(w, b), lambda: LinearCrossEntropy(w, b),
                 lambda: GRU(of_zeros('x', 6, 3), of_zeros('y', 6, 2), b, of_zeros('z', 6))):
        with pytest.raises(ValueError, match=r'b: expected shape \(.\,\), got \(5,\)'):
            make()
    with pytest.raises(ValueError, match=r'gradient of w: expected shape \(4, 3\), got \(3, 4\)'):
        Embedding(parameter('w', np.zeros((4, 3), np.float32), np.zeros((3, 4), np.float32)))


@pytest.mark.parametrize('row,size', [(LinearCrossEntropyRow(), (3, 4, 6, 5)), (PixelLinearRow(), (9, 7, 17, 33))],
                         ids=lambda value: getattr(value, 'name', ''))
def test_backward_without_gradients_says_why(row, size):
    run = Run(row, size, backward=False)
    y, ctx = run.op.forward(*run.placed.values(), gradients=False)
    with pytest.raises(ValueError, match='gradients=False'):
        run.op.backward(put(np.ones(y.shape, np.float32)), ctx)


@pytest.mark.parametrize('size', (*PixelLinearRow.sizes, PixelLinearRow.large))
def test_pixels_that_are_not_saved_give_the_same(size):
    run = Run(PixelLinearRow(), size, backward=False)
    y, ctx = run.op.forward(*run.placed.values(), gradients=False)
    assert np.array_equal(get(y), run.y) and ctx.ink is None and ctx.places is None


def batch_norm(C, weight=1.0, bias=0.0, **settings):
    return BatchNorm(parameter('weight', np.full(C, weight, np.float32)), parameter('bias', np.full(C, bias, np.float32)),
                     **settings)


def test_batch_norm_keeps_the_running_statistics_of_torch(torch):
    rng, twin = np.random.default_rng(4), torch.nn.BatchNorm1d(130, momentum=0.3, dtype=torch.float64)
    mean, var, op = put(np.zeros(130, np.float32)), put(np.ones(130, np.float32)), batch_norm(130, momentum=0.3)
    for R in (2, 100, 65):
        x = normal(rng, R, 130) + np.float32(3)
        y, _ = op.forward(put(x), mean, var)
        close(get(y), twin(torch.tensor(x).double()).detach().numpy(), 1e-4 if R == 2 else RTOL)
        close(get(mean), twin.running_mean.numpy())
        close(get(var), twin.running_var.numpy())
    before = get(mean).copy(), get(var).copy()
    y, _ = batch_norm(130, training=False).forward(put(x), mean, var)
    close(get(y), twin.eval()(torch.tensor(x).double()).detach().numpy())
    same(get(mean), before[0], 'mean')
    same(get(var), before[1], 'var')


@pytest.mark.parametrize('R', (2, 1000))
def test_batch_norm_of_a_constant_column_is_the_bias(R):
    y, ctx = batch_norm(3, 2.0, 0.7).forward(put(np.full((R, 3), 12345.678, np.float32)))
    same(get(y), np.float32(0.7), 'y')
    same(get(ctx.rstd), np.float32(1 / np.sqrt(np.float32(1e-5))), 'rstd')


def test_batch_norm_of_images_keeps_the_running_statistics_of_torch(torch):
    rng, twin = np.random.default_rng(5), torch.nn.BatchNorm2d(3, momentum=0.3, dtype=torch.float64)
    mean, var, op = put(np.zeros(3, np.float32)), put(np.ones(3, np.float32)), batch_norm(3, momentum=0.3)
    for _ in range(3):
        x = normal(rng, 4, 3, 65, 64) + np.float32(7)
        op.forward(put(x), mean, var)
        twin(torch.tensor(x, dtype=torch.float64))
    close(get(mean), twin.running_mean.numpy(), name='running_mean')
    close(get(var), twin.running_var.numpy(), name='running_var')


def test_a_window_beyond_the_plane_has_no_maximum_and_no_gradient():
    x, y, index, frame = np.arange(4, dtype='f'), np.full(9, np.nan, 'f'), np.full(9, 7, 'i'), np.full(6, -7, 'f')
    sizes = 1, 2, 2, 3, 3, 1, 1, 1, 1, 0, 0, 1, 1
    launch('max_pool2d_forward', y, index, x, *sizes)
    inf = np.inf
    same(y.reshape(3, 3), np.array([[0, 1, -inf], [2, 3, -inf], [-inf, -inf, -inf]]), 'y')
    same(index.reshape(3, 3), np.array([[0, 1, -1], [2, 3, -1], [-1, -1, -1]]), 'index')
    launch('max_pool2d_backward', frame[1:5], np.arange(1, 10, dtype='f'), index, *sizes)
    same(frame, np.array([-7, 1, 2, 4, 5, -7]), 'dx and what is around it')


@pytest.mark.parametrize('training', (0, 1))
@pytest.mark.parametrize('R,C,P', [(5, 1, 1), (3, 129, 1), (64, 130, 1), (65, 127, 1), (129, 5, 2), (130, 5, 31), (3, 5, 32),
                                   (3, 5, 33), (2, 2, 4096), (2, 3, 4097)])
def test_the_kernels_of_batch_norm_are_their_formulas(R, C, P, training):
    """At every border between the ways to compute it, with running statistics and without."""
    rng = np.random.default_rng(R * P)
    x, dy = normal(rng, R, C, P) + np.float32(0.5), normal(rng, R, C, P)
    weight, bias, running_mean, noise_of_weight, noise_of_bias = (normal(rng, C) for _ in range(5))
    running_var = normal(rng, C) ** 2 + np.float32(0.1)
    wide = x.astype('d')
    mean, var = (wide.mean((0, 2)), wide.var((0, 2))) if training else (running_mean.astype('d'), running_var.astype('d'))
    normed = (wide - mean[:, None]) / np.sqrt(var + 1e-3)[:, None]
    for running in ([running_mean.copy(), running_var.copy()], [None, None])[:1 + training]:
        y, its_mean, rstd = np.full_like(x, np.nan), np.full(C, np.nan, 'f'), np.full(C, np.nan, 'f')
        launch('batch_norm_forward', y, *running, its_mean, rstd, x, weight, bias, R, C, P, 1e-3, 0.25, training)
        close(y, normed * weight[:, None] + bias[:, None], name='y')
        close(its_mean, mean, name='mean')
        close(rstd, 1 / np.sqrt(var + 1e-3), name='rstd')
        if running[0] is not None:
            n = R * P
            close(running[0], running_mean + training * 0.25 * (mean - running_mean), name='running_mean')
            close(running[1], running_var + training * 0.25 * (var * n / (n - 1) - running_var), name='running_var')
    dx, dweight, dbias = np.full_like(x, np.nan), noise_of_weight.copy(), noise_of_bias.copy()
    launch('batch_norm_backward', dx, dweight, dbias, dy, x, weight, its_mean, rstd, R, C, P, training)
    sums, products = dy.sum((0, 2), dtype='d'), (dy * normed).sum((0, 2))
    share = training / (R * P)
    want = dy - share * (sums[:, None] + normed * products[:, None])
    close(dx, want * (weight / np.sqrt(var + 1e-3))[:, None], 5e-5, 'dx')
    close(dweight, noise_of_weight + products, 5e-5, 'dweight')
    close(dbias, noise_of_bias + sums, 5e-5, 'dbias')


def test_batch_norm_says_what_it_wants():
    x = put(np.zeros((1, 3), np.float32))
    for op, arguments, text in ((batch_norm(3), (x,), 'R=1 P=1, expected at least 2 values per channel in training'),
                                (batch_norm(3, training=False), (x,), 'running_mean or running_var is NULL, expected both'),
                                (batch_norm(3, eps=-1), (put(np.zeros((2, 3), np.float32)),), 'eps=-1, expected at least 0'),
                                (batch_norm(3), (x, x), r'running_mean: expected shape \(3,\)')):
        with pytest.raises(ValueError, match=text):
            op.forward(*arguments)


def test_the_first_of_equal_maxima_gets_the_gradient_and_nan_is_a_maximum(torch):
    x = np.float32([[3, 3, 1, 1, 0], [3, 2, 1, 1, 0], [0, -1, np.nan, 2, 0], [-np.inf, -np.inf, 5, np.nan, 7]])[None, None]
    op, twin = MaxPool2d(2, padding=1), torch.tensor(x, requires_grad=True)
    y, ctx = op.forward(put(x))
    theirs = torch.nn.functional.max_pool2d(twin, 2, padding=1)
    dy = np.arange(1, y.size + 1, dtype=np.float32).reshape(y.shape)
    theirs.backward(torch.tensor(dy))
    np.testing.assert_array_equal(get(y), theirs.detach().numpy())      # NaN equals NaN
    same(get(op.backward(put(dy), ctx)), twin.grad.numpy(), 'dx')


def test_a_window_of_minus_infinity_has_a_maximum():
    op = MaxPool2d(2)
    y, ctx = op.forward(put(np.full((1, 1, 2, 2), -np.inf, np.float32)))
    assert get(y).item() == -np.inf
    assert get(op.backward(put(np.ones((1, 1, 1, 1), np.float32)), ctx)).tolist() == [[[[1, 0], [0, 0]]]]


@pytest.mark.parametrize('make,text', [
    (lambda: MaxPool2d(2, padding=2), r'padding: expected at most half of the window \(2, 2\), got 2'),
    (lambda: AvgPool2d((1, 2), stride=0), 'stride: expected a whole number of at least 1, or two, got 0'),
    (lambda: conv2d((4, 2, 3, 3), groups=3), 'groups: expected a divisor of the 4 channels of weight, got 3'),
    (lambda: conv2d((4, 2, 3, 3), groups=0), 'groups: expected a whole number of at least 1, got 0'),
    (lambda: conv2d((4, 2, 3, 3), padding='full'), "padding: expected a whole number, two, 'same' or 'valid', got 'full'"),
    (lambda: conv2d((4, 2, 3, 3), padding='same', stride=2), r"padding: 'same' requires stride 1, got stride \(2, 2\)"),
    (lambda: conv2d((4, 2, 3, 3), dilation=(1, 2, 3)), 'dilation: expected a whole number of at least 1, or two, got')])
def test_settings_of_windows_that_are_wrong_are_named(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def conv2d(shape, **settings):
    return Conv2d(parameter('weight', np.ones(shape, np.float32)), **settings)


@pytest.mark.parametrize('seed', range(6 if ON_GPU else 60))
def test_a_convolution_with_random_settings_is_exact_on_whole_numbers(seed):
    """Of three kinds: 3 x 3 filters on many channels, channels with filters of their own, and any sizes; and large batches."""
    rng = np.random.default_rng(seed)

    def pair(least, most):
        return tuple(int(n) for n in rng.integers(least, most + 1, 2))
    window, stride, dilation, padding, groups = pair(1, 4), pair(1, 5), pair(1, 3), pair(0, 3), int(rng.integers(1, 4))
    C, O = (groups * n for n in pair(1, 9))
    if seed % 3 == 0:
        window, stride, dilation, groups, (C, O) = (3, 3), (1, 1), (1, 1), 1, pair(14, 40)
    elif seed % 3 == 1:
        groups = C
        O = C * int(rng.integers(1, 4))
    N = int(rng.integers(1, 6)) + 30 * (seed % 4 == 3)
    H, W = (d * (k - 1) + n for d, k, n in zip(dilation, window, pair(1, 30), strict=True))
    settings = dict(stride=stride, padding=padding, dilation=dilation, groups=groups)
    x, weight, bias, more_weight, more_bias = (rng.integers(-3, 4, shape).astype('f') for shape in (
        (N, C, H, W), (O, C // groups, *window), O, (O, C // groups, *window), O))
    op = Conv2d(parameter('weight', weight, more_weight.copy()), parameter('bias', bias, more_bias.copy()), **settings)
    y, ctx = op.forward(put(x))
    dy = rng.integers(-3, 4, y.shape).astype('f')
    dx = get(op.backward(put(dy), ctx))
    wide = [array.astype('d') for array in (x, weight, bias, dy)]
    same(get(y), Conv2d.reference(*wide[:3], **settings), 'y')
    same(dx, Conv2dTransposed.reference(wide[3], wide[1], size=(H, W), **settings), 'dx')
    same(get(op.weight.grad), more_weight + Conv2dFilters.reference(wide[3], wide[0], window=window, **settings), 'd weight')
    same(get(op.bias.grad), more_bias + dy.sum((0, 2, 3)), 'd bias')


def test_convolution_and_pooling_of_an_empty_batch():
    x = put(np.zeros((0, 2, 5, 5), np.float32))
    for op in (conv2d((4, 2, 3, 3)), conv2d((2, 1, 3, 3), groups=2, stride=2), MaxPool2d(2), AvgPool2d(2)):
        y, ctx = op.forward(x)
        assert y.shape[0] == 0 and op.backward(y, ctx).shape == x.shape


@pytest.mark.parametrize('settings', [{}, dict(groups=2, stride=2), dict(padding=2, dilation=2)], ids=str)
def test_a_transposed_convolution_is_the_one_of_torch(torch, settings):
    rng, groups = np.random.default_rng(6), settings.get('groups', 1)
    weight, x = normal(rng, 4, 6 // groups, 3, 3), normal(rng, 2, 6, 9, 9)
    y = Conv2d.reference(x, weight, **settings)
    op = Conv2dTransposed(parameter('weight', weight), size=(9, 9), **settings)
    theirs = torch.nn.functional.conv_transpose2d(torch.tensor(y), torch.tensor(weight, dtype=torch.float64), **settings)
    close(get(op.forward(put(y.astype(np.float32)))[0]), theirs.numpy(), name='x')
