"""Locate data sets that are already on this machine."""
from __future__ import annotations

import os
import shlex
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from pyops.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyops.typing import PathLike

# Name of a data set -> for each of its files the accepted paths, relative to a data directory.
FILES = {
    'fra-eng': (('fra-eng.zip', 'fra-eng/fra.txt', 'fra.txt'),),
    'mnist': tuple((f'mnist/{name}.gz', f'mnist/{name}', f'{name}.gz', name) for name in (
        'train-images-idx3-ubyte', 'train-labels-idx1-ubyte', 't10k-images-idx3-ubyte', 't10k-labels-idx1-ubyte')),
    'tatoeba-test': (('tatoeba-test-v2021-08-07.eng-fra.txt.gz', 'tatoeba-test-v2021-08-07.eng-fra.txt'),),
}
# The paths of all files of a data set together.
CANDIDATES = {name: tuple(chain.from_iterable(files)) for name, files in FILES.items()}


def directories(data_dir: PathLike | None = None) -> list[Path]:
    """Return the directories to search, in order: data_dir alone if given, else $PYOPS_DATA and ./data.

    UserError if data_dir or $PYOPS_DATA is not a directory.
    """
    if data_dir is not None:
        if not os.path.isdir(data_dir):
            raise UserError(f"data directory {str(data_dir) or repr('')}: no such directory; make it or give another")
        return [Path(data_dir)]
    chosen = os.environ.get('PYOPS_DATA')
    if chosen and not os.path.isdir(chosen):
        raise UserError(f'PYOPS_DATA={chosen}: no such directory; make it, name another, or unset PYOPS_DATA')
    return [Path(place) for place in (chosen, 'data') if place]


def unknown(name: str) -> UserError:
    """Return the UserError for an unknown data set."""
    return UserError(f'data set {name}: no such data set; give one of {", ".join(FILES)}; '
                     "'python -m pyops.data list' describes them")


def missing(name: str, data_dir: PathLike | None = None) -> UserError:
    """Return the UserError for a data set missing from `data_dir`, or from the directories that are searched by default."""
    if data_dir is None:
        return UserError(f'{name}: not found in {" or ".join(map(str, directories()))}; '
                         f'get it with: python -m pyops.data get {name}')
    return UserError(f'data directory {data_dir}: holds no {name}; {_remedy(name, data_dir)}')


def incomplete(name: str, directory: PathLike, lacking: Iterable[str]) -> UserError:
    """Return the UserError for a data set whose files `lacking` are missing from `directory`."""
    return UserError(f'{directory}: {name} is incomplete, {", ".join(lacking)} missing; {_remedy(name, directory)}')


def _remedy(name: str, directory: PathLike) -> str:
    return f'get it with: python -m pyops.data get {name} --data-dir {shlex.quote(str(directory))}'


def find(name: str, data_dir: PathLike | None = None) -> Path | None:
    """Return the path of data set `name`: its file, or the folder with its files; None if it is not found.

    UserError if there is no data set of this name; see also `directories`.
    """
    paths = find_files(name, data_dir)
    if paths is None:
        return None
    return paths[0] if len(paths) == 1 else Path(os.path.commonpath([path.parent for path in paths]))


def find_files(name: str, data_dir: PathLike | None = None) -> list[Path] | None:
    """Return the paths of all files of data set `name` in the order of FILES, None if no directory holds them all.

    All are from one of `directories(data_dir)`: copies are not mixed.  Errors as for `find`.
    """
    for _, paths in _places(name, data_dir):
        found = [path for path in paths if path is not None]
        if len(found) == len(paths):
            return found
    return None


def find_incomplete(name: str, data_dir: PathLike | None = None) -> tuple[Path, list[str]] | None:
    """Return the first directory that holds some but not all files of data set `name`, and the names of the missing ones;
    None if there is no such directory.  Errors as for `find`.
    """
    for directory, paths in _places(name, data_dir):
        lacking = [Path(candidates[0]).name
                   for candidates, path in zip(FILES[name], paths, strict=True) if path is None]
        if 0 < len(lacking) < len(paths):
            return directory, lacking
    return None


def _places(name: str, data_dir: PathLike | None) -> Iterator[tuple[Path, list[Path | None]]]:
    """Yield each directory with the path, or None, of each file of the data set."""
    if name not in FILES:
        raise unknown(name)
    for directory in directories(data_dir):
        yield directory, [next((directory / candidate for candidate in candidates if (directory / candidate).is_file()),
                               None) for candidates in FILES[name]]
