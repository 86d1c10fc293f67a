"""The flag --precision fp8: transformer.train multiplies its linear layers in FP8, on the CPU or, with --on, on a GPU."""
import json
import re
import shlex

import numpy as np
import pytest
from places import ON_GPU
from translation import assert_same_training, newest

import mnist.train
import seq2seq.train
import transformer.train
import transformer.translate
from pyops import backend
from pyops.errors import UserError, exits_cleanly
from pyops.quantization import FP8_RECIPE, Recipe

RECIPE = str(Recipe.parse(FP8_RECIPE))
FLAGS = [*(['-g', '1'] if ON_GPU else []),
         *shlex.split('-f embedded --pairs 64 -b 32 --d-model 16 --heads 2 --d-ff 24 --layers 1 --min-count 1 --hold-out 0')]


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    """Return to float32 after a test: a program selects the precision for the process."""
    monkeypatch.delenv('CUSTOM_QUANT_TYPE', raising=False)
    yield
    backend.HOST.precision, backend.HOST.fp8 = 'fp32', False
    if ON_GPU:
        device = backend.current_device()
        device.fp8, device.precision, device.storage = False, 'fp32', 'fp32'


def train(capsys, *flags):
    """Return what transformer.train prints, and the loss of each epoch."""
    transformer.train.main([*FLAGS, *flags])
    out = capsys.readouterr().out
    losses = dict(re.findall(r'^epoch (\d+) .* loss : (\S+)', out, re.MULTILINE))         # the last line of an epoch
    return out, np.array([float(loss) for loss in losses.values()])


def test_a_run_in_fp8_is_resumed_with_the_same_bits_and_learns_like_its_emulation(tmp_path, capsys):
    whole, losses = train(capsys, '--precision', 'fp8', '-e', '2', '-c', str(tmp_path / 'whole'))
    assert f'quantised : {RECIPE} in 16 of 20 layers, multiplied in FP8' in whole
    device = backend.current_device()
    assert device.fp8 and device.precision == 'bf16' and (not ON_GPU or device.storage == 'bf16')
    for epochs in '12':
        out, _ = train(capsys, '--precision', 'fp8', '-e', epochs, '-c', str(tmp_path / 'parts'))
    assert 'loaded from checkpoint' in out and 'multiplied in FP8' in out
    assert_same_training(newest(tmp_path / 'whole'), newest(tmp_path / 'parts'))
    assert newest(tmp_path / 'parts')[1]['settings']['quant'] == RECIPE
    out, _ = train(capsys, '-e', '3', '-c', str(tmp_path / 'parts'))           # without the flag: the recipe is emulated
    assert f'quantised : {RECIPE} in 16 of 20 layers\n' in out and not device.fp8
    _, emulated = train(capsys, '--quant', FP8_RECIPE, '-e', '2', '-c', str(tmp_path / 'emulated'))
    assert len(losses) == 2 and (losses != emulated).any() and (abs(losses / emulated - 1) <= 2.0**-6).all()


def test_tensors_of_a_run_in_fp8_are_those_of_its_emulation(tmp_path, capsys):
    from pyops.inspect.readers import list_tensors, read
    found = {}
    for name, flags in dict(fp8=['--precision', 'fp8'], emulated=['--quant', FP8_RECIPE]).items():
        folder = tmp_path / name
        train(capsys, *flags, '-e', '1', '--max-steps', '1', '-c', str(tmp_path / 'ckpt' / name), '--save-tensors', str(folder))
        lines = [json.loads(line) for line in (folder / 'manifest.jsonl').read_text().splitlines()]
        found[name] = {(line['layer'], line['operation'], line['name']): (folder / line['file'], line['uses'], line['shape'])
                       for line in lines if line['kind'] == 'tensor'}
    assert found['fp8'].keys() == found['emulated'].keys() and len(found['fp8']) > 100
    for key, (path, uses, shape) in found['emulated'].items():
        ours = found['fp8'][key]
        assert ours[1:] == (uses, shape), key
        got, want = (np.asarray(read(str(file), list_tensors(str(file))[0][0]), np.float64) for file in (ours[0], path))
        scale = np.linalg.norm(want)        # of gradients, another sign before a ReLU changes much
        assert np.linalg.norm(got - want) <= (0.25 if ON_GPU or key[1] == 'backward' else 2.0**-5) * scale, key


@pytest.mark.parametrize('program,flags,want', [
    (transformer.train, '--quant none', '--quant none: --precision fp8 needs formats of linear layers; leave out --quant, .*'),
    (transformer.train, '--quant linear=mxfp8', 'fwd.x=mxfp8: tensor cores multiply fp8 or .*; give one of these, or .*'),
    (transformer.train, '--quant fp8:delayed', r'fwd.x=fp8:.*delayed=\d+: tensor cores multiply fp8 or .*'),
    (transformer.train, '--quant none;fwd.w=hifp8@encoder', 'fwd.w=hifp8: tensor cores multiply fp8 or .*'),
    (transformer.train, '--quant fwd.x=fp8', 'fwd.x=fp8: a product in FP8 needs a format for both operands; give fwd=fp8'),
    (transformer.train, '--quant fp8', '--quant fp8: encoder.0.self_attention is no linear layer that can multiply in FP8; .*'),
    (transformer.train, '--exact', '--exact: .*; give .*, or --no-exact'),
    (seq2seq.train, '', '--precision: fp8: only transformer.train has layers that multiply in FP8; give bf16; see --help'),
    (mnist.train, '', '--precision: fp8: only transformer.train has .*; see --help'),
    (transformer.translate, '', '--precision: fp8: only transformer.train has .*; see --help')])
def test_what_fp8_cannot_do_is_one_line_with_a_remedy(program, flags, want, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given, _, quant = flags.partition(' ')
    arguments = ['--precision', 'fp8', *filter(None, (given, quant)), *(FLAGS if program is transformer.train else [])]
    with pytest.raises(SystemExit) as left, exits_cleanly(program.__name__):
        program.main(arguments)
    error = capsys.readouterr().err
    assert left.value.code == 2 and len(error.splitlines()) == 1
    assert re.search(f'error: {want}$', error.strip()), error


@pytest.mark.skipif(not ON_GPU, reason='the CPU multiplies in FP8 by definition: run it with --on emulated')
def test_a_gpu_without_fp8_is_refused_with_a_remedy(monkeypatch):
    import pyops
    device = backend.current_device()
    monkeypatch.setattr(type(device), 'capability', staticmethod(lambda: (8, 0)))
    with pytest.raises(UserError, match=r'^--precision fp8: .* has compute capability 8\.0, and products in FP8 need 9\.0, as '
                                        r'of an H100; give --precision bf16, with --quant to emulate them$'):
        pyops.use_gpu('fp8')
    assert not device.fp8 and device.precision == 'fp32'
