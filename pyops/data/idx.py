"""Files in idx form, as MNIST comes in: a big-endian header of magic number and sizes, then unsigned bytes.

Magic number 2051 (0x0803) heads images, 2049 (0x0801) labels: 8 is the code of unsigned bytes, 3 and 1 the count of
sizes that follow.  Format: http://yann.lecun.com/exdb/mnist/.
"""
import gzip
import struct
import zlib
from functools import partial
from math import prod

import numpy as np

from pyops.errors import UserError

IMAGES_MAGIC, LABELS_MAGIC = 2051, 2049
_KINDS = {IMAGES_MAGIC: 'images', LABELS_MAGIC: 'labels'}
_GZIP_MAGIC = b'\x1f\x8b'
_GZIP_WBITS = 31                    # zlib's number for: a gzip header before the stream, its CRC-32 after it
# What a piece of this size inflates to still lies in the cache when it is copied to its place.  One call for the whole
# file takes longer: it writes to memory that the system has yet to hand out, and its buffer must be copied once more.
_CHUNK = 1 << 16
_MAX_RATIO = 1032                   # no deflate stream grows by more: 258 bytes for two bits


def read(path, magic=None):
    """Return the array in an idx file: images uint8 (N, rows, columns) or labels uint8 (N,).

    Whether the file is gzipped is seen from its first bytes, not from its name.  `magic` is the magic number that it
    must have, either of the two if None.
    UserError if the file is missing or cannot be read, has another magic number, holds fewer or more bytes than its
    header counts, or is a gzip file that is cut short or spoiled.
    """
    try:
        with open(path, 'rb') as stream:
            gzipped = stream.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            size = stream.seek(0, 2) * (_MAX_RATIO if gzipped else 1)       # bytes that it holds at most
            stream.seek(0)
            chunks = iter(partial(stream.read, _CHUNK), b'')
            return _parse(_inflate(chunks, path) if gzipped else chunks, size, path, magic)
    except FileNotFoundError as error:
        raise UserError(f'{path}: no such file; want an idx file, gzipped or not; give another path') from error
    except OSError as error:
        raise UserError(f'{path}: cannot be read ({error.strerror or error}); want an idx file, gzipped or not; '
                        'give another path') from error


def write(path, array):
    """Write uint8 images (N, rows, columns) or labels (N,) as an idx file, gzipped if `path` ends in .gz."""
    magic = {3: IMAGES_MAGIC, 1: LABELS_MAGIC}.get(array.ndim)
    if magic is None or array.dtype != np.uint8:
        raise ValueError(f'want uint8 (N, rows, columns) or (N,), got {array.dtype} {array.shape}')
    content = struct.pack(f'>{1 + array.ndim}I', magic, *array.shape) + array.tobytes()
    with open(path, 'wb') as stream:
        stream.write(gzip.compress(content, mtime=0) if str(path).endswith('.gz') else content)


def _inflate(chunks, path):
    """Yield what gzipped chunks hold."""
    inflate = zlib.decompressobj(_GZIP_WBITS)
    streams = 0
    try:
        for chunk in chunks:
            while chunk:
                if inflate.eof:                             # a gzip file may be several streams in a row
                    inflate, streams = zlib.decompressobj(_GZIP_WBITS), streams + 1
                yield inflate.decompress(chunk)
                chunk = inflate.unused_data
    except zlib.error as error:
        what = 'trailing bytes after the end of the gzip stream' if streams else f'the gzip stream is spoiled ({error})'
        raise UserError(f'{path}: {what}; want a whole idx file; get the file again') from error
    if not inflate.eof:
        raise UserError(f'{path}: the gzip stream is cut short; want a whole idx file; get the file again')


def _parse(chunks, limit, path, magic):
    """The array of an idx file whose bytes come in `chunks`, `limit` bytes at most."""
    head = _gather(chunks, b'', 4)
    found = int.from_bytes(head[:4], 'big') if len(head) >= 4 else None
    if found not in _KINDS or magic not in (None, found):
        wanted = ' or '.join(f'{number} ({kind})' for number, kind in _KINDS.items() if magic in (None, number))
        raise UserError(f'{path}: magic number {"missing" if found is None else found}, want {wanted}; '
                        'give the idx file itself, gzipped or not')
    dims = found % 256
    start = 4 + 4 * dims
    head = _gather(chunks, head, start)
    if len(head) < start:
        raise _wrong_size(path, f'its header has {len(head)} bytes, want {start}')
    shape = struct.unpack_from(f'>{dims}I', head, 4)
    size = prod(shape)
    counted = f'{" x ".join(map(str, shape))} {_KINDS[found]} are {size} bytes after the header'
    if size > limit:                                        # before memory is asked for
        raise _wrong_size(path, f'{counted}, but it is cut short: it holds {limit} at most')
    array = np.empty(size, np.uint8)
    have, chunk = 0, head[start:]
    while True:
        end = have + len(chunk)
        if end > size:
            raise _wrong_size(path, f'{counted}, but trailing bytes follow')
        array[have:end] = np.frombuffer(chunk, np.uint8)
        have, chunk = end, next(chunks, None)
        if chunk is None:
            break
    if have < size:
        raise _wrong_size(path, f'{counted}, but it is cut short after {have}')
    return array.reshape(shape)


def _gather(chunks, head, size):
    """`head` and what follows it in `chunks`, up to `size` bytes or more if there are so many."""
    while len(head) < size and (chunk := next(chunks, None)) is not None:
        head += chunk
    return head


def _wrong_size(path, what):
    return UserError(f'{path}: the counts do not match the size: {what}; get the file again')
