"""Files of every format version, written by the version named in tests/golden/README.md, can still be read."""
import importlib
import io
import json
import shutil

import numpy as np
import pytest
from conftest import ROOT

import pyops
from pyops import action_file, cache, checkpoint
from pyops.errors import UserError
from pyops.inspect import writer
from pyops.inspect.logs import Logs
from pyops.inspect.readers import list_tensors, read
from pyops.steplog import Timeline
from pyops.text import mapped
from pyops.text.corpus import Corpus
from pyops.text.mapped import Packed
from seq2seq import train, translate

GOLDEN = ROOT / 'tests' / 'golden'
CHECKPOINTS = sorted(GOLDEN.glob('checkpoint_*'))
TRANSFORMERS = sorted(GOLDEN.glob('transformer_*'))
SAVED = np.arange(6, dtype=np.float32).reshape(2, 3)        # by numpy and PyTorch
SENTENCES = 'Go on.', 'Help me!', 'I am well.'


def test_there_is_a_file_of_every_version():
    packed = int(mapped.FORMAT.rpartition('-')[2])
    for name, version in (('checkpoint_{}', checkpoint.VERSION), ('dump_{}', writer.VERSION), ('packed_{}_bpe', packed),
                          ('dump_{}_pt', writer.VERSION), ('action_{}.safetensors', action_file.VERSION)):
        found = {path.name for path in GOLDEN.glob(name.format('*'))}
        assert found >= {name.format(number + 1) for number in range(version)}, found
    assert f'transformer_{checkpoint.VERSION}' in [path.name for path in TRANSFORMERS]
    listed = (GOLDEN / 'README.md').read_text()
    assert all(f'`{path.name}`' in listed for path in GOLDEN.iterdir() if path.name != 'README.md')
    assert sum(path.stat().st_size for path in GOLDEN.rglob('*') if path.is_file()) < 350_000


def test_a_model_that_was_trained_on_padding_is_refused_because_it_would_translate_wrongly():
    (path,) = (GOLDEN / 'checkpoint_1').glob('*.safetensors')
    tensors, state = checkpoint.load(path)
    facts = json.loads((path.parent / 'facts.json').read_text())
    assert {name: float(np.abs(tensor, dtype=np.float64).sum()) for name, tensor in tensors.items()} == facts['sums']
    assert state['program'] == 'seq2seq' and state['run']['epoch'] == 60 and len(state['vocabularies']) == 2
    for call in (lambda: pyops.load(path), lambda: translate.main(['-c', str(path), 'Go on.']),
                 lambda: train.main(['-f', str(GOLDEN / 'pairs.txt'), '-c', str(path)])):
        with pytest.raises(UserError, match=f'{path}: was trained by a version that encoded the padding of sentences'):
            call()


@pytest.mark.parametrize('folder', [*CHECKPOINTS[1:], *TRANSFORMERS], ids=lambda path: path.name)
def test_a_checkpoint_translates_as_it_did_and_is_trained_further(folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path / 'run')
    (path,) = (tmp_path / 'run').glob('*.safetensors')
    tensors, state = checkpoint.load(path)
    facts = json.loads((folder / 'facts.json').read_text())
    train, translate = (importlib.import_module(f"{state['program']}.{name}") for name in ('train', 'translate'))
    assert {name: float(np.abs(tensor, dtype=np.float64).sum()) for name, tensor in tensors.items()} == facts['sums']
    translate.main(['-c', str(tmp_path / 'run'), *SENTENCES])
    assert capsys.readouterr().out.splitlines()[-len(SENTENCES):] == facts['translations']
    epochs = state['run']['epoch'] + 1
    train.main(['-f', str(GOLDEN / 'pairs.txt'), '-e', str(epochs), '-c', str(tmp_path / 'run'), '--threads', '1'])
    newest = checkpoint.find(tmp_path / 'run', serving=True)
    assert newest.state['run']['epoch'] == epochs and newest.path != str(path)


def test_a_dump_in_the_format_of_pytorch_is_read_without_pytorch():
    logs = Logs(GOLDEN / 'dump_1_pt')
    x, weight = logs.entries
    assert [(entry.name, entry.format, entry.step) for entry in logs.entries] == [('input', 'hifp8', 5), ('weight', 'fp32', 5)]
    assert (x.load() == np.random.default_rng(0).standard_normal((3, 2, 4)).astype('f')).all() and not logs.skipped
    assert weight.load().tolist() == SAVED.tolist() and logs.mask(x).sum() == 5


@pytest.mark.parametrize('file, tensors', [
    ('numpy_2.npy', {'': SAVED}), ('fortran_big_endian.npy', {'': SAVED}),
    ('torch_1.pt', {'x': SAVED, 'half': SAVED.T, 'bf16': SAVED}), ('torch_2.pt', {'x': SAVED, 'half': SAVED.T, 'bf16': SAVED})])
def test_arrays_saved_by_numpy_and_pytorch_are_read(file, tensors):
    path = str(GOLDEN / 'saved' / file)
    found = {key: read(path, key) for key, *_ in list_tensors(path)}
    assert {key: values.tolist() for key, values in found.items()} == {key: values.tolist() for key, values in tensors.items()}


def test_a_dump_is_read():
    logs = Logs(GOLDEN / 'dump_1')
    x, y, dy = logs.entries
    assert (x.layer, x.name, x.format, x.step, x.shape) == ('encoder.0.q', 'input', 'hifp8', 5, (3, 2, 4)) and not logs.skipped
    assert [(entry.operation, entry.name) for entry in (y, dy)] == [('forward', 'output'), ('backward', 'grad_output')]
    values = np.random.default_rng(0).standard_normal((3, 2, 4)).astype('f')
    assert (x.load() == values).all()
    assert [(step['step'], step['loss'], step['norm']) for step in logs.steps] == [(5, 2.5, 0.75), (6, None, None)]


def test_a_kernel_call_is_replayed():
    call, inputs, results = action_file.replay(GOLDEN / 'action_1.safetensors')
    assert call['kernel'] == 'gemm' and call['about']['layer'] == 'hidden' and inputs['a'].shape == (3, 5)
    assert not np.isfinite(results['c']).all()


def test_the_steps_of_a_run_are_read():
    timeline = Timeline(GOLDEN / 'checkpoint_2')
    assert len(timeline) > 0 and np.isfinite(timeline.values).all() and timeline.sessions[0].facts['program'] == 'seq2seq'


@pytest.mark.parametrize('folder', sorted(GOLDEN.glob('packed_*')), ids=lambda path: path.name)
def test_a_packed_corpus_has_its_sentences_and_is_trained_on(folder, tmp_path):
    packed, facts = Packed(str(folder)), json.loads((folder / 'facts.json').read_text())
    sides = packed.vocabularies()
    for part, sentences in facts.items():
        pairs = packed.pairs(part)
        got = [[side.sentence(table[n]) for side, table in zip(sides, (pairs.source, pairs.labels), strict=True)]
               for n in range(len(pairs))]
        assert got == sentences and sentences
    train.main(['-f', str(folder), '-e', '1', '-b', '12', '--embedding', '8', '--hidden', '12', '--layers', '1', '-d', '0',
                '--threads', '1', '-c', str(tmp_path / 'run')])
    assert checkpoint.find(tmp_path / 'run').state['run']['epoch'] == 1


def test_the_tokens_of_a_corpus_are_read_from_a_file_of_the_cache(tmp_path, monkeypatch):
    """The key of such a file has a hash of the source code; here it is a word."""
    monkeypatch.setenv('PYOPS_CACHE', str(tmp_path))
    monkeypatch.setattr(cache, 'digest', lambda *_: b'golden')
    (file,) = (GOLDEN / 'cache_1').iterdir()
    (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / file.name).chmod(0o600)

    def parse():
        raise AssertionError('the file of the cache was not read')
    found, text = Corpus.cached('pairs', io.BytesIO(), parse, None), Corpus.load(GOLDEN / 'pairs.txt')
    assert len(found) == 36 and list(found.sources) == list(text.sources) and list(found.targets) == list(text.targets)
