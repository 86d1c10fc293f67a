"""Faults of a training run: calls that fail, power cuts and kills.   Shared by the tests and scripts/faults.py"""
import contextlib
import ctypes
import errno
import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from conftest import ROOT, environment_without

from pyops import backend, checkpoint, fit
from pyops.errors import exits_cleanly
from pyops.init import normal
from pyops.optim import Adam
from pyops.params import Parameters, Spec

# ---- memory ----------------------------------------------------------------------------------------------------------

CHILD = '''
import ctypes, sys, threading
sys.path[:0] = ['tests', 'tests/helpers']
import numpy as np
from rows import TABLE, Run
shim = ctypes.CDLL(None)

def outcome(row, size, fail_at):
    """Run an op in a new thread, which has no scratch memory yet, then again; the first time an allocation fails."""
    found = []

    def run():
        shim.fail_at(fail_at)
        try:
            Run(row, size)
            found.append('done')
        except MemoryError as error:
            found.append(str(error))
        found.append(shim.allocations())
        shim.fail_at(0)
        again = Run(row, size)
        found.append([again.y, *again.grads.values()])
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found

SHARED = {'linear': (600, 200, 300), 'linear_cross_entropy': (5, 100, 64, 1100), 'attention': (8, 8, 100, 4, 64),
          'gru-reset-after': (6, 64, 100, 128), 'lstm': (6, 64, 100, 128), 'conv2d': (64, 16, 16, 16, 32, 3, 3)}
failed, threads = 0, int(sys.argv[1])
sizes = {row.name: row.sizes[1] for row in TABLE} if threads == 1 else SHARED
for row in TABLE:
    if row.name not in sizes:
        continue
    size = sizes[row.name]
    text, calls, expected = outcome(row, size, 0)
    assert text == 'done', (row.name, text)
    for n in range(1, calls + 1):
        text, made, results = outcome(row, size, n)
        assert 'memory' in text or threads > 1 and made < n, (row.name, n, text)        # a thread may come too late for work
        assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(results, expected, strict=True)), (row.name, n)
        failed += 'memory' in text
print(failed)
'''


def fail_allocations(folder, threads=1):
    """Let each allocation of each kernel of the op table fail once; with more threads, of those that share their work.

    Return how many failed, or None without a C compiler.
    RuntimeError if a call has no error, or the next one other results"""
    return _preloaded(folder, CHILD, str(threads), OMP_NUM_THREADS=str(threads))


def _preloaded(folder, code, *arguments, **environment):
    """Run Python code in a process in which calls can fail.   Return the number that it prints, or None without a C compiler.
    RuntimeError with its errors"""
    shim = folder / 'fail_calls.so'
    built = subprocess.run([os.environ.get('CC', 'gcc'), '-shared', '-fPIC', '-O1', '-o', shim,
                            ROOT / 'tests/training/fail_calls.c', '-ldl'], capture_output=True, text=True)
    if built.returncode:
        return None
    done = subprocess.run([sys.executable, '-c', code, *arguments], cwd=ROOT, capture_output=True, text=True,
                          env=environment_without('PYOPS_BACKEND', LD_PRELOAD=str(shim), **environment))
    if done.returncode:
        raise RuntimeError(done.stderr)
    return int(done.stdout.split()[-1])


# ---- writes and mappings of any file ---------------------------------------------------------------------------------

FILES_CHILD = '''
import sys
sys.path[:0] = ['tests', 'tests/helpers']
import pathlib
from faults import fail_file_calls
print(fail_file_calls(pathlib.Path(sys.argv[1])))
'''


def fail_writes_and_mappings(folder):
    """Let each write to a file and each mapping of one fail once, in training and in all else that writes or maps files.

    Return how many failed, or None without a C compiler.   RuntimeError if one has no line, or the next try other results"""
    (work := folder / 'work').mkdir()
    return _preloaded(folder, FILES_CHILD, str(work), OMP_NUM_THREADS='1')


def fail_file_calls(folder):
    """The same, in a process with the preloaded library."""
    shim, failed = ctypes.CDLL(None), 0
    for name, (prepare, run) in WRITERS.items():
        expected = None
        for n in range(1000):
            place, text, code, found = folder / f'{name}_{n}', io.StringIO(), 0, None
            (rescue := place / 'rescue').mkdir(parents=True)
            prepare(place)
            tempfile.tempdir = str(rescue)
            with contextlib.redirect_stderr(text), contextlib.redirect_stdout(io.StringIO()):
                shim.fail_file_at(n)
                try:
                    with exits_cleanly('faults'):
                        found = run(place)
                except SystemExit as left:
                    code = left.code
                finally:
                    calls = shim.file_calls()
                    shim.fail_file_at(0)
            if n > calls:
                break
            lines = text.getvalue().splitlines()
            assert not n or len(lines) <= 2 and all(line.isprintable() for line in lines), (name, n, lines)
            assert not code or code == 2 and lines[-1].startswith('faults: error: '), (name, n, code, lines)
            assert 'standard output' not in text.getvalue(), (name, n, lines)
            expected = expected or found
            assert code or found == expected or name == 'dumping', (name, n, found)     # of a dump, a tensor may be lost
            is_rescued = bool(lines) and f'resume with -c {rescue}' in lines[-1]
            with contextlib.redirect_stdout(io.StringIO()):
                found = run(rescue if is_rescued else place)
            assert found == expected, (name, n, found, lines)
            failed += n > 0
        assert n > 1, name
    return failed


def _trained(folder):
    train(folder)
    return tensors_of(folder)


def _prepare_text(folder):
    (folder / 'text').write_text(TEXT)


TEXT = 'Go now.\tVa maintenant.\nHe sleeps.\tIl dort.\n'


def _packed(folder):
    from pyops.text.mapped import Packed, pack
    pack(str(folder / 'text'), str(folder / 'packed'), dict(tokenizer='word', min_count=1, vocabulary=265, num_steps=8))
    return Packed(str(folder / 'packed')).pairs('train').digest()


def _cached(folder):
    from pyops.text.corpus import Corpus, parse
    os.environ['PYOPS_CACHE'] = str(folder / 'cache')
    data = TEXT.encode()
    found = [Corpus.cached('lines', io.BytesIO(data), lambda: parse(data, 'lines'), None) for _ in range(2)]
    return [[list(side.tokens), side.ids.tolist()] for corpus in found for side in (corpus.sources, corpus.targets)]


def _mapped(folder):
    """Return the newest checkpoint: an older one is no answer to a lack of memory."""
    for epoch in (1, 2):
        path = folder / f'checkpoint_20260101_000000_{epoch}.safetensors'
        if not path.exists():
            checkpoint.save(path, {'parameter/w': np.full(5, epoch, np.float32)}, {'program': 'none'})
    return [checkpoint.find(folder, serving=serving).tensors['parameter/w'].tobytes() for serving in (False, True)]


def _dumped(folder):
    """Return the tensors that were saved, in a new folder.  Those of earlier folders can be read, if perhaps fewer."""
    from pyops.inspect import logs
    from pyops.inspect.writer import Writer
    places = [*sorted(folder.glob('tensors_*')), folder / f'tensors_{len(list(folder.iterdir()))}']
    with Writer(places[-1]) as writer:
        for step in range(2):
            writer.tensor(np.full(3, step, np.float32), layer='a', layer_type='linear', index=0, operation='forward',
                          name='input', step=step)
            writer.steps([(step, 1.0, 2.0)])
    found = [logs.Logs(place, empty=True) for place in places]
    tensors = [[entry.load().tolist() for entry in one.entries] for one in found]
    assert all(tensor in ([0] * 3, [1] * 3) for one in tensors for tensor in one)
    return tensors[-1]


def _traced(folder):
    from pyops.profile import write_trace
    write_trace(folder / 'trace.json', [{'name': 'a', 'ts': 1}])
    return (folder / 'trace.json').read_bytes()


def _nothing(folder):
    pass


# {name: (function of a folder before a call fails, function that returns the same when it is called again)}
WRITERS = {'training': (_nothing, _trained), 'resuming': (lambda folder: train(folder, 1), _trained),
           'packing': (_prepare_text, _packed), 'caching': (_nothing, _cached), 'mapping': (_nothing, _mapped),
           'dumping': (_nothing, _dumped), 'tracing': (_nothing, _traced)}

# ---- files -----------------------------------------------------------------------------------------------------------

CALLS = 'open', 'fsync', 'replace', 'unlink', 'pwrite'
EPOCHS, SAMPLES = 3, 8
SECTOR = 32         # bytes; the files of the small runs are smaller than a sector of a disk


class PowerCut(BaseException):
    """Ends the program, like a loss of power."""


class Fault:
    """Makes the n-th of the CALLS fail with an input/output error, or with `cut` the power.

    name: of the call that failed, None before;  renamed: [(path, its content before)] since the folder was last synced
    synced: {path: content} of the files at their last fsync
    """

    def __init__(self, monkeypatch, n, cut=False):
        self.left, self.name, self.cut, self.renamed, self.synced = n, None, cut, [], {}
        for name in CALLS:
            monkeypatch.setattr(os, name, self._failing(name, getattr(os, name)))

    def _failing(self, name, call):
        def failing(*arguments, **named):
            self.left -= 1
            if self.left == 0:
                self.name = name
                raise PowerCut if self.cut else OSError(errno.EIO, os.strerror(errno.EIO))
            if name == 'replace':
                source, path = map(Path, arguments)
                self.renamed.append((path, path.read_bytes() if path.exists() else None))
                self.synced[path] = self.synced.pop(source, b'')
            result = call(*arguments, **named)
            if name == 'fsync':
                path = Path(os.readlink(f'/proc/self/fd/{arguments[0]}'))
                if path.is_dir():
                    self.renamed.clear()
                else:
                    self.synced[path] = path.read_bytes()
            return result
        return failing

    def lose(self, folder, rng):
        """Undo what a power cut can undo: renames since the last fsync of the folder; and of the writes since the last fsync of
        a file, those to any of its sectors, and any number of bytes at its end."""
        if rng.random() < 0.5:
            for path, before in reversed(self.renamed):
                path.unlink(missing_ok=True)
                if before is not None:
                    path.write_bytes(before)
        for path in folder.iterdir():
            path.write_bytes(remains(path.read_bytes(), self.synced.get(path, b''), rng))


def remains(content, synced, rng):
    """Return what a power cut leaves of a file: each sector that differs from its bytes at the last fsync has the new ones, or
    these, or zeros past their end."""
    length = rng.integers(min(len(synced), len(content)), len(content) + 1)
    old, left = synced[:length].ljust(length, b'\0'), bytearray(content[:length])
    if rng.random() < 0.5:
        for at in range(0, length, SECTOR):
            if rng.random() < 0.5:
                left[at:at + SECTOR] = old[at:at + SECTOR]
    return bytes(left)


def train(path, epochs=EPOCHS):
    """Train a few parameters until so many epochs are done, from the newest checkpoint of `path`, and save each epoch."""
    params = Parameters({'w': Spec((50,), normal(0.1))})
    optimizer, history = Adam(params, 0.1, max_norm=1.0), fit.History()
    found = checkpoint.find(path)
    run = fit.Run(0, 4)
    if found.state:
        checkpoint.restore(params, optimizer, found.tensors, found.path)
        run = fit.Run(**found.state['run'])
    saver = fit.Saver(found, params, optimizer, run, {}, every=1, session={'program': 'none', 'flags': []})
    loss = backend.zeros(1)
    trainer = fit.Trainer(run, SAMPLES, epochs, optimizer, history, saver=saver)
    with trainer:
        for epoch in trainer.epochs():
            for rows in epoch.batches(lines=0):
                params['w'].grad[...] = params['w'].value * np.resize(rows, 50)
                loss[...] = np.abs(params.values).sum()
                optimizer.step()
                history.add(loss, None, optimizer.norm)


def tensors_of(path):
    return {name: tensor.tobytes() for name, tensor in checkpoint.find(path, serving=True).tensors.items()}
