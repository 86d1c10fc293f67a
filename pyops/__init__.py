"""pyops: deep learning from the metal up.  Hand-written kernels, ops with explicit forward and backward."""

__version__ = '0.1.0'


def __getattr__(name):
    """cpu() and numpy_device(): the devices of pyops.ndarray, which is imported when they are asked for."""
    if name in ('cpu', 'numpy_device'):
        from pyops import ndarray
        return getattr(ndarray, name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
