"""pyops: deep learning from the metal up.  Hand-written kernels, ops with explicit forward and backward."""

__version__ = '0.1.0'
