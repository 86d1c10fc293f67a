"""Lazy layers: the first call finds the size of the input, and turns the layer into the one that its name ends with."""
from __future__ import annotations

import inspect
from typing import Any

from pyops.nn.layers import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    Linear,
)
from pyops.nn.module import Layer


class _Lazy(Layer):
    """Base of lazy layers.  KIND: the class of the layer;  AXIS: the axis of x whose size is its first argument.

    It takes the arguments of KIND without the first.  parameters() of a tree with a lazy layer is a ValueError.
    """
    KIND: type[Layer]
    AXIS = 1
    is_lazy = True

    def __init_subclass__(cls, kind: type[Layer] = Layer, axis: int = 1) -> None:
        super().__init_subclass__()
        cls.KIND, cls.AXIS = kind, axis

    def __init__(self, *args: Any, device: Any = None, dtype: Any = None, **named: Any) -> None:
        place = {name: value for name, value in (('device', device), ('dtype', dtype)) if value is not None}
        inspect.signature(self.KIND.__init__).bind(self, 1, *args, **named)        # a TypeError now, not in the first call
        self._arguments, self._by_name = args, {**named, **place}

    def has_uninitialized_params(self) -> bool:
        """Return True: there was no call so far."""
        return True

    def initialize_parameters(self, x: Any) -> None:
        """Become the layer for inputs such as x."""
        if len(x.shape) <= max(self.AXIS, 0):
            raise ValueError(f'x: expected axis {self.AXIS}, got shape {x.shape}')
        made = self.KIND(x.shape[self.AXIS], *self._arguments, **self._by_name)
        del self._arguments, self._by_name
        self.__class__ = self.KIND                      # type: ignore[assignment]
        for name, value in vars(made).items():
            if name not in vars(self):                  # seed, hooks and place in the tree stay
                setattr(self, name, value)
        self.root().build()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        self._naming(self.initialize_parameters, *inputs[:1])
        return self.forward(*inputs, **named)           # of the class that it is now

    def settings(self) -> str:
        return ', '.join([*map(repr, self._arguments), *(f'{name}={value!r}' for name, value in self._by_name.items())])


class LazyLinear(_Lazy, kind=Linear, axis=-1):
    """Linear without in_features, the size of the last axis of x in the first call."""


class LazyConv1d(_Lazy, kind=Conv1d):
    """Conv1d without in_channels, the size of axis 1 of x in the first call."""


class LazyConv2d(_Lazy, kind=Conv2d):
    """Conv2d without in_channels, the size of axis 1 of x in the first call."""


class LazyConv3d(_Lazy, kind=Conv3d):
    """Conv3d without in_channels, the size of axis 1 of x in the first call."""


class LazyConvTranspose1d(_Lazy, kind=ConvTranspose1d):
    """ConvTranspose1d without in_channels, the size of axis 1 of x in the first call."""


class LazyConvTranspose2d(_Lazy, kind=ConvTranspose2d):
    """ConvTranspose2d without in_channels, the size of axis 1 of x in the first call."""


class LazyConvTranspose3d(_Lazy, kind=ConvTranspose3d):
    """ConvTranspose3d without in_channels, the size of axis 1 of x in the first call."""


class LazyBatchNorm1d(_Lazy, kind=BatchNorm1d):
    """BatchNorm1d without num_features, the size of axis 1 of x in the first call."""


class LazyBatchNorm2d(_Lazy, kind=BatchNorm2d):
    """BatchNorm2d without num_features, the size of axis 1 of x in the first call."""


class LazyBatchNorm3d(_Lazy, kind=BatchNorm3d):
    """BatchNorm3d without num_features, the size of axis 1 of x in the first call."""


class LazyInstanceNorm1d(_Lazy, kind=InstanceNorm1d):
    """InstanceNorm1d without num_features, the size of axis 1 of x in the first call."""


class LazyInstanceNorm2d(_Lazy, kind=InstanceNorm2d):
    """InstanceNorm2d without num_features, the size of axis 1 of x in the first call."""


class LazyInstanceNorm3d(_Lazy, kind=InstanceNorm3d):
    """InstanceNorm3d without num_features, the size of axis 1 of x in the first call."""
