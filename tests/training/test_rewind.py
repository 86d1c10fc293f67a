"""Past steps of a run, repeated: every tensor, the recorded losses, and a branch."""
import argparse
import errno
import os
import shutil

import numpy as np
import pytest
from translation import TINY_SEQ2SEQ, TINY_TRANSFORMER, assert_same_training, newest

import seq2seq.train
import transformer.train
from pyops import checkpoint, rewind
from pyops.__main__ import main
from pyops.errors import UserError
from pyops.inspect.logs import Logs
from pyops.steplog import BYTES, StepLog, Timeline

STEPS = 4                       # of an epoch
FLAGS = [*TINY_TRANSFORMER, '-d', '0.1', '--save-every', '1', '--threads', '1', '--warmup', '6', '--schedule', 'linear']


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """A run of two epochs that saved a checkpoint after each, and all tensors of some steps."""
    place = tmp_path_factory.mktemp('trained')
    transformer.train.main(['-e', '2', '-c', str(place / 'run'), *FLAGS,
                            '--save-tensors', str(place / 'dump'), '--save-steps', '0,4,6'])
    return place


def status_of(*arguments):
    with pytest.raises(SystemExit) as left:
        main(list(map(str, arguments)))
    return left.value.code


@pytest.mark.parametrize('step, start', [(0, None), (STEPS, STEPS), (STEPS + 2, STEPS)])
def test_every_tensor_of_a_past_step_has_the_bits_that_the_run_saved(trained, step, start, tmp_path, capsys):
    before = sorted(os.listdir(trained / 'run'))
    assert status_of('rewind', trained / 'run', '--step', step, '--save', tmp_path / 'again') == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith('from the start of the run' if start is None else f'from {trained / "run"}/checkpoint_')
    assert f'step {step} : loss ' in out[1] and out[1].endswith(f'{start or 0} to {step}, have the recorded bits')
    one, other = ({(entry.layer, entry.operation, entry.name): entry.load().tobytes() for entry in Logs(folder).entries
                   if entry.step == step} for folder in (trained / 'dump', tmp_path / 'again'))
    assert one == other and len(one) > 100
    assert sorted(os.listdir(trained / 'run')) == before


def test_a_past_step_with_delayed_scaling_has_the_recorded_bits(tmp_path, capsys):
    folder = tmp_path / 'run'
    transformer.train.main(['-e', '2', '-c', str(folder), *FLAGS, '--quant', 'fp8:delayed=6'])
    capsys.readouterr()
    assert status_of('rewind', folder, '--step', STEPS + 2, '--save', tmp_path / 'dump') == 0
    out = capsys.readouterr().out.splitlines()
    assert 'checkpoint_' in out[0] and out[1].endswith(f'{STEPS} to {STEPS + 2}, have the recorded bits')
    formats = [entry.uses[0]['format'] for entry in Logs(tmp_path / 'dump').entries if entry.name == 'input' and entry.uses]
    assert len(formats) > 5 and all(text.startswith('fp8:block=tensor:factor=') for text in formats)


def test_tensors_are_shown_by_their_names_in_a_dump_or_as_operands_of_products(trained, capsys):
    run, step, layer = trained / 'run', STEPS + 2, 'encoder.0.self_attention.q'
    assert status_of('rewind', run, '--step', step, '--show', f'{layer} wgrad.g', '--show', f'{layer} backward.grad_output',
                     '--show', f'{layer} input') == 0
    out = capsys.readouterr().out.splitlines()
    first, second, third = (line for line in out if line.startswith(f'{layer} '))
    assert first == second and first.startswith(f'{layer} backward grad_output, step {step} (')
    (entry,) = (entry for entry in Logs(trained / 'dump').entries
                if (entry.layer, entry.name, entry.step) == (layer, 'input', step))
    assert third == f'{layer} forward input, step {step} {entry.shape} : {rewind.describe(entry.load())}'
    assert status_of('rewind', run, '--step', step, '--show', f'{layer} input', '--show', 'encoder.0.q wgrad.g') == 2
    assert "--show 'encoder.0.q wgrad.g': encoder.0.q fits none of the " in (found := capsys.readouterr().err)
    assert 'among others, encoder.0.self_attention.q' in found and '--save-layers' not in found
    assert status_of('rewind', run, '--step', step, '--show', f'{layer} nothing') == 2
    assert f"--show '{layer} nothing': no such tensor; the layer has '{layer} input'" in capsys.readouterr().err
    assert status_of('rewind', run, '--step', step, '--show', 'nothing') == 2
    assert "--show 'nothing': expected a layer and a tensor" in capsys.readouterr().err


def test_a_run_with_other_flags_after_its_resume_is_repeated_with_the_flags_of_each_part(tmp_path, capsys):
    run = tmp_path / 'run'
    seq2seq.train.main(['-e', '1', '-c', str(run), *TINY_SEQ2SEQ, '--save-every', '1'])
    seq2seq.train.main(['-e', '2', '-l', '0.02', '-c', str(run), *TINY_SEQ2SEQ])
    for path in run.glob('*.safetensors'):
        path.unlink()
    timeline = Timeline(run)
    assert [session.first for session in timeline.sessions] == [0, len(timeline) // 2] and timeline.values.all()
    assert status_of('rewind', run, '--step', len(timeline) - 1, '--show', 'output input') == 0
    assert f'the losses and gradient norms of {len(timeline)} steps, 0 to ' in capsys.readouterr().out


def test_a_damaged_checkpoint_is_passed_over_and_a_wrong_loss_is_named(trained, tmp_path, capsys):
    run = tmp_path / 'run'
    shutil.copytree(trained / 'run', run)
    first = min(run.glob('*.safetensors'))
    content = bytearray(first.read_bytes())
    content[-5] ^= 4
    first.write_bytes(content)
    (records,) = run.glob('*.f32')
    values = bytearray(records.read_bytes())
    values[BYTES * 2] ^= 1                  # the last bit of the loss of step 2
    records.write_bytes(values)
    assert status_of('rewind', run, '--step', STEPS, '--show', 'output input') == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(f'warning: passed over {first}: damaged') and out[1] == 'from the start of the run'
    assert out[2].startswith('step 2 : loss ') and ' differs from the recorded ' in out[2]


@pytest.mark.parametrize('arguments, problem', [
    (['rewind', 'RUN', '--step', '8'], '--step 8: RUN has the losses of steps 0 to 7; give one of these'),
    (['rewind', 'EMPTY', '--step', '0'], 'EMPTY: has no record of the steps of a run (steps_RUN.jsonl)'),
    (['branch', 'RUN', '--step', '9'], '--step 9: RUN has 8 steps; give a number from 1 to 8'),
    (['branch', 'RUN', '--step', '1', '--to', 'RUN'], 'RUN: already exists; give a new folder with --to'),
    (['bisect', 'RUN', 'loss = 3'], "CONDITION 'loss = 3': expected loss or norm, then"),
    (['bisect', 'RUN', 'loss > much'], "CONDITION 'loss > much': expected loss or norm, then")])
def test_a_step_a_folder_or_a_condition_that_does_not_exist_is_refused(trained, arguments, problem, tmp_path, capsys):
    names = {'RUN': str(trained / 'run'), 'EMPTY': str(tmp_path)}
    assert status_of(*(names.get(text, text) for text in arguments)) == 2
    for name, path in names.items():
        problem = problem.replace(name, path, 1) if name in arguments else problem
    assert problem in capsys.readouterr().err


# ---- bisect ----------------------------------------------------------------------------------------------------------

def test_the_first_step_that_meets_a_condition_is_found(trained, capsys):
    losses = Timeline(trained / 'run').values[:, 0]
    limit = float(np.sort(losses)[3])
    assert status_of('bisect', trained / 'run', f'loss <= {limit}') == 0
    step = int(np.argmax(losses <= limit))
    out = capsys.readouterr().out
    assert f'step {step} : loss {losses[step]:.6g} ' in out and f'    <- the first with loss <= {limit}\n' in out
    assert '\n4 of 8 steps; ' in out
    assert status_of('bisect', trained / 'run', 'norm is not finite') == 1
    assert capsys.readouterr().out == 'no step of 0 to 7 has norm is not finite\n'


def test_the_kernel_of_a_loss_that_is_not_finite_is_found(tmp_path, capsys, monkeypatch):
    run = tmp_path / 'run'
    with pytest.raises(UserError, match=r'(loss|gradient) is (nan|inf)'):
        transformer.train.main(['-e', '4', '-c', str(run), *FLAGS, '--warmup', '0', '--schedule', 'inverse-root', '-l', '1e30'])
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    status = status_of('bisect', run, 'norm is not finite')
    out, err = capsys.readouterr()
    step = int(np.argmax(~np.isfinite(Timeline(run).values).all(1)))
    assert status == 0 and f'step {step} : loss ' in out
    assert f'step {step} : ' in err and (tmp_path / f'not_finite_step_{step}.safetensors').exists(), err


# ---- branch ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('step', [STEPS, STEPS + 2])
def test_a_branch_is_the_run_resumed_from_there_with_other_flags(trained, step, tmp_path, capsys):
    to = tmp_path / 'branch'
    assert status_of('branch', trained / 'run', '--step', step, '--to', to, '-l', '0.0005') == 0
    flags = ['-e', '2', '-c', str(tmp_path / 'by_hand'), *FLAGS]
    transformer.train.main([*flags, '--max-steps', str(step)])
    transformer.train.main([*flags, '-l', '0.0005'])
    assert_same_training(newest(to), newest(tmp_path / 'by_hand'))
    assert newest(to)[1]['settings']['lr'] == 0.0005 and newest(trained / 'run')[1]['settings']['lr'] != 0.0005
    assert all(not path.is_symlink() for path in to.iterdir())


# ---- the files -------------------------------------------------------------------------------------------------------

def test_flags_that_name_files_and_the_end_of_a_run_are_left_out():
    flags = ['-e', '3', '-c', 'x', '--checkpoint=y', '-cz', '--max-steps', '4', '--no-plan', '--check-finite', '-l', '0.1',
             '--check-finite', 'DIR', '--keep-best', 'bleu', '-v', '--tied']
    assert rewind.kept_flags(flags) == ['-e', '3', '-l', '0.1', '--tied']
    assert rewind.kept_flags(['-c', 'x', '--keep', '3', '--max-steps=9'], rewind.OF_ONE_START) == ['--keep', '3']


def test_a_resume_from_an_earlier_step_drops_the_later_steps_and_their_checkpoints(tmp_path):
    for name in ('a', 'b', 'c'):
        (tmp_path / name).touch()
    with StepLog(tmp_path, 'id', 0, {'flags': ['one']}) as log:
        log.add([(1.0, 0, 0.5), (2.0, 0, 0.5), (3.0, 0, 0.5)])
        log.saved(tmp_path / 'a', 1)
        log.saved(tmp_path / 'b', 3)
    with StepLog(tmp_path, 'id', 1, {'flags': ['two']}) as log:
        log.add([(4.0, 0, np.nan)])
        log.saved(tmp_path / 'c', 2)
        log.saved(tmp_path / 'gone', 2)
    with open(tmp_path / 'steps_id.jsonl', 'a') as file:
        file.write('{"session": ')                      # cut short by a kill
    timeline = Timeline(tmp_path)
    assert timeline.values[:, 0].tolist() == [1.0, 4.0] and np.isnan(timeline.values[1, 1])
    assert timeline.saved == [(1, tmp_path / 'a'), (2, tmp_path / 'c')]
    assert [(session.facts['flags'], *part) for session, *part in timeline.parts(0, 2)] == [(['one'], 0, 1), (['two'], 1, 2)]
    assert [part[1:] for part in timeline.parts(1, 2)] == [(1, 2)]


@pytest.mark.parametrize('line', [
    '{"session": 1e999}', '{"session": -1}', '{"session": true}', '{"session": "0"}', '{"session": null}', '"session"', '[]',
    f'{{"saved": "{"a" * 5000}", "step": 0}}', '{"saved": "../a", "step": 0}', '{"saved": "/dev/null", "step": 0}',
    r'{"saved": "\u0000", "step": 0}', '{"saved": 3, "step": 0}', '{"saved": "a", "step": 1e999}', '[' * 100_000,
    '{"session": ' + '9' * 5000 + '}', '\udcff'], ids=lambda line: line[:30])
def test_a_line_that_is_no_event_is_ignored(tmp_path, line):
    (tmp_path / 'a').touch()
    (tmp_path.parent / 'a').touch()
    with StepLog(tmp_path, 'id', 0, {'flags': ['one']}) as log:
        log.add([(1.0, 0, 0.5)])
        log.saved(tmp_path / 'a', 1)
    with open(tmp_path / 'steps_id.jsonl', 'a', errors='surrogateescape') as file:
        file.write(line + '\n')
    timeline = Timeline(tmp_path)
    assert timeline.sessions == [(0, {'flags': ['one']})] and timeline.saved == [(1, tmp_path / 'a')]


@pytest.mark.parametrize('facts', [{}, {'program': 'os'}, {'flags': '-e 1'}, {'flags': [1]}, {'folder': None}, {'program': []},
                                   {'folder': '\0'}], ids=str)
def test_a_start_without_its_program_flags_or_folder_is_not_repeated(tmp_path, facts):
    facts = facts and {'program': 'seq2seq', 'flags': ['-e'], 'folder': '.'} | facts
    with StepLog(tmp_path, 'id', 0, facts) as log:
        log.add([(1.0, 0, 0.5)])
    for command in ('rewind', 'branch'):
        with pytest.raises(UserError, match='the record of the start of training at step 0 .* is damaged'):
            options = argparse.Namespace(folder=tmp_path, step=int(command == 'branch'), to=str(tmp_path / 'to'), show=[],
                                         save=None, flags=[])
            getattr(rewind, command)(options)


def test_an_index_that_is_no_file_is_passed_over(tmp_path):
    (tmp_path / 'steps_id.jsonl').symlink_to('nowhere')
    (tmp_path / 'steps_di.jsonl').mkdir()
    with pytest.raises(UserError, match='has no record of the steps of a run'):
        Timeline(tmp_path)


def test_a_run_continued_in_another_folder_needs_a_checkpoint_there(tmp_path):
    with StepLog(tmp_path, 'id', 5, {}) as log:
        log.add([(1.0, 0, 0.5)])
    timeline = Timeline(tmp_path)
    assert timeline.first == 5
    with pytest.raises(UserError, match='--step 4: .* has the losses of steps 5 to 5'):
        timeline.check(4)
    with pytest.raises(UserError, match='has no checkpoint from before step 5, and .*; give the folder in which it started'):
        rewind.checkpoint_before(timeline, 5)


def test_losses_that_cannot_be_written_cause_one_warning_and_training_goes_on(tmp_path, capsys, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with StepLog(tmp_path, 'id', 0, {}) as log:
        monkeypatch.setattr(os, 'pwrite', refuse)
        log.add([(1.0, 0, 0.5)])
        log.add([(2.0, 0, 0.5)])
        monkeypatch.undo()
        log.add([(3.0, 0, 0.5)])
    assert capsys.readouterr().err == (f'warning: {tmp_path}/steps_id.f32: cannot write the losses of the steps (No space '
                                       'left on device); training goes on\n')
    assert Timeline(tmp_path).values[:, 0].tolist() == [0.0, 0.0, 3.0]


def test_files_that_cannot_be_opened_end_the_run_before_training(tmp_path):
    (tmp_path / 'steps_id.f32').mkdir()
    with pytest.raises(UserError, match='cannot write the losses of the steps .*: move them away or name another folder'):
        StepLog(tmp_path, 'id', 0, {})
    assert checkpoint.find(tmp_path).path is None
