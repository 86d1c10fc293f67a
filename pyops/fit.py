"""The training loop that all programs share: epochs, progress, metrics, saving, leaving on a signal, going on later.

A program brings `step(indices) -> (loss, weight, clipped)`: one training step on the samples of those numbers.
"""
import contextlib
import math
import os
import time
from dataclasses import asdict, dataclass

import numpy as np

from pyops import checkpoint
from pyops.data.batches import batches, epoch_end
from pyops.errors import UserError
from pyops.training import Interrupt, Metrics


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

    asdict = asdict

    @property
    def loss(self):
        """Mean loss of the running epoch so far, each step counted by its weight."""
        return self.loss_sum / self.weight_sum if self.weight_sum else math.nan

    def end_epoch(self):
        self.epoch += 1
        self.position = self.clips = 0
        self.loss_sum = self.weight_sum = self.seconds = 0.0


def fit(run, samples, epochs, step, folder=None, save=None, save_every=10, validate=None, *, line, progress,
        drop_last=False, line_first=False):
    """Train until `epochs` epochs are done.  Every `save_every`th, the last, and on a signal: save() -> path.

    samples: how many there are; an epoch shows all, or with drop_last what makes whole batches, at least one.
    folder: where metrics.jsonl and checkpoints go; None: neither is written.
    validate() -> dict of metrics, at the end of each epoch; line(metrics | {'samples': shown}) -> what to print then,
    before or after the name of a checkpoint.
    progress(epochs done, samples of the next, how many of these are done) -> the Progress that shows an epoch.
    Returns whether all epochs were done, which a signal prevents.  UserError where the loss is no longer finite.
    """
    def save_and_tell():
        if save:
            print(f'checkpoint saved : {save()}', flush=True)

    with contextlib.ExitStack() as stack:
        if folder is not None:
            stack.enter_context(checkpoint.claim(folder))
        stop = stack.enter_context(Interrupt(saves=save is not None))
        metrics = stack.enter_context(Metrics(folder, run.epoch)) if folder is not None else None
        while run.epoch < epochs:
            end = epoch_end(samples, run.batch_size, run.position, drop_last)
            with progress(run.epoch, end, run.position) as display:
                for indices in batches(samples, run.batch_size, run.seed, run.epoch, run.position, drop_last):
                    start = time.perf_counter()
                    loss, weight, clipped = step(indices)
                    if not math.isfinite(loss):             # epochs done: programs count the running one from 0 or from 1
                        raise UserError(f'the loss is {loss} at [{run.position}/{end}] after {run.epoch} epochs; '
                                        'lower the learning rate with -l'
                                        + (f'; {checkpoint.last(folder)}' if folder is not None else ''))
                    run.position += len(indices)
                    run.loss_sum += loss * weight
                    run.weight_sum += weight
                    run.clips += clipped
                    run.seconds += time.perf_counter() - start
                    display.update(run.position, loss=run.loss)
                    if stop:
                        break
            if run.position < end:
                save_and_tell()
                return False
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
            if stop or run.epoch == epochs or run.epoch % save_every == 0:
                save_and_tell()
            if not line_first:
                print(said, flush=True)
            if stop:
                return run.epoch == epochs
    return True


def tensors(params, optimizer):
    """What a checkpoint keeps of parameters and Adam: name -> array."""
    groups = dict(parameter=params.values, adam_m=params.m, adam_v=params.v)
    kept = {f'{group}/{name}': params.view(flat, name) for group, flat in groups.items() for name in params}
    return kept | {'step': optimizer.count}


def restore(params, optimizer, kept, path):
    """Copy what `tensors` gave back into place; UserError names the first tensor that is missing or of another shape."""
    places = tensors(params, optimizer)
    for name, place in places.items():
        if name not in kept or kept[name].shape != place.shape:
            got = kept[name].shape if name in kept else 'none'
            raise UserError(f'{path}: {name}: want shape {place.shape}, got {got}; '
                            'give the sizes it was trained with, or another folder with -c')
    if extra := sorted(set(kept) - set(places)):
        raise UserError(f'{path}: holds {extra[0]}, which this model does not have; give another checkpoint with -c')
    for name, place in places.items():
        np.copyto(place, kept[name])


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
    have = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    if want > have:
        raise UserError(f'{what} needs {want / 2 ** 30:.1f} GiB of memory and this machine has {have / 2 ** 30:.1f}; '
                        f'give a smaller {flags}')


def room(params):
    """Bytes of a checkpoint, with a mebibyte for names and state."""
    return 3 * params.values.nbytes + 2 ** 20


def saver(folder, params, optimizer, run, state):
    """A save() for `fit`: the next checkpoint of the run, in `folder`.

    UserError in place of a checkpoint of parameters that are not finite: a step can spoil them after its loss was
    taken, and nobody wants to resume, or serve, from there.
    """
    def save():
        if not np.isfinite(params.values).all():
            raise UserError(f'after {run.epoch} epochs parameters are no longer finite, and they are not saved; '
                            f'lower the learning rate with -l; {checkpoint.last(folder)}')
        return checkpoint.save_or_rescue(folder, run.epoch, tensors(params, optimizer), state | {'run': run.asdict()})
    return save
