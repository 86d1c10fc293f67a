"""Faults of a training run: calls that fail, power cuts and kills.   Shared by the tests and scripts/faults.py"""
import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from conftest import ROOT, environment_without

from pyops import backend, checkpoint, fit
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

failed = 0
for row in TABLE:
    size = row.sizes[1]
    text, calls, expected = outcome(row, size, 0)
    assert text == 'done', (row.name, text)
    for n in range(1, calls + 1):
        text, _, results = outcome(row, size, n)
        assert 'memory' in text, (row.name, n, text)
        assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(results, expected, strict=True)), (row.name, n)
        failed += 1
print(failed)
'''


def fail_allocations(folder):
    """Let each allocation of each kernel of the op table fail once.   Return how many failed, or None without a C compiler.
    RuntimeError if a call has no error, or the next one other results"""
    shim = folder / 'fail_memory.so'
    built = subprocess.run([os.environ.get('CC', 'gcc'), '-shared', '-fPIC', '-O1', '-o', shim,
                            ROOT / 'tests/training/fail_memory.c', '-ldl'], capture_output=True, text=True)
    if built.returncode:
        return None
    done = subprocess.run([sys.executable, '-c', CHILD], cwd=ROOT, capture_output=True, text=True,
                          env=environment_without('PYOPS_BACKEND', LD_PRELOAD=str(shim), OMP_NUM_THREADS='1'))
    if done.returncode:
        raise RuntimeError(done.stderr)
    return int(done.stdout)


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


def train(path):
    """Train a few parameters until EPOCHS epochs are done, from the newest checkpoint of `path`, and save each epoch."""
    params = Parameters({'w': Spec((50,), normal(0.1))})
    optimizer, history = Adam(params, 0.1, max_norm=1.0), fit.History()
    found = checkpoint.find(path)
    run = fit.Run(0, 4)
    if found.state:
        checkpoint.restore(params, optimizer, found.tensors, found.path)
        run = fit.Run(**found.state['run'])
    saver = fit.Saver(found, params, optimizer, run, {}, every=1, session={'program': 'none', 'flags': []})
    loss = backend.zeros(1)
    trainer = fit.Trainer(run, SAMPLES, EPOCHS, optimizer, history, saver=saver)
    with trainer:
        for epoch in trainer.epochs():
            for rows in epoch.batches(lines=0):
                params['w'].grad[...] = params['w'].value * np.resize(rows, 50)
                loss[...] = np.abs(params.values).sum()
                optimizer.step()
                history.add(loss, None, optimizer.norm)


def tensors_of(path):
    return {name: tensor.tobytes() for name, tensor in checkpoint.find(path, serving=True).tensors.items()}
