"""The CPU with numpy for the operations on NDArrays: the reference for the kernels, and for code on NDArrays."""
import math

import numpy as np

from pyops.backend.host import Host


def _sigmoid(x, out):
    np.negative(np.abs(x), out=out)
    e = np.exp(out)
    np.divide(np.where(x < 0, e, np.float32(1)), 1 + e, out=out)


def _elu(x, out):
    out[...] = np.where(x > 0, x, np.expm1(x))


def _softplus(x, out):
    np.logaddexp(x, x.dtype.type(0), out=out)


def _hardsigmoid(x, out):
    out[...] = np.clip(x + 3, 0, 6) / 6


def _hardswish(x, out):
    out[...] = x * (np.clip(x + 3, 0, 6) / 6)


def _erf(x, out):
    out[...] = np.vectorize(math.erf, otypes=[float])(x)


_UNARY = {'copy': np.positive, 'negate': np.negative, 'abs': np.abs, 'sqrt': np.sqrt, 'exp': np.exp, 'log': np.log,
          'tanh': np.tanh, 'sigmoid': _sigmoid, 'floor': np.floor, 'sin': np.sin, 'cos': np.cos, 'expm1': np.expm1,
          'log1p': np.log1p, 'arctan': np.arctan, 'arcsin': np.arcsin, 'arccos': np.arccos, 'erf': _erf, 'round': np.rint,
          'ceil': np.ceil, 'trunc': np.trunc, 'sign': np.sign, 'tan': np.tan, 'elu': _elu, 'softplus': _softplus,
          'hardsigmoid': _hardsigmoid, 'hardswish': _hardswish}
_BINARY = {name: getattr(np, name) for name in ('add', 'subtract', 'multiply', 'divide', 'power', 'maximum', 'minimum', 'equal',
                                                'not_equal', 'less', 'less_equal', 'greater', 'greater_equal',
                                                'floor_divide', 'remainder')}
_BITS = {'and': (np.bitwise_and, np.logical_and), 'or': (np.bitwise_or, np.logical_or), 'xor': (np.bitwise_xor, np.logical_xor)}
_REDUCE = {'sum': np.add, 'max': np.maximum, 'min': np.minimum}


def _function(op, dtype):
    return _BITS[op][dtype.kind == 'f'] if op in _BITS else _BINARY[op]


def _quiet():
    return np.errstate(all='ignore')            # infinities and NaN are valid results


class Numpy(Host):
    name = 'numpy_device'

    def unary(self, op, y, x):
        with _quiet():
            _UNARY[op](np.broadcast_to(x.stored(), y.shape), out=y.stored())

    def binary(self, op, y, a, b):
        with _quiet():
            _function(op, y.dtype)(a.stored(), b.stored(), out=y.stored())

    def scalar(self, op, y, x, value, reflected):
        x, value = x.stored(), y.dtype.type(value)
        with _quiet():
            _function(op, y.dtype)(*((value, x) if reflected else (x, value)), out=y.stored())

    def where(self, y, condition, a, b):
        y.stored()[...] = np.where(condition.stored(), a.stored(), b.stored())

    def fill(self, y, value):
        y.stored()[...] = value

    def convert(self, y, x):
        with _quiet():
            y.stored()[...] = x.stored()

    def reduce(self, op, y, x):
        axes = tuple(d for d, (kept, n) in enumerate(zip(y.shape, x.shape, strict=True)) if kept != n)
        with _quiet():
            _REDUCE[op].reduce(x.stored(), axes, dtype=y.dtype, out=y.stored(), keepdims=True)

    def softmax(self, y, x, outer, n, inner, log):
        if not n:
            return
        with _quiet():
            x = x.stored().reshape(outer, n, inner)
            below = x - x.max(1, keepdims=True)
            total = np.exp(below).sum(1, keepdims=True)
            y.stored().reshape(outer, n, inner)[...] = below - np.log(total) if log else np.exp(below) / total

    def softmax_backward(self, dx, dy, y, outer, n, inner, log):
        with _quiet():
            dy, y = (a.stored().reshape(outer, n, inner) for a in (dy, y))
            dx.stored().reshape(outer, n, inner)[...] = (dy - np.exp(y) * dy.sum(1, keepdims=True) if log else
                                                         y * (dy - (dy * y).sum(1, keepdims=True)))

    def argmax(self, y, x):
        y.stored()[...] = x.stored().argmax(-1)

    def argsort(self, y, x):
        y.stored()[...] = x.stored().argsort(-1, kind='stable')

    def cumulate(self, op, y, x, outer, n, inner, last):
        function, x = getattr(np, op), x.stored().reshape(outer, n, inner)
        x = x.astype(np.float64 if x.dtype.kind == 'f' else x.dtype)
        with _quiet():
            found = function.reduce(x, 1, dtype=x.dtype) if last else function.accumulate(x, 1, dtype=x.dtype)
            y.stored()[...] = found.reshape(y.shape)

    def matmul(self, y, a, b):
        with _quiet():
            np.matmul(a.stored(), b.stored(), out=y.stored())

    def take(self, y, x, ids):
        rows = ids.stored()
        if rows.size and not (0 <= rows.min() and rows.max() < len(x)):
            raise IndexError(f'take: ids from {rows.min()} to {rows.max()}, expected 0 to {len(x) - 1}')
        y.stored()[...] = x.stored()[rows]

    def add_at(self, y, ids, rows):
        np.add.at(y.stored(), ids.stored(), rows.stored())

    def put_rows(self, y, ids, rows):
        y.stored()[ids.stored()] = rows.stored()
