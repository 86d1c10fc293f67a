"""What one run keeps for the next because making it again takes time: files in the user's cache folder.

Nothing depends on them.  A file that is missing, damaged, of another user or made from something else is as good as none,
and where nothing can be written all goes on without.  A key is compared byte for byte, so it is complete: whatever the
content was made from, or a hash of it, and the version of what made it.

PYOPS_CACHE=DIR chooses the folder, PYOPS_CACHE=0 does without; else it is $XDG_CACHE_HOME/pyops or ~/.cache/pyops.
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

KEPT = 4                # files of a kind
_MAGIC, _SIZES = b'pyops cache\n', struct.Struct('<IQI')    # checksum, bytes of the content, bytes of the key
_CHUNK = 1 << 24        # hashed at a time: after each the thread waits for Python's lock, 5 ms where another is busy
_ABANDONED = 3600       # seconds after which a temporary file belongs to nobody


def folder():
    """The path of the folder, which need not exist; None where caching is switched off or there is no home."""
    chosen = os.environ.get('PYOPS_CACHE')
    if chosen is not None:
        return None if chosen in ('', '0') else os.path.abspath(chosen)
    base = os.environ.get('XDG_CACHE_HOME', '')
    if not os.path.isabs(base):                         # which its specification tells to ignore
        base = os.path.expanduser('~/.cache')
    return os.path.join(base, 'pyops') if os.path.isabs(base) else None


def takes_files():
    """Whether `write` can hope to succeed."""
    place = folder()
    while place and not os.path.exists(place):
        place = os.path.dirname(place)
    return bool(place) and os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)


def read(kind, key):
    """What was last written for this kind (a word) and key (bytes): a memoryview of pages of the file, which can be written,
    though nothing of that goes to the file; None if it is not there unharmed."""
    place = folder()
    if place is None:
        return None
    try:
        # a pipe of that name shall not be waited for
        descriptor = os.open(_path(place, kind, key), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                return None
            content = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))
        finally:
            os.close(descriptor)
    except (OSError, ValueError):                       # ValueError: it is empty
        return None
    size = len(_MAGIC) + _SIZES.size + len(key)
    head, payload = content[:size], content[size:]
    return payload if head == _head(key, [payload]) else None


def write(kind, key, *parts):
    """Keep the parts, which are bytes, one behind the other for `read`, if possible."""
    place = folder()
    if place is None:
        return
    path = _path(place, kind, key)
    temporary = os.path.join(place, f'.{os.path.basename(path)}.{os.getpid()}.tmp')
    try:
        os.makedirs(place, 0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)                        # of a process that had our number
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), 'wb') as file:
            file.write(_head(key, parts))
            for part in parts:
                file.write(part)
        os.replace(temporary, path)
        _tidy(place, kind)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def read_arrays(kind, key):
    """The list of numpy arrays that write_arrays was given, or None."""
    content = read(kind, key)
    if content is None:
        return None
    import numpy as np
    stream, arrays = io.BytesIO(content), []
    while stream.tell() < len(content):
        arrays.append(np.load(stream, allow_pickle=False))
    return arrays


def write_arrays(kind, key, arrays):
    """Keep numpy arrays, in the form of .npy files one behind the other."""
    import numpy as np
    stream = io.BytesIO()
    for array in arrays:
        np.save(stream, array, allow_pickle=False)
    write(kind, key, stream.getbuffer())


def digest(stream, *modules):
    """A key: a hash of a file's bytes, which is read from where it stands, of the texts of the modules of those names, whose
    work is kept, and of the Python that did it.  None where it cannot be had, as of modules without a text."""
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
    """Remove all but the newest files of a kind, and what a killed process left."""
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
