"""Save the tensors of linear layers and attention at selected steps of a training run; find.py finds them in the plan.

At a saved step the plan runs in pieces, and the tensors of each piece are copied before the next piece can overwrite them.
All other steps are replayed as a whole.  docs/saving.md lists the tensors and their names.
"""
from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING, Any, Self

from pyops import backend
from pyops.errors import UserError
from pyops.inspect.find import find, nbytes_of
from pyops.inspect.writer import Writer, size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy as np

    from pyops.inspect.flags import Wanted
    from pyops.steps import Steps

LOOK_EVERY = 0.3            # seconds between writes of the losses
PLANS = 32                  # most plans whose tensors are remembered


class Saving:
    """Run the steps of a training run, and save tensors at the steps selected by `wanted`.

    wanted: a pyops.inspect.flags.Wanted;  planned: the pyops.steps.Steps of a step;  rows: row indices of the first batch
    first, last: this run consists of the steps first, ..., last - 1
    run: for the manifest, {'program': ..., 'settings': ...};  side: as for `find`
    sentences(rows): returns (lengths, tokens) of a batch in the manifest's form; None if the data has no sentences

        saving = Saving(...)                UserError if saving is impossible
        with saving:                        prints a forecast at the beginning, and a summary at the end
            saving.step(rows)
            saving.note([(loss, weight, norm), ...])
        saving.check()                      UserError if nothing was saved
    """

    def __init__(self, wanted: Wanted, planned: Steps, rows: np.ndarray, first: int, last: int, run: Mapping[str, Any],
                 side: Any = None, sentences: Callable[[np.ndarray], tuple[Any, Any]] | None = None) -> None:
        self.wanted, self.planned, self.next, self._side, self._sentences = wanted, planned, first, side, sentences
        self._noted, self._told = first, time.perf_counter()
        self._losses: list[tuple[int, float, float | None]] = []
        self._is_over = False
        self.summary: Any = None            # the WriterSummary, at the end
        plan = planned.plan(rows)
        looks = find(plan, side)
        self._layers = set(wanted.choose(list(dict.fromkeys(tensor.layer for look in looks for tensor in look.tensors))))
        looks = self._chosen(looks)
        self._found = {plan: looks}         # plans of batches of other sizes follow
        self.promise, size = self._check(looks, wanted.steps.within(first, last), last)
        self.writer = Writer(wanted.folder, wanted.limit, wanted.as_, run)
        free = shutil.disk_usage(wanted.folder).free
        if free < size:
            self.writer.close()
            raise UserError(f'{wanted.folder}: {size_text(size)} of tensors will be saved and {size_text(free)} are free; '
                            'make room, or save less with --save-layers, --save-steps or --save-max')

    def _check(self, looks: Sequence[Any], steps: Sequence[int], last: int) -> tuple[str, int]:
        """Return the line that announces the dump, and its size in bytes."""
        tensors = [tensor for look in looks for tensor in look.tensors]
        each = nbytes_of(looks)
        layers, total = len({tensor.layer for tensor in tensors}), each * len(steps)
        if each > self.wanted.limit:
            raise UserError(f'--save-max {self.wanted.limit_text}: one step is {size_text(each)} of {layers} layers; give a '
                            'larger size, or fewer layers with --save-layers')
        if not steps:
            raise UserError(f'--save-steps {self.wanted.steps.text}: contains none of the steps {self.next} to {last - 1} of '
                            'this run; give some of these')
        which = f'step {steps[0]}' if len(steps) == 1 else f'{len(steps)} steps from {steps[0]} to {steps[-1]}'
        line = (f'saving tensors : {layers} layers, {len(tensors)} tensors and {size_text(each)} a step, {which}, '
                f'{size_text(total)} in {self.wanted.folder}')
        if total > self.wanted.limit:
            fits = self.wanted.limit // each
            line += f'; --save-max {self.wanted.limit_text} ends it after {fits} step' + 's' * (fits > 1)
        return line, min(total, self.wanted.limit)

    def __enter__(self) -> Self:
        print(self.promise, flush=True)
        return self

    def __exit__(self, *_: Any) -> None:
        self._tell()
        self.summary = self.writer.close()
        print(self.summary, flush=True)

    def check(self) -> None:
        """Raise UserError if no tensor was saved."""
        if not self.summary.tensors:
            why = (f'{self.summary.lost} could not be written' if self.summary.lost else
                   f'--save-steps {self.wanted.steps.text} names none of the steps up to {self.next}')
            raise UserError(f'{self.wanted.folder}: no tensor was saved: {why}; training itself went as ever')

    def step(self, rows: np.ndarray) -> None:
        """Run the next step on these rows, and save its tensors if it is selected."""
        number = self.next
        self.next += 1
        if self._is_over or number not in self.wanted.steps:
            self.planned(rows)
            return
        plan = self.planned.plan(rows)
        if plan not in self._found:
            if len(self._found) >= PLANS:
                self._found.clear()
            self._found[plan] = self._chosen(find(plan, self._side))
        looks = self._found[plan]
        if self.writer.taken + nbytes_of(looks) > self.wanted.limit:
            self._is_over = True
            print(f'saving of tensors ended before step {number} : --save-max {self.wanted.limit_text} is reached; '
                  'training goes on', flush=True)
            plan.run()
            return
        lengths, tokens = self._sentences(rows) if self._sentences else (None, {})
        if lengths:
            self.writer.batch(number, lengths, tokens)
        looks = [look._replace(tensors=tuple(tensor.rounded() for tensor in look.tensors)) for look in looks]
        done = 0
        saved: dict[Any, dict[str, Any] | None] = {}        # content -> manifest line
        for look in looks:
            if look.at > done:
                plan.run(done, look.at)
                done = look.at
            dtype, arrays = look.stored()
            for tensor, array in zip(look.tensors, arrays, strict=True):
                owned = look.is_fresh or not backend.current_device().is_host
                line = self._save(tensor, array, dtype, number, lengths, owned, saved.get(tensor.content))
                if tensor.content is not None:
                    saved[tensor.content] = line
        plan.run(done, len(plan.replayed))

    def _save(self, tensor: Any, array: np.ndarray, dtype: str, number: int, lengths: Any, owned: bool,
              same: dict[str, Any] | None) -> dict[str, Any] | None:
        fmt, options, axis = 'fp32', {}, tensor.axis
        if tensor.uses:                                 # the manifest lists all uses; the file name has the format of the first
            from pyops import formats
            one = formats.parse(tensor.uses[0]['format'])
            fmt, options, axis = one.name, dict(one.options), tensor.uses[0]['axis']
        return self.writer.tensor(
            array, layer=tensor.layer, layer_type=tensor.layer_type, index=tensor.index, operation=tensor.operation,
            name=tensor.name, step=number, time=tensor.time, format=fmt, quant_type=fmt if tensor.uses else tensor.quant_type,
            options=options, axis=axis, uses=tensor.uses, mask=tensor.mask, lengths=lengths, owned=owned, dtype=dtype,
            same=same)

    def note(self, values: Sequence[tuple[float, Any, float]]) -> None:
        """Append (loss, weight, norm) of the steps after those noted before, as pyops.fit.History reads them."""
        self._losses += [(self._noted + i, loss, norm or None) for i, (loss, _, norm) in enumerate(values)]
        self._noted += len(values)
        if time.perf_counter() - self._told > LOOK_EVERY:
            self._tell()

    def _tell(self) -> None:
        self.writer.steps(self._losses)
        self._losses, self._told = [], time.perf_counter()

    def _chosen(self, looks: Iterable[Any]) -> list[Any]:
        return [look for look in looks if look.tensors[0].layer in self._layers]
