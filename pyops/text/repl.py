"""The prompt on a terminal that serves a trained model: history, completion, commands."""
import contextlib
import os
import sys

HINT = 'type a sentence and press Enter; :help lists the commands, quit or Ctrl-D leaves'
COLUMN = 13         # characters of the name of a command and its values in HELP, without the colon
HELP = f"""\
Each line is translated when you press Enter, except
  :{'help':{COLUMN + 1}}print this text; or help
{{commands}}  :{'quit':{COLUMN + 1}}leave; or quit, exit, Ctrl-D, Ctrl-C twice on an empty line
To translate a line that begins with a colon, or one of the words above, type a space before it.
Ctrl-C clears the line, or stops a translation. The up arrow recalls earlier lines, Tab completes commands and words."""


def serve(translate, commands=None, complete=None, prompt='> '):
    """Pass each line typed on the terminal to `translate` (str -> iterable of lines) and print the lines it returns.

    There are line editing, a history kept between sessions, and completion of commands and of complete(prefix) -> words.
    `:quit`, `quit`, `exit`, end of input (Ctrl-D), and Ctrl-C twice on an empty line leave; `:help` and `help` print HELP.
    Ctrl-C clears the line, or stops the translation.  Blank lines are skipped.
    commands: {name: (function, help)}; `:name text` prints the lines of function(text), or its ValueError
    """
    sys.stdout.reconfigure(errors='replace')                # for characters that the terminal's encoding lacks
    with _readline(commands or {}, complete):
        _serve(translate, commands or {}, prompt)


def _serve(translate, commands, prompt):
    print(HINT)
    is_last_warning = False                                 # the previous line was empty and ended with Ctrl-C
    while True:
        line = None
        try:
            line = _read_line(prompt)
            command = line.rstrip()                         # with a leading space it is a sentence
            if command in (':quit', 'quit', 'exit'):
                return
            if command in (':help', 'help'):
                print(HELP.format(commands=''.join(f'  :{name} {text}\n' for name, (_, text) in commands.items())))
            elif command.startswith(':'):
                _run(commands, command[1:])
            elif command:
                _print(translate(line))
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


def _run(commands, line):
    """Run the command in a line without its colon."""
    name, _, text = line.partition(' ')
    if name not in commands:
        print(f':{name}: no such command; :help lists them')
        return
    try:
        _print(commands[name][0](text.strip()))
    except ValueError as error:
        print(error)


def _print(lines):
    for line in lines:
        print(line)
    sys.stdout.flush()


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


@contextlib.contextmanager
def _readline(commands, complete):
    """Enable line editing with completion and a history file, as far as Python and the disk support it."""
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
    names = [f':{name}' for name in (*commands, 'help', 'quit')]

    def completed(text, index):
        at_start = not readline.get_begidx()
        words = [name for name in names if name.startswith(text)] if at_start and text.startswith(':') else (
            complete(text) if complete else [])
        return words[index] + ' ' if index < len(words) else None
    before = readline.get_completer(), readline.get_completer_delims()
    readline.set_completer(completed)
    readline.set_completer_delims(' \t')
    readline.parse_and_bind('bind ^I rl_complete' if 'libedit' in (readline.__doc__ or '') else 'tab: complete')
    try:
        yield
    finally:
        readline.set_completer(before[0])
        readline.set_completer_delims(before[1])
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            readline.write_history_file(path)
