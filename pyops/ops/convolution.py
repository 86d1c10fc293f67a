"""Convolution in two dimensions, and the two maps that are its gradients.

All three are linear in each factor, y in x and in weight, so the gradients of any of them are the other two:

    y = Conv2d(x; weight)         x = Conv2dTransposed(y; weight)        weight = Conv2dFilters(y, x)
"""
from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops.backend import axes, check, check_parameter, empty, empty_gradient, launch, note_product, work
from pyops.backend.kernels import Kernel, Product, declare
from pyops.errors import ShapeError

if TYPE_CHECKING:
    from pyops.autograd import Tensor
    from pyops.params import Parameter
    from pyops.typing import Array, Example, Normal, TensorGradients

# the products of a convolution, without tensors to save: the matrix of windows is never stored, so no weight is noted
FWD, DGRAD, WGRAD = Product('fwd', {}), Product('dgrad', {}), Product('wgrad', {})


def pair(name: str, value: int | Sequence[int], least: int) -> tuple[int, int]:
    """Return an int, or a pair of ints, as a pair.  ValueError if one is below `least`."""
    both: Any = (value, value) if hasattr(value, '__index__') else tuple(value)         # type: ignore[arg-type]
    if len(both) != 2 or any(not hasattr(n, '__index__') or n < least for n in both):
        raise ValueError(f'{name}: expected a whole number of at least {least}, or two, got {value}')
    return operator.index(both[0]), operator.index(both[1])


def positions(size: int, window: int, stride: int, padding: int, dilation: int) -> int:
    """Return the number of windows along an axis with `padding` zeros at each end; 0 or less if none fits."""
    return (size + 2 * padding - dilation * (window - 1) - 1) // stride + 1


def check_settings(stride: int | Sequence[int], padding: int | str | Sequence[int], dilation: int | Sequence[int],
                   groups: int) -> None:
    """Raise ValueError for settings that no convolution has."""
    _Convolution(stride, padding, dilation, groups)


def sizes_of(x: Array, weight: Array, stride: int | Sequence[int], padding: int | str | Sequence[int],
             dilation: int | Sequence[int], groups: int) -> Shapes:
    """Return the sizes for arrays x (N, C, H, W) and weight (O, C / groups, kh, kw).  ValueError if they do not fit."""
    (N, C, H, W), (O, own, _, _) = axes('x', x, 'N C H W'), axes('weight', weight, 'O C kh kw')
    settings = _Convolution(stride, padding, dilation, groups)
    settings.check_groups('weight', O)
    if C != own * groups:
        raise ShapeError(f'x: expected shape {(N, own * groups, H, W)}, got {x.shape}')
    return settings.shapes(x.shape, weight.shape)


def transposed_sizes(y: tuple[int, ...], weight: tuple[int, ...], output_padding: int | Sequence[int],
                     stride: int | Sequence[int], padding: int | Sequence[int], dilation: int | Sequence[int],
                     groups: int) -> Shapes:
    """Return the sizes of the convolution whose transpose takes y (N, O, Ho, Wo) and weight (O, C / groups, kh, kw).

    output_padding: rows and columns that x has beyond the smallest size that gives Ho and Wo.  ValueError if they do not fit.
    """
    if len(y) != 4 or len(weight) != 4 or y[1] != weight[0]:
        raise ShapeError(f'x: expected shape (N, {weight[0]}, H, W) for weight {weight}, got {y}')
    settings = _Convolution(stride, padding, dilation, groups)
    more = pair('output_padding', output_padding, 0)
    if any(n >= s for n, s in zip(more, settings.stride, strict=True)):
        raise ValueError(f'output_padding: expected less than the stride {settings.stride}, got {output_padding}')
    size = [(n - 1) * s - 2 * p + d * (k - 1) + 1 + extra for n, s, p, d, k, extra in zip(
        y[2:], settings.stride, settings.padding, settings.dilation, weight[2:], more, strict=True)]
    return settings.shapes((y[0], weight[1] * groups, *size), weight)


class Shapes(NamedTuple):
    """The sizes of a convolution, in the order of the header."""
    N: int
    C: int
    H: int
    W: int
    O: int
    Ho: int
    Wo: int
    kh: int
    kw: int
    stride_h: int
    stride_w: int
    pad_h: int
    pad_w: int
    dilation_h: int
    dilation_w: int
    groups: int

    @property
    def x(self) -> tuple[int, ...]:
        return self.N, self.C, self.H, self.W

    @property
    def y(self) -> tuple[int, ...]:
        return self.N, self.O, self.Ho, self.Wo

    @property
    def weight(self) -> tuple[int, ...]:
        return self.O, self.C // self.groups, self.kh, self.kw


class _Convolution:
    """The settings that the three ops share.  stride, padding, dilation: an int or a pair; padding also 'same' or 'valid'."""

    def __init__(self, stride: int | Sequence[int], padding: int | str | Sequence[int], dilation: int | Sequence[int],
                 groups: int) -> None:
        self.stride, self.dilation = pair('stride', stride, 1), pair('dilation', dilation, 1)
        if isinstance(padding, str):
            if padding not in ('same', 'valid'):
                raise ValueError(f"padding: expected a whole number, two, 'same' or 'valid', got {padding!r}")
            if padding == 'same' and self.stride != (1, 1):
                raise ValueError(f"padding: 'same' requires stride 1, got stride {self.stride}")
            self.padding: Any = padding
        else:
            self.padding = pair('padding', padding, 0)
        if not isinstance(groups, int) or groups < 1:
            raise ValueError(f'groups: expected a whole number of at least 1, got {groups}')
        self.groups = groups

    def shapes(self, x: tuple[int, ...], weight: tuple[int, ...]) -> Shapes:
        """Return the sizes for x (N, C, H, W) and weight (O, C / groups, kh, kw).  ValueError if no window fits."""
        return _shapes(x, weight, self.stride, self.padding, self.dilation, self.groups)

    def settings(self) -> dict[str, Any]:
        return dict(stride=self.stride, padding=self.padding, dilation=self.dilation, groups=self.groups)

    def check_groups(self, name: str, channels: int) -> None:
        if channels % self.groups:
            raise ValueError(f'groups: expected a divisor of the {channels} channels of {name}, got {self.groups}')


@functools.lru_cache(1024)
def _shapes(x: tuple[int, ...], weight: tuple[int, ...], stride: tuple[int, int], padding: str | tuple[int, int],
            dilation: tuple[int, int], groups: int) -> Shapes:
    (_, _, H, W), (O, _, *window) = x, weight
    if padding == 'same':
        places, zeros = [H, W], [d * (k - 1) // 2 for k, d in zip(window, dilation, strict=True)]
    else:
        zeros = [0, 0] if isinstance(padding, str) else [*padding]
        places = [*map(positions, (H, W), window, stride, zeros, dilation)]
    if min(places) < 1:
        raise ShapeError(f'conv2d: a window of {tuple(window)} with dilation {dilation} does not fit into {(H, W)} '
                         f'with padding {tuple(zeros)}')
    return Shapes._make((*x, O, *places, *window, *stride, *zeros, *dilation, groups))


def _taps(s: Shapes, x: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield (a, b, view) for each element of the window: view (N, groups, C / groups, Ho, Wo) of x (N, C, Hp, Wp), padded."""
    for a, b in np.ndindex(s.kh, s.kw):
        top, left = a * s.dilation_h, b * s.dilation_w
        view = x[:, :, top:top + s.stride_h * (s.Ho - 1) + 1:s.stride_h, left:left + s.stride_w * (s.Wo - 1) + 1:s.stride_w]
        yield a, b, view.reshape(s.N, s.groups, -1, s.Ho, s.Wo)


def _padded(s: Shapes, x: np.ndarray) -> np.ndarray:
    """Return x with zeros around it, as far as windows reach."""
    rows = max((s.Ho - 1) * s.stride_h + (s.kh - 1) * s.dilation_h + 1 - s.H - s.pad_h, 0)
    cols = max((s.Wo - 1) * s.stride_w + (s.kw - 1) * s.dilation_w + 1 - s.W - s.pad_w, 0)
    return np.pad(x, ((0, 0), (0, 0), (s.pad_h, rows), (s.pad_w, cols)))


class Conv2d(_Convolution):
    """Convolve images with filters.

    Shapes   x, dx (N, C, H, W);  y, dy (N, O, Ho, Wo);  weight (O, C / groups, kh, kw);  bias (O,) or None
    Forward  y[n, o, i, j] = bias[o] + sum_c,a,b weight[o, c, a, b] x[n, g C / groups + c, i s + a d - p, j s + b d - p]
             with stride s, dilation d, padding p and group g = o / (O / groups);  x is 0 outside
    Backward dx: each element of dy times the weights, added to the elements that it read;
             dweight[o, c, a, b] += sum_n,i,j dy[n, o, i, j] x[...];  dbias[o] += sum_n,i,j dy[n, o, i, j]
    Saves    x
    Errors   ValueError for sizes that do not fit, TypeError and ValueError naming the argument or the parameter
    Source   the chain rule; docs/convolution.md derives it
    Notes    padding='same': Ho, Wo = H, W, with the additional zero of an even window below and at the right
    """
    same_launches = True            # see pyops/backend/recorded_ops.py

    class Ctx(NamedTuple):
        x: Array

    def __init__(self, weight: Parameter, bias: Parameter | None = None, stride: int | Sequence[int] = 1,
                 padding: int | str | Sequence[int] = 0, dilation: int | Sequence[int] = 1, groups: int = 1,
                 name: str | None = None) -> None:
        super().__init__(stride, padding, dilation, groups)
        self.weight, self.bias, self.name = weight, bias, name or weight.owner
        O, *_ = axes(weight.name, weight.value, 'O C kh kw')
        check_parameter(weight, weight.value.shape)
        self.check_groups(weight.name, O)
        if bias:
            check_parameter(bias, (O,))

    def forward(self, x: Array) -> tuple[Array, Ctx]:
        N, _, H, W = axes('x', x, 'N C H W')
        weight = self.weight.value
        check('x', x, (N, weight.shape[1] * self.groups, H, W))
        s = self.shapes(x.shape, weight.shape)
        y = empty(s.y, name=f'{self.name}.y')
        launch('conv2d_forward', y, x, weight, self.bias and self.bias.value, work('conv2d_forward', *s), *s)
        note_product(self, FWD)
        return y, self.Ctx(x)

    def backward(self, dy: Array, ctx: Ctx, want_dx: bool = True) -> Array | None:
        """Return dx, or None with want_dx=False."""
        s = self.shapes(ctx.x.shape, self.weight.value.shape)
        check('dy', dy, s.y)
        launch('conv2d_backward_weight', self.weight.grad, self.bias and self.bias.grad, dy, ctx.x,
               work('conv2d_backward_weight', *s), *s)
        note_product(self, WGRAD)
        if not want_dx:
            return None
        dx = empty_gradient(s.x, f'{self.name}.dx')
        launch('conv2d_backward_x', dx, dy, self.weight.value, work('conv2d_backward_x', *s), *s)
        note_product(self, DGRAD)
        return dx

    def backward_on_tensors(self, dy: Tensor, ctx: Any, parameters: dict[str, Tensor]) -> TensorGradients:
        weight, settings = parameters['weight'], self.settings()
        gradients = {'weight': dy.tape(Conv2dFilters, dy, ctx.x, window=weight.shape[2:], **settings)}
        if 'bias' in parameters:
            gradients['bias'] = dy.sum((0, 2, 3))
        return (dy.tape(Conv2dTransposed, dy, weight=weight, size=ctx.x.shape[2:], **settings),), gradients

    @staticmethod
    def reference(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None, stride: Any = 1, padding: Any = 0,
                  dilation: Any = 1, groups: int = 1) -> np.ndarray:
        s = _Convolution(stride, padding, dilation, groups).shapes(x.shape, weight.shape)
        filters, y = weight.reshape(groups, -1, *weight.shape[1:]), np.zeros(s.y)
        for a, b, view in _taps(s, _padded(s, x)):
            y += np.einsum('ngcij,goc->ngoij', view, filters[..., a, b]).reshape(s.y)
        return y if bias is None else y + bias[:, None, None]

    @staticmethod
    def example(normal: Normal) -> Example:
        return [normal(2, 4, 7, 6)], dict(weight=normal(6, 2, 3, 2), bias=normal(6), stride=(2, 1), padding=(1, 0),
                                          dilation=(1, 3), groups=2)


class Conv2dTransposed(_Convolution):
    """Apply the transpose of a convolution as a linear map: the gradient of its input.

    Shapes   y, dy (N, O, Ho, Wo);  weight (O, C / groups, kh, kw);  x, dx (N, C, H, W) with size = (H, W)
    Forward  x[n, g C / groups + c, i s + a d - p, j s + b d - p] = sum_o,a,b weight[o, c, a, b] y[n, o, i, j]
    Backward dy = Conv2d(dx);  dweight += Conv2dFilters(y, dx)
    Saves    y
    Errors   ValueError for sizes that do not fit, TypeError and ValueError naming the argument or the parameter
    Source   docs/convolution.md
    """

    class Ctx(NamedTuple):
        y: Array

    def __init__(self, weight: Parameter, size: Sequence[int] = (1, 1), stride: int | Sequence[int] = 1,
                 padding: int | str | Sequence[int] = 0, dilation: int | Sequence[int] = 1, groups: int = 1,
                 name: str | None = None) -> None:
        super().__init__(stride, padding, dilation, groups)
        self.weight, self.size, self.name = weight, pair('size', size, 1), name or weight.owner
        O, *_ = axes(weight.name, weight.value, 'O C kh kw')
        check_parameter(weight, weight.value.shape)
        self.check_groups(weight.name, O)

    def _shapes(self, N: int) -> Shapes:
        weight = self.weight.value.shape
        return self.shapes((N, weight[1] * self.groups, *self.size), weight)

    def forward(self, y: Array) -> tuple[Array, Ctx]:
        s = self._shapes(axes('y', y, 'N O Ho Wo')[0])
        check('y', y, s.y)
        x = empty(s.x, name=f'{self.name}.x')
        launch('conv2d_backward_x', x, y, self.weight.value, work('conv2d_backward_x', *s), *s)
        note_product(self, FWD)
        return x, self.Ctx(y)

    def backward(self, dx: Array, ctx: Ctx) -> Array:
        s = self._shapes(len(ctx.y))
        check('dx', dx, s.x)
        launch('conv2d_backward_weight', self.weight.grad, None, ctx.y, dx, work('conv2d_backward_weight', *s), *s)
        note_product(self, WGRAD)
        dy = empty_gradient(s.y, f'{self.name}.dy')
        launch('conv2d_forward', dy, dx, self.weight.value, None, work('conv2d_forward', *s), *s)
        note_product(self, DGRAD)
        return dy

    def backward_on_tensors(self, dx: Tensor, ctx: Any, parameters: dict[str, Tensor]) -> TensorGradients:
        weight, settings = parameters['weight'], self.settings()
        return (dx.tape(Conv2d, dx, weight=weight, **settings),), {
            'weight': dx.tape(Conv2dFilters, ctx.y, dx, window=weight.shape[2:], **settings)}

    @staticmethod
    def reference(y: np.ndarray, weight: np.ndarray, size: Sequence[int] = (1, 1), stride: Any = 1, padding: Any = 0,
                  dilation: Any = 1, groups: int = 1) -> np.ndarray:
        shape = len(y), weight.shape[1] * groups, *size
        s = _Convolution(stride, padding, dilation, groups).shapes(shape, weight.shape)
        filters, given = weight.reshape(groups, -1, *weight.shape[1:]), y.reshape(s.N, groups, -1, s.Ho, s.Wo)
        x = _padded(s, np.zeros(shape))
        for a, b, _ in _taps(s, x):
            rows = slice(a * s.dilation_h, a * s.dilation_h + s.stride_h * (s.Ho - 1) + 1, s.stride_h)
            cols = slice(b * s.dilation_w, b * s.dilation_w + s.stride_w * (s.Wo - 1) + 1, s.stride_w)
            x[:, :, rows, cols] += np.einsum('ngoij,goc->ngcij', given, filters[..., a, b]).reshape(s.N, s.C, s.Ho, s.Wo)
        return x[:, :, s.pad_h:s.pad_h + s.H, s.pad_w:s.pad_w + s.W]

    @staticmethod
    def example(normal: Normal) -> Example:
        return [normal(2, 6, 4, 3)], dict(weight=normal(6, 2, 3, 2), size=(7, 6), stride=(2, 1), padding=(1, 0),
                                          dilation=(1, 3), groups=2)


class Conv2dFilters(_Convolution):
    """Correlate the output of a convolution with its input: the gradient of its weight.

    Shapes   y, dy (N, O, Ho, Wo);  x, dx (N, C, H, W);  f, df (O, C / groups, kh, kw) with window = (kh, kw)
    Forward  f[o, c, a, b] = sum_n,i,j y[n, o, i, j] x[n, g C / groups + c, i s + a d - p, j s + b d - p]
    Backward dy = Conv2d(x; df);  dx = Conv2dTransposed(y; df)
    Saves    y and x
    Errors   ValueError for sizes that do not fit, TypeError and ValueError naming the argument
    Source   docs/convolution.md
    """

    class Ctx(NamedTuple):
        y: Array
        x: Array

    def __init__(self, window: Sequence[int] = (1, 1), stride: int | Sequence[int] = 1,
                 padding: int | str | Sequence[int] = 0, dilation: int | Sequence[int] = 1, groups: int = 1,
                 name: str = 'filters') -> None:
        super().__init__(stride, padding, dilation, groups)
        self.window, self.name = pair('window', window, 1), name

    def _shapes(self, y: Array, x: Array) -> Shapes:
        self.check_groups('x', x.shape[1])
        self.check_groups('y', y.shape[1])
        return self.shapes(x.shape, (y.shape[1], x.shape[1] // self.groups, *self.window))

    def forward(self, y: Array, x: Array) -> tuple[Array, Ctx]:
        axes('y', y, 'N O Ho Wo'), axes('x', x, 'N C H W')
        s = self._shapes(y, x)
        check('x', x, s.x)
        check('y', y, s.y)
        f = empty(s.weight, name=f'{self.name}.f')
        launch('fill', f, f.size, 0.0)
        launch('conv2d_backward_weight', f, None, y, x, work('conv2d_backward_weight', *s), *s)
        return f, self.Ctx(y, x)

    def backward(self, df: Array, ctx: Ctx) -> tuple[Array, Array]:
        s = self._shapes(*ctx)
        check('df', df, s.weight)
        dy, dx = empty_gradient(s.y, f'{self.name}.dy'), empty_gradient(s.x, f'{self.name}.dx')
        launch('conv2d_forward', dy, ctx.x, df, None, work('conv2d_forward', *s), *s)
        launch('conv2d_backward_x', dx, ctx.y, df, work('conv2d_backward_x', *s), *s)
        return dy, dx

    def backward_on_tensors(self, df: Tensor, ctx: Any, parameters: dict[str, Tensor]) -> TensorGradients:
        return (df.tape(Conv2d, ctx.x, weight=df, **self.settings()),
                df.tape(Conv2dTransposed, ctx.y, weight=df, size=ctx.x.shape[2:], **self.settings())), {}

    @staticmethod
    def reference(y: np.ndarray, x: np.ndarray, window: Sequence[int] = (1, 1), stride: Any = 1, padding: Any = 0,
                  dilation: Any = 1, groups: int = 1) -> np.ndarray:
        shape = y.shape[1], x.shape[1] // groups, *window
        s = _Convolution(stride, padding, dilation, groups).shapes(x.shape, shape)
        f, given = np.zeros(shape), y.reshape(s.N, groups, -1, s.Ho, s.Wo)
        for a, b, view in _taps(s, _padded(s, x)):
            f[..., a, b] = np.einsum('ngoij,ngcij->goc', given, view).reshape(shape[:2])
        return f

    @staticmethod
    def example(normal: Normal) -> Example:
        return [normal(2, 6, 4, 3), normal(2, 4, 7, 6)], dict(window=(3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 3),
                                                              groups=2)


def product_of_windows(s: dict[str, int], array: Any) -> int:
    """Return the number of operations of the product of filters and windows."""
    return 2 * s['N'] * s['O'] * s['Ho'] * s['Wo'] * math.prod((s['C'] // s['groups'], s['kh'], s['kw']))


declare(conv2d_forward=Kernel(product_of_windows), conv2d_backward_x=Kernel(product_of_windows),
        conv2d_backward_weight=Kernel(product_of_windows), conv2d_forward_double=Kernel(product_of_windows),
        conv2d_backward_x_double=Kernel(product_of_windows), conv2d_backward_weight_double=Kernel(product_of_windows))
