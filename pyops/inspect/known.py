"""Measures of the tensors of a folder, and of several tensors together, that earlier commands computed, kept in an Index."""
from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Any

from pyops import backend, formats
from pyops.backend import library
from pyops.inspect import index, pieces, readers, statistics
from pyops.inspect.checks import is_settled
from pyops.inspect.pictures import numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np

    from pyops.formats import Format
    from pyops.inspect.logs import Entry
    from pyops.typing import PathLike

_MODULES = tuple(module.__name__ for module in (formats, numbers, pieces, readers, readers.packed, statistics))


class Known:
    """The measures of the tensors in a folder.  `save` keeps the new ones for later commands."""

    def __init__(self, folder: PathLike) -> None:
        self._folder = os.fspath(folder)
        self._index = index.Index(folder, 'measures', *_MODULES, about=f'{library.build()} {backend.isa()}')
        self.save = self._index.save

    def of(self, entry: Entry, axis: int | str, mask: np.ndarray | None) -> Slot:
        """Return the measures of a tensor with blocks along an axis and with this padding."""
        return Slot(self._index, os.path.relpath(entry.path, self._folder), entry, axis, mask)


class Slot:
    """The measures of a tensor.  Make it before the tensor is loaded: what is added belongs to the file as it was then."""

    def __init__(self, items: index.Index, file: str, entry: Entry, axis: int | str, mask: np.ndarray | None) -> None:
        name = f'{axis} {_digest(mask)} {entry.shape} {entry.is_weights:d} {entry.key}'
        self._index, self._file, self._name = items, file, name
        try:
            self._status: os.stat_result | None = os.stat(entry.path)
        except OSError:
            self._status = None

    def row(self, fmt: Format) -> tuple[dict[str, Any], dict[str, dict[int, int]]] | None:
        """Return statistics and histograms as in a Row of compare."""
        found = self._find(f'row {fmt}')
        return found and (found[0], {name: {int(key): count for key, count in counts.items()}
                                     for name, counts in found[1].items()})

    def add_row(self, fmt: Format, measures: dict[str, Any], histograms: dict[str, dict[int, int]]) -> None:
        self._add(f'row {fmt}', [measures, histograms])

    def quantization(self, fmt: str | Format) -> dict[str, Any] | None:
        """Return the result of statistics.quantization."""
        found = self._find(f'row {fmt}')
        return found[0] if found else self._find(f'quantization {fmt}')

    def add_quantization(self, fmt: str | Format, measures: dict[str, Any]) -> None:
        self._add(f'quantization {fmt}', measures)

    def description(self) -> list[Any] | None:
        """Return the result of payload.describe."""
        return self._find('description')

    def add_description(self, values: list[Any]) -> None:
        self._add('description', values)

    def drawing(self) -> Any:
        """Return what draw._drawing_of made of the tensor."""
        return self._find('drawing')

    def add_drawing(self, item: Any) -> None:
        self._add('drawing', item)

    def _find(self, name: str) -> Any:
        return self._status and self._index.find(self._file, self._status, f'{name} {self._name}')

    def _add(self, name: str, item: Any) -> None:
        if self._status:
            self._index.add(self._file, self._status, f'{name} {self._name}', item)


class Joint:
    """What is known about several tensors together, such as the operands of a product.  `save` keeps new items.

    folder: of the first of the tensors;  kind, modules: as for Index, beside the modules that read and round
    """

    def __init__(self, folder: PathLike, kind: str, *modules: str) -> None:
        self._folder = os.fspath(folder)
        self._index = index.Index(folder, kind, *_MODULES, *modules, about=f'{library.build()} {backend.isa()}')
        self.save = self._index.save

    def of(self, entries: Sequence[Entry], masks: Iterable[np.ndarray | None] = (), about: str = '') -> JointSlot:
        """Return what is known about these tensors with this padding, and `about`, all else that the item depends on."""
        return JointSlot(self._index, self._folder, entries, f'{" ".join(map(_digest, masks))} {about}')


class JointSlot:
    """An item about several tensors.  Make it before they are loaded, as a Slot."""

    def __init__(self, items: index.Index, folder: str, entries: Sequence[Entry], about: str) -> None:
        self._index, self._file = items, os.path.relpath(entries[0].path, folder)
        try:
            self._statuses = [os.stat(entry.path) for entry in entries]
        except OSError:
            self._statuses = []
        texts = [about]
        for entry, status in zip(entries, self._statuses, strict=bool(self._statuses)):
            texts.append(f'{os.path.realpath(entry.path)} {entry.key} {entry.shape} {entry.axis} {entry.uses} {status.st_size} '
                         f'{status.st_mtime_ns}')
        self._name = hashlib.sha256('\0'.join(texts).encode('utf-8', 'surrogatepass')).hexdigest()

    def find(self) -> Any:
        return self._statuses and self._index.find(self._file, self._statuses[0], self._name) or None

    def add(self, item: Any) -> None:
        if self._statuses and all(map(is_settled, self._statuses)):
            self._index.add(self._file, self._statuses[0], self._name, item)


def _digest(mask: np.ndarray | None) -> str:
    return '' if mask is None else hashlib.sha256(repr(mask.shape).encode() + mask.tobytes()).hexdigest()[:16]
