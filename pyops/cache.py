"""A cache of results that take time to compute: files in the user's cache folder.

Nothing depends on it.  A file that is missing, damaged, owned by another user or made from other input counts as absent;
if nothing can be written, programs run without a cache.  Keys are compared byte for byte and are complete: they contain the
input, or a hash of it, and the version of the code that computed the result.

PYOPS_CACHE=DIR selects the folder, PYOPS_CACHE=0 disables the cache; the default is $XDG_CACHE_HOME/pyops or ~/.cache/pyops.
"""
import contextlib
import io
import mmap
import os
import stat
import struct
import sys
import time
import zlib

from pyops.files import write_atomically

KEPT = 4                # newest files kept per kind
_MAGIC, _SIZES = b'pyops cache\n', struct.Struct('<IQI')    # checksum, content size, key size in bytes
_CHUNK = 1 << 24        # bytes hashed per call: then the thread must reacquire the GIL, up to 5 ms if another thread is busy
_ABANDONED = 3600       # seconds after which a temporary file is stale


def folder():
    """Return the path of the folder, which may not exist; None if caching is disabled or there is no home directory."""
    chosen = os.environ.get('PYOPS_CACHE')
    if chosen is not None:
        return None if chosen in ('', '0') else os.path.abspath(chosen)
    base = os.environ.get('XDG_CACHE_HOME', '')
    if not os.path.isabs(base):                         # the XDG specification says to ignore it
        base = os.path.expanduser('~/.cache')
    return os.path.join(base, 'pyops') if os.path.isabs(base) else None


def takes_files():
    """Return whether `write` is likely to succeed."""
    place = folder()
    while place and not os.path.exists(place):
        place = os.path.dirname(place)
    return bool(place) and os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)


def read(kind, key):
    """Return the content last written for this kind (a word) and key (bytes), or None if there is no intact file.

    The content is a memoryview of a private mapping: writing to it does not change the file.
    """
    place = folder()
    if place is None:
        return None
    try:
        # O_NONBLOCK: do not hang if the path is a FIFO.
        descriptor = os.open(_path(place, kind, key), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                return None
            content = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))
        finally:
            os.close(descriptor)
    except (OSError, ValueError):                       # ValueError: the file is empty
        return None
    size = len(_MAGIC) + _SIZES.size + len(key)
    head, payload = content[:size], content[size:]
    return payload if head == _head(key, [payload]) else None


def write(kind, key, *parts):
    """Store the concatenated parts (bytes) for `read`, if possible."""
    place = folder()
    if place is None:
        return
    with contextlib.suppress(OSError):
        os.makedirs(place, 0o700, exist_ok=True)
        write_atomically(_path(place, kind, key), _head(key, parts), *parts, mode=0o600)
        _tidy(place, kind)


def read_arrays(kind, key):
    """Return the list of numpy arrays stored by write_arrays, or None."""
    content = read(kind, key)
    if content is None:
        return None
    import numpy as np
    stream, arrays = io.BytesIO(content), []
    while stream.tell() < len(content):
        arrays.append(np.load(stream, allow_pickle=False))
    return arrays


def write_arrays(kind, key, arrays):
    """Store numpy arrays as concatenated .npy files, if possible."""
    import numpy as np
    stream = io.BytesIO()
    for array in arrays:
        np.save(stream, array, allow_pickle=False)
    write(kind, key, stream.getbuffer())


def digest(stream, *modules):
    """Return a cache key: a hash of the rest of a stream, of the source of the named modules, and of the Python version.

    None if the stream or the source of a module cannot be read.
    """
    import hashlib
    hashed = hashlib.sha256(sys.version.encode())
    try:
        for name in modules:
            with open(sys.modules[name].__file__, 'rb') as source:
                hashed.update(source.read() + b'\0')
        while chunk := stream.read(_CHUNK):
            hashed.update(chunk)
    except OSError:
        return None
    return hashed.digest()


def _path(place, kind, key):
    return os.path.join(place, f'{kind}-{zlib.crc32(key):08x}')


def _head(key, parts):
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return _MAGIC + _SIZES.pack(checksum, sum(map(len, parts)), len(key)) + key


def _tidy(place, kind):
    """Remove all but the newest files of a kind, and stale temporary files."""
    found = []
    with os.scandir(place) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.name.startswith(f'{kind}-'):
                    found.append((entry.stat().st_mtime, entry.path))
                elif entry.name.startswith(f'.{kind}-') and time.time() - entry.stat().st_mtime > _ABANDONED:
                    os.unlink(entry.path)
    for _, path in sorted(found)[:-KEPT]:
        with contextlib.suppress(OSError):
            os.unlink(path)
