"""Test sets of the translation programs: --exclude in training and when a run is resumed, --test-set in the evaluation."""
import gzip
import json
import re
from pathlib import Path

import pytest
from translation import assert_same_training, newest

from pyops import checkpoint
from pyops.errors import UserError
from pyops.text import embedded, testsets
from seq2seq import evaluate as seq2seq_evaluate
from seq2seq import train as seq2seq_train
from seq2seq import translate as seq2seq_translate
from transformer import evaluate as transformer_evaluate
from transformer import train as transformer_train

TATOEBA = 'tatoeba-test-v2021-08-07.eng-fra.txt.gz'
PROGRAMS = {'seq2seq': (seq2seq_train, seq2seq_evaluate, ['--embedding', '8', '--hidden', '8', '-b', '50']),
            'transformer': (transformer_train, transformer_evaluate,
                            ['--d-model', '8', '--heads', '2', '--d-ff', '8', '-b', '50'])}
PAIRS = embedded.pairs()[:400]
TESTS = [*PAIRS[::20], ('An unseen test.', 'Un test inconnu.'), ('An unseen test.', 'Une épreuve.')]


def text(pairs, columns=''):
    return ''.join(f'{columns}{source}\t{target}\n' for source, target in pairs)


def four(pairs):
    return text(pairs, 'eng\tfra\t')


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The current directory, with a corpus and two test sets, and no data folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv('PYOPS_DATA', raising=False)
    Path('pairs.txt').write_text(text(PAIRS))
    Path('tests.txt').write_text(four(TESTS))
    Path('other.txt').write_text(four(TESTS[:5]))
    return tmp_path


@pytest.fixture(params=PROGRAMS)
def programs(place, request):
    """main of train with a small model, and main of evaluate."""
    train, evaluate, sizes = PROGRAMS[request.param]
    return lambda flags: train.main([*flags.split(), *sizes]), lambda flags: evaluate.main(flags.split())


@pytest.fixture
def seq2seq(place):
    train, evaluate, sizes = PROGRAMS['seq2seq']
    return lambda flags: train.main([*flags.split(), *sizes]), lambda flags: evaluate.main(flags.split())


@pytest.fixture
def judged():
    """Skip a test if BLEU cannot be computed."""
    pytest.importorskip('sacrebleu', reason='sacrebleu is not installed: pip install sacrebleu')


def kept(pairs):
    """The pairs without a sentence of TESTS, compared here by the text alone: the embedded grammar has one form of each."""
    sources, targets = map(set, zip(*TESTS, strict=True))
    return [pair for pair in pairs if pair[0] not in sources and pair[1] not in targets]


# ---- training ----------------------------------------------------------------------------------------------------------

def test_a_run_without_the_pairs_of_a_test_set_equals_a_run_on_a_corpus_that_lacks_them(programs, capsys):
    train, _ = programs
    Path('less.txt').write_text(text(kept(PAIRS)))
    assert 20 <= len(PAIRS) - len(kept(PAIRS)) < 200
    train('-e 1 -f pairs.txt --exclude tests.txt -c a')
    assert f'excluded : {400 - len(kept(PAIRS))} of 400 pairs, which have a sentence of tests.txt\n' in capsys.readouterr().out
    train('-e 1 -f less.txt -c b')
    (_, state), (_, other_state) = one, other = newest('a'), newest('b')
    assert state['settings'].pop('exclude') == 'tests.txt' and other_state['settings'].pop('exclude') == 'none'
    assert state.pop('excluded') == dict(name='tests.txt', sha256=testsets.TestSet.load('tests.txt').sha256)
    assert other_state.pop('excluded') is None and state.pop('corpus') != other_state.pop('corpus')
    assert_same_training(one, other)


def test_excluded_pairs_are_not_validated_with_and_the_held_out_test_is_the_same(seq2seq, capsys):
    train, _ = seq2seq
    train('-e 1 -f pairs.txt --hold-out 0.2 -c a')
    plain = capsys.readouterr().out
    train('-e 1 -f pairs.txt --hold-out 0.2 -c b --exclude tests.txt')
    out = capsys.readouterr().out
    size = r'held-out test : .* of (\d+) unseen sentences'
    assert re.search(size, plain)[1] == re.search(size, out)[1]
    assert 0 < int(re.search(r'^excluded : (\d+) of 400 pairs', out, re.M)[1]) < 400 - len(kept(PAIRS))
    seq2seq_translate.main(['-c', 'b', '-f', 'pairs.txt', '--test', '2'])
    assert 'of 2 unseen sentences are right' in capsys.readouterr().out


def test_a_resumed_run_keeps_its_test_set_also_under_another_name(programs):
    train, _ = programs
    train('-e 2 -f pairs.txt --exclude tests.txt -c whole')
    train('-e 1 -f pairs.txt --exclude tests.txt -c parts')
    train('-e 2 -f pairs.txt -c parts')
    assert_same_training(newest('whole'), newest('parts'))
    Path('tests.txt').rename('moved.txt')
    Path('moved.txt.gz').write_bytes(gzip.compress(Path('moved.txt').read_bytes()))
    train('-e 3 -f pairs.txt -c parts --exclude moved.txt.gz')
    assert newest('parts')[1]['excluded']['name'] == newest('parts')[1]['settings']['exclude'] == 'moved.txt.gz'
    train('-e 4 -f pairs.txt -c parts')


NEEDS = 'ckpt: needs the test set that was excluded from its training: '


@pytest.mark.parametrize('flags, change, error', [
    ('', lambda: Path('tests.txt').unlink(), f'{NEEDS}tests.txt: no such file; put it back'),
    ('', lambda: Path('tests.txt').write_text(four(TESTS[1:])),
     f'{NEEDS}tests.txt: expected SHA-256 [0-9a-f]{{12}}... of the text, got [0-9a-f]{{12}}...; put the former file back'),
    ('', lambda: Path('tests.txt').write_bytes(b'\xff'), f'{NEEDS}tests.txt: line 1: not UTF-8 text, .*'),
    ('--exclude other.txt', None, f'{NEEDS}other.txt: expected SHA-256 .*; put the former file back'),
    ('--exclude none', None,
     '--exclude none: ckpt was trained with tests.txt; leave --exclude out, or give another folder with -c'),
], ids=['missing', 'changed', 'damaged', 'another', 'none'])
def test_a_test_set_that_is_missing_or_another_stops_a_resumed_run_and_loses_nothing(seq2seq, place, flags, change, error):
    train, _ = seq2seq
    train('-e 1 -f pairs.txt --exclude tests.txt -c ckpt')
    if change:
        change()
    before = {path.name: path.read_bytes() for path in Path('ckpt').iterdir()}
    with pytest.raises(UserError, match=f'^{error}$'):
        train(f'-e 2 -f pairs.txt -c ckpt {flags}')
    assert {path.name: path.read_bytes() for path in Path('ckpt').iterdir()} == before


def test_a_run_that_excluded_nothing_cannot_exclude_when_it_is_resumed(seq2seq):
    train, _ = seq2seq
    train('-e 1 -f pairs.txt -c ckpt')
    with pytest.raises(UserError, match='^--exclude tests.txt: ckpt was trained with none; leave --exclude out, or give'):
        train('-e 2 -f pairs.txt -c ckpt --exclude tests.txt')
    train('-e 2 -f pairs.txt -c ckpt --exclude none')


def test_tatoeba_test_is_excluded_from_fra_eng_if_it_is_found(programs, capsys):
    train, _ = programs
    Path('data').mkdir()
    Path('pairs.txt').rename('data/fra.txt')
    train('-e 1 -c before')
    Path('data', TATOEBA).write_bytes(gzip.compress(Path('tests.txt').read_bytes()))
    capsys.readouterr()
    line = f'excluded : {400 - len(kept(PAIRS))} of 400 pairs, which have a sentence of data/{TATOEBA}'
    for flags in ('', '-f data/fra.txt --data-dir data'):
        train(f'-e 1 {flags} -c ckpt{len(flags)}')
        assert f'{line}; this is the default, --exclude none trains on them\n' in capsys.readouterr().out
    assert newest('ckpt0')[1]['settings']['exclude'] == newest('ckpt0')[1]['excluded']['name'] == 'tatoeba-test'
    train('-e 2 -c ckpt0')
    assert f'{line}\n' in capsys.readouterr().out
    Path('copy.txt').write_bytes(Path('data/fra.txt').read_bytes())
    for flags in ('-c before', '-c none --exclude none', '-c copy -f copy.txt', '-c embedded -f embedded -t 1'):
        train(f'-e 2 {flags}')
        assert 'excluded' not in capsys.readouterr().out
    Path('data', TATOEBA).unlink()
    with pytest.raises(UserError, match=f'^{NEEDS}tatoeba-test: not found in data; get it with: .* get tatoeba-test$'.replace(
            'ckpt', 'ckpt0')):
        train('-e 3 -c ckpt0')


def test_a_checkpoint_from_before_there_were_test_sets_has_none(seq2seq, capsys):
    train, _ = seq2seq
    Path('data').mkdir()
    Path('pairs.txt').rename('data/fra.txt')
    train('-e 1 -c ckpt')
    path = checkpoint.find('ckpt', serving=True).path
    tensors, state = checkpoint.load(path)
    del state['settings']['exclude'], state['excluded']
    checkpoint.save(path, tensors, state)
    Path('data', TATOEBA).write_bytes(gzip.compress(Path('tests.txt').read_bytes()))
    train('-e 2 -c ckpt')
    assert 'excluded' not in capsys.readouterr().out and newest('ckpt')[1]['settings']['exclude'] == 'none'


@pytest.mark.parametrize('flags, error', [
    ('--exclude all.txt', '--exclude all.txt: all 400 pairs of pairs.txt have a sentence of all.txt; give another test set, or '
     '--exclude none'),
    ('--exclude most.txt --pairs 390', 'pairs.txt: 390 of 390 pairs are excluded, which leaves 0 to train; exclude fewer .*'),
    ('--exclude empty.txt', 'empty.txt: no sentence pairs; give .*'),
    ('--exclude none.txt', "none.txt: no such file; give .*, or fetch one with 'python -m pyops.data get tatoeba-test'"),
    ('--exclude tatoeba-test', 'tatoeba-test: not found in data; get it with: python -m pyops.data get tatoeba-test'),
    ('--exclude=', "test set '': no such file; give a file or 'tatoeba-test'"),
])
def test_a_bad_test_set_stops_a_run_before_it_begins(seq2seq, flags, error):
    train, _ = seq2seq
    Path('all.txt').write_text(four(PAIRS))
    Path('most.txt').write_text(four(PAIRS[:390]))
    Path('empty.txt').write_text('')
    with pytest.raises(UserError, match=f'^{error}$'):
        train(f'-e 1 -f pairs.txt -c new {flags}')
    assert list(Path('new').iterdir()) == []


# ---- evaluation --------------------------------------------------------------------------------------------------------

def test_a_test_set_is_scored_without_the_sentences_that_occur_in_training(programs, judged, capsys):
    train, evaluate = programs
    train('-e 1 -f pairs.txt -c ckpt')                          # nothing is held out
    Path('mixed.txt').write_text(four([*TESTS, ('  AN unseen  test .', 'Encore un test.'), ('Unseen.', PAIRS[7][1].upper())]))
    capsys.readouterr()
    evaluate('-c ckpt -f pairs.txt --test-set mixed.txt -o out.tsv --beam 1')
    out = capsys.readouterr().out
    known = len({source for source, _ in PAIRS[::20]}) + 1      # the last is known by its reference
    assert f'corpus : pairs.txt\ntest set : mixed.txt, 2 sentences; {known} more occur in training\n' in out
    rows = [line.split('\t') for line in Path('out.tsv').read_text().splitlines()]
    assert [(row[0], row[2:]) for row in rows] == [('An unseen test.', ['Un test inconnu.', 'Une épreuve.']),
                                                   ('AN unseen  test .', ['Encore un test.'])]
    evaluate('-c ckpt -f pairs.txt --test-set mixed.txt --json --beam 1')
    report = json.loads(capsys.readouterr().out)
    assert report['test_set'] == dict(path='mixed.txt', sha256=testsets.TestSet.load('mixed.txt').sha256)
    assert (report['left_out'], report['sentences'], report['references']) == (known, 2, 3)
    assert f'one reference  : BLEU {report["one_reference"]["bleu"]:5.2f} ' in out
    evaluate('-c ckpt -f pairs.txt --test-set mixed.txt --json --first 1')
    assert json.loads(capsys.readouterr().out)['sentences'] == 1


def test_a_test_set_that_was_excluded_from_training_is_scored_as_a_whole(programs, judged, capsys):
    train, evaluate = programs
    Path('data').mkdir()
    Path('pairs.txt').rename('data/fra.txt')
    Path('data', TATOEBA).write_bytes(gzip.compress(Path('tests.txt').read_bytes()))
    train('-e 1 -c ckpt')
    capsys.readouterr()
    evaluate('-c ckpt --test-set tatoeba-test --beam 1')
    sentences = len({source for source, _ in TESTS})
    assert f'test set : data/{TATOEBA}, {sentences} sentences; 0 more occur in training\n' in capsys.readouterr().out


def test_an_evaluation_requires_the_test_set_that_was_excluded_from_training(seq2seq, judged, capsys):
    train, evaluate = seq2seq
    train('-e 1 -f pairs.txt --hold-out 0.2 -c ckpt --exclude tests.txt')
    capsys.readouterr()
    for part in ('test', 'validation'):
        evaluate(f'-c ckpt -f pairs.txt --part {part} --beam 1 --json')
        assert json.loads(capsys.readouterr().out)['sentences'] > 0
    Path('tests.txt').rename('moved.txt')
    for run in (lambda: evaluate('-c ckpt -f pairs.txt'), lambda: evaluate('-c ckpt -f pairs.txt --test-set moved.txt'),
                lambda: seq2seq_translate.main(['-c', 'ckpt', '-f', 'pairs.txt', '--test', '2'])):
        with pytest.raises(UserError, match=f'^{NEEDS}tests.txt: no such file; put it back$'):
            run()
    Path('moved.txt').rename('tests.txt')
    Path('tests.txt').write_text(four(TESTS[1:]))
    with pytest.raises(UserError, match=f'^{NEEDS}tests.txt: expected SHA-256 .*; put the former file back$'):
        evaluate('-c ckpt -f pairs.txt')


@pytest.mark.parametrize('flags, error', [
    ('--test-set all.txt', 'all.txt: all [0-9]+ sentences occur in the pairs that the model was trained on; give another'),
    ('--test-set bad.txt', 'bad.txt: line 2: 2 columns; expected two language codes'),
    ('--test-set none.txt', 'none.txt: no such file; '), ('--test-set tatoeba-test', 'tatoeba-test: not found in data; get it'),
    ('--test-set=', "test set '': no such file; "),
    ('--test-set tests.txt -f other.txt', 'ckpt: its source vocabulary of [0-9]+ words differs from the corpus'),
])
def test_a_bad_test_set_stops_an_evaluation(seq2seq, judged, flags, error):
    train, evaluate = seq2seq
    train('-e 1 -f pairs.txt -c ckpt')
    Path('all.txt').write_text(four(PAIRS[5:50]))
    Path('bad.txt').write_text('eng\tfra\tHi.\tSalut !\nGo.\tVa !\n')
    Path('other.txt').write_text(text(PAIRS[:150]))
    with pytest.raises(UserError, match=f'^{error}'):
        evaluate(f'-c ckpt -f pairs.txt {flags}')


def test_a_part_of_the_held_out_sentences_is_not_a_test_set(capsys):
    with pytest.raises(SystemExit) as ended:
        seq2seq_evaluate.main('-c ckpt --test-set tests.txt --part validation'.split())
    assert ended.value.code == 2 and capsys.readouterr().err == (
        'python -m seq2seq.evaluate: error: --test-set tests.txt: expected no --part validation; leave one of them out; '
        'see --help\n')
