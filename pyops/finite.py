"""Skip training steps whose loss or gradient is not finite, and find the kernel that computed the first such value.

The plan of a step is replayed in two pieces: forward, backward and the norm of the gradient; then the update.  Between them
the host reads loss and norm.  If one is infinite or NaN, the update does not run, so parameters and moments keep their values,
and small inputs of the step, such as the statistics of a batch norm, get theirs back if they are no longer finite.
"""
from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops import action_file, backend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyops.plan import Action, Plan
    from pyops.steps import SizedSteps, Steps

SMALL = 2**16           # bytes up to which an input that a step changes is copied before it, such as the step count
MOST_LINES = 4          # of a batch, on standard error


class _Pieces(NamedTuple):
    """A plan divided at its update.  end: number of actions before it;  logs: the actions after it that log the step, none if
    an action before it does
    loss, norm: arrays of one element; norm is None if the step does not compute it
    changed: the small inputs that the actions before the update change
    amax: of the operands in this step (pyops.quantization.AmaxHistories), one of `changed`; None without delayed scaling"""
    end: int
    logs: list[int]
    loss: Any
    norm: Any
    changed: list[Any]
    amax: Any


class FiniteSteps:
    """Run the steps of `planned` without the updates of steps whose loss or gradient is not finite.

    planned: the pyops.steps.Steps or SizedSteps of a training step, whose plan logs loss and norm (pyops.fit.History)
    count (1,) int64: the optimizer's step count
    folder: where the inputs of the action that computed the first value that is not finite are saved; None: it is not searched
    texts(rows): returns lines of text about the samples of a batch;  None: their indices are printed
    """

    def __init__(self, planned: Steps | SizedSteps, count: Any, folder: Path | None = None,
                 texts: Callable[[np.ndarray], list[str]] | None = None) -> None:
        self._planned, self._count, self._folder, self._texts = planned, count, folder, texts
        self._rows = np.zeros(0, np.int64)
        self._pieces: weakref.WeakKeyDictionary[Plan, _Pieces] = weakref.WeakKeyDictionary()
        planned.runner = self._run

    def __call__(self, rows: Any) -> Any:
        self._rows = rows
        return self._planned(rows)

    def plan(self, rows: Any) -> Plan:
        """Return the plan of a step on these rows, recorded but not run."""
        return self._planned.plan(rows)

    def _run(self, plan: Plan) -> None:
        pieces = self._pieces_of(plan)
        before = [np.array(backend.get(array)) for array in pieces.changed]
        plan.run(0, pieces.end)
        values = [float(backend.get(array)[0]) for array in (pieces.loss, pieces.norm) if array is not None]
        if np.isfinite(values).all() and (pieces.norm is not None or np.isfinite(backend.get(plan.params.grads)).all()):
            plan.run(pieces.end, len(plan.replayed))
            return
        if self._folder:
            self._find(pieces, before)
            self._put_back(pieces, before)
            plan.run(0, pieces.end)         # the search may have overwritten the loss
        for number in pieces.logs:
            plan.run(number, number + 1)
        for array, value in zip(pieces.changed, before, strict=True):
            is_broken = not np.isfinite(backend.get(array)).all() and np.isfinite(value).all()
            if is_broken or array is pieces.amax:
                array[...] = value              # such as the statistics of a batch norm

    def _pieces_of(self, plan: Plan) -> _Pieces:
        if plan not in self._pieces:
            self._pieces[plan] = divide(plan)
        return self._pieces[plan]

    def _find(self, pieces: _Pieces, before: list[np.ndarray]) -> None:
        """Repeat the step action by action, report the first result that is not finite, and save the inputs of that action."""
        self._put_back(pieces, before)
        step = int(backend.get(self._count)[0])
        plan = self._planned.plan(backend.get(self._rows))      # of this batch: its arrays have no unused rows
        found = first_not_finite(plan, divide(plan).end)
        about = {'step': step, 'batch': self._batch()}
        if isinstance(found, str):
            text = f'step {step} : {found}'
        else:
            number, action, memory = found
            about |= {'action': number, 'layer': layer_of(action)}
            path = self._folder / f'not_finite_step_{step}.safetensors'
            path = action_file.save(path, action, memory, about)
            text = (f'step {step} : {layer_of(action)}: kernel {action.kernel}, action {number} of {len(plan.replayed)}, '
                    'computed the first values that are not finite; its inputs are saved, run it again with '
                    f'python -m pyops replay {path}')
        more = len(about['batch']) - MOST_LINES
        lines = [text, *about['batch'][:MOST_LINES], *([f'and {more} more'] if more > 0 else [])]
        print('\n  '.join(lines), file=sys.stderr, flush=True)

    def _batch(self) -> list[str]:
        rows = backend.get(self._rows)
        return self._texts(rows) if self._texts else [f'rows {" ".join(map(str, rows))}']

    @staticmethod
    def _put_back(pieces: _Pieces, values: list[np.ndarray]) -> None:
        for array, value in zip(pieces.changed, values, strict=True):
            array[...] = value


def divide(plan: Plan) -> _Pieces:
    """Return the _Pieces of a plan.  ValueError if it has no update or does not log its loss."""
    kinds = 'parameter', 'moment'
    ends = [i for i, action in enumerate(plan.replayed)         # bfloat16 copies of the parameters are written before forward
            if any((t.base or t).kind in kinds and t.dtype == np.float32 for t in action.split()[1].values())]
    logs = [i for i, action in enumerate(plan.replayed) if action.kernel in ('log_step', 'grad_norm_logged')]
    if not ends or len(logs) != 1:
        raise ValueError('a step that is checked for finite values needs an update, and one entry in a log, '
                         f'got {len(logs)}')
    has_norm = any(action.kernel in ('grad_norm', 'grad_norm_logged') for action in plan.replayed)
    log = plan.replayed[logs[0]]
    loss, norm = (plan.argument(log, name) for name in ('loss', 'norm'))
    written = {(t.base or t).name for action in plan.replayed[:ends[0]] for t in action.split()[1].values()}
    changed = [array for name, array in plan.inputs.items()     # a repeated step writes the same row of the log
               if name in written - {'log'} and (array.nbytes <= SMALL or name == 'amax')]
    later = [i for i in logs if i >= ends[0]]
    return _Pieces(ends[0], later, loss, norm if has_norm else None, changed, plan.inputs.get('amax'))


def first_not_finite(plan: Plan, end: int) -> str | tuple[int, Action, action_file.Memory]:
    """Replay the first `end` actions of a plan one by one, until a result is not finite.  Return the number of the action, the
    action, and its memory from before it ran; or text, if no action computed such a value from finite ones."""
    for name in plan.params:
        if not np.isfinite(backend.get(plan.params[name].value)).all():
            return f'parameter {name} was not finite before the step'
    for number, action in enumerate(plan.replayed[:end]):
        memory = action_file.memory_of(plan, action)
        plan.run(number, number + 1)
        for argument, tensor in action.split()[1].items():
            if argument == 'log':               # has the losses of earlier steps
                continue
            if tensor.dtype in backend.REAL and not np.isfinite(backend.get(plan.argument(action, argument))).all():
                return number, action, memory
    return 'loss or gradient was not finite, but all results are finite when the step is repeated'


def layer_of(action: Action) -> str:
    """Return the name of the layer that an action belongs to; without one the name of its first result."""
    if action.notes:
        note = action.notes[0]
        return f'{note.op}.{note.layer}' if note.layer else note.op
    return next(iter(action.split()[1].values())).name
