"""Ops whose kernels are recorded at the second call with inputs of the same shapes: one call of the library runs them."""
import numpy as np
import pytest
from places import on_the_cpu

from pyops import backend, nn, ops
from pyops import functional as F
from pyops.autograd import Tensor, apply, detect_anomaly, grad, no_grad
from pyops.autograd.tape import KernelCall, RecordedForward
from pyops.backend import pool
from pyops.backend.host import LARGE
from pyops.backend.recorded_ops import record

pytestmark = on_the_cpu
OPS = [op for op in map(vars(ops).get, sorted(vars(ops))) if isinstance(op, type) and 'same_launches' in vars(op)]
RNG = np.random.default_rng(5)


def rows(*shape):
    return RNG.standard_normal(shape).astype('f')


def forwards_of(y):
    """The RecordedForward that computed y, or None."""
    return y.origin[0].call


def results(op, inputs, parameters, settings):
    """y and all gradients of a weighted sum of y."""
    xs = [Tensor(x, requires_grad=x.dtype.kind == 'f') for x in inputs]
    for parameter in parameters.values():
        parameter.grad = None
    y = apply(op, *xs, **parameters, **settings)
    y.backward(np.linspace(-1, 2, y.size, dtype='f').reshape(y.shape))
    return y, [y.numpy(), *[x.grad.numpy() for x in xs if x.requires_grad],
               *[parameter.grad.numpy().copy() for parameter in parameters.values()]]


def test_these_ops_are_recorded():
    assert {op.__name__ for op in OPS} == {'BatchNorm', 'Conv2d', 'CrossEntropy', 'GELU', 'GELUTanh', 'Linear', 'ReLU', 'SiLU'}


@pytest.mark.parametrize('of_a_module', [True, False])
@pytest.mark.parametrize('op', OPS, ids=lambda op: op.__name__)
def test_a_recorded_op_has_the_bits_of_the_op_itself(op, of_a_module):
    inputs, named = op.example(rows)
    make = nn.Parameter if of_a_module else Tensor
    settings = {name: value for name, value in named.items() if not isinstance(value, np.ndarray)}
    named = {name: make(value, requires_grad=True) for name, value in named.items() if name not in settings}
    found = [results(op, inputs, named, settings) for _ in range(4)]
    assert all(forwards_of(y) is not None for y, _ in found[1:])
    backwards = forwards_of(found[-1][0]).backwards
    assert (None in backwards.values() or not backwards) == (bool(named) and not of_a_module)
    with backend.hooks():                           # as while a plan records: the op itself runs
        y, want = results(op, inputs, named, settings)
    assert forwards_of(y) is None
    for _, got in found:
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape and (a == b).all()


def twice(function):
    """The second result of a function, which is recorded."""
    function()
    return function()


def test_gradients_elsewhere_second_gradients_and_hooks_have_the_same_bits():
    layer, x = nn.Linear(4, 3), Tensor(rows(5, 4), requires_grad=True)
    labels = Tensor(np.array([0, 2, 1, 1, 0], 'i'))

    def loss():
        return F.cross_entropy(layer(x).relu(), labels)

    def found():
        first = grad(loss(), [x, layer.weight])
        second, = grad((grad(loss(), x, create_graph=True)[0] ** 2).sum(), layer.weight)
        removed = layer.weight.register_hook(lambda gradient: gradient * 2)
        layer.weight.grad = None
        loss().backward()
        removed.remove()
        return [one.numpy().copy() for one in (*first, second, layer.weight.grad)]
    with backend.hooks():
        want = found()
    for _ in range(3):
        got = found()
        assert all((a == b).all() for a, b in zip(got, want, strict=True))
    assert forwards_of(loss()) is not None and abs(want[-1]).max() > 0 and (want[-1] == 2 * want[1]).all()


def test_gradients_accumulate_and_a_retained_graph_runs_again():
    layer, x = nn.Linear(4, 3), Tensor(rows(5, 4))
    y = twice(lambda: layer(x).sum())
    y.backward(retain_graph=True)
    once = layer.weight.grad.numpy().copy()
    y.backward()
    assert (layer.weight.grad.numpy() == 2 * once).all()
    with pytest.raises(RuntimeError, match='used by an earlier backward'):
        y.backward()


def test_changes_in_place_are_detected():
    layer = nn.Linear(4, 3)
    with no_grad():
        x = Tensor(rows(5, 4))
    y = twice(lambda: layer(x))
    x[0] = 1.0
    with pytest.raises(RuntimeError, match='Linear: an array of shape .5, 4. that backward needs was changed in place'):
        y.sum().backward()
    y = twice(lambda: layer(x))
    with no_grad():
        layer.weight[0] = 1.0
    with pytest.raises(RuntimeError, match='Linear: an array of shape .3, 4.'):
        y.sum().backward()


def test_errors_are_raised_by_the_op():
    x = Tensor(rows(3, 4))
    labels = Tensor(np.array([0, 1, 3], 'i'))
    twice(lambda: F.cross_entropy(x, labels))
    with pytest.raises(ValueError, match='label'):
        F.cross_entropy(x, Tensor(np.array([0, 4, 1], 'i')))
    with pytest.raises(TypeError, match='int32'):
        for _ in range(3):
            apply(ops.CrossEntropy, x, x[:, 0])
    freed = Tensor(rows(3, 4))
    freed.array.buffer.free()
    with pytest.raises(ValueError, match='freed'):
        apply(ops.CrossEntropy, freed, labels)
    layer, given = nn.Linear(4, 3), Tensor(rows(5, 3))
    for _ in range(3):
        with pytest.raises(ValueError, match=r'^Linear\(4, 3\): x: expected shape \(5, 4\), got \(5, 3\)$'):
            layer(given)


@pytest.mark.parametrize('dtype', ['float64', 'int32'])
def test_gradients_of_other_dtypes_are_refused(dtype):
    x = Tensor(rows(3, 4), requires_grad=True)
    y = twice(lambda: F.silu(x))
    with pytest.raises(TypeError, match='dy: expected .*float32'):
        y.backward(Tensor(np.ones((3, 4)), dtype=dtype))


def test_views_other_shapes_and_shared_memory():
    layer, x = nn.Linear(4, 3), rows(6, 8)
    whole = Tensor(x)
    for part in (np.s_[:, :4], np.s_[1:5, 4:], np.s_[2:, ::2]):
        y = twice(lambda part=part: layer(whole[part]))
        assert np.allclose(y.numpy(), x[part] @ layer.weight.numpy().T + layer.bias.numpy(), atol=1e-5)
        assert forwards_of(y) is None               # they are copied first
    rest = Tensor(x.reshape(12, 4))[3:]
    y = twice(lambda: layer(rest))
    assert forwards_of(y) is not None
    assert np.allclose(y.numpy(), x.reshape(12, 4)[3:] @ layer.weight.numpy().T + layer.bias.numpy(), atol=1e-5)
    empty = Tensor(np.ones((0, 4), 'f'))
    assert twice(lambda: layer(empty)).shape == (0, 3)


def test_a_nan_is_found():
    x = Tensor(rows(3, 4), requires_grad=True)
    y = twice(lambda: F.gelu(x))
    with detect_anomaly(), pytest.raises(RuntimeError, match='GELU: its backward computed a gradient with a NaN'):
        y.backward(np.full((3, 4), np.nan, 'f'))


def test_launches_are_visible_to_a_plan_that_records():
    layer, x, names = nn.Linear(4, 3), Tensor(rows(5, 4)), []
    y = twice(lambda: layer(x))
    y.sum().backward()
    with backend.hooks(listen=lambda name, values: names.append(name) or True):
        layer(x).relu().sum().backward()
    assert {'gemm', 'relu_forward', 'relu_backward', 'linear_backward'} <= set(names)


def test_a_class_derived_from_a_recorded_op_is_not_recorded():
    class Louder(ops.ReLU):
        def forward(self, x):
            return super().forward(x * 2)
    x = Tensor(rows(3, 4), requires_grad=True)
    for _ in range(3):
        y = apply(Louder, x)
        assert forwards_of(y) is None and (y.numpy() == np.maximum(2 * x.numpy(), 0)).all()


def test_settings_and_parameters_that_change_are_seen():
    x, labels = Tensor(rows(3, 4)), Tensor(np.array([0, 1, -1], 'i'))
    first = twice(lambda: F.cross_entropy(x, labels, ignore_index=-1)).item()
    assert first != twice(lambda: F.cross_entropy(x[:2], labels[:2])).item() * 2
    layer = nn.Linear(4, 3)
    before = twice(lambda: layer(x)).numpy()
    layer.weight = np.zeros((3, 4), 'f')
    after = layer(x)
    assert before.any() and (after.numpy() == layer.bias.numpy()).all() and forwards_of(after) is not None


def test_what_cannot_be_recorded():
    kept = []
    assert record(lambda x: (backend.empty((0,)),), [((3,), np.dtype('f'))], kept) is None
    assert record(lambda x: (x * 2,), [((3,), np.dtype('f'))], kept) is None                # computed without a kernel
    assert record(lambda *xs: xs, [((3,), np.dtype('f'))] * 7, kept) is None                # too many arrays
    assert record(lambda x: (backend.empty(x.shape), None, x), [((3,), np.dtype('f'))], kept).results == [0, None, 1]


def test_a_training_step_on_images_has_the_same_bits():
    images = rows(20, 3, 16, 16)            # results of the first layers are as large as memory of the pool
    assert 20 * 8 * 16 * 16 * 4 >= pool.LEAST

    def found():
        net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2),
                            nn.BatchNorm2d(8))
        ys = []
        for _ in range(4):
            y = net(Tensor(images))
            ys.append(y)
            (y * y).mean().backward()
        return y, [*[y.numpy() for y in ys], *[p.grad.numpy() for p in net.parameters()], *[
            net[i].running_var.numpy() for i in (1, 4)]]
    y, got = found()
    assert forwards_of(y) is not None
    with backend.hooks():
        y, want = found()
    assert forwards_of(y) is None and all((a == b).all() for a, b in zip(got, want, strict=True))


def test_large_results_are_in_memory_of_the_pool_until_their_last_view_is_deleted():
    x = Tensor(rows(pool.LEAST // 4))
    y = twice(lambda: F.relu(x))
    before = LARGE.unused
    view = y[1:].numpy()
    del y
    assert LARGE.unused == before and (view == np.maximum(x.numpy()[1:], 0)).all()
    del view
    assert LARGE.unused == before + pool.LEAST


def test_few_recordings_are_kept():
    kernel = KernelCall(ops.ReLU, {})
    for n in range(1, 100):
        x = [Tensor(np.ones(n, 'f')).array]
        assert kernel.forward_for(n, x) is None
        assert isinstance(kernel.forward_for(n, x), RecordedForward)
        assert len(kernel.forwards) <= 64
