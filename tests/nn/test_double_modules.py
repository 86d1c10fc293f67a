"""Modules and optimizers of float64: values, gradients and steps are PyTorch's in float64."""
import copy
import pickle

import numpy as np
import pytest
from arrays import close, same
from places import on_the_cpu

import pyops
from pyops import functional as F
from pyops import nn, optim
from pyops.autograd import Tensor

pytestmark = on_the_cpu
RTOL = 1e-12            # some hundred terms, of which each is rounded by 2^-53
RNG = np.random.default_rng(0)

# class, its arguments, the shape of x
LAYERS = [
    ('Linear', (4, 3), (2, 4)), ('LayerNorm', (4,), (2, 4)), ('BatchNorm1d', (4,), (5, 4)), ('BatchNorm2d', (3,), (5, 3, 2, 2)),
    ('Conv2d', (3, 4, 3), (2, 3, 6, 6)), ('Conv1d', (3, 4, 3), (2, 3, 6)), ('Conv3d', (2, 3, 2), (2, 2, 4, 4, 4)),
    ('ConvTranspose2d', (3, 4, 3), (2, 3, 6, 6)), ('GroupNorm', (2, 4), (2, 4, 5)), ('RMSNorm', (4,), (2, 4)),
    ('PReLU', (), (2, 3)),
    ('ReLU', (), (2, 3)), ('GELU', (), (2, 3)), ('SiLU', (), (2, 3)), ('MaxPool2d', (2,), (2, 3, 4, 4)),
    ('AvgPool2d', (2,), (2, 3, 4, 4)), ('LSTM', (3, 4), (5, 2, 3)), ('GRU', (3, 4), (5, 2, 3)), ('RNN', (3, 4), (5, 2, 3)),
    ('LSTMCell', (3, 4), (2, 3)), ('GRUCell', (3, 4), (2, 3)), ('TransformerEncoderLayer', (8, 2, 16, 0.0), (5, 2, 8)),
]


def double(x, requires_grad=False):
    return Tensor(x, requires_grad, dtype='float64')


def first(y):
    return y[0] if isinstance(y, tuple) else y


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def twin_of(torch, module, twin):
    state = {name: torch.tensor(value.numpy().copy()) for name, value in module.state_dict().items()}
    twin.load_state_dict(state, strict=False)
    return twin


@pytest.mark.parametrize('name, args, shape', LAYERS, ids=[name for name, *_ in LAYERS])
def test_layers_of_float64_have_values_and_gradients_of_torch(torch, name, args, shape):
    module = getattr(nn, name)(*args).double()
    twin = twin_of(torch, module, getattr(torch.nn, name)(*args).double())
    x = RNG.standard_normal(shape)
    mine, theirs = double(x, True), torch.tensor(x, requires_grad=True)
    y, want = first(module(mine)), first(twin(theirs))
    assert y.dtype == np.float64
    dy = RNG.standard_normal(y.shape)
    y.backward(double(dy))
    want.backward(torch.tensor(dy))
    close(y.numpy(), want.detach().numpy(), RTOL)
    close(mine.grad.numpy(), theirs.grad.numpy(), RTOL)
    of = dict(twin.named_parameters())
    for path, parameter in module.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == np.float64
        close(parameter.grad.numpy(), of[path].grad.numpy(), RTOL)
    for path, buffer in module.named_buffers():
        if path.startswith('running'):
            close(buffer.numpy(), twin.get_buffer(path).numpy(), RTOL)


def test_a_module_is_converted_and_converted_back():
    model, x = network(), RNG.standard_normal((5, 3))
    before = model(x).numpy()
    (model(x) ** 2).sum().backward()
    gradients = [p.grad.numpy().copy() for p in model.parameters()]
    assert model.double() is model and model.params.values.dtype == np.float64
    y = model(x)                            # arrays of floats are converted to the dtype of the parameters
    assert y.dtype == np.float64 and model.state_dict()['0.weight'].dtype == np.float64
    close(y.numpy(), before, 1e-6)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        same(parameter.grad.numpy(), gradient.astype(np.float64))
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        same(one(x).numpy(), y.numpy())
    model.zero_grad()
    assert not model.params.grads.any()
    assert model.float() is model and model[0].weight.dtype == np.float32
    same(model(x).numpy(), before)


def test_a_dtype_is_an_argument_of_layers_and_parameters():
    layer = nn.Linear(3, 2, dtype=pyops.float64)
    assert layer.weight.dtype == np.float64 and nn.BatchNorm1d(3, dtype='float64').running_mean.dtype == np.float64
    same(layer.weight.numpy(), layer.weight.numpy().astype(np.float32).astype(np.float64))       # drawn as float32
    assert nn.Parameter(double([1.0])).dtype == np.float64 and nn.Parameter([1.0]).dtype == np.float32
    assert network().to(layer.weight)[0].bias.dtype == np.float64
    mixed = nn.Sequential(nn.Linear(3, 3), layer)
    assert [p.dtype.name for p in mixed.parameters()] == ['float32'] * 2 + ['float64'] * 2


@pytest.mark.parametrize('call', [
    lambda: network().half(), lambda: nn.Linear(3, 2, dtype='float16'), lambda: network().bfloat16(),
    lambda: pyops.ones(3).to('float16'), lambda: pyops.zeros(3, dtype='bfloat16'), lambda: pyops.ones(3).half(),
    lambda: pyops.ones(3).bfloat16()])
def test_sixteen_bits_are_refused_with_what_to_do(call):
    with pytest.raises(TypeError, match="float16: arrays are float32, float64, int32 or bool; .* device.precision = 'bf16'"):
        call()


def test_the_dtype_of_ml_dtypes_is_refused_as_well():
    """Once it is imported, numpy knows the name, too."""
    ml_dtypes = pytest.importorskip('ml_dtypes', reason='ml_dtypes is not installed: pip install ml_dtypes')
    for dtype in ml_dtypes.bfloat16, 'bfloat16':
        for call in network().to, pyops.ones(3).to, lambda dtype: pyops.zeros(3, dtype=dtype):
            with pytest.raises(TypeError, match='bfloat16: arrays are float32, float64, int32 or bool; .*'):
                call(dtype)


def test_other_dtypes_of_modules_are_refused():
    with pytest.raises(TypeError, match='Sequential.to: dtype: expected float32 or float64, got int32'):
        network().to(np.int32)


def test_gradcheck_takes_a_module_of_float64():
    assert pyops.gradcheck(network().double(), [double(RNG.standard_normal((5, 3)))])


OPTIMIZERS = [('SGD', dict(lr=0.1)), ('SGD', dict(lr=0.1, momentum=0.9, weight_decay=0.1, dampening=0.3)),
              ('SGD', dict(lr=0.1, momentum=0.9, nesterov=True)), ('Adam', dict(lr=0.01)),
              ('Adam', dict(lr=0.01, amsgrad=True, weight_decay=0.1)), ('AdamW', {}), ('RMSprop', {}), ('Adagrad', {})]


@pytest.mark.parametrize('name, settings', OPTIMIZERS)
def test_steps_in_float64_are_those_of_torch(torch, name, settings):
    x, target = RNG.standard_normal((6, 3)), RNG.standard_normal((6, 2))
    model = network().double()
    twin = twin_of(torch, model, torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double())
    mine = getattr(optim, name)(model.parameters(), **settings)
    theirs = getattr(torch.optim, name)(twin.parameters(), **settings)
    for step in range(4):
        mine.zero_grad()
        theirs.zero_grad()
        F.mse_loss(model(double(x)), double(target)).backward()
        torch.nn.functional.mse_loss(twin(torch.tensor(x)), torch.tensor(target)).backward()
        if step == 2:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            close(norm.numpy(), torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1).numpy().astype(np.float32))
        mine.step()
        theirs.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        close(one.numpy(), other.detach().numpy(), RTOL)


def test_an_optimizer_clips_in_float64_and_refuses_parameters_that_were_converted():
    model = network().double()
    optimizer = optim.SGD(model.parameters(), 1.0, max_norm=0.1)
    before = {name: p.numpy().copy() for name, p in model.named_parameters()}
    (model(RNG.standard_normal((5, 3))) * 10).sum().backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
    norm = np.sqrt(sum((g * g).sum() for g in gradients.values()))
    optimizer.step()
    close(optimizer.norm, np.array([norm], np.float32))
    for name, p in model.named_parameters():
        close(p.numpy(), before[name] - gradients[name] * 0.1 / norm, 1e-6)
    model.float()
    with pytest.raises(RuntimeError, match='0.weight was converted to float32 later; create a new optimizer'):
        optimizer.step()
    with pytest.raises(TypeError, match='Muon: expected parameters of float32'):
        optim.Muon(network().double().parameters())
