"""Functions on the parameters of layers, where PyTorch has them."""
from pyops.optim import clip_grad_norm_

__all__ = ['clip_grad_norm_']
