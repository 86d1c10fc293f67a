"""Atomic output: other processes see the previous file or the complete new one, never a part.  The same for new folders."""
import contextlib
import errno
import fcntl
import mmap
import os
import shutil

BLOCK = 4096            # bytes; direct I/O on common devices needs a multiple of it or of 512


def write_atomically(path, *parts, mode=0o666, fsync=False):
    """Write the parts (bytes or contiguous arrays) to `path` in order and return the number of bytes.

    See open_atomically for the other arguments and the errors.
    """
    with open_atomically(path, mode, fsync) as file:
        return sum(file.write(part) for part in parts)


def write_past_cache(path, head, body):
    """Like write_atomically for bytes and a contiguous array, but where possible without the page cache.

    Writing 64 MiB through the cache takes up to 0.13 s of processor time: the kernel clears pages and copies to them.  With
    direct I/O the disk reads the array's memory itself, which takes 0.002 s.  The file system must support it; len(head) and
    the array's address must be multiples of BLOCK.  The end of the array, and all that cannot be written so, is cached.
    """
    with memoryview(body).cast('B') as values, open_atomically(path) as file:
        done = _write_blocks(file.fileno(), head, values)
        file.seek(done)
        file.write(head[done:])
        file.write(values[max(done - len(head), 0):])
        return len(head) + len(values)


def _write_blocks(descriptor, head, values):
    """Write as much of head and values as direct I/O can, and return the number of bytes."""
    direct = getattr(os, 'O_DIRECT', 0)
    if not direct or not head or len(head) % BLOCK:
        return 0
    aligned = mmap.mmap(-1, len(head))
    aligned.write(head)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | direct)
        return os.pwritev(descriptor, [aligned, values[:len(values) & -BLOCK]], 0) & -BLOCK
    except OSError:                                     # no direct I/O here; any other error occurs again without it
        return 0
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


@contextlib.contextmanager
def open_atomically(path, mode=0o666, fsync=False):
    """Yield a binary file that replaces `path` when the block ends.

    mode: permissions of the new file; the umask applies.
    fsync: flush the data to disk before the rename and the directory after it, so that the file survives a power failure.

    If the block raises, or a system call fails (OSError), `path` keeps its previous content and the temporary file is
    removed.  The temporary file is named .NAME.PID.tmp and is in the same directory; only a killed process leaves one behind.
    Two threads of one process must not write the same path at the same time.
    """
    temporary = _temporary(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(temporary, flags, mode)
    except FileExistsError:
        os.unlink(temporary)                            # from a killed process that had our process ID
        descriptor = os.open(temporary, flags, mode)
    try:
        with open(descriptor, 'wb') as file:
            yield file
            if fsync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if fsync:
        _sync_folder(os.path.dirname(os.fspath(path)))


@contextlib.contextmanager
def new_folder(path):
    """Yield the path of a temporary folder that becomes the folder `path` when the block ends.

    FileExistsError if `path` exists, unless it is an empty folder.  If the block raises, or a system call fails (OSError), the
    temporary folder is removed.  It is in the same directory as `path`; only a killed process leaves one behind.
    """
    path = os.path.normpath(os.fspath(path))
    if os.path.lexists(path) and not (os.path.isdir(path) and not os.listdir(path)):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    temporary = _temporary(path)
    shutil.rmtree(temporary, ignore_errors=True)        # from a killed process that had our process ID
    os.mkdir(temporary)
    try:
        yield temporary
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _temporary(path):
    """Return the path of the temporary file or folder of this process for `path`."""
    folder, name = os.path.split(os.fspath(path))
    stem = os.fsdecode(os.fsencode(name)[:200])         # names are limited to 255 bytes
    return os.path.join(folder, f'.{stem}.{os.getpid()}.tmp')


def _sync_folder(folder):
    """Make a rename durable.  Some network file systems cannot sync a directory; the file's data is on disk in any case."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder or '.', os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
