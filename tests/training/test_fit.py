"""The training loop, with a step that only notes its samples."""
import io
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time

import numpy as np
import pytest

from pyops import checkpoint, fit
from pyops.data.batches import epoch_order
from pyops.errors import UserError, exits_cleanly
from pyops.init import zeros
from pyops.optim import Adam
from pyops.params import Parameters, Spec


class Losses:
    """A History of the given losses, and of 2.0 after the last of them; norms: of the gradients, 0.0 after the last."""

    def __init__(self, losses, norms=()):
        self.losses, self.norms = iter(losses), iter(norms)

    def read(self, n):
        return [(next(self.losses, 2.0), 0, next(self.norms, 0.0)) for _ in range(n)]


def run_epochs(run, samples, epochs, stop_after=None, losses=(), after_step=lambda: None, line_first=False, at_once=1,
               norms=(), **options):
    """Return the rows of each step, the values of each epoch, and whether all epochs were done.

    stop_after: number of the step in which a signal arrives;  losses, norms: see Losses
    line_first: print the line of an epoch before the line about its checkpoint
    """
    shown, lines = [], []
    optimizer = Adam(Parameters({'w': Spec((3,), zeros())}), 0.1)
    trainer = fit.Trainer(run, samples, epochs, optimizer, Losses(losses, norms), **options)
    with trainer:
        for epoch in trainer.epochs():
            for rows in epoch.batches(at_once, unit='pairs'):
                shown.append(rows.tolist())
                if len(shown) == stop_after:
                    os.kill(os.getpid(), signal.SIGTERM)
                after_step()
            lines.append(epoch.end())
            if not line_first:
                epoch.save()
            print(f'epoch {epoch.number + 1}', flush=True)
    assert trainer.signal == (signal.SIGTERM if stop_after else None)
    return shown, lines, trainer.is_done


class Saves:
    """A Saver that writes no file.  saved: epochs done, samples done and whether it was by time, of each checkpoint."""

    def __init__(self, run, every=10, minutes=0, last='BEFORE', folder=None):
        self.run, self.every, self.minutes, self.last, self.saved = run, every, minutes, last, []
        self.folder = folder or tempfile.mkdtemp()

    def __call__(self, by_time=False):
        self.saved.append((self.run.epoch, self.run.position, by_time))
        self.last = 'PATH'
        return self.last

    def note(self, metrics):
        pass

    def keep_last(self):
        self.kept_last = self.last


@pytest.mark.parametrize('drop_last, sizes, samples', [(False, [4, 4, 2], 10), (True, [4, 4], 8)])
def test_an_epoch_with_and_without_its_incomplete_batch(drop_last, sizes, samples, tmp_path, capsys):
    run = fit.Run(1, 4)
    shown, lines, done = run_epochs(run, 10, 2, saver=Saves(run, folder=str(tmp_path)), drop_last=drop_last)
    assert done and [len(rows) for rows in shown] == sizes * 2
    assert sum(shown[:len(sizes)], []) == epoch_order(10, 1, 0)[:samples].tolist()
    assert [values['samples'] for values in lines] == [samples, samples]
    assert f'[{samples}/{samples}]' in capsys.readouterr().out
    story = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
    assert [values['epoch'] for values in story] == [1, 2] and 'samples' not in story[0]
    assert story[0]['samples_per_second'] == pytest.approx(samples / story[0]['seconds'])


@pytest.mark.parametrize('line_first', [False, True])
def test_the_line_of_an_epoch_stands_before_or_after_its_checkpoint(line_first, capsys):
    run = fit.Run(1, 4)
    run_epochs(run, 10, 3, saver=Saves(run, every=2), line_first=line_first)
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith('[')]
    saved = 'checkpoint saved : PATH'
    if line_first:
        assert lines == ['epoch 1', 'epoch 2', saved, 'epoch 3', saved]
    else:
        assert lines == ['epoch 1', saved, 'epoch 2', saved, 'epoch 3']


@pytest.mark.parametrize('drop_last', [False, True])
@pytest.mark.parametrize('stop_after', [1, 2, 3, 4])
def test_a_stopped_run_goes_on_with_what_it_has_not_seen(drop_last, stop_after, capfd):
    whole, _, _ = run_epochs(fit.Run(1, 3), 11, 2, drop_last=drop_last)
    run = fit.Run(1, 3)
    first, _, done = run_epochs(run, 11, 2, stop_after, drop_last=drop_last)
    assert not done and len(first) == stop_after
    rest, _, done = run_epochs(fit.Run(**run.asdict()), 11, 2, drop_last=drop_last)
    assert done and first + rest == whole


@pytest.mark.parametrize('stopping', [dict(stop_after=2), dict(max_steps=2)], ids=['signal', 'max_steps'])
def test_a_run_that_ends_within_an_epoch_prints_its_loss_before_the_checkpoint(stopping, capfd):
    run = fit.Run(1, 30)
    _, lines, done = run_epochs(run, 1000, 2, saver=Saves(run), **stopping)
    assert capfd.readouterr().out == '[60/1000] loss : 2.00000\ncheckpoint saved : PATH\n' and not done and lines == []
    _, lines, done = run_epochs(fit.Run(1, 500), 1000, 2, max_steps=2)                  # at its end
    assert capfd.readouterr().out.splitlines()[-1] == 'epoch 1' and not done and len(lines) == 1


@pytest.mark.parametrize('drop_last', [False, True])
def test_several_steps_at_once_are_counted_one_by_one(drop_last, capfd):
    one, several = fit.Run(1, 3), fit.Run(1, 3)
    shown, lines, _ = run_epochs(one, 32, 2, drop_last=drop_last)
    at_once, same_lines, done = run_epochs(several, 32, 2, drop_last=drop_last, at_once=4)
    assert done and sum(at_once, []) == sum(shown, []) and [len(rows) for rows in at_once[:2]] == [12, 12]
    assert [values['loss'] for values in lines] == [values['loss'] for values in same_lines] and len(lines) == 2
    stopped = fit.Run(1, 3)
    run_epochs(stopped, 32, 2, stop_after=1, at_once=4)
    assert (stopped.epoch, stopped.position, stopped.weight_sum) == (0, 12, 12)


@pytest.mark.parametrize('batch_size, rest', [(5, [5]), (8, [8]), (9, []), (1, [1] * 8)])
def test_another_batch_size_in_the_middle_of_an_epoch_that_drops_its_last_batch(batch_size, rest, capfd):
    """Only what is left over behind the samples seen is dropped; where no batch is left, the epoch is done."""
    run = fit.Run(1, 3)
    (seen,), _, _ = run_epochs(run, 11, 1, stop_after=1, drop_last=True)
    run.batch_size = batch_size
    shown, lines, done = run_epochs(run, 11, 1, drop_last=True)
    assert done and [len(rows) for rows in shown] == rest
    samples = 3 + sum(rest)
    assert sum([seen, *shown], []) == epoch_order(11, 1, 0)[:samples].tolist()
    assert lines[0]['samples'] == samples and lines[0]['loss'] == 2.0
    assert run == fit.Run(1, batch_size, epoch=1, first_loss=2.0)


def test_every_plain_line_of_an_epoch_is_printed_however_seldom_results_are_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(fit, 'POLL_EVERY_ON_CPU', 1e9)
    run_epochs(fit.Run(1, 10), 100, 1)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith('[')]
    assert [line.split('/')[0] for line in lines] == [f'[{done}' for done in range(10, 101, 10)]


# ---- how a run ends ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('number, status', [(signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_a_signal_ended_has_a_status_of_its_own(number, status, capsys):
    with pytest.raises(SystemExit) as left, exits_cleanly('program'):
        trainer = fit.Trainer(fit.Run(1, 4), 4, 1, None, None)
        trainer.leave()                                         # returns
        trainer.signal = number
        trainer.leave()
    assert left.value.code == status and capsys.readouterr() == ('', '')


class Refusing(io.StringIO):
    """An output that takes `room` characters and then fails like a pipe without a reader."""

    def __init__(self, room):
        super().__init__()
        self.room = room

    def write(self, text):
        if self.tell() + len(text) > self.room:
            raise BrokenPipeError('gone')
        return super().write(text)


@pytest.mark.parametrize('line_first', [False, True])
@pytest.mark.parametrize('room', [0, 100, 300])
def test_an_output_that_fails_ends_a_run_after_it_was_saved(room, line_first, monkeypatch):
    run = fit.Run(1, 4)
    save, out = Saves(run), Refusing(room)
    monkeypatch.setattr(sys, 'stdout', out)
    with pytest.raises(BrokenPipeError):
        run_epochs(run, 40, 100, saver=save, line_first=line_first)
    assert len(save.saved) == 1 and save.saved[0] == (run.epoch, run.position, False) and out.tell() > room - 100
    assert (run.epoch, run.position) > (0, 0) and run.epoch < 10


# ---- checkpoints by time -------------------------------------------------------------------------------------------

def saved_by_a_clock(monkeypatch, samples, epochs, save_every=10, save_minutes=0):
    """What is saved where a step of four samples takes a minute."""
    run, now = fit.Run(1, 4), [0.0]
    save = Saves(run, save_every, save_minutes)

    def tick():
        now[0] += 60
    monkeypatch.setattr(time, 'perf_counter', lambda: now[0])
    run_epochs(run, samples, epochs, saver=save, after_step=tick)
    return save.saved


def test_a_checkpoint_is_saved_when_the_last_one_is_so_many_minutes_old(monkeypatch, capsys):
    saved = saved_by_a_clock(monkeypatch, 40, 2, save_every=2, save_minutes=3)
    assert saved == [(0, 16, True), (0, 32, True), (1, 8, True), (1, 24, True), (2, 0, False)]
    assert capsys.readouterr().out.count('checkpoint saved : PATH') == len(saved)


def test_a_checkpoint_of_an_epoch_counts_too(monkeypatch, capsys):
    saved = saved_by_a_clock(monkeypatch, 20, 4, save_every=1, save_minutes=3)
    assert saved == [place for epoch in range(4) for place in ((epoch, 16, True), (epoch + 1, 0, False))]


def test_epochs_shorter_than_that_are_saved_at_their_end(monkeypatch, capsys):
    saved = saved_by_a_clock(monkeypatch, 8, 7, save_every=100, save_minutes=3)
    assert saved == [(2, 0, True), (4, 0, True), (6, 0, True), (7, 0, False)]


def test_without_minutes_only_epochs_are_saved(monkeypatch, capsys):
    assert saved_by_a_clock(monkeypatch, 40, 4, save_every=2) == [(2, 0, False), (4, 0, False)]


def small_saver(path):
    """Return the checkpoint of a run with -c PATH."""
    params = Parameters({'w': Spec((3,), zeros())})
    return fit.Saver(checkpoint.find(path), params, Adam(params, 0.1), fit.Run(0, 1), {})


def test_a_checkpoint_by_time_is_replaced_by_the_next_one_and_nothing_else_is_removed(tmp_path):
    (tmp_path / 'notes.txt').write_text('mine')
    save = small_saver(tmp_path)
    older = save()

    def files():
        return {str(path) for path in tmp_path.glob('*.safetensors')}
    first = save()
    second = save(by_time=True)
    assert files() == {older, first, second}
    third = save(by_time=True)
    assert files() == {older, first, third}
    last = save()
    assert files() == {older, first, last} and save.last == last
    assert checkpoint.find(tmp_path).path == last and (tmp_path / 'notes.txt').exists()


def test_a_resumed_run_replaces_a_checkpoint_by_time_too_unless_it_was_named_or_renamed(tmp_path):
    first = small_saver(tmp_path)(by_time=True)
    second = small_saver(tmp_path)(by_time=True)
    assert not os.path.exists(first)
    third = small_saver(second)(by_time=True)
    assert os.path.exists(second)
    os.rename(third, tmp_path / 'mine.safetensors')
    fourth = small_saver(tmp_path)()
    assert sorted(map(str, tmp_path.iterdir())) == sorted([second, str(tmp_path / 'mine.safetensors'), fourth])
    small_saver(tmp_path)()
    assert os.path.exists(fourth)


def test_a_checkpoint_by_time_stays_until_the_next_one_is_saved(tmp_path, monkeypatch):
    save = small_saver(tmp_path / 'ckpt')
    first = save(by_time=True)

    def refuse(*_):
        assert os.path.exists(first)
        raise UserError('full')
    monkeypatch.setattr(checkpoint, 'save', refuse)
    with pytest.raises(UserError, match=f'full; .* failed too; the last complete checkpoint is {first}$'):
        save(by_time=True)
    assert os.listdir(tmp_path / 'ckpt') == [os.path.basename(first)]


# ---- a loss that explodes ------------------------------------------------------------------------------------------

GOOD = {
    'learns': np.geomspace(9.5, 0.1, 400),
    'spikes': [1e6 if n % 3 == 1 else 9.0 for n in range(400)],
    'bad initial values': np.geomspace(80, 9, 400),
    'a format without scales': np.linspace(9.5, 11.6, 400),
    'a rate too high, and back to guessing': [9.5, *[2e4] * 30, *[12.0] * 400],
    'learned, and back to guessing': [9.5, *[0.01] * 200, *[9.5] * 200],
    'a lucky first step': [0.01, *[9.5] * 400],
    'two steps': [9.5, 1e30],
}
BAD = {
    'at once': [9.1, *[59.2] * 400],
    'astronomic': [9.5, *np.geomspace(1e9, 1e32, 400)],
    'slowly': np.geomspace(9.5, 200, 400),
    'with better steps between': [9.5] + [59.0, 9.0, 59.0] * 133,
    'four steps': [9.5, 1e30, 1e30, 1e30],
    'bad initial values': [40.0, *[200.0] * 400],
}


def train_on(losses, run=None, save_every=10**6, save_minutes=0, steps=4, **options):
    """A run of one loss after the other, `steps` an epoch -> Saves"""
    run = run or fit.Run(1, 4)
    save = Saves(run, save_every, save_minutes)
    options = dict(saver=save, chance_loss=9.5) | options
    try:
        run_epochs(run, 4 * steps, len(losses) // steps, losses=[float(loss) for loss in losses],
                   max_steps=len(losses), **options)
    except UserError as error:
        save.error = str(error)
    else:
        save.error = None
    return save


@pytest.mark.parametrize('name', GOOD)
def test_what_is_no_explosion_of_the_loss(name, capsys):
    for epochs, steps in ((1, len(GOOD[name])), (len(GOOD[name]), 1)):
        save = train_on(GOOD[name], steps=steps)
        assert save.error is None and save.saved == [(epochs, 0, False)]


@pytest.mark.parametrize('name', BAD)
@pytest.mark.parametrize('steps', [1, 4])
def test_an_exploding_loss_ends_a_run(name, steps, capsys):
    save = train_on(BAD[name], steps=steps)
    assert save.saved == [] and save.error.startswith('the loss has exploded to ')
    assert ' after ' in save.error and '; lower the learning rate with -l; the last complete checkpoint is BEFORE' in save.error


def test_the_line_about_an_exploding_loss(capsys):
    error = train_on(BAD['at once'], steps=400).error
    assert error == ('the loss has exploded to 59.2 (median of the last 100 steps; an untrained model has 9.5) at [396/1600] '
                     'after 0 epochs; lower the learning rate with -l; the last complete checkpoint is BEFORE')
    error = train_on(BAD['bad initial values'], steps=400, saver=None).error          # as mnist, which saves nothing
    assert error == ('the loss has exploded to 200 (median of the last 100 steps; an untrained model has 40) at [396/1600] '
                     'after 0 epochs; lower the learning rate with -l')


@pytest.mark.parametrize('save_every', [1, 3])
def test_no_checkpoint_is_saved_once_a_loss_explodes(save_every, monkeypatch, capsys):
    """Long before that is certain, and by time as well."""
    good = 200
    losses = [*np.geomspace(9.5, 0.5, good), *[59.0] * 200]
    for options in (dict(save_every=save_every), dict(save_minutes=1e-12)):
        save = train_on(losses, **options)
        done = [epoch * 4 + position // 4 for epoch, position, _ in save.saved]
        assert good - 12 <= max(done) <= good + fit.Watch.STEPS_AT_SAVE / 2 and 'exploded to 59 ' in save.error
        assert save.error.endswith('the last complete checkpoint is PATH')


def test_a_spike_in_the_last_steps_before_a_checkpoint_does_not_keep_it_from_being_saved(capsys):
    save = train_on([9.5, *[1.0] * 4, *[1e9] * 3, *[1.0] * 4], save_every=2)
    assert save.error is None and [epoch for epoch, *_ in save.saved] == [2, 3]


def test_a_resumed_run_is_judged_by_its_first_loss(capsys):
    run = fit.Run(1, 4)
    train_on([40.0, *[9.0] * 7], run)
    for loss, want in ((70.0, None), (90.0, 'an untrained model has 40)')):
        resumed = fit.Run(**json.loads(json.dumps(run.asdict())))
        error = train_on([loss] * 200, resumed, steps=20).error
        assert resumed.first_loss == 40 and (want in error if want else error is None)


def test_a_run_of_an_older_checkpoint_is_judged_by_guessing(capsys):
    older = {name: value for name, value in fit.Run(1, 4).asdict().items() if name not in ('first_loss', 'id')}
    assert train_on([0.01, *[9.0] * 200], fit.Run(**older), steps=201).error is None
    assert 'an untrained model has 9.5)' in train_on([0.01, *[59.0] * 200], fit.Run(**older), steps=201).error


# ---- losses and gradients that are not finite, and a loss that rises ------------------------------------------

@pytest.mark.parametrize('name, losses, norms', [
    ('the loss is nan', [9.5, math.nan], ()), ('the loss is inf', [9.5, math.inf], ()),
    ('the norm of the gradient is nan', [9.5, 9.0], [1.0, math.nan]),
    ('the norm of the gradient is inf', [9.5, 9.0], [1.0, math.inf])])
def test_a_loss_or_gradient_that_is_not_finite_ends_the_run_and_nothing_is_saved(name, losses, norms, capsys):
    for options, remedy in (({}, ''), ({'max_skipped': 0}, ', skip such steps with --max-skipped, or find the cause with '
                                                           '--check-finite')):
        save = train_on([*losses, 9.0, 9.0], norms=norms, save_every=1, **options)
        assert save.saved == []
        assert save.error == (f'{name} at [4/16] after 0 epochs; lower the learning rate with -l{remedy}; '
                              'the last complete checkpoint is BEFORE')


def test_so_many_steps_are_skipped_also_over_several_runs_and_they_do_not_count_for_the_loss(capsys):
    run = fit.Run(1, 4)
    losses = [9.0, math.nan, 5.0, 7.0]
    save = train_on(losses, run, save_every=1, max_skipped=2)
    assert save.error is None and save.saved == [(1, 0, False)] and run.skipped == 1
    out = capsys.readouterr().out
    assert 'step skipped : the loss is nan at [4/16]; 1 of at most 2\n' in out and 'loss : 7.00000' in out
    resumed = fit.Run(**json.loads(json.dumps(run.asdict() | {'epoch': 0})))
    assert train_on(losses, resumed, max_skipped=2).error is None and resumed.skipped == 2
    resumed.epoch = 0
    assert train_on(losses, resumed, max_skipped=2).error.startswith('the loss is nan at [4/16]')


@pytest.mark.parametrize('group', ['m', 'v', 'average'])
def test_moments_and_an_average_that_are_not_finite_are_not_saved(group, tmp_path):
    params = Parameters({'w': Spec((3,), zeros())})
    optimizer, found = Adam(params, 0.1), checkpoint.fresh(tmp_path)
    optimizer.average_parameters(0.9)
    save = fit.Saver(found, params, optimizer, fit.Run(0, 4), {}, metric='bleu')
    save()
    before = sorted(os.listdir(tmp_path))
    (optimizer.average if group == 'average' else getattr(params, group))[1] = np.inf
    for write in (save, lambda: save.note({'bleu': 1.0})):
        with pytest.raises(UserError, match='1 of 5 tensors are no longer finite, such as .*/w, and they are not saved; '):
            write()
    assert sorted(os.listdir(tmp_path)) == before


RISES = {'at once': [*np.geomspace(9.5, 2.0, 300), *[9.0] * 100],
         'slowly': [*np.geomspace(9.5, 2.0, 300), *np.linspace(2, 18, 60)],
         'noisy': [2 + 0.1 * (n % 7) for n in range(300)] + [8 + 0.5 * (n % 7) for n in range(20)]}


@pytest.mark.parametrize('name', RISES)
def test_a_rise_of_the_loss_is_reported_once_with_the_remedy_and_the_checkpoint_from_before_is_kept(name, capsys):
    losses = RISES[name]
    save = train_on(losses, steps=len(losses) // 2, save_every=1)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith('warning: ')]
    assert save.error is None and len(lines) == 1 and save.kept_last in ('BEFORE', 'PATH')
    assert lines[0].startswith('warning: the loss rose from 2') and lines[0].endswith(
        f'; if it does not fall again, lower the learning rate with -l; the last complete checkpoint is {save.kept_last}, '
        'which is kept')


@pytest.mark.parametrize('name', ['learns', 'spikes', 'bad initial values', 'a format without scales', 'two steps'])
def test_what_is_no_rise_of_the_loss(name, capsys):
    train_on(GOOD[name], steps=len(GOOD[name]))
    assert 'rose' not in capsys.readouterr().err


def test_the_loss_of_a_run_that_learns_never_rises():
    """Losses of batches of different difficulty, with a step down at each epoch."""
    rise, noise = fit.Rise(), np.random.default_rng(0)
    for step in range(20_000):
        level = max(9.5 * 0.8 ** (step // 500), 0.05)
        assert rise.add(float(level * noise.lognormal(0, 0.3))) is None


def test_no_checkpoint_by_time_while_the_loss_is_high(capsys):
    losses = [*[2.0] * 199, 9.0, 9.0, 9.0, 9.0, *[2.0] * 97]
    save = train_on(losses, steps=300, save_minutes=1e-12)
    steps = [position // 4 for _, position, by_time in save.saved if by_time]
    assert steps and not set(steps) & {200, 201, 202, 203}


def test_the_checkpoint_from_before_a_rise_is_not_removed(tmp_path):
    params = Parameters({'w': Spec((3,), zeros())})
    save = fit.Saver(checkpoint.fresh(tmp_path), params, Adam(params, 0.1), fit.Run(0, 4), {}, keep=1)
    good = save(by_time=True)
    save.keep_last()
    counted = save()
    save.keep_last()
    save()
    newest = save()
    assert {str(path) for path in tmp_path.iterdir()} == {good, counted, newest}


# ---- the best checkpoint, the newest ones, and a run that stops improving ------------------------------------

def train_with(tmp_path, values, metric, epochs=None, metric_name=None, **options):
    """Train an epoch for each value of a metric; return the Run."""
    params = Parameters({'w': Spec((3,), zeros())})
    found = checkpoint.find(tmp_path)
    run = fit.Run(**found.state['run']) if found.state else fit.Run(0, 4)
    optimizer = Adam(params, 0.1)
    keep = {'keep': options.pop('keep')} if 'keep' in options else {}
    saver = fit.Saver(found, params, optimizer, run, {}, 1, metric=metric, **keep)
    trainer = fit.Trainer(run, 8, epochs or run.epoch + len(values), optimizer, Losses(()), saver=saver, **options)
    values = iter(values)
    with trainer:
        for epoch in trainer.epochs():
            for _ in epoch.batches(unit='pairs'):
                params.values[...] = run.epoch + 1
            epoch.end(**{metric_name or metric: next(values)})
    return run


@pytest.mark.parametrize('metric, best', [('bleu', 3), ('validation', 2)])
def test_the_best_checkpoint_is_kept(tmp_path, metric, best, capsys):
    run = train_with(tmp_path, [30.0, 20.0, 40.0, 35.0], metric)
    assert run.best_epoch == best and run.best == {'bleu': 40.0, 'validation': 20.0}[metric]
    tensors, state = checkpoint.load(tmp_path / checkpoint.BEST)
    assert state['run']['epoch'] == best and (tensors['parameter/w'] == best).all()
    assert checkpoint.find(tmp_path).state['run']['epoch'] == 4, 'a run resumes from its newest checkpoint'
    assert checkpoint.find(tmp_path, serving=True).path == str(tmp_path / checkpoint.BEST)


def test_a_copied_run_resumes_the_same_checkpoint_although_the_best_one_was_copied_last(tmp_path, capsys):
    folder, copy = tmp_path / 'run', tmp_path / 'copy'
    folder.mkdir(), copy.mkdir()
    train_with(folder, [30.0, 40.0, 35.0], 'bleu')
    newest = os.path.basename(checkpoint.find(folder).path)
    for name in (newest, checkpoint.BEST):
        shutil.copyfile(folder / name, copy / name)
    os.utime(copy / checkpoint.BEST, (2e9, 2e9))                # written last, in 2033
    assert checkpoint.find(copy).path == str(copy / newest)
    os.unlink(copy / newest)
    assert checkpoint.find(copy).state['run']['epoch'] == 2, 'the best checkpoint, if there is no later one'


def test_the_best_value_outlives_a_run_and_a_value_that_is_not_finite_is_none(tmp_path, capsys):
    train_with(tmp_path, [30.0, 40.0], 'bleu')
    run = train_with(tmp_path, [35.0, float('nan')], 'bleu')
    assert (run.best, run.best_epoch) == (40.0, 2)
    assert checkpoint.load(tmp_path / checkpoint.BEST)[1]['run']['epoch'] == 2


def test_without_that_metric_no_checkpoint_is_the_best(tmp_path, capsys):
    run = train_with(tmp_path, [30.0], 'bleu', metric_name='validation')
    assert run.best is None and not (tmp_path / checkpoint.BEST).exists()
    run = train_with(tmp_path, [30.0], None, metric_name='bleu')
    assert run.best is None and not (tmp_path / checkpoint.BEST).exists()


def test_a_damaged_best_checkpoint_is_passed_over(tmp_path, capsys):
    train_with(tmp_path, [30.0, 20.0], 'bleu')
    best = tmp_path / checkpoint.BEST
    best.write_bytes(best.read_bytes()[:-3])
    assert checkpoint.find(tmp_path, serving=True).state['run']['epoch'] == 2


def test_the_newest_checkpoints_are_kept_also_by_a_resumed_run(tmp_path, capsys):
    def epochs():
        return sorted(checkpoint.load(path)[1]['run']['epoch'] for path in tmp_path.glob('checkpoint_*'))
    other = tmp_path / 'checkpoint_20200101_000000_7.safetensors'
    checkpoint.save(other, {}, {'run': {'epoch': 7}})
    os.rename(other, tmp_path / 'other.txt')                # not a checkpoint of the run
    train_with(tmp_path, [1.0] * 5, 'bleu', keep=2)
    assert epochs() == [4, 5]
    train_with(tmp_path, [1.0] * 2, 'bleu', keep=3)
    assert epochs() == [5, 6, 7]
    train_with(tmp_path, [1.0], 'bleu')
    assert epochs() == [5, 6, 7, 8] and (tmp_path / 'other.txt').exists()


def test_a_run_without_a_better_value_for_so_many_epochs_ends_and_does_not_go_on(tmp_path, capsys):
    run = train_with(tmp_path, [30.0, 40.0, 39.0, 40.0, 41.0], 'bleu', patience=2)
    assert (run.epoch, run.best_epoch) == (4, 2)
    line = 'no better value of bleu than 40 of epoch 2 in 2 more, and --patience is 2; a larger one trains on'
    assert capsys.readouterr().out.splitlines()[-1] == line
    assert train_with(tmp_path, [50.0], 'bleu', epochs=9, patience=2).epoch == 4, 'nothing more to do'
    assert capsys.readouterr().out.splitlines()[-1] == line
    assert train_with(tmp_path, [50.0], 'bleu', epochs=5, patience=3).epoch == 5
    assert 'patience' not in capsys.readouterr().out


@pytest.mark.parametrize('recorded', ['bleu', ''])
def test_the_best_value_of_another_metric_is_not_compared(tmp_path, recorded, capsys):
    """recorded '': a checkpoint from before the name of the metric was saved has the metric that it is resumed with."""
    train_with(tmp_path, [40.0, 30.0], 'bleu')
    newest = checkpoint.find(tmp_path)
    checkpoint.save(newest.path, newest.tensors, newest.state | {'run': newest.state['run'] | {'best_metric': recorded}})
    run = train_with(tmp_path, [60.0, 50.0, 55.0], 'validation', patience=1)
    if recorded:
        assert (run.epoch, run.best, run.best_epoch, run.best_metric) == (5, 50.0, 4, 'validation')
        assert checkpoint.load(tmp_path / checkpoint.BEST)[1]['run']['epoch'] == 4
    else:
        assert (run.epoch, run.best, run.best_epoch) == (2, 40.0, 1)
