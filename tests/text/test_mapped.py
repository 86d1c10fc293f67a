"""Packed corpora: encoded pairs in files that training maps into memory."""
import contextlib
import io
import json
import zipfile

import numpy as np
import pytest
from translation import TINY_SEQ2SEQ, newest

from pyops import backend
from pyops.data import __main__ as command
from pyops.errors import UserError
from pyops.plan import Plan
from pyops.text import embedded, mapped
from pyops.text.corpus import Corpus
from pyops.text.pairs import Pairs
from pyops.text.tokenizer import of_corpus
from seq2seq import train

SETTINGS = dict(tokenizer='word', min_count=2, vocabulary=300, num_steps=7)


@pytest.fixture
def text(tmp_path):
    """A text of 400 pairs with an empty line."""
    path, pairs = tmp_path / 'pairs.txt', embedded.corpus().first(400).texts()
    lines = [f'{source}\t{target}' for source, target in pairs]
    path.write_text('\n'.join([*lines[:150], '', *lines[150:]]) + '\n')
    return path


@pytest.mark.parametrize('tokenizer', ['word', 'bpe'])
def test_packed_pairs_are_the_pairs_that_are_encoded_in_memory(tokenizer, text, tmp_path, monkeypatch):
    if tokenizer == 'bpe':
        pytest.importorskip('tokenizers', reason="tokenizers is not installed: pip install '.[bpe]'")
    corpus, settings = Corpus.load(text), SETTINGS | dict(tokenizer=tokenizer)
    vocabularies = of_corpus(corpus, settings | dict(hold_out=0))
    expected = Pairs.encode(vocabularies[0].read_corpus(corpus), *vocabularies, 7)
    hashes = set()
    for at_once in (1000, 1 << 24):                     # many parts of the text, and one
        monkeypatch.setattr(mapped, 'AT_ONCE', at_once)
        folder = tmp_path / str(at_once)
        line = mapped.pack(text, folder, settings, validation=text)
        assert line == f'packed : 400 pairs in {folder}; train on them with -f {folder}'
        packed = mapped.Packed(folder)
        assert packed.content['vocabularies'] == json.loads(json.dumps(mapped.states(vocabularies)))
        for part in ('train', 'validation'):
            pairs = packed.pairs(part)
            for table, other in ((pairs.source, expected.source), (pairs.labels, expected.labels)):
                assert isinstance(table.ids, np.memmap) and table.ids.dtype == np.int32
                assert (table.ids == other.ids).all() and (table.starts == other.starts).all()
            hashes.add(pairs.digest())
    assert len(hashes) == 1
    mapped.pack(text, tmp_path / 'alone', settings)
    assert len(mapped.Packed(tmp_path / 'alone').pairs('validation')) == 0


def test_training_on_packed_pairs_has_the_bits_of_training_on_the_text(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags, folder = [*TINY_SEQ2SEQ[4:], '-e', '2', '--max-steps', '6'], str(tmp_path / 'packed')
    command.run(['pack', str(text), folder, '--min-count', '2', '--num-steps', '7'])
    with contextlib.redirect_stdout(io.StringIO()) as out:
        train.main([*flags, '-f', str(text), '--min-count', '2', '--num-steps', '7', '-c', 'one'])
        train.main([*flags, '-f', folder, '-c', 'two', '--max-steps', '2'])
        train.main([*flags, '-f', folder, '-c', 'two', '--max-steps', '4'])        # and resumed
    assert f'packed corpus : {folder}, 400 pairs, 0 for validation' in out.getvalue()
    (one, state), (two, packed) = map(newest, ('one', 'two'))
    assert all(one[name].tobytes() == two[name].tobytes() for name in one) and set(one) == set(two)
    assert packed['settings'] == state['settings'] and packed['settings']['num_steps'] == 7
    with pytest.raises(UserError, match='packed was packed with 7; leave the flag out, or pack the corpus again'):
        train.main([*flags, '-f', folder, '--num-steps', '8'])
    with pytest.raises(UserError, match='^--hold-out 0.1: needs the text of the corpus, and .*; leave --hold-out out$'):
        train.main([*flags, '-f', folder, '--hold-out', '0.1'])
    with pytest.raises(UserError, match='^--keep-best loss: nothing is held out .*; pack the corpus with --validation TEXT$'):
        train.main([*flags, '-f', folder, '--keep-best', 'loss'])
    with pytest.raises(UserError, match='was trained on other pairs than the corpus has'):
        command.run(['pack', str(text), folder, '--min-count', '2', '--num-steps', '6'])
        content = json.loads((tmp_path / 'packed' / mapped.CONTENT).read_text())
        content['settings']['num_steps'] = 7
        (tmp_path / 'packed' / mapped.CONTENT).write_text(json.dumps(content))
        train.main([*flags, '-f', folder, '-c', 'two', '--max-steps', '8'])


def test_a_mapped_input_takes_no_memory_of_a_plan(tmp_path):
    np.save(tmp_path / 'x.npy', np.ones(1000, np.float32))
    x, y = np.load(tmp_path / 'x.npy', mmap_mode='r'), np.zeros(1000, np.float32)
    with Plan(x=x, y=y) as plan:
        backend.HOST.launch('scale', y, x, np.ones(1, np.float32), 1000)
    memory = plan.memory()
    assert memory.inputs == 4000 and memory.peak == 4000 and y.sum() == 1000
    plan.dot(tmp_path / 'plan.dot')


def test_bad_texts_and_damaged_folders_are_refused(text, tmp_path, monkeypatch):
    monkeypatch.setattr(mapped, 'AT_ONCE', 1000)
    bad, folder = tmp_path / 'bad.txt', tmp_path / 'packed'
    lines = text.read_text().splitlines()
    bad.write_text('\n'.join([*lines[:300], 'no second column', *lines[300:]]))
    with pytest.raises(UserError, match=r'bad.txt: line 301: no tab; a line is two sentences'):
        mapped.pack(bad, folder, SETTINGS)
    (tmp_path / 'empty.txt').write_text('\n \n')
    with pytest.raises(UserError, match='empty.txt: no source word occurs 2 times or more; give --min-count 1'):
        mapped.pack(tmp_path / 'empty.txt', folder, SETTINGS)
    with zipfile.ZipFile(tmp_path / 'pairs.zip', 'w') as archive:
        archive.write(text, 'pairs.txt')
    with pytest.raises(UserError, match='pairs.zip: is not a text; unpack it, and give the text'):
        mapped.pack(tmp_path / 'pairs.zip', folder, SETTINGS)
    with pytest.raises(UserError, match='absent.txt: cannot be read .*; give a text with a pair of sentences a line'):
        mapped.pack(tmp_path / 'absent.txt', folder, SETTINGS)
    with pytest.raises(UserError, match='pairs.txt: cannot be written'):
        mapped.pack(text, text, SETTINGS)
    assert not mapped.is_packed(folder)
    mapped.pack(text, folder, SETTINGS)
    path = folder / 'train.labels.ids.npy'
    np.save(path, np.load(path)[:-1])
    with pytest.raises(UserError, match=r'train.labels.ids.npy: has \d+ elements, expected \d+; pack the corpus again'):
        mapped.Packed(folder).pairs('train')
    path.unlink()
    with pytest.raises(UserError, match='train.labels.ids.npy: cannot be mapped .*; pack the corpus again'):
        mapped.Packed(folder).pairs('train')
    (folder / mapped.CONTENT).write_text('{"format": "other"}')
    with pytest.raises(UserError, match='format other, expected pyops-pairs-1; pack the corpus again with this version'):
        mapped.Packed(folder)
    (folder / mapped.CONTENT).write_text('{')
    with pytest.raises(UserError, match='pairs.json: cannot be read .*; pack the corpus again'):
        mapped.Packed(folder)


@pytest.mark.parametrize('change', [
    lambda content: [content], lambda content: content | {'parts': []}, lambda content: content | {'parts': {'train': 3}},
    lambda content: content | {'settings': {'num_steps': 0}}, lambda content: content | {'settings': None},
    lambda content: content['parts']['train'].pop('hash') and content,
    lambda content: content['parts']['train']['lengths'].pop('labels.ids') and content])
def test_an_index_of_another_structure_is_refused(change, text, tmp_path):
    mapped.pack(text, tmp_path / 'packed', SETTINGS)
    index = tmp_path / 'packed' / mapped.CONTENT
    index.write_text(json.dumps(change(json.loads(index.read_text()))))
    with pytest.raises(UserError, match=f'{index}: .*; pack the corpus again'):
        mapped.Packed(tmp_path / 'packed')


@pytest.mark.parametrize('state', [None, {}, {'source': None, 'target': None}, {'source': [3], 'target': None},
                                   {'source': 3, 'target': None}, {'source': {}, 'target': None},
                                   {'source': {'bpe': '[' * 100_000}, 'target': None}], ids=lambda state: str(state)[:40])
def test_a_damaged_state_of_the_tokenizers_is_refused(state, text, tmp_path):
    mapped.pack(text, tmp_path / 'packed', SETTINGS)
    index = tmp_path / 'packed' / mapped.CONTENT
    index.write_text(json.dumps(json.loads(index.read_text()) | {'vocabularies': state}))
    with pytest.raises(UserError, match='again$'):
        mapped.Packed(tmp_path / 'packed').vocabularies()


@pytest.mark.parametrize('change, problem', [
    (lambda starts: starts.astype(np.int32), 'expected one axis of int64'),
    (lambda starts: starts.reshape(1, -1), 'expected one axis of int64'),
    (lambda starts: starts + 1, 'the sentences do not follow each other'),
    (lambda starts: np.concatenate([starts[:5], starts[4:5] + 10 ** 9, starts[6:]]), 'the sentences do not follow each other')])
def test_sentences_outside_the_ids_are_refused(change, problem, text, tmp_path):
    mapped.pack(text, tmp_path / 'packed', SETTINGS)
    path = tmp_path / 'packed' / 'train.labels.starts.npy'
    np.save(path, change(np.load(path)))
    with pytest.raises(UserError, match=f'{path}: .*{problem}; pack the corpus again'):
        mapped.Packed(tmp_path / 'packed').pairs('train')
