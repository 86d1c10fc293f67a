"""The contests of seq2seq: training steps, greedy translation."""
from bench.translation import Contest

UNIT = 'pairs'


def ours():
    from seq2seq.model import Config, Seq2Seq
    return Config, Seq2Seq


def theirs():
    from bench.torch_seq2seq import TorchSeq2Seq
    return TorchSeq2Seq


def jax_loss():
    from bench.jax_models import seq2seq_loss
    return seq2seq_loss


contest = Contest(ours, theirs, jax_loss, lr=0.005)
prepare, train = contest.prepare, contest.train
prepare_sentences, translate = contest.prepare_sentences, contest.translate
