"""The readers of the three file formats of saved tensors: .safetensors, .npy and PyTorch's .pt.

`list_tensors` lists the tensors of a file, `read` returns one of them as float32.  Both raise Refused or OSError.

No file is trusted.  Headers are checked against the file size before any allocation, .npy files are read without pickle
support, and .pt files with torch's weights_only.
"""
from __future__ import annotations

import contextlib
import math
import os
import pickle
import re
import zipfile
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import numpy as np

from pyops.errors import printable
from pyops.inspect.checks import AXES_LIMIT, Refused, is_count, parse_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyops.typing import Shape

SUFFIXES = '.safetensors', '.pt', '.npy'

_HEADER_LIMIT = 16 << 20            # bytes; far more than any writer needs, so a longer header is an attack or damage
_SAFE_TORCH = 2, 6                  # in older versions a file could run code despite weights_only (CVE-2025-32434)

# safetensors dtype -> numpy dtype of the stored bytes, name of the dtype
_DTYPES = {'F64': ('<f8', 'float64'), 'F32': ('<f4', 'float32'), 'F16': ('<f2', 'float16'), 'BF16': ('<u2', 'bfloat16')}
Description: TypeAlias = 'tuple[str, Shape, str, dict[str, Any]]'      # key, shape, dtype, metadata
_EXPECTED = 'expected float64, float32, float16 or bfloat16'


class NoTorch(Refused):
    """The file may be fine, but PyTorch is missing or too old to read it."""


def list_tensors(path: str) -> list[Description]:
    """Return [(key, shape, dtype, metadata)] for the tensors of a file.  Its numbers are not read."""
    return _DESCRIBERS[os.path.splitext(path)[1]](path)


def read(path: str, key: str) -> np.ndarray:
    """Return one tensor of a file as a contiguous float32 array."""
    return _READERS[os.path.splitext(path)[1]](path, key)


def nbytes(shape: Iterable[int], dtype: str) -> int:
    """Return the number of bytes that a tensor of the named dtype needs in a file."""
    return math.prod(shape) * {'float64': 8, 'float32': 4}.get(dtype, 2)


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
    """Check one tensor of the header and return its shape, safetensors dtype and offset in the data."""
    try:
        shape, dtype, (begin, end) = tuple(value['shape']), value['dtype'], value['data_offsets']
        is_valid = all(map(is_count, (*shape, begin, end))) and len(shape) <= AXES_LIMIT and begin <= end
    except (TypeError, KeyError, ValueError):
        is_valid = False
    if not is_valid or not isinstance(dtype, str):
        raise Refused(f'the header is damaged at {printable(key)[:80]}')
    if dtype not in _DTYPES:
        raise Refused(f'a tensor of {printable(dtype)[:20]}: {_EXPECTED}')
    if end > size or end - begin != math.prod(shape) * np.dtype(_DTYPES[dtype][0]).itemsize:
        raise Refused(f'truncated or damaged: {size} bytes of data, a tensor of shape {shape} in {begin}:{end}')
    return shape, dtype, begin


def _describe_safetensors(path: str) -> list[Description]:
    with open(path, 'rb') as file:
        header, _, size = _safetensors_header(file)
    metadata = header.pop('__metadata__', None)
    metadata = metadata if isinstance(metadata, dict) else {}
    result, reasons = [], []
    for key, value in header.items():
        try:
            shape, dtype, _ = _safetensors_tensor(key, value, size)
            result.append((key, shape, _DTYPES[dtype][1], metadata))
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
        array = np.fromfile(file, _DTYPES[dtype][0], math.prod(shape))
    if array.size != math.prod(shape):
        raise Refused('truncated during the read')
    return _widen(array, dtype == 'BF16').reshape(shape)


def _describe_npy(path: str) -> list[Description]:
    array = _map_npy(path)
    return [('', array.shape, array.dtype.name, {})]


def _read_npy(path: str, key: str) -> np.ndarray:
    return _widen(_map_npy(path))


def _map_npy(path: str) -> np.ndarray:
    try:
        # Memory-mapped, so that a header with a wrong shape cannot cause a large allocation.
        array = np.load(path, mmap_mode='r', allow_pickle=False)
    except OSError:
        raise
    except Exception as error:          # numpy parses the header with Python's tokenizer, which raises its own errors
        raise Refused(f'truncated, an array of Python objects, or not a .npy file ({printable(error)[:100]})') from error
    if not isinstance(array, np.ndarray):
        raise Refused('an .npz archive; expected one .npy file per array')
    if array.dtype.kind != 'f' or array.dtype.itemsize > 8:
        raise Refused(f'a tensor of {printable(array.dtype)[:40]}: {_EXPECTED}')
    return array


def _describe_pt(path: str) -> list[Description]:
    tensors, metadata = _load_pt(path)
    result, reasons = [], []
    for key, tensor in tensors.items():
        try:
            result.append((key, *_describe_torch(tensor, os.path.getsize(path)), metadata))
        except Refused as error:
            reasons.append(str(error))
    return _require_tensors(result, reasons)


def _read_pt(path: str, key: str) -> np.ndarray:
    tensors, _ = _load_pt(path)
    if key not in tensors:
        raise Refused(f'contains no tensor {printable(key)!r}')
    _describe_torch(tensors[key], os.path.getsize(path))
    return np.array(tensors[key].detach().float().resolve_neg().numpy(), np.float32, order='C')


def _describe_torch(tensor: Any, size: int) -> tuple[Shape, str]:
    """Check that a tensor is dense and not larger than its file, and return its shape and dtype."""
    torch = _torch()
    dtype = str(tensor.dtype).removeprefix('torch.')
    if tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise Refused(f'a tensor of {dtype}: {_EXPECTED}')
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != 'cpu':
        raise Refused('a sparse, quantized or meta tensor; expected a dense one')
    if tensor.numel() * tensor.element_size() > size or tensor.dim() > AXES_LIMIT:
        raise Refused(f'a tensor of shape {tuple(tensor.shape)} in a file of {size} bytes')
    return tuple(tensor.shape), dtype


def _load_pt(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ({key: tensor}, metadata) of a file written by torch.save.  Its pickle can create tensors only.

    The zip directory is checked first: a compressed record can expand to any size, and a file in the format before torch
    1.6 is one pickle, whose tensors torch would allocate at the size that the pickle states.  Memory-mapped storages
    cannot exceed the file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except OSError:
        raise
    except Exception as error:          # damaged bytes can raise anything, also below
        raise Refused('truncated, or not a zip file of torch.save (torch 1.6 or newer)') from error
    size = os.path.getsize(path)
    if sum(record.file_size for record in records) > size or any(record.compress_type != zipfile.ZIP_STORED or
           record.filename.endswith('data.pkl') and record.file_size > _HEADER_LIMIT for record in records):
        raise Refused('the zip has compressed or oversized records, which torch.save never writes')
    torch = _torch()
    try:
        with contextlib.ExitStack() as files:
            # torch can only map a file whose name is valid UTF-8
            can_map = _is_utf8(path)
            source = path if can_map else files.enter_context(open(path, 'rb'))
            payload = torch.load(source, map_location='cpu', weights_only=True, mmap=can_map)
    except OSError:
        raise
    except pickle.UnpicklingError as error:
        raise Refused('damaged, or contains Python objects, which could run code; expected tensors only') from error
    except Exception as error:
        raise Refused(f'damaged ({type(error).__name__} in torch.load)') from error
    if isinstance(payload, torch.Tensor):
        return {'': payload}, {}
    if isinstance(payload, dict):
        metadata = payload.get('metadata')
        metadata = metadata if isinstance(metadata, dict) else {}
        tensors = {str(key): value for key, value in payload.items() if isinstance(value, torch.Tensor)}
        if tensors:
            return tensors, {**metadata, 'pyops': payload.get('pyops')}
    raise Refused('contains no tensor; expected a tensor or a dict of tensors')


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise NoTorch('reading .pt files requires torch, which is not installed; install it with: pip install torch') from error
    if tuple(int(part) for part in re.findall(r'\d+', torch.__version__)[:2]) < _SAFE_TORCH:
        raise NoTorch(f'torch {torch.__version__} has a security hole in reading .pt files; install torch '
                      f'{".".join(map(str, _SAFE_TORCH))} or newer')
    return torch


def _open_regular(path: str) -> BinaryIO:
    """Open a regular file.  Opening anything else, such as a FIFO, could block forever."""
    if not os.path.isfile(path):
        raise Refused('the file no longer exists')
    return open(path, 'rb')


def _widen(array: np.ndarray, bfloat16: bool = False) -> np.ndarray:
    """Convert float16 and bfloat16 exactly, and float64 with rounding (out of range: infinity), to float32."""
    if bfloat16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over='ignore', invalid='ignore'):
        return np.array(array, np.float32, order='C')


def _require_tensors(tensors: list[Any], reasons: list[str]) -> list[Any]:
    if not tensors:
        raise Refused(reasons[0] if reasons else 'contains no tensor')
    return tensors


_DESCRIBERS = {'.safetensors': _describe_safetensors, '.npy': _describe_npy, '.pt': _describe_pt}
_READERS = {'.safetensors': _read_safetensors, '.npy': _read_npy, '.pt': _read_pt}
