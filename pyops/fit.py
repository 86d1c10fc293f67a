"""The training loop of all programs: epochs, progress, metrics, checkpoints, signals, resuming.

A program supplies `step(indices)`, one training step on these samples, and `results(sizes)`, the results of the last steps.
Results are read only now and then: on a GPU steps are only enqueued, and reading them every time would leave it idle.
"""
import contextlib
import math
import os
import signal
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import numpy as np

from pyops import backend, checkpoint
from pyops.backend.kernels import Kernel, declare
from pyops.data.batches import batches, epoch_end, split
from pyops.errors import Interrupted, UserError
from pyops.training import Interrupt, Metrics, Output


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

    asdict = asdict

    @property
    def loss(self):
        """Mean loss of the current epoch so far, weighted."""
        return self.loss_sum / self.weight_sum if self.weight_sum else math.nan

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
        """Append a row; call it in a step.  loss (1,); weight (1,) int32 or None for 0; norm (1,) or None for 0."""
        backend.launch('log_step', self.log, self.written, loss, weight, norm, self.CAPACITY)

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


def steps_left(run, samples, epochs, drop_last=False, max_steps=None):
    """Return the number of steps that `fit` will run with these arguments."""
    def steps(start):
        return -(-(epoch_end(samples, run.batch_size, start, drop_last) - start) // run.batch_size)
    whole = max(epochs - run.epoch, 0)
    total = steps(run.position) + (whole - 1) * steps(0) if whole else 0
    return total if max_steps is None else min(total, max_steps)


class Ended(NamedTuple):
    """The outcome of `fit`."""
    done: bool                          # all epochs were trained
    signal: signal.Signals | None       # the signal that ended the run; None: all epochs done, or --max-steps reached

    def leave(self):
        """Raise Interrupted if a signal ended the run; the exit status becomes 128 + signal."""
        if self.signal is not None:
            raise Interrupted(self.signal)


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
        """Record the loss of a step.  Return a description of the problem, or None."""
        if not math.isfinite(loss):
            return f'the loss is {loss}'
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
        median = sorted(last)[(len(last) - 1) // 2] if last else 0.0
        if len(last) < self.FEWEST or median <= self._limit:
            return None
        return (f'the loss has exploded to {median:.6g} (median of the last {len(last)} steps; '
                f'an untrained model has {self._limit / self.FACTOR:.6g})')


POLL_EVERY = 0.05           # seconds between reads of results, on a GPU
POLL_EVERY_ON_CPU = 0.002   # on a CPU a small step takes 0.1 ms and reading its loss 0.01 ms


def fit(run, samples, epochs, step, results, folder=None, save=None, save_every=10, validate=None, *, line, progress,
        drop_last=False, line_first=False, at_once=1, max_steps=None, save_minutes=0, chance_loss=0.0):
    """Train until `epochs` epochs are done, and return Ended.

    step(indices (B,) int64): runs a training step; indices are on the device of pyops.backend.place.
    at_once: steps per call of step(), one for each batch that pyops.data.batches.split finds in the indices.
    results(sizes): returns (loss, weight, clipped) for each of the last len(sizes) <= History.CAPACITY steps, whose batch
    sizes are `sizes`.
    samples: number of samples.  An epoch uses all of them or, with drop_last, whole batches only (at least one).
    folder: where metrics.jsonl and checkpoints are written; None: neither.
    save: a Saver, called after every `save_every` epochs, after the last one, and before leaving on a signal or a failed
    output; with save_minutes > 0 also at the end of a step when the last checkpoint is that many minutes old.
    validate(): returns a dict of metrics at the end of each epoch; line(metrics | {'samples': shown}): returns the line to
    print then, before (line_first) or after the line about the checkpoint.
    progress(epochs done, samples per epoch, samples already done): returns the Progress that displays an epoch.
    max_steps: number of steps after which the run saves and ends.
    chance_loss: loss of a model that gives all classes the same probability.
    Raises UserError if the loss is not finite or explodes (Watch), and OSError, after saving, if standard output fails
    (Output).
    """
    watch = Watch(run, chance_loss)
    pending, polled = [], time.perf_counter()           # batch sizes of the steps whose results have not been read
    saved = polled
    save_after = 60 * save_minutes if save and save_minutes else math.inf
    left = math.inf if max_steps is None else max_steps
    on_cpu = backend.place() is backend.HOST            # reading results costs nothing there: read for each progress line
    poll_every = POLL_EVERY_ON_CPU if on_cpu else POLL_EVERY

    def check(problem):
        if problem:                                     # finished epochs: programs number the current one from 0 or 1
            raise UserError(f'{problem} at [{run.position}/{end}] after {run.epoch} epochs; '
                            'lower the learning rate with -l' + (f'; {checkpoint.last(save.last)}' if save else ''))

    def save_checkpoint(by_time=False):
        """Save a checkpoint, if the run has any, and return the line about it.  Raises if the loss has exploded."""
        nonlocal saved
        check(watch.at_save())
        if save:
            path = save(by_time)
            saved = time.perf_counter()
            return f'checkpoint saved : {path}'
        return None

    def save_and_print(by_time=False):
        if text := save_checkpoint(by_time):
            print(text, flush=True)

    def collect():
        nonlocal polled
        for size, (loss, weight, clipped) in zip(pending, results(pending), strict=True):
            check(watch.add(loss))
            run.position += size
            run.loss_sum += loss * weight
            run.weight_sum += weight
            run.clips += clipped
        pending.clear()
        now = time.perf_counter()
        run.seconds, polled = run.seconds + now - polled, now

    def is_time():
        return time.perf_counter() - polled > poll_every or len(pending) + at_once > History.CAPACITY

    def is_save_due():
        return time.perf_counter() - saved > save_after

    with contextlib.ExitStack() as stack:
        output = stack.enter_context(Output())
        metrics = None
        if folder is not None:
            run.id = run.id or os.urandom(4).hex()
            stack.enter_context(checkpoint.claim(folder))
        stop = stack.enter_context(Interrupt(saves=save is not None))
        if folder is not None:
            metrics = stack.enter_context(Metrics(folder, run.epoch, run.id))
        is_over = False
        while run.epoch < epochs and not is_over:
            end = epoch_end(samples, run.batch_size, run.position, drop_last)
            with progress(run.epoch, end, run.position) as display:
                polled = time.perf_counter()
                for indices in batches(samples, run.batch_size, run.seed, run.epoch, run.position, drop_last,
                                       at_once=at_once):
                    if left < at_once:
                        indices = indices[:left * run.batch_size]
                    step(indices)
                    sizes = [len(batch) for batch in split(indices, run.batch_size)]
                    pending.extend(sizes)
                    left -= len(sizes)
                    is_over = bool(stop or output.failure) or left <= 0
                    if is_over or is_time() or on_cpu and display.is_due(run.position + sum(pending)):
                        collect()
                        display.update(run.position, loss=run.loss)
                    if is_over:
                        break
                    if is_save_due():
                        collect()
                        # No checkpoint by time while the loss may be exploding.  After an epoch's last step: see below.
                        if run.position < end and not watch.at_save():
                            display.print(save_checkpoint(by_time=True))
                            polled = time.perf_counter()
                collect()
                display.update(run.position, loss=run.loss)
            if run.position < end:
                display.stopped(run.position, loss=run.loss)
                save_and_print()
                break
            values = dict(epoch=run.epoch + 1, loss=run.loss, emit_clip=run.clips, seconds=run.seconds,
                          samples_per_second=end / run.seconds)
            if validate:
                values |= validate()
            run.end_epoch()
            if metrics:
                metrics.write(**values)
            text = line(values | {'samples': end})
            if line_first:
                print(text, flush=True)
            is_over = bool(stop or output.failure) or left <= 0
            if is_over or run.epoch == epochs or run.epoch % save_every == 0:
                save_and_print()
            elif is_save_due() and not watch.at_save():
                save_and_print(by_time=True)
            if not line_first:
                print(text, flush=True)
        if output.failure and not stop:
            raise output.failure
    return Ended(run.epoch >= epochs, stop.signal)


def tensors(params, optimizer=None):
    """Return {name: array} of everything in a checkpoint: parameters and, with an optimizer, Adam's moments and step count."""
    groups = dict(parameter=params.values) | (dict(adam_m=params.m, adam_v=params.v) if optimizer else {})
    arrays = {f'{group}/{name}': params.view(flat, name) for group, flat in groups.items() for name in params}
    return arrays | ({'step': optimizer.count} if optimizer else {})


def restore(params, optimizer, arrays, path):
    """Copy the tensors of a checkpoint into the model.  optimizer=None: parameters only, for serving.

    Raises UserError naming the first tensor that is missing, unknown or of another shape.
    """
    places = tensors(params, optimizer)
    if not optimizer:
        arrays = {name: tensor for name, tensor in arrays.items() if name.startswith('parameter/')}
    for name, place in places.items():
        if name not in arrays or arrays[name].shape != place.shape:
            got = arrays[name].shape if name in arrays else 'none'
            raise UserError(f'{path}: {name}: expected shape {place.shape}, got {got}; '
                            'pass the sizes it was trained with, or another folder with -c')
    if extra := sorted(set(arrays) - set(places)):
        raise UserError(f'{path}: holds {extra[0]}, which this model does not have; give another checkpoint with -c')
    for name, place in places.items():
        place[...] = arrays[name]


def check_model_memory(specs, growing):
    """Raise UserError if a model with these specs cannot fit: values, gradients and Adam's moments in float32.

    growing: the settings that its memory depends on, two or more.
    """
    flags = ['--' + name.replace('_', '-') for name in growing]
    _must_fit('the model', 4 * 4 * sum(math.prod(spec.shape) for spec in specs.values()),
              f'{", ".join(flags[:-1])} or {flags[-1]}')


def check_step_memory(plan):
    """Raise UserError if a training step cannot fit, before the system kills the process."""
    _must_fit('a training step', plan.memory().peak, '-b or --num-steps')


def _must_fit(what, needed, flags):
    place = backend.place()
    available, owner = place.memory(), 'this machine' if place is backend.HOST else 'the GPU'
    if needed > available:
        raise UserError(f'{what} needs {needed / 2 ** 30:.1f} GiB of memory and {owner} has {available / 2 ** 30:.1f}; '
                        f'give a smaller {flags}')


def checkpoint_bytes(params):
    """Return the size of a checkpoint in bytes, including 1 MiB for names and state."""
    return 3 * params.values.nbytes + 2 ** 20


class Saver:
    """Saves the checkpoints of a run, for `fit`.

    found: the checkpoint.Found that the run started from; state: what its checkpoints contain besides `run`.
    last: path of the newest checkpoint from which the run can resume, None if there is none.
    """

    def __init__(self, found, params, optimizer, run, state):
        self._folder, self.last = found.folder, found.path
        self._params, self._optimizer, self._run, self._state = params, optimizer, run, state
        self._replaced = found.path if found.by_time else None

    def __call__(self, by_time=False):
        """Save the next checkpoint and return its path.

        by_time: the save was triggered by time.  The next checkpoint of this run, or of a run that resumes it, replaces this
        file: once the new one is durable, this one is removed, so the number of files does not grow with time.  No other
        file is ever removed.
        Raises UserError, and saves nothing, if a parameter is not finite: a step can cause that after its loss was computed,
        and such a checkpoint is useless.
        """
        if not np.isfinite(backend.get(self._params.values)).all():
            raise UserError(f'after {self._run.epoch} epochs parameters are no longer finite, and they are not saved; '
                            f'lower the learning rate with -l; {checkpoint.last(self.last)}')
        arrays = {name: backend.get(tensor) for name, tensor in tensors(self._params, self._optimizer).items()}
        state = self._state | {'run': self._run.asdict(), 'by_time': by_time}
        self.last = checkpoint.save_or_rescue(self._folder, self._run.epoch, arrays, state, last_path=self.last)
        if self._replaced:
            with contextlib.suppress(OSError):
                os.unlink(self._replaced)
        self._replaced = self.last if by_time else None
        return self.last


declare(log_step=Kernel(bytes=lambda s: 40))            # one row of the log
