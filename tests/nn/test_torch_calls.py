"""Calls as they are written for PyTorch give PyTorch's values and gradients, or are refused."""
import copy

import numpy as np
import pytest
from arrays import close

import pyops
from pyops import functional as F
from pyops import ndarray, nn
from pyops.autograd import Tensor

RNG = np.random.default_rng(0)
LABELS = np.array([2, 0, -100, 1])


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def alike(torch, ours, theirs, *arrays):
    """Compare values and gradients of two functions of these arrays, for a random gradient of the result."""
    mine = [Tensor(x, requires_grad=True) for x in arrays]
    twins = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in arrays]
    y, want = ours(*mine), theirs(*twins)
    assert y.shape == tuple(want.shape)
    dy = normal(*y.shape)
    y.backward(dy)
    want.backward(torch.tensor(dy, dtype=torch.float64))
    close(y.numpy(), want.detach().numpy())
    for one, twin in zip(mine, twins, strict=True):
        close(one.grad.numpy(), twin.grad.numpy())


@pytest.mark.parametrize('kind', ['CrossEntropyLoss', 'NLLLoss'])
def test_the_first_argument_of_a_loss_of_classes_is_the_weight(torch, kind):
    x, weight = normal(4, 3), np.abs(normal(3))
    twin_weight, labels = torch.tensor(weight).double(), torch.tensor(LABELS)
    alike(torch, lambda x: getattr(nn, kind)(weight)(x, LABELS),
          lambda x: getattr(torch.nn, kind)(twin_weight)(x, labels), x)
    name = {'CrossEntropyLoss': 'cross_entropy', 'NLLLoss': 'nll_loss'}[kind]
    for reduction in ('sum', 'none'):
        options = dict(ignore_index=2, reduction=reduction)
        alike(torch, lambda x, options=options: getattr(F, name)(x, LABELS.clip(0), weight, **options),
              lambda x, options=options: getattr(torch.nn.functional, name)(x, labels.clamp(min=0), twin_weight, **options), x)


@pytest.mark.parametrize('options', [
    ((), {}), ((None, 0.0, True), {}),
    ((np.tri(4, 4, 1, bool), 0.0, False), dict(scale=0.3)), ((), dict(scale=2.0, is_causal=True))])
def test_attention_takes_the_arguments_of_torch_by_position(torch, options):
    args, named = options
    twins = [torch.tensor(x) if isinstance(x, np.ndarray) else x for x in args]
    alike(torch, lambda *qkv: F.scaled_dot_product_attention(*qkv, *args, **named),
          lambda *qkv: torch.nn.functional.scaled_dot_product_attention(*qkv, *twins, **named),
          normal(2, 4, 3), normal(2, 4, 3), normal(2, 4, 5))


def test_attention_shares_heads_of_key_and_value(torch):
    alike(torch, lambda *qkv: F.scaled_dot_product_attention(*qkv, enable_gqa=True),
          lambda *qkv: torch.nn.functional.scaled_dot_product_attention(*qkv, enable_gqa=True),
          normal(2, 6, 4, 3), normal(2, 2, 5, 3), normal(2, 2, 5, 3))
    with pytest.raises(ValueError, match='enable_gqa: expected heads in axis -3'):
        F.scaled_dot_product_attention(normal(2, 3, 4, 3), normal(2, 2, 4, 3), normal(2, 2, 4, 3), enable_gqa=True)


def test_attention_drops_weights():
    weights = F.scaled_dot_product_attention(normal(40, 5), normal(40, 5), np.eye(40, dtype=np.float32), None, 0.5).numpy()
    whole = weights != 0
    assert 0.4 < whole.mean() < 0.6
    assert (F.scaled_dot_product_attention(normal(3, 5), normal(4, 5), normal(4, 2), dropout_p=1.0).numpy() == 0).all()


# ---- devices, dtypes, modules ----------------------------------------------------------------------------------------

@pytest.mark.parametrize('make', [Tensor, ndarray.array])
def test_to_takes_names_of_devices_dtypes_and_arrays(make):
    x = make(normal(2, 3), device='cpu')
    assert x.to('cpu') is x and x.to(ndarray.cpu()) is x and x.to(pyops.float32) is x and x.to(x) is x and x.cpu() is x
    assert x.to(device='cpu', dtype='float64').dtype == x.to('cpu', pyops.float64, True).dtype == np.float64
    assert x.to(make(np.arange(3))).dtype == pyops.int32 and x.to('cpu', copy=True) is not x
    for call, error, text in ((lambda: x.to('tpu'), TypeError, 'tpu'),
                              (lambda: x.to('cpu:1'), ValueError, 'device: expected one of'),
                              (lambda: x.to(), TypeError, 'to: expected a dtype, a device or an array')):
        with pytest.raises(error, match=text):
            call()


def test_a_conversion_keeps_the_gradient():
    x = Tensor(normal(3), requires_grad=True)
    (x.to('cpu', 'float64') * 2).sum().backward()
    assert (x.grad.numpy() == 2).all()


def small():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model.eval()
    return model


def test_a_module_stays_on_its_device_and_in_float32():
    model = small()
    assert model.to('cpu') is model.cpu() is model.float() is model.to(pyops.float32) is model.to(Tensor(normal(1))) is model
    for call in (model.double, lambda: model.to('float64')):
        with pytest.raises(TypeError, match='Sequential has float32 parameters, got float64'):
            call()
    with pytest.raises(RuntimeError, match=r'Sequential is on .*; call pyops.use_gpu\(\)'):
        model.to(ndarray.numpy_device())


def test_hooks_of_a_module_see_and_replace_inputs_and_outputs():
    model, x, seen = small(), normal(5, 3), []
    first, want = model[0], model(x).numpy()
    hooks = [first.register_forward_pre_hook(lambda module, inputs: seen.append((module, inputs))),
             first.register_forward_hook(lambda module, inputs, y: seen.append((module, inputs, y)))]
    assert (model(x).numpy() == want).all()
    assert seen[0] == (first, (seen[1][1][0],)) and seen[1][0] is first and seen[1][2].shape == (5, 4)
    for hook in hooks:
        hook.remove()
    hooks = [first.register_forward_pre_hook(lambda module, inputs: inputs[0] * 2),
             model.register_forward_hook(lambda module, inputs, y: y + 1)]
    assert len(seen) == 2
    rest = nn.Sequential(*model.layers[1:]).eval()
    close(model(x).numpy(), rest(first.forward(Tensor(2 * x))).numpy() + 1)
    for hook in hooks:
        hook.remove()
    assert (model(x).numpy() == want).all()


def test_hooks_of_named_arguments_and_of_modules_that_are_hooks():
    class Scaled(nn.Module):
        def forward(self, x, scale=1.0):
            return x * scale

    module, x = Scaled(), Tensor(normal(3))
    module.register_forward_pre_hook(lambda module, inputs, named: (inputs, {'scale': 2 * named['scale']}), with_kwargs=True)
    module.register_forward_hook(lambda module, inputs, named, y: y + named['scale'], with_kwargs=True)
    close(module(x, scale=3.0).numpy(), 6 * x.numpy() + 6)
    twin = copy.deepcopy(module)
    close(twin(x, scale=3.0).numpy(), 6 * x.numpy() + 6)
    counted = nn.Linear(2, 2)
    module.register_forward_hook(counted)
    assert module.parameters() == [] and counted.root() is counted


def test_members_by_name():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module('first', nn.Linear(3, 4))
            self.register_module('norm', nn.BatchNorm1d(4))
            self.register_parameter('scale', nn.Parameter(np.ones(4)))
            self.blocks = [nn.Sequential(nn.Linear(4, 4)), nn.ReLU()]

        def extra_repr(self):
            return 'extra'

    model = Model()
    assert sorted(dict(model.named_parameters())) == ['blocks.0.0.bias', 'blocks.0.0.weight', 'first.bias', 'first.weight',
                                                      'norm.bias', 'norm.weight', 'scale']
    assert model.get_submodule('blocks.0.0') is model.blocks[0][0] and model.get_submodule('') is model
    assert model.get_parameter('blocks.0.0.weight') is model.blocks[0][0].weight and model.get_parameter('scale') is model.scale
    assert model.get_buffer('norm.running_mean') is model.norm.running_mean
    assert all(one is two for one, two in zip(model.buffers(), (model.norm.running_mean, model.norm.running_var), strict=True))
    assert repr(model).startswith('Model(extra\n  (first): Linear(3, 4)')
    for call, error, text in (
            (lambda: model.get_submodule('blocks.2'), AttributeError, 'blocks.2: Model has no such module'),
            (lambda: model.get_parameter('first'), AttributeError, 'first: Model has no such parameter'),
            (lambda: model.get_buffer('scale'), AttributeError, 'scale: Model has no such buffer'),
            (lambda: model.add_module('a.b', nn.ReLU()), KeyError, 'expected a name without a point'),
            (lambda: model.add_module('training', nn.ReLU()), KeyError, 'training: Model has an attribute of this name'),
            (lambda: model.add_module('second', np.ones(3)), TypeError, 'second: expected a Module, got ndarray'),
            (lambda: model.register_parameter('b', nn.ReLU()), TypeError, 'b: expected a Parameter, got ReLU'),
            (lambda: small().add_module('relu', nn.ReLU()), KeyError, "'relu': expected '3': Sequential names its modules")):
        with pytest.raises(error, match=text):
            call()
    layers = nn.Sequential(nn.Linear(3, 4))
    layers.add_module('1', nn.ReLU())
    assert len(layers) == 2 and (layers(normal(2, 3)).numpy() >= 0).all()


def test_inputs_and_targets_by_name():
    x, y = normal(4, 3), normal(4, 3)
    assert (nn.ReLU()(input=x).numpy() == x.clip(0)).all()
    assert nn.MSELoss()(input=x, target=y).item() == nn.MSELoss()(x, target=y).item() == nn.MSELoss()(x, y).item()
    assert nn.CrossEntropyLoss()(input=x, target=LABELS).item() == nn.CrossEntropyLoss()(x, LABELS).item()
