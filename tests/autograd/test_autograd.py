"""Tensors and their tape: how gradients meet, what is kept and let go, what is refused, and how much it costs."""
import copy
import gc
import os
import pickle
import threading
import weakref

import numpy as np
import pytest
from arrays import close, normal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import get, on_the_cpu, put, share_memory

import pyops
from pyops import backend, ndarray, nn
from pyops import functional as F
from pyops.autograd import Node, Tensor, apply, backward, enable_grad, grad, is_grad_enabled, no_grad
from pyops.ops import GRU, LSTM, Dropout, Linear, Residual
from pyops.ops.array import ArrayOp
from pyops.ops.elementwise import Exp, Multiply

pytestmark = pytest.mark.usefixtures('new_objects')      # tests count nodes and live buffers


def leaf(*shape, seed=0):
    return Tensor(normal(np.random.default_rng(seed), *shape), requires_grad=True)


# ---- what a tensor is ------------------------------------------------------------------------------------------------

def test_tensors_are_made_of_numbers_in_any_form():
    for data, shape, dtype in ((1.5, (), 'float32'), (2, (), 'int32'), ([[1.0, 2], [3, 4]], (2, 2), 'float32'),
                               (np.arange(3), (3,), 'int32'), (np.ones(2, np.float64), (2,), 'float32'),
                               (np.array([True]), (1,), 'bool'), (np.float32(3), (), 'float32'),
                               (ndarray.ones((2, 1)), (2, 1), 'float32'), (Tensor([1, 2]), (2,), 'int32')):
        x = Tensor(data)
        assert x.shape == shape and x.dtype == dtype and not x.requires_grad and x.grad is None and x.is_leaf
    with pytest.raises(TypeError, match='expected real numbers, got complex'):
        Tensor(np.ones(2, complex))


def test_numpy_arrays_are_copied_and_ndarrays_shared():
    a = np.ones(3, np.float32)
    x = Tensor(a)
    a[0] = 5
    assert x.tolist() == [1, 1, 1]
    b = ndarray.ones(3)
    b[0] = 5
    assert Tensor(b).array is b
    assert share_memory(x.detach(), x) and x.data.origin is None


def test_only_real_numbers_have_a_gradient():
    with pytest.raises(TypeError, match='requires_grad: expected a tensor of floats, got int32'):
        Tensor([1, 2], requires_grad=True)


def test_numbers_and_text_of_a_tensor():
    x = Tensor([[1.0, 2.0]], requires_grad=True)
    assert repr(x) == 'Tensor([[1., 2.]], requires_grad=True)'
    assert repr(x * 2) == 'Tensor([[2., 4.]], op=Multiply)'
    assert repr(F.relu(x)).endswith('op=ReLU)')
    assert x.sum().item() == 3.0 and float(x.sum()) == 3.0 and int(x.sum()) == 3 and bool(x.sum() > 2)
    assert len(x) == 1 and [row.tolist() for row in x] == [[1.0, 2.0]]
    assert f'{x.sum():.2f}' == '3.00' and f'{x}' == repr(x)
    for call, error, text in ((lambda: x.item(), ValueError, r'item: expected a tensor of one element, got shape \(1, 2\)'),
                              (lambda: bool(x), ValueError, r'^the truth value of a tensor of shape \(1, 2\) is ambiguous: it '
                               r'has 2 elements; use .any\(\) or .all\(\)$'),
                              (lambda: bool(x != x), ValueError, 'truth value .* is ambiguous'),
                              (lambda: len(x.sum()), TypeError, 'len')):
        with pytest.raises(error, match=text):
            call()
    assert (x == x).min() and not (x != x).max()


def test_comparisons_are_constants():
    x = leaf(3)
    for y in (x > 0, x <= x, 0 < x, x == x, x != 1):
        assert not y.requires_grad and y.dtype == bool and set(y.tolist()) <= {False, True}
    assert x.argmax().dtype == np.int32 and not x.argmax().requires_grad
    assert {x: 'can be a key'}[x]


def test_flip_without_axes_reverses_all_of_them_everywhere():
    x = normal(np.random.default_rng(0), 2, 3, 4)
    for axes in ((), (None,), (1,), (-1, 0), ((0, 2),), ([0, 2],), ((),)):
        want = np.flip(x, *axes if len(axes) < 2 else [axes])
        for y in (Tensor(x).flip(*axes), ndarray.array(x).flip(*axes), F.flip(x, *axes if len(axes) < 2 else [axes])):
            assert (y.numpy() == want).all()
    y = leaf(2, 3)
    (y.flip() * Tensor([[1.0, 2, 3], [4, 5, 6]])).sum().backward()
    assert y.grad.tolist() == [[6, 5, 4], [3, 2, 1]]


def test_numbers_arrays_and_lists_stand_on_either_side_of_an_operator():
    x, a = leaf(3), np.float32([1, 2, 3])
    for y in (x + a, a + x, x + a.tolist(), np.float32(1) * (x + a), Tensor(a) + x, ndarray.array(a) + x, x + ndarray.array(a)):
        assert isinstance(y, Tensor) and y.requires_grad
        close(y.numpy(), x.numpy() + a)
    with pytest.raises(TypeError):
        _ = x + 'one'
    with pytest.raises(ValueError, match=r'\(3,\).*\(2,\)|\(2,\).*\(3,\)'):
        _ = x + np.ones(2, np.float32)


# ---- gradients -------------------------------------------------------------------------------------------------------

def test_gradients_add_up_over_uses_and_over_calls():
    x = leaf(2, 3)
    (x * x + x).sum().backward()
    want = 2 * x.numpy() + 1
    close(x.grad.numpy(), want)
    kept = x.grad
    (3 * x).sum().backward()
    close(x.grad.numpy(), want + 3)
    assert x.grad is kept, 'added in place'
    x.zero_grad()
    assert x.grad is None


def test_a_gradient_can_be_given():
    x, dy = leaf(2, 3), normal(np.random.default_rng(1), 2, 3)
    for given_as in (dy, Tensor(dy), dy.tolist()):
        x.zero_grad()
        (2 * x).backward(given_as)
        close(x.grad.numpy(), 2 * dy)


def test_grad_can_be_assigned():
    x = leaf(2, 3)
    for value in (np.ones((2, 3)), Tensor(np.ones((2, 3))), ndarray.ones((2, 3)), [[1, 1, 1], [1, 1, 1]]):
        x.grad = value
        (2 * x).sum().backward()
        assert isinstance(x.grad, Tensor) and (x.grad.numpy() == 3).all()
    with pytest.raises(ValueError, match=r'^grad: expected shape \(2, 3\) and float32, got \(3,\) and float32$'):
        x.grad = np.ones(3)
    x.grad = None
    assert x.grad is None


def test_a_gradient_that_is_handed_on_is_never_added_to():
    """d(x + y) is one array for both: their .grad must not be."""
    x, y = leaf(3), leaf(3, seed=1)
    (x + y).sum().backward()
    x.grad *= 5.0
    assert y.grad.tolist() == [1, 1, 1] and x.grad.tolist() == [5, 5, 5]
    z = leaf(3)
    dy = Tensor([1.0, 2.0, 3.0])
    (z + 0).backward(dy)
    z.grad *= 2.0
    assert dy.tolist() == [1, 2, 3]
    for _ in range(3):                      # y is a gradient of itself
        (z * 1.0).backward(z.grad)
    close(z.grad.numpy(), 16 * dy.numpy())


def test_gradients_are_compact_and_of_the_leafs_shape():
    x, y = leaf(2, 3), leaf(2, 3)
    x.sum().backward()
    for one, other in ((x.grad, None), grad((x + y).sum(), [x, y])):
        assert one.shape == x.shape and one.array.is_compact()
        one *= 5.0
        assert other is None or (other.numpy() == 1).all()


@pytest.mark.parametrize('create_graph', [False, True])
def test_grad_leaves_every_grad_alone_and_takes_tensors_that_are_no_leaves(create_graph):
    x, w = leaf(3), leaf(3, seed=1)
    h = x * w
    y = (h * h).sum() + h[0]
    gh, gw = grad(y, [h, w], create_graph=create_graph)
    want = 2 * h.numpy() + np.float32([1, 0, 0])
    close(gh.numpy(), want)
    close(gw.numpy(), want * x.numpy())
    assert x.grad is None and w.grad is None and gh.requires_grad == create_graph


def test_grad_runs_only_what_leads_to_its_inputs():
    ran = []

    class Watched(ArrayOp):
        def forward(x):
            return x * 1.0, ()

        def backward(dy, ctx):
            ran.append(dy.shape)
            return dy

    x, w = leaf(3), leaf(3, seed=1)
    y = (apply(Watched, x) * w).sum()
    grad(y, w, retain_graph=True)
    assert not ran
    grad(y, [x])
    assert len(ran) == 1


def test_an_input_that_the_output_does_not_depend_on():
    x, other = leaf(3), leaf(3)
    with pytest.raises(RuntimeError, match=r'grad: the outputs do not depend on input 1 of shape \(3,\)'):
        grad((2 * x).sum(), [x, other])
    assert grad((2 * x).sum(), [x, other], allow_unused=True)[1] is None
    with pytest.raises(RuntimeError, match=r'grad: input 0 of shape \(3,\) needs no gradient'):
        grad((2 * x).sum(), [Tensor([1.0, 2, 3])])


def test_gradients_of_several_outputs():
    x = leaf(4, 3)
    a, b = F.split(x, 2)
    dy = np.ones((2, 3), np.float32)
    g, = grad([a * 2, b * b], [x], [Tensor(dy), Tensor(3 * dy)])
    close(g.numpy(), np.concatenate([2 * dy, 6 * b.numpy()]))
    a, _ = F.split(x, 2)                                        # the other one has no gradient: zeros
    backward([a.sum(), (a * 2).sum()], [None, None])
    close(x.grad.numpy(), np.concatenate([3 * dy, 0 * dy]))


@pytest.mark.parametrize('op', [lambda a, b: a * b, lambda a, b: a @ b, lambda a, b: F.cat([a, b]), lambda a, b: a.maximum(b),
                                lambda a, b: F.relu(a) + b], ids=['multiply', 'matmul', 'cat', 'maximum', 'relu'])
def test_a_gradient_has_the_dtype_of_its_tensor(op):
    values = np.random.default_rng(3).standard_normal((2, 3, 3))
    want = [Tensor(x, dtype='float64', requires_grad=True) for x in values]
    op(*want).sum().backward()
    for dtypes in (('float32', 'float64'), ('float64', 'float32')):
        xs = [Tensor(x, dtype=dtype, requires_grad=True) for x, dtype in zip(values, dtypes, strict=True)]
        y = op(*xs)
        y.sum().backward()
        assert y.dtype == np.float64
        for x, dtype, other in zip(xs, dtypes, want, strict=True):
            assert x.grad.dtype == dtype
            close(x.grad.numpy(), other.grad.numpy())


@pytest.mark.parametrize('a, b', [((2, 5, 0), (0, 3)), ((2, 5, 0), (0,)), ((2, 5, 4), (4, 0)), ((0, 5, 4), (4, 3)),
                                  ((2, 0, 4), (4, 3)), ((0, 4), (4, 0)), ((2, 3, 0), (2, 0, 5))])
def test_products_of_arrays_without_elements_have_gradients(a, b):
    a, b = (Tensor(np.ones(shape, 'f'), requires_grad=True) for shape in (a, b))
    y = a @ b
    assert (y.numpy() == 0).all()
    y.sum().backward()
    for x in (a, b):
        assert x.grad.shape == x.shape and (x.grad.numpy() == 0).all()


def test_derivatives_of_any_order():
    x = Tensor([0.5, -2.0], requires_grad=True)
    y, want = (x**5).sum(), 1.0
    for n in range(5, 0, -1):
        y, = grad(y if y.size == 1 else y.sum(), x, create_graph=True)
        want *= n
        close(y.numpy(), want * x.numpy().astype(float)**(n - 1))


def test_backward_of_a_gradient_mixes_with_other_terms():
    """A gradient penalty: the norm of dy/dx is part of the loss."""
    x, w = leaf(4, 3), leaf(3, 1, seed=1)
    y = (x @ w).tanh()
    gx, = grad(y.sum(), x, create_graph=True)
    ((gx * gx).sum() + (y * y).sum()).backward()
    s = 1 - np.tanh(x.numpy() @ w.numpy().astype(float))**2
    t = np.tanh(x.numpy() @ w.numpy().astype(float))
    norm = (w.numpy().astype(float)**2).sum()
    want = 2 * w.numpy() * (s**2).sum() + x.numpy().T @ (norm * 2 * s * -2 * t * s) + x.numpy().T @ (2 * t * s)
    close(w.grad.numpy(), want)


def test_a_kernel_op_without_a_formula_has_a_first_derivative_only():
    x = leaf(3, 2, 4)
    y = F.attention(x, x, x, 2).sum()
    with pytest.raises(RuntimeError, match='Attention: has no second derivative'):
        grad(y, x, create_graph=True)


def test_a_custom_op_is_two_functions():
    class Cube(ArrayOp):
        def forward(x):
            return x * x * x, (x,)

        def backward(dy, ctx):
            x, = ctx
            return dy * (3 * x * x)

    x = leaf(3)
    g, = grad(apply(Cube, x).sum(), x, create_graph=True)
    close(grad(g.sum(), x)[0].numpy(), 6 * x.numpy())


def test_a_gradient_of_the_wrong_shape_is_named():
    class Wrong(ArrayOp):
        def forward(x):
            return x.sum(), ()

        def backward(dy, ctx):
            return dy
    with pytest.raises(RuntimeError, match=r'Wrong: its backward returned a gradient of shape \(\) for an input'):
        apply(Wrong, leaf(3)).backward()


class TestKernels:
    def test_parameters_that_are_used_twice_get_both_gradients(self):
        x, w = leaf(5, 4), leaf(4, 4)
        F.linear(F.linear(x, w), w).sum().backward()
        kernel, w.grad = w.grad, None
        ((x @ w.T) @ w.T).sum().backward()
        close(kernel.numpy(), w.grad.numpy())

    def test_parameters_may_be_results_views_and_constants(self, torch):
        x, w = leaf(5, 4), leaf(4, 3, seed=1)
        y = F.linear(x, (2 * w).T, Tensor([1.0, 2.0, 3.0]))
        dx, dw = grad((y * y).sum(), [x, w])
        t = [torch.tensor(v.numpy().astype(float), requires_grad=True) for v in (x, w)]
        u = t[0] @ (2 * t[1]) + torch.tensor([1.0, 2.0, 3.0])
        for ours, theirs in zip((dx, dw), torch.autograd.grad((u * u).sum(), t), strict=True):
            close(ours.numpy(), theirs.numpy())

    def test_the_first_layer_does_not_compute_the_gradient_of_the_data(self, monkeypatch):
        asked = []
        plain = Linear.backward
        monkeypatch.setattr(Linear, 'backward', lambda self, dy, ctx, want_dx=True, into=None:
                            (asked.append(want_dx), plain(self, dy, ctx, want_dx, into))[1])
        F.linear(Tensor(np.ones((2, 3))), leaf(4, 3)).sum().backward()
        F.linear(leaf(2, 3), leaf(4, 3)).sum().backward()
        assert asked in ([False, True], [True, True]) and asked[1]

    def test_the_first_recurrent_layer_does_not_compute_the_gradient_of_the_data(self, monkeypatch):
        asked, w, x = [], {}, np.random.default_rng(0).standard_normal((3, 2, 4), 'f')
        for name, shape in (('w_ih', (20, 4)), ('w_hh', (20, 5)), ('b_ih', (20,)), ('b_hh', (20,))):
            w[name] = leaf(*shape)
        plain = LSTM.backward
        monkeypatch.setattr(LSTM, 'backward', lambda self, dy, ctx, want_dx=True:
                            (asked.append(want_dx), plain(self, dy, ctx, want_dx))[1])
        found = []
        for data in Tensor(x), Tensor(x, requires_grad=True):
            h, c = F.lstm(data, None, None, **w)
            (h.sum() + (c * c).sum()).backward()
            found.append([p.grad.numpy().copy() for p in w.values()])
            for p in w.values():
                p.grad = None
        assert asked == [False, True] and data.grad.shape == x.shape
        for without, with_dx in zip(*found, strict=True):
            np.testing.assert_array_equal(without, with_dx)

    def test_gradients_add_to_the_buffer_of_grad_without_a_second_pass(self):
        x, w = Tensor(np.ones((2, 3))), leaf(4, 3)
        F.linear(x, w).sum().backward()
        memory = w.grad.array.buffer
        F.linear(x, w).sum().backward()
        assert w.grad.array.buffer is memory and (w.grad.numpy() == 4).all()

    def test_results_are_not_copied(self):
        x = Tensor(np.ones((2, 3)))
        seen = []

        class Watched(Linear):
            def forward(self, x):
                y, ctx = super().forward(x)
                seen.extend([x, y, self.weight.value])
                return y, ctx

        w = leaf(4, 3)
        y = apply(Watched, x, weight=w)
        assert share_memory(seen[0], x) and share_memory(seen[1], y) and share_memory(seen[2], w)

    def test_dropout_repeats_its_mask_in_backward_and_changes_it_between_steps(self):
        x = Tensor(np.ones(1000), requires_grad=True)
        y = F.dropout(x, 0.3, key=5, step=2)
        y.sum().backward()
        assert (x.grad.numpy() == y.numpy()).all()
        assert (get(Dropout(0.3, 5).forward(put(x.numpy()), put(np.array([2])))[0]) == y.numpy()).all()
        first, second = F.dropout(x, 0.3), F.dropout(x, 0.3)
        assert (first.numpy() != second.numpy()).any()
        assert F.dropout(x, 0.3, training=False) is x and F.dropout(x, 0.0) is x

    def test_an_op_that_returns_its_gradient_as_it_came(self):
        """Residual hands dy on, to both of its inputs."""
        x, branch = leaf(2, 3), leaf(2, 3, seed=1)
        y = F.residual(x, branch)
        (y * y).sum().backward()
        x.grad *= 0.0
        close(branch.grad.numpy(), 2 * y.numpy())
        made = apply(Residual(), x, branch)             # an op without parameters, ready-made
        assert (made.numpy() == y.numpy()).all() and made.requires_grad

    def test_gru_takes_no_state_or_one(self):
        T, B, H = 3, 2, 4
        weights = [leaf(*shape, seed=i) for i, shape in enumerate([(3 * H, 5), (3 * H, H), (3 * H,), (3 * H,)])]
        x, zeros = leaf(T, B, 5), Tensor(np.zeros((B, H)), requires_grad=True)
        without = grad(F.gru(x, None, *weights)[-1].sum(), [x, *weights])
        with_h0 = grad(F.gru(x, zeros, *weights)[-1].sum(), [x, *weights, zeros])
        for a, b in zip(without, with_h0, strict=False):
            close(a.numpy(), b.numpy(), 1e-6)
        assert with_h0[-1].shape == (B, H)

    def test_errors_name_the_argument(self):
        with pytest.raises(ValueError, match=r'x: expected shape \(5, 3\), got \(5, 4\)'):
            F.linear(leaf(5, 4), leaf(2, 3))
        with pytest.raises(TypeError, match='labels: expected dtype int32, got float32'):
            F.cross_entropy(leaf(5, 4), np.zeros(5, np.float32))
        with pytest.raises(ValueError, match='labels'):
            F.cross_entropy(leaf(2, 4), [0, 4])
        with pytest.raises(TypeError):
            apply(GRU, leaf(2, 3, 4))


def test_copies_of_a_leaf_and_a_clone_on_the_tape():
    x = leaf(3)
    (x * 2).sum().backward()
    for twin in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert twin.requires_grad and twin.tolist() == x.tolist() and twin.grad.tolist() == [2, 2, 2]
        assert not share_memory(twin, x) and not share_memory(twin.grad, x.grad)
    with pytest.raises(RuntimeError, match=r'shape \(3,\) with a history cannot be copied.*detach'):
        copy.deepcopy(x * 2)
    y = x.clone()
    assert not share_memory(y, x)
    (y * y).sum().backward()
    close(x.grad.numpy(), 2 + 2 * x.numpy())


@on_the_cpu
def test_dlpack_of_a_tensor_shares_its_memory():
    x = leaf(3)
    assert np.shares_memory(np.from_dlpack(x), x.numpy()) and x.__dlpack_device__() == (1, 0)


# ---- recording -------------------------------------------------------------------------------------------------------

def test_no_grad_records_nothing():
    x = leaf(3)
    with no_grad():
        assert not is_grad_enabled() and not (x * 2).requires_grad and not F.linear(x, leaf(2, 3)).requires_grad
        with enable_grad():
            assert (x * 2).requires_grad
        assert not (x * 2).requires_grad
    assert is_grad_enabled() and (x * 2).requires_grad

    @no_grad()
    def evaluate():
        return x * 2
    assert not evaluate().requires_grad and (x * 2).requires_grad
    with pytest.raises(ZeroDivisionError), no_grad():
        raise ZeroDivisionError
    assert is_grad_enabled()


def test_one_no_grad_may_be_entered_twice_but_not_stand_above_a_generator():
    off = no_grad()
    with off, off:
        assert not is_grad_enabled()
    assert is_grad_enabled()
    with pytest.raises(TypeError, match='batches: a generator runs after the call that creates it'):
        @no_grad()
        def batches():
            yield is_grad_enabled()


def test_no_grad_is_of_one_thread():
    seen = []
    with no_grad():
        thread = threading.Thread(target=lambda: seen.append(is_grad_enabled()))
        thread.start()
        thread.join()
    assert seen == [True]


def test_detach_cuts_the_graph():
    x = leaf(3)
    y = x * 2
    z = (y.detach() * x).sum()
    z.backward()
    close(x.grad.numpy(), 2 * x.numpy())
    assert share_memory(y, y.detach())
    with pytest.raises(RuntimeError, match='can be switched off for leaves only'):
        y.requires_grad_(False)
    assert not x.requires_grad_(False).requires_grad


@pytest.mark.parametrize('make', [lambda x: (x * x).sum(), lambda x: F.relu(x).sum(), lambda x: x.exp()[0]],
                         ids=['array op', 'kernel op', 'view'])
def test_the_second_use_of_a_freed_graph_is_an_error(make):
    x = leaf(3)
    y = make(x)
    y.backward(retain_graph=True)
    first = x.grad.numpy().copy()
    y.backward()
    close(x.grad.numpy(), 2 * first)
    with pytest.raises(RuntimeError, match='was used by an earlier backward.*retain_graph=True'):
        y.backward()
    with pytest.raises(RuntimeError, match='was used by an earlier backward.*retain_graph=True'):
        grad(y, x)


def test_a_part_that_is_shared_is_freed_with_the_first_use():
    x = leaf(3)
    h = x.exp()
    (h * 2).sum().backward()
    with pytest.raises(RuntimeError, match='Exp: this part of the graph was used'):
        (h * 3).sum().backward()


def test_backward_of_what_is_no_scalar_or_needs_no_gradient():
    x = leaf(2, 3)
    with pytest.raises(RuntimeError, match=r'backward: a tensor of shape \(2, 3\) is not a scalar'):
        (x * 2).backward()
    with pytest.raises(ValueError, match=r'the gradient of a tensor of shape \(2, 3\) has shape \(3,\)'):
        (x * 2).backward(np.ones(3, np.float32))
    with pytest.raises(RuntimeError, match=r'backward: a tensor of shape \(2,\) needs no gradient'):
        Tensor([1.0, 2.0]).backward()
    with no_grad():
        y = x.sum()
    with pytest.raises(RuntimeError, match=r'shape \(\) needs no gradient: .* within no_grad'):
        y.backward()


def test_tensors_of_two_devices_do_not_meet():
    a, b = Tensor([[1.0, 2]], device=pyops.cpu()), Tensor([[1.0, 2]], requires_grad=True, device=pyops.numpy_device())
    for call in (lambda: a + b, lambda: F.linear(a, b), lambda: a @ b.T, lambda: F.cat([a, b])):
        with pytest.raises(TypeError, match='numpy_device'):
            call()
    with pytest.raises(TypeError, match='expected .*numpy_device'):
        Tensor(a, device=pyops.numpy_device())


def test_everything_runs_on_the_numpy_device_too():
    def loss(device):
        rng = np.random.default_rng(0)
        x, w, b = (Tensor(normal(rng, *s), requires_grad=True, device=device) for s in ((4, 3), (5, 3), (5,)))
        y = F.log_softmax(F.relu(F.linear(x, w, b)) @ w * 2, (0, 1))
        (y[1:, ::2].sum() + F.embedding([0, 2], w)[0].sum() + F.cross_entropy(x, [0, 1, 2, 1])).backward()
        return [x.grad, w.grad, b.grad]
    for ours, oracle in zip(loss(pyops.cpu()), loss(pyops.numpy_device()), strict=True):
        assert oracle.device is pyops.numpy_device()
        close(ours.numpy(), oracle.numpy(), 1e-6)


# ---- in place --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('change', [
    lambda x: x.array.__setitem__(0, 5.0), lambda x: x.__setitem__(slice(1), 2.0), lambda x: x.__imul__(2.0),
    lambda x: x[1:].array.__iadd__(1.0), lambda x: x.T.array.fill(0)], ids=['array', 'setitem', 'times', 'view', 'fill'])
@pytest.mark.parametrize('use', [
    lambda x, w: x * w, lambda x, w: (x * w).exp(), lambda x, w: F.linear(x, w), lambda x, w: x @ w.T],
    ids=['multiply', 'exp', 'linear', 'matmul'])
def test_a_change_of_what_backward_needs_is_refused(change, use):
    x, w = Tensor(np.ones((2, 2))), leaf(2, 2)
    y = use(x, w).sum()
    with no_grad():
        change(x)
    with pytest.raises(RuntimeError, match=r'(Multiply|Linear|MatMul): an array of shape .* changed in place'):
        y.backward()


def test_a_change_of_a_saved_result_or_weight_is_refused_and_of_anything_else_is_not():
    x = leaf(3)
    y = x.exp()
    with no_grad():
        y *= 2.0
    with pytest.raises(RuntimeError, match='Exp: an array of shape'):
        y.sum().backward()
    w = leaf(2, 3)
    y = F.relu(F.linear(x, w))
    with no_grad():
        w -= 0.1
    with pytest.raises(RuntimeError, match='Linear: an array of shape'):
        y.sum().backward()
    y = x + w
    with no_grad():
        w -= 0.1                            # an addition needs neither
    y.sum().backward()


def test_a_leaf_changes_only_within_no_grad():
    x = leaf(3)
    for change in (lambda: x.__iadd__(1.0), lambda: x.__setitem__(0, 1.0), lambda: x.__imul__(x)):
        with pytest.raises(RuntimeError, match=r'in-place change of a leaf of shape \(3,\) that requires a gradient'):
            change()
    memory, before = x.array, x.numpy().copy()
    with no_grad():
        x -= 1.0
        x[0] = 7.0
    assert x.array is memory and x.requires_grad and x.is_leaf
    close(x.numpy(), np.concatenate([[7], before[1:] - 1]))


def test_in_place_changes_on_the_tape_keep_what_was_saved(torch):
    def ours(x, w):
        y = x * w
        z = y.exp()
        y += w
        y *= y                              # PyTorch would refuse this: the product needs the y that it replaces
        part = Tensor(np.zeros(3))
        part[1:] = y[:2]
        part[0] = 3.0
        part[0] += x[0]
        return (part * z).sum() + y.sum()

    def theirs(x, w):
        y = (x * w + w)**2
        return (torch.cat([3.0 + x[:1], y[:2]]) * (x * w).exp()).sum() + y.sum()
    x, w = leaf(3), leaf(3, seed=1)
    t = [torch.tensor(v.numpy().astype(float), requires_grad=True) for v in (x, w)]
    ours, theirs = ours(x, w), theirs(*t)
    close(ours.numpy(), theirs.detach().numpy())
    for a, b in zip(grad(ours, [x, w]), torch.autograd.grad(theirs, t), strict=True):
        close(a.numpy(), b.numpy())


def test_an_in_place_change_keeps_the_shape():
    y = leaf(3) * 2
    with pytest.raises(ValueError, match=r'in-place: a tensor of shape \(3,\) cannot become one of shape \(2, 3\)'):
        y += leaf(2, 3)


def test_data_can_be_replaced():
    w = leaf(2)
    w.data = w.data - 0.5 * Tensor([1.0, 1.0])
    assert w.requires_grad and w.is_leaf
    for bad in (np.ones(3, np.float32), np.ones(2, np.int32)):
        with pytest.raises(ValueError, match=r'data: expected shape \(2,\)'):
            w.data = bad


# ---- memory and time -------------------------------------------------------------------------------------------------

@pytest.fixture
def without_gc():
    """Reference counts alone must do."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def nodes():
    return sum(type(o) is Node for o in gc.get_objects())


def test_a_graph_goes_with_its_last_tensor(without_gc):
    before = nodes(), len(ndarray.live_buffers())
    x, w = leaf(4, 3), leaf(3, 3)
    y = F.relu(F.linear((x @ w).tanh()[1:, ::2] + 1, w[:, :2])).logsumexp()
    z = F.stack(F.unbind(x.exp()))
    assert nodes() > before[0] + 8
    watched = weakref.ref(y)
    del y
    assert watched() is None
    del x, w, z
    assert (nodes(), len(ndarray.live_buffers())) == before


@on_the_cpu
def test_the_op_of_plain_tensors_is_kept_while_their_arrays_are_the_same():
    x, weight, bias = leaf(2, 3), leaf(4, 3, seed=1), leaf(4, seed=2)

    def expect(kept):
        before = getattr(weight, '_calls', {}).get(Linear)
        y = F.linear(x, weight, bias)
        close(y.detach().numpy(), x.detach().numpy() @ weight.detach().numpy().T + bias.detach().numpy())
        assert (weight._calls.get(Linear) is before is not None) == kept
        x.grad = weight.grad = bias.grad = None
        y.sum().backward()
        close(weight.grad.numpy(), np.tile(x.detach().numpy().sum(0), (4, 1)))
        close(bias.grad.numpy(), np.full(4, 2))
    expect(kept=False)
    expect(kept=True)
    with no_grad():
        weight *= 2.0
    expect(kept=True)                                           # in the same memory
    bias = leaf(4, seed=3)
    expect(kept=False)
    expect(kept=True)
    weight = Tensor(normal(np.random.default_rng(4), 3, 4)).T.requires_grad_()
    for _ in range(2):                                          # a transposed view is copied in each call
        assert F.linear(x, weight, bias).shape == (2, 4) and not weight._calls
    twin = copy.deepcopy(bias)
    assert not hasattr(twin, '_calls')
    weight = leaf(4, 3)
    F.linear(x, weight, bias)
    weight.array.buffer.free()
    with pytest.raises(ValueError, match='its memory was freed'):
        F.linear(x, weight, bias)


@on_the_cpu
def test_a_kept_op_does_not_keep_its_tensors(without_gc):
    x, weight, bias = leaf(2, 3), leaf(4, 3, seed=1), leaf(4, seed=2)
    F.linear(x, weight, bias)
    alive = [weakref.ref(one) for one in (weight, weight.array, bias)]
    del weight, bias
    assert [one() for one in alive] == [None] * 3


@on_the_cpu
def test_layer_norm_without_weights_makes_its_constants_once(monkeypatch):
    x, made = leaf(3, 4), []
    want = F.layer_norm(x, 4, np.ones(4, 'f'), np.zeros(4, 'f')).numpy()
    F.layer_norm(x, 4)
    full = np.full
    monkeypatch.setattr(np, 'full', lambda *given: made.append(given) or full(*given))
    assert (F.layer_norm(x, 4).numpy() == want).all() and not made
    x = leaf(2, 5000)
    F.layer_norm(x, 5000)
    assert len(made) == 2, 'long ones are not kept'


def test_backward_lets_go_of_the_graph_though_the_loss_is_kept(without_gc):
    x, w = leaf(50, 30), leaf(30, 30)
    before = len(ndarray.live_buffers()), nodes()
    losses = []
    for _ in range(5):
        loss = ((x @ w).tanh() @ w).exp().mean()
        loss.backward()
        losses.append(loss)
    # two gradients, and of each step the loss and its node
    assert len(ndarray.live_buffers()) - before[0] <= 2 + 5 and nodes() - before[1] <= 5


def test_second_derivatives_leave_no_cycle(without_gc):
    before = nodes(), len(ndarray.live_buffers())
    x = leaf(3)
    g, = grad((x**3).sum(), x, create_graph=True)
    h, = grad((g * g).sum(), x)
    close(h.numpy(), 36 * x.numpy().astype(float)**3)
    del x, g, h
    assert (nodes(), len(ndarray.live_buffers())) == before


def test_a_long_loop_with_detach_does_not_grow(without_gc):
    w = leaf(8, 8)
    state, counts = Tensor(np.ones((4, 8))), []
    for step in range(200):
        state = F.linear(state, w).tanh()
        state.sum().backward()
        state = state.detach()
        with no_grad():
            w -= 0.001 * w.grad
        w.zero_grad()
        if step >= 3 and step % 20 == 0:
            counts.append((len(ndarray.live_buffers()), nodes()))
    assert len(set(counts)) == 1, counts[:5]


def test_deep_graphs_need_no_deep_stack(without_gc):
    x = Tensor([1.0], requires_grad=True)
    y = x
    for _ in range(20_000):
        y = y + 1.0
    y.backward()
    assert x.grad.tolist() == [1.0]
    y = x
    for _ in range(100_000):
        y = -y
    before = nodes()
    del y                                   # never walked: its nodes go one after the other
    assert nodes() <= before - 100_000


def test_the_gradient_of_one_step_of_many_is_added_in_place():
    """Backward through x[t] for all t adds to the rows of one array: its work grows with T, not with T * T."""
    x = leaf(500, 50)
    total = Tensor(0.0)
    for t in range(len(x)):
        total = total + (x[t] * x[t]).sum()
    touched = []

    def listen(_name, values):
        touched.extend(value.size for value in values if backend.is_array(value))
        return True
    with backend.hooks(listen=listen):
        total.backward()
    assert len(x) * 50 < sum(touched) < 20 * len(x) * 50        # an array of zeros a step would write 500 times as much
    close(x.grad.numpy(), 2 * x.numpy())


# ---- programs at random ----------------------------------------------------------------------------------------------

STEPS = {
    'add': lambda a, b: a + b, 'multiply': lambda a, b: a * b, 'subtract': lambda a, b: a - b * 0.5,
    'divide': lambda a, b: a / (b * b + 1), 'tanh': lambda a, b: a.tanh(), 'exp': lambda a, b: (a * 0.1).exp(),
    'transpose': lambda a, b: a.T + 0 * b if a.shape[0] == a.shape[1] else a, 'row': lambda a, b: a[0] + b,
    'step': lambda a, b: a[::-1] * b if not hasattr(a, 'flip') else a.flip(0) * b, 'columns': lambda a, b: a[:, :1] * b,
    'sum': lambda a, b: a.sum(0) * b * 0.1, 'mean': lambda a, b: a.mean(1)[:, None] + b,
    'matmul': lambda a, b: a.T @ b @ b.T @ a,
    'maximum': lambda a, b: a + (a > b) * 1.0 * b, 'reshape': lambda a, b: (a.reshape(-1) * 2).reshape(*a.shape),
}


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=8),
       st.integers(1, 4), st.booleans())
def test_random_programs_have_the_gradients_of_torch(steps, n, second):
    torch = pytest.importorskip('torch', reason='torch is not installed: pip install torch')

    def run(values):
        values = list(values)
        for name, i, j in steps:
            a, b = values[i % len(values)], values[j % len(values)]
            step = STEPS[name]
            y = step(a, b.to(a.dtype) if hasattr(b, 'to') else b)
            values.append(y / (1 + abs(y.detach()).max()) if y.shape == (n, n) else y)
        return sum((v * v).sum() for v in values[2:])
    rng = np.random.default_rng(len(steps))
    arrays = [normal(rng, n, n) for _ in range(2)]
    xs = [Tensor(a, requires_grad=True) for a in arrays]
    ts = [torch.tensor(a.astype(float), requires_grad=True) for a in arrays]
    y, u = run(xs), run(ts)
    close(y.numpy(), u.detach().numpy(), 1e-4)
    ours = grad(y, xs, create_graph=second, allow_unused=True)
    theirs = torch.autograd.grad(u, ts, create_graph=second, allow_unused=True)
    for g, t in zip(ours, theirs, strict=True):
        assert (g is None) == (t is None)
        if g is not None:
            close(g.numpy(), t.detach().numpy(), 1e-4)
    pairs = [(g, t) for g, t in zip(ours, theirs, strict=True) if g is not None]
    if second and pairs:
        ours = grad([g.sum() * 1.0 for g, _ in pairs], xs, allow_unused=True)
        theirs = torch.autograd.grad([t.sum() * 1.0 for _, t in pairs], ts, allow_unused=True)
        for g, t in zip(ours, theirs, strict=True):
            if g is None or t is None:
                assert all(not np.any(one.numpy()) for one in (g, t) if one is not None)
            else:
                close(g.numpy(), t.numpy(), 1e-3)


def test_public_names_are_in_the_package():
    assert pyops.Tensor is Tensor and pyops.grad is grad and pyops.no_grad is no_grad and pyops.apply is apply
    assert 'Tensor' in dir(pyops)
    with pytest.raises(AttributeError, match='no attribute'):
        _ = pyops.nothing


def test_what_is_asked_of_an_op_of_two_inputs():
    x, y = leaf(3), Tensor(np.ones(3))
    asked = []

    class Watched(ArrayOp):
        def forward(a, b):
            return a * b, (a, b)

        def backward(dy, ctx, wanted=(True, True)):
            asked.append(list(wanted))
            return Multiply.backward(dy, ctx, wanted)
    apply(Watched, x, y).sum().backward()
    apply(Watched, y, x).sum().backward()
    assert asked == [[True, False], [False, True]] and Exp.__doc__


@pytest.mark.skipif(not pyops.default_device().is_host, reason='memory on a GPU is not forked: run it with --on cpu')
def test_shared_memory_is_changed_by_a_forked_process():
    x, mask = Tensor([[1.0, 2.0], [3.0, 4.0]]), Tensor([True, False])
    assert not x.is_shared() and x.share_memory_() is x and x.is_shared() and x.tolist() == [[1, 2], [3, 4]]
    assert x[1].is_shared() and not (x * 2).is_shared() and Tensor(0.5).share_memory_().item() == 0.5
    assert mask.share_memory_().dtype == bool and mask.tolist() == [True, False]
    alone, child = Tensor([1.0, 2.0]), os.fork()
    if not child:
        x.numpy()[1, 0] = alone.numpy()[1] = 5
        os._exit(0)
    os.waitpid(child, 0)
    assert x.tolist() == [[1, 2], [5, 4]] and alone.tolist() == [1, 2]
    with pytest.raises(TypeError, match='share_memory_: expected a Tensor, got a Parameter'):
        nn.Parameter([1.0]).share_memory_()


def test_constants_of_needle_share_the_array():
    x = Tensor([1.0, 2.0], requires_grad=True)
    y = Tensor.make_const(x.cached_data)
    assert y.array is x.array and not y.requires_grad and y.is_leaf and Tensor.make_const(x, requires_grad=True).requires_grad
