"""The compute type of inference: packed float32, or weights in int8 or bfloat16 (docs/compact.md).

    model = Transformer(Config(..., ops=Compute('int8')), seed=None)
    model.config.ops.pack(model.params, tensors)
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pyops import ops
from pyops.backend import HOST, current_device
from pyops.errors import UserError
from pyops.ops.compact import CLASSES, PACKED, CompactWeight

if TYPE_CHECKING:
    from pyops.params import Parameter, Parameters


class Compute:
    """A replacement for pyops.ops from which a model creates its layers, for inference only.

    format      'int8', 'bf16' or 'float32'
    rounds      whether the weights are rounded.  If they are not, a model returns the same bits as with pyops.ops and keeps its
                parameters; after changing them, call pack() again

    Ops with products take compact weights, which pack() fills; all other ops come from pyops.ops.
    """
    is_compact = True

    def __init__(self, format: str) -> None:
        self.format, self.rounds = format, format != 'float32'
        self._classes = CLASSES if self.rounds else PACKED
        self._weights: dict[tuple[Any, ...], CompactWeight] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in self._classes:
            return getattr(ops, name)
        return lambda *arguments, **named: self._classes[name](*arguments, **named, family=self)

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

    def pack(self, params: Parameters, tensors: Mapping[str, np.ndarray] | None = None) -> None:
        """Pack {name of a parameter: values}, by default the values of params.

        If the weights are rounded, drop their parameters from params: the layers do not read them.
        """
        tensors = params.arrays() if tensors is None else tensors
        for weight in self._weights.values():
            weight.pack(tensors)
        if self.rounds:
            params.drop(self.names)


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
