"""The readers of the three file formats of saved tensors: .safetensors, .npy and PyTorch's .pt.

Nothing that is read is trusted.  Headers are checked against the size of their file before anything is allocated, .npy is
read without pickles and .pt with torch's weights_only.

A describer gives (key, shape, dtype, metadata) of each tensor of a file, a reader one tensor as float32.  Either raises
Refused or OSError.
"""
import contextlib
import math
import os
import pickle
import re
import zipfile

import numpy as np

from pyops.inspect.checks import AXES_LIMIT, Refused, is_whole, parse_json, printable

SUFFIXES = '.safetensors', '.pt', '.npy'

_HEADER_LIMIT = 16 << 20            # bytes; a writer stays far below, and what is longer would only fill our memory
_SAFE_TORCH = 2, 6                  # before it weights_only could be made to run code (CVE-2025-32434)

# What a safetensors file calls the kinds of number that fit a float32 -> how they lie in the file, their name
_KINDS = {'F64': ('<f8', 'float64'), 'F32': ('<f4', 'float32'), 'F16': ('<f2', 'float16'), 'BF16': ('<u2', 'bfloat16')}
SIZES = {'float64': 8, 'float32': 4}   # bytes; 2 of all others
_WANT = 'want float64, float32, float16 or bfloat16'


class NoTorch(Refused):
    """It is not the file that is wrong."""


def _safetensors_header(file):
    """-> header, where the tensors begin, how many bytes they have.

    Read here and not by the library: its numpy side knows no bfloat16, and of a large file only one tensor may be wanted.
    """
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    length = int.from_bytes(start, 'little')
    if len(start) < 8 or length > size - 8:
        raise Refused(f'truncated or no safetensors file: {size} bytes')
    if length > _HEADER_LIMIT:
        raise Refused(f'a header of {length} bytes: want at most {_HEADER_LIMIT}')
    header = file.read(length)
    return parse_json(header), 8 + length, size - 8 - length


def _safetensors_tensor(key, value, size):
    """-> shape, kind, first byte of a tensor of the header."""
    try:
        shape, kind, (begin, end) = tuple(value['shape']), value['dtype'], value['data_offsets']
        right = all(map(is_whole, (*shape, begin, end))) and len(shape) <= AXES_LIMIT and begin <= end
    except (TypeError, KeyError, ValueError):
        right = False
    if not right or not isinstance(kind, str):
        raise Refused(f'its header is damaged at {printable(key)[:80]}')
    if kind not in _KINDS:
        raise Refused(f'a tensor of {printable(kind)[:20]}: {_WANT}')
    if end > size or end - begin != math.prod(shape) * np.dtype(_KINDS[kind][0]).itemsize:
        raise Refused(f'truncated or damaged: {size} bytes of numbers, a tensor of shape {shape} in {begin}:{end}')
    return shape, kind, begin


def _describe_safetensors(path):
    with open(path, 'rb') as file:
        header, _, size = _safetensors_header(file)
    metadata = header.pop('__metadata__', None)
    metadata = metadata if isinstance(metadata, dict) else {}
    result, reasons = [], []
    for key, value in header.items():
        try:
            shape, kind, _ = _safetensors_tensor(key, value, size)
            result.append((key, shape, _KINDS[kind][1], metadata))
        except Refused as error:
            reasons.append(str(error))
    return _some(result, reasons)


def _read_safetensors(path, key):
    with _open(path) as file:
        header, start, size = _safetensors_header(file)
        if key not in header:
            raise Refused(f'has no tensor {printable(key)!r}')
        shape, kind, begin = _safetensors_tensor(key, header[key], size)
        file.seek(start + begin)
        array = np.fromfile(file, _KINDS[kind][0], math.prod(shape))
    if array.size != math.prod(shape):
        raise Refused('truncated while it was read')
    return _widen(array, kind == 'BF16').reshape(shape)


def _describe_npy(path):
    array = _map_npy(path)
    return [('', array.shape, array.dtype.name, {})]


def _read_npy(path, key):
    return _widen(_map_npy(path))


def _map_npy(path):
    try:
        # Mapped, so that a header that promises more than the file has allocates nothing.
        array = np.load(path, mmap_mode='r', allow_pickle=False)
    except OSError:
        raise
    except Exception as error:          # numpy reads the header with Python's tokenizer, which has errors of its own
        raise Refused(f'truncated, of Python objects or no .npy file ({printable(error)[:100]})') from error
    if not isinstance(array, np.ndarray):
        raise Refused('an archive of arrays: want one .npy file an array')
    if array.dtype.kind != 'f' or array.dtype.itemsize > 8:
        raise Refused(f'a tensor of {printable(array.dtype)[:40]}: {_WANT}')
    return array


def _describe_pt(path):
    tensors, metadata = _load_pt(path)
    result, reasons = [], []
    for key, tensor in tensors.items():
        try:
            result.append((key, *_describe_torch(tensor, os.path.getsize(path)), metadata))
        except Refused as error:
            reasons.append(str(error))
    return _some(result, reasons)


def _read_pt(path, key):
    tensors, _ = _load_pt(path)
    if key not in tensors:
        raise Refused(f'has no tensor {printable(key)!r}')
    _describe_torch(tensors[key], os.path.getsize(path))
    return np.array(tensors[key].detach().float().resolve_neg().numpy(), np.float32, order='C')


def _describe_torch(tensor, size):
    """-> shape, dtype of a tensor that is dense and not larger than its file."""
    torch = _torch()
    kind = str(tensor.dtype).removeprefix('torch.')
    if tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise Refused(f'a tensor of {kind}: {_WANT}')
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != 'cpu':
        raise Refused('a tensor that is sparse, quantised or without numbers: want a dense one')
    if tensor.numel() * tensor.element_size() > size or tensor.dim() > AXES_LIMIT:
        raise Refused(f'a tensor of shape {tuple(tensor.shape)} in a file of {size} bytes')
    return tuple(tensor.shape), kind


def _load_pt(path):
    """-> ({key: tensor}, metadata) of a file of torch.save.  Its pickle may build tensors and nothing else.

    The zip is looked at first: packed records could unfold to any size, and a file of before torch 1.6 is one pickle whose
    tensors would be allocated at the size that it claims.  Mapped storages cannot grow.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except OSError:
        raise
    except Exception as error:          # whatever the bytes bring about, below too
        raise Refused('truncated or no file of torch.save (since torch 1.6, which made them zip files)') from error
    size = os.path.getsize(path)
    if sum(record.file_size for record in records) > size or any(record.compress_type != zipfile.ZIP_STORED or
           record.filename.endswith('data.pkl') and record.file_size > _HEADER_LIMIT for record in records):
        raise Refused('its zip has packed or oversized records, which torch.save does not write')
    torch = _torch()
    try:
        with contextlib.ExitStack() as files:
            # torch maps a file by its name, and a name has to be UTF-8 for that
            mapped = _is_utf8(path)
            source = path if mapped else files.enter_context(open(path, 'rb'))
            payload = torch.load(source, map_location='cpu', weights_only=True, mmap=mapped)
    except OSError:
        raise
    except pickle.UnpicklingError as error:
        raise Refused('holds Python objects, which could run code, or is damaged: want tensors alone') from error
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
    raise Refused('holds no tensor: want one, or a dict of tensors')


def _is_utf8(text):
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _torch():
    try:
        import torch
    except ImportError as error:
        raise NoTorch('torch is not installed, which reads .pt: install it with: pip install torch') from error
    if tuple(int(part) for part in re.findall(r'\d+', torch.__version__)[:2]) < _SAFE_TORCH:
        raise NoTorch(f'torch {torch.__version__} can be made to run code by a .pt file: want torch '
                       f'{".".join(map(str, _SAFE_TORCH))} or newer')
    return torch


def _open(path):
    """A plain file, opened; anything else could keep us waiting for ever."""
    if not os.path.isfile(path):
        raise Refused('there is no such file any more')
    return open(path, 'rb')


def _widen(array, bfloat16=False):
    """float32 of float16 or bfloat16 (exact) and of float64 (rounded; beyond float32's range infinite)."""
    if bfloat16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over='ignore', invalid='ignore'):
        return np.array(array, np.float32, order='C')


def _some(result, reasons):
    if not result:
        raise Refused(reasons[0] if reasons else 'holds no tensor')
    return result


DESCRIBERS = {'.safetensors': _describe_safetensors, '.npy': _describe_npy, '.pt': _describe_pt}
READERS = {'.safetensors': _read_safetensors, '.npy': _read_npy, '.pt': _read_pt}
