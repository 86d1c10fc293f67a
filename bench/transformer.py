"""The contest of transformer training steps."""
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
prepare, make_ours, make_torch = contest.prepare, contest.make_ours, contest.make_torch
