"""The line REPL in which a trained model serves: a prompt with history on a terminal, a filter in a pipe."""
import contextlib
import os
import sys


def serve(translate, prompt='> '):
    """Hand each line of standard input to `translate` (str -> iterable of lines) and print what it returns.

    On a terminal: a prompt, line editing and a history kept between sessions.  End of input (Ctrl-D) leaves; Ctrl-C
    gives up the line, or the translation under way, for a fresh prompt, and a second one in a row leaves.
    In a pipe: line by line, flushed after each; what is not UTF-8 is named on stderr and the next line goes on.
    Blank lines are skipped in both.
    """
    if sys.stdin is None:                                   # closed by whoever started us
        return
    sys.stdout.reconfigure(errors='replace')                # a word that the terminal's encoding lacks
    if sys.stdin.isatty() and sys.stdout.isatty():
        with _history():
            _serve_terminal(translate, prompt)
    else:
        _serve_pipe(translate)


def _serve_terminal(translate, prompt):
    interrupted = False                                     # by the line before
    while True:
        try:
            line = _read_line(prompt)
            if line.strip():
                _answer(translate, line)
            interrupted = False
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            if interrupted:
                return
            interrupted = True
            print('(Ctrl-C again or Ctrl-D leaves)')


def _read_line(prompt):
    """A line typed at the prompt; blank, and named, where it is not UTF-8."""
    try:
        line = input(prompt)
        line.encode()                                       # undecodable bytes may come as lone surrogates
    except UnicodeError:
        print('not UTF-8: want text in UTF-8, skipped')
        return ''
    return line


def _serve_pipe(translate):
    for number, raw in enumerate(iter(sys.stdin.buffer.readline, b''), 1):
        try:
            line = raw.decode('utf-8-sig' if number == 1 else 'utf-8')
        except UnicodeDecodeError as error:
            print(f'line {number}: not UTF-8 (byte 0x{raw[error.start]:02x} at position {error.start + 1}): '
                  'want text in UTF-8, skipped', file=sys.stderr, flush=True)
            continue
        if line.strip():
            _answer(translate, line.rstrip('\r\n'))


def _answer(translate, line):
    for answer in translate(line):
        print(answer)
    sys.stdout.flush()


@contextlib.contextmanager
def _history():
    """Line editing with a history from and to a file; without either where Python or the disk does not offer it."""
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
