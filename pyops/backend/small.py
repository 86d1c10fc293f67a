"""Operations on small arrays of the CPU, each with one dictionary look-up, one allocation and one call.

The time of an operation on a few elements is Python's: selecting a kernel, broadcasting, converting arguments.  All of that
depends only on the shapes, strides and dtypes of the operands, so it is done once for each combination and remembered as a
prepared call: the function of the library, the C arrays that describe the layout, and the shape of the result.

`binary(array_type, op)` and the others return a function that computes op as a new array of `array_type` (the class NDArray).
It returns None whenever the general path has to run: for arrays of another device or with freed memory, mixed dtypes, large
results, operands that do not broadcast, while a plan records.  The general path also raises all errors.
"""
import functools
import math

import numpy as np

from pyops.backend import library, state
from pyops.backend.arrays import MAX_AXES, Array, row_major
from pyops.backend.calls import Recording
from pyops.backend.host import (
    ADDRESS,
    HOST,
    KINDS,
    NULL,
    SMALL,
    SmallBuffer,
    as_floats,
    buffer_over,
    cast,
    small_memory,
    zeroed_memory,
)
from pyops.backend.operations import CONVERSIONS, DOUBLE, FLOAT, INT, layout

MOST_CALLS = 4096       # prepared calls of an operation
MOST_ROWS = 1024        # rows of an index, which is read in Python
MOST_ELEMENTS = 64      # that are copied in Python
MOST_PRODUCTS = 1 << 20  # bytes of the products of a batch; larger memory comes from the pool, in 5 us
PYTHON_NUMBERS = frozenset((float, int))
_FILLS = PYTHON_NUMBERS | {bool}
_ON_INT = frozenset(('copy', 'negate', 'abs'))          # unary operations that int32 has, too
_KEEP_MASKS = frozenset(('copy', 'abs', 'max', 'min'))  # of one array: the result of a mask is a mask
_new_object = object.__new__


def new_array(array_type, pointer, nbytes, shape, strides, dtype):
    """Return a compact array over new memory.  Setting the attributes here takes half the time of __init__ of the two."""
    buffer = _new_object(SmallBuffer)
    buffer.pointer = pointer
    buffer.nbytes = nbytes
    buffer.version = 0
    buffer.mask = None
    y = _new_object(Array)
    y.buffer = buffer
    y.offset = 0
    y.shape = shape
    y.strides = strides
    y.dtype = dtype
    y.__class__ = array_type
    return y


def _remember(calls, key, call):
    if len(calls) >= MOST_CALLS:
        calls.clear()
    calls[key] = call
    return call


def _memory_of(shape, dtype):
    """Return (kind of pointer, number of elements, bytes, shape, strides, dtype) of a result; None if it is not small."""
    count = math.prod(shape)
    nbytes = count * dtype.itemsize
    return (KINDS[dtype], count, nbytes, shape, row_major(shape), dtype) if 0 < nbytes <= SMALL else None


def _common_shape(a, b, op):
    """Return the shape of the result of op; None for operands that the general path converts or rejects."""
    if a.dtype is not b.dtype or a.dtype not in KINDS or (op == 'divide' and a.dtype is INT):
        return None
    return _broadcast(a.shape, b.shape)


def _broadcast(*shapes):
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        return None


def _conversion(x, dtype):
    """Return (function, kind of pointer, number of elements, further arguments) that converts x to a compact array of another
    dtype."""
    function = getattr(library.cpu().lib, f'pyops_{CONVERSIONS[dtype, x.dtype]}')
    return function, KINDS[dtype], math.prod(x.shape), (*layout(x.shape, x.shape, row_major(x.shape), x.shape, x.strides), NULL)


def _converted(conversion, pointer):
    """Run a conversion.  Return the pointer to the result, which owns its memory."""
    function, kind, count, arguments = conversion
    result = small_memory(kind, count)
    status = function(result, pointer, *arguments)
    if status:
        HOST.check(status)
    return result


def binary(array_type, op, compares, may_be_mask):
    """Return f(a, b).  compares: the result is a mask;  may_be_mask: the general path decides that if both operands are."""
    calls = {}

    def prepared(a, b):
        shape = _broadcast(a.shape, b.shape)
        if shape is None or a.dtype not in KINDS or b.dtype not in KINDS:
            return None
        found = {a.dtype, b.dtype}
        dtype = DOUBLE if DOUBLE in found else FLOAT if FLOAT in found or op == 'divide' else INT
        memory = _memory_of(shape, dtype)
        if memory is None:
            return None
        conversions = [None if x.dtype is dtype else _conversion(x, dtype) for x in (a, b)]
        operands = [part for x in (a, b) for part in (x.shape, x.strides if x.dtype is dtype else row_major(x.shape))]
        return (HOST.function('strided_binary', dtype), *memory, HOST.numbers[op],
                *layout(shape, shape, row_major(shape), *operands), conversions if any(conversions) else None)

    def run(a, b):
        left, right = a.buffer, b.buffer
        if left.device is not HOST or right.device is not HOST or state.hooked_thread is not None:
            return None
        key = a.shape, a.strides, a.dtype, b.shape, b.strides, b.dtype
        call = calls.get(key, False)
        if call is False:
            call = _remember(calls, key, prepared(a, b))
        if call is None:
            return None
        if may_be_mask and left.mask is not None and right.mask is not None:
            return None
        function, kind, count, nbytes, shape, strides, dtype, number, c_shape, c_strides, ndim, conversions = call
        pointer = small_memory(kind, count)
        try:
            first = left.pointer + a.offset if a.offset else left.pointer
            second = right.pointer + b.offset if b.offset else right.pointer
            if conversions is not None:
                first = first if conversions[0] is None else _converted(conversions[0], first)
                second = second if conversions[1] is None else _converted(conversions[1], second)
            status = function(pointer, first, second, c_shape, c_strides, ndim, number, NULL)
        except TypeError:               # the pointer of freed memory is None
            return None
        if status:
            HOST.check(status)
        y = new_array(array_type, pointer, nbytes, shape, strides, dtype)
        if compares:
            y.buffer.mask = 0           # the version of a new Buffer
        return y
    return run


def scalar(array_type, op, compares):
    """Return f(x, value, reflected) for a Python number."""
    calls = {}

    def prepared(x, is_float, reflected):
        if x.dtype not in KINDS:
            return None
        dtype = FLOAT if x.dtype is INT and (is_float or op == 'divide') else x.dtype
        memory = _memory_of(x.shape, dtype)
        if memory is None:
            return None
        conversion = None if dtype is x.dtype else _conversion(x, dtype)
        x_layout, number = (x.shape, x.strides if conversion is None else memory[4]), ((), ())
        if dtype is not DOUBLE:
            where, family = layout(x.shape, x.shape, memory[4], *x_layout), 'strided_scalar'
        else:                           # kernels for float64 take no scalars
            order = (number, x_layout) if reflected else (x_layout, number)
            where, family = layout(x.shape, x.shape, memory[4], *order[0], *order[1]), 'strided_binary'
        return HOST.function(family, dtype), *memory, HOST.numbers[op], *where, conversion

    def run(x, value, reflected):
        buffer = x.buffer
        if value.__class__ not in PYTHON_NUMBERS or buffer.device is not HOST or state.hooked_thread is not None:
            return None
        is_float = value.__class__ is float
        key = x.shape, x.strides, x.dtype, is_float, reflected
        call = calls.get(key, False)
        if call is False:
            call = _remember(calls, key, prepared(x, is_float, reflected))
        if call is None:
            return None
        function, kind, count, nbytes, shape, strides, dtype, number, c_shape, c_strides, ndim, conversion = call
        pointer = small_memory(kind, count)
        try:
            at = buffer.pointer + x.offset
            if conversion is not None:
                at = _converted(conversion, at)
            if dtype is not DOUBLE:
                status = function(pointer, at, c_shape, c_strides, ndim, number, reflected, value, NULL)
            else:
                one = small_memory(kind, (value,))
                status = function(pointer, one if reflected else at, at if reflected else one, c_shape, c_strides, ndim, number,
                                  NULL)
        except (TypeError, OverflowError):      # freed memory, an integer outside int32
            return None
        if status:
            HOST.check(status)
        y = new_array(array_type, pointer, nbytes, shape, strides, dtype)
        if compares:
            y.buffer.mask = 0
        return y
    return run


def unary(array_type, op):
    """Return f(x)."""
    def prepared(x, *_):
        memory = _memory_of(x.shape, x.dtype) if x.dtype in KINDS and (x.dtype is not INT or op in _ON_INT) else None
        return memory and (HOST.function('strided_unary', x.dtype), *memory,
                           (*layout(x.shape, x.shape, memory[4], x.shape, x.strides), HOST.numbers[op], NULL))
    return _of_one_array(array_type, prepared, op)


def convert(array_type):
    """Return f(x, dtype) for another dtype than x has."""
    def prepared(x, dtype, _):
        memory = _memory_of(x.shape, dtype) if (dtype, x.dtype) in CONVERSIONS else None
        return memory and (getattr(library.cpu().lib, f'pyops_{CONVERSIONS[dtype, x.dtype]}'), *memory,
                           (*layout(x.shape, x.shape, memory[4], x.shape, x.strides), NULL))
    return _of_one_array(array_type, prepared, 'convert')


def reduce(array_type, op):
    """Return f(x, axes, keepdims).  axes: a tuple of ints in [0, ndim)."""
    def prepared(x, axes, keepdims):
        if x.dtype not in KINDS or 0 in x.shape:
            return None
        kept = tuple([1 if d in axes else n for d, n in enumerate(x.shape)])
        shape = kept if keepdims else tuple([n for d, n in enumerate(x.shape) if d not in axes])
        memory = _memory_of(shape, x.dtype)
        return memory and (HOST.function('strided_reduce', x.dtype), *memory,
                           (*layout(x.shape, kept, row_major(kept), x.shape, x.strides), HOST.numbers[op], NULL))
    return _of_one_array(array_type, prepared, op)


def _of_one_array(array_type, prepared, op):
    """Return f(x, how, more).  prepared(x, how, more) returns the call, whose last item is the arguments after the arrays."""
    calls, keeps_masks, takes_masks = {}, op in _KEEP_MASKS, op != 'negate'      # whose general path decides about masks

    def run(x, how=None, more=None):
        buffer = x.buffer
        if buffer.device is not HOST or state.hooked_thread is not None:
            return None
        key = x.shape, x.strides, x.dtype, how, more
        call = calls.get(key, False)
        if call is False:
            call = _remember(calls, key, prepared(x, how, more))
        if call is None or (buffer.mask is not None and not takes_masks):
            return None
        function, kind, count, nbytes, shape, strides, dtype, arguments = call
        pointer = small_memory(kind, count)
        try:
            status = function(pointer, buffer.pointer + x.offset, *arguments)
        except TypeError:               # the pointer of freed memory is None
            return None
        if status:
            HOST.check(status)
        y = new_array(array_type, pointer, nbytes, shape, strides, dtype)
        if keeps_masks and buffer.mask == buffer.version:
            y.buffer.mask = 0           # the version of a new Buffer
        return y
    return run


def _as_recording(name, arguments, kept):
    """Return the first argument of pyops_run_recording_1 for a call of a kernel, of a result and two operands.  arguments: the
    others, pointers as addresses;  kept: the arrays at these.  Each argument of a call from Python takes as long as a small
    product."""
    return Recording([(name, (0, 0, 0, *arguments))], HOST, [(0, 0, 0, 0), (0, 1, 2, 0), (0, 2, 3, 0)], kept)


def matmul(array_type):
    """Return f(a, b) for vectors, matrices and batches of them, both float32 or both float64.  The result may be large."""
    calls = {}

    def prepared(a, b):
        if a.dtype is not b.dtype or a.dtype not in (FLOAT, DOUBLE) or not a.shape or not b.shape:
            return None
        left, a_steps = ((1, *a.shape), (0, *a.strides)) if len(a.shape) == 1 else (a.shape, a.strides)
        right, b_steps = ((*b.shape, 1), (*b.strides, 0)) if len(b.shape) == 1 else (b.shape, b.strides)
        (M, K), (rows, N), batch = left[-2:], right[-2:], _broadcast(left[:-2], right[:-2])
        if batch is None or K != rows or 0 in (*batch, M, N) or len(batch) + 2 > MAX_AXES:
            return None
        shape = (*batch, *a.shape[-2:-1], *(b.shape[-1:] if len(b.shape) > 1 else ()))
        count = math.prod(shape)
        memory = KINDS[a.dtype], count, count * a.dtype.itemsize, shape, row_major(shape), a.dtype
        strides = *a_steps[-2:], *b_steps[-2:]
        if not batch and a.dtype is FLOAT:
            return _as_recording('gemm', (0, M, N, K, N, *strides, 0, 0), ()), *memory
        where = layout(batch, batch, row_major((*batch, M, N))[:-2], left[:-2], a_steps[:-2], right[:-2], b_steps[:-2])
        arguments = *[int(cast(ADDRESS, found)) for found in where[:2]], len(batch), M, N, K, N, *strides
        if a.dtype is FLOAT:
            return _as_recording('gemm_batched', (*arguments, 0), where), *memory
        return _as_recording('matmul_double', arguments, where), *memory

    def run(a, b):
        left, right = a.buffer, b.buffer
        if left.device is not HOST or right.device is not HOST or state.hooked_thread is not None:
            return None
        key = a.shape, a.strides, a.dtype, b.shape, b.strides, b.dtype
        call = calls.get(key, False)
        if call is False:
            call = _remember(calls, key, prepared(a, b))
        if call is None:
            return None
        recording, kind, count, nbytes, shape, strides, dtype = call
        large = HOST.allocate(shape, dtype, 'matmul') if nbytes > MOST_PRODUCTS else None
        pointer = small_memory(kind, count) if large is None else large.pointer
        try:
            status = recording.function(recording.described, pointer, left.pointer + a.offset, right.pointer + b.offset)
        except TypeError:
            return None
        if status:
            HOST.check(status)
        if large is not None:
            return array_type(large, 0, shape, strides, dtype)
        return new_array(array_type, pointer, nbytes, shape, strides, dtype)
    return run


def in_place(op):
    """Return f(y, x), which computes y = op(y, x), or y = x for op 'copy', and returns whether it did.  x: an array or a Python
    number."""
    calls, copies = {}, op == 'copy'

    def prepared(y, x):
        is_broadcast = any([n > 1 and not step for n, step in zip(y.shape, y.strides, strict=True)])
        if y.dtype not in KINDS or 0 in y.shape or is_broadcast or (op == 'divide' and y.dtype is INT):
            return None
        own = y.shape, y.shape, y.strides
        if x is None:
            family, where = ('strided_fill', layout(*own)) if copies else ('strided_scalar', layout(*own, y.shape, y.strides))
            return None if y.dtype is DOUBLE else (HOST.function(family, y.dtype), HOST.numbers[op], *where)
        if _common_shape(y, x, op) != y.shape:
            return None
        family, where = ('strided_unary', layout(*own, x.shape, x.strides)) if copies else (
            'strided_binary', layout(*own, y.shape, y.strides, x.shape, x.strides))
        return HOST.function(family, y.dtype), HOST.numbers[op], *where

    def run(y, x):
        is_number, buffer = x.__class__ in PYTHON_NUMBERS, y.buffer
        if (not is_number and x.__class__ is not y.__class__ or buffer.device is not HOST or state.hooked_thread is not None
                or buffer.mask is not None and not copies):             # the general path decides about masks
            return False
        key = (y.shape, y.strides, y.dtype) if is_number else (y.shape, y.strides, y.dtype, x.shape, x.strides, x.dtype)
        call = calls.get(key, False)
        if call is False:
            call = _remember(calls, key, prepared(y, None if is_number else x))
        if call is None:
            return False
        function, number, c_shape, c_strides, ndim = call
        try:
            to = buffer.pointer + y.offset
            if not is_number:
                other = x.buffer
                if other.device is not HOST or other is buffer or other.foreign or buffer.foreign:      # they may overlap
                    return False
                at = other.pointer + x.offset
                status = function(*((to, at) if copies else (to, to, at)), c_shape, c_strides, ndim, number, NULL)
            elif copies:
                status = function(to, c_shape, c_strides, ndim, x, NULL)
            else:
                status = function(to, to, c_shape, c_strides, ndim, number, 0, x, NULL)
        except (TypeError, OverflowError):      # freed memory, a float and int32, an integer outside int32
            return False
        if status:
            HOST.check(status)
        buffer.version += 1
        return True
    return run


def where(array_type):
    """Return f(condition, a, b) for an array `condition`; a or b may be a Python number."""
    calls = {}

    def prepared(condition, a, b):
        real = next((x for x in (a, b) if isinstance(x, array_type)), None)
        if real is None or real.dtype not in KINDS or condition.dtype not in (INT, real.dtype):
            return None
        # an int32 condition is converted: what is not 0 stays so
        conversion = None if condition.dtype is real.dtype else _conversion(condition, real.dtype)
        operands = [(condition.shape, condition.strides if conversion is None else row_major(condition.shape))]
        for x in (a, b):
            if x.__class__ in PYTHON_NUMBERS:
                if x.__class__ is float and real.dtype is INT:          # the result is float32
                    return None
                operands.append(((), ()))
            elif not isinstance(x, array_type) or x.dtype is not real.dtype:
                return None
            else:
                operands.append((x.shape, x.strides))
        shape = _broadcast(*[own for own, _ in operands])
        memory = None if shape is None else _memory_of(shape, real.dtype)
        return memory and (HOST.function('strided_where', real.dtype), *memory,
                           *layout(shape, shape, row_major(shape), *[part for pair in operands for part in pair]), conversion)

    def pointer_to(x, kind):
        if x.__class__ in PYTHON_NUMBERS:
            return small_memory(kind, (x,))
        return x.buffer.pointer + x.offset if x.buffer.device is HOST else None

    def run(condition, a, b):
        if condition.buffer.device is not HOST or state.hooked_thread is not None:
            return None
        key = (condition.shape, condition.strides, condition.dtype,
               *((a.shape, a.strides, a.dtype) if a.__class__ is array_type else (a.__class__,)),
               *((b.shape, b.strides, b.dtype) if b.__class__ is array_type else (b.__class__,)))
        call = calls.get(key, False)
        if call is False:
            call = _remember(calls, key, prepared(condition, a, b))
        if call is None or (a.__class__ is array_type and a.buffer.mask is not None):      # the result may be a mask
            return None
        function, kind, count, nbytes, shape, strides, dtype, c_shape, c_strides, ndim, conversion = call
        pointer = small_memory(kind, count)
        try:
            chosen = condition.buffer.pointer + condition.offset
            if conversion is not None:
                chosen = _converted(conversion, chosen)
            status = function(pointer, chosen, pointer_to(a, kind), pointer_to(b, kind), c_shape, c_strides, ndim, NULL)
        except (TypeError, OverflowError):      # freed memory, an array on another device, an integer outside int32
            return None
        if status:
            HOST.check(status)
        return new_array(array_type, pointer, nbytes, shape, strides, dtype)
    return run


def full(array_type, kind_of):
    """Return f(shape, value, dtype, device) for a shape of ints and a Python number or bool.

    kind_of(type of the value, dtype): the dtype of the array, and whether it is a mask.
    """
    calls = {}

    def prepared(shape, number, given):
        dtype, is_mask = kind_of(number, given)
        memory = _memory_of(shape, dtype) if len(shape) <= MAX_AXES and min(shape, default=0) >= 0 else None
        if memory is None or (dtype is INT and number is float):
            return None
        fill = None if dtype is DOUBLE else HOST.function('strided_fill', dtype)
        return is_mask, fill, *memory, layout(shape, shape, memory[4])

    def run(shape, value, dtype, device):
        number, shape = value.__class__, (shape,) if shape.__class__ is int else shape
        if (number not in _FILLS or shape.__class__ is not tuple or state.hooked_thread is not None
                or device is not HOST and (device is not None or state.device is not HOST)):
            return None
        for n in shape:                 # 2.0 equals 2, and is refused
            if n.__class__ is not int:
                return None
        key = shape, number, dtype
        try:
            call = calls.get(key, False)
        except TypeError:               # a dtype without a hash
            return None
        if call is False:
            call = _remember(calls, key, prepared(*key))
        if call is None:
            return None
        is_mask, fill, kind, count, nbytes, shape, strides, dtype, where = call
        if value.__class__ is int and not value:
            pointer = zeroed_memory(kind, count)
        elif fill is None:
            pointer = small_memory(kind, [float(value)] * count)
        else:
            pointer = small_memory(kind, count)
            try:
                status = fill(pointer, *where, bool(value) if is_mask else value, NULL)
            except OverflowError:       # an integer outside int32
                return None
            if status:
                HOST.check(status)
        y = new_array(array_type, pointer, nbytes, shape, strides, dtype)
        if is_mask:
            y.buffer.mask = 0
        return y
    return run


def from_numpy(array_type):
    """Return f(found, dtype, device), which copies a numpy array."""
    def run(found, dtype, device):
        count = found.size
        nbytes = count * dtype.itemsize
        if (not 0 < nbytes <= SMALL or found.ndim > MAX_AXES or state.hooked_thread is not None
                or device is not HOST and (device is not None or state.device is not HOST)):
            return None
        shape, pointer = found.shape, small_memory(KINDS[dtype], count)
        view = np.ndarray(shape, dtype, buffer_over(pointer))
        if found.dtype is dtype or found.dtype.kind != 'f':
            view[...] = found
        else:
            with np.errstate(invalid='ignore', over='ignore'):
                view[...] = found
        return new_array(array_type, pointer, nbytes, shape, row_major(shape), dtype)
    return run


def from_list(array_type):
    """Return f(numbers, dtype, device), an array of one axis of the Python numbers in a list or range.

    dtype: INT, FLOAT, DOUBLE or, for a list, None for the default.
    """
    def run(numbers, dtype, device):
        count = len(numbers)
        if (not 0 < count <= MOST_ELEMENTS or state.hooked_thread is not None
                or device is not HOST and (device is not None or state.device is not HOST)):
            return None
        if numbers.__class__ is list:
            kinds = set(map(type, numbers))
            if not kinds <= PYTHON_NUMBERS:
                return None
            dtype = dtype or (FLOAT if float in kinds else INT)
        try:
            pointer = small_memory(KINDS[dtype], numbers if numbers.__class__ is list else list(numbers))
        except (TypeError, OverflowError):      # a float and int32, an integer outside int32
            return None
        return new_array(array_type, pointer, count * dtype.itemsize, (count,), (1,), dtype)
    return run


def join(array_type, is_new):
    """Return f(arrays, axis) for a list of arrays of one dtype.  is_new: they are joined along a new axis."""
    calls = {}

    def prepared(arrays, axis):
        first = arrays[0]
        axis += (len(first.shape) + is_new) * (axis < 0)
        shapes = [x.shape[:axis] + x.shape[axis if is_new else axis + 1:] for x in arrays]
        if (any([x.dtype is not first.dtype or len(x.shape) != len(first.shape) for x in arrays]) or first.dtype not in KINDS
                or not 0 <= axis < len(first.shape) + is_new <= MAX_AXES or any([shape != shapes[0] for shape in shapes])):
            return None
        sizes = [1 if is_new else x.shape[axis] for x in arrays]
        memory = _memory_of((*shapes[0][:axis], sum(sizes), *shapes[0][axis:]), first.dtype)
        if memory is None:
            return None
        strides, number = memory[4], HOST.numbers['copy']
        own = strides[:axis] + strides[axis + 1:] if is_new else strides
        parts = [(i, sum(sizes[:i]) * strides[axis], (*layout(x.shape, x.shape, own, x.shape, x.strides), number, NULL))
                 for i, x in enumerate(arrays) if 0 not in x.shape]
        return HOST.function('strided_unary', first.dtype), *memory, parts

    def run(arrays, axis):
        if not arrays or axis.__class__ is not int or state.hooked_thread is not None:
            return None
        key, are_masks = [axis], True
        for x in arrays:
            if x.__class__ is not array_type or x.buffer.device is not HOST:
                return None
            are_masks = are_masks and x.buffer.mask == x.buffer.version
            key += x.shape, x.strides, x.dtype
        key = tuple(key)
        call = calls.get(key, False)
        if call is False:
            call = _remember(calls, key, prepared(arrays, axis))
        if call is None:
            return None
        function, kind, count, nbytes, shape, strides, dtype, parts = call
        pointer = small_memory(kind, count)
        try:
            for i, offset, arguments in parts:
                x = arrays[i]
                status = function(pointer + offset, x.buffer.pointer + x.offset, *arguments)
                if status:
                    HOST.check(status)
        except TypeError:               # the pointer of freed memory is None
            return None
        y = new_array(array_type, pointer, nbytes, shape, strides, dtype)
        if are_masks:
            y.buffer.mask = 0
        return y
    return run


def nonzero(array_type):
    """Return f(x), the int32 indices of the elements of a compact array that are not 0, an array for each axis; all have the
    same Buffer."""
    calls = {}

    def prepared(x):
        n, ndim = math.prod(x.shape), len(x.shape)
        if x.dtype not in KINDS or not 0 < ndim * n * INT.itemsize <= SMALL or x.strides != row_major(x.shape):
            return None
        return HOST.function('nonzero', x.dtype), n, layout(x.shape)[0], ndim

    def run(x):
        buffer = x.buffer
        if buffer.device is not HOST or buffer.pointer is None or state.hooked_thread is not None:
            return None
        key = x.shape, x.strides, x.dtype
        call = calls.get(key, False)
        if call is False:
            call = _remember(calls, key, prepared(x))
        if call is None:
            return None
        function, n, c_shape, ndim = call
        pointer = small_memory(KINDS[INT], ndim * n)
        shape = function(pointer, buffer.pointer + x.offset, c_shape, ndim),
        y = new_array(array_type, pointer, 4 * ndim * n, shape, (1,), INT)
        return y, *[array_type(y.buffer, d * n, shape, (1,), INT) for d in range(1, ndim)]
    return run


def take(array_type):
    """Return f(x, index) for a compact array x and an index of some rows: a list or a numpy array of one axis of integers, or a
    numpy array of bools that is a mask of the first axes of x."""
    def rows_in(index, x):
        """Return a C array of the row numbers in an index, how many they are, and the number of axes of x that it selects from;
        None for another index."""
        if index.__class__ is np.ndarray:
            if index.size > MOST_ROWS:
                return None
            if index.dtype.kind == 'b':
                if not index.ndim or index.shape != x.shape[:index.ndim]:
                    return None
                rows = np.flatnonzero(index).tolist()
                return small_memory(KINDS[INT], rows), len(rows), index.ndim
            if index.dtype.kind not in 'iu' or index.ndim != 1:
                return None
            index = index.tolist()
        elif index.__class__ is not list or len(index) > MOST_ROWS or not all([i.__class__ is int for i in index]):
            return None
        n = x.shape[0]
        if not index or min(index) < -n or max(index) >= n:
            return None
        return small_memory(KINDS[INT], index if min(index) >= 0 else [i + n if i < 0 else i for i in index]), len(index), 1

    def run(x, index):
        buffer = x.buffer
        if (buffer.device is not HOST or x.dtype not in KINDS or not x.shape or x.strides != row_major(x.shape)
                or buffer.pointer is None or state.hooked_thread is not None):
            return None
        found = rows_in(index, x)
        if found is None:
            return None
        rows, many, axes = found
        shape, kind = (many, *x.shape[axes:]), KINDS[x.dtype]
        count = math.prod(shape)
        nbytes = count * x.dtype.itemsize
        if not 0 < nbytes <= SMALL:
            return None
        pointer, at, words = small_memory(kind, count), buffer.pointer + x.offset, count // many
        to = pointer
        if x.dtype is not FLOAT:        # the kernel copies words of 4 bytes
            to, at, words = as_floats(pointer), as_floats(at), words * x.dtype.itemsize // 4
        status = library.cpu().lib.pyops_embedding_forward(to, at, rows, many, math.prod(x.shape[:axes]), words, NULL)
        if status:
            HOST.check(status)
        y = new_array(array_type, pointer, nbytes, shape, row_major(shape), x.dtype)
        if buffer.mask == buffer.version:
            y.buffer.mask = 0
        return y
    return run


def select(array_type):
    """Return f(x, mask), the rows of a compact array x that a compact mask of its first axes selects."""
    calls = {}

    def prepared(x, mask):
        n = math.prod(mask.shape)
        if (x.dtype not in KINDS or mask.dtype not in KINDS or not mask.shape or mask.shape != x.shape[:len(mask.shape)]
                or x.strides != row_major(x.shape) or mask.strides != row_major(mask.shape)):
            return None
        memory, rest = _memory_of(x.shape, x.dtype), x.shape[len(mask.shape):]
        return memory and (HOST.function('select', mask.dtype), n, memory[2] // n, rest, row_major((1, *rest)), *memory)

    def run(x, mask):
        buffer, chosen = x.buffer, mask.buffer
        if (buffer.device is not HOST or chosen.device is not HOST or chosen.mask is None or chosen.mask != chosen.version
                or state.hooked_thread is not None):
            return None
        key = x.shape, x.strides, x.dtype, mask.shape, mask.strides, mask.dtype
        call = calls.get(key, False)
        if call is False:
            call = _remember(calls, key, prepared(x, mask))
        if call is None:
            return None
        function, n, each, rest, strides, kind, count, nbytes, _, _, dtype = call
        pointer = small_memory(kind, count)
        try:
            found = function(pointer, buffer.pointer + x.offset, chosen.pointer + mask.offset, n, each)
        except TypeError:               # the pointer of freed memory is None
            return None
        y = new_array(array_type, pointer, nbytes, (found, *rest), strides, dtype)
        if buffer.mask == buffer.version:
            y.buffer.mask = 0
        return y
    return run


def fill_where(array_type):
    """Return f(x, mask, value), which sets x to a Python number where a mask of its shape is true, and returns whether it
    did."""
    calls = {}

    def prepared(x, mask):
        is_broadcast = any([n > 1 and not step for n, step in zip(x.shape, x.strides, strict=True)])
        if x.dtype not in KINDS or mask.dtype not in KINDS or mask.shape != x.shape or 0 in x.shape or is_broadcast:
            return None
        conversion = None if mask.dtype is x.dtype else _conversion(mask, x.dtype)
        strides = mask.strides if conversion is None else row_major(mask.shape)
        where = layout(x.shape, x.shape, x.strides, x.shape, strides, (), (), x.shape, x.strides)
        return HOST.function('strided_where', x.dtype), KINDS[x.dtype], where, conversion

    def run(x, mask, value):
        buffer, chosen = x.buffer, mask.buffer
        if (value.__class__ not in PYTHON_NUMBERS or buffer.device is not HOST or chosen.device is not HOST
                or buffer.mask is not None or chosen.mask is None or chosen.mask != chosen.version
                or chosen is buffer or buffer.foreign or chosen.foreign or state.hooked_thread is not None):
            return False
        key = x.shape, x.strides, x.dtype, mask.shape, mask.strides, mask.dtype
        call = calls.get(key, False)
        if call is False:
            call = _remember(calls, key, prepared(x, mask))
        if call is None:
            return False
        function, kind, where, conversion = call
        try:
            to, condition = buffer.pointer + x.offset, chosen.pointer + mask.offset
            if conversion is not None:
                condition = _converted(conversion, condition)
            status = function(to, condition, small_memory(kind, (value,)), to, *where, NULL)
        except (TypeError, OverflowError):      # freed memory, a float and int32, an integer outside int32
            return False
        if status:
            HOST.check(status)
        buffer.version += 1
        return True
    return run


@functools.lru_cache(1024)
def offsets(shape, strides):
    """Return the offset of each element, as a numpy array of this shape."""
    found = np.zeros(shape, np.int64)
    for d, (n, step) in enumerate(zip(shape, strides, strict=True)):
        found += (np.arange(n) * step).reshape([-1 if i == d else 1 for i in range(len(shape))])
    found.flags.writeable = False
    return found


def elements(array_type):
    """Return f(x, index), a copy of x[index], and g(x, index, value), which sets x[index] to a Python number or an array and
    returns if it did.  index: any of numpy, which finds the offsets of the elements."""
    def places(x, index):
        buffer = x.buffer
        if (buffer.device is not HOST or x.dtype not in KINDS or math.prod(x.shape) > MOST_ROWS or buffer.pointer is None
                or state.hooked_thread is not None):
            return None
        try:
            found = np.asarray(offsets(x.shape, x.strides)[index])
        except IndexError:
            return None
        return found if found.size <= MOST_ELEMENTS else None

    def get(x, index):
        found = places(x, index)
        if found is None or not found.size or found.ndim > MAX_AXES:
            return None
        pointer, kind = x.buffer.pointer + x.offset, KINDS[x.dtype]
        result = small_memory(kind, [pointer[i] for i in found.reshape(-1).tolist()])
        y = new_array(array_type, result, found.size * x.dtype.itemsize, found.shape, row_major(found.shape), x.dtype)
        if x.buffer.mask == x.buffer.version:
            y.buffer.mask = 0
        return y

    def put(x, index, value):
        is_array = value.__class__ is array_type
        if not (is_array or value.__class__ in PYTHON_NUMBERS) or x.buffer.mask is not None or any(
                [n > 1 and not step for n, step in zip(x.shape, x.strides, strict=True)]):
            return False
        found = places(x, index)
        if found is None:
            return False
        pointer = x.buffer.pointer + x.offset
        try:
            if not is_array:
                for i in found.reshape(-1).tolist():
                    pointer[i] = value
            else:
                if value.buffer.device is not HOST or value.dtype not in KINDS or math.prod(value.shape) > MOST_ELEMENTS:
                    return False
                given = offsets(value.shape, value.strides)
                if given.shape != found.shape:
                    given = np.broadcast_to(given, found.shape)
                source = value.buffer.pointer + value.offset
                numbers = [source[i] for i in given.reshape(-1).tolist()]       # all before the first is written
                for i, number in zip(found.reshape(-1).tolist(), numbers, strict=True):
                    pointer[i] = number
        except ValueError:              # the general path names shapes that do not fit, and takes leading axes of 1
            return False
        except (TypeError, OverflowError):      # a float and int32, an integer outside int32: nothing was written
            return False
        x.buffer.version += 1
        return True
    return get, put
