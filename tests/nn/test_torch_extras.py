"""Lazy layers, projections of LSTMs, limits of embeddings and counts of batches are PyTorch's."""
import copy
import pickle

import numpy as np
import pytest
from arrays import close, same

import pyops
from pyops import functional as F
from pyops import nn, optim
from pyops.autograd import Tensor
from pyops.backend import put

RNG = np.random.default_rng(0)


def draw(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def both_gradients(torch, module, twin, x):
    """Run both on x with one gradient of the result.  Return pairs of arrays."""
    dtype = next(module.parameters()).dtype
    mine, theirs = Tensor(x, True, dtype=dtype), torch.tensor(x, requires_grad=True)
    y, want = module(mine), twin(theirs)
    y, want = (one if isinstance(one, tuple) else (one, ()) for one in (y, want))
    dy = RNG.standard_normal(y[0].shape).astype(dtype)
    y[0].backward(Tensor(dy, dtype=dtype))
    want[0].backward(torch.tensor(dy))
    of = dict(twin.named_parameters())
    return [(y[0], want[0].detach()), *[(a, b.detach()) for a, b in zip(y[1], want[1], strict=True)], (mine.grad, theirs.grad),
            *[(p.grad, of[name].grad) for name, p in module.named_parameters()]]


@pytest.mark.parametrize('dtype', ['float32', pytest.param('float64', marks=pytest.mark.skipif(
    not pyops.default_device().is_host, reason='float64 parameters are on the CPU: run it with --on cpu'))])
@pytest.mark.parametrize('settings', [dict(proj_size=2), dict(proj_size=2, num_layers=2, bidirectional=True),
                                      dict(proj_size=3, batch_first=True, bias=False)])
def test_an_lstm_with_a_projection_is_torchs(torch, settings, dtype):
    module, twin = nn.LSTM(3, 4, dtype=dtype, **settings), torch.nn.LSTM(3, 4, dtype=getattr(torch, dtype), **settings)
    assert list(module.state_dict()) == list(twin.state_dict())
    twin.load_state_dict({name: torch.tensor(value.numpy().copy()) for name, value in module.state_dict().items()})
    for one, other in both_gradients(torch, module, twin, RNG.standard_normal((5, 2, 3)).astype(dtype)):
        close(one.numpy(), other.numpy(), 1e-12 if dtype == 'float64' else 2e-5)


def test_a_projection_is_smaller_than_the_state():
    for kind, size, text in ((nn.LSTM, 4, 'LSTM: proj_size: expected 0 to 3, got 4'),
                             (nn.GRU, 2, 'GRU: proj_size: expected 0')):
        with pytest.raises(ValueError, match=text):
            kind(3, 4, proj_size=size)
    with pytest.raises(ValueError, match=r'state: expected shape \(1, 2, 2\), got \(1, 2, 4\)'):
        nn.LSTM(3, 4, proj_size=2)(Tensor(draw(5, 2, 3)), (Tensor(draw(1, 2, 4)), Tensor(draw(1, 2, 4))))


@pytest.mark.parametrize('settings', [dict(max_norm=1.0), dict(max_norm=1.5, norm_type=1.0), dict(scale_grad_by_freq=True),
                                      dict(scale_grad_by_freq=True, padding_idx=1),
                                      dict(max_norm=1.0, scale_grad_by_freq=True)])
def test_limits_of_embeddings_are_torchs(torch, settings):
    table, ids, dy = 2 * draw(6, 3), np.array([[0, 1, 1], [4, 0, 2]]), draw(2, 3, 3)
    module, twin = nn.Embedding(6, 3, **settings), torch.nn.Embedding(6, 3, **settings)
    module.weight, twin.weight.data = table, torch.tensor(table.copy())
    y, want = module(ids), twin(torch.tensor(ids))
    y.backward(Tensor(dy))
    want.backward(torch.tensor(dy))
    close(y.numpy(), want.detach().numpy(), 1e-6)
    close(module.weight.grad.numpy(), twin.weight.grad.numpy(), 1e-6)
    close(module.weight.numpy(), twin.weight.detach().numpy(), 1e-6)
    module.weight = table
    module.zero_grad()
    found, ctx = module.forward(ids.astype(np.int32))
    module.backward(dy, ctx)
    close(module.weight.grad.numpy(), twin.weight.grad.numpy(), 1e-6)


@pytest.mark.parametrize('settings', [{}, dict(momentum=None), dict(track_running_stats=False)])
def test_batch_norms_count_their_batches(torch, settings):
    model, twin = nn.Sequential(nn.BatchNorm1d(3, **settings)), torch.nn.Sequential(torch.nn.BatchNorm1d(3, **settings))
    assert list(model.state_dict()) == list(twin.state_dict())
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in twin.named_buffers()]
    for _ in range(3):
        x = draw(4, 3)
        model(x), twin(torch.tensor(x))
    model.eval(), twin.eval()
    close(model(x).numpy(), twin(torch.tensor(x)).detach().numpy(), 1e-6)
    again = nn.Sequential(nn.BatchNorm1d(3, **settings))
    again.load_state_dict(twin.state_dict())
    counted = 'track_running_stats' not in settings
    for one in (model, again, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        count = one[0].num_batches_tracked
        assert count.item() == 3 and count.dtype == pyops.int64 if counted else count is None
    older = {name: value for name, value in model.state_dict().items() if not name.endswith('tracked')}
    assert again.load_state_dict(older) == ([], []) and '0.num_batches_tracked' not in model.buffer_arrays()


def test_a_lazy_layer_gets_its_size_in_the_first_call():
    lazy = nn.Sequential(nn.LazyConv2d(4, 3, padding=1), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5, False))
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5, False))
    assert repr(lazy[4]) == 'LazyLinear(5, False)' and lazy[0].has_uninitialized_params()
    with pytest.raises(ValueError, match='0: LazyConv2d has no parameters before its first call; call the model once'):
        lazy.parameters()
    twin, x = pickle.loads(pickle.dumps(copy.deepcopy(lazy))), draw(2, 3, 6, 6)
    for one in (lazy, twin):
        same(one(x).numpy(), model(x).numpy())
        assert repr(one) == repr(model) and list(one.state_dict()) == list(model.state_dict())
    before = lazy[4].weight.numpy().copy()
    optimizer = optim.SGD(lazy.parameters(), 0.1)
    lazy(x).sum().backward()
    optimizer.step()
    assert (lazy[4].weight.numpy() != before).any()
    layer = nn.LazyLinear(3)
    y, ctx = layer.forward(put(draw(2, 4)))
    assert y.shape == (2, 3) and layer.backward(y, ctx).shape == (2, 4)


@pytest.mark.parametrize('name, args, shape', [
    ('LazyConv1d', (2, 3), (2, 3, 5)), ('LazyConv3d', (2, 2), (1, 3, 4, 4, 4)), ('LazyConvTranspose1d', (2, 3), (2, 3, 5)),
    ('LazyConvTranspose2d', (2, 3), (2, 3, 5, 5)), ('LazyBatchNorm1d', (), (4, 3)), ('LazyBatchNorm3d', (), (2, 3, 2, 2, 2)),
    ('LazyInstanceNorm1d', (), (2, 3, 5)), ('LazyInstanceNorm2d', (), (2, 3, 4, 4))])
def test_lazy_layers_become_the_layer_of_their_name(name, args, shape):
    layer, kind = getattr(nn, name)(*args), getattr(nn, name.removeprefix('Lazy'))
    x = draw(*shape)
    y = layer(x)
    assert type(layer) is kind and y.shape == kind(3, *args)(x).shape


def test_arguments_of_lazy_layers_are_checked_at_once():
    with pytest.raises(TypeError, match="unexpected keyword argument 'padd'"):
        nn.LazyConv2d(4, 3, padd=1)
    with pytest.raises(ValueError, match=r'LazyConv2d\(4, 3\): x: expected axis 1, got shape \(3,\)'):
        nn.LazyConv2d(4, 3)(draw(3))
    with pytest.raises(ValueError, match='track_running_stats: expected False'):
        nn.LazyInstanceNorm1d(track_running_stats=True)(draw(2, 3, 4))


def test_packed_sequences_have_the_order_of_torch(torch):
    given = [draw(n, 2) for n in (2, 4, 3)]
    packed = nn.utils.rnn.pack_sequence([Tensor(one) for one in given], enforce_sorted=False)
    want = torch.nn.utils.rnn.pack_sequence([torch.tensor(one) for one in given], enforce_sorted=False)
    for name in ('data', 'batch_sizes', 'sorted_indices', 'unsorted_indices'):
        assert getattr(packed, name).tolist() == getattr(want, name).tolist()
    for one, sequence in zip(nn.utils.rnn.unpack_sequence(packed), given, strict=True):
        same(one.numpy(), sequence)


X = Tensor(draw(2, 3))


@pytest.mark.parametrize('call, kind', [
    (lambda: X + Tensor(draw(4)), ValueError), (lambda: X @ Tensor(draw(4, 2)), ValueError), (lambda: X.reshape(5), ValueError),
    (lambda: nn.Linear(4, 2)(X), ValueError), (lambda: nn.Conv2d(3, 4, 3)(Tensor(draw(1, 2, 5, 5))), ValueError),
    (lambda: nn.Linear(3, 2).load_state_dict({}), KeyError), (lambda: pyops.tensor([1], requires_grad=True), TypeError),
    (lambda: nn.Linear(3, 2).load_state_dict({'weight': X, 'bias': X}), ValueError), (lambda: bool(X), ValueError),
    (lambda: X.item(), ValueError), (lambda: pyops.concatenate([X, Tensor(draw(2, 2))], 0), ValueError),
    (lambda: nn.LSTM(4, 2)(Tensor(draw(3, 2, 5))), ValueError)])
def test_errors_are_those_of_numpy_and_of_torch(call, kind):
    for expected in (kind, RuntimeError):
        with pytest.raises(expected):
            call()


@pytest.mark.parametrize('name, settings', [('SGD', dict(momentum=0.9)), ('Adam', {}), ('Adagrad', {}), ('Adamax', {})])
def test_moments_of_an_optimizer_have_the_names_of_torch(torch, name, settings):
    mine, theirs = Tensor([1.0, 2.0], True), torch.tensor([1.0, 2.0], requires_grad=True)
    optimizer, twin = getattr(optim, name)([mine], lr=0.1, **settings), getattr(torch.optim, name)([theirs], lr=0.1, **settings)
    assert optimizer.state == {}
    (mine * mine).sum().backward()
    (theirs * theirs).sum().backward()
    optimizer.step()
    twin.step()
    for key, value in twin.state[theirs].items():
        # the kernel has 1 - 0.999 in float32
        close(np.asarray(optimizer.state[mine][key], np.float32), np.asarray(value, np.float32), 2e-5)


def test_schedules_at_once_are_saved():
    rates = optim.lr_scheduler

    def made(optimizer):
        return rates.ChainedScheduler([rates.ConstantLR(optimizer, 0.1, 2), rates.ExponentialLR(optimizer, 0.9)])
    p = Tensor([1.0], True)
    first, second = optim.SGD([p], lr=0.5), optim.SGD([p], lr=0.5)
    schedule, again = made(first), made(second)
    schedule.step()
    again.load_state_dict(schedule.state_dict())
    second.lr = first.lr
    for one in (schedule, again):
        one.step()
    assert again.get_last_lr() == schedule.get_last_lr() and abs(first.lr - 0.5 * 0.9 ** 2) < 1e-6


@pytest.mark.parametrize('reduction', ['mean', 'sum', 'none'])
def test_losses_of_margins_are_torchs(torch, reduction):
    labels = np.array([[1, 2, -1, 0], [3, -1, 0, 0], [0, 1, 2, 3]])
    rows = [draw(3, 4) for _ in range(3)]
    for mine, theirs in (
            (lambda x, *_: nn.MultiLabelMarginLoss(reduction=reduction)(x, labels),
             lambda x, *_: torch.nn.functional.multilabel_margin_loss(x, torch.tensor(labels), reduction=reduction)),
            *((nn.TripletMarginWithDistanceLoss(reduction=reduction, swap=swap),
               torch.nn.TripletMarginWithDistanceLoss(reduction=reduction, swap=swap)) for swap in (False, True))):
        leaves, twins = [Tensor(a, True) for a in rows], [torch.tensor(a, requires_grad=True) for a in rows]
        y, want = mine(*leaves), theirs(*twins)
        close(y.numpy(), want.detach().numpy(), 1e-5)
        y.sum().backward()
        want.sum().backward()
        for one, other in zip(leaves, twins, strict=True):
            if other.grad is not None:
                close(one.grad.numpy(), other.grad.numpy(), 1e-5)
    with pytest.raises(ValueError, match=r'labels: expected shape \(3, 4\), got \(2, 4\)'):
        F.multilabel_margin_loss(rows[0], labels[:2])


def test_classes_are_drawn_with_a_gradient():
    logits = Tensor(np.log(np.float32([[0.2, 0.8]])).repeat(4000, 0), True)
    drawn = F.gumbel_softmax(logits, 0.5, hard=True, generator=np.random.default_rng(0))
    assert set(np.unique(drawn.numpy())) == {0, 1} and abs(drawn.numpy()[:, 1].mean() - 0.8) < 0.02
    (drawn * Tensor([0.0, 1.0])).sum().backward()
    assert (logits.grad.numpy()[:, 1] >= 0).all() and (logits.grad.numpy()[:, 1] > 0).mean() > 0.9      # rounded to 0 near 1
    soft = F.gumbel_softmax(logits, 0.5, generator=np.random.default_rng(0))
    close(soft.numpy().sum(1), np.ones(4000, np.float32), 1e-6)
    assert (soft.numpy().argmax(1) == drawn.numpy().argmax(1)).all()


def test_a_total_norm_is_of_all_elements():
    a, b = draw(3, 4), draw(5)
    whole = np.concatenate([a.reshape(-1), b])
    for p in (2.0, 1.0, np.inf):
        close(nn.utils.get_total_norm([Tensor(a), Tensor(b)], p).numpy(), np.linalg.norm(whole, p).astype(np.float32), 1e-6)
    with pytest.raises(RuntimeError, match='get_total_norm: expected a finite norm, got inf'):
        nn.utils.get_total_norm([Tensor([np.inf])], error_if_nonfinite=True)
