"""The line REPL that serves a trained model: a prompt with history on a terminal, a filter in a pipe."""
import contextlib
import os
import sys

HINT = 'type a sentence and press Enter; help lists the commands, quit or Ctrl-D leaves'
HELP = """\
Each line is translated when you press Enter, except
  help          to print this text
  quit, exit    to leave, as does Ctrl-D, or Ctrl-C twice on an empty line
To translate one of these words, type a space before it or a punctuation mark after it.
Ctrl-C clears the line, or stops a translation. The up arrow recalls earlier lines."""


def serve(translate, prompt='> '):
    """Pass each line of standard input to `translate` (str -> iterable of lines) and print the lines it returns.

    On a terminal: a prompt, line editing and a history kept between sessions.  `quit`, `exit`, end of input (Ctrl-D), and
    Ctrl-C twice on an empty line leave; `help` prints HELP.  Ctrl-C clears the line, or stops the translation.
    In a pipe: line by line, flushed after each, without commands; a line that is not UTF-8 is reported on stderr and skipped.
    Blank lines are skipped in both cases.
    """
    if sys.stdin is None:                                   # closed by the parent process
        return
    sys.stdout.reconfigure(errors='replace')                # for characters that the terminal's encoding lacks
    if sys.stdin.isatty() and sys.stdout.isatty():
        with _history():
            _serve_terminal(translate, prompt)
    else:
        _serve_pipe(translate)


def _serve_terminal(translate, prompt):
    print(HINT)
    is_last_warning = False                                 # the previous line was empty and ended with Ctrl-C
    while True:
        line = None
        try:
            line = _read_line(prompt)
            command = line.rstrip()                         # with a leading space it is a sentence
            if command in ('quit', 'exit'):
                return
            if command == 'help':
                print(HELP)
            elif command:
                _answer(translate, line)
            is_last_warning = False
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            is_empty = line is None and _is_empty()
            if is_empty and is_last_warning:
                return
            is_last_warning = is_empty
            if is_empty:
                print('(Ctrl-C again, Ctrl-D or quit leaves)')


def _is_empty():
    """Return whether the prompt's line is empty.  Without readline no line counts as empty: nothing else knows."""
    readline = sys.modules.get('readline')
    return readline is not None and not readline.get_line_buffer()


def _read_line(prompt):
    """Return the line typed at the prompt, or '' after a message if it is not UTF-8."""
    try:
        line = input(prompt)
        line.encode()                                       # undecodable bytes may come as lone surrogates
    except UnicodeError:
        print('not UTF-8: expected text in UTF-8, skipped')
        return ''
    return line


def _serve_pipe(translate):
    for number, raw in enumerate(iter(sys.stdin.buffer.readline, b''), 1):
        try:
            line = raw.decode('utf-8-sig' if number == 1 else 'utf-8')
        except UnicodeDecodeError as error:
            print(f'line {number}: not UTF-8 (byte 0x{raw[error.start]:02x} at position {error.start + 1}): '
                  'expected text in UTF-8, skipped', file=sys.stderr, flush=True)
            continue
        if line.strip():
            _answer(translate, line.rstrip('\r\n'))


def _answer(translate, line):
    for answer in translate(line):
        print(answer)
    sys.stdout.flush()


@contextlib.contextmanager
def _history():
    """Enable line editing with a history file, as far as Python and the disk support it."""
    try:
        import readline
    except ImportError:
        yield
        return
    state = os.environ.get('XDG_STATE_HOME') or os.path.expanduser('~/.local/state')
    path = os.path.join(state, 'pyops', 'history')
    readline.set_history_length(1000)
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            readline.write_history_file(path)
