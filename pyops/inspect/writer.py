"""What writes a dump: one file a tensor and a manifest, by a thread, so that a training step waits for no disk.

A dump is a folder.  Its manifest.jsonl is appended a line at a time and says what the files hold; docs/saving.md has the
kinds of lines.  The names of files are made of what they hold:

    20250908_092156_0001_attention_L0_forward_hifp8_query.safetensors
    timestamp       counter  layer type  operation  format  tensor

Nothing that happens to the disk ends a training run: what could not be written is counted, warned about once, noted in the
manifest if that still takes a line, and told at the end.
"""
import contextlib
import fcntl
import io
import json
import os
import sys
import threading
import time
from collections import Counter, deque
from typing import NamedTuple

import numpy as np

from pyops.errors import UserError
from pyops.files import write_atomically

VERSION = 1
MANIFEST = 'manifest.jsonl'
FORMATS = 'safetensors', 'pt'
HEADER = 4096                   # bytes that a tensor takes beside its numbers, at most: its file's header, its line
UNDER_WAY = 256 * 2**20         # bytes of tensors that wait for the disk before the writer lets its caller wait
_PENDING = 10_000               # lines that are kept for a disk that takes none
_TIME = '%Y%m%d_%H%M%S'


class Summary(NamedTuple):
    """What a Writer did.  bytes: of the files; lost: how many tensors; reasons: {why: how many of them}."""
    folder: str
    tensors: int
    bytes: int
    lost: int
    reasons: dict

    def __str__(self):
        why = '; '.join(f'{n} for {reason}' if len(self.reasons) > 1 else reason for reason, n in self.reasons.items())
        return (f'tensors saved : {self.tensors} ({size_text(self.bytes)}) in {self.folder}'
                + (f', {self.lost} LOST ({why})' if self.lost else ''))


class Writer:
    """Writes tensors into a folder, which is made where it is missing.

    limit: bytes of tensors, HEADER for each included, after which no more are taken; None: no limit
    as_: 'safetensors' or 'pt', PyTorch's own format, readable by torch.load(weights_only=True)
    run: {'program': name, 'origin': 'pyops' or 'torch', 'settings': {...}} for the manifest
    UserError where the folder cannot be written, another writer is at work there, or torch is missing for 'pt'.
    """

    def __init__(self, folder, limit=None, as_='safetensors', run=None):
        self.folder, self.limit, self.suffix = os.fspath(folder), limit, as_
        self._serialise = {'safetensors': _safetensors, 'pt': _pt}[as_]
        if as_ == 'pt':
            need_torch()
        self.taken = self.written = self.tensors = self.counter = 0     # bytes taken and written, tensors written, and taken
        self.is_full = False                # a tensor went beyond the limit
        self._lost, self._warned, self._steps = Counter(), False, 0
        self._pending, self._is_whole = deque(maxlen=_PENDING), True    # lines to be written; the manifest ends with a line
        try:
            os.makedirs(self.folder, exist_ok=True)
            self._begin_a_second()
            self._manifest = open(os.path.join(self.folder, MANIFEST), 'a+b', buffering=0)
            self._claim()
            if size := self._manifest.seek(0, os.SEEK_END):
                self._manifest.seek(size - 1)
                self._is_whole = self._manifest.read(1) == b'\n'
        except OSError as error:
            raise UserError(f'{self.folder}: cannot save tensors there ({error.strerror}); name a folder that can be '
                            'written') from error
        self._queue, self._bytes_under_way, self._failure = deque(), 0, None
        self._changed, self._is_closed = threading.Condition(), False
        self._line(kind='run', version=VERSION, **({'program': '', 'origin': 'pyops', 'settings': {}} | (run or {})),
                   started=time.strftime(_TIME))
        self._thread = threading.Thread(target=self._work, name='tensor writer', daemon=True)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # ---- what a caller says ------------------------------------------------------------------------

    def batch(self, step, lengths, tokens):
        """Before the tensors of a step.  lengths {'source': [B], 'target': [B]}, tokens {'source': [[words] x B], ...}."""
        self._put(lambda: self._line(kind='batch', step=step, lengths=lengths, tokens=tokens))

    def tensor(self, array, *, layer, layer_type, index, operation, name, step, time=None, format='fp32', quant_type=None,
               options=None, axis=-1, uses=(), mask=(), lengths=None, owned=False):
        """Take a float32 array -> whether it was taken: not where it would go beyond the limit.

        layer: its name in the model;  layer_type, index: 'linear' or 'attention', counted in order of the forward pass;
        operation: 'forward' or 'backward';  name: 'input', 'weight', ...;  time: of a recurrent layer, the step
        format, options, axis: how it was rounded when used (the array is what was not rounded yet), uses: each time it was
        quant_type: for the file's name, where that is another: the format that the layer calculates with
        mask: [{'time': axis, 'batch': axis, 'of': key}], where lengths[key] (B,) says what is padding; left out of statistics.
        A time axis of None: all is of the step `time`
        owned: nobody else writes to the array, so it need not be copied
        """
        array = np.asarray(array) if owned else np.array(array, np.float32, order='C')
        if self.limit is not None and self.taken + array.nbytes + HEADER > self.limit:
            self.is_full = True
        if self.is_full:
            return False
        self.taken += array.nbytes + HEADER
        self.counter += 1
        stem = file_stem(self.counter, layer_type, index, operation, quant_type or format, name, time)
        entry = dict(kind='tensor', file=f'{stem}.{self.suffix}', counter=self.counter, layer=layer, layer_type=layer_type,
                     index=index, operation=operation, name=name, step=step, time=time, shape=list(array.shape),
                     dtype='float32', format=format, options=dict(options or {}), axis=axis, uses=list(uses), mask=list(mask))
        self._put(lambda: self._write(entry, array, lengths), array.nbytes)
        return True

    def steps(self, values):
        """values: (step, loss, norm) of several training steps."""
        values = list(values)
        self._put(lambda: self._lines([dict(kind='step', step=step, loss=_plain(loss), norm=_plain(norm))
                                       for step, loss, norm in values]))
        self._steps += len(values)

    def close(self):
        """Wait until everything is written -> Summary.  A second time: the same again."""
        with self._changed:
            closes, self._is_closed = not self._is_closed, True
            self._changed.notify_all()
        self._thread.join()
        if closes:
            if self._failure is None:
                self._line(kind='end', steps=self._steps, tensors=self.tensors, bytes=self.written)
            with contextlib.suppress(OSError):      # a child process, of a loader of data, may hold the file open
                fcntl.flock(self._manifest, fcntl.LOCK_UN)
            self._manifest.close()
        self._raise()
        return Summary(self.folder, self.tensors, self.written, self._lost.total(), dict(self._lost))

    # ---- the thread ----------------------------------------------------------------------------------

    def _put(self, job, nbytes=0):
        with self._changed:
            if self._is_closed:
                raise RuntimeError('this writer was closed')
            self._changed.wait_for(lambda: self._failure or self._bytes_under_way < UNDER_WAY)
            self._raise()
            self._queue.append((job, nbytes))
            self._bytes_under_way += nbytes
            self._changed.notify_all()

    def _work(self):
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closed)
                if not self._queue:
                    return
                job, nbytes = self._queue.popleft()
            try:
                job()
            except BaseException as error:          # a bug; who waits for this thread must hear of it
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            del job                                 # and the array with it
            with self._changed:
                self._bytes_under_way -= nbytes
                self._changed.notify_all()

    def _raise(self):
        if self._failure is not None:
            raise RuntimeError('the thread that writes tensors failed') from self._failure

    def _write(self, entry, array, lengths):
        from pyops.inspect.statistics import describe
        path = os.path.join(self.folder, entry['file'])
        try:
            entry['statistics'] = describe(array, padding(array.shape, entry['mask'], lengths, entry['time']))
            text = json.dumps(entry)
            nbytes = write_atomically(path, *self._serialise(array, text))
        except (OSError, MemoryError) as error:
            self._lose(entry, getattr(error, 'strerror', None) or 'no memory')
            return
        self.tensors += 1
        self.written += nbytes
        self._text(text)

    def _lose(self, entry, reason):
        self._lost[reason] += 1
        self._warn(f'{os.path.join(self.folder, entry["file"])}: cannot write a tensor ({reason}); training goes on, and '
                   'what cannot be written is lost')
        self._line(kind='lost', step=entry['step'], file=entry['file'], reason=reason)

    def _warn(self, text):
        if not self._warned:
            self._warned = True
            print(f'warning: {text}', file=sys.stderr, flush=True)

    def _line(self, **values):
        self._lines([values])

    def _lines(self, lines):
        self._text(*map(json.dumps, lines))

    def _text(self, *lines):
        """Append lines to the manifest, and before them those that it would not take."""
        self._pending.extend(lines)
        data = '\n'.join(([] if self._is_whole else ['']) + [*self._pending, '']).encode()
        try:
            n = self._manifest.write(data)
            if n == len(data):
                self._pending.clear()
                self._is_whole = True
                return
            reason = 'disk full'
        except OSError as error:
            n, reason = 0, error.strerror
        if n:                                       # what was whole was taken; the rest comes again, from the line that broke
            done = data[:n].count(b'\n') - (not self._is_whole)
            for _ in range(done):
                self._pending.popleft()
            self._is_whole = data[n - 1:n] == b'\n'
        self._warn(f'{os.path.join(self.folder, MANIFEST)}: cannot write the manifest ({reason}); training goes on')

    def _claim(self):
        """Hold the folder: files of two writers could have one name, and lines of a manifest belong to the run above them.
        The kernel lets go however a process ends; where a file system has no locks there is no guard."""
        try:
            fcntl.flock(self._manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._manifest.close()
            raise UserError(f'{self.folder}: another run is saving tensors there; wait until it is done, or name another '
                            'folder') from error
        except OSError:
            pass

    def _begin_a_second(self):
        """Let the second go in which an earlier run wrote here, so that no two files have one name."""
        names = os.listdir(self.folder)
        while any(name.startswith(time.strftime(_TIME)) for name in names):
            time.sleep(0.05)


# ---- names, files --------------------------------------------------------------------------------------------------

def file_stem(counter, layer_type, index, operation, format, name, step=None):
    """The name of a tensor's file, without what says how it is stored; step: of time, in a recurrent layer."""
    return (f'{time.strftime(_TIME)}_{counter:04d}_{layer_type}_L{index}_{operation}_{format}_{name}'
            + ('' if step is None else f'_t{step}'))


def padding(shape, mask, lengths, time=None):
    """The bool array that broadcasts to `shape` and is True where nothing is padding, or None where nothing can be.

    mask: [{'time': axis, 'batch': axis, 'of': key}], where an axis of None means that all is of the one `time`
    lengths: {key: (B,)}
    """
    def along(axis, array):
        return np.asarray(array).reshape([-1 if i == axis else 1 for i in range(len(shape))])

    valid = None
    for part in mask:
        t, b = part['time'], part['batch']
        inside = (time if t is None else along(t, np.arange(shape[t]))) < along(b, lengths[part['of']])
        valid = inside if valid is None else valid & inside
    return valid


def size_text(nbytes):
    """1234567 -> '1.2 MB'."""
    for unit in ('bytes', 'KB', 'MB', 'GB', 'TB'):
        if nbytes < 1000 or unit == 'TB':
            return f'{nbytes:.0f} {unit}' if unit == 'bytes' else f'{nbytes:.1f} {unit}'
        nbytes /= 1000


def need_torch():
    """UserError where torch is not installed."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise UserError('--save-as pt: torch is not installed: install it with: pip install torch') from error


def _safetensors(array, text):
    """The parts of a safetensors file.  By hand: the library would copy the numbers twice."""
    header = json.dumps({'__metadata__': {'pyops': text},
                         'tensor': {'dtype': 'F32', 'shape': array.shape, 'data_offsets': [0, array.nbytes]}}).encode()
    header += b' ' * (-len(header) % 8)
    return [len(header).to_bytes(8, 'little') + header, np.ascontiguousarray(array, '<f4')]


def _pt(array, text):
    import torch
    file = io.BytesIO()
    torch.save({'tensor': torch.from_numpy(array), 'pyops': text}, file)
    return [file.getbuffer()]


def _plain(value):
    """A number for JSON, which has no NaN."""
    return float(value) if value is not None and np.isfinite(value) else None
