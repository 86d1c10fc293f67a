"""Elementwise array ops.  Operands are broadcast; one operand of a binary op may be a number."""
import math

import numpy as np

from pyops.ops.array import ArrayOp, sum_to
from pyops.ops.examples import one, positive, two

BOTH = (True, True)


def shape_of(operand):
    """Return the shape of an operand, () for a number."""
    return getattr(operand, 'shape', ())


def log_or_0(a):
    """Return log(a), with 0 where a is 0."""
    a = a + (a == 0)
    return a.log() if hasattr(a, 'log') else math.log(a) if a > 0 else math.nan


class Add(ArrayOp):
    """y = a + b;  da = dy, db = dy."""

    def forward(a, b):
        return a + b, (shape_of(a), shape_of(b))

    def backward(dy, ctx, wanted=BOTH):
        return tuple(want and sum_to(dy, shape) for shape, want in zip(ctx, wanted, strict=True))

    reference, example = np.add, two


class Subtract(ArrayOp):
    """y = a - b;  da = dy, db = -dy."""

    def forward(a, b):
        return a - b, (shape_of(a), shape_of(b))

    def backward(dy, ctx, wanted=BOTH):
        a, b = ctx
        return wanted[0] and sum_to(dy, a), wanted[1] and -sum_to(dy, b)

    reference, example = np.subtract, two


class Multiply(ArrayOp):
    """y = a b;  da = dy b, db = dy a."""

    def forward(a, b):
        return a * b, (a, b)

    def backward(dy, ctx, wanted=BOTH):
        a, b = ctx
        return wanted[0] and sum_to(dy * b, shape_of(a)), wanted[1] and sum_to(dy * a, shape_of(b))

    reference, example = np.multiply, two


class Divide(ArrayOp):
    """y = a / b;  da = dy / b, db = -dy y / b."""

    def forward(a, b):
        y = a / b
        return y, (shape_of(a), b, y)

    def backward(dy, ctx, wanted=BOTH):
        a, b, y = ctx
        da = dy / b
        return wanted[0] and sum_to(da, a), wanted[1] and -sum_to(da * y, shape_of(b))

    reference = np.divide

    def example(normal):
        return [normal(3, 1, 4), positive(normal(2, 1))], {}


class Power(ArrayOp):
    """y = a ** b;  da = dy b a ** (b - 1), db = dy y log(a).

    Where b is 0, da is 0 for every a; where a is 0, db is 0.
    """

    def forward(a, b):
        y = a ** b
        return y, (a, b, y)

    def backward(dy, ctx, wanted=BOTH):
        a, b, y = ctx
        return (wanted[0] and sum_to(dy * (b * a ** (b - 1 + (b == 0))), shape_of(a)),
                wanted[1] and sum_to(dy * y * log_or_0(a), shape_of(b)))

    reference = np.power

    def example(normal):
        return [positive(normal(3, 1, 4)), normal(2, 1)], {}


class Remainder(ArrayOp):
    """y = a - b floor(a / b);  da = dy, db = -dy floor(a / b)."""

    def forward(a, b):
        return a % b, (a, b)

    def backward(dy, ctx, wanted=BOTH):
        a, b = ctx
        return wanted[0] and sum_to(dy, shape_of(a)), wanted[1] and -sum_to(dy * (a // b), shape_of(b))

    reference = np.remainder

    def example(normal):
        return [normal(3, 1, 4), 3 + positive(normal(2, 1))], {}


class Maximum(ArrayOp):
    """y = max(a, b);  the gradient goes to the larger operand; if both are equal, half goes to each."""

    def forward(a, b):
        return a.maximum(b), (a, b)

    def backward(dy, ctx, wanted=BOTH):
        a, b = ctx
        tie = (a == b) * 0.5
        return wanted[0] and sum_to(dy * ((a > b) + tie), shape_of(a)), wanted[1] and sum_to(dy * ((a < b) + tie), shape_of(b))

    reference, example = np.maximum, two


class Minimum(ArrayOp):
    """y = min(a, b);  the gradient goes to the smaller operand; if both are equal, half goes to each."""

    def forward(a, b):
        return a.minimum(b), (a, b)

    def backward(dy, ctx, wanted=BOTH):
        a, b = ctx
        tie = (a == b) * 0.5
        return wanted[0] and sum_to(dy * ((a < b) + tie), shape_of(a)), wanted[1] and sum_to(dy * ((a > b) + tie), shape_of(b))

    reference, example = np.minimum, two


class Negate(ArrayOp):
    """y = -x;  dx = -dy."""

    def forward(x):
        return -x, ()

    def backward(dy, ctx):
        return -dy

    reference, example = np.negative, one


class Abs(ArrayOp):
    """y = |x|;  dx = dy sign(x), 0 at 0."""

    def forward(x):
        return abs(x), (x,)

    def backward(dy, ctx):
        x, = ctx
        return dy * ((x > 0) - (x < 0) * 1)

    reference, example = np.abs, one


class Exp(ArrayOp):
    """y = exp(x);  dx = dy y."""

    def forward(x):
        y = x.exp()
        return y, (y,)

    def backward(dy, ctx):
        y, = ctx
        return dy * y

    reference, example = np.exp, one


class Log(ArrayOp):
    """y = log(x);  dx = dy / x."""

    def forward(x):
        return x.log(), (x,)

    def backward(dy, ctx):
        x, = ctx
        return dy / x

    reference = np.log

    def example(normal):
        return [positive(normal(3, 4))], {}


class Sqrt(ArrayOp):
    """y = sqrt(x);  dx = dy / (2 y)."""

    def forward(x):
        y = x.sqrt()
        return y, (y,)

    def backward(dy, ctx):
        y, = ctx
        return dy / (2 * y)

    reference = np.sqrt

    def example(normal):
        return [positive(normal(3, 4))], {}


class Tanh(ArrayOp):
    """y = tanh(x);  dx = dy (1 - y^2)."""

    def forward(x):
        y = x.tanh()
        return y, (y,)

    def backward(dy, ctx):
        y, = ctx
        return dy * (1 - y * y)

    reference, example = np.tanh, one


class Sigmoid(ArrayOp):
    """y = 1 / (1 + exp(-x));  dx = dy y (1 - y)."""

    def forward(x):
        y = x.sigmoid()
        return y, (y,)

    def backward(dy, ctx):
        y, = ctx
        return dy * (y * (1 - y))

    def reference(x):
        return 1 / (1 + np.exp(-x))

    example = one


class Sin(ArrayOp):
    """y = sin(x);  dx = dy cos(x)."""

    def forward(x):
        return x.sin(), (x,)

    def backward(dy, ctx):
        x, = ctx
        return dy * x.cos()

    reference, example = np.sin, one


class Cos(ArrayOp):
    """y = cos(x);  dx = -dy sin(x)."""

    def forward(x):
        return x.cos(), (x,)

    def backward(dy, ctx):
        x, = ctx
        return -dy * x.sin()

    reference, example = np.cos, one


class Expm1(ArrayOp):
    """y = exp(x) - 1;  dx = dy exp(x)."""

    def forward(x):
        return x.expm1(), (x,)

    def backward(dy, ctx):
        x, = ctx
        return dy * x.exp()

    reference, example = np.expm1, one


class Log1p(ArrayOp):
    """y = log(1 + x);  dx = dy / (1 + x)."""

    def forward(x):
        return x.log1p(), (x,)

    def backward(dy, ctx):
        x, = ctx
        return dy / (x + 1)

    reference = np.log1p

    def example(normal):
        return [positive(normal(3, 4)) - 0.25], {}


class Arctan(ArrayOp):
    """y = arctan(x);  dx = dy / (1 + x^2)."""

    def forward(x):
        return x.arctan(), (x,)

    def backward(dy, ctx):
        x, = ctx
        return dy / (x * x + 1)

    reference, example = np.arctan, one


class Arcsin(ArrayOp):
    """y = arcsin(x);  dx = dy / sqrt((1 - x) (1 + x))."""

    def forward(x):
        return x.arcsin(), (x,)

    def backward(dy, ctx):
        x, = ctx
        return dy / ((1 - x) * (x + 1)).sqrt()

    reference = np.arcsin

    def example(normal):
        return [np.tanh(normal(3, 4))], {}


class Arccos(ArrayOp):
    """y = arccos(x);  dx = -dy / sqrt((1 - x) (1 + x))."""

    def forward(x):
        return x.arccos(), (x,)

    def backward(dy, ctx):
        x, = ctx
        return -dy / ((1 - x) * (x + 1)).sqrt()

    reference, example = np.arccos, Arcsin.example


class Erf(ArrayOp):
    """y = erf(x), the integral of 2 exp(-t^2) / sqrt(pi) from 0 to x;  dx = 2 dy exp(-x^2) / sqrt(pi)."""

    def forward(x):
        return x.erf(), (x,)

    def backward(dy, ctx):
        x, = ctx
        return dy * (x * -x).exp() * (2 / math.sqrt(math.pi))

    example = one

    def reference(x):
        return np.vectorize(math.erf, otypes=[float])(x)


class Tan(ArrayOp):
    """y = tan(x);  dx = dy (1 + y^2)."""

    def forward(x):
        y = x.tan()
        return y, (y,)

    def backward(dy, ctx):
        y, = ctx
        return dy * (y * y + 1)

    reference, example = np.tan, one


class ELU(ArrayOp):
    """y = x for x > 0, else exp(x) - 1;  dx = dy exp(min(x, 0))."""

    def forward(x):
        return x._unary('elu'), (x,)

    def backward(dy, ctx):
        x, = ctx
        return dy * x.clip(max=0).exp()

    def reference(x):
        return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))

    example = one


class Softplus(ArrayOp):
    """y = log(1 + exp(x));  dx = dy sigmoid(x)."""

    def forward(x):
        return x._unary('softplus'), (x,)

    def backward(dy, ctx):
        x, = ctx
        return dy * x.sigmoid()

    def reference(x):
        return np.logaddexp(x, 0)

    example = one


class Hardsigmoid(ArrayOp):
    """y = min(max(x + 3, 0), 6) / 6;  dx = dy / 6 for -3 < x < 3, else 0."""

    def forward(x):
        return x._unary('hardsigmoid'), (x,)

    def backward(dy, ctx):
        x, = ctx
        return dy * ((x > -3) & (x < 3)) / 6

    def reference(x):
        return np.clip(x + 3, 0, 6) / 6

    example = one


class Hardswish(ArrayOp):
    """y = x h(x), h(x) = min(max(x + 3, 0), 6) / 6;  dx = dy (h(x) + x / 6) for -3 < x < 3, else dy h(x)."""

    def forward(x):
        return x._unary('hardswish'), (x,)

    def backward(dy, ctx):
        x, = ctx
        inside = (x > -3) & (x < 3)
        return dy * (((x + 3).clip(0, 6) + x.clip(-3, 3) * inside) / 6)

    def reference(x):
        return x * np.clip(x + 3, 0, 6) / 6

    example = one
