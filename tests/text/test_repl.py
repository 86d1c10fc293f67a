"""The serving REPL: in a pipe line by line, and on a real (pseudo-)terminal with a prompt, history and Ctrl-C."""
import os
import pty
import select
import subprocess
import sys
import time

import pytest
from conftest import ROOT

from pyops.text import repl

PROGRAM = '''
import sys
if sys.stdin is not None and sys.stdin.isatty():
    import fcntl, termios
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)        # so that Ctrl-C of this terminal reaches this process
if len(sys.argv) > 1:
    sys.modules['readline'] = None              # as in a Python that was built without it
import time
from pyops.text.repl import serve
def translate(line):
    yield f'read <{line}>'
    while line == 'for ever':
        time.sleep(0.01)
    yield line.upper()
serve(translate, prompt='? ')
print('left')
'''


# ---- pipe ----------------------------------------------------------------------------------------------------------

def run_in_pipe(data, **environment):
    result = subprocess.run([sys.executable, '-c', PROGRAM], cwd=ROOT, input=data, capture_output=True,
                            env={**os.environ, **environment})
    assert result.returncode == 0, result.stderr
    return result.stdout.decode('utf-8', 'replace').splitlines(), result.stderr.decode().splitlines()


@pytest.mark.parametrize('data, lines', [
    (b'', []),
    (b'\n  \n\t\r\n', []),
    (b'go now .\n', ['go now .']),
    (b'go now .\r\nlast without an end', ['go now .', 'last without an end']),
    (b'\xef\xbb\xbfgo .\n', ['go .']),
    ('où ? ça !\n'.encode(), ['où ? ça !'])])
def test_pipe(data, lines):
    out, error = run_in_pipe(data, PYTHONIOENCODING='utf-8')
    assert out == [text for line in lines for text in (f'read <{line}>', line.upper())] + ['left']
    assert error == []


def test_bytes_that_are_not_utf8_are_named_and_the_next_line_goes_on():
    out, error = run_in_pipe(b'go .\ncaf\xe9 !\n\xff\ni try .\n')
    assert out == ['read <go .>', 'GO .', 'read <i try .>', 'I TRY .', 'left']
    assert error == ['line 2: not UTF-8 (byte 0xe9 at position 4): expected text in UTF-8, skipped',
                     'line 3: not UTF-8 (byte 0xff at position 1): expected text in UTF-8, skipped']


def test_output_that_the_encoding_lacks():
    out, _ = run_in_pipe('cœur\n'.encode(), PYTHONIOENCODING='latin-1')
    assert out == ['read <c?ur>', 'C?UR', 'left']


def test_each_line_is_answered_before_the_next_is_sent():
    buffered = {key: value for key, value in os.environ.items() if key != 'PYTHONUNBUFFERED'}
    with subprocess.Popen([sys.executable, '-c', PROGRAM], cwd=ROOT, env=buffered,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        for text in ('one', 'two'):
            child.stdin.write(f'{text}\n'.encode())
            child.stdin.flush()
            want, got = f'read <{text}>\n{text.upper()}\n', ''
            while len(got) < len(want) and select.select([child.stdout], [], [], 60)[0]:
                got += os.read(child.stdout.fileno(), 4096).decode()
            if got != want:
                child.kill()
            assert got == want
        child.stdin.close()
        assert child.stdout.read() == b'left\n'


def test_no_standard_input_at_all():
    result = subprocess.run(f'{sys.executable} -c "$PROGRAM" <&-', shell=True, cwd=ROOT, capture_output=True, text=True,
                            env={**os.environ, 'PROGRAM': PROGRAM})
    assert (result.returncode, result.stdout) == (0, 'left\n'), result.stderr


# ---- terminal ------------------------------------------------------------------------------------------------------

class Terminal:
    """The program on a pseudo-terminal.  To be written to when its prompt has been read, and no sooner: before, the
    terminal is not readline's yet."""

    def __init__(self, state, *arguments):
        self.master, slave = pty.openpty()
        self.child = subprocess.Popen([sys.executable, '-c', PROGRAM, *arguments], cwd=ROOT, stdin=slave, stdout=slave,
                                      stderr=slave, start_new_session=True,
                                      env={**os.environ, 'TERM': 'dumb', 'XDG_STATE_HOME': str(state),
                                           'INPUTRC': os.devnull, 'PYTHONIOENCODING': 'utf-8'})
        os.close(slave)
        self.text = ''

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.child.kill()
        self.child.wait()
        os.close(self.master)

    def write(self, data):
        os.write(self.master, data)

    def enter(self, line):
        """Enter a line at the prompt; what is printed up to the next prompt."""
        self.write(f'{line}\n'.encode())
        return self.read_until('\n? ')

    def interrupt(self, end):
        """Press Ctrl-C and read until `end`.  Python loses one that comes in the instant before it waits for a key
        (its readline module checks for signals only after that), so press again if nothing happens."""
        time.sleep(0.1)
        self.write(b'\x03')
        if not self.text and not select.select([self.master], [], [], 5)[0]:
            self.write(b'\x03')
        return self.read_until(end)

    def leave(self):
        """Press Ctrl-D; what is printed then."""
        self.write(b'\x04')
        text = self.read_until('left\r\n')
        assert self.child.wait(60) == 0
        return text

    def read_until(self, end):
        """What comes up to and with `end`; it must come within a minute."""
        deadline = time.monotonic() + 60
        while end not in self.text:
            if not select.select([self.master], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise AssertionError(f'want {end!r}, got {self.text!r}')
            try:
                self.text += os.read(self.master, 4096).decode('utf-8', 'replace')
            except OSError as error:
                raise AssertionError(f'want {end!r}, got {self.text!r} and the end') from error
        text, self.text = self.text.split(end, 1)
        return text + end


def test_terminal_answers_and_leaves_at_end_of_input(tmp_path):
    with Terminal(tmp_path) as terminal:
        terminal.read_until('? ')
        assert terminal.enter('go now .') == 'go now .\r\nread <go now .>\r\nGO NOW .\r\n? '
        assert terminal.enter('') == '\r\n? '               # blank lines: nothing but fresh prompts
        assert 'read' not in terminal.enter('   ')
        assert terminal.leave() == '\r\nleft\r\n'           # on a line of its own


CTRL_C = '(Ctrl-C again, Ctrl-D or quit leaves)\r\n? '


def test_ctrl_c_clears_the_line_and_two_on_an_empty_line_leave(tmp_path):
    pytest.importorskip('readline', reason='without readline Ctrl-C never leaves: install a Python that has it')
    with Terminal(tmp_path) as terminal:
        terminal.read_until('? ')
        terminal.write(b'half a li')
        terminal.read_until('half a li')
        assert 'leaves' not in terminal.interrupt('\n? ')         # the line is gone, and this one does not count
        terminal.interrupt(CTRL_C)
        assert 'read <whole>' in terminal.enter('whole')        # and nothing of the half line
        terminal.interrupt(CTRL_C)                              # a line between two of them restarts the count
        terminal.write(b'x')
        terminal.read_until('x')
        assert 'leaves' not in terminal.interrupt('\n? ')         # so does one that is not empty
        terminal.interrupt(CTRL_C)
        terminal.interrupt('left\r\n')
        assert terminal.child.wait(60) == 0


def test_the_terminal_prints_how_to_leave_before_the_first_prompt(tmp_path):
    with Terminal(tmp_path) as terminal:
        assert terminal.read_until('? ') == f'{repl.HINT}\r\n? '
    assert 'quit' in repl.HINT and 'Ctrl-D' in repl.HINT and 'help' in repl.HINT


@pytest.mark.parametrize('word', ['quit', 'exit', 'quit  '])
def test_quit_and_exit_leave(word, tmp_path):
    with Terminal(tmp_path) as terminal:
        terminal.read_until('? ')
        terminal.write(f'{word}\n'.encode())
        assert 'read' not in terminal.read_until('left\r\n')
        assert terminal.child.wait(60) == 0


def test_help_prints_the_commands_and_a_space_or_punctuation_makes_a_command_a_sentence(tmp_path):
    with Terminal(tmp_path) as terminal:
        terminal.read_until('? ')
        text = terminal.enter('help')
        assert text == 'help\r\n' + repl.HELP.replace('\n', '\r\n') + '\r\n? ' and 'read <' not in text
        assert all(word in repl.HELP for word in ('help', 'quit', 'exit', 'Ctrl-D', 'Ctrl-C', 'a space before it'))
        for line in (' quit', 'exit .', 'help!', 'Help', 'help me'):
            assert f'read <{line}>' in terminal.enter(line)
        terminal.leave()


def test_commands_in_a_pipe_are_sentences():
    out, _ = run_in_pipe(b'help\nquit\nexit\n')
    assert out == ['read <help>', 'HELP', 'read <quit>', 'QUIT', 'read <exit>', 'EXIT', 'left']


def test_ctrl_c_gives_up_a_translation(tmp_path):
    with Terminal(tmp_path) as terminal:
        terminal.read_until('? ')
        terminal.write(b'for ever\n')
        terminal.read_until('read <for ever>\r\n')
        assert 'leaves' not in terminal.interrupt('\n? ')
        assert 'GO .' in terminal.enter('go .')
        terminal.leave()


def test_history_is_kept_between_sessions(tmp_path):
    pytest.importorskip('readline')
    for lines, recalled in ((['first', 'second'], 'second'), (['third'], 'third')):
        with Terminal(tmp_path) as terminal:
            terminal.read_until('? ')
            for line in lines:
                terminal.enter(line)
            terminal.leave()
        with Terminal(tmp_path) as terminal:
            terminal.read_until('? ')
            assert f'read <{recalled}>' in terminal.enter('\x10')        # Ctrl-P: the line before
            terminal.leave()
    text = (tmp_path / 'pyops' / 'history').read_text()
    assert all(line in text.split() for line in ('first', 'second', 'third'))


def test_history_that_cannot_be_kept_is_no_error(tmp_path):
    (tmp_path / 'file').write_bytes(b'')
    with Terminal(tmp_path / 'file') as terminal:
        terminal.read_until('? ')
        terminal.enter('go .')
        terminal.leave()
    assert os.listdir(tmp_path) == ['file']


def test_a_pipe_leaves_no_history(tmp_path):
    run_in_pipe(b'secret\n', XDG_STATE_HOME=str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_without_readline(tmp_path):
    with Terminal(tmp_path, 'without readline') as terminal:
        terminal.read_until('? ')
        assert 'GO .' in terminal.enter('go .')
        for _ in range(3):                                  # whether the line was empty is not known, so it does not leave
            assert 'leaves' not in terminal.interrupt('\n? ')
        terminal.write(b'caf\xe9 !\n')
        assert 'read' not in terminal.read_until('not UTF-8: expected text in UTF-8, skipped\r\n? ')
        assert 'GO .' in terminal.enter('go .')
        terminal.leave()
    assert os.listdir(tmp_path) == []


def test_typed_bytes_that_are_not_utf8(tmp_path):
    """What becomes of them is up to readline; the next line goes on."""
    with Terminal(tmp_path) as terminal:
        terminal.read_until('? ')
        terminal.write(b'caf\xe9 !\n')
        terminal.read_until('\n? ')
        assert 'GO .' in terminal.enter('go .')
        terminal.leave()
