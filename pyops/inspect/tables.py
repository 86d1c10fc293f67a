"""Tables and files that the commands print and write: numbers as text, lines cut to a terminal, skipped files."""
from __future__ import annotations

import math
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from pyops.errors import UserError, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pyops.inspect.logs import Entry


class Column(NamedTuple):
    """A column of a table, which --sort can rank by."""
    title: str
    key: str                                    # key in the statistics of a row
    is_worst_largest: bool
    how: str                                    # format specification

    @property
    def width(self) -> int:
        return max(len(self.title), 7)

    def cell(self, statistics: Mapping[str, float]) -> str:
        return f'{self._text(statistics):>{self.width}}'

    def _text(self, statistics: Mapping[str, float]) -> str:
        if math.isnan(statistics[self.key]) and math.isnan(statistics.get('amax', 0.0)):       # no value is known
            is_nan = statistics['nan'] or statistics.get('poisoned')
            return 'NaN' if is_nan else 'inf' if statistics['inf'] else '-'
        return number(statistics[self.key], self.how)


def worst_first(rows: Iterable[Any], column: Column) -> list[Any]:
    """Return rows sorted by a column of their `statistics`: rows first that lost finite numbers, rows without a value last."""
    sign = -1 if column.is_worst_largest else 1
    return sorted(rows, key=lambda row: (-lost(row.statistics), math.isnan(row.statistics[column.key]),
                                         sign * row.statistics[column.key]))


def lost(statistics: Mapping[str, float]) -> float:
    """Return the number of finite elements that are not finite after rounding: overflow, and blocks with NaN or an infinity."""
    return statistics['overflow'] + statistics.get('poisoned', 0)


def write(path: str | None, text: str) -> None:
    """Write text to the file of --output, or to standard output if it is None.  UserError if the file cannot be written."""
    if path is None:
        sys.stdout.write(text)
        return
    try:
        with open(path, 'w', errors='surrogateescape') as file:
            file.write(text)
    except OSError as error:
        raise cannot_write(path, error, '--output') from error


def cannot_write(path: str, error: OSError, flag: str) -> UserError:
    return UserError(f'{printable(path)}: cannot be written ({error.strerror or error}); name a file in a folder that exists '
                     f'with {flag}')


def print_skipped(skipped: Sequence[tuple[str, str]]) -> None:
    """Print up to five of (file, reason) to standard error."""
    for file, reason in skipped[:5]:
        print(f'skipped: {file}: {reason}', file=sys.stderr)
    if len(skipped) > 5:
        print(f'skipped: {len(skipped) - 5} more; --json names all', file=sys.stderr)


def number(value: float, how: str = '.2f') -> str:
    """Return a number by a format specification: '-' for NaN; 'exact' for an infinite SQNR, which has '.2f'."""
    return 'exact' if value == math.inf and how == '.2f' else '-' if math.isnan(value) else f'{value:{how}}'


def cut(text: str, width: int | None) -> str:
    return text if width is None else text[:width]


def cut_name(start: str, name: str, width: int | None) -> str:
    """Return start + name, shortened in the middle of the name to fit: both ends are needed to distinguish names."""
    room = None if width is None else max(width - len(start), 9)
    if room is None or len(name) <= room:
        return start + name
    head = (room - 1) // 3
    return f'{start}{name[:head]}\N{HORIZONTAL ELLIPSIS}{name[head + 1 - room:]}'


def name_of(entry: Entry, name: str | None = None, with_run: bool = False) -> str:
    """Return an entry's subfolder, layer, name (or the name given), time step, run if wanted, and place."""
    time = '' if entry.time is None else f' t {entry.time}'
    time += f', run {entry.training + 1}' if with_run else ''
    folder, place = os.path.dirname(entry.relative_path), f' ({entry.place_in_folder})' if entry.place_in_folder else ''
    return printable(f'{folder + "/" if folder else ""}{entry.layer} {entry.name if name is None else name}{time}{place}')


def has_runs(entries: Iterable[Entry]) -> bool:
    """Return whether the entries are of several runs in one folder, so that name_of() should name the run."""
    return len({entry.training for entry in entries}) > 1


def finite(value: Any) -> Any:
    """Return a number for JSON: None if it is not finite."""
    return value if math.isfinite(value) else None
