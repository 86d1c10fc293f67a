"""The contests of transformer: training steps, greedy translation."""
from bench.translation import Contest

UNIT = 'pairs'


def ours():
    from transformer.model import Config, Transformer
    return Config, Transformer


def theirs():
    from bench.torch_transformer import TorchTransformer
    return TorchTransformer


def jax_loss():
    from bench.jax_models import transformer_loss
    return transformer_loss


def preset(name):
    from transformer.train import PRESETS
    return PRESETS[name]


contest = Contest(ours, theirs, jax_loss, lr=0.001, preset=preset)
prepare, train = contest.prepare, contest.train
prepare_sentences, translate = contest.prepare_sentences, contest.translate
