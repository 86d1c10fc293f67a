"""pyops.inspect.torch: the hooks save exactly the tensors that a PyTorch model computes, and do not change its results."""
import copy
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
from conftest import ROOT

from pyops.errors import UserError
from pyops.inspect.logs import Logs

torch = pytest.importorskip('torch', reason='torch is not installed: pip install torch')
F, nn = torch.nn.functional, torch.nn

from pyops.inspect.torch import attach  # noqa: E402  needs torch

T, B, E, H = 5, 3, 8, 2


class Block(nn.Module):
    """One sublayer of each kind, time first by default."""

    def __init__(self, need_weights=True, batch_first=False):
        super().__init__()
        self.self_attention = nn.MultiheadAttention(E, H, batch_first=batch_first)
        self.up, self.down = nn.Linear(E, 12), nn.Linear(12, E, bias=False)
        self.need_weights = need_weights

    def forward(self, x, memory=None):
        memory = x if memory is None else memory
        y = x + self.self_attention(x, memory, memory, need_weights=self.need_weights)[0]
        return y + self.down(F.relu_(self.up(y)))           # in place, as in many models


class Core(nn.Module):
    """A pure attention module like Megatron's: input (T, B, heads, C), output (T, B, heads*C), a submodule for softmax."""

    class FusedSoftmax(nn.Module):
        def forward(self, scores):
            return scores.softmax(-1)

    def __init__(self):
        super().__init__()
        self.scale_mask_softmax = self.FusedSoftmax()

    def forward(self, query, key, value, attention_mask=None):
        p = self.scale_mask_softmax(torch.einsum('tbhc,sbhc->bhts', query, key) / query.shape[-1] ** 0.5)
        return torch.einsum('bhts,sbhc->tbhc', p, value).flatten(2)


class ColumnParallelLinear(nn.Module):
    """Like Megatron's: returns (output, bias)."""

    def __init__(self, I, O):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(O, I)), nn.Parameter(torch.randn(O))

    def forward(self, input_):
        return input_ @ self.weight.T, self.bias


class Megatron(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.core_attention, self.proj = ColumnParallelLinear(E, 3 * E), Core(), ColumnParallelLinear(E, E)

    def forward(self, x):
        mixed, bias = self.qkv(x)
        q, k, v = (mixed + bias).unflatten(-1, (3, H, E // H)).unbind(2)
        y, bias = self.proj(input_=self.core_attention(q, k, attention_mask=None, value=v))
        return y + bias


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def trained(model, *inputs, **kwargs):
    """Run forward and backward; return the output and all gradients."""
    model.zero_grad()
    y = model(*inputs, **kwargs)
    (y * data(*y.shape, seed=9)).sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def saved(folder, step=0):
    """Return {(layer, name): array} of a step, and check that the names are unique."""
    entries = [entry for entry in Logs(folder).entries if entry.step == step]
    result = {(entry.layer, entry.name): entry.load() for entry in entries}
    assert len(result) == len(entries)
    return result


def close(got, expected):
    np.testing.assert_allclose(got, expected.detach().float().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('batch_first', [False, True])
@pytest.mark.parametrize('need_weights', [True, False])
def test_the_saved_tensors_of_a_transformer_block_are_exact_and_its_results_unchanged(tmp_path, need_weights, batch_first):
    torch.manual_seed(0)
    model = Block(need_weights, batch_first)
    x = data(T, B, E)
    inputs = (x.transpose(0, 1) if batch_first else x).detach().requires_grad_()
    expected = trained(copy.deepcopy(model), inputs)
    with attach(model, tmp_path) as handle:
        got = trained(model, inputs)
    assert all(map(torch.equal, got, expected)) and handle.close().tensors == len(Logs(tmp_path).entries)
    attention = 'self_attention'
    tensors = saved(tmp_path)
    linear = {'input', 'weight', 'output', 'grad_output', 'grad_input', 'grad_weight'}
    assert {layer: {name for at, name in tensors if at == layer} for layer, _ in tensors} == {
        f'{attention}.in_proj': linear | {'bias', 'grad_bias'}, f'{attention}.out_proj': linear | {'bias', 'grad_bias'},
        'up': linear | {'bias', 'grad_bias'}, 'down': linear, attention: {
            'query', 'key', 'value', 'weights', 'output', 'grad_output', 'grad_query', 'grad_key', 'grad_value'}}

    # the same computation spelled out, with autograd's gradients
    mha, leaf = model.self_attention, {}

    def note(name, tensor):
        tensor.retain_grad()
        leaf[name] = tensor
        return tensor
    x = x.clone().requires_grad_()
    projected = note('in_proj.output', F.linear(x, mha.in_proj_weight, mha.in_proj_bias))
    q, k, v = (note(name, part.unflatten(-1, (H, -1)).clone()) for name, part in
               zip(('query', 'key', 'value'), projected.chunk(3, -1), strict=True))
    p = (torch.einsum('tbhc,sbhc->bhts', q, k) / (E // H) ** 0.5).softmax(-1)
    o = note('output', torch.einsum('bhts,sbhc->tbhc', p, v))
    y = x + F.linear(o.flatten(2), mha.out_proj.weight, mha.out_proj.bias)
    up = note('up.output', F.linear(note('up.input', y.clone()), model.up.weight, model.up.bias))
    down = note('down.output', F.linear(note('down.input', up.relu()), model.down.weight))
    z = y + down
    model.zero_grad()
    weight = data(*z.shape, seed=9) if not batch_first else data(B, T, E, seed=9).transpose(0, 1)
    (z * weight).sum().backward()

    def in_layout(tensor):                                  # the layout in which nn.Linear received it
        return tensor.transpose(0, 1) if batch_first and tensor.dim() == 3 else tensor
    close(tensors[attention, 'weights'], p)
    for name in 'query', 'key', 'value', 'output':
        close(tensors[attention, name], leaf[name])
        close(tensors[attention, f'grad_{name}'], leaf[name].grad)
    close(tensors[f'{attention}.in_proj', 'output'], leaf['in_proj.output'])
    close(tensors[f'{attention}.in_proj', 'grad_output'], leaf['in_proj.output'].grad)
    close(tensors[f'{attention}.in_proj', 'grad_input'], leaf['in_proj.output'].grad @ mha.in_proj_weight)
    close(tensors[f'{attention}.out_proj', 'input'], o.reshape(T * B, E))
    for name, module in ('up', model.up), ('down', model.down), (f'{attention}.in_proj', None):
        parameters = {'weight': mha.in_proj_weight, 'bias': mha.in_proj_bias} if module is None else module._parameters
        for role in ('input', 'output') if module is not None else ():
            close(tensors[name, role], in_layout(leaf[f'{name}.{role}']))
            close(tensors[name, f'grad_{role}'], in_layout(leaf[f'{name}.{role}'].grad))
        for role, parameter in parameters.items():
            if parameter is not None:
                close(tensors[name, role], parameter)
                close(tensors[name, f'grad_{role}'], parameter.grad)


def test_indices_follow_the_forward_pass_and_file_names_the_convention_of_dumps(tmp_path):
    with attach(Block(), tmp_path, layers='up,down,*attention', fmt='mxfp8:scale=rceil') as handle:
        trained(handle.model, data(T, B, E))
    entries = Logs(tmp_path).entries
    assert {(entry.layer, entry.layer_type, entry.index) for entry in entries} == {
        ('self_attention', 'attention', 0), ('up', 'linear', 2), ('down', 'linear', 3)}
    by_name = {(entry.layer, entry.name): entry for entry in entries}
    assert by_name['up', 'input'].file.split('_', 3)[3] == 'linear_L2_forward_mxfp8_input.safetensors'
    assert by_name['up', 'output'].file.split('_', 3)[3] == 'linear_L2_forward_mxfp8_output.safetensors'
    assert str(by_name['up', 'grad_output'].fmt) == 'mxfp8:scale=rceil' and by_name['up', 'output'].fmt is None
    assert by_name['self_attention', 'value'].axis == 0 and by_name['self_attention', 'key'].axis == -1
    assert {entry.origin for entry in entries} == {'torch'}
    order = [entry.operation for entry in sorted(entries, key=lambda entry: entry.counter)]
    assert order == sorted(order, reverse=True)                     # forward, then backward


def test_attention_between_two_sequences_has_two_projections(tmp_path):
    model = Block()
    with attach(model, tmp_path):
        trained(model, data(T, B, E), data(7, B, E, seed=1))
    tensors = saved(tmp_path)
    assert tensors['self_attention', 'key'].shape == (7, B, H, E // H)
    assert tensors['self_attention', 'weights'].shape == (B, H, T, 7)
    assert tensors['self_attention.in_proj', 'weight'].shape == (E, E)
    assert tensors['self_attention.in_proj@1', 'weight'].shape == (2 * E, E)
    parts = [tensors[f'self_attention.in_proj{use}', 'grad_weight'] for use in ('', '@1')]
    close(np.concatenate(parts), model.self_attention.in_proj_weight.grad)


def test_megatron_like_modules(tmp_path):
    torch.manual_seed(1)
    model, x = Megatron(), data(T, B, E)
    expected = trained(copy.deepcopy(model), x)
    with attach(model, tmp_path):
        assert all(map(torch.equal, trained(model, x), expected))
    tensors = saved(tmp_path)
    assert {(layer, len([1 for at, _ in tensors if at == layer])) for layer, _ in tensors} == {
        ('qkv', 7), ('core_attention', 9), ('proj', 8)}             # x requires no gradient, so qkv has no grad_input
    assert tensors['core_attention', 'query'].shape == tensors['core_attention', 'grad_output'].shape == (T, B, H, E // H)
    q, k, v = (tensors['core_attention', name] for name in ('query', 'key', 'value'))
    scores = np.einsum('tbhc,sbhc->bhts', q, k) / (E // H) ** 0.5
    p = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(tensors['core_attention', 'weights'], p, rtol=1e-5)
    np.testing.assert_allclose(tensors['core_attention', 'output'], np.einsum('bhts,sbhc->tbhc', p, v), rtol=1e-4, atol=1e-6)
    close(tensors['qkv', 'grad_weight'], model.qkv.weight.grad)
    assert np.array_equal(tensors['proj', 'grad_input'], tensors['core_attention', 'grad_output'].reshape(T, B, E))


class Fused(nn.Module):
    """A model that calls scaled_dot_product_attention, batch first."""

    def __init__(self, **options):
        super().__init__()
        self.qkv, self.options = nn.Linear(E, 3 * E), options

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, **self.options).transpose(1, 2).flatten(2)


@pytest.mark.parametrize('options', [
    {}, {'is_causal': True}, {'scale': 0.3}, {'attn_mask': torch.arange(T)[:, None] != torch.arange(T) + 1},
    {'attn_mask': data(T, T, seed=3)}], ids=['plain', 'causal', 'scale', 'bool', 'float'])
def test_fused_attention(tmp_path, options):
    torch.manual_seed(2)
    model, x = Fused(**options), data(B, T, E)
    expected = trained(copy.deepcopy(model), x)
    with attach(model, tmp_path, layers='model'):
        assert all(map(torch.equal, trained(model, x), expected))
    tensors = saved(tmp_path)
    assert len(tensors) == 9
    value, output = tensors['model', 'value'], tensors['model', 'output']
    np.testing.assert_allclose(tensors['model', 'weights'].sum(-1), 1, rtol=1e-5)
    np.testing.assert_allclose(np.einsum('bhts,sbhc->tbhc', tensors['model', 'weights'], value), output, rtol=1e-4, atol=1e-6)
    close(output.transpose(1, 0, 2, 3).reshape(B, T, E), expected[0])
    close(tensors['model', 'grad_output'].transpose(1, 0, 2, 3).reshape(B, T, E), data(B, T, E, seed=9))


def test_grouped_query_attention_and_fully_masked_rows(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.kv = nn.Linear(E, E), nn.Linear(E, E)

        def forward(self, x):
            q, kv = self.q(x).unflatten(-1, (4, 2)).transpose(1, 2), self.kv(x).unflatten(-1, (2, 2, 2)).permute(2, 0, 3, 1, 4)
            mask = torch.ones(T, T, dtype=torch.bool).tril(-1)
            return F.scaled_dot_product_attention(q, kv[0], kv[1], mask, enable_gqa=True).transpose(1, 2).flatten(2)

    model = Model()
    with attach(model, tmp_path, layers='model'), torch.no_grad():
        model(data(B, T, E))
    tensors = saved(tmp_path)
    assert tensors['model', 'key'].shape == (T, B, 2, 2) and tensors['model', 'weights'].shape == (B, 4, T, T)
    assert (tensors['model', 'weights'][:, :, 0] == 0).all() and np.isfinite(tensors['model', 'weights']).all()
    np.testing.assert_allclose(tensors['model', 'weights'][:, :, 1:].sum(-1), 1, rtol=1e-5)


# ---- which steps ---------------------------------------------------------------------------------------------------

def steps_of(folder):
    return sorted({entry.step for entry in Logs(folder).entries})


def test_each_training_forward_pass_is_a_step_and_eval_passes_do_not_count(tmp_path):
    model = nn.Linear(E, E)
    with attach(model, tmp_path, steps='1:8:3') as handle:
        for _ in range(8):
            trained(model, data(B, E))
            model.eval()
            model(data(B, E))
            model.train()
    assert steps_of(tmp_path) == [1, 4, 7] and handle.number == 7
    assert {name for _, name in saved(tmp_path, 4)} == {'input', 'weight', 'bias', 'output', 'grad_output', 'grad_weight',
                                                        'grad_bias'}


@pytest.mark.parametrize('options', [{'forwards_per_step': 3}, {'forwards_per_step': 0}])
def test_of_accumulated_gradients_the_first_is_saved(tmp_path, options):
    model = nn.Sequential(nn.Linear(E, E), nn.Linear(E, E))
    with attach(model, tmp_path, steps=[0, 2], **options) as handle:
        for step in range(3):
            model.zero_grad()
            for micro in range(3):
                model(data(B, E, seed=3 * step + micro)).square().sum().backward()
                if not micro:
                    first = model[0].weight.grad.clone()
            if not options['forwards_per_step']:
                with warnings.catch_warnings():
                    warnings.simplefilter('error')          # torch warns if float() is applied to a tensor with a graph
                    handle.step(loss=model[0].weight.sum() * 0 + step + 0.5, norm=torch.tensor(2.0))
    assert steps_of(tmp_path) == [0, 2]
    close(saved(tmp_path, 2)['0', 'grad_weight'], first)
    close(saved(tmp_path, 2)['0', 'input'], data(B, E, seed=6))
    if not options['forwards_per_step']:
        assert Logs(tmp_path).steps == [{'step': step, 'loss': step + 0.5, 'norm': 2.0, 'training': 0, 'folder': ''}
                                         for step in range(3)]


def test_a_model_that_only_generates(tmp_path):
    model = nn.Sequential(nn.Linear(E, E)).eval()
    with attach(model, tmp_path, steps=None), torch.no_grad():
        for seed in range(3):
            model(data(B, E, seed=seed))
    assert steps_of(tmp_path) == [0, 1, 2] and {name for _, name in saved(tmp_path, 1)} == {'input', 'weight', 'bias', 'output'}
    with attach(model, tmp_path / 'inference', steps=None), torch.inference_mode():
        close(model(data(B, E)).clone().numpy(), F.linear(data(B, E), model[0].weight, model[0].bias))
    assert len(saved(tmp_path / 'inference')) == 4


# ---- unusual models ------------------------------------------------------------------------------------------------

def test_modules_used_twice_and_weights_shared_by_two_modules(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(E, E), nn.Linear(E, E)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(self.a(x)))

    model = Model()
    with attach(model, tmp_path):
        trained(model, data(B, E).requires_grad_())
    tensors = saved(tmp_path)
    assert {layer for layer, _ in tensors} == {'a', 'a@1', 'b'}
    for role in 'weight', 'grad_weight':
        assert [layer for layer, name in tensors if name == role] == ['a']
    close(tensors['a', 'grad_weight'], model.a.weight.grad)         # the sum over all three uses
    for first, second in ('a', 'a@1'), ('a@1', 'b'):                # the activations have one gradient per use
        assert np.array_equal(tensors[first, 'output'], tensors[second, 'input'])
        assert np.array_equal(tensors[first, 'grad_output'], tensors[second, 'grad_input'])
    close(tensors['a', 'grad_input'], torch.from_numpy(tensors['a', 'grad_output']) @ model.a.weight)


def test_layers_that_share_an_input_have_separate_input_gradients(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(E, E), nn.Linear(E, E)

        def forward(self, x):
            return self.q(x) * self.k(input=x)

    model, x = Model(), data(B, E).requires_grad_()
    with attach(model, tmp_path):
        trained(model, x)
    tensors = saved(tmp_path)
    close(tensors['q', 'grad_input'] + tensors['k', 'grad_input'], x.grad)
    assert not np.allclose(tensors['q', 'grad_input'], tensors['k', 'grad_input'])


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_and_strides(tmp_path, dtype):
    model, x = nn.Linear(E, E).to(dtype), data(E, B).to(dtype).t()
    with attach(model, tmp_path):
        y = model(x)
        y.float().sum().backward()
    tensors = saved(tmp_path)
    close(tensors['model', 'input'], x)
    close(tensors['model', 'output'], y)
    close(tensors['model', 'grad_weight'], model.weight.grad)
    assert all(array.dtype == np.float32 for array in tensors.values())


def test_a_second_backward_on_one_graph_and_a_forward_without_backward(tmp_path):
    model = nn.Linear(E, E)
    with attach(model, tmp_path, steps=None):
        y = model(data(B, E))
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        model(data(B, E))                                           # no backward: the weight's hook must be removed
        model.eval()
        model(data(B, E)).sum().backward()
    assert len([name for _, name in saved(tmp_path, 0) if name == 'grad_weight']) == 1


def test_close_removes_every_hook(tmp_path):
    model = nn.TransformerEncoderLayer(E, H, 16)

    def hooks():
        return [len(store) for module in model.modules() for store in (
            module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._forward_hooks_with_kwargs)] + \
            [len(p._backward_hooks or ()) for p in model.parameters()]
    before = hooks()
    handle = attach(model, tmp_path)
    trained(model, data(T, B, E))
    assert torch.overrides._get_current_function_mode() is None
    handle.step()
    model(data(T, B, E))                                            # not a saved step: the hooks of the model only
    assert sum(hooks()) - sum(before) - sum(bool(p._backward_hooks) for p in model.parameters()) == 3
    summary = handle.close()
    assert hooks() == before and handle.close() == summary
    y = model(data(T, B, E))
    y.sum().backward()
    assert len(Logs(tmp_path).entries) == summary.tensors


class Checkpointed(nn.Module):
    """Recomputes its layers in backward."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.layer, self.use_reentrant = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0), use_reentrant

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=self.use_reentrant)


def translate(model):
    """Run a model with encoder and decoder, masks and dropout."""
    padding = torch.arange(7)[None, :] >= torch.tensor([7, 4, 6])[:, None]
    return model(data(7, B, E), data(T, B, E, seed=1), src_key_padding_mask=padding, tgt_is_causal=True,
                 tgt_mask=torch.ones(T, T, dtype=torch.bool).triu(1))


def in_bfloat16(model):
    with torch.autocast('cpu', torch.bfloat16):
        return translate(model)


def penalty(model):
    """Return a gradient that can be differentiated again."""
    x = data(B, E).requires_grad_()
    return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize('make, run, count', [
    (lambda: nn.Transformer(E, H, 1, 1, 16), translate, 113), (lambda: nn.Transformer(E, H, 1, 1, 16), in_bfloat16, 113),
    (lambda: nn.Transformer(E, H, 1, 1, 16).eval(), translate, 113),
    (lambda: Checkpointed(False), lambda model: model(data(T, B, E).requires_grad_()), 41),
    (lambda: Checkpointed(True), lambda model: model(data(T, B, E).requires_grad_()), 21),       # forward only
    (lambda: nn.Sequential(nn.Linear(E, E), nn.Tanh(), nn.Linear(E, 1)), penalty, 15)],
    ids=['transformer', 'autocast', 'eval', 'checkpoint', 'reentrant', 'twice'])
@pytest.mark.filterwarnings('ignore:enable_nested_tensor')
def test_results_are_unchanged_under_masks_autocast_eval_checkpointing_and_double_backward(tmp_path, make, run, count):
    torch.manual_seed(4)
    model = make()

    def results(model):
        torch.manual_seed(5)
        y = run(model)
        y.float().square().sum().backward()
        return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    expected = results(copy.deepcopy(model))
    with attach(model, tmp_path) as handle:
        assert all(map(torch.equal, results(model), expected))
    assert handle.close().tensors == count == len(saved(tmp_path))


def test_a_copy_of_the_model_is_not_recorded(tmp_path):
    model = nn.Sequential(nn.Linear(E, E))
    with attach(model, tmp_path, steps=None) as handle:
        for other in copy.deepcopy(model), pickle.loads(pickle.dumps(model)):
            assert torch.equal(other(data(B, E)), model(data(B, E)))
    assert steps_of(tmp_path) == [0, 1] and handle.number == 1


def test_an_exception_of_the_forward_pass_is_passed_on(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.fails = nn.Linear(E, E), True

        def forward(self, x):
            x = self.linear(x)
            return self.linear(x[:, :3]) if self.fails else x

    model = Model()
    with attach(model, tmp_path, steps=None) as handle:
        with pytest.raises(RuntimeError, match='shapes cannot be multiplied'):
            model(data(B, E))
        assert torch.overrides._get_current_function_mode() is None and not model.linear._forward_hooks
        model.fails = False
        trained(model, data(B, E))
    assert handle.number == 1 and steps_of(tmp_path) == [0, 1] and len(saved(tmp_path, 1)) == 7


def test_a_failing_writer_is_reported_once_and_training_goes_on(tmp_path, monkeypatch, capsys):
    model, x = Block(), data(T, B, E)
    expected = trained(copy.deepcopy(model), x)
    with attach(model, tmp_path, steps=None) as handle:
        monkeypatch.setattr(handle._writer, 'tensor', lambda *_, **__: 1 / 0)
        for _ in range(3):
            assert all(map(torch.equal, trained(model, x), expected))
    err = capsys.readouterr().err.splitlines()
    assert err[0] == ('warning: pyops.inspect.torch: tensors cannot be saved (ZeroDivisionError: division by zero); '
                      'training goes on')
    assert len(err) == 2 and 'no tensor was saved in' in err[1]


def test_save_max_limits_the_bytes_and_is_reported(tmp_path, capsys):
    model = nn.Linear(64, 64)
    with attach(model, tmp_path, save_max='50K', steps=None) as handle:
        for _ in range(5):
            trained(model, data(B, 64))
    assert 0 < handle.close().bytes <= 50_000
    assert capsys.readouterr().err == ('warning: pyops.inspect.torch: save_max is reached; no more tensors are saved, and '
                                       'training goes on\n')


# ---- sentences -----------------------------------------------------------------------------------------------------

WORDS = [['he', 'is', 'here', '<eos>'], ['no', '<eos>'], ['we', 'read', 'it', 'now', '<eos>']]


@pytest.mark.parametrize('batch_first', [False, True])
def test_words_and_padding_are_saved_with_the_tensors(tmp_path, batch_first):
    model = Block(batch_first=batch_first)
    with attach(model, tmp_path, tokens=lambda step: {'source': WORDS}):
        trained(model, data(B, T, E) if batch_first else data(T, B, E))
    logs = Logs(tmp_path)
    found = {(entry.layer, entry.name): entry for entry in logs.entries}
    valid = np.arange(T)[:, None] < [4, 2, 5]
    assert np.array_equal(logs.mask(found['self_attention', 'grad_key']), valid[:, :, None, None])
    assert np.array_equal(logs.mask(found['up', 'input']), (valid.T if batch_first else valid)[:, :, None])
    assert np.array_equal(logs.mask(found['self_attention.in_proj', 'input']), valid[:, :, None])
    assert np.array_equal(logs.mask(found['self_attention', 'weights'])[:, 0], valid.T[:, :, None] & valid.T[:, None])
    assert logs.mask(found['up', 'weight']) is None
    assert logs.tokens(found['self_attention', 'weights'], 0) == ([*WORDS[0], ''],) * 2
    assert found['up', 'input'].statistics['count'] == valid.sum() * E


def test_words_of_two_sides_and_an_explicit_layout(tmp_path):
    model = Block()
    with attach(model, tmp_path) as handle:
        handle.batch(tokens={'target': WORDS, 'source': [['a'] * 7, ['b'] * 3, ['c']]})
        trained(model, data(T, B, E), data(7, B, E, seed=1))
    logs = Logs(tmp_path)
    weights = next(entry for entry in logs.entries if entry.name == 'weights')
    assert [item['of'] for item in weights.mask] == ['target', 'source']
    assert logs.tokens(weights, 1) == (['no', '<eos>', '', '', ''], ['b'] * 3 + [''] * 4)
    square = nn.Linear(E, E)
    tokens = {'source': [['a'] * n for n in (3, 1, 2)]}
    with attach(square, tmp_path / 'square', batch_first=True, tokens=lambda step: tokens):
        square(data(3, 3, E))                       # three sentences of three words: the shape is ambiguous
    logs = Logs(tmp_path / 'square')
    assert logs.mask(logs.entries[0])[..., 0].tolist() == [[True] * 3, [True, False, False], [True, True, False]]


# ---- bad input -----------------------------------------------------------------------------------------------------

def test_bad_arguments_of_attach_are_user_errors_of_one_line(tmp_path):
    (tmp_path / 'file').write_text('x')
    for options, message in (
            ({'layers': 'encoder.*'}, "layers='encoder.*': matches none of the 5 layers; the names include "),
            ({'steps': '0:x'}, "steps='0:x': expected a number"),
            ({'save_max': 'much'}, "save_max='much': expected a size"),
            ({'fmt': 'mxfp7'}, 'mxfp7: no such number format'),
            ({'as_': 'npy'}, "as_='npy': expected 'safetensors' or 'pt'"),
            ({'folder': tmp_path / 'file' / 'x'}, 'cannot save tensors there')):
        model = Block()
        with pytest.raises(UserError) as error:
            attach(model, **{'folder': tmp_path / 'logs'} | options)
        assert message in str(error.value) and '\n' not in str(error.value) and not model._forward_hooks
    for model, only in ((nn.ReLU(), ''), (nn.LSTM(3, 4), ', only 1 LSTM'),
                        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)), ', only 2 Conv2d')):
        with pytest.raises(UserError, match=f'^{type(model).__name__}: has no linear layer and no attention{only}; attach to '):
            attach(model, tmp_path / 'none')
        assert not (tmp_path / 'none').exists()


def test_layers_that_are_not_saved_are_listed(tmp_path, capsys):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.norm = nn.Embedding(9, E), nn.LayerNorm(E)
            self.rnn, self.conv, self.fc = nn.LSTM(E, E), nn.Conv1d(E, E, 1), nn.Linear(E, 2)

        def forward(self, x):
            return self.fc(self.rnn(self.norm(x))[0])

    with attach(Mixed(), tmp_path) as handle:
        trained(handle.model, data(T, B, E))
    assert capsys.readouterr().err == ('warning: pyops.inspect.torch: not saved: 1 LSTM, 1 Conv1d; only linear layers and '
                                       'attention are saved\n')
    assert {entry.layer for entry in Logs(tmp_path).entries} == {'fc'}
    attach(Block(), tmp_path / 'block').close()
    assert 'not saved' not in capsys.readouterr().err


def test_the_environment_switches_saving_on_and_off(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def tensors(folder, *arguments, **variables):
        for name in ('TENSOR_SAVE_ENABLED', 'TENSOR_SAVE_DIR', 'CUSTOM_QUANT_TYPE'):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with attach(nn.Linear(E, 2), *arguments) as handle:
            trained(handle.model, data(B, E))
            handle.step(1.0)
        return {entry.name: entry.format for entry in Logs(folder).entries} if (tmp_path / folder).exists() else None

    names = {'input', 'weight', 'bias', 'output', 'grad_output', 'grad_weight', 'grad_bias'}
    assert tensors('tensor_logs') is None and tensors('a', 'a', TENSOR_SAVE_ENABLED='off') is None
    assert tensors('a', 'a').keys() == tensors('tensor_logs', TENSOR_SAVE_ENABLED='true').keys() == names
    assert tensors('b', TENSOR_SAVE_ENABLED='1', TENSOR_SAVE_DIR='b', CUSTOM_QUANT_TYPE='hifp8')['input'] == 'hifp8'
    assert tensors('c', 'c', CUSTOM_QUANT_TYPE='fwd=mxfp8,dgrad=bf16')['input'] == 'fp32'
    with pytest.raises(UserError, match='^TENSOR_SAVE_ENABLED=perhaps: expected true or false$'):
        tensors('d', 'd', TENSOR_SAVE_ENABLED='perhaps')


@pytest.mark.parametrize('how', ['compile(model)', 'model.compile()', 'a part'])
def test_a_compiled_model_is_compiled_once_and_runs_uncompiled_in_saved_steps(tmp_path, how, capsys):
    graphs, runs = [], []

    def compiler(graph, inputs):
        graphs.append(graph)

        def run(*arguments):
            runs.append(len(runs))
            return graph.forward(*arguments)
        return run

    torch._dynamo.reset()
    class Net(nn.Sequential):               # dynamo skips classes of torch itself
        def forward(self, x):
            return self[2](F.relu(self[0](x)))

    model = Net(nn.Linear(E, 12), nn.ReLU(), nn.Linear(12, 2))
    plain = copy.deepcopy(model)
    if how == 'compile(model)':
        model = torch.compile(model, backend=compiler)
    elif how == 'model.compile()':
        model.compile(backend=compiler)
    else:
        model[0] = torch.compile(model[0], backend=compiler)
    x = data(B, E)
    trained(model, x)
    assert len(graphs) == len(runs) == 1
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        with attach(model, tmp_path, steps='0:9:2') as handle:
            for _ in range(9):
                got = trained(model, x)
                handle.step()
        trained(model, x)
    assert all(map(torch.equal, got, trained(plain, x)))
    assert len(graphs) == 1 and len(runs) == 1 + 4 + 1              # the steps 1, 3, 5, 7, and one after close
    assert {entry.step for entry in Logs(tmp_path).entries} == {0, 2, 4, 6, 8}
    assert {entry.layer for entry in Logs(tmp_path).entries} == {'0', '2'} and capsys.readouterr().err == ''


def test_without_torch_the_error_is_one_line_with_the_install_command():
    code = ('import sys; sys.modules["torch"] = None\nfrom pyops.errors import exits_cleanly\n'
            'with exits_cleanly("train"):\n    from pyops.inspect.torch import attach')
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr == 'train: error: torch is not installed: install it with: pip install torch\n'


def test_tensors_are_written_at_exit_without_a_call_of_close(tmp_path):
    code = ('import sys, torch; from pyops.inspect.torch import attach\nmodel = torch.nn.Linear(64, 64)\n'
            'attach(model, sys.argv[1], steps=None, as_="pt")\n'
            'for _ in range(20):\n    model(torch.ones(64, 64)).sum().backward()')
    done = subprocess.run([sys.executable, '-c', code, tmp_path], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stderr == ''
    logs = Logs(tmp_path)
    assert len(logs.entries) == 20 * 7 and logs.skipped == [] and logs.entries[0].load().shape == (64, 64)


def test_torch_issues_no_warning(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        model = Block()
        with attach(model, tmp_path):
            trained(model, data(T, B, E))
