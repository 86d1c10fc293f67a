"""bench.gpt2: llm.c's files, our GPT-2 beside PyTorch's and llm.c's, and the contest at a small size."""
import json
import os
import re

import numpy as np
import pytest
from arrays import RTOL, close

from bench import gpt2, llmc
from bench.contest import Contestant
from bench.gpt2_model import GPT2, parts, training_steps
from pyops.errors import UserError
from pyops.optim import AdamW

SMALL = llmc.Size(positions=16, words=97, layers=2, heads=4, width=32)
FLAGS = [f'--{name}={value}' for name, value in SMALL._asdict().items()] + ['--batch-size=2', '--tokens=12', '--warmup=1']
BATCH, LENGTH, STEPS = 2, 12, 5


def tensors_of(size, seed=0):
    """Random tensors with biases and deviations large enough that every gradient counts."""
    rng = np.random.default_rng(seed)
    for name, shape in llmc.shapes(size).items():
        values = rng.standard_normal(shape, np.float32) * np.float32(0.2)
        values[(slice(size.words, None) if name == 'wte' else slice(0, 0))] = 0
        yield name, values + np.float32(name.startswith('ln') and name.endswith('w'))


@pytest.fixture
def files(tmp_path):
    """-> a folder with a checkpoint and tokens for STEPS steps"""
    llmc.write_model(tmp_path / gpt2.WEIGHTS, SMALL, tensors_of(SMALL))
    few = np.array([0, 1, 7, 50, 95, 96])               # words to learn; the last has the last row of the embedding
    llmc.write_tokens(tmp_path / gpt2.TOKENS, np.random.default_rng(2).choice(few, STEPS * BATCH * LENGTH + 1))
    (tmp_path / 'batch.json').write_text(json.dumps([BATCH, LENGTH]))
    return tmp_path


def torch_batches(torch, tokens):
    n = STEPS * BATCH * LENGTH
    return [torch.from_numpy(part.reshape(STEPS, BATCH, LENGTH)).long() for part in (tokens[:n], tokens[1:n + 1])]


def test_a_checkpoint_is_read_as_it_was_written(files):
    assert llmc.read_size(files / gpt2.WEIGHTS) == SMALL and SMALL.padded == 128
    given, found = dict(tensors_of(SMALL)), dict(llmc.read_model(files / gpt2.WEIGHTS))
    assert list(found) == list(llmc.shapes(SMALL)) == list(given)
    for name, values in found.items():
        np.testing.assert_array_equal(values, given[name][:SMALL.words] if name == 'wte' else given[name])
    # as llm.c reads it: 256 int32, then the tensors without gaps
    raw = (files / gpt2.WEIGHTS).read_bytes()
    assert np.frombuffer(raw, np.int32, 9).tolist() == [20240326, 3, 16, 97, 2, 4, 32, 128, 0]
    assert len(raw) == 4 * (256 + sum(values.size for values in given.values()))
    assert raw[1024:1024 + given['wte'].nbytes] == given['wte'].tobytes() and raw.endswith(given['lnfb'].tobytes())


def test_the_default_size_has_as_many_parameters_as_llm_c_counts():
    size = llmc.Size()
    assert size.padded == 50304 and sum(int(np.prod(shape)) for shape in llmc.shapes(size).values()) == 124475904


def test_tokens_are_read_as_they_were_written(tmp_path):
    ids = [0, 5, 50256, 65535]
    llmc.write_tokens(tmp_path / 'ids', ids)
    assert llmc.read_tokens(tmp_path / 'ids').tolist() == ids
    raw = (tmp_path / 'ids').read_bytes()
    assert np.frombuffer(raw, np.int32, 4).tolist() == [20240520, 1, 4, 0] and len(raw) == 1024 + 8
    for wrong in ([65536], [-1]):
        with pytest.raises(ValueError, match='expected 0 to 65535'):
            llmc.write_tokens(tmp_path / 'ids', wrong)


def test_initial_weights_have_the_deviations_of_gpt2():
    size = SMALL._replace(width=256, layers=8)
    found = dict(llmc.random_tensors(size))
    for name, want in dict(wte=0.02, wpe=0.02, qkvw=0.02, fcw=0.02, attprojw=0.005, fcprojw=0.005).items():
        values = found[name][:size.words] if name == 'wte' else found[name]
        assert abs(values.std() / want - 1) <= 4 / values.size ** 0.5 and abs(values.mean()) <= 4 * want / values.size ** 0.5
    assert not found['wte'][size.words:].any() and not found['qkvb'].any() and (found['ln1w'] == 1).all()


@pytest.mark.parametrize('write, read, match', [
    (lambda path: path.write_bytes(b''), llmc.read_size, 'not a checkpoint of llm.c: .* got an empty file'),
    (lambda path: llmc.write_tokens(path, [1]), llmc.read_size, 'expected 20240326 and version 3, got 20240520 and 1'),
    (lambda path: llmc.write_model(path, SMALL, tensors_of(SMALL)), llmc.read_tokens, 'not tokens of llm.c'),
    (lambda path: path.write_bytes(llmc._header(llmc.MODEL, 3, 16, 97, 2, 4, 32, 97).tobytes()), llmc.read_size,
     'a padded vocabulary of 128'),
    (lambda path: path.write_bytes(llmc._header(llmc.MODEL, 3, *SMALL, 128).tobytes() + b'1234'),
     lambda path: list(llmc.read_model(path)), 'ends inside wte'),
    (lambda path: path.write_bytes(llmc._header(llmc.TOKENS, 1, 2).tobytes() + b'12'), llmc.read_tokens,
     'has 1 tokens, expected 2')])
def test_another_file_is_refused(tmp_path, write, read, match):
    write(tmp_path / 'file')
    with pytest.raises(UserError, match=match):
        read(tmp_path / 'file')


def test_a_checkpoint_of_other_shapes_is_not_written(tmp_path):
    with pytest.raises(ValueError, match=r'expected wpe \(16, 32\), got wpe \(17, 32\)'):
        llmc.write_model(tmp_path / 'file', SMALL, tensors_of(SMALL._replace(positions=17)))


def test_every_parameter_gets_its_part_of_a_file():
    named = [(ours, np.shape(part)) for name, values in tensors_of(SMALL)
             for ours, part in parts(name, values[:SMALL.words] if name == 'wte' else values)]
    params = GPT2(SMALL, ()).params
    assert sorted(named) == sorted((name, params[name].value.shape) for name in params)


def test_loss_and_gradients_equal_torch(torch, files):
    from bench.torch_gpt2 import TorchGPT2
    tensors, tokens = list(llmc.read_model(files / gpt2.WEIGHTS)), llmc.read_tokens(files / gpt2.TOKENS)
    twin = TorchGPT2(SMALL, tensors, torch.float64)
    ids, labels = torch_batches(torch, tokens)
    want = twin(ids[0], labels[0])
    want.backward()

    model = GPT2(SMALL, tensors)
    steps = training_steps(model, AdamW(model.params, 0.0, weight_decay=0.0), tokens, LENGTH)
    loss = float(steps(np.arange(BATCH))[0])
    assert abs(loss - want.item()) <= 1e-6 * want.item()
    seen = set()
    for name, values in tensors:
        grads = [place.grad.numpy() for place in twin.places(name)]
        for ours, part in parts(name, np.reshape(grads, values.shape)):
            seen.add(ours)
            if ours.endswith('attention.k.bias'):       # it adds the same number to all scores of a query: 0 but for rounding
                assert np.abs(part).max() <= 1e-12 and np.abs(model.params[ours].grad).max() <= 1e-6
            else:
                close(model.params[ours].grad, part, RTOL, ours)
    assert seen == set(model.params)


def losses_of(turn, describe):
    return [describe(turn(k, k + 1))['loss'] for k in range(STEPS)]


def test_the_losses_of_training_equal_those_of_torch(torch, files, monkeypatch):
    monkeypatch.setattr(gpt2, 'LR', 0.01)               # so that the losses fall
    ours, theirs = (losses_of(*gpt2.train(files, kind)) for kind in ('ours', 'torch'))
    np.testing.assert_allclose(ours, theirs, rtol=gpt2.TOLERANCE)
    assert ours[-1] < 0.95 * ours[0]


def test_recomputed_activations_have_the_same_losses_in_less_memory(files, monkeypatch):
    monkeypatch.setattr(gpt2, 'LR', 0.01)
    losses = [losses_of(*gpt2.train(files, kind)) for kind in ('ours', 'ours-recompute')]
    assert losses[0] == losses[1] and losses[0][-1] < 0.95 * losses[0][0]
    assert set(gpt2.differences({'ours': [4.0], 'ours-recompute': [np.nextafter(4.0, 5.0)]})) == {'ours-recompute'}
    size = SMALL._replace(layers=6)
    llmc.write_model(files / 'deep', size, tensors_of(size))
    tokens, memory = llmc.read_tokens(files / gpt2.TOKENS), []
    for recompute in (False, True):
        model = GPT2(size, llmc.read_model(files / 'deep'), recompute)
        steps = training_steps(model, AdamW(model.params, 0.01), tokens, LENGTH)
        steps(np.arange(BATCH))
        memory.append((model.params.values.tobytes(), steps.plan(np.arange(BATCH)).memory().intermediates))
    assert memory[0][0] == memory[1][0] and memory[1][1] < 0.6 * memory[0][1]


def test_the_losses_of_training_equal_those_of_llm_c(files):
    checkout = os.environ.get('LLMC')
    if not checkout:
        pytest.skip(f'needs llm.c: {llmc.GET}; LLMC=$PWD/llm.c python -m pytest tests/project/test_gpt2.py')
    command = [str(value) for value in (llmc.build(checkout, files), files / gpt2.WEIGHTS, files / gpt2.TOKENS, BATCH, LENGTH)]
    with Contestant('gpt2', 'train', 'llmc', files, 2, command) as worker:
        answers = [worker.turn(k, k + 1) for k in range(STEPS)]
    np.testing.assert_allclose([answer['loss'] for answer in answers], losses_of(*gpt2.train(files, 'ours')),
                               rtol=gpt2.TOLERANCE)
    assert all(answer['seconds'] > 0 and answer['cpu_seconds'] > 0 and answer['peak_mib'] > 1 for answer in answers)


def test_the_contest_of_a_small_model(torch, capsys):
    assert gpt2.main([*FLAGS, '--turns=3', '--no-compile', '--recompute', '--json']) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told['tokens'], told['layers'], told['steps']) == (12, 2, 3)
    assert list(told['contestants']) == ['ours', 'ours-recompute', 'torch']
    for found in told['contestants'].values():
        assert min(found['median_s'], found['median_cpu_s']) > 0 and found['peak_mib'] > 20
    # products of a step: 6 multiply-adds for each weight of a matrix and token; attention has more
    C, N = SMALL.width, BATCH * LENGTH
    assert told['contestants']['ours']['flops'] >= 6 * N * (SMALL.layers * 12 * C * C + SMALL.words * C)


def test_the_contest_of_ours_alone_is_a_table_and_says_how_to_get_llm_c(capsys):
    assert gpt2.main([*FLAGS, '--turns=1', '--no-torch']) == 0
    out = capsys.readouterr().out
    assert re.search(r'^pyops +[0-9.]+ ms', out, re.M) and 'llm.c was left out; get it with: git clone' in out
    assert re.search(r'^pyops +[0-9]\.[0-9]{5}$', out, re.M)


def test_losses_that_differ_are_reported_and_not_saved(capsys, monkeypatch):
    losses = {'ours': [4.0, 3.0], 'torch': [4.0, 3.0 + 0.004], 'llmc': [4.0, float('nan')], 'torch-compile': [4.001, 3.001]}
    assert set(gpt2.differences(losses)) == {'torch', 'llmc'}
    monkeypatch.setattr(gpt2, 'contest', lambda *_: ({kind: dict.fromkeys(
        ('p20_s', 'median_s', 'p80_s', 'median_cpu_s', 'peak_mib'), 1.0) for kind in losses}, losses))
    monkeypatch.setattr(gpt2.results, 'save', lambda *_: pytest.fail('saved'))
    assert gpt2.main(['--no-torch', '--save', '--json']) == 1
    err = capsys.readouterr().err
    assert 'PyTorch eager: a loss differs from the loss of pyops by 0.13%' in err and 'llm.c: a loss differs' in err


@pytest.mark.parametrize('flags, match', [
    (['--tokens=17'], '--tokens 17: expected at most --positions 16'), (['--heads=5'], '--heads 5: expected a divisor'),
    (['--words=65537'], '--words 65537: expected at most 65536'),
    (['--llmc=nowhere', '--no-torch'], '--llmc nowhere: has no train_gpt2.c; get llm.c with: git clone')])
def test_wrong_flags_are_one_line(flags, match):
    with pytest.raises(UserError, match=match):
        gpt2.main([*FLAGS, *flags])


def test_a_compiler_that_fails_is_named(tmp_path, monkeypatch):
    (tmp_path / 'train_gpt2.c').write_text('#error "not C"\n')
    monkeypatch.setenv('CC', 'gcc')
    with pytest.raises(UserError, match=r'cannot be compiled \(.*not C.*\); set CC to a compiler with OpenMP'):
        llmc.build(tmp_path, tmp_path)
    monkeypatch.setenv('CC', 'no-such-compiler')
    with pytest.raises(UserError, match='no-such-compiler is not installed'):
        llmc.build(tmp_path, tmp_path)
