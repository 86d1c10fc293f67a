"""Quantized weights in safetensors files, whose codes and scales are separate tensors.

A weight is a product of codes and scales of blocks; these are its tensors in the layouts that are recognized:

    weight, weight_scale_inv                         DeepSeek-V3: blocks of 128 x 128
    weight, weight_scale [, weight_zero_point]       compressed-tensors (float-, int-, mxfp8-quantized) and ModelOpt (FP8)
    weight, weight_scale, weight_scale_2             ModelOpt (NVFP4): two codes per byte
    weight_packed, weight_scale, weight_global_scale compressed-tensors (nvfp4-pack-quantized); it divides by the global scale
    weight_packed, weight_scale                      compressed-tensors (mxfp4-pack-quantized); exponents of 2, stored as uint8
    weight_packed, weight_scale, weight_shape        compressed-tensors (pack-quantized): eight or four integers per int32
    NAME_blocks, NAME_scales                         gpt-oss (MXFP4)
    _weight_qdata, _weight_scale, ...                torchao; the metadata of the file has the class and its attributes

The first of two codes in a byte has the low four bits.  Everything here is decided by names, shapes and dtypes; a weight whose
layout remains unknown is refused with the reason.
"""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from pyops.errors import printable
from pyops.inspect.checks import Refused, is_count, parse_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pyops.typing import Shape

SCALES = '_scale_inv', '_scale', '_scale_2', '_global_scale', '_zero_point', '_shape', '_g_idx'     # after the name of a weight

_E2M1, _E8M0 = 'float4_e2m1fn', 'float8_e8m0fnu'
_NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)           # of E2M1; the codes from 8 on are negative
_FLOATS = 'float8_e4m3fn', 'float8_e5m2', 'float8_e4m3fnuz', 'float8_e5m2fnuz'
_BLOCK = 128                    # rows and columns of the blocks of DeepSeek-V3
_QDATA = {'Float8Tensor': _FLOATS, 'Int8Tensor': ('int8',), 'IntxUnpackedToInt8Tensor': ('int8',),
          'MXTensor': (*_FLOATS, 'uint8'), 'NVFP4Tensor': ('uint8',)}       # class of torchao -> dtypes of its codes


class Tensor(Protocol):
    """What is known of a stored tensor."""
    @property
    def shape(self) -> Shape: ...
    @property
    def dtype(self) -> str: ...


class Packed(NamedTuple):
    """A quantized weight.

    name: of the weight;  codes, scale: names of the stored tensors;  factor, zeros: the same, '' without
    shape: of the weight;  dtype: of a code: the stored dtype, float4_e2m1fn or int4
    grid: number of scales along each axis of the weight;  blocks: number of elements of a scale along each axis
    has_exponents: the scales are stored as the biased exponents of powers of two
    is_divided: the scales are divided by the factor; else multiplied;  is_tiled: they are in the order of tensor cores
    """
    name: str
    codes: str
    scale: str
    factor: str
    zeros: str
    shape: Shape
    dtype: str
    grid: Shape
    blocks: Shape
    has_exponents: bool = False
    is_divided: bool = False
    is_tiled: bool = False


def find(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any],
         numbers: Callable[[str], np.ndarray]) -> tuple[list[Packed], dict[str, str]]:
    """Return the quantized weights of a file, and {name of a tensor: reason} of those with an unknown layout.

    tensors: the tensors of the file by name;  metadata: of the file;  numbers(name): the values of a small tensor
    """
    found: list[Packed] = []
    refused: dict[str, str] = {}

    def add(names: Iterable[str], recognize: Callable[..., Packed | None], *arguments: Any) -> None:
        try:
            if item := recognize(*arguments, tensors):
                found.append(item)
        except Refused as error:
            refused.update(dict.fromkeys((name for name in names if name in tensors), str(error)))
    for key in tensors:
        add((key,), _of_names, key, numbers)
    for key, (names, about) in _subclasses(metadata).items():
        add(names.values(), _of_torchao, key, names, about)
    return found, refused


# ---- names -----------------------------------------------------------------------------------------------------------

def _of_names(key: str, numbers: Callable[[str], np.ndarray], tensors: Mapping[str, Tensor]) -> Packed | None:
    """Return the weight whose codes are the tensor `key`; None if this is another tensor.  Refused for an unknown layout."""
    shape, dtype = tensors[key].shape, tensors[key].dtype
    if key.endswith('_packed') and dtype in ('uint8', 'int32'):
        name = key.removesuffix('_packed')
        scale = _needed(name + '_scale', tensors)
        return _of_bytes(key, name, scale, tensors) if dtype == 'uint8' else _of_words(key, name, scale, tensors, numbers)
    if dtype == 'uint8' and key.endswith('_blocks') and (scale := key.removesuffix('_blocks') + '_scales') in tensors:
        name, (*lead, size) = key.removesuffix('_blocks'), shape or (0,)
        if not lead or tensors[scale].shape != tuple(lead) or tensors[scale].dtype != 'uint8':
            raise Refused(f'{printable(scale)[:80]} is {_text(tensors[scale])}; expected one uint8 for each row of {shape}')
        shape = *lead[:-1], lead[-1] * 2 * size
        return Packed(name, key, scale, '', '', shape, _E2M1, tuple(lead), (1,) * (len(lead) - 1) + (2 * size,), True)
    if dtype in _FLOATS and key + '_scale_inv' in tensors:
        return _scaled(key, key, key + '_scale_inv', tensors, shape, dtype, block=_BLOCK)
    if dtype in (*_FLOATS, 'int8') and key + '_scale' in tensors:
        zeros = key + '_zero_point' if key + '_zero_point' in tensors else ''
        return _scaled(key, key, key + '_scale', tensors, shape, dtype, zeros=zeros)
    if dtype == 'uint8' and key + '_scale' in tensors and key + '_scale_2' in tensors:
        return _scaled(key, key, key + '_scale', tensors, _doubled(shape), _E2M1, factor=key + '_scale_2')
    return None


def _of_bytes(key: str, name: str, scale: str, tensors: Mapping[str, Tensor]) -> Packed:
    """The formats nvfp4-pack-quantized and mxfp4-pack-quantized of compressed-tensors."""
    shape = _doubled(tensors[key].shape)
    if tensors[scale].dtype in ('uint8', _E8M0):
        return _scaled(name, key, scale, tensors, shape, _E2M1)
    factor = _needed(name + '_global_scale', tensors)
    return _scaled(name, key, scale, tensors, shape, _E2M1, factor=factor)._replace(is_divided=True)


def _of_words(key: str, name: str, scale: str, tensors: Mapping[str, Tensor],
              numbers: Callable[[str], np.ndarray]) -> Packed:
    """The format pack-quantized of compressed-tensors: integers with an offset, from the low bits of each int32 up."""
    for suffix in '_zero_point', '_g_idx':
        if name + suffix in tensors:
            raise Refused(f'packed integers with {printable(name + suffix)[:80]} are not supported')
    full = _needed(name + '_shape', tensors)
    if math.prod(tensors[full].shape) != 2 or tensors[full].dtype not in ('int64', 'int32'):
        raise Refused(f'{printable(full)[:80]} is {_text(tensors[full])}; expected two integers')
    rows, columns = (int(size) for size in numbers(full).reshape(-1))
    packed = tensors[key].shape
    for dtype, each in (('int4', 8), ('int8', 4)):
        if packed == (rows, -(-columns // each)) and columns > 0:
            return _scaled(name, key, scale, tensors, (rows, columns), dtype)
    raise Refused(f'{printable(key)[:80]} has the shape {packed} for {rows} x {columns} integers; expected eight or four of '
                  'them per int32')


# ---- torchao ---------------------------------------------------------------------------------------------------------

def _subclasses(metadata: Mapping[str, Any]) -> dict[str, tuple[dict[str, str], dict[str, Any]]]:
    """Return {name of a weight: ({attribute: name of the stored tensor}, description)} of the classes of torchao in a file."""
    result: dict[str, tuple[dict[str, str], dict[str, Any]]] = {}
    if 'tensor_names' not in metadata:
        return result
    for key, text in metadata.items():
        try:
            about = parse_json(text) if isinstance(text, str) and text.startswith('{') else {}
        except Refused:
            continue
        names, data = about.get('_tensor_data_names'), about.get('_data')
        if isinstance(names, list) and all(isinstance(name, str) for name in names) and isinstance(data, dict):
            module, dot, weight = key.rpartition('.')
            result[key] = {name: f'{module}{dot}_{weight}_{name}' for name in names}, about
    return result


def _of_torchao(key: str, names: dict[str, str], about: dict[str, Any], tensors: Mapping[str, Tensor]) -> Packed | None:
    kind, data = str(about.get('_type')), about['_data']
    if not any(name in tensors for name in names.values()):
        return None                                 # in another file of the checkpoint
    if kind not in _QDATA or not {'qdata', 'scale'} <= names.keys():
        raise Refused(f'a {printable(kind)[:40]} of torchao; supported: {", ".join(_QDATA)}')
    codes, scale = (_needed(names[name], tensors) for name in ('qdata', 'scale'))
    factor, zeros = (_needed(names[name], tensors) if name in names else '' for name in ('per_tensor_scale', 'zero_point'))
    shape, dtype = tensors[codes].shape, tensors[codes].dtype
    if dtype not in _QDATA[kind]:
        raise Refused(f'a {kind} of torchao with codes of {dtype}; expected {" or ".join(_QDATA[kind])}')
    if dtype == 'uint8':
        shape, dtype = _doubled(shape), _E2M1
    if data.get('is_swizzled_scales'):
        return _of_tensor_cores(key, codes, scale, tensors, shape, dtype, factor, data.get('block_size'))
    return _scaled(key, codes, scale, tensors, shape, dtype, factor=factor, zeros=zeros)


def _of_tensor_cores(name: str, codes: str, scale: str, tensors: Mapping[str, Tensor], shape: Shape, dtype: str, factor: str,
                     block: Any) -> Packed:
    """Return the Packed of a matrix whose scales are in tiles of 128 x 4, each stored in the order that tensor cores read."""
    stored = math.prod(tensors[scale].shape)
    if len(shape) != 2 or not is_count(block) or not block or shape[1] % block or stored != 512 * math.prod(
            _tiles(shape[0], shape[1] // block)):
        raise Refused(f'{printable(scale)[:80]} has the shape {tensors[scale].shape} for a weight of shape {shape}, in the '
                      'order of tensor cores; save the weight with is_swizzled_scales=False')
    _check_factor(factor, tensors)
    return Packed(name, codes, scale, factor, '', shape, dtype, (shape[0], shape[1] // block), (1, block), is_tiled=True)


def _tiles(rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // 128), -(-columns // 4)


# ---- blocks ----------------------------------------------------------------------------------------------------------

def _scaled(name: str, codes: str, scale: str, tensors: Mapping[str, Tensor], shape: Shape, dtype: str, factor: str = '',
            zeros: str = '', block: int = 0) -> Packed:
    """Return the Packed whose blocks follow from the shapes.   block: of each axis that it fits

    A scale per row may lack the other axes.  Otherwise the sizes of an axis and of its scales have a quotient; without `block`
    it must be whole.
    """
    of, type_of = tensors[scale].shape, tensors[scale].dtype
    if math.prod(of) == 1:
        grid: Shape = (1,) * len(shape)
    elif len(of) == 1 and len(shape) > 1 and of[0] == shape[0]:
        grid = (of[0],) + (1,) * (len(shape) - 1)
    else:
        grid = of
    blocks = []
    if len(grid) == len(shape):
        for n, count in zip(shape, grid, strict=True):
            if count == 1:
                blocks.append(max(n, 1))
            elif block and count and -(-n // block) == count:
                blocks.append(block)
            elif n >= count > 1 and n % count == 0:
                blocks.append(n // count)
    if len(blocks) != len(shape):
        raise Refused(f'{printable(scale)[:80]} has the shape {of} for a weight of shape {shape}: the blocks are unknown')
    has_exponents = type_of == 'uint8'
    if type_of.startswith(('int', 'uint')) and not has_exponents or type_of == 'bool':
        raise Refused(f'{printable(scale)[:80]} is {_text(tensors[scale])}; expected floating-point scales, or exponents as '
                      'uint8')
    if zeros and tensors[zeros].shape != of:
        raise Refused(f'{printable(zeros)[:80]} has the shape {tensors[zeros].shape}, but the scales have {of}')
    _check_factor(factor, tensors)
    return Packed(name, codes, scale, factor, zeros, shape, dtype, grid, tuple(blocks), has_exponents)


def _check_factor(factor: str, tensors: Mapping[str, Tensor]) -> None:
    if factor and math.prod(tensors[factor].shape) != 1:
        raise Refused(f'{printable(factor)[:80]} is {_text(tensors[factor])}; expected one number')


def _needed(name: str, tensors: Mapping[str, Tensor]) -> str:
    if name not in tensors:
        raise Refused(f'the checkpoint has no {printable(name)[:80]}')
    return name


def _doubled(shape: Shape) -> Shape:
    if not shape:
        raise Refused('packed codes without an axis')
    return *shape[:-1], 2 * shape[-1]


def _text(tensor: Tensor) -> str:
    return f'{tensor.dtype} of shape {tensor.shape}'


# ---- numbers ---------------------------------------------------------------------------------------------------------

def unpack_pairs(stored: np.ndarray) -> np.ndarray:
    """Return the numbers of E2M1 codes, float32 with twice the last axis; the first of a pair has the low bits of the byte."""
    values = np.concatenate([_NUMBERS, -_NUMBERS])
    pairs = np.empty((*stored.shape, 2), np.float32)
    pairs[..., 0] = values[stored & 15]
    pairs[..., 1] = values[stored >> 4]
    return pairs.reshape(*stored.shape[:-1], 2 * stored.shape[-1])


def unpack(item: Packed, stored: np.ndarray) -> np.ndarray:
    """Return the numbers of stored codes, float32 in the weight's shape: E2M1 in bytes, or integers in words of 32 bits."""
    if item.dtype == _E2M1:
        return unpack_pairs(stored).reshape(item.shape)
    bits = {'int4': 4, 'int8': 8}[item.dtype]
    words = np.ascontiguousarray(stored).view(np.uint32)
    values = np.empty((*words.shape, 32 // bits), np.float32)
    for i in range(32 // bits):
        values[..., i] = (words >> np.uint32(bits * i)) & np.uint32((1 << bits) - 1)
    values -= np.float32(1 << bits - 1)
    rows, columns = item.shape
    return np.ascontiguousarray(values.reshape(rows, -1)[:, :columns])


def dequantize(item: Packed, codes: np.ndarray, scales: np.ndarray, factor: np.ndarray | None,
               zeros: np.ndarray | None) -> np.ndarray:
    """Return the weight: (codes - zeros) * scales, as float32.  The array of codes is overwritten.

    codes: the numbers of the codes, in the weight's shape;  scales, factor, zeros: as stored, float32
    """
    with np.errstate(all='ignore'):
        if factor is not None:
            number = factor.reshape(())
            scales = scales / number if item.is_divided else scales * number
        if zeros is not None:
            codes -= _repeated(item, zeros)
        codes *= _repeated(item, scales)
    return codes


def _in_rows(item: Packed, numbers: np.ndarray) -> np.ndarray:
    """Return scales that are stored in tiles of 128 x 4 in the order of their rows; a tile has rows 0, 32, 64, 96, 1, ..."""
    rows, columns = item.grid
    row, column = np.arange(rows)[:, None], np.arange(columns)
    tile = row // 128 * _tiles(rows, columns)[1] + column // 4
    return numbers.reshape(-1)[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4]


def _repeated(item: Packed, numbers: np.ndarray) -> np.ndarray:
    """Return one number per block as an array that broadcasts to the weight."""
    result = _in_rows(item, numbers) if item.is_tiled else numbers.reshape(item.grid)
    for axis, (n, count, block) in enumerate(zip(item.shape, item.grid, item.blocks, strict=True)):
        if 1 < count < n:
            result = np.repeat(result, block, axis)[(slice(None),) * axis + (slice(n),)]
    return result
