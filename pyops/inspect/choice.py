"""Selection of layers, tensors and steps by the name patterns and ranges that flags accept."""
from __future__ import annotations

import argparse
import difflib
import fnmatch
import re
from typing import TYPE_CHECKING, NamedTuple

from pyops.errors import UserError, printable

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from pyops.inspect.logs import Entry

_NO_END = 2**62
_UNITS = {'': 1, 'K': 10**3, 'M': 10**6, 'G': 10**9, 'T': 10**12}


class StepRanges(NamedTuple):
    """A set of training steps."""
    text: str
    ranges: tuple[range, ...]

    def __contains__(self, step: object) -> bool:
        return any(step in part for part in self.ranges)

    def within(self, first: int, last: int) -> Sequence[int]:
        """Return the steps from `first` to `last` - 1, in order."""
        parts = []
        for part in self.ranges:
            low, high = (max(-(-(n - part.start) // part.step), 0) for n in (first, last))
            parts.append(part[low:high])
        return parts[0] if len(parts) == 1 else sorted(set().union(*parts))


def patterns(text: str) -> tuple[str, ...]:
    """Parse 'encoder.*,linear_L3' into a tuple of patterns.  For argparse's `type`."""
    result = tuple(part.strip() for part in text.split(','))
    if not all(result):
        raise argparse.ArgumentTypeError(f'expected layer or tensor name patterns separated by commas, got {text!r}')
    return result


def steps(text: str) -> StepRanges:
    """Parse '0:100:10' or '0,5,7' into StepRanges.  For argparse's `type`."""
    return StepRanges(text, tuple(_range(part.strip(), text) for part in text.split(',')))


def _range(part: str, text: str) -> range:
    numbers = part.split(':')
    if len(numbers) > 3 or not all(re.fullmatch('[0-9]{0,15}', n) for n in numbers) or not any(numbers) and len(numbers) == 1:
        raise argparse.ArgumentTypeError(f'expected a number, A:B:S, or a comma-separated list of these, got {text!r}')
    if len(numbers) == 1:
        return range(int(part), int(part) + 1)
    first, last, step, *_ = [int(n) if n else None for n in (*numbers, '')]
    if step == 0:
        raise argparse.ArgumentTypeError(f'{part}: expected an increment of at least 1, got 0')
    result = range(first or 0, _NO_END if last is None else last, step or 1)
    if not result:
        raise argparse.ArgumentTypeError(f'{part}: the range is empty; expected an end above {result.start}')
    return result


def size(text: str | int) -> int:
    """Parse '500M' into a number of bytes; an int is returned unchanged.  For argparse's `type`."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r'([0-9]{1,15}(?:\.[0-9]{1,9})?)([KMGT]?)B?', text.strip().upper())
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"expected a size such as 500M or 2G, got {text or repr('')}")
    return int(float(match[1]) * _UNITS[match[2]])


def select(entries: Iterable[Entry], layers: Sequence[str] = ('*',), names: Sequence[str] = ('*',),
           steps: Container[int] | None = None) -> list[Entry]:
    """Return the entries that match one of `layers`, one of `names` and `steps` (None: all steps).

    A layer pattern matches the layer's name, or its type and number such as linear_L3.
    UserError if a pattern matches no entry (the message suggests similar names) or no entry is left.
    """
    found = list(entries)
    for patterns, texts in ((layers, lambda entry: (entry.layer, f'{entry.layer_type}_L{entry.index}')),
                            (names, lambda entry: (entry.name,))):
        known = sorted({text for entry in entries for text in texts(entry)})
        matches = {pattern: set(fnmatch.filter(known, pattern)) for pattern in patterns}
        for pattern in (pattern for pattern in patterns if not matches[pattern]):
            similar = difflib.get_close_matches(pattern, known, 3, 0.3) or known[:3]
            raise UserError(f'{printable(pattern)}: matches no saved tensor; the names include '
                            f'{", ".join(map(printable, similar))}')
        chosen = set().union(*matches.values())
        found = [entry for entry in found if chosen.intersection(texts(entry))]
    if steps is not None:
        saved = sorted({entry.step for entry in found})
        found = [entry for entry in found if entry.step in steps]
    if not found:
        raise UserError('no saved tensor matches all conditions; relax one of them' if steps is None or not saved else
                        f'no saved tensor is of the given steps; saved steps: {", ".join(map(str, saved[:6]))}' +
                        (f', ... up to {saved[-1]}' if len(saved) > 6 else ''))
    return found
