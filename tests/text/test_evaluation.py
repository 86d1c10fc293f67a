"""Evaluation on held-out sentences: which sentences, raw text in and out, the scores, the program."""
import json
import re
import sys

import numpy as np
import pytest
from conftest import ROOT

from pyops.errors import UserError
from pyops.text import embedded, evaluation
from pyops.text.corpus import Corpus
from pyops.text.detokenize import detokenize
from pyops.text.preprocess import tokenize
from pyops.text.split import hold_out
from scripts import translations
from seq2seq import evaluate as seq2seq_evaluate
from seq2seq import train as seq2seq_train
from transformer import evaluate as transformer_evaluate
from transformer import train as transformer_train


def corpus_file(tmp_path, lines):
    path = tmp_path / 'pairs.txt'
    path.write_text(''.join(line + '\n' for line in lines), encoding='utf-8')
    return path


# ---- raw text ----------------------------------------------------------------------------------------------------------

def test_a_corpus_keeps_the_raw_text_of_its_pairs_through_every_selection(tmp_path):
    lines = [f'Sentence {i}!\tPhrase {i}\N{NARROW NO-BREAK SPACE}!\tsomebody' for i in range(10)] + ['', ' One. \tUn. ']
    corpus = Corpus.load(corpus_file(tmp_path, lines))
    pairs = [(f'Sentence {i}!', f'Phrase {i}\N{NARROW NO-BREAK SPACE}!') for i in range(10)] + [('One.', 'Un.')]
    assert corpus.texts() == pairs and corpus.first(3).texts() == pairs[:3]
    chosen = corpus.take(np.array([10, 4, 2])).take(np.array([2, 0]))
    assert chosen.texts() == [pairs[2], pairs[10]] and list(chosen.sources) == ['sentence 2 !', 'one .']
    assert embedded.corpus().texts() == embedded.pairs()
    with pytest.raises(ValueError, match='^made: has no raw text$'):
        Corpus('made', ['a'], ['b']).texts()


def test_a_large_corpus_has_its_raw_text_when_its_tokens_come_from_the_cache(tmp_path):
    path = corpus_file(tmp_path, [f'Sentence {i}.\tPhrase {i}.' for i in range(5000)])
    for _ in range(2):
        assert Corpus.load(path).first(2).texts() == [('Sentence 0.', 'Phrase 0.'), ('Sentence 1.', 'Phrase 1.')]


def test_a_corpus_that_shrank_after_it_was_opened_is_an_error(tmp_path):
    path = corpus_file(tmp_path, ['a\tb', 'c\td'])
    corpus = Corpus.load(path)
    corpus_file(tmp_path, ['a\tb'])
    with pytest.raises(UserError, match=f'^{path}: has changed since it was opened; start again$'):
        corpus.texts()


@pytest.mark.parametrize('text', ['Va !', "Je n'ai pas 3,5 euros.", 'Oui, non. Peut-être ?', '« Non », dit-il.',
                                  'Élève, viens !', 'Où est-il ? À la maison.', '"Oui," dit-elle.', ''])
def test_text_is_restored_from_its_tokens(text):
    assert detokenize(tokenize(text)) == text


def test_every_embedded_sentence_is_restored():
    targets = [target for _, target in embedded.pairs()]
    assert [detokenize(tokenize(target)) for target in targets] == [target.replace('\u202f', ' ') for target in targets]


# ---- the sentences -----------------------------------------------------------------------------------------------------

def test_no_source_and_no_reference_of_a_test_set_occurs_in_training():
    corpus = embedded.corpus()
    training, _, test = hold_out(corpus, 0.1)
    sources, references, left_out = evaluation.test_set(corpus, 0.1)
    known_sources, known_targets = set(training.sources), set(training.targets)
    assert len(sources) + left_out == len(set(test.sources)) and 0 < left_out < 100 < len(sources) == len(set(sources))
    for source, some in zip(sources, references, strict=True):
        assert ' '.join(tokenize(source)) not in known_sources
        assert all(' '.join(tokenize(target)) not in known_targets for target in some)
    validation, _, _ = evaluation.test_set(corpus, 0.1, 'validation')
    assert not set(validation) & set(sources)


def test_references_are_all_distinct_translations_in_their_order(tmp_path):
    lines = [f'Word {i} here.\tMot {n} ici {i}.' for i in range(200) for n in (2, 1, 2)]
    sources, references, left_out = evaluation.test_set(Corpus.load(corpus_file(tmp_path, lines)), 0.2)
    assert left_out == 0 and len(sources) > 5
    for source, some in zip(sources, references, strict=True):
        number = source.split()[1]
        assert some == [f'Mot 2 ici {number}.', f'Mot 1 ici {number}.']


def test_a_part_whose_translations_all_occur_in_training_is_an_error(tmp_path):
    corpus = Corpus.load(corpus_file(tmp_path, [f'Word {i}.\tMot.' for i in range(100)]))
    with pytest.raises(UserError, match='pairs.txt: all [0-9]+ test sentences have a translation that occurs in training; '):
        evaluation.test_set(corpus, 0.2)


# ---- the scores --------------------------------------------------------------------------------------------------------

def test_scores_are_those_of_sacrebleu_against_one_reference_and_all():
    sacrebleu = pytest.importorskip('sacrebleu', reason='sacrebleu is not installed: pip install sacrebleu')
    hypotheses = ['Il est parti hier.', 'Je ne sais <unk> pas du tout.', 'Bonjour.']
    references = [['Il est parti.', 'Il est parti hier.'], ['Je ne le sais pas du tout.'], ['Salut.', 'Bonjour.', 'Coucou.']]
    sources = ['He left.', 'I do not know that at all, my friend.', 'Hello.']
    report = evaluation.evaluate(hypotheses, sources, references)
    one, all_of_them = report['one_reference'], report['all_references']
    assert one['bleu'] == sacrebleu.corpus_bleu(hypotheses, [[some[0] for some in references]]).score
    padded = [['Il est parti.', 'Je ne le sais pas du tout.', 'Salut.'], ['Il est parti hier.', None, 'Bonjour.'],
              [None, None, 'Coucou.']]
    assert all_of_them['bleu'] == sacrebleu.corpus_bleu(hypotheses, padded).score > one['bleu'] > 0
    assert all_of_them['chrf'] == sacrebleu.corpus_chrf(hypotheses, padded).score
    assert one['exact'] == 0 and all_of_them['exact'] == 2 / 3 and report['unknown'] == 1 / 3 and report['references'] == 6
    assert 'nrefs:1|case:mixed|' in one['bleu_signature'] and 'nrefs:var|' in all_of_them['bleu_signature']
    assert [(group['words'], group['sentences']) for group in report['by_length']] == [([1, 4], 2), ([9, 12], 1)]
    assert json.loads(json.dumps(report)) == report
    lines = evaluation.text(report).splitlines()
    assert lines[0].startswith('one reference  : BLEU ') and lines[-1].split()[:2] == ['9-12', '1']


# ---- the programs ------------------------------------------------------------------------------------------------------

PAIRS = ['-f', 'embedded', '--pairs', '600', '-b', '32', '-d', '0', '--hold-out', '0.1']
SMALL = {'seq2seq': (seq2seq_train, seq2seq_evaluate, ['--embedding', '48', '--hidden', '96', '-e', '25']),
         'transformer': (transformer_train, transformer_evaluate,
                         ['--d-model', '48', '--heads', '2', '-l', '0.003', '-e', '25'])}


@pytest.fixture(scope='module', params=SMALL)
def trained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    train, evaluate, flags = SMALL[request.param]
    train.main([*PAIRS, *flags, '-c', str(folder)])
    return evaluate, folder


def test_a_model_that_learned_scores_on_sentences_that_it_has_not_seen(trained, tmp_path, capsys):
    pytest.importorskip('sacrebleu', reason='sacrebleu is not installed: pip install sacrebleu')
    evaluate, folder = trained
    out = tmp_path / 'out.tsv'
    arguments = ['-c', str(folder), '-f', 'embedded', '-o', str(out)]
    evaluate.main(arguments)
    text = capsys.readouterr().out
    bleu = float(re.search(r'^one reference  : BLEU +(\S+) ', text, re.M)[1])
    assert 15 < bleu <= 100                 # an untrained model scores below 1
    rows = [line.split('\t') for line in out.read_text().splitlines()]
    sources, references, left_out = evaluation.test_set(embedded.corpus().first(600), 0.1)
    assert [row[0] for row in rows] == sources and [row[2:] for row in rows] == references
    evaluate.main([*arguments[:4], '--json', '-b', '7'])
    told = capsys.readouterr()
    report = json.loads(told.out)           # nothing else on standard output
    assert report['one_reference']['bleu'] == pytest.approx(bleu, abs=0.005) and 'loading from checkpoint : ' in told.err
    assert report == dict(beam=5, length_penalty=1.0, test_set=None, left_out=left_out) | evaluation.evaluate(
        [row[1] for row in rows], sources, references)
    assert 'beam search    : beam 5, length penalty 1\n' in text
    evaluate.main([*arguments[:4], '--json', '--part', 'validation', '--first', '5'])
    assert json.loads(capsys.readouterr().out)['sentences'] == 5


def test_an_evaluation_writes_the_n_best_translations_with_their_scores(trained, tmp_path, capsys):
    pytest.importorskip('sacrebleu', reason='sacrebleu is not installed: pip install sacrebleu')
    evaluate, folder = trained
    out, arguments = tmp_path / 'out.tsv', ['-c', str(folder), '-f', 'embedded', '--first', '6']
    evaluate.main([*arguments, '-o', str(out), '--beam', '4', '--nbest', '3', '--scores', '--length-penalty', '1', '--json'])
    report = json.loads(capsys.readouterr().out)
    assert report['beam'] == 4 and report['length_penalty'] == 1.0 and report['sentences'] == 6
    rows = [line.split('\t') for line in out.read_text().splitlines()]
    assert len(rows) == 18 and [row[0] for row in rows[::3]] == [row[0] for row in rows[1::3]]
    for first in range(0, 18, 3):
        scores = [float(row[2]) for row in rows[first:first + 3]]
        assert scores == sorted(scores, reverse=True) and scores[0] <= 0
    evaluate.main([*arguments, '--beam', '1'])
    assert 'greedy decoding\n' in capsys.readouterr().out
    for flags, text in (('--scores', '--scores: expected --output FILE, the file to write to'),
                        ('--nbest 2', '--nbest 2: expected --output FILE, the file to write to'),
                        ('--beam 2 --nbest 3', '--nbest 3: expected at most --beam 2; lower --nbest or raise --beam')):
        with pytest.raises(SystemExit) as ended:
            evaluate.main([*arguments, *flags.split()])
        assert ended.value.code == 2 and capsys.readouterr().err.splitlines()[-1].endswith(f'error: {text}; see --help')


def test_a_checkpoint_without_held_out_sentences_is_an_error(tmp_path, capsys):
    seq2seq_train.main(['-f', 'embedded', '-t', '1', '--hold-out', '0', '-e', '1', '--embedding', '8', '--hidden', '8',
                        '-c', str(tmp_path)])
    with pytest.raises(UserError, match=f'^{tmp_path}: nothing was held out of its training; train with --hold-out 0.1'):
        seq2seq_evaluate.main(['-c', str(tmp_path), '-f', 'embedded'])


def test_a_corpus_of_other_words_is_an_error_that_does_not_advise_to_train_again(trained, tmp_path):
    evaluate, folder = trained
    other = tmp_path / 'other.txt'
    other.write_text(''.join(f'{source}\t{target}\n' for source, target in embedded.pairs()[5000:5040]))
    with pytest.raises(UserError, match='; give the corpus it was trained on, embedded, with -f$'):
        evaluate.main(['-c', str(folder), '-f', str(other)])


def test_a_missing_sacrebleu_is_reported_before_anything_is_translated(monkeypatch):
    monkeypatch.setitem(sys.modules, 'sacrebleu', None)
    with pytest.raises(UserError, match='^sacrebleu is not installed: install it with: pip install sacrebleu$'):
        seq2seq_evaluate.main(['-c', 'nowhere'])


def test_the_programs_are_documented():
    page = (ROOT / 'docs' / 'programs.md').read_text()
    assert all(f'python -m {name}.evaluate' in page for name in SMALL)


# ---- the twenty translations of docs/quality.md ----------------------------------------------------------------------

def pairs_of(*lengths, word='a'):
    """Return (source, references) for sources of these numbers of words, which end with their number in the list."""
    return [(' '.join([word] * (n - 1) + [str(i)]), ['r']) for i, n in enumerate(lengths)]


def test_twenty_translations_are_chosen_by_length_and_order_alone():
    def lengths(rows):
        return [len(source.split()) for source, _ in rows]
    test = pairs_of(2, *(n for n in range(3, 18) for _ in range(3)), 40)
    rows = translations.chosen(test, pairs_of(5, 21, 30, 21, 31, word='b'))
    assert lengths(rows) == [3, 3, 4, 4, 5, 5, *range(6, 18), 21, 30] and len(rows) == 20
    assert [rows[0], rows[1], rows[4]] == [test[1], test[2], test[7]]       # the first ones, of the test part if it has any
    assert rows[-2][0].startswith('b ') and rows[-2][0].endswith(' 1')
    many = translations.chosen(pairs_of(*range(3, 31)), [])
    assert lengths(many)[:2] == [3, 4] and lengths(many)[-1] == 30 and len({source for source, _ in many}) == 20
    assert lengths(translations.chosen(pairs_of(4, 3, 4), [])) == [3, 4, 4]


def test_the_table_of_translations_is_written_to_the_page(trained, tmp_path, capsys):
    _, folder = trained
    page = tmp_path / 'page.md'
    page.write_text('a\n<!-- translations -->\nold\n<!-- /translations -->\nb\n')
    translations.main([str(folder), '-f', 'embedded'])
    table = capsys.readouterr().out
    translations.main([str(folder), '-f', 'embedded', '--save', '--page', str(page)])
    assert page.read_text() == f'a\n<!-- translations -->\n{table}<!-- /translations -->\nb\n'
    rows = [line.strip('| ').split(' | ') for line in table.splitlines()[2:]]
    sources, references, _ = evaluation.test_set(embedded.corpus().first(600), 0.1)
    assert len(rows) == 4 and all(int(row[0]) == len(row[1].split()) for row in rows)
    of_test = {' '.join(source.split()): ' '.join(some[0].split()) for source, some in zip(sources, references, strict=True)}
    assert {row[1]: row[3] for row in rows}.items() <= of_test.items()
    assert '<!-- translations -->' in translations.PAGE.read_text()
