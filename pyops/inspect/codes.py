"""The codes and the scales of a tensor in a number format: their statistics, and files with them.

A file is a safetensors file with `codes` in the tensor's shape, `scales` with one element per block and, if the format scales
the whole tensor, `factor`; docs/inspect.md describes them.
"""
from __future__ import annotations

import json
import math
import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops import formats
from pyops.errors import UserError, printable
from pyops.files import write_atomically
from pyops.inspect.logs import LogError
from pyops.inspect.statistics import Blocks, flattened

if TYPE_CHECKING:
    from pyops.formats import Codes, Format
    from pyops.inspect.logs import Entry

_NAN_SCALE = 255                    # in E8M0
_SHOWN = 12                         # octaves of a histogram in a table
_PLACES = {-math.inf: '0', math.inf: 'inf or NaN'}


class CodeStatistics(NamedTuple):
    """codes: {code: count};  scales: {floor(log2(scale)): number of blocks}, empty without scales
    code_std: standard deviation of the numbers that the codes mean, before the scale
    scale_std: standard deviation of log2 of the blocks' scales, in octaves; nan without scales

    Padding, blocks of zeros, whose scale means nothing, and blocks with NaN or infinity are left out of scales and deviations.
    """
    codes: dict[int, int]
    scales: dict[int, int]
    code_std: float
    scale_std: float


def encode(x: Any, fmt: str | Format, axis: int | str = -1) -> Codes:
    """Return x as Codes; axis may be 'tokens', the flattened leading axes.  ValueError as of formats.encode."""
    flat, axis = flattened(x, axis)
    return formats.encode(flat, fmt, axis)


def describe_codes(codes: Codes, x: Any, axis: int | str = -1, mask: np.ndarray | None = None) -> CodeStatistics:
    """Return the CodeStatistics of the Codes of x.   axis, mask: as for statistics.quantization"""
    f = codes.format
    blocks = Blocks(x, f, axis, mask)
    words = np.asarray(codes.codes).reshape(blocks.full)
    words = words.reshape(-1) if blocks.valid is None else words[blocks.valid]
    counts = np.bincount(words, minlength=1 << f.bits)
    histogram = {int(code): int(counts[code]) for code in np.flatnonzero(counts)}
    logs = _log2_scales(codes, blocks)
    binades, blocks_of = np.unique(np.floor(logs), return_counts=True)
    numbers = values(f)
    known = np.isfinite(numbers)
    return CodeStatistics(histogram, dict(zip(map(int, binades), map(int, blocks_of), strict=True)),
                          _deviation(numbers[known], counts[known]), _deviation(logs, np.ones(len(logs), np.int64)))


def _deviation(numbers: np.ndarray, counts: np.ndarray) -> float:
    n = int(counts.sum())
    if not n:
        return math.nan
    mean = float(numbers @ counts) / n
    return math.sqrt(float((numbers - mean) ** 2 @ counts) / n)


def values(f: Format) -> np.ndarray:
    """Return the number of each code with the scale 1, float64."""
    one = formats.encode(np.zeros(1 << f.bits, np.float32), f.without_hadamard if f.hadamard else f)
    codes: Any = np.arange(1 << f.bits)
    scales, factor = one.scales, one.factor
    if scales is not None:
        scales = np.full_like(np.asarray(scales), 127 if f.is_block else 1)
    plain = one._replace(codes=codes, scales=scales, factor=None if factor is None else np.ones(1, np.float32))
    return np.asarray(formats.decode(plain), np.float64)


def _log2_scales(codes: Codes, blocks: Blocks) -> np.ndarray:
    """Return log2 of the scales of the blocks that have one: finite, with a number that is no padding and not 0."""
    f, scales = codes.format, codes.scales
    if scales is None or not blocks.x.size:
        return np.zeros(0)
    if f.is_block:
        outer, rows, columns, down, across = *blocks.full, f.block, 1
    else:
        outer, rows, columns, down, across = f.grid(np.shape(codes.codes), codes.axis)
    used = blocks.x != 0 if blocks.valid is None else (blocks.x != 0) & blocks.valid
    used = np.logical_or.reduceat(used.reshape(outer, rows, columns), np.arange(0, rows, down), axis=1)
    used = np.logical_or.reduceat(used, np.arange(0, columns, across), axis=2)
    kept = np.asarray(scales).reshape(used.shape)[used]
    if f.is_block:
        return kept[kept != _NAN_SCALE].astype(np.float64) - 127
    numbers = kept.astype(np.float64)
    if codes.factor is not None:
        numbers = numbers / float(np.asarray(codes.factor)[0])
    return np.log2(numbers[np.isfinite(numbers) & (numbers > 0)])


def file_name(entry: Entry, fmt: Format) -> str:
    """Return the name of the file for an entry in a format."""
    return f'{entry.stem}.{re.sub("[^A-Za-z0-9_.-]", "_", str(fmt))}.safetensors'


def save(folder: str, entry: Entry, codes: Codes, axis: int | str) -> str:
    """Write the file of an entry's Codes to a folder that exists, and return its path.   axis: as in the metadata

    OSError if it cannot be written.
    """
    f = codes.format
    arrays = {'codes': (np.asarray(codes.codes).reshape(entry.shape), 'U8' if f.bits <= 8 else 'U16')}
    if codes.scales is not None:
        arrays['scales'] = np.asarray(codes.scales), 'F8_E8M0' if f.is_block else 'F32'
    if codes.factor is not None:
        arrays['factor'] = np.asarray(codes.factor), 'F32'
    header: dict[str, Any] = {'__metadata__': {'codes': json.dumps({
        'format': str(f), 'axis': axis, 'file': entry.relative_path, 'key': entry.key, 'layer': entry.layer,
        'operation': entry.operation, 'name': entry.name, 'step': entry.step})}}
    at, parts = 0, []
    for name, (array, dtype) in sorted(arrays.items(), key=lambda item: -item[1][0].itemsize):      # floats stay aligned
        header[name] = {'dtype': dtype, 'shape': array.shape, 'data_offsets': [at, at + array.nbytes]}
        at += array.nbytes
        parts.append(np.ascontiguousarray(array).astype(array.dtype.newbyteorder('<'), copy=False))
    text = json.dumps(header).encode()
    text += b' ' * (-len(text) % 8)
    path = os.path.join(folder, file_name(entry, f))
    write_atomically(path, len(text).to_bytes(8, 'little') + text, *parts)
    return path


def shares(f: Format, histograms: list[dict[int, int]], of_codes: bool) -> str:
    """Return the summed histograms of codes or of scales as text, such as '2^-9 25.0, 2^-8 75.0': percent by octave.

    Codes count by the numbers that they mean.  Beyond twelve octaves the rarest are summed as `others`.
    """
    total: dict[float, int] = {}
    numbers = values(f) if of_codes else np.zeros(0)
    for histogram in histograms:
        for key, count in histogram.items():
            place: float = key
            if of_codes:
                size = abs(float(numbers[key]))
                place = -math.inf if size == 0 else math.frexp(size)[1] - 1 if math.isfinite(size) else math.inf
            total[place] = total.get(place, 0) + count
    count = sum(total.values())
    shown = sorted(sorted(total, key=lambda place: -total[place])[:_SHOWN])
    parts = [f'{_PLACES.get(place) or f"2^{place:.0f}"} {100 * total[place] / count:.1f}' for place in shown]
    rest = count - sum(total[place] for place in shown)
    return ', '.join([*parts, f'others {100 * rest / count:.1f}'] if rest else parts)


class Folder:
    """The folder of --save-codes.  add(entry, format, axis, x, mask) writes a file and returns CodeStatistics.

    UserError if it is in the dump, whose reader would take the files for saved tensors, or cannot be written.
    """

    def __init__(self, path: str, logs: str) -> None:
        self.path, inside = path, os.path.realpath(path)
        if os.path.commonpath([inside, os.path.realpath(logs)]) == os.path.realpath(logs):
            raise UserError(f'--save-codes {printable(path)}: is in the folder of saved tensors, whose readers would take '
                            'codes for tensors; name another folder')
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise self._failed(error) from error

    def add(self, entry: Entry, fmt: Format, axis: int | str, x: np.ndarray, mask: np.ndarray | None) -> CodeStatistics:
        try:
            codes = encode(x, fmt, axis)
        except ValueError as error:
            raise LogError(f'{printable(entry.relative_path)}: {error}') from error
        try:
            save(self.path, entry, codes, axis)
        except OSError as error:
            raise self._failed(error) from error
        return describe_codes(codes, x, axis, mask)

    def _failed(self, error: OSError) -> UserError:
        return UserError(f'--save-codes {printable(self.path)}: cannot be written ({error.strerror or error}); name another '
                         'folder')
