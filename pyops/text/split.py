"""Hold sentences out of training, selected by their text and not by their position.

Many English sentences have several French translations.  A split by line would put some of them into training and others
into the test, so all pairs with the same source are held out together, selected by a hash of the source alone: the same
sentence is held out of every corpus, in any order, on any machine.
"""
from hashlib import blake2b

import numpy as np

from pyops.errors import UserError


def hold_out(corpus, fraction, excluded=None):
    """Return (train, validation, test); the last two get about half of `fraction` of the distinct sources each.

    A larger fraction holds out everything that a smaller one does.  With fraction 0, validation and test are empty.
    excluded: pairs that training and validation leave out, bool (len(corpus),); None: none.  The test part keeps them.
    UserError if the fraction is outside [0, 0.5], or so small that a requested part is empty, or if too many are excluded.
    """
    if not 0 <= fraction <= 0.5:
        raise UserError(f'held-out fraction {fraction}: out of range; give 0 to 0.5, such as 0.1 for a tenth')
    if not fraction:
        training = corpus.without(excluded)
        if len(training) < min(1, len(corpus)):
            raise _too_many_excluded(corpus, (training,), excluded)
        return training, *(corpus.take(np.empty(0, np.int64)) for _ in range(2))
    place = {}

    def part_of(source):
        if source not in place:
            place[source] = _place(source, fraction)
        return place[source]

    places = np.fromiter(map(part_of, corpus.sources), np.int8, len(corpus))
    parts = tuple(corpus.take(np.flatnonzero(places == part)) for part in range(3))
    if not all(map(len, parts)):
        raise UserError(f'held-out fraction {fraction}: of the {len(place)} distinct sources of {corpus.name}, it leaves '
                        f'{len(parts[0])} pairs to train, {len(parts[1])} to validate, {len(parts[2])} to test; '
                        f'give {"a larger fraction or " * (fraction < 0.5)}more pairs')
    if excluded is None:
        return parts
    parts = *(part.without(excluded[places == i]) for i, part in enumerate(parts[:2])), parts[2]
    if not all(map(len, parts)):
        raise _too_many_excluded(corpus, parts, excluded)
    return parts


def _too_many_excluded(corpus, parts, excluded):
    left = ' and '.join(f'{len(part)} to {use}' for part, use in zip(parts, ('train', 'validate'), strict=False))
    return UserError(f'{corpus.name}: {excluded.sum()} of {len(corpus)} pairs are excluded, which leaves {left}; '
                     'exclude fewer sentences, or give more pairs')


def joined(pairs):
    """Return {source: list of its distinct targets} of (source, target) pairs, both in order of appearance."""
    found = {}
    for source, target in pairs:
        found.setdefault(source, {})[target] = None         # a dict as an ordered set
    return {source: list(targets) for source, targets in found.items()}


def references(corpus):
    """Return `joined` of the pairs of a corpus."""
    return joined(zip(corpus.sources, corpus.targets, strict=True))


def _place(source, fraction):
    """Return 0 for training, 1 for validation, 2 for test: eight hash bytes decide on holding out, another bit on the part."""
    digest = blake2b(source.encode(), digest_size=9).digest()
    if int.from_bytes(digest[:8], 'big') >= fraction * 2 ** 64:
        return 0
    return 1 + (digest[8] & 1)
