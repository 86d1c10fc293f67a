"""Gradients against central differences: every op of the table, what a wrong gradient looks like, the command."""
import json
import subprocess
import sys

import numpy as np
import pytest
from arrays import close, near, normal, same
from conftest import ROOT

import pyops
from pyops import autograd, nn, ops
from pyops import functional as F
from pyops.__main__ import main
from pyops.autograd import Tensor, apply, grad
from pyops.differences import Row, check_op, every_op, find_op
from pyops.ops.array import ArrayOp
from pyops.ops.reductions import Sum


def inputs(*shapes):
    rng = np.random.default_rng(0)
    return [normal(rng, *shape) for shape in shapes]


class WrongSquare(ArrayOp):
    """Its gradient lacks the factor 2."""

    def forward(x):
        return x * x, (x,)

    def backward(dy, ctx):
        x, = ctx
        return dy * x

    def reference(x):
        return x * x


@pytest.mark.parametrize('op', every_op(), ids=lambda op: op.__name__)
def test_every_op_agrees_with_differences_of_its_formula(op):
    report = check_op(op)
    assert report.ok, f'\n{report}'
    assert any(row.name.startswith('d ') and row.want for row in report.rows), 'no gradient, or all of them 0'


def test_every_op_of_the_package_has_a_reference_and_an_example():
    array_ops, todo = [], [ArrayOp]
    while todo:
        todo += (below := todo.pop().__subclasses__())
        # ops/double.py has kernel ops in float64: tests/autograd/test_double.py compares them with PyTorch; the ops of
        # Functions and of hooks have no formula of their own
        array_ops += [op for op in below if op.__module__.startswith('pyops.')
                      and op.__module__ not in ('pyops.ops.double', 'pyops.autograd.function', 'pyops.nn.module')]
    kernel_ops = [getattr(ops, name) for name in ops.__all__ if isinstance(getattr(ops, name), type)]
    assert len(array_ops) > 30 and len(kernel_ops) > 10
    assert set(array_ops + kernel_ops) == set(every_op())
    assert [op.__name__ for op in every_op() if not (hasattr(op, 'reference') and hasattr(op, 'example'))] == []


def test_a_wrong_gradient_is_found_and_shown():
    report = pyops.gradcheck(lambda x, y: apply(WrongSquare, x) + y, dict(x=inputs((2, 3))[0], y=inputs((3,))[0]))
    assert not report.ok and not report and [row.ok for row in report.rows] == [True, False, True]
    worst = report.rows[1]
    x = inputs((2, 3))[0]
    assert worst.name == 'd x' and abs(worst.want / worst.got - 2) < 1e-4 and x.shape == worst.shape
    assert 'WRONG: above 2e-05' in str(report) and str(list(worst.at)) in str(report)


def test_the_upstream_gradient_is_not_the_input():
    """Numbers of the same seed would be: with dy = x, the gradient of a layer that normalises x is 0."""
    x = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    row = pyops.gradcheck(lambda x: x * 1.0, x).rows[1]
    assert abs(row.want - x[row.at]) > 1e-3


def test_a_failing_row_of_the_table_of_ops_names_the_array_and_its_worst_element():
    got, want = np.zeros((2, 3), np.float32), np.zeros((2, 3))
    got[1, 2], got[0, 1], want[0, 0] = 4, 1, 1
    with pytest.raises(AssertionError, match=r'd weight: at \[1, 2\] got 4, expected 0: error 4.00e\+00, tolerance 2e-05 '):
        close(got, want, name='d weight')
    with pytest.raises(AssertionError, match=r'd weight: at \[1, 2\] got 4, expected 0: error 4.00e\+00, tolerance 1e-01'):
        near(got, want, 0.1, 'd weight')
    with pytest.raises(AssertionError, match=r'd weight: 3 of 6 elements differ; at \[1, 2\] got 4, expected 0, tolerance 0'):
        same(got, want, 'd weight')
    got[0, 2] = np.nan
    for check in close, same:
        with pytest.raises(AssertionError, match=r'y: .*at \[0, 2\] got nan, expected 0'):
            check(got, want, name='y')
    with pytest.raises(AssertionError, match=r'y: shape \(2, 3\), expected \(3, 2\)'):
        close(got, want.T, name='y')


def test_a_wrong_value_and_one_that_is_not_finite_are_found():
    class WrongSum(ArrayOp):
        def forward(x):
            return x.sum() * 1.01, (x.shape,)

        def backward(dy, ctx):
            return dy.broadcast_to(ctx[0])

        def reference(x):
            return x.sum()
    report = pyops.gradcheck(lambda x: apply(WrongSum, x), inputs((4,)))
    assert [row.ok for row in report.rows] == [False, True]
    assert not Row.of('y', np.array([np.nan]), np.array([1.0]), 1.0).ok
    assert Row.of('y', np.zeros(0), np.zeros(0), 1.0).ok


def test_a_function_may_use_layers_constants_comparisons_and_give_several_results():
    constant = Tensor(inputs((3,))[0])

    def f(x, w, b):
        h = F.relu(F.linear(x, w, b))
        h[0] = h[1] * 2                         # of a result: x itself stays as it is
        y = F.layer_norm(h, b.shape, b, b) * (x > 0).sum() + constant + np.float32([1, 2, 3])
        return F.logsumexp(y, 0), F.cross_entropy(y, [0, 2, -100, 1])
    report = pyops.gradcheck(f, dict(zip('xwb', inputs((4, 5), (3, 5), (3,)), strict=True)), tolerance=1e-4)
    assert report.ok, f'\n{report}'
    assert [row.name for row in report.rows] == ['y0', 'y1', 'd x', 'd w', 'd b']


def test_a_function_may_use_every_method_of_arrays():
    def f(x, y):
        values, order = F.topk(x, 2)
        chosen = F.where((x > 0).any(0) & ~(y > 5).all(0), x, x * x)
        z = F.sort(x, 0, descending=True)[0] * x.sign() + chosen + y.round(1).contiguous()
        z = z + x.clip(-1, 1) + x.cumsum(1) + x % 0.7 + x[[0, 2, 0, 1]] + x[x > -9].reshape(x.shape) + (x // 0.5) * y
        w = x * 1
        w[[0, 1], [1, 2]] = y[0, 0]
        return (z, values * order, F.einsum('ij,kj->ik', x, y), x.prod(1), x.var(0), x.norm(), w, F.tile(x, (1, 2)),
                x.argmax(1) * x.sum())
    report = pyops.gradcheck(f, inputs((4, 3), (4, 3)))
    assert report.ok, f'\n{report}'


def test_int32_inputs_are_constants_and_others_are_not_touched():
    x, ids = inputs((4, 3))[0], np.array([0, 2, 2], np.int32)
    before = x.copy()
    report = pyops.gradcheck(lambda ids, x: x[ids] * x[ids], [ids, x])
    assert report.ok and [row.name for row in report.rows] == ['y', 'd input 1'] and (x == before).all()
    with pytest.raises(ValueError, match='at least one input of floats'):
        pyops.gradcheck(lambda ids: ids, [ids])


def test_running_statistics_stay_as_they_are_during_differences():
    mean, var = Tensor(np.zeros(3)), Tensor(np.ones(3))
    x = Tensor(inputs((4, 3))[0])
    report = pyops.gradcheck(lambda x: F.batch_norm(x, mean, var, training=True) * x, x)
    assert report.ok, f'\n{report}'
    np.testing.assert_allclose(mean.numpy(), 0.1 * x.numpy().mean(0), rtol=1e-5)
    np.testing.assert_allclose(var.numpy(), 0.9 + 0.1 * x.numpy().var(0, ddof=1), rtol=1e-5)


def test_second_derivatives_are_checked_in_float32():
    def f(x, v):
        return grad(((x @ x.T).tanh() * v).sum(), x, create_graph=True)[0]
    report = pyops.gradcheck(f, inputs((3, 3), (3, 3)), float32=True)
    assert report.ok, f'\n{report}'
    with pytest.raises(RuntimeError, match='pass float32=True'):
        pyops.gradcheck(f, inputs((3, 3), (3, 3)))
    wrong = pyops.gradcheck(lambda x: apply(WrongSquare, x), inputs((4,)), float32=True)
    assert not wrong.ok


def test_an_op_without_a_formula_says_what_to_do():
    class Plain(ArrayOp):
        def forward(x):
            return x + 1.0, ()

        def backward(dy, ctx):
            return dy
    with pytest.raises(RuntimeError, match='Plain has no float64 formula: give the class a function `reference`'):
        pyops.gradcheck(lambda x: apply(Plain, x), inputs((2,)))
    assert pyops.gradcheck(lambda x: apply(Plain, x), inputs((2,)), float32=True).ok


def test_names_of_ops():
    for name in ('LayerNorm', 'layer_norm', 'layernorm', 'LAYER_NORM'):
        assert find_op(name) is ops.LayerNorm
    assert find_op('sum') is Sum and find_op('nothing') is None


# ---- python -m pyops gradcheck -----------------------------------------------------------------------------------------

def test_the_command_checks_all_ops_or_those_that_are_named(capsys):
    with pytest.raises(SystemExit) as left:
        main(['gradcheck', 'softmax', 'layer_norm'])
    out = capsys.readouterr().out
    assert left.value.code == 0 and out.splitlines()[0] == 'Softmax' and out.splitlines()[-1] == '2 ops right'
    assert 'd weight' in out and 'd Sum' not in out
    run = subprocess.run([sys.executable, '-m', 'pyops', 'gradcheck'], cwd=ROOT, text=True, capture_output=True)
    assert run.returncode == 0 and run.stdout.splitlines()[-1] == f'{len(every_op())} ops right' and not run.stderr


def test_the_command_fails_where_a_gradient_is_wrong(capsys, monkeypatch):
    monkeypatch.setattr(Sum, 'backward', lambda dy, ctx: dy.broadcast_to(ctx[0]) * 2)       # of keepdims=True

    with pytest.raises(SystemExit) as left:
        main(['gradcheck', 'sum', 'tanh'])
    out = capsys.readouterr().out
    assert left.value.code == 1 and 'WRONG' in out and out.splitlines()[-1] == '1 of 2 ops wrong: Sum'


def graded(capsys, *arguments):
    """-> exit status and the JSON document of `python -m pyops gradcheck --json`."""
    with pytest.raises(SystemExit) as left:
        main(['gradcheck', '--json', *arguments])
    return left.value.code, json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def test_the_json_of_the_command_grades_each_op(capsys, monkeypatch):
    status, found = graded(capsys, 'layer_norm', 'sum')
    assert status == 0 and found['passed'] and [op['op'] for op in found['ops']] == ['LayerNorm', 'Sum']
    assert [(array['name'], array['shape']) for array in found['ops'][0]['arrays']] == [
        ('y', [4, 6]), ('d x', [4, 6]), ('d weight', [6]), ('d bias', [6])]
    assert all(array['passed'] and array['error'] < op['tolerance'] for op in found['ops'] for array in op['arrays'])
    monkeypatch.setattr(Sum, 'backward', lambda dy, ctx: dy.broadcast_to(ctx[0]) * float('nan'))
    status, found = graded(capsys, 'layer_norm', 'sum')
    assert status == 1 and not found['passed'] and [op['passed'] for op in found['ops']] == [True, False]
    values, gradient = found['ops'][1]['arrays']
    assert values['passed'] and not gradient['passed']
    assert gradient['analytic'] is gradient['error'] is None and isinstance(gradient['numeric'], float)


@pytest.mark.parametrize('subscripts', ['ij,jk->ik', 'bij,bkj->bik', 'ii->i', 'i,i', 'ij,j,ik->k', 'ijk->kj'])
def test_contractions_can_be_checked(subscripts):
    sizes = dict(b=2, i=3, j=4, k=2)
    shapes = [tuple(sizes[letter] for letter in letters) for letters in subscripts.partition('->')[0].split(',')]
    report = pyops.gradcheck(lambda *operands: pyops.einsum(subscripts, *operands), inputs(*shapes))
    assert report.ok and len(report.rows) == 1 + len(shapes), f'\n{report}'


@pytest.mark.parametrize('arguments', [['gradcheck', 'lineer'], ['nothing']])
def test_bad_arguments_of_the_command_end_with_one_line(arguments):
    run = subprocess.run([sys.executable, '-m', 'pyops', *arguments], cwd=ROOT, text=True, capture_output=True)
    assert run.returncode == 2 and not run.stdout and 'Traceback' not in run.stderr
    assert run.stderr.count('\n') == 1 and arguments[-1] in run.stderr
    assert ('; did you mean Linear?' in run.stderr) == (arguments[-1] == 'lineer')


@pytest.mark.parametrize('layer', [nn.ReLU, nn.SiLU, nn.GELU, nn.Tanh, nn.Sigmoid, lambda: nn.Linear(5, 3)])
def test_layers_that_name_their_ops_can_be_checked(layer):
    net = nn.Sequential(nn.Linear(4, 5), layer()).reset_parameters(0)
    report = pyops.gradcheck(net, inputs((3, 4)))
    assert report.ok, f'\n{report}'


# ---- PyTorch's functions -------------------------------------------------------------------------------------------------

class WrongCube(autograd.Function):
    """x^3, whose gradient lacks the factor 3."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x ** 3

    @staticmethod
    def backward(ctx, dy):
        x, = ctx.saved_tensors
        return dy * x * x


class WrongSecond(WrongCube):
    """x^3 with the right gradient, which has none itself."""

    @staticmethod
    def backward(ctx, dy):
        x, = ctx.saved_tensors
        return dy * (3 * x * x).detach()


def leaves(dtype, *shapes):
    return tuple(Tensor(x, requires_grad=True, dtype=dtype) for x in inputs(*shapes))


@pytest.mark.parametrize('dtype', ['float32', 'float64'])
def test_checks_with_the_arguments_of_torch(dtype):
    x, w = leaves(dtype, (3, 4), (2, 4))
    settings = dict(eps=1e-6, atol=1e-5, rtol=1e-3)
    assert autograd.gradcheck(lambda x, w: (x @ w.T).tanh(), (x, w), **settings, fast_mode=True) is True
    assert autograd.gradcheck(Tensor.exp, x) and autograd.gradgradcheck(Tensor.tanh, (x,), **settings)
    # arguments that require no gradient are constants, also numbers; so are results without one
    assert autograd.gradcheck(lambda x, n, c: (x * n, c, (x * 2).detach()), (x, 3, w.detach()), raise_exception=False)
    assert pyops.gradcheck(Tensor.tanh, [x], **settings)
    with pytest.raises(ValueError, match='expected a Tensor that requires a gradient'):
        autograd.gradcheck(Tensor.exp, x.detach())
    with pytest.raises(RuntimeError, match='depends on no input that requires a gradient'):
        autograd.gradcheck(lambda x: x.detach(), x)
    for check in (autograd.gradcheck, autograd.gradgradcheck):
        with pytest.raises(TypeError, match='rtoll: no such option, expected eps, atol, rtol, raise_exception'):
            check(Tensor.exp, x, rtoll=1)


def test_checks_find_wrong_gradients_of_functions():
    x, = leaves('float64', (4,))
    assert autograd.gradcheck(WrongSecond.apply, x)
    for check, wrong in ((autograd.gradcheck, WrongCube), (autograd.gradgradcheck, WrongSecond)):
        assert check(wrong.apply, (x,), raise_exception=False) is False
        with pytest.raises(RuntimeError, match='(?s)differs from central differences.*WRONG: above 1e-05 [+] 0.001 of'):
            check(wrong.apply, (x,))
    # the size of the error that is allowed
    assert autograd.gradcheck(WrongCube.apply, (x,), rtol=2.0) and autograd.gradcheck(WrongCube.apply, (x,), atol=1e3)
    x, = leaves('float32', (4,))
    assert not autograd.gradcheck(WrongCube.apply, (x,), float32=True, raise_exception=False)
    with pytest.raises(RuntimeError, match='gradcheck: a gradient differs'):
        pyops.gradcheck(lambda x: apply(WrongSquare, x), x, raise_exception=True)


def test_checks_agree_with_torch(torch):
    x, = leaves('float64', (2, 3))
    twin = torch.tensor(x.numpy(), requires_grad=True)
    for name in ('exp', 'sinh', 'sigmoid'):
        assert autograd.gradgradcheck(getattr(Tensor, name), x) == torch.autograd.gradgradcheck(getattr(torch, name), twin)
    got, want = np.array([1.0, 2.0, np.nan]), np.array([1.001, 2.2, 1.0])
    assert not Row.within('y', got, want, 1.0, 1.0).ok and Row.within('y', got[:2], want[:2], 0.0, 0.1).ok
    assert Row.within('y', got[:2], want[:2], 0.0, 0.01).at == (1,)
