"""What tests need that run wherever arrays are made: on the CPU, or with PYOPS_BACKEND=gpu on a GPU or its emulation.

On the CPU `put`, `get` and `launch` are those of pyops.backend, which do nothing to numpy's arrays.
"""
import ctypes

import numpy as np
import pytest

import pyops
from pyops import backend
from pyops.backend import get, library, put  # noqa: F401
from pyops.errors import UserError
from pyops.ndarray import NDArray  # with PYOPS_BACKEND=gpu this makes the GPU the place of arrays

ON_GPU = backend.place() is not backend.HOST
on_the_cpu = pytest.mark.skipif(ON_GPU, reason='about the CPU alone: run without PYOPS_BACKEND=gpu')
of_threads = pytest.mark.skipif(ON_GPU, reason='a GPU has no number of threads to set: run without PYOPS_BACKEND=gpu')


def devices():
    """What arrays can lie on here, by name; with PYOPS_BACKEND=gpu that alone."""
    if ON_GPU:
        return {'gpu': pyops.gpu}
    found = {'cpu': pyops.cpu, 'numpy_device': pyops.numpy_device}
    try:
        pyops.gpu()
    except UserError:
        return found
    return found | {'gpu': pyops.gpu}


def share_memory(a, b):
    """Whether two contiguous arrays, numpy's, NDArrays or those of Tensors, look at the same memory."""
    a, b = (getattr(x, 'array', x) for x in (a, b))
    return backend.may_overlap(a, b) if ON_GPU else np.shares_memory(np.asarray(a), np.asarray(b))


def launch(name, *values):
    """backend.launch on numpy arrays of any strides that the kernel takes, and back come those that it may write to."""
    arguments = library.cpu().functions['pyops_' + name].arguments
    return _carried(lambda *arrays: backend.launch(name, *arrays), values,
                    [argument.pointer and not argument.const for argument in arguments],
                    [argument.name in ('shape', 'strides') for argument in arguments])


def gemm(c, a, b, *how, **named):
    """backend.gemm on numpy arrays."""
    return _carried(lambda c, a, b, *how: backend.gemm(c, a, b, *how, **named), (c, a, b, *how), [True], [])


def strided(array):
    """What `launch` takes for an array whose strides are arguments of their own."""
    return array if ON_GPU else backend.address(array)


def _carried(function, values, is_written, is_of_host):
    """function(*values), with numpy arrays as arrays on the GPU.  Whatever memory they look at is there as a whole, and
    once: so arrays that overlap do it there, too, and what lies around them comes back to be compared."""
    if not ON_GPU:
        return function(*values)
    device, memories, brought, written = backend.place(), {}, [], []
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
    """The array that owns the memory which this one looks at."""
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
