"""What the training programs share: leaving on a signal, metrics.jsonl, the progress display and the flags."""
import errno
import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
import termios

import numpy as np
import pytest
from conftest import ROOT

from pyops import training
from pyops.errors import UserError


def run_on_terminal(code, columns):
    """Everything that a child prints to a terminal."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (25, columns))
    with subprocess.Popen([sys.executable, '-c', code], cwd=ROOT, stdin=slave, stdout=slave, stderr=slave):
        os.close(slave)
        text = b''
        try:
            while chunk := os.read(master, 4096):
                text += chunk
        except OSError:                                     # Linux says so where others say end of file
            pass
    os.close(master)
    return text.decode()


# ---- signals -------------------------------------------------------------------------------------------------------

SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.mark.parametrize('number', SIGNALS)
def test_first_signal_sets_the_flag(number, capfd):
    before = list(map(signal.getsignal, SIGNALS))
    with training.Interrupt() as stop:
        assert not stop and stop.signal is None
        os.kill(os.getpid(), number)
        assert stop and stop.signal is number
    assert list(map(signal.getsignal, SIGNALS)) == before
    assert capfd.readouterr().err == 'finishing this step, then saving (Ctrl-C again leaves at once)\n'


@pytest.mark.parametrize('first', SIGNALS)
def test_ctrl_c_after_a_signal_leaves_at_once(first, capfd):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), training.Interrupt() as stop:
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.signal is first and signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGHUP])
def test_a_second_sigterm_or_sighup_changes_nothing(number, capfd):
    with training.Interrupt() as stop:
        os.kill(os.getpid(), number)
        for later in (signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), later)
        assert stop.signal is number
    assert capfd.readouterr().err.count('\n') == 1


def test_sighup_that_is_ignored_at_the_start_stays_ignored(capfd):
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with training.Interrupt() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert capfd.readouterr().err == ''


INSIDE_A_PRINT = '''
import io, os, signal, sys
from pyops.training import Interrupt
class Raw(io.FileIO):
    def write(self, data):
        os.kill(os.getpid(), signal.SIGTERM)
        return super().write(data)
stderr = io.TextIOWrapper(io.BufferedWriter(Raw(2, 'w', closefd=False)), line_buffering=True)
sys.stderr = stderr
with Interrupt() as stop:
    print('x' * 10000, file=stderr, flush=True)
    print(stop.signal.name)
'''


def test_interrupted_inside_a_print():
    """A signal may strike while stderr's own buffer is held, where another print would raise RuntimeError."""
    result = subprocess.run([sys.executable, '-c', INSIDE_A_PRINT], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout == 'SIGTERM\n' and 'finishing this step' in result.stderr, result.stderr


# ---- output that fails -----------------------------------------------------------------------------------------------

PRINTING = '''
import os, sys
from pyops.training import Output
with Output() as output:
    sys.stdin.readline()                                    # whoever reads our output has gone by now
    for n in range(3):
        print('x' * 10000, flush=True)
        print('y' * 10000, file=sys.stderr, flush=True)
os.write(int(sys.argv[1]), repr(output.failure).encode())
'''


def failure_of_output(close, **streams):
    """What Output().failure is in a child that prints after close() has been called."""
    reader, writer = os.pipe()
    with subprocess.Popen([sys.executable, '-c', PRINTING, str(writer)], cwd=ROOT, stdin=subprocess.PIPE,
                          pass_fds=[writer], start_new_session=True, **streams) as child:
        os.close(writer)
        close()
        child.communicate(b'\n')
    with open(reader) as file:
        return file.read()


def test_output_to_a_terminal_that_was_closed_goes_nowhere():
    master, slave = pty.openpty()

    def close():
        os.close(slave)
        os.close(master)
    assert failure_of_output(close, stdout=slave, stderr=slave) == 'None'


def test_output_to_a_pipe_without_a_reader_is_a_failure_and_raises_nothing():
    reader, writer = os.pipe()

    def close():
        os.close(reader)
        os.close(writer)
    failure = failure_of_output(close, stdout=writer, stderr=writer)
    assert failure == "BrokenPipeError(32, 'Broken pipe')".replace('32', str(errno.EPIPE))


def test_output_that_works_is_left_alone(capsys):
    before = sys.stdout, sys.stderr
    with training.Output() as output:
        print('one', flush=True)
        print('two', file=sys.stderr)
    assert output.failure is None and capsys.readouterr() == ('one\n', 'two\n')
    assert (sys.stdout, sys.stderr) == before


# ---- metrics -------------------------------------------------------------------------------------------------------

def lines_of(folder):
    return [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]


def test_metrics_are_one_json_object_a_line(tmp_path):
    with training.Metrics(tmp_path) as metrics:
        metrics.write(epoch=1, loss=np.float32(0.5), clip=np.int64(3), note='é\n')
        assert len(lines_of(tmp_path)) == 1                 # before it is closed
        metrics.write(epoch=2, loss=math.nan, worst=np.float64(math.inf))
    assert lines_of(tmp_path) == [{'epoch': 1, 'loss': 0.5, 'clip': 3, 'note': 'é\n'},
                                  {'epoch': 2, 'loss': None, 'worst': None}]


def aside(folder):
    """The content of each file that was moved aside, oldest first."""
    assert {path.name for path in folder.iterdir() if not re.fullmatch(r'metrics_\d{8}_\d{6}\.jsonl', path.name)} \
        <= {'metrics.jsonl'}
    return [path.read_bytes() for path in sorted(folder.glob('metrics_*'))]


@pytest.mark.parametrize('epoch, left', [(0, []), (1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (9, [1, 2, 3])])
def test_metrics_after_a_resume(tmp_path, epoch, left, capsys):
    """Lines of later epochs will be written again; the old ones are kept in another file."""
    with training.Metrics(tmp_path, 0, 'one') as metrics:
        for n in (1, 2, 3):
            metrics.write(epoch=n)
    whole = (tmp_path / 'metrics.jsonl').read_bytes()
    with training.Metrics(tmp_path, epoch, 'one') as metrics:
        assert [line['epoch'] for line in lines_of(tmp_path)] == left
        metrics.write(epoch=epoch + 1)
    assert [line['epoch'] for line in lines_of(tmp_path)] == [*left, epoch + 1]
    assert {line['run'] for line in lines_of(tmp_path)} == {'one'}
    assert aside(tmp_path) == ([whole] if epoch < 3 else [])
    out = capsys.readouterr().out
    if epoch < 3:
        lines = '1 line' if epoch == 2 else f'{3 - epoch} lines'
        assert out == (f'{tmp_path}/metrics.jsonl: has {lines} that this run does not continue; '
                       f'the old file is kept as {next(tmp_path.glob("metrics_*"))}\n')
    else:
        assert out == ''


@pytest.mark.parametrize('epoch', [0, 2])
def test_metrics_of_another_run_are_kept_in_another_file(tmp_path, epoch, capsys):
    for run, first in (('one', 0), ('two', 0), ('one', epoch)):
        with training.Metrics(tmp_path, first, run) as metrics:
            metrics.write(epoch=first + 1, loss=0.5)
    assert [(line['run'], line['epoch']) for line in lines_of(tmp_path)] == [('one', epoch + 1)]
    assert [json.loads(text)['run'] for text in aside(tmp_path)] == ['one', 'two']      # in one second, under two names
    assert capsys.readouterr().out.count('\n') == 2


def test_metrics_without_an_id_belong_to_the_run_that_is_resumed(tmp_path):
    """As older versions wrote them."""
    (tmp_path / 'metrics.jsonl').write_bytes(b'{"epoch": 1}\n{"epoch": 2}\n')
    with training.Metrics(tmp_path, 2, 'one') as metrics:
        metrics.write(epoch=3)
    assert [line.get('run') for line in lines_of(tmp_path)] == [None, None, 'one'] and aside(tmp_path) == []


HALF = [b'{"epoch": 2, "lo', b'\0\0\0', b'\n', b'{"epoch": 2, "lo\n', b'{"epoch": 2\0\0']


@pytest.mark.parametrize('half', HALF)
def test_half_lines_after_a_kill_are_dropped(tmp_path, half, capsys):
    path = tmp_path / 'metrics.jsonl'
    path.write_bytes(b'{"epoch": 1}\n' + half)
    with training.Metrics(tmp_path, 5) as metrics:
        metrics.write(epoch=6)
    assert path.read_bytes() == b'{"epoch": 1}\n{"epoch": 6}\n'
    assert aside(tmp_path) == [] and capsys.readouterr().out == ''


@pytest.mark.parametrize('foreign', [b'\xff\xfe\n', b'[1]\n', b'{"epoch": "two"}\n', b'{"loss": 1}\n', b'a note', b'{}',
                                     b'{"epoch": 0}\n', b'{"epoch": 9}'])
def test_lines_of_something_else_are_kept_in_another_file(tmp_path, foreign, capsys):
    path = tmp_path / 'metrics.jsonl'
    path.write_bytes(b'{"epoch": 1}\n' + foreign)
    with training.Metrics(tmp_path, 5) as metrics:
        metrics.write(epoch=6)
    assert path.read_bytes() == b'{"epoch": 1}\n{"epoch": 6}\n'
    assert aside(tmp_path) == [b'{"epoch": 1}\n' + foreign] and 'has 1 line that' in capsys.readouterr().out


def test_a_whole_last_line_without_its_end_is_kept(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    path.write_bytes(b'{"epoch": 1}\n{"epoch": 2}')
    with training.Metrics(tmp_path, 5) as metrics:
        metrics.write(epoch=6)
    assert path.read_bytes() == b'{"epoch": 1}\n{"epoch": 2}\n{"epoch": 6}\n' and aside(tmp_path) == []


@pytest.mark.parametrize('fails', ['fsync', 'replace'])
def test_metrics_that_cannot_be_moved_aside_stay(tmp_path, fails, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, 'No space left on device')
    path = tmp_path / 'metrics.jsonl'
    path.write_bytes(b'{"epoch": 1}\n')
    monkeypatch.setattr(os, fails, full)
    with pytest.raises(UserError, match='metrics.jsonl: cannot write the metrics .No space left'):
        training.Metrics(tmp_path)
    assert path.read_bytes() == b'{"epoch": 1}\n'
    assert not any(name.endswith('.tmp') for name in os.listdir(tmp_path))


class FullDisk:
    """A raw file that takes a few bytes more and then none, until there is room again."""

    def __init__(self, file):
        self.file, self.room = file, 5

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, 'No space left on device')
        written = self.file.write(data[:self.room])
        self.room -= written
        return written

    def close(self):
        self.file.close()


def test_metrics_on_a_full_disk_do_not_end_the_training(tmp_path, capsys):
    with training.Metrics(tmp_path) as metrics:
        metrics._file = disk = FullDisk(metrics._file)
        metrics.write(epoch=1)                              # half of it
        metrics.write(epoch=2)                              # nothing of it
        disk.room = 1000
        metrics.write(epoch=3)
    error = capsys.readouterr().err
    assert error.count('\n') == 1 and str(tmp_path) in error and 'training goes on' in error
    assert (tmp_path / 'metrics.jsonl').read_bytes() == b'{"epo\n{"epoch": 3}\n'
    with training.Metrics(tmp_path, 3):
        assert lines_of(tmp_path) == [{'epoch': 3}]


def test_metrics_on_a_device_that_is_full(tmp_path, capsys):
    if not os.path.exists('/dev/full'):
        pytest.skip('no /dev/full here')
    with training.Metrics(tmp_path) as metrics:
        metrics._file.close()
        metrics._file = open('/dev/full', 'wb', buffering=0)
        metrics.write(epoch=1)
    assert 'No space left' in capsys.readouterr().err


def test_metrics_that_cannot_be_opened(tmp_path):
    (tmp_path / 'file').write_bytes(b'')
    for folder in (tmp_path / 'none', tmp_path / 'file'):
        with pytest.raises(UserError, match='metrics.jsonl: cannot write the metrics'):
            training.Metrics(folder)


# ---- progress ------------------------------------------------------------------------------------------------------

LINE = re.compile(r'(epoch 1 )?\[(\d+)/(\d+)\] (loss : \d+\.\d{5} )?\(\d+ (pairs|images)/s, \d\d+:\d\d left\)')


def plain_lines(capsys, total, step, initial=0):
    with training.Progress(total, initial=initial) as progress:
        for done in range(initial + step, total + step, step):
            progress.update(min(done, total), loss=0.5)
    lines = capsys.readouterr().out.splitlines()
    assert all(LINE.fullmatch(line) for line in lines)
    return [int(LINE.fullmatch(line)[2]) for line in lines]


def test_plain_lines_at_each_tenth(capsys):
    assert plain_lines(capsys, 1000, 30) == [120, 210, 300, 420, 510, 600, 720, 810, 900, 1000]
    assert plain_lines(capsys, 1000, 30, initial=850) == [910, 1000]
    assert plain_lines(capsys, 3, 1) == [1, 2, 3]
    assert plain_lines(capsys, 1, 1) == [1]
    assert len(plain_lines(capsys, 167130, 128)) == 10


def test_plain_lines_without_the_last(capsys):
    """For a program whose own line follows at once."""
    with training.Progress(1000, initial=500, label='epoch 1 ', at_end=False) as progress:
        for done in range(550, 1001, 50):
            progress.update(done)
    lines = capsys.readouterr().out.splitlines()
    assert [int(LINE.fullmatch(line)[2]) for line in lines] == [600, 700, 800, 900]


def test_plain_line_as_it_is(capsys):
    with training.Progress(50000, unit='images', label='epoch 1 ') as progress:
        progress.update(25000)
        progress.print('checkpoint saved')
        progress.update(50000, loss=1.25)
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith('epoch 1 [25000/50000] (') and LINE.fullmatch(first) and 'images/s' in first
    assert second == 'checkpoint saved'
    assert third.startswith('epoch 1 [50000/50000] loss : 1.25000 (') and third.endswith('00:00 left)')


def test_work_that_ends_early_says_where(capsys):
    with training.Progress(1000, label='epoch 1 ', lines=0) as progress:
        progress.update(300, loss=0.5)
        progress.stopped(300, loss=0.5)
    assert capsys.readouterr().out == 'epoch 1 [300/1000] loss : 0.50000\n'
    with training.Progress(1000) as progress:
        progress.update(300, loss=0.5)
        progress.stopped(300, loss=0.5)                     # where a plain line was due anyway
    (line,) = capsys.readouterr().out.splitlines()
    assert LINE.fullmatch(line)


def watched(monkeypatch, seconds):
    """The items of training.watch, which take so many seconds each, by a clock of its own."""
    clock = [100.0]
    monkeypatch.setattr(training.time, 'perf_counter', lambda: clock[0])
    found = []
    for item in training.watch(iter(range(len(seconds))), len(seconds), 'compare'):
        clock[0] += seconds[item]
        found.append(item)
    assert found == list(range(len(seconds)))


def test_quick_work_is_watched_in_silence(monkeypatch, capsys):
    watched(monkeypatch, [0.19] * 10)
    watched(monkeypatch, [])
    watched(monkeypatch, [30])                              # one item: there is nothing to say on the way
    assert capsys.readouterr() == ('', '')


def test_work_of_more_than_two_seconds_is_reported_every_five_seconds_on_stderr(monkeypatch, capsys):
    watched(monkeypatch, [0.5] * 40)
    out, error = capsys.readouterr()
    assert out == '' and error.splitlines() == [
        f'compare [{done}/40] (2.0 tensors/s, 00:{left} left)' for done, left in ((4, 18), (14, 13), (24, '08'), (34, '03'))]


def test_work_on_a_terminal_has_a_bar_after_two_seconds():
    text = run_on_terminal('import time\nfrom pyops.training import watch\n'
                           "for i in watch(range(5), 5, 'compare'): time.sleep(0.7)", 100)
    assert re.search(r'compare \[[345]/5\] +\d+%.*tensors/s', text) and text.rsplit('\r', 1)[-1].strip() == ''


def test_work_of_an_unknown_amount_has_no_total(monkeypatch, capsys):
    """On a terminal and in lines."""
    text = run_on_terminal('import time\nfrom pyops.training import Progress\n'
                           "with Progress(None, 'lines', label='translated ', every=5.0) as progress:\n"
                           '    for done in (10, 20, 30):\n'
                           '        time.sleep(0.12)\n        progress.update(done)', 100)
    assert re.search(r'translated \[[123]0\] +[\d.]+ lines/s', text) and text.rsplit('\r', 1)[-1].strip() == ''
    clock = [0.0]
    monkeypatch.setattr(training.time, 'perf_counter', lambda: clock[0])
    with training.Progress(None, 'lines', label='translated ', after=2.0, every=5.0) as progress:
        for clock[0], done in ((1.0, 10), (2.5, 20), (4.0, 30), (8.0, 40)):
            progress.update(done)
    assert capsys.readouterr().out == 'translated [20] (8.0 lines/s)\ntranslated [40] (5.0 lines/s)\n'


def test_nothing_to_do(capsys):
    with training.Progress(0) as progress:
        progress.print('done')
    assert capsys.readouterr().out == 'done\n'


@pytest.mark.parametrize('columns', [100, 0])
def test_bar_on_a_terminal(columns):
    text = run_on_terminal('import time\nfrom pyops.training import Progress\n'
                           "with Progress(167130, unit='pairs') as progress:\n"
                           '    for done in (10000, 30000, 50048):\n'
                           '        progress.update(done, loss=1.5)\n        time.sleep(0.12)\n'
                           "    progress.print('checkpoint saved')\n"
                           'progress.close()\n'                     # twice does no harm
                           "print('epoch 1')\n", columns)
    assert '[50048/167130]' in text and 'pairs/s' in text and 'left' in text and 'loss : 1.50000' in text
    shown = [line.rsplit('\r', 1)[-1] for line in text.replace('\r\n', '\n').split('\n')]
    assert [line for line in shown if line.strip()] == ['checkpoint saved', 'epoch 1']      # the bar takes itself away


def test_start_up_imports_nothing_heavy():
    code = ("import sys, pyops.flags, pyops.training, pyops.checkpoint, pyops.text.repl\n"
            "import pyops.text.translator, transformer.model\n"
            "print([name for name in ('concurrent', 'tqdm', 'safetensors', 'readline', 'torch') if name in sys.modules])")
    result = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout == '[]\n', result.stderr


@pytest.mark.parametrize('program', ['seq2seq', 'transformer'])
def test_translation_imports_no_module_of_training(program):
    code = (f"import sys, {program}.translate, {program}.model, pyops.text.serving, pyops.text.translator, pyops.compute\n"
            "print([name for name in ('pyops.fit', 'pyops.training', 'pyops.steplog', 'pyops.inspect.flags', 'pyops.formats', "
            "'difflib', 'tempfile', 'base64') if name in sys.modules])")
    result = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout == '[]\n', result.stderr
