"""LSTM and RNN beyond the op table: lengths, few long rows, bad arguments."""
import re

import numpy as np
import pytest
from arrays import close, parameter, same
from places import get, launch, of_threads, on_the_cpu, put
from rows import RecurrentRow, Run

from pyops import backend
from pyops.ops import LSTM, RNN

ROWS = [RecurrentRow(op, with_states, **settings) for with_states in (True, False)
        for op, settings in ((LSTM, {}), (RNN, {}), (RNN, dict(nonlinearity='relu')))]
of_each_cell = pytest.mark.parametrize('row', ROWS, ids=lambda row: row.name)


def run_with_lengths(run, x, lengths, dy):
    """Run the op of a Run again with lengths.  Return y and the gradients of x, of the states, and added to the parameters."""
    for noise, p in zip(run.noise.values(), run.params.values(), strict=True):
        p.grad[...] = put(noise)
    states = [run.placed.get(name) for name in ('h0', 'c0')[:run.op.STATES]]
    y, ctx = run.op.forward(put(x), *states, None if lengths is None else put(np.array(lengths, np.int32)))
    gradients = [get(d) for d in run.op.backward(put(dy), ctx) if d is not None]
    added = [get(p.grad) - noise for p, noise in zip(run.params.values(), run.noise.values(), strict=True)]
    return get(y), gradients + added


@pytest.mark.parametrize('lengths', [(4, 2, 0, 3, 4, 1, 1), (0, 0, 1, 0, 0, 0, 0), (0,) * 7, (4,) * 7, (2,), (3, 1, 2)],
                         ids=lambda lengths: '-'.join(map(str, lengths)))
@of_each_cell
def test_steps_after_the_lengths_are_0_and_the_others_unchanged(row, lengths):
    """The states have the same bits as without lengths; upstream gradients after the lengths are ignored."""
    T, B, I, H = 4, len(lengths), 8, 33
    run = Run(row, (T, B, I, H), backward=False)
    has = np.arange(T)[:, None, None] < np.array(lengths)[:, None]
    x = get(run.placed['x'])
    _, want = run_with_lengths(run, x, None, run.dy * has)
    y, got = run_with_lengths(run, x, lengths, run.dy)
    same(y, run.y * has, 'y')
    same(got[0] * ~has, 0, 'dx after the lengths')
    for a, b in zip(got, want, strict=True):
        close(a, b, 1e-5)


@on_the_cpu
@of_each_cell
def test_inputs_after_the_lengths_are_not_read(row):
    run, lengths = Run(row, (5, 12, 8, 33), backward=False), [5, 0, 3, 1, 2, 5, 4, 1, 2, 3, 0, 1]
    x = get(run.placed['x'])
    y, want = run_with_lengths(run, x, lengths, run.dy)
    has = np.arange(5)[:, None, None] < np.array(lengths)[:, None]
    nan_y, got = run_with_lengths(run, np.where(has, x, np.float32(np.nan)), lengths, np.where(has, run.dy, np.float32(np.nan)))
    same(nan_y, y, 'y')
    for a, b in zip(got, want, strict=True):
        same(a, b, 'gradient')


@of_threads
@of_each_cell
def test_few_long_rows_have_the_same_bits_for_any_number_of_threads(row):
    """The recurrent weights are not packed.  A thread has one, two or three rows."""
    before, runs = backend.threads(), []
    try:
        for threads in (1, 2, 3):
            backend.set_threads(threads)
            runs.append(Run(row, (3, 3, 5, 1500)))
    finally:
        backend.set_threads(before)
    for run in runs[1:]:
        same(run.y, runs[0].y, 'y')
        for name, grad in run.grads.items():
            same(grad, runs[0].grads[name], f'd {name}')


@of_each_cell
def test_a_length_outside_the_sequence_is_refused(row):
    run = Run(row, (4, 3, 8, 5), backward=False)
    for bad in (-1, 5):
        with pytest.raises(ValueError, match=rf'rnn_forward: lengths\[1\]={bad}, expected 0 to 4'):
            run_with_lengths(run, get(run.placed['x']), [4, bad, 0], run.dy)
    with pytest.raises(ValueError, match=r'lengths: expected shape \(3,\)'):
        run_with_lengths(run, get(run.placed['x']), [0] * 4, run.dy)


@of_each_cell
def test_without_dx_the_other_gradients_have_the_same_bits(row):
    run = Run(row, (4, 7, 8, 33))
    for name, p in run.params.items():
        p.grad[...] = put(run.noise[name])
    dx, *states = run.op.backward(put(run.dy), run.ctx, want_dx=False)
    assert dx is None
    got = dict(zip(('h0', 'c0'), (get(d) for d in states if d is not None), strict=False))
    got |= {name: get(p.grad) - run.noise[name] for name, p in run.params.items()}
    assert got.keys() == run.grads.keys() - {'x'}
    for name, grad in got.items():
        same(grad, run.grads[name], f'd {name}')


def test_saturated_gates_and_large_states_stay_finite():
    """Sigmoid and tanh of sums of +-90, where e^-x is no float32, and a cell state that doubles the range of tanh."""
    weights = [parameter(name, value) for name, value in (
        ('w_ih', np.full((12, 2), 45, 'f')), ('w_hh', np.zeros((12, 3), 'f')), ('b_ih', np.zeros(12, 'f')),
        ('b_hh', np.zeros(12, 'f')))]
    op, x = LSTM(*weights), np.array([[[1, 1]], [[-1, -1]]], 'f')
    y, ctx = op.forward(put(x), None, put(np.full((1, 3), 40, 'f')))
    want = LSTM.reference(x.astype('d'), c0=np.full((1, 3), 40.0),
                          **dict(zip(('w_ih', 'w_hh', 'b_ih', 'b_hh'), (get(p.value) for p in weights), strict=True)))
    close(get(y), want, 1e-6)
    assert all(np.isfinite(get(d)).all() for d in op.backward(put(np.ones((2, 2, 1, 3), 'f')), ctx) if d is not None)


def test_bad_arguments_are_refused_by_name():
    w_ih, w_hh, b = (parameter(name, np.zeros(shape, 'f')) for name, shape in (('w_ih', (8, 3)), ('w_hh', (8, 2)), ('b', (8,))))
    with pytest.raises(ValueError, match='LSTM: expected both biases or none, got only b_ih'):
        LSTM(w_ih, w_hh, b)
    with pytest.raises(ValueError, match=r'b: expected shape \(8,\), got \(7,\)'):
        LSTM(w_ih, w_hh, b, parameter('b', np.zeros(7, 'f')))
    with pytest.raises(ValueError, match="RNN: nonlinearity: 'sin', expected 'tanh' or 'relu'"):
        RNN(w_ih, w_hh, nonlinearity='sin')
    y, gates, x, w = np.zeros((1, 1, 2), 'f'), np.zeros((1, 1, 8), 'f'), np.zeros((1, 1, 3), 'f'), np.zeros((2, 3), 'f')

    def forward(gates, c0, cell, H=2, b_hh=None):
        launch('rnn_forward', y, gates, x, None, c0, None, w, np.zeros((2, 2), 'f'), None, b_hh, np.zeros(10000, 'f'),
               1, 1, 3, H, cell)
    for call, message in (
            (lambda: forward(None, None, 3), 'cell=3, expected 0 to 2'),
            (lambda: forward(None, None, 2), 'cell=2, expected gates with an LSTM, else NULL'),
            (lambda: forward(gates, None, 0), 'cell=0, expected gates with an LSTM, else NULL'),
            (lambda: forward(None, y, 0), 'cell=0 with c0, expected NULL without an LSTM'),
            (lambda: forward(None, None, 0, 0), 'T=1 B=1 I=3 H=0, expected T, I and H of at least 1'),
            (lambda: forward(None, None, 0, 2, y), 'one of two biases, expected both or none')):
        with pytest.raises(ValueError, match=re.escape(f'rnn_forward: {message}')):
            call()
