"""Jacobians, Hessians and products with them, of functions of Tensors: PyTorch's torch.autograd.functional."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyops.autograd.gradients import grad
from pyops.autograd.mode import enable_grad
from pyops.autograd.tensor import Tensor, stack
from pyops.errors import ShapeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyops.typing import Numbers


def _leaves(inputs: Any) -> tuple[Tensor, ...]:
    """Return Tensors over the same numbers through which the function is differentiated.  Those with a history keep it."""
    return tuple(x if x.origin is not None else x.detach().requires_grad_()
                 for x in (inputs if isinstance(inputs, tuple | list) else (inputs,)))


def _gradients(y: Tensor, xs: tuple[Tensor, ...], dy: Any, create_graph: bool) -> list[Tensor]:
    """Return the gradients of y, zeros for inputs on which it does not depend."""
    found = grad(y, xs, dy, retain_graph=True, create_graph=create_graph, allow_unused=True) if y.requires_grad else \
        (None,) * len(xs)
    return [x.new_zeros(x.shape) if g is None else g for g, x in zip(found, xs, strict=True)]


def jacobian(func: Callable[..., Any], inputs: Any, create_graph: bool = False) -> Any:
    """Return the derivatives of the results of func by its inputs: a Tensor of shape y.shape + x.shape.

    For a tuple of inputs a tuple of Tensors, and for a tuple of results a tuple of those.
    create_graph: record the derivatives, so that they can be differentiated.
    """
    with enable_grad():
        xs = _leaves(inputs)
        results = func(*xs)
        jacobians = []
        for y in results if isinstance(results, tuple) else (results,):
            rows = []
            for i in range(y.size):
                dy = np.zeros(y.size, y.dtype)
                dy[i] = 1
                rows.append(_gradients(y, xs, dy.reshape(y.shape), create_graph))
            by_input = tuple(stack(column).reshape(*y.shape, *x.shape) if rows else x.new_zeros((*y.shape, *x.shape))
                             for column, x in zip(zip(*rows, strict=True) if rows else xs, xs, strict=True))
            jacobians.append(by_input if isinstance(inputs, tuple | list) else by_input[0])
    return tuple(jacobians) if isinstance(results, tuple) else jacobians[0]


def hessian(func: Callable[..., Tensor], inputs: Any, create_graph: bool = False) -> Any:
    """Return the second derivatives of a function with one number as its result: shape x.shape + x.shape; for a tuple of inputs
    a tuple of tuples."""
    def first(*xs: Tensor) -> Any:
        y = func(*xs)
        if y.size != 1:
            raise RuntimeError(f'hessian: expected a function with one number as its result, got shape {y.shape}')
        found = tuple(_gradients(y, xs, None, True))
        return found if isinstance(inputs, tuple | list) else found[0]
    return jacobian(first, inputs, create_graph)


def vjp(func: Callable[..., Any], inputs: Any, v: Numbers | None = None, create_graph: bool = False) -> tuple[Any, Any]:
    """Return the result of func, and the product of v, of its shape, with its Jacobian.  None: 1, for a scalar."""
    with enable_grad():
        xs = _leaves(inputs)
        y = func(*xs)
        found = tuple(_gradients(y, xs, v, create_graph))
    return y if create_graph else y.detach(), found if isinstance(inputs, tuple | list) else found[0]


def jvp(func: Callable[..., Any], inputs: Any, v: Any = None, create_graph: bool = False) -> tuple[Any, Any]:
    """Return the result of func, a Tensor, and the product of its Jacobian with v, of the shapes of the inputs; None: ones."""
    with enable_grad():
        xs = _leaves(inputs)
        y = func(*xs)
        dy = y.detach().requires_grad_()
        # the product with the transpose is linear in dy, so its derivative by dy is the product
        products = grad(y, xs, dy, create_graph=True, allow_unused=True) if y.requires_grad else ()
        pairs = [(g, d) for g, d in zip(products, _directions(v, xs), strict=False) if g is not None and g.requires_grad]
        found = grad([g for g, _ in pairs], dy, [d for _, d in pairs], create_graph=create_graph, retain_graph=True,
                     materialize_grads=True)[0] if pairs else y.new_zeros(y.shape)
    return y if create_graph else y.detach(), found


def hvp(func: Callable[..., Tensor], inputs: Any, v: Any = None, create_graph: bool = False) -> tuple[Any, Any]:
    """Return the result of func, one number, and the product of its Hessian with v, of the shapes of the inputs."""
    with enable_grad():
        xs = _leaves(inputs)
        y = func(*xs)
        first = [(g, d) for g, d in zip(_gradients(y, xs, None, True), _directions(v, xs), strict=True) if g.requires_grad]
        found = tuple(grad([g for g, _ in first], xs, [d for _, d in first], create_graph=create_graph, retain_graph=True,
                           materialize_grads=True) if first else (x.new_zeros(x.shape) for x in xs))
    return y if create_graph else y.detach(), found if isinstance(inputs, tuple | list) else found[0]


def _directions(v: Any, xs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return v as a list of Tensors, of the shapes of the inputs."""
    if v is None:
        return [x.new_ones(x.shape) for x in xs]
    several = isinstance(v, tuple) or isinstance(v, list) and len(xs) > 1
    given = [one if isinstance(one, Tensor) else x.new_tensor(one) for one, x in zip(v if several else [v], xs, strict=True)]
    for one, x in zip(given, xs, strict=True):
        if one.shape != x.shape:
            raise ShapeError(f'v: expected shape {x.shape}, got {one.shape}')
    return given
