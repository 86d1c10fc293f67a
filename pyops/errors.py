"""Errors that a user can mend: one line that names the thing and the remedy, then exit status 2."""
import contextlib
import os
import sys


class UserError(Exception):
    """Bad input: a file, a flag, a missing tool.  The text is one line: what, what was expected, what to do."""


@contextlib.contextmanager
def exits_cleanly(program):
    """Wrap a program's main: a UserError becomes `program: error: ...` on stderr and exit status 2.

    A reader that closes our output (`| head`) ends the program quietly, as it ends any other Unix filter.
    """
    try:
        yield
        sys.stdout.flush()
    except UserError as error:
        sys.stdout.flush()
        print(f'{program}: error: {" ".join(str(error).split())}', file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)        # so that the flush at exit has somewhere to go
        sys.exit(141)                                       # 128 + SIGPIPE
