"""The device interface of pyops.ndarray: memory, and a few operations on arrays with any strides."""


class Buffer:
    """A block of device memory.

    device    the Device
    owner     the object that keeps the memory alive: on a CPU a C-contiguous numpy array over the block; None after free()
    nbytes    its size in bytes
    pointer   the pointer to its first element for kernels; None on a device that does not use pointers
    foreign   whether other code may hold arrays over the same memory
    version   the number of in-place changes so far
    mask      the version at which it holds a mask, see NDArray.is_mask; None: it never held a mask
    """
    __slots__ = ('device', 'owner', 'nbytes', 'pointer', 'foreign', 'version', 'mask', '__weakref__')

    def __init__(self, device, owner, pointer=None, foreign=False):
        self.device, self.owner, self.nbytes, self.pointer = device, owner, owner.nbytes, pointer
        self.foreign, self.version, self.mask = foreign, 0, None

    @property
    def address(self):
        """The address of the first byte."""
        return self.device.address(self.owner)

    def free(self):
        """Free the memory now; later use of an array over it raises ValueError."""
        self.owner = self.pointer = None


class Device:
    """The interface of a device.  Arrays are pyops.ndarray.NDArrays on the device.

    Operations write the output y, which has the shape of the result; inputs broadcast to it.  y is one of the inputs or has no
    memory in common with them.  All arrays have the same dtype unless stated otherwise.
    """
    name = '?'
    place = None            # where kernel ops allocate their results if their inputs are on this device

    def __repr__(self):
        return f'pyops.{self.name}()'

    def allocate(self, shape, dtype, name):
        """Return an uninitialized Buffer; `name` is its name in a plan."""
        raise NotImplementedError

    def wrap(self, owner, foreign=False):
        """Return a Buffer with the elements of a C-contiguous numpy array: on a CPU its memory, else a copy."""
        raise NotImplementedError

    def address(self, owner):
        """Return the address of the first byte of a Buffer's owner."""
        raise NotImplementedError

    def numpy(self, x):
        """Return x as a numpy array: on a CPU over the same memory, else a copy, after waiting for the device."""
        raise NotImplementedError

    def plain(self, x):
        """Return x, made compact if necessary, in the array type that kernel ops take on this device."""
        raise NotImplementedError

    def plain_view(self, x):
        """Return x with its strides, in the array type that kernel ops take on this device."""
        raise NotImplementedError

    def assign(self, y, value):
        """Copy value, an NDArray or a numpy array, into y with a copy function of the device, if one applies; return whether
        it did."""
        raise NotImplementedError

    def unary(self, op, y, x):
        """Compute y = op(x): copy, negate, abs; for float32 also sqrt, exp, log, tanh, sigmoid."""
        raise NotImplementedError

    def binary(self, op, y, a, b):
        """Compute y = op(a, b): add, subtract, multiply, divide (float32), power, maximum, minimum, equal, not_equal, less,
        less_equal, greater, greater_equal (1 or 0)."""
        raise NotImplementedError

    def scalar(self, op, y, x, value, reflected):
        """Compute y = op(x, value), or op(value, x) if reflected."""
        raise NotImplementedError

    def fill(self, y, value):
        """Set all elements of y to value."""
        raise NotImplementedError

    def convert(self, y, x):
        """Copy x to y, which has another dtype; float32 to int32 truncates toward 0."""
        raise NotImplementedError

    def reduce(self, op, y, x):
        """Compute y = sum, max or min of x over the axes with size 1 in y; x and y have the same number of axes."""
        raise NotImplementedError

    def argmax(self, y, x):
        """Compute y (R,) int32 = the first argmax of each row of x (R, C), compact float32; NaN is largest."""
        raise NotImplementedError

    def matmul(self, y, a, b):
        """Compute y (..., M, N) = a (..., M, K) @ b (..., K, N); y is compact."""
        raise NotImplementedError

    def take(self, y, x, ids):
        """Compute y[r] = x[ids[r]];  y (R, E), x (V, E), ids (R,) int32, all compact.  IndexError for ids outside [0, V)."""
        raise NotImplementedError

    def add_at(self, y, ids, rows):
        """Compute y[ids[r]] += rows[r], in the order of r;  shapes as in take, float32."""
        raise NotImplementedError
