"""Calls as they are written for PyTorch give PyTorch's values and gradients, or are refused."""
import collections
import copy

import numpy as np
import pytest
from arrays import alike, close
from places import get, put

import pyops
from pyops import functional as F
from pyops import ndarray, nn, optim
from pyops.autograd import Tensor

RNG = np.random.default_rng(0)
LABELS = np.array([2, 0, -100, 1])


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


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


def test_dtypes_of_masks_and_positions_have_the_names_of_torch(torch):
    def program(library, x):
        mask = x > 0
        found = [mask, ~mask, mask & mask, x.isnan(), mask.any(), x.bool(), mask[0], mask.reshape(-1), mask.clone(), x == 0,
                 mask.t(), library.zeros_like(mask), mask.to(library.bool), x.to(mask)]
        others = [mask.float(), mask.to(library.float), mask * 2.0, x.to(library.double), mask.double()]
        ids = [x.argmax(1), x.argsort(-1), x.topk(2)[1], mask.long(), mask.sum(), x.to(library.int64), x.to(library.long)]
        floats = library.float32, library.float32, library.float32, library.float64, library.float64
        return ([y.dtype == library.bool for y in found], [y.tolist() for y in (*found, *others, *ids)],
                [y.dtype == kind for y, kind in zip(others, floats, strict=True)], [y.dtype == library.int64 for y in ids])

    x = normal(3, 4)
    same, values, floats, positions = program(pyops, Tensor(x))
    assert (same, values, floats, positions) == program(torch, torch.tensor(x))
    assert all(same) and all(floats) and all(positions)
    mask = Tensor(x) > 0
    assert mask.to(pyops.bool) is mask and mask.numpy().dtype == np.asarray(mask).dtype == mask.dtype == bool
    plain = ndarray.array(x) > 0
    assert plain.is_mask and plain.dtype == np.float32 and plain.numpy().dtype == bool
    assert plain.to(np.bool_) is plain and plain.to(np.float32).tolist() == (x > 0).astype(float).tolist()
    mask.array[0, 0] = 7                    # numbers again: it is no mask any more
    assert mask.dtype == np.float32
    with pytest.raises(TypeError, match='requires_grad: expected a tensor of floats, got bool'):
        (Tensor(x) > 0).requires_grad_()


@pytest.mark.parametrize('make', [Tensor, ndarray.array])
def test_shapes_and_dtypes_of_another_array(make):
    x, other, mask = make(normal(2, 6)), make(np.arange(12).reshape(3, 4)), make(normal(2, 6)) > 0
    assert x.view_as(other).tolist() == x.reshape_as(other).tolist() == x.numpy().reshape(3, 4).tolist()
    assert x[:, :1].expand_as(x).tolist() == np.broadcast_to(x.numpy()[:, :1], (2, 6)).tolist()
    assert x.type_as(other).tolist() == x.numpy().astype(int).tolist() and other.type_as(x).numpy().dtype == np.float32
    assert x.type_as(mask).numpy().dtype == bool and x.type_as(x) is x and mask.type_as(mask) is mask
    assert [y.is_floating_point() for y in (x, other, mask)] == [True, False, False] and x.element_size() == 4


def test_new_tensors_take_the_name_of_a_device():
    made = [pyops.arange(3, device='cpu'), pyops.tensor([0, 1, 2], device='cpu'), pyops.zeros(3, device='cpu'),
            pyops.full((3,), 1, device='cpu'), pyops.empty(3, device='cpu'), pyops.rand(3, device='cpu')]
    assert all(x.device is ndarray.cpu() for x in made) and made[0].tolist() == made[1].tolist() == [0, 1, 2]


def test_gradients_are_given_by_name_and_start_from_several_outputs(torch):
    def program(autograd, x, weights):
        (x * 2).backward(gradient=weights)
        autograd.backward([x.sum(), (x * x).sum()])
        autograd.backward(x * 3, weights)
        return x.grad.tolist()

    x, weights = normal(3), normal(3)
    found = program(pyops.autograd, Tensor(x, requires_grad=True), Tensor(weights))
    np.testing.assert_allclose(found, program(torch.autograd, torch.tensor(x, requires_grad=True), torch.tensor(weights)),
                               rtol=1e-6)


def test_running_statistics_and_buffers_are_tensors():
    layer, x = nn.BatchNorm1d(3), normal(8, 3)
    layer.register_buffer('table', None)
    layer.register_buffer('other', Tensor(x))
    del layer.other
    assert [name for name, _ in layer.named_buffers()] == list(layer.state_dict())[2:] == [
        'running_mean', 'running_var', 'num_batches_tracked']
    layer.table = Tensor(np.arange(4))
    layer(Tensor(x))
    assert isinstance(layer.running_mean, Tensor) and not layer.running_mean.requires_grad
    close(layer.running_mean.clone().numpy(), 0.1 * x.mean(0))
    state = layer.state_dict()
    assert state['table'].tolist() == [0, 1, 2, 3] and (state['running_var'] == layer.running_var).all()
    twin = nn.BatchNorm1d(3)
    twin.register_buffer('table', Tensor(np.zeros(4, np.int32)))
    twin.load_state_dict(state)
    assert twin.table.tolist() == [0, 1, 2, 3] and (twin.running_mean == layer.running_mean).all()
    twin.running_mean[...] = 0.0
    assert (twin.eval()(Tensor(x)) != layer.eval()(Tensor(x))).any()


def test_a_conversion_keeps_the_gradient():
    x = Tensor(normal(3), requires_grad=True)
    (x.to('cpu', 'float64') * 2).sum().backward()
    assert (x.grad.numpy() == 2).all()


def small():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model.eval()
    return model


def test_a_module_stays_on_its_device():
    model = small()
    assert model.to('cpu') is model.cpu() is model.float() is model.to(pyops.float32) is model.to(Tensor(normal(1))) is model
    if not pyops.default_device().is_host:
        with pytest.raises(TypeError, match='parameters of float64 are on the CPU only'):
            model.double()
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


def test_parameters_and_modules_are_iterators_as_well_as_lists(torch):
    def program(nn, optim):
        model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))
        assert next(model.parameters()) is model[0].weight and next(model.named_parameters())[0] == '0.weight'
        assert next(model.modules()) is model and next(model.children()) is model[0]
        assert next(model.named_children())[0] == '0' and next(model.named_modules()) == ('', model)
        assert next(model.buffers()) is model[1][0].running_mean and next(model.named_buffers())[0] == '1.0.running_mean'
        rest = model.parameters()
        assert next(rest) is model[0].weight and next(rest) is model[0].bias
        sizes = [p.numel() for p in rest]
        assert next(rest, None) is None
        optim.SGD(model.parameters(), 0.1), optim.SGD((p for p in model.parameters()), 0.1)
        names = [name for name, _ in model.named_parameters('net')], [name for name, _ in model.named_parameters(recurse=False)]
        buffers = [name for name, _ in model.named_buffers('net') if 'num_batches' not in name]
        assert list(model.buffers(recurse=False)) == []
        own = [tuple(p.shape) for p in model[0].parameters(recurse=False)], list(model[1].parameters(recurse=False))
        return sizes, sum(p.numel() for p in model.parameters()), names, buffers, own, len(list(model.parameters()))

    assert program(nn, optim) == program(torch.nn, torch.optim)
    found = nn.Linear(3, 4).parameters()
    assert len(found) == 2 and found[1].shape == (4,) and list(found) == list(found) == [*found] == found[:]


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
    assert all(one is two for one, two in zip(model.buffers(), (
        model.norm.running_mean, model.norm.running_var, model.norm.num_batches_tracked), strict=True))
    assert repr(model).startswith('Model(extra\n  (first): Linear(3, 4)')
    for call, error, text in (
            (lambda: model.get_submodule('blocks.2'), AttributeError, 'blocks.2: Model has no such module'),
            (lambda: model.get_parameter('first'), AttributeError, 'first: Model has no such parameter'),
            (lambda: model.get_buffer('scale'), AttributeError, 'scale: Model has no such buffer'),
            (lambda: model.add_module('a.b', nn.ReLU()), KeyError, 'expected a name without a point'),
            (lambda: model.add_module('training', nn.ReLU()), KeyError, 'training: Model has an attribute of this name'),
            (lambda: model.add_module('second', np.ones(3)), TypeError, 'second: expected a Module, got ndarray'),
            (lambda: model.register_parameter('b', nn.ReLU()), TypeError, 'b: expected a Parameter, got ReLU'),
            (lambda: small().add_module('pop', nn.ReLU()), KeyError, 'pop: Sequential has an attribute of this name'),
            (lambda: small().add_module('1', nn.ReLU()), KeyError, '1: Sequential has a member of this name')):
        with pytest.raises(error, match=text):
            call()
    layers = nn.Sequential(nn.Linear(3, 4))
    layers.add_module('1', nn.ReLU())
    assert len(layers) == 2 and (layers(normal(2, 3)).numpy() >= 0).all()


def test_containers_are_sliced_joined_and_named(torch):
    def program(nn, x, ones):
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        part, seen = model[:2], []
        assert type(part) is nn.Sequential and part[0] is model[0] and type(nn.ModuleList([nn.ReLU()])[:1]) is nn.ModuleList
        assert bool((model[2](part(x)) == model(x)).all()) and len(list(part.parameters())) == 2
        seen += [name for name, _ in model.named_parameters()]
        both = part + model[2:]
        assert bool((both(x) == model(x)).all())
        part += nn.Sequential(nn.Tanh())
        seen += [len(part), len(model)]
        named = nn.Sequential(collections.OrderedDict([('fc', nn.Linear(3, 4)), ('act', nn.ReLU())]))
        named.add_module('last', nn.Linear(4, 2))
        assert named.fc is named[0] and named.last is named[-1] and not hasattr(named, 'first')
        named[0] = nn.Linear(3, 4, bias=False)
        named.append(nn.Tanh())
        seen += [name for name, _ in named.named_modules()] + [name for name, _ in named.named_parameters()]
        del named[1]
        seen += [[name for name, _ in named.named_children()], tuple(named(x).shape)]
        values = nn.ParameterList([nn.Parameter(ones), ones])
        table = nn.ParameterDict({'a': nn.Parameter(ones, requires_grad=False)})
        seen += [[name for name, _ in values.named_parameters()], [(name, p.requires_grad) for name, p in table.items()]]
        return seen

    x, ones = normal(5, 3), np.ones(2, np.float32)
    assert program(nn, Tensor(x), Tensor(ones)) == program(torch.nn, torch.tensor(x), torch.tensor(ones))


def test_a_slice_leaves_the_tree_of_its_modules_as_it_is():
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    names = [name for name, _ in model.named_parameters()]
    assert model[1:](normal(2, 4)).shape == (2, 2) and model[1].root() is model
    assert [p.name for p in model.parameters()] == names and len(model.params) == 4

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = model[:1]

    net = Net()
    assert [name for name, _ in net.named_parameters()] == ['features.0.weight', 'features.0.bias']
    assert net.features[0].root() is net and copy.deepcopy(model[:2]).root() is not model


def test_loading_a_state_reports_the_names_that_differ(torch):
    model, twin = small(), torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(isinstance(value, Tensor) and not value.requires_grad for value in state.values())
    state['extra'] = state.pop('2.bias')
    found, want = (one.load_state_dict({name: torch.tensor(value) for name, value in state.items()}, strict=False)
                   for one in (model, twin))
    assert found.missing_keys == ['2.bias'] and found.unexpected_keys == want.unexpected_keys == ['extra']
    assert set(want.missing_keys) - set(found.missing_keys) <= {'1.num_batches_tracked'}
    assert model.load_state_dict(model.state_dict()) == ([], [])


def test_constructors_take_devices_numbers_of_numpy_and_keywords_of_torch():
    layer = nn.Conv2d(np.int64(3), 4, np.int64(3), stride=np.int32(2), padding=1, device='cpu', dtype=pyops.float32)
    assert (layer.kernel_size, layer.stride, layer.padding, layer.dilation) == ((3, 3), (2, 2), (1, 1), (1, 1))
    assert nn.Conv1d(3, 4, 3, padding=1).padding == (1,) and layer(normal(1, 3, 6, 6)).shape == (1, 4, 3, 3)
    weight = nn.Parameter(data=Tensor(normal(2, 3)), requires_grad=False)
    assert weight.shape == (2, 3) and not weight.requires_grad and nn.Parameter(normal(2), False).requires_grad is False
    assert nn.Embedding.from_pretrained(normal(5, 3))(np.array([1])).shape == (1, 3)
    up, x = nn.ConvTranspose2d(3, 2, 3, 2), normal(1, 3, 4, 5)
    assert up(Tensor(x), output_size=(10, 11)).shape == (1, 2, 10, 11)
    for make, error, text in ((lambda: nn.Linear(2, 3, dtype='int32'), TypeError, 'Linear: dtype: expected float32 or float64'),
                              (lambda: nn.Linear(2, 3, device='tpu'), ValueError, 'tpu'),
                              (lambda: nn.Parameter(), TypeError, 'Parameter: expected data, or a shape and an init'),
                              (lambda: nn.Threshold(1.0), TypeError, "Threshold: missing a required argument: 'value'"),
                              (lambda: nn.ReflectionPad2d((1, 2)), ValueError, 'padding: expected an int or 4'),
                              (lambda: nn.ConvTranspose2d(3, 2, 3, 2, output_padding=2)(x), ValueError, 'less than the stride'),
                              (lambda: nn.Conv2d(3, 4, 3, padding_mode='odd'), ValueError, "padding_mode: expected 'zeros'"),
                              (lambda: nn.InstanceNorm2d(3, track_running_stats=True), ValueError, 'expected False, got True')):
        with pytest.raises(error, match=text):
            make()
    assert repr(nn.ELU(0.5)) == 'ELU(alpha=0.5)' and repr(nn.Threshold(0.1, 2)) == 'Threshold(threshold=0.1, value=2)'
    assert repr(nn.Tanh()) == 'Tanh()' and nn.ELU(alpha=0.5, inplace=True).alpha == 0.5


def test_inputs_and_targets_by_name():
    x, y = normal(4, 3), normal(4, 3)
    assert (nn.ReLU()(input=x).numpy() == x.clip(0)).all()
    assert nn.MSELoss()(input=x, target=y).item() == nn.MSELoss()(x, target=y).item() == nn.MSELoss()(x, y).item()
    assert F.cross_entropy(input=x, target=LABELS).item() == F.cross_entropy(x, LABELS).item()
    assert nn.CrossEntropyLoss()(input=x, target=LABELS).item() == nn.CrossEntropyLoss()(x, LABELS).item()


# ---- functions -------------------------------------------------------------------------------------------------------

X = normal(2, 3, 4)
CALLS = {
    'softmax': (lambda F, x: F.softmax(input=x, dim=1), X), 'relu': (lambda F, x: F.relu(x, inplace=False), X),
    'linear': (lambda F, x, w, b: F.linear(input=x, weight=w, bias=b), X, normal(5, 4), normal(5)),
    'mse': (lambda F, x, y: F.mse_loss(input=x, target=y), X, normal(2, 3, 4)),
    'kl_div': (lambda F, x, y: F.kl_div(input=x, target=y.exp(), reduction='sum'), X, normal(2, 3, 4)),
    'layer_norm': (lambda F, x: F.layer_norm(x, (4,)), X), 'layer_norm-axes': (lambda F, x: F.layer_norm(x, (3, 4)), X),
    'layer_norm-weight': (lambda F, x, w, b: F.layer_norm(x, (3, 4), w, b, 1e-3), X, normal(3, 4), normal(3, 4)),
    'layer_norm-bias': (lambda F, x, b: F.layer_norm(x, [4], bias=b), X, normal(4)),
    'pad': (lambda F, x: F.pad(input=x, pad=(1, 2), mode='constant', value=0.5), X),
    'pad-reflect': (lambda F, x: F.pad(x, (3, 1), mode='reflect'), X),
    'pad-circular': (lambda F, x: F.pad(x, (1, 4), 'circular'), X),
    'pad-replicate': (lambda F, x: F.pad(x, (7, 1), 'replicate'), X),
    'cosine': (lambda F, x, y: F.cosine_similarity(x1=x, x2=y, dim=-1), X, normal(2, 3, 4)),
    'leaky': (lambda F, x: F.leaky_relu(x, 0.2, False), X), 'elu': (lambda F, x: F.elu(input=x, alpha=0.5, inplace=False), X),
    'conv2d': (lambda F, x, w: F.conv2d(x, w, padding=1), normal(3, 6, 5), normal(4, 3, 3, 3)),
    'conv1d': (lambda F, x, w: F.conv1d(input=x, weight=w), normal(3, 6), normal(4, 3, 3)),
    'max_pool2d': (lambda F, x: F.max_pool2d(x, 2), normal(3, 6, 4)),
    'avg_pool2d': (lambda F, x: F.avg_pool2d(x, 3, 1), normal(3, 6, 4)),
    'max_pool1d': (lambda F, x: F.max_pool1d(x, 2), normal(3, 6)),
    'avg_pool1d': (lambda F, x: F.avg_pool1d(x, 3, 1), normal(3, 6)),
    'adaptive': (lambda F, x: F.adaptive_avg_pool2d(x, (2, 3)), normal(3, 6, 4)),
    'adaptive-uneven': (lambda F, x: F.adaptive_avg_pool2d(x, (4, 3)), normal(3, 6, 4)),
}


@pytest.mark.parametrize('name', CALLS)
def test_functions_take_the_arguments_of_torch(torch, name):
    call, *arrays = CALLS[name]
    alike(torch, lambda *x: call(F, *x), lambda *x: call(torch.nn.functional, *x), *arrays)


def test_logarithm_of_one_more_and_tangent(torch):
    x = np.concatenate([normal(50) * 10.0 ** RNG.integers(-30, -1, 50), [0, -0.9, 3, 1e30, -0.25]]).astype(np.float32)
    for name in ('log1p', 'tan'):
        inputs = x if name == 'log1p' else x[np.abs(x) < 1]
        alike(torch, getattr(F, name), getattr(torch, name), inputs)
        want = getattr(np, name)(inputs.astype(np.float64))
        for make in (Tensor, ndarray.array):
            y = getattr(np, name)(make(inputs))
            assert type(y) is type(make(inputs))
            assert (np.abs(y.numpy() - want) <= 3e-7 * np.abs(want)).all()
    assert F.log1p([-1.0, np.inf]).tolist() == [-np.inf, np.inf]


def test_one_hot_finds_the_number_of_classes(torch):
    labels = np.array([[1, 0], [3, 1]])
    assert (F.one_hot(labels).numpy() == torch.nn.functional.one_hot(torch.tensor(labels)).numpy()).all()
    for call, error, text in (
            (lambda: F.one_hot(np.zeros(0, np.int32)), ValueError, 'num_classes: expected a number for no labels'),
            (lambda: F.pad(X, (1, 2), 0.5), ValueError, 'pad: mode: expected one of constant, .* pass value by name'),
            (lambda: F.pad(X, (4, 0), 'reflect'), ValueError, 'expected widths of at most 3 for axis 2'),
            (lambda: F.pad(X, (4, 0), 'circular', 1.0), ValueError, 'value: expected None with mode'),
            (lambda: F.relu(X, True), TypeError, 'inplace: expected a Tensor, which changes, got ndarray'),
            (lambda: F.dropout(X, inplace=True), TypeError, 'inplace: expected a Tensor'),
            (lambda: F.layer_norm(X, normal(4), normal(4)), TypeError, 'layer_norm: normalized_shape: expected the sizes'),
            (lambda: F.layer_norm(X, 4, normal(3)), ValueError, r'weight: expected shape \(4,\), got \(3,\)'),
            (lambda: F.layer_norm(X, (4, 3)), ValueError, r'x: expected shape \(..., 4, 3\), got \(2, 3, 4\)'),
            (lambda: F.softmax(X, axis=1, dim=1), TypeError, 'got axis and also dim')):
        with pytest.raises(error, match=text):
            call()


@pytest.mark.parametrize('name', ['gelu', 'layer_norm', 'batch_norm', 'batch_norm-eval', 'group_norm', 'dropout'])
def test_functions_of_float64_are_computed_in_float64(torch, name):
    x, w, b, dy = (RNG.standard_normal(shape) for shape in ((3, 4, 5), (4,), (4,), (3, 4, 5)))
    calls = {
        'gelu': lambda F, x, w, b, *_: F.gelu(x, approximate='tanh'),
        'layer_norm': lambda F, x, w, b, *_: F.layer_norm(x.transpose(1, 2), (4,), w, b).transpose(1, 2),
        'batch_norm': lambda F, x, w, b, *running: F.batch_norm(x, *running, w, b, True),
        'batch_norm-eval': lambda F, x, w, b, *running: F.batch_norm(x, *running, w, b),
        'group_norm': lambda F, x, w, b, *_: F.group_norm(x, 2, w, b), 'dropout': lambda F, x, w, b, *_: F.dropout(x, 0.25)}
    mine = [Tensor(one, dtype='float64', requires_grad=True) for one in (x, w, b)]
    twins = [torch.tensor(one, requires_grad=True) for one in (x, w, b)]
    statistics = Tensor(np.zeros(4), dtype='float64'), Tensor(np.ones(4), dtype='float64')
    twin_statistics = torch.zeros(4).double(), torch.ones(4).double()
    y = calls[name](F, *mine, *statistics)
    y.backward(Tensor(dy, dtype='float64'))
    assert y.dtype == mine[0].grad.dtype == np.float64
    if name == 'dropout':
        kept = y.numpy() != 0
        assert 0 < kept.mean() < 1
        close(y.numpy(), np.where(kept, x / 0.75, 0), 1e-13)
        close(mine[0].grad.numpy(), np.where(kept, dy / 0.75, 0), 1e-13)
        return
    want = calls[name](torch.nn.functional, *twins, *twin_statistics)
    want.backward(torch.tensor(dy))
    close(y.numpy(), want.detach().numpy(), 1e-12)
    for one, twin in zip(mine, twins, strict=True):
        if twin.grad is not None:
            close(one.grad.numpy(), twin.grad.numpy(), 1e-12)
    for one, twin in zip(statistics, twin_statistics, strict=True):
        close(one.numpy(), twin.numpy(), 1e-12)


# ---- layers ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('options', [dict(affine=False), dict(track_running_stats=False),
                                     dict(affine=False, track_running_stats=False, eps=1e-3)], ids=str)
@pytest.mark.parametrize('training', [True, False])
def test_batch_norm_without_parameters_or_running_statistics(torch, options, training):
    layer, twin = (module.BatchNorm2d(num_features=3, **options).train(training) for module in (nn, torch.nn))
    twin.double()
    alike(torch, layer, twin, normal(4, 3, 2, 5))
    state = {name: one.numpy() for name, one in twin.state_dict().items()}
    assert layer.state_dict().keys() == state.keys()
    for name, one in layer.state_dict().items():
        if one.dtype == np.float32:             # `alike` calls the layer more often than its twin
            close(one, state[name])
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5)
    y, ctx = layer.forward(put(x))
    leaf = Tensor(x, requires_grad=True)
    layer(leaf).backward(dy)
    close(get(layer.backward(put(dy), ctx)), leaf.grad.numpy())


def test_stacks_take_their_layer_by_name():
    encoder = nn.TransformerEncoder(encoder_layer=nn.TransformerEncoderLayer(4, 2, 8), num_layers=2)
    decoder = nn.TransformerDecoder(decoder_layer=nn.TransformerDecoderLayer(4, 2, 8), num_layers=2, norm=None)
    assert decoder.eval()(normal(3, 2, 4), encoder.eval()(normal(5, 2, 4))).shape == (3, 2, 4)


@pytest.mark.parametrize('make', [lambda nn: nn.Conv2d(3, 4, 3), lambda nn: nn.MaxPool2d(2), lambda nn: nn.AvgPool2d(2, 1),
                                  lambda nn: nn.AdaptiveAvgPool2d(2)])
def test_layers_of_images_take_one_image(make):
    layer, x = make(nn), normal(3, 6, 5)
    y = layer(x)
    assert y.shape[0] == (4 if isinstance(layer, nn.Conv2d) else 3) and (y.numpy() == layer(x[None]).numpy()[0]).all()


@pytest.mark.parametrize('kind', ['RNN', 'LSTM', 'GRU'])
@pytest.mark.parametrize('options', [{}, dict(batch_first=True, bidirectional=True)], ids=str)
def test_recurrent_layers_take_one_sequence(torch, kind, options):
    layer, twin = getattr(nn, kind)(4, 5, 2, **options), getattr(torch.nn, kind)(4, 5, 2, **options).double()
    twin.load_state_dict({name: torch.tensor(one).double() for name, one in layer.state_dict().items()})
    states = [normal(4 if options else 2, 5) for _ in range(1 + (kind == 'LSTM'))]

    def of(x, *given):
        return x, given if len(given) > 1 else given[0]
    alike(torch, lambda *x: F.cat([y.reshape(-1) for y in flat(layer(*of(*x)))]),
          lambda *x: torch.cat([y.reshape(-1) for y in flat(twin(*of(*x)))]), normal(6, 4), *states)
    y, want = layer(normal(6, 4)), twin(torch.zeros(6, 4).double())
    assert [one.shape for one in flat(y)] == [tuple(one.shape) for one in flat(want)]
    with pytest.raises(ValueError, match='state: expected shape'):
        layer(Tensor(normal(6, 4)), *(Tensor(normal(2, 1, 5)) for _ in states))


def test_sequences_are_padded_and_packed(torch):
    def program(rnn, tensor, array):
        given = [tensor(one) for one in (np.ones((2, 3)), 2 * np.ones((4, 3)), 3 * np.ones((1, 3)))]
        padded = rnn.pad_sequence(given, batch_first=True, padding_value=-1.0)
        packed = rnn.pack_sequence(given, enforce_sorted=False)
        y, lengths = rnn.pad_packed_sequence(packed, True, -1.0)
        rows = rnn.unpad_sequence(y, lengths, True)
        return [array(one).tolist() for one in (padded, rnn.pad_sequence(given), y, lengths, *rows)], len(packed.data)

    assert program(nn.utils.rnn, Tensor, np.asarray) == program(torch.nn.utils.rnn, torch.tensor, np.asarray)
    with pytest.raises(ValueError, match='lengths: expected falling numbers'):
        nn.utils.rnn.pack_padded_sequence(normal(3, 2, 4), [2, 3])


@pytest.mark.parametrize('batch_first', [False, True])
def test_attention_takes_one_sequence(torch, batch_first):
    layer, twin = (module.MultiheadAttention(8, 2, batch_first=batch_first) for module in (nn, torch.nn))
    twin.load_state_dict({name: torch.tensor(one) for name, one in layer.state_dict().items()})
    twin.double()
    padding = np.array([False, True, False, False])
    for options in ({}, dict(need_weights=False), dict(key_padding_mask=padding), dict(average_attn_weights=False)):
        twins = {name: torch.tensor(one) if isinstance(one, np.ndarray) else one for name, one in options.items()}
        alike(torch, lambda *x, options=options: F.cat([y.reshape(-1) for y in layer(*x, **options) if y is not None]),
              lambda *x, twins=twins: torch.cat([y.reshape(-1) for y in twin(*x, **twins) if y is not None]),
              normal(5, 8), normal(4, 8), normal(4, 8))
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first).eval()
    x = normal(5, 8)
    close(encoder(x).numpy(), encoder(np.expand_dims(x, 1 - batch_first)).numpy().reshape(5, 8))


def test_parameters_have_the_order_of_torch(torch):
    def names(nn):
        return [[name for name, _ in model.named_parameters()] for model in (
            nn.TransformerDecoderLayer(8, 2, 16), nn.TransformerEncoderLayer(8, 2, 16), nn.Transformer(8, 2, 1, 1, 16),
            nn.MultiheadAttention(8, 2, kdim=3, vdim=4))]

    assert names(nn) == names(torch.nn)

    def states(nn):
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 3), nn.LSTM(3, 4, bidirectional=True))
        model[3].flatten_parameters()
        return ([name for name in model.state_dict() if 'num_batches' not in name],
                [[tuple(one.shape) for one in layer] for layer in model[3].all_weights], nn.MultiheadAttention(8, 2).head_dim)

    assert states(nn) == states(torch.nn)
    mask = [one.Transformer.generate_square_subsequent_mask(3).tolist() for one in (nn, torch.nn)]
    assert mask[0] == mask[1]


INITIALISERS = {
    'zeros_': (), 'ones_': (), 'constant_': (0.3,), 'eye_': (), 'uniform_': (-1.0, 3.0), 'normal_': (1.0, 2.0),
    'trunc_normal_': (0.0, 1.0, -0.5, 1.0), 'xavier_uniform_': (2.0,), 'xavier_normal_': (), 'kaiming_uniform_': (5 ** 0.5,),
    'kaiming_normal_': (0, 'fan_out', 'relu'), 'orthogonal_': (3.0,)}


@pytest.mark.parametrize('name', INITIALISERS)
def test_initialisers_set_tensors_as_those_of_torch(torch, name):
    arguments, layer = INITIALISERS[name], nn.Linear(80, 60)
    assert getattr(nn.init, name)(layer.weight, *arguments) is layer.weight
    alone = getattr(nn.init, name)(Tensor(np.zeros((60, 80)), requires_grad=True), *arguments)
    want = getattr(torch.nn.init, name)(torch.empty(60, 80), *arguments).numpy()
    nn.Sequential(layer).parameters()           # the values stay when the tree is complete
    for found in (layer.weight.numpy(), alone.numpy()):
        spread = want.std() * 5 / want.size ** 0.5              # five standard deviations of a mean
        assert abs(found.mean() - want.mean()) <= spread * 2 ** 0.5 + 1e-7 and abs(found.std() - want.std()) <= spread + 1e-9
        assert abs(found.min() - want.min()) < 0.25 * np.ptp(want) + 1e-7
        if name == 'orthogonal_':
            close(found @ found.T, 9 * np.eye(60))
        if not want.std() or name == 'eye_':
            assert (found == want).all()
    if name in ('uniform_', 'orthogonal_'):
        one, two = (getattr(nn.init, name)(nn.Linear(3, 4).weight, *arguments, generator=np.random.default_rng(1)).numpy()
                    for _ in range(2))
        assert (one == two).all()


def test_names_of_modules_of_torch_can_be_imported():
    from pyops.nn.functional import relu
    from pyops.nn.utils.rnn import pad_sequence
    from pyops.optim.lr_scheduler import StepLR
    assert relu is F.relu and nn.functional is F and StepLR is optim.StepLR and pad_sequence is nn.utils.rnn.pad_sequence
    assert nn.init.calculate_gain('leaky_relu', 0.2) == (2 / 1.04) ** 0.5
    with pytest.raises(ValueError, match='calculate_gain: nonlinearity: expected one of linear'):
        nn.init.calculate_gain('gelu')
    with pytest.raises(ValueError, match='eye_: expected a matrix'):
        nn.init.eye_(Tensor(normal(2)))


@pytest.mark.parametrize('kind', ['RNNCell', 'LSTMCell', 'GRUCell'])
def test_cells_take_one_input(kind):
    cell, x = getattr(nn, kind)(4, 5), normal(4)
    for one, batch in zip(flat(cell(x)), flat(cell(x[None])), strict=True):
        assert one.shape == (5,) and (one.numpy() == batch.numpy()[0]).all()


def flat(value):
    return [one for part in value for one in flat(part)] if isinstance(value, tuple | list) else [value]


@pytest.mark.parametrize(('make', 'text'), [
    (lambda: nn.Conv2d(3, 4, 3, stride=2, padding='same'), "Conv2d: padding: 'same' requires stride 1"),
    (lambda: nn.Conv2d(3, 4, 3, padding='foo'), "Conv2d: padding: expected .* got 'foo'"),
    (lambda: nn.Conv2d(3, 4, 0), 'Conv2d: kernel_size: expected a whole number of at least 1'),
    (lambda: nn.Conv2d(3, 4, 3, stride=0), 'Conv2d: stride: expected a whole number of at least 1'),
    (lambda: nn.Conv1d(3, 4, 3, padding='foo'), "Conv1d: padding: expected .* got 'foo'"),
    (lambda: nn.MaxPool2d(0), 'MaxPool2d: kernel_size: expected a whole number of at least 1'),
    (lambda: nn.MaxPool1d(2, padding=2), 'MaxPool1d: padding: expected at most half of the window'),
    (lambda: nn.AvgPool2d(2, stride=0), 'AvgPool2d: stride: expected a whole number of at least 1'),
    (lambda: nn.AvgPool1d(0), 'AvgPool1d: kernel_size: expected a whole number of at least 1'),
    (lambda: nn.LSTM(3, 0), 'LSTM: hidden_size: expected 1 or more, got 0'),
    (lambda: nn.GRUCell(0, 3), 'GRUCell: input_size: expected 1 or more, got 0'),
    (lambda: nn.RNN(3, 4, dropout=2.0), 'RNN: dropout: expected 0 to 1, got 2.0'),
    (lambda: nn.MultiheadAttention(8, 0), 'embed_dim 8 must be a multiple of num_heads 0'),
    (lambda: nn.Conv3d(3, 4, 2, stride=0), 'Conv3d: stride: expected a whole number of at least 1, or three, got 0'),
    (lambda: nn.Conv3d(3, 4, 2, padding_mode='reflect'), "Conv3d: padding_mode: expected 'zeros', got 'reflect'")])
def test_constructors_check_their_arguments(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_layers_of_sequences_take_settings_as_tuples():
    layer = nn.Conv1d(3, 4, (3,), stride=(2,), padding=(1,), dilation=(1,))
    assert layer.weight.shape == (4, 3, 3) and layer(normal(2, 3, 8)).shape == (2, 4, 4)
    assert nn.MaxPool1d((2,), (1,))(normal(2, 3, 8)).shape == nn.AvgPool1d((2,), (1,))(normal(2, 3, 8)).shape == (2, 3, 7)


def test_gradients_are_cleared_with_the_argument_of_torch():
    layer = nn.Linear(3, 2)
    optimizer = optim.SGD(layer.parameters(), lr=0.1)
    for clear in (layer.zero_grad, optimizer.zero_grad):
        for none in (True, False):
            layer(normal(2, 3)).sum().backward()
            assert (layer.weight.grad.numpy() != 0).any()
            clear(set_to_none=none)
            assert (layer.weight.grad.numpy() == 0).all()


def test_functions_in_place_change_their_argument():
    x = Tensor([[-1.0, 2.0], [3.0, -4.0]])
    view = x[0]
    assert F.relu_(x) is x and x.tolist() == [[0, 2], [3, 0]] and view.tolist() == [0, 2]
    assert F.leaky_relu_(x.neg_(), negative_slope=0.5) is x and x.tolist() == [[0, -1], [-1.5, 0]]
    assert F.dropout(x, 1.0, inplace=True) is x and F.hardtanh(x, 1, 2, inplace=True).tolist() == [[1, 1], [1, 1]]
    with pytest.raises(RuntimeError, match='in-place change of a leaf'):
        F.elu_(Tensor([1.0], requires_grad=True))
    with pytest.raises(TypeError, match='inplace: expected a Tensor, which changes, got list'):
        F.relu_([1.0])


def test_slopes_of_rrelu_are_drawn_in_training():
    layer, x = nn.RReLU(0.1, 0.2), Tensor(np.full(500, -1.0, np.float32), requires_grad=True)
    pyops.seed(3)
    y = layer(x)
    y.sum().backward()
    assert (y.numpy() <= -0.1).all() and (y.numpy() > -0.2).all() and y.numpy().std() > 0.02
    assert (x.grad.numpy() == -y.numpy()).all() and abs(layer.eval()(x).numpy() + 0.15).max() < 1e-7
    drawn = [F.rrelu(x, training=True, generator=np.random.default_rng(4)).numpy() for _ in range(2)]
    assert (drawn[0] == drawn[1]).all()


def test_sparse_and_dirac_initial_values(torch):
    w = nn.init.sparse_(Tensor(np.ones((10, 40))), 0.25, 2.0, generator=np.random.default_rng(0)).numpy()
    assert ((w == 0).sum(0) == 3).all() and 1.7 < w[w != 0].std() < 2.3
    for shape, groups in (((4, 2, 3), 1), ((6, 3, 3, 2), 2), ((4, 4, 2, 3, 3), 1)):
        want = torch.nn.init.dirac_(torch.empty(shape), groups)
        assert (nn.init.dirac_(Tensor(np.ones(shape)), groups).numpy() == want.numpy()).all()
    for call, text in ((lambda: nn.init.sparse_(Tensor([1.0]), 0.1), 'sparse_: expected a matrix'),
                       (lambda: nn.init.sparse_(Tensor([[1.0]]), 2), 'sparsity: expected 0 to 1, got 2'),
                       (lambda: nn.init.dirac_(Tensor([[1.0]])), 'dirac_: expected filters'),
                       (lambda: F.grid_sample(X, X), 'grid_sample: expected x'),
                       (lambda: F.grid_sample(normal(1, 1, 2, 2), normal(1, 1, 1, 2), 'bicubic'), 'mode: expected one of bil'),
                       (lambda: F.affine_grid(normal(1, 3, 3), (1, 1, 2, 2)), 'affine_grid: expected size'),
                       (lambda: F.conv_transpose3d(X, X), 'conv_transpose3d: expected x'),
                       (lambda: F.conv_transpose3d(normal(1, 1, 2, 2, 2), normal(1, 1, 1, 1, 1), output_padding=1), 'depth'),
                       (lambda: F.adaptive_avg_pool3d(X, 2), 'adaptive_avg_pool3d: expected x'),
                       (lambda: nn.ConvTranspose3d(1, 1, 1, padding='same'), "expected ints, got 'same'")):
        with pytest.raises(ValueError, match=text):
            call()
