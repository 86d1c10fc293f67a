"""The commands that write docs/reliability.md, in short: what they count, and whether they would find a defect."""
import gc
import os
import subprocess
import sys

import pytest
from conftest import ROOT, environment_without

from pyops import rewind
from scripts import endurance, faults, rewind_questions
from scripts.endurance import Reading

linux = pytest.mark.skipif(not sys.platform.startswith('linux'), reason='reads /proc: run it on Linux')


def output_of(module, *flags):
    """Run a command in a process of its own.   Return what it prints"""
    done = subprocess.run([sys.executable, '-m', module, *flags], cwd=ROOT, capture_output=True, text=True,
                          env=environment_without('PYOPS_BACKEND', PYTHONPATH=str(ROOT)))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_random_tensors_of_past_steps_have_the_bits_that_the_run_saved():
    wrong, steps, tensors, resumed = rewind_questions.questions(10, seed=1, epochs=3)
    assert wrong == [] and steps > 20 and tensors > 2000 and 0 < resumed < 10


def test_a_step_repeated_with_other_dropout_is_a_wrong_answer(monkeypatch):
    kept = rewind.kept_flags
    monkeypatch.setattr(rewind, 'kept_flags', lambda flags, *more: [*kept(flags, *more), '-d', '0.2'])
    assert len(rewind_questions.questions(2, seed=1, epochs=1)[0]) == 2


@linux
def test_a_process_that_trains_stops_resumes_and_serves_leaves_nothing(tmp_path):
    readings = endurance.run(0, threads=1)
    assert len(readings) == 4
    first, last = readings[1][1], readings[3][1]            # the second turn of seq2seq has what the first one keeps
    assert last[1:] == first[1:] and last.memory > 10_000


@linux
def test_files_and_descriptors_that_are_left_are_read(tmp_path):
    gc.collect()                        # closes files that other tests have left
    before = endurance.reading(tmp_path)
    with open(tmp_path / 'left', 'w'):
        after = endurance.reading(tmp_path)
    assert (after.descriptors, after.files) == (before.descriptors + 1, before.files + 1)


def test_each_kind_of_growth_is_a_problem():
    usual = Reading(100_000, 6, 2, 0, 4)

    def problems(*last):
        readings = [(float(n), usual if n < 40 else Reading(*last)) for n in range(1, 51)]
        return endurance.result(readings).problems()
    assert problems(*usual) == problems(100_900, 5, 1, 0, 0) == []
    assert problems(101_100, 6, 2, 0, 4) == ['memory grew by 1.10%']
    assert problems(100_000, 7, 3, 2, 5) == ['1 more descriptors', '1 more threads', '2 more shared', '1 more files']


@linux
def test_killed_and_faulty_runs_are_counted_and_resume_with_the_same_bits():
    lines = output_of('scripts.faults', '--rounds', '3', '--seed', '5').splitlines()
    rows = {line.split('|')[1].strip(): line.split('|')[2:4] for line in lines if line.startswith('| ')}
    for kind in (faults.KILL, faults.CUT, faults.FILE):
        assert [int(number) for number in rows[kind]] == [3, 0]


def test_a_resumed_run_with_other_bits_is_counted(monkeypatch):
    def results(kind, rounds, *_):
        yield from [(kind, n % 2 == 0) for n in range(rounds)]
    monkeypatch.setattr(sys, 'path', [*sys.path, os.fspath(ROOT / 'tests' / 'helpers')])
    import faults as helper
    monkeypatch.setattr(helper, 'fail_allocations', lambda folder, threads=1: 7 * threads)
    monkeypatch.setattr(helper, 'fail_writes_and_mappings', lambda folder: 5)
    monkeypatch.setattr(faults, 'kills', lambda rounds, *_: results(faults.KILL, rounds))
    monkeypatch.setattr(faults, 'file_faults', results)
    tried, wrong = faults.run(4, 0)
    assert tried == {faults.KILL: 4, faults.CUT: 4, faults.FILE: 4, faults.MEMORY: 7, faults.THREADS: 14, faults.WRITES: 5}
    assert wrong == {faults.KILL: 2, faults.CUT: 2, faults.FILE: 2}
    assert '38 faults (seed 0):' in faults.table(tried, wrong, 0) and '| power cut | 4 | 2 |' in faults.table(tried, wrong, 0)
