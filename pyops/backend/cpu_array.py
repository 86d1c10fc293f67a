"""The CPU as a device for NDArrays."""
from pyops import backend
from pyops.backend import library
from pyops.backend.device import Buffer
from pyops.backend.host_device import HostDevice, as_numpy
from pyops.backend.kernel_device import FLOAT, INT, KernelDevice


class CPU(HostDevice, KernelDevice):
    name = 'cpu'
    launch = staticmethod(backend.launch)

    def __init__(self):
        super().__init__()
        ffi, _, _ = library.cpu()
        self._from_buffer = ffi.from_buffer
        self._kinds = {FLOAT: ffi.typeof('float[]'), INT: ffi.typeof('int32_t[]')}

    def wrap(self, owner, foreign=False):
        return Buffer(self, owner, self._from_buffer(self._kinds[owner.dtype], owner), foreign)

    def bits(self, x):
        return as_numpy(x).view(FLOAT)
