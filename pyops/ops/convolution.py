"""The windows of a convolution as array ops: a view of all windows, and its gradient, the sum of overlapping windows."""
import numpy as np

from pyops import ndarray
from pyops.ops.array import ArrayOp, call


def positions(size, window, stride, dilation):
    """Return the number of windows that fit along an axis."""
    return (size - dilation * (window - 1) - 1) // stride + 1


class Windows(ArrayOp):
    """View the windows of x (N, C, H, W) as y (N, C, Ho, Wo, kh, kw): y[n, c, i, j, a, b] = x[n, c, i s + a d, j s + b d].

    window: (kh, kw).  stride s, dilation d: two ints each, for the vertical and the horizontal axis.
    """

    def forward(x, window, stride, dilation):
        (N, C, H, W), (n, c, h, w) = x.shape, x.strides
        (kh, kw), (sh, sw), (dh, dw) = window, stride, dilation
        shape = N, C, positions(H, kh, sh, dh), positions(W, kw, sw, dw), kh, kw
        return x.as_strided(shape, (n, c, h * sh, w * sw, h * dh, w * dw)), (x.shape, stride, dilation)

    def backward(dy, ctx):
        shape, stride, dilation = ctx
        return call(Fold, dy, shape=shape, stride=stride, dilation=dilation)

    def reference(x, window, stride, dilation):
        Ho, Wo = (positions(*sizes) for sizes in zip(x.shape[2:], window, stride, dilation, strict=True))
        y = np.empty((*x.shape[:2], Ho, Wo, *window), x.dtype)
        for i, j, a, b in np.ndindex(*y.shape[2:]):
            y[:, :, i, j, a, b] = x[:, :, i * stride[0] + a * dilation[0], j * stride[1] + b * dilation[1]]
        return y

    def example(normal):
        return [normal(2, 2, 7, 6)], dict(window=(3, 2), stride=(2, 1), dilation=(1, 3))


class Fold(ArrayOp):
    """Add the windows x (N, C, Ho, Wo, kh, kw) to zeros y (N, C, H, W) of the given shape: overlapping elements are summed."""

    def forward(x, shape, stride, dilation):
        (sh, sw), (dh, dw) = stride, dilation
        _, _, Ho, Wo, kh, kw = x.shape
        y = ndarray.zeros(shape, x.dtype, x.device)
        for a in range(kh):
            for b in range(kw):
                place = y[:, :, a * dh:a * dh + sh * (Ho - 1) + 1:sh, b * dw:b * dw + sw * (Wo - 1) + 1:sw]
                place += x[:, :, :, :, a, b]
        return y, ((kh, kw), stride, dilation)

    def backward(dy, ctx):
        window, stride, dilation = ctx
        return call(Windows, dy, window=window, stride=stride, dilation=dilation)

    def reference(x, shape, stride, dilation):
        y = np.zeros(shape, x.dtype)
        for i, j, a, b in np.ndindex(*x.shape[2:]):
            y[:, :, i * stride[0] + a * dilation[0], j * stride[1] + b * dilation[1]] += x[:, :, i, j, a, b]
        return y

    def example(normal):
        return [normal(2, 2, 3, 3, 3, 2)], dict(shape=(2, 2, 7, 6), stride=(2, 1), dilation=(1, 3))
