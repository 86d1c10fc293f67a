"""MaxPool2d and AvgPool2d: the maximum and the average of each window of an image."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops.backend import axes, check, empty, empty_gradient, launch
from pyops.backend.kernels import Kernel, declare
from pyops.ops.convolution import pair, positions

if TYPE_CHECKING:
    from pyops.typing import Array, Example, Normal, Shape


class _Pool:
    """The settings that both share.  kernel_size, stride, padding, dilation: an int or a pair; stride None: kernel_size.

    ceil_mode: round the number of windows up, so that the last one may reach beyond the padding, but starts before it ends.
    """

    def __init__(self, kernel_size: int | Sequence[int], stride: int | Sequence[int] | None, padding: int | Sequence[int],
                 dilation: int | Sequence[int], ceil_mode: bool, name: str) -> None:
        self.kernel_size, self.ceil_mode, self.name = pair('kernel_size', kernel_size, 1), ceil_mode, name
        self.stride = self.kernel_size if stride is None else pair('stride', stride, 1)
        self.padding, self.dilation = pair('padding', padding, 0), pair('dilation', dilation, 1)
        if any(2 * p > k for p, k in zip(self.padding, self.kernel_size, strict=True)):
            raise ValueError(f'padding: expected at most half of the window {self.kernel_size}, got {padding}')

    def places(self, shape: Shape) -> tuple[int, int]:
        """Return (Ho, Wo) for x of this shape.  ValueError if no window fits."""
        settings = shape[2:], self.kernel_size, self.stride, self.padding, self.dilation
        rows, cols = map(self._rounded_up if self.ceil_mode else positions, *settings)
        if rows < 1 or cols < 1:
            raise ValueError(f'{self.name}: a window of {self.kernel_size} with dilation {self.dilation} does not fit into '
                             f'{tuple(shape[2:])} with padding {self.padding}')
        return rows, cols

    @staticmethod
    def _rounded_up(size: int, window: int, stride: int, padding: int, dilation: int) -> int:
        count = -(-(size + 2 * padding - dilation * (window - 1) - 1) // stride) + 1
        return count - ((count - 1) * stride >= size + padding)         # none starts in the padding at the end

    def sizes(self, shape: Shape) -> tuple[int, ...]:
        """Return the sizes in the order of the header, without dilation."""
        N, C, H, W = shape
        return (N * C, H, W, *self.places(shape), *self.kernel_size, *self.stride, *self.padding)

    def windows(self, x: np.ndarray, around: float, beyond: float) -> Iterator[np.ndarray]:
        """Yield x (N, C, H, W) shifted by each element of the window, as (N, C, Ho, Wo), with the value `around` in the padding
        and the value `beyond` after it."""
        (rows, cols), (sh, sw) = self.places(x.shape), self.stride
        reach = [k * d for k, d in zip(self.kernel_size, self.dilation, strict=True)]
        x = np.pad(x, ((0, 0), (0, 0), *((p, p) for p in self.padding)), constant_values=around)
        x = np.pad(x, ((0, 0), (0, 0), *((0, n) for n in reach)), constant_values=beyond)
        for a, b in np.ndindex(*self.kernel_size):
            top, left = a * self.dilation[0], b * self.dilation[1]
            yield x[:, :, top:top + sh * (rows - 1) + 1:sh, left:left + sw * (cols - 1) + 1:sw]


class MaxPool2d(_Pool):
    """Take the maximum of each window.

    Shapes   x, dx (N, C, H, W);  y, dy (N, C, Ho, Wo)
    Forward  y[n, c, i, j] = max_a,b x[n, c, i s + a d - p, j s + b d - p], for a window inside x;  NaN if one is NaN
    Backward dx = sum of dy over the windows whose maximum the element is, the first of equal ones
    Saves    the position of each maximum, int32
    Errors   ValueError for sizes that do not fit; TypeError and ValueError naming the argument
    Source   a plain definition
    """

    class Ctx(NamedTuple):
        shape: Shape
        maxima: Array

    def __init__(self, kernel_size: int | Sequence[int], stride: int | Sequence[int] | None = None,
                 padding: int | Sequence[int] = 0, dilation: int | Sequence[int] = 1, ceil_mode: bool = False,
                 name: str = 'max_pool2d') -> None:
        super().__init__(kernel_size, stride, padding, dilation, ceil_mode, name)

    def forward(self, x: Array) -> tuple[Array, Ctx]:
        check('x', x, axes('x', x, 'N C H W'))
        shape = *x.shape[:2], *self.places(x.shape)
        y, index = empty(shape, name=f'{self.name}.y'), empty(shape, np.int32, f'{self.name}.index')
        launch('max_pool2d_forward', y, index, x, *self.sizes(x.shape), *self.dilation)
        return y, self.Ctx(x.shape, index)

    def backward(self, dy: Array, ctx: Ctx) -> Array:
        check('dy', dy, ctx.maxima.shape)
        dx = empty_gradient(ctx.shape, f'{self.name}.dx')
        launch('max_pool2d_backward', dx, dy, ctx.maxima, *self.sizes(ctx.shape), *self.dilation)
        return dx

    @staticmethod
    def reference(x: np.ndarray, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
                  ceil_mode: bool = False) -> np.ndarray:
        op = MaxPool2d(kernel_size, stride, padding, dilation, ceil_mode)
        return np.max([*op.windows(x, -np.inf, -np.inf)], 0)

    @staticmethod
    def example(normal: Normal) -> Example:
        return [normal(2, 3, 7, 6)], dict(kernel_size=(3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2))


class AvgPool2d(_Pool):
    """Take the average of each window.

    Shapes   x, dx (N, C, H, W);  y, dy (N, C, Ho, Wo)
    Forward  y[n, c, i, j] = sum_a,b x[n, c, i s + a - p, j s + b - p] / n, over the window inside x
             n: the elements of the window inside x, with count_include_pad also those inside the padding
    Backward dx = sum of dy / n over the windows that contain the element
    Saves    nothing
    Errors   ValueError for sizes that do not fit; TypeError and ValueError naming the argument
    Source   a plain definition
    """

    class Ctx(NamedTuple):
        shape: Shape

    def __init__(self, kernel_size: int | Sequence[int], stride: int | Sequence[int] | None = None,
                 padding: int | Sequence[int] = 0, ceil_mode: bool = False, count_include_pad: bool = True,
                 name: str = 'avg_pool2d') -> None:
        super().__init__(kernel_size, stride, padding, 1, ceil_mode, name)
        self.count_include_pad = count_include_pad

    def forward(self, x: Array) -> tuple[Array, Ctx]:
        check('x', x, axes('x', x, 'N C H W'))
        y = empty((*x.shape[:2], *self.places(x.shape)), name=f'{self.name}.y')
        launch('avg_pool2d_forward', y, x, *self.sizes(x.shape), self.count_include_pad)
        return y, self.Ctx(x.shape)

    def backward(self, dy: Array, ctx: Ctx) -> Array:
        check('dy', dy, (*ctx.shape[:2], *self.places(ctx.shape)))
        dx = empty_gradient(ctx.shape, f'{self.name}.dx')
        launch('avg_pool2d_backward', dx, dy, *self.sizes(ctx.shape), self.count_include_pad)
        return dx

    @staticmethod
    def reference(x: np.ndarray, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
                  count_include_pad: bool = True) -> np.ndarray:
        op = AvgPool2d(kernel_size, stride, padding, ceil_mode)
        counted = np.sum([*op.windows(np.ones_like(x), count_include_pad, 0)], 0)
        return np.sum([*op.windows(x, 0, 0)], 0) / counted

    @staticmethod
    def example(normal: Normal) -> Example:
        return [normal(2, 3, 7, 6)], dict(kernel_size=(3, 2), stride=(2, 1), padding=(1, 0), count_include_pad=False)


declare(**{f'{kind}_pool2d_{way}{suffix}': Kernel() for kind in ('max', 'avg') for way in ('forward', 'backward')
           for suffix in ('', '_double')})
