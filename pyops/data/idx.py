"""The idx file format of MNIST: a big-endian header with a magic number and sizes, then unsigned bytes.

Magic number 2051 (0x0803) marks images, 2049 (0x0801) labels: 8 is the code for unsigned bytes, 3 and 1 the number of
sizes.  Format: http://yann.lecun.com/exdb/mnist/.
"""
from __future__ import annotations

import contextlib
import mmap
import struct
import zlib
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from pyops import cache
from pyops.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from pyops.typing import PathLike, Shape

IMAGES_MAGIC, LABELS_MAGIC = 2051, 2049
_KINDS = {IMAGES_MAGIC: 'images', LABELS_MAGIC: 'labels'}
_MAGIC = {3: IMAGES_MAGIC, 1: LABELS_MAGIC}         # by number of sizes
_GZIP_MAGIC = b'\x1f\x8b'
_GZIP_WBITS = 31                    # tells zlib to expect a gzip header and CRC-32
# The decompressed data of a piece of this size is still in the cache when it is copied.  Smaller pieces are not faster, and
# after each the thread must reacquire the GIL, which takes up to 5 ms if another thread is busy.
_CHUNK = 1 << 18
_LARGE = 1 << 20                    # bytes from which gzipped files are cached decompressed, and memory is mapped
_MAX_RATIO = 1032                   # largest deflate ratio: 258 bytes from two bits


def read(path: PathLike, magic: int | None = None) -> np.ndarray:
    """Return the array in an idx file: images uint8 (N, rows, columns) or labels uint8 (N,).

    The file may be gzipped, whatever its name.  magic: the required magic number; None accepts both.
    UserError if the file is missing or cannot be read, has another magic number or another size than its header specifies,
    or is a truncated or damaged gzip file.
    """
    content, shape = _content(path, magic)
    import numpy as np  # not at the top: programs read images while numpy is imported
    return np.frombuffer(content, np.uint8).reshape(shape)


def _content(path: PathLike, magic: int | None) -> tuple[Any, Shape]:
    """Return the bytes after the header of an idx file, in writable memory, and their shape."""
    try:
        with open(path, 'rb') as stream:
            gzipped = stream.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            size = stream.seek(0, 2)
            stream.seek(0)
            key = cache.digest(stream, __name__) if gzipped and size >= _LARGE else None
            if key and (cached := cache.read('inflated', key)):
                shape, start = _shape(cached, path, magic)
                return cached[start:], shape
            stream.seek(0)
            chunks = iter(partial(stream.read, _CHUNK), b'')
            limit = size * (_MAX_RATIO if gzipped else 1)                   # largest possible content
            content, shape = _parse(_inflate(chunks, path) if gzipped else chunks, limit, path, magic)
            if key:
                cache.write('inflated', key, _header(shape), content)
            return content, shape
    except FileNotFoundError as error:
        raise UserError(f'{path}: no such file; expected an idx file, gzipped or not; give another path') from error
    except OSError as error:
        raise UserError(f'{path}: cannot be read ({error.strerror or error}); expected an idx file, gzipped or not; '
                        'give another path') from error


def write(path: PathLike, array: np.ndarray) -> None:
    """Write uint8 images (N, rows, columns) or labels (N,) as an idx file, gzipped if `path` ends in .gz."""
    if array.ndim not in _MAGIC or array.dtype != 'uint8':
        raise ValueError(f'expected uint8 (N, rows, columns) or (N,), got {array.dtype} {array.shape}')
    content = _header(array.shape) + array.tobytes()
    import gzip
    with open(path, 'wb') as stream:
        stream.write(gzip.compress(content, mtime=0) if str(path).endswith('.gz') else content)


def _inflate(chunks: Iterator[bytes], path: PathLike) -> Iterator[bytes]:
    """Yield the decompressed gzip chunks."""
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
        what = 'trailing bytes after the end of the gzip stream' if streams else f'the gzip stream is damaged ({error})'
        raise UserError(f'{path}: {what}; expected a complete idx file; get the file again') from error
    if not inflate.eof:
        raise UserError(f'{path}: the gzip stream is truncated; expected a complete idx file; get the file again')


def _parse(chunks: Iterator[bytes], limit: int, path: PathLike, magic: int | None) -> tuple[Any, Shape]:
    """Return content and shape of a file read in `chunks` of at most `limit` bytes in total; see _content."""
    head = _gather(chunks, b'', 4 + 4 * max(_MAGIC))
    shape, start = _shape(head, path, magic)
    size = prod(shape)
    counted = f'{" x ".join(map(str, shape))} {_KINDS[_MAGIC[len(shape)]]} are {size} bytes after the header'
    if size > limit:                                        # before memory is allocated
        raise _wrong_size(path, f'{counted}, but the file is truncated: it has at most {limit}')
    content = _memory(size)
    place, have = memoryview(content), 0
    chunk: bytes | None = head[start:]
    while chunk is not None:
        end = have + len(chunk)
        if end > size:
            raise _wrong_size(path, f'{counted}, but trailing bytes follow')
        place[have:end] = chunk
        have, chunk = end, next(chunks, None)
    if have < size:
        raise _wrong_size(path, f'{counted}, but the file is truncated after {have}')
    return content, shape


def _shape(head: bytes, path: PathLike, magic: int | None) -> tuple[Shape, int]:
    """Return the sizes in a header, and the offset of the data."""
    found = int.from_bytes(head[:4], 'big') if len(head) >= 4 else None
    if found not in _KINDS or magic not in (None, found):
        wanted = ' or '.join(f'{number} ({kind})' for number, kind in _KINDS.items() if magic in (None, number))
        raise UserError(f'{path}: magic number {"missing" if found is None else found}, expected {wanted}; '
                        'give the idx file itself, gzipped or not')
    dims = found % 256
    start = 4 + 4 * dims
    if len(head) < start:
        raise _wrong_size(path, f'its header has {len(head)} bytes, expected {start}')
    return struct.unpack_from(f'>{dims}I', head, 4), start


def _header(shape: Shape) -> bytes:
    return struct.pack(f'>{1 + len(shape)}I', _MAGIC[len(shape)], *shape)


def _memory(size: int) -> Any:
    if size < _LARGE:
        return bytearray(size)
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)     # shared pages cannot be huge pages
    except OSError as error:
        raise MemoryError(f'{size} bytes') from error
    if hasattr(mmap, 'MADV_HUGEPAGE'):          # rows of a shuffled batch are on different pages
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _gather(chunks: Iterator[bytes], head: bytes, size: int) -> bytes:
    """Return `head` and the following chunks, at least `size` bytes if there are so many."""
    while len(head) < size and (chunk := next(chunks, None)) is not None:
        head += chunk
    return head


def _wrong_size(path: PathLike, what: str) -> UserError:
    return UserError(f'{path}: header and file size do not match: {what}; get the file again')
