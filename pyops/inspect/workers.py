"""Processes that share the work on tensors."""
from __future__ import annotations

import contextlib
import functools
import math
import os
from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias

from pyops.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Map: TypeAlias = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]

_START, _PER_TENSOR, _PER_VALUE = 3.0, 1e-3, 6e-8     # seconds: worth a process; to round a tensor, and a value, to a format


def is_worth_processes(sizes: Iterable[int], formats: int) -> bool:
    """Return whether measuring tensors with these numbers of values in so many formats takes longer than starting processes."""
    return formats * sum(_PER_TENSOR + _PER_VALUE * size for size in sizes) > _START


@contextlib.contextmanager
def workers(processes: int, tasks: int, is_worth: bool = True,
            is_quick: Callable[[Any], bool] = lambda task: False) -> Iterator[Map]:
    """Return an ordered map over at most this many processes (0: one per core).  One process per 4 tasks is the limit.

    is_worth: whether the tasks take longer than the start of a process; if not, the map runs in this process
    is_quick: whether a task is so short that it always runs in this process.  With more than one process the caller's main
    module must be importable without side effects, as multiprocessing requires.
    UserError if a process was ended from outside.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    processes = min(processes or cores, math.ceil(tasks / 4))
    if processes <= 1 or not is_worth:
        yield map
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    def work(function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        waiting: deque[Callable[[], Any]] = deque()
        for task in tasks:                      # bounded: pending tasks and finished results are in memory
            waiting.append(functools.partial(function, task) if is_quick(task) else pool.submit(function, task).result)
            if len(waiting) >= 4 * processes:
                yield waiting.popleft()()
        while waiting:
            yield waiting.popleft()()

    # spawn: a forked process lacks the OpenMP threads that the library assumes
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context('spawn'), _begin)
    try:
        yield work
    except BrokenProcessPool as error:
        raise UserError('a process was ended from outside, perhaps for its memory; choose fewer tensors, or use one process: '
                        'draw --jobs 1, or taskset -c 0 before the command') from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """Initialise a worker: one thread, since there is one process per core.  The parent process handles Ctrl-C."""
    import ctypes
    import signal
    # Keep freed memory: returned to the system, it costs a page fault for every 4 KiB of the next array, a third of the time.
    with contextlib.suppress(AttributeError, OSError):          # only glibc has it
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 64 << 20)              # M_MMAP_THRESHOLD
        libc.mallopt(-1, 256 << 20)             # M_TRIM_THRESHOLD
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS'):
        os.environ[name] = '1'
