"""Loss and gradient norm of every step of a run, and what is needed to repeat it: two files beside its checkpoints.

    steps_RUN.f32       two little-endian float32 for each step, loss and norm: step N (from 0) is at byte 8 N; zeros mean that
                        it was not recorded
    steps_RUN.jsonl     events, one JSON object per line: {"session": first step, "flags": [...], ...} when training starts,
                        and {"saved": file name of a checkpoint, "step": steps done} after a save

RUN is the id of the run, as in metrics.jsonl.  A run that is resumed from an earlier step overwrites the later ones.
"""
from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from pyops.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyops.typing import PathLike

RECORD = np.dtype('<f4'), 2             # of a step: loss, norm
BYTES = RECORD[0].itemsize * RECORD[1]


class StepLog:
    """Write the files of a run.  A line or a record that cannot be written causes one warning, and training continues.

    run: id of the run;  first: number of its first step;  session: facts about this start, JSON, such as the flags
    """

    def __init__(self, folder: PathLike, run: str, first: int, session: Mapping[str, Any]) -> None:
        self._path, self._next, self._warned = os.path.join(folder, f'steps_{run}'), first, False
        try:
            self._records = os.open(f'{self._path}.f32', os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            os.ftruncate(self._records, first * BYTES)
            self._events = open(f'{self._path}.jsonl', 'ab', buffering=0)
        except OSError as error:
            raise UserError(f'{self._path}.f32: cannot write the losses of the steps ({error.strerror}); expected files that '
                            'can be written: move them away or name another folder with -c') from error
        self._event(session=first, **session)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        os.close(self._records)
        self._events.close()

    def add(self, rows: Iterable[tuple[float, Any, float]]) -> None:
        """Record (loss, weight, norm) of the next steps."""
        values = np.array([(loss, norm) for loss, _, norm in rows], RECORD[0]).reshape(-1, RECORD[1])
        self._attempt(lambda: os.pwrite(self._records, values.tobytes(), self._next * BYTES) == values.nbytes)
        self._next += len(values)

    def saved(self, path: PathLike, step: int) -> None:
        """Record that the checkpoint `path` has the state after so many steps."""
        self._event(saved=os.path.basename(path), step=step)

    def _event(self, **values: Any) -> None:
        line = b'\n' + json.dumps(values).encode() + b'\n'         # a line that a kill cut short ends here
        self._attempt(lambda: self._events.write(line) == len(line))

    def _attempt(self, write: Any) -> None:
        try:
            problem = None if write() else 'disk full'
        except OSError as error:
            problem = error.strerror
        if problem and not self._warned:
            self._warned = True
            print(f'warning: {self._path}.f32: cannot write the losses of the steps ({problem}); training goes on',
                  file=sys.stderr)


class Session(NamedTuple):
    """A start of training.  first: number of its first step;  facts: as given to StepLog"""
    first: int
    facts: dict[str, Any]


class Timeline:
    """The steps of the last run in a folder.   UserError if it has no files of a StepLog

    values (N, 2) float32: loss and norm of each step;  sessions: list of Session, in order of their first steps
    saved: [(steps done, path)] of its checkpoints, in the same order, without files that are gone or of abandoned continuations
    """

    def __init__(self, folder: PathLike) -> None:
        self.folder = Path(folder)
        found = sorted((path for path in self.folder.glob('steps_*.jsonl') if path.is_file()),
                       key=lambda path: path.stat().st_mtime_ns)
        if not found:
            raise UserError(f'{self.folder}: has no record of the steps of a run (steps_RUN.jsonl); expected the folder that '
                            '-c named in training')
        try:
            lines = found[-1].read_bytes().splitlines()
            records = found[-1].with_suffix('.f32').read_bytes()
        except OSError as error:
            raise UserError(f'{found[-1]}: cannot be read ({error.strerror}); expected the two files of a run') from error
        self.values = np.frombuffer(records[:len(records) // BYTES * BYTES], RECORD[0]).reshape(-1, RECORD[1])
        self.sessions: list[Session] = []
        self.saved: list[tuple[int, Path]] = []
        for line in lines:
            self._read(line)
        self.saved = sorted((step, path) for step, path in self.saved if os.path.exists(path))
        if not self.sessions:
            raise UserError(f'{found[-1]}: has no record of a start of training; expected a file that training wrote')

    def _read(self, line: bytes) -> None:
        """Apply the event in a line.  Damaged lines are ignored: a kill or a full disk can leave them."""
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(event, dict):
            return
        first, step, name = event.pop('session', None), event.get('step'), event.get('saved')
        if type(first) is int and first >= 0:
            self.sessions = [session for session in self.sessions if session.first < first] + [Session(first, event)]
            self.saved = [(step, path) for step, path in self.saved if step <= first]
        elif type(step) is int and step >= 0 and isinstance(name, str) and name and os.path.basename(name) == name:
            self.saved.append((step, self.folder / name))

    def __len__(self) -> int:
        return len(self.values)

    def check(self, step: int) -> None:
        """Raise UserError unless the loss of this step is recorded."""
        if not 0 <= step < len(self) or not self.values[step].any():
            raise UserError(f'--step {step}: {self.folder} has the losses of steps {self.first} to {len(self) - 1}; '
                            'give one of these')

    @property
    def first(self) -> int:
        """The first recorded step."""
        return int(np.argmax(self.values.any(1))) if len(self) else 0

    def parts(self, start: int, end: int) -> list[tuple[Session, int, int]]:
        """Return (session, first, last + 1) for the steps start, ..., end - 1."""
        ends = [session.first for session in self.sessions[1:]] + [end]
        found = [(session, max(session.first, start), min(stop, end))
                 for session, stop in zip(self.sessions, ends, strict=True)]
        return [part for part in found if part[1] < part[2]]
