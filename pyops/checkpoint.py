"""Checkpoints: one safetensors file with everything that a bit-exact continuation needs, written atomically.

A file holds tensors and a `state`, any JSON value: epoch, step, data order, vocabularies, configuration.  The state is in
the file's metadata, with a format name, a format version, the original file name, and a SHA-256 of the state and every
tensor (0.08 s of the 0.7 s that saving 125 MB takes), so that a damaged file is never loaded.  The parameters have a second
SHA-256: a program that translates reads and checks only them, not the moments of the optimizer.

A save writes a hidden temporary file in the same folder, syncs it, and then renames it: whenever the process is killed, a
file with a checkpoint's name is complete.
"""
import contextlib
import dataclasses
import datetime
import errno
import fcntl
import hashlib
import json
import math
import mmap
import os
import re
import shutil
import sys

import numpy as np

from pyops.errors import UserError, printable
from pyops.files import write_atomically

SUFFIX = '.safetensors'
PARAMETERS = 'parameter/'   # start of the names of the tensors that serving reads
AMAX = 'amax/'          # start of the names of amax histories
BEST = 'best' + SUFFIX      # the best checkpoint of a run so far, which serving prefers to the newest
FORMAT = 'pyops checkpoint'
VERSION = 2             # version 1 had no first_loss and id in the run, and no name in the metadata

_NAME = re.compile(r'checkpoint_(\d{8}_\d{6})_(\d+)' + re.escape(SUFFIX))
_PART = re.compile(r'.+' + re.escape(SUFFIX) + r'_part_[a-z]+')         # of scripts/split_checkpoint.sh
_TEMPORARY = re.compile(r'\..+' + re.escape(SUFFIX) + r'\.(\d+)\.tmp')
_TIME = '%Y%m%d_%H%M%S'
_MOST_OTHERS = 3                    # foreign files that get a warning each
_SHOWN = 200                        # characters of a library's message in ours
_HEADER_LIMIT = 100_000_000         # bytes; safetensors itself refuses a longer header


# ---- one file ------------------------------------------------------------------------------------------------------

def save(path, tensors, state, recorded=None):
    """Write `tensors` (dict: name -> array of any shape, strides and safetensors dtype) and `state` (JSON) to `path`.

    recorded: the file name in the metadata, by which a file with another name is ordered in a folder; None: the one of `path`
    An existing file is replaced atomically.  JSON turns tuples into lists and keys into strings.  Raises UserError, which
    names the bytes needed and free, if the file cannot be written; nothing is left behind then.
    """
    from safetensors.numpy import save as serialize
    path = os.fspath(path)
    # The library reads a transposed or sliced array as if it were contiguous.  Not ascontiguousarray, which turns shape ()
    # into (1,).  The file is little-endian, and so are the bytes that the checksum covers.
    tensors = {key: np.asarray(tensor, tensor.dtype.newbyteorder('<'), order='C') for key, tensor in tensors.items()}
    text = json.dumps(state)
    folder, base = os.path.split(path)
    name_text = recorded or os.fsencode(base).decode(errors='replace')
    metadata = {'format': FORMAT, 'version': str(VERSION), 'name': name_text, 'state': text,
                'sha256': _digest(tensors, text + name_text)}
    if parameters := _parameters(tensors):
        metadata['parameters_sha256'] = _digest(parameters, text + name_text)
    # Serialised here: the library's save_file does not sync and, when killed, leaves a temporary file whose name does not
    # identify its process.
    data = serialize(tensors, metadata=metadata)
    try:
        write_atomically(path, data, fsync=True)
    except OSError as error:
        raise UserError(f'{path}: cannot save the checkpoint ({_reason(error)}){_remedy(error, folder, len(data))} '
                        'or name another folder with -c') from error


def load(path, mapped=False, parameters_only=False):
    """Return (tensors, state) of the checkpoint `path`, bit-identical to what was saved; the arrays are contiguous.

    mapped: the arrays are read-only memory of the file, which saves the copy of a tensor that is only checked.
    parameters_only: without the other tensors, such as the moments of the optimizer, which are then not checked.  Has no effect
    on a file of an older version, which has one checksum for all tensors.
    Raises UserError for a file that is missing, truncated, damaged, from another program, or in a newer format.
    """
    path = os.fspath(path)
    metadata, header, start = _read_header(path)
    checksum = 'sha256'
    try:
        tensors = mapped and _mapped(path, header, start) or _read(path)
        if parameters_only and 'parameters_sha256' in metadata:
            tensors, checksum = _parameters(tensors), 'parameters_sha256'
        digest = _digest(tensors, metadata['state'] + metadata.get('name', ''))     # a text may be no Unicode
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise _Damaged(f'{path}: damaged checkpoint ({printable(error)[:_SHOWN]})') from error
    if digest != metadata.get(checksum):
        raise _Damaged(f'{path}: damaged checkpoint: its content does not have the SHA-256 noted when it was saved')
    try:
        return tensors, json.loads(metadata['state'])
    except (ValueError, RecursionError) as error:           # another program can write one that has the SHA-256
        raise _Damaged(f'{path}: damaged checkpoint: its state is no JSON') from error


def name(epoch, now=None):
    """Return the file name of a checkpoint, with date, time and epochs done: checkpoint_20250322_085920_10.safetensors."""
    now = now or datetime.datetime.now()
    return f'checkpoint_{now.strftime(_TIME)}_{epoch}{SUFFIX}'


def _parameters(tensors):
    return {key: tensor for key, tensor in tensors.items() if key.startswith(PARAMETERS)}


def _digest(tensors, text):
    """Return SHA-256 (hex) of text (state and file name) and each tensor's name, dtype, shape and bytes, ordered by name."""
    digest = hashlib.sha256(text.encode())
    for key in sorted(tensors):
        tensor = tensors[key]
        digest.update(f'\n{key} {tensor.dtype.name} {tensor.shape}\n'.encode())
        digest.update(tensor.reshape(-1).view(np.uint8))
    return digest.hexdigest()


_DTYPES = {'F64': '<f8', 'F32': '<f4', 'F16': '<f2', 'I64': '<i8', 'I32': '<i4', 'I16': '<i2', 'I8': '<i1', 'U8': '<u1',
           'BOOL': '?'}


def _read(path):
    """Return copies of the tensors of a file.   ValueError if it is damaged"""
    from safetensors import SafetensorError  # here: a mapped file does not need the library, whose import takes time
    from safetensors.numpy import load_file
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(error) from error


def _mapped(path, header, start):
    """Return the tensors of a file as views of its memory; None if one has a dtype that NumPy lacks.   ValueError if a header
    contradicts itself.   MemoryError if it cannot be mapped: it is not damaged, and an older checkpoint would be no remedy"""
    if any(tensor['dtype'] not in _DTYPES for tensor in header.values()):
        return None
    with open(path, 'rb') as file:
        try:
            memory, found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), {}
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise MemoryError(f'{path} cannot be mapped') from error
    for key, tensor in header.items():
        (first, end), dtype, shape = tensor['data_offsets'], np.dtype(_DTYPES[tensor['dtype']]), tuple(tensor['shape'])
        if end - first != math.prod(shape) * dtype.itemsize or first < 0 or start + end > len(memory):
            raise ValueError(f'{key}: {end - first} bytes for shape {shape}')
        found[key] = np.ndarray(shape, dtype, memory, start + first)
    return found


def _read_metadata(path):
    """Return the metadata of a complete checkpoint, reading only its header.   UserError as in _read_header"""
    return _read_header(path)[0]


def _read_header(path):
    """Return the metadata of a complete checkpoint, the headers of its tensors by name, and the offset of their data.

    Raises UserError for any other file: `_Damaged` if it may have been a checkpoint, `_Foreign` for a safetensors file of
    another program, `_TooNew` if only the version is too high.
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
        expected_size = 8 + length + max((tensor['data_offsets'][1] for tensor in header.values()), default=0)
        ours = metadata.get('format') == FORMAT
        if not all(isinstance(text, str) for text in metadata.values()):
            raise TypeError
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise _Damaged(f'{path}: not a safetensors file', 'expected a checkpoint that this program saved') from error
    if size != expected_size:
        kind = 'truncated' if size < expected_size else 'damaged'
        raise _Damaged(f'{path}: {kind} checkpoint: expected {expected_size} bytes, got {size}')
    if not ours:
        raise _Foreign(f'{path}: a safetensors file, but not a {FORMAT}; expected one that this program saved')
    version = str(metadata.get('version'))
    if re.fullmatch('[0-9]{1,9}', version) and int(version) > VERSION:
        raise _TooNew(f'{path}: checkpoint of format version {version}, and this program reads up to {VERSION}; '
                      'update pyops or take an older checkpoint')
    if version not in map(str, range(1, VERSION + 1)) or 'state' not in metadata:
        raise _Damaged(f'{path}: damaged checkpoint (no valid version and state in its header)')
    return metadata, header, 8 + length


class _Damaged(UserError):
    """A damaged checkpoint; `problem` is the message without the remedy."""

    def __init__(self, problem, remedy='take an older one'):
        super().__init__(f'{problem}; {remedy}')
        self.problem = problem


class _Foreign(UserError):
    """A safetensors file of another program."""


class _TooNew(UserError):
    """A complete checkpoint in a newer format.  It is never skipped: it may be the best one."""


# ---- a model in a file ---------------------------------------------------------------------------------------------

def tensors(params, optimizer=None, moments=None):
    """Return {name: array} of everything in a checkpoint: parameters and, with an optimizer, Adam's moments, step count and
    amax histories.

    If the optimizer averages the parameters, the average has their name, since it is used to serve; they are named `trained`.
    moments: the flat buffers of both moments, if ranks share them; None: the parameters' own
    """
    m, v = moments or (params.m, params.v)
    groups = dict(parameter=params.values) | (dict(adam_m=m, adam_v=v) if optimizer else {})
    if optimizer and optimizer.average is not None:
        groups |= dict(parameter=optimizer.average, trained=params.values)
    arrays = {f'{group}/{name}': params.view(flat, name) for group, flat in groups.items() for name in params}
    return arrays | ({'step': optimizer.count} | _histories(optimizer) if optimizer else {})


def _histories(optimizer):
    """Return {name in a checkpoint: amax history} of the operands with delayed scaling."""
    found = {} if optimizer.histories is None else optimizer.histories.tensors()
    return {f'{AMAX}{name}': history for name, history in found.items()}


def restore(params, optimizer, arrays, path, left_out=()):
    """Copy the tensors of a checkpoint into the model.  optimizer=None: parameters only, for serving.
    left_out: names of parameters that are checked and not copied
    An amax history that the checkpoint lacks, because it was trained with another recipe, begins empty, which a line reports.

    Raises UserError naming the first tensor that is missing, unknown or of another shape.
    """
    whole = optimizer and params.shares and [np.zeros(params.values.size, np.float32) for _ in range(2)]
    places = tensors(params, optimizer, whole)
    if not optimizer:
        arrays = {name: tensor for name, tensor in arrays.items() if name.startswith('parameter/')}
    else:                                       # the histories of another recipe
        lacking = [name for name, place in places.items() if name.startswith(AMAX)
                   and (name not in arrays or arrays[name].shape != place.shape)]
        if lacking:
            print(f'amax histories : {len(lacking)} of {len(_histories(optimizer))} operands have none in the checkpoint; they '
                  'begin empty', flush=True)
        places = {name: place for name, place in places.items() if name not in lacking}
        arrays = {name: tensor for name, tensor in arrays.items() if name in places or not name.startswith(AMAX)}
    for name, place in places.items():
        if name not in arrays or arrays[name].shape != place.shape:
            got = arrays[name].shape if name in arrays else 'none'
            raise UserError(f'{path}: {name}: expected shape {place.shape}, got {got}; '
                            'pass the sizes it was trained with, or another folder with -c')
    if extra := sorted(set(arrays) - set(places)):
        raise UserError(f'{path}: holds {extra[0]}, which this model does not have; give another checkpoint with -c')
    for name, place in places.items():
        if name.removeprefix('parameter/') not in left_out:
            place[...] = arrays[name]
    if whole:
        params.m[...], params.v[...] = (moment[params.shares.mine] for moment in whole)


# ---- a folder of them ----------------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Found:
    """The result of `find`.

    path: the checkpoint, or None; folder: where to save; line: line to print; warnings: one line per skipped file; tensors,
    state: contents of the checkpoint, as returned by `load`, or None; by_time: the next checkpoint of the run replaces this
    one, because it was saved by time (state['by_time']) and was not named by the user or renamed.
    """
    path: str | None
    folder: str
    line: str
    warnings: tuple[str, ...] = ()
    tensors: dict | None = dataclasses.field(default=None, compare=False, repr=False)
    state: object = dataclasses.field(default=None, compare=False, repr=False)
    by_time: bool = False


def find(path, serving=False, parameters_only=False, remedy='train first, or name another checkpoint'):
    """Load the checkpoint that `-c PATH` names, or the newest intact one of the folder PATH, and return Found.  With `serving`,
    the best one of the folder is preferred, if training kept it.   parameters_only: as in `load`
    remedy: with `serving`, the end of the error message about a folder or a file without a checkpoint

    A missing folder is created.  A missing or damaged file (PATH ends in .safetensors, or is a file) is an error, and so is
    a folder that cannot be read or written, so that this fails now and not after hours of training.  Temporary files of
    dead processes are removed.  With `serving`, nothing is created, removed or written, and finding no checkpoint is an
    error.
    """
    path = os.fspath(path)
    if not path:
        raise UserError("-c/--checkpoint: expected a checkpoint or a folder, got ''")
    is_new = not _exists(path)
    if not os.path.isdir(path) and not is_new:
        if not os.path.isfile(path):
            raise UserError(f'{path}: expected a checkpoint or a folder; this is neither')
        folder = os.path.dirname(path) or '.'
        if not serving:
            _prepare(folder)
        return Found(path, folder, f'loading from checkpoint : {path}', (),
                     *_load_or_name_another(path, serving, parameters_only))
    if is_new and path.endswith(SUFFIX):
        newest = _newest_beside(path)
        remedy = (f'the newest one there is {newest}' if newest else remedy if serving else
                  'name a folder to start from scratch')
        raise UserError(f'{path}: no such checkpoint; {remedy}')
    if not serving:
        _prepare(path)
    newest, content, warnings = (None, (None, None), ()) if is_new else (
        serving and _best(path, parameters_only) or _newest(path, serving, parameters_only))
    if newest:
        line = f'loading from checkpoint : {newest}'
    elif serving:
        bad = f' ({warnings[0]})' if warnings else ''
        raise UserError(f'{path}: {"no such folder" if is_new else "has no checkpoint"}{bad}; {remedy}')
    elif is_new:
        line = f'{path} : new folder, starting from scratch'
    else:
        line = f'{path} : no checkpoint, starting from scratch'
    _, state = content
    by_time = isinstance(state, dict) and state.get('by_time') is True and is_automatic(newest)
    return Found(newest, path, line, warnings, *content, by_time)


def check_program(found, program):
    """Print the warnings about the checkpoint found.  UserError if it belongs to another program."""
    for warning in found.warnings:
        print(warning, file=sys.stderr)
    other = found.state.get('program') if isinstance(found.state, dict) else None
    if found.path is not None and other != program:
        raise UserError(f'{found.path}: a checkpoint of {printable(other)[:_SHOWN]}, not of {program}; give another with -c')
    if found.path is not None:
        check_padding(found.path, found.state)


def check_padding(path, state):
    """Raise UserError for a seq2seq model of a version that also encoded the padding of sentences: it would translate wrongly.
    The settings of all later versions have a schedule."""
    settings = state.get('settings', {})
    if state.get('program') == 'seq2seq' and not (isinstance(settings, dict) and 'schedule' in settings):
        raise UserError(f'{path}: was trained by a version that encoded the padding of sentences, which this version leaves '
                        'out, so its translations would be wrong; train it again, or use the version that saved it')


def _exists(path):
    """Return whether the path exists, even as a dangling link.  Raises UserError if a parent folder cannot be searched."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UserError(f'{path}: cannot be reached ({_reason(error)}); make the folders on the way there readable, '
                        'or name another with -c') from error
    return True


def _load_or_name_another(path, mapped, parameters_only):
    """load(path, ...); for a damaged file the error names the newest intact checkpoint in the same folder, if any."""
    try:
        return load(path, mapped, parameters_only)
    except _Damaged as error:
        newest = _newest_beside(path)
        if newest is None:
            raise
        raise UserError(f'{error.problem}; the newest intact one there is {newest}') from error


def fresh(folder):
    """Return Found for a run without `-c`: it saves into `folder` and starts from scratch, whatever the folder contains."""
    _prepare(folder)
    return Found(None, folder, 'starting from scratch')


def last(path):
    """Return text for an error message that names the checkpoint from which a run can resume.  path: its path, or None."""
    return f'the last complete checkpoint is {path}' if path else 'there is no earlier checkpoint'


@contextlib.contextmanager
def claim(folder):
    """Lock `folder` for one training run.  Raises UserError while another run, in this or another process, holds it.

    Two runs in one folder would mix their metrics, and a resume would load whichever saved last.  The kernel releases the
    lock however a process ends.  On file systems without locks nothing is checked.
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


def check_free_space(folder, nbytes):
    """Raise UserError if the disk with `folder` has fewer than `nbytes` bytes free."""
    try:
        free = shutil.disk_usage(folder or '.').free
    except OSError as error:
        raise UserError(f'{folder}: cannot read its free space ({_reason(error)}); name another folder with -c') \
            from error
    if free < nbytes:
        raise UserError(f'{folder}: a checkpoint needs {nbytes} bytes and {free} are free; '
                        'make room or name another folder with -c')


def free_path(folder, epoch, now=None):
    """Return the path for a checkpoint saved now: an unused name, later than all checkpoints in the folder.

    The time is advanced by seconds until that holds, so that neither two saves within one second nor a clock that was set
    back (every autumn, in local time) hides a checkpoint behind another.
    """
    now = now or datetime.datetime.now()
    with contextlib.suppress(OSError):                  # an unreadable folder: saving reports it
        latest = max((key for key, _ in _listed(folder)), default=None)
        if latest and (now.strftime(_TIME), epoch) <= latest:
            now = datetime.datetime.strptime(latest[0], _TIME) + datetime.timedelta(seconds=1)
    return os.path.join(folder, name(epoch, now))


def save_or_rescue(folder, epoch, tensors, state, now=None, last_path=None):
    """Save under the next free name in `folder` and return the path.

    If that fails (a full disk), the checkpoint is saved in the system's temporary folder, so that no step is lost, and a
    UserError names it and how to resume; if that fails too, it names last_path, the last checkpoint of the run.
    """
    try:
        path = free_path(folder, epoch, now)
        save(path, tensors, state)
        return path
    except UserError as error:
        first = error
    import tempfile  # not at the top: only training needs it
    rescue = tempfile.gettempdir()
    try:
        path = free_path(rescue, epoch, now)
        save(path, tensors, state)
    except UserError as error:
        raise UserError(f'{first}; saving to {rescue} failed too; {last(last_path)}') from error
    raise UserError(f'{first}; it was saved as {path} instead; resume with -c {path}')


def save_best(folder, epoch, tensors, state):
    """Replace the checkpoint BEST of `folder`.

    It records the name that a checkpoint saved now would have, by which it is ordered among the others, also in a copy.
    """
    save(os.path.join(folder, BEST), tensors, state, os.path.basename(free_path(folder, epoch)))


def _listed(folder):
    """Yield ((date and time, epoch), path) for each .safetensors file in `folder`.  Raises OSError if it cannot be read.

    A file without a checkpoint's name gets the key of its original name, so that a renamed or copied checkpoint is sorted by
    the time it was saved.  Checkpoints of format 1 and foreign files do not record one: their key is the time of their last
    change, and epoch -1.
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


def newest_paths(folder):
    """Return the paths of the checkpoints in `folder` that were not renamed, newest first.  UserError if it is unreadable."""
    try:
        return [path for _, path in sorted(_listed(folder), reverse=True) if is_automatic(path)]
    except OSError as error:
        raise UserError(f'{folder}: cannot read the folder ({_reason(error)}); make it readable, or name another') from error


def oldest_name(paths):
    """Return the name by which the oldest of these checkpoints is ordered: see the argument `recorded` of save()."""
    when, epoch = min(_key(os.path.basename(path)) or _key_inside(path) or _key_of_change(path) for path in paths)
    return f'checkpoint_{when}_{max(0, epoch)}{SUFFIX}'


def is_automatic(path):
    """Return whether the file has a name as save_or_rescue gives, and was not renamed."""
    return _key(os.path.basename(path)) is not None


def _key(file_name):
    """Return (date and time, epoch) from a checkpoint's name; None for any other name."""
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


def _best(folder, parameters_only):
    """Return the same as _newest for the best checkpoint of a folder, None if there is none or it is damaged."""
    path = os.path.join(folder, BEST)
    try:
        return (path, load(path, True, parameters_only), ()) if os.path.exists(path) else None
    except UserError:
        return None


def _newest(folder, mapped=False, parameters_only=False):
    """Return (path, (tensors, state), warnings) of the newest intact checkpoint; None and (None, None) if there is none.

    warnings: one line per newer file that was skipped; foreign files are reported only if there is no checkpoint.
    Raises UserError for a folder that cannot be read, and for a newer checkpoint in a newer format.
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
            return path, load(path, mapped, parameters_only), tuple(warnings)
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
    """Return the path of the newest intact checkpoint in the folder of `path`, or None."""
    try:
        return _newest(os.path.dirname(path) or '.')[0]
    except UserError:
        return None


def _prepare(folder):
    """Create `folder` if it is missing, test that a file can be written there, and remove temporary files of dead processes."""
    import tempfile

    import safetensors  # noqa: F401    fail now, not at the first save
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
    """Return whether another process has this id.  Our own id counts as dead: we save nothing while we search for a
    checkpoint, and in a container the killed process often had the same id."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass                                            # it runs under another user
    return True


def _reason(error):
    return error.strerror or type(error).__name__


def _remedy(error, folder, nbytes):
    """Return the remedy for a file of nbytes that could not be written; ' or name another folder with -c' follows it."""
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
