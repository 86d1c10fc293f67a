"""The compute type of inference: packed float32, or weights in int8 or bfloat16 (docs/compact.md).

    model = Transformer(Config(..., ops=Compute('int8')), seed=None)
    model.config.ops.pack(model.params, tensors)
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyops import ops
from pyops.backend import HOST, current_device
from pyops.errors import UserError
from pyops.ops.compact import CLASSES, PACKED, CompactWeights


class Compute(CompactWeights):
    """A replacement for pyops.ops from which a model creates its layers, for inference only.

    Ops with products take compact weights, which pack() fills; all other ops come from pyops.ops.
    """

    def __init__(self, format: str) -> None:
        super().__init__(format)
        self._classes = CLASSES if self.rounds else PACKED

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in self._classes:
            return getattr(ops, name)
        return lambda *arguments, **named: self._classes[name](*arguments, **named, family=self)


def family(name: str, quant: str) -> Compute | None:
    """Return the family of a compute type.  None for float32 on a GPU, and with products that round their factors.

    UserError if the device or the recipe of quantization rules the type out
    """
    if name == 'float32':
        return Compute(name) if current_device().is_host and quant == 'none' and HOST.precision == 'fp32' else None
    if not current_device().is_host:
        raise UserError(f'compute type {name}: runs on the CPU only; give --compute float32, or run on the CPU with -g 0')
    if quant != 'none':
        raise UserError(f'compute type {name}: expected a model without quantization, got --quant {quant}; add --quant none')
    return Compute(name)
