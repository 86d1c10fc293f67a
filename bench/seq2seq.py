"""The contests of seq2seq: training steps, greedy translation."""
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
prepare, train = contest.prepare, contest.train
prepare_sentences, translate = contest.prepare_sentences, contest.translate
