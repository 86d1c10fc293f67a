"""The contests of transformer: training steps, greedy translation."""
from bench.translation import Contest

UNIT = 'pairs'
BATCH_SIZE = 128


def ours():
    from transformer.model import Config, Transformer
    return Config, Transformer


def theirs():
    from bench.torch_transformer import TorchTransformer
    return TorchTransformer


contest = Contest(ours, theirs, lr=0.001)
prepare, train = contest.prepare, contest.train
prepare_sentences, translate = contest.prepare_sentences, contest.translate
