"""Functions on Tensors, each an op or a short formula of ops.  `from pyops import functional as F`.

Names and argument order follow torch.nn.functional and torch if they have the function.  Axes are called `axis` (None for
all, an int, or several) and `keepdims`; every argument is also accepted by PyTorch's name, such as `dim`, `input` and `target`.
Arrays and lists passed instead of Tensors are constants.
"""
from __future__ import annotations

import builtins
import functools
import itertools
import math
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np

from pyops import backend, ndarray, recurrence
from pyops.autograd import Tensor, apply, is_grad_enabled
from pyops.autograd.mode import is_interpreted
from pyops.autograd.tape import as_scalar
from pyops.autograd.tensor import concatenate, einsum, stack, where  # noqa: F401  functions of this module
from pyops.methods import accepts_torch_names, arrays_of
from pyops.names import ALIASES, IN_PLACE, METHODS
from pyops.ops import (
    GELU,
    GRU,
    LSTM,
    RNN,
    Attention,
    AvgPool2d,
    BatchNorm,
    ConcatContext,
    Conv2d,
    Conv2dTransposed,
    CrossEntropy,
    Dropout,
    Embedding,
    FeedForward,
    GELUTanh,
    LayerNorm,
    Linear,
    LinearCrossEntropy,
    MaxPool2d,
    Residual,
    SiLU,
)
from pyops.ops.array import normal_axes
from pyops.ops.convolution import pair, sizes_of, transposed_sizes
from pyops.ops.double import Convolve, ConvolveTransposed, NormalCDF, PoolMaxima, PoolMeans
from pyops.ops.elementwise import ELU, Abs, Exp, Hardsigmoid, Hardswish, Log, Sigmoid, Softplus, Sqrt, Tanh
from pyops.ops.matmul import MatMul
from pyops.ops.reductions import LogSoftmax, LogSumExp, Mean, Softmax, Sum
from pyops.ops.shapes import BroadcastTo, GetItem, Pad, Permute, Place, Reshape
from pyops.params import random_generator
from pyops.torch_methods import function_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyops.typing import Array, Axis, Numbers, Shape


def tensor(x: Numbers, like: Tensor | None = None) -> Tensor:
    """Convert x to a Tensor, on the device of `like`; a Tensor is returned unchanged."""
    return x if isinstance(x, Tensor) else Tensor(x, device=None if like is None else like.device)


def is_double(x: Tensor) -> bool:
    """Return whether x is float64, so that a formula of array ops replaces a kernel, which takes float32."""
    return x.array.dtype == ndarray.DOUBLE and not is_interpreted()


def has_gradient(x: Tensor) -> bool:
    """Return whether a function of x is recorded.  Otherwise a formula with the same values and another gradient will do."""
    return x.requires_grad and is_grad_enabled()


# ---- element by element ------------------------------------------------------------------------------------------------

def exp(x: Numbers) -> Tensor:
    """Return e^x, elementwise."""
    return apply(Exp, tensor(x))


def log(x: Numbers) -> Tensor:
    """Return the natural logarithm, elementwise."""
    return apply(Log, tensor(x))


def sqrt(x: Numbers) -> Tensor:
    """Return the square root, elementwise."""
    return apply(Sqrt, tensor(x))


def abs(x: Numbers) -> Tensor:
    """Return the absolute value, elementwise; the gradient at 0 is 0."""
    return apply(Abs, tensor(x))


def tanh(x: Numbers) -> Tensor:
    """Return the hyperbolic tangent, elementwise."""
    return apply(Tanh, tensor(x))


def sigmoid(x: Numbers) -> Tensor:
    """Return 1 / (1 + e^-x), elementwise."""
    return apply(Sigmoid, tensor(x))


def _in_place(function: Callable[..., Tensor], x: Any, *args: Any) -> Tensor:
    """Replace the elements of a Tensor by function(x, *args), and return it.  TypeError for anything but a Tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f'inplace: expected a Tensor, which changes, got {type(x).__name__}')
    return x._replace(lambda x: function(x, *args))


def relu(x: Numbers, inplace: bool = False) -> Tensor:
    """Return max(x, 0), elementwise.  inplace: x, a Tensor, changes and is returned, here and in the functions below."""
    return _in_place(relu, x) if inplace else tensor(x).relu()


def silu(x: Numbers, inplace: bool = False) -> Tensor:
    """Return x / (1 + e^-x), elementwise."""
    if inplace:
        return _in_place(silu, x)
    x = tensor(x)
    return x * sigmoid(x) if is_double(x) else apply(SiLU, x)


def leaky_relu(x: Numbers, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    """Return x where x > 0, else negative_slope * x."""
    if inplace:
        return _in_place(leaky_relu, x, negative_slope)
    x = tensor(x)
    if 0 < negative_slope <= 1 and not has_gradient(x):
        return x.maximum(x * negative_slope)
    return where(x > 0, x, x * negative_slope)


def elu(x: Numbers, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """Return x where x > 0, else alpha (e^x - 1)."""
    if inplace:
        return _in_place(elu, x, alpha)
    x = tensor(x)
    y = apply(ELU, x)
    return y if alpha == 1 else where(x > 0, y, y * alpha)


def celu(x: Numbers, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """Return x where x > 0, else alpha (e^(x / alpha) - 1)."""
    if inplace:
        return _in_place(celu, x, alpha)
    return elu(x) if alpha == 1 else elu(tensor(x) / alpha) * alpha


def selu(x: Numbers, inplace: bool = False) -> Tensor:
    """Return 1.0507 elu(x, 1.6733), which keeps mean 0 and variance 1 (Klambauer et al. 2017, arXiv:1706.02515)."""
    if inplace:
        return _in_place(selu, x)
    x = tensor(x)
    y = apply(ELU, x)
    above, below = y * 1.0507009873554805, y * (1.6732632423543772 * 1.0507009873554805)
    return where(x > 0, above, below) if has_gradient(x) else above.minimum(below)


def mish(x: Numbers, inplace: bool = False) -> Tensor:
    """Return x tanh(log(1 + e^x))."""
    if inplace:
        return _in_place(mish, x)
    x = tensor(x)
    return x * tanh(softplus(x))


def hardtanh(x: Numbers, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
    """Return x, limited to min_val and max_val; the gradient at both is 0."""
    if inplace:
        return _in_place(hardtanh, x, min_val, max_val)
    x = tensor(x)
    limited = x.detach().clip(min_val, max_val)
    return where((x > min_val) & (x < max_val), x, limited) if has_gradient(x) else limited


def relu6(x: Numbers, inplace: bool = False) -> Tensor:
    """Return x, limited to 0 and 6."""
    return hardtanh(x, 0.0, 6.0, inplace)


def hardsigmoid(x: Numbers, inplace: bool = False) -> Tensor:
    """Return x / 6 + 1 / 2, limited to 0 and 1."""
    return _in_place(hardsigmoid, x) if inplace else apply(Hardsigmoid, tensor(x))


def hardswish(x: Numbers, inplace: bool = False) -> Tensor:
    """Return x hardsigmoid(x)."""
    if inplace:
        return _in_place(hardswish, x)
    return apply(Hardswish, tensor(x))


def hardshrink(x: Numbers, lambd: float = 0.5) -> Tensor:
    """Return 0 where |x| <= lambd, else x."""
    x = tensor(x)
    return where(abs(x) <= lambd, 0.0, x)


def softshrink(x: Numbers, lambd: float = 0.5) -> Tensor:
    """Return x moved towards 0 by lambd, and 0 where |x| <= lambd.   ValueError for a negative lambd"""
    if lambd < 0:
        raise ValueError(f'softshrink: lambd: expected at least 0, got {lambd}')
    x = tensor(x)
    return x - x.clip(-lambd, lambd)


def tanhshrink(x: Numbers) -> Tensor:
    """Return x - tanh(x)."""
    x = tensor(x)
    return x - tanh(x)


def softsign(x: Numbers) -> Tensor:
    """Return x / (1 + |x|)."""
    x = tensor(x)
    return x / (abs(x) + 1)


def threshold(x: Numbers, threshold: float, value: float, inplace: bool = False) -> Tensor:
    """Return x where x > threshold, else `value`."""
    if inplace:
        return _in_place(_above, x, threshold, value)
    return _above(tensor(x), threshold, value)


def _above(x: Tensor, threshold: float, value: float) -> Tensor:
    """Do what the function `threshold` does, whose name is its argument's, too."""
    return where(x > threshold, x, value)


def rrelu(x: Numbers, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False,
          generator: np.random.Generator | None = None) -> Tensor:
    """Return x where x > 0, else slope * x, with a slope drawn uniformly from [lower, upper) for each element in training;
    otherwise it is the mean of both (Xu et al. 2015, arXiv:1505.00853).

    generator: a numpy Generator; None: numbers that depend on pyops.seed
    """
    if inplace:
        return _in_place(rrelu, x, lower, upper, training, False, generator)
    x = tensor(x)
    if not training:
        return leaky_relu(x, (lower + upper) / 2)
    slopes = random_generator(generator).uniform(lower, upper, x.shape)
    return where(x > 0, x, x * Tensor(slopes, dtype=x.dtype, device=x.device))


def prelu(x: Numbers, weight: Numbers) -> Tensor:
    """Return x where x > 0, else weight x;  weight (1,), or (C,) for x (N, C, ...)."""
    x, weight = tensor(x), tensor(weight)
    factors = weight if weight.size == 1 else weight.reshape(-1, *[1] * (x.ndim - 2))
    return where(x > 0, x, x * factors)


def glu(x: Numbers, axis: int = -1) -> Tensor:
    """Return a sigmoid(b), for the halves a and b of x along an axis."""
    x = tensor(x)
    if x.shape[axis] % 2:
        raise ValueError(f'glu: expected an even size of axis {axis}, got shape {x.shape}')
    a, b = x.split(x.shape[axis] // 2, axis)
    return a * sigmoid(b)


def logsigmoid(x: Numbers) -> Tensor:
    """Return log(sigmoid(x)), without overflow."""
    return -apply(Softplus, -tensor(x))


def softplus(x: Numbers, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """Return log(1 + e^(beta x)) / beta, and x itself where beta x > threshold."""
    x = tensor(x)
    scaled = x if beta == 1 else x * beta
    y = apply(Softplus, scaled)
    if beta == 1 and threshold >= 20 and y.dtype == np.float32:         # above that y is x to the last bit
        return y
    return where(scaled > threshold, x, y if beta == 1 else y / beta)


def gelu(x: Numbers, approximate: str = 'none') -> Tensor:
    """Return x (1 + erf(x / sqrt(2))) / 2, elementwise; with approximate='tanh' PyTorch's formula with tanh."""
    if approximate not in ('none', 'tanh'):
        raise ValueError(f"gelu: approximate: expected 'none' or 'tanh', got {approximate!r}")
    x = tensor(x)
    if approximate == 'tanh' and is_double(x):
        return x * (tanh((x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)) + 1) * 0.5
    if is_double(x):
        return x * apply(NormalCDF, x)
    return apply(GELU if approximate == 'none' else GELUTanh, x)


def sin(x: Numbers) -> Tensor:
    """Return the sine, elementwise."""
    return tensor(x).sin()


def cos(x: Numbers) -> Tensor:
    """Return the cosine, elementwise."""
    return tensor(x).cos()


def tan(x: Numbers) -> Tensor:
    """Return the tangent, elementwise."""
    return tensor(x).tan()


def log1p(x: Numbers) -> Tensor:
    """Return log(1 + x), elementwise, accurate for small x."""
    return tensor(x).log1p()


def clip(x: Numbers, min: Any = None, max: Any = None) -> Tensor:
    """Return x with elements below `min` replaced by `min`, and those above `max` by `max`.  None: no limit."""
    return tensor(x).clip(min, max)


clamp = clip


def maximum(a: Numbers, b: Numbers) -> Tensor:
    """Return the elementwise maximum.  Equal elements get half of the gradient each."""
    return tensor(a).maximum(b)


def minimum(a: Numbers, b: Numbers) -> Tensor:
    """Return the elementwise minimum.  Equal elements get half of the gradient each."""
    return tensor(a).minimum(b)


# ---- reductions --------------------------------------------------------------------------------------------------------

def sum(x: Numbers, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the sum over axes."""
    return apply(Sum, tensor(x), axis=axis, keepdims=keepdims)


def mean(x: Numbers, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the mean over axes."""
    return apply(Mean, tensor(x), axis=axis, keepdims=keepdims)


def var(x: Numbers, axis: Axis = None, keepdims: bool = False, correction: int = 1) -> Tensor:
    """Return the variance: the sum of squared deviations from the mean, divided by n - correction."""
    return tensor(x).var(axis, correction, keepdims)


def std(x: Numbers, axis: Axis = None, keepdims: bool = False, correction: int = 1) -> Tensor:
    """Return the standard deviation, the square root of `var`."""
    return tensor(x).std(axis, correction, keepdims)


def prod(x: Numbers, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the product over axes."""
    return tensor(x).prod(axis, keepdims)


def norm(x: Numbers, ord: float | str = 2, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the norm of vectors over axes: (sum |x|^ord)^(1 / ord)."""
    return tensor(x).norm(ord, axis, keepdims)


def cumsum(x: Numbers, axis: int | None = None) -> Tensor:
    """Return the sums of the first 1, 2, ... elements along an axis; None: of the flattened tensor."""
    return tensor(x).cumsum(axis)


def argmax(x: Numbers, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return the index of the maximum, int32, the first of equals."""
    return tensor(x).argmax(axis, keepdims)


def argmin(x: Numbers, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return the index of the minimum, int32, the first of equals."""
    return tensor(x).argmin(axis, keepdims)


def sort(x: Numbers, axis: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Return x sorted along an axis, and the indices that sort it, as in PyTorch."""
    x = tensor(x)
    order = x.argsort(axis, descending)
    return x.take_along_axis(order, axis), order


def argsort(x: Numbers, axis: int = -1, descending: bool = False) -> Tensor:
    """Return the int32 indices that sort x along an axis; equal elements keep their order."""
    return tensor(x).argsort(axis, descending)


def topk(x: Numbers, k: int, axis: int = -1, largest: bool = True) -> tuple[Tensor, Tensor]:
    """Return the k largest (or smallest) elements along an axis in order, and their indices."""
    return tensor(x).topk(k, axis, largest)


def gather(x: Numbers, axis: int, index: Numbers) -> Tensor:
    """Return x[..., index[..., j, ...], ...] along an axis, as in PyTorch."""
    return tensor(x).gather(axis, index)


def max(x: Numbers, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the maximum.  Equal maxima share the gradient equally."""
    return tensor(x).max(axis, keepdims)


def min(x: Numbers, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the minimum.  Equal minima share the gradient equally."""
    return tensor(x).min(axis, keepdims)


def logsumexp(x: Numbers, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return log(sum(e^x)) over axes, without overflow."""
    return apply(LogSumExp, tensor(x), axis=axis, keepdims=keepdims)


def softmax(x: Numbers, axis: int = -1) -> Tensor:
    """Return e^x / sum(e^x) along an axis, without overflow."""
    return apply(Softmax, tensor(x), axis=axis)


def softmin(x: Numbers, axis: int = -1) -> Tensor:
    """Return softmax(-x) along an axis."""
    return softmax(-tensor(x), axis)


def log_softmax(x: Numbers, axis: int = -1) -> Tensor:
    """Return log(softmax(x)) along an axis."""
    return apply(LogSoftmax, tensor(x), axis=axis)


logsoftmax = log_softmax        # the needle course's name


def make_tuple(*values: Tensor) -> tuple[Tensor, ...]:
    """Return the Tensors as a tuple, the needle course's function; its elements have gradients as they are."""
    return values


def tuple_get_item(values: Sequence[Tensor], index: int) -> Tensor:
    """Return values[index], as make_tuple."""
    return values[index]


# ---- shapes ------------------------------------------------------------------------------------------------------------

def reshape(x: Numbers, shape: Sequence[int]) -> Tensor:
    """Return x in another shape with the same number of elements; one size may be -1."""
    return apply(Reshape, tensor(x), shape=tuple(shape))


def permute(x: Numbers, axes: Sequence[int]) -> Tensor:
    """Return x with axis axes[d] as axis d."""
    return apply(Permute, tensor(x), axes=tuple(axes))


def transpose(x: Numbers, a: int = -2, b: int = -1, axes: Sequence[int] | None = None) -> Tensor:
    """Exchange two axes, by default the last; axes: both."""
    a, b = (a, b) if axes is None else axes
    return tensor(x).swapaxes(a, b)


def broadcast_to(x: Numbers, shape: Sequence[int]) -> Tensor:
    """Repeat axes of size 1, and add leading axes, to get `shape`."""
    return apply(BroadcastTo, tensor(x), shape=tuple(shape))


def flip(x: Numbers, axis: Axis = None) -> Tensor:
    """Reverse the order along an axis, several, or all (None)."""
    return tensor(x).flip(axis)


def unbind(x: Numbers, axis: int = 0) -> tuple[Tensor, ...]:
    """Return the slices of x along an axis, without that axis, as a tuple: the inverse of stack."""
    return tensor(x).unbind(axis)


cat = concatenate


def repeat_interleave(x: Numbers, repeats: int | Sequence[int], axis: int | None = None) -> Tensor:
    """Repeat each element along an axis; None: of the flattened tensor.  np.repeat."""
    return tensor(x).repeat(repeats, axis)


def tile(x: Numbers, reps: Sequence[int]) -> Tensor:
    """Repeat the whole tensor reps[i] times along axis i."""
    return tensor(x).tile(reps)


def squeeze(x: Numbers, axis: Axis = None) -> Tensor:
    """Remove axes of size 1: these, or all."""
    return tensor(x).squeeze(axis)


def unsqueeze(x: Numbers, axis: int) -> Tensor:
    """Insert an axis of size 1 at position `axis`."""
    return tensor(x).unsqueeze(axis)


def flatten(x: Numbers, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Merge the axes from start_dim to end_dim into one."""
    return tensor(x).flatten(start_dim, end_dim)


def split(x: Numbers, sizes: int | Sequence[int] | None = None, axis: int = 0) -> tuple[Tensor, ...]:
    """Split x along an axis and return a tuple: the inverse of cat.

    sizes: the size of each piece, or one size for all pieces but the last.  ValueError if they do not add up.
    None: the slices without this axis, as unbind; split(x, axis=1) of the needle course.
    """
    return unbind(x, axis) if sizes is None else tensor(x).split(sizes, axis)


_PAD_MODES = {'constant': 'constant', 'reflect': 'reflect', 'replicate': 'edge', 'circular': 'wrap'}       # -> np.pad's


def pad(x: Numbers, widths: Sequence[int] | Sequence[tuple[int, int]], mode: str = 'constant',
        value: float | None = None) -> Tensor:
    """Pad x at both ends of its axes with `value`, 0 if None.

    widths: (before, after) of the last axis, then of the one before it, ..., flat as in PyTorch: (1, 2, 3, 4); or as in numpy
    one pair per axis: ((3, 4), (1, 2)).  Negative ones remove elements
    mode: 'constant'; or with elements of x: 'replicate' repeats the outermost, 'reflect' mirrors x at it, 'circular' continues
    with the other end of x
    """
    if mode not in _PAD_MODES:
        raise ValueError(f'pad: mode: expected one of {", ".join(_PAD_MODES)}, got {mode!r}; pass value by name')
    if mode != 'constant' and value is not None:
        raise ValueError(f"pad: value: expected None with mode {mode!r}, got {value}")
    x = tensor(x)
    given: Any = tuple(widths)
    if all(isinstance(n, int) for n in given):
        if len(given) % 2 or len(given) > 2 * x.ndim:
            raise ValueError(f'pad: expected two widths for each of at most {x.ndim} axes, got {given}')
        pairs = [(0, 0)] * (x.ndim - len(given) // 2) + list(zip(given[::2], given[1::2], strict=True))[::-1]
    else:
        pairs = [tuple(pair) for pair in given]
    if len(pairs) != x.ndim or any(n + builtins.min(a, 0) + builtins.min(b, 0) < 0
                                   for n, (a, b) in zip(x.shape, pairs, strict=False)):
        raise ValueError(f'pad: expected a pair of widths for each axis of {x.shape} that removes at most its elements, '
                         f'got {given}')
    if any(n < 0 for pair in pairs for n in pair):
        x = x[tuple(slice(builtins.max(-a, 0), n + builtins.min(b, 0)) for n, (a, b) in zip(x.shape, pairs, strict=True))]
        pairs = [(builtins.max(a, 0), builtins.max(b, 0)) for a, b in pairs]
    if mode == 'constant':
        return apply(Pad, x, widths=tuple(pairs), value=0.0 if value is None else value)
    for axis, (before, after) in enumerate(pairs):
        n, wide = x.shape[axis], builtins.max(before, after)
        most = {'reflect': n - 1, 'circular': n, 'replicate': wide if n else 0}[mode]
        if wide > most:
            raise ValueError(f'pad: expected widths of at most {most} for axis {axis} of {x.shape} with {mode!r}, got {wide}')
        if wide:
            x = x.take(np.pad(np.arange(n), (before, after), _PAD_MODES[mode]), axis)       # type: ignore[call-overload]
    return x


def dilate(x: Numbers, axis: Axis, dilation: int) -> Tensor:
    """Insert `dilation` zeros after each element along the axes: size n becomes n (1 + dilation)."""
    x = tensor(x)
    axes = normal_axes(axis, x.ndim)
    shape = tuple(n * (1 + dilation) if i in axes else n for i, n in enumerate(x.shape))
    return apply(Place, x, shape=shape, index=_every(axes, x.ndim, 1 + dilation))


def undilate(x: Numbers, axis: Axis, dilation: int) -> Tensor:
    """Remove the zeros that dilate inserted."""
    x = tensor(x)
    return apply(GetItem, x, index=_every(normal_axes(axis, x.ndim), x.ndim, 1 + dilation))


def _every(axes: Shape, ndim: int, step: int) -> tuple[slice, ...]:
    return tuple(slice(None, None, step if i in axes else None) for i in range(ndim))


def one_hot(labels: Numbers, num_classes: int = -1) -> Tensor:
    """Return float32 (..., num_classes): 1 at the label, 0 elsewhere.  ValueError for a label outside 0 .. num_classes - 1.

    num_classes: -1: one more than the largest label.  one_hot(n, labels), the order of the needle course, is the same.
    """
    if isinstance(labels, int) and not isinstance(num_classes, int):
        labels, num_classes = num_classes, labels
    labels = tensor(labels)
    if num_classes == -1:
        if not labels.size:
            raise ValueError('one_hot: num_classes: expected a number for no labels, got -1')
        num_classes = int(labels.numpy().max()) + 1
    classes = Tensor(np.arange(num_classes, dtype=np.int32), device=labels.device)
    top = labels.numpy().max(initial=-1), labels.numpy().min(initial=num_classes)
    if top[0] >= num_classes or top[1] < 0:
        raise ValueError(f'one_hot: expected labels from 0 to {num_classes - 1}, got some from {top[1]} to {top[0]}')
    return (labels.unsqueeze(-1) == classes) * 1.0


# ---- layers ------------------------------------------------------------------------------------------------------------

def bilinear(x1: Numbers, x2: Numbers, weight: Numbers, bias: Numbers | None = None) -> Tensor:
    """Return y[..., o] = x1 weight[o] x2' + bias[o];  x1 (..., I), x2 (..., J), weight (O, I, J) -> (..., O)."""
    y = einsum('...i,oij,...j->...o', tensor(x1), tensor(weight), tensor(x2))
    return y if bias is None else y + bias


def matmul(a: Numbers, b: Numbers) -> Tensor:
    """Return the matrix product a @ b; leading axes broadcast."""
    return apply(MatMul, tensor(a), tensor(b))


def linear(x: Numbers, weight: Numbers, bias: Numbers | None = None) -> Tensor:
    """Return x weight' + bias;  x (..., I), weight (O, I), bias (O,) or None -> (..., O)."""
    if is_double(tensor(x)):
        y = tensor(x) @ tensor(weight).T
        return y if bias is None else y + bias
    parameters = {} if bias is None else {'bias': tensor(bias)}
    return apply(Linear, tensor(x), weight=tensor(weight), **parameters)


def feed_forward(x: Numbers, w1: Numbers, b1: Numbers, w2: Numbers, b2: Numbers, activation: str = 'relu') -> Tensor:
    """Return linear(activation(linear(x, w1, b1)), w2, b2), one op;  x (..., D), w1 (F, D), b1 (F,), w2 (D, F), b2 (D,).

    activation: relu, silu or gelu
    """
    if is_double(tensor(x)) and activation in ('relu', 'silu', 'gelu'):
        function: Any = {'relu': relu, 'silu': silu, 'gelu': gelu}[activation]
        return linear(function(linear(x, w1, b1)), w2, b2)
    return apply(FeedForward, tensor(x), w1=tensor(w1), b1=tensor(b1), w2=tensor(w2), b2=tensor(b2), activation=activation)


def embedding(ids: Numbers, weight: Numbers, padding_idx: int | None = None, max_norm: float | None = None,
              norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False) -> Tensor:
    """Return weight[ids];  ids (...) of any integer type, weight (V, E) -> (..., E).

    padding_idx: positions with this id add nothing to the gradient of weight.
    max_norm: first scale rows of weight that are read, in place, so that their norms of order norm_type are at most this.
    scale_grad_by_freq: divide the gradient of a row by the number of its ids.  sparse: accepted as in PyTorch, without effect.
    """
    weight = tensor(weight)
    ids = tensor(ids, weight)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += len(weight)
    if max_norm is not None:
        _limit_rows(weight, ids, max_norm, norm_type)
    if scale_grad_by_freq:
        _, places, counts = np.unique(ids.numpy(), return_inverse=True, return_counts=True)
        rows = embedding(ids, weight, padding_idx)
        share = Tensor(1 / counts[places].reshape(*ids.shape, 1), dtype=rows.dtype, device=rows.device)
        return rows.detach() + (rows - rows.detach()) * share           # the value of rows; a share of its gradient
    if not is_double(weight):
        return apply(Embedding, ids, weight=weight, padding_idx=padding_idx)
    if padding_idx is None:
        return weight[ids]
    return where((ids != padding_idx).unsqueeze(-1), weight[ids], weight.detach()[ids])


def _limit_rows(weight: Tensor, ids: Tensor, max_norm: float, norm_type: float) -> None:
    """Scale the rows weight[ids] whose norm is above max_norm down to it, in place."""
    if is_interpreted() or backend.is_recorded():
        raise TypeError('embedding: max_norm: expected None in a plan and in gradcheck, since it changes weight')
    rows = np.unique(ids.numpy())
    found = weight.detach().array[rows]
    norms = found.norm(norm_type, 1, True)
    weight.array[rows] = ndarray.where(norms > max_norm, found * (max_norm / (norms + 1e-7)), found)


def embedding_bag(ids: Numbers, weight: Numbers, offsets: Numbers | None = None, mode: str = 'mean') -> Tensor:
    """Return the mean, sum or maximum of the rows weight[ids] of each bag (B, E), 0 for an empty one.

    ids (B, n): bags of equal size; or ids (N,) and offsets (B,): where each bag begins.  mode: 'mean', 'sum', 'max', which
    needs bags of equal size
    """
    if mode not in ('mean', 'sum', 'max'):
        raise ValueError(f"embedding_bag: mode: expected 'mean', 'sum' or 'max', got {mode!r}")
    ids = tensor(ids)
    if (ids.ndim, offsets is None) not in ((2, True), (1, False)) or mode == 'max' and offsets is not None:
        raise ValueError(f"embedding_bag: expected ids (B, n), or ids (N,) and offsets without mode 'max', got {ids.shape} and "
                         f'{"no offsets" if offsets is None else "offsets"}')
    rows = embedding(ids, weight)
    if offsets is None:
        return getattr(rows, mode)(1)
    starts = np.asarray(tensor(offsets).numpy())
    counts = np.diff(np.append(starts, len(ids)))
    shares = (np.arange(len(starts))[:, None] == np.repeat(np.arange(len(starts)), counts)).astype(np.float64)
    if mode == 'mean':
        shares /= np.maximum(counts, 1)[:, None]
    return Tensor(shares, dtype=rows.dtype, device=rows.device) @ rows


_masks = itertools.count()


def _mask_number(step: Any) -> Array:
    """Return the number of a dropout mask as an array of its own: backward must read the same number."""
    return backend.put(np.array([next(_masks) if step is None else int(np.asarray(step).reshape(()))], np.int64))


def dropout(x: Numbers, p: float = 0.5, training: bool = True, inplace: bool = False, *, key: int = 0,
            step: Any = None) -> Tensor:
    """Set each element to 0 with probability p and scale the rest by 1 / (1 - p).  Return x unchanged if not training.

    The mask is a function of (key, step).  step=None: the next number of a counter in this process.
    """
    if inplace:
        return _in_place(functools.partial(dropout, key=key, step=step), x, p, training)
    x = tensor(x)
    if training and p == 1:
        return x * 0.0
    if not (training and p):
        return x
    if is_double(x):
        kept = apply(Dropout, Tensor(np.ones(x.shape, np.float32), device=x.device), _mask_number(step), p=p, key=key) != 0
        return x * kept.astype(x.dtype) / (1 - p)
    return apply(Dropout, x, _mask_number(step), p=p, key=key)


def dropout1d(x: Numbers, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Set whole channels of x (N, C, ...) to 0 with probability p and scale the rest, as dropout."""
    if inplace:
        return _in_place(dropout1d, x, p, training)
    x = tensor(x)
    return x * dropout(Tensor(np.ones(x.shape[:2]), dtype=x.dtype, device=x.device), p, training).reshape(
        *x.shape[:2], *[1] * (x.ndim - 2))


dropout2d = dropout3d = dropout1d


def feature_alpha_dropout(x: Numbers, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    """alpha_dropout of whole channels of x (N, C, ...)."""
    if inplace:
        return _in_place(feature_alpha_dropout, x, p, training)
    x = tensor(x)
    if not training or not p:
        return x
    kept = dropout1d(Tensor(np.ones(x.shape), dtype=x.dtype, device=x.device), p) != 0
    return keeping_moments(x, kept, p)


def residual(x: Numbers, branch: Numbers, p: float = 0.0, training: bool = True, key: int = 0, step: Any = None) -> Tensor:
    """Return x + dropout(branch), computed in one pass."""
    x = tensor(x)
    if is_double(x):
        return x + dropout(branch, p, training, key=key, step=step)
    step = _mask_number(step) if training and p else None
    return apply(Residual, x, tensor(branch), step, p=p, key=key)


def _filled(size: int, value: float, like: Tensor) -> Tensor:
    """Return a constant (size,) of equal numbers on the device of `like`, which nothing changes."""
    if like.device.is_host and size <= 4096 and not backend.is_recorded():
        return _filled_on_host(size, value)
    return tensor(np.full(size, value, np.float32), like)


@functools.lru_cache(32)
def _filled_on_host(size: int, value: float) -> Tensor:
    return Tensor(np.full(size, value, np.float32), device=backend.HOST)


def layer_norm(x: Numbers, normalized_shape: int | Sequence[int], weight: Numbers | None = None, bias: Numbers | None = None,
               eps: float = 1e-5) -> Tensor:
    """Normalise the last axes, of sizes normalized_shape, together to mean 0 and variance 1, scale by weight, add bias.

    x (..., *normalized_shape), weight and bias: normalized_shape, or None
    """
    if isinstance(normalized_shape, Tensor | np.ndarray):
        raise TypeError(f'layer_norm: normalized_shape: expected the sizes of the last axes, got '
                        f'{type(normalized_shape).__name__}; weight and bias come after it')
    x, shape = tensor(x), (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not shape or x.shape[-len(shape):] != shape:
        raise ValueError(f'x: expected shape (..., {", ".join(map(str, shape))}), got {x.shape}')
    for name, given in (('weight', weight), ('bias', bias)):
        if given is not None and tensor(given).shape != shape:
            raise ValueError(f'{name}: expected shape {shape}, got {tensor(given).shape}')
    if is_double(x):
        axes = tuple(range(-len(shape), 0))
        centred = x - mean(x, axes, True)
        y = centred / sqrt(mean(centred * centred, axes, True) + eps)
        y = y if weight is None else y * weight
        return y if bias is None else y + bias
    size = math.prod(shape)
    weight, bias = (_filled(size, default, x) if given is None else tensor(given).reshape(size)
                    if len(shape) > 1 else tensor(given) for given, default in ((weight, 1.0), (bias, 0.0)))
    rows = x.reshape(*x.shape[:-len(shape)], size) if len(shape) > 1 else x
    y = apply(LayerNorm, rows, weight=weight, bias=bias, eps=eps)
    return y.reshape(x.shape) if len(shape) > 1 else y


def rms_norm(x: Numbers, normalized_shape: int | Sequence[int], weight: Numbers | None = None,
             eps: float | None = None) -> Tensor:
    """Divide x by the root mean square of its last axes, of sizes normalized_shape, and scale by weight.

    eps: added to the mean square; None: the distance from 1 to the next number of x's dtype
    """
    x, shape = tensor(x), (normalized_shape,) if hasattr(normalized_shape, '__index__') else tuple(normalized_shape)
    if not shape or x.shape[-len(shape):] != shape:
        raise ValueError(f'x: expected shape (..., {", ".join(map(str, shape))}), got {x.shape}')
    square = mean(x * x, tuple(range(-len(shape), 0)), True)
    y = x / sqrt(square + float(np.finfo(x.dtype).eps if eps is None else eps))
    return y if weight is None else y * weight


def batch_norm(x: Numbers, running_mean: Numbers | None, running_var: Numbers | None, weight: Numbers | None = None,
               bias: Numbers | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5) -> Tensor:
    """Normalise each channel to mean 0 and variance 1, scale by weight, add bias;  x (N, C, ...), all others (C,).

    training: use the mean and variance of the batch, and move the running ones, arrays or contiguous Tensors, towards them
    in place by `momentum` (the variance with n - 1 in its denominator, as in PyTorch).  Otherwise use the running ones.
    """
    x = tensor(x)
    if not training and (running_mean is None or running_var is None):
        raise ValueError('batch_norm: running_mean and running_var: expected arrays in evaluation, got None')
    C = x.shape[1] if x.ndim > 1 else 0
    if is_double(x):
        return _batch_norm_in_double(x, running_mean, running_var, weight, bias, training, momentum, eps)
    weight, bias = (tensor(np.full(C, default, np.float32) if given is None else given, x)
                    for given, default in ((weight, 1), (bias, 0)))
    given = running_mean, running_var
    running = [None if value is None else tensor(value, x) for value in given]
    for name, value, statistic in zip(('running_mean', 'running_var'), given, running, strict=True):
        if training and not isinstance(value, np.ndarray | None) and not statistic.array.is_compact():      # type: ignore
            raise ValueError(f'{name}: expected a contiguous array, which batch_norm updates; pass a copy')
    y = apply(BatchNorm, x, *running, weight=weight, bias=bias, training=training, eps=eps, momentum=momentum)
    for value, statistic in zip(given, running, strict=True):
        if training and statistic is not None and not is_interpreted():
            statistic.array.buffer.version += 1
            if isinstance(value, np.ndarray):
                value[...] = statistic.numpy()
    return y


def _batch_norm_in_double(x: Tensor, running_mean: Any, running_var: Any, weight: Numbers | None, bias: Numbers | None,
                          training: bool, momentum: float, eps: float) -> Tensor:
    """Return batch_norm of float64 x, from array ops."""
    per_channel, axes = (1, -1, *[1] * (x.ndim - 2)), (0, *range(2, x.ndim))
    if training:
        n = x.size // x.shape[1]
        if n < 2:
            raise ValueError(f'batch_norm: expected more than one value per channel in training, got shape {x.shape}')
        centre = mean(x, axes, True)
        spread = mean((x - centre) * (x - centre), axes, True)
        for running, found in ((running_mean, centre), (running_var, spread * (n / (n - 1)))):
            if running is not None:
                old = np.asarray(running.numpy() if hasattr(running, 'numpy') else running)
                running[...] = old + momentum * (found.numpy().reshape(-1) - old)
    else:
        centre, spread = (tensor(running, x).reshape(per_channel) for running in (running_mean, running_var))
    y = (x - centre) / sqrt(spread + eps)
    y = y if weight is None else y * tensor(weight).reshape(per_channel)
    return y if bias is None else y + tensor(bias).reshape(per_channel)


def group_norm(x: Numbers, num_groups: int, weight: Numbers | None = None, bias: Numbers | None = None,
               eps: float = 1e-5) -> Tensor:
    """Normalise each group of channels of each sample to mean 0 and variance 1, scale by weight, add bias.

    x (N, C, ...), weight and bias (C,) or None;  num_groups divides C.  ValueError for a group of fewer than 2 values.
    """
    x = tensor(x)
    N, C = x.shape[:2]
    if num_groups < 1 or C % num_groups:
        raise ValueError(f'group_norm: num_groups: expected a divisor of {C} channels, got {num_groups}')
    size = math.prod(x.shape[1:]) // num_groups
    if size < 2:
        raise ValueError(f'group_norm: expected at least 2 values per group, got {size} for x of shape {x.shape}')
    # a group of a sample is a channel of one sample of a batch norm
    y = batch_norm(x.reshape(1, N * num_groups, size), None, None, training=True, eps=eps).reshape(x.shape) if N else x
    per_channel = (C, *[1] * (x.ndim - 2))
    y = y if weight is None else y * tensor(weight).reshape(per_channel)
    return y if bias is None else y + tensor(bias).reshape(per_channel)


def instance_norm(x: Numbers, running_mean: None = None, running_var: None = None, weight: Numbers | None = None,
                  bias: Numbers | None = None, use_input_stats: bool = True, momentum: float = 0.1,
                  eps: float = 1e-5) -> Tensor:
    """Normalise each channel of each sample to mean 0 and variance 1, scale by weight, add bias;  x (N, C, ...).

    ValueError for running statistics, which are not supported.  momentum: without effect.
    """
    if running_mean is not None or running_var is not None or not use_input_stats:
        raise ValueError('instance_norm: running_mean, running_var: expected None and use_input_stats=True: there are no '
                         'running statistics')
    x = tensor(x)
    return group_norm(x, x.shape[1], weight, bias, eps)


def gru(x: Numbers, h0: Numbers | None, w_ih: Numbers, w_hh: Numbers, b_ih: Numbers, b_hh: Numbers, reset_before: bool = False,
        lengths: Numbers | None = None) -> Tensor:
    """Return h (T, B, H) of a GRU; without lengths, h[-1] is the final state.  See pyops.ops.GRU.

    x (T, B, I), h0 (B, H) or None for zeros, w_ih (3H, I), w_hh (3H, H), b_ih and b_hh (3H,); lengths (B,) int32: number of
    steps of each sequence, after which h is 0; None: T.
    """
    parameters = dict(w_ih=tensor(w_ih), w_hh=tensor(w_hh), b_ih=tensor(b_ih), b_hh=tensor(b_hh))
    x = tensor(x)
    if is_double(x):
        return recurrence.gru(x, None if h0 is None else tensor(h0, x), **parameters, reset_before=reset_before,
                              lengths=None if lengths is None else tensor(lengths, x))
    return apply(GRU, x, None if h0 is None else tensor(h0, x), None if lengths is None else tensor(lengths, x),
                 **parameters, reset_before=reset_before)


def lstm(x: Numbers, h0: Numbers | None, c0: Numbers | None, w_ih: Numbers, w_hh: Numbers, b_ih: Numbers | None = None,
         b_hh: Numbers | None = None, lengths: Numbers | None = None) -> tuple[Tensor, Tensor]:
    """Return h and c (T, B, H) of an LSTM for all steps; without lengths, h[-1] and c[-1] are the final states.

    x (T, B, I), h0 and c0 (B, H) or None for zeros, w_ih (4H, I), w_hh (4H, H), b_ih and b_hh (4H,) or None; lengths as in gru.
    See pyops.ops.LSTM.
    """
    x = tensor(x)
    h0, c0, lengths = (None if state is None else tensor(state, x) for state in (h0, c0, lengths))
    parameters = _recurrent_parameters(w_ih, w_hh, b_ih, b_hh)
    if is_double(x):
        return recurrence.lstm(x, h0, c0, **parameters, lengths=lengths)            # type: ignore[arg-type]
    y = apply(LSTM, x, h0, c0, lengths, **parameters)
    return y[0], y[1]


def rnn(x: Numbers, h0: Numbers | None, w_ih: Numbers, w_hh: Numbers, b_ih: Numbers | None = None, b_hh: Numbers | None = None,
        nonlinearity: str = 'tanh', lengths: Numbers | None = None) -> Tensor:
    """Return h (T, B, H) of a simple recurrent network; without lengths, h[-1] is the final state.  See pyops.ops.RNN.

    x (T, B, I), h0 (B, H) or None for zeros, w_ih (H, I), w_hh (H, H), b_ih and b_hh (H,) or None; nonlinearity 'tanh' or
    'relu'; lengths as in gru
    """
    x = tensor(x)
    h0, lengths = (None if state is None else tensor(state, x) for state in (h0, lengths))
    parameters = _recurrent_parameters(w_ih, w_hh, b_ih, b_hh)
    if is_double(x):
        return recurrence.rnn(x, h0, **parameters, nonlinearity=nonlinearity, lengths=lengths)      # type: ignore[arg-type]
    return apply(RNN, x, h0, lengths, **parameters, nonlinearity=nonlinearity)


def _recurrent_parameters(w_ih: Numbers, w_hh: Numbers, b_ih: Numbers | None, b_hh: Numbers | None) -> dict[str, Tensor | None]:
    biases = dict(b_ih=None if b_ih is None else tensor(b_ih), b_hh=None if b_hh is None else tensor(b_hh))
    return dict(w_ih=tensor(w_ih), w_hh=tensor(w_hh), **biases)


def attention(q: Numbers, k: Numbers, v: Numbers, heads: int, causal: bool = False, lengths: Numbers | None = None,
              p: float = 0.0, training: bool = True, key: int = 0, step: Any = None) -> Tensor:
    """Multi-head attention in tiles, without storing the matrix of scores.  See pyops.ops.Attention.

    q (Tq, B, D), k and v (Tk, B, D) -> (Tq, B, D); lengths (B,) int32: number of valid keys, or None for all; causal: query i
    attends to keys 0 to i + Tk - Tq; p, key and step as in dropout
    """
    step = _mask_number(step) if training and p else None
    q = tensor(q)
    return apply(Attention, q, tensor(k, q), tensor(v, q), None if lengths is None else tensor(lengths, q), step,
                 heads=heads, causal=causal, p=p if training else 0.0, key=key)


def concat_context(x: Numbers, context: Numbers) -> Tensor:
    """Append the context (B, H) to x (T, B, E) at every step -> (T, B, E + H)."""
    return apply(ConcatContext, tensor(x), tensor(context))


def scaled_dot_product_attention(query: Numbers, key: Numbers, value: Numbers, attn_mask: Numbers | None = None,
                                 dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
                                 enable_gqa: bool = False) -> Tensor:
    """Return dropout(softmax(query key' scale + mask)) value;  query (..., L, E), key (..., S, E), value (..., S, V).

    attn_mask (..., L, S): bool, int or a comparison of Tensors, 0 where a query may not attend to a key; or float32, added to
    the scores.  dropout_p: probability of dropping a weight, also in evaluation, as in PyTorch.  is_causal: query i attends
    to keys 0 to i.  scale: None: 1 / sqrt(E).  enable_gqa: a head of key and value serves several heads, axis -3, of query.
    The result is (..., L, V); 0 for a query that may attend to no key.
    """
    if isinstance(dropout_p, bool) or not 0 <= dropout_p <= 1:
        raise ValueError(f'scaled_dot_product_attention: dropout_p: expected a number from 0 to 1, got {dropout_p}; pass '
                         'is_causal by name')
    q, k, v = tensor(query), tensor(key), tensor(value)
    if enable_gqa:
        heads = {x.shape[-3] if x.ndim > 2 else 0 for x in (k, v)}
        if q.ndim < 3 or len(heads) > 1 or 0 in heads or q.shape[-3] % k.shape[-3]:
            raise ValueError('scaled_dot_product_attention: enable_gqa: expected heads in axis -3, those of query a multiple '
                             f'of those of key and value, got {q.shape}, {k.shape} and {v.shape}')
        k, v = (x.repeat(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        allowed = np.tril(np.ones((q.shape[-2], k.shape[-2]), bool))
        scores = scores + Tensor(np.where(allowed, 0.0, -np.inf), device=q.device)
    if attn_mask is None:
        return dropout(softmax(scores), dropout_p) @ v
    mask = tensor(attn_mask, q)
    if mask.dtype.kind != 'f':
        mask = Tensor(np.where(mask.numpy(), 0.0, -np.inf), device=q.device)
    scores = scores + mask
    if is_interpreted():
        return dropout(softmax(scores), dropout_p) @ v
    masked = scores.detach().max(-1, keepdims=True) == -np.inf          # without a key, softmax would be NaN
    weights = where(masked, 0.0, softmax(where(masked, 0.0, scores)))
    return dropout(weights, dropout_p) @ v


def conv2d(x: Numbers, weight: Numbers, bias: Numbers | None = None, stride: int | Sequence[int] = 1,
           padding: int | str | Sequence[int] = 0, dilation: int | Sequence[int] = 1, groups: int = 1) -> Tensor:
    """Convolve images with filters: x (N, C, H, W), weight (O, C / groups, kh, kw), bias (O,) or None -> (N, O, Ho, Wo).

    Here and in the functions below x may also be one image without the axis N; then the result is one, too.

    stride, padding, dilation: an int or a pair; padding also 'same', which keeps H and W, or 'valid', which is 0.
    groups: each group of O / groups filters sees its own C / groups channels.
    """
    x, weight = tensor(x), tensor(weight)
    settings: dict[str, Any] = dict(stride=stride, padding=padding, dilation=dilation, groups=groups)
    if is_double(x):
        filters = weight.astype(x.dtype)
        y = _each_image(x, lambda x: apply(Convolve, x, filters, sizes=sizes_of(x.array, filters.array, **settings)))
        return y if bias is None else y + tensor(bias).reshape(-1, 1, 1)
    parameters = {} if bias is None else {'bias': tensor(bias)}
    return _each_image(x, lambda x: apply(Conv2d, x, weight=weight, **parameters, **settings))


def conv(x: Numbers, weight: Numbers, stride: int | Sequence[int] = 1, padding: int | str | Sequence[int] = 0) -> Tensor:
    """Convolve images x (N, H, W, C) with filters (kh, kw, C, O) -> (N, Ho, Wo, O): the needle course's order of axes."""
    y = conv2d(tensor(x).permute(0, 3, 1, 2), tensor(weight).permute(3, 2, 0, 1), None, stride, padding)
    return y.permute(0, 2, 3, 1)


def _each_image(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function of images (N, C, ...), with 4 axes, to those or to one image."""
    return function(x.unsqueeze(0)).squeeze(0) if x.ndim == 3 else function(x)


def conv_transpose2d(x: Numbers, weight: Numbers, bias: Numbers | None = None, stride: int | Sequence[int] = 1,
                     padding: int | Sequence[int] = 0, output_padding: int | Sequence[int] = 0, groups: int = 1,
                     dilation: int | Sequence[int] = 1) -> Tensor:
    """Return the transpose of conv2d, its gradient with respect to the images: x (N, C, H, W), weight (C, O / groups, kh, kw),
    bias (O,) or None -> (N, O, Ho, Wo).

    Ho = (H - 1) stride - 2 padding + dilation (kh - 1) + output_padding + 1; output_padding is below the stride.
    """
    x, weight = tensor(x), tensor(weight)
    settings: dict[str, Any] = dict(stride=stride, padding=padding, dilation=dilation, groups=groups)

    def transposed(x: Tensor) -> Tensor:
        sizes = transposed_sizes(x.shape, weight.shape, output_padding, **settings)
        if is_double(x):
            return apply(ConvolveTransposed, x, weight.astype(x.dtype), sizes=sizes)
        return apply(Conv2dTransposed, x, weight=weight, size=sizes.x[2:], **settings)
    y = _each_image(x, transposed)
    return y if bias is None else y + tensor(bias).reshape(-1, 1, 1)


def conv_transpose1d(x: Numbers, weight: Numbers, bias: Numbers | None = None, stride: int | Sequence[int] = 1,
                     padding: int | Sequence[int] = 0, output_padding: int | Sequence[int] = 0, groups: int = 1,
                     dilation: int | Sequence[int] = 1) -> Tensor:
    """Return the transpose of conv1d: x (N, C, L), weight (C, O / groups, k) -> (N, O, Lo).  Settings as conv_transpose2d's."""
    x = _with_height('conv_transpose1d', x)
    return conv_transpose2d(x, tensor(weight).unsqueeze(2), bias, (1, one(stride)), (0, one(padding)), (0, one(output_padding)),
                            groups, (1, one(dilation))).squeeze(-2)


def unfold(x: Numbers, kernel_size: int | Sequence[int], dilation: int | Sequence[int] = 1,
           padding: int | Sequence[int] = 0, stride: int | Sequence[int] = 1) -> Tensor:
    """Return the windows of images as columns: x (N, C, H, W) -> (N, C kh kw, Ho Wo)."""
    x, window = tensor(x), pair('kernel_size', kernel_size, 1)
    C = x.shape[-3]
    y = conv2d(x, _taps(C, window, x), None, stride, padding, dilation, C)
    return y.reshape(*y.shape[:-2], -1)


def fold(x: Numbers, output_size: int | Sequence[int], kernel_size: int | Sequence[int], dilation: int | Sequence[int] = 1,
         padding: int | Sequence[int] = 0, stride: int | Sequence[int] = 1) -> Tensor:
    """Add columns (N, C kh kw, Ho Wo) where unfold found them -> (N, C, H, W), with (H, W) = output_size."""
    x, window, size = tensor(x), pair('kernel_size', kernel_size, 1), pair('output_size', output_size, 1)
    C, settings = x.shape[-2] // math.prod(window), dict(stride=stride, padding=padding, dilation=dilation, groups=1)
    taps = _taps(C, window, x)
    places = sizes_of(np.empty((1, 1, *size)), taps.array[:1], **settings)                      # type: ignore[arg-type]
    least = transposed_sizes((1, 1, places.Ho, places.Wo), (1, 1, *window), 0, **settings)      # type: ignore[arg-type]
    more = size[0] - least.H, size[1] - least.W
    return conv_transpose2d(x.reshape(*x.shape[:-1], places.Ho, places.Wo), taps, None, stride, padding, more, C, dilation)


def _taps(channels: int, window: tuple[int, int], like: Tensor) -> Tensor:
    """Return filters (channels kh kw, 1, kh, kw): for each channel and element of the window one that picks the element."""
    picks = np.eye(math.prod(window)).reshape(-1, 1, *window)
    return Tensor(np.tile(picks, (channels, 1, 1, 1)), dtype=like.dtype, device=like.device)


def conv1d(x: Numbers, weight: Numbers, bias: Numbers | None = None, stride: int | Sequence[int] = 1,
           padding: int | str | Sequence[int] = 0, dilation: int | Sequence[int] = 1, groups: int = 1) -> Tensor:
    """Convolve sequences with filters: x (N, C, L), weight (O, C / groups, k), bias (O,) or None -> (N, O, Lo).

    The settings are the same as conv2d's, which computes it with images of height 1.
    """
    x, weight = tensor(x), tensor(weight)
    if x.ndim not in (2, 3) or weight.ndim != 3:
        raise ValueError(f'conv1d: expected x (N, C, L) and weight (O, C / groups, k), got {x.shape} and {weight.shape}')
    padding = padding if isinstance(padding, str) else (0, one(padding))            # type: ignore[assignment]
    return conv2d(x.unsqueeze(-2), weight.unsqueeze(2), bias, (1, one(stride)), padding, (1, one(dilation)), groups).squeeze(-2)


def max_pool2d(x: Numbers, kernel_size: int | Sequence[int], stride: int | Sequence[int] | None = None,
               padding: int | Sequence[int] = 0, dilation: int | Sequence[int] = 1, ceil_mode: bool = False,
               return_indices: bool = False) -> Any:
    """Return the maximum of each window: x (N, C, H, W) -> (N, C, Ho, Wo).

    kernel_size, stride, padding, dilation: an int or a pair; stride None: kernel_size.  ceil_mode: round Ho and Wo up, so that
    a last window may reach beyond the padding.  The gradient goes to the first of equal maxima.
    return_indices: return also their int32 positions in each flattened image, which max_unpool2d takes.
    """
    x = tensor(x)
    settings: dict[str, Any] = dict(kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation,
                                    ceil_mode=ceil_mode)
    y = _pooled(x, MaxPool2d, PoolMaxima, settings)
    if not return_indices:
        return y
    if backend.is_recorded():
        raise TypeError('max_pool2d: return_indices: a plan cannot record the positions, which Python computes')
    stride = kernel_size if stride is None else stride
    window = [pair(name, value, 0) for name, value in (('kernel_size', kernel_size), ('stride', stride), ('padding', padding),
                                                       ('dilation', dilation))]
    return y, Tensor(_places_of_maxima(x.numpy(), y.shape[-2:], *window), device=x.device)


def _places_of_maxima(x: np.ndarray, sizes: Shape, kernel: Shape, stride: Shape, padding: Shape, dilation: Shape) -> np.ndarray:
    """Return the positions in flattened images (..., H, W) of the first maxima of windows, (..., *sizes) int32."""
    H, W = x.shape[-2:]
    rows, columns = (np.arange(n).reshape(-1, 1) * s - p + np.arange(k) * d
                     for n, k, s, p, d in zip(sizes, kernel, stride, padding, dilation, strict=True))
    inside = ((rows >= 0) & (rows < H))[:, None, :, None] & ((columns >= 0) & (columns < W))[None, :, None, :]
    places = (rows.clip(0, H - 1) * W)[:, None, :, None] + columns.clip(0, W - 1)[None, :, None, :]
    places, inside = (one.reshape(*sizes, -1) for one in (places, inside))
    found = np.where(inside, x.reshape(*x.shape[:-2], H * W)[..., places], -np.inf).argmax(-1)
    return np.take_along_axis(np.broadcast_to(places, (*found.shape, places.shape[-1])), found[..., None],
                              -1)[..., 0].astype(np.int32)


def max_unpool2d(x: Numbers, indices: Numbers, kernel_size: int | Sequence[int], stride: int | Sequence[int] | None = None,
                 padding: int | Sequence[int] = 0, output_size: Sequence[int] | None = None) -> Tensor:
    """Write maxima x (..., Ho, Wo) to their positions `indices` in images of zeros: the inverse of max_pool2d.

    output_size: (H, W), also with the axes before; None: the smallest images with these windows
    """
    x = tensor(x)
    kernel, steps, padded = (pair('max_unpool2d', value, 0) for value in (
        kernel_size, kernel_size if stride is None else stride, padding))
    sizes = tuple((n - 1) * s - 2 * p + k for n, k, s, p in zip(x.shape[-2:], kernel, steps, padded, strict=True))
    sizes = sizes if output_size is None else tuple(output_size)[-2:]
    places, area = tensor(indices).reshape(*x.shape[:-2], -1), math.prod(sizes)
    if places.size and not 0 <= places.numpy().min() <= places.numpy().max() < area:
        raise ValueError(f'max_unpool2d: indices: expected positions below {area} in images of {sizes}, got some up to '
                         f'{places.numpy().max()}; pass output_size')
    flat = x.new_zeros(*x.shape[:-2], area).scatter(-1, places, x.reshape(*x.shape[:-2], -1))
    return flat.reshape(*x.shape[:-2], *sizes)


def max_unpool1d(x: Numbers, indices: Numbers, kernel_size: int, stride: int | None = None, padding: int = 0,
                 output_size: Sequence[int] | None = None) -> Tensor:
    """Write maxima x (..., Lo) to their positions in sequences of zeros, as max_unpool2d."""
    sizes = None if output_size is None else (1, output_size[-1])
    return max_unpool2d(tensor(x).unsqueeze(-2), indices, (1, one(kernel_size)), stride and (1, one(stride)), (0, one(padding)),
                        sizes).squeeze(-2)


def avg_pool2d(x: Numbers, kernel_size: int | Sequence[int], stride: int | Sequence[int] | None = None,
               padding: int | Sequence[int] = 0, ceil_mode: bool = False, count_include_pad: bool = True,
               divisor_override: int | None = None) -> Tensor:
    """Return the average of each window: x (N, C, H, W) -> (N, C, Ho, Wo).

    kernel_size, stride, padding: an int or a pair; stride None: kernel_size.  ceil_mode: round Ho and Wo up, so that a last
    window may reach beyond the padding; only its elements inside count.  count_include_pad: padding counts as zeros.
    divisor_override: divide the sum of each window by this number.  ValueError with ceil_mode.
    """
    if divisor_override is not None:
        if ceil_mode or divisor_override == 0:
            raise ValueError(f'avg_pool2d: divisor_override: expected a number other than 0, without ceil_mode, got '
                             f'{divisor_override}')
        terms = math.prod(pair('kernel_size', kernel_size, 1))
        return avg_pool2d(x, kernel_size, stride, padding) * (terms / divisor_override)
    settings: dict[str, Any] = dict(kernel_size=kernel_size, stride=stride, padding=padding, ceil_mode=ceil_mode,
                                    count_include_pad=count_include_pad)
    return _pooled(tensor(x), AvgPool2d, PoolMeans, settings)


def _pooled(x: Tensor, op: Any, of_doubles: Any, settings: dict[str, Any]) -> Tensor:
    """Apply a pooling to images or to one image."""
    if is_double(x):
        return _each_image(x, lambda x: apply(of_doubles, x, pool=op(**settings)))
    return _each_image(x, lambda x: apply(op, x, **settings))


def max_pool1d(x: Numbers, kernel_size: int, stride: int | None = None, padding: int = 0, dilation: int = 1,
               ceil_mode: bool = False, return_indices: bool = False) -> Any:
    """Return the maximum of each window: x (N, C, L) -> (N, C, Lo).  Settings as in max_pool2d."""
    x = _with_height('max_pool1d', x)
    y = max_pool2d(x, (1, one(kernel_size)), stride and (1, one(stride)), (0, one(padding)), (1, one(dilation)), ceil_mode,
                   return_indices)
    return tuple(part.squeeze(-2) for part in y) if return_indices else y.squeeze(-2)


def avg_pool1d(x: Numbers, kernel_size: int, stride: int | None = None, padding: int = 0, ceil_mode: bool = False,
               count_include_pad: bool = True) -> Tensor:
    """Return the average of each window: x (N, C, L) -> (N, C, Lo).  Settings as in avg_pool2d."""
    x = _with_height('avg_pool1d', x)
    return avg_pool2d(x, (1, one(kernel_size)), stride and (1, one(stride)), (0, one(padding)), ceil_mode,
                      count_include_pad).squeeze(-2)


def one(value: Any) -> Any:
    """Return the setting of a function of sequences, given as itself or as PyTorch's (value,)."""
    return value[0] if isinstance(value, tuple | list) and len(value) == 1 else value


def _with_height(who: str, x: Numbers) -> Tensor:
    """Return sequences (N, C, L) as images (N, C, 1, L), and (C, L) as (C, 1, L)."""
    x = tensor(x)
    if x.ndim not in (2, 3):
        raise ValueError(f'{who}: expected x (N, C, L), got shape {x.shape}')
    return x.unsqueeze(-2)


def triple(name: str, value: Any, least: int = 1) -> tuple[int, ...]:
    """Return a setting of volumes as three ints, for depth, height and width.  ValueError if one is below `least`."""
    found = tuple(value) if isinstance(value, tuple | list) else (value,) * 3
    if len(found) != 3 or any(not hasattr(n, '__index__') or n < least for n in found):
        raise ValueError(f'{name}: expected a whole number of at least {least}, or three, got {value!r}')
    return found


def conv3d(x: Numbers, weight: Numbers, bias: Numbers | None = None, stride: int | Sequence[int] = 1,
           padding: int | str | Sequence[int] = 0, dilation: int | Sequence[int] = 1, groups: int = 1) -> Tensor:
    """Convolve volumes with filters: x (N, C, D, H, W), weight (O, C / groups, kd, kh, kw) -> (N, O, Do, Ho, Wo).

    Settings as in conv2d, with ints or triples.  It is the sum of kd convolutions of the slices as images.
    """
    x, weight = tensor(x), tensor(weight)
    if x.ndim == 4:
        return conv3d(x.unsqueeze(0), weight, bias, stride, padding, dilation, groups).squeeze(0)
    if x.ndim != 5 or weight.ndim != 5:
        raise ValueError(f'conv3d: expected x (N, C, D, H, W) and weight (O, C / groups, kd, kh, kw), got shapes {x.shape} and '
                         f'{weight.shape}')
    (step, *steps), (gap, *gaps) = triple('stride', stride), triple('dilation', dilation)
    N, C, D, H, W = x.shape
    kd, plane = weight.shape[2], padding
    before = after = 0
    if padding == 'same':
        if step != 1:
            raise ValueError(f"conv3d: padding: 'same' requires stride 1, got stride {stride}")
        before, after = gap * (kd - 1) // 2, gap * (kd - 1) - gap * (kd - 1) // 2
    elif not isinstance(padding, str):
        before, *plane = triple('padding', padding, 0)            # type: ignore[assignment]
        after = before
    depth = (D + before + after - gap * (kd - 1) - 1) // step + 1
    if depth < 1:
        raise ValueError(f'conv3d: a window of depth {gap * (kd - 1) + 1} does not fit depth {D} with padding {padding}')
    padded = x.pad(((0, 0), (0, 0), (before, after), (0, 0), (0, 0))) if before or after else x
    y: Any = None
    for k in range(kd):
        part = padded[:, :, k * gap:k * gap + (depth - 1) * step + 1:step].permute(0, 2, 1, 3, 4).reshape(N * depth, C, H, W)
        term = conv2d(part, weight[:, :, k], None if k else bias, steps, plane, gaps, groups)
        y = term if y is None else y + term
    return y.reshape(N, depth, *y.shape[1:]).permute(0, 2, 1, 3, 4)


def conv_transpose3d(x: Numbers, weight: Numbers, bias: Numbers | None = None, stride: int | Sequence[int] = 1,
                     padding: int | Sequence[int] = 0, output_padding: int | Sequence[int] = 0, groups: int = 1,
                     dilation: int | Sequence[int] = 1) -> Tensor:
    """Return the transpose of conv3d: x (N, C, D, H, W), weight (C, O / groups, kd, kh, kw) -> (N, O, Do, Ho, Wo).

    Settings as conv_transpose2d's, with ints or triples.  It is the sum of kd transposed convolutions of the slices as images.
    """
    x, weight = tensor(x), tensor(weight)
    if x.ndim == 4:
        return conv_transpose3d(x.unsqueeze(0), weight, bias, stride, padding, output_padding, groups, dilation).squeeze(0)
    if x.ndim != 5 or weight.ndim != 5:
        raise ValueError(f'conv_transpose3d: expected x (N, C, D, H, W) and weight (C, O / groups, kd, kh, kw), got shapes '
                         f'{x.shape} and {weight.shape}')
    (step, *steps), (gap, *gaps) = triple('stride', stride), triple('dilation', dilation)
    (cut, *cuts), (more, *rest) = triple('padding', padding, 0), triple('output_padding', output_padding, 0)
    if more and more >= builtins.max(step, gap):
        raise ValueError(f'conv_transpose3d: output_padding: expected less than stride or dilation, got {more} for the depth')
    N, C, D, H, W = x.shape
    kd = weight.shape[2]
    depth = (D - 1) * step - 2 * cut + gap * (kd - 1) + more + 1
    if depth < 1:
        raise ValueError(f'conv_transpose3d: expected a result of depth 1 or more, got {depth} with padding {padding}')
    slices, y = x.permute(0, 2, 1, 3, 4).reshape(N * D, C, H, W), None
    for k in range(kd):
        part = conv_transpose2d(slices, weight[:, :, k], None, steps, cuts, rest, groups, gaps)
        part = part.reshape(N, D, *part.shape[1:])
        first = k * gap
        shape = N, builtins.max(depth + cut, (D - 1) * step + gap * (kd - 1) + 1), *part.shape[2:]
        term = apply(Place, part, shape=shape, index=(slice(None), slice(first, first + (D - 1) * step + 1, step)))
        y = term if y is None else y + term
    y = y[:, cut:cut + depth].permute(0, 2, 1, 3, 4)                # type: ignore[index]
    return y if bias is None else y + tensor(bias).reshape(-1, 1, 1, 1)


def _pooled_volumes(pool: Callable[..., Tensor], x: Numbers, *triples: Any, **settings: Any) -> Tensor:
    """Pool volumes by a function of images: first each slice, then along the depth."""
    x = tensor(x)
    if x.ndim == 4:
        return _pooled_volumes(pool, x.unsqueeze(0), *triples, **settings).squeeze(0)
    if x.ndim != 5:
        raise ValueError(f'expected x (N, C, D, H, W), got shape {x.shape}')
    kernel, stride, padding, *dilation = triples
    N, C, D, H, W = x.shape
    found = [triple('kernel_size', kernel), triple('stride', kernel if stride is None else stride),
             triple('padding', padding, 0), *[triple('dilation', value) for value in dilation]]
    y = pool(x.permute(0, 2, 1, 3, 4).reshape(N * D, C, H, W), *[triple[1:] for triple in found], **settings)
    h, w = y.shape[-2:]
    y = y.reshape(N, D, C, h * w).permute(0, 2, 1, 3)
    y = pool(y, *[(triple[0], neutral) for triple, neutral in zip(found, (1, 1, 0, 1), strict=False)], **settings)
    return y.reshape(*y.shape[:-1], h, w)


def max_pool3d(x: Numbers, kernel_size: int | Sequence[int], stride: int | Sequence[int] | None = None,
               padding: int | Sequence[int] = 0, dilation: int | Sequence[int] = 1, ceil_mode: bool = False,
               return_indices: bool = False) -> Tensor:
    """Return the maximum of each window: x (N, C, D, H, W) -> (N, C, Do, Ho, Wo).  Settings: ints or triples.
    ValueError for return_indices."""
    if return_indices:
        raise ValueError('max_pool3d: return_indices: expected False, got True; max_pool2d and max_pool1d have positions')
    return _pooled_volumes(max_pool2d, x, kernel_size, stride, padding, dilation, ceil_mode=ceil_mode)


def avg_pool3d(x: Numbers, kernel_size: int | Sequence[int], stride: int | Sequence[int] | None = None,
               padding: int | Sequence[int] = 0, ceil_mode: bool = False, count_include_pad: bool = True) -> Tensor:
    """Return the average of each window: x (N, C, D, H, W) -> (N, C, Do, Ho, Wo).  Settings: ints or triples."""
    return _pooled_volumes(avg_pool2d, x, kernel_size, stride, padding, ceil_mode=ceil_mode,
                           count_include_pad=count_include_pad)


def lp_pool2d(x: Numbers, norm_type: float, kernel_size: int | Sequence[int], stride: int | Sequence[int] | None = None,
              ceil_mode: bool = False) -> Tensor:
    """Return (sum x^norm_type)^(1 / norm_type) of each window: x (N, C, H, W) -> (N, C, Ho, Wo).  NaN for a negative sum
    whose root is not real, as in PyTorch."""
    terms = math.prod(pair('kernel_size', kernel_size, 1))
    return _roots(avg_pool2d(tensor(x) ** norm_type, kernel_size, stride, 0, ceil_mode) * terms, norm_type)


def lp_pool1d(x: Numbers, norm_type: float, kernel_size: int, stride: int | None = None, ceil_mode: bool = False) -> Tensor:
    """Return lp_pool2d of sequences: x (N, C, L) -> (N, C, Lo)."""
    x = _with_height('lp_pool1d', x)
    return lp_pool2d(x, norm_type, (1, one(kernel_size)), stride and (1, one(stride)), ceil_mode).squeeze(-2)


def lp_pool3d(x: Numbers, norm_type: float, kernel_size: int | Sequence[int], stride: int | Sequence[int] | None = None,
              ceil_mode: bool = False) -> Tensor:
    """Return lp_pool2d of volumes: x (N, C, D, H, W) -> (N, C, Do, Ho, Wo)."""
    terms = math.prod(triple('kernel_size', kernel_size))
    return _roots(avg_pool3d(tensor(x) ** norm_type, kernel_size, stride, 0, ceil_mode) * terms, norm_type)


def _roots(sums: Tensor, norm_type: float) -> Tensor:
    return (sums.detach().sign() * relu(abs(sums))) ** (1 / norm_type)


def local_response_norm(x: Numbers, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Tensor:
    """Return x / (k + alpha * mean of squares over `size` neighbouring channels)^beta;  x (N, C, ...)."""
    x = tensor(x)
    if x.ndim < 3 or size < 1:
        raise ValueError(f'local_response_norm: expected x (N, C, ...) of 3 axes or more and size >= 1, got {x.shape} and '
                         f'{size}')
    squares = (x * x).pad(((0, 0), (size // 2, (size - 1) // 2), *[(0, 0)] * (x.ndim - 2)))
    total: Any = builtins.sum(squares[:, i:i + x.shape[1]] for i in range(size))
    return x / (total * (alpha / size) + k) ** beta


_SELU_LEAST = -1.0507009873554805 * 1.6732632423543772         # the limit of selu for small x


def alpha_dropout(x: Numbers, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    """Set elements to the limit of selu with probability p, then scale and shift so that mean 0 and variance 1 stay."""
    if inplace:
        return _in_place(alpha_dropout, x, p, training)
    x = tensor(x)
    if not training or not p:
        return x
    return keeping_moments(x, dropout(Tensor(np.ones(x.shape, np.float32), device=x.device), p) != 0, p)


def keeping_moments(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """Return the result of alpha_dropout for the mask of the elements that are kept."""
    if p == 1:
        return x * 0.0
    scale = ((1 - p) * (1 + p * _SELU_LEAST ** 2)) ** -0.5
    return where(kept, x, _SELU_LEAST) * scale - scale * _SELU_LEAST * p


def ctc_loss(log_probs: Numbers, targets: Numbers, input_lengths: Any, target_lengths: Any, blank: int = 0,
             reduction: str = 'mean', zero_infinity: bool = False) -> Tensor:
    """Return the loss of connectionist temporal classification (Graves et al. 2006): -log of the probability of all paths that
    become the target when repeated labels are merged and blanks removed.

    log_probs (T, N, C), or (T, C) for one sequence;  targets (N, S), or all of them one after the other;  lengths (N,)
    reduction: 'mean' divides each loss by the length of its target, then averages; 'sum'; 'none' (N,)
    zero_infinity: 0 for a target that no path of this length gives, else infinity.  Its gradient is 0.
    """
    check_reduction('ctc_loss', reduction)
    logs = tensor(log_probs)
    if logs.ndim == 2:
        loss = ctc_loss(logs.unsqueeze(1), np.atleast_2d(_integers(targets)), input_lengths, target_lengths, blank, reduction,
                        zero_infinity)
        return loss.reshape(())
    T, N, _ = logs.shape
    times, sizes = (np.broadcast_to(_integers(lengths), N) for lengths in (input_lengths, target_lengths))
    labels, is_none = _with_blanks(_integers(targets), sizes, blank), -1e30
    if labels.shape[0] != N or times.max(initial=0) > T or labels.shape[1] <= 2 * sizes.max(initial=0):
        raise ValueError(f'ctc_loss: expected targets and lengths of {N} sequences, input_lengths up to {T}, got targets '
                         f'{np.shape(targets)}, input_lengths {times.tolist()}, target_lengths {sizes.tolist()}')
    L = labels.shape[1]
    emitted = logs.take_along_axis(np.broadcast_to(labels, (T, N, L)), -1)
    jumps = np.zeros((N, L), bool)              # from the label before, over a blank
    jumps[:, 2:] = (labels[:, 2:] != blank) & (labels[:, 2:] != labels[:, :-2])
    paths = where(np.arange(L) < 2, emitted[0], is_none)
    for t in range(1, T):
        one_on, two_on = (paths.pad(((0, 0), (n, 0)), is_none)[:, :L] for n in (1, 2))
        together = stack([paths, one_on, where(jumps, two_on, is_none)]).logsumexp(0) + emitted[t]
        paths = where((t < times)[:, None], together, paths)
    last = paths.take_along_axis((2 * sizes)[:, None], -1)
    before = where((sizes > 0)[:, None], paths.take_along_axis(np.maximum(2 * sizes - 1, 0)[:, None], -1), is_none)
    losses = -concatenate([last, before], 1).logsumexp(1)
    losses = where(losses.detach() > -is_none / 10, 0.0 if zero_infinity else math.inf, losses)
    if reduction == 'mean':
        losses = losses / np.maximum(sizes, 1).astype(losses.dtype)
    return _reduced('ctc_loss', losses, reduction)


def _integers(values: Any) -> np.ndarray:
    return np.asarray(values.numpy() if hasattr(values, 'numpy') else values).astype(np.int64)


def _with_blanks(targets: np.ndarray, sizes: np.ndarray, blank: int) -> np.ndarray:
    """Return targets (N, S), or one after the other, with a blank before, between and after their labels: (N, 2 S + 1)."""
    if targets.ndim == 1:
        if sizes.sum() != len(targets):
            raise ValueError(f'ctc_loss: expected {sizes.sum()} labels, the sum of target_lengths, got {len(targets)}')
        rows = np.full((len(sizes), sizes.max(initial=0)), blank)
        rows[np.arange(rows.shape[1]) < sizes[:, None]] = targets
        targets = rows
    labels = np.full((len(targets), 2 * targets.shape[1] + 1), blank)
    labels[:, 1::2] = targets
    return labels


def adaptive_avg_pool2d(x: Numbers, output_size: int | Sequence[int]) -> Tensor:
    """Return the averages of output_size windows per axis: x (N, C, H, W) -> (N, C, Ho, Wo).

    output_size: an int or a pair.  Window i along an axis of n elements has those from i n / size, rounded down, to
    (i + 1) n / size, rounded up.
    """
    x = tensor(x)
    if x.ndim not in (3, 4):
        raise ValueError(f'adaptive_avg_pool2d: expected x (N, C, H, W), got shape {x.shape}')
    sizes, given = _adapted(output_size, x), x.shape[-2:]
    if not any(n % size for n, size in zip(given, sizes, strict=True)):
        return avg_pool2d(x, [n // size for n, size in zip(given, sizes, strict=True)])
    dtype = x.dtype if is_double(x) else None
    for axis, n, size in zip((-2, -1), given, sizes, strict=True):
        averages = Tensor(_averages(n, size), device=x.device, dtype=dtype)
        if n != size:
            x = averages @ x if axis == -2 else x @ averages.T
    return x


def adaptive_avg_pool1d(x: Numbers, output_size: int) -> Tensor:
    """Return the averages of output_size windows: x (N, C, L) -> (N, C, output_size)."""
    return adaptive_avg_pool2d(_with_height('adaptive_avg_pool1d', x), (1, one(output_size))).squeeze(-2)


def adaptive_max_pool2d(x: Numbers, output_size: int | Sequence[int]) -> Tensor:
    """Return the maxima of the windows of adaptive_avg_pool2d."""
    x = tensor(x)
    if x.ndim not in (3, 4):
        raise ValueError(f'adaptive_max_pool2d: expected x (N, C, H, W), got shape {x.shape}')
    sizes, given = _adapted(output_size, x), x.shape[-2:]
    if not any(n % size for n, size in zip(given, sizes, strict=True)):
        return max_pool2d(x, [n // size for n, size in zip(given, sizes, strict=True)])
    for axis, n, size in zip((-2, -1), given, sizes, strict=True):
        x = x if n == size else stack([x.take(np.arange(*window), axis).max(axis) for window in _windows(n, size)], axis)
    return x


def adaptive_max_pool1d(x: Numbers, output_size: int) -> Tensor:
    """Return the maxima of output_size windows: x (N, C, L) -> (N, C, output_size)."""
    return adaptive_max_pool2d(_with_height('adaptive_max_pool1d', x), (1, one(output_size))).squeeze(-2)


def adaptive_avg_pool3d(x: Numbers, output_size: int | Sequence[int]) -> Tensor:
    """Return the averages of output_size windows per axis: x (N, C, D, H, W) -> (N, C, Do, Ho, Wo), as adaptive_avg_pool2d."""
    return _adapted_volumes('adaptive_avg_pool3d', adaptive_avg_pool2d, x, output_size)


def adaptive_max_pool3d(x: Numbers, output_size: int | Sequence[int]) -> Tensor:
    """Return the maxima of the windows of adaptive_avg_pool3d."""
    return _adapted_volumes('adaptive_max_pool3d', adaptive_max_pool2d, x, output_size)


def _adapted_volumes(who: str, pool: Callable[..., Tensor], x: Numbers, output_size: Any) -> Tensor:
    """Pool volumes by a function of images: first each slice, then along the depth."""
    x = tensor(x)
    if x.ndim not in (4, 5):
        raise ValueError(f'{who}: expected x (N, C, D, H, W), got shape {x.shape}')
    sizes = output_size if isinstance(output_size, tuple | list) else (output_size,) * 3
    depth, *sizes = [n if size is None else size for size, n in zip(sizes, x.shape[-3:], strict=True)]
    *before, D, H, W = x.shape
    y = pool(x.reshape(math.prod(before), D, H, W), sizes)
    return pool(y.reshape(-1, D, math.prod(sizes)), (depth, math.prod(sizes))).reshape(*before, depth, *sizes)


def _adapted(output_size: Any, x: Tensor) -> tuple[int, int]:
    """Return an output size as a pair, in which None is the size of x."""
    both = output_size if isinstance(output_size, tuple | list) else (output_size, output_size)
    return pair('output_size', [n if size is None else size for size, n in zip(both, x.shape[-2:], strict=True)], 1)


def _windows(n: int, size: int) -> list[tuple[int, int]]:
    """Return first and end of `size` windows that cover n elements."""
    return [(i * n // size, -(-(i + 1) * n // size)) for i in range(size)]


def _averages(n: int, size: int) -> np.ndarray:
    """Return the matrix (size, n) whose product with n elements is their averages over `size` windows."""
    found = np.zeros((size, n))
    for i, (first, end) in enumerate(_windows(n, size)):
        found[i, first:end] = 1 / (end - first)
    return found


def interpolate(x: Numbers, size: int | Sequence[int] | None = None, scale_factor: float | Sequence[float] | None = None,
                mode: str = 'nearest', align_corners: bool | None = None) -> Tensor:
    """Resize the axes after the second of x (N, C, L), (N, C, H, W) or (N, C, D, H, W) to `size`, or by a factor, rounded down.

    mode: 'nearest', or 'nearest-exact', which takes the element at the centre; 'linear' for (N, C, L), 'bilinear' or 'bicubic'
    for (N, C, H, W) and 'trilinear' for (N, C, D, H, W): weighted sums of neighbours, where align_corners lets the outermost
    elements coincide instead of their outer edges; 'area': adaptive_avg_pool2d
    """
    x = tensor(x)
    axes, given = tuple(range(2, x.ndim)), x.shape[2:]
    own = {1: ('linear',), 2: ('bilinear', 'bicubic'), 3: ('trilinear',)}.get(len(axes), ())
    modes = ('nearest', 'nearest-exact', *own, 'area') if own else ()
    if mode not in modes or (size is None) == (scale_factor is None):
        raise ValueError('interpolate: expected x (N, C, L), (N, C, H, W) or (N, C, D, H, W), size or scale_factor, and a mode '
                         f'of {", ".join(modes) or "theirs"}, got shape {x.shape}, size {size}, scale_factor {scale_factor} '
                         f'and mode {mode!r}')
    factors: Any = scale_factor if isinstance(scale_factor, tuple | list) else [scale_factor] * len(axes)
    sizes: Any = ([int(n * factor) for n, factor in zip(given, factors, strict=True)] if size is None else
                  size if isinstance(size, tuple | list) else [size] * len(axes))
    if mode == 'area':
        areas: Any = adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d
        return areas[len(axes) - 1](x, sizes[0] if len(axes) == 1 else sizes)
    for axis, n, to, factor in zip(axes, given, sizes, factors, strict=True):
        step = n / to if factor is None else 1 / factor
        if mode.startswith('nearest'):
            places = (np.arange(to) + (0.5 if mode == 'nearest-exact' else 0.0)) * step
            x = x.take(np.minimum(places.astype(np.int64), n - 1), axis)
            continue
        if align_corners:
            places = np.arange(to) * ((n - 1) / builtins.max(to - 1, 1))
        else:
            places = (np.arange(to) + 0.5) * step - 0.5
        matrix = Tensor(_neighbours(places, n, mode == 'bicubic'), dtype=x.dtype, device=x.device)
        x = (x.swapaxes(axis, -1) @ matrix).swapaxes(axis, -1)
    return x


def _neighbours(places: np.ndarray, n: int, is_cubic: bool) -> np.ndarray:
    """Return the weights (n, len(places)) of n elements in the values between them at these places: of two neighbours, or of
    four with cubic polynomials (Keys 1981, with a = -0.75)."""
    places = places if is_cubic else np.maximum(places, 0)
    first, weights, columns = np.floor(places).astype(np.int64), np.zeros((n, len(places))), np.arange(len(places))
    for k in range(-1, 3) if is_cubic else range(2):
        distance = np.abs(places - first - k)
        share = 1 - distance
        if is_cubic:
            share = np.where(distance <= 1, (1.25 * distance - 2.25) * distance ** 2 + 1,
                             -0.75 * (((distance - 5) * distance + 8) * distance - 4))
        np.add.at(weights, ((first + k).clip(0, n - 1), columns), share)
    return weights


def upsample(x: Numbers, size: int | Sequence[int] | None = None, scale_factor: float | Sequence[float] | None = None,
             mode: str = 'nearest', align_corners: bool | None = None) -> Tensor:
    """PyTorch's earlier name of interpolate."""
    return interpolate(x, size, scale_factor, mode, align_corners)


def affine_grid(theta: Numbers, size: Sequence[int], align_corners: bool = False) -> Tensor:
    """Return the grid for grid_sample of affine maps theta (N, d, d + 1) of the points of images.

    size: (N, C, H, W) of the result of grid_sample -> (N, H, W, 2), or (N, C, D, H, W) -> (N, D, H, W, 3).  The coordinates, x
    first, are -1 and 1 at the outer edges, or with align_corners at the centres of the outermost elements.
    """
    theta, sizes = tensor(theta), tuple(size)[2:]
    d = len(sizes)
    if d not in (2, 3) or theta.shape != (size[0], d, d + 1):
        raise ValueError(f'affine_grid: expected size (N, C, H, W) or (N, C, D, H, W) and theta (N, {d}, {d + 1}), got '
                         f'{tuple(size)} and {theta.shape}')
    lines = [np.linspace(-1, 1, n) if align_corners and n > 1 else (2 * np.arange(n) + 1) / n - 1 for n in sizes]
    points = [*np.meshgrid(*lines, indexing='ij')][::-1]
    base = Tensor(np.stack([*points, np.ones(sizes)], -1).reshape(-1, d + 1), dtype=theta.dtype, device=theta.device)
    return (base @ theta.mT).reshape(size[0], *sizes, d)


def grid_sample(x: Numbers, grid: Numbers, mode: str = 'bilinear', padding_mode: str = 'zeros',
                align_corners: bool | None = None) -> Tensor:
    """Return the values of images at the points of a grid: x (N, C, H, W), grid (N, Ho, Wo, 2) -> (N, C, Ho, Wo); or of volumes
    (N, C, D, H, W) with a grid (N, Do, Ho, Wo, 3).

    grid: coordinates, x first, as in affine_grid.  mode: 'bilinear', sums of the nearest elements, or 'nearest'.
    padding_mode: outside there are zeros, or the outermost elements ('border'), or the image mirrored ('reflection')
    """
    x, grid = tensor(x), tensor(grid, x if isinstance(x, Tensor) else None)
    d = x.ndim - 2
    if d not in (2, 3) or grid.ndim != x.ndim or grid.shape[0] != x.shape[0] or grid.shape[-1] != d:
        raise ValueError(f'grid_sample: expected x (N, C, H, W) and grid (N, Ho, Wo, 2), or x (N, C, D, H, W) and grid '
                         f'(N, Do, Ho, Wo, 3), got {x.shape} and {grid.shape}')
    for name, value, allowed in (('mode', mode, ('bilinear', 'nearest')),
                                 ('padding_mode', padding_mode, ('zeros', 'border', 'reflection'))):
        if value not in allowed:
            raise ValueError(f'grid_sample: {name}: expected one of {", ".join(allowed)}, got {value!r}')
    sizes = x.shape[2:]
    places = [_sampled_places(grid[..., d - 1 - i], n, padding_mode, bool(align_corners)) for i, n in enumerate(sizes)]
    rows = x.moveaxis(1, -1).reshape(-1, x.shape[1])
    if mode == 'nearest':
        # the gradient of the grid is 0, as in PyTorch
        corners: Any = [[(np.rint(place.numpy()).astype(np.int64), place * 0.0 + 1.0)] for place in places]
    else:
        corners = []
        for place in places:
            first = np.floor(place.numpy()).astype(np.int64)
            share = place - Tensor(first, dtype=place.dtype, device=place.device)
            corners.append([(first, 1.0 - share), (first + 1, share)])
    y: Any = 0.0
    for corner in itertools.product(*corners):
        inside, ids = np.ones(grid.shape[:-1], bool), np.arange(x.shape[0]).reshape(-1, *[1] * d)
        for (at, _), n in zip(corner, sizes, strict=True):
            inside, ids = inside & (at >= 0) & (at < n), ids * n + at.clip(0, n - 1)
        weight = Tensor(inside, dtype=rows.dtype, device=rows.device)
        for _, share in corner:
            weight = weight * share
        y = rows[ids.reshape(-1)].reshape(*ids.shape, -1) * weight.unsqueeze(-1) + y
    return y.moveaxis(-1, 1)


def _sampled_places(at: Tensor, n: int, padding_mode: str, align_corners: bool) -> Tensor:
    """Return positions among n elements for coordinates from -1 to 1; positions outside are moved inside as the mode says."""
    place = (at + 1) * ((n - 1) / 2) if align_corners else ((at + 1) * n - 1) * 0.5
    if padding_mode == 'zeros':
        return place
    if padding_mode == 'reflection':
        low, span = (0.0, float(n - 1)) if align_corners else (-0.5, float(n))
        if not span:
            return place * 0.0
        far = abs(place - low)
        turns = Tensor(np.floor(far.numpy() / span), dtype=at.dtype, device=at.device)
        rest = far - turns * span
        place = where(turns % 2 == 0, rest, span - rest) + low
    return where((place > 0) & (place < n - 1), place, place.detach().clip(0, n - 1))


def pixel_shuffle(x: Numbers, upscale_factor: int) -> Tensor:
    """Move channels into space: x (N, C r^2, H, W) -> (N, C, H r, W r) for r = upscale_factor."""
    x, r = tensor(x), upscale_factor
    *N, C, H, W = x.shape
    if C % (r * r):
        raise ValueError(f'pixel_shuffle: expected a multiple of {r * r} channels, got shape {x.shape}')
    n = len(N)
    return x.reshape(*N, C // (r * r), r, r, H, W).permute(*range(n), n, n + 3, n + 1, n + 4, n + 2).reshape(
        *N, C // (r * r), H * r, W * r)


def channel_shuffle(x: Numbers, groups: int) -> Tensor:
    """Return x (N, C, ...) with the channels of `groups` groups in turns: one of each, then the next of each."""
    x = tensor(x)
    N, C, *rest = x.shape
    if C % groups:
        raise ValueError(f'channel_shuffle: groups: expected a divisor of {C} channels, got {groups}')
    return x.reshape(N, groups, C // groups, *rest).swapaxes(1, 2).reshape(x.shape)


def pixel_unshuffle(x: Numbers, downscale_factor: int) -> Tensor:
    """Move space into channels: the inverse of pixel_shuffle."""
    x, r = tensor(x), downscale_factor
    *N, C, H, W = x.shape
    if H % r or W % r:
        raise ValueError(f'pixel_unshuffle: expected sizes that {r} divides, got shape {x.shape}')
    n = len(N)
    return x.reshape(*N, C, H // r, r, W // r, r).permute(*range(n), n, n + 2, n + 4, n + 1, n + 3).reshape(
        *N, C * r * r, H // r, W // r)


# ---- losses ------------------------------------------------------------------------------------------------------------

def cross_entropy(x: Numbers, labels: Numbers, weight: Numbers | None = None, *, ignore_index: int = -100,
                  reduction: str = 'mean', label_smoothing: float = 0.0) -> Tensor:
    """Return the mean of -log softmax(x)[label] over rows whose label is not ignore_index, shape ().

    x (..., C), labels (...) int32; or, as in PyTorch, x (N, C, ...), labels (N, ...), unless the shapes fit the first form
    weight (C,): factor of the rows with each label; the mean is weighted with them
    reduction: 'mean', 'sum' (shape ()) or 'none' (the shape of labels)
    label_smoothing: s: the target is 1 - s + s / C for the label and s / C for each other class
    Floats of x's shape in place of labels are the probabilities of the classes, along axis 1, as in PyTorch: the loss of a row
    is -sum_c probability[c] log softmax(x)[c], each term times weight[c], and the mean is over all rows.  They may require a
    gradient.
    Anything but ignore_index is computed with array ops, which store the logarithms of all rows.
    A mean over no rows is NaN, with the gradient 0; on a GPU, in plans and for arrays it is 0.
    """
    if (x.__class__ is Tensor and labels.__class__ is Tensor and weight is None and reduction == 'mean'
            and not label_smoothing and type(ignore_index) is int and len(x.array.shape) == 2 and len(labels.array.shape) == 1
            and x.array.dtype is ndarray.FLOAT and labels.array.dtype is ndarray.INT and not is_interpreted()):
        return _mean_cross_entropy(x, labels, ignore_index)         # the usual case
    check_class_weight('cross_entropy', weight)
    check_ignore_index('cross_entropy', ignore_index)
    check_reduction('cross_entropy', reduction)
    check_label_smoothing('cross_entropy', label_smoothing)
    x, target = tensor(x), tensor(labels, x)
    if _are_probabilities(x, target):
        if ignore_index >= 0:
            raise ValueError(f'cross_entropy: ignore_index: expected none with probabilities, got {ignore_index}; '
                             'set the probabilities of ignored rows to 0')
        target = target if isinstance(labels, Tensor) else Tensor(labels, dtype=x.dtype, device=x.device)
        return _reduced('cross_entropy', _cross_entropies(x, target, weight, label_smoothing), reduction)
    x, labels = _classes_last(x, target)
    if weight is None and reduction == 'mean' and not label_smoothing:
        rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        ids = labels if labels.ndim == 1 else labels.reshape(-1)
        if not is_double(x):
            return _mean_cross_entropy(rows, ids, ignore_index)
        found = np.flatnonzero(ids.numpy() != ignore_index)
        return -log_softmax(rows)[found, ids.numpy()[found]].sum() / (len(found) or math.nan)
    return _negative_logs(log_softmax(x), labels, ignore_index, weight, reduction, label_smoothing)


def _mean_cross_entropy(x: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Return cross_entropy of x (R, C) float32 and labels (R,) int32 by its kernel."""
    loss = as_scalar(apply(CrossEntropy, x, labels, ignore=ignore_index))
    return loss + math.nan if _is_mean_of_none(loss, labels, ignore_index) else loss


def _is_mean_of_none(loss: Tensor, ids: Tensor, ignore_index: int) -> bool:
    """Return whether the kernel's loss 0 is a mean over no rows.  Not asked on a GPU, which would wait, and in plans, which
    would record the answer."""
    if is_interpreted() or backend.is_recorded() or not loss.array.buffer.device.is_host or loss.array.item() != 0:
        return False
    return bool((ids.numpy() == ignore_index).all())


def nll_loss(x: Numbers, labels: Numbers, weight: Numbers | None = None, *, ignore_index: int = -100,
             reduction: str = 'mean') -> Tensor:
    """Return the mean of -x[label] over rows whose label is not ignore_index, for logarithms x of probabilities.

    Shapes, weight and reduction as in cross_entropy.
    """
    check_class_weight('nll_loss', weight)
    check_ignore_index('nll_loss', ignore_index)
    check_reduction('nll_loss', reduction)
    x, labels = _classes_last(tensor(x), labels)
    return _negative_logs(x, labels, ignore_index, weight, reduction, 0.0)


def check_reduction(who: str, reduction: str, allowed: Sequence[str] = ('mean', 'sum', 'none')) -> None:
    """Raise ValueError unless a reduction of a loss is allowed."""
    if reduction not in allowed:
        *names, last = map(repr, allowed)
        raise ValueError(f'{who}: reduction: expected {", ".join(names)} or {last}, got {reduction!r}')


def check_class_weight(who: str, weight: Numbers | None) -> None:
    """Raise TypeError for a number as the weights of the classes: an ignore_index in their place."""
    if weight is not None and not np.ndim(weight):              # type: ignore[arg-type]
        raise TypeError(f'{who}: weight: expected an array with a factor per class, got {weight!r}; pass ignore_index by name')


def check_ignore_index(who: str, ignore_index: int) -> None:
    """Raise TypeError unless the ignored label is a whole number."""
    if type(ignore_index) is not int and (isinstance(ignore_index, bool) or not hasattr(ignore_index, '__index__')
                                          or np.ndim(ignore_index)):
        raise TypeError(f'{who}: ignore_index: expected a whole number, got {type(ignore_index).__name__}')


def check_label_smoothing(who: str, label_smoothing: float) -> None:
    """Raise ValueError unless the share of the smoothed target is in its range."""
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f'{who}: label_smoothing: expected 0 to 1, got {label_smoothing}')


def _are_probabilities(x: Tensor, target: Tensor) -> bool:
    """Return whether a target holds probabilities instead of labels.  TypeError for floats of another shape than x."""
    if target.dtype.kind != 'f':
        return False
    if target.shape != x.shape:
        raise TypeError(f'labels: expected dtype int32, got {target.dtype}; probabilities have the shape of x, {x.shape}')
    return True


def _cross_entropies(x: Tensor, target: Tensor, weight: Numbers | None, smoothing: float) -> Tensor:
    """Return the loss of each row of x (N, C, ...) or (C,), for probabilities of the same shape."""
    axis = builtins.min(x.ndim - 1, 1)
    if smoothing:
        target = target * (1 - smoothing) + smoothing / x.shape[axis]
    if weight is not None:
        target = target * tensor(weight, x).reshape(-1, *[1] * (x.ndim - 1 - axis))
    return -(log_softmax(x, axis) * target).sum(axis)


def _classes_last(x: Tensor, labels: Numbers) -> tuple[Tensor, Tensor]:
    """Return x with the classes as its last axis, and the labels.  Given are x (..., C) and labels (...), or x (N, C, ...) and
    labels (N, ...)."""
    labels = tensor(labels, x)
    if x.ndim > 2 and labels.shape != x.shape[:-1] and labels.shape == (x.shape[0], *x.shape[2:]):
        x = x.moveaxis(1, -1)
    return x, labels


def _negative_logs(x: Tensor, labels: Tensor, ignore_index: int, weight: Numbers | None, reduction: str,
                   smoothing: float) -> Tensor:
    """Return the loss of cross_entropy from the logarithms x (..., C) of the probabilities."""
    logs, C, labels = x.reshape(-1, x.shape[-1]), x.shape[-1], labels.reshape(-1)
    kept = labels != ignore_index
    classes = where(kept, labels, 0)
    factors = kept.astype(x.dtype)
    if weight is not None:
        weight = tensor(weight, x)
        factors = factors * weight[classes]
    losses = -logs.take_along_axis(classes.unsqueeze(-1), -1).squeeze(-1) * factors * (1 - smoothing)
    if smoothing:
        every = (logs if weight is None else logs * weight).sum(-1)
        losses = losses - every * kept * (smoothing / C)
    if reduction == 'none':
        return losses.reshape(x.shape[:-1])
    if reduction == 'sum':
        return losses.sum()
    total = factors.sum()
    is_none = total == 0                                # the mean is NaN, and its gradient 0, as PyTorch's
    return losses.sum() / where(is_none, 1.0, total) + where(is_none, math.nan, 0.0)


def linear_cross_entropy(x: Numbers, weight: Numbers, bias: Numbers, labels: Numbers, ignore_index: int = -100,
                         label_smoothing: float = 0.0) -> Tensor:
    """Return cross_entropy(linear(x, weight, bias), labels) without storing the logits of all rows."""
    x, weight, bias = tensor(x), tensor(weight), tensor(bias)
    gradients = is_grad_enabled() and (x.requires_grad or weight.requires_grad or bias.requires_grad)
    loss = apply(LinearCrossEntropy, x, tensor(labels, x), gradients, weight=weight, bias=bias, ignore=ignore_index,
                 smoothing=label_smoothing)
    return as_scalar(loss)


def mse_loss(x: Numbers, target: Numbers, reduction: str = 'mean') -> Tensor:
    """Return the mean of (x - target)^2.   reduction: 'mean' or 'sum' (shape ()), or 'none'"""
    difference = tensor(x) - target
    return _reduced('mse_loss', difference * difference, reduction)


def l1_loss(x: Numbers, target: Numbers, reduction: str = 'mean') -> Tensor:
    """Return the mean of |x - target|.   reduction: as in mse_loss"""
    return _reduced('l1_loss', abs(tensor(x) - target), reduction)


def huber_loss(x: Numbers, target: Numbers, reduction: str = 'mean', delta: float = 1.0) -> Tensor:
    """Return the mean of d^2 / 2 where |d| <= delta, else delta (|d| - delta / 2), for d = x - target."""
    if not delta > 0:
        raise ValueError(f'huber_loss: delta: expected a positive number, got {delta}')
    d = tensor(x) - target
    size = abs(d)
    return _reduced('huber_loss', where(size <= delta, d * d * 0.5, (size - delta / 2) * delta), reduction)


def smooth_l1_loss(x: Numbers, target: Numbers, reduction: str = 'mean', beta: float = 1.0) -> Tensor:
    """Return huber_loss / beta, with delta = beta; l1_loss if beta is 0."""
    return huber_loss(x, target, reduction, beta) / beta if beta else l1_loss(x, target, reduction)


def binary_cross_entropy(x: Numbers, target: Numbers, weight: Numbers | None = None, reduction: str = 'mean') -> Tensor:
    """Return the mean of -(target log x + (1 - target) log(1 - x)), for probabilities x.

    weight: factor of each element, of a shape that broadcasts.  Logarithms are at least -100, as in PyTorch; where they are
    limited, there is no gradient.
    """
    x, target = tensor(x), tensor(target)
    losses = -(target * _limited_log(x) + (1 - target) * _limited_log(1 - x))
    return _reduced('binary_cross_entropy', losses if weight is None else losses * weight, reduction)


def _limited_log(x: Tensor) -> Tensor:
    """Return max(log x, -100)."""
    inside = x > math.exp(-87)              # the smallest float32 of full precision is e^-87.3
    return where(inside, log(where(inside, x, 1.0)), -100.0)


def binary_cross_entropy_with_logits(x: Numbers, target: Numbers, weight: Numbers | None = None, reduction: str = 'mean',
                                     pos_weight: Numbers | None = None) -> Tensor:
    """Return binary_cross_entropy(sigmoid(x), target), which is finite for every logit x.

    weight, pos_weight: factors of each element, and of the terms of positive targets, of shapes that broadcast
    """
    x, target = tensor(x), tensor(target)
    small = softplus(-x)
    losses = (1 - target) * x + (small if pos_weight is None else ((tensor(pos_weight, x) - 1) * target + 1) * small)
    return _reduced('binary_cross_entropy_with_logits', losses if weight is None else losses * weight, reduction)


def kl_div(x: Numbers, target: Numbers, reduction: str = 'mean', log_target: bool = False) -> Tensor:
    """Return the mean of target (log target - x), for logarithms x of probabilities.

    reduction: also 'batchmean', the sum over all divided by the first size
    log_target: target is the logarithm of the probabilities; else its zeros count as 0
    """
    x, target = tensor(x), tensor(target)
    if log_target:
        losses = exp(target) * (target - x)
    else:
        losses = target * (log(where(target > 0, target, 1.0)) - x)
    if reduction == 'batchmean':
        return losses.sum() / x.shape[0]
    return _reduced('kl_div', losses, reduction)


def cosine_embedding_loss(x1: Numbers, x2: Numbers, target: Numbers, margin: float = 0.0, reduction: str = 'mean') -> Tensor:
    """Return the mean of 1 - cos(x1, x2) for target 1, and of max(0, cos(x1, x2) - margin) for target -1."""
    cosine = cosine_similarity(x1, x2, -1)
    losses = where(tensor(target, cosine) == 1, 1 - cosine, relu(cosine - margin))
    return _reduced('cosine_embedding_loss', losses, reduction)


def margin_ranking_loss(x1: Numbers, x2: Numbers, target: Numbers, margin: float = 0.0, reduction: str = 'mean') -> Tensor:
    """Return the mean of max(0, margin - target (x1 - x2)), for targets 1 and -1."""
    return _reduced('margin_ranking_loss', relu(margin - tensor(target) * (tensor(x1) - x2)), reduction)


def hinge_embedding_loss(x: Numbers, target: Numbers, margin: float = 1.0, reduction: str = 'mean') -> Tensor:
    """Return the mean of x for target 1, and of max(0, margin - x) for target -1."""
    x = tensor(x)
    return _reduced('hinge_embedding_loss', where(tensor(target, x) == 1, x, relu(margin - x)), reduction)


def triplet_margin_loss(anchor: Numbers, positive: Numbers, negative: Numbers, margin: float = 1.0, p: float = 2.0,
                        eps: float = 1e-6, swap: bool = False, reduction: str = 'mean') -> Tensor:
    """Return the mean of max(0, d(anchor, positive) - d(anchor, negative) + margin), for d = pairwise_distance.

    swap: d(positive, negative) replaces d(anchor, negative) if smaller
    """
    far = pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = minimum(far, pairwise_distance(positive, negative, p, eps))
    return _reduced('triplet_margin_loss', relu(pairwise_distance(anchor, positive, p, eps) - far + margin), reduction)


def soft_margin_loss(x: Numbers, target: Numbers, reduction: str = 'mean') -> Tensor:
    """Return the mean of log(1 + e^(-target x)), for targets 1 and -1."""
    return _reduced('soft_margin_loss', softplus(-tensor(target) * x), reduction)


def multilabel_soft_margin_loss(x: Numbers, target: Numbers, weight: Numbers | None = None, reduction: str = 'mean') -> Tensor:
    """Return the mean of binary_cross_entropy_with_logits over classes, the last axis, then over rows."""
    losses = binary_cross_entropy_with_logits(x, target, weight, 'none').mean(-1)
    return _reduced('multilabel_soft_margin_loss', losses, reduction)


def multi_margin_loss(x: Numbers, labels: Numbers, p: int = 1, margin: float = 1.0, weight: Numbers | None = None,
                      reduction: str = 'mean') -> Tensor:
    """Return the mean of sum_c max(0, margin - x[label] + x[c])^p / C over the classes c other than the label; x (..., C).

    weight (C,): factor of the terms of rows with each label
    """
    x, labels = tensor(x), tensor(labels)
    right = x.take_along_axis(labels.unsqueeze(-1), -1)
    terms = relu(margin - right + x) ** p
    if weight is not None:
        terms = terms * tensor(weight, x)[labels].unsqueeze(-1)
    return _reduced('multi_margin_loss', (terms * (1 - one_hot(labels, x.shape[-1]))).mean(-1), reduction)


def multilabel_margin_loss(x: Numbers, labels: Numbers, reduction: str = 'mean') -> Tensor:
    """Return the mean of sum max(0, 1 - x[right] + x[other]) / C over pairs of a right and another class; x (..., C).

    labels (..., C): the right classes of each row, and -1 after the last of them
    """
    x, given = tensor(x), np.asarray(tensor(labels).numpy())
    if given.shape != x.shape:
        raise ValueError(f'multilabel_margin_loss: labels: expected shape {x.shape}, got {given.shape}')
    right = np.zeros(given.shape, bool)
    for place in np.ndindex(given.shape[:-1]):
        row = given[place]
        right[(*place, row[:np.argmax(row < 0) if (row < 0).any() else len(row)])] = True
    counted = Tensor((right[..., :, None] & ~right[..., None, :]).astype(np.float32), device=x.device, dtype=x.dtype)
    terms = relu(1 - x.unsqueeze(-1) + x.unsqueeze(-2)) * counted
    return _reduced('multilabel_margin_loss', terms.sum((-2, -1)) / x.shape[-1], reduction)


def triplet_margin_with_distance_loss(anchor: Numbers, positive: Numbers, negative: Numbers, *,
                                      distance_function: Callable[[Tensor, Tensor], Tensor] | None = None, margin: float = 1.0,
                                      swap: bool = False, reduction: str = 'mean') -> Tensor:
    """Return the mean of max(0, d(anchor, positive) - d(anchor, negative) + margin) for a distance d of rows, by default
    pairwise_distance.   swap: with the smaller of d(anchor, negative) and d(positive, negative)"""
    distance: Any = pairwise_distance if distance_function is None else distance_function
    anchor, positive, negative = tensor(anchor), tensor(positive), tensor(negative)
    far = distance(anchor, negative)
    if swap:
        far = far.minimum(distance(positive, negative))
    return _reduced('triplet_margin_with_distance_loss', relu(distance(anchor, positive) - far + margin), reduction)


def gumbel_softmax(logits: Numbers, tau: float = 1.0, hard: bool = False, axis: int = -1,
                   generator: np.random.Generator | None = None) -> Tensor:
    """Return softmax((logits + noise) / tau) with Gumbel's noise: a sample of classes through which gradients flow.

    hard: 1 at the class drawn and 0 elsewhere, with the gradient of the softmax.  generator: a numpy Generator; None: numbers
    that depend on pyops.seed
    """
    x = tensor(logits)
    noise = random_generator(generator).gumbel(size=x.shape)
    y = softmax((x + Tensor(noise, device=x.device, dtype=x.dtype)) / tau, axis)
    if not hard:
        return y
    drawn = (y.detach() == y.detach().max(axis, keepdims=True)).astype(y.dtype)
    return drawn + (y - y.detach())


def gaussian_nll_loss(x: Numbers, target: Numbers, var: Numbers, full: bool = False, eps: float = 1e-6,
                      reduction: str = 'mean') -> Tensor:
    """Return the mean of (log var + (x - target)^2 / var) / 2; var counts as at least eps.   full: add log(2 pi) / 2"""
    x, spread = tensor(x), tensor(var)
    if spread.ndim == x.ndim - 1:
        spread = spread.unsqueeze(-1)
    spread = where(spread.detach() < eps, eps, spread)
    losses = (log(spread) + (x - target) ** 2 / spread) * 0.5
    return _reduced('gaussian_nll_loss', losses + math.log(2 * math.pi) / 2 if full else losses, reduction)


def poisson_nll_loss(x: Numbers, target: Numbers, log_input: bool = True, full: bool = False, eps: float = 1e-8,
                     reduction: str = 'mean') -> Tensor:
    """Return the mean of e^x - target x, or of x - target log(x + eps) without log_input.

    full: add Stirling's approximation of log(target!) where target > 1
    """
    x, target = tensor(x), tensor(target)
    losses = exp(x) - target * x if log_input else x - target * log(x + eps)
    if full:
        many = where(target > 1, target, 1.0)
        losses = losses + where(target > 1, many * log(many) - many + 0.5 * log(2 * math.pi * many), 0.0)
    return _reduced('poisson_nll_loss', losses, reduction)


def _reduced(who: str, losses: Tensor, reduction: str) -> Tensor:
    """Return the mean, the sum, or the losses themselves."""
    check_reduction(who, reduction)
    return losses if reduction == 'none' else getattr(losses, reduction)()


# ---- similarity --------------------------------------------------------------------------------------------------------

def normalize(x: Numbers, p: float = 2.0, axis: int = 1, eps: float = 1e-12) -> Tensor:
    """Return x divided by its p-norm along an axis, or by eps if that is larger."""
    x = tensor(x)
    return x / norm(x, p, axis, True).maximum(eps)


def pairwise_distance(x1: Numbers, x2: Numbers, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    """Return the p-norm of x1 - x2 + eps along the last axis."""
    return norm(tensor(x1) - x2 + eps, p, -1, keepdim)


def cosine_similarity(a: Numbers, b: Numbers, axis: int = 1, eps: float = 1e-8) -> Tensor:
    """Return the cosine of the angle between vectors along an axis.  Norms count as at least eps."""
    a, b = tensor(a), tensor(b)
    return (a * b).sum(axis) / (norm(a, 2, axis).maximum(eps) * norm(b, 2, axis).maximum(eps))


# ---- functions that change their argument --------------------------------------------------------------------------------

def _twin(function: Any) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def twin(x: Any, *args: Any, **named: Any) -> Tensor:
        return function(x, *args, **named, inplace=True)
    twin.__name__, twin.__doc__ = f'{function.__name__}_', f'{function.__name__} with inplace=True.'
    return twin


relu_, elu_, celu_, selu_, leaky_relu_, hardtanh_, threshold_, rrelu_ = map(_twin, (
    relu, elu, celu, selu, leaky_relu, hardtanh, threshold, rrelu))


# ---- functions of several arrays, and those whose methods are numpy's ---------------------------------------------------

concat = cat


def hstack(tensors: Sequence[Numbers]) -> Tensor:
    """Join tensors along axis 1, vectors and numbers along axis 0."""
    found = [x.reshape(1) if not x.ndim else x for x in map(tensor, tensors)]
    return concatenate(found, builtins.min(1, found[0].ndim - 1))


def vstack(tensors: Sequence[Numbers]) -> Tensor:
    """Join tensors along axis 0, vectors as rows."""
    return concatenate([x.reshape(1, -1) if x.ndim < 2 else x for x in map(tensor, tensors)])


row_stack = vstack


def dstack(tensors: Sequence[Numbers]) -> Tensor:
    """Join tensors along axis 2, after atleast_3d."""
    return concatenate([atleast_3d(x) for x in tensors], 2)


def _each(function: Callable[[Any], Tensor], given: tuple[Any, ...]) -> Any:
    """Return a function of one tensor, or a tuple of its results for several, also given as a list."""
    if len(given) == 1 and not isinstance(given[0], tuple | list):
        return function(given[0])
    return tuple(map(function, given[0] if len(given) == 1 else given))


def atleast_1d(*tensors: Any) -> Any:
    """Return a number as a vector of one element, anything else unchanged; a tuple of several."""
    return _each(lambda x: tensor(x).reshape(1) if not tensor(x).ndim else tensor(x), tensors)


def atleast_2d(*tensors: Any) -> Any:
    """Return tensors with leading axes of size 1 up to 2."""
    return _each(lambda x: tensor(x).reshape(1, -1) if tensor(x).ndim < 2 else tensor(x), tensors)


def atleast_3d(*tensors: Any) -> Any:
    """Return tensors with at least 3 axes: (n,) as (1, n, 1), (m, n) as (m, n, 1)."""
    return _each(lambda x: atleast_2d(x).unsqueeze(-1) if tensor(x).ndim < 3 else tensor(x), tensors)


def broadcast_tensors(*tensors: Any) -> tuple[Tensor, ...]:
    """Return the tensors in their common shape."""
    given = [tensor(x) for x in arrays_of(tensors)]
    shape = ndarray.broadcast_shape(*(x.shape for x in given))
    return tuple(x.broadcast_to(shape) for x in given)


def broadcast_shapes(*shapes: Any) -> tuple[int, ...]:
    """Return the shape to which all these broadcast."""
    return ndarray.broadcast_shape(*(tuple(one) if isinstance(one, tuple | list) else (one,) for one in shapes))


def block_diag(*tensors: Any) -> Tensor:
    """Return a matrix of zeros with these matrices along its diagonal; vectors are rows."""
    given = [atleast_2d(x) for x in arrays_of(tensors)]
    widths = [0, *itertools.accumulate(x.shape[1] for x in given)]
    return concatenate([x.pad(((0, 0), (before, widths[-1] - before - x.shape[1]))) for x, before in
                        zip(given, widths, strict=False)])


def cartesian_prod(*vectors: Any) -> Tensor:
    """Return all combinations of one element of each vector as rows, the last element changing fastest."""
    given = arrays_of(vectors)
    return tensor(given[0]) if len(given) == 1 else stack([x.reshape(-1) for x in meshgrid(*given)], -1)


def combinations(x: Numbers, r: int = 2, with_replacement: bool = False) -> Tensor:
    """Return all combinations of r elements of a vector as rows."""
    x, choose = tensor(x), itertools.combinations_with_replacement if with_replacement else itertools.combinations
    return x[np.array([*choose(range(x.size), r)], np.int64).reshape(-1, r)]


def tril_indices(row: int, col: int, offset: int = 0) -> Tensor:
    """Return the int32 rows and columns (2, n) of the elements of a matrix on diagonal `offset` and below."""
    return Tensor(np.stack(np.tril_indices(row, offset, col)).astype(np.int32))


def triu_indices(row: int, col: int, offset: int = 0) -> Tensor:
    """Return the int32 rows and columns (2, n) of the elements of a matrix on diagonal `offset` and above."""
    return Tensor(np.stack(np.triu_indices(row, offset, col)).astype(np.int32))


def vander(x: Numbers, N: int | None = None, increasing: bool = False) -> Tensor:
    """Return the powers of a vector as columns, the highest first; N: their number, None: as many as elements."""
    x = tensor(x)
    powers = range(x.size if N is None else N)
    return stack([x ** n if n else x * 0 + 1 for n in (powers if increasing else reversed(powers))], -1)


def chain_matmul(*matrices: Any) -> Tensor:
    """Return the product of several matrices."""
    return functools.reduce(lambda a, b: a @ b, [tensor(x) for x in arrays_of(matrices)])


def cdist(x1: Numbers, x2: Numbers, p: float = 2.0) -> Tensor:
    """Return the p-norms of the differences of all pairs of rows: x1 (..., P, M), x2 (..., R, M) -> (..., P, R)."""
    return norm(tensor(x1).unsqueeze(-2) - tensor(x2).unsqueeze(-3), p, -1)


def pdist(x: Numbers, p: float = 2.0) -> Tensor:
    """Return the p-norms of the differences of the pairs of different rows of x (N, M): (N (N - 1) / 2,)."""
    x = tensor(x)
    rows, others = np.triu_indices(x.shape[0], 1)
    return norm(x[rows] - x[others], p, -1)


def trapezoid(y: Numbers, x: Numbers | None = None, *, dx: float = 1.0, axis: int = -1) -> Tensor:
    """Return the integral of y along an axis by the trapezoidal rule, for points x, or a distance dx."""
    return _trapezoids(y, x, dx, axis).sum(axis)


trapz = trapezoid


def cumulative_trapezoid(y: Numbers, x: Numbers | None = None, *, dx: float = 1.0, axis: int = -1) -> Tensor:
    """Return the integrals of trapezoid up to the second, third, ... point."""
    return _trapezoids(y, x, dx, axis).cumsum(axis)


def _trapezoids(y: Numbers, x: Numbers | None, dx: float, axis: int) -> Tensor:
    y = tensor(y)
    d, = normal_axes(axis, y.ndim)
    after, before = (y[(slice(None),) * d + (part,)] for part in (slice(1, None), slice(None, -1)))
    if x is None:
        return (after + before) * (dx / 2)
    steps = tensor(x).diff(axis=-1 if np.ndim(x) == 1 else d)               # type: ignore[arg-type]
    if steps.ndim == 1:
        steps = steps.reshape(-1, *[1] * (y.ndim - 1 - d))
    return (after + before) * steps / 2


def searchsorted(sorted_sequence: Numbers, values: Numbers, *, right: bool = False, side: str | None = None) -> Tensor:
    """Return the int32 positions in sorted rows before which values keep the order; right, or side='right': after equal ones.

    sorted_sequence (n,) for all values, or (..., n) with values (..., m)
    """
    rows, given = (np.asarray(tensor(one).numpy()) for one in (sorted_sequence, values))
    side = side or ('right' if right else 'left')
    if rows.ndim == 1:
        return Tensor(np.searchsorted(rows, given, side).astype(np.int32))              # type: ignore[call-overload]
    if rows.shape[:-1] != given.shape[:-1]:
        raise ValueError(f'searchsorted: expected values {rows.shape[:-1]} + (m,), got {given.shape}')
    found = [np.searchsorted(row, one, side) for row, one in zip(                       # type: ignore[call-overload]
        rows.reshape(-1, rows.shape[-1]), given.reshape(-1, given.shape[-1]), strict=True)]
    return Tensor(np.array(found, np.int32).reshape(given.shape))


def bucketize(x: Numbers, boundaries: Numbers, *, right: bool = False) -> Tensor:
    """Return for each element the int32 number of boundaries below it; right: of those not above it."""
    return searchsorted(boundaries, x, right=right)


def isin(elements: Numbers, test_elements: Numbers, *, assume_unique: bool = False, invert: bool = False) -> Tensor:
    """Return the mask of the elements that are among test_elements; invert: that are not.  assume_unique: without effect"""
    return Tensor(np.isin(tensor(elements).numpy(), tensor(test_elements).numpy(), invert=invert))


def is_tensor(x: Any) -> bool:
    """Return whether x is a Tensor."""
    return isinstance(x, Tensor)


def scalar_tensor(value: float) -> Tensor:
    """Return a number as a Tensor of shape ()."""
    return Tensor(value)


def column_stack(tensors: Sequence[Numbers]) -> Tensor:
    """Join tensors along axis 1, vectors as columns."""
    return concatenate([x.reshape(-1, 1) if x.ndim < 2 else x for x in map(tensor, tensors)], 1)


def meshgrid(*vectors: Any, indexing: str = 'ij') -> tuple[Tensor, ...]:
    """Return the coordinates of the points of a grid: for each vector a tensor of the shape of the grid.

    indexing: 'ij', or 'xy', which exchanges the first two axes
    """
    if indexing not in ('ij', 'xy'):
        raise ValueError(f"meshgrid: indexing: expected 'ij' or 'xy', got {indexing!r}")
    given = [tensor(x).reshape(-1) for x in arrays_of(vectors)]
    shape = tuple(x.size for x in given)
    grids = [x.reshape(*[-1 if d == i else 1 for d in range(len(given))]).broadcast_to(shape) for i, x in enumerate(given)]
    return tuple(x.swapaxes(0, 1) if indexing == 'xy' and len(given) > 1 else x for x in grids)


def tensordot(a: Numbers, b: Numbers, dims: Any = 2) -> Tensor:
    """Return the sums of products over the last `dims` axes of a and the first of b, or over the two lists of axes in dims."""
    a, b = tensor(a), tensor(b)
    ours, theirs = (range(a.ndim - dims, a.ndim), range(dims)) if isinstance(dims, int) else (
        [axes] if isinstance(axes, int) else axes for axes in dims)
    ours, theirs = ([d % x.ndim for d in axes] for axes, x in ((ours, a), (theirs, b)))
    if [a.shape[d] for d in ours] != [b.shape[d] for d in theirs]:
        raise ValueError(f'tensordot: axes {ours} of shape {a.shape} and {theirs} of shape {b.shape} differ in size')
    left, right = ([d for d in range(x.ndim) if d not in axes] for x, axes in ((a, ours), (b, theirs)))
    n, shape = math.prod(a.shape[d] for d in ours), [a.shape[d] for d in left] + [b.shape[d] for d in right]
    product = a.permute([*left, *ours]).reshape(-1, n) @ b.permute([*theirs, *right]).reshape(n, -1)
    return product.reshape(shape)


def std_mean(x: Numbers, axis: Axis = None, keepdims: bool = False, correction: int = 1) -> tuple[Tensor, Tensor]:
    """Return std(x) and mean(x)."""
    return std(x, axis, keepdims, correction), mean(x, axis, keepdims)


def var_mean(x: Numbers, axis: Axis = None, keepdims: bool = False, correction: int = 1) -> tuple[Tensor, Tensor]:
    """Return var(x) and mean(x)."""
    return var(x, axis, keepdims, correction), mean(x, axis, keepdims)


def nonzero(x: Numbers, as_tuple: bool = False) -> Any:
    """Return the int32 indices of the elements that are not 0: (their number, ndim), or a tensor for each axis."""
    return tensor(x).nonzero() if as_tuple else tensor(x).argwhere()


def median(x: Numbers, axis: int | None = None, keepdims: bool = False) -> Any:
    """Return the median, of an even number of elements the smaller of the middle two, as PyTorch; x.median() is numpy's.

    With an axis return (the medians, their indices).  NaN if there is one.
    """
    x, d = (tensor(x).reshape(-1), 0) if axis is None else (tensor(x), normal_axes(axis, tensor(x).ndim)[0])
    order, nan = x.argsort(d), x.detach().isnan()
    place = where(nan.any(d, keepdims=True), nan.argmax(d, keepdims=True), order.narrow(d, (x.shape[d] - 1) // 2, 1))
    values = x.take_along_axis(place, d)
    if axis is None:
        return values.reshape(())
    return (values, place) if keepdims else (values.squeeze(d), place.squeeze(d))


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the function of a method: add(x, y) is x.add(y), and add_(x, y) is x.add_(y)."""
    if name not in METHODS and name not in ALIASES and (name[-1:] != '_' or name[:-1] not in IN_PLACE):
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return function_of(Tensor, ALIASES.get(name, name), tensor)


def _accept_torch_names() -> None:
    """Let the functions of this module take their arguments by PyTorch's names, too."""
    for name, function in list(globals().items()):
        is_own = isinstance(function, FunctionType) and function.__module__ == __name__
        if is_own and not name.startswith(('_', 'check_', 'tensor')) and name not in ('one', 'triple', 'keeping_moments'):
            globals()[name] = accepts_torch_names(function)


_accept_torch_names()
