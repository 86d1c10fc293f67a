"""Example inputs for gradient checks, shared by several array ops: example(normal) returns inputs and settings;
normal(*shape) draws random numbers."""
import numpy as np

INDEX = (slice(None, None, -2), None, 1, ...)


def one(normal):
    return [normal(3, 4)], {}


def two(normal):
    """Return two operands that broadcast to each other."""
    return [normal(3, 1, 4), normal(2, 1)], {}


def of_three_axes(**settings):
    """Return an example function for one array with three axes and these settings."""
    return lambda normal: ([normal(2, 3, 4)], settings)


def positive(x):
    return np.abs(x) + np.float32(0.1)


def distinct(normal):
    """Return an array whose elements differ by at least 1, so a small step changes no maximum."""
    return np.argsort(normal(24)).reshape(2, 3, 4).astype(np.float32)
