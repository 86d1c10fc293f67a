"""Containers of modules.  Their manual backward calls the members in reverse order."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyops import ops
from pyops.autograd import apply
from pyops.backend import empty_gradient, launch
from pyops.nn.module import Layer, Module

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyops.typing import Array


def _forward_arrays(module: Module, *inputs: Any) -> tuple[Any, Any]:
    """Run a module on arrays.  A Layer's forward() adds the layer's name to errors; others only have forward_arrays()."""
    return module.forward(*inputs) if isinstance(module, Layer) else module.forward_arrays(*inputs)


def _module(module: Any) -> Module:
    if not isinstance(module, Module):
        raise TypeError(f'expected modules, one argument each, got {type(module).__name__}')
    return module


class Sequential(Layer):
    """Run modules in sequence; their names are '0', '1', ..."""
    seed: int | None = 0

    def __init__(self, *modules: Module) -> None:
        self.layers = list(map(_module, modules))

    def members(self) -> Iterator[tuple[str, Module]]:
        for i, module in enumerate(self.layers):
            yield str(i), module

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Module]:
        return iter(self.layers)

    def __getitem__(self, index: Any) -> Any:
        return self.layers[index]

    def forward_tensors(self, x: Any) -> Any:
        for module in self.layers:
            x = module(x)
        return x

    def forward_arrays(self, x: Any) -> tuple[Any, Any]:
        ctx = []
        for module in self.layers:
            x, c = _forward_arrays(module, x)
            ctx.append(c)
        return x, ctx

    def backward(self, dy: Array, ctx: Any) -> Any:
        for module in reversed(self.layers):
            dy = module.backward(dy, ctx.pop())
        return dy


class Residual(Layer):
    """y = x + module(x)"""
    seed: int | None = 0

    def __init__(self, module: Module) -> None:
        self.module = _module(module)

    def forward_tensors(self, x: Any) -> Any:
        return apply(self._op(), x, self.module(x))

    def _op(self) -> ops.Residual:
        return ops.Residual(name=self._path or 'residual')

    def forward_arrays(self, x: Any) -> tuple[Any, Any]:
        branch, c = _forward_arrays(self.module, x)
        y, _ = self._op().forward(x, branch)
        return y, c

    def backward(self, dy: Array, ctx: Any) -> Any:
        dbranch = self.module.backward(dy, ctx)
        dx = empty_gradient(dy.shape, f'{self._path or "residual"}.dx')
        launch('residual', dx, dy, dbranch, None, dx.size, 0.0, 0)
        return dx
