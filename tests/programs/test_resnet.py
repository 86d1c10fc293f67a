"""The residual network and its program: against PyTorch, by plan and without, its flags, and how well it reads digits."""
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from arrays import close
from conftest import NO_CUDA, ROOT, has_mnist
from small_models import shaken

from mnist import resnet
from mnist.mlp_resnet import MLPResNet
from pyops import nn
from pyops.autograd import Tensor
from pyops.errors import UserError

FEW = ['--embedded', '-e', '1', '-b', '300', '--quiet']             # 33 batches of 300 and one of 100


def lines(capsys, *flags):
    resnet.main([*FEW, *flags])
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize('norm', ['batch', 'layer'])
@pytest.mark.parametrize('training', [True, False], ids=['train', 'eval'])
def test_loss_and_every_gradient_equal_torch(norm, training, torch):
    t = torch.nn

    def branch():
        normed = {'batch': t.BatchNorm1d, 'layer': t.LayerNorm}[norm]
        return t.ModuleDict(dict(linear1=t.Linear(12, 6), norm1=normed(6), linear2=t.Linear(6, 12), norm2=normed(12)))

    twin = t.ModuleDict({'linear1': t.Linear(20, 12), 'blocks': t.ModuleList(
        t.ModuleList([t.ModuleDict({'module': branch()})]) for _ in range(2)), 'linear2': t.Linear(12, 10)})
    model = shaken(MLPResNet(20, 12, 2, norm=norm, dropout=0)).train(training)
    twin.double().train(training).load_state_dict(
        {name: torch.tensor(value).double() for name, value in model.state_dict().items()}, strict=False)
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((9, 4, 5)).astype(np.float32), rng.integers(0, 10, 9).astype(np.int32)
    loss = nn.SoftmaxLoss()(model(Tensor(x)), Tensor(labels))
    loss.backward()
    h = torch.relu(twin['linear1'](torch.tensor(x).double().reshape(9, 20)))
    for block in twin['blocks']:
        b = block[0]['module']
        h = torch.relu(h + b['norm2'](b['linear2'](torch.relu(b['norm1'](b['linear1'](h))))))
    want = t.functional.cross_entropy(twin['linear2'](h), torch.tensor(labels).long())
    want.backward()
    assert abs(loss.item() - want.item()) <= 1e-5 * want.item()
    grads = dict(model.named_parameters())
    assert set(grads) == {name for name, _ in twin.named_parameters()}
    for name, p in twin.named_parameters():
        close(grads[name].grad.numpy(), p.grad.numpy(), 1e-4)


def test_the_lines_of_a_run_and_its_report(tmp_path, capsys):
    resnet.main(['-e', '2', '--embedded', '--report', str(tmp_path / 'out.png')])
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith('embedded digits : ')
    assert out[1:5] == ['images magic : 2051', 'label magic : 2049', 'lables_num : 10000', 'data loaded.']
    assert re.fullmatch(r'step : \d+ kernels \(\d+ forward, \d+ backward, \d+ update\), peak memory \d+\.\d MiB', out[5])
    resnet.main(['-e', '0', '--embedded', '-v'])
    listed = capsys.readouterr().out.splitlines()
    assert listed[5] == 'Actions:' and '[once]InitAction: Tensor(blocks.2.0.module.norm1.weight)(50) = ones' in listed
    assert out[-5].startswith('epoch : 0 [10000/10000] loss : ') and out[-4].startswith('evaluating :  [2000/2000] correct : ')
    assert int(out[-2].split()[-1]) >= 1800 and float(out[-3].split()[-1]) < float(out[-5].split()[-1])
    assert out[-1] == f'report drawn : {tmp_path / "out.png"}' and (tmp_path / 'out.png').stat().st_size > 1000


@pytest.mark.parametrize('flags', [[], ['--augment', 'flip,crop', '--norm', 'layer'], ['--dropout', '0', '--hidden', '33']],
                         ids=' '.join)
def test_plan_or_not_and_threads_change_no_digit(flags, capsys):
    outputs = [lines(capsys, *flags, *more)[-2:] for more in ([], ['--no-plan'], ['--threads', '1'])]
    assert outputs[0] == outputs[1] == outputs[2]


def test_every_flag_changes_what_is_trained(capsys):
    changes = [], ['--hidden', '150'], ['--blocks', '1'], ['--norm', 'layer'], ['--dropout', '0.5'], ['--augment', 'crop'], \
        ['--augment', 'flip'], ['--weight-decay', '0.1'], ['--seed', '1'], ['-l', '0.01']
    losses = [lines(capsys, *flags)[-2] for flags in changes]
    assert len(set(losses)) == len(changes)


def test_a_format_from_the_environment_is_not_left_aside_in_silence(capsys, monkeypatch):
    monkeypatch.setenv('CUSTOM_QUANT_TYPE', 'mxfp8')
    resnet.main(['--embedded', '--plan', '-b', '64', '--hidden', '20', '--blocks', '1'])
    assert capsys.readouterr().err == ('CUSTOM_QUANT_TYPE=mxfp8: ignored, since the layers of mnist.resnet round nothing, '
                                       'unlike those in mnist.train\n')
    monkeypatch.setenv('CUSTOM_QUANT_TYPE', 'rubbish')      # not used, so no error
    resnet.main(['--embedded', '--plan', '-b', '64', '--hidden', '20', '--blocks', '1'])
    assert capsys.readouterr().err.startswith('CUSTOM_QUANT_TYPE=rubbish: ignored, since the layers of mnist.resnet ')


def test_the_printed_plan_has_every_tensor_with_its_shape(capsys):
    resnet.main(['--embedded', '--plan', '-b', '64', '--hidden', '20', '--blocks', '1'])
    out = capsys.readouterr().out
    for tensor in ('Tensor(UINT8)(images)(10000, 784)', 'Tensor(INT64)(rows)(64)', 'Tensor(pixels)(64, 784)',
                   'Tensor(linear1.weight)(20, 784)', 'Tensor(blocks.0.0.module.norm1.running_mean)(10)',
                   'Tensor(INT64)(blocks.0.0.module.dropout.count)(1)', 'Tensor(blocks.0.0.y)(64, 20)',
                   'Tensor(linear2.weight_grad)(10, 20)', 'Tensor(all_adam_m)'):
        assert f'\t{tensor}' in out, tensor
    before, after = out[out.index('Actions:'):].split('BoundaryAction')
    assert 'BatchNormForwardAction' in before and 'BatchNormBackwardAction' in after and 'AdamAction' in after
    assert 'epoch' not in out and 'test file' not in out


@has_mnist
def test_ten_epochs_of_mnist_reach_97_percent(capsys):
    resnet.main(['--quiet'])
    *_, evaluated, tested = capsys.readouterr().out.splitlines()
    assert evaluated.startswith('evaluating :  [10000/10000] correct : ') and int(evaluated.split()[-1]) >= 9700
    assert tested.startswith('test file :  [10000/10000] correct : ') and int(tested.split()[-1]) >= 9700


@pytest.mark.parametrize('flags, text', [
    (['-g', '1'], NO_CUDA),
    (['--augment', 'flip,spin'], "--augment: expected flip or crop, or both with a comma between, got 'flip,spin'"),
    (['--augment', 'crop,crop'], '--augment: expected flip or crop'),
    (['--norm', 'group'], "--norm: invalid choice: 'group'"),
    (['--dropout', '1'], '--dropout: expected a number >= 0 and < 1, got 1'),
    (['--weight-decay', '-1'], '--weight-decay: expected a finite number >= 0, got -1'),
    (['--blocks', '0'], '--blocks: expected a whole number from 1 to 1000, got 0'),
    (['--embedded', '-b', '1'], '-b 1: leaves a batch of one image of 10000'),
    (['--embedded', '-b', '9999'], '-b 9999: leaves a batch of one image of 10000'),
    (['--data-dir', 'nowhere'], 'data directory nowhere: no such directory; make it or give another'),
])
def test_bad_input_ends_with_one_line(flags, text, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != 'PYOPS_DATA'}
    out = subprocess.run([sys.executable, '-m', 'mnist.resnet', *flags], cwd=tmp_path, text=True, capture_output=True,
                         env=environment | {'PYTHONPATH': str(ROOT), 'PYOPS_CUDA_LIBRARY': '/nowhere.so'})
    assert out.returncode == 2 and len(out.stderr.splitlines()) == 1 and text in out.stderr, out.stderr


def test_a_single_image_can_be_trained_on_with_layer_norm(capsys):
    resnet.main(['--embedded', '--plan', '-b', '1', '--norm', 'layer'])
    assert 'Tensor(linear1.y)(1, 100)' in capsys.readouterr().out
    with pytest.raises(UserError, match='-b 1: leaves a batch of one image'):
        resnet.main(['--embedded', '--plan', '-b', '1'])
