"""Names of the needle course (Carnegie Mellon's deep learning systems) mean what they mean there."""
import math

import numpy as np
import pytest
from arrays import close

import pyops
from pyops import data, init, ndarray, nn, optim
from pyops import functional as F
from pyops.autograd import Tensor

X = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)


def test_initial_values_with_a_shape_are_tensors():
    for made, value in ((init.zeros(3, 4), 0), (init.ones(3, 4, requires_grad=True), 1), (init.constant(3, 4, c=2.5), 2.5),
                        (init.constant((3, 4)), 1), (init.zeros_like(Tensor(X)), 0), (init.ones_like(Tensor(X)), 1)):
        assert isinstance(made, Tensor) and made.dtype == np.float32 and (made.numpy() == np.full((3, 4), value)).all()
    assert init.rand(3, 4, low=2, high=3).numpy().min() >= 2 and init.randn(3, 4).shape == (3, 4)
    assert init.randb(50, p=0.0).numpy().sum() == 0 and init.randb(3, 4).dtype == bool
    assert init.one_hot(4, Tensor([1, 3])).tolist() == [[0, 1, 0, 0], [0, 0, 0, 1]]
    # without a shape they are the initialisers of Parameters
    assert (init.constant(3)(None, (2,)) == 3).all() and (init.zeros()(None, (2,)) == 0).all()
    with pytest.raises(AttributeError, match="has no attribute 'rands'"):
        init.rands(3)


@pytest.mark.parametrize('make, scale', [
    (init.xavier_uniform, math.sqrt(6 / 500)), (init.xavier_normal, math.sqrt(2 / 500)),
    (init.kaiming_uniform, math.sqrt(6 / 200)), (init.kaiming_normal, math.sqrt(2 / 200))])
def test_initial_values_have_the_spread_of_their_fans(make, scale):
    rng = np.random.default_rng(0)
    for values, factor in ((make(200, 300, generator=rng), 1), (make(200, 300, shape=(20, 10, 300), generator=rng), 1),
                           (make(200, 300, gain=3.0, generator=rng), 3 if 'xavier' in make.__name__ else 3 / math.sqrt(2))):
        assert values.numpy().size == 60000 and isinstance(values, Tensor)
        found = np.abs(values.numpy()).max() if 'uniform' in make.__name__ else values.numpy().std()
        assert abs(found / (factor * scale) - 1) < 0.02
    assert make(2, 3, device=pyops.cpu(), requires_grad=True).requires_grad
    with pytest.raises(ValueError, match='expected fan_in, fan_out and nonlinearity relu, got .2, 3. and tanh'):
        make(2, 3, nonlinearity='tanh')
    with pytest.raises(TypeError, match='got a shape, a device or a generator without fan_in and fan_out'):
        make(shape=(3, 4))


def test_functions_of_the_course():
    assert [piece.tolist() for piece in F.split(Tensor(X), axis=1)] == [X[:, i].tolist() for i in range(4)]
    assert F.one_hot(4, Tensor([1])).tolist() == F.one_hot(Tensor([1]), 4).tolist() == [[0, 1, 0, 0]]
    x = Tensor(X)
    assert x.realize_cached_data() is x.cached_data is x.array
    assert ndarray.array(X).pad(axes=((1, 0), (0, 2))).shape == (4, 6)
    assert type(ndarray.rand(2, 3)) is type(ndarray.randn(2, 3)) is ndarray.NDArray and ndarray.randb(5).is_mask


def test_convolutions_of_the_course_have_its_axes(torch):
    rng = np.random.default_rng(1)
    images, filters = rng.standard_normal((2, 7, 6, 3)), rng.standard_normal((3, 3, 3, 5))
    mine = [Tensor(a, requires_grad=True) for a in (images, filters)]
    twins = [torch.tensor(a, requires_grad=True) for a in (images, filters)]
    y = F.conv(*mine, stride=2, padding=1)
    want = torch.conv2d(twins[0].permute(0, 3, 1, 2), twins[1].permute(3, 2, 0, 1), stride=2, padding=1).permute(0, 2, 3, 1)
    dy = rng.standard_normal(y.shape)
    y.backward(dy)
    want.backward(torch.tensor(dy))
    for one, other in zip((y, *[a.grad for a in mine]), (want.detach(), *[a.grad for a in twins]), strict=True):
        close(one.numpy(), other.numpy())


@pytest.mark.parametrize('size, stride, bias', [(3, 1, True), (5, 2, False)])
def test_the_layer_conv_is_padded_and_has_the_weights_of_the_course(torch, size, stride, bias):
    layer = nn.Conv(3, 4, size, stride=stride, bias=bias)
    assert layer.weight.shape == (size, size, 3, 4)
    x = np.random.default_rng(2).standard_normal((2, 3, 9, 8)).astype(np.float32)
    weight = torch.tensor(layer.weight.numpy().transpose(3, 2, 0, 1).copy(), requires_grad=True)
    bias = torch.tensor(layer.bias.numpy(), requires_grad=True) if bias else None
    want = torch.conv2d(torch.tensor(x), weight, bias, stride, size // 2)
    y = layer(Tensor(x))
    dy = np.random.default_rng(3).standard_normal(y.shape).astype(np.float32)
    y.backward(dy)
    want.backward(torch.tensor(dy))
    close(y.numpy(), want.detach().numpy())
    close(layer.weight.grad.numpy(), weight.grad.numpy().transpose(2, 3, 1, 0))
    if bias is not None:
        close(layer.bias.grad.numpy(), bias.grad.numpy())
    assert repr(layer) == f'Conv(3, 4, kernel_size={size}{"" if stride == 1 else ", stride=2, bias=False"})'


def test_devices_say_whether_they_exist():
    assert pyops.cpu().enabled() and pyops.all_devices()[0] is pyops.cpu() and pyops.default_device().enabled()
    assert pyops.cuda.is_available() == pyops.cuda().enabled()
    if not pyops.cuda().enabled():
        assert str(pyops.cuda()) == 'pyops.cuda()'
        with pytest.raises(pyops.errors.UserError, match='CUDA|GPU'):
            pyops.zeros(3, device=pyops.cuda())


def test_an_optimiser_clips_and_clears_its_gradients():
    model = nn.Linear(4, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    (model(Tensor(X)) * 100).sum().backward()
    before = optimizer.clip_grad_norm(max_norm=0.5)
    assert before.item() > 1 and abs(math.hypot(*[p.grad.norm().item() for p in model.parameters()]) - 0.5) < 1e-4
    optimizer.reset_grad()
    assert not any(p.grad.numpy().any() for p in model.parameters())


def test_devices_make_arrays():
    device = pyops.default_device()
    for made, shape in ((device.zeros(2, 3), (2, 3)), (device.ones((2, 3)), (2, 3)), (device.full((2,), 2.5), (2,)),
                        (device.empty((3, 1)), (3, 1)), (device.rand(2, 3, dtype='float32'), (2, 3)), (device.randn(4), (4,)),
                        (device.randb(5, p=0.5), (5,)), (device.one_hot(4, np.array([1, 2]), dtype='float32'), (2, 4))):
        assert type(made) is ndarray.NDArray and made.shape == shape and made.device is device
    assert device.ones(2).tolist() == [1, 1] and device.full((1,), 2.5).tolist() == [2.5]
    assert device.one_hot(3, np.array([2])).tolist() == [[0, 0, 1]] and device.zeros(1).tolist() == [0]


def test_layers_and_functions_have_the_names_of_the_course():
    for layer, twin in ((nn.BatchNorm1d(dim=4), nn.BatchNorm1d(4)), (nn.LayerNorm1d(dim=4, eps=1e-5), nn.LayerNorm(4))):
        close(layer(Tensor(X)).numpy(), twin(Tensor(X)).numpy())
    with pytest.raises(TypeError, match='multiple values|takes'):
        nn.BatchNorm1d(4, dim=4, num_features=4)
    branch = nn.Linear(4, 4)
    assert nn.Residual(branch).fn is branch
    close(F.logsoftmax(Tensor(X)).numpy(), F.log_softmax(Tensor(X), 1).numpy())
    pair = F.make_tuple(Tensor(X), Tensor(2 * X))
    assert F.tuple_get_item(pair, 1) is pair[1]


def test_data_has_the_names_of_the_course():
    class Doubled(data.Dataset):
        def __init__(self, transforms):
            super().__init__(transforms)

        def __getitem__(self, index):
            return self.apply_transforms(np.float32([index, index])), index

        def __len__(self):
            return 3
    calls = []
    dataset = Doubled([lambda x: (calls.append(1), 2 * x)[1]])
    rows, labels = next(iter(data.DataLoader(dataset=dataset, batch_size=3, shuffle=False)))
    assert rows.tolist() == [[0, 0], [2, 2], [4, 4]] and labels.tolist() == [0, 1, 2] and len(calls) == 3
    assert data.NDArrayDataset(X, np.arange(3))[1][1] == 1
    batches = data.batchify(np.arange(10), 2)
    for i, steps in ((0, 3), (3, 1)):
        x, y = data.get_batch(batches, i, 3, device=pyops.default_device(), dtype='float32')
        assert x.tolist() == batches[i:i + steps].tolist() and y.tolist() == batches[i + 1:i + steps + 1].reshape(-1).tolist()
        assert x.dtype == y.dtype == np.float32
    with pytest.raises(ValueError, match='get_batch: i: expected 0 to 3, before the last row, got 4'):
        data.get_batch(batches, 4, 3)
