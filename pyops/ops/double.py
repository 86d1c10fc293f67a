"""Convolution, pooling and the normal distribution function of float64 arrays on the CPU, as array ops.

Their kernels are plain loops, for checks of gradients; Conv2d, MaxPool2d, AvgPool2d and GELU compute float32.  All but
NormalCDF are linear in each array.  So the gradients of a convolution are two other maps of the same three arrays, and the
gradient of a pooling is its transpose.
"""
import math

import numpy as np

from pyops import ndarray
from pyops.backend import axes, launch
from pyops.ops.array import ArrayOp, call

BOTH = True, True


def _launched(kernel, shape, operands, *numbers):
    """Return the float64 array of this shape that a kernel computes.  It is zeroed, since the gradient of filters is added."""
    y = ndarray.zeros(shape, np.float64, operands[0].device)
    launch(kernel, y, *[x.compact() for x in operands], *numbers)
    return y


# ---- convolution: y (N, O, Ho, Wo), x (N, C, H, W), weight (O, C / groups, kh, kw); sizes: a pyops.ops.convolution.Shapes ----

class Convolve(ArrayOp):
    """y = Conv2d(x; weight), without a bias."""

    name = 'conv2d'

    def forward(x, weight, sizes):
        return _launched('conv2d_forward_double', sizes.y, (x, weight), *sizes), (x, weight, sizes)

    def backward(dy, ctx, wanted=BOTH):
        x, weight, sizes = ctx
        return (wanted[0] and call(ConvolveTransposed, dy, weight, sizes=sizes),
                wanted[1] and call(ConvolveFilters, dy, x, sizes=sizes))


class ConvolveTransposed(ArrayOp):
    """x = Conv2dTransposed(y; weight): the gradient of the input of Convolve."""

    name = 'conv2d_transposed'

    def forward(y, weight, sizes):
        return _launched('conv2d_backward_x_double', sizes.x, (y, weight), *sizes), (y, weight, sizes)

    def backward(dx, ctx, wanted=BOTH):
        y, weight, sizes = ctx
        return (wanted[0] and call(Convolve, dx, weight, sizes=sizes),
                wanted[1] and call(ConvolveFilters, y, dx, sizes=sizes))


class ConvolveFilters(ArrayOp):
    """weight = Conv2dFilters(y, x): the gradient of the filters of Convolve."""

    name = 'conv2d_filters'

    def forward(y, x, sizes):
        return _launched('conv2d_backward_weight_double', sizes.weight, (y, x), *sizes), (y, x, sizes)

    def backward(df, ctx, wanted=BOTH):
        y, x, sizes = ctx
        return (wanted[0] and call(Convolve, x, df, sizes=sizes),
                wanted[1] and call(ConvolveTransposed, y, df, sizes=sizes))


# ---- pooling: x (N, C, H, W), y (N, C, Ho, Wo); pool: the MaxPool2d or AvgPool2d with the settings ---------------------------

class PoolMaxima(ArrayOp):
    """y = MaxPool2d(x).  The gradient goes to the first of equal maxima."""

    name = 'max_pool2d'

    def forward(x, pool):
        N, C, _, _ = axes('x', x, 'N C H W')
        shape = N, C, *pool.places(x.shape)
        y, index = ndarray.empty(shape, np.float64, x.device), ndarray.empty(shape, np.int32, x.device)
        launch('max_pool2d_forward_double', y, index, x.compact(), *pool.sizes(x.shape), *pool.dilation)
        return y, (index, x.shape, pool)

    def backward(dy, ctx):
        index, shape, pool = ctx
        return call(PlaceMaxima, dy, index, shape=shape, pool=pool)


class PlaceMaxima(ArrayOp):
    """x = the sum of y over the windows whose maximum the element is: the gradient of PoolMaxima.  index: their positions."""

    name = 'max_pool2d_transposed'

    def forward(y, index, shape, pool):
        return _launched('max_pool2d_backward_double', shape, (y, index), *pool.sizes(shape), *pool.dilation), (index, shape)

    def backward(dx, ctx):
        index, (N, C, H, W) = ctx
        rows = index.reshape((N, C, -1))
        found = dx.reshape((N, C, H * W)).take_along_axis(rows.maximum(0), -1) * (rows >= 0)
        return found.reshape(index.shape), None


class PoolMeans(ArrayOp):
    """y = AvgPool2d(x)."""

    name = 'avg_pool2d'

    def forward(x, pool):
        N, C, _, _ = axes('x', x, 'N C H W')
        shape = N, C, *pool.places(x.shape)
        y = _launched('avg_pool2d_forward_double', shape, (x,), *pool.sizes(x.shape), pool.count_include_pad)
        return y, (x.shape, pool)

    def backward(dy, ctx):
        shape, pool = ctx
        return call(SpreadMeans, dy, shape=shape, pool=pool)


class SpreadMeans(ArrayOp):
    """x = the sum of y / n over the windows with the element, n of their elements count: the gradient of PoolMeans."""

    name = 'avg_pool2d_transposed'

    def forward(y, shape, pool):
        return _launched('avg_pool2d_backward_double', shape, (y,), *pool.sizes(shape), pool.count_include_pad), (pool,)

    def backward(dx, ctx):
        return call(PoolMeans, dx, pool=ctx[0])


# ---- the normal distribution -------------------------------------------------------------------------------------------------

class NormalCDF(ArrayOp):
    """y = (1 + erf(x / sqrt(2))) / 2: the probability that a normal number is below x;  dx = dy e^(-x^2 / 2) / sqrt(2 pi)."""

    name = 'normal_cdf'

    def forward(x):
        return _launched('normal_cdf_double', x.shape, (x,), x.size), (x,)

    def backward(dy, ctx):
        x, = ctx
        return dy * (x * x * -0.5).exp() * (1 / math.sqrt(2 * math.pi))

    def reference(x):
        return np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2)) / 2 + 0.5
