"""Module and Parameter: a tree of layers whose parameters lie in one flat buffer, under the names of their places in the tree.

Names are known only when the tree is whole, so a parameter gets its memory and its first value when the tree is first used:
called, or asked for its parameters.  The value is a function of (seed, name, shape) alone, so the order in which layers are
made changes nothing; the places in the buffer follow the names too, so a training run has the same bits.
"""
import copy
import operator
import re
import weakref

import numpy as np

from pyops import autograd, backend, ndarray
from pyops.autograd import Tensor
from pyops.ndarray import NDArray
from pyops.params import Parameters, Spec, generator, next_key

_ALONE = 'parameter'        # the name of a parameter that belongs to no module


class Parameter(Tensor):
    """A Tensor that a Module learns, with a name.

    Parameter(shape, init)      init(generator, shape) -> float32 array, as in pyops.init, is asked when the tree is used
    Parameter(values)           begins as a copy of these

    One that belongs to no module works, too: it has memory of its own, and the name 'parameter'.
    .grad is part of the flat buffer of gradients: zeros before the first backward, which adds to it; None where
    requires_grad is off.
    """
    __slots__ = ('name', 'home', 'entry', 'init', '_shape', '_array', '_gradient', '_owner', '_drawn', '_seed', '_given')

    def __init__(self, shape, init=None):
        if init is None:
            values = _float32(shape)
            shape, init = values.shape, lambda generator, shape: values
        self._shape, self.init = tuple(map(operator.index, shape)), init
        if min(self._shape, default=1) < 1:
            raise ValueError(f'Parameter: shape {self._shape}: want sizes of 1 or more')
        self.name = self.home = self.entry = self._array = self._gradient = self._owner = self._drawn = self._given = None
        self.origin, self.requires_grad, self._seed = None, True, next_key('parameter')

    shape = property(lambda self: self._shape)

    @property
    def array(self):
        self._settle()
        return self._array

    @array.setter
    def array(self, value):
        self._settle()
        self.entry.value[...] = value.device.plain(value)
        self._array.buffer.version += 1

    @property
    def grad(self):
        self._settle()
        return self._gradient if self.requires_grad else None

    @grad.setter
    def grad(self, value):
        self._settle()
        if value is None:
            self.entry.grad[...] = 0
            return
        value = autograd.gradient_for(self, value)
        if value.array is not self._gradient.array:
            self.entry.grad[...] = value.device.plain(value.array)

    def zero_grad(self):
        self.grad = None

    def by_hand(self):
        """The pyops.params.Parameter that op classes take."""
        self._settle()
        return self.entry

    def _settle(self):
        if self._array is None:
            owner = _up(self._owner)
            if owner is None:
                self._bind(Parameters({_ALONE: Spec(self.shape, self.init)}, self._seed), _ALONE)
            else:
                owner.root().build()

    def _bind(self, home, name):
        self.home, self.name, self.entry, self._drawn = home, name, home[name], (home.seed, name)
        self._array = ndarray.over(self.entry.value)
        self._gradient = Tensor(ndarray.over(self.entry.grad))
        if self._given is not None:
            self.assign(self._given)

    def assign(self, values):
        """Copy an array, a Tensor or nested lists of this shape into the parameter, which keeps its memory and its name."""
        if isinstance(values, Tensor) and values.origin is not None:
            raise TypeError(f'{values.origin[0].name} made this tensor, and its history would be lost; assign its detach()')
        values = _float32(values)
        if values.shape != self.shape:
            raise ValueError(f'want shape {self.shape}, got {values.shape}')
        if self._array is None:
            self._given = values            # the tree is not whole yet
        else:
            self.array, self._given = ndarray.from_numpy(values), None

    def _draw(self, seed, name):
        """The initial value of that seed and name."""
        self._drawn, self.array = (seed, name), ndarray.from_numpy(self.init(generator(seed, name), self.shape))

    def _is_untouched(self):
        return (backend.get(self.entry.value) == self.init(generator(*self._drawn), self.shape)).all()

    def __deepcopy__(self, memo):
        twin = memo[id(self)] = Parameter(self.shape, self.init) if self._array is None else Parameter(self)
        twin.requires_grad, twin._given, twin._seed = self.requires_grad, self._given, self._seed
        return twin

    def __reduce__(self):
        raise TypeError(f'{self!r} cannot be pickled, as it is part of a tree; save state_dict() of its module')

    def __repr__(self):
        return f'Parameter {self.name or "without a name"} of shape {self.shape}'


class Module:
    """A layer, or a model made of layers: attributes that are Modules or Parameters, also in lists, tuples and dicts, belong
    to it.  A subclass has forward(x, ...) on Tensors, and is called: y = module(x).

    training    whether layers such as Dropout do what they do in training; train() and eval() set it in the whole tree
    seed        of the initial values: that of reset_parameters(seed), else 0; see Layer for a layer that belongs to no module
    """
    training, seed = True, 0
    _parent, _path, _is_built = None, None, False

    def __call__(self, *inputs, **named):
        if not self._is_built:
            self.root().build()
        return self.forward(*inputs, **named)

    def forward(self, *inputs):
        raise NotImplementedError(f'{type(self).__name__}.forward(x)')

    # ---- by hand: arrays in, arrays out ------------------------------------------------------------------------------

    def by_hand(self, *inputs):
        """y, ctx = module.by_hand(x): forward on arrays, for backward(dy, ctx).

        Where a subclass does not spell it out, the tape of a run on Tensors is the ctx.
        """
        leaves = [None if x is None else Tensor(ndarray.over(x)) for x in inputs]
        for leaf in leaves:
            if leaf is not None and leaf.dtype == np.float32:
                leaf.requires_grad_()
        y = self.forward(*leaves)
        return _each(lambda tensor: tensor.device.plain_view(tensor.array), y), (leaves, y)

    def backward(self, dy, ctx):
        """-> dx, a tuple where there are several inputs with a gradient; those of parameters are added to their .grad.

        dy has the structure of y; None in it is zero.
        """
        leaves, y = ctx
        outputs, gradients = _flat(y), _flat(dy)
        pairs = [(tensor, Tensor(ndarray.over(gradient)))
                 for tensor, gradient in zip(outputs, gradients, strict=True) if gradient is not None]
        autograd.backward(*map(list, zip(*pairs, strict=True)))
        found = tuple(None if leaf.grad is None else leaf.device.plain_view(leaf.grad.array)
                      for leaf in leaves if leaf is not None and leaf.requires_grad)
        return found[0] if len(found) == 1 else found

    # ---- the tree ----------------------------------------------------------------------------------------------------

    def __setattr__(self, name, value):
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

    def members(self):
        """Yield (name, Parameter or Module) of all that belongs to this module itself."""
        for name, value in vars(self).items():
            if name != '_parent':
                yield from _members(name, value)

    def root(self):
        """The module at the top of the tree that this one stands in."""
        module = self
        while (above := _up(module._parent)) is not None:
            module = above
        return module

    def named_modules(self, prefix='', seen=None):
        """Yield (name, module) of this module, '', and all below it, each once."""
        seen = set() if seen is None else seen
        if id(self) not in seen:
            seen.add(id(self))
            yield prefix, self
            for name, member in self.members():
                if isinstance(member, Module):
                    yield from member.named_modules(f'{prefix}.{name}' if prefix else name, seen)

    def modules(self):
        return [module for _, module in self.named_modules()]

    def _named_parameters(self):
        seen = {}
        for prefix, module in self.named_modules():
            for name, member in module.members():
                if isinstance(member, Parameter) and id(member) not in seen:
                    seen[id(member)] = f'{prefix}.{name}' if prefix else name, member
        return list(seen.values())

    def named_parameters(self):
        """[(name, Parameter)] of the tree, each once."""
        self.root().build()
        return self._named_parameters()

    def parameters(self):
        """[Parameter] of the tree, each once."""
        return [parameter for _, parameter in self.named_parameters()]

    @property
    def params(self):
        """The pyops.params.Parameters with the flat buffers of the whole tree, for a plan, an optimiser, a checkpoint."""
        homes = {id(parameter.home): parameter.home for parameter in self.parameters()}
        if len(homes) != 1:
            raise ValueError(f'params: the parameters lie in {len(homes)} buffers and not in one: parts of the tree were used '
                             'before it was whole, or there are none; give parameters() to the optimiser')
        return homes.popitem()[1]

    def build(self):
        """Give memory, names and initial values to the parameters that have none.  Called where they are needed.

        A parameter that was used before it joined this tree keeps its memory.  If it still has the initial value of its
        old name, it gets that of its new one.
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
        if fresh:
            specs = {name: Spec(fresh[name].shape, fresh[name].init) for name in sorted(fresh, key=_in_order)}
            home = Parameters(specs, self.seed)
            for name, parameter in fresh.items():
                parameter._bind(home, name)
        return self

    def reset_parameters(self, seed=0):
        """Begin anew, from the initial values of that seed.  -> self"""
        for module in self.modules():
            module.seed = seed
        for _, parameter in self._named_parameters():
            parameter._given = None
            if parameter._array is not None:
                parameter._draw(seed, parameter.name)
        return self

    # ---- state -------------------------------------------------------------------------------------------------------

    def train(self, mode=True):
        for module in self.modules():
            module.training = mode
        return self

    def eval(self):
        return self.train(False)

    def zero_grad(self):
        for parameter in self.parameters():
            parameter.zero_grad()

    def register_buffer(self, name, array, persistent=True):
        """Say that an attribute is a numpy array that changes from step to step, such as a running mean; persistent: it is
        part of the state that is saved."""
        setattr(self, name, array)
        self.__dict__.setdefault('_buffers', {})[name] = persistent

    def named_buffers(self, persistent=False):
        """[(name, array)] of the tree: all of them, or those that are saved."""
        return [(f'{prefix}.{name}' if prefix else name, getattr(module, name)) for prefix, module in self.named_modules()
                for name, is_saved in vars(module).get('_buffers', {}).items() if is_saved or not persistent]

    def state_dict(self):
        """{name: a copy} of all parameters and buffers."""
        return {name: np.array(value) for name, value in self._places().items()}

    def load_state_dict(self, state):
        """Copy arrays (of numpy or another library) into place; all or, with an error that names one, none."""
        places = self._places()
        if wrong := sorted(set(places) ^ set(state)):
            name = wrong[0]
            raise KeyError(f'{name}: {"missing in the state" if name in places else "the module has no such parameter"}; '
                           f'{len(wrong)} such names')
        arrays = {name: np.asarray(state[name].detach() if hasattr(state[name], 'detach') else state[name]) for name in places}
        for name, place in places.items():
            if arrays[name].shape != place.shape:
                raise ValueError(f'{name}: want shape {place.shape}, got {arrays[name].shape}')
            if not np.can_cast(arrays[name].dtype, place.dtype, 'same_kind'):
                raise TypeError(f'{name}: want {place.dtype}, got {arrays[name].dtype}')
        for name, place in places.items():
            place[...] = arrays[name]
        for parameter in self.parameters():
            parameter.array.buffer.version += 1

    def _places(self):
        return {name: parameter.by_hand().value for name, parameter in self.named_parameters()} \
            | dict(self.named_buffers(persistent=True))

    def __deepcopy__(self, memo):
        twin = memo[id(self)] = type(self).__new__(type(self))
        for name, value in vars(self).items():
            if name not in ('_parent', '_path', '_is_built'):
                setattr(twin, name, copy.deepcopy(value, memo))
        return twin

    # ---- words -------------------------------------------------------------------------------------------------------

    def settings(self):
        """What stands between the brackets of repr."""
        return ''

    def __repr__(self):
        below = [(name, repr(member)) for name, member in self.members() if isinstance(member, Module)]
        if not below:
            return f'{type(self).__name__}({self.settings()})'
        lines = [f'  ({name}): ' + text.replace('\n', '\n  ') for name, text in below]
        return '\n'.join([f'{type(self).__name__}({self.settings()}', *lines, ')'])


class Layer(Module):
    """A module for both ways: layer(x) gives Tensors and records on the tape;  y, ctx = layer.forward(x)  and
    dx = layer.backward(dy, ctx)  work on arrays.  A call copies arrays and lists into Tensors.  A subclass has
    on_tensors(x, ...), and by_hand and backward unless the tape is to compute them.

    Errors about arguments begin with the layer's name.
    A layer is made with a seed of its own, from that of the process (pyops.seed), and draws from it while it belongs to no
    module: two such layers differ.  Sequential and Residual are trees; their seed is 0.
    """
    seed = None             # a subclass that is a tree has a number

    def __new__(cls, *_, **__):
        layer = super().__new__(cls)
        if cls.seed is None:
            vars(layer)['seed'] = next_key('layer')
        return layer

    def __call__(self, *inputs, **named):
        if not inputs or not all([isinstance(x, Tensor) for x in inputs]):
            inputs = self._naming(_as_tensors, inputs, named)
        return super().__call__(*inputs, **named)

    def forward(self, *inputs, **named):
        if _tensors((inputs, *named.values())):
            return self._naming(self.on_tensors, *inputs, **named)
        if named:
            raise TypeError(f'{self.label()}: by hand there are no named arguments, got {", ".join(named)}')
        return self._naming(self.by_hand, *inputs)

    def on_tensors(self, *inputs):
        raise NotImplementedError(f'{type(self).__name__}.on_tensors(x)')

    def label(self):
        """'blocks.0.linear1: Linear(100, 100)'"""
        layer = f'{type(self).__name__}({self.settings()})'
        return f'{self._path}: {layer}' if self._path else layer

    def _naming(self, function, *inputs, **named):
        """function(...), whose complaints about arguments get the name of the innermost layer."""
        try:
            return function(*inputs, **named)
        except (TypeError, ValueError, IndexError, OverflowError) as error:
            if not getattr(error, 'names_layer', False):
                error.args, error.names_layer = (f'{self.label()}: {error}',), True
            raise


class KernelLayer(Layer):
    """A layer that is one op class: `op` says which, with its Parameters and settings, and both ways run it."""

    def op(self):
        """-> the class, {argument of its __init__: Parameter}, {argument: setting}"""
        raise NotImplementedError(f'{type(self).__name__}.op()')

    def constants(self):
        """What forward of the op gets behind the inputs."""
        return ()

    def on_tensors(self, *inputs):
        op, parameters, settings = self.op()
        return autograd.apply(op, *inputs, *self.constants(), **parameters, **settings)

    def by_hand(self, *inputs):
        op, parameters, settings = self.op()
        one = op(**{argument: parameter.by_hand() for argument, parameter in parameters.items()}, **settings)
        y, ctx = one.forward(*inputs, *self.constants())
        return y, (one, ctx)

    def backward(self, dy, ctx):
        op, ctx = ctx
        return self._naming(op.backward, dy, ctx)


def _float32(values):
    """A copy of real numbers in a Tensor, an array or nested lists, as a numpy array."""
    found = np.asarray(values.numpy() if isinstance(values, Tensor | NDArray) else values)
    if found.dtype.kind not in 'biuf':
        raise TypeError(f'want real numbers, got {type(values).__name__} of {found.dtype}')
    return np.array(found, np.float32)


def _members(name, value):
    if isinstance(value, Module | Parameter):
        yield name, value
    elif isinstance(value, list | tuple):
        for i, one in enumerate(value):
            yield from _members(f'{name}.{i}', one)
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _members(f'{name}.{key}', one)


def _adopt(module, value, link):
    """Tell Modules and Parameters whose they are.  -> whether there was one

    link: the module itself while the tree is not built, since names and values will depend on it, then a weak reference.
    """
    found = [member for _, member in _members('', value)]
    for member in found:
        if isinstance(member, Parameter):
            member._owner = link
        elif member is not module:
            vars(member)['_parent'] = link
    return bool(found)


def _up(link):
    return link() if isinstance(link, weakref.ref) else link


def _in_order(name):
    """A key that sorts 'blocks.9.x' before 'blocks.10.x'."""
    return [(0, int(part), '') if part.isdigit() else (1, 0, part) for part in re.split(r'\.', name)]


def _tensors(values):
    """The Tensors in a tuple or list, and in tuples and lists inside it."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += _tensors(value)
    return found


def _as_tensors(inputs, named):
    """The inputs of a call with arrays and lists, also those in tuples, as Tensors; TypeError if there is no Tensor then."""
    device = next((x.device for x in _tensors(inputs)), None)

    def convert(value):
        if isinstance(value, list) and _tensors(value):
            return value                    # an array made of Tensors would have no history
        if isinstance(value, np.ndarray | list) and backend.is_recorded():
            raise TypeError(f'got {type(value).__name__} while a plan records, which would replay a copy of it; give '
                            'Tensor(ndarray.from_numpy(x)) for an input of the plan, Tensor(x) for a constant')
        return Tensor(value, device=device) if isinstance(value, np.ndarray | NDArray | list) else value
    converted = _each(convert, inputs)
    if not _tensors((converted, *named.values())):
        raise TypeError('want a Tensor or an array, got '
                        + (', '.join(type(x).__name__ for x in (*inputs, *named.values())) or 'nothing'))
    return converted


def _each(function, value):
    return tuple(_each(function, one) for one in value) if isinstance(value, tuple) else function(value)


def _flat(value):
    return [one for part in value for one in _flat(part)] if isinstance(value, tuple) else [value]
