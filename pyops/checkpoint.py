"""Checkpoints: one safetensors file with all that a bit-exact continuation needs, complete or not there at all.

A file holds tensors and a `state` (anything JSON can say: epoch, step, data order, vocabularies, configuration).
The state is stored in the file's metadata, with a format name, a format version, the name under which it was saved, and
a SHA-256 over the state and every tensor (0.08 s of the 0.7 s that a save of 125 MB takes), so that a damaged file is
noticed and not trained on.

A save goes to a hidden temporary file in the same folder, is synced, and only then gets its name: whatever kills
the process, a file under a checkpoint's name is complete.
"""
import contextlib
import dataclasses
import datetime
import errno
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
VERSION = 2             # 1: a run without first_loss and id, and no name in the metadata

_NAME = re.compile(r'checkpoint_(\d{8}_\d{6})_(\d+)' + re.escape(SUFFIX))
_PART = re.compile(r'.+' + re.escape(SUFFIX) + r'_part_[a-z]+')         # of scripts/split_checkpoint.sh
_TEMPORARY = re.compile(r'\..+' + re.escape(SUFFIX) + r'\.(\d+)\.tmp')
_TIME = '%Y%m%d_%H%M%S'
_MOST_OTHERS = 3                    # files of other programs that get a line each
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
    folder, base = os.path.split(path)
    name_text = os.fsencode(base).decode(errors='replace')
    metadata = {'format': FORMAT, 'version': str(VERSION), 'name': name_text, 'state': text,
                'sha256': _digest(tensors, text + name_text)}
    # Serialised here and written below, because the library's own save_file does not sync and, when killed, leaves
    # a temporary whose name tells nothing of its owner.
    data = serialize(tensors, metadata=metadata)
    temporary = os.path.join(folder, f'.{base}.{os.getpid()}.tmp')
    try:
        _write(temporary, data)
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if not isinstance(error, OSError):
            raise
        raise UserError(f'{path}: cannot save the checkpoint ({_reason(error)}){_remedy(error, folder, len(data))} '
                        'or name another folder with -c') from error
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
        raise _Damaged(f'{path}: damaged checkpoint ({error})') from error
    if _digest(tensors, metadata['state'] + metadata.get('name', '')) != metadata.get('sha256'):
        raise _Damaged(f'{path}: damaged checkpoint: its content does not have the SHA-256 noted when it was saved')
    return tensors, json.loads(metadata['state'])


def name(epoch, now=None):
    """The file name of a checkpoint: date, time and epochs done, as in checkpoint_20250322_085920_10.safetensors."""
    now = now or datetime.datetime.now()
    return f'checkpoint_{now.strftime(_TIME)}_{epoch}{SUFFIX}'


def _digest(tensors, text):
    """SHA-256 (hex) over text (state and file name) and each tensor's name, dtype, shape and bytes; the order is by name."""
    digest = hashlib.sha256(text.encode())
    for key in sorted(tensors):
        tensor = tensors[key]
        digest.update(f'\n{key} {tensor.dtype.name} {tensor.shape}\n'.encode())
        digest.update(tensor.reshape(-1).view(np.uint8))
    return digest.hexdigest()


def _read_metadata(path):
    """The metadata of a complete checkpoint, read from its header alone.

    UserError if it is something else: `_Damaged` for a file that may have been a checkpoint, `_Foreign` for a safetensors
    file of another program, `_TooNew` if only the version is wrong.
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
        raise _Damaged(f'{path}: truncated checkpoint ({size} bytes, not even its header)')
    try:
        header = json.loads(text)
        metadata = header.pop('__metadata__', {})
        want = 8 + length + max((tensor['data_offsets'][1] for tensor in header.values()), default=0)
        ours = metadata.get('format') == FORMAT
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise _Damaged(f'{path}: not a safetensors file', 'want a checkpoint that this program saved') from error
    if size != want:
        kind = 'truncated' if size < want else 'damaged'
        raise _Damaged(f'{path}: {kind} checkpoint: want {want} bytes, got {size}')
    if not ours:
        raise _Foreign(f'{path}: a safetensors file, but not a {FORMAT}; want one that this program saved')
    version = str(metadata.get('version'))
    if re.fullmatch('[0-9]{1,9}', version) and int(version) > VERSION:
        raise _TooNew(f'{path}: checkpoint of format version {version}, and this program reads up to {VERSION}; '
                      'update pyops or take an older checkpoint')
    if version not in map(str, range(1, VERSION + 1)) or 'state' not in metadata:
        raise _Damaged(f'{path}: damaged checkpoint (no valid version and state in its header)')
    return metadata


class _Damaged(UserError):
    """What is left of a checkpoint; `problem` is the text without the remedy."""

    def __init__(self, problem, remedy='take an older one'):
        super().__init__(f'{problem}; {remedy}')
        self.problem = problem


class _Foreign(UserError):
    """A safetensors file of another program."""


class _TooNew(UserError):
    """A complete checkpoint of a later format: never passed over, it may be the best one there is."""


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
    """What `-c PATH` means.

    path: the checkpoint, or None; folder: where to save; line: what to print; warnings: lines about files that were passed
    over; tensors, state: the content of the checkpoint, as `load` returns it, or None; by_time: the next checkpoint of the
    run replaces it, because it was saved by time (state['by_time']) and nobody has named or renamed it.
    """
    path: str | None
    folder: str
    line: str
    warnings: tuple[str, ...] = ()
    tensors: dict | None = dataclasses.field(default=None, compare=False, repr=False)
    state: object = dataclasses.field(default=None, compare=False, repr=False)
    by_time: bool = False


def find(path, serving=False):
    """Load what `-c PATH` names: a checkpoint, or a folder of which the newest intact one is taken -> Found.

    A folder that does not exist yet is created.  A missing or damaged file (PATH ends in .safetensors, or is a file) is
    an error, and so is a folder that cannot be read or written: that shows here and not after hours of training.
    Temporaries of processes that are gone are removed.  With `serving` nothing is created, removed or written, and no
    checkpoint is an error.
    """
    path = os.fspath(path)
    if not path:
        raise UserError("-c/--checkpoint: want a checkpoint or a folder, got ''")
    is_new = not _exists(path)
    if not os.path.isdir(path) and not is_new:
        if not os.path.isfile(path):
            raise UserError(f'{path}: want a checkpoint or a folder, and it is neither')
        folder = os.path.dirname(path) or '.'
        if not serving:
            _prepare(folder)
        return Found(path, folder, f'loading from checkpoint : {path}', (), *_load_or_name_another(path))
    if is_new and path.endswith(SUFFIX):
        newest = _newest_beside(path)
        remedy = f'the newest one there is {newest}' if newest else 'name a folder to start from scratch'
        raise UserError(f'{path}: no such checkpoint; {remedy}')
    if not serving:
        _prepare(path)
    newest, content, warnings = (None, (None, None), ()) if is_new else _newest(path)
    if newest:
        line = f'loading from checkpoint : {newest}'
    elif serving:
        bad = f' ({warnings[0]})' if warnings else ''
        raise UserError(f'{path}: no checkpoint to serve{bad}; train first, or name one with -c')
    elif is_new:
        line = f'{path} : new folder, starting from scratch'
    else:
        line = f'{path} : no checkpoint, starting from scratch'
    _, state = content
    by_time = isinstance(state, dict) and state.get('by_time') is True and _key(os.path.basename(newest)) is not None
    return Found(newest, path, line, warnings, *content, by_time)


def _exists(path):
    """Whether there is such a path, be it a dangling link; UserError if a folder on the way there cannot be searched."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UserError(f'{path}: cannot be reached ({_reason(error)}); make the folders on the way there readable, '
                        'or name another with -c') from error
    return True


def _load_or_name_another(path):
    """load(path), whose error for a damaged file names the newest intact checkpoint of the same folder, if any."""
    try:
        return load(path)
    except _Damaged as error:
        newest = _newest_beside(path)
        if newest is None:
            raise
        raise UserError(f'{error.problem}; the newest intact one there is {newest}') from error


def fresh(folder):
    """What a run without `-c` does -> Found: it saves into `folder` and starts from scratch, whatever that contains."""
    _prepare(folder)
    return Found(None, folder, 'starting from scratch')


def last(path):
    """Words for an error: the checkpoint that a run can go on from; path: its path, or None."""
    return f'the last complete checkpoint is {path}' if path else 'there is no earlier checkpoint'


@contextlib.contextmanager
def claim(folder):
    """Hold `folder` for one training run; UserError while another one, of this or another process, holds it.

    Two runs in one folder would mix their metrics, and a resume would take whichever saved last.  The kernel releases the
    lock however a process ends.  File systems without locks have no guard.
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
    with contextlib.suppress(OSError):                  # a folder that cannot be read: saving will say so
        latest = max((key for key, _ in _listed(folder)), default=None)
        if latest and (now.strftime(_TIME), epoch) <= latest:
            now = datetime.datetime.strptime(latest[0], _TIME) + datetime.timedelta(seconds=1)
    return os.path.join(folder, name(epoch, now))


def save_or_rescue(folder, epoch, tensors, state, now=None, last_path=None):
    """Save under the next free name in `folder` and return the path.

    If that fails (a full disk), the checkpoint goes to the folder for temporary files, so that no step is lost, and a
    UserError names it and how to go on; if that fails too, it names last_path, the last checkpoint of the run.
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
        raise UserError(f'{first}; {rescue} did not take it either; {last(last_path)}') from error
    raise UserError(f'{first}; this one was saved as {path}: go on from it with -c {path}')


def _listed(folder):
    """((date and time, epoch), path) of each file of `folder` that may be a checkpoint; OSError if it cannot be read.

    These are all .safetensors files.  A file without a checkpoint's name gets the key of the name under which it was
    saved, so that a renamed or copied one keeps its place; checkpoints of format 1 and other files have none, and get the
    time of their last change, and -1.
    """
    with os.scandir(folder or '.') as entries:
        for entry in entries:
            if not entry.name.endswith(SUFFIX) or entry.name.startswith('.'):
                continue
            path = os.path.join(folder, entry.name)
            if key := _key(entry.name):
                yield key, path
            elif entry.is_file():
                yield _key_inside(path) or _key_of_change(path), path


def _key(file_name):
    """(date and time, epoch) in the name of a checkpoint; None for another name."""
    match = _NAME.fullmatch(file_name)
    try:
        datetime.datetime.strptime(match[1] if match else '', _TIME)
    except ValueError:
        return None
    return match[1], int(match[2])


def _key_inside(path):
    try:
        return _key(str(_read_metadata(path).get('name')))
    except UserError:
        return None


def _key_of_change(path):
    try:
        return datetime.datetime.fromtimestamp(os.stat(path).st_mtime).strftime(_TIME), -1
    except (OSError, ValueError, OverflowError):
        return '00010101_000000', -1


def _newest(folder):
    """(path, (tensors, state), warnings): the newest intact checkpoint, None and (None, None) if there is none, and a line
    for each newer file that was passed over.  Files of other programs are worth a line only if there is no checkpoint.

    UserError for a folder that cannot be read, and for a newer checkpoint of a later format.
    """
    warnings, others = [], []
    try:
        listed = sorted(_listed(folder), reverse=True)
        parts = sorted(filter(_PART.fullmatch, os.listdir(folder or '.')))
    except OSError as error:
        raise UserError(f'{folder}: cannot read the folder ({_reason(error)}); make it readable, or name another with -c') \
            from error
    for _, path in listed:
        try:
            return path, load(path), tuple(warnings)
        except _TooNew:
            raise
        except _Foreign as error:
            (warnings if _key(os.path.basename(path)) else others).append(f'warning: passed over {error}')
        except UserError as error:
            warnings.append(f'warning: passed over {error}')
    if parts:
        others.append(f'warning: passed over {os.path.join(folder, parts[0])}: a part of a split file; '
                      f'put all {len(parts)} together with scripts/restore_checkpoint.sh')
    if len(others) > _MOST_OTHERS:
        others[_MOST_OTHERS:] = [f'warning: passed over {len(others) - _MOST_OTHERS} more of that kind']
    return None, (None, None), (*warnings, *others)


def _newest_beside(path):
    """The path of the newest intact checkpoint in the folder of `path`, or None."""
    try:
        return _newest(os.path.dirname(path) or '.')[0]
    except UserError:
        return None


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


def _remedy(error, folder, nbytes):
    """What to do when a file of nbytes could not be written; ' or name another folder with -c' follows."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f': it needs {nbytes} bytes and {_free_text(folder)}; make room'
    if error.errno == errno.EFBIG:
        return f': it needs {nbytes} bytes; raise the limit on the size of a file (ulimit -f)'
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return '; make the folder writable'
    return '; mend the folder'


def _free_text(folder):
    try:
        return f'{shutil.disk_usage(folder or ".").free} are free'
    except OSError:
        return 'its folder cannot be reached'
