"""Whether ops are recorded, and what runs them: no_grad, enable_grad, detect_anomaly, and the interpreter of
gradcheck."""
from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar('T')


class _Mode(threading.local):
    grad = True
    before: tuple[bool, ...] = ()       # values of `grad` outside the open no_grad and enable_grad blocks
    anomaly = False                     # whether each result and each gradient is searched for NaN
    interpreter: Callable[..., Any] | None = None       # runs ops instead of `apply`


mode = _Mode()


class _Grad:
    """Context manager and decorator: `with no_grad(): ...` or `@no_grad()` above a function."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled

    def __enter__(self) -> None:
        mode.before, mode.grad = (*mode.before, mode.grad), self.enabled        # not in self: it may be entered twice

    def __exit__(self, *_: Any) -> None:
        mode.before, mode.grad = mode.before[:-1], mode.before[-1]

    def __call__(self, function: Callable[..., T]) -> Callable[..., T]:
        if inspect.isgeneratorfunction(function):
            raise TypeError(f'{function.__name__}: a generator runs after the call that creates it; use `with` inside its body')

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> T:
            with _Grad(self.enabled):
                return function(*args, **kwargs)
        return wrapped


def no_grad(function: Any = None) -> Any:
    """Disable recording inside the block, or in a decorated function: results require no gradient, and leaves may be changed in
    place."""
    return _Grad(False) if function is None else _Grad(False)(function)


def enable_grad(function: Any = None) -> Any:
    """Enable recording inside the block, or in a decorated function, within no_grad()."""
    return _Grad(True) if function is None else _Grad(True)(function)


def inference_mode(mode: Any = True) -> Any:
    """Disable recording like no_grad; with mode=False record."""
    return no_grad(mode) if callable(mode) else _Grad(not mode)


class set_grad_enabled(_Grad):
    """Enable or disable recording from now on; as a context manager or a decorator, inside the block alone."""

    def __init__(self, mode: bool) -> None:
        super().__init__(bool(mode))
        self._outside = _set_grad(self.enabled)

    def __enter__(self) -> None:
        _set_grad(self._outside)
        super().__enter__()

    def __call__(self, function: Callable[..., T]) -> Callable[..., T]:
        _set_grad(self._outside)
        return super().__call__(function)


def _set_grad(enabled: bool) -> bool:
    """Set whether ops are recorded, and return the value before."""
    before, mode.grad = mode.grad, enabled
    return before


class set_detect_anomaly:
    """Switch the search of detect_anomaly on or off from now on; as a context manager, inside the block alone."""

    def __init__(self, mode: bool, check_nan: bool = True) -> None:
        self._outside = _set_anomaly(bool(mode and check_nan))

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        _set_anomaly(self._outside)


def _set_anomaly(enabled: bool) -> bool:
    before, mode.anomaly = mode.anomaly, enabled
    return before


def detect_anomaly(check_nan: bool = True) -> set_detect_anomaly:
    """Inside the block, raise RuntimeError naming the op whose result, or whose gradient in backward, has the first NaN.

    Every array is searched, and copied from a GPU: for debugging only.
    """
    return set_detect_anomaly(True, check_nan)


def is_grad_enabled() -> bool:
    """Return whether ops are recorded."""
    return mode.grad


def is_interpreted() -> bool:
    """Return whether gradcheck is evaluating the function in float64; state that lasts must not change then."""
    return mode.interpreter is not None


@contextlib.contextmanager
def interpreted_by(run: Callable[..., Any]) -> Iterator[None]:
    """Inside the block, apply(op, *inputs, **constants) calls run(op, inputs, constants), and nothing is recorded."""
    before, mode.interpreter = mode.interpreter, run
    try:
        with no_grad():
            yield
    finally:
        mode.interpreter = before
