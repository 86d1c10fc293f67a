"""Operations of several kernels on small arrays of the CPU, recorded once and then run by one call.

`round`, `logsumexp`, `sort` and `einsum` are a few kernels with Python between them, which takes longer than the kernels: it
selects them, allocates and converts arguments.  All of that depends only on the shapes, strides and dtypes of the arrays and on
the other arguments.  So `recorded(array_type, function)` returns a function that runs `function` when it first gets arguments
of some kind, and the second time also on a Recorder, a device that computes nothing and keeps the launches.  From then on
pyops_run_recording launches the same kernels on the new arrays, so the results have the same bits.

A function that needs the values of an array in Python, changes an operand or returns a view of one cannot be recorded, and runs
as before; so do functions of large results, of arrays on another device or with freed memory, of other kinds of arguments, and
all while a plan records.  `function` also raises all errors.
"""
import functools
import itertools
import math

import numpy as np

from pyops.backend import library, state
from pyops.backend.arrays import Array, location, row_major
from pyops.backend.calls import Recording
from pyops.backend.device import Buffer
from pyops.backend.host import ADDRESS, CPU, HOST, KINDS, NULL, SMALL, cast, small_memory
from pyops.backend.small import new_array

MOST_RECORDINGS = 512       # of a function
MOST_WORK = 1 << 16         # bytes of intermediate results
MOST_NUMBERS = 64           # in a list or tuple
MOST_RESULTS, MOST_OPERANDS = 2, 3
_WORK = MOST_RESULTS + MOST_OPERANDS        # the number of the memory of intermediate results in pyops_run_recording
_ONCE, _NEVER = 'ran once', 'cannot be recorded'        # in place of a recording
_WORDS = KINDS[np.dtype(np.float64)]
_PLAIN = frozenset((int, bool, str, type(None)))        # types of arguments whose type and value tell them apart
_UNSURE = -1                # Buffer.mask of an array that may or may not be a mask


class NotRecordable(Exception):
    """The function needs values, changes an operand, or has other results than new arrays."""


class _Memory:
    """The memory of an array of a Recorder: of an operand (`operand`, its number), of a constant (`values`), or new."""

    def __init__(self, number, nbytes, operand=None, values=None):
        self.address, self.nbytes, self.operand, self.values = number << 40, nbytes, operand, values

    @property
    def is_new(self):
        return self.operand is None and self.values is None


class Recorder(CPU):
    """The CPU without memory: instead of running a kernel, a launch keeps its name and arguments in `launches`."""
    name = 'recorder'

    def __init__(self):
        super().__init__()
        self.launches, self._numbers = [], itertools.count(1)

    @property
    def numbers(self):
        return HOST.numbers                     # finding them takes longer than a recording

    def memory_of(self, nbytes, **how):
        return Buffer(self, _Memory(next(self._numbers), nbytes, **how))

    def allocate(self, shape, dtype, name):
        return self.memory_of(math.prod(shape) * dtype.itemsize)

    def wrap(self, owner, foreign=False):
        return self.memory_of(owner.nbytes, values=owner)

    def numpy(self, x):
        raise NotRecordable

    kernel_array = kernel_view = numpy

    def as_dtype(self, buffer, dtype):
        return buffer                           # the dtype belongs to the array

    def address(self, owner):
        return owner.address

    def _call(self, family, arrays, where, *rest):
        return False                            # `launch` runs the kernel

    def launch(self, name, *values):
        arguments = library.cpu().functions[f'pyops_{name}'].arguments
        if any(not argument.const and isinstance(x, Array) and not x.buffer.owner.is_new
               for argument, x in zip(arguments, values, strict=False)):
            raise NotRecordable
        self.launches.append((name, values))


def _recorded(array_type, function, args, named):
    """Run function(*args, **named) on a Recorder.  Return (Recording, function of the library, its first argument, NULL for
    each missing operand, (doubles of intermediate results, results, whether they are a tuple), *the first result), where the
    fifth is None for pyops_run_recording_1; a result is (kind of pointer, elements, bytes, shape, strides, dtype, Buffer.mask).
    NotRecordable, or what the function raises."""
    recorder, count = Recorder(), itertools.count()

    def stand_in(x):
        if x.__class__ is not array_type:
            return x
        y = array_type(recorder.memory_of(x.nbytes, operand=next(count)), 0, x.shape, x.strides, x.dtype)
        y.buffer.mask = None if x.buffer.mask is None else y.buffer.version
        return y
    try:
        positional = list(map(stand_in, args))          # before those given by name: `run` passes them in this order
        found = function(*positional, **{name: stand_in(value) for name, value in named.items()})
        operands, ys, masks = next(count), [], []
        for y in found if isinstance(found, tuple) else (found,):
            if not y.buffer.owner.is_new:       # a view of an operand
                raise NotRecordable
            masks.append(0 if y.is_mask else None if y.buffer.mask is None else _UNSURE)
            ys.append(y if y.is_compact() and y.nbytes == y.buffer.nbytes else y.copy())
        results = [y.buffer.owner for y in ys]
        if (operands > MOST_OPERANDS or not 0 < len(set(results)) == len(ys) <= MOST_RESULTS
                or not all(0 < memory.nbytes <= SMALL for memory in results)):
            raise NotRecordable
        calls, places, kept, work = [], [], [], {}

        def address(x, argument):
            if x is None:
                return 0
            if not isinstance(x, Array):        # shapes and strides, which Python computed
                kept.append(x)
                return location(x) if isinstance(x, np.ndarray) else int(cast(ADDRESS, x))
            memory, offset = x.buffer.owner, x.offset * x.dtype.itemsize
            if memory.values is not None:
                kept.append(memory.values)
                return location(memory.values) + offset
            if memory in results:
                place = results.index(memory)
            elif memory.operand is not None:
                place = MOST_RESULTS + memory.operand
            else:
                place, offset = _WORK, offset + work.setdefault(memory, sum([-(-one.nbytes // 64) * 64 for one in work]))
            places.append((len(calls), argument, place, offset))
            return 0
        for name, values in recorder.launches:
            arguments = library.cpu().functions[f'pyops_{name}'].arguments
            calls.append((name, [address(x, i) if argument.pointer else x
                                 for i, (argument, x) in enumerate(zip(arguments, values, strict=False))]))
    finally:
        recorder.launches.clear()               # the arrays refer to the recorder
    nbytes = sum([-(-one.nbytes // 64) * 64 for one in work])
    if nbytes > MOST_WORK:
        raise NotRecordable
    recording = Recording(calls, HOST, places, kept)
    described = [(KINDS[y.dtype], y.size, y.nbytes, y.shape, row_major(y.shape), y.dtype, mask)
                 for y, mask in zip(ys, masks, strict=True)]
    lib, several = library.cpu().lib, None
    launch, most = lib.pyops_run_recording_1, 2
    if isinstance(found, tuple) or operands > most or nbytes > lib.PYOPS_RECORDED_WORK:
        launch, most, several = lib.pyops_run_recording, MOST_OPERANDS, (nbytes // 8, described, isinstance(found, tuple))
    return recording, launch, recording.described, (NULL,) * (most - operands), several, *described[0]


def _typed(value):
    """Return an argument so that it is equal to arguments of its type alone: 1 is 1.0 and True.  TypeError for other types."""
    kind = value.__class__
    if kind is slice:
        if value.start is value.stop is value.step is None:     # the most frequent one
            return kind
        value = value.start, value.stop, value.step
    if (kind is tuple or kind is list or kind is slice) and len(value) <= MOST_NUMBERS:
        kinds = tuple(map(type, value))
        return (kind, kinds, *value) if _PLAIN.issuperset(kinds) else (kind, *map(_typed, value))
    if kind is float:
        return kind, value, math.copysign(1.0, value)
    if kind is bool or kind is int or kind is str or value is None or value is Ellipsis:
        return kind, value
    raise TypeError


def recorded(array_type, function):
    """Return a function that does what function(*args, **named) does, and records it for arguments that it gets again.

    The arguments: arrays of `array_type`, Python numbers, text, None, and lists and tuples without arrays.  The results: an
    array, or a tuple of one or two.  The kernels that run may depend on nothing but the arguments.
    """
    found = {}

    @functools.wraps(function)
    def run(*args, **named):
        if state.hooked_thread is not None:
            return function(*args, **named)
        key, pointers = [], []
        try:
            for value in (*args, *named.values()) if named else args:
                kind = value.__class__
                if kind is array_type:
                    buffer, offset = value.buffer, value.offset
                    mask, pointer = buffer.mask, buffer.pointer
                    if buffer.device is not HOST or pointer is None or (mask is not None and mask != buffer.version):
                        return function(*args, **named)
                    key += value.shape, value.strides, value.dtype, mask is None
                    pointers.append(pointer + offset if offset else pointer)
                else:
                    key.append(value if kind is int or value is None else _typed(value))
        except TypeError:                       # another kind of argument
            return function(*args, **named)
        if named:
            key += dict, *named
        key = tuple(key)
        call = found.get(key)
        if call.__class__ is not tuple:
            if call is None:
                if len(found) >= MOST_RECORDINGS:
                    found.clear()
                found[key] = _ONCE
            elif call is _ONCE:
                try:
                    found[key] = _recorded(array_type, function, args, named)
                except Exception:               # the function raises its errors below
                    found[key] = _NEVER
            return function(*args, **named)
        _, launch, recording, missing, several, kind, count, nbytes, shape, strides, dtype, mask = call
        if several is None:                     # the same without loops, which take as long as a kernel
            pointer = small_memory(kind, count)
            if launch(recording, pointer, *pointers, *missing):
                return function(*args, **named)     # which raises the error
            y = new_array(array_type, pointer, nbytes, shape, strides, dtype)
            if mask is not None:
                y.buffer.mask = mask
            return y
        words, results, is_tuple = several
        made = [small_memory(result[0], result[1]) for result in results]
        if launch(recording, *made, *(NULL,) * (MOST_RESULTS - len(made)), *pointers, *missing, small_memory(_WORDS, words)):
            return function(*args, **named)
        ys = []
        for pointer, (_, _, nbytes, shape, strides, dtype, mask) in zip(made, results, strict=True):
            y = new_array(array_type, pointer, nbytes, shape, strides, dtype)
            y.buffer.mask = mask
            ys.append(y)
        return tuple(ys) if is_tuple else ys[0]
    run.recordings = found
    return run
