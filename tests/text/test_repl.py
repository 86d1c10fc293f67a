"""The prompt on a real (pseudo-)terminal: history, completion, commands, Ctrl-C; and the translator at this prompt."""
import os
import pty
import re
import select
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT
from translation import TINY_SEQ2SEQ, TINY_TRANSFORMER

import pyops
from pyops.text import repl
from pyops.text import session as module
from pyops.text.flags import serving_parser
from pyops.text.session import Session, table
from pyops.text.subwords import train
from pyops.text.translator import Translation
from seq2seq import train as seq2seq_train
from transformer import train as transformer_train

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
def twice(text):
    if not text:
        raise ValueError(':twice: expected a text')
    yield text + text
commands = {'twice': (twice, 'TEXT   print a text twice')}
serve(translate, commands, lambda prefix: [word for word in ('apple', 'apricot') if word.startswith(prefix)], '? ')
print('left')
'''


# ---- terminal ------------------------------------------------------------------------------------------------------

class Terminal:
    """The program on a pseudo-terminal.  To be written to when its prompt has been read, and no sooner: before, the
    terminal is not readline's yet."""

    def __init__(self, state, *arguments, command=('-c', PROGRAM), prompt='? ', **environment):
        self.prompt = prompt
        self.master, slave = pty.openpty()
        self.child = subprocess.Popen([sys.executable, *command, *arguments], cwd=ROOT, stdin=slave, stdout=slave,
                                      stderr=slave, start_new_session=True,
                                      env={**os.environ, 'TERM': 'dumb', 'XDG_STATE_HOME': str(state),
                                           'INPUTRC': os.devnull, 'PYTHONIOENCODING': 'utf-8', **environment})
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
        return self.read_until(f'\n{self.prompt}')

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
        assert self.child.wait(240) == 0
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
        assert terminal.child.wait(240) == 0


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
        assert terminal.child.wait(240) == 0


def test_help_prints_the_commands_and_a_space_or_punctuation_makes_a_command_a_sentence(tmp_path):
    with Terminal(tmp_path) as terminal:
        terminal.read_until('? ')
        text = terminal.enter('help')
        want = repl.HELP.format(commands='  :twice TEXT   print a text twice\n')
        assert text == 'help\r\n' + want.replace('\n', '\r\n') + '\r\n? ' and 'read <' not in text
        assert terminal.enter(':help') == f':{text}'
        assert all(word in repl.HELP for word in ('help', 'quit', 'exit', 'Ctrl-D', 'Ctrl-C', 'a space before it'))
        for line in (' quit', 'exit .', 'help!', 'Help', 'help me', ' :twice a'):
            assert f'read <{line}>' in terminal.enter(line)
        terminal.leave()


def test_commands_print_their_lines_or_their_error(tmp_path):
    with Terminal(tmp_path) as terminal:
        terminal.read_until('? ')
        assert terminal.enter(':twice  a b ') == ':twice  a b \r\na ba b\r\n? '
        assert terminal.enter(':twice') == ':twice\r\n:twice: expected a text\r\n? '
        assert terminal.enter(':other x') == ':other x\r\n:other: no such command; :help lists them\r\n? '
        assert 'read <go>' in terminal.enter('go')
        terminal.write(b':quit\n')
        terminal.read_until('left\r\n')


def test_tab_completes_commands_at_the_start_of_a_line_and_words_after_it(tmp_path):
    pytest.importorskip('readline', reason='without readline there is no completion: install a Python that has it')
    with Terminal(tmp_path) as terminal:
        terminal.read_until('? ')
        assert 'twotwo\r\n' in terminal.enter(':tw\ttwo')
        assert 'read <an apricot now>' in terminal.enter('an apr\tnow')
        assert 'read <apr>' in terminal.enter('apr')
        terminal.leave()


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


# ---- the translator --------------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """The folder of a checkpoint of a small transformer."""
    folder = tmp_path_factory.mktemp('repl') / 'ckpt'
    transformer_train.main(['-e', '10', '-c', str(folder), *TINY_TRANSFORMER, '-b', '16', '--d-model', '32', '-d', '0'])
    return str(folder)


@pytest.mark.parametrize('command', [['transformer.translate'], ['transformer.train', '-e', '0']], ids=' '.join)
def test_commands_change_the_answers(command, folder, tmp_path):
    model = pyops.load(folder)
    best, greedy = (model.translations('I sleep.', beam, min(beam, 2), alignments=True) for beam in (5, 1))
    scored = [f'{found.text}   {found.score:.4f}' for found in best]
    with Terminal(tmp_path, command=['-m', *command, '-c', folder], prompt='> ') as terminal:
        assert terminal.read_until('\n> ') == f'{repl.HINT}\r\n> '

        def answer(line):
            echo, *lines = terminal.enter(line).removesuffix('> ').splitlines()
            assert echo == line
            return lines
        assert answer('I sleep.') == [best[0].text]
        assert answer(':score') == ['score : on'] and answer('I sleep.') == scored[:1]
        assert answer(':nbest 2') == ['nbest : 2'] and answer('I sleep.') == scored
        assert answer(':nbest 6') == [':nbest: expected a whole number from 1 to 5, got 6']
        assert answer(':beam') == ['beam : 5'] and answer(':beam x') == [':beam: expected a whole number from 1 to 32, got x']
        assert answer(':beam 1') == ['beam : 1'] and answer(':nbest') == ['nbest : 1'], 'the n-best list fits the beam'
        assert answer('I sleep.') == [f'{greedy[0].text}   {greedy[0].score:.4f}'] and answer(':score') == ['score : off']
        assert answer(':attn') == ['attn : on']
        assert answer('I sleep.') == [greedy[0].text, *table(greedy[0])]
        assert answer(':attn') == ['attn : off'] and answer(':time') == ['time : on']
        text, took = answer('I sleep.')
        assert text == greedy[0].text and re.fullmatch(r'\d+\.\d ms', took)
        assert answer('I zzz.')[0] == 'unknown words : zzz'
        assert answer('a b c d e f g h i j')[1].startswith('warning: too long, only the first 9 of 11 tokens, ')
        helped = [re.match(r'  :(\w+ (?:N|on\|off)? *)(\S.*)', line) for line in answer(':help') if line.startswith('  :')]
        assert [line[1].split()[0] for line in helped] == ['help', 'beam', 'nbest', 'score', 'attn', 'time', 'quit']
        assert len({line.start(2) for line in helped}) == 1, 'the texts begin in one column'
        terminal.write(b'quit\n')
        assert terminal.child.wait(240) == 0


@pytest.mark.parametrize('name', ['score', 'attn', 'time'])
def test_on_and_off_set_a_switch_and_without_them_it_changes(name, folder):
    command = Session(pyops.load(folder), serving_parser('x').parse_args(['-c', 'x'])).commands[name][0]
    for text, want in ('off', 'off'), ('on', 'on'), ('on', 'on'), ('', 'off'), ('', 'on'), ('off', 'off'):
        assert list(command(text)) == [f'{name} : {want}']
    with pytest.raises(ValueError, match=f'^:{name}: expected on or off, got x$'):
        list(command('x'))
    assert list(command('')) == [f'{name} : on']


def test_words_of_the_vocabulary_are_completed(folder):
    session = Session(pyops.load(folder), serving_parser('x').parse_args(['-c', 'x']))
    tokens = session._translator.source_vocabulary.tokens
    assert session.words('s') == sorted(token for token in tokens if token.startswith('s')) != []
    assert session.words('') == session.words('qqq') == []


def test_subwords_that_begin_a_word_are_completed(folder):
    subwords = train(["The houses of the town, the town's house 7 times."] * 3, 330)
    found = Session(SimpleNamespace(source_vocabulary=subwords), serving_parser('x').parse_args(['-c', 'x']))
    words = found.words('t')
    assert {'the', 'town'} <= set(words) and words == sorted(words) and all(word.isalpha() and len(word) > 1 for word in words)
    assert all(len(subwords.encode([word]).ids) == 1 for word in words)
    assert 'house' in found.words('ho') and found.words('own') == found.words('7') == found.words('') == []


def test_a_model_without_attention_has_no_table(tmp_path):
    seq2seq_train.main(['-e', '1', '-c', str(tmp_path), *TINY_SEQ2SEQ])
    session = Session(pyops.load(tmp_path), serving_parser('x').parse_args(['-c', 'x']))
    with pytest.raises(ValueError, match='^:attn: this model has no attention; train seq2seq with --attention 1$'):
        list(session.commands['attn'][0](''))


def test_a_table_of_attention_has_percent_in_columns_and_is_split_for_a_long_source(monkeypatch):
    found = Translation('', 0.0, ['the', 'house', '<eos>'], ['la', 'maison'], alignment=np.array(
        [[0.904, 0.094, 0.002], [0.0, 0.996, 0.004]], 'f'))
    assert table(found) == ['        the  house  <eos>',
                            'la       90      9',
                            'maison         100']
    monkeypatch.setattr(module, '_MOST', 2)
    assert table(found) == ['        the  house', 'la       90      9', 'maison         100',
                            '        <eos>', 'la', 'maison']
