"""Training runs of the transformer in slices of time: pyops and its PyTorch twin, the contestants of bench.quality.

Both start with the same weights and use the same batches (unless only PyTorch's are sorted), learning rates, clipping and Adam.
Their dropout masks differ.
bench.worker calls train(); it imports this module in the contestants' processes, so nothing large is imported here.
"""
import json
import math
import time

import numpy as np

from bench.contest import BF16
from bench.translation import planned_steps, read_pairs, write_pairs


def prepare(folder, settings, config, model, pairs, is_sorted=False, same_batches=False):
    """Write what both contestants need: settings of the run, configuration, initial weights, pairs to train on.

    is_sorted: PyTorch's batches come from sorted_batches(), and with same_batches ours, too
    """
    from bench.transformer import contest
    contest.write_model(folder, config, model)
    (folder / 'settings.json').write_text(json.dumps(settings | dict(is_sorted=is_sorted, same_batches=same_batches)))
    write_pairs(folder / 'data.npz', pairs)


def learning_rate(settings, total, k):
    """Return the learning rate of step k of `total`, counted from 0, as the kernels of transformer.train compute it."""
    from pyops.text.training import has_an_end
    lr, warmup = settings['lr'], settings['warmup']
    if not has_an_end(settings):
        return lr * min((k + 1) / warmup, math.sqrt(warmup / (k + 1))) if warmup else lr
    if k < warmup:
        return lr * (k + 1) / warmup
    x = (k - warmup) / (total - warmup) if k < total else 1.0
    return lr * (1 - x if settings['schedule'] == 'linear' else 0.5 + 0.5 * math.cos(math.pi * x))


def sorted_batches(batches, lengths, seed, epoch):
    """Return the batches of an epoch with sentences of similar lengths, in random order, as users of PyTorch avoid padding.

    batches: the run's, which select the samples of the epoch and their number in a batch;  lengths (N, 2)
    """
    order = np.concatenate(list(batches.batches(seed, epoch)))      # random, and so is the order of equal lengths
    parts = batches.split(order[np.lexsort(lengths[order].T)])
    return [parts[i] for i in np.random.default_rng((seed, epoch)).permutation(len(parts))]


def ordered(batches, lengths, seed, epoch, is_sorted):
    """Return the batches of an epoch, an iterator over their rows; is_sorted: of sorted_batches()."""
    return iter(sorted_batches(batches, lengths, seed, epoch)) if is_sorted else batches.batches(seed, epoch)


def positions(pairs, rows):
    """Return the numbers of source and target positions of a batch, whose sentences are padded to the longest of the batch."""
    return tuple((len(rows) * pairs.lengths[rows].max(0)).tolist())


class Ours:
    """Training by pyops, replayed from a plan as in transformer.train."""

    def __init__(self, folder, settings, pairs):
        from bench.transformer import contest
        self.settings, self.pairs, self.config = settings, pairs, contest.config(folder)
        self.steps = None

    def begin(self, total):
        """Start a run of `total` steps from the initial weights."""
        from pyops.text import training
        from transformer.model import Transformer
        settings = self.settings
        if self.steps:
            self.steps.close()
        self.model = Transformer(self.config, settings['seed'])
        optimizer = training.adam(self.model, settings)
        schedule = training.Schedule(settings, optimizer, total)
        self.steps = planned_steps(self.model, self.pairs, settings['lr'], optimizer, schedule.set_rate)

    def prepared(self, rows):
        return [rows]

    def step(self, rows):
        return float(self.steps(rows)[0])

    def weights(self):
        return self.model.params.arrays()


class Theirs:
    """Training by PyTorch: batches padded to their longest sentence, fused Adam; the output layer computes only valid rows.

    in_bf16: products in bfloat16, by autocast
    """

    def __init__(self, folder, settings, pairs, is_compiled, in_bf16):
        import torch

        from bench.transformer import contest
        torch.manual_seed(settings['seed'])
        self.folder, self.settings, self.pairs, self.in_bf16 = folder, settings, pairs, in_bf16
        self.model = contest.twin(contest.config(folder), folder)
        self.module = self.model
        if is_compiled:
            import torch.fx.experimental._config as config
            config.use_duck_shape = False       # otherwise code for a first batch with two equal sizes fits only such batches
            self.module = torch.compile(self.model, dynamic=True)

    def begin(self, total):
        """Start a run of `total` steps from the initial weights.  The compiled code is kept."""
        from bench.torch_step import copy_weights, make_step
        from pyops.text.training import MAX_NORM
        with np.load(self.folder / 'weights.npz') as weights:
            copy_weights(self.model, weights)
        self.run = make_step(self.module, self.settings['lr'], MAX_NORM, in_bf16=self.in_bf16,
                             rate=lambda k: learning_rate(self.settings, total, k))

    def prepared(self, rows):
        """Return source, target, labels (T, B) and the indices of the labels that are not padding, for TorchTransformer."""
        import torch

        from pyops.text.vocabulary import PAD
        longest = self.pairs.lengths[rows].max(0)[[0, 1, 1]]
        source, target, labels = (torch.from_numpy(ids[:length]).long()
                                  for ids, length in zip(self.pairs.padded(rows), longest, strict=True))
        return source, target, labels, (labels.T.flatten() != PAD).nonzero().flatten()

    def step(self, *batch):
        return self.run(*batch).item()

    def weights(self):
        return {name: place.detach().numpy() for name, place in self.model.named().items()}


class Learner:
    """A contestant with its place in the data.  Time counts in training steps only: batches are prepared outside them."""

    def __init__(self, folder, kind, in_bf16=False):
        from pyops.text.training import batches
        self.folder, self.kind, self.number = folder, kind, None
        settings = json.loads((folder / 'settings.json').read_text())
        with np.load(folder / 'data.npz') as file:
            self.pairs = read_pairs(file, settings['num_steps'])
        self.batches, self.seed = batches(settings, self.pairs, drop_last=True), settings['seed']
        self.is_sorted = settings['is_sorted'] and (settings['same_batches'] or kind != 'ours')
        given = folder, settings, self.pairs
        self.work = Ours(*given) if kind == 'ours' else Theirs(*given, kind == 'torch-compile', in_bf16)
        self.paused = time.perf_counter(), time.process_time()

    def _order(self):
        """Yield the rows of each batch, epoch after epoch."""
        while True:
            yield from ordered(self.batches, self.pairs.lengths, self.seed, self.epoch, self.is_sorted)
            self.epoch, self.samples = self.epoch + 1, 0

    def turn(self, number, total, milliseconds, save, until=None):
        """Train in run `number` until a step ends after so many milliseconds, or the `total` steps of the run are done.

        A new number starts another run from the initial weights.   save: 1 writes the weights to KIND.npz
        until: a turn also ends when so many steps of the run are done; None: total
        Return the worker's answer: steps done in the run so far; seconds, steps and mean loss per token of this turn; epochs
        done, as a float; and the seconds and CPU seconds of the pause before the turn.
        """
        pause, cpu = time.perf_counter() - self.paused[0], time.process_time() - self.paused[1]
        if number != self.number:
            self.number, self.done, self.epoch, self.samples = number, 0, 0, 0
            self.order = self._order()
            self.work.begin(total)
        seconds, loss_sum, tokens, before = 0.0, 0.0, 0, self.done
        while self.done < (until or total) and 1000 * seconds < milliseconds:
            rows = next(self.order)
            batch = self.work.prepared(rows)
            start = time.perf_counter()
            loss = self.work.step(*batch)
            seconds += time.perf_counter() - start
            weight = int(self.pairs.lengths[rows, 1].sum())
            loss_sum, tokens = loss_sum + loss * weight, tokens + weight
            self.done, self.samples = self.done + 1, self.samples + len(rows)
        if save:
            np.savez(self.folder / f'{self.kind}.npz', **self.work.weights())
        self.paused = time.perf_counter(), time.process_time()
        return dict(done=self.done, trained_s=seconds, steps=self.done - before, loss=loss_sum / max(tokens, 1),
                    epoch=self.epoch + self.samples / len(self.pairs), pause_s=pause, pause_cpu_s=cpu)


def train(folder, kind):
    """Return turn and describe of a contestant, for bench.worker."""
    return Learner(folder, kind.removesuffix(BF16), kind.endswith(BF16)).turn, lambda answer: answer
