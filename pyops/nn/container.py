"""Containers of modules.  Their manual backward calls the members in reverse order."""
from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Self

from pyops import ops
from pyops.autograd import apply
from pyops.backend import empty_gradient, launch
from pyops.nn.module import Layer, Module

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pyops.typing import Array


def _forward_arrays(module: Module, *inputs: Any) -> tuple[Any, Any]:
    """Run a module on arrays.  A Layer's forward() adds the layer's name to errors; others only have forward_arrays()."""
    return module.forward(*inputs) if isinstance(module, Layer) else module.forward_arrays(*inputs)


def _module(module: Any) -> Module:
    if not isinstance(module, Module):
        raise TypeError(f'expected modules, one argument each, got {type(module).__name__}')
    return module


class _Modules(Module):
    """Base of the containers that behave as a list of modules, named '0', '1', ..."""
    layers: list[Module]

    def members(self) -> Iterator[tuple[str, Module]]:
        for i, module in enumerate(self.layers):
            yield str(i), module

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Module]:
        return iter(self.layers)

    def __getitem__(self, index: Any) -> Any:
        """Return a module or, for a slice, a list of them."""
        return self.layers[index]

    def __setitem__(self, index: int, module: Module) -> None:
        layers = list(self.layers)
        layers[operator.index(index)] = _module(module)
        self.layers = layers                    # an assignment of an attribute makes the modules members

    def __delitem__(self, index: Any) -> None:
        layers = list(self.layers)
        del layers[index]
        self.layers = layers

    def append(self, module: Module) -> Self:
        """Add a module at the end, and return self."""
        return self.extend([module])

    def extend(self, modules: Iterable[Module]) -> Self:
        """Add modules at the end, and return self."""
        self.layers = [*self.layers, *map(_module, modules)]
        return self

    def insert(self, index: int, module: Module) -> Self:
        """Add a module before the one at `index`, and return self."""
        layers = list(self.layers)
        layers.insert(index, _module(module))
        self.layers = layers
        return self

    def pop(self, index: int = -1) -> Module:
        """Remove a module, and return it."""
        module = self.layers[index]
        del self[index]
        return module


    def add_module(self, name: str, module: Module | None) -> None:
        """Append a module.  KeyError unless its name is the next number."""
        if name != str(len(self)):
            raise KeyError(f'{name!r}: expected {str(len(self))!r}: {type(self).__name__} names its modules by number')
        self.append(_module(module))


class ModuleList(_Modules):
    """A list of modules, which are members of the module that has it as an attribute.  A plain list works too."""

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        self.layers = list(map(_module, modules))


class ModuleDict(Module):
    """A dict of modules by name, which are members of the module that has it as an attribute.  A plain dict works too."""

    def __init__(self, modules: Mapping[str, Module] | Iterable[tuple[str, Module]] = ()) -> None:
        self.modules_by_name: dict[str, Module] = {}
        self.update(modules)

    def members(self) -> Iterator[tuple[str, Module]]:
        yield from self.modules_by_name.items()

    def add_module(self, name: str, module: Module | None) -> None:
        """Add a module."""
        self.update({name: _module(module)})

    def update(self, modules: Mapping[str, Module] | Iterable[tuple[str, Module]]) -> None:
        """Add modules; a module with the same name is replaced."""
        given = {name: _module(module) for name, module in dict(modules).items()}
        for name in given:
            if not isinstance(name, str) or not name or '.' in name:
                raise ValueError(f'ModuleDict: expected names without a point, got {name!r}')
        self.modules_by_name = {**self.modules_by_name, **given}

    def __setitem__(self, name: str, module: Module) -> None:
        self.update({name: module})

    def __delitem__(self, name: str) -> None:
        self.pop(name)

    def pop(self, name: str) -> Module:
        """Remove a module, and return it."""
        rest = dict(self.modules_by_name)
        module = rest.pop(name)
        self.modules_by_name = rest
        return module

    def __getitem__(self, name: str) -> Any:
        return self.modules_by_name[name]

    def __len__(self) -> int:
        return len(self.modules_by_name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.modules_by_name)

    def __contains__(self, name: object) -> bool:
        return name in self.modules_by_name

    def keys(self) -> Any:
        return self.modules_by_name.keys()

    def values(self) -> Any:
        return self.modules_by_name.values()

    def items(self) -> Any:
        return self.modules_by_name.items()


class Sequential(_Modules, Layer):
    """Run modules in sequence; their names are '0', '1', ..."""
    seed: int | None = 0

    def __init__(self, *modules: Module) -> None:
        self.layers = list(map(_module, modules))

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
