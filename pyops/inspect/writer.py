"""Writer of a dump: one file per tensor and a manifest, written by a thread so that training does not wait for the disk.

A dump is a folder.  Its manifest.jsonl, appended line by line, describes the files; docs/saving.md lists the kinds of lines.
File names contain the most important fields:

    20250908_092156_0001_attention_L0_forward_hifp8_query.safetensors
    timestamp       counter  layer type  operation  format  tensor

Disk errors never end a training run.  A tensor that cannot be written is counted, recorded in the manifest if possible and
included in the summary; the first one also prints a warning.
"""
from __future__ import annotations

import contextlib
import fcntl
import io
import json
import math
import os
import sys
import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from pyops.errors import UserError
from pyops.files import BLOCK, write_atomically, write_past_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pyops.typing import PathLike, Shape

VERSION = 1
MANIFEST = 'manifest.jsonl'
FORMATS = 'safetensors', 'pt'
HEADER = BLOCK + 2048           # most bytes per tensor in addition to its values: file header and manifest line
LARGE = 2**21                   # bytes of an array that is written past the page cache; it costs as much for smaller ones
QUEUE_LIMIT = 256 * 2**20       # bytes of queued tensors above which `tensor` blocks until the disk catches up
_PENDING = 10_000               # manifest lines buffered while the disk is full
_TIME = '%Y%m%d_%H%M%S'


class WriterSummary(NamedTuple):
    """Result of a Writer.  tensors, lost: number written and not written; bytes: total file size; reasons: {error: number}."""
    folder: str
    tensors: int
    bytes: int
    lost: int
    reasons: dict

    def __str__(self) -> str:
        reasons = '; '.join(f'{n} for {reason}' if len(self.reasons) > 1 else reason for reason, n in self.reasons.items())
        return (f'tensors saved : {self.tensors} ({size_text(self.bytes)}) in {self.folder}'
                + (f', {self.lost} LOST ({reasons})' if self.lost else ''))


class Writer:
    """Write tensors to a folder, which is created if missing.

    limit: total bytes, with HEADER per tensor, beyond which no tensor is accepted; None: no limit
    as_: 'safetensors' or 'pt' (PyTorch's format, readable by torch.load with weights_only=True)
    run: {'program': name, 'origin': 'pyops' or 'torch', 'settings': {...}} for the manifest
    UserError if the folder cannot be written, another writer uses it, or 'pt' is given and torch is not installed.
    """

    def __init__(self, folder: PathLike, limit: int | None = None, as_: str = 'safetensors',
                 run: Mapping[str, Any] | None = None) -> None:
        self.folder, self.limit, self.suffix = os.fspath(folder), limit, as_
        self._save = {'safetensors': _save_safetensors, 'pt': _save_pt}[as_]
        if as_ == 'pt':
            need_torch()
        self.taken = self.written = 0       # bytes accepted, bytes written
        self.counter = self.tensors = 0     # tensors accepted, tensors written
        self.is_full = False                # a tensor exceeded the limit
        self._lost: Counter[str] = Counter()
        self._lost_files: dict[str, str] = {}       # file -> reason
        self._warned, self._steps = False, 0
        self._pending: deque[str] = deque(maxlen=_PENDING)      # manifest lines not yet written
        self._ends_line = True                      # the manifest is empty or ends with a newline
        try:
            os.makedirs(self.folder, exist_ok=True)
            self._wait_for_unused_second()
            self._manifest = open(os.path.join(self.folder, MANIFEST), 'a+b', buffering=0)
            self._lock_folder()
            if size := self._manifest.seek(0, os.SEEK_END):
                self._manifest.seek(size - 1)
                self._ends_line = self._manifest.read(1) == b'\n'
        except OSError as error:
            raise UserError(f'{self.folder}: cannot save tensors there ({error.strerror}); name a folder that can be '
                            'written') from error
        self._queue: deque[tuple[Callable[[], Any], int]] = deque()
        self._queued_bytes = self._free_bytes = 0
        self._free: dict[int, list[np.ndarray]] = {}            # number of values -> buffers of tensors that are written
        self._failure: BaseException | None = None
        self._changed, self._is_closed = threading.Condition(), False
        self._line(kind='run', version=VERSION, **({'program': '', 'origin': 'pyops', 'settings': {}} | dict(run or {})),
                   started=time.strftime(_TIME))
        self._thread = threading.Thread(target=self._work, name='tensor writer', daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # ---- called by the program -------------------------------------------------------------------------

    def batch(self, step: int, lengths: Mapping[str, Any], tokens: Mapping[str, Any]) -> None:
        """Record the sentences of a step, before its tensors.

        lengths: {'source': [B], 'target': [B]};  tokens: {'source': [[words] x B], ...}
        """
        self._put(lambda: self._line(kind='batch', step=step, lengths=lengths, tokens=tokens))

    def tensor(self, array: np.ndarray, *, layer: str, layer_type: str, index: int, operation: str, name: str, step: int,
               time: int | None = None, format: str = 'fp32', quant_type: str | None = None,
               options: Mapping[str, Any] | None = None, axis: int | str = -1, uses: Sequence[Mapping[str, Any]] = (),
               mask: Sequence[Mapping[str, Any]] = (), lengths: Mapping[str, Any] | None = None, owned: bool = False,
               dtype: str = 'float32', same: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """Queue a float32 array for writing.  Return its manifest line, None if it would exceed the limit.

        layer: name in the model;  layer_type, index: 'linear' or 'attention', numbered in order of the forward pass
        operation: 'forward' or 'backward';  name: 'input', 'weight', ...;  time: time step of a recurrent layer
        format, options, axis: the rounding applied when the layer used the array, which itself is not rounded;
        uses: the roundings of all uses;  quant_type: the format of the layer, for the file name (default: format)
        mask: [{'time': axis, 'batch': axis, 'of': key}]; lengths[key] (B,) has the lengths without padding.  Padding is
        excluded from the statistics.  A time axis of None means that the whole array belongs to time step `time`
        owned: the caller will not modify the array, so it is not copied
        dtype: in the file, 'float32' or 'bfloat16', which must represent the numbers exactly
        same: the line of an earlier tensor with the same values, padding and dtype; the new file is a link to its file
        """
        from pyops.inspect.statistics import describe
        values = np.asarray(array)
        nbytes = 0 if same else values.size * (2 if dtype == 'bfloat16' else 4)
        if self.limit is not None and self.taken + nbytes + HEADER > self.limit:
            self.is_full = True
        if self.is_full:
            return None
        self.taken += nbytes + HEADER
        self.counter += 1
        stem = file_stem(self.counter, layer_type, index, operation, quant_type or format, name, time)
        entry = dict(kind='tensor', file=f'{stem}.{self.suffix}', counter=self.counter, layer=layer, layer_type=layer_type,
                     index=index, operation=operation, name=name, step=step, time=time, shape=list(values.shape),
                     dtype=dtype, format=format, options=dict(options or {}), axis=axis, uses=list(uses), mask=list(mask))
        if same:
            entry['statistics'] = same['statistics']
            self._put(lambda: self._link(entry, same['file']))
            return entry
        is_whole = values.dtype == np.float32 and values.flags.c_contiguous
        kept = values if owned and is_whole else self._buffer(values.shape)
        if not is_whole:
            kept[...] = values
        entry['statistics'] = describe(values if is_whole else kept, padding(values.shape, mask, lengths, time),
                                       kept if is_whole and not owned else None)
        self._put(lambda: self._write(entry, kept, kept is not values), kept.nbytes)
        return entry

    def steps(self, values: Iterable[tuple[int, float | None, float | None]]) -> None:
        """Record training steps.  values: an iterable of (step, loss, gradient norm)."""
        values = list(values)
        self._put(lambda: self._lines([dict(kind='step', step=step, loss=_finite(loss), norm=_finite(norm))
                                       for step, loss, norm in values]))
        self._steps += len(values)

    def close(self) -> WriterSummary:
        """Wait until everything is written and return the WriterSummary.  May be called again, with the same result."""
        with self._changed:
            is_first, self._is_closed = not self._is_closed, True
            self._changed.notify_all()
        self._thread.join()
        if is_first:
            if self._failure is None:
                self._line(kind='end', steps=self._steps, tensors=self.tensors, bytes=self.written)
            with contextlib.suppress(OSError):      # unlock explicitly: a child process may still have the file open
                fcntl.flock(self._manifest, fcntl.LOCK_UN)
            self._manifest.close()
        self._raise()
        return WriterSummary(self.folder, self.tensors, self.written, self._lost.total(), dict(self._lost))

    # Memory that was just allocated costs a page fault every 4 KiB, several times the copy, so buffers are used again.

    def _buffer(self, shape: Shape) -> np.ndarray:
        from pyops.backend.host import aligned
        with self._changed:
            free = self._free.get(math.prod(shape))
            if free:
                self._free_bytes -= free[-1].nbytes
                return free.pop().reshape(shape)
        return aligned(np.empty, shape, np.float32, BLOCK)

    def _give_back(self, array: np.ndarray) -> None:
        with self._changed:
            if self._free_bytes + self._queued_bytes <= QUEUE_LIMIT:
                self._free.setdefault(array.size, []).append(array)
                self._free_bytes += array.nbytes

    # ---- the thread ------------------------------------------------------------------------------------

    def _put(self, job: Callable[[], Any], nbytes: int = 0) -> None:
        with self._changed:
            if self._is_closed:
                raise RuntimeError('the writer is closed')
            self._changed.wait_for(lambda: self._failure or self._queued_bytes < QUEUE_LIMIT)
            self._raise()
            self._queue.append((job, nbytes))
            self._queued_bytes += nbytes
            self._changed.notify_all()

    def _work(self) -> None:
        if sys.platform == 'linux':                 # there a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closed)
                if not self._queue:
                    return
                job, nbytes = self._queue.popleft()
            try:
                job()
            except BaseException as error:          # a bug: re-raised in the caller's thread
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            del job                                 # frees the array
            with self._changed:
                self._queued_bytes -= nbytes
                self._changed.notify_all()

    def _raise(self) -> None:
        if self._failure is not None:
            raise RuntimeError('the tensor writer thread failed') from self._failure

    def _write(self, entry: dict[str, Any], array: np.ndarray, is_buffer: bool) -> None:
        path = os.path.join(self.folder, entry['file'])
        try:
            text = json.dumps(entry)
            # if the disk is slower than training, the cache takes what it has room for
            write = write_atomically if self._queued_bytes > QUEUE_LIMIT * 3 // 4 else write_past_cache
            nbytes = self._save(write, path, array, text, entry['dtype'])
        except (OSError, MemoryError) as error:
            self._count_lost(entry, getattr(error, 'strerror', None) or 'no memory')
            return
        finally:
            if is_buffer:
                self._give_back(array)
        self.tensors += 1
        self.written += nbytes
        self._append(text)

    def _link(self, entry: dict[str, Any], file: str) -> None:
        """Write a tensor by giving its file another name: a hard link, or a copy on a file system without links."""
        if file in self._lost_files:
            self._count_lost(entry, self._lost_files[file])
            return
        source, path = (os.path.join(self.folder, name) for name in (file, entry['file']))
        try:
            try:
                os.link(source, path)
            except OSError:
                with open(source, 'rb') as opened:
                    self.written += write_atomically(path, opened.read())
        except (OSError, MemoryError) as error:
            self._count_lost(entry, getattr(error, 'strerror', None) or 'no memory')
            return
        self.tensors += 1
        self._append(json.dumps(entry))

    def _count_lost(self, entry: dict[str, Any], reason: str) -> None:
        self._lost[reason] += 1
        self._lost_files[entry['file']] = reason
        self._warn(f'{os.path.join(self.folder, entry["file"])}: cannot write a tensor ({reason}); training goes on, and '
                   'tensors that cannot be written are lost')
        self._line(kind='lost', step=entry['step'], file=entry['file'], reason=reason)

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            print(f'warning: {text}', file=sys.stderr, flush=True)

    def _line(self, **values: Any) -> None:
        self._lines([values])

    def _lines(self, lines: Iterable[dict[str, Any]]) -> None:
        self._append(*map(json.dumps, lines))

    def _append(self, *lines: str) -> None:
        """Append lines to the manifest, after those that could not be written earlier."""
        self._pending.extend(lines)
        data = '\n'.join(([] if self._ends_line else ['']) + [*self._pending, '']).encode()
        try:
            n = self._manifest.write(data)
            if n == len(data):
                self._pending.clear()
                self._ends_line = True
                return
            reason = 'disk full'
        except OSError as error:
            n, reason = 0, str(error.strerror)
        if n:                                       # drop the complete lines; a partial one is written again as a whole
            done = data[:n].count(b'\n') - (not self._ends_line)
            for _ in range(done):
                self._pending.popleft()
            self._ends_line = data[n - 1:n] == b'\n'
        self._warn(f'{os.path.join(self.folder, MANIFEST)}: cannot write the manifest ({reason}); training goes on')

    def _lock_folder(self) -> None:
        """Lock the folder against other writers, whose file names and manifest lines would mix with ours.

        The kernel releases the lock when the process ends in any way.  On a file system without locks nothing is checked.
        """
        try:
            fcntl.flock(self._manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._manifest.close()
            raise UserError(f'{self.folder}: another run is saving tensors there; wait until it is done, or name another '
                            'folder') from error
        except OSError:
            pass

    def _wait_for_unused_second(self) -> None:
        """Wait until the current second is in no file name of an earlier run, so that names are unique."""
        names = os.listdir(self.folder)
        while any(name.startswith(time.strftime(_TIME)) for name in names):
            time.sleep(0.05)


# ---- names, files ------------------------------------------------------------------------------------------------------

def file_stem(counter: int, layer_type: str, index: int, operation: str, format: str, name: str,
              step: int | None = None) -> str:
    """Return the name of a tensor's file without its suffix.  step: time step of a recurrent layer."""
    return (f'{time.strftime(_TIME)}_{counter:04d}_{layer_type}_L{index}_{operation}_{format}_{name}'
            + ('' if step is None else f'_t{step}'))


def padding(shape: Shape, mask: Sequence[Mapping[str, Any]], lengths: Any,
            time: int | None = None) -> np.ndarray | None:
    """Return a bool array that broadcasts to `shape` and is False at padding, or None if `mask` is empty.

    mask: [{'time': axis, 'batch': axis, 'of': key}]; a time axis of None means that the whole tensor belongs to step `time`
    lengths: {key: (B,)}
    """
    def along(axis: int, array: Any) -> np.ndarray:
        return np.asarray(array).reshape([-1 if i == axis else 1 for i in range(len(shape))])

    valid: Any = None
    for part in mask:
        t, b = part['time'], part['batch']
        inside = (time if t is None else along(t, np.arange(shape[t]))) < along(b, lengths[part['of']])
        valid = inside if valid is None else valid & inside
    return valid


def size_text(nbytes: float) -> str:
    """1234567 -> '1.2 MB'."""
    if nbytes < 1000:
        return f'{nbytes:.0f} bytes'
    for unit in ('KB', 'MB', 'GB'):
        nbytes /= 1000
        if nbytes < 1000:
            return f'{nbytes:.1f} {unit}'
    return f'{nbytes / 1000:.1f} TB'


def need_torch() -> None:
    """Raise UserError if torch is not installed."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise UserError('--save-as pt: torch is not installed: install it with: pip install torch') from error


def _save_safetensors(write: Callable[..., int], path: str, array: np.ndarray, text: str, dtype: str) -> int:
    """Write a safetensors file and return its size.  The library's own function would copy the values twice.

    write: write_atomically, or for large arrays write_past_cache
    """
    values = np.ascontiguousarray(array, '<f4')
    if dtype == 'bfloat16':                     # the upper halves
        values = np.ascontiguousarray(values.view('<u2').reshape(-1, 2)[:, 1])
    header = json.dumps({'__metadata__': {'pyops': text},
                         'tensor': {'dtype': {'float32': 'F32', 'bfloat16': 'BF16'}[dtype], 'shape': array.shape,
                                    'data_offsets': [0, values.nbytes]}}).encode()
    is_large = values.nbytes >= LARGE
    header += b' ' * (-(8 + len(header)) % (BLOCK if is_large else 8))
    return (write if is_large else write_atomically)(path, len(header).to_bytes(8, 'little') + header, values)


def _save_pt(write: Callable[..., int], path: str, array: np.ndarray, text: str, dtype: str) -> int:
    import torch
    file = io.BytesIO()
    torch.save({'tensor': torch.from_numpy(array).to(getattr(torch, dtype)), 'pyops': text}, file)
    return write_atomically(path, file.getbuffer())


def _finite(value: float | None) -> float | None:
    """Return a float, or None for NaN and infinities, which JSON does not support."""
    return float(value) if value is not None and np.isfinite(value) else None
