"""Examples that several array ops share, for gradient checks: example(normal) -> inputs, settings; normal(*shape) draws."""
import numpy as np

INDEX = (slice(None, None, -2), None, 1, ...)


def one(normal):
    return [normal(3, 4)], {}


def two(normal):
    """Operands that are broadcast to each other."""
    return [normal(3, 1, 4), normal(2, 1)], {}


def of_three_axes(**settings):
    """An example of one array with three axes, and these settings."""
    return lambda normal: ([normal(2, 3, 4)], settings)


def positive(x):
    return np.abs(x) + np.float32(0.1)


def distinct(normal):
    """No two elements are near each other, so a small step changes no maximum."""
    return np.argsort(normal(24)).reshape(2, 3, 4).astype(np.float32)
