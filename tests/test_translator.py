"""What translation programs share, tried on programs that are seq2seq but for one thing."""
import re

import numpy as np
import pytest
from test_seq2seq import TINY, assert_same_training, newest

from pyops import checkpoint
from pyops.errors import UserError
from pyops.optim import Adam, inverse_square_root
from seq2seq.train import Seq2SeqProgram

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

def test_the_rate_rises_to_its_peak_and_falls_with_the_root_of_the_step():
    rates = [inverse_square_root(0.5, 4, step) for step in (1, 2, 4, 16, 64, 400)]
    assert rates == [0.125, 0.25, 0.5, 0.25, 0.125, 0.05]
    d_model, warmup = 512, 4000
    for step in (1, 17, 3999, 4000, 4001, 100_000):         # equation 3 of the paper
        want = d_model ** -0.5 * min(step ** -0.5, step * warmup ** -1.5)
        assert inverse_square_root((d_model * warmup) ** -0.5, warmup, step) == pytest.approx(want, rel=1e-12)
    assert [inverse_square_root(0.5, 0, step) for step in (1, 1000)] == [0.5, 0.5]


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
    assert rates == {n: np.float32(inverse_square_root(0.005, 7, n)) for n in range(1, 16)}
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
