"""Find a data set that is already on this machine."""
import os
from pathlib import Path

from pyops.errors import UserError

# Name of a data set -> the paths, below a data directory, that any one of serves.
CANDIDATES = {
    'fra-eng': ('fra-eng.zip', 'fra-eng/fra.txt', 'fra.txt'),
}


def directories(data_dir=None):
    """Return the directories to look in, in order: `data_dir` (--data-dir), $PYOPS_DATA, ./data.

    UserError if `data_dir` is given and is no directory.
    """
    if data_dir is not None and not Path(data_dir).is_dir():
        raise UserError(f'--data-dir: want a directory that exists, got {data_dir}; make it or give another')
    return [Path(place) for place in (data_dir, os.environ.get('PYOPS_DATA'), 'data') if place]


def find(name, data_dir=None):
    """Return the path of data set `name`, None if it is in none of `directories(data_dir)`.

    UserError if there is no data set of this name, or `data_dir` is given and is no directory.
    """
    if name not in CANDIDATES:
        raise UserError(f'data set {name}: want one of {", ".join(CANDIDATES)}; '
                        "'python -m pyops.data list' describes them")
    for directory in directories(data_dir):
        for candidate in CANDIDATES[name]:
            if (directory / candidate).is_file():
                return directory / candidate
    return None
