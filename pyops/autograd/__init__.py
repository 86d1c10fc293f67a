"""Automatic differentiation: a Tensor is an array with a record of the op that produced it; see docs/autograd.md.

    mode.py         whether ops are recorded
    tape.py         apply(op, ...) runs an op on Tensors and records it as a Node
    gradients.py    backward() and grad() visit the Nodes from the last to the first
    tensor.py       Tensor: its operators and methods apply ops
    function.py     Function: an operation with a gradient of its own
    functional.py   Jacobians and Hessians
"""
import importlib
from typing import Any

from pyops.autograd import functional
from pyops.autograd.function import Function
from pyops.autograd.gradients import backward, grad
from pyops.autograd.mode import (
    detect_anomaly,
    enable_grad,
    inference_mode,
    is_grad_enabled,
    no_grad,
    set_detect_anomaly,
    set_grad_enabled,
)
from pyops.autograd.tape import Node, apply
from pyops.autograd.tensor import Tensor

__all__ = ['Function', 'Node', 'Tensor', 'apply', 'backward', 'detect_anomaly', 'enable_grad', 'functional', 'grad',
           'inference_mode', 'is_grad_enabled', 'no_grad', 'set_detect_anomaly', 'set_grad_enabled']


def __getattr__(name: str) -> Any:
    """Return PyTorch's gradcheck and gradgradcheck, imported on first use: the module of the checks imports this one."""
    if name not in ('gradcheck', 'gradgradcheck'):
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(importlib.import_module('pyops.differences'), f'torch_{name}')
