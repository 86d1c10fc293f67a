"""Write the kernel calls of the op table to a file, which tests/backend/run_calls.c runs on another build of the CPU library.

    PYOPS_ISA=generic python tests/helpers/recorded_calls.py build/aarch64/calls

The file has a record for each call.  Every number is an int64, and bytes are padded to a multiple of 8:

    name        its number of bytes, the bytes
    memory      the number of ranges; of each its number of bytes, whether it has contents, and its contents before the call
    arguments   their number; of each a kind (INTEGER, REAL, NULL, ARRAY) and two numbers: the value and 0, for REAL the bits of
                a float and 0, for ARRAY the range and the offset in bytes
    results     their number; of each the range, the offset, the type of the elements (EXACT, FLOAT, DOUBLE), their size in
                bytes, the number of axes, the shape, the strides in bytes, and the expected elements in C order

A result is written over numbers that the op table did not compute: a kernel that writes nothing fails.
"""
import struct
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
INTEGER, REAL, NULL, ARRAY = range(4)
EXACT, FLOAT, DOUBLE = range(3)
LARGEST = 1 << 18           # bytes of memory of a call


def numbers(*values):
    return struct.pack(f'<{len(values)}q', *values)


def padded(content):
    return content + bytes(-len(content) % 8)


def calls_of(plan):
    """Yield (name of the kernel, record) for the calls of a recorded plan, which runs once more."""
    from pyops import backend
    from pyops.action_file import memory_of
    from pyops.backend import library
    from pyops.backend.device import HOST_ARGUMENTS
    rng = np.random.default_rng(0)
    for i, action in enumerate(plan.replayed):
        arguments = library.cpu().functions[f'pyops_{action.kernel}'].arguments
        read = {a.name for a in arguments if a.const and a.name in action.tensors}
        before = memory_of(plan, action)
        inputs = {before.arrays[name]['range'] for name in read}
        written = [a.name for a in arguments if a.name in action.tensors and not a.const
                   and not isinstance(before.ranges[before.arrays[a.name]['range']], int)]
        for name in written:
            if before.arrays[name]['range'] not in inputs:
                array = plan.argument(action, name)
                array[...] = rng.standard_normal(array.shape) if array.dtype.kind == 'f' else 1
        before = memory_of(plan, action)
        plan.run(i, i + 1)
        ranges = [(part, None) if isinstance(part, int) else (len(part), part.tobytes()) for part in before.ranges]
        values = []
        for argument, value in zip(arguments, action.values, strict=False):
            if argument.name in HOST_ARGUMENTS:
                values += ARRAY, len(ranges), 0
                ranges.append((8 * len(value), np.array(value.tolist(), np.int64).tobytes()))
            elif not argument.pointer:
                is_real = argument.type == 'float'
                bits = struct.unpack('<i', struct.pack('<f', value))[0] if is_real else (int(value) + 2**63) % 2**64 - 2**63
                values += REAL if is_real else INTEGER, bits, 0
            elif value is None:
                values += NULL, 0, 0
            else:
                place = before.arrays[argument.name]
                values += ARRAY, place['range'], place['offset']
        if sum(size for size, _ in ranges) > LARGEST:
            continue
        name = f'pyops_{action.kernel}'.encode()
        record = numbers(len(name)) + padded(name) + numbers(len(ranges))
        for size, content in ranges:
            record += numbers(size, content is not None) + padded(content or b'')
        record += numbers(len(values) // 3, *values, len(written))
        for result in written:
            array, place = backend.get(plan.argument(action, result)), before.arrays[result]
            kind = {'f4': FLOAT, 'f8': DOUBLE}.get(array.dtype.str[1:], EXACT)
            record += numbers(place['range'], place['offset'], kind, array.dtype.itemsize, array.ndim)
            record += numbers(*place['shape'], *place['strides']) + padded(array.tobytes())
        yield action.kernel, record


def main(path):
    sys.path[:0] = [str(ROOT / 'tests' / name) for name in ('helpers', '')] + [str(ROOT)]
    from rows import EXAMPLES, FIRST, SMALL, Run

    from pyops.plan import Plan
    count, kernels = 0, set()
    with open(path, 'wb') as file:
        for row, size in (parameters.values for parameters in (*SMALL, *FIRST, *EXAMPLES)):
            with Plan() as plan:
                run = Run(row, size)        # keeps its arrays alive
            for kernel, record in calls_of(plan):
                file.write(record)
                kernels.add(kernel)
                count += 1
            del run
    print(f'{count} calls of {len(kernels)} kernels')


if __name__ == '__main__':
    main(*sys.argv[1:])
