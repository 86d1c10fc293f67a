"""The compute type of inference: float32, or weights in int8 or bfloat16 (docs/compact.md).

    model = Transformer(Config(..., ops=Compute('int8')), seed=None)
    model.config.ops.pack(tensors)
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pyops import ops
from pyops.backend import current_device
from pyops.errors import UserError
from pyops.ops.compact import CLASSES, CompactWeight

if TYPE_CHECKING:
    from pyops.params import Parameter, Parameters


class Compute:
    """A replacement for pyops.ops from which a model creates its layers, for inference only.   format: 'int8' or 'bf16'

    Ops with products take compact weights, which pack() fills; all other ops come from pyops.ops.
    """
    is_compact = True

    def __init__(self, format: str) -> None:
        self.format = format
        self._weights: dict[tuple[Any, ...], CompactWeight] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in CLASSES:
            return getattr(ops, name)
        return lambda *arguments, **named: CLASSES[name](*arguments, **named, family=self)

    def weight(self, weight: Parameter, bias: Parameter | None = None, part: slice | None = None) -> CompactWeight:
        """Return the CompactWeight of (a part of) a parameter: one for all layers that share it."""
        O, I = weight.value.shape
        rows = range(O)[part or slice(None)]
        key = weight.name, None if part is None else rows.start
        if key not in self._weights:
            self._weights[key] = CompactWeight([weight.name], (len(rows), I), self.format, part=part)
        if bias is not None:
            self._weights[key].biases = [bias.name]
        return self._weights[key]

    def joined(self, weights: Sequence[Parameter], biases: Sequence[Parameter]) -> CompactWeight:
        """Return a CompactWeight of parameters with equally long rows, one below the other."""
        names = [weight.name for weight in weights]
        shape = sum(len(weight.value) for weight in weights), weights[0].value.shape[1]
        return self._weights.setdefault(tuple(names), CompactWeight(names, shape, self.format, [bias.name for bias in biases]))

    @property
    def names(self) -> set[str]:
        """The names of the parameters that are packed, weights and biases."""
        return {name for found in self._weights.values() for name in (*found.names, *found.biases)}

    @property
    def nbytes(self) -> int:
        """The bytes of all compact weights."""
        return sum(found.nbytes for found in self._weights.values())

    def pack(self, params: Parameters, tensors: Mapping[str, np.ndarray]) -> None:
        """Pack {name of a parameter: values}, and drop these parameters from params, which have no values."""
        for weight in self._weights.values():
            weight.pack(tensors)
        params.drop(self.names)


def family(name: str, quant: str) -> Compute:
    """Return the family of a compute type.   UserError if the device or the recipe of quantization rules it out"""
    if not current_device().is_host:
        raise UserError(f'compute type {name}: runs on the CPU only; give --compute float32, or run on the CPU with -g 0')
    if quant != 'none':
        raise UserError(f'compute type {name}: expected a model without quantization, got --quant {quant}; add --quant none')
    return Compute(name)
