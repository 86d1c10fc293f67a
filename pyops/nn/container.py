"""Containers of modules.  Their manual backward calls the members in reverse order."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from pyops import functional as F
from pyops import ops
from pyops.autograd import apply
from pyops.backend import empty_gradient, launch
from pyops.nn.module import Layer, Module, Parameter, check_member_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pyops.typing import Array


def _forward_arrays(module: Module, *inputs: Any) -> tuple[Any, Any]:
    """Run a module on arrays.  A Layer's forward() adds the layer's name to errors; others only have forward_arrays()."""
    return module.forward(*inputs) if isinstance(module, Layer) else module.forward_arrays(*inputs)


def _module(module: Any) -> Module:
    if not isinstance(module, Module):
        raise TypeError(f'expected modules, one argument each, got {type(module).__name__}')
    return module


class _List(Module):
    """Base of the containers that behave as a list of members, named '0', '1', ..., or by names of their own."""
    layers: list[Any]
    _names: tuple[str, ...] = ()        # empty: the numbers
    _is_view = False                    # whether the members belong to other trees

    def _member(self, value: Any) -> Any:
        """Return a value that is given as a member.  TypeError for anything else."""
        return _module(value)

    def members(self) -> Iterator[tuple[str, Any]]:
        yield from zip(self._names or map(str, range(len(self.layers))), self.layers, strict=True)

    def build(self) -> Self:
        if not self._is_view or self._parent is not None:
            return super().build()
        for member in self.layers:
            if isinstance(member, Module):
                member.root().build()
        vars(self)['_is_built'] = True
        return self

    def _view(self, members: Sequence[tuple[str, Any]]) -> Self:
        """Return a container of this class of members that stay in their trees."""
        view = type(self).__new__(type(self))
        vars(view).update(layers=[member for _, member in members], _names=_renumbered(members), _is_view=True)
        return view                             # without __setattr__, which would move the members to a new tree

    def _change(self, change: Callable[[list[tuple[str, Any]]], Any]) -> Self:
        """Call change(members), which edits the list, and return self."""
        members = list(self.members())
        change(members)
        vars(self).update(_names=_renumbered(members), _is_view=False)
        self.layers = [member for _, member in members]         # an assignment makes them members
        return self

    def _numbered(self, values: Iterable[Any]) -> list[tuple[str, Any]]:
        return [('0', self._member(value)) for value in values]

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.layers)

    def __getitem__(self, index: Any) -> Any:
        """Return a member or, for a slice, a container of the same members."""
        return self._view(list(self.members())[index]) if isinstance(index, slice) else self.layers[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):
            self._change(lambda members: members.__setitem__(index, self._numbered(value)))
            return
        name, value = list(self.members())[index][0], self._member(value)
        self._change(lambda members: members.__setitem__(index, (name, value)))

    def __delitem__(self, index: Any) -> None:
        """Remove members; the names of the others become their numbers, as in PyTorch."""
        rest = list(self.layers)
        del rest[index]
        self._change(lambda members: members.__setitem__(slice(None), self._numbered(rest)))

    def __add__(self, other: Iterable[Any]) -> Self:
        """Return a container of the members of both, which stay members of these, too."""
        return self._view([*self.members(), *self._numbered(other)])

    def __iadd__(self, other: Iterable[Any]) -> Self:
        return self.extend(other)

    def append(self, value: Any) -> Self:
        """Add a member at the end, and return self."""
        return self.extend([value])

    def extend(self, values: Iterable[Any]) -> Self:
        """Add members at the end, and return self."""
        added = self._numbered(values)
        return self._change(lambda members: members.extend(added))

    def insert(self, index: int, value: Any) -> Self:
        """Add a member before the one at `index`, and return self."""
        (added,) = self._numbered([value])
        return self._change(lambda members: members.insert(index, added))

    def pop(self, index: int = -1) -> Any:
        """Remove a member, and return it."""
        member = self.layers[index]
        del self[index]
        return member

    def add_module(self, name: str, module: Module | None) -> None:
        """Append a module with a name of its own.  KeyError for a name that is empty, has a point or is in use."""
        if name != str(len(self)):
            check_member_name(self, name)
        if name in dict(self.members()):
            raise KeyError(f'{name}: {type(self).__name__} has a member of this name')
        added = name, self._member(module)
        self._change(lambda members: members.append(added))

    def __getattr__(self, name: str) -> Any:
        if name not in self._names:
            raise AttributeError(f'{type(self).__name__} has no attribute {name!r}')
        return dict(self.members())[name]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != '_is_view'}


def _renumbered(members: Sequence[tuple[str, Any]]) -> tuple[str, ...]:
    """Return the names of members, numbers replaced by their positions; () if all are numbers."""
    names = tuple(str(i) if name.isdigit() else name for i, (name, _) in enumerate(members))
    return () if all(map(str.isdigit, names)) else names


class ModuleList(_List):
    """A list of modules, which are members of the module that has it as an attribute.  A plain list works too."""

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        self.layers = list(map(self._member, modules))


class ParameterList(_List):
    """A list of Parameters; Tensors and arrays become Parameters.  A plain list of Parameters works too."""

    def __init__(self, values: Iterable[Any] = ()) -> None:
        self.layers = list(map(self._member, values))

    def _member(self, value: Any) -> Parameter:
        return value if isinstance(value, Parameter) else Parameter(value)


class _Dict(Module):
    """Base of the containers that behave as a dict of members by name."""
    _by_name: dict[str, Any]

    def _member(self, value: Any) -> Any:
        return _module(value)

    def __init__(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> None:
        self._by_name = {}
        self.update(values)

    def members(self) -> Iterator[tuple[str, Any]]:
        yield from self._by_name.items()

    def add_module(self, name: str, module: Module | None) -> None:
        """Add a module."""
        self.update({name: module})                     # type: ignore[dict-item]

    def update(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Add members; one with the same name is replaced."""
        given = {name: self._member(value) for name, value in dict(values).items()}
        for name in given:
            if not isinstance(name, str) or not name or '.' in name:
                raise ValueError(f'{type(self).__name__}: expected names without a point, got {name!r}')
        self._by_name = {**self._by_name, **given}

    def clear(self) -> None:
        """Remove all members."""
        self._by_name = {}

    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def __delitem__(self, name: str) -> None:
        self.pop(name)

    def pop(self, name: str) -> Any:
        """Remove a member, and return it."""
        rest = dict(self._by_name)
        member = rest.pop(name)
        self._by_name = rest
        return member

    def __getitem__(self, name: str) -> Any:
        return self._by_name[name]

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def keys(self) -> Any:
        return self._by_name.keys()

    def values(self) -> Any:
        return self._by_name.values()

    def items(self) -> Any:
        return self._by_name.items()


class ModuleDict(_Dict):
    """A dict of modules by name, which are members of the module that has it as an attribute.  A plain dict works too."""


class ParameterDict(_Dict):
    """A dict of Parameters by name; Tensors and arrays become Parameters.  A plain dict of Parameters works too."""

    def _member(self, value: Any) -> Parameter:
        return value if isinstance(value, Parameter) else Parameter(value)


class Sequential(_List, Layer):
    """Run modules in sequence; their names are '0', '1', ..., or the names of a dict, given as the only argument."""
    seed: int | None = 0

    def __init__(self, *modules: Any) -> None:
        named = dict(modules[0]) if len(modules) == 1 and isinstance(modules[0], dict) else None
        for name in named or ():
            check_member_name(self, name)
        if named is not None:
            vars(self)['_names'] = _renumbered(list(named.items()))
        self.layers = list(map(self._member, modules if named is None else named.values()))

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

    @property
    def fn(self) -> Module:
        """The module, by the needle course's name."""
        return self.module

    def forward_tensors(self, x: Any) -> Any:
        y = self.module(x)
        return x + y if F.is_double(x) else apply(self._op(), x, y)

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
