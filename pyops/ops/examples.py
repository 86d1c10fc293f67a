"""Example inputs for gradient checks, shared by several array ops: example(normal) returns inputs and settings;
normal(*shape) draws random numbers."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyops.typing import Example, Normal

INDEX = (slice(None, None, -2), None, 1, ...)


def one(normal: Normal) -> Example:
    return [normal(3, 4)], {}


def two(normal: Normal) -> Example:
    """Return two operands that broadcast to each other."""
    return [normal(3, 1, 4), normal(2, 1)], {}


def of_three_axes(**settings: Any) -> Callable[[Normal], Example]:
    """Return an example function for one array with three axes and these settings."""
    return lambda normal: ([normal(2, 3, 4)], settings)


def positive(x: np.ndarray) -> np.ndarray:
    return np.abs(x) + np.float32(0.1)


def distinct(normal: Normal) -> np.ndarray:
    """Return an array whose elements differ by at least 1, so a small step changes no maximum."""
    return np.argsort(normal(24)).reshape(2, 3, 4).astype(np.float32)
