"""Which layers, tensors and steps: patterns of names and ranges of numbers, from the text of a flag."""
import argparse
import difflib
import fnmatch
import re
from typing import NamedTuple

from pyops.errors import UserError

_ENDLESS = 2**62
_UNITS = {'': 1, 'K': 10**3, 'M': 10**6, 'G': 10**9, 'T': 10**12}


class Steps(NamedTuple):
    """Numbers of training steps."""
    text: str
    ranges: tuple[range, ...]

    def __contains__(self, step):
        return any(step in one for one in self.ranges)

    def within(self, first, last):
        """Those from `first` to `last` - 1, in order."""
        parts = []
        for one in self.ranges:
            low, high = (max(-(-(n - one.start) // one.step), 0) for n in (first, last))
            parts.append(one[low:high])
        return parts[0] if len(parts) == 1 else sorted(set().union(*parts))


def patterns(text):
    """'encoder.*,linear_L3' -> tuple of patterns; as a type of argparse."""
    result = tuple(part.strip() for part in text.split(','))
    if not all(result):
        raise argparse.ArgumentTypeError(f"want patterns of names of layers or tensors, with commas between, got {text!r}")
    return result


def steps(text):
    """'0:100:10' or '0,5,7' -> Steps; as a type of argparse."""
    return Steps(text, tuple(_range(part.strip(), text) for part in text.split(',')))


def _range(part, text):
    numbers = part.split(':')
    if len(numbers) > 3 or not all(re.fullmatch('[0-9]{0,15}', n) for n in numbers) or not any(numbers) and len(numbers) == 1:
        raise argparse.ArgumentTypeError(f'want A:B:S, a number, or several with commas between, got {text!r}')
    if len(numbers) == 1:
        return range(int(part), int(part) + 1)
    first, last, step, *_ = [int(n) if n else None for n in (*numbers, '')]
    if step == 0:
        raise argparse.ArgumentTypeError(f'{part}: want every 1st step or more, got every 0th')
    found = range(first or 0, _ENDLESS if last is None else last, step or 1)
    if not found:
        raise argparse.ArgumentTypeError(f'{part}: there is no step from {found.start} up to {found.stop}')
    return found


def size(text):
    """'500M' -> bytes; a number is one already.  As a type of argparse."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r'([0-9]{1,15}(?:\.[0-9]{1,9})?)([KMGT]?)B?', text.strip().upper())
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"want a size such as 500M or 2G, got {text or repr('')}")
    return int(float(match[1]) * _UNITS[match[2]])


def select(entries, layers=('*',), names=('*',), steps=None):
    """Those of `entries` whose layer, or type and number such as linear_L3, fits one of the patterns `layers`, whose tensor
    fits one of `names`, and whose step is in `steps` (all without).  UserError for a pattern that fits no entry, or where
    none is left; it names those that come near.
    """
    from pyops.inspect.logs import printable  # not above: it needs numpy, which --help does without
    found = list(entries)
    for patterns, texts in ((layers, lambda entry: (entry.layer, f'{entry.layer_type}_L{entry.index}')),
                            (names, lambda entry: (entry.name,))):
        known = sorted({text for entry in entries for text in texts(entry)})
        fits = {pattern: set(fnmatch.filter(known, pattern)) for pattern in patterns}
        for pattern in (pattern for pattern in patterns if not fits[pattern]):
            near = difflib.get_close_matches(pattern, known, 3, 0.3) or known[:3]
            raise UserError(f'{printable(pattern)}: fits no saved tensor; there are, among others, '
                            f'{", ".join(map(printable, near))}')
        chosen = set().union(*fits.values())
        found = [entry for entry in found if chosen.intersection(texts(entry))]
    if steps is not None:
        saved = sorted({entry.step for entry in found})
        found = [entry for entry in found if entry.step in steps]
    if not found:
        raise UserError('no saved tensor is of all that was asked for' if steps is None or not saved else
                        f'no saved tensor is of such a step; there are those of {", ".join(map(str, saved[:6]))}' +
                        (f' up to {saved[-1]}' if len(saved) > 6 else ''))
    return found
