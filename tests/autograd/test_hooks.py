"""Hooks on gradients, retain_grad, the mode that names the op of the first NaN, and new Tensors."""
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

import pyops
from pyops import functional as F
from pyops.autograd import Tensor, detect_anomaly, grad


def leaf(*values):
    return Tensor(np.float32(values), requires_grad=True)


def test_a_hook_sees_the_complete_gradient_and_may_replace_it():
    x, seen = leaf(1, 2), []
    y = x * 3
    hook = y.register_hook(lambda g: seen.append(g.tolist()))
    y.register_hook(lambda g: g * 10)
    (y * y + y).sum().backward()
    assert seen == [[7, 13]] and x.grad.tolist() == [210, 390]
    hook.remove()
    hook.remove()
    (x * 1).sum().backward()
    assert len(seen) == 1


def test_a_hook_of_a_leaf_gets_the_gradient_of_one_backward_alone():
    x, seen = leaf(1, 2), []
    x.register_hook(lambda g: seen.append(g.tolist()))
    x.register_hook(lambda g: g * 2)
    for _ in range(2):
        (x * x + x).sum().backward()
    assert seen == [[3, 5], [3, 5]] and x.grad.tolist() == [12, 20]
    assert grad((x * x).sum(), x)[0].tolist() == [4, 8]


def test_a_hook_of_a_parameter_of_a_kernel_op_changes_its_gradient():
    layer = pyops.nn.Linear(3, 2)
    x = Tensor(np.ones((4, 3)))
    layer(x).sum().backward()
    plain = layer.weight.grad.numpy().copy()
    layer.zero_grad()
    layer.weight.register_hook(lambda g: g * 0.5)
    for _ in range(2):
        layer(x).sum().backward()
    np.testing.assert_allclose(layer.weight.grad.numpy(), plain)


def test_a_hook_with_another_shape_and_one_without_a_gradient_are_refused():
    x = leaf(1, 2)
    y = x * 2
    y.register_hook(lambda g: g.sum())
    with pytest.raises(TypeError, match=r'register_hook: the hook must return None or a Tensor of shape \(2,\) and float32'):
        y.sum().backward()
    for call in (lambda: Tensor([1.0]).register_hook(print), lambda: Tensor([1.0]).retain_grad()):
        with pytest.raises(RuntimeError, match=r'a tensor of shape \(1,\) requires no gradient'):
            call()


def test_retain_grad_keeps_the_gradient_of_a_result():
    x = leaf(1, 2)
    y = x * 3
    y.retain_grad()
    x.retain_grad()
    assert y.grad is None
    (y * y).sum().backward(retain_graph=True)
    assert y.grad.tolist() == [6, 12] and x.grad.tolist() == [18, 36]
    (y * 1).sum().backward()
    assert y.grad.tolist() == [7, 13]


def test_the_op_of_the_first_nan_is_named_forward_and_backward():
    x = leaf(-1, 4)
    assert np.isnan(x.sqrt().numpy()).any()
    with detect_anomaly():
        with pytest.raises(RuntimeError, match=r'anomaly: Sqrt: output 0 of shape \(2,\) has a NaN; its inputs have none'):
            F.sqrt(x).exp()
        with pytest.raises(RuntimeError, match='Multiply: output 0 .* input 0 has one already'):
            Tensor([np.nan]) * 2
        y = (leaf(0.0, 1.0) * 0).sqrt()
        with pytest.raises(RuntimeError, match=r'detect_anomaly: \w+: its backward computed a gradient with a NaN'):
            (y * 0).sum().backward()
        layer = pyops.nn.Linear(2, 1)
        with pytest.raises(RuntimeError, match=r'Linear: output 0 of shape \(1, 1\) has a NaN; input 0 has one already'):
            layer(Tensor([[np.nan, 1.0]]))
        (leaf(1, 2) ** 2).sum().backward()
    assert np.isnan((x.sqrt() * 1).numpy()).any()


# ---- new Tensors -----------------------------------------------------------------------------------------------------

def test_random_tensors_repeat_with_their_generator_and_with_the_seed():
    for draw in (lambda g: pyops.rand(3, 4, generator=g), lambda g: pyops.randn((3, 4), generator=g),
                 lambda g: pyops.randint(10, size=(3, 4), generator=g), lambda g: pyops.randb(3, 4, generator=g),
                 lambda g: pyops.randperm(12, generator=g).reshape(3, 4)):
        a, b = draw(np.random.default_rng(1)), draw(np.random.default_rng(1))
        assert a.shape == (3, 4) and a.tolist() == b.tolist() != draw(np.random.default_rng(2)).tolist()
        pyops.seed(3)
        first, second = draw(None).tolist(), draw(None).tolist()
        pyops.seed(3)
        assert draw(None).tolist() == first != second
    pyops.seed(0)
    x = pyops.randn(10_000, mean=3, std=2, generator=np.random.default_rng(0))
    assert abs(x.mean().item() - 3) < 0.1 and abs(x.std().item() - 2) < 0.1 and x.dtype == np.float32
    u = pyops.rand(10_000, low=-1, high=3, generator=np.random.default_rng(0))
    assert -1 <= u.min().item() < -0.9 and 2.9 < u.max().item() < 3
    assert sorted(pyops.randperm(5).tolist()) == [0, 1, 2, 3, 4]
    assert pyops.rand_like(x).shape == pyops.randn_like(x, requires_grad=True).shape == (10_000,)
    with pytest.raises(TypeError, match='generator: expected a numpy Generator'):
        pyops.rand(3, generator=0)


def test_new_tensors_have_the_numbers_of_numpys():
    for got, want in ((pyops.zeros(2, 3), np.zeros((2, 3), 'f')), (pyops.ones((2,)), np.ones(2, 'f')), (pyops.full((2,), 7),
    np.full(2, 7)),
                      (pyops.arange(5), np.arange(5)), (pyops.arange(1, 2, 0.25), np.arange(1, 2, 0.25)), (pyops.eye(3),
                      np.eye(3)),
                      (pyops.linspace(0, 1, 5), np.linspace(0, 1, 5)), (pyops.zeros_like(pyops.arange(3)), np.zeros(3)),
                      (pyops.ones(2, dtype=bool), np.ones(2, bool)), (pyops.tensor([1.5]), np.array([1.5])),
                      (pyops.full_like(pyops.zeros(2), 3), np.full(2, 3)), (pyops.where(pyops.arange(3) > 1, 1, 0),
                      np.array([0, 0, 1])),
                      (pyops.stack([pyops.zeros(2), pyops.ones(2)], dim=1), np.array([[0, 1], [0, 1]]))):
        assert isinstance(got, Tensor)
        np.testing.assert_allclose(got.numpy(), want)
    assert pyops.randn(2, requires_grad=True).requires_grad and pyops.empty(2, 3).shape == (2, 3)
    x = pyops.zeros(2)
    y = pyops.tensor(x)
    y[0] = 1
    assert x.tolist() == [0, 0]


def test_import_pyops_alone_reaches_its_modules_and_loads_none_of_them():
    code = ('import sys, pyops; assert not {"numpy", "pyops.nn"} & set(sys.modules); '
            'print(pyops.nn.Linear(2, 1).weight.shape, pyops.functional.relu, pyops.optim.SGD, pyops.ndarray.array)')
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith('(1, 2)'), done.stderr
