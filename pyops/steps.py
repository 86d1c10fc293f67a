"""Training steps replayed from plans: a plan for each number of rows, or one plan for batches of all sizes.

Also steps on batches that are cut into parts, which several ranks share."""
from __future__ import annotations

import functools
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pyops import backend, distributed
from pyops.backend import library
from pyops.backend.calls import Queued
from pyops.plan import Plan
from pyops.profile import trace_events

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyops.params import Parameters
    from pyops.typing import Array

_SPARE = 8      # capacity beyond the first sizes: an eighth of them, so that a plan is rarely recorded again


def _run(plan: Plan) -> None:
    plan.run()


class Steps:
    """Calls step(rows) through plans, one per number of rows, recorded when a batch of that size first comes.

    rows (B,) int64: indices of the samples of the batch.  params and inputs as for Plan.  The arrays that step returns are
    the same objects at every call, with new contents.
    """

    runner: Callable[[Plan], Any] = staticmethod(_run)          # runs the plan of a step; pyops.finite replaces it

    def __init__(self, step: Callable[..., Any], params: Parameters | None, /, **inputs: Array) -> None:
        self._step, self._params, self._inputs = step, params, inputs
        self.plans: dict[int, tuple[Plan, Any]] = {}

    def __call__(self, rows: np.ndarray) -> Any:
        self.runner(self.plan(rows))
        return self.plans[len(rows)][1]

    def plan(self, rows: np.ndarray) -> Plan:
        """Return the plan of a step on these rows, recorded but not run."""
        plan, _ = self.plans.get(len(rows)) or self._record(len(rows))
        plan.inputs['rows'][...] = rows
        return plan

    def prepared(self, rows: np.ndarray) -> Plan:
        """Return the plan that a call with these rows runs, ready to run."""
        return self.plan(rows)

    def close(self) -> None:
        """Free the memory of all plans."""
        for plan, _ in self.plans.values():
            plan.close()
        self.plans.clear()

    def _record(self, size: int) -> tuple[Plan, Any]:
        rows = backend.zeros(size, np.int64)
        with Plan(self._params, run=False, rows=rows, **self._inputs) as plan:
            results = self._step(rows)
        self.plans[size] = plan, results
        return plan, results


class SizedSteps:
    """Calls step(rows, *sizes) through one plan, which runs batches of all sizes: they are set before a replay.

    sizes(rows) returns the sizes of a batch, integers of 1 or more: the number of rows, the numbers of tokens, and so on.  It
    is called before each step, with rows on the host.  The array that step receives may be longer than the batch.
    filled(rows), if given, is called instead before each step: it returns rows and their sizes.  It may append rows that do
    not change the results, to round the sizes up: a GPU replays a graph only if the same sizes have occurred before.
    The step must make the same launches for all sizes, with arguments that are linear in the sizes; ValueError naming the
    argument that is not.  There is another plan for each number of sizes.
    The memory of a plan has room for larger batches than the first; for one that does not fit, it is recorded again.
    So the arrays that step returns must have shapes without these sizes, and other arrays are returned after such a recording.
    """

    runner: Callable[[Plan], Any] = staticmethod(_run)          # as of Steps

    def __init__(self, step: Callable[..., Any], sizes: Callable[[np.ndarray], tuple[int, ...]],
                 params: Parameters | None, filled: Callable[[np.ndarray], tuple[np.ndarray, tuple[int, ...]]] | None = None, /,
                 **inputs: Array) -> None:
        self._step, self._sizes, self._filled, self._params, self._inputs = step, sizes, filled, params, inputs
        self._sized: dict[int, SizedPlan] = {}      # by number of sizes
        self._exact: Plan | None = None             # of the last sizes that plan() was called with
        self._exact_sizes: tuple[int, ...] = ()

    def __call__(self, rows: np.ndarray) -> Any:
        plan = self.prepared(rows)
        self.runner(plan)
        return plan.results

    def prepared(self, rows: np.ndarray) -> SizedPlan:
        """Return the plan that a call with these rows runs, ready to run."""
        rows, sizes = self._filled(rows) if self._filled else (rows, tuple(self._sizes(rows)))
        plan = self._sized.get(len(sizes))
        if plan is None or not plan.has_room(sizes):
            plan = self._sized[len(sizes)] = self._record(sizes, plan)
        plan.inputs['rows'][:len(rows)] = rows
        plan.resize(sizes)
        return plan

    def plan(self, rows: np.ndarray, sizes: tuple[int, ...] | None = None) -> Plan:
        """Return a plan of a step on these rows alone, recorded but not run; it is valid until the next call.

        sizes: of rows that filled() returned; default: the sizes of the rows
        """
        sizes = tuple(self._sizes(rows)) if sizes is None else sizes
        if self._exact is None or sizes != self._exact_sizes:
            if self._exact:
                self._exact.close()
            array, self._exact_sizes = backend.zeros(len(rows), np.int64), sizes
            with Plan(self._params, run=False, rows=array, **self._inputs) as self._exact:
                self._step(array, *sizes)
        self._exact.inputs['rows'][...] = rows
        return self._exact

    def close(self) -> None:
        """Free the memory of all plans."""
        for plan in (*self._sized.values(), *([self._exact] if self._exact else [])):
            plan.close()
        self._sized, self._exact = {}, None

    def _record(self, sizes: tuple[int, ...], before: SizedPlan | None) -> SizedPlan:
        """Return a plan with room for these sizes and for the sizes of the plan before."""
        most = before.capacity if before else sizes
        if before:
            before.close()
        capacity = tuple(max(size + size // _SPARE + 4, room) for size, room in zip(sizes, most, strict=True))
        rows = backend.zeros(sum(capacity), np.int64)           # at least the sum of the numbers of rows
        with SizedPlan(self._params, run=False, rows=rows, **self._inputs) as plan:
            plan.results = self._step(rows, *capacity)
        plan.learn_sizes(lambda *sizes: self._step(rows, *sizes), capacity)
        return plan


class SizedPlan(Plan):
    """A plan whose scalar arguments and addresses depend on sizes, such as the number of rows.

    They are learned by recording the step again with other sizes: each argument must be a sum of multiples of the sizes.
    capacity: the largest sizes;  results: what the step returned
    """
    capacity: tuple[int, ...]
    results: Any = None
    _sizes: tuple[int, ...] = ()            # of the next run

    def learn_sizes(self, step: Callable[..., Any], capacity: tuple[int, ...]) -> None:
        """Record step(*sizes) with other sizes than the recording, whose sizes are `capacity`, 4 or more each.

        ValueError naming the first argument that is not linear in the sizes.
        """
        if any(action.once for action in self.actions):
            raise ValueError('a step of many sizes has a launch inside Plan.once(), which ran for one size only')
        self.capacity, self._layouts = capacity, []
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
                slope = None if isinstance(whole, float) else self._slope(whole, alone, quarter, taken, most)
                if slope is None:
                    name = library.cpu().functions['pyops_' + action.kernel].arguments[j].name
                    raise ValueError(f'{action.kernel}: {name} is not linear in the sizes of a batch; '
                                     'record a plan for each size')
                if isinstance(whole, list):             # a shape or strides, which the kernel reads in host memory
                    self._layouts.append((action.values[j], np.array(whole, np.int64), slope))
                else:
                    at.append((i, j))
                    base.append(whole)
                    slopes.append(slope)
        self._places = self._calls.places(at)
        self._base, self._slopes = np.array(base, np.int64), np.array(slopes, np.int64).reshape(-1, len(capacity))

    @staticmethod
    def _slope(whole: Any, alone: list[Any], quarter: Any, taken: np.ndarray, most: np.ndarray) -> np.ndarray | None:
        """Return the changes of an argument, an integer or a list, for a unit of each size, in the last axis.  None if it
        is not linear."""
        difference = np.array(whole)[..., None] - np.stack([np.array(value) for value in alone], -1)
        slope = difference // taken
        return slope if (slope * taken == difference).all() and (whole - slope @ most == quarter).all() else None

    def has_room(self, sizes: tuple[int, ...]) -> bool:
        """Return whether these sizes are at most the recorded ones."""
        return all(size <= most for size, most in zip(sizes, self.capacity, strict=True))

    def resize(self, sizes: tuple[int, ...]) -> None:
        """Set the sizes of the next runs, each at most the size of the recording."""
        if sizes == self._sizes:
            return
        self._sizes = sizes
        difference = np.array(sizes) - self.capacity
        self._calls.change(self._places, self._base + self._slopes @ difference, sizes)
        for layout, base, slopes in self._layouts:
            layout[...] = base + slopes @ difference

    def _again(self, step: Callable[..., Any], sizes: Sequence[int]) -> list[list[Any]]:
        """Return the arguments of each launch of step(*sizes)."""
        with self.again() as calls:
            step(*sizes)
        if [kernel for kernel, _ in calls] != [action.kernel for action in self.actions]:
            raise ValueError(f'the step makes other launches with sizes {tuple(sizes)} than with {self.capacity}; '
                             'record a plan for each size')
        return [[value if isinstance(value, list | float) else int(value) for value in values] for _, values in calls]


# ---- batches cut into parts ----------------------------------------------------------------------------------------------

class Cut:
    """Cuts each batch into the same number of parts, whose gradients add up to the gradient of the batch's mean loss.

    parts: number of parts;  count (1,) int64: the optimizer's step count
    weights(rows) returns the weight of each sample in the mean loss, such as its number of tokens, integers of 1 or more; the
    parts get about the same weight.  None: every sample has weight 1.
    fast: sum over ranks in the order of the library of MPI or NCCL

    Arrays for the step of a part, set by select():
    share (1,) float32: the share of the part in the mean loss, the gradient of the part's loss;
    mask (1,) int64: number of the dropout masks, a function of step and part;  weight (1,) int32: of the whole batch
    """

    def __init__(self, parts: int, count: Array, weights: Callable[[np.ndarray], np.ndarray] | None = None,
                 fast: bool = False) -> None:
        self.parts, self.fast, self._count, self._weights = parts, fast, count, weights
        self.share, self.loss, self.weight = backend.zeros(1), backend.zeros(1), backend.zeros(1, np.int32)
        self.mask = backend.zeros(1, np.int64)
        self._shares = np.zeros(parts, np.float32)
        self._step = 0                      # of the batch that was split last

    def arrays(self) -> dict[str, Array]:
        """Return {name: array} for a plan."""
        return dict(share=self.share, part_loss=self.loss, batch_weight=self.weight, mask=self.mask)

    def split(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return the parts of a batch, perhaps empty ones, and set their shares.   rows: on the host"""
        weights = np.ones(len(rows), np.int64) if self._weights is None else self._weights(rows)
        ends = np.concatenate([[0], np.cumsum(weights)])
        total = int(ends[-1])
        edges = np.searchsorted(ends[1:] * self.parts, total * np.arange(1, self.parts), 'right')
        at = np.concatenate([[0], edges, [len(rows)]])
        self._shares[...] = np.diff(ends[at]) / total
        self._step = int(backend.get(self._count)[0])
        self.weight[...] = total
        return np.split(rows, edges)

    def first_part(self, rows: np.ndarray) -> np.ndarray:
        """Return the first part of a batch that is not empty."""
        return next(part for part in self.split(backend.get(rows)) if len(part))

    def select(self, part: int) -> None:
        """Set the arrays for the step of this part of the batch that was split last."""
        self.share[...] = self._shares[part]
        self.mask[...] = self._step * self.parts + part

    def step(self, gradients: Callable[..., Any], update: Callable[[Array], Any]) -> CutStep:
        return CutStep(self, gradients, update)

    def note(self, loss: Array) -> None:
        """Set the part's loss, weighted with its share; call it in the step of a part.   loss (1,): mean over the part"""
        backend.launch('fill', self.loss, 1, 0.0)
        backend.launch('axpy', self.loss, loss, self.share, 1)


@dataclass(frozen=True)
class CutStep:
    """A training step on batches that are cut into parts; pyops.fit.training_step makes CutSteps of it.

    gradients(rows, *sizes): zero the gradients, add the gradients of a part, and call cut.note() with its loss
    update(loss): change the parameters and log the step;  loss (1,): mean over the batch
    """
    cut: Cut
    gradients: Callable[..., Any]
    update: Callable[[Array], Any]


class CutSteps:
    """Calls a CutStep on batches: each rank computes the gradients of its parts, they are added in a fixed tree, and every rank
    updates its parameters.

    gradients(rows): runs step.gradients on a part; Steps or SizedSteps, or a function without a plan
    amax: the largest magnitudes of operands in the parts (pyops.quantization.AmaxHistories), whose maxima over ranks the update
    reads; None without delayed scaling
    """
    CHECK_EVERY = 100       # steps after which the parameters of all ranks are compared

    def __init__(self, step: CutStep, gradients: Any, params: Parameters, amax: Array | None = None) -> None:
        self.cut, self._step, self._gradients, self._params, self._amax = step.cut, step, gradients, params, amax
        self._sum, self._steps = distributed.GradientSum(params), 0
        self._losses, self._one = backend.zeros(self.cut.parts), backend.put(np.ones(1, np.float32))
        self._places = _places(self.cut.parts)
        mine = self.cut.parts // distributed.size()
        self._mine = range(distributed.rank() * mine, (distributed.rank() + 1) * mine)
        self._run_update: Callable[[], Any] = self._update
        self._events: list[dict[str, Any]] | None = None        # of the timeline that is recorded
        self._begin = 0.0
        self._ends: weakref.WeakKeyDictionary[Plan, list[int]] = weakref.WeakKeyDictionary()   # of the blocks, in actions

    def record_update(self, **inputs: Array) -> Plan:
        """Record the part of the step after backward, sums over ranks and the update; later calls replay its plan, which is
        returned.   inputs: as for Plan"""
        with Plan(self._params, run=False, part_losses=self._losses, **inputs) as plan:
            self._update()
        self._run_update = functools.partial(self._run, plan)
        return plan

    def overlap(self, plan: Plan) -> None:
        """From now on send blocks of gradients while the last part of a rank is computed.

        plan: of a part of the same batch on all ranks; it determines the order of the blocks
        """
        self._sum.cut_blocks(lambda first, end: self._completed(plan, first, end))
        distributed.agree(blocks=self._sum.blocks)

    def _completed(self, plan: Plan, first: int, end: int) -> int:
        """Return the number of actions of a plan after which elements of the gradients are complete."""
        last = plan.last_write_to(self._params.grads[first:end])
        return len(plan.replayed) if last is None else last + 1

    def _run_and_send(self, plan: Plan) -> None:
        """Replay the last part of this rank.  Each block of gradients leaves when backward has completed it."""
        if plan not in self._ends:
            self._ends[plan] = [max(self._completed(plan, *pair) for pair in block) for block in self._sum.blocks]
        done = 0
        for block, end in zip(self._sum.blocks, self._ends[plan], strict=True):
            if done < end:
                self._run(plan, done, end)
                done = end
            self._sum.send(block, self.cut.fast)
        self._run(plan, done)
        self._sum.join_device()

    def _send_zeros(self) -> None:
        """Send the blocks of a last part without samples: the other ranks wait for each of them."""
        for block in self._sum.blocks:
            self._sum.send(block, self.cut.fast)
        self._sum.join_device()

    def timeline(self, rows: np.ndarray) -> list[dict[str, Any]]:
        """Run two steps on a batch, and return the second as events of a Chrome trace, of all ranks."""
        self(rows)
        distributed.barrier()
        self._events, self._begin, self._sum.on_sum = [], time.perf_counter(), self._note_sum
        self(rows)
        events, self._events, self._sum.on_sum = self._events, None, None
        return [event for of_rank in distributed.gather(events) for event in of_rank]

    def _note_sum(self, floats: int, start: float, end: float) -> None:
        if self._events is not None:
            self._events.append(dict(name='sum over ranks', ph='X', ts=1e6 * (start - self._begin), dur=1e6 * (end - start),
                                     pid=distributed.rank(), tid=1, args={'bytes': 4 * floats}))

    def _run(self, plan: Plan, first: int = 0, last: int | None = None) -> None:
        """Replay actions of a plan, and add them to the timeline if there is one."""
        if self._events is None:
            plan.run(first, last, repeated=True)
            return
        start = time.perf_counter() - self._begin
        self._events += trace_events(plan.timed(first, last), start, distributed.rank())

    def __call__(self, rows: np.ndarray) -> None:
        cut = self.cut
        self._losses[...] = 0
        parts = cut.split(backend.get(rows))
        self._sum.start(len(self._mine))
        with self._params.rounded_once():
            for part in self._mine:
                if len(parts[part]):
                    cut.select(part)
                    if not isinstance(self._gradients, Steps | SizedSteps):
                        self._gradients(parts[part])
                    elif part == self._mine[-1] and self._sum.blocks:
                        self._run_and_send(self._gradients.prepared(parts[part]))
                    else:
                        self._run(self._gradients.prepared(parts[part]))
                    at = self._places[part]
                    backend.copy(self._losses[at:at + 1], cut.loss)
                else:
                    self._params.zero_grads()
                    if part == self._mine[-1]:
                        self._send_zeros()
                self._sum.add()
        self._run_update()
        self._steps += 1
        if self._steps % self.CHECK_EVERY == 0:
            distributed.same_bits(self._params.values, 'the parameters')

    def plan(self, rows: np.ndarray) -> Plan:
        """Return the plan of the first part of this batch, recorded but not run."""
        return self._gradients.plan(self.cut.first_part(rows))

    def _update(self) -> None:
        """Sum gradients and losses over ranks, and update the parameters."""
        if distributed.size() > 1:
            arrays = {'gradients': self._params.grads} | ({} if self._amax is None else {'amax': self._amax})
            name, function = 'all_reduce' if self._params.shares is None else 'reduce_scatter', self._sum_over_ranks
            if distributed.on_gpus():
                function = Queued(function)
                if self._sum.is_sparse:             # apart, since a graph can only contain the rest
                    gradients = {'gradients': self._params.grads, 'touched': self._params.touched}
                    backend.call(f'{name}_sparse', self._sum_sparse_over_ranks, gradients, gradients)
            backend.call(name, function, arrays, arrays | {'losses': self._losses})
        self._set_loss()
        self._step.update(self.cut.loss)

    def _sum_sparse_over_ranks(self) -> None:
        self._sum.sparse_over_ranks(self.cut.fast)

    def _sum_over_ranks(self) -> None:
        if distributed.on_gpus():
            self._sum.dense_over_ranks(self.cut.fast)
        else:
            self._sum.over_ranks(self.cut.fast)
        distributed.all_reduce(self._losses)            # each is 0 on all ranks but one, so no sum is rounded
        if self._amax is not None:
            distributed.all_max(self._amax)

    def _set_loss(self) -> None:
        """Set the loss of the batch from the losses of its parts: neighbours are added first, then pairs of neighbours, ..."""
        losses, count = self._losses, self.cut.parts
        while count % 2 == 0:
            count //= 2
            backend.launch('axpy', losses[:count], losses[count:2 * count], self._one, count)
        for at in range(1, count):
            backend.launch('axpy', losses[:1], losses[at:at + 1], self._one, 1)
        backend.copy(self.cut.loss, losses[:1])


def _places(parts: int) -> list[int]:
    """Return where the loss of each part is stored: neighbours are half of the array apart, then pairs of neighbours a quarter,
    and so on, as long as their number is even."""
    if parts % 2:
        return list(range(parts))
    return [place + parts // 2 * side for place in _places(parts // 2) for side in (0, 1)]
