"""A recorded list of kernel calls in the memory layout of pyops_replay."""
import functools
import time

import numpy as np

from pyops.backend import library


class Queued:
    """A Python function between kernels that only queues work on streams of a GPU, into memory that outlives the calls: a graph
    may capture that work."""

    def __init__(self, function):
        self._function = function

    def __call__(self):
        self._function()


@functools.cache
def _floats(kernel):
    """Return the numbers of the arguments of a kernel that are float."""
    arguments = library.cpu().functions[f'pyops_{kernel}'].arguments
    return [i for i, argument in enumerate(arguments) if argument.type == 'float' and not argument.pointer]


def _words(values):
    """Return integers as int64, those of 2^63 or more in two's complement: addresses with a mark, and numbers of uint64_t."""
    try:
        return np.array(values, np.int64)
    except OverflowError:
        return np.array([(int(value) + 2**63) % 2**64 - 2**63 for value in values], np.int64)


class Calls:
    """A list of kernel calls on a device.  calls: (kernel, values) for each call, values in the order of the header, arrays as
    addresses; or (name, function) for a Python function between kernels.

    The caller must keep the memory at these addresses alive.
    """

    def __init__(self, calls, device):
        ffi = library.cpu().ffi
        self._device, self.kernels = device, [kernel for kernel, _ in calls]
        self._functions = {i: values for i, (_, values) in enumerate(calls) if callable(values)}
        self._list = ffi.new('pyops_action[]', max(len(calls), 1))
        self._seconds, self._at = ffi.new('double[]', max(len(calls), 1)), ffi.new('int64_t *')
        words, floats = [], []
        for i, (kernel, values) in enumerate(calls):
            if i in self._functions:
                continue
            self._list[i].kernel = self._number(f'pyops_{kernel}'.encode())
            self._list[i].first_value = first = len(words)
            words += values
            for place in _floats(kernel):
                floats.append((first + place, values[place]))
                words[first + place] = 0
        self._values = ffi.new('pyops_value[]', max(len(words), 1))
        ffi.memmove(self._values, _words(words), 8 * len(words))
        for place, value in floats:
            self._values[place].real = value

    def run(self, first=0, last=None, repeated=False):
        """Run the calls [first, last).  An exception of a kernel names the call that failed.
        repeated: they will run again, so it pays to capture them as a graph; a run of all calls always is."""
        self._run(first, len(self.kernels) if last is None else last, timed=False)

    def time(self, first=0, last=None):
        """Run the calls [first, last) and return the seconds of each."""
        last = len(self.kernels) if last is None else last
        self._run(first, last, timed=True)
        return list(self._seconds[first:last])

    def _run(self, first, last, timed):
        """Replay the kernels between the functions, and call the functions."""
        for i, function in self._functions.items():
            if first <= i < last:
                if first < i:
                    self._replay(first, i, timed)
                start = time.perf_counter()
                function()
                self._seconds[i] = time.perf_counter() - start
                first = i + 1
        if first < last:
            self._replay(first, last, timed)

    def places(self, arguments):
        """Return for (number of a call, number of its argument) the places that change() takes, int64 (n,)."""
        return np.array([self._list[call].first_value + argument for call, argument in arguments], np.int64)

    def change(self, places, values, sizes):
        """Replace arguments that are integers or addresses; places from places(), values int64 (n,).

        sizes: hashable; the sizes of a batch, which determine the values."""
        np.frombuffer(library.cpu().ffi.buffer(self._values), np.int64)[places] = values

    def close(self):
        self._values = self._list = None
        self._functions = {}

    def _number(self, name):
        """Return the index of a kernel in the library that replays the calls."""
        return self._device.library().lib.pyops_kernel_number(name)

    def _replay(self, first, last, timed):
        ffi, lib, _ = library.cpu()
        self._check(lib.pyops_replay(self._list, self._values, self._seconds if timed else ffi.NULL, self._at, first, last,
                                     ffi.NULL))

    def _check(self, status):
        if status:
            try:
                self._device.check(status)
            except Exception as error:
                error.args = (f'action {self._at[0]}, {self.kernels[self._at[0]]}: {error}',)
                raise


class Recording(Calls):
    """A list of kernel calls on the CPU for arrays with other addresses in every run, as pyops_run_recording takes it.

    places: (number of the call, of its argument, of the array in pyops_run_recording, offset in bytes) for each pointer to such
    an array;  kept: what the other pointers refer to.  ValueError for more arguments than a recording holds.
    """

    def __init__(self, calls, device, places, kept):
        super().__init__(calls, device)
        ffi, lib, _ = library.cpu()
        if len(self._values) > lib.PYOPS_RECORDED_VALUES:
            raise ValueError(f'recording: {len(self._values)} arguments, expected at most {lib.PYOPS_RECORDED_VALUES}')
        self._places = ffi.new('pyops_place[]', [(self._list[call].first_value + argument, array, offset)
                                                 for call, argument, array, offset in places])
        self._kept, self.function = kept, lib.pyops_run_recording_1
        self.described = ffi.new('pyops_recording *', (self._list, self._values, self._places, len(calls), len(self._values),
                                                       len(places)))
