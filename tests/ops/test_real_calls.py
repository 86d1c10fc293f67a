"""Ops on what models give them after some hundred steps of training: compared with their formulas in float64.

A kernel may lose what a few roundings of its inputs would change, which is much where large numbers cancel, and little where a
gradient of 1e-7 is a product of small numbers.
"""
import functools

import numpy as np
import pytest
import test_table
from arrays import RTOL, near
from places import on_the_cpu
from real_calls import recorded
from rows import Run
from small_models import digits, make_seq2seq, make_transformer, pairs
from translation import train_steps

from mnist.model import MLP
from pyops.ops import CrossEntropy, LinearCrossEntropy
from pyops.optim import Adam

pytestmark = on_the_cpu
EPS = float(np.finfo(np.float32).eps)
MOVED = 8                       # roundings of each input
STEP = 1e-5                     # of a difference of float64: half of its digits
LOSSES = CrossEntropy, LinearCrossEntropy
OPS = {'seq2seq': {'EmbeddingGRU', 'GRU', 'Dropout', 'LinearCrossEntropy'},
       'transformer': {'EmbeddingPositions', 'Attention', 'Linear', 'ResidualNorm', 'FeedForward', 'LinearCrossEntropy'},
       'mnist': {'PixelLinear', 'ReLU', 'Linear', 'CrossEntropy'}}


@functools.cache
def calls(program):
    """Return the calls of a training step, after three hundred others with a high learning rate."""
    if program == 'mnist':
        images, labels = digits()
        model, rows = MLP(seed=2), np.arange(len(images))
        adam = Adam(model.params, 0.01)

        def step():
            model.params.zero_grads()
            _, _, ctx = model.forward(images, rows, labels)
            model.backward(ctx)
        for _ in range(300):
            step()
            adam.step()
    else:
        model = {'seq2seq': make_seq2seq, 'transformer': make_transformer}[program]()
        losses = train_steps(model, pairs()[1], 300, batch_size=32, lr=0.01)
        assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:10])

        def step():
            _, ctx = model.forward(pairs()[1].batch_of(np.arange(40)), step=np.array([301]))
            model.backward(ctx)
    with recorded() as found:
        step()
    return found


@pytest.fixture(params=OPS)
def rows(request):
    return [call.row() for call in calls(request.param)]


def sensitivity(function, variables):
    """Return function(variables) and its largest change if each number moves by MOVED roundings, up or down at random."""
    base, rng, most = function(variables), np.random.default_rng(3), 0.0
    for _ in range(4):
        moved = {name: value * (1 + MOVED * EPS * rng.choice((-1.0, 1.0), value.shape)) for name, value in variables.items()}
        most = max(most, float(np.abs(function(moved) - base).max()))
    return base, most


@pytest.mark.parametrize('program', OPS)
def test_each_op_of_the_model_is_recorded_with_small_gradients_and_all_masks(program):
    found = calls(program)
    assert {type(call.op).__name__ for call in found} == OPS[program]
    gradients = np.concatenate([np.abs(call.dy).ravel() for call in found if call.dy.size > 1])
    assert 0 < gradients[gradients > 0].min() < 1e-7 and np.median(gradients[gradients > 0]) < 1e-3
    if program != 'mnist':
        packed = [value for call in found for value in call.arguments.values() if hasattr(value, 'offsets')]
        assert packed and len({length for rows in packed for length in np.diff(rows.offsets).tolist()}) > 2


def test_forward_equals_the_formula_in_float64(rows):
    for row in rows:
        run = Run(row, row.size, backward=False)
        want, change = sensitivity(run.reference, run.variables())
        of_loss = EPS * isinstance(run.op, LOSSES)        # the logarithm of a sum near 1, which is rounded
        near(run.y, want, RTOL * np.abs(want).max() + change + of_loss, row.name)


def test_backward_equals_the_slope_along_a_random_direction(rows):
    for row in rows:
        run, rng = Run(row, row.size), np.random.default_rng(2)
        variables, dy = run.variables(), run.dy.astype(np.float64)
        for name, value in variables.items():
            direction = rng.choice((-1.0, 1.0), value.shape)

            def slope(given, name=name, direction=direction, run=run, dy=dy):
                above, below = (run.reference(given | {name: given[name] + sign * STEP * direction}) for sign in (1, -1))
                return np.array(((above - below) * dy).sum() / (2 * STEP))
            want, change = sensitivity(slope, variables)
            lost = 5e-5 * np.abs(run.grads[name]).max() * np.sqrt(value.size) + np.finfo(float).eps * np.abs(dy).sum() / STEP
            near(np.array((run.grads[name].astype(float) * direction).sum()), want, lost + change + of_labels(run, name),
                 f'{row.name}: d {name}')


def of_labels(run, name):
    """Return what a slope of a loss may lose beside: the probability of a label is near 1, and its gradient is the difference
    from 1, rounded for each row."""
    if not isinstance(run.op, LOSSES):
        return 0.0
    labels = run.built.constants['labels']
    count, weight = np.count_nonzero(labels != run.op.ignore), run.built.params.get('weight', np.ones(1))
    of_row = {'weight': np.abs(run.built.inputs['x']).sum(-1).max(), 'bias': 1.0, 'x': np.abs(weight).sum(-1).max()}[name]
    return 4 * EPS * of_row / np.sqrt(count)


def test_gradients_of_parameters_add_and_others_overwrite(rows):
    for row in rows:
        test_table.test_parameter_gradients_add_and_activation_gradients_overwrite(row, row.size)


def test_writes_stay_inside_and_nothing_uninitialised_is_read(rows):
    for row in rows:
        test_table.test_writes_stay_inside_and_nothing_uninitialised_is_read(row, row.size)
