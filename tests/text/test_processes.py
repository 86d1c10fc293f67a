"""Processes that translate for another one."""
import signal
import subprocess
import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from pids import has_ended, hold, threads, until
from server import TEXTS, checkpoint, model

from pyops import backend
from pyops.errors import UserError
from pyops.text import processes
from pyops.text.processes import Ended, Process, Start, shares, start_processes
from pyops.text.translator import Translator

FLAGS = Namespace(gpu=None, exact=None, precision=None, threads=None, more=lambda: None)


@pytest.fixture(scope='module')
def process():
    (process,) = start_processes(Start.of(checkpoint(), {'compute': 'float32'}, FLAGS), [1])
    yield process
    process.close()


def test_a_process_translates_like_this_one_with_its_part_of_the_threads(process):
    assert process.about == model().about
    for settings in ((5,), (2, 2, 1.0, 5)):
        assert process(Translator.translations, TEXTS[:9], *settings) == model().translations(TEXTS[:9], *settings)
    assert process(threads) == 1


def test_an_error_has_the_traceback_of_the_process(process, monkeypatch):
    with pytest.raises(TypeError, match='text 0: expected str, got int') as error:
        process(Translator.translate, [1])
    assert 'in a process that translates' in error.value.__notes__[0] and 'translator.py' in error.value.__notes__[0]

    def missing(translator):
        pass
    missing.__module__, missing.__qualname__ = processes.__name__, 'missing'
    monkeypatch.setattr(processes, 'missing', missing, raising=False)
    with pytest.raises(AttributeError, match='missing'):
        process(missing)
    assert process(Translator.translate, 'Go.') == model().translate('Go.')


def test_a_signal_to_all_processes_does_not_end_it(process):
    for number in signal.SIGINT, signal.SIGHUP, signal.SIGTERM:
        process._process.send_signal(number)
    assert process(Translator.translate, 'Go.') == model().translate('Go.') and process._process.poll() is None


def test_a_process_that_was_killed_is_started_again(process, tmp_path):
    killed = process.pid
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(process, hold, tmp_path / 'begun')
        until((tmp_path / 'begun').exists)
        process._process.kill()
        with pytest.raises(Ended, match='the process that translated was ended by signal 9'):
            call.result(240)
    assert process(Translator.translate, TEXTS[:2]) == model().translate(TEXTS[:2]) and process.pid != killed


def test_a_process_that_is_stopped_ends_its_call_and_is_not_started_again(tmp_path):
    process = Process(Start.of(checkpoint(), {}, FLAGS), 1)
    with ThreadPoolExecutor(1) as pool:
        process.stop()                                      # while it loads
        call = pool.submit(process.wait)
        with pytest.raises(UserError, match='a process that translates was ended by signal 9; give fewer with --processes'):
            call.result(240)
        with pytest.raises(Ended):
            process(threads)
    process.close()


def test_a_checkpoint_that_cannot_be_read_is_one_line(tmp_path):
    with pytest.raises(UserError, match='nowhere'):
        start_processes(Start.of(str(tmp_path / 'nowhere'), {}, FLAGS), [1])


def test_a_process_ends_at_once_with_the_one_that_started_it(tmp_path):
    """Also if nobody could send it a signal, and while it translates."""
    code = (f'import sys; sys.path[:] = {sys.path!r}\n'
            'import pids; from argparse import Namespace; from pyops.text.processes import Process, Start\n'
            'flags = Namespace(gpu=None, exact=None, precision=None, threads=None)\n'
            f'process = Process(Start.of({checkpoint()!r}, {{}}, flags), 1); process.wait()\n'
            f'print(process.pid, flush=True); process(pids.hold, {str(tmp_path / "begun")!r})')
    parent = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True)
    number = int(parent.stdout.readline())
    until((tmp_path / 'begun').exists)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(lambda: has_ended(number))


@pytest.mark.parametrize('cores, is_host, expected', [(1, True, 1), (3, True, 3), (16, True, 4), (16, False, 1)])
def test_there_is_a_process_for_each_thread_up_to_four_and_one_on_a_gpu(cores, is_host, expected, monkeypatch):
    monkeypatch.setattr(backend, 'threads', lambda: cores)
    monkeypatch.setattr(backend, 'current_device', lambda: SimpleNamespace(is_host=is_host))
    assert processes.default_number() == expected


@pytest.mark.parametrize('cores, number, expected', [(1, 1, [1]), (2, 2, [1, 1]), (6, 4, [2, 2, 1, 1]), (2, 3, [1, 1, 1])])
def test_processes_share_the_threads(cores, number, expected, monkeypatch):
    monkeypatch.setattr(backend, 'threads', lambda: cores)
    assert shares(number) == expected
