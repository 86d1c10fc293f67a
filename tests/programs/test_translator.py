"""Parts that the translation programs share: settings, schedule, lines, reading, scores."""
import io
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import NO_CUDA, ROOT
from translation import TINY_SEQ2SEQ as TINY
from translation import assert_same_training, newest, small_corpus

import pyops
from pyops import checkpoint
from pyops.backend import get, put
from pyops.errors import UserError
from pyops.flags import ArgumentParser
from pyops.optim import Adam, decaying_rate, inverse_square_root
from pyops.settings import add_preset_flag, add_setting, resolve
from pyops.text import serving
from pyops.text.corpus import Corpus
from pyops.text.flags import FIXED
from pyops.text.pairs import Pairs
from pyops.text.sentences import Sentences
from pyops.text.training import cut_line
from pyops.text.vocabulary import EOS, PAD, UNK, Vocabulary
from seq2seq import train as seq2seq_train
from seq2seq import translate as seq2seq_translate
from seq2seq.model import Config as Seq2SeqConfig
from seq2seq.model import Seq2Seq
from transformer import train as transformer_train
from transformer import translate as transformer_translate
from transformer.model import SIZES, Transformer
from transformer.model import Config as TransformerConfig

# ---- the kernels of a step -------------------------------------------------------------------------------------------


@pytest.mark.parametrize('program', [seq2seq_train, transformer_train], ids=lambda program: program.PROGRAM)
def test_a_summary_of_the_step_is_printed_before_training_and_with_v_the_list_of_plan(program, tmp_path, capsys):
    arguments = ['-f', 'embedded', '-t', '1', '-c', str(tmp_path), '-e', '1', '--max-steps', '1']
    program.main([*arguments, '--plan'])
    planned = capsys.readouterr().out
    program.main(arguments)
    summary = [line for line in capsys.readouterr().out.splitlines() if line.startswith(('step : ', '-v ', 'Actions'))]
    assert [line.split()[0] for line in summary] == ['step', '-v'] and max(map(len, summary)) <= 100
    peak = int(re.search(r'^peak +([\d,]+) bytes', planned, re.M)[1].replace(',', ''))
    assert summary[0].endswith(f', peak memory {peak / 2**20:.1f} MiB')
    program.main([*arguments, '-v'])
    out = capsys.readouterr().out
    listing = planned[planned.index('Actions:'):planned.index('parameters  ')]
    assert listing in out and listing.count('\n') > 30 and 'step : ' not in out


# ---- fillers -------------------------------------------------------------------------------------------------------

SMALL_SEQ2SEQ = dict(embedding=12, hidden=16, dropout=0.2)
MODELS = {'seq2seq': (Seq2Seq, Seq2SeqConfig, SMALL_SEQ2SEQ),
          'seq2seq with attention': (Seq2Seq, Seq2SeqConfig, SMALL_SEQ2SEQ | dict(attention=2, bidirectional=True)),
          'transformer': (Transformer, TransformerConfig, dict(d_model=16, d_ff=24, heads=2, dropout=0.2, smoothing=0.1))}


@pytest.mark.parametrize('name', MODELS)
def test_pairs_of_padding_at_the_end_of_a_batch_change_neither_loss_nor_gradients(name):
    """Also pairs without a source, without a target, and without both: a GPU rounds the sizes of a batch up with them."""
    Model, Config, settings = MODELS[name]
    _, vocabularies, pairs = small_corpus(100)
    sources, targets = np.array([[6, 0], [4, 4], [0, 5], [0, 0], [9, 1], [0, 0]]).T
    tables = pairs.source.with_fillers(sources), pairs.labels.with_fillers(targets)
    rows, results = np.arange(20), []
    for batch in pairs.batch_of(rows), Pairs(*tables, pairs.longest).batch_of(np.concatenate([rows, np.arange(100, 106)])):
        model = Model(Config(*map(len, vocabularies), **settings), seed=1)
        loss, ctx = model.forward(batch, put(np.array([3])))
        valid = int(get(model.valid(ctx))[0])
        model.backward(ctx)
        results.append((float(get(loss)[0]), valid, get(model.params.grads)))
    (loss, valid, gradients), (of_filled, filled_valid, others) = results
    assert filled_valid == valid and of_filled == pytest.approx(loss, rel=1e-6)
    assert np.abs(others - gradients).max() <= 2e-6 * np.abs(gradients).max() > 0
    assert len(batch.labels) > valid


# ---- batches that are dropped ---------------------------------------------------------------------------------------

TINY_TRANSFORMER = ['-f', 'embedded', '-t', '1', '-b', '100', '--d-model', '16', '--heads', '2', '--layers', '1']


def test_the_transformer_drops_its_last_batch(tmp_path, capsys):
    """451 pairs are left to train on, batches are of 100."""
    transformer_train.main(['-e', '2', '-c', str(tmp_path), *TINY_TRANSFORMER])
    out = capsys.readouterr().out
    assert '[400/400] loss : ' in out and '/451]' not in out
    tensors, state = newest(tmp_path)
    assert tensors['step'][0] == 2 * 4 and state['run']['epoch'] == 2


def test_a_corpus_smaller_than_a_batch_that_would_be_dropped(tmp_path, capsys):
    want = 'embedded: has 451 pairs to train on, and a batch is 452; give a smaller -b'
    with pytest.raises(UserError, match=f'^{want}$'):
        transformer_train.main(['-e', '1', '-c', str(tmp_path), *TINY_TRANSFORMER, '-b', '452'])
    seq2seq_train.main(['-e', '1', '-c', str(tmp_path), *TINY, '-b', '452'])        # seq2seq takes what there is


def test_another_batch_size_in_the_middle_of_such_an_epoch(tmp_path, capsys):
    transformer_train.main(['-e', '1', '-c', str(tmp_path), *TINY_TRANSFORMER])
    path = checkpoint.find(tmp_path, serving=True).path
    kept, state = checkpoint.load(path)
    state['run'] |= {'epoch': 0, 'position': 300, 'loss_sum': 50.0, 'weight_sum': 10.0, 'seconds': 1.0}
    checkpoint.save(path, kept, state)
    capsys.readouterr()
    transformer_train.main(['-e', '1', '-c', str(tmp_path), *TINY_TRANSFORMER, '-b', '70'])
    assert '[440/440] loss : ' in capsys.readouterr().out                       # 151 were left: twice 70
    tensors, state = newest(tmp_path)
    assert tensors['step'][0] - kept['step'][0] == 2
    assert (state['run']['epoch'], state['run']['position'], state['run']['batch_size']) == (1, 0, 70)


# ---- a schedule of the learning rate --------------------------------------------------------------------------------

def rate(lr, warmup, step):
    """What optim.inverse_square_root sets for a step, counted from 1."""
    optimizer = SimpleNamespace(rate=np.zeros(1, np.float32), count=np.array([step - 1]))
    inverse_square_root(optimizer, lr, warmup)
    return optimizer.rate[0]


def test_the_rate_rises_to_its_peak_and_falls_with_the_root_of_the_step():
    rates = [rate(0.5, 4, step) for step in (1, 2, 4, 16, 64, 400)]
    assert rates == [0.125, 0.25, 0.5, 0.25, 0.125, np.float32(0.05)]
    d_model, warmup = 512, 4000
    for step in (1, 17, 3999, 4000, 4001, 100_000):         # equation 3 of the paper
        want = d_model ** -0.5 * min(step ** -0.5, step * warmup ** -1.5)
        assert rate((d_model * warmup) ** -0.5, warmup, step) == pytest.approx(want, rel=1e-7)
    assert [rate(0.5, 0, step) for step in (1, 1000)] == [0.5, 0.5]


def test_a_run_with_a_schedule_resumed_equals_a_whole_one(tmp_path, monkeypatch):
    """Four steps an epoch: the peak is in the second."""
    rates, step, flags = {}, Adam.step, [*TINY_TRANSFORMER, '--warmup', '7']

    def noting_step(self, entry=None):
        rates[int(self.count[0]) + 1] = self.rate[0]
        step(self, entry=entry)
    monkeypatch.setattr(Adam, 'step', noting_step)
    transformer_train.main(['-e', '3', '-c', str(tmp_path / 'eager'), '--no-plan', *flags])
    assert rates == {n: rate(0.001, 7, n) for n in range(1, 13)}
    monkeypatch.undo()
    transformer_train.main(['-e', '3', '-c', str(tmp_path / 'whole'), *flags])
    transformer_train.main(['-e', '1', '-c', str(tmp_path / 'parts'), *flags])
    transformer_train.main(['-e', '3', '-c', str(tmp_path / 'parts'), *TINY_TRANSFORMER])
    assert newest(tmp_path / 'parts')[1]['settings']['warmup'] == 7
    assert_same_training(newest(tmp_path / 'whole'), newest(tmp_path / 'parts'))
    assert_same_training(newest(tmp_path / 'whole'), newest(tmp_path / 'eager'))        # replayed steps read the rate


PROGRAMS = pytest.mark.parametrize('train, translate, tiny', [
    (transformer_train, transformer_translate, TINY_TRANSFORMER), (seq2seq_train, seq2seq_translate, TINY)],
    ids=['transformer', 'seq2seq'])


@PROGRAMS
@pytest.mark.parametrize('schedule', ['linear', 'cosine'])
def test_a_decaying_rate_ends_with_the_last_epoch_and_an_interrupted_run_continues_it(
        schedule, train, translate, tiny, tmp_path, monkeypatch):
    """Four steps an epoch; seq2seq has a last, smaller batch."""
    rates, step, flags = {}, Adam.step, [*tiny, '--lr', '0.001', '--schedule', schedule, '--warmup', '2']
    steps = 12 if train is transformer_train else 15

    def noting_step(self, entry=None):
        rates[int(self.count[0]) + 1] = self.rate[0]
        step(self, entry=entry)
    monkeypatch.setattr(Adam, 'step', noting_step)
    train.main(['-e', '3', '-c', str(tmp_path / 'eager'), '--no-plan', *flags])
    want = []
    for done in range(steps):
        optimizer = SimpleNamespace(rate=np.zeros(1, np.float32), count=np.array([done]))
        decaying_rate(optimizer, 0.001, 2, steps, schedule)
        want.append(optimizer.rate[0])
    assert list(rates.values()) == want and list(rates) == [*range(1, steps + 1)] and 0 < want[-1] < 0.2 * want[2]
    monkeypatch.undo()
    train.main(['-e', '3', '-c', str(tmp_path / 'parts'), '--max-steps', '5', *flags])
    train.main(['-e', '3', '-c', str(tmp_path / 'parts'), *tiny])
    assert_same_training(newest(tmp_path / 'eager'), newest(tmp_path / 'parts'))


@PROGRAMS
def test_a_run_with_averaged_weights_resumed_equals_a_whole_one_and_serves_averages(train, translate, tiny, tmp_path, capsys):
    flags = [*tiny, '--ema', '0.9', '--hold-out', '0.1', '--smoothing', '0.1']
    train.main(['-e', '3', '-c', str(tmp_path / 'whole'), *flags])
    whole = re.findall('validation : (.*)', capsys.readouterr().out)
    train.main(['-e', '1', '-c', str(tmp_path / 'parts'), *flags])
    train.main(['-e', '3', '-c', str(tmp_path / 'parts'), *tiny])
    assert re.findall('validation : (.*)', capsys.readouterr().out) == whole
    assert_same_training(newest(tmp_path / 'whole'), newest(tmp_path / 'parts'))
    train.main(['-e', '3', '-c', str(tmp_path / 'plain'), *tiny, '--hold-out', '0.1', '--smoothing', '0.1'])
    (averaged, _), (plain, _) = newest(tmp_path / 'whole'), newest(tmp_path / 'plain')
    for name, tensor in plain.items():                          # averaging does not change the training
        trained = averaged[name.replace('parameter/', 'trained/')]
        assert (trained == tensor).all(), name
    assert (averaged['parameter/output.weight'] != averaged['trained/output.weight']).all()
    translator = pyops.load(str(tmp_path / 'whole'))
    served = translator.model.params['output.weight'].value
    assert (get(served) == averaged['parameter/output.weight']).all()
    with pytest.raises(UserError, match='--ema 0.5: .* was trained with 0.9; leave --ema out'):
        train.main(['-e', '4', '-c', str(tmp_path / 'whole'), *tiny, '--ema', '0.5'])


# ---- settings: flag, checkpoint, preset, default ---------------------------------------------------------------------

DEFAULTS = dict(lr=0.005, dropout=0.2, hidden=256, layers=2, seed=0)
PRESETS = {'small': {}, 'large': dict(hidden=512, lr=0.001, dropout=0.5), 'gentle': dict(lr=0.002)}


def resolved(given='', kept=None):
    p = ArgumentParser(prog='program')
    for flag, kind in (('--lr', float), ('--dropout', float), ('--hidden', int), ('--layers', int)):
        add_setting(p, DEFAULTS, flag, type=kind, help='a setting')
    add_preset_flag(p, PRESETS)
    found = checkpoint.Found('old.safetensors', '.', '', state=kept and {'settings': kept})
    settings = resolve(p.parse_args(given.split()), found, DEFAULTS, ('hidden', 'layers'), ('seed',), PRESETS)
    assert settings.pop('quant') == 'none' and settings.pop('quant_layers') == ''
    return settings


def test_a_flag_goes_before_the_checkpoint_before_the_preset_before_the_default():
    fresh = resolved()
    assert fresh == DEFAULTS | {'preset': 'small'}
    large = resolved('--preset large --dropout 0.3')
    assert large == DEFAULTS | {'preset': 'large', 'hidden': 512, 'lr': 0.001, 'dropout': 0.3}
    assert resolved('', large) == large and resolved('--preset large', large) == large
    assert resolved('--lr 0.1', large) == large | {'lr': 0.1}
    assert resolved('--preset large --hidden 16') == DEFAULTS | PRESETS['large'] | {'preset': 'large', 'hidden': 16}
    del large['layers']                                     # a setting that an older program did not have
    assert resolved('--layers 3', large)['layers'] == 3 and resolved('', large)['layers'] == 2


def test_another_preset_than_the_checkpoints_is_refused_where_a_size_differs():
    small, large = resolved(), resolved('--preset large')
    for flags, kept, named in (('--preset large', small, 'small'), ('--preset small', large, 'large'),
                               ('--preset gentle --lr 1', large, 'large')):
        name = flags.split()[1]
        with pytest.raises(UserError, match=f'^--preset {name}: old.safetensors was trained with {named}; '
                                            'leave --preset out, or give another folder with -c$'):
            resolved(flags, kept)
    assert resolved('--preset gentle', small) == small | {'preset': 'gentle'}       # the checkpoint's rate goes before it
    assert resolved('--preset large --hidden 256', small) == small | {'preset': 'large'}
    odd = resolved('--hidden 16')
    assert resolved('--preset small', odd) == odd           # the checkpoint's own preset
    with pytest.raises(UserError, match='^--hidden 512: old.safetensors was trained with 256; '):
        resolved('--preset large --hidden 512', small)


def test_a_preset_is_kept_in_the_checkpoint(tmp_path, capsys):
    flags = ['--d-model', '16', '--heads', '2', '--layers', '1', '--d-ff', '8', '--num-steps', '9', *TINY_TRANSFORMER[:6]]
    transformer_train.main(['-e', '1', '-c', str(tmp_path), '--preset', 'base', *flags])
    assert newest(tmp_path)[1]['settings']['preset'] == 'base' and 'learning rate : 0.0007' in capsys.readouterr().out
    transformer_train.main(['-e', '2', '-c', str(tmp_path), *flags])
    assert newest(tmp_path)[1]['settings']['preset'] == 'base' and 'learning rate : 0.0007' in capsys.readouterr().out


def test_presets_have_a_flag_where_there_are_any(capsys):
    for program, arguments, want in ((transformer_train, ['--preset', 'huge'], '--preset: invalid choice: .*small.*base'),
                                     (seq2seq_train, ['--preset', 'small'], 'unrecognized arguments: --preset small')):
        with pytest.raises(SystemExit):
            program.parser().parse_args(arguments)
        (line,) = capsys.readouterr().err.splitlines()
        assert re.search(f'error: {want}.*; see --help$', line)


# ---- the transformer's words -----------------------------------------------------------------------------------------

SMALL = [*TINY_TRANSFORMER, '--hold-out', '0']


def test_the_lines_of_a_transformer_run(tmp_path, capsys):
    program, ckpt = transformer_train, ['-c', str(tmp_path)]
    program.main(['-e', '2', *ckpt, *SMALL])
    lines = capsys.readouterr().out.splitlines()
    sizes = [len(newest(tmp_path)[1]['vocabularies'][which]) for which in ('source', 'target')]
    assert lines[:12] == ['embedded corpus : 12516 pairs', 'epochs : 2', 'batch_size : 100', 'gpu : 0', 'learning rate : 0.001',
                          'checkpoint : none', f'enc_vocab_size : {sizes[0]}', f'dec_vocab_size : {sizes[1]}',
                          'bos_id : 3', 'eos_id : 1', 'src_pad_id : 0', 'tgt_pad_id : 0']
    assert re.fullmatch(r'allocated : [1-9]\d+ bytes for tensors, [1-9]\d+ for intermediate and [1-9]\d+ for gradient tensors',
                        lines[14])
    pairs = r'\d+ pairs/s, \d\d:\d\d left'
    for epoch in (0, 1):
        *progress, last = [line for line in lines if line.startswith(f'epoch {epoch} :  ')]
        assert re.fullmatch(rf'epoch {epoch} :  \[500/500\] loss : \d\.\d{{5}}', last)
        assert [re.fullmatch(rf'epoch {epoch} :  \[(\d+)/500\] loss : \d\.\d{{5}} \({pairs}\)', line)[1]
                for line in progress] == ['100', '200', '300', '400']
    path = checkpoint.find(tmp_path, serving=True).path
    assert lines[-2].startswith('epoch 1 :  [500/500]') and lines[-1] == f'checkpoint saved : {path}'
    assert lines[12].startswith('step : ') and lines[13].startswith('-v lists its kernels; ')
    assert len(lines) == 15 + 2 * 5 + 1
    program.main(['-e', '3', *ckpt, '--no-plan', *SMALL])
    out = capsys.readouterr().out
    assert f'checkpoint : {path}\n' in out and 'loaded from checkpoint\nepoch 2 :  [100/500] ' in out
    assert newest(tmp_path)[0]['step'][0] == 3 * 5


def reading(read):
    """Return a decoder that finds <eos>, and adds the tokens of each sentence to a list."""
    def stream(source, more):
        read.extend(ids.tolist() for ids in np.split(source.ids, source.rows.offsets[1:-1]))
        yield [(b, np.array([EOS])) for b in range(source.rows.sentences)]
    return SimpleNamespace(stream=stream)


def test_the_answers_of_a_transformer(tmp_path, capsys, monkeypatch):
    transformer_train.main(['-e', '1', '-c', str(tmp_path), *SMALL])
    translator = pyops.load(tmp_path)
    vocabulary = translator.target_vocabulary
    decoder = SimpleNamespace(stream=lambda *_: [[(0, np.array([4, 5, EOS, PAD]))]])
    monkeypatch.setattr(Transformer, 'decoding', lambda self, num_steps: decoder)
    said = vocabulary.decode(np.array([4, 5]))
    assert translator.translate('I sleep.', beam=1) == said
    ((answer,),) = translator.translations(['Zzz i sleep here now with my brother and his father.'], beam=1, scores=False)
    assert answer.text == said and answer.unknown == ('zzz', 'now', 'with', 'and') and answer.cut == 4
    assert answer.tokens == [*vocabulary.words([4, 5]), '<eos>'] and answer.score is None
    monkeypatch.undo()
    monkeypatch.setattr('sys.stdin', io.TextIOWrapper(io.BufferedReader(io.BytesIO(b'I sleep.\n\nGo!'))))
    capsys.readouterr()
    transformer_train.main(['-e', '0', '-c', str(tmp_path)])
    first, blank, last = capsys.readouterr().out.splitlines()
    assert [first, last] == pyops.load(tmp_path).translate(['I sleep.', 'Go!']) and blank == ''


# ---- sentences that are cut ------------------------------------------------------------------------------------------

def test_a_sentence_is_read_alike_in_training_in_batches_and_typed(tmp_path, capsys, monkeypatch):
    """Of num_steps tokens or more, the first num_steps; of fewer, all and the end mark."""
    corpus = tmp_path / 'pairs.txt'
    sentences = [' '.join(('I can sleep here now with my brother and his old father .').split()[:n]) for n in range(1, 13)]
    corpus.write_text(''.join(f'{sentence}\tJe dors .\n' for sentence in sentences))
    flags = ['-f', str(corpus), '--min-count', '1', '--num-steps', '6', '-b', '4', '--embedding', '8', '--hidden', '8']
    seq2seq_train.main(['-e', '1', '-c', str(tmp_path / 'ckpt'), *flags])
    assert ('cut to --num-steps 6 tokens, end mark included : 7 sources, 0 targets, 7 of 12 pairs (58.3%); '
            'a larger --num-steps cuts fewer\n') in capsys.readouterr().out
    translator = pyops.load(tmp_path / 'ckpt')
    read = []

    monkeypatch.setattr(Seq2Seq, 'decoding', lambda self, num_steps: reading(read))
    trained = Pairs.encode(Corpus.load(corpus), translator.source_vocabulary, translator.target_vocabulary, 6).source
    translator.sentences(list(Corpus.load(corpus).sources))
    capsys.readouterr()
    shown = [translator.translations(sentence, beam=1, scores=False)[0] for sentence in sentences]
    assert read == 2 * [ids.tolist() for ids in trained]
    assert [' '.join(some.source) for some in shown[3:7]] == [
        'i can sleep here <eos>', 'i can sleep here now <eos>', *['i can sleep here now with'] * 2]
    assert [some.cut for some in shown] == [0] * 5 + [*range(1, 8)]
    seq2seq_translate.main(['-c', str(tmp_path / 'ckpt'), *sentences])
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 7                                           # one for each sentence that is cut
    assert warnings[0] == ("warning: line 6: too long, only the first 6 of 7 tokens, end mark included, are read: "
                           "'I can sleep here now with'")


def test_a_corpus_that_is_not_cut_prints_no_line_about_it():
    sources, targets = ['a b', 'a b c', 'a'], ['a', 'a', 'a b c d']
    for side in (list, Sentences.of):
        sides = [Vocabulary.build(sentences).encode(side(sentences)) for sentences in (sources, targets)]
        assert cut_line(*sides, 5) is None
        line = 'cut to --num-steps {} tokens, end mark included : {} sources, {} targets, {} of 3 pairs '
        assert cut_line(*sides, 4).startswith(line.format(4, 0, 1, 1))
        assert cut_line(*sides, 3).startswith(line.format(3, 1, 1, 2))


def test_a_score_tells_of_references_that_are_longer_than_an_output(capsys):
    class Echo:
        num_steps = 3

        def sentences(self, sources, beam, length_penalty):
            return sources

        def lengths(self, sentences):
            return Vocabulary.build(sentences).encode(sentences).lengths
    serving.score(Echo(), Corpus('x', ['a b', 'a b', 'c'], ['a b', 'a b c d', 'c d e']))
    assert ('held-out test : 50.0% of 2 unseen sentences translated exactly; '
            '1 of 3 references are longer than 3 tokens, the longest output\n') in capsys.readouterr().out
    serving.score(Echo(), Corpus('x', ['a'], ['a']))
    assert 'held-out test : 100.0% of 1 unseen sentences translated exactly\n' in capsys.readouterr().out


# ---- typographic quotes ----------------------------------------------------------------------------------------------

def test_typographic_quotes_are_read_in_the_forms_that_were_trained(tmp_path, monkeypatch):
    seq2seq_train.main(['-e', '1', '-c', str(tmp_path), *TINY])
    translator = pyops.load(tmp_path)
    plain = translator.translations("I don't sleep.")
    assert plain[0].source == ['i', "don't", 'sleep', '.', '<eos>']
    for typed in ('I don’t sleep.', '“I don’t sleep.”', '‘I donʼt sleep.’', '«I don’t sleep.»', '„I don‘t sleep.“'):
        assert translator.translations(typed) == plain
    read = []
    monkeypatch.setattr(Seq2Seq, 'decoding', lambda self, num_steps: reading(read))
    translator = pyops.load(tmp_path)
    translator.sentences(['i don’t sleep .', "i don't sleep ."])
    assert read[0] == read[1] and UNK not in read[0]
    monkeypatch.undo()
    assert translator.translations('"I don\'t sleep."')[0].unknown == ('"i', '."')             # plain text is read as ever


# ---- what can be learned ---------------------------------------------------------------------------------------------

def test_a_vocabulary_without_words_is_an_error(tmp_path):
    corpus = tmp_path / 'pairs.txt'
    corpus.write_text('Go.\tVa !\nGo.\tMarche.\nGo.\tPars ?\n')
    arguments = ['-e', '1', '-c', str(tmp_path / 'ckpt'), '-f', str(corpus), *TINY[4:]]
    with pytest.raises(UserError, match=f'^{corpus}: no target word occurs 3 times or more; '
                                        'give --min-count 1 or a larger corpus$'):
        seq2seq_train.main(arguments)
    assert not list((tmp_path / 'ckpt').iterdir())
    seq2seq_train.main([*arguments, '--min-count', '1'])


def test_every_setting_of_the_transformer_has_a_flag_and_a_preset_can_be_undone():
    program, parse = transformer_train, transformer_train.parser().parse_args
    args = parse(['--preset', 'base', '--no-pre-norm'])
    assert vars(args).keys() >= program.DEFAULTS.keys() and args.pre_norm is False
    assert parse(['--pre-norm']).pre_norm is True and parse([]).pre_norm is None
    assert program.DEFAULTS.keys() >= program.PRESETS['base'].keys() | set(SIZES)


@pytest.mark.parametrize('arguments, want', [
    ('-g 1', NO_CUDA),
    ('-g 1 -e 0 -c nowhere', NO_CUDA),
    ('-e 0', '-e 0 serves a checkpoint: name it, or its folder, with -c'),
    ('-c x.safetensors', 'x.safetensors: a checkpoint of seq2seq, not of transformer; give another with -c'),
    ('-e 0 -c x.safetensors', 'x.safetensors: a checkpoint of seq2seq, not of transformer; give another with -c')])
def test_what_the_transformer_refuses(arguments, want, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('PYOPS_CUDA_LIBRARY', '/nowhere.so')
    checkpoint.save('x.safetensors', {'w': np.zeros(3, np.float32)}, {'program': 'seq2seq'})
    with pytest.raises(UserError) as error:
        transformer_train.main(arguments.split())
    assert str(error.value) == want


@pytest.mark.parametrize('before, flags, want', [
    ('', '--pre-norm', '--pre-norm: old.safetensors was trained without it; leave --pre-norm out'),
    ('--pre-norm', '--no-pre-norm', '--no-pre-norm: old.safetensors was trained with --pre-norm; leave --no-pre-norm out'),
    ('', '--pairs 300', '--pairs 300: old.safetensors was trained with all pairs; leave --pairs out'),
    ('--pairs 20', '--pairs 300', '--pairs 300: old.safetensors was trained with 20; leave --pairs out')])
def test_what_a_checkpoint_was_trained_with_is_told_in_flags(before, flags, want):
    def settings(given, kept=None):
        found = checkpoint.Found('old.safetensors', '.', '', state=kept and {'settings': kept})
        args = transformer_train.parser().parse_args(given.split())
        return resolve(args, found, transformer_train.DEFAULTS, SIZES, FIXED, transformer_train.PRESETS)
    with pytest.raises(UserError) as error:
        settings(flags, settings(before))
    assert str(error.value) == f'{want}, or give another folder with -c'


@pytest.mark.parametrize('arguments, want', [
    ('--num-steps 0', '--num-steps: expected a whole number from 1 to 1000, got 0'),
    ('--heads 0', '--heads: expected a whole number from 1 to 1024, got 0'),
    ('--smoothing 1', '--smoothing: expected a number >= 0 and < 1, got 1'),
    ('--warmup -1', '--warmup: expected a whole number >= 0, got -1'),
    ('-g 2', '-g/--gpu: invalid choice: 2 .*'),
    ('--preset large', "--preset: invalid choice: 'large' .*")])
def test_flags_that_the_transformer_refuses(arguments, want, capsys):
    with pytest.raises(SystemExit) as left:
        transformer_train.parser().parse_args(arguments.split())
    assert left.value.code == 2
    assert re.fullmatch(f'python -m transformer.train: error: {want}; see --help\n', capsys.readouterr().err)


# ---- what is refused early -------------------------------------------------------------------------------------------

def test_settings_that_do_not_go_together_are_refused_before_the_corpus_is_read(tmp_path, capsys):
    for heads, want in (('3', '--heads 3: expected a divisor of --d-model 16: heads share it evenly'),
                        ('4', 'none.txt: no such file')):
        with pytest.raises(UserError, match=want):
            transformer_train.main(['-e', '1', '-c', str(tmp_path), '-f', 'none.txt', '--d-model', '16', '--heads', heads])


@pytest.mark.parametrize('program, flags, named', [
    (seq2seq_train, ['--hidden', '65536', '--embedding', '65536', '--layers', '64'], '--embedding, --hidden or --layers'),
    (transformer_train, ['--d-model', '65536', '--d-ff', '65536', '--layers', '64'], '--d-model, --d-ff or --layers')])
def test_a_model_that_memory_cannot_hold_names_the_programs_own_flags(program, flags, named, tmp_path):
    with pytest.raises(UserError, match=f'^the model needs .*; give a smaller {named}$'):
        program.main(['-e', '1', '-c', str(tmp_path), '-f', 'embedded', '-t', '1', *flags])


def test_a_step_that_memory_cannot_hold_is_refused_before_it_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(os, 'sysconf', lambda name: {'SC_PHYS_PAGES': 2 ** 10, 'SC_PAGE_SIZE': 4096}[name])
    arguments = ['-e', '1', '-c', str(tmp_path), '-f', 'embedded', '--d-model', '16', '--heads', '2', '--layers', '1']
    with pytest.raises(UserError, match=r'^a training step needs \d+\.\d GiB of memory and this machine has 0\.0; '
                                        'give a smaller -b or --num-steps$'):
        transformer_train.main(arguments)
    assert not list(tmp_path.iterdir())
    transformer_train.main([*arguments, '-b', '4', '--pairs', '64'])


@pytest.mark.parametrize('program', ['seq2seq.train', 'seq2seq.translate', 'transformer.train', 'transformer.translate'])
def test_help_is_quick(program):
    """It needs neither numpy nor the library nor the model."""
    code = (f"import sys, runpy\nsys.argv = ['x', '--help']\n"
            f"try:\n    runpy.run_module('{program}', run_name='__main__')\n"
            "finally:\n    print([name for name in ('numpy', 'cffi', 'tqdm', 'pyops.backend') if name in sys.modules])")
    out = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0 and out.stdout.startswith('usage: ') and out.stdout.endswith('\n[]\n'), out.stderr
