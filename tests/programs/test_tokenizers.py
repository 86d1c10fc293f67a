"""The translators with subwords: from raw text to raw text, resumed, served, evaluated; and what is refused."""
import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from translation import TINY_SEQ2SEQ, TINY_TRANSFORMER, assert_same_training, newest

import pyops
from pyops import checkpoint
from pyops.errors import UserError
from pyops.text import embedded, serving
from pyops.text.corpus import Corpus
from pyops.text.flags import DEFAULTS
from pyops.text.preprocess import normalize
from pyops.text.tokenizer import restore
from pyops.text.training import Data
from pyops.text.vocabulary import EOS, PAD
from seq2seq import train as seq2seq_train
from seq2seq import translate as seq2seq_translate
from transformer import evaluate as transformer_evaluate
from transformer import train as transformer_train
from transformer import translate as transformer_translate

pytest.importorskip('tokenizers', reason='tokenizers is not installed: pip install tokenizers')

BPE = ['--tokenizer', 'bpe', '--vocabulary', '400']
PROGRAMS = {'seq2seq': (seq2seq_train, seq2seq_translate, TINY_SEQ2SEQ),
            'transformer': (transformer_train, transformer_translate, TINY_TRANSFORMER)}


@pytest.fixture(params=PROGRAMS)
def program(request):
    return PROGRAMS[request.param]


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """A folder with the checkpoint of a transformer that has learned 96 pairs with names by heart, and these pairs."""
    folder = tmp_path_factory.mktemp('trained')
    pairs = [(f'{one} {verb} {name}!', f'{un}\N{NARROW NO-BREAK SPACE}{verbe} {name}\N{NARROW NO-BREAK SPACE}!')
             for one, un in (('He', 'Il'), ('She', 'Elle'), ('Tom', 'Tom'), ("Tom's friend", "L'ami de Tom"))
             for verb, verbe in (('sees', 'voit'), ('knows', 'connaît'), ('likes', 'aime'))
             for name in ('Mary', 'Paris', 'mary', 'the USA', 'Émile', 'Zoë', 'Kyoto', 'Bach')]
    (folder / 'pairs.txt').write_text(''.join('\t'.join(pair) + '\n' for pair in pairs), encoding='utf-8')
    transformer_train.main(['-f', str(folder / 'pairs.txt'), '-c', str(folder / 'ckpt'), *BPE, '-e', '60', '-b', '32',
                            '-d', '0', '--d-model', '64', '-l', '0.003', '--bpe-dropout', '0.02', '--num-steps', '24'])
    return folder, pairs


# ---- text --------------------------------------------------------------------------------------------------------------

def test_case_and_punctuation_are_learned(trained, capsys):
    folder, pairs = trained
    translator = pyops.load(folder / 'ckpt')
    plain = [[text.replace('\N{NARROW NO-BREAK SPACE}', ' ') for text in pair] for pair in pairs]
    outputs = translator.translate([source for source, _ in pairs], beam=1)
    right = np.mean([output == target for output, (_, target) in zip(outputs, plain, strict=True)])
    assert right >= 0.9, right
    assert translator.sentences([source for source, _ in plain]) == outputs
    first = next(i for i in range(96) if outputs[i] == plain[i][1])
    assert translator.translate(f'  {plain[first][0]} ', beam=1) == plain[first][1]
    assert translator.translate(['', ' \N{NO-BREAK SPACE} ', pairs[first][0]], beam=1) == ['', '', plain[first][1]]
    curly, straight = translator.translations(['Tom’s friend sees Paris!', "Tom's friend sees Paris!"])
    assert curly == straight and ''.join(curly[0].source) == "▁Tom's▁friend▁sees▁Paris!<eos>"
    assert translator.translations('Zoë 你好 😀 <eos>')[0].unknown == ()


def test_a_long_line_is_cut_with_a_warning(trained, capsys):
    translator = pyops.load(trained[0] / 'ckpt')
    capsys.readouterr()
    (answer,) = translator.translations('Tom ' * 10_000)
    assert answer.source == ['▁Tom'] * 24 and answer.cut == 10_001 - 24 and answer.text
    transformer_translate.main(['-c', str(trained[0] / 'ckpt'), 'Tom ' * 10_000])
    out, error = capsys.readouterr()
    assert out == f'{answer.text}\n' and error.startswith(
        "warning: line 1: too long, only the first 24 of 10001 tokens, end mark included, are read: 'Tom Tom ")
    assert len(translator.translate(['x' * 10_000, 'Tom ' * 10_000])) == 2


def test_the_text_of_a_translation_has_no_marks(tmp_path, monkeypatch):
    seq2seq_train.main(['-e', '1', '-c', str(tmp_path), *TINY_SEQ2SEQ, *BPE])
    translator = pyops.load(tmp_path)
    ids = translator.target_vocabulary.encode(["J'ai dormi !"]).ids
    decoder = SimpleNamespace(stream=lambda *_: [[(0, np.array([*ids, EOS, PAD], np.int32))]])
    monkeypatch.setattr(type(translator.model), 'decoding', lambda self, num_steps: decoder)
    translator = pyops.load(tmp_path)
    (found,) = translator.translations('I slept.', beam=1, scores=False)
    assert found.text == "J'ai dormi !" and found.tokens[-1] == found.source[-1] == '<eos>'
    assert len(found.tokens) == len(ids) + 1


def test_held_out_sentences_are_scored_as_raw_text(trained, tmp_path, capsys):
    pytest.importorskip('sacrebleu', reason='sacrebleu is not installed: pip install sacrebleu')
    folder = tmp_path / 'ckpt'
    transformer_train.main(['-e', '1', '-c', str(folder), *TINY_TRANSFORMER, *BPE])
    assert 'unseen sentences translated exactly' in capsys.readouterr().out
    transformer_evaluate.main(['-c', str(folder), '-f', 'embedded', '--json'])
    assert json.loads(capsys.readouterr().out)['unknown'] == 0
    transformer_translate.main(['-c', str(folder), '-f', 'embedded', '--test', '3'])
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith('  wrong, expected: ')]
    targets = [target.replace('\N{NARROW NO-BREAK SPACE}', ' ') for _, target in embedded.pairs()[:512]]
    assert shown and all(line.removeprefix('  wrong, expected: ') in targets for line in shown)
    (tmp_path / 'other.txt').write_text(''.join('\t'.join(pair[::-1]) + '\n' for pair in embedded.pairs()[:512]))
    with pytest.raises(UserError, match='was trained on other pairs than the corpus has; give the corpus it was trained on'):
        transformer_evaluate.main(['-c', str(folder), '-f', str(tmp_path / 'other.txt')])


def test_bleu_after_training_is_that_of_lower_case_words_for_both_tokenizers(capsys):
    pytest.importorskip('sacrebleu', reason='sacrebleu is not installed: pip install sacrebleu')

    class Fixed:
        num_steps = 9

        def sentences(self, sources, beam, length_penalty):
            return ['Je dors ici, Tom.']

        def lengths(self, sentences):
            return np.array([5])
    serving.score(Fixed(), Corpus('x', ['I sleep here, Tom.'], ['je dors ici , tom .']))
    assert capsys.readouterr().out == 'held-out test : 0.0% of 1 unseen sentences translated exactly\nBLEU : 100.00\n'


# ---- the run -----------------------------------------------------------------------------------------------------------

def test_a_run_with_dropout_resumed_in_an_epoch_equals_a_whole_one(program, tmp_path, capsys):
    train, _, flags = program
    flags = [*flags, *BPE, '--num-steps', '12']
    train.main(['-e', '3', '-c', str(tmp_path / 'whole'), *flags, '--bpe-dropout', '0.2'])
    train.main(['-e', '3', '-c', str(tmp_path / 'parts'), *flags, '--bpe-dropout', '0.2', '--max-steps', '6'])
    state = newest(tmp_path / 'parts')[1]
    assert state['run']['epoch'] == 1 and state['run']['position'] > 0
    train.main(['-e', '3', '-c', str(tmp_path / 'parts'), *flags[:-6]])             # the rest is in the checkpoint
    assert newest(tmp_path / 'parts')[1]['settings']['bpe_dropout'] == 0.2
    assert_same_training(newest(tmp_path / 'whole'), newest(tmp_path / 'parts'))
    train.main(['-e', '3', '-c', str(tmp_path / 'without'), *flags])
    metrics = [(tmp_path / name / 'metrics.jsonl').read_text().splitlines() for name in ('whole', 'without')]
    assert json.loads(metrics[0][-1])['loss'] != json.loads(metrics[1][-1])['loss']


def test_the_default_length_depends_on_the_tokenizer_unless_a_flag_or_the_preset_sets_it(tmp_path, capsys):
    for flags, want in (([], 9), (BPE, 64), ([*BPE, '--num-steps', '20'], 20)):
        folder = tmp_path / str(want)
        transformer_train.main(['-e', '1', '--max-steps', '1', '-c', str(folder), *TINY_TRANSFORMER, *flags])
        assert newest(folder)[1]['settings']['num_steps'] == want
        transformer_train.main(['-e', '1', '--max-steps', '1', '-c', str(folder), *TINY_TRANSFORMER])
        assert newest(folder)[1]['settings']['num_steps'] == want


def test_a_run_prints_the_number_of_subwords(tmp_path, capsys):
    transformer_train.main(['-e', '1', '-c', str(tmp_path / 'a'), *TINY_TRANSFORMER, *BPE, '--plan'])
    out = capsys.readouterr().out
    assert 'subwords : 400\n' in out and 'enc_vocab_size : 400\n' in out and 'dec_vocab_size : 400\n' in out
    transformer_train.main(['-e', '1', '-c', str(tmp_path / 'b'), *TINY_TRANSFORMER, '--tokenizer', 'bpe', '--plan'])
    found = re.search(r'^subwords : (\d+) \(--vocabulary 12000; no other pair of tokens occurs twice\)$',
                      capsys.readouterr().out, re.M)
    assert 400 < int(found[1]) < 5000


def test_the_data_of_a_run_with_subwords_has_one_vocabulary_and_counts_its_cut_sentences(capsys):
    args = SimpleNamespace(corpus='embedded', data_dir=None, keep_best=None)
    settings = DEFAULTS | dict(tiny=1, vocabulary=400, num_steps=8)
    words, subwords = (Data.load(args, settings | dict(tokenizer=name)) for name in ('word', 'bpe'))
    assert subwords.shared and not words.shared and len(subwords.train) == len(words.train) == 451
    tokenizer = subwords.vocabularies[0]
    sides = [tokenizer.encode(side).lengths >= 8 for side in (subwords.sentences.sources, subwords.sentences.targets)]
    assert (f'cut to --num-steps 8 tokens, end mark included : {sides[0].sum()} sources, {sides[1].sum()} targets, '
            f'{(sides[0] | sides[1]).sum()} of 451 pairs ') in capsys.readouterr().out
    assert subwords.train.source.lengths.max() == 8 and sides[0].sum() > 50
    one, other, plain = (subwords.encode_epoch(*how).labels for how in ((0.5, 0, 0), (0.5, 0, 1), (0.0, 0, 0)))
    assert (plain.ids == subwords.train.labels.ids).all() and (plain.starts == subwords.train.labels.starts).all()
    assert one.ids.tolist() != other.ids.tolist()
    assert list(subwords.test.targets)[0] != list(words.test.targets)[0]            # raw text


def test_a_checkpoint_serves_without_the_library(trained, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'tokenizers', None)
    folder, pairs = trained
    capsys.readouterr()
    transformer_translate.main(['-c', str(folder / 'ckpt'), pairs[0][0]])
    assert len(capsys.readouterr().out.splitlines()) == 1
    transformer_train.main(['-f', str(folder / 'pairs.txt'), '-c', str(folder / 'ckpt'), '-e', '60', '--d-model', '64'])
    assert 'all 60 epochs are done' in capsys.readouterr().out
    with pytest.raises(UserError, match='^tokenizers, which learns subwords, is not installed: install it with: pip install '):
        transformer_train.main(['-f', str(folder / 'pairs.txt'), '-c', str(folder / 'new'), '-e', '60', *BPE])


def test_saved_tensors_are_labelled_with_the_subwords_of_the_epoch(tmp_path, capsys):
    logs = tmp_path / 'logs'
    transformer_train.main(['-e', '1', '-c', str(tmp_path / 'ckpt'), *TINY_TRANSFORMER, *BPE, '--bpe-dropout', '0.3',
                            '--num-steps', '32', '--max-steps', '1', '--save-tensors', str(logs)])
    (batch,) = [entry for line in (logs / 'manifest.jsonl').read_text().splitlines()
                if (entry := json.loads(line))['kind'] == 'batch']
    tokenizer, _ = restore(newest(tmp_path / 'ckpt')[1]['vocabularies'])
    shown = [tokens[:-1] for tokens in batch['tokens']['source']]
    texts = [''.join(tokens).replace('▁', ' ').strip() for tokens in shown]
    sources = {normalize(source) for source, _ in embedded.pairs()[:512]}
    assert len(texts) == 100 and set(texts) <= sources
    assert sum(tokens != tokenizer.words(tokenizer.encode([text]).ids) for tokens, text in zip(shown, texts, strict=True)) > 50


# ---- what is refused ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('flags, want', [
    ('--vocabulary 500', '--vocabulary 500: requires --tokenizer bpe, and this run has word; leave --vocabulary out'),
    ('--bpe-dropout 0.1', '--bpe-dropout 0.1: requires --tokenizer bpe, and this run has word; leave --bpe-dropout out'),
    ('--tokenizer bpe --min-count 2',
     '--min-count 2: requires --tokenizer word, and this run has bpe; leave --min-count out'),
    ('--tokenizer bpe --vocabulary 100', 'vocabulary of 100 subwords: expected 260 or more: 4 marks and 256 bytes')])
def test_flags_of_the_other_tokenizer_are_refused(program, flags, want, tmp_path, capsys):
    with pytest.raises(UserError) as error:
        program[0].main(['-e', '1', '-c', str(tmp_path), *program[2], *flags.split()])
    assert str(error.value) == want


def test_another_tokenizer_than_the_checkpoints_is_refused(program, tmp_path, capsys):
    train, _, flags = program
    flags = ['-e', '2', '-c', str(tmp_path), *flags]
    train.main([*flags, *BPE, '--max-steps', '1', '--num-steps', '12'])
    for given, was in (('--tokenizer word', 'bpe'), ('--vocabulary 500', '400')):
        with pytest.raises(UserError, match=f'^{given}: .* was trained with {was}; leave {given.split()[0]} out, or give '):
            train.main([*flags, *given.split()])
    path = checkpoint.find(tmp_path, serving=True).path
    tensors, state = checkpoint.load(path)
    state['vocabularies']['source'] = {'bpe': '{}'}
    checkpoint.save(path, tensors, state)
    with pytest.raises(UserError, match='^subwords: not a byte-level BPE of tokenizers'):
        train.main(flags)


def test_another_corpus_than_the_checkpoints_is_refused(trained, tmp_path, capsys):
    folder, pairs = trained
    (tmp_path / 'other.txt').write_text(''.join('\t'.join(pair) + '\n' for pair in pairs[1:]), encoding='utf-8')
    with pytest.raises(UserError, match='was trained on other pairs than the corpus has; give the corpus it was trained on, '
                                        '.*pairs.txt, with -f, or start from scratch in another folder$'):
        transformer_train.main(['-e', '70', '-f', str(tmp_path / 'other.txt'), '-c', str(folder / 'ckpt'), '--d-model', '64'])


def test_checkpoints_from_before_there_were_subwords_are_resumed_and_served(program, tmp_path, capsys):
    train, translate, flags = program
    train.main(['-e', '1', '-c', str(tmp_path), *flags])
    path = checkpoint.find(tmp_path, serving=True).path
    tensors, state = checkpoint.load(path)
    for name in ('tokenizer', 'vocabulary', 'bpe_dropout'):
        del state['settings'][name]
    checkpoint.save(path, tensors, state)
    with pytest.raises(UserError, match='^--tokenizer bpe: .* was trained with word; leave --tokenizer out'):
        train.main(['-e', '2', '-c', str(tmp_path), *flags, '--tokenizer', 'bpe'])
    translate.main(['-c', str(tmp_path), '-f', 'embedded', '--test', '1'])
    train.main(['-e', '2', '-c', str(tmp_path), *flags])
    assert newest(tmp_path)[1]['run']['epoch'] == 2 and newest(tmp_path)[1]['settings']['tokenizer'] == 'word'
