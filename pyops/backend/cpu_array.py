"""The CPU as a device of arrays."""
from pyops import backend
from pyops.backend import library
from pyops.backend.device import Buffer
from pyops.backend.kernel_device import FLOAT, INT, KernelDevice
from pyops.backend.numpy_array import as_numpy


class CPU(KernelDevice):
    name, place = 'cpu', backend.HOST
    launch = staticmethod(backend.launch)

    def __init__(self):
        super().__init__()
        ffi, _, _ = library.cpu()
        self._from_buffer = ffi.from_buffer
        self._kinds = {FLOAT: ffi.typeof('float[]'), INT: ffi.typeof('int32_t[]')}

    def allocate(self, shape, dtype, name):
        return self.wrap(self.place.allocate(shape, dtype, name))

    def wrap(self, owner, foreign=False):
        return Buffer(self, owner, self._from_buffer(self._kinds[owner.dtype], owner), foreign)

    def address(self, owner):
        return owner.ctypes.data

    def numpy(self, x):
        return as_numpy(x)

    def plain(self, x):
        return as_numpy(x.compact())

    def plain_view(self, x):
        return as_numpy(x)

    def assign(self, y, value):
        return False

    def bits(self, x):
        return as_numpy(x).view(FLOAT)
