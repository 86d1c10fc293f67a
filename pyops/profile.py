"""The costs of the actions of a plan: time, operations, bytes, and the share of the machine's peak."""
import functools
import json
import time
from typing import NamedTuple

import numpy as np

from pyops import backend
from pyops.backend import library
from pyops.backend.kernels import KERNELS, Kernel
from pyops.errors import UserError


def operations(action, array):
    """Return the number of operations of an action's matrix products, 0 without products.  array(action, argument) returns the
    argument."""
    kernel = KERNELS.get(action.kernel, Kernel())
    return kernel.flops(action.scalars, lambda name: array(action, name)) if kernel.flops else 0


class Machine(NamedTuple):
    flops: float            # per second, all threads or multiprocessors: fused multiply-adds in registers
    bandwidth: float        # bytes per second, all threads or multiprocessors: reading one large array and writing another


def machine(device=backend.HOST):
    """Measure the CPU or a GPU and cache the result: the best of several short runs, 0.2 s in total."""
    return _measure(device)


@functools.cache
def _measure(device):
    flops = np.empty(1, np.float64)

    def best(times, *launch):
        seconds = []
        for _ in range(times):
            device.synchronize()
            start = time.perf_counter()
            device.launch(*launch)
            device.synchronize()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    rounds = 2_000_000 if device.is_host else 16     # takes milliseconds, so that waking threads is negligible
    while not device.is_host and best(3, 'fma_loop', flops, rounds) < 2e-3:
        rounds *= 2                                         # few at first: an emulated GPU is slow
    fma = best(15, 'fma_loop', flops, rounds)
    x, y, one = (device.put(np.ones(n, np.float32)) for n in (2**24, 2**24, 1))
    copy = best(5, 'scale', y, x, one, x.size)
    return Machine(flops[0] / fma, 2 * x.nbytes / copy)


_TITLES = 'time/us', 'share', 'GFLOP/s', 'GB/s', 'of peak'
_FIGURES = ' {:>8} {:>6} {:>8} {:>6} {:>7}'


def _shortened(name, most):
    """Shorten `kernel -> output` to at most `most` characters: keep the start of the kernel, and both ends of the output, which
    distinguish layers."""
    kernel, arrow, output = name.partition(' -> ')
    room = max(most - len(arrow + output), 15)
    if len(kernel) > room:
        kernel = f'{kernel[:room - 1]}\N{HORIZONTAL ELLIPSIS}'
    room = most - len(kernel + arrow)
    if len(output) > room:
        head = (room - 1) // 2
        output = f'{output[:head]}\N{HORIZONTAL ELLIPSIS}{output[head + 1 - room:]}'
    return kernel + arrow + output


class Row(NamedTuple):
    name: str
    seconds: float          # median of a call
    share: float            # of the time of the step
    flops: float            # per second, 0 if the kernel has no products
    bandwidth: float        # bytes per second
    of_peak: float          # share of the machine's peak FLOP/s for products, else of its bandwidth


class Profile:
    """The measured times of a plan on a device: actions, their wall times (runs, actions) and the wall times of complete
    replays (runs,), in seconds."""

    def __init__(self, actions, times, whole, array, device=backend.HOST):
        self.actions, self.times, self.whole, self.device = actions, times, whole, device
        self._array = array         # (action, argument) -> array

    def rows(self):
        """Return a Row for each action, in order."""
        best, medians, rows = machine(self.device), np.median(self.times, 0), []
        for action, seconds in zip(self.actions, medians, strict=True):
            kernel = KERNELS.get(action.kernel, Kernel())
            flops = operations(action, self._array) / seconds
            bytes_ = kernel.bytes(action.scalars) if kernel.bytes else self._operand_bytes(action)
            output = next(iter(action.split()[1].values()))
            rows.append(Row(f'{action.kernel} -> {output.name}', seconds, seconds / medians.sum(),
                            flops, bytes_ / seconds, flops / best.flops if flops else bytes_ / seconds / best.bandwidth))
        return rows

    def _operand_bytes(self, action):
        count = sum(tensor.nbytes for name, tensor in action.tensors.items() if name != 'work')
        if 'touched' in action.tensors:             # minus the gradient blocks that the last step did not update
            untouched = backend.get(self._array(action, 'touched')) == 0
            count -= int(untouched.sum()) * library.cpu().lib.PYOPS_GRAD_BLOCK * action.tensors['grad'].dtype.itemsize
        return count

    def __str__(self):
        return self.table()

    def table(self, width=80):
        """Return a table with a line for each action, at most `width` columns wide, or 72 if that is more."""
        best, rows = machine(self.device), self.rows()
        room = max(width, 72) - len(_FIGURES.format(*_TITLES))
        names = [_shortened(row.name, room) for row in rows]
        wide = max(map(len, [*names, 'action']))
        lines = [f'{"action":{wide}}' + _FIGURES.format(*_TITLES)]
        for name, row in zip(names, rows, strict=True):
            figures = (f'{1e6 * row.seconds:.1f}', f'{row.share:.1%}', f'{row.flops / 1e9:.1f}' if row.flops else '',
                       f'{row.bandwidth / 1e9:.1f}', f'{row.of_peak:.1%}')
            lines.append(f'{name:{wide}}' + _FIGURES.format(*figures))
        total = sum(row.seconds for row in rows)
        lines.append(f'{len(rows)} actions, {1e3 * total:.3f} ms; a replay of all: {1e3 * np.median(self.whole):.3f} ms; '
                     f'medians of {len(self.times)}')
        threads = f'{backend.threads()} thread' + 's' * (backend.threads() != 1)
        on = threads if self.device.is_host else self.device.model
        lines.append(f'this machine: {best.flops / 1e9:.1f} GFLOP/s, {best.bandwidth / 1e9:.1f} GB/s on {on}')
        return '\n'.join(lines)

    def events(self):
        """Return the last measured run as events of a Chrome trace."""
        return trace_events(zip(self.actions, self.times[-1], strict=True))

    def trace(self, path):
        """Write the last measured run as Chrome trace JSON (chrome://tracing, Perfetto)."""
        write_trace(path, self.events())


def trace_events(timed, start=0.0, rank=0):
    """Return the events of a Chrome trace for actions that run one after the other.

    timed: (action, seconds) of each;  start: of the first, in seconds;  rank: the process of the trace
    """
    events = []
    for action, seconds in timed:
        events.append(dict(name=action.kernel, ph='X', ts=1e6 * start, dur=1e6 * seconds, pid=rank, tid=0,
                           args={name: str(tensor) for name, tensor in action.tensors.items()}))
        start += seconds
    return events


def write_trace(path, events):
    """Write events as Chrome trace JSON.  UserError if the file cannot be written."""
    try:
        with open(path, 'w') as file:
            json.dump({'traceEvents': events, 'displayTimeUnit': 'ms'}, file)
    except OSError as error:
        raise UserError(f'{path}: cannot write the profile ({error.strerror}); name another file') from error
