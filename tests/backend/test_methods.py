"""The methods that NDArray and Tensor share, compared with numpy and PyTorch; numpy's functions on both; dtypes; indices."""
import itertools
import math
import pkgutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import ON_GPU

import pyops
from pyops import contraction, ndarray
from pyops.autograd import Tensor
from pyops.ndarray import NDArray, array

KINDS = {'NDArray': array, 'Tensor': Tensor}
each_kind = pytest.mark.parametrize('make', KINDS.values(), ids=KINDS)
on_a_cpu = pytest.mark.skipif(ON_GPU, reason='float64 exists on the CPU only: run without PYOPS_BACKEND=gpu')


def numbers(*shape, dtype='float32', seed=0):
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(dtype)


X = numbers(2, 3, 4)
POSITIVE = np.abs(X) / 4 + 0.25


def check(got, want, rtol=2e-6):
    """The class, shape, dtype and numbers of one result or several."""
    if isinstance(want, list | tuple):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            check(g, w, rtol)
        return
    want = np.asarray(want)
    assert isinstance(got, NDArray | Tensor) and got.shape == want.shape, (got, want)
    assert got.numpy().dtype.kind == want.dtype.kind, (got.numpy().dtype, want.dtype)
    np.testing.assert_allclose(got.numpy(), want, rtol=rtol, atol=1e-6)


# name: (ours, numpy's)
AS_NUMPY = {
    'transpose()': (lambda x: x.transpose(), lambda x: x.transpose()),
    'transpose(axes)': (lambda x: x.transpose(1, 2, 0), lambda x: x.transpose(1, 2, 0)),
    'transpose((axes))': (lambda x: x.transpose((1, -1, 0)), lambda x: x.transpose((1, -1, 0))),
    'transpose of a matrix': (lambda x: x[0].transpose(0, 1), lambda x: x[0].transpose(0, 1)),
    'transpose of two of three': (lambda x: x.transpose(0, 2), lambda x: x.swapaxes(0, 2)),
    'permute(axes)': (lambda x: x.permute(2, 0, 1), lambda x: x.transpose(2, 0, 1)),
    'permute((axes))': (lambda x: x.permute((2, 0, 1)), lambda x: x.transpose(2, 0, 1)),
    'swapaxes': (lambda x: x.swapaxes(0, -1), lambda x: x.swapaxes(0, -1)),
    'moveaxis': (lambda x: x.moveaxis(0, -1), lambda x: np.moveaxis(x, 0, -1)),
    'moveaxis of two': (lambda x: x.moveaxis((0, 2), (1, 0)), lambda x: np.moveaxis(x, (0, 2), (1, 0))),
    'mT': (lambda x: x.mT, lambda x: x.swapaxes(1, 2)),
    'broadcast_to(sizes)': (lambda x: x.broadcast_to(5, 2, 3, 4), lambda x: np.broadcast_to(x, (5, 2, 3, 4))),
    'broadcast_to((sizes))': (lambda x: x.broadcast_to((5, 2, 3, 4)), lambda x: np.broadcast_to(x, (5, 2, 3, 4))),
    'expand': (lambda x: x[:, :1].expand(-1, 3, -1), lambda x: np.broadcast_to(x[:, :1], (2, 3, 4))),
    'flip()': (lambda x: x.flip(), lambda x: np.flip(x)), 'flip(axes)': (lambda x: x.flip(0, 1), lambda x: np.flip(x, (0, 1))),
    'flip(axis=)': (lambda x: x.flip(axis=-1), lambda x: np.flip(x, -1)),
    'flip(dims=)': (lambda x: x.flip(dims=(0, 2)), lambda x: np.flip(x, (0, 2))),
    'squeeze()': (lambda x: x[:1, :, :1].squeeze(), lambda x: x[:1, :, :1].squeeze()),
    'squeeze(axes)': (lambda x: x[:1, :, :1].squeeze((0, -1)), lambda x: x[:1, :, :1].squeeze((0, -1))),
    'squeeze(dim=)': (lambda x: x[:1].squeeze(dim=0), lambda x: x[:1].squeeze(0)),
    'unsqueeze': (lambda x: x.unsqueeze(-1), lambda x: x[..., None]),
    'expand_dims': (lambda x: x.expand_dims((0, 2)), lambda x: np.expand_dims(x, (0, 2))),
    'flatten': (lambda x: x.flatten(), lambda x: x.flatten()),
    'flatten(1)': (lambda x: x.flatten(1), lambda x: x.reshape(2, 12)),
    'flatten(0, 1)': (lambda x: x.flatten(0, 1), lambda x: x.reshape(6, 4)),
    'ravel': (lambda x: x.ravel(), lambda x: x.ravel()), 'reshape': (lambda x: x.reshape(4, -1), lambda x: x.reshape(4, -1)),
    'sum': (lambda x: x.sum(), lambda x: x.sum()),
    'sum(axis=)': (lambda x: x.sum(axis=(0, -1)), lambda x: x.sum(axis=(0, -1))),
    'sum([axes])': (lambda x: x.sum([0, 1]), lambda x: x.sum((0, 1))),
    'sum(dim=, keepdim=)': (lambda x: x.sum(dim=1, keepdim=True), lambda x: x.sum(1, keepdims=True)),
    'mean': (lambda x: x.mean(-1, keepdims=True), lambda x: x.mean(-1, keepdims=True)),
    'max': (lambda x: x.max(dim=1), lambda x: x.max(1)), 'min': (lambda x: x.min(axis=(0, 1)), lambda x: x.min(axis=(0, 1))),
    'amax': (lambda x: x.amax(0), lambda x: x.max(0)),
    'argmax': (lambda x: x.argmax(dim=1, keepdim=True), lambda x: x.argmax(1, keepdims=True)),
    'argmin': (lambda x: x.argmin(), lambda x: x.argmin()), 'argmin(axis)': (lambda x: x.argmin(-1), lambda x: x.argmin(-1)),
    'var': (lambda x: x.var(), lambda x: x.var()),
    'var(axis, ddof)': (lambda x: x.var((0, 2), ddof=1), lambda x: x.var((0, 2), ddof=1)),
    'var(dim, unbiased)': (lambda x: x.var(dim=1, unbiased=True, keepdim=True), lambda x: x.var(1, ddof=1, keepdims=True)),
    'std': (lambda x: x.std(1, correction=1), lambda x: x.std(1, ddof=1)),
    'prod': (lambda x: x.prod(), lambda x: x.prod()),
    'prod(axis)': (lambda x: (x / 4).prod((0, 1), keepdims=True), lambda x: (x / 4).prod((0, 1), keepdims=True)),
    'prod of none': (lambda x: x[:, :0].prod(1), lambda x: x[:, :0].prod(1)),
    'norm': (lambda x: x.norm(), lambda x: np.sqrt((x * x).sum())),
    'norm(1)': (lambda x: x.norm(1, -1), lambda x: np.abs(x).sum(-1)),
    'norm(inf)': (lambda x: x.norm(np.inf, 0), lambda x: np.abs(x).max(0)),
    'norm(3)': (lambda x: x.norm(3, axis=1), lambda x: (np.abs(x)**3).sum(1)**(1 / 3)),
    'cumprod': (lambda x: (x / 4).cumprod(1), lambda x: (x / 4).cumprod(1)),
    'cumprod of all': (lambda x: (x / 8).cumprod(), lambda x: (x / 8).cumprod()),
    'ptp': (lambda x: x.ptp(1), lambda x: np.ptp(x, 1)),
    'diagonal': (lambda x: x.diagonal(), lambda x: x.diagonal()),
    'diagonal(1, 1, 2)': (lambda x: x.diagonal(1, 1, 2), lambda x: x.diagonal(1, 1, 2)),
    'diagonal(-2)': (lambda x: x.diagonal(-2, -1, 0), lambda x: x.diagonal(-2, -1, 0)),
    'diagonal of none': (lambda x: x.diagonal(9), lambda x: x.diagonal(9)),
    'trace': (lambda x: x.trace(0, 1, 2), lambda x: x.trace(0, 1, 2)),
    'nonzero': (lambda x: x.nonzero(), lambda x: x.nonzero()),
    'where': (lambda x: x.where(x > 0, -1.0), lambda x: np.where(x > 0, x, np.float32(-1))),
    'sum of a mask': (lambda x: (x > 5).sum(), lambda x: (x > 5).sum()),
    'sum of a mask along an axis': (lambda x: (x > 5).sum(1, keepdims=True), lambda x: (x > 5).sum(1, keepdims=True)),
    'mean of a mask': (lambda x: (x > 5).mean(0), lambda x: np.float32((x > 5).mean(0))),
    'prod of a mask': (lambda x: (x > -9).prod(1), lambda x: (x > -9).prod(1)),
    'cumsum of a mask': (lambda x: (x > 0).cumsum(2), lambda x: (x > 0).cumsum(2)),
    'any': (lambda x: (x > 5).any(1), lambda x: (x > 5).any(1)),
    'all': (lambda x: (x > -9).all((0, 2), keepdims=True), lambda x: (x > -9).all((0, 2), keepdims=True)),
    'any of none': (lambda x: x[:0].any(), lambda x: x[:0].any()),
    'all of none': (lambda x: x[:0].all(0), lambda x: x[:0].all(0)),
    'cumsum': (lambda x: x.cumsum(), lambda x: x.cumsum()),
    'cumsum(axis)': (lambda x: x.cumsum(dim=-1), lambda x: x.cumsum(-1)),
    'sort': (lambda x: x.sort(), lambda x: np.sort(x)), 'sort(axis)': (lambda x: x.sort(axis=1), lambda x: np.sort(x, 1)),
    'sort(descending)': (lambda x: x.sort(0, descending=True), lambda x: np.sort(x, 0)[::-1]),
    'argsort': (lambda x: x.argsort(1), lambda x: x.argsort(1, kind='stable')),
    'argsort(None)': (lambda x: x.argsort(None), lambda x: x.argsort(None, kind='stable')),
    'topk': (lambda x: x.topk(2)[0], lambda x: np.sort(x)[..., ::-1][..., :2]),
    'topk(largest=False)': (lambda x: x.topk(2, dim=1, largest=False)[0], lambda x: np.sort(x, 1)[:, :2]),
    'clip': (lambda x: x.clip(-3, 4), lambda x: x.clip(-3, 4)),
    'clip(min=)': (lambda x: x.clip(min=0), lambda x: x.clip(min=0)),
    'clamp': (lambda x: x.clamp(max=2.0), lambda x: np.minimum(x, 2)),
    'take': (lambda x: x.take([0, -1, 5]), lambda x: x.take([0, -1, 5])),
    'take(axis)': (lambda x: x.take([[2, 0], [1, 1]], axis=1), lambda x: x.take([[2, 0], [1, 1]], axis=1)),
    'take one': (lambda x: x.take(1, 1), lambda x: x.take(1, 1)),
    'take_along_axis': (lambda x: x.take_along_axis(x.argsort(2), 2), lambda x: np.sort(x, 2)),
    'index_select': (lambda x: x.index_select(1, [2, 2]), lambda x: x[:, [2, 2]]),
    'repeat': (lambda x: x.repeat(2), lambda x: x.repeat(2)),
    'repeat(axis)': (lambda x: x.repeat([1, 0, 3], axis=1), lambda x: x.repeat([1, 0, 3], axis=1)),
    'tile': (lambda x: x.tile(2, 1, 3), lambda x: np.tile(x, (2, 1, 3))),
    'tile of fewer': (lambda x: x.tile(2), lambda x: np.tile(x, 2)),
    'tile of more': (lambda x: x.tile((3, 1, 1, 2)), lambda x: np.tile(x, (3, 1, 1, 2))),
    'roll of axes': (lambda x: x.roll((1, -2), (0, -1)), lambda x: np.roll(x, (1, -2), (0, -1))),
    'roll of one': (lambda x: x.roll(1, (0, 2)), lambda x: np.roll(x, 1, (0, 2))),
    'roll by several': (lambda x: x.roll([1, 1], 2), lambda x: np.roll(x, [1, 1], 2)),
    'max(array)': (lambda x: x.max(x[0]), lambda x: np.maximum(x, x[0])),
    'min(array)': (lambda x: x.min(x[0]), lambda x: np.minimum(x, x[0])),
    'norm(0)': (lambda x: x.norm(0, 1), lambda x: np.linalg.norm(x, 0, 1)),
    'norm(-inf)': (lambda x: x.norm(-math.inf, 1), lambda x: np.linalg.norm(x, -np.inf, 1)),
    "norm('fro')": (lambda x: x[0].norm('fro'), lambda x: np.linalg.norm(x[0])),
    'roll': (lambda x: x.roll(2), lambda x: np.roll(x, 2)),
    'roll(axis)': (lambda x: x.roll(-1, 1), lambda x: np.roll(x, -1, 1)),
    'split': (lambda x: x.split(2, 1), lambda x: (x[:, :2], x[:, 2:])),
    'split(sizes)': (lambda x: x.split([1, 3], dim=-1), lambda x: (x[..., :1], x[..., 1:])),
    'chunk': (lambda x: x.chunk(2, 1), lambda x: (x[:, :2], x[:, 2:])),
    'unbind': (lambda x: x.unbind(1), lambda x: tuple(np.moveaxis(x, 1, 0))),
    'pad': (lambda x: x.pad(((0, 1), (2, 0), (1, 1)), 5), lambda x: np.pad(x, ((0, 1), (2, 0), (1, 1)), constant_values=5)),
    'floor': (lambda x: (x / 4).floor(), lambda x: np.floor(x / 4)),
    'ceil': (lambda x: (x / 4).ceil(), lambda x: np.ceil(x / 4)),
    'sin': (lambda x: x.sin(), np.sin), 'cos': (lambda x: x.cos(), np.cos),
    'square': (lambda x: x.square(), np.square), 'reciprocal': (lambda x: (x + 0.5).reciprocal(), lambda x: 1 / (x + 0.5)),
    'sign': (lambda x: x.sign(), np.sign), 'isnan': (lambda x: (x * np.nan).isnan(), lambda x: np.isnan(x * np.nan)),
    'isfinite': (lambda x: (1 / x).isfinite(), lambda x: np.isfinite(1 / x)),
    'round': (lambda x: (x / 2).round(), lambda x: np.round(x / 2)),
    'round(1)': (lambda x: (x / 7).round(1), lambda x: np.round(x / 7, 1)),
    'tril': (lambda x: x.tril(), np.tril), 'triu': (lambda x: x.triu(1), lambda x: np.triu(x, 1)),
    'relu': (lambda x: x.relu(), lambda x: np.maximum(x, 0)),
    'named tuples': (lambda x: x.transpose(axes=(1, 0, 2)).reshape(shape=(6, 4)).permute(dims=(1, 0)).broadcast_to(shape=(2,
    4, 6)),
                     lambda x: np.broadcast_to(x.transpose(1, 0, 2).reshape(6, 4).T, (2, 4, 6))),
    'pow': (lambda x: x.pow(2), lambda x: x**2),
    'masked_fill': (lambda x: x.masked_fill(x > 0, 7), lambda x: np.where(x > 0, np.float32(7), x)),
    'dot': (lambda x: x.dot(numbers(5, 4, 2, seed=1)), lambda x: x.dot(numbers(5, 4, 2, seed=1))),
    'dot of vectors': (lambda x: x[0, 0].dot(x[1, 1]), lambda x: x[0, 0].dot(x[1, 1])),
    'a // b': (lambda x: x // 2.5, lambda x: x // np.float32(2.5)),
    'a % b': (lambda x: x % -2.5, lambda x: x % np.float32(-2.5)),
    '1 // b': (lambda x: 5.0 // (x + 0.5), lambda x: np.float32(5) // (x + 0.5)),
    '1 % b': (lambda x: 5.0 % (x + 0.5), lambda x: np.float32(5) % (x + 0.5)),
    '&': (lambda x: (x > 0) & (x < 5), lambda x: (x > 0) & (x < 5)),
    '|': (lambda x: (x > 5) | (x < -5) | False, lambda x: (x > 5) | (x < -5)),
    '^': (lambda x: (x > 0) ^ (x > 5), lambda x: (x > 0) ^ (x > 5)),
    '~': (lambda x: ~(x > 0), lambda x: ~(x > 0)), '+x': (lambda x: +x, lambda x: +x),
}


@pytest.mark.parametrize('name', AS_NUMPY)
@each_kind
def test_a_method_does_what_numpys_does(make, name):
    ours, theirs = AS_NUMPY[name]
    with np.errstate(all='ignore'):
        check(ours(make(X)), theirs(X))


INTEGERS = {
    '//': lambda x, y: x // y, '%': lambda x, y: x % y, '&': lambda x, y: x & y, '|': lambda x, y: x | y,
    '^': lambda x, y: x ^ y, '~': lambda x, y: ~x, 'sum': lambda x, y: x.sum(1), 'cumsum': lambda x, y: x.cumsum(0),
    'argmin': lambda x, y: x.argmin(1), 'prod': lambda x, y: y.prod(1), 'clip': lambda x, y: x.clip(-2, 3),
    'by a number': lambda x, y: x // 3 + x % 4 + (x & 6), 'of a number': lambda x, y: 7 // y + 7 % y,
}


@pytest.mark.parametrize('name', INTEGERS)
@each_kind
def test_integers_behave_as_numpys(make, name):
    x, y = numbers(4, 5, dtype='int32'), np.where(numbers(4, 5, dtype='int32', seed=1) == 0, 2, numbers(4, 5, dtype='int32',
    seed=1))
    check(INTEGERS[name](make(x), make(y.astype('int32'))), INTEGERS[name](x, y.astype('int32')))


def test_division_by_zero_and_of_the_smallest_integer_gives_what_numpy_gives():
    x = np.array([5, -5, 0, -2**31], 'int32')
    with np.errstate(all='ignore'):
        for y in (0, -1, 1):
            check(array(x) // y, x // np.int32(y))
            check(array(x) % y, x % np.int32(y))
        z = np.array([5, -5, 0, np.inf, -np.inf, np.nan, -0.0], 'float32')
        for y in (0.0, -0.0, np.inf, -np.inf, 2.0, np.nan):
            check(array(z) // y, z // np.float32(y))
            check(array(z) % y, z % np.float32(y))


@each_kind
def test_reductions_take_numpys_arguments(make):
    kept = X > 0
    for x, mask in ((X, kept), (make(X), make(kept))):
        out = np.zeros(4, 'f') if x is X else make(np.zeros(4, 'f'))
        results = [x.sum(0, where=mask), x.mean(axis=1, where=mask), x.prod((0, 2), where=mask, keepdims=True),
                   x.max(2, where=mask, initial=-1), x.min(axis=None, initial=-20), x.sum(1, initial=5.0), x.prod(0, initial=2),
                   x.any(1, where=mask), x.all(1, where=mask), x.sum(dtype='int32'), x[:0].max(0, initial=3.0),
                   x.reshape(6, 4).sum(0, out=out), out, np.sum(x, 0, where=mask), np.max(x, 1, initial=4),
                   x.astype('float32', copy=True), x.argsort(1, kind='stable'), np.sort(x, kind='stable')]
        if x is X:
            want = results
    check(results, want)
    assert results[11] is out
    y = make(X)
    assert y.astype('float32', copy=True) is not y and y.astype('float32') is not None
    with pytest.raises(ValueError, match='max: where: expected `initial` as well'):
        y.max(where=make(kept))
    with pytest.raises(TypeError, match='mean: initial: only sum, prod, max and min take it'):
        y.mean(initial=1)


@each_kind
def test_elements_and_positions_of_the_flattened_array_are_numpys(make):
    x, y = X.copy(), make(X)
    for index in ((5,), (-1,), (1, 2, -3), ((0, 1, 2),)):
        assert y.item(*index) == X.item(*index)
    with pytest.raises(IndexError, match='index 24 is out of bounds for size 24'):
        y.item(24)
    with pytest.raises(ValueError, match='item: expected one index, or one for each of 3 axes'):
        y.item(0, 1)
    for indices, values in (([0, -1], [50, 60]), ([[3], [4]], 7.5), (np.arange(6), [1, 2, 3]), ([2, 2], [8, 9]), ([], [])):
        x.put(indices, values)
        y.put(indices, values)
        check(y, x)
    y.T.put([1], -1)                                                        # in a view, whose elements have another order
    assert y[1, 0, 0].item() == -1
    with pytest.raises(IndexError, match='put: indices: expected integers from -24 to 23'):
        y.put([24], 0)
    copy = y.flatten()
    if make is array:
        copy[0] = 1000
    assert 1000 not in y


@each_kind
def test_ranges_and_tuples_in_an_index_are_lists(make):
    for index in (range(2), (slice(None), range(2, 0, -1)), ([0, 1], (2, 1)), (slice(None), (0, 2), slice(1, 3))):
        for _ in range(2):                                                  # before and after the call is recorded
            check(make(X)[index], X[index])
        x, y = X.copy(), make(X)
        x[index] = y[index] = 3
        check(y, x)


@each_kind
def test_arrays_are_assigned_to_index_arrays_as_numpys(make):
    for index, value in (([0, 1], X[::-1] + 1), (([1, 0], [1, 2]), X[:, 0]), (([1, 0], [1, 2]), X[0, 0]), ([0, 0], X[:, :1]),
                         ([1], X[:1]), ([0, 1], X[:1, :1, :1].astype('int32')), (X > 0, X[X > 0] + 1), ([], X[:0])):
        x, y = X.copy(), make(X)
        x[index] = value
        y[index] = make(value)
        check(y, x)
    x, y = X.copy(), make(X)
    x[[0, 1]], y[[0, 1]] = x[::-1].copy(), y[::-1]                           # the value is a view of the destination
    check(y, x)
    with pytest.raises(ValueError, match='could not be broadcast'):
        y[[0, 1]] = make(X[:, :2])


@pytest.mark.parametrize('index', [[1, 1], (slice(None), [2, 0]), ([0, 1, 0], [1, 2, 1]), X > 0, (0, [[0, 1], [1, 1]])],
                         ids=str)
def test_the_gradient_of_any_index_is_added_to_its_elements(index):
    x = Tensor(X, requires_grad=True)
    for _ in range(2):                                                      # the second derivatives: the same places
        y = x[index]
        check(y, X[index])
        first, = pyops.grad((y * y * y).sum(), [x], create_graph=True)
        second, = pyops.grad(first.sum(), [x])
        for got, want in ((first, 3 * X[index] ** 2), (second, 6 * X[index])):
            added = np.zeros_like(X)
            np.add.at(added, index, want)
            np.testing.assert_allclose(got.numpy(), added, rtol=1e-5)


@each_kind
def test_argmin_and_argsort_take_masks_and_the_sign_of_nan_is_nan(make):
    mask = make(X) > 0
    check(mask.argmin(1), (X > 0).argmin(1))
    check((make(X) > 0).argsort(-1, descending=True), np.argsort(~(X > 0), -1, kind='stable'))
    z = np.array([np.nan, -2, 0, 3, -np.inf], 'f')
    for _ in range(2):
        check(make(z).sign(), np.sign(z))


PROTOCOLS = {
    'np.sum': lambda x: np.sum(x), 'np.sum(axis)': lambda x: np.sum(x, axis=1, keepdims=True), 'np.mean': lambda x: np.mean(x,
    0),
    'np.max': lambda x: np.max(x, axis=-1), 'np.min': np.min, 'np.amax': lambda x: np.amax(x, 0),
    'np.var': lambda x: np.var(x, 1),
    'np.std': lambda x: np.std(x, axis=0, ddof=1), 'np.prod': lambda x: np.prod(x / 4, 2), 'np.any': lambda x: np.any(x > 5, 0),
    'np.all': lambda x: np.all(x > -9), 'np.argmax': lambda x: np.argmax(x, 1), 'np.argmin': np.argmin,
    'np.cumsum': lambda x: np.cumsum(x, 1), 'np.clip': lambda x: np.clip(x, -1, 2), 'np.sort': lambda x: np.sort(x, axis=0),
    'np.argsort': lambda x: np.argsort(x, kind='stable'), 'np.squeeze': lambda x: np.squeeze(x[:1]),
    'np.expand_dims': lambda x: np.expand_dims(x, 1), 'np.transpose': np.transpose,
    'np.transpose(axes)': lambda x: np.transpose(x, (2, 0, 1)), 'np.swapaxes': lambda x: np.swapaxes(x, 0, 1),
    'np.moveaxis': lambda x: np.moveaxis(x, 0, 2), 'np.reshape': lambda x: np.reshape(x, (3, -1)), 'np.ravel': np.ravel,
    'np.broadcast_to': lambda x: np.broadcast_to(x, (2, 2, 3, 4)), 'np.flip': lambda x: np.flip(x, 1),
    'np.repeat': lambda x: np.repeat(x, 2, axis=0), 'np.tile': lambda x: np.tile(x, (2, 1)), 'np.take': lambda x: np.take(x,
    [3, 0]), 'np.roll': lambda x: np.roll(x, 1, axis=2), 'np.dot': lambda x: np.dot(x, x[0].T), 'np.copy': np.copy,
    'np.concatenate': lambda x: np.concatenate([x, x[:1]]), 'np.concatenate(None)': lambda x: np.concatenate([x, x], axis=None),
    'np.stack': lambda x: np.stack([x, x + 1], axis=1), 'np.where': lambda x: np.where(x > 0, x, 0.0),
    'np.einsum': lambda x: np.einsum('ijk,ilk->ijl', x, x), 'np.split': lambda x: np.split(x, 2, axis=2),
    'np.split(ends)': lambda x: np.split(x, [1, 2], axis=1), 'np.pad': lambda x: np.pad(x, 1, constant_values=3),
    'np.linalg.norm': lambda x: np.linalg.norm(x, axis=1), 'np.exp': np.exp, 'np.tanh': np.tanh,
    'np.floor': lambda x: np.floor(x / 3),
    'np.abs': np.abs, 'np.square': np.square, 'np.add': lambda x: np.add(x, 1), 'np.maximum': lambda x: np.maximum(0, x),
    'np.minimum': lambda x: np.minimum(x, X[0]), 'np.subtract': lambda x: np.subtract(X, x), 'np.power': lambda x: np.power(x,
    2),
    'np.matmul': lambda x: np.matmul(x, X.swapaxes(1, 2)), 'np.logical_not': lambda x: np.logical_not(x),
    'np.logical_and': lambda x: np.logical_and(x > 0, x), 'np.add.reduce': np.add.reduce,
    'np.add.accumulate': np.add.accumulate,
    'np.multiply.reduce': lambda x: np.multiply.reduce(x / 4, axis=1), 'np.sum(dtype)': lambda x: np.sum(x, dtype=np.int32),
    'a number of numpy': lambda x: np.float64(2) * x + np.float32(1), 'an array of numpy': lambda x: X - x * X,
    'np.vstack': lambda x: np.vstack([x[0], x[1], x[0, 0]]), 'np.hstack': lambda x: np.hstack([x, x]),
    'np.hstack of vectors': lambda x: np.hstack([x[0, 0], x[1, 1]]), 'np.outer': lambda x: np.outer(x[0], x[1]),
    'np.zeros_like': np.zeros_like, 'np.full_like': lambda x: np.full_like(x, 3), 'np.round': lambda x: np.round(x / 4, 1),
    'np.tril': lambda x: np.tril(x, -1), 'np.cumprod': lambda x: np.cumprod(x / 4, 1),
    'np.trace': lambda x: np.trace(x, axis1=1, axis2=2), 'np.diagonal': lambda x: np.diagonal(x, 1),
    'np.ptp': lambda x: np.ptp(x, 0),
    'np.isnan': np.isnan, 'np.sign': np.sign,
}


@pytest.mark.parametrize('name', PROTOCOLS)
@each_kind
def test_a_function_of_numpy_returns_our_array(make, name):
    call = PROTOCOLS[name]
    check(call(make(X)), np.float32(call(X)) if np.asarray(call(X)).dtype == 'd' else call(X)) if name not in (
        'np.split', 'np.split(ends)') else check(call(make(X)), call(X))


@each_kind
def test_other_functions_of_numpy_run_on_its_arrays_and_out_is_written(make):
    x = make(X)
    assert np.ndim(x) == 3 and np.size(x) == 24
    assert np.array_equal(x, X) and np.allclose(x, X) and type(np.median(x)) is np.float32 and np.shape(x) == X.shape
    assert np.histogram(x, 3)[0].tolist() == np.histogram(X, 3)[0].tolist()
    np.testing.assert_allclose(np.cbrt(x), np.cbrt(X))
    fortran = np.reshape(x, (4, 6), order='F')
    assert type(fortran) is np.ndarray and (fortran == X.reshape((4, 6), order='F')).all()
    assert np.take(x, [30], mode='clip').tolist() == X.take([30], mode='clip').tolist()
    out = np.zeros_like(X)
    assert np.add(x, X, out=out) is out and (out == 2 * X).all()
    out += x
    assert type(out) is np.ndarray and (out == 3 * X).all()


def test_functions_of_numpy_keep_the_gradient_and_those_without_one_are_refused():
    x = Tensor(POSITIVE, requires_grad=True)
    (np.sum(np.concatenate([np.exp(x), np.sqrt(x)])) * np.mean(x) + np.where(x > 1, x, 0.0).sum()).backward()
    e = (np.exp(POSITIVE) + np.sqrt(POSITIVE)).sum()
    want = (np.exp(POSITIVE) + 0.5 / np.sqrt(POSITIVE)) * POSITIVE.mean() + e / X.size + (POSITIVE > 1)
    np.testing.assert_allclose(x.grad.numpy(), want, rtol=1e-5)
    with pytest.raises(TypeError, match=r'np.cbrt: has no gradient here.*; use x.detach\(\)'):
        np.cbrt(x)
    for call in (lambda: np.tensordot(x, X, 3), lambda: np.inner(X, x), lambda: np.diff(x), lambda: np.median(x),
                 lambda: np.average(x), lambda: np.vdot(x, x), lambda: np.var(x, where=X > 0),
                 lambda: np.linalg.det(x[:, :2, :2])):
        with pytest.raises(TypeError, match='has no gradient here'):
            call()
    assert np.median(x.detach()) == np.median(POSITIVE) and np.allclose(x, POSITIVE) and np.count_nonzero(x) == X.size
    assert np.argwhere(x).shape == (X.size, X.ndim) and not np.empty_like(x).requires_grad
    assert type(np.empty_like(x)) is Tensor and np.empty_like(x).shape == X.shape


@each_kind
def test_arguments_of_two_names_are_refused_and_errors_name_the_axis(make):
    x = make(X)
    with pytest.raises(TypeError, match='sum: got axis and also dim'):
        x.sum(axis=0, dim=1)
    for call in (lambda: x.sum(3), lambda: x.squeeze(-4), lambda: x.cumsum(5), lambda: x.sort(3), lambda: x.unsqueeze(5)):
        with pytest.raises(ValueError, match='axis .* is out of bounds'):
            call()
    with pytest.raises(ValueError, match=r'squeeze: cannot remove axis 1 of shape \(2, 3, 4\): its size is not 1'):
        x.squeeze(1)
    with pytest.raises(ValueError, match='topk: expected k from 0 to 4'):
        x.topk(5)
    with pytest.raises(ValueError, match='clip: expected min, max or both'):
        x.clip()
    with pytest.raises(ValueError, match="norm: ord: expected a number or 'fro', got 'nuc'"):
        x.norm('nuc')
    with pytest.raises(ValueError, match='roll: shift: expected one number, or one for each of 3 axes'):
        x.roll((1, 2), (0, 1, 2))


# ---- einsum and where ------------------------------------------------------------------------------------------------

EINSUMS = [('ij,jk->ik', (3, 4), (4, 2)), ('ij,kj', (3, 4), (2, 4)), ('bij,bjk->bik', (2, 3, 4), (2, 4, 5)),
           ('bhqd,bhkd->bhqk', (2, 2, 3, 4), (2, 2, 5, 4)), ('ij->ji', (3, 4)), ('ij->', (3, 4)), ('ii->i', (4, 4)), ('ii',
           (4, 4)),
           ('i,j->ij', (3,), (4,)), ('i,i->', (4,), (4,)), ('ij,jk,kl->il', (2, 3), (3, 4), (4, 2)), ('ijk->k', (2, 3, 4)),
           ('...ij,...jk->...ik', (2, 1, 3, 4), (5, 4, 2)), ('...i->...', (2, 3)), ('ij,ij->ij', (3, 4), (3, 4)),
           ('iij,jk->ik', (3, 3, 4), (4, 2)), ('ab,b,a->', (3, 4), (4,), (3,)), ('ij,j->i', (3, 1), (4,)),
           ('ij,kl->ik', (3, 4), (2, 5)), ('ij,jk,k->i', (3, 4), (4, 5), (5,)), ('i,ij,jk,k->', (2,), (2, 3), (3, 4), (4,)),
           ('bi,bj,ij,b->ji', (2, 3), (2, 4), (3, 4), (2,)), ('...i,ij,...j,k->...k', (2, 3), (3, 4), (5, 2, 4), (6,))]


@pytest.mark.parametrize('subscripts, shapes', [(case[0], case[1:]) for case in EINSUMS], ids=[case[0] for case in EINSUMS])
def test_einsum_is_numpys(subscripts, shapes):
    operands = [numbers(*shape, seed=i) for i, shape in enumerate(shapes)]
    want = np.einsum(subscripts, *operands)
    check(ndarray.einsum(subscripts, *map(array, operands)), want)
    check(pyops.functional.einsum(subscripts, *map(Tensor, operands)), want)


def test_einsum_is_a_function_of_the_package_after_its_first_use():
    x = array(numbers(2, 3))
    for _ in range(2):                      # a module of the same name would replace it
        check(pyops.einsum('ij->ji', x), x.numpy().T)
    assert not {module.name for module in pkgutil.iter_modules(pyops.__path__)} & set(pyops._FROM)


def least(terms, output, sizes):
    """Return the least number of multiply-adds of all orders of products, by trying each."""
    if len(terms) == 1:
        return 0
    found = []
    for i, j in itertools.combinations(range(len(terms)), 2):
        rest = [term for k, term in enumerate(terms) if k not in (i, j)]
        letters = terms[i] | terms[j]
        found.append(math.prod(sizes[c] for c in letters) + least([*rest, letters & output.union(*rest)], output, sizes))
    return min(found)


@pytest.mark.parametrize('seed', range(12))
def test_einsum_multiplies_in_the_order_of_the_least_multiply_adds(seed, monkeypatch):
    rng, made, product = np.random.default_rng(seed), [], contraction._product
    sizes = dict(zip('abcdef', rng.integers(1, 9, 6).tolist(), strict=True))
    terms = [''.join(rng.choice(list(sizes), rng.integers(1, 4), replace=False)) for _ in range(2 + seed % 4)]
    output = ''.join(c for c in sizes if c in ''.join(terms))[:2]
    operands = [np.sign(numbers(*(sizes[c] for c in term), seed=i)) for i, term in enumerate(terms)]      # exact sums
    used = [frozenset(c for c in term if c in output or sum(c in other for other in terms) > 1) for term in terms]

    def counted(a, of_a, b, of_b, kept):
        made.append(math.prod(sizes[c] for c in {*of_a, *of_b}))
        return product(a, of_a, b, of_b, kept)

    monkeypatch.setattr(contraction, '_product', counted)
    subscripts = f'{",".join(terms)}->{output}'
    y = contraction.einsum(subscripts, *map(array, operands))
    check(y, np.einsum(subscripts, *operands))
    assert len(made) == len(terms) - 1 and sum(made) == least(used, frozenset(output), sizes)


def test_einsum_of_many_operands_multiplies_small_ones_first(monkeypatch):
    made, product = [], contraction._product
    monkeypatch.setattr(contraction, '_product', lambda a, of_a, b, of_b, kept:
                        made.append(of_a + of_b) or product(a, of_a, b, of_b, kept))
    shapes = [(30, 40), (40, 50), (50, 60), (60, 2), (2, 3), (3, 2), (2, 4), (4,)]
    operands = [np.sign(numbers(*shape, seed=i)) for i, shape in enumerate(shapes)]
    y = contraction.einsum('ab,bc,cd,de,ef,fg,gh,h->a', *map(array, operands))
    check(y, np.einsum('ab,bc,cd,de,ef,fg,gh,h->a', *operands, optimize=True))
    assert made[0] == 'ghh' and made[-1] == 'abb' and all(len(set(letters)) == 2 for letters in made)


@pytest.mark.parametrize('subscripts, shapes, text', [
    ('ij,jk', ((2, 3),), 'expected as many operands'), ('ij->i', ((2, 3, 4),), 'do not fit an operand of shape'),
    ('ij,jk->ik', ((2, 3), (4, 2)), 'j has the sizes 3 and 4'), ('ij->ijk', ((2, 3),), 'each letter of the result')])
def test_einsum_names_what_does_not_fit(subscripts, shapes, text):
    with pytest.raises(ValueError, match=text):
        ndarray.einsum(subscripts, *(array(numbers(*shape)) for shape in shapes))


@pytest.mark.parametrize('a, b', [(X, -X), (X, 0), (1, X[0]), (X.astype('i'), 2), (X.astype('i'), X), (2, 3), (2.5, 1),
                                  (X > 0, X < 3), (True, False), (np.full_like(X, np.nan), np.full_like(X, np.inf))])
def test_where_is_numpys_to_the_bit(a, b):
    condition, real = X > 2, (lambda z: z if np.isscalar(z) else array(z))
    want = np.where(condition, a, b)
    got = ndarray.where(array(condition), real(a), real(b))
    assert got.shape == want.shape and got.numpy().dtype.kind == want.dtype.kind
    np.testing.assert_array_equal(got.numpy(), want)
    np.testing.assert_array_equal(pyops.functional.where(Tensor(condition), real(a), real(b)).numpy(), want)


# ---- dtypes ----------------------------------------------------------------------------------------------------------

@each_kind
def test_numpys_default_dtypes_are_converted_and_others_kept(make):
    for obj, dtype in ((np.ones(3), 'float32'), (np.arange(3), 'int32'), (np.ones(3, 'float16'), 'float32'),
                         (np.arange(3, dtype='uint8'), 'int32'), ([1.5], 'float32'), ([1], 'int32'), (np.float64(2),
                         'float32')):
        assert make(obj).dtype == dtype
    assert make(np.array([True, False])).numpy().dtype == bool
    for dtype, kind in (('int64', 'int32'), (int, 'int32'), (np.float32, 'float32'), ('int32', 'int32')):
        assert make([1, 2], dtype=dtype).dtype == kind
    check(make([0, 2, 0], dtype=bool), np.array([False, True, False]))
    check(make([1.0, 2.0]) + np.ones(2), np.float32([2, 3]))
    with pytest.raises(OverflowError, match='3000000000 out of bounds for int32'):
        make(np.array([3_000_000_000]))


@each_kind
def test_astype_converts_between_all_dtypes(make):
    x = make(np.float32([-1.5, 0, 2.5]))
    check(x.astype('int64'), np.array([-1, 0, 2]))
    check(x.int(), np.array([-1, 0, 2]))
    check(x.bool(), np.array([True, False, True]))
    check(x.astype(bool).astype(np.float32), np.float32([1, 0, 1]))
    check((x > 0).float(), np.float32([0, 0, 1]))
    check((x > 0).long().sum(), np.array(1))


@on_a_cpu
@each_kind
def test_float64_has_the_digits_of_numpy(make):
    z = np.random.default_rng(0).standard_normal((3, 4, 5))
    x = make(z, dtype='float64')
    assert x.dtype == np.float64 and x.itemsize == 8
    w = z[:, 0] + 3
    for got, want in ((x + x, z + z), (x * 2 - 1, z * 2 - 1), (1 / (x * x + 1), 1 / (z * z + 1)), (x.exp(), np.exp(z)),
                      (x.tanh(), np.tanh(z)), (x.sigmoid(), 1 / (1 + np.exp(-z))), ((x * x).sqrt(), abs(z)),
                      ((x * x).log(), np.log(z * z)), (x.sin() + x.cos(), np.sin(z) + np.cos(z)), (x.floor(), np.floor(z)),
                      (x % 0.3, z % 0.3), (x // 0.3, z // 0.3), (x.maximum(0.1), np.maximum(z, 0.1)), (x ** 3, z ** 3),
                      (x.sum(), z.sum()), (x.sum((0, 2)), z.sum((0, 2))), (x.mean(1), z.mean(1)), (x.max(0), z.max(0)),
                      (x.var(2), z.var(2)), (x.T, z.T), (x[::-1, 1:, ::2] * 1, z[::-1, 1:, ::2]), (x.cumsum(1), z.cumsum(1)),
                      (x.sort(), np.sort(z)), (x[:, 0] @ z[0].T, z[:, 0] @ z[0].T), (x @ z.swapaxes(1, 2), z @ z.swapaxes(1,
                      2)),
                      (x[[2, 0]], z[[2, 0]]), (x[x > 0], z[z > 0]), (x.flip(), np.flip(z)), (x.softmax(1).sum(1), np.ones((3,
                      5))),
                      (x + np.float32(1), z + 1), (x + np.ones(5) / 3, z + np.ones(5) / 3), (np.where(x > 0, x, 0),
                      np.where(z > 0, z, 0)),
                      (x.prod(), z.prod()), (x.clip(-1, 1), z.clip(-1, 1)), (x.norm(), np.linalg.norm(z)), (w + x[:, 0],
                      w + z[:, 0]),
                      (x.logsumexp(0), np.log(np.exp(z).sum(0)))):
        assert got.dtype == np.float64
        check(got, want, 1e-13)
    check(x > 0, z > 0)
    check(x.argmax(1), z.argmax(1))
    check(x.argmin(), z.argmin())
    check(x.argsort(0), z.argsort(0, kind='stable'))
    check(x.float(), z.astype('f'))
    check(x.int(), z.astype('i'))
    check(make(z).double(), z.astype('f').astype('d'), 1e-15)
    assert (x + make([1, 2, 3, 4, 5])).dtype == (x + make(np.float32([1]))).dtype == np.float64
    assert (make(np.float32([1])) + 1.5).dtype == np.float32
    nan = make([1.0, np.nan, 3.0], dtype='float64')
    assert nan.argmax().item() == 1 and np.isnan(nan.max().item()) and nan.sort().numpy()[:2].tolist() == [1, 3]


@on_a_cpu
def test_float64_tensors_have_float64_gradients(torch):
    z, w = (np.random.default_rng(i).standard_normal(shape) for i, shape in enumerate(((4, 3), (3, 2))))

    def f(x, w):
        y = (x @ w).tanh()
        return ((y * y).sum() + x.exp().mean() + (x[1:] / 3).sum() ** 2 + x[[0, 0, 2]].sum())
    ours = [Tensor(a, requires_grad=True, dtype='float64') for a in (z, w)]
    theirs = [torch.tensor(a, requires_grad=True) for a in (z, w)]
    f(*ours).backward()
    f(*theirs).backward()
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad.dtype == np.float64
        np.testing.assert_allclose(a.grad.numpy(), b.grad.numpy(), rtol=1e-12)
    results = []
    for F, make in ((pyops.functional, lambda a: Tensor(a, requires_grad=True, dtype='float64')),
                    (torch.nn.functional, lambda a: torch.tensor(a, requires_grad=True))):
        x, v, c = make(z), make(w.T.copy()), make(z[0].copy())
        labels = [1, 0, -100, 2] if make(z).__class__ is Tensor else torch.tensor([1, 0, -100, 2])
        e = F.embedding([0, 0, 1], v) if x.__class__ is Tensor else F.embedding(torch.tensor([0, 0, 1]), v)
        n = F.layer_norm(x, (3,), c, c)
        y = F.cross_entropy(F.silu(n), labels) + F.relu(F.linear(x, v, None)).sum() + (e * e).sum()
        y.backward()
        results.append([y.item(), *(a.grad.tolist() for a in (x, v, c))])
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-14)
    assert pyops.gradcheck(lambda a: (a * a).exp(), Tensor(z, dtype='float64')).ok
    x = Tensor(np.float32([1, 2]), requires_grad=True)
    (x.double() ** 2).sum().backward()
    assert x.grad.dtype == np.float32 and x.grad.tolist() == [2, 4]


# ---- indices as in numpy, for reading and writing -------------------------------------------------------------------

SHAPE = (3, 4, 2)


@st.composite
def indices(draw):
    """A tuple of integers, slices, None, Ellipsis, arrays of integers and masks that numpy may or may not accept."""
    items, axis, ellipsis = [], 0, False
    joint = draw(st.sampled_from([(), (2,), (3, 1), (1, 2), (3, 2)]))
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(['int', 'slice', 'none', 'ellipsis', 'array', 'array', 'mask', 'list']))
        if kind == 'none':
            items.append(None)
            continue
        if kind == 'ellipsis' and not ellipsis:
            ellipsis = True
            items.append(...)
            continue
        if axis >= len(SHAPE) or ellipsis and kind in ('mask',):
            continue
        n = SHAPE[axis] if not ellipsis else 2
        if kind == 'int':
            items.append(draw(st.integers(-n, n - 1)))
        elif kind in ('slice', 'ellipsis'):
            items.append(slice(draw(st.none() | st.integers(-4, 4)), None, draw(st.sampled_from([None, 1, -1, 2]))))
        elif kind == 'mask':
            count = draw(st.integers(1, len(SHAPE) - axis))
            shape = SHAPE[axis:axis + count]
            items.append(np.array(draw(st.lists(st.booleans(), min_size=int(np.prod(shape)),
            max_size=int(np.prod(shape))))).reshape(shape))
            axis += count - 1
        else:
            size = int(np.prod(joint))
            ids = np.array(draw(st.lists(st.integers(-n, n - 1), min_size=size, max_size=size)), int).reshape(joint)
            items.append(ids.tolist() if kind == 'list' and ids.ndim else ids)
        axis += 1
    return tuple(items) if len(items) != 1 or draw(st.booleans()) else items[0]


def ours(index, make):
    """The same index with some of its arrays as ours."""
    if isinstance(index, tuple):
        return tuple(ours(item, make) for item in index)
    return make(index) if isinstance(index, np.ndarray) and index.ndim else index


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(index=indices(), data=st.data())
def test_any_index_reads_and_writes_as_in_numpy(index, data):
    x = np.arange(np.prod(SHAPE), dtype='float32').reshape(SHAPE)
    transposed = np.ascontiguousarray(x.T).T
    try:
        want = x[index]
    except IndexError:
        for make in KINDS.values():
            with pytest.raises(IndexError):
                make(x)[index]
        return
    for make in KINDS.values():
        for one in (index, ours(index, make)):
            check(make(x)[one], want)
    check(ndarray.from_numpy(transposed)[index] if not ON_GPU else array(transposed)[index], want)
    value = data.draw(st.sampled_from(['number', 'array', 'row']))
    value = 7.5 if value == 'number' else -1 - np.arange(want.size, dtype='f').reshape(want.shape) if value == 'array' else \
        np.full(want.shape[-1:], 3, 'f')
    changed = x.copy()
    changed[index] = value
    for make in KINDS.values():
        for one in (index, ours(index, make)):
            y = make(x)
            y[one] = value
            check(y, changed)
    if not ON_GPU:
        y = ndarray.from_numpy(transposed.copy(order='K'))
        y[index] = value
        check(y, changed)


@each_kind
def test_masks_and_arrays_select_and_are_assigned(make):
    y = make([5.0, 6.0, 7.0])
    check(y[y > 5], np.float32([6, 7]))
    check(y[np.array([False, True, True])], np.float32([6, 7]))
    check(y[[[False, True, True]][0]], np.float32([6, 7]))
    whole = make([5, 6, 7])
    check(whole[whole > 5], np.array([6, 7]))
    y[y > 5] = 0
    check(y, np.float32([5, 0, 0]))
    y[[0, 2, 0]] = [1, 2, 3]
    check(y, np.float32([3, 0, 2]))
    assert 3 in y and 5 not in y
    check(array([5.0, 6.0])[Tensor([1, 0])], np.float32([6, 5]))
    y[y == 0] += 4
    check(y, np.float32([3, 4, 2]))
    m = make(X[0] > 0)
    m[m] = False
    assert not m.any() and m.numpy().dtype == bool
    with pytest.raises(ValueError, match=r'of shape \(3,\) could not be broadcast to indexing result of shape \(2,\)'):
        y[[0, 1]] = [1, 2, 3]
    with pytest.raises(IndexError, match='arrays used as indices must be of integer'):
        y[np.array([0.5])]


def test_gradients_flow_through_any_index(torch):
    x, v = X / 2, numbers(2, 3, seed=4)
    index = (np.array([1, 0]), slice(None), np.array([2, 2]))
    results = []
    for make in (lambda a: Tensor(a, requires_grad=True), lambda a: torch.tensor(a, requires_grad=True)):
        a, b = make(x), make(v)
        y = a * 2
        y[index] = b * 3
        results.append((y, a, b))
    (y, a, b), (yt, at, bt) = results
    np.testing.assert_allclose(y.numpy(), yt.detach().numpy())
    (y * y * y[:, [0, 2, 0]].sum()).sum().backward()
    (yt * yt * yt[:, [0, 2, 0]].sum()).sum().backward()
    np.testing.assert_allclose(a.grad.numpy(), at.grad.numpy(), rtol=1e-5)
    np.testing.assert_allclose(b.grad.numpy(), bt.grad.numpy(), rtol=1e-5)


def test_of_equal_positions_the_last_value_gets_the_gradient():
    v = Tensor([1.0, 2.0, 3.0], requires_grad=True)
    y = Tensor([0.0, 0.0], requires_grad=True) * 1
    y[[0, 1, 0]] = v
    (y * Tensor([10.0, 20.0])).sum().backward()
    assert y.tolist() == [3, 2] and v.grad.tolist() == [0, 20, 10]


@on_a_cpu
@pytest.mark.parametrize('name', ['softmax', 'log_softmax'])
@pytest.mark.parametrize('axis', [-1, 0, (0, 2)])
def test_softmax_of_float64_and_its_gradient_have_the_digits_of_float64(name, axis):
    rng = np.random.default_rng(3)
    x, dy = rng.standard_normal((3, 4, 5)), rng.standard_normal((3, 4, 5))
    leaf = pyops.tensor(x, dtype='float64', requires_grad=True)
    y = getattr(leaf, name)(axis)
    y.backward(pyops.tensor(dy, dtype='float64'))
    p = np.exp(x) / np.exp(x).sum(axis, keepdims=True)
    if name == 'softmax':
        value, gradient = p, p * (dy - (dy * p).sum(axis, keepdims=True))
    else:
        value, gradient = np.log(p), dy - p * dy.sum(axis, keepdims=True)
    assert np.abs(y.numpy() - value).max() <= 1e-14 and np.abs(leaf.grad.numpy() - gradient).max() <= 1e-13
