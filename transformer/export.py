"""The transformer in the formats of other programs."""
from transformer.model import parameter_specs

ATTENTIONS = {'encoder': ['self_attention'], 'decoder': ['self_attention', 'cross_attention']}


# ---- PyTorch -----------------------------------------------------------------------------------------------------

def torch_names(config):
    """Return {name of a parameter: its name in bench.torch_transformer}."""
    return {name: _torch_name(name) for name in parameter_specs(config)}


def _torch_name(name):
    parts = name.split('.')
    if parts[0] == 'output':
        return name
    if parts[-2] == 'embedding':
        return f'{"target" if parts[0] == "decoder" else "source"}_embedding.weight'
    if parts[1] == 'norm':                                      # behind the last layer
        return f'{parts[0]}_norm.{parts[-1]}'
    side, layer, sublayer = parts[:3]
    if parts[3] == 'norm':
        return f'{side}.{layer}.norms.{[*ATTENTIONS[side], "feed_forward"].index(sublayer)}.{parts[-1]}'
    if sublayer == 'feed_forward':                              # w1, b1, w2, b2
        return f'{side}.{layer}.w{parts[3][1]}.{"weight" if parts[3][0] == "w" else "bias"}'
    return name                                                 # the projections of attention
