"""Layers: modules on Tensors, each also with manual forward and backward on arrays.  docs/nn.md explains both uses."""
import sys

import pyops.functional
from pyops.nn.activations import (
    CELU,
    ELU,
    GLU,
    SELU,
    Hardshrink,
    Hardsigmoid,
    Hardswish,
    Hardtanh,
    LeakyReLU,
    LogSigmoid,
    Mish,
    PReLU,
    ReLU6,
    Sigmoid,
    Softmax2d,
    Softmin,
    Softplus,
    Softshrink,
    Softsign,
    Tanh,
    Tanhshrink,
    Threshold,
)
from pyops.nn.attention import (
    MultiHeadAttention,
    MultiheadAttention,
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from pyops.nn.container import ModuleDict, ModuleList, ParameterDict, ParameterList, Residual, Sequential
from pyops.nn.images import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AdaptiveMaxPool1d,
    AdaptiveMaxPool2d,
    ChannelShuffle,
    CircularPad1d,
    CircularPad2d,
    ConstantPad1d,
    ConstantPad2d,
    Fold,
    PixelShuffle,
    PixelUnshuffle,
    ReflectionPad1d,
    ReflectionPad2d,
    ReplicationPad1d,
    ReplicationPad2d,
    Unfold,
    Upsample,
    UpsamplingNearest2d,
    ZeroPad1d,
    ZeroPad2d,
)
from pyops.nn.layers import (
    GELU,
    AvgPool1d,
    AvgPool2d,
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    Bilinear,
    Conv,
    Conv1d,
    Conv2d,
    ConvTranspose1d,
    ConvTranspose2d,
    Dropout,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    Embedding,
    EmbeddingBag,
    Flatten,
    GroupNorm,
    Identity,
    InstanceNorm1d,
    InstanceNorm2d,
    LayerNorm,
    LayerNorm1d,
    Linear,
    LogSoftmax,
    MaxPool1d,
    MaxPool2d,
    ReLU,
    RMSNorm,
    SiLU,
    Softmax,
    Unflatten,
)
from pyops.nn.losses import (
    BCELoss,
    BCEWithLogitsLoss,
    CosineEmbeddingLoss,
    CosineSimilarity,
    CrossEntropyLoss,
    GaussianNLLLoss,
    HingeEmbeddingLoss,
    HuberLoss,
    KLDivLoss,
    L1Loss,
    MarginRankingLoss,
    MSELoss,
    MultiLabelSoftMarginLoss,
    MultiMarginLoss,
    NLLLoss,
    PairwiseDistance,
    PoissonNLLLoss,
    SmoothL1Loss,
    SoftMarginLoss,
    SoftmaxLoss,
    TripletMarginLoss,
)
from pyops.nn.module import FunctionLayer, KernelLayer, Layer, Module, Parameter
from pyops.nn.recurrent import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell

__all__ = ['AdaptiveAvgPool1d', 'AdaptiveAvgPool2d', 'AdaptiveMaxPool1d', 'AdaptiveMaxPool2d', 'AvgPool1d', 'AvgPool2d',
           'BCELoss', 'BCEWithLogitsLoss', 'BatchNorm1d', 'BatchNorm2d', 'BatchNorm3d', 'Bilinear', 'CELU', 'ChannelShuffle',
           'CircularPad1d', 'CircularPad2d', 'ConstantPad1d', 'ConstantPad2d', 'Conv', 'Conv1d', 'Conv2d', 'ConvTranspose1d',
           'ConvTranspose2d', 'CosineEmbeddingLoss', 'CosineSimilarity', 'CrossEntropyLoss', 'Dropout', 'Dropout1d',
           'Dropout2d', 'Dropout3d', 'ELU', 'Embedding', 'EmbeddingBag', 'Flatten', 'Fold', 'FunctionLayer', 'GELU', 'GLU',
           'GRU', 'GRUCell', 'GaussianNLLLoss', 'GroupNorm', 'Hardshrink', 'Hardsigmoid', 'Hardswish', 'Hardtanh',
           'HingeEmbeddingLoss', 'HuberLoss', 'Identity', 'InstanceNorm1d', 'InstanceNorm2d', 'KLDivLoss', 'KernelLayer',
           'L1Loss', 'LSTM', 'LSTMCell', 'Layer', 'LayerNorm', 'LayerNorm1d', 'LeakyReLU', 'Linear', 'LogSigmoid', 'LogSoftmax',
           'MSELoss', 'MarginRankingLoss', 'MaxPool1d', 'MaxPool2d', 'Mish', 'Module', 'ModuleDict', 'ModuleList',
           'MultiHeadAttention', 'MultiLabelSoftMarginLoss', 'MultiMarginLoss', 'MultiheadAttention', 'NLLLoss', 'PReLU',
           'PairwiseDistance', 'Parameter', 'ParameterDict', 'ParameterList', 'PixelShuffle', 'PixelUnshuffle',
           'PoissonNLLLoss', 'RMSNorm', 'RNN', 'RNNCell', 'ReLU', 'ReLU6', 'ReflectionPad1d', 'ReflectionPad2d',
           'ReplicationPad1d', 'ReplicationPad2d', 'Residual', 'SELU', 'Sequential', 'SiLU', 'Sigmoid', 'SmoothL1Loss',
           'SoftMarginLoss', 'Softmax', 'Softmax2d', 'SoftmaxLoss', 'Softmin', 'Softplus', 'Softshrink', 'Softsign', 'Tanh',
           'Tanhshrink', 'Threshold', 'Transformer', 'TransformerDecoder', 'TransformerDecoderLayer', 'TransformerEncoder',
           'TransformerEncoderLayer', 'TripletMarginLoss', 'Unflatten', 'Unfold', 'Upsample', 'UpsamplingNearest2d',
           'ZeroPad1d', 'ZeroPad2d']


# PyTorch's name, also for `import pyops.nn.functional as F`
functional = sys.modules[f'{__name__}.functional'] = pyops.functional


def __getattr__(name: str) -> object:
    """Import pyops.nn.init and pyops.nn.utils on first use: the latter imports the optimisers."""
    if name not in ('init', 'utils'):
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    __import__(f'{__name__}.{name}')
    return sys.modules[f'{__name__}.{name}']
