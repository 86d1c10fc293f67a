"""Figures that add up over runs, and the processes that find them: nothing is lost or counted twice."""
import datetime
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, environment_without

from pyops.errors import UserError
from scripts import fuzz, generated, soak, totals, workers
from scripts.totals import PAGE, Runs
from scripts.workers import Ended, Workers

FIRST = Runs(5, 8, 2, ('abc1234', 'def5678'))
LATER = Runs(9, 9, 1, ('0123abc', '0123abc'))


def test_a_text_names_the_runs_that_it_is_from():
    assert str(FIRST) == 'seeds 5 to 8, 2 runs, commits abc1234 to def5678'
    assert all(Runs.read(f'7 inputs ({runs}):') == runs for runs in (FIRST, LATER))
    assert FIRST + LATER == Runs(5, 9, 3, ('abc1234', '0123abc'))
    with pytest.raises(UserError, match='expected "seeds N to N, N runs, commits C to C"'):
        Runs.read('7 inputs (seed 3)')


@pytest.mark.parametrize('first', [8, 10, 0])
def test_runs_with_a_seed_in_common_or_a_gap_are_not_added(first):
    with pytest.raises(UserError, match=f'seeds 5 to 8 now, and this run began with {first}: its figures are not added'):
        FIRST + LATER._replace(first=first)


def test_counts_of_readers_add_up():
    first = fuzz.Counts(FIRST, {'idx': fuzz.Count(10, 3, 1), 'npy': fuzz.Count(5, 5, 0)})
    later = fuzz.Counts(LATER, {'npy': fuzz.Count(1, 0, 0), 'pt': fuzz.Count(4, 2, 2)})
    assert fuzz.Counts.read(str(first)) == first
    assert first + later == fuzz.Counts(FIRST + LATER, {'idx': fuzz.Count(10, 3, 1), 'npy': fuzz.Count(6, 5, 0),
                                                        'pt': fuzz.Count(4, 2, 2)})
    assert '20 inputs (seeds 5 to 9' in str(first + later) and '| idx | 10 | 6 | 3 | 1 |' in str(first + later)


def test_counts_of_programs_add_up():
    first, later = soak.Counts(FIRST, 20, 9, 100, 1, ('cpu avx2',)), soak.Counts(LATER, 3, 2, 10, 0, ('cpu avx512', 'cpu avx2'))
    assert soak.Counts.read(str(first)) == first and soak.Counts.read(str(later)) == later
    assert first + later == soak.Counts(FIRST + LATER, 23, 9, 110, 1, ('cpu avx2', 'cpu avx512'))
    assert str(first + later).startswith('5 programs (seeds 5 to 9, 3 runs')


@pytest.mark.parametrize('name, kind', [('soak', soak.Counts), ('fuzz', fuzz.Counts)])
def test_a_run_can_be_added_to_the_page(name, kind):
    text = generated.text(PAGE, name)
    assert re.sub(r'\nSaved on .*\n', '', text) == str(kind.read(text))


def test_figures_have_the_date_and_the_machine_of_the_run_that_saved_them_last(tmp_path, monkeypatch):
    page = tmp_path / 'page.md'
    page.write_text('<!-- soak -->\n<!-- /soak -->\n')
    monkeypatch.setattr(totals, 'cpu_name', lambda: 'a CPU')
    monkeypatch.setattr(totals, 'cores', lambda: 2)
    counts = soak.Counts(FIRST, 20, 9, 100, 1, ('cpu avx2',))
    for _ in range(2):
        totals.write('soak', str(counts), 'make soak', page)
        text = generated.text(page, 'soak')
        assert text == f'{counts}\nSaved on {datetime.date.today()}; the machine: a CPU, 2 cores.\n'
        assert soak.Counts.read(text) == counts


def test_the_commit_of_a_run_says_whether_the_sources_were_changed(tmp_path, monkeypatch):
    def git(*arguments):
        subprocess.run(['git', '-c', 'user.name=a', '-c', 'user.email=a@b', *arguments], cwd=tmp_path, check=True)
    monkeypatch.setattr(totals, 'ROOT', tmp_path)
    assert totals.commit() == 'unknown'
    git('init', '-q')
    (tmp_path / 'docs').mkdir()
    (tmp_path / 'docs' / 'reliability.md').write_text('1')
    (tmp_path / 'a.py').write_text('1')
    git('add', '.')
    git('commit', '-qm', 'a')
    name = totals.commit()
    (tmp_path / 'docs' / 'reliability.md').write_text('2')
    assert totals.commit() == name != 'unknown'
    (tmp_path / 'a.py').write_text('2')
    assert totals.commit() == f'{name}-changed'


# ---- processes -----------------------------------------------------------------------------------------------------------

def counting(send, is_over):
    count = 0
    while not is_over():
        time.sleep(0.01)
        count += 1
    send(count)


def test_tasks_run_at_the_same_time_and_report():
    with Workers() as team:
        found = list(team.run([counting, lambda send, is_over: [send('a'), send(['b', None])]], 0.3))
    assert [message for number, message in found if number] == ['a', ['b', None]]
    (count,) = [message for number, message in found if not number]
    assert 0 < count <= 30 and team.signal is None


def test_a_task_that_fails_or_does_not_end_is_reported(monkeypatch, capfd):
    monkeypatch.setattr(workers, 'GRACE', 1.5)

    def never_ends(send, is_over):
        send('begun')
        while True:
            time.sleep(1)

    def ends_its_process(send, is_over):
        send(1)
        os._exit(3)
    with Workers() as team:
        found = list(team.run([never_ends, ends_its_process, lambda send, is_over: int('x')], 0.1))
    assert sorted(found, key=lambda item: item[0])[:2] == [(0, 'begun'), (0, Ended(-signal.SIGKILL))]
    assert {(1, 1), (1, Ended(3)), (2, Ended(1))} < set(found) and len(found) == 5
    assert 'ValueError: invalid literal' in capfd.readouterr().err


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_tasks_to_end_and_a_second_one_ends_the_process(number):
    before = signal.getsignal(number)
    with Workers() as team:
        messages = []
        for _, message in team.run([lambda send, is_over: [send('begun'), counting(send, is_over)]] * 2, 60):
            if message == 'begun' and not team.signal:
                os.kill(os.getpid(), number)
            messages.append(message)
        assert team.signal == number and signal.getsignal(number) == before
    assert len(messages) == 4 and messages.count('begun') == 2
    with Workers() as team:
        assert signal.getsignal(number) == team._stop
    assert signal.getsignal(number) == before and team.signal is None


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGHUP])
def test_a_task_gets_a_signal_that_comes_before_it_begins(number, monkeypatch):
    fork = os.fork

    def fork_and_signal():
        if child := fork():
            os.kill(child, number)
        return child

    def waiting(send, is_over):
        begun = time.monotonic()
        while not is_over() and time.monotonic() < begun + 0.5:
            time.sleep(0.01)
        send(is_over())
    monkeypatch.setattr(os, 'fork', fork_and_signal)
    with Workers() as team:
        assert [message for _, message in team.run([waiting] * 8, 60)] == [True] * 8


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_group_of_processes_ends_no_task_as_failed(number):
    code = """if True:
        import os, signal, sys, time
        from scripts.workers import Workers
        def task(send, is_over):
            send('begun')
            while not is_over():
                time.sleep(0.01)
            time.sleep(0.3)                 # so that the signal of the first process comes before the end
        with Workers() as team:
            for _, message in team.run([task] * 2, 60):
                if not team.signal:
                    os.killpg(0, int(sys.argv[1]))
                    time.sleep(0.1)
                print(message, flush=True)
    """
    done = subprocess.run([sys.executable, '-c', code, str(int(number))], cwd=ROOT, start_new_session=True, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment_without('PYOPS_BACKEND'))
    assert (done.returncode, done.stdout) == (0, 'begun\nbegun\n')


def test_processes_end_if_their_messages_are_not_read():
    with Workers() as team:
        tasks = team.run([lambda send, is_over: [send(os.getpid()), time.sleep(60)]], 60)
        _, child = next(tasks)
        tasks.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_program_that_ends_its_process_counts_as_failed_and_the_next_ones_run(monkeypatch, capsys):
    def in_process(next_one, send, is_over):
        while not is_over():
            with next_one.get_lock():
                seed = next_one.value
                next_one.value += 1
            send(seed)
            if seed == 12:
                os._exit(3)
            send(['cpu', ['Linear', 'Tanh'], 4, seed == 13, 0.5])
            time.sleep(0.01)
    monkeypatch.setattr(soak, 'in_process', in_process)
    with Workers() as team:
        counts, seconds = soak.run(team, 10, 2, 1)
    done = counts.runs.last - 10                            # all but one
    assert done > 4 and counts[1:] == (2 * done, 2, 4 * done, 2, ('cpu',)) and seconds == 0.5 * done
    assert 'seed 12 : the process ended with status 3' in capsys.readouterr().out


@pytest.mark.parametrize('name, flags, kind', [('soak', ['--seconds', '600'], soak.Counts),
                                               ('fuzz', ['idx', 'recipe', '--minutes', '0.1'], fuzz.Counts)])
def test_runs_that_are_ended_early_add_their_counts_to_the_page(name, flags, kind, tmp_path):
    page = shutil.copy(PAGE, tmp_path)
    before = kind.read(generated.text(PAGE, name))
    for _ in range(2):
        command = [sys.executable, '-m', f'scripts.{name}', *flags, '--workers', '2', '--save', '--page', page]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              env=environment_without('PYOPS_BACKEND', PYTHONPATH=str(ROOT))) as process:
            text = process.stdout.readline()            # after the first program, or the first reader
            process.terminate()
            text += process.stdout.read()
        assert process.returncode == 128 + signal.SIGTERM, text
        after = kind.read(generated.text(tmp_path / PAGE.name, name))
        assert after.runs.first == before.runs.first and after.runs.count == before.runs.count + 1
        if name == 'fuzz':
            assert after.runs.last == before.runs.last + 2
            assert after.readers['idx'].inputs > before.readers['idx'].inputs + 100
            assert after.readers['npy'] == before.readers['npy']
        else:
            assert after.runs.last > before.runs.last and after.layers > before.layers and after.steps > before.steps
            assert after.failed == before.failed
        before = after
