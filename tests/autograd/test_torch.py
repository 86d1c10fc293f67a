"""pyops.torch: its operators equal PyTorch's functions in values and gradients, also compiled, and copy no tensor."""
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

torch = pytest.importorskip('torch', reason='torch is not installed: pip install torch')

import pyops.torch as pt  # noqa: E402  needs torch
from pyops import backend, ops  # noqa: E402
from pyops.formats import FormatError, parse  # noqa: E402
from pyops.plan import Plan  # noqa: E402

F = torch.nn.functional
has_compiler = pytest.mark.skipif(not shutil.which('g++'), reason='torch.compile needs g++: apt install g++')


def randn(*shape, grad=True):
    return torch.randn(*shape).requires_grad_(grad)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def assert_equal(ours, theirs, inputs):
    """Compare two functions of the inputs, and the gradients of those that require one, for a random upstream gradient."""
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    y, want = ours(*inputs), theirs(*inputs)
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
    dy = torch.randn_like(want)
    gradients, wanted = (torch.autograd.grad(result, leaves, dy) for result in (y, want))
    for gradient, want in zip(gradients, wanted, strict=True):
        assert want.abs().max() > 1e-4
        torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-5)


# ---- the same as PyTorch's functions, in the arguments of ours --------------------------------------------------------------

def torch_loss(x, weight, labels, bias=None, ignore_index=-100, label_smoothing=0.0):
    logits = F.linear(x, weight, bias)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten().long(), None, ignore_index=ignore_index,
                           label_smoothing=label_smoothing)


def torch_gru(x, w_ih, w_hh, b_ih, b_hh, h0=None, lengths=None):
    h0 = x.new_zeros(x.shape[1], w_hh.shape[1]) if h0 is None else h0
    h = torch._VF.gru(x, h0[None], (w_ih, w_hh, b_ih, b_hh), True, 1, 0.0, False, False, False)[0]
    return h if lengths is None else h * (torch.arange(len(x))[:, None] < lengths)[..., None]


def torch_attention(q, k, v, heads, lengths=None, causal=False):
    def split(x):
        return x.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
    mask = None if lengths is None else (torch.arange(len(k)) < lengths[:, None])[:, None, None]
    if mask is not None and causal:
        mask = mask & torch.ones(len(q), len(k), dtype=torch.bool).tril()
    y = F.scaled_dot_product_attention(*map(split, (q, k, v)), mask, is_causal=causal and mask is None)
    return y.permute(2, 0, 1, 3).flatten(2)


def loss_inputs(V=9, D=5, dtype=torch.int64):
    labels = torch.tensor([[3, -100, 8], [0, 1, -100]], dtype=dtype)
    return randn(2, 3, D), randn(V, D), labels, randn(V)


def gru_inputs(T=6, B=3, I=4, H=5):
    return randn(T, B, I), randn(3 * H, I), randn(3 * H, H), randn(3 * H), randn(3 * H), randn(B, H)


def attention_inputs(Tq=5, Tk=5, B=3, D=8):
    return randn(Tq, B, D), randn(Tk, B, D), randn(Tk, B, D), 2


LENGTHS = torch.tensor([5, 1, 3])
CASES = {
    'loss': (pt.linear_cross_entropy, torch_loss, loss_inputs),
    'loss without bias': (pt.linear_cross_entropy, torch_loss, lambda: loss_inputs(dtype=torch.int32)[:3]),
    'smoothed loss': (pt.linear_cross_entropy, torch_loss, lambda: (*loss_inputs(), 8, 0.2)),
    'gru': (pt.gru, torch_gru, gru_inputs),
    'gru without h0': (pt.gru, torch_gru, lambda: gru_inputs()[:5]),
    'gru with lengths': (pt.gru, torch_gru, lambda: (*gru_inputs(), LENGTHS)),
    'attention': (pt.attention, torch_attention, attention_inputs),
    'causal attention': (pt.attention, torch_attention, lambda: (*attention_inputs(), None, True)),
    'attention with lengths': (pt.attention, torch_attention, lambda: (*attention_inputs(4), LENGTHS)),
    'causal attention with lengths': (pt.attention, torch_attention, lambda: (*attention_inputs(), LENGTHS.int(), True)),
}


@pytest.mark.parametrize('name', CASES)
def test_values_and_gradients_equal_pytorch(name):
    ours, theirs, inputs = CASES[name]
    inputs = list(inputs())
    if name == 'smoothed loss':
        inputs[2] = inputs[2].clamp(min=0)              # 8 is ignored here
    assert_equal(ours, theirs, inputs)


@pytest.mark.parametrize('name', ['loss', 'gru with lengths', 'attention'])
def test_operands_with_any_strides_equal_pytorch(name):
    ours, theirs, inputs = CASES[name]
    inputs = [x.detach().clone().mT.contiguous().mT.requires_grad_() if isinstance(x, torch.Tensor) and x.ndim > 1
              and x.is_floating_point() else x for x in inputs()]
    assert any(not x.is_contiguous() for x in inputs if isinstance(x, torch.Tensor))
    assert_equal(ours, theirs, inputs)


def test_fake_quantize_equals_casts_of_pytorch_and_passes_the_gradient_on():
    x = randn(40, 64)
    for fmt, dtype in (('bf16', torch.bfloat16), ('fp16', torch.float16), ('e4m3', torch.float8_e4m3fn),
                       ('e5m2', torch.float8_e5m2)):
        y, want = pt.fake_quantize(x, fmt), x.detach().to(dtype).float()
        assert torch.equal(y, want) and not torch.equal(y, x), fmt
    dy = torch.randn(40, 64)
    blocks = pt.fake_quantize(x, parse('mxfp4', scale='even'), 0)
    assert torch.equal(torch.autograd.grad(blocks, x, dy)[0], dy) and blocks.unique().numel() < 100
    assert torch.equal(blocks, pt.fake_quantize(x, 'mxfp4:scale=even', 0))
    noise = [pt.fake_quantize(x, 'hifp8:round=stochastic', step=step, seed=7) for step in (1, 1, 2)]
    assert torch.equal(noise[0], noise[1]) and not torch.equal(noise[0], noise[2])
    with pytest.raises(FormatError, match='mxfp3'):
        pt.fake_quantize(x, 'mxfp3')


@pytest.mark.parametrize('op,arguments', [
    (pt._fake_quantize, lambda: (randn(3, 64), 'mxfp8', -1, 0, 0)),
    (pt._linear_cross_entropy, lambda: (*(loss_inputs()[i] for i in (0, 1, 3, 2)), -100, 0.1, True)),
    (pt._linear_cross_entropy, lambda: (*(loss_inputs()[i].detach() for i in (0, 1, 3, 2)), -100, 0.1, False)),
    (pt._gru, lambda: (*gru_inputs(), LENGTHS)), (pt._gru, lambda: (*gru_inputs()[:5], None, None)),
    (pt._attention, lambda: (*attention_inputs()[:3], LENGTHS, 2, True))],
    ids=['formats', 'loss', 'evaluation', 'gru', 'gru without h0', 'attention'])
def test_operators_pass_the_checks_of_pytorch(op, arguments):
    tests = 'test_schema', 'test_autograd_registration', 'test_faketensor'
    assert set(torch.library.opcheck(op, arguments(), test_utils=tests).values()) == {'SUCCESS'}


@pytest.mark.parametrize('compiler', ['aot_eager', pytest.param('inductor', marks=[pytest.mark.slow, has_compiler])])
def test_a_compiled_model_of_all_operators_has_one_graph_and_the_same_gradients(compiler):
    torch.compiler.reset()
    x, w_ih, w_hh, b_ih, b_hh, h0 = gru_inputs(T=5, H=8)
    weight, labels = randn(9, 8), torch.tensor([[1, -100, 2]] * 5)
    leaves = x, w_ih, w_hh, b_ih, b_hh, h0, weight

    def model(x, w_ih, w_hh, b_ih, b_hh, h0, weight):
        h = pt.gru(torch.tanh(x), w_ih, w_hh, b_ih, b_hh, h0, LENGTHS)
        q, k, v = (h * 2).repeat(1, 1, 3).chunk(3, -1)
        y = pt.attention(q, k, v, 2, LENGTHS, True) + pt.fake_quantize(h, 'mxfp8')
        return pt.linear_cross_entropy(y.relu(), weight, labels, label_smoothing=0.1) * 3
    loss = model(*leaves)
    wanted = torch.autograd.grad(loss, leaves)
    compiled = torch.compile(model, backend=compiler, fullgraph=True)
    got = compiled(*leaves)
    torch.testing.assert_close(got, loss)
    for gradient, want in zip(torch.autograd.grad(got, leaves), wanted, strict=True):
        assert want.abs().max() > 1e-5
        torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*leaves), loss)


def addresses(monkeypatch, op, *names):
    """Record the addresses of the arguments of op.forward by name."""
    found, forward = {}, op.forward

    def watched(self, *arguments, **named):
        found.update({name: x.ctypes.data for name, x in zip(names, arguments, strict=False) if x is not None})
        found.update({name: p.value.ctypes.data for name, p in vars(self).items() if hasattr(p, 'value')})
        return forward(self, *arguments, **named)
    monkeypatch.setattr(op, 'forward', watched)
    return found


def test_kernels_read_the_memory_of_the_tensors(monkeypatch):
    found = addresses(monkeypatch, ops.GRU, 'x', 'h0', 'lengths')
    x, w_ih, w_hh, b_ih, b_hh, h0 = gru_inputs()
    lengths = LENGTHS.int()
    pt.gru(x, w_ih, w_hh, b_ih, b_hh, h0, lengths)
    given = dict(x=x, w_ih=w_ih, w_hh=w_hh, b_ih=b_ih, b_hh=b_hh, h0=h0, lengths=lengths)
    assert found == {name: tensor.data_ptr() for name, tensor in given.items()}

    found = addresses(monkeypatch, ops.Attention, 'q', 'k', 'v')
    qkv = randn(5, 3, 24)
    columns = dict(zip('qkv', qkv.chunk(3, -1), strict=True))
    y = pt.attention(*columns.values(), heads=2)
    assert found == {name: tensor.data_ptr() for name, tensor in columns.items()}
    torch.testing.assert_close(y, torch_attention(*columns.values(), 2))

    found = addresses(monkeypatch, ops.LinearCrossEntropy, 'x', 'labels')
    x, weight, labels, bias = loss_inputs(dtype=torch.int32)
    pt.linear_cross_entropy(x, weight, labels, bias)
    assert found == {name: tensor.data_ptr() for name, tensor in dict(x=x, weight=weight, labels=labels, bias=bias).items()}


def test_evaluation_computes_no_gradients_and_the_same_loss():
    x, weight, labels, bias = loss_inputs()
    loss = pt.linear_cross_entropy(x, weight, labels, bias, label_smoothing=0.1)
    with torch.no_grad():
        again = pt.linear_cross_entropy(x, weight, labels, bias, label_smoothing=0.1)
        plain = pt.linear_cross_entropy(x, weight, labels, bias)
    assert loss.requires_grad and not again.requires_grad
    torch.testing.assert_close(again, loss.detach())
    torch.testing.assert_close(plain, torch_loss(x, weight, labels, bias).detach())
    assert pt.linear_cross_entropy(x, weight, torch.full((2, 3), -100), bias) == 0


@pytest.mark.parametrize('name', ['loss', 'gru', 'attention'])
def test_second_derivatives_are_an_error(name):
    ours, _, inputs = CASES[name]
    inputs = inputs()
    first, = torch.autograd.grad(ours(*inputs).square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match='second derivatives are not implemented|no autograd formula'):
        torch.autograd.grad(first.sum(), inputs[0])


def test_bad_tensors_are_refused_by_name():
    x, weight, labels, bias = loss_inputs()
    with pytest.raises(TypeError, match=r'weight: torch.float64, expected torch.float32; convert it with .float\(\)'):
        pt.linear_cross_entropy(x, weight.double(), labels, bias)
    with pytest.raises(TypeError, match='labels: torch.float32 on cpu, expected int32 or int64'):
        pt.linear_cross_entropy(x, weight, labels.float(), bias)
    with pytest.raises(ValueError, match='label'):
        pt.linear_cross_entropy(x, weight, labels + 9, bias)
    with pytest.raises(ValueError, match='h0: expected shape'):
        pt.gru(*gru_inputs()[:5], randn(3, 6))
    with pytest.raises(ValueError, match='multiple of 3 heads'):
        pt.attention(*attention_inputs()[:3], heads=3)
    with pytest.raises(ValueError, match=r'x: tensor on meta, expected one on the CPU; move it with .cpu\(\)'):
        pt._checked('x', torch.empty(3, device='meta'))
    with Plan(), pytest.raises(RuntimeError, match='fake_quantize: a plan is recording'):
        pt.fake_quantize(x, 'bf16')


def test_tensors_on_the_cpu_are_computed_there_while_a_gpu_is_the_current_device(device):
    x = randn(3, 64)
    with backend.on(device):
        y = pt.fake_quantize(x, 'mxfp8')
    assert torch.equal(y, pt.fake_quantize(x, 'mxfp8')) and isinstance(y.detach().numpy(), np.ndarray)


def test_only_this_module_imports_torch():
    program = 'import sys, pyops.functional, pyops.nn, pyops.ops, pyops.optim, pyops.plan; assert "torch" not in sys.modules'
    subprocess.run([sys.executable, '-c', program], cwd=ROOT, check=True)
    program = ('import sys; sys.modules["torch"] = None\nimport importlib.util as u; find = u.find_spec\n'
               'u.find_spec = lambda name: None if name == "torch" else find(name)\nimport pyops.torch')
    failed = subprocess.run([sys.executable, '-c', program], cwd=ROOT, text=True, capture_output=True)
    assert "the Python package torch is not installed; install it with: " in failed.stderr and "'pyops[torch]'" in failed.stderr
