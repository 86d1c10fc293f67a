"""What pyops.ndarray needs of a device: memory, and a few operations on arrays of any strides."""


class Buffer:
    """A piece of a device's memory.

    device    the Device
    owner     what holds it: on a CPU the C-contiguous numpy array over all of it; None once it was freed
    nbytes    its size
    pointer   to its first element, as kernels want it; None on a device that has no use for it
    foreign   whether somebody else may have other arrays over the same memory
    version   how often an array over it was changed in place
    mask      the version at which it holds a mask, see NDArray.is_mask; None: it never held one
    """
    __slots__ = ('device', 'owner', 'nbytes', 'pointer', 'foreign', 'version', 'mask', '__weakref__')

    def __init__(self, device, owner, pointer=None, foreign=False):
        self.device, self.owner, self.nbytes, self.pointer = device, owner, owner.nbytes, pointer
        self.foreign, self.version, self.mask = foreign, 0, None

    @property
    def address(self):
        """Of the first byte."""
        return self.device.address(self.owner)

    def free(self):
        """Let go of the memory now; using an array over it is a ValueError from here on."""
        self.owner = self.pointer = None


class Device:
    """Arrays are pyops.ndarray.NDArrays that lie on the device.  y is written, and has the shape of the result; the
    inputs broadcast to it.  y is one of the inputs or overlaps none.  All have one dtype unless said otherwise.
    """
    name = '?'
    place = None            # where kernel ops make their arrays that are given some of this device

    def __repr__(self):
        return f'pyops.{self.name}()'

    def allocate(self, shape, dtype, name):
        """-> Buffer of any content; `name` is what a plan calls it."""
        raise NotImplementedError

    def wrap(self, owner, foreign=False):
        """-> Buffer over the memory of a C-contiguous numpy array."""
        raise NotImplementedError

    def address(self, owner):
        """Of the first byte of what a Buffer of this device has as its owner."""
        raise NotImplementedError

    def numpy(self, x):
        """x as a numpy array: over the same memory on a CPU, else a copy, for which the device is waited for."""
        raise NotImplementedError

    def plain(self, x):
        """x, compact, as kernel ops take it on this device."""
        raise NotImplementedError

    def plain_view(self, x):
        """x as it is, in the kind of array that kernel ops take on this device."""
        raise NotImplementedError

    def assign(self, y, value):
        """Copy value, an NDArray or numpy's, into y in a way of the device's own -> whether there is one."""
        raise NotImplementedError

    def unary(self, op, y, x):
        """y = op(x): copy, negate, abs; of float32 also sqrt, exp, log, tanh, sigmoid."""
        raise NotImplementedError

    def binary(self, op, y, a, b):
        """y = op(a, b): add, subtract, multiply, divide (float32), power, maximum, minimum, equal, not_equal, less,
        less_equal, greater, greater_equal (1 or 0)."""
        raise NotImplementedError

    def scalar(self, op, y, x, value, reflected):
        """y = op(x, value), op(value, x) if reflected."""
        raise NotImplementedError

    def fill(self, y, value):
        """y = value."""
        raise NotImplementedError

    def convert(self, y, x):
        """y = x, which has another dtype; float32 to int32 goes towards 0."""
        raise NotImplementedError

    def reduce(self, op, y, x):
        """y = sum, max or min of x over the axes that have size 1 in y, which has as many axes as x."""
        raise NotImplementedError

    def argmax(self, y, x):
        """y (R,) int32 = the first of the largest in each row of x (R, C), compact float32; NaN is largest."""
        raise NotImplementedError

    def matmul(self, y, a, b):
        """y (..., M, N) = a (..., M, K) @ b (..., K, N); y is compact."""
        raise NotImplementedError

    def take(self, y, x, ids):
        """y[r] = x[ids[r]];  y (R, E), x (V, E), ids (R,) int32, all compact.  IndexError beyond [0, V)."""
        raise NotImplementedError

    def add_at(self, y, ids, rows):
        """y[ids[r]] += rows[r], in the order of r;  shapes as in take, float32."""
        raise NotImplementedError
