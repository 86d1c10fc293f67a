"""The index of a folder of tensors: what earlier commands found out about its files, in the cache of pyops (docs/data.md).

An item holds as long as its file has the same size and modification time.  Nothing is written into the folder itself, which
may belong to somebody else or to a run.  Without a cache an index is in memory alone.
"""
from __future__ import annotations

import functools
import io
import json
import os
from typing import TYPE_CHECKING, Any

from pyops import cache
from pyops.inspect.checks import is_settled

if TYPE_CHECKING:
    from pyops.typing import PathLike

WORTH = 100                         # new items that are worth a file


class Index:
    """Items, which are values for JSON, by file and name.

    folder: around the files;  kind: a word, for the name of the index in the cache
    modules, about: the modules whose code computes the items, and what else they depend on: after a change the index is empty
    """

    def __init__(self, folder: PathLike, kind: str, *modules: str, about: str = '') -> None:
        self._kind, self._modules, self._about, self._root = kind, modules, about, os.path.realpath(folder)
        self._new = 0

    @functools.cached_property
    def _key(self) -> bytes | None:
        return cache.digest(io.BytesIO(os.fsencode(self._root) + b'\0' + self._about.encode()), __name__, *self._modules)

    @functools.cached_property
    def _files(self) -> dict[str, list[Any]]:
        """path relative to the folder -> [version, {name: item}]"""
        content = cache.read(self._kind, self._key) if self._key else None
        try:
            found = json.loads(bytes(content)) if content else {}
        except (ValueError, RecursionError):        # of another program
            return {}
        return {file: known for file, known in found.items() if isinstance(known, list) and len(known) == 2
                and isinstance(known[1], dict)} if isinstance(found, dict) else {}

    def find(self, file: str, status: os.stat_result, name: str) -> Any:
        """Return an item of a file, None if it is unknown or the file has changed."""
        known = self._files.get(file)
        return known[1].get(name) if known and known[0] == _version(status) else None

    def add(self, file: str, status: os.stat_result, name: str, item: Any) -> None:
        """Keep an item of a file that has not changed since `status`.  Items of a file that may still change are not kept."""
        if not is_settled(status):
            return
        version = _version(status)
        if file not in self._files or self._files[file][0] != version:
            self._files[file] = [version, {}]
        self._files[file][1][name] = item
        self._new += 1

    def save(self) -> None:
        """Write the index if there is enough new in it, without the files that no longer exist."""
        if self._new < WORTH or not self._key:
            return
        self._new = 0
        self._files = {file: known for file, known in self._files.items() if os.path.exists(os.path.join(self._root, file))}
        cache.write(self._kind, self._key, json.dumps(self._files, separators=(',', ':')).encode())


def _version(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns]
