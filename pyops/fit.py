"""The training loop that all programs share: epochs, progress, metrics, saving, leaving on a signal, going on later.

A program brings `step(indices)`, one training step on the samples of those numbers, and `results(sizes)`, what came of the
last steps.  Results are asked for now and then: on a GPU steps are only told to it, so that it never stands still.
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
    """Where a training run stands; with the parameters and Adam's moments, all that a bit-exact continuation needs."""
    seed: int                   # of initial values, dropout masks and the order of the data
    batch_size: int
    epoch: int = 0              # epochs done
    position: int = 0           # samples done of the next one
    loss_sum: float = 0.0       # of that epoch: losses times weights (valid tokens), weights, steps that clipped
    weight_sum: float = 0.0
    clips: int = 0
    seconds: float = 0.0
    first_loss: float = 0.0     # of the first step; 0 in checkpoints of format 1, then of the first step after those
    id: str = field(default='', compare=False)      # names this run in metrics.jsonl; '' until it has a folder

    asdict = asdict

    @property
    def loss(self):
        """Mean loss of the running epoch so far, each step counted by its weight."""
        return self.loss_sum / self.weight_sum if self.weight_sum else math.nan

    def end_epoch(self):
        self.epoch += 1
        self.position = self.clips = 0
        self.loss_sum = self.weight_sum = self.seconds = 0.0


class History:
    """Loss, weight and gradient norm of each training step, noted by the step itself and read by the host in bulk."""
    CAPACITY = 1024         # steps

    def __init__(self):
        self.log, self.written = backend.zeros((self.CAPACITY, 3)), backend.zeros(1, np.int64)
        self._read, self.hear = 0, None         # hear(rows): told of what is read

    def add(self, loss, weight, norm):
        """In a step: loss (1,), weight (1,) int32 or None for 0, norm (1,) or None for 0."""
        backend.launch('log_step', self.log, self.written, loss, weight, norm, self.CAPACITY)

    def read(self, n):
        """-> [[loss, weight, norm]] of the n steps, at most CAPACITY, behind those that were read before."""
        places = np.arange(self._read, self._read + n) % self.CAPACITY
        self._read += n
        rows = backend.get(self.log)[places].tolist()
        if self.hear:
            self.hear(rows)
        return rows

    def arrays(self):
        """For a plan, by name."""
        return dict(log=self.log, written=self.written)


def steps_left(run, samples, epochs, drop_last=False, max_steps=None):
    """How many steps `fit` will do with these arguments."""
    def steps(start):
        return -(-(epoch_end(samples, run.batch_size, start, drop_last) - start) // run.batch_size)
    whole = max(epochs - run.epoch, 0)
    total = steps(run.position) + (whole - 1) * steps(0) if whole else 0
    return total if max_steps is None else min(total, max_steps)


class Ended(NamedTuple):
    """How `fit` ended."""
    done: bool                          # all epochs
    signal: signal.Signals | None       # the one that ended it; None: the epochs or --max-steps

    def leave(self):
        """Raise Interrupted if a signal ended the run, for exit status 128 + signal."""
        if self.signal is not None:
            raise Interrupted(self.signal)


class Watch:
    """Recognises an exploding loss: its median over the last STEPS steps exceeds FACTOR times that of an untrained model.

    An untrained model is represented by the loss of the run's first step, but at least by `chance_loss`.  At twice that
    the right class gets the probability 1 / classes**2 on average, far less than a guess gives it.
    The limits come from runs of all models here, with learning rates from 0.001 to 1e30 and batches of 1 to 100.  Runs
    that learn have a median over 100 steps of at most 1.2 times the first loss, whatever single steps reach (20 times);
    rates so high that a run falls back to guessing give at most 1.7, with one exception of 2.3; rates from which no run
    comes back give 2.9 to 1e30.
    Before a checkpoint is written, and at the end of a run, the last STEPS_AT_SAVE steps decide, or all of a shorter run
    that has at least FEWEST: a run that is about to be stopped should not put its checkpoint over a good one.
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
        """Note the loss of a step -> what is wrong, or None."""
        if not math.isfinite(loss):
            return f'the loss is {loss}'
        if not self._run.first_loss:
            self._run.first_loss = loss
            self._limit = self._limit_of(loss)
        self._last.append(loss)
        if loss > self._limit and len(self._last) == self.STEPS:        # costs a comparison where all is well
            return self._judge(self.STEPS)
        return None

    def at_save(self):
        """-> what is wrong with the last few steps, or None."""
        return self._judge(self.STEPS_AT_SAVE)

    def _judge(self, steps):
        last = list(self._last)[-steps:]
        median = sorted(last)[(len(last) - 1) // 2] if last else 0.0
        if len(last) < self.FEWEST or median <= self._limit:
            return None
        return (f'the loss has exploded to {median:.6g} (median of the last {len(last)} steps; '
                f'an untrained model has {self._limit / self.FACTOR:.6g})')


LOOK_EVERY = 0.05           # seconds, on a GPU
LOOK_EVERY_ON_CPU = 0.002   # where a small step takes a tenth of a millisecond, and to look a tenth of that


def fit(run, samples, epochs, step, results, folder=None, save=None, save_every=10, validate=None, *, line, progress,
        drop_last=False, line_first=False, at_once=1, max_steps=None, save_minutes=0, chance_loss=0.0):
    """Train until `epochs` epochs are done -> Ended.

    step(indices (B,) int64): a training step, with indices where arrays are made (pyops.backend.place);
    at_once: so many steps, one for each batch that pyops.data.batches.split finds in the indices.
    results(sizes) -> (loss, weight, clipped) of each of the last len(sizes) <= History.CAPACITY steps, on so many samples.
    samples: how many there are; an epoch shows all, or with drop_last what makes whole batches, at least one.
    folder: where metrics.jsonl and checkpoints go; None: neither is written.
    save: a Saver, called after each `save_every`th epoch, after the last one, and before the run is left on a signal or a
    failed output; also, if save_minutes > 0, at the end of a step when the last checkpoint is that many minutes old.
    validate() -> dict of metrics, at the end of each epoch; line(metrics | {'samples': shown}) -> what to print then,
    before or after the name of a checkpoint.
    progress(epochs done, samples of the next, how many of these are done) -> the Progress that shows an epoch.
    max_steps: how many steps it does at most; then it saves and ends.
    chance_loss: the loss of a model that gives all classes the same probability.
    UserError if the loss is not finite or explodes (Watch).  OSError, after saving, if standard output fails (Output).
    """
    watch = Watch(run, chance_loss)
    pending, looked = [], time.perf_counter()           # sizes of the batches whose results were not asked for
    saved = looked
    save_after = 60 * save_minutes if save and save_minutes else math.inf
    left = math.inf if max_steps is None else max_steps
    on_cpu = backend.place() is backend.HOST            # where to look now and then for the sake of a line costs nothing
    look_every = LOOK_EVERY_ON_CPU if on_cpu else LOOK_EVERY

    def check(problem):
        if problem:                                     # epochs done: programs count the running one from 0 or from 1
            raise UserError(f'{problem} at [{run.position}/{end}] after {run.epoch} epochs; '
                            'lower the learning rate with -l' + (f'; {checkpoint.last(save.last)}' if save else ''))

    def keep(by_time=False):
        """Save a checkpoint, if the run has any -> the line about it, or None.  Never one of an exploded loss."""
        nonlocal saved
        check(watch.at_save())
        if save:
            path = save(by_time)
            saved = time.perf_counter()
            return f'checkpoint saved : {path}'
        return None

    def keep_and_print(by_time=False):
        if text := keep(by_time):
            print(text, flush=True)

    def collect():
        nonlocal looked
        for size, (loss, weight, clipped) in zip(pending, results(pending), strict=True):
            check(watch.add(loss))
            run.position += size
            run.loss_sum += loss * weight
            run.weight_sum += weight
            run.clips += clipped
        pending.clear()
        now = time.perf_counter()
        run.seconds, looked = run.seconds + now - looked, now

    def is_time():
        return time.perf_counter() - looked > look_every or len(pending) + at_once > History.CAPACITY

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
                looked = time.perf_counter()
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
                        # a checkpoint by time waits while the loss may be exploding; after the last step see below
                        if run.position < end and not watch.at_save():
                            display.print(keep(by_time=True))
                            looked = time.perf_counter()
                collect()
                display.update(run.position, loss=run.loss)
            if run.position < end:
                display.stopped(run.position, loss=run.loss)
                keep_and_print()
                break
            values = dict(epoch=run.epoch + 1, loss=run.loss, emit_clip=run.clips, seconds=run.seconds,
                          samples_per_second=end / run.seconds)
            if validate:
                values |= validate()
            run.end_epoch()
            if metrics:
                metrics.write(**values)
            said = line(values | {'samples': end})
            if line_first:
                print(said, flush=True)
            is_over = bool(stop or output.failure) or left <= 0
            if is_over or run.epoch == epochs or run.epoch % save_every == 0:
                keep_and_print()
            elif is_save_due() and not watch.at_save():
                keep_and_print(by_time=True)
            if not line_first:
                print(said, flush=True)
        if output.failure and not stop:
            raise output.failure
    return Ended(run.epoch >= epochs, stop.signal)


def tensors(params, optimizer=None):
    """What a checkpoint keeps of parameters and Adam: name -> array; without an optimizer that of the parameters alone."""
    groups = dict(parameter=params.values) | (dict(adam_m=params.m, adam_v=params.v) if optimizer else {})
    kept = {f'{group}/{name}': params.view(flat, name) for group, flat in groups.items() for name in params}
    return kept | ({'step': optimizer.count} if optimizer else {})


def restore(params, optimizer, kept, path):
    """Copy what `tensors` gave back into place; UserError names the first tensor that is missing or of another shape.
    optimizer None: the parameters alone, to serve them."""
    places = tensors(params, optimizer)
    if not optimizer:
        kept = {name: tensor for name, tensor in kept.items() if name.startswith('parameter/')}
    for name, place in places.items():
        if name not in kept or kept[name].shape != place.shape:
            got = kept[name].shape if name in kept else 'none'
            raise UserError(f'{path}: {name}: want shape {place.shape}, got {got}; '
                            'give the sizes it was trained with, or another folder with -c')
    if extra := sorted(set(kept) - set(places)):
        raise UserError(f'{path}: holds {extra[0]}, which this model does not have; give another checkpoint with -c')
    for name, place in places.items():
        place[...] = kept[name]


def needs_memory(specs, growing):
    """UserError where a model of these parameter specs cannot fit: values, gradients and Adam's moments, float32.

    growing: the settings that its memory grows with, two or more.
    """
    flags = ['--' + name.replace('_', '-') for name in growing]
    _must_fit('the model', 4 * 4 * sum(math.prod(spec.shape) for spec in specs.values()),
              f'{", ".join(flags[:-1])} or {flags[-1]}')


def step_needs_memory(plan):
    """UserError where a training step cannot fit, in place of a system that ends the process when it is under way."""
    _must_fit('a training step', plan.memory().peak, '-b or --num-steps')


def _must_fit(what, want, flags):
    place = backend.place()
    have, whose = place.memory(), 'this machine' if place is backend.HOST else 'the GPU'
    if want > have:
        raise UserError(f'{what} needs {want / 2 ** 30:.1f} GiB of memory and {whose} has {have / 2 ** 30:.1f}; '
                        f'give a smaller {flags}')


def room(params):
    """Bytes of a checkpoint, with a mebibyte for names and state."""
    return 3 * params.values.nbytes + 2 ** 20


class Saver:
    """Saves the checkpoints of a run, for `fit`.

    found: the checkpoint.Found that the run began with; state: what its checkpoints hold besides `run`.
    last: the path of the newest checkpoint that the run can go on from, None if there is none yet.
    """

    def __init__(self, found, params, optimizer, run, state):
        self._folder, self.last = found.folder, found.path
        self._params, self._optimizer, self._run, self._state = params, optimizer, run, state
        self._replaced = found.path if found.by_time else None

    def __call__(self, by_time=False):
        """Save the next checkpoint -> its path.

        by_time: it is saved because time has passed, and the next checkpoint replaces it, of the same or of a resumed
        run: once that one is durable, this file is removed.  So the number of files does not grow with time.  No other
        file is ever removed.
        UserError instead of a checkpoint of parameters that are not finite: a step can make them so after its loss was
        calculated, and such a checkpoint is worth nothing.
        """
        if not np.isfinite(backend.get(self._params.values)).all():
            raise UserError(f'after {self._run.epoch} epochs parameters are no longer finite, and they are not saved; '
                            f'lower the learning rate with -l; {checkpoint.last(self.last)}')
        kept = {name: backend.get(tensor) for name, tensor in tensors(self._params, self._optimizer).items()}
        state = self._state | {'run': self._run.asdict(), 'by_time': by_time}
        self.last = checkpoint.save_or_rescue(self._folder, self._run.epoch, kept, state, last_path=self.last)
        if self._replaced:
            with contextlib.suppress(OSError):
                os.unlink(self._replaced)
        self._replaced = self.last if by_time else None
        return self.last


declare(log_step=Kernel(bytes=lambda s: 40))            # one row of the log
