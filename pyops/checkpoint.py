"""Checkpoints: one safetensors file with all that a bit-exact continuation needs, complete or not there at all.

A file holds tensors and a `state` (anything JSON can say: epoch, step, data order, vocabularies, configuration).
The state lies in the file's metadata, beside a format name, a format version and a SHA-256 over the state and every
tensor (0.08 s of the 0.7 s that a save of 125 MB takes), so that a damaged file is noticed and not trained on.

A save goes to a hidden temporary file in the same folder, is synced, and only then gets its name: whatever kills
the process, a file under a checkpoint's name is complete.
"""
import contextlib
import dataclasses
import datetime
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile

import numpy as np

from pyops.errors import UserError

SUFFIX = '.safetensors'
FORMAT = 'pyops checkpoint'
VERSION = 1

_NAME = re.compile(r'checkpoint_(\d{8}_\d{6})_(\d+)' + re.escape(SUFFIX))
_TEMPORARY = re.compile(r'\..+' + re.escape(SUFFIX) + r'\.(\d+)\.tmp')
_TIME = '%Y%m%d_%H%M%S'
_HEADER_LIMIT = 100_000_000         # bytes; safetensors itself refuses a longer header


# ---- one file ------------------------------------------------------------------------------------------------------

def save(path, tensors, state):
    """Write `tensors` (dict: name -> array of any shape, strides and safetensors dtype) and `state` (JSON) to `path`.

    A file of that name is replaced, in one step, by a complete new one.  JSON makes lists of tuples and strings of
    keys.  UserError where it cannot be written (it names the bytes needed and free); nothing is left behind then.
    """
    from safetensors.numpy import save as serialize
    path = os.fspath(path)
    # The library reads the memory of a transposed or sliced array as if it were contiguous.  Not ascontiguousarray,
    # which makes (1,) of ().  The file is little-endian, and so is what the checksum is taken of.
    tensors = {key: np.asarray(tensor, tensor.dtype.newbyteorder('<'), order='C') for key, tensor in tensors.items()}
    text = json.dumps(state)
    metadata = {'format': FORMAT, 'version': str(VERSION), 'state': text, 'sha256': _digest(tensors, text)}
    # Serialised here and written below, because the library's own save_file does not sync and, when killed, leaves
    # a temporary whose name tells nothing of its owner.
    data = serialize(tensors, metadata=metadata)
    folder, base = os.path.split(path)
    temporary = os.path.join(folder, f'.{base}.{os.getpid()}.tmp')
    try:
        _write(temporary, data)
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if not isinstance(error, OSError):
            raise
        raise UserError(f'{path}: cannot save the checkpoint ({_reason(error)}): it needs {len(data)} bytes and '
                        f'{_free_text(folder)}; make room or name another folder with -c') from error
    _sync_folder(folder)


def load(path):
    """Return (tensors, state) of the checkpoint `path`, every bit as it was saved; the arrays are contiguous.

    UserError for a file that is missing, truncated, damaged, of another program or of a newer format.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file
    path = os.fspath(path)
    metadata = _read_metadata(path)
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f'{path}: damaged checkpoint ({error}); take an older one') from error
    if _digest(tensors, metadata['state']) != metadata.get('sha256'):
        raise UserError(f'{path}: damaged checkpoint: its content does not have the SHA-256 noted when it was saved; '
                        'take an older one')
    return tensors, json.loads(metadata['state'])


def name(epoch, now=None):
    """The file name of a checkpoint: date, time and epochs done, as in checkpoint_20250322_085920_10.safetensors."""
    now = now or datetime.datetime.now()
    return f'checkpoint_{now.strftime(_TIME)}_{epoch}{SUFFIX}'


def _digest(tensors, text):
    """SHA-256 (hex) over the state's text and every tensor's name, dtype, shape and bytes; the order is by name."""
    digest = hashlib.sha256(text.encode())
    for key in sorted(tensors):
        tensor = tensors[key]
        digest.update(f'\n{key} {tensor.dtype.name} {tensor.shape}\n'.encode())
        digest.update(tensor.reshape(-1).view(np.uint8))
    return digest.hexdigest()


def _read_metadata(path):
    """The metadata of a complete checkpoint, read from its header alone, so that a folder is looked through quickly.

    UserError says what is wrong otherwise.  `_TooNew` where only the version is.
    """
    try:
        with open(path, 'rb') as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), 'little')
            text = file.read(min(length, _HEADER_LIMIT))
    except FileNotFoundError as error:
        raise UserError(f'{path}: no such checkpoint; name a file that exists, or a folder') from error
    except OSError as error:
        raise UserError(f'{path}: cannot read the checkpoint ({_reason(error)}); name a file that can be read') \
            from error
    if size < 9 or (text[:1] == b'{' and len(text) < length <= _HEADER_LIMIT):
        raise UserError(f'{path}: truncated checkpoint ({size} bytes, not even its header); take an older one')
    try:
        header = json.loads(text)
        metadata = header.pop('__metadata__', {})
        want = 8 + length + max((tensor['data_offsets'][1] for tensor in header.values()), default=0)
        ours = metadata.get('format') == FORMAT
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise UserError(f'{path}: not a safetensors file; want a checkpoint that this program saved') from error
    if size < want:
        raise UserError(f'{path}: truncated checkpoint: want {want} bytes, got {size}; take an older one')
    if size > want:
        raise UserError(f'{path}: damaged checkpoint: want {want} bytes, got {size}; take an older one')
    if not ours:
        raise UserError(f'{path}: a safetensors file, but not a {FORMAT}; want one that this program saved')
    version = str(metadata.get('version'))
    if re.fullmatch('[0-9]{1,9}', version) and int(version) > VERSION:
        raise _TooNew(f'{path}: checkpoint of format version {version}, and this program reads up to {VERSION}; '
                      'update pyops or take an older checkpoint')
    if version != str(VERSION) or 'state' not in metadata:
        raise UserError(f'{path}: damaged checkpoint (no valid version and state in its header); take an older one')
    return metadata


class _TooNew(UserError):
    """A complete checkpoint of a later format: nothing to skip in silence, it may be the best one there is."""


def _write(path, data):
    """Write bytes to a new file and wait until the disk has them."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)                                 # left by a killed process that had our process id
    with open(path, 'xb') as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder):
    """Make a rename durable.  Some network file systems refuse to sync a folder; the file itself is safe anyway."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder or '.', os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# ---- a folder of them ----------------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Found:
    """What `-c PATH` means.  path: the checkpoint to load, or None; folder: where to save; line: what to print;
    warnings: lines about newer files that were passed over."""
    path: str | None
    folder: str
    line: str
    warnings: tuple[str, ...] = ()


def find(path, serving=False):
    """What `-c PATH` means: a checkpoint, or a folder of which the newest complete one is taken -> Found.

    A folder that does not exist yet is created.  A missing file (PATH ends in .safetensors) is an error, and so is a
    folder that cannot be written: that shows here and not after hours of training.  Temporaries of processes that
    are gone are removed.  With `serving` nothing is created, removed or written, and no checkpoint is an error.
    """
    path = os.fspath(path)
    if not path:
        raise UserError("-c/--checkpoint: want a checkpoint or a folder, got ''")
    if not os.path.isdir(path) and os.path.lexists(path):
        if not os.path.isfile(path):
            raise UserError(f'{path}: want a checkpoint or a folder, and it is neither')
        folder = os.path.dirname(path) or '.'
        if not serving:
            _prepare(folder)
        return Found(path, folder, f'loading from checkpoint : {path}')
    if not os.path.isdir(path) and path.endswith(SUFFIX):
        newest, _ = _newest(os.path.dirname(path) or '.')
        remedy = f'the newest one there is {newest}' if newest else 'name a folder to start from scratch'
        raise UserError(f'{path}: no such checkpoint; {remedy}')
    is_new = not os.path.isdir(path)
    if not serving:
        _prepare(path)
    newest, warnings = _newest(path)
    if newest:
        line = f'loading from checkpoint : {newest}'
    elif serving:
        bad = f' ({warnings[0]})' if warnings else ''
        raise UserError(f'{path}: no checkpoint to serve{bad}; train first, or name one with -c')
    elif is_new:
        line = f'{path} : new folder, starting from scratch'
    else:
        line = f'{path} : no checkpoint, starting from scratch'
    return Found(newest, path, line, warnings)


def fresh(folder):
    """What a run without `-c` does -> Found: it saves into `folder` and starts from scratch whatever lies there."""
    _prepare(folder)
    return Found(None, folder, 'starting from scratch')


def last(folder):
    """Words for an error: which checkpoint of `folder` a run can go on from."""
    newest, _ = _newest(folder)
    return f'the last complete checkpoint is {newest}' if newest else 'there is no earlier checkpoint'


@contextlib.contextmanager
def claim(folder):
    """Hold `folder` for one training run; UserError while another one, of this or another process, holds it.

    Two runs in one folder would drop each other's metrics, and a resume would take whichever saved last.  The kernel
    lets go of the lock however a process ends.  Where a file system offers no locks there is no guard.
    """
    descriptor = os.open(folder or '.', os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise UserError(f'{folder}: another run is training into this folder; wait until it is done, '
                        'or name another folder with -c') from error
    except OSError:
        pass
    try:
        yield
    finally:
        os.close(descriptor)


def needs_room(folder, nbytes):
    """UserError where the disk that holds `folder` has fewer than `nbytes` bytes free."""
    try:
        free = shutil.disk_usage(folder or '.').free
    except OSError as error:
        raise UserError(f'{folder}: cannot ask for its free space ({_reason(error)}); name another folder with -c') \
            from error
    if free < nbytes:
        raise UserError(f'{folder}: a checkpoint needs {nbytes} bytes and {free} are free; '
                        'make room or name another folder with -c')


def free_path(folder, epoch, now=None):
    """The path of a checkpoint to save now: of a name that no file has, and later than those of all there.

    The second is advanced until that holds, so that neither two saves within one second nor a clock that was set
    back (every autumn, with local time) hide a checkpoint behind another.
    """
    now = now or datetime.datetime.now()
    last = max((key for key, _ in _listed(folder)), default=None)
    if last and (now.strftime(_TIME), epoch) <= last:
        now = datetime.datetime.strptime(last[0], _TIME) + datetime.timedelta(seconds=1)
    return os.path.join(folder, name(epoch, now))


def save_or_rescue(folder, epoch, tensors, state, now=None):
    """Save under the next free name in `folder` and return the path.

    Where that fails (a full disk), the checkpoint goes to the folder for temporary files, so that no step is lost,
    and a UserError says where it lies and how to go on; where that fails too, which checkpoint is the last.
    """
    try:
        path = free_path(folder, epoch, now)
        save(path, tensors, state)
        return path
    except UserError as error:
        first = error
    rescue = tempfile.gettempdir()
    try:
        path = free_path(rescue, epoch, now)
        save(path, tensors, state)
    except UserError as error:
        raise UserError(f'{first}; {rescue} did not take it either; {last(folder)}') from error
    raise UserError(f'{first}; this one was saved as {path}: go on from it with -c {path}')


def _listed(folder):
    """((date and time, epoch), path) of each entry of `folder` with a checkpoint's name; none where it cannot be read.
    """
    try:
        names = os.listdir(folder or '.')
    except OSError:
        return []
    matches = [match for match in map(_NAME.fullmatch, names) if match and _is_time(match[1])]
    return [((match[1], int(match[2])), os.path.join(folder, match[0])) for match in matches]


def _is_time(text):
    try:
        datetime.datetime.strptime(text, _TIME)
    except ValueError:
        return False
    return True


def _newest(folder):
    """(path or None, warnings): the newest complete checkpoint, and a line for each newer one that is not."""
    warnings = []
    for _, path in sorted(_listed(folder), reverse=True):
        try:
            _read_metadata(path)
        except _TooNew:
            raise
        except UserError as error:
            warnings.append(f'warning: passed over {error}')
        else:
            return path, tuple(warnings)
    return None, tuple(warnings)


def _prepare(folder):
    """Make `folder` where it is missing, prove that it takes a file, and clear it of what dead processes left."""
    import safetensors  # noqa: F401    if it is missing, that shows here and not at the first save
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b'x')
        names = os.listdir(folder)
    except OSError as error:
        raise UserError(f'{folder}: cannot save checkpoints there ({_reason(error)}); '
                        'name a folder that can be written with -c') from error
    for match in filter(None, map(_TEMPORARY.fullmatch, names)):
        if not _is_running(int(match[1])):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, match[0]))


def _is_running(pid):
    """Whether another process has this id.  Ours counts as none: it saves nothing while it looks for a checkpoint,
    and in a container the killed process often had the same id."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass                                            # it runs, and belongs to somebody else
    return True


def _reason(error):
    return error.strerror or type(error).__name__


def _free_text(folder):
    try:
        return f'{shutil.disk_usage(folder or ".").free} are free'
    except OSError:
        return 'its folder cannot be reached'
