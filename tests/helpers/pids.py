"""Processes by their ids, waiting, and functions for pyops.text.processes.  Imports nothing large: processes import it."""
import time
from pathlib import Path


def until(condition, seconds=120):
    """Wait until condition() is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, 'the condition did not come true'
        time.sleep(0.005)


def hold(translator, path):
    """Write a file, then translate nothing for a minute."""
    Path(path).touch()
    time.sleep(60)


def threads(translator):
    """Return the number of threads of the process."""
    from pyops import backend
    return backend.threads()


def stat(pid):
    """Return the state and the parent's id of a process; None if there is none."""
    try:
        state, parent, *_ = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return state, int(parent)


def has_ended(pid):
    """Return whether a process has ended, even if nobody has taken its exit status."""
    found = stat(pid)
    return found is None or found[0] == 'Z'


def children(pid):
    """Return the ids of the processes that a process has started."""
    known = [int(path.name) for path in Path('/proc').iterdir() if path.name.isdigit()]
    return [one for one in known if (found := stat(one)) and found[1] == pid]
