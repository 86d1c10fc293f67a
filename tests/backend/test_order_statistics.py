"""Quantiles, running extrema, and numpy's order=, out=, where= and mode= of methods."""
import numpy as np
import pytest

from pyops import functional as F
from pyops import ndarray
from pyops.autograd import Tensor

X = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)
TIES, WITH_NAN = np.round(X), X.copy()
WITH_NAN[0, 1, 2] = np.nan
MASK = np.random.default_rng(2).random(X.shape) > 0.4
KINDS = ndarray.array, Tensor


def same(got, want):
    np.testing.assert_allclose(got.numpy(), want, rtol=2e-6, atol=1e-6)


def alike(torch, run, x, of_torch=None):
    """Compare the values, and the gradients, of a function of a Tensor and of PyTorch's, for a random upstream gradient."""
    mine, twin = Tensor(x, requires_grad=True), torch.tensor(x, requires_grad=True)
    found, want = (y if isinstance(y, tuple) else (y,) for y in (run(mine), (of_torch or run)(twin)))
    for y, z in zip(found, want, strict=True):
        same(y, z.detach().numpy())
    dy = np.random.default_rng(1).standard_normal(found[0].shape).astype(np.float32)
    found[0].backward(dy)
    want[0].backward(torch.tensor(dy))
    same(mine.grad, twin.grad.numpy())


@pytest.mark.parametrize('method', ['linear', 'lower', 'higher', 'nearest', 'midpoint'])
@pytest.mark.parametrize('axis', [None, 0, -1])
def test_quantiles_are_those_of_torch(torch, method, axis):
    for x in (X, WITH_NAN):
        for q in (0.3, [0.1, 0.5, 1.0]):
            alike(torch, lambda x, q=q: x.quantile(q, axis, keepdims=True, method=method), x,
                  lambda x, q=q: torch.quantile(x, torch.tensor(q), axis, True, interpolation=method))


def test_quantiles_take_several_axes_and_refuse_what_is_outside():
    same(ndarray.array(X).quantile([0.2, 0.7], (0, 2)), np.quantile(X, [0.2, 0.7], (0, 2)))
    with pytest.raises(ValueError, match='quantile: expected 0 <= q <= 1 and at least one element, got q 1.5'):
        ndarray.array(X).quantile(1.5)
    with pytest.raises(ValueError, match="quantile: method: expected one of linear, .*, got 'cubic'"):
        ndarray.array(X).quantile(0.5, method='cubic')


@pytest.mark.parametrize('axis', [0, 1, -1])
@pytest.mark.parametrize('name', ['cummax', 'cummin'])
def test_running_extrema_are_those_of_torch(torch, name, axis):
    for x in (TIES, WITH_NAN):
        alike(torch, lambda x: tuple(getattr(x, name)(dim=axis)), x)


def test_order_statistics_are_those_of_torch(torch):
    for axis in (0, 1, -1):
        alike(torch, lambda x, axis=axis: tuple(x.kthvalue(2, axis, keepdim=True)), X)
        alike(torch, lambda x, axis=axis: tuple(x.aminmax(dim=axis)), X)
    alike(torch, lambda x: tuple(x.kthvalue(5)), X)
    with pytest.raises(ValueError, match='kthvalue: expected k from 1 to 5, the size of axis -1, got 6'):
        Tensor(X).kthvalue(6)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('order', ['C', 'F', 'A', 'K'])
def test_elements_are_ordered_as_numpy_orders_them(kind, order):
    for x, own in ((X, kind(X)), (X.T, kind(X).T)):
        same(own.ravel(order), x.ravel(order))
        same(own.flatten(order), x.flatten(order))
        if order != 'K':                        # which numpy's reshape lacks
            same(own.reshape(-1, 2, order=order), x.reshape(-1, 2, order=order))
            same(own.reshape((6, 10), order=order), x.reshape((6, 10), order=order))
        same(own.copy(order), x)
    with pytest.raises(ValueError, match="order: expected 'C', 'F', 'A' or 'K', got 'G'"):
        kind(X).ravel('G')


def test_gradients_follow_the_order(torch):
    alike(torch, lambda x: x.reshape(6, 10, order='F'), X,
          lambda x: x.permute(2, 1, 0).reshape(10, 6).T)


@pytest.mark.parametrize('axis', [None, (1, 2), -1])
@pytest.mark.parametrize('name', ['mean', 'var', 'std'])
def test_moments_of_the_elements_that_count(name, axis):
    """Four times: small operations are recorded in the second call."""
    for mask in (MASK, ndarray.array(MASK)):
        for _ in range(4):
            same(getattr(ndarray.array(X), name)(axis=axis, where=mask),
                 getattr(X, name)(axis=axis, where=MASK))
    same(Tensor(X).var(-1, ddof=1, keepdims=True, where=np.arange(5) < 3), X[..., :3].var(-1, ddof=1, keepdims=True))


def test_results_are_written_into_out():
    x = ndarray.array(X)
    for name, shape in (('cumsum', (3, 4, 5)), ('cumprod', (3, 4, 5)), ('var', (4, 5)), ('std', (4, 5)), ('argmax', (4, 5)),
                        ('argmin', (4, 5))):
        for out in (ndarray.zeros(shape, 'int32' if 'arg' in name else 'float32'), np.zeros(shape)):
            assert getattr(x, name)(0, out=out) is out
            np.testing.assert_allclose(np.asarray(out), getattr(X, name)(0), rtol=1e-5)
    y = ndarray.array(X)
    assert y.clip(-1, 1, out=y) is y
    same(y, X.clip(-1, 1))
    same(x.round(1, out=ndarray.zeros(X.shape)), X.round(1))
    same(x.cumsum(0, dtype='float64'), X.cumsum(0, dtype='float64'))
    with pytest.raises(ValueError, match='out: expected shape .4, 5., got .5,.'):
        x.var(0, out=ndarray.zeros(5))
    with pytest.raises(TypeError, match='argmax: dtype: only all, any, cumprod, cumsum, .* take it'):
        x.argmax(0, dtype='int32')


def test_indices_outside_are_wrapped_or_clipped():
    for mode in ('wrap', 'clip'):
        same(ndarray.array(X).take([0, 9, -7], 1, mode=mode), X.take([0, 9, -7], 1, mode=mode))
    with pytest.raises(ValueError, match="take: mode: expected 'raise', 'wrap' or 'clip', got 'none'"):
        ndarray.array(X).take([0], mode='none')


@pytest.mark.parametrize('weight', [None, [1.0, 2.0, 0.5]])
@pytest.mark.parametrize('name, named', [('cross_entropy', {}), ('cross_entropy', {'label_smoothing': 0.1}), ('nll_loss', {})])
@pytest.mark.parametrize('labels', [[-100, -100], [0, -100]])
def test_a_mean_over_no_labels_is_nan_with_the_gradient_zero(torch, name, named, weight, labels):
    if not Tensor(X).device.is_host:
        pytest.skip('on a GPU the mean over no labels is 0')
    weights = [None, None] if weight is None else [Tensor(weight), torch.tensor(weight)]
    alike(torch, lambda x: getattr(F, name)(x, Tensor(labels), weights[0], **named), X[0, :2, :3],
          lambda x: getattr(torch.nn.functional, name)(x, torch.tensor(labels), weights[1], **named))
