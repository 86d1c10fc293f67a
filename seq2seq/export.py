"""The GRU encoder and decoder in the formats of other programs; pyops.export writes them."""
import numpy as np

from pyops.errors import UserError
from pyops.text.vocabulary import PAD

from .model import parameter_specs

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
                        'use `export onnx`, or train without --reset-before')
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


def torch_state(config, weights):
    """Return the state_dict of that model, {name: array}."""
    names = torch_names(config)
    return {names[name]: value for name, value in weights.items()}


# ---- ONNX --------------------------------------------------------------------------------------------------------

def onnx_models(config, weights):
    """Return {name: onnx.ModelProto} of the encoder and of one step of the decoder.

    encoder        source (batch, source_length) int64, padded with <pad>
                   -> states (layers, batch, hidden), the last ones;  with attention memory (batch, source_length, hidden), the
                   states of the top layer, else context (batch, hidden), its last state
    decoder_step   token (batch,) int64, the previous one; states; source and memory, or context
                   -> logits (batch, target_size);  next_states (layers, batch, hidden)
    """
    from pyops.export.graph import Graph
    return {'encoder': _encoder(Graph('encoder', weights), config, weights),
            'decoder_step': _decoder_step(Graph('decoder_step', weights), config, weights)}


def _encoder(graph, config, weights):
    source = graph.input('source', 'int64', 'batch', 'source_length')
    is_token = graph.node('Cast', graph.node('Not', graph.node('Equal', source, PAD)), to=graph.INT32)
    lengths = graph.node('ReduceSum', is_token, [1], keepdims=0)
    x = graph.node('Gather', graph.weight('encoder.embedding.weight'), graph.node('Transpose', source, perm=[1, 0]))
    last = []
    for layer in range(config.layers):
        name = f'encoder.rnn.{layer}'
        if config.bidirectional and layer == 0:
            y, h = _gru(graph, weights, x, [f'{name}.forward', f'{name}.reverse'], config, lengths)
            x = graph.node('Reshape', graph.node('Transpose', y, perm=[0, 2, 1, 3]), [0, 0, -1])
            h = graph.node('Unsqueeze', graph.node('Reshape', graph.node('Transpose', h, perm=[1, 0, 2]), [0, -1]), [0])
        else:
            y, h = _gru(graph, weights, x, [name], config, lengths)
            x = graph.node('Squeeze', y, [1])                                   # (source_length, batch, hidden)
        last.append(h)                                                          # (1, batch, hidden)
    graph.output('states', graph.node('Concat', *last, axis=0), 'float32', config.layers, 'batch', config.hidden)
    if config.attention:
        memory = graph.node('Transpose', x, perm=[1, 0, 2])
        graph.output('memory', memory, 'float32', 'batch', 'source_length', config.hidden)
    else:
        graph.output('context', graph.node('Squeeze', last[-1], [0]), 'float32', 'batch', config.hidden)
    return graph.model()


def _decoder_step(graph, config, weights):
    H, heads = config.hidden, config.attention
    token, states = graph.input('token', 'int64', 'batch'), graph.input('states', 'float32', config.layers, 'batch', H)
    x = graph.node('Gather', graph.weight('decoder.embedding.weight'), token)
    if heads:
        source = graph.input('source', 'int64', 'batch', 'source_length')
        memory = graph.input('memory', 'float32', 'batch', 'source_length', H)
    else:
        x = graph.node('Concat', x, graph.input('context', 'float32', 'batch', H), axis=1)
    x, following = graph.node('Unsqueeze', x, [0]), []
    for layer in range(config.layers):
        _, x = _gru(graph, weights, x, [f'decoder.rnn.{layer}'], config, None, graph.node('Gather', states, [layer]))
        following.append(x)                                                     # (1, batch, hidden)
    h = graph.node('Squeeze', x, [0])
    if heads:
        q = graph.split_heads(graph.node('Unsqueeze', graph.linear(h, 'attention.query.weight'), [1]), heads, H // heads)
        k = graph.split_heads(memory, heads, H // heads)
        c = graph.node('Squeeze', graph.attend(q, k, k, graph.mask(source, PAD), H // heads), [1])
        h = graph.node('Add', h, graph.linear(c, 'attention.output.weight'))
    logits = graph.node('Gemm', h, graph.weight('output.weight'), graph.weight('output.bias'), transB=1)
    graph.output('logits', logits, 'float32', 'batch', config.target_size)
    graph.output('next_states', graph.node('Concat', *following, axis=0), 'float32', config.layers, 'batch', H)
    return graph.model()


def _gru(graph, weights, x, names, config, lengths, state=None):
    """Return all states (T, directions, batch, H) and the last ones (directions, batch, H) of a GRU on x (T, batch, I).

    names: of the layer, or of its two directions;  lengths (batch,) int32, None for T;  state (directions, batch, H) or None
    """
    def reordered(part):
        """Gates are stacked as r, z, n here, and as z, r, n in ONNX."""
        gates = [np.split(weights[f'{name}.{part}'], 3) for name in names]
        return np.stack([np.concatenate([z, r, n]) for r, z, n in gates])
    w_ih, w_hh, b_ih, b_hh = map(reordered, ('w_ih', 'w_hh', 'b_ih', 'b_hh'))
    return graph.node('GRU', x, w_ih, w_hh, np.concatenate([b_ih, b_hh], 1), lengths, state, outputs=2,
                      hidden_size=w_hh.shape[-1], linear_before_reset=int(not config.reset_before),
                      direction='bidirectional' if len(names) > 1 else 'forward')
