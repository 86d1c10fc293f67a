"""Layers: modules on Tensors, each also with manual forward and backward on arrays.  docs/nn.md explains both uses."""
from pyops.nn.attention import (
    MultiHeadAttention,
    MultiheadAttention,
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from pyops.nn.container import ModuleDict, ModuleList, Residual, Sequential
from pyops.nn.layers import (
    GELU,
    AdaptiveAvgPool2d,
    AvgPool2d,
    BatchNorm1d,
    BatchNorm2d,
    Conv1d,
    Conv2d,
    CrossEntropyLoss,
    Dropout,
    Embedding,
    Flatten,
    GroupNorm,
    Identity,
    LayerNorm,
    LayerNorm1d,
    LeakyReLU,
    Linear,
    LogSoftmax,
    MaxPool2d,
    MSELoss,
    NLLLoss,
    ReLU,
    Sigmoid,
    SiLU,
    Softmax,
    SoftmaxLoss,
    Tanh,
)
from pyops.nn.module import KernelLayer, Layer, Module, Parameter
from pyops.nn.recurrent import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell

__all__ = ['GELU', 'GRU', 'LSTM', 'RNN', 'AdaptiveAvgPool2d', 'AvgPool2d', 'BatchNorm1d', 'BatchNorm2d', 'Conv1d', 'Conv2d',
           'CrossEntropyLoss', 'Dropout', 'Embedding', 'Flatten', 'GRUCell', 'GroupNorm', 'Identity', 'KernelLayer',
           'LSTMCell', 'Layer', 'LayerNorm', 'LayerNorm1d', 'LeakyReLU', 'Linear', 'LogSoftmax', 'MSELoss', 'MaxPool2d',
           'Module', 'ModuleDict', 'ModuleList', 'MultiHeadAttention', 'MultiheadAttention', 'NLLLoss', 'Parameter', 'RNNCell',
           'ReLU', 'Residual', 'Sequential', 'SiLU', 'Sigmoid', 'Softmax', 'SoftmaxLoss', 'Tanh', 'Transformer',
           'TransformerDecoder', 'TransformerDecoderLayer', 'TransformerEncoder', 'TransformerEncoderLayer']


def __getattr__(name: str) -> object:
    """Import pyops.nn.utils on first use: it imports the optimisers."""
    if name != 'utils':
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    import sys
    __import__('pyops.nn.utils')
    return sys.modules['pyops.nn.utils']
