"""Files in idx form, as MNIST comes in: a big-endian header of magic number and sizes, then unsigned bytes.

Magic number 2051 (0x0803) heads images, 2049 (0x0801) labels: 8 is the code of unsigned bytes, 3 and 1 the count of
sizes that follow.  Format: http://yann.lecun.com/exdb/mnist/.
"""
import contextlib
import mmap
import struct
import zlib
from functools import partial
from math import prod

from pyops import cache
from pyops.errors import UserError

IMAGES_MAGIC, LABELS_MAGIC = 2051, 2049
_KINDS = {IMAGES_MAGIC: 'images', LABELS_MAGIC: 'labels'}
_MAGIC = {3: IMAGES_MAGIC, 1: LABELS_MAGIC}         # by the count of sizes
_GZIP_MAGIC = b'\x1f\x8b'
_GZIP_WBITS = 31                    # zlib's number for: a gzip header before the stream, its CRC-32 after it
# What a piece of this size inflates to still lies in the cache when it is copied to its place.  A smaller one is inflated
# no faster, and after each the thread has to wait for Python's lock, 5 ms where another is busy.
_CHUNK = 1 << 18
_LARGE = 1 << 20                    # bytes: what is gzipped and as large is kept inflated; memory for it comes from the system
_MAX_RATIO = 1032                   # no deflate stream grows by more: 258 bytes for two bits


def read(path, magic=None):
    """Return the array in an idx file: images uint8 (N, rows, columns) or labels uint8 (N,).

    Whether the file is gzipped is seen from its first bytes, not from its name.  `magic` is the magic number that it
    must have, either of the two if None.
    UserError if the file is missing or cannot be read, has another magic number, holds fewer or more bytes than its
    header counts, or is a gzip file that is cut short or spoiled.
    """
    content, shape = _content(path, magic)
    import numpy as np  # not above: a program reads its images while numpy is imported
    return np.frombuffer(content, np.uint8).reshape(shape)


def _content(path, magic):
    """The bytes behind the header of an idx file, in memory that can be written, and their shape."""
    try:
        with open(path, 'rb') as stream:
            gzipped = stream.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            size = stream.seek(0, 2)
            stream.seek(0)
            key = cache.digest(stream, __name__) if gzipped and size >= _LARGE else None
            if key and (kept := cache.read('inflated', key)):
                shape, start = _shape(kept, path, magic)
                return kept[start:], shape
            stream.seek(0)
            chunks = iter(partial(stream.read, _CHUNK), b'')
            limit = size * (_MAX_RATIO if gzipped else 1)                   # bytes that it holds at most
            content, shape = _parse(_inflate(chunks, path) if gzipped else chunks, limit, path, magic)
            if key:
                cache.write('inflated', key, _header(shape), content)
            return content, shape
    except FileNotFoundError as error:
        raise UserError(f'{path}: no such file; want an idx file, gzipped or not; give another path') from error
    except OSError as error:
        raise UserError(f'{path}: cannot be read ({error.strerror or error}); want an idx file, gzipped or not; '
                        'give another path') from error


def write(path, array):
    """Write uint8 images (N, rows, columns) or labels (N,) as an idx file, gzipped if `path` ends in .gz."""
    if array.ndim not in _MAGIC or array.dtype != 'uint8':
        raise ValueError(f'want uint8 (N, rows, columns) or (N,), got {array.dtype} {array.shape}')
    content = _header(array.shape) + array.tobytes()
    import gzip
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
    """`_content` of a file whose bytes come in `chunks`, `limit` bytes at most."""
    head = _gather(chunks, b'', 4 + 4 * max(_MAGIC))
    shape, start = _shape(head, path, magic)
    size = prod(shape)
    counted = f'{" x ".join(map(str, shape))} {_KINDS[_MAGIC[len(shape)]]} are {size} bytes after the header'
    if size > limit:                                        # before memory is asked for
        raise _wrong_size(path, f'{counted}, but it is cut short: it holds {limit} at most')
    content = _memory(size)
    place, have, chunk = memoryview(content), 0, head[start:]
    while True:
        end = have + len(chunk)
        if end > size:
            raise _wrong_size(path, f'{counted}, but trailing bytes follow')
        place[have:end] = chunk
        have, chunk = end, next(chunks, None)
        if chunk is None:
            break
    if have < size:
        raise _wrong_size(path, f'{counted}, but it is cut short after {have}')
    return content, shape


def _shape(head, path, magic):
    """-> the sizes that a file's first bytes tell, and the place of what follows."""
    found = int.from_bytes(head[:4], 'big') if len(head) >= 4 else None
    if found not in _KINDS or magic not in (None, found):
        wanted = ' or '.join(f'{number} ({kind})' for number, kind in _KINDS.items() if magic in (None, number))
        raise UserError(f'{path}: magic number {"missing" if found is None else found}, want {wanted}; '
                        'give the idx file itself, gzipped or not')
    dims = found % 256
    start = 4 + 4 * dims
    if len(head) < start:
        raise _wrong_size(path, f'its header has {len(head)} bytes, want {start}')
    return struct.unpack_from(f'>{dims}I', head, 4), start


def _header(shape):
    return struct.pack(f'>{1 + len(shape)}I', _MAGIC[len(shape)], *shape)


def _memory(size):
    if size < _LARGE:
        return bytearray(size)
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)     # of shared pages no large ones are made
    except OSError as error:
        raise MemoryError(f'{size} bytes') from error
    if hasattr(mmap, 'MADV_HUGEPAGE'):          # rows of a shuffled batch lie anywhere, each on a page of its own
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _gather(chunks, head, size):
    """`head` and what follows it in `chunks`, up to `size` bytes or more if there are so many."""
    while len(head) < size and (chunk := next(chunks, None)) is not None:
        head += chunk
    return head


def _wrong_size(path, what):
    return UserError(f'{path}: the counts do not match the size: {what}; get the file again')
