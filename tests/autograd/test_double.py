"""Convolution, pooling and GELU of float64 Tensors: values, gradients and second derivatives are PyTorch's in float64.

The kernels add the terms of a sum in another order than PyTorch: results differ by the rounding of some hundred terms.
"""
import itertools

import numpy as np
import pytest
from arrays import RTOL as FLOAT32_RTOL
from arrays import close, same
from places import on_the_cpu

from pyops import backend
from pyops import functional as F
from pyops.autograd import Tensor, grad
from pyops.backend import HOST, library
from pyops.differences import STEP

pytestmark = on_the_cpu
RTOL = 1e-13            # some hundred terms, of which each is rounded by 2^-53
RNG = np.random.default_rng(0)


def draw(*shape):
    return RNG.standard_normal(shape)


# name: the function, and its arrays
CALLS = {
    'conv2d': (lambda F, x, w, b: F.conv2d(x, w, b), draw(2, 3, 6, 5), draw(4, 3, 3, 2), draw(4)),
    'conv2d-settings': (lambda F, x, w, b: F.conv2d(x, w, b, (2, 1), (1, 2), (1, 3), 2), draw(2, 4, 7, 8), draw(6, 2, 3, 2),
                        draw(6)),
    'conv2d-unread': (lambda F, x, w: F.conv2d(x, w, None, 3, 2), draw(1, 2, 5, 6), draw(3, 2, 2, 2)),
    'conv2d-same': (lambda F, x, w: F.conv2d(x, w, padding='same'), draw(2, 3, 5, 6), draw(2, 3, 2, 3)),
    'conv2d-depthwise': (lambda F, x, w: F.conv2d(x, w, groups=3, padding=1), draw(2, 3, 4, 5), draw(6, 1, 3, 3)),
    'conv2d-beyond': (lambda F, x, w: F.conv2d(x, w, padding=4), draw(1, 1, 2, 3), draw(1, 1, 3, 3)),
    'conv2d-narrow': (lambda F, x, w: F.conv2d(x, w, padding=(0, 1)), draw(2, 3, 4, 1), draw(2, 3, 2, 3)),
    'conv2d-image': (lambda F, x, w, b: F.conv2d(x, w, b, padding=1), draw(3, 6, 5), draw(4, 3, 3, 3), draw(4)),
    'conv2d-views': (lambda F, x, w: F.conv2d(x.permute(0, 3, 1, 2), w.transpose(0, 1)), draw(2, 5, 6, 3), draw(3, 4, 2, 2)),
    'conv1d': (lambda F, x, w, b: F.conv1d(x, w, b, 2, 1), draw(2, 3, 9), draw(4, 3, 3), draw(4)),
    'max_pool2d': (lambda F, x: F.max_pool2d(x, (3, 2), (2, 1), (1, 0), (1, 2)), draw(2, 3, 7, 6)),
    'max_pool2d-ceil': (lambda F, x: F.max_pool2d(x, 2, 3, 1, ceil_mode=True), draw(2, 3, 6, 7)),
    'max_pool1d': (lambda F, x: F.max_pool1d(x, 3, 2, 1), draw(2, 3, 10)),
    'avg_pool2d': (lambda F, x: F.avg_pool2d(x, (3, 2), (2, 1), (1, 0)), draw(2, 3, 7, 6)),
    'avg_pool2d-inside': (lambda F, x: F.avg_pool2d(x, 3, 2, 1, True, False), draw(3, 6, 7)),
    'avg_pool1d': (lambda F, x: F.avg_pool1d(x, 3, padding=1), draw(2, 3, 8)),
    'adaptive': (lambda F, x: F.adaptive_avg_pool2d(x, (4, 3)), draw(2, 3, 6, 4)),
    'gelu': (lambda F, x: F.gelu(x), np.concatenate([draw(40), [0.0, -9.0, 9.0, -30.0, 30.0]])),
    'gelu-tanh': (lambda F, x: F.gelu(x, approximate='tanh'), draw(3, 4)),
}


def double(x, requires_grad=True):
    return Tensor(x, dtype='float64', requires_grad=requires_grad)


@pytest.mark.parametrize('name', CALLS)
def test_values_and_both_derivatives_are_those_of_torch(torch, name):
    call, *arrays = CALLS[name]
    mine, twins = [double(x) for x in arrays], [torch.tensor(x, requires_grad=True) for x in arrays]
    y, want = call(F, *mine), call(torch.nn.functional, *twins)
    assert y.dtype == np.float64
    close(y.numpy(), want.detach().numpy(), RTOL)
    dy = draw(*y.shape)
    seed, twin_seed = double(dy), torch.tensor(dy, requires_grad=True)
    first = grad(y, mine, seed, create_graph=True)
    wanted = torch.autograd.grad(want, twins, twin_seed, create_graph=True)
    for g, w in zip(first, wanted, strict=True):
        assert g.dtype == np.float64
        close(g.numpy(), w.detach().numpy(), RTOL)
    v = [draw(*x.shape) for x in arrays]
    second = sum(((g * double(a, False)).sum() for g, a in zip(first, v, strict=True)), double(0.0, False))
    twin_second = sum((g * torch.tensor(a)).sum() for g, a in zip(wanted, v, strict=True))
    leaves, twin_leaves = [seed, *mine], [twin_seed, *twins]
    theirs = torch.autograd.grad(twin_second, twin_leaves, allow_unused=True)
    second.backward()
    for leaf, w in zip(leaves, theirs, strict=True):
        none = np.zeros(leaf.shape)             # where y is linear in one array, some of these derivatives are 0
        got, expected = (none if one is None else one.numpy() for one in (leaf.grad, w))
        if expected.any():
            close(got, expected, 10 * RTOL)
        else:
            same(got, expected)


@pytest.mark.parametrize('name', [name for name in CALLS if 'pool' in name or name == 'gelu'])
def test_results_of_kernels_that_do_not_add_replace_what_was_in_their_memory(name, monkeypatch):
    call, *arrays = CALLS[name]

    def results():
        xs = [double(x) for x in arrays]
        y = call(F, *xs)
        return [one.numpy() for one in (y, *grad((y * y).sum(), xs))]
    expected, run, filled = results(), HOST.launch, []

    def launch(kernel, *values):
        if kernel.startswith(('max_pool2d', 'avg_pool2d', 'normal_cdf')):
            for argument, value in zip(library.cpu().functions[f'pyops_{kernel}'].arguments, values, strict=False):
                if argument.pointer and not argument.const and value is not None:
                    value[...] = np.nan if argument.type == 'double' else 7
                    filled.append(value)
        run(kernel, *values)
    monkeypatch.setattr(HOST, 'launch', launch)
    for got, want in zip(results(), expected, strict=True):
        same(got, want)
    assert filled


def test_the_gradients_of_a_convolutional_network_equal_central_differences():
    images, labels = draw(3, 2, 8, 8), np.array([1, 0, 2])
    parameters = [0.5 * draw(*shape) for shape in ((4, 2, 3, 3), (4,), (4, 2, 3, 3), (4,), (3, 4), (3,))]

    def loss(*parameters):
        w1, b1, w2, b2, w3, b3 = parameters
        x = F.max_pool2d(F.gelu(F.conv2d(double(images, False), w1, b1, padding=1)), 2)
        x = F.gelu(F.conv2d(x, w2, b2, stride=2, padding=1, groups=2)) + F.avg_pool2d(x, 2)
        return F.cross_entropy(F.linear(x.mean((2, 3)), w3, b3), labels)

    leaves = [double(p) for p in parameters]
    loss(*leaves).backward()
    for leaf in leaves:
        direction = draw(*leaf.shape)
        ends = [loss(*(double(one.numpy() + sign * STEP * direction, False) if one is leaf else one.detach() for one in leaves))
                for sign in (1, -1)]
        slope = (ends[0].item() - ends[1].item()) / (2 * STEP)
        # the rest of the series is about STEP^2, the rounding of the losses about 2^-52 / STEP
        assert abs(slope - (leaf.grad.numpy() * direction).sum()) <= 1e-8 * max(1, abs(slope))


def test_nan_is_a_maximum_and_the_first_of_equal_maxima_gets_the_gradient():
    x = np.array([[[[1.0, 2.0, 2.0, 0.0], [2.0, 1.0, np.nan, 2.0]]]])
    mine = double(x)
    y = F.max_pool2d(mine, 2)
    y.backward(double([[[[3.0, 5.0]]]], False))
    assert y.numpy()[0, 0, 0, 0] == 2 and np.isnan(y.numpy()[0, 0, 0, 1])
    assert mine.grad.tolist() == [[[[0, 3, 0, 0], [0, 0, 5, 0]]]]


def test_large_sizes_have_the_same_bits_on_any_number_of_threads():
    x, w, pooled = draw(8, 8, 32, 32), draw(16, 8, 3, 3), draw(4, 40, 48, 48)      # above the bounds of sharing

    def results():
        leaves = [double(one) for one in (x, w, pooled)]
        ys = [F.conv2d(*leaves[:2], padding=1), F.max_pool2d(leaves[2], 2), F.avg_pool2d(leaves[2], 3, 2), F.gelu(leaves[2])]
        for y in ys:
            (y * y).sum().backward()
        return [one.numpy() for one in (*ys, *(leaf.grad for leaf in leaves))]

    before, found = backend.threads(), []
    try:
        for threads in (1, 2, 3):
            backend.set_threads(threads)
            found.append(results())
    finally:
        backend.set_threads(before)
    for one, other in itertools.product(found[:1], found[1:]):
        for a, b in zip(one, other, strict=True):
            same(b, a)


@pytest.mark.parametrize(('call', 'text'), [
    (lambda: F.conv2d(double(draw(2, 3, 4, 4)), double(draw(4, 2, 3, 3))), r'x: expected shape \(2, 2, 4, 4\), got \(2, 3'),
    (lambda: F.conv2d(double(draw(2, 3, 4)), double(draw(4, 3, 3))), r'weight: expected shape \(O, C, kh, kw\), got \(4'),
    (lambda: F.conv2d(double(draw(2, 2, 4, 4)), double(draw(3, 1, 3, 3)), groups=2), 'groups: expected a divisor of the 3'),
    (lambda: F.conv2d(double(draw(2, 3, 2, 2)), double(draw(4, 3, 3, 3))), 'a window of .* does not fit into'),
    (lambda: F.max_pool2d(double(draw(2, 3)), 2), r'x: expected shape \(N, C, H, W\), got \(2, 3\)'),
    (lambda: F.avg_pool2d(double(draw(2, 3, 4, 4)), 5), 'a window of .* does not fit into'),
])
def test_sizes_that_do_not_fit_are_refused(call, text):
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize(('shape', 'weight', 'settings'), [
    ((1, 3, 4, 9000), (2, 3, 3, 3), dict(padding=1)),                           # blocks of columns, the last one shorter
    ((2, 3, 140, 160), (4, 3, 3, 5), dict(padding=(1, 2), stride=(2, 1))),      # blocks of rows
    ((1, 2, 90, 400), (2, 1, 3, 3), dict(padding=3, dilation=3, groups=2)),
    ((35, 2, 5, 7), (3, 2, 3, 3), dict(padding=1)),                             # narrow: the batch as rows of vectors
    ((70, 3, 4, 8), (6, 1, 2, 4), dict(stride=2, padding=1, groups=3)),
    ((80, 32, 4, 8), (48, 8, 3, 3), dict(padding=1, groups=4))])                # shared by threads
def test_a_convolution_in_several_blocks_in_float32_has_the_gradients_of_float64(shape, weight, settings):
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(size) for size in (shape, weight, weight[:1])]
    dy = rng.standard_normal(F.conv2d(*map(Tensor, arrays), **settings).shape)

    def results(dtype):
        tensors = [Tensor(array.astype(dtype), requires_grad=True) for array in arrays]
        y = F.conv2d(*tensors, **settings)
        y.backward(Tensor(dy.astype(dtype)))
        return [value.numpy() for value in (y, *(tensor.grad for tensor in tensors))]
    several = results(np.float32)
    threads = backend.threads()
    backend.set_threads(1)
    try:
        one = results(np.float32)
    finally:
        backend.set_threads(threads)
    for got, alone, want in zip(several, one, results(np.float64), strict=True):
        same(got, alone)
        close(got, want, FLOAT32_RTOL)
