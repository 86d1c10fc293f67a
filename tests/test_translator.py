"""What translation programs share, tried on programs that are seq2seq but for one thing."""
import pytest
from test_seq2seq import TINY, newest

from pyops import checkpoint
from pyops.errors import UserError
from seq2seq.train import DeepGRU

# ---- batches that are dropped ---------------------------------------------------------------------------------------


class WholeBatches(DeepGRU):
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
    DeepGRU().main(['-e', '1', '-c', str(tmp_path), *TINY, '-b', '452'])        # seq2seq takes what there is


def test_another_batch_size_in_the_middle_of_such_an_epoch(tmp_path, capsys):
    DeepGRU().main(['-e', '1', '-c', str(tmp_path), *TINY])
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
