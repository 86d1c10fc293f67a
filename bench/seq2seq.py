"""The contest of seq2seq training steps."""
from bench.translation import Contest

UNIT = 'pairs'
BATCH_SIZE = 128


def ours():
    from seq2seq.model import Config, Seq2Seq
    return Config, Seq2Seq


def theirs():
    from bench.torch_seq2seq import TorchSeq2Seq
    return TorchSeq2Seq


contest = Contest(ours, theirs, lr=0.005)
prepare, make_ours, make_torch = contest.prepare, contest.make_ours, contest.make_torch
