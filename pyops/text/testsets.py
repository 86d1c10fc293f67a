"""Test sets read from a file: sentences with one or more references each, to score translations or to exclude from training."""
import hashlib
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pyops.data import columns, locate
from pyops.errors import UserError
from pyops.text.corpus import decode, parse, raw_pairs, read_bytes, tokenized, unpack
from pyops.text.split import joined

TATOEBA = 'tatoeba-test'        # instead of a file name: the data set


class TestSet(NamedTuple):
    """Sentences with references, raw text in the order of the file.

    path: of the file;  sources: distinct;  references: the distinct references of each source
    sha256: of the text in the file, unpacked
    """
    path: str
    sources: list[str]
    references: list[list[str]]
    sha256: str

    @classmethod
    def load(cls, path):
        """Read a text, or a zip, gzip, bz2 or xz file with one.

        Its lines have the four columns of pyops.data.columns, or the columns of a Corpus.  The first line decides which.
        UserError if the file is missing, damaged, empty or not UTF-8, or a line has other columns.
        """
        path = Path(path)
        content, name = unpack(read_bytes(path, TATOEBA), path)
        text = decode(content, name)
        if columns.is_test_file(text):
            try:
                pairs = columns.language_pairs(text)
            except ValueError as error:
                raise UserError(f'{name}: {error}; correct or remove the line') from error
        else:
            parse(content, name)            # for its errors
            pairs = raw_pairs(text)
        references = joined(pairs)
        return cls(str(path), list(references), list(references.values()), hashlib.sha256(content).hexdigest())

    def _tokens(self):
        """Return the sources and the references as sets of sentences in the form of a Corpus."""
        return map(frozenset, tokenized((source, target) for source, some in zip(self.sources, self.references, strict=True)
                                        for target in some))

    def occurs_in(self, corpus):
        """Return for each pair of a corpus whether its source is a source, or its target a reference, of this test set, in any
        case and spacing.  bool (len(corpus),)"""
        sources, targets = self._tokens()
        return np.fromiter((source in sources or target in targets
                            for source, target in zip(corpus.sources, corpus.targets, strict=True)), bool, len(corpus))

    def unseen(self, training):
        """Return sources, references and the number of sources left out.

        A source is left out if it occurs in the corpus `training`, or one of its references does, in any case and spacing.
        UserError if no source is left.
        """
        known_sources, known_targets = frozenset(training.sources), frozenset(training.targets)
        kept = []
        for source, some in zip(self.sources, self.references, strict=True):
            (tokens, *_), targets = tokenized((source, target) for target in some)
            if tokens not in known_sources and known_targets.isdisjoint(targets):
                kept.append((source, some))
        if not kept:
            raise UserError(f'{self.path}: all {len(self.sources)} sentences occur in the pairs that the model was trained on; '
                            'give another test set, or exclude this one from training')
        return *map(list, zip(*kept, strict=True)), len(self.sources) - len(kept)


def open_test_set(name, data_dir=None):
    """Return the TestSet of a name: 'tatoeba-test' (see pyops.data.locate), or a file.

    UserError if it is not found or not a test set.
    """
    if not name:
        raise UserError(f"test set '': no such file; give a file or '{TATOEBA}'")
    if name != TATOEBA:
        return TestSet.load(name)
    path = locate.find(TATOEBA, data_dir)
    if path is None:
        raise locate.missing(TATOEBA, data_dir)
    return TestSet.load(path)


def open_excluded(checkpoint, recorded, data_dir=None, name=None):
    """Return the TestSet whose sentences were excluded from the training of a checkpoint.

    checkpoint: its path;  recorded: {'name', 'sha256'} of the test set, from the state of the checkpoint
    name: of another file with the same content; None: the recorded name
    UserError if it is not found, or the content differs.
    """
    name = recorded['name'] if name is None else name
    needs = f'{checkpoint}: needs the test set that was excluded from its training'
    if name not in ('', TATOEBA) and not os.path.exists(name):
        raise UserError(f'{needs}: {name}: no such file; put it back')
    try:
        tests = open_test_set(name, data_dir)
    except UserError as error:
        raise UserError(f'{needs}: {error}') from error
    if tests.sha256 != recorded['sha256']:
        raise UserError(f'{needs}: {tests.path}: expected SHA-256 {recorded["sha256"][:12]}... of the text, got '
                        f'{tests.sha256[:12]}...; put the former file back')
    return tests
