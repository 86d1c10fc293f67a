"""The kernels of an op in host memory, recorded once for arrays of certain shapes and then run by one call.

Between two kernels an op checks its arguments, allocates and converts arrays in Python, which takes longer than small kernels.
All of that depends only on the shapes and dtypes of the arrays if the op says so (`same_launches`).  `record` runs forward or
backward of such an op once on arrays without contents, runs no kernel and keeps the launches; the RecordedOp that it returns
launches the same kernels on other arrays, so the results have the same bits.
"""
import numpy as np

from pyops import backend
from pyops.backend import library
from pyops.backend.arrays import location, row_major
from pyops.backend.calls import Recording
from pyops.backend.host import HOST, KINDS, NULL, pooled_memory, small_memory
from pyops.backend.pool import LEAST
from pyops.backend.small import new_array

# how many arrays pyops_run_recording_1 and pyops_run_recording take -> their numbers in a recording
_PLACES = {3: (0, 2, 3), 6: (0, 1, 2, 3, 4, 5)}


class RecordedOp:
    """The launches of a function of numpy arrays, which returns a sequence of arrays that are new or arguments, and None.

    new         (function that allocates it, kind of pointer, elements, bytes, shape, strides, dtype) of each array that it
                allocates
    results     for each result its number in [*new, *arguments], or None
    """
    __slots__ = ('new', 'results', '_run', '_described', '_missing', '_recording')

    def __init__(self, new, results, recording, run, missing):
        self.new = [(allocate, KINDS[x.dtype], x.size, x.nbytes, x.shape, row_major(x.shape), np.dtype(x.dtype.name))
                    for allocate, x in new]
        self.results, self._recording, self._run, self._missing = results, recording, run, missing
        self._described = recording.described

    def run(self, array_type, pointers):
        """Run the kernels on these arguments.  Return a list of the new arrays; None if a kernel failed."""
        memory, arrays = [], []
        for allocate, kind, count, nbytes, shape, strides, dtype in self.new:
            pointer = allocate(kind, count)
            memory.append(pointer)
            arrays.append(new_array(array_type, pointer, nbytes, shape, strides, dtype))
        return None if self._run(self._described, *memory, *pointers, *self._missing) else arrays


def record(function, arguments, kept):
    """Return the RecordedOp of function(*arrays) for arrays of these (shape, dtype); None if the launches cannot be recorded.

    kept: what refers to the other arrays that the kernels read and write, such as parameters
    """
    new, launches = [], []
    given = [np.empty(shape, dtype) for shape, dtype in arguments]

    def allocate(shape, dtype, name, kind):
        array = np.empty(shape, dtype)
        # kernels may expect that scratch memory is aligned
        new.append((pooled_memory if kind == 'scratch' or array.nbytes >= LEAST else small_memory, array))
        return array

    def listen(name, values):
        launches.append((name, values))
        return False
    with backend.hooks(allocate=allocate, listen=listen):
        found = function(*given)
    arrays = [*[array for _, array in new], *given]
    most = next((n for n in _PLACES if len(arrays) <= n), None)
    if most is None or not all(x.dtype in KINDS and x.size for x in arrays):
        return None
    numbers = {id(x): i for i, x in enumerate(arrays)}
    if any(x is not None and id(x) not in numbers for x in found):
        return None
    spans = [(location(x), x.nbytes) for x in arrays]
    places, constants = [], [kept]

    def argument(x, call, number):
        if x is None:
            return 0
        if not backend.is_array(x):
            return x
        at = location(x)
        for i, (start, nbytes) in enumerate(spans):
            if start <= at < start + nbytes:
                places.append((call, number, _PLACES[most][i], at - start))
                return 0
        constants.append(x)
        return at
    calls = [(name, [argument(x, call, number) for number, x in enumerate(values)])
             for call, (name, values) in enumerate(launches)]
    recording = Recording(calls, HOST, places, constants)
    lib = library.cpu().lib
    run = lib.pyops_run_recording_1 if most == 3 else lib.pyops_run_recording
    return RecordedOp(new, [None if x is None else numbers[id(x)] for x in found], recording, run,
                      (NULL,) * (most - len(arrays)))
