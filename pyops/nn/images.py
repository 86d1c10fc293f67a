"""Layers of images and sequences without parameters: adaptive pooling, padding, resizing, windows as columns."""
from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from pyops import functional as F
from pyops.nn.module import FunctionLayer, Layer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyops.autograd import Tensor


class AdaptiveAvgPool2d(FunctionLayer, function=F.adaptive_avg_pool2d, output_size=...):
    """The averages of output_size windows per axis: x (N, C, H, W) -> (N, C, Ho, Wo).

    output_size: an int or a pair, in which None is the size of x.
    """


class AdaptiveAvgPool1d(FunctionLayer, function=F.adaptive_avg_pool1d, output_size=...):
    """The averages of output_size windows: x (N, C, L) -> (N, C, output_size)."""


class AdaptiveMaxPool2d(FunctionLayer, function=F.adaptive_max_pool2d, output_size=...):
    """The maxima of output_size windows per axis: x (N, C, H, W) -> (N, C, Ho, Wo)."""


class AdaptiveMaxPool1d(FunctionLayer, function=F.adaptive_max_pool1d, output_size=...):
    """The maxima of output_size windows: x (N, C, L) -> (N, C, output_size)."""


class AdaptiveAvgPool3d(FunctionLayer, function=F.adaptive_avg_pool3d, output_size=...):
    """The averages of output_size windows per axis: x (N, C, D, H, W) -> (N, C, Do, Ho, Wo)."""


class AdaptiveMaxPool3d(FunctionLayer, function=F.adaptive_max_pool3d, output_size=...):
    """The maxima of output_size windows per axis: x (N, C, D, H, W) -> (N, C, Do, Ho, Wo)."""


class LPPool1d(FunctionLayer, function=F.lp_pool1d, norm_type=..., kernel_size=..., stride=None, ceil_mode=False):
    """(sum x^norm_type)^(1 / norm_type) of each window: x (N, C, L) -> (N, C, Lo)."""


class LPPool2d(FunctionLayer, function=F.lp_pool2d, norm_type=..., kernel_size=..., stride=None, ceil_mode=False):
    """(sum x^norm_type)^(1 / norm_type) of each window: x (N, C, H, W) -> (N, C, Ho, Wo)."""


class LPPool3d(FunctionLayer, function=F.lp_pool3d, norm_type=..., kernel_size=..., stride=None, ceil_mode=False):
    """(sum x^norm_type)^(1 / norm_type) of each window: x (N, C, D, H, W) -> (N, C, Do, Ho, Wo)."""


class MaxPool3d(FunctionLayer, function=F.max_pool3d, kernel_size=..., stride=None, padding=0, dilation=1, return_indices=False,
                ceil_mode=False):
    """The maximum of each window: x (N, C, D, H, W) -> (N, C, Do, Ho, Wo).  return_indices: False."""


class AvgPool3d(FunctionLayer, function=F.avg_pool3d, kernel_size=..., stride=None, padding=0, ceil_mode=False,
                count_include_pad=True):
    """The average of each window: x (N, C, D, H, W) -> (N, C, Do, Ho, Wo)."""


class MaxUnpool2d(FunctionLayer, function=F.max_unpool2d, kernel_size=..., stride=None, padding=0):
    """Write maxima to the positions from MaxPool2d(return_indices=True): unpool(x, indices, output_size=(H, W))."""

    def forward_tensors(self, x: Tensor, indices: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        settings = [getattr(self, name) for name in self._arguments.parameters]
        return self.function(x, indices, *settings, output_size)


class MaxUnpool1d(MaxUnpool2d, function=F.max_unpool1d, kernel_size=..., stride=None, padding=0):
    """MaxUnpool2d of sequences."""


class LocalResponseNorm(FunctionLayer, function=F.local_response_norm, size=..., alpha=1e-4, beta=0.75, k=1.0):
    """x / (k + alpha * mean of squares over `size` neighbouring channels)^beta;  x (N, C, ...)."""


class Unfold(FunctionLayer, function=F.unfold, kernel_size=..., dilation=1, padding=0, stride=1):
    """The windows of images as columns: x (N, C, H, W) -> (N, C kh kw, Ho Wo)."""


class Fold(FunctionLayer, function=F.fold, output_size=..., kernel_size=..., dilation=1, padding=0, stride=1):
    """Add columns where Unfold found them: x (N, C kh kw, Ho Wo) -> (N, C, H, W), with (H, W) = output_size."""


class PixelShuffle(FunctionLayer, function=F.pixel_shuffle, upscale_factor=...):
    """Move channels into space: x (N, C r^2, H, W) -> (N, C, H r, W r) for r = upscale_factor."""


class PixelUnshuffle(FunctionLayer, function=F.pixel_unshuffle, downscale_factor=...):
    """Move space into channels: the inverse of PixelShuffle."""


class ChannelShuffle(FunctionLayer, function=F.channel_shuffle, groups=...):
    """The channels of `groups` groups in turns: one of each, then the next of each."""


class Upsample(FunctionLayer, function=F.interpolate, size=None, scale_factor=None, mode='nearest', align_corners=None):
    """Resize the axes after the channels, to a size or by a factor.  See F.interpolate."""


class UpsamplingNearest2d(FunctionLayer, function=F.interpolate, size=None, scale_factor=None):
    """Resize images (N, C, H, W) by repeating elements."""


class UpsamplingBilinear2d(FunctionLayer, function=functools.partial(F.interpolate, mode='bilinear', align_corners=True),
                           size=None, scale_factor=None):
    """Resize images (N, C, H, W) by weighted sums of neighbours; the outermost elements coincide."""


class _Padding(Layer):
    """Base of the padding layers.  padding: an int for all sides, or (before, after) of the last axis, then of the other."""
    AXES, MODE = 1, 'constant'
    value: float | None = None

    def __init__(self, padding: int | Sequence[int]) -> None:
        sides = (padding,) * (2 * self.AXES) if isinstance(padding, int) else tuple(padding)
        if len(sides) != 2 * self.AXES:
            raise ValueError(f'{type(self).__name__}: padding: expected an int or {2 * self.AXES} of them, got {padding}')
        self.padding = sides

    def forward_tensors(self, x: Tensor) -> Tensor:
        return F.pad(x, self.padding, self.MODE, self.value)

    def settings(self) -> str:
        return f'{self.padding}{"" if self.value is None else f", value={self.value}"}'


class _ConstantPadding(_Padding):
    def __init__(self, padding: int | Sequence[int], value: float) -> None:
        super().__init__(padding)
        self.value = value


class ConstantPad1d(_ConstantPadding):
    """Pad sequences (N, C, L) with a number."""


class ConstantPad2d(_ConstantPadding):
    """Pad images (N, C, H, W) with a number."""
    AXES = 2


class ConstantPad3d(_ConstantPadding):
    """Pad volumes (N, C, D, H, W) with a number."""
    AXES = 3


class ZeroPad1d(_Padding):
    """Pad sequences (N, C, L) with zeros."""


class ZeroPad2d(_Padding):
    """Pad images (N, C, H, W) with zeros."""
    AXES = 2


class ZeroPad3d(_Padding):
    """Pad volumes (N, C, D, H, W) with zeros."""
    AXES = 3


class ReflectionPad1d(_Padding):
    """Pad sequences (N, C, L) with elements mirrored at the outermost."""
    MODE = 'reflect'


class ReflectionPad2d(ReflectionPad1d):
    """Pad images (N, C, H, W) with elements mirrored at the outermost."""
    AXES = 2


class ReflectionPad3d(ReflectionPad1d):
    """Pad volumes (N, C, D, H, W) with elements mirrored at the outermost."""
    AXES = 3


class ReplicationPad1d(_Padding):
    """Pad sequences (N, C, L) with the outermost elements."""
    MODE = 'replicate'


class ReplicationPad2d(ReplicationPad1d):
    """Pad images (N, C, H, W) with the outermost elements."""
    AXES = 2


class ReplicationPad3d(ReplicationPad1d):
    """Pad volumes (N, C, D, H, W) with the outermost elements."""
    AXES = 3


class CircularPad1d(_Padding):
    """Pad sequences (N, C, L) with elements of their other end."""
    MODE = 'circular'


class CircularPad2d(CircularPad1d):
    """Pad images (N, C, H, W) with elements of their other end."""
    AXES = 2


class CircularPad3d(CircularPad1d):
    """Pad volumes (N, C, D, H, W) with elements of their other end."""
    AXES = 3
