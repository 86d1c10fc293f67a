"""Muon, compared with numpy in float64 and with PyTorch; averages of parameters; in plans, and resumed."""
import copy
import pickle

import numpy as np
import pytest
from arrays import close, near
from places import get, launch, of_threads, put
from small_models import make_seq2seq, make_transformer, pairs

import pyops
from pyops import Tensor, backend, checkpoint, init, nn, optim
from pyops.backend import library
from pyops.fit import History
from pyops.optim import Adam, Muon, decaying_rate, is_hidden_matrix, orthogonalized
from pyops.params import Parameters, Spec
from pyops.plan import Plan
from pyops.steps import SizedSteps

# Tall, wide and square matrices, two of a shape, one of several chunks of the kernels; for Adam a sparse matrix, vectors and an
# output layer.
SHAPES = {'embedding.weight': (50, 20), 'tall.0': (30, 20), 'bias.0': (30,), 'tall.1': (30, 20), 'wide': (20, 33),
          'bias.1': (3,), 'bias.2': (5,), 'large': (140, 130), 'square': (7, 7), 'output.weight': (40, 20)}
MATRICES = 'tall.0', 'tall.1', 'wide', 'large', 'square'
C1, C2, C3 = Muon.COEFFICIENTS


def make_params():
    return Parameters({name: Spec(shape, init.normal(1), name.startswith('embedding')) for name, shape in SHAPES.items()})


def gradients(step, scale):
    rng = np.random.default_rng(step)
    return {name: (scale * rng.standard_normal(shape)).astype('f') for name, shape in SHAPES.items()}


def set_gradients(params, values):
    params.zero_grads()
    for name, value in values.items():
        params[name].grad[...] = put(value)
    params.touched[...] = library.cpu().lib.PYOPS_DENSE          # as if every row of the embedding had a gradient


def reference_orthogonalized(u, steps=5):
    """Orthogonalize u in float64: always with the transposed matrix if it has fewer rows than columns."""
    x = u / max(np.linalg.norm(u), 1e-7)
    x = x.T if len(x) > len(x.T) else x
    for _ in range(steps):
        a = x @ x.T
        x = C1 * x + (C2 * a + C3 * a @ a) @ x
    return x if x.shape == u.shape else x.T


@pytest.mark.parametrize('nesterov', [True, False])
@pytest.mark.parametrize('scale', [0.001, 1.0], ids=['unclipped', 'clipped'])
def test_muon_equals_its_formulas_in_float64(scale, nesterov):
    params = make_params()
    muon = Muon(params, 0.01, max_norm=1.0, weight_decay=0.1, nesterov=nesterov, adam=dict(beta2=0.98))
    others = Adam(twins := make_params(), 0.01, max_norm=1.0, beta2=0.98)
    values = {name: get(params[name].value).astype('d') for name in MATRICES}
    momenta = {name: np.zeros(SHAPES[name]) for name in MATRICES}
    for step in range(5):
        grads = gradients(step, scale)
        set_gradients(params, grads)
        set_gradients(twins, grads)
        muon.step()
        others.step()
        clip = min(1, 1 / np.sqrt(sum((grad.astype('d') ** 2).sum() for grad in grads.values())))
        for name in MATRICES:
            momenta[name] = 0.95 * momenta[name] + 0.05 * clip * grads[name]
            u = 0.95 * momenta[name] + 0.05 * clip * grads[name] if nesterov else momenta[name]
            step_size = 0.01 * 0.2 * max(SHAPES[name]) ** 0.5
            values[name] = (1 - 0.01 * 0.1) * values[name] - step_size * reference_orthogonalized(u)
    assert muon.clipped() == (scale == 1.0)
    for name in SHAPES:
        if name in MATRICES:
            assert np.abs(get(params[name].value) - values[name]).max() <= 2e-6, name
            assert not get(params.view(params.v, name)).any()
        else:
            for buffer in ('values', 'm', 'v'):
                one, other = (get(part.view(getattr(part, buffer), name)) for part in (params, twins))
                assert (one == other).all(), f'{buffer} of {name} differ from Adam\'s'


@pytest.mark.parametrize('shape', [(2, 24, 24), (3, 40, 24), (3, 24, 40), (1, 64, 256)])
def test_orthogonalized_matrices_have_singular_values_near_one(shape):
    x = np.random.default_rng(1).standard_normal(shape).astype('f')
    x /= np.linalg.norm(x, axis=(1, 2), keepdims=True)
    y = get(orthogonalized(put(x.copy()), 5, Muon.COEFFICIENTS))
    (u, s, v), found = np.linalg.svd(x.astype('d'), full_matrices=False), np.linalg.svd(y, compute_uv=False)
    assert s.max() / s.min() > 1.5 and 0.65 <= found.min() and found.max() <= 1.25
    for _ in range(5):
        s = C1 * s + C2 * s ** 3 + C3 * s ** 5
    assert np.abs(y - u * s[:, None] @ v).max() <= 1e-5             # the same singular vectors


def test_a_matrix_without_a_gradient_stays():
    params = make_params()
    before = get(params.values).copy()
    Muon(params, 0.01).step()
    assert (get(params.values) == before).all()


def test_muon_moves_matrices_as_torch_does(torch):
    """PyTorch multiplies in bfloat16, so its steps differ by about 1 %."""
    if not hasattr(torch.optim, 'Muon'):
        pytest.skip('torch.optim.Muon needs PyTorch 2.9 or newer')
    params = make_params()
    start = {name: get(params[name].value).copy() for name in MATRICES}
    twins = {name: torch.tensor(value, requires_grad=True) for name, value in start.items()}
    ours = Muon(params, 0.01, weight_decay=0.1)
    theirs = torch.optim.Muon(twins.values(), 0.01, weight_decay=0.1, adjust_lr_fn='match_rms_adamw')
    for step in range(5):
        grads = gradients(step, 1.0)
        set_gradients(params, grads)
        for name, twin in twins.items():
            twin.grad = torch.tensor(grads[name])
        ours.step()
        theirs.step()
    for name, twin in twins.items():
        moved = twin.detach().numpy() - start[name]
        assert np.linalg.norm(get(params[name].value) - start[name] - moved) <= 0.03 * np.linalg.norm(moved), name


@pytest.mark.parametrize('kind', ['module', 'alone', 'groups'])
def test_muon_trains_tensors_as_it_trains_parameters(kind):
    params, names = make_params(), [name for name in SHAPES if name[:6] != 'output' and name[:9] != 'embedding']
    values = {name: get(params[name].value).copy() for name in names}

    class Holder(nn.Module):
        def __init__(self):
            self.held = [nn.Parameter(value) for value in values.values()]
    tensors = Holder().parameters() if kind == 'module' else [Tensor(value, requires_grad=True) for value in values.values()]
    given = [{'params': [one], 'lr': 0.02} for one in tensors] if kind == 'groups' else tensors
    ours, whole = Muon(given, 0.01 if kind == 'groups' else 0.02, weight_decay=0.1), Muon(params, 0.02, weight_decay=0.1)
    for step in range(3):
        grads = gradients(step, 1.0)
        set_gradients(params, grads)
        ours.zero_grad()
        for name, one in zip(names, tensors, strict=True):
            one.grad = grads[name]
        ours.step()
        whole.step()
    for name, one in zip(names, tensors, strict=True):
        assert (one.numpy() != values[name]).any() and np.abs(one.numpy() - get(params[name].value)).max() <= 1e-6, name


@of_threads
def test_muon_gives_the_same_bits_for_any_number_of_threads():
    before, results = backend.threads(), []
    try:
        for threads in (1, 2, 5):
            backend.set_threads(threads)
            params = make_params()
            muon = Muon(params, 0.01, max_norm=1.0)
            for step in range(2):
                set_gradients(params, gradients(step, 1.0))
                muon.step()
            results.append((params.values, params.m, params.v))
    finally:
        backend.set_threads(before)
    assert all((a == b).all() for result in results for a, b in zip(result, results[0], strict=True))


def hidden(params):
    return [name for name in params if is_hidden_matrix(name, params[name].value.shape)]


def test_muon_chooses_the_hidden_matrices_of_the_translators():
    transformer, seq2seq = make_transformer().params, make_seq2seq().params
    attention = [f'{side}.0.{kind}.{part}.weight' for side, kinds in (('encoder', ['self']), ('decoder', ['self', 'cross']))
                 for kind in [f'{kind}_attention' for kind in kinds] for part in ('q', 'k', 'v', 'out')]
    feed_forward = [f'{side}.0.feed_forward.{name}' for side in ('encoder', 'decoder') for name in ('w1', 'w2')]
    assert sorted(hidden(transformer)) == sorted(attention + feed_forward)
    assert hidden(seq2seq) and all('.rnn.' in name and '.w_' in name for name in hidden(seq2seq))


class Training:
    """Steps of a small transformer with Muon and a decaying rate."""

    def __init__(self):
        self.model, self.pairs = make_transformer(), pairs()[1]
        self.muon = Muon(self.model.params, 0.01, max_norm=1.0, weight_decay=0.01)

    def step(self, rows):
        return self._step(put(rows), *self.pairs.sizes(rows))

    def _step(self, rows, *sizes):
        decaying_rate(self.muon, 0.01, 2, 8)
        self.model.params.zero_grads()
        loss, ctx = self.model.forward(self.pairs.batch(rows, *sizes), step=self.muon.count)
        self.model.backward(ctx)
        self.muon.step()
        return loss

    def planned(self):
        return SizedSteps(self._step, self.pairs.sizes, self.model.params, **self.pairs.arrays(), **self.model.arrays(),
                          **self.muon.arrays())

    def tensors(self):
        return {name: get(tensor).copy() for name, tensor in checkpoint.tensors(self.model.params, self.muon).items()}


def rows(step):
    return np.random.default_rng(step).integers(0, 128, 16)


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert (one[name] == other[name]).all(), name


def test_replayed_steps_of_muon_have_the_bits_of_eager_ones():
    eager, planned = Training(), Training()
    replay, losses = planned.planned(), []
    for step in range(6):
        losses.append(float(get(eager.step(rows(step)))[0]))
        assert get(replay(rows(step)))[0] == losses[-1]
    assert_same(eager.tensors(), planned.tensors())
    assert losses[-1] < losses[0]


def test_a_run_with_muon_resumed_equals_an_undisturbed_one():
    whole, first, second = Training(), Training(), Training()
    for step in range(3):
        whole.step(rows(step))
        first.step(rows(step))
    checkpoint.restore(second.model.params, second.muon, first.tensors(), 'kept')
    for step in range(3, 6):
        whole.step(rows(step))
        second.step(rows(step))
    assert_same(whole.tensors(), second.tensors())


@pytest.mark.parametrize('which', ['module', 'alone'])
def test_muon_updates_tensors_as_it_updates_parameters(which):
    """All of a module in one buffer, and Tensors that belong to no module; the module's last layer is named for Adam."""
    rng = np.random.default_rng(4)
    start = {'0.weight': (6, 5), '0.bias': (6,), '1.weight': (4, 6), '1.bias': (4,)}
    start = {name: rng.standard_normal(shape).astype('f') for name, shape in start.items()}
    params = Parameters({name: Spec(value.shape, lambda _, shape, value=value: value) for name, value in start.items()})
    if which == 'module':
        model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 4))
        model.load_state_dict(start)
        tensors = dict(model.named_parameters())
    else:
        tensors = {name: Tensor(value, requires_grad=True) for name, value in start.items()}

    def is_matrix(name, shape):
        return shape == (6, 5)
    muons = Muon(params, 0.1, max_norm=1.0, matrices=is_matrix), Muon(tensors.values(), 0.1, max_norm=1.0, matrices=is_matrix)
    for _ in range(3):
        dy = {name: rng.standard_normal(value.shape).astype('f') for name, value in start.items()}
        params.zero_grads()
        muons[1].zero_grad()
        for name, value in dy.items():
            params[name].grad[...] = put(value)
        sum((tensors[name] * Tensor(value)).sum() for name, value in dy.items()).backward()
        for muon in muons:
            muon.step()
    for name, tensor in tensors.items():
        assert np.abs(tensor.numpy() - get(params[name].value)).max() <= 1e-6, name
        assert np.abs(tensor.numpy() - start[name]).max() > 0.05


# ---- the average of the parameters -----------------------------------------------------------------------------------

def test_an_average_follows_the_parameters_and_is_used_within_a_context():
    params = make_params()
    optimizer, average = Adam(params, 0.1), get(params.values).astype('d')
    optimizer.average_parameters(0.9)
    for step in range(200):
        set_gradients(params, gradients(step, 1.0))
        optimizer.step()
        average += (1 - min(0.9, (2 + step) / (11 + step))) * (get(params.values) - average)
    trained = get(params.values).copy()
    assert np.abs(get(optimizer.average) - average).max() <= 1e-5 < 0.05 < np.abs(trained - average).max()
    with optimizer.averaged():
        assert (get(params.values) == get(optimizer.average)).all()
    assert (get(params.values) == trained).all()
    with Adam(params, 0.1).averaged():                              # no average: the parameters
        assert (get(params.values) == trained).all()


def test_an_average_is_replayed_saved_and_resumed_to_the_bit():
    whole, first, second = Training(), Training(), Training()
    for one in (whole, first, second):
        one.muon.average_parameters(0.99)
    steps = first.planned()
    for step in range(3):
        whole.step(rows(step))
        steps(rows(step))
    kept = first.tensors()
    assert any((kept[f'parameter/{name}'] != kept[f'trained/{name}']).any() for name in first.model.params)
    checkpoint.restore(second.model.params, second.muon, kept, 'kept')
    for step in range(3, 6):
        whole.step(rows(step))
        second.step(rows(step))
    assert_same(whole.tensors(), second.tensors())
    serving = make_transformer().params                             # serving reads the average
    checkpoint.restore(serving, None, whole.tensors(), 'kept')
    with whole.muon.averaged():
        for name in serving:
            assert (get(serving[name].value) == get(whole.model.params[name].value)).all()


def test_an_average_is_rejected_without_parameters_or_with_an_impossible_decay():
    with pytest.raises(TypeError, match='Adam: average_parameters: expected an optimizer of a Parameters, got Tensors'):
        Adam([Tensor(np.ones(3, 'f'), requires_grad=True)]).average_parameters(0.9)
    with pytest.raises(ValueError, match='Adam: decay: expected 0 <= decay < 1, got 1'):
        Adam(make_params()).average_parameters(1)
    with pytest.raises(ValueError, match='ema: decay=1, expected 0 <= decay < 1'):
        launch('ema', np.zeros(3, 'f'), np.zeros(3, 'f'), np.ones(1, np.int64), 3, 1.0)


@pytest.mark.parametrize('settings, error, text', [
    (dict(matrices=lambda name, shape: False), ValueError, 'Muon: expected a hidden matrix among the parameters, got'),
    (dict(momentum=1.0), ValueError, 'Muon: momentum: expected 0 <= momentum < 1, got 1.0'),
    (dict(weight_decay=-1), ValueError, 'Muon: weight_decay: expected 0 <= weight_decay < inf, got -1'),
    (dict(steps=2.5), TypeError, 'Muon: steps: expected a whole number, got 2.5'),
    (dict(adam=dict(beta1=2)), ValueError, 'Muon: beta1: expected 0 <= beta1 < 1, got 2'),
    (dict(adam=dict(momentum=0.9)), TypeError, 'momentum'),
])
def test_muon_rejects_impossible_settings(settings, error, text):
    with pytest.raises(error, match=text):
        Muon(make_params(), **settings)


@pytest.mark.parametrize('count, n, max_norm, momentum, text', [
    (-1, 4, 1.0, 0.9, 'muon_momentum: count=-1 n=4, expected count from 0 to 65535, n >= 0'),
    (1, 4, 0.0, 0.9, 'muon_momentum: max_norm=0, expected max_norm > 0'),
    (1, 4, 1.0, 1.0, 'muon_momentum: momentum=1, expected 0 <= momentum < 1'),
])
def test_the_kernels_of_muon_reject_impossible_arguments(count, n, max_norm, momentum, text):
    x, m, grad, work, offsets = (*(np.zeros(4, 'f') for _ in range(3)), np.zeros(8, 'f'), np.zeros(1, np.int64))
    with pytest.raises(ValueError, match=text):
        launch('muon_momentum', x, m, grad, None, offsets, work, count, n, max_norm, momentum, True)
    with pytest.raises(ValueError, match='muon_update: weight_decay=-1, expected at least 0'):
        launch('muon_update', x, m, offsets, np.ones(1, 'f'), 1, 4, 1.0, -1.0)
    with pytest.raises(ValueError, match='muon_polynomial: count=1 n=-2, expected count from 0 to 65535, n >= 0'):
        launch('muon_polynomial', x, m, 1, -2, C1, C2, C3)


# ---- groups, states, clipping, schedules -----------------------------------------------------------------------------

def leaves(*shapes):
    rng = np.random.default_rng(0)
    return [Tensor(rng.standard_normal(shape), requires_grad=True) for shape in shapes]


def train(torch, ours, theirs, mine, twins, steps=6, schedules=()):
    """Give both the same gradients and step; compare the parameters after each step."""
    rng = np.random.default_rng(1)
    for _ in range(steps):
        for x, twin in zip(mine, twins, strict=True):
            gradient = rng.standard_normal(x.shape)
            x.grad, twin.grad = gradient, torch.tensor(gradient)
        ours.step()
        theirs.step()
        for schedule in schedules:
            schedule.step()
        for x, twin in zip(mine, twins, strict=True):
            np.testing.assert_allclose(x.numpy(), twin.detach().numpy(), atol=2e-5)


OPTIMISERS = {
    'sgd': (optim.SGD, dict(lr=0.1, momentum=0.9, dampening=0.3), {}),
    'adam': (optim.Adam, dict(lr=0.01, betas=(0.8, 0.99)), {}),
    'adamw': (optim.AdamW, dict(lr=0.01, weight_decay=0.2), {}),
    'amsgrad': (optim.Adam, dict(lr=0.01, amsgrad=True, foreach=False), {}),
    'adamw-amsgrad': (optim.AdamW, dict(lr=0.01, amsgrad=True, maximize=True), {}),
    'sgd-maximize': (optim.SGD, dict(lr=0.1, momentum=0.5, nesterov=True, maximize=True, weight_decay=0.1), {}),
    'rmsprop': (optim.RMSprop, dict(lr=0.01, alpha=0.9), {}),
    'rmsprop-centered': (optim.RMSprop, dict(lr=0.01, momentum=0.9, centered=True, eps=1e-3, maximize=True), {}),
    'adagrad': (optim.Adagrad, dict(lr=0.1, lr_decay=0.1, initial_accumulator_value=0.2), {}),
    'adadelta': (optim.Adadelta, dict(lr=0.5, rho=0.8), {}),
    'adamax': (optim.Adamax, dict(lr=0.01, betas=(0.8, 0.99)), {}),
    'nadam': (optim.NAdam, dict(lr=0.01, weight_decay=0.1, decoupled_weight_decay=True), {}),
    'radam': (optim.RAdam, dict(lr=0.01, betas=(0.8, 0.95)), {}),
    'asgd': (optim.ASGD, dict(lr=0.1, lambd=0.1, alpha=0.6, t0=3), {}),
    'rprop': (optim.Rprop, dict(lr=0.01, etas=(0.4, 1.3), step_sizes=(0.005, 0.02)), {}),
}
RECORDED = 'sgd', 'adam', 'adamw'           # whose steps are kernel calls alone


@pytest.mark.parametrize('name', OPTIMISERS)
def test_parameter_groups_have_settings_of_their_own(torch, name):
    kind, settings, _ = OPTIMISERS[name]
    mine = leaves((3, 4), (5,), (2, 2))
    twins = [torch.tensor(x.numpy().astype('d'), requires_grad=True) for x in mine]
    groups = [(slice(0, 1), dict(lr=0.05) | (dict(weight_decay=0.1) if name != 'rprop' else {})), (slice(1, 3), {})]
    ours = kind([{'params': mine[part], **own} for part, own in groups], **settings)
    theirs = getattr(torch.optim, kind.__name__)([{'params': twins[part], **own} for part, own in groups], **settings)
    train(torch, ours, theirs, mine, twins)
    assert ours.param_groups[0]['lr'] == 0.05 and ours.param_groups[1]['lr'] == settings['lr'] and ours.lr == 0.05
    for optimizer in ours, theirs:
        if name != 'asgd':                      # where PyTorch takes a changed rate one step later
            optimizer.param_groups[0]['lr'] = 0.02
        optimizer.param_groups[1]['lr' if name == 'rprop' else 'weight_decay'] = 0.3
    train(torch, ours, theirs, mine, twins)


POSITIONAL = {
    'SGD': (0.1, 0.9, 0.0, 0.01, True), 'Adam': (0.01, (0.8, 0.99), 1e-6, 0.1, True),
    'AdamW': (0.01, (0.8, 0.99), 1e-6, 0.1, True), 'RMSprop': (0.01, 0.9, 1e-6, 0.1, 0.5, True),
    'Adagrad': (0.1, 0.1, 0.1, 0.2, 1e-6), 'Adadelta': (0.5, 0.8, 1e-5, 0.1),
    'Adamax': (0.01, (0.8, 0.99), 1e-6, 0.1), 'NAdam': (0.01, (0.8, 0.99), 1e-6, 0.1, 0.01, True),
    'RAdam': (0.01, (0.8, 0.95), 1e-6, 0.1, True), 'ASGD': (0.1, 0.1, 0.6, 3, 0.1), 'Rprop': (0.01, (0.4, 1.3), (0.005, 0.02)),
}


@pytest.mark.parametrize('name', POSITIONAL)
def test_arguments_have_the_order_of_torch(torch, name):
    mine = leaves((3, 4), (5,))
    twins = [torch.tensor(x.numpy().astype('d'), requires_grad=True) for x in mine]
    ours, theirs = (getattr(one, name)(tensors, *POSITIONAL[name]) for one, tensors in ((optim, mine), (torch.optim, twins)))
    train(torch, ours, theirs, mine, twins, 20)
    with pytest.raises(TypeError, match='too many positional arguments|positional arguments but'):
        getattr(optim, name)(mine, *POSITIONAL[name], 0.5)


@pytest.mark.parametrize('max_norm', [None, 0.5])
@pytest.mark.parametrize('name', RECORDED)
def test_replayed_steps_of_an_optimiser_have_the_bits_of_launched_ones(name, max_norm):
    """A hook that only listens makes an optimiser launch its kernels.  Settings change between the steps."""
    kind, settings, _ = OPTIMISERS[name]
    models = [nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)) for _ in range(2)]
    replayed, launched = (kind(model.parameters(), max_norm=max_norm, **settings) for model in models)
    rng, kernels = np.random.default_rng(0), []
    changes = {3: dict(lr=0.02), 5: dict(weight_decay=0.1), 7: {'beta1' if name != 'sgd' else 'momentum': 0.5}}
    for step in range(10):
        for optimizer in replayed, launched:
            for setting, value in changes.get(step, {}).items():
                optimizer.param_groups[0][setting] = value
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            gradient = rng.standard_normal(parameters[0].shape)
            for parameter in parameters:
                parameter.grad = gradient
        replayed.step()
        with backend.hooks(listen=lambda kernel, values: kernels.append(kernel) or True):
            launched.step()
        for mine, other in zip(*(model.parameters() for model in models), strict=True):
            assert (mine.numpy() == other.numpy()).all()
    assert launched._recorded is None and kernels.count('increment') == 10
    assert (replayed._recorded is None) == (not backend.current_device().is_host)


@pytest.mark.parametrize('max_norm', [0.5, None])
@pytest.mark.parametrize('together', [True, False])
@pytest.mark.parametrize('kind', [Adam, optim.SGD])
def test_a_step_with_an_entry_has_the_bits_of_a_step_and_the_entry_after_it(kind, together, max_norm, monkeypatch):
    """together: all parameters in one buffer, or a norm of the norms of each"""
    monkeypatch.setattr(History, 'CAPACITY', 4)         # every row is written
    models = [nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [kind(list(model.parameters())[:None if together else 3], 0.1, max_norm=max_norm) for model in models]
    histories, rng = [History(), History()], np.random.default_rng(0)
    for step in range(4):
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            gradient = rng.standard_normal(parameters[0].shape)
            for parameter in parameters:
                parameter.grad = gradient
        loss, weight = put(np.full(1, 2.5 + step, np.float32)), put(np.full(1, 7 + step, np.int32))
        optimizers[0].step(entry=histories[0].entry(loss, weight))
        optimizers[1].step()
        histories[1].add(loss, weight, optimizers[1].norm)
    for mine, other in zip(*(model.parameters() for model in models), strict=True):
        assert (mine.numpy() == other.numpy()).all()
    rows = histories[0].read(4)
    assert rows == histories[1].read(4) and [row[:2] for row in rows] == [[2.5 + step, 7 + step] for step in range(4)]
    assert all((norm > 0) == (max_norm is not None) for *_, norm in rows)
    assert get(optimizers[0].count)[0] == get(optimizers[1].count)[0] == 4


@pytest.mark.parametrize('name', [*OPTIMISERS, 'muon'])
@pytest.mark.parametrize('copied', [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=['deepcopy', 'pickle'])
def test_a_copied_pair_of_model_and_optimiser_trains_alone(name, copied):
    """The copy makes the same steps as the original, and changes nothing of it."""
    kind, settings, _ = OPTIMISERS.get(name, (optim.Muon, dict(lr=0.1), {}))
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model[2].bias.requires_grad = False
    if name == 'muon':
        optimizer = kind(model.parameters(), **settings)
    else:
        optimizer = kind([{'params': model[0].parameters(), 'lr': 0.02}, {'params': model[2].parameters()}], **settings)

    def step(model, optimizer, seed):
        optimizer.zero_grad()
        (model(np.random.default_rng(seed).standard_normal((6, 4))) ** 2).sum().backward()
        optimizer.step()
    for seed in range(2):
        step(model, optimizer, seed)
    twin, other = copied((model, optimizer))
    before = [p.numpy().copy() for p in model.parameters()]
    for seed in range(2, 4):
        step(twin, other, seed)
    assert all((p.numpy() == q).all() for p, q in zip(model.parameters(), before, strict=True))
    for seed in range(2, 4):
        step(model, optimizer, seed)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        near(p.numpy(), q.numpy(), 1e-6)
    assert other.param_groups[0].settings() == optimizer.param_groups[0].settings() and int(get(other.count)[0]) == 4


def test_a_copied_schedule_changes_the_rate_of_the_copied_optimiser():
    optimizer = optim.SGD(leaves((2,)), lr=0.5)
    schedule = optim.StepLR(optimizer, 1, 0.1)
    twin, other = pickle.loads(pickle.dumps((optimizer, schedule)))
    other.step()
    assert (optimizer.lr, twin.lr) == (0.5, 0.05)


def test_an_optimiser_that_has_recorded_a_step_can_be_copied():
    optimizer = optim.SGD(nn.Linear(2, 3).parameters(), lr=0.5)
    for _ in range(2):
        optimizer.step()
    twin = copy.copy(optimizer)
    twin.step()
    assert int(get(twin.count)[0]) == 3


@pytest.mark.parametrize('name', OPTIMISERS)
def test_an_optimiser_continues_from_its_state(torch, name):
    kind, settings, _ = OPTIMISERS[name]

    def made():
        mine = leaves((3, 4), (5,))
        return mine, kind([{'params': mine[:1], 'lr': 0.05}, {'params': mine[1:]}], **settings)

    def step(mine, optimizer, seed):
        rng = np.random.default_rng(seed)
        for x in mine:
            x.grad = rng.standard_normal(x.shape)
        optimizer.step()
    (a, whole), (b, first), (c, second) = made(), made(), made()
    for seed in range(4):
        step(a, whole, seed)
    for seed in range(2):
        step(b, first, seed)
    state = first.state_dict()
    for x, y in zip(b, c, strict=True):
        y.data = x.numpy()
    second.load_state_dict(state)
    assert second.param_groups[0]['lr'] == 0.05
    for seed in (2, 3):
        step(c, second, seed)
    for x, y in zip(a, c, strict=True):
        assert (x.numpy() == y.numpy()).all()
    with pytest.raises(ValueError, match=f'{kind.__name__}: load_state_dict: .*expected shape'):
        kind([{'params': leaves((2,))}, {'params': leaves((5,))}], **settings).load_state_dict(state)
    with pytest.raises(ValueError, match=f'{kind.__name__}: load_state_dict: expected groups of .1. Tensors, got .1, 1.'):
        kind(leaves((2,)), **settings).load_state_dict(state)


def test_a_recorded_schedule_sets_the_rates_of_groups_without_their_own():
    x, y, z = leaves((2,), (3,), (4,))
    optimizer = optim.SGD([{'params': [x]}, {'params': [y], 'lr': 0.5}, {'params': [z]}], 0.1)
    decaying_rate(optimizer, 1.0, 4, 12)
    assert [group['lr'] for group in optimizer.param_groups] == [0.25, 0.5, 0.25] and optimizer.lr == 0.25
    optimizer.lr = 0.3
    assert [group['lr'] for group in optimizer.param_groups] == [0.3, 0.3, 0.3]


def test_muon_takes_groups_too():
    mine = leaves((6, 4), (4, 6))
    optimizer = optim.Muon([{'params': mine[:1], 'momentum': 0.5}, {'params': mine[1:], 'lr': 0.0}], lr=0.1)
    before = [x.numpy().copy() for x in mine]
    for x in mine:
        x.grad = np.ones(x.shape)
    optimizer.step()
    assert (mine[0].numpy() != before[0]).all() and (mine[1].numpy() == before[1]).all()
    assert optimizer.param_groups[0]['momentum'] == 0.5 and optimizer.param_groups[1]['momentum'] == 0.95


@pytest.mark.parametrize('make, error, text', [
    (lambda x: optim.SGD([{'params': x, 'beta1': 0.5}]), TypeError, 'SGD: beta1: unknown setting of a parameter group'),
    (lambda x: optim.SGD([{'lr': 0.5}]), ValueError, "a parameter group needs 'params'"),
    (lambda x: optim.SGD([{'params': x}, {'params': x[:1]}]), ValueError, 'a Tensor is in two parameter groups'),
    (lambda x: optim.Adam([{'params': x, 'lr': -1}]), ValueError, 'Adam: lr: expected 0 <= lr < inf, got -1'),
    (lambda x: optim.SGD(x, 0.1, nesterov=True, momentum=0.9, dampening=0.1), ValueError, 'nesterov: expected dampening 0'),
    (lambda x: optim.RAdam(x, 0.1, 0.9), TypeError, r'RAdam: betas: expected two numbers, such as \(0.9, 0.999\), got 0.9'),
    (lambda x: optim.Rprop(x, etas=0.5), TypeError, r'Rprop: etas: expected two numbers, such as \(0.5, 1.2\), got 0.5'),
    (lambda x: optim.Rprop([{'params': x, 'step_sizes': (2, 1)}]), ValueError, r'Rprop: step_sizes: expected two numbers'),
])
def test_impossible_groups_are_refused(make, error, text):
    with pytest.raises(error, match=text):
        make(leaves((2, 2), (3,)))


def test_gradients_are_clipped_to_a_global_norm(torch):
    mine = leaves((3, 4), (5,), (2,))
    twins = [torch.tensor(x.numpy(), requires_grad=True) for x in mine]
    for x, twin in zip(mine[:2], twins, strict=False):
        x.grad, twin.grad = x.numpy() * 3, twin.detach() * 3
    norm = nn.utils.clip_grad_norm_(mine, 1.5)
    assert abs(norm - torch.nn.utils.clip_grad_norm_(twins[:2], 1.5).item()) < 1e-5
    for x, twin in zip(mine[:2], twins, strict=False):
        np.testing.assert_allclose(x.grad.numpy(), twin.grad.numpy(), rtol=1e-5)
    kept = mine[0].grad.numpy().copy()
    assert abs(optim.clip_grad_norm_(mine[0], 100.0) - np.linalg.norm(kept)) < 1e-5 and (mine[0].grad.numpy() == kept).all()
    assert optim.clip_grad_norm_(leaves((2,)), 1.0) == 0 and mine[2].grad is None
    with pytest.raises(ValueError, match='clip_grad_norm_: max_norm: expected a number > 0, got 0'):
        optim.clip_grad_norm_(mine, 0)


SCHEDULES = {
    'StepLR': dict(step_size=3, gamma=0.5), 'MultiStepLR': dict(milestones=[2, 5], gamma=0.3), 'ExponentialLR': dict(gamma=0.9),
    'CosineAnnealingLR': dict(T_max=8, eta_min=0.01), 'LinearLR': dict(start_factor=0.1, total_iters=4),
    'LambdaLR': dict(lr_lambda=lambda t: 1 / (1 + t)), 'MultiplicativeLR': dict(lr_lambda=lambda t: 1 / (1 + t)),
    'ConstantLR': dict(factor=0.3, total_iters=3), 'PolynomialLR': dict(total_iters=6, power=2.0),
    'CosineAnnealingWarmRestarts': dict(T_0=2, T_mult=2, eta_min=0.01),
    'OneCycleLR': dict(max_lr=0.7, total_steps=9, pct_start=0.4),
    'CyclicLR': dict(base_lr=0.1, max_lr=0.9, step_size_up=2, step_size_down=3, mode='triangular2'),
}


@pytest.mark.parametrize('name', SCHEDULES)
def test_schedules_give_the_rates_of_torch(torch, name):
    x, y = leaves((2,), (3,))
    twins = [torch.tensor(z.numpy(), requires_grad=True) for z in (x, y)]
    ours = optim.SGD([{'params': [x], 'lr': 0.4}, {'params': [y]}], 0.1, momentum=0.9)
    theirs = torch.optim.SGD([{'params': [twins[0]], 'lr': 0.4}, {'params': [twins[1]]}], 0.1, momentum=0.9)
    schedule = getattr(optim.lr_scheduler, name)(ours, **SCHEDULES[name])
    twin = getattr(torch.optim.lr_scheduler, name)(theirs, **SCHEDULES[name])
    rates = []
    for k in range(8):
        rates.append(schedule.get_last_lr())
        np.testing.assert_allclose(schedule.get_last_lr(), twin.get_last_lr(), rtol=1e-6)
        np.testing.assert_allclose(*[[group['momentum'] for group in one.param_groups] for one in (ours, theirs)], rtol=1e-6)
        theirs.step()
        twin.step()
        schedule.step()
        if k == 3:
            state, schedule = schedule.state_dict(), getattr(optim, name)(ours, **SCHEDULES[name])
            schedule.load_state_dict(state)
    assert rates[0] != rates[-1]


def of_schedules(torch, make, steps=12, measures=None):
    """Compare the rates of schedules made by make(lr_scheduler, optimizer), which returns a list of them."""
    x = leaves((2,))[0]
    both = []
    for one, tensor in ((optim, x), (torch.optim, torch.tensor(x.numpy(), requires_grad=True))):
        optimizer = one.SGD([tensor], lr=0.5)
        both.append((optimizer, make(one.lr_scheduler, optimizer)))
    for k in range(steps):
        np.testing.assert_allclose(*[optimizer.param_groups[0]['lr'] for optimizer, _ in both], rtol=2e-6, err_msg=str(k))
        for optimizer, schedules in both:
            optimizer.step()
            for one in schedules:
                one.step(*() if measures is None else (measures[k],))
    assert both[0][0].lr != 0.5
    return both


def test_schedules_of_one_optimizer_multiply_and_follow_each_other(torch):
    of_schedules(torch, lambda lr, x: [lr.ConstantLR(x, 0.1, 2), lr.ExponentialLR(x, 0.9), lr.StepLR(x, 3, 0.5)])
    of_schedules(torch, lambda lr, x: [lr.ChainedScheduler([lr.LinearLR(x, 0.2), lr.CosineAnnealingLR(x, 20)])])
    of_schedules(torch, lambda lr, x: [lr.SequentialLR(x, [
        lr.LinearLR(x, 0.1, total_iters=4), lr.CosineAnnealingLR(x, 6), lr.ExponentialLR(x, 0.5)], milestones=[4, 9])])
    of_schedules(torch, lambda lr, x: [lr.OneCycleLR(x, 0.9, epochs=3, steps_per_epoch=5, anneal_strategy='linear',
                                                            cycle_momentum=False, three_phase=True)])
    (ours, (schedule,)), _ = of_schedules(torch, lambda lr, x: [lr.StepLR(x, 5, 0.5)])
    again = optim.StepLR(ours, 5, 0.5, last_epoch=11)
    assert again.get_last_lr() == schedule.get_last_lr() and again.last_epoch == schedule.last_epoch == 12
    first, second = (optim.SequentialLR(one, [optim.ConstantLR(one, 0.5, 2), optim.StepLR(one, 2)], [2])
                     for one in (optim.SGD(leaves((2,)), 0.1) for _ in range(2)))
    for _ in range(3):
        first.step()
    second.load_state_dict(first.state_dict())
    first.step()
    second.step()
    assert first.get_last_lr() == second.get_last_lr() == [0.01]


@pytest.mark.parametrize('options', [dict(patience=1), dict(mode='max', patience=0, threshold=0.5, cooldown=2),
                                     dict(factor=0.5, patience=0, threshold_mode='abs', threshold=0.2, min_lr=0.1)], ids=str)
def test_a_rate_is_reduced_when_a_measure_no_longer_improves(torch, options):
    measures = [1.0, 0.9, 0.95, 0.93, 0.9, 1.5, 1.4, 1.3, 0.1, 0.2, 0.15, 0.3]
    of_schedules(torch, lambda lr, x: [lr.ReduceLROnPlateau(x, **options)], measures=measures)


def test_groups_are_added_and_a_step_calls_a_closure(torch):
    mine = leaves((3, 4), (5,))
    twins = [torch.tensor(x.numpy().astype('d'), requires_grad=True) for x in mine]
    ours, theirs = (one.Adam([tensors[0]], lr=0.1) for one, tensors in ((optim, mine), (torch.optim, twins)))
    train(torch, ours, theirs, mine[:1], twins[:1], 1)
    for optimizer, tensors in ((ours, mine), (theirs, twins)):
        optimizer.add_param_group({'params': tensors[1], 'lr': 0.02, 'weight_decay': 0.1})
    assert [group['lr'] for group in ours.param_groups] == [0.1, 0.02] and len(ours.state_dict()['state']) == 2

    def closure():
        ours.zero_grad()
        loss = (mine[0] ** 2).sum() + mine[1].sum()
        loss.backward()
        return loss
    before = mine[1].numpy().copy()
    want = float((mine[0].numpy().astype('d') ** 2).sum() + before.sum())
    assert abs(ours.step(closure).item() - want) < 1e-4 and (mine[1].numpy() != before).all()
    assert ours.defaults['lr'] == 0.1 and 'Parameter Group 1\n    lr: 0.02\n    weight_decay: 0.1' in repr(ours)
    assert len(optim.SGD(nn.Linear(2, 3).named_parameters()).param_groups[0]['params']) == 2
    with pytest.raises(ValueError, match='a Tensor is in two parameter groups'):
        ours.add_param_group({'params': [mine[0]]})
    with pytest.raises(TypeError, match='add_param_group: expected an optimizer of Tensors'):
        Adam(make_params()).add_param_group({'params': mine})
    with pytest.raises(TypeError, match="RMSprop: got an unexpected keyword argument 'beta3'; expected .params, lr"):
        optim.RMSprop(mine, beta3=1)


def test_formulas_update_parameters_as_they_update_tensors():
    params, tensors = make_params(), leaves(*SHAPES.values())
    for name, x in zip(SHAPES, tensors, strict=True):
        x.data = get(params[name].value).copy()
    ours, others = (optim.RMSprop(one, 0.01, momentum=0.5, max_norm=1.0) for one in (params, tensors))
    for step in range(3):
        grads = gradients(step, 1.0)
        set_gradients(params, grads)
        for name, x in zip(SHAPES, tensors, strict=True):
            x.grad = grads[name]
        ours.step()
        others.step()
    assert ours.clipped() and {'square', 'velocity'} <= ours.arrays().keys()
    for name, x in zip(SHAPES, tensors, strict=True):
        assert np.abs(get(params[name].value) - x.numpy()).max() < 1e-6
    with Plan(params), pytest.raises(TypeError, match='RMSprop: its steps cannot be recorded in a plan'):
        ours.step()


@pytest.mark.parametrize('norm_type', [1, 2.0, float('inf')])
def test_gradients_are_clipped_by_any_norm_and_by_value(torch, norm_type):
    for clip in (lambda utils, tensors: utils.clip_grad_norm_(tensors, 0.7, norm_type=norm_type, error_if_nonfinite=True),
                 lambda utils, tensors: utils.clip_grad_value_(tensors, 0.4)):
        mine = leaves((3, 4), (5,), (2,))
        twins = [torch.tensor(x.numpy(), requires_grad=True) for x in mine]
        for x, twin in zip(mine[:2], twins, strict=False):
            x.grad, twin.grad = x.numpy() * 2, twin.detach() * 2
        found, want = clip(nn.utils, mine), clip(torch.nn.utils, twins)
        assert (want is None and found is None) or abs(found.item() - want.item()) < 1e-5
        for x, twin in zip(mine[:2], twins, strict=False):
            np.testing.assert_allclose(x.grad.numpy(), twin.grad.numpy(), rtol=1e-5)
    mine[0].grad = np.full((3, 4), np.nan)
    with pytest.raises(RuntimeError, match='clip_grad_norm_: expected a finite norm, got nan'):
        optim.clip_grad_norm_(mine, 1.0, norm_type, error_if_nonfinite=True)
    vector = nn.utils.parameters_to_vector(mine)
    nn.utils.vector_to_parameters(vector * 2, mine)
    assert vector.shape == (19,) and (nn.utils.parameters_to_vector(mine).numpy() == 2 * vector.numpy()).all()


def test_impossible_schedules_are_refused():
    optimizer = optim.SGD(leaves((2,)))
    for make, error, text in ((lambda: optim.StepLR(optimizer, 0), ValueError, 'step_size: expected at least 1, got 0'),
                              (lambda: optim.CosineAnnealingLR(optimizer, 0), ValueError, 'T_max: expected at least 1'),
                              (lambda: optim.LinearLR(optimizer, 0.0), ValueError, '0 < start_factor <= 1'),
                              (lambda: optim.ExponentialLR(0.1, 0.9), TypeError, 'ExponentialLR: expected an optimizer, got')):
        with pytest.raises(error, match=text):
            make()


# ---- states, hooks and averages as in PyTorch ----------------------------------------------------------------------------

@pytest.mark.parametrize('name, settings', [
    ('Adam', dict(amsgrad=True)), ('SGD', dict(momentum=0.9)), ('SGD', {}), ('RMSprop', dict(momentum=0.5)), ('Adagrad', {}),
    ('Adadelta', {}), ('Adamax', {}), ('Rprop', {})], ids=str)
def test_states_have_the_form_of_torch(torch, name, settings):
    mine = leaves((3, 4), (5,), (2,))
    twins = [torch.tensor(x.numpy().astype('d'), requires_grad=True) for x in mine]
    ours, theirs = (getattr(one, name)([{'params': tensors[:2]}, {'params': tensors[2:], 'lr': 0.02}], lr=0.1, **settings)
                    for one, tensors in ((optim, mine), (torch.optim, twins)))
    assert set(ours.state_dict()) == {'state', 'param_groups'} and not ours.state_dict()['state']
    train(torch, ours, theirs, mine, twins, 3)
    found, want = ours.state_dict(), theirs.state_dict()
    assert [group['params'] for group in found['param_groups']] == [group['params'] for group in want['param_groups']]
    for group, twin in zip(found['param_groups'], want['param_groups'], strict=True):
        for key in group.keys() & twin.keys():
            assert group[key] == twin[key], key
    for i, moments in want['state'].items():
        for key, moment in moments.items():
            if moment is None or key == 'step':
                assert key != 'step' or int(moment) == found['state'][i]['step']
            elif key in found['state'][i]:
                close(found['state'][i][key].numpy(), moment.numpy())
        assert len(found['state'][i].keys() & moments.keys()) >= (name != 'SGD' or bool(settings))
    second = getattr(optim, name)([{'params': mine[:2]}, {'params': mine[2:]}], lr=1.0, **settings)
    second.load_state_dict(found)
    assert second.param_groups[1]['lr'] == 0.02 and second.count[0] == 3
    assert all((a.numpy() == b.numpy()).all() for one, other in zip(second.state.values(), ours.state.values(), strict=True)
               for a, b in zip([*one.values()][1:], [*other.values()][1:], strict=True))
    with pytest.raises(ValueError, match='expected groups of .1. Tensors, got .2, 1.; the parameters differ'):
        getattr(optim, name)(mine[:1], lr=1.0, **settings).load_state_dict(found)


def test_states_of_earlier_versions_are_loaded():
    tensors = leaves((2,), (3,))
    optimizer = optim.Adam(tensors, 0.1, (0.8, 0.9))
    values = {'m.0': np.ones(2, np.float32), 'm.1': np.zeros(3, np.float32),
              'v.0': np.full(2, 4, np.float32), 'v.1': np.full(3, 2, np.float32)}
    optimizer.load_state_dict({'step': 7, 'state': values, 'param_groups': [
        {'lr': 0.25, 'weight_decay': 0.5, 'beta1': 0.7, 'beta2': 0.99, 'eps': 1e-3}]})
    assert optimizer.count[0] == 7 and optimizer.param_groups[0]['betas'] == (0.7, 0.99) and optimizer.lr == 0.25
    assert optimizer.state[tensors[0]]['exp_avg'].tolist() == [1, 1]
    assert optimizer.state_dict()['state'][1]['exp_avg_sq'].tolist() == [2, 2, 2]


def test_hooks_are_called_around_a_step():
    x, = leaves((2,))
    optimizer, calls = optim.SGD([x], 0.5), []
    before = optimizer.register_step_pre_hook(lambda *all: calls.append(('before', *all)))
    optimizer.register_step_post_hook(lambda *all: calls.append(('after', x.tolist())))
    x.grad = [1.0, 1.0]
    start = x.tolist()
    optimizer.step()
    assert calls[0] == ('before', optimizer, (optimizer,), {}) and len(calls) == 2
    assert calls[1][1] == [np.float32(a) - np.float32(0.5) for a in start]
    before.remove()
    assert optimizer.step(lambda: 3.0) == 3.0 and len(calls) == 3
    optimizer.register_step_pre_hook(lambda optimizer, args, named: ((optimizer, lambda: 4.0), {}))
    assert optimizer.step() == 4.0
    other = copy.deepcopy((x, optimizer))[1]
    other.step()
    assert len(calls) == 4
    lbfgs = optim.LBFGS([x])
    lbfgs.register_step_post_hook(lambda *all: calls.append(all))
    x.grad = [0.0, 0.0]
    lbfgs.step(lambda: (x * x).sum())
    assert len(calls) == 5


def test_averages_of_models_are_torchs(torch):
    import pyops.optim.swa_utils as ours
    theirs = torch.optim.swa_utils
    rng = np.random.default_rng(0)
    batches = [rng.standard_normal((6, 4)).astype(np.float32) for _ in range(3)]
    start = {'0.weight': rng.standard_normal((3, 4)), '0.bias': rng.standard_normal(3)}

    def run(library, swa, tensor, **settings):
        kinds = library.nn
        model = kinds.Sequential(kinds.Linear(4, 3), kinds.BatchNorm1d(3))
        model.load_state_dict({name: tensor(value) for name, value in start.items()}, strict=False)
        averaged, optimizer = swa.AveragedModel(model, **settings), library.optim.SGD(model.parameters(), lr=0.5)
        schedule, rates = swa.SWALR(optimizer, 0.1, 2, 'linear'), []
        for x in batches:
            optimizer.zero_grad()
            ((model(tensor(x)) - 0.5) ** 3).mean().backward()
            optimizer.step()
            averaged.update_parameters(model)
            schedule.step()
            rates.append(optimizer.param_groups[0]['lr'])
        kept = [*averaged.parameters(), *averaged.buffers()]
        kept = [np.array(one.detach().numpy()) for one in kept]
        swa.update_bn([(tensor(x), 0) for x in batches], averaged)
        return [*kept, *(np.array(one.numpy()) for one in averaged.module[1].buffers()), np.array(rates),
                averaged.eval()(tensor(batches[0])).detach().numpy()]
    for make in (lambda swa: {}, lambda swa: dict(use_buffers=True, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9)),
                 lambda swa: dict(avg_fn=swa.get_swa_avg_fn()), lambda swa: dict(avg_fn=swa.get_ema_avg_fn(0.5))):
        found = run(pyops, ours, Tensor, **make(ours))
        want = run(torch, theirs, lambda x: torch.tensor(x, dtype=torch.float32), **make(theirs))
        for i, (one, other) in enumerate(zip(found, want, strict=True)):
            if one.dtype.kind == 'f' or 'use_buffers' not in make(ours):        # PyTorch averages counts of batches, too
                np.testing.assert_allclose(one, other, 2e-5, 2e-5, err_msg=str(i))


def test_averages_are_refused_for_other_models_and_settings():
    from pyops import nn
    from pyops.optim import swa_utils
    model, optimizer = nn.Linear(2, 2), optim.SGD(leaves((2,)), 0.1)
    for call, text in (
            (lambda: swa_utils.AveragedModel(model, avg_fn=max, multi_avg_fn=max), 'expected avg_fn or multi_avg_fn, got both'),
            (lambda: swa_utils.AveragedModel(model).update_parameters(nn.Linear(3, 2)), 'got one of other shapes'),
            (lambda: swa_utils.get_ema_multi_avg_fn(2), 'decay: expected 0 to 1, got 2'),
            (lambda: swa_utils.SWALR(optimizer, 0.1, anneal_strategy='log'), "expected 'cos' or 'linear'"),
            (lambda: swa_utils.SWALR(optimizer, 0.1, -1), 'anneal_epochs: expected a whole number'),
            (lambda: swa_utils.SWALR(optimizer, [0.1, 0.2]), 'swa_lr: expected one number, or 1')):
        with pytest.raises(ValueError, match=text):
            call()
    schedule = swa_utils.SWALR(optimizer, 0.5, 0)
    schedule.step()
    again = swa_utils.SWALR(optimizer, 0.2, 4)
    again.load_state_dict(schedule.state_dict())
    assert optimizer.lr == 0.5 and again.swa_lrs == [0.5] and again.last_epoch == 1
