"""PyTorch's name of the package with pyops.utils.data."""
