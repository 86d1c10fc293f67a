"""Layers, functions and hooks that give PyTorch's values and gradients: volumes, positions of maxima, CTC, norms of weights."""
import numpy as np
import pytest
from arrays import alike, close

from pyops import functional as F
from pyops import nn
from pyops.autograd import Tensor
from pyops.plan import Plan

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def layers_alike(torch, make, *shapes):
    """Compare a layer of pyops and of PyTorch with the same weights: make(nn) returns it."""
    layer, twin = make(nn), make(torch.nn).double()
    state = twin.state_dict()
    assert list(layer.state_dict()) == [name for name in state if not name.endswith('num_batches_tracked')]
    layer.load_state_dict(state)
    alike(torch, layer, twin, *[normal(*shape) for shape in shapes])
    for one, other in zip(layer.parameters(), twin.parameters(), strict=True):
        close(one.grad.numpy(), other.grad.numpy())
    return layer


@pytest.mark.parametrize('settings', [
    dict(kernel_size=2), dict(kernel_size=(2, 3, 1), stride=(2, 1, 1), padding=(1, 0, 1), bias=False),
    dict(kernel_size=3, padding='same', dilation=(1, 2, 1)), dict(kernel_size=3, padding=1, stride=2, groups=2)], ids=str)
def test_convolutions_of_volumes(torch, settings):
    layer = layers_alike(torch, lambda nn: nn.Conv3d(4, 6, **settings), (2, 4, 5, 6, 5))
    assert layer(Tensor(normal(4, 5, 6, 5))).ndim == 4 and repr(layer).startswith('Conv3d(4, 6, kernel_size=(')


@pytest.mark.parametrize('settings', [
    dict(kernel_size=2), dict(kernel_size=3, stride=2, padding=1),
    dict(kernel_size=(2, 3, 2), stride=(1, 2, 2), ceil_mode=True)], ids=str)
def test_pools_of_volumes(torch, settings):
    layers_alike(torch, lambda nn: nn.MaxPool3d(**settings), (2, 3, 5, 6, 7))
    layers_alike(torch, lambda nn: nn.AvgPool3d(**settings), (2, 3, 5, 6, 7))
    layers_alike(torch, lambda nn: nn.AvgPool3d(count_include_pad=False, **settings), (3, 5, 6, 7))


@pytest.mark.parametrize('settings', [
    dict(kernel_size=2), dict(kernel_size=3, stride=2, padding=1), dict(kernel_size=(2, 3), stride=(2, 1), dilation=(1, 2)),
    dict(kernel_size=3, stride=2, ceil_mode=True)], ids=str)
def test_positions_of_maxima(torch, settings):
    x = np.round(normal(2, 3, 9, 8))            # with equal maxima
    y, places = nn.MaxPool2d(return_indices=True, **settings)(Tensor(x))
    want, want_places = torch.nn.MaxPool2d(return_indices=True, **settings)(torch.tensor(x))
    assert (y.numpy() == want.numpy()).all() and (places.numpy() == want_places.numpy()).all()
    found = F.max_pool1d(Tensor(x[:, :, 0]), 3, 2, 1, return_indices=True)
    want = torch.nn.functional.max_pool1d(torch.tensor(x[:, :, 0]), 3, 2, 1, return_indices=True)
    for one, other in zip(found, want, strict=True):
        assert (one.numpy() == other.numpy()).all()
    with Plan(), pytest.raises(TypeError, match='return_indices: a plan cannot record the positions'):
        nn.MaxPool2d(2, return_indices=True)(Tensor(x))


def test_maxima_return_to_their_positions(torch):
    def run(nn, tensor):
        y, places = nn.MaxPool2d(2, 2, return_indices=True)(tensor)
        return nn.MaxUnpool2d(2, 2)(y, places, output_size=tensor.shape)

    def run_1d(nn, tensor):
        y, places = nn.MaxPool1d(3, return_indices=True)(tensor)
        return nn.MaxUnpool1d(3)(y, places)
    alike(torch, lambda x: run(nn, x), lambda x: run(torch.nn, x), normal(2, 3, 7, 6))
    alike(torch, lambda x: run_1d(nn, x), lambda x: run_1d(torch.nn, x), normal(2, 3, 9))
    with pytest.raises(ValueError, match='max_unpool2d: indices: expected positions below 4'):
        F.max_unpool2d(Tensor(normal(1, 1, 1, 1)), Tensor([[[[4]]]]), 2)


def test_norms_over_channels_and_other_divisors(torch):
    for size in (2, 3):
        layers_alike(torch, lambda nn, size=size: nn.LocalResponseNorm(size, alpha=0.5, k=2.0), (2, 5, 4, 3))
    layers_alike(torch, lambda nn: nn.AvgPool2d(2, padding=1, divisor_override=3), (2, 3, 5, 6))


@pytest.mark.parametrize('reduction', ['mean', 'sum', 'none'])
@pytest.mark.parametrize('flat', [False, True])
def test_connectionist_temporal_classification(torch, reduction, flat):
    T, N, C, blank = 9, 4, 5, 2
    targets = np.array([[0, 0, 1], [3, 4, 4], [1, 0, 0], [3, 3, 3]])
    lengths, sizes = np.array([9, 8, 6, 7]), np.array([3, 2, 1, 0])
    given = np.concatenate([row[:n] for row, n in zip(targets, sizes, strict=True)]) if flat else targets
    ours, theirs = (one.CTCLoss(blank=blank, reduction=reduction) for one in (nn, torch.nn))
    alike(torch, lambda x: ours(F.log_softmax(x), Tensor(given), Tensor(lengths), Tensor(sizes)),
          lambda x: theirs(x.log_softmax(-1), torch.tensor(given), torch.tensor(lengths), torch.tensor(sizes)), normal(T, N, C))


def test_a_target_that_no_path_gives_has_an_infinite_loss(torch):
    x, labels = normal(3, 1, 4), np.array([[1, 1, 1]])
    for zero, want in ((False, np.inf), (True, 0.0)):
        logs = Tensor(x, requires_grad=True)
        loss = F.ctc_loss(F.log_softmax(logs), Tensor(labels), [3], [3], zero_infinity=zero)
        loss.backward()
        assert loss.item() == want and (logs.grad.numpy() == 0).all()
    single = F.ctc_loss(F.log_softmax(Tensor(x[:, 0])), Tensor([1, 2]), 3, 2)
    want = torch.nn.functional.ctc_loss(torch.tensor(x[:, 0]).log_softmax(-1), torch.tensor([1, 2]), torch.tensor(3),
                                        torch.tensor(2))
    assert abs(single.item() - want.item()) < 1e-5 and single.shape == ()
    with pytest.raises(ValueError, match='ctc_loss: expected targets and lengths of 1 sequences, input_lengths up to 3'):
        F.ctc_loss(Tensor(x), Tensor(labels), [4], [3])


def test_alpha_dropout_keeps_mean_and_variance():
    layer, x = nn.AlphaDropout(0.3), Tensor(np.random.default_rng(0).standard_normal((400, 500)), requires_grad=True)
    y = layer(x)
    y.backward(np.ones(y.shape))
    dropped = x.grad.numpy() == 0
    assert abs(dropped.mean() - 0.3) < 0.01 and abs(y.numpy().mean()) < 0.02 and abs(y.numpy().std() - 1) < 0.02
    assert len(np.unique(y.numpy()[dropped])) == 1
    assert layer.eval()(x) is x and F.alpha_dropout(x, 0.3) is x and F.alpha_dropout(x, 0.5, training=True).shape == x.shape


def test_running_statistics_of_all_batches(torch):
    layer, twin = nn.BatchNorm1d(4, momentum=None), torch.nn.BatchNorm1d(4, momentum=None)
    for _ in range(4):
        x = normal(5, 4)
        close(layer(Tensor(x)).numpy(), twin(torch.tensor(x)).detach().numpy())
    close(layer.running_mean.numpy(), twin.running_mean.numpy())
    close(layer.running_var.numpy(), twin.running_var.numpy())


def test_weights_are_computed_from_their_norms(torch):
    for make, shape in ((lambda nn: nn.Linear(4, 3), (5, 4)), (lambda nn: nn.Conv2d(2, 3, 2), (1, 2, 4, 4))):
        for dim in (0, 1, None):
            layer, twin = make(nn), make(torch.nn)
            layer.load_state_dict(twin.state_dict())
            nn.utils.weight_norm(layer, dim=dim)
            twin = torch.nn.utils.weight_norm(twin, dim=dim)
            assert list(layer.state_dict()) == list(twin.state_dict())
            layer.load_state_dict({name: value * 1.5 for name, value in twin.state_dict().items()})
            twin.load_state_dict({name: value * 1.5 for name, value in twin.state_dict().items()})
            alike(torch, layer, twin.double(), normal(*shape))
            for name, parameter in twin.named_parameters():
                close(dict(layer.named_parameters())[name].grad.numpy(), parameter.grad.numpy())
            nn.utils.remove_weight_norm(layer)
            assert sorted(layer.state_dict()) == ['bias', 'weight']
            close(layer.weight.numpy(), torch.nn.utils.remove_weight_norm(twin).weight.detach().numpy())
    with pytest.raises(ValueError, match='remove_weight_norm: weight: Linear has no weight_norm'):
        nn.utils.remove_weight_norm(nn.Linear(2, 2))


def test_the_largest_singular_value_of_a_weight_becomes_one():
    layer = nn.utils.spectral_norm(nn.Linear(6, 4), n_power_iterations=200)
    x = Tensor(normal(3, 6))
    layer(x).sum().backward()
    assert sorted(layer.state_dict()) == ['bias', 'weight_orig', 'weight_u'] and layer.weight_orig.grad.numpy().any()
    assert abs(np.linalg.svd(layer.weight.numpy())[1].max() - 1) < 1e-3
    layer.eval()
    before = layer.weight_u.numpy().copy()
    layer(x)
    assert (layer.weight_u.numpy() == before).all()


def test_hooks_after_backward_get_and_replace_gradients(torch):
    x, dy = normal(3, 4), normal(3, 2)
    found = []
    for one, tensor in ((nn, lambda a: Tensor(a, requires_grad=True)),
                        (torch.nn, lambda a: torch.tensor(a, requires_grad=True))):
        model = one.Sequential(one.Linear(4, 3), one.Tanh(), one.Linear(3, 2))
        if one is nn:
            mine = model
        else:
            model.load_state_dict({name: torch.tensor(value.numpy()) for name, value in mine.state_dict().items()})
        seen, leaf = [], tensor(x)
        hooks = [model[1].register_full_backward_hook(lambda module, gin, gout: (gin[0] * 2,)),
                 model[2].register_full_backward_hook(lambda module, gin, gout, seen=seen: seen.append((gin, gout))),
                 model[0].register_full_backward_hook(lambda module, gin, gout, seen=seen: seen.append((gin, gout)))]
        model(leaf).backward(tensor(dy).detach())
        numbers = [g.numpy() for pair in seen for part in pair for g in part] + [leaf.grad.numpy().copy()]
        hooks[0].remove()
        model(leaf).backward(tensor(dy).detach())
        data = tensor(x).detach()                       # an input without a gradient
        model(data).backward(tensor(dy).detach())
        assert seen[-1][0] == (None,) and seen[-1][1][0].shape == (3, 3)
        found.append(numbers + [leaf.grad.numpy().copy()])
    for one, other in zip(*found, strict=True):
        close(one, other)
