"""Who translates a batch of the server: its own process, or others.

A server whose own process also translates stops reading requests while Python prepares the steps of the search, and the
other way round.  So it starts processes, and sends them batches.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pyops import backend
from pyops.serve.api import encoded
from pyops.text.decoding import Search
from pyops.text.processes import Process
from pyops.text.translator import Translator


class Answers(NamedTuple):
    """The translations of a batch.   texts: the translations of each text as JSON (api.encoded)
    source_tokens, output_tokens: the numbers of tokens of the texts, and of their best translations"""
    texts: list[str]
    source_tokens: int
    output_tokens: int


class Worker(Protocol):
    """Translates one batch at a time.  Any exception means that the batch was not translated."""

    def __call__(self, texts: Sequence[str], search: Search, alignments: bool) -> Answers: ...

    def close(self) -> None: ...


def answers(translator: Translator, texts: Sequence[str], search: Search, alignments: bool) -> Answers:
    """Translate a batch."""
    # Without batch_size: several threads translate a part of the batch each.
    found = translator.translations(texts, search.beam, search.nbest, search.length_penalty, search.max_len,
                                    alignments=alignments)
    return Answers([encoded(of_text) for of_text in found], sum(len(best.source) for best, *_ in found),
                   sum(len(best.tokens) for best, *_ in found))


class Local:
    """A worker in this process.   threads: of the kernels; None: all cores"""

    def __init__(self, translator: Translator, threads: int | None = None) -> None:
        self._translator, self._threads = translator, threads

    def __call__(self, texts: Sequence[str], search: Search, alignments: bool) -> Answers:
        if self._threads:
            backend.set_threads(self._threads)              # OpenMP has a number for each thread that calls it
        return answers(self._translator, texts, search, alignments)

    def close(self) -> None:
        pass


class Remote:
    """A worker in a process of its own."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def __call__(self, texts: Sequence[str], search: Search, alignments: bool) -> Answers:
        found = self.process(answers, list(texts), search, alignments)
        assert isinstance(found, Answers)
        return found

    def close(self) -> None:
        self.process.close()
