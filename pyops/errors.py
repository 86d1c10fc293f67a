"""Errors that a user can correct: one line that names the problem and the remedy, then exit status 2."""
import atexit
import contextlib
import errno
import gc
import io
import os
import sys
import time
import traceback
from collections.abc import Callable

from pyops.launcher import launch

# The requirements in pyproject.toml: name of the imported module -> name of the package to install.
_DEPENDENCIES = {'numpy': 'numpy', 'cffi': 'cffi', '_cffi_backend': 'cffi', 'pycparser': 'pycparser',
                 'safetensors': 'safetensors', 'tqdm': 'tqdm'}
_OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class ShapeError(ValueError, RuntimeError):
    """Shapes that do not fit: a ValueError as in numpy, and a RuntimeError as in PyTorch."""


class DtypeError(TypeError, RuntimeError):
    """A dtype that an operation does not take: a TypeError as in numpy, and a RuntimeError as in PyTorch."""


class StateError(KeyError, RuntimeError):
    """A state without a name, or with an unknown one: a KeyError, and a RuntimeError as in PyTorch."""


class UserError(Exception):
    """Bad input: a file, a flag, a missing tool.  The text is one line: what failed, what is accepted, how to fix it.

    It may quote a file of another person: control characters are escaped, so that none reaches a terminal.
    """

    def __str__(self) -> str:
        return printable(' '.join(filter(None, map(str.strip, super().__str__().split('\n')))))


def require(program: str, package: str, extra: str) -> None:
    """Raise UserError if `package` is not installed.   extra: of pyproject.toml, which installs it"""
    from importlib.util import find_spec
    if find_spec(package) is None:
        raise UserError(f"{program}: the Python package {package} is not installed; install it with: {sys.executable} -m pip "
                        f"install 'pyops[{extra}]' (in the source tree: '.[{extra}]')")


def printable(text: object) -> str:
    """Return `text` as one line that is safe to print: control characters and invalid bytes become \\x1b and the like."""
    line = str(text)
    return line if line.isprintable() else ''.join(
        letter if letter.isprintable() else letter.encode('unicode_escape', 'surrogatepass').decode() for letter in line)


class Interrupted(Exception):
    """A signal ended a training run after it saved its checkpoint; `signal` is the signal.Signals.
    `exits_cleanly` turns it into exit status 128 + signal."""

    def __init__(self, signal):
        super().__init__(signal.name)
        self.signal = signal


GRACE = 1.0             # seconds in which rank 0 reports an error that all ranks have
FORWARDING = 0.3        # seconds for the launcher to forward the message: an abort discards what it has not read
abort_ranks: Callable[[int], object] | None = None      # abort_ranks(status) ends all ranks; pyops.distributed.init sets it


@contextlib.contextmanager
def exits_cleanly(program, ranks=False):
    """Wrap a program's main: a UserError becomes `program: error: ...` on stderr and exit status 2.

    So do memory exhaustion, an output that cannot be written, and a missing package that we require; any other exception is
    a bug and keeps its traceback.  If the reader closes our output (`| head`), the program ends quietly, like any other Unix
    filter.  Interrupted becomes exit status 128 + signal, and so does a Ctrl-C that was not handled.
    ranks: whether the program uses pyops.distributed.  Then only rank 0 prints, and an error of any rank ends all ranks.
    """
    atexit.register(gc.freeze)      # else the interpreter's last collection visits all objects: 30 ms for what ends anyway
    with _as_one_rank() if ranks else contextlib.nullcontext(), _with_messages(program):
        yield


class _AllRanksLeave(SystemExit):
    """Exit of all ranks at the same time, after a signal: none waits for another."""


@contextlib.contextmanager
def _as_one_rank():
    """If a launcher started several ranks, discard the output of all but rank 0, and end all ranks if one fails.

    The failing rank aborts: other ranks may wait for it, and so would MPI_Finalize at exit.  A rank other than 0 first gives
    rank 0 time to report the same error, so that it is printed once.
    """
    place = launch()
    if place is None or place.size == 1:
        yield
        return
    console = sys.stderr
    if place.rank:
        sys.stdout, sys.stderr = open(os.devnull, 'w'), io.StringIO()
    status, text = 0, ''
    try:
        yield
    except _AllRanksLeave:
        raise
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if place.rank:
            text = (sys.stderr.getvalue().strip().splitlines() or [f'exit status {status}'])[-1]
    except BaseException:
        status, text = 1, traceback.format_exc()
    if status:
        if place.rank:
            time.sleep(GRACE)
            text = f'rank {place.rank} on {os.uname().nodename}: {text}'
        if text and console is not None:
            print(text, file=console, flush=True)
        if abort_ranks:
            time.sleep(FORWARDING)
            abort_ranks(status)
        sys.exit(status)


@contextlib.contextmanager
def _with_messages(program):
    _mend_streams()
    status, line, failure, at_prompt, kind = 0, '', None, True, SystemExit
    try:
        yield
    except UserError as error:
        status, line = 2, str(error)
    except ModuleNotFoundError as error:
        package = _DEPENDENCIES.get((error.name or '').partition('.')[0])
        if package is None:
            raise
        status, line = 2, (f'the Python package {package} is not installed; '
                           f'install it with: {sys.executable} -m pip install {package}')
    except MemoryError as error:
        status, line = 2, (f'not enough memory ({error or "size unknown"}); '
                           'give smaller sizes or a smaller batch, or end other programs')
    except Interrupted as error:
        status, kind = 128 + error.signal, _AllRanksLeave
    except KeyboardInterrupt:
        status, at_prompt = 130, False                      # 128 + SIGINT
    except OSError as error:
        # Without a file name it comes from a stream that was already open: a failing output.
        if error.filename is not None or error.errno not in _OUTPUT_ERRORS:
            raise
        failure = error
    failure = _flush() or failure
    if failure is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)        # the flush at exit must not fail
        if isinstance(failure, BrokenPipeError):
            status = status or 141                          # 128 + SIGPIPE
        elif not status:
            status, line = 2, (f'standard output: cannot be written ({failure.strerror}); free some disk space or redirect it, '
                               'then start again: saved checkpoints are intact')
    with contextlib.suppress(OSError):                      # stderr cannot be written either
        if line:
            print(f'{program}: error: {" ".join(line.split())}', file=sys.stderr)
        elif not at_prompt and sys.stderr.isatty():
            print(file=sys.stderr)                          # start a new line below the terminal's ^C
    if status:
        raise kind(status)


def _mend_streams():
    """Make every print succeed: discard output to a stream that our parent closed (`>&-`), pass through file names that
    are not UTF-8, and print ? for characters that the stream's encoding lacks."""
    for name in ('stdout', 'stderr'):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, 'w'))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors='surrogateescape' if sys.stdout.encoding.lower() == 'utf-8' else 'replace')


def _flush():
    """Flush standard output.  Return the OSError if that fails, else None."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return error
