"""Function, backward and grad with PyTorch's arguments, the switches of recording, Jacobians: compared with PyTorch."""
import numpy as np
import pytest

import pyops
from pyops import autograd
from pyops.autograd import Function, Tensor, grad

torch = pytest.importorskip('torch', reason='torch is not installed: pip install torch')

X = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
LIBRARIES = {'pyops': (pyops, Function, Tensor), 'torch': (torch, torch.autograd.Function, torch.tensor)}


def close(got, want):
    np.testing.assert_allclose(got.detach().numpy(), want.detach().numpy(), rtol=1e-5, atol=1e-6)


def in_both(f):
    """Return f(module, Function, tensor) for pyops and PyTorch: the same program."""
    return [f(*names) for names in LIBRARIES.values()]


def compare(f):
    for got, want in zip(*in_both(f), strict=True):
        close(got, want)


def test_a_function_has_its_own_gradient_which_can_be_differentiated():
    def run(lib, Function, tensor):
        class ScaledCube(Function):
            @staticmethod
            def forward(ctx, x, scale, shift):
                ctx.save_for_backward(x)
                ctx.scale = scale
                assert ctx.needs_input_grad == (True, False, False)
                return x ** 3 * scale + shift

            @staticmethod
            def backward(ctx, dy):
                x, = ctx.saved_tensors
                return dy * 3 * ctx.scale * x * x, None, None

        x, shift = tensor(X, requires_grad=True), tensor(X * 0 + 1)
        y = ScaledCube.apply(x * 1, 2.0, shift)
        first, = lib.autograd.grad(y.sum(), x, create_graph=True)
        second, = lib.autograd.grad((first * first).sum(), x)
        (ScaledCube.apply(x, 1.0, tensor(X * 0)) * y.detach()).sum().backward()
        return y, first, second, x.grad
    compare(run)


def test_a_function_of_several_tensors_and_results():
    def run(lib, Function, tensor):
        class Both(Function):
            @staticmethod
            def forward(a, b):
                return a * b, a + b

            @staticmethod
            def setup_context(ctx, inputs, output):
                ctx.save_for_backward(*inputs)

            @staticmethod
            def backward(ctx, dproduct, dsum):
                a, b = ctx.saved_tensors
                return (dproduct * b + dsum) * 10, (dproduct * a + dsum) * 10        # not the true one: it must be this one

        a, b = tensor(X, requires_grad=True), tensor(X + 2, requires_grad=True)
        product, total = Both.apply(a, b)
        (product * 2).sum().backward(retain_graph=True)
        only_product = a.grad.clone()
        (product * total).sum().backward()
        return product, total, only_product, a.grad, b.grad
    compare(run)


def test_the_gradient_of_a_function_is_compared_with_differences():
    class Wrong(Function):
        @staticmethod
        def forward(ctx, x):
            return x * x

        @staticmethod
        def backward(ctx, dy):
            return dy

    assert not pyops.gradcheck(Wrong.apply, X, float32=True).ok
    x = Tensor(X, requires_grad=True)
    assert repr(Wrong.apply(x)).endswith('op=Wrong)') and Wrong.apply(x).grad_fn.name == 'Wrong' and x.grad_fn is None
    with pyops.no_grad():
        assert Wrong.apply(x).is_leaf


def test_mistakes_in_a_function_are_named():
    class Bad(Function):
        @staticmethod
        def forward(ctx, x, how):
            ctx.save_for_backward(x)
            return x * 2 if how else 3.0

        @staticmethod
        def backward(ctx, dy):
            return dy

    x = Tensor(X, requires_grad=True)
    with pytest.raises(RuntimeError, match='Bad: backward: expected 2 gradients, one for each argument of forward, got 1'):
        Bad.apply(x, True).sum().backward()
    with pytest.raises(TypeError, match='Bad: forward: expected a Tensor or a tuple of them, got float'):
        Bad.apply(x, False)
    y = x * 1
    z = Bad.apply(y, True)
    with pyops.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match='Bad: an array of shape .2, 3. that backward needs was changed in place'):
        z.sum().backward()
    with pytest.raises(NotImplementedError, match='define the static methods'):
        type('Empty', (Function,), {}).apply(x)


def test_backward_takes_pytorchs_arguments():
    def run(lib, Function, tensor):
        x, w = tensor(X, requires_grad=True), tensor(X + 1, requires_grad=True)
        y, z = x * w, x + w
        dy = tensor(X * 2)
        y.backward(gradient=dy, retain_graph=True)
        y.backward(dy, True)                                            # the second argument is retain_graph
        lib.autograd.backward([y, z], [dy, dy], retain_graph=True)
        lib.autograd.backward(tensors=y.sum(), inputs=[w], retain_graph=True)
        lib.autograd.backward((y.sum(), z.sum()))
        first, = lib.autograd.grad((x * x * w).sum(), x, None, None, True)        # ..., retain_graph, create_graph
        second, = lib.autograd.grad(first.sum(), w)
        return x.grad, w.grad, first, second
    compare(run)
    x = Tensor(X, requires_grad=True)
    y = x * 2
    with pytest.raises(ValueError, match='inputs: expected leaves that require a gradient'):
        y.sum().backward(inputs=y)
    with pytest.raises(ValueError, match='expected a gradient for each of 2 tensors, got 1'):
        autograd.backward([y, y], [X])


def test_recording_is_switched_for_a_block_a_function_or_from_now_on():
    def run(lib, Function, tensor):
        x, seen = tensor(X, requires_grad=True), []

        def note():
            seen.append((lib.is_grad_enabled(), (x * 1).requires_grad))

        lib.set_grad_enabled(False)
        note()
        with lib.set_grad_enabled(True):
            note()
            with lib.inference_mode():
                note()
            note()
        note()
        lib.set_grad_enabled(True)
        note()
        with lib.set_grad_enabled(False):
            note()
        note()
        lib.no_grad()(note)()
        lib.no_grad(note)()
        lib.inference_mode(note)() if lib is pyops else lib.inference_mode()(note)()
        with lib.no_grad():
            lib.enable_grad(note)()
            lib.set_grad_enabled(True)(note)()
            note()
        with lib.inference_mode(False):
            note()
        note()
        return seen
    ours, theirs = in_both(run)
    assert ours == theirs and len(set(ours)) == 2


def test_the_search_for_nan_is_switched_from_now_on():
    x = Tensor([-1.0], requires_grad=True)
    autograd.set_detect_anomaly(True)
    try:
        with pytest.raises(RuntimeError, match='detect_anomaly: Log'):
            x.log()
        with autograd.set_detect_anomaly(False):
            x.log()
        with pytest.raises(RuntimeError, match='detect_anomaly: Log'):
            x.log()
    finally:
        autograd.set_detect_anomaly(False)
    assert np.isnan(x.log().item())


@pytest.mark.parametrize('f, inputs', [
    (lambda x: (x * x).sum(1), X), (lambda x: x.exp() @ x.T, X), (lambda x, y: x * y.sum(), (X, X[0])),
    (lambda x, y: (x * 2, y.sum()), (X, X[0])), (lambda x: x.sum(), X)], ids=range(5))
def test_jacobians_equal_pytorchs(f, inputs):
    ours, theirs = (autograd.functional.jacobian(f, convert(inputs)) if lib is pyops else
                    torch.autograd.functional.jacobian(f, convert(inputs))
                    for lib, convert in ((pyops, lambda v: tuple(map(Tensor, v)) if isinstance(v, tuple) else Tensor(v)),
                                         (torch, lambda v: tuple(map(torch.tensor, v)) if isinstance(v,
                                             tuple) else torch.tensor(v))))

    def check(a, b):
        if isinstance(b, tuple):
            assert len(a) == len(b) and isinstance(a, tuple)
            [check(*pair) for pair in zip(a, b, strict=True)]
        else:
            close(a, b)
    check(ours, theirs)


def test_hessians_and_products_with_jacobians_equal_pytorchs():
    def run(lib, Function, tensor):
        functional = lib.autograd.functional
        f = lambda x, w: (x ** 3 * w.exp()).sum()       # noqa: E731
        (xx, xw), (wx, ww) = functional.hessian(f, (tensor(X), tensor(X[0])))
        y, (dx, dw) = functional.vjp(lambda x, w: x * w, (tensor(X), tensor(X[0])), tensor(X + 1))
        return xx, xw, wx, ww, y, dx, dw, functional.hessian(lambda x: (x * x).sum(), tensor(X))
    compare(run)
    with pytest.raises(RuntimeError, match='hessian: expected a function with one number as its result'):
        autograd.functional.hessian(lambda x: x * 2, Tensor(X))
    x = Tensor(X, requires_grad=True)
    jacobian = autograd.functional.jacobian(lambda w: w * w, x, create_graph=True)
    assert jacobian.requires_grad and x.grad is None and grad(x.sum(), x)[0].tolist() == [[1.0] * 3] * 2


def test_detach_in_place_drops_the_history():
    x = Tensor(X, requires_grad=True)
    y = x * 2
    assert y.detach_() is y and y.is_leaf and not y.requires_grad


@pytest.mark.parametrize('name, function', [
    ('jvp', lambda x: (x * x).cumsum(0) * x), ('jvp', lambda x: x * 2.0), ('hvp', lambda x: (x ** 3).sum() * x[0]),
    ('hvp', lambda x: x.sum())])
def test_products_with_derivatives_are_those_of_torch(torch, name, function):
    x, v = np.float32([1, 2, 3]), np.float32([0.5, -1, 2])
    mine = getattr(pyops.autograd.functional, name)(function, Tensor(x), Tensor(v))
    want = getattr(torch.autograd.functional, name)(function, torch.tensor(x), torch.tensor(v))
    for one, other in zip(mine, want, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-6)


def test_products_with_derivatives_of_several_inputs():
    x, v = Tensor([1.0, 2.0]), Tensor([0.5, -1.0])
    value, found = pyops.autograd.functional.jvp(lambda x, y: x * y, (x, v), (v, x))
    assert value.tolist() == [0.5, -2.0] and found.tolist() == [1.25, 5.0]              # v v + x x
    _, found = pyops.autograd.functional.hvp(lambda x, y: (x * x * y).sum(), (x, v), (v, x))
    assert [one.tolist() for one in found] == [[2.5, 10.0], [1.0, -4.0]]                # 2 y v + 2 x x, 2 x v
    with pytest.raises(ValueError, match=r'v: expected shape \(2,\), got \(3,\)'):
        pyops.autograd.functional.jvp(lambda x: x * x, x, [1.0, 2.0, 3.0])


def test_gradients_that_do_not_exist_can_be_zeros():
    x, unused = Tensor([1.0, 2.0], True), Tensor([[3.0]], True)
    found = pyops.autograd.grad((x * x).sum(), [x, unused], materialize_grads=True)
    assert [one.tolist() for one in found] == [[2.0, 4.0], [[0.0]]]
