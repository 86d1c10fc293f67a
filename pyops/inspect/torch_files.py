"""A reader of the files of torch.save.  It needs no torch and runs no code.

Two layouts exist: the zip file of torch 1.6 and newer, and a sequence of pickles followed by the raw storages, which
`_use_new_zipfile_serialization=False` still writes.  A pickle is a program for a stack machine, and Python's own interpreter
imports and calls whatever the program names.  `_run` executes only the opcodes that build numbers, texts and containers; a
global name is never looked up, and the only calls are those in `_CALLS`, which describe tensors.
"""
from __future__ import annotations

import io
import math
import pickletools
import re
import zipfile
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from pyops.inspect.checks import Refused, is_count, is_shape

PICKLE_LIMIT = 16 << 20             # bytes; far more than any writer needs, so a longer pickle is an attack or damage
EXPANDED_LIMIT = 1 << 26            # elements of a tensor that is larger than its file because it repeats elements
_NESTING = 4                        # containers within containers in which tensors are looked for
_NODES = 1 << 20                    # values in those containers
_MAGIC = 0x1950a86a20f9469cfc6c     # of the layout before torch 1.6
_PIECE = 1 << 22                    # bytes read at a time

_STORAGES = {'DoubleStorage': 'float64', 'FloatStorage': 'float32', 'HalfStorage': 'float16', 'BFloat16Storage': 'bfloat16',
             'LongStorage': 'int64', 'IntStorage': 'int32', 'ShortStorage': 'int16', 'CharStorage': 'int8',
             'ByteStorage': 'uint8', 'BoolStorage': 'bool', 'UntypedStorage': 'uint8', 'ComplexFloatStorage': 'complex64',
             'ComplexDoubleStorage': 'complex128', 'QInt8Storage': 'int8', 'QUInt8Storage': 'uint8', 'QInt32Storage': 'int32'}
# dtype -> dtype of the stored bytes
STORED = {'float64': '<f8', 'float32': '<f4', 'float16': '<f2', 'bfloat16': '<u2', 'int64': '<i8', 'int32': '<i4',
          'int16': '<i2', 'int8': 'i1', 'uint64': '<u8', 'uint32': '<u4', 'uint16': '<u2', 'uint8': 'u1', 'bool': '?',
          'float8_e4m3fn': 'u1', 'float8_e5m2': 'u1', 'float8_e4m3fnuz': 'u1', 'float8_e5m2fnuz': 'u1',
          'float8_e8m0fnu': 'u1', 'float4_e2m1fn_x2': 'u1', 'complex64': '<c8', 'complex128': '<c16'}
_CODE = 'contains Python objects, which could run code; expected tensors only'
_DAMAGED = 'damaged, or not a file of torch.save'
_MISSING = 'truncated: a storage is missing'


class Storage(NamedTuple):
    """The numbers that one or several tensors share.  size: number of elements of the dtype."""
    key: str
    dtype: str
    size: int


class Stored(NamedTuple):
    """A tensor in a file, whose numbers are not read yet: a strided view of a storage."""
    storage: Storage
    offset: int                     # the offset and the strides count elements
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    is_negative: bool               # the values are the stored ones times -1

    def view(self, data: np.ndarray) -> np.ndarray:
        """Return the tensor, given its storage as bytes.  Refused if it exceeds the storage."""
        item = np.dtype(STORED[self.dtype]).itemsize
        if data.size % item:
            raise Refused(f'damaged: a storage of {data.size} bytes, which are no whole elements of {self.dtype}')
        elements = data.view(STORED[self.dtype])
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        if 0 in self.shape:
            return np.empty(self.shape, elements.dtype)
        if last >= elements.size:
            raise Refused(f'damaged: a tensor of shape {self.shape} exceeds its storage of {elements.size} elements')
        return np.lib.stride_tricks.as_strided(elements[self.offset:], self.shape,
                                               [stride * elements.itemsize for stride in self.strides], writeable=False)


class Contents(NamedTuple):
    """The contents of a file.  refused: reasons why single tensors cannot be read;  fetch(storage) returns its bytes."""
    tensors: dict[str, Stored]
    metadata: dict[str, Any]
    refused: list[str]
    fetch: Callable[[Storage], np.ndarray]


def parse(file: BinaryIO, size: int) -> Contents:
    """Read the structure of an open file of `size` bytes.  Refused if it is damaged or contains more than tensors.

    A tensor in a container has the key of the container's items joined by '.'; a tensor on its own has the key ''.
    """
    try:
        payload, fetch = _parse_zip(file, size) if file.read(4) == b'PK\3\4' else _parse_legacy(file, size)
        tensors: dict[str, Stored] = {}
        refused: list[str] = []
        _collect(payload, (), tensors, refused, [_NODES])
    except (Refused, OSError):
        raise
    except Exception as error:          # damaged bytes can raise anything
        raise Refused(_DAMAGED) from error
    for key, tensor in list(tensors.items()):
        count = math.prod(tensor.shape)
        if not is_shape(tensor.shape) or count > max(EXPANDED_LIMIT, size):
            refused.append(f'a tensor of shape {tensor.shape} in a file of {size} bytes')
            del tensors[key]
    metadata = payload.get('metadata') if isinstance(payload, dict) else None
    metadata = dict(metadata) if isinstance(metadata, dict) else {}
    return Contents(tensors, metadata | ({'pyops': payload.get('pyops')} if isinstance(payload, dict) else {}), refused, fetch)


def _collect(value: Any, path: tuple[str, ...], tensors: dict[str, Stored], refused: list[str], left: list[int]) -> None:
    """Add the tensors in nested dicts, lists and tuples."""
    left[0] -= 1
    if left[0] < 0:
        raise Refused(f'contains more than {_NODES} values; expected tensors')
    if isinstance(value, Stored):
        tensors['.'.join(path)] = value
    elif isinstance(value, Refused):
        refused.append(str(value))
    elif len(path) < _NESTING and (isinstance(value, (dict, list)) or type(value) is tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            if path or key not in ('metadata', 'pyops'):
                _collect(item, (*path, str(key)), tensors, refused, left)


# ---- the zip file ------------------------------------------------------------------------------------------------------

def _parse_zip(file: BinaryIO, size: int) -> tuple[Any, Callable[[Storage], np.ndarray]]:
    archive = zipfile.ZipFile(file)
    records = {record.filename.partition('/')[2]: record for record in archive.infolist()}
    # torch.save never compresses: a compressed record could expand to any size
    if sum(record.file_size for record in archive.infolist()) > size or any(
            record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size
            for record in records.values()):
        raise Refused('the zip has compressed or oversized records, which torch.save never writes')
    if records['data.pkl'].file_size > PICKLE_LIMIT:
        raise Refused(f'the pickle has {records["data.pkl"].file_size} bytes; expected at most {PICKLE_LIMIT}')

    def read(name: str) -> np.ndarray:
        record = records[name]
        result, done = np.empty(record.file_size, np.uint8), 0
        try:
            with archive.open(record) as part:
                while piece := part.read(_PIECE):               # compares the checksum at the end
                    result[done:done + len(piece)] = np.frombuffer(piece, np.uint8)
                    done += len(piece)
        except OSError:
            raise
        except Exception as error:
            reason = f'the checksum of the record {name} differs' if 'CRC' in str(error) else f'the record {name}'
            raise Refused(f'damaged: {reason}') from error
        if done != record.file_size:
            raise Refused('truncated')
        return result

    if 'byteorder' in records and read('byteorder').tobytes() != b'little':
        raise Refused('written on a big-endian machine; expected little-endian numbers')

    def fetch(storage: Storage) -> np.ndarray:
        if f'data/{storage.key}' not in records:
            raise Refused(_MISSING)
        return _whole(read(f'data/{storage.key}'), storage)

    return _run(_Limited(io.BytesIO(read('data.pkl').tobytes()))), fetch


# ---- the older layout --------------------------------------------------------------------------------------------------

def _parse_legacy(file: BinaryIO, size: int) -> tuple[Any, Callable[[Storage], np.ndarray]]:
    """Read five pickles: a magic number, a version, a description of the machine, the object, and the order of the storages."""
    file.seek(0)
    limited, storages = _Limited(file), {}
    if _run(limited) != _MAGIC:
        raise Refused(_DAMAGED)
    _run(limited)
    machine = _run(limited)
    if not (isinstance(machine, dict) and machine.get('little_endian') is True):
        raise Refused('written on a big-endian machine; expected little-endian numbers')
    payload = _run(limited, storages)
    starts, position = {}, -1
    for key in _run(limited):
        position = limited.tell() if position < 0 else position
        storage = storages[key]
        starts[key] = position + 8                              # after the number of elements
        position += 8 + storage.size * np.dtype(STORED[storage.dtype]).itemsize
        if position > size:
            raise Refused(f'truncated: {size} bytes, but the numbers of a tensor end at byte {position}')

    def fetch(storage: Storage) -> np.ndarray:
        if storage.key not in starts:
            raise Refused(_MISSING)
        file.seek(starts[storage.key] - 8)
        if int.from_bytes(file.read(8), 'little') != storage.size:
            raise Refused(_DAMAGED)
        return _whole(np.fromfile(file, np.uint8, storage.size * np.dtype(STORED[storage.dtype]).itemsize), storage)

    return payload, fetch


def _whole(data: np.ndarray, storage: Storage) -> np.ndarray:
    if data.size != storage.size * np.dtype(STORED[storage.dtype]).itemsize:
        raise Refused(f'truncated: {data.size} bytes for {storage.size} numbers of {storage.dtype}')
    return data


# ---- pickles -----------------------------------------------------------------------------------------------------------

class _Limited:
    """A file that reads at most PICKLE_LIMIT bytes, so that no length in a pickle decides about memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._left = file, PICKLE_LIMIT

    def read(self, count: int) -> bytes:
        return self._taken(self._file.read(min(count, self._left)))

    def readline(self) -> bytes:
        return self._taken(self._file.readline(self._left))

    def _taken(self, data: bytes) -> bytes:
        self._left -= len(data)
        return data

    def tell(self) -> int:
        return self._file.tell()


class _Name(str):
    """A global name in a pickle, such as torch.FloatStorage."""
    __slots__ = ()


_PUSHED = {'INT', 'LONG', 'BININT', 'BININT1', 'BININT2', 'LONG1', 'LONG4', 'FLOAT', 'BINFLOAT', 'STRING', 'BINSTRING',
           'SHORT_BINSTRING', 'UNICODE', 'BINUNICODE', 'SHORT_BINUNICODE', 'BINUNICODE8', 'BINBYTES', 'SHORT_BINBYTES',
           'BINBYTES8'}
_CONSTANTS = {'NONE': None, 'NEWTRUE': True, 'NEWFALSE': False}
_EMPTY: dict[str, Callable[[], Any]] = {'EMPTY_LIST': list, 'EMPTY_TUPLE': tuple, 'EMPTY_DICT': dict}


def _run(file: _Limited, storages: dict[str, Storage] | None = None) -> Any:
    """Execute one pickle and return its value.  storages: receives the storages that it names."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def marked() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    for opcode, arg, _ in pickletools.genops(file):         # parses, but does not execute
        op = opcode.name
        if op in _PUSHED:
            stack.append(arg)
        elif op in _CONSTANTS:
            stack.append(_CONSTANTS[op])
        elif op in _EMPTY:
            stack.append(_EMPTY[op]())
        elif op == 'MARK':
            marks.append(len(stack))
        elif op in ('PUT', 'BINPUT', 'LONG_BINPUT'):
            memo[arg] = stack[-1]
        elif op == 'MEMOIZE':
            memo[len(memo)] = stack[-1]
        elif op in ('GET', 'BINGET', 'LONG_BINGET'):
            stack.append(memo[arg])
        elif op in ('TUPLE1', 'TUPLE2', 'TUPLE3'):
            count = int(op[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif op == 'TUPLE':
            stack.append(tuple(marked()))
        elif op == 'LIST':
            stack.append(marked())
        elif op == 'DICT':
            stack.append(_filled({}, marked()))
        elif op in ('APPEND', 'APPENDS'):
            items = marked() if op == 'APPENDS' else [stack.pop()]
            _require(stack[-1], list).extend(items)
        elif op in ('SETITEM', 'SETITEMS'):
            items = marked() if op == 'SETITEMS' else [stack.pop(-2), stack.pop()]
            _filled(_require(stack[-1], dict), items)
        elif op == 'GLOBAL':
            stack.append(_name(*arg.split(' ', 1)))
        elif op == 'STACK_GLOBAL':
            name = stack.pop()
            stack[-1] = _name(stack[-1], name)
        elif op == 'REDUCE':
            arguments = stack.pop()
            stack[-1] = _call(stack[-1], _require(arguments, tuple))
        elif op == 'BUILD':                                 # the attributes of an OrderedDict, such as a state dict
            stack.pop()
            _require(stack[-1], dict)
        elif op == 'BINPERSID':
            stack[-1] = storage = _storage(*stack[-1])
            if storages is not None:
                storages[storage.key] = storage
        elif op == 'STOP':
            return stack.pop()
        elif op not in ('PROTO', 'FRAME'):
            raise Refused(_CODE)
    raise Refused('truncated')


def _require(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise Refused(_DAMAGED)
    return value


def _filled(result: dict[Any, Any], items: list[Any]) -> dict[Any, Any]:
    """Add [key, value, key, value, ...].  A key is a text or a number: to hash a deeply nested tuple may overflow C's stack."""
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, (str, int, float)):
            raise Refused(_CODE)
        result[key] = value
    return result


def _storage(kind: Any, name: Any, key: Any, location: Any, size: Any, view: Any = None) -> Storage:
    prefix, _, name = str(name).rpartition('.')
    if kind != 'storage' or name not in _STORAGES or view is not None or not (isinstance(key, str) and is_count(size)):
        raise Refused(_CODE if kind != 'storage' else _DAMAGED)
    return Storage(key, _STORAGES[name], size)


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *more: Any, dtype: str = '') -> Stored:
    metadata = more[-1] if len(more) > 2 and isinstance(more[-1], dict) else {}
    if not (isinstance(storage, Storage) and isinstance(shape, tuple) and isinstance(strides, tuple)
            and len(shape) == len(strides) and all(map(is_count, (offset, *shape, *strides)))):
        raise Refused(_DAMAGED)
    return Stored(storage, offset, shape, strides, dtype or storage.dtype, metadata.get('neg') is True)


def _typed_tensor(storage: Any, offset: Any, shape: Any, strides: Any, requires_grad: Any, hooks: Any, dtype: Any,
                  *more: Any) -> Stored:
    name = _require(dtype, _Name).removeprefix('torch.')
    return _tensor(storage, offset, shape, strides, requires_grad, hooks, *more, dtype=name)


def _of_type(function: Any, kind: Any, arguments: Any, *_: Any) -> Any:
    if kind not in ('torch.Tensor', 'torch.nn.parameter.Parameter', 'torch.nn.parameter.Buffer'):
        raise Refused(_CODE)
    return _call(function, _require(arguments, tuple))


def _ordered_dict(items: Any = ()) -> dict[Any, Any]:
    return _filled({}, [part for pair in items for part in pair])


def _encoded(text: Any, encoding: Any) -> bytes:
    if encoding != 'latin1':
        raise Refused(_CODE)
    result: bytes = text.encode('latin1')
    return result


def _unreadable(*_: Any) -> Refused:
    return Refused('a sparse, quantized or meta tensor; expected a dense one')


def _first(data: Any, *_: Any) -> Any:
    return data


_CALLS: dict[str, Callable[..., Any]] = {
    'torch._utils._rebuild_tensor': _tensor, 'torch._utils._rebuild_tensor_v2': _tensor,
    'torch._utils._rebuild_tensor_v3': _typed_tensor, 'torch._utils._rebuild_parameter': _first,
    'torch._utils._rebuild_parameter_with_state': _first, 'torch._tensor._rebuild_from_type_v2': _of_type,
    'torch.Size': _first, 'torch.device': _first, 'torch.serialization._get_layout': _first,
    'collections.OrderedDict': _ordered_dict, '_codecs.encode': _encoded} | dict.fromkeys(
    [f'torch._utils._rebuild_{name}' for name in ('qtensor', 'sparse_tensor', 'sparse_csr_tensor', 'nested_tensor',
                                                  'meta_tensor_no_storage', 'device_tensor_from_numpy')], _unreadable)
_INERT = re.compile(r'torch(\.storage)?\.(\w+Storage|u?int\d+|b?float\d+\w*|complex\d+|bool|half|double|quint8|qint8|qint32|'
                    r'per_tensor_affine|per_channel_affine|Tensor)|torch\.nn\.parameter\.(Parameter|Buffer)')


def _name(module: Any, name: Any) -> _Name:
    full = f'{_require(module, str)}.{_require(name, str)}'
    if full not in _CALLS and not _INERT.fullmatch(full):
        raise Refused(_CODE)
    return _Name(full)


def _call(function: Any, arguments: tuple[Any, ...]) -> Any:
    if not isinstance(function, _Name) or function not in _CALLS:
        raise Refused(_CODE)
    return _CALLS[function](*arguments)
