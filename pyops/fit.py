"""The training loop of all programs: epochs, results, progress, metrics, checkpoints, signals, resuming.

Also the steps before it: running a step from its plan, checking that model and step fit in memory.
"""
import contextlib
import math
import os
import signal
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from pyops import backend, checkpoint, distributed, plan
from pyops.backend.kernels import Kernel, declare
from pyops.data.batches import FixedBatches
from pyops.errors import Interrupted, UserError
from pyops.flags import plan_requested
from pyops.optim import Entry
from pyops.steplog import StepLog
from pyops.steps import CutStep, CutSteps, SizedSteps, Steps
from pyops.training import Interrupt, Metrics, Output, Progress


@dataclass
class Run:
    """The state of a training run; with the parameters and Adam's moments, all that a bit-exact continuation needs."""
    seed: int                   # of initial values, dropout masks and the order of the data
    batch_size: int
    epoch: int = 0              # epochs done
    position: int = 0           # samples done in the current epoch
    loss_sum: float = 0.0       # current epoch: sum of loss times weight (valid tokens), sum of weights, clipped steps
    weight_sum: float = 0.0
    clips: int = 0
    seconds: float = 0.0
    first_loss: float = 0.0     # of the first step (format 1 checkpoints have none: of the first step after resuming)
    id: str = field(default='', compare=False)      # names this run in metrics.jsonl; '' until it has a folder
    best: float | None = None   # best value so far of the metric that selects the best checkpoint, and after how many epochs
    best_epoch: int = 0
    best_metric: str = ''       # its name; older checkpoints have none
    planned: list[int] = field(default_factory=list)        # of planned_steps: epochs, steps
    kept: list[str] = field(default_factory=list, compare=False)    # names of the checkpoints that --keep may remove
    skipped: int = 0            # steps whose loss or gradient was not finite, and which changed no parameter

    asdict = asdict

    @property
    def loss(self):
        """Mean loss of the current epoch so far, weighted."""
        return self.loss_sum / self.weight_sum if self.weight_sum else math.nan

    def best_of(self, metric):
        """Return the best value of a metric so far; None if there is none, or the best value is of another metric."""
        return self.best if self.best_metric in ('', metric) else None

    def why_over(self, metric, patience):
        """Return a line, without a remedy, if a metric has not improved for `patience` epochs (None: no limit); else None."""
        epochs, best = self.epoch - self.best_epoch, self.best_of(metric)
        if patience is None or best is None or epochs < patience:
            return None
        return (f'no better value of {metric} than {best:.5g} of epoch {self.best_epoch} in {epochs} more, '
                f'and --patience is {patience}')

    def end_epoch(self):
        self.epoch += 1
        self.position = self.clips = 0
        self.loss_sum = self.weight_sum = self.seconds = 0.0


class History:
    """Loss, weight and gradient norm of each training step: the step writes them on the device, the host reads many at once."""
    CAPACITY = 1024         # steps

    def __init__(self):
        self.log, self.written = backend.zeros((self.CAPACITY, 3)), backend.zeros(1, np.int64)
        self._read, self.on_read = 0, None      # on_read(rows) is called with the rows that read() returns

    def add(self, loss, weight, norm):
        """Append a row for each of K steps; call it in a step, after the update.

        loss (K,), 1 <= K <= CAPACITY;  weight (K,) int32, None for the batch size;  norm (K,), None for 0
        """
        backend.launch('log_step', self.log, self.written, loss, weight, norm, loss.size, self.CAPACITY)

    def entry(self, loss, weight):
        """Return the row of a step for Optimizer.step(entry=...), which appends it with the norm of the gradient.

        loss (1,);  weight (1,) int32, None for the batch size
        """
        return Entry(self.log, self.written, loss, weight, self.CAPACITY)

    def read(self, n):
        """Return [[loss, weight, norm]] of the next n <= CAPACITY steps that were not read yet."""
        places = np.arange(self._read, self._read + n) % self.CAPACITY
        self._read += n
        rows = backend.get(self.log)[places].tolist()
        if self.on_read:
            self.on_read(rows)
        return rows

    def arrays(self):
        """Return {name: array} for a plan."""
        return dict(log=self.log, written=self.written)


def batches_of(run, samples, drop_last=False):
    """Return the batches of a run: `samples` if it has methods as FixedBatches has, else FixedBatches of so many samples."""
    return FixedBatches(samples, run.batch_size, drop_last) if isinstance(samples, int) else samples


def first_batch(run, samples):
    """Return the indices of the samples of the first batch of a run's current epoch, int64; for recording a step."""
    return backend.get(next(batches_of(run, samples).batches(run.seed, run.epoch)))


def training_step(args, step, params, rows, smaller='-b', sizes=None, filled=None, texts=None, /, **inputs):
    """Return the function that runs a training step as the flags of add_plan_flags ask, step(rows); None after describing it.

    step(rows), params, inputs: as for Steps;  rows: indices of a first batch;  smaller: flags that make a step smaller
    sizes(rows): the sizes of a batch, and the step is step(rows, *sizes), as for SizedSteps;  None: a batch has no other sizes
    filled(rows): as for SizedSteps
    texts(rows): lines of text about the samples of a batch, for --check-finite; None: their indices
    step may be a CutStep; then the functions above compute a part, and --plan and so on describe the step of a part, then the
    sums over ranks and the update.
    The step is replayed from its plan, and a summary of it is printed, unless --no-plan is given: then it is `step` itself.
    UserError if the step does not fit in memory.
    """
    checks = getattr(args, 'check_finite', None) is not None or getattr(args, 'max_skipped', 0)
    if checks and (args.no_plan or isinstance(step, CutStep)):
        flag = f'--max-skipped {args.max_skipped}' if args.check_finite is None else '--check-finite'
        raise UserError(f'{flag}: a step is checked within its plan, as a whole; leave out --no-plan, --parts and mpirun')
    if isinstance(step, CutStep):
        return _cut_step(args, step, params, rows, smaller, sizes, filled, inputs)
    steps = _replayed(args, step, params, sizes, filled, inputs)
    if not isinstance(steps, Steps | SizedSteps):
        return steps
    if not _introduce(args, smaller, steps.plan(rows)):
        return None
    if checks:
        from pyops.finite import FiniteSteps
        return FiniteSteps(steps, inputs['step'], None if args.check_finite is None else Path(args.check_finite), texts)
    return steps


def _replayed(args, step, params, sizes, filled, inputs):
    """Return the Steps or SizedSteps of a step; a function that calls it if the flags ask for no plan."""
    if args.no_plan and not plan_requested(args):
        return (lambda rows: step(backend.put(rows), *sizes(rows))) if sizes else step
    return SizedSteps(step, sizes, params, filled, **inputs) if sizes else Steps(step, params, **inputs)


def _introduce(args, smaller, recorded, update=None, timeline=None):
    """Print the summary of a step and return True; or describe it, if the flags ask for that, and return False.

    recorded: the Plan of the step, or of a part of it;  update, timeline: as for plan.describe
    """
    if plan_requested(args):
        plan.describe(args, recorded, update, timeline)
        return False
    _must_fit('a training step', recorded.memory().peak, smaller)
    if text := plan.before_training(args, recorded, update):
        print(text, flush=True)
    return True


def _cut_step(args, step, params, rows, smaller, sizes, filled, inputs):
    """Return training_step(...) for a CutStep."""
    steps = CutSteps(step, _replayed(args, step.gradients, params, sizes, filled, inputs), params, inputs.get('amax'))
    if not args.no_plan or plan_requested(args):
        update = steps.record_update(**inputs)
        if distributed.can_overlap(step.cut.fast):
            steps.overlap(steps.plan(rows))
        if not _introduce(args, smaller, steps.plan(rows), update, lambda: steps.timeline(rows)):
            return None
    if args.listing != 'nothing':
        ranks, hosts = distributed.size(), len(set(distributed.hosts()))
        print(f'parts : {step.cut.parts} of each batch, on {ranks} rank{"s" * (ranks > 1)}'
              + f' on {hosts} host{"s" * (hosts > 1)}, {backend.threads()} threads each' * (ranks > 1)
              + '; the step above is one part, without the update' * (args.listing == 'summary'), flush=True)
    return steps


def steps_left(run, batches, epochs, max_steps=math.inf):
    """Return the number of steps that a Trainer will run with these batches."""
    starts = [run.position] + [0] * (epochs - run.epoch - 1) if run.epoch < epochs else []
    total = 0
    for epoch, start in enumerate(starts, run.epoch):
        total += batches.count(run.seed, epoch, start)
        if total >= max_steps:
            return max_steps
    return total


def planned_steps(run, batches, epochs, optimizer):
    """Return the number of steps of a run when all epochs are done, for a schedule.  A resumed run with the same number of
    epochs gets the same number, although batches of tokens may have turned out larger or smaller than expected."""
    if run.planned[:1] != [epochs]:
        run.planned = [epochs, int(backend.get(optimizer.count)[0]) + steps_left(run, batches, epochs)]
    return run.planned[1]


class Watch:
    """Detects an exploding loss: its median over the last STEPS steps exceeds FACTOR times the loss of an untrained model.

    The loss of an untrained model is taken to be the loss of the run's first step, but at least `chance_loss`.  At twice
    that, the right class has probability 1 / classes**2 on average, far less than by chance.
    The limits come from runs of all models here, with learning rates from 0.001 to 1e30 and batches of 1 to 100.  Runs
    that learn have a median over 100 steps of at most 1.2 times the first loss, although single steps reach 20 times.
    With a learning rate so high that a run falls back to guessing the median is at most 1.7, with one exception of 2.3; with
    rates from which no run recovers it is 2.9 to 1e30.
    Before a checkpoint is written, and at the end of a run, the last STEPS_AT_SAVE steps are checked, or all of a shorter run
    of at least FEWEST steps, so that a run about to be stopped does not replace a good checkpoint with a bad one.
    """
    FACTOR = 2
    STEPS, STEPS_AT_SAVE, FEWEST = 100, 20, 3

    def __init__(self, run, chance_loss):
        self._run, self._chance_loss = run, chance_loss
        self._last = deque(maxlen=self.STEPS)
        self._limit = self._limit_of(run.first_loss) if run.first_loss else math.inf

    def _limit_of(self, first_loss):
        return self.FACTOR * max(first_loss, self._chance_loss)

    def add(self, loss):
        """Record the loss of a step, which is finite.  Return a description of the problem, or None."""
        if not self._run.first_loss:
            self._run.first_loss = loss
            self._limit = self._limit_of(loss)
        self._last.append(loss)
        if loss > self._limit and len(self._last) == self.STEPS:        # a single comparison as long as the loss is normal
            return self._judge(self.STEPS)
        return None

    def at_save(self):
        """Return a description of a problem in the last few steps, or None."""
        return self._judge(self.STEPS_AT_SAVE)

    def _judge(self, steps):
        last = list(self._last)[-steps:]
        median = _median(last) if last else 0.0
        if len(last) < self.FEWEST or median <= self._limit:
            return None
        return (f'the loss has exploded to {median:.6g} (median of the last {len(last)} steps; '
                f'an untrained model has {self._limit / self.FACTOR:.6g})')


def _median(values):
    """Return the median of numbers; of an even number of them the smaller of the two in the middle."""
    return sorted(values)[(len(values) - 1) // 2]


class Rise:
    """Detects that the loss leaves the range of the last steps, long before it exceeds the limit of Watch.

    IN_A_ROW losses in a row are high: more than Z robust standard deviations above the median of the WINDOW losses before them
    (1.4826 times the median distance from the median), and more than FACTOR times the median.  High losses do not enter the
    window, and it reports once: a run may recover, or continue on a new level.
    """
    WINDOW, Z, FACTOR, IN_A_ROW = 100, 10, 1.5, 5
    RENEW = 20          # losses after which the limit is computed again

    def __init__(self):
        self._before, self._high, self._limit, self._until = deque(maxlen=self.WINDOW), [], math.inf, self.WINDOW
        self._reported = False

    @property
    def is_high(self):
        """Whether the last losses are high, and too few to report."""
        return bool(self._high) and not self._reported

    def add(self, loss):
        """Record the loss of a step, which is finite.  Return a description of the rise, once, or None."""
        if self._reported:
            return None
        if loss > self._limit:
            self._high.append(loss)
            return self._report() if len(self._high) == self.IN_A_ROW else None
        self._high.clear()
        self._before.append(loss)
        self._until -= 1
        if not self._until:
            self._until = self.RENEW
            median, deviation = self._center()
            self._limit = max(median + self.Z * deviation, self.FACTOR * median)
        return None

    def _center(self):
        """Return the median of the window and its robust standard deviation."""
        median = _median(self._before)
        return median, 1.4826 * _median([abs(loss - median) for loss in self._before])

    def _report(self):
        self._reported = True
        median, deviation = self._center()
        now = _median(self._high)
        by = f'{(now - median) / deviation:.0f} robust standard deviations' if deviation else f'{now / median:.3g} times'
        return (f'the loss rose from {median:.6g} (median of {self.WINDOW} steps) to {now:.6g} (median of the next '
                f'{self.IN_A_ROW}), by {by}')


POLL_EVERY = 0.05           # seconds between reads of results, on a GPU
POLL_EVERY_ON_CPU = 0.002   # on a CPU a small step takes 0.1 ms and reading its loss 0.01 ms


class Trainer:
    """The loop of a training program: batches, results, progress, metrics, checkpoints, signals.

        trainer = Trainer(run, samples, epochs, optimizer, history)
        with trainer:
            for epoch in trainer.epochs():
                for rows in epoch.batches():
                    step(rows)                  # ends with optimizer.step(entry=history.entry(loss, weight))
                values = epoch.end(validation=...)
                print(f'epoch {values["epoch"]} loss : {values["loss"]:.5f}')
        trainer.leave()

    SIGINT, SIGTERM and SIGHUP, a failing standard output, and max_steps leave the `with` block after the current step or at
    the end of the epoch; a checkpoint is saved first.  So the lines after the inner loop run for complete epochs only.

    run: a Run, which the trainer updates;  epochs: number to be done in the end
    samples: number of samples of an epoch, for batches of run.batch_size; or its batches, such as TokenBatches
    history: the History to which step() appends an entry;  optimizer: counts the clipped steps
    saver: a Saver, None to save neither checkpoints nor metrics.jsonl
    drop_last: leave out the last batch of an epoch if it is smaller than the others, unless it is the only one
    max_steps: number of steps after which the run saves and ends
    chance_loss: loss of a model that gives all classes the same probability
    patience: number of epochs without a better value of the saver's metric after which the run ends, None for no limit
    max_skipped: number of steps of the run whose loss or gradient may be infinite or NaN; step() must leave the parameters as
    they are then (pyops.finite).  None: 0, and the program has no flag for it

    Attributes after the block: is_done (all epochs were trained) and signal (signal.Signals that ended the run, or None).
    Raises UserError if the loss or the norm of the gradient is not finite or the loss explodes (Watch), and OSError, after
    saving, if standard output fails (Output).  Prints a warning if the loss rises (Rise).
    """

    def __init__(self, run, samples, epochs, optimizer, history, *, saver=None, drop_last=False, max_steps=None,
                 chance_loss=0.0, patience=None, max_skipped=None):
        self._patience, self._max_skipped = patience, max_skipped
        self.run, self._epochs, self._optimizer, self._history = run, epochs, optimizer, history
        self._saver, self._saving, self._batched = saver, None, batches_of(run, samples, drop_last)
        self._left = math.inf if max_steps is None else max_steps
        self._watch, self._rise = Watch(run, chance_loss), Rise()
        self._pending = []                                      # batch sizes of the steps whose results have not been read
        self._polled = self._saved = time.perf_counter()
        self._save_after = 60 * saver.minutes if saver and saver.minutes else math.inf
        self._is_save_due = False                               # whether the last checkpoint is older than that
        self._on_cpu = backend.current_device().is_host          # reading results costs nothing there
        self._display = self._metrics = self._steps = self.signal = None

    def save_tensors(self, wanted, train_step, about, side=None, sentences=None):
        """Return train_step, or if tensors are wanted a function that runs it and saves them.

        wanted: a pyops.inspect.flags.Wanted, or None;  train_step: the Steps of the training step
        about: {'program': ..., 'settings': ...} for the manifest;  side, sentences: see pyops.inspect.saving.Saving
        """
        if wanted is None:
            return train_step
        if isinstance(train_step, CutSteps):
            raise UserError(f'{wanted.folder}: tensors are saved only of whole batches; give --parts 1 and start one process, '
                            'or leave out --save-tensors')
        from pyops.inspect.saving import Saving
        first = self._steps_done()
        steps = steps_left(self.run, self._batched, self._epochs, self._left)
        self._saving = Saving(wanted, train_step, first_batch(self.run, self._batched), first, first + steps, about, side,
                              sentences)
        self._history.on_read = self._saving.note
        return self._saving.step

    def _steps_done(self):
        return int(backend.get(self._optimizer.count)[0])

    @property
    def is_done(self):
        """Whether all epochs are done, or the metric has not improved for `patience` epochs."""
        return self.run.epoch >= self._epochs or self.has_stopped_improving

    @property
    def has_stopped_improving(self):
        """Whether the metric of the best checkpoint has not improved for `patience` epochs."""
        return self._why_over() is not None

    def _why_over(self):
        return self.run.why_over(self._saver.metric, self._patience) if self._saver and self._patience else None

    def leave(self):
        """Raise UserError if tensors were wanted and none was saved, and Interrupted if a signal ended the run: the exit status
        becomes 128 + signal."""
        if self._saving:
            self._saving.check()
        if self.signal is not None:
            raise Interrupted(self.signal)

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            if self._saving:
                stack.enter_context(self._saving)
            self._output = stack.enter_context(Output())
            writes = self._saver is not None and distributed.is_first()
            if writes:
                self.run.id = self.run.id or os.urandom(4).hex()
                stack.enter_context(checkpoint.claim(self._saver.folder))
            self._stop = stack.enter_context(Interrupt(self._saver is not None, distributed.is_first()))
            if writes:
                self._metrics = stack.enter_context(Metrics(self._saver.folder, self.run.epoch, self.run.id))
                if session := getattr(self._saver, 'session', None):
                    self._steps = stack.enter_context(StepLog(self._saver.folder, self.run.id, self._steps_done(), session))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind, error, traceback):
        if self._display:
            self._display.close()                               # an error within an epoch leaves its bar
        self.signal = self._stop.signal
        self._stack.close()
        if kind in (None, _Left) and self._output.failure and self.signal is None:
            raise self._output.failure
        return kind is _Left

    def epochs(self):
        """Yield an Epoch for each epoch to be done, the current one first if it is incomplete."""
        while not self.is_done:
            epoch = Epoch(self)
            yield epoch
            if not epoch.values:
                epoch.end()
            if not epoch.is_saved:
                epoch.save()
            if self._is_over():
                return
        if self.run.epoch < self._epochs:
            print(f'{self._why_over()}; a larger one trains on', flush=True)

    def _is_over(self):
        """Return whether to end the run now, and note whether to save.  All ranks call it after the same steps, and get the
        same answers: they save together."""
        reason = 1 + self._stop.signal if self._stop else int(self._output.failure is not None)
        is_due = time.perf_counter() - self._saved > self._save_after
        reason, self._is_save_due = divmod(distributed.largest(2 * reason + is_due), 2)
        if reason > 1:
            self._stop.signal = signal.Signals(reason - 1)      # which another rank may have got
        return bool(reason) or self._left <= 0

    def _batches(self, end, at_once, progress):
        """Yield the indices of the batches of an epoch, and after each do what is due: see Epoch.batches."""
        run = self.run
        with Progress(end, initial=run.position, **progress) as self._display:
            self._polled = time.perf_counter()
            for indices in self._batched.batches(run.seed, run.epoch, run.position, at_once):
                sizes = self._batched.sizes(indices)
                if self._left < len(sizes):
                    sizes = sizes[:self._left]
                    indices = indices[:sum(sizes)]
                yield indices
                self._pending += sizes
                self._left -= len(sizes)
                is_over = self._is_over()
                if is_over or self._is_time_to_read(at_once):
                    self._read(end)
                if is_over:
                    break
                if self._is_save_due:
                    self._read(end)
                    # No checkpoint by time while the loss may be exploding.  After an epoch's last step: see Epoch.save.
                    if run.position < end and not self._watch.at_save() and not self._rise.is_high:
                        self._display.print(self._save(by_time=True))
                        self._polled = time.perf_counter()
            self._read(end)
        if run.position < end:
            self._display.stopped(run.position, loss=run.loss)
            self._save_and_print()
            raise _Left

    def _is_time_to_read(self, at_once):
        if time.perf_counter() - self._polled > (POLL_EVERY_ON_CPU if self._on_cpu else POLL_EVERY):
            return True
        if len(self._pending) + at_once > History.CAPACITY:
            return True
        return self._on_cpu and self._display.is_due(self.run.position + sum(self._pending))

    def _read(self, end):
        """Read the results of the last steps into `run`, and show them."""
        run, rows = self.run, self._history.read(len(self._pending))
        if self._steps:
            self._steps.add(rows)
        for size, (loss, weight, norm) in zip(self._pending, rows, strict=True):
            if self._is_skipped(loss, norm, end):
                run.position += size
                continue
            self._check(self._watch.add(loss), end)
            if rise := self._rise.add(loss):
                self._warn(rise, end)
            weight = weight or size
            run.position += size
            run.loss_sum += loss * weight
            run.weight_sum += weight
            run.clips += self._optimizer.clips(norm)
        self._pending.clear()
        now = time.perf_counter()
        run.seconds, self._polled = run.seconds + now - self._polled, now
        self._display.update(run.position, loss=run.loss)

    def _is_skipped(self, loss, norm, end):
        """Return whether the step was skipped because its loss or gradient is not finite.  Raise UserError if it was one too
        many, or was not skipped."""
        if math.isfinite(loss) and math.isfinite(norm):
            return False
        run, most = self.run, self._max_skipped
        problem = f'the norm of the gradient is {norm}' if math.isfinite(loss) else f'the loss is {loss}'
        if run.skipped >= (most or 0):
            self._check(problem, end, '' if most is None else f', skip {"more" if most else "such"} steps with --max-skipped, '
                                                              'or find the cause with --check-finite')
        run.skipped += 1
        if distributed.is_first():
            self._display.print(f'step skipped : {problem} at [{run.position}/{end}]; {run.skipped} of at most {most}')
        return True

    def _check(self, problem, end, remedies=''):
        if problem and distributed.is_first():
            raise UserError(f'{problem} {self._place(end)}; lower the learning rate with -l{remedies}'
                            + (f'; {checkpoint.last(self._saver.last)}' if self._saver else ''))

    def _warn(self, rise, end):
        """Print a warning about a rise of the loss, and keep the checkpoint from before it."""
        if self._saver:
            self._saver.keep_last()
        if distributed.is_first():
            print(f'warning: {rise} {self._place(end)}; if it does not fall again, lower the learning rate with -l'
                  + (f'; {checkpoint.last(self._saver.last)}, which is kept' if self._saver and self._saver.last else ''),
                  file=sys.stderr, flush=True)

    def _place(self, end):
        """Return text with the position of a step.  Finished epochs: programs number the current one from 0 or 1."""
        return f'at [{self.run.position}/{end}] after {self.run.epoch} epochs'

    def _end_of_epoch(self):
        return self._batched.end(self.run.position)

    def _save(self, by_time=False):
        """Save a checkpoint, if the run has any, and return the line about it.  Raises if the loss has exploded."""
        self._check(self._watch.at_save(), self._end_of_epoch())
        if self._saver:
            path = self._saver(by_time)
            if self._steps:
                self._steps.saved(path, self._steps_done())
            self._saved = time.perf_counter()
            return f'checkpoint saved : {path}'
        return None

    def _save_and_print(self, by_time=False):
        if text := self._save(by_time):
            print(text, flush=True)


class Epoch:
    """An epoch of a Trainer.  number: its number, counted from 0;  samples: number of samples that it ends with."""

    def __init__(self, trainer):
        self._trainer, self.number, self.samples = trainer, trainer.run.epoch, trainer._end_of_epoch()
        self.values, self.is_saved = None, False

    def batches(self, at_once=1, **progress):
        """Yield the indices of each batch, (B,) int64 on the device; run a step on them.

        at_once: number of batches per array, which pyops.data.batches.split separates.  progress: arguments of Progress.
        Results are read from time to time only: on a GPU steps are only enqueued, and reading each would leave it idle.
        """
        yield from self._trainer._batches(self.samples, at_once, progress)

    def end(self, **metrics):
        """Count the epoch as done and write a line of metrics.jsonl.  Return its values by name, and 'samples'.

        metrics: more values, such as the validation loss; the saver's metric among them selects the best checkpoint.
        Called by Trainer.epochs if the program does not.
        """
        trainer, run = self._trainer, self._trainer.run
        self.values = dict(epoch=run.epoch + 1, loss=run.loss, emit_clip=run.clips, seconds=run.seconds,
                           samples_per_second=self.samples / run.seconds) | metrics
        run.end_epoch()
        if trainer._metrics:
            trainer._metrics.write(**self.values)
        if trainer._saver:
            trainer._saver.note(metrics)
        return self.values | {'samples': self.samples}

    def save(self):
        """Save a checkpoint if one is due, and print a line about it.  Called by Trainer.epochs if the program does not."""
        trainer, self.is_saved = self._trainer, True
        saver, run = trainer._saver, trainer.run
        is_due = trainer._is_over() or trainer.is_done or saver and run.epoch % saver.every == 0
        if is_due:
            trainer._save_and_print()
        elif trainer._is_save_due and not trainer._watch.at_save() and not trainer._rise.is_high:
            trainer._save_and_print(by_time=True)


class _Left(Exception):
    """Leaves the block of a Trainer within an epoch."""


def check_model_memory(specs, flags, shares=1):
    """Raise UserError if a model with these specs cannot fit: values, gradients and Adam's moments in float32.

    flags: those that make the model smaller, for the message;  shares: number of ranks that share the moments
    """
    _must_fit('the model', (8 + 8 // shares) * sum(math.prod(spec.shape) for spec in specs.values()), flags)


def _must_fit(what, needed, flags):
    device = backend.current_device()
    available, owner = device.memory(), 'this machine' if device.is_host else 'the GPU'
    if needed > available:
        raise UserError(f'{what} needs {needed / 2 ** 30:.1f} GiB of memory and {owner} has {available / 2 ** 30:.1f}; '
                        f'give a smaller {flags}')


class Saver:
    """Saves the checkpoints of a run, for a Trainer.  UserError if the disk has no room for one.

    found: the checkpoint.Found that the run started from; state: what its checkpoints contain besides `run`.
    every: number of epochs between checkpoints;  minutes: age of the last checkpoint at which another is saved, 0: any
    metric: keep the checkpoint with the best value of this metric, such as 'bleu', as checkpoint.BEST; None: no such file.
    Higher is better, for 'validation', a loss, lower.
    keep: number of checkpoints that are kept; older ones of the run are removed.  None: all
    session: facts about the flags and the machine, JSON, for pyops.steplog; None: the losses of the steps are not recorded
    folder: where checkpoints are saved;  last: path of the newest one from which the run can resume, None if there is none.
    metric: as given.
    """

    def __init__(self, found, params, optimizer, run, state, every=10, minutes=0, metric=None, keep=None, session=None):
        self.session = session
        self.folder, self.last, self.every, self.minutes = found.folder, found.path, every, minutes
        self.metric, self._keep = metric, keep
        self._params, self._optimizer, self._run, self._state = params, optimizer, run, state
        self._replaced = found.path if found.by_time else None
        if found.path and checkpoint.is_automatic(found.path) and not found.by_time and 'kept' in found.state['run']:
            run.kept.append(os.path.basename(found.path))       # its state has the names of the earlier ones
        if not distributed.is_first():
            return
        names_and_state = 2 ** 20                               # bytes
        alike = params.values, params.values                    # a whole moment is as large
        size = sum(tensor.nbytes for tensor in checkpoint.tensors(params, optimizer, alike).values())
        checkpoint.check_free_space(self.folder, size + names_and_state)

    def __call__(self, by_time=False):
        """Save the next checkpoint and return its path.

        by_time: the save was triggered by time.  The next checkpoint of this run, or of a run that resumes it, replaces this
        file: once the new one is durable, this one is removed, so the number of files does not grow with time.  Without
        `keep`, no other file is ever removed.
        Raises UserError, and saves nothing, if a parameter, a moment of Adam or the average is not finite: a step can cause
        that after its loss was computed, and such a checkpoint is useless.
        Of several ranks only rank 0 saves; the others return the path of the checkpoint that the run started from.  All ranks
        call it, since rank 0 needs their shares of the moments.
        """
        moments = self._moments()
        if not distributed.is_first():
            return self.last
        content = self._content(moments, by_time)
        self._check_finite(content[0])
        self.last = checkpoint.save_or_rescue(self.folder, self._run.epoch, *content, last_path=self.last)
        if self._replaced:
            self._remove(self._replaced)
        self._replaced = self.last if by_time else None
        if not by_time:
            self._run.kept.append(os.path.basename(self.last))
        while self._keep and len(self._run.kept) > self._keep:
            self._remove(os.path.join(self.folder, self._run.kept.pop(0)))
        return self.last

    def _check_finite(self, tensors):
        broken = [name for name, tensor in tensors.items() if not np.isfinite(tensor).all()]
        if broken:
            raise UserError(f'after {self._run.epoch} epochs {len(broken)} of {len(tensors)} tensors are no longer finite, '
                            f'such as {broken[0]}, and they are not saved; lower the learning rate with -l; '
                            f'{checkpoint.last(self.last)}')

    def keep_last(self):
        """From now on do not remove the newest checkpoint."""
        self._replaced = None
        if self.last and os.path.basename(self.last) in self._run.kept:
            self._run.kept.remove(os.path.basename(self.last))

    def note(self, metrics):
        """Save the checkpoint BEST if the metric has improved and all tensors are finite.  metrics: {name: value} of the epoch
        that just ended."""
        value, run = metrics.get(self.metric), self._run
        if value is None or not math.isfinite(value):
            return
        best = run.best_of(self.metric)
        if best is None or (value < best if self.metric == 'validation' else value > best):
            run.best, run.best_epoch, run.best_metric = value, run.epoch, self.metric
            moments = self._moments()
            if distributed.is_first():
                content = self._content(moments, by_time=False)
                self._check_finite(content[0])
                checkpoint.save_best(self.folder, run.epoch, *content)

    def load_best(self):
        """Copy the parameters of the checkpoint BEST into the model, if the run keeps it and it is not of the last epoch.

        Return its path; None if nothing was copied.
        """
        if self.metric is None or self._run.best_epoch == self._run.epoch:
            return None
        found = checkpoint.find(self.folder, serving=True, parameters_only=True)
        if os.path.basename(found.path) != checkpoint.BEST:             # it is damaged
            return None
        checkpoint.restore(self._params, None, found.tensors, found.path)
        return found.path

    def _moments(self):
        """Return the flat buffers of both moments if ranks share them, on rank 0; else None."""
        shares = self._params.shares
        return shares and [shares.whole(flat) for flat in (self._params.m, self._params.v)]

    def _content(self, moments, by_time):
        """Return the tensors and the state of a checkpoint.   moments: as for checkpoint.tensors()"""
        tensors = checkpoint.tensors(self._params, self._optimizer, moments)
        arrays = {name: backend.get(tensor) for name, tensor in tensors.items()}
        return arrays, self._state | {'run': self._run.asdict(), 'by_time': by_time}

    @staticmethod
    def _remove(path):
        with contextlib.suppress(OSError):
            os.unlink(path)


declare(log_step=Kernel(bytes=lambda s: 24 * s['steps'] + 16))
