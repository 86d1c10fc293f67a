"""Test sets in files: reading them, excluding their sentences from training, leaving known sentences out of a test."""
import gzip
import hashlib

import numpy as np
import pytest

from pyops.errors import UserError
from pyops.text import evaluation, testsets
from pyops.text.corpus import Corpus
from pyops.text.split import hold_out
from pyops.text.tokenizer import of_corpus

FOUR = ('eng\tfra\tGo on.\tContinue !\n\neng\tfra\tI can\'t.\tJe ne peux pas.\r\n'
        'eng\tfra\tGo on.\tVa !\neng\tfra\tGo on.\tContinue !\n')
SHA256 = hashlib.sha256(FOUR.encode()).hexdigest()
SOURCES, REFERENCES = ['Go on.', "I can't."], [['Continue !', 'Va !'], ['Je ne peux pas.']]


def load(tmp_path, content, name='tests.txt'):
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return testsets.TestSet.load(tmp_path / name)


def numbered(n):
    """A corpus of n pairs without a file."""
    return Corpus('numbered', [f'word {i} .' for i in range(n)], [f'mot {i} .' for i in range(n)])


# ---- reading -----------------------------------------------------------------------------------------------------------

def test_the_references_of_a_source_are_joined_in_their_order(tmp_path):
    assert load(tmp_path, FOUR) == (str(tmp_path / 'tests.txt'), SOURCES, REFERENCES, SHA256)


def test_a_test_set_may_have_the_columns_of_a_corpus(tmp_path):
    two = ''.join(line.removeprefix('eng\tfra\t') for line in FOUR.splitlines(True))
    three = ''.join(line + '\tCC-BY 2.0\n' for line in two.splitlines() if line)
    for content in (two, three, '\ufeff' + two):
        assert load(tmp_path, content)[1:3] == (SOURCES, REFERENCES)


def test_the_digest_of_a_test_set_does_not_depend_on_its_compression(tmp_path):
    packed = load(tmp_path, gzip.compress(FOUR.encode()), 'tests.txt.gz')
    assert packed[1:] == (SOURCES, REFERENCES, SHA256)
    assert load(tmp_path, FOUR + 'eng\tfra\tHi.\tSalut !\n').sha256 != SHA256


@pytest.mark.parametrize('content, reason', [
    (b'', 'no sentence pairs; give a file with one pair a line'),
    (b'\n \n', 'no sentence pairs; '),
    (FOUR.encode() + b'eng\tfra\tCoffee.\tCaf\xe9.\n', 'line 6: not UTF-8 text, byte 0xe9 at offset [0-9]+; convert '),
    (FOUR.encode('utf-16'), 'line 1: not UTF-8 text'),
    (FOUR + 'Hi.\tSalut !\n', 'line 6: 2 columns; expected two language codes, a source and a target, with tabs between; '
     'correct or remove the line$'),
    (FOUR + 'eng\tfra\tHi.\tSalut !\tCC-BY\n', 'line 6: 5 columns; expected two language codes'),
    (FOUR + 'eng\tfra\tHi.\t \n', 'line 6: an empty column; expected two language codes'),
    ('Hi.\n', 'line 1: no tab; '), ('Hi.\tSalut !\n' + FOUR, 'more than three columns in line 2, 4, 5, 6; '),
    ('1\t2\t3\t4\t5\n', 'more than three columns in line 1; '),
    (gzip.compress(FOUR.encode(), mtime=0)[:-9], 'truncated or damaged gzip file ')])
def test_a_file_that_is_no_test_set_is_an_error_that_names_the_line(tmp_path, content, reason):
    with pytest.raises(UserError, match=f'^{tmp_path}/tests.txt: {reason}') as caught:
        load(tmp_path, content)
    assert '\n' not in str(caught.value)


def test_a_test_set_is_a_file_or_the_data_set_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv('PYOPS_DATA', raising=False)
    for name, data_dir, reason in (
            ('none.txt', None, "none.txt: no such file; .* fetch one with 'python -m pyops.data get tatoeba-test'"),
            ('', None, "test set '': no such file; give a file or 'tatoeba-test'"),
            ('.', None, r'\.: cannot be read \(.*\); give another file'),
            ('tatoeba-test', None, 'tatoeba-test: not found in data; get it with: python -m pyops.data get tatoeba-test$'),
            ('tatoeba-test', '.', r'data directory \.: holds no tatoeba-test; get it with: .* tatoeba-test --data-dir \.$')):
        with pytest.raises(UserError, match=f'^{reason}'):
            testsets.open_test_set(name, data_dir)
    load(tmp_path, FOUR, 'tatoeba-test-v2021-08-07.eng-fra.txt')
    assert testsets.open_test_set('tatoeba-test', '.').sources == SOURCES


# ---- excluding ---------------------------------------------------------------------------------------------------------

def test_a_pair_occurs_in_a_test_set_by_its_source_or_its_target_in_any_case_and_spacing(tmp_path):
    lines = ['GO  ON .\tAvance !', 'Walk.\tva\N{NARROW NO-BREAK SPACE}!', 'Walk.\tMarche !', 'Go.\tContinue!',
             'Continue !\tGo on.']
    (tmp_path / 'pairs.txt').write_text('\n'.join(lines))
    found = load(tmp_path, FOUR).occurs_in(Corpus.load(tmp_path / 'pairs.txt'))
    assert found.tolist() == [True, True, False, True, False]


def test_excluded_pairs_leave_training_and_validation_and_stay_in_the_test():
    corpus, excluded = numbered(400), np.arange(400) % 3 == 0
    whole, parts = hold_out(corpus, 0.3), hold_out(corpus, 0.3, excluded)
    gone = set(corpus.take(np.flatnonzero(excluded)).sources)
    for before, after in zip(whole[:2], parts[:2], strict=True):
        assert 0 < len(after) < len(before)
        assert list(after.sources) == [source for source in before.sources if source not in gone]
    assert parts[2].sources == whole[2].sources and gone & set(whole[2].sources)
    training, validation, test = hold_out(corpus, 0, excluded)
    assert list(training.sources) == list(corpus.without(excluded).sources) and len(validation) == len(test) == 0
    assert corpus.without(None) is corpus


@pytest.mark.parametrize('fraction, left', [(0, '0 to train'), (0.3, '0 to train and 0 to validate')])
def test_excluding_everything_is_an_error(fraction, left):
    with pytest.raises(UserError, match=f'^numbered: 400 of 400 pairs are excluded, which leaves {left}; exclude fewer'):
        hold_out(numbered(400), fraction, np.ones(400, bool))


def test_no_word_is_learned_from_excluded_pairs():
    corpus, excluded = numbered(30), np.arange(30) >= 10
    source, target = of_corpus(corpus, dict(tokenizer='word', min_count=1), excluded=excluded)
    for vocabulary in (source, target):
        assert vocabulary.unknown(['9', '10']) == ['10']


def test_no_subword_is_learned_from_excluded_pairs(tmp_path):
    pytest.importorskip('tokenizers', reason='tokenizers is not installed: pip install tokenizers')
    lines = [f'{word} {i}.\t{word} {i}.' for word in ('apple', 'zebra') for i in range(50)]
    for name, some in (('all', lines), ('half', lines[:50])):
        (tmp_path / f'{name}.txt').write_text('\n'.join(some))
    settings = dict(tokenizer='bpe', hold_out=0.0, vocabulary=300)
    every, half = (of_corpus(Corpus.load(tmp_path / f'{name}.txt'), settings)[0] for name in ('all', 'half'))
    learned, _ = of_corpus(Corpus.load(tmp_path / 'all.txt'), settings, excluded=np.arange(100) >= 50)
    assert learned == half != every


def test_excluded_sentences_are_not_validated_with_and_are_not_known(tmp_path):
    (tmp_path / 'pairs.txt').write_text(''.join(f'Word {i}.\tMot {i // 2}.\n' for i in range(400)))
    corpus = Corpus.load(tmp_path / 'pairs.txt')
    excluded = np.arange(400) % 4 < 2                           # both sources of every other target
    gone = set(corpus.take(np.flatnonzero(excluded)).sources)
    validation, _, _ = evaluation.test_set(corpus, 0.3, 'validation', excluded)
    before, _, _ = evaluation.test_set(corpus, 0.3, 'validation')
    assert set(before) - set(validation) and {source.lower().replace('.', ' .') for source in validation}.isdisjoint(gone)
    (_, _, known), (_, _, fewer) = (evaluation.test_set(corpus, 0.3, 'test', some) for some in (None, excluded))
    assert 0 < fewer < known


# ---- testing -----------------------------------------------------------------------------------------------------------

def test_a_sentence_is_left_out_of_a_test_if_it_or_one_of_its_references_occurs_in_training(tmp_path):
    tests = load(tmp_path, FOUR + ''.join(f'eng\tfra\t{source}\t{target}\n' for source, target in (
        ('Walk!', 'Marche !'), ('Sit.', 'Assieds-toi.'), ('Sit.', 'Assois-toi.'), ('Run.', 'Cours !'))))
    training = Corpus('training', ['walk !', 'be seated .', 'continue !'], ['avance !', 'assois-toi .', 'run .'])
    sources, references, left_out = tests.unseen(training)
    assert (sources, references, left_out) == ([*SOURCES, 'Run.'], [*REFERENCES, ['Cours !']], 2)
    with pytest.raises(UserError, match='tests.txt: all 2 sentences occur in the pairs that the model was trained on; give an'):
        load(tmp_path, FOUR).unseen(Corpus('x', ['go on .', 'x'], ['x', 'je ne peux pas .']))
