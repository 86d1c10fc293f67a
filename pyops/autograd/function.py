"""Function: an operation with a gradient of its own, written on Tensors, with PyTorch's names."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pyops.autograd.mode import mode, no_grad
from pyops.autograd.tape import Recorded, apply, constant
from pyops.ops.array import ArrayOp

if TYPE_CHECKING:
    from pyops.autograd import Tensor


class Context:
    """What forward leaves for backward: saved tensors, and any attributes.

    needs_input_grad    for each argument of forward, whether backward has to return its gradient
    """
    needs_input_grad: tuple[bool, ...]

    def __init__(self) -> None:
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep Tensors, or None, for backward, which finds them in saved_tensors; they may be changed in place no more."""
        self.saved_tensors = tensors


class _Custom(ArrayOp):
    """The op of a Function.  Its inputs are the Tensors among the arguments; `arguments` has the others, and None for those."""
    function: Any

    @classmethod
    def forward(cls, *arrays: Any, arguments: tuple[Any, ...], needed: tuple[bool, ...]) -> Any:
        context, tensors = Context(), iter([constant(a) for a in arrays])
        context.needs_input_grad = needed
        given = [next(tensors) if x is _TENSOR else x for x in arguments]
        with no_grad():
            if cls.function.setup_context is Function.setup_context:
                y = cls.function.forward(context, *given)
            else:
                y = cls.function.forward(*given)
                cls.function.setup_context(context, tuple(given), y)
        for one in y if isinstance(y, tuple) else (y,):
            if not isinstance(one, Recorded):
                raise TypeError(f'{cls.__name__}: forward: expected a Tensor or a tuple of them, got {type(one).__name__}')
        saved = context.saved_tensors
        arrays = tuple(x.array if isinstance(x, Recorded) else x for x in saved)
        return tuple(one.array for one in y) if isinstance(y, tuple) else y.array, (context, arguments, *arrays)

    @classmethod
    def backward(cls, dy: Any, ctx: Any) -> Any:
        (context, arguments, *saved), several = ctx, isinstance(dy, tuple)
        plain = not isinstance(dy[0] if several else dy, Recorded)          # NDArrays, unless the gradients are recorded
        dys = [constant(d) if plain else d for d in (dy if several else (dy,))]
        context.saved_tensors = tuple(constant(a) if plain and a is not None else a for a in saved)
        gradients = cls.function.backward(context, *dys)
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        if len(gradients) != len(arguments):
            raise RuntimeError(f'{cls.__name__}: backward: expected {len(arguments)} gradients, one for each argument of '
                               f'forward, got {len(gradients)}; None is one, too')
        return tuple(g.array if plain and g is not None else g
                     for g, x in zip(gradients, arguments, strict=True) if x is _TENSOR)


_TENSOR = object()          # in place of the Tensors among the arguments


class Function:
    """An operation with a gradient of its own: PyTorch's torch.autograd.Function.

        class Cube(Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x ** 3

            @staticmethod
            def backward(ctx, dy):
                x, = ctx.saved_tensors
                return dy * 3 * x ** 2

        y = Cube.apply(x)

    forward gets Tensors without a history, and any other arguments, and returns a Tensor or a tuple of them.  backward gets a
    gradient for each result and returns one for each argument, None for those that have none; it can be differentiated again.
    With setup_context(ctx, inputs, output), forward takes no ctx.  gradcheck needs float32=True.
    """
    _op: ClassVar[type[_Custom]]

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        cls._op = type(cls.__name__, (_Custom,), {'function': cls, '__module__': cls.__module__})

    @staticmethod
    def forward(*args: Any) -> Any:
        """Compute the results."""
        raise NotImplementedError('Function: define the static methods forward and backward')

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Any) -> None:
        """Save what backward needs, for a forward without ctx."""

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> Any:
        """Return the gradients of the arguments of forward."""
        raise NotImplementedError('Function: define the static methods forward and backward')

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Run forward and record it."""
        arguments = tuple(_TENSOR if isinstance(x, Recorded) else x for x in args)
        needed = tuple(isinstance(x, Recorded) and x.requires_grad and mode.grad for x in args)
        tensors = [x for x in args if isinstance(x, Recorded)]
        return apply(cls._op, *tensors, arguments=arguments, needed=needed)
