"""Activations that are formulas, element by element or along an axis.  Those with a kernel are in layers.py."""
from __future__ import annotations

from typing import TYPE_CHECKING

from pyops import functional as F
from pyops import init
from pyops.nn.module import FunctionLayer, Layer, Parameter

if TYPE_CHECKING:
    from pyops.autograd import Tensor


class LeakyReLU(FunctionLayer, function=F.leaky_relu, negative_slope=0.01, inplace=False):
    """y = x for x > 0, else negative_slope * x"""


class ELU(FunctionLayer, function=F.elu, alpha=1.0, inplace=False):
    """y = x where x > 0, else alpha (e^x - 1)"""


class CELU(FunctionLayer, function=F.celu, alpha=1.0, inplace=False):
    """y = x where x > 0, else alpha (e^(x / alpha) - 1)"""


class SELU(FunctionLayer, function=F.selu, inplace=False):
    """y = 1.0507 ELU(1.6733)(x), which keeps mean 0 and variance 1"""


class RReLU(FunctionLayer, function=F.rrelu, lower=1 / 8, upper=1 / 3, inplace=False):
    """y = x where x > 0, else slope x, with a slope for each element drawn from [lower, upper) in training, else their mean"""
    lower: float
    upper: float

    def forward_tensors(self, x: Tensor) -> Tensor:
        return F.rrelu(x, self.lower, self.upper, self.training)


class Softplus(FunctionLayer, function=F.softplus, beta=1.0, threshold=20.0):
    """y = log(1 + e^(beta x)) / beta, and x where beta x > threshold"""


class Mish(FunctionLayer, function=F.mish, inplace=False):
    """y = x tanh(log(1 + e^x))"""


class Hardtanh(FunctionLayer, function=F.hardtanh, min_val=-1.0, max_val=1.0, inplace=False):
    """y = x, limited to min_val and max_val"""


class ReLU6(FunctionLayer, function=F.relu6, inplace=False):
    """y = x, limited to 0 and 6"""


class Hardsigmoid(FunctionLayer, function=F.hardsigmoid, inplace=False):
    """y = x / 6 + 1 / 2, limited to 0 and 1"""


class Hardswish(FunctionLayer, function=F.hardswish, inplace=False):
    """y = x Hardsigmoid(x)"""


class Hardshrink(FunctionLayer, function=F.hardshrink, lambd=0.5):
    """y = x where |x| > lambd, else 0"""


class Softshrink(FunctionLayer, function=F.softshrink, lambd=0.5):
    """y = x moved towards 0 by lambd, and 0 where |x| <= lambd"""


class Tanhshrink(FunctionLayer, function=F.tanhshrink):
    """y = x - tanh(x)"""


class Softsign(FunctionLayer, function=F.softsign):
    """y = x / (1 + |x|)"""


class Tanh(FunctionLayer, function=F.tanh):
    """y = tanh(x)"""


class Sigmoid(FunctionLayer, function=F.sigmoid):
    """y = 1 / (1 + exp(-x))"""


class LogSigmoid(FunctionLayer, function=F.logsigmoid):
    """y = log(1 / (1 + exp(-x)))"""


class Threshold(FunctionLayer, function=F.threshold, threshold=..., value=..., inplace=False):
    """y = x where x > threshold, else value"""


class GLU(FunctionLayer, function=F.glu, dim=-1):
    """y = a Sigmoid(b), for the halves a and b of x along an axis"""


class Softmin(FunctionLayer, function=F.softmin, dim=-1):
    """y = exp(-x) / sum exp(-x) along an axis"""


class Softmax2d(Layer):
    """y = exp(x) / sum exp(x) over the channels of images (N, C, H, W)."""

    def forward_tensors(self, x: Tensor) -> Tensor:
        return F.softmax(x, -3)


class PReLU(Layer):
    """y = x where x > 0, else weight x;  weight (num_parameters,): one, or one for each channel of x (N, C, ...)."""

    def __init__(self, num_parameters: int = 1, init: float = 0.25) -> None:
        self.num_parameters = num_parameters
        self.weight = Parameter((num_parameters,), _constant(init))

    def forward_tensors(self, x: Tensor) -> Tensor:
        return F.prelu(x, self.weight)

    def settings(self) -> str:
        return f'{self.num_parameters}'


_constant = init.constant           # PReLU has an argument `init`
