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
    ELU,
    GELU,
    AdaptiveAvgPool2d,
    AvgPool1d,
    AvgPool2d,
    BatchNorm1d,
    BatchNorm2d,
    Conv1d,
    Conv2d,
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
    MaxPool1d,
    MaxPool2d,
    ReLU,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Tanh,
)
from pyops.nn.losses import (
    BCELoss,
    BCEWithLogitsLoss,
    CrossEntropyLoss,
    HuberLoss,
    KLDivLoss,
    L1Loss,
    MSELoss,
    NLLLoss,
    SmoothL1Loss,
    SoftmaxLoss,
)
from pyops.nn.module import KernelLayer, Layer, Module, Parameter
from pyops.nn.recurrent import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell

__all__ = ['ELU', 'GELU', 'GRU', 'LSTM', 'RNN', 'AdaptiveAvgPool2d', 'AvgPool1d', 'AvgPool2d', 'BCELoss', 'BCEWithLogitsLoss',
           'BatchNorm1d', 'BatchNorm2d', 'Conv1d', 'Conv2d', 'CrossEntropyLoss', 'Dropout', 'Embedding', 'Flatten', 'GRUCell',
           'GroupNorm', 'HuberLoss', 'Identity', 'KLDivLoss', 'KernelLayer', 'L1Loss', 'LSTMCell', 'Layer', 'LayerNorm',
           'LayerNorm1d', 'LeakyReLU', 'Linear', 'LogSoftmax', 'MSELoss', 'MaxPool1d', 'MaxPool2d', 'Module', 'ModuleDict',
           'ModuleList', 'MultiHeadAttention', 'MultiheadAttention', 'NLLLoss', 'Parameter', 'RNNCell', 'ReLU', 'Residual',
           'Sequential', 'SiLU', 'Sigmoid', 'SmoothL1Loss', 'Softmax', 'SoftmaxLoss', 'Softplus', 'Tanh', 'Transformer',
           'TransformerDecoder', 'TransformerDecoderLayer', 'TransformerEncoder', 'TransformerEncoderLayer']


def __getattr__(name: str) -> object:
    """Import pyops.nn.utils on first use: it imports the optimisers."""
    if name != 'utils':
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    import sys
    __import__('pyops.nn.utils')
    return sys.modules['pyops.nn.utils']
