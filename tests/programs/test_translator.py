"""What translation programs share, tried on programs that are seq2seq but for one thing."""
import io
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import NO_CUDA, ROOT
from test_seq2seq import TINY, assert_same_training, newest

from pyops import checkpoint, fit
from pyops.errors import UserError
from pyops.init import zeros
from pyops.optim import Adam, inverse_square_root
from pyops.params import Spec
from pyops.text import Corpus
from pyops.text.sentences import Sentences
from pyops.text.translation import Pairs
from pyops.text.vocabulary import EOS, PAD, UNK
from pyops.translator import serving
from pyops.translator.program import cut_line
from seq2seq.model import Config as ModelConfig
from seq2seq.model import Seq2Seq
from seq2seq.train import Seq2SeqProgram
from transformer.train import TransformerProgram

# ---- the kernels of a step -------------------------------------------------------------------------------------------


@pytest.mark.parametrize('program', [Seq2SeqProgram(), TransformerProgram()], ids=lambda program: program.name)
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


# ---- batches that are dropped ---------------------------------------------------------------------------------------


class WholeBatches(Seq2SeqProgram):
    """451 pairs are left to train of TINY, batches are of 100."""
    drop_last = True


def test_a_program_that_drops_its_last_batch(tmp_path, capsys):
    WholeBatches().main(['-e', '2', '-c', str(tmp_path), *TINY])
    out = capsys.readouterr().out
    assert '[400/400] loss : ' in out and '/451]' not in out
    tensors, state = newest(tmp_path)
    assert tensors['step'][0] == 2 * 4 and state['run']['epoch'] == 2


def test_a_corpus_smaller_than_a_batch_that_would_be_dropped(tmp_path, capsys):
    want = 'embedded: has 451 pairs to train on, and a batch is 452; give a smaller -b'
    with pytest.raises(UserError, match=f'^{want}$'):
        WholeBatches().main(['-e', '1', '-c', str(tmp_path), *TINY, '-b', '452'])
    Seq2SeqProgram().main(['-e', '1', '-c', str(tmp_path), *TINY, '-b', '452'])        # seq2seq takes what there is


def test_another_batch_size_in_the_middle_of_such_an_epoch(tmp_path, capsys):
    Seq2SeqProgram().main(['-e', '1', '-c', str(tmp_path), *TINY])
    path = checkpoint.find(tmp_path, serving=True).path
    kept, state = checkpoint.load(path)
    state['run'] |= {'epoch': 0, 'position': 300, 'loss_sum': 50.0, 'weight_sum': 10.0, 'seconds': 1.0}
    checkpoint.save(path, kept, state)
    capsys.readouterr()
    WholeBatches().main(['-e', '1', '-c', str(tmp_path), *TINY, '-b', '70'])
    assert '[440/440] loss : ' in capsys.readouterr().out                       # 151 were left: twice 70
    tensors, state = newest(tmp_path)
    assert tensors['step'][0] - kept['step'][0] == 2
    assert (state['run']['epoch'], state['run']['position'], state['run']['batch_size']) == (1, 0, 70)


# ---- a schedule of the learning rate --------------------------------------------------------------------------------

def rate(lr, warmup, step):
    """What optim.inverse_square_root sets for a step, counted from 1."""
    optimizer = SimpleNamespace(lr=np.zeros(1, np.float32), count=np.array([step - 1]))
    inverse_square_root(optimizer, lr, warmup)
    return optimizer.lr[0]


def test_the_rate_rises_to_its_peak_and_falls_with_the_root_of_the_step():
    rates = [rate(0.5, 4, step) for step in (1, 2, 4, 16, 64, 400)]
    assert rates == [0.125, 0.25, 0.5, 0.25, 0.125, np.float32(0.05)]
    d_model, warmup = 512, 4000
    for step in (1, 17, 3999, 4000, 4001, 100_000):         # equation 3 of the paper
        want = d_model ** -0.5 * min(step ** -0.5, step * warmup ** -1.5)
        assert rate((d_model * warmup) ** -0.5, warmup, step) == pytest.approx(want, rel=1e-7)
    assert [rate(0.5, 0, step) for step in (1, 1000)] == [0.5, 0.5]


class WarmingUp(Seq2SeqProgram):
    DEFAULTS = Seq2SeqProgram.DEFAULTS | {'warmup': 7}


def test_a_run_with_a_schedule_resumed_equals_a_whole_one(tmp_path, monkeypatch):
    """Five steps an epoch: the peak is in the second."""
    program, rates, step = WarmingUp(), {}, Adam.step

    def noting_step(self):
        rates[int(self.count[0]) + 1] = self.lr[0]
        step(self)
    monkeypatch.setattr(Adam, 'step', noting_step)
    program.main(['-e', '3', '-c', str(tmp_path / 'eager'), '--no-plan', *TINY])
    assert rates == {n: rate(0.005, 7, n) for n in range(1, 16)}
    monkeypatch.undo()
    program.main(['-e', '3', '-c', str(tmp_path / 'whole'), *TINY])
    program.main(['-e', '1', '-c', str(tmp_path / 'parts'), *TINY])
    program.main(['-e', '3', '-c', str(tmp_path / 'parts'), *TINY])
    assert newest(tmp_path / 'parts')[1]['settings']['warmup'] == 7
    assert_same_training(newest(tmp_path / 'whole'), newest(tmp_path / 'parts'))
    assert_same_training(newest(tmp_path / 'whole'), newest(tmp_path / 'eager'))        # replayed steps read the rate


# ---- settings: flag, checkpoint, preset, default ---------------------------------------------------------------------

class TwoSizes(Seq2SeqProgram):
    PRESETS = {'small': {}, 'large': dict(hidden=512, lr=0.001, dropout=0.5), 'gentle': dict(lr=0.002)}


def resolved(flags='', kept=None):
    program = TwoSizes()
    state = {'settings': kept} if kept is not None else None
    return program.resolve(program.parse(flags.split()), state, 'old.safetensors')


def test_a_flag_goes_before_the_checkpoint_before_the_preset_before_the_default():
    fresh = resolved()
    assert fresh == TwoSizes.DEFAULTS | {'preset': 'small'} and fresh['hidden'] == 256 and fresh['lr'] == 0.005
    large = resolved('--preset large -d 0.3')
    assert large == TwoSizes.DEFAULTS | {'preset': 'large', 'hidden': 512, 'lr': 0.001, 'dropout': 0.3}
    assert resolved('', large) == large and resolved('--preset large', large) == large
    assert resolved('-l 0.1', large) == large | {'lr': 0.1}
    assert resolved('--preset large --hidden 16') == TwoSizes.DEFAULTS | TwoSizes.PRESETS['large'] | {
        'preset': 'large', 'hidden': 16}
    del large['layers']                                     # a setting that an older program did not have
    assert resolved('--layers 3', large)['layers'] == 3 and resolved('', large)['layers'] == 2


def test_another_preset_than_the_checkpoints_is_refused_where_a_size_differs():
    small, large = resolved(), resolved('--preset large')
    for flags, kept, named in (('--preset large', small, 'small'), ('--preset small', large, 'large'),
                               ('--preset gentle -l 1', large, 'large')):
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
    program = TwoSizes()
    program.main(['-e', '1', '-c', str(tmp_path), '--preset', 'gentle', *TINY])
    assert newest(tmp_path)[1]['settings']['preset'] == 'gentle' and 'lr : 0.002' in capsys.readouterr().out
    program.main(['-e', '2', '-c', str(tmp_path), *TINY])
    assert newest(tmp_path)[1]['settings']['preset'] == 'gentle' and 'lr : 0.002' in capsys.readouterr().out


def test_presets_have_a_flag_where_there_are_any(capsys):
    for program, arguments, want in ((TwoSizes(), ['--preset', 'huge'], '--preset: invalid choice: .*small.*large.*gentle'),
                                     (Seq2SeqProgram(), ['--preset', 'small'], 'unrecognized arguments: --preset small')):
        with pytest.raises(SystemExit):
            program.parse(arguments)
        (line,) = capsys.readouterr().err.splitlines()
        assert re.search(f'error: {want}.*; see --help$', line)


# ---- the transformer's words -----------------------------------------------------------------------------------------

class TransformerOfGRUs(TransformerProgram):
    """The flags and lines of transformer.train around the model of seq2seq."""
    DEFAULTS = TransformerProgram.DEFAULTS | dict(embedding=16, hidden=24)
    PRESETS = {}
    architecture = Seq2SeqProgram.architecture


SMALL = ['-f', 'embedded', '-t', '1', '-b', '100', '--hold-out', '0']


def test_the_lines_of_a_transformer_run(tmp_path, capsys):
    program, ckpt = TransformerOfGRUs(), ['-c', str(tmp_path)]
    program.main(['-e', '2', *ckpt, *SMALL])
    lines = capsys.readouterr().out.splitlines()
    sizes = [len(newest(tmp_path)[1]['vocabularies'][which]) for which in ('source', 'target')]
    assert lines[:12] == ['embedded corpus : 12516 pairs', 'epochs : 2', 'batch_size : 100', 'gpu : 0', 'learning rate : 0.001',
                          'checkpoint : none', f'enc_vocab_size : {sizes[0]}', f'dec_vocab_size : {sizes[1]}',
                          'bos_id : 3', 'eos_id : 1', 'src_pad_id : 0', 'tgt_pad_id : 0']
    assert re.fullmatch(r'allocated : [1-9]\d+ bytes for tensors, [1-9]\d+ for intermediate and [1-9]\d+ for gradient tensors',
                        lines[12])
    pairs = r'\d+ pairs/s, \d\d:\d\d left'
    for epoch in (0, 1):
        *progress, last = [line for line in lines if line.startswith(f'epoch {epoch} :  ')]
        assert re.fullmatch(rf'epoch {epoch} :  \[500/500\] loss : \d\.\d{{5}}', last)
        assert [re.fullmatch(rf'epoch {epoch} :  \[(\d+)/500\] loss : \d\.\d{{5}} \({pairs}\)', line)[1]
                for line in progress] == ['100', '200', '300', '400']
    path = checkpoint.find(tmp_path, serving=True).path
    assert lines[-2].startswith('epoch 1 :  [500/500]') and lines[-1] == f'checkpoint saved : {path}'
    assert lines[13].startswith('step : ') and lines[14].startswith('-v lists its kernels; ')
    assert len(lines) == 15 + 2 * 5 + 1
    program.main(['-e', '3', *ckpt, '--no-plan', *SMALL])
    out = capsys.readouterr().out
    assert f'checkpoint : {path}\n' in out and 'loaded from checkpoint\nepoch 2 :  [100/500] ' in out
    assert newest(tmp_path)[0]['step'][0] == 3 * 5


def test_the_answers_of_a_transformer(tmp_path, capsys, monkeypatch):
    program = TransformerOfGRUs()
    program.main(['-e', '1', '-c', str(tmp_path), *SMALL])
    translator, _ = serving.open_checkpoint(program, tmp_path)
    vocabulary = translator.target_vocabulary
    monkeypatch.setattr(Seq2Seq, 'decoding', lambda self: lambda source: np.array([[4], [5], [EOS], [PAD]]))
    said = ' '.join(vocabulary.words([4, 5]))
    assert list(translator.answer('I sleep.')) == [f'i sleep . -> {said}']
    notes = list(translator.answer('Zzz i sleep here now with my brother and his father.'))
    assert notes == ['unknown words : zzz now with and', f'zzz i sleep here now with my brother and -> {said}']
    monkeypatch.setattr('sys.stdin', io.TextIOWrapper(io.BytesIO(b'I sleep.\n')))
    capsys.readouterr()
    program.main(['-e', '0', '-c', str(tmp_path)])
    assert capsys.readouterr().out.splitlines()[-2:] == ['serving mode', f'i sleep . -> {said}']


# ---- sentences that are cut ------------------------------------------------------------------------------------------

def test_a_sentence_is_read_alike_in_training_in_batches_and_typed(tmp_path, capsys, monkeypatch):
    """Of num_steps tokens or more, the first num_steps; of fewer, all and the end mark."""
    corpus = tmp_path / 'pairs.txt'
    sentences = [' '.join(('I can sleep here now with my brother and his old father .').split()[:n]) for n in range(1, 13)]
    corpus.write_text(''.join(f'{sentence}\tJe dors .\n' for sentence in sentences))
    flags = ['-f', str(corpus), '--min-count', '1', '--num-steps', '6', '-b', '4', '--embedding', '8', '--hidden', '8']
    Seq2SeqProgram().main(['-e', '1', '-c', str(tmp_path / 'ckpt'), *flags])
    assert ('cut to --num-steps 6 tokens, end mark included : 7 sources, 0 targets, 7 of 12 pairs (58.3%); '
            'a larger --num-steps cuts fewer\n') in capsys.readouterr().out
    translator, _ = serving.open_checkpoint(Seq2SeqProgram(), tmp_path / 'ckpt')
    read = []
    monkeypatch.setattr(Seq2Seq, 'decoding', lambda self: lambda source: read.extend(source.T.tolist()) or source[:1] * 0 + EOS)
    trained = Pairs.encode(Corpus.load(corpus), translator.source_vocabulary, translator.target_vocabulary, 6).source
    translator.sentences(list(Corpus.load(corpus).sources))
    capsys.readouterr()
    shown = [next(iter(translator.answer(sentence))) for sentence in sentences]
    assert read == [*trained.tolist(), *trained.tolist()]
    assert shown[3:7] == ['i can sleep here <eos>', 'i can sleep here now <eos>', *['i can sleep here now with'] * 2]
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 7                                           # one for each sentence that is cut
    assert warnings[0] == ("warning: too long, only the first 6 of 7 tokens, end mark included, are read: "
                           "'I can sleep here now with'")


def test_a_corpus_that_is_not_cut_prints_no_line_about_it():
    corpus = Corpus('x', ['a b', 'a b c', 'a'], ['a', 'a', 'a b c d'])
    assert cut_line(corpus, 5) is None
    assert cut_line(corpus, 4).startswith('cut to --num-steps 4 tokens, end mark included : 0 sources, 1 targets, 1 of 3 pairs')
    for side in (list, Sentences.of):
        assert Corpus('x', side(corpus.sources), side(corpus.targets)).count_cut(3) == (1, 1, 2)


def test_a_score_tells_of_references_that_are_longer_than_an_output(capsys):
    class Echo:
        num_steps = 3

        def sentences(self, sources):
            return sources
    serving.score(Echo(), Corpus('x', ['a b', 'a b', 'c'], ['a b', 'a b c d', 'c d e']))
    assert ('held-out test : 50.0% of 2 unseen sentences translated exactly; '
            '1 of 3 references are longer than 3 tokens, the longest output\n') in capsys.readouterr().out
    serving.score(Echo(), Corpus('x', ['a'], ['a']))
    assert 'held-out test : 100.0% of 1 unseen sentences translated exactly\n' in capsys.readouterr().out


# ---- typographic quotes ----------------------------------------------------------------------------------------------

def test_typographic_quotes_are_read_in_the_forms_that_were_trained(tmp_path, monkeypatch):
    program = Seq2SeqProgram()
    program.main(['-e', '1', '-c', str(tmp_path), *TINY])
    translator, _ = serving.open_checkpoint(program, tmp_path)
    plain = list(translator.answer("I don't sleep."))
    assert plain[0] == "i don't sleep . <eos>"
    for typed in ('I don’t sleep.', '“I don’t sleep.”', '‘I donʼt sleep.’', '«I don’t sleep.»', '„I don‘t sleep.“'):
        assert list(translator.answer(typed)) == plain
    read = []
    monkeypatch.setattr(Seq2Seq, 'decoding', lambda self: lambda source: read.extend(source.T.tolist()) or source[:1] * 0 + EOS)
    translator, _ = serving.open_checkpoint(program, tmp_path)
    translator.sentences(['i don’t sleep .', "i don't sleep ."])
    assert read[0] == read[1] and UNK not in read[0]
    assert list(translator.answer('"I don\'t sleep."'))[0] == 'unknown words : "i ."'           # plain text is read as ever


# ---- what can be learned ---------------------------------------------------------------------------------------------

def test_a_vocabulary_without_words_is_an_error(tmp_path):
    corpus = tmp_path / 'pairs.txt'
    corpus.write_text('Go.\tVa !\nGo.\tMarche.\nGo.\tPars ?\n')
    arguments = ['-e', '1', '-c', str(tmp_path / 'ckpt'), '-f', str(corpus), *TINY[4:]]
    with pytest.raises(UserError, match=f'^{corpus}: no target word occurs 3 times or more; '
                                        'give --min-count 1 or a larger corpus$'):
        Seq2SeqProgram().main(arguments)
    assert not list((tmp_path / 'ckpt').iterdir())
    Seq2SeqProgram().main([*arguments, '--min-count', '1'])


def test_every_setting_of_the_transformer_has_a_flag_and_a_preset_can_be_undone():
    program = TransformerProgram()
    args = program.parse(['--preset', 'base', '--no-pre-norm'])
    assert vars(args).keys() >= program.DEFAULTS.keys() and args.pre_norm is False
    assert program.parse(['--pre-norm']).pre_norm is True and program.parse([]).pre_norm is None
    assert program.DEFAULTS.keys() >= program.PRESETS['base'].keys() | set(program.GROWING)


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
        TransformerProgram().main(arguments.split())
    assert str(error.value) == want


@pytest.mark.parametrize('before, flags, want', [
    ('', '--pre-norm', '--pre-norm: old.safetensors was trained without it; leave --pre-norm out'),
    ('--pre-norm', '--no-pre-norm', '--no-pre-norm: old.safetensors was trained with --pre-norm; leave --no-pre-norm out'),
    ('', '--pairs 300', '--pairs 300: old.safetensors was trained with all pairs; leave --pairs out'),
    ('--pairs 20', '--pairs 300', '--pairs 300: old.safetensors was trained with 20; leave --pairs out')])
def test_what_a_checkpoint_was_trained_with_is_told_in_flags(before, flags, want):
    program = TransformerProgram()
    kept = program.resolve(program.parse(before.split()), None, None)
    with pytest.raises(UserError) as error:
        program.resolve(program.parse(flags.split()), {'settings': kept}, 'old.safetensors')
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
        TransformerProgram().parse(arguments.split())
    assert left.value.code == 2
    assert re.fullmatch(f'python -m transformer.train: error: {want}; see --help\n', capsys.readouterr().err)


# ---- what is refused early -------------------------------------------------------------------------------------------

def test_settings_that_do_not_go_together_are_refused_before_the_corpus_is_read(tmp_path, capsys):
    class Refusing(Seq2SeqProgram):
        def architecture(self):
            class Config(ModelConfig):
                def __post_init__(self):
                    if self.hidden % 7:
                        raise UserError(f'--hidden {self.hidden}: want a multiple of 7')
            return super().architecture()._replace(config=Config)
    for hidden, want in (('15', '--hidden 15: want a multiple of 7'), ('14', 'none.txt: no such file')):
        with pytest.raises(UserError, match=want):
            Refusing().main(['-e', '1', '-c', str(tmp_path), '-f', 'none.txt', '--hidden', hidden])


def test_a_model_that_memory_cannot_hold_names_the_programs_own_flags():
    specs = {'weight': Spec((2 ** 30, 2 ** 30), zeros())}
    with pytest.raises(UserError, match='; give a smaller --d-model, --d-ff or --layers$'):
        fit.check_model_memory(specs, TransformerProgram.GROWING)


def test_a_step_that_memory_cannot_hold_is_refused_before_it_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(os, 'sysconf', lambda name: {'SC_PHYS_PAGES': 2 ** 10, 'SC_PAGE_SIZE': 4096}[name])
    arguments = ['-e', '1', '-c', str(tmp_path), '-f', 'embedded', '--d-model', '16', '--heads', '2', '--layers', '1']
    with pytest.raises(UserError, match=r'^a training step needs \d+\.\d GiB of memory and this machine has 0\.0; '
                                        'give a smaller -b or --num-steps$'):
        TransformerProgram().main(arguments)
    assert not list(tmp_path.iterdir())
    TransformerProgram().main([*arguments, '-b', '4', '--pairs', '64'])


@pytest.mark.parametrize('program', ['seq2seq.train', 'seq2seq.translate', 'transformer.train', 'transformer.translate'])
def test_help_is_quick(program):
    """It needs neither numpy nor the library nor the model."""
    code = (f"import sys, runpy\nsys.argv = ['x', '--help']\n"
            f"try:\n    runpy.run_module('{program}', run_name='__main__')\n"
            "finally:\n    print([name for name in ('numpy', 'cffi', 'tqdm', 'pyops.backend') if name in sys.modules])")
    out = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0 and out.stdout.startswith('usage: ') and out.stdout.endswith('\n[]\n'), out.stderr
