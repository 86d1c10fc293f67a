"""TensorBoard event files: the losses of runs and statistics of the tensors that they saved.

`python -m pyops inspect runs RUN... --tensorboard DIR` writes them; `tensorboard --logdir DIR` shows them.
"""
from __future__ import annotations

import math
import os
import re
from typing import TYPE_CHECKING, Any

from pyops.errors import UserError, printable
from pyops.inspect.logs import LogError
from pyops.inspect.statistics import describe
from pyops.training import watch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyops.inspect.logs import Entry

STATISTICS = 'amax', 'mean', 'rms', 'std', 'min', 'max', 'zeros', 'nan', 'inf'      # of a tensor, each a curve over steps
_NO_TAG = re.compile(r'[^\w./-]+')        # TensorBoard has no other characters in the name of a curve


def writer_class() -> Any:
    """Return tensorboardX.SummaryWriter.   UserError if the package is missing"""
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise UserError("--tensorboard: tensorboardX is not installed; install it with: pip install 'pyops[tensorboard]'"
                        ) from error
    return SummaryWriter


def write(folder: str, runs: Any, entries: Sequence[Entry], place: Callable[[Entry], tuple[str, str]]) -> list[tuple[str, str]]:
    """Write an event file for each run, FOLDER/RUN/events.out.tfevents.*, and return (file, reason) of unreadable tensors.

    runs: pyops.inspect.runs.Runs;  place: returns the run and the action of an entry

    Scalars: `loss` of every step that the run recorded, and `ACTION/STATISTIC` of each entry, with _ for spaces; no point for a
    value that is not finite.   UserError: a folder is not empty, or cannot be written
    """
    make = writer_class()
    for name in runs.names:
        path = os.path.join(folder, name)
        if os.path.isdir(path) and os.listdir(path):
            raise UserError(f'--tensorboard {printable(path)}: is not empty, and TensorBoard would show its files beside the '
                            'new ones; name another folder')
    unread = []
    try:
        writers = {name: make(os.path.join(folder, name)) for name in runs.names}
        for step in runs.steps:
            add(writers[step['folder'].partition('/')[0]], 'loss', step.get('loss'), step['step'])
        for entry in watch(entries, len(entries), 'tensorboard', 'tensors'):
            try:
                found = describe(entry.load(), runs.mask(entry))
            except LogError as error:
                unread.append((entry.relative_path, str(error)))
                continue
            run, action = place(entry)
            for statistic in STATISTICS:
                add(writers[run], f'{_NO_TAG.sub("_", action)}/{statistic}', found[statistic], entry.step)
        for writer in writers.values():
            writer.close()
    except OSError as error:
        raise UserError(f'--tensorboard {printable(folder)}: cannot write event files ({error.strerror}); name another folder'
                        ) from error
    return unread


def add(writer: Any, tag: str, value: float | None, step: int) -> None:
    """Add a point to a curve, unless the value is missing or not finite."""
    if value is not None and math.isfinite(value):
        writer.add_scalar(tag, value, step)
