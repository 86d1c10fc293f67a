"""For tests that run on the CPU and, with `--on emulated` or `--on gpu`, on a GPU: transfers, kernel calls, devices.

On the CPU, `put` and `get` return their argument, and `launch` calls the kernel directly.
"""
import ctypes

import numpy as np
import pytest

import pyops
from pyops import backend
from pyops.backend import get, library, put  # noqa: F401
from pyops.errors import UserError
from pyops.ndarray import NDArray  # with PYOPS_BACKEND=gpu the import selects the GPU

ON_GPU = not backend.current_device().is_host
on_the_cpu = pytest.mark.skipif(ON_GPU, reason='tests the CPU only: run it with --on cpu')
of_threads = pytest.mark.skipif(ON_GPU, reason='sets the number of threads of the CPU: run it with --on cpu')


def devices():
    """Return the available devices by name; with PYOPS_BACKEND=gpu only the GPU."""
    if ON_GPU:
        return {'gpu': pyops.gpu}
    found = {'cpu': pyops.cpu, 'numpy_device': pyops.numpy_device}
    try:
        pyops.gpu()
    except UserError:
        return found
    return found | {'gpu': pyops.gpu}


def share_memory(a, b):
    """Return whether two contiguous arrays (numpy, NDArray or Tensor) share memory."""
    a, b = (getattr(x, 'array', x) for x in (a, b))
    return backend.may_overlap(a, b) if ON_GPU else np.shares_memory(np.asarray(a), np.asarray(b))


def launch(name, *values):
    """Call backend.launch on numpy arrays with any strides, and copy the results into the arrays that the kernel may write."""
    arguments = library.cpu().functions['pyops_' + name].arguments
    return _carried(lambda *arrays: backend.launch(name, *arrays), values,
                    [argument.pointer and not argument.const for argument in arguments],
                    [argument.name in ('shape', 'strides') for argument in arguments])


def gemm(c, a, b, *how, **named):
    """backend.gemm on numpy arrays."""
    return _carried(lambda c, a, b, *how: backend.gemm(c, a, b, *how, **named), (c, a, b, *how), [True], [])


def _carried(function, values, is_written, is_of_host):
    """Return function(*values) with the numpy arrays copied to the GPU.

    Each underlying buffer is copied once and as a whole, so arrays that overlap also overlap there, and the bytes around
    them are copied back for comparison."""
    if not ON_GPU:
        return function(*values)
    device, memories, brought, written = backend.current_device(), {}, [], []
    for i, value in enumerate(values):
        if not isinstance(value, np.ndarray) or i < len(is_of_host) and is_of_host[i]:
            brought.append(value)
            continue
        memory = _memory(value)
        if id(memory) not in memories:
            memories[id(memory)] = memory, device.wrap(memory)
        buffer = memories[id(memory)][1]
        n = value.dtype.itemsize
        brought.append(NDArray(buffer, (value.ctypes.data - memory.ctypes.data) // n, value.shape,
                               tuple(step // n for step in value.strides), value.dtype))
        if i < len(is_written) and is_written[i]:
            written.append((memory, buffer))
    result = function(*brought)
    for memory, buffer in written:
        back = device.numpy(NDArray(buffer, 0, (buffer.nbytes,), (1,), np.dtype(np.uint8)))
        ctypes.memmove(memory.ctypes.data, back.ctypes.data, memory.nbytes)
    return result


def _memory(array):
    """Return the array that owns the memory of this view."""
    owner = array
    while getattr(array, 'base', None) is not None:
        array = array.base
        owner = array if isinstance(array, np.ndarray) else owner
    return owner


def on_both(device, function):
    """Return the results of function() with arrays allocated on the CPU and on `device`."""
    results = []
    for place in (backend.HOST, device):
        with backend.on(place):
            results.append(function())
    return results
