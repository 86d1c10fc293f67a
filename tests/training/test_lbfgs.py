"""L-BFGS visits the points that PyTorch's does; states of PyTorch's optimizers continue here."""
import copy
import pickle

import numpy as np
import pytest
from arrays import close, same
from places import on_the_cpu

from pyops import functional as F
from pyops import nn, optim
from pyops.autograd import Tensor

pytestmark = on_the_cpu
RNG = np.random.default_rng(0)
X, TARGET = RNG.standard_normal((20, 3)), RNG.standard_normal((20, 2))


def valley(w):
    """Return Rosenbrock's function, whose minimum is in a bent valley."""
    return ((1 - w[:-1]) ** 2 + 100 * (w[1:] - w[:-1] ** 2) ** 2).sum()


def closure(optimizer, w, count):
    def call():
        count.append(1)
        optimizer.zero_grad()
        loss = valley(w)
        loss.backward()
        return loss
    return call


SETTINGS = [{}, dict(line_search_fn='strong_wolfe'), dict(lr=0.5, max_iter=7, history_size=3, line_search_fn='strong_wolfe'),
            dict(lr=0.01, max_iter=4), dict(max_eval=5, line_search_fn='strong_wolfe'), dict(max_iter=3, history_size=2)]


@pytest.mark.parametrize('settings', SETTINGS)
def test_steps_and_calls_of_the_loss_are_those_of_torch(torch, settings):
    start = np.array([-1.2, 1.0, 0.5, -0.3])
    mine, theirs = Tensor(start, True, dtype='float64'), torch.tensor(start, requires_grad=True)
    optimizer, twin = optim.LBFGS([mine], **settings), torch.optim.LBFGS([theirs], **settings)
    counts = [], []
    for _ in range(4):
        loss, want = optimizer.step(closure(optimizer, mine, counts[0])), twin.step(closure(twin, theirs, counts[1]))
        assert abs(loss.item() - want.item()) <= 1e-11 * abs(want.item())
        close(mine.numpy(), theirs.detach().numpy(), 1e-10)
    assert len(counts[0]) == len(counts[1])
    state = twin.state[theirs]
    assert int(optimizer.count[0]) == state['n_iter'] and optimizer.state_dict()['state']['func_evals'] == state['func_evals']


def network():
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def trained(model, optimizer, steps):
    def loss():
        optimizer.zero_grad()
        loss = F.mse_loss(model(X), Tensor(TARGET, dtype=model[0].weight.dtype))
        loss.backward()
        return loss
    for _ in range(steps):
        optimizer.step(loss)
    return model.params.values.copy()


@pytest.mark.parametrize('of', [lambda model: model.parameters(), lambda model: model.params])
def test_a_state_continues_and_a_copy_has_it(of):
    model = network()
    optimizer = optim.LBFGS(of(model), max_iter=4, line_search_fn='strong_wolfe')
    losses = [F.mse_loss(model(X), Tensor(TARGET)).item() for _ in range(3) if trained(model, optimizer, 1) is not None]
    assert losses[0] > losses[1] > losses[2]
    state, before = optimizer.state_dict(), model.params.values.copy()
    want = trained(model, optimizer, 2)
    model.params.values[...] = before
    again = optim.LBFGS(of(model))
    again.load_state_dict(state)
    same(trained(model, again, 2), want)
    assert again.param_groups[0]['line_search_fn'] == 'strong_wolfe'
    model.params.values[...] = before
    again.load_state_dict(state)
    if of(model) is not model.params:
        same(trained(*copy.deepcopy((model, again)), 2), want)


@pytest.mark.parametrize('call, text', [
    (lambda: optim.LBFGS([Tensor([1.0], True)], line_search_fn='weak'), "expected None or 'strong_wolfe', got 'weak'"),
    (lambda: optim.LBFGS([Tensor([1.0], True)]).step(), 'LBFGS: step: expected closure'),
    (lambda: optim.LBFGS([{'params': [Tensor([1.0], True)]} for _ in range(2)]), 'expected one parameter group, got 2')])
def test_arguments_of_lbfgs(call, text):
    with pytest.raises((TypeError, ValueError), match=text):
        call()


STATES = [('SGD', {}), ('SGD', dict(momentum=0.9, dampening=0.3)), ('Adam', {}), ('Adam', dict(amsgrad=True)), ('AdamW', {}),
          ('RMSprop', dict(momentum=0.9, centered=True)), ('Adagrad', {}), ('Adadelta', {}), ('Adamax', {}), ('RAdam', {})]


@pytest.mark.parametrize('name, settings', STATES)
def test_states_of_torch_continue(torch, name, settings):
    twin = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
    model = network().double()
    theirs = getattr(torch.optim, name)(twin.parameters(), lr=0.03, **settings)

    def step():
        theirs.zero_grad()
        torch.nn.functional.mse_loss(twin(torch.tensor(X)), torch.tensor(TARGET)).backward()
        theirs.step()
    for _ in range(3):
        step()
    model.load_state_dict(twin.state_dict())
    mine = getattr(optim, name)(model.parameters(), lr=7.0, **({'amsgrad': True} if 'amsgrad' in settings else {}))
    mine.load_state_dict(theirs.state_dict())
    assert mine.lr == 0.03
    for _ in range(2):
        step()
    trained(model, mine, 2)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        close(one.numpy(), other.detach().numpy(), 1e-11)


def test_a_state_of_torch_that_does_not_fit_is_refused(torch):
    twin = torch.nn.Sequential(torch.nn.Linear(3, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))
    theirs = torch.optim.Adam(twin.parameters())
    twin(torch.ones(1, 3)).sum().backward()
    theirs.step()
    model = network()
    with pytest.raises(ValueError, match=r'Adam: load_state_dict: exp_avg: expected shape \(8, 3\), got \(7, 3\)'):
        optim.Adam(model.parameters()).load_state_dict(theirs.state_dict())


def test_an_optimizer_of_a_flat_buffer_can_be_pickled():
    model = network()
    optimizer = optim.Adam(model.params, lr=0.01)
    trained(model, optimizer, 2)
    params, again = pickle.loads(pickle.dumps((model.params, optimizer)))
    assert again.params is params and params.initial('0.bias') == model.params.initial('0.bias')
    gradients = RNG.standard_normal(params.grads.shape).astype(np.float32)
    for one, buffers in ((optimizer, model.params), (again, params)):
        buffers.grads[...] = gradients
        one.step()
    same(params.values, model.params.values)
    assert again.lr == optimizer.lr and int(again.count[0]) == 3
