"""Errors that a user can correct: one line that names the problem and the remedy, then exit status 2."""
import contextlib
import errno
import io
import os
import sys

# The requirements in pyproject.toml: name of the imported module -> name of the package to install.
_DEPENDENCIES = {'numpy': 'numpy', 'cffi': 'cffi', '_cffi_backend': 'cffi', 'pycparser': 'pycparser',
                 'safetensors': 'safetensors', 'tqdm': 'tqdm'}
_OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class UserError(Exception):
    """Bad input: a file, a flag, a missing tool.  The text is one line: what failed, what is accepted, how to fix it."""


def require(program: str, package: str, extra: str) -> None:
    """Raise UserError if `package` is not installed.   extra: of pyproject.toml, which installs it"""
    from importlib.util import find_spec
    if find_spec(package) is None:
        raise UserError(f"{program}: the Python package {package} is not installed; install it with: {sys.executable} -m pip "
                        f"install 'pyops[{extra}]' (in the source tree: '.[{extra}]')")


def printable(text: object) -> str:
    """Return `text` as one line that is safe to print: control characters and invalid bytes become \\x1b and the like."""
    return ''.join(letter if letter.isprintable() else letter.encode('unicode_escape', 'surrogatepass').decode()
                   for letter in str(text))


class Interrupted(Exception):
    """A signal ended a training run after it saved its checkpoint; `signal` is the signal.Signals.
    `exits_cleanly` turns it into exit status 128 + signal."""

    def __init__(self, signal):
        super().__init__(signal.name)
        self.signal = signal


@contextlib.contextmanager
def exits_cleanly(program):
    """Wrap a program's main: a UserError becomes `program: error: ...` on stderr and exit status 2.

    So do memory exhaustion, an output that cannot be written, and a missing package that we require; any other exception is
    a bug and keeps its traceback.  If the reader closes our output (`| head`), the program ends quietly, like any other Unix
    filter.  Interrupted becomes exit status 128 + signal, and so does a Ctrl-C that was not handled.
    """
    _mend_streams()
    status, line, failure, at_prompt = 0, '', None, True
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
        status = 128 + error.signal
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
        sys.exit(status)


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
