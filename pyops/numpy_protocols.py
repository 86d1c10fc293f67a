"""numpy's functions on NDArrays and Tensors: what np.exp(x), np.sum(x) and np.concatenate([x, y]) call.

A function with a counterpart in pyops/methods.py runs as that operation, with its gradient.  Any other function gets numpy
arrays and returns what numpy returns; it is a TypeError for a Tensor that requires a gradient, unless the result has none.
"""
from __future__ import annotations

import functools
import inspect
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops.methods import Methods

if TYPE_CHECKING:
    from collections.abc import Callable


def _method_of_two(name: str) -> Callable[..., Any]:
    """Return the function a.name(b), for an a that may also be a number."""
    def run(a: Any, b: Any) -> Any:
        return getattr(a if isinstance(a, Methods) else b._constant(b._plain()._operand(a)), name)(b)
    return run


# ufunc -> operation on one or two operands
_OPERATIONS: dict[str, Callable[..., Any]] = {
    'add': operator.add, 'subtract': operator.sub, 'multiply': operator.mul, 'divide': operator.truediv, 'power': operator.pow,
    'matmul': operator.matmul, 'floor_divide': operator.floordiv, 'remainder': operator.mod,
    'negative': operator.neg, 'positive': lambda x: x.copy(), 'absolute': abs, 'fabs': abs,
    'equal': operator.eq, 'not_equal': operator.ne, 'less': operator.lt, 'less_equal': operator.le, 'greater': operator.gt,
    'greater_equal': operator.ge, 'bitwise_and': operator.and_, 'bitwise_or': operator.or_, 'bitwise_xor': operator.xor,
    'invert': operator.invert, 'maximum': lambda a, b: a.maximum(b), 'minimum': lambda a, b: a.minimum(b),
    'logical_and': lambda a, b: (a != 0) & (b != 0), 'logical_or': lambda a, b: (a != 0) | (b != 0),
    'logical_xor': lambda a, b: (a != 0) ^ (b != 0), 'logical_not': lambda x: x == 0, 'isinf': lambda x: abs(x) == np.inf,
    **{name: _method_of_two(name) for name in ('fmod', 'hypot', 'logaddexp', 'logaddexp2', 'arctan2', 'copysign', 'fmax',
                                               'fmin')},
    **{name: operator.methodcaller(name) for name in ('expm1', 'log2', 'log10', 'sinh', 'cosh', 'arctan', 'arcsin', 'arccos',
                                                      'trunc', 'arcsinh', 'arccosh', 'arctanh', 'exp2', 'deg2rad', 'rad2deg')},
    **{name: operator.methodcaller(name) for name in ('exp', 'log', 'log1p', 'sqrt', 'tanh', 'sin', 'cos', 'tan', 'floor',
                                                      'ceil', 'square', 'reciprocal', 'sign', 'isnan', 'isfinite')}}
# ufunc -> method for ufunc.reduce
_REDUCTIONS = {'add': 'sum', 'multiply': 'prod', 'maximum': 'max', 'minimum': 'min', 'logical_or': 'any', 'logical_and': 'all'}
# functions of one array that are methods with the same arguments
_METHODS = frozenset((
    'sum', 'mean', 'max', 'min', 'amax', 'amin', 'argmax', 'argmin', 'var', 'std', 'prod', 'any', 'all', 'cumsum', 'clip',
    'sort', 'argsort', 'squeeze', 'expand_dims', 'transpose', 'swapaxes', 'moveaxis', 'reshape', 'ravel', 'broadcast_to',
    'flip', 'repeat', 'tile', 'take', 'take_along_axis', 'roll', 'dot', 'copy', 'round', 'tril', 'triu',
    'cumprod', 'trace', 'diagonal', 'ptp'))
# arguments of numpy's functions that do not change a result here; any other must have its default
_WITHOUT_EFFECT = {'kind', 'stable', 'subok', 'casting', 'optimize', 'order', 'mode'}
# values of them that do have an effect: numpy runs the function
_WITH_EFFECT = {'F', 'clip', 'wrap'}
# functions whose results have no gradient: masks, positions, counts, texts, files, facts about arrays
_WITHOUT_GRADIENT = frozenset((
    'allclose', 'isclose', 'array_equal', 'array_equiv', 'isin', 'isreal', 'iscomplex', 'isneginf', 'isposinf', 'isrealobj',
    'iscomplexobj', 'argmax', 'argmin', 'argsort', 'argwhere', 'argpartition', 'nanargmax', 'nanargmin', 'lexsort', 'nonzero',
    'flatnonzero', 'searchsorted', 'digitize', 'any', 'all', 'count_nonzero', 'bincount', 'histogram', 'histogram2d',
    'histogramdd', 'histogram_bin_edges', 'array2string', 'array_repr', 'array_str', 'save', 'savez', 'savez_compressed',
    'savetxt', 'shape', 'ndim', 'size', 'result_type', 'can_cast', 'common_type', 'min_scalar_type', 'may_share_memory',
    'shares_memory', 'copyto', 'zeros_like', 'ones_like', 'full_like', 'empty_like'))
_RENAMED = {'a_min': 'min', 'a_max': 'max'}


def _ours(values: Any) -> list[Methods]:
    """Return the NDArrays and Tensors among nested arguments, Tensors first."""
    found: list[Methods] = []

    def search(value: Any) -> None:
        if isinstance(value, Methods):
            found.append(value)
        elif isinstance(value, list | tuple):
            for item in value:
                search(item)
        elif isinstance(value, dict):
            search(list(value.values()))
    search(values)
    return sorted(found, key=lambda x: not hasattr(x, 'tape'))


def _first(values: Any) -> Any:
    """Return the first of _ours(values): quickly, if it is the first of all and no other is a Tensor."""
    first = values[0]
    if isinstance(first, Methods) and (hasattr(first, 'tape') or all(type(x) is type(first) or not isinstance(x, Methods)
                                                                     for x in values)):
        return first
    return _ours(values)[0]


def _as_numpy(value: Any) -> Any:
    """Replace the NDArrays and Tensors in nested arguments by numpy arrays."""
    if isinstance(value, Methods):
        return value.numpy()                    # type: ignore[attr-defined]
    if isinstance(value, list | tuple):
        return type(value)(map(_as_numpy, value))
    if isinstance(value, dict):
        return {name: _as_numpy(item) for name, item in value.items()}
    return value


def _finished(y: Any, out: Any, dtype: Any) -> Any:
    """Apply the arguments out and dtype of a numpy function to a result."""
    if dtype is not None:
        y = y.astype(dtype)
    if isinstance(out, tuple):
        out, = out
    if out is None:
        return y
    out[...] = y.numpy() if isinstance(out, np.ndarray) else y
    return out


def apply_ufunc(ufunc: np.ufunc, method: str, inputs: tuple[Any, ...], out: Any, named: dict[str, Any]) -> Any:
    """Run ufunc(*inputs) or a method of it, such as 'reduce'."""
    name, dtype, first = ufunc.__name__, named.pop('dtype', None), _ours(inputs + ((out,) if out else ()))[0]
    if named.get('where', True) is True:
        named.pop('where', None)
    if method == 'reduce' and name in _REDUCTIONS and named.get('initial') in (None, np._NoValue):
        axis, keepdims = named.get('axis', 0), named.get('keepdims', False)
        return _finished(getattr(inputs[0], _REDUCTIONS[name])(axis=axis, keepdims=keepdims), out, dtype)
    if method == 'accumulate' and name == 'add':
        return _finished(inputs[0].cumsum(named.get('axis', 0)), out, dtype)
    if method == 'at' and name == 'add' and hasattr(inputs[0], 'add_at'):
        return inputs[0].add_at(*inputs[1:])
    if method == '__call__' and name in _OPERATIONS and not named.keys() - _WITHOUT_EFFECT:
        left = first._operand(inputs[0])
        if len(inputs) == 2 and not isinstance(left, Methods):          # a number: numpy's would call this function again
            left = left.item() if isinstance(left, np.generic) else left
            if name in ('maximum', 'minimum'):                          # symmetric
                return _finished(_OPERATIONS[name](inputs[1], left), out, dtype)
        return _finished(_OPERATIONS[name](left, *inputs[1:]), out, dtype)
    _check_no_gradient(name, inputs)
    if dtype is not None:
        named['dtype'] = dtype
    y = getattr(ufunc, method)(*_as_numpy(inputs), **_as_numpy(named))
    if out is not None:
        out, = out
        out[...] = y
        return out
    return y


@functools.cache
def _parameters(function: Callable[..., Any]) -> tuple[inspect.Signature, tuple[str, ...], dict[str, Any]]:
    """Return the signature of a function, the names of its positional arguments, and the defaults of all named ones."""
    signature = inspect.signature(function)
    found = signature.parameters.values()
    return (signature, tuple(one.name for one in found if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)),
            {one.name: one.default for one in found if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)})


def _bound(function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of a call by name, and the defaults.  TypeError for arguments that the function does not take."""
    signature, positional, defaults = _parameters(function)
    given = dict(zip(positional, args, strict=False))
    if len(args) <= len(positional) and defaults.keys() >= named.keys() and not given.keys() & named.keys():
        return given | named, defaults
    given = {}
    for key, value in signature.bind(*args, **named).arguments.items():
        given |= value if signature.parameters[key].kind is inspect.Parameter.VAR_KEYWORD else {key: value}
    return given, defaults


def apply_function(function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Run a function of numpy that is not a ufunc."""
    name = function.__name__
    if name in ('shape', 'ndim', 'size') and len(args) == 1 and isinstance(args[0], Methods) and not named:
        return getattr(args[0], name)           # without a copy from a GPU
    if function in (getattr(np, name, None), np.linalg.norm) and (name in _METHODS or name in _FUNCTIONS):
        given, defaults = _bound(function, args, named)
        out, dtype = given.pop('out', None), given.pop('dtype', None)
        if not given.keys().isdisjoint(('order', 'mode')) and any(
                given.get(key) in _WITH_EFFECT for key in ('order', 'mode') if isinstance(given.get(key), str)):
            return _by_numpy(function, args, named)
        given = {_RENAMED.get(key, key) if name == 'clip' else key: value for key, value in given.items()
                 if value is not np._NoValue and key not in _WITHOUT_EFFECT - ({'mode'} if name == 'pad' else set())
                 and not (key in defaults and value is defaults[key])}
        if name in _FUNCTIONS:
            result = _FUNCTIONS[name](**given)
        else:
            x = next(iter(given.values()))
            rest = dict(list(given.items())[1:])
            result = NotImplemented if not isinstance(x, Methods) else _call_method(x, name, rest)
        if result is not NotImplemented:
            return _finished(result, out, dtype)
    return _by_numpy(function, args, named)


def _by_numpy(function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Run a function on numpy arrays.  TypeError if that would drop a gradient."""
    if function.__name__ not in _WITHOUT_GRADIENT:
        _check_no_gradient(function.__name__, (args, named))
    return function(*_as_numpy(args), **_as_numpy(named))


def _check_no_gradient(name: str, values: Any) -> None:
    """Raise TypeError if a Tensor among nested arguments requires a gradient."""
    if any(getattr(x, 'requires_grad', False) for x in _ours(values)):
        raise TypeError(f'np.{name}: has no gradient here with these arguments; use x.detach() for the values, or a '
                        'function of pyops.functional')


def _call_method(x: Any, name: str, rest: dict[str, Any]) -> Any:
    """Call a method; a few take the arguments of numpy's function by position."""
    if name in ('transpose', 'reshape', 'broadcast_to', 'tile', 'moveaxis', 'swapaxes', 'dot'):
        return getattr(x, name)(*rest.values())
    if 'mean' in rest or 'where' in rest and name in ('var', 'std'):
        return NotImplemented
    return getattr(x, name)(**rest)


# ---- functions with arguments of their own ---------------------------------------------------------------------------

def _joined(name: str) -> Callable[..., Any]:
    def join(arrays: Any, axis: int = 0) -> Any:
        arrays = list(arrays)
        if axis is None:
            arrays, axis = [_ours([a])[0].reshape(-1) if isinstance(a, Methods) else np.ravel(a) for a in arrays], 0
        return _first(arrays)._function(name)(arrays, axis)
    return join


def _stacked(axis: int) -> Callable[..., Any]:
    """np.vstack (axis 0) and np.hstack (axis 1)."""
    def join(tup: Any) -> Any:
        arrays = [a if isinstance(a, Methods) else np.asarray(a) for a in tup]
        if axis == 0:
            arrays = [a.reshape(1, -1) if a.ndim < 2 else a for a in arrays]
        return _ours(arrays)[0]._function('concatenate')(arrays, axis if arrays[0].ndim > 1 else 0)
    return join


def _like(value: float) -> Callable[..., Any]:
    """np.zeros_like and np.ones_like."""
    def filled(a: Any, shape: Any = None, device: Any = None, fill_value: Any = value) -> Any:
        if shape is not None:
            return NotImplemented
        x = a._plain().copy()
        x.fill(fill_value)
        return a._constant(x)
    return filled


def _empty_like(prototype: Any, shape: Any = None, device: Any = None) -> Any:
    return _like(0)(prototype, shape, device)


def _outer(a: Any, b: Any) -> Any:
    a, b = (x if isinstance(x, Methods) else np.asarray(x) for x in (a, b))
    return a.reshape(-1, 1) * b.reshape(1, -1)


def _where(condition: Any, x: Any = None, y: Any = None) -> Any:
    return NotImplemented if x is None else _first([condition, x, y])._function('where')(condition, x, y)


def _einsum(operands: Any, **named: Any) -> Any:
    return _ours(operands)[0]._function('einsum')(*operands) if isinstance(operands[0], str) else NotImplemented


def _split(ary: Any, indices_or_sections: Any, axis: int = 0) -> Any:
    n, parts = ary.shape[axis], indices_or_sections
    if isinstance(parts, int):
        if parts < 1 or n % parts:
            raise ValueError(f'split: {n} elements cannot be divided into {parts} equal pieces')
        return list(ary.split([n // parts] * parts, axis))
    ends = [slice(None, end).indices(n)[1] for end in parts] + [n]
    starts = [0, *ends[:-1]]
    return [ary[(slice(None),) * (axis % ary.ndim) + (slice(a, b),)] for a, b in zip(starts, ends, strict=True)]


def _pad(array: Any, pad_width: Any, mode: str = 'constant', constant_values: Any = 0) -> Any:
    return array.pad(pad_width, constant_values) if mode == 'constant' and np.ndim(constant_values) == 0 else NotImplemented


def _norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    vectors = ord is None or (x.ndim == 1 if axis is None else np.ndim(axis) == 0)
    usual = ord is None or ord == np.inf or isinstance(ord, int | float) and ord > 0
    return x.norm(2 if ord is None else ord, axis, keepdims) if vectors and usual else NotImplemented


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    'concatenate': _joined('concatenate'), 'stack': _joined('stack'), 'where': _where, 'einsum': _einsum, 'split': _split,
    'pad': _pad, 'norm': _norm, 'vstack': _stacked(0), 'hstack': _stacked(1), 'zeros_like': _like(0), 'ones_like': _like(1),
    'empty_like': _empty_like,
    'full_like': _like(0), 'outer': _outer}


class _Direct(NamedTuple):
    """A function of numpy whose frequent calls are passed on as they are."""
    most: int                           # positional arguments that mean the same here
    named: frozenset[str]               # and named ones
    method: str = ''
    run: Callable[..., Any] | None = None


def _direct_calls() -> dict[Callable[..., Any], _Direct]:
    along, reduced = frozenset(('axis',)), frozenset(('axis', 'keepdims'))
    found = {name: _Direct(2, reduced, name) for name in ('sum', 'mean', 'max', 'min', 'prod', 'any', 'all', 'argmax', 'argmin',
                                                          'var', 'std')}
    found |= {name: _Direct(2, along, name) for name in ('cumsum', 'squeeze', 'expand_dims', 'flip')}
    found |= {name: _Direct(2, frozenset(), name) for name in ('reshape', 'dot')}
    found |= {'clip': _Direct(3, frozenset(), 'clip')}
    found |= {name: _Direct(3 if name == 'where' else 2, along, run=_FUNCTIONS[name]) for name in (
        'where', 'concatenate', 'stack')}
    return {getattr(np, name): direct for name, direct in found.items()}


_DIRECT = _direct_calls()


_DIRECT_UFUNCS = {getattr(np, name): run for name, run in _OPERATIONS.items()}


def _install() -> None:
    """Replace the protocol methods of Methods, which import this module in the first call.  Frequent calls take no detour."""
    def ufunc(self: Methods, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **named: Any) -> Any:
        if method == '__call__' and out is None and not named and ufunc in _DIRECT_UFUNCS:
            x, other = inputs[0], inputs[-1]
            if isinstance(x, Methods) and (type(other) is type(x) or not isinstance(other, Methods)):
                return _DIRECT_UFUNCS[ufunc](*inputs)
        return apply_ufunc(ufunc, method, inputs, out, named)

    def function(self: Methods, function: Callable[..., Any], types: Any, args: Any, named: Any) -> Any:
        direct = _DIRECT.get(function)
        if direct and len(args) <= direct.most and (not named or named.keys() <= direct.named):
            if direct.run:
                result = direct.run(*args, **named)
                if result is not NotImplemented:
                    return result
            elif args and isinstance(args[0], Methods):
                return getattr(args[0], direct.method)(*args[1:], **named)
        return apply_function(function, args, named)
    Methods.__array_ufunc__, Methods.__array_function__ = ufunc, function       # type: ignore[method-assign]


_install()
