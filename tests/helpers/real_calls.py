"""Calls of ops in trained models: their inputs have saturated, their upstream gradients are far smaller than random numbers,
and their sentences have different lengths.  Each call is a row of the op table.

A step of the model is recorded: forward and backward of each op are wrapped, and the arrays that they are given are copied.
"""
import contextlib
import copy
import inspect
from typing import Any, NamedTuple

import numpy as np
from rows import Built

from pyops.differences import every_op
from pyops.ops.array import ArrayOp
from pyops.params import Parameter


class Call(NamedTuple):
    """op: the instance;  arguments: those of forward that its formula has, by name, in order, with copies of the arrays
    dy: the upstream gradient"""
    op: Any
    arguments: dict
    dy: np.ndarray

    def row(self):
        return CallRow(self)


class CallBuilt(Built):
    """others: arguments that are no arrays, by name;  names: all arguments in their order"""
    others: dict
    names: tuple

    def arguments(self):
        given = self.inputs | self.constants | self.others
        return {name: given[name] for name in self.names}


class CallRow:
    """A row of the op table with one size, with the values of a Call."""

    def __init__(self, call):
        self.call, self.name = call, f'{type(call.op).__name__}-{call.op.name}'

    @property
    def size(self):
        return next(value.shape for value in self.call.arguments.values() if isinstance(value, np.ndarray))

    def build(self, size, rng):
        op, arguments = self.call.op, self.call.arguments
        arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
        inputs = {name: value for name, value in arrays.items() if value.dtype == np.float32}

        def make(**parameters):
            other = copy.copy(op)
            vars(other).update(parameters)
            return other
        built = CallBuilt(make, inputs, {name: value.value for name, value in vars(op).items() if isinstance(value, Parameter)},
                          {name: value for name, value in arrays.items() if name not in inputs}, self.call.dy, 0.0)
        built.others = {name: value for name, value in arguments.items() if name not in arrays}
        built.names = tuple(arguments)
        return built


@contextlib.contextmanager
def recorded():
    """Inside the block, the Calls whose backward runs are appended to the list.  Ops with several results are left out."""
    calls, running, found = [], {}, contextlib.ExitStack()

    def wrap(kind):
        forward, backward, signature = kind.forward, kind.backward, inspect.signature(kind.forward)
        formula = inspect.signature(kind.reference).parameters

        def record_forward(self, *values, **named):
            bound = signature.bind(self, *values, **named)
            bound.apply_defaults()
            kept = {name: value.copy() if isinstance(value, np.ndarray) else value
                    for name, value in bound.arguments.items() if name in formula}
            y, ctx = forward(self, *values, **named)
            if isinstance(y, np.ndarray):
                running[id(ctx)] = ctx, kept            # with the ctx, so that no other gets its id
            return y, ctx

        def record_backward(self, dy, ctx, *values, **named):
            kept = running.pop(id(ctx), None)
            if kept and dy is not None:                 # None: a gradient of the last state alone
                calls.append(Call(self, kept[1], dy.copy()))
            return backward(self, dy, ctx, *values, **named)
        kind.forward, kind.backward = record_forward, record_backward
        found.callback(setattr, kind, 'forward', forward)
        found.callback(setattr, kind, 'backward', backward)
    with found:
        for kind in every_op():
            if not issubclass(kind, ArrayOp) and {'forward', 'backward', 'reference'} <= vars(kind).keys():
                wrap(kind)
        yield calls
