"""The readers of the file formats of saved tensors: .safetensors, .npy and PyTorch's .pt, .pth and .bin.

`list_file` lists the tensors of a file, `read` returns one of them as float32.  Both raise Refused or OSError.  A quantized
weight whose codes and scales are separate tensors (packed.py) is listed as the weight and its codes; its scales stay.

No file is trusted.  Headers are checked against the file size before any allocation, .npy files are read without pickle
support, and torch_files.py reads PyTorch's pickles without running them.
"""
from __future__ import annotations

import functools
import math
import os
import re
import threading
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeAlias, TypeVar

import numpy as np

from pyops.errors import printable
from pyops.inspect import packed
from pyops.inspect.checks import Refused, is_count, is_settled, is_shape, parse_json
from pyops.inspect.torch_files import STORED, Stored, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
_PAIRS = 'float4_e2m1fn_x2'         # dtype of torch: two numbers in an element, which its shape counts as one
_INDEX_LIMIT = 64 << 20             # bytes of the index of a checkpoint in several files
_SHARD = re.compile(r'(.+)-\d{1,9}-of-\d{1,9}\.safetensors', re.S)
_KEPT = 8                           # headers that are kept after they were parsed
_HEADERS: dict[Any, Any] = {}
_LOCK = threading.Lock()
T = TypeVar('T')


class Listing(NamedTuple):
    """The tensors of a file, and (key, reason) of those that cannot be read; the key may be unknown, ''."""
    tensors: list[Description]
    refused: list[tuple[str, str]]


def list_file(path: str) -> Listing:
    """Return the Listing of a file.  Its numbers are not read.  Refused if it has no tensor that can be read."""
    found = _LISTERS[os.path.splitext(path)[1]](path)
    if not found.tensors:
        raise Refused(found.refused[0][1] if found.refused else 'contains no tensor')
    return found


def list_tensors(path: str) -> list[Description]:
    """Return [(key, shape, dtype, metadata)] for the tensors of a file."""
    return list_file(path).tensors


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
        file = _safetensors(path)
        if key in file.refused:
            raise Refused(file.refused[key])
        stored = None if key in file.weights else file.tensors.get(key)
        return None if stored is None else Flat(path, stored.offset, stored.dtype, math.prod(stored.shape))
    if suffix == '.npy':
        array = _map_npy(path)
        if isinstance(array, np.memmap) and array.flags.c_contiguous and array.dtype == STORED.get(array.dtype.name):
            return Flat(path, array.offset, array.dtype.name, array.size)
    return None


def nbytes(shape: Iterable[int], dtype: str) -> int:
    """Return the number of bytes that a tensor of the named dtype needs in a file."""
    return math.prod(shape) * np.dtype(STORED.get(dtype, 'u1')).itemsize


# ---- safetensors -----------------------------------------------------------------------------------------------------
# The safetensors library is not used: its numpy API does not support bfloat16.

class _Stored(NamedTuple):
    """A tensor in a safetensors file, from `offset` of the file on."""
    path: str
    offset: int
    shape: Shape
    dtype: str

    def read(self) -> np.ndarray:
        with _open_regular(self.path) as file:
            file.seek(self.offset)
            array = np.fromfile(file, STORED[self.dtype], math.prod(self.shape))
        if array.size != math.prod(self.shape):
            raise Refused('truncated during the read')
        return array.reshape(self.shape)

    def numbers(self) -> np.ndarray:
        return _widen(self.read(), self.dtype).reshape(self.shape)


class _Safetensors(NamedTuple):
    """The header of a file.

    tensors: those in the file, by key;  metadata: of the file;  refused: {key: reason}
    weights: quantized weights by name, whose codes are in the file;  scales: their other tensors, perhaps from other files
    """
    tensors: dict[str, _Stored]
    metadata: dict[str, Any]
    refused: dict[str, str]
    weights: dict[str, packed.Packed]
    scales: dict[str, _Stored]

    def codes(self, item: packed.Packed) -> np.ndarray:
        """Return the numbers that the codes of a weight mean, before the scale."""
        stored = self.tensors[item.codes]
        return packed.unpack(item, stored.read()) if stored.dtype in ('uint8', 'int32') else stored.numbers()

    def weight(self, item: packed.Packed) -> np.ndarray:
        scales, *others = (self.scales[key].numbers() if key else None for key in (item.scale, item.factor, item.zeros))
        assert scales is not None
        return packed.dequantize(item, self.codes(item), scales, *others)


def _safetensors(path: str) -> _Safetensors:
    return _kept('safetensors', path, lambda file: _parse_safetensors(path, file))


def _parse_safetensors(path: str, file: BinaryIO) -> _Safetensors:
    tensors, metadata, refused = _stored_tensors(path, file)
    scales = tensors | _scales_elsewhere(path, tensors, refused)
    found, unknown = packed.find(scales, metadata, lambda key: scales[key].read())
    weights = {}
    for item in found:
        if item.codes not in tensors or item.codes in refused:
            continue
        if item.name in tensors and item.name != item.codes:
            refused[item.codes] = f'the file also has {printable(item.name)[:80]}'
            continue
        weights[item.name] = item
        if item.has_exponents:
            scales[item.scale] = scales[item.scale]._replace(dtype='float8_e8m0fnu')
            if item.scale in tensors:
                tensors[item.scale] = scales[item.scale]
    refused |= {key: reason for key, reason in unknown.items() if key in tensors}
    return _Safetensors(tensors, metadata, refused, weights, scales)


def _stored_tensors(path: str, file: BinaryIO) -> tuple[dict[str, _Stored], dict[str, Any], dict[str, str]]:
    """Return the tensors, the metadata and {key: reason} of tensors that cannot be read."""
    size = os.fstat(file.fileno()).st_size
    first = file.read(8)
    length = int.from_bytes(first, 'little')
    if len(first) < 8 or length > size - 8:
        raise Refused(f'truncated, or not a safetensors file: {size} bytes')
    if length > _HEADER_LIMIT:
        raise Refused(f'the header has {length} bytes; expected at most {_HEADER_LIMIT}')
    header = parse_json(file.read(length))
    metadata = header.pop('__metadata__', None)
    tensors, refused = {}, {}
    for key, value in header.items():
        try:
            shape, dtype, begin = _safetensors_tensor(key, value, size - 8 - length)
            tensors[key] = _Stored(path, 8 + length + begin, shape, dtype)
        except Refused as error:
            refused[key] = str(error)
    return tensors, metadata if isinstance(metadata, dict) else {}, refused


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


def _scales_elsewhere(path: str, tensors: dict[str, _Stored], refused: dict[str, str]) -> dict[str, _Stored]:
    """Return the scales of the file's weights that are in other files of its checkpoint, by the index of Hugging Face.

    Adds weights whose scales cannot be read to `refused`.
    """
    folder, name = os.path.split(path)
    match = _SHARD.fullmatch(name)
    index = os.path.join(folder, f'{match[1]}.safetensors.index.json') if match else ''
    if not os.path.isfile(index):
        return {}
    try:
        files = _kept('index', index, _weight_map)
    except (Refused, OSError):
        return {}
    found: dict[str, _Stored] = {}
    for key in tensors:
        for scale in (key.removesuffix('_packed') + suffix for suffix in packed.SCALES):
            other = files.get(scale)
            if scale in tensors or not isinstance(other, str) or other == name:
                continue
            try:
                found[scale] = _stored_in(folder, other)[scale]
            except (Refused, OSError, KeyError):
                refused[key] = f'{printable(scale)[:80]} cannot be read from {printable(other)[:80]}'
    return found


def _weight_map(file: BinaryIO) -> dict[str, Any]:
    files = parse_json(file.read(_INDEX_LIMIT)).get('weight_map')
    return files if isinstance(files, dict) else {}


def _stored_in(folder: str, name: str) -> dict[str, _Stored]:
    """Return the tensors of another file of the folder.  Refused if the name leads out of it."""
    path = os.path.join(folder, name)
    if os.path.dirname(os.path.realpath(path)) != os.path.realpath(folder) or not name.endswith('.safetensors'):
        raise Refused('not in the folder')
    return _kept('tensors', path, lambda file: _stored_tensors(path, file)[0])


def _kept(kind: str, path: str, parse: Callable[[BinaryIO], T]) -> T:
    """Return parse(open file), or its last result if the file is the same.  A checkpoint has thousands of tensors, and one
    header is parsed for all of them."""
    with _open_regular(path) as file:
        status = os.fstat(file.fileno())
        key = kind, path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        with _LOCK:
            if key in _HEADERS:
                return _HEADERS[key]
        result = parse(file)
    if is_settled(status):
        with _LOCK:
            while len(_HEADERS) >= _KEPT:
                del _HEADERS[next(iter(_HEADERS))]
            _HEADERS[key] = result
    return result


def _list_safetensors(path: str) -> Listing:
    file = _safetensors(path)
    tensors: list[Description] = []
    packed_as = {item.codes: item for item in file.weights.values()}
    for key, stored in file.tensors.items():
        item = packed_as.get(key)
        if key in file.refused:
            continue
        if item is None:
            tensors.append((key, stored.shape, stored.dtype, file.metadata))
            continue
        codes = _codes_key(item)
        tensors += [(name, item.shape, item.dtype, file.metadata) for name in (item.name, codes)
                    if name == item.name or codes not in file.tensors]
    return Listing(tensors, list(file.refused.items()))


def _codes_key(item: packed.Packed) -> str:
    return item.name + '_codes'


def _read_safetensors(path: str, key: str) -> np.ndarray:
    file = _safetensors(path)
    if key in file.weights:
        return file.weight(file.weights[key])
    if key in file.refused:
        raise Refused(file.refused[key])
    if key in file.tensors:
        return file.tensors[key].numbers()
    item = file.weights.get(key.removesuffix('_codes'))
    if item is None or key != _codes_key(item):
        raise Refused(f'contains no tensor {printable(key)!r}')
    return file.codes(item)


def _list_npy(path: str) -> Listing:
    array = _map_npy(path)
    return Listing([('', array.shape, array.dtype.name, {})], [])


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


def _list_pt(path: str) -> Listing:
    with _open_regular(path) as file:
        contents = parse(file, os.fstat(file.fileno()).st_size)
    result, reasons = [], [('', reason) for reason in contents.refused]
    for key, tensor in contents.tensors.items():
        if tensor.dtype == _PAIRS and tensor.shape:
            shape = list(tensor.shape)
            shape[_pair_axis(tensor)] *= 2
            result.append((key, tuple(shape), 'float4_e2m1fn', contents.metadata))
        elif tensor.dtype in _DTYPES.values():
            result.append((key, tensor.shape, tensor.dtype, contents.metadata))
        else:
            reasons.append((key, f'a tensor of {printable(tensor.dtype)[:40]}: {_EXPECTED}'))
    return Listing(result, reasons)


def _read_pt(path: str, key: str) -> np.ndarray:
    with _open_regular(path) as file:
        contents = parse(file, os.fstat(file.fileno()).st_size)
        if key not in contents.tensors:
            raise Refused(f'contains no tensor {printable(key)!r}')
        tensor = contents.tensors[key]
        if tensor.dtype == _PAIRS and tensor.shape:
            axis = _pair_axis(tensor)
            codes = np.moveaxis(tensor.view(contents.fetch(tensor.storage)), axis, -1)
            return np.ascontiguousarray(np.moveaxis(packed.unpack_pairs(codes), -1, axis))
        if tensor.dtype not in _DTYPES.values():
            raise Refused(f'a tensor of {printable(tensor.dtype)[:40]}: {_EXPECTED}')
        array = _widen(tensor.view(contents.fetch(tensor.storage)), tensor.dtype)
    return np.asarray(-array) if tensor.is_negative else array


def _pair_axis(tensor: Stored) -> int:
    """Return the axis along which a tensor of _PAIRS has two numbers in an element: the contiguous one."""
    axes = [axis for axis, stride in enumerate(tensor.strides) if stride == 1]
    return axes[-1] if axes else len(tensor.shape) - 1


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


_TORCH = '.pt', '.pth', '.bin'
_LISTERS = {'.safetensors': _list_safetensors, '.npy': _list_npy} | dict.fromkeys(_TORCH, _list_pt)
_READERS = {'.safetensors': _read_safetensors, '.npy': _read_npy} | dict.fromkeys(_TORCH, _read_pt)
