"""bench.quality: its two contestants compute the same, a whole contest in seconds, the picture, bad input."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT, environment_without
from translation import assert_same_gradients, small_corpus

from bench import learners, quality
from pyops import backend
from pyops.errors import UserError
from pyops.optim import Adam, decaying_rate, inverse_square_root
from transformer.model import Config, Transformer

SETTINGS = dict(seed=3, batch_size=8, batch_tokens=60, accumulate=1, num_steps=9, lr=0.002, warmup=3, schedule='linear',
                ema=0.0)
RECIPE = ['-f', 'embedded', '-t', '1', '--d-model', '16', '--d-ff', '8', '--batch-tokens', '300', '--hold-out', '0.1',
          '--pre-norm', '--smoothing', '0.1', '--warmup', '2', '--schedule', 'cosine']
SHORT = ['--slice', '0.1', '--calibrate', '0.2', '--no-compile', '--sentences', '9', '--threads', '1']


@pytest.fixture
def judged():
    """Skip a test if BLEU cannot be computed."""
    pytest.importorskip('sacrebleu', reason='sacrebleu is not installed: pip install sacrebleu')


@pytest.fixture
def pictures():
    pytest.importorskip('matplotlib', reason='matplotlib is not installed: pip install matplotlib')


# ---- the contestants -------------------------------------------------------------------------------------------------

@pytest.fixture
def folder(tmp_path):
    """-> the folder of a contest without dropout, as bench.quality prepares it."""
    _, vocabularies, pairs = small_corpus(200)
    config = Config(*map(len, vocabularies), d_model=16, d_ff=8, heads=2, layers=1, decoder_layers=2, dropout=0.0,
                    pre_norm=True, smoothing=0.1)
    learners.prepare(tmp_path, SETTINGS, config, Transformer(config, SETTINGS['seed']), pairs)
    return tmp_path


def test_a_batch_of_tokens_has_the_same_loss_and_gradients_in_both(torch, folder):
    ours, theirs = (learners.Learner(folder, kind) for kind in ('ours', 'torch'))
    rows = next(ours.batches.batches(3, 0))
    assert len(set(ours.pairs.lengths[rows, 0])) > 1 and len(set(ours.pairs.lengths[rows, 1])) > 1, 'padding is not tested'
    ours.work.begin(10)
    model = ours.work.model
    loss, ctx = model.forward(ours.pairs.batch_of(rows))
    model.backward(ctx)
    batch = theirs.work.prepared(rows)
    assert [len(ids) for ids in batch[:3]] == ours.pairs.lengths[rows].max(0)[[0, 1, 1]].tolist()
    assert sum(ids.numel() for ids in batch[:2]) == sum(learners.positions(ours.pairs, rows))
    expected = theirs.work.module(*batch)
    expected.backward()
    assert abs(loss[0] - expected.item()) <= 1e-6 * loss[0]
    assert_same_gradients(model.params, theirs.work.model.named())


@pytest.mark.parametrize('schedule', ['linear', 'cosine', 'inverse-root'])
def test_both_train_alike_and_start_again_with_a_new_run(torch, folder, schedule):
    settings = json.loads((folder / 'settings.json').read_text())
    (folder / 'settings.json').write_text(json.dumps(settings | dict(schedule=schedule)))
    ours, theirs = (learners.Learner(folder, kind) for kind in ('ours', 'torch'))
    for learner in (ours, theirs):
        learner.turn(0, 5, 10**6, 0)                    # a calibration, which leaves no trace
    for total in (4, 12):                               # the second call continues until 12 steps are done
        found, expected = (learner.turn(1, 12, 10**6 if total == 12 else 0, 1) for learner in (ours, theirs))
        assert found['done'] == expected['done'] == (12 if total == 12 else 0)
    assert found['epoch'] == expected['epoch'] > 0 and found['steps'] == 12
    assert abs(found['loss'] - expected['loss']) <= 1e-4 * found['loss']
    with np.load(folder / 'ours.npz') as one, np.load(folder / 'torch.npz') as other, np.load(folder / 'weights.npz') as first:
        assert set(one.files) == set(other.files) == set(first.files)
        for name in one.files:
            moved = np.abs(one[name] - first[name]).max()
            assert moved > 1e-3 and np.abs(one[name] - other[name]).max() <= 0.05 * moved, name


def test_in_bf16_the_twin_multiplies_with_autocast(torch, folder):
    plain, rounded = (learners.Learner(folder, 'torch', in_bf16) for in_bf16 in (False, True))
    losses = [learner.turn(1, 3, 10**6, 0)['loss'] for learner in (plain, rounded)]
    assert 0 < abs(losses[0] - losses[1]) <= 1e-2 * losses[0]


@pytest.mark.parametrize('warmup', [0, 4])
@pytest.mark.parametrize('schedule', ['linear', 'cosine', 'inverse-root'])
def test_the_learning_rate_of_the_twin_is_the_one_of_the_kernels(schedule, warmup):
    settings = dict(lr=0.003, warmup=warmup, schedule=schedule)
    optimizer = Adam(Transformer(Config(5, 5, d_model=4, heads=1, d_ff=2, layers=1)).params, 0.003)
    rates = []
    for k in range(12):
        if schedule != 'inverse-root':
            decaying_rate(optimizer, 0.003, warmup, 10, schedule)
        elif warmup:
            inverse_square_root(optimizer, 0.003, warmup)
        rates.append((float(backend.get(optimizer.rate)[0]), learners.learning_rate(settings, 10, k)))
        optimizer.step()
    assert all(abs(found - expected) <= 1e-9 for found, expected in rates)
    assert len(dict(rates)) > (1 if warmup or schedule != 'inverse-root' else 0)


def test_turns_are_steps_of_the_batches_of_transformer_train(folder):
    learner, seen = learners.Learner(folder, 'ours'), []
    learner.work.prepared = lambda rows: seen.append(rows) or [rows]
    count = learner.batches.count(3, 0)
    answer = learner.turn(1, count + 2, 10**6, 0)
    assert answer['done'] == answer['steps'] == count + 2 and 1 < answer['epoch'] < 2
    expected = [*learner.batches.batches(3, 0), *learner.batches.batches(3, 1)][:count + 2]
    assert all((rows == those).all() for rows, those in zip(seen, expected, strict=True))
    assert answer['pause_s'] > 0 and answer['pause_cpu_s'] >= 0 and learner.turn(1, count + 2, 10**6, 0)['steps'] == 0


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which('g++'), reason='torch.compile needs g++: apt install g++')
def test_the_compiled_twin_trains_as_the_other_and_is_compiled_once(torch, folder):
    """The first batch has equal sizes, to which the compiler must not specialise its code."""
    from torch._dynamo.utils import counters
    counters.clear()
    eager, compiled = (learners.Learner(folder, kind) for kind in ('torch', 'torch-compile'))

    def longest(rows):
        return tuple(eager.pairs.lengths[rows].max(0))
    batches = list(eager.batches.batches(3, 0))
    batches = [next(rows for rows in batches if len(set(longest(rows))) == 1), *batches[:7]]
    assert sum(len(set(longest(rows))) > 1 for rows in batches) > 2
    for learner in (eager, compiled):
        learner._order = lambda: iter(batches)
    found, expected = (learner.turn(1, 8, 10**6, 1) for learner in (compiled, eager))
    assert found['done'] == 8 and abs(found['loss'] - expected['loss']) <= 1e-5 * expected['loss']
    assert counters['stats']['unique_graphs'] == 1
    with np.load(folder / 'torch.npz') as one, np.load(folder / 'torch-compile.npz') as other:
        for name in one.files:
            assert np.abs(one[name] - other[name]).max() <= 1e-3 * np.abs(one[name]).max(), name


def test_sorted_batches_have_the_same_samples_and_less_padding(torch, folder):
    settings = json.loads((folder / 'settings.json').read_text())
    (folder / 'settings.json').write_text(json.dumps(settings | dict(is_sorted=True)))
    ours, theirs = (learners.Learner(folder, kind) for kind in ('ours', 'torch'))
    seen = {ours: [], theirs: []}
    count = ours.batches.count(3, 0)
    for learner, batches in seen.items():
        learner.epoch = learner.samples = 0
        batches += [rows for rows, _ in zip(learner._order(), range(count), strict=False)]
    assert (np.concatenate(seen[ours]) == np.concatenate(list(ours.batches.batches(3, 0)))).all()
    plain, similar = (sum(sum(learners.positions(ours.pairs, rows)) for rows in batches) for batches in seen.values())
    assert similar < plain and all(ours.pairs.lengths[rows].sum(0).max() <= 60 for rows in seen[theirs])
    of_epoch = learners.sorted_batches(ours.batches, ours.pairs.lengths, 3, 0)
    assert sorted(np.concatenate(of_epoch)) == list(range(len(ours.pairs))) and abs(len(of_epoch) - count) <= 0.2 * count
    assert [list(rows) for rows in of_epoch[:count]] == [list(rows) for rows in seen[theirs][:len(of_epoch)]]
    lengths = [ours.pairs.lengths[rows, 1].max() for rows in of_epoch]
    assert lengths != sorted(lengths), 'the order of the batches is not random'
    assert quality.padding_share(settings, ours.pairs, True) < quality.padding_share(settings, ours.pairs, False)


def test_with_epochs_both_get_the_sorted_batches(folder):
    settings = json.loads((folder / 'settings.json').read_text())
    (folder / 'settings.json').write_text(json.dumps(settings | dict(is_sorted=True, same_batches=True)))
    ours = learners.Learner(folder, 'ours')
    epochs = [learners.sorted_batches(ours.batches, ours.pairs.lengths, 3, epoch) for epoch in (0, 1)]
    ends = quality.epoch_ends(settings, ours.pairs, 2, True)
    assert ends == [len(epochs[0]), len(epochs[0]) + len(epochs[1])]
    assert quality.epoch_ends(settings, ours.pairs, 1, False) == [ours.batches.count(3, 0)]
    ours.epoch = ours.samples = 0
    seen = [rows for rows, _ in zip(ours._order(), range(ends[1]), strict=False)]
    assert all((rows == those).all() for rows, those in zip(seen, epochs[0] + epochs[1], strict=True))


class Worker:
    """A contestant that trains a step per call of turn, unless it may not go on."""

    def __init__(self):
        self.done, self.saves = 0, []

    def turn(self, number, total, milliseconds, save, until):
        before, self.done = self.done, min(self.done + (milliseconds > 0), until, total)
        self.saves += [self.done] * save
        return dict(trained_s=1.0, loss=2.0, steps=self.done - before, done=self.done, epoch=self.done / 3, peak_mib=1.0,
                    pause_s=0.0, pause_cpu_s=0.0)


class Judge:
    def loss(self, path):
        return 1.5

    def scores(self, path):
        return dict(one_reference=dict(bleu=10.0), all_references=dict(bleu=20.0))


@pytest.mark.parametrize('every, expected', [(None, [3, 7, 8]), (3.0, [3, 6, 8]), (0.4, [1, 2, 3, 4, 5, 6, 7, 8])])
def test_a_contestant_is_evaluated_after_each_epoch_or_so_many_seconds(every, expected):
    side = quality.Side(Worker(), 8, every, [3, 7, 8])
    while not side.is_done:
        if side.train(20):
            side.evaluate(Judge(), None)
    assert [point['step'] for point in side.figures['points']] == side.worker.saves == expected
    assert {point['loss'] for point in side.figures['points']} == {2.0}
    assert {point['validation'] for point in side.figures['points']} == {1.5}


# ---- the plan of a contest -------------------------------------------------------------------------------------------

FIGURES = {'ours': dict(start_s=0.0, step_s=0.1), 'torch': dict(start_s=0.0, step_s=0.4),
           'torch-compile': dict(start_s=60.0, step_s=0.2)}


def planned(*flags, warmup=0, steps=None):
    return quality.planned(quality.parse([*flags]), FIGURES, steps, warmup)


def test_the_compiler_takes_part_if_it_gains_more_than_its_own_time():
    assert planned('--minutes', '10') == {'ours': 6000, 'torch-compile': 3000}
    assert planned('--minutes', '1.9') == {'ours': 1140, 'torch': 285}
    assert planned('--epochs', '1', steps=301) == {'ours': 301, 'torch-compile': 301}
    assert planned('--epochs', '1', steps=299) == {'ours': 299, 'torch': 299}


def test_a_warmup_that_does_not_fit_into_the_time_is_refused():
    with pytest.raises(UserError, match=r'--warmup 285: expected less than the 285 steps of PyTorch eager; give a smaller'):
        planned('--minutes', '1.9', warmup=285)


def test_the_time_at_which_a_curve_reaches_a_score_is_interpolated():
    points = [dict(seconds=10.0, bleu=20.0), dict(seconds=20.0, bleu=30.0), dict(seconds=30.0, bleu=29.0)]
    assert [quality.reached(points, bleu) for bleu in (10.0, 20.0, 25.0, 29.5, 31.0)] == [5.0, 10.0, 15.0, 19.5, None]


# ---- a whole contest -------------------------------------------------------------------------------------------------

def test_a_contest_writes_its_curves_and_draws_them(torch, judged, pictures, tmp_path, capsys):
    result = tmp_path / 'result.json'
    quality.main(['--minutes', '0.02', '--eval-every', '0.5', *SHORT, '-o', str(result), '--recipe', *RECIPE])
    printed = capsys.readouterr().out
    report = json.loads(result.read_text())
    assert report['is_finished'] and report['test_sentences'] == 9 and 0 < report['padding'] < 1
    assert report['settings']['schedule'] == 'cosine' and report['recipe'].startswith('-f embedded') and report['threads'] == 1
    assert list(report['contestants']) == ['ours', 'torch'] == list(report['calibration'])
    for kind, side in report['contestants'].items():
        assert side['planned_steps'] == max(int(1.2 / report['calibration'][kind]['step_s']), 1) == side['steps']
        points = side['points']
        assert points[-1]['step'] == side['steps'] and points[-1]['seconds'] == side['seconds'] > 0
        for due, point in enumerate(points[:-1], 1):        # each as soon as it was due
            assert point['step'] < side['steps']
            assert point['seconds'] >= 0.5 * due            # never earlier; how much later depends on the machine
        assert all(0 <= point['bleu'] <= 100 and 0 < point['loss'] < 20 and 0 < point['validation'] < 20 for point in points)
        assert side['beam']['beam'] == 5 and side['beam']['sentences'] == 9
    assert printed.count(' min  PyTorch eager') == len(report['contestants']['torch']['points'])
    pictures = [tmp_path / name for name in ('one.svg', 'two.svg', 'one.png')]
    for picture in pictures:
        quality.main(['--draw', str(result), '-o', str(picture)])
    svg = pictures[0].read_text()
    assert svg == pictures[1].read_text() and svg.startswith('<?xml') and '#0072b2' in svg and '#d55e00' in svg
    assert pictures[2].read_bytes().startswith(b'\x89PNG')


def test_ctrl_c_ends_a_contest_and_keeps_what_was_measured(torch, judged, tmp_path):
    result = tmp_path / 'result.json'
    command = [sys.executable, '-m', 'bench.quality', '--epochs', '100000', '--eval-every', '0.2', *SHORT, '-o', str(result),
               '--recipe', *RECIPE, '--precision', 'bf16']
    environment = environment_without('PYOPS_BACKEND', PYTHONPATH=str(ROOT))
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                          start_new_session=True) as run:
        until = time.monotonic() + 120
        while not result.exists() and run.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        os.killpg(run.pid, signal.SIGINT)                   # as a terminal does: to the contestants, too
        errors = run.stderr.read()
    assert run.returncode == 130, errors
    assert errors.strip() == f'not finished; the figures so far : {result}'
    report = json.loads(result.read_text())
    assert not report['is_finished'] and report['precision'] == 'bf16'
    assert report['contestants']['ours']['points'][0]['step'] > 0
    with pytest.raises(ProcessLookupError):                 # no contestant is left
        os.killpg(run.pid, 0)


# ---- bad input -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('flags, message', [
    ([], 'expected either --minutes M or --epochs N'), (['--minutes', '1', '--epochs', '1'], 'expected either'),
    (['--minutes', '0'], '--minutes: expected a number from 1e-37 to 1e38, got 0'),
    (['--draw', 'x.json'], '--draw x.json: expected -o FILE, the picture to write')])
def test_bad_flags_of_the_contest(flags, message, capsys):
    with pytest.raises(SystemExit) as error:
        quality.main(flags)
    err = capsys.readouterr().err
    assert error.value.code == 2 and message in err and len(err.splitlines()) == 1


def test_a_contest_without_pytorch_names_the_package(monkeypatch):
    monkeypatch.setattr('bench.contest.importlib.util.find_spec', lambda name: None)
    with pytest.raises(UserError, match='torch is not installed; install it with: '):
        quality.main(['--minutes', '1'])


def test_a_contest_without_the_corpus_says_where_to_get_it(torch, judged, monkeypatch, tmp_path):
    monkeypatch.delenv('PYOPS_DATA', raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r'fra-eng is not found; get it with: python -m pyops\.data get fra-eng, or'):
        quality.main(['--minutes', '1'])
    with pytest.raises(UserError, match='nowhere.txt'):
        quality.main(['--minutes', '1', '--recipe', '-f', 'nowhere.txt'])


@pytest.mark.parametrize('flags, message', [
    (['-e', '5'], '--recipe --epochs: expected flags of the data'),
    (['--recipe', 'minutes-30', '--keep-best', 'loss'], '--recipe --keep-best: expected flags of the data'),
    (['--ema', '0.9'], '--recipe --ema: expected flags'),
    (['--accumulate', '2'], '--recipe --accumulate: expected'), (['-g', '1'], '--recipe --gpu: expected'),
    (['--quant', 'mxfp8'], '--recipe --quant: expected'), (['--hold-out', '0'], 'nothing is held out to test with; add'),
    (['--heads', '3'], '--heads 3: expected a divisor')])
def test_recipes_that_the_twin_cannot_follow_are_refused(torch, judged, flags, message):
    with pytest.raises(UserError, match=message):
        quality.main(['--minutes', '1', '--recipe', '-f', 'embedded', '-t', '1', *flags])


def test_rounding_that_the_environment_asks_for_is_refused(torch, judged, monkeypatch):
    monkeypatch.setenv('CUSTOM_QUANT_TYPE', 'mxfp8')
    with pytest.raises(UserError, match='quant mxfp8: expected none; the PyTorch twin supports nothing else; unset CUSTOM'):
        quality.main(['--minutes', '1', '--recipe', '-f', 'embedded', '-t', '1'])


def test_drawing_refuses_files_that_are_no_results(pictures, tmp_path):
    path = tmp_path / 'some.json'
    with pytest.raises(UserError, match='some.json: cannot be read'):
        quality.main(['--draw', str(path), '-o', str(tmp_path / 'picture.svg')])
    for text in ('{', '[]', '{"contestants": {"ours": {}}}'):
        path.write_text(text)
        with pytest.raises(UserError, match='some.json: not a result of python -m bench.quality'):
            quality.load(path)
    path.write_text('{"contestants": {"ours": {"points": [{"seconds": 1}]}, "torch": {"points": []}}}')
    with pytest.raises(UserError, match='a contestant was not evaluated yet'):
        quality.load(path)
    with pytest.raises(UserError, match='picture.gif: expected a name that ends in .svg or .png'):
        quality.draw({}, tmp_path / 'picture.gif')
