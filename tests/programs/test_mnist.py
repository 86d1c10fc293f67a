"""The MLP and its program: against PyTorch, by plan and by hand, what it prints, how it refuses."""
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from conftest import NO_CUDA, ROOT, has_mnist
from translation import TINY_SEQ2SEQ, assert_same_training, newest

from mnist import train
from mnist.model import MLP, Config
from pyops.data import mnist
from pyops.errors import UserError, exits_cleanly
from pyops.ops import MLPGradients, PixelLinear
from pyops.optim import Adam
from pyops.params import Parameter
from pyops.steps import Steps
from pyops.text import embedded as embedded_text
from seq2seq import train as seq2seq_train


def small_data(n=60, seed=0):
    rng = np.random.default_rng(seed)
    images = (rng.integers(0, 256, (n, 784)) * (rng.random((n, 784)) < 0.2)).astype(np.uint8)
    return images, rng.integers(0, 10, n).astype(np.int32)


def test_loss_and_every_gradient_equal_torch(torch):
    from bench.torch_mnist import TorchMLP
    images, labels = small_data()
    rows = np.random.default_rng(1).integers(0, 60, 33)
    model, twin = MLP(seed=4), TorchMLP().double()
    with torch.no_grad():
        for name, place in twin.named().items():
            place.copy_(torch.from_numpy(model.params[name].value))
    loss, _, ctx = model.forward(images, rows, labels[rows])
    model.backward(ctx)
    want = twin(torch.from_numpy(images[rows]).double() / 255, torch.from_numpy(labels[rows]).long())
    want.backward()
    assert abs(loss[0] - want.item()) <= 1e-6 * want.item()
    grads = {'w1': twin.linear1.weight.grad.T, 'bias1': twin.linear1.bias.grad,
             'w2': twin.linear2.weight.grad, 'bias2': twin.linear2.bias.grad}
    for name, grad in grads.items():
        scale = grad.abs().max().item()
        assert scale > 1e-4 and np.abs(model.params[name].grad - grad.numpy()).max() <= 1e-5 * scale, name


def parameters(model):
    return [model.params[name] for name in ('w1', 'bias1', 'w2', 'bias2')]


def test_one_op_has_the_loss_and_the_gradients_of_the_model_s_backward():
    images, labels = small_data()
    rows, model = np.random.default_rng(1).integers(0, 60, 50), MLP(seed=4)
    want, _, ctx = model.forward(images, rows, labels[rows])
    model.backward(ctx)
    grads, padded = [p.grad.copy() for p in parameters(model)], model.params.grads == 0
    model.params.grads[~padded] = np.nan            # gradients() overwrites
    loss = MLPGradients(*parameters(model)).gradients(images, rows, labels)
    assert abs(loss[0] - want[0]) <= 1e-6 * want[0]
    for p, grad in zip(parameters(model), grads, strict=True):
        scale = np.abs(grad).max()
        assert scale > 1e-4 and np.abs(p.grad - grad).max() <= 1e-5 * scale, p.name


def test_the_same_gradients_are_written_or_added():
    images, labels = small_data()
    model, dloss = MLP(Config(hidden=11), seed=3), np.array([-2.5], np.float32)
    op = MLPGradients(*parameters(model))
    first = op.gradients(images, np.arange(20), labels)
    grads = [p.grad.copy() for p in parameters(model)]
    loss, ctx = op.forward(images, np.arange(20), labels)
    op.backward(dloss, ctx)
    assert loss[0] == first[0]
    for p, grad in zip(parameters(model), grads, strict=True):
        assert np.abs(p.grad - (1 + dloss) * grad).max() <= 1e-6 * np.abs(grad).max(), p.name


@pytest.mark.parametrize('I,H,C', [(784, 30, 10), (5, 3, 2)])
def test_rows_and_labels_that_do_not_exist_are_refused_with_their_position(I, H, C):
    def parameter(name, *shape):
        return Parameter(name, np.ones(shape, np.float32), np.ones(shape, np.float32))
    images, labels = np.full((7, I), 9, np.uint8), np.zeros(7, np.int32)
    op = MLPGradients(parameter('w1', I, H), parameter('b1', H), parameter('w2', C, H), parameter('b2', C))
    layer = PixelLinear(parameter('weight', I, H), parameter('bias', H))
    for bad in (-1, 7, 2**40):
        rows = np.array([0, 6, bad, 3])
        text = rf'rows\[2\]={bad}, expected 0 to 6'
        with pytest.raises(ValueError, match=f'mlp_gradients: {text}'):
            op.gradients(images, rows, labels)
        with pytest.raises(ValueError, match=f'pixel_linear_forward: {text}'):
            layer.forward(images, rows)
        y, ctx = layer.forward(images, np.zeros(4, np.int64))
        with pytest.raises(ValueError, match=f'pixel_linear_backward: {text}'):
            layer.backward(y, ctx._replace(rows=rows))
    for bad in (-1, C):
        labels[3] = bad
        with pytest.raises(ValueError, match=rf'mlp_gradients: labels\[3\]={bad}, expected 0 to {C - 1}'):
            op.gradients(images, np.array([0, 6, 3, 1]), labels)
    op.gradients(images, np.array([0, 6, 2, 1]), labels)        # a label that is not in the batch may be anything


@pytest.mark.parametrize('B,H,C,text', [(0, 3, 2, 'B=0'), (2, 129, 2, 'H=129'), (2, 3, 129, 'C=129')])
def test_one_op_says_what_sizes_it_takes(B, H, C, text):
    shapes = dict(w1=(5, H), b1=(H,), w2=(C, H), b2=(C,))
    op = MLPGradients(*(Parameter(name, np.ones(s, np.float32), np.ones(s, np.float32)) for name, s in shapes.items()))
    with pytest.raises(ValueError, match=f'mlp_gradients: .*{text}.*, expected B >= 1, I < 65536, H and C from 1 to 128'):
        op.gradients(np.zeros((4, 5), np.uint8), np.zeros(B, np.int64), np.zeros(4, np.int32))


@pytest.mark.parametrize('which', ['w1', 'b1', 'w2', 'b2'])
def test_nan_in_a_parameter_shows_in_the_loss_unless_only_paper_meets_it(which):
    rng = np.random.default_rng(0)
    shapes = dict(w1=(40, 6), b1=(6,), w2=(3, 6), b2=(3,))
    params = {name: Parameter(name, rng.random(s, np.float32), np.zeros(s, np.float32)) for name, s in shapes.items()}
    images, labels = np.full((9, 40), 7, np.uint8), np.zeros(9, np.int32)
    images[:, 17] = 0
    params['w1'].value[17] = np.nan
    op, rows = MLPGradients(*params.values()), np.arange(9)
    assert np.isfinite(op.gradients(images, rows, labels)[0]) and (params['w1'].grad[17] == 0).all()
    params[which].value[0] = np.nan
    assert np.isnan(op.gradients(images, rows, labels)[0])


def make_step(model, adam, images, labels):
    def step(rows):
        model.params.zero_grads()
        loss, _, ctx = model.forward(images, rows, labels)
        model.backward(ctx)
        adam.step()
        return loss
    return step


def test_a_hundred_replayed_steps_equal_eager_ones_bit_for_bit():
    images, labels = small_data(400)
    models = [MLP(seed=5) for _ in range(2)]
    adams, fixed, rng = [Adam(m.params, 0.001, max_norm=1.0) for m in models], labels[:50].copy(), np.random.default_rng(2)
    eager = make_step(models[0], adams[0], images, fixed)
    planned = Steps(make_step(models[1], adams[1], images, fixed), models[1].params, images=images, labels=fixed)
    for _ in range(100):
        rows = rng.integers(0, 400, 50)
        fixed[...] = labels[rows]
        assert eager(rows)[0] == planned(rows)[0]
    assert (models[0].params.values == models[1].params.values).all() and len(planned.plans) == 1


def test_steps_record_a_plan_for_each_size_of_batch():
    images, labels = small_data()
    model = MLP()
    adam = Adam(model.params, 0.001)
    planned = Steps(lambda rows: make_step(model, adam, images, labels[:len(rows)].copy())(rows), model.params, images=images)
    for n in (7, 5, 7, 5, 1):
        assert np.isfinite(planned(np.arange(n))[0])
    assert sorted(planned.plans) == [1, 5, 7] and adam.count[0] == 5


def test_predict_is_the_argmax_of_the_logits():
    images, labels = small_data()
    model, classes = MLP(Config(hidden=11), seed=3), np.empty(60, np.int32)
    model.predict(images, classes)
    _, logits, _ = model.forward(images, np.arange(60), labels)
    assert (classes == logits.argmax(1)).all()


@pytest.mark.parametrize('kind', train.DECAYS)
def test_the_learning_rate_falls_to_0_in_the_steps_of_the_run(kind):
    """The same losses as with rates that the host computes and sets, and other losses than with a constant rate."""
    images, labels = small_data(400)
    curves = []
    for scheduled in True, False:
        *_, adam, step, _ = train.prepare(images, labels, 8, seed=5, lr=0.01, schedule=kind if scheduled else None, total=40)
        rng, losses = np.random.default_rng(2), []
        for k in range(40):
            if not scheduled:
                share = 1 - k / 40
                adam.lr = np.float32(0.01) * np.float32(share if kind == 'linear' else (1 - np.cos(np.pi * share)) / 2)
            losses.append(float(step(rng.integers(0, 400, 50))[0]))
        curves.append(losses)
    np.testing.assert_allclose(*curves, rtol=1e-5)
    *_, step, _ = train.prepare(images, labels, 8, seed=5, lr=0.01)
    rng = np.random.default_rng(2)
    assert abs([float(step(rng.integers(0, 400, 50))[0]) for _ in range(40)][-1] - curves[0][-1]) > 1e-3


def test_the_test_file_is_classified_at_the_end(capsys):
    """The embedded digits have no more than 50,000 images, so the test images are also those of the epochs."""
    outputs = []
    for flags in ([], ['--no-plan'], ['--parts', '2']):
        train.main(['-e', '2', '--embedded', '--schedule', 'linear', '-l', '0.003', '--test', '--quiet', *flags])
        outputs.append(capsys.readouterr().out.splitlines()[-2:])
    assert outputs[0] == outputs[1] and outputs[2][1].startswith('test :  [2000/2000] correct : ')
    for evaluated, tested in outputs:
        assert evaluated.removeprefix('evaluating') == tested.removeprefix('test') and int(tested.split()[-1]) >= 1600


@has_mnist
def test_ten_epochs_of_mnist_reach_9570_of_10000(capsys):
    """The median of five seeds."""
    correct = []
    for seed in range(5):
        train.main(['--quiet', '--seed', str(seed)])
        correct.append(int(capsys.readouterr().out.split()[-1]))
    assert np.median(correct) >= 9570, correct


def test_the_lines_of_a_run_and_its_report(tmp_path, capsys):
    train.main(['-e', '2', '--embedded', '--report', str(tmp_path / 'out.png')])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith('embedded digits : ')
    assert lines[1:5] == ['images magic : 2051', 'label magic : 2049', 'lables_num : 10000', 'data loaded.']
    assert lines[5:7] == ['step : 14 kernels (6 forward, 4 backward, 4 update), peak memory 8.2 MiB',
                          '-v lists its kernels; --plan, --profile and --dot describe it instead of training']
    assert len(lines) == 7 + 2 * 2 + 1
    assert lines[-5].startswith('epoch : 0 [10000/10000] loss : ')
    assert lines[-4].startswith('evaluating :  [2000/2000] correct : ')
    assert int(lines[-2].split()[-1]) >= 1500 and float(lines[-3].split()[-1]) < float(lines[-5].split()[-1])
    assert lines[-1] == f'report drawn : {tmp_path / "out.png"}'
    assert (tmp_path / 'out.png').read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'


@pytest.mark.parametrize('flags, count', [([], 2), (['-v'], 20), (['--verbose', '--quiet'], 0), (['--quiet', '-v'], 20),
                                          (['--no-plan'], 0)])
def test_how_much_is_printed_about_the_kernels_of_a_step(flags, count, capsys):
    """-v: the list of --plan; of -v and --quiet the last one counts."""
    train.main(['--embedded', '-e', '0', *flags])
    lines = capsys.readouterr().out.splitlines()
    assert lines[4] == 'data loaded.' and len(lines) == 5 + count
    if count > 2:
        train.main(['--embedded', '--plan'])
        assert '\n'.join(lines[5:]) in capsys.readouterr().out and lines[5] == 'Actions:'
        assert lines[6] == '[once]InitAction: Tensor(w1)(784, 30) = normal(0, 0.0357143)' and 'BoundaryAction' in lines[16]


def test_a_list_of_kernels_without_a_plan_is_refused(capsys):
    with pytest.raises(SystemExit) as left:
        train.main(['--embedded', '-v', '--no-plan'])
    assert left.value.code == 2 and '--no-plan: not allowed with argument -v/--verbose' in capsys.readouterr().err


def test_a_run_that_ends_early_prints_its_loss(capsys):
    train.main(['--embedded', '-e', '1', '--max-steps', '3', '--quiet'])
    whole = capsys.readouterr().out.splitlines()[5:]
    assert len(whole) == 1 and re.fullmatch(r'\[300/10000\] loss : 2\.\d{5}', whole[0])


def test_plan_or_not_and_threads_change_no_digit(capsys):
    outputs = []
    for flags in ([], ['--no-plan'], ['--threads', '1']):
        train.main(['-e', '1', '--embedded', '-b', '300', *flags])          # 33 batches of 300 and one of 100
        outputs.append(capsys.readouterr().out.splitlines()[-2:])
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_step_is_described_instead_of_trained_with_no_plan_too(capsys):
    train.main(['--embedded', '--plan', '--no-plan'])
    out = capsys.readouterr().out
    assert 'Actions:' in out and 'epoch : ' not in out


def test_the_printed_plan_has_every_tensor_with_its_shape(capsys):
    train.main(['--embedded', '--plan', '-b', '64', '--hidden', '20'])
    out = capsys.readouterr().out
    for tensor in ('Tensor(UINT8)(images)(10000, 784)', 'Tensor(INT64)(rows)(64)', 'Tensor(w1)(784, 20)', 'Tensor(bias1)(20)',
                   'Tensor(linear1.y)(64, 20)', 'Tensor(relu.y)(64, 20)', 'Tensor(w2)(10, 20)', 'Tensor(linear2.y)(64, 10)',
                   'Tensor(loss.loss)(1)', 'Tensor(loss.dx)(64, 10)', 'Tensor(linear2.dx)(64, 20)', 'Tensor(relu.dx)(64, 20)',
                   'Tensor(w1_grad)(784, 20)', 'Tensor(w2_grad)(10, 20)', 'Tensor(bias2_grad)(10)', 'Tensor(norm)(1)'):
        assert f'\t{tensor}' in out, tensor
    before, after = out[out.index('Actions:'):].split('BoundaryAction')
    assert 'CrossEntropyForwardAction' in before and 'CrossEntropyBackwardAction' in after
    assert 'PixelLinearBackwardAction' in after and 'AdamAction' in after and 'peak' in out
    assert 'epoch' not in out                           # it tells and does not train


def test_what_both_programs_can_tell(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ['--embedding', '16', '--hidden', '16', '-b', '8', '-t', '1', '-f', 'embedded']
    for main, flags in ((train.main, ['--embedded']), (seq2seq_train.main, small)):
        main([*flags, '--plan', '--profile', 'trace.json', '--dot', 'plan.dot'])
        out = capsys.readouterr().out
        assert 'Grad Tensors:' in out and 'BoundaryAction' in out and 'of peak' in out
        assert (tmp_path / 'trace.json').stat().st_size > 1000 and 'digraph' in (tmp_path / 'plan.dot').read_text()
        main([*flags, '--plan', '--profile', '--dot', 'again.dot'])         # without a file
        out = capsys.readouterr().out
        assert 'Grad Tensors:' in out and 'of peak' in out and 'graph written : again.dot' in out and 'trace' not in out
    assert sorted(os.listdir(tmp_path)) == ['again.dot', 'plan.dot', 'trace.json']


def test_seq2seq_trains_the_same_with_and_without_plans(tmp_path):
    assert len(embedded_text.pairs()) > 512
    for folder, flags in (('with', []), ('without', ['--no-plan'])):
        seq2seq_train.main(['-e', '2', '-c', str(tmp_path / folder), *TINY_SEQ2SEQ, *flags])
    assert_same_training(newest(tmp_path / 'with'), newest(tmp_path / 'without'))


@pytest.mark.parametrize('flags,text', [
    (['-g', '1'], NO_CUDA),
    (['-b', '0'], '-b/--batch-size: expected a whole number >= 1, got 0'),
    (['-e', '-1'], '-e/--epochs: expected a whole number >= 0, got -1'),
    (['-l', 'nan'], '-l/--lr: expected a number'),
    (['--data-dir', 'nowhere'], 'data directory nowhere: no such directory; make it or give another'),
    (['--embedded', '-e', '0', '--quiet', '--report', 'no/such/out.png'], 'no/such/out.png'),
    (['--embedded', '-e', '3', '-l', '1e38'], 'the loss is nan'),
    (['--embedded', '-e', '3', '-l', '100', '--quiet'], 'the loss has exploded to '),
    (['--embedded', '-e', '1', '-l', '100', '--quiet', '--max-steps', '30'], ' (median of the last 20 steps; an untrained '),
])
def test_bad_input_ends_with_one_line(flags, text, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != 'PYOPS_DATA'}
    out = subprocess.run([sys.executable, '-m', 'mnist.train', *flags], cwd=tmp_path, text=True, capture_output=True,
                         env=environment | {'PYTHONPATH': str(ROOT), 'PYOPS_CUDA_LIBRARY': '/nowhere.so'})
    assert out.returncode == 2 and len(out.stderr.splitlines()) == 1 and text in out.stderr, out.stderr


@pytest.mark.parametrize('program', ['mnist.train', 'mnist.resnet'])
@pytest.mark.parametrize('number', [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_a_run_that_a_signal_ended_is_not_a_success(program, number):
    command = [sys.executable, '-m', program, '--embedded', '-e', '100000', '--quiet']
    environment = os.environ | {'PYTHONUNBUFFERED': '1'}
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:
        while 'evaluating' not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(number)
        _, err = process.communicate(timeout=240)
    assert (process.returncode, err) == (128 + number, 'finishing this step (Ctrl-C again leaves at once)\n')


def test_max_steps_is_a_success(capsys):
    train.main(['--embedded', '-e', '1', '--quiet', '--max-steps', '3'])            # raises nothing


@pytest.mark.parametrize('flags, text', [
    (['-g', '1'], '-g 1: /nowhere.so: the CUDA library is not built'),
    *(([flag, 'no/out'], f'{flag}: no/out: cannot be written (No such file or directory); name a file in a folder that exists')
      for flag in ('--report', '--profile', '--dot'))])
def test_what_can_be_refused_at_once_is_refused_before_images_are_loaded(flags, text, monkeypatch, capsys):
    loads = []
    monkeypatch.setenv('PYOPS_CUDA_LIBRARY', '/nowhere.so')
    monkeypatch.setattr(mnist, 'load', lambda *arguments: loads.append(arguments))
    with pytest.raises(SystemExit) as left, exits_cleanly('mnist.train'):
        train.main(['--embedded', *flags])
    assert loads == [] and left.value.code == 2
    assert f'mnist.train: error: {text}' in capsys.readouterr().err


def test_a_run_prints_the_folder_it_reads_and_broken_files_end_with_one_line(tmp_path, capsys):
    from pyops.data import idx
    digits = mnist.load(embedded=True)
    names = ('train-images-idx3-ubyte', 'train-labels-idx1-ubyte', 't10k-images-idx3-ubyte', 't10k-labels-idx1-ubyte')
    for name, array in zip(names, digits[1:5], strict=True):
        idx.write(tmp_path / name, array[:50].reshape(-1, 28, 28) if array.ndim == 2 else array[:50])
    train.main(['--data-dir', str(tmp_path), '-e', '1', '-b', '10', '--quiet'])
    assert capsys.readouterr().out.startswith(f'mnist : {tmp_path}\nimages magic : 2051\n')
    whole = (tmp_path / names[0]).read_bytes()
    for broken, text in ((b'\0\0\7\7' + whole[4:], 'magic'), (whole[:-100], 'truncated|expected|bytes')):
        (tmp_path / names[0]).write_bytes(broken)
        with pytest.raises(UserError, match=names[0]) as error:
            train.main(['--data-dir', str(tmp_path), '-e', '1'])
        assert error.match(text)
