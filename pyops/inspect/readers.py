"""The readers of the file formats of saved tensors: .safetensors, .npy and PyTorch's .pt, .pth and .bin.

`list_tensors` lists the tensors of a file, `read` returns one of them as float32.  Both raise Refused or OSError.

No file is trusted.  Headers are checked against the file size before any allocation, .npy files are read without pickle
support, and torch_files.py reads PyTorch's pickles without running them.
"""
from __future__ import annotations

import functools
import math
import os
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np

from pyops.errors import printable
from pyops.inspect.checks import Refused, is_count, is_shape, parse_json
from pyops.inspect.torch_files import STORED, parse

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyops.typing import Shape

SUFFIXES = '.safetensors', '.pt', '.pth', '.bin', '.npy'

_HEADER_LIMIT = 16 << 20            # bytes; far more than any writer needs, so a longer header is an attack or damage

# safetensors dtype -> name of the dtype
_DTYPES = {'F64': 'float64', 'F32': 'float32', 'F16': 'float16', 'BF16': 'bfloat16', 'F8_E4M3': 'float8_e4m3fn',
           'F8_E5M2': 'float8_e5m2', 'F8_E4M3FNUZ': 'float8_e4m3fnuz', 'F8_E5M2FNUZ': 'float8_e5m2fnuz',
           'F8_E8M0': 'float8_e8m0fnu', 'I64': 'int64', 'I32': 'int32', 'I16': 'int16', 'I8': 'int8', 'U64': 'uint64',
           'U32': 'uint32', 'U16': 'uint16', 'U8': 'uint8', 'BOOL': 'bool'}
Description: TypeAlias = 'tuple[str, Shape, str, dict[str, Any]]'      # key, shape, dtype, metadata
_EXPECTED = 'expected floating-point numbers of 64 to 8 bits, integers or bool'


def list_tensors(path: str) -> list[Description]:
    """Return [(key, shape, dtype, metadata)] for the tensors of a file.  Its numbers are not read."""
    return _DESCRIBERS[os.path.splitext(path)[1]](path)


def read(path: str, key: str) -> np.ndarray:
    """Return one tensor of a file as a contiguous float32 array."""
    return _READERS[os.path.splitext(path)[1]](path, key)


class Flat(NamedTuple):
    """The numbers of a tensor, stored one after the other in C order from `offset` of a file.   dtype: as in list_tensors"""
    path: str
    offset: int
    dtype: str
    size: int

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the numbers from `start` to `stop` - 1 as float32.  Refused if the file has become shorter."""
        stored = np.dtype(STORED[self.dtype])
        with _open_regular(self.path) as file:
            file.seek(self.offset + start * stored.itemsize)
            array = np.fromfile(file, stored, stop - start)
        if array.size != stop - start:
            raise Refused('truncated during the read')
        return _widen(array, self.dtype)


def flat(path: str, key: str) -> Flat | None:
    """Return where a tensor of a .safetensors or .npy file is stored; None for other files and other orders of its numbers."""
    suffix = os.path.splitext(path)[1]
    if suffix == '.safetensors':
        with _open_regular(path) as file:
            header, start, size = _safetensors_header(file)
        if key not in header:
            return None
        shape, dtype, begin = _safetensors_tensor(key, header[key], size)
        return Flat(path, start + begin, dtype, math.prod(shape))
    if suffix == '.npy':
        array = _map_npy(path)
        if isinstance(array, np.memmap) and array.flags.c_contiguous and array.dtype == STORED.get(array.dtype.name):
            return Flat(path, array.offset, array.dtype.name, array.size)
    return None


def nbytes(shape: Iterable[int], dtype: str) -> int:
    """Return the number of bytes that a tensor of the named dtype needs in a file."""
    return math.prod(shape) * np.dtype(STORED.get(dtype, 'u1')).itemsize


def _safetensors_header(file: BinaryIO) -> tuple[dict[str, Any], int, int]:
    """Return the parsed header, the offset of the data and its size in bytes.

    The safetensors library is not used: its numpy API does not support bfloat16.
    """
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    length = int.from_bytes(start, 'little')
    if len(start) < 8 or length > size - 8:
        raise Refused(f'truncated, or not a safetensors file: {size} bytes')
    if length > _HEADER_LIMIT:
        raise Refused(f'the header has {length} bytes; expected at most {_HEADER_LIMIT}')
    header = file.read(length)
    return parse_json(header), 8 + length, size - 8 - length


def _safetensors_tensor(key: str, value: Any, size: int) -> tuple[Shape, str, int]:
    """Check one tensor of the header and return its shape, dtype and offset in the data."""
    try:
        shape, dtype, (begin, end) = tuple(value['shape']), value['dtype'], value['data_offsets']
        is_valid = is_shape(shape) and is_count(begin) and is_count(end) and begin <= end
    except (TypeError, KeyError, ValueError):
        is_valid = False
    if not is_valid or not isinstance(dtype, str):
        raise Refused(f'the header is damaged at {printable(key)[:80]}')
    if dtype not in _DTYPES:
        raise Refused(f'a tensor of {printable(dtype)[:20]}: {_EXPECTED}')
    if end > size or end - begin != nbytes(shape, _DTYPES[dtype]):
        raise Refused(f'truncated or damaged: {size} bytes of data, a tensor of shape {shape} in {begin}:{end}')
    return shape, _DTYPES[dtype], begin


def _describe_safetensors(path: str) -> list[Description]:
    with open(path, 'rb') as file:
        header, _, size = _safetensors_header(file)
    metadata = header.pop('__metadata__', None)
    metadata = metadata if isinstance(metadata, dict) else {}
    result, reasons = [], []
    for key, value in header.items():
        try:
            shape, dtype, _ = _safetensors_tensor(key, value, size)
            result.append((key, shape, dtype, metadata))
        except Refused as error:
            reasons.append(str(error))
    return _require_tensors(result, reasons)


def _read_safetensors(path: str, key: str) -> np.ndarray:
    with _open_regular(path) as file:
        header, start, size = _safetensors_header(file)
        if key not in header:
            raise Refused(f'contains no tensor {printable(key)!r}')
        shape, dtype, begin = _safetensors_tensor(key, header[key], size)
        file.seek(start + begin)
        array = np.fromfile(file, STORED[dtype], math.prod(shape))
    if array.size != math.prod(shape):
        raise Refused('truncated during the read')
    return _widen(array, dtype).reshape(shape)


def _describe_npy(path: str) -> list[Description]:
    array = _map_npy(path)
    return [('', array.shape, array.dtype.name, {})]


def _read_npy(path: str, key: str) -> np.ndarray:
    array = _map_npy(path)
    return _widen(array, array.dtype.name)


def _map_npy(path: str) -> np.ndarray:
    try:
        with open(path, 'rb') as file:
            if file.read(4) == b'PK\x03\x04':
                raise Refused('an .npz archive; expected one .npy file per array')
            file.seek(0)
            # Versions 2 and 3 differ in the names of fields, and an array with fields is refused.
            is_first = np.lib.format.read_magic(file) == (1, 0)
            shape, in_columns, dtype = (np.lib.format.read_array_header_1_0 if is_first else
                                        np.lib.format.read_array_header_2_0)(file)
            if dtype.kind not in 'fiub' or dtype.itemsize > 8:       # numpy divides by 0 if items have no bytes
                raise Refused(f'a tensor of {printable(dtype)[:40]}: {_EXPECTED}')
            if not is_shape(shape):
                raise Refused(f'an array of shape {printable(shape)[:80]}')
            # Memory-mapped, so that a header with a wrong shape cannot cause a large allocation.
            return np.memmap(path, dtype, 'r', file.tell(), shape, 'F' if in_columns else 'C')
    except (OSError, Refused):
        raise
    except Exception as error:          # numpy parses the header with Python's tokenizer, which raises its own errors
        raise Refused(f'truncated, or not a .npy file ({printable(error)[:100]})') from error


def _describe_pt(path: str) -> list[Description]:
    with _open_regular(path) as file:
        contents = parse(file, os.fstat(file.fileno()).st_size)
    result, reasons = [], list(contents.refused)
    for key, tensor in contents.tensors.items():
        if tensor.dtype in _DTYPES.values():
            result.append((key, tensor.shape, tensor.dtype, contents.metadata))
        else:
            reasons.append(f'a tensor of {printable(tensor.dtype)[:40]}: {_EXPECTED}')
    return _require_tensors(result, reasons)


def _read_pt(path: str, key: str) -> np.ndarray:
    with _open_regular(path) as file:
        contents = parse(file, os.fstat(file.fileno()).st_size)
        if key not in contents.tensors:
            raise Refused(f'contains no tensor {printable(key)!r}')
        tensor = contents.tensors[key]
        if tensor.dtype not in _DTYPES.values():
            raise Refused(f'a tensor of {printable(tensor.dtype)[:40]}: {_EXPECTED}')
        array = _widen(tensor.view(contents.fetch(tensor.storage)), tensor.dtype)
    return np.asarray(-array) if tensor.is_negative else array


def _open_regular(path: str) -> BinaryIO:
    """Open a regular file.  Opening anything else, such as a FIFO, could block forever."""
    if not os.path.isfile(path):
        raise Refused('the file no longer exists')
    return open(path, 'rb')


def _widen(array: np.ndarray, dtype: str) -> np.ndarray:
    """Convert the stored numbers to float32: exactly up to 24 significant bits, else rounded; out of range: infinity."""
    if dtype == 'bfloat16':
        return np.asarray(np.array(array, np.uint32, order='C') << 16).view(np.float32)
    if dtype.startswith('float8_'):
        return np.asarray(_float8(dtype)[array], order='C')
    with np.errstate(over='ignore', invalid='ignore'):
        return np.array(array, np.float32, order='C')


@functools.cache
def _float8(dtype: str) -> np.ndarray:
    """Return the values of the 256 codes of an 8-bit type."""
    codes = np.arange(256)
    if dtype == 'float8_e8m0fnu':                           # a scale: only an exponent
        return np.where(codes == 255, np.nan, np.exp2(codes - 127.0)).astype(np.float32)
    digits, bias = {'float8_e4m3fn': (3, 7), 'float8_e5m2': (2, 15), 'float8_e4m3fnuz': (3, 8),
                    'float8_e5m2fnuz': (2, 16)}[dtype]
    field, fraction = (codes & 127) >> digits, (codes & ((1 << digits) - 1)) / (1 << digits)
    values = np.where(field == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (field - bias))
    if dtype == 'float8_e5m2':
        values[field == 31] = np.where(fraction[field == 31] == 0, np.inf, np.nan)
    elif dtype == 'float8_e4m3fn':
        values[(codes & 127) == 127] = np.nan
    values = np.where(codes < 128, values, -values)
    if dtype.endswith('fnuz'):                              # NaN is stored in place of -0
        values[128] = np.nan
    return values.astype(np.float32)


def _require_tensors(tensors: list[Any], reasons: list[str]) -> list[Any]:
    if not tensors:
        raise Refused(reasons[0] if reasons else 'contains no tensor')
    return tensors


_TORCH = '.pt', '.pth', '.bin'
_DESCRIBERS = {'.safetensors': _describe_safetensors, '.npy': _describe_npy} | dict.fromkeys(_TORCH, _describe_pt)
_READERS = {'.safetensors': _read_safetensors, '.npy': _read_npy} | dict.fromkeys(_TORCH, _read_pt)
