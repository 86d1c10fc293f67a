"""The GRU encoder and decoder in the formats of other programs."""
from pyops.errors import UserError
from seq2seq.model import parameter_specs

# ---- PyTorch -----------------------------------------------------------------------------------------------------

_PARTS = {'w_ih': 'weight_ih', 'w_hh': 'weight_hh', 'b_ih': 'bias_ih', 'b_hh': 'bias_hh'}
_FIXED = {'encoder.embedding.weight': 'source_embedding.weight', 'decoder.embedding.weight': 'target_embedding.weight',
          'attention.query.weight': 'query.weight', 'attention.output.weight': 'context.weight'}


def torch_names(config):
    """Return {name of a parameter: its name in bench.torch_seq2seq.TorchSeq2Seq}.

    UserError if the GRUs apply the reset gate before the product: PyTorch's apply it after the product.
    """
    if config.reset_before:
        raise UserError('trained with --reset-before: torch.nn.GRU applies the reset gate after the recurrent product; '
                        'train without --reset-before')
    return {name: _FIXED.get(name) or (_torch_name(name, config) if '.rnn.' in name else name)
            for name in parameter_specs(config)}


def _torch_name(name, config):
    """The encoder is a list of nn.GRUs: with a bidirectional bottom layer two, else one; the decoder is one."""
    side, _, layer, *direction, part = name.split('.')
    layer, gru = int(layer), side
    if side == 'encoder':
        above = config.bidirectional and layer > 0              # the second GRU
        layer, gru = layer - above, f'encoder.{int(above)}'
    return f'{gru}.{_PARTS[part]}_l{layer}' + '_reverse' * (direction == ['reverse'])
