"""One kernel call in a file: its arguments and the memory of its arrays.  `python -m pyops replay FILE` runs it again.

The file is safetensors: a tensor for each range of memory that an array occupies, so that strides and arrays that share memory
are kept; the call is in the metadata, as JSON.
"""
from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops import backend
from pyops.backend import library, location
from pyops.backend.device import DTYPES, HOST_ARGUMENTS
from pyops.errors import UserError, printable
from pyops.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyops.backend.library import Argument
    from pyops.plan import Action, Plan
    from pyops.typing import PathLike

FORMAT, VERSION = 'pyops action', 1
WORKSPACE = 'work'              # an argument whose content before the call has no meaning
_ITEM = {'bfloat16': 2} | {dtype.name: dtype.itemsize for dtype in DTYPES.values()}     # bytes of an element
_MOST = 1 << 47                 # bytes of a range, and elements of an array: no machine has more memory


class Memory(NamedTuple):
    """The array arguments of a call, {name: {'range', 'offset', 'shape', 'dtype', 'strides'}}, and the ranges of memory that
    they occupy: arrays of bytes, or numbers of bytes for workspaces.   offset, strides: in bytes"""
    arrays: dict[str, dict[str, Any]]
    ranges: list[np.ndarray | int]


def memory_of(plan: Plan, action: Action) -> Memory:
    """Return a copy of the memory of an action's arrays, as it is now."""
    device, places = backend.current_device(), []
    for name in action.tensors:
        array = plan.argument(action, name)
        strides = backend.byte_strides(array)
        nbytes = 0 if 0 in array.shape else array.dtype.itemsize + sum(
            (n - 1) * step for n, step in zip(array.shape, strides, strict=True))
        places.append((location(array), nbytes, name, array, strides))
    arrays, ranges, end = {}, [], -1
    for start, nbytes, name, array, strides in sorted(places, key=lambda place: place[:2]):
        if start >= end:                                # else it shares memory with the array before
            first, end = start, start
            ranges.append([start, 0, True])
        end = max(end, start + nbytes)
        ranges[-1][1], ranges[-1][2] = end - first, ranges[-1][2] and name == WORKSPACE
        arrays[name] = {'range': len(ranges) - 1, 'offset': start - first, 'shape': list(array.shape),
                        'dtype': backend.dtype_name(array.dtype), 'strides': list(strides)}
    return Memory(arrays, [nbytes if is_work else device.read(start, nbytes) for start, nbytes, is_work in ranges])


def save(path: Path, action: Action, memory: Memory, about: dict[str, Any]) -> Path:
    """Write a call to a file and return its path.   about: facts for the reader, JSON"""
    from safetensors.numpy import save as serialize
    arguments = library.cpu().functions[f'pyops_{action.kernel}'].arguments
    values = [{'host': value.tolist()} if a.name in HOST_ARGUMENTS else None if a.pointer and value is None
              else {'array': a.name} if a.pointer else value.item() if hasattr(value, 'item') else value
              for a, value in zip(arguments, action.values, strict=False)]
    call = {'kernel': action.kernel, 'values': values, 'arrays': memory.arrays,
            'ranges': [part if isinstance(part, int) else part.nbytes for part in memory.ranges],
            'device': repr(backend.current_device()), 'isa': backend.isa(), 'about': about}
    tensors = {str(i): part for i, part in enumerate(memory.ranges) if not isinstance(part, int)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, serialize(tensors, {'format': FORMAT, 'version': str(VERSION), 'call': json.dumps(call)}))
    except OSError as error:
        raise UserError(f'{path}: cannot save the inputs of {action.kernel} ({error.strerror}); make room, or train without '
                        '--check-finite') from error
    return path


def load(path: PathLike) -> tuple[dict[str, Any], list[np.ndarray | int]]:
    """Return the call in a file, and its ranges of memory.   UserError for any other file, and if an array exceeds its range"""
    from safetensors import SafetensorError, safe_open
    try:
        with safe_open(path, 'numpy') as file:
            metadata = file.metadata() or {}
            if metadata.get('format') != FORMAT:
                raise UserError(f'{path}: expected a file of --check-finite, got another file of tensors')
            if metadata.get('version') != str(VERSION):
                raise UserError(f'{path}: format version {printable(metadata.get("version"))[:20]}, and this program reads '
                                f'{VERSION}; update pyops')
            call = json.loads(metadata['call'])
            _require(isinstance(call, dict) and _is_list(call.get('ranges'), lambda size: _is_count(size)), 'ranges')
            names = set(file.keys())
            ranges = [file.get_tensor(str(i)) if str(i) in names else size for i, size in enumerate(call['ranges'])]
        _check(call, ranges)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f'{path}: cannot be read ({printable(error)[:200]}); expected a file that --check-finite saved') \
            from error
    return call, ranges


def _check(call: dict[str, Any], ranges: list[np.ndarray | int]) -> None:
    """Raise ValueError unless a call has the structure that `save` writes, and its arrays are within their ranges."""
    _require(isinstance(call.get('kernel'), str) and isinstance(call.get('about'), dict), 'kernel')
    _require(isinstance(call.get('device'), str) and isinstance(call.get('isa'), str), 'device')
    for size, part in zip(call['ranges'], ranges, strict=True):
        _require(isinstance(part, int) or part.dtype == np.uint8 and part.shape == (size,), 'ranges')
    arrays = call.get('arrays')
    _require(isinstance(arrays, dict), 'arrays')
    for name, place in arrays.items():
        _require(isinstance(place, dict) and _is_within(place, call['ranges']), f'array {name}')
    _require(_is_list(call.get('values'), lambda value: _is_value(value, arrays)), 'values')


def _require(condition: bool, name: str) -> None:
    if not condition:
        raise ValueError(f'damaged: {name}')


def _is_list(value: Any, check: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(check, value))


def _is_count(value: Any, most: int = _MOST) -> bool:
    return type(value) is int and 0 <= value < most


def _is_within(place: dict[str, Any], sizes: list[int]) -> bool:
    """Return whether the place of an array has all its facts, and its elements are in a range."""
    number, offset, shape, strides = (place.get(key) for key in ('range', 'offset', 'shape', 'strides'))
    item = _ITEM.get(str(place.get('dtype')))
    if not (item and _is_count(number, len(sizes)) and _is_count(offset) and offset % item == 0 and _is_list(shape, _is_count)
            and _is_list(strides, lambda step: type(step) is int and abs(step) < _MOST and step % item == 0)
            and len(shape) == len(strides) and math.prod(filter(None, shape)) < _MOST):
        return False
    ends = [(n - 1) * step for n, step in zip(shape, strides, strict=True)]
    first, last = offset + sum(min(end, 0) for end in ends), offset + sum(max(end, 0) for end in ends)
    return 0 in shape and offset <= sizes[number] or 0 <= first and last + item <= sizes[number]


def _is_value(value: Any, arrays: dict[str, Any]) -> bool:
    if isinstance(value, dict):
        is_host = _is_list(value.get('host'), lambda number: type(number) is int and -1 << 63 <= number < 1 << 63)
        return is_host if 'host' in value else isinstance(value.get('array'), str) and value['array'] in arrays
    return value is None or isinstance(value, float) or isinstance(value, int) and -1 << 63 <= value < 1 << 64


def _takes(argument: Argument, value: Any, arrays: dict[str, Any]) -> bool:
    """Return whether a checked value is one for an argument of a kernel."""
    if not argument.pointer:
        return isinstance(value, int) or argument.type == 'float' and isinstance(value, float)
    if not isinstance(value, dict):
        return value is None
    if ('host' in value) or (argument.name in HOST_ARGUMENTS):
        return 'host' in value and argument.name in HOST_ARGUMENTS
    dtype = arrays[value['array']]['dtype']
    return bool(dtype == DTYPES[argument.type].name or argument.real and dtype == 'bfloat16')


def replay(path: PathLike) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Run the call in a file on the current device.  Return the call, its input arrays and its results, by argument name.

    UserError if this version has no such kernel or the kernel refuses the arguments.
    """
    call, ranges = load(path)
    known = library.cpu().functions.get(f'pyops_{call["kernel"]}')
    if known is None or len(known.arguments) != len(call['values']) + 1 or known.arguments[-1].name != 'stream':
        raise UserError(f'{path}: this version has no kernel {printable(call["kernel"])[:100]} with {len(call["values"])} '
                        'arguments; use the version that saved it')
    for argument, value in zip(known.arguments, call['values'], strict=False):
        if not _takes(argument, value, call['arrays']):
            raise UserError(f'{path}: the value of {argument.name} does not suit the kernel {call["kernel"]} of this version; '
                            'use the version that saved it')
    device = backend.current_device()
    memory = [device.buffer_of(np.zeros(part, np.uint8) if isinstance(part, int) else part) for part in ranges]
    host, values = [], []
    for value in call['values']:
        if not isinstance(value, dict):
            values.append(0 if value is None else value)
        elif 'host' in value:
            host.append(np.array(value['host'], np.int64))
            values.append(location(host[-1]))
        else:
            place = call['arrays'][value['array']]
            values.append(device.tagged(memory[place['range']].address + place['offset'], _dtype(path, place)))
    inputs = {a.name: _array(path, device, memory, call['arrays'][a.name]) for a in known.arguments
              if a.const and a.name in call['arrays']}
    try:
        device.calls([(call['kernel'], values)]).run()
    except (ValueError, RuntimeError) as error:
        raise UserError(f'{path}: {error}') from error
    return call, inputs, {a.name: _array(path, device, memory, call['arrays'][a.name]) for a in known.arguments
                          if not a.const and a.name in call['arrays'] and a.name != WORKSPACE}


def _dtype(path, place):
    if place['dtype'] == 'bfloat16' and backend.current_device().is_host:
        raise UserError(f'{path}: has bfloat16 arrays, which only a GPU takes; set PYOPS_BACKEND=gpu')
    return backend.BF16 if place['dtype'] == 'bfloat16' else np.dtype(place['dtype'])


def _array(path, device, memory, place):
    """Return a numpy array with the elements of an argument."""
    dtype, shape = _dtype(path, place), tuple(place['shape'])
    if 0 in shape:
        return np.empty(shape, np.float32)
    buffer = memory[place['range']]
    return np.array(backend.get(device.view(buffer, buffer.address + place['offset'], shape, dtype, tuple(place['strides']))))


# ---- python -m pyops replay ------------------------------------------------------------------------------------------

def run(options):
    """Print the arrays of the call.  Return the exit status: 1 if a result is not finite, else 0."""
    import pyops.ndarray  # noqa: F401      with PYOPS_BACKEND=gpu the import selects the GPU
    call, inputs, results = replay(options.file)
    about = call['about']
    print(printable(f'{about.get("layer", call["kernel"])}: kernel {call["kernel"]}, step {about.get("step", "unknown")}; '
                    f'saved on {call["device"]}, {call["isa"]}; now {backend.current_device()!r}, {backend.isa()}'))
    for line in about.get('batch') or ():
        print(f'  {printable(line)}')
    sizes = [(a.name, value) for a, value in zip(library.cpu().functions[f'pyops_{call["kernel"]}'].arguments, call['values'],
                                                 strict=False) if not a.pointer]
    print('  sizes   ' + ' '.join(f'{name}={value:g}' for name, value in sizes))
    for kind, arrays in (('input', inputs), ('result', results)):
        for name, array in arrays.items():
            print(f'  {kind:7} {name} {array.shape} {describe(array)}')
    return int(not all(np.isfinite(array).all() for array in results.values()))


def describe(array):
    """Return text about the values of an array: how many are not finite, the first of them, and the largest finite one."""
    if not array.size:
        return 'empty'
    finite = np.isfinite(array)
    largest = f'largest magnitude {np.abs(array[finite]).astype(np.float64).max():.6g}' if finite.any() else 'no finite value'
    if finite.all():
        return largest
    first = np.unravel_index(int(np.argmin(finite)), array.shape)
    return (f'{array.size - int(finite.sum())} of {array.size} values are not finite, the first is {array[first]} at '
            f'{list(map(int, first))}; {largest}')
