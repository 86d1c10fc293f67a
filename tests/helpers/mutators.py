"""Random changes of inputs for fuzzing: of bytes, of words, and of the structure of a file format.

A mutator takes a random.Random and the bytes of an input, and returns other bytes.  A structured mutator raises an exception
for an input that no longer has its format; `any_of` then changes bytes.
"""
import ast
import bz2
import contextlib
import functools
import gzip
import io
import json
import lzma
import pickletools
import re
import warnings
import zipfile

LARGEST = 1 << 15           # bytes of an input
SIZES = (0, 1, 2, 7, 255, 256, 32767, 65535, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 53) - 1, 1 << 53,
         1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
TEXTS = ('', ' ', 'a', '0', '-1', '1e999', 'nan', 'None', 'a' * 300, '../a', '/', '.', '\0', '\x1b[2J', '\ud800', '\u2028',
         '\ufb01', '9' * 30, '%s', '{}', 'true')
VALUES = (None, True, False, 0.5, -0.0, 1e308, float('inf'), float('nan'), -1, -(1 << 63), 10 ** 400, [], {}, [[]], [0],
          {'a': 0}, *SIZES, *TEXTS)
OPCODES = b'()]}.0NtRqhbsuaQ\x85\x86\x87\x88\x89\x8a\x8c\x93\x94cXKMJI'
_cached = functools.lru_cache(128)     # the same input is changed many times


def any_of(*mutators):
    """Return a mutator that uses one of these at random, and sometimes changes bytes."""
    def mutate(rng, data):
        if rng.random() < 0.85:
            with contextlib.suppress(Exception):            # the input is too damaged for its format
                return rng.choice(mutators)(rng, data)
        return changed_bytes(rng, data)
    return mutate


# ---- bytes and words ---------------------------------------------------------------------------------------------------

def _span(rng, length):
    start = rng.randrange(length + 1)
    return start, min(length, start + rng.choice((1, 1, 2, 4, 8, 16, 64)))


def changed_bytes(rng, data):
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        (first, end), kind = _span(rng, len(data)), rng.randrange(7)
        if kind == 0 and data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[first:end]
        elif kind == 2:
            data[first:first] = data[first:end] * rng.choice((1, 2, 20))
        elif kind == 3:
            data[first:first] = rng.randbytes(rng.choice((1, 2, 8)))
        elif kind == 4:
            del data[first:]
        elif kind == 5:
            count = rng.choice((1, 2, 4, 8))
            number = rng.choice(SIZES) % (1 << 8 * count)
            data[first:first + count] = number.to_bytes(count, rng.choice(('little', 'big')))
        else:
            place = rng.randrange(len(data) + 1)
            data[place:place] = data[first:end]
    return bytes(data)


@_cached
def _parts(data):
    return re.findall(r'\w+|\s+|.', data.decode(errors='surrogateescape'), re.S)


def words(*dictionary):
    """Return a mutator of texts: words and marks are removed, repeated, exchanged and replaced, also by these words."""
    def mutate(rng, data):
        parts = list(_parts(data))
        for _ in range(rng.choice((1, 1, 2, 3))):
            place, kind = rng.randrange(len(parts) + 1), rng.randrange(6)
            if kind == 0:
                del parts[place:place + rng.choice((1, 2, 5))]
            elif kind == 1 and parts:
                parts.insert(place, rng.choice(parts))
            elif kind == 2 and parts:
                parts[place % len(parts)] = rng.choice(parts)
            elif kind == 3:
                parts.insert(place, rng.choice((*dictionary, *TEXTS)))
            elif kind == 4 and parts:
                parts[place % len(parts)] = rng.choice((*dictionary, *TEXTS))
            else:
                parts.insert(place, rng.choice('([{"\\,:;=.-@#&<>*\n\t\0') * rng.choice((1, 1, 2, 5000)))
        return ''.join(parts).encode(errors='surrogatepass')
    return mutate


# ---- JSON ---------------------------------------------------------------------------------------------------------------

def changed_value(rng, value):
    """Return a JSON value with one change at a random place.  The value itself stays as it is."""
    place, path = value, []
    while isinstance(place, (dict, list)) and place and rng.random() < 0.85:
        path.append(rng.choice(list(place) if isinstance(place, dict) else range(len(place))))
        place = place[path[-1]]
    if not path:
        return rng.choice(VALUES)
    *before, last = path
    parent = value = value.copy()               # of the others, only those on the way are copied
    for key in before:
        parent[key] = parent = parent[key].copy()
    kind = rng.randrange(7)
    if kind == 0:
        del parent[last]
    elif kind == 1 and isinstance(parent, list):
        parent.insert(rng.randrange(len(parent) + 1), place)
    elif kind == 1:
        parent[str(rng.choice(TEXTS))] = parent.pop(last)
    elif kind == 2 and isinstance(place, (int, float)):
        parent[last] = rng.choice((place + 1, place - 1, -place, place * 2, place + 0.5, str(place), [place]))
    elif kind == 3:
        parent[last] = rng.choice(([place], {'a': place}, str(place)))
    elif kind == 4:
        parent[last] = rng.choice(list(parent.values() if isinstance(parent, dict) else parent))
    else:
        parent[last] = rng.choice(VALUES)
    return value


_loaded = _cached(json.loads)


def changed_json(rng, data):
    return json.dumps(changed_value(rng, _loaded(data))).encode()


def changed_lines(rng, data):
    """Change a line of JSON, or the order of the lines."""
    lines = data.split(b'\n')
    place, kind = rng.randrange(len(lines)), rng.randrange(8)
    if kind == 0:
        del lines[place]
    elif kind == 1:
        lines.insert(rng.randrange(len(lines) + 1), lines[place])
    elif kind == 2:
        lines[place] = changed_bytes(rng, lines[place])
    elif kind == 3:
        lines[place] = words()(rng, lines[place])
    else:
        lines[place] = changed_json(rng, lines[place])
    return b'\n'.join(lines)


# ---- files of tensors --------------------------------------------------------------------------------------------------

def safetensors_parts(data):
    """Return the header of a safetensors file and the bytes after it."""
    end = 8 + int.from_bytes(data[:8], 'little')
    return _loaded(data[8:end]).copy(), data[end:]


def safetensors_file(header, rest):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, 'little') + text + rest


def changed_safetensors(rng, data, sign=lambda header, rest: None, texts=()):
    """Change the header, or a text of JSON in its metadata, or the data.   sign(header, rest): makes checksums right again
    texts: names of such metadata"""
    header, rest = safetensors_parts(data)
    kind = rng.randrange(8)
    metadata = header.get('__metadata__', {})
    known = [name for name in texts if name in metadata]
    if kind < 3 and known:
        name = rng.choice(known)
        header['__metadata__'] = metadata | {name: changed_json(rng, metadata[name]).decode()}
    elif kind == 3:
        rest = changed_bytes(rng, rest)
    elif kind == 4:
        text = words()(rng, json.dumps(header).encode())
        return len(text).to_bytes(8, 'little') + text + rest
    elif kind == 5 and metadata:
        header['__metadata__'] = changed_value(rng, metadata)
    else:
        header = changed_value(rng, header)
    if rng.random() < 0.8:
        with contextlib.suppress(Exception):                # a header that is too damaged stays as it is
            sign(header, rest)
    return safetensors_file(header, rest)


_DTYPES = '<f4', '>f8', '|O', '<U99999', '<f2', '<c8', 'b1', '|V16', 'M8[s]', [('a', '<f4')]


def changed_npy(rng, data):
    """Change the text of the header, and mend its length."""
    end = 10 + int.from_bytes(data[8:10], 'little')
    fields = ast.literal_eval(data[10:end].decode())
    kind = rng.randrange(3)
    if kind == 0:
        text = words('descr', 'shape', 'fortran_order', '<f4', '|O', '<U9', '(', ',')(rng, data[10:end])
    else:
        name = rng.choice(list(fields))
        if kind == 1:
            fields[name] = rng.choice((*_DTYPES, *VALUES))
        else:
            fields['shape'] = tuple(changed_value(rng, [*fields['shape']]) or ())
        text = repr(fields).encode(errors='replace') + b'\n'
    return data[:8] + (len(text) % 65536).to_bytes(2, 'little') + text + data[end:]


@_cached
def _opcodes(data):
    """Return the opcodes of pickles that follow each other, and the bytes after them."""
    file, starts = io.BytesIO(data), []
    with contextlib.suppress(Exception):
        while True:
            starts += [position for _, _, position in pickletools.genops(file)]
    ops = [data[first:end] for first, end in zip(starts, [*starts[1:], file.tell()], strict=True)]
    return [*ops[:-1], ops[-1][:1]], data[starts[-1] + 1:]


def changed_pickle(rng, data):
    """Change opcodes of pickles that follow each other, and keep what follows them."""
    ops, rest = _opcodes(data)
    ops = list(ops)
    for _ in range(rng.choice((1, 1, 2))):
        place, kind = rng.randrange(len(ops)), rng.randrange(6)
        if kind == 0:
            del ops[place]
        elif kind == 1:
            ops.insert(place, rng.choice(ops))
        elif kind == 2:
            ops[place] = rng.choice(ops)
        elif kind == 3:
            ops.insert(place, bytes([rng.choice(OPCODES)]))
        elif kind == 4:
            number = rng.choice(SIZES)
            ops[place] = b'\x8a\x09' + number.to_bytes(9, 'little')
        else:
            ops[place] = ops[place][:1] + changed_bytes(rng, ops[place][1:])
    return b''.join(ops) + rest


# ---- archives ----------------------------------------------------------------------------------------------------------

@_cached
def _members(data):
    """Return how the first member of a zip is packed, and all members as (name, content)."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.infolist()[0].compress_type, [(info.filename, archive.read(info)) for info in archive.infolist()]


def in_zip(*mutators):
    """Return a mutator of the members of a zip, whose checksums become right again."""
    change = any_of(*mutators)

    def mutate(rng, data):
        kind, members = _members(data)
        members = list(members)
        place, action = rng.randrange(len(members)), rng.randrange(8)
        name, content = members[place]
        if action == 0:
            del members[place]
        elif action == 1:
            members.append((name + rng.choice(('', 'x', '.txt')), content))
        elif action == 2:
            members[place] = words()(rng, name.encode()).decode(errors='replace').replace('\0', ''), content
        else:
            members[place] = name, change(rng, content)
        out = io.BytesIO()
        with warnings.catch_warnings(action='ignore'), \
                zipfile.ZipFile(out, 'w', kind if rng.random() < 0.9 else zipfile.ZIP_DEFLATED) as archive:
            for name, content in members:
                archive.writestr(zipfile.ZipInfo(name), content, archive.compression)
        return out.getvalue()
    return mutate


_PACKERS = {        # compression is quick: at the usual levels it would take most of the time of an input
    b'\x1f\x8b': (gzip.decompress, functools.partial(gzip.compress, compresslevel=1, mtime=0)),
    b'BZh': (bz2.decompress, functools.partial(bz2.compress, compresslevel=1)),
    b'\xfd7zXZ': (lzma.decompress, functools.partial(lzma.compress, preset=0))}


def unpacked(*mutators):
    """Return a mutator of the content of a gzip, bz2 or xz file, or of a file that is none of these."""
    change = any_of(*mutators)

    def mutate(rng, data):
        unpack, pack = next((both for magic, both in _PACKERS.items() if data.startswith(magic)), (bytes, bytes))
        return pack(change(rng, unpack(data)))
    return mutate


# ---- folders ------------------------------------------------------------------------------------------------------------

def folder_bytes(files):
    """Return the files of a folder, {name: bytes}, as one input."""
    names = sorted(files)
    head = json.dumps([[name, len(files[name])] for name in names]).encode()
    return head + b'\n' + b''.join(files[name] for name in names)


def folder_files(data):
    """Return the files of an input; of a damaged one, what can be read.  All names stay in the folder."""
    head, _, rest = data.partition(b'\n')
    files = {}
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        for name, size in json.loads(head):
            files[re.sub(r'[^\w.-]', '_', str(name))[:100] or '_'], rest = rest[:size], rest[size:]
    return {name: content for name, content in files.items() if name.strip('.')}


def in_folder(mutators):
    """Return a mutator of one file of a folder.   mutators: {end of its name: mutator}"""
    def mutate(rng, data):
        files = folder_files(data)
        name = rng.choice(sorted(files))
        if rng.random() < 0.03:
            del files[name]
        else:
            files[name] = next(change for end, change in mutators.items() if name.endswith(end))(rng, files[name])
        return folder_bytes(files)
    return mutate
