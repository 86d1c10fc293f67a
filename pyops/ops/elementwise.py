"""Array ops, element by element.  Operands are broadcast; one of two may be a number."""
import math

from pyops.ops.array import ArrayOp, sum_to

BOTH = (True, True)


def shape_of(operand):
    """() for a number."""
    return getattr(operand, 'shape', ())


def log_or_0(a):
    """log(a), and 0 where a is 0."""
    a = a + (a == 0)
    return a.log() if hasattr(a, 'log') else math.log(a) if a > 0 else math.nan


class Add(ArrayOp):
    """y = a + b;  da = dy, db = dy."""

    def forward(a, b):
        return a + b, (shape_of(a), shape_of(b))

    def backward(dy, ctx, wanted=BOTH):
        return tuple(want and sum_to(dy, shape) for shape, want in zip(ctx, wanted, strict=True))


class Subtract(ArrayOp):
    """y = a - b;  da = dy, db = -dy."""

    def forward(a, b):
        return a - b, (shape_of(a), shape_of(b))

    def backward(dy, ctx, wanted=BOTH):
        a, b = ctx
        return wanted[0] and sum_to(dy, a), wanted[1] and -sum_to(dy, b)


class Multiply(ArrayOp):
    """y = a b;  da = dy b, db = dy a."""

    def forward(a, b):
        return a * b, (a, b)

    def backward(dy, ctx, wanted=BOTH):
        a, b = ctx
        return wanted[0] and sum_to(dy * b, shape_of(a)), wanted[1] and sum_to(dy * a, shape_of(b))


class Divide(ArrayOp):
    """y = a / b;  da = dy / b, db = -dy y / b."""

    def forward(a, b):
        y = a / b
        return y, (shape_of(a), b, y)

    def backward(dy, ctx, wanted=BOTH):
        a, b, y = ctx
        da = dy / b
        return wanted[0] and sum_to(da, a), wanted[1] and -sum_to(da * y, shape_of(b))


class Power(ArrayOp):
    """y = a ** b;  da = dy b a ** (b - 1), db = dy y log(a).

    Where b is 0, da is 0 whatever a is; where a is 0, db is 0.
    """

    def forward(a, b):
        y = a ** b
        return y, (a, b, y)

    def backward(dy, ctx, wanted=BOTH):
        a, b, y = ctx
        return (wanted[0] and sum_to(dy * (b * a ** (b - 1 + (b == 0))), shape_of(a)),
                wanted[1] and sum_to(dy * y * log_or_0(a), shape_of(b)))


class Maximum(ArrayOp):
    """y = max(a, b);  the gradient goes to the larger one, and in halves to both where they are equal."""

    def forward(a, b):
        return a.maximum(b), (a, b)

    def backward(dy, ctx, wanted=BOTH):
        a, b = ctx
        tie = (a == b) * 0.5
        return wanted[0] and sum_to(dy * ((a > b) + tie), shape_of(a)), wanted[1] and sum_to(dy * ((a < b) + tie), shape_of(b))


class Minimum(ArrayOp):
    """y = min(a, b);  the gradient goes to the smaller one, and in halves to both where they are equal."""

    def forward(a, b):
        return a.minimum(b), (a, b)

    def backward(dy, ctx, wanted=BOTH):
        a, b = ctx
        tie = (a == b) * 0.5
        return wanted[0] and sum_to(dy * ((a < b) + tie), shape_of(a)), wanted[1] and sum_to(dy * ((a > b) + tie), shape_of(b))


class Negate(ArrayOp):
    """y = -x;  dx = -dy."""

    def forward(x):
        return -x, ()

    def backward(dy, ctx):
        return -dy


class Abs(ArrayOp):
    """y = |x|;  dx = dy sign(x), 0 at 0."""

    def forward(x):
        return abs(x), (x,)

    def backward(dy, ctx):
        x, = ctx
        return dy * ((x > 0) - (x < 0))


class Exp(ArrayOp):
    """y = exp(x);  dx = dy y."""

    def forward(x):
        y = x.exp()
        return y, (y,)

    def backward(dy, ctx):
        y, = ctx
        return dy * y


class Log(ArrayOp):
    """y = log(x);  dx = dy / x."""

    def forward(x):
        return x.log(), (x,)

    def backward(dy, ctx):
        x, = ctx
        return dy / x


class Sqrt(ArrayOp):
    """y = sqrt(x);  dx = dy / (2 y)."""

    def forward(x):
        y = x.sqrt()
        return y, (y,)

    def backward(dy, ctx):
        y, = ctx
        return dy / (2 * y)


class Tanh(ArrayOp):
    """y = tanh(x);  dx = dy (1 - y^2)."""

    def forward(x):
        y = x.tanh()
        return y, (y,)

    def backward(dy, ctx):
        y, = ctx
        return dy * (1 - y * y)


class Sigmoid(ArrayOp):
    """y = 1 / (1 + exp(-x));  dx = dy y (1 - y)."""

    def forward(x):
        y = x.sigmoid()
        return y, (y,)

    def backward(dy, ctx):
        y, = ctx
        return dy * (y * (1 - y))
