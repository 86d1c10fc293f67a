"""Module and Parameter: a tree of layers whose parameters share one flat buffer and are named by their path in the tree.

A name is known only once the tree is complete, so memory is allocated and initialised when the tree is first used: when it
is called or its parameters are requested.  An initial value is a function of (seed, name, shape) alone, independent of the
order of construction.  The layout of the buffer follows the names, so training is reproducible bit by bit.
"""
from __future__ import annotations

import copy
import functools
import inspect
import operator
import re
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import numpy as np

from pyops import autograd, backend, ndarray
from pyops.autograd import Tensor
from pyops.autograd.tape import gradient_for
from pyops.errors import DtypeError, ShapeError, StateError
from pyops.functional import is_double
from pyops.hooks import Hook
from pyops.methods import DEVICE_NAMES, Methods, numpy_dtype
from pyops.ndarray import NDArray
from pyops.params import Parameters, Spec, generator, next_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from numpy.typing import DTypeLike

    from pyops import params
    from pyops.typing import Array, Init, Numbers, Shape

_ALONE = 'parameter'        # name of a parameter outside any module
COUNT = 'num_batches_tracked'       # a buffer of batch norms in host memory; kernels, plans and checkpoints do not have it
T = TypeVar('T')


class Members(list[T]):
    """A list that next() reads too, as it reads PyTorch's generators.  After next(members), a loop yields the rest."""
    _rest: Iterator[T] | None = None

    def __iter__(self) -> Iterator[T]:
        return super().__iter__() if self._rest is None else self._rest

    def __next__(self) -> T:
        self._rest = iter(self)
        return next(self._rest)


class LoadedState(NamedTuple):
    """What Module.load_state_dict found: names that the state lacks, and names that the module lacks."""
    missing_keys: list[str]
    unexpected_keys: list[str]


class Parameter(Tensor):
    """A named, trainable Tensor of a Module.

    Parameter(shape, init)      init(generator, shape) -> float32 array, as in pyops.init; called when the tree is first used
    Parameter(data)             starts as a copy of the numbers `data`
    requires_grad               False: it is not trained
    dtype                       float32 or float64; None: the dtype of data if that is an array of pyops, else float32

    A parameter outside any module also works: it has its own memory, and the name 'parameter'.
    .grad is a view of the flat gradient buffer: zeros before the first backward, which adds to it.  It is None while
    requires_grad is off.
    """
    __slots__ = ('name', 'home', 'entry', 'init', '_shape', '_dtype', '_array', '_gradient', '_owner', '_drawn', '_seed',
                 '_given')
    name: str | None            # this and the next two are None until the tree is first used
    home: Any                   # the pyops.params.Parameters with its memory
    entry: Any                  # its pyops.params.Parameter
    _array: Any
    _gradient: Any
    _drawn: Any
    _given: Any

    def __init__(self, data: Numbers | None = None, init: Init | bool | None = None, requires_grad: bool = True, *,
                 shape: Shape | None = None, dtype: DTypeLike | None = None) -> None:
        if isinstance(init, bool):                              # PyTorch's second argument
            requires_grad, init = init, None
        if (data is None) == (shape is None):
            raise TypeError('Parameter: expected data, or a shape and an init')
        if dtype is None:
            dtype = data.dtype if isinstance(data, Tensor | NDArray) and data.dtype == np.float64 else np.float32
        self._dtype = _float_dtype('Parameter', dtype)
        if init is None:
            values = _numbers(data if shape is None else shape, self._dtype)
            shape, init = values.shape, lambda generator, shape: values
        elif shape is None:
            shape = data                                        # type: ignore[assignment]
        self._shape, self.init = tuple(map(operator.index, shape)), init        # type: ignore[arg-type]
        if min(self._shape, default=1) < 1:
            raise ValueError(f'Parameter: shape {self._shape}: expected sizes of 1 or more')
        self.name = self.home = self.entry = self._array = self._gradient = self._owner = self._drawn = self._given = None
        self.origin, self.requires_grad, self._seed, self._calls = None, bool(requires_grad), next_key('parameter'), {}

    @property
    def shape(self) -> Shape:
        return self._shape

    @property
    def dtype(self) -> np.dtype:
        return self._dtype

    @property
    def array(self) -> NDArray:
        if self._array is None:
            self._settle()
        return self._array

    @array.setter
    def array(self, value: NDArray) -> None:
        self._settle()
        self.entry.value[...] = value.device.kernel_array(value)
        self._array.buffer.version += 1

    @property
    def grad(self) -> Tensor | None:
        if self._array is None:
            self._settle()
        return self._gradient if self.requires_grad else None

    @grad.setter
    def grad(self, value: Numbers | None) -> None:
        self._settle()
        if value is None:
            self.entry.grad[...] = 0
            return
        value = gradient_for(self, value)
        if value.array is not self._gradient.array:
            self.entry.grad[...] = value.device.kernel_array(value.array)

    def zero_grad(self) -> None:
        self.grad = None

    def share_memory_(self) -> Self:
        """Raise TypeError: the elements of parameters are part of one flat buffer."""
        raise TypeError('share_memory_: expected a Tensor, got a Parameter, whose elements are part of one flat buffer; share '
                        'parameter.detach().clone(), and copy it back')

    def flat_parameter(self) -> params.Parameter:
        """Return the pyops.params.Parameter, the form that op classes take."""
        self._settle()
        return self.entry

    def _settle(self) -> None:
        if self._array is None:
            owner = _up(self._owner)
            if owner is None:
                self._bind(Parameters({_ALONE: Spec(self.shape, self.init)}, self._seed, self._dtype), _ALONE)
            else:
                owner.root().build()

    def _bind(self, home: Parameters, name: str) -> None:
        self.home, self.name, self.entry, self._drawn = home, name, home[name], (home.seed, name)
        self._array = ndarray.as_ndarray(self.entry.value)
        self._gradient = Tensor(ndarray.as_ndarray(self.entry.grad))
        if self._given is not None:
            self.assign(self._given)

    def assign(self, values: Numbers) -> None:
        """Copy an array, a Tensor or nested lists of the same shape into the parameter; its memory and name do not change."""
        if isinstance(values, Tensor) and values.origin is not None:
            raise TypeError(f'got the result of {values.origin[0].name}, whose history would be lost; assign its detach()')
        values = _numbers(values, self._dtype)
        if values.shape != self.shape:
            raise ValueError(f'expected shape {self.shape}, got {values.shape}')
        if self._array is None:
            self._given = values            # assigned once the tree is complete
        else:
            self.array, self._given = ndarray.from_numpy(values), None

    def _draw(self, seed: Any, name: Any) -> None:
        """Set the initial value of (seed, name)."""
        self._drawn, self.array = (seed, name), ndarray.from_numpy(self.init(generator(seed, name), self.shape))

    def _move(self, home: Parameters, name: str) -> None:
        """Move value and gradient to memory of another dtype."""
        drawn, before = self._drawn, self.entry
        self._dtype = home.dtype
        self._bind(home, name)
        self._drawn = drawn
        self.entry.value[...], self.entry.grad[...] = before.value, before.grad

    def _is_untouched(self) -> bool:
        return (backend.get(self.entry.value) == self.init(generator(*self._drawn), self.shape)).all()

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        dtype = self._dtype
        twin = memo[id(self)] = (Parameter(self.shape, self.init, dtype=dtype) if self._array is None else
                                 Parameter(self, dtype=dtype))
        twin.requires_grad, twin._given, twin._seed = self.requires_grad, self._given, self._seed
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickle: the result has the current values, and no other part of the tree."""
        return _restored_parameter, (np.array(self.numpy()), self.requires_grad)

    def __repr__(self) -> str:
        return f'Parameter {self.name or "without a name"} of shape {self.shape}'


def _restored_parameter(values: np.ndarray, requires_grad: bool) -> Parameter:
    """Return the Parameter that Parameter.__reduce__ describes."""
    return Parameter(values, None, requires_grad, dtype=values.dtype)


class Module:
    """A layer, or a model made of layers.  Attributes that are Modules or Parameters, also inside lists, tuples and dicts,
    are its members.  A subclass defines forward(x, ...) on Tensors; call it as y = module(x).

    training    True during training, which layers such as Dropout consult; train() and eval() set it for the whole tree
    seed        seed of the initial values, set by reset_parameters(seed), else 0; see Layer for layers outside any module
    """
    training = True
    is_lazy = False                     # whether the first call adds parameters; see pyops/nn/lazy.py
    seed: int | None = 0
    _parent: Any = None
    _path: str | None = None
    _is_built = False
    _hooks: tuple[dict[int, Any], ...] | None = None            # before and after forward, after backward
    _gates: list[_Gate] | None = None                           # of calls that are running, for the hooks after backward

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if self._hooks:
            inputs, named = self._hooked_inputs(inputs, named)
        if not self._is_built:
            self.root().build()
        y = self.forward(*inputs, **named)
        return self._hooked_output(inputs, named, y) if self._hooks else y

    def forward(self, *inputs: Any) -> Any:
        raise NotImplementedError(f'{type(self).__name__}.forward(x)')

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def register_forward_pre_hook(self, hook: Callable[..., Any], *, with_kwargs: bool = False) -> Hook:
        """Call hook(module, inputs), inputs a tuple, before each forward of a call module(x); what it returns, unless None,
        replaces the inputs.

        with_kwargs: hook(module, inputs, named) instead, which returns None or (inputs, named).  Return a Hook, whose remove()
        ends this.  forward_arrays calls no hooks, and a plan calls only hooks that were set when it was recorded.
        """
        return Hook(self._all_hooks()[0], hook if with_kwargs else _without_named(hook))

    def register_forward_hook(self, hook: Callable[..., Any], *, with_kwargs: bool = False) -> Hook:
        """Call hook(module, inputs, y), inputs a tuple, after each forward of a call module(x); what it returns, unless None,
        replaces y.

        with_kwargs: hook(module, inputs, named, y) instead.  Otherwise as register_forward_pre_hook.
        """
        return Hook(self._all_hooks()[1], hook if with_kwargs else lambda module, inputs, named, y: hook(module, inputs, y))

    def register_full_backward_hook(self, hook: Callable[..., Any]) -> Hook:
        """Call hook(module, grad_inputs, grad_outputs) in each backward, when the gradients of the inputs of a call module(x)
        are complete: tuples, with None for an input or output without one.  What it returns, unless None, replaces grad_inputs.

        Inputs are the Tensors given by position.  Otherwise as register_forward_pre_hook.
        """
        return Hook(self._all_hooks()[2], hook)

    def _all_hooks(self) -> tuple[dict[int, Any], ...]:
        if self._hooks is None:
            object.__setattr__(self, '_hooks', ({}, {}, {}))
            object.__setattr__(self, '_gates', [])
        return self._hooks                  # type: ignore[return-value]

    def _hooked_inputs(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for hook in list(self._all_hooks()[0].values()):
            changed = hook(self, inputs, named)
            inputs, named = (inputs, named) if changed is None else changed
        if self._all_hooks()[2]:
            gate = _Gate(self)
            inputs = gate.entered(inputs)
            self._gates.append(gate)        # type: ignore[union-attr]
        return inputs, named

    def _hooked_output(self, inputs: tuple[Any, ...], named: dict[str, Any], y: Any) -> Any:
        for hook in list(self._all_hooks()[1].values()):
            changed = hook(self, inputs, named, y)
            y = y if changed is None else changed
        if self._all_hooks()[2] and self._gates:
            self._gates.pop().leave(y)
        return y

    # ---- manual gradients: arrays in, arrays out ---------------------------------------------------------------------

    def forward_arrays(self, *inputs: Any) -> tuple[Any, Any]:
        """Run forward on arrays and return (y, ctx) for backward(dy, ctx).

        Unless a subclass overrides it, forward runs on Tensors and ctx is the recorded tape.
        """
        leaves = [None if x is None else Tensor(ndarray.as_ndarray(x)) for x in inputs]
        for leaf in leaves:
            if leaf is not None and leaf.dtype == np.float32:
                leaf.requires_grad_()
        y = self.forward(*leaves)
        return _each(lambda tensor: tensor.device.kernel_view(tensor.array), y), (leaves, y)

    def backward(self, dy: Any, ctx: Any) -> Any:
        """Return dx, or a tuple if several inputs have a gradient.  Adds parameter gradients to their .grad.

        dy has the structure of y; None means zeros.
        """
        leaves, y = ctx
        outputs, gradients = _flat(y), _flat(dy)
        pairs = [(tensor, Tensor(ndarray.as_ndarray(gradient)))
                 for tensor, gradient in zip(outputs, gradients, strict=True) if gradient is not None]
        autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        found = tuple(None if leaf.grad is None else leaf.device.kernel_view(leaf.grad.array)
                      for leaf in leaves if leaf is not None and leaf.requires_grad)
        return found[0] if len(found) == 1 else found

    # ---- the tree ----------------------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        held = vars(self).get(name)
        if isinstance(held, Parameter) and not (value is None or isinstance(value, Parameter | Module)):
            try:
                held.assign(value)
            except (TypeError, ValueError) as error:
                raise type(error)(f'{type(self).__name__}.{name}: {error}') from None
            return
        object.__setattr__(self, name, value)
        if _adopt(self, value, self):
            module = self
            while module is not None:
                object.__setattr__(module, '_is_built', False)
                module = _up(module._parent)

    def members(self) -> Iterator[tuple[str, Parameter | Module]]:
        """Yield (name, Parameter or Module) for each direct member."""
        for name, value in vars(self).items():
            if type(value) not in _VALUES and name not in ('_parent', '_hooks', '_gates'):
                yield from _members(name, value)

    def root(self) -> Module:
        """Return the module at the top of the tree."""
        module = self
        while (above := _up(module._parent)) is not None:
            module = above
        return module

    def named_modules(self, prefix: str = '', seen: set[int] | None = None) -> Iterator[tuple[str, Module]]:
        """Yield (name, module) for this module, named '', and all below it, each once."""
        seen = set() if seen is None else seen
        if id(self) not in seen:
            seen.add(id(self))
            yield prefix, self
            for name, member in self.members():
                if isinstance(member, Module):
                    yield from member.named_modules(f'{prefix}.{name}' if prefix else name, seen)

    def modules(self) -> Members[Module]:
        """Return this module and all below it, each once."""
        return Members(module for _, module in self.named_modules())

    def named_children(self) -> Members[tuple[str, Module]]:
        """Return [(name, module)] of the modules that are direct members, each once."""
        found: dict[int, tuple[str, Module]] = {}
        for name, member in self.members():
            if isinstance(member, Module):
                found.setdefault(id(member), (name, member))
        return Members(found.values())

    def children(self) -> Members[Module]:
        """Return the modules that are direct members, each once."""
        return Members(module for _, module in self.named_children())

    def add_module(self, name: str, module: Module | None) -> None:
        """Set attribute `name` to a module, as register_module."""
        if not isinstance(module, Module | None):
            raise TypeError(f'{name}: expected a Module, got {type(module).__name__}')
        check_member_name(self, name)
        setattr(self, name, module)

    def register_module(self, name: str, module: Module | None) -> None:
        """Set attribute `name` to a module.  KeyError for a name that is empty, has a point or is another attribute's."""
        self.add_module(name, module)

    def register_parameter(self, name: str, parameter: Parameter | None) -> None:
        """Set attribute `name` to a Parameter or None.  Errors as in register_module."""
        if not isinstance(parameter, Parameter | None):
            raise TypeError(f'{name}: expected a Parameter, got {type(parameter).__name__}')
        check_member_name(self, name)
        setattr(self, name, parameter)

    def get_submodule(self, path: str) -> Module:
        """Return the module with a path such as 'blocks.0'; this one for ''.  AttributeError if there is none."""
        found = self if not path else None
        for name, member in self.members():
            if found is None and isinstance(member, Module) and f'{path}.'.startswith(f'{name}.'):
                found = member.get_submodule(path[len(name) + 1:])
        if found is None:
            raise AttributeError(f'{path}: {type(self).__name__} has no such module')
        return found

    def get_parameter(self, path: str) -> Parameter:
        """Return the Parameter with a path such as 'blocks.0.weight'.  AttributeError if there is none."""
        return self._at(path, 'parameter', lambda module: {name: one for name, one in module.members()
                                                           if isinstance(one, Parameter)})

    def get_buffer(self, path: str) -> Array:
        """Return the buffer with a path such as 'norm.running_mean'.  AttributeError if there is none."""
        return self._at(path, 'buffer', lambda module: {name: getattr(module, name)
                                                        for name in vars(module).get('_buffers', ())})

    def _at(self, path: str, kind: str, own: Callable[[Module], dict[str, Any]]) -> Any:
        """Return what own(module) has with this path below self."""
        for prefix, module in self.named_modules():
            above = f'{prefix}.' if prefix else ''
            if path.startswith(above) and path[len(above):] in own(module):
                return own(module)[path[len(above):]]
        raise AttributeError(f'{path}: {type(self).__name__} has no such {kind}')

    def apply(self, function: Callable[[Module], Any]) -> Self:
        """Call function(module) for every module below this one, children first, then for this one, and return self."""
        for child in self.children():
            child.apply(function)
        function(self)
        return self

    def _named_parameters(self, prefix: str = '', recurse: bool = True) -> Members[tuple[str, Parameter]]:
        seen = {}
        for path, module in self.named_modules(prefix) if recurse else [(prefix, self)]:
            for name, member in module.members():
                if isinstance(member, Parameter) and id(member) not in seen:
                    seen[id(member)] = f'{path}.{name}' if path else name, member
        return Members(seen.values())

    def named_parameters(self, prefix: str = '', recurse: bool = True) -> Members[tuple[str, Parameter]]:
        """Return [(name, Parameter)] of the tree, each once.

        prefix: the path of this module in the names.  recurse: False: only the direct members.  ValueError if a lazy layer was
        not called yet.
        """
        for path, module in self.named_modules():
            if module.is_lazy:
                raise ValueError(f'{path or "module"}: {type(module).__name__} has no parameters before its first call; call '
                                 'the model once')
        self.root().build()
        return self._named_parameters(prefix, recurse)

    def parameters(self, recurse: bool = True) -> Members[Parameter]:
        """Return [Parameter] of the tree, each once.  recurse: as in named_parameters."""
        return Members(parameter for _, parameter in self.named_parameters(recurse=recurse))

    @property
    def params(self) -> Parameters:
        """The pyops.params.Parameters with the flat buffers of the whole tree, for plans, optimisers and checkpoints.

        Raises ValueError if the parameters do not share one buffer.
        """
        homes = {id(parameter.home): parameter.home for parameter in self.parameters()}
        if len(homes) != 1:
            raise ValueError(f'params: expected one buffer, got {len(homes)}: part of the tree was used too early, or was '
                             'lazy, or there are none; pass parameters() to the optimiser')
        return homes.popitem()[1]

    def build(self) -> Self:
        """Allocate, name and initialise the parameters that are not built yet, and return self.  Called on demand.

        A parameter used before it joined this tree keeps its memory.  If it still holds the initial value of its old name,
        it gets the initial value of its new name.
        """
        for path, module in self.named_modules():
            vars(module).update(_path=path, _is_built=True, seed=self.seed)
            for _, member in module.members():
                _adopt(module, member, weakref.ref(module))
        fresh = {}
        for name, parameter in self._named_parameters():
            if parameter._array is None:
                fresh[name] = parameter
            elif (parameter.name == _ALONE != name or name.endswith(f'.{parameter.name}')) and parameter._is_untouched():
                parameter._draw(self.seed, name)
                parameter.name, parameter.entry = name, parameter.entry._replace(name=name)
        for dtype in {parameter._dtype for parameter in fresh.values()}:
            names = [name for name in sorted(fresh, key=_in_order) if fresh[name]._dtype == dtype]
            home = Parameters({name: Spec(fresh[name].shape, fresh[name].init) for name in names}, self.seed, dtype)
            for name in names:
                fresh[name]._bind(home, name)
        return self

    def reset_parameters(self, seed: int = 0) -> Self:
        """Set all parameters to the initial values of `seed`, and return self."""
        for module in self.modules():
            module.seed = seed
        for _, parameter in self._named_parameters():
            parameter._given = None
            if parameter._array is not None:
                parameter._draw(seed, parameter.name)
        return self

    # ---- state -------------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        for module in self.modules():
            module.training = mode
        return self

    def eval(self) -> Self:
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients.  set_to_none: accepted as in PyTorch, without effect."""
        for parameter in self.parameters():
            parameter.zero_grad()

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set requires_grad of all parameters, and return self.  Create optimizers afterwards."""
        for parameter in self.parameters():
            parameter.requires_grad_(requires_grad)
        return self

    def register_buffer(self, name: str, array: Any, persistent: bool = True) -> None:
        """Register a Tensor or an array that changes from step to step, such as a running mean, as attribute `name`; None keeps
        the name for later.  persistent: include it in state_dict()."""
        setattr(self, name, array)
        self.__dict__.setdefault('_buffers', {})[name] = persistent

    def named_buffers(self, prefix: str = '', recurse: bool = True, *,
                      persistent: bool = False) -> Members[tuple[str, Array]]:
        """Return [(name, array)] of the buffers of the tree; with persistent=True only of those in state_dict().

        prefix, recurse: as in named_parameters.
        """
        modules = self.named_modules(prefix) if recurse else [(prefix, self)]
        return Members((f'{path}.{name}' if path else name, vars(module)[name]) for path, module in modules
                       for name, is_saved in vars(module).get('_buffers', {}).items()
                       if (is_saved or not persistent) and vars(module).get(name) is not None)

    def buffers(self, recurse: bool = True) -> Members[Array]:
        """Return the buffers of the tree.  recurse: as in named_parameters."""
        return Members(array for _, array in self.named_buffers(recurse=recurse))

    def to(self, *targets: Any, device: Any = None, dtype: Any = None, non_blocking: bool = False) -> Self:
        """Convert parameters and buffers of floats to float32 or float64, and return self.  Create optimizers afterwards.

        TypeError for another dtype, and for float64 on a GPU.  RuntimeError for another device than it is on: call
        pyops.use_gpu(), or set $PYOPS_BACKEND, before the model is made.
        """
        for target in (*targets, *[target for target in (device, dtype) if target is not None]):
            if isinstance(target, Methods):
                self.to(target.device, target.dtype)
            elif hasattr(target, 'launch') or isinstance(target, str) and target.partition(':')[0] in DEVICE_NAMES:
                asked = ndarray.named_device(target)
                for parameter in self.parameters():
                    if parameter.device is not asked:
                        raise RuntimeError(f'to: {type(self).__name__} is on {parameter.device}, not on {asked}; call '
                                           'pyops.use_gpu(), or set PYOPS_BACKEND, before the model is made')
            elif not isinstance(target, bool):
                self._convert(_float_dtype(f'{type(self).__name__}.to', target))
        return self

    def _convert(self, dtype: np.dtype) -> None:
        """Convert parameters and buffers of floats; parameters without memory get it in this dtype."""
        names = {id(parameter): name for name, parameter in self.root()._named_parameters()}
        moved = [parameter for _, parameter in self._named_parameters() if parameter._dtype != dtype]
        held = {names[id(parameter)]: parameter for parameter in moved if parameter._array is not None}
        if held:
            home = Parameters({name: Spec(one.shape, one.init) for name, one in held.items()}, None, dtype)
            home.seed = next(iter(held.values())).home.seed
            for name, parameter in held.items():
                parameter._move(home, name)
        for parameter in moved:
            parameter._dtype = dtype
        for module in self.modules():
            if module.is_lazy:
                module._by_name['dtype'] = dtype                # type: ignore[attr-defined]
            for name in vars(module).get('_buffers', ()):
                buffer = getattr(module, name, None)
                if isinstance(buffer, Tensor) and buffer.dtype.kind == 'f' and buffer.dtype != dtype:
                    setattr(module, name, buffer.detach().astype(dtype))

    def cpu(self) -> Self:
        """Return self if it is on the CPU.  Errors as in `to`."""
        return self.to('cpu')

    def cuda(self, device: Any = None) -> Self:
        """Return self if it is on the GPU.  Errors as in `to`."""
        return self.to('cuda')

    def state_dict(self, *, prefix: str = '') -> dict[str, Tensor]:
        """Return {name: Tensor} of copies of all parameters and persistent buffers.   prefix: the beginning of each name"""
        return {prefix + name: Tensor(ndarray.from_numpy(np.array(backend.get(place))))
                for name, place in self._places().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> LoadedState:
        """Copy Tensors, or arrays of any library, into parameters and buffers: all of them or, if one is wrong, none.

        strict: raise KeyError for a missing or unknown name; otherwise such names are skipped, and returned as the lists
        missing_keys and unexpected_keys.  'num_batches_tracked' of batch norms may be missing or unknown.  Raises ValueError
        for a wrong shape, TypeError for a wrong dtype.
        """
        places = self._places()
        state = {name: value for name, value in state_dict.items() if name in places or name.rpartition('.')[2] != COUNT}
        places = {name: place for name, place in places.items() if name in state or name.rpartition('.')[2] != COUNT}
        found = LoadedState([name for name in places if name not in state], [name for name in state if name not in places])
        if not strict:
            places = {name: place for name, place in places.items() if name in state}
        if strict and (wrong := sorted(set(places) ^ set(state))):
            name = wrong[0]
            raise StateError(f'{name}: {"missing in the state" if name in places else "the module has no such parameter"}; '
                           f'{len(wrong)} such names')
        arrays = {name: np.asarray(state[name].detach() if hasattr(state[name], 'detach') else state[name]) for name in places}
        for name, place in places.items():
            if arrays[name].shape != place.shape:
                raise ShapeError(f'{name}: expected shape {place.shape}, got {arrays[name].shape}')
            if not np.can_cast(arrays[name].dtype, place.dtype, 'same_kind') and name.rpartition('.')[2] != COUNT:
                raise DtypeError(f'{name}: expected {place.dtype}, got {arrays[name].dtype}')
        for name, place in places.items():
            place[...] = arrays[name]
        for parameter in self.parameters():
            parameter.array.buffer.version += 1
        return found

    def _places(self) -> dict[str, Array]:
        places = {name: parameter.flat_parameter().value for name, parameter in self.named_parameters()} \
            | {name: _kernel_view(buffer) for name, buffer in self.named_buffers(persistent=True)}
        order = {path: i for i, (path, _) in enumerate(self.named_modules())}

        def module_of(name: str) -> int:
            path = name.rpartition('.')[0]
            while path not in order:                    # a parameter in a list
                path = path.rpartition('.')[0]
            return order[path]
        return dict(sorted(places.items(), key=lambda item: module_of(item[0])))        # module by module, as PyTorch's

    def buffer_arrays(self, persistent: bool = False) -> dict[str, Array]:
        """Return {name: array} of the buffers over the same memory, as kernels and plans take them.   persistent: as in
        named_buffers.  Counts of batches are left out."""
        return {name: _kernel_view(buffer) for name, buffer in self.named_buffers(persistent=persistent)
                if name.rpartition('.')[2] != COUNT}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """Support pickle: a copy has the values of this module, which may be a part of a tree, in memory of its own."""
        return {name: value for name, value in vars(self).items() if name not in ('_parent', '_path', '_is_built', '_gates')}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    # ---- printing ----------------------------------------------------------------------------------------------------

    def settings(self) -> str:
        """Return the text between the parentheses of repr."""
        return ''

    def extra_repr(self) -> str:
        """Return the text between the parentheses of repr, PyTorch's name of settings()."""
        return self.settings()

    def __repr__(self) -> str:
        below = [(name, repr(member)) for name, member in self.members() if isinstance(member, Module)]
        if not below:
            return f'{type(self).__name__}({self.extra_repr()})'
        lines = [f'  ({name}): ' + text.replace('\n', '\n  ') for name, text in below]
        return '\n'.join([f'{type(self).__name__}({self.extra_repr()}', *lines, ')'])


_ABOUT_ARGUMENTS = TypeError, ValueError, IndexError, OverflowError


class Layer(Module):
    """A module with two uses: layer(x) takes and returns Tensors and records on the tape; `y, ctx = layer.forward(x)` and
    `dx = layer.backward(dy, ctx)` work on arrays.  A call converts arrays and lists to Tensors.  A subclass defines
    forward_tensors(x, ...), and forward_arrays and backward unless autograd should compute them.

    Errors about arguments start with the layer's name.
    A layer outside any module draws from a seed of its own, derived from the process seed (pyops.seed), so two such layers
    differ.  Sequential and Residual are trees; their seed is 0.
    """
    seed: int | None = None             # containers set a number

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if '__init__' in vars(cls) and cls.__module__.startswith('pyops.'):
            cls.__init__ = _accepts_place(cls.__init__)         # type: ignore[method-assign]

    def __new__(cls, *inputs: Any, **named: Any) -> Self:
        if (inputs or named) and cls.__init__ is object.__init__:
            raise TypeError(f'{cls.__name__}: expected no arguments, got {len(inputs) + len(named)}')
        layer = super().__new__(cls)
        if cls.seed is None:
            vars(layer)['seed'] = next_key('layer')
        return layer

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if named:
            inputs = *inputs, *[named.pop(name) for name in ('input', 'target')[len(inputs):] if name in named]
        if self._hooks:
            inputs, named = self._hooked_inputs(inputs, named)
        for x in inputs or (None,):
            if not isinstance(x, Tensor):
                inputs = self._naming(_as_tensors, inputs, named, self._wanted_dtype())
                break
        if not self._is_built:
            self.root().build()
        y = self.forward(*inputs, **named)
        return self._hooked_output(inputs, named, y) if self._hooks else y

    def _wanted_dtype(self) -> np.dtype | None:
        """Return the dtype of arrays of floats that are converted for a call: float64 for a layer with such parameters."""
        found = next((parameter._dtype for _, parameter in self._named_parameters()), None)
        return found if found == np.float64 else None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if inputs and isinstance(inputs[0], Tensor) or _tensors((inputs, *named.values())):
            try:                                        # as _naming does, without another call
                return self.forward_tensors(*inputs, **named)
            except _ABOUT_ARGUMENTS as error:
                self._name(error)
                raise
        if named:
            raise TypeError(f'{self.label()}: on arrays, arguments are positional, got keyword {", ".join(named)}')
        return self._naming(self.forward_arrays, *inputs)

    def forward_tensors(self, *inputs: Any, **named: Any) -> Any:
        raise NotImplementedError(f'{type(self).__name__}.forward_tensors(x)')

    def label(self) -> str:
        """Return path and repr, such as 'blocks.0.linear1: Linear(100, 100)'."""
        layer = f'{type(self).__name__}({self.extra_repr()})'
        return f'{self._path}: {layer}' if self._path else layer

    def _naming(self, function: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        """Call a function; prefix errors about its arguments with the name of the innermost layer."""
        try:
            return function(*inputs, **named)
        except _ABOUT_ARGUMENTS as error:
            self._name(error)
            raise

    def _name(self, error: Any) -> None:
        """Prefix an error with the name of this layer, unless it has the name of one."""
        if not getattr(error, 'names_layer', False):
            error.args, error.names_layer = (f'{self.label()}: {error}',), True


def _accepts_place(init: Callable[..., None]) -> Callable[..., None]:
    """Decorate __init__ of a layer: accept PyTorch's device, if the layer is there anyway, and dtype, float32 or float64."""
    @functools.wraps(init)
    def wrapper(self: Layer, *args: Any, device: Any = None, dtype: Any = None, **named: Any) -> None:
        if dtype is not None:
            dtype = _float_dtype(type(self).__name__, dtype)
        if device is not None and ndarray.named_device(device) is not ndarray.default_device():
            raise RuntimeError(f'{type(self).__name__}: device: layers are made on {ndarray.default_device()}, got {device}; '
                               'call pyops.use_gpu(), or set PYOPS_BACKEND, before the model is made')
        init(self, *args, **named)
        if dtype is not None:
            self._convert(dtype)
    return wrapper


class FunctionLayer(Layer):
    """A layer that calls a function on Tensors with its settings: class Double(FunctionLayer, function=double, times=2).

    The settings with their defaults, `...` for none, are the arguments of __init__, and attributes; from `reduction` on they
    are given by name.  `inplace` is accepted as in PyTorch, without effect, and not passed on: x is never changed.
    """
    function: Callable[..., Any]
    _arguments = inspect.Signature()

    def __init_subclass__(cls, function: Callable[..., Any] | None = None, **defaults: Any) -> None:
        super().__init_subclass__()
        if function is not None:
            names = list(defaults)
            by_name = names[names.index('reduction'):] if 'reduction' in names else []
            kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
            cls.function, cls._arguments = staticmethod(function), inspect.Signature([
                inspect.Parameter(name, kinds[name in by_name], default=inspect.Parameter.empty if value is ... else value)
                for name, value in defaults.items()])
            cls.__signature__ = cls._arguments                  # type: ignore[attr-defined]

    def __init__(self, *args: Any, **named: Any) -> None:
        try:
            given = self._arguments.bind(*args, **named)
        except TypeError as error:
            raise TypeError(f'{type(self).__name__}: {error}; expected {self._arguments}') from None
        given.apply_defaults()
        for name, value in given.arguments.items():
            setattr(self, name, value)

    def forward_tensors(self, *inputs: Any) -> Any:
        return self.function(*inputs, **{name: getattr(self, name) for name in self._arguments.parameters if name != 'inplace'})

    def settings(self) -> str:
        values = {name: (getattr(self, name), one.default) for name, one in self._arguments.parameters.items()}
        return ', '.join(f'{name}={value!r}' for name, (value, default) in values.items()
                         if name != 'inplace' and (value is not default and value != default))


class KernelLayer(Layer):
    """A layer that runs one op class, given by op(), both on Tensors and on arrays."""

    def op(self) -> tuple[Any, dict[str, Parameter], dict[str, Any]]:
        """Return the op class, {argument of __init__: Parameter} and {argument of __init__: setting}."""
        raise NotImplementedError(f'{type(self).__name__}.op()')

    def constants(self) -> tuple[Any, ...]:
        """Return the arguments of the op's forward that follow the inputs."""
        return ()

    def in_double(self, *inputs: Any) -> Any:
        """Return y for float64 inputs and parameters: a formula of array ops in place of the kernel, which takes float32."""
        raise TypeError(f'{type(self).__name__}: expected float32, got float64: it has no formula for that dtype')

    def forward_tensors(self, *inputs: Any) -> Any:
        if inputs and inputs[0].array.dtype is not ndarray.FLOAT and is_double(inputs[0]):
            return self.in_double(*inputs)
        op, parameters, settings = self.op()
        return autograd.apply(op, *inputs, *self.constants(), **parameters, **settings)

    def forward_arrays(self, *inputs: Any) -> tuple[Any, Any]:
        op, parameters, settings = self.op()
        one = op(**{argument: parameter.flat_parameter() for argument, parameter in parameters.items()}, **settings)
        y, ctx = one.forward(*inputs, *map(_kernel_view, self.constants()))
        return y, (one, ctx)

    def backward(self, dy: Any, ctx: Any) -> Any:
        op, ctx = ctx
        return self._naming(op.backward, dy, ctx)


class _Gate:
    """The gradients of a call of a module with hooks after backward."""

    def __init__(self, module: Module) -> None:
        self.module, self.places, self.count, self.outputs = module, list[int](), 0, list[Any]()

    def entered(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the inputs of forward, whose gradients come here."""
        self.count = len(inputs)
        self.places = [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad]
        if not self.places or not autograd.is_grad_enabled():
            self.places = []
            return inputs
        passed = _Passed.apply(self, *[inputs[i] for i in self.places])
        found = dict(zip(self.places, passed if isinstance(passed, tuple) else (passed,), strict=True))
        return tuple(found.get(i, x) for i, x in enumerate(inputs))

    def leave(self, y: Any) -> None:
        """Note the gradients of the results."""
        results = [x for x in _flat(y) if isinstance(x, Tensor)]
        self.outputs = [None] * len(results)
        for i, x in enumerate(results):
            if x.requires_grad:
                x.register_hook(functools.partial(self._note, i))

    def _note(self, i: int, gradient: Tensor) -> None:
        self.outputs[i] = gradient
        if not self.places:                 # no input has a gradient
            self.call(())

    def call(self, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        """Call the hooks with the gradients of the inputs, and return these or what replaces them."""
        found = dict(zip(self.places, gradients, strict=True))
        inputs = tuple(found.get(i) for i in range(self.count))
        for hook in list(self.module._all_hooks()[2].values()):
            changed = hook(self.module, inputs, tuple(self.outputs))
            if changed is not None:
                inputs = changed if isinstance(changed, tuple) else (changed,)
        # copies: a leaf adds later gradients to its first one in place, and a hook may keep that
        return tuple(x if x is None else x.copy() for x in (inputs[i] for i in self.places))


class _Passed(autograd.Function):
    """The inputs of a module, unchanged."""

    @staticmethod
    def forward(ctx: Any, gate: _Gate, *inputs: Tensor) -> Any:
        ctx.gate = gate
        return tuple(x.reshape(x.shape) for x in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *ctx.gate.call(gradients)


# methods, not functions in the class: there these names would hide the types in annotations
def _float(self: Module) -> Module:
    """Convert parameters and buffers of floats to float32, and return self.  Create optimizers afterwards."""
    return self.to(np.float32)


def _double(self: Module) -> Module:
    """Convert parameters and buffers of floats to float64, and return self.  Create optimizers afterwards.

    For checks of gradients and reference values: the layers compute with formulas of array ops, without kernels.  TypeError on
    a GPU.
    """
    return self.to(np.float64)


def _half(self: Module) -> Module:
    """Raise TypeError: parameters are float32 or float64.  See pyops.ndarray.check_width."""
    return self.to('float16')


def _bfloat16(self: Module) -> Module:
    """Raise TypeError, as half."""
    return self.to('bfloat16')


for _name, _method in (('float', _float), ('double', _double), ('half', _half), ('bfloat16', _bfloat16)):
    setattr(Module, _name, _method)


def _without_named(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook of inputs and named arguments that calls hook(module, inputs)."""
    def called(module: Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        changed = hook(module, inputs)
        return None if changed is None else (changed if isinstance(changed, tuple) else (changed,), named)
    return called


def _kernel_view(buffer: Any) -> Any:
    """Return the array of a Tensor for kernels; anything else unchanged."""
    return buffer.device.kernel_view(buffer.array) if isinstance(buffer, Tensor) else buffer


def check_member_name(module: Module, name: str) -> None:
    """Raise KeyError for a name that cannot be a new member's."""
    if not isinstance(name, str) or not name or '.' in name:
        raise KeyError(f'expected a name without a point, got {name!r}')
    if hasattr(type(module), name) or not isinstance(vars(module).get(name), Module | Parameter | None):
        raise KeyError(f'{name}: {type(module).__name__} has an attribute of this name')


def _float_dtype(who: str, dtype: Any) -> np.dtype:
    """Return float32 or float64.  TypeError for another dtype."""
    found = numpy_dtype(dtype)
    ndarray.check_width(found)
    if found not in (np.float32, np.float64):
        raise TypeError(f'{who}: dtype: expected float32 or float64, got {found}')
    return found


def _numbers(values: Any, dtype: np.dtype) -> np.ndarray:
    """Copy real numbers from a Tensor, an array or nested lists into a numpy array."""
    found = np.asarray(values.numpy() if isinstance(values, Tensor | NDArray) else values)
    if found.dtype.kind not in 'biuf':
        raise TypeError(f'expected real numbers, got {type(values).__name__} of {found.dtype}')
    return np.array(found, dtype)


_VALUES = frozenset((bool, int, float, str, type(None)))        # of most attributes: none of them is a member


def _members(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Module | Parameter):
        yield name, value
    elif isinstance(value, list | tuple):
        for i, one in enumerate(value):
            yield from _members(f'{name}.{i}', one)
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _members(f'{name}.{key}', one)


def _adopt(module: Module, value: Any, link: Any) -> bool:
    """Make `module` the parent of all Modules and Parameters in value.  Return whether there are any.

    link: the module itself until the tree is built, since names and values depend on it; a weak reference afterwards.
    """
    found = [member for _, member in _members('', value)]
    for member in found:
        if isinstance(member, Parameter):
            member._owner = link
        elif member is not module:
            vars(member)['_parent'] = link
    return bool(found)


def _up(link: Any) -> Any:
    return link() if isinstance(link, weakref.ref) else link


def _in_order(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that orders 'blocks.9.x' before 'blocks.10.x'."""
    return [(0, int(part), '') if part.isdigit() else (1, 0, part) for part in re.split(r'\.', name)]


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the Tensors in a tuple or list and in the tuples and lists inside it."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += _tensors(value)
    return found


def _as_tensors(inputs: tuple[Any, ...], named: dict[str, Any], dtype: np.dtype | None = None) -> tuple[Any, ...]:
    """Convert the inputs of a call to Tensors, also inside tuples, floats of numpy and lists to `dtype`.  Raises TypeError if
    none of them is a Tensor then."""
    device = next((x.device for x in _tensors(inputs)), None)

    def convert(value: Any) -> Any:
        if isinstance(value, list) and _tensors(value):
            return value                    # converting Tensors to an array would drop their history
        if isinstance(value, np.ndarray | list) and backend.is_recorded():
            raise TypeError(f'got {type(value).__name__} while a plan records, which would replay a copy of it; give '
                            'Tensor(ndarray.from_numpy(x)) for an input of the plan, Tensor(x) for a constant')
        if dtype is not None and isinstance(value, np.ndarray | list) and np.asarray(value).dtype.kind == 'f':
            return Tensor(value, device=device, dtype=dtype)
        return Tensor(value, device=device) if isinstance(value, np.ndarray | NDArray | list) else value
    converted = _each(convert, inputs)
    if not _tensors((converted, *named.values())):
        raise TypeError('expected a Tensor or an array, got '
                        + (', '.join(type(x).__name__ for x in (*inputs, *named.values())) or 'nothing'))
    return converted


def _each(function: Callable[[Any], Any], value: Any) -> Any:
    return tuple(_each(function, one) for one in value) if isinstance(value, tuple) else function(value)


def _flat(value: Any) -> list[Any]:
    return [one for part in value for one in _flat(part)] if isinstance(value, tuple) else [value]
