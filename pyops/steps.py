"""Training steps replayed from plans: a plan for each number of rows, or one plan for batches of all sizes."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyops import backend
from pyops.backend import library
from pyops.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyops.params import Parameters
    from pyops.typing import Array

_SPARE = 8      # capacity beyond the first sizes: an eighth of them, so that a plan is rarely recorded again


class Steps:
    """Calls step(rows) through plans, one per number of rows, recorded when a batch of that size first comes.

    rows (B,) int64: indices of the samples of the batch.  params and inputs as for Plan.  The arrays that step returns are
    the same objects at every call, with new contents.
    """

    def __init__(self, step: Callable[..., Any], params: Parameters | None, /, **inputs: Array) -> None:
        self._step, self._params, self._inputs = step, params, inputs
        self.plans: dict[int, tuple[Plan, Any]] = {}

    def __call__(self, rows: np.ndarray) -> Any:
        plan, results = self.plans.get(len(rows)) or self._record(len(rows))
        plan.inputs['rows'][...] = rows
        plan.run()
        return results

    def plan(self, rows: np.ndarray) -> Plan:
        """Return the plan of a step on these rows, recorded but not run."""
        plan, _ = self.plans.get(len(rows)) or self._record(len(rows))
        plan.inputs['rows'][...] = rows
        return plan

    def _record(self, size: int) -> tuple[Plan, Any]:
        rows = backend.zeros(size, np.int64)
        with Plan(self._params, run=False, rows=rows, **self._inputs) as plan:
            results = self._step(rows)
        self.plans[size] = plan, results
        return plan, results


class SizedSteps:
    """Calls step(rows, *sizes) through one plan, which runs batches of all sizes: the numbers of rows are set before a replay.

    sizes(rows) returns the sizes of a batch, a tuple of integers of 1 or more, such as the numbers of tokens.  rows is on the
    host.  The step must make the same launches for all sizes, with arguments that are linear in len(rows) and the sizes;
    ValueError naming the argument that is not.
    The memory of the plan has room for larger batches than the first; for one that does not fit, it is recorded again.
    So the arrays that step returns must have shapes without these sizes, and other arrays are returned after such a recording.
    """

    def __init__(self, step: Callable[..., Any], sizes: Callable[[np.ndarray], tuple[int, ...]],
                 params: Parameters | None, /, **inputs: Array) -> None:
        self._step, self._sizes, self._params, self._inputs = step, sizes, params, inputs
        self._capacity: tuple[int, ...] = ()
        self._sized: SizedPlan | None = None        # of batches up to the capacity
        self._exact: Plan | None = None             # of the last sizes that plan() was called with
        self._exact_sizes: tuple[int, ...] = ()

    def __call__(self, rows: np.ndarray) -> Any:
        sizes = len(rows), *self._sizes(rows)
        plan = self._plan_for(sizes)
        self._rows[:len(rows)] = backend.put(rows)
        plan.run()
        return self._results

    def plan(self, rows: np.ndarray) -> Plan:
        """Return a plan of a step on these rows alone, recorded but not run; it is valid until the next call."""
        sizes = len(rows), *self._sizes(rows)
        if self._exact is None or sizes != self._exact_sizes:
            if self._exact:
                self._exact.close()
            array, self._exact_sizes = backend.zeros(len(rows), np.int64), sizes
            with Plan(self._params, run=False, rows=array, **self._inputs) as self._exact:
                self._step(array, *sizes[1:])
        self._exact.inputs['rows'][...] = backend.put(rows)
        return self._exact

    def _plan_for(self, sizes: tuple[int, ...]) -> SizedPlan:
        """Return the plan of all sizes, set to these."""
        if self._sized is None or any(size > most for size, most in zip(sizes, self._capacity, strict=True)):
            if self._sized:
                self._sized.close()
            before = self._capacity or (0,) * len(sizes)
            self._capacity = tuple(max(size + size // _SPARE + 3, most) for size, most in zip(sizes, before, strict=True))
            self._rows = backend.zeros(self._capacity[0], np.int64)
            with SizedPlan(self._params, run=False, rows=self._rows, **self._inputs) as self._sized:
                self._results = self._step(self._rows, *self._capacity[1:])
            self._sized.learn_sizes(lambda B, *others: self._step(self._rows[:B], *others), self._capacity)
        self._sized.resize(sizes)
        return self._sized


class SizedPlan(Plan):
    """A plan whose scalar arguments and addresses depend on sizes, such as the number of rows.

    They are learned by recording the step again with other sizes: each argument must be a sum of multiples of the sizes.
    """
    _sizes: tuple[int, ...] = ()            # of the next run

    def learn_sizes(self, step: Callable[..., Any], capacity: tuple[int, ...]) -> None:
        """Record step(*sizes) with other sizes than the recording, whose sizes are `capacity`, 4 or more each.

        ValueError naming the first argument that is not linear in the sizes.
        """
        if any(action.once for action in self.actions):
            raise ValueError('a step of many sizes has a launch inside Plan.once(), which ran for one size only')
        self._capacity = np.array(capacity)
        halves = [size // 2 for size in capacity]
        one_half = [[half if j == i else size for j, (size, half) in enumerate(zip(capacity, halves, strict=True))]
                    for i in range(len(capacity))]
        quarters = [size // 4 for size in capacity]             # to find arguments that are not linear
        recordings = [self._again(step, sizes) for sizes in (capacity, *one_half, quarters)]
        taken, most = np.array(capacity) - halves, np.array(capacity) - quarters
        at, base, slopes = [], [], []
        for i, action in enumerate(self.replayed):
            for j, (whole, *alone, quarter) in enumerate(zip(*(recording[i] for recording in recordings), strict=True)):
                if all(value == whole for value in (*alone, quarter)):
                    continue
                slope = isinstance(whole, int) and (whole - np.array(alone)) // taken
                if not isinstance(whole, int) or (whole - slope * taken != alone).any() or whole - slope @ most != quarter:
                    name = library.cpu().functions['pyops_' + action.kernel].arguments[j].name
                    raise ValueError(f'{action.kernel}: {name} is not linear in the sizes of a batch; '
                                     'record a plan for each size')
                at.append((i, j))
                base.append(whole)
                slopes.append(slope)
        self._places = self._calls.places(at)
        self._base, self._slopes = np.array(base, np.int64), np.array(slopes, np.int64).reshape(-1, len(capacity))

    def resize(self, sizes: tuple[int, ...]) -> None:
        """Set the sizes of the next runs, each at most the size of the recording."""
        if sizes != self._sizes:            # a change drops the graph of a GPU
            self._sizes = sizes
            self._calls.change(self._places, self._base + self._slopes @ (np.array(sizes) - self._capacity))

    def _again(self, step: Callable[..., Any], sizes: Sequence[int]) -> list[list[Any]]:
        """Return the arguments of each launch of step(*sizes)."""
        with self.again() as calls:
            step(*sizes)
        if [kernel for kernel, _ in calls] != [action.kernel for action in self.actions]:
            raise ValueError(f'the step makes other launches with sizes {tuple(sizes)} than with {tuple(self._capacity)}; '
                             'record a plan for each size')
        return [[value if isinstance(value, list | float) else int(value) for value in values] for _, values in calls]
