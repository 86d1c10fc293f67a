"""Every example runs in each way, and prints what it promises."""
import functools
import importlib
import os
import subprocess
import sys
import types

import numpy as np
import pytest
from arrays import close
from conftest import ROOT
from ranks import needs_mpi, run_ranks
from translation import assert_same_training, newest

from examples import language_model, word_lstm
from pyops import checkpoint
from pyops.data import DataLoader, MNISTDataset
from pyops.errors import UserError
from pyops.text.pairs import Sequences

EXAMPLES = [path.stem for path in sorted((ROOT / 'examples').glob('*.py'))]
# arguments of python for the example {}, and the current folder
WAYS = {'module': (['-m', 'examples.{}'], ROOT), 'file': (['examples/{}.py'], ROOT),
        'its folder': (['{}.py'], ROOT / 'examples'), 'another folder': (['../examples/{}.py'], ROOT / 'docs')}


@functools.cache
def run(name, way='module', *flags):
    arguments, folder = WAYS[way]
    environment = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    out = subprocess.run([sys.executable, *(argument.format(name) for argument in arguments), *flags], cwd=folder, text=True,
                         capture_output=True, env=environment)
    assert out.returncode == 0, out.stderr
    return out.stdout.splitlines()


@pytest.mark.parametrize('name, way', [*((name, 'another folder') for name in EXAMPLES), ('language_model', 'file'),
                                       ('language_model', 'its folder')])
def test_every_example_starts_from_any_folder_as_a_file(name, way):
    if name in ('data_parallel', 'mlp_on_tensors'):         # they have no flags
        assert run(name, way) == run(name)
    else:                               # they run as modules below
        assert run(name, way, '--help')[0].startswith('usage: ')


def test_every_example_has_a_test_below():
    assert EXAMPLES == ['data_parallel', 'digits_cnn', 'language_model', 'mlp_on_tensors', 'residual_cnn',
                        'vision_transformer', 'word_lstm']


def test_gradients_from_the_tape_are_those_by_hand_bit_for_bit():
    lines = run('mlp_on_tensors')
    losses = [line.split() for line in lines if line.startswith('step')]
    assert [words[3] for words in losses] == [words[6] for words in losses] and float(losses[-1][3]) < 1 < float(losses[0][3])
    same = [line for line in lines if line.endswith('all 100 gradients have the same bits, and so has the parameter: True')]
    assert [line.split()[0] for line in same] == ['w1', 'bias1', 'w2', 'bias2']


# ---- models that run on PyTorch too ------------------------------------------------------------------------------------

def on_torch(name):
    """Return the example as a module whose model, training and optimizer are PyTorch's: its source with other imports."""
    text = (ROOT / 'examples' / f'{name}.py').read_text()
    for ours, theirs in (('from pyops import flags, nn, optim', 'from torch import nn, optim\nfrom pyops import flags'),
                         ('from pyops import functional as F', 'from torch.nn import functional as F')):
        assert text.count(ours) == 1
        text = text.replace(ours, theirs)
    module = types.ModuleType(f'{name}_on_torch')
    module.__file__ = str(ROOT / 'examples' / f'{name}.py')
    exec(compile(text, module.__file__, 'exec'), vars(module))
    return module


def batches_for(name, example, torch):
    """Return 20 batches of the example's data for both."""
    if name == 'word_lstm':
        corpus = example.corpus_of(None)
        ours = example.pieces_of(corpus.train, 16, 12)[:20]
    elif name == 'residual_cnn':
        training, _ = example.datasets(None)
        ours = [*DataLoader(training, 16, shuffle=True)][:20]
    else:
        digits = MNISTDataset(embedded=True)
        ours = [*DataLoader(digits, 16, sampler=range(320))]
    def twin(x):
        found = torch.tensor(x.numpy())
        return found.double() if found.is_floating_point() else found.long()
    return ours, [tuple(map(twin, pair)) for pair in ours]


@pytest.mark.parametrize('name, make, more', [
    ('residual_cnn', lambda m: m.ResNet(4), ()), ('word_lstm', lambda m: m.LanguageModel(WORDS, 24), ()),
    ('vision_transformer', lambda m: m.VisionTransformer(16), (0.003,)),
    ('digits_cnn', lambda m: m.ConvNet(4, 20), (0.003, 20))])
def test_the_loss_curve_of_an_example_is_that_of_pytorch_from_the_same_weights(name, make, more, torch):
    example, twin = importlib.import_module(f'examples.{name}'), on_torch(name)
    ours, theirs = batches_for(name, example, torch)
    model, module = make(example), make(twin).double()
    missing, unexpected = module.load_state_dict(
        {name: torch.tensor(value).double() for name, value in model.state_dict().items()}, strict=False)
    assert not unexpected and all('num_batches_tracked' in key for key in missing)
    found = example.train(model, example.make_optimizer(model, 0.003), ours, *more)
    wanted = twin.train(module, twin.make_optimizer(module, 0.003), theirs, *more)
    assert len(found) == 20 and found[-1] < found[0] - 0.1
    close(np.array(found), np.array(wanted), 2e-4)


WORDS = len(word_lstm.corpus_of(None))


@pytest.mark.parametrize('name, better', [('residual_cnn', 0.8), ('vision_transformer', 0.8), ('digits_cnn', 0.95)])
def test_the_classifiers_learn_in_seconds(name, better):
    *_, last = run(name)
    assert float(last.split()[-1]) > better


def test_the_words_of_the_lstm_are_predicted_better_than_by_chance():
    *epochs, text = run('word_lstm')
    perplexities = [float(line.split()[-1]) for line in epochs]
    assert perplexities[-1] < perplexities[0] < WORDS / 4 and len(text.split()) >= 15


@needs_mpi
def test_two_processes_train_like_one():
    status, out, err = run_ranks(2, '-m', 'examples.data_parallel')
    assert status == 0, err
    *alone, last = run('data_parallel')
    *together, same = out.splitlines()
    assert last == same == 'all ranks have the same parameters' and len(alone) == len(together) == 6
    losses = [[float(line.split()[-1]) for line in lines] for lines in (alone, together)]
    assert losses[0][-1] < 0.5 * losses[0][0] and np.allclose(*losses, atol=2e-3)


# ---- the language model ------------------------------------------------------------------------------------------------

def test_the_language_model_learns_the_embedded_sentences_and_writes_letters_of_them():
    *_, last = lines = run('language_model')
    losses = [float(line.split()[-1]) for line in lines if line.startswith('epoch ')]
    assert len(losses) == 5 and losses[0] < 3.4 and losses[-1] < 2.0          # 29 letters by chance: 3.4
    assert last and len('\n'.join(lines).split(f'{losses[-1]:.5f}\n')[1]) == 200


def test_the_gradients_of_the_language_model_are_central_differences():
    model = language_model.LanguageModel(language_model.Config(1, 9, 8, 16, heads=2, layers=2, dropout=0.0, num_steps=5,
                                                               pre_norm=True))
    rng = np.random.default_rng(0)
    labels = rng.integers(language_model.FIRST, 9, (3, 5)).astype(np.int32)
    windows = Sequences.of([np.array([language_model.BEGIN, *window[:-1]]) for window in labels], 5)

    def loss():
        return float(model.forward(windows, labels.ravel(), None)[0][0])
    model.params.zero_grads()
    model.backward(model.forward(windows, labels.ravel(), None)[1])
    direction = rng.standard_normal(model.params.values.shape).astype(np.float32)
    slope, size, start = float(direction @ model.params.grads), 1e-2, model.params.values.copy()
    model.params.values[:] = start + size * direction / np.linalg.norm(direction)
    ahead = loss()
    model.params.values[:] = start - size * direction / np.linalg.norm(direction)
    numeric = (ahead - loss()) / (2 * size) * np.linalg.norm(direction)
    assert abs(slope) > 0.01 and abs(slope - numeric) <= 0.02 * abs(slope)


def test_a_letter_is_predicted_from_earlier_ones_only():
    model = language_model.LanguageModel(language_model.Config(1, 9, 8, 16, heads=2, layers=2, dropout=0.0, num_steps=5))
    ids = np.random.default_rng(0).integers(0, 9, (3, 5))
    before, after = [], []
    for states in (before, after):
        y, _ = model.decoder.forward(Sequences.of(ids, 5))
        states[:] = y.copy().reshape(3, 5, 8).transpose(1, 0, 2)
        ids[:, 3] = (ids[:, 3] + 1) % 9
    assert np.array_equal(before[:3], after[:3])
    assert all((one != other).any(-1).all() for one, other in zip(before[3:], after[3:], strict=True))


def test_a_resumed_language_model_equals_a_whole_one(tmp_path, capsys):
    text = tmp_path / 'text.txt'
    text.write_text('to be or not to be, that is the question: ' * 30)
    flags = [str(text), '--d-model', '8', '--write', '20', '-b', '8']
    language_model.main([*flags, '-e', '3', '-c', str(tmp_path / 'whole')])
    whole = capsys.readouterr().out
    language_model.main([*flags, '-e', '1', '-c', str(tmp_path / 'parts')])
    language_model.main([*flags, '-e', '3', '-c', str(tmp_path / 'parts')])
    assert_same_training(newest(tmp_path / 'whole'), newest(tmp_path / 'parts'))
    assert capsys.readouterr().out.splitlines()[-1] == whole.splitlines()[-1]


@pytest.mark.parametrize('arguments, error', [
    (['none.txt'], 'none.txt: cannot be read as UTF-8 text .*; name a text file'),
    (['short.txt'], 'short.txt: has 5 letters; give a longer text or a smaller --context than 32'),
    (['short.txt', '--context', '4', '-e', '0', '--prompt', 'hex'], "--prompt: the text has no 'x'; leave it out"),
    (['short.txt', '--context', '4', '-c', 'ckpt'], '.*: was not trained on the letters of short.txt; give another .*')])
def test_bad_input_of_the_language_model(arguments, error, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'short.txt').write_text('hello')
    (tmp_path / 'ckpt').mkdir()
    checkpoint.save('ckpt/checkpoint_20260101_000000_1.safetensors', {'w': np.zeros(1, np.float32)}, {'letters': ['a']})
    with pytest.raises(UserError, match=f'^{error}$'):
        language_model.main(arguments)
