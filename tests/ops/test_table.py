"""Properties of ops: each is checked for every row of the op table at every size, and for the example of every op.

`make test-all` runs this file on each instruction set and on the emulated CUDA library.
"""
import numpy as np
import pytest
from arrays import close, near, parameter, same
from places import get, of_threads, put
from rows import EACH, EXAMPLES, FIRST, SMALL, TABLE, AttentionRow, Run

from pyops import backend
from pyops.differences import SLACK, central_differences


@pytest.mark.parametrize('row,size', [*EACH, *EXAMPLES])
def test_forward_equals_the_formula_in_float64(row, size):
    run = Run(row, size, backward=False)
    close(run.y, run.reference(run.variables()), name='y')


@pytest.mark.parametrize('row,size', [*SMALL, *EXAMPLES])
def test_backward_equals_central_differences(row, size):
    """Differentiate the float64 reference, which permits small steps, and compare the gradients of the kernels."""
    run = Run(row, size)
    variables = run.variables()
    for name, value in variables.items():
        numeric = central_differences(lambda: (run.reference(variables) * run.dy).sum(), value)
        if max(size) > 1:
            assert np.abs(numeric).max() > 1e-3, f'd {name} is 0 everywhere: this test checks nothing'
        close(run.grads[name], numeric, 5e-5, f'd {name}')


# not with logits of 1e9, of which float64 has no digits for a small step
@pytest.mark.parametrize('row,size', [p for p in EACH if max(p.values[1]) < 1e6])
def test_backward_equals_the_slope_along_a_random_direction(row, size):
    """Two values of the float64 reference for each gradient: also for sizes at which a difference for each element is too slow.
    The error of a sum of n terms with random signs is sqrt(n) times the error of one, which is that of `close`, and half a unit
    in the last place of the noise that a gradient of a parameter is added to."""
    run, rng = Run(row, size), np.random.default_rng(2)
    variables = run.variables()
    for name, value in variables.items():
        direction, step = rng.choice((-1.0, 1.0), value.shape), 1e-6
        above, below = (run.reference(variables | {name: value + sign * step * direction}) for sign in (1, -1))
        slope = ((above - below) * run.dy).sum() / (2 * step)
        largest, noise = (np.abs(array).max(initial=0) for array in (run.grads[name], run.noise.get(name, np.zeros(1))))
        one = 5e-5 * (largest + SLACK) + np.finfo(np.float32).eps * noise
        near(np.array((run.grads[name] * direction).sum()), np.array(slope), one * np.sqrt(value.size), f'slope along d {name}')


@pytest.mark.parametrize('row,size', EACH)
def test_forward_and_backward_equal_torch(row, size, torch):
    run = Run(row, size)
    leaves = {name: torch.tensor(a, requires_grad=True) for name, a in run.variables().items()}
    constants = {name: torch.tensor(a) for name, a in run.built.constants.items()}
    y = row.torch(torch, **leaves, **constants, **run.extra())
    close(run.y, y.detach().numpy(), name='y')
    y.backward(torch.tensor(run.dy.astype(np.float64)))
    for name, leaf in leaves.items():
        close(run.grads[name], leaf.grad.numpy(), 5e-5, f'd {name}')


@pytest.mark.parametrize('row,size', [*EACH, *EXAMPLES])
def test_parameter_gradients_add_and_activation_gradients_overwrite(row, size):
    run = Run(row, size)
    again = run.backward()
    for name, grad in run.grads.items():
        if name in run.params:
            total = run.noise[name] + 2 * grad
            largest = np.abs(run.noise[name]).max() + np.abs(total).max()       # rounding is relative to this
            near(get(run.params[name].grad), total, 1e-6 * largest, f'sum of two gradients of {name}')
            near(again[name], grad, 1e-6 * largest, f'second gradient of {name}')
        else:
            same(again[name], grad, f'second d {name}')


GUARD = {np.dtype(t): value for t, value in (
    (np.float32, -7.25), (np.int32, -725), (np.int64, -725), (np.uint8, 201), (np.uint16, 7777))}


@pytest.mark.parametrize('row,size', [*EACH, *EXAMPLES])
def test_writes_stay_inside_and_nothing_uninitialised_is_read(row, size, guard=33):
    """Put guard zones around every array that an op allocates, fill the arrays with NaN, and misalign them by one float; not
    codes of FP8, whose rows tensor cores read 16 bytes at a time."""
    zones = []

    def guarded(array, guard=guard):
        zone = np.full(array.size + 2 * guard, GUARD[array.dtype], array.dtype)
        zone[guard:guard + array.size] = array.reshape(-1)
        zones.append((put(zone), array.size, guard))
        return zones[-1][0][guard:guard + array.size].reshape(array.shape)

    def allocate(shape, dtype, name, kind):
        return guarded(np.full(shape, np.nan if dtype == np.float32 else 99, dtype), 48 if dtype == np.uint8 else guard)

    plain = Run(row, size)
    with backend.hooks(allocate):
        run = Run(row, size, place=guarded)
    given, b = run.placed | {name: p.value for name, p in run.params.items()}, run.built
    assert len(zones) > len(b.inputs | b.params | b.constants), 'the op allocated no array: this test checks nothing'
    for i, (zone, n, guard) in enumerate((get(zone), n, guard) for zone, n, guard in zones):
        for where, side in (('before', zone[:guard]), ('after', zone[guard + n:])):
            same(side, np.full_like(side, GUARD[zone.dtype]), f'guard zone {where} array {i} of {n} elements')
    for name, array in (b.inputs | b.params | b.constants).items():
        same(get(given[name]), array, f'{name} after the op')
    same(run.y, plain.y, 'y')
    for name, grad in run.grads.items():
        assert np.isfinite(grad).all(), f'd {name} is not finite'
        same(grad, plain.grads[name], f'd {name}')


@of_threads
@pytest.mark.parametrize('row,size', [*(pytest.param(row, row.large, id=row.name) for row in TABLE),
                                      pytest.param(AttentionRow(True, 0.3, 'any'), (9, 7, 65, 4, 64), id='short attention')])
def test_same_bits_for_any_number_of_threads(row, size):
    before = backend.threads()
    try:
        runs = []
        for threads in (1, 2, 3, 8):
            backend.set_threads(threads)
            runs.append(Run(row, size))
    finally:
        backend.set_threads(before)
    for run in runs[1:]:
        same(run.y, runs[0].y, 'y')
        for name, grad in run.grads.items():
            same(grad, runs[0].grads[name], f'd {name}')


@pytest.mark.parametrize('row,size', FIRST)
def test_bad_arguments_are_refused_by_name(row, size):
    built = row.build(size, np.random.default_rng(0))
    op = built.op(**{name: parameter(name, value) for name, value in built.params.items()})
    arguments = built.arguments()
    placed = {name: put(array) for name, array in arguments.items()}
    for name, array in arguments.items():
        def call(bad, name=name):
            return op.forward(*(placed | {name: put(bad)}).values())
        with pytest.raises(TypeError, match=name):
            call(np.zeros(array.shape, np.float16))
        if array.ndim > 1:
            with pytest.raises(TypeError, match=name):
                call(put(np.asfortranarray(np.repeat(array, 2, -1)))[..., ::2])
        axis = getattr(row, 'wrong_axis', {}).get(name, -1)
        if axis is not None:
            with pytest.raises(ValueError, match='expected shape'):
                call(np.concatenate([array, array], axis))
    y, ctx = op.forward(*placed.values())
    with pytest.raises(TypeError, match='dy|dh|dloss'):
        op.backward(put(np.zeros(y.shape, np.float64)), ctx)
    if row.name != 'dropout':
        with pytest.raises(ValueError, match='dy|dh|dloss'):
            op.backward(put(np.zeros((*y.shape[:-1], y.shape[-1] + 1), np.float32)), ctx)
