"""The measures of the tensors of a folder that earlier commands computed, kept in an Index."""
from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Any

from pyops import backend, formats
from pyops.backend import library
from pyops.inspect import index, pieces, readers, statistics

if TYPE_CHECKING:
    import numpy as np

    from pyops.formats import Format
    from pyops.inspect.logs import Entry
    from pyops.typing import PathLike

_MODULES = tuple(module.__name__ for module in (formats, pieces, readers, readers.packed, statistics))


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
        digest = '' if mask is None else hashlib.sha256(repr(mask.shape).encode() + mask.tobytes()).hexdigest()[:16]
        self._index, self._file, self._name = items, file, f'{axis} {digest} {entry.shape} {entry.is_weights:d} {entry.key}'
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

    def _find(self, name: str) -> Any:
        return self._status and self._index.find(self._file, self._status, f'{name} {self._name}')

    def _add(self, name: str, item: Any) -> None:
        if self._status:
            self._index.add(self._file, self._status, f'{name} {self._name}', item)
