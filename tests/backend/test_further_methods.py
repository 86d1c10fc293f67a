"""Rules of pyops/further_methods.py and pyops/linalg.py; tests/nn/test_sweep.py compares their results with PyTorch's."""
import numpy as np
import pytest

import pyops
from pyops import functional as F
from pyops.autograd import Tensor
from pyops.ndarray import array

X = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
M = X > 0
pytestmark = pytest.mark.skipif(not pyops.default_device().is_host, reason='float64 and numpy are on the CPU: run it with '
                                '--on cpu')


def test_inverses_and_determinants_have_second_derivatives():
    rng = np.random.default_rng(5)
    a, b = (Tensor(rng.standard_normal(shape), requires_grad=True, dtype='float64') for shape in ((2, 3, 3), (2, 3, 2)))
    for f in (pyops.inverse, pyops.det, lambda a: pyops.linalg.slogdet(a)[1], lambda a: a.matrix_power(-2)):
        assert pyops.autograd.gradcheck(f, a) and pyops.autograd.gradgradcheck(f, a)
    assert pyops.autograd.gradgradcheck(pyops.linalg.solve, (a, b))
    singular = pyops.zeros(2, 2)
    assert singular.det().item() == 0 and singular.slogdet()[1].item() == -np.inf
    for call in (singular.inverse, lambda: singular.requires_grad_().det()):
        with pytest.raises(np.linalg.LinAlgError, match='Singular matrix'):
            call()
    assert type(array(X[:, :3]).inverse()) is type(array(X)) and array(X[:, :3]).det().shape == ()
    for name in ('cholesky', 'qr', 'svd', 'eigh', 'pinv', 'matrix_rank'):
        with pytest.raises(TypeError, match=f'linalg.{name}: expected Tensors that require no gradient'):
            getattr(pyops.linalg, name)(Tensor(np.eye(3), requires_grad=True))
    with pytest.raises(ValueError, match="matrix_norm: ord: expected 'fro', 1, -1, inf or -inf, got 'nuc'"):
        pyops.linalg.norm(Tensor(np.eye(3)), 'nuc')
    q, r = pyops.linalg.qr(Tensor(X))
    u, values, v = pyops.linalg.svd(Tensor(X), full_matrices=False)
    np.testing.assert_allclose((q @ r).numpy(), X, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose((u * values @ v).numpy(), X, rtol=1e-5, atol=1e-5)
    assert pyops.linalg.matrix_norm(Tensor(X), -1, keepdim=True).shape == (1, 1)
    np.testing.assert_allclose(pyops.linalg.matrix_norm(Tensor(X), -1).numpy(), np.linalg.norm(X, -1), rtol=1e-5, atol=1e-5)
    upper = np.triu(X[:, :3]) + 3 * np.eye(3, dtype=np.float32)
    solved = pyops.linalg.solve_triangular(Tensor(upper), Tensor(X[:, :3]), upper=True, left=False)
    np.testing.assert_allclose(solved.numpy() @ upper, X[:, :3], rtol=1e-5, atol=1e-5)


def test_the_shape_of_a_tensor_changes_in_place():
    x = Tensor(X)
    view = x[0]
    assert x.unsqueeze_(0) is x and x.shape == (1, 3, 4) and view.shape == (4,)
    assert x.squeeze_(0).t_().shape == (4, 3) and x.transpose_(0, 1).equal(Tensor(X))
    leaf = Tensor(X, requires_grad=True)
    y = leaf * 2
    y.unsqueeze_(1).transpose_(0, 2).sum().backward()
    assert y.shape == (4, 1, 3) and leaf.grad.equal(pyops.full((3, 4), 2.0))
    with pytest.raises(RuntimeError, match='in-place change of a leaf'):
        leaf.t_()
    with pyops.no_grad():
        assert leaf.t_().shape == (4, 3) and leaf.requires_grad


def test_further_draws_and_facts():
    pyops.seed(1)
    x = pyops.zeros(20000)
    assert abs(x.exponential_(2.0).mean().item() - 0.5) < 0.02 and x.numpy().min() >= 0
    assert abs(x.geometric_(0.25).mean().item() - 4) < 0.15 and x.numpy().min() == 1
    assert abs(x.log_normal_(0.5, 0.1).log().mean().item() - 0.5) < 0.01
    assert abs(pyops.full((20000,), 0.3).bernoulli().mean().item() - 0.3) < 0.02
    y = Tensor(X)
    assert y.get_device() == (1 if y.is_cuda else 0) - 1 and not y.is_complex() and pyops.is_tensor(y)
    assert y.data_ptr() == y.array.location() and y.tobytes() == X.tobytes() and pyops.scalar_tensor(2.5).item() == 2.5
    assert pyops.broadcast_shapes((3, 1), 4) == (3, 4) and Tensor(M).tobytes() == M.tobytes()
    for call, error, text in (
            (lambda: y.cross(y), ValueError, 'cross: expected 3 elements along axis -1'),
            (lambda: y.scatter_reduce(0, [[0]], 1.0, 'max'), ValueError, "scatter_reduce: reduce: expected 'sum'"),
            (lambda: y[0].fill_diagonal_(1), ValueError, 'fill_diagonal_: expected a matrix'),
            (lambda: F.searchsorted(y, Tensor([1.0])), ValueError, 'searchsorted: expected values'),
            (lambda: pyops.broadcast_tensors(y, pyops.ones(3)), ValueError, 'could not be broadcast')):
        with pytest.raises(error, match=text):
            call()
    tall = pyops.zeros(5, 2).fill_diagonal_(1, wrap=True)
    assert tall.tolist() == [[1, 0], [0, 1], [0, 0], [1, 0], [0, 1]]
