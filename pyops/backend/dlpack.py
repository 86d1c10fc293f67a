"""DLPack on a GPU: share device memory with other libraries without a copy.

Arrays in host memory are exchanged by numpy's own DLPack functions.  The structures follow DLPack 1.0,
https://dmlc.github.io/dlpack/latest/c_api.html; consumers without a version get the older structure.
"""
import ctypes
import math

from pyops.backend.arrays import BF16, dtype_name, row_major
from pyops.backend.device import DLPACK_CUDA, DTYPES

READ_ONLY, IS_COPIED = 1, 2             # flags of a versioned structure
_NAME, _VERSIONED_NAME = b'dltensor', b'dltensor_versioned'
_CODES = {'i': 0, 'u': 1, 'f': 2}       # DLDataTypeCode of numpy's kinds
_TYPES = {(_CODES[dtype.kind], 8 * dtype.itemsize): dtype for dtype in DTYPES.values()} | {(4, 16): BF16}


class _Tensor(ctypes.Structure):
    _fields_ = [('data', ctypes.c_void_p), ('device_type', ctypes.c_int32), ('device_id', ctypes.c_int32),
                ('ndim', ctypes.c_int32), ('code', ctypes.c_uint8), ('bits', ctypes.c_uint8), ('lanes', ctypes.c_uint16),
                ('shape', ctypes.POINTER(ctypes.c_int64)), ('strides', ctypes.POINTER(ctypes.c_int64)),
                ('byte_offset', ctypes.c_uint64)]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = [('tensor', _Tensor), ('context', ctypes.c_void_p), ('deleter', _Deleter)]


class _Versioned(ctypes.Structure):
    _fields_ = [('major', ctypes.c_uint32), ('minor', ctypes.c_uint32), ('context', ctypes.c_void_p), ('deleter', _Deleter),
                ('flags', ctypes.c_uint64), ('tensor', _Tensor)]


def _capsule_function(name, result, *arguments):
    return ctypes.PYFUNCTYPE(result, *arguments)((f'PyCapsule_{name}', ctypes.pythonapi))


_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_new = _capsule_function('New', ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _Destructor)
_is_valid = _capsule_function('IsValid', ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
_pointer = _capsule_function('GetPointer', ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
_rename = _capsule_function('SetName', ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
# The same functions for a destructor.  It must not make a py_object: the reference count of its capsule is 0.
_dying_is_valid = _capsule_function('IsValid', ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
_dying_pointer = _capsule_function('GetPointer', ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)

_exported = {}          # address of a structure -> the objects that must live until its deleter is called


@_Deleter
def _delete(address):
    _exported.pop(address, None)


@_Destructor
def _destroy(capsule):
    for name in _NAME, _VERSIONED_NAME:         # a consumer renames the capsule and then calls the deleter itself
        if _dying_is_valid(capsule, name):
            _delete(_dying_pointer(capsule, name))


def exported(array, versioned, is_copy):
    """Return a capsule over the memory of an NDArray on a GPU, which lives until the consumer calls the deleter."""
    sizes = ctypes.c_int64 * max(array.ndim, 1)
    shape, strides = sizes(*array.shape), sizes(*array.strides)
    code = 4 if array.dtype == BF16 else _CODES[array.dtype.kind]
    tensor = _Tensor(array.location(), DLPACK_CUDA, 0, array.ndim, code, 8 * array.dtype.itemsize, 1, shape, strides, 0)
    managed = _Versioned(1, 0, None, _delete, IS_COPIED * is_copy, tensor) if versioned else _Managed(tensor, None, _delete)
    address = ctypes.addressof(managed)
    _exported[address] = managed, shape, strides, array
    return _new(address, _VERSIONED_NAME if versioned else _NAME, _destroy)


class Imported:
    """Device memory of another library, returned to it when the last reference is deleted.

    address, nbytes: of all memory that the array spans.  offset, shape, strides: in elements, from `address`.
    """
    # Consumers rename a capsule, which keeps the address of its name: these bytes must outlive it.
    _USED = {_NAME: b'used_dltensor', _VERSIONED_NAME: b'used_dltensor_versioned'}

    def __init__(self, capsule):
        name = next((name for name in self._USED if _is_valid(capsule, name)), None)
        if name is None:
            raise BufferError('from_dlpack: expected a DLPack capsule that no library has used, got another object')
        self._managed = (_Managed if name == _NAME else _Versioned).from_address(_pointer(capsule, name))
        _rename(capsule, self._USED[name])
        if name == _VERSIONED_NAME:
            if self._managed.major != 1:
                raise BufferError(f'from_dlpack: version {self._managed.major}.{self._managed.minor}: expected 1.x')
            if self._managed.flags & READ_ONLY:
                raise ValueError('from_dlpack: read-only array: copy it first')
        tensor = self._managed.tensor
        if (tensor.device_type, tensor.device_id) != (DLPACK_CUDA, 0):
            raise BufferError(f'from_dlpack: device ({tensor.device_type}, {tensor.device_id}): expected the first GPU, '
                              f'({DLPACK_CUDA}, 0); copy the array there')
        self.dtype = _TYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
        if self.dtype is None:
            raise TypeError(f'from_dlpack: type code {tensor.code} of {tensor.bits} bits, {tensor.lanes} lanes: expected '
                            f'{", ".join(map(dtype_name, _TYPES.values()))}; convert the array')
        item = self.dtype.itemsize
        self.shape = tuple(tensor.shape[:tensor.ndim])
        self.strides = tuple(tensor.strides[:tensor.ndim]) if tensor.strides else row_major(self.shape)
        ends = [(n - 1) * step for n, step in zip(self.shape, self.strides, strict=True)] if math.prod(self.shape) else []
        self.offset = -sum(min(end, 0) for end in ends)
        first = (tensor.data or 0) + tensor.byte_offset
        if first % item:
            raise ValueError(f'from_dlpack: address {first:#x} is not a multiple of the element size, {item}; copy the array')
        self.address = first - item * self.offset
        self.nbytes = item * (self.offset + sum(max(end, 0) for end in ends) + 1) if math.prod(self.shape) else 0

    def __del__(self):
        managed = self.__dict__.pop('_managed', None)
        if managed is not None and managed.deleter:
            managed.deleter(ctypes.addressof(managed))


def capsule_of(x, stream):
    """Return the DLPack capsule of another library's array, ready for work enqueued on `stream`."""
    try:
        return x.__dlpack__(stream=stream, max_version=(1, 0))
    except TypeError:                   # a producer without versions
        return x.__dlpack__(stream=stream)

