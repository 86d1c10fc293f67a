"""Op classes: y, ctx = op.forward(x, ...);  dx = op.backward(dy, ctx).

Forward returns the ctx and does not store it on the op, so one op can run many times before its first backward.  Parameter
gradients are added to Parameter.grad.  Activation gradients are new arrays, or are added to the array passed as `into`.
Sequences are time-major, (T, B, ...).

All Python code of an op is in one file:

    forward, backward       the op
    reference, example      its formula in float64 numpy and small inputs, for gradient checks (pyops/differences.py)
    backward_on_tensors     backward(dy, ctx) as a formula on Tensors, for second derivatives, if that formula is short.
                            Returns the gradients of the inputs and {parameter: gradient}; ctx and `parameters` hold Tensors
    declare(...)            the costs of its kernels (pyops/backend/kernels.py)
"""
from pyops.ops.activation import GELU, GELUTanh, SiLU
from pyops.ops.attention import Attention, sequence_lengths
from pyops.ops.batch_norm import BatchNorm
from pyops.ops.convolution import Conv2d, Conv2dFilters, Conv2dTransposed
from pyops.ops.cross_entropy import CrossEntropy
from pyops.ops.dropout import Dropout
from pyops.ops.embedding import Embedding
from pyops.ops.embedding_gru import EmbeddingGRU
from pyops.ops.embedding_positions import EmbeddingPositions
from pyops.ops.feed_forward import FeedForward
from pyops.ops.gru import GRU
from pyops.ops.join import ConcatContext
from pyops.ops.layer_norm import LayerNorm
from pyops.ops.linear import Linear
from pyops.ops.linear_cross_entropy import LinearCrossEntropy
from pyops.ops.linear_residual import LinearResidual, LinearResidualNorm
from pyops.ops.mlp import MLPGradients
from pyops.ops.pixel_linear import PixelLinear
from pyops.ops.pooling import AvgPool2d, MaxPool2d
from pyops.ops.positions import Positions
from pyops.ops.relu import ReLU
from pyops.ops.residual import Residual
from pyops.ops.residual_norm import ResidualNorm
from pyops.ops.rnn import LSTM, RNN

__all__ = ['GELU', 'GRU', 'LSTM', 'RNN', 'Attention', 'AvgPool2d', 'BatchNorm', 'ConcatContext', 'Conv2d', 'Conv2dFilters',
           'Conv2dTransposed', 'CrossEntropy', 'Dropout', 'Embedding', 'EmbeddingGRU', 'EmbeddingPositions', 'FeedForward',
           'GELUTanh', 'LayerNorm', 'Linear', 'LinearCrossEntropy', 'LinearResidual', 'LinearResidualNorm', 'MLPGradients',
           'MaxPool2d', 'PixelLinear', 'Positions',
           'ReLU', 'Residual', 'ResidualNorm', 'SiLU', 'sequence_lengths']
