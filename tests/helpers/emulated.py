"""Direct calls of the emulated CUDA library: its device memory is host memory, so numpy arrays are arguments."""
import ctypes
import functools

import numpy as np
from conftest import ROOT

from pyops.backend.library import functions

LIBRARY = ROOT / 'pyops' / 'libpyops_emulated.so'
FP32, TF32, BF16 = range(3)                             # of pyops_set_precision
C_TYPES = {'float': ctypes.c_float, 'int32_t': ctypes.c_int32, 'int64_t': ctypes.c_int64, 'uint64_t': ctypes.c_uint64}


@functools.cache
def library():
    lib = ctypes.CDLL(str(LIBRARY))
    lib.pyops_last_error.restype = ctypes.c_char_p
    lib.pyops_set_early_start(2)            # for the checks of the emulator; an older device refuses it
    for name, function in functions((ROOT / 'csrc' / 'pyops.h').read_text()).items():
        if function.result == 'pyops_status' and hasattr(lib, name):
            getattr(lib, name).argtypes = [ctypes.c_void_p if a.pointer else C_TYPES[a.type] for a in function.arguments]
    return lib


def call(name, *arguments):
    """Call a kernel.  ValueError with its message if it fails."""
    given = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments]
    if getattr(library(), 'pyops_' + name)(*given, None):
        raise ValueError(library().pyops_last_error().decode())


def real(x):
    """Return the argument for an array of float32, or of bfloat16 in elements of two bytes."""
    return x.ctypes.data | 1 << 63 if x.dtype.itemsize == 2 else x
