"""Transformer layers whose last product adds its result to the residual, as on a GPU: --on emulated runs them there."""
import collections

import numpy as np
import pytest
from arrays import close
from places import ON_GPU

from pyops import nn
from pyops.autograd import Tensor, grad
from pyops.nn import attention
from pyops.plan import Plan

T, B, D = 5, 3, 8
on_a_gpu = pytest.mark.skipif(not ON_GPU, reason='the CPU computes each layer separately: run it with --on emulated')
RNG = np.random.default_rng(0)
X, MEMORY, DY = (RNG.standard_normal(shape).astype(np.float32) for shape in ((T, B, D), (4, B, D), (T, B, D)))
LAYERS = {'encoder': nn.TransformerEncoderLayer, 'decoder': nn.TransformerDecoderLayer}


def made(kind, **options):
    """Return a layer with dropout, and its inputs."""
    inputs = [Tensor(values if not options.get('batch_first') else values.swapaxes(0, 1).copy(), requires_grad=True)
              for values in (X, MEMORY)[:1 + (kind == 'decoder')]]
    layer = LAYERS[kind](D, 2, 12, 0.3, **options)
    layer.reset_parameters(7)
    return layer, inputs


def passes(kind, joins, monkeypatch, **options):
    """Return the result of a layer and all gradients, and its calls of kernels, {name: count}.   joins: whether residuals are
    added in the product"""
    with monkeypatch.context() as patch:
        patch.setattr(attention, '_joins', lambda *given: joins)
        layer, inputs = made(kind, **options)
        parameters = dict(layer.named_parameters())
        with Plan() as plan:
            y = layer(*inputs)
        y.backward(Tensor(DY if not options.get('batch_first') else DY.swapaxes(0, 1).copy()))
    results = {'y': y, **{f'd{i}': x.grad for i, x in enumerate(inputs)}, **{name: p.grad for name, p in parameters.items()}}
    return {name: x.numpy().copy() for name, x in results.items()}, collections.Counter(a.kernel for a in plan.actions)


@pytest.mark.parametrize('options', [{}, dict(norm_first=True), dict(batch_first=True), dict(bias=False, norm_first=True)],
                         ids=['post-norm', 'pre-norm', 'batch-first', 'without-bias'])
@pytest.mark.parametrize('kind', LAYERS)
def test_residuals_added_in_the_product_have_the_bits_of_separate_layers(kind, options, monkeypatch):
    (joined, calls), (separate, separate_calls) = (passes(kind, joins, monkeypatch, **options) for joins in (True, False))
    assert joined.keys() == separate.keys() and len(joined) >= 8
    for name, want in separate.items():
        if options.get('batch_first') and 'out_proj' in name:     # its gradients sum the rows in another order
            close(joined[name], want, 1e-5)
        else:
            assert np.array_equal(joined[name], want), name
    sublayers, op = 2 + (kind == 'decoder'), 'linear_residual' if options.get('norm_first') else 'linear_residual_norm'
    assert calls[op] == sublayers and not calls['residual'] and not separate_calls[op]
    assert separate_calls['residual'] == separate_calls['dropout'] - calls['dropout'] == sublayers
    assert calls.total() <= separate_calls.total() - 2 * sublayers


@pytest.mark.parametrize('norm_first', [False, True])
def test_residuals_added_in_the_product_have_second_derivatives(norm_first, monkeypatch):
    found = []
    for joins in (True, False):
        monkeypatch.setattr(attention, '_joins', lambda *given, joins=joins: joins)
        layer, (x,) = made('encoder', norm_first=norm_first)
        h = Tensor(X[::-1].copy(), requires_grad=True)

        def branch(n, last=None, layer=layer, h=h):
            return (last or layer.linear2)(h.sigmoid() @ layer.linear1.weight.T + n.sum())
        y = layer._add(x, branch, 2)
        first = grad((y * y * y).sum(), [x, h, layer.linear2.weight], create_graph=True)
        found.append([g.numpy() for g in grad(sum((g * g).sum() for g in first), [x, h, *layer.linear2.parameters()])])
    for got, want in zip(*found, strict=True):
        close(got, want, 1e-4)


@on_a_gpu
@pytest.mark.parametrize('change', ['nothing', 'hook', 'subclass', 'norm'])
def test_only_plain_layers_are_joined_on_a_gpu(change):
    class Own(nn.Linear):
        pass
    layer, (x,) = made('encoder')
    called = []
    if change == 'hook':
        layer.linear2.register_forward_hook(lambda module, inputs, y: called.append(y.shape))
    elif change == 'subclass':
        layer.linear2 = Own(12, D)
    elif change == 'norm':
        layer.norm2 = nn.LayerNorm(D, bias=False)
    layer.reset_parameters(7)
    with Plan() as plan:
        y = layer(x)
    calls = collections.Counter(action.kernel for action in plan.actions)
    assert y.shape == (T, B, D) and called == [(T, B, D)] * (change == 'hook')
    assert calls['linear_residual_norm'] == 1 + (change == 'nothing') and calls['residual'] == (change != 'nothing')
