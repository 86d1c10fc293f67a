"""Calls as they are written for PyTorch give PyTorch's values and gradients, or are refused."""
import numpy as np
import pytest
from arrays import close

from pyops import functional as F
from pyops import nn
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
