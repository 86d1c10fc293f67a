"""The further methods of NDArray and Tensor, the methods in place, and the functions of methods, beside PyTorch and numpy."""
import functools
import inspect
import math

import numpy as np
import pytest
from places import ON_GPU

import pyops
from pyops import creation, names, ndarray
from pyops import functional as F
from pyops.autograd import Tensor, no_grad
from pyops.ndarray import NDArray, array
from pyops.torch_methods import IN_PLACE

torch = pytest.importorskip('torch', reason='torch is not installed: pip install torch')

KINDS = {'NDArray': array, 'Tensor': Tensor}
each_kind = pytest.mark.parametrize('make', KINDS.values(), ids=KINDS)
on_a_cpu = pytest.mark.skipif(ON_GPU, reason='float64 exists on the CPU only: run without PYOPS_BACKEND=gpu')
rng = np.random.default_rng(0)
X, Y = (rng.standard_normal((3, 4)).astype(np.float32) * 2 for _ in range(2))
P = (rng.random((3, 4)) * 0.8 + 0.1).astype(np.float32)
V, W = rng.standard_normal(4).astype(np.float32), rng.standard_normal((4, 2)).astype(np.float32)
I = np.array([[2, 0, 1, 0], [0, 0, 2, 1]], np.int32)
J = np.array([2, 0], np.int32)
M = np.array([[True, False, True, True], [False, False, True, False], [True, True, False, False]])

# f(x, y): differentiable, of floats; the same expression in both libraries.  Their inputs are X and Y unless given
SMOOTH = {
    'expm1': (lambda x: x.expm1(), X * 1e-3), 'expm1 of large': (lambda x: x.expm1(), X * 4), 'log2': (lambda x: x.log2(), P),
    'log10': (lambda x: x.log10(), P), 'sinh': (lambda x: x.sinh(),), 'cosh': (lambda x: x.cosh(),),
    'atan': (lambda x: x.atan(),), 'arctan of large': (lambda x: x.arctan(), X * 100),
    'asin': (lambda x: x.asin(), X / 6), 'acos': (lambda x: x.arccos(), X / 6), 'atan2': (lambda x, y: x.atan2(y),),
    'arctan2': (lambda x, y: y.arctan2(x),), 'erf': (lambda x: x.erf(),), 'frac': (lambda x: x.frac(),),
    'fmod': (lambda x, y: x.fmod(y),), 'fmod of a number': (lambda x: x.fmod(0.7),),
    'remainder': (lambda x, y: x.remainder(y),), 'hypot': (lambda x, y: x.hypot(y),),
    'logaddexp': (lambda x, y: x.logaddexp(y),), 'xlogy': (lambda x, y: x.xlogy(y), X, P), 'logit': (lambda x: x.logit(), P),
    'logit(eps)': (lambda x: x.logit(eps=0.2), P), 'clamp_min': (lambda x: x.clamp_min(0.3),),
    'clamp_max': (lambda x: x.clamp_max(0.3),), 'lerp': (lambda x, y: x.lerp(y, 0.3),),
    'lerp of tensors': (lambda x, y, p: x.lerp(y, p), X, Y, P), 'addcmul': (lambda x, y, p: x.addcmul(y, p, value=2), X, Y, P),
    'addcdiv': (lambda x, y, p: x.addcdiv(y, p, value=0.5), X, Y, P), 'nan_to_num': (lambda x: x.nan_to_num(),),
    'nansum': (lambda x: x.nansum(dim=1),), 'nanmean': (lambda x: x.nanmean(0),), 'dist': (lambda x, y: x.dist(y),),
    'dist(1)': (lambda x, y: x.dist(y, 1),), 'outer': (lambda v, w: v.outer(w), V, X[0]),
    'inner': (lambda v, w: v.inner(w), V, X[0]), 'inner of matrices': (lambda x, y: x.inner(y),),
    'mv': (lambda x, v: x.mv(v), X, V), 'addmm': (lambda x, y, w: x.addmm(y, w, beta=0.5, alpha=2), X[:, :2], Y, W),
    'select': (lambda x: x.select(1, -1),), 'select(dim=)': (lambda x: x.select(dim=0, index=1),),
    'narrow': (lambda x: x.narrow(1, 1, 2),), 'narrow from the end': (lambda x: x.narrow(dim=-1, start=-3, length=2),),
    'diff': (lambda x: x.diff(),), 'diff(2)': (lambda x: x.diff(n=2, dim=0),), 'unfold': (lambda x: x.unfold(1, 2, 1),),
    'unfold(step)': (lambda x: x.unfold(dimension=0, size=1, step=2) if type(x) is torch.Tensor else x.unfold(0, 1, 2),),
    'tensor_split': (lambda x: x.tensor_split(3, dim=1)[0],), 'tensor_split at': (lambda x: x.tensor_split((1, 3), dim=1)[1],),
    'fliplr': (lambda x: x.fliplr(),), 'flipud': (lambda x: x.flipud(),), 'diag of a matrix': (lambda x: x.diag(1),),
    'diag of a vector': (lambda v: v.diag(), V), 'diag(2) of a vector': (lambda v: v.diag(2), V),
    'diag(-1) of a vector': (lambda v: v.diag(diagonal=-1), V), 'unflatten': (lambda x: x.unflatten(1, (2, -1)),),
    'unbind(dim=)': (lambda x: x.unbind(dim=1)[2],), 'transpose(dim0=, dim1=)': (lambda x: x.transpose(dim0=0, dim1=1),),
    'swapdims': (lambda x: x.swapdims(0, 1),), 'tril(diagonal=)': (lambda x: x.tril(diagonal=1),),
    'triu(diagonal=)': (lambda x: x.triu(diagonal=1),), 'roll(shifts=, dims=)': (lambda x: x.roll(shifts=1, dims=0),),
    'split(split_size=)': (lambda x: x.split(split_size=2, dim=1)[1],),
    'diagonal(dim1=)': (lambda x: x.diagonal(0, dim1=1, dim2=0),),
    'masked_select': (lambda x, m: x.masked_select(m), X, M), 'masked_fill': (lambda x, m: x.masked_fill(m, 0.5), X, M),
    'scatter of a number': (lambda x, i: x.scatter(1, i, 0.5), X, I),
    'scatter': (lambda x, i, y: x.scatter(0, i[:1], y), X, I, Y[:1]),
    'scatter_add': (lambda x, i, y: x.scatter_add(1, i, y), X, I, Y[:2]),
    'scatter_add(dim=)': (lambda x, i, y: x.scatter_add(dim=0, index=i, src=y), X, I, Y[:2]),
    'index_add': (lambda x, j, y: x.index_add(0, j, y[:2], alpha=2), X, J, Y),
    'index_add to equal ones': (lambda x, i, y: x.index_add(1, i[0], y), X, I, Y),
    'index_copy': (lambda x, j, y: x.index_copy(1, j, y[:, :2]), X, J, Y),
    'index_fill': (lambda x, j: x.index_fill(1, j, 0.5), X, J), 'div': (lambda x, y: x.div(y), X, P),
    'baddbmm': (lambda x, y: x.unsqueeze(0).baddbmm(y.unsqueeze(0), x.T.unsqueeze(0) @ x.unsqueeze(0), beta=2, alpha=0.5),),
}
# without a gradient
CONSTANT = {
    'trunc': (lambda x: x.trunc(),), 'floor_divide': (lambda x, p: x.floor_divide(p), X, P),
    "div('floor')": (lambda x, p: x.div(p, rounding_mode='floor'), X, P),
    "div('trunc')": (lambda x, p: x.div(p, rounding_mode='trunc'), X, P),
    'isclose': (lambda x, y: x.isclose(x + y * 1e-5, rtol=1e-5),),
    'isclose of integers': (lambda i: i.isclose(i + 1, atol=1), I),
    'isclose of infinities': (lambda x: x.isclose(x.flip(0), equal_nan=True),
        np.float32([math.nan, 1, math.inf, -math.inf, math.nan])),
    'logical_and': (lambda x, m: x.logical_and(m), X, M), 'logical_or': (lambda x, m: (x > 1).logical_or(m), X, M),
    'logical_xor': (lambda x, m: x.logical_xor(m), X, M), 'logical_not': (lambda m: m.logical_not(), M),
    'count_nonzero': (lambda m: m.count_nonzero(dim=1), M), 'argwhere': (lambda m: m.argwhere(), M),
    'bincount': (lambda i: i.reshape(-1).bincount(minlength=5), I), 'unique': (lambda i: i.unique(), I),
    'nan_to_num of all': (lambda x: x.nan_to_num(1.0, posinf=2.0, neginf=-3.0), np.float32([math.nan, 3, math.inf, -math.inf])),
    'nansum of NaN': (lambda x: x.nansum(), np.float32([math.nan, 3, 4])),
    'nanmean of NaN': (lambda x: x.nanmean(), np.float32([math.nan, 3, 4])),
    'atan of all': (lambda x: x.atan(), np.float32([0, 1, -1, math.inf, -math.inf, math.nan, 1e30, -1e-30])),
    'asin of the ends': (lambda x: x.asin(), np.float32([1, -1, 0, 2])),
    'acos of the ends': (lambda x: x.acos(), np.float32([1, -1, 0, 2])),
    'atan2 on the axes': (lambda x, y: x.atan2(y), np.float32([0, 0, 0, 1, -1, 1, -1]), np.float32([0, 1, -1, 0, 0, -1, -1])),
    '<<': (lambda i: i << 3, I), '>>': (lambda i: (i - 2) * 1000 >> 3, I), '>> 31': (lambda i: (i - 1) >> 31, I),
    'new_zeros': (lambda x: x.new_zeros(2, 3),), 'new_ones': (lambda i: i.new_ones((2, 3)), I),
    'new_full': (lambda x: x.new_full((2,), 3),),
    'new_tensor': (lambda x: x.new_tensor([[1.5]]),), 'scatter_add of integers': (lambda i: i.scatter_add(1, i, i), I),
    'greater': (lambda x, y: x.greater(y),), 'not_equal': (lambda i: i.not_equal(2), I),
    'erf of integers': (lambda i: i.erf(), I),
}


def arguments(case):
    f, *given = case
    return f, given or [X, Y][:len(inspect.signature(f).parameters)]


def as_torch(x, grad=False):
    t = torch.from_numpy(np.array(x, np.float64 if x.dtype.kind == 'f' else np.int64 if x.dtype.kind == 'i' else bool))
    return t.requires_grad_() if grad and x.dtype.kind == 'f' else t


def near(got, want, rtol=4e-6):
    got, want = got.numpy(), want.detach().numpy()
    assert got.shape == want.shape and got.dtype.kind == want.dtype.kind, (got, want)
    np.testing.assert_allclose(got, want, rtol=rtol, atol=2e-6)


@on_a_cpu
@each_kind
@pytest.mark.parametrize('name', [*SMOOTH, *CONSTANT])
def test_a_method_equals_pytorchs(make, name):
    f, given = arguments((SMOOTH | CONSTANT)[name])
    near(f(*map(make, given)), f(*map(as_torch, given)))


@on_a_cpu
@pytest.mark.parametrize('name', SMOOTH)
def test_the_gradient_of_a_method_equals_pytorchs_and_differences(name):
    f, given = arguments(SMOOTH[name])
    ours = [Tensor(x, requires_grad=x.dtype.kind == 'f') for x in given]
    theirs = [as_torch(x, grad=True) for x in given]
    y, want = f(*ours), f(*theirs)
    dy = np.random.default_rng(1).standard_normal(want.shape)
    y.backward(gradient=dy)
    want.backward(gradient=torch.from_numpy(dy))
    for x, t in zip(ours, theirs, strict=True):
        if x.requires_grad and t.grad is not None:
            near(x.grad, t.grad, 2e-5)
            assert t.grad.abs().max() > 0
    floats = [i for i, x in enumerate(given) if x.dtype.kind == 'f']

    def of_floats(*xs):
        full = [Tensor(x) for x in given]
        for i, x in zip(floats, xs, strict=True):
            full[i] = x
        return f(*full)
    report = pyops.gradcheck(of_floats, [given[i] for i in floats])
    assert report.ok, f'\n{report}'


@on_a_cpu
def test_float64_keeps_its_digits():
    x = np.linspace(-3, 3, 13)
    t = Tensor(x, dtype='float64')
    for name in ('arctan', 'erf', 'expm1', 'sinh', 'log2'):
        want = getattr(torch.from_numpy(x), name)().numpy()
        got = getattr(t, name)()
        assert got.dtype == np.float64
        np.testing.assert_allclose(got.numpy(), want, rtol=2e-15, atol=1e-15)
    np.testing.assert_allclose(t.arctan2(t.flip(0) + 0.5).numpy(), np.arctan2(x, x[::-1] + 0.5), rtol=2e-15)


@each_kind
def test_answers_that_are_no_arrays(make):
    x = make(X)
    assert x.allclose(X + 1e-9) is True and x.allclose(Y) is False and x.equal(make(X)) is True
    assert x.equal(make(X[:1])) is False and x.stride() == (4, 1) and x.T.stride(-1) == 4 and x.stride(0) == 4
    assert x.new_empty(2, 3).shape == (2, 3) and x.is_contiguous() is True and x.T.is_contiguous() is False
    assert x.nelement() == 12 and x.ndimension() == 2
    assert [a.tolist() for a in divmod(make([7, -7]), 3)] == [[2, -3], [1, 2]]
    assert [a.tolist() for a in divmod(7, make([2, -2]))] == [[3, -4], [1, -1]]
    values, counts = make(I).unique(return_counts=True)
    assert values.tolist() == [0, 1, 2] and counts.tolist() == [4, 2, 2]
    assert make(X).T.median().item() == pytest.approx(float(np.median(X)))
    assert math.isnan(make([1.0, math.nan, 0.0]).median().item())
    np.testing.assert_allclose(make(X).median(axis=(0, 1), keepdims=True).numpy(), np.median(X, (0, 1), keepdims=True))
    np.testing.assert_allclose(make(X).median(dim=1).numpy(), np.median(X, 1), rtol=1e-6)


@each_kind
def test_bad_arguments_of_methods_are_one_line(make):
    x = make(X)
    for call, error, text in (
            (lambda: x.narrow(1, 3, 2), IndexError, 'narrow: start 3 and length 2 exceed the 4 elements of axis 1'),
            (lambda: x.unflatten(1, (3, 2)), ValueError, r'unflatten: sizes \[3, 2\] do not make up axis 1 of 4'),
            (lambda: x.unfold(1, 5, 1), ValueError, 'unfold: size 5'), (lambda: x << 1, TypeError, 'whole numbers, got floats'),
            (lambda: make(I) >> 1.5, TypeError, 'whole numbers, got floats'),
            (lambda: x.scatter(0, J, 1.0), ValueError, 'same number of axes, got 1 and 2'),
            (lambda: x.div(2, rounding_mode='up'), ValueError, "rounding_mode: expected None, 'floor' or 'trunc', got 'up'"),
            (lambda: make(np.zeros((2, 2, 2))).diag(), ValueError, 'diag: expected a vector or a matrix'),
            (lambda: x.add_(make(np.ones((2, 3, 4)))), ValueError, r'in place: a result of shape \(2, 3, 4\)'),
            (lambda: make(I).add_(0.5), TypeError, 'in place: a result of float32 cannot be stored in an array of int32'),
            (lambda: make(M).add_(1), TypeError, 'in place: a result of int32 cannot be stored in an array of bool'),
            (lambda: x.fill_(V), ValueError, r'fill_: expected one number, got shape \(4,\); use copy_'),
            (lambda: make(X[:0]).median(), ValueError, 'it is undefined without elements')):
        with pytest.raises(error, match=text):
            call()


@on_a_cpu
@each_kind
@pytest.mark.parametrize('name',
    ['expm1', 'log2', 'log10', 'sinh', 'cosh', 'arctan', 'arcsin', 'arccos', 'trunc', 'fmod', 'hypot',
                                  'logaddexp', 'arctan2', 'arcsinh', 'arctanh', 'exp2', 'deg2rad', 'rad2deg', 'logaddexp2',
                                  'copysign', 'fmax', 'fmin'])
def test_ufuncs_of_numpy_run_as_these_methods(make, name):
    f, given = getattr(np, name), (P, P.copy()[::-1])[:getattr(np, name).nin]
    np.testing.assert_allclose(f(*map(make, given)).numpy(), f(*given), rtol=4e-6, atol=1e-6)
    if len(given) == 2:
        np.testing.assert_allclose(f(0.5, make(P)).numpy(), f(np.float32(0.5), P), rtol=4e-6, atol=1e-6)
    if make is Tensor and name != 'trunc':
        assert f(*(Tensor(x, requires_grad=True) for x in given)).requires_grad


# ---- in place --------------------------------------------------------------------------------------------------------

ARGUMENTS = {
    **dict.fromkeys(('add', 'sub', 'subtract', 'mul', 'multiply', 'div', 'divide', 'true_divide', 'floor_divide', 'remainder',
        'fmod',
                     'eq', 'ne', 'lt', 'le', 'gt', 'ge', 'hypot', 'xlogy', 'logical_and', 'logical_or', 'logical_xor'), (Y,)),
    'pow': (2,), 'float_power': (2,), 'clamp': (0.2, 0.5), 'clip': (0.2, 0.5), 'clamp_min': (0.3,), 'clamp_max': (0.3,),
    'lerp': (Y, 0.3), 'addcmul': (Y, P), 'addcdiv': (Y, P), 'masked_fill': (M, 0.5), 'cumsum': (1,), 'cumprod': (1,),
    'index_add': (1, J, Y[:, :2]), 'index_copy': (1, J, Y[:, :2]), 'index_fill': (1, J, 0.5), 'scatter': (1, I, Y),
    'scatter_add': (1, I, Y), 'addmm': (Y, np.ones((4, 4), np.float32)),
    **dict.fromkeys(('arctan2', 'atan2', 'copysign', 'greater', 'greater_equal', 'heaviside', 'less', 'less_equal',
                     'not_equal'), (Y,)),
    **dict.fromkeys(('bitwise_and', 'bitwise_left_shift', 'bitwise_or', 'bitwise_right_shift', 'bitwise_xor'),
                    (I[::-1].copy(),)),
    'addbmm': (np.stack([X, Y]), np.ones((2, 4, 4), np.float32)), 'addr': (X[:, 0].copy(), V), 'masked_scatter': (M, Y),
    'ldexp': (np.full((3, 4), 2, np.int32),), 'scatter_reduce': (1, I, Y, 'sum'), 'addmv': (X.T.copy(), X[:, 0].copy()),
    'baddbmm': (np.ones((3, 4, 2), np.float32), np.ones((3, 2, 4), np.float32))}
# what changes, if not P
CHANGED = {'addmv': V, 'baddbmm': X[:, None].repeat(4, 1), 'bitwise_not': I,
           **{name: I for name in ARGUMENTS if name.startswith('bitwise')}}


@on_a_cpu
@each_kind
@pytest.mark.parametrize('name', IN_PLACE)
def test_a_method_in_place_changes_the_array_and_its_views(make, name):
    given = ARGUMENTS.get(name, ())
    start = CHANGED.get(name, P)
    x, want = make(start), torch.from_numpy(start.copy())
    row, same = x[0], x
    result = getattr(x, f'{name}_')(*(make(a) if isinstance(a, np.ndarray) else a for a in given))
    theirs = [torch.from_numpy(a.astype(np.int64) if a.dtype == np.int32 else a) if isinstance(a,
        np.ndarray) else a for a in given]
    if name == 'float_power':
        want = want ** 2                        # a float32 tensor cannot hold the float64 result in PyTorch
    else:
        getattr(want, f'{name}_')(*theirs)
    assert result is same and x.dtype == start.dtype
    near(x, want, 1e-5)
    near(row, want[0], 1e-5)


@each_kind
def test_fill_zero_and_copy_keep_the_memory_and_the_dtype(make):
    x, i, m = make(X), make(I), make(M)
    views = x[1:], i[0], m[0]
    assert x.fill_(2) is x and views[0].tolist() == [[2.0] * 4] * 2 and x.zero_() is x and views[0].tolist() == [[0.0] * 4] * 2
    x.copy_(V)
    assert views[0].tolist() == [V.tolist()] * 2
    i.copy_([[1.9, -1.9, 0, 3]])
    assert i.dtype == np.int32 and views[1].tolist() == [1, -1, 0, 3]
    m.copy_([0.0, 2.0, 0.0, 0.5])
    assert m.numpy().dtype == bool and m[0].tolist() == [False, True, False, True]
    m.logical_not_()
    assert m.numpy().dtype == bool and m[0].tolist() == [True, False, True, False]


def test_a_leaf_that_requires_a_gradient_changes_in_place_only_within_no_grad():
    w = Tensor([1.0, 2.0], requires_grad=True)
    for change in (lambda: w.add_(1), lambda: w.zero_(), lambda: w.copy_([1, 2]), lambda: w.normal_(), lambda: w.clamp_(0, 1)):
        with pytest.raises(RuntimeError, match='in-place change of a leaf'):
            change()
    with no_grad():
        w.add_(1).mul_(2)
    w.data.fill_(3)
    assert w.tolist() == [3.0, 3.0] and w.is_leaf and w.requires_grad
    (w * 2).sum().backward()
    w.grad.zero_()
    assert w.grad.tolist() == [0.0, 0.0]


def test_a_change_in_place_of_a_result_is_recorded():
    ours, theirs = Tensor(X, requires_grad=True), torch.tensor(X, requires_grad=True)
    gradients = []
    for x, other in ((ours, Tensor(Y)), (theirs, torch.tensor(Y))):
        y = x * 2
        y.mul_(x).add_(other, alpha=0.5).clamp_(max=3).exp_()
        z = other.clone() if hasattr(other, 'clone') else other
        z.copy_(y)                                          # a constant that becomes a result
        z.sub_(x)
        (z * y).sum().backward()
        gradients.append(x.grad)
    near(gradients[0], gradients[1], 1e-5)
    y = ours * 2
    square = y * y
    y.add_(1)                                               # does not change what the product saved
    assert pyops.grad(square.sum(), ours)[0].allclose(8 * X)


def test_random_numbers_in_place():
    x = pyops.zeros(10000)
    assert x.normal_(2, 3) is x and abs(x.mean().item() - 2) < 0.2 and abs(x.std().item() - 3) < 0.2
    x.uniform_(-1, 1)
    assert x.min().item() < -0.9 and x.max().item() > 0.9 and abs(x.mean().item()) < 0.1
    assert abs(x.bernoulli_(0.3).mean().item() - 0.3) < 0.05 and x.unique().tolist() == [0.0, 1.0]
    assert x.random_(3, 6).unique().tolist() == [3.0, 4.0, 5.0]
    one, other = (pyops.zeros(5).normal_(generator=np.random.default_rng(1)) for _ in range(2))
    assert one.equal(other)


# ---- functions -------------------------------------------------------------------------------------------------------

def test_every_function_of_the_table_is_found_in_its_modules():
    for name in names.METHODS:
        assert callable(getattr(NDArray, name)) and callable(getattr(Tensor, name)), name
        for module in (pyops, F, ndarray):
            assert callable(getattr(module, name)), (module.__name__, name)
    assert all(hasattr(pyops, name) for name in names.FUNCTIONAL) and all(hasattr(ndarray, name) for name in names.NUMPYS)
    assert all(hasattr(module, name) for name in names.ALIASES for module in (F, ndarray))
    for module in (pyops, F, ndarray):
        with pytest.raises(AttributeError, match='no attribute'):
            _ = module.no_such_function


def test_a_function_calls_the_method_of_its_first_argument():
    assert pyops.add(Tensor([1.0]), 2, alpha=3).tolist() == [7.0] and F.pow(input=[2.0], exponent=3).tolist() == [8.0]
    assert ndarray.exp([0.0, 1.0]).allclose([1, math.e]) and isinstance(ndarray.add(np.ones(2), 1), NDArray)
    assert isinstance(ndarray.multiply(Tensor([1.0]), 2), Tensor) and F.summation(X, axes=(1,)).allclose(X.sum(1))
    assert F.transpose(X).equal(X.T) and F.transpose(X, axes=(0, 1)).equal(X.T)
    assert pyops.mm(X, W).allclose(X @ W, atol=1e-5) and F.negate(X).allclose(-X) and ndarray.sum(X, axis=0).allclose(X.sum(0))
    assert ndarray.sort(array(X), axis=0).allclose(np.sort(X, 0)) and pyops.sort(X, dim=0)[0].allclose(np.sort(X, 0))
    assert pyops.add.__doc__ == F.add.__doc__ and 'x + alpha' in F.add.__doc__
    with pytest.raises(TypeError, match='add: expected an array as its first argument, got none'):
        pyops.add()


@pytest.mark.parametrize('of', [
    lambda T, x, v: T.hstack([x, x]), lambda T, x, v: T.max(x, -x), lambda T, x, v: T.min(x, v), lambda T, x, v: x.max(-x),
    lambda T, x, v: x.min(v), lambda T, x, v: T.hstack([v, v]), lambda T, x, v: T.vstack([v, x]),
    lambda T, x, v: T.column_stack([v, v]), lambda T, x, v: T.meshgrid(v, v[:2], indexing='ij')[1],
    lambda T, x, v: T.meshgrid([v, v[:2]], indexing='xy')[0], lambda T, x, v: T.var_mean(x, dim=1)[0],
    lambda T, x, v: T.var_mean(x)[1], lambda T, x, v: T.nonzero(x > 0), lambda T, x, v: T.nonzero(x > 0, as_tuple=True)[1],
    lambda T, x, v: T.median(x), lambda T, x, v: T.tensordot(x, x.T, 1),
    lambda T, x, v: T.tensordot(x, x, dims=([0, 1], [0, 1])), lambda T, x, v: T.tensordot(x, x, ([-1], [1])),
    lambda T, x, v: T.median(x, dim=1)[0], lambda T, x, v: T.median(x, 0, keepdim=True)[1],
    lambda T, x, v: T.einsum('ij,kj->ik', [x, x]), lambda T, x, v: T.concat([x, x], dim=1), lambda T, x, v: T.std(x, 0)])
def test_functions_of_several_arrays_equal_pytorchs(of):
    near(of(pyops, Tensor(X), Tensor(V)), of(torch, torch.tensor(X), torch.tensor(V)))


def test_every_axis_may_be_called_dim():
    """Call each function and method that has an axis with axis= and with dim=."""
    more = {'gather': dict(index=np.zeros((1, 4), np.int32)), 'index_select': dict(index=J),
        **dict.fromkeys(('take_along_axis', 'take_along_dim'), dict(indices=I[:1])),
            'take': dict(indices=J), 'topk': dict(k=2), 'kthvalue': dict(k=2),
            'quantile': dict(q=0.5), 'repeat': dict(repeats=2), 'repeat_interleave': dict(repeats=2),
            'roll': dict(shift=1), 'split': dict(sizes=1), 'chunk': dict(chunks=2), 'select': dict(index=1),
            'narrow': dict(start=0, length=1), 'unfold': dict(size=1, step=1), 'tensor_split': dict(sections=2),
            'unflatten': dict(sizes=(3, 1)), 'scatter': dict(index=I, src=1.0), 'scatter_add': dict(index=I, src=Y[:2]),
            'index_add': dict(index=J, source=Y[:2]), 'index_copy': dict(index=J, source=Y[:2]),
            'index_fill': dict(index=J, value=1.0),
            'cross': dict(other=X), 'split_with_sizes': dict(sizes=(1, 2)), 'compress': dict(condition=[1, 0, 1]),
            'scatter_reduce': dict(index=I, src=Y[:2], reduce='sum'), 'select_scatter': dict(src=V, index=1),
            'slice_scatter': dict(src=Y),
            'dilate': dict(dilation=1), 'undilate': dict(dilation=1), 'cosine_similarity': dict(b=Y)}
    for name in ('concatenate', 'cat', 'concat', 'stack'):
        more[name] = {}
    count = 0
    for owner, make in ((NDArray, array), (Tensor, Tensor), (F, Tensor), (ndarray, array)):
        for name, function in inspect.getmembers(owner, callable):
            imported = inspect.ismodule(owner) and function.__module__ != owner.__name__
            if imported or name.startswith('_') or name in ('softmax_gradient', 'gumbel_softmax'):  # the second is random
                continue
            if 'axis' not in inspect.signature(function).parameters:
                continue
            x = make(X[:{'squeeze': 1, 'glu': 2}.get(name, 3)])
            first = [x, x] if name in ('concatenate', 'cat', 'concat', 'stack') else x
            if name == 'gumbel_softmax':            # random, so each call gets the same numbers
                function = functools.partial(lambda x, **axis: F.gumbel_softmax(x, generator=np.random.default_rng(0), **axis))
            one, other = (function(first, **{axis: 0}, **more.get(name.rstrip('_'), {}))
                          for axis in ('axis', 'dim'))
            for a, b in zip(one if isinstance(one, tuple) else (one,), other if isinstance(other, tuple) else (other,),
                strict=True):
                np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=name)
            count += 1
    assert count > 100


def test_new_tensors_take_pytorchs_arguments():
    assert pyops.zeros(size=(2, 3)).shape == pyops.ones(shape=[2, 3]).shape == pyops.rand(size=(2, 3)).shape == (2, 3)
    assert pyops.full((2,), fill_value=3.0).tolist() == pyops.full(size=(2,), fill_value=3.0).tolist() == [3.0, 3.0]
    assert ndarray.full((2,), fill_value=3).tolist() == [3, 3] and ndarray.arange(start=1, end=3).tolist() == [1, 2]
    assert pyops.arange(start=1, end=4).tolist() == [1, 2, 3] and pyops.arange(2).tolist() == [0, 1]
    assert pyops.linspace(start=0, end=1, steps=3).tolist() == [0.0, 0.5, 1.0]
    assert pyops.logspace(0, 2, 3).tolist() == [1.0, 10.0, 100.0]
    assert pyops.randint(5, (2, 3)).shape == pyops.randint(low=0, high=5, size=(2, 3)).shape == (2, 3)
    assert pyops.randint(3, 5, (100,)).unique().tolist() == [3, 4] and pyops.randint_like(Tensor(X), 5).shape == (3, 4)
    assert pyops.full_like(input=Tensor(X), fill_value=2).equal(np.full((3, 4), 2))
    assert pyops.empty_like(Tensor(I)).dtype == np.int32
    memory = np.zeros(3, np.float32)
    pyops.from_numpy(memory).fill_(1)
    assert memory.tolist() == [1.0] * 3
    x = Tensor(X)
    assert pyops.as_tensor(x) is x and pyops.as_tensor([1, 2]).dtype == np.int32
    assert pyops.as_tensor(x, dtype='int32').dtype == np.int32
    with pytest.raises(TypeError, match='got sizes and also size'):
        pyops.zeros(2, size=(3,))
    assert set(creation.__dict__) >= {'empty_like', 'normal'}


def test_draws_follow_their_distributions():
    pyops.manual_seed(3)
    one = pyops.normal(1.0, 2.0, (20000,))
    pyops.manual_seed(3)
    assert one.equal(pyops.normal(1.0, 2.0, size=(20000,))) and abs(one.mean().item() - 1) < 0.1
    assert abs(one.std().item() - 2) < 0.1
    pyops.manual_seed(0)
    assert pyops.normal(Tensor(X), pyops.ones(4)).shape == (3, 4)
    chances = Tensor([0.0, 0.25, 1.0]).expand(4000, 3)
    np.testing.assert_allclose(pyops.bernoulli(chances).mean(0).numpy(), [0, 0.25, 1], atol=0.03)
    drawn = pyops.multinomial([1.0, 0.0, 3.0], 4000, replacement=True)
    assert drawn.unique().tolist() == [0, 2] and abs((drawn == 2).mean().item() - 0.75) < 0.03
    rows = pyops.multinomial(Tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]]), 2)
    assert rows.dtype == np.int32 and rows.sort().tolist() == [[0, 1], [1, 2]]
    with pytest.raises(ValueError, match='multinomial: expected weights'):
        pyops.multinomial([1.0, 0.0], 2)
