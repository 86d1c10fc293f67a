"""What array ops share.

An array op is written on the operators that NDArray and Tensor have in common.  So its backward runs on NDArrays, where a
gradient is wanted and no more, and on Tensors, where the gradient itself shall have a gradient: the same formulas.
"""


class ArrayOp:
    """An op on NDArrays.  It has no state, so it is not instantiated: forward and backward are functions in a class.

    y, ctx = Op.forward(*arrays, **constants)       y: an array, or a tuple of arrays
    gradients = Op.backward(dy, ctx)                one for each array, in order; of one array: the gradient itself
    gradients = Op.backward(dy, ctx, wanted)        of ops on several arrays: wanted[i] False where nobody asks for number i

    ctx is a tuple of what backward needs: shapes, constants, and arrays.  Second derivatives see an array in it that is an
    input, or is y, as what it is; any other array is a constant for them.  A gradient is a new array, or dy or a view of it.
    Where it is mostly zeros, add_to(dx, dy, ctx) may add it in place.
    """


def call(op, x, *more, **constants):
    """An op within a formula: on the tape where x is a Tensor, else its forward alone."""
    tape = getattr(x, 'tape', None)
    return tape(op, x, *more, **constants) if tape else op.forward(x, *more, **constants)[0]


def sum_to(d, shape):
    """Undo broadcasting: sum d over the axes along which `shape` was stretched."""
    if d.shape == shape:
        return d
    extra = d.ndim - len(shape)
    stretched = tuple(i for i, n in enumerate(d.shape) if i < extra or n != shape[i - extra])
    return d.sum(stretched, keepdims=True).reshape(shape)


def normal_axes(axis, ndim):
    """None, a number or several, perhaps negative -> a sorted tuple of axes of an array with ndim of them."""
    axes = range(ndim) if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
    for a in axes:
        if not -ndim <= a < ndim:
            raise ValueError(f'axis {a} is out of bounds for an array of {ndim} dimensions')
    normal = sorted(a % ndim for a in axes)
    if len(set(normal)) != len(normal):
        raise ValueError(f'axis {axis}: an axis is named twice')
    return tuple(normal)
