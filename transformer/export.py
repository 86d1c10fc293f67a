"""The transformer in the formats of other programs; pyops.export writes them."""
import math

import numpy as np

from pyops import backend
from pyops.ops import Positions
from pyops.text.vocabulary import BOS, EOS, PAD, SPECIALS, UNK

from .model import parameter_specs

_ATTENTIONS = {'encoder': ['self_attention'], 'decoder': ['self_attention', 'cross_attention']}
EPSILON = 1e-5          # of all layer norms: the default of pyops.ops.LayerNorm


def position_table(config, rows):
    """Return the first rows of the table of positional encodings, (rows, d_model) float32."""
    return backend.get(Positions(config.d_model, rows, halves=config.halves).table)


def embedding_name(side, config):
    return 'embedding.weight' if config.tied else f'{side}.embedding.weight'


def output_name(config):
    return 'embedding.weight' if config.tied else 'output.weight'


# ---- PyTorch -----------------------------------------------------------------------------------------------------

def torch_names(config):
    """Return {name of a parameter: its name in the PyTorch model of docs/export.md and of bench.torch_transformer}."""
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
        return f'{side}.{layer}.norms.{[*_ATTENTIONS[side], "feed_forward"].index(sublayer)}.{parts[-1]}'
    if sublayer == 'feed_forward':                              # w1, b1, w2, b2
        return f'{side}.{layer}.w{parts[3][1]}.{"weight" if parts[3][0] == "w" else "bias"}'
    return name                                                 # the projections of attention


def torch_state(config, weights):
    """Return the state_dict of that model, {name: array}.  With one matrix for both embeddings and the output layer, it is
    there once: safetensors.torch.load_model restores the other names."""
    names = torch_names(config)
    return {names[name]: value for name, value in weights.items()} | {
        'positions': position_table(config, config.num_steps)}


# ---- CTranslate2 -------------------------------------------------------------------------------------------------

_LONGEST = 2048         # rows of the position table; by default CTranslate2 cuts sources at 1024 tokens


def ctranslate2_spec(config, weights, tokens):
    """Return the ctranslate2.specs.TransformerSpec.   tokens: of sources and of targets, in the order of their ids"""
    from ctranslate2.specs import Activation, TransformerSpec
    activation = {'relu': Activation.RELU, 'silu': Activation.SWISH, 'gelu': Activation.GELU,
                  'gelu_tanh': Activation.GELUTanh}[config.activation]
    layers = config.layers, config.decoder_layers or config.layers
    # alignment_heads: the attention that it returns is the mean over all heads of the last layer, as in Translation.alignment
    spec = TransformerSpec.from_config(layers, config.heads, pre_norm=config.pre_norm, activation=activation,
                                       alignment_heads=config.heads)
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = SPECIALS[UNK], SPECIALS[BOS], SPECIALS[EOS]
    spec.config.decoder_start_token, spec.config.add_source_eos = SPECIALS[BOS], True
    spec.config.layer_norm_epsilon = EPSILON
    table = position_table(config, max(_LONGEST, config.positions))

    def fill_norm(norm, prefix):
        norm.gamma, norm.beta = weights[f'{prefix}.weight'], weights[f'{prefix}.bias']

    def fill_linear(linear, prefix, names):
        linear.weight = np.concatenate([weights[f'{prefix}.{name}.weight'] for name in names])
        if config.bias:
            linear.bias = np.concatenate([weights[f'{prefix}.{name}.bias'] for name in names])

    def fill_attention(attention, prefix, *products):
        for linear, names in zip(attention.linear, (*products, ['out']), strict=True):
            fill_linear(linear, prefix, names)
        fill_norm(attention.layer_norm, f'{prefix}.norm')

    for side, part in (('encoder', spec.encoder), ('decoder', spec.decoder)):
        embeddings = part.embeddings[0] if side == 'encoder' else part.embeddings
        embeddings.weight = weights[embedding_name(side, config)]
        part.position_encodings.encodings = table
        if config.pre_norm:
            fill_norm(part.layer_norm, f'{side}.norm')
        for i, layer in enumerate(part.layer):
            prefix = f'{side}.{i}'
            fill_attention(layer.self_attention, f'{prefix}.self_attention', ['q', 'k', 'v'])
            if side == 'decoder':
                fill_attention(layer.attention, f'{prefix}.cross_attention', ['q'], ['k', 'v'])
            for n, linear in enumerate((layer.ffn.linear_0, layer.ffn.linear_1), 1):
                linear.weight, linear.bias = weights[f'{prefix}.feed_forward.w{n}'], weights[f'{prefix}.feed_forward.b{n}']
            fill_norm(layer.ffn.layer_norm, f'{prefix}.feed_forward.norm')
    spec.decoder.projection.weight = weights[output_name(config)]
    spec.decoder.projection.bias = weights['output.bias']
    source, target = tokens
    spec.register_source_vocabulary(source)
    spec.register_target_vocabulary(target)
    return spec


# ---- ONNX --------------------------------------------------------------------------------------------------------

def onnx_models(config, weights):
    """Return {name: onnx.ModelProto} of the encoder and of one step of the decoder.

    encoder        source (batch, source_length) int64, padded with <pad>
                   -> memory_keys, memory_values (layers, batch, heads, source_length, width) of the decoder's attention to the
                   source;  keys, values (layers, batch, heads, 0, width), the empty caches of the decoder
    decoder_step   token (batch,) int64, the previous one; source, memory_keys, memory_values;
                   keys, values (layers, batch, heads, time, width)
                   -> logits (batch, target_size);  next_keys, next_values (layers, batch, heads, time + 1, width)
    """
    from pyops.export.graph import Graph
    return {'encoder': _encoder(Graph('encoder', weights), config),
            'decoder_step': _decoder_step(Graph('decoder_step', weights), config)}


def _encoder(graph, config):
    source = graph.input('source', 'int64', 'batch', 'source_length')
    mask, batch, length = graph.mask(source, PAD), graph.size(source, 0), graph.size(source, 1)
    layers = _Layers(graph, config, graph.constant(position_table(config, config.positions)))
    x = layers.embed('encoder', source, graph.node('Slice', layers.table, [0], length, [0]))
    for i in range(config.layers):
        prefix = f'encoder.{i}'
        x = layers.sublayer(x, f'{prefix}.self_attention', lambda n, name: layers.attention(
            name, layers.heads(n, f'{name}.q'), layers.heads(n, f'{name}.k'), layers.heads(n, f'{name}.v'), mask))
        x = layers.sublayer(x, f'{prefix}.feed_forward', layers.feed_forward)
    x = layers.last_norm(x, 'encoder')
    shape = config.decoder_layers or config.layers, 'batch', config.heads, 'source_length', layers.width
    for name, projection in (('memory_keys', 'k'), ('memory_values', 'v')):
        of_layers = [layers.heads(x, f'decoder.{i}.cross_attention.{projection}') for i in range(shape[0])]
        graph.output(name, graph.stacked(of_layers), 'float32', *shape)
    empty = graph.node('ConstantOfShape', graph.node('Concat', shape[:1], batch, [config.heads, 0, layers.width], axis=0))
    for name in ('keys', 'values'):
        graph.output(name, empty, 'float32', *shape[:3], 0, layers.width)
    return graph.model()


def _decoder_step(graph, config):
    count, width = config.decoder_layers or config.layers, config.d_model // config.heads
    token, source = graph.input('token', 'int64', 'batch'), graph.input('source', 'int64', 'batch', 'source_length')
    memory = [graph.input(name, 'float32', count, 'batch', config.heads, 'source_length', width)
              for name in ('memory_keys', 'memory_values')]
    caches = [graph.input(name, 'float32', count, 'batch', config.heads, 'time', width) for name in ('keys', 'values')]
    mask, t = graph.mask(source, PAD), graph.size(caches[0], 3)
    layers = _Layers(graph, config, graph.constant(position_table(config, config.positions)))
    x = layers.embed('decoder', graph.node('Unsqueeze', token, [1]), graph.node('Gather', layers.table, t))     # (batch, 1, D)
    grown = [], []                                      # keys and values of each layer, including this token

    def look_back(i):
        def f(n, name):
            for cache, projection, results in zip(caches, 'kv', grown, strict=True):
                results.append(graph.node('Concat', graph.node('Gather', cache, i),
                                          layers.heads(n, f'{name}.{projection}'), axis=2))
            return layers.attention(name, layers.heads(n, f'{name}.q'), grown[0][i], grown[1][i], None)
        return f

    def look_at_source(i):
        return lambda n, name: layers.attention(name, layers.heads(n, f'{name}.q'),
                                                *(graph.node('Gather', value, i) for value in memory), mask)
    for i in range(count):
        prefix = f'decoder.{i}'
        x = layers.sublayer(x, f'{prefix}.self_attention', look_back(i))
        x = layers.sublayer(x, f'{prefix}.cross_attention', look_at_source(i))
        x = layers.sublayer(x, f'{prefix}.feed_forward', layers.feed_forward)
    x = graph.node('Squeeze', layers.last_norm(x, 'decoder'), [1])
    logits = graph.node('Gemm', x, graph.weight(output_name(config)), graph.weight('output.bias'), transB=1)
    graph.output('logits', logits, 'float32', 'batch', config.target_size)
    for name, values in zip(('next_keys', 'next_values'), grown, strict=True):
        graph.output(name, graph.stacked(values), 'float32', count, 'batch', config.heads, 'next_time', width)
    return graph.model()


class _Layers:
    """The layers of the model as nodes of a graph.   table: the positional encodings (positions, d_model), a value"""

    def __init__(self, graph, config, table):
        self.graph, self.config, self.table, self.width = graph, config, table, config.d_model // config.heads

    def embed(self, side, ids, positions):
        """Return the embedded ids (batch, T), scaled, plus rows of the table of positions: (batch, T, D)."""
        rows = self.graph.node('Gather', self.graph.weight(embedding_name(side, self.config)), ids)
        return self.graph.node('Add', self.graph.node('Mul', rows, self.config.d_model ** 0.5), positions)

    def project(self, x, prefix):
        return self.graph.linear(x, f'{prefix}.weight', f'{prefix}.bias' if self.config.bias else None)

    def heads(self, x, prefix):
        return self.graph.split_heads(self.project(x, prefix), self.config.heads, self.width)

    def attention(self, prefix, q, k, v, mask):
        return self.project(self.graph.attend(q, k, v, mask, self.width), f'{prefix}.out')

    def feed_forward(self, x, prefix):
        g = self.graph
        x = g.linear(x, f'{prefix}.w1', f'{prefix}.b1')
        if self.config.activation == 'relu':
            x = g.node('Relu', x)
        elif self.config.activation == 'silu':
            x = g.node('Mul', x, g.node('Sigmoid', x))
        elif self.config.activation == 'gelu_tanh':     # x sigmoid(v), v as in pyops.ops.GELUTanh
            scale = math.sqrt(8 / math.pi)
            v = g.node('Mul', x, g.node('Add', g.node('Mul', g.node('Mul', x, x), 0.044715 * scale), scale))
            x = g.node('Mul', x, g.node('Sigmoid', v))
        else:
            x = g.node('Mul', x, g.node('Add', g.node('Mul', g.node('Erf', g.node('Mul', x, 0.5 ** 0.5)), 0.5), 0.5))
        return g.linear(x, f'{prefix}.w2', f'{prefix}.b2')

    def sublayer(self, x, prefix, f):
        """Return x with the branch f(n, prefix) added, n (batch, T, D), and with its norm."""
        if self.config.pre_norm:
            return self.graph.node('Add', x, f(self.norm(x, prefix), prefix))
        return self.norm(self.graph.node('Add', x, f(x, prefix)), prefix)

    def norm(self, x, prefix):
        return self.graph.layer_norm(x, f'{prefix}.norm', EPSILON)

    def last_norm(self, x, side):
        return self.norm(x, side) if self.config.pre_norm else x
